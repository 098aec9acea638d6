//! `pleach train --scheme hybrid`: ranks that divide the layers of the network inside of groups.

use pleach::Group;
use pleach_training::{Hybrid, HybridError, Learner as _, Scheme, Sgd, Trained, Trainer};

use super::Arguments;
use super::learner::DigitReader;
use crate::cli::{CommandError, progress};

/// Trains in so many groups; `None`: in the predicted number. The parameters are those of the
/// network, and the bytes are also those of activations.
pub(crate) fn train(
    arguments: &Arguments,
    group: &Group,
    groups: Option<u32>,
    reader: &DigitReader<'_>,
    (learning_rate, momentum): (f32, f32),
) -> Result<Trained, CommandError> {
    let failed = |error: HybridError| match error {
        HybridError::Groups { .. } | HybridError::Plan(_) => CommandError::usage(error),
        error => CommandError::failed(error),
    };
    let training = &arguments.training;
    let mut hybrid = Hybrid::new(group, reader.network(), groups, training.batch).map_err(failed)?;
    let (across, layout) = (hybrid.across().clone(), hybrid.layout());
    let (rank, ranks) = (group.rank(), group.world_size());
    let steps = training.steps(arguments.epochs, reader.images(), ranks);
    let trainer =
        Trainer::new(&across, &gradients_averaged(), &layout, steps).map_err(CommandError::failed)?;
    let mut trainer = trainer
        .checked()
        .comparing("the hash of the data and the batch", reader.hash())
        .comparing("the seed", training.seed)
        .comparing("the bits of the learning rate", learning_rate.to_bits().into())
        .comparing("the bits of the momentum", momentum.to_bits().into());
    trainer.parameters_mut().copy_from_slice(&hybrid.shard(&reader.initial()));
    let mut sgd = Sgd::new(layout.parameters(), learning_rate, momentum);
    let bar = progress::bar("training", steps, rank == 0);
    while let Some(mut step) = trainer.step().map_err(CommandError::failed)? {
        let number = step.number();
        let (shard, gradient) = step.vectors().map_err(CommandError::failed)?;
        let loss = hybrid.gradient(shard, &mut reader.samples(rank, number), gradient).map_err(failed)?;
        arguments.skew.sleep(rank, ranks, number);
        step.update(|shard, gradient| sgd.step(shard, gradient), loss).map_err(CommandError::failed)?;
        bar.inc(1);
    }
    bar.finish_and_clear();
    let mut trained = trainer.finish().map_err(CommandError::failed)?;
    let (whole, are_equal) = hybrid.whole(&trained.parameters).map_err(failed)?;
    let mut parameters = group.buffer(whole.len()).map_err(CommandError::failed)?;
    parameters.copy_from_slice(&whole);
    trained.progress.bytes += trained.progress.steps * hybrid.activation_bytes();
    let parameters_equal = trained.parameters_equal && are_equal;
    Ok(Trained { parameters, parameters_equal, ..trained })
}

/// By which shards are trained.
fn gradients_averaged() -> Scheme {
    let [sync, ..] = Scheme::ALL;
    sync
}

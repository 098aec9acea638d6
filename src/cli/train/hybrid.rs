//! `pleach train --scheme hybrid`: ranks that divide the layers of the network inside of groups.

use std::path::PathBuf;
use std::sync::Mutex;

use pleach::Group;
use pleach_training::{Hybrid, HybridError, Learner as _, Scheme, Sgd, Trained, Trainer};

use super::Arguments;
use super::learner::DigitReader;
use super::scheme::lock;
use crate::cli::{CommandError, progress};

/// Trains in so many groups; `None`: in the predicted number. The parameters are those of the
/// network, and the bytes are also those of activations. Returns the newest checkpoint, too.
pub(crate) fn train(
    arguments: &Arguments,
    group: &Group,
    groups: Option<u32>,
    reader: &DigitReader<'_>,
    (learning_rate, momentum): (f32, f32),
) -> Result<(Trained, Option<PathBuf>), CommandError> {
    let failed = |error: HybridError| match error {
        HybridError::Groups { .. } | HybridError::Plan(_) => CommandError::usage(error),
        error => CommandError::failed(error),
    };
    let training = &arguments.training;
    let mut hybrid = Hybrid::new(group, reader.network(), groups, training.batch).map_err(failed)?;
    let (across, layout) = (hybrid.across().clone(), hybrid.layout());
    let (rank, ranks) = (group.rank(), group.world_size());
    let steps = training.steps(arguments.epochs(), reader.images(), ranks);
    let trainer =
        Trainer::new(&across, &gradients_averaged(), &layout, steps).map_err(CommandError::failed)?;
    let trainer = trainer
        .checked()
        .comparing("the hash of the data and the batch", reader.hash())
        .comparing("the seed", training.seed)
        .comparing("the bits of the learning rate", learning_rate.to_bits().into())
        .comparing("the bits of the momentum", momentum.to_bits().into());
    let sgd = Mutex::new(Sgd::new(layout.parameters(), learning_rate, momentum));
    let (keeping, initial) = (&arguments.keeping, hybrid.shard(&reader.initial()));
    let begun = keeping.begin(trainer, &sgd, rank, &initial, Some(&hybrid));
    let mut trainer = begun.map_err(CommandError::failed)?;
    let first = trainer.next_step();
    let bar = progress::bar("training", steps - first, rank == 0);
    let mut kept = None;
    loop {
        let saved = keeping.save(&mut trainer, &sgd, first, steps, Some(&hybrid));
        kept = saved.map_err(CommandError::failed)?.or(kept);
        let Some(mut step) = trainer.step().map_err(CommandError::failed)? else { break };
        let number = step.number();
        let (shard, gradient) = step.vectors().map_err(CommandError::failed)?;
        let batch = reader.batch(rank, number);
        let loss = hybrid.gradient(shard, &mut batch.samples(), gradient).map_err(failed)?;
        arguments.skew.sleep(rank, ranks, number);
        step.update(|shard, gradient| lock(&sgd).step(shard, gradient), loss)
            .map_err(CommandError::failed)?;
        bar.inc(1);
    }
    bar.finish_and_clear();
    let mut trained = trainer.finish().map_err(CommandError::failed)?;
    let (whole, are_equal) = hybrid.whole(&trained.parameters).map_err(failed)?;
    let mut parameters = group.buffer(whole.len()).map_err(CommandError::failed)?;
    parameters.copy_from_slice(&whole);
    trained.progress.bytes += trained.progress.steps * hybrid.activation_bytes();
    let parameters_equal = trained.parameters_equal && are_equal;
    Ok((Trained { parameters, parameters_equal, ..trained }, kept))
}

/// By which shards are trained.
fn gradients_averaged() -> Scheme {
    let [sync, ..] = Scheme::ALL;
    sync
}

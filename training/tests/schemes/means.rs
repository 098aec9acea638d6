//! Means and states that ranks take together seldom, one of them much slower than the others: no
//! rank waits for ever for one that is there already.

use std::thread;
use std::time::Duration;

use pleach_collectives::{Buffer, Group, Operation, ReduceOp, Reproducible};
use pleach_training::{Learner, Sgd, TrainError, Trained, Trainer};
use pleach_transport::rendezvous::Fabric;

use super::model::{Linear, STEPS, scheme};
use super::ranks;
use super::real::{ASYNCHRONOUS, DETERMINISTIC};

const RANKS: u32 = 4;

/// Steps between two means: more than a rank of `bap:distance=9` may push that a copy lacks.
const RARE: u64 = 10;

/// A mean of all ranks' parameters, with those of this rank before it.
type Mean = (Vec<f32>, Buffer<f32>);

/// Much longer than a step of another rank takes.
#[expect(clippy::disallowed_methods, reason = "a rank that computes")]
fn compute_for_a_moment() {
    thread::sleep(Duration::from_millis(3));
}

/// Trains; now and then the ranks take the mean of their parameters, or their states.
fn train(group: &Group, text: &str) -> Result<(Trained, Vec<Mean>), TrainError> {
    let (layout, scheme) = (Linear.layout(), scheme(text));
    let mut trainer = Trainer::new(group, &scheme, &layout, STEPS)?.checked();
    trainer.parameters_mut().copy_from_slice(&Linear.initial());
    let mut sgd = Sgd::new(layout.parameters(), 0.005, 0.0);
    let mut means = Vec::new();
    loop {
        let number = trainer.next_step();
        if number % RARE == RARE - 1 {
            let own = trainer.parameters_mut().to_vec();
            means.push((own, trainer.averaged()?));
        }
        if number == STEPS - 2 {
            trainer.rank_state(&[])?;
        }
        let Some(mut step) = trainer.step()? else { break };
        let (parameters, gradient) = step.vectors()?;
        let loss = Linear.gradient(group.rank(), number, parameters, gradient);
        if group.rank() == 1 {
            compute_for_a_moment();
        }
        step.update(|parameters, gradient| sgd.step(parameters, gradient), loss)?;
    }
    Ok((trainer.finish()?, means))
}

#[test]
fn means_that_are_rare_keep_no_rank_waiting_for_ever() {
    // Ranks of `elastic-bsp` take means at barriers alone.
    let schemes = DETERMINISTIC.into_iter().chain(ASYNCHRONOUS);
    let schemes = schemes.filter(|text| !text.starts_with("elastic-bsp")).chain(["bap:distance=3"]);
    for text in schemes {
        let options = |options: &mut pleach_collectives::Options| {
            options.reproducible = Reproducible::PerWorldSize;
        };
        ranks::with_group(Fabric::Shm, RANKS, options, |group| {
            let (trained, means) = train(&group, text).unwrap_or_else(|error| panic!("{text}: {error}"));
            assert_eq!(means.len() as u64, STEPS / RARE, "{text}");
            for (own, mean) in means {
                let mut expected = own;
                group.run(Operation::all_reduce(&mut expected, ReduceOp::Avg)).expect("averages");
                assert_eq!(mean[..], expected, "{text}");
            }
            assert!(trained.guarantee_held && trained.parameters_equal, "{text}");
            assert_eq!(trained.progress.steps, STEPS, "{text}");
            group.close().expect("all ranks close");
        });
    }
}

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
fn ranks_of_elastic_bsp_have_a_mean_at_barriers_and_are_refused_one_elsewhere() {
    let options = |options: &mut pleach_collectives::Options| {
        options.reproducible = Reproducible::PerWorldSize;
    };
    let refused: u64 = ranks::with_group(Fabric::Shm, RANKS, options, |group| {
        let (layout, scheme) = (Linear.layout(), scheme("elastic-bsp:lookahead=200"));
        let mut trainer = Trainer::new(&group, &scheme, &layout, STEPS).expect("has memory");
        trainer.parameters_mut().copy_from_slice(&Linear.initial());
        let mut sgd = Sgd::new(layout.parameters(), 0.005, 0.0);
        let (mut at_barriers, mut elsewhere) = (0, 0);
        loop {
            let own = trainer.parameters_mut().to_vec();
            let mean = trainer.averaged();
            match (trainer.progress().staleness.next(), mean) {
                (0, Ok(mean)) => {
                    // Behind the last step this rank has come to its last barrier only now.
                    assert!(mean[..] == own[..] || trainer.next_step() == STEPS);
                    assert_eq!(trainer.progress().spread, Some(0.0));
                    at_barriers += 1;
                }
                (alone, Err(TrainError::NoCommonPlace { steps })) if alone > 0 => {
                    assert_eq!(steps, alone);
                    elsewhere += 1;
                }
                (alone, other) => panic!("{alone} steps behind the barrier: {:?}", other.map(drop)),
            }
            let Some(mut step) = trainer.step().expect("goes on") else { break };
            let number = step.number();
            let (parameters, gradient) = step.vectors().expect("no bucket is ready");
            let loss = Linear.gradient(group.rank(), number, parameters, gradient);
            compute_for_a_moment();
            if group.rank() == 1 {
                (0..9).for_each(|_| compute_for_a_moment());
            }
            step.update(|parameters, gradient| sgd.step(parameters, gradient), loss).expect("goes on");
        }
        let trained = trainer.finish().expect("ends");
        assert!(trained.guarantee_held && trained.parameters_equal);
        group.close().expect("all ranks close");
        assert_eq!(at_barriers + elsewhere, STEPS + 1);
        // A barrier follows the first step.
        assert!(at_barriers >= 2, "{at_barriers}");
        elsewhere
    })
    .into_iter()
    .sum();
    assert!(refused > 0, "a rank that takes ten times as long makes fewer steps between barriers");
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

//! A trainer whose memory is lent to a program in another language: addresses, means under way, and
//! the end.

use std::thread;
use std::time::Duration;

use pleach_collectives::{Buffer, Group, Operation, ReduceOp, Reproducible};
use pleach_training::{Learner, Sgd, TrainError, Trained, Trainer};
use pleach_transport::rendezvous::Fabric;

use super::model::{Linear, STEPS, scheme};
use super::ranks;

const RANKS: u32 = 4;

/// A mean of all ranks' parameters under way, with the parameters of this rank there.
type Mean = (Vec<f32>, Buffer<f32>);

/// Where the vectors begin.
fn addresses(trainer: &mut Trainer) -> Option<[usize; 2]> {
    trainer.memory().map(|both| both.map(|memory| memory.address()))
}

/// Long enough for rounds that do not wait for a rank.
#[expect(clippy::disallowed_methods, reason = "a rank that is late")]
fn be_late() {
    thread::sleep(Duration::from_millis(3));
}

/// Trains; before each fifth step the ranks take the mean of their parameters, if they do.
fn train(group: &Group, text: &str, takes_means: bool) -> Result<(Trained, Vec<Mean>), TrainError> {
    let layout = Linear.layout();
    let mut trainer = Trainer::new(group, &scheme(text), &layout, u64::MAX)?.checked();
    trainer.parameters_mut().copy_from_slice(&Linear.initial());
    let begins = addresses(&mut trainer);
    let mut sgd = Sgd::new(layout.parameters(), 0.005, 0.0);
    let mut means = Vec::new();
    for number in 0..STEPS {
        if takes_means && number % 5 == 4 {
            let own = trainer.parameters_mut().to_vec();
            means.push((own.clone(), trainer.averaged()?));
            // With `bap` this rank has taken a newer copy.
            if text != "bap" {
                assert_eq!(trainer.parameters_mut(), own, "{text}: the training is as before");
            }
        }
        let mut step = trainer.step()?.expect("there is no last step");
        let (parameters, gradient) = step.vectors()?;
        let loss = Linear.gradient(group.rank(), number, parameters, gradient);
        if group.rank() == 1 && number < 6 {
            be_late();
        }
        step.update(|parameters, gradient| sgd.step(parameters, gradient), loss)?;
        assert_eq!(addresses(&mut trainer), begins, "{text}: the vectors stay where they are");
        assert_eq!(trainer.progress().steps, number + 1);
    }
    let trained = trainer.end().map_err(|(error, _)| error)?;
    let vectors = [&trained.parameters, &trained.gradient].map(|vector| vector.as_ptr().addr());
    assert_eq!(Some(vectors), begins, "{text}");
    Ok((trained, means))
}

#[test]
fn means_under_way_are_those_of_all_ranks_and_change_no_bit() {
    // Where ranks do not wait for each other the result depends on times.
    const BY_TIMES: [&str; 7] = [
        "gossip",
        "easgd:every=3",
        "ssp:staleness=2",
        "bap",
        "eager",
        "eager:activation=quorum:3",
        "bidmach:threshold=0.5",
    ];
    let is_deterministic = |text: &str| !BY_TIMES.contains(&text);
    let steady = ["sync", "local-sgd:every=3", "diloco:every=4", "bsp", "bidmach", "eager:activation=all"];
    for text in steady.into_iter().chain(BY_TIMES) {
        let run = |takes_means| {
            let reproducible = |options: &mut pleach_collectives::Options| {
                options.reproducible = Reproducible::PerWorldSize;
            };
            ranks::with_group(Fabric::Shm, RANKS, reproducible, |group| {
                let (trained, means) = train(&group, text, takes_means).expect("trains");
                for (own, mean) in &means {
                    let mut expected = own.clone();
                    group.run(Operation::all_reduce(&mut expected, ReduceOp::Avg)).expect("averages");
                    assert_eq!(&mean[..], expected, "{text}");
                }
                assert!(trained.guarantee_held && trained.parameters_equal, "{text}");
                assert_eq!(means.len(), if takes_means { 5 } else { 0 });
                group.close().expect("all ranks close");
                trained.parameters.to_vec()
            })
        };
        let (with, without) = (run(true), run(false));
        assert!(with.iter().all(|parameters| *parameters == with[0]), "{text}");
        assert!(!is_deterministic(text) || with == without, "{text}");
    }
}

#[test]
fn a_mean_while_a_bucket_is_averaged_is_refused() {
    ranks::with_group(
        Fabric::Shm,
        2,
        |_| {},
        |group| {
            let layout = Linear.layout();
            let mut trainer =
                Trainer::new(&group, &scheme("sync:bucket=16"), &layout, 1).expect("has memory");
            trainer.step().expect("goes on").expect("there is a step").ready(0).expect("goes on");
            let refused = trainer.averaged().expect_err("a bucket is under way");
            assert!(matches!(refused, TrainError::UnderWay { bucket: 0, step: 0 }), "{refused}");
            assert_eq!(addresses(&mut trainer), None);
            let step = trainer.step().expect("goes on").expect("there is a step");
            step.update(|_, _| {}, 1.0).expect("goes on");
            assert!(trainer.finish().expect("ends").parameters_equal);
            group.close().expect("all ranks close");
        },
    );
}

#[test]
fn memory_is_there_after_an_end_that_fails() {
    let both = |group: Group| {
        let layout = Linear.layout();
        let mut trainer = Trainer::new(&group, &scheme("sync"), &layout, 9).expect("has memory");
        let begins = addresses(&mut trainer);
        assert!(begins.is_some());
        let begun = trainer.step().map(|step| step.is_some());
        if group.rank() == 1 {
            assert!(begun.expect("goes on"));
            return trainer.abort();
        }
        // The abort may have come that early.
        let (error, mut trainer) = trainer.end().expect_err("the other rank has aborted");
        assert!(error.to_string().contains("rank 1 aborted"), "{error}");
        assert_eq!(addresses(&mut trainer), begins);
        assert_eq!(trainer.parameters_mut().len(), layout.parameters());
    };
    ranks::with_group(Fabric::Shm, 2, |_| {}, both);
}

#[test]
fn a_step_after_an_abort_is_an_error_also_where_rounds_are_gone() {
    for text in ["eager", "bidmach", "sync", "gossip"] {
        let both = |group: Group| {
            let layout = Linear.layout();
            let mut trainer = Trainer::new(&group, &scheme(text), &layout, 9).expect("has memory");
            // The abort may come while the other rank still begins.
            let begun = trainer.step().map(|step| step.is_some());
            if group.rank() == 0 {
                assert!(begun.expect("begins"), "{text}");
                trainer.abort();
            }
            let mut go_on = || -> Result<(), TrainError> {
                while let Some(step) = trainer.step()? {
                    step.update(|_, _| {}, 1.0)?;
                }
                trainer.averaged().map(drop)
            };
            assert!(go_on().is_err(), "{text}: rank 0 has aborted");
        };
        ranks::with_group(Fabric::Shm, 2, |_| {}, both);
    }
}

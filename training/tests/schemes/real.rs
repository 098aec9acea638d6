//! Schemes on the ranks of a group, over shared memory and sockets.

use pleach_collectives::{Group, Options, Reproducible};
use pleach_training::simulation::Settings;
use pleach_training::{Layout, Learner, PolicyError, Sgd, TrainError, Trained, Trainer};
use pleach_transport::rendezvous::{Fabric, World};

use super::model::{Linear, STEPS, scheme, settings, simulate};
use super::ranks;

const RANKS: u32 = 4;

/// Runs `body` as every rank of a group that adds in the order of ranks.
fn with_group<T: Send>(fabric: Fabric, body: impl Fn(Group) -> T + Sync) -> Vec<T> {
    ranks::with_group(fabric, RANKS, |options| options.reproducible = Reproducible::PerWorldSize, body)
}

/// Trains the model as the simulation does. `is_overlapped`: buckets are reported one by one.
fn train(group: &Group, text: &str, settings: &Settings, is_overlapped: bool) -> Result<Trained, TrainError> {
    let layout = Linear.layout();
    let mut trainer = Trainer::new(group, &scheme(text), &layout, settings.steps)?.checked();
    trainer.parameters_mut().copy_from_slice(&Linear.initial());
    let mut sgd = Sgd::new(layout.parameters(), settings.learning_rate, settings.momentum);
    while let Some(mut step) = trainer.step()? {
        let number = step.number();
        let (parameters, gradient) = step.vectors()?;
        let loss = Linear.gradient(group.rank(), number, parameters, gradient);
        if is_overlapped {
            let buckets = step.buckets().len();
            // Ranks report in different orders.
            let first = group.rank() as usize;
            for bucket in 0..buckets {
                step.ready((bucket + first) % buckets)?;
            }
        }
        step.update(|parameters, gradient| sgd.step(parameters, gradient), loss)?;
    }
    trainer.finish()
}

#[test]
fn real_ranks_end_with_the_bits_of_the_simulation() {
    let settings = Settings { momentum: 0.9, learning_rate: 0.005, ..settings(RANKS) };
    for fabric in [Fabric::Shm, Fabric::Tcp] {
        for text in ["sync", "sync:bucket=16", "local-sgd:every=3,warmup=4", "diloco:every=4"] {
            let simulated = simulate(text, &settings);
            for is_overlapped in [false, true] {
                let all = with_group(fabric, |group| {
                    let trained = train(&group, text, &settings, is_overlapped).expect("trains");
                    group.close().expect("all ranks close");
                    trained
                });
                for trained in &all {
                    let bits = |all: &[f32]| all.iter().map(|element| element.to_bits()).collect::<Vec<_>>();
                    assert_eq!(bits(&trained.parameters), bits(&simulated.parameters), "{text}, {fabric:?}");
                    assert!(trained.guarantee_held && trained.parameters_equal, "{text}, {fabric:?}");
                    assert_eq!((trained.steps, trained.bytes), (STEPS, simulated.bytes_per_rank), "{text}");
                    assert_eq!(trained.staleness.most(), simulated.staleness_max, "{text}");
                    assert!(trained.agreements >= 4 && trained.waiting <= trained.time, "{text}");
                    assert!(trained.communicating <= trained.time, "{text}");
                }
            }
        }
    }
}

#[test]
fn all_ranks_begin_with_the_parameters_of_rank_0() {
    let all = with_group(Fabric::Shm, |group| {
        let mut trainer = Trainer::new(&group, &scheme("sync"), &Layout::of(&[5]), 0).expect("has memory");
        trainer.parameters_mut().fill(group.rank() as f32 + 1.0);
        assert!(trainer.step().expect("begins").is_none(), "there are no steps");
        trainer.finish().expect("ends")
    });
    for trained in all {
        assert!(trained.parameters_equal && trained.parameters.iter().all(|element| *element == 1.0));
    }
}

#[test]
fn ranks_that_train_differently_are_told_of_both_before_the_first_step() {
    let cases = [
        (["sync", "local-sgd:every=2"], [5, 5], [9, 9], "the scheme of rank"),
        (["sync", "sync"], [5, 6], [9, 9], "the hash of the layout of rank"),
        (["sync", "sync"], [5, 5], [9, 8], "the number of steps of rank"),
    ];
    for (schemes, layers, steps, part) in cases {
        let all = with_group(Fabric::Shm, |group| {
            let kind = usize::from(group.rank() == 2);
            let layout = Layout::of(&[layers[kind]]);
            let trainer = Trainer::new(&group, &scheme(schemes[kind]), &layout, steps[kind]);
            let error = trainer.expect("has memory").step().err().expect("the ranks differ").to_string();
            (group.rank(), error)
        });
        for (rank, error) in all {
            let other = if rank == 2 { 0 } else { 2 };
            assert!(error.contains(part), "{error}");
            assert!(
                error.contains(&format!("rank {rank} ")) && error.contains(&format!("rank {other} ")),
                "{error}"
            );
        }
    }
}

#[test]
fn a_loss_that_is_not_finite_ends_the_training_on_all_ranks() {
    let all = with_group(Fabric::Shm, |group| {
        let mut trainer = Trainer::new(&group, &scheme("sync"), &Layout::of(&[5]), 9).expect("has memory");
        loop {
            let step = trainer.step().expect("no rank fails between steps").expect("it is not the last");
            let is_bad = group.rank() == 1 && step.number() == 2;
            if let Err(error) = step.update(|_, _| {}, if is_bad { f32::NAN } else { 1.0 }) {
                return (group.rank(), error);
            }
        }
    });
    for (rank, error) in all {
        match (rank, &error) {
            (1, TrainError::Loss { rank: 1, step: 2, loss }) => assert!(loss.is_nan()),
            (0 | 2 | 3, TrainError::Collective(_)) => {
                assert!(error.to_string().contains("rank 1"), "{error}")
            }
            _ => panic!("rank {rank}: {error}"),
        }
    }
}

#[test]
fn buckets_that_are_reported_twice_or_written_late_are_errors() {
    let all = with_group(Fabric::Shm, |group| {
        let scheme = scheme("sync:bucket=8");
        let mut trainer = Trainer::new(&group, &scheme, &Layout::of(&[4]), 1).expect("has memory");
        let mut step = trainer.step().expect("begins").expect("has a step");
        assert_eq!(step.buckets(), [2..4, 0..2]);
        step.ready(0).expect("is computed");
        let errors = [
            step.ready(0).expect_err("is ready").to_string(),
            step.ready(7).expect_err("is none").to_string(),
            step.vectors().expect_err("a part is averaged").to_string(),
            step.bucket(0).expect_err("it is averaged").to_string(),
        ];
        let no_bucket = step.bucket(7).expect_err("is none");
        assert!(matches!(no_bucket, TrainError::Policy(PolicyError::Bucket { bucket: 7, step: 0 })));
        let (parameters, gradient) = step.bucket(1).expect("is not ready");
        assert_eq!((parameters.len(), gradient.len()), (4, 2));
        gradient.fill(3.0);
        step.update(|parameters, gradient| parameters.copy_from_slice(gradient), 0.0).expect("updates");
        let trained = trainer.finish().expect("ends");
        assert_eq!(trained.parameters[..], [3.0, 3.0, 0.0, 0.0]);
        errors
    });
    for errors in all {
        assert!(errors[0].contains("bucket 0 became ready in step 0"), "{errors:?}");
        assert!(errors[1].contains("bucket 7"), "{errors:?}");
        assert!(errors[2].contains("bucket 0") && errors[3].contains("bucket 0"), "{errors:?}");
    }
}

#[test]
fn a_model_without_parameters_is_refused() {
    let group = Group::join(&Options::new(World::alone())).expect("a rank alone joins");
    let refused = Trainer::new(&group, &scheme("sync"), &Layout::of(&[]), 1);
    assert!(matches!(refused.err(), Some(TrainError::NoParameters)));
}

//! Schemes on the ranks of a group, over shared memory and sockets.

use pleach_collectives::{Group, Options, Reproducible};
use pleach_training::simulation::Settings;
use pleach_training::{Layout, Learner, PolicyError, Sgd, TrainError, Trained, Trainer};
use pleach_transport::rendezvous::{Fabric, World};

use super::meeting::Meeting;
use super::model::{Linear, STEPS, scheme, settings, simulate};
use super::ranks;

pub(crate) const RANKS: u32 = 4;

/// Runs `body` as every rank of a group that adds in the order of ranks.
pub(crate) fn with_group<T: Send>(fabric: Fabric, body: impl Fn(Group) -> T + Sync) -> Vec<T> {
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

/// Schemes whose result does not depend on times.
pub(crate) const DETERMINISTIC: [&str; 27] = [
    "sync",
    "sync:bucket=16",
    "sync:bucket=24,compress=bf16",
    "sync:bucket=24,compress=f8",
    "local-sgd:every=3,warmup=4,compress=f8",
    "diloco:every=4,compress=f8",
    "diloco:every=6,fragments=3,delay=2,mix=0.5",
    "diloco:every=4,delay=3",
    "diloco:every=5,fragments=5,compress=bf16",
    "diloco:every=5,fragments=layers,delay=1",
    "local-sgd:every=3,warmup=4",
    "diloco:every=4",
    "gossip:direction=push,peer=butterfly",
    "gossip:direction=push,peer=ring,every=2",
    "gossip:direction=push-sum,peer=butterfly,every=2",
    "gossip:direction=push-sum,peer=ring",
    "easgd:every=3,mode=sync",
    "easgd:every=3,mode=round-robin",
    "bsp",
    "elastic-bsp:lookahead=1",
    "ssp:staleness=0",
    "eager:activation=all,every=4",
    "eager:activation=quorum:4,late=drop,divisor=contributors,every=7",
    "bidmach",
    "bidmach:every=2,rate=0.5,dimensions=1",
    "eamsgd:every=2,mode=sync,momentum=0.5",
    "eamsgd:every=3,mode=round-robin,momentum=0.5",
];

/// Schemes whose result depends on times.
pub(crate) const ASYNCHRONOUS: [&str; 21] = [
    "gossip",
    "gossip:peer=butterfly,every=2",
    "gossip:direction=push",
    "gossip:direction=push-sum",
    "easgd:every=1",
    "easgd:every=3",
    "eamsgd:every=3,momentum=0.5",
    "downpour:every=3",
    "ssp",
    "ssp:staleness=1",
    "gossip:reads=torn",
    "dssp:low=1,high=4",
    "bap:distance=9",
    "bap",
    "asp",
    "eager",
    "eager:activation=solo,every=6",
    "eager:activation=solo,late=drop,divisor=contributors",
    "eager:activation=quorum:2,late=correct,every=9",
    "bidmach:threshold=0.5",
    "bidmach:dimensions=1,threshold=0.5,every=2",
];

#[test]
fn asynchronous_schemes_end_on_all_ranks_with_what_they_guarantee() {
    let settings = Settings { learning_rate: 0.005, ..settings(RANKS) };
    for fabric in [Fabric::Shm, Fabric::Tcp] {
        for text in ASYNCHRONOUS {
            let all = with_group(fabric, |group| {
                let trained = train(&group, text, &settings, false).expect("trains");
                group.close().expect("all ranks close");
                trained
            });
            for trained in &all {
                assert!(trained.guarantee_held && trained.parameters_equal, "{text}, {fabric:?}");
                let progress = &trained.progress;
                assert!(progress.steps == STEPS && progress.agreements >= 1, "{text}");
                assert!(progress.bytes > 0 && progress.waiting <= progress.time, "{text}");
                let is_distance = |spread: f64| spread.is_finite() && spread >= 0.0;
                assert!(progress.spread.is_some_and(is_distance), "{text}: {progress:?}");
                assert!(trained.parameters.iter().all(|element| element.is_finite()), "{text}");
            }
        }
    }
}

#[test]
fn ranks_wait_at_the_end_for_one_that_takes_much_longer() {
    for text in [
        "gossip",
        "gossip:direction=push-sum",
        "easgd:every=2",
        "downpour:every=2",
        "ssp",
        "bap:distance=9",
        "asp",
        "eager:activation=solo",
        "bidmach:threshold=0.5",
        "elastic-bsp",
    ] {
        let all = with_group(Fabric::Shm, |group| {
            let layout = Linear.layout();
            let mut trainer = Trainer::new(&group, &scheme(text), &layout, 10).expect("has memory");
            while let Some(step) = trainer.step().expect("goes on") {
                if group.rank() == 1 {
                    compute_for_a_moment();
                }
                step.update(|_, _| {}, 1.0).expect("goes on");
            }
            let trained = trainer.finish().expect("ends");
            group.close().expect("all ranks close");
            trained
        });
        assert!(all.iter().all(|trained| trained.guarantee_held && trained.parameters_equal), "{text}");
    }
}

/// A rank that computes.
#[expect(clippy::disallowed_methods, reason = "a rank that computes")]
fn compute_for_a_moment() {
    std::thread::sleep(std::time::Duration::from_millis(20));
}

#[test]
fn a_rank_that_gives_up_ends_an_asynchronous_training_on_all_ranks() {
    for fabric in [Fabric::Shm, Fabric::Tcp] {
        for text in [
            "gossip",
            "gossip:direction=push",
            "easgd:every=2",
            "easgd:every=2,mode=round-robin",
            "ssp",
            "bap:distance=9",
            "asp",
            "eager",
        ] {
            let all = with_group(fabric, |group| {
                let layout = Linear.layout();
                let mut trainer = Trainer::new(&group, &scheme(text), &layout, 50).expect("has memory");
                let error = loop {
                    let step = match trainer.step() {
                        Ok(Some(step)) => step,
                        Ok(None) => break trainer.finish().map(drop).expect_err("rank 2 gives up"),
                        Err(error) => break error,
                    };
                    let is_bad = group.rank() == 2 && step.number() == 5;
                    if let Err(error) = step.update(|_, _| {}, if is_bad { f32::NAN } else { 1.0 }) {
                        break error;
                    }
                };
                (group.rank(), error)
            });
            for (rank, error) in all {
                match (rank, &error) {
                    (2, TrainError::Loss { rank: 2, step: 5, .. }) => {}
                    (0 | 1 | 3, TrainError::Collective(_)) => {
                        assert!(error.to_string().contains("rank 2"), "{text}, {fabric:?}: {error}");
                    }
                    _ => panic!("{text}, {fabric:?}, rank {rank}: {error}"),
                }
            }
        }
    }
}

/// Makes the steps of a rank; rank 3 makes 9.
fn make_steps(rank: u32, trainer: &mut Trainer) -> Result<(), TrainError> {
    while let Some(step) = trainer.step()? {
        if rank == 3 && step.number() == 9 {
            break;
        }
        step.update(|_, _| {}, 1.0)?;
    }
    Ok(())
}

#[test]
fn a_rank_that_stops_without_a_word_is_named_by_those_that_wait_for_it() {
    let stopped = Meeting::new(RANKS as usize);
    let errors = ranks::with_group(
        Fabric::Shm,
        RANKS,
        |options| options.timeout = std::time::Duration::from_secs(4),
        |group| {
            let layout = Linear.layout();
            let scheme = scheme("easgd:every=2");
            let mut trainer = Trainer::new(&group, &scheme, &layout, 20).expect("has memory");
            let made = make_steps(group.rank(), &mut trainer);
            // The program of rank 3 hangs here.
            stopped.wait();
            made.err().map(|error| error.to_string())
        },
    );
    assert_eq!(errors[3], None);
    for error in errors[..3].iter().map(|error| error.as_deref().expect("rank 3 has stopped")) {
        assert!(
            error.contains("for rank 3: a word of its training") || error.contains("for rank 3: a credit"),
            "{error}"
        );
    }
}

#[test]
fn a_rank_that_leaves_is_named_by_those_that_need_it() {
    for text in [
        "gossip",
        "gossip:direction=push,peer=ring",
        "easgd:every=2",
        "ssp",
        "dssp:low=1,high=3",
        "bap:distance=9",
        "eager",
        "elastic-bsp",
    ] {
        let errors = ranks::with_group(
            Fabric::Shm,
            RANKS,
            |_| {},
            |group| {
                let layout = Linear.layout();
                let mut trainer = Trainer::new(&group, &scheme(text), &layout, 20).expect("has memory");
                let made = make_steps(group.rank(), &mut trainer);
                let ended =
                    if group.rank() == 3 { made } else { made.and_then(|()| trainer.finish().map(drop)) };
                ended.err().map(|error| error.to_string())
            },
        );
        assert_eq!(errors[3], None);
        let errors: Vec<&str> =
            errors[..3].iter().map(|error| error.as_deref().expect("rank 3 has left")).collect();
        // Windows have a group of their own. There a rank may wait for one that has gone because it
        // found in the other group that rank 3 had left.
        let names = |rank: usize| errors[rank].contains("rank 3");
        for error in &errors {
            let left = (0..3).find(|rank| error.contains(&format!("rank {rank} has closed the group")));
            assert!(error.contains("rank 3") || left.is_some_and(names), "{text}: {error}, {errors:?}");
        }
    }
}

#[test]
fn schemes_that_do_not_train_on_so_many_ranks_are_refused_on_all() {
    for (text, part) in [
        ("easgd:moving=1.7,mode=sync", "give moving at most 1.6"),
        ("easgd:moving=4.1", "give moving at most 4"),
        ("easgd:moving=4.1,mode=round-robin", "moving/ranks is 1.025"),
    ] {
        for error in with_group(Fabric::Shm, |group| {
            Trainer::new(&group, &scheme(text), &Layout::of(&[5]), 9).err().expect("is refused").to_string()
        }) {
            assert!(error.contains(part) && error.starts_with("easgd:"), "{error}");
        }
    }
    let group = Group::join(&Options::new(World::alone())).expect("a rank alone joins");
    for text in ["gossip", "easgd:moving=1", "downpour", "gossip:direction=push-sum,peer=butterfly"] {
        let mut trainer = Trainer::new(&group, &scheme(text), &Layout::of(&[5]), 25).expect("has memory");
        while let Some(step) = trainer.step().expect("goes on") {
            step.update(|_, _| {}, 1.0).expect("goes on");
        }
        assert!(trainer.finish().expect("ends").guarantee_held, "{text}");
    }
}

#[test]
fn real_ranks_end_with_the_bits_of_the_simulation() {
    let settings = Settings { momentum: 0.9, learning_rate: 0.005, ..settings(RANKS) };
    for fabric in [Fabric::Shm, Fabric::Tcp] {
        for text in DETERMINISTIC {
            let simulated = simulate(text, &settings);
            for is_overlapped in [false, true] {
                let all = with_group(fabric, |group| {
                    let trained = train(&group, text, &settings, is_overlapped).expect("trains");
                    group.close().expect("all ranks close");
                    trained
                });
                assert_eq!(all[0].progress.bytes, simulated.bytes_per_rank, "{text}");
                for trained in &all {
                    let bits = |all: &[f32]| all.iter().map(|element| element.to_bits()).collect::<Vec<_>>();
                    assert_eq!(bits(&trained.parameters), bits(&simulated.parameters), "{text}, {fabric:?}");
                    assert!(trained.guarantee_held && trained.parameters_equal, "{text}, {fabric:?}");
                    let progress = &trained.progress;
                    assert_eq!(progress.steps, STEPS, "{text}");
                    assert_eq!(progress.staleness.most(), simulated.staleness_max, "{text}");
                    assert!(progress.agreements >= 1 && progress.waiting <= progress.time, "{text}");
                    assert!(progress.communicating <= progress.time, "{text}");
                }
            }
        }
    }
}

#[test]
fn grids_with_holes_end_on_real_ranks_with_the_bits_of_the_simulation() {
    for ranks in [5, 7] {
        let settings = Settings { momentum: 0.9, learning_rate: 0.005, ..settings(ranks) };
        for fabric in [Fabric::Shm, Fabric::Tcp] {
            for text in ["bidmach", "bidmach:every=2,dimensions=3", "bidmach:threshold=0.6"] {
                let adjust = |options: &mut Options| options.reproducible = Reproducible::PerWorldSize;
                let all = ranks::with_group(fabric, ranks, adjust, |group| {
                    let trained = train(&group, text, &settings, false).expect("trains");
                    group.close().expect("all ranks close");
                    trained
                });
                let simulated = simulate(text, &settings);
                for trained in &all {
                    let what = format!("{text}, {fabric:?}, {ranks} ranks");
                    assert!(trained.guarantee_held && trained.parameters_equal, "{what}");
                    // With the threshold it depends on times whose data an average has.
                    assert!(
                        trained.parameters[..] == simulated.parameters[..] || text.contains("threshold"),
                        "{what}"
                    );
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
            (1, TrainError::Loss { rank: 1, step: 2, loss, .. }) => assert!(loss.is_nan()),
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

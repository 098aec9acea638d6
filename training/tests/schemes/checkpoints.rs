//! Checkpoints of real ranks.

use std::path::{Path, PathBuf};
use std::{fs, process};

use pleach_collectives::Group;
use pleach_training::checkpoint::{Checkpoint, CheckpointError};
use pleach_training::simulation::Settings;
use pleach_training::{Layout, Learner, Sgd, TrainError, Trained, Trainer};
use pleach_transport::rendezvous::Fabric;

use super::model::{Linear, STEPS, scheme, settings, simulate};
use super::real::{ASYNCHRONOUS, DETERMINISTIC, RANKS, with_group};

/// The step of the checkpoint: no multiple of the periods in the tests.
const HALF: u64 = 11;

fn world() -> Settings {
    Settings { momentum: 0.9, learning_rate: 0.005, ..settings(RANKS) }
}

/// A folder that is removed at the end.
pub(crate) struct Folder(PathBuf);

impl Folder {
    pub(crate) fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("pleach-train-{name}-{}", process::id()));
        let _ = fs::remove_dir_all(&path);
        Self(path)
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Trains to the end of `steps`, from a checkpoint and to another one before step 11.
fn train(
    group: &Group,
    text: &str,
    steps: u64,
    from: Option<&Path>,
    to: Option<&Path>,
) -> Result<Trained, TrainError> {
    let (layout, settings) = (Linear.layout(), world());
    let mut trainer = Trainer::new(group, &scheme(text), &layout, steps)?.checked();
    let mut sgd = Sgd::new(layout.parameters(), settings.learning_rate, settings.momentum);
    match from {
        None => trainer.parameters_mut().copy_from_slice(&Linear.initial()),
        Some(folder) => {
            let saved = trainer.restore(folder)?;
            sgd.velocity_mut().copy_from_slice(saved.own_vector("velocity").expect("was saved"));
        }
    }
    loop {
        if let Some(folder) = to.filter(|_| trainer.next_step() == HALF) {
            let path = trainer.save(folder, &[("velocity", sgd.velocity())])?;
            assert_eq!(path, folder.join("step-11"));
        }
        let Some(mut step) = trainer.step()? else { break };
        let number = step.number();
        let (parameters, gradient) = step.vectors()?;
        let loss = Linear.gradient(group.rank(), number, parameters, gradient);
        step.update(|parameters, gradient| sgd.step(parameters, gradient), loss)?;
    }
    trainer.finish()
}

/// A training at its beginning, and its optimizer.
fn begun(group: &Group, text: &str) -> (Trainer, Sgd) {
    let (layout, settings) = (Linear.layout(), world());
    let mut trainer = Trainer::new(group, &scheme(text), &layout, STEPS).expect("has memory");
    trainer.parameters_mut().copy_from_slice(&Linear.initial());
    (trainer, Sgd::new(layout.parameters(), settings.learning_rate, settings.momentum))
}

fn trained(fabric: Fabric, text: &str, steps: u64, from: Option<&Path>, to: Option<&Path>) -> Vec<Trained> {
    with_group(fabric, |group| {
        let trained = train(&group, text, steps, from, to).unwrap_or_else(|error| panic!("{text}: {error}"));
        group.close().expect("all ranks close");
        trained
    })
}

#[test]
fn a_real_training_goes_on_where_a_process_saved_it_bit_for_bit() {
    for fabric in [Fabric::Shm, Fabric::Tcp] {
        for text in DETERMINISTIC {
            let folder = Folder::new("bits");
            let whole = simulate(text, &world());
            // The first process ends at the checkpoint.
            trained(fabric, text, HALF, None, Some(&folder.0));
            let all = trained(fabric, text, STEPS, Some(&folder.0), None);
            for trained in &all {
                let bits = |all: &[f32]| all.iter().map(|element| element.to_bits()).collect::<Vec<_>>();
                assert_eq!(bits(&trained.parameters), bits(&whole.parameters), "{text}, {fabric:?}");
                assert!(trained.guarantee_held && trained.parameters_equal, "{text}, {fabric:?}");
                assert_eq!(trained.progress.steps, STEPS - HALF, "{text}");
            }
        }
    }
}

#[test]
fn a_state_before_each_step_changes_no_bit() {
    for text in [
        "eager:activation=all,every=4",
        "eager:activation=quorum:4,late=drop,divisor=contributors,every=7",
        "bidmach",
        "bidmach:every=2,rate=0.5,dimensions=1",
        "bsp",
        "easgd:every=3,mode=round-robin",
    ] {
        let whole = simulate(text, &world());
        let all = with_group(Fabric::Shm, |group| {
            let (mut trainer, mut sgd) = begun(&group, text);
            for number in 0..STEPS {
                trainer.rank_state(&[]).expect("all ranks have one");
                let mut step = trainer.step().expect("goes on").expect("it is not the last");
                let (parameters, gradient) = step.vectors().expect("no bucket is ready");
                let loss = Linear.gradient(group.rank(), number, parameters, gradient);
                step.update(|parameters, gradient| sgd.step(parameters, gradient), loss).expect("goes on");
            }
            let trained = trainer.finish().expect("ends");
            group.close().expect("all ranks close");
            trained
        });
        for trained in all {
            assert_eq!(trained.parameters[..], whole.parameters, "{text}");
        }
    }
}

#[test]
fn asynchronous_schemes_keep_what_they_guarantee_across_a_checkpoint() {
    for fabric in [Fabric::Shm, Fabric::Tcp] {
        for text in ASYNCHRONOUS.into_iter().chain(["elastic-bsp:lookahead=7"]) {
            let folder = Folder::new("asynchronous");
            for (from, to) in [(None, Some(&*folder.0)), (Some(&*folder.0), None)] {
                for trained in trained(fabric, text, STEPS, from, to) {
                    assert!(trained.guarantee_held && trained.parameters_equal, "{text}, {fabric:?}");
                    assert!(trained.parameters.iter().all(|element| element.is_finite()), "{text}");
                }
            }
        }
    }
}

/// The error of each rank that goes on from a checkpoint.
fn refused(text: &str, layout: &Layout, folder: &Path) -> Vec<TrainError> {
    with_group(Fabric::Shm, |group| {
        let mut trainer = Trainer::new(&group, &scheme(text), layout, STEPS).expect("has memory");
        trainer.restore(folder).map(drop).expect_err("is not taken")
    })
}

#[test]
fn checkpoints_of_other_schemes_and_models_are_refused_with_both_values() {
    let folder = Folder::new("other");
    trained(Fabric::Shm, "local-sgd:every=4", STEPS, None, Some(&folder.0));
    for (text, layout, parts) in [
        ("local-sgd:every=5", Linear.layout(), ["local-sgd:every=4", "local-sgd:every=5"]),
        ("local-sgd:every=4", Layout::of(&[11, 7, 4]), ["[11, 7, 3]", "[11, 7, 4]"]),
    ] {
        for error in refused(text, &layout, &folder.0) {
            let error = error.to_string();
            assert!(parts.iter().all(|part| error.contains(part)), "{error}");
        }
    }
    let absent = folder.0.join("absent");
    for error in refused("local-sgd:every=4", &Linear.layout(), &absent) {
        assert!(matches!(&error, TrainError::Checkpoint(CheckpointError::Absent { .. })), "{error}");
    }
}

#[test]
fn a_file_that_is_cut_is_named_by_its_rank_and_no_rank_goes_on() {
    let folder = Folder::new("cut");
    trained(Fabric::Shm, "sync", STEPS, None, Some(&folder.0));
    let file = Checkpoint::newest(&folder.0).expect("was saved").path().join("rank-2.safetensors");
    let bytes = fs::read(&file).expect("was saved");
    fs::write(&file, &bytes[..bytes.len() / 2]).expect("there is space");
    for (rank, error) in (0..).zip(refused("sync", &Linear.layout(), &folder.0)) {
        match (rank, &error) {
            (2, TrainError::Checkpoint(CheckpointError::Cut { path, .. })) => assert_eq!(*path, file),
            (0 | 1 | 3, TrainError::Checkpoint(CheckpointError::Peer { rank: 2, .. })) => {}
            _ => panic!("rank {rank}: {error}"),
        }
    }
}

#[test]
fn another_number_of_ranks_begins_with_the_mean_parameters() {
    let folder = Folder::new("world");
    trained(Fabric::Shm, "gossip", STEPS, None, Some(&folder.0));
    let mean = Checkpoint::newest(&folder.0).expect("was saved").mean_parameters().expect("is whole");
    let all = super::ranks::with_group(
        Fabric::Shm,
        2,
        |_| {},
        |group| {
            let mut trainer = Trainer::new(&group, &scheme("sync"), &Linear.layout(), 1).expect("has memory");
            let from = trainer.restore_parameters(&folder.0).expect("has the same layers");
            assert_eq!((from.ranks(), from.manifest().step, trainer.next_step()), (4, HALF, 0));
            let mut trainer =
                Trainer::new(&group, &scheme("gossip"), &Linear.layout(), 0).expect("has memory");
            let error = trainer.restore(&folder.0).map(drop).expect_err("is of four ranks");
            assert!(
                matches!(&error, TrainError::Checkpoint(CheckpointError::World { theirs: 4, own: 2, .. })),
                "{error}"
            );
            trainer.restore_parameters(&folder.0).expect("has the same layers");
            trainer.finish().expect("ends").parameters.to_vec()
        },
    );
    assert!(all.iter().flatten().all(|element| element.is_finite()));
    for parameters in all {
        // At the end of a gossip the parameters of two ranks are averaged, which are the same.
        assert_eq!(parameters, mean);
    }
}

#[test]
fn a_checkpoint_that_fails_leaves_the_training_as_it_was() {
    let folder = Folder::new("failed");
    fs::create_dir_all(&folder.0).expect("there is space");
    let file = folder.0.join("no-folder");
    fs::write(&file, "").expect("there is space");
    for text in ["diloco:every=4", "gossip:direction=push-sum,peer=ring", "bsp"] {
        let whole = simulate(text, &world());
        let all = with_group(Fabric::Shm, |group| {
            let (mut trainer, mut sgd) = begun(&group, text);
            let mut errors = Vec::new();
            loop {
                if trainer.next_step() == HALF {
                    errors.push(trainer.save(&file, &[]).expect_err("is no folder"));
                }
                let Some(mut step) = trainer.step().expect("goes on") else { break };
                let number = step.number();
                let (parameters, gradient) = step.vectors().expect("no bucket is ready");
                let loss = Linear.gradient(group.rank(), number, parameters, gradient);
                step.update(|parameters, gradient| sgd.step(parameters, gradient), loss).expect("goes on");
            }
            let ended = trainer.save(&file, &[]).expect_err("the training has ended");
            assert!(matches!(ended, TrainError::Checkpoint(CheckpointError::Ended)), "{ended}");
            let trained = trainer.finish().expect("ends");
            group.close().expect("all ranks close");
            (errors.pop().expect("one failed").to_string(), trained)
        });
        for (rank, (error, trained)) in all.iter().enumerate() {
            let part = if rank == 0 { "no-folder" } else { "rank 0 failed" };
            assert!(error.contains(part), "{error}");
            assert_eq!(trained.parameters[..], whole.parameters, "{text}");
        }
    }
}

#[test]
fn a_loss_that_is_not_finite_names_the_last_checkpoint_which_is_kept() {
    let folder = Folder::new("loss");
    let all = with_group(Fabric::Shm, |group| {
        let scheme = scheme("easgd:every=2");
        let mut trainer = Trainer::new(&group, &scheme, &Linear.layout(), STEPS).expect("has memory");
        loop {
            // Rank 1 may end the group while another rank waits for the end of the checkpoint.
            if trainer.next_step() == HALF
                && let Err(error) = trainer.save(&folder.0, &[])
            {
                return (group.rank(), error);
            }
            let step = match trainer.step() {
                Ok(step) => step.expect("it is not the last"),
                Err(error) => return (group.rank(), error),
            };
            let is_bad = group.rank() == 1 && step.number() == 14;
            if let Err(error) = step.update(|_, _| {}, if is_bad { f32::NAN } else { 1.0 }) {
                return (group.rank(), error);
            }
        }
    });
    for (rank, error) in all {
        if rank == 1 {
            let text = error.to_string();
            assert!(text.contains("rank 1 in step 14") && text.contains("step-11"), "{text}");
        } else {
            assert!(matches!(error, TrainError::Collective(_)), "rank {rank}: {error}");
        }
    }
    assert_eq!(Checkpoint::newest(&folder.0).expect("is kept").manifest().step, HALF);
}

//! What outlives a training: checkpoints, and logs that are replayed.

use std::path::{Path, PathBuf};
use std::sync::Mutex;

use pleach::Rank;
use pleach_training::checkpoint::{Checkpoint, CheckpointError};
use pleach_training::replay::{LogError, replay_all};
use pleach_training::{Hybrid, Scheme, Sgd, TrainError, Trainer};
use serde_json::json;

use super::BY_SCHEME;
use super::scheme::lock;
use crate::cli::CommandError;
use crate::cli::output::{note, print, print_json, put};

/// The name of the optimizer's velocity in a checkpoint.
const VELOCITY: &str = "velocity";

/// Options of what is kept.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct KeepingArguments {
    /// Save a checkpoint in this folder, which all ranks share, at the end of the steps; the two
    /// newest are kept
    #[arg(long, value_name = "DIR", requires = BY_SCHEME, conflicts_with = "simulate")]
    checkpoint: Option<PathBuf>,
    /// Save one after every K steps too
    #[arg(long, value_name = "K", requires = "checkpoint", value_parser = clap::value_parser!(u64).range(1..))]
    every: Option<u64>,
    /// Go on from the newest checkpoint in this folder; with another number of ranks from its
    /// parameters alone
    #[arg(long, value_name = "DIR", requires = BY_SCHEME, conflicts_with = "simulate")]
    resume: Option<PathBuf>,
    /// Write what each rank's scheme is told, and what it does, to files in this folder
    #[arg(long, value_name = "DIR", requires = BY_SCHEME, conflicts_with = "simulate")]
    log: Option<PathBuf>,
    /// Write what each rank took to compute each step to this file, for --simulate N --compute FILE
    #[arg(long, value_name = "FILE", requires = BY_SCHEME, conflicts_with = "simulate")]
    record: Option<PathBuf>,
    /// Tell the schemes a log again, and compare what they do; trains nothing
    #[arg(
        long,
        value_name = "DIR",
        conflicts_with_all = ["scheme", "partial", "simulate", "ranks", "data", "epochs", "metrics", "rank"],
    )]
    pub(crate) replay: Option<PathBuf>,
}

impl KeepingArguments {
    /// Where computing times are written.
    pub(crate) fn record(&self) -> Option<&Path> {
        self.record.as_deref()
    }

    /// Refuses to keep several trainings in one folder.
    pub(crate) fn check(&self, schemes: &[Scheme]) -> Result<(), CommandError> {
        let given = [
            ("--checkpoint", &self.checkpoint),
            ("--resume", &self.resume),
            ("--log", &self.log),
            ("--record", &self.record),
        ];
        if self.record.is_some() && schemes.iter().any(|one| matches!(one, Scheme::Hybrid { .. })) {
            return Err(CommandError::typed(
                "hybrid has no records: its ranks exchange activations while they compute, and a simulation adds the \
                 time of that; leave --record away",
            ));
        }
        match given.iter().find(|(_, folder)| folder.is_some()) {
            Some((option, _)) if schemes.len() > 1 => Err(CommandError::typed(format!(
                "{} schemes in one place: {option} is for one training; give one --scheme",
                schemes.len()
            ))),
            _ => Ok(()),
        }
    }

    /// The same trainer, with a log, and where the last training left it. `initial` are the
    /// parameters of a new one; `hybrid`: whose shards it trains.
    pub(crate) fn begin(
        &self,
        trainer: Trainer,
        sgd: &Mutex<Sgd>,
        rank: Rank,
        initial: &[f32],
        hybrid: Option<&Hybrid>,
    ) -> Result<Trainer, TrainError> {
        let mut trainer = match (&self.log, hybrid) {
            (Some(folder), Some(hybrid)) => hybrid.logged(trainer, folder)?,
            (Some(folder), None) => trainer.logged(folder)?,
            (None, _) => trainer,
        };
        match &self.resume {
            None => trainer.parameters_mut().copy_from_slice(initial),
            Some(folder) => resume(&mut trainer, folder, &mut lock(sgd), rank, hybrid)?,
        }
        // Otherwise the training would find that out at its first checkpoint.
        if let Some(folder) = &self.checkpoint
            && let Ok(newest) = Checkpoint::newest(folder)
        {
            let (found, step) = (newest.manifest().step, trainer.next_step());
            if found > step {
                return Err(CheckpointError::Later { folder: folder.clone(), found, step }.into());
            }
        }
        Ok(trainer)
    }

    /// Saves a checkpoint if one is due; `first` is the step with which this process began.
    pub(crate) fn save(
        &self,
        trainer: &mut Trainer,
        sgd: &Mutex<Sgd>,
        first: u64,
        steps: u64,
        hybrid: Option<&Hybrid>,
    ) -> Result<Option<PathBuf>, TrainError> {
        let next = trainer.next_step();
        let is_due = next == steps || self.every.is_some_and(|every| next.is_multiple_of(every));
        match &self.checkpoint {
            Some(folder) if is_due && next > first => {
                // Then the optimizer has made all of its steps.
                trainer.settle()?;
                let velocity = lock(sgd).velocity().to_vec();
                let own = [(VELOCITY, &velocity[..])];
                match hybrid {
                    Some(hybrid) => hybrid.save(trainer, folder, &own).map(Some),
                    None => trainer.save(folder, &own).map(Some),
                }
            }
            _ => Ok(None),
        }
    }
}

/// Goes on from the newest checkpoint of a folder, or with another number of ranks from its
/// parameters.
fn resume(
    trainer: &mut Trainer,
    folder: &Path,
    sgd: &mut Sgd,
    rank: Rank,
    hybrid: Option<&Hybrid>,
) -> Result<(), TrainError> {
    let restored = match hybrid {
        Some(hybrid) => hybrid.restore(trainer, folder),
        None => trainer.restore(folder),
    };
    match restored {
        Ok(saved) => {
            let expected = sgd.velocity().len();
            let found = saved.own_vector(VELOCITY);
            let velocity = found.filter(|elements| elements.len() == expected).ok_or_else(|| {
                let (name, found) = (VELOCITY.to_owned(), found.map(<[f32]>::len));
                CheckpointError::Vector { name, found, expected }
            })?;
            sgd.velocity_mut().copy_from_slice(velocity);
        }
        Err(TrainError::Checkpoint(CheckpointError::World { path, theirs, own })) => {
            match hybrid {
                Some(hybrid) => hybrid.restore_parameters(trainer, folder)?,
                None => trainer.restore_parameters(folder)?,
            };
            if rank == 0 {
                note(&format!(
                    "{} is of {theirs} ranks, and there are {own}: the training begins at step 0 with the mean of \
                         their parameters, and without anything else of it",
                    path.display()
                ));
            }
        }
        // With other ranks `auto` makes other groups.
        Err(TrainError::Checkpoint(CheckpointError::Scheme { path, theirs, .. }))
            if let Some(hybrid) = hybrid.filter(|_| matches!(theirs.parse(), Ok(Scheme::Hybrid { .. }))) =>
        {
            hybrid.restore_parameters(trainer, folder)?;
            if rank == 0 {
                note(&format!(
                    "{} is by {theirs}: the training begins at step 0 with its network, and without anything else of it",
                    path.display()
                ));
            }
        }
        Err(error) => return Err(error),
    }
    Ok(())
}

/// Runs `pleach train --replay`.
pub(crate) fn replay(folder: &Path, as_json: bool) -> Result<(), CommandError> {
    let all = replay_all(folder).map_err(|error| match error {
        LogError::Different { .. } => CommandError::failed(error),
        error => CommandError::usage(error),
    })?;
    let mut out = String::new();
    for replayed in &all {
        let row = json!({
            "rank": replayed.rank,
            "ranks": replayed.ranks,
            "scheme": replayed.scheme,
            "events": replayed.events,
            "actions": replayed.actions,
            "complete": replayed.is_complete,
            "same": true,
        });
        if as_json {
            print_json("results", &row)?;
            continue;
        }
        if replayed.rank == 0 {
            put!(out, "{}: {} ranks\nrank     events    actions", replayed.scheme, replayed.ranks);
        }
        let end = if replayed.is_complete { "the same" } else { "the same until the log ends" };
        put!(out, "{:>4} {:>10} {:>10}  {end}", replayed.rank, replayed.events, replayed.actions);
    }
    print("results", &out)
}

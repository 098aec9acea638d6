//! Why a training ends early.

use std::path::PathBuf;

use pleach_collectives::session::SessionError;
use pleach_collectives::{CollectiveError, PartialError, Rank, WindowError};

use crate::checkpoint::CheckpointError;
use crate::layout::Bucket;
use crate::ledger::PolicyError;
use crate::replay::LogError;
use crate::scheme::Refusal;

/// Why a training on real ranks has ended early.
#[derive(pleach_derive::ErrorDebug, thiserror::Error)]
#[non_exhaustive]
pub enum TrainError {
    /// An operation of the group failed; all ranks get its cause.
    #[error(transparent)]
    Collective(#[from] CollectiveError),
    /// A bucket was reported wrongly, or a policy broke an invariant.
    #[error(transparent)]
    Policy(#[from] PolicyError),
    /// There are no rounds for contributions.
    #[error(transparent)]
    Partial(PartialError),
    /// A line of ranks cannot go on, which are numbered from 0 there.
    #[error("in the line of ranks {ranks}, numbered from 0 there: {error}")]
    Line {
        /// The ranks of the line.
        ranks: String,
        /// What happened.
        error: CollectiveError,
    },
    /// There is no window for reads and writes.
    #[error(transparent)]
    Window(WindowError),
    /// The session does not go on.
    #[error(transparent)]
    Session(#[from] SessionError),
    /// The session has made steps before, and nobody hands over what a training goes on with.
    #[error(
        "the session is at step {step}, and nobody hands a training over: {reason}; begin the training with the \
         first step of a session"
    )]
    Late {
        /// The step that comes next.
        step: u64,
        /// Why nobody does.
        reason: &'static str,
    },
    /// Processes that join the session read the states during their first step
    /// ([`Heal::Hidden`](pleach_collectives::session::Heal::Hidden)).
    #[error(
        "processes that join this session read the states during their first step, and a training needs the \
         parameters before: a process that joins would begin with zeros; set Elastic::heal to Heal::Boundary"
    )]
    HealsInStep,
    /// Not for trainings in sessions.
    #[error("{what}: a training in a session has none yet; train in a group (Trainer::new)")]
    InSession {
        /// What was asked for.
        what: &'static str,
    },
    /// The scheme does not train on so many ranks, or not in a session.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// The ranks do not train the same.
    #[error(
        "ranks differ: {what} of rank {rank} is {own}, of rank {other} {theirs}; give all ranks the same"
    )]
    Different {
        /// What differs.
        what: &'static str,
        /// This rank.
        rank: Rank,
        /// Its value.
        own: String,
        /// The first rank that differs.
        other: Rank,
        /// The value of that rank.
        theirs: String,
    },
    /// Ranks make different numbers of steps between the barriers of
    /// [`Scheme::ElasticBsp`](crate::Scheme::ElasticBsp).
    #[error(
        "no common place for a mean: ranks make different numbers of steps with elastic-bsp, and this one has made \
         {steps} since the last barrier; ask when Progress::staleness is 0 again, where all have the same parameters"
    )]
    NoCommonPlace {
        /// The steps since the last barrier.
        steps: u64,
    },
    /// A plan of the program's own is none of this rank and layout.
    #[error("bad plan: {reason}; see the fields of Plan")]
    Plan {
        /// What is wrong with it.
        reason: &'static str,
    },
    /// For trainings by a scheme alone.
    #[error(
        "no log: a replay makes the policy of a scheme's text, and this policy is the program's own; train without"
    )]
    NoScheme,
    /// The layout has no parameters.
    #[error("nothing to train: the layout has no parameters; give the lengths of the layers")]
    NoParameters,
    /// The loss is not finite.
    #[error("loss {loss} of rank {rank} in step {step}; lower the learning rate{}", going_on(.checkpoint.as_ref()))]
    Loss {
        /// The rank.
        rank: Rank,
        /// The step.
        step: u64,
        /// The loss.
        loss: f32,
        /// The newest checkpoint of this training. Its parameters are those of which the loss is,
        /// if it is of this step.
        checkpoint: Option<PathBuf>,
    },
    /// A checkpoint was not written, or is not taken.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// A log was not written.
    #[error(transparent)]
    Log(#[from] LogError),
    /// The layout is no table.
    #[error("no rows: the layout is no table; make it by Layout::table")]
    NoRows,
    /// A row that there is not, or elements that are none.
    #[error("row {row} with {elements} elements: the table has {rows} rows of {length}; give one of these")]
    Row {
        /// The row.
        row: usize,
        /// The rows of the table.
        rows: usize,
        /// The elements that were given, if any were.
        elements: usize,
        /// Those of a row.
        length: usize,
    },
    /// A part of the gradient is wanted that is averaged already.
    #[error("gradient in use: bucket {bucket} of step {step} is being averaged; write it before it is ready")]
    UnderWay {
        /// The first bucket.
        bucket: Bucket,
        /// The step.
        step: u64,
    },
}

fn going_on(checkpoint: Option<&PathBuf>) -> String {
    checkpoint.map_or_else(String::new, |path| {
        format!(
            ", and resume from {}; if that has diverged already, remove it and resume from the one before",
            path.display()
        )
    })
}

impl From<WindowError> for TrainError {
    fn from(error: WindowError) -> Self {
        match error {
            WindowError::Collective(error) => Self::Collective(error),
            error => Self::Window(error),
        }
    }
}

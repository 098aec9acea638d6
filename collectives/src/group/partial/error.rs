//! Why there is no partial all-reduce, or no result of a round.

use std::sync::Arc;

use pleach_schedule::verify::NotPartial;
use pleach_vocabulary::Rank;

use super::super::error::CollectiveError;
use super::super::split::SplitError;
use crate::partial::ActivationError;

/// Why there is no partial all-reduce, or no result of a round.
#[derive(pleach_derive::ErrorDebug, thiserror::Error)]
#[non_exhaustive]
pub enum PartialError {
    /// The group does not work, or memory cannot be had.
    #[error(transparent)]
    Collective(#[from] CollectiveError),
    /// It cannot be carried out as it was asked for.
    #[error(transparent)]
    Activation(#[from] ActivationError),
    /// The schedule that the group takes admits no rounds in which ranks are absent.
    #[error(
        "algorithm {algorithm} admits no partial rounds: {reason}; take another one (Group::with_variant)"
    )]
    Schedule {
        /// The algorithm.
        algorithm: String,
        /// Why not.
        reason: NotPartial,
    },
    /// Ranks asked for different things.
    #[error(
        "rank {rank} asks for a partial all-reduce of {theirs}, rank {own_rank} of {own}; ask for the same on all"
    )]
    Differs {
        /// The first rank that asks for something else than this one.
        rank: Rank,
        /// What it asks for.
        theirs: String,
        /// This rank.
        own_rank: Rank,
        /// What this rank asks for.
        own: String,
    },
    /// The ranks did not meet for the rounds.
    #[error("the rounds of a partial all-reduce have no group of their own: {0}")]
    Split(#[from] SplitError),
    /// No rank had anything to give.
    #[error(
        "round {round} has no result: no rank had anything to give; call finish when the data are used up"
    )]
    NothingGiven {
        /// The round.
        round: u64,
    },
    /// The round of a started contribution was not waited for.
    #[error("a contribution of this rank is under way; wait for its round first (Partial::wait)")]
    UnderWay,
    /// No contribution was started.
    #[error("no contribution of this rank is under way; start one first (Partial::start_contribute)")]
    NotStarted,
    /// This rank has finished.
    #[error("this rank has finished its partial all-reduce; make a new one")]
    Finished,
}

impl From<PartialError> for CollectiveError {
    fn from(error: PartialError) -> Self {
        match error {
            PartialError::Collective(error) => error,
            PartialError::Split(error) => error.into(),
            error => Self::NotMade(Arc::new(error)),
        }
    }
}

//! Proof that a schedule does what its collective demands.

use crate::Rank;
use crate::schedule::{Part, Schedule};

/// A schedule that [`verify`] accepted, with what the proof found out about it.
#[derive(Debug)]
pub struct Proof {
    schedule: Schedule,
}

/// Why a schedule was refused. (To be filled in: each variant names rank, lane, step and span.)
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Violation {}

/// Proves the schedule or says what is wrong with it.
///
/// # Errors
///
/// See [`Violation`].
pub fn verify(schedule: Schedule) -> Result<Proof, Violation> {
    Ok(Proof { schedule })
}

impl Proof {
    /// What was proved.
    #[must_use]
    pub fn schedule(&self) -> &Schedule {
        &self.schedule
    }

    /// Where the bytes of the put land whose notice this wait consumes; `None` when it consumes a plain notify.
    #[must_use]
    pub fn landing(&self, _rank: Rank, _lane: usize, _step: usize) -> Option<Part> {
        None
    }

    /// Whether this reduce combines several sources into the complete result (so that an average divides here).
    #[must_use]
    pub fn completes(&self, _rank: Rank, _lane: usize, _step: usize) -> bool {
        false
    }
}

//! Why a simulation ends early, or does not begin.

use pleach_collectives::Rank;

use super::engines::ENGINES_MAX;
use crate::ledger::PolicyError;
use crate::scheme::Refusal;

/// Why a simulation has ended early.
#[derive(Clone, pleach_derive::ErrorDebug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SimulationError {
    /// There are no ranks.
    #[error("nothing to simulate: 0 ranks; give at least 1")]
    NoRanks,
    /// The layout has no parameters.
    #[error("nothing to train: the layout has no parameters; give the lengths of the layers")]
    NoParameters,
    /// The scheme does not train on these ranks.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// A rank waits for a word or a credit that nobody sends.
    #[error("stuck: rank {rank} waits in step {step} for rank {peer}, and no rank sends anything any more")]
    Silence {
        /// The rank.
        rank: Rank,
        /// The rank that it waits for.
        peer: Rank,
        /// The step that it makes next.
        step: u64,
    },
    /// The policy of a rank broke an invariant.
    #[error("rank {rank}: {error}")]
    Policy {
        /// The rank.
        rank: Rank,
        /// What was broken.
        error: PolicyError,
    },
    /// Ranks ask for different operations.
    #[error(
        "ranks differ: all-reduce {number} is of {of_first} for rank {first}, and of {of_other} for rank {other}; \
         all ranks must ask for the same"
    )]
    Mismatch {
        /// How many operations came before.
        number: u64,
        /// The rank that asked first.
        first: Rank,
        /// What it asked for.
        of_first: String,
        /// A rank that asked for something else.
        other: Rank,
        /// What that rank asked for.
        of_other: String,
    },
    /// An operation lacks ranks that never ask for it.
    #[error(
        "stuck: all-reduce {number} waits for rank {missing}, which has ended; all ranks must ask for the same"
    )]
    Stuck {
        /// How many operations came before.
        number: u64,
        /// The first rank that is missing.
        missing: Rank,
    },
    /// A rank is to end that does not.
    #[error("rank {rank} of {ranks} cannot end: rank 0 is observed; name another one below {ranks}")]
    NoDeath {
        /// The rank.
        rank: Rank,
        /// The number of ranks.
        ranks: u32,
    },
    /// A rank has ended, by [`Fault::RankDeath`](super::faults::Fault::RankDeath), and another one
    /// does not go on without it.
    #[error(
        "rank {lost} has ended before step {at}, and rank {rank} stands before step {step}: the scheme waits for it; take \
         one that does not wait, as gossip, or train in a session (pleach train --elastic)"
    )]
    Lost {
        /// The rank that has ended.
        lost: Rank,
        /// The step that it does not make.
        at: u64,
        /// The first rank that stands.
        rank: Rank,
        /// The step that it makes next.
        step: u64,
    },
    /// Engines carry out no such exchanges.
    #[error("no engines for {what}: {why}; take the price of exchanges")]
    NoEngines {
        /// What they do not carry out.
        what: &'static str,
        /// The reason.
        why: &'static str,
    },
    /// Engines are too many to be simulated.
    #[error(
        "no engines for {ranks} ranks: at most {ENGINES_MAX} are simulated; take fewer ranks, or the price of exchanges"
    )]
    EngineRanks {
        /// The ranks.
        ranks: u32,
    },
    /// An engine failed, or cannot begin a call.
    #[error("the engine of rank {rank} failed: {cause}")]
    Engine {
        /// The rank.
        rank: Rank,
        /// The cause.
        cause: String,
    },
    /// States of another number of ranks.
    #[error("{saved} states for {ranks} ranks; give one for each rank")]
    World {
        /// The states.
        saved: usize,
        /// The ranks.
        ranks: u32,
    },
    /// The state of a rank is not saved, or not taken.
    #[error("rank {rank}: {reason}")]
    Checkpoint {
        /// The rank.
        rank: Rank,
        /// The [`CheckpointError`](crate::checkpoint::CheckpointError) as text.
        reason: String,
    },
    /// The loss is not finite.
    #[error("loss {loss} of rank {rank} in step {step}; lower the learning rate")]
    Loss {
        /// The rank.
        rank: Rank,
        /// The step.
        step: u64,
        /// The loss, as text.
        loss: String,
    },
}

//! Partial all-reduce: a sum that does not wait for late ranks, and says whose data are in it.
//!
//! One all-reduce is a *round*. Each rank *binds* its input to the round, once: to the contribution
//! that its caller has handed over, or to the neutral element of the operation if there is none.
//! The schedule, the proof and the executor are those of any all-reduce. Only the moment at which a
//! rank starts its run, and the memory that the run reads, are decided here.
//!
//! | part | invariant |
//! | --- | --- |
//! | [`Activation`] | what the ranks agree on before the first round: when a round opens, and what becomes of late contributions |
//! | `opening` | rank 0 opens a round when the activation says so, and never before all ranks that were left out [`Activation::staleness_max`] times in a row are there |
//! | [`Rounds`] | one rank binds each round once, in order, and only when the round is open and the round before has ended here |
//! | `handover` | a contribution's buffer is in one place: with the caller, handed over, late, or in the active round |
//! | `words` | rounds open in order, and a word that was lost is said again |
//! | `readiness` | the words of a rank to rank 0 grow, so the greatest is the newest |
//! | [`RankSet`] | the ranks whose contributions are in a result |
//! | `exact` | sums of floats in groups of [`Reproducible::Exact`](crate::Reproducible::Exact) depend on the contributions alone |
//! | `neutral` | combined with anything, a neutral element leaves the other operand as it is, bit for bit |
//!
//! **How a round goes.** A rank whose caller hands over a contribution tells rank 0 that it is
//! ready. Rank 0 opens the round. The word that a round is open travels down a binomial tree of
//! the ranks. Each rank that hears it binds its input and starts two runs: one adds the set, in
//! which each rank has set its own bit, and one reduces the data. Both runs are bound at the same
//! instant, so the set is that of the data. The sum of disjoint bits is their union. A rank whose
//! own bit is not what it gave, or that finds a bit of no rank, ends the group.
//!
//! The words "ready" and "open" are monotone numbers in signal slots of their own. Signals may
//! overtake each other, so a word may be replaced by an older one before it was read. "Open" cannot
//! suffer from this: rank 0 opens a round only after the round before has ended there, for which
//! every rank has heard of the round before. A word to rank 0 is sent again, at growing intervals,
//! as long as the round is not open that it is about.
//!
//! A rank that abstains is waited for again when it contributes, or when all ranks have abstained
//! from one round.
//!
//! **Cost.** A round in which nobody is late moves the bytes of an all-reduce, those of a second
//! one of eight bytes for each 64 ranks, and about `2 (n - 1)` signals. A rank without a
//! contribution gives neutral elements: the headers of its signals say so, and nobody reads them
//! (the engine's `run::absence`). Where data are put, what is neutral is not moved until something
//! was combined with it. A rank has seven buffers of the data, and three more where late
//! contributions are reduced apart. An exact round takes one run of what its blocks span, beside
//! that of the set, and then one run a block.
//!
//! A rank takes part in rounds while its caller computes. So the rounds have a group of their own,
//! as [`Group::split`](crate::Group::split) makes it, and the progress thread of that group binds.
//!
//! Sources: Li et al., "Taming Unbalanced Training Workloads in Deep Learning with Partial
//! Collective Operations", PPoPP 2020 (solo and majority); Chen et al., "Revisiting Distributed
//! Synchronous SGD", 2016 (backup workers).

mod activation;
mod contributions;
mod exact;
mod handover;
mod neutral;
mod opening;
mod rank_set;
mod readiness;
mod rounds;
#[cfg(test)]
mod subsets;
mod words;

pub use crate::observe::PartialReport;
#[doc(hidden)]
pub use activation::duration;
pub use activation::{Activation, ActivationError, Divisor, Late};
pub(crate) use activation::{Terms, WORDS};
pub(crate) use contributions::Contributions;
pub(crate) use exact::{ExactPlans, ExactSums};
pub(crate) use neutral::neutral;
#[doc(hidden)]
pub use opening::{Decision, Opening};
pub use rank_set::RankSet;
#[doc(hidden)]
pub use readiness::Readiness;
#[cfg(test)]
pub(crate) use rounds::Mutant;
pub use rounds::Own;
pub(crate) use rounds::{
    Awaited, Bound, CONTRIBUTIONS, DataPlans, EXACT_CONTRIBUTIONS, Ended, Rounds, RoundsMemory,
};

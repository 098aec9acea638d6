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
//! | [`Rounds`] | a rank binds each round once, in order, when the one before has ended here and this one is open or its input known |
//! | `runs` | all runs of a round read what was bound to it at one instant, so the set is that of the data |
//! | `set_sum` | where signals do not tell the set, it is a sum in which each rank has set its own bit |
//! | `handover` | a contribution's buffer is in one place: with the caller, handed over, late, or in the active round |
//! | `words` | rounds open in order, and a word that was lost is said again |
//! | `readiness` | the words of a rank to rank 0 grow, so the greatest is the newest |
//! | [`RankSet`] | the ranks whose contributions are in a result |
//! | `exact` | sums of floats in groups of [`Reproducible::Exact`](crate::Reproducible::Exact) depend on the contributions alone |
//! | `neutral` | combined with anything, a neutral element leaves the other operand as it is, bit for bit |
//!
//! **How a round goes.** A rank whose caller hands over a contribution in time is bound to it at
//! once: whenever the round opens, nothing else can be its input. It starts one run, which reduces
//! the data. Each signal of this run also tells the ranks of which its sender knows that they have
//! given a contribution. The set is that of the data: a rank tells of itself what it is bound to,
//! and where all inputs are combined, a chain of signals has come from each of them (the engine's
//! `run::absence`). A rank for which its own bit is not what it gave ends the group. If no rank is
//! late, all ranks are bound so, and the round ends as an all-reduce does.
//!
//! Otherwise the round waits for the other ranks. A rank that is ready tells rank 0, which opens
//! the round when the activation says so. The word that a round is open travels down a binomial
//! tree of the ranks, and each rank that hears it and has no contribution is bound to the neutral
//! element. The time of the runs runs from then on: before, a peer may be as late as it likes.
//!
//! The words "ready" and "open" are monotone numbers in signal slots of their own. Signals may
//! overtake each other, so a word may be replaced by an older one before it was read. So a word is
//! sent again, at growing intervals: "ready" as long as the round is not open that it is about, and
//! "open" as long as the round has not ended where it is sent. A round that has ended at any rank
//! was bound by all.
//!
//! A rank that abstains is waited for again when it contributes, or when all ranks have abstained
//! from one round.
//!
//! **Cost.** A round in which nobody is late moves the bytes and signals of an all-reduce. If it
//! takes longer than some microseconds, about `2 (n - 1)` signals tell words meanwhile. Where
//! signals do not tell the set ([`SetSum`]), a second all-reduce of eight bytes for each 64 ranks
//! goes beside it. A rank without a contribution gives neutral elements: the headers of its signals
//! say so, and nobody reads them. Where data are put, what is neutral is not moved until something
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
mod runs;
mod set_sum;
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
#[cfg(test)]
pub(crate) use opening::drawn;
#[doc(hidden)]
pub use opening::{Decision, Opening};
pub use rank_set::RankSet;
#[doc(hidden)]
pub use readiness::Readiness;
#[cfg(test)]
pub(crate) use rounds::Mutant;
pub use rounds::Own;
pub(crate) use rounds::{Awaited, Bound, Ended, Rounds, Seen};
pub(crate) use runs::{CONTRIBUTIONS, DataPlans, EXACT_CONTRIBUTIONS, RoundsMemory, is_set_told};
pub(crate) use set_sum::SetSum;

//! Lines of ranks that combine contributions in rounds.
//!
//! They are all ranks, or the lines of a [grid](pleach_collectives::RankSpace) of `d` dimensions
//! with balanced extents, which may have holes. There each rank is in one line along each
//! dimension, and no line is longer than `n^(1/d)`, rounded up. So an average along lines keeps the
//! mean of all ranks.

use pleach_collectives::Rank;
use pleach_collectives::partial::Activation;

/// Ranks that combine contributions in rounds (partial all-reduce).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Line {
    /// The ranks, this one among them, in ascending order; the same on all of them.
    pub ranks: Vec<Rank>,
    /// When rounds open, and what becomes of late contributions.
    pub activation: Activation,
}

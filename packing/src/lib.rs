//! Optimal packings of spanning trees over the links of a job.
//!
//! A [`Packing`] of a [`Topology`](crate::topology::Topology) for a collective is a set of weighted
//! trees of ranks. Each edge of a tree follows paths of physical links. All trees work at the same
//! time, and each carries a share of the data in proportion to its weight. No link exceeds its
//! capacity, and the whole goes at the sum of the weights: the [rate](Packing::rate). The packing
//! also has the [bound](Packing::bound) that no forwarding schedule can exceed, and the
//! [`Certificate`] that proves the bound: a cut or a partition of the nodes. Rates are exact
//! rationals in bytes a second.
//!
//! The bound holds for schedules in which ranks copy and combine data, and switches forward each
//! byte once. A switch that reduces or multicasts (NVLink SHARP in `dgx-h100`, SHARP in InfiniBand)
//! sends fewer bytes over the same links, so such a fabric can exceed the bound. No topology here
//! describes such switches.
//!
//! The algorithms follow ForestColl (Zhao et al. 2024): the best rate by cuts
//! ([`rate`]), switch removal by edge splitting, and arborescence packing. All-reduce
//! uses graph strength (Cunningham 1985).
//!
//! # What a rate counts
//!
//! The rate counts the bytes of one rank's vector for all-reduce, reduce and broadcast, and the
//! bytes of the whole (one block for each rank) for all-gather, reduce-scatter, gather and scatter.
//! With `B⁺(S)` the bandwidth that leaves a set of nodes, the optima are
//!
//! | collective | bound |
//! |--|--|
//! | broadcast | min over ranks v of maxflow(root, v) |
//! | reduce | the same on reversed links |
//! | all-gather | N·min `B⁺(S)` / ranks in S, over sets that lack a rank |
//! | reduce-scatter | the same on reversed links |
//! | scatter | N·min `B⁺(S)` / ranks outside S, over sets with the root |
//! | gather | the same on reversed links |
//! | all-reduce | min over families of k ≥ 2 disjoint sets that hold all ranks of `Σ B⁺(Pᵢ)` / 2(k-1), and `B⁺(S)` of every S that separates ranks |
//!
//! # What a tree is
//!
//! Edges are pairs of ranks in the direction of the data. In a tree from the root, edges nearer to
//! the root come first; in a tree to the root they come last. For all-reduce the edges lead to the
//! root, and each tree is used in reverse as well. Gather and scatter are flows and not trees: an
//! entry is the path of the data of one rank, with its edges in order, and an entry without edges
//! is the block of the root. The [`Path`]s of an edge go from rank to rank through switches only,
//! and their weights sum to the weight of the tree.
//!
//! **Invariant:** the weights of the trees sum to the rate. On every link the weights of the paths
//! over it (in both directions for all-reduce) sum to at most its bandwidth. The rate is at most
//! the bound, and the certificate evaluates to the bound. [`check()`] computes all of this again
//! and shares no code with the modules that pack.

#![forbid(unsafe_code)]

mod all_reduce;
#[cfg(feature = "compare")]
#[doc(hidden)]
pub mod allocations;
mod balance;
mod canonical;
#[doc(hidden)]
pub mod check;
#[cfg(feature = "compare")]
#[doc(hidden)]
pub mod compare;
mod depth;
mod digraph;
mod directed;
mod double_tree;
mod extraction;
mod flow;
mod greedy;
#[doc(hidden)]
pub mod latency;
mod orbits;
mod rate;
#[cfg(test)]
mod samples;
mod scale;
mod scatter;
mod strategy;
mod switch_removal;
mod symmetry;
pub mod topology;
mod trees;

use num_rational::Ratio;
use pleach_vocabulary::{Collective, Rank};

use crate::topology::NodeId;

pub use double_tree::double_tree_edges;

pub use check::{Checked, Flaw, check};
pub use latency::pack_for;
pub use strategy::{PackError, PackOptions, Strategy, pack};

/// Most trees that a root has in a packing for all-gather, reduce-scatter, broadcast or reduce.
/// Where the optimum needs more, the best that trees of equal weight reach is packed instead, and
/// the gap is in [`Packing::rate`] and [`Packing::bound`].
pub const MAX_TREES_PER_ROOT: u32 = 64;

/// How many edges all trees of a packing may have, about: beyond it they take gigabytes.
pub const EDGES_MAX: u64 = 1 << 22;

/// An exact rate or share of it, in bytes a second.
pub type Rate = Ratio<i128>;

/// Weighted trees, and the proof of how good they are. See the module.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Packing {
    /// The collective.
    pub collective: Collective,
    /// What the trees carry together. The module says of what.
    pub rate: Rate,
    /// The bound.
    pub bound: Rate,
    /// The certificate.
    pub certificate: Certificate,
    /// At most one with the same root, edges and paths.
    pub trees: Vec<Tree>,
}

/// One tree of a packing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tree {
    /// Where all data come from or go to.
    pub root: Rank,
    /// The rate that it carries.
    pub weight: Rate,
    /// Its edges; the module says in which order.
    pub edges: Vec<Edge>,
}

impl Tree {
    /// Turns it round: what came from the root goes to it, over the same links the other way.
    fn turn(&mut self) {
        self.edges.reverse();
        self.edges.iter_mut().for_each(Edge::turn);
    }
}

/// Data that move from a rank to another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Edge {
    /// The sender.
    pub from: Rank,
    /// The receiver.
    pub to: Rank,
    /// Over which links, in parallel.
    pub paths: Vec<Path>,
}

impl Edge {
    fn turn(&mut self) {
        std::mem::swap(&mut self.from, &mut self.to);
        self.paths.iter_mut().for_each(|path| path.hops.reverse());
    }
}

/// Links one after the other, between two ranks.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Path {
    /// The nodes, with both ends; those between are switches.
    pub hops: Vec<NodeId>,
    /// What goes this way.
    pub weight: Rate,
}

/// Why nothing goes faster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Certificate {
    /// All that has to leave these nodes goes over what leads out of them. For gather, reduce and
    /// reduce-scatter: all that has to enter them.
    Cut {
        /// The nodes.
        nodes: Vec<NodeId>,
    },
    /// These disjoint parts, which hold all ranks, are joined by so little.
    Partition {
        /// The parts.
        parts: Vec<Vec<NodeId>>,
    },
    /// There is one rank: nothing has to move, and rates are zero.
    Alone,
}

impl Packing {
    /// Whether no better packing exists: no schedule is faster in which switches only forward.
    #[must_use]
    pub fn is_optimal(&self) -> bool {
        self.rate == self.bound
    }
}

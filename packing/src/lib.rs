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
//! An edge is a pair of ranks in the direction of the data. In a tree from the root, edges nearer
//! to the root come first; in a tree to the root they come last. For all-reduce the edges lead to
//! the root, and each tree is used in reverse as well. Gather and scatter are flows and not trees.
//! Each entry is the path of the data of one rank, with its edges in order, and an entry without
//! edges is the block of the root. The [`Path`]s of an edge go from rank to rank through switches
//! only, and their weights sum to the weight of the tree.
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

/// Most trees that a root has in a packing for all-gather, reduce-scatter, broadcast or reduce. If
/// the optimum needs more, the best packing with trees of equal weight is made instead.
/// [`Packing::rate`] and [`Packing::bound`] then show the gap.
pub const MAX_TREES_PER_ROOT: u32 = 64;

/// The largest number of edges of all trees of a packing, approximately: more edges take gigabytes.
pub const EDGES_MAX: u64 = 1 << 22;

/// An exact rate, or a share of a rate, in bytes a second.
pub type Rate = Ratio<i128>;

/// Weighted trees, and the bound with its proof. See the module.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Packing {
    /// The collective.
    pub collective: Collective,
    /// The rate of all trees together. The module says which bytes count.
    pub rate: Rate,
    /// The bound.
    pub bound: Rate,
    /// The certificate.
    pub certificate: Certificate,
    /// The trees. No two trees have the same root, edges and paths.
    pub trees: Vec<Tree>,
}

/// One tree of a packing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tree {
    /// The rank where all data come from or go to.
    pub root: Rank,
    /// The rate that the tree carries.
    pub weight: Rate,
    /// The edges of the tree; the module says in which order.
    pub edges: Vec<Edge>,
}

impl Tree {
    /// Reverses the tree: the data go over the same links in the other direction.
    fn turn(&mut self) {
        self.edges.reverse();
        self.edges.iter_mut().for_each(Edge::turn);
    }
}

/// Data that move from one rank to another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Edge {
    /// The sender.
    pub from: Rank,
    /// The receiver.
    pub to: Rank,
    /// The paths of the data. They are used in parallel.
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
    /// The nodes, both ends included; the nodes between the ends are switches.
    pub hops: Vec<NodeId>,
    /// The rate of the data on this path.
    pub weight: Rate,
}

/// The proof of the bound.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Certificate {
    /// The nodes of a cut. All data that have to leave these nodes go over the links that leave
    /// them. For gather, reduce and reduce-scatter: all data that have to enter these nodes go over
    /// the links that enter them.
    Cut {
        /// The nodes.
        nodes: Vec<NodeId>,
    },
    /// Disjoint parts that hold all ranks. The bandwidth between the parts limits the rate.
    Partition {
        /// The parts.
        parts: Vec<Vec<NodeId>>,
    },
    /// There is one rank: nothing has to move, and rates are zero.
    Alone,
}

impl Packing {
    /// Whether no better packing exists: no schedule in which switches only forward is faster.
    #[must_use]
    pub fn is_optimal(&self) -> bool {
        self.rate == self.bound
    }
}

//! The defects of a packing.

use pleach_vocabulary::{Collective, Rank};

use crate::Rate;
use crate::topology::NodeId;

/// Why a packing is not correct. Trees, edges and paths are named by their index.
#[derive(Clone, pleach_derive::ErrorDebug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Flaw {
    /// This collective has no packing.
    #[error("{collective:?} is not packed into trees")]
    NotPacked {
        /// The collective.
        collective: Collective,
    },
    /// The collective has a root that is no rank of the topology.
    #[error("the root is rank {root}, and there are {ranks} ranks, numbered from 0")]
    NoSuchRoot {
        /// The root.
        root: Rank,
        /// The number of ranks.
        ranks: u32,
    },
    /// A weight whose denominator is not positive.
    #[error("a weight has a denominator that is not positive")]
    Denominator,
    /// Weights whose sums cannot be computed exactly in 127 bits.
    #[error("the weights have no common denominator that can be worked with")]
    Overflow,
    /// A single rank has trees or a rate.
    #[error("there is one rank and nothing to move, but there are trees or a rate")]
    SingleRankHasTrees,
    /// A tree whose root is no rank, or is not the root of the collective.
    #[error("tree {tree} has rank {root} as its root")]
    Root {
        /// The index of the tree.
        tree: usize,
        /// The root.
        root: Rank,
    },
    /// A tree whose weight is zero or negative.
    #[error("tree {tree} has a weight that is not positive")]
    TreeWeight {
        /// The index of the tree.
        tree: usize,
    },
    /// An edge names a rank that does not exist.
    #[error("edge {edge} of tree {tree} names rank {rank}, which is not there")]
    NoSuchRank {
        /// The index of the tree.
        tree: usize,
        /// The index of the edge.
        edge: usize,
        /// The rank.
        rank: Rank,
    },
    /// The edges before this edge do not join it to the root: the edge is not connected, points in
    /// the wrong direction, or is in the wrong place of the list. In a path, the edge does not
    /// begin where the edge before it ended.
    #[error("edge {edge} of tree {tree} is attached to rank {rank}, which is not connected to the root yet")]
    Detached {
        /// The index of the tree.
        tree: usize,
        /// The index of the edge.
        edge: usize,
        /// The end of the edge that is nearer to the root.
        rank: Rank,
    },
    /// Two edges lead to a rank from the root: there is a cycle, or there are two paths.
    #[error("edge {edge} of tree {tree} leads to rank {rank}, which is in the tree already")]
    ReachedTwice {
        /// The index of the tree.
        tree: usize,
        /// The index of the edge.
        edge: usize,
        /// The end of the edge that is farther from the root.
        rank: Rank,
    },
    /// A tree does not reach all ranks.
    #[error("tree {tree} does not reach rank {rank}")]
    NotSpanning {
        /// The index of the tree.
        tree: usize,
        /// The rank.
        rank: Rank,
    },
    /// A path of an edge is not valid.
    #[error("path {path} of edge {edge} of tree {tree}: {flaw}")]
    Path {
        /// The index of the tree.
        tree: usize,
        /// The index of the edge.
        edge: usize,
        /// The index of the path.
        path: usize,
        /// The reason.
        flaw: PathFlaw,
    },
    /// The paths of an edge do not sum to the weight of the tree.
    #[error("the paths of edge {edge} of tree {tree} carry {sum} bytes a second and the tree {weight}")]
    PathSum {
        /// The index of the tree.
        tree: usize,
        /// The index of the edge.
        edge: usize,
        /// The sum of the paths' weights.
        sum: Rate,
        /// The weight of the tree.
        weight: Rate,
    },
    /// Two trees are equal.
    #[error("trees {first} and {second} are the same")]
    Duplicate {
        /// The index of the first tree.
        first: usize,
        /// The index of the second one.
        second: usize,
    },
    /// A link carries more than it can.
    #[error("the link from {from} to {to} carries {load} bytes a second and can {capacity}")]
    Overload {
        /// The node where the link begins.
        from: NodeId,
        /// The node where the link ends.
        to: NodeId,
        /// The load of the link.
        load: Rate,
        /// The capacity of the link.
        capacity: u64,
    },
    /// The trees do not carry the rate.
    #[error("the trees carry {sum} bytes a second together, and the rate is {rate}")]
    RateSum {
        /// The sum of the weights of the trees.
        sum: Rate,
        /// The rate of the packing.
        rate: Rate,
    },
    /// A rank's block has a lower or higher rate than the blocks of the others.
    #[error("the block of rank {rank} goes at {sum} bytes a second; the share of each is {share}")]
    Share {
        /// The rank.
        rank: Rank,
        /// The rate of its block.
        sum: Rate,
        /// The rate that it must have: the rate of the packing divided by the number of ranks.
        share: Rate,
    },
    /// The rate exceeds the bound.
    #[error("the rate {rate} is above the bound {bound}")]
    AboveBound {
        /// The rate.
        rate: Rate,
        /// The bound.
        bound: Rate,
    },
    /// The certificate does not show the bound.
    #[error("the certificate {0}")]
    Certificate(CertificateFlaw),
}

/// A fault of a path.
#[derive(Clone, Copy, pleach_derive::ErrorDebug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PathFlaw {
    /// The edge has no path.
    #[error("there is none")]
    None,
    /// The edge has the same path twice.
    #[error("it is listed twice")]
    ListedTwice,
    /// A hop that is not in the topology.
    #[error("{node} is not there")]
    UnknownNode {
        /// The node.
        node: NodeId,
    },
    /// The path does not begin and end where its edge does.
    #[error("it does not go from {from} to {to}")]
    Ends {
        /// Where the edge begins.
        from: NodeId,
        /// Where the edge ends.
        to: NodeId,
    },
    /// Ranks do not forward.
    #[error("it goes through rank {rank}, and only switches forward")]
    ThroughRank {
        /// The rank.
        rank: Rank,
    },
    /// The path passes a switch twice.
    #[error("it goes through {node} twice")]
    NodeTwice {
        /// The node.
        node: NodeId,
    },
    /// No link joins these two hops in this direction (for all-reduce, in both directions).
    #[error("there is no link from {from} to {to}")]
    NoLink {
        /// The node where the link begins.
        from: NodeId,
        /// The node where the link ends.
        to: NodeId,
    },
    /// The weight of the path is zero or negative.
    #[error("it has a weight that is not positive")]
    Weight,
}

/// A fault of a certificate.
#[derive(Clone, Copy, pleach_derive::ErrorDebug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CertificateFlaw {
    /// The certificate has another kind than the collective needs, for example a cut for a
    /// partition.
    #[error("is of a kind that shows nothing of this collective")]
    Kind,
    /// A node that is not in the topology.
    #[error("names {node}, which is not there")]
    UnknownNode {
        /// The node.
        node: NodeId,
    },
    /// A node is in two parts, or twice in one part.
    #[error("names {node} twice")]
    NodeTwice {
        /// The node.
        node: NodeId,
    },
    /// All ranks are on one side.
    #[error("separates no ranks")]
    SeparatesNothing,
    /// The cut does not contain the root.
    #[error("does not hold the root, rank {root}")]
    RootOutside {
        /// The root.
        root: Rank,
    },
    /// A part without a rank: it needs no data from other parts.
    #[error("has part {part} without a rank")]
    PartWithoutRank {
        /// The part.
        part: usize,
    },
    /// Some rank is in no part.
    #[error("has rank {rank} in no part")]
    RankInNoPart {
        /// The rank.
        rank: Rank,
    },
    /// The certificate shows another bound than that of the packing.
    #[error("shows the bound {value}, and the packing says {bound}")]
    Value {
        /// The bound that the certificate shows.
        value: Rate,
        /// The bound of the packing.
        bound: Rate,
    },
}

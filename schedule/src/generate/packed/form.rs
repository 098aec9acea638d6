//! What a packing must be to be run: trees that join all ranks, or paths between ranks and the
//! root.

use pleach_packing::Tree;
use pleach_vocabulary::{Collective, Rank};

/// Why a packing is none of ranks like these.
#[derive(Clone, pleach_derive::ErrorDebug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PackedError {
    /// No tree at all, or one whose weight is not positive.
    #[error("tree {tree} of the packing carries nothing; pack again")]
    NoWeight {
        /// Which, from 0.
        tree: usize,
    },
    /// A tree names a rank that is not there.
    #[error("tree {tree} of the packing names rank {rank} of {ranks}; pack the topology of these ranks")]
    NoSuchRank {
        /// Which tree, from 0.
        tree: usize,
        /// Which rank.
        rank: Rank,
        /// How many there are.
        ranks: u32,
    },
    /// A tree does not reach all ranks exactly once.
    #[error("tree {tree} of the packing does not join every rank to rank {root} exactly once; pack again")]
    NotSpanning {
        /// Which tree, from 0.
        tree: usize,
        /// Its root.
        root: Rank,
    },
    /// An entry of a gather or scatter is no path that begins or ends at the root.
    #[error(
        "entry {tree} of the packing is no path between rank {rank} and the root, rank {root}; pack again"
    )]
    NoPath {
        /// Which entry, from 0.
        tree: usize,
        /// Whose data it carries.
        rank: Rank,
        /// The root.
        root: Rank,
    },
    /// Nothing carries a rank's data.
    #[error("no tree of the packing carries the data of rank {rank}; pack again")]
    Uncovered {
        /// Whose.
        rank: Rank,
    },
    /// The collective has no packing.
    #[error("{} has no packing; take direct", .collective.name())]
    NotPacked {
        /// Which.
        collective: Collective,
    },
    /// An edge names a link that the topology has not.
    #[error(
        "tree {tree} of the packing goes from '{from}' to '{to}', which no link joins; pack this topology"
    )]
    NoLink {
        /// Which tree, from 0.
        tree: usize,
        /// Where the link should begin.
        from: String,
        /// Where it should end.
        to: String,
    },
}

/// Checks the form of a tree and says whose data it carries.
pub(super) fn part_of(
    collective: Collective,
    number: usize,
    tree: &Tree,
    edges: &[(Rank, Rank)],
    ranks: u32,
) -> Result<u32, PackedError> {
    let root = tree.root;
    match collective {
        Collective::Gather { root: at } | Collective::Scatter { root: at } => {
            let gathers = matches!(collective, Collective::Gather { .. });
            let ends = edges.first().zip(edges.last()).map_or((at, at), |(first, last)| (first.0, last.1));
            let (near, rank) = if gathers { (ends.1, ends.0) } else { ends };
            let mut passed: Vec<Rank> = edges.iter().map(|edge| edge.1).chain([ends.0]).collect();
            passed.sort_unstable();
            let is_path = edges.windows(2).all(|pair| pair[0].1 == pair[1].0)
                && passed.windows(2).all(|pair| pair[0] != pair[1])
                && near == at;
            if is_path { Ok(rank) } else { Err(PackedError::NoPath { tree: number, rank, root: at }) }
        }
        Collective::Broadcast { .. }
        | Collective::Reduce { .. }
        | Collective::AllGather
        | Collective::ReduceScatter
        | Collective::AllReduce => {
            let is_rooted = collective.root().is_none_or(|at| at == root);
            if !is_rooted || !spans(edges, root, ranks, is_upwards(collective)) {
                return Err(PackedError::NotSpanning { tree: number, root });
            }
            Ok(if collective.parts(ranks) == 1 { 0 } else { root })
        }
        _ => Err(PackedError::NotPacked { collective }),
    }
}

/// Whether the edges of a tree lead to its root.
pub(super) fn is_upwards(collective: Collective) -> bool {
    collective.reduces()
}

/// Whether the edges make a tree of all ranks around the root.
fn spans(edges: &[(Rank, Rank)], root: Rank, ranks: u32, upwards: bool) -> bool {
    let mut parents = vec![None; ranks as usize];
    for &(from, to) in edges {
        let (child, parent) = if upwards { (from, to) } else { (to, from) };
        if child == root || parents[child as usize].replace(parent).is_some() {
            return false;
        }
    }
    // As many edges as other ranks, each of which has one parent: a tree unless some go around in a
    // circle.
    let arrives = |rank: Rank| {
        let mut at = rank;
        (0..ranks).any(|_| match parents[at as usize] {
            Some(parent) => {
                at = parent;
                false
            }
            None => true,
        })
    };
    edges.len() + 1 == ranks as usize && (0..ranks).all(arrives)
}

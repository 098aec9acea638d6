//! Along the trees of a packing, each for its share of the data.
//!
//! A [`Packing`] says which trees of ranks together use the links best and what each of them
//! carries; [`PackedTrees`] is what a schedule needs of it: edges, and shares as block weights.
//! Every tree gets a block of its own, so that all travel at the same time, in as many chunks as
//! each other: the chunks of a tree are as large as its share, and where several trees use a link,
//! serving chunks in the order in which they come gives each the part that the packing gives it.
//!
//! * Broadcast, all-gather: down the trees. Reduce, reduce-scatter: up. All-reduce: up and down
//!   each tree. In these forms they are [trees](super::tree) like those of the other algorithms.
//! * Gather, scatter: along paths. Ranks on the way keep a chunk in scratch memory and pass it on.
//!
//! Cost for `n` bytes of the whole and a packing of rate `R` whose longest way (to the root, from
//! it, or both) has `d` edges, in `k` chunks: `(1 + (d-1)/k)·n/R` and the latency of that way.
//! [`Pace`] chooses `k`, and with it the window that covers the time from the word that a chunk may
//! come to its coming.
//!
//! Links serve whoever comes, and a tree whose chunks are soon there and back comes more often: it
//! would take from others what the packing gives them, be through early, and leave links idle that
//! only it can use. As all trees have as many chunks, it is enough that ranks let none get far
//! ahead of the others ([`Pace::lead`]): over eight servers on a switch of which one has three
//! quarters of its bandwidth left, an all-reduce then goes at 99 % of the bound instead of 89 %.
//! And of what waits for a link the oldest chunk goes first, whichever tree it is of
//! (`engine/run/pending_puts.rs` of `pleach-collectives`).

mod form;
mod pace;
mod paths;
mod weights;

use pleach_packing::topology::Topology;
use pleach_packing::{Packing, Rate};
use pleach_vocabulary::{Collective, Rank};

use super::Access;
use super::tree::{Forest, Shape, Tree};
use crate::digest::Hasher64;
use crate::{Block, BlockId, Part, Schedule, SignalSlot};

pub use form::PackedError;
pub use pace::{Pace, signal_slots_of_pair_max};

use form::{is_upwards, part_of};

/// The chunk has come, or may be read.
const DATA: SignalSlot = SignalSlot(1);
/// The chunk may come, or has been read.
const READY: SignalSlot = SignalSlot(2);
/// What is passed on.
const PASSING: Part = Part::Scratch(0);

/// What a schedule needs of a packing. Equal ones make equal schedules.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PackedTrees {
    collective: Collective,
    ranks: u32,
    trees: Vec<Share>,
    pace: Pace,
    /// By how much the largest rounding of a weight slows its tree down; zero where weights are
    /// exact.
    loss: Rate,
}

/// A tree and its block.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Share {
    root: Rank,
    /// Whose data, where each rank has its own.
    part: u32,
    weight: u32,
    /// In the direction of the data.
    edges: Vec<(Rank, Rank)>,
}

impl PackedTrees {
    /// Takes from a packing of this topology what schedules need, and checks that it is one.
    /// `message_ns`: what a message costs its sender besides its bytes, in nanoseconds.
    ///
    /// # Errors
    ///
    /// See [`PackedError`].
    pub fn new(packing: &Packing, topology: &Topology, message_ns: u64) -> Result<Self, PackedError> {
        let (collective, ranks) = (packing.collective, topology.ranks());
        let mut trees = Vec::with_capacity(packing.trees.len());
        for (number, tree) in packing.trees.iter().enumerate() {
            if tree.weight <= Rate::from_integer(0) {
                return Err(PackedError::NoWeight { tree: number });
            }
            let edges: Vec<(Rank, Rank)> = tree.edges.iter().map(|edge| (edge.from, edge.to)).collect();
            let named = edges.iter().flat_map(|&(from, to)| [from, to]).chain([tree.root]);
            if let Some(rank) = named.into_iter().find(|&rank| rank >= ranks) {
                return Err(PackedError::NoSuchRank { tree: number, rank, ranks });
            }
            let part = part_of(collective, number, tree, &edges, ranks)?;
            trees.push(Share { root: tree.root, part, weight: 0, edges });
        }
        if let Some(rank) =
            (0..collective.parts(ranks)).find(|&part| !trees.iter().any(|tree| tree.part == part))
        {
            return Err(PackedError::Uncovered { rank });
        }
        let loss = weights::weigh(&mut trees, &packing.trees);
        let pace = Pace::of(packing, topology, &trees, message_ns)?;
        Ok(Self { collective, ranks, trees, pace, loss })
    }

    /// What it carries out.
    #[must_use]
    pub fn collective(&self) -> Collective {
        self.collective
    }

    /// Of how many ranks.
    #[must_use]
    pub fn ranks(&self) -> u32 {
        self.ranks
    }

    /// How many trees.
    #[must_use]
    pub fn trees(&self) -> usize {
        self.trees.len()
    }

    /// How fast, and over how long ways.
    #[must_use]
    pub fn pace(&self) -> &Pace {
        &self.pace
    }

    /// By which part of its time the slowest tree takes longer than in the packing, because weights
    /// had to be rounded to 32 bits; zero where all proportions are exact.
    #[must_use]
    pub fn loss(&self) -> Rate {
        self.loss
    }

    /// A number by which people tell packings apart; equal ones have the same.
    #[must_use]
    pub fn digest(&self) -> u64 {
        use std::hash::{Hash, Hasher};
        let mut hasher = Hasher64::default();
        self.hash(&mut hasher);
        hasher.finish()
    }
}

pub(super) fn schedule(trees: &PackedTrees, access: Access) -> Schedule {
    let PackedTrees { collective, ranks, .. } = *trees;
    let blocks = trees.trees.iter().map(|tree| Block { part: tree.part, weight: tree.weight }).collect();
    if matches!(collective, Collective::Gather { .. } | Collective::Scatter { .. }) {
        return paths::along_paths(trees, blocks, access);
    }
    let upwards = is_upwards(collective);
    let shape = |block: BlockId| {
        let edges = trees.trees[block as usize].edges.iter();
        Shape::both(Tree::new(ranks, edges.map(|&(from, to)| if upwards { (from, to) } else { (to, from) })))
    };
    let turns: Vec<Vec<u32>> = trees.trees.iter().map(|tree| turns(tree, ranks)).collect();
    Forest {
        collective,
        ranks,
        links: access.into(),
        window: trees.pace.window,
        blocks,
        shape: &shape,
        turn: &|rank, block| {
            // Among those that it has as soon, each rank begins with another one's tree: not all
            // send to the same at once.
            let after = (trees.trees[block as usize].root + ranks - rank) % ranks;
            turns[block as usize][rank as usize] * ranks + after
        },
    }
    .schedule()
}

/// By rank: how many edges a chunk has behind it when it comes to the rank, so that ranks turn
/// first to the trees whose data they have first.
fn turns(tree: &Share, ranks: u32) -> Vec<u32> {
    let mut turns = vec![0; ranks as usize];
    let mut changed = true;
    // From the leaves on or from the root on; a tree of depth d is done in d rounds.
    while std::mem::take(&mut changed) {
        for &(from, to) in &tree.edges {
            let there = turns[from as usize] + 1;
            let known = &mut turns[to as usize];
            if *known < there {
                (*known, changed) = (there, true);
            }
        }
    }
    turns
}

#[cfg(test)]
mod tests;

//! The trees of a packing, each for its share of the data.
//!
//! A [`Packing`] gives weighted trees of ranks that make the best use of the links. [`PackedTrees`]
//! keeps the edges, and the weights as block weights. Every tree gets a block of its own, so all
//! trees work at the same time, with the same number of chunks: the chunks of a tree are in
//! proportion to its weight. If several trees use a link, first-come service of their chunks gives
//! each tree the share that the packing gives it.
//!
//! * Broadcast, all-gather: down the trees. Reduce, reduce-scatter: up. All-reduce: up and down
//!   each tree. These are trees like those of the other algorithms.
//! * Gather, scatter: along paths. Ranks on the path keep a chunk in scratch memory and forward it.
//!
//! Cost for `n` bytes of the whole and a packing of rate `R` whose longest path (to the root, from
//! it, or both) has `d` edges, in `k` chunks: `(1 + (d-1)/k)·n/R` and the latency of that path.
//! [`PacingPolicy`] chooses `k`, and the window that covers the time from the ready signal of a
//! chunk to its arrival.
//!
//! Links serve transfers in order of arrival, and a tree with short round trips would send more
//! often than its share. It would take bandwidth from other trees, end early, and leave links idle
//! that only it can use. All trees have the same number of chunks, so it suffices that ranks limit
//! the skew between trees ([`PacingPolicy::skew_limit`]). With eight servers on a switch, one of
//! which has three quarters of its bandwidth left, an all-reduce then reaches 99 % of the bound
//! instead of 89 %. Of the chunks that wait for a link, the oldest goes first, whichever tree it
//! belongs to (`engine/run/pending_puts.rs` of `pleach-collectives`).

use std::collections::BTreeMap;

use pleach_packing::topology::Topology;
use pleach_packing::{Packing, Rate, Tree as WeightedTree};
use pleach_vocabulary::{Collective, Rank};

use crate::generate::{Access, ordered_lanes};
use crate::generate::{Cover, Tree, TreePair, TreeSchedule};
use crate::generate::{Program, Target};
use crate::{Block, BlockId, Lane, Part, Place, Schedule, SignalSlot};
use pleach_vocabulary::digest::Hasher64;

pub use pacing::{PacingPolicy, signal_slots_of_pair_max};

mod pacing;
#[cfg(test)]
mod tests;

/// The chunk has come, or may be read.
const DATA: SignalSlot = SignalSlot(1);
/// The chunk may come, or has been read.
const READY: SignalSlot = SignalSlot(2);
/// Chunks in transit.
const PASSING: Part = Part::Scratch(0);

/// What a schedule needs of a packing. Equal ones make equal schedules.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PackedTrees {
    collective: Collective,
    ranks: u32,
    trees: Vec<TreeBlock>,
    pacing: PacingPolicy,
    /// By how much the largest rounding of a weight slows its tree down; zero where weights are
    /// exact.
    loss: Rate,
}

/// A tree and its block.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct TreeBlock {
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
            trees.push(TreeBlock { root: tree.root, part, weight: 0, edges });
        }
        if let Some(rank) =
            (0..collective.parts(ranks)).find(|&part| !trees.iter().any(|tree| tree.part == part))
        {
            return Err(PackedError::Uncovered { rank });
        }
        let loss = weigh(&mut trees, &packing.trees);
        let pacing = PacingPolicy::of(packing, topology, &trees, message_ns)?;
        Ok(Self { collective, ranks, trees, pacing, loss })
    }

    /// The collective of the schedule.
    #[must_use]
    pub fn collective(&self) -> Collective {
        self.collective
    }

    /// Of how many ranks.
    #[must_use]
    pub fn ranks(&self) -> u32 {
        self.ranks
    }

    /// The number of trees.
    #[must_use]
    pub fn trees(&self) -> usize {
        self.trees.len()
    }

    /// How fast, and over how long ways.
    #[must_use]
    pub fn pacing(&self) -> &PacingPolicy {
        &self.pacing
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
        return along_paths(trees, blocks, access);
    }
    let upwards = is_upwards(collective);
    let shape = |block: BlockId| {
        let edges = trees.trees[block as usize].edges.iter();
        TreePair::both(Tree::new(
            ranks,
            edges.map(|&(from, to)| if upwards { (from, to) } else { (to, from) }),
        ))
    };
    let lane_order: Vec<Vec<u32>> = trees.trees.iter().map(|tree| lane_order(tree, ranks)).collect();
    TreeSchedule {
        collective,
        ranks,
        links: access.into(),
        window: trees.pacing.window,
        blocks,
        shape: &shape,
        lane_order: &|rank, block| {
            // Among those that it has as soon, each rank begins with another one's tree: not all
            // send to the same at once.
            let after = (trees.trees[block as usize].root + ranks - rank) % ranks;
            lane_order[block as usize][rank as usize] * ranks + after
        },
        cover: Cover::All,
    }
    .schedule()
}

/// By rank: how many edges a chunk has behind it when it comes to the rank, so that ranks turn
/// first to the trees whose data they have first.
fn lane_order(tree: &TreeBlock, ranks: u32) -> Vec<u32> {
    let mut lane_order = vec![0; ranks as usize];
    let mut changed = true;
    // From the leaves on or from the root on; a tree of depth d is done in d rounds.
    while std::mem::take(&mut changed) {
        for &(from, to) in &tree.edges {
            let there = lane_order[from as usize] + 1;
            let known = &mut lane_order[to as usize];
            if *known < there {
                (*known, changed) = (there, true);
            }
        }
    }
    lane_order
}

// Gather and scatter: each block moves along its path.

fn along_paths(trees: &PackedTrees, blocks: Vec<Block>, access: Access) -> Schedule {
    let mut programs: Vec<Vec<(usize, Lane)>> = (0..trees.ranks).map(|_| Vec::new()).collect();
    for (block, tree) in (0..).zip(&trees.trees) {
        let Some(&(first, _)) = tree.edges.first() else {
            let mut lane = Program::new(access, tree.root, block);
            lane.copy(Part::Input, Part::Output);
            programs[tree.root as usize].extend(lane.finish().map(|lane| (usize::MAX, lane)));
            continue;
        };
        let path: Vec<Rank> = std::iter::once(first).chain(tree.edges.iter().map(|edge| edge.1)).collect();
        for (place, &rank) in path.iter().enumerate() {
            let before = place.checked_sub(1).map(|place| path[place]);
            let stop = PathHop { before, is_second: place == 1, after: path.get(place + 1).copied() };
            let is_last_hop = place + 2 == path.len();
            let lane = stop.lane(Program::new(access, rank, block), is_last_hop);
            programs[rank as usize].extend(lane.map(|lane| (place, lane)));
        }
    }
    Schedule {
        collective: trees.collective,
        window: trees.pacing.window,
        single_chunk: false,
        blocks,
        programs: ordered_lanes(programs),
    }
}

/// A rank on a path.
struct PathHop {
    before: Option<Rank>,
    /// The one before has the chunk in its input.
    is_second: bool,
    after: Option<Rank>,
}

impl PathHop {
    /// What it does: as the ranks of a chain in a broadcast do, but that what is on its way lies in
    /// scratch memory.
    fn lane(&self, mut lane: Program<'_>, is_last_hop: bool) -> Option<Lane> {
        let own = if self.after.is_some() { PASSING } else { Part::Output };
        let mut held = Part::Input;
        let mut read = None;
        if let Some(before) = self.before {
            match lane.access(before) {
                Access::Put => {
                    lane.signal(before, READY, &[]);
                    lane.wait(before, DATA);
                    held = if self.after.is_some() { PASSING } else { Part::SharedOutput };
                }
                Access::Mapped => {
                    lane.wait(before, DATA);
                    let part = if self.is_second { Part::SharedInput } else { PASSING };
                    let step = lane.reduce(vec![Place { rank: before, part }], vec![lane.own(own)]);
                    lane.signal(before, READY, &[step]);
                    (held, read) = (PASSING, Some(step));
                }
            }
        }
        let Some(after) = self.after else {
            if held == Part::SharedOutput {
                lane.copy(Part::SharedOutput, Part::Output);
            }
            return lane.finish();
        };
        match lane.access(after) {
            Access::Put => {
                lane.wait(after, READY);
                let part = if is_last_hop { Part::SharedOutput } else { PASSING };
                lane.put(held, Target { rank: after, part, signal_slot: DATA });
            }
            Access::Mapped => {
                let shown = if self.before.is_some() {
                    read
                } else {
                    Some(lane.copy(Part::Input, Part::SharedInput))
                };
                lane.signal(after, DATA, shown.as_slice());
                lane.wait(after, READY);
            }
        }
        lane.finish()
    }
}

// The weights of blocks, in proportion to the weights of the trees of a packing.

/// Gives every tree the weight of its block: proportional, exactly where 32 bits suffice, and then
/// as small as can be; else rounded to what 32 bits hold. Returns by which part the slowest takes
/// longer.
fn weigh(shares: &mut [TreeBlock], trees: &[WeightedTree]) -> Rate {
    let mut members: BTreeMap<u32, Vec<usize>> = BTreeMap::new();
    for (tree, share) in shares.iter().enumerate() {
        members.entry(share.part).or_default().push(tree);
    }
    let mut slowest = Rate::from_integer(0);
    for members in members.values() {
        let weights: Vec<Rate> = members.iter().map(|&tree| trees[tree].weight).collect();
        let whole = exact_weights(&weights);
        let rounded = whole.clone().unwrap_or_else(|| rounded_weights(&weights));
        for (&tree, &weight) in members.iter().zip(&rounded) {
            shares[tree].weight = weight;
        }
        if whole.is_none() {
            slowest = slowest.max(lost(&weights, &rounded));
        }
    }
    slowest
}

/// By which part the share of a rounded weight is larger than that of the weight, at most; to
/// 2^-40, upwards.
fn lost(weights: &[Rate], rounded: &[u32]) -> Rate {
    const STEPS: f64 = (1u64 << 40) as f64;
    let (sum, sum_rounded): (f64, f64) =
        (weights.iter().map(value).sum(), rounded.iter().map(|&weight| f64::from(weight)).sum());
    let more =
        |(weight, &rounded): (&Rate, &u32)| f64::from(rounded) / sum_rounded / (value(weight) / sum) - 1.0;
    let most = weights.iter().zip(rounded).map(more).fold(0.0, f64::max);
    Rate::new((most * STEPS).ceil() as i128, 1 << 40)
}

fn value(weight: &Rate) -> f64 {
    *weight.numer() as f64 / *weight.denom() as f64
}

/// The smallest whole numbers in the same proportion, if they fit.
fn exact_weights(weights: &[Rate]) -> Option<Vec<u32>> {
    let mut multiple: i128 = 1;
    for weight in weights {
        multiple = (multiple / gcd(multiple, *weight.denom())).checked_mul(*weight.denom())?;
    }
    let mut whole = Vec::with_capacity(weights.len());
    for weight in weights {
        whole.push(weight.numer().checked_mul(multiple / weight.denom())?);
    }
    let common = whole.iter().copied().fold(0, gcd).max(1);
    whole.into_iter().map(|weight| u32::try_from(weight / common).ok()).collect()
}

/// The nearest whole numbers, the largest being as large as can be.
fn rounded_weights(weights: &[Rate]) -> Vec<u32> {
    let largest = weights.iter().map(value).fold(f64::MIN_POSITIVE, f64::max);
    weights
        .iter()
        .map(|weight| ((value(weight) / largest * f64::from(u32::MAX)).round() as u32).max(1))
        .collect()
}

fn gcd(one: i128, other: i128) -> i128 {
    if other == 0 { one } else { gcd(other, one % other) }
}

// Checks the form of a packing: trees that span all ranks, or paths between ranks and the root.

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
        /// The index of the tree, from 0.
        tree: usize,
        /// The rank.
        rank: Rank,
        /// The number of ranks.
        ranks: u32,
    },
    /// A tree does not reach all ranks exactly once.
    #[error("tree {tree} of the packing does not join every rank to rank {root} exactly once; pack again")]
    NotSpanning {
        /// The index of the tree, from 0.
        tree: usize,
        /// The root.
        root: Rank,
    },
    /// An entry of a gather or scatter is no path that begins or ends at the root.
    #[error(
        "entry {tree} of the packing is no path between rank {rank} and the root, rank {root}; pack again"
    )]
    NoPath {
        /// The index of the tree, from 0.
        tree: usize,
        /// The rank.
        rank: Rank,
        /// The root.
        root: Rank,
    },
    /// Nothing carries a rank's data.
    #[error("no tree of the packing carries the data of rank {rank}; pack again")]
    Uncovered {
        /// The rank.
        rank: Rank,
    },
    /// The collective has no packing.
    #[error("{} has no packing; take direct", .collective.name())]
    NotPacked {
        /// The collective.
        collective: Collective,
    },
    /// An edge names a link that the topology has not.
    #[error(
        "tree {tree} of the packing goes from '{from}' to '{to}', which no link joins; pack this topology"
    )]
    NoLink {
        /// The index of the tree, from 0.
        tree: usize,
        /// Where the link should begin.
        from: String,
        /// Where it should end.
        to: String,
    },
}

/// Checks the form of a tree and says whose data it carries.
fn part_of(
    collective: Collective,
    number: usize,
    tree: &WeightedTree,
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
fn is_upwards(collective: Collective) -> bool {
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
    // cycle.
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

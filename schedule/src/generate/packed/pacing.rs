//! The pacing policy of a packing: the number of chunks of a message, the window, and the skew
//! limit between trees.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;

use pleach_packing::topology::{NodeId, Topology};
use pleach_packing::{Edge, Packing, Tree};
use pleach_vocabulary::{Collective, Rank};

use super::is_upwards;
use super::{PackedError, TreeBlock};

/// Chunks of a tree that may be under way, if signal slots and scratch suffice for that number.
const WINDOW: u32 = 32;
/// Most signals from one rank to another: those of a chunk of every tree, times the window. Some
/// hundred trees, on links that are all different, have 21 chunks each under way.
const SIGNAL_SLOTS_OF_PAIR_MAX: u32 = 4096;
/// The same limit in large groups, where every rank keeps signal slots for very many others.
const SIGNAL_SLOTS_OF_PAIR_MAX_OF_MANY: u32 = 1024;
/// The most ranks for which each rank keeps that many signal slots.
const FEW_RANKS_MAX: u32 = 64;
/// Chunks for each edge of the longest path if chunks cost nothing, of all trees together. Many
/// trees fill each other's gaps; the chunks of few trees must be smaller.
const CHUNKS_PER_HOP_OF_ALL: u32 = 2048;
/// Chunks of one tree for each edge of the longest path, at least and at most.
const CHUNKS_PER_HOP: RangeInclusive<u32> = 64..=128;
/// The same if a chunk goes up and down, and keeps its place in the window all the way.
const CHUNKS_PER_HOP_BOTH_WAYS: RangeInclusive<u32> = 40..=128;

/// Least number of chunks of a window that are under way besides those that take their turns on
/// links. With fewer chunks, each is so long that filling the pipeline takes more time than
/// waiting.
const COVERED_CHUNKS_MIN: u32 = 3;

/// The speed of a packing that is under way, and the length of its paths. The number of chunks
/// follows from these.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PacingPolicy {
    /// Bytes of the whole in a second, rounded down.
    pub bytes_per_s: u64,
    /// Edges of the longest path.
    pub hops: u32,
    /// The latency of a byte on the longest path, in nanoseconds.
    pub latency_ns: u64,
    /// The latency of a byte over the longest edge and a signal back, in nanoseconds.
    pub round_trip_ns: u64,
    /// How long a chunk keeps its place in the window besides its turns on links, in nanoseconds.
    /// It is one round trip. If results come back on the path of the contributions, it is the whole
    /// path.
    pub occupancy_ns: u64,
    /// How many turns a chunk takes on links meanwhile. In a turn, a chunk of every tree goes over
    /// every link. A chunk takes about two turns at its receiver. If it goes all the way up and
    /// down, it takes one more for every four hops, because the oldest waiting chunk goes first.
    pub occupancy_turns: u32,
    /// What a chunk of every tree costs a rank besides its bytes, in nanoseconds; 0 if nothing.
    pub chunk_ns: u64,
    /// Chunks of a tree for each edge of the longest path, if chunks cost nothing.
    pub chunks_per_hop: u32,
    /// Chunks under way.
    pub window: u32,
    /// By how many chunks a rank may be further with one tree than with another, besides the chunks
    /// that latency takes ([`PacingPolicy::skew_limit_of`]). Each rank keeps the limit by itself.
    /// No rank waits for ever: the least chunk that is incomplete anywhere may be begun everywhere.
    pub skew_limit: u32,
}

impl PacingPolicy {
    /// The policy of a packing of this topology, with these trees and blocks.
    pub(super) fn of(
        packing: &Packing,
        topology: &Topology,
        trees: &[TreeBlock],
        message_ns: u64,
    ) -> Result<Self, PackedError> {
        let (collective, ranks) = (packing.collective, topology.ranks());
        let (of_pair, of_rank) = signals(ranks, trees);
        let window = WINDOW.min(signal_slots_of_pair_max(ranks) / of_pair.max(1)).max(1);
        let chunk_ns = message_ns.saturating_mul(u64::from(of_rank));
        let (hops, latency_ns, round_trip_ns) = longest_paths(packing, topology)?;
        let bytes_per_s = u64::try_from(packing.rate.to_integer()).unwrap_or(u64::MAX).max(1);
        let (far, occupancy_ns, occupancy_turns, range) = if collective == Collective::AllReduce {
            (hops / 2, latency_ns, 2 + hops / 4, CHUNKS_PER_HOP_BOTH_WAYS)
        } else {
            (hops, round_trip_ns, 2, CHUNKS_PER_HOP)
        };
        // Besides its window, a tree may be ahead by the hops by which chunks of another tree come
        // later, twice because of queues on the way. Flat trees with some slow links may be ahead
        // by another window, if that is more. They may be no further ahead: then they would take
        // turns on links from late trees.
        let skew_limit = window + window.max(2 * far);
        let chunks_per_hop =
            (CHUNKS_PER_HOP_OF_ALL / trees.len().max(1) as u32).clamp(*range.start(), *range.end());
        Ok(Self {
            bytes_per_s,
            hops,
            latency_ns,
            round_trip_ns,
            occupancy_ns,
            occupancy_turns,
            chunk_ns,
            chunks_per_hop,
            window,
            skew_limit,
        })
    }

    /// The number of chunks by which one tree of a rank may be ahead of another, when `bytes`
    /// of the whole are cut into `chunks` a tree: [`PacingPolicy::skew_limit`], and the chunks
    /// that pass a place while a byte is on the longest way.
    #[must_use]
    pub fn skew_limit_of(&self, bytes: u64, chunks: u32) -> u32 {
        let under_way = self.latency_ns / self.round_ns(bytes, chunks);
        self.skew_limit.saturating_add(u32::try_from(under_way).unwrap_or(u32::MAX))
    }

    /// The time that a chunk of every tree takes, when `bytes` of the whole are cut into `chunks`;
    /// at least 1, in nanoseconds.
    #[must_use]
    pub fn round_ns(&self, bytes: u64, chunks: u32) -> u64 {
        let bytes_in_s = u128::from(self.bytes_per_s.max(1)) * u128::from(chunks.max(1));
        let nanos = u128::from(bytes) * 1_000_000_000 / bytes_in_s;
        u64::try_from(nanos).unwrap_or(u64::MAX).max(1)
    }

    /// The best number of chunks for a message of `bytes` of the whole. There are so many chunks
    /// that the first one takes a short time on the longest path, compared with the whole message.
    /// There are not so many that chunks cost more than they save (the square root of the formula
    /// for pipelines), or that the window does not cover a round trip.
    #[must_use]
    pub fn chunks(&self, bytes: u64) -> u64 {
        let nanos = u128::from(bytes) * 1_000_000_000 / u128::from(self.bytes_per_s.max(1));
        let nanos = u64::try_from(nanos).unwrap_or(u64::MAX);
        let hops = u64::from(self.hops.max(1));
        let wanted = match self.chunk_ns {
            0 => hops * u64::from(self.chunks_per_hop),
            cost => ((u128::from(hops) * u128::from(nanos) / u128::from(cost)) as u64).isqrt(),
        };
        let least = COVERED_CHUNKS_MIN.min(self.window.saturating_sub(2)).max(1);
        let covered = u64::from(self.window.saturating_sub(self.occupancy_turns).max(least));
        let shortest_ns = (self.occupancy_ns / covered).max(1);
        wanted.min(nanos / shortest_ns).max(1)
    }
}

/// The signals that one rank may have under way to another in a call, in a group of `ranks`.
#[must_use]
pub const fn signal_slots_of_pair_max(ranks: u32) -> u32 {
    if ranks <= FEW_RANKS_MAX { SIGNAL_SLOTS_OF_PAIR_MAX } else { SIGNAL_SLOTS_OF_PAIR_MAX_OF_MANY }
}

/// Most signals of a chunk of every tree that one rank sends to another, and that one rank sends in
/// all.
fn signals(ranks: u32, trees: &[TreeBlock]) -> (u32, u32) {
    let mut pairs: BTreeMap<(Rank, Rank), u32> = BTreeMap::new();
    let mut all = vec![0; ranks as usize];
    for &(from, to) in trees.iter().flat_map(|tree| &tree.edges) {
        // Data go one way. The results, or the signals that data may come, go the other way.
        for (from, to) in [(from, to), (to, from)] {
            *pairs.entry((from, to)).or_default() += 1;
            all[from as usize] += 1;
        }
    }
    (pairs.into_values().max().unwrap_or(0), all.into_iter().max().unwrap_or(0))
}

/// The longest paths of all trees: edges, nanoseconds, and nanoseconds there and back over one
/// edge.
fn longest_paths(packing: &Packing, topology: &Topology) -> Result<(u32, u64, u64), PackedError> {
    let collective = packing.collective;
    let (mut hops, mut latency, mut round_trip) = (0, 0, 0);
    for (number, tree) in packing.trees.iter().enumerate() {
        let latencies = tree.edges.iter().map(|edge| latency_ns(topology, number, edge));
        let latencies: Vec<u64> = latencies.collect::<Result<_, _>>()?;
        round_trip = latencies.iter().fold(round_trip, |longest: u64, latency| longest.max(2 * latency));
        let (far, long) = match collective {
            Collective::Gather { .. } | Collective::Scatter { .. } => {
                (latencies.len() as u32, latencies.iter().sum())
            }
            _ => farthest(tree, &latencies, topology.ranks(), is_upwards(collective)),
        };
        let longest_paths = if collective == Collective::AllReduce { 2 } else { 1 };
        hops = hops.max(longest_paths * far);
        latency = latency.max(u64::from(longest_paths) * long);
    }
    Ok((hops, latency, round_trip))
}

/// The largest distance of a rank from the root of a tree: edges, and nanoseconds.
fn farthest(tree: &Tree, latencies: &[u64], ranks: u32, upwards: bool) -> (u32, u64) {
    let mut above = vec![None; ranks as usize];
    for (edge, &latency) in tree.edges.iter().zip(latencies) {
        let (child, parent) = if upwards { (edge.from, edge.to) } else { (edge.to, edge.from) };
        above[child as usize] = Some((parent, latency));
    }
    let far = |rank: Rank| {
        let (mut hops, mut nanos, mut at) = (0, 0, rank);
        while let Some((parent, latency)) = above[at as usize] {
            (hops, nanos, at) = (hops + 1, nanos + latency, parent);
        }
        (hops, nanos)
    };
    (0..ranks).map(far).fold((0, 0), |most, far| (most.0.max(far.0), most.1.max(far.1)))
}

/// The latency of a byte over the longest path of an edge.
fn latency_ns(topology: &Topology, tree: usize, edge: &Edge) -> Result<u64, PackedError> {
    let mut longest = 0;
    for path in &edge.paths {
        let mut sum = 0u64;
        for pair in path.hops.windows(2) {
            sum = sum.saturating_add(link_latency_ns(topology, tree, pair[0], pair[1])?);
        }
        longest = longest.max(sum);
    }
    Ok(longest)
}

fn link_latency_ns(topology: &Topology, tree: usize, from: NodeId, to: NodeId) -> Result<u64, PackedError> {
    let is_node = |node: NodeId| (node.0 as usize) < topology.nodes().len();
    let link = (is_node(from) && is_node(to)).then(|| topology.link(from, to)).flatten();
    let name = |node: NodeId| {
        if is_node(node) { topology.name(node).to_owned() } else { format!("node number {}", node.0) }
    };
    link.map(|link| link.latency_ns).ok_or_else(|| PackedError::NoLink {
        tree,
        from: name(from),
        to: name(to),
    })
}

//! The rates of other strategies, for comparison with an optimal packing.
//!
//! | strategy | algorithm | collectives |
//! |--|--|--|
//! | `blink` | [Blink's algorithm](mod@blink) | all |
//! | `ring` | [as many rings as fit](ring); if there is none, the ring over PCIe that the topology may describe, marked | all |
//! | `double-tree` | two binary trees over the ranks in their order, if each of their edges is a link or goes through switches only | all-reduce, broadcast, reduce |
//! | `reduce-scatter+all-gather` | one after the other over the same trees, each with half of the capacity of the links | all-reduce |
//!
//! A ring over PCIe may supplement Blink's trees, see [`hybrid`].
//!
//! Each strategy gives a [`Packing`] that the checker accepts, with the bound and certificate of
//! the optimal packing.

use std::collections::BTreeMap;
use std::fmt;

use pleach_vocabulary::{Collective, Rank};

use blink::hybrid::{Classes, Split};
use blink::{BlinkError, BlinkOptions};

use super::all_reduce::pack_in_two_phases;
use super::scale::{fitted, merged};
use super::{Edge, Packing, Path, Rate, Strategy, Tree, double_tree_edges, greedy};
use crate::topology::{NodeId, Topology};

pub mod blink;
pub mod ring;

/// Why a strategy has no packing of a topology.
#[derive(Clone, pleach_derive::ErrorDebug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum StrategyError {
    /// The strategy has no packing for this collective.
    #[error("not for {collective}")]
    NotFor {
        /// The collective.
        collective: Collective,
    },
    /// Blink has no trees for this topology.
    #[error("not possible here: {0}")]
    Blink(#[from] BlinkError),
    /// A tree needs an edge that neither a link nor switches carry.
    #[error("not possible here: ranks {from} and {to} are not joined by a link or through switches only")]
    Unjoined {
        /// The sender.
        from: Rank,
        /// The receiver.
        to: Rank,
    },
    /// No cycle visits every rank once.
    #[error("not possible here: no ring of links visits every rank")]
    NoRing,
    /// The search found no cycle that visits every rank once, and did not prove that there is none.
    #[error("not found here: no ring of links that visits every rank was found")]
    NoRingFound,
    /// The time of the search has no bound, and the graph is not small.
    #[error("takes too long for {ranks} ranks and {links} links")]
    TooLarge {
        /// The number of ranks.
        ranks: u32,
        /// The number of links.
        links: usize,
    },
    /// The trees are used in both directions, but some ranks are joined only by links that lead one
    /// way.
    #[error("not possible here: some ranks are joined only by links that lead one way")]
    OneWay,
}

/// Checks that the search of a strategy ends soon on a graph of this size.
///
/// # Errors
///
/// [`StrategyError::TooLarge`].
pub(super) fn expect_in_reach(topology: &Topology, strategy: Strategy) -> Result<(), StrategyError> {
    let is_in_reach = match strategy {
        Strategy::Optimal => true,
        Strategy::DoubleTree => greedy::is_bound_within_reach(topology),
        Strategy::Blink | Strategy::Ring | Strategy::ReduceScatterAllGather => {
            greedy::is_exact_within_reach(topology)
        }
    };
    let (ranks, links) = (topology.ranks(), topology.links().len());
    if is_in_reach { Ok(()) } else { Err(StrategyError::TooLarge { ranks, links }) }
}

/// Blink's trees.
///
/// # Errors
///
/// Blink has no trees for this topology.
pub fn blink(
    topology: &Topology,
    optimum: &Packing,
    options: &BlinkOptions,
) -> Result<Packing, StrategyError> {
    Ok(with_bound_of(optimum, blink::trees(topology, optimum.collective, options)?))
}

/// Rings of links, both ways.
///
/// # Errors
///
/// [`StrategyError::NoRing`] and [`StrategyError::NoRingFound`].
pub fn rings(topology: &Topology, optimum: &Packing) -> Result<Packing, StrategyError> {
    rings_found(topology, optimum).map(|(packing, _)| packing)
}

/// The same packing, and whether it is known that no further ring fits.
fn rings_found(topology: &Topology, optimum: &Packing) -> Result<(Packing, bool), StrategyError> {
    let rings = ring::rings(topology);
    let trees = rings.trees(topology.ranks(), optimum.collective);
    match trees.is_empty() && topology.ranks() > 1 {
        true if rings.is_maximum => Err(StrategyError::NoRing),
        true => Err(StrategyError::NoRingFound),
        false => Ok((with_bound_of(optimum, trees), rings.is_maximum)),
    }
}

/// The two trees that `Algorithm::DoubleTree` uses, each for half
/// of the data.
///
/// # Errors
///
/// Another collective, or an edge that no link or switch carries.
pub fn double_tree(topology: &Topology, optimum: &Packing) -> Result<Packing, StrategyError> {
    let (collective, ranks) = (optimum.collective, topology.ranks());
    if !matches!(collective, Collective::AllReduce | Collective::Broadcast { .. } | Collective::Reduce { .. })
    {
        return Err(StrategyError::NotFor { collective });
    }
    if ranks == 1 {
        return Ok(with_bound_of(optimum, Vec::new()));
    }
    let mut shapes = Vec::with_capacity(2);
    for edges in double_tree_edges(ranks, collective.root()) {
        let paths = edges.iter().map(|&(child, parent)| {
            let path = paths_from(topology, child).swap_remove(parent as usize);
            path.ok_or(StrategyError::Unjoined { from: child, to: parent })
        });
        let paths = paths.collect::<Result<Vec<_>, _>>()?;
        let is_child = |rank| edges.iter().any(|&(child, _)| child == rank);
        let default_root = (0..ranks).find(|&rank| !is_child(rank)).unwrap_or(0);
        shapes.push(WeightedTree { tree: SpanningTree { paths }, default_root, weight: Rate::from(1) });
    }
    let trees = WeightedTree::trees(&shapes, ranks, collective);
    // The two uses of a tree need different links where a link leads only one way.
    let trees = fitted(topology, collective, trees).ok_or(StrategyError::OneWay)?;
    Ok(with_bound_of(optimum, trees))
}

/// An all-reduce by a reduce-scatter and then an all-gather.
///
/// # Errors
///
/// Another collective, or ranks that are joined only one way.
pub fn two_phases(topology: &Topology, optimum: &Packing) -> Result<Packing, StrategyError> {
    let collective = optimum.collective;
    if collective != Collective::AllReduce {
        return Err(StrategyError::NotFor { collective });
    }
    if topology.ranks() == 1 {
        return Ok(optimum.clone());
    }
    pack_in_two_phases(topology, None).ok_or(StrategyError::OneWay)
}

/// Blink's hybrid of two classes of links for one call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hybrid {
    /// The number of bytes over the links, and the number of bytes around the ring over PCIe.
    pub split: Split,
    /// The bytes divided by the time until both parts have arrived, in bytes a second.
    pub rate: Rate,
}

/// Blink's trees over the links, together with a ring over PCIe. The ring can be used `setup_ns`
/// nanoseconds after a call of `bytes` bytes began. `None` if the topology does not say what PCIe
/// carries, or if there is nothing to move.
#[must_use]
pub fn hybrid(topology: &Topology, blink: &Packing, bytes: u64, setup_ns: u64) -> Option<Hybrid> {
    let pcie = topology.pcie_ring_bytes_per_s()?;
    let whole = |rate: Rate| u64::try_from(rate.to_integer()).ok();
    let slow = ring::one_way_rate(blink.collective, topology.ranks(), pcie);
    let classes = Classes { fast_bytes_per_s: whole(blink.rate)?, slow_bytes_per_s: whole(slow)?, setup_ns };
    let split = classes.split(bytes);
    let time_ns = classes.time_ns(split).ceil() as i128;
    (time_ns > 0).then(|| Hybrid { split, rate: Rate::new(i128::from(bytes) * 1_000_000_000, time_ns) })
}

/// A topology, a collective, and the result of every strategy for them.
#[derive(Clone, Debug)]
pub struct Comparison {
    /// The collective.
    pub collective: Collective,
    /// The bound.
    pub bound: Rate,
    /// By the names of the strategies; the optimal one first.
    pub rows: Vec<Row>,
}

/// The result of a strategy for a topology.
#[derive(Clone, Debug)]
pub struct Row {
    /// The strategy.
    pub strategy: &'static str,
    /// The result of the strategy.
    pub outcome: Outcome,
}

/// The result of a strategy.
#[derive(Clone, Debug)]
pub enum Outcome {
    /// A packing.
    Packed(Packing),
    /// A packing. A better one may exist: the search was not exhaustive.
    AtLeast(Packing),
    /// No ring fits on the links. A ring over PCIe has this rate.
    OverPcie(Rate),
    /// No packing.
    Impossible(StrategyError),
}

impl Outcome {
    /// The rate in bytes a second.
    #[must_use]
    pub fn rate(&self) -> Option<Rate> {
        match self {
            Self::Packed(packing) | Self::AtLeast(packing) => Some(packing.rate),
            Self::OverPcie(rate) => Some(*rate),
            Self::Impossible(_) => None,
        }
    }
}

impl From<Result<Packing, StrategyError>> for Outcome {
    fn from(result: Result<Packing, StrategyError>) -> Self {
        result.map_or_else(Self::Impossible, Self::Packed)
    }
}

/// Compares an optimal packing with the rates of the other strategies.
#[must_use]
pub fn compare(topology: &Topology, optimum: &Packing) -> Comparison {
    let collective = optimum.collective;
    let in_reach = |strategy| expect_in_reach(topology, strategy);
    let ring = match in_reach(Strategy::Ring).and_then(|()| rings_found(topology, optimum)) {
        Ok((packing, true)) => Outcome::Packed(packing),
        Ok((packing, false)) => Outcome::AtLeast(packing),
        Err(why @ (StrategyError::NoRing | StrategyError::NoRingFound)) => {
            topology.pcie_ring_bytes_per_s().map_or(Outcome::Impossible(why), |bytes_per_s| {
                Outcome::OverPcie(ring::one_way_rate(collective, topology.ranks(), bytes_per_s))
            })
        }
        Err(why) => Outcome::Impossible(why),
    };
    let by = |strategy: Strategy, pack: &dyn Fn() -> Result<Packing, StrategyError>| -> Outcome {
        in_reach(strategy).and_then(|()| pack()).into()
    };
    let rows = [
        (Strategy::Optimal, Outcome::Packed(optimum.clone())),
        (Strategy::Blink, by(Strategy::Blink, &|| blink(topology, optimum, &BlinkOptions::default()))),
        (Strategy::Ring, ring),
        (Strategy::DoubleTree, by(Strategy::DoubleTree, &|| double_tree(topology, optimum))),
        (
            Strategy::ReduceScatterAllGather,
            by(Strategy::ReduceScatterAllGather, &|| two_phases(topology, optimum)),
        ),
    ];
    let row = |(strategy, outcome): (Strategy, Outcome)| Row { strategy: strategy.name(), outcome };
    let rows = rows.into_iter().map(row).collect();
    Comparison { collective, bound: optimum.bound, rows }
}

impl Comparison {
    /// The row of a strategy.
    #[must_use]
    pub fn row(&self, strategy: &str) -> Option<&Row> {
        self.rows.iter().find(|row| row.strategy == strategy)
    }
}

/// A rate as a person reads it, in GB/s.
fn gb_per_s(rate: Rate) -> f64 {
    *rate.numer() as f64 / *rate.denom() as f64 / 1e9
}

impl fmt::Display for Comparison {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(formatter, "{:<26} {:>10} {:>9} {:>6}", "strategy", "GB/s", "of bound", "trees")?;
        for Row { strategy, outcome } in &self.rows {
            let Some(rate) = outcome.rate() else {
                if let Outcome::Impossible(why) = outcome {
                    writeln!(formatter, "{strategy:<26} {why}")?;
                }
                continue;
            };
            let share = match self.bound == Rate::default() {
                true => 100.0,
                false => gb_per_s(rate / self.bound) * 1e11,
            };
            write!(formatter, "{strategy:<26} {:>10.2} {share:>8.1}%", gb_per_s(rate))?;
            match outcome {
                Outcome::Packed(packing) => writeln!(formatter, " {:>6}", packing.trees.len())?,
                Outcome::AtLeast(packing) => writeln!(formatter, " {:>6}  at least", packing.trees.len())?,
                _ => writeln!(formatter, "  over PCIe: no ring of links visits every rank")?,
            }
        }
        Ok(())
    }
}

// Spanning trees without root, direction and weight, from which the strategies for comparison make
// packings.
//
// **Invariant:** a [`SpanningTree`] spans all ranks, and each of its edges follows one path. The
// result of [`WeightedTree::trees`] contains no tree twice. After [`fitted`](fitted)
// no link exceeds its capacity and one link is full.

/// Two ranks and the nodes from one to the other, both included.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct RankPath {
    from: Rank,
    to: Rank,
    hops: Vec<NodeId>,
}

impl RankPath {
    fn reversed(&self) -> Self {
        Self { from: self.to, to: self.from, hops: self.hops.iter().rev().copied().collect() }
    }
}

/// A spanning tree whose edges have no direction yet.
#[derive(Clone, Debug, PartialEq, Eq)]
struct SpanningTree {
    paths: Vec<RankPath>,
}

impl SpanningTree {
    /// All edges away from a root, nearer ones first.
    fn outward(&self, ranks: u32, root: Rank) -> Vec<RankPath> {
        let mut at = vec![Vec::new(); ranks as usize];
        for path in &self.paths {
            at[path.from as usize].push(path.clone());
            at[path.to as usize].push(path.reversed());
        }
        let mut reached = vec![false; ranks as usize];
        reached[root as usize] = true;
        let mut found: Vec<RankPath> = Vec::with_capacity(self.paths.len());
        let (mut rank, mut done) = (root, 0);
        loop {
            for path in &at[rank as usize] {
                if !std::mem::replace(&mut reached[path.to as usize], true) {
                    found.push(path.clone());
                }
            }
            let Some(next) = found.get(done) else { return found };
            (rank, done) = (next.to, done + 1);
        }
    }

    /// A tree whose data come from the root.
    fn out_tree(&self, ranks: u32, root: Rank, weight: Rate) -> Tree {
        Tree { root, weight, edges: edges(self.outward(ranks, root), weight) }
    }

    /// A tree whose data go to the root.
    fn in_tree(&self, ranks: u32, root: Rank, weight: Rate) -> Tree {
        let inward = self.outward(ranks, root).iter().rev().map(RankPath::reversed).collect();
        Tree { root, weight, edges: edges(inward, weight) }
    }

    /// From the root of a tree to each rank, in order of ranks.
    fn root_paths(&self, ranks: u32, root: Rank) -> Vec<Vec<RankPath>> {
        let mut root_paths = vec![Vec::new(); ranks as usize];
        for path in self.outward(ranks, root) {
            let mut root_path = root_paths[path.from as usize].clone();
            let to = path.to as usize;
            root_path.push(path);
            root_paths[to] = root_path;
        }
        root_paths
    }
}

/// A spanning tree, its root where the collective leaves the root open, and its weight.
#[derive(Clone, Debug)]
struct WeightedTree {
    tree: SpanningTree,
    default_root: Rank,
    weight: Rate,
}

impl WeightedTree {
    /// The trees by which a collective uses these shapes. Each tree carries a share of all data in
    /// proportion to its weight.
    fn trees(all: &[Self], ranks: u32, collective: Collective) -> Vec<Tree> {
        let block = Rate::from(i128::from(ranks));
        let every = 0..ranks;
        let trees = all.iter().flat_map(|Self { tree, default_root, weight }| -> Vec<Tree> {
            let share = weight / block;
            match collective {
                Collective::Broadcast { root } => vec![tree.out_tree(ranks, root, *weight)],
                Collective::Reduce { root } => vec![tree.in_tree(ranks, root, *weight)],
                Collective::AllReduce => vec![tree.in_tree(ranks, *default_root, *weight)],
                Collective::AllGather => {
                    every.clone().map(|root| tree.out_tree(ranks, root, share)).collect()
                }
                Collective::ReduceScatter => {
                    every.clone().map(|root| tree.in_tree(ranks, root, share)).collect()
                }
                Collective::Scatter { root } => root_paths(tree, ranks, root, share, false),
                Collective::Gather { root } => root_paths(tree, ranks, root, share, true),
                _ => Vec::new(),
            }
        });
        merged(trees.collect())
    }
}

fn root_paths(tree: &SpanningTree, ranks: u32, root: Rank, weight: Rate, inward: bool) -> Vec<Tree> {
    let root_paths = tree.root_paths(ranks, root).into_iter();
    let turned = root_paths.map(|root_path| match inward {
        true => root_path.iter().rev().map(RankPath::reversed).collect(),
        false => root_path,
    });
    turned.map(|root_path| Tree { root, weight, edges: edges(root_path, weight) }).collect()
}

fn edges(paths: Vec<RankPath>, weight: Rate) -> Vec<Edge> {
    let edge =
        |path: RankPath| Edge { from: path.from, to: path.to, paths: vec![Path { hops: path.hops, weight }] };
    paths.into_iter().map(edge).collect()
}

/// A packing of these trees, with the bound of an optimal packing.
fn with_bound_of(optimum: &Packing, trees: Vec<Tree>) -> Packing {
    Packing {
        collective: optimum.collective,
        rate: trees.iter().map(|tree| tree.weight).sum(),
        bound: optimum.bound,
        certificate: optimum.certificate.clone(),
        trees,
    }
}

/// The paths from a rank to all others over one link or through switches only. Each path has the
/// fewest hops, and among such paths the highest bandwidth.
fn paths_from(topology: &Topology, from: Rank) -> Vec<Option<RankPath>> {
    paths_over(topology, from, |_, _| true)
}

/// The same paths, over the links that `may` allows.
fn paths_over(
    topology: &Topology,
    from: Rank,
    may: impl Fn(NodeId, NodeId) -> bool,
) -> Vec<Option<RankPath>> {
    let start = topology.node(from);
    let mut before: BTreeMap<NodeId, (NodeId, u64)> = BTreeMap::from([(start, (start, u64::MAX))]);
    let mut layer = vec![start];
    while !layer.is_empty() {
        let mut next: BTreeMap<NodeId, (NodeId, u64)> = BTreeMap::new();
        for &node in layer.iter().filter(|&&node| node == start || topology.rank(node).is_none()) {
            let width = before[&node].1;
            let leaving = topology.leaving(node).iter();
            for link in leaving.filter(|link| !before.contains_key(&link.to) && may(link.from, link.to)) {
                let width = width.min(link.bytes_per_s);
                let best = next.entry(link.to).or_insert((node, width));
                if width > best.1 {
                    *best = (node, width);
                }
            }
        }
        layer = next.keys().copied().collect();
        before.extend(next);
    }
    let path = |to: Rank| {
        let mut hops = vec![topology.node(to)];
        while let Some(&(node, _)) = before.get(hops.last()?).filter(|_| hops.last() != Some(&start)) {
            hops.push(node);
        }
        hops.reverse();
        (to != from && hops[0] == start).then_some(RankPath { from, to, hops })
    };
    (0..topology.ranks()).map(path).collect()
}

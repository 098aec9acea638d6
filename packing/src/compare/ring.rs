//! Rings: as many as fit on the links, and their rate.
//!
//! A ring visits every rank once and returns. Its two directions are two rings over the same links.
//! So the search looks for cycles in the undirected graph: the largest number of cycles that share
//! no link, each at the rate of one link. Parallel links count separately. Two ranks that only
//! switches join are neighbours over the links to and from the switches. Such a ring uses both ends
//! of the links of each rank, so half the rate of a link is tried as well. If links differ, the
//! rate of each link is tried, and the rate with the largest total is taken.
//!
//! With `p` ranks and rings that carry `c` together in each direction: broadcast and reduce go at
//! 2c; all-gather, reduce-scatter, gather and scatter at 2c·p/(p-1); all-reduce at c·p/(p-1).
//!
//! The search is exact up to [`EXACT_RANKS_MAX`] ranks without switches. For more ranks, cycles are
//! searched one after the other in the capacity that is left, and [`Rings::is_maximum`] says
//! whether the degrees of the ranks exclude more.

use std::collections::BTreeMap;

use pleach_vocabulary::{Collective, Rank};

use super::{RankPath, SpanningTree, WeightedTree};
use crate::scale::merged;
use crate::topology::{NodeId, Topology};
use crate::{Rate, Tree};
use pleach_vocabulary::random::Random;

/// Most ranks, without switches, for which the largest number of rings is found for certain.
pub const EXACT_RANKS_MAX: u32 = 8;

/// Cycles through all ranks that share no unit of any link.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rings {
    /// The ranks of each cycle in their order; the last rank is joined to the first.
    pub cycles: Vec<Vec<Rank>>,
    /// The bandwidth of each ring in each direction, in bytes a second.
    pub bytes_per_s: Rate,
    /// Whether it is known that no further ring of this rate fits.
    pub is_maximum: bool,
    paths: Vec<Vec<RankPath>>,
}

/// Undirected links, in units of a ring's rate.
type LinkUnits = BTreeMap<(NodeId, NodeId), u64>;

/// The set of rings of a topology that carries the most. The set is empty if no ring fits, or if
/// there is only one rank.
#[must_use]
pub fn rings(topology: &Topology) -> Rings {
    let none =
        Rings { cycles: Vec::new(), bytes_per_s: Rate::default(), is_maximum: true, paths: Vec::new() };
    if topology.ranks() < 2 {
        return none;
    }
    let found = rates(topology).into_iter().map(|rate| {
        let (paths, is_maximum) = max_cycles(topology, &units(topology, rate));
        let cycles = paths.iter().map(|cycle| cycle.iter().map(|path| path.from).collect()).collect();
        Rings { cycles, bytes_per_s: rate, is_maximum, paths }
    });
    // The first of equally good sets is the fastest.
    found.fold(none, |best, rings| {
        if rings.each_way_bytes_per_s() > best.each_way_bytes_per_s() {
            rings
        } else {
            let is_maximum = best.is_maximum && (rings.is_maximum || !best.cycles.is_empty());
            Rings { is_maximum, ..best }
        }
    })
}

impl Rings {
    /// The bandwidth of all rings together in each direction, in bytes a second.
    #[must_use]
    pub fn each_way_bytes_per_s(&self) -> Rate {
        self.bytes_per_s * Rate::from(self.cycles.len() as i128)
    }

    /// The trees by which a collective goes over the rings, around each ring both ways. `None` if
    /// there is no ring.
    #[must_use]
    pub fn trees(&self, ranks: u32, collective: Collective) -> Vec<Tree> {
        let every: Vec<Tree> =
            self.paths.iter().flat_map(|cycle| self.trees_of_cycle(cycle, ranks, collective)).collect();
        merged(every)
    }

    fn trees_of_cycle(&self, cycle: &[RankPath], ranks: u32, collective: Collective) -> Vec<Tree> {
        let share = self.bytes_per_s / Rate::from(i128::from(ranks - 1));
        // The cycle is cut before each of its ranks. Each cut gives a chain with that rank at one
        // end.
        let cut = |gap: usize| WeightedTree {
            tree: SpanningTree {
                paths: cycle
                    .iter()
                    .enumerate()
                    .filter(|&(path, _)| path != gap)
                    .map(|(_, path)| path.clone())
                    .collect(),
            },
            default_root: cycle[gap].to,
            weight: share,
        };
        let chains: Vec<WeightedTree> = if ranks == 2 {
            vec![two_rank_chain(cycle, self.bytes_per_s)]
        } else {
            (0..cycle.len()).map(cut).collect()
        };
        match collective {
            Collective::AllReduce => WeightedTree::trees(&chains, ranks, collective),
            Collective::AllGather | Collective::ReduceScatter => {
                let roots = 0..ranks;
                let trees = roots.flat_map(|root| chains_from(&chains, cycle, root, share));
                let trees = trees.map(|chain| match collective {
                    Collective::AllGather => chain.tree.out_tree(ranks, chain.default_root, chain.weight),
                    _ => chain.tree.in_tree(ranks, chain.default_root, chain.weight),
                });
                trees.collect()
            }
            Collective::Broadcast { root } | Collective::Reduce { root } => {
                WeightedTree::trees(&chains_from(&chains, cycle, root, self.bytes_per_s), ranks, collective)
            }
            Collective::Scatter { root } | Collective::Gather { root } => {
                // The weights of blocks are divided by the number of ranks later.
                let whole = share * Rate::from(i128::from(ranks));
                WeightedTree::trees(&chains_from(&chains, cycle, root, whole), ranks, collective)
            }
            _ => Vec::new(),
        }
    }
}

/// The only tree of two ranks.
fn two_rank_chain(cycle: &[RankPath], weight: Rate) -> WeightedTree {
    WeightedTree { tree: SpanningTree { paths: vec![cycle[0].clone()] }, default_root: cycle[0].to, weight }
}

/// The chains that begin at a rank: one for each direction of the ring. Two ranks have one chain.
fn chains_from(chains: &[WeightedTree], cycle: &[RankPath], root: Rank, weight: Rate) -> Vec<WeightedTree> {
    if let [two_rank_chain] = chains {
        return vec![WeightedTree { default_root: root, weight, ..two_rank_chain.clone() }];
    }
    let gaps = (0..cycle.len()).filter(|&gap| cycle[gap].to == root || cycle[gap].from == root);
    gaps.map(|gap| WeightedTree { default_root: root, weight, ..chains[gap].clone() }).collect()
}

/// The rate of a collective on one ring in one direction, whose links carry `bytes_per_s`. It is
/// for a ring over PCIe, where the fast links form no ring. Zero if rings do not carry out the
/// collective.
#[must_use]
pub fn one_way_rate(collective: Collective, ranks: u32, bytes_per_s: u64) -> Rate {
    let (ranks, rate) = (i128::from(ranks), i128::from(bytes_per_s));
    if ranks < 2 {
        return Rate::default();
    }
    match collective {
        Collective::Broadcast { .. } | Collective::Reduce { .. } => Rate::from(rate),
        Collective::AllGather
        | Collective::ReduceScatter
        | Collective::Gather { .. }
        | Collective::Scatter { .. } => Rate::new(rate * ranks, ranks - 1),
        Collective::AllReduce => Rate::new(rate * ranks, 2 * (ranks - 1)),
        _ => Rate::default(),
    }
}

/// The rates that a ring may have, the fastest first: the rate of each single link and, if there
/// are switches, half of it.
fn rates(topology: &Topology) -> Vec<Rate> {
    let trees_of_cycle =
        |bytes_per_s: u64, count: u32| Rate::new(i128::from(bytes_per_s), i128::from(count.max(1)));
    let mut rates: Vec<Rate> =
        topology.links().iter().map(|link| trees_of_cycle(link.bytes_per_s, link.count)).collect();
    if topology.has_switches() {
        let halves: Vec<Rate> = rates.iter().map(|rate| rate / Rate::from(2)).collect();
        rates.extend(halves);
    }
    rates.sort_unstable();
    rates.dedup();
    rates.reverse();
    rates
}

/// The number of rings of a rate that fit on the links between two nodes. A ring uses a link in
/// both directions, so the direction with less bandwidth counts.
fn units(topology: &Topology, rate: Rate) -> LinkUnits {
    let links = topology.links().iter().filter(|link| link.from < link.to);
    let duplex = links.filter_map(|link| {
        let back = topology.link(link.to, link.from)?;
        let least = link.bytes_per_s.min(back.bytes_per_s);
        let units = (Rate::from(i128::from(least)) / rate).to_integer();
        Some(((link.from, link.to), units as u64)).filter(|(_, units)| *units > 0)
    });
    duplex.collect()
}

// Hamiltonian cycles over the ranks; no two of them share a unit of a link.

/// Approximate number of links that a search reads: a second or less.
const WORK_MAX: usize = 20_000_000;

/// How many rotations the search for a cycle may make for each rank.
const STEPS_A_RANK: usize = 100;

/// How often the whole search is repeated with other random choices.
const ATTEMPTS: usize = 32;

/// How many sets of cycles are tried.
const SETS_MAX: u32 = 2_000_000;

/// Most rings that are searched for.
const CYCLES_MAX: usize = 64;

/// A large set of cycles, and whether no set is larger.
fn max_cycles(topology: &Topology, units: &LinkUnits) -> (Vec<Vec<RankPath>>, bool) {
    let bound = bound(topology, units).min(CYCLES_MAX);
    if bound == 0 {
        return (Vec::new(), true);
    }
    if topology.ranks() == 2 {
        return (pairs(topology, units, bound), true);
    }
    if topology.ranks() <= EXACT_RANKS_MAX && !topology.has_switches() {
        return exactly(topology, units, bound);
    }
    let mut steps = WORK_MAX / topology.links().len();
    let mut random = Random::new(1);
    let mut best = Vec::new();
    for _ in 0..ATTEMPTS {
        let found = attempt(topology, units.clone(), bound, &mut random, &mut steps);
        if found.len() > best.len() {
            best = found;
        }
        if best.len() == bound || steps == 0 {
            break;
        }
    }
    let is_maximum = best.len() == bound;
    (best, is_maximum)
}

/// Searches one cycle after the other, until no further cycle is found.
fn attempt(
    topology: &Topology,
    mut left: LinkUnits,
    bound: usize,
    random: &mut Random,
    steps: &mut usize,
) -> Vec<Vec<RankPath>> {
    let mut found = Vec::new();
    while found.len() < bound {
        // Start at the rank with the most remaining links: it can best spare the links of the way
        // back.
        let start = (0..topology.ranks())
            .max_by_key(|&rank| (degree(topology, &left, rank), std::cmp::Reverse(rank)));
        let chain = Chain { topology, left: &mut left, ranks: vec![start.unwrap_or(0)], paths: Vec::new() };
        let Some(cycle) = chain.extend_to_cycle(random, steps) else { break };
        found.push(cycle);
    }
    found
}

/// A limit of the number of cycles. Each cycle takes two units at every rank (one if there are two
/// ranks).
fn bound(topology: &Topology, units: &LinkUnits) -> usize {
    let a_rank = if topology.ranks() == 2 { 1 } else { 2 };
    let ranks = 0..topology.ranks();
    ranks.map(|rank| degree(topology, units, rank) / a_rank).min().unwrap_or(0) as usize
}

fn degree(topology: &Topology, units: &LinkUnits, rank: Rank) -> u64 {
    let node = topology.node(rank);
    topology.leaving(node).iter().filter_map(|link| units.get(&unordered(node, link.to))).sum()
}

fn unordered(one: NodeId, other: NodeId) -> (NodeId, NodeId) {
    (one.min(other), one.max(other))
}

/// Takes a unit of every link of a path, or gives it back.
fn take(left: &mut LinkUnits, path: &RankPath) -> bool {
    for (index, hop) in path.hops.windows(2).enumerate() {
        match left.get_mut(&unordered(hop[0], hop[1])) {
            Some(units) if *units > 0 => *units -= 1,
            _ => {
                for hop in path.hops[..=index].windows(2) {
                    *left.entry(unordered(hop[0], hop[1])).or_default() += 1;
                }
                return false;
            }
        }
    }
    true
}

fn give_back(left: &mut LinkUnits, path: &RankPath) {
    for hop in path.hops.windows(2) {
        *left.entry(unordered(hop[0], hop[1])).or_default() += 1;
    }
}

/// The cycles of two ranks: each goes there and back over the same links.
fn pairs(topology: &Topology, units: &LinkUnits, bound: usize) -> Vec<Vec<RankPath>> {
    let mut left = units.clone();
    let mut found = Vec::new();
    while found.len() < bound {
        let paths = paths(topology, &left, 0);
        let Some(path) = paths.into_iter().find(|path| path.to == 1).filter(|path| take(&mut left, path))
        else {
            break;
        };
        found.push(vec![path]);
    }
    found
}

/// The ranks that a rank reaches over the residual capacity: shortest paths first, then widest.
fn paths(topology: &Topology, left: &LinkUnits, from: Rank) -> Vec<RankPath> {
    let start = topology.node(from);
    let mut before: BTreeMap<NodeId, (NodeId, u64, usize)> = BTreeMap::from([(start, (start, u64::MAX, 0))]);
    let mut layer = vec![start];
    let mut hops = 0;
    while !layer.is_empty() {
        hops += 1;
        let mut next: BTreeMap<NodeId, (NodeId, u64, usize)> = BTreeMap::new();
        for &node in layer.iter().filter(|&&node| node == start || topology.rank(node).is_none()) {
            let width = before[&node].1;
            for link in topology.leaving(node).iter().filter(|link| !before.contains_key(&link.to)) {
                let Some(&units) = left.get(&unordered(node, link.to)).filter(|&&units| units > 0) else {
                    continue;
                };
                let width = width.min(units);
                let best = next.entry(link.to).or_insert((node, width, hops));
                if width > best.1 {
                    *best = (node, width, hops);
                }
            }
        }
        layer = next.keys().copied().collect();
        before.extend(next);
    }
    let others = before.iter().filter(|&(&node, _)| node != start && topology.rank(node).is_some());
    let mut others: Vec<_> =
        others.map(|(&node, &(_, width, hops))| (hops, u64::MAX - width, node)).collect();
    others.sort_unstable();
    let path = |(_, _, node): (usize, u64, NodeId)| {
        let mut hops = vec![node];
        let mut at = node;
        while at != start {
            at = before[&at].0;
            hops.push(at);
        }
        hops.reverse();
        RankPath { from, to: topology.rank(node).unwrap_or(from), hops }
    };
    others.into_iter().map(path).collect()
}

/// A chain of ranks that grows at its end. A chain that cannot grow is rotated (Pósa 1976): a path
/// joins its end to a rank within the chain, the path after that rank is given back, and the rank
/// that followed it becomes the new end.
struct Chain<'a> {
    topology: &'a Topology,
    left: &'a mut LinkUnits,
    ranks: Vec<Rank>,
    /// The paths between each rank and the next.
    paths: Vec<RankPath>,
}

impl Chain<'_> {
    /// Extends the chain to a cycle, which takes units of all its paths.
    fn extend_to_cycle(mut self, random: &mut Random, steps: &mut usize) -> Option<Vec<RankPath>> {
        let count = self.topology.ranks() as usize;
        let mut max_cycles = (STEPS_A_RANK * count).min(*steps);
        let mut is_visited = vec![false; count];
        is_visited[self.ranks[0] as usize] = true;
        let mut stuck = 0;
        while max_cycles > 0 && stuck < 2 {
            (max_cycles, *steps) = (max_cycles - 1, *steps - 1);
            let end = self.ranks[self.ranks.len() - 1];
            let paths = paths(self.topology, self.left, end);
            let is_whole = self.ranks.len() == count;
            let goes_on = |path: &&RankPath| {
                if is_whole { path.to == self.ranks[0] } else { !is_visited[path.to as usize] }
            };
            if let Some(path) = one_of_the_nearest(random, paths.iter().filter(goes_on)) {
                let path = path.clone();
                if take(self.left, &path) {
                    is_visited[path.to as usize] = true;
                    self.ranks.push(path.to);
                    self.paths.push(path);
                    if is_whole {
                        return Some(self.paths);
                    }
                    stuck = 0;
                    continue;
                }
            }
            if self.rotate(&paths, random) {
                stuck = 0;
            } else {
                // Try to grow at the other end.
                self.ranks.reverse();
                self.paths = self.paths.iter().rev().map(RankPath::reversed).collect();
                stuck += 1;
            }
        }
        self.paths.iter().for_each(|path| give_back(self.left, path));
        None
    }

    /// Rotates the chain: joins its end to a rank within it.
    fn rotate(&mut self, paths: &[RankPath], random: &mut Random) -> bool {
        let within = |path: &&RankPath| self.ranks.iter().rev().skip(2).any(|&rank| rank == path.to);
        let Some(path) = one_of(random, paths.iter().filter(within)) else { return false };
        if !take(self.left, path) {
            return false;
        }
        let Some(place) = self.ranks.iter().position(|&rank| rank == path.to) else { return false };
        give_back(self.left, &self.paths[place]);
        let after: Vec<RankPath> = self.paths[place + 1..].iter().rev().map(RankPath::reversed).collect();
        self.paths.truncate(place);
        self.paths.push(path.reversed());
        self.paths.extend(after);
        self.ranks[place + 1..].reverse();
        true
    }
}

/// A random path.
fn one_of<'a>(random: &mut Random, paths: impl Iterator<Item = &'a RankPath>) -> Option<&'a RankPath> {
    let paths: Vec<_> = paths.collect();
    paths.get(random.below(paths.len().max(1) as u64) as usize).copied()
}

/// Usually the first path of a sorted list; sometimes another path with as few hops.
fn one_of_the_nearest<'a>(
    random: &mut Random,
    mut paths: impl Iterator<Item = &'a RankPath>,
) -> Option<&'a RankPath> {
    let first = paths.next()?;
    if random.below(8) > 0 {
        return Some(first);
    }
    one_of(random, paths.filter(|path| path.hops.len() == first.hops.len())).or(Some(first))
}

/// Lists all cycles, and selects the most that fit on the links together. A cycle may be selected
/// several times.
fn exactly(topology: &Topology, units: &LinkUnits, bound: usize) -> (Vec<Vec<RankPath>>, bool) {
    let mut cycles = Vec::new();
    every_cycle(topology, units, &mut vec![0], &mut cycles);
    let mut selection = CycleSelection {
        topology,
        cycles: &cycles,
        bound,
        chosen: Vec::new(),
        best: Vec::new(),
        tries: SETS_MAX,
    };
    selection.more(&mut units.clone(), 0);
    let is_maximum = selection.best.len() == bound || selection.tries > 0;
    let best = selection.best.into_iter().map(|cycle| cycles[cycle].clone()).collect();
    (best, is_maximum)
}

/// Lists each cycle once: in the direction in which rank 0's next rank has a lower number than the
/// last rank.
fn every_cycle(
    topology: &Topology,
    units: &LinkUnits,
    chain: &mut Vec<Rank>,
    found: &mut Vec<Vec<RankPath>>,
) {
    let joined =
        |from: Rank, to: Rank| units.contains_key(&unordered(topology.node(from), topology.node(to)));
    let last = chain[chain.len() - 1];
    if chain.len() == topology.ranks() as usize {
        if joined(last, 0) && chain[1] < last {
            let nexts = chain.iter().skip(1).chain([&0]);
            let path = |(&from, &to): (&Rank, &Rank)| RankPath {
                from,
                to,
                hops: vec![topology.node(from), topology.node(to)],
            };
            found.push(chain.iter().zip(nexts).map(path).collect());
        }
        return;
    }
    for next in 0..topology.ranks() {
        if !chain.contains(&next) && joined(last, next) {
            chain.push(next);
            every_cycle(topology, units, chain, found);
            chain.pop();
        }
    }
}

/// A set of cycles under construction, and the largest so far.
struct CycleSelection<'a> {
    topology: &'a Topology,
    cycles: &'a [Vec<RankPath>],
    bound: usize,
    chosen: Vec<usize>,
    best: Vec<usize>,
    tries: u32,
}

impl CycleSelection<'_> {
    fn more(&mut self, left: &mut LinkUnits, first: usize) {
        if self.chosen.len() > self.best.len() {
            self.best.clone_from(&self.chosen);
        }
        let hopeless = self.chosen.len() + bound(self.topology, left) <= self.best.len();
        if self.best.len() == self.bound || hopeless || self.tries == 0 {
            return;
        }
        self.tries -= 1;
        for index in first..self.cycles.len() {
            let taken = self.cycles[index].iter().take_while(|path| take(left, path)).count();
            if taken == self.cycles[index].len() {
                self.chosen.push(index);
                self.more(left, index);
                self.chosen.pop();
            }
            self.cycles[index][..taken].iter().for_each(|path| give_back(left, path));
        }
    }
}

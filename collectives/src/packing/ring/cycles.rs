//! Cycles through all ranks that share no unit of any link.

use std::collections::BTreeMap;

use super::{EXACT_RANKS_MAX, Units};
use crate::Rank;
use crate::packing::shape::Way;
use crate::topology::{NodeId, Topology};

/// How many links are looked at for one cycle, about: a second or less.
const WORK_MAX: usize = 1_000_000;

/// How many sets of cycles are tried.
const SETS_MAX: u32 = 2_000_000;

/// How many rings are of use.
const CYCLES_MAX: usize = 64;

/// Many cycles, and whether there cannot be more.
pub(super) fn most(topology: &Topology, units: &Units) -> (Vec<Vec<Way>>, bool) {
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
    let tries = (WORK_MAX / topology.links().len()) as u32;
    let mut left = units.clone();
    let mut found = Vec::new();
    while found.len() < bound {
        // Whoever has most links left can best spare what the way back needs.
        let start = (0..topology.ranks())
            .max_by_key(|&rank| (degree(topology, &left, rank), std::cmp::Reverse(rank)));
        let mut search = Search::new(topology, &mut left, start.unwrap_or(0), tries);
        if !search.extend() {
            break;
        }
        found.push(search.chain);
    }
    let is_most = found.len() == bound;
    (found, is_most)
}

/// Each cycle takes two units at every rank (of two ranks: one).
fn bound(topology: &Topology, units: &Units) -> usize {
    let a_rank = if topology.ranks() == 2 { 1 } else { 2 };
    let ranks = 0..topology.ranks();
    ranks.map(|rank| degree(topology, units, rank) / a_rank).min().unwrap_or(0) as usize
}

fn degree(topology: &Topology, units: &Units, rank: Rank) -> u64 {
    let node = topology.node(rank);
    topology.leaving(node).iter().filter_map(|link| units.get(&pair(node, link.to))).sum()
}

fn pair(one: NodeId, other: NodeId) -> (NodeId, NodeId) {
    (one.min(other), one.max(other))
}

/// Takes a unit of every link of a way; or gives it back.
fn take(left: &mut Units, way: &Way) -> bool {
    for (index, hop) in way.hops.windows(2).enumerate() {
        match left.get_mut(&pair(hop[0], hop[1])) {
            Some(units) if *units > 0 => *units -= 1,
            _ => {
                for hop in way.hops[..=index].windows(2) {
                    *left.entry(pair(hop[0], hop[1])).or_default() += 1;
                }
                return false;
            }
        }
    }
    true
}

fn give_back(left: &mut Units, way: &Way) {
    for hop in way.hops.windows(2) {
        *left.entry(pair(hop[0], hop[1])).or_default() += 1;
    }
}

/// Between two ranks, each way there and back over the same links.
fn pairs(topology: &Topology, units: &Units, bound: usize) -> Vec<Vec<Way>> {
    let mut left = units.clone();
    let mut found = Vec::new();
    while found.len() < bound {
        let ways = ways(topology, &left, 0);
        let Some(way) = ways.into_iter().find(|way| way.to == 1).filter(|way| take(&mut left, way)) else {
            break;
        };
        found.push(vec![way]);
    }
    found
}

/// To whom a rank has a way over what is left: the shortest first, then the widest.
fn ways(topology: &Topology, left: &Units, from: Rank) -> Vec<Way> {
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
                let Some(&units) = left.get(&pair(node, link.to)).filter(|&&units| units > 0) else {
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
    let way = |(_, _, node): (usize, u64, NodeId)| {
        let mut hops = vec![node];
        let mut at = node;
        while at != start {
            at = before[&at].0;
            hops.push(at);
        }
        hops.reverse();
        Way { from, to: topology.rank(node).unwrap_or(from), hops }
    };
    others.into_iter().map(way).collect()
}

/// Extends a chain until it is a cycle, and takes back what leads nowhere.
struct Search<'a> {
    topology: &'a Topology,
    left: &'a mut Units,
    start: Rank,
    visited: Vec<bool>,
    chain: Vec<Way>,
    tries: u32,
}

impl<'a> Search<'a> {
    fn new(topology: &'a Topology, left: &'a mut Units, start: Rank, tries: u32) -> Self {
        let mut visited = vec![false; topology.ranks() as usize];
        visited[start as usize] = true;
        Self { topology, left, start, visited, chain: Vec::new(), tries }
    }

    fn extend(&mut self) -> bool {
        let at = self.chain.last().map_or(self.start, |way| way.to);
        let is_whole = self.chain.len() + 1 == self.visited.len();
        let Some(tries) = self.tries.checked_sub(1) else { return false };
        self.tries = tries;
        for way in ways(self.topology, self.left, at) {
            let to = way.to as usize;
            let fits = if is_whole { way.to == self.start } else { !self.visited[to] };
            if !fits || !take(self.left, &way) {
                continue;
            }
            self.visited[to] = true;
            self.chain.push(way);
            if is_whole || self.extend() {
                return true;
            }
            if let Some(way) = self.chain.pop() {
                give_back(self.left, &way);
                self.visited[way.to as usize] = way.to == self.start;
            }
        }
        false
    }
}

/// All cycles, and of these the most that fit beside each other, some perhaps several times.
fn exactly(topology: &Topology, units: &Units, bound: usize) -> (Vec<Vec<Way>>, bool) {
    let mut cycles = Vec::new();
    every_cycle(topology, units, &mut vec![0], &mut cycles);
    let mut choice =
        Choice { topology, cycles: &cycles, bound, chosen: Vec::new(), best: Vec::new(), tries: SETS_MAX };
    choice.more(&mut units.clone(), 0);
    let is_most = choice.best.len() == bound || choice.tries > 0;
    let best = choice.best.into_iter().map(|cycle| cycles[cycle].clone()).collect();
    (best, is_most)
}

/// Each once: those that go on from rank 0 to a lesser rank than they come back from.
fn every_cycle(topology: &Topology, units: &Units, chain: &mut Vec<Rank>, found: &mut Vec<Vec<Way>>) {
    let joined = |from: Rank, to: Rank| units.contains_key(&pair(topology.node(from), topology.node(to)));
    let last = chain[chain.len() - 1];
    if chain.len() == topology.ranks() as usize {
        if joined(last, 0) && chain[1] < last {
            let nexts = chain.iter().skip(1).chain([&0]);
            let way = |(&from, &to): (&Rank, &Rank)| Way {
                from,
                to,
                hops: vec![topology.node(from), topology.node(to)],
            };
            found.push(chain.iter().zip(nexts).map(way).collect());
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
struct Choice<'a> {
    topology: &'a Topology,
    cycles: &'a [Vec<Way>],
    bound: usize,
    chosen: Vec<usize>,
    best: Vec<usize>,
    tries: u32,
}

impl Choice<'_> {
    fn more(&mut self, left: &mut Units, first: usize) {
        if self.chosen.len() > self.best.len() {
            self.best.clone_from(&self.chosen);
        }
        let hopeless = self.chosen.len() + bound(self.topology, left) <= self.best.len();
        if self.best.len() == self.bound || hopeless || self.tries == 0 {
            return;
        }
        self.tries -= 1;
        for index in first..self.cycles.len() {
            let taken = self.cycles[index].iter().take_while(|way| take(left, way)).count();
            if taken == self.cycles[index].len() {
                self.chosen.push(index);
                self.more(left, index);
                self.chosen.pop();
            }
            self.cycles[index][..taken].iter().for_each(|way| give_back(left, way));
        }
    }
}

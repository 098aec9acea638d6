//! Cycles through all ranks that share no unit of any link.

use std::collections::BTreeMap;

use pleach_vocabulary::Rank;

use super::{EXACT_RANKS_MAX, Units};
use crate::shape::Way;
use crate::topology::{NodeId, Topology};

/// How many links are looked at, about: a second or less.
const WORK_MAX: usize = 20_000_000;

/// How many turns one cycle may take for each rank.
const STEPS_A_RANK: usize = 100;

/// How often cycles are searched from the begin, with other choices.
const ATTEMPTS: usize = 32;

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
    let mut steps = WORK_MAX / topology.links().len();
    let mut dice = Dice(1);
    let mut best = Vec::new();
    for _ in 0..ATTEMPTS {
        let found = attempt(topology, units.clone(), bound, &mut dice, &mut steps);
        if found.len() > best.len() {
            best = found;
        }
        if best.len() == bound || steps == 0 {
            break;
        }
    }
    let is_most = best.len() == bound;
    (best, is_most)
}

/// One cycle after the other, until the next is not found.
fn attempt(
    topology: &Topology,
    mut left: Units,
    bound: usize,
    dice: &mut Dice,
    steps: &mut usize,
) -> Vec<Vec<Way>> {
    let mut found = Vec::new();
    while found.len() < bound {
        // Whoever has most links left can best spare what the way back needs.
        let start = (0..topology.ranks())
            .max_by_key(|&rank| (degree(topology, &left, rank), std::cmp::Reverse(rank)));
        let chain = Chain { topology, left: &mut left, ranks: vec![start.unwrap_or(0)], ways: Vec::new() };
        let Some(cycle) = chain.close(dice, steps) else { break };
        found.push(cycle);
    }
    found
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

/// A chain of ranks that grows at its end and, where it cannot, is turned around in part
/// (Pósa 1976): the end is joined to a rank within the chain, which lets go of the one after
/// it, and that one is the end.
struct Chain<'a> {
    topology: &'a Topology,
    left: &'a mut Units,
    ranks: Vec<Rank>,
    /// Between each of them and the next.
    ways: Vec<Way>,
}

impl Chain<'_> {
    /// The cycle that it becomes; takes units of all its ways.
    fn close(mut self, dice: &mut Dice, steps: &mut usize) -> Option<Vec<Way>> {
        let count = self.topology.ranks() as usize;
        let mut most = (STEPS_A_RANK * count).min(*steps);
        let mut is_visited = vec![false; count];
        is_visited[self.ranks[0] as usize] = true;
        let mut stuck = 0;
        while most > 0 && stuck < 2 {
            (most, *steps) = (most - 1, *steps - 1);
            let end = self.ranks[self.ranks.len() - 1];
            let ways = ways(self.topology, self.left, end);
            let is_whole = self.ranks.len() == count;
            let goes_on = |way: &&Way| {
                if is_whole { way.to == self.ranks[0] } else { !is_visited[way.to as usize] }
            };
            if let Some(way) = dice.one_of_the_nearest(ways.iter().filter(goes_on)) {
                let way = way.clone();
                if take(self.left, &way) {
                    is_visited[way.to as usize] = true;
                    self.ranks.push(way.to);
                    self.ways.push(way);
                    if is_whole {
                        return Some(self.ways);
                    }
                    stuck = 0;
                    continue;
                }
            }
            if self.turn(&ways, dice) {
                stuck = 0;
            } else {
                // Perhaps it can grow at its other end.
                self.ranks.reverse();
                self.ways = self.ways.iter().rev().map(Way::reversed).collect();
                stuck += 1;
            }
        }
        self.ways.iter().for_each(|way| give_back(self.left, way));
        None
    }

    /// Joins the end to a rank within the chain.
    fn turn(&mut self, ways: &[Way], dice: &mut Dice) -> bool {
        let within = |way: &&Way| self.ranks.iter().rev().skip(2).any(|&rank| rank == way.to);
        let Some(way) = dice.one_of(ways.iter().filter(within)) else { return false };
        if !take(self.left, way) {
            return false;
        }
        let Some(place) = self.ranks.iter().position(|&rank| rank == way.to) else { return false };
        give_back(self.left, &self.ways[place]);
        let after: Vec<Way> = self.ways[place + 1..].iter().rev().map(Way::reversed).collect();
        self.ways.truncate(place);
        self.ways.push(way.reversed());
        self.ways.extend(after);
        self.ranks[place + 1..].reverse();
        true
    }
}

/// Numbers that look random and are the same at every run (xorshift).
struct Dice(u64);

impl Dice {
    fn below(&mut self, count: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % count.max(1) as u64) as usize
    }

    fn one_of<'a>(&mut self, ways: impl Iterator<Item = &'a Way>) -> Option<&'a Way> {
        let ways: Vec<_> = ways.collect();
        ways.get(self.below(ways.len())).copied()
    }

    /// Of ways in their order mostly the first, else one with as few hops.
    fn one_of_the_nearest<'a>(&mut self, mut ways: impl Iterator<Item = &'a Way>) -> Option<&'a Way> {
        let first = ways.next()?;
        if self.below(8) > 0 {
            return Some(first);
        }
        let as_near = ways.filter(|way| way.hops.len() == first.hops.len());
        self.one_of(as_near).or(Some(first))
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

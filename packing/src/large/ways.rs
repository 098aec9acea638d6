//! What trees cost when only orbits of links have prices, and which tree is the cheapest.
//!
//! Prices are the same for all links of an orbit, so the cheapest ways from one rank of an orbit
//! are, carried along, those of all its ranks. Ways lead through switches only. Among equals those
//! over fewer links are taken, and of trees those whose edges begin nearer to the root: both by a
//! surcharge that is small beside any price that matters.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use pleach_vocabulary::Rank;

use super::arborescence::{Branching, Costs, cheapest_both_ways, cheapest_from, cheapest_of_shallowest};
use crate::symmetry::Semiregular;
use crate::topology::{NodeId, Topology};

/// What a link costs beside its price; prices of a whole tree are about 1.
const LINK_SURCHARGE: f64 = 1e-7;

/// What an edge costs at least for each step that its beginning is from the root.
const STEP_SURCHARGE: f64 = 1e-8;

/// How deep trees may be.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Depth {
    /// Every rank is as few edges from the root as there can be.
    Least,
    /// Whatever costs least, when each edge costs so much more for each step that its beginning is
    /// from the root, in parts of what an edge costs on the average.
    Surcharged(f64),
}

/// A tree, as it is for the first rank of an orbit.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Column {
    /// The orbit of its root.
    pub(super) orbit: usize,
    /// How often it uses links of each orbit.
    pub(super) loads: Vec<u32>,
    /// Its edges, those nearer to the root first, each with the nodes that it goes over.
    pub(super) edges: Vec<(Rank, Rank, Vec<u32>)>,
}

/// Trees of a topology, seen through a group of automorphisms.
pub(super) struct Ways<'t> {
    topology: &'t Topology,
    group: &'t Semiregular,
    /// Whether trees are used both ways at once.
    both_ways: bool,
    /// By rank a, then rank b: the rank that goes to b when the first rank of a's orbit goes to a.
    relative: Vec<Rank>,
    /// By orbit: how many edges every rank is from the first rank.
    steps: Vec<Vec<u32>>,
    /// By orbit and rank: the way from the first rank that goes over fewest links.
    shortest: Vec<Vec<Option<Way>>>,
}

/// The cheapest way from the first rank of an orbit to a rank.
#[derive(Clone, Debug)]
struct Way {
    cost: f64,
    /// Links, from the last to the first.
    links: Vec<usize>,
}

impl<'t> Ways<'t> {
    pub(super) fn new(topology: &'t Topology, group: &'t Semiregular, both_ways: bool) -> Self {
        let ranks = topology.ranks() as usize;
        let mut relative = vec![0; ranks * ranks];
        for rank in 0..ranks {
            let element = &group.elements()[group.carrier(rank as Rank).1];
            for other in 0..topology.ranks() {
                let image = topology.rank(NodeId(element.of(topology.node(other).0)));
                let image = image.expect("an automorphism carries ranks to ranks");
                relative[rank * ranks + image as usize] = other;
            }
        }
        let mut ways = Self { topology, group, both_ways, relative, steps: Vec::new(), shortest: Vec::new() };
        let free = vec![0.0; group.link_orbit_sizes().len()];
        ways.shortest = ways.cheapest_ways(&free);
        ways.steps =
            group.representatives().iter().map(|&root| ways.steps_from(root, &ways.shortest)).collect();
        ways
    }

    /// Whether every rank of a tree is as few edges from the root as there can be.
    pub(super) fn is_shallowest(&self, column: &Column) -> bool {
        let steps = &self.steps[column.orbit];
        column.edges.iter().all(|&(from, to, _)| steps[from as usize] < steps[to as usize])
    }

    /// How many ranks there are.
    pub(super) fn ranks(&self) -> usize {
        self.topology.ranks() as usize
    }

    /// The first rank of an orbit.
    pub(super) fn first_rank(&self, orbit: usize) -> Rank {
        self.group.representatives()[orbit]
    }

    /// Whether there is a way from a rank to another that does not go through a third.
    pub(super) fn has_way(&self, from: Rank, to: Rank) -> bool {
        self.shortest_way(from, to).is_some()
    }

    /// The orbits of links that the shortest way from a rank to another uses, once for each use;
    /// none where there is no way.
    pub(super) fn shortest_uses(&self, from: Rank, to: Rank) -> Option<Vec<usize>> {
        let (way, _) = self.shortest_way(from, to)?;
        Some(way.links.iter().flat_map(|&link| self.uses(link)).collect())
    }

    /// The nodes that the shortest way from a rank to another goes over.
    pub(super) fn shortest_nodes(&self, from: Rank, to: Rank) -> Option<Vec<u32>> {
        let (way, element) = self.shortest_way(from, to)?;
        let carried = &self.group.elements()[element];
        let links = self.topology.links();
        let ends = way.links.iter().rev().map(|&link| carried.of(links[link].to.0));
        Some([self.topology.node(from).0].into_iter().chain(ends).collect())
    }

    /// The orbits of links that a way over these nodes uses, once for each use.
    pub(super) fn uses_over(&self, nodes: &[u32]) -> Vec<usize> {
        let link = |pair: &[u32]| self.topology.link_place(NodeId(pair[0]), NodeId(pair[1]));
        let links = nodes.windows(2).map(|pair| link(pair).expect("ways go over links"));
        links.flat_map(|link| self.uses(link)).collect()
    }

    fn uses(&self, link: usize) -> impl Iterator<Item = usize> {
        let back = self.both_ways.then(|| self.group.link_orbit(self.back(link)));
        [self.group.link_orbit(link)].into_iter().chain(back)
    }

    fn shortest_way(&self, from: Rank, to: Rank) -> Option<(&Way, usize)> {
        let (orbit, element) = self.group.carrier(from);
        let relative = self.relative[from as usize * self.ranks() + to as usize];
        self.shortest[orbit][relative as usize].as_ref().map(|way| (way, element))
    }

    /// The cheapest tree from the first rank of an orbit.
    pub(super) fn cheapest_tree(&self, orbit: usize, prices: &[f64], depth: Depth) -> Column {
        let ranks = self.topology.ranks() as usize;
        let all = self.cheapest_ways(prices);
        let mut costs = Costs::new(ranks);
        let steps = &self.steps[orbit];
        let surcharge = match depth {
            Depth::Least => STEP_SURCHARGE,
            Depth::Surcharged(part) => STEP_SURCHARGE + part / ranks as f64,
        };
        for from in 0..ranks {
            let ways = &all[self.group.carrier(from as Rank).0];
            for to in (0..ranks).filter(|&to| to != from) {
                if let Some(way) = &ways[self.relative[from * ranks + to] as usize] {
                    let step = if self.both_ways { steps[from].min(steps[to]) } else { steps[from] };
                    costs.set(from, to, way.cost + surcharge * f64::from(step));
                }
            }
        }
        let root = self.group.representatives()[orbit] as usize;
        let tree = match depth {
            Depth::Least => cheapest_of_shallowest(root, &costs, steps),
            Depth::Surcharged(_) if self.both_ways => cheapest_both_ways(root, &costs),
            Depth::Surcharged(_) => cheapest_from(root, costs),
        };
        self.column(orbit, &tree, &all)
    }

    fn column(&self, orbit: usize, tree: &Branching, all: &[Vec<Option<Way>>]) -> Column {
        let ranks = self.topology.ranks() as usize;
        let links = self.topology.links();
        let mut loads = vec![0; self.group.link_orbit_sizes().len()];
        let mut edges = Vec::with_capacity(tree.edges.len());
        for &(from, to) in &tree.edges {
            let (start, element) = self.group.carrier(from as Rank);
            let way = all[start][self.relative[from * ranks + to] as usize].as_ref();
            let way = way.expect("trees go where there are ways");
            let carried = &self.group.elements()[element];
            let mut hops = vec![self.topology.node(from as Rank).0];
            for &link in way.links.iter().rev() {
                self.uses(link).for_each(|orbit| loads[orbit] += 1);
                hops.push(carried.of(links[link].to.0));
            }
            edges.push((from as Rank, to as Rank, hops));
        }
        Column { orbit, loads, edges }
    }

    /// The place of the link in the other direction.
    fn back(&self, link: usize) -> usize {
        let link = &self.topology.links()[link];
        self.topology
            .link_place(link.to, link.from)
            .expect("links lead both ways where trees are used both ways")
    }

    /// For the first rank of every orbit, the cheapest way to every rank.
    fn cheapest_ways(&self, prices: &[f64]) -> Vec<Vec<Option<Way>>> {
        let links = self.topology.links();
        let price = |link: usize| prices[self.group.link_orbit(link)].max(0.0);
        let costs: Vec<f64> = (0..links.len())
            .map(|link| {
                price(link) + if self.both_ways { price(self.back(link)) } else { 0.0 } + LINK_SURCHARGE
            })
            .collect();
        let mut first = vec![0; self.topology.nodes().len() + 1];
        links.iter().for_each(|link| first[link.from.0 as usize + 1] += 1);
        (0..self.topology.nodes().len()).for_each(|node| first[node + 1] += first[node]);
        self.group.representatives().iter().map(|&rank| self.ways_from(rank, &costs, &first)).collect()
    }

    /// Dijkstra's search that goes on from switches only.
    fn ways_from(&self, rank: Rank, costs: &[f64], first: &[usize]) -> Vec<Option<Way>> {
        let links = self.topology.links();
        let start = self.topology.node(rank);
        let mut reached: Vec<(f64, Option<usize>)> = vec![(f64::INFINITY, None); self.topology.nodes().len()];
        reached[start.0 as usize].0 = 0.0;
        // Bits of numbers that are not negative are ordered as the numbers are.
        let mut left = BinaryHeap::from([Reverse((0_u64, start.0))]);
        while let Some(Reverse((bits, node))) = left.pop() {
            let cost = f64::from_bits(bits);
            let ends_here = node != start.0 && self.topology.rank(NodeId(node)).is_some();
            if cost > reached[node as usize].0 || ends_here {
                continue;
            }
            for link in first[node as usize]..first[node as usize + 1] {
                let to = links[link].to.0;
                let next = cost + costs[link];
                if next < reached[to as usize].0 {
                    reached[to as usize] = (next, Some(link));
                    left.push(Reverse((next.to_bits(), to)));
                }
            }
        }
        let way = |to: Rank| {
            let mut node = self.topology.node(to);
            let cost = reached[node.0 as usize].0;
            let mut way = Way { cost, links: Vec::new() };
            while let Some(link) = reached[node.0 as usize].1 {
                way.links.push(link);
                node = links[link].from;
            }
            (cost.is_finite() && to != rank).then_some(way)
        };
        (0..self.topology.ranks()).map(way).collect()
    }

    fn steps_from(&self, root: Rank, all: &[Vec<Option<Way>>]) -> Vec<u32> {
        let ranks = self.topology.ranks() as usize;
        let mut steps = vec![u32::MAX; ranks];
        steps[root as usize] = 0;
        let mut reached = vec![root as usize];
        let mut next = 0;
        while let Some(&rank) = reached.get(next) {
            next += 1;
            let ways = &all[self.group.carrier(rank as Rank).0];
            for to in 0..ranks {
                if steps[to] == u32::MAX && ways[self.relative[rank * ranks + to] as usize].is_some() {
                    steps[to] = steps[rank] + 1;
                    reached.push(to);
                }
            }
        }
        steps
    }
}

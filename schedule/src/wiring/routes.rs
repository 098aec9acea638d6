//! The ways that bytes take between any two ranks over the links of a topology.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use pleach_packing::topology::{Link, NodeId, Topology};
use pleach_packing::{Packing, Rate};
use pleach_vocabulary::{Collective, Rank};

use super::WiringError;

/// One of the ways from a rank to another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Route {
    /// One after the other, by their places in [`Routes::links`].
    pub links: Vec<usize>,
    /// Its part of what is sent, beside the weights of the pair's other routes; at least 1.
    pub weight: u64,
}

/// Routes between any two ranks of a topology: everything that a rank sends to another is split
/// over the pair's routes by their weights.
///
/// A pair that the packing joins has the packing's paths with their weights, all trees together;
/// any other one the path through switches with the fewest links, among these the least latency,
/// among these the most bandwidth; and only pairs that switches do not join a path over other
/// ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Routes {
    ranks: u32,
    links: Vec<Link>,
    /// Row by row: the routes from rank `row` to rank `column`; one without links on the diagonal.
    routes: Vec<Vec<Route>>,
    /// In the same order: the time on the longest of them, in nanoseconds.
    latencies_ns: Vec<u64>,
}

/// Routes are weighed in this many parts of the largest.
const WEIGHT_MAX: f64 = (1u64 << 40) as f64;

impl Routes {
    /// The routes over these links.
    ///
    /// # Errors
    ///
    /// [`WiringError::NoRoute`]: the packing's paths are no paths of the topology.
    pub fn new(topology: &Topology, packing: Option<&Packing>) -> Result<Self, WiringError> {
        let ranks = topology.ranks();
        let place = |pair: &[NodeId]| topology.link_place(pair[0], pair[1]);
        let places = |hops: &[NodeId]| hops.windows(2).map(place).collect::<Option<Vec<_>>>();
        let mut given = packing.map_or(BTreeMap::new(), paths);
        let mut routes = Vec::with_capacity(ranks as usize * ranks as usize);
        for from in 0..ranks {
            let through_switches = shortest_paths(topology, from, false);
            let over_ranks = (through_switches.len() + 1 < topology.nodes().len())
                .then(|| shortest_paths(topology, from, true));
            for to in 0..ranks {
                let broken = || WiringError::NoRoute { from, to };
                let ends = [topology.node(from), topology.node(to)];
                let route = |hops: Vec<NodeId>, weight| {
                    let leads = [hops.first(), hops.last()] == [Some(&ends[0]), Some(&ends[1])];
                    let links = places(&hops).filter(|_| leads);
                    links.map(|links| Route { links, weight }).ok_or_else(broken)
                };
                routes.push(match given.remove(&(from, to)) {
                    _ if from == to => vec![Route { links: Vec::new(), weight: 1 }],
                    Some(paths) => {
                        weighed(paths).map(|(hops, weight)| route(hops, weight)).collect::<Result<_, _>>()?
                    }
                    None => {
                        let hops = path_back(&through_switches, ends)
                            .or_else(|| path_back(over_ranks.as_ref()?, ends));
                        vec![route(hops.ok_or_else(broken)?, 1)?]
                    }
                });
            }
        }
        let links = topology.links().to_vec();
        let time = |route: &Route| route.links.iter().map(|&link| links[link].latency_ns).sum();
        let longest = |routes: &Vec<Route>| routes.iter().map(time).max().unwrap_or_default();
        let latencies_ns = routes.iter().map(longest).collect();
        Ok(Self { ranks, links, routes, latencies_ns })
    }

    /// The links of the topology, in its order.
    #[must_use]
    pub fn links(&self) -> &[Link] {
        &self.links
    }

    /// All routes of a pair, at least one; one without links from a rank to itself.
    ///
    /// # Panics
    ///
    /// When one of them is no rank of the topology.
    #[must_use]
    pub fn between(&self, from: Rank, to: Rank) -> &[Route] {
        &self.routes[self.pair(from, to)]
    }

    /// How long a byte is under way from `from` to `to`, on the longest of the pair's routes, in
    /// nanoseconds.
    ///
    /// # Panics
    ///
    /// When one of them is no rank of the topology.
    #[must_use]
    pub fn latency_ns(&self, from: Rank, to: Rank) -> u64 {
        self.latencies_ns[self.pair(from, to)]
    }

    fn pair(&self, from: Rank, to: Rank) -> usize {
        assert!(from < self.ranks && to < self.ranks, "ranks {from} and {to} of {}", self.ranks);
        from as usize * self.ranks as usize + to as usize
    }
}

/// The paths of a pair of ranks, with what all trees together send over each.
type Paths = BTreeMap<Vec<NodeId>, Rate>;

/// The paths of a packing.
fn paths(packing: &Packing) -> BTreeMap<(Rank, Rank), Paths> {
    let mut paths: BTreeMap<(Rank, Rank), Paths> = BTreeMap::new();
    for edge in packing.trees.iter().flat_map(|tree| &tree.edges) {
        for path in &edge.paths {
            let mut add = |from, to, hops: Vec<NodeId>| {
                let paths = paths.entry((from, to)).or_default();
                *paths.entry(hops).or_insert(Rate::from_integer(0)) += path.weight;
            };
            add(edge.from, edge.to, path.hops.clone());
            if packing.collective == Collective::AllReduce {
                add(edge.to, edge.from, path.hops.iter().rev().copied().collect());
            }
        }
    }
    paths
}

/// Paths with whole weights.
fn weighed(paths: Paths) -> impl Iterator<Item = (Vec<NodeId>, u64)> {
    let value = |weight: &Rate| *weight.numer() as f64 / *weight.denom() as f64;
    let largest = paths.values().map(value).fold(f64::MIN_POSITIVE, f64::max);
    paths
        .into_iter()
        .map(move |(hops, weight)| (hops, ((value(&weight) / largest * WEIGHT_MAX) as u64).max(1)))
}

/// How good a path is: links, nanoseconds, and less for more bandwidth.
type PathCost = (u32, u64, Reverse<u64>);

/// By node that is reached from a rank: its cost, and the node before it on the best path. Paths
/// lead through switches alone, or over other ranks as well.
fn shortest_paths(topology: &Topology, from: Rank, over_ranks: bool) -> BTreeMap<NodeId, (PathCost, NodeId)> {
    let start = topology.node(from);
    let mut best: BTreeMap<NodeId, (PathCost, NodeId)> = BTreeMap::new();
    let mut open = BTreeSet::from([((0, 0, Reverse(u64::MAX)), start)]);
    // Dijkstra over costs that only grow: one more link each.
    while let Some((cost, node)) = open.pop_first() {
        let ends_here = !over_ranks && topology.rank(node).is_some();
        if node != start && (ends_here || best.get(&node).is_some_and(|known| known.0 < cost)) {
            continue;
        }
        for link in topology.leaving(node).iter().filter(|link| link.to != start) {
            let Reverse(width) = cost.2;
            let there = (cost.0 + 1, cost.1 + link.latency_ns, Reverse(width.min(link.bytes_per_s)));
            if best.get(&link.to).is_none_or(|known| there < known.0) {
                best.insert(link.to, (there, node));
                open.insert((there, link.to));
            }
        }
    }
    best
}

fn path_back(best: &BTreeMap<NodeId, (PathCost, NodeId)>, [from, to]: [NodeId; 2]) -> Option<Vec<NodeId>> {
    let mut hops = vec![to];
    while *hops.last()? != from {
        hops.push(best.get(hops.last()?)?.1);
    }
    hops.reverse();
    Some(hops)
}

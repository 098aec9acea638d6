//! The links between the ranks of a group, with the packings made for them.
//!
//! A [`Wiring`] is a [`Topology`] that a group was given. It packs for a collective at the first
//! request and keeps the packing. **Invariant:** its results depend on the topology and the options
//! alone, so ranks with the same links choose the same schedules. Ranks compare [`Wiring::digest`].

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::hash::Hasher;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use pleach_packing::latency::{fastest_packing, shallower_packings};
use pleach_packing::topology::{Link, NodeId, NodeKind, Topology};
use pleach_packing::{PackError, PackOptions, Packing, Rate, pack};
use pleach_vocabulary::{Collective, Rank};

use crate::generate::Algorithm;
use crate::generate::packed::{PackedError, PackedTrees};
use crate::{Op, Schedule};
use pleach_vocabulary::digest::Hasher64;

#[cfg(test)]
mod tests;

/// Links of a group. See the module.
#[derive(Debug)]
pub struct Wiring {
    topology: Topology,
    options: PackOptions,
    /// The sender's overhead of a message, in nanoseconds.
    message_ns: u64,
    routes: Routes,
    digest: u64,
    packed: Mutex<BTreeMap<Collective, Result<Arc<Packed>, WiringError>>>,
    shallow: Mutex<BTreeMap<Collective, ShallowPackings>>,
}

/// Packings for short messages, besides the optimum of a collective.
#[derive(Debug)]
struct ShallowPackings {
    /// The optimum first, then flatter ones.
    packings: Vec<Packing>,
    /// The packings that were asked for, by their places in `packings`.
    ready: BTreeMap<usize, Arc<Packed>>,
}

/// A packing, with the trees and the routes made of it.
#[derive(Debug)]
pub struct Packed {
    /// The packing itself.
    pub packing: Packing,
    /// The trees for schedules.
    pub trees: Arc<PackedTrees>,
    /// The routes by the paths of the packing.
    pub routes: Routes,
}

/// Why there is no packing to be carried out.
#[derive(Clone, pleach_derive::ErrorDebug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum WiringError {
    /// Nothing could be packed.
    #[error(transparent)]
    Pack(#[from] PackError),
    /// The packing is not valid for these ranks.
    #[error(transparent)]
    Packed(#[from] PackedError),
    /// A path of the packing is not a path of the topology.
    #[error("the packing's way from rank {from} to rank {to} is no path over links of its topology")]
    NoRoute {
        /// Where the path should begin.
        from: Rank,
        /// Where it should end.
        to: Rank,
    },
}

impl PartialEq for Wiring {
    fn eq(&self, other: &Self) -> bool {
        let key = |wiring: &Self| (wiring.digest, wiring.message_ns);
        key(self) == key(other) && self.topology == other.topology && self.options == other.options
    }
}

impl Wiring {
    /// A wiring of these links, with nothing packed yet. Messages cost nothing besides their bytes.
    #[must_use]
    pub fn new(topology: Topology) -> Self {
        let routes = Routes::new(&topology, None).expect("the shortest paths of a connected topology");
        let digest = topology_digest(&topology);
        Self {
            topology,
            options: PackOptions::default(),
            message_ns: 0,
            routes,
            digest,
            packed: Mutex::default(),
            shallow: Mutex::default(),
        }
    }

    /// The same wiring with these options of packing.
    #[must_use]
    pub fn packed_by(self, options: PackOptions) -> Self {
        let mut hasher = Hasher64::default();
        hasher.write_u64(topology_digest(&self.topology));
        hasher.write(format!("{options:?}").as_bytes());
        Self { options, digest: hasher.finish(), packed: Mutex::default(), shallow: Mutex::default(), ..self }
    }

    /// The same wiring, where a message costs its sender this time besides its bytes. Schedules
    /// have fewer chunks when the cost is higher.
    #[must_use]
    pub fn with_message_cost(self, cost: Duration) -> Self {
        Self { message_ns: u64::try_from(cost.as_nanos()).unwrap_or(u64::MAX), ..self }
    }

    /// The same wiring with this packing for the packing's collective.
    ///
    /// # Errors
    ///
    /// The packing is not one of these links.
    pub fn with_packing(self, packing: Packing) -> Result<Self, WiringError> {
        let collective = packing.collective;
        let mut hasher = Hasher64::default();
        let packed = self.prepare(packing)?;
        hasher.write_u64(self.digest);
        hasher.write_u64(packed.trees.digest());
        let digest = hasher.finish();
        let packed = Arc::new(packed);
        let packings = vec![packed.packing.clone()];
        // The packing is used for all sizes, as the caller asked.
        let only = ShallowPackings { packings, ready: BTreeMap::from([(0, packed.clone())]) };
        locked(&self.shallow).insert(collective, only);
        locked(&self.packed).insert(collective, Ok(packed));
        Ok(Self { digest, ..self })
    }

    /// The links.
    #[must_use]
    pub fn topology(&self) -> &Topology {
        &self.topology
    }

    /// The shortest path between any two ranks. It leads over other ranks only if switches do not
    /// join the two.
    #[must_use]
    pub fn routes(&self) -> &Routes {
        &self.routes
    }

    /// A number that is equal on ranks that got the same links.
    #[must_use]
    pub fn digest(&self) -> u64 {
        self.digest
    }

    /// The packing for a collective. The first call makes it, which can take seconds.
    pub fn packed(&self, collective: Collective) -> Result<Arc<Packed>, WiringError> {
        let mut known = locked(&self.packed);
        let make = || Ok(Arc::new(self.prepare(pack(&self.topology, collective, &self.options)?)?));
        known.entry(collective).or_insert_with(make).clone()
    }

    /// The packing that is fastest for `bytes` (of the data that the packing's rate counts). It is
    /// the optimum, or a packing with fewer or less deep trees if the options allow one. Sizes with
    /// the same number of bits get the same packing.
    pub fn packed_for(&self, collective: Collective, bytes: u64) -> Result<Arc<Packed>, WiringError> {
        let optimum = self.packed(collective)?;
        if !self.options.may_be_shallow() {
            return Ok(optimum);
        }
        let largest = bytes.checked_next_power_of_two().unwrap_or(u64::MAX);
        let mut known = locked(&self.shallow);
        let shallow = known.entry(collective).or_insert_with(|| {
            let mut packings = shallower_packings(&optimum.packing, &self.topology);
            packings.insert(0, optimum.packing.clone());
            ShallowPackings { packings, ready: BTreeMap::from([(0, optimum)]) }
        });
        let place = fastest_packing(&shallow.packings, &self.topology, largest);
        if let Some(packed) = shallow.ready.get(&place) {
            return Ok(packed.clone());
        }
        let packed = Arc::new(self.prepare(shallow.packings[place].clone())?);
        shallow.ready.insert(place, packed.clone());
        Ok(packed)
    }

    /// The packing that an algorithm carries out, if it is one of these links.
    #[must_use]
    pub fn carried_out_by(&self, collective: Collective, algorithm: &Algorithm) -> Option<Arc<Packed>> {
        let Algorithm::Packed(Some(trees)) = algorithm else { return None };
        let optimum = self.packed(collective).ok().filter(|packed| packed.trees == *trees);
        optimum.or_else(|| {
            let known = locked(&self.shallow);
            known.get(&collective)?.ready.values().find(|packed| packed.trees == *trees).cloned()
        })
    }

    /// The first put of a schedule that no link can carry: its two ranks, if neither a link nor a
    /// path through switches leads from the first to the second.
    #[must_use]
    pub fn missing_link(&self, schedule: &Schedule) -> Option<(Rank, Rank)> {
        let puts = (0..).zip(&schedule.programs).flat_map(|(from, lanes)| {
            let steps = lanes.iter().flat_map(|lane| &lane.steps);
            steps.filter_map(move |step| match step.op {
                Op::Put { to, .. } => Some((from, to)),
                _ => None,
            })
        });
        puts.into_iter().find(|&(from, to)| self.unjoined_pair(from, to).is_some())
    }

    /// The names of two ranks, if neither a link nor a path through switches leads from the first
    /// to the second.
    #[must_use]
    pub fn unjoined_pair(&self, from: Rank, to: Rank) -> Option<[&str; 2]> {
        let links = self.routes.between(from, to)[0].links.iter().skip(1);
        let mut between = links.map(|&link| self.routes.links()[link].from);
        let passes_rank = between.any(|node| self.topology.rank(node).is_some());
        let name = |rank: Rank| self.topology.name(self.topology.node(rank));
        passes_rank.then(|| [name(from), name(to)])
    }

    fn prepare(&self, packing: Packing) -> Result<Packed, WiringError> {
        let trees = Arc::new(PackedTrees::new(&packing, &self.topology, self.message_ns)?);
        let routes = Routes::new(&self.topology, Some(&packing))?;
        Ok(Packed { packing, trees, routes })
    }
}

fn locked<T>(known: &Mutex<T>) -> MutexGuard<'_, T> {
    // A packer that panics leaves nothing incomplete.
    known.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A number of a topology; equal topologies have equal numbers.
#[must_use]
pub fn topology_digest(topology: &Topology) -> u64 {
    let mut hasher = Hasher64::default();
    for node in topology.nodes() {
        hasher.write(node.name.as_bytes());
        hasher.write_u8(match node.kind {
            NodeKind::Rank => 1,
            NodeKind::Switch => 2,
        });
    }
    for link in topology.links() {
        hasher.write_u32(link.from.0);
        hasher.write_u32(link.to.0);
        hasher.write_u64(link.bytes_per_s);
        hasher.write_u64(link.latency_ns);
    }
    hasher.finish()
}

// The routes between any two ranks over the links of a topology.

/// A route from a rank to another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Route {
    /// The links in their order, by their places in [`Routes::links`].
    pub links: Vec<usize>,
    /// The share of the data on this route, relative to the weights of the pair's other routes; at
    /// least 1.
    pub weight: u64,
}

/// Routes between any two ranks of a topology: everything that a rank sends to another is split
/// over the pair's routes by their weights.
///
/// The routes of a pair are these:
///
/// 1. If the packing joins the pair: the packing's paths with their weights, all trees together.
/// 2. Otherwise, if switches join the pair: the path through switches with the fewest links, among
///    these the least latency, among these the most bandwidth.
/// 3. Otherwise a path over other ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Routes {
    ranks: u32,
    links: Vec<Link>,
    /// Row by row: the routes from rank `row` to rank `column`; one without links on the diagonal.
    routes: Vec<Vec<Route>>,
    /// In the same order: the time on the longest route of the pair, in nanoseconds.
    latencies_ns: Vec<u64>,
}

/// The weight of the largest route; other weights are fractions of it.
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

    /// All routes of a pair, at least one. From a rank to itself there is one route without links.
    ///
    /// # Panics
    ///
    /// When `from` or `to` is no rank of the topology.
    #[must_use]
    pub fn between(&self, from: Rank, to: Rank) -> &[Route] {
        &self.routes[self.pair(from, to)]
    }

    /// The latency of a byte from `from` to `to`, on the longest of the pair's routes, in
    /// nanoseconds.
    ///
    /// # Panics
    ///
    /// When `from` or `to` is no rank of the topology.
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

/// The paths with their weights as whole numbers.
fn weighed(paths: Paths) -> impl Iterator<Item = (Vec<NodeId>, u64)> {
    let value = |weight: &Rate| *weight.numer() as f64 / *weight.denom() as f64;
    let largest = paths.values().map(value).fold(f64::MIN_POSITIVE, f64::max);
    paths
        .into_iter()
        .map(move |(hops, weight)| (hops, ((value(&weight) / largest * WEIGHT_MAX) as u64).max(1)))
}

/// How good a path is: links, nanoseconds, and less for more bandwidth.
type PathCost = (u32, u64, Reverse<u64>);

/// The best paths from a rank. For each node that they reach: the cost of its path, and the node
/// before it on the path. Paths lead through switches alone or, with `over_ranks`, over other ranks
/// as well.
fn shortest_paths(topology: &Topology, from: Rank, over_ranks: bool) -> BTreeMap<NodeId, (PathCost, NodeId)> {
    let start = topology.node(from);
    let mut best: BTreeMap<NodeId, (PathCost, NodeId)> = BTreeMap::new();
    let mut open = BTreeSet::from([((0, 0, Reverse(u64::MAX)), start)]);
    // Dijkstra's algorithm: each further link makes a cost larger.
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

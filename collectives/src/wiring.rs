//! The links between the ranks of a group, and what has been packed for them.
//!
//! A [`Wiring`] is a [`Topology`] that a group is told of. It packs for each collective when that
//! is asked for first, and keeps what came of it. **Invariant:** what it gives depends on the
//! topology and the options alone, so ranks that were told of the same links choose the same
//! schedules; [`Wiring::digest`] is what they compare.

use std::collections::BTreeMap;
use std::hash::Hasher;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use pleach_transport::Rank;
use pleach_transport::sim::{self, Network, NetworkBuilder, NetworkError, Sharing};

use crate::collective::Collective;
use crate::digest::Hasher64;
use crate::generate::Algorithm;
use crate::generate::packed::{PackedError, PackedTrees};
use crate::packing::latency::{flatter, soonest_of};
use crate::packing::{PackError, PackOptions, Packing, Rate, pack};
use crate::schedule::{Op, Schedule};
use crate::topology::{NodeId, NodeKind, Topology};

/// Links of a group. See the module.
#[derive(Debug)]
pub struct Wiring {
    topology: Topology,
    options: PackOptions,
    /// What a message costs its sender besides its bytes, in nanoseconds.
    message_ns: u64,
    network: Network,
    digest: u64,
    packed: Mutex<BTreeMap<Collective, Result<Arc<Packed>, WiringError>>>,
    flat: Mutex<BTreeMap<Collective, Flat>>,
}

/// What there is besides the optimum for a collective, for messages that are short.
#[derive(Debug)]
struct Flat {
    /// The optimum first, then flatter ones.
    packings: Vec<Packing>,
    /// Those that were asked for, by their places.
    ready: BTreeMap<usize, Arc<Packed>>,
}

/// A packing with what was made of it.
#[derive(Debug)]
pub struct Packed {
    /// The packing itself.
    pub packing: Packing,
    /// For schedules.
    pub trees: Arc<PackedTrees>,
    /// The links, with the routes that the packing says.
    pub network: Network,
}

/// Why there is no packing to be carried out.
#[derive(Clone, pleach_derive::ErrorDebug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum WiringError {
    /// Nothing could be packed.
    #[error(transparent)]
    Pack(#[from] PackError),
    /// What was packed is no packing of these ranks.
    #[error(transparent)]
    Packed(#[from] PackedError),
    /// Its paths are no paths.
    #[error("the paths of the packing do not fit its topology: {0}")]
    Network(#[from] NetworkError),
}

impl PartialEq for Wiring {
    fn eq(&self, other: &Self) -> bool {
        let key = |wiring: &Self| (wiring.digest, wiring.message_ns);
        key(self) == key(other) && self.topology == other.topology && self.options == other.options
    }
}

impl Wiring {
    /// These links, with nothing packed yet. Messages cost nothing besides their bytes.
    #[must_use]
    pub fn new(topology: Topology) -> Self {
        let network = network(&topology, None).expect("the shortest paths of a connected topology");
        let digest = topology_digest(&topology);
        Self {
            topology,
            options: PackOptions::default(),
            message_ns: 0,
            network,
            digest,
            packed: Mutex::default(),
            flat: Mutex::default(),
        }
    }

    /// The same, packed in this way.
    #[must_use]
    pub fn packed_by(self, options: PackOptions) -> Self {
        let mut hasher = Hasher64::default();
        hasher.write_u64(topology_digest(&self.topology));
        hasher.write(format!("{options:?}").as_bytes());
        Self { options, digest: hasher.finish(), packed: Mutex::default(), flat: Mutex::default(), ..self }
    }

    /// The same where a message costs its sender so much besides its bytes: the more, the fewer
    /// chunks.
    #[must_use]
    pub fn with_message_cost(self, cost: Duration) -> Self {
        Self { message_ns: u64::try_from(cost.as_nanos()).unwrap_or(u64::MAX), ..self }
    }

    /// The same with this packing in place of what would be packed for its collective.
    ///
    /// # Errors
    ///
    /// It is no packing of these links.
    pub fn with_packing(self, packing: Packing) -> Result<Self, WiringError> {
        let collective = packing.collective;
        let mut hasher = Hasher64::default();
        let packed = self.prepared(packing)?;
        hasher.write_u64(self.digest);
        hasher.write_u64(packed.trees.digest());
        let digest = hasher.finish();
        let packed = Arc::new(packed);
        let packings = vec![packed.packing.clone()];
        // For all sizes, as it was asked for.
        let only = Flat { packings, ready: BTreeMap::from([(0, packed.clone())]) };
        locked(&self.flat).insert(collective, only);
        locked(&self.packed).insert(collective, Ok(packed));
        Ok(Self { digest, ..self })
    }

    /// The links.
    #[must_use]
    pub fn topology(&self) -> &Topology {
        &self.topology
    }

    /// The links as wires of the simulator, between any two ranks the shortest path, which leads
    /// over other ranks only where switches do not join the two.
    #[must_use]
    pub fn network(&self) -> &Network {
        &self.network
    }

    /// A number that is the same on ranks that were told of the same links.
    #[must_use]
    pub fn digest(&self) -> u64 {
        self.digest
    }

    /// What is packed for a collective: made when it is asked for first, which can take seconds.
    ///
    /// # Errors
    ///
    /// See [`WiringError`].
    pub fn packed(&self, collective: Collective) -> Result<Arc<Packed>, WiringError> {
        let mut known = locked(&self.packed);
        let make = || Ok(Arc::new(self.prepared(pack(&self.topology, collective, &self.options)?)?));
        known.entry(collective).or_insert_with(make).clone()
    }

    /// What carries so many bytes (of what the packing's rate counts) soonest: the optimum, or
    /// where that was not said otherwise by the options one with fewer or less deep trees. The same
    /// for sizes of as many bits.
    ///
    /// # Errors
    ///
    /// See [`WiringError`].
    pub fn packed_for(&self, collective: Collective, bytes: u64) -> Result<Arc<Packed>, WiringError> {
        let optimum = self.packed(collective)?;
        if !self.options.may_be_flat() {
            return Ok(optimum);
        }
        let largest = bytes.checked_next_power_of_two().unwrap_or(u64::MAX);
        let mut known = locked(&self.flat);
        let flat = known.entry(collective).or_insert_with(|| {
            let mut packings = flatter(&optimum.packing, &self.topology);
            packings.insert(0, optimum.packing.clone());
            Flat { packings, ready: BTreeMap::from([(0, optimum)]) }
        });
        let place = soonest_of(&flat.packings, &self.topology, largest);
        if let Some(packed) = flat.ready.get(&place) {
            return Ok(packed.clone());
        }
        let packed = Arc::new(self.prepared(flat.packings[place].clone())?);
        flat.ready.insert(place, packed.clone());
        Ok(packed)
    }

    /// The packing that an algorithm carries out, if it is one of these links.
    pub(crate) fn packed_network(
        &self,
        collective: Collective,
        algorithm: &Algorithm,
    ) -> Option<Arc<Packed>> {
        let Algorithm::Packed(Some(trees)) = algorithm else { return None };
        let optimum = self.packed(collective).ok().filter(|packed| packed.trees == *trees);
        optimum.or_else(|| {
            let known = locked(&self.flat);
            known.get(&collective)?.ready.values().find(|packed| packed.trees == *trees).cloned()
        })
    }

    /// The first two ranks between which a schedule puts but no link or path through switches
    /// leads.
    pub(crate) fn missing_link(&self, schedule: &Schedule) -> Option<(Rank, Rank)> {
        let puts = (0..).zip(&schedule.programs).flat_map(|(from, lanes)| {
            let steps = lanes.iter().flat_map(|lane| &lane.steps);
            steps.filter_map(move |step| match step.op {
                Op::Put { to, .. } => Some((from, to)),
                _ => None,
            })
        });
        puts.into_iter().find(|&(from, to)| self.not_joined(from, to).is_some())
    }

    /// The names of two ranks that no link or path through switches leads from and to.
    #[must_use]
    pub fn not_joined(&self, from: Rank, to: Rank) -> Option<[&str; 2]> {
        let ranks = self.network.ranks();
        let links = self.network.route(from, to);
        let passes_rank = links.iter().skip(1).any(|&link| self.network.link(link).from.0 < ranks);
        let name = |rank: Rank| self.topology.name(self.topology.node(rank));
        passes_rank.then(|| [name(from), name(to)])
    }

    fn prepared(&self, packing: Packing) -> Result<Packed, WiringError> {
        let trees = Arc::new(PackedTrees::new(&packing, &self.topology, self.message_ns)?);
        let network = network(&self.topology, Some(&packing))?;
        Ok(Packed { packing, trees, network })
    }
}

fn locked<T>(known: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing is half done when a packer panics.
    known.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A number of a topology that equal ones have in common.
pub(crate) fn topology_digest(topology: &Topology) -> u64 {
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

/// A topology as wires of the simulator, whose links carry one transfer after the other. A pair
/// that the packing joins has the packing's paths with their weights, all trees together; any other
/// one the path through switches with the fewest links, among these the least latency, among these
/// the most bandwidth; and only pairs that switches do not join a path over other ranks.
///
/// # Errors
///
/// The packing's paths are no paths of the topology.
pub fn network(topology: &Topology, packing: Option<&Packing>) -> Result<Network, NetworkError> {
    let ranks = topology.ranks();
    let mut builder = Network::builder(ranks);
    let numbers: Vec<sim::NodeId> = (0..topology.nodes().len() as u32)
        .map(|node| topology.rank(NodeId(node)).map_or_else(|| builder.switch(), sim::NodeId))
        .collect();
    let mut links = BTreeMap::new();
    for link in topology.links() {
        let (from, to) = (numbers[link.from.0 as usize], numbers[link.to.0 as usize]);
        let id = builder.link(from, to, link.bytes_per_s, Duration::from_nanos(link.latency_ns));
        links.insert((link.from, link.to), id);
    }
    for from in 0..ranks {
        for (to, path) in through_switches(topology, from) {
            let path: Vec<_> = path.windows(2).map(|pair| links[&(pair[0], pair[1])]).collect();
            builder.route(from, to, &path);
        }
    }
    if let Some(packing) = packing {
        add_paths(&mut builder, packing, &links)?;
    }
    Ok(builder.build()?.shared(Sharing::InOrder))
}

/// Links by where they begin and end.
type LinkTable = BTreeMap<(NodeId, NodeId), sim::LinkId>;

/// Routes are weighed in this many parts of the largest.
const WEIGHT_MAX: f64 = (1u64 << 40) as f64;

fn add_paths(builder: &mut NetworkBuilder, packing: &Packing, links: &LinkTable) -> Result<(), NetworkError> {
    let mut paths: BTreeMap<(Rank, Rank), BTreeMap<Vec<NodeId>, Rate>> = BTreeMap::new();
    for edge in packing.trees.iter().flat_map(|tree| &tree.edges) {
        for path in &edge.paths {
            let mut add = |from, to, hops: Vec<NodeId>| {
                let weight =
                    paths.entry((from, to)).or_default().entry(hops).or_insert(Rate::from_integer(0));
                *weight += path.weight;
            };
            add(edge.from, edge.to, path.hops.clone());
            if packing.collective == Collective::AllReduce {
                add(edge.to, edge.from, path.hops.iter().rev().copied().collect());
            }
        }
    }
    for ((from, to), paths) in paths {
        let value = |weight: &Rate| *weight.numer() as f64 / *weight.denom() as f64;
        let largest = paths.values().map(value).fold(f64::MIN_POSITIVE, f64::max);
        let mut routes = Vec::with_capacity(paths.len());
        for (hops, weight) in &paths {
            let way = hops.windows(2).map(|pair| links.get(&(pair[0], pair[1])).copied());
            let links = way.collect::<Option<Vec<_>>>().ok_or(NetworkError::BrokenRoute { from, to })?;
            let weight = ((value(weight) / largest * WEIGHT_MAX) as u64).max(1);
            routes.push(sim::Route { links, weight });
        }
        builder.routes(from, to, routes);
    }
    Ok(())
}

/// How good a path is: links, nanoseconds, and less for more bandwidth.
type PathCost = (u32, u64, std::cmp::Reverse<u64>);

/// The best path from a rank to each that is reached through switches alone.
fn through_switches(topology: &Topology, from: Rank) -> Vec<(Rank, Vec<NodeId>)> {
    let start = topology.node(from);
    let mut best: BTreeMap<NodeId, (PathCost, NodeId)> = BTreeMap::new();
    let mut open = std::collections::BTreeSet::from([((0, 0, std::cmp::Reverse(u64::MAX)), start)]);
    // Dijkstra over costs that only grow: one more link each.
    while let Some((cost, node)) = open.pop_first() {
        if node != start
            && (topology.rank(node).is_some() || best.get(&node).is_some_and(|known| known.0 < cost))
        {
            continue;
        }
        for link in topology.leaving(node).iter().filter(|link| link.to != start) {
            let std::cmp::Reverse(width) = cost.2;
            let there =
                (cost.0 + 1, cost.1 + link.latency_ns, std::cmp::Reverse(width.min(link.bytes_per_s)));
            if best.get(&link.to).is_none_or(|known| there < known.0) {
                best.insert(link.to, (there, node));
                open.insert((there, link.to));
            }
        }
    }
    let path = |to: Rank| {
        let mut hops = vec![topology.node(to)];
        while *hops.last()? != start {
            hops.push(best.get(hops.last()?)?.1);
        }
        hops.reverse();
        Some((to, hops))
    };
    (0..topology.ranks()).filter(|&to| to != from).filter_map(path).collect()
}

#[cfg(test)]
mod tests;

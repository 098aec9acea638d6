//! How long collectives take over given links, in virtual time.
//!
//! The ranks are those of any other simulation: real engines, running proved schedules over the
//! simulator's wires. Their processors take no time, so only the links are measured. In [`time`] no
//! payload moves, so messages may be of any size; a [`cluster`] computes results too.

use std::sync::Arc;
use std::time::Duration;

use pleach_packing::topology::{NodeId, Topology};
use pleach_schedule::cost::Platform;
use pleach_schedule::generate::Algorithm;
use pleach_schedule::select::{SelectError, Selection, select, select_algorithm};
use pleach_schedule::wiring::{Route, Routes, Wiring};
use pleach_transport::sim::{self, LinkSharing, Network};
use pleach_transport::{SharedMemory, Slice};
use pleach_vocabulary::{Collective, DataType, Rank, ReduceOp};

use super::cluster::{Cluster, Member, NoProgress};
use crate::call::{Counts, Descriptor};
use crate::engine::{Bytes, RunId};
use crate::group::{CollectiveError, Planner};

/// Transfers under way to one peer: more than any schedule has, so that only links are measured.
const QUEUE_DEPTH: usize = 1 << 16;
/// How long a collective may take, in virtual time.
const TIMEOUT: Duration = Duration::from_secs(100_000);

/// How long a collective took.
#[derive(Clone, Debug)]
pub struct Timed {
    /// The variant that carried it out, and the others that could.
    pub selection: Selection,
    /// From the call on all ranks to the end on the last.
    pub time: Duration,
}

/// Why nothing was measured.
#[derive(pleach_derive::ErrorDebug, thiserror::Error)]
#[non_exhaustive]
pub enum TimeError {
    /// There is no schedule for it.
    #[error(transparent)]
    Select(#[from] SelectError),
    /// It could not be carried out.
    #[error(transparent)]
    Collective(#[from] CollectiveError),
    /// The simulation does not end.
    #[error(transparent)]
    NoProgress(#[from] NoProgress),
    /// There is no memory to name, not even untouched.
    #[error("no memory: {bytes} bytes ({source}); measure a smaller message")]
    Memory {
        /// How many bytes.
        bytes: usize,
        /// The cause.
        source: std::io::Error,
    },
    /// A rank failed.
    #[error("rank {rank} failed: {cause}")]
    Failed {
        /// The rank.
        rank: Rank,
        /// The cause.
        cause: String,
    },
}

/// Times a collective of `part_bytes` bytes a part over these links, by the named algorithm or the
/// best one.
pub fn time(
    wiring: &Arc<Wiring>,
    collective: Collective,
    part_bytes: usize,
    algorithm: Option<&Algorithm>,
) -> Result<Timed, TimeError> {
    let selection = choose(wiring, collective, part_bytes, algorithm)?;
    let mut cluster = cluster(wiring, &selection, false)?;
    let mut runs = Vec::with_capacity(selection.ranks as usize);
    let begin = cluster.world.now();
    for rank in 0..selection.ranks {
        runs.push(start(&mut cluster, &selection, rank, part_bytes)?);
    }
    let mut failed = None;
    let mut ended = 0;
    cluster.run(|cluster| {
        // One after the other: all have ended when the last one that is waited for has, whichever
        // was last.
        while let (Some((id, _)), Some(Some(member))) = (runs.get(ended), cluster.members.get_mut(ended)) {
            let Some(outcome) = member.engine.take_outcome(*id) else { return false };
            if let Err(fault) = outcome {
                failed = Some((ended as Rank, fault.to_string()));
                return true;
            }
            ended += 1;
        }
        true
    })?;
    match failed {
        Some((rank, cause)) => Err(TimeError::Failed { rank, cause }),
        None => Ok(Timed { selection, time: cluster.world.now().since(begin) }),
    }
}

/// The named algorithm, or the one selected for that number of bytes a part over these links.
///
/// # Errors
///
/// There is none, or the links do not join the ranks that it moves data between.
pub fn choose(
    wiring: &Arc<Wiring>,
    collective: Collective,
    part_bytes: usize,
    algorithm: Option<&Algorithm>,
) -> Result<Selection, SelectError> {
    let platform = Platform::wired(wiring.clone());
    let whole = (part_bytes as u64).saturating_mul(u64::from(collective.parts(platform.ranks())));
    match algorithm {
        Some(algorithm) => select_algorithm(algorithm, collective, whole, &platform),
        None => select(collective, whole, &platform),
    }
}

/// The price of an all-reduce of so many bytes over these links, by the schedule that groups take
/// which are [reproducible](crate::Reproducible) for a world size: the cheapest one that adds in
/// the order of ranks.
///
/// # Errors
///
/// There is none, or the links do not join the ranks that it moves data between.
pub fn price_in_rank_order(wiring: &Arc<Wiring>, bytes: usize) -> Result<Duration, CollectiveError> {
    let mut planner = Planner::new(0, Platform::wired(wiring.clone()), None).in_rank_order();
    planner.price(Collective::AllReduce, bytes)
}

/// A topology as wires of the simulator, whose links carry one transfer after the other. Switches
/// are numbered after the ranks, in their order.
fn network(topology: &Topology, routes: &Routes) -> Network {
    let ranks = topology.ranks();
    let mut builder = Network::builder(ranks);
    let nodes = (0..topology.nodes().len() as u32).map(NodeId);
    let numbers: Vec<sim::NodeId> =
        nodes.map(|node| topology.rank(node).map_or_else(|| builder.switch(), sim::NodeId)).collect();
    for link in routes.links() {
        let (from, to) = (numbers[link.from.0 as usize], numbers[link.to.0 as usize]);
        builder.link(from, to, link.bytes_per_s, Duration::from_nanos(link.latency_ns));
    }
    for (from, to) in (0..ranks).flat_map(|from| (0..ranks).map(move |to| (from, to))) {
        let of = |route: &Route| sim::Route {
            links: route.links.iter().map(|&link| sim::LinkId(link as u32)).collect(),
            weight: route.weight,
        };
        builder.routes(from, to, routes.between(from, to).iter().map(of).collect());
    }
    builder.build().expect("routes lead over links of their topology").shared(LinkSharing::InOrder)
}

/// Ranks joined by these links, with routes as the choice's packing says, connected and ready.
/// `moves_bytes`: whether payload is copied and combined.
///
/// # Errors
///
/// They do not connect.
pub fn cluster(
    wiring: &Arc<Wiring>,
    selection: &Selection,
    moves_bytes: bool,
) -> Result<Cluster, NoProgress> {
    let packed = wiring.carried_out_by(selection.collective, &selection.algorithm);
    let routes = packed.as_ref().map_or(wiring.routes(), |packed| &packed.routes);
    let options = sim::Options { moves_bytes, ..options(wiring, routes, 0) };
    connected(options, wiring, 0)
}

/// What ranks are simulated with that are joined by these links, over these routes.
pub(super) fn options(wiring: &Wiring, routes: &Routes, seed: u64) -> sim::Options {
    let options = sim::Options::new(network(wiring.topology(), routes), seed);
    sim::Options { queue_depth: QUEUE_DEPTH, ..options }
}

/// Ranks joined by these links, connected and ready. Devices have so many signal slots for each
/// peer behind those of calls.
pub(super) fn connected(
    options: sim::Options,
    wiring: &Arc<Wiring>,
    further_signal_slots: usize,
) -> Result<Cluster, NoProgress> {
    let mut cluster = Cluster::wired(options, &Platform::wired(wiring.clone()), further_signal_slots);
    cluster.run(|cluster| cluster.members.iter().flatten().all(|member| member.engine.is_ready()))?;
    Ok(cluster)
}

/// Starts the collective on a rank; the returned slice holds its memory.
fn start(
    cluster: &mut Cluster,
    selection: &Selection,
    rank: Rank,
    part_bytes: usize,
) -> Result<(RunId, [Option<Slice>; 2]), TimeError> {
    let (collective, ranks) = (selection.collective, selection.ranks);
    let Some(Some(Member { engine, planner, .. })) = cluster.members.get_mut(rank as usize) else {
        return Err(TimeError::Failed { rank, cause: "it is dead".to_owned() });
    };
    let mut slice = |parts: usize| {
        if parts == 0 {
            return Ok(None);
        }
        let bytes = parts * part_bytes;
        // Never touched, so no page of it is ever there.
        let memory = SharedMemory::new(bytes).map_err(|source| TimeError::Memory { bytes, source })?;
        let region = engine.device().register(memory);
        let region = region.map_err(|error| CollectiveError::Register(Arc::new(error)))?;
        Ok::<_, TimeError>(Some(region.whole().slice(0..bytes).expect("the region is at least as long")))
    };
    let input = slice(collective.input_parts(rank, ranks).len())?;
    let output = slice(collective.output_parts(rank, ranks).len())?;
    let bytes = |slice: &Option<Slice>| slice.clone().map_or(Bytes::None, Bytes::Registered);
    let counts = Counts::Each(part_bytes);
    let (data_type, op) = (DataType::U8, ReduceOp::Sum);
    let descriptor = Descriptor { collective, amount: counts.amount(), data_type, op, tag: 0 };
    let plan = planner.plan(&descriptor, &counts, Some(&selection.algorithm.clone().into()))?;
    let run = engine.start(plan, bytes(&input), bytes(&output), TIMEOUT).map_err(CollectiveError::from)?;
    Ok((run, [input, output]))
}

#[cfg(test)]
mod tests {
    use pleach_packing::topology::LATENCY_NS;

    use super::*;

    #[test]
    fn ranks_are_the_first_nodes_of_a_network_and_links_carry_one_transfer_after_the_other() {
        let mut builder = Topology::builder();
        let (switch, ranks) = (builder.switch("switch"), ["a", "b"].map(|name| builder.rank(name)));
        ranks.into_iter().for_each(|rank| builder.duplex(rank, switch, 1_000, LATENCY_NS));
        let wiring = Wiring::new(builder.build().expect("connected"));
        let network = network(wiring.topology(), wiring.routes());
        let ends = |&link: &sim::LinkId| (network.link(link).from.0, network.link(link).to.0);
        assert_eq!(network.route(0, 1).iter().map(ends).collect::<Vec<_>>(), [(0, 2), (2, 1)]);
        assert_eq!(network.latency(0, 1), Duration::from_nanos(2 * LATENCY_NS));
        assert_eq!(network.sharing(), LinkSharing::InOrder);
    }
}

//! From a world to a group: the meeting, the device, the engine.

use std::sync::Arc;
use std::time::Duration;

use pleach_packing::topology::Topology;
use pleach_schedule::cost::{CostModel, Platform};
use pleach_schedule::generate::Access;
use pleach_schedule::hosts::HostMap;
use pleach_schedule::tuning::TuningError;
use pleach_schedule::wiring::{Wiring, topology_digest};
use pleach_transport::cuda::{CudaMemory, Gpu, GpuId};
use pleach_transport::rendezvous::{
    Fabric, JoinError, JoinOptions, Joined, Store, World, join, join_at, join_to_some,
};
use pleach_transport::{Device, Rank, Space};

use super::{Connect, Connection, Group, GroupError, Known, Options, Origin};
use crate::compute::cuda::{CudaCompute, StagingSpace};
use crate::compute::{Compute, ComputeError, HostCompute};
use crate::engine::{StatusBoard, neighbours, signal_slots};

/// Why a program could not join a group.
#[derive(pleach_derive::ErrorDebug, thiserror::Error)]
#[non_exhaustive]
pub enum JoinGroupError {
    /// The ranks did not meet.
    #[error(transparent)]
    Join(#[from] JoinError),
    /// The ranks met, and then something failed.
    #[error(transparent)]
    Group(#[from] GroupError),
    /// The chosen tuning cannot be used.
    #[error(transparent)]
    Tuning(#[from] TuningError),
}

impl Group {
    /// Meets the other ranks, and connects to all of them or as [`Options::connect`] says. Returns
    /// when all are there.
    ///
    /// # Errors
    ///
    /// See [`JoinGroupError`]; at the latest when `options.join_timeout` has passed.
    pub fn join(options: &Options) -> Result<Self, JoinGroupError> {
        Self::meet_by(options, None)
    }

    /// As [`Group::join`], with a store of the caller's, which the ranks of `options.world` alone
    /// use. The group keeps the store and asks it again when it is split.
    ///
    /// # Errors
    ///
    /// See [`JoinGroupError`]; at the latest when `options.join_timeout` has passed.
    pub fn join_in(store: Box<dyn Store>, options: &Options) -> Result<Self, JoinGroupError> {
        Self::meet_by(options, Some(store))
    }

    fn meet_by(options: &Options, store: Option<Box<dyn Store>>) -> Result<Self, JoinGroupError> {
        let named = &options.tuning;
        let options = &Options { tuning: named.read()?, ..options.clone() };
        expect_memory(options.space)?;
        let (joined, board) = meet(store, options, &settings(options), None)?;
        let hosts = platform_of(&joined).hosts;
        if joined.rank == 0 {
            options.tuning.warn_without_table(named, joined.fabric, &hosts);
        }
        Ok(Self::joined(joined, board, options, Origin::Job)?)
    }

    /// A group of ranks that have met, for the first time or for a part of an epoch's group.
    pub(super) fn joined(
        mut joined: Joined,
        board: Arc<StatusBoard>,
        options: &Options,
        origin: Origin<'_>,
    ) -> Result<Self, GroupError> {
        let reach = Reach::find(options, &mut joined)?;
        let mut platform = reach.platform(&joined);
        let table = options.tuning.table(joined.fabric, &platform.hosts);
        if let Some(table) = &table {
            tracing::info!("tuning: {} rows for {} {}", table.rows().len(), joined.fabric, platform.hosts);
            if let Some(&(near, far)) = table.models() {
                (platform.near, platform.far) = (near, far);
            }
        }
        if let Some(topology) = &options.topology {
            let (nodes, ranks) = (topology.ranks(), platform.ranks());
            if nodes != ranks {
                return Err(GroupError::Topology { nodes, ranks });
            }
            platform.wiring = Some(wiring(topology, &platform));
        }
        let addresses = if board.relays() { joined.addresses } else { Vec::new() };
        let connection = Connection {
            device: joined.device,
            events: joined.events,
            board,
            platform,
            ranks_a_processor: joined.ranks_a_processor[joined.rank as usize],
            store: joined.store,
        };
        let compute = reach.compute(options.space)?;
        let known = Known { ranks: joined.known, addresses };
        let mut group = Self::assembled(table, connection, compute, known, options, origin)?;
        group.fabric = Some(joined.fabric);
        Ok(group)
    }
}

/// Meets the other ranks, at a store of the caller's or where the world says, and connects to all
/// of them or, where pairs connect on first use, to those that are always connected. `board`: in an
/// epoch of a session, where all pairs connect.
pub(crate) fn meet(
    store: Option<Box<dyn Store>>,
    options: &Options,
    settings: &JoinOptions,
    board: Option<Arc<StatusBoard>>,
) -> Result<(Joined, Arc<StatusBoard>), JoinError> {
    let world = &options.world;
    let board = board.unwrap_or_else(|| board_of(options));
    if board.relays() {
        let joined = join_to_some(store, world, settings, board.clone(), &first_peers(options))?;
        return Ok((joined, board));
    }
    let joined = match store {
        Some(store) => join_at(store, world, settings, board.clone())?,
        None => join(world, settings, board.clone())?,
    };
    Ok((joined, board))
}

/// The board of this rank in a group of its own.
pub(crate) fn board_of(options: &Options) -> Arc<StatusBoard> {
    let World { rank, world_size, .. } = options.world;
    let is_on_use = connects(options) == Connect::OnUse && world_size > 1;
    Arc::new(if is_on_use { StatusBoard::on_use(rank, world_size) } else { StatusBoard::new(rank) })
}

/// The peers to which this rank is connected from the beginning, in a group of its own.
pub(crate) fn first_peers(options: &Options) -> Vec<Rank> {
    let World { rank, world_size, .. } = options.world;
    if connects(options) == Connect::OnUse {
        return neighbours(rank, world_size);
    }
    (0..world_size).filter(|peer| *peer != rank).collect()
}

/// When the pairs of the ranks connect.
fn connects(options: &Options) -> Connect {
    options.connect.unwrap_or_else(|| Connect::of_ranks(options.world.world_size))
}

/// Asks for the memory before the ranks meet, so that a rank without it reports that itself.
pub(crate) fn expect_memory(space: Space) -> Result<(), GroupError> {
    if let Space::Gpu { ordinal } = space {
        Gpu::open(ordinal).map_err(ComputeError::from)?;
    }
    Ok(())
}

/// How peers reach the memory that a group works on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Reach {
    /// The memory is the host's.
    Host,
    /// The memory is a GPU's. Ranks of this host map it, and NICs read and write it.
    Mapped,
    /// The memory is a GPU's, and NICs read and write it.
    Put,
    /// The memory is a GPU's, and staged through pinned memory of the host.
    Staged,
}

impl Reach {
    /// How peers reach this rank's memory. Neighbours map memory on a GPU if GPUs can share memory
    /// and every rank's GPU reaches those of its neighbours. Over RDMA a registration shows whether
    /// NICs reach the memory. A rank that stages and a rank that does not can be in one group, as
    /// each rank says where its memory is. But mappings are a matter of schedules: all ranks map,
    /// or none does.
    fn find(options: &Options, joined: &mut Joined) -> Result<Self, GroupError> {
        let space = options.space;
        let Space::Gpu { ordinal } = space else { return Ok(Self::Host) };
        Ok(match joined.fabric {
            Fabric::Shm if can_share(space) => {
                let reaches = reaches_neighbours(ordinal, joined)?;
                if do_all("gpu-reaches-gpus", reaches, joined)? { Self::Mapped } else { Self::Staged }
            }
            Fabric::Verbs if is_registered(ordinal, &mut *joined.device)? => Self::Put,
            Fabric::HybridVerbs if can_share(space) => {
                let is_registered = is_registered(ordinal, &mut *joined.device)?;
                let reaches = reaches_neighbours(ordinal, joined)?;
                let is_in_reach = is_registered && reaches;
                if do_all("nic-reaches-gpu", is_in_reach, joined)? { Self::Mapped } else { Self::Staged }
            }
            _ => Self::Staged,
        })
    }

    /// The platform by which schedules are chosen.
    fn platform(self, joined: &Joined) -> Platform {
        let platform = platform_of(joined);
        if matches!(self, Self::Put | Self::Staged) { without_mapping(platform) } else { platform }
    }

    /// The processor or GPU that computes on that memory.
    fn compute(self, space: Space) -> Result<Box<dyn Compute>, ComputeError> {
        let Space::Gpu { ordinal } = space else { return Ok(Box::new(HostCompute::new())) };
        let staging = if self == Self::Staged { StagingSpace::Host } else { StagingSpace::Gpu };
        Ok(Box::new(CudaCompute::new(&Gpu::open(ordinal)?, staging)?))
    }
}

/// Whether the device's NICs can register memory of this GPU; the function registers some.
fn is_registered(ordinal: u32, device: &mut dyn Device) -> Result<bool, ComputeError> {
    /// The function registers one unit of the GPU's memory then.
    const TRIED_BYTES: usize = 1;
    match device.register(CudaMemory::new(&Gpu::open(ordinal)?, TRIED_BYTES)?) {
        Ok(_) => Ok(true),
        Err(error) => {
            tracing::info!("memory of GPU {ordinal} is staged through the host's: {error}");
            Ok(false)
        }
    }
}

/// Whether kernels of this rank's GPU reach the GPUs of all ranks of this host. They do not if a
/// process does not see the other's GPU (`CUDA_VISIBLE_DEVICES`), or if there is no path between
/// the two GPUs (no P2P).
fn reaches_neighbours(ordinal: u32, joined: &mut Joined) -> Result<bool, GroupError> {
    let gpu = Gpu::open(ordinal).map_err(ComputeError::from)?;
    let ids = tell_all("gpu", &gpu.id().0, joined)?;
    let own_host = joined.hosts[joined.rank as usize];
    for (rank, id) in ids.iter().enumerate().filter(|(rank, _)| joined.hosts[*rank] == own_host) {
        let id = id.as_slice().try_into().map(GpuId).ok();
        let reaches = id.map_or(Ok(false), |id| Gpu::find(id).and_then(|other| gpu.reaches(other)));
        if !matches!(reaches, Ok(true)) {
            let why = match reaches {
                Err(error) => error.to_string(),
                Ok(_) => "there is no peer access between the two GPUs".to_owned(),
            };
            tracing::info!(
                "memory of GPU {ordinal} is staged through the host's, as that of rank {rank} is out of reach: {why}"
            );
            return Ok(false);
        }
    }
    Ok(true)
}

/// Whether the answer is true on all ranks. The ranks exchange their answers in the store where
/// they met.
fn do_all(topic: &str, own: bool, joined: &mut Joined) -> Result<bool, GroupError> {
    let all = tell_all(topic, if own { b"yes" } else { b"no" }, joined)?;
    let without = all.iter().position(|answer| answer != b"yes");
    if let Some(rank) = without.filter(|_| own) {
        tracing::info!(
            "memory of GPUs is staged through the host's, as rank {rank} does not reach all of it"
        );
    }
    Ok(without.is_none())
}

/// The words of all ranks on this topic, by rank.
fn tell_all(topic: &str, own: &[u8], joined: &mut Joined) -> Result<Vec<Vec<u8>>, GroupError> {
    let Some(store) = &mut joined.store else { return Ok(vec![own.to_vec()]) };
    let deadline = joined.deadline;
    let key = |rank: Rank| format!("{topic}-{rank}");
    store.set(&key(joined.rank), own, deadline)?;
    let keys: Vec<String> = (0..joined.world_size).map(key).collect();
    Ok(store.wait(&keys, deadline, deadline)?)
}

/// Whether the GPU's memory can be handed to other processes. All ranks compare their answers when
/// they meet.
fn can_share(space: Space) -> bool {
    matches!(space, Space::Gpu { ordinal } if Gpu::open(ordinal).is_ok_and(|gpu| gpu.can_share()))
}

/// The kind of memory that calls work on, as ranks compare it.
fn memory(space: Space) -> &'static str {
    match space {
        Space::Host => "host",
        _ if can_share(space) => "cuda",
        _ => "cuda that cannot be shared",
    }
}

/// The platform of ranks that have met.
fn platform_of(joined: &Joined) -> Platform {
    let in_turn = joined.ranks_a_processor.iter().max().copied();
    platform(joined.fabric, &joined.hosts, joined.ranks_here, in_turn)
}

/// The platform that the ranks have agreed on, by which schedules are chosen. Either all ranks
/// count all others among those on their host, or none does. `in_turn`: ranks that take turns on a
/// processor, at most.
pub(crate) fn platform(fabric: Fabric, hosts: &[u32], ranks_here: u32, in_turn: Option<u32>) -> Platform {
    let ranks = hosts.len() as u32;
    let maps = matches!(fabric, Fabric::Shm | Fabric::Hybrid | Fabric::HybridVerbs);
    let mut platform = Platform::over(fabric, if maps { HostMap::new(hosts) } else { HostMap::one(ranks) });
    if fabric == Fabric::Tcp && ranks_here == ranks {
        (platform.near, platform.far) = (CostModel::LOOPBACK, CostModel::LOOPBACK);
    }
    if maps {
        platform.near = platform.near.of_ranks_in_turn(in_turn.unwrap_or(1));
    }
    platform
}

/// The same platform where data on GPUs are put: kernels do not reach host memory that peers map.
pub(crate) fn without_mapping(mut platform: Platform) -> Platform {
    (platform.access, platform.near) = (Access::Put, CostModel::LOOPBACK);
    platform
}

/// The wiring of these links, over which a message costs as much as on this platform.
pub(super) fn wiring(topology: &Topology, platform: &Platform) -> Arc<Wiring> {
    let cost = Duration::from_secs_f64(platform.far.message_s);
    Arc::new(Wiring::new(topology.clone()).with_message_cost(cost))
}

/// The settings that ranks compare when they meet.
pub(super) fn settings(options: &Options) -> JoinOptions {
    let algorithm = options.algorithm.as_ref().map_or_else(|| "auto".to_owned(), ToString::to_string);
    let topology = |topology: &Arc<Topology>| format!("{:016x}", topology_digest(topology));
    let signal_slots = signal_slots(options.world.world_size);
    JoinOptions {
        fabric: options.fabric,
        // These must be equal for ranks to choose the same schedules and to number the same signal
        // slots.
        knobs: vec![
            ("pleach".to_owned(), env!("CARGO_PKG_VERSION").to_owned()),
            ("connect".to_owned(), connects(options).to_string()),
            ("algorithm".to_owned(), algorithm),
            ("tuning".to_owned(), options.tuning.knob()),
            ("signal slots".to_owned(), signal_slots.to_string()),
            ("memory".to_owned(), memory(options.space).to_owned()),
            ("reproducible".to_owned(), options.reproducible.to_string()),
            ("topology".to_owned(), options.topology.as_ref().map_or_else(|| "none".to_owned(), topology)),
        ],
        signal_slots,
        timeout: options.join_timeout,
    }
}

//! From a world to a group: the meeting, the device, the engine.

use std::sync::Arc;
use std::time::Duration;

use pleach_transport::cuda::{CudaMemory, Gpu};
use pleach_transport::rendezvous::{Fabric, JoinError, JoinOptions, Joined, join};
use pleach_transport::{Device, Space};

use super::{Connection, Group, GroupError, Options};
use crate::choices::ChoicesError;
use crate::compute::cuda::{CudaCompute, Staging};
use crate::compute::{Compute, ComputeError, HostCompute};
use crate::cost::{CostModel, Platform};
use crate::engine::{Board, CELLS};
use crate::generate::Access;
use crate::hosts::HostMap;
use crate::topology::Topology;
use crate::wiring::{Wiring, topology_digest};

/// Why a group was not joined.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum JoinGroupError {
    /// The ranks did not meet.
    #[error(transparent)]
    Join(#[from] JoinError),
    /// They met, and then something failed.
    #[error(transparent)]
    Group(#[from] GroupError),
    /// The choices that were pinned cannot be used.
    #[error(transparent)]
    Choices(#[from] ChoicesError),
}

impl Group {
    /// Meets the other ranks and connects to all of them. Returns when all are there.
    ///
    /// # Errors
    ///
    /// See [`JoinGroupError`]; at the latest when `options.join_timeout` has passed.
    pub fn join(options: &Options) -> Result<Self, JoinGroupError> {
        let options = &Options { choices: options.choices.read()?, ..options.clone() };
        expect_memory(options.space)?;
        let board = Arc::new(Board::new(options.world.rank));
        let joined = join(&options.world, &settings(options), board.clone())?;
        let platform = platform_for(options.space, &joined);
        options.choices.expect_table(joined.fabric, &platform.hosts)?;
        Ok(Self::joined(joined, board, options)?)
    }

    /// A group of ranks that have met.
    pub(super) fn joined(joined: Joined, board: Arc<Board>, options: &Options) -> Result<Self, GroupError> {
        let mut platform = platform_for(options.space, &joined);
        let table = options.choices.table(joined.fabric, &platform.hosts);
        if let Some(table) = &table {
            tracing::info!("choices: {} rows for {} {}", table.rows().len(), joined.fabric, platform.hosts);
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
        let mut connection = Connection {
            device: joined.device,
            events: joined.events,
            board,
            platform,
            ranks_here: joined.ranks_here,
            store: joined.store,
        };
        let compute = compute(options.space, joined.fabric, &mut connection)?;
        let mut group = Self::choosing_by(table, connection, compute, options)?;
        group.fabric = Some(joined.fabric);
        Ok(group)
    }
}

/// Asks for the memory before the ranks meet, so that who lacks it says so itself.
pub(super) fn expect_memory(space: Space) -> Result<(), GroupError> {
    if let Space::Cuda { ordinal } = space {
        Gpu::open(ordinal).map_err(ComputeError::from)?;
    }
    Ok(())
}

/// Who computes on that memory. What is on a GPU is staged where peers do not reach it.
fn compute(
    space: Space,
    fabric: Fabric,
    connection: &mut Connection,
) -> Result<Box<dyn Compute>, ComputeError> {
    let Space::Cuda { ordinal } = space else { return Ok(Box::new(HostCompute::new())) };
    let gpu = Gpu::open(ordinal)?;
    let is_reached = match connection.platform.access {
        Access::Mapped => true,
        _ => fabric == Fabric::Verbs && is_registered(&gpu, &mut *connection.device)?,
    };
    let staging = if is_reached { Staging::Gpu } else { Staging::Host };
    Ok(Box::new(CudaCompute::new(&gpu, staging)?))
}

/// Whether the device's NICs take memory of this GPU: some is tried. Ranks may differ, as each says where its memory is.
fn is_registered(gpu: &Arc<Gpu>, device: &mut dyn Device) -> Result<bool, ComputeError> {
    /// What is tried has one unit of the GPU's memory then.
    const TRIED_BYTES: usize = 1;
    match device.register(CudaMemory::new(gpu, TRIED_BYTES)?) {
        Ok(_) => Ok(true),
        Err(error) => {
            tracing::info!("memory of GPU {} is staged through the host's: {error}", gpu.ordinal());
            Ok(false)
        }
    }
}

/// The same as [`platform`] for that memory. That of a GPU is mapped by peers over shared memory, if GPUs can share theirs;
/// else it, or the pinned memory of the host through which it is staged, is put whatever the fabric is, as
/// kernels do not reach what peers map.
fn platform_for(space: Space, joined: &Joined) -> Platform {
    let platform = platform(joined.fabric, &joined.hosts, joined.ranks_here);
    match space {
        Space::Host => platform,
        _ if joined.fabric == Fabric::Shm && can_share(space) => platform,
        _ => Platform { access: Access::Put, near: CostModel::LOOPBACK, ..platform },
    }
}

/// Whether the GPU's memory can be handed to other processes. All ranks compare their answers when they meet.
fn can_share(space: Space) -> bool {
    matches!(space, Space::Cuda { ordinal } if Gpu::open(ordinal).is_ok_and(|gpu| gpu.can_share()))
}

/// What kind of memory calls work on, as ranks compare it.
fn memory(space: Space) -> &'static str {
    match space {
        Space::Host => "host",
        _ if can_share(space) => "cuda",
        _ => "cuda that cannot be shared",
    }
}

/// What the ranks have agreed on, as schedules are chosen by it. Either all ranks count all others among those on their
/// host, or none does.
fn platform(fabric: Fabric, hosts: &[u32], ranks_here: u32) -> Platform {
    let ranks = hosts.len() as u32;
    let maps = matches!(fabric, Fabric::Shm | Fabric::Hybrid | Fabric::HybridVerbs);
    let platform = Platform::over(fabric, if maps { HostMap::new(hosts) } else { HostMap::one(ranks) });
    if fabric == Fabric::Tcp && ranks_here == ranks {
        return Platform { near: CostModel::LOOPBACK, far: CostModel::LOOPBACK, ..platform };
    }
    platform
}

/// These links, over which messages cost what they cost on this platform.
pub(super) fn wiring(topology: &Topology, platform: &Platform) -> Arc<Wiring> {
    let cost = Duration::from_secs_f64(platform.far.message_s);
    Arc::new(Wiring::new(topology.clone()).with_message_cost(cost))
}

/// What ranks compare when they meet.
pub(super) fn settings(options: &Options) -> JoinOptions {
    let algorithm = options.algorithm.as_ref().map_or_else(|| "auto".to_owned(), ToString::to_string);
    let topology = |topology: &Arc<Topology>| format!("{:016x}", topology_digest(topology));
    JoinOptions {
        fabric: options.fabric,
        // What must be equal for ranks to choose the same schedules and number the same cells.
        knobs: vec![
            ("pleach".to_owned(), env!("CARGO_PKG_VERSION").to_owned()),
            ("algorithm".to_owned(), algorithm),
            ("choices".to_owned(), options.choices.knob()),
            ("cells".to_owned(), CELLS.to_string()),
            ("memory".to_owned(), memory(options.space).to_owned()),
            ("reproducible".to_owned(), options.reproducible.to_string()),
            ("topology".to_owned(), options.topology.as_ref().map_or_else(|| "none".to_owned(), topology)),
        ],
        cells: CELLS,
        timeout: options.join_timeout,
    }
}

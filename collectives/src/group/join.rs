//! From a world to a group: the meeting, the device, the engine.

use std::sync::Arc;
use std::time::Duration;

use pleach_transport::rendezvous::{Fabric, JoinError, JoinOptions, Joined, join};

use super::{Connection, Group, GroupError, Options};
use crate::choices::ChoicesError;
use crate::compute::HostCompute;
use crate::cost::{CostModel, Platform};
use crate::engine::{Board, CELLS};
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
        let board = Arc::new(Board::new(options.world.rank));
        let joined = join(&options.world, &settings(options), board.clone())?;
        let platform = platform(joined.fabric, &joined.hosts, joined.ranks_here);
        options.choices.expect_table(joined.fabric, &platform.hosts)?;
        Ok(Self::joined(joined, board, options)?)
    }

    /// A group of ranks that have met.
    pub(super) fn joined(joined: Joined, board: Arc<Board>, options: &Options) -> Result<Self, GroupError> {
        let mut platform = platform(joined.fabric, &joined.hosts, joined.ranks_here);
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
        let connection = Connection {
            device: joined.device,
            events: joined.events,
            board,
            platform,
            ranks_here: joined.ranks_here,
            store: joined.store,
        };
        let mut group = Self::choosing_by(table, connection, Box::new(HostCompute::new()), options)?;
        group.fabric = Some(joined.fabric);
        Ok(group)
    }
}

/// What the ranks have agreed on, as schedules are chosen by it. Either all ranks count all others among those on their
/// host, or none does.
fn platform(fabric: Fabric, hosts: &[u32], ranks_here: u32) -> Platform {
    let ranks = hosts.len() as u32;
    let maps = matches!(fabric, Fabric::Shm | Fabric::Hybrid);
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
            ("reproducible".to_owned(), options.reproducible.to_string()),
            ("topology".to_owned(), options.topology.as_ref().map_or_else(|| "none".to_owned(), topology)),
        ],
        cells: CELLS,
        timeout: options.join_timeout,
    }
}

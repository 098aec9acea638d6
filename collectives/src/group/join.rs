//! From a world to a group: the meeting, the devices, the engine.

use std::sync::Arc;

use pleach_transport::rendezvous::{Fabric, FabricError, Fabrics, JoinError, JoinOptions, join_over};
use pleach_transport::shm::ShmDevice;
use pleach_transport::tcp::TcpDevice;
use pleach_transport::{Device, DeviceConfig};

use super::{Connection, Group, GroupError, Options};
use crate::compute::HostCompute;
use crate::engine::{Board, CELLS};

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
}

/// The devices of this machine.
struct Machine;

impl Fabrics for Machine {
    fn make(&mut self, fabric: Fabric, config: DeviceConfig) -> Result<Box<dyn Device>, FabricError> {
        let failed = |source: Box<dyn std::error::Error + Send + Sync>| FabricError { source };
        Ok(match fabric {
            Fabric::Shm => Box::new(ShmDevice::new(config).map_err(|error| failed(error.into()))?),
            Fabric::Tcp => Box::new(TcpDevice::new(config).map_err(|error| failed(error.into()))?),
        })
    }
}

impl Group {
    /// Meets the other ranks and connects to all of them. Returns when all are there.
    ///
    /// # Errors
    ///
    /// See [`JoinGroupError`]; at the latest when `options.join_timeout` has passed.
    pub fn join(options: &Options) -> Result<Self, JoinGroupError> {
        let board = Arc::new(Board::new(options.world.rank));
        let algorithm = options.algorithm.as_ref().map_or_else(|| "auto".to_owned(), ToString::to_string);
        let join = JoinOptions {
            fabric: options.fabric,
            // What must be equal for ranks to choose the same schedules and number the same cells.
            knobs: vec![
                ("pleach".to_owned(), env!("CARGO_PKG_VERSION").to_owned()),
                ("algorithm".to_owned(), algorithm),
                ("cells".to_owned(), CELLS.to_string()),
            ],
            cells: CELLS,
            timeout: options.join_timeout,
        };
        let joined = join_over(&options.world, &join, board.clone(), &mut Machine)?;
        let connection = Connection {
            device: joined.device,
            events: joined.events,
            board,
            world_size: joined.world_size,
            ranks_here: joined.ranks_here,
            store: joined.store,
        };
        Ok(Self::new(connection, Box::new(HostCompute::new()), options)?)
    }
}

//! `hybrid`: shared memory where a peer is on this host, sockets across.
//!
//! One device over an [`ShmDevice`] and a [`TcpDevice`]. **Invariant:** each pair of ranks is joined by exactly one of
//! them, told when the device is made and the same at both ends; whatever is about a peer goes to that one alone. So a
//! peer is lost once, by whoever watches it, and severed by whoever joins it; and what the contract says of a pair holds
//! because it holds there.
//!
//! What is not about one peer:
//!
//! * **Keys.** A region has one key on both: that which shared memory gives it, under which sockets list it too
//!   ([`TcpDevice::adopt`]). Nothing is translated on the way of data, and a key is as dead on both as its generation is,
//!   since both hear of the last handle's end ([`Both`]). Memory that cannot be mapped is refused, as by shared memory: a
//!   region of a device is one that every peer reaches. Slices that a caller lends are therefore staged.
//! * **The bell** is shared memory's word. A thread sleeps on the sockets' file while this device is armed, and rings the
//!   word ([`bridge`]).
//! * **Severing a neighbour** takes local regions away from all neighbours, as on shared memory; peers across keep them.
//! * **Polling** looks at both, in turn first at the one and first at the other, so that neither keeps the other's events
//!   out of a vector that is always full.

mod bridge;

use std::io;
use std::sync::Arc;

use self::bridge::Bridge;
use crate::Rank;
use crate::cells::{Cells, Notice};
use crate::clock::Nanos;
use crate::device::{
    Address, Bell, Caps, ConnectError, Device, DeviceConfig, Event, MapError, Mapped, PostError, Reach,
    RegisterError, Ring, SubmitError, Submitted, Transfer, TransferId,
};
use crate::memory::Memory;
use crate::region::{Region, RegionKey, Registry, RemoteSlice};
use crate::shm::{self, ShmDevice};
use crate::tcp::{self, TcpDevice};

/// What joins two ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Route {
    /// Memory that both map: they are on one host.
    Shm,
    /// Sockets.
    Tcp,
}

/// Why the device was not made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// Not one route for each rank.
    #[error("{routes} routes for a world of {world_size} ranks; name one for each")]
    Routes {
        /// How many were given.
        routes: usize,
        /// How many ranks there are.
        world_size: u32,
    },
    /// No shared memory.
    #[error(transparent)]
    Shm(#[from] shm::OpenError),
    /// No sockets.
    #[error(transparent)]
    Tcp(#[from] tcp::OpenError),
    /// The operating system refused a descriptor or the thread.
    #[error("the system refused what joins the bells of shm and tcp: an epoll descriptor or a thread")]
    Bell(#[source] io::Error),
}

const FABRIC: &str = "shm+tcp";

/// One rank's end of both fabrics. See the module.
pub struct HybridDevice {
    // Before the devices, whose bells it joins.
    bridge: Bridge,
    shm: ShmDevice,
    tcp: TcpDevice,
    /// By rank; this rank's own says nothing.
    routes: Vec<Route>,
    caps: Caps,
    /// Which of the two the next poll looks at first.
    next: Route,
}

impl HybridDevice {
    /// A device that reaches each rank by the route at its number; the peers' devices must agree.
    ///
    /// # Errors
    ///
    /// See [`OpenError`].
    pub fn new(config: DeviceConfig, routes: Vec<Route>) -> Result<Self, OpenError> {
        let (rank, world_size) = (config.rank, config.world_size);
        if routes.len() != world_size as usize {
            return Err(OpenError::Routes { routes: routes.len(), world_size });
        }
        let mut shm = ShmDevice::new(config.clone())?;
        let mut tcp = TcpDevice::new(config)?;
        let both: Arc<dyn Registry> = Arc::new(Both { shm: shm.registry(), tcp: tcp.registry() });
        shm.replace_registry(Arc::clone(&both));
        tcp.replace_registry(both);
        let bridge = Bridge::new(rank, tcp.bell_file(), shm.ringer()).map_err(OpenError::Bell)?;
        let (here, across) = (shm.caps(), tcp.caps());
        let caps = Caps {
            fabric: FABRIC,
            checks_keys: here.checks_keys && across.checks_keys,
            registers_freely: here.registers_freely && across.registers_freely,
            cells: here.cells.min(across.cells),
            transfer_bytes_max: here.transfer_bytes_max.min(across.transfer_bytes_max),
        };
        Ok(Self { bridge, shm, tcp, routes, caps, next: Route::Shm })
    }

    /// Who joins this rank to `peer`; sockets, which refuse it, where there is no such rank.
    fn to(&self, peer: Rank) -> &dyn Device {
        match self.routes.get(peer as usize) {
            Some(Route::Shm) => &self.shm,
            Some(Route::Tcp) | None => &self.tcp,
        }
    }

    fn to_mut(&mut self, peer: Rank) -> &mut dyn Device {
        match self.routes.get(peer as usize) {
            Some(Route::Shm) => &mut self.shm,
            Some(Route::Tcp) | None => &mut self.tcp,
        }
    }
}

impl Device for HybridDevice {
    fn caps(&self) -> &Caps {
        &self.caps
    }

    fn reach(&self, peer: Rank) -> Reach {
        self.to(peer).reach(peer)
    }

    fn rank(&self) -> Rank {
        self.shm.rank()
    }

    /// Both addresses; a peer takes the one of the route that joins it.
    fn address(&self) -> Address {
        Address(format!("{} {}", self.shm.address(), self.tcp.address()))
    }

    fn register(&mut self, memory: Arc<dyn Memory>) -> Result<Region, RegisterError> {
        let region = self.shm.register(memory)?;
        self.tcp.adopt(&region);
        Ok(region)
    }

    fn map(&mut self, peer: Rank, slice: &RemoteSlice) -> Result<Mapped, MapError> {
        self.to_mut(peer).map(peer, slice)
    }

    fn connect(&mut self, peer: Rank, address: &Address) -> Result<(), ConnectError> {
        let Some((here, across)) = address.0.split_once(' ') else {
            return Err(ConnectError::Address { fabric: FABRIC, address: address.clone() });
        };
        let address = match self.routes.get(peer as usize) {
            Some(Route::Shm) => here,
            Some(Route::Tcp) | None => across,
        };
        self.to_mut(peer).connect(peer, &Address(address.to_owned()))
    }

    fn sever(&mut self, peer: Rank) {
        self.to_mut(peer).sever(peer);
    }

    #[inline]
    fn submit(&mut self, peer: Rank, transfer: Transfer, id: TransferId) -> Result<Submitted, SubmitError> {
        match self.routes.get(peer as usize) {
            Some(Route::Shm) => self.shm.submit(peer, transfer, id),
            Some(Route::Tcp) | None => self.tcp.submit(peer, transfer, id),
        }
    }

    #[inline]
    fn notify(&mut self, peer: Rank, notice: &Notice, id: TransferId) -> Result<Submitted, SubmitError> {
        match self.routes.get(peer as usize) {
            Some(Route::Shm) => self.shm.notify(peer, notice, id),
            Some(Route::Tcp) | None => self.tcp.notify(peer, notice, id),
        }
    }

    fn cells(&self, peer: Rank) -> Cells {
        self.to(peer).cells(peer)
    }

    fn post(&mut self, peer: Rank, message: &[u8]) -> Result<(), PostError> {
        self.to_mut(peer).post(peer, message)
    }

    fn poll(&mut self, now: Nanos, events: &mut Vec<Event>) {
        self.bridge.disarm(self.tcp.bell_file());
        match self.next {
            Route::Shm => {
                self.shm.poll(now, events);
                self.tcp.poll(now, events);
                self.next = Route::Tcp;
            }
            Route::Tcp => {
                self.tcp.poll(now, events);
                self.shm.poll(now, events);
                self.next = Route::Shm;
            }
        }
    }

    fn arm(&mut self) -> Option<Bell> {
        self.tcp.arm()?;
        // Before the word is armed: what the bridge rings from now on keeps the word from being armed, or rings it.
        self.bridge.arm(self.tcp.bell_file()).ok()?;
        self.shm.arm()
    }

    fn ringer(&self) -> Arc<dyn Ring> {
        self.shm.ringer()
    }

    fn next_wakeup(&self) -> Option<Nanos> {
        self.shm.next_wakeup().into_iter().chain(self.tcp.next_wakeup()).min()
    }

    fn leave(&mut self) {
        self.shm.leave();
        self.tcp.leave();
    }

    fn flush(&mut self) -> bool {
        let both = [self.shm.flush(), self.tcp.flush()];
        both == [true; 2]
    }

    fn is_flushed(&self) -> bool {
        self.shm.is_flushed() && self.tcp.is_flushed()
    }
}

/// Tells both devices that a region is gone.
struct Both {
    shm: Arc<dyn Registry>,
    tcp: Arc<dyn Registry>,
}

impl Registry for Both {
    fn released(&self, key: RegionKey) {
        self.shm.released(key);
        self.tcp.released(key);
    }
}

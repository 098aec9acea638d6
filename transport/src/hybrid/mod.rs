//! `hybrid`: shared memory to peers of this host, sockets or RDMA to peers of other hosts.
//!
//! One device over a [`ShmDevice`] and a [`TcpDevice`] or [`VerbsDevice`]. **Invariant:** exactly
//! one of them connects each pair of ranks. The choice is made when the device is made and is the
//! same at both ends; every call about a peer goes to that device alone. So a peer is lost once and
//! severed once, and the contract holds for a pair because it holds for that device.
//!
//! Calls that are not about one peer:
//!
//! * **Keys.** A region has one key on both devices. Sockets use the key of shared memory
//!   ([`TcpDevice::adopt`]). RDMA chooses the key, because the key contains the NIC's, and shared
//!   memory uses that ([`ShmDevice::register_as`]). The data path translates nothing, and a key
//!   ends on both, because both are told of the last handle's end ([`BothRegistries`]). Memory that
//!   cannot be mapped is refused, as by shared memory: every peer must reach a region. So slices
//!   that a caller lends are staged.
//! * **The wake source** is the word of shared memory. While this device is armed a thread sleeps
//!   on the file of the other device and wakes the word ([`wake_forwarder`]).
//! * **Severing a peer of this host** unmaps local regions from all peers of this host, as on
//!   shared memory. Peers of other hosts keep them over sockets. A NIC would go on with the
//!   replaced pages, so over RDMA the regions are withdrawn from peers of other hosts as well
//!   ([`VerbsDevice::withdraw`]).
//! * **Polling** polls both devices and alternates the order, so that neither keeps the other's
//!   events out of a full vector.

mod responder;
mod wake_forwarder;

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use self::responder::HybridResponder;
use self::wake_forwarder::WakeForwarder;
use crate::Rank;
use crate::clock::Nanos;
use crate::control::Streams;
use crate::device::{
    Address, Armed, ConnectError, Device, DeviceConfig, DeviceInfo, Event, Flush, Incarnation, MapError,
    Meeting, PostError, RegisterError, SubmitError, Submitted, Transfer, TransferId, Urgency,
};
use crate::memory::{Memory, Space};
use crate::region::{Mapped, ReadOnlyMapped, Region, RegionKey, Registry, RemoteSlice};
use crate::shm::{self, ShmDevice};
use crate::signals::{Signal, Signals};
use crate::tcp::{self, TcpDevice};
use crate::verbs::{self, Cache, VerbsDevice, VerbsOptions};

/// The device that connects two ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PeerFabric {
    /// Shared memory: both ranks are on one host.
    Shm,
    /// Sockets or RDMA.
    Network,
}

/// Why the device was not made.
#[derive(pleach_derive::ErrorDebug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// The number of entries is not the number of ranks.
    #[error("{peer_fabrics} routes for a world of {world_size} ranks; name one for each")]
    PeerFabrics {
        /// The number of entries.
        peer_fabrics: usize,
        /// The number of ranks.
        world_size: u32,
    },
    /// No shared memory.
    #[error(transparent)]
    Shm(#[from] shm::OpenError),
    /// No sockets.
    #[error(transparent)]
    Tcp(#[from] tcp::OpenError),
    /// No RDMA.
    #[error(transparent)]
    Verbs(#[from] verbs::OpenError),
    /// The operating system refused a descriptor or the thread.
    #[error("the system refused what joins the wake sources of two fabrics: an epoll descriptor or a thread")]
    WakeSource(#[source] io::Error),
}

/// The device for peers of other hosts.
enum NetworkDevice {
    Tcp(Box<TcpDevice>),
    Verbs(Box<VerbsDevice>),
}

impl NetworkDevice {
    fn device(&self) -> &dyn Device {
        match self {
            Self::Tcp(tcp) => &**tcp,
            Self::Verbs(verbs) => &**verbs,
        }
    }

    fn device_mut(&mut self) -> &mut dyn Device {
        match self {
            Self::Tcp(tcp) => &mut **tcp,
            Self::Verbs(verbs) => &mut **verbs,
        }
    }

    /// The descriptor that `arm` returns, always the same.
    fn wake_file(&self) -> &OwnedFd {
        match self {
            Self::Tcp(tcp) => tcp.wake_file(),
            Self::Verbs(verbs) => verbs.wake_file(),
        }
    }

    fn streams(&self) -> Streams {
        match self {
            Self::Tcp(tcp) => tcp.streams(),
            Self::Verbs(verbs) => verbs.streams(),
        }
    }

    fn fabric(&self) -> &'static str {
        match self {
            Self::Tcp(_) => "shm+tcp",
            Self::Verbs(_) => "shm+verbs",
        }
    }
}

/// One rank's end of both fabrics. See the module.
pub struct HybridDevice {
    // Dropped before the devices, whose wake sources it connects.
    wake_forwarder: WakeForwarder,
    shm: ShmDevice,
    network: NetworkDevice,
    /// By rank; the entry of this rank has no meaning.
    peer_fabrics: Vec<PeerFabric>,
    info: DeviceInfo,
    /// Regions that both devices know, over RDMA.
    cache: Cache,
    /// The device that the next poll polls first.
    next: PeerFabric,
}

impl HybridDevice {
    /// A device that uses shared memory or sockets to each rank as `peer_fabrics` says, which must
    /// be the same on all ranks.
    ///
    /// # Errors
    ///
    /// See [`OpenError`].
    pub fn new(config: DeviceConfig, peer_fabrics: Vec<PeerFabric>) -> Result<Self, OpenError> {
        Self::over(config, peer_fabrics, |config, incarnation| {
            let tcp = TcpDevice::of_incarnation(config, incarnation)?;
            let registry = tcp.registry();
            Ok((NetworkDevice::Tcp(Box::new(tcp)), registry))
        })
    }

    /// As [`HybridDevice::new`], with RDMA in place of sockets, on the ports that `options` select.
    ///
    /// # Errors
    ///
    /// See [`OpenError`].
    pub fn over_verbs(
        config: DeviceConfig,
        peer_fabrics: Vec<PeerFabric>,
        options: &VerbsOptions,
    ) -> Result<Self, OpenError> {
        Self::over(config, peer_fabrics, |config, incarnation| {
            let verbs = VerbsDevice::of_incarnation(config, incarnation, options)?;
            let registry = verbs.registry();
            Ok((NetworkDevice::Verbs(Box::new(verbs)), registry))
        })
    }

    fn over(
        mut config: DeviceConfig,
        peer_fabrics: Vec<PeerFabric>,
        open: impl FnOnce(DeviceConfig, Incarnation) -> Result<(NetworkDevice, Arc<dyn Registry>), OpenError>,
    ) -> Result<Self, OpenError> {
        let (rank, world_size) = (config.rank, config.world_size);
        if peer_fabrics.len() != world_size as usize {
            return Err(OpenError::PeerFabrics { peer_fabrics: peer_fabrics.len(), world_size });
        }
        let incarnation = Incarnation::fresh();
        let responder = Arc::new(HybridResponder::new(config.responder, peer_fabrics.clone()));
        config.responder = Arc::<HybridResponder>::clone(&responder);
        let mut shm = ShmDevice::of_incarnation(config.clone(), incarnation)?;
        let (mut network, registry) = open(config, incarnation)?;
        responder.connect(shm.streams(), network.streams());
        let registry_of_both: Arc<dyn Registry> =
            Arc::new(BothRegistries { shm: shm.registry(), network: registry });
        shm.replace_registry(Arc::clone(&registry_of_both));
        match &mut network {
            NetworkDevice::Tcp(tcp) => {
                tcp.replace_registry(registry_of_both);
                tcp.count_in(&shm.info().setup);
            }
            NetworkDevice::Verbs(verbs) => {
                verbs.replace_registry(registry_of_both);
                verbs.count_in(&shm.info().setup);
            }
        }
        let wake_forwarder = WakeForwarder::new(rank, network.wake_file(), Arc::clone(&shm.info().waker))
            .map_err(OpenError::WakeSource)?;
        // The limits of a device hold for all its peers; RDMA devices may carry less than shared
        // memory.
        shm.limit_transfers(network.device().info().transfer_bytes_max);
        let (here, there) = (shm.info(), network.device().info());
        let reach =
            peer_fabrics.iter().zip(&here.reach).zip(&there.reach).map(
                |((fabric, here), there)| match fabric {
                    PeerFabric::Shm => *here,
                    PeerFabric::Network => *there,
                },
            );
        let info = DeviceInfo {
            rank,
            incarnation,
            // A peer uses the part of its fabric.
            address: Address(format!("{} {}", here.address, there.address)),
            reach: reach.collect(),
            waker: Arc::clone(&here.waker),
            // Shared memory counts the registrations of both.
            setup: Arc::clone(&here.setup),
            fabric: network.fabric(),
            registers_freely: here.registers_freely && there.registers_freely,
            signal_slots: here.signal_slots.min(there.signal_slots),
            transfer_bytes_max: here.transfer_bytes_max.min(there.transfer_bytes_max),
        };
        Ok(Self {
            wake_forwarder,
            shm,
            network,
            peer_fabrics,
            info,
            cache: Cache::default(),
            next: PeerFabric::Shm,
        })
    }

    /// Registers memory, for one peer or for all.
    fn register_only(
        &mut self,
        memory: Arc<dyn Memory>,
        only: Option<Rank>,
    ) -> Result<Region, RegisterError> {
        match &mut self.network {
            // The network device would read it as host memory.
            NetworkDevice::Tcp(_) if memory.space() != Space::Host => {
                Err(RegisterError::Space { fabric: self.info.fabric, space: memory.space() })
            }
            NetworkDevice::Tcp(tcp) => {
                let region = match only {
                    None => self.shm.register(memory)?,
                    Some(peer) => self.shm.register_for(peer, memory)?,
                };
                tcp.adopt(&region, only);
                Ok(region)
            }
            NetworkDevice::Verbs(verbs) => {
                // The regions of the cache are for all.
                if only.is_none()
                    && let Some(region) = self.cache.find(&*memory)
                {
                    return Ok(region);
                }
                let adopt = |slot| verbs.adopt(&memory, slot, only);
                let region = self.shm.register_as(Arc::clone(&memory), only, adopt)?;
                if only.is_none() {
                    self.cache.add(&region);
                }
                Ok(region)
            }
        }
    }

    /// The device that connects `peer`; the network device, which refuses an invalid rank.
    fn to(&self, peer: Rank) -> &dyn Device {
        match self.peer_fabrics.get(peer as usize) {
            Some(PeerFabric::Shm) => &self.shm,
            Some(PeerFabric::Network) | None => self.network.device(),
        }
    }

    /// The part of an address that the device for `peer` uses.
    fn part_for(&self, peer: Rank, address: &Address) -> Result<Address, ConnectError> {
        let Some((here, network)) = address.0.split_once(' ') else {
            return Err(ConnectError::Address { fabric: self.info.fabric, address: address.clone() });
        };
        let part = match self.peer_fabrics.get(peer as usize) {
            Some(PeerFabric::Shm) => here,
            Some(PeerFabric::Network) | None => network,
        };
        Ok(Address(part.to_owned()))
    }

    fn to_mut(&mut self, peer: Rank) -> &mut dyn Device {
        match self.peer_fabrics.get(peer as usize) {
            Some(PeerFabric::Shm) => &mut self.shm,
            Some(PeerFabric::Network) | None => self.network.device_mut(),
        }
    }
}

// SAFETY: both of its devices keep the contract, and the conformance suite tests each line of it.
#[allow(unsafe_code)]
unsafe impl Device for HybridDevice {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn register(&mut self, memory: Arc<dyn Memory>) -> Result<Region, RegisterError> {
        self.register_only(memory, None)
    }

    fn register_for(&mut self, peer: Rank, memory: Arc<dyn Memory>) -> Result<Region, RegisterError> {
        self.register_only(memory, Some(peer))
    }

    fn map(&mut self, peer: Rank, slice: &RemoteSlice) -> Result<Mapped, MapError> {
        self.to_mut(peer).map(peer, slice)
    }

    fn map_read_only(&mut self, peer: Rank, slice: &RemoteSlice) -> Result<ReadOnlyMapped, MapError> {
        self.to_mut(peer).map_read_only(peer, slice)
    }

    fn connect(&mut self, peer: Rank, address: &Address) -> Result<(), ConnectError> {
        let address = self.part_for(peer, address)?;
        self.to_mut(peer).connect(peer, &address)
    }

    fn meet(&mut self, peer: Rank, meeting: Meeting<'_>) -> Result<(), ConnectError> {
        let Meeting::Dial { address, own } = meeting else {
            return self.to_mut(peer).meet(peer, meeting);
        };
        let address = self.part_for(peer, address)?;
        self.to_mut(peer).meet(peer, Meeting::Dial { address: &address, own })
    }

    fn incarnation(&self, peer: Rank) -> Option<Incarnation> {
        self.to(peer).incarnation(peer)
    }

    fn sever(&mut self, peer: Rank) {
        if let (Some(PeerFabric::Shm), NetworkDevice::Verbs(verbs)) =
            (self.peer_fabrics.get(peer as usize), &mut self.network)
        {
            verbs.withdraw(&self.shm.taken_with(peer));
            self.cache.clear();
        }
        self.to_mut(peer).sever(peer);
    }

    #[inline]
    fn submit(&mut self, peer: Rank, transfer: Transfer, id: TransferId) -> Result<Submitted, SubmitError> {
        match self.peer_fabrics.get(peer as usize) {
            Some(PeerFabric::Shm) => self.shm.submit(peer, transfer, id),
            Some(PeerFabric::Network) | None => self.network.device_mut().submit(peer, transfer, id),
        }
    }

    #[inline]
    fn signal(&mut self, peer: Rank, signal: &Signal, id: TransferId) -> Result<Submitted, SubmitError> {
        match self.peer_fabrics.get(peer as usize) {
            Some(PeerFabric::Shm) => self.shm.signal(peer, signal, id),
            Some(PeerFabric::Network) | None => self.network.device_mut().signal(peer, signal, id),
        }
    }

    fn drain(&mut self, peer: Rank) -> Result<(), SubmitError> {
        self.to_mut(peer).drain(peer)
    }

    fn signal_slots(&self, peer: Rank) -> Signals {
        self.to(peer).signal_slots(peer)
    }

    fn post(&mut self, peer: Rank, message: &[u8], urgency: Urgency) -> Result<(), PostError> {
        self.to_mut(peer).post(peer, message, urgency)
    }

    fn poll(&mut self, now: Nanos, events: &mut Vec<Event>) {
        self.wake_forwarder.disarm(self.network.wake_file());
        match self.next {
            PeerFabric::Shm => {
                self.shm.poll(now, events);
                self.network.device_mut().poll(now, events);
                self.next = PeerFabric::Network;
            }
            PeerFabric::Network => {
                self.network.device_mut().poll(now, events);
                self.shm.poll(now, events);
                self.next = PeerFabric::Shm;
            }
        }
    }

    fn arm(&mut self) -> Option<Armed> {
        let network = self.network.device_mut().arm()?;
        // Before the word is armed: a wake by the forwarder from now on prevents the arming, or
        // wakes.
        self.wake_forwarder.arm(self.network.wake_file()).ok()?;
        let here = self.shm.arm()?;
        Some(Armed {
            wake_source: here.wake_source,
            until: here.until.into_iter().chain(network.until).min(),
        })
    }

    fn exchange_processors(&mut self, own: u32, visit: &mut dyn FnMut(Rank, u32)) {
        self.shm.exchange_processors(own, visit);
    }

    fn leave(&mut self) {
        self.shm.leave();
        self.network.device_mut().leave();
    }

    fn flush(&mut self, what: Flush) -> bool {
        let registry_of_both = [self.shm.flush(what), self.network.device_mut().flush(what)];
        registry_of_both == [true; 2]
    }
}

/// Tells both devices that a region is released.
struct BothRegistries {
    shm: Arc<dyn Registry>,
    network: Arc<dyn Registry>,
}

impl Registry for BothRegistries {
    fn released(&self, key: RegionKey) {
        self.shm.released(key);
        self.network.released(key);
    }
}

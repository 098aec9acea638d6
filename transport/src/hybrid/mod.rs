//! `hybrid`: shared memory to peers of this host, sockets or RDMA to peers of other hosts.
//!
//! One device over a [`ShmDevice`] and a [`TcpDevice`] or [`VerbsDevice`]. **Invariant:** exactly
//! one of them connects each pair of processes. The choice follows from the hosts in the addresses
//! of both ([`HostId`]), so it is the same at both ends. Every call about a peer goes to that
//! device alone. So a peer is lost once, and the contract holds for a pair because it holds for
//! that device.
//!
//! **A rank moves** to the other device when a process of another host gets it. The former process
//! has ended then on the device that it had, so nothing more comes from there. Both devices know
//! all processes that had the rank ([`KnownProcesses`]). Memory that was registered for the former
//! process alone is taken from the device of its successor. Severing the rank severs it on both
//! devices, if both have had processes of it, and `Severed` comes when both fences hold.
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
//! * **Severing a process of this host** unmaps local regions from all peers of this host, as on
//!   shared memory. Peers of other hosts keep them over sockets. A NIC would go on with the
//!   replaced pages, so over RDMA the regions are withdrawn from peers of other hosts as well
//!   ([`VerbsDevice::withdraw`]).
//! * **Polling** polls both devices and alternates the order, so that neither keeps the other's
//!   events out of a full vector.

mod host;
mod responder;
mod wake_forwarder;

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

pub use self::host::HostId;
use self::responder::HybridResponder;
use self::wake_forwarder::WakeForwarder;
use crate::Rank;
use crate::clock::Nanos;
use crate::control::{KnownProcesses, Streams};
use crate::device::{
    Address, Armed, ConnectError, Device, DeviceConfig, DeviceInfo, Event, Flush, Holder, Incarnation,
    MapError, Meeting, PostError, RegisterError, SubmitError, Submitted, Transfer, TransferId, Urgency,
};
use crate::memory::{Memory, Space};
use crate::region::{Mapped, ReadOnlyMapped, Region, RegionKey, Registry, RemoteSlice};
use crate::shm::{self, ShmDevice};
use crate::signals::{Signal, Signals};
use crate::tcp::{self, TcpDevice};
use crate::verbs::{self, Cache, VerbsDevice, VerbsOptions};

/// The device that connects two ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PeerFabric {
    /// Shared memory: both ranks are on one host.
    Shm,
    /// Sockets or RDMA.
    Network,
}

impl PeerFabric {
    fn between(one: HostId, other: HostId) -> Self {
        if one == other { Self::Shm } else { Self::Network }
    }

    fn other(self) -> Self {
        match self {
            Self::Shm => Self::Network,
            Self::Network => Self::Shm,
        }
    }
}

/// Why the device was not made.
#[derive(pleach_derive::ErrorDebug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
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
    host: HostId,
    known: KnownProcesses,
    /// By rank; the entry of this rank has no meaning.
    peer_fabrics: Vec<PeerFabric>,
    /// Is told of them.
    responder: Arc<HybridResponder>,
    /// Ranks that are being severed on both devices: the first `Severed` is not the last one.
    severing: Vec<Rank>,
    info: DeviceInfo,
    /// Regions that both devices know, over RDMA.
    cache: Cache,
    /// The device that the next poll polls first.
    next: PeerFabric,
}

impl HybridDevice {
    /// A device on this host that uses shared memory or sockets to each process, by its host.
    /// `hosts`: those of the first ranks, as far as they are known. The hosts of others are known
    /// when they connect.
    ///
    /// # Errors
    ///
    /// See [`OpenError`].
    pub fn new(config: DeviceConfig, host: HostId, hosts: &[HostId]) -> Result<Self, OpenError> {
        Self::over(config, host, hosts, |config, known| {
            let tcp = TcpDevice::of_process(config, known)?;
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
        host: HostId,
        hosts: &[HostId],
        options: &VerbsOptions,
    ) -> Result<Self, OpenError> {
        Self::over(config, host, hosts, |config, known| {
            let verbs = VerbsDevice::of_process(config, known, options)?;
            let registry = verbs.registry();
            Ok((NetworkDevice::Verbs(Box::new(verbs)), registry))
        })
    }

    fn over(
        mut config: DeviceConfig,
        host: HostId,
        hosts: &[HostId],
        open: impl FnOnce(DeviceConfig, KnownProcesses) -> Result<(NetworkDevice, Arc<dyn Registry>), OpenError>,
    ) -> Result<Self, OpenError> {
        let (rank, world_size) = (config.rank, config.world_size);
        let mut peer_fabrics: Vec<_> = hosts.iter().map(|of| PeerFabric::between(host, *of)).collect();
        peer_fabrics.resize(world_size as usize, PeerFabric::Network);
        let known = KnownProcesses::fresh(world_size);
        let responder = Arc::new(HybridResponder::new(config.responder, &peer_fabrics));
        config.responder = Arc::<HybridResponder>::clone(&responder);
        let mut shm = ShmDevice::of_process(config.clone(), known.clone())?;
        let (mut network, registry) = open(config, known.clone())?;
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
            incarnation: known.own(),
            // A peer uses the part of its fabric.
            address: Address(format!("{host} {} {}", here.address, there.address)),
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
            host,
            known,
            peer_fabrics,
            responder,
            severing: Vec::new(),
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

    /// The fabric of the process that has the rank or had it last; the network, which refuses an
    /// invalid rank.
    fn fabric_of(&self, peer: Rank) -> PeerFabric {
        self.peer_fabrics.get(peer as usize).copied().unwrap_or(PeerFabric::Network)
    }

    fn device(&self, fabric: PeerFabric) -> &dyn Device {
        match fabric {
            PeerFabric::Shm => &self.shm,
            PeerFabric::Network => self.network.device(),
        }
    }

    fn device_mut(&mut self, fabric: PeerFabric) -> &mut dyn Device {
        match fabric {
            PeerFabric::Shm => &mut self.shm,
            PeerFabric::Network => self.network.device_mut(),
        }
    }

    fn to_mut(&mut self, peer: Rank) -> &mut dyn Device {
        self.device_mut(self.fabric_of(peer))
    }

    /// What a device knows of the process that has a rank, or had it last there.
    fn holder(&self, fabric: PeerFabric, peer: Rank) -> Holder {
        match (fabric, &self.network) {
            (PeerFabric::Shm, _) => self.shm.holder(peer),
            (PeerFabric::Network, NetworkDevice::Tcp(tcp)) => tcp.holder(peer),
            (PeerFabric::Network, NetworkDevice::Verbs(verbs)) => verbs.holder(peer),
        }
    }

    /// The fabric between this device and the one of this address, and that fabric's part of the
    /// address.
    fn part(&self, address: &Address) -> Result<(PeerFabric, Address), ConnectError> {
        let refused = || ConnectError::Address { fabric: self.info.fabric, address: address.clone() };
        let host = HostId::of(address).ok_or_else(refused)?;
        let fabric = PeerFabric::between(self.host, host);
        Ok((fabric, self.part_of(fabric, address)?))
    }

    fn part_of(&self, fabric: PeerFabric, address: &Address) -> Result<Address, ConnectError> {
        let mut parts = address.0.split(' ').skip(1);
        let part = match fabric {
            PeerFabric::Shm => parts.next(),
            PeerFabric::Network => parts.nth(1),
        };
        let refused = || ConnectError::Address { fabric: self.info.fabric, address: address.clone() };
        part.map(|part| Address(part.to_owned())).ok_or_else(refused)
    }

    /// Another process may get the rank unless an end of a former one was not polled, on either
    /// device.
    fn expect_ended(&self, peer: Rank) -> Result<(), ConnectError> {
        let ends = |fabric| self.holder(fabric, peer) == Holder::Ends;
        match self.severing.contains(&peer) || ends(PeerFabric::Shm) || ends(PeerFabric::Network) {
            true => Err(ConnectError::NotFree { peer }),
            false => Ok(()),
        }
    }

    /// Takes memory that is for a former process alone from its successor, which this fabric joins
    /// to this one.
    fn orphan(&mut self, fabric: PeerFabric, peer: Rank) {
        match (fabric, &mut self.network) {
            (PeerFabric::Shm, _) => self.shm.orphan(peer),
            (PeerFabric::Network, NetworkDevice::Tcp(tcp)) => tcp.orphan(peer),
            (PeerFabric::Network, NetworkDevice::Verbs(verbs)) => verbs.orphan(peer),
        }
    }

    /// Waits no more for a process that this fabric would join to this one.
    fn cancel(&mut self, fabric: PeerFabric, peer: Rank) {
        match (fabric, &mut self.network) {
            (PeerFabric::Shm, _) => self.shm.cancel(peer),
            (PeerFabric::Network, NetworkDevice::Tcp(tcp)) => tcp.cancel(peer),
            (PeerFabric::Network, NetworkDevice::Verbs(verbs)) => verbs.cancel(peer),
        }
    }

    /// The rank is that of processes that this fabric joins to this one.
    fn move_to(&mut self, fabric: PeerFabric, peer: Rank) {
        let Some(of_peer) = self.peer_fabrics.get_mut(peer as usize) else { return };
        *of_peer = fabric;
        self.responder.move_to(fabric, peer);
        self.info.reach[peer as usize] = self.device(fabric).info().reach[peer as usize];
    }

    /// Drops the first of two `Severed` of a rank.
    #[cold]
    fn join_fences(&mut self, events: &mut Vec<Event>, first: usize) {
        let mut at = first;
        while at < events.len() {
            let severed = match &events[at] {
                Event::Severed { peer } => self.severing.iter().position(|severing| severing == peer),
                _ => None,
            };
            match severed {
                Some(severed) => {
                    self.severing.swap_remove(severed);
                    events.remove(at);
                }
                None => at += 1,
            }
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
        let (fabric, address) = self.part(address)?;
        self.expect_ended(peer)?;
        let before = self.fabric_of(peer);
        if fabric == before {
            return self.device_mut(fabric).connect(peer, &address);
        }
        match self.holder(before, peer) {
            // Nobody has come yet: the rank is given to the one that comes next.
            Holder::Connecting => self.cancel(before, peer),
            Holder::Connected => return Ok(()),
            Holder::Nobody | Holder::Ends | Holder::Gone => {}
        }
        self.orphan(fabric, peer);
        // First: messages may be passed on to the process as soon as it is connected.
        self.move_to(fabric, peer);
        let started = self.device_mut(fabric).connect(peer, &address);
        if started.is_err() {
            self.move_to(before, peer);
        }
        started
    }

    fn meet(&mut self, peer: Rank, meeting: Meeting<'_>) -> Result<(), ConnectError> {
        self.expect_ended(peer)?;
        // Who awaits a process does not know its host. So both ends were told the host of the rank
        // when they were made.
        let Meeting::Dial { address, own } = meeting else {
            return self.to_mut(peer).meet(peer, meeting);
        };
        let address = self.part_of(self.fabric_of(peer), address)?;
        self.to_mut(peer).meet(peer, Meeting::Dial { address: &address, own })
    }

    fn incarnation(&self, peer: Rank) -> Option<Incarnation> {
        self.known.last(peer)
    }

    fn sever(&mut self, peer: Rank) {
        if self.severing.contains(&peer) {
            return;
        }
        if let NetworkDevice::Verbs(verbs) = &mut self.network {
            let taken = self.shm.taken_with(peer);
            if !taken.is_empty() {
                verbs.withdraw(&taken);
                self.cache.clear();
            }
        }
        let fabric = self.fabric_of(peer);
        if self.holder(fabric.other(), peer) != Holder::Nobody {
            self.severing.push(peer);
            self.device_mut(fabric.other()).sever(peer);
        }
        self.device_mut(fabric).sever(peer);
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
        self.device(self.fabric_of(peer)).signal_slots(peer)
    }

    fn post(&mut self, peer: Rank, message: &[u8], urgency: Urgency) -> Result<(), PostError> {
        self.to_mut(peer).post(peer, message, urgency)
    }

    fn poll(&mut self, now: Nanos, events: &mut Vec<Event>) {
        self.wake_forwarder.disarm(self.network.wake_file());
        let first = events.len();
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
        if !self.severing.is_empty() {
            self.join_fences(events, first);
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

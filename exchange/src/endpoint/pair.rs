//! The pairs of one device: an endpoint has one device of shared memory for all its links, and each
//! link has a pair of it.
//!
//! Each end of a link gives the other end a rank of its own device, once: a program that links
//! again is the same process, and line 16 of the device contract gives no rank to a process that
//! has had it. When all ranks are given the next link has another device. A device ends with its
//! last pair.
//!
//! A pair ends with its link: the listener's end severs it when that end maps nothing any more,
//! which takes no memory from anybody. The dialer's end may still read tensors in place, and learns
//! that the pair is lost.
//!
//! **Invariant:** an event reaches the pair that it is about, and no other one.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use pleach_transport::mutex::lock;
use pleach_transport::shm::{OpenError, ShmDevice};
use pleach_transport::{
    Address, ConnectError, Device, DeviceConfig, Event, LossCause, MapError, Meeting, Memory, Nanos, Rank,
    ReadOnlyMapped, Region, RegisterError, RemoteSlice, Responder, Signals, SubmitError, Submitted, Transfer,
    TransferId,
};

/// Ranks of a device with this program's own.
const RANKS: u32 = 65;

/// Events of a device that are taken at once.
const EVENTS_AT_ONCE: usize = 16;

/// Nobody sends messages by the control plane of these devices.
struct Silent;

impl Responder for Silent {
    fn message(&self, _from: Rank, _message: &[u8]) -> Option<Vec<u8>> {
        None
    }

    fn lost(&self, _peer: Rank, _cause: &LossCause) {}
}

/// A device whose ranks map each other's memory. The end of a put comes after its signal.
pub(crate) trait MappingDevice: Device {
    /// Whether the process of the peer may run and read what it has mapped.
    fn may_read(&self, peer: Rank) -> bool;

    /// Connects the other end of a link.
    fn link(&mut self, peer: Rank, meeting: Meeting<'_>) -> Result<(), ConnectError> {
        self.meet(peer, meeting)
    }
}

impl MappingDevice for ShmDevice {
    fn may_read(&self, peer: Rank) -> bool {
        self.may_map(peer)
    }
}

/// The configuration of a device of so many ranks. The kernel says that the other end of a pair is
/// of the same user, so there is no secret.
pub(crate) fn config_of(
    rank: Rank,
    ranks: u32,
    signal_slots: usize,
    connect_timeout: Duration,
) -> DeviceConfig {
    DeviceConfig {
        rank,
        world_size: ranks,
        secret: None,
        signal_slots,
        connect_timeout,
        interface: None,
        address: None,
        responder: Arc::new(Silent),
    }
}

/// A device with its pairs.
pub(crate) struct PairedDevice<D> {
    device: D,
    /// The events of each pair that it has not taken.
    events: BTreeMap<Rank, Vec<Event>>,
    polled: Vec<Event>,
}

/// Where the links of an endpoint get their pairs.
pub(crate) trait Pairs<D: MappingDevice>: Send {
    /// A pair for a new link. `dialer`: where the other end's device is, if that end dials.
    fn pair(&mut self, dialer: Option<&Address>) -> Result<DevicePair<D>, OpenError>;
}

/// The devices of an endpoint: the one in which the next link gets a pair.
pub(crate) struct PairedDevices {
    signal_slots: usize,
    connect_timeout: Duration,
    current: Option<(Arc<Mutex<PairedDevice<ShmDevice>>>, Rank)>,
}

impl PairedDevices {
    /// No device yet.
    pub(crate) fn new(signal_slots: usize, connect_timeout: Duration) -> Self {
        Self { signal_slots, connect_timeout, current: None }
    }
}

impl Pairs<ShmDevice> for PairedDevices {
    /// The device is made if there is none.
    fn pair(&mut self, _dialer: Option<&Address>) -> Result<DevicePair, OpenError> {
        let (device, rank) = match self.current.take() {
            Some(current) => current,
            None => {
                let config = config_of(0, RANKS, self.signal_slots, self.connect_timeout);
                (PairedDevice::new(ShmDevice::new(config)?), 1)
            }
        };
        if rank + 1 < RANKS {
            self.current = Some((device.clone(), rank + 1));
        }
        Ok(DevicePair::new(device, rank))
    }
}

impl<D: MappingDevice> PairedDevice<D> {
    fn new(device: D) -> Arc<Mutex<Self>> {
        let (events, polled) = (BTreeMap::new(), Vec::with_capacity(EVENTS_AT_ONCE));
        Arc::new(Mutex::new(Self { device, events, polled }))
    }

    /// Polls the device, and gives each event to its pair.
    fn poll(&mut self, now: Nanos) {
        self.device.poll(now, &mut self.polled);
        for event in self.polled.drain(..) {
            let rank = match &event {
                Event::Connected { peer }
                | Event::PeerLost { peer, .. }
                | Event::Departed { peer }
                | Event::Severed { peer }
                | Event::Drained { peer } => *peer,
                // A transfer is named by its peer.
                Event::Done { id, .. } => id.0 as Rank,
            };
            // A link that has ended has no pair any more.
            if let Some(events) = self.events.get_mut(&rank) {
                events.push(event);
            }
        }
    }
}

/// One pair of a device.
pub(crate) struct DevicePair<D: MappingDevice = ShmDevice> {
    device: Arc<Mutex<PairedDevice<D>>>,
    /// The other end.
    rank: Rank,
    /// The other end dials, and the pair is severed at its end.
    is_listener: bool,
}

impl<D: MappingDevice> DevicePair<D> {
    fn new(device: Arc<Mutex<PairedDevice<D>>>, rank: Rank) -> Self {
        lock(&device).events.insert(rank, Vec::new());
        Self { device, rank, is_listener: false }
    }

    /// The only pair of a device.
    #[cfg(test)]
    pub(crate) fn only(device: D, rank: Rank) -> Self {
        Self::new(PairedDevice::new(device), rank)
    }

    /// What keeps the device beyond the pair, as the other links of an endpoint do.
    #[cfg(test)]
    pub(crate) fn device(&self) -> Arc<Mutex<PairedDevice<D>>> {
        self.device.clone()
    }

    fn lock(&self) -> MutexGuard<'_, PairedDevice<D>> {
        lock(&self.device)
    }

    /// The rank of the other end here.
    pub(crate) fn rank(&self) -> Rank {
        self.rank
    }

    /// Where the other end's device dials.
    pub(crate) fn address(&self) -> Address {
        self.lock().device.info().address.clone()
    }

    /// Registers memory for the other end alone.
    pub(crate) fn register(&self, memory: Arc<dyn Memory>) -> Result<Region, RegisterError> {
        self.lock().device.register_for(self.rank, memory)
    }

    /// Maps memory of the other end.
    pub(crate) fn map(&self, slice: &RemoteSlice) -> Result<ReadOnlyMapped, MapError> {
        self.lock().device.map_read_only(self.rank, slice)
    }

    /// Connects the other end.
    pub(crate) fn connect(&mut self, meeting: Meeting<'_>) -> Result<(), ConnectError> {
        self.is_listener = meeting == Meeting::Await;
        self.lock().device.link(self.rank, meeting)
    }

    /// The signal slots of the other end's signals.
    pub(crate) fn signal_slots(&self) -> Signals {
        self.lock().device.signal_slots(self.rank)
    }

    /// Starts a transfer.
    pub(crate) fn submit(&self, transfer: Transfer) -> Result<Submitted, SubmitError> {
        self.lock().device.submit(self.rank, transfer, TransferId(u64::from(self.rank)))
    }

    /// Polls the device. Returns the events of this pair.
    pub(crate) fn poll(&self, now: Nanos) -> Vec<Event> {
        let mut device = self.lock();
        device.poll(now);
        device.events.get_mut(&self.rank).map(std::mem::take).unwrap_or_default()
    }

    /// Whether the process of the other end may run and read what it has mapped.
    pub(crate) fn may_read(&self) -> bool {
        self.lock().device.may_read(self.rank)
    }
}

impl<D: MappingDevice> Drop for DevicePair<D> {
    fn drop(&mut self) {
        let mut device = self.lock();
        device.events.remove(&self.rank);
        if self.is_listener {
            device.device.sever(self.rank);
        }
    }
}

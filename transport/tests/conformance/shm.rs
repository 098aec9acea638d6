//! `shm` under the suite: every rank a device of this process, with real files, sockets, watchers
//! and mappings between. Once as it is, and once with every put and get done through a mapping by
//! the caller.

use std::sync::Arc;

use pleach_transport::shm::ShmDevice;
use pleach_transport::{
    Address, Armed, ConnectError, Device, DeviceConfig, DeviceInfo, Event, Flush, Incarnation, Inline,
    MapError, Mapped, Meeting, Memory, Nanos, PostError, Rank, ReadOnlyMapped, Region, RegionKey,
    RegisterError, RemoteSlice, SharedMemory, Signal, Signals, Source, SubmitError, Submitted, Transfer,
    TransferId, Urgency, clock,
};

use crate::world::Backend;

/// Shared memory of this host; ranks find each other by address, so there is nothing to keep.
pub(crate) struct Shm<const MAPPED: bool>;

impl<const MAPPED: bool> Backend for Shm<MAPPED> {
    const NAME: &'static str = if MAPPED { "shm through mappings" } else { "shm" };
    const LIVE: bool = true;
    // Longer ones are copied by `poll`.
    const LONG_BYTES: usize = 300 << 10;

    fn start(_world_size: u32) -> Self {
        Self
    }

    fn device(&mut self, config: DeviceConfig) -> Box<dyn Device> {
        let device = ShmDevice::new(config).expect("the system gives memory and sockets");
        if MAPPED {
            Box::new(ThroughMappings { device, keys: Vec::new(), under_way: 0 })
        } else {
            Box::new(device)
        }
    }

    fn memory(&self, len: usize) -> Arc<dyn Memory> {
        SharedMemory::new(len).expect("the system gives memory")
    }

    fn tick(&mut self) -> Nanos {
        clock::now()
    }
}

/// Copies through a mapping what a transfer asks for, then submits the transfer of no bytes that is
/// left of it. What it cannot map, or what would not be accepted, it passes on whole.
struct ThroughMappings {
    device: ShmDevice,
    keys: Vec<RegionKey>,
    /// Transfers to all peers: as many as one queue takes, and the next is passed on whole, as it
    /// may be refused.
    under_way: usize,
}

impl ThroughMappings {
    /// Whether a transfer would be accepted.
    fn is_accepted(&self, peer: Rank, remote: &RemoteSlice, local: Option<&Region>, len: usize) -> bool {
        let has_room = self.under_way < self.device.info().reach[peer as usize].queue_depth;
        let is_own = local.is_none_or(|region| self.keys.contains(&region.key()));
        has_room && is_own && len as u64 == remote.len
    }

    fn copy(&mut self, peer: Rank, transfer: Transfer) -> Transfer {
        let none_of = |remote: RemoteSlice| RemoteSlice { len: 0, ..remote };
        match transfer {
            Transfer::Put { src, dst, signal }
                if signal.is_none_or(|signal| {
                    usize::from(signal.signal_slot) < self.device.info().signal_slots
                }) =>
            {
                let (region, bytes) = match &src {
                    Source::Slice(slice) => (Some(slice.region()), slice.to_vec()),
                    Source::Inline(inline) => (None, inline.as_bytes().to_vec()),
                };
                let is_accepted = self.is_accepted(peer, &dst, region, bytes.len());
                let Some(mapped) = is_accepted.then(|| self.device.map(peer, &dst).ok()).flatten() else {
                    return Transfer::Put { src, dst, signal };
                };
                mapped.store(0, &bytes);
                Transfer::Put { src: Source::Inline(Inline::EMPTY), dst: none_of(dst), signal }
            }
            Transfer::Get { src, dst } => {
                let is_accepted = self.is_accepted(peer, &src, Some(dst.region()), dst.len());
                let mapped = is_accepted.then(|| self.device.map_read_only(peer, &src).ok()).flatten();
                let Some(mapped) = mapped else { return Transfer::Get { src, dst } };
                let mut bytes = vec![0; dst.len()];
                mapped.load(0, &mut bytes);
                dst.store(&bytes);
                Transfer::Get { src: none_of(src), dst: dst.slice(0..0).expect("inside") }
            }
            other => other,
        }
    }
}

// SAFETY: the device that it wraps keeps the contract; what it does itself through mappings ends
// with `submit`.
#[allow(unsafe_code)]
unsafe impl Device for ThroughMappings {
    fn submit(&mut self, peer: Rank, transfer: Transfer, id: TransferId) -> Result<Submitted, SubmitError> {
        let transfer = self.copy(peer, transfer);
        let submitted = self.device.submit(peer, transfer, id)?;
        self.under_way += usize::from(submitted == Submitted::UnderWay);
        Ok(submitted)
    }

    fn signal(&mut self, peer: Rank, signal: &Signal, id: TransferId) -> Result<Submitted, SubmitError> {
        let submitted = self.device.signal(peer, signal, id)?;
        self.under_way += usize::from(submitted == Submitted::UnderWay);
        Ok(submitted)
    }

    fn register(&mut self, memory: Arc<dyn Memory>) -> Result<Region, RegisterError> {
        let region = self.device.register(memory)?;
        self.keys.push(region.key());
        Ok(region)
    }

    fn register_for(&mut self, peer: Rank, memory: Arc<dyn Memory>) -> Result<Region, RegisterError> {
        let region = self.device.register_for(peer, memory)?;
        self.keys.push(region.key());
        Ok(region)
    }

    fn info(&self) -> &DeviceInfo {
        self.device.info()
    }
    fn map(&mut self, peer: Rank, slice: &RemoteSlice) -> Result<Mapped, MapError> {
        self.device.map(peer, slice)
    }
    fn map_read_only(&mut self, peer: Rank, slice: &RemoteSlice) -> Result<ReadOnlyMapped, MapError> {
        self.device.map_read_only(peer, slice)
    }
    fn connect(&mut self, peer: Rank, address: &Address) -> Result<(), ConnectError> {
        self.device.connect(peer, address)
    }
    fn meet(&mut self, peer: Rank, meeting: Meeting<'_>) -> Result<(), ConnectError> {
        self.device.meet(peer, meeting)
    }
    fn incarnation(&self, peer: Rank) -> Option<Incarnation> {
        self.device.incarnation(peer)
    }
    fn sever(&mut self, peer: Rank) {
        self.device.sever(peer);
    }
    fn drain(&mut self, peer: Rank) -> Result<(), SubmitError> {
        self.device.drain(peer)
    }
    fn signal_slots(&self, peer: Rank) -> Signals {
        self.device.signal_slots(peer)
    }
    fn post(&mut self, peer: Rank, message: &[u8], urgency: Urgency) -> Result<(), PostError> {
        self.device.post(peer, message, urgency)
    }
    fn poll(&mut self, now: Nanos, events: &mut Vec<Event>) {
        let before = events.len();
        self.device.poll(now, events);
        self.under_way -= events[before..].iter().filter(|event| matches!(event, Event::Done { .. })).count();
    }
    fn arm(&mut self) -> Option<Armed> {
        self.device.arm()
    }
    fn leave(&mut self) {
        self.device.leave();
    }
    fn flush(&mut self, what: Flush) -> bool {
        self.device.flush(what)
    }
}

//! Gets: tensors that a receiver reads from their sender's memory into its own, where nothing can
//! be mapped.
//!
//! An endpoint has a device of such a fabric ([`GetDevice`]) for all its links by that fabric. Each
//! end of a link gives the other end a rank there. A message names what is lent, as on every link,
//! and a step of the set-up before it the region of the bytes. The receiver gets the bytes into
//! lendable memory of its own, which is registered already, and returns the lease.
//!
//! Where registering is free each lease has a region of its own, for its receiver alone. It is
//! deregistered when the lease is back. Where a NIC has to lock memory, the arena is registered
//! from its beginning as far as it was used. A lease is then a window of it, whose key is good for
//! its receiver alone and until the lease is back. Its receiver is told of the lease when the NIC
//! has bound the window: mostly at once, which is awaited awake for [`BIND_WATCH`], else later
//! ([`GetEvent::Named`]). The key of the region has to do, for all that know the secret, where the
//! NIC has no windows, or no more, where a pair has several queue pairs, or where its queue is
//! full; also for the fields of messages of RPCs, which are written without waiting, where the NIC
//! has not bound the window at once.
//!
//! A device gives each rank once: a program that comes back is the same process, and line 16 of the
//! device contract gives no rank to a process that has had it. When all ranks are given the next
//! link has another device, and the former device ends with its last link.
//!
//! **Invariant:** a destination is kept until the device has ended its get, whatever becomes of the
//! call and of the link. A link that ends is severed, and what was lent to it is back only when the
//! fence holds. A program that has not proved a secret reaches no bytes but those of its leases. A
//! key of a lease's own is refused when the lease is back.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use pleach_transport::tcp::TcpDevice;
use pleach_transport::verbs::{VerbsDevice, VerbsOptions};
use pleach_transport::{
    Address, Armed, ConnectError, Device, DeviceConfig, Event, LossCause, Meeting, Memory, Nanos, Rank,
    Region, RegionKey, RemoteSlice, Responder, Secret, SharedMemory, Slice, SubmitError, Submitted, Transfer,
    TransferId, clock,
};
use pleach_vocabulary::Fabric;

use super::link::WaitingReceive;
use super::memory::{ArenaPart, LendableBuffer, LendableMemory};
use super::tensor::TensorShape;
use crate::gathered::RegisteredPart;
use crate::lease::Lease;
use crate::reference::{LinkId, Reference};

/// Ranks of a device with this program's own. Queues of a NIC are as long as its ranks need.
const RANKS: u32 = 65;

/// This program's rank.
const OWN_RANK: Rank = 0;

/// How long setting up may take.
pub(crate) const SETUP_LIMIT: Duration = Duration::from_secs(5);

/// The first region of an arena where registering takes memory, in bytes. Each further one is at
/// least twice as long.
const FIRST_REGION_BYTES: usize = 16 << 20;

/// Events of a device that are taken at once.
const EVENTS_AT_ONCE: usize = 64;

/// How long the binding of a window is awaited awake. A NIC takes a few microseconds; to sleep and
/// be woken takes longer, and the receiver waits meanwhile.
const BIND_WATCH: Duration = Duration::from_micros(20);

/// What programs without a secret prove to each other on loopback, where everybody who reaches the
/// port receives tensors.
const NO_SECRET: &[u8] = b"a pleach exchange without a secret";

/// With what devices are opened.
#[derive(Clone, Debug)]
pub(crate) struct GetOptions {
    pub(crate) secret: Option<Secret>,
    pub(crate) address: IpAddr,
    pub(crate) verbs: VerbsOptions,
}

/// Nobody sends messages by the control plane of these devices.
struct Silent;

impl Responder for Silent {
    fn message(&self, _from: Rank, _message: &[u8]) -> Option<Vec<u8>> {
        None
    }

    fn lost(&self, _peer: Rank, _cause: &LossCause) {}
}

/// A get for a call of this program.
pub(crate) struct Get {
    /// The number of its link.
    pub(crate) link: u64,
    pub(crate) receive: WaitingReceive,
    pub(crate) lease: Lease,
    pub(crate) shape: TensorShape,
    /// The destination.
    pub(crate) buffer: LendableBuffer,
}

/// How a receiver is to name a lease.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum LeaseName {
    /// By this part.
    Part(RegisteredPart),
    /// [`GetEvent::Named`] will tell.
    Coming,
}

/// A device by which tensors are got.
pub(crate) trait GettingDevice: Device {
    /// The rank that the other end of a link is given; `None`: there is none. `next`: the lowest
    /// one that nobody was given.
    fn rank_of(&self, _link: LinkId, next: Rank) -> Option<Rank> {
        (next < RANKS).then_some(next)
    }

    /// Begins to connect the device of the other end of a link.
    fn link(&mut self, peer: Rank, meeting: Meeting<'_>) -> Result<(), ConnectError> {
        self.meet(peer, meeting)
    }

    /// Begins to give bytes a key that is for one peer and can be taken back; the transfer of this
    /// number ends when the key is good. `None`: the key of the region has to do, as there are no
    /// such keys, or no more, the pair has several queue pairs, or its queue is full.
    fn begin_lease(&mut self, _peer: Rank, _slice: &Slice, _id: TransferId) -> Option<RemoteSlice> {
        None
    }

    /// Whether a key that was begun is good already.
    fn has_begun(&mut self, _peer: Rank, _key: RegionKey) -> bool {
        false
    }

    /// Takes a key back.
    fn end_lease(&mut self, _peer: Rank, _key: RegionKey) {}
}

impl GettingDevice for TcpDevice {}

impl GettingDevice for VerbsDevice {
    fn begin_lease(&mut self, peer: Rank, slice: &Slice, id: TransferId) -> Option<RemoteSlice> {
        let leased = self.lease(peer, slice, id);
        leased.inspect_err(|error| tracing::debug!("a lease has no key of its own: {error}")).ok()
    }

    fn has_begun(&mut self, peer: Rank, key: RegionKey) -> bool {
        self.is_bound(peer, key)
    }

    fn end_lease(&mut self, peer: Rank, key: RegionKey) {
        self.revoke(peer, key);
    }
}

/// What has happened on a device.
pub(crate) enum GetEvent {
    /// The pair of a link is connected.
    Connected { link: u64 },
    /// The pair of a link is lost.
    Lost { link: u64, cause: String },
    /// A lease of a link can be got by this part.
    Named { link: u64, slot: u32, part: RegisteredPart },
    /// The other end of a former link reads nothing any more.
    Severed { lent_to: Option<LinkId> },
    /// The get of a call has ended.
    Ended { get: Box<Get>, result: Result<(), String> },
}

struct GetUnderWay {
    get: Box<Get>,
    /// Transfers that have not ended.
    transfers: usize,
    result: Result<(), String>,
}

/// What makes a lease readable, and ends with it.
enum LeaseKey {
    /// The region of its bytes alone.
    Region(#[expect(dead_code, reason = "deregistered by the drop")] Region),
    Window(RegionKey),
}

/// A window that the NIC binds.
struct Binding {
    rank: Rank,
    slot: u32,
    part: RegisteredPart,
}

/// For what a rank is used.
enum RankUse {
    Link(u64),
    Severing { lent_to: Option<LinkId> },
}

/// See the module.
pub(crate) struct GetDevice {
    fabric: Fabric,
    device: Box<dyn GettingDevice>,
    next_rank: Rank,
    ranks: BTreeMap<Rank, RankUse>,
    arena: Option<RegisteredArena>,
    /// The keys of leases, by rank and slot, where each has one.
    leased: BTreeMap<(Rank, u32), LeaseKey>,
    gets: BTreeMap<u64, GetUnderWay>,
    /// By the numbers of their requests, which are not those of gets.
    bindings: BTreeMap<u64, Binding>,
    /// That of the last get or binding.
    last_number: u64,
    /// Transfers for which a queue has no room, by rank: one that is stopped holds up no other.
    waiting: BTreeMap<Rank, VecDeque<(Transfer, u64)>>,
    ended: Vec<GetEvent>,
    events: Vec<Event>,
    /// Whether its wake source wakes the endpoint's thread.
    pub(crate) is_watched: bool,
}

/// The lendable memory of this program, registered.
struct RegisteredArena {
    number: u64,
    memory: Arc<SharedMemory>,
    /// Each begins where the arena does, and is longer than the one before.
    regions: Vec<Region>,
}

impl GetDevice {
    /// A device of this fabric, or why there is none.
    pub(crate) fn open(fabric: Fabric, options: &GetOptions) -> Result<Self, String> {
        let secret = options.secret.clone().unwrap_or_else(|| Secret::new(NO_SECRET));
        let config = DeviceConfig {
            rank: OWN_RANK,
            world_size: RANKS,
            secret: Some(secret),
            signal_slots: 1,
            connect_timeout: SETUP_LIMIT,
            interface: None,
            address: Some(options.address),
            responder: Arc::new(Silent),
        };
        let device: Box<dyn GettingDevice> = match fabric {
            Fabric::Tcp => Box::new(TcpDevice::new(config).map_err(|error| error.to_string())?),
            Fabric::Verbs => {
                let mut verbs = options.verbs.clone();
                let names_port = !options.address.is_loopback() && !options.address.is_unspecified();
                if verbs.interface.is_none() && verbs.device.is_none() && names_port {
                    verbs.interface = Some(options.address.to_string());
                }
                Box::new(VerbsDevice::new(config, &verbs).map_err(|error| error.to_string())?)
            }
            fabric => return Err(format!("fabric {fabric} has no gets")),
        };
        Ok(Self::over(fabric, device))
    }

    /// Over a device of this fabric.
    pub(crate) fn over(fabric: Fabric, device: Box<dyn GettingDevice>) -> Self {
        Self {
            fabric,
            device,
            next_rank: OWN_RANK + 1,
            ranks: BTreeMap::new(),
            arena: None,
            leased: BTreeMap::new(),
            gets: BTreeMap::new(),
            bindings: BTreeMap::new(),
            last_number: 0,
            waiting: BTreeMap::new(),
            ended: Vec::new(),
            events: Vec::with_capacity(EVENTS_AT_ONCE),
            is_watched: false,
        }
    }

    /// Whether no link uses the device, and no get is under way.
    pub(crate) fn is_idle(&self) -> bool {
        self.ranks.is_empty() && self.gets.is_empty()
    }

    /// Whether no link will use the device any more.
    pub(crate) fn is_over(&self) -> bool {
        self.next_rank >= RANKS && self.is_idle()
    }

    /// Gives the other end of a link by this fabric a rank, if there is one. `number`: that of the
    /// link in this program.
    pub(crate) fn take_rank(&mut self, fabric: Fabric, link: LinkId, number: u64) -> Option<Rank> {
        let rank = self.device.rank_of(link, self.next_rank).filter(|_| self.fabric == fabric)?;
        self.next_rank += 1;
        self.ranks.insert(rank, RankUse::Link(number));
        Some(rank)
    }

    /// Where the device of the other end dials. `local`: the address of this host by which the
    /// other end has reached it.
    pub(crate) fn address(&self, local: Option<SocketAddr>) -> Address {
        let address = &self.device.info().address;
        let own = address.0.rsplit_once(':').zip(local);
        match own {
            Some(((start, port), local)) if start.ends_with("0.0.0.0") || start.ends_with("[::]") => {
                let scheme = start.split_once(':').map_or("", |(scheme, _)| scheme);
                let port = port.parse().unwrap_or_default();
                Address(format!("{scheme}:{}", SocketAddr::new(local.ip().to_canonical(), port)))
            }
            _ => address.clone(),
        }
    }

    /// Begins to connect the device of the other end of a link.
    pub(crate) fn meet(&mut self, rank: Rank, meeting: Meeting<'_>) -> Result<(), String> {
        self.device.link(rank, meeting).map_err(|error| error.to_string())
    }

    /// The arena that is lent: its number and its length.
    pub(crate) fn lent_arena(&mut self, memory: &Arc<LendableMemory>) -> Result<(u64, u64), String> {
        let arena = Self::arena(&mut self.arena, memory)?;
        Ok((arena.number, arena.memory.len() as u64))
    }

    /// Makes the bytes of a lease readable for the other end of a link, by a key of their own if
    /// there is one.
    pub(crate) fn lend(
        &mut self,
        memory: &Arc<LendableMemory>,
        rank: Rank,
        reference: &Reference,
    ) -> Result<LeaseName, String> {
        let (start, slot) = (reference.slice.offset, reference.lease.slot);
        let end = start.saturating_add(reference.slice.len) as usize;
        if !self.device.info().registers_freely {
            let region = self.registered(memory, end)?;
            let slice = region.slice(start as usize..end).map_err(|error| error.to_string())?;
            let number = self.next_number();
            if let Some(leased) = self.device.begin_lease(rank, &slice, TransferId(number)) {
                self.leased.insert((rank, slot), LeaseKey::Window(leased.key));
                let part = RegisteredPart { start, slice: leased };
                let until = clock::now() + BIND_WATCH;
                while clock::now() < until {
                    if self.device.has_begun(rank, leased.key) {
                        return Ok(LeaseName::Part(part));
                    }
                    std::hint::spin_loop();
                }
                self.bindings.insert(number, Binding { rank, slot, part });
                return Ok(LeaseName::Coming);
            }
        }
        self.lend_by_region(memory, rank, reference).map(LeaseName::Part)
    }

    /// As [`GetDevice::lend`], without waiting for more than [`BIND_WATCH`]: the part in which the
    /// bytes are.
    #[cfg(any(test, feature = "grpc"))]
    pub(crate) fn lend_at_once(
        &mut self,
        memory: &Arc<LendableMemory>,
        rank: Rank,
        reference: &Reference,
    ) -> Result<RegisteredPart, String> {
        match self.lend(memory, rank, reference)? {
            LeaseName::Part(part) => Ok(part),
            LeaseName::Coming => {
                self.returned(rank, reference.lease.slot);
                self.lend_by_region(memory, rank, reference)
            }
        }
    }

    /// The part in which the bytes are: of the arena's region, or a region of their own.
    fn lend_by_region(
        &mut self,
        memory: &Arc<LendableMemory>,
        rank: Rank,
        reference: &Reference,
    ) -> Result<RegisteredPart, String> {
        let (start, len) = (reference.slice.offset, reference.slice.len);
        let end = start.saturating_add(len);
        if !self.device.info().registers_freely {
            let region = self.registered(memory, end as usize)?;
            return Ok(RegisteredPart { start: 0, slice: region.remote() });
        }
        let arena = Self::arena(&mut self.arena, memory)?;
        let part = ArenaPart::new(arena.memory.clone(), start as usize..end as usize);
        let region = self.device.register_for(rank, part).map_err(|error| error.to_string())?;
        let slice = region.remote();
        self.leased.insert((rank, reference.lease.slot), LeaseKey::Region(region));
        Ok(RegisteredPart { start, slice })
    }

    /// The lease of a slot is back.
    pub(crate) fn returned(&mut self, rank: Rank, slot: u32) {
        // A peer may return what it was not told of yet.
        self.bindings.retain(|_, binding| (binding.rank, binding.slot) != (rank, slot));
        if let Some(LeaseKey::Window(key)) = self.leased.remove(&(rank, slot)) {
            self.device.end_lease(rank, key);
        }
    }

    fn next_number(&mut self) -> u64 {
        self.last_number += 1;
        self.last_number
    }

    fn arena<'a>(
        arena: &'a mut Option<RegisteredArena>,
        memory: &Arc<LendableMemory>,
    ) -> Result<&'a mut RegisteredArena, String> {
        if arena.is_none() {
            let (number, memory) = memory.arena().map_err(|error| error.to_string())?;
            *arena = Some(RegisteredArena { number, memory, regions: Vec::new() });
        }
        arena.as_mut().ok_or_else(|| "there is no lendable memory".to_owned())
    }

    /// The region of this program's arena that holds at least the bytes before `end`.
    fn registered(&mut self, memory: &Arc<LendableMemory>, end: usize) -> Result<Region, String> {
        let is_free = self.device.info().registers_freely;
        let arena = Self::arena(&mut self.arena, memory)?;
        let before = arena.regions.last().map_or(0, Region::len);
        if let Some(region) = arena.regions.last().filter(|_| end <= before) {
            return Ok(region.clone());
        }
        let more = FIRST_REGION_BYTES.max(2 * before).max(end.next_power_of_two());
        let len = if is_free { arena.memory.len() } else { more };
        let part = ArenaPart::new(arena.memory.clone(), 0..len);
        let region = self.device.register(part).map_err(|error| error.to_string())?;
        arena.regions.push(region.clone());
        Ok(region)
    }

    /// Gets a tensor. [`GetEvent::Ended`] ends it.
    pub(crate) fn begin(
        &mut self,
        memory: &Arc<LendableMemory>,
        rank: Rank,
        src: RemoteSlice,
        get: Box<Get>,
    ) {
        let destination = self.destination(memory, &get.buffer);
        let number = self.next_number();
        let result = destination.as_ref().map(drop).map_err(Clone::clone);
        let mut transfers = 0;
        if let Ok(dst) = destination {
            let waiting = self.waiting.entry(rank).or_default();
            let most = self.device.info().transfer_bytes_max;
            let mut start = 0;
            while start < src.len {
                let end = (start + most).min(src.len);
                let part = src.slice(start..end).ok().zip(dst.slice(start as usize..end as usize).ok());
                let (src, dst) = part.expect("both are as long as the tensor");
                waiting.push_back((Transfer::Get { src, dst }, number));
                (start, transfers) = (end, transfers + 1);
            }
        }
        let under_way = GetUnderWay { get, transfers, result };
        if transfers == 0 {
            return self.end(under_way);
        }
        self.gets.insert(number, under_way);
        self.submit_waiting(rank);
    }

    /// The destination of a get: in the arena, or in memory of its own.
    fn destination(
        &mut self,
        memory: &Arc<LendableMemory>,
        buffer: &LendableBuffer,
    ) -> Result<Slice, String> {
        let range = buffer.range();
        let start = range.start as usize;
        if buffer.arena().is_none() {
            let region = self.device.register(buffer.memory()).map_err(|error| error.to_string())?;
            return region.slice(0..buffer.len()).map_err(|error| error.to_string());
        }
        let region = self.registered(memory, range.end as usize)?;
        region.slice(start..start + buffer.len()).map_err(|error| error.to_string())
    }

    /// Submits the transfers that wait for a rank, as far as its queue has room.
    fn submit_waiting(&mut self, rank: Rank) {
        while let Some((transfer, number)) = self.waiting.get_mut(&rank).and_then(VecDeque::pop_front) {
            match self.device.submit(rank, transfer.clone(), TransferId(number)) {
                Ok(Submitted::UnderWay) => {}
                Ok(Submitted::Ended(_)) => self.transfer_ended(number, Ok(())),
                Err(SubmitError::QueueFull { .. }) => {
                    return self.waiting.entry(rank).or_default().push_front((transfer, number));
                }
                Err(error) => self.transfer_ended(number, Err(error.to_string())),
            }
        }
        self.waiting.remove(&rank);
    }

    fn binding_ended(&mut self, binding: Binding, result: Result<(), String>) {
        let Binding { rank, slot, part } = binding;
        let Some(RankUse::Link(link)) = self.ranks.get(&rank) else { return };
        let link = *link;
        self.ended.push(match result {
            Ok(()) => GetEvent::Named { link, slot, part },
            Err(cause) => GetEvent::Lost { link, cause },
        });
    }

    fn transfer_ended(&mut self, number: u64, result: Result<(), String>) {
        if let Some(binding) = self.bindings.remove(&number) {
            return self.binding_ended(binding, result);
        }
        let Some(get) = self.gets.get_mut(&number) else { return };
        get.transfers -= 1;
        if get.result.is_ok() {
            get.result = result;
        }
        if get.transfers == 0
            && let Some(ended) = self.gets.remove(&number)
        {
            self.end(ended);
        }
    }

    fn end(&mut self, ended: GetUnderWay) {
        self.ended.push(GetEvent::Ended { get: ended.get, result: ended.result });
    }

    /// Lets go of the destinations of gets whose calls have ended: a violation that simulations
    /// must find.
    #[cfg(test)]
    pub(crate) fn free_destinations(&mut self, memory: &Arc<LendableMemory>) {
        for GetUnderWay { get, .. } in self.gets.values_mut().filter(|get| get.get.receive.slot.has_ended()) {
            get.buffer = memory.allocate(0).expect("takes no memory");
        }
    }

    /// The receives whose gets are under way, or have ended since the last poll, with their links.
    pub(crate) fn receives(&self) -> impl Iterator<Item = (u64, &WaitingReceive)> {
        let under_way = self.gets.values().map(|under_way| &under_way.get);
        let ended = self.ended.iter().filter_map(|event| match event {
            GetEvent::Ended { get, .. } => Some(get),
            _ => None,
        });
        under_way.chain(ended).map(|get| (get.link, &get.receive))
    }

    /// Severs the other end of a link that has ended. `lent_to`: its leases are back when the fence
    /// holds.
    pub(crate) fn sever(&mut self, rank: Rank, lent_to: Option<LinkId>) {
        self.ranks.insert(rank, RankUse::Severing { lent_to });
        // With the windows that are bound for it.
        self.device.sever(rank);
        self.leased.retain(|(of, _), _| *of != rank);
        self.bindings.retain(|_, binding| binding.rank != rank);
    }

    /// Makes progress.
    pub(crate) fn poll(&mut self, now: Nanos) -> Vec<GetEvent> {
        let mut may_have_more = true;
        while may_have_more {
            self.device.poll(now, &mut self.events);
            may_have_more = self.events.len() >= EVENTS_AT_ONCE;
            for event in std::mem::take(&mut self.events) {
                self.event(event);
            }
            self.events.reserve_exact(EVENTS_AT_ONCE);
            let ranks: Vec<Rank> = self.waiting.keys().copied().collect();
            ranks.into_iter().for_each(|rank| self.submit_waiting(rank));
        }
        std::mem::take(&mut self.ended)
    }

    fn event(&mut self, event: Event) {
        let link_of = |peer: &Rank| match self.ranks.get(peer) {
            Some(RankUse::Link(link)) => Some(*link),
            _ => None,
        };
        match event {
            Event::Connected { peer } => {
                self.ended.extend(link_of(&peer).map(|link| GetEvent::Connected { link }));
            }
            Event::PeerLost { peer, cause } => {
                let cause = cause.to_string();
                self.ended.extend(link_of(&peer).map(|link| GetEvent::Lost { link, cause }));
            }
            Event::Departed { peer } => {
                let cause = "its device was closed".to_owned();
                self.ended.extend(link_of(&peer).map(|link| GetEvent::Lost { link, cause }));
            }
            Event::Severed { peer } => {
                if let Some(RankUse::Severing { lent_to }) = self.ranks.remove(&peer) {
                    self.ended.push(GetEvent::Severed { lent_to });
                }
            }
            Event::Done { id, result } => {
                let result = result.map(drop).map_err(|error| error.to_string());
                self.transfer_ended(id.0, result);
            }
            // Nobody drains a link.
            Event::Drained { .. } => {}
        }
    }

    /// Arms the device's wake source; `None`: poll again.
    pub(crate) fn arm(&mut self) -> Option<Armed> {
        if self.ended.is_empty() { self.device.arm() } else { None }
    }
}

/// Whether this host has RDMA devices at all.
pub(crate) fn has_rdma_devices() -> io::Result<bool> {
    Ok(std::fs::read_dir(pleach_transport::verbs::port::SYSFS)?.next().is_some())
}

#[cfg(test)]
mod tests {
    use pleach_transport::HostMemory;
    use pleach_transport::sim::{Network, Options, World};
    use pleach_vocabulary::DataType;

    use super::*;
    use crate::arena::ArenaLimits;
    use crate::endpoint::returns::Returns;
    use crate::endpoint::simulated::GetPlan;
    use crate::endpoint::slot::Slot;
    use crate::key::Key;
    use crate::lease::LeaseHolder;
    use crate::reference::LeaseNumber;

    const LEN: usize = 4096;

    fn poll(devices: &mut [GetDevice; 2]) -> Vec<GetEvent> {
        devices.iter_mut().flat_map(|device| device.poll(clock::now())).collect()
    }

    /// Polls both until `holds` finds something in their events.
    fn until<T>(devices: &mut [GetDevice; 2], mut holds: impl FnMut(GetEvent) -> Option<T>) -> T {
        let limit = clock::now() + Duration::from_secs(60);
        loop {
            assert!(clock::now() < limit, "it takes too long");
            if let Some(found) = poll(devices).into_iter().find_map(&mut holds) {
                return found;
            }
        }
    }

    /// The result of a get by the first device.
    fn get(device: &mut GetDevice, peer: Rank, src: RemoteSlice, dst: &Slice) -> bool {
        let transfer = Transfer::Get { src, dst: dst.clone() };
        let id = TransferId(u64::MAX);
        device.device.submit(peer, transfer, id).expect("there is room");
        let (limit, mut events) = (clock::now() + Duration::from_secs(60), Vec::with_capacity(64));
        loop {
            assert!(clock::now() < limit, "it takes too long");
            device.device.poll(clock::now(), &mut events);
            let done = events.iter().find_map(|event| match event {
                Event::Done { id: of, result } if *of == id => Some(result.is_ok()),
                _ => None,
            });
            if let Some(is_good) = done {
                return is_good;
            }
        }
    }

    #[test]
    #[ignore = "needs RDMA devices: where there are some, run it with --ignored"]
    fn a_nic_refuses_a_get_by_the_key_of_a_lease_that_is_back() {
        let (secret, verbs) = (Some(Secret::new(b"known to both ends")), VerbsOptions::default());
        let options = GetOptions { secret, address: IpAddr::from([127, 0, 0, 1]), verbs };
        let open = || GetDevice::open(Fabric::Verbs, &options).expect("a NIC that is up");
        let mut devices = [open(), open()];
        let take_rank = |device: &mut GetDevice| device.take_rank(Fabric::Verbs, LinkId(1), 1);
        let [peer, rank] = [0, 1].map(|end| take_rank(&mut devices[end]).expect("is the first"));
        let address = devices[1].address(None);
        devices[1].meet(rank, Meeting::Await).expect("starts");
        devices[0].meet(peer, Meeting::Dial { address: &address, own: rank }).expect("starts");
        let mut missing = 2;
        until(&mut devices, |event| {
            missing -= usize::from(matches!(event, GetEvent::Connected { .. }));
            (missing == 0).then_some(())
        });

        let memory = LendableMemory::new(ArenaLimits::default());
        let mut buffer = memory.allocate(LEN).expect("there is memory");
        buffer.as_bytes_mut().fill(1);
        let arena = RegionKey(buffer.arena().expect("lies in the arena").number());
        let slice = RemoteSlice { key: arena, offset: buffer.range().start, len: LEN as u64 };
        let lease = |slot| Reference { link: LinkId(1), lease: LeaseNumber { slot, generation: 1 }, slice };
        // It returns what it was not told of: nobody is told then.
        devices[1].lend(&memory, rank, &lease(0)).expect("rxe has windows");
        devices[1].returned(rank, 0);
        let part = match devices[1].lend(&memory, rank, &lease(1)).expect("rxe has windows") {
            LeaseName::Part(part) => part,
            LeaseName::Coming => until(&mut devices, |event| match event {
                GetEvent::Named { link: 1, slot: 1, part } => Some(part),
                GetEvent::Named { slot, .. } => panic!("nobody waits for slot {slot}"),
                _ => None,
            }),
        };
        let whole = devices[1].lend_by_region(&memory, rank, &lease(2)).expect("is registered");
        assert_ne!(part.slice.key, whole.slice.key, "the key of the arena stays a secret");
        // A field of a message: by a window that is bound at once, or by the region.
        let field = devices[1].lend_at_once(&memory, rank, &lease(3)).expect("is registered");
        let has_window = devices[1].leased.contains_key(&(rank, 3));
        assert_eq!(field.slice.key != whole.slice.key, has_window);

        let own = devices[0].device.register(HostMemory::new(LEN)).expect("registers").whole();
        let src = part.of(slice).expect("is in the part");
        assert!(get(&mut devices[0], peer, src, &own));
        assert_eq!(own.to_vec(), [1; LEN]);
        devices[1].returned(rank, 1);
        buffer.as_bytes_mut().fill(2);
        assert!(!get(&mut devices[0], peer, src, &own), "the lease is back");
        assert_eq!(own.to_vec(), [1; LEN], "and nothing was read");
    }

    /// A lease of a peer, and where its bytes are registered.
    struct LentBytes {
        reference: Reference,
        part: RegisteredPart,
        _buffer: LendableBuffer,
    }

    fn lend(device: &mut GetDevice, rank: Rank, link: LinkId, value: u8) -> LentBytes {
        let memory = LendableMemory::new(ArenaLimits::default());
        let mut buffer = memory.allocate(LEN).expect("there is memory");
        buffer.as_bytes_mut().fill(value);
        let key = RegionKey(buffer.arena().expect("lies in the arena").number());
        let slice = RemoteSlice { key, offset: buffer.range().start, len: LEN as u64 };
        let reference = Reference { link, lease: LeaseNumber { slot: 0, generation: 1 }, slice };
        let part = device.lend_at_once(&memory, rank, &reference).expect("is registered");
        LentBytes { reference, part, _buffer: buffer }
    }

    fn begin(device: &mut GetDevice, memory: &Arc<LendableMemory>, peer: Rank, lent: &LentBytes) {
        let Reference { link, slice, .. } = lent.reference;
        let mut holder = LeaseHolder::new(link, 1, Arc::new(Returns::new(1)));
        holder.add_region(slice.key, 1 << 40).expect("is the first");
        let lease = holder.accept(&lent.reference).expect("is good");
        let key = Key::new(1, "w").expect("a good name");
        let (slot, since, deadline) = (Arc::new(Slot::new()), Nanos::ZERO, Nanos(u64::MAX));
        let receive = WaitingReceive { key, slot, since, deadline, is_field: false };
        let shape = TensorShape::new(DataType::U8, &[LEN]).expect("is small");
        let buffer = memory.allocate(LEN).expect("there is memory");
        let get = Get { link: link.0, receive, lease, shape, buffer };
        device.begin(memory, peer, lent.part.of(slice).expect("is in the part"), Box::new(get));
    }

    #[test]
    fn a_peer_that_is_stopped_and_has_a_full_queue_keeps_up_no_get_from_another() {
        let network = Network::star(4, 1_000_000_000, Duration::from_micros(2));
        let world = World::new(Options { queue_depth: 1, ..Options::new(network, 1) });
        let mut plan = GetPlan::new(world.clone(), 4);
        let links = [LinkId(1), LinkId(2)];
        let (mut devices, mut ends) = (Vec::new(), Vec::new());
        for (link, peer) in links.into_iter().zip([1, 2]) {
            let ([own, other], opened) = plan.link(link, [0, peer]).expect("there are ranks");
            devices.extend(opened.into_iter().map(|(_, device)| device));
            for (device, rank) in [(0, other), (peer, own)] {
                let taken = devices[device].take_rank(Fabric::Tcp, link, link.0);
                assert_eq!(taken, Some(rank));
                devices[device].meet(rank, Meeting::Await).expect("starts");
            }
            ends.push([other, own]);
        }
        let polls = |devices: &mut [GetDevice], which: &[usize]| {
            let mut events = Vec::new();
            loop {
                which.iter().for_each(|device| events.extend(devices[*device].poll(world.now())));
                if !world.advance(None) {
                    return events;
                }
            }
        };
        let connected = polls(&mut devices, &[0, 1, 2]);
        assert_eq!(connected.iter().filter(|event| matches!(event, GetEvent::Connected { .. })).count(), 4);

        let stopped = lend(&mut devices[1], ends[0][1], links[0], 1);
        let other = lend(&mut devices[2], ends[1][1], links[1], 2);
        let memory = LendableMemory::new(ArenaLimits::default());
        for (end, lent) in [(0, &stopped), (0, &stopped), (1, &other)] {
            begin(&mut devices[0], &memory, ends[end][0], lent);
        }
        let ended = |events: &[GetEvent]| -> Vec<u8> {
            let ended = events.iter().filter_map(|event| match event {
                GetEvent::Ended { get, result: Ok(()) } => Some(get.buffer.as_bytes()[LEN - 1]),
                _ => None,
            });
            ended.collect()
        };
        assert_eq!(ended(&polls(&mut devices, &[0, 2])), [2]);
        assert_eq!(ended(&polls(&mut devices, &[0, 1])), [1, 1], "when it goes on");
    }
}

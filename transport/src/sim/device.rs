//! One rank's end of a simulated fabric.

use std::sync::Arc;
use std::time::Duration;

use super::alias::Alias;
use super::{RankMapping, SimEvent, State, WakeWord};
use crate::Rank;
use crate::clock::Nanos;
use crate::device::{
    Address, Armed, ConnectError, Device, DeviceConfig, DeviceInfo, Event, Flush, Incarnation, LossCause,
    MapError, Meeting, PostError, Reach, RegisterError, SubmitError, Submitted, Transfer, TransferId,
    Urgency, WakeSource, check_only,
};
use crate::memory::{Memory, Share};
use crate::region::{Mapped, ReadOnlyMapped, Region, RegionKey, Registry, RemoteSlice};
use crate::signals::{Signal, Signals};
use crate::sim::observer::Record;
use crate::sim::regions::RegionTable;
use crate::sim::transfers::ActiveTransfer;
use crate::sim::world::World;

/// The name of this fabric.
const FABRIC: &str = "sim";

/// A rank's device, made by [`World::device`]. Dropping it ends the rank's process: without
/// [`Device::leave`], or before [`Flush::All`], the others lose it.
pub struct SimDevice {
    world: World,
    rank: Rank,
    connect_timeout: Duration,
    info: DeviceInfo,
    table: Arc<RegionTable>,
    registry: Arc<dyn Registry>,
    wake_source: Arc<WakeWord>,
}

impl std::fmt::Debug for SimDevice {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "SimDevice(rank {})", self.rank)
    }
}

impl SimDevice {
    pub(super) fn new(world: World, config: DeviceConfig) -> Self {
        let DeviceConfig { rank, world_size, signal_slots, connect_timeout, responder, .. } = config;
        let (info, table, wake_source) = world.with(|state| {
            assert_eq!(state.ranks.len(), world_size as usize, "the network has as many ranks as the world");
            assert!(rank < world_size, "rank {rank} of {world_size}");
            let rank_state = &mut state.ranks[rank as usize];
            assert!(!rank_state.made || rank_state.dead, "rank {rank} has a device");
            if rank_state.made {
                state.replace(rank);
            }
            let incarnation = Incarnation(state.incarnations.bits());
            let rank_state = &mut state.ranks[rank as usize];
            (rank_state.made, rank_state.incarnation) = (true, Some(incarnation));
            rank_state.signal_slots = signal_slots;
            rank_state.responder = Some(responder);
            let (table, wake_source) = (rank_state.table.clone(), rank_state.wake_source.clone());
            let setup = Arc::clone(&rank_state.setup);
            let reach = (0..world_size).map(|peer| Reach {
                fabric: FABRIC,
                maps: state.maps(rank, peer),
                passive: state.is_passive(rank, peer),
                queue_depth: state.queue_depth,
            });
            let info = DeviceInfo {
                rank,
                incarnation,
                address: Address(format!("{FABRIC}:{rank}")),
                fabric: FABRIC,
                registers_freely: !state.maps,
                signal_slots,
                transfer_bytes_max: state.transfer_bytes_max,
                reach: reach.collect(),
                waker: wake_source.clone(),
                setup,
            };
            (info, table, wake_source)
        });
        let registry: Arc<dyn Registry> = table.clone();
        Self { world, rank, connect_timeout, info, table, registry, wake_source }
    }

    /// The device's world.
    #[must_use]
    pub fn world(&self) -> &World {
        &self.world
    }

    /// Whether the device has died and another one has the rank.
    fn is_replaced(&self, state: &State) -> bool {
        state.ranks[self.rank as usize].incarnation != Some(self.info.incarnation)
    }

    fn expect_connected(&self, state: &mut State, peer: Rank) -> Result<(), SubmitError> {
        if self.is_replaced(state) {
            return Err(SubmitError::NotConnected { peer });
        }
        if peer as usize >= state.ranks.len() || peer == self.rank {
            return Err(SubmitError::NotConnected { peer });
        }
        state.may_submit(self.rank, peer)
    }

    /// Whether one more transfer may be under way, and the peer has the signal slot.
    fn expect_room(&self, state: &mut State, peer: Rank, signal: Option<&Signal>) -> Result<(), SubmitError> {
        let signal_slots = state.ranks[peer as usize].signal_slots;
        if let Some(signal) = signal.filter(|signal| usize::from(signal.signal_slot) >= signal_slots) {
            return Err(SubmitError::NoSuchSignalSlot { signal_slot: signal.signal_slot, signal_slots });
        }
        if !state.has_room(self.rank, peer) {
            return Err(SubmitError::QueueFull { peer });
        }
        Ok(())
    }

    /// Registers memory, for one peer or for all.
    fn register_only(
        &mut self,
        memory: Arc<dyn Memory>,
        only: Option<Rank>,
    ) -> Result<Region, RegisterError> {
        // As on shared memory, memory must be mappable by the others.
        let is_shareable = matches!(memory.share(), Share::File { .. });
        let rank = self.rank;
        let key = self.world.with(|state| {
            if state.maps && !is_shareable {
                return None;
            }
            let key = RegionKey(state.keys.bits().max(1));
            let wait = state.random_delay();
            state.event("register", &[u64::from(rank), memory.len() as u64]);
            if state.maps && !self.is_replaced(state) {
                state.after(wait, SimEvent::Announce(rank));
                state.hold_messages_back(rank, state.now + wait);
            }
            // Nobody owns a dead rank's memory.
            if !state.ranks[rank as usize].dead && !self.is_replaced(state) {
                self.table.insert(memory.clone(), key, only, state.now + wait);
            }
            Some(key)
        });
        let key = key.ok_or(RegisterError::NotShareable { fabric: FABRIC })?;
        self.info.setup.count_registered();
        Ok(Region::new(memory, key, self.registry.clone()))
    }

    /// A peer's region, and this rank's mapping of it.
    fn alias(&self, peer: Rank, slice: &RemoteSlice) -> Result<(Region, Arc<Alias>), MapError> {
        let rank = self.rank;
        self.world.with(|state| {
            if self.is_replaced(state) {
                return Err(MapError::Disconnected { peer });
            }
            if !state.maps(rank, peer) {
                return Err(MapError::Unsupported { fabric: FABRIC });
            }
            if peer as usize >= state.ranks.len() || !state.is_connected(rank, peer) {
                return Err(MapError::Disconnected { peer });
            }
            let unknown = MapError::Unknown { peer, key: slice.key };
            let Some(region) = state.ranks[peer as usize].table.announced(slice.key, rank, state.now) else {
                return Err(unknown);
            };
            let known =
                state.mappings.get(&(rank, peer, slice.key)).and_then(|mapping| mapping.alias.upgrade());
            let alias = match known {
                Some(alias) => alias,
                None => {
                    let Ok(alias) = Alias::of(region.memory().clone()) else { return Err(unknown) };
                    if state.is_cut(rank, peer) {
                        // The owner is out of reach, but this rank does not know yet: its new
                        // mapping does not reach the owner.
                        alias.cut().expect("the host has memory for a copy of a mapping");
                    } else {
                        let owner_base = region.base().as_ptr() as usize;
                        let mapping = RankMapping { alias: Arc::downgrade(&alias), owner_base };
                        state.mappings.insert((rank, peer, slice.key), mapping);
                    }
                    alias
                }
            };
            state.event("map", &[u64::from(rank), u64::from(peer), slice.offset, slice.len]);
            Ok((region, alias))
        })
    }

    fn poll_once(&self, state: &mut State, events: &mut Vec<Event>) {
        let rank = self.rank;
        if self.is_replaced(state) || state.ranks[rank as usize].dead || state.is_frozen(rank) {
            return;
        }
        state.process_inbox(rank);
        while events.len() < events.capacity() {
            let Some(ready) = state.ranks[rank as usize].ready.pop_front() else { return };
            if let Some((peer, number)) = ready.transfer {
                state.done_polled(rank, peer);
                let succeeded = matches!(ready.event, Event::Done { result: Ok(_), .. });
                state.event("done", &[number.0, u64::from(succeeded)]);
                state.note(|| Record::Completed { rank, transfer: number, succeeded });
            }
            match ready.event {
                Event::PeerLost { peer, .. } => state.note(|| Record::Lost { rank, peer }),
                Event::Drained { peer } => state.note(|| Record::Drained { rank, peer }),
                _ => {}
            }
            events.push(ready.event);
        }
    }
}

// SAFETY: the conformance suite tests each line of the contract, which only a
// [`Mutant`](super::Mutant) breaks, in bytes that slices keep alive.
#[allow(unsafe_code)]
unsafe impl Device for SimDevice {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn register(&mut self, memory: Arc<dyn Memory>) -> Result<Region, RegisterError> {
        self.register_only(memory, None)
    }

    fn register_for(&mut self, peer: Rank, memory: Arc<dyn Memory>) -> Result<Region, RegisterError> {
        check_only(Some(peer), self.rank, self.world.with(|state| state.ranks.len() as u32))?;
        self.register_only(memory, Some(peer))
    }

    fn map(&mut self, peer: Rank, slice: &RemoteSlice) -> Result<Mapped, MapError> {
        let (region, alias) = self.alias(peer, slice)?;
        if !region.memory().peers_may_write() {
            return Err(MapError::ReadOnly { peer, key: slice.key });
        }
        alias.part(slice).map_err(|source| MapError::OutOfBounds { peer, source })
    }

    fn map_read_only(&mut self, peer: Rank, slice: &RemoteSlice) -> Result<ReadOnlyMapped, MapError> {
        let (_, alias) = self.alias(peer, slice)?;
        alias.read_only_part(slice).map_err(|source| MapError::OutOfBounds { peer, source })
    }

    fn connect(&mut self, peer: Rank, address: &Address) -> Result<(), ConnectError> {
        let (rank, limit) = (self.rank, self.connect_timeout);
        let named = address.0.strip_prefix("sim:").and_then(|text| text.parse::<Rank>().ok());
        self.world.with(|state| {
            let world_size = state.ranks.len() as u32;
            if peer >= world_size || peer == rank {
                return Err(ConnectError::Peer { peer, own: rank, world_size });
            }
            if named != Some(peer) {
                return Err(ConnectError::Address { fabric: FABRIC, address: address.clone() });
            }
            if self.is_replaced(state) {
                return Ok(());
            }
            state.connect(rank, peer, limit)
        })
    }

    fn meet(&mut self, _peer: Rank, _meeting: Meeting<'_>) -> Result<(), ConnectError> {
        Err(ConnectError::OtherWorld { fabric: FABRIC })
    }

    fn incarnation(&self, peer: Rank) -> Option<Incarnation> {
        self.world.with(|state| {
            let is_peer = (peer as usize) < state.ranks.len() && !self.is_replaced(state);
            is_peer.then(|| state.last_incarnation(self.rank, peer)).flatten()
        })
    }

    fn sever(&mut self, peer: Rank) {
        let rank = self.rank;
        self.world.with(|state| {
            if (peer as usize) < state.ranks.len() && peer != rank && !self.is_replaced(state) {
                state.sever(rank, peer);
            }
        });
    }

    fn submit(&mut self, peer: Rank, transfer: Transfer, id: TransferId) -> Result<Submitted, SubmitError> {
        self.world.with(|state| {
            self.expect_connected(state, peer)?;
            transfer.check(&self.registry, self.info.transfer_bytes_max)?;
            let signal = if let Transfer::Put { signal, .. } = &transfer { signal.as_ref() } else { None };
            self.expect_room(state, peer, signal)?;
            state.start_transfer(ActiveTransfer::new(self.rank, peer, id, transfer));
            Ok(Submitted::UnderWay)
        })
    }

    fn signal(&mut self, peer: Rank, signal: &Signal, id: TransferId) -> Result<Submitted, SubmitError> {
        self.world.with(|state| {
            self.expect_connected(state, peer)?;
            self.expect_room(state, peer, Some(signal))?;
            // A signal without data holds nothing of the submitter, so some end in submit, as on
            // real fabrics.
            let ends_now = state.choices.coin();
            state.start_transfer(ActiveTransfer::of_signal(self.rank, peer, id, *signal, ends_now));
            Ok(if ends_now { Submitted::Ended(0) } else { Submitted::UnderWay })
        })
    }

    fn drain(&mut self, peer: Rank) -> Result<(), SubmitError> {
        self.world.with(|state| {
            self.expect_connected(state, peer)?;
            state.drain(self.rank, peer)
        })
    }

    fn signal_slots(&self, peer: Rank) -> Signals {
        self.world.with(|state| state.signal_slots(self.rank, peer))
    }

    fn post(&mut self, peer: Rank, message: &[u8], urgency: Urgency) -> Result<(), PostError> {
        let is_urgent = urgency == Urgency::Urgent;
        self.world.with(|state| {
            if self.is_replaced(state) {
                return Err(PostError::NotConnected { peer });
            }
            state.post(self.rank, peer, message.to_vec(), is_urgent)
        })
    }

    /// `now` is the world's own; the argument has no effect.
    fn poll(&mut self, _now: Nanos, events: &mut Vec<Event>) {
        self.world.with(|state| self.poll_once(state, events));
    }

    /// Without a deadline: [`World::advance`] knows the next event.
    fn arm(&mut self) -> Option<Armed> {
        // The count is read first, so that a wake after the check wakes the sleeper.
        let seen = self.wake_source.arm();
        let idle = self.world.with(|state| {
            let rank = &state.ranks[self.rank as usize];
            rank.ready.is_empty() && rank.inbox.is_empty()
        });
        idle.then(|| Armed {
            wake_source: WakeSource::Word { word: self.wake_source.clone(), seen },
            until: None,
        })
    }

    fn leave(&mut self) {
        self.world.with(|state| {
            if !self.is_replaced(state) {
                state.leave(self.rank);
            }
        });
    }

    /// The world carries out all transfers.
    fn flush(&mut self, what: Flush) -> bool {
        what == Flush::Transfers
            || self.world.with(|state| self.is_replaced(state) || state.is_flushed(self.rank))
    }
}

impl Drop for SimDevice {
    fn drop(&mut self) {
        let rank = self.rank;
        // The responder is dropped here, outside of the lock, because it may hold anything.
        let _responder = self.world.with(|state| {
            if self.is_replaced(state) {
                return None;
            }
            state.die(rank, LossCause::ConnectionClosed);
            state.ranks[rank as usize].responder.take()
        });
    }
}

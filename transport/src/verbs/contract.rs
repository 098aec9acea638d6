//! The device contract over RDMA.

use std::sync::{Arc, OnceLock};

use super::connecting::Connecting;
use super::pair::Pair;
use super::registered::RegisteredMemory;
use super::wire::{NICS_MAX, RemoteRegions};
use super::{CONTROL_POLLS, EVENTS_MAX, FABRIC, Peer, VerbsDevice};
use crate::Rank;
use crate::clock::{self, Nanos};
use crate::control::PairKind;
use crate::device::{
    Address, Armed, ConnectError, Device, DeviceInfo, Event, Flush, Holder, Incarnation, MapError, Meeting,
    PostError, RegisterError, Source, SubmitError, Submitted, Transfer, TransferError, TransferId, Urgency,
    WakeSource, awaits_end, check_only,
};
use crate::memory::Memory;
use crate::region::{Mapped, ReadOnlyMapped, Region, RemoteSlice};
use crate::signals::{Signal, Signals};

// SAFETY: the conformance suite tests each line of the contract.
#[allow(unsafe_code)]
unsafe impl Device for VerbsDevice {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn register(&mut self, memory: Arc<dyn Memory>) -> Result<Region, RegisterError> {
        if let Some(region) = self.cache.find(&*memory) {
            return Ok(region);
        }
        let key = self.list(&memory, None, None)?;
        self.info.setup.count_registered();
        let region = Region::new(memory, key, Arc::clone(&self.registry));
        self.cache.add(&region);
        Ok(region)
    }

    fn register_for(&mut self, peer: Rank, memory: Arc<dyn Memory>) -> Result<Region, RegisterError> {
        check_only(Some(peer), self.info.rank, self.control.world_size())?;
        // The NIC does not tell peers apart, so others are kept away by not knowing the key. Not in
        // the cache, whose regions are for all.
        let key = self.list(&memory, None, Some(peer))?;
        self.info.setup.count_registered();
        Ok(Region::new(memory, key, Arc::clone(&self.registry)))
    }

    fn map(&mut self, _peer: Rank, _slice: &RemoteSlice) -> Result<Mapped, MapError> {
        Err(MapError::Unsupported { fabric: FABRIC })
    }

    fn map_read_only(&mut self, _peer: Rank, _slice: &RemoteSlice) -> Result<ReadOnlyMapped, MapError> {
        Err(MapError::Unsupported { fabric: FABRIC })
    }

    fn connect(&mut self, peer: Rank, address: &Address) -> Result<(), ConnectError> {
        self.start_connecting(peer, PairKind::InWorld(address))
    }

    fn meet(&mut self, peer: Rank, meeting: Meeting<'_>) -> Result<(), ConnectError> {
        if self.connection_manager.is_some() {
            // Its requests name ranks of one world.
            return Err(ConnectError::OtherWorld { fabric: "verbs by rdma_cm" });
        }
        self.start_connecting(peer, PairKind::BetweenWorlds(meeting))
    }

    fn incarnation(&self, peer: Rank) -> Option<Incarnation> {
        self.incarnations.get(peer as usize).copied().flatten()
    }

    fn sever(&mut self, peer: Rank) {
        self.untold.retain(|untold| *untold != peer);
        self.end(peer, Peer::Severed, &TransferError::Severed { peer });
        self.control.sever(peer);
        self.event_queue.push_back(Event::Severed { peer });
    }

    fn submit(&mut self, peer: Rank, transfer: Transfer, id: TransferId) -> Result<Submitted, SubmitError> {
        let Some(Peer::Open(pair)) = self.peers.get_mut(peer as usize) else {
            return Err(self.not_open(peer));
        };
        if self.is_leaving {
            return Err(SubmitError::Departed { peer });
        }
        transfer.check(&self.registry, self.info.transfer_bytes_max)?;
        if self.event_queue.len() >= EVENTS_MAX {
            return Err(SubmitError::QueueFull { peer });
        }
        let keys = match &transfer {
            Transfer::Put { src: Source::Slice(slice), .. } | Transfer::Get { dst: slice, .. } => {
                // A withdrawn region no longer belongs to this device.
                let registered = self.regions.get(&slice.region().key());
                registered.map(RegisteredMemory::local_keys).ok_or(SubmitError::ForeignRegion)?
            }
            _ => [0; NICS_MAX],
        };
        let remote_regions = &self.remote_regions[peer as usize];
        let submitted = pair.submit(&transfer, id, keys, remote_regions, &mut self.event_queue)?;
        if is_due(pair, &mut self.due) {
            self.post_or_list(peer);
        }
        Ok(submitted)
    }

    fn signal(&mut self, peer: Rank, signal: &Signal, _id: TransferId) -> Result<Submitted, SubmitError> {
        let Some(Peer::Open(pair)) = self.peers.get_mut(peer as usize) else {
            return Err(self.not_open(peer));
        };
        if self.is_leaving {
            return Err(SubmitError::Departed { peer });
        }
        if self.event_queue.len() >= EVENTS_MAX {
            return Err(SubmitError::QueueFull { peer });
        }
        let submitted = pair.signal(signal)?;
        if is_due(pair, &mut self.due) {
            self.post_or_list(peer);
        }
        Ok(submitted)
    }

    fn drain(&mut self, peer: Rank) -> Result<(), SubmitError> {
        let Some(Peer::Open(pair)) = self.peers.get_mut(peer as usize) else {
            return Err(self.not_open(peer));
        };
        if self.is_leaving {
            return Err(SubmitError::Departed { peer });
        }
        pair.drain()?;
        if !self.draining.contains(&peer) {
            self.draining.push(peer);
        }
        self.advance_drains();
        Ok(())
    }

    fn signal_slots(&self, peer: Rank) -> Signals {
        self.signal_slots[peer as usize].get_or_init(|| Signals::new(self.info.signal_slots)).clone()
    }

    fn post(&mut self, peer: Rank, message: &[u8], urgency: Urgency) -> Result<(), PostError> {
        self.post_message(peer, message, urgency == Urgency::Urgent)
    }

    fn poll(&mut self, now: Nanos, events: &mut Vec<Event>) {
        self.post_all();
        if self.is_armed {
            self.disarm();
        }
        self.unfinished = self.take_completions();
        self.control_polls += 1;
        let is_due = now >= self.control_due_at
            || self.control_polls >= CONTROL_POLLS
            || self.control.wake_source().is_set()
            || self.control.has_events();
        if is_due {
            self.poll_slow_path(now);
        }
        if self.releases.has_any() {
            self.forget_released();
        }
        if !self.draining.is_empty() {
            self.advance_drains();
        }
        if self.is_leaving && !self.has_left {
            self.finish_leaving();
        }
        self.post_all();
        if !self.event_queue.is_empty() {
            self.deliver(events);
        }
    }

    fn arm(&mut self) -> Option<Armed> {
        self.post_all();
        if self.unfinished || self.releases.has_any() || !self.event_queue.is_empty() {
            return None;
        }
        self.control_polls = CONTROL_POLLS;
        let is_woken = self.control.wake_source().drain() || self.control.has_events();
        self.is_armed = true;
        for nic in &mut self.nics {
            nic.completions.ack_events();
            nic.completions.arm().ok()?;
        }
        // A completion before the arming causes no event.
        self.unfinished = self.take_completions();
        if !self.draining.is_empty() {
            self.advance_drains();
        }
        if is_woken || self.unfinished || !self.event_queue.is_empty() {
            return None;
        }
        // Completions may have made room, or have made credits due.
        self.post_all();
        let connecting = self.peers.iter().filter_map(|peer| match peer {
            Peer::Connecting(connecting) => Some(connecting.deadline()),
            _ => None,
        });
        Some(Armed { wake_source: WakeSource::File(Arc::clone(&self.epoll)), until: connecting.min() })
    }

    fn leave(&mut self) {
        self.is_leaving = true;
        self.finish_leaving();
    }

    fn flush(&mut self, scope: Flush) -> bool {
        // The NIC sends posted requests by itself.
        self.post_all();
        if scope == Flush::Transfers || !self.due.is_empty() {
            return self.due.is_empty();
        }
        let is_sent = self.peers.iter().all(|peer| match peer {
            Peer::Open(pair) => pair.is_idle(),
            _ => true,
        });
        let mut ranks = 0..self.control.world_size();
        let is_said = ranks.all(|rank| !self.control.has_output(rank));
        is_sent && is_said && (!self.is_leaving || self.has_left)
    }
}

impl VerbsDevice {
    /// What is known of the process that has a rank, or had it last.
    pub(crate) fn holder(&self, peer: Rank) -> Holder {
        match self.peers.get(peer as usize) {
            None | Some(Peer::Idle) => Holder::Nobody,
            Some(Peer::Connecting(_)) => Holder::Connecting,
            Some(Peer::Open(_)) => Holder::Connected,
            _ if self.untold.contains(&peer) || awaits_end(self.event_queue.iter(), peer) => Holder::Ends,
            Some(Peer::Lost(_) | Peer::Departed | Peer::Severed) => Holder::Gone,
        }
    }

    /// Announces memory that is for this peer alone no more: another process gets its rank.
    pub(crate) fn orphan(&mut self, peer: Rank) {
        self.regions.values_mut().for_each(|registered| registered.orphan(peer));
    }

    /// Waits no more for a process that was to be connected: the one that comes is of this host.
    pub(crate) fn cancel(&mut self, peer: Rank) {
        if self.holder(peer) == Holder::Connecting {
            self.end(peer, Peer::Severed, &TransferError::Severed { peer });
            self.control.sever(peer);
        }
    }

    /// As [`Device::connect`], in either way.
    fn start_connecting(&mut self, peer: Rank, kind: PairKind<'_>) -> Result<(), ConnectError> {
        self.control.check(peer, kind)?;
        let is_again = self.holder(peer).is_succeeded(peer)?;
        self.control.connect(peer, kind, is_again)?;
        if is_again {
            self.was_replaced = true;
            self.orphan(peer);
            self.peers[peer as usize] = Peer::Idle;
            self.signal_slots[peer as usize] = OnceLock::new();
            self.remote_regions[peer as usize] = RemoteRegions::default();
        }
        if let slot @ Peer::Idle = &mut self.peers[peer as usize] {
            let deadline = clock::now() + self.connect_timeout;
            *slot = Peer::Connecting(Box::new(Connecting::new(deadline)));
        }
        Ok(())
    }

    /// Takes the events since the arming.
    #[cold]
    fn disarm(&mut self) {
        self.is_armed = false;
        self.has_slept = true;
        self.nics.iter_mut().for_each(|nic| nic.completions.ack_events());
    }

    /// The error of a submit to a peer that is not open.
    #[cold]
    fn not_open(&self, peer: Rank) -> SubmitError {
        match self.peers.get(peer as usize) {
            None | Some(Peer::Idle | Peer::Connecting(_) | Peer::Open(_)) => {
                SubmitError::NotConnected { peer }
            }
            Some(Peer::Departed) => SubmitError::Departed { peer },
            Some(Peer::Lost(cause)) => SubmitError::Lost { peer, kind: cause.kind() },
            Some(Peer::Severed) => SubmitError::Severed { peer },
        }
    }
}

/// Whether to post at once. Mostly the pair is listed, so that later requests share the doorbell.
#[inline]
fn is_due(pair: &mut Pair, due: &mut Vec<Rank>) -> bool {
    let is_due = pair.is_due();
    if !is_due {
        pair.list(due);
    }
    is_due
}

//! The device contract over [`ShmDevice`].

use std::io;
use std::os::fd::AsFd;
use std::ptr::NonNull;
use std::sync::Arc;

use rustix::fs::{fcntl_add_seals, fcntl_get_seals};
use rustix::param::page_size;

use super::{FABRIC, QUEUE_DEPTH, RemoteLocation, ShmDevice, State};
use crate::Rank;
use crate::clock::Nanos;
use crate::control::PairKind;
use crate::cuda::CudaMemory;
use crate::device::{
    Address, Armed, ConnectError, Device, DeviceInfo, Event, Flush, Incarnation, MESSAGE_BYTES_MAX, MapError,
    Meeting, PostError, RegisterError, SubmitError, Submitted, Transfer, TransferError, TransferId, Urgency,
    WakeSource, check_only,
};
use crate::memory::{Memory, SEALS_FIXED_SIZE, Space};
use crate::primitive::AtomicU32;
use crate::region::{Mapped, OutOfBounds, ReadOnlyMapped, Region, RegionKey, RemoteSlice, random_key};
use crate::shm::copies::gpu_failed;
use crate::shm::directory::file_of;
use crate::shm::link::{PeerRegion, REGIONS_MAX};
use crate::shm::mapping::{Access, check};
use crate::shm::page_detachment::was_detached;
use crate::shm::transfer::TransferRequest;
use crate::shm::wake_word;
use crate::signals::{Signal, Signals};

impl ShmDevice {
    /// Whether all messages were sent, and all byes if this rank leaves.
    #[cold]
    fn has_sent_all(&self) -> bool {
        let mut watching = self.peers.iter().filter(|peer| peer.state.may_see_end());
        let has_said_bye = !self.is_leaving || watching.all(|peer| peer.has_sent_bye);
        has_said_bye && (0..self.shared.world_size).all(|peer| !self.control.has_output(peer))
    }

    /// Whether the peer may still map memory of this rank, also after a loss. False when the kernel
    /// says that the peer's process has ended, or when the peer was never connected.
    #[must_use]
    pub fn may_map(&self, peer: Rank) -> bool {
        peer < self.shared.world_size && self.shared.peer_status().may_map(peer)
    }

    /// The keys of the memory that all peers lose when this peer is severed.
    pub(crate) fn taken_with(&self, peer: Rank) -> Vec<RegionKey> {
        if self.may_map(peer) { self.shared.directory().taken_with(peer) } else { Vec::new() }
    }

    /// The region of a peer that holds the slice, and the address of the slice.
    fn locate_mapped(
        &mut self,
        peer: Rank,
        slice: &RemoteSlice,
    ) -> Result<(NonNull<u8>, Arc<PeerRegion>), MapError> {
        self.take_changes();
        let unknown = MapError::Unknown { peer, key: slice.key };
        let connected = match self.peer(peer).map(|peer| &peer.state) {
            Some(State::Connected(connected)) => connected,
            Some(State::Unconnected | State::Connecting) => return Err(unknown),
            _ => return Err(MapError::Disconnected { peer }),
        };
        // The region is looked up with an empty range. So a range that is too long gives another
        // error than a wrong key.
        let region = match connected.locate(&RemoteSlice { offset: 0, len: 0, ..*slice }) {
            RemoteLocation::Mapped(_, region) => region,
            RemoteLocation::OnGpu(region) => {
                let imported = region.import(self.copies.gpu());
                imported.map_err(gpu_failed).map_err(|error| MapError::Fabric {
                    peer,
                    key: slice.key,
                    error,
                })?;
                region
            }
            RemoteLocation::Unmappable => return Err(MapError::NoRoom { peer, key: slice.key }),
            RemoteLocation::NotAnnounced | RemoteLocation::Refused => return Err(unknown),
        };
        let Some(address) = region.locate(slice) else {
            let end = slice.offset.saturating_add(slice.len);
            let source = OutOfBounds { start: slice.offset, end, len: region.len() };
            return Err(MapError::OutOfBounds { peer, source });
        };
        let region = region.clone();
        if region.is_given_out_first() {
            let mapped = &mut self.peers[peer as usize].mapped;
            mapped.retain(|region| region.strong_count() > 0);
            mapped.push(Arc::downgrade(&region));
        }
        Ok((address, region))
    }

    /// Registers memory, for one peer or for all, under the key that `key` returns for its slot.
    /// The low bits of the key must be the slot's number.
    pub(crate) fn register_as(
        &mut self,
        memory: Arc<dyn Memory>,
        only: Option<Rank>,
        key: impl FnOnce(u16) -> Result<RegionKey, RegisterError>,
    ) -> Result<Region, RegisterError> {
        check_only(only, self.shared.rank, self.shared.world_size)?;
        check_memory(&memory)?;
        if let Some(memory) = CudaMemory::of(&*memory) {
            let taken = self.copies.take_gpu(memory.gpu());
            taken.map_err(gpu_failed).map_err(RegisterError::Fabric)?;
        }
        let slot = self.shared.directory().reserve();
        let slot = slot.ok_or(RegisterError::TooMany { fabric: FABRIC, regions: REGIONS_MAX })?;
        match key(slot) {
            Ok(key) => {
                let keys = &self.shared.own.keys;
                self.shared.change_directory(|directory| directory.insert(memory.clone(), key, only, keys));
                self.info.setup.count_registered();
                Ok(Region::new(memory, key, self.registry.clone()))
            }
            Err(error) => {
                self.shared.directory().give_back(slot);
                Err(error)
            }
        }
    }
}

// SAFETY: the conformance suite tests each line of the contract.
#[allow(unsafe_code)]
unsafe impl Device for ShmDevice {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn register(&mut self, memory: Arc<dyn Memory>) -> Result<Region, RegisterError> {
        self.register_as(memory, None, |slot| Ok(key_of(slot)))
    }

    fn register_for(&mut self, peer: Rank, memory: Arc<dyn Memory>) -> Result<Region, RegisterError> {
        self.register_as(memory, Some(peer), |slot| Ok(key_of(slot)))
    }

    fn map(&mut self, peer: Rank, slice: &RemoteSlice) -> Result<Mapped, MapError> {
        let (address, region) = self.locate_mapped(peer, slice)?;
        if !region.is_writable() {
            return Err(MapError::ReadOnly { peer, key: slice.key });
        }
        // SAFETY: `locate_mapped` found all of the slice inside the region, which is writable.
        Ok(unsafe { mapped(address, slice.len as usize, region) })
    }

    fn map_read_only(&mut self, peer: Rank, slice: &RemoteSlice) -> Result<ReadOnlyMapped, MapError> {
        let (address, region) = self.locate_mapped(peer, slice)?;
        let len = slice.len as usize;
        if region.is_writable() {
            // SAFETY: as in `map`.
            return Ok(unsafe { mapped(address, len, region) }.into_read_only());
        }
        // SAFETY: as in `map`, but the region is only readable. It stays mapped while it is held.
        let mapped = unsafe { ReadOnlyMapped::new(address, len, region.clone()) };
        Ok(mapped.shared_while(region))
    }

    fn connect(&mut self, peer: Rank, address: &Address) -> Result<(), ConnectError> {
        self.start_connecting(peer, PairKind::InWorld(address))
    }

    fn meet(&mut self, peer: Rank, meeting: Meeting<'_>) -> Result<(), ConnectError> {
        self.start_connecting(peer, PairKind::BetweenWorlds(meeting))
    }

    fn incarnation(&self, peer: Rank) -> Option<Incarnation> {
        (peer < self.shared.world_size).then(|| self.shared.peer_status().incarnation(peer)).flatten()
    }

    fn sever(&mut self, peer: Rank) {
        let is_peer = peer != self.shared.rank && peer < self.shared.world_size;
        if !is_peer || self.severing.contains(&peer) {
            return;
        }
        self.control.sever(peer);
        // From now on no region is announced to the peer.
        let may_map = self.shared.peer_status().may_map(peer);
        self.shared.peer_status().take_back(peer);
        let keys = &self.shared.own.keys;
        let memories = self.shared.change_directory(|directory| {
            directory.close(peer);
            if may_map { directory.detach_from(peer, keys) } else { Vec::new() }
        });
        if !matches!(self.peers[peer as usize].state, State::Lost(_) | State::Departed) {
            self.disconnect(peer, State::Severed, &TransferError::Severed { peer });
        }
        for memory in memories {
            self.fence.detach_own(memory);
        }
        for mapping in self.shared.signal_slots.mappings(peer) {
            self.fence.detach_signal_slots(mapping);
        }
        for region in self.peers[peer as usize].mapped.drain(..).filter_map(|region| region.upgrade()) {
            if may_map {
                self.fence.detach_theirs(region);
            }
        }
        self.severing.push(peer);
        self.has_rare_work = true;
    }

    fn submit(&mut self, peer: Rank, transfer: Transfer, id: TransferId) -> Result<Submitted, SubmitError> {
        let state = self.peers.get(peer as usize).ok_or(SubmitError::NotConnected { peer })?;
        let connected = state.connected(peer)?;
        transfer.check(&self.registry, self.info.transfer_bytes_max)?;
        if let Transfer::Put { signal, .. } = &transfer {
            connected.check_signal(signal.as_ref())?;
        }
        if state.under_way >= QUEUE_DEPTH {
            return Err(SubmitError::QueueFull { peer });
        }
        let request = match transfer {
            Transfer::Put { src, dst, signal } => TransferRequest::Put { src, dst, signal },
            Transfer::Get { src, dst } => TransferRequest::Get { src, dst },
            Transfer::Atomic { word, op } => TransferRequest::Atomic { word, op },
        };
        let submitted = self.start(peer, request, id, None);
        if submitted == Submitted::UnderWay {
            self.peers[peer as usize].under_way += 1;
        }
        Ok(submitted)
    }

    fn signal(&mut self, peer: Rank, signal: &Signal, _id: TransferId) -> Result<Submitted, SubmitError> {
        let state = self.peers.get(peer as usize).ok_or(SubmitError::NotConnected { peer })?;
        state.connected(peer)?.check_signal(Some(signal))?;
        if state.under_way >= QUEUE_DEPTH {
            return Err(SubmitError::QueueFull { peer });
        }
        self.raise_signal(peer, signal);
        Ok(Submitted::Ended(0))
    }

    fn drain(&mut self, peer: Rank) -> Result<(), SubmitError> {
        let state = self.peers.get_mut(peer as usize).ok_or(SubmitError::NotConnected { peer })?;
        let State::Connected(connected) = &mut state.state else { return state.connected(peer).map(drop) };
        if self.is_leaving {
            return Err(SubmitError::Departed { peer });
        }
        connected.drains.begin(peer)?;
        if !self.advance_drains_of(peer) && !self.draining.contains(&peer) {
            self.draining.push(peer);
            self.has_rare_work = true;
        }
        Ok(())
    }

    /// # Panics
    ///
    /// When there is no such rank.
    fn signal_slots(&self, peer: Rank) -> Signals {
        self.shared.signal_slots.of(peer).signal_slots.clone()
    }

    fn post(&mut self, peer: Rank, message: &[u8], urgency: Urgency) -> Result<(), PostError> {
        if message.len() > MESSAGE_BYTES_MAX {
            return Err(PostError::TooLong { bytes: message.len() });
        }
        // The stream is open a moment before the regions are listed for the peer. A message that is
        // sent in this moment would arrive before their announcements.
        match self.peer(peer).map(|peer| &peer.state) {
            Some(State::Connected(_)) => self.control.post(peer, message, urgency == Urgency::Urgent),
            _ => Err(PostError::NotConnected { peer }),
        }
    }

    fn poll(&mut self, now: Nanos, events: &mut Vec<Event>) {
        if self.is_armed {
            self.is_armed = false;
            wake_word::disarm((*self.wake_source).as_ref());
        }
        self.take_changes();
        if !self.large.is_empty() {
            self.advance_large();
        }
        if !self.copies.is_empty() {
            self.advance_copies();
        }
        if !self.waiting.is_empty() {
            self.retry_waiting(now);
        }
        self.wake_due_sometime();
        if self.has_rare_work {
            self.advance_rare_work(now);
        }
        while events.len() < events.capacity()
            && let Some((peer, event)) = self.events.pop_front()
        {
            if matches!(event, Event::Done { .. }) {
                self.peers[peer as usize].under_way -= 1;
            }
            events.push(event);
        }
    }

    fn arm(&mut self) -> Option<Armed> {
        self.wake_due();
        if self.has_work() {
            return None;
        }
        let word: &AtomicU32 = (*self.wake_source).as_ref();
        let seen = wake_word::arm(word);
        if self.shared.was_woken() {
            wake_word::disarm(word);
            return None;
        }
        self.is_armed = true;
        let until = self.waiting.iter().filter_map(|waiting| waiting.deadline).min();
        Some(Armed { wake_source: WakeSource::Word { word: self.wake_source.clone(), seen }, until })
    }

    fn exchange_processors(&mut self, own: u32, visit: &mut dyn FnMut(Rank, u32)) {
        self.shared.own.wake_source.publish_processor(own);
        for (rank, peer) in (0..).zip(&self.peers) {
            if let State::Connected(connected) = &peer.state
                && let Some(processor) = connected.link.wake_source.published_processor()
            {
                visit(rank, processor);
            }
        }
    }

    fn leave(&mut self) {
        self.is_leaving = true;
        self.has_rare_work = true;
        self.send_byes();
    }

    fn flush(&mut self, scope: Flush) -> bool {
        self.wake_due();
        let is_carried_out = self.large.is_empty() && self.waiting.is_empty() && self.copies.is_empty();
        is_carried_out && (scope == Flush::Transfers || self.has_sent_all())
    }
}

impl Drop for ShmDevice {
    fn drop(&mut self) {
        // A forked child has no watcher thread to wait for, and the streams belong to its parent.
        if self.shared.is_forked() {
            return;
        }
        self.wake_due();
        self.control.shut_down();
        for peer in 0..self.shared.world_size {
            drop(self.shared.peer_status().forget(peer));
        }
    }
}

/// Part of a region of a peer.
///
/// # Safety
///
/// The `len` bytes at `address` lie inside the region, which is writable.
unsafe fn mapped(address: NonNull<u8>, len: usize, region: Arc<PeerRegion>) -> Mapped {
    if region.is_on_gpu() {
        // SAFETY: the caller's promise; the allocation is imported, and the region keeps it.
        return unsafe { Mapped::on_gpu(address, len, region) };
    }
    // SAFETY: the caller's promise; the region stays mapped while it is held.
    unsafe { Mapped::new(address, len, region.clone()) }.shared_while(region)
}

/// A new key for a slot.
fn key_of(slot: u16) -> RegionKey {
    let mut key = RegionKey::NONE;
    // The slot replaces 16 of the 64 random bits; the other bits must not all be zero.
    while key.0 >> 16 == 0 {
        key = RegionKey(random_key().0 & !0xffff | u64::from(slot));
    }
    key
}

/// Whether peers can map the memory safely, and this rank can detach it from them.
fn check_memory(memory: &Arc<dyn Memory>) -> Result<(), RegisterError> {
    match memory.space() {
        Space::Host => {}
        Space::Gpu { .. } if was_detached(memory) => return Err(RegisterError::Detached { fabric: FABRIC }),
        // It can be detached if pleach allocated it.
        Space::Gpu { .. } => {
            let shared = CudaMemory::of(&**memory).and_then(CudaMemory::shared);
            return if shared.is_some() {
                Ok(())
            } else {
                Err(RegisterError::NotShareable { fabric: FABRIC })
            };
        }
    }
    let not_shareable = RegisterError::NotShareable { fabric: FABRIC };
    let Some((file, offset)) = file_of(&**memory) else { return Err(not_shareable) };
    if was_detached(memory) {
        return Err(RegisterError::Detached { fabric: FABRIC });
    }
    let bytes = memory.len();
    let system = |source| RegisterError::System { bytes, source };
    let seals = fcntl_get_seals(file).map_err(|errno| system(errno.into()))?;
    if !seals.contains(SEALS_FIXED_SIZE) {
        fcntl_add_seals(file, SEALS_FIXED_SIZE).map_err(|errno| system(errno.into()))?;
    }
    let page = page_size() as u64;
    // Severing does not replace memory that peers may not write. So the file must be sealed, too.
    let is_sealed = Access::of_file(file).map_err(system)? == Access::Read;
    let is_congruent = memory.base().as_ptr() as u64 % page == offset % page;
    let end = offset.checked_add(bytes as u64);
    if !is_congruent
        || is_sealed == memory.peers_may_write()
        || end.is_none_or(|end| check(file.as_fd(), end).is_err())
    {
        return Err(system(io::Error::from(io::ErrorKind::InvalidInput)));
    }
    Ok(())
}

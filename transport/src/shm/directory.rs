//! This rank's regions, and the control streams that announce them to peers. Behind one mutex,
//! never on the data path; nothing under it blocks.
//!
//! **Invariant:** every region that lives long enough is announced to every peer, before any
//! message that is posted after its registration. The queue of a peer is bounded: a slot is listed
//! once however often it changes.

use std::collections::VecDeque;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::{Arc, Weak};

use rustix::event::epoll;
use rustix::io::Errno;

use super::frame::Frame;
use super::link::{KeyTable, REGIONS_MAX};
use super::page_detachment::share_pages;
use crate::Rank;
use crate::control::packet::send;
use crate::control::{FrameKind, Outgoing, OutgoingFull};
use crate::cuda::{CudaMemory, SharedAllocation};
use crate::device::{PostError, Urgency};
use crate::memory::{Memory, Share};
use crate::region::RegionKey;

/// A region of this rank.
pub(crate) struct Entry {
    pub(crate) key: RegionKey,
    pub(crate) memory: Arc<dyn Memory>,
    /// Detached from all peers.
    pub(crate) detached: bool,
}

/// One open control stream.
pub(crate) struct Control {
    stream: Arc<OwnedFd>,
    token: u64,
    slots: VecDeque<u16>,
    is_listed: Vec<bool>,
    outgoing: Outgoing,
    /// The watcher waits for room in the stream.
    is_stalled: bool,
}

/// Why a flush stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FlushResult {
    /// All is sent, or the stream is full: then the watcher is told when it has room.
    AllOrFull,
    /// The stream has room, but the system takes no more now.
    SystemFull,
}

/// See the module.
pub(crate) struct Directory {
    epoll: Arc<OwnedFd>,
    entries: Vec<Option<Entry>>,
    free: Vec<u16>,
    /// Released memory that peers may still have mapped.
    former: Vec<Weak<dyn Memory>>,
    controls: Vec<Option<Control>>,
    /// Severed peers; no stream to them may open any more.
    cut: Vec<bool>,
}

impl Directory {
    pub(crate) fn new(world_size: u32, epoll: Arc<OwnedFd>) -> Self {
        Self {
            epoll,
            entries: Vec::new(),
            free: Vec::new(),
            former: Vec::new(),
            controls: (0..world_size).map(|_| None).collect(),
            cut: vec![false; world_size as usize],
        }
    }

    /// Reserves a slot until [`Directory::insert`] or [`Directory::give_back`]; `None` when there
    /// are too many regions.
    pub(crate) fn reserve(&mut self) -> Option<u16> {
        match self.free.pop() {
            Some(slot) => Some(slot),
            None if self.entries.len() < REGIONS_MAX => {
                self.entries.push(None);
                Some((self.entries.len() - 1) as u16)
            }
            None => None,
        }
    }

    /// Frees a reserved slot.
    pub(crate) fn give_back(&mut self, slot: u16) {
        self.free.push(slot);
    }

    /// Lists the memory under this key, which names a reserved slot, and announces it to all peers.
    pub(crate) fn insert(&mut self, memory: Arc<dyn Memory>, key: RegionKey, keys: &KeyTable) {
        let slot = super::link::slot_of(key);
        self.entries[usize::from(slot)] = Some(Entry { key, memory, detached: false });
        keys.store(slot, key);
        self.announce(slot);
    }

    /// Revokes the key and tells all peers. Returns the entry, to be dropped without the lock.
    pub(crate) fn remove(&mut self, key: RegionKey, keys: &KeyTable) -> Option<Entry> {
        let slot = super::link::slot_of(key);
        let place = self.entries.get_mut(usize::from(slot))?;
        let entry = place.take_if(|entry| entry.key == key)?;
        keys.store(slot, RegionKey::NONE);
        self.free.push(slot);
        self.former.retain(|memory| memory.strong_count() > 0);
        if !entry.detached {
            self.former.push(Arc::downgrade(&entry.memory));
        }
        self.announce(slot);
        Some(entry)
    }

    /// Revokes the keys of all memory; returns the memory that peers may have mapped.
    pub(crate) fn detach_all(&mut self, keys: &KeyTable) -> Vec<Arc<dyn Memory>> {
        let mut memories: Vec<_> = self.former.drain(..).filter_map(|memory| memory.upgrade()).collect();
        for slot in 0..self.entries.len() as u16 {
            let Some(entry) = &mut self.entries[usize::from(slot)] else { continue };
            if !entry.detached {
                entry.detached = true;
                keys.store(slot, RegionKey::NONE);
                memories.push(entry.memory.clone());
                self.announce(slot);
            }
        }
        memories
    }

    /// Revokes the keys of the memory, if it is registered here: another device of this process
    /// severs a peer.
    pub(crate) fn detach(&mut self, memory: &Arc<dyn Memory>, keys: &KeyTable) {
        for slot in 0..self.entries.len() as u16 {
            let Some(entry) = &mut self.entries[usize::from(slot)] else { continue };
            if !entry.detached && share_pages(&entry.memory, memory) {
                entry.detached = true;
                keys.store(slot, RegionKey::NONE);
                self.announce(slot);
            }
        }
    }

    /// Closes all streams at the device's end. Regions with handles stay until they are dropped;
    /// peers can access them until they see the end.
    pub(crate) fn close_all(&mut self) {
        for peer in 0..self.controls.len() {
            self.cut(peer as Rank);
        }
    }

    /// Opens a peer's stream and announces all regions to the peer. False when it was severed
    /// meanwhile.
    pub(crate) fn open(&mut self, peer: Rank, stream: Arc<OwnedFd>, token: u64) -> bool {
        if self.cut[peer as usize] {
            return false;
        }
        self.controls[peer as usize] = Some(Control {
            stream,
            token,
            slots: VecDeque::new(),
            is_listed: Vec::new(),
            outgoing: Outgoing::default(),
            is_stalled: false,
        });
        for slot in 0..self.entries.len() as u16 {
            if self.entries[usize::from(slot)].as_ref().is_some_and(|entry| !entry.detached) {
                self.list(peer, slot);
            }
        }
        self.flush(peer);
        true
    }

    /// Ends the stream, also if a forked child holds it too.
    pub(crate) fn close(&mut self, peer: Rank) {
        if let Some(control) = self.controls[peer as usize].take() {
            let _ = rustix::net::shutdown(&control.stream, rustix::net::Shutdown::Both);
        }
    }

    /// Ends the stream for good.
    pub(crate) fn cut(&mut self, peer: Rank) {
        self.cut[peer as usize] = true;
        self.close(peer);
    }

    pub(crate) fn is_cut(&self, peer: Rank) -> bool {
        self.cut[peer as usize]
    }

    /// Sends a message, now or when there is room. An urgent message always has room: it replaces
    /// an urgent message that still waits.
    pub(crate) fn post(&mut self, peer: Rank, message: &[u8], urgency: Urgency) -> Result<(), PostError> {
        let control = self
            .controls
            .get_mut(peer as usize)
            .and_then(Option::as_mut)
            .ok_or(PostError::NotConnected { peer })?;
        let kind = match urgency {
            Urgency::Ordinary => FrameKind::Post,
            Urgency::Urgent => FrameKind::Urgent,
        };
        let packet = Frame::Message(message).encode();
        control.outgoing.push(kind, packet).map_err(|OutgoingFull| PostError::QueueFull { peer })?;
        self.flush(peer);
        Ok(())
    }

    /// Sends the answer to a message, now or when there is room. A peer that does not read its
    /// answers gets no further ones.
    pub(crate) fn answer(&mut self, peer: Rank, message: &[u8]) {
        let Some(control) = &mut self.controls[peer as usize] else { return };
        if control.outgoing.push(FrameKind::Reply, Frame::Message(message).encode()) == Err(OutgoingFull) {
            tracing::debug!(peer, "an answer was dropped: the peer asks but does not read");
        }
        self.flush(peer);
    }

    /// Sends a bye, after all earlier frames.
    pub(crate) fn bye(&mut self, peer: Rank) {
        if let Some(control) = &mut self.controls[peer as usize] {
            let pushed = control.outgoing.push(FrameKind::Single, Frame::Bye.encode());
            debug_assert_eq!(pushed, Ok(()), "there is always room for a bye");
            self.flush(peer);
        }
    }

    /// Whether all frames are in their streams.
    pub(crate) fn is_flushed(&self) -> bool {
        self.controls.iter().flatten().all(|control| control.outgoing.is_empty() && control.slots.is_empty())
    }

    /// Sends what the stream takes; asks the watcher to continue when there is room.
    pub(crate) fn flush(&mut self, peer: Rank) -> FlushResult {
        let Some(control) = &mut self.controls[peer as usize] else { return FlushResult::AllOrFull };
        let sent = control.send_all(&self.entries);
        let flushed = match sent {
            // This user has too many descriptors in flight, or there is no memory.
            Err(Errno::TOOMANYREFS | Errno::NOBUFS | Errno::NOMEM) => FlushResult::SystemFull,
            _ => FlushResult::AllOrFull,
        };
        let is_stalled = match sent {
            Ok(()) => false,
            Err(Errno::AGAIN | Errno::TOOMANYREFS | Errno::NOBUFS | Errno::NOMEM) => true,
            Err(_) => {
                // The stream broke: the watcher detects that too, with the cause.
                control.slots.clear();
                control.is_listed.clear();
                control.outgoing.clear();
                false
            }
        };
        if is_stalled != control.is_stalled {
            control.wait_for_room(&self.epoll, is_stalled);
        }
        flushed
    }

    /// For the watcher: it will flush this peer by itself, because room in its stream means nothing
    /// now.
    pub(crate) fn pause(&mut self, peer: Rank) {
        if let Some(control) = &mut self.controls[peer as usize] {
            control.wait_for_room(&self.epoll, false);
        }
    }

    fn announce(&mut self, slot: u16) {
        for peer in 0..self.controls.len() as Rank {
            self.list(peer, slot);
            self.flush(peer);
        }
    }

    fn list(&mut self, peer: Rank, slot: u16) {
        let Some(control) = &mut self.controls[peer as usize] else { return };
        let at = usize::from(slot);
        if control.is_listed.len() <= at {
            control.is_listed.resize(at + 1, false);
        }
        if !std::mem::replace(&mut control.is_listed[at], true) {
            control.slots.push_back(slot);
        }
    }
}

impl Control {
    fn wait_for_room(&mut self, epoll: &OwnedFd, is_stalled: bool) {
        self.is_stalled = is_stalled;
        let interest =
            if is_stalled { epoll::EventFlags::IN | epoll::EventFlags::OUT } else { epoll::EventFlags::IN };
        // It fails only when the watcher has already removed the stream.
        let _ = epoll::modify(epoll, &*self.stream, epoll::EventData::new_u64(self.token), interest);
    }

    fn send_all(&mut self, entries: &[Option<Entry>]) -> Result<(), Errno> {
        while let Some(&slot) = self.slots.front() {
            let entry = entries.get(usize::from(slot)).and_then(Option::as_ref);
            let handle_announce =
                entry.filter(|entry| !entry.detached).and_then(|entry| announce(slot, entry));
            match handle_announce {
                Some((frame, file)) => send(&self.stream, &frame.encode(), &[file])?,
                None => send(&self.stream, &Frame::Revoke { slot }.encode(), &[])?,
            }
            self.slots.pop_front();
            self.is_listed[usize::from(slot)] = false;
        }
        let stream = &self.stream;
        self.outgoing.flush(|packet| send(stream, packet, &[]).map(|()| packet.len()))
    }
}

/// The announcement of a region with its file; `None` if peers cannot map it any more.
fn announce(slot: u16, entry: &Entry) -> Option<(Frame<'static>, BorrowedFd<'_>)> {
    let (key, len) = (entry.key, entry.memory.len() as u64);
    if let Some((file, offset)) = file_of(&*entry.memory) {
        return Some((Frame::Announce { slot, key, offset, len }, file));
    }
    let SharedAllocation { file, bytes, gpu } = CudaMemory::of(&*entry.memory)?.shared()?;
    Some((Frame::AnnounceGpu { slot, key, bytes, len, gpu }, file))
}

/// The file of memory that peers can map, and the memory's offset in it.
pub(crate) fn file_of(memory: &dyn Memory) -> Option<(BorrowedFd<'_>, u64)> {
    match memory.share() {
        Share::File { file, offset } => Some((file, offset)),
        Share::Private => None,
    }
}

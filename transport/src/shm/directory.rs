//! This rank's regions, and the peers that they are announced to. Behind one mutex, never on the
//! data path; nothing under it blocks.
//!
//! **Invariant:** every region that lives long enough is announced to every peer, before any
//! message that is posted after its registration. The queue of a peer is bounded: a slot is listed
//! once however often it changes.

use std::collections::VecDeque;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Weak};

use rustix::io::Errno;

use super::link::{KeyTable, REGIONS_MAX};
use super::message::RegionMessage;
use super::page_detachment::share_pages;
use crate::Rank;
use crate::control::SendWithFiles;
use crate::cuda::{CudaMemory, SharedAllocation};
use crate::memory::{Memory, Share};
use crate::region::RegionKey;

/// A region of this rank.
pub(crate) struct Entry {
    pub(crate) key: RegionKey,
    pub(crate) memory: Arc<dyn Memory>,
    /// Detached from all peers.
    pub(crate) detached: bool,
}

/// Slots that a peer must be told about.
#[derive(Default)]
struct ChangedSlots {
    /// Whether the peer is connected.
    is_open: bool,
    slots: VecDeque<u16>,
    is_listed: Vec<bool>,
}

/// See the module.
pub(crate) struct Directory {
    entries: Vec<Option<Entry>>,
    free: Vec<u16>,
    /// Released memory that peers may still have mapped.
    former: Vec<Weak<dyn Memory>>,
    peers: Vec<ChangedSlots>,
}

impl Directory {
    pub(crate) fn new(world_size: u32) -> Self {
        Self {
            entries: Vec::new(),
            free: Vec::new(),
            former: Vec::new(),
            peers: (0..world_size).map(|_| ChangedSlots::default()).collect(),
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

    /// Enters the memory under this key, which names a reserved slot; lists it for all peers.
    pub(crate) fn insert(&mut self, memory: Arc<dyn Memory>, key: RegionKey, keys: &KeyTable) {
        let slot = super::link::slot_of(key);
        self.entries[usize::from(slot)] = Some(Entry { key, memory, detached: false });
        keys.store(slot, key);
        self.list_for_all(slot);
    }

    /// Revokes the key, and lists it for all peers. The caller drops the entry without the lock.
    pub(crate) fn remove(&mut self, key: RegionKey, keys: &KeyTable) -> Option<Entry> {
        let slot = super::link::slot_of(key);
        let place = self.entries.get_mut(usize::from(slot))?;
        let entry = place.take_if(|entry| entry.key == key)?;
        keys.store(slot, RegionKey::NONE);
        self.free.push(slot);
        self.former.retain(|memory| memory.strong_count() > 0);
        if !entry.detached && entry.memory.peers_may_write() {
            self.former.push(Arc::downgrade(&entry.memory));
        }
        self.list_for_all(slot);
        Some(entry)
    }

    /// Revokes the keys of all memory that peers may write; returns that memory, as they may have
    /// it mapped.
    pub(crate) fn detach_all(&mut self, keys: &KeyTable) -> Vec<Arc<dyn Memory>> {
        let mut memories: Vec<_> = self.former.drain(..).filter_map(|memory| memory.upgrade()).collect();
        for slot in 0..self.entries.len() as u16 {
            let Some(entry) = &mut self.entries[usize::from(slot)] else { continue };
            if !entry.detached && entry.memory.peers_may_write() {
                entry.detached = true;
                keys.store(slot, RegionKey::NONE);
                memories.push(entry.memory.clone());
                self.list_for_all(slot);
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
                self.list_for_all(slot);
            }
        }
    }

    /// Lists all regions for a peer, which is connected now.
    pub(crate) fn open(&mut self, peer: Rank) {
        self.peers[peer as usize].is_open = true;
        for slot in 0..self.entries.len() as u16 {
            if self.entries[usize::from(slot)].as_ref().is_some_and(|entry| !entry.detached) {
                self.peers[peer as usize].list(slot);
            }
        }
    }

    /// Lists nothing more for a peer that is lost, severed or departed.
    pub(crate) fn close(&mut self, peer: Rank) {
        self.peers[peer as usize] = ChangedSlots::default();
    }

    /// The connected peers.
    pub(crate) fn open_peers(&self) -> Vec<Rank> {
        (0..).zip(&self.peers).filter(|(_, peer)| peer.is_open).map(|(rank, _)| rank).collect()
    }

    /// Whether slots are listed for a peer.
    pub(crate) fn has_listed(&self, peer: Rank) -> bool {
        !self.peers[peer as usize].slots.is_empty()
    }

    /// Sends the state of all listed slots to a peer.
    pub(crate) fn send_listed(&mut self, peer: Rank, send: &mut SendWithFiles<'_>) -> Result<(), Errno> {
        let peer = &mut self.peers[peer as usize];
        while let Some(&slot) = peer.slots.front() {
            let entry = self.entries.get(usize::from(slot)).and_then(Option::as_ref);
            match entry.filter(|entry| !entry.detached).and_then(|entry| announce(slot, entry)) {
                Some((message, file)) => send(&message.encode(), &[file])?,
                None => send(&RegionMessage::Revoke { slot }.encode(), &[])?,
            }
            peer.slots.pop_front();
            peer.is_listed[usize::from(slot)] = false;
        }
        Ok(())
    }

    fn list_for_all(&mut self, slot: u16) {
        for peer in self.peers.iter_mut().filter(|peer| peer.is_open) {
            peer.list(slot);
        }
    }
}

impl ChangedSlots {
    fn list(&mut self, slot: u16) {
        let at = usize::from(slot);
        if self.is_listed.len() <= at {
            self.is_listed.resize(at + 1, false);
        }
        if !std::mem::replace(&mut self.is_listed[at], true) {
            self.slots.push_back(slot);
        }
    }
}

/// The announcement of a region with its file; `None` if peers cannot map it any more.
fn announce(slot: u16, entry: &Entry) -> Option<(RegionMessage, BorrowedFd<'_>)> {
    let (key, len) = (entry.key, entry.memory.len() as u64);
    if let Some((file, offset)) = file_of(&*entry.memory) {
        return Some((RegionMessage::Announce { slot, key, offset, len }, file));
    }
    let SharedAllocation { file, bytes, gpu } = CudaMemory::of(&*entry.memory)?.shared()?;
    Some((RegionMessage::AnnounceGpu { slot, key, bytes, len, gpu }, file))
}

/// The file of memory that peers can map, and the memory's offset in it.
pub(crate) fn file_of(memory: &dyn Memory) -> Option<(BorrowedFd<'_>, u64)> {
    match memory.share() {
        Share::File { file, offset } => Some((file, offset)),
        Share::Private => None,
    }
}

//! This rank's regions, and the peers to which they are announced. The directory is behind one
//! mutex, which the data path never takes. Nothing blocks while the mutex is held.
//!
//! **Invariant:** every region that lives long enough is announced to every peer for which it is
//! registered, and to no other peer. The announcement comes before any message that is posted after
//! the registration. The queue of a peer is bounded: a slot is listed once, however often it
//! changes.

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
    /// The only peer for which the region is registered; `None`: all peers.
    only: Option<Rank>,
    /// Whether the region is detached from all peers.
    pub(crate) detached: bool,
    /// Whether another process now has the rank for which the region was registered.
    is_orphaned: bool,
}

impl Entry {
    fn is_for(&self, peer: Rank) -> bool {
        self.only.is_none_or(|only| only == peer)
    }

    /// Whether the region may be announced to the process that has this rank now.
    fn is_announced_to(&self, peer: Rank) -> bool {
        !self.detached && !self.is_orphaned && self.is_for(peer)
    }

    /// Whether severing the peer detaches the memory.
    fn is_taken_with(&self, peer: Rank) -> bool {
        !self.detached && self.is_for(peer) && self.memory.peers_may_write()
    }
}

/// Slots that a peer must be told about.
#[derive(Default)]
struct ChangedSlots {
    /// Whether the peer is connected.
    is_open: bool,
    slots: VecDeque<u16>,
    is_listed: Vec<bool>,
}

/// The regions of this rank; see the module.
pub(crate) struct Directory {
    entries: Vec<Option<Entry>>,
    free: Vec<u16>,
    /// Released memory that may still be mapped: by one peer, or by all peers (`None`).
    former: Vec<(Weak<dyn Memory>, Option<Rank>)>,
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

    /// Enters the memory under this key, which names a reserved slot. Lists the slot for all peers,
    /// or for the only peer for which the memory is registered.
    pub(crate) fn insert(
        &mut self,
        memory: Arc<dyn Memory>,
        key: RegionKey,
        only: Option<Rank>,
        keys: &KeyTable,
    ) {
        let slot = super::link::slot_of(key);
        self.entries[usize::from(slot)] =
            Some(Entry { key, memory, only, detached: false, is_orphaned: false });
        keys.store(key, only);
        self.list(slot, only);
    }

    /// Revokes the key, and lists its slot for the peers of the region. The caller drops the entry
    /// without the lock.
    pub(crate) fn remove(&mut self, key: RegionKey, keys: &KeyTable) -> Option<Entry> {
        let slot = super::link::slot_of(key);
        let place = self.entries.get_mut(usize::from(slot))?;
        let entry = place.take_if(|entry| entry.key == key)?;
        keys.clear(slot);
        self.free.push(slot);
        self.former.retain(|(memory, _)| memory.strong_count() > 0);
        if !entry.detached && entry.memory.peers_may_write() {
            self.former.push((Arc::downgrade(&entry.memory), entry.only));
        }
        self.list(slot, entry.only);
        Some(entry)
    }

    /// Revokes the keys of all memory that the peer may write. Returns this memory, because the
    /// peer may have mapped it.
    pub(crate) fn detach_from(&mut self, peer: Rank, keys: &KeyTable) -> Vec<Arc<dyn Memory>> {
        let mut memories = self.former_of(peer);
        self.former.retain(|(_, only)| only.is_some_and(|only| only != peer));
        for slot in 0..self.entries.len() as u16 {
            let Some(entry) = &mut self.entries[usize::from(slot)] else { continue };
            if entry.is_taken_with(peer) {
                entry.detached = true;
                keys.clear(slot);
                memories.push(entry.memory.clone());
                let only = entry.only;
                self.list(slot, only);
            }
        }
        memories
    }

    /// The keys that severing the peer revokes, also the keys of other regions of the same pages.
    pub(crate) fn taken_with(&self, peer: Rank) -> Vec<RegionKey> {
        let entries = || self.entries.iter().flatten();
        let mut memories = self.former_of(peer);
        memories
            .extend(entries().filter(|entry| entry.is_taken_with(peer)).map(|entry| entry.memory.clone()));
        let shares = |entry: &Entry| memories.iter().any(|memory| share_pages(&entry.memory, memory));
        let is_taken = |entry: &&Entry| !entry.detached && (entry.is_taken_with(peer) || shares(entry));
        entries().filter(is_taken).map(|entry| entry.key).collect()
    }

    /// Released memory that the peer may still have mapped.
    fn former_of(&self, peer: Rank) -> Vec<Arc<dyn Memory>> {
        let former = self.former.iter().filter(|(_, only)| only.is_none_or(|only| only == peer));
        former.filter_map(|(memory, _)| memory.upgrade()).collect()
    }

    /// Revokes the keys of the memory, if it is registered here. Called when another device of this
    /// process severs a peer.
    pub(crate) fn detach(&mut self, memory: &Arc<dyn Memory>, keys: &KeyTable) {
        for slot in 0..self.entries.len() as u16 {
            let Some(entry) = &mut self.entries[usize::from(slot)] else { continue };
            if !entry.detached && share_pages(&entry.memory, memory) {
                entry.detached = true;
                keys.clear(slot);
                let only = entry.only;
                self.list(slot, only);
            }
        }
    }

    /// Lists all regions for a peer that is connected now.
    pub(crate) fn open(&mut self, peer: Rank) {
        self.peers[peer as usize].is_open = true;
        for slot in 0..self.entries.len() as u16 {
            let entry = self.entries[usize::from(slot)].as_ref();
            if entry.is_some_and(|entry| entry.is_announced_to(peer)) {
                self.peers[peer as usize].list(slot);
            }
        }
    }

    /// Revokes the keys of memory that is registered for this peer alone. Called when another
    /// process gets the peer's rank.
    pub(crate) fn orphan(&mut self, peer: Rank, keys: &KeyTable) {
        let of_peer = |entry: &&mut Entry| entry.only == Some(peer);
        for entry in self.entries.iter_mut().flatten().filter(of_peer) {
            entry.is_orphaned = true;
            keys.clear(super::link::slot_of(entry.key));
        }
    }

    /// Stops listing slots for a peer that is lost, severed or departed.
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
    pub(crate) fn send_listed(&mut self, rank: Rank, send: &mut SendWithFiles<'_>) -> Result<(), Errno> {
        let peer = &mut self.peers[rank as usize];
        while let Some(&slot) = peer.slots.front() {
            let entry = self.entries.get(usize::from(slot)).and_then(Option::as_ref);
            // The slot may hold a region for another peer by now.
            let entry = entry.filter(|entry| entry.is_announced_to(rank));
            match entry.and_then(|entry| announce(slot, entry)) {
                Some((message, file)) => send(&message.encode(), &[file])?,
                None => send(&RegionMessage::Revoke { slot }.encode(), &[])?,
            }
            peer.slots.pop_front();
            peer.is_listed[usize::from(slot)] = false;
        }
        Ok(())
    }

    /// Lists a slot for all peers, or for the only peer of its region.
    fn list(&mut self, slot: u16, only: Option<Rank>) {
        for (rank, peer) in (0..).zip(&mut self.peers).filter(|(_, peer)| peer.is_open) {
            if only.is_none_or(|only| only == rank) {
                peer.list(slot);
            }
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::SharedMemory;
    use crate::shm::link::OwnMemory;

    /// The messages that are sent to a peer, each with its number of files.
    fn sent_to(directory: &mut Directory, peer: Rank) -> Vec<(RegionMessage, usize)> {
        let mut sent = Vec::new();
        let mut send = |bytes: &[u8], files: &[BorrowedFd<'_>]| {
            sent.push((RegionMessage::decode(bytes).expect("its own"), files.len()));
            Ok(())
        };
        directory.send_listed(peer, &mut send).expect("nothing fails");
        sent
    }

    #[test]
    fn a_region_for_one_peer_is_sent_to_no_other_also_where_its_slot_had_a_region_for_that_one() {
        let own = OwnMemory::new().expect("memory");
        let mut directory = Directory::new(4);
        for peer in 1..4 {
            directory.open(peer);
        }
        let slot = directory.reserve().expect("it is empty");
        let keys = [1, 2].map(|number: u64| RegionKey(number << 16 | u64::from(slot)));
        directory.insert(SharedMemory::new(64).expect("memory"), keys[0], Some(1), &own.keys);
        assert!(own.keys.is_for(keys[0], 1) && !own.keys.is_for(keys[0], 2));
        drop(directory.remove(keys[0], &own.keys));
        assert_eq!(directory.reserve(), Some(slot));
        directory.insert(SharedMemory::new(64).expect("memory"), keys[1], Some(2), &own.keys);
        assert!(own.keys.is_for(keys[1], 2) && !own.keys.is_for(keys[1], 1));
        assert_eq!(sent_to(&mut directory, 1), [(RegionMessage::Revoke { slot }, 0)]);
        let announcement = RegionMessage::Announce { slot, key: keys[1], offset: 0, len: 64 };
        assert_eq!(sent_to(&mut directory, 2), [(announcement, 1)]);
        assert_eq!(sent_to(&mut directory, 3), []);
        // A peer that connects later gets them too.
        directory.close(3);
        directory.open(3);
        assert!(!directory.has_listed(3));
    }

    #[test]
    fn severing_a_peer_takes_what_it_could_write_and_what_shares_pages_with_it() {
        let own = OwnMemory::new().expect("memory");
        let mut directory = Directory::new(3);
        let enter = |directory: &mut Directory, memory: &Arc<SharedMemory>, only| {
            let slot = directory.reserve().expect("room");
            let key = RegionKey(1 << 16 | u64::from(slot));
            directory.insert(memory.clone(), key, only, &own.keys);
            key
        };
        let [shared, first, second] = [(); 3].map(|()| SharedMemory::new(64).expect("memory"));
        let (all, of_one) = (enter(&mut directory, &shared, None), enter(&mut directory, &first, Some(1)));
        let (of_two, same) =
            (enter(&mut directory, &second, Some(2)), enter(&mut directory, &first, Some(2)));
        assert_eq!(directory.taken_with(1), [all, of_one, same]);
        assert_eq!(directory.taken_with(2), [all, of_one, of_two, same]);
        assert_eq!(directory.detach_from(1, &own.keys).len(), 2);
        assert!(own.keys.holds(of_two) && !own.keys.holds(all) && !own.keys.holds(of_one));
        assert_eq!(directory.taken_with(1), []);
    }
}

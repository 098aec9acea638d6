//! The regions of one simulated rank.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};

use crate::Rank;
use crate::clock::Nanos;
use crate::memory::Memory;
use crate::mutex::lock;
use crate::region::{Region, RegionKey, Registry, RemoteSlice, Slice};
use crate::sim::observer::AccessKind;

/// The regions of a rank. It has a lock of its own, always taken last, because the last handle of a
/// region may be dropped anywhere, also by a transfer that ends inside of the world.
#[derive(Debug, Default)]
pub(super) struct RegionTable {
    regions: Mutex<BTreeMap<RegionKey, Registered>>,
}

#[derive(Debug)]
struct Registered {
    /// A second region over the same memory, for transfers of peers. It is not the owner's handle,
    /// so it does not keep the key alive.
    peer_region: Region,
    /// The only peer that it is for.
    only: Option<Rank>,
    /// Another process has the rank that it was for.
    is_orphaned: bool,
    /// When peers know the key.
    announced_at: Nanos,
}

impl Registered {
    fn is_for(&self, peer: Rank) -> bool {
        !self.is_orphaned && self.only.is_none_or(|only| only == peer)
    }
}

/// The registry of regions that are in no table.
#[derive(Debug)]
struct Unregistered;

impl Registry for Unregistered {
    fn released(&self, _key: RegionKey) {}
}

impl Registry for RegionTable {
    fn released(&self, key: RegionKey) {
        // Dropped after the lock is released: the memory's own drop may do anything.
        let _gone = self.lock().remove(&key);
    }
}

impl RegionTable {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<RegionKey, Registered>> {
        lock(&self.regions)
    }

    pub(super) fn insert(
        &self,
        memory: Arc<dyn Memory>,
        key: RegionKey,
        only: Option<Rank>,
        announced_at: Nanos,
    ) {
        let peer_region = Region::new(memory, key, Arc::new(Unregistered));
        self.lock().insert(key, Registered { peer_region, only, is_orphaned: false, announced_at });
    }

    /// Takes memory for this peer alone from all peers: another process gets its rank.
    pub(super) fn orphan(&self, peer: Rank) {
        for registered in self.lock().values_mut() {
            registered.is_orphaned |= registered.only == Some(peer);
        }
    }

    /// The slice that a peer names to access it so, if it exists and the peer may.
    pub(super) fn find(&self, remote: &RemoteSlice, peer: Rank, kind: AccessKind) -> Option<Slice> {
        let region =
            self.lock().get(&remote.key).filter(|registered| registered.is_for(peer))?.peer_region.clone();
        if kind != AccessKind::Read && !region.memory().peers_may_write() {
            return None;
        }
        let start = usize::try_from(remote.offset).ok()?;
        let end = start.checked_add(usize::try_from(remote.len).ok()?)?;
        region.slice(start..end).ok()
    }

    /// The region of this key, if it is announced to this peer by `now`.
    pub(super) fn announced(&self, key: RegionKey, peer: Rank, now: Nanos) -> Option<Region> {
        let regions = self.lock();
        let registered = regions.get(&key).filter(|registered| registered.is_for(peer))?;
        (registered.announced_at <= now).then(|| registered.peer_region.clone())
    }

    /// The region that holds these addresses, and their offset in it.
    pub(super) fn containing(&self, address: usize, len: usize) -> Option<(RegionKey, u64)> {
        self.lock().iter().find_map(|(&key, registered)| {
            let base = registered.peer_region.base().as_ptr() as usize;
            let inside = address >= base && address + len <= base + registered.peer_region.len();
            inside.then(|| (key, (address - base) as u64))
        })
    }

    pub(super) fn len(&self) -> usize {
        self.lock().len()
    }

    pub(super) fn clear(&self) {
        let _gone = std::mem::take(&mut *self.lock());
    }
}

//! The regions of one simulated rank.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::clock::Nanos;
use crate::memory::Memory;
use crate::region::{Region, RegionKey, Registry, RemoteSlice, Slice};

/// What a rank has registered. It has a lock of its own, always taken last, because the last handle
/// of a region may be dropped anywhere, also by a transfer that ends inside of the world.
#[derive(Debug, Default)]
pub(super) struct RegionTable {
    regions: Mutex<BTreeMap<RegionKey, Registered>>,
}

#[derive(Debug)]
struct Registered {
    /// A second region over the same memory: what transfers of peers go through. It is not the
    /// owner's handle, so it does not keep the key alive.
    through: Region,
    /// When peers know of it.
    announced_at: Nanos,
}

/// Hears of the regions that are nobody's handles.
#[derive(Debug)]
struct Unregistered;

impl Registry for Unregistered {
    fn released(&self, _key: RegionKey) {}
}

/// A region that no table knows, over this memory.
pub(super) fn unregistered(memory: Arc<dyn Memory>, key: RegionKey) -> Region {
    Region::new(memory, key, Arc::new(Unregistered))
}

impl Registry for RegionTable {
    fn released(&self, key: RegionKey) {
        // Dropped after the lock is free: the memory's own drop may do anything.
        let _gone = self.lock().remove(&key);
    }
}

impl RegionTable {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<RegionKey, Registered>> {
        self.regions.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn insert(&self, memory: Arc<dyn Memory>, key: RegionKey, announced_at: Nanos) {
        let through = unregistered(memory, key);
        self.lock().insert(key, Registered { through, announced_at });
    }

    /// The bytes that a peer names, if they exist.
    pub(super) fn find(&self, remote: &RemoteSlice) -> Option<Slice> {
        let region = self.lock().get(&remote.key)?.through.clone();
        let start = usize::try_from(remote.offset).ok()?;
        let end = start.checked_add(usize::try_from(remote.len).ok()?)?;
        region.slice(start..end).ok()
    }

    /// The region of this key, if it is known by `now`.
    pub(super) fn announced(&self, key: RegionKey, now: Nanos) -> Option<Region> {
        let regions = self.lock();
        let registered = regions.get(&key)?;
        (registered.announced_at <= now).then(|| registered.through.clone())
    }

    /// The region that holds these addresses, and where in it they begin.
    pub(super) fn holding(&self, address: usize, len: usize) -> Option<(RegionKey, u64)> {
        self.lock().iter().find_map(|(&key, registered)| {
            let base = registered.through.base().as_ptr() as usize;
            let inside = address >= base && address + len <= base + registered.through.len();
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

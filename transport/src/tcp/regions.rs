//! The regions of this rank, as peers name them: which exist, and which peers count on which.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use super::shared::Shared;
use crate::Rank;
use crate::device::Ring;
use crate::region::{Region, RegionKey, Registry, RemoteSlice, Slice, WeakRegion};

/// Keys are random already: hashing them again would only cost.
#[derive(Default)]
pub(crate) struct KeyHasher(u64);

impl Hasher for KeyHasher {
    fn finish(&self) -> u64 {
        self.0
    }
    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = self.0.rotate_left(8) ^ u64::from(*byte);
        }
    }
    fn write_u64(&mut self, value: u64) {
        self.0 ^= value;
    }
}

/// A map by region key.
pub(crate) type KeyMap<T> = HashMap<RegionKey, T, BuildHasherDefault<KeyHasher>>;

/// This rank's regions, owned by the polling thread: finding one takes no lock.
#[derive(Default)]
pub(super) struct Regions {
    by_key: KeyMap<Known>,
}

struct Known {
    region: WeakRegion,
    /// Peers that were told that the key is good, and have to be told when it no longer is.
    trusting: Vec<Rank>,
}

impl Regions {
    pub(super) fn insert(&mut self, region: &Region) {
        self.by_key.insert(region.key(), Known { region: region.downgrade(), trusting: Vec::new() });
    }

    /// The memory that a peer names, held while the slice is.
    pub(super) fn find(&self, named: &RemoteSlice) -> Option<Slice> {
        let region = self.by_key.get(&named.key)?.region.upgrade()?;
        let start = usize::try_from(named.offset).ok()?;
        let end = start.checked_add(usize::try_from(named.len).ok()?)?;
        region.slice(start..end).ok()
    }

    /// Notes that `peer` is told that the key is good; returns the region's length.
    pub(super) fn entrust(&mut self, key: RegionKey, peer: Rank) -> Option<u64> {
        let known = self.by_key.get_mut(&key)?;
        let len = known.region.upgrade()?.len();
        if !known.trusting.contains(&peer) {
            known.trusting.push(peer);
        }
        Some(len as u64)
    }

    /// Forgets a region; returns who is to be told.
    pub(super) fn remove(&mut self, key: RegionKey) -> Vec<Rank> {
        self.by_key.remove(&key).map(|known| known.trusting).unwrap_or_default()
    }
}

/// Hears from any thread that regions are gone.
pub(super) struct Releases {
    keys: Mutex<Vec<RegionKey>>,
    any: AtomicBool,
    shared: std::sync::Weak<Shared>,
}

impl Releases {
    pub(super) fn new(shared: std::sync::Weak<Shared>) -> Self {
        Self { keys: Mutex::new(Vec::new()), any: AtomicBool::new(false), shared }
    }

    /// Whether [`Releases::take`] would give something.
    pub(super) fn any(&self) -> bool {
        // Acquire: pairs with the release in `released`; the lock orders the keys themselves.
        self.any.load(Ordering::Acquire)
    }

    /// The keys released since the last call.
    pub(super) fn take(&self) -> Vec<RegionKey> {
        // Release/acquire as in `any`; cleared before taking, so a key that comes in between is
        // seen next time.
        self.any.swap(false, Ordering::AcqRel);
        std::mem::take(&mut *super::shared::lock(&self.keys))
    }
}

impl Registry for Releases {
    fn released(&self, key: RegionKey) {
        super::shared::lock(&self.keys).push(key);
        // Release: pairs with the acquire in `any`.
        self.any.store(true, Ordering::Release);
        if let Some(shared) = self.shared.upgrade() {
            shared.bell.ring();
        }
    }
}

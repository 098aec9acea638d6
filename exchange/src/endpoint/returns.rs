//! The counters of returned leases at the holder's end, where messages carry them to the owner.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use pleach_transport::mutex::lock;

use crate::lease::ReturnCounters;

/// Counters that the owner cannot read: it is told each change.
pub(crate) struct ReturnMessages {
    counters: Box<[AtomicU64]>,
    /// The slots whose counters have changed and were not told.
    changed: Mutex<Vec<u32>>,
}

impl ReturnMessages {
    pub(crate) fn new(slots: u32) -> Self {
        let counters = (0..slots).map(|_| AtomicU64::new(0)).collect();
        Self { counters, changed: Mutex::new(Vec::new()) }
    }

    /// The counters that have changed since the last call, by slot.
    pub(crate) fn take_changed(&self) -> Vec<(u32, u64)> {
        let changed = std::mem::take(&mut *lock(&self.changed));
        changed.into_iter().map(|slot| (slot, self.load(slot))).collect()
    }
}

impl ReturnCounters for ReturnMessages {
    fn store(&self, slot: u32, count: u64) {
        let Some(counter) = self.counters.get(slot as usize) else { return };
        // Release: pairs with the acquire in `load`.
        counter.store(count, Ordering::Release);
        lock(&self.changed).push(slot);
    }

    fn load(&self, slot: u32) -> u64 {
        self.counters.get(slot as usize).map_or(0, |counter| counter.load(Ordering::Acquire))
    }
}

//! The counters of returned leases at the holder's end. The owner reads them in memory of the
//! holder once regions are shared; until then messages carry them.
//!
//! **Invariant:** each return reaches the owner in one of the two ways.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use pleach_transport::mutex::lock;

use super::regions::StatusPage;
use crate::lease::ReturnCounters;

/// See the module.
pub(crate) struct Returns {
    counters: Box<[AtomicU64]>,
    way: Mutex<ReturnWay>,
}

enum ReturnWay {
    /// The slots whose counters have changed and were not told.
    Messages(Vec<u32>),
    /// The owner reads this page.
    Page(Arc<StatusPage>),
}

impl Returns {
    pub(crate) fn new(slots: u32) -> Self {
        let counters = (0..slots).map(|_| AtomicU64::new(0)).collect();
        Self { counters, way: Mutex::new(ReturnWay::Messages(Vec::new())) }
    }

    /// The counters that the owner is to be told, by slot.
    pub(crate) fn take_changed(&self) -> Vec<(u32, u64)> {
        let changed = match &mut *lock(&self.way) {
            ReturnWay::Messages(changed) => std::mem::take(changed),
            ReturnWay::Page(_) => Vec::new(),
        };
        changed.into_iter().map(|slot| (slot, self.load(slot))).collect()
    }

    /// From now on the owner reads the counters in this page. Returns those that it is to be told
    /// once more.
    pub(crate) fn share(&self, page: Arc<StatusPage>) -> Vec<(u32, u64)> {
        let mut way = lock(&self.way);
        for slot in 0..self.counters.len() as u32 {
            match self.load(slot) {
                0 => {}
                count => page.store_counter(slot, count),
            }
        }
        match std::mem::replace(&mut *way, ReturnWay::Page(page)) {
            ReturnWay::Messages(changed) => changed.into_iter().map(|slot| (slot, self.load(slot))).collect(),
            ReturnWay::Page(_) => Vec::new(),
        }
    }
}

impl ReturnCounters for Returns {
    fn store(&self, slot: u32, count: u64) {
        let Some(counter) = self.counters.get(slot as usize) else { return };
        // Under the lock, so that none is missed when the way changes.
        let mut way = lock(&self.way);
        // Release: pairs with the acquire in `load`.
        counter.store(count, Ordering::Release);
        match &mut *way {
            ReturnWay::Messages(changed) => changed.push(slot),
            ReturnWay::Page(page) => page.store_counter(slot, count),
        }
    }

    fn load(&self, slot: u32) -> u64 {
        self.counters.get(slot as usize).map_or(0, |counter| counter.load(Ordering::Acquire))
    }
}

//! Regions whose last handle is gone. Any thread adds them; the device forgets them and tells its
//! peers where they count on it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, Weak};

use crate::device::Wake;
use crate::mutex::lock;
use crate::region::{RegionKey, Registry};

/// See the module.
pub(crate) struct ReleasedRegions {
    keys: Mutex<Vec<RegionKey>>,
    has_any: AtomicBool,
    /// Wakes the device, while it exists.
    wake_source: Weak<dyn Wake>,
}

impl ReleasedRegions {
    pub(super) fn new(wake_source: Weak<dyn Wake>) -> Self {
        Self { keys: Mutex::new(Vec::new()), has_any: AtomicBool::new(false), wake_source }
    }

    /// Whether [`ReleasedRegions::take`] returns a key. One load: for polls.
    pub(crate) fn has_any(&self) -> bool {
        // Acquire: pairs with the release in `released`; the lock orders the keys themselves.
        self.has_any.load(Ordering::Acquire)
    }

    /// The keys released since the last call.
    pub(crate) fn take(&self) -> Vec<RegionKey> {
        let mut keys = lock(&self.keys);
        // Release: under the lock, so it never hides a key that is still there.
        self.has_any.store(false, Ordering::Release);
        std::mem::take(&mut *keys)
    }
}

impl Registry for ReleasedRegions {
    fn released(&self, key: RegionKey) {
        let mut keys = lock(&self.keys);
        keys.push(key);
        // Release: pairs with the acquire in `has_any`.
        self.has_any.store(true, Ordering::Release);
        drop(keys);
        if let Some(wake_source) = self.wake_source.upgrade() {
            wake_source.wake();
        }
    }
}

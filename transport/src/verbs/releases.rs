//! Regions whose last handle is gone: told from any thread, forgotten by the device.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use crate::region::{RegionKey, Registry};

/// Keys of regions whose last handle is gone.
#[derive(Default)]
pub(super) struct Releases {
    keys: Mutex<Vec<RegionKey>>,
    any: AtomicBool,
}

impl Releases {
    /// One load: for the busy way.
    pub(super) fn has_any(&self) -> bool {
        // Acquire: pairs with the release in `released`.
        self.any.load(Ordering::Acquire)
    }

    pub(super) fn take(&self) -> Vec<RegionKey> {
        let mut keys = self.keys.lock().unwrap_or_else(PoisonError::into_inner);
        // Release: under the lock, so it never hides a key that is still there.
        self.any.store(false, Ordering::Release);
        std::mem::take(&mut *keys)
    }
}

impl Registry for Releases {
    fn released(&self, key: RegionKey) {
        self.keys.lock().unwrap_or_else(PoisonError::into_inner).push(key);
        // Release: pairs with the acquire in `has_any`.
        self.any.store(true, Ordering::Release);
    }
}

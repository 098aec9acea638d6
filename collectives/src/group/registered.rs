//! Memory of the caller that a group registers, so that calls on its elements need no copy.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use pleach_transport::{Memory, Slice, clock};

use super::Group;
use super::error::CollectiveError;

/// Memory that a group has registered. Calls name its elements by
/// [`RawData::registered`](super::RawData::registered). Clones are handles of one registration.
#[derive(Clone)]
pub struct Registered {
    slice: Slice,
    group: u64,
}

impl fmt::Debug for Registered {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "Registered({} bytes)", self.slice.len())
    }
}

impl Registered {
    /// The addresses of its bytes.
    #[must_use]
    pub fn addresses(&self) -> Range<usize> {
        let base = self.slice.as_ptr() as usize;
        base..base + self.slice.len()
    }

    /// Its memory from this byte on, and the number of the group that has registered it.
    pub(crate) fn from(&self, first: usize) -> Option<(Slice, u64)> {
        Some((self.slice.slice(first..self.slice.len()).ok()?, self.group))
    }
}

impl Group {
    /// Registers memory of the caller. The group holds the memory until all handles are dropped and
    /// no call uses the memory.
    ///
    /// # Errors
    ///
    /// The fabric cannot reach this memory, or the group works on a GPU's memory.
    pub fn register(&self, memory: Arc<dyn Memory>) -> Result<Registered, CollectiveError> {
        self.expect_own_process()?;
        self.expect_host()?;
        Ok(Registered { slice: self.registered(memory)?, group: self.shared.number })
    }

    /// Drops a handle and waits until the group holds the memory no longer, at most `limit`.
    /// Returns whether that is so. Other handles of the registration, other owners of the memory
    /// and calls under way hold it too.
    #[must_use]
    pub fn deregister(&self, registered: Registered, limit: Duration) -> bool {
        let memory = Arc::downgrade(registered.slice.region().memory());
        drop(registered);
        let is_free = || memory.strong_count() == 0;
        if is_free() || self.expect_own_process().is_err() {
            return is_free();
        }
        let driver = &self.shared.driver;
        let until = clock::now() + limit;
        driver.drive(driver.lock(), until, |_| is_free().then_some(())).is_some()
    }
}

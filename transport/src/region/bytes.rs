//! The bytes of a slice: their address, and copies by this process.

use std::ptr::NonNull;
use std::sync::Arc;

use super::{LentSlice, Slice};
use crate::memory::{Space, shared_bytes};

impl Slice {
    /// Copies `bytes` over the slice's first bytes, as a transfer would: concurrent copies of other
    /// threads give a mixture of both.
    ///
    /// # Panics
    ///
    /// When `bytes` is longer than the slice, or the slice is not host memory: the caller's check
    /// is missing.
    pub fn store(&self, bytes: &[u8]) {
        self.assert_on_host();
        assert!(bytes.len() <= self.len(), "{} bytes into a slice of {}", bytes.len(), self.len());
        // SAFETY: the slice lies inside its region, whose memory is alive and writable.
        unsafe { shared_bytes::store(self.as_ptr(), bytes) }
    }

    /// Copies the slice's first bytes out, as a transfer would; see [`Slice::store`].
    ///
    /// # Panics
    ///
    /// When `bytes` is longer than the slice, or the slice is not host memory.
    pub fn load(&self, bytes: &mut [u8]) {
        self.assert_on_host();
        assert!(bytes.len() <= self.len(), "{} bytes out of a slice of {}", bytes.len(), self.len());
        // SAFETY: as in `store`, and readable.
        unsafe { shared_bytes::load(self.as_ptr(), bytes) }
    }

    fn assert_on_host(&self) {
        assert_eq!(self.region().memory().space(), Space::Host, "a GPU's memory is copied by the GPU");
    }

    /// A copy of the slice's bytes.
    #[must_use]
    pub fn to_vec(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.len()];
        self.load(&mut bytes);
        bytes
    }

    /// Address of the slice's first byte; valid while the slice lives.
    #[must_use]
    #[inline]
    pub fn as_ptr(&self) -> *mut u8 {
        // SAFETY: the offset lies inside the region (checked when the slice was made).
        unsafe { self.region().base().as_ptr().add(self.offset()) }
    }
}

// SAFETY: addresses; the lender vouches for the bytes (`Slice::lend`), which are Send + Sync.
unsafe impl Send for LentSlice {}
// SAFETY: as above.
unsafe impl Sync for LentSlice {}

impl Slice {
    /// The slice without a handle of its region.
    ///
    /// # Safety
    ///
    /// While the result or a copy of it is used, a handle of this slice's region exists.
    #[must_use]
    #[inline]
    pub unsafe fn lend(&self) -> LentSlice {
        LentSlice::new(self)
    }
}

impl LentSlice {
    /// The slice, with a handle of its region.
    #[must_use]
    pub fn hold(&self) -> Slice {
        // SAFETY: the pointer is that of an `Arc` which is held (`Slice::lend`), so its count may
        // grow by one, which the new handle owns.
        let inner = unsafe {
            Arc::increment_strong_count(self.inner);
            Arc::from_raw(self.inner)
        };
        self.of(inner)
    }
}

/// The address of some memory, stored beside the memory.
pub(crate) struct Base(pub(crate) NonNull<u8>);

// SAFETY: an address; its users vouch for their accesses.
unsafe impl Send for Base {}
// SAFETY: as above.
unsafe impl Sync for Base {}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;
    use crate::memory::HostMemory;
    use crate::region::{Mapped, Region, RegionKey, Registry};

    /// Counts the regions that were released. Relaxed: the tests read it after the last drop.
    #[derive(Default)]
    struct Count(AtomicU32);

    impl Registry for Count {
        fn released(&self, _key: RegionKey) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn region(len: usize) -> (Region, Arc<Count>) {
        let count = Arc::new(Count::default());
        (Region::new(HostMemory::new(len), RegionKey(1), count.clone()), count)
    }

    fn released(count: &Count) -> u32 {
        count.0.load(Ordering::Relaxed)
    }

    #[test]
    fn the_bytes_live_as_long_as_any_slice_or_mapping_of_them() {
        let (region, count) = region(16);
        let weak = region.downgrade();
        let part = region.slice(4..12).expect("inside");
        drop(region);
        part.store(&[7; 8]);
        let end = part.slice(2..6).expect("inside");
        let base = NonNull::new(end.as_ptr()).expect("an address");
        // SAFETY: the four bytes of the slice, which the mapping holds.
        let mapped = unsafe { Mapped::new(base, 4, Arc::new(end)) };
        drop(part);
        assert_eq!(released(&count), 0);
        mapped.store(1, &[8, 9]);
        let mut bytes = [0; 4];
        mapped.load(0, &mut bytes);
        assert_eq!(bytes, [7, 8, 9, 7]);
        let again = weak.upgrade().expect("the mapping holds it");
        drop(mapped);
        assert_eq!(again.whole().to_vec()[6..10], [7, 8, 9, 7]);
        drop(again);
        assert!(released(&count) == 1 && weak.upgrade().is_none());
    }

    #[test]
    fn a_lent_slice_is_held_again_while_its_region_lives() {
        let (region, count) = region(16);
        let whole = region.whole();
        // SAFETY: `region` outlives what is lent.
        let lent = unsafe { whole.lend() };
        drop(whole);
        let part = lent.part(4..12).expect("inside").first(100).first(3);
        assert!(lent.part(4..17).is_none() && lent.part(2..usize::MAX).is_none());
        let held = part.hold();
        drop(region);
        held.store(&[1, 2, 3]);
        assert_eq!((held.offset(), held.to_vec()), (4, vec![1, 2, 3]));
        assert_eq!(released(&count), 0);
        drop(held);
        assert_eq!(released(&count), 1);
    }

    #[test]
    fn threads_that_store_and_load_the_same_bytes_see_a_mixture_and_nothing_beside_it() {
        let (region, _) = region(48);
        let middle = region.slice(5..40).expect("inside");
        std::thread::scope(|scope| {
            for byte in [1, 2] {
                let middle = &middle;
                scope.spawn(move || middle.store(&[byte; 35]));
            }
            assert!(middle.to_vec().iter().all(|byte| *byte <= 2));
        });
        let all = region.whole().to_vec();
        assert!(all[5..40].iter().all(|byte| matches!(byte, 1 | 2)), "{all:?}");
        assert!(all[..5].iter().chain(&all[40..]).all(|byte| *byte == 0), "{all:?}");
    }
}

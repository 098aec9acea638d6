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

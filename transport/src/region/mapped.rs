//! A peer's memory at an address of this process.

use std::fmt;
use std::ops::Deref;
use std::ptr::NonNull;
use std::sync::Arc;

use crate::memory::shared_bytes;

/// Tells whether the owner of mapped memory still shares it.
pub trait Sharing: Send + Sync {
    /// See [`ReadOnlyMapped::is_shared`].
    fn is_shared(&self) -> bool;
}

/// A peer's memory at an address of this process, valid while held. After the peer is lost or
/// severed it keeps its last bytes. When the owner severs a peer it may become zeros: see
/// [`ReadOnlyMapped::is_shared`]. All that reads is of [`ReadOnlyMapped`].
#[derive(Clone)]
pub struct Mapped {
    readable: ReadOnlyMapped,
}

/// A peer's memory at an address of this process, as [`Mapped`], but without a way to write.
#[derive(Clone)]
pub struct ReadOnlyMapped {
    base: NonNull<u8>,
    len: usize,
    /// Whether the host may dereference the address.
    is_on_host: bool,
    _keep: Arc<dyn Send + Sync>,
    /// Absent if the owner cannot take the bytes away.
    sharing: Option<Arc<dyn Sharing>>,
}

impl fmt::Debug for Mapped {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "Mapped({} bytes)", self.len())
    }
}

impl fmt::Debug for ReadOnlyMapped {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "ReadOnlyMapped({} bytes)", self.len())
    }
}

// SAFETY: an address and its owner, which is Send + Sync; access goes through raw pointers under
// the contract.
unsafe impl Send for ReadOnlyMapped {}
// SAFETY: as above.
unsafe impl Sync for ReadOnlyMapped {}

impl Deref for Mapped {
    type Target = ReadOnlyMapped;

    fn deref(&self) -> &ReadOnlyMapped {
        &self.readable
    }
}

impl Mapped {
    /// Makes a mapping of memory that `keep` keeps alive. For backends.
    ///
    /// # Safety
    ///
    /// `len` bytes at `base` stay readable and writable while `keep` lives.
    pub unsafe fn new(base: NonNull<u8>, len: usize, keep: Arc<dyn Send + Sync>) -> Self {
        // SAFETY: the caller's promise.
        Self { readable: unsafe { ReadOnlyMapped::new(base, len, keep) } }
    }

    /// For backends: GPU memory, at an address for kernels and copies of the GPU alone, kept by
    /// `keep`.
    ///
    /// # Safety
    ///
    /// As of [`Mapped::new`], for kernels and copies of the GPU.
    #[must_use]
    pub unsafe fn on_gpu(base: NonNull<u8>, len: usize, keep: Arc<dyn Send + Sync>) -> Self {
        // SAFETY: the caller's promise. The host does not access the bytes.
        let mut mapped = unsafe { Self::new(base, len, keep) };
        mapped.readable.is_on_host = false;
        mapped
    }

    /// For backends whose owners can take memory back: `sharing` tells whether that happened.
    #[must_use]
    pub fn shared_while(self, sharing: Arc<dyn Sharing>) -> Self {
        Self { readable: self.readable.shared_while(sharing) }
    }

    /// The same bytes without a way to write them.
    #[must_use]
    pub fn into_read_only(self) -> ReadOnlyMapped {
        self.readable
    }

    /// Address of the first byte.
    #[must_use]
    pub fn as_ptr(&self) -> *mut u8 {
        self.readable.base.as_ptr()
    }

    /// Copies `bytes` into the mapping from byte `offset` on.
    ///
    /// # Panics
    ///
    /// When they reach beyond its end: the caller's length check is missing.
    pub fn store(&self, offset: usize, bytes: &[u8]) {
        let into = self.readable.host_address(offset, bytes.len());
        // SAFETY: the range lies inside the mapping, which stays writable while `self` lives (see
        // `Mapped::new`).
        unsafe { shared_bytes::store(into, bytes) }
    }
}

impl ReadOnlyMapped {
    /// Makes a mapping of memory that `keep` keeps alive. For backends.
    ///
    /// # Safety
    ///
    /// `len` bytes at `base` stay readable while `keep` lives.
    pub unsafe fn new(base: NonNull<u8>, len: usize, keep: Arc<dyn Send + Sync>) -> Self {
        Self { base, len, is_on_host: true, _keep: keep, sharing: None }
    }

    /// For backends whose owners can take memory back: `sharing` tells whether that happened.
    #[must_use]
    pub fn shared_while(mut self, sharing: Arc<dyn Sharing>) -> Self {
        self.sharing = Some(sharing);
        self
    }

    /// Whether the owner still shares the memory. Ask after reading: if true, all bytes that this
    /// thread read before were the owner's. If false, some may be zeros, because the owner has
    /// severed a peer or dropped the region; then use none of them.
    #[must_use]
    pub fn is_shared(&self) -> bool {
        self.sharing.as_ref().is_none_or(|sharing| sharing.is_shared())
    }

    /// Whether the host's processors may access the bytes, or only a GPU.
    #[must_use]
    pub fn is_on_host(&self) -> bool {
        self.is_on_host
    }

    /// Address of the first byte.
    #[must_use]
    pub fn as_ptr(&self) -> *const u8 {
        self.base.as_ptr()
    }

    /// Length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Copies bytes of the mapping from byte `offset` on.
    ///
    /// # Panics
    ///
    /// When they reach beyond its end.
    pub fn load(&self, offset: usize, bytes: &mut [u8]) {
        let from = self.host_address(offset, bytes.len());
        // SAFETY: the range lies inside the mapping, which stays readable while `self` lives.
        unsafe { shared_bytes::load(from, bytes) }
    }

    /// The address of `len` bytes from byte `offset` on, which the host's processors can access.
    fn host_address(&self, offset: usize, len: usize) -> *mut u8 {
        assert!(self.is_on_host, "a GPU's memory is copied by the GPU");
        let inside = offset.checked_add(len).is_some_and(|end| end <= self.len);
        assert!(inside, "{len} bytes at {offset} of a mapping of {}", self.len);
        // SAFETY: inside the mapping.
        unsafe { self.base.as_ptr().add(offset) }
    }
}

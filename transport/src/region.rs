//! Regions: registered memory, and the names by which peers access it.
//!
//! **Invariant:** a region is deregistered when its last handle is dropped; a transfer in flight
//! holds a handle (contract line 7), so no transfer ever touches deregistered memory.

use std::collections::HashMap;
use std::fmt;
use std::hash::{BuildHasherDefault, Hasher};
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::{Arc, Weak};

#[allow(unsafe_code)]
mod bytes;
#[allow(unsafe_code)]
mod mapped;

use self::bytes::Base;
pub use self::mapped::{Mapped, ReadOnlyMapped, Sharing};
use crate::auth::random_bytes;
use crate::memory::Memory;

/// Names a region of some rank. A process that knows the key may read and write the region. Keys
/// are random and live as long as the region; zero names none.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RegionKey(pub u64);

impl RegionKey {
    /// Names no region.
    pub const NONE: Self = Self(0);
}

impl fmt::Debug for RegionKey {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "RegionKey({:016x})", self.0)
    }
}

/// Keys are random: a further hash is not needed.
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

/// Informed when the last handle of a region is dropped. The device that registered it implements
/// this.
pub trait Registry: Send + Sync {
    /// The region of this key has no handle any more; forget the key. Called once, from any thread.
    fn released(&self, key: RegionKey);
}

/// Registered memory. Clones are handles of the same region.
#[derive(Clone)]
pub struct Region {
    inner: Arc<Inner>,
}

pub(crate) struct Inner {
    // A copy of the memory's: an address is needed at every step of every collective.
    base: Base,
    len: usize,
    memory: Arc<dyn Memory>,
    key: RegionKey,
    registry: Arc<dyn Registry>,
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.registry.released(self.key);
    }
}

impl fmt::Debug for Region {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "Region({:?}, {} bytes)", self.inner.key, self.len())
    }
}

impl Region {
    /// For backends: `memory`, known to peers under `key`; `registry` is told when the last handle
    /// is dropped.
    pub fn new(memory: Arc<dyn Memory>, key: RegionKey, registry: Arc<dyn Registry>) -> Self {
        let (base, len) = (Base(memory.base()), memory.len());
        Self { inner: Arc::new(Inner { base, len, memory, key, registry }) }
    }

    /// The key by which peers name it.
    #[must_use]
    #[inline]
    pub fn key(&self) -> RegionKey {
        self.inner.key
    }

    /// Address of the first byte.
    #[must_use]
    #[inline]
    pub fn base(&self) -> NonNull<u8> {
        self.inner.base.0
    }

    /// Length in bytes.
    #[must_use]
    #[inline]
    pub fn len(&self) -> usize {
        self.inner.len
    }

    /// Whether it is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Its memory.
    #[must_use]
    pub fn memory(&self) -> &Arc<dyn Memory> {
        &self.inner.memory
    }

    /// Whether the owner of `registry` registered this region.
    #[must_use]
    pub fn belongs_to(&self, registry: &Arc<dyn Registry>) -> bool {
        Arc::ptr_eq(&self.inner.registry, registry)
    }

    /// A part of the region.
    ///
    /// # Errors
    ///
    /// When the range ends beyond the region or is reversed.
    #[inline]
    pub fn slice(&self, range: Range<usize>) -> Result<Slice, OutOfBounds> {
        if range.start > range.end || range.end > self.len() {
            return Err(OutOfBounds {
                start: range.start as u64,
                end: range.end as u64,
                len: self.len() as u64,
            });
        }
        Ok(Slice { region: self.clone(), offset: range.start, len: range.end - range.start })
    }

    /// The whole region.
    #[must_use]
    pub fn whole(&self) -> Slice {
        Slice { region: self.clone(), offset: 0, len: self.len() }
    }

    /// The whole region, as a peer names it.
    #[must_use]
    #[inline]
    pub fn remote(&self) -> RemoteSlice {
        RemoteSlice { key: self.key(), offset: 0, len: self.len() as u64 }
    }

    /// For backends: a handle that does not keep the region alive.
    #[must_use]
    pub fn downgrade(&self) -> WeakRegion {
        WeakRegion(Arc::downgrade(&self.inner))
    }
}

/// A weak handle of a region, for a device's table of keys.
#[derive(Clone)]
pub struct WeakRegion(Weak<Inner>);

impl fmt::Debug for WeakRegion {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("WeakRegion(..)")
    }
}

impl WeakRegion {
    /// A handle, unless the last one is dropped already.
    #[must_use]
    pub fn upgrade(&self) -> Option<Region> {
        self.0.upgrade().map(|inner| Region { inner })
    }
}

/// A part of a region of this process. Holds the region.
#[derive(Clone, Debug)]
pub struct Slice {
    region: Region,
    offset: usize,
    len: usize,
}

impl Slice {
    /// Its region.
    #[must_use]
    #[inline]
    pub fn region(&self) -> &Region {
        &self.region
    }

    /// Offset in the region, in bytes.
    #[must_use]
    #[inline]
    pub fn offset(&self) -> usize {
        self.offset
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

    /// A part of the slice.
    ///
    /// # Errors
    ///
    /// When the range ends beyond the slice or is reversed.
    #[inline]
    pub fn slice(&self, range: Range<usize>) -> Result<Self, OutOfBounds> {
        if range.start > range.end || range.end > self.len {
            return Err(OutOfBounds {
                start: range.start as u64,
                end: range.end as u64,
                len: self.len as u64,
            });
        }
        Ok(Self {
            region: self.region.clone(),
            offset: self.offset + range.start,
            len: range.end - range.start,
        })
    }

    /// The same bytes, as a peer names them.
    #[must_use]
    #[inline]
    pub fn remote(&self) -> RemoteSlice {
        RemoteSlice { key: self.region.key(), offset: self.offset as u64, len: self.len as u64 }
    }
}

/// A slice whose region another value holds: like a slice, but without a handle.
///
/// Taking and dropping a handle are two atomic additions, which is much for an operation of a tenth
/// of a microsecond.
#[derive(Clone, Copy, Debug)]
pub struct LentSlice {
    inner: *const Inner,
    remote: RemoteSlice,
    address: *mut u8,
}

impl LentSlice {
    pub(crate) fn new(slice: &Slice) -> Self {
        Self { inner: Arc::as_ptr(&slice.region.inner), remote: slice.remote(), address: slice.as_ptr() }
    }

    /// The slice, given a handle of its region.
    pub(crate) fn of(self, inner: Arc<Inner>) -> Slice {
        Slice { region: Region { inner }, offset: self.remote.offset as usize, len: self.remote.len as usize }
    }

    /// Its first `bytes` bytes, or all of it when it is shorter.
    #[must_use]
    #[inline]
    pub fn first(self, bytes: usize) -> Self {
        Self { remote: RemoteSlice { len: self.remote.len.min(bytes as u64), ..self.remote }, ..self }
    }

    /// A part of it; `None` when the range does not lie inside.
    #[must_use]
    #[inline]
    pub fn part(self, range: Range<usize>) -> Option<Self> {
        let len = range.end.checked_sub(range.start).filter(|_| range.end <= self.len())? as u64;
        let remote = RemoteSlice { offset: self.remote.offset + range.start as u64, len, ..self.remote };
        Some(Self { remote, address: self.address.wrapping_add(range.start), ..self })
    }

    /// Address of the first byte.
    #[must_use]
    #[inline]
    pub fn as_ptr(&self) -> *mut u8 {
        self.address
    }

    /// Length in bytes.
    #[must_use]
    #[inline]
    pub fn len(&self) -> usize {
        self.remote.len as usize
    }

    /// Whether it is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.remote.len == 0
    }

    /// The same bytes, as a peer names them.
    #[must_use]
    pub fn remote(&self) -> RemoteSlice {
        self.remote
    }
}

/// A part of a peer's region: plain data that may be sent. Only its owner knows whether it exists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RemoteSlice {
    /// The owner's region.
    pub key: RegionKey,
    /// Offset in the region, in bytes.
    pub offset: u64,
    /// Length in bytes.
    pub len: u64,
}

impl RemoteSlice {
    /// A part of it.
    ///
    /// # Errors
    ///
    /// When the range ends beyond the slice or is reversed.
    #[inline]
    pub fn slice(&self, range: Range<u64>) -> Result<Self, OutOfBounds> {
        let is_inside = range.start <= range.end && range.end <= self.len;
        // The offset that a peer gives may be anything, and the sum may overflow.
        let Some(offset) = self.offset.checked_add(range.start).filter(|_| is_inside) else {
            return Err(OutOfBounds { start: range.start, end: range.end, len: self.len });
        };
        Ok(Self { key: self.key, offset, len: range.end - range.start })
    }
}

/// A range that does not lie inside its whole.
#[derive(Clone, Copy, pleach_derive::ErrorDebug, PartialEq, Eq, thiserror::Error)]
#[error("bytes {start}..{end} do not lie inside {len} bytes")]
pub struct OutOfBounds {
    /// First byte asked for.
    pub start: u64,
    /// One past the last byte asked for.
    pub end: u64,
    /// Length of the whole.
    pub len: u64,
}

/// A new random key, so that a stale or invented key misses.
///
/// # Panics
///
/// When the kernel has no random bytes, which cannot be after boot.
pub(crate) fn random_key() -> RegionKey {
    // Zero is reserved for "no region".
    RegionKey(u64::from_ne_bytes(random_bytes()).max(1))
}

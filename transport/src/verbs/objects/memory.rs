//! Protection domains, and memory regions.

use std::ffi::c_int;
use std::io;
use std::os::fd::AsRawFd;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::{Context, made};
use crate::memory::Memory;
use crate::verbs::limits::{CreateError, LimitKind, LimitReservation, Limits};
use crate::verbs::sys;

/// A protection domain: memory regions and queue pairs of one domain can be used together. It
/// enforces the limits of the device, so that an error names the limit.
pub(in crate::verbs) struct ProtectionDomain {
    pub(super) raw: NonNull<sys::ibv_pd>,
    pub(super) context: Arc<Context>,
    pub(super) limits: Limits,
    /// Regions registered so far. Relaxed, as the next field: only counted.
    registered: AtomicU64,
    deregistered: AtomicU64,
}

// SAFETY: as for `Context`.
unsafe impl Send for ProtectionDomain {}
// SAFETY: as above.
unsafe impl Sync for ProtectionDomain {}

impl ProtectionDomain {
    pub(in crate::verbs) fn new(context: &Arc<Context>, limits: Limits) -> io::Result<Arc<Self>> {
        // SAFETY: an open context.
        let raw = made(unsafe { (context.library.alloc_pd)(context.raw.as_ptr()) })?;
        let (registered, deregistered) = (AtomicU64::new(0), AtomicU64::new(0));
        Ok(Arc::new(Self { raw, context: Arc::clone(context), limits, registered, deregistered }))
    }

    /// The numbers of regions registered and deregistered so far.
    pub(in crate::verbs) fn registrations(&self) -> (u64, u64) {
        // Relaxed: see the fields.
        (self.registered.load(Ordering::Relaxed), self.deregistered.load(Ordering::Relaxed))
    }
}

impl Drop for ProtectionDomain {
    fn drop(&mut self) {
        // SAFETY: regions and queue pairs hold their domain.
        unsafe { (self.context.library.dealloc_pd)(self.raw.as_ptr()) };
    }
}

/// Memory that the device may access.
pub(in crate::verbs) struct MemoryRegion {
    pub(super) raw: NonNull<sys::ibv_mr>,
    domain: Arc<ProtectionDomain>,
    /// Kept as long as it is registered.
    memory: Arc<dyn Memory>,
    _reservation: LimitReservation,
}

// SAFETY: as for `Context`.
unsafe impl Send for MemoryRegion {}

impl MemoryRegion {
    /// Registers memory of at least one byte, which peers address from `iova` on; as a dma-buf if
    /// it is one.
    pub(in crate::verbs) fn new(
        domain: &Arc<ProtectionDomain>,
        memory: Arc<dyn Memory>,
        iova: u64,
        access: u32,
    ) -> Result<Self, CreateError> {
        if memory.dma_buf().is_some() && domain.context.library.reg_dmabuf_mr.is_some() {
            return Self::by_dma_buf(domain, memory, iova, access);
        }
        Self::by_address(domain, memory, iova, access)
    }

    /// Registers a dma-buf.
    pub(in crate::verbs) fn by_dma_buf(
        domain: &Arc<ProtectionDomain>,
        memory: Arc<dyn Memory>,
        iova: u64,
        access: u32,
    ) -> Result<Self, CreateError> {
        let reservation = Self::expect_room(domain, memory.len())?;
        let without = || io::Error::new(io::ErrorKind::Unsupported, "libibverbs registers no dma-bufs");
        let register = domain.context.library.reg_dmabuf_mr.ok_or_else(without)?;
        let without = || io::Error::new(io::ErrorKind::Unsupported, "it is no dma-buf");
        let part = memory.dma_buf().ok_or_else(without)?;
        let (file, len) = (part.file.as_raw_fd(), memory.len());
        // SAFETY: an open file, which the kernel holds from then on; the memory that it is of is
        // kept longer than the registration.
        let raw =
            unsafe { register(domain.raw.as_ptr(), part.offset, len, iova, file, older(access) as c_int) };
        Self::registered(domain, memory, raw, reservation)
    }

    /// Registers memory by its address.
    pub(in crate::verbs) fn by_address(
        domain: &Arc<ProtectionDomain>,
        memory: Arc<dyn Memory>,
        iova: u64,
        access: u32,
    ) -> Result<Self, CreateError> {
        let reservation = Self::expect_room(domain, memory.len())?;
        let library = domain.context.library;
        let (base, len) = (memory.base().as_ptr().cast(), memory.len());
        // SAFETY: the memory has `len` bytes at `base` and is kept longer than the registration.
        let raw = unsafe {
            match library.reg_mr_iova2 {
                Some(register) => register(domain.raw.as_ptr(), base, len, iova, access),
                None => (library.reg_mr_iova)(domain.raw.as_ptr(), base, len, iova, older(access) as c_int),
            }
        };
        Self::registered(domain, memory, raw, reservation)
    }

    fn expect_room(domain: &ProtectionDomain, bytes: usize) -> Result<LimitReservation, CreateError> {
        domain.limits.allow(LimitKind::RegionBytes, bytes as u64)?;
        Ok(domain.limits.reserve(LimitKind::Regions)?)
    }

    fn registered(
        domain: &Arc<ProtectionDomain>,
        memory: Arc<dyn Memory>,
        raw: *mut sys::ibv_mr,
        reservation: LimitReservation,
    ) -> Result<Self, CreateError> {
        let raw = made(raw)?;
        // Relaxed: see the field.
        domain.registered.fetch_add(1, Ordering::Relaxed);
        Ok(Self { raw, domain: Arc::clone(domain), memory, _reservation: reservation })
    }

    pub(in crate::verbs) fn local_key(&self) -> u32 {
        // SAFETY: a live region, whose keys do not change.
        unsafe { self.raw.as_ref().lkey }
    }

    pub(in crate::verbs) fn remote_key(&self) -> u32 {
        // SAFETY: as above.
        unsafe { self.raw.as_ref().rkey }
    }

    pub(in crate::verbs) fn memory(&self) -> &Arc<dyn Memory> {
        &self.memory
    }
}

/// Removes the flags that functions older than `ibv_reg_mr_iova2` do not know.
fn older(access: u32) -> u32 {
    access & !sys::IBV_ACCESS_RELAXED_ORDERING
}

impl Drop for MemoryRegion {
    fn drop(&mut self) {
        // SAFETY: a live region; peers that still use its key get an error.
        unsafe { (self.domain.context.library.dereg_mr)(self.raw.as_ptr()) };
        // Relaxed: see the field.
        self.domain.deregistered.fetch_add(1, Ordering::Relaxed);
    }
}

//! Memory of a GPU that pleach allocates.
//!
//! **Invariant:** addresses are reserved once and freed at drop; the allocation behind them may be
//! replaced by a private copy ([`CudaMemory::detach`]), after which no other process reaches them:
//! a peer's own mapping keeps the old one. That is what a page of a memfd goes through when a peer
//! is severed (contract line 9), with the same result. Where the copy cannot be had, nothing is
//! behind the addresses any more: the bytes are lost, and [`CudaMemory::load`] says so.

use std::any::Any;
use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use cudarc::driver::sys;

use super::dma_buf::DmaBuf;
use super::driver::CudaError;
use super::gpu::{Gpu, GpuId};
use super::stream::{Mark, Stream};
use crate::memory::{self, Memory, Share, Space};

/// How long the copy of one allocation may take when it is detached: 80 GB take 0.1 s.
const DETACH_LIMIT: Duration = Duration::from_secs(5);

/// Zeroed memory of a GPU.
pub struct CudaMemory {
    gpu: Arc<Gpu>,
    range: Range,
    len: usize,
    /// What is behind the addresses. Replaced under the lock.
    allocation: Mutex<Option<Allocation>>,
    file: Option<OwnedFd>,
    /// Made when a NIC is first to reach the memory. It names the first allocation.
    dma_buf: OnceLock<Result<DmaBuf, CudaError>>,
    /// Relaxed: set once, under the lock; who shares the memory asks its own directory too.
    is_detached: AtomicBool,
    /// Nothing is behind the addresses. Relaxed: as above.
    is_lost: AtomicBool,
}

impl fmt::Debug for CudaMemory {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "CudaMemory({} bytes on GPU {})", self.len, self.gpu.ordinal())
    }
}

impl CudaMemory {
    /// `len` zeroed bytes.
    ///
    /// # Errors
    ///
    /// The GPU has too little memory, or what the driver says.
    pub fn new(gpu: &Arc<Gpu>, len: usize) -> Result<Arc<Self>, CudaError> {
        let range = Range::reserve(gpu, len)?;
        let allocation = Allocation::new(gpu, range.bytes)?;
        range.map(&allocation)?;
        let stream = Stream::new(gpu)?;
        // SAFETY: all of the range is mapped for this GPU, and nobody else knows it yet.
        unsafe { stream.fill(range.base.as_ptr(), 0, range.bytes)? };
        stream.settle()?;
        let file = gpu.can_share().then(|| allocation.export()).transpose()?;
        Ok(Arc::new(Self {
            gpu: gpu.clone(),
            range,
            len,
            allocation: Mutex::new(Some(allocation)),
            file,
            dma_buf: OnceLock::new(),
            is_detached: AtomicBool::new(false),
            is_lost: AtomicBool::new(false),
        }))
    }

    /// Whose it is.
    #[must_use]
    pub fn gpu(&self) -> &Arc<Gpu> {
        &self.gpu
    }

    /// The memory as a dma-buf, which lives as long as it.
    ///
    /// # Errors
    ///
    /// See [`DmaBuf::new`]; the answer is the same each time.
    pub fn as_dma_buf(&self) -> Result<&DmaBuf, CudaError> {
        self.dma_buf.get_or_init(|| DmaBuf::new(self)).as_ref().map_err(CudaError::clone)
    }

    /// Copies host bytes into it from byte `offset` on; returns when they are there.
    ///
    /// # Errors
    ///
    /// Not within `limit`, or what the driver says.
    ///
    /// # Panics
    ///
    /// When they reach beyond its end: the caller's length check is missing.
    pub fn store(&self, offset: usize, bytes: &[u8], limit: Duration) -> Result<(), CudaError> {
        let at = self.at(offset, bytes.len());
        self.check_is_there()?;
        // SAFETY: `at` found the bytes inside; both are borrowed until this returns.
        unsafe { copy(&self.gpu, bytes.as_ptr(), at, bytes.len(), limit) }
    }

    /// Copies bytes of it from byte `offset` on; returns when they are here.
    ///
    /// # Errors
    ///
    /// Not within `limit`, or what the driver says.
    ///
    /// # Panics
    ///
    /// When they reach beyond its end.
    pub fn load(&self, offset: usize, bytes: &mut [u8], limit: Duration) -> Result<(), CudaError> {
        let at = self.at(offset, bytes.len());
        self.check_is_there()?;
        // SAFETY: as in `store`.
        unsafe { copy(&self.gpu, at, bytes.as_mut_ptr(), bytes.len(), limit) }
    }

    fn at(&self, offset: usize, len: usize) -> *mut u8 {
        let is_inside = offset.checked_add(len).is_some_and(|end| end <= self.len);
        assert!(is_inside, "{len} bytes at {offset} of {} bytes of GPU memory", self.len);
        self.range.base.as_ptr().wrapping_add(offset)
    }

    fn check_is_there(&self) -> Result<(), CudaError> {
        if self.is_lost.load(Ordering::Relaxed) {
            return Err(CudaError::Lost { ordinal: self.gpu.ordinal(), bytes: self.len });
        }
        Ok(())
    }

    /// Replaces the allocation by a private copy, at the same addresses: afterwards no other
    /// process reaches them, whatever it mapped before. What the GPU is writing there meanwhile may
    /// be lost, so nothing of this process may be under way on the memory.
    ///
    /// Where no copy can be had (the GPU has too little free memory, or has failed) the bytes are
    /// lost: nothing is behind the addresses afterwards, and using the memory is
    /// [`CudaError::Lost`].
    ///
    /// # Errors
    ///
    /// [`CudaError::Late`]: the GPU has not copied within a limit. The memory is not detached, and
    /// other processes may still reach it.
    pub fn detach(&self) -> Result<(), CudaError> {
        let mut allocation = self.allocation.lock().unwrap_or_else(PoisonError::into_inner);
        if self.is_detached.load(Ordering::Relaxed) {
            return Ok(());
        }
        *allocation = self.range.detach(&self.gpu)?;
        self.is_lost.store(allocation.is_none(), Ordering::Relaxed);
        self.is_detached.store(true, Ordering::Relaxed);
        Ok(())
    }

    /// The memory, if it is some of this type.
    #[must_use]
    pub fn of(memory: &dyn Memory) -> Option<&Self> {
        let any: &dyn Any = memory;
        any.downcast_ref()
    }

    /// By what another process of this host maps it ([`super::Imported`]); `None` once it was cut
    /// off from other processes, and where the GPU shares nothing.
    #[must_use]
    pub fn shared(&self) -> Option<SharedAllocation<'_>> {
        let file = self.file.as_ref().filter(|_| !self.is_detached())?;
        Some(SharedAllocation { file: file.as_fd(), bytes: self.range.bytes as u64, gpu: self.gpu.id() })
    }

    /// Whether other processes can no longer reach it.
    #[must_use]
    pub fn is_detached(&self) -> bool {
        self.is_detached.load(Ordering::Relaxed)
    }
}

/// An allocation whose first bytes are a memory's, as another process is told of it.
#[derive(Clone, Copy, Debug)]
pub struct SharedAllocation<'a> {
    /// A descriptor that names it to the driver of another process.
    pub file: BorrowedFd<'a>,
    /// Its length in bytes.
    pub bytes: u64,
    /// Which GPU it is on.
    pub gpu: GpuId,
}

/// Copies `bytes` between places of which one or both are memory of the GPU; returns when they are
/// there.
///
/// # Safety
///
/// So many bytes are readable and writable there until this returns, and nobody else touches the
/// destination.
pub(super) unsafe fn copy(
    gpu: &Arc<Gpu>,
    from: *const u8,
    into: *mut u8,
    bytes: usize,
    limit: Duration,
) -> Result<(), CudaError> {
    let (stream, mut mark) = (Stream::new(gpu)?, Mark::new(gpu)?);
    // SAFETY: by this function's contract.
    unsafe { stream.copy(from, into, bytes)? };
    // Fails only where the GPU has failed, and then it is through with all.
    stream.mark_with(&mut mark)?;
    match mark.wait(limit) {
        // The copy is alone in its stream, so it ends; only then may its memory go back.
        Err(late @ CudaError::Late { .. }) => mark.wait_or_abort().and(Err(late)),
        outcome => outcome,
    }
}

// SAFETY: the addresses are reserved, mapped for the GPU and never change until drop; only
// transfers and kernels that the owner allowed touch them. In `Space::Gpu` nobody dereferences
// them on the host.
unsafe impl Memory for CudaMemory {
    fn base(&self) -> NonNull<u8> {
        self.range.base
    }
    fn len(&self) -> usize {
        self.len
    }
    fn space(&self) -> Space {
        Space::Gpu { ordinal: self.gpu.ordinal() }
    }
    fn share(&self) -> Share<'_> {
        // Other processes map it by the driver: `CudaMemory::shared`.
        Share::Private
    }
    fn dma_buf(&self) -> Option<memory::DmaBuf<'_>> {
        if self.is_detached() {
            return None;
        }
        let named = self.as_dma_buf().ok()?;
        Some(memory::DmaBuf { file: named.file(), offset: named.offset() })
    }
}

/// Addresses of a GPU's, with something mapped behind them once [`Range::map`] was called.
pub(super) struct Range {
    gpu: Arc<Gpu>,
    pub(super) base: NonNull<u8>,
    pub(super) bytes: usize,
    /// Whether something is mapped. Relaxed: changed by the owner alone.
    is_mapped: AtomicBool,
}

// SAFETY: addresses; what is behind them is touched by the GPU alone.
unsafe impl Send for Range {}
// SAFETY: as above.
unsafe impl Sync for Range {}

impl Range {
    /// Room for `len` bytes, which become whole units of the GPU's.
    pub(super) fn reserve(gpu: &Arc<Gpu>, len: usize) -> Result<Self, CudaError> {
        let unit = gpu.granularity_bytes();
        let too_long = CudaError::OutOfMemory { ordinal: gpu.ordinal(), bytes: len };
        let bytes = len.max(1).checked_next_multiple_of(unit).ok_or(too_long.clone())?;
        let _bound = gpu.bind()?;
        let mut address = 0;
        // SAFETY: the context is current; it writes one address. No alignment, no wish for a place,
        // no flags.
        let code = unsafe { sys::cuMemAddressReserve(&mut address, bytes, 0, 0, 0) };
        gpu.check_room("cuMemAddressReserve", code, bytes)?;
        let base = NonNull::new(address as *mut u8).ok_or(too_long)?;
        Ok(Self { gpu: gpu.clone(), base, bytes, is_mapped: AtomicBool::new(false) })
    }

    /// Puts the allocation behind the addresses, for kernels of the range's GPU.
    pub(super) fn map(&self, allocation: &Allocation) -> Result<(), CudaError> {
        let _bound = self.gpu.bind()?;
        let address = self.base.as_ptr() as u64;
        // SAFETY: addresses reserved by this value with nothing behind them; the allocation is
        // alive, and the mapping keeps it.
        let code = unsafe { sys::cuMemMap(address, self.bytes, 0, allocation.handle, 0) };
        self.gpu.check("cuMemMap", code)?;
        self.is_mapped.store(true, Ordering::Relaxed);
        let access = self.gpu.access();
        // SAFETY: mapped just now; one description is read.
        let code = unsafe { sys::cuMemSetAccess(address, self.bytes, &access, 1) };
        self.gpu.check("cuMemSetAccess", code)
    }

    fn unmap(&self) -> Result<(), CudaError> {
        if self.is_mapped.swap(false, Ordering::Relaxed) {
            let _bound = self.gpu.bind()?;
            // SAFETY: all of it was mapped by one call; who knew the addresses for longer than the
            // owner broke its contract.
            let code = unsafe { sys::cuMemUnmap(self.base.as_ptr() as u64, self.bytes) };
            self.gpu.check("cuMemUnmap", code)?;
        }
        Ok(())
    }

    /// Puts a new allocation with the same bytes behind the addresses, in place of the one that is
    /// there.
    pub(super) fn replace_by_copy(&self, gpu: &Arc<Gpu>) -> Result<Allocation, CudaError> {
        let copy = Allocation::new(gpu, self.bytes)?;
        let aside = Self::reserve(gpu, self.bytes)?;
        aside.map(&copy)?;
        let stream = Stream::new(gpu)?;
        // SAFETY: both ranges are mapped and so long; nothing of this process touches either now.
        unsafe { stream.copy(self.base.as_ptr(), aside.base.as_ptr(), self.bytes)? };
        if let Err(error) = stream.mark().and_then(|mark| mark.wait(DETACH_LIMIT)) {
            // The copy may still be under way, so what it writes to stays.
            std::mem::forget((aside, copy));
            return Err(error);
        }
        drop(aside);
        self.unmap()?;
        self.map(&copy)?;
        Ok(copy)
    }

    /// As [`Range::replace_by_copy`], or takes away what is behind the addresses where no copy can
    /// be had: then there is no allocation.
    ///
    /// # Errors
    ///
    /// [`CudaError::Late`]: the GPU has not copied within [`DETACH_LIMIT`].
    pub(super) fn detach(&self, gpu: &Arc<Gpu>) -> Result<Option<Allocation>, CudaError> {
        match self.replace_by_copy(gpu) {
            Ok(copy) => Ok(Some(copy)),
            Err(late @ CudaError::Late { .. }) => Err(late),
            Err(error) => {
                let (bytes, ordinal) = (self.bytes, gpu.ordinal());
                tracing::error!(%error, bytes, ordinal, "the bytes of a GPU buffer that peers shared are lost");
                if let Err(error) = self.unmap() {
                    // Such a GPU does nothing more for this process, which therefore sees nothing
                    // of what others write.
                    tracing::error!(%error, ordinal, "they could not be unmapped");
                }
                Ok(None)
            }
        }
    }
}

impl Drop for Range {
    fn drop(&mut self) {
        let freed = self.unmap().and_then(|()| {
            let _bound = self.gpu.bind()?;
            // SAFETY: reserved by this value, with nothing behind them any more.
            let code = unsafe { sys::cuMemAddressFree(self.base.as_ptr() as u64, self.bytes) };
            self.gpu.check("cuMemAddressFree", code)
        });
        if let Err(error) = freed {
            tracing::warn!(%error, "addresses of GPU memory could not be freed");
        }
    }
}

/// Memory of a GPU without an address, of this process or another one.
pub(super) struct Allocation {
    gpu: Arc<Gpu>,
    handle: sys::CUmemGenericAllocationHandle,
}

impl Allocation {
    fn new(gpu: &Arc<Gpu>, bytes: usize) -> Result<Self, CudaError> {
        let _bound = gpu.bind()?;
        let (mut handle, properties) = (0, gpu.properties());
        // SAFETY: it reads the properties and writes one handle; no flags.
        let code = unsafe { sys::cuMemCreate(&mut handle, bytes, &properties, 0) };
        gpu.check_room("cuMemCreate", code, bytes)?;
        Ok(Self { gpu: gpu.clone(), handle })
    }

    /// A file descriptor by which other processes import it.
    fn export(&self) -> Result<OwnedFd, CudaError> {
        let mut file: i32 = -1;
        let kind = sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
        // SAFETY: for this kind of handle it writes one int.
        let code = unsafe { sys::cuMemExportToShareableHandle((&raw mut file).cast(), self.handle, kind, 0) };
        self.gpu.check("cuMemExportToShareableHandle", code)?;
        // SAFETY: a new descriptor, which is ours.
        let file = unsafe { OwnedFd::from_raw_fd(file) };
        close_on_exec(&file);
        Ok(file)
    }

    /// What another process exported.
    pub(super) fn import(gpu: &Arc<Gpu>, file: BorrowedFd<'_>) -> Result<Self, CudaError> {
        use std::os::fd::AsRawFd;
        let _bound = gpu.bind()?;
        let mut handle = 0;
        let kind = sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
        // For this kind of handle the pointer is the descriptor itself.
        let name = std::ptr::without_provenance_mut(file.as_raw_fd() as usize);
        // SAFETY: the driver looks at the descriptor, which is open, and keeps none of it; it
        // writes one handle.
        let code = unsafe { sys::cuMemImportFromShareableHandle(&mut handle, name, kind) };
        gpu.check("cuMemImportFromShareableHandle", code)?;
        Ok(Self { gpu: gpu.clone(), handle })
    }
}

/// Keeps a descriptor of the driver's from programs that this process starts: it stands for memory
/// of the GPU, which they would keep allocated.
pub(super) fn close_on_exec(file: &OwnedFd) {
    // It cannot fail for an open descriptor.
    let _ = rustix::io::fcntl_setfd(file, rustix::io::FdFlags::CLOEXEC);
}

impl Drop for Allocation {
    fn drop(&mut self) {
        if let Ok(_bound) = self.gpu.bind() {
            // SAFETY: made or imported by this value, released once; mappings keep what they need.
            unsafe { sys::cuMemRelease(self.handle) };
        }
    }
}

//! GPU memory that pleach allocates, and that another process of this host allocated and shared.
//!
//! **Invariant:** addresses are reserved once and freed at drop. The allocation at the addresses
//! may be replaced by a private copy ([`CudaMemory::detach`]), after which no other process can
//! access them: a peer's own mapping keeps the old allocation. This corresponds to the private
//! pages of a memfd when a peer is severed (contract line 9). If no copy is possible the addresses
//! are unmapped: the bytes are lost, and [`CudaMemory::load`] returns an error. The same holds for
//! the other end, [`ImportedMemory`]: a detached one keeps the bytes of that instant.

use std::any::Any;
use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use cudarc::driver::sys;

use super::dma_buf::CudaDmaBuf;
use super::driver::CudaError;
use super::gpu::{Gpu, GpuId};
use super::stream::{CudaEvent, Stream};
use crate::memory::{self, Memory, Share, Space};
use crate::mutex::lock;

/// Time limit, at a detach, for the work that this process has given to the GPU, and for copying
/// one allocation: 80 GB take 0.1 s.
const DETACH_LIMIT: Duration = Duration::from_secs(5);

/// Zeroed GPU memory.
pub struct CudaMemory {
    gpu: Arc<Gpu>,
    range: AddressRange,
    len: usize,
    /// The allocation at the addresses. Replaced under the lock.
    allocation: Mutex<Option<Allocation>>,
    file: Option<OwnedFd>,
    /// Made at the first use by a NIC. It refers to the first allocation.
    dma_buf: OnceLock<Result<CudaDmaBuf, CudaError>>,
    /// Relaxed: set once, under the lock; devices check their own directory too.
    is_detached: AtomicBool,
    /// The addresses are unmapped. Relaxed: as above.
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
    /// The GPU has too little memory, or the driver's error.
    pub fn new(gpu: &Arc<Gpu>, len: usize) -> Result<Arc<Self>, CudaError> {
        let range = AddressRange::reserve(gpu, len)?;
        let allocation = Allocation::new(gpu, range.bytes)?;
        range.map(&allocation)?;
        let stream = Stream::new(gpu)?;
        // SAFETY: all of the range is mapped for this GPU, and nobody else knows it yet.
        unsafe { stream.fill(range.base.as_ptr(), 0, range.bytes)? };
        stream.synchronize()?;
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

    /// Its GPU.
    #[must_use]
    pub fn gpu(&self) -> &Arc<Gpu> {
        &self.gpu
    }

    /// The memory as a dma-buf, which lives as long as the memory.
    ///
    /// # Errors
    ///
    /// See [`CudaDmaBuf::new`]; the result is the same each time.
    pub fn as_dma_buf(&self) -> Result<&CudaDmaBuf, CudaError> {
        self.dma_buf.get_or_init(|| CudaDmaBuf::new(self)).as_ref().map_err(CudaError::clone)
    }

    /// Copies host bytes into it from byte `offset` on; returns after the copy.
    ///
    /// # Errors
    ///
    /// Not within `limit`, or the driver's error.
    ///
    /// # Panics
    ///
    /// When they reach beyond its end: the caller's length check is missing.
    pub fn store(&self, offset: usize, bytes: &[u8], limit: Duration) -> Result<(), CudaError> {
        let address = self.address(offset, bytes.len())?;
        // SAFETY: `address` found the bytes inside; both are borrowed until this returns.
        unsafe { copy(&self.gpu, bytes.as_ptr(), address, bytes.len(), limit) }
    }

    /// Copies bytes of it from byte `offset` on; returns after the copy.
    ///
    /// # Errors
    ///
    /// Not within `limit`, or the driver's error.
    ///
    /// # Panics
    ///
    /// When they reach beyond its end.
    pub fn load(&self, offset: usize, bytes: &mut [u8], limit: Duration) -> Result<(), CudaError> {
        let address = self.address(offset, bytes.len())?;
        // SAFETY: as in `store`.
        unsafe { copy(&self.gpu, address, bytes.as_mut_ptr(), bytes.len(), limit) }
    }

    /// The address of these bytes, unless the memory is lost.
    ///
    /// # Panics
    ///
    /// When they reach beyond its end.
    pub(crate) fn address(&self, offset: usize, len: usize) -> Result<*mut u8, CudaError> {
        let is_inside = offset.checked_add(len).is_some_and(|end| end <= self.len);
        assert!(is_inside, "{len} bytes at {offset} of {} bytes of GPU memory", self.len);
        if self.is_lost.load(Ordering::Relaxed) {
            return Err(CudaError::Lost { ordinal: self.gpu.ordinal(), bytes: self.len });
        }
        Ok(self.range.base.as_ptr().wrapping_add(offset))
    }

    /// Replaces the allocation by a private copy, at the same addresses: afterwards no other
    /// process can access them, whatever it mapped before. For a moment the addresses are not
    /// mapped, so this first waits for all work of this process, in whatever stream: a kernel that
    /// finds no memory ends the process's use of the GPU (`CUDA_ERROR_ILLEGAL_ADDRESS`). Other
    /// threads may not give the GPU new work on this memory meanwhile.
    ///
    /// If no copy is possible (the GPU has too little free memory, or has failed) the bytes are
    /// lost: the addresses are unmapped, and using the memory is [`CudaError::Lost`].
    ///
    /// # Errors
    ///
    /// [`CudaError::Late`]: the GPU has not ended its work, or not copied, within a limit. The
    /// memory is not detached, and other processes may still access it.
    pub fn detach(&self) -> Result<(), CudaError> {
        let mut allocation = lock(&self.allocation);
        if self.is_detached.load(Ordering::Relaxed) {
            return Ok(());
        }
        *allocation = self.range.detach(&self.gpu)?;
        self.is_lost.store(allocation.is_none(), Ordering::Relaxed);
        self.is_detached.store(true, Ordering::Relaxed);
        Ok(())
    }

    /// The memory as this type, if it is.
    #[must_use]
    pub fn of(memory: &dyn Memory) -> Option<&Self> {
        let any: &dyn Any = memory;
        any.downcast_ref()
    }

    /// The allocation for other processes of this host ([`ImportedMemory`]); `None` after a
    /// detach, and if the GPU cannot share.
    #[must_use]
    pub fn shared(&self) -> Option<SharedAllocation<'_>> {
        let file = self.file.as_ref().filter(|_| !self.is_detached())?;
        Some(SharedAllocation { file: file.as_fd(), bytes: self.range.bytes as u64, gpu: self.gpu.id() })
    }

    /// Whether other processes can no longer access it.
    #[must_use]
    pub fn is_detached(&self) -> bool {
        self.is_detached.load(Ordering::Relaxed)
    }
}

/// An allocation that begins with a memory's bytes, for another process.
#[derive(Clone, Copy, Debug)]
pub struct SharedAllocation<'a> {
    /// A descriptor of the allocation for the driver of another process.
    pub file: BorrowedFd<'a>,
    /// Its length in bytes.
    pub bytes: u64,
    /// Its GPU.
    pub gpu: GpuId,
}

/// Copies `bytes` between addresses, at least one of which is on the GPU; returns after the copy.
///
/// # Safety
///
/// `bytes` bytes are readable and writable there until this returns, and no other code accesses the
/// destination.
pub(super) unsafe fn copy(
    gpu: &Arc<Gpu>,
    from: *const u8,
    into: *mut u8,
    bytes: usize,
    limit: Duration,
) -> Result<(), CudaError> {
    let (stream, mut event) = (Stream::new(gpu)?, CudaEvent::new(gpu)?);
    // SAFETY: by this function's contract.
    unsafe { stream.copy(from, into, bytes)? };
    // Fails only if the GPU has failed, and then it has finished all work.
    stream.record(&mut event)?;
    match event.wait(limit) {
        // The copy is alone in its stream, so it ends; its memory may be freed only then.
        Err(late @ CudaError::Late { .. }) => event.wait_or_abort().and(Err(late)),
        outcome => outcome,
    }
}

// SAFETY: the addresses are reserved, mapped for the GPU and never change until drop; only
// transfers and kernels that the owner allowed access them. In `Space::Gpu` the host does not
// dereference them.
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
        // Other processes map it with the driver: `CudaMemory::shared`.
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

/// Another process's memory, at an address for this process's GPU. Valid while held.
pub struct ImportedMemory {
    gpu: Arc<Gpu>,
    range: AddressRange,
    /// The allocation at the addresses.
    allocation: Mutex<Option<Allocation>>,
}

impl fmt::Debug for ImportedMemory {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "Imported({} bytes on GPU {})", self.range.bytes, self.gpu.ordinal())
    }
}

impl ImportedMemory {
    /// Maps all `bytes` of the allocation of a descriptor that a process with that GPU exported,
    /// for kernels of `reader`. The driver refuses a descriptor that is not its own, and a length
    /// that is not the allocation's.
    ///
    /// # Errors
    ///
    /// This process does not see the GPU, `reader` cannot access it, or the driver's error.
    pub fn new(reader: &Arc<Gpu>, gpu: GpuId, file: BorrowedFd<'_>, bytes: usize) -> Result<Self, CudaError> {
        let other = Gpu::find(gpu)?;
        if !reader.reaches(other)? {
            return Err(CudaError::NoPeerAccess { ordinal: reader.ordinal(), other });
        }
        let allocation = Allocation::import(reader, file)?;
        let range = AddressRange::reserve(reader, bytes)?;
        range.map(&allocation)?;
        Ok(Self { gpu: reader.clone(), range, allocation: Mutex::new(Some(allocation)) })
    }

    /// Address of the first byte, for kernels and copies of the GPU.
    #[must_use]
    pub fn base(&self) -> NonNull<u8> {
        self.range.base
    }

    /// Keeps the addresses, and the bytes if the GPU has room for a copy; later writes of the other
    /// process are not visible.
    ///
    /// # Errors
    ///
    /// [`CudaError::Late`]: the GPU has not copied within a limit, and the memory is as it was.
    pub fn detach(&self) -> Result<(), CudaError> {
        let mut allocation = lock(&self.allocation);
        *allocation = self.range.detach(&self.gpu)?;
        Ok(())
    }
}

/// A range of GPU addresses; [`AddressRange::map`] maps an allocation there.
struct AddressRange {
    gpu: Arc<Gpu>,
    base: NonNull<u8>,
    bytes: usize,
    /// Whether an allocation is mapped. Relaxed: only the owner changes it.
    is_mapped: AtomicBool,
}

// SAFETY: addresses; only the GPU accesses the memory there.
unsafe impl Send for AddressRange {}
// SAFETY: as above.
unsafe impl Sync for AddressRange {}

impl AddressRange {
    /// Reserves addresses for `len` bytes, rounded up to the GPU's granularity.
    fn reserve(gpu: &Arc<Gpu>, len: usize) -> Result<Self, CudaError> {
        let unit = gpu.granularity_bytes();
        let too_long = CudaError::OutOfMemory { ordinal: gpu.ordinal(), bytes: len };
        let bytes = len.max(1).checked_next_multiple_of(unit).ok_or(too_long.clone())?;
        let _context = gpu.bind()?;
        let mut address = 0;
        // SAFETY: the context is current; it writes one address. No alignment, no preferred
        // address, no flags.
        let code = unsafe { sys::cuMemAddressReserve(&mut address, bytes, 0, 0, 0) };
        gpu.check_room("cuMemAddressReserve", code, bytes)?;
        let base = NonNull::new(address as *mut u8).ok_or(too_long)?;
        Ok(Self { gpu: gpu.clone(), base, bytes, is_mapped: AtomicBool::new(false) })
    }

    /// Maps the allocation at the addresses, for kernels of the range's GPU.
    fn map(&self, allocation: &Allocation) -> Result<(), CudaError> {
        let _context = self.gpu.bind()?;
        let address = self.base.as_ptr() as u64;
        // SAFETY: addresses reserved by this value and not mapped; the allocation is alive, and the
        // mapping keeps it.
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
            let _context = self.gpu.bind()?;
            // SAFETY: all of it was mapped by one call; a user of the addresses after the owner
            // broke its contract.
            let code = unsafe { sys::cuMemUnmap(self.base.as_ptr() as u64, self.bytes) };
            self.gpu.check("cuMemUnmap", code)?;
        }
        Ok(())
    }

    /// Replaces the allocation at the addresses by a new one with the same bytes.
    fn replace_by_copy(&self, gpu: &Arc<Gpu>) -> Result<Allocation, CudaError> {
        let copy = Allocation::new(gpu, self.bytes)?;
        let aside = Self::reserve(gpu, self.bytes)?;
        aside.map(&copy)?;
        let stream = Stream::new(gpu)?;
        // SAFETY: both ranges are mapped and so long; no work of this process accesses either now.
        unsafe { stream.copy(self.base.as_ptr(), aside.base.as_ptr(), self.bytes)? };
        if let Err(error) = stream.record_event().and_then(|event| event.wait(DETACH_LIMIT)) {
            // The copy may still be under way, so its destination stays.
            std::mem::forget((aside, copy));
            return Err(error);
        }
        drop(aside);
        self.unmap()?;
        self.map(&copy)?;
        Ok(copy)
    }

    /// As [`AddressRange::replace_by_copy`]; if no copy is possible it unmaps the addresses and
    /// returns no allocation.
    ///
    /// # Errors
    ///
    /// [`CudaError::Late`]: the GPU has not ended this process's work, or not copied, within
    /// [`DETACH_LIMIT`].
    fn detach(&self, gpu: &Arc<Gpu>) -> Result<Option<Allocation>, CudaError> {
        match gpu.synchronize(DETACH_LIMIT).and_then(|()| self.replace_by_copy(gpu)) {
            Ok(copy) => Ok(Some(copy)),
            Err(late @ CudaError::Late { .. }) => Err(late),
            Err(error) => {
                let (bytes, ordinal) = (self.bytes, gpu.ordinal());
                tracing::error!(%error, bytes, ordinal, "the bytes of a GPU buffer that peers shared are lost");
                if let Err(error) = self.unmap() {
                    // Such a GPU does no more work for this process, so this process sees no writes
                    // of others.
                    tracing::error!(%error, ordinal, "they could not be unmapped");
                }
                Ok(None)
            }
        }
    }
}

impl Drop for AddressRange {
    fn drop(&mut self) {
        let freed = self.unmap().and_then(|()| {
            let _context = self.gpu.bind()?;
            // SAFETY: reserved by this value, and not mapped any more.
            let code = unsafe { sys::cuMemAddressFree(self.base.as_ptr() as u64, self.bytes) };
            self.gpu.check("cuMemAddressFree", code)
        });
        if let Err(error) = freed {
            tracing::warn!(%error, "addresses of GPU memory could not be freed");
        }
    }
}

/// GPU memory without an address, of this process or another.
struct Allocation {
    gpu: Arc<Gpu>,
    handle: sys::CUmemGenericAllocationHandle,
}

impl Allocation {
    fn new(gpu: &Arc<Gpu>, bytes: usize) -> Result<Self, CudaError> {
        let _context = gpu.bind()?;
        let (mut handle, properties) = (0, gpu.properties());
        // SAFETY: it reads the properties and writes one handle; no flags.
        let code = unsafe { sys::cuMemCreate(&mut handle, bytes, &properties, 0) };
        gpu.check_room("cuMemCreate", code, bytes)?;
        Ok(Self { gpu: gpu.clone(), handle })
    }

    /// Exports a file descriptor with which other processes import it.
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

    /// Imports an allocation of another process.
    fn import(gpu: &Arc<Gpu>, file: BorrowedFd<'_>) -> Result<Self, CudaError> {
        use std::os::fd::AsRawFd;
        let _context = gpu.bind()?;
        let mut handle = 0;
        let kind = sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
        // For this kind of handle the pointer is the descriptor itself.
        let name = std::ptr::without_provenance_mut(file.as_raw_fd() as usize);
        // SAFETY: the driver reads the descriptor, which is open, and does not keep it; it writes
        // one handle.
        let code = unsafe { sys::cuMemImportFromShareableHandle(&mut handle, name, kind) };
        gpu.check("cuMemImportFromShareableHandle", code)?;
        Ok(Self { gpu: gpu.clone(), handle })
    }
}

/// Sets close-on-exec on a descriptor of the driver: a program that this process starts would keep
/// the GPU memory allocated.
pub(super) fn close_on_exec(file: &OwnedFd) {
    // It cannot fail for an open descriptor.
    let _ = rustix::io::fcntl_setfd(file, rustix::io::FdFlags::CLOEXEC);
}

impl Drop for Allocation {
    fn drop(&mut self) {
        if let Ok(_context) = self.gpu.bind() {
            // SAFETY: made or imported by this value, released once; mappings keep what they need.
            unsafe { sys::cuMemRelease(self.handle) };
        }
    }
}

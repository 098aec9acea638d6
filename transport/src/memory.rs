//! Memory that can be registered with a device.
//!
//! **Invariant:** memory keeps its address and length until it is dropped, and a [`crate::Region`]
//! keeps it alive, so a pointer into a region is valid as long as the region is.
//!
//! Transfers may read and write registered memory at any time after the owner gave out a key. So
//! this crate accesses such memory only through raw pointers, never through references that live
//! across a transfer. Threads of this process copy to and from a slice with atomic accesses
//! (`shared_bytes`), so several threads may copy at the same time. A transfer acts like a NIC: the
//! bytes may change at any time.
#![allow(unsafe_code)]

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::any::Any;
use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, ftruncate, memfd_create};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};
use rustix::process::{Resource, getrlimit};

mod placement;
pub(crate) mod shared_bytes;

pub(crate) use placement::prefer_own_node;

/// The kind of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Space {
    /// Memory of this host that its processors address.
    Host,
    /// GPU memory, which only kernels and copies of the GPU address.
    Gpu {
        /// The GPU's number in this process.
        ordinal: u32,
    },
}

impl fmt::Display for Space {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Host => formatter.write_str("host"),
            Self::Gpu { ordinal } => write!(formatter, "gpu:{ordinal}"),
        }
    }
}

/// How another process of this host can map the memory.
#[derive(Debug)]
#[non_exhaustive]
pub enum Share<'a> {
    /// Another process cannot map it, or only with the library that allocated the memory and knows
    /// its type.
    Private,
    /// The memory is `len` bytes of this file from `offset` on, mapped shared.
    File {
        /// The file, usually a memfd.
        file: BorrowedFd<'a>,
        /// Offset of the memory in the file, in bytes.
        offset: u64,
    },
}

/// A part of a dma-buf: memory that other devices of this host access without its owner's
/// processor.
#[derive(Clone, Copy, Debug)]
pub struct DmaBuf<'a> {
    /// The file, which is open as long as the memory exists.
    pub file: BorrowedFd<'a>,
    /// Offset of the memory in the file, in bytes.
    pub offset: u64,
}

/// Memory that can be registered with a device.
///
/// Memory with further abilities has a type of its own, and a backend that knows the type downcasts
/// to it: a `&dyn Memory` is a `&dyn Any`.
///
/// # Safety
///
/// From creation to drop `base` and `len` name the same readable and writable bytes (in
/// [`Space::Gpu`] for the GPU alone), which only their owner and the transfers that it allowed
/// access. With [`Share::File`] those bytes are a shared mapping of that file, and a device may at
/// any time replace the pages of the mapping by private copies at the same addresses (so an
/// unresponsive peer cannot write them, contract line 9). If peers may not write the memory
/// ([`Memory::peers_may_write`]), no other process can ever have mapped the file for writing, and
/// the pages stay.
pub unsafe trait Memory: Any + Send + Sync {
    /// Address of the first byte.
    fn base(&self) -> NonNull<u8>;
    /// Length in bytes.
    fn len(&self) -> usize;
    /// Whether the memory is empty.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
    /// The kind of the memory.
    fn space(&self) -> Space;
    /// How another process can map the memory.
    fn share(&self) -> Share<'_>;
    /// Whether only devices map the file of [`Share::File`]. A device that has replaced pages by
    /// private copies may then empty these parts of the file, so that no byte is stored twice.
    fn may_empty_file(&self) -> bool {
        false
    }
    /// Whether peers may write the memory. If false, they only read it (contract line 14), and a
    /// file of [`Share::File`] is sealed against new writable mappings (`F_SEAL_FUTURE_WRITE`):
    /// [`SharedMemory::lendable`].
    fn peers_may_write(&self) -> bool {
        true
    }
    /// The same memory as a dma-buf, if it is one: then a NIC gets the dma-buf, and the address
    /// only gives the offset in a page.
    fn dma_buf(&self) -> Option<DmaBuf<'_>> {
        None
    }
}

/// Zeroed heap memory, aligned to 4,096 bytes. Accepted by `tcp` and `sim`, refused by `shm` (it
/// cannot be mapped).
#[derive(Debug)]
pub struct HostMemory {
    base: NonNull<u8>,
    layout: Layout,
    len: usize,
}

/// Alignment of memory that pleach allocates, in bytes: a page.
const MEMORY_ALIGN_BYTES: usize = 4096;

impl HostMemory {
    /// `len` zeroed bytes.
    #[must_use]
    pub fn new(len: usize) -> Arc<Self> {
        let layout = Layout::from_size_align(len.max(1), MEMORY_ALIGN_BYTES).expect("fits the address space");
        // SAFETY: the layout has a non-zero size.
        let base = unsafe { alloc_zeroed(layout) };
        let base = NonNull::new(base).unwrap_or_else(|| handle_alloc_error(layout));
        Arc::new(Self { base, layout, len })
    }
}

impl Drop for HostMemory {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with this layout, freed once.
        unsafe { dealloc(self.base.as_ptr(), self.layout) }
    }
}

// SAFETY: the allocation is owned, never moves, and is private to this value and its transfers.
unsafe impl Memory for HostMemory {
    fn base(&self) -> NonNull<u8> {
        self.base
    }
    fn len(&self) -> usize {
        self.len
    }
    fn space(&self) -> Space {
        Space::Host
    }
    fn share(&self) -> Share<'_> {
        Share::Private
    }
}

// SAFETY: plain bytes; concurrent access is governed by the `Memory` contract.
unsafe impl Send for HostMemory {}
// SAFETY: as above; `&HostMemory` only gives the address.
unsafe impl Sync for HostMemory {}

/// Seals that fix the size of a file. A process that maps the file then gets no fatal signal,
/// whatever other processes do.
pub(crate) const SEALS_FIXED_SIZE: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW);

/// An anonymous file of `bytes` zeroed bytes that is not sealed yet.
pub(crate) fn unsealed_file(name: &str, bytes: usize) -> io::Result<OwnedFd> {
    // Kernels before 6.3 have no NOEXEC_SEAL; some newer ones are set up to require it.
    let file = memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::NOEXEC_SEAL)
        .or_else(|_| memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING))?;
    resize(&file, bytes)?;
    Ok(file)
}

/// Seals a file: its size cannot change, nor can it get later seals. The seals do not affect
/// existing mappings.
pub(crate) fn seal(file: &OwnedFd, seals: SealFlags) -> io::Result<()> {
    Ok(fcntl_add_seals(file, SEALS_FIXED_SIZE | seals | SealFlags::SEAL)?)
}

/// An anonymous file of `bytes` zeroed bytes whose size cannot change. It has these seals, and
/// cannot get later seals.
pub(crate) fn sealed_file(name: &str, bytes: usize, seals: SealFlags) -> io::Result<OwnedFd> {
    let file = unsealed_file(name, bytes)?;
    seal(&file, seals)?;
    Ok(file)
}

/// Sets the size of an anonymous file. A size above the limit of files is an error here: the kernel
/// would end the process by a signal.
fn resize(file: &OwnedFd, bytes: usize) -> io::Result<()> {
    match getrlimit(Resource::Fsize).current {
        Some(most) if bytes as u64 > most => Err(io::Error::from(io::ErrorKind::FileTooLarge)),
        _ => Ok(ftruncate(file, bytes as u64)?),
    }
}

/// `len` rounded up to whole pages, at least one. A size beyond the address space gives the error
/// "out of memory".
fn whole_pages(len: usize) -> io::Result<usize> {
    let bytes = len.max(1).checked_next_multiple_of(MEMORY_ALIGN_BYTES);
    bytes.filter(|bytes| isize::try_from(*bytes).is_ok()).ok_or_else(|| rustix::io::Errno::NOMEM.into())
}

/// The remedy when the system refuses shared memory.
#[must_use]
pub fn remedy(error: &io::Error) -> &'static str {
    match rustix::io::Errno::from_io_error(error) {
        Some(rustix::io::Errno::MFILE | rustix::io::Errno::NFILE) => {
            "raise the limit of open files ('ulimit -n')"
        }
        _ if error.kind() == io::ErrorKind::FileTooLarge => "raise the limit of a file's size ('ulimit -f')",
        _ => UNMAPPED_REMEDY,
    }
}

/// The remedy when memory cannot be mapped.
pub(crate) const UNMAPPED_REMEDY: &str =
    "free memory on this host, or raise the limit of addresses ('ulimit -v') or mappings (vm.max_map_count)";

/// Huge pages are requested from this length on, in bytes.
const HUGE_PAGE_BYTES: usize = 2 << 20;

/// Requests huge pages for a shared mapping of this process, for fewer address translations. The
/// system gives them if `/sys/kernel/mm/transparent_hugepage/shmem_enabled` is `advise` or more;
/// otherwise nothing changes.
pub(crate) fn prefer_huge_pages(base: NonNull<u8>, bytes: usize) {
    if bytes >= HUGE_PAGE_BYTES {
        // SAFETY: whole pages of a mapping that the caller made; the advice changes no byte.
        let _ = unsafe { madvise(base.as_ptr().cast(), bytes, Advice::LinuxHugepage) };
    }
}

/// Zeroed memory in an anonymous file (memfd), accepted by every host backend and mappable by peers
/// of this host.
///
/// The file has no name in any shared namespace, so nothing is left behind when the process ends.
///
/// Lendable memory ([`SharedMemory::lendable`]) is written by its owner alone, and peers only read
/// it. The file is mapped here first, and then sealed against every further way to write it
/// (`F_SEAL_FUTURE_WRITE`). So a peer of this host that receives the file can map it for reading,
/// and the kernel refuses everything else. Nothing has to be taken back from a severed peer,
/// because it can write nothing through its mapping. But a peer may read memory that it has mapped
/// for as long as it runs. So data for other readers belongs in other memory.
#[derive(Debug)]
pub struct SharedMemory {
    base: NonNull<u8>,
    len: usize,
    mapped_bytes: usize,
    file: OwnedFd,
    /// The file came from another process, or [`SharedMemory::file`] gave it out. Relaxed: set
    /// before another process can map the file, and never cleared.
    has_other_users: AtomicBool,
    peers_may_write: bool,
}

impl SharedMemory {
    /// `len` zeroed bytes in a new memfd.
    ///
    /// # Errors
    ///
    /// The kernel's error: out of memory, or too many files.
    pub fn new(len: usize) -> io::Result<Arc<Self>> {
        let mapped_bytes = whole_pages(len)?;
        let file = sealed_file("pleach", mapped_bytes, SealFlags::empty())?;
        let memory = Self::map(file, len, mapped_bytes, false)?;
        prefer_own_node(memory.base, mapped_bytes);
        Ok(Arc::new(memory))
    }

    /// As [`SharedMemory::new`], but peers can only read the memory.
    ///
    /// # Errors
    ///
    /// As of [`SharedMemory::new`].
    pub fn lendable(len: usize) -> io::Result<Arc<Self>> {
        let mapped_bytes = whole_pages(len)?;
        let file = unsealed_file("pleach-lendable", mapped_bytes)?;
        let mut memory = Self::map(file, len, mapped_bytes, false)?;
        memory.peers_may_write = false;
        // The file is sealed before any other process can have it.
        seal(&memory.file, SealFlags::FUTURE_WRITE)?;
        prefer_own_node(memory.base, mapped_bytes);
        Ok(Arc::new(memory))
    }

    /// Maps the first `len` bytes of a file that another process made with [`SharedMemory::new`].
    ///
    /// # Errors
    ///
    /// The kernel's error, or `InvalidInput` when the file is or can become shorter than `len`: an
    /// access beyond its end would be a fatal signal.
    pub fn from_file(file: OwnedFd, len: usize) -> io::Result<Arc<Self>> {
        let mapped_bytes = whole_pages(len)?;
        let have = rustix::fs::fstat(&file)?.st_size;
        if !fcntl_get_seals(&file)?.contains(SEALS_FIXED_SIZE)
            || have < 0
            || (have as u64) < mapped_bytes as u64
        {
            return Err(io::Error::from(io::ErrorKind::InvalidInput));
        }
        Ok(Arc::new(Self::map(file, len, mapped_bytes, true)?))
    }

    fn map(file: OwnedFd, len: usize, mapped_bytes: usize, has_other_users: bool) -> io::Result<Self> {
        // SAFETY: a fresh mapping at an address of the kernel's choice aliases nothing of ours.
        let base = unsafe {
            mmap(
                std::ptr::null_mut(),
                mapped_bytes,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
                &file,
                0,
            )?
        };
        let base = NonNull::new(base.cast::<u8>()).expect("mmap does not return null");
        prefer_huge_pages(base, mapped_bytes);
        let has_other_users = AtomicBool::new(has_other_users);
        Ok(Self { base, len, mapped_bytes, file, has_other_users, peers_may_write: true })
    }

    /// The anonymous file, to be passed to another process.
    #[must_use]
    pub fn file(&self) -> BorrowedFd<'_> {
        self.has_other_users.store(true, Ordering::Relaxed);
        self.file.as_fd()
    }
}

/// Whether a file of another process can be mapped and begins with `bytes`.
#[cfg(not(loom))]
pub(crate) fn shows(file: OwnedFd, bytes: &[u8]) -> bool {
    let Ok(memory) = SharedMemory::from_file(file, bytes.len()) else { return false };
    let mut seen = vec![0; bytes.len()];
    // SAFETY: `from_file` has mapped that many bytes of a file that cannot be shortened, and `seen`
    // has the same length.
    unsafe { std::ptr::copy_nonoverlapping(memory.base.as_ptr(), seen.as_mut_ptr(), bytes.len()) };
    seen == bytes
}

impl Drop for SharedMemory {
    fn drop(&mut self) {
        // SAFETY: the memory was mapped in `map` with this length, and no pointer into it outlives
        // the value (see `Memory`). If its pages were replaced by private pages, munmap works in
        // the same way.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), self.mapped_bytes) };
    }
}

// SAFETY: the mapping is owned, never moves, and is shared only through the file descriptor this
// value hands out.
unsafe impl Memory for SharedMemory {
    fn base(&self) -> NonNull<u8> {
        self.base
    }
    fn len(&self) -> usize {
        self.len
    }
    fn space(&self) -> Space {
        Space::Host
    }
    fn share(&self) -> Share<'_> {
        Share::File { file: self.file.as_fd(), offset: 0 }
    }
    fn may_empty_file(&self) -> bool {
        self.peers_may_write && !self.has_other_users.load(Ordering::Relaxed)
    }
    fn peers_may_write(&self) -> bool {
        self.peers_may_write
    }
}

// SAFETY: plain bytes; concurrent access is governed by the `Memory` contract.
unsafe impl Send for SharedMemory {}
// SAFETY: as above; `&SharedMemory` only gives the address and the file.
unsafe impl Sync for SharedMemory {}

#[cfg(test)]
mod tests;

//! Mapped files. This process seals its own files when it makes them, and checks files of peers
//! before it uses them.
//!
//! **Invariant:** no mapping ever reaches beyond the end of its file, because sizes are checked and
//! sealed before anything is mapped. So a hostile peer can write wrong bytes but cannot kill this
//! process.

use std::ffi::c_void;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::NonNull;

use rustix::fs::{FallocateFlags, SealFlags, fallocate, fcntl_get_seals, fstat, fstatfs};
use rustix::io::Errno;
use rustix::mm::{
    Advice, MapFlags, MprotectFlags, MremapFlags, ProtFlags, madvise, mmap, mmap_anonymous, mprotect,
    mremap_fixed, munmap,
};
use rustix::param::page_size;

use crate::device::ProtocolViolation;
use crate::fork::Process;
use crate::memory::{SEALS_FIXED_SIZE, prefer_huge_pages};
use crate::primitive::{AtomicU64, Ordering, fence};

/// `TMPFS_MAGIC`: the file system of memfds with ordinary pages. Files with huge pages are refused,
/// because the system can run out of huge pages while a file is mapped.
const FILE_SYSTEM_TMPFS: i64 = 0x0102_1994;

/// The access rights of a mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    Read,
    ReadWrite,
}

impl Access {
    /// The access rights that a file of a peer gives. The seals of the file decide, whatever its
    /// owner says: a file can be mapped for writing unless it is sealed against writing.
    pub(crate) fn of_file(file: BorrowedFd<'_>) -> io::Result<Self> {
        let is_sealed = fcntl_get_seals(file)?.contains(SealFlags::FUTURE_WRITE);
        Ok(if is_sealed { Self::Read } else { Self::ReadWrite })
    }

    fn protection(self) -> ProtFlags {
        match self {
            Self::Read => ProtFlags::READ,
            Self::ReadWrite => ProtFlags::READ | ProtFlags::WRITE,
        }
    }
}

/// Pages of a file, mapped shared until dropped.
#[derive(Debug)]
pub(crate) struct Mapping {
    base: NonNull<u8>,
    bytes: usize,
    access: Access,
    /// The only process that has the mapping, if forked children do not have it.
    only_in: Option<Process>,
}

// SAFETY: the value owns an address range of this process. Its bytes are touched through raw
// pointers and atomics only.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Drop for Mapping {
    fn drop(&mut self) {
        if self.is_of_parent() {
            // The child may have mapped other memory there.
            return;
        }
        // SAFETY: the range was mapped in `new` or `over` with this length. Owners of pointers into
        // it hold the mapping.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), self.bytes) };
    }
}

impl Mapping {
    /// Maps `bytes` bytes of the file from `offset` on. Both are multiples of a page, or `bytes`
    /// reaches to the end of the file. The file must be sealed and long enough ([`check`]).
    pub(crate) fn new(file: BorrowedFd<'_>, offset: u64, bytes: usize, access: Access) -> io::Result<Self> {
        let protection = access.protection();
        // SAFETY: a fresh mapping at an address of the kernel's choice aliases nothing of ours.
        let base = unsafe { mmap(std::ptr::null_mut(), bytes, protection, MapFlags::SHARED, file, offset)? };
        let base = NonNull::new(base.cast::<u8>()).expect("mmap does not return null");
        prefer_huge_pages(base, bytes);
        Ok(Self { base, bytes, access, only_in: None })
    }

    /// Keeps the mapping from forked children of this process, so that it ends with the process.
    pub(crate) fn withhold_from_children(&mut self) -> io::Result<()> {
        let process = Process::current();
        // SAFETY: the range is whole pages of this mapping, and the advice changes nothing in this
        // process.
        unsafe { madvise(self.base.as_ptr().cast(), self.bytes, Advice::LinuxDontFork)? };
        self.only_in = Some(process);
        Ok(())
    }

    /// Whether this process is a forked child without the mapping.
    fn is_of_parent(&self) -> bool {
        self.only_in.is_some_and(|process| !process.is_current())
    }

    /// Address of the first byte.
    pub(crate) fn base(&self) -> NonNull<u8> {
        self.base
    }

    /// Replaces the pages in place by private copies. Concurrent writes of other threads of this
    /// process may be lost, so this is for memory that this process only reads, or whose writes no
    /// longer matter.
    pub(crate) fn detach_by_copy(&self) -> io::Result<()> {
        if self.is_of_parent() {
            return Ok(());
        }
        // SAFETY: a fresh mapping; the copy reads pages that exist (see the invariant) into pages
        // that are ours alone.
        let copy = unsafe {
            let copy = mmap_anonymous(
                std::ptr::null_mut(),
                self.bytes,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE,
            )?;
            std::ptr::copy_nonoverlapping(self.base.as_ptr(), copy.cast::<u8>(), self.bytes);
            copy
        };
        if self.access == Access::Read {
            // SAFETY: the range is the copy, which nobody else knows. If it stays writable, still
            // nobody gets a pointer to write there.
            let _ = unsafe { mprotect(copy, self.bytes, MprotectFlags::READ) };
        }
        // SAFETY: both ranges are whole mappings of ours; the move replaces the target in one step,
        // so a concurrent reader waits for a moment and finds the same bytes at the same address.
        let moved = unsafe {
            mremap_fixed(
                copy,
                self.bytes,
                self.bytes,
                MremapFlags::MAYMOVE,
                self.base.as_ptr().cast::<c_void>(),
            )
        };
        if let Err(errno) = moved {
            // SAFETY: the copy was mapped above and was not moved.
            let _ = unsafe { munmap(copy, self.bytes) };
            return Err(errno.into());
        }
        Ok(())
    }
}

/// Checks a file of a peer: that it holds `bytes_min` bytes, that it cannot be shortened, and that
/// access to its pages cannot fail.
pub(crate) fn check(file: BorrowedFd<'_>, bytes_min: u64) -> Result<(), ProtocolViolation> {
    // Seals first: only files in memory have them, so later calls reach no other file system.
    let seals = fcntl_get_seals(file).map_err(|_| ProtocolViolation::UnsafeFile)?;
    let system = fstatfs(file).map_err(|_| ProtocolViolation::UnsafeFile)?;
    let size = fstat(file).map_err(|_| ProtocolViolation::UnsafeFile)?.st_size;
    #[allow(clippy::useless_conversion, reason = "the word differs between architectures")]
    let in_memory = i64::try_from(system.f_type) == Ok(FILE_SYSTEM_TMPFS);
    let long_enough = u64::try_from(size).is_ok_and(|size| size >= bytes_min);
    if in_memory && long_enough && seals.contains(SEALS_FIXED_SIZE) {
        Ok(())
    } else {
        Err(ProtocolViolation::UnsafeFile)
    }
}

/// Whole pages around a range: their first byte and their length.
pub(crate) fn pages_around(start: u64, len: u64) -> Option<(u64, u64)> {
    let page = page_size() as u64;
    let first = start - start % page;
    let end = start.checked_add(len)?.checked_next_multiple_of(page)?;
    Some((first, end - first))
}

/// Makes memory of this process private. `bytes` bytes at `base` are a shared mapping of the file
/// from `offset` on, and become a private mapping of the same bytes. Pages become copies when they
/// are touched ([`touch`]); until then a peer's writes are visible.
///
/// # Safety
///
/// The range is whole pages that map this file at this offset and that may be replaced in this way
/// (see [`crate::Memory`]).
pub(crate) unsafe fn make_private(
    base: NonNull<u8>,
    bytes: usize,
    file: BorrowedFd<'_>,
    offset: u64,
) -> io::Result<()> {
    // SAFETY: the kernel replaces the mapping in one step under its lock, so other threads that
    // touch the range meanwhile wait and then find the same bytes; the addresses stay mapped,
    // readable and writable.
    unsafe {
        mmap(
            base.as_ptr().cast(),
            bytes,
            ProtFlags::READ | ProtFlags::WRITE,
            // No memory is reserved for the copies, because the file frees its pages as they become
            // private; see `fence`.
            MapFlags::PRIVATE | MapFlags::FIXED | MapFlags::NORESERVE,
            file.as_fd(),
            offset,
        )?;
    }
    Ok(())
}

/// Gives every page of a private mapping its own copy, without changing a byte or losing concurrent
/// writes of other threads. The call may be repeated after an interruption.
///
/// # Safety
///
/// The range is whole pages, writable, of a mapping that [`make_private`] made.
///
/// # Errors
///
/// The system has no memory for the copies. Some pages may have their copies.
pub(crate) unsafe fn touch(base: NonNull<u8>, bytes: usize) -> io::Result<()> {
    // SAFETY: populating writes nothing; it has the effect of a write to each page.
    match unsafe { madvise(base.as_ptr().cast(), bytes, Advice::LinuxPopulateWrite) } {
        Ok(()) => return Ok(()),
        // Kernels before 5.14 do not know the advice and return this error.
        Err(Errno::INVAL) => {}
        Err(errno) => return Err(errno.into()),
    }
    // On such kernels zero is added to a word of each page, which is a write for the memory manager
    // only.
    for offset in (0..bytes).step_by(page_size()) {
        // SAFETY: the word is inside the range and aligned to a page. The addition is atomic, so
        // accesses of other threads to these bytes are not torn or lost.
        unsafe { AtomicU64::from_ptr(base.as_ptr().add(offset).cast()) }.fetch_add(0, Ordering::Relaxed);
    }
    Ok(())
}

/// Removes the pages of a part of the file from all shared mappings, which read zeros there from
/// now on. Private copies stay. A process that reads such a zero sees all earlier stores of the
/// owner, for example into its table of keys.
pub(crate) fn empty(file: BorrowedFd<'_>, offset: u64, bytes: usize) -> io::Result<()> {
    // Partner: the fence in `PeerRegion::is_shared`. Between the two the kernel removes the page
    // from the reader's tables.
    fence(Ordering::SeqCst);
    Ok(fallocate(file, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, offset, bytes as u64)?)
}

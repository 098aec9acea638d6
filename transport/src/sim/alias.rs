//! A second mapping of shared memory at other addresses, which can be cut off.

use std::fmt;
use std::io;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::Arc;

use rustix::fs::{SeekFrom, seek};
use rustix::io::Errno;
use rustix::mm::{MapFlags, MremapFlags, ProtFlags, mmap, mmap_anonymous, mremap_fixed, munmap};

use crate::memory::{Memory, Share};
use crate::region::{Mapped, OutOfBounds, ReadOnlyMapped, RemoteSlice};

/// Mappings are of whole pages, in bytes.
const PAGE_BYTES: usize = 4096;

/// A second mapping of some [`Memory`] of this process: a simulated rank's view of another
/// rank's memory, with the rights of a peer. After [`Alias::cut`] it keeps the bytes that it had,
/// and no longer follows the memory.
pub(crate) struct Alias {
    base: NonNull<u8>,
    len: usize,
    mapped_bytes: usize,
    /// The memory that it maps.
    memory: Arc<dyn Memory>,
}

impl fmt::Debug for Alias {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "Alias({:?}, {} bytes)", self.base, self.len)
    }
}

impl Alias {
    /// A second mapping of `memory`.
    ///
    /// # Errors
    ///
    /// `InvalidInput` when the memory is not a page-aligned part of a file; else the kernel's
    /// error.
    pub(crate) fn of(memory: Arc<dyn Memory>) -> io::Result<Arc<Self>> {
        let (file, offset) = file_of(&*memory)?;
        if !offset.is_multiple_of(PAGE_BYTES as u64) {
            return Err(io::Error::from(io::ErrorKind::InvalidInput));
        }
        let len = memory.len();
        let mapped_bytes = len.max(1).next_multiple_of(PAGE_BYTES);
        let protection =
            if memory.peers_may_write() { ProtFlags::READ | ProtFlags::WRITE } else { ProtFlags::READ };
        // SAFETY: a fresh mapping at an address of the kernel's choice aliases no reference of
        // ours: registered memory is touched through raw pointers only.
        let base =
            unsafe { mmap(std::ptr::null_mut(), mapped_bytes, protection, MapFlags::SHARED, file, offset)? };
        let base = NonNull::new(base.cast::<u8>()).expect("mmap does not return null");
        Ok(Arc::new(Self { base, len, mapped_bytes, memory }))
    }

    /// Address of the first byte.
    pub(crate) fn base(&self) -> NonNull<u8> {
        self.base
    }

    /// Length in bytes.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// A part of it that can be written.
    ///
    /// # Errors
    ///
    /// When the part does not lie inside.
    ///
    /// # Panics
    ///
    /// When peers may not write the memory: the caller's check is missing.
    pub(crate) fn part(self: &Arc<Self>, part: &RemoteSlice) -> Result<Mapped, OutOfBounds> {
        assert!(self.memory.peers_may_write(), "mapped for reading only");
        let (base, len) = self.locate(part)?;
        // SAFETY: inside the mapping, which is writable, and kept.
        Ok(unsafe { Mapped::new(base, len, self.clone()) })
    }

    /// A part of it that can be read.
    ///
    /// # Errors
    ///
    /// When the part does not lie inside.
    pub(crate) fn read_only_part(
        self: &Arc<Self>,
        part: &RemoteSlice,
    ) -> Result<ReadOnlyMapped, OutOfBounds> {
        let (base, len) = self.locate(part)?;
        // SAFETY: inside the mapping, which is kept.
        Ok(unsafe { ReadOnlyMapped::new(base, len, self.clone()) })
    }

    fn locate(&self, part: &RemoteSlice) -> Result<(NonNull<u8>, usize), OutOfBounds> {
        let end = part.offset.saturating_add(part.len);
        if end > self.len as u64 {
            return Err(OutOfBounds { start: part.offset, end, len: self.len as u64 });
        }
        // SAFETY: the offset is at most the length of the mapping.
        Ok((unsafe { self.base.add(part.offset as usize) }, part.len as usize))
    }

    /// Replaces the mapping by a private copy at the same addresses. The memory must not be written
    /// meanwhile (the copy would miss that write); the simulator has one thread. Pages that were
    /// never written take no memory in the copy either.
    ///
    /// # Errors
    ///
    /// The kernel's error; nothing has changed then.
    pub(crate) fn cut(&self) -> io::Result<()> {
        let (file, offset) = file_of(&*self.memory)?;
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a fresh mapping at an address of the kernel's choice.
        let copy = unsafe {
            mmap_anonymous(std::ptr::null_mut(), self.mapped_bytes, protection, MapFlags::PRIVATE)?
        };
        let moved = self.copy_written(file, offset, copy.cast()).and_then(|()| {
            let (base, bytes) = (self.base.as_ptr().cast(), self.mapped_bytes);
            // SAFETY: replaces exactly the pages that this value mapped and owns, in one step; they
            // stay readable and writable.
            unsafe { mremap_fixed(copy, bytes, bytes, MremapFlags::MAYMOVE, base) }.map_err(io::Error::from)
        });
        if moved.is_err() {
            // SAFETY: mapped above, not moved, and unknown to other code.
            let _ = unsafe { munmap(copy, self.mapped_bytes) };
        }
        moved.map(drop)
    }

    /// Copies the pages of the file that have been written. Reading the others through a mapping
    /// would make the kernel allocate them.
    fn copy_written(&self, file: BorrowedFd<'_>, offset: u64, copy: *mut u8) -> io::Result<()> {
        let mut from = 0;
        while let Some(piece) = next_written(file, offset, from..self.len)? {
            // SAFETY: the piece lies in the `len` bytes that are mapped both at `base` and at
            // `copy`, which overlap nowhere.
            unsafe {
                std::ptr::copy_nonoverlapping(
                    self.base.as_ptr().add(piece.start),
                    copy.add(piece.start),
                    piece.len(),
                );
            }
            from = piece.end;
        }
        Ok(())
    }
}

fn file_of(memory: &dyn Memory) -> io::Result<(BorrowedFd<'_>, u64)> {
    match memory.share() {
        Share::File { file, offset } => Ok((file, offset)),
        _ => Err(io::Error::from(io::ErrorKind::InvalidInput)),
    }
}

/// The first written part of the range, counted from the memory's first byte, which is at `offset`
/// in the file.
fn next_written(file: BorrowedFd<'_>, offset: u64, range: Range<usize>) -> io::Result<Option<Range<usize>>> {
    let start = match seek(file, SeekFrom::Data(offset + range.start as u64)) {
        Ok(start) => (start - offset) as usize,
        // Only a hole is left.
        Err(Errno::NXIO) => return Ok(None),
        Err(error) => return Err(error.into()),
    };
    if start >= range.end {
        return Ok(None);
    }
    let end = (seek(file, SeekFrom::Hole(offset + start as u64))? - offset) as usize;
    Ok(Some(start..end.min(range.end)))
}

impl Drop for Alias {
    fn drop(&mut self) {
        // SAFETY: mapped in `of` (or `cut`) with this length; no pointer into it outlives the value
        // (see `Memory`).
        let _ = unsafe { munmap(self.base.as_ptr().cast(), self.mapped_bytes) };
    }
}

// SAFETY: plain bytes; concurrent access is governed by the `Memory` contract.
unsafe impl Send for Alias {}
// SAFETY: as above; `&Alias` tells the address and replaces pages by equal ones.
unsafe impl Sync for Alias {}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::SharedMemory;
    use crate::region::{Region, RegionKey, Registry};

    struct Nobody;
    impl Registry for Nobody {
        fn released(&self, _key: RegionKey) {}
    }

    fn remote(range: Range<u64>) -> RemoteSlice {
        RemoteSlice { key: RegionKey(1), offset: range.start, len: range.end - range.start }
    }

    /// The bytes that an alias shows.
    fn seen(alias: &Arc<Alias>, range: Range<usize>) -> Vec<u8> {
        let part = alias.read_only_part(&remote(range.start as u64..range.end as u64)).expect("inside");
        let mut bytes = vec![0; part.len()];
        part.load(0, &mut bytes);
        bytes
    }

    /// Kilobytes of the process that are in memory.
    fn resident_kb() -> u64 {
        let status = std::fs::read_to_string("/proc/self/status").expect("Linux has it");
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("it is there");
        line.trim().trim_end_matches(" kB").parse().expect("a number")
    }

    #[test]
    fn cutting_an_alias_takes_no_memory_for_pages_that_nobody_wrote() {
        const LEN: usize = 256 << 20;
        let memory = SharedMemory::new(LEN).expect("memory");
        let alias = Alias::of(memory.clone()).expect("a second view");
        let ours = Region::new(memory, RegionKey(1), Arc::new(Nobody)).whole();
        let (middle, end) = (LEN / 2 + 77..LEN / 2 + 78, LEN - 1..LEN);
        let part = |slice: &crate::Slice, range: &Range<usize>| slice.slice(range.clone()).expect("inside");
        part(&ours, &middle).store(&[7]);
        part(&ours, &end).store(&[8]);
        let before_kb = resident_kb();
        alias.cut().expect("a private copy");
        assert!(
            resident_kb() < before_kb + (LEN as u64 >> 10) / 4,
            "{before_kb} kB grew to {}",
            resident_kb()
        );
        part(&ours, &middle).store(&[9]);
        assert_eq!(seen(&alias, middle), [7]);
        assert_eq!(seen(&alias, end), [8]);
        assert_eq!(seen(&alias, 0..100), [0; 100]);
    }

    #[test]
    fn an_alias_shows_the_same_bytes_until_it_is_cut_and_then_keeps_them() {
        let memory = SharedMemory::new(5_000).expect("memory");
        let alias = Alias::of(memory.clone()).expect("a second view");
        let ours = Region::new(memory, RegionKey(1), Arc::new(Nobody)).whole();
        let theirs = alias.part(&remote(0..5_000)).expect("inside");
        theirs.store(0, &[7; 5_000]);
        assert_eq!(ours.to_vec(), [7; 5_000]);
        alias.cut().expect("a private copy");
        theirs.store(0, &[8; 10]);
        ours.store(&[9; 20]);
        assert_eq!(ours.to_vec()[..21], [[9; 20].as_slice(), &[7]].concat());
        assert_eq!(seen(&alias, 0..21), [[8; 10].as_slice(), &[7; 11]].concat());
        assert!(alias.part(&remote(4_999..5_001)).is_err());
    }

    #[test]
    fn an_alias_of_memory_that_peers_may_not_write_is_read() {
        let memory = SharedMemory::lendable(5_000).expect("memory");
        let alias = Alias::of(memory.clone()).expect("a second view");
        let ours = Region::new(memory, RegionKey(1), Arc::new(Nobody)).whole();
        ours.store(&[7; 5_000]);
        assert_eq!(seen(&alias, 4_990..5_000), [7; 10]);
        alias.cut().expect("a private copy");
        ours.store(&[8; 5_000]);
        assert_eq!(seen(&alias, 4_990..5_000), [7; 10]);
    }
}

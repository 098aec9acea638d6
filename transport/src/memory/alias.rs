//! A second view of shared memory at other addresses, which can be cut off.

use std::io;
use std::ptr::NonNull;
use std::sync::Arc;

use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous, munmap};

use super::{MEMORY_ALIGN_BYTES, Memory, Share, Space};

/// The bytes of another [`Memory`] of this process, at an address of its own: what one simulated rank sees of another
/// rank's memory. After [`Alias::cut`] it keeps the bytes it last showed and reaches nobody.
#[derive(Debug)]
pub struct Alias {
    base: NonNull<u8>,
    len: usize,
    mapped_bytes: usize,
}

impl Alias {
    /// A second view of `memory`.
    ///
    /// # Errors
    ///
    /// `InvalidInput` when the memory is no page-aligned part of a file; else what the kernel says.
    pub fn of(memory: &dyn Memory) -> io::Result<Arc<Self>> {
        let Share::File { file, offset } = memory.share() else {
            return Err(io::Error::from(io::ErrorKind::InvalidInput));
        };
        if !offset.is_multiple_of(MEMORY_ALIGN_BYTES as u64) {
            return Err(io::Error::from(io::ErrorKind::InvalidInput));
        }
        let len = memory.len();
        let mapped_bytes = len.max(1).next_multiple_of(MEMORY_ALIGN_BYTES);
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a fresh mapping at an address of the kernel's choice aliases no reference of ours: registered
        // memory is touched through raw pointers only.
        let base =
            unsafe { mmap(std::ptr::null_mut(), mapped_bytes, protection, MapFlags::SHARED, file, offset)? };
        let base = NonNull::new(base.cast::<u8>()).expect("mmap does not return null");
        Ok(Arc::new(Self { base, len, mapped_bytes }))
    }

    /// Replaces the view by a private copy at the same addresses. Nobody may write the memory meanwhile (a write in
    /// between would be missing from the copy); the simulator has one thread.
    ///
    /// # Errors
    ///
    /// What the kernel says; nothing has changed then.
    pub fn cut(&self) -> io::Result<()> {
        let mut bytes = vec![0u8; self.len];
        // SAFETY: `len` bytes at `base` are mapped until drop; the vector is ours alone.
        unsafe { std::ptr::copy_nonoverlapping(self.base.as_ptr(), bytes.as_mut_ptr(), self.len) };
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::PRIVATE | MapFlags::FIXED;
        // SAFETY: replaces exactly the pages that this value mapped and owns; they stay readable and writable.
        unsafe { mmap_anonymous(self.base.as_ptr().cast(), self.mapped_bytes, protection, flags)? };
        // SAFETY: as for the copy out.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.base.as_ptr(), self.len) };
        Ok(())
    }
}

impl Drop for Alias {
    fn drop(&mut self) {
        // SAFETY: mapped in `of` (or `cut`) with this length; no pointer into it outlives the value (see `Memory`).
        let _ = unsafe { munmap(self.base.as_ptr().cast(), self.mapped_bytes) };
    }
}

// SAFETY: the mapping is owned, never moves, and stays readable and writable until drop.
unsafe impl Memory for Alias {
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

    #[test]
    fn an_alias_shows_the_same_bytes_until_it_is_cut_and_then_keeps_them() {
        let memory = SharedMemory::new(5_000).expect("memory");
        let alias = Alias::of(&*memory).expect("a second view");
        let ours = Region::new(memory, RegionKey(1), Arc::new(Nobody)).whole();
        let theirs = Region::new(alias.clone(), RegionKey(2), Arc::new(Nobody)).whole();
        theirs.store(&[7; 5_000]);
        assert_eq!(ours.to_vec(), [7; 5_000]);
        alias.cut().expect("a private copy");
        theirs.store(&[8; 10]);
        ours.store(&[9; 20]);
        assert_eq!(ours.to_vec()[..21], [[9; 20].as_slice(), &[7]].concat());
        assert_eq!(theirs.to_vec()[..21], [[8; 10].as_slice(), &[7; 11]].concat());
    }
}

//! Memory that peers can only read.

use std::io;
use std::ptr::NonNull;
use std::sync::Arc;

use rustix::fs::SealFlags;

use super::{Memory, Share, SharedMemory, Space, prefer_own_node, seal, unsealed_file, whole_pages};

/// Zeroed memory in an anonymous file (memfd) that its owner reads and writes and its peers only
/// read, accepted by every host backend.
///
/// The file is mapped here first, then sealed against every further way to write it
/// (`F_SEAL_FUTURE_WRITE`). So a peer of this host that receives the file can map it for reading,
/// and the kernel refuses everything else. Nothing has to be taken back from a severed peer,
/// because nothing can be written through its mapping. But what a peer has mapped it may read for
/// as long as it runs: data for other readers belongs into other memory.
#[derive(Debug)]
pub struct LendableMemory {
    memory: SharedMemory,
}

impl LendableMemory {
    /// `len` zeroed bytes in a new memfd.
    ///
    /// # Errors
    ///
    /// The kernel's error: out of memory, or too many files.
    pub fn new(len: usize) -> io::Result<Arc<Self>> {
        let mapped_bytes = whole_pages(len)?;
        let file = unsealed_file("pleach-lendable", mapped_bytes)?;
        let memory = SharedMemory::map(file, len, mapped_bytes, false)?;
        // Before any other process can have the file.
        seal(&memory.file, SealFlags::FUTURE_WRITE)?;
        prefer_own_node(memory.base, mapped_bytes);
        Ok(Arc::new(Self { memory }))
    }
}

// SAFETY: the memory that it contains, whose file was sealed before anybody else had it.
unsafe impl Memory for LendableMemory {
    fn base(&self) -> NonNull<u8> {
        self.memory.base()
    }
    fn len(&self) -> usize {
        self.memory.len()
    }
    fn space(&self) -> Space {
        Space::Host
    }
    fn share(&self) -> Share<'_> {
        self.memory.share()
    }
    fn peers_may_write(&self) -> bool {
        false
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use rustix::fs::{FallocateFlags, fallocate, fcntl_add_seals, ftruncate};
    use rustix::io::{Errno, pwrite};
    use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap, mprotect, munmap};

    use super::*;

    const BYTES: usize = 8192;

    #[test]
    fn the_owner_writes_and_whoever_has_the_file_can_only_read() {
        let memory = LendableMemory::new(BYTES).expect("memory");
        // As a peer has it: the open file, received over a socket.
        let Share::File { file, offset: 0 } = memory.share() else { panic!("it is in a file") };
        let file = file.try_clone_to_owned().expect("a descriptor");
        let map = |protection, flags| {
            // SAFETY: a fresh mapping at an address of the kernel's choice.
            unsafe { mmap(std::ptr::null_mut(), BYTES, protection, flags, file.as_fd(), 0) }
        };
        let both = ProtFlags::READ | ProtFlags::WRITE;
        assert_eq!(map(both, MapFlags::SHARED), Err(Errno::PERM));
        let theirs = map(ProtFlags::READ, MapFlags::SHARED).expect("reading is allowed");
        // SAFETY: `BYTES` bytes of this mapping, which nobody accesses meanwhile.
        let widened = unsafe { mprotect(theirs, BYTES, MprotectFlags::READ | MprotectFlags::WRITE) };
        assert_eq!(widened, Err(Errno::ACCESS));
        assert_eq!(pwrite(&file, &[1; 8], 0), Err(Errno::PERM));
        assert_eq!(ftruncate(&file, 0), Err(Errno::PERM));
        let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        assert_eq!(fallocate(&file, hole, 0, 4096), Err(Errno::PERM));
        assert_eq!(fcntl_add_seals(&file, SealFlags::WRITE), Err(Errno::PERM));
        // SAFETY: the owner's own bytes.
        unsafe { memory.base().as_ptr().add(5000).write(7) };
        // SAFETY: mapped above.
        assert_eq!(unsafe { theirs.cast::<u8>().add(5000).read_volatile() }, 7, "a later write shows");
        // SAFETY: mapped above, and not used any more.
        unsafe { munmap(theirs, BYTES) }.expect("a mapping");
    }
}

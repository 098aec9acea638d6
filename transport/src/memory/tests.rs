//! The accesses that the kernel allows to a process with the file of lendable memory.

use std::os::fd::AsFd;

use rustix::fs::{FallocateFlags, fallocate, fcntl_add_seals, ftruncate};
use rustix::io::{Errno, pwrite};
use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap, mprotect, munmap};

use super::*;

const BYTES: usize = 8192;

#[test]
fn the_owner_writes_and_whoever_has_the_file_can_only_read() {
    let memory = SharedMemory::lendable(BYTES).expect("memory");
    // A peer has the open file, which it received over a socket.
    let Share::File { file, offset: 0 } = memory.share() else { panic!("it is in a file") };
    let file = file.try_clone_to_owned().expect("a descriptor");
    let map = |protection, flags| {
        // SAFETY: a fresh mapping at an address of the kernel's choice.
        unsafe { mmap(std::ptr::null_mut(), BYTES, protection, flags, file.as_fd(), 0) }
    };
    let both = ProtFlags::READ | ProtFlags::WRITE;
    assert_eq!(map(both, MapFlags::SHARED), Err(Errno::PERM));
    let theirs = map(ProtFlags::READ, MapFlags::SHARED).expect("reading is allowed");
    // SAFETY: the mapping has `BYTES` bytes, which nobody accesses meanwhile.
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

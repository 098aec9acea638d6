//! Copies between a program's buffers and the rings of streams.
//!
//! **Invariant:** no reference to the bytes of a ring is ever made: the other process may write
//! them at any time, and then what is read is a mixture, which its protocol tells.
#![allow(unsafe_code)]

use pleach_transport::{Mapped, Slice};
use tokio::io::ReadBuf;

/// The bytes of a direction that are under way: a message of most models, so that a sender that
/// computes next need not wait for credits.
pub(crate) const RING_BYTES: usize = 4 << 20;

/// Stores bytes into a ring of the peer.
///
/// # Panics
///
/// When they reach beyond its end: the caller's length check is missing.
pub(crate) fn store_mapped(ring: &Mapped, at: usize, bytes: &[u8]) {
    assert!(ring.is_on_host() && ring.len().checked_sub(at).is_some_and(|room| bytes.len() <= room));
    // SAFETY: the range lies inside the mapping, which stays writable while it is held
    // (`Mapped::new`). It is a peer's memory, so it overlaps no slice of this process. The peer
    // reads the bytes after the signal that follows, and this end writes there again after the
    // credit.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), ring.as_ptr().add(at), bytes.len()) }
}

/// Stores bytes into a ring of this end.
///
/// # Panics
///
/// As [`store_mapped`].
pub(crate) fn store_own(ring: &Slice, at: usize, bytes: &[u8]) {
    assert!(ring.len().checked_sub(at).is_some_and(|room| bytes.len() <= room));
    // SAFETY: the range lies inside the slice, which holds its memory: memory of this module, of
    // which no slice of bytes exists. No transfer reads these bytes now: their last one has ended.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), ring.as_ptr().add(at), bytes.len()) }
}

/// Loads `count` bytes of a ring of this end.
///
/// # Panics
///
/// When they reach beyond the end of the ring, or of what is to be filled.
pub(crate) fn load(ring: &Slice, at: usize, count: usize, into: &mut ReadBuf<'_>) {
    assert!(count <= into.remaining() && ring.len().checked_sub(at).is_some_and(|room| count <= room));
    // SAFETY: the source lies inside the slice, which holds its memory; see `store_own`. The
    // destination is as long, and a buffer of the caller's alone. All of what is declared as
    // initialised was copied, and no byte is made uninitialised.
    unsafe {
        let unfilled = into.unfilled_mut().as_mut_ptr().cast::<u8>();
        std::ptr::copy_nonoverlapping(ring.as_ptr().cast_const().add(at), unfilled, count);
        into.assume_init(count);
    }
    into.advance(count);
}

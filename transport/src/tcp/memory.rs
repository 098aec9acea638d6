//! Registered memory and sockets: sending straight out of a slice, receiving straight into one.
//!
//! This is the safe interface to all raw memory accesses of `tcp`. **Invariant:** every address
//! given to the kernel lies inside a slice or a buffer that is borrowed for the whole call, and the
//! kernel keeps none of them afterwards.

use std::io;
use std::marker::PhantomData;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::atomic::{AtomicU64, Ordering};

use crate::device::AtomicOp;
use crate::region::Slice;

/// Pieces that one send gathers at most. The kernel takes 1,024; more than 64 save nothing.
pub(crate) const GATHER_PIECES_MAX: usize = 64;

/// Pieces of memory that one send transmits, in order.
pub(crate) struct Gather<'a> {
    vectors: [libc::iovec; GATHER_PIECES_MAX],
    len: usize,
    bytes: usize,
    _borrows: PhantomData<&'a [u8]>,
}

impl<'a> Gather<'a> {
    /// An empty list.
    pub(crate) fn new() -> Self {
        let nothing = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };
        Self { vectors: [nothing; GATHER_PIECES_MAX], len: 0, bytes: 0, _borrows: PhantomData }
    }

    /// How many more pieces fit.
    pub(crate) fn room(&self) -> usize {
        GATHER_PIECES_MAX - self.len
    }

    /// Their length in total, in bytes.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Adds bytes of this process.
    pub(crate) fn push_bytes(&mut self, bytes: &'a [u8]) {
        self.push(bytes.as_ptr().cast_mut(), bytes.len());
    }

    /// Adds the slice's bytes from `from` on.
    ///
    /// # Panics
    ///
    /// When `from` lies beyond the slice.
    pub(crate) fn push_slice(&mut self, slice: &'a Slice, from: usize) {
        assert!(from <= slice.len(), "byte {from} of a slice of {}", slice.len());
        self.push(slice.as_ptr().wrapping_add(from), slice.len() - from);
    }

    fn push(&mut self, base: *mut u8, len: usize) {
        if len > 0 {
            self.vectors[self.len] = libc::iovec { iov_base: base.cast(), iov_len: len };
            self.len += 1;
            self.bytes += len;
        }
    }

    /// Sends as many bytes as the socket takes without blocking; returns their number.
    pub(crate) fn send(&self, socket: BorrowedFd<'_>) -> io::Result<usize> {
        // SAFETY: all-zero is the documented empty value of this plain C structure.
        let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
        message.msg_iov = self.vectors.as_ptr().cast_mut();
        message.msg_iovlen = self.len as _;
        // SAFETY: the vectors name bytes that are borrowed for 'a, which outlives this call (slices
        // keep their memory alive and readable); the kernel only reads them, and writes neither the
        // vectors nor the header.
        let sent =
            unsafe { libc::sendmsg(socket.as_raw_fd(), &message, libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL) };
        usize::try_from(sent).map_err(|_| io::Error::last_os_error())
    }
}

impl Slice {
    /// Copies `bytes` into the slice from byte `at` on, as a transfer would.
    ///
    /// # Panics
    ///
    /// When they do not fit.
    pub(crate) fn store_at(&self, at: usize, bytes: &[u8]) {
        assert!(
            at.checked_add(bytes.len()).is_some_and(|end| end <= self.len()),
            "{} bytes at {at} into a slice of {}",
            bytes.len(),
            self.len()
        );
        // SAFETY: inside the slice (checked above), whose memory is alive and writable; `bytes` is
        // a reference and registered memory is never borrowed while transfers may touch it, so they
        // do not overlap.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.as_ptr().add(at), bytes.len()) }
    }

    /// Copies the slice's bytes from byte `at` on, as a transfer would.
    ///
    /// # Panics
    ///
    /// When they do not lie inside the slice.
    pub(crate) fn load_at(&self, at: usize, bytes: &mut [u8]) {
        assert!(
            at.checked_add(bytes.len()).is_some_and(|end| end <= self.len()),
            "{} bytes at {at} of a slice of {}",
            bytes.len(),
            self.len()
        );
        // SAFETY: inside the slice (checked above), whose memory is alive and readable; `bytes` is
        // a unique reference, and registered memory is never borrowed, so they do not overlap.
        unsafe {
            std::ptr::copy_nonoverlapping(self.as_ptr().add(at), bytes.as_mut_ptr(), bytes.len());
        }
    }

    /// Receives at most `limit` bytes into the slice from byte `at` on, and the bytes after them
    /// into `tail`, in one call that does not block. Returns the number of bytes received; zero
    /// means that the peer has closed.
    ///
    /// # Panics
    ///
    /// When `at + limit` lies beyond the slice.
    pub(crate) fn receive(
        &self,
        socket: BorrowedFd<'_>,
        at: usize,
        limit: usize,
        tail: &mut [u8],
    ) -> io::Result<usize> {
        assert!(
            at.checked_add(limit).is_some_and(|end| end <= self.len()),
            "{limit} bytes at {at} into a slice of {}",
            self.len()
        );
        let vectors = [
            libc::iovec { iov_base: self.as_ptr().wrapping_add(at).cast(), iov_len: limit },
            libc::iovec { iov_base: tail.as_mut_ptr().cast(), iov_len: tail.len() },
        ];
        // SAFETY: all-zero is the documented empty value of this plain C structure.
        let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
        message.msg_iov = vectors.as_ptr().cast_mut();
        message.msg_iovlen = if tail.is_empty() { 1 } else { 2 };
        // SAFETY: the first vector lies inside the slice (checked above), whose memory is alive and
        // writable and is touched through raw pointers only; the second is borrowed mutably for
        // this call. The kernel writes at most their lengths and keeps no address.
        let received = unsafe { libc::recvmsg(socket.as_raw_fd(), &mut message, libc::MSG_DONTWAIT) };
        usize::try_from(received).map_err(|_| io::Error::last_os_error())
    }

    /// Carries out an atomic on the word that this slice holds, and returns the old value; `None`
    /// when the slice is not 8 aligned bytes.
    pub(crate) fn atomic(&self, operation: AtomicOp) -> Option<u64> {
        let word = self.as_ptr().cast::<u64>();
        if self.len() != size_of::<u64>() || !word.is_aligned() {
            return None;
        }
        // SAFETY: eight aligned bytes inside a live region (checked above); they are accessed
        // concurrently only as a transfer's bytes may be, through raw pointers, and by other
        // atomics.
        let word = unsafe { AtomicU64::from_ptr(word) };
        // AcqRel: pairs with itself, so what one rank published before its atomic is seen by the
        // next one's.
        Some(match operation {
            AtomicOp::Add(value) => word.fetch_add(value, Ordering::AcqRel),
            AtomicOp::CompareSwap { expected, new } => word
                .compare_exchange(expected, new, Ordering::AcqRel, Ordering::Acquire)
                .unwrap_or_else(|found| found),
        })
    }
}

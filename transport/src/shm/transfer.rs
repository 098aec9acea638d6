//! Copies between this rank's memory and the mapped memory of a peer.

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::link::PeerRegion;
use crate::Rank;
use crate::clock::Nanos;
use crate::device::{AtomicOp, Source, TransferId};
use crate::region::{RemoteSlice, Slice};
use crate::signals::Signal;

/// Bytes copied at once, by submit or by a step of poll.
pub(crate) const PIECE_BYTES: usize = 256 << 10;

/// Bytes copied in one poll: about 100 µs.
pub(crate) const POLL_BYTES: usize = 1 << 20;

/// A put or get between checked ends.
pub(crate) enum HostCopy {
    Put { src: Slice, dst: NonNull<u8>, signal: Option<Signal> },
    Get { src: NonNull<u8>, dst: Slice },
}

/// A transfer that is too long for submit to carry out.
pub(crate) struct LargeCopy {
    pub(crate) peer: Rank,
    pub(crate) id: TransferId,
    pub(crate) copy: HostCopy,
    pub(crate) done: usize,
    pub(crate) region: Arc<PeerRegion>,
    /// The number of drains of this rank before the transfer.
    pub(crate) drains_before: u64,
}

// SAFETY: the addresses lie in `region`, which is Send + Sync and held by the same value.
unsafe impl Send for LargeCopy {}

/// A transfer to a region that exists but whose announcement is still on its way.
pub(crate) struct WaitingTransfer {
    pub(crate) peer: Rank,
    pub(crate) id: TransferId,
    pub(crate) request: TransferRequest,
    /// When the transfer is refused; set by the first poll.
    pub(crate) deadline: Option<Nanos>,
    /// The number of drains of this rank before the transfer.
    pub(crate) drains_before: u64,
}

/// A transfer as it was submitted.
pub(crate) enum TransferRequest {
    Put { src: Source, dst: RemoteSlice, signal: Option<Signal> },
    Get { src: RemoteSlice, dst: Slice },
    Atomic { word: RemoteSlice, op: AtomicOp },
}

impl TransferRequest {
    pub(crate) fn remote(&self) -> &RemoteSlice {
        match self {
            Self::Put { dst: remote, .. }
            | Self::Get { src: remote, .. }
            | Self::Atomic { word: remote, .. } => remote,
        }
    }

    /// Whether the transfer changes the peer's memory.
    pub(crate) fn writes(&self) -> bool {
        !matches!(self, Self::Get { .. })
    }

    /// Bytes to copy.
    pub(crate) fn len(&self) -> usize {
        match self {
            Self::Put { src, .. } => src.len(),
            Self::Get { dst, .. } => dst.len(),
            Self::Atomic { .. } => 0,
        }
    }
}

impl HostCopy {
    pub(crate) fn len(&self) -> usize {
        match self {
            Self::Put { src, .. } => src.len(),
            Self::Get { dst, .. } => dst.len(),
        }
    }

    /// Copies bytes `done .. done + bytes`.
    ///
    /// # Safety
    ///
    /// The bytes lie inside both ends, and the peer's region is mapped.
    pub(crate) unsafe fn run(&self, done: usize, bytes: usize) {
        let (from, to) = match self {
            Self::Put { src, dst, .. } => (src.as_ptr().cast_const(), dst.as_ptr()),
            Self::Get { src, dst } => (src.as_ptr().cast_const(), dst.as_ptr()),
        };
        // SAFETY: by this function's contract. Source and destination are different mappings, so
        // their addresses do not overlap. The owner of the transfer does not touch its slice until
        // `Done`.
        unsafe { std::ptr::copy_nonoverlapping(from.add(done), to.add(done), bytes) }
    }
}

/// Copies inline bytes to a peer.
///
/// # Safety
///
/// As many bytes at `to` are mapped and writable.
pub(crate) unsafe fn store(bytes: &[u8], to: NonNull<u8>) {
    // SAFETY: by this function's contract; a mapping of a peer's memory overlaps no value of this
    // process.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to.as_ptr(), bytes.len()) }
}

/// Carries out an atomic on a peer's word. Returns the old value.
///
/// # Safety
///
/// Eight aligned bytes at `word` are mapped and writable.
pub(crate) unsafe fn apply_atomic(word: NonNull<u8>, op: AtomicOp) -> u64 {
    // SAFETY: by this function's contract; all ranks change such words atomically.
    let word = unsafe { AtomicU64::from_ptr(word.as_ptr().cast()) };
    // Acquire and release pair with the atomics of all ranks on the word.
    match op {
        AtomicOp::Add(value) => word.fetch_add(value, Ordering::AcqRel),
        AtomicOp::CompareSwap { expected, new } => {
            match word.compare_exchange(expected, new, Ordering::AcqRel, Ordering::Acquire) {
                Ok(old) | Err(old) => old,
            }
        }
    }
}

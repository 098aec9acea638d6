//! The only place of the engine that touches bytes.
//!
//! Addresses come from three sources: the caller's slices (valid until the run's outcome was taken), this rank's scratch
//! region and mappings of peers' regions (both held by the run). Offsets are computed from a layout that was checked
//! against the slices' lengths when the run began. That no two accesses collide is what the schedule's proof says.
#![allow(unsafe_code)]

use pleach_transport::Nanos;

use crate::compute::{Compute, Job};

/// Where some bytes are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Address(pub(crate) *mut u8);

// SAFETY: an address is a number; who dereferences it vouches for the memory (see the module).
unsafe impl Send for Address {}

impl Address {
    /// No bytes at all.
    pub const NULL: Self = Self(std::ptr::null_mut());

    /// Where a slice begins.
    #[must_use]
    pub fn of(bytes: &mut [u8]) -> Self {
        Self(bytes.as_mut_ptr())
    }

    pub(super) fn add(self, bytes: usize) -> Self {
        // Wrapping, because a run without data computes addresses of nothing from null.
        Self(self.0.wrapping_add(bytes))
    }

    /// Stores at most a cell's worth of bytes.
    pub(super) fn store(self, bytes: &[u8]) {
        if !bytes.is_empty() {
            // SAFETY: `bytes.len()` is the chunk's length, which lies inside the place's memory (see the module).
            unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.0, bytes.len()) }
        }
    }

    pub(super) fn load(self, bytes: &mut [u8]) {
        if !bytes.is_empty() {
            // SAFETY: as in `store`.
            unsafe { std::ptr::copy_nonoverlapping(self.0, bytes.as_mut_ptr(), bytes.len()) }
        }
    }

    /// Copies a chunk into scratch, which overlaps no slice of a caller.
    pub(super) fn copy_to(self, into: Self, bytes: usize) {
        if bytes > 0 {
            // SAFETY: both are places of this rank with a chunk's room; scratch is a region of its own.
            unsafe { std::ptr::copy_nonoverlapping(self.0, into.0, bytes) }
        }
    }
}

/// Goes on with a job of the run; true when it is complete.
pub(super) fn advance(compute: &mut dyn Compute, job: &mut Job, now: Nanos) -> bool {
    // SAFETY: sources and destinations are chunks of places (see the module); the proof says that nobody else touches
    // them between the steps this one is after and the steps that are after it, and a place aliases another one wholly or
    // not at all. After a peer is lost or severed its mappings keep their bytes (`Mapped`).
    unsafe { compute.advance(job, now) }
}

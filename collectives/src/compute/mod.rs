//! Reductions and copies on memory that a device moved into place.
//!
//! A [`Job`] is one pass over memory: combine `k` sources, store the result in `m` destinations. It
//! is polled: each [`Compute::advance`] does a bounded piece, so that deadlines and aborts are
//! never starved, and so that a simulated processor can spread the job over virtual time in random
//! pieces. [`HostCompute`] is this host's processor.
//!
//! # What a reduction means
//!
//! The result depends on the sources' values and order alone: not on addresses, alignment, where a
//! slice of work ends or which instructions the processor has. Exactly:
//!
//! * Sources are folded from left to right. With two sources the order does not change the
//!   bits of the result. The payload of a NaN is the exception: only the fact that a result is NaN
//!   is promised.
//! * The floats of 16 and 8 bits are combined in `f32` and rounded once, to nearest even, at the
//!   end of the pass.
//! * Minimum and maximum of floats are NaN if any source is, and take −0 to be less than +0.
//! * Integers wrap.
//! * Bitwise operations combine bits, whatever the element type is.
//! * [`Job::divide_by`] divides the combined value before the one rounding: floats by true division
//!   (by the divisor in the precision of the combination: exact up to 2^24 ranks), integers towards
//!   zero (so a sum of integers wraps first).
//!
//! Each source is read once from memory and each destination written once, for every `k` and `m`.
//! Between the read and the write the data stay in a strip, which fits the first-level cache.

// Raw memory that devices and peers share with us: no references to it are ever made.
#![allow(unsafe_code)]

use std::sync::Arc;

use pleach_transport::cuda::CudaError;
use pleach_transport::{Memory, Nanos, Space};
use pleach_vocabulary::{DataType, ReduceOp};

mod convert;
pub mod cuda;
mod element;
mod environment;
mod float8;
mod kernel;
#[cfg(test)]
mod oracle;
mod scale;
pub mod simulated;
#[cfg(test)]
mod speed;
#[cfg(test)]
mod tests;

pub(crate) use environment::{DefaultEnvironment, IsolatedCompute};
pub use float8::{F8E4M3, F8E5M2};
pub use kernel::Instructions;
pub(crate) use scale::Scale;

/// One pass over memory: combine the sources, store the result in every destination.
///
/// Making a job touches no memory; [`Compute::advance`] says what must hold while the job runs. The
/// caller may reuse the vectors: carrying out a job allocates nothing.
#[derive(Debug)]
pub struct Job {
    /// Element type.
    pub data_type: DataType,
    /// How sources are combined; unused with a single source.
    pub op: ReduceOp,
    /// Divide the result by this many (1, or 0: leave it), for [`ReduceOp::Avg`], before the one
    /// rounding.
    pub divide_by: u32,
    /// Where the sources begin, combined from left to right. At least one. Any alignment.
    pub from: Vec<*const u8>,
    /// Where the result goes. At least one. A destination is one of the sources or overlaps none.
    /// Any alignment.
    pub into: Vec<*mut u8>,
    /// How many elements.
    pub elements: usize,
    /// How many of them are done.
    pub elements_done: usize,
    /// Number by which the [`Compute`] knows the job; 0 until it was begun.
    pub ticket: u64,
}

impl Job {
    /// A job that computes nothing.
    pub(crate) fn empty() -> Self {
        Self {
            data_type: DataType::U8,
            op: ReduceOp::Sum,
            divide_by: 1,
            from: Vec::new(),
            into: Vec::new(),
            elements: 0,
            elements_done: 0,
            ticket: 0,
        }
    }

    /// Makes the job, which may have been another one, one of this call, without addresses yet.
    #[inline]
    pub(crate) fn begin(&mut self, data_type: DataType, op: ReduceOp, elements: usize, divide_by: u32) {
        self.data_type = data_type;
        self.op = op;
        self.divide_by = divide_by;
        self.elements = elements;
        self.elements_done = 0;
        self.ticket = 0;
        self.from.clear();
        self.into.clear();
    }

    /// Adds a destination to a job that has its sources. A copy onto itself is nothing, and two
    /// destinations that are one memory are written once.
    #[inline]
    pub(crate) fn add_destination(&mut self, address: *mut u8) {
        let is_copy_onto_itself =
            self.from.len() == 1 && self.from[0] == address.cast_const() && self.divide_by <= 1;
        if !is_copy_onto_itself && !self.into.contains(&address) {
            self.into.push(address);
        }
    }
}

// SAFETY: a job only names addresses. They are dereferenced in `Compute::advance` alone, whose
// caller vouches for the memory at that moment on whatever thread it then is; nothing about the
// addresses belongs to a thread.
unsafe impl Send for Job {}

/// Something that carries out jobs.
///
/// # Safety
///
/// It touches a job's memory only between the job's first [`Compute::advance`] and the one that
/// completes it, or until it is idle after the job was dropped. [`Compute::space`] is always the
/// same, and [`Compute::staging`] gives memory of that space or of the host, as long as what it was
/// given.
pub unsafe trait Compute: Send {
    /// Goes on with the job; true when it is complete. Does at most about [`SLICE_BYTES`] at a
    /// time.
    ///
    /// # Safety
    ///
    /// Until the job is complete or dropped, every source has `elements` readable elements and
    /// every destination as many writable ones, nobody else writes the sources or touches the
    /// destinations, and a destination is exactly one of the sources or overlaps none of them, and
    /// no other destination.
    unsafe fn advance(&mut self, job: &mut Job, now: Nanos) -> bool;

    /// Whether [`Compute::advance`] completes every job of at most [`SLICE_BYTES`] at once,
    /// whatever the time.
    fn is_immediate(&self) -> bool {
        false
    }

    /// When an unfinished job wants to be advanced at the latest; `None`: at once.
    fn next_wakeup(&self) -> Option<Nanos> {
        None
    }

    /// The kind of memory that it works on. Memory other than [`Space::Host`] is touched by nothing
    /// else.
    fn space(&self) -> Space {
        Space::Host
    }

    /// Memory as long as this host memory, in which peers put the bytes that it combines. Devices
    /// can register it.
    fn staging(&self, memory: Arc<dyn Memory>) -> Result<Arc<dyn Memory>, ComputeError> {
        Ok(memory)
    }

    /// Why no job goes on any more, if none does.
    fn failure(&self) -> Option<&ComputeError> {
        None
    }

    /// Whether no job that was dropped unfinished is under way any more.
    fn is_idle(&mut self) -> bool {
        true
    }
}

/// Why nothing can be computed.
#[derive(Clone, pleach_derive::ErrorDebug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ComputeError {
    /// The GPU, or its driver.
    #[error(transparent)]
    Cuda(#[from] CudaError),
    /// More places than a kernel takes.
    #[error(
        "a GPU combines at most {sources_max} sources into {destinations_max} destinations at once, not {sources} into {destinations}; take an algorithm that combines fewer (ring)"
    )]
    TooMany {
        /// How many sources there are.
        sources: usize,
        /// How many destinations.
        destinations: usize,
        /// Most sources.
        sources_max: usize,
        /// Most destinations.
        destinations_max: usize,
    },
}

/// Most bytes, of all sources and destinations together, that one [`Compute::advance`] touches (and
/// at least one strip of each): 20 µs to 50 µs of work.
pub const SLICE_BYTES: usize = 512 << 10;

/// Computes on this host's processor, at once, with the best instructions it has.
#[derive(Debug)]
pub struct HostCompute {
    instructions: Instructions,
    /// Boxed so that a `HostCompute` can be moved cheaply.
    strips: Box<kernel::Strips>,
}

impl HostCompute {
    /// With the best instructions that this processor has.
    #[must_use]
    pub fn new() -> Self {
        Self::with(Instructions::best())
    }

    /// With these instructions; results are the same with any.
    #[must_use]
    pub fn with(instructions: Instructions) -> Self {
        Self { instructions, strips: Box::default() }
    }
}

impl Default for HostCompute {
    fn default() -> Self {
        Self::new()
    }
}

// SAFETY: it computes at once, on host memory.
unsafe impl Compute for HostCompute {
    unsafe fn advance(&mut self, job: &mut Job, _now: Nanos) -> bool {
        let left = job.elements - job.elements_done;
        let elements = slice_elements(job, left);
        if elements > 0 {
            let first = job.elements_done;
            // SAFETY: `first .. first + elements` lies within the job's elements; the rest is the
            // caller's promise.
            unsafe { self.strips.run(self.instructions, job, first, elements) };
            job.elements_done += elements;
        }
        job.elements_done == job.elements
    }

    fn is_immediate(&self) -> bool {
        true
    }
}

/// How many of the elements that are left make a slice of this job: all if they are few, else whole
/// strips, at least one.
fn slice_elements(job: &Job, left: usize) -> usize {
    let bytes_an_element = job.data_type.bytes() * (job.from.len() + job.into.len());
    if left <= SLICE_BYTES && left * bytes_an_element <= SLICE_BYTES {
        return left;
    }
    let strip = kernel::strip_elements(job.data_type);
    left.min((SLICE_BYTES / bytes_an_element / strip).max(1) * strip)
}

//! Reductions and copies on memory that a device moved into place.
//!
//! A [`Job`] is one pass over memory: it combines `k` sources and stores the result in `m`
//! destinations. A job is polled: each [`Compute::advance`] carries out a bounded piece. So
//! deadlines and aborts never starve, and a simulated processor can spread the job over virtual
//! time in random pieces. [`HostCompute`] is this host's processor.
//!
//! # What a reduction means
//!
//! The result depends on the values and the order of the sources alone. It does not depend on
//! addresses, alignment, the end of a slice of work, or the instructions of the processor. Exactly:
//!
//! * Sources are folded from left to right. With two sources the order does not change the
//!   bits of the result. The payload of a NaN is the exception: only the fact that a result is NaN
//!   is promised.
//! * The floats of 16 and 8 bits are combined in `f32` and rounded once, to nearest even, at the
//!   end of the pass.
//! * Minimum and maximum of floats are NaN if any source is NaN. For them −0 is less than +0.
//! * Integers wrap.
//! * Bitwise operations combine bits, whatever the element type is.
//! * [`Job::divide_by`] divides the combined value before its single rounding. Floats are divided
//!   by the divisor in the precision of the combination, which is exact up to 2^24 ranks. Quotients
//!   of integers are rounded towards zero, and a sum of integers wraps before the division.
//!
//! For every `k` and `m`, each source is read from memory once and each destination is written
//! once. Between the read and the write the data stay in a strip, which fits in the first-level
//! cache.

// Devices and peers share this raw memory with us, so no references to it are ever made.
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

/// One pass over memory, which combines the sources and stores the result in every destination.
///
/// Making a job touches no memory. [`Compute::advance`] lists the conditions that must hold while
/// the job runs. The caller may reuse the vectors: carrying out a job allocates nothing.
#[derive(Debug)]
pub struct Job {
    /// Element type.
    pub data_type: DataType,
    /// The operation that combines the sources; unused with a single source.
    pub op: ReduceOp,
    /// The divisor of the result, for [`ReduceOp::Avg`]. The result is divided before its single
    /// rounding; 0 and 1 do not divide.
    pub divide_by: u32,
    /// The addresses of the sources, which are combined from left to right. There is at least one
    /// source. Any alignment is allowed.
    pub from: Vec<*const u8>,
    /// The addresses of the destinations. There is at least one destination. A destination is one
    /// of the sources or overlaps no source. Any alignment is allowed.
    pub into: Vec<*mut u8>,
    /// The number of elements.
    pub elements: usize,
    /// The number of elements that are done.
    pub elements_done: usize,
    /// The number of the job in its [`Compute`]; 0 before the job has begun.
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

    /// Reuses the job for this call. It has no addresses yet.
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

    /// Adds a destination to a job that has its sources. A copy onto itself is left out, and a
    /// destination that is there already is not added again.
    #[inline]
    pub(crate) fn add_destination(&mut self, address: *mut u8) {
        let is_copy_onto_itself =
            self.from.len() == 1 && self.from[0] == address.cast_const() && self.divide_by <= 1;
        if !is_copy_onto_itself && !self.into.contains(&address) {
            self.into.push(address);
        }
    }
}

// SAFETY: a job only holds addresses, which belong to no thread. Only `Compute::advance`
// dereferences them. Its caller promises on any thread that the memory is valid at that moment.
unsafe impl Send for Job {}

/// A processor that carries out jobs.
///
/// # Safety
///
/// A job's memory is touched only between the first [`Compute::advance`] of the job and the one
/// that completes it. If the job was dropped before, its memory may be touched until the processor
/// is idle. [`Compute::space`] always returns the same value. [`Compute::staging`] returns memory
/// of this space or of the host, with the length of its argument.
pub unsafe trait Compute: Send {
    /// Continues the job, by about [`SLICE_BYTES`] at most. Returns whether the job is complete.
    ///
    /// # Safety
    ///
    /// These conditions hold until the job is complete or dropped. Every source has `elements`
    /// readable elements, and every destination has `elements` writable elements. Nobody else
    /// writes the sources or touches the destinations. A destination is exactly one of the sources,
    /// or overlaps no source. Destinations do not overlap each other.
    unsafe fn advance(&mut self, job: &mut Job, now: Nanos) -> bool;

    /// Whether a single [`Compute::advance`] completes every job of at most [`SLICE_BYTES`], at any
    /// time.
    fn is_immediate(&self) -> bool {
        false
    }

    /// The latest time at which an unfinished job must be advanced again; `None`: at once.
    fn next_wakeup(&self) -> Option<Nanos> {
        None
    }

    /// The kind of memory on which jobs work. If it is not [`Space::Host`], only this processor
    /// touches such memory.
    fn space(&self) -> Space {
        Space::Host
    }

    /// Memory of the same length as this host memory, into which peers put bytes to combine.
    /// Devices can register it.
    fn staging(&self, memory: Arc<dyn Memory>) -> Result<Arc<dyn Memory>, ComputeError> {
        Ok(memory)
    }

    /// The failure after which no job continues, if there was one.
    fn failure(&self) -> Option<&ComputeError> {
        None
    }

    /// Whether all jobs that were dropped unfinished have ended.
    fn is_idle(&mut self) -> bool {
        true
    }
}

/// Why nothing can be computed.
#[derive(Clone, pleach_derive::ErrorDebug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ComputeError {
    /// The GPU or its driver has failed.
    #[error(transparent)]
    Cuda(#[from] CudaError),
    /// The job has more sources or destinations than a kernel takes.
    #[error(
        "a GPU combines at most {sources_max} sources into {destinations_max} destinations at once, not {sources} into {destinations}; take an algorithm that combines fewer (ring)"
    )]
    TooMany {
        /// The number of sources.
        sources: usize,
        /// The number of destinations.
        destinations: usize,
        /// Most sources.
        sources_max: usize,
        /// Most destinations.
        destinations_max: usize,
    },
}

/// Most bytes of all sources and destinations together that one [`Compute::advance`] touches; it
/// touches at least one strip of each. This is 20 µs to 50 µs of work.
pub const SLICE_BYTES: usize = 512 << 10;

/// Computes at once on this host's processor, with the best instructions that it has.
#[derive(Debug)]
pub struct HostCompute {
    instructions: Instructions,
    /// Boxed so that a `HostCompute` can be moved cheaply.
    strips: Box<kernel::Strips>,
}

impl HostCompute {
    /// A processor that uses the best instructions of this host.
    #[must_use]
    pub fn new() -> Self {
        Self::with(Instructions::best())
    }

    /// A processor that uses these instructions. The results are the same with all instructions.
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

// SAFETY: jobs are computed at once, on host memory.
unsafe impl Compute for HostCompute {
    unsafe fn advance(&mut self, job: &mut Job, _now: Nanos) -> bool {
        let left = job.elements - job.elements_done;
        let elements = slice_elements(job, left);
        if elements > 0 {
            let first = job.elements_done;
            // SAFETY: `first .. first + elements` lies within the job's elements. The caller
            // promises everything else.
            unsafe { self.strips.run(self.instructions, job, first, elements) };
            job.elements_done += elements;
        }
        job.elements_done == job.elements
    }

    fn is_immediate(&self) -> bool {
        true
    }
}

/// The number of elements of the next slice of a job, of which `left` elements are left. It is all
/// of them if they are few; otherwise it is a number of whole strips, at least one.
fn slice_elements(job: &Job, left: usize) -> usize {
    let bytes_an_element = job.data_type.bytes() * (job.from.len() + job.into.len());
    if left <= SLICE_BYTES && left * bytes_an_element <= SLICE_BYTES {
        return left;
    }
    let strip = kernel::strip_elements(job.data_type);
    left.min((SLICE_BYTES / bytes_an_element / strip).max(1) * strip)
}

//! Reductions and copies on memory that a device moved into place.
//!
//! A [`Job`] is polled: whoever computes does a bounded piece at each [`Compute::advance`], so that deadlines and aborts
//! are never starved, and so that a simulated processor can spread the job over virtual time in random pieces.

use pleach_transport::Nanos;

use crate::collective::{DataType, ReduceOp};

/// One pass over memory: combine the sources, store the result in every destination.
#[derive(Debug)]
pub struct Job {
    /// Element type.
    pub data_type: DataType,
    /// How sources are combined; unused with a single source.
    pub op: ReduceOp,
    /// Divide the result by this many (1: leave it), for [`ReduceOp::Avg`], before the one rounding.
    pub divide_by: u32,
    /// Where the sources begin, combined from left to right. At least one.
    pub from: Vec<*const u8>,
    /// Where the result goes. At least one. A destination is one of the sources or overlaps none.
    pub into: Vec<*mut u8>,
    /// How many elements.
    pub elements: usize,
    /// How many of them are done.
    pub elements_done: usize,
}

/// Something that carries out jobs.
pub trait Compute: Send {
    /// Goes on with the job; true when it is complete. Does at most [`SLICE_BYTES`] of each source at a time.
    ///
    /// # Safety
    ///
    /// Until the job is complete or dropped, every source has `elements` readable elements and every destination as
    /// many writable ones, nobody else writes the sources or touches the destinations, and a destination is exactly one
    /// of the sources or overlaps none of them, and no other destination.
    #[allow(unsafe_code)]
    unsafe fn advance(&mut self, job: &mut Job, now: Nanos) -> bool;

    /// When an unfinished job wants to be advanced at the latest; `None`: at once.
    fn next_wakeup(&self) -> Option<Nanos> {
        None
    }
}

/// Most bytes of one source that one [`Compute::advance`] reads: about 20 µs of work.
pub const SLICE_BYTES: usize = 256 << 10;

//! Memory where short calls of a batch are fused: their data are copied there side by side, one
//! call works on it, and the results are copied back. On a GPU, the GPU copies.
//!
//! **Invariant:** a GPU's copies go into a stream of the group's own, and only when nothing keeps
//! them waiting there: those in, when what comes before the batch is done (the fused call's gate
//! puts them in), and those out, when the call is over. So they end soon whatever else happens, no
//! stream waits for a call, and the memory of both sides is let go of only when they have ended.
#![allow(unsafe_code)]

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use pleach_transport::cuda::{CudaError, CudaEvent, ForeignMemory, Stream};
use pleach_transport::mutex::lock;
use pleach_transport::{SharedMemory, Slice};

use super::data::{destination, part};
use super::error::CollectiveError;
use super::fused::{Copy, STAGING_BYTES_MAX, STAGING_BYTES_MIN};
use super::gpu::GpuBuffer;
use super::stream_order::StreamWork;
use super::{Group, Shared};
use crate::compute::ComputeError;
use crate::engine::{Address, Bytes, Gate};

/// How long copies inside of a GPU may take before that is an error.
const COPY_LIMIT: Duration = Duration::from_secs(60);

/// See the module; registered, the group's own.
pub(super) enum Staging {
    Host(Slice),
    Gpu { memory: GpuBuffer<u8>, copies: Arc<Stream> },
}

impl Staging {
    /// That which the group has kept; made or made larger where it must be.
    pub(super) fn take(group: &Group, bytes: usize) -> Result<Self, CollectiveError> {
        let kept = lock(&group.shared.staging).take();
        if let Some(kept) = kept.filter(|kept| kept.len() >= bytes) {
            return Ok(kept);
        }
        let bytes = bytes.next_power_of_two().max(STAGING_BYTES_MIN);
        if group.shared.gpu.is_some() {
            let memory = group.gpu_buffer(bytes)?;
            let copies = Arc::new(Stream::new(memory.gpu())?);
            return Ok(Self::Gpu { memory, copies });
        }
        let memory = SharedMemory::new(bytes)
            .map_err(|source| CollectiveError::Memory { bytes, source: Arc::new(source) })?;
        let region = group.shared.driver.lock().engine.device().register(memory);
        Ok(Self::Host(region.map_err(|error| CollectiveError::Register(Arc::new(error)))?.whole()))
    }

    /// Lets later batches of the group have it, if it is not too much and more than what is kept.
    pub(super) fn keep(self, shared: &Shared) {
        let mut kept = lock(&shared.staging);
        let is_better = kept.as_ref().is_none_or(|kept| kept.len() < self.len());
        if is_better && self.len() <= STAGING_BYTES_MAX {
            *kept = Some(self);
        }
    }

    fn len(&self) -> usize {
        match self {
            Self::Host(memory) => memory.len(),
            Self::Gpu { memory, .. } => memory.len(),
        }
    }

    /// Where it begins.
    pub(super) fn base(&self) -> Address {
        match self {
            Self::Host(memory) => Address(memory.as_ptr()),
            Self::Gpu { memory, .. } => Address(memory.as_ptr()),
        }
    }

    /// A part of it, for a call of this group.
    pub(super) fn bytes(&mut self, group: &Group, range: Range<usize>) -> Result<Bytes, CollectiveError> {
        Ok(match self {
            Self::Host(memory) => Bytes::Registered(memory.slice(range).expect("there is room for it")),
            Self::Gpu { memory, .. } => part(&destination(memory, group.shared.number)?.bytes, range),
        })
    }

    /// Copies inputs side by side after what comes before. The gate is open when that is done; none
    /// is needed where it is already.
    pub(super) fn pack(&self, before: &StreamWork, copies: Vec<Copy>) -> Result<Option<Gate>, ComputeError> {
        let stream = match self {
            Self::Host(_) => {
                copies.iter().for_each(copy_on_host);
                return Ok(None);
            }
            Self::Gpu { copies, .. } => copies.clone(),
        };
        let before = before.clone();
        let mut packed: Option<CudaEvent> = None;
        let mut gate = move || {
            let mark = match &mut packed {
                Some(mark) => mark,
                None if !before.is_done()? => return Ok(false),
                empty => empty.insert(put(&stream, &copies)?),
            };
            Ok(mark.is_reached()?)
        };
        Ok(if gate()? { None } else { Some(Box::new(gate)) })
    }

    /// Copies results to where they belong, which is done when this has [settled](Self::settle).
    pub(super) fn unpack(&self, results: &[Copy]) -> Result<(), CudaError> {
        match self {
            Self::Host(_) => results.iter().for_each(copy_on_host),
            Self::Gpu { copies, .. } => drop(put(copies, results)?),
        }
        Ok(())
    }

    /// Waits until no copy is under way.
    pub(super) fn settle(&self) -> Result<(), CudaError> {
        let Self::Gpu { copies, .. } = self else { return Ok(()) };
        let mark = copies.record_event()?;
        match mark.wait(COPY_LIMIT) {
            // Nothing keeps them waiting, so they end; only then may the memory go back.
            Err(late @ CudaError::Late { .. }) => mark.wait_or_abort().and(Err(late)),
            outcome => outcome,
        }
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        // A call that failed may have been let go of between its copies.
        if let Err(error) = self.settle() {
            tracing::error!(%error, "copies were under way when their memory was let go of");
        }
    }
}

fn copy_on_host(Copy { from, into, bytes, scaling, .. }: &Copy) {
    if let Some(scaling) = scaling {
        return scaling.products(*from, *into, *bytes);
    }
    // SAFETY: one is memory that the batch borrows or owns, of that length, the other a part of
    // the staging memory that this batch alone has; no call is under way on either.
    unsafe { std::ptr::copy_nonoverlapping(from.0.cast_const(), into.0, *bytes) }
}

/// Puts copies into the stream; the mark behind them. What was freed is not touched.
fn put(stream: &Stream, copies: &[Copy]) -> Result<CudaEvent, CudaError> {
    for Copy { from, into, bytes, foreign, .. } in copies {
        foreign.iter().flatten().try_for_each(ForeignMemory::expect_alive)?;
        // SAFETY: both lie on the GPU and are so long: one is a buffer that the batch borrows or
        // owns, the other a part of the staging memory that this batch alone has; who lets go of
        // either waits for the copies first (`settle`).
        unsafe { stream.copy(from.0, into.0, *bytes)? };
    }
    stream.record_event()
}

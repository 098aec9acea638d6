//! Operations of a batch on a GPU's memory that are under way, and the copies beside them.
//!
//! What is fused is copied by the GPU: side by side into memory that the group keeps there, which
//! peers reach where they reach the GPU's, and the results back where they belong. **Invariant:**
//! the copies go into a stream of the group's own, and only when nothing keeps them waiting there:
//! those in, when what comes before the batch is done (the fused call's gate puts them in), and
//! those out, when the call is over. So they end soon whatever else happens, no stream waits for a
//! call, and the memory of both sides is let go of only when they have ended.
#![allow(unsafe_code)]

use std::ops::Range;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use pleach_transport::cuda::{CudaError, ForeignMemory, Mark, Stream};

use super::Group;
use super::data::{Element, part};
use super::error::CollectiveError;
use super::fused::{self, Bucket, Part, RUNS_AT_ONCE, STAGING_BYTES_MAX, STAGING_BYTES_MIN};
use super::gpu::GpuBuffer;
use super::gpu_operation::GpuOperation;
use super::on_stream::Before;
use super::operation::Operation;
use super::pending::Completion;
use super::unwinding::without_unwinding;
use crate::compute::ComputeError;
use crate::engine::{Address, Bytes, Gate, RunId};

/// How long copies inside of a GPU may take before that is an error.
const COPY_LIMIT: Duration = Duration::from_secs(60);

/// Elements of a buffer that may be fused. The batch borrows or owns the buffer until its flight is
/// over.
pub(super) struct GpuPart {
    address: Address,
    bytes: usize,
    foreign: Option<ForeignMemory>,
}

impl GpuPart {
    pub(super) fn of<T: Element>(data: &GpuBuffer<T>) -> Self {
        let (address, bytes) = (Address(data.as_ptr().cast()), data.len() * size_of::<T>());
        Self { address, bytes, foreign: data.foreign().cloned() }
    }
}

impl Part for GpuPart {
    fn bytes(&self) -> usize {
        self.bytes
    }
}

/// What is carried out on a GPU's memory.
pub(super) type Job = fused::Job<GpuPart, GpuOperation>;

/// A copy between a buffer and the memory where it is fused.
struct Copy {
    from: Address,
    into: Address,
    bytes: usize,
    /// The buffer, where it is somebody else's.
    foreign: Option<ForeignMemory>,
}

/// Memory where a group fuses what lies on its GPU.
pub(super) struct Staging {
    memory: GpuBuffer<u8>,
    copies: Arc<Stream>,
}

impl Staging {
    /// The group's own; made or made larger when it is asked for.
    fn take(group: &Group, bytes: usize) -> Result<Self, CollectiveError> {
        let kept = group.shared.gpu_staging.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(kept) = kept.filter(|kept| kept.memory.len() >= bytes) {
            return Ok(kept);
        }
        let memory = group.gpu_buffer(bytes.next_power_of_two().max(STAGING_BYTES_MIN))?;
        let copies = Arc::new(Stream::new(memory.gpu())?);
        Ok(Self { memory, copies })
    }

    /// Lets later batches of the group have it, if it is not too much and more than what is kept.
    fn keep(self, shared: &super::Shared) {
        let mut kept = shared.gpu_staging.lock().unwrap_or_else(PoisonError::into_inner);
        let is_better = kept.as_ref().is_none_or(|kept| kept.memory.len() < self.memory.len());
        if is_better && self.memory.len() <= STAGING_BYTES_MAX {
            *kept = Some(self);
        }
    }

    fn bytes(&self, group: &Group, range: Range<usize>) -> Result<Bytes, CollectiveError> {
        Ok(part(&self.memory.bytes(group)?, range))
    }

    fn at(&self, offset: usize) -> Address {
        Address(self.memory.as_ptr().wrapping_add(offset))
    }

    /// The copies of these parts to or from where they lie side by side.
    fn beside(
        &self,
        begin: usize,
        parts: &[GpuPart],
        copy: impl Fn(Address, Address) -> (Address, Address),
    ) -> Vec<Copy> {
        let mut at = begin;
        let one = |part: &GpuPart| {
            let (from, into) = copy(part.address, self.at(at));
            at += part.bytes;
            Copy { from, into, bytes: part.bytes, foreign: part.foreign.clone() }
        };
        parts.iter().map(one).collect()
    }

    /// Open when the parts have been copied side by side after what comes before; none is needed
    /// where they are already.
    fn pack(&self, before: &Before, copies: Vec<Copy>) -> Result<Option<Gate>, ComputeError> {
        let (before, stream) = (before.clone(), self.copies.clone());
        let mut packed: Option<Mark> = None;
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

    /// Waits until no copy is under way.
    fn settle(&self) -> Result<(), CudaError> {
        let mark = self.copies.mark()?;
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

/// Puts copies into the stream; the mark behind them. What was freed is not touched.
fn put(stream: &Stream, copies: &[Copy]) -> Result<Mark, CudaError> {
    for Copy { from, into, bytes, foreign } in copies {
        foreign.iter().try_for_each(ForeignMemory::expect_alive)?;
        // SAFETY: both lie on the GPU and are so long: one is a buffer that the batch borrows or
        // owns, the other a part of the staging memory that this batch alone has; who lets go of
        // either waits for the copies first (`settle`).
        unsafe { stream.copy(from.0, into.0, *bytes)? };
    }
    stream.mark()
}

/// See the module.
pub(super) struct GpuFlight {
    group: Group,
    before: Before,
    /// How much memory fused operations need, in bytes, and where it is free from.
    staging_bytes: usize,
    staging: Option<Staging>,
    used_bytes: usize,
    flying: Vec<Flying>,
}

struct Flying {
    run: RunId,
    /// What is copied when it is over.
    results: Vec<Copy>,
}

impl GpuFlight {
    /// For operations of this group that come after that.
    pub(super) fn new(group: Group, before: Before, staging_bytes: usize) -> Self {
        Self { group, before, staging_bytes, staging: None, used_bytes: 0, flying: Vec::new() }
    }

    pub(super) fn start(&mut self, job: Job) -> Result<(), CollectiveError> {
        match job {
            Job::Fused(bucket) => self.start_bucket(bucket),
            Job::Alone(group, GpuOperation { operation, foreign }) => {
                self.make_room(0)?;
                let gate = self.before.gate(foreign)?;
                self.launch(&group, Operation { gate, ..operation }, Vec::new())
            }
        }
    }

    fn start_bucket(&mut self, mut bucket: Bucket<GpuPart>) -> Result<(), CollectiveError> {
        self.make_room(bucket.room())?;
        let staging = match &mut self.staging {
            Some(staging) => staging,
            empty => empty.insert(Staging::take(&self.group, self.staging_bytes)?),
        };
        let begin = self.used_bytes;
        self.used_bytes += bucket.room();
        let bytes = staging.bytes(&self.group, begin..begin + bucket.bytes())?;
        let operation = bucket.operation(&bytes, self.group.space());
        let given = staging.beside(begin, bucket.given(), |part, beside| (part, beside));
        let results = staging.beside(begin, bucket.gotten(), |part, beside| (beside, part));
        let gate = staging.pack(&self.before, given).map_err(in_compute)?;
        self.launch(&bucket.group(), Operation { gate, ..operation }, results)
    }

    /// Waits for what was started where one more, with so many bytes, would be too much.
    fn make_room(&mut self, bytes: usize) -> Result<(), CollectiveError> {
        if self.flying.len() == RUNS_AT_ONCE || self.used_bytes + bytes > self.staging_bytes {
            self.finish()?;
        }
        Ok(())
    }

    fn launch(
        &mut self,
        group: &Group,
        operation: Operation,
        results: Vec<Copy>,
    ) -> Result<(), CollectiveError> {
        let run = group.launch(operation, None)?;
        self.flying.push(Flying { run, results });
        Ok(())
    }

    /// Waits for all that was started; the first error.
    pub(super) fn finish(&mut self) -> Result<(), CollectiveError> {
        without_unwinding(|| self.finish_all())
    }

    fn finish_all(&mut self) -> Result<(), CollectiveError> {
        let mut result = Ok(());
        for Flying { run, results } in self.flying.drain(..) {
            let driver = &self.group.shared.driver;
            let outcome = driver.finish(driver.lock(), run).map_err(CollectiveError::Failed);
            let outcome = outcome.and_then(|()| match &self.staging {
                Some(staging) => Ok(put(&staging.copies, &results).map(drop)?),
                None => Ok(()),
            });
            result = result.and(outcome);
        }
        self.used_bytes = 0;
        let settled = self.staging.as_ref().map_or(Ok(()), Staging::settle);
        result.and(settled.map_err(CollectiveError::from))
    }

    /// What was started, to be waited for by somebody else, and what is left to be done then.
    pub(super) fn leave<D>(mut self) -> (Vec<RunId>, Completion<D>) {
        let shared = Arc::downgrade(&self.group.shared);
        let staging = self.staging.take();
        let (runs, results): (Vec<_>, Vec<_>) =
            self.flying.drain(..).map(|Flying { run, results }| (run, results)).unzip();
        let completion = move |_: &mut D| {
            let Some(staging) = staging else { return Ok(()) };
            let outcome = results.iter().try_for_each(|copies| put(&staging.copies, copies).map(drop));
            let outcome = outcome.and(staging.settle());
            if let Some(shared) = shared.upgrade() {
                staging.keep(&shared);
            }
            Ok(outcome?)
        };
        (runs, Box::new(completion))
    }
}

impl Drop for GpuFlight {
    fn drop(&mut self) {
        // What came before has been told; what is under way still must end before the borrow does.
        let _ = self.finish();
        if let Some(staging) = self.staging.take() {
            staging.keep(&self.group.shared);
        }
    }
}

/// Of a gate that was looked at before anybody waits for it.
fn in_compute(error: ComputeError) -> CollectiveError {
    match error {
        ComputeError::Cuda(error) => CollectiveError::Gpu(error),
        other => unreachable!("copies are no reductions: {other}"),
    }
}

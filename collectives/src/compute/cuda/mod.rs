//! Reductions and copies by a GPU's kernels, with the same meaning, bit for bit, as by the host's.
//!
//! A [`CudaCompute`] puts each [`Job`] into a stream of its own as one kernel, marks the place
//! behind it, and calls the job complete when the mark is reached. Jobs name memory of the GPU or
//! pinned host memory. The kernels are PTX that lies beside this file (`reduce.cu`, `regenerate`),
//! which the driver compiles when it is loaded.
//!
//! **Invariant:** a job is complete only when the GPU has ended its kernel, so signals to peers
//! after that are true. A job that is dropped before may be under way until [`Compute::is_idle`].
//! No kernel waits: processes that share a GPU have it in turns, and a kernel that waited for
//! another process would keep that process out.

mod launch;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use pleach_transport::cuda::{CudaError, CudaEvent, CudaMemory, Gpu, PinnedMemory, Stream};
use pleach_transport::{Memory, Nanos, Space};

use super::{Compute, ComputeError, Job};
use launch::Kernels;

/// How long dropping waits for kernels under way: they compute a few chunks.
const DROP_LIMIT: Duration = Duration::from_secs(10);

/// What peers must see, and so what scratch is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StagingSpace {
    /// Pinned host memory: any fabric carries it.
    Host,
    /// Memory of the GPU, which peers map.
    Gpu,
}

/// Computes on a GPU.
#[derive(Debug)]
pub struct CudaCompute {
    gpu: Arc<Gpu>,
    staging: StagingSpace,
    kernels: Kernels,
    stream: Stream,
    /// Jobs under way in their order: the number and the mark behind each.
    under_way: VecDeque<(u64, CudaEvent)>,
    /// Marks for later jobs.
    spare: Vec<CudaEvent>,
    /// Number of the last job that was begun, and of the last that is complete.
    begun: u64,
    done: u64,
    failure: Option<ComputeError>,
}

impl CudaCompute {
    /// On this GPU. Loads the kernels, which the driver compiles for it the first time.
    ///
    /// # Errors
    ///
    /// What the driver says.
    pub fn new(gpu: &Arc<Gpu>, staging: StagingSpace) -> Result<Self, CudaError> {
        Ok(Self {
            gpu: gpu.clone(),
            staging,
            kernels: Kernels::load(gpu)?,
            stream: Stream::new(gpu)?,
            under_way: VecDeque::new(),
            spare: Vec::new(),
            begun: 0,
            done: 0,
            failure: None,
        })
    }

    fn begin(&mut self, job: &mut Job) -> Result<(), ComputeError> {
        let mut mark = match self.spare.pop() {
            Some(mark) => mark,
            None => CudaEvent::new(&self.gpu)?,
        };
        // SAFETY: the memory is the job's, which its owner vouches for until the job is complete or
        // nothing is under way.
        unsafe { self.kernels.launch(&self.stream, job)? };
        self.stream.record(&mut mark)?;
        self.begun += 1;
        job.ticket = self.begun;
        self.under_way.push_back((self.begun, mark));
        Ok(())
    }

    /// Sees which jobs are complete.
    fn look(&mut self) -> Result<(), ComputeError> {
        while let Some((number, mark)) = self.under_way.front() {
            if !mark.is_reached()? {
                break;
            }
            self.done = *number;
            let (_, mark) = self.under_way.pop_front().expect("looked at just now");
            self.spare.push(mark);
        }
        Ok(())
    }

    /// Notes the first failure. A GPU that has failed does nothing any more, so nothing is under
    /// way.
    fn note<T>(&mut self, outcome: Result<T, ComputeError>) -> bool {
        if let Err(error) = outcome {
            tracing::error!(%error, "the GPU does not go on");
            self.failure.get_or_insert(error);
        }
        self.failure.is_none()
    }
}

// SAFETY: staging is memory that the GPU reaches and as long; what is dropped unfinished is waited
// for before it is idle.
unsafe impl Compute for CudaCompute {
    unsafe fn advance(&mut self, job: &mut Job, _now: Nanos) -> bool {
        if job.elements == 0 {
            return true;
        }
        if self.failure.is_some() {
            return false;
        }
        let outcome = if job.ticket == 0 { self.begin(job) } else { self.look() };
        if !self.note(outcome) || job.ticket > self.done {
            return false;
        }
        job.elements_done = job.elements;
        true
    }

    fn space(&self) -> Space {
        Space::Gpu { ordinal: self.gpu.ordinal() }
    }

    fn staging(&self, memory: Arc<dyn Memory>) -> Result<Arc<dyn Memory>, ComputeError> {
        Ok(match self.staging {
            StagingSpace::Host => PinnedMemory::new(&self.gpu, memory)?,
            StagingSpace::Gpu => CudaMemory::new(&self.gpu, memory.len())?,
        })
    }

    fn failure(&self) -> Option<&ComputeError> {
        self.failure.as_ref()
    }

    fn is_idle(&mut self) -> bool {
        let outcome = self.look();
        !self.note(outcome) || self.under_way.is_empty()
    }
}

impl Drop for CudaCompute {
    fn drop(&mut self) {
        // What kernels work on goes after this.
        if self.failure.is_none()
            && let Some((_, last)) = self.under_way.back()
            && let Err(error) = last.wait(DROP_LIMIT)
        {
            tracing::error!(%error, "kernels were under way when their memory was let go of");
        }
    }
}

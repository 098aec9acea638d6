//! Reductions and copies by kernels of a GPU. Their results have the same bits as those of the
//! host's kernels.
//!
//! A [`CudaCompute`] has a stream of its own. It puts each [`Job`] into the stream as one kernel,
//! followed by an event. The job is complete when the event is reached. Jobs name memory of the GPU
//! or pinned host memory. The kernels are PTX files beside this file (`reduce.cu`, `regenerate`).
//! The driver compiles the PTX when it loads it.
//!
//! **Invariant:** a job is complete only when the GPU has ended its kernel, so a signal to peers
//! after that announces finished bytes. A job that is dropped before its end may be under way until
//! [`Compute::is_idle`]. No kernel waits: processes that share a GPU use it in turns, and a kernel
//! that waited for another process would keep this process from the GPU.

use std::collections::VecDeque;
use std::ffi::CStr;
use std::sync::Arc;
use std::time::Duration;

use pleach_transport::cuda::{CudaError, CudaEvent, CudaMemory, Gpu, Kernel, Module, PinnedMemory, Stream};
use pleach_transport::{Memory, Nanos, Space};

use pleach_vocabulary::{DataType, ReduceOp};

use super::{Compute, ComputeError, Job};

/// How long dropping waits for kernels under way. They compute a few chunks.
const DROP_LIMIT: Duration = Duration::from_secs(10);

/// The memory of scratch, which depends on the memory that peers can access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StagingSpace {
    /// Pinned host memory, which every fabric can carry.
    Host,
    /// Memory of the GPU, which peers must be able to map.
    Gpu,
}

/// Computes on a GPU.
#[derive(Debug)]
pub struct CudaCompute {
    gpu: Arc<Gpu>,
    staging: StagingSpace,
    /// All computes that were made of one another share them.
    kernels: Arc<Kernels>,
    stream: Stream,
    /// Jobs under way in their order: the number of each job and the event behind it.
    under_way: VecDeque<(u64, CudaEvent)>,
    /// Events for later jobs.
    spare: Vec<CudaEvent>,
    /// Number of the last job that was begun; then the number of the last job that is complete.
    begun: u64,
    done: u64,
    failure: Option<ComputeError>,
}

impl CudaCompute {
    /// Computes on this GPU. Loads the kernels, which the driver compiles for the GPU at the first
    /// time.
    ///
    /// # Errors
    ///
    /// The error of the driver.
    pub fn new(gpu: &Arc<Gpu>, staging: StagingSpace) -> Result<Self, CudaError> {
        Self::with_kernels(gpu, staging, Arc::new(Kernels::load(gpu)?))
    }

    /// Another one of this GPU: it has the same kernels, and a stream of its own.
    pub(crate) fn with_new_stream(&self) -> Result<Self, CudaError> {
        Self::with_kernels(&self.gpu, self.staging, Arc::clone(&self.kernels))
    }

    fn with_kernels(gpu: &Arc<Gpu>, staging: StagingSpace, kernels: Arc<Kernels>) -> Result<Self, CudaError> {
        Ok(Self {
            gpu: gpu.clone(),
            staging,
            kernels,
            stream: Stream::new(gpu)?,
            under_way: VecDeque::new(),
            spare: Vec::new(),
            begun: 0,
            done: 0,
            failure: None,
        })
    }

    /// Its GPU.
    pub(crate) fn gpu(&self) -> &Arc<Gpu> {
        &self.gpu
    }

    fn begin(&mut self, job: &mut Job) -> Result<(), ComputeError> {
        let mut mark = match self.spare.pop() {
            Some(mark) => mark,
            None => CudaEvent::new(&self.gpu)?,
        };
        // SAFETY: the owner of the job promises that its memory is valid until the job is complete
        // or nothing is under way.
        unsafe { self.kernels.launch(&self.stream, job)? };
        self.stream.record(&mut mark)?;
        self.begun += 1;
        job.ticket = self.begun;
        self.under_way.push_back((self.begun, mark));
        Ok(())
    }

    /// Checks which jobs are complete.
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

    /// Notes the first failure. A failed GPU does nothing any more, so nothing is under way.
    fn note<T>(&mut self, outcome: Result<T, ComputeError>) -> bool {
        if let Err(error) = outcome {
            tracing::error!(%error, "the GPU does not go on");
            self.failure.get_or_insert(error);
        }
        self.failure.is_none()
    }
}

// SAFETY: staging memory can be accessed by the GPU and has the requested length. Jobs that were
// dropped unfinished have ended before this is idle.
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
        // The memory of kernels is freed after this, so they must have ended.
        if self.failure.is_none()
            && let Some((_, last)) = self.under_way.back()
            && let Err(error) = last.wait(DROP_LIMIT)
        {
            tracing::error!(%error, "kernels were under way when their memory was let go of");
        }
    }
}

// ---- The kernel of a job, and its arguments.

/// Most sources and destinations of one reduction, as in `reduce.cu`.
const SOURCES_MAX: usize = 128;
const DESTINATIONS_MAX: usize = 64;

/// Bytes that a thread handles at a time if all addresses are multiples of this number.
const VECTOR_BYTES: usize = 16;
/// The same for elements of one byte.
const VECTOR_BYTES_OF_BYTES: usize = 8;

const PTX: &str = concat!(include_str!("reduce.ptx"), "\0");

const ARITHMETIC: [&str; 4] = ["sum", "prod", "min", "max"];
const BITWISE: [&str; 3] = ["and", "or", "xor"];

/// The arguments of a kernel, as in `reduce.cu`.
#[repr(C)]
struct Arguments {
    from: [u64; SOURCES_MAX],
    into: [u64; DESTINATIONS_MAX],
    elements: u64,
    from_count: u32,
    into_count: u32,
    divide_by: u32,
    is_aligned: u32,
}

/// The kernels of a GPU.
#[derive(Debug)]
struct Kernels {
    /// By element type and operation.
    arithmetic: Vec<[Kernel; ARITHMETIC.len()]>,
    bitwise: [Kernel; BITWISE.len()],
}

impl Kernels {
    fn load(gpu: &Arc<Gpu>) -> Result<Self, CudaError> {
        let ptx = CStr::from_bytes_with_nul(PTX.as_bytes()).expect("one zero, at its end");
        let module = Module::new(gpu, ptx)?;
        let mut arithmetic = Vec::with_capacity(DataType::ALL.len());
        for data_type in DataType::ALL {
            let kernel = |op: &str| module.kernel(&format!("reduce_{data_type}_{op}"));
            let [sum, prod, min, max] = ARITHMETIC;
            arithmetic.push([kernel(sum)?, kernel(prod)?, kernel(min)?, kernel(max)?]);
        }
        let kernel = |op: &str| module.kernel(&format!("combine_{op}"));
        let [and, or, xor] = BITWISE;
        Ok(Self { arithmetic, bitwise: [kernel(and)?, kernel(or)?, kernel(xor)?] })
    }

    /// Puts the job into the stream.
    ///
    /// # Safety
    ///
    /// As for [`super::Compute::advance`], until the stream has passed the job.
    unsafe fn launch(&self, stream: &Stream, job: &Job) -> Result<(), ComputeError> {
        let (sources, destinations) = (job.from.len(), job.into.len());
        if sources > SOURCES_MAX || destinations > DESTINATIONS_MAX {
            return Err(ComputeError::TooMany {
                sources,
                destinations,
                sources_max: SOURCES_MAX,
                destinations_max: DESTINATIONS_MAX,
            });
        }
        let element_bytes = job.data_type.bytes();
        let is_copy = sources == 1 && job.divide_by <= 1;
        let bitwise = match job.op {
            _ if is_copy => Some(1),
            ReduceOp::And => Some(0),
            ReduceOp::Or => Some(1),
            ReduceOp::Xor => Some(2),
            _ => None,
        };
        let (kernel, elements, lanes) = match bitwise {
            Some(index) => (&self.bitwise[index], job.elements * element_bytes, VECTOR_BYTES),
            None => {
                let index =
                    DataType::ALL.iter().position(|one| *one == job.data_type).expect("all are listed");
                let bytes = if element_bytes == 1 { VECTOR_BYTES_OF_BYTES } else { VECTOR_BYTES };
                (&self.arithmetic[index][arithmetic(job.op)], job.elements, bytes / element_bytes)
            }
        };
        let all =
            job.from.iter().map(|place| *place as u64).chain(job.into.iter().map(|place| *place as u64));
        let is_aligned = all.clone().all(|address| address.is_multiple_of(VECTOR_BYTES as u64));
        let mut arguments = Arguments {
            from: [0; SOURCES_MAX],
            into: [0; DESTINATIONS_MAX],
            elements: elements as u64,
            from_count: sources as u32,
            into_count: destinations as u32,
            divide_by: job.divide_by,
            is_aligned: u32::from(is_aligned),
        };
        for (place, address) in arguments.from.iter_mut().zip(all.clone().take(sources)) {
            *place = address;
        }
        for (place, address) in arguments.into.iter_mut().zip(all.skip(sources)) {
            *place = address;
        }
        let pieces = if is_aligned { elements.div_ceil(lanes) } else { elements } as u64;
        // SAFETY: the kernel takes these arguments. The caller promises that the memory they name
        // is valid.
        unsafe { kernel.launch(stream, pieces, &arguments)? };
        Ok(())
    }
}

/// The index of an operation that is not bitwise.
fn arithmetic(op: ReduceOp) -> usize {
    match op {
        ReduceOp::Sum | ReduceOp::Avg | ReduceOp::PremulSum(_) => 0,
        ReduceOp::Prod => 1,
        ReduceOp::Min => 2,
        _ => 3,
    }
}

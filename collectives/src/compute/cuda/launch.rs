//! Which kernel does a job, and how it is told.

use std::ffi::CStr;
use std::sync::Arc;

use pleach_transport::cuda::{CudaError, Gpu, Kernel, Module, Stream};
use pleach_vocabulary::{DataType, ReduceOp};

use super::super::{ComputeError, Job};

/// Most sources and destinations of one reduction, as in `reduce.cu`.
const SOURCES_MAX: usize = 128;
const DESTINATIONS_MAX: usize = 64;

/// Bytes that a thread handles at a time where all addresses are aligned to that number.
const VECTOR_BYTES: usize = 16;
/// The same of elements of one byte.
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
pub(super) struct Kernels {
    /// By element type and operation.
    arithmetic: Vec<[Kernel; ARITHMETIC.len()]>,
    bitwise: [Kernel; BITWISE.len()],
}

impl Kernels {
    pub(super) fn load(gpu: &Arc<Gpu>) -> Result<Self, CudaError> {
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
    /// As of [`super::Compute::advance`], until the stream has come past it.
    pub(super) unsafe fn launch(&self, stream: &Stream, job: &Job) -> Result<(), ComputeError> {
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
        // SAFETY: the kernel takes such arguments; what they name is the caller's promise.
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

//! Kernels against the host's, which have an oracle of their own.
#![allow(unsafe_code)]

use std::sync::Arc;
use std::time::Duration;

use pleach_collectives::compute::cuda::{CudaCompute, StagingSpace};
use pleach_collectives::compute::{Compute, ComputeError, HostCompute, Job};
use pleach_collectives::{F8E4M3, F8E5M2, bf16, f16};
use pleach_transport::cuda::{CudaMemory, Gpu};
use pleach_transport::{Memory, Nanos, Space, clock};
use pleach_vocabulary::random::Random;
use pleach_vocabulary::{DataType, ReduceOp};

/// How long a test waits for a GPU. Generous: machines are loaded.
const PATIENCE: Duration = Duration::from_secs(60);

/// Bytes of that many elements: any bits, so every kind of number, and for the wide floats half of
/// them near one.
fn bytes(data_type: DataType, elements: usize, random: &mut Random) -> Vec<u8> {
    let mut bytes = Vec::new();
    for _ in 0..elements {
        let draw = random.bits();
        let near_one = 1.0 + (draw >> 12) as f64 / (1u64 << 52) as f64;
        let bits = match data_type {
            DataType::F64 if draw.is_multiple_of(2) => near_one.to_bits(),
            DataType::F32 if draw.is_multiple_of(2) => (near_one as f32).to_bits().into(),
            DataType::F16 if draw.is_multiple_of(2) => f16::from_f64(near_one).to_bits().into(),
            DataType::Bf16 if draw.is_multiple_of(2) => bf16::from_f64(near_one).to_bits().into(),
            // Zeros of both signs, infinities and the largest numbers are rare among wide ones.
            _ if draw.is_multiple_of(11) => [0, 1 << (data_type.bytes() * 8 - 1)][(draw >> 8) as usize % 2],
            _ => draw,
        };
        bytes.extend_from_slice(&bits.to_le_bytes()[..data_type.bytes()]);
    }
    bytes
}

/// Whether two results are the same: the same bits, or both NaN.
fn are_same(data_type: DataType, left: &[u8], right: &[u8]) -> bool {
    let is_nan = |bytes: &[u8]| {
        let mut padded = [0; 8];
        padded[..bytes.len()].copy_from_slice(bytes);
        let bits = u64::from_le_bytes(padded);
        match data_type {
            DataType::F64 => f64::from_bits(bits).is_nan(),
            DataType::F32 => f32::from_bits(bits as u32).is_nan(),
            DataType::F16 => f16::from_bits(bits as u16).is_nan(),
            DataType::Bf16 => bf16::from_bits(bits as u16).is_nan(),
            DataType::F8E4M3 => F8E4M3::from_bits(bits as u8).is_nan(),
            DataType::F8E5M2 => F8E5M2::from_bits(bits as u8).is_nan(),
            _ => false,
        }
    };
    let size = data_type.bytes();
    left.chunks_exact(size).zip(right.chunks_exact(size)).all(|(a, b)| a == b || (is_nan(a) && is_nan(b)))
}

/// Does the job, and says how often it was not complete yet.
fn complete(compute: &mut dyn Compute, job: &mut Job) -> usize {
    let deadline = clock::now() + PATIENCE;
    let mut waits = 0;
    // SAFETY: the callers hold all places, and nobody else touches them.
    while !unsafe { compute.advance(job, Nanos::ZERO) } {
        assert!(compute.failure().is_none(), "{:?}", compute.failure());
        assert!(clock::now() < deadline, "the job does not end");
        waits += 1;
    }
    assert_eq!(job.elements_done, job.elements);
    waits
}

fn job(data_type: DataType, op: ReduceOp, divide_by: u32, elements: usize) -> Job {
    Job {
        data_type,
        op,
        divide_by,
        from: Vec::new(),
        into: Vec::new(),
        elements,
        elements_done: 0,
        ticket: 0,
    }
}

/// What the host's kernels make of the sources.
fn expected(data_type: DataType, op: ReduceOp, divide_by: u32, sources: &[Vec<u8>]) -> Vec<u8> {
    let mut result = vec![0; sources[0].len()];
    let mut job = job(data_type, op, divide_by, result.len() / data_type.bytes());
    job.from = sources.iter().map(|source| source.as_ptr()).collect();
    job.into = vec![result.as_mut_ptr()];
    complete(&mut HostCompute::new(), &mut job);
    result
}

/// A place on the GPU, as an offset in bytes from the beginning of its memory.
struct Place {
    memory: Arc<CudaMemory>,
    offset: usize,
    len: usize,
}

impl Place {
    fn new(gpu: &Arc<Gpu>, bytes: &[u8], offset: usize) -> Self {
        let memory = CudaMemory::new(gpu, offset + bytes.len() + 64).expect("room");
        memory.store(0, &vec![0xa5; memory.len()], PATIENCE).expect("stored");
        memory.store(offset, bytes, PATIENCE).expect("stored");
        Self { memory, offset, len: bytes.len() }
    }

    /// The same memory with other bytes, as many.
    fn store(&self, bytes: &[u8]) {
        assert_eq!(bytes.len(), self.len);
        self.memory.store(self.offset, bytes, PATIENCE).expect("stored");
    }

    fn address(&self) -> *mut u8 {
        self.memory.base().as_ptr().wrapping_add(self.offset)
    }

    /// Its bytes; what is around them is as it was.
    fn bytes(&self) -> Vec<u8> {
        let mut all = vec![0; self.memory.len()];
        self.memory.load(0, &mut all, PATIENCE).expect("loaded");
        let around = all[..self.offset].iter().chain(&all[self.offset + self.len..]);
        assert!(around.into_iter().all(|byte| *byte == 0xa5), "a kernel wrote beside its place");
        all[self.offset..self.offset + self.len].to_vec()
    }
}

pub(crate) fn every_kernel_gives_the_bits_that_the_host_gives(gpu: &Arc<Gpu>) {
    let mut compute = CudaCompute::new(gpu, StagingSpace::Host).expect("kernels");
    assert!(matches!(compute.space(), Space::Gpu { ordinal: 0 }));
    let (mut random, mut cases, mut waits) = (Random::new(7), 0, 0);
    for data_type in DataType::ALL {
        for (sources, elements) in [(1, 5), (2, 1027), (5, 260)] {
            let contents: Vec<_> = (0..sources).map(|_| bytes(data_type, elements, &mut random)).collect();
            let places: Vec<_> = contents.iter().map(|content| Place::new(gpu, content, 0)).collect();
            let nothing = vec![0x5a; contents[0].len()];
            let result = Place::new(gpu, &nothing, 0);
            for op in ReduceOp::ALL.into_iter().filter(|op| op.fits(data_type)) {
                let divide_by = if op == ReduceOp::Avg { sources as u32 } else { 1 };
                result.store(&nothing);
                let mut job = job(data_type, op, divide_by, elements);
                job.from = places.iter().map(|place| place.address().cast_const()).collect();
                job.into = vec![result.address()];
                waits += complete(&mut compute, &mut job);
                let expected = expected(data_type, op, divide_by, &contents);
                assert!(
                    are_same(data_type, &result.bytes(), &expected),
                    "{op} of {sources} times {elements} {data_type}"
                );
                cases += 1;
            }
            assert!(places.iter().zip(&contents).all(|(place, content)| place.bytes() == *content));
        }
    }
    assert!(cases >= 12 * 5 * 3, "only {cases} cases");
    assert!(waits > 0, "no job was told complete before the GPU was asked");
}

pub(crate) fn destinations_may_be_sources_and_places_may_lie_anywhere(gpu: &Arc<Gpu>) {
    let mut compute = CudaCompute::new(gpu, StagingSpace::Host).expect("kernels");
    let mut random = Random::new(11);
    for data_type in DataType::ALL {
        for shift in [0, 1, 3] {
            let offset = shift * data_type.bytes();
            let contents: Vec<_> = (0..3).map(|_| bytes(data_type, 1001, &mut random)).collect();
            let places: Vec<_> = contents.iter().map(|content| Place::new(gpu, content, offset)).collect();
            let apart = Place::new(gpu, &vec![0; contents[0].len()], 0);
            let mut job = job(data_type, ReduceOp::Sum, 1, 1001);
            job.from = places.iter().map(|place| place.address().cast_const()).collect();
            job.into = vec![places[1].address(), apart.address(), places[2].address()];
            complete(&mut compute, &mut job);
            let expected = expected(data_type, ReduceOp::Sum, 1, &contents);
            for place in [&places[1], &apart, &places[2]] {
                assert!(are_same(data_type, &place.bytes(), &expected), "{data_type} shifted by {shift}");
            }
            assert_eq!(places[0].bytes(), contents[0]);
            // A copy of bytes that lie nowhere in particular.
            let from = Place::new(gpu, &contents[0], shift);
            let mut copy = self::job(DataType::U8, ReduceOp::Sum, 1, contents[0].len());
            (copy.from, copy.into) = (vec![from.address().cast_const()], vec![apart.address()]);
            complete(&mut compute, &mut copy);
            assert_eq!(apart.bytes(), contents[0]);
        }
    }
}

pub(crate) fn more_places_than_a_kernel_takes_are_refused(gpu: &Arc<Gpu>) {
    let mut compute = CudaCompute::new(gpu, StagingSpace::Host).expect("kernels");
    let place = Place::new(gpu, &[1; 64], 0);
    let mut job = job(DataType::U8, ReduceOp::Sum, 1, 64);
    (job.from, job.into) = (vec![place.address().cast_const(); 129], vec![place.address()]);
    // SAFETY: the place is held, and nobody else touches it.
    assert!(!unsafe { compute.advance(&mut job, Nanos::ZERO) });
    match compute.failure() {
        Some(error @ ComputeError::TooMany { sources: 129, .. }) => {
            assert!(error.to_string().contains("ring"), "{error}");
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(place.bytes(), [1; 64]);
}

pub(crate) fn a_job_that_is_dropped_is_under_way_until_the_gpu_is_idle(gpu: &Arc<Gpu>) {
    let mut compute = CudaCompute::new(gpu, StagingSpace::Host).expect("kernels");
    assert!(compute.is_idle());
    let (from, into) = (Place::new(gpu, &[3; 100_000], 0), Place::new(gpu, &[0; 100_000], 0));
    let mut job = job(DataType::U8, ReduceOp::Sum, 1, 100_000);
    (job.from, job.into) = (vec![from.address().cast_const()], vec![into.address()]);
    // SAFETY: both are held, and nobody else touches them before the GPU is idle.
    unsafe { compute.advance(&mut job, Nanos::ZERO) };
    drop(job);
    let deadline = clock::now() + PATIENCE;
    while !compute.is_idle() {
        assert!(clock::now() < deadline, "the GPU does not become idle");
    }
    assert_eq!(into.bytes(), [3; 100_000]);
}

//! How fast the kernels are, beside `memcpy` and a loop written with intrinsics.
//!
//! `cargo test --release -p pleach-collectives compute::speed -- --ignored --nocapture`

use std::hint::black_box;

use pleach_transport::{HostMemory, Memory, Nanos, clock};

use super::{Compute, HostCompute, Instructions, Job};
use crate::collective::{DataType, ReduceOp};

/// Each is measured this often, in turn with the others; the best counts, as the machine may be busy.
const ROUNDS: usize = 40;
/// A round moves at least this many bytes of each source: short enough to fall between interruptions.
const BYTES_A_ROUND: usize = 2 << 20;
/// In the first-level cache, in the second, and in neither.
const SIZES_BYTES: [usize; 3] = [8 << 10, 256 << 10, 32 << 20];

struct Arena(std::sync::Arc<HostMemory>);

impl Arena {
    fn new(bytes: usize, data_type: DataType) -> Self {
        let memory = HostMemory::new(bytes);
        let one: &[u8] = match data_type {
            DataType::F32 => &1f32.to_le_bytes(),
            DataType::F64 => &1f64.to_le_bytes(),
            DataType::F16 => &0x3c00u16.to_le_bytes(),
            DataType::Bf16 => &0x3f80u16.to_le_bytes(),
            DataType::F8E4M3 => &[0x38],
            DataType::F8E5M2 => &[0x3c],
            _ => &[1, 0, 0, 0, 0, 0, 0, 0][..data_type.bytes()],
        };
        let ones = one.repeat(bytes / one.len());
        // SAFETY: no longer than the memory, which nobody else uses.
        unsafe { memory.base().as_ptr().copy_from_nonoverlapping(ones.as_ptr(), ones.len()) };
        Self(memory)
    }

    fn pointer(&self) -> *mut u8 {
        self.0.base().as_ptr()
    }
}

/// Seconds for one call, the best of the rounds, of each of these.
fn race(bytes: usize, contestants: &mut [&mut dyn FnMut()]) -> Vec<f64> {
    let calls = (BYTES_A_ROUND / bytes).max(1);
    let mut best = vec![f64::INFINITY; contestants.len()];
    for _ in 0..ROUNDS {
        for (contestant, best) in contestants.iter_mut().zip(&mut best) {
            let begin = clock::now();
            (0..calls).for_each(|_| contestant());
            *best = best.min((clock::now() - begin).as_secs_f64() / calls as f64);
        }
    }
    best
}

fn job(data_type: DataType, op: ReduceOp, from: &[&Arena], into: &[&Arena], bytes: usize) -> Job {
    Job {
        data_type,
        op,
        divide_by: if op == ReduceOp::Avg { from.len() as u32 } else { 1 },
        from: from.iter().map(|arena| arena.pointer().cast_const()).collect(),
        into: into.iter().map(|arena| arena.pointer()).collect(),
        elements: bytes / data_type.bytes(),
        elements_done: 0,
    }
}

fn run(compute: &mut HostCompute, job: &mut Job) {
    job.elements_done = 0;
    // SAFETY: the arenas are alive and as long as the job says; in-place destinations are sources.
    while !unsafe { compute.advance(black_box(job), Nanos::ZERO) } {}
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
unsafe fn by_hand(into: *mut f32, a: *const f32, b: *const f32, n: usize) {
    use std::arch::x86_64 as x86;
    for i in (0..n).step_by(64) {
        for k in [0, 16, 32, 48] {
            // SAFETY: n is a multiple of 64 and all have n elements.
            unsafe {
                let sum = x86::_mm512_add_ps(
                    x86::_mm512_loadu_ps(a.add(i + k)),
                    x86::_mm512_loadu_ps(b.add(i + k)),
                );
                x86::_mm512_storeu_ps(into.add(i + k), sum);
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[test]
#[ignore = "prints speeds, asserts nothing"]
fn print_f32_sum_of_two_beside_memcpy_and_a_loop_by_hand() {
    println!("GB/s read and written together; the first columns are f32 sum of two, apart and in place");
    for bytes in SIZES_BYTES {
        let [a, b, into] = [0; 3].map(|_| Arena::new(bytes, DataType::F32));
        let (pa, pb, pi) = (a.pointer(), b.pointer(), into.pointer());
        let n = bytes / 4;
        for instructions in Instructions::available() {
            let mut compute = HostCompute::with(instructions);
            let mut compute_in_place = HostCompute::with(instructions);
            let mut compute_copy = HostCompute::with(instructions);
            let mut apart = job(DataType::F32, ReduceOp::Sum, &[&a, &b], &[&into], bytes);
            let mut in_place = job(DataType::F32, ReduceOp::Max, &[&into, &b], &[&into], bytes);
            let mut copy = job(DataType::F32, ReduceOp::Sum, &[&a], &[&into], bytes);
            let seconds = race(
                bytes,
                &mut [
                    &mut || run(&mut compute, &mut apart),
                    &mut || run(&mut compute_in_place, &mut in_place),
                    &mut || run(&mut compute_copy, &mut copy),
                    // SAFETY: distinct live arenas of n floats; asked for on processors with AVX-512 only.
                    &mut || unsafe {
                        if is_x86_feature_detected!("avx512f") {
                            by_hand(black_box(pi).cast(), pa.cast(), pb.cast(), n);
                        }
                    },
                    // SAFETY: as above.
                    &mut || unsafe { black_box(pi).copy_from_nonoverlapping(pa, bytes) },
                ],
            );
            let speed = |streams: usize, s: f64| (streams * bytes) as f64 / s / 1e9;
            println!(
                "{bytes:>9} bytes {instructions:?}: apart {:.1}, in place (max) {:.1}, by hand {:.1}; copy {:.1}, memcpy {:.1}",
                speed(3, seconds[0]),
                speed(3, seconds[1]),
                speed(3, seconds[3]),
                speed(2, seconds[2]),
                speed(2, seconds[4]),
            );
        }
    }
}

#[test]
#[ignore = "prints speeds, asserts nothing"]
fn print_16_bit_types_beside_f32() {
    const TYPES: [DataType; 3] = [DataType::F32, DataType::F16, DataType::Bf16];
    println!("10^9 elements/s of the result, {TYPES:?}");
    for instructions in Instructions::available() {
        for (op, k) in [(ReduceOp::Sum, 2), (ReduceOp::Max, 2), (ReduceOp::Avg, 2), (ReduceOp::Sum, 4)] {
            let mut line = format!("{instructions:?} {op} of {k}:");
            for bytes in SIZES_BYTES {
                let arenas =
                    TYPES.map(|data_type| (0..=k).map(|_| Arena::new(bytes, data_type)).collect::<Vec<_>>());
                let mut runs: Vec<_> = TYPES
                    .iter()
                    .zip(&arenas)
                    .map(|(&data_type, arenas)| {
                        let arenas: Vec<&Arena> = arenas.iter().collect();
                        let mut job = job(data_type, op, &arenas[..k], &arenas[k..], bytes);
                        let mut compute = HostCompute::with(instructions);
                        move || run(&mut compute, &mut job)
                    })
                    .collect();
                let mut runs: Vec<&mut dyn FnMut()> =
                    runs.iter_mut().map(|run| run as &mut dyn FnMut()).collect();
                for (data_type, seconds) in TYPES.iter().zip(race(bytes, &mut runs)) {
                    line += &format!(" {:.2}", (bytes / data_type.bytes()) as f64 / seconds / 1e9);
                }
                line += " |";
            }
            println!("{line}");
        }
    }
}

#[test]
#[ignore = "prints speeds, asserts nothing"]
fn print_every_element_type() {
    println!("10^9 elements/s of the result, by bytes a source: {SIZES_BYTES:?}");
    for data_type in DataType::ALL {
        for op in [ReduceOp::Sum, ReduceOp::Avg, ReduceOp::Max] {
            let mut line = format!("{data_type:>4} {op:>4}:");
            for (k, m) in [(2, 1), (4, 1), (4, 2), (8, 1)] {
                line += &format!("  {k}->{m}");
                for bytes in SIZES_BYTES {
                    let arenas: Vec<Arena> = (0..k + m).map(|_| Arena::new(bytes, data_type)).collect();
                    let arenas: Vec<&Arena> = arenas.iter().collect();
                    let mut job = job(data_type, op, &arenas[..k], &arenas[k..], bytes);
                    let mut compute = HostCompute::new();
                    let seconds = race(bytes, &mut [&mut || run(&mut compute, &mut job)])[0];
                    line += &format!(" {:.2}", (bytes / data_type.bytes()) as f64 / seconds / 1e9);
                }
            }
            println!("{line}");
        }
    }
}

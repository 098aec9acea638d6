//! The speed of the kernels, compared with `memcpy` and with a loop of intrinsics.
//!
//! `cargo test --release -p pleach-collectives compute::speed -- --ignored --nocapture`

use std::hint::black_box;

use pleach_transport::{HostMemory, Memory, Nanos, clock};
use pleach_vocabulary::{DataType, ReduceOp};

use crate::skipped::skip;

use super::{Compute, HostCompute, Instructions, Job};

/// Number of measurements of each contestant. The contestants take turns, and another one begins
/// each time. The median counts.
const ROUNDS: usize = 41;
/// A round moves at least this many bytes of each source. It is short enough to fall between
/// interruptions.
const BYTES_A_ROUND: usize = 2 << 20;
/// Sizes that fit in the first-level cache, in the second, and in the third or in memory.
const SIZES_BYTES: [usize; 5] = [8 << 10, 32 << 10, 256 << 10, 4 << 20, 32 << 20];

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
        // SAFETY: the bytes are no longer than the memory, which nobody else uses.
        unsafe { memory.base().as_ptr().copy_from_nonoverlapping(ones.as_ptr(), ones.len()) };
        Self(memory)
    }

    fn pointer(&self) -> *mut u8 {
        self.0.base().as_ptr()
    }
}

/// The time of one call of each contestant in seconds: the median of the rounds.
fn race(bytes: usize, contestants: &mut [&mut dyn FnMut()]) -> Vec<f64> {
    let calls = (BYTES_A_ROUND / bytes).max(1);
    let mut times = vec![Vec::with_capacity(ROUNDS); contestants.len()];
    for round in 0..ROUNDS {
        for turn in 0..contestants.len() {
            let which = (round + turn) % contestants.len();
            let begin = clock::now();
            (0..calls).for_each(|_| contestants[which]());
            times[which].push((clock::now() - begin).as_secs_f64() / calls as f64);
        }
    }
    let median = |mut times: Vec<f64>| {
        times.sort_by(f64::total_cmp);
        times[times.len() / 2]
    };
    times.into_iter().map(median).collect()
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
        ticket: 0,
    }
}

fn run(compute: &mut HostCompute, job: &mut Job) {
    job.elements_done = 0;
    // SAFETY: the arenas are alive and as long as the job says; in-place destinations are sources.
    while !unsafe { compute.advance(black_box(job), Nanos::ZERO) } {}
}

/// Combines two sources into a destination apart from them, with intrinsics of this processor.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn apart_by_hand(into: *mut f32, a: *const f32, b: *const f32, n: usize) {
    use std::arch::x86_64 as x86;
    for i in (0..n).step_by(8) {
        // SAFETY: n is a multiple of 8 and all have n elements.
        unsafe {
            let sum = x86::_mm256_add_ps(x86::_mm256_loadu_ps(a.add(i)), x86::_mm256_loadu_ps(b.add(i)));
            x86::_mm256_storeu_ps(into.add(i), sum);
        }
    }
}

/// Combines two sources into both of them. Two ranks that map each other's memory do this, so it
/// bounds an all-reduce between them.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn both_by_hand(a: *mut f32, b: *mut f32, n: usize) {
    use std::arch::x86_64 as x86;
    for i in (0..n).step_by(8) {
        // SAFETY: as above.
        unsafe {
            let sum = x86::_mm256_add_ps(x86::_mm256_loadu_ps(a.add(i)), x86::_mm256_loadu_ps(b.add(i)));
            x86::_mm256_storeu_ps(a.add(i), sum);
            x86::_mm256_storeu_ps(b.add(i), sum);
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[test]
#[ignore = "prints speeds, asserts nothing"]
fn print_f32_sum_of_two_beside_memcpy_and_loops_by_hand() {
    if !is_x86_feature_detected!("avx2") {
        return skip("the loops by hand want AVX2");
    }
    println!("GB/s read and written together, medians; by bytes a source");
    for bytes in SIZES_BYTES {
        let [a, b, into] = [0; 3].map(|_| Arena::new(bytes, DataType::F32));
        let (pa, pb, pi) = (a.pointer(), b.pointer(), into.pointer());
        let n = bytes / 4;
        for instructions in Instructions::available() {
            let [mut one, mut two, mut three] = [0; 3].map(|_| HostCompute::with(instructions));
            let mut apart = job(DataType::F32, ReduceOp::Sum, &[&a, &b], &[&into], bytes);
            let mut both = job(DataType::F32, ReduceOp::Sum, &[&a, &b], &[&a, &b], bytes);
            let mut copy = job(DataType::F32, ReduceOp::Sum, &[&a], &[&into], bytes);
            let seconds = race(
                bytes,
                &mut [
                    &mut || run(&mut one, &mut apart),
                    // SAFETY: distinct live arenas of n floats; the processor has AVX2.
                    &mut || unsafe { apart_by_hand(black_box(pi).cast(), pa.cast(), pb.cast(), n) },
                    &mut || run(&mut two, &mut both),
                    // SAFETY: as above.
                    &mut || unsafe { both_by_hand(black_box(pa).cast(), pb.cast(), n) },
                    &mut || run(&mut three, &mut copy),
                    // SAFETY: as above.
                    &mut || unsafe { black_box(pi).copy_from_nonoverlapping(pa, bytes) },
                ],
            );
            let speed = |streams: usize, s: f64| (streams * bytes) as f64 / s / 1e9;
            println!(
                "{bytes:>9} {instructions:?}: 2->1 {:.1}, by hand {:.1}; 2->2 {:.1}, by hand {:.1}; copy {:.1}, memcpy {:.1}",
                speed(3, seconds[0]),
                speed(3, seconds[1]),
                speed(4, seconds[2]),
                speed(4, seconds[3]),
                speed(2, seconds[4]),
                speed(2, seconds[5]),
            );
        }
    }
}

#[test]
#[ignore = "prints speeds, asserts nothing"]
fn print_what_a_job_of_eight_bytes_costs() {
    const CALLS: usize = 10_000;
    for (data_type, sources, destinations) in [
        (DataType::F32, 1, 1),
        (DataType::F32, 2, 1),
        (DataType::F32, 2, 2),
        (DataType::F32, 4, 1),
        (DataType::Bf16, 2, 1),
        (DataType::F16, 2, 1),
        (DataType::F16, 4, 1),
    ] {
        let arenas: Vec<Arena> = (0..sources + destinations).map(|_| Arena::new(64, data_type)).collect();
        let arenas: Vec<&Arena> = arenas.iter().collect();
        let mut job = job(data_type, ReduceOp::Sum, &arenas[..sources], &arenas[sources..], 8);
        let mut compute: Box<dyn Compute> = Box::new(HostCompute::new());
        let seconds = race(
            BYTES_A_ROUND,
            &mut [&mut || {
                for _ in 0..CALLS {
                    job.elements_done = 0;
                    // SAFETY: as in `run`.
                    black_box(unsafe { compute.advance(black_box(&mut job), Nanos::ZERO) });
                }
            }],
        )[0];
        println!(
            "{data_type} {sources}->{destinations}, 8 bytes: {:.1} ns a call",
            seconds / CALLS as f64 * 1e9
        );
    }
}

#[test]
#[ignore = "prints speeds, asserts nothing"]
fn print_short_floats_beside_f32() {
    const TYPES: [DataType; 5] =
        [DataType::F32, DataType::F16, DataType::Bf16, DataType::F8E4M3, DataType::F8E5M2];
    println!("10^9 elements/s of the result, {TYPES:?}");
    for instructions in Instructions::available() {
        for (op, k, in_all) in [
            (ReduceOp::Sum, 2, false),
            (ReduceOp::Sum, 2, true),
            (ReduceOp::Max, 2, false),
            (ReduceOp::Avg, 2, true),
            (ReduceOp::Sum, 4, false),
            (ReduceOp::Sum, 4, true),
        ] {
            let places = if in_all { "all of them" } else { "one apart" };
            let mut line = format!("{instructions:?} {op} of {k} into {places}:");
            for bytes in SIZES_BYTES {
                let arenas =
                    TYPES.map(|data_type| (0..=k).map(|_| Arena::new(bytes, data_type)).collect::<Vec<_>>());
                let mut runs: Vec<_> = TYPES
                    .iter()
                    .zip(&arenas)
                    .map(|(&data_type, arenas)| {
                        let arenas: Vec<&Arena> = arenas.iter().collect();
                        let into = if in_all { &arenas[..k] } else { &arenas[k..] };
                        let mut job = job(data_type, op, &arenas[..k], into, bytes);
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

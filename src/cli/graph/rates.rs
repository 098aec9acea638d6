//! `--costs measured`: what one core of this machine does.

use std::hint::black_box;

use pleach::graph::Machine;
use pleach::transport::clock;

/// Elements of the vectors that are multiplied, which stay in the cache.
const ELEMENTS: usize = 4096;

/// Multiplications and additions of these vectors.
const ROUNDS: usize = 500;

/// Bytes that are copied: more than caches hold.
const COPIED_BYTES: usize = 32 << 20;

/// The best of so many measurements counts: others were disturbed.
const MEASUREMENTS: usize = 5;

/// Measures the rates of this machine. Peers on one host read each other's memory, so that a
/// transfer is a copy.
pub(super) fn measured() -> Machine {
    let (mut sums, factors) = (vec![0.0_f32; ELEMENTS], vec![1.000_1_f32; ELEMENTS]);
    let arithmetic_s = best_s(|| {
        for _ in 0..ROUNDS {
            for (sum, factor) in sums.iter_mut().zip(black_box(&factors)) {
                *sum = *sum * factor + factor;
            }
        }
        black_box(&mut sums);
    });
    let (source, mut target) = (vec![1_u8; COPIED_BYTES], vec![0_u8; COPIED_BYTES]);
    let copy_s = best_s(|| {
        target.copy_from_slice(black_box(&source));
        black_box(&mut target);
    });
    Machine {
        operations_per_s: (2 * ELEMENTS * ROUNDS) as f64 / arithmetic_s,
        // Each byte is read and written.
        bytes_per_s: (2 * COPIED_BYTES) as f64 / copy_s,
        transfer_bytes_per_s: COPIED_BYTES as f64 / copy_s,
    }
}

fn best_s(mut work: impl FnMut()) -> f64 {
    let once = |_| {
        let began = clock::now();
        work();
        clock::now().0.saturating_sub(began.0)
    };
    (0..MEASUREMENTS).map(once).min().unwrap_or(1).max(1) as f64 / 1e9
}

//! Fits a model to measurements.
//!
//! The time that a [`CostModel`] predicts is linear in α, o, β and γ. So the parameters are found
//! by least squares of relative differences (a microsecond counts as much as a millisecond),
//! without negative parameters. Coordinate descent gives each parameter in turn its best value
//! until none changes. The sum of squares is convex, so this ends at the minimum.

use super::{Chunks, CostModel, INLINE_BYTES_MAX, Platform, Work};

/// One measurement.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sample {
    /// The work for each chunk.
    pub work: Work,
    /// Bytes of the whole.
    pub bytes: u64,
    /// The longest chunk in bytes.
    pub chunk_bytes: u64,
    /// How long it took, in seconds.
    pub seconds: f64,
}

/// α, o, β, γ near; α, o, β far.
const PARAMETERS: usize = 7;

/// Most times that all parameters are gone through.
const TURNS_MAX: usize = 20_000;

/// A turn in which nothing moves by more than this share is the last.
const STILL: f64 = 1e-9;

/// What is faster is as if it took no time, in bytes/s.
const BYTES_PER_S_MAX: f64 = 1e13;

/// The models near and far that come nearest to the samples, and by which factor they are off: half
/// of the samples are within it. A parameter that no sample depends on is the platform's.
#[must_use]
pub fn fit(samples: &[Sample], platform: &Platform) -> (CostModel, CostModel, f64) {
    let samples = samples.iter().filter(|sample| sample.seconds > 0.0);
    let rows: Vec<[f64; PARAMETERS]> =
        samples.map(|sample| shares(sample).map(|share| share / sample.seconds)).collect();
    let known = parameters(platform);
    let found = least_squares(&rows, known);
    let (mut near, mut far) = (platform.near, platform.far);
    let rate = |seconds: f64| (1.0 / seconds).min(BYTES_PER_S_MAX);
    near.latency_s = found[0];
    near.message_s = found[1];
    near.bytes_per_s = rate(found[2]);
    near.reduce_bytes_per_s = rate(found[3]);
    far.latency_s = found[4];
    far.message_s = found[5];
    far.bytes_per_s = rate(found[6]);
    let mut off: Vec<f64> = rows.iter().map(|row| factor(predicted(row, &found))).collect();
    off.sort_by(f64::total_cmp);
    (near, far, off.get(off.len() / 2).copied().unwrap_or(1.0))
}

fn parameters(platform: &Platform) -> [f64; PARAMETERS] {
    let (near, far) = (&platform.near, &platform.far);
    [
        near.latency_s,
        near.message_s,
        1.0 / near.bytes_per_s,
        1.0 / near.reduce_bytes_per_s,
        far.latency_s,
        far.message_s,
        1.0 / far.bytes_per_s,
    ]
}

/// How often each parameter is in the time, as [`Platform::time`] has it.
fn shares(sample: &Sample) -> [f64; PARAMETERS] {
    let Work { rounds, messages, moved, moved_on_path, passed, passed_on_path, inter_host, .. } = sample.work;
    let chunks = Chunks::of(&sample.work, sample.bytes, sample.chunk_bytes);
    let moving = |variant, each| {
        if chunks.bytes <= INLINE_BYTES_MAX as f64 { 0.0 } else { chunks.pipelined(variant, each) }
    };
    [
        f64::from(rounds),
        chunks.count * f64::from(messages),
        moving(moved_on_path, moved),
        chunks.pipelined(passed_on_path, passed) / 3.0,
        f64::from(inter_host.rounds),
        chunks.count * f64::from(inter_host.messages),
        moving(inter_host.moved_on_path, inter_host.moved),
    ]
}

fn predicted(row: &[f64; PARAMETERS], parameters: &[f64; PARAMETERS]) -> f64 {
    row.iter().zip(parameters).map(|(share, parameter)| share * parameter).sum()
}

/// By how much a prediction is off, when it should be 1.
fn factor(predicted: f64) -> f64 {
    if predicted >= 1.0 { predicted } else { 1.0 / predicted.max(f64::MIN_POSITIVE) }
}

/// The parameters, none below 0, with which the rows come nearest to 1.
fn least_squares(rows: &[[f64; PARAMETERS]], known: [f64; PARAMETERS]) -> [f64; PARAMETERS] {
    // Products of columns are all that counts.
    let mut products = [[0.0; PARAMETERS]; PARAMETERS];
    let mut sums = [0.0; PARAMETERS];
    for row in rows {
        for one in 0..PARAMETERS {
            sums[one] += row[one];
            for (other, share) in row.iter().enumerate() {
                products[one][other] += row[one] * share;
            }
        }
    }
    let mut found = known;
    for _ in 0..TURNS_MAX {
        let mut moved: f64 = 0.0;
        for one in (0..PARAMETERS).filter(|&one| products[one][one] > 0.0) {
            let others: f64 = (0..PARAMETERS)
                .filter(|&other| other != one)
                .map(|other| products[one][other] * found[other])
                .sum();
            let best = ((sums[one] - others) / products[one][one]).max(0.0);
            moved = moved.max((best - found[one]).abs() / best.max(found[one]).max(f64::MIN_POSITIVE));
            found[one] = best;
        }
        if moved < STILL {
            break;
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::generate::Access;

    #[test]
    fn what_was_not_measured_stays_and_nothing_becomes_negative() {
        let platform = Platform::one_host(2, Access::Put, CostModel::LOOPBACK);
        let (near, far, off) = fit(&[], &platform);
        assert!((near.bytes_per_s / CostModel::LOOPBACK.bytes_per_s - 1.0).abs() < 1e-12);
        assert_eq!((far.latency_s, off), (CostModel::LOOPBACK.latency_s, 1.0));
        // More bytes in less time: no rate explains it.
        let work = Work {
            blocks: 1,
            rounds: 1,
            messages: 0,
            moved: 1,
            reduced: 0,
            passed: 0,
            moved_on_path: 1,
            passed_on_path: 0,
            inter_host: super::super::InterHost::default(),
        };
        let sample = |bytes, seconds| Sample { work, bytes, chunk_bytes: 1 << 30, seconds };
        let (near, _, _) = fit(&[sample(1000, 3e-6), sample(1 << 20, 1e-6)], &platform);
        assert!(near.latency_s > 1e-6 && near.bytes_per_s == BYTES_PER_S_MAX, "{near:?}");
        assert!(near.message_s == CostModel::LOOPBACK.message_s, "{near:?}");
    }
}

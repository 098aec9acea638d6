//! The loops over all samples of a rank, compiled for the widest vectors of this processor.
//!
//! **Invariant:** the bits do not depend on the instructions. Each loop says in which lanes and in
//! which order it adds; products of two `f32` are exact in `f64`, and nothing else is fused.
#![allow(unsafe_code)]

use super::samples::{LANES, Samples, sum_of_lanes};

/// The curvature along a pair of samples that is not positive is replaced by this, as in LIBSVM.
pub(crate) const CURVATURE_MIN: f64 = 1e-12;

/// Defines a function whose body is compiled three times: for AVX-512, for AVX2, and for any
/// processor.
macro_rules! for_widest_vectors {
    ($(#[$doc:meta])* fn $name:ident($($argument:ident: $type:ty),* $(,)?) $(-> $result:ty)? $body:block) => {
        $(#[$doc])*
        #[allow(clippy::too_many_arguments)]
        pub(crate) fn $name($($argument: $type),*) $(-> $result)? {
            #[inline(always)]
            fn portable($($argument: $type),*) $(-> $result)? $body
            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx512f")]
                fn with_avx512($($argument: $type),*) $(-> $result)? {
                    portable($($argument),*)
                }
                #[target_feature(enable = "avx2")]
                fn with_avx2($($argument: $type),*) $(-> $result)? {
                    portable($($argument),*)
                }
                if is_x86_feature_detected!("avx512f") {
                    // SAFETY: this processor has the instructions.
                    return unsafe { with_avx512($($argument),*) };
                }
                if is_x86_feature_detected!("avx2") {
                    // SAFETY: this processor has the instructions.
                    return unsafe { with_avx2($($argument),*) };
                }
            }
            portable($($argument),*)
        }
    };
}

for_widest_vectors! {
    /// Stores the scalar products of a sample, expanded to `query`, with these samples. Blocks
    /// beyond the query's are zero there.
    fn products(query: &[[f64; LANES]], samples: &Samples, which: &[u32], into: &mut [f64]) {
        for (into, sample) in into.iter_mut().zip(which) {
            let row = samples.row(*sample as usize);
            let mut lanes = [0.0; LANES];
            for (block, values) in row.blocks.iter().zip(row.values) {
                let Some(factors) = query.get(*block as usize) else { break };
                for ((sum, value), factor) in lanes.iter_mut().zip(values).zip(factors) {
                    *sum += f64::from(*value) * factor;
                }
            }
            *into = sum_of_lanes(lanes);
        }
    }
}

/// e to the power of a number below 700, to 1e-11 of its value; 0 below -700. As the basic
/// operations of arithmetic alone make it, it has the same bits on every machine.
#[inline(always)]
pub(crate) fn exponential(power: f64) -> f64 {
    /// Adding it rounds to a whole number, which then stands in the lowest bits.
    const ROUND: f64 = 6_755_399_441_055_744.0;
    const LN_2_HIGH: f64 = 0.693_147_180_369_123_8;
    const LN_2_LOW: f64 = 1.908_214_929_270_587_7e-10;
    const LEAST: f64 = -700.0;
    let clamped = if power < LEAST { LEAST } else { power };
    let shifted = clamped * std::f64::consts::LOG2_E + ROUND;
    let whole = shifted - ROUND;
    let rest = (clamped - whole * LN_2_HIGH) - whole * LN_2_LOW;
    // Taylor's series: the rest is at most ln 2 / 2, so the next term is below 1e-11.
    let mut sum = 1.0 / 3_628_800.0;
    for factor in [
        1.0 / 362_880.0,
        1.0 / 40_320.0,
        1.0 / 5_040.0,
        1.0 / 720.0,
        1.0 / 120.0,
        1.0 / 24.0,
        1.0 / 6.0,
        0.5,
        1.0,
        1.0,
    ] {
        sum = sum * rest + factor;
    }
    let scale = f64::from_bits(shifted.to_bits().wrapping_add(1023) << 52);
    let result = sum * scale;
    if power < LEAST { 0.0 } else { result }
}

for_widest_vectors! {
    /// Replaces each number by e to its power.
    fn exponentials(numbers: &mut [f64]) {
        for number in numbers {
            *number = exponential(*number);
        }
    }
}

/// A value and the first place that has it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Extreme {
    pub(crate) value: f64,
    /// `None` where no sample qualifies.
    pub(crate) place: Option<usize>,
}

/// The values of a problem's samples on this rank, from which pairs are chosen.
#[derive(Clone, Debug, Default)]
pub(crate) struct Errors {
    /// The error of each sample: the decision function without its intercept, minus the label.
    pub(crate) error: Vec<f64>,
    /// 0 where the sample's factor may go up along its label, else infinite.
    pub(crate) up: Vec<f64>,
    /// 0 where it may go down, else minus infinite.
    pub(crate) low: Vec<f64>,
}

/// The best value in each lane so far, and the number of the chunk that has it.
///
/// The first of equal values stays. Numbers beside the values cost a blend a chunk; a search for
/// the best value afterwards costs more than all else.
struct Best {
    value: [f64; LANES],
    chunk: [u64; LANES],
}

impl Best {
    /// None is better than this value yet.
    #[inline(always)]
    fn none(value: f64) -> Self {
        Self { value: [value; LANES], chunk: [u64::MAX; LANES] }
    }

    #[inline(always)]
    fn take(&mut self, lane: usize, chunk: usize, value: f64, is_better: bool) {
        self.value[lane] = if is_better { value } else { self.value[lane] };
        self.chunk[lane] = if is_better { chunk as u64 } else { self.chunk[lane] };
    }

    #[inline(always)]
    fn take_smaller(&mut self, lane: usize, chunk: usize, value: f64) {
        self.take(lane, chunk, value, value < self.value[lane]);
    }

    #[inline(always)]
    fn take_larger(&mut self, lane: usize, chunk: usize, value: f64) {
        self.take(lane, chunk, value, value > self.value[lane]);
    }

    /// The best of all lanes: of equal ones that with the first place.
    #[inline(always)]
    fn of_all(&self, is_better: impl Fn(f64, f64) -> bool) -> Extreme {
        let (mut best, mut place) = (self.value[0], usize::MAX);
        for (lane, (value, chunk)) in self.value.iter().zip(self.chunk).enumerate() {
            let here = if chunk == u64::MAX { usize::MAX } else { chunk as usize * LANES + lane };
            if is_better(*value, best) || (*value == best && here < place) {
                (best, place) = (*value, here);
            }
        }
        Extreme { value: best, place: (place != usize::MAX).then_some(place) }
    }
}

for_widest_vectors! {
    /// Adds `step` times the difference of two kernel rows to all errors, and finds the smallest
    /// error of those that may go up and the largest of those that may go down.
    fn update(errors: &mut Errors, step: f64, up_row: &[f32], low_row: &[f32]) -> [Extreme; 2] {
        let (mut least, mut most) = (Best::none(f64::INFINITY), Best::none(f64::NEG_INFINITY));
        let changed = |error: f64, up: f32, low: f32| error + step * (f64::from(up) - f64::from(low));
        let Errors { error, up, low } = errors;
        let (errors, error_rest) = error.as_chunks_mut::<LANES>();
        let ((ups, up_rest), (lows, low_rest)) = (up.as_chunks::<LANES>(), low.as_chunks::<LANES>());
        let ((up_rows, up_row_rest), (low_rows, low_row_rest)) =
            (up_row.as_chunks::<LANES>(), low_row.as_chunks::<LANES>());
        let chunks = errors.len();
        for (chunk, ((((error, up), low), up_row), low_row)) in
            errors.iter_mut().zip(ups).zip(lows).zip(up_rows).zip(low_rows).enumerate()
        {
            // All is read before anything is written: else the compiler reads lane by lane.
            let (up, low, before) = (*up, *low, *error);
            let after: [f64; LANES] =
                std::array::from_fn(|lane| changed(before[lane], up_row[lane], low_row[lane]));
            for lane in 0..LANES {
                least.take_smaller(lane, chunk, after[lane] + up[lane]);
                most.take_larger(lane, chunk, after[lane] + low[lane]);
            }
            *error = after;
        }
        for (lane, error) in error_rest.iter_mut().enumerate() {
            *error = changed(*error, up_row_rest[lane], low_row_rest[lane]);
            least.take_smaller(lane, chunks, *error + up_rest[lane]);
            most.take_larger(lane, chunks, *error + low_rest[lane]);
        }
        [least.of_all(|one, other| one < other), most.of_all(|one, other| one > other)]
    }
}

#[inline(always)]
fn positive(curvature: f64) -> f64 {
    if curvature > 0.0 { curvature } else { CURVATURE_MIN }
}

/// By how much the objective falls if a sample goes down together with the one that goes up (twice
/// as much, and without the limits of both); below 0 where the pair cannot.
#[inline(always)]
fn gain(distance: f64, curvature: f64) -> f64 {
    if distance > 0.0 { distance * distance / positive(curvature) } else { -1.0 }
}

/// False only where [`gain`] is not larger than `other`. Most samples are passed by this without a
/// division, which takes longer than all else.
#[inline(always)]
fn gain_may_be_larger(distance: f64, curvature: f64, other: f64) -> bool {
    /// Products and the quotient are each rounded by at most half of EPSILON.
    const ROUNDED: f64 = 1.0 - 2.0 * f64::EPSILON;
    (distance > 0.0) & (distance * distance > other * positive(curvature) * ROUNDED)
}

for_widest_vectors! {
    /// Finds the sample that gains most together with the one of this error, diagonal value and
    /// kernel row.
    fn best_gain(
        errors: &Errors,
        diagonal: &[f64],
        row: &[f32],
        up_error: f64,
        up_diagonal: f64,
    ) -> Extreme {
        let Errors { error, low, .. } = errors;
        let (mut most, mut place) = (0.0, None);
        let (errors, error_rest) = error.as_chunks::<LANES>();
        let ((lows, low_rest), (diagonals, diagonal_rest)) =
            (low.as_chunks::<LANES>(), diagonal.as_chunks::<LANES>());
        let (rows, row_rest) = row.as_chunks::<LANES>();
        for (chunk, (((error, low), diagonal), row)) in
            errors.iter().zip(lows).zip(diagonals).zip(rows).enumerate()
        {
            let (mut distance, mut curvature) = ([0.0; LANES], [0.0; LANES]);
            let mut may_be_larger = false;
            for lane in 0..LANES {
                distance[lane] = error[lane] + low[lane] - up_error;
                curvature[lane] = up_diagonal + diagonal[lane] - 2.0 * f64::from(row[lane]);
                may_be_larger |= gain_may_be_larger(distance[lane], curvature[lane], most);
            }
            if may_be_larger {
                for lane in 0..LANES {
                    let gain = gain(distance[lane], curvature[lane]);
                    if gain > most {
                        (most, place) = (gain, Some(chunk * LANES + lane));
                    }
                }
            }
        }
        for (lane, error) in error_rest.iter().enumerate() {
            let distance = *error + low_rest[lane] - up_error;
            let gain = gain(distance, up_diagonal + diagonal_rest[lane] - 2.0 * f64::from(row_rest[lane]));
            if gain > most {
                (most, place) = (gain, Some(errors.len() * LANES + lane));
            }
        }
        Extreme { value: most, place }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exponentials_are_those_of_the_standard_library() {
        let mut numbers: Vec<f64> = (0..20_000).map(|at| 20.0 - f64::from(at) * 0.0373).collect();
        let powers = numbers.clone();
        exponentials(&mut numbers);
        for (power, value) in powers.into_iter().zip(numbers) {
            let expected = if power < -700.0 { 0.0 } else { power.exp() };
            assert!((value - expected).abs() <= 1e-11 * expected, "{power}: {value:e} {expected:e}");
        }
        assert_eq!(exponential(0.0), 1.0);
    }

    fn errors(error: Vec<f64>) -> Errors {
        let len = error.len();
        Errors { error, up: vec![0.0; len], low: vec![0.0; len] }
    }

    #[test]
    fn the_first_of_equal_extremes_is_found_and_masked_ones_are_not() {
        for len in [1, 7, 8, 255, 256, 257, 700] {
            let mut all = errors((0..len).map(|at| ((at * 7919) % 13) as f64).collect());
            all.up[0] = f64::INFINITY;
            all.low[len - 1] = f64::NEG_INFINITY;
            let rows = (vec![1.0; len], vec![3.0; len]);
            let expected: Vec<f64> = all.error.iter().map(|error| error - 1.0).collect();
            let [least, most] = update(&mut all, 0.5, &rows.0, &rows.1);
            assert_eq!(all.error, expected);
            let first = |places: std::ops::Range<usize>, best: fn(f64, f64) -> f64| {
                let value = places.clone().map(|at| expected[at]).reduce(best);
                (value, places.into_iter().find(|&at| Some(expected[at]) == value))
            };
            let (value, place) = first(1..len, f64::min);
            assert_eq!((least.place, least.value), (place, value.unwrap_or(f64::INFINITY)), "{len}");
            let (value, place) = first(0..len - 1, f64::max);
            assert_eq!((most.place, most.value), (place, value.unwrap_or(f64::NEG_INFINITY)), "{len}");
        }
    }

    #[test]
    fn the_best_gain_is_that_of_a_plain_loop() {
        for len in [1, 8, 300, 513] {
            let mut all = errors((0..len).map(|at| ((at * 31) % 17) as f64 - 8.0).collect());
            all.low[len / 2] = f64::NEG_INFINITY;
            let diagonal: Vec<f64> = (0..len).map(|at| 1.0 + (at % 3) as f64).collect();
            let row: Vec<f32> = (0..len).map(|at| (at % 5) as f32 * 0.5).collect();
            let mut expected = Extreme { value: 0.0, place: None };
            for at in 0..len {
                let curvature = 1.0 + diagonal[at] - 2.0 * f64::from(row[at]);
                let value = gain(all.error[at] + all.low[at] + 2.0, curvature);
                if value > expected.value {
                    expected = Extreme { value, place: Some(at) };
                }
            }
            assert_eq!(best_gain(&all, &diagonal, &row, -2.0, 1.0), expected, "{len}");
        }
    }
}

//! Sums that have the same bits in any order.
//!
//! Each number is cut at two fixed places (Demmel and Nguyen 2013): a number of which the upper
//! part is a multiple of one power of two, the middle part of another, and the rest is dropped. The
//! sums of upper and of middle parts are exact, so their order does not matter. With a million
//! numbers of at most 1 the rest is below 2^-66 of each.

/// Where numbers are cut, for sums of at most so many numbers of at most some size.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cuts {
    upper: f64,
    middle: f64,
}

/// A sum in progress.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct AnyOrderSum {
    upper: f64,
    middle: f64,
}

impl Cuts {
    /// For `count` numbers that are not farther from 0 than `largest`. `None` when such a sum may
    /// be beyond the range of numbers.
    pub(crate) fn new(largest: f64, count: usize) -> Option<Self> {
        /// Exponents that keep all parts in the range of normal numbers.
        const EXPONENTS: std::ops::RangeInclusive<i32> = -800..=1000;
        let count_bits = count.max(1).ilog2() as i32 + 1;
        // At least as large as each number, and never so small that parts are lost.
        let largest_bits = exponent(largest.max(f64::MIN_POSITIVE)).max(*EXPONENTS.start()) + 1;
        let upper = largest_bits + count_bits;
        // What is left of a number is below half a unit of its upper part.
        let middle = upper - 52 + count_bits;
        let is_in_range = largest.is_finite() && upper <= *EXPONENTS.end();
        is_in_range.then(|| Self { upper: 1.5 * two_to_the(upper), middle: 1.5 * two_to_the(middle) })
    }
}

impl AnyOrderSum {
    /// Adds a number.
    #[inline(always)]
    pub(crate) fn add(&mut self, number: f64, cuts: Cuts) {
        let upper = (number + cuts.upper) - cuts.upper;
        let rest = number - upper;
        self.upper += upper;
        self.middle += (rest + cuts.middle) - cuts.middle;
    }

    pub(crate) fn value(self) -> f64 {
        self.upper + self.middle
    }
}

/// The exponent of a normal number.
fn exponent(number: f64) -> i32 {
    ((number.to_bits() >> 52) & 0x7ff) as i32 - 1023
}

fn two_to_the(exponent: i32) -> f64 {
    f64::from_bits(((exponent + 1023) as u64) << 52)
}

#[cfg(test)]
mod tests {
    use pleach_vocabulary::random::Random;

    use super::*;

    #[test]
    fn any_order_gives_the_same_bits_and_the_right_sum() {
        let mut random = Random::new(3);
        for (largest, count) in [(1.0, 1), (10.0, 100_000), (3e-7, 777), (1e12, 5_000)] {
            let cuts = Cuts::new(largest, count).expect("is in range");
            let mut numbers: Vec<f64> = (0..count)
                .map(|_| (random.bits() >> 11) as f64 / (1u64 << 52) as f64 * largest - largest)
                .collect();
            let sum = |numbers: &[f64]| {
                let mut sum = AnyOrderSum::default();
                numbers.iter().for_each(|number| sum.add(*number, cuts));
                sum.value()
            };
            let first = sum(&numbers);
            // Exact: the numbers are whole multiples of this unit.
            let unit = largest / (1u64 << 52) as f64;
            let close: f64 = numbers.iter().map(|number| number / unit).sum::<f64>() * unit;
            assert!((first - close).abs() <= 1e-9 * largest * count as f64, "{first} {close}");
            for _ in 0..5 {
                random.shuffle(&mut numbers);
                assert_eq!(sum(&numbers).to_bits(), first.to_bits());
            }
        }
        assert!(Cuts::new(f64::INFINITY, 3).is_none() && Cuts::new(1e305, 1 << 20).is_none());
        assert!(Cuts::new(0.0, 3).is_some());
    }

    #[test]
    fn what_is_dropped_is_far_below_the_rounding_of_a_plain_sum() {
        let cuts = Cuts::new(1.0, 3).expect("is in range");
        let mut sum = AnyOrderSum::default();
        for number in [1.0, 1e-20, -1.0] {
            sum.add(number, cuts);
        }
        assert!((sum.value() - 1e-20).abs() < 1e-26, "{:e}", sum.value());
    }
}

//! Sums of at most two digits, computed by the processor's own conversions. Most calls have such
//! sums.
//!
//! A number of a window is an integer times two to the power of `low`. So two conversions to
//! integers give its digits, without rounding. A sum of such digits is an integer of at most 115
//! bits. If it is longer than [`KEPT_BITS`], its leading bits are kept, and the lowest of these is
//! set if any lower bit is set: *rounding to odd*. A second rounding, to fewer bits, then gives the
//! same result as a single rounding (Boldo and Melquiond, "Emulation of a FMA and correctly rounded
//! sums: proved algorithms using rounding to odd", IEEE Transactions on Computers 57(4), 2008). The
//! second rounding is the conversion of an integer to a float.

use super::rounding::{Float, power_of_two};
use super::{DIGIT_BITS, Window};

/// Bits of a sum that are kept. They are more than twice the bits of any mantissa to which a
/// quotient is rounded.
const KEPT_BITS: u32 = 62;

/// Largest distance of the lowest place from 0 for which two-digit sums are used. Beyond it,
/// numbers that are scaled to integers could leave the range of `f64`.
const LOW_MAX: i32 = 900;

/// Most bits of a mantissa for which the quotient of 64 bits and a number of ranks has enough bits.
const QUOTIENT_PRECISION_MAX: i32 = 32;

/// The conversion of the numbers of a block to digits, and of the sums to numbers.
#[derive(Clone, Copy, Debug)]
pub(super) struct TwoDigitSums {
    /// The place of the lowest bit of a sum.
    low: i32,
    has_high: bool,
    /// Two to the power of minus `low`.
    to_low: f64,
    /// The same factor for the second digit.
    to_high: f64,
    /// The odd part of the divisor of sums. Sums are also divided by two to the power of
    /// `halvings`.
    divide_by: u64,
    halvings: i32,
}

impl TwoDigitSums {
    /// The conversion for sums of `T` that are divided by `divide_by`, which is at least 1. `None`
    /// if numbers must be decomposed, because the window is too long or for another reason.
    pub(super) fn of<T: Float>(window: Window, divide_by: u32) -> Option<Self> {
        let halvings = divide_by.trailing_zeros();
        let odd = divide_by >> halvings;
        let is_quick = (1..=2).contains(&window.digits)
            && window.low.abs() <= LOW_MAX
            && (odd == 1 || T::PRECISION <= QUOTIENT_PRECISION_MAX);
        is_quick.then(|| Self {
            low: window.low,
            has_high: window.digits == 2,
            to_low: power_of_two(-window.low),
            to_high: power_of_two(-window.low - DIGIT_BITS as i32),
            divide_by: odd.into(),
            halvings: halvings as i32,
        })
    }

    /// Stores the digits of numbers of the window. The digits of one place are adjacent.
    pub(super) fn expand<T: Float>(&self, numbers: impl ExactSizeIterator<Item = T>, words: &mut [i64]) {
        let (lows, highs) = words.split_at_mut(numbers.len());
        if !self.has_high {
            for (number, low) in numbers.zip(lows) {
                *low = nearest_integer(number.value() * self.to_low);
            }
            return;
        }
        let digit = power_of_two(DIGIT_BITS as i32);
        for ((number, low), high) in numbers.zip(lows).zip(highs) {
            let value = number.value();
            let above = value * self.to_high;
            // Rounding up a long mantissa could give a digit that is too large by one.
            *high = if T::PRECISION < DIGIT_BITS as i32 { nearest_integer(above) } else { above as i64 };
            *low = nearest_integer(value * self.to_low - *high as f64 * digit);
        }
    }

    /// Computes the elements of the result from the sums of such digits, and calls `store` with
    /// each.
    pub(super) fn round<T: Float>(&self, words: &[i64], elements: usize, mut store: impl FnMut(usize, T)) {
        let (lows, highs) = words.split_at(elements);
        if self.has_high {
            for (index, (low, high)) in lows.iter().zip(highs).enumerate() {
                store(index, self.round_one(*low, *high));
            }
        } else {
            lows.iter().enumerate().for_each(|(index, low)| store(index, self.round_one(*low, 0)));
        }
    }

    /// The number nearest to the sum or average.
    #[inline(always)]
    fn round_one<T: Float>(&self, low: i64, high: i64) -> T {
        let (mut integer, mut place) = if self.has_high {
            let (kept, excess) = to_odd(i128::from(low) + (i128::from(high) << DIGIT_BITS));
            (kept, self.low + excess)
        } else {
            (low, self.low)
        };
        if self.divide_by > 1 {
            // The dividend uses all bits, so that the quotient has more bits than any mantissa.
            let bits = integer.unsigned_abs();
            let room = bits.leading_zeros() % u64::BITS;
            let shifted = bits << room;
            // The divisor is at least three, so the quotient leaves room for the sign.
            let left = u64::from(!shifted.is_multiple_of(self.divide_by));
            let quotient = ((shifted / self.divide_by) | left) as i64;
            (integer, place) = (if integer < 0 { -quotient } else { quotient }, place - room as i32);
        }
        T::of_integer(integer, place - self.halvings)
    }
}

/// The integer nearest to a number of at most [`DIGIT_BITS`] bits. The number is added to a
/// constant whose lowest mantissa bit has the value one. The sum differs from the constant only in
/// bits of the mantissa.
#[inline]
fn nearest_integer(number: f64) -> i64 {
    const ONES: f64 = (3u64 << 51) as f64;
    (number + ONES).to_bits().wrapping_sub(ONES.to_bits()) as i64
}

/// The integer rounded to odd, and the number of bits by which it was shortened.
fn to_odd(sum: i128) -> (i64, i32) {
    let bits = sum.unsigned_abs();
    let excess = (u128::BITS - bits.leading_zeros()).saturating_sub(KEPT_BITS);
    let more = bits & ((1 << excess) - 1) != 0;
    let kept = (bits >> excess) as i64 | i64::from(more);
    (if sum < 0 { -kept } else { kept }, excess as i32)
}

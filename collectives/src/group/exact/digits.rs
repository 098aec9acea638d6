//! Floats as rows of signed digits, which add without carries and without rounding.
//!
//! A [`Window`] is a range of binary places that holds all numbers of a block. A number in it is a
//! row of digits of [`DIGIT_BITS`] bits, least significant first, all with the number's sign. A
//! digit lies in an `i64`, so that as many rows as there can be ranks are added digit by digit
//! before any of them overflows.

use pleach_schedule::generate::RANKS_MAX;

/// Bits of a digit. What is left of an `i64` is the sign and room for the sum of all ranks' digits.
pub(super) const DIGIT_BITS: u32 = 51;
const _: () = assert!(RANKS_MAX as u64 <= 1 << (63 - DIGIT_BITS));

/// Most digits of a row: from the smallest subnormal `f64` to the largest number.
const DIGITS_MAX: usize = (1024 + 1074u32).div_ceil(DIGIT_BITS) as usize;

const DIGIT_MASK: u64 = (1 << DIGIT_BITS) - 1;

/// A finite number other than zero: `mantissa` times two to the power of `exponent`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Parts {
    pub(super) negative: bool,
    pub(super) mantissa: u64,
    pub(super) exponent: i32,
}

/// Takes a finite number apart; `None` for zeros.
pub(super) fn parts(value: f64) -> Option<Parts> {
    let bits = value.to_bits();
    let (field, fraction) = ((bits >> 52) as i32 & 0x7ff, bits & ((1 << 52) - 1));
    let (mantissa, exponent) =
        if field == 0 { (fraction, -1074) } else { (fraction | 1 << 52, field - 1075) };
    let zeros = mantissa.trailing_zeros();
    (mantissa != 0).then(|| Parts {
        negative: value.is_sign_negative(),
        mantissa: mantissa >> zeros,
        exponent: exponent + zeros as i32,
    })
}

impl Parts {
    /// The place above its highest bit.
    pub(super) fn top(self) -> i32 {
        self.exponent + (u64::BITS - self.mantissa.leading_zeros()) as i32
    }
}

/// The binary places that the numbers of a block use: `digits` places, from `low` on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Window {
    pub(super) low: i32,
    pub(super) digits: usize,
}

impl Window {
    /// For places from `low` to below `top`.
    pub(super) fn new(low: i32, top: i32) -> Self {
        let places = u32::try_from(top - low).unwrap_or(0);
        Self { low, digits: places.div_ceil(DIGIT_BITS) as usize }
    }

    /// Stores the digits of a number within the window, digit `k` at `digits[k * stride]`. The
    /// others must be zero.
    pub(super) fn store(self, number: Parts, digits: &mut [i64], stride: usize) {
        let place = (number.exponent - self.low) as u32;
        let (mut digit, mut rest) =
            ((place / DIGIT_BITS) as usize, u128::from(number.mantissa) << (place % DIGIT_BITS));
        while rest != 0 {
            let low = (rest as u64 & DIGIT_MASK) as i64;
            digits[digit * stride] = if number.negative { -low } else { low };
            rest >>= DIGIT_BITS;
            digit += 1;
        }
    }
}

/// The leading bits of a sum or quotient: 64 of them, or all if there are fewer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Leading {
    pub(super) negative: bool,
    pub(super) bits: u64,
    /// Place of the lowest of them.
    pub(super) place: i32,
    /// Whether there is something below.
    pub(super) more: bool,
}

/// The leading bits of the sum whose digits are `sums`, divided by at least 1; `None` for zero.
pub(super) fn leading(
    window: Window,
    mut sums: impl Iterator<Item = i64> + Clone,
    divide_by: u32,
) -> Option<Leading> {
    if window.digits > SHORT_DIGITS {
        let mut sum = Magnitude::new(window, sums);
        let left = divide_by > 1 && sum.divide(divide_by);
        let (bits, place, more) = sum.leading()?;
        return Some(Leading { negative: sum.negative, bits, place, more: more || left });
    }
    let low = sums.next().map_or(0, i128::from);
    let sum = sums.next().map_or(low, |high| low + (i128::from(high) << DIGIT_BITS));
    let (mut bits, mut place, mut more) = (sum.unsigned_abs(), window.low, false);
    if bits == 0 {
        return None;
    }
    if divide_by > 1 {
        // All the bits there are, so that the quotient has more than any mantissa.
        let room = bits.leading_zeros();
        let shifted = bits << room;
        (bits, more) = (shifted / u128::from(divide_by), !shifted.is_multiple_of(u128::from(divide_by)));
        place -= room as i32;
    }
    let excess = (u128::BITS - bits.leading_zeros()).saturating_sub(u64::BITS);
    more |= bits & ((1 << excess) - 1) != 0;
    Some(Leading { negative: sum < 0, bits: (bits >> excess) as u64, place: place + excess as i32, more })
}

/// Numbers of up to this many digits, and their sum over all ranks, fit an `i128`.
const SHORT_DIGITS: usize = 2;
const _: () = assert!(SHORT_DIGITS as u32 * DIGIT_BITS + (63 - DIGIT_BITS) < 127);

/// A sum of rows: sign and magnitude, digits all positive and below their limit.
#[derive(Clone, Debug)]
struct Magnitude {
    negative: bool,
    /// Least significant first. Three more than any row: one for carries, two below the window for
    /// a quotient's fraction.
    digits: [u64; DIGITS_MAX + 3],
    len: usize,
    /// Place of the first digit's lowest bit.
    low: i32,
}

/// Digits below the window that a quotient gets: more than any mantissa has, so that only whether
/// there is more counts.
const FRACTION_DIGITS: usize = 2;

impl Magnitude {
    /// The sum whose digits are `sums`, each a sum of digits.
    fn new(window: Window, sums: impl Iterator<Item = i64> + Clone) -> Self {
        let mut sum = Self { negative: false, digits: [0; DIGITS_MAX + 3], len: 0, low: window.low };
        if sum.carry(sums.clone(), 1) < 0 {
            sum.negative = true;
            sum.carry(sums, -1);
        }
        sum
    }

    /// Adds carries up; returns what would be beyond the last digit, negative if the sum is.
    fn carry(&mut self, sums: impl Iterator<Item = i64>, sign: i128) -> i128 {
        let mut carry = 0i128;
        self.len = 0;
        for sum in sums {
            let value = i128::from(sum) * sign + carry;
            self.digits[self.len] = value as u64 & DIGIT_MASK;
            carry = value >> DIGIT_BITS;
            self.len += 1;
        }
        // At most the number of ranks, so one digit holds it where it is not negative.
        self.digits[self.len] = carry as u64 & DIGIT_MASK;
        self.len += 1;
        carry
    }

    /// Divides by at least 1, with two more digits. Whether something is left beyond them.
    fn divide(&mut self, by: u32) -> bool {
        self.digits.copy_within(0..self.len, FRACTION_DIGITS);
        self.digits[..FRACTION_DIGITS].fill(0);
        self.len += FRACTION_DIGITS;
        self.low -= FRACTION_DIGITS as i32 * DIGIT_BITS as i32;
        let mut rest = 0u128;
        for digit in self.digits[..self.len].iter_mut().rev() {
            let value = rest << DIGIT_BITS | u128::from(*digit);
            *digit = (value / u128::from(by)) as u64;
            rest = value % u128::from(by);
        }
        rest != 0
    }

    /// The 64 bits from the highest one on, the place of the lowest of them, and whether there is
    /// more below. `None` for zero.
    fn leading(&self) -> Option<(u64, i32, bool)> {
        let highest = (0..self.len).rev().find(|&at| self.digits[at] != 0)?;
        let (mut bits, mut place) = (0u128, self.low + (highest as i32 + 1) * DIGIT_BITS as i32);
        let mut at = highest + 1;
        // Three digits are 153 bits, of which the first has at least one: enough unless the bits
        // run out.
        while at > 0 && bits >> 64 == 0 {
            at -= 1;
            bits = bits << DIGIT_BITS | u128::from(self.digits[at]);
            place -= DIGIT_BITS as i32;
        }
        let excess = (u128::BITS - bits.leading_zeros()).saturating_sub(u64::BITS);
        let more = bits & ((1 << excess) - 1) != 0 || self.digits[..at].iter().any(|&digit| digit != 0);
        Some(((bits >> excess) as u64, place + excess as i32, more))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_is_its_parts() {
        for value in [1.0, -1.5, 5e-324, f64::MAX, f64::MIN_POSITIVE, 0.1, -3.0e-310] {
            let Parts { negative, mantissa, exponent } = parts(value).expect("not zero");
            // By halves, as a power of two alone may be out of range.
            let half = 2f64.powi(exponent / 2);
            let magnitude = mantissa as f64 * half * 2f64.powi(exponent - exponent / 2);
            assert_eq!(if negative { -magnitude } else { magnitude }, value);
        }
        assert_eq!((parts(0.0), parts(-0.0)), (None, None));
    }

    #[test]
    fn the_widest_window_holds_the_smallest_and_the_largest_number_and_their_difference() {
        let window = Window::new(-1074, 1024);
        assert_eq!(window.digits, DIGITS_MAX);
        let mut sums = vec![0i64; window.digits];
        let mut add = |value: f64| {
            let mut row = vec![0; window.digits];
            window.store(parts(value).expect("not zero"), &mut row, 1);
            sums.iter_mut().zip(row).for_each(|(sum, digit)| *sum += digit);
        };
        (0..RANKS_MAX).for_each(|_| add(f64::MAX));
        add(-5e-324);
        let (bits, place, more) = Magnitude::new(window, sums.iter().copied()).leading().expect("not zero");
        // 4096 times the largest number, less a little: all ones.
        assert_eq!((bits, place, more), (0xffff_ffff_ffff_f7ff, 1024 + 12 - 64, true));
    }

    #[test]
    fn quotients_are_cut_off_below_and_say_so() {
        let window = Window::new(0, 8);
        let mut one = Magnitude::new(window, [-1].into_iter());
        assert!(one.negative && one.divide(3));
        assert_eq!(one.leading(), Some((0xaaaa_aaaa_aaaa_aaaa, -65, true)));
        let mut even = Magnitude::new(window, [6].into_iter());
        assert!(!even.divide(2));
        let (bits, place, more) = even.leading().expect("not zero");
        assert_eq!((bits as f64 * 2f64.powi(place), more), (3.0, false));
        assert_eq!(Magnitude::new(window, [0].into_iter()).leading(), None);
    }

    #[test]
    fn few_digits_give_what_many_do() {
        let mut state = 1u64;
        let mut next = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 12) as i64 - (1 << 51)
        };
        for round in 0..10_000 {
            let shift = round % 50;
            let sums = [next() >> shift, next() >> (round / 7 % 52)];
            let (short, long) = (Window { low: -7, digits: 2 }, Window { low: -7, digits: 3 });
            for divide_by in [1, 2, 3, 7, 4096, u32::MAX] {
                let few = leading(short, sums.into_iter(), divide_by);
                let many = leading(long, sums.into_iter().chain([0]), divide_by);
                // A quotient may have its bits cut off at another place: both have all that a
                // mantissa can hold.
                let cut = |leading: Option<Leading>| {
                    leading.map(|Leading { negative, bits, place, more }| {
                        let zeros = bits.leading_zeros();
                        let (bits, place) = (bits << zeros, place - zeros as i32);
                        (negative, bits >> 10, place, more || bits & 0x3ff != 0)
                    })
                };
                assert_eq!(cut(few), cut(many), "{sums:?} by {divide_by}");
            }
        }
    }
}

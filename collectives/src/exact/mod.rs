//! Sums without rounding, made of integer collectives.
//!
//! The elements are divided into blocks. One all-reduce (maximum) over a few integers for each
//! block finds the binary places that the numbers of the block use on any rank. Then each block is
//! expanded into rows of digits ([`Window`]). The digits are all-reduced as `i64` sums, which do
//! not depend on the order. Every rank then rounds the same exact sum once. A rank that contributes
//! several times gives the digits of the sum of its contributions, as of one number that has more
//! places.
//!
//! **Cost.** Numbers whose binary places span `s` bits (mantissas included) take `ceil(s / 51)`
//! words of 8 bytes each, and one more word if a block has infinities or NaN. For example, `f32`
//! gradients within 2^78 of each other take two words, which are four times the bytes. Any `f32`
//! take at most six words, and any `f64` at most 42. A call also makes one small all-reduce, and
//! expands and rounds the numbers, which takes most of the time where memory is fast.
//! [`TwoDigitSums`] expands and rounds up to two words element by element, without decomposing
//! numbers. Measured over shared memory, with two ranks and one word for each element: 0.76 us for
//! 2 elements, and 3.1 to 3.4 ns an element for 16 Ki and 1 Mi elements (27 ns where every number
//! is decomposed). Plain sums took 0.35 us and 0.12 to 0.15 ns (`pleach bench --reproducible
//! exact`, and the table in docs/performance.md).

mod by_blocks;
mod elements;
mod rounding;
mod two_digits;

pub(crate) use self::by_blocks::{Block, BlockSums};
pub(crate) use self::elements::Elements;
pub(crate) use self::rounding::Float;
use self::rounding::nearest;
use self::two_digits::TwoDigitSums;
use pleach_schedule::generate::RANKS_MAX;

/// Elements of a block.
pub(crate) const BLOCK_ELEMENTS: usize = 16 << 10;

/// The number of facts of a block. Facts of several ranks are combined by maximum.
pub(crate) const FACTS: usize = 3;
/// A place below all places of numbers.
const NO_PLACE: i32 = i32::MIN / 2;

/// Bits of each count in a word. A word counts NaN, infinities and negative infinities; each count
/// is at most the number of ranks.
const COUNT_BITS: u32 = 20;
const NAN: i64 = 1;
const INFINITY: i64 = 1 << COUNT_BITS;
const NEGATIVE_INFINITY: i64 = 1 << (2 * COUNT_BITS);

/// The facts of a block: the place above the highest bit of its numbers, the place of the lowest
/// bit (negated), and whether some numbers are not finite.
pub(crate) fn facts_of<T: Float>(block: impl Iterator<Item = T>) -> [i32; FACTS] {
    if T::PRECISION <= <f32 as Float>::PRECISION {
        return facts_of_singles(block.map(|number| number.value() as f32));
    }
    let mut facts = [NO_PLACE, NO_PLACE, 0];
    for number in block {
        let value = number.value();
        if !value.is_finite() {
            facts[2] = 1;
        } else if let Some(parts) = parts(value) {
            facts[0] = facts[0].max(parts.top());
            facts[1] = facts[1].max(-parts.exponent);
        }
    }
    facts
}

/// The same facts for `f32` and for types whose values an `f32` holds, without branches, for
/// several numbers at a time. The place of a bit is the exponent of a float that has only this bit.
fn facts_of_singles(block: impl Iterator<Item = f32>) -> [i32; FACTS] {
    let exponent = |integer: i32| ((integer as f32).to_bits() >> 23) as i32 - 127;
    block.fold([NO_PLACE, NO_PLACE, 0], |[top, bottom, special], number| {
        let bits = number.to_bits() as i32;
        let (field, fraction) = (bits >> 23 & 0xff, bits & 0x7f_ffff);
        let mantissa = fraction | i32::from(field != 0) << 23;
        let place = field.max(1) - 150;
        let is_number = (mantissa != 0) & (field != 0xff);
        let highest = if is_number { place + exponent(mantissa) + 1 } else { NO_PLACE };
        let lowest = if is_number { -place - exponent(mantissa & -mantissa) } else { NO_PLACE };
        [top.max(highest), bottom.max(lowest), special | i32::from(field == 0xff)]
    })
}

/// The facts of a block to which a rank contributes several times, from those of each contribution.
/// Their sum is below so many times the highest of them.
pub(crate) fn facts_of_sum(each: impl ExactSizeIterator<Item = [i32; FACTS]>) -> [i32; FACTS] {
    let carries = each.len().next_power_of_two().trailing_zeros() as i32;
    let larger = |a: [i32; FACTS], b: [i32; FACTS]| std::array::from_fn(|fact| a[fact].max(b[fact]));
    let [top, bottom, special] = each.fold([NO_PLACE, NO_PLACE, 0], larger);
    [if top == NO_PLACE { top } else { top + carries }, bottom, special]
}

/// The expansion of a block. For each digit the digits of all elements are adjacent. The counts
/// follow, if there are any.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BlockWindow {
    window: Window,
    counts: bool,
    divide_by: u32,
    /// The sums of at most two digits, where these suffice: they need no decomposition of numbers.
    two_digits: Option<TwoDigitSums>,
}

impl BlockWindow {
    pub(crate) fn new<T: Float>(facts: &[i32], divide_by: u32) -> Self {
        let empty = facts[0] == NO_PLACE;
        let window = if empty { Window::new(0, 0) } else { Window::new(-facts[1], facts[0]) };
        let counts = facts[2] != 0;
        let two_digits = if counts { None } else { TwoDigitSums::of::<T>(window, divide_by) };
        Self { window, counts, divide_by, two_digits }
    }

    pub(crate) fn words(self, elements: usize) -> usize {
        (self.window.digits + usize::from(self.counts)) * elements
    }

    pub(crate) fn expand<T: Float>(self, block: impl ExactSizeIterator<Item = T>, words: &mut [i64]) {
        if let Some(two_digits) = self.two_digits {
            return two_digits.expand(block, words);
        }
        words.fill(0);
        let elements = block.len();
        let (digits, counts) = words.split_at_mut(self.window.digits * elements);
        for (index, number) in block.enumerate() {
            let value = number.value();
            if value.is_nan() {
                counts[index] = NAN;
            } else if value.is_infinite() {
                counts[index] = if value > 0.0 { INFINITY } else { NEGATIVE_INFINITY };
            } else if let Some(parts) = parts(value) {
                self.window.store(parts, &mut digits[index..], elements);
            }
        }
    }

    /// Stores the digits of the sum of several contributions to the block, whose facts are in the
    /// window ([`facts_of_sum`]).
    pub(crate) fn expand_sum<T: Float, I: ExactSizeIterator<Item = T>>(
        self,
        mut contributions: impl Iterator<Item = I>,
        elements: usize,
        words: &mut [i64],
    ) {
        let Some(first) = contributions.next() else { return words.fill(0) };
        self.expand(first, words);
        let (mut rows, mut more) = (1, Vec::new());
        for contribution in contributions {
            more.resize(words.len(), 0);
            self.expand(contribution, &mut more);
            words.iter_mut().zip(&more).for_each(|(word, more)| *word += more);
            rows += 1;
            if rows == ROWS_MAX {
                self.carry(words, elements);
                rows = 1;
            }
        }
        if rows > 1 {
            self.carry(words, elements);
        }
    }

    /// Makes one row of the sum of several: each digit but the highest one keeps its own bits, and
    /// each count says whether there is such a number.
    fn carry(self, words: &mut [i64], elements: usize) {
        let (digits, counts) = words.split_at_mut(self.window.digits * elements);
        for digit in 1..self.window.digits {
            let (lower, upper) = digits.split_at_mut(digit * elements);
            for (low, high) in lower[(digit - 1) * elements..].iter_mut().zip(upper) {
                *high += *low >> DIGIT_BITS;
                *low &= DIGIT_MASK as i64;
            }
        }
        for counted in counts {
            let has = |one: i64| *counted & (one * ((1 << COUNT_BITS) - 1)) != 0;
            *counted = [NAN, INFINITY, NEGATIVE_INFINITY].into_iter().filter(|one| has(*one)).sum();
        }
    }

    /// Calls `store` with the place and the value of every element of the result.
    pub(crate) fn round<T: Float>(self, words: &[i64], elements: usize, mut store: impl FnMut(usize, T)) {
        if let Some(two_digits) = self.two_digits {
            return two_digits.round(words, elements, store);
        }
        (0..elements).for_each(|index| store(index, self.round_one(words, index, elements)));
    }

    fn round_one<T: Float>(self, words: &[i64], index: usize, elements: usize) -> T {
        let (digits, counts) = words.split_at(self.window.digits * elements);
        if let Some(&counted) = counts.get(index)
            && counted != 0
        {
            let (positive, negative) =
                (counted & (NEGATIVE_INFINITY - INFINITY) != 0, counted >= NEGATIVE_INFINITY);
            let is_nan = counted & (INFINITY - NAN) != 0 || (positive && negative);
            return T::from_value(match (is_nan, positive) {
                (true, _) => f64::NAN,
                (false, true) => f64::INFINITY,
                (false, false) => f64::NEG_INFINITY,
            });
        }
        let sums = digits.iter().skip(index).step_by(elements.max(1)).copied();
        match leading(self.window, sums, self.divide_by) {
            Some(Leading { negative, bits, place, more }) => nearest(negative, bits, place, more),
            None => T::from_value(0.0),
        }
    }
}

// ---- Floats as rows of signed digits, which are added without carries and without rounding.
//
// A [`Window`] is a range of binary places that holds all numbers of a block. A number in the
// window is a row of digits of [`DIGIT_BITS`] bits, the least significant digit first. All digits
// have the sign of the number. A digit is stored in an `i64`, so that the rows of the largest
// number of ranks can be added digit by digit without an overflow.

/// Bits of a digit. The other bits of an `i64` are the sign and room for the sum of the digits of
/// all ranks.
const DIGIT_BITS: u32 = 51;
const _: () = assert!(RANKS_MAX as u64 <= 1 << (63 - DIGIT_BITS));

/// Most rows that are added up before their carries go to the next digit.
const ROWS_MAX: usize = RANKS_MAX as usize;

/// Most digits of a row: from the smallest subnormal `f64` to the largest number.
const DIGITS_MAX: usize = (1024 + 1074u32).div_ceil(DIGIT_BITS) as usize;

const DIGIT_MASK: u64 = (1 << DIGIT_BITS) - 1;

/// A finite number other than zero: `mantissa` times two to the power of `exponent`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Parts {
    negative: bool,
    mantissa: u64,
    exponent: i32,
}

/// Decomposes a finite number; `None` for zeros.
fn parts(value: f64) -> Option<Parts> {
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
    /// The place above the highest bit.
    fn top(self) -> i32 {
        self.exponent + (u64::BITS - self.mantissa.leading_zeros()) as i32
    }
}

/// The binary places that the numbers of a block use: `digits` places, from `low` on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Window {
    low: i32,
    digits: usize,
}

impl Window {
    /// The window of the places from `low` to below `top`.
    fn new(low: i32, top: i32) -> Self {
        let places = u32::try_from(top - low).unwrap_or(0);
        Self { low, digits: places.div_ceil(DIGIT_BITS) as usize }
    }

    /// Stores the digits of a number within the window, digit `k` at `digits[k * stride]`. Digits
    /// that the number does not use must be zero before.
    fn store(self, number: Parts, digits: &mut [i64], stride: usize) {
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

/// The leading bits of a sum or quotient: 64 bits, or all bits if there are fewer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Leading {
    negative: bool,
    bits: u64,
    /// The place of the lowest of these bits.
    place: i32,
    /// Whether lower bits are set.
    more: bool,
}

/// The leading bits of the sum whose digits are `sums`, divided by `divide_by`, which is at least
/// 1; `None` for zero.
fn leading(window: Window, mut sums: impl Iterator<Item = i64> + Clone, divide_by: u32) -> Option<Leading> {
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
        // The dividend is shifted to use all bits, so that the quotient has more bits than any
        // mantissa.
        let room = bits.leading_zeros();
        let shifted = bits << room;
        (bits, more) = (shifted / u128::from(divide_by), !shifted.is_multiple_of(u128::from(divide_by)));
        place -= room as i32;
    }
    let excess = (u128::BITS - bits.leading_zeros()).saturating_sub(u64::BITS);
    more |= bits & ((1 << excess) - 1) != 0;
    Some(Leading { negative: sum < 0, bits: (bits >> excess) as u64, place: place + excess as i32, more })
}

/// Numbers of up to this many digits, and their sums over all ranks, fit in an `i128`.
const SHORT_DIGITS: usize = 2;
const _: () = assert!(SHORT_DIGITS as u32 * DIGIT_BITS + (63 - DIGIT_BITS) < 127);

/// A sum of rows as sign and magnitude. All digits are at least zero and below their limit.
#[derive(Clone, Debug)]
struct Magnitude {
    negative: bool,
    /// The digits, the least significant first. There are three more digits than in any row: one
    /// for carries, and two below the window for the fraction of a quotient.
    digits: [u64; DIGITS_MAX + 3],
    len: usize,
    /// The place of the lowest bit of the first digit.
    low: i32,
}

/// Digits of a quotient below the window. They have more bits than any mantissa, so further bits
/// matter only by being zero or not.
const FRACTION_DIGITS: usize = 2;

impl Magnitude {
    /// The sum of rows. Each element of `sums` is the sum of the digits of one place.
    fn new(window: Window, sums: impl Iterator<Item = i64> + Clone) -> Self {
        let mut sum = Self { negative: false, digits: [0; DIGITS_MAX + 3], len: 0, low: window.low };
        if sum.carry(sums.clone(), 1) < 0 {
            sum.negative = true;
            sum.carry(sums, -1);
        }
        sum
    }

    /// Propagates carries upwards. Returns the carry out of the last digit, which is negative if
    /// the sum is negative.
    fn carry(&mut self, sums: impl Iterator<Item = i64>, sign: i128) -> i128 {
        let mut carry = 0i128;
        self.len = 0;
        for sum in sums {
            let value = i128::from(sum) * sign + carry;
            self.digits[self.len] = value as u64 & DIGIT_MASK;
            carry = value >> DIGIT_BITS;
            self.len += 1;
        }
        // The carry is at most the number of ranks, so one digit holds it if it is not negative.
        self.digits[self.len] = carry as u64 & DIGIT_MASK;
        self.len += 1;
        carry
    }

    /// Divides by `by`, which is at least 1, and adds two digits. Returns whether there is a
    /// remainder below these digits.
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

    /// The 64 bits from the highest set bit on, the place of the lowest of these bits, and whether
    /// lower bits are set. `None` for zero.
    fn leading(&self) -> Option<(u64, i32, bool)> {
        let highest = (0..self.len).rev().find(|&at| self.digits[at] != 0)?;
        let (mut bits, mut place) = (0u128, self.low + (highest as i32 + 1) * DIGIT_BITS as i32);
        let mut at = highest + 1;
        // Three digits have 153 bits, and the first digit has at least one bit set. So three digits
        // give 64 bits, unless the sum has fewer bits.
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
    use proptest::prelude::*;

    use half::f16;

    use super::*;
    use crate::compute::F8E4M3;

    /// The exact sum of one column, without a group. Checks that all ways to compute it agree.
    fn sum<T: Float>(column: &[T], divide_by: u32) -> T {
        let facts = column.iter().map(|number| facts_of(std::iter::once(*number)));
        let facts = facts.reduce(|a, b| std::array::from_fn(|k| a[k].max(b[k]))).expect("some");
        let shape = BlockWindow::new::<T>(&facts, divide_by);
        let [result, long] =
            [shape, BlockWindow { two_digits: None, ..shape }].map(|shape| sum_in(shape, column));
        let both = [result, long].map(|number| (number.value().is_nan(), number.value().to_bits()));
        assert!(both[0] == both[1] || (both[0].0 && both[1].0), "{column:?}: {result:?} and {long:?}");
        result
    }

    fn sum_in<T: Float>(shape: BlockWindow, column: &[T]) -> T {
        let mut total = vec![0i64; shape.words(1)];
        for number in column {
            let mut words = vec![0; shape.words(1)];
            shape.expand(std::iter::once(*number), &mut words);
            total.iter_mut().zip(words).for_each(|(total, word)| *total += word);
        }
        let mut result = T::from_value(0.0);
        shape.round(&total, 1, |_, number| result = number);
        result
    }

    #[test]
    fn what_rounding_would_lose_is_kept() {
        assert_eq!(sum(&[1e38f32, 1.0, -1e38], 1), 1.0);
        assert_eq!(sum(&[1e300f64, 5e-324, -1e300], 1), 5e-324);
        assert_eq!(sum(&[f64::MAX, f64::MAX, -f64::MAX], 1), f64::MAX);
        assert_eq!(sum(&[f32::MAX, f32::MAX], 1), f32::INFINITY);
        assert_eq!(sum(&[f32::MAX, f32::MAX], 2), f32::MAX);
        assert_eq!(sum(&[f16::from_f32(2048.0), f16::ONE, f16::ONE], 1).to_f32(), 2050.0);
        assert_eq!(sum(&[F8E4M3::from_f32(448.0), F8E4M3::from_f32(16.0)], 1).to_f32(), 448.0);
        assert!(sum(&[F8E4M3::from_f32(448.0), F8E4M3::from_f32(18.0)], 1).is_nan());
        assert_eq!(sum(&[1.0f32, 0.0, 0.0], 3), 1.0 / 3.0);
    }

    /// The same, of ranks that contribute these parts of the column.
    fn sum_of_parts<T: Float>(parts: &[&[T]]) -> T {
        let one = |number: &T| std::iter::once(*number);
        let facts_of_part = |part: &&[T]| facts_of_sum(part.iter().map(|number| facts_of(one(number))));
        let larger = |a: [i32; FACTS], b: [i32; FACTS]| std::array::from_fn(|k| a[k].max(b[k]));
        let facts = parts.iter().map(facts_of_part).reduce(larger).expect("some");
        let shape = BlockWindow::new::<T>(&facts, 1);
        let results = [shape, BlockWindow { two_digits: None, ..shape }].map(|shape| {
            let mut total = vec![0i64; shape.words(1)];
            for part in parts {
                let mut words = vec![7; shape.words(1)];
                shape.expand_sum(part.iter().map(one), 1, &mut words);
                total.iter_mut().zip(words).for_each(|(total, word)| *total += word);
            }
            let mut result = T::from_value(0.0);
            shape.round(&total, 1, |_, number| result = number);
            result
        });
        let bits = results.map(|number| number.value().to_bits());
        assert!(bits[0] == bits[1] || results.iter().all(|number| number.value().is_nan()));
        results[0]
    }

    #[test]
    fn more_contributions_than_a_digit_has_room_for_are_added_without_an_overflow() {
        let many = vec![f64::MAX; 2 * ROWS_MAX + 5];
        let negative: Vec<f64> = many.iter().map(|number| -number).collect();
        assert_eq!(sum_of_parts(&[&many[..], &[5e-324][..], &negative[..]]), 5e-324);
        let many = vec![-1.5f32; 3 * ROWS_MAX];
        assert_eq!(sum_of_parts(&[&many[..], &many[..0], &[0.25][..]]), -4608.0 * 4.0 + 0.25);
        let special = [f32::INFINITY; 5000];
        assert_eq!(sum_of_parts(&[&special[..], &[1.0][..]]), f32::INFINITY);
        assert!(sum_of_parts(&[&special[..], &[f32::NEG_INFINITY][..]]).is_nan());
        assert!(sum_of_parts(&[&special[..], &[f32::NAN, 1.0][..]]).is_nan());
    }

    #[test]
    fn places_of_singles_are_those_of_their_parts() {
        let edges = [0u32, 1, 2, 3, 0x7f_ffff, 0x80_0000, 0x80_0001, 0x7f7f_ffff, 0x7f80_0000, 0x7f80_0001];
        let some = (0..1u32 << 16).map(|number| number.wrapping_mul(0x9e37_79b1));
        for bits in edges.into_iter().chain(some) {
            for number in [f32::from_bits(bits), -f32::from_bits(bits)] {
                assert_eq!(
                    facts_of([number].into_iter()),
                    facts_of([f64::from(number)].into_iter()),
                    "{bits:#x}"
                );
            }
        }
    }

    #[test]
    fn what_is_no_finite_number_behaves_as_ieee_says_and_a_zero_is_positive() {
        let (inf, nan) = (f32::INFINITY, f32::NAN);
        assert_eq!(sum(&[inf, 1.0, f32::MIN], 1), inf);
        assert_eq!(sum(&[-inf, 1.0, -inf], 1), -inf);
        assert!(
            sum(&[inf, -inf], 1).is_nan() && sum(&[nan, 1.0], 1).is_nan() && sum(&[nan, inf], 1).is_nan()
        );
        for zeros in [[0.0f32, 0.0], [-0.0, -0.0], [1.5, -1.5], [0.0, -0.0]] {
            assert_eq!(sum(&zeros, 1).to_bits(), 0);
        }
    }

    proptest! {
        #[test]
        fn sums_of_two_are_those_of_the_processor(a: f64, b: f64, c: f32, d: f32) {
            let zero = |sum: f64| if sum == 0.0 { 0.0 } else { sum };
            let same = |ours: f64, expected: f64| ours.to_bits() == zero(expected).to_bits()
                || (ours.is_nan() && expected.is_nan());
            prop_assert!(same(sum(&[a, b], 1), a + b));
            prop_assert!(same(sum(&[c, d], 1).into(), (c + d).into()));
        }

        #[test]
        fn a_sum_does_not_depend_on_who_contributes_what(
            column: Vec<f32>,
            wide: Vec<f64>,
            cuts in prop::collection::vec(0usize..40, 2),
        ) {
            fn expect_same<T: Float>(column: &[T], cuts: &[usize]) {
                let mut cuts = [cuts[0].min(column.len()), cuts[1].min(column.len())];
                cuts.sort_unstable();
                let whole = sum_of_parts(&[column]);
                let parts = sum_of_parts(&[&column[..cuts[0]], &column[cuts[0]..cuts[1]], &column[cuts[1]..]]);
                assert!(
                    whole.value().to_bits() == parts.value().to_bits()
                        || (whole.value().is_nan() && parts.value().is_nan()),
                    "{column:?} at {cuts:?}: {whole:?} and {parts:?}"
                );
                if !column.is_empty() {
                    let alone = sum(column, 1).value();
                    assert!(whole.value().to_bits() == alone.to_bits() || alone.is_nan());
                }
            }
            expect_same(&column, &cuts);
            expect_same(&wide, &cuts);
        }

        #[test]
        fn both_ways_give_the_same_for_numbers_that_lie_near_each_other(
            bits in prop::collection::vec((0u32..1 << 24, -60i32..60, any::<bool>()), 1..40),
            base in -150i32..104,
            divide_by in 1u32..4097,
        ) {
            let column: Vec<f32> = bits
                .iter()
                .map(|&(mantissa, shift, negative)| {
                    let magnitude = f64::from(mantissa) * 2f64.powi((base + shift).clamp(-149, 103));
                    (if negative { -magnitude } else { magnitude }) as f32
                })
                .collect();
            let half: Vec<_> = column.iter().map(|number| f16::from_f32(*number)).collect();
            let wide: Vec<_> = column.iter().map(|number| f64::from(*number) * 2f64.powi(-700)).collect();
            // The function asserts that the two ways agree.
            let (single, short, double) =
                (sum(&column, divide_by), sum(&half, divide_by), sum(&wide, divide_by));
            prop_assert!(!single.is_nan() && !double.is_nan() && (!short.is_nan() || half.iter().any(|number| !number.is_finite())));
        }

        #[test]
        fn sums_and_averages_agree_with_integers_wide_enough_and_do_not_depend_on_order(
            numbers in prop::collection::vec((-(1i64 << 52)..1 << 52, 0u32..40), 1..40),
            divide_by in 1u32..5000,
        ) {
            let mut column: Vec<f64> = numbers.iter().map(|&(n, shift)| n as f64 * 2f64.powi(shift as i32)).collect();
            let exact: i128 = numbers.iter().map(|&(n, shift)| i128::from(n) << shift).sum();
            let whole = sum(&column, 1);
            prop_assert_eq!(whole, exact as f64);
            let average = sum(&column, divide_by);
            // A correctly rounded result has no nearer neighbour. Errors are computed exactly, in
            // units of 2^-20 of the unit of the divisor.
            let error = |quotient: f64| {
                let scaled = (quotient * 2f64.powi(20)) as i128 * i128::from(divide_by);
                (scaled - (exact << 20)).abs()
            };
            if average.abs() > 2f64.powi(33) {
                prop_assert!(error(average) <= error(average.next_up()) && error(average) <= error(average.next_down()));
            }
            column.reverse();
            prop_assert_eq!(sum(&column, 1).to_bits(), whole.to_bits());
            prop_assert_eq!(sum(&column, divide_by).to_bits(), average.to_bits());
            column.push(0.0);
            prop_assert_eq!(sum(&column, 1).to_bits(), whole.to_bits());
        }
    }

    #[test]
    fn a_number_is_its_parts() {
        for value in [1.0, -1.5, 5e-324, f64::MAX, f64::MIN_POSITIVE, 0.1, -3.0e-310] {
            let Parts { negative, mantissa, exponent } = parts(value).expect("not zero");
            // The factor is applied in two halves, because the whole power of two may be out of
            // range.
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
        // 4096 times the largest number, minus a small number: all leading bits are one.
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
                // The bits of a quotient may be cut off at another place. Both results have all
                // bits that a mantissa can hold.
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

//! Decimal numbers that people write, as exact integers: GB/s as bytes a second, microseconds as
//! nanoseconds.
//!
//! Floating point cannot hold most decimal fractions, and above 2⁵³ it cannot hold all integers. So
//! numbers are read digit by digit. **Invariant:** [`scaled`] reads a text of [`written`] as the
//! same number.

/// Decimals of a bandwidth: 1 GB/s is 10⁹ bytes a second.
const GB_PER_S_DECIMALS: u32 = 9;

/// Decimals of a latency: 1 µs is 10³ ns.
#[cfg(feature = "files")]
pub(super) const US_DECIMALS: u32 = 3;

/// Largest power of ten in an exponent. The digits of a 64-bit number need no more.
const EXPONENT_MAX: i64 = 64;

/// Most characters of a number.
const CHARACTERS_MAX: usize = 64;

/// Why a number is refused.
#[derive(Clone, Copy, pleach_derive::ErrorDebug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NumberFault {
    /// Text, infinity, or not a number.
    #[error("is not a decimal number")]
    NotANumber,
    /// Less than zero.
    #[error("is negative")]
    Negative,
    /// Zero, or a number that is rounded to zero.
    #[error("is zero")]
    Zero,
    /// More than fits in 63 bits.
    #[error("is too large")]
    TooLarge,
}

/// Reads a decimal number of GB/s (10⁹ bytes a second) as bytes a second, rounded to an integer.
///
/// # Errors
///
/// The fault of the number.
pub fn bytes_per_s(gb_per_s: &str) -> Result<u64, NumberFault> {
    scaled_positive(gb_per_s, GB_PER_S_DECIMALS)
}

/// A bandwidth as the shortest decimal number of GB/s that [`bytes_per_s`] reads as the same.
#[must_use]
pub fn gb_per_s(bytes_per_s: u64) -> String {
    written(bytes_per_s, GB_PER_S_DECIMALS)
}

/// `text` times ten to the power of `decimals`, rounded to an integer (halves up).
///
/// Takes a sign, digits with `_` between them, a fraction and an exponent. Zero is a number here.
pub(super) fn scaled(text: &str, decimals: u32) -> Result<u64, NumberFault> {
    let not_a_number = NumberFault::NotANumber;
    let (negative, unsigned) = match text.as_bytes().first() {
        Some(b'-') => (true, &text[1..]),
        Some(b'+') => (false, &text[1..]),
        _ => (false, text),
    };
    if unsigned.len() > CHARACTERS_MAX {
        return Err(not_a_number);
    }
    let (mantissa, exponent) = match unsigned.split_once(['e', 'E']) {
        Some((mantissa, exponent)) => (mantissa, exponent.parse::<i64>().map_err(|_| not_a_number)?),
        None => (unsigned, 0),
    };
    let (whole, fraction) = match mantissa.split_once('.') {
        Some((whole, fraction)) if !fraction.is_empty() => (whole, fraction),
        Some(_) => return Err(not_a_number),
        None => (mantissa, ""),
    };
    let is_digits = |part: &str| part.bytes().all(|byte| byte.is_ascii_digit() || byte == b'_');
    if !(whole.starts_with(|first: char| first.is_ascii_digit()) && is_digits(whole) && is_digits(fraction)) {
        return Err(not_a_number);
    }
    let digits =
        |part: &str| part.bytes().filter(u8::is_ascii_digit).map(|byte| byte - b'0').collect::<Vec<_>>();
    let (whole, fraction) = (digits(whole), digits(fraction));
    let point = whole.len() as i64 + exponent.clamp(-EXPONENT_MAX, EXPONENT_MAX) + i64::from(decimals);
    let digits: Vec<u8> = whole.into_iter().chain(fraction).collect();
    let value = rounded(&digits, point)?;
    if negative && digits.iter().any(|&digit| digit != 0) { Err(NumberFault::Negative) } else { Ok(value) }
}

/// As [`scaled`], for a number that must be positive.
fn scaled_positive(text: &str, decimals: u32) -> Result<u64, NumberFault> {
    match scaled(text, decimals)? {
        0 => Err(NumberFault::Zero),
        value => Ok(value),
    }
}

/// The number that these digits write: `point` digits stand before the decimal point. Zeros follow
/// the last digit. The result is rounded.
fn rounded(digits: &[u8], point: i64) -> Result<u64, NumberFault> {
    let digit =
        |index: i64| usize::try_from(index).ok().and_then(|index| digits.get(index)).copied().unwrap_or(0);
    let mut value: u64 = 0;
    for index in 0..point.max(0) {
        let next = value.checked_mul(10).and_then(|value| value.checked_add(u64::from(digit(index))));
        value = next.ok_or(NumberFault::TooLarge)?;
    }
    let up = u64::from(point >= 0 && digit(point) >= 5);
    value.checked_add(up).filter(|&value| value <= 1 << 63).ok_or(NumberFault::TooLarge)
}

/// `value` divided by ten to the power of `decimals`, without needless zeros.
pub(super) fn written(value: u64, decimals: u32) -> String {
    let unit = 10_u64.pow(decimals);
    let (whole, fraction) = (value / unit, value % unit);
    if fraction == 0 {
        return whole.to_string();
    }
    let digits = format!("{fraction:0width$}", width = decimals as usize);
    format!("{whole}.{}", digits.trim_end_matches('0'))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn numbers_are_read_exactly_and_rounded_to_one() {
        let gb = |text| scaled(text, GB_PER_S_DECIMALS);
        assert_eq!(gb("25"), Ok(25_000_000_000));
        assert_eq!(gb("+1_2.5"), Ok(12_500_000_000));
        assert_eq!(gb("2.5e1"), gb("25"));
        assert_eq!(gb("9007199.254740993"), Ok(9_007_199_254_740_993));
        assert_eq!((gb("0.0000000004"), gb("0.0000000005")), (Ok(0), Ok(1)));
        assert_eq!(gb("1e-60"), Ok(0));
    }

    #[test]
    fn what_is_no_bandwidth_says_why() {
        let gb = |text| scaled_positive(text, GB_PER_S_DECIMALS);
        for text in ["", "-", "x", "1.", ".5", "nan", "inf", "0x10", "1e", "1 ", "_1", "1e1.5"] {
            assert_eq!(gb(text), Err(NumberFault::NotANumber), "{text}");
        }
        assert_eq!(
            (gb("0"), gb("-0.0"), gb("-1")),
            (Err(NumberFault::Zero), Err(NumberFault::Zero), Err(NumberFault::Negative))
        );
        assert_eq!((gb("1e11"), gb("1e999999")), (Err(NumberFault::TooLarge), Err(NumberFault::TooLarge)));
    }

    proptest! {
        #[test]
        fn what_is_written_is_read_as_the_same_number(value in 0_u64..=1 << 63, decimals in 0_u32..10) {
            prop_assert_eq!(scaled(&written(value, decimals), decimals), Ok(value));
        }

        #[test]
        fn no_text_panics(text in ".{0,40}", decimals in 0_u32..10) {
            let _ = scaled(&text, decimals);
        }
    }
}

//! The conversions of floats for exact sums. Every value of the six types is an `f64`, and a result
//! is rounded once.

use half::{bf16, f16};

use crate::compute::{F8E4M3, F8E5M2};

/// A type of float for which there are exact sums.
pub(crate) trait Float: bytemuck::Pod + std::fmt::Debug {
    /// Bits of a normal mantissa, the leading one included.
    const PRECISION: i32;
    /// The place of the lowest bit of the smallest number.
    const LOWEST: i32;

    fn value(self) -> f64;

    /// Converts a value that has no more bits than the type. The type determines the result for
    /// values that are too large.
    fn from_value(value: f64) -> Self;

    /// The number nearest to `integer` times two to the power of `place`, within the normal numbers
    /// of `f64`; ties go to even. The integer zero gives a positive zero.
    #[inline]
    fn of_integer(integer: i64, place: i32) -> Self {
        match integer {
            0 => Self::from_value(0.0),
            _ => nearest(integer < 0, integer.unsigned_abs(), place, false),
        }
    }
}

/// A type to which the processor converts integers, rounding once.
macro_rules! of_integer {
    ($float:ty) => {
        #[inline]
        fn of_integer(integer: i64, place: i32) -> Self {
            let number = (integer as Self) as f64 * power_of_two(place);
            // For a subnormal result, the conversion may have rounded at a lower place than that of
            // the last bit of subnormal numbers. This is right only if the integer has no bits
            // below that last bit.
            if place >= Self::LOWEST || number.abs() >= f64::from(Self::MIN_POSITIVE) || integer == 0 {
                number as Self
            } else {
                nearest(integer < 0, integer.unsigned_abs(), place, false)
            }
        }
    };
}

macro_rules! float {
    ($($float:ty, $precision:literal, $lowest:literal, $value:expr, $from:expr $(, $of_integer:ident)?;)*) => {
        $(
            impl Float for $float {
                const PRECISION: i32 = $precision;
                const LOWEST: i32 = $lowest;

                #[inline]
                fn value(self) -> f64 {
                    let value: fn(Self) -> f64 = $value;
                    value(self)
                }

                #[inline]
                fn from_value(value: f64) -> Self {
                    let from: fn(f64) -> Self = $from;
                    from(value)
                }

                $($of_integer!($float);)?
            }
        )*
    };
}

float!(
    f64, 53, -1074, |number| number, |value| value, of_integer;
    f32, 24, -149, f64::from, |value| value as f32, of_integer;
    f16, 11, -24, f16::to_f64, f16::from_f64;
    bf16, 8, -133, bf16::to_f64, bf16::from_f64;
    F8E4M3, 4, -9, |number| number.to_f32().into(), |value| F8E4M3::from_f32(value as f32);
    F8E5M2, 3, -16, |number| number.to_f32().into(), |value| F8E5M2::from_f32(value as f32);
);

/// The number nearest to `bits` times two to the power of `place`; ties go to even. With `more` the
/// exact value is a little larger. If `more` is set, `bits` has 64 bits.
pub(super) fn nearest<T: Float>(negative: bool, bits: u64, place: i32, more: bool) -> T {
    let length = (u64::BITS - bits.leading_zeros()) as i32;
    let lowest = (place + length - T::PRECISION).max(T::LOWEST);
    let dropped = lowest - place;
    let kept = if dropped <= 0 {
        // All bits fit, so nothing is rounded.
        scaled(bits, place)
    } else {
        let (whole, rest, half) = if dropped > 64 {
            (0, 0, 1)
        } else if dropped == 64 {
            (0, bits, 1 << 63)
        } else {
            (bits >> dropped, bits & ((1 << dropped) - 1), 1u64 << (dropped - 1))
        };
        let up = rest > half || (rest == half && (more || whole & 1 == 1));
        scaled(whole + u64::from(up), lowest)
    };
    T::from_value(if negative { -kept } else { kept })
}

/// `bits` times two to the power of `place`. The product must be an `f64`, or too large for an
/// `f64`.
fn scaled(bits: u64, place: i32) -> f64 {
    // The power of two may be out of range although the product is not. So it is applied in two
    // factors. After the first factor the product is a normal number.
    let first = place.clamp(-1000, 960);
    bits as f64 * power_of_two(first) * power_of_two((place - first).clamp(-1000, 1000))
}

/// Two to the power of `exponent`, which must be a normal number.
pub(super) fn power_of_two(exponent: i32) -> f64 {
    f64::from_bits(((exponent + 1023) as u64) << 52)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_every_type_come_back_as_they_are() {
        fn check<T: Float>(numbers: impl Iterator<Item = T>) {
            for number in numbers.filter(|number| number.value().is_finite()) {
                let value = number.value();
                let again = match super::super::parts(value) {
                    Some(parts) => nearest::<T>(parts.negative, parts.mantissa, parts.exponent, false),
                    None => continue,
                };
                assert_eq!(again.value().to_bits(), value.to_bits(), "{number:?}");
            }
        }
        check((0..=u8::MAX).map(F8E4M3::from_bits));
        check((0..=u8::MAX).map(F8E5M2::from_bits));
        check((0..=u16::MAX).map(f16::from_bits));
        check((0..=u16::MAX).map(bf16::from_bits));
        check((0..=u16::MAX).map(|high| f32::from_bits(u32::from(high) << 16 | u32::from(high))));
        check((0..=u16::MAX).map(|high| f64::from_bits(u64::from(high) << 48 | u64::from(high))));
    }

    #[test]
    fn rounding_is_to_nearest_with_ties_to_even_and_what_is_beyond_counts() {
        let round = |bits, place, more| nearest::<f16>(false, bits, place, more).to_f32();
        // 2049 lies between 2048 and 2050.
        assert_eq!(round(2049 << 52, -52, false), 2048.0);
        assert_eq!(round(2049 << 52, -52, true), 2050.0);
        assert_eq!(round(2051 << 52, -52, false), 2052.0);
        // Half of the smallest number is a tie with zero; less is zero, more is not.
        assert_eq!(round(1 << 63, -25 - 63, false), 0.0);
        assert_eq!(round(1 << 63, -25 - 63, true), 2f32.powi(-24));
        assert_eq!(round(u64::MAX, -26 - 63, true), 0.0);
        assert_eq!(round(3 << 62, -25 - 63, false), 2f32.powi(-24));
        assert_eq!(round(1 << 63, -1000, true), 0.0);
        // 65,520 is the first value that is too large.
        assert_eq!(round(65_519 << 48, -48, true), 65_504.0);
        assert_eq!(round(65_520 << 48, -48, false), f32::INFINITY);
        assert!(nearest::<F8E4M3>(true, 465, 0, false).is_nan());
        assert_eq!(nearest::<F8E4M3>(true, 464, 0, false).to_f32(), -448.0);
        assert_eq!(nearest::<f64>(false, u64::MAX, 960, true), f64::INFINITY);
        assert_eq!(nearest::<f64>(false, 3, -1075, false), 1e-323);
        assert_eq!(nearest::<f32>(true, 1, -149, false).to_bits(), 0x8000_0001);
    }
}

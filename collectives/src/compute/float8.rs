//! The 8-bit floats of the OCP specification (OFP8), as elements that callers hold.
//!
//! They serve to store and to move numbers. Arithmetic is done in `f32`, which holds every value of
//! both formats exactly. Conversion from `f32` rounds to nearest, ties to even. It does not
//! saturate (as in ml_dtypes and PyTorch, and unlike CUDA's own conversions), so an overflow stays
//! visible.

use std::cmp::Ordering;
use std::fmt;

use super::convert::{from_f8e4m3, from_f8e5m2, to_f8e4m3, to_f8e5m2};

macro_rules! float8 {
    ($(#[$doc:meta])* $name:ident, $from:ident, $to:ident, $max:literal, $min:literal) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Default)]
        #[repr(transparent)]
        pub struct $name(u8);

        // SAFETY: the type is one byte without padding, and every byte, zero included, is a value
        // of it.
        unsafe impl bytemuck::Zeroable for $name {}
        // SAFETY: as above.
        unsafe impl bytemuck::Pod for $name {}

        impl $name {
            /// The largest finite number.
            pub const MAX: Self = Self($max);
            /// The smallest number above zero.
            pub const MIN_POSITIVE_SUBNORMAL: Self = Self(1);
            /// The smallest normal number above zero.
            pub const MIN_POSITIVE: Self = Self($min);

            /// The number with these bits.
            #[must_use]
            pub const fn from_bits(bits: u8) -> Self {
                Self(bits)
            }

            /// The bits of the number.
            #[must_use]
            pub const fn to_bits(self) -> u8 {
                self.0
            }

            /// The nearest number. The type determines the result for values that are too large.
            #[must_use]
            pub fn from_f32(value: f32) -> Self {
                Self($to(value))
            }

            /// The exact value of the number.
            #[must_use]
            pub fn to_f32(self) -> f32 {
                $from(self.0)
            }

            /// Whether this is NaN.
            #[must_use]
            pub fn is_nan(self) -> bool {
                self.to_f32().is_nan()
            }
        }

        impl From<$name> for f32 {
            fn from(number: $name) -> Self {
                number.to_f32()
            }
        }

        /// Compares values, as floats do: zeros of both signs are equal, and NaN equals nothing.
        impl PartialEq for $name {
            fn eq(&self, other: &Self) -> bool {
                self.to_f32() == other.to_f32()
            }
        }

        impl PartialOrd for $name {
            fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
                self.to_f32().partial_cmp(&other.to_f32())
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Debug::fmt(&self.to_f32(), formatter)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Display::fmt(&self.to_f32(), formatter)
            }
        }
    };
}

float8!(
    /// OCP E4M3 (`float8_e4m3fn`): 4 bits of exponent, 3 of mantissa; The largest numbers are ±448,
    /// and steps near zero are 2^-9. It has no infinities; NaN is `0x7f` and `0xff`. Values that
    /// are too large become NaN.
    F8E4M3, from_f8e4m3, to_f8e4m3, 0x7e, 0x08
);
float8!(
    /// OCP E5M2 (`float8_e5m2`): 5 bits of exponent, 2 of mantissa; The largest numbers are
    /// ±57,344, and steps near zero are 2^-16. It has infinities and NaN as IEEE formats do. Values
    /// that are too large become infinite.
    F8E5M2, from_f8e5m2, to_f8e5m2, 0x7b, 0x04
);

#[cfg(test)]
mod tests {
    use super::*;

    /// A format as its specification describes it, in numbers and not in bits.
    struct Format {
        exponent_bits: u32,
        mantissa_bits: u32,
        bias: i32,
        has_infinity: bool,
    }

    const E4M3: Format = Format { exponent_bits: 4, mantissa_bits: 3, bias: 7, has_infinity: false };
    const E5M2: Format = Format { exponent_bits: 5, mantissa_bits: 2, bias: 15, has_infinity: true };

    impl Format {
        /// The value of a number: sign times 2^(exponent - bias) times 1.mantissa, and so on.
        fn value(&self, bits: u8) -> f64 {
            let sign = if bits >> 7 == 1 { -1.0 } else { 1.0 };
            let exponent = i32::from(bits >> self.mantissa_bits) & ((1 << self.exponent_bits) - 1);
            let mantissa = f64::from(bits & ((1 << self.mantissa_bits) - 1));
            let fraction = mantissa / f64::from(1 << self.mantissa_bits);
            let is_top = exponent == (1 << self.exponent_bits) - 1;
            let is_full = bits & 0x7f == 0x7f;
            match (is_top, self.has_infinity) {
                (true, true) if mantissa == 0.0 => sign * f64::INFINITY,
                (true, true) => f64::NAN,
                (true, false) if is_full => f64::NAN,
                _ if exponent == 0 => sign * fraction * 2f64.powi(1 - self.bias),
                _ => sign * (1.0 + fraction) * 2f64.powi(exponent - self.bias),
            }
        }

        /// The number nearest to a finite value, by trying all numbers; `None` if it would be above
        /// the largest number.
        fn nearest(&self, value: f64) -> Option<u8> {
            let magnitude = value.abs();
            let numbers: Vec<(u8, f64)> =
                (0..0x80).map(|bits| (bits, self.value(bits))).filter(|(_, v)| v.is_finite()).collect();
            let (largest, below) = (numbers[numbers.len() - 1], numbers[numbers.len() - 2]);
            let middle = largest.1 + (largest.1 - below.1) / 2.0;
            // The tie above the largest number goes to this number if its mantissa is even, and to
            // the next one otherwise.
            if magnitude > middle || (magnitude == middle && largest.0 & 1 == 1) {
                return None;
            }
            let distance = |v: f64| (v - magnitude).abs();
            let best = numbers.iter().map(|&(_, v)| distance(v)).fold(f64::INFINITY, f64::min);
            let mut ties = numbers.iter().filter(|&&(_, v)| distance(v) == best).map(|&(bits, _)| bits);
            let (one, other) = (ties.next()?, ties.next());
            let chosen = other.filter(|bits| bits & 1 == 0).unwrap_or(one);
            Some(chosen | if value.is_sign_negative() { 0x80 } else { 0 })
        }

        /// Every value where rounding could go wrong: all numbers, the middles between neighbours
        /// and the floats beside them, powers of two of all sizes, and the limits of f32.
        fn boundaries(&self) -> Vec<f32> {
            let mut values = vec![0.0, f32::MIN_POSITIVE, f32::from_bits(1), f32::MAX];
            for bits in 0..0x7f {
                let (one, next) = (self.value(bits), self.value(bits + 1));
                values.push(one as f32);
                if next.is_finite() {
                    values.push(((one + next) / 2.0) as f32);
                }
            }
            values.retain(|value| value.is_finite());
            values.extend([440f32, 456.0, 464.0, 480.0, 496.0, 53_248.0, 61_440.0, 65_536.0]);
            values.extend((-149..=127).map(|exponent| 2f64.powi(exponent) as f32));
            let beside = |value: &f32| [value.next_down(), *value, value.next_up()];
            let mut values: Vec<f32> = values.iter().flat_map(beside).filter(|v| v.is_finite()).collect();
            values.extend(values.clone().iter().map(|value| -value));
            values
        }
    }

    fn check(format: &Format, to_f32: fn(u8) -> f32, from_f32: fn(f32) -> u8) {
        for bits in 0..=u8::MAX {
            let (value, expected) = (f64::from(to_f32(bits)), format.value(bits));
            assert!(
                value.to_bits() == expected.to_bits() || (value.is_nan() && expected.is_nan()),
                "{bits:#04x}"
            );
            if !expected.is_nan() {
                assert_eq!(from_f32(to_f32(bits)), bits);
            }
        }
        assert!(to_f32(from_f32(f32::NAN)).is_nan() && to_f32(from_f32(-f32::NAN)).is_nan());
        assert!(to_f32(from_f32(f32::from_bits(0x7f80_0001))).is_nan());
        let beyond = |value: f32| {
            let got = to_f32(from_f32(value));
            if format.has_infinity { got == value.signum() * f32::INFINITY } else { got.is_nan() }
        };
        assert!(beyond(f32::INFINITY) && beyond(f32::NEG_INFINITY));
        let random = (0..=u16::MAX).map(|high| f32::from_bits(u32::from(high) << 16 | 0x5a5a));
        for value in format.boundaries().into_iter().chain(random.filter(|value| value.is_finite())) {
            match format.nearest(f64::from(value)) {
                Some(expected) => assert_eq!(from_f32(value), expected, "{value:e}"),
                None => assert!(beyond(value), "{value:e} is {:#04x}", from_f32(value)),
            }
        }
    }

    #[test]
    fn every_e4m3_has_the_value_the_specification_gives_it_and_every_f32_rounds_to_the_nearest() {
        check(&E4M3, from_f8e4m3, to_f8e4m3);
        assert_eq!((F8E4M3::MAX.to_f32(), F8E4M3::MIN_POSITIVE.to_f32()), (448.0, 2f32.powi(-6)));
        assert_eq!(F8E4M3::MIN_POSITIVE_SUBNORMAL.to_f32(), 2f32.powi(-9));
    }

    #[test]
    fn every_e5m2_has_the_value_the_specification_gives_it_and_every_f32_rounds_to_the_nearest() {
        check(&E5M2, from_f8e5m2, to_f8e5m2);
        assert_eq!((F8E5M2::MAX.to_f32(), F8E5M2::MIN_POSITIVE.to_f32()), (57_344.0, 2f32.powi(-14)));
        assert_eq!(F8E5M2::MIN_POSITIVE_SUBNORMAL.to_f32(), 2f32.powi(-16));
    }

    #[test]
    fn what_is_too_large_becomes_nan_or_infinite_and_is_never_the_largest_number() {
        assert_eq!(F8E4M3::from_f32(464.0), F8E4M3::MAX);
        assert!(F8E4M3::from_f32(464.01).is_nan());
        assert!(F8E5M2::from_f32(61_439.0) == F8E5M2::MAX && F8E5M2::from_f32(61_440.0) > F8E5M2::MAX);
    }

    #[test]
    fn they_compare_as_floats_do() {
        let number = |value: f32| F8E4M3::from_f32(value);
        assert!(number(0.0) == number(-0.0) && number(1.5) > number(-2.0));
        assert_ne!(number(f32::NAN), number(f32::NAN));
        assert_eq!(format!("{} {:?}", number(1.5), number(2.0)), "1.5 2.0");
    }
}

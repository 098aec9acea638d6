//! The reductions of single elements. The kernels do the same for many elements at a time.
//!
//! They are written without branches, so that loops over them become vector instructions.

use super::convert::{from_bf16, from_f8e4m3, from_f8e5m2, from_f16, to_bf16, to_f8e4m3, to_f8e5m2, to_f16};

/// A number that can be combined with another number. More than two [`ShortFloat`] numbers must not
/// be combined in their own type, because every step would round. They are widened to `f32` first.
pub(super) trait Number: Copy {
    fn sum(self, other: Self) -> Self;
    fn prod(self, other: Self) -> Self;
    fn min(self, other: Self) -> Self;
    fn max(self, other: Self) -> Self;
    /// Divides every element by `by`, which is at least 1. Integers are rounded towards zero.
    fn divide_all(values: &mut [Self], by: u32);
}

/// A way to combine two elements.
pub(super) trait Combine<E> {
    fn apply(left: E, right: E) -> E;
}

macro_rules! operation {
    ($name:ident, $method:ident) => {
        pub(super) struct $name;

        impl<E: Number> Combine<E> for $name {
            #[inline(always)]
            fn apply(left: E, right: E) -> E {
                left.$method(right)
            }
        }
    };
}

operation!(Sum, sum);
operation!(Prod, prod);
operation!(Min, min);
operation!(Max, max);

macro_rules! bitwise {
    ($name:ident, $operator:tt) => {
        /// The operation on bytes, which serves for every type.
        pub(super) struct $name;

        impl Combine<u8> for $name {
            #[inline(always)]
            fn apply(left: u8, right: u8) -> u8 {
                left $operator right
            }
        }
    };
}

bitwise!(And, &);
bitwise!(Or, |);
bitwise!(Xor, ^);

macro_rules! float {
    ($float:ty) => {
        impl Number for $float {
            #[inline(always)]
            fn sum(self, other: Self) -> Self {
                self + other
            }

            #[inline(always)]
            fn prod(self, other: Self) -> Self {
                self * other
            }

            // `a < b ? a : b` is the processor's own minimum. It gives its second operand if the
            // two are equal (as zeros of different signs are) or if one of them is NaN. So the
            // minimum is computed in both orders, and the bits of both results are united. This
            // keeps the sign of a negative zero, and a NaN stays a NaN with any further bits.
            #[inline(always)]
            fn min(self, other: Self) -> Self {
                let one = if self < other { self } else { other };
                let two = if other < self { other } else { self };
                Self::from_bits(one.to_bits() | two.to_bits())
            }

            // As above, with the intersection of the bits. It keeps a sign only if both results
            // have it. But it could make a number from a NaN. So NaN is restored, with all bits
            // set.
            #[inline(always)]
            fn max(self, other: Self) -> Self {
                let one = if self > other { self } else { other };
                let two = if other > self { other } else { self };
                let unordered = self.is_nan() | other.is_nan();
                let nan = if unordered { !0 } else { 0 };
                Self::from_bits((one.to_bits() & two.to_bits()) | nan)
            }

            #[inline(always)]
            fn divide_all(values: &mut [Self], by: u32) {
                let divisor = by as Self;
                if by.is_power_of_two() {
                    // The reciprocal is exact, so the product is rounded as the quotient would be,
                    // and takes less time.
                    let reciprocal = divisor.recip();
                    values.iter_mut().for_each(|value| *value *= reciprocal);
                } else {
                    values.iter_mut().for_each(|value| *value /= divisor);
                }
            }
        }
    };
}

float!(f32);
float!(f64);

macro_rules! integer {
    ($integer:ty, $divide:expr) => {
        impl Number for $integer {
            #[inline(always)]
            fn sum(self, other: Self) -> Self {
                self.wrapping_add(other)
            }

            #[inline(always)]
            fn prod(self, other: Self) -> Self {
                self.wrapping_mul(other)
            }

            #[inline(always)]
            fn min(self, other: Self) -> Self {
                Ord::min(self, other)
            }

            #[inline(always)]
            fn max(self, other: Self) -> Self {
                Ord::max(self, other)
            }

            #[inline(always)]
            fn divide_all(values: &mut [Self], by: u32) {
                assert!(by > 0, "division by zero is left out by the caller");
                let divide: fn(Self, u32) -> Self = $divide;
                values.iter_mut().for_each(|value| *value = divide(*value, by));
            }
        }
    };
}

// There are no vector instructions for integer division, so the quotient is computed as a float
// with enough digits. A quotient that is no integer differs from every integer by at least 1/by.
// Its error is much smaller, so truncating it is exact. The conversion back is the unchecked
// conversion, because the checked one is not vectorised.
integer!(i32, |value, by| {
    let quotient = f64::from(value) / f64::from(by);
    // SAFETY: `by` is at least 1, so the quotient is no larger than `value`.
    unsafe { quotient.to_int_unchecked() }
});
integer!(u32, |value, by| {
    let quotient = f64::from(value) / f64::from(by);
    // SAFETY: as above.
    unsafe { quotient.to_int_unchecked() }
});
integer!(u16, |value, by| {
    let quotient = f32::from(value) / by as f32;
    // SAFETY: as above.
    unsafe { quotient.to_int_unchecked() }
});
integer!(i16, |value, by| {
    let quotient = f32::from(value) / by as f32;
    // SAFETY: as above; -32768 divided by 1 fits too.
    unsafe { quotient.to_int_unchecked() }
});
integer!(u8, |value, by| {
    let quotient = f32::from(value) / by as f32;
    // SAFETY: as above.
    unsafe { quotient.to_int_unchecked() }
});
integer!(i8, |value, by| {
    let quotient = f32::from(value) / by as f32;
    // SAFETY: as above; -128 divided by 1 fits too.
    unsafe { quotient.to_int_unchecked() }
});
integer!(i64, |value, by| value / i64::from(by));
integer!(u64, |value, by| value / u64::from(by));

/// A float that is narrower than `f32`, stored as its bits.
pub(super) trait ShortFloat: Number {
    fn widen(self) -> f32;
    fn narrow(value: f32) -> Self;
}

macro_rules! short_float {
    (
        $(#[$doc:meta])*
        $float:ident($bits:ty as $signed:ty), $from:ident, $to:ident, largest $largest:literal, nan $nan:literal
    ) => {
        $(#[$doc])*
        #[derive(Clone, Copy)]
        #[repr(transparent)]
        pub(super) struct $float($bits);

        impl $float {
            const SIGN: $bits = 1 << (<$bits>::BITS - 1);

            /// An integer with the same order as the numbers. For negative numbers all bits but the
            /// sign are inverted.
            #[inline(always)]
            fn to_ordered(self) -> $signed {
                let bits = self.0 as $signed;
                bits ^ ((bits >> (<$bits>::BITS - 1)) & !(Self::SIGN as $signed))
            }

            #[inline(always)]
            fn from_ordered(ordered: $signed) -> Self {
                // The original bits.
                Self(Self(ordered as $bits).to_ordered() as $bits)
            }

            #[inline(always)]
            fn is_nan(self) -> bool {
                self.0 & !Self::SIGN > $largest
            }
        }

        impl ShortFloat for $float {
            #[inline(always)]
            fn widen(self) -> f32 {
                $from(self.0)
            }

            #[inline(always)]
            fn narrow(value: f32) -> Self {
                Self($to(value))
            }
        }

        impl Number for $float {
            #[inline(always)]
            fn sum(self, other: Self) -> Self {
                Self::narrow(self.widen().sum(other.widen()))
            }

            #[inline(always)]
            fn prod(self, other: Self) -> Self {
                Self::narrow(self.widen().prod(other.widen()))
            }

            // The result is one of the two operands, so nothing has to be widened.
            #[inline(always)]
            fn min(self, other: Self) -> Self {
                let least = Self::from_ordered(Ord::min(self.to_ordered(), other.to_ordered()));
                let nan = ((self.0 | other.0) & Self::SIGN) | $nan;
                Self(if self.is_nan() | other.is_nan() { nan } else { least.0 })
            }

            #[inline(always)]
            fn max(self, other: Self) -> Self {
                let greatest = Self::from_ordered(Ord::max(self.to_ordered(), other.to_ordered()));
                Self(if self.is_nan() | other.is_nan() { Self::SIGN | $nan } else { greatest.0 })
            }

            #[inline(always)]
            fn divide_all(values: &mut [Self], by: u32) {
                values.iter_mut().for_each(|value| *value = Self::narrow(value.widen() / by as f32));
            }
        }
    };
}

short_float!(
    /// The bits of a binary16.
    F16(u16 as i16), from_f16, to_f16, largest 0x7c00, nan 0x7e00
);
short_float!(
    /// The bits of a bfloat16.
    Bf16(u16 as i16), from_bf16, to_bf16, largest 0x7f80, nan 0x7fc0
);
short_float!(
    /// The bits of an [`F8E4M3`](super::F8E4M3).
    E4M3(u8 as i8), from_f8e4m3, to_f8e4m3, largest 0x7e, nan 0x7f
);
short_float!(
    /// The bits of an [`F8E5M2`](super::F8E5M2).
    E5M2(u8 as i8), from_f8e5m2, to_f8e5m2, largest 0x7c, nan 0x7e
);

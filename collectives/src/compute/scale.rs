//! Products of elements and a factor, for premultiplied sums.

use half::{bf16, f16};

use super::convert::{from_bf16, from_f8e4m3, from_f8e5m2, from_f16, to_bf16, to_f8e4m3, to_f8e5m2, to_f16};
use super::{F8E4M3, F8E5M2};

/// A type of element that can be multiplied by a factor.
pub(crate) trait Scale: Copy {
    /// The type of the factor: `f32` for floats of fewer bits, otherwise the type itself.
    type Factor: Copy + Send + Sync + std::fmt::Debug;

    /// The product, rounded once to nearest even; integers wrap.
    #[must_use]
    fn scaled(self, factor: Self::Factor) -> Self;
}

macro_rules! scale {
    ($($float:ty),*; $($integer:ty),*; $($short:ty: $from:ident $to:ident),*) => {
        $(
            impl Scale for $float {
                type Factor = Self;
                #[inline(always)]
                fn scaled(self, factor: Self) -> Self {
                    self * factor
                }
            }
        )*
        $(
            impl Scale for $integer {
                type Factor = Self;
                #[inline(always)]
                fn scaled(self, factor: Self) -> Self {
                    self.wrapping_mul(factor)
                }
            }
        )*
        $(
            impl Scale for $short {
                type Factor = f32;
                #[inline(always)]
                fn scaled(self, factor: f32) -> Self {
                    Self::from_bits($to($from(self.to_bits()) * factor))
                }
            }
        )*
    };
}

scale!(
    f32, f64;
    i8, i16, i32, i64, u8, u16, u32, u64;
    f16: from_f16 to_f16, bf16: from_bf16 to_bf16, F8E4M3: from_f8e4m3 to_f8e4m3, F8E5M2: from_f8e5m2 to_f8e5m2
);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn products_are_rounded_once_and_integers_wrap() {
        assert_eq!(f16::from_f32(65_504.0).scaled(0.5), f16::from_f32(32_752.0));
        assert_eq!(bf16::from_f32(3.0).scaled(1.0 / 3.0), bf16::from_f32(1.0));
        assert!(F8E4M3::from_f32(448.0).scaled(2.0).is_nan());
        assert_eq!(F8E5M2::from_f32(57_344.0).scaled(2.0).to_f32(), f32::INFINITY);
        assert_eq!((200u8.scaled(2), (-100i8).scaled(2), 3i64.scaled(-5)), (144, 56, -15));
        assert_eq!(1.5f64.scaled(-2.0).to_bits(), (-3.0f64).to_bits());
        assert_eq!(f32::MIN_POSITIVE.scaled(0.5), f32::MIN_POSITIVE / 2.0);
    }
}

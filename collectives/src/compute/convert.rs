//! Floats of 16 and 8 bits to `f32` and back, many at a time. Rounding is to nearest even; a NaN
//! stays a NaN.
//!
//! The scalar forms are without branches, so that plain loops over them become vector instructions.
//! The processor's own bf16 conversion (AVX512_BF16) is not used, because it treats subnormal
//! numbers as zeros.

/// Value of a bfloat16.
#[inline(always)]
pub(super) fn from_bf16(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

/// Nearest bfloat16.
#[inline(always)]
pub(super) fn to_bf16(value: f32) -> u16 {
    let bits = value.to_bits();
    // Adds just under half of the last kept place, and one more if this place is odd. So ties go to
    // even.
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
    // Rounding a NaN could make it infinite; set its quiet bit instead.
    let quiet = (bits >> 16) | 0x0040;
    (if value.is_nan() { quiet } else { rounded }) as u16
}

const F16_EXPONENT_AND_MANTISSA: u32 = 0x7fff;
const F16_INFINITY: u32 = 0x7c00;
/// The difference of the exponents' biases, as a factor.
const F16_TO_F32_SCALE: f32 = f32::from_bits((127 + 112) << 23);
const F32_INFINITY_BITS: u32 = 0xff << 23;

/// Value of a binary16.
#[inline(always)]
pub(super) fn from_f16(bits: u16) -> f32 {
    let bits = u32::from(bits);
    let sign = (bits & 0x8000) << 16;
    let magnitude = bits & F16_EXPONENT_AND_MANTISSA;
    // The product is exact and makes subnormal numbers normal.
    let finite = (f32::from_bits(magnitude << 13) * F16_TO_F32_SCALE).to_bits();
    let special = (magnitude << 13) | F32_INFINITY_BITS;
    f32::from_bits(sign | if magnitude >= F16_INFINITY { special } else { finite })
}

/// Nearest binary16.
#[inline(always)]
pub(super) fn to_f16(value: f32) -> u16 {
    /// 65,536: this value and all larger ones become infinite.
    const OVERFLOW: u32 = (127 + 16) << 23;
    /// 2^-14: all smaller values are subnormal.
    const SMALLEST_NORMAL: u32 = (127 - 14) << 23;
    /// A float whose last place is that of a subnormal binary16: adding it rounds to a subnormal
    /// binary16.
    const SUBNORMAL_MAGIC: u32 = (127 - 15 + 23 - 10 + 1) << 23;

    let bits = value.to_bits();
    let sign = (bits >> 16) & 0x8000;
    let magnitude = bits & 0x7fff_ffff;
    let odd = (magnitude >> 13) & 1;
    let normal = magnitude.wrapping_sub((127 - 15) << 23).wrapping_add(0x0fff + odd) >> 13;
    let subnormal = (f32::from_bits(magnitude) + f32::from_bits(SUBNORMAL_MAGIC)).to_bits();
    let subnormal = subnormal.wrapping_sub(SUBNORMAL_MAGIC);
    let finite = if magnitude < SMALLEST_NORMAL { subnormal } else { normal };
    let special = if magnitude > F32_INFINITY_BITS { F16_INFINITY | 0x0200 } else { F16_INFINITY };
    (sign | if magnitude >= OVERFLOW { special } else { finite }) as u16
}

/// Value of a finite 8-bit float without its sign, from its bits. `BIAS` and `MANTISSA` describe
/// its format. A subnormal number is computed as a small integer times a power of two. Multiplying
/// subnormal `f32` instead would take the processor a hundred times as long.
#[inline(always)]
fn from_finite_f8<const BIAS: u32, const MANTISSA: u32>(magnitude: u32) -> f32 {
    let smallest = f32::from_bits((127 + 1 - BIAS - MANTISSA) << 23);
    let subnormal = (magnitude as i32) as f32 * smallest;
    let normal = (magnitude << (23 - MANTISSA)) + ((127 - BIAS) << 23);
    f32::from_bits(if magnitude < 1 << MANTISSA { subnormal.to_bits() } else { normal })
}

/// Bits, without the sign, of the 8-bit float nearest to a value below the overflow. `magnitude`
/// has the bits of the value without its sign.
#[inline(always)]
fn to_finite_f8<const BIAS: u32, const MANTISSA: u32>(magnitude: u32) -> u32 {
    let shift = 23 - MANTISSA;
    // A float whose last place is that of a subnormal number: adding it rounds to a subnormal
    // number.
    let magic = (127 - BIAS + shift + 1) << 23;
    let odd = (magnitude >> shift) & 1;
    let normal =
        magnitude.wrapping_sub((127 - BIAS) << 23).wrapping_add((1 << (shift - 1)) - 1 + odd) >> shift;
    let subnormal = (f32::from_bits(magnitude) + f32::from_bits(magic)).to_bits().wrapping_sub(magic);
    let smallest_normal = (127 + 1 - BIAS) << 23;
    if magnitude < smallest_normal { subnormal } else { normal }
}

/// Value of an OCP E4M3: no infinities, NaN is `0x7f` and `0xff`.
#[inline(always)]
pub(super) fn from_f8e4m3(bits: u8) -> f32 {
    const NAN: u32 = 0x7f;
    let (sign, magnitude) = (u32::from(bits & 0x80) << 24, u32::from(bits & 0x7f));
    let finite = from_finite_f8::<7, 3>(magnitude).to_bits();
    f32::from_bits(sign | if magnitude == NAN { 0x7fc0_0000 } else { finite })
}

/// Nearest OCP E4M3; values that would round to more than 448 become NaN.
#[inline(always)]
pub(super) fn to_f8e4m3(value: f32) -> u8 {
    const NAN: u32 = 0x7f;
    /// 464, the middle between the largest number, 448, and the number that would follow. The tie
    /// goes to 448, which is even.
    const OVERFLOW_ABOVE: u32 = 464f32.to_bits();
    let bits = value.to_bits();
    let (sign, magnitude) = ((bits >> 24) & 0x80, bits & 0x7fff_ffff);
    let finite = to_finite_f8::<7, 3>(magnitude);
    (sign | if magnitude > OVERFLOW_ABOVE { NAN } else { finite }) as u8
}

/// Value of an E5M2: the upper half of a binary16.
#[inline(always)]
pub(super) fn from_f8e5m2(bits: u8) -> f32 {
    const INFINITY: u32 = 0x7c;
    let (sign, magnitude) = (u32::from(bits & 0x80) << 24, u32::from(bits & 0x7f));
    let finite = from_finite_f8::<15, 2>(magnitude).to_bits();
    let special = F32_INFINITY_BITS | (magnitude << 21);
    f32::from_bits(sign | if magnitude >= INFINITY { special } else { finite })
}

/// Nearest E5M2; values that would round to more than 57,344 become infinite.
#[inline(always)]
pub(super) fn to_f8e5m2(value: f32) -> u8 {
    const INFINITY: u32 = 0x7c;
    /// The middle between the largest number and the number that would follow. The tie goes to
    /// infinity, which is even.
    const OVERFLOW: u32 = 61_440f32.to_bits();
    let bits = value.to_bits();
    let (sign, magnitude) = ((bits >> 24) & 0x80, bits & 0x7fff_ffff);
    let finite = to_finite_f8::<15, 2>(magnitude);
    let special = if magnitude > F32_INFINITY_BITS { INFINITY | 2 } else { INFINITY };
    (sign | if magnitude >= OVERFLOW { special } else { finite }) as u8
}

#[cfg(test)]
mod tests {
    use half::{bf16, f16};
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn every_16_bit_float_widens_to_its_value_and_narrows_back() {
        for bits in 0..=u16::MAX {
            let (wide, expected) = (from_f16(bits), f16::from_bits(bits).to_f32());
            assert!(
                wide.to_bits() == expected.to_bits() || (wide.is_nan() && expected.is_nan()),
                "{bits:#06x}"
            );
            let (brain, brain_expected) = (from_bf16(bits), bf16::from_bits(bits).to_f32());
            assert!(
                brain.to_bits() == brain_expected.to_bits() || (brain.is_nan() && brain_expected.is_nan())
            );
            if !wide.is_nan() {
                assert_eq!(to_f16(wide), bits);
            }
            if !brain.is_nan() {
                assert_eq!(to_bf16(brain), bits);
            }
        }
    }

    fn check(value: f32) {
        let (ours, expected) = (to_f16(value), f16::from_f32(value));
        assert!(
            ours == expected.to_bits() || (f16::from_bits(ours).is_nan() && expected.is_nan()),
            "{value:e}: {ours:#06x}"
        );
        let (ours, expected) = (to_bf16(value), bf16::from_f32(value));
        assert!(
            ours == expected.to_bits() || (bf16::from_bits(ours).is_nan() && expected.is_nan()),
            "{value:e}: {ours:#06x}"
        );
    }

    #[test]
    fn narrowing_rounds_to_even_at_every_tie_and_beside_it() {
        for bits in 0..=u16::MAX {
            for base in [from_f16(bits).to_bits(), from_bf16(bits).to_bits()] {
                for half in [1 << 11, 1 << 12, 1 << 13, 1 << 14, 1 << 15] {
                    for nudge in [-1, 0, 1] {
                        check(f32::from_bits(base.wrapping_add(half).wrapping_add_signed(nudge)));
                    }
                }
            }
        }
    }

    proptest! {
        #[test]
        fn narrowing_agrees_with_the_half_crate_on_any_bits(bits: u32) {
            check(f32::from_bits(bits));
        }
    }
}

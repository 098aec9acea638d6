//! The steps of vectors of 32 bytes.

use std::arch::x86_64 as x86;

use super::{BEYOND_ALL, Format};

const NEAREST: i32 = x86::_MM_FROUND_TO_NEAREST_INT;

/// Makes binary16 of bytes in the upper halves of 16-bit lanes.
#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn scaled<F: Format>(lanes: x86::__m256i) -> x86::__m256i {
    if !F::IS_E4M3 {
        return lanes;
    }
    // The shift also copies the sign down; the mask clears the copy and keeps the sign.
    x86::_mm256_and_si256(x86::_mm256_srai_epi16::<1>(lanes), x86::_mm256_set1_epi16(0xbf80_u16 as i16))
}

#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn lower<F: Format>(bytes: x86::__m256i) -> x86::__m256i {
    scaled::<F>(x86::_mm256_unpacklo_epi8(x86::_mm256_setzero_si256(), bytes))
}

#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn upper<F: Format>(bytes: x86::__m256i) -> x86::__m256i {
    scaled::<F>(x86::_mm256_unpackhi_epi8(x86::_mm256_setzero_si256(), bytes))
}

#[inline]
#[target_feature(enable = "avx2,f16c")]
pub(super) fn floats(halves: x86::__m256i) -> (x86::__m256, x86::__m256) {
    let upper = x86::_mm256_extracti128_si256::<1>(halves);
    (x86::_mm256_cvtph_ps(x86::_mm256_castsi256_si128(halves)), x86::_mm256_cvtph_ps(upper))
}

#[inline]
#[target_feature(enable = "avx2,f16c")]
pub(super) fn halves(lower: x86::__m256, upper: x86::__m256) -> x86::__m256i {
    let (lower, upper) = (x86::_mm256_cvtps_ph::<NEAREST>(lower), x86::_mm256_cvtps_ph::<NEAREST>(upper));
    x86::_mm256_inserti128_si256::<1>(x86::_mm256_castsi128_si256(lower), upper)
}

/// Removes the bits that the format does not have, and rounds to nearest if `ROUND` is set. E4M3
/// loses its sign.
#[inline]
#[target_feature(enable = "avx2")]
fn shortened<F: Format, const ROUND: bool>(halves: x86::__m256i) -> x86::__m256i {
    let count = x86::_mm_cvtsi32_si128(F::DROPPED as i32);
    let magnitudes =
        if F::IS_E4M3 { x86::_mm256_and_si256(halves, x86::_mm256_set1_epi16(0x7fff)) } else { halves };
    if !ROUND {
        return x86::_mm256_srl_epi16(magnitudes, count);
    }
    let odd = x86::_mm256_and_si256(x86::_mm256_srl_epi16(halves, count), x86::_mm256_set1_epi16(1));
    let sum = x86::_mm256_add_epi16(magnitudes, x86::_mm256_set1_epi16(F::HALF));
    x86::_mm256_srl_epi16(x86::_mm256_add_epi16(sum, odd), count)
}

#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn bytes<F: Format, const ROUND: bool>(lower: x86::__m256i, upper: x86::__m256i) -> x86::__m256i {
    let (one, two) = (shortened::<F, ROUND>(lower), shortened::<F, ROUND>(upper));
    if F::IS_E4M3 {
        // Saturation makes NaN of all values that are too large, and keeps the signs.
        let magnitudes = x86::_mm256_packs_epi16(one, two);
        let signs = x86::_mm256_packs_epi16(lower, upper);
        x86::_mm256_or_si256(magnitudes, x86::_mm256_and_si256(signs, x86::_mm256_set1_epi8(-0x80)))
    } else {
        quiet(x86::_mm256_packus_epi16(one, two))
    }
}

/// Replaces every NaN of E5M2 by the NaN that conversions write.
#[inline]
#[target_feature(enable = "avx2")]
fn quiet(bytes: x86::__m256i) -> x86::__m256i {
    let full = x86::_mm256_cmpeq_epi8(
        x86::_mm256_or_si256(bytes, x86::_mm256_set1_epi8(-0x80)),
        x86::_mm256_set1_epi8(-1),
    );
    // Adds -1.
    x86::_mm256_add_epi8(bytes, full)
}

/// The values of 16 numbers.
#[inline]
#[target_feature(enable = "avx2,f16c")]
pub(super) fn widened<F: Format>(bytes: x86::__m128i) -> [x86::__m256; 2] {
    let halves = scaled::<F>(x86::_mm256_slli_epi16::<8>(x86::_mm256_cvtepu8_epi16(bytes)));
    if !F::IS_E4M3 {
        return floats(halves).into();
    }
    let magnitudes = x86::_mm256_and_si256(halves, x86::_mm256_set1_epi16(0x7fff));
    let full = x86::_mm256_cmpeq_epi16(magnitudes, x86::_mm256_set1_epi16(0x7f << 7));
    let nan = x86::_mm256_and_si256(full, x86::_mm256_set1_epi16(0x7e00));
    let (lower, upper) = floats(x86::_mm256_or_si256(halves, nan));
    let scale = x86::_mm256_set1_ps(1.0 / F::SCALE);
    [x86::_mm256_mul_ps(lower, scale), x86::_mm256_mul_ps(upper, scale)]
}

/// Rounds values to the digits of the format, and scales them.
#[inline]
#[target_feature(enable = "avx2")]
fn exact<F: Format>(values: x86::__m256) -> x86::__m256 {
    let power = x86::_mm256_and_ps(values, x86::_mm256_set1_ps(f32::INFINITY));
    let power = x86::_mm256_max_ps(power, x86::_mm256_set1_ps(F::SMALLEST_NORMAL));
    let power = x86::_mm256_min_ps(power, x86::_mm256_set1_ps(BEYOND_ALL));
    let large = x86::_mm256_mul_ps(power, x86::_mm256_set1_ps(F::TO_LARGE));
    let rounded = x86::_mm256_sub_ps(x86::_mm256_add_ps(values, large), large);
    // A negative value that became zero has lost its sign.
    let sign = x86::_mm256_and_ps(values, x86::_mm256_set1_ps(-0.0));
    let rounded = x86::_mm256_or_ps(rounded, sign);
    if F::SCALE == 1.0 { rounded } else { x86::_mm256_mul_ps(rounded, x86::_mm256_set1_ps(F::SCALE)) }
}

/// The numbers nearest to these 32 values.
#[inline]
#[target_feature(enable = "avx2,f16c")]
pub(super) fn narrowed<F: Format>(values: [x86::__m256; 4]) -> x86::__m256i {
    let [a, b, c, d] = values;
    let (lower, upper) = (halves(exact::<F>(a), exact::<F>(b)), halves(exact::<F>(c), exact::<F>(d)));
    // Restores the order, because the packing works on halves of 128 bits.
    x86::_mm256_permute4x64_epi64::<0b11_01_10_00>(bytes::<F, false>(lower, upper))
}

/// Sets NaN where one of the operands is NaN. For E4M3.
#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn or_nan(bytes: x86::__m256i, a: x86::__m256i, b: x86::__m256i) -> x86::__m256i {
    let nan = x86::_mm256_set1_epi8(0x7f);
    let bytes = x86::_mm256_blendv_epi8(bytes, b, x86::_mm256_cmpeq_epi8(x86::_mm256_and_si256(b, nan), nan));
    x86::_mm256_blendv_epi8(bytes, a, x86::_mm256_cmpeq_epi8(x86::_mm256_and_si256(a, nan), nan))
}

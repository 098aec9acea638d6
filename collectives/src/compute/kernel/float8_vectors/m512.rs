//! The steps of vectors of 64 bytes; see [`m256`](super::m256).

use std::arch::asm;
use std::arch::x86_64 as x86;

use super::{BEYOND_ALL, Format};

const NEAREST: i32 = x86::_MM_FROUND_TO_NEAREST_INT;
/// `a | (b & c)`.
const OR_AND: i32 = 0xf8;

#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
pub(super) fn scaled<F: Format>(lanes: x86::__m512i) -> x86::__m512i {
    if !F::IS_E4M3 {
        return lanes;
    }
    x86::_mm512_and_si512(x86::_mm512_srai_epi16::<1>(lanes), x86::_mm512_set1_epi16(0xbf80_u16 as i16))
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
pub(super) fn lower<F: Format>(bytes: x86::__m512i) -> x86::__m512i {
    scaled::<F>(x86::_mm512_unpacklo_epi8(x86::_mm512_setzero_si512(), bytes))
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
pub(super) fn upper<F: Format>(bytes: x86::__m512i) -> x86::__m512i {
    scaled::<F>(x86::_mm512_unpackhi_epi8(x86::_mm512_setzero_si512(), bytes))
}

#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn floats(halves: x86::__m512i) -> (x86::__m512, x86::__m512) {
    let upper = x86::_mm512_extracti64x4_epi64::<1>(halves);
    (x86::_mm512_cvtph_ps(x86::_mm512_castsi512_si256(halves)), x86::_mm512_cvtph_ps(upper))
}

#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn halves(lower: x86::__m512, upper: x86::__m512) -> x86::__m512i {
    let (lower, upper) = (x86::_mm512_cvtps_ph::<NEAREST>(lower), x86::_mm512_cvtps_ph::<NEAREST>(upper));
    x86::_mm512_inserti64x4::<1>(x86::_mm512_castsi256_si512(lower), upper)
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn shortened<F: Format, const ROUND: bool>(halves: x86::__m512i) -> x86::__m512i {
    let count = x86::_mm_cvtsi32_si128(F::DROPPED as i32);
    let magnitudes =
        if F::IS_E4M3 { x86::_mm512_and_si512(halves, x86::_mm512_set1_epi16(0x7fff)) } else { halves };
    if !ROUND {
        return x86::_mm512_srl_epi16(magnitudes, count);
    }
    let odd = x86::_mm512_and_si512(x86::_mm512_srl_epi16(halves, count), x86::_mm512_set1_epi16(1));
    let sum = x86::_mm512_add_epi16(magnitudes, x86::_mm512_set1_epi16(F::HALF));
    x86::_mm512_srl_epi16(x86::_mm512_add_epi16(sum, odd), count)
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
pub(super) fn bytes<F: Format, const ROUND: bool>(lower: x86::__m512i, upper: x86::__m512i) -> x86::__m512i {
    let (one, two) = (shortened::<F, ROUND>(lower), shortened::<F, ROUND>(upper));
    if F::IS_E4M3 {
        let magnitudes = x86::_mm512_packs_epi16(one, two);
        let signs = x86::_mm512_packs_epi16(lower, upper);
        x86::_mm512_ternarylogic_epi32::<OR_AND>(magnitudes, signs, x86::_mm512_set1_epi8(-0x80))
    } else {
        quiet(x86::_mm512_packus_epi16(one, two))
    }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn quiet(bytes: x86::__m512i) -> x86::__m512i {
    let signed = x86::_mm512_or_si512(bytes, x86::_mm512_set1_epi8(-0x80));
    let full = x86::_mm512_cmpeq_epi8_mask(signed, x86::_mm512_set1_epi8(-1));
    x86::_mm512_mask_add_epi8(bytes, full, bytes, x86::_mm512_set1_epi8(-1))
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
pub(super) fn widened<F: Format>(bytes: x86::__m256i) -> [x86::__m512; 2] {
    let halves = scaled::<F>(x86::_mm512_slli_epi16::<8>(x86::_mm512_cvtepu8_epi16(bytes)));
    if !F::IS_E4M3 {
        return floats(halves).into();
    }
    let magnitudes = x86::_mm512_and_si512(halves, x86::_mm512_set1_epi16(0x7fff));
    let full = x86::_mm512_cmpeq_epi16_mask(magnitudes, x86::_mm512_set1_epi16(0x7f << 7));
    let nan = x86::_mm512_maskz_set1_epi16(full, 0x7e00);
    let (lower, upper) = floats(x86::_mm512_or_si512(halves, nan));
    let scale = x86::_mm512_set1_ps(1.0 / F::SCALE);
    [x86::_mm512_mul_ps(lower, scale), x86::_mm512_mul_ps(upper, scale)]
}

#[inline]
#[target_feature(enable = "avx512f,avx512dq")]
fn exact<F: Format>(values: x86::__m512) -> x86::__m512 {
    let bits = x86::_mm512_castps_si512(values);
    let power = x86::_mm512_and_ps(values, x86::_mm512_set1_ps(f32::INFINITY));
    let power = x86::_mm512_max_ps(power, x86::_mm512_set1_ps(F::SMALLEST_NORMAL));
    let power = x86::_mm512_min_ps(power, x86::_mm512_set1_ps(BEYOND_ALL));
    let large = x86::_mm512_mul_ps(power, x86::_mm512_set1_ps(F::TO_LARGE));
    let rounded = x86::_mm512_castps_si512(x86::_mm512_sub_ps(x86::_mm512_add_ps(values, large), large));
    let sign = x86::_mm512_set1_epi32(i32::MIN);
    let rounded = x86::_mm512_castsi512_ps(x86::_mm512_ternarylogic_epi32::<OR_AND>(rounded, bits, sign));
    if F::SCALE == 1.0 { rounded } else { x86::_mm512_mul_ps(rounded, x86::_mm512_set1_ps(F::SCALE)) }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq")]
pub(super) fn narrowed<F: Format>(values: [x86::__m512; 4]) -> x86::__m512i {
    let [a, b, c, d] = values;
    let (lower, upper) = (halves(exact::<F>(a), exact::<F>(b)), halves(exact::<F>(c), exact::<F>(d)));
    let order = x86::_mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
    x86::_mm512_permutexvar_epi64(order, bytes::<F, false>(lower, upper))
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
pub(super) fn or_nan(bytes: x86::__m512i, a: x86::__m512i, b: x86::__m512i) -> x86::__m512i {
    let nan = x86::_mm512_set1_epi8(0x7f);
    let is_nan = |bytes| x86::_mm512_cmpeq_epi8_mask(x86::_mm512_and_si512(bytes, nan), nan);
    x86::_mm512_mask_mov_epi8(x86::_mm512_mask_mov_epi8(bytes, is_nan(b), b), is_nan(a), a)
}

/// The instructions of AVX512-FP16 by name. The oldest supported compiler does not have their
/// intrinsics yet.
macro_rules! of_halves {
    ($name:ident, $instruction:literal) => {
        /// Binary16, rounded to nearest, subnormal numbers included.
        #[inline]
        #[target_feature(enable = "avx512f,avx512fp16")]
        pub(super) fn $name(a: x86::__m512i, b: x86::__m512i) -> x86::__m512i {
            let result;
            // SAFETY: the instruction belongs to the feature that is enabled here, and touches only
            // these registers.
            unsafe {
                asm!(
                    concat!($instruction, " {result}, {a}, {b}"),
                    result = lateout(zmm_reg) result,
                    a = in(zmm_reg) a,
                    b = in(zmm_reg) b,
                    options(pure, nomem, nostack, preserves_flags)
                );
            }
            result
        }
    };
}

of_halves!(plus, "vaddph");
of_halves!(times, "vmulph");

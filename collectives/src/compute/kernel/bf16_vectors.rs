//! Loops on bfloat16 in its memory layout: two numbers in each 32-bit lane.
//!
//! Clearing the lower number of a lane makes an `f32` of the upper number, and a shift makes an
//! `f32` of the lower number. So a vector of bfloat16 gives two vectors of `f32`, one of the lower
//! and one of the upper numbers, and two such vectors give a vector of results. Nothing moves
//! between lanes, and each vector of results needs one vector of loads for each source. Plain loops
//! over numbers widen in order, which takes twice the instructions. Then the instructions limit a
//! sum from memory, and not the memory.
//!
//! Results are those of [`to_bf16`](crate::compute::convert::to_bf16), bit for bit.

use std::arch::x86_64 as x86;
use std::marker::PhantomData;
use std::mem::transmute;

use super::{Kernel, avx2, avx512, combine};
use crate::compute::element::{Bf16, Combine};

/// Just under half of the last kept place.
const HALF: i32 = 0x7fff;
/// Makes a NaN quiet, so that it stays a NaN without its lower bits.
const QUIET: i32 = 0x0040_0000;
/// The upper number of a lane.
const UPPER: i32 = 0xffff_0000_u32 as i32;

#[inline]
#[target_feature(enable = "avx2")]
fn lower_8(pairs: x86::__m256i) -> x86::__m256 {
    x86::_mm256_castsi256_ps(x86::_mm256_slli_epi32::<16>(pairs))
}

#[inline]
#[target_feature(enable = "avx2")]
fn upper_8(pairs: x86::__m256i) -> x86::__m256 {
    x86::_mm256_castsi256_ps(x86::_mm256_and_si256(pairs, x86::_mm256_set1_epi32(UPPER)))
}

/// Rounds to the upper half of each lane; the lower half has no meaning. Not for NaN.
#[inline]
#[target_feature(enable = "avx2")]
fn rounded_8(values: x86::__m256) -> x86::__m256i {
    let bits = x86::_mm256_castps_si256(values);
    let odd = x86::_mm256_and_si256(x86::_mm256_srli_epi32::<16>(bits), x86::_mm256_set1_epi32(1));
    x86::_mm256_add_epi32(bits, x86::_mm256_add_epi32(odd, x86::_mm256_set1_epi32(HALF)))
}

/// The same rounding where some numbers are NaN.
#[inline]
#[target_feature(enable = "avx2")]
fn rounded_or_nan_8(values: x86::__m256) -> x86::__m256i {
    let quiet = x86::_mm256_or_si256(x86::_mm256_castps_si256(values), x86::_mm256_set1_epi32(QUIET));
    let is_nan = x86::_mm256_cmp_ps::<{ x86::_CMP_UNORD_Q }>(values, values);
    x86::_mm256_blendv_epi8(rounded_8(values), quiet, x86::_mm256_castps_si256(is_nan))
}

#[inline]
#[target_feature(enable = "avx2")]
fn join_8(lower: x86::__m256, upper: x86::__m256) -> x86::__m256i {
    // Lanes where one of the two is NaN. One comparison serves for both vectors, and its branch is
    // hardly ever taken.
    let has_nan = x86::_mm256_cmp_ps::<{ x86::_CMP_UNORD_Q }>(lower, upper);
    let (lower, upper) = if x86::_mm256_movemask_ps(has_nan) == 0 {
        (rounded_8(lower), rounded_8(upper))
    } else {
        (rounded_or_nan_8(lower), rounded_or_nan_8(upper))
    };
    x86::_mm256_blend_epi16::<0b1010_1010>(x86::_mm256_srli_epi32::<16>(lower), upper)
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn lower_16(pairs: x86::__m512i) -> x86::__m512 {
    x86::_mm512_castsi512_ps(x86::_mm512_slli_epi32::<16>(pairs))
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn upper_16(pairs: x86::__m512i) -> x86::__m512 {
    x86::_mm512_castsi512_ps(x86::_mm512_and_si512(pairs, x86::_mm512_set1_epi32(UPPER)))
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn rounded_16(values: x86::__m512) -> x86::__m512i {
    let bits = x86::_mm512_castps_si512(values);
    let odd = x86::_mm512_and_si512(x86::_mm512_srli_epi32::<16>(bits), x86::_mm512_set1_epi32(1));
    x86::_mm512_add_epi32(bits, x86::_mm512_add_epi32(odd, x86::_mm512_set1_epi32(HALF)))
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn rounded_or_nan_16(values: x86::__m512) -> x86::__m512i {
    let is_nan = x86::_mm512_cmp_ps_mask::<{ x86::_CMP_UNORD_Q }>(values, values);
    let bits = x86::_mm512_castps_si512(values);
    x86::_mm512_mask_or_epi32(rounded_16(values), is_nan, bits, x86::_mm512_set1_epi32(QUIET))
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn join_16(lower: x86::__m512, upper: x86::__m512) -> x86::__m512i {
    let has_nan = x86::_mm512_cmp_ps_mask::<{ x86::_CMP_UNORD_Q }>(lower, upper);
    let (lower, upper) = if has_nan == 0 {
        (rounded_16(lower), rounded_16(upper))
    } else {
        (rounded_or_nan_16(lower), rounded_or_nan_16(upper))
    };
    x86::_mm512_mask_blend_epi16(0xaaaa_aaaa, x86::_mm512_srli_epi32::<16>(lower), upper)
}

macro_rules! by_pairs {
    (
        $feature:literal, $module:ident, $table:ident, $lanes:literal: $apart:ident $onto:ident $both:ident $blocks:ident,
        $lower:ident $upper:ident $join:ident $combined:ident $load:ident $store:ident, $vector:ident
    ) => {
        pub(super) struct $table<O>(PhantomData<O>);

        impl<O: Combine<f32> + Combine<Bf16>> $table<O> {
            pub(super) const KERNEL: Kernel<Bf16> = Kernel {
                apart: $apart::<O>,
                onto: $onto::<O>,
                both: $both::<O>,
                ..$module::KernelTable::<Bf16, O>::KERNEL
            };
        }

        #[target_feature(enable = $feature)]
        unsafe fn $apart<O: Combine<f32> + Combine<Bf16>>(
            into: *mut Bf16,
            a: *const Bf16,
            b: *const Bf16,
            n: usize,
        ) {
            // SAFETY: the caller's, see `Kernel`.
            unsafe { $blocks::<O, 1>([into], a, b, n) }
        }

        #[target_feature(enable = $feature)]
        unsafe fn $onto<O: Combine<f32> + Combine<Bf16>>(into: *mut Bf16, a: *const Bf16, n: usize) {
            // SAFETY: the caller's promise. The destination may be a source here.
            unsafe { $blocks::<O, 1>([into], into, a, n) }
        }

        #[target_feature(enable = $feature)]
        unsafe fn $both<O: Combine<f32> + Combine<Bf16>>(a: *mut Bf16, b: *mut Bf16, n: usize) {
            // SAFETY: the caller's promise. Destinations may be sources here.
            unsafe { $blocks::<O, 2>([a, b], a, b, n) }
        }

        #[inline]
        #[target_feature(enable = $feature)]
        fn $combined<O: Combine<f32>>(a: x86::$vector, b: x86::$vector) -> x86::$vector {
            // SAFETY: a vector of floats and an array of as many floats have the same layout, and
            // all bits are a valid float.
            unsafe {
                let [a, b] = [a, b].map(|values| transmute::<x86::$vector, [f32; $lanes]>(values));
                transmute::<[f32; $lanes], x86::$vector>(combine::<O, $lanes>(a, b))
            }
        }

        /// Destinations may be sources, because a vector is read before it is written.
        #[inline]
        #[target_feature(enable = $feature)]
        unsafe fn $blocks<O: Combine<f32> + Combine<Bf16>, const M: usize>(
            into: [*mut Bf16; M],
            a: *const Bf16,
            b: *const Bf16,
            n: usize,
        ) {
            const NUMBERS: usize = 2 * $lanes;
            let whole = n - n % NUMBERS;
            // SAFETY: the loop accesses whole vectors up to `whole <= n`, then the remaining
            // elements. Loads and stores accept any alignment.
            unsafe {
                for i in (0..whole).step_by(NUMBERS) {
                    let (a, b) = (x86::$load(a.add(i).cast()), x86::$load(b.add(i).cast()));
                    // The two halves are separate variables: an array of vectors would go through
                    // memory.
                    let lower = $combined::<O>($lower(a), $lower(b));
                    let upper = $combined::<O>($upper(a), $upper(b));
                    let numbers = $join(lower, upper);
                    for into in into {
                        x86::$store(into.add(i).cast(), numbers);
                    }
                }
                for i in whole..n {
                    let value = O::apply(a.add(i).read_unaligned(), b.add(i).read_unaligned());
                    for into in into {
                        into.add(i).write_unaligned(value);
                    }
                }
            }
        }
    };
}

by_pairs!(
    "avx2,fma,f16c", avx2, By8, 8: apart_by_8 onto_by_8 both_by_8 blocks_by_8,
    lower_8 upper_8 join_8 combined_8 _mm256_loadu_si256 _mm256_storeu_si256, __m256
);
by_pairs!(
    "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl", avx512, By16, 16: apart_by_16 onto_by_16 both_by_16 blocks_by_16,
    lower_16 upper_16 join_16 combined_16 _mm512_loadu_si512 _mm512_storeu_si512, __m512
);

#[cfg(test)]
mod tests {
    use pleach_vocabulary::ReduceOp;

    use crate::compute::Instructions;
    use crate::compute::convert::{from_bf16, to_bf16};

    /// Infinities, NaNs of both kinds, zeros, subnormal numbers, and ordinary numbers.
    const OTHERS: [u16; 12] =
        [0, 0x8000, 1, 0x807f, 0x7f80, 0xff80, 0x7fc0, 0xff81, 0x3f80, 0xbf81, 0x4b7f, 0x00ff];

    #[test]
    fn every_number_combines_with_others_as_one_at_a_time_does() {
        let all: Vec<u16> = (0..=u16::MAX).collect();
        let sum: fn(f32, f32) -> f32 = |a, b| a + b;
        let prod: fn(f32, f32) -> f32 = |a, b| a * b;
        for (op, combine) in [(ReduceOp::Sum, sum), (ReduceOp::Prod, prod)] {
            for other in OTHERS {
                let expected: Vec<u16> =
                    all.iter().map(|one| to_bf16(combine(from_bf16(*one), from_bf16(other)))).collect();
                for instructions in Instructions::available() {
                    let kernel = instructions.kernel_bf16(op);
                    // Ranges that are no multiple of a vector, and ranges that begin within a
                    // vector.
                    for range in [0..all.len(), 3..all.len() - 30, 7..20] {
                        let others = vec![other; range.len()];
                        let (mut apart, mut one, mut two) =
                            (vec![0; range.len()], all[range.clone()].to_vec(), others.clone());
                        // SAFETY: all buffers are as long as the range, and distinct. The processor
                        // was found to have the instructions.
                        unsafe {
                            (kernel.apart)(
                                apart.as_mut_ptr().cast(),
                                all[range.clone()].as_ptr().cast(),
                                others.as_ptr().cast(),
                                range.len(),
                            );
                            (kernel.both)(one.as_mut_ptr().cast(), two.as_mut_ptr().cast(), range.len());
                        }
                        let same = |found: &[u16]| {
                            found.iter().zip(&expected[range.clone()]).all(|(found, expected)| {
                                found == expected
                                    || (from_bf16(*found).is_nan() && from_bf16(*expected).is_nan())
                            })
                        };
                        assert!(
                            same(&apart) && same(&one) && same(&two),
                            "{instructions:?} {op} {other:#06x} {range:?}"
                        );
                    }
                }
            }
        }
    }
}

//! Reductions of 8-bit floats with vector instructions, through binary16.
//!
//! A byte in the upper half of a 16-bit lane is nearly a binary16. An E5M2 is a binary16. An E4M3
//! whose exponent and mantissa are shifted down by a bit is a binary16 of 2^-8 times its value
//! ([`E4M3_SCALE`]). This holds for subnormal numbers too; only NaN must be corrected. The
//! processor converts binary16 to `f32` and back. So two numbers are combined in `f32` and rounded
//! to binary16. Integer instructions round the binary16 to 8 bits, twice as many lanes at a time.
//! The two roundings give the same result as a single rounding: binary16 has more than twice as
//! many digits, and the operands are so short that no result lies near the middle of two numbers
//! without being the middle. The tests try all pairs. A processor that adds and multiplies binary16
//! itself (AVX512-FP16) widens nothing and gives the same results.
//!
//! With more sources, or with a division, a value can be any `f32`. Such a value is first rounded
//! in `f32` to the digits of the 8-bit float: a number whose last place is the last of these digits
//! is added and subtracted. After that binary16 holds the value exactly.
//!
//! Results are those of [`to_f8e4m3`](crate::compute::convert::to_f8e4m3) and
//! [`to_f8e5m2`](crate::compute::convert::to_f8e5m2), bit for bit, except for the sign of a NaN.

use std::arch::x86_64 as x86;
use std::marker::PhantomData;
use std::mem::transmute;

use super::{Conversion, Kernel, avx2, avx512, combine, plain_convert};
use crate::compute::element::{Combine, E4M3, E5M2, Prod, ShortFloat, Sum};

mod m256;
mod m512;

/// A format of 8 bits, in lanes of 16 or 32.
pub(super) trait Format: ShortFloat {
    /// Whether it is E4M3; E5M2 otherwise.
    const IS_E4M3: bool;
    /// The binary16 in a lane has the value of the number times this.
    const SCALE: f32;
    /// Bits of the mantissa.
    const MANTISSA: u32;
    /// Bits of the mantissa of a binary16 that a number of this format does not have.
    const DROPPED: u32 = 10 - Self::MANTISSA;
    /// Just under half of the last kept place of a binary16.
    const HALF: i16 = (1 << (Self::DROPPED - 1)) - 1;
    /// The smallest normal number.
    const SMALLEST_NORMAL: f32;
    /// The product of this and a power of two is a number whose last place is the last digit of
    /// 8-bit floats from this power on. The factor 1.5 keeps the sum with a number of either sign
    /// in its binade.
    const TO_LARGE: f32 = 1.5 * (1 << (23 - Self::MANTISSA)) as f32;
}

impl Format for E4M3 {
    const IS_E4M3: bool = true;
    const SCALE: f32 = E4M3_SCALE;
    const MANTISSA: u32 = 3;
    const SMALLEST_NORMAL: f32 = f32::from_bits((127 - 6) << 23);
}

impl Format for E5M2 {
    const IS_E4M3: bool = false;
    const SCALE: f32 = 1.0;
    const MANTISSA: u32 = 2;
    const SMALLEST_NORMAL: f32 = f32::from_bits((127 - 14) << 23);
}

/// 2^64: more than every finite number of the formats. Its product with [`Format::TO_LARGE`] is
/// still an `f32`.
const BEYOND_ALL: f32 = 18_446_744_073_709_551_616.0;

/// The difference of the exponents' biases of E4M3 and binary16, as a factor.
const E4M3_SCALE: f32 = 1.0 / 256.0;

/// Up to this number of elements, a scalar loop takes less time than copies to and from a vector.
const ONE_BY_ONE_MAX: usize = 8;

/// An operation on two numbers of this format.
pub(super) trait Arithmetic: Combine<f32> {
    /// Whether the operation is multiplication, in which the scale counts twice. Otherwise it is
    /// addition.
    const IS_PRODUCT: bool;
}

impl Arithmetic for Sum {
    const IS_PRODUCT: bool = false;
}

impl Arithmetic for Prod {
    const IS_PRODUCT: bool = true;
}

/// The parts that combine numbers in `f32`.
macro_rules! by_floats {
    (
        $feature:literal, $width:ident: $conversion:ident $widen:ident $narrow:ident $halves:ident $combined:ident,
        $load_bytes:ident $load:ident $store:ident $store_bytes:ident $times:ident $set:ident,
        $vector:ident $floats:ident $bytes:literal $lanes:literal
    ) => {
        pub(super) fn $conversion<F: Format>() -> Conversion<F> {
            Conversion { widen: $widen::<F>, narrow: $narrow::<F> }
        }

        #[target_feature(enable = $feature)]
        unsafe fn $widen<F: Format>(into: *mut f32, from: *const F, n: usize) {
            let whole = n - n % (2 * $lanes);
            // SAFETY: the loop accesses whole blocks up to `whole <= n`, then the remaining
            // elements. Loads and stores accept any alignment. See `Conversion`.
            unsafe {
                for i in (0..whole).step_by(2 * $lanes) {
                    let [lower, upper] = $width::widened::<F>(x86::$load_bytes(from.add(i).cast()));
                    x86::$store(into.add(i), lower);
                    x86::$store(into.add(i + $lanes), upper);
                }
                plain_convert(into.add(whole), from.add(whole), n - whole, F::widen);
            }
        }

        #[target_feature(enable = $feature)]
        unsafe fn $narrow<F: Format>(into: *mut F, from: *const f32, n: usize) {
            let whole = n - n % $bytes;
            // SAFETY: as above.
            unsafe {
                for i in (0..whole).step_by($bytes) {
                    let values = [0, 1, 2, 3].map(|k| x86::$load(from.add(i + k * $lanes)));
                    x86::$store_bytes(into.add(i).cast(), $width::narrowed::<F>(values));
                }
                plain_convert(into.add(whole), from.add(whole), n - whole, F::narrow);
            }
        }

        /// Combines scaled numbers.
        #[inline]
        #[target_feature(enable = $feature)]
        fn $halves<F: Format, O: Arithmetic>(a: x86::$vector, b: x86::$vector) -> x86::$vector {
            let ((a0, a1), (b0, b1)) = ($width::floats(a), $width::floats(b));
            $width::halves($combined::<F, O>(a0, b0), $combined::<F, O>(a1, b1))
        }

        #[inline]
        #[target_feature(enable = $feature)]
        fn $combined<F: Format, O: Arithmetic>(a: x86::$floats, b: x86::$floats) -> x86::$floats {
            // SAFETY: a vector of floats and an array of as many floats have the same layout, and
            // all bits are a valid float.
            let combined = unsafe {
                let [a, b] = [a, b].map(|values| transmute::<x86::$floats, [f32; $lanes]>(values));
                transmute::<[f32; $lanes], x86::$floats>(combine::<O, $lanes>(a, b))
            };
            if O::IS_PRODUCT && F::SCALE != 1.0 {
                x86::$times(combined, x86::$set(1.0 / F::SCALE))
            } else {
                combined
            }
        }
    };
}

by_floats!(
    "avx2,fma,f16c", m256: conversion_by_32 widen_by_32 narrow_by_32 halves_by_32 floats_by_8,
    _mm_loadu_si128 _mm256_loadu_ps _mm256_storeu_ps _mm256_storeu_si256 _mm256_mul_ps _mm256_set1_ps,
    __m256i __m256 32 8
);
by_floats!(
    "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl",
    m512: conversion_by_64 widen_by_64 narrow_by_64 halves_by_64 floats_by_16,
    _mm256_loadu_si256 _mm512_loadu_ps _mm512_storeu_ps _mm512_storeu_si512 _mm512_mul_ps _mm512_set1_ps,
    __m512i __m512 64 16
);

/// The loops over pairs of numbers.
macro_rules! by_halves {
    (
        $feature:literal, $module:ident, $table:ident, $width:ident, $bytes:literal: $apart:ident $onto:ident $both:ident
        $blocks:ident $one:ident $halves:ident, $load:ident $store:ident, $vector:ident
    ) => {
        pub(super) struct $table<F, O>(PhantomData<(F, O)>);

        impl<F: Format, O: Arithmetic + Combine<F>> $table<F, O> {
            pub(super) const KERNEL: Kernel<F> = Kernel {
                apart: $apart::<F, O>,
                onto: $onto::<F, O>,
                both: $both::<F, O>,
                ..$module::KernelTable::<F, O>::KERNEL
            };
        }

        #[target_feature(enable = $feature)]
        unsafe fn $apart<F: Format, O: Arithmetic + Combine<F>>(
            into: *mut F,
            a: *const F,
            b: *const F,
            n: usize,
        ) {
            // SAFETY: the caller's, see `Kernel`.
            unsafe { $blocks::<F, O, 1>([into], a, b, n) }
        }

        #[target_feature(enable = $feature)]
        unsafe fn $onto<F: Format, O: Arithmetic + Combine<F>>(into: *mut F, a: *const F, n: usize) {
            // SAFETY: the caller's promise. The destination may be a source here.
            unsafe { $blocks::<F, O, 1>([into], into, a, n) }
        }

        #[target_feature(enable = $feature)]
        unsafe fn $both<F: Format, O: Arithmetic + Combine<F>>(a: *mut F, b: *mut F, n: usize) {
            // SAFETY: the caller's promise. Destinations may be sources here.
            unsafe { $blocks::<F, O, 2>([a, b], a, b, n) }
        }

        /// One vector of numbers.
        #[inline]
        #[target_feature(enable = $feature)]
        fn $one<F: Format, O: Arithmetic>(a: x86::$vector, b: x86::$vector) -> x86::$vector {
            let lower = $halves::<F, O>($width::lower::<F>(a), $width::lower::<F>(b));
            let upper = $halves::<F, O>($width::upper::<F>(a), $width::upper::<F>(b));
            let numbers = $width::bytes::<F, true>(lower, upper);
            if F::IS_E4M3 { $width::or_nan(numbers, a, b) } else { numbers }
        }

        /// Destinations may be sources, because a vector is read before it is written.
        #[inline]
        #[target_feature(enable = $feature)]
        unsafe fn $blocks<F: Format, O: Arithmetic + Combine<F>, const M: usize>(
            into: [*mut F; M],
            a: *const F,
            b: *const F,
            n: usize,
        ) {
            let whole = n - n % $bytes;
            // SAFETY: the loop accesses whole vectors up to `whole <= n`. The remaining elements
            // are copied to and from vectors of our own. Loads and stores accept any alignment, and
            // all bits are a valid number.
            unsafe {
                for i in (0..whole).step_by($bytes) {
                    let numbers = $one::<F, O>(x86::$load(a.add(i).cast()), x86::$load(b.add(i).cast()));
                    for into in into {
                        x86::$store(into.add(i).cast(), numbers);
                    }
                }
                if n - whole <= ONE_BY_ONE_MAX {
                    for i in whole..n {
                        let value = O::apply(a.add(i).read_unaligned(), b.add(i).read_unaligned());
                        for into in into {
                            into.add(i).write_unaligned(value);
                        }
                    }
                } else {
                    let mut rest = [[0u8; $bytes]; 2];
                    for (rest, from) in rest.iter_mut().zip([a, b]) {
                        rest.as_mut_ptr().copy_from_nonoverlapping(from.add(whole).cast(), n - whole);
                    }
                    let [one, other] = rest.each_ref().map(|rest| x86::$load(rest.as_ptr().cast()));
                    let numbers = transmute::<x86::$vector, [u8; $bytes]>($one::<F, O>(one, other));
                    for into in into {
                        into.add(whole).cast::<u8>().copy_from_nonoverlapping(numbers.as_ptr(), n - whole);
                    }
                }
            }
        }
    };
}

by_halves!(
    "avx2,fma,f16c", avx2, By32, m256, 32: apart_by_32 onto_by_32 both_by_32
    blocks_by_32 one_by_32 halves_by_32, _mm256_loadu_si256 _mm256_storeu_si256, __m256i
);
by_halves!(
    "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl", avx512, By64, m512, 64: apart_by_64 onto_by_64 both_by_64
    blocks_by_64 one_by_64 halves_by_64, _mm512_loadu_si512 _mm512_storeu_si512, __m512i
);
by_halves!(
    "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512fp16", avx512, By64Half, m512, 64: apart_by_64_half onto_by_64_half
    both_by_64_half blocks_by_64_half one_by_64_half combined_in_half, _mm512_loadu_si512 _mm512_storeu_si512, __m512i
);

/// Combines scaled numbers as binary16.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512fp16")]
fn combined_in_half<F: Format, O: Arithmetic>(a: x86::__m512i, b: x86::__m512i) -> x86::__m512i {
    /// 2^8 as a binary16.
    const UNSCALED: i16 = (15 + 8) << 10;
    // Nothing is rounded, because binary16 has room for 4 digits at every exponent.
    let a = if O::IS_PRODUCT && F::IS_E4M3 { m512::times(a, x86::_mm512_set1_epi16(UNSCALED)) } else { a };
    if O::IS_PRODUCT { m512::times(a, b) } else { m512::plus(a, b) }
}

#[cfg(test)]
mod tests {
    use pleach_vocabulary::{DataType, ReduceOp};

    use super::*;
    use crate::compute::convert::{from_f8e4m3, from_f8e5m2, to_f8e4m3, to_f8e5m2};
    use crate::compute::{Instructions, oracle};

    /// All sets of instructions that use this file.
    fn with_halves() -> impl Iterator<Item = Instructions> {
        Instructions::available().skip(1)
    }

    fn pairs_are_as_one_at_a_time<F: Format + 'static>(data_type: DataType) {
        let first: Vec<u8> = (0..=u16::MAX).map(|pair| (pair >> 8) as u8).collect();
        let second: Vec<u8> = (0..=u16::MAX).map(|pair| pair as u8).collect();
        for op in [ReduceOp::Sum, ReduceOp::Prod, ReduceOp::Min, ReduceOp::Max] {
            let question =
                oracle::Question { data_type, op, divide_by: 1, sources: &[&first[..], &second[..]] };
            let expected: Vec<u8> = (0..first.len()).map(|index| question.element(index)[0]).collect();
            for instructions in with_halves() {
                let kernel: &Kernel<F> = instructions.kernel_f8(op);
                let (n, mut apart) = (first.len(), vec![0u8; first.len()]);
                let (mut onto, mut one, mut other) = (first.clone(), first.clone(), second.clone());
                // SAFETY: all buffers have `n` numbers of one byte, and are distinct. The processor
                // was found to have the instructions.
                unsafe {
                    (kernel.apart)(
                        apart.as_mut_ptr().cast(),
                        first.as_ptr().cast(),
                        second.as_ptr().cast(),
                        n,
                    );
                    (kernel.onto)(onto.as_mut_ptr().cast(), second.as_ptr().cast(), n);
                    (kernel.both)(one.as_mut_ptr().cast(), other.as_mut_ptr().cast(), n);
                }
                for found in [apart, onto, one, other] {
                    for (index, (found, expected)) in found.iter().zip(&expected).enumerate() {
                        assert!(
                            oracle::same(data_type, &[*found], &[*expected]),
                            "{data_type} {op} {instructions:?}: {:#04x} and {:#04x} are {found:#04x}, not {expected:#04x}",
                            first[index],
                            second[index],
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn every_pair_of_numbers_combines_as_one_at_a_time_does() {
        pairs_are_as_one_at_a_time::<E4M3>(DataType::F8E4M3);
        pairs_are_as_one_at_a_time::<E5M2>(DataType::F8E5M2);
    }

    fn conversions_are_as_one_at_a_time<F: Format>(to_f32: fn(u8) -> f32, from_f32: fn(f32) -> u8) {
        let bytes: Vec<u8> = (0..=u8::MAX).collect();
        // Ties of both formats end in zeros. These ends give ties, their neighbours, and NaN of all
        // kinds.
        let ends = [0, 1, 0x7fff, 0x8000, 0x8001, 0xffff, 0x2fff, 0x3000];
        let values: Vec<f32> = (0..=u16::MAX)
            .flat_map(|high| ends.map(|low| f32::from_bits(u32::from(high) << 16 | low)))
            .collect();
        for instructions in with_halves() {
            let conversion: Conversion<F> = instructions.conversion_f8();
            let (mut wide, mut narrow) = (vec![0f32; bytes.len()], vec![0u8; values.len()]);
            // SAFETY: the buffers have the same length, and are distinct.
            unsafe {
                (conversion.widen)(wide.as_mut_ptr(), bytes.as_ptr().cast(), bytes.len());
                (conversion.narrow)(narrow.as_mut_ptr().cast(), values.as_ptr(), values.len());
            }
            for (bits, value) in bytes.iter().zip(wide) {
                let expected = to_f32(*bits);
                assert!(
                    value.to_bits() == expected.to_bits() || (value.is_nan() && expected.is_nan()),
                    "{bits:#04x}"
                );
            }
            for (value, bits) in values.iter().zip(narrow) {
                assert_eq!(bits, from_f32(*value), "{instructions:?} {value:e} {:#010x}", value.to_bits());
            }
        }
    }

    #[test]
    fn every_number_widens_and_every_kind_of_value_narrows_as_one_at_a_time_does() {
        conversions_are_as_one_at_a_time::<E4M3>(from_f8e4m3, to_f8e4m3);
        conversions_are_as_one_at_a_time::<E5M2>(from_f8e5m2, to_f8e5m2);
    }
}

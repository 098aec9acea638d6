//! Loops on binary16 with the processor's own conversions. The compiler uses these for no plain
//! loop.

use std::arch::x86_64 as x86;
use std::marker::PhantomData;
use std::mem::transmute;

use super::{Kernel, avx2, avx512, combine, plain_convert};
use crate::compute::element::{Combine, F16, ShortFloat};

const NEAREST: i32 = x86::_MM_FROUND_TO_NEAREST_INT;

macro_rules! by_lanes {
    (
        $feature:literal, $module:ident, $table:ident, $lanes:literal: $widen:ident $narrow:ident $apart:ident $onto:ident $both:ident $blocks:ident,
        $load_half:ident $store_half:ident $load:ident $store:ident $from_half:ident $to_half:ident, $vector:ident
    ) => {
        pub(super) struct $table<O>(PhantomData<O>);

        impl<O: Combine<f32> + Combine<F16>> $table<O> {
            pub(super) const KERNEL: Kernel<F16> = Kernel {
                apart: $apart::<O>,
                onto: $onto::<O>,
                both: $both::<O>,
                ..$module::KernelTable::<F16, O>::KERNEL
            };
        }

        #[target_feature(enable = $feature)]
        pub(super) unsafe fn $widen(into: *mut f32, from: *const F16, n: usize) {
            let whole = n - n % $lanes;
            // SAFETY: the loop accesses whole blocks up to `whole <= n`, then the remaining
            // elements. Loads and stores accept any alignment. See `Conversion`.
            unsafe {
                for i in (0..whole).step_by($lanes) {
                    x86::$store(into.add(i), x86::$from_half(x86::$load_half(from.add(i).cast())));
                }
                plain_convert(into.add(whole), from.add(whole), n - whole, F16::widen);
            }
        }

        #[target_feature(enable = $feature)]
        pub(super) unsafe fn $narrow(into: *mut F16, from: *const f32, n: usize) {
            let whole = n - n % $lanes;
            // SAFETY: as above.
            unsafe {
                for i in (0..whole).step_by($lanes) {
                    let numbers = x86::$to_half::<NEAREST>(x86::$load(from.add(i)));
                    x86::$store_half(into.add(i).cast(), numbers);
                }
                plain_convert(into.add(whole), from.add(whole), n - whole, F16::narrow);
            }
        }

        #[target_feature(enable = $feature)]
        unsafe fn $apart<O: Combine<f32> + Combine<F16>>(
            into: *mut F16,
            a: *const F16,
            b: *const F16,
            n: usize,
        ) {
            // SAFETY: the caller's promise.
            unsafe { $blocks::<O, 1>([into], a, b, n) }
        }

        #[target_feature(enable = $feature)]
        unsafe fn $both<O: Combine<f32> + Combine<F16>>(a: *mut F16, b: *mut F16, n: usize) {
            // SAFETY: the caller's promise. Destinations may be sources here.
            unsafe { $blocks::<O, 2>([a, b], a, b, n) }
        }

        /// Destinations may be sources, because a block is read before it is written.
        #[inline]
        #[target_feature(enable = $feature)]
        unsafe fn $blocks<O: Combine<f32> + Combine<F16>, const M: usize>(
            into: [*mut F16; M],
            a: *const F16,
            b: *const F16,
            n: usize,
        ) {
            let whole = n - n % $lanes;
            // SAFETY: as above. A vector of floats and an array of as many floats have the same
            // layout.
            unsafe {
                for i in (0..whole).step_by($lanes) {
                    let [a, b] = [a, b].map(|from| {
                        let values = x86::$from_half(x86::$load_half(from.add(i).cast()));
                        transmute::<x86::$vector, [f32; $lanes]>(values)
                    });
                    let values = transmute::<[f32; $lanes], x86::$vector>(combine::<O, $lanes>(a, b));
                    let numbers = x86::$to_half::<NEAREST>(values);
                    for into in into {
                        x86::$store_half(into.add(i).cast(), numbers);
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

        #[target_feature(enable = $feature)]
        unsafe fn $onto<O: Combine<f32> + Combine<F16>>(into: *mut F16, a: *const F16, n: usize) {
            // SAFETY: the caller's promise. The destination may be a source here.
            unsafe { $blocks::<O, 1>([into], into, a, n) }
        }
    };
}

by_lanes!(
    "avx2,fma,f16c", avx2, By8, 8: widen_by_8 narrow_by_8 apart_by_8 onto_by_8 both_by_8 blocks_by_8,
    _mm_loadu_si128 _mm_storeu_si128 _mm256_loadu_ps _mm256_storeu_ps _mm256_cvtph_ps _mm256_cvtps_ph, __m256
);
by_lanes!(
    "avx2,fma,f16c,avx512f", avx512, By16, 16: widen_by_16 narrow_by_16 apart_by_16 onto_by_16 both_by_16 blocks_by_16,
    _mm256_loadu_si256 _mm256_storeu_si256 _mm512_loadu_ps _mm512_storeu_ps _mm512_cvtph_ps _mm512_cvtps_ph, __m512
);

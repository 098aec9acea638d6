//! The inner loops, compiled once for every set of instructions that is worth it.
//!
//! They are plain loops over [`Number`]; the compiler makes vector instructions of them because
//! the function around them says which it may use. A [`Kernel`] is a set of such functions for one
//! element type and operation.

use super::element::{And, Bf16, Combine, F16, Max, Min, Number, Or, Prod, ShortFloat, Sum, Xor};
#[cfg(target_arch = "x86_64")]
use super::float8_vectors::{self, Arithmetic, Format};
#[cfg(target_arch = "x86_64")]
use super::{bf16_vectors, f16_vectors};
use pleach_vocabulary::ReduceOp;

/// A set of vector instructions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Instructions(Set);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Set {
    /// The instructions that every processor of the architecture has.
    Base,
    /// AVX2, FMA and F16C.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// AVX-512 F, BW, DQ and VL.
    #[cfg(target_arch = "x86_64")]
    Avx512,
    /// These, and arithmetic on binary16.
    #[cfg(target_arch = "x86_64")]
    Avx512Half,
}

impl Instructions {
    /// The best that this processor has.
    #[must_use]
    pub fn best() -> Self {
        Self::available().last().unwrap_or(Self(Set::Base))
    }

    /// All that this processor has, best last.
    pub fn available() -> impl Iterator<Item = Self> {
        [
            Some(Set::Base),
            #[cfg(target_arch = "x86_64")]
            has_avx2().then_some(Set::Avx2),
            #[cfg(target_arch = "x86_64")]
            has_avx512().then_some(Set::Avx512),
            #[cfg(target_arch = "x86_64")]
            (has_avx512() && is_x86_feature_detected!("avx512fp16")).then_some(Set::Avx512Half),
        ]
        .into_iter()
        .flatten()
        .map(Self)
    }
}

#[cfg(target_arch = "x86_64")]
fn has_avx2() -> bool {
    is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c")
}

#[cfg(target_arch = "x86_64")]
fn has_avx512() -> bool {
    has_avx2()
        && is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vl")
}

/// The loops for one element type and operation. All take any alignment.
///
/// # Safety
///
/// Of every member: the pointers name `n` elements each, readable or (`*mut`) writable; a `*mut`
/// overlaps no other pointer, and the processor has the instructions that the kernel was asked for
/// with.
#[derive(Clone, Copy)]
pub(super) struct Kernel<E> {
    /// Stores `a op b`.
    pub(super) apart: unsafe fn(into: *mut E, a: *const E, b: *const E, n: usize),
    /// Replaces `into` by `into op a`.
    pub(super) onto: unsafe fn(into: *mut E, a: *const E, n: usize),
    /// Replaces `into` by `(into op a) op b`.
    pub(super) onto_two: unsafe fn(into: *mut E, a: *const E, b: *const E, n: usize),
    /// Replaces both `a` and `b` by `a op b`.
    pub(super) both: unsafe fn(a: *mut E, b: *mut E, n: usize),
    /// Divides every element.
    pub(super) divide: unsafe fn(values: &mut [E], by: u32),
}

/// Conversions of one short float, with the same conditions as [`Kernel`].
#[derive(Clone, Copy)]
pub(super) struct Conversion<S> {
    /// Stores the `f32` values of `n` numbers.
    pub(super) widen: unsafe fn(into: *mut f32, from: *const S, n: usize),
    /// Stores the numbers nearest to `n` values.
    pub(super) narrow: unsafe fn(into: *mut S, from: *const f32, n: usize),
}

impl Instructions {
    /// The loops for a bitwise operation, on bytes.
    pub(super) fn kernel_of_bytes(self, op: ReduceOp) -> &'static Kernel<u8> {
        match op {
            ReduceOp::And => self.kernel_of::<u8, And>(),
            ReduceOp::Or => self.kernel_of::<u8, Or>(),
            _ => self.kernel_of::<u8, Xor>(),
        }
    }

    /// The loops for this element type and an operation that is not bitwise.
    pub(super) fn kernel<E: Number>(self, op: ReduceOp) -> &'static Kernel<E> {
        match op {
            ReduceOp::Sum | ReduceOp::Avg | ReduceOp::PremulSum(_) => self.kernel_of::<E, Sum>(),
            ReduceOp::Prod => self.kernel_of::<E, Prod>(),
            ReduceOp::Min => self.kernel_of::<E, Min>(),
            _ => self.kernel_of::<E, Max>(),
        }
    }

    fn kernel_of<E: Number, O: Combine<E>>(self) -> &'static Kernel<E> {
        match self.0 {
            Set::Base => base::kernel::<E, O>(),
            #[cfg(target_arch = "x86_64")]
            Set::Avx2 => avx2::kernel::<E, O>(),
            #[cfg(target_arch = "x86_64")]
            Set::Avx512 | Set::Avx512Half => avx512::kernel::<E, O>(),
        }
    }

    /// The loops for two binary16 and an operation that is not bitwise.
    pub(super) fn kernel_f16(self, op: ReduceOp) -> &'static Kernel<F16> {
        match op {
            ReduceOp::Sum | ReduceOp::Avg | ReduceOp::PremulSum(_) => self.kernel_of_f16::<Sum>(),
            ReduceOp::Prod => self.kernel_of_f16::<Prod>(),
            _ => self.kernel(op),
        }
    }

    fn kernel_of_f16<O: Combine<f32> + Combine<F16>>(self) -> &'static Kernel<F16> {
        match self.0 {
            Set::Base => base::kernel::<F16, O>(),
            #[cfg(target_arch = "x86_64")]
            Set::Avx2 => &f16_vectors::By8::<O>::KERNEL,
            #[cfg(target_arch = "x86_64")]
            Set::Avx512 | Set::Avx512Half => &f16_vectors::By16::<O>::KERNEL,
        }
    }

    /// The loops for two bfloat16 and an operation that is not bitwise.
    pub(super) fn kernel_bf16(self, op: ReduceOp) -> &'static Kernel<Bf16> {
        match op {
            ReduceOp::Sum | ReduceOp::Avg | ReduceOp::PremulSum(_) => self.kernel_of_bf16::<Sum>(),
            ReduceOp::Prod => self.kernel_of_bf16::<Prod>(),
            _ => self.kernel(op),
        }
    }

    fn kernel_of_bf16<O: Combine<f32> + Combine<Bf16>>(self) -> &'static Kernel<Bf16> {
        match self.0 {
            Set::Base => base::kernel::<Bf16, O>(),
            #[cfg(target_arch = "x86_64")]
            Set::Avx2 => &bf16_vectors::By8::<O>::KERNEL,
            #[cfg(target_arch = "x86_64")]
            Set::Avx512 | Set::Avx512Half => &bf16_vectors::By16::<O>::KERNEL,
        }
    }

    /// Conversions of a short float.
    pub(super) fn conversion<S: ShortFloat>(self) -> Conversion<S> {
        match self.0 {
            Set::Base => base::conversion::<S>(),
            #[cfg(target_arch = "x86_64")]
            Set::Avx2 => avx2::conversion::<S>(),
            #[cfg(target_arch = "x86_64")]
            Set::Avx512 | Set::Avx512Half => avx512::conversion::<S>(),
        }
    }

    /// Conversions of binary16.
    pub(super) fn conversion_f16(self) -> Conversion<F16> {
        match self.0 {
            Set::Base => base::conversion::<F16>(),
            #[cfg(target_arch = "x86_64")]
            Set::Avx2 => Conversion { widen: f16_vectors::widen_by_8, narrow: f16_vectors::narrow_by_8 },
            #[cfg(target_arch = "x86_64")]
            Set::Avx512 | Set::Avx512Half => {
                Conversion { widen: f16_vectors::widen_by_16, narrow: f16_vectors::narrow_by_16 }
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
impl Instructions {
    /// The loops for two 8-bit floats and an operation that is not bitwise.
    pub(super) fn kernel_f8<F: Format>(self, op: ReduceOp) -> &'static Kernel<F> {
        match op {
            ReduceOp::Sum | ReduceOp::Avg | ReduceOp::PremulSum(_) => self.kernel_of_f8::<F, Sum>(),
            ReduceOp::Prod => self.kernel_of_f8::<F, Prod>(),
            _ => self.kernel(op),
        }
    }

    fn kernel_of_f8<F: Format, O: Arithmetic + Combine<F>>(self) -> &'static Kernel<F> {
        match self.0 {
            Set::Base => base::kernel::<F, O>(),
            Set::Avx2 => &float8_vectors::By32::<F, O>::KERNEL,
            Set::Avx512 => &float8_vectors::By64::<F, O>::KERNEL,
            Set::Avx512Half => &float8_vectors::By64Half::<F, O>::KERNEL,
        }
    }

    /// Conversions of an 8-bit float.
    pub(super) fn conversion_f8<F: Format>(self) -> Conversion<F> {
        match self.0 {
            Set::Base => base::conversion::<F>(),
            Set::Avx2 => float8_vectors::conversion_by_32(),
            Set::Avx512 | Set::Avx512Half => float8_vectors::conversion_by_64(),
        }
    }
}

/// Without instructions of their own they are short floats as others.
#[cfg(not(target_arch = "x86_64"))]
impl Instructions {
    pub(super) fn kernel_f8<E: Number>(self, op: ReduceOp) -> &'static Kernel<E> {
        self.kernel(op)
    }

    pub(super) fn conversion_f8<S: ShortFloat>(self) -> Conversion<S> {
        self.conversion()
    }
}

// The loops themselves. Conditions as for `Kernel`.

#[inline(always)]
unsafe fn plain_apart<E: Number, O: Combine<E>>(into: *mut E, a: *const E, b: *const E, n: usize) {
    for i in 0..n {
        // SAFETY: `i < n`, and all three have `n` elements (see `Kernel`).
        unsafe {
            let value = O::apply(a.add(i).read_unaligned(), b.add(i).read_unaligned());
            into.add(i).write_unaligned(value);
        }
    }
}

#[inline(always)]
unsafe fn plain_onto<E: Number, O: Combine<E>>(into: *mut E, a: *const E, n: usize) {
    for i in 0..n {
        // SAFETY: as above.
        unsafe {
            let value = O::apply(into.add(i).read_unaligned(), a.add(i).read_unaligned());
            into.add(i).write_unaligned(value);
        }
    }
}

#[inline(always)]
unsafe fn plain_onto_two<E: Number, O: Combine<E>>(into: *mut E, a: *const E, b: *const E, n: usize) {
    for i in 0..n {
        // SAFETY: as above.
        unsafe {
            let value = O::apply(into.add(i).read_unaligned(), a.add(i).read_unaligned());
            into.add(i).write_unaligned(O::apply(value, b.add(i).read_unaligned()));
        }
    }
}

#[inline(always)]
unsafe fn plain_both<E: Number, O: Combine<E>>(a: *mut E, b: *mut E, n: usize) {
    for i in 0..n {
        // SAFETY: as above.
        unsafe {
            let value = O::apply(a.add(i).read_unaligned(), b.add(i).read_unaligned());
            a.add(i).write_unaligned(value);
            b.add(i).write_unaligned(value);
        }
    }
}

#[inline(always)]
pub(super) unsafe fn plain_convert<A, B>(into: *mut B, from: *const A, n: usize, convert: impl Fn(A) -> B) {
    for i in 0..n {
        // SAFETY: as above.
        unsafe { into.add(i).write_unaligned(convert(from.add(i).read_unaligned())) };
    }
}

/// The loops, compiled for one set of instructions.
macro_rules! compiled {
    ($module:ident $(, #[$feature:meta])?) => {
        pub(super) mod $module {
            use std::marker::PhantomData;

            use super::{
                Conversion, Number, Kernel, Combine, ShortFloat, plain_apart, plain_both, plain_convert, plain_onto,
                plain_onto_two,
            };

            pub(super) fn kernel<E: Number, O: Combine<E>>() -> &'static Kernel<E> {
                &KernelTable::<E, O>::KERNEL
            }

            pub(in crate::compute) struct KernelTable<E, O>(PhantomData<(E, O)>);

            impl<E: Number, O: Combine<E>> KernelTable<E, O> {
                pub(in crate::compute) const KERNEL: Kernel<E> = Kernel {
                    apart: apart::<E, O>,
                    onto: onto::<E, O>,
                    onto_two: onto_two::<E, O>,
                    both: both::<E, O>,
                    divide: divide::<E>,
                };
            }

            $(#[$feature])?
            unsafe fn both<E: Number, O: Combine<E>>(a: *mut E, b: *mut E, n: usize) {
                // SAFETY: the caller's, see `Kernel`.
                unsafe { plain_both::<E, O>(a, b, n) }
            }

            $(#[$feature])?
            unsafe fn apart<E: Number, O: Combine<E>>(into: *mut E, a: *const E, b: *const E, n: usize) {
                // SAFETY: the caller's, see `Kernel`.
                unsafe { plain_apart::<E, O>(into, a, b, n) }
            }

            $(#[$feature])?
            unsafe fn onto<E: Number, O: Combine<E>>(into: *mut E, a: *const E, n: usize) {
                // SAFETY: the caller's, see `Kernel`.
                unsafe { plain_onto::<E, O>(into, a, n) }
            }

            $(#[$feature])?
            unsafe fn onto_two<E: Number, O: Combine<E>>(into: *mut E, a: *const E, b: *const E, n: usize) {
                // SAFETY: the caller's, see `Kernel`.
                unsafe { plain_onto_two::<E, O>(into, a, b, n) }
            }

            $(#[$feature])?
            unsafe fn divide<E: Number>(values: &mut [E], by: u32) {
                E::divide_all(values, by);
            }

            pub(super) fn conversion<S: ShortFloat>() -> Conversion<S> {
                Conversion { widen: widen::<S>, narrow: narrow::<S> }
            }

            $(#[$feature])?
            unsafe fn widen<S: ShortFloat>(into: *mut f32, from: *const S, n: usize) {
                // SAFETY: the caller's, see `Conversion`.
                unsafe { plain_convert(into, from, n, S::widen) }
            }

            $(#[$feature])?
            unsafe fn narrow<S: ShortFloat>(into: *mut S, from: *const f32, n: usize) {
                // SAFETY: the caller's, see `Conversion`.
                unsafe { plain_convert(into, from, n, S::narrow) }
            }
        }
    };
}

// Loops for every processor; binary16 by integer arithmetic.
compiled!(base);
#[cfg(target_arch = "x86_64")]
compiled!(avx2, #[target_feature(enable = "avx2,fma,f16c")]);
#[cfg(target_arch = "x86_64")]
compiled!(avx512, #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]);

/// Combines lane by lane; becomes one vector instruction.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
pub(super) fn combine<O: Combine<f32>, const LANES: usize>(a: [f32; LANES], b: [f32; LANES]) -> [f32; LANES] {
    std::array::from_fn(|lane| O::apply(a[lane], b[lane]))
}

//! The inner loops, compiled once for each useful set of instructions. A slice of a job is cut into
//! strips for these loops; the strips stay in the first-level cache.
//!
//! The loops are plain loops over [`Number`]. The compiler makes vector instructions of them,
//! because the attribute of the function around them enables these instructions. A [`Kernel`] is a
//! set of such functions for one element type and operation. The modules below replace some of them
//! by intrinsics.
//!
//! Two sources without a division need no strip. The kernel reads both sources and writes the first
//! destination. If the sources are also the two destinations (two ranks that map each other's
//! memory), it replaces both. All other jobs are folded in a strip of our own and then stored
//! ([`Strips`]). So every source is read before a destination is written, and a destination may be
//! a source.

#[cfg(target_arch = "x86_64")]
mod bf16_vectors;
#[cfg(target_arch = "x86_64")]
mod f16_vectors;
#[cfg(target_arch = "x86_64")]
mod float8_vectors;

use pleach_vocabulary::{DataType, ReduceOp};

#[cfg(target_arch = "x86_64")]
use self::float8_vectors::{Arithmetic, Format};
use super::Job;
use super::element::{And, Bf16, Combine, E4M3, E5M2, F16, Max, Min, Number, Or, Prod, ShortFloat, Sum, Xor};

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
    /// AVX-512 as above, and arithmetic on binary16.
    #[cfg(target_arch = "x86_64")]
    Avx512Half,
}

impl Instructions {
    /// The best set that this processor has.
    #[must_use]
    pub fn best() -> Self {
        Self::available().last().unwrap_or(Self(Set::Base))
    }

    /// All sets that this processor has, the best one last.
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

/// The loops for one element type and operation. All of them accept any alignment.
///
/// # Safety
///
/// For every member: each pointer names `n` elements, which are readable or, for `*mut`, writable.
/// The elements of a `*mut` overlap those of no other pointer. The processor has the
/// [`Instructions`] of the kernel.
#[derive(Clone, Copy)]
struct Kernel<E> {
    /// Stores `a op b`.
    apart: unsafe fn(into: *mut E, a: *const E, b: *const E, n: usize),
    /// Replaces `into` by `into op a`.
    onto: unsafe fn(into: *mut E, a: *const E, n: usize),
    /// Replaces `into` by `(into op a) op b`.
    onto_two: unsafe fn(into: *mut E, a: *const E, b: *const E, n: usize),
    /// Replaces both `a` and `b` by `a op b`.
    both: unsafe fn(a: *mut E, b: *mut E, n: usize),
    /// Divides every element.
    divide: unsafe fn(values: &mut [E], by: u32),
}

/// Conversions of one short float type, with the same conditions as [`Kernel`].
#[derive(Clone, Copy)]
struct Conversion<S> {
    /// Stores the `f32` values of `n` numbers.
    widen: unsafe fn(into: *mut f32, from: *const S, n: usize),
    /// Stores the number nearest to each of `n` values.
    narrow: unsafe fn(into: *mut S, from: *const f32, n: usize),
}

impl Instructions {
    /// The loops for a bitwise operation, on bytes.
    fn kernel_of_bytes(self, op: ReduceOp) -> &'static Kernel<u8> {
        match op {
            ReduceOp::And => self.kernel_of::<u8, And>(),
            ReduceOp::Or => self.kernel_of::<u8, Or>(),
            _ => self.kernel_of::<u8, Xor>(),
        }
    }

    /// The loops for this element type and an operation that is not bitwise.
    fn kernel<E: Number>(self, op: ReduceOp) -> &'static Kernel<E> {
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
    fn kernel_f16(self, op: ReduceOp) -> &'static Kernel<F16> {
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
    fn kernel_bf16(self, op: ReduceOp) -> &'static Kernel<Bf16> {
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
    fn conversion<S: ShortFloat>(self) -> Conversion<S> {
        match self.0 {
            Set::Base => base::conversion::<S>(),
            #[cfg(target_arch = "x86_64")]
            Set::Avx2 => avx2::conversion::<S>(),
            #[cfg(target_arch = "x86_64")]
            Set::Avx512 | Set::Avx512Half => avx512::conversion::<S>(),
        }
    }

    /// Conversions of binary16.
    fn conversion_f16(self) -> Conversion<F16> {
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
    fn kernel_f8<F: Format>(self, op: ReduceOp) -> &'static Kernel<F> {
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
    fn conversion_f8<F: Format>(self) -> Conversion<F> {
        match self.0 {
            Set::Base => base::conversion::<F>(),
            Set::Avx2 => float8_vectors::conversion_by_32(),
            Set::Avx512 | Set::Avx512Half => float8_vectors::conversion_by_64(),
        }
    }
}

/// Other processors convert 8-bit floats like all short floats.
#[cfg(not(target_arch = "x86_64"))]
impl Instructions {
    fn kernel_f8<E: Number>(self, op: ReduceOp) -> &'static Kernel<E> {
        self.kernel(op)
    }

    fn conversion_f8<S: ShortFloat>(self) -> Conversion<S> {
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
unsafe fn plain_convert<A, B>(into: *mut B, from: *const A, n: usize, convert: impl Fn(A) -> B) {
    for i in 0..n {
        // SAFETY: as above.
        unsafe { into.add(i).write_unaligned(convert(from.add(i).read_unaligned())) };
    }
}

/// The loops, compiled for one set of instructions.
macro_rules! compiled {
    ($module:ident $(, #[$feature:meta])?) => {
        mod $module {
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
                // SAFETY: the caller's promise, see `Kernel`.
                unsafe { plain_both::<E, O>(a, b, n) }
            }

            $(#[$feature])?
            unsafe fn apart<E: Number, O: Combine<E>>(into: *mut E, a: *const E, b: *const E, n: usize) {
                // SAFETY: the caller's promise, see `Kernel`.
                unsafe { plain_apart::<E, O>(into, a, b, n) }
            }

            $(#[$feature])?
            unsafe fn onto<E: Number, O: Combine<E>>(into: *mut E, a: *const E, n: usize) {
                // SAFETY: the caller's promise, see `Kernel`.
                unsafe { plain_onto::<E, O>(into, a, n) }
            }

            $(#[$feature])?
            unsafe fn onto_two<E: Number, O: Combine<E>>(into: *mut E, a: *const E, b: *const E, n: usize) {
                // SAFETY: the caller's promise, see `Kernel`.
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
                // SAFETY: the caller's promise, see `Conversion`.
                unsafe { plain_convert(into, from, n, S::widen) }
            }

            $(#[$feature])?
            unsafe fn narrow<S: ShortFloat>(into: *mut S, from: *const f32, n: usize) {
                // SAFETY: the caller's promise, see `Conversion`.
                unsafe { plain_convert(into, from, n, S::narrow) }
            }
        }
    };
}

// Loops for every processor; binary16 is converted by integer arithmetic.
compiled!(base);
#[cfg(target_arch = "x86_64")]
compiled!(avx2, #[target_feature(enable = "avx2,fma,f16c")]);
#[cfg(target_arch = "x86_64")]
compiled!(avx512, #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]);

/// Combines two vectors lane by lane. The compiler makes one vector instruction of it.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn combine<O: Combine<f32>, const LANES: usize>(a: [f32; LANES], b: [f32; LANES]) -> [f32; LANES] {
    std::array::from_fn(|lane| O::apply(a[lane], b[lane]))
}

/// Bytes of a strip. The fold and two widened sources fit in the first-level cache, beside the
/// sources that stream through it.
const STRIP_BYTES: usize = 4096;

/// Elements in a strip of short floats: the number that fits in a strip after widening.
const WIDE_ELEMENTS: usize = STRIP_BYTES / size_of::<f32>();

/// The number of elements of this type in a strip.
pub(super) const fn strip_elements(data_type: DataType) -> usize {
    match data_type {
        DataType::F16 | DataType::Bf16 | DataType::F8E4M3 | DataType::F8E5M2 => WIDE_ELEMENTS,
        _ => STRIP_BYTES / data_type.bytes(),
    }
}

/// Memory between sources and destinations. It is aligned so that vector accesses do not cross
/// cache lines.
#[derive(Debug)]
#[repr(align(64))]
pub(super) struct Strips {
    /// The fold so far.
    folded: [u8; STRIP_BYTES],
    /// Two sources of a short float, widened.
    widened: [[f32; WIDE_ELEMENTS]; 2],
}

impl Default for Strips {
    fn default() -> Self {
        Self { folded: [0; STRIP_BYTES], widened: [[0.0; WIDE_ELEMENTS]; 2] }
    }
}

/// A slice of a job: `elements` elements from `first` on.
struct JobRange<'a> {
    job: &'a Job,
    first: usize,
    elements: usize,
}

impl Strips {
    /// Carries out `elements` elements of the job from `first` on.
    ///
    /// # Safety
    ///
    /// As for [`Compute::advance`](super::Compute::advance), for these elements.
    pub(super) unsafe fn run(
        &mut self,
        instructions: Instructions,
        job: &Job,
        first: usize,
        elements: usize,
    ) {
        let part = JobRange { job, first, elements };
        let op = job.op;
        // SAFETY: the caller's promise. The processor has the instructions of `kernel` and of the
        // conversions, because an `Instructions` value comes only from detection.
        unsafe {
            if job.from.len() == 1 && job.divide_by <= 1 {
                return part.copy();
            }
            if op.is_bitwise() {
                let size = job.data_type.bytes();
                let part = JobRange { job, first: first * size, elements: elements * size };
                return self.fold::<u8>(&part, instructions.kernel_of_bytes(op));
            }
            // Two sources are combined in their own type. More sources of a short float are
            // combined in `f32`.
            let two = job.from.len() == 2 && job.divide_by <= 1;
            match job.data_type {
                DataType::F16 if two => self.fold::<F16>(&part, instructions.kernel_f16(op)),
                DataType::Bf16 if two => self.fold::<Bf16>(&part, instructions.kernel_bf16(op)),
                DataType::F8E4M3 if two => self.fold::<E4M3>(&part, instructions.kernel_f8(op)),
                DataType::F8E5M2 if two => self.fold::<E5M2>(&part, instructions.kernel_f8(op)),
                DataType::F32 => self.fold::<f32>(&part, instructions.kernel(op)),
                DataType::F64 => self.fold::<f64>(&part, instructions.kernel(op)),
                DataType::I32 => self.fold::<i32>(&part, instructions.kernel(op)),
                DataType::I64 => self.fold::<i64>(&part, instructions.kernel(op)),
                DataType::U8 => self.fold::<u8>(&part, instructions.kernel(op)),
                DataType::I8 => self.fold::<i8>(&part, instructions.kernel(op)),
                DataType::I16 => self.fold::<i16>(&part, instructions.kernel(op)),
                DataType::U16 => self.fold::<u16>(&part, instructions.kernel(op)),
                DataType::U32 => self.fold::<u32>(&part, instructions.kernel(op)),
                DataType::U64 => self.fold::<u64>(&part, instructions.kernel(op)),
                DataType::F16 => {
                    self.fold_wide(&part, instructions.conversion_f16(), instructions.kernel(op));
                }
                DataType::Bf16 => {
                    self.fold_wide::<Bf16>(&part, instructions.conversion(), instructions.kernel(op));
                }
                DataType::F8E4M3 => {
                    self.fold_wide::<E4M3>(&part, instructions.conversion_f8(), instructions.kernel(op));
                }
                DataType::F8E5M2 => {
                    self.fold_wide::<E5M2>(&part, instructions.conversion_f8(), instructions.kernel(op));
                }
            }
        }
    }

    /// Folds elements in their own type.
    unsafe fn fold<E: Number>(&mut self, part: &JobRange<'_>, kernel: &Kernel<E>) {
        let job = part.job;
        let strip = STRIP_BYTES / size_of::<E>();
        // SAFETY: all offsets stay in the part. `folded` has room for a strip, and its alignment is
        // at least that of every `E`. It is ours, so it overlaps nothing. `E` is a number, for
        // which all bits are valid.
        unsafe {
            if let [a, b] = job.from[..]
                && !std::ptr::eq(a, b)
                && job.divide_by <= 1
            {
                if let [one, other] = job.into[..]
                    && ((std::ptr::eq(one, a) && std::ptr::eq(other, b))
                        || (std::ptr::eq(one, b) && std::ptr::eq(other, a)))
                {
                    let skip = part.first * size_of::<E>();
                    return (kernel.both)(one.add(skip).cast(), other.add(skip).cast(), part.elements);
                }
                // A single destination needs no strips, because no result is read again.
                let strip = if job.into.len() == 1 { part.elements } else { strip };
                return part.for_each_strip(strip, |at, n| {
                    let bytes = at * size_of::<E>();
                    let into = job.into[0].add(bytes);
                    fold_two(kernel, into.cast(), a.add(bytes).cast(), b.add(bytes).cast(), n);
                    store_in_each(&job.into[1..], bytes, into, n * size_of::<E>());
                });
            }
            let folded = self.folded.as_mut_ptr().cast::<E>();
            part.for_each_strip(strip, |at, n| {
                let source = |k: usize| job.from[k].add(at * size_of::<E>()).cast::<E>();
                let mut done = 2;
                if job.from.len() == 1 {
                    // Copied by bytes, because the source may have any alignment.
                    folded.cast::<u8>().copy_from_nonoverlapping(source(0).cast(), n * size_of::<E>());
                } else {
                    (kernel.apart)(folded, source(0), source(1), n);
                }
                while done + 1 < job.from.len() {
                    (kernel.onto_two)(folded, source(done), source(done + 1), n);
                    done += 2;
                }
                if done < job.from.len() {
                    (kernel.onto)(folded, source(done), n);
                }
                if job.divide_by > 1 {
                    (kernel.divide)(std::slice::from_raw_parts_mut(folded, n), job.divide_by);
                }
                store_in_each(&job.into, at * size_of::<E>(), folded.cast(), n * size_of::<E>());
            });
        }
    }

    /// Folds short floats in `f32`.
    unsafe fn fold_wide<S: ShortFloat>(
        &mut self,
        part: &JobRange<'_>,
        conversion: Conversion<S>,
        kernel: &Kernel<f32>,
    ) {
        let job = part.job;
        let folded = self.folded.as_mut_ptr().cast::<f32>();
        let [one, two] = &mut self.widened;
        let [one, two] = [one.as_mut_ptr(), two.as_mut_ptr()];
        // SAFETY: as above; the three strips are distinct, and each has room for a strip.
        unsafe {
            part.for_each_strip(WIDE_ELEMENTS, |at, n| {
                let bytes = at * size_of::<S>();
                let source = |k: usize| job.from[k].add(bytes).cast::<S>();
                let mut done = 1;
                (conversion.widen)(folded, source(0), n);
                while done + 1 < job.from.len() {
                    (conversion.widen)(one, source(done), n);
                    (conversion.widen)(two, source(done + 1), n);
                    (kernel.onto_two)(folded, one, two, n);
                    done += 2;
                }
                if done < job.from.len() {
                    (conversion.widen)(one, source(done), n);
                    (kernel.onto)(folded, one, n);
                }
                if job.divide_by > 1 {
                    (kernel.divide)(std::slice::from_raw_parts_mut(folded, n), job.divide_by);
                }
                let into = job.into[0].add(bytes);
                (conversion.narrow)(into.cast(), folded, n);
                store_in_each(&job.into[1..], bytes, into, n * size_of::<S>());
            });
        }
    }
}

impl JobRange<'_> {
    /// Calls `strip(first element, number of elements)` for one strip after the other.
    fn for_each_strip(&self, strip_elements: usize, mut strip: impl FnMut(usize, usize)) {
        let mut done = 0;
        while done < self.elements {
            let elements = strip_elements.min(self.elements - done);
            strip(self.first + done, elements);
            done += elements;
        }
    }

    /// Copies the only source to the destinations.
    ///
    /// # Safety
    ///
    /// As for [`Strips::run`].
    unsafe fn copy(&self) {
        let size = self.job.data_type.bytes();
        let strip = if self.job.into.len() == 1 { self.elements } else { STRIP_BYTES / size };
        self.for_each_strip(strip, |at, n| {
            // SAFETY: offsets stay in the part.
            unsafe { store_in_each(&self.job.into, at * size, self.job.from[0].add(at * size), n * size) }
        });
    }
}

/// Combines two different sources. The destination may be one of them. The order of the sources
/// makes no difference.
///
/// # Safety
///
/// As for [`Kernel`], except that `into` may be `a` or `b`.
unsafe fn fold_two<E>(kernel: &Kernel<E>, into: *mut E, a: *const E, b: *const E, n: usize) {
    // SAFETY: if `into` is a source, it is not passed as a source too. The caller promises
    // everything else.
    unsafe {
        if std::ptr::eq(into, a) {
            (kernel.onto)(into, b, n);
        } else if std::ptr::eq(into, b) {
            (kernel.onto)(into, a, n);
        } else {
            (kernel.apart)(into, a, b, n);
        }
    }
}

/// Copies `bytes` bytes to an offset in each destination, except onto themselves.
///
/// # Safety
///
/// Each destination has `bytes` writable bytes at the offset. These bytes are the source itself, or
/// do not overlap it.
unsafe fn store_in_each(into: &[*mut u8], offset: usize, from: *const u8, bytes: usize) {
    for destination in into {
        // SAFETY: the caller's promise.
        unsafe {
            let destination = destination.add(offset);
            if !std::ptr::eq(destination, from) {
                destination.copy_from_nonoverlapping(from, bytes);
            }
        }
    }
}

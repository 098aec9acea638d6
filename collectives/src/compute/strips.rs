//! How a slice of a job is cut into strips that stay in the first-level cache.
//!
//! Two sources and no division need no strip: the kernel reads both and writes the first
//! destination, or replaces both where they are the two destinations (two ranks that map each
//! other's memory). All other jobs are folded in a strip of our own and then stored. So every
//! source is read before a destination is written, and a destination may be a source.

use pleach_vocabulary::DataType;

use super::Job;
use super::element::{Bf16, E4M3, E5M2, F16, Number, ShortFloat};
use super::kernel::{Conversion, Instructions, Kernel};

/// Bytes of a strip: the fold and two widened sources fit the first-level cache beside the sources
/// that stream through it.
const STRIP_BYTES: usize = 4096;

/// Elements in a strip of short floats, which is as long as it is when widened.
const WIDE_ELEMENTS: usize = STRIP_BYTES / size_of::<f32>();

/// How many elements of this type make a strip.
pub(super) const fn strip_elements(data_type: DataType) -> usize {
    match data_type {
        DataType::F16 | DataType::Bf16 | DataType::F8E4M3 | DataType::F8E5M2 => WIDE_ELEMENTS,
        _ => STRIP_BYTES / data_type.bytes(),
    }
}

/// Room for what lies between sources and destinations. Aligned so that vector accesses do not
/// straddle cache lines.
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

/// A slice of a job: `elements` of them from `first` on.
struct JobRange<'a> {
    job: &'a Job,
    first: usize,
    elements: usize,
}

impl Strips {
    /// Does `elements` elements of the job from `first` on.
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
        // SAFETY: the caller's; `kernel` and the conversions are asked for with instructions that
        // the processor has, since an `Instructions` comes from detection only.
        unsafe {
            if job.from.len() == 1 && job.divide_by <= 1 {
                return part.copy();
            }
            if op.is_bitwise() {
                let size = job.data_type.bytes();
                let part = JobRange { job, first: first * size, elements: elements * size };
                return self.fold::<u8>(&part, instructions.kernel_of_bytes(op));
            }
            // Two at a time are combined in their own type, more of a short float in `f32`.
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

    /// Elements that are combined in their own type.
    unsafe fn fold<E: Number>(&mut self, part: &JobRange<'_>, kernel: &Kernel<E>) {
        let job = part.job;
        let strip = STRIP_BYTES / size_of::<E>();
        // SAFETY: all offsets stay in the part. `folded` has room for a strip, is aligned to more
        // than any `E`, is ours and so overlaps nothing; `E` is a number, valid for any bits.
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
                // One destination needs no strips, as nothing is read again.
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
                    // By bytes, as the source may have any alignment.
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

    /// Short floats that are combined in `f32`.
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
    /// Calls `strip(first element, elements)` for one strip after the other.
    fn for_each_strip(&self, strip_elements: usize, mut strip: impl FnMut(usize, usize)) {
        let mut done = 0;
        while done < self.elements {
            let elements = strip_elements.min(self.elements - done);
            strip(self.first + done, elements);
            done += elements;
        }
    }

    /// One source as it is.
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

/// Two different sources, and a destination that may be one of them. Their order makes no
/// difference.
///
/// # Safety
///
/// As for [`Kernel`], but that `into` may be `a` or `b`.
unsafe fn fold_two<E>(kernel: &Kernel<E>, into: *mut E, a: *const E, b: *const E, n: usize) {
    // SAFETY: where `into` is a source it is not passed as one; otherwise the caller's.
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

/// Copies `bytes` bytes to an offset in each destination, but not onto themselves.
///
/// # Safety
///
/// Each destination has that many writable bytes there, which are the source itself or do not
/// overlap it.
unsafe fn store_in_each(into: &[*mut u8], offset: usize, from: *const u8, bytes: usize) {
    for destination in into {
        // SAFETY: the caller's.
        unsafe {
            let destination = destination.add(offset);
            if !std::ptr::eq(destination, from) {
                destination.copy_from_nonoverlapping(from, bytes);
            }
        }
    }
}

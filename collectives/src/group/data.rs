//! The data of collectives: elements, slices, registered buffers, a GPU's memory.
//!
//! **Invariant:** an implementation of the traits here names the same memory each time it is asked,
//! and of [`OwnedData`] also after a move. Peers and kernels write there while the caller holds no
//! reference. Safe code elsewhere could not promise this, so the traits are sealed.
#![allow(unsafe_code)]

use std::fmt;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut, Range};
use std::sync::Arc;

use half::{bf16, f16};
use pleach_transport::cuda::ForeignMemory;
use pleach_transport::{Slice, Space};

use super::error::CollectiveError;
use super::gpu::GpuBuffer;
use super::summary::Summary;
use crate::compute::{F8E4M3, F8E5M2};
use crate::engine::{Address, Bytes};
use pleach_vocabulary::DataType;

/// A type of element. Sealed: the element types are those of [`DataType`].
pub trait Element: bytemuck::Pod + Send + Sync + fmt::Debug + PartialEq + private::Sealed {
    /// Its name on the wire.
    const DATA_TYPE: DataType;
}

pub(super) mod private {
    use super::{CollectiveError, Operand};

    pub trait Sealed {}

    /// An operand is a second way to the elements, beside references to them, so no other crate may
    /// get one. A generic function can call methods of a supertrait that it cannot name, but it
    /// cannot make an [`Internal`].
    pub trait SealedData {
        /// The bytes as the group of this number takes them, to be read: a source is only read,
        /// whatever the pointer says.
        fn source(&self, _group: u64, _: Internal) -> Result<Operand, CollectiveError>;
    }

    /// The same for data that may be written.
    pub trait SealedDataMut {
        /// The bytes as the group of this number takes them, to be read and written.
        fn destination(&mut self, _group: u64, _: Internal) -> Result<Operand, CollectiveError>;
    }

    /// An argument that only this module can make.
    #[derive(Clone, Copy, Debug)]
    pub struct Internal(pub(super) ());
}
use private::{Internal, SealedData, SealedDataMut};

/// The bytes of some data as an engine takes them, held by the caller until the run's outcome is
/// known.
#[derive(Debug)]
pub struct Operand {
    pub(super) bytes: Bytes,
    /// The number of elements.
    pub(super) len: usize,
    pub(super) space: Space,
    /// Memory of a GPU that other code may free before the call begins.
    pub(super) foreign: Option<ForeignMemory>,
}

impl Operand {
    /// No memory.
    #[inline]
    pub(super) fn none() -> Self {
        Self::on_host(Bytes::None, 0)
    }

    #[inline]
    pub(super) fn on_host(bytes: Bytes, len: usize) -> Self {
        Self { bytes, len, space: Space::Host, foreign: None }
    }
}

macro_rules! element {
    ($($type:ty => $name:ident),*) => {
        $(
            impl private::Sealed for $type {}
            impl Element for $type {
                const DATA_TYPE: DataType = DataType::$name;
            }
        )*
    };
}

element!(
    f32 => F32, f64 => F64, f16 => F16, bf16 => Bf16, F8E4M3 => F8E4M3, F8E5M2 => F8E5M2,
    i32 => I32, i64 => I64, i16 => I16, i8 => I8, u32 => U32, u64 => U64, u16 => U16, u8 => U8
);

/// Elements that a collective may read: a slice, array or `Vec` of any memory, a [`Buffer`], which
/// peers reach without a copy, a [`GpuBuffer`], or a reference to one of these. The trait is
/// sealed, so there are no others. Only references lead to a buffer's elements:
///
/// ```compile_fail,E0624
/// # use pleach_collectives::Buffer;
/// fn operand(buffer: &Buffer<u32>) -> usize {
///     buffer.operand(1).len
/// }
/// ```
/// ```compile_fail,E0061
/// # use pleach_collectives::Data;
/// fn operand<D: Data>(data: &D) -> bool {
///     data.source(1).is_ok()
/// }
/// ```
pub trait Data: SealedData {
    /// Type of element.
    type Element: Element;

    /// The number of elements.
    fn len(&self) -> usize;

    /// The kind of their memory.
    fn space(&self) -> Space;

    /// Whether there are no elements.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Elements that a collective may write.
pub trait DataMut: Data + SealedDataMut {}

/// Data that an operation may own while it is under way: a [`Buffer`], a `Vec`, a [`GpuBuffer`], a
/// pair or a list of these, or nothing.
pub trait OwnedData: Summary + Send + 'static {}

impl OwnedData for () {}
impl<T: Element> OwnedData for Vec<T> {}
impl<T: Element> OwnedData for Buffer<T> {}
impl<T: Element> OwnedData for GpuBuffer<T> {}
impl<T: Element> OwnedData for Vec<Vec<T>> {}
impl<T: Element> OwnedData for Vec<Buffer<T>> {}
impl<T: Element> OwnedData for Vec<GpuBuffer<T>> {}
impl<I: OwnedData, O: OwnedData> OwnedData for (I, O) {}

macro_rules! host_memory {
    ($($type:ty $(where $count:ident)?),*) => {
        $(
            impl<T: Element $(, const $count: usize)?> SealedData for $type {
                #[inline]
                fn source(&self, _group: u64, _: Internal) -> Result<Operand, CollectiveError> {
                    let elements: &[T] = self;
                    let base = elements.as_ptr().cast_mut().cast();
                    Ok(Operand::on_host(private(base, size_of_val(elements)), elements.len()))
                }
            }

            impl<T: Element $(, const $count: usize)?> SealedDataMut for $type {
                #[inline]
                fn destination(&mut self, _group: u64, _: Internal) -> Result<Operand, CollectiveError> {
                    let elements: &mut [T] = self;
                    let (bytes, len) = (size_of_val(elements), elements.len());
                    Ok(Operand::on_host(private(elements.as_mut_ptr().cast(), bytes), len))
                }
            }

            impl<T: Element $(, const $count: usize)?> Data for $type {
                type Element = T;

                fn len(&self) -> usize {
                    <[T]>::len(self)
                }

                fn space(&self) -> Space {
                    Space::Host
                }
            }

            impl<T: Element $(, const $count: usize)?> DataMut for $type {}
        )*
    };
}

host_memory!([T], [T; N] where N, Vec<T>);

impl<T: Element> SealedData for Buffer<T> {
    #[inline]
    fn source(&self, group: u64, _: Internal) -> Result<Operand, CollectiveError> {
        Ok(self.operand(group))
    }
}

impl<T: Element> SealedDataMut for Buffer<T> {
    #[inline]
    fn destination(&mut self, group: u64, _: Internal) -> Result<Operand, CollectiveError> {
        Ok(self.operand(group))
    }
}

impl<T: Element> Data for Buffer<T> {
    type Element = T;

    fn len(&self) -> usize {
        self.len
    }

    fn space(&self) -> Space {
        Space::Host
    }
}

impl<T: Element> DataMut for Buffer<T> {}

impl<T: Element> SealedData for GpuBuffer<T> {
    fn source(&self, group: u64, _: Internal) -> Result<Operand, CollectiveError> {
        self.operand(group)
    }
}

impl<T: Element> SealedDataMut for GpuBuffer<T> {
    fn destination(&mut self, group: u64, _: Internal) -> Result<Operand, CollectiveError> {
        self.operand(group)
    }
}

impl<T: Element> Data for GpuBuffer<T> {
    type Element = T;

    fn len(&self) -> usize {
        self.len()
    }

    fn space(&self) -> Space {
        Space::Gpu { ordinal: self.gpu().ordinal() }
    }
}

impl<T: Element> DataMut for GpuBuffer<T> {}

macro_rules! references {
    ($($reference:ty),*) => {
        $(
            impl<D: Data + ?Sized> SealedData for $reference {
                #[inline]
                fn source(&self, group: u64, internal: Internal) -> Result<Operand, CollectiveError> {
                    (**self).source(group, internal)
                }
            }

            impl<D: Data + ?Sized> Data for $reference {
                type Element = D::Element;

                fn len(&self) -> usize {
                    (**self).len()
                }

                fn space(&self) -> Space {
                    (**self).space()
                }
            }
        )*
    };
}

references!(&D, &mut D);

impl<D: DataMut + ?Sized> SealedDataMut for &mut D {
    #[inline]
    fn destination(&mut self, group: u64, internal: Internal) -> Result<Operand, CollectiveError> {
        (**self).destination(group, internal)
    }
}

impl<D: DataMut + ?Sized> DataMut for &mut D {}

/// The bytes of data that are read, as the group of this number takes them.
#[inline]
pub(super) fn source<D: Data + ?Sized>(data: &D, group: u64) -> Result<Operand, CollectiveError> {
    data.source(group, Internal(()))
}

/// The bytes of data that are written, as the group of this number takes them.
#[inline]
pub(super) fn destination<D: DataMut + ?Sized>(data: &mut D, group: u64) -> Result<Operand, CollectiveError> {
    data.destination(group, Internal(()))
}

/// Registered memory of a group: collectives work on it in place, without copies. Derefs to a
/// slice.
pub struct Buffer<T: Element> {
    slice: Slice,
    len: usize,
    group: u64,
    _element: PhantomData<T>,
}

impl<T: Element> Buffer<T> {
    /// The first `len` elements of a registered slice that no other code uses.
    pub(super) fn new(slice: Slice, len: usize, group: u64) -> Self {
        assert!(slice.as_ptr().cast::<T>().is_aligned());
        let slice = slice.slice(0..len * size_of::<T>()).expect("memory was made for so many elements");
        Self { slice, len, group, _element: PhantomData }
    }

    /// Splits the buffer into buffers of these lengths, in elements, one after the other. Each part
    /// is registered like the whole, so the buckets of one flat gradient can be started one by one:
    ///
    /// ```
    /// # use pleach_collectives::{Buffer, Group, Operation, Options, ReduceOp};
    /// # use pleach_transport::rendezvous::World;
    /// # let group = Group::join(&Options::new(World::alone())).unwrap();
    /// let gradient = group.buffer::<f32>(60)?;
    /// let mut pending = Vec::new();
    /// for bucket in gradient.split(&[10, 20, 30]).expect("together the gradient's length") {
    ///     pending.push(group.start(Operation::all_reduce(bucket, ReduceOp::Avg))?);
    /// }
    /// let gradient = Buffer::join(Pending::wait_all(pending)?).expect("the parts of one buffer");
    /// assert_eq!(gradient.len(), 60);
    /// # use pleach_collectives::Pending;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    ///
    /// The buffer itself, unchanged, when the lengths do not add up to its own.
    pub fn split(self, lengths: &[usize]) -> Result<Vec<Self>, Self> {
        let whole = lengths.iter().try_fold(0_usize, |sum, length| sum.checked_add(*length));
        if whole != Some(self.len) {
            return Err(self);
        }
        let mut from = 0;
        let part = |&len: &usize| {
            let bytes = from * size_of::<T>()..(from + len) * size_of::<T>();
            from += len;
            let slice = self.slice.slice(bytes).expect("the parts are inside of the whole");
            Self { slice, len, group: self.group, _element: PhantomData }
        };
        Ok(lengths.iter().map(part).collect())
    }

    /// Joins parts that [`Buffer::split`] made, in their order.
    ///
    /// # Errors
    ///
    /// The parts, unchanged, when there are none, or when one does not begin where the part before
    /// ends.
    pub fn join(parts: Vec<Self>) -> Result<Self, Vec<Self>> {
        let follows = |pair: &[Self]| {
            let (before, after) = (&pair[0].slice, &pair[1].slice);
            before.region().key() == after.region().key()
                && pair[0].group == pair[1].group
                && before.offset() + before.len() == after.offset()
        };
        let (Some(first), true) = (parts.first(), parts.windows(2).all(follows)) else {
            return Err(parts);
        };
        let len: usize = parts.iter().map(|part| part.len).sum();
        let from = first.slice.offset();
        let whole = first.slice.region().slice(from..from + len * size_of::<T>());
        let slice = whole.expect("the parts are inside of their region");
        Ok(Self { slice, len, group: first.group, _element: PhantomData })
    }

    /// An owner of the memory, which stays where it is as long as the buffer or an owner. For
    /// programs in other languages, which reach it by its address.
    #[doc(hidden)]
    #[must_use]
    pub fn owner(&self) -> Arc<dyn Send + Sync> {
        Arc::new(self.slice.clone())
    }

    /// The number of the group, and a handle of the registered memory, which keeps the memory when
    /// the buffer is dropped.
    pub(super) fn held(&self) -> (Slice, u64) {
        (self.slice.clone(), self.group)
    }

    /// The operand for the group of this number: in place if that group registered the buffer.
    #[inline]
    fn operand(&self, group: u64) -> Operand {
        let bytes = if self.group == group {
            lent(&self.slice, self.len * size_of::<T>())
        } else {
            private(self.slice.as_ptr(), self.len * size_of::<T>())
        };
        Operand::on_host(bytes, self.len)
    }
}

impl<T: Element> Deref for Buffer<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: the slice has room for `len` aligned elements (asserted in `new`), any bytes are
        // elements (Pod), and it is this buffer's alone: peers touch it only during a run, and a
        // run borrows or owns the buffer until its outcome is known (blocking calls hold the
        // reference, `Pending` owns the buffer).
        unsafe { std::slice::from_raw_parts(self.slice.as_ptr().cast::<T>(), self.len) }
    }
}

impl<T: Element> DerefMut for Buffer<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as in `deref`; the mutable borrow makes it exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.slice.as_ptr().cast::<T>(), self.len) }
    }
}

impl<T: Element> fmt::Debug for Buffer<T> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "Buffer<{}>({} elements)", T::DATA_TYPE, self.len)
    }
}

#[inline]
fn lent(slice: &Slice, bytes: usize) -> Bytes {
    debug_assert!(bytes <= slice.len(), "a buffer's slice holds its elements");
    // SAFETY: the data outlive the run: a blocking call borrows them until its outcome is known,
    // and a `Pending` owns them, and its buffer's handle of the region stays the same wherever the
    // buffer is moved.
    Bytes::Lent(unsafe { slice.lend() }.first(bytes))
}

/// A part of some bytes, which must contain it.
pub(super) fn part(bytes: &Bytes, range: Range<usize>) -> Bytes {
    match bytes {
        Bytes::None => Bytes::None,
        Bytes::Registered(slice) => Bytes::Registered(slice.slice(range).expect("inside of the slice")),
        Bytes::Staged(slice) => Bytes::Staged(slice.slice(range).expect("inside of the slice")),
        Bytes::Lent(slice) => Bytes::Lent(slice.part(range).expect("inside of the slice")),
        Bytes::Private { base, len } => {
            assert!(range.start <= range.end && range.end <= *len, "inside of the slice");
            private(base.0.wrapping_add(range.start), range.len())
        }
    }
}

/// The place of `inner` in `outer`, if both are private and `outer` contains `inner`.
pub(super) fn place_in(inner: &Bytes, outer: &Bytes) -> Option<Range<usize>> {
    match (inner, outer) {
        (
            Bytes::Private { base: Address(inner), len },
            Bytes::Private { base: Address(outer), len: outer_len },
        ) => {
            let start = (*inner as usize).checked_sub(*outer as usize)?;
            let range = start..start.checked_add(*len)?;
            (range.end <= *outer_len).then_some(range)
        }
        _ => None,
    }
}

/// Bytes that only this rank touches.
#[inline]
pub(super) fn private(base: *mut u8, len: usize) -> Bytes {
    Bytes::Private { base: Address(base), len }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use pleach_transport::{HostMemory, Region, RegionKey, Registry};

    use super::*;

    const GROUP: u64 = 7;

    struct Nobody;
    impl Registry for Nobody {
        fn released(&self, _key: RegionKey) {}
    }

    fn buffer(len: usize) -> Buffer<u32> {
        let region = Region::new(HostMemory::new(len * 4), RegionKey(1), Arc::new(Nobody));
        Buffer::new(region.whole(), len, GROUP)
    }

    /// Copies bytes as a run does.
    fn copy(from: &Bytes, into: &Bytes) {
        assert_eq!(from.len(), into.len());
        // SAFETY: the tests keep both, and touch neither during the copy.
        unsafe { std::ptr::copy_nonoverlapping(from.base().0, into.base().0, from.len()) }
    }

    #[test]
    fn parts_of_a_buffer_are_its_memory_and_join_in_their_order_alone() {
        let mut whole = buffer(6);
        whole.copy_from_slice(&[1, 2, 3, 4, 5, 6]);
        let whole = whole.split(&[2, 3]).expect_err("five elements of six");
        let whole = whole.split(&[usize::MAX, 7]).expect_err("too many to be counted");
        let mut parts = whole.split(&[2, 0, 4]).expect("all six");
        parts[2][0] = 30;
        assert_eq!((&parts[0][..], &parts[1][..], &parts[2][..]), (&[1, 2][..], &[][..], &[30, 4, 5, 6][..]));
        parts.swap(0, 2);
        let mut parts = Buffer::join(parts).expect_err("the last part is the first one");
        parts.swap(0, 2);
        let [other] = buffer(6).split(&[6]).expect("one part").try_into().expect("one part");
        parts.push(other);
        let mut parts = Buffer::join(parts).expect_err("a part of another buffer");
        parts.pop();
        assert_eq!(&Buffer::join(parts).expect("all parts")[..], &[1, 2, 30, 4, 5, 6]);
        assert!(Buffer::<u32>::join(Vec::new()).is_err(), "no part says whose memory it is");
    }

    #[test]
    fn what_a_run_writes_is_what_the_owner_reads_also_after_it_was_moved() {
        let bytes = |operand: Result<Operand, CollectiveError>| operand.expect("host memory").bytes;
        for group in [GROUP, GROUP + 1] {
            let (input, mut buffered, mut owned) = (vec![1u32, 2, 3, 4], buffer(4), vec![9u32; 4]);
            let (from, into) = (bytes(source(&input, group)), bytes(destination(&mut buffered, group)));
            let further = bytes(destination(&mut &mut owned, group));
            // As into a `Pending`.
            let data = Box::new((input, buffered, owned));
            copy(&from, &into);
            copy(&into, &further);
            assert_eq!((&data.1[..], &data.2[..]), (&[1, 2, 3, 4][..], &[1, 2, 3, 4][..]));
            assert_eq!(matches!(into, Bytes::Lent(_)), group == GROUP, "it is registered with one group");
        }
    }

    #[test]
    fn a_part_of_what_was_given_is_where_it_was() {
        let bytes = |operand: Result<Operand, CollectiveError>| operand.expect("host memory").bytes;
        let (mut array, mut buffered) = ([5u8; 10], buffer(10));
        let registered = part(&bytes(destination(&mut buffered, GROUP)), 0..8);
        for whole in [bytes(destination(&mut array, GROUP)), registered] {
            let inner = part(&whole, 2..4);
            assert_eq!(inner.base().0 as usize - whole.base().0 as usize, 2);
            let found = place_in(&inner, &whole);
            assert_eq!(found, matches!(whole, Bytes::Private { .. }).then_some(2..4));
            assert!(place_in(&whole, &inner).is_none());
        }
        let mut other = [8u8; 2];
        let whole = bytes(destination(&mut array, GROUP));
        copy(&bytes(destination(&mut other, GROUP)), &part(&whole, 2..4));
        assert_eq!(array, [5, 5, 8, 8, 5, 5, 5, 5, 5, 5]);
    }
}

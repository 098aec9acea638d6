//! What collectives work on: elements, slices, registered buffers.
//!
//! **Invariant:** what implements the three traits here names the same memory each time it is
//! asked, and [`OwnedData`] also after it was moved. Peers and kernels write there while the caller
//! holds no reference, so the traits are sealed: safe code elsewhere could not promise it.
#![allow(unsafe_code)]

use std::fmt;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut, Range};

use half::{bf16, f16};
use pleach_transport::Slice;
use pleach_vocabulary::DataType;

use super::summary::Summary;
use crate::compute::{F8E4M3, F8E5M2, Scale};
use crate::engine::{Address, Bytes};

/// A type of element. Sealed: the element types are those of [`DataType`].
pub trait Element: bytemuck::Pod + Send + Sync + fmt::Debug + PartialEq + private::Sealed {
    /// Its name on the wire.
    const DATA_TYPE: DataType;

    /// What a premultiplied sum multiplies it by: `f32` for floats of fewer bits, otherwise the
    /// type itself.
    type Factor: Copy + Send + Sync + fmt::Debug;

    /// It times a factor, rounded once to nearest even; integers wrap.
    #[must_use]
    fn scaled(self, factor: Self::Factor) -> Self;
}

mod private {
    use pleach_transport::Slice;

    pub trait Sealed {}

    /// A slice is a second way to the elements, beside references to them, so no other crate may
    /// get one. A generic function can call methods of a supertrait that it cannot name;
    /// [`Internal`] is what it cannot make.
    pub trait SealedData {
        /// The registered memory behind the elements, if the group of this number registered it.
        fn registered(&self, _group: u64, _: Internal) -> Option<&Slice> {
            None
        }
    }

    /// Made in the module of data alone.
    #[derive(Clone, Copy, Debug)]
    pub struct Internal(pub(super) ());
}
use private::{Internal, SealedData as _};

macro_rules! element {
    ($($type:ty => $name:ident),*) => {
        $(
            impl private::Sealed for $type {}
            impl Element for $type {
                const DATA_TYPE: DataType = DataType::$name;
                type Factor = <$type as Scale>::Factor;

                #[inline]
                fn scaled(self, factor: Self::Factor) -> Self {
                    Scale::scaled(self, factor)
                }
            }
        )*
    };
}

element!(
    f32 => F32, f64 => F64, f16 => F16, bf16 => Bf16, F8E4M3 => F8E4M3, F8E5M2 => F8E5M2,
    i32 => I32, i64 => I64, i8 => I8, u32 => U32, u64 => U64, u8 => U8
);

/// Elements that a collective may read: a slice, array or `Vec` of any memory, or a [`Buffer`],
/// which peers reach without a copy. Sealed: there are no others. Nor is there another way to a
/// buffer's elements than references to them:
///
/// ```compile_fail,E0599
/// # use pleach_collectives::Buffer;
/// fn slice(buffer: &Buffer<u32>) -> bool {
///     buffer.registered(1).is_some()
/// }
/// ```
/// ```compile_fail,E0061
/// # use pleach_collectives::Data;
/// fn slice<D: Data>(data: &D) -> bool {
///     data.registered(1).is_some()
/// }
/// ```
pub trait Data: private::SealedData {
    /// Type of element.
    type Element: Element;
    /// The elements.
    fn elements(&self) -> &[Self::Element];
}

/// Elements that a collective may write.
pub trait DataMut: Data {
    /// The elements.
    fn elements_mut(&mut self) -> &mut [Self::Element];
}

/// Elements that a non-blocking collective may own while it works: [`Buffer`] or `Vec`.
pub trait OwnedData: DataMut + Summary + Send + 'static {}

impl<T: Element> private::SealedData for [T] {}
impl<T: Element, const N: usize> private::SealedData for [T; N] {}
impl<T: Element> private::SealedData for Vec<T> {}
impl<T: Element> private::SealedData for Buffer<T> {
    fn registered(&self, group: u64, _: Internal) -> Option<&Slice> {
        (self.group == group).then_some(&self.slice)
    }
}

impl<T: Element> Data for [T] {
    type Element = T;
    fn elements(&self) -> &[T] {
        self
    }
}

impl<T: Element> DataMut for [T] {
    fn elements_mut(&mut self) -> &mut [T] {
        self
    }
}

impl<T: Element, const N: usize> Data for [T; N] {
    type Element = T;
    fn elements(&self) -> &[T] {
        self
    }
}

impl<T: Element, const N: usize> DataMut for [T; N] {
    fn elements_mut(&mut self) -> &mut [T] {
        self
    }
}

impl<T: Element> Data for Vec<T> {
    type Element = T;
    fn elements(&self) -> &[T] {
        self
    }
}

impl<T: Element> DataMut for Vec<T> {
    fn elements_mut(&mut self) -> &mut [T] {
        self
    }
}

impl<T: Element> OwnedData for Vec<T> {}

/// Registered memory of a group: collectives work on it in place, without copies. Derefs to a
/// slice.
pub struct Buffer<T: Element> {
    slice: Slice,
    len: usize,
    group: u64,
    _element: PhantomData<T>,
}

impl<T: Element> Buffer<T> {
    /// The first `len` elements of a registered slice that nobody else uses.
    pub(super) fn new(slice: Slice, len: usize, group: u64) -> Self {
        assert!(slice.as_ptr().cast::<T>().is_aligned());
        let slice = slice.slice(0..len * size_of::<T>()).expect("memory was made for so many elements");
        Self { slice, len, group, _element: PhantomData }
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

impl<T: Element> Data for Buffer<T> {
    type Element = T;
    fn elements(&self) -> &[T] {
        self
    }
}

impl<T: Element> DataMut for Buffer<T> {
    fn elements_mut(&mut self) -> &mut [T] {
        self
    }
}

impl<T: Element> OwnedData for Buffer<T> {}

/// The bytes of `data` as an engine takes them. A source is only read, whatever the pointer says.
pub(super) fn source<D: Data + ?Sized>(data: &D, group: u64) -> Bytes {
    let elements = data.elements();
    match data.registered(group, Internal(())) {
        Some(slice) => lent(slice, size_of_val(elements)),
        None => private(elements.as_ptr().cast_mut().cast(), size_of_val(elements)),
    }
}

/// The bytes of a buffer's first elements as an engine takes them, to be written.
pub(super) fn first_of<T: Element>(data: &mut Buffer<T>, group: u64, count: usize) -> Bytes {
    let bytes = size_of_val(&data[..count]);
    match data.registered(group, Internal(())) {
        Some(slice) => lent(slice, bytes),
        None => private(data.as_mut_ptr().cast(), bytes),
    }
}

/// The bytes of `data` as an engine takes them, to be written.
pub(super) fn destination<D: DataMut + ?Sized>(data: &mut D, group: u64) -> Bytes {
    let bytes = size_of_val(data.elements());
    if let Some(slice) = data.registered(group, Internal(())) {
        return lent(slice, bytes);
    }
    private(data.elements_mut().as_mut_ptr().cast(), bytes)
}

#[inline]
fn lent(slice: &Slice, bytes: usize) -> Bytes {
    debug_assert!(bytes <= slice.len(), "a buffer's slice holds its elements");
    // SAFETY: the data outlive the run: a blocking call borrows them until its outcome is known,
    // and a `Pending` owns them, and its buffer's handle of the region stays the same wherever the
    // buffer is moved.
    Bytes::Lent(unsafe { slice.lend() }.first(bytes))
}

/// A part of the bytes, which must hold it.
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

/// Where the first bytes lie in the second, both private, if they do.
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

    /// What a run does with bytes that it was given.
    fn copy(from: &Bytes, into: &Bytes) {
        assert_eq!(from.len(), into.len());
        // SAFETY: the tests keep both, and touch neither meanwhile.
        unsafe { std::ptr::copy_nonoverlapping(from.base().0, into.base().0, from.len()) }
    }

    #[test]
    fn what_a_run_writes_is_what_the_owner_reads_also_after_it_was_moved() {
        for group in [GROUP, GROUP + 1] {
            let (input, mut buffered, mut owned) = (vec![1u32, 2, 3, 4], buffer(4), vec![9u32; 4]);
            let (from, into) = (source(&input, group), destination(&mut buffered, group));
            let further = destination(&mut owned, group);
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
        let (mut array, mut buffered) = ([5u8; 10], buffer(10));
        for whole in [destination(&mut array, GROUP), first_of(&mut buffered, GROUP, 2)] {
            let inner = part(&whole, 2..4);
            assert_eq!(inner.base().0 as usize - whole.base().0 as usize, 2);
            let found = place_in(&inner, &whole);
            assert_eq!(found, matches!(whole, Bytes::Private { .. }).then_some(2..4));
            assert!(place_in(&whole, &inner).is_none());
        }
        let mut other = [8u8; 2];
        let whole = destination(&mut array, GROUP);
        copy(&destination(&mut other, GROUP), &part(&whole, 2..4));
        assert_eq!(array, [5, 5, 8, 8, 5, 5, 5, 5, 5, 5]);
    }
}

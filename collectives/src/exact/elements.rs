//! Elements of a call, accessed by their addresses: input and output may be the same memory, or one
//! may be a part of the other.
#![allow(unsafe_code)]

use std::marker::PhantomData;
use std::ops::Range;

use crate::engine::Bytes;

/// Elements of a caller's memory, for the time of a call.
///
/// **Invariant:** the memory is host memory, holds `len` aligned elements, and is the caller's
/// until the call returns. Nobody else touches it, because exact calls work on copies.
#[derive(Clone, Copy)]
pub(crate) struct Elements<'a, T> {
    base: *mut T,
    len: usize,
    _memory: PhantomData<&'a Bytes>,
}

impl<'a, T: bytemuck::Pod> Elements<'a, T> {
    pub(crate) fn of(bytes: &'a Bytes) -> Self {
        let base = bytes.base().0.cast::<T>();
        assert!(base.is_aligned(), "data are aligned");
        Self { base, len: bytes.len() / size_of::<T>(), _memory: PhantomData }
    }

    pub(crate) fn len(self) -> usize {
        self.len
    }

    /// The elements of this range, in order.
    pub(crate) fn iter(self, range: Range<usize>) -> impl ExactSizeIterator<Item = T> {
        assert!(range.end <= self.len, "a block lies among the elements");
        // SAFETY: the element is aligned and inside the memory, and all bytes are a valid element;
        // see the invariant.
        range.map(move |index| unsafe { self.base.add(index).read() })
    }

    /// Stores an element at this place, if there is such a place.
    pub(crate) fn set(self, index: usize, value: T) {
        if index < self.len {
            // SAFETY: as in `iter`. Only outputs are written, which the caller may write.
            unsafe { self.base.add(index).write(value) }
        }
    }
}

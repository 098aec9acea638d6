//! What an error says of the memory that it gives back: how much there is, not what is in it. A
//! program that unwraps the error of a gradient of a billion elements prints a line, not the
//! gradient.

use std::fmt;

use super::data::{Buffer, Element};
use super::gpu::GpuBuffer;
use super::persistent::Persistent;

/// What non-blocking collectives own, in words. Sealed, as what they own is.
pub trait Summary {
    /// Writes what it is and how much.
    ///
    /// # Errors
    ///
    /// The formatter's.
    fn summarize(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result;
}

/// Has what is summarized printed.
pub(super) struct Summarized<'a, D>(pub(super) &'a D);

impl<D: Summary> fmt::Debug for Summarized<'_, D> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.summarize(formatter)
    }
}

impl Summary for () {
    fn summarize(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("()")
    }
}

impl<T: Element> Summary for Vec<T> {
    fn summarize(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "Vec<{}>({} elements)", T::DATA_TYPE, self.len())
    }
}

impl<I: Summary, O: Summary> Summary for (I, O) {
    fn summarize(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_tuple("").field(&Summarized(&self.0)).field(&Summarized(&self.1)).finish()
    }
}

macro_rules! tensors {
    ($($tensor:ident),*) => {
        $(
            impl<T: Element> Summary for Vec<$tensor<T>> {
                fn summarize(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                    let elements: usize = self.iter().map(|tensor| tensor.len()).sum();
                    let (tensor, count) = (stringify!($tensor), self.len());
                    write!(formatter, "{count} of {tensor}<{}>({elements} elements together)", T::DATA_TYPE)
                }
            }
        )*
    };
}

tensors!(Vec, Buffer, GpuBuffer);

macro_rules! short_already {
    ($($type:ty where $parameter:ident $(: $bound:ident)?),*) => {
        $(
            impl<$parameter $(: $bound)?> Summary for $type {
                fn summarize(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                    fmt::Debug::fmt(self, formatter)
                }
            }
        )*
    };
}

short_already!(
    Buffer<T> where T: Element,
    GpuBuffer<T> where T: Element,
    Persistent<D> where D
);

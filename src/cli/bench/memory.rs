//! The memory that is measured: what peers reach, or what a caller happens to have.

use std::fmt;
use std::str::FromStr;

use pleach::transport::Slice;
use pleach::{Buffer, CollectiveError, Data, DataMut, Element, Group};

/// Where the data of a collective is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MemoryKind {
    /// Registered with the group: peers reach it.
    Registered,
    /// Any memory of the process.
    Slice,
}

impl FromStr for MemoryKind {
    type Err = &'static str;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        match name {
            "registered" => Ok(Self::Registered),
            "slice" => Ok(Self::Slice),
            _ => Err("there are registered slice"),
        }
    }
}

impl fmt::Display for MemoryKind {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Registered => "registered",
            Self::Slice => "slice",
        })
    }
}

/// Elements in memory of either kind.
pub(super) enum Space<T: Element> {
    Registered(Buffer<T>),
    Slice(Vec<T>),
}

impl<T: Element> Space<T> {
    /// So many elements, all zero.
    pub(super) fn new(group: &Group, kind: MemoryKind, len: usize) -> Result<Self, CollectiveError> {
        Ok(match kind {
            MemoryKind::Registered => Self::Registered(group.buffer(len)?),
            MemoryKind::Slice => Self::Slice(vec![T::zeroed(); len]),
        })
    }
}

impl<T: Element> Data for Space<T> {
    type Element = T;

    fn elements(&self) -> &[T] {
        match self {
            Self::Registered(buffer) => buffer,
            Self::Slice(elements) => elements,
        }
    }

    fn registered(&self, group: u64) -> Option<&Slice> {
        match self {
            Self::Registered(buffer) => buffer.registered(group),
            Self::Slice(_) => None,
        }
    }
}

impl<T: Element> DataMut for Space<T> {
    fn elements_mut(&mut self) -> &mut [T] {
        match self {
            Self::Registered(buffer) => buffer,
            Self::Slice(elements) => elements,
        }
    }
}

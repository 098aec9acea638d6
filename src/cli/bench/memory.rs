//! The memory that is measured: what peers reach, what a caller happens to have, or a GPU's.

use std::fmt;
use std::str::FromStr;

use pleach::collectives::{GpuBuffer, SplitError};
use pleach::transport;
use pleach::transport::cuda::{CudaError, Gpu, gpus};
use pleach::{Buffer, CollectiveError, Element, Group, Rank};

/// Where the data of a collective is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MemoryKind {
    /// Registered with the group: peers reach it.
    Registered,
    /// Any memory of the process.
    Slice,
    /// A GPU's: of this number on every rank, or of the one that is a rank's turn on its host.
    Cuda(Option<u32>),
}

const KNOWN: &str = "there are registered (or host) slice cuda cuda:N";

impl FromStr for MemoryKind {
    type Err = &'static str;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        match name {
            "registered" | "host" => Ok(Self::Registered),
            "slice" => Ok(Self::Slice),
            "cuda" => Ok(Self::Cuda(None)),
            _ => match name.strip_prefix("cuda:").map(str::parse) {
                Some(Ok(ordinal)) => Ok(Self::Cuda(Some(ordinal))),
                _ => Err(KNOWN),
            },
        }
    }
}

impl fmt::Display for MemoryKind {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Registered => formatter.write_str("registered"),
            Self::Slice => formatter.write_str("slice"),
            Self::Cuda(None) => formatter.write_str("cuda"),
            Self::Cuda(Some(ordinal)) => write!(formatter, "cuda:{ordinal}"),
        }
    }
}

/// Why there is no group for a GPU's memory.
#[derive(Debug, thiserror::Error)]
pub(super) enum NoGpuGroup {
    #[error("no GPU memory: {0}")]
    Driver(#[from] CudaError),
    #[error("no GPU memory: {0}")]
    Split(#[from] SplitError),
}

impl MemoryKind {
    /// Whether this process has such memory at all.
    pub(super) fn expect_there(self) -> Result<(), NoGpuGroup> {
        if let Self::Cuda(ordinal) = self {
            Gpu::open(ordinal.unwrap_or(0))?;
        }
        Ok(())
    }

    /// The group that works on this memory: the same one for the host's. Of several GPUs each rank
    /// of a host has its turn.
    pub(super) fn group(self, group: &Group, local_rank: Option<Rank>) -> Result<Group, NoGpuGroup> {
        let Self::Cuda(ordinal) = self else { return Ok(group.clone()) };
        let ordinal = match ordinal {
            Some(ordinal) => ordinal,
            // Where there is none, the one that is asked for is told to be missing.
            None => local_rank.unwrap_or(group.rank()) % gpus()?.max(1),
        };
        Ok(group.in_memory(transport::Space::Gpu { ordinal })?)
    }
}

/// Elements in memory of either kind.
pub(super) enum Space<T: Element> {
    Registered(Buffer<T>),
    Slice(Vec<T>),
    /// On a GPU, with the host's copy, which is filled and looked at.
    Gpu(GpuBuffer<T>, Vec<T>),
}

impl<T: Element> Space<T> {
    /// So many elements, all zero.
    pub(super) fn new(group: &Group, kind: MemoryKind, len: usize) -> Result<Self, CollectiveError> {
        Ok(match kind {
            MemoryKind::Registered => Self::Registered(group.buffer(len)?),
            MemoryKind::Slice => Self::Slice(vec![T::zeroed(); len]),
            MemoryKind::Cuda(_) => Self::Gpu(group.gpu_buffer(len)?, vec![T::zeroed(); len]),
        })
    }

    /// Brings what was filled in to where the collective works on it.
    pub(super) fn send_in(&mut self) -> Result<(), CollectiveError> {
        match self {
            Self::Gpu(buffer, elements) => buffer.store(elements),
            _ => Ok(()),
        }
    }

    /// Brings what the collective left to where it is looked at.
    pub(super) fn bring_back(&mut self) -> Result<(), CollectiveError> {
        match self {
            Self::Gpu(buffer, elements) => buffer.load(elements),
            _ => Ok(()),
        }
    }

    /// The elements, or the host's copy of them.
    pub(super) fn elements(&self) -> &[T] {
        match self {
            Self::Registered(buffer) => buffer,
            Self::Slice(elements) | Self::Gpu(_, elements) => elements,
        }
    }

    /// The same, to be filled.
    pub(super) fn elements_mut(&mut self) -> &mut [T] {
        match self {
            Self::Registered(buffer) => buffer,
            Self::Slice(elements) | Self::Gpu(_, elements) => elements,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_of_memory_are_read_as_they_are_written() {
        for kind in
            [MemoryKind::Registered, MemoryKind::Slice, MemoryKind::Cuda(None), MemoryKind::Cuda(Some(3))]
        {
            assert_eq!(kind.to_string().parse(), Ok(kind));
        }
        assert_eq!("host".parse(), Ok(MemoryKind::Registered));
        for broken in ["", "gpu", "cuda:", "cuda:x", "cuda:-1", "cuda:99999999999"] {
            assert_eq!(broken.parse::<MemoryKind>(), Err(KNOWN), "{broken}");
        }
    }
}

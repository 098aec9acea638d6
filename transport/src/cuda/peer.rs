//! Memory of a GPU that another process of this host allocated and handed over.

use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};

use super::driver::CudaError;
use super::gpu::{Gpu, GpuId};
use super::memory::{Allocation, Range};

/// Another process's memory, at an address of this one's GPU. Valid while held.
pub struct Imported {
    gpu: Arc<Gpu>,
    range: Range,
    /// What is behind the addresses.
    allocation: Mutex<Option<Allocation>>,
}

impl std::fmt::Debug for Imported {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "Imported({} bytes on GPU {})", self.range.bytes, self.gpu.ordinal())
    }
}

impl Imported {
    /// Maps all `bytes` of the allocation behind a descriptor that a process with that GPU
    /// exported, for kernels of `reader`. The driver refuses a descriptor that is not one of its
    /// own, and a length that is not the allocation's.
    ///
    /// # Errors
    ///
    /// This process does not see the GPU, `reader` does not reach it, or what the driver says.
    pub fn new(reader: &Arc<Gpu>, gpu: GpuId, file: BorrowedFd<'_>, bytes: usize) -> Result<Self, CudaError> {
        let other = Gpu::find(gpu)?;
        if !reader.reaches(other)? {
            return Err(CudaError::NoPeerAccess { ordinal: reader.ordinal(), other });
        }
        let allocation = Allocation::import(reader, file)?;
        let range = Range::reserve(reader, bytes)?;
        range.map(&allocation)?;
        Ok(Self { gpu: reader.clone(), range, allocation: Mutex::new(Some(allocation)) })
    }

    /// Address of the first byte, for kernels and copies of the GPU.
    #[must_use]
    pub fn base(&self) -> NonNull<u8> {
        self.range.base
    }

    /// Keeps the addresses, and the bytes where the GPU has room for a copy, and reaches the other
    /// process no more.
    ///
    /// # Errors
    ///
    /// [`CudaError::Late`]: the GPU has not copied within a limit, and the memory is as it was.
    pub fn detach(&self) -> Result<(), CudaError> {
        let mut allocation = self.allocation.lock().unwrap_or_else(PoisonError::into_inner);
        *allocation = self.range.detach(&self.gpu)?;
        Ok(())
    }
}

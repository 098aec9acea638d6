//! GPU memory that another process of this host allocated and shared.

use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex};

use super::driver::CudaError;
use super::gpu::{Gpu, GpuId};
use super::memory::{AddressRange, Allocation};
use crate::mutex::lock;

/// Another process's memory, at an address for this process's GPU. Valid while held.
pub struct ImportedMemory {
    gpu: Arc<Gpu>,
    range: AddressRange,
    /// The allocation at the addresses.
    allocation: Mutex<Option<Allocation>>,
}

impl std::fmt::Debug for ImportedMemory {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "Imported({} bytes on GPU {})", self.range.bytes, self.gpu.ordinal())
    }
}

impl ImportedMemory {
    /// Maps all `bytes` of the allocation of a descriptor that a process with that GPU exported,
    /// for kernels of `reader`. The driver refuses a descriptor that is not its own, and a length
    /// that is not the allocation's.
    ///
    /// # Errors
    ///
    /// This process does not see the GPU, `reader` cannot access it, or the driver's error.
    pub fn new(reader: &Arc<Gpu>, gpu: GpuId, file: BorrowedFd<'_>, bytes: usize) -> Result<Self, CudaError> {
        let other = Gpu::find(gpu)?;
        if !reader.reaches(other)? {
            return Err(CudaError::NoPeerAccess { ordinal: reader.ordinal(), other });
        }
        let allocation = Allocation::import(reader, file)?;
        let range = AddressRange::reserve(reader, bytes)?;
        range.map(&allocation)?;
        Ok(Self { gpu: reader.clone(), range, allocation: Mutex::new(Some(allocation)) })
    }

    /// Address of the first byte, for kernels and copies of the GPU.
    #[must_use]
    pub fn base(&self) -> NonNull<u8> {
        self.range.base
    }

    /// Keeps the addresses, and the bytes if the GPU has room for a copy; later writes of the other
    /// process are not visible.
    ///
    /// # Errors
    ///
    /// [`CudaError::Late`]: the GPU has not copied within a limit, and the memory is as it was.
    pub fn detach(&self) -> Result<(), CudaError> {
        let mut allocation = lock(&self.allocation);
        *allocation = self.range.detach(&self.gpu)?;
        Ok(())
    }
}

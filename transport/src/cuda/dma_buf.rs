//! A dma-buf of GPU memory, for NIC drivers.

use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};

use cudarc::driver::sys;

use super::driver::CudaError;
use super::memory::CudaMemory;
use crate::memory::Memory;

/// A dma-buf of GPU memory, for `ibv_reg_dmabuf_mr` and the like. The pages stay while it, or a
/// registration of it, is open; nevertheless the memory should outlive it.
#[derive(Debug)]
pub struct CudaDmaBuf {
    file: OwnedFd,
    offset: u64,
    len: usize,
}

impl CudaDmaBuf {
    /// A dma-buf of a whole memory.
    ///
    /// Source: CUDA driver API, `cuMemGetHandleForAddressRange`: address and length are whole pages
    /// of the host.
    ///
    /// # Errors
    ///
    /// The GPU, its driver or the kernel (5.12 or newer) has no dma-bufs, or the driver's error.
    pub fn new(memory: &CudaMemory) -> Result<Self, CudaError> {
        let gpu = memory.gpu();
        if !gpu.has_dma_buf() {
            return Err(CudaError::Unable {
                ordinal: gpu.ordinal(),
                ability: "name its memory by a dma-buf (that takes NVIDIA's open kernel modules, driver 515 or newer, and Linux 5.12 or newer); load nvidia-peermem, or stage through host memory",
            });
        }
        let _context = gpu.bind()?;
        // Allocations begin at whole pages and consist of them.
        let bytes = memory.len().max(1).next_multiple_of(rustix::param::page_size());
        let address = memory.base().as_ptr() as u64;
        let mut file: i32 = -1;
        let kind = sys::CUmemRangeHandleType::CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD;
        // SAFETY: the function is there, as `has_dma_buf` says; for this kind of handle it writes
        // one int.
        let code =
            unsafe { sys::cuMemGetHandleForAddressRange((&raw mut file).cast(), address, bytes, kind, 0) };
        gpu.check("cuMemGetHandleForAddressRange", code)?;
        // SAFETY: a new descriptor, which is ours.
        let file = unsafe { OwnedFd::from_raw_fd(file) };
        super::memory::close_on_exec(&file);
        Ok(Self { file, offset: 0, len: memory.len() })
    }

    /// The descriptor.
    #[must_use]
    pub fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// Offset of the memory in it, in bytes.
    #[must_use]
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// Length of the memory in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

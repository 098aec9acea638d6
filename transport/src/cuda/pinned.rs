//! Host memory that a GPU reaches: where bytes change between a fabric of host memory and kernels.

use std::ptr::NonNull;
use std::sync::Arc;

use cudarc::driver::sys;

use super::driver::CudaError;
use super::gpu::Gpu;
use crate::memory::{Memory, Share, Space};

/// Host memory whose pages are locked and that kernels and copies of the GPU reach at its own
/// addresses. It is registered with devices as the memory under it is.
pub struct Pinned {
    gpu: Arc<Gpu>,
    memory: Arc<dyn Memory>,
}

impl std::fmt::Debug for Pinned {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "Pinned({} bytes for GPU {})", self.memory.len(), self.gpu.ordinal())
    }
}

impl Pinned {
    /// Pins host memory for as long as the value lives.
    ///
    /// # Errors
    ///
    /// It is not host memory, the GPU cannot reach host memory at the host's addresses, or the
    /// driver refuses (a limit of locked memory, `ulimit -l`, does not apply to it).
    pub fn new(gpu: &Arc<Gpu>, memory: Arc<dyn Memory>) -> Result<Arc<Self>, CudaError> {
        if memory.space() != Space::Host {
            return Err(CudaError::Unable {
                ordinal: gpu.ordinal(),
                what: "pin memory that is not the host's",
            });
        }
        if !memory.is_empty() {
            let _bound = gpu.bind()?;
            // Portable: for all GPUs; mapped: for kernels, not for copies alone.
            let flags = sys::CU_MEMHOSTREGISTER_PORTABLE | sys::CU_MEMHOSTREGISTER_DEVICEMAP;
            let base = memory.base().as_ptr();
            // SAFETY: the memory is readable and writable at this address until it is dropped,
            // which is after `cuMemHostUnregister`.
            let code = unsafe { sys::cuMemHostRegister_v2(base.cast(), memory.len(), flags) };
            gpu.check_room("cuMemHostRegister", code, memory.len())?;
        }
        let pinned = Arc::new(Self { gpu: gpu.clone(), memory });
        if !pinned.is_at_host_addresses()? {
            return Err(CudaError::Unable {
                ordinal: gpu.ordinal(),
                what: "reach host memory at the host's own addresses",
            });
        }
        Ok(pinned)
    }

    fn is_at_host_addresses(&self) -> Result<bool, CudaError> {
        if self.memory.is_empty() {
            return Ok(true);
        }
        let _bound = self.gpu.bind()?;
        let mut address: u64 = 0;
        let base = self.memory.base().as_ptr() as u64;
        let attribute = sys::CUpointer_attribute_enum::CU_POINTER_ATTRIBUTE_DEVICE_POINTER;
        // SAFETY: of this attribute it writes one address.
        let code = unsafe { sys::cuPointerGetAttribute((&raw mut address).cast(), attribute, base) };
        self.gpu.check("cuPointerGetAttribute", code)?;
        Ok(address == base)
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if !self.memory.is_empty()
            && let Ok(_bound) = self.gpu.bind()
        {
            // SAFETY: registered by `new`, once.
            unsafe { sys::cuMemHostUnregister(self.memory.base().as_ptr().cast()) };
        }
    }
}

// SAFETY: the memory under it, which it holds.
unsafe impl Memory for Pinned {
    fn base(&self) -> NonNull<u8> {
        self.memory.base()
    }
    fn len(&self) -> usize {
        self.memory.len()
    }
    fn space(&self) -> Space {
        Space::Host
    }
    fn share(&self) -> Share<'_> {
        self.memory.share()
    }
}

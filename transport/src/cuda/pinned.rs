//! Host memory that a GPU can access: the staging memory between host fabrics and kernels.

use std::ptr::NonNull;
use std::sync::Arc;

use cudarc::driver::sys;

use super::driver::CudaError;
use super::gpu::Gpu;
use crate::memory::{Memory, Share, Space};

/// Page-locked host memory, which kernels and copies of the GPU access at its own addresses.
/// Devices register it as the memory that it contains.
pub struct PinnedMemory {
    gpu: Arc<Gpu>,
    memory: Arc<dyn Memory>,
}

impl std::fmt::Debug for PinnedMemory {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "Pinned({} bytes for GPU {})", self.memory.len(), self.gpu.ordinal())
    }
}

impl PinnedMemory {
    /// Locks host memory for as long as the value lives.
    ///
    /// # Errors
    ///
    /// It is not host memory, the GPU cannot access host memory at the host's addresses, or the
    /// driver's error (the limit of locked memory, `ulimit -l`, does not apply).
    pub fn new(gpu: &Arc<Gpu>, memory: Arc<dyn Memory>) -> Result<Arc<Self>, CudaError> {
        if memory.space() != Space::Host {
            return Err(CudaError::Unable {
                ordinal: gpu.ordinal(),
                ability: "pin memory that is not the host's",
            });
        }
        if !memory.is_empty() {
            let _context = gpu.bind()?;
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
                ability: "reach host memory at the host's own addresses",
            });
        }
        Ok(pinned)
    }

    fn is_at_host_addresses(&self) -> Result<bool, CudaError> {
        if self.memory.is_empty() {
            return Ok(true);
        }
        let _context = self.gpu.bind()?;
        let mut address: u64 = 0;
        let base = self.memory.base().as_ptr() as u64;
        let attribute = sys::CUpointer_attribute_enum::CU_POINTER_ATTRIBUTE_DEVICE_POINTER;
        // SAFETY: for this attribute it writes one address.
        let code = unsafe { sys::cuPointerGetAttribute((&raw mut address).cast(), attribute, base) };
        self.gpu.check("cuPointerGetAttribute", code)?;
        Ok(address == base)
    }
}

impl Drop for PinnedMemory {
    fn drop(&mut self) {
        if !self.memory.is_empty()
            && let Ok(_context) = self.gpu.bind()
        {
            // SAFETY: registered by `new`, once.
            unsafe { sys::cuMemHostUnregister(self.memory.base().as_ptr().cast()) };
        }
    }
}

// SAFETY: the memory that it contains and holds.
unsafe impl Memory for PinnedMemory {
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
    fn peers_may_write(&self) -> bool {
        self.memory.peers_may_write()
    }
}

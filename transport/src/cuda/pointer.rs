//! GPU memory of another allocator.

use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;

use cudarc::driver::sys;

use super::driver::CudaError;
use super::gpu::Gpu;
use super::memory::copy;

/// GPU memory that its owner frees, for example a framework. It is checked to be such memory, and
/// before each use to be the same allocation: an error that the driver can detect is reported.
///
/// Other processes cannot map it: a mapping by a legacy handle (`cuIpcOpenMemHandle`) could not be
/// revoked when a peer is severed, because the allocation cannot be replaced. It is copied to
/// memory that can.
#[derive(Clone, Debug)]
pub struct ForeignMemory {
    gpu: Arc<Gpu>,
    base: NonNull<u8>,
    len: usize,
    /// The driver's number of the allocation, unique in the process.
    allocation: u64,
}

// SAFETY: an address; only the GPU accesses the memory there.
unsafe impl Send for ForeignMemory {}
// SAFETY: as above.
unsafe impl Sync for ForeignMemory {}

impl ForeignMemory {
    /// `len` bytes at this address.
    ///
    /// # Errors
    ///
    /// [`CudaError::NotDeviceMemory`] when they are not memory of that GPU.
    ///
    /// # Safety
    ///
    /// All `len` bytes belong to the allocation, and until the value and its clones are dropped
    /// they are the caller's: neither freed nor given to another user, as a caching allocator does
    /// without telling the driver. No other code accesses them while an operation on them is under
    /// way.
    pub unsafe fn new(gpu: &Arc<Gpu>, address: *mut u8, len: usize) -> Result<Self, CudaError> {
        let (ordinal, number) = (gpu.ordinal(), address as u64);
        let not_ours = || CudaError::NotDeviceMemory { ordinal, address: number };
        let base = NonNull::new(address).ok_or_else(not_ours)?;
        let allocation = allocation_of(gpu, number)?.ok_or_else(not_ours)?;
        Ok(Self { gpu: gpu.clone(), base, len, allocation })
    }

    /// Its GPU.
    #[must_use]
    pub fn gpu(&self) -> &Arc<Gpu> {
        &self.gpu
    }

    /// Address of the first byte.
    #[must_use]
    pub fn base(&self) -> NonNull<u8> {
        self.base
    }

    /// Length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Copies host bytes over its first bytes; returns after the copy.
    ///
    /// # Errors
    ///
    /// It was freed, not within `limit`, or the driver's error.
    ///
    /// # Panics
    ///
    /// When `bytes` is longer: the caller's length check is missing.
    pub fn store(&self, bytes: &[u8], limit: Duration) -> Result<(), CudaError> {
        assert!(bytes.len() <= self.len, "{} bytes into {} of GPU memory", bytes.len(), self.len);
        self.expect_alive()?;
        // SAFETY: the memory holds that many bytes (`new`), and no other code accesses them; the
        // host's are borrowed.
        unsafe { copy(&self.gpu, bytes.as_ptr(), self.base.as_ptr(), bytes.len(), limit) }
    }

    /// Copies its first bytes; returns after the copy.
    ///
    /// # Errors
    ///
    /// As [`ForeignMemory::store`].
    ///
    /// # Panics
    ///
    /// When `bytes` is longer.
    pub fn load(&self, bytes: &mut [u8], limit: Duration) -> Result<(), CudaError> {
        assert!(bytes.len() <= self.len, "{} bytes out of {} of GPU memory", bytes.len(), self.len);
        self.expect_alive()?;
        // SAFETY: as in `store`.
        unsafe { copy(&self.gpu, self.base.as_ptr(), bytes.as_mut_ptr(), bytes.len(), limit) }
    }

    /// Checks that the allocation is still the same.
    ///
    /// # Errors
    ///
    /// [`CudaError::Freed`] when it is not.
    pub fn expect_alive(&self) -> Result<(), CudaError> {
        let address = self.base.as_ptr() as u64;
        match allocation_of(&self.gpu, address)? {
            Some(allocation) if allocation == self.allocation => Ok(()),
            _ => Err(CudaError::Freed { address }),
        }
    }
}

/// The number of the allocation at the address, if that is memory of the GPU.
fn allocation_of(gpu: &Gpu, address: u64) -> Result<Option<u64>, CudaError> {
    use sys::CUpointer_attribute_enum as Attribute;
    let (mut kind, mut ordinal, mut allocation): (u32, i32, u64) = (0, -1, 0);
    let is_device = [
        (Attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE, (&raw mut kind).cast()),
        (Attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, (&raw mut ordinal).cast()),
        (Attribute::CU_POINTER_ATTRIBUTE_BUFFER_ID, (&raw mut allocation).cast()),
    ];
    let _context = gpu.bind()?;
    for (attribute, value) in is_device {
        let value: *mut c_void = value;
        // SAFETY: each attribute is written to a value of the type that the driver documents.
        match unsafe { sys::cuPointerGetAttribute(value, attribute, address) } {
            // An address that the driver does not know.
            sys::CUresult::CUDA_ERROR_INVALID_VALUE => return Ok(None),
            code => gpu.check("cuPointerGetAttribute", code)?,
        }
    }
    let is_memory_of_gpu =
        kind == sys::CUmemorytype::CU_MEMORYTYPE_DEVICE as u32 && ordinal == gpu.ordinal() as i32;
    Ok(is_memory_of_gpu.then_some(allocation))
}

//! One GPU: its context and its abilities.

use std::collections::BTreeMap;
use std::ffi::c_int;
use std::fmt;
use std::marker::PhantomData;
use std::sync::{Arc, Mutex, Weak, mpsc};
use std::thread;
use std::time::Duration;

use cudarc::driver::sys;

use super::driver::{CudaError, describe, driver};
use crate::clock;
use crate::mutex::lock;

/// The UUID of a GPU, the same on any host and for any ordinal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct GpuId(pub [u8; 16]);

impl fmt::Display for GpuId {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("GPU-")?;
        for (index, byte) in self.0.iter().enumerate() {
            let dash = if matches!(index, 4 | 6 | 8 | 10) { "-" } else { "" };
            write!(formatter, "{dash}{byte:02x}")?;
        }
        Ok(())
    }
}

/// The GPUs whose work reads bytes that another device (a NIC) wrote into a GPU's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum FlushScope {
    /// This GPU only.
    Owner,
    /// Also other GPUs, for which peers have mapped the memory.
    AllDevices,
}

/// The flush between a NIC's write into GPU memory and a read by work that was submitted after the
/// write's completion.
///
/// Source: CUDA driver API, `CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING` and
/// `CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FlushMethod {
    /// None: the GPU orders such writes itself.
    NotNeeded,
    /// [`Gpu::flush_writes`].
    ByHost,
    /// The host cannot flush: only a read by the NIC that wrote (of the last byte, on the same
    /// queue pair) does.
    ByReadBack,
}

/// A GPU of this machine. Its primary context lives as long as the value.
pub struct Gpu {
    ordinal: u32,
    device: sys::CUdevice,
    context: sys::CUcontext,
    id: GpuId,
    name: String,
    bytes: usize,
    multiprocessors: u32,
    granularity_bytes: usize,
    can_share: bool,
    has_dma_buf: bool,
    /// Whether allocations may be made accessible to NICs.
    is_for_nics: bool,
    /// How far the GPU orders writes of NICs itself: the greater, the more.
    ordering: c_int,
    can_flush_by_host: bool,
}

/// From this ordering on a GPU's own work needs no flush, and from this one on no work does.
const ORDERED_FOR_OWN: c_int =
    sys::CUGPUDirectRDMAWritesOrdering::CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER as c_int;
const ORDERED_FOR_ALL: c_int =
    sys::CUGPUDirectRDMAWritesOrdering::CU_GPU_DIRECT_RDMA_WRITES_ORDERING_ALL_DEVICES as c_int;

// SAFETY: a context may be current on any number of threads, and the driver's functions may be
// called from all of them.
unsafe impl Send for Gpu {}
// SAFETY: as above.
unsafe impl Sync for Gpu {}

impl fmt::Debug for Gpu {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "Gpu({}, {}, {})", self.ordinal, self.name, self.id)
    }
}

/// The GPUs that are open in this process.
static OPEN: Mutex<BTreeMap<u32, Weak<Gpu>>> = Mutex::new(BTreeMap::new());

impl Gpu {
    /// The GPU of this ordinal, among those that `CUDA_VISIBLE_DEVICES` allows. All callers get the
    /// same value.
    ///
    /// # Errors
    ///
    /// No driver, no such GPU, or the driver's error.
    pub fn open(ordinal: u32) -> Result<Arc<Self>, CudaError> {
        let driver = driver()?;
        if ordinal >= driver.gpus() {
            return Err(CudaError::NoGpu { ordinal, gpus: driver.gpus() });
        }
        let mut open = lock(&OPEN);
        if let Some(gpu) = open.get(&ordinal).and_then(Weak::upgrade) {
            return Ok(gpu);
        }
        let gpu = Arc::new(Self::retain(ordinal)?);
        open.insert(ordinal, Arc::downgrade(&gpu));
        Ok(gpu)
    }

    /// The ordinal of the GPU with this id in this process. Makes no context.
    ///
    /// # Errors
    ///
    /// This process does not see it, or the driver's error.
    pub fn find(id: GpuId) -> Result<u32, CudaError> {
        for ordinal in 0..driver()?.gpus() {
            if id_of(ordinal, device(ordinal)?)? == id {
                return Ok(ordinal);
            }
        }
        Err(CudaError::UnseenGpu { gpu: id })
    }

    fn retain(ordinal: u32) -> Result<Self, CudaError> {
        let mut gpu = Self {
            ordinal,
            device: 0,
            context: std::ptr::null_mut(),
            id: GpuId([0; 16]),
            name: String::new(),
            bytes: 0,
            multiprocessors: 1,
            granularity_bytes: 0,
            can_share: false,
            has_dma_buf: false,
            is_for_nics: false,
            ordering: 0,
            can_flush_by_host: false,
        };
        let (device, mut name, mut bytes) = (device(ordinal)?, [0; 128], 0);
        // SAFETY: the driver is there (`driver()` answered); each function writes to the one value
        // that it is given, the name at most its length.
        unsafe {
            gpu.check(
                "cuDeviceGetName",
                sys::cuDeviceGetName(name.as_mut_ptr(), name.len() as c_int, device),
            )?;
            gpu.check("cuDeviceTotalMem", sys::cuDeviceTotalMem_v2(&mut bytes, device))?;
        }
        (gpu.device, gpu.bytes, gpu.id) = (device, bytes, id_of(ordinal, device)?);
        gpu.name = name.iter().take_while(|byte| **byte != 0).map(|byte| char::from(*byte as u8)).collect();
        use sys::CUdevice_attribute_enum as Attribute;
        gpu.multiprocessors =
            gpu.attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?.max(1) as u32;
        let virtual_memory =
            gpu.attribute(Attribute::CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED)?;
        if virtual_memory == 0 {
            return Err(CudaError::Unable {
                ordinal,
                ability: "manage virtual memory, which pleach's buffers are made of",
            });
        }
        gpu.can_share =
            gpu.attribute(Attribute::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED)? != 0;
        gpu.has_dma_buf = driver()?.has("cuMemGetHandleForAddressRange")
            && gpu.attribute(Attribute::CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED)? != 0;
        gpu.is_for_nics =
            gpu.attribute(Attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED)? != 0;
        gpu.ordering = gpu.attribute(Attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING)?;
        let options = gpu.attribute(Attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS)?;
        let by_host =
            sys::CUflushGPUDirectRDMAWritesOptions::CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST as c_int;
        gpu.can_flush_by_host = driver()?.has("cuFlushGPUDirectRDMAWrites") && options & by_host != 0;
        // SAFETY: as above. From here on dropping the value releases the context.
        let retained = unsafe { sys::cuDevicePrimaryCtxRetain(&mut gpu.context, device) };
        gpu.check("cuDevicePrimaryCtxRetain", retained)?;
        gpu.granularity_bytes = gpu.query_granularity()?;
        Ok(gpu)
    }

    /// Its number among those that this process sees.
    #[must_use]
    pub fn ordinal(&self) -> u32 {
        self.ordinal
    }

    /// Its UUID.
    #[must_use]
    pub fn id(&self) -> GpuId {
        self.id
    }

    /// Its model.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its memory, in bytes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The number of its multiprocessors.
    #[must_use]
    pub fn multiprocessors(&self) -> u32 {
        self.multiprocessors
    }

    /// Whether its memory can be shared with other processes as a file descriptor.
    #[must_use]
    pub fn can_share(&self) -> bool {
        self.can_share
    }

    /// Whether its memory can be exported as a dma-buf, which NIC drivers accept without a module
    /// of NVIDIA's.
    #[must_use]
    pub fn has_dma_buf(&self) -> bool {
        self.has_dma_buf
    }

    /// The flush that a read in this scope needs after a NIC's write.
    #[must_use]
    pub fn flush(&self, scope: FlushScope) -> FlushMethod {
        let ordered = match scope {
            FlushScope::Owner => ORDERED_FOR_OWN,
            FlushScope::AllDevices => ORDERED_FOR_ALL,
        };
        match self.can_flush_by_host {
            _ if self.ordering >= ordered => FlushMethod::NotNeeded,
            true => FlushMethod::ByHost,
            false => FlushMethod::ByReadBack,
        }
    }

    /// Makes NIC writes into this GPU's memory, whose completions this thread has seen, visible to
    /// work in this scope that is submitted from now on. The signal of such a write is raised after
    /// this (contract line 1).
    ///
    /// # Errors
    ///
    /// The host cannot flush ([`FlushMethod::ByReadBack`]), or the driver's error.
    pub fn flush_writes(&self, scope: FlushScope) -> Result<(), CudaError> {
        use sys::CUflushGPUDirectRDMAWritesScope as Scope;
        let driver_scope = match scope {
            FlushScope::Owner => Scope::CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER,
            FlushScope::AllDevices => Scope::CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_ALL_DEVICES,
        };
        match self.flush(scope) {
            FlushMethod::NotNeeded => Ok(()),
            FlushMethod::ByReadBack => Err(CudaError::Unable {
                ordinal: self.ordinal,
                ability: "flush GPUDirect writes from the host; read the last byte back on the queue pair that wrote",
            }),
            FlushMethod::ByHost => {
                let _context = self.bind()?;
                // SAFETY: the function is there, as `flush` says, and the context is current.
                let code = unsafe {
                    sys::cuFlushGPUDirectRDMAWrites(
                        sys::CUflushGPUDirectRDMAWritesTarget::CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX,
                        driver_scope,
                    )
                };
                self.check("cuFlushGPUDirectRDMAWrites", code)
            }
        }
    }

    /// Whether its kernels can access memory of the GPU of this ordinal, which may be itself.
    ///
    /// # Errors
    ///
    /// The driver's error.
    pub fn reaches(&self, other: u32) -> Result<bool, CudaError> {
        if self.ordinal == other {
            return Ok(true);
        }
        if !driver()?.has("cuDeviceCanAccessPeer") {
            return Ok(false);
        }
        let mut reaches = 0;
        // SAFETY: the function is there, as the driver says; it writes one int.
        let code = unsafe { sys::cuDeviceCanAccessPeer(&mut reaches, self.device, device(other)?) };
        self.check("cuDeviceCanAccessPeer", code)?;
        Ok(reaches != 0)
    }

    /// The properties of allocations on this GPU.
    pub(super) fn properties(&self) -> sys::CUmemAllocationProp {
        let handle = if self.can_share {
            sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        } else {
            sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_NONE
        };
        // SAFETY: plain numbers and a null pointer, for which zero is valid.
        let mut properties: sys::CUmemAllocationProp = unsafe { std::mem::zeroed() };
        properties.type_ = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
        properties.requestedHandleTypes = handle;
        properties.location.type_ = sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
        properties.location.id = self.device;
        properties.allocFlags.gpuDirectRDMACapable = u8::from(self.is_for_nics);
        properties
    }

    /// Read and write access for kernels of this GPU.
    pub(super) fn access(&self) -> sys::CUmemAccessDesc {
        sys::CUmemAccessDesc {
            location: self.properties().location,
            flags: sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        }
    }

    /// Sizes of allocations and mappings are multiples of this, in bytes.
    pub(super) fn granularity_bytes(&self) -> usize {
        self.granularity_bytes
    }

    fn query_granularity(&self) -> Result<usize, CudaError> {
        let (mut bytes, properties) = (0, self.properties());
        let option = sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_RECOMMENDED;
        // SAFETY: it reads the properties and writes one number.
        let code = unsafe { sys::cuMemGetAllocationGranularity(&mut bytes, &properties, option) };
        self.check("cuMemGetAllocationGranularity", code)?;
        Ok(bytes.max(1))
    }

    fn attribute(&self, attribute: sys::CUdevice_attribute) -> Result<c_int, CudaError> {
        let mut value = 0;
        // SAFETY: it writes one int.
        let code = unsafe { sys::cuDeviceGetAttribute(&mut value, attribute, self.device) };
        self.check("cuDeviceGetAttribute", code)?;
        Ok(value)
    }

    /// Makes its context this thread's current one until the result is dropped.
    pub(super) fn bind(&self) -> Result<ContextGuard, CudaError> {
        let mut before = std::ptr::null_mut();
        // SAFETY: it writes one pointer.
        self.check("cuCtxGetCurrent", unsafe { sys::cuCtxGetCurrent(&mut before) })?;
        if before == self.context {
            return Ok(ContextGuard { before: None, _thread: PhantomData });
        }
        // SAFETY: the context is retained while `self` lives.
        self.check("cuCtxSetCurrent", unsafe { sys::cuCtxSetCurrent(self.context) })?;
        Ok(ContextGuard { before: Some(before), _thread: PhantomData })
    }

    /// Waits until the GPU has done all that this process has given it, in whatever stream.
    ///
    /// # Errors
    ///
    /// [`CudaError::Late`] when that takes longer than `limit`, or the driver's error.
    pub(super) fn synchronize(self: &Arc<Self>, limit: Duration) -> Result<(), CudaError> {
        let (began, gpu) = (clock::now(), self.clone());
        let (sender, receiver) = mpsc::sync_channel(1);
        // The driver's wait has no limit, so another thread waits. It ends with the GPU's work.
        let waiting = thread::Builder::new().name("pleach-gpu-wait".to_owned()).spawn(move || {
            let outcome = gpu.bind().and_then(|_context| {
                // SAFETY: the context is current.
                gpu.check("cuCtxSynchronize", unsafe { sys::cuCtxSynchronize() })
            });
            // An error: nobody waits any more.
            let _ = sender.send(outcome);
        });
        let late = || CudaError::Late { ordinal: self.ordinal, waited: clock::now().since(began) };
        waiting.map_err(|error| {
            tracing::warn!(%error, "no thread can be started that waits for the GPU");
            late()
        })?;
        receiver.recv_timeout(limit).map_err(|_| late())?
    }

    /// The result of a driver call about this GPU.
    pub(super) fn check(&self, call: &'static str, code: sys::CUresult) -> Result<(), CudaError> {
        check(self.ordinal, call, code)
    }

    /// The same for a call that requests `bytes` bytes of memory.
    pub(super) fn check_room(
        &self,
        call: &'static str,
        code: sys::CUresult,
        bytes: usize,
    ) -> Result<(), CudaError> {
        if code == sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY {
            return Err(CudaError::OutOfMemory { ordinal: self.ordinal, bytes });
        }
        self.check(call, code)
    }
}

/// The driver's handle of a GPU.
fn device(ordinal: u32) -> Result<sys::CUdevice, CudaError> {
    let mut device = 0;
    // SAFETY: the driver is there (the callers asked); it writes one number.
    check(ordinal, "cuDeviceGet", unsafe { sys::cuDeviceGet(&mut device, ordinal as c_int) })?;
    Ok(device)
}

fn id_of(ordinal: u32, device: sys::CUdevice) -> Result<GpuId, CudaError> {
    let mut id = sys::CUuuid { bytes: [0; 16] };
    // SAFETY: as above; it writes 16 bytes.
    check(ordinal, "cuDeviceGetUuid", unsafe { sys::cuDeviceGetUuid_v2(&mut id, device) })?;
    Ok(GpuId(id.bytes.map(|byte| byte as u8)))
}

fn check(ordinal: u32, call: &'static str, code: sys::CUresult) -> Result<(), CudaError> {
    if code == sys::CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    Err(CudaError::Call { call, ordinal, code: describe(code) })
}

impl Drop for Gpu {
    fn drop(&mut self) {
        if !self.context.is_null() {
            // SAFETY: retained once by this value; objects of the context hold the value, so they
            // are gone.
            unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.device) };
        }
    }
}

/// A context is this thread's current one; dropping the guard restores the previous one.
pub(super) struct ContextGuard {
    before: Option<sys::CUcontext>,
    /// Of this thread.
    _thread: PhantomData<*const ()>,
}

impl Drop for ContextGuard {
    fn drop(&mut self) {
        if let Some(before) = self.before {
            // SAFETY: it was current before, and who made it so keeps it.
            unsafe { sys::cuCtxSetCurrent(before) };
        }
    }
}

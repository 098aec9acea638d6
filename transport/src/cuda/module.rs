//! Kernels: PTX that the driver compiles for the GPU.

use std::ffi::{CStr, CString, c_void};
use std::sync::Arc;

use cudarc::driver::sys;

use super::driver::CudaError;
use super::gpu::Gpu;
use super::stream::Stream;

/// Threads of a block.
const BLOCK_THREADS: u32 = 256;

/// A loaded module of kernels.
pub struct Module {
    gpu: Arc<Gpu>,
    raw: sys::CUmodule,
}

// SAFETY: modules may be used from any thread.
unsafe impl Send for Module {}
// SAFETY: as above.
unsafe impl Sync for Module {}

impl std::fmt::Debug for Module {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "Module({:p} on GPU {})", self.raw, self.gpu.ordinal())
    }
}

impl Module {
    /// The kernels of a PTX text. The driver compiles it, and caches the result for later processes
    /// (`CUDA_CACHE_PATH`).
    ///
    /// # Errors
    ///
    /// The driver's error.
    pub fn new(gpu: &Arc<Gpu>, ptx: &CStr) -> Result<Arc<Self>, CudaError> {
        let _context = gpu.bind()?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: the context is current; the text ends with zero; it writes one pointer.
        let code = unsafe { sys::cuModuleLoadData(&mut raw, ptx.as_ptr().cast()) };
        gpu.check("cuModuleLoadData", code)?;
        Ok(Arc::new(Self { gpu: gpu.clone(), raw }))
    }

    /// Its GPU.
    #[must_use]
    pub fn gpu(&self) -> &Arc<Gpu> {
        &self.gpu
    }

    /// The kernel of this name.
    ///
    /// # Errors
    ///
    /// The driver's error; `CUDA_ERROR_NOT_FOUND` if there is no such kernel.
    ///
    /// # Panics
    ///
    /// When the name contains a zero.
    pub fn kernel(self: &Arc<Self>, name: &str) -> Result<Kernel, CudaError> {
        let name = CString::new(name).expect("names of kernels hold no zero");
        let _context = self.gpu.bind()?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: the module is loaded; the name ends with zero; it writes one pointer.
        let code = unsafe { sys::cuModuleGetFunction(&mut raw, self.raw, name.as_ptr()) };
        self.gpu.check("cuModuleGetFunction", code)?;
        Ok(Kernel { module: self.clone(), raw })
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        if let Ok(_context) = self.gpu.bind() {
            // SAFETY: loaded by `new`, unloaded once; kernels of it hold it.
            unsafe { sys::cuModuleUnload(self.raw) };
        }
    }
}

/// A kernel of a module, with one argument.
#[derive(Clone)]
pub struct Kernel {
    module: Arc<Module>,
    raw: sys::CUfunction,
}

// SAFETY: functions may be used from any thread.
unsafe impl Send for Kernel {}
// SAFETY: as above.
unsafe impl Sync for Kernel {}

impl std::fmt::Debug for Kernel {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "Kernel({:p} of {:?})", self.raw, self.module)
    }
}

impl Kernel {
    /// Launches it in a stream of the same GPU, with about a thread for each of `pieces` pieces of
    /// work. There are never more blocks than keep the GPU busy, so a thread may have several
    /// pieces.
    ///
    /// # Safety
    ///
    /// `argument` is what the kernel expects, and the memory that it names may be accessed by the
    /// kernel until the stream has passed it.
    ///
    /// # Errors
    ///
    /// The driver's error.
    pub unsafe fn launch<A>(&self, stream: &Stream, pieces: u64, argument: &A) -> Result<(), CudaError> {
        /// Blocks of 256 threads that a multiprocessor holds at once.
        const BLOCKS_A_MULTIPROCESSOR: u32 = 8;
        let gpu = &self.module.gpu;
        let _context = gpu.bind()?;
        let most = u64::from(gpu.multiprocessors() * BLOCKS_A_MULTIPROCESSOR);
        let blocks = pieces.div_ceil(u64::from(BLOCK_THREADS)).clamp(1, most) as u32;
        let mut arguments = [std::ptr::from_ref(argument).cast_mut().cast::<c_void>()];
        // SAFETY: by this function's contract; the driver copies the argument before it returns.
        let code = unsafe {
            sys::cuLaunchKernel(
                self.raw,
                blocks,
                1,
                1,
                BLOCK_THREADS,
                1,
                1,
                0,
                stream.raw(),
                arguments.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        };
        gpu.check("cuLaunchKernel", code)
    }
}

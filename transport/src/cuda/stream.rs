//! Orders of work on a GPU, and places in them.

use std::ffi::c_void;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use cudarc::driver::sys;

use super::driver::CudaError;
use super::gpu::Gpu;
use crate::{clock, last_resort};

/// How long [`Stream::settle`] waits for what pleach itself put into a stream: copies and kernels
/// over bounded bytes.
const SETTLE_LIMIT: Duration = Duration::from_secs(60);

/// Work that a GPU does in the order in which it was put in. A cheap handle: clones are the same
/// stream.
#[derive(Clone)]
pub struct Stream {
    handle: Arc<Handle>,
}

struct Handle {
    gpu: Arc<Gpu>,
    raw: sys::CUstream,
    is_owned: bool,
}

// SAFETY: streams may be used from any thread.
unsafe impl Send for Handle {}
// SAFETY: as above; the driver locks.
unsafe impl Sync for Handle {}

impl fmt::Debug for Stream {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "Stream({:p} on GPU {})", self.raw(), self.gpu().ordinal())
    }
}

/// Whether they are the same stream of the same GPU.
impl PartialEq for Stream {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(self.gpu(), other.gpu()) && self.raw() == other.raw()
    }
}

impl Eq for Stream {}

impl Stream {
    /// A new stream, which waits for no other (`CU_STREAM_NON_BLOCKING`).
    ///
    /// # Errors
    ///
    /// What the driver says.
    pub fn new(gpu: &Arc<Gpu>) -> Result<Self, CudaError> {
        let _bound = gpu.bind()?;
        let mut raw = std::ptr::null_mut();
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: the context is current; it writes one pointer.
        gpu.check("cuStreamCreate", unsafe { sys::cuStreamCreate(&mut raw, flags) })?;
        Ok(Self { handle: Arc::new(Handle { gpu: gpu.clone(), raw, is_owned: true }) })
    }

    /// A stream of somebody else's: a `cudaStream_t` or `CUstream`, as of a framework; null is the
    /// default stream.
    ///
    /// # Safety
    ///
    /// It is a stream of the GPU's primary context (or null) and outlives the value and its clones.
    #[must_use]
    pub unsafe fn foreign(gpu: &Arc<Gpu>, raw: *mut c_void) -> Self {
        Self { handle: Arc::new(Handle { gpu: gpu.clone(), raw: raw.cast(), is_owned: false }) }
    }

    /// Whose it is.
    #[must_use]
    pub fn gpu(&self) -> &Arc<Gpu> {
        &self.handle.gpu
    }

    pub(super) fn raw(&self) -> sys::CUstream {
        self.handle.raw
    }

    /// The place behind all that is in the stream now.
    ///
    /// # Errors
    ///
    /// What the driver says.
    pub fn mark(&self) -> Result<Mark, CudaError> {
        let mut mark = Mark::new(self.gpu())?;
        self.mark_with(&mut mark)?;
        Ok(mark)
    }

    /// The same with a mark that there is already.
    ///
    /// # Errors
    ///
    /// What the driver says.
    pub fn mark_with(&self, mark: &mut Mark) -> Result<(), CudaError> {
        let _bound = self.gpu().bind()?;
        // SAFETY: an event and a stream of one context, both alive.
        self.gpu().check("cuEventRecord", unsafe { sys::cuEventRecord(mark.raw, self.raw()) })
    }

    /// What is put into this stream from now on is done after that place; the host does not wait.
    ///
    /// # Errors
    ///
    /// What the driver says.
    pub fn wait_for(&self, mark: &Mark) -> Result<(), CudaError> {
        let _bound = self.gpu().bind()?;
        // SAFETY: as above; zero is the only flag.
        self.gpu().check("cuStreamWaitEvent", unsafe { sys::cuStreamWaitEvent(self.raw(), mark.raw, 0) })
    }

    /// Puts a copy into the stream: `bytes` from one address to another, each on a GPU or in host
    /// memory.
    ///
    /// # Safety
    ///
    /// So many bytes are readable and writable there until the stream has come past the copy, and
    /// nobody else touches the destination until then. Host memory that is not
    /// [`Pinned`](super::Pinned) makes the driver copy it aside first.
    ///
    /// # Errors
    ///
    /// What the driver says.
    pub unsafe fn copy(&self, from: *const u8, into: *mut u8, bytes: usize) -> Result<(), CudaError> {
        if bytes == 0 {
            return Ok(());
        }
        let _bound = self.gpu().bind()?;
        // SAFETY: by this function's contract.
        let code = unsafe { sys::cuMemcpyAsync(into as u64, from as u64, bytes, self.raw()) };
        self.gpu().check("cuMemcpyAsync", code)
    }

    /// Puts into the stream that `bytes` of the GPU's memory become this byte.
    ///
    /// # Safety
    ///
    /// So many bytes are memory of the GPU until the stream has come past it, and nobody else
    /// touches them until then.
    ///
    /// # Errors
    ///
    /// What the driver says.
    pub unsafe fn fill(&self, into: *mut u8, byte: u8, bytes: usize) -> Result<(), CudaError> {
        if bytes == 0 {
            return Ok(());
        }
        let _bound = self.gpu().bind()?;
        // SAFETY: by this function's contract.
        let code = unsafe { sys::cuMemsetD8Async(into as u64, byte, bytes, self.raw()) };
        self.gpu().check("cuMemsetD8Async", code)
    }

    /// Waits for what pleach itself has put into a stream of its own.
    pub(super) fn settle(&self) -> Result<(), CudaError> {
        self.mark()?.wait(SETTLE_LIMIT)
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        if self.is_owned
            && let Ok(_bound) = self.gpu.bind()
        {
            // SAFETY: made by `new`, destroyed once; the driver does what is in it first.
            unsafe { sys::cuStreamDestroy_v2(self.raw) };
        }
    }
}

/// A place in a stream.
pub struct Mark {
    gpu: Arc<Gpu>,
    raw: sys::CUevent,
}

// SAFETY: events may be used from any thread.
unsafe impl Send for Mark {}
// SAFETY: as above.
unsafe impl Sync for Mark {}

impl fmt::Debug for Mark {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "Mark({:p} on GPU {})", self.raw, self.gpu.ordinal())
    }
}

impl Mark {
    /// One that is in no stream yet, and therefore counts as reached.
    ///
    /// # Errors
    ///
    /// What the driver says.
    pub fn new(gpu: &Arc<Gpu>) -> Result<Self, CudaError> {
        let _bound = gpu.bind()?;
        let mut raw = std::ptr::null_mut();
        let flags = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32;
        // SAFETY: the context is current; it writes one pointer.
        gpu.check("cuEventCreate", unsafe { sys::cuEventCreate(&mut raw, flags) })?;
        Ok(Self { gpu: gpu.clone(), raw })
    }

    /// Whether the GPU has done all that was before it. Never waits.
    ///
    /// # Errors
    ///
    /// Something before it failed, or what the driver says.
    pub fn is_reached(&self) -> Result<bool, CudaError> {
        let _bound = self.gpu.bind()?;
        // SAFETY: an event of this context, alive.
        match unsafe { sys::cuEventQuery(self.raw) } {
            sys::CUresult::CUDA_SUCCESS => Ok(true),
            sys::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            code => self.gpu.check("cuEventQuery", code).map(|()| true),
        }
    }

    /// Waits until it is reached.
    ///
    /// # Errors
    ///
    /// [`CudaError::Late`] when that takes longer than `limit`; otherwise as [`Mark::is_reached`].
    pub fn wait(&self, limit: Duration) -> Result<(), CudaError> {
        let began = clock::now();
        while !self.is_reached()? {
            let waited = clock::now().since(began);
            if waited >= limit {
                return Err(CudaError::Late { ordinal: self.gpu.ordinal(), waited });
            }
            std::thread::yield_now();
        }
        Ok(())
    }
}

impl Mark {
    /// Waits for what pleach itself has put into a stream, and what holds memory that is not
    /// pleach's to keep.
    ///
    /// # Errors
    ///
    /// As [`Mark::is_reached`]. A GPU that does not come to the mark within a limit hangs: then the
    /// process is aborted, since the memory may not be given back while the GPU writes there.
    pub fn wait_or_abort(&self) -> Result<(), CudaError> {
        match self.wait(SETTLE_LIMIT) {
            Err(error @ CudaError::Late { .. }) => {
                last_resort::abort(format_args!("copies that use memory of this process do not end: {error}"))
            }
            outcome => outcome,
        }
    }
}

impl Drop for Mark {
    fn drop(&mut self) {
        if let Ok(_bound) = self.gpu.bind() {
            // SAFETY: made by `new`, destroyed once; streams that wait for it are served all the
            // same.
            unsafe { sys::cuEventDestroy_v2(self.raw) };
        }
    }
}

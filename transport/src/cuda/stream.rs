//! CUDA streams and events.

use std::ffi::c_void;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use cudarc::driver::sys;

use super::driver::CudaError;
use super::gpu::Gpu;
use crate::{clock, last_resort};

/// How long [`Stream::synchronize`] waits for pleach's own work: copies and kernels over bounded
/// bytes.
const SETTLE_LIMIT: Duration = Duration::from_secs(60);

/// A queue of work that a GPU carries out in order. A cheap handle: clones are the same stream.
#[derive(Clone)]
pub struct Stream {
    handle: Arc<StreamHandle>,
}

struct StreamHandle {
    gpu: Arc<Gpu>,
    raw: sys::CUstream,
    is_owned: bool,
}

// SAFETY: streams may be used from any thread.
unsafe impl Send for StreamHandle {}
// SAFETY: as above; the driver locks.
unsafe impl Sync for StreamHandle {}

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
    /// The driver's error.
    pub fn new(gpu: &Arc<Gpu>) -> Result<Self, CudaError> {
        let _context = gpu.bind()?;
        let mut raw = std::ptr::null_mut();
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: the context is current; it writes one pointer.
        gpu.check("cuStreamCreate", unsafe { sys::cuStreamCreate(&mut raw, flags) })?;
        Ok(Self { handle: Arc::new(StreamHandle { gpu: gpu.clone(), raw, is_owned: true }) })
    }

    /// A stream of other code: a `cudaStream_t` or `CUstream`, as of a framework; null is the
    /// default stream.
    ///
    /// # Safety
    ///
    /// It is a stream of the GPU's primary context (or null) and outlives the value and its clones.
    #[must_use]
    pub unsafe fn foreign(gpu: &Arc<Gpu>, raw: *mut c_void) -> Self {
        Self { handle: Arc::new(StreamHandle { gpu: gpu.clone(), raw: raw.cast(), is_owned: false }) }
    }

    /// Its GPU.
    #[must_use]
    pub fn gpu(&self) -> &Arc<Gpu> {
        &self.handle.gpu
    }

    pub(super) fn raw(&self) -> sys::CUstream {
        self.handle.raw
    }

    /// Records a new event after all work that is in the stream now.
    ///
    /// # Errors
    ///
    /// The driver's error.
    pub fn record_event(&self) -> Result<CudaEvent, CudaError> {
        let mut event = CudaEvent::new(self.gpu())?;
        self.record(&mut event)?;
        Ok(event)
    }

    /// The same with an existing event.
    ///
    /// # Errors
    ///
    /// The driver's error.
    pub fn record(&self, event: &mut CudaEvent) -> Result<(), CudaError> {
        let _context = self.gpu().bind()?;
        // SAFETY: an event and a stream of one context, both alive.
        self.gpu().check("cuEventRecord", unsafe { sys::cuEventRecord(event.raw, self.raw()) })
    }

    /// Makes later work of this stream wait for the event; the host does not wait.
    ///
    /// # Errors
    ///
    /// The driver's error.
    pub fn wait_event(&self, event: &CudaEvent) -> Result<(), CudaError> {
        let _context = self.gpu().bind()?;
        // SAFETY: as above; zero is the only flag.
        self.gpu().check("cuStreamWaitEvent", unsafe { sys::cuStreamWaitEvent(self.raw(), event.raw, 0) })
    }

    /// Puts a copy into the stream: `bytes` from one address to another, each on a GPU or in host
    /// memory.
    ///
    /// # Safety
    ///
    /// That many bytes are readable and writable there until the stream has passed the copy, and no
    /// other code accesses the destination until then. The driver first copies host memory that is
    /// not [`PinnedMemory`](super::PinnedMemory).
    ///
    /// # Errors
    ///
    /// The driver's error.
    pub unsafe fn copy(&self, from: *const u8, into: *mut u8, bytes: usize) -> Result<(), CudaError> {
        if bytes == 0 {
            return Ok(());
        }
        let _context = self.gpu().bind()?;
        // SAFETY: by this function's contract.
        let code = unsafe { sys::cuMemcpyAsync(into as u64, from as u64, bytes, self.raw()) };
        self.gpu().check("cuMemcpyAsync", code)
    }

    /// Puts a fill of `bytes` of the GPU's memory with `byte` into the stream.
    ///
    /// # Safety
    ///
    /// The `bytes` bytes at `into` are memory of the GPU until the stream has completed the fill,
    /// and no other code accesses them until then.
    ///
    /// # Errors
    ///
    /// The driver's error.
    pub unsafe fn fill(&self, into: *mut u8, byte: u8, bytes: usize) -> Result<(), CudaError> {
        if bytes == 0 {
            return Ok(());
        }
        let _context = self.gpu().bind()?;
        // SAFETY: by this function's contract.
        let code = unsafe { sys::cuMemsetD8Async(into as u64, byte, bytes, self.raw()) };
        self.gpu().check("cuMemsetD8Async", code)
    }

    /// Waits for pleach's own work in a stream of its own.
    pub(super) fn synchronize(&self) -> Result<(), CudaError> {
        self.record_event()?.wait(SETTLE_LIMIT)
    }
}

impl Drop for StreamHandle {
    fn drop(&mut self) {
        if self.is_owned
            && let Ok(_context) = self.gpu.bind()
        {
            // SAFETY: made by `new`, destroyed once; the driver completes the work in it first.
            unsafe { sys::cuStreamDestroy_v2(self.raw) };
        }
    }
}

/// An event in a stream.
pub struct CudaEvent {
    gpu: Arc<Gpu>,
    raw: sys::CUevent,
}

// SAFETY: events may be used from any thread.
unsafe impl Send for CudaEvent {}
// SAFETY: as above.
unsafe impl Sync for CudaEvent {}

impl fmt::Debug for CudaEvent {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "Mark({:p} on GPU {})", self.raw, self.gpu.ordinal())
    }
}

impl CudaEvent {
    /// An event that is not recorded, and therefore counts as reached.
    ///
    /// # Errors
    ///
    /// The driver's error.
    pub fn new(gpu: &Arc<Gpu>) -> Result<Self, CudaError> {
        let _context = gpu.bind()?;
        let mut raw = std::ptr::null_mut();
        let flags = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32;
        // SAFETY: the context is current; it writes one pointer.
        gpu.check("cuEventCreate", unsafe { sys::cuEventCreate(&mut raw, flags) })?;
        Ok(Self { gpu: gpu.clone(), raw })
    }

    /// Whether the GPU has completed all work before the event. Never waits.
    ///
    /// # Errors
    ///
    /// Earlier work has failed, or the driver has reported an error.
    pub fn is_reached(&self) -> Result<bool, CudaError> {
        let _context = self.gpu.bind()?;
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
    /// [`CudaError::Late`] when that takes longer than `limit`; otherwise as
    /// [`CudaEvent::is_reached`].
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

impl CudaEvent {
    /// Waits for pleach's own work in a stream that holds memory which pleach does not own.
    ///
    /// # Errors
    ///
    /// As [`CudaEvent::is_reached`]. A GPU that does not reach the event within a limit hangs: then
    /// the process is aborted, because the memory may not be freed while the GPU writes it.
    pub fn wait_or_abort(&self) -> Result<(), CudaError> {
        match self.wait(SETTLE_LIMIT) {
            Err(error @ CudaError::Late { .. }) => {
                last_resort::abort(format_args!("copies that use memory of this process do not end: {error}"))
            }
            outcome => outcome,
        }
    }
}

impl Drop for CudaEvent {
    fn drop(&mut self) {
        if let Ok(_context) = self.gpu.bind() {
            // SAFETY: made by `new`, destroyed once; streams that wait for it still complete.
            unsafe { sys::cuEventDestroy_v2(self.raw) };
        }
    }
}

//! A copy from the host's memory to a GPU's that goes on while the caller does something else.
//!
//! **Invariant:** the copy holds both ends until the GPU has finished with them.

use std::fmt;
use std::sync::Arc;

use super::driver::CudaError;
use super::memory::CudaMemory;
use super::stream::{CudaEvent, Stream};
use crate::memory::Space;
use crate::region::Slice;

/// A copy under way. Its drop waits for the end of the copy.
#[must_use = "a copy that is dropped is waited for"]
pub struct CudaCopy {
    event: CudaEvent,
    _stream: Stream,
    _from: Slice,
    _into: Arc<CudaMemory>,
}

impl fmt::Debug for CudaCopy {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "CudaCopy({:?})", self.event)
    }
}

impl CudaCopy {
    /// Begins to copy the bytes of `from` over those of `into` from byte `offset` on. The caller
    /// leaves both alone until [`CudaCopy::is_done`].
    ///
    /// # Errors
    ///
    /// The driver's error.
    ///
    /// # Panics
    ///
    /// When `from` is not the host's memory, or its bytes reach beyond the end of `into`.
    pub fn begin(from: Slice, into: &Arc<CudaMemory>, offset: usize) -> Result<Self, CudaError> {
        assert_eq!(from.region().memory().space(), Space::Host, "a copy begins in the host's memory");
        let (gpu, address) = (into.gpu(), into.address(offset, from.len())?);
        let (stream, mut event) = (Stream::new(gpu)?, CudaEvent::new(gpu)?);
        // SAFETY: the bytes lie inside of both, which this value holds until the event is reached.
        // Other accesses of either meanwhile give a mixture of bytes, as those of transfers do.
        unsafe { stream.copy(from.as_ptr(), address, from.len())? };
        // Fails only if the GPU has failed, and then it has finished all work.
        stream.record(&mut event)?;
        Ok(Self { event, _stream: stream, _from: from, _into: into.clone() })
    }

    /// Whether the bytes are on the GPU. Never waits.
    ///
    /// # Errors
    ///
    /// The copy failed, or the driver's error.
    pub fn is_done(&self) -> Result<bool, CudaError> {
        self.event.is_reached()
    }
}

impl Drop for CudaCopy {
    fn drop(&mut self) {
        // A GPU that has failed accesses nothing any more.
        let _ = self.event.wait_or_abort();
    }
}

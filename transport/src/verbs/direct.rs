//! GPU memory that NICs access (GPUDirect RDMA), and when their writes are visible.
//!
//! A NIC's writes to a GPU go over PCIe past the host. A completion only says that they are on
//! their way in order: work that the GPU starts afterwards may still read old bytes. Some GPUs
//! order such writes themselves; for others the host flushes ([`Gpu::flush_writes`]). **Invariant**
//! (contract line 1): between polling a completion and acting on it, every GPU that needs a flush
//! and has regions here was flushed. One flush serves all completions that were polled before it.
//! The region of a signal's put is not known here. So each batch of completions pays for one flush
//! once such a GPU has had a region; without such a GPU none does.
//!
//! A GPU whose only flush is a read through the NIC is refused at registration.

use std::sync::Arc;

use super::FABRIC;
use super::registered::MemoryError;
use crate::cuda::{CudaError, CudaMemory, FlushMethod, FlushScope, Gpu};
use crate::device::RegisterError;
use crate::memory::{Memory, Space};

/// The GPUs to flush, with the readers of their memory.
#[derive(Default)]
pub(super) struct Gpus {
    flushed: Vec<(Arc<Gpu>, FlushScope)>,
}

impl Gpus {
    /// The GPU of memory that is about to be registered, if it is a GPU's.
    pub(super) fn of(memory: &dyn Memory, scope: FlushScope) -> Result<Option<Arc<Gpu>>, RegisterError> {
        let space = memory.space();
        if space == Space::Host {
            return Ok(None);
        }
        // For other memory no flush is known.
        let gpu = CudaMemory::of(memory).ok_or(RegisterError::Space { fabric: FABRIC, space })?.gpu();
        match gpu.flush(scope) {
            FlushMethod::ByReadBack => Err(MemoryError::NoFlush { ordinal: gpu.ordinal() }.into()),
            FlushMethod::NotNeeded | FlushMethod::ByHost => Ok(Some(Arc::clone(gpu))),
        }
    }

    /// Records a GPU after its memory was registered, for the life of the device.
    pub(super) fn note(&mut self, gpu: Arc<Gpu>, scope: FlushScope) {
        if gpu.flush(scope) != FlushMethod::ByHost {
            return;
        }
        match self.flushed.iter_mut().find(|(known, _)| known.ordinal() == gpu.ordinal()) {
            Some((_, before)) => *before = scope.max(*before),
            None => self.flushed.push((gpu, scope)),
        }
    }

    /// Makes the writes of completions that were polled before visible to work that GPUs start from
    /// now on.
    #[inline]
    pub(super) fn flush(&self) -> Result<(), CudaError> {
        self.flushed.iter().try_for_each(|(gpu, scope)| gpu.flush_writes(*scope))
    }
}

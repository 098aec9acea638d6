//! Memory of GPUs that NICs reach (GPUDirect RDMA): when what they wrote there is shown.
//!
//! A NIC's writes to a GPU go over PCIe past the host, and a completion says only that they are on
//! their way in order: work of the GPU that starts afterwards may still find old bytes. Some GPUs
//! order that by themselves; for the others the host flushes ([`Gpu::flush_writes`]). **Invariant**
//! (contract line 1): between taking a completion from its queue and acting on it (a signal
//! counted, a get's end told) every GPU that needs it and has regions here was flushed. One flush
//! serves all completions that were taken before it. Which region a signal's put went to is not
//! known here, so each batch of completions pays for one flush while such a GPU has had a region,
//! and none does where there is no such GPU.
//!
//! A GPU that can only be made to show it by reading back through the NIC is refused at
//! registration.

use std::sync::Arc;

use super::FABRIC;
use super::registered::MemoryError;
use crate::cuda::{CudaError, CudaMemory, Flush, Gpu, Readers};
use crate::device::RegisterError;
use crate::memory::{Memory, Space};

/// The GPUs that are flushed, and for whom.
#[derive(Default)]
pub(super) struct Gpus {
    flushed: Vec<(Arc<Gpu>, Readers)>,
}

impl Gpus {
    /// Before it is registered: whose memory it is, if a GPU's.
    pub(super) fn of(memory: &dyn Memory, readers: Readers) -> Result<Option<Arc<Gpu>>, RegisterError> {
        let space = memory.space();
        if space == Space::Host {
            return Ok(None);
        }
        // Of other memory nobody could say how it is flushed.
        let gpu = CudaMemory::of(memory).ok_or(RegisterError::Space { fabric: FABRIC, space })?.gpu();
        match gpu.flush(readers) {
            Flush::ByReadBack => Err(MemoryError::NoFlush { ordinal: gpu.ordinal() }.into()),
            Flush::Needless | Flush::ByHost => Ok(Some(Arc::clone(gpu))),
        }
    }

    /// After memory of it was registered, for as long as the device lives.
    pub(super) fn note(&mut self, gpu: Arc<Gpu>, readers: Readers) {
        if gpu.flush(readers) != Flush::ByHost {
            return;
        }
        match self.flushed.iter_mut().find(|(known, _)| known.ordinal() == gpu.ordinal()) {
            Some((_, before)) => *before = readers.max(*before),
            None => self.flushed.push((gpu, readers)),
        }
    }

    /// Makes what NICs wrote, whose completions were taken before, visible to work that GPUs are
    /// given from now on.
    #[inline]
    pub(super) fn flush(&self) -> Result<(), CudaError> {
        self.flushed.iter().try_for_each(|(gpu, readers)| gpu.flush_writes(*readers))
    }
}

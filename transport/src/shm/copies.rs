//! Transfers of which an end is on a GPU: copies that the GPU makes, in a stream of the device's
//! own.
//!
//! **Invariant:** a copy ends, well or not, only when the GPU is through with it: until then it
//! holds both ends, no signal of it is shown and no memory is cut off from anybody.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use super::device::FABRIC;
use super::link::PeerRegion;
use super::transfer::Request;
use crate::Rank;
use crate::cuda::{CudaError, Gpu, Mark, Stream};
use crate::device::{BackendError, Source, TransferError, TransferId};
use crate::memory::Space;
use crate::region::Slice;
use crate::signals::{Inline, Signal};

/// An error of a GPU as this fabric tells it.
pub(super) fn gpu_failed(error: CudaError) -> BackendError {
    BackendError::new(FABRIC, error)
}

/// How long a device that is dropped waits for its copies.
const DROP_LIMIT: Duration = Duration::from_secs(10);

/// A copy under way.
pub(crate) struct GpuCopy {
    pub(crate) peer: Rank,
    pub(crate) id: TransferId,
    /// What is shown when it is there.
    pub(crate) signal: Option<Signal>,
    /// What it ends with, whatever the GPU does: the peer is gone.
    pub(crate) failure: Option<TransferError>,
    mark: Mark,
    _ends: Ends,
    /// Of copies before it in the stream that have no mark of their own.
    _before: Vec<Ends>,
}

/// Both ends of a copy, held while the GPU may touch them.
struct Ends {
    _here: Here,
    _there: Arc<PeerRegion>,
}

/// This rank's end.
enum Here {
    Slice { _slice: Slice },
    Inline { _bytes: Box<Inline> },
}

/// The copies of a device, in the order in which the GPU makes them.
#[derive(Default)]
pub(crate) struct GpuCopies {
    /// The GPU whose memory is registered, and its stream once something was copied.
    gpu: Option<Arc<Gpu>>,
    stream: Option<Stream>,
    under_way: VecDeque<GpuCopy>,
    /// Of copies that are in the stream and could not be marked: held until one behind them has
    /// ended.
    unmarked: Vec<Ends>,
}

impl GpuCopies {
    /// Memory of this GPU is registered.
    pub(crate) fn take_gpu(&mut self, gpu: &Arc<Gpu>) -> Result<(), CudaError> {
        let (first, other) = (self.gpu.get_or_insert_with(|| gpu.clone()).ordinal(), gpu.ordinal());
        if first == other { Ok(()) } else { Err(CudaError::OtherGpu { first, other }) }
    }

    /// The GPU whose memory is registered.
    pub(crate) fn gpu(&self) -> Option<&Arc<Gpu>> {
        self.gpu.as_ref()
    }

    /// Whether this rank's end of the request is on a GPU.
    pub(crate) fn reaches(&self, request: &Request) -> bool {
        let slice = match request {
            _ if self.gpu.is_none() => return false,
            Request::Put { src: Source::Slice(slice), .. } | Request::Get { dst: slice, .. } => slice,
            _ => return false,
        };
        slice.region().memory().space() != Space::Host
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.under_way.is_empty()
    }

    /// Puts the copy into the stream; false for what a GPU does not do (an atomic), or what lies
    /// beyond the peer's region.
    pub(crate) fn begin(
        &mut self,
        peer: Rank,
        request: Request,
        id: TransferId,
        region: Arc<PeerRegion>,
    ) -> Result<bool, CudaError> {
        let gpu = region.import(self.gpu.as_ref())?;
        // From now on what peers have on other GPUs is reached from this one.
        self.gpu.get_or_insert_with(|| gpu.clone());
        let Some(there) = region.locate(request.remote()) else { return Ok(false) };
        let there = there.as_ptr();
        let (from, into, bytes, here, signal) = match request {
            Request::Atomic { .. } => return Ok(false),
            Request::Put { src: Source::Slice(slice), signal, .. } => {
                (slice.as_ptr(), there, slice.len(), Here::Slice { _slice: slice }, signal)
            }
            Request::Put { src: Source::Inline(inline), signal, .. } => {
                let kept = Box::new(inline);
                let bytes = kept.as_bytes();
                (bytes.as_ptr().cast_mut(), there, bytes.len(), Here::Inline { _bytes: kept }, signal)
            }
            Request::Get { dst, .. } => (there, dst.as_ptr(), dst.len(), Here::Slice { _slice: dst }, None),
        };
        let stream = match &mut self.stream {
            Some(stream) => stream,
            none => none.insert(Stream::new(&gpu)?),
        };
        let mut mark = Mark::new(&gpu)?;
        // SAFETY: submit checked that both ends have so many bytes, and `locate` that the peer's
        // region holds its end; both are held by the copy until the mark is reached, and a
        // transfer's owner leaves its slice alone until its end.
        unsafe { stream.copy(from, into, bytes)? };
        let ends = Ends { _here: here, _there: region };
        if let Err(error) = stream.mark_with(&mut mark) {
            self.unmarked.push(ends);
            return Err(error);
        }
        let before = std::mem::take(&mut self.unmarked);
        self.under_way.push_back(GpuCopy {
            peer,
            id,
            signal,
            failure: None,
            mark,
            _ends: ends,
            _before: before,
        });
        Ok(true)
    }

    /// The next copy that the GPU is through with. A GPU that has failed is through with all.
    pub(crate) fn next_ended(&mut self) -> Option<(GpuCopy, Result<(), CudaError>)> {
        let result = match self.under_way.front()?.mark.is_reached() {
            Ok(false) => return None,
            Ok(true) => Ok(()),
            Err(error) => Err(error),
        };
        self.under_way.pop_front().map(|copy| (copy, result))
    }

    /// What is under way with that peer ends so.
    pub(crate) fn fail(&mut self, peer: Rank, failure: &TransferError) {
        for copy in self.under_way.iter_mut().filter(|copy| copy.peer == peer) {
            copy.failure.get_or_insert_with(|| failure.clone());
        }
    }
}

impl Drop for GpuCopies {
    fn drop(&mut self) {
        if let Some(last) = self.under_way.back()
            && let Err(error) = last.mark.wait(DROP_LIMIT)
        {
            tracing::error!(%error, "a GPU is still copying; the memory of its copies is kept for ever");
            std::mem::forget(std::mem::take(&mut self.under_way));
        }
        // No mark says when the GPU is through with these.
        std::mem::forget(std::mem::take(&mut self.unmarked));
    }
}

//! Transfers with an end on a GPU: the GPU makes the copies, in a stream of the device.
//!
//! **Invariant:** a copy ends, with success or not, only when the GPU has finished it. Until then
//! the copy holds both ends, its signal is not raised, and no memory is detached. The exception is
//! a copy whose end no event reports. It was reported as failed, but the GPU may still make it. So
//! drains wait until a later event of the stream is reached.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use super::device::FABRIC;
use super::link::PeerRegion;
use super::transfer::TransferRequest;
use crate::Rank;
use crate::cuda::{CudaError, CudaEvent, Gpu, Stream};
use crate::device::{BackendError, Source, TransferError, TransferId};
use crate::memory::Space;
use crate::region::Slice;
use crate::signals::{Inline, Signal};

/// An error of a GPU as an error of this fabric.
pub(super) fn gpu_failed(error: CudaError) -> BackendError {
    BackendError::new(FABRIC, error)
}

/// How long a device that is dropped waits for its copies.
const DROP_LIMIT: Duration = Duration::from_secs(10);

/// A copy under way.
pub(crate) struct GpuCopy {
    pub(crate) peer: Rank,
    pub(crate) id: TransferId,
    /// The signal to raise after the copy.
    pub(crate) signal: Option<Signal>,
    /// The result after the copy if the peer is gone, whatever the GPU does.
    pub(crate) failure: Option<TransferError>,
    /// The number of drains of this rank before the copy.
    drains_before: u64,
    event: CudaEvent,
    _ends: CopyEnds,
    /// The ends of earlier copies in the stream that have no event.
    before: Vec<CopyEnds>,
}

/// Both ends of a copy, held while the GPU may access them.
struct CopyEnds {
    _here: LocalEnd,
    _there: Arc<PeerRegion>,
}

/// This rank's end.
enum LocalEnd {
    Slice { _slice: Slice },
    Inline { _bytes: Box<Inline> },
}

/// The copies of a device, in the order of the stream.
#[derive(Default)]
pub(crate) struct GpuCopies {
    /// The GPU whose memory is registered, and its stream after the first copy.
    gpu: Option<Arc<Gpu>>,
    stream: Option<Stream>,
    under_way: VecDeque<GpuCopy>,
    /// The ends of copies in the stream without an event: held until a later copy has ended.
    unmarked: Vec<CopyEnds>,
    /// Ends without an event of their own, with a later event that a drain waits for.
    settling: Option<(CudaEvent, Vec<CopyEnds>)>,
}

impl GpuCopies {
    /// Records the GPU whose memory is registered.
    pub(crate) fn take_gpu(&mut self, gpu: &Arc<Gpu>) -> Result<(), CudaError> {
        let (first, other) = (self.gpu.get_or_insert_with(|| gpu.clone()).ordinal(), gpu.ordinal());
        if first == other { Ok(()) } else { Err(CudaError::OtherGpu { first, other }) }
    }

    /// The GPU whose memory is registered.
    pub(crate) fn gpu(&self) -> Option<&Arc<Gpu>> {
        self.gpu.as_ref()
    }

    /// Whether this rank's end of the request is on a GPU.
    pub(crate) fn reaches(&self, request: &TransferRequest) -> bool {
        let slice = match request {
            _ if self.gpu.is_none() => return false,
            TransferRequest::Put { src: Source::Slice(slice), .. }
            | TransferRequest::Get { dst: slice, .. } => slice,
            _ => return false,
        };
        slice.region().memory().space() != Space::Host
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.under_way.is_empty()
    }

    /// Puts the copy into the stream. Returns false for an atomic, which GPUs do not carry out, and
    /// for a range beyond the peer's region.
    pub(crate) fn begin(
        &mut self,
        peer: Rank,
        request: TransferRequest,
        id: TransferId,
        region: Arc<PeerRegion>,
        drains_before: u64,
    ) -> Result<bool, CudaError> {
        let gpu = region.import(self.gpu.as_ref())?;
        // From now on regions on other GPUs are accessed from this GPU.
        self.gpu.get_or_insert_with(|| gpu.clone());
        let Some(there) = region.locate(request.remote()) else { return Ok(false) };
        let there = there.as_ptr();
        let (from, into, bytes, here, signal) = match request {
            TransferRequest::Atomic { .. } => return Ok(false),
            TransferRequest::Put { src: Source::Slice(slice), signal, .. } => {
                (slice.as_ptr(), there, slice.len(), LocalEnd::Slice { _slice: slice }, signal)
            }
            TransferRequest::Put { src: Source::Inline(inline), signal, .. } => {
                let kept = Box::new(inline);
                let bytes = kept.as_bytes();
                (bytes.as_ptr().cast_mut(), there, bytes.len(), LocalEnd::Inline { _bytes: kept }, signal)
            }
            TransferRequest::Get { dst, .. } => {
                (there, dst.as_ptr(), dst.len(), LocalEnd::Slice { _slice: dst }, None)
            }
        };
        let stream = match &mut self.stream {
            Some(stream) => stream,
            none => none.insert(Stream::new(&gpu)?),
        };
        let mut event = CudaEvent::new(&gpu)?;
        // SAFETY: submit checked that both ends have that many bytes, and `locate` checked that the
        // peer's region holds its end. The copy holds both ends until the event is reached. The
        // owner of a transfer does not touch its slice until the transfer ends.
        unsafe { stream.copy(from, into, bytes)? };
        let ends = CopyEnds { _here: here, _there: region };
        if let Err(error) = stream.record(&mut event) {
            self.unmarked.push(ends);
            return Err(error);
        }
        let before = std::mem::take(&mut self.unmarked);
        self.under_way.push_back(GpuCopy {
            peer,
            id,
            signal,
            failure: None,
            drains_before,
            event,
            _ends: ends,
            before,
        });
        Ok(true)
    }

    /// The next copy that the GPU has finished. A failed GPU counts as having finished all copies.
    pub(crate) fn next_ended(&mut self) -> Option<(GpuCopy, Result<(), CudaError>)> {
        let result = match self.under_way.front()?.event.is_reached() {
            Ok(false) => return None,
            Ok(true) => Ok(()),
            Err(error) => Err(error),
        };
        self.under_way.pop_front().map(|copy| (copy, result))
    }

    /// The least [`GpuCopy::drains_before`] of all copies with that peer that the GPU may still
    /// make; the largest number if there is no such copy.
    pub(crate) fn drains_before_first(&mut self, peer: Rank) -> u64 {
        if !self.settle() {
            return 0;
        }
        let copies = self.under_way.iter().filter(|copy| copy.peer == peer);
        copies.map(|copy| copy.drains_before).min().unwrap_or(u64::MAX)
    }

    /// Whether copies may be under way whose end no event reports.
    pub(crate) fn is_unsettled(&self) -> bool {
        !self.unmarked.is_empty() || self.settling.is_some()
    }

    /// Records an event for copies that have none. Returns whether all copies without an event of
    /// their own have ended. A failed GPU counts as having finished all copies.
    fn settle(&mut self) -> bool {
        if let Some((event, _)) = &self.settling {
            if let Ok(false) = event.is_reached() {
                return false;
            }
            self.settling = None;
        }
        if let (false, Some(stream)) = (self.unmarked.is_empty(), &self.stream)
            && let Ok(event) = stream.record_event()
        {
            self.settling = Some((event, std::mem::take(&mut self.unmarked)));
        }
        !self.is_unsettled() && self.under_way.iter().all(|copy| copy.before.is_empty())
    }

    /// Sets the result of all copies with that peer.
    pub(crate) fn fail(&mut self, peer: Rank, failure: &TransferError) {
        for copy in self.under_way.iter_mut().filter(|copy| copy.peer == peer) {
            copy.failure.get_or_insert_with(|| failure.clone());
        }
    }
}

impl Drop for GpuCopies {
    fn drop(&mut self) {
        if let Some(last) = self.under_way.back()
            && let Err(error) = last.event.wait(DROP_LIMIT)
        {
            tracing::error!(%error, "a GPU is still copying; the memory of its copies is kept for ever");
            std::mem::forget(std::mem::take(&mut self.under_way));
        }
        if let Some((event, _)) = &self.settling
            && event.wait(DROP_LIMIT).is_err()
        {
            std::mem::forget(self.settling.take());
        }
        // No event reports when the GPU has finished these copies.
        std::mem::forget(std::mem::take(&mut self.unmarked));
    }
}

//! Calls on a GPU's memory that take their place in a stream.
//!
//! **Invariant:** a call begins when the stream has done what was put into it before the call, and
//! it is over when the GPU no longer uses the data: work that is put into any stream after that
//! finds the result. The call puts only a CUDA event into the stream, here called a mark. It waits
//! for no other stream and not for the whole GPU. A blocking call waits for the mark on the
//! caller's thread, and is over when it returns. A started one returns at once and begins behind a
//! gate that is open when the mark is reached ([`Gate`]); it is over when its
//! [`Pending`](super::Pending) says so. No stream waits for a call: such a stream would wait for
//! this rank's own thread, and other work in the same queue of the GPU would wait as well.

use std::sync::Arc;
use std::time::Duration;

use pleach_transport::clock;
use pleach_transport::cuda::{CudaError, CudaEvent, ForeignMemory, Stream};

use super::Group;
use super::bound::BoundCall;
use super::error::CollectiveError;
use crate::engine::Gate;

/// How often a blocking call that waits for a stream looks at it while it carries on what else the
/// group does.
const LOOK_EVERY: Duration = Duration::from_micros(20);

impl Group {
    /// The same group, for calls on GPU memory: each begins when this stream, of the group's GPU,
    /// has done what was put into it before the call, and is over when the GPU is through with the
    /// data: when a blocking call returns, or the [`Pending`](super::Pending) of a started one has
    /// ended. What is put into any stream after that finds the result.
    #[must_use]
    pub fn on(&self, stream: &Stream) -> Self {
        Self { stream: Some(stream.clone()), ..self.clone() }
    }

    /// Whether a call may have to come after what is in a stream.
    #[inline]
    pub(super) fn is_ordered(&self) -> bool {
        self.shared.gpu.is_some() || self.stream.is_some()
    }

    /// What a call comes after.
    pub(super) fn order(&self, call: &BoundCall) -> Result<StreamWork, CollectiveError> {
        self.expect_stream(call.input.len() + call.output.len())?;
        Ok(StreamWork::new(&self.stream)?)
    }

    /// Refuses a stream of another GPU, and a call without a stream on GPU memory of `bytes`.
    pub(super) fn expect_stream(&self, bytes: usize) -> Result<(), CollectiveError> {
        match (&self.stream, self.gpu()) {
            (Some(stream), _) => self.expect_gpu(stream.gpu()),
            (None, Some(gpu)) if bytes > 0 => Err(CollectiveError::NoStream { ordinal: gpu.ordinal() }),
            (None, _) => Ok(()),
        }
    }

    /// Waits for what a blocking call comes after.
    pub(super) fn wait_for_stream(&self, call: &BoundCall) -> Result<(), CollectiveError> {
        self.expect_stream(call.input.len() + call.output.len())?;
        if let Some(stream) = &self.stream {
            self.wait_for_mark(&stream.record_event()?)?;
        }
        Ok(call.expect_alive()?)
    }
}

impl Group {
    /// Waits until the mark is reached, at most as long as a call may take, carrying on what else
    /// the group does.
    pub(super) fn wait_for_mark(&self, mark: &CudaEvent) -> Result<(), CollectiveError> {
        let began = clock::now();
        while !mark.is_reached()? {
            let now = clock::now();
            let waited = now.since(began);
            if waited >= self.timeout {
                return Err(
                    CudaError::Late { ordinal: self.gpu().map_or(0, |gpu| gpu.ordinal()), waited }.into()
                );
            }
            let driver = &self.shared.driver;
            driver.drive(driver.lock(), now + LOOK_EVERY, |_| None::<()>);
        }
        Ok(())
    }
}

/// What calls come after: the work that was in some streams.
#[derive(Clone, Debug)]
pub(super) struct StreamWork(Arc<Vec<CudaEvent>>);

impl StreamWork {
    /// All that is in these streams now.
    pub(super) fn new<'a>(streams: impl IntoIterator<Item = &'a Stream>) -> Result<Self, CudaError> {
        Ok(Self(Arc::new(streams.into_iter().map(Stream::record_event).collect::<Result<_, _>>()?)))
    }

    /// Whether all of it is done.
    pub(super) fn is_done(&self) -> Result<bool, CudaError> {
        for mark in &*self.0 {
            if !mark.is_reached()? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Open when all of it is done; none is needed where it is already. The memory is looked at
    /// once more then.
    pub(super) fn gate(&self, foreign: Option<Box<[ForeignMemory]>>) -> Result<Option<Gate>, CudaError> {
        if self.is_done()? {
            return Ok(None);
        }
        let before = self.clone();
        Ok(Some(Box::new(move || {
            if !before.is_done()? {
                return Ok(false);
            }
            foreign.iter().flatten().try_for_each(ForeignMemory::expect_alive)?;
            Ok(true)
        })))
    }
}

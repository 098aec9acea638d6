//! The events of a control plane that wait for the device to poll.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use super::{Control, EventFlag, FabricHandler, OpenError, OpenedPair, ReceivedFiles, ReleasedRegions};
use crate::Rank;
use crate::device::{LossCause, ProtocolViolation, Wake};
use crate::mutex::lock;
use crate::wire::Malformed;

/// A message of a fabric to itself at another rank.
pub(crate) trait FabricMessage: Sized + Send + 'static {
    /// Decodes a message of a peer. A message that does not decode ends the pair.
    fn decode(bytes: &[u8]) -> Result<Self, Malformed>;

    /// The reason, if the message says that the peer makes no connection and closes the stream.
    fn refusal(&self) -> Option<LossCause> {
        None
    }
}

/// From the watcher to the device.
pub(crate) enum ControlEvent<M> {
    /// The pair has its control stream and its data connections, if the fabric has some.
    Opened { peer: Rank, pair: OpenedPair },
    /// A message of the fabric itself.
    Message { peer: Rank, message: M },
    /// The peer sent a bye: the end of its stream will be no loss.
    Departed { peer: Rank },
    /// The peer is lost; comes at most once, after all that the peer sent.
    Lost { peer: Rank, cause: LossCause },
}

/// See the module. A poll without events reads two flags.
pub(crate) struct ControlEventQueue<M> {
    /// Wakes the device.
    wake_source: EventFlag,
    has_events: AtomicBool,
    events: Mutex<Vec<ControlEvent<M>>>,
}

impl<M> ControlEventQueue<M> {
    pub(crate) fn new() -> Result<Self, OpenError> {
        let wake_source =
            EventFlag::new().map_err(|source| OpenError::System { resource: "event descriptors", source })?;
        Ok(Self { wake_source, has_events: AtomicBool::new(false), events: Mutex::new(Vec::new()) })
    }

    fn push(&self, event: ControlEvent<M>) {
        let mut events = lock(&self.events);
        events.push(event);
        // Release: pairs with the acquire in `has_events`.
        self.has_events.store(true, Ordering::Release);
        drop(events);
        self.wake_source.wake();
    }
}

impl<M: Send + 'static> Control<ControlEventQueue<M>> {
    /// The flag that wakes the device; set when there are events.
    pub(crate) fn wake_source(&self) -> &EventFlag {
        &self.handler().wake_source
    }

    /// A new list of released regions; an addition wakes the device.
    pub(crate) fn releases(&self) -> ReleasedRegions {
        let wake_source: Arc<dyn Wake> = Arc::clone(self.handler()) as _;
        ReleasedRegions::new(Arc::downgrade(&wake_source))
    }

    /// Whether [`Control::take_events`] returns an event. One load: for polls.
    pub(crate) fn has_events(&self) -> bool {
        // Acquire: pairs with the release in `push`; the lock orders the events themselves.
        self.handler().has_events.load(Ordering::Acquire)
    }

    /// The events since the last call.
    pub(crate) fn take_events(&self) -> Vec<ControlEvent<M>> {
        let mut events = lock(&self.handler().events);
        // Release: under the lock, so it never hides events that are still there.
        self.handler().has_events.store(false, Ordering::Release);
        std::mem::take(&mut *events)
    }
}

impl<M: Send> Wake for ControlEventQueue<M> {
    fn wake(&self) {
        self.wake_source.wake();
    }
}

impl<M: FabricMessage> FabricHandler for ControlEventQueue<M> {
    fn opened(&self, peer: Rank, pair: OpenedPair) -> Result<Option<OwnedFd>, LossCause> {
        self.push(ControlEvent::Opened { peer, pair });
        Ok(None)
    }

    fn message(
        &self,
        peer: Rank,
        message: &[u8],
        _files: ReceivedFiles,
        refuse: &dyn Fn(LossCause),
    ) -> Result<(), LossCause> {
        let message = M::decode(message).map_err(ProtocolViolation::from)?;
        // Before the event: the peer closes the stream after it, and then the cause is asked for.
        message.refusal().into_iter().for_each(refuse);
        self.push(ControlEvent::Message { peer, message });
        Ok(())
    }

    fn departed(&self, peer: Rank) {
        self.push(ControlEvent::Departed { peer });
    }

    fn lost(&self, peer: Rank, cause: LossCause) {
        self.push(ControlEvent::Lost { peer, cause });
    }
}

//! The events of a control plane that wait for the device to poll.

use std::collections::BTreeMap;
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

/// From the watcher to the device, of the current generation of a pair.
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

impl<M> ControlEvent<M> {
    fn peer(&self) -> Rank {
        match self {
            Self::Opened { peer, .. }
            | Self::Message { peer, .. }
            | Self::Departed { peer }
            | Self::Lost { peer, .. } => *peer,
        }
    }
}

/// See the module. A poll without events reads two flags.
pub(crate) struct ControlEventQueue<M> {
    /// Wakes the device.
    wake_source: EventFlag,
    has_events: AtomicBool,
    queue: Mutex<GenerationEvents<M>>,
}

struct GenerationEvents<M> {
    /// With the generation of its pair.
    events: Vec<(u32, ControlEvent<M>)>,
    /// The generations of pairs, as the watcher has begun them; zero where there is none.
    generations: BTreeMap<Rank, u32>,
}

impl<M> GenerationEvents<M> {
    fn new() -> Self {
        Self { events: Vec::new(), generations: BTreeMap::new() }
    }

    fn push(&mut self, event: ControlEvent<M>) {
        let generation = self.generations.get(&event.peer()).copied().unwrap_or_default();
        self.events.push((generation, event));
    }

    /// All events that are of the current generation of their pair; drops the others.
    fn take(&mut self, current: impl Fn(Rank) -> u32) -> Vec<ControlEvent<M>> {
        let events = std::mem::take(&mut self.events).into_iter();
        let of_current = events.filter(|(generation, event)| *generation == current(event.peer()));
        of_current.map(|(_, event)| event).collect()
    }
}

impl<M> ControlEventQueue<M> {
    pub(crate) fn new() -> Result<Self, OpenError> {
        let wake_source =
            EventFlag::new().map_err(|source| OpenError::System { resource: "event descriptors", source })?;
        let queue = Mutex::new(GenerationEvents::new());
        Ok(Self { wake_source, has_events: AtomicBool::new(false), queue })
    }

    fn push(&self, event: ControlEvent<M>) {
        let mut queue = lock(&self.queue);
        queue.push(event);
        // Release: pairs with the acquire in `has_events`.
        self.has_events.store(true, Ordering::Release);
        drop(queue);
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

    /// The events since the last call, but for those of former generations.
    pub(crate) fn take_events(&self) -> Vec<ControlEvent<M>> {
        let mut queue = lock(&self.handler().queue);
        // Release: under the lock, so it never hides events that are still there.
        self.handler().has_events.store(false, Ordering::Release);
        queue.take(|peer| self.generation(peer))
    }
}

impl<M: Send> Wake for ControlEventQueue<M> {
    fn wake(&self) {
        self.wake_source.wake();
    }
}

impl<M: FabricMessage> FabricHandler for ControlEventQueue<M> {
    fn restarted(&self, peer: Rank, generation: u32) {
        lock(&self.queue).generations.insert(peer, generation);
    }

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

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use proptest::prelude::*;

    use super::*;

    #[derive(Clone, Copy, Debug)]
    enum Step {
        /// The device connects again.
        Connect(Rank),
        /// The watcher comes to the next command.
        Begin,
        /// The watcher sees something of a peer.
        Push(Rank),
        /// The device looks.
        Take,
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            (0..3_u32).prop_map(Step::Connect),
            Just(Step::Begin),
            (0..3_u32).prop_map(Step::Push),
            Just(Step::Take),
        ]
    }

    proptest! {
        #[test]
        fn the_device_gets_all_events_of_the_generation_that_it_is_at_and_no_other(
            steps in proptest::collection::vec(step(), 0..60),
        ) {
            let mut queue = GenerationEvents::new();
            let (mut device, mut watcher) = ([0_u32; 3], [0_u32; 3]);
            let (mut commands, mut waiting) = (VecDeque::new(), Vec::new());
            for (number, step) in steps.into_iter().enumerate() {
                match step {
                    Step::Connect(peer) => {
                        device[peer as usize] += 1;
                        commands.push_back((peer, device[peer as usize]));
                    }
                    Step::Begin => {
                        if let Some((peer, generation)) = commands.pop_front() {
                            watcher[peer as usize] = generation;
                            queue.generations.insert(peer, generation);
                        }
                    }
                    Step::Push(peer) => {
                        queue.push(ControlEvent::Message { peer, message: number });
                        waiting.push((peer, watcher[peer as usize], number));
                    }
                    Step::Take => {
                        let taken = queue.take(|peer| device[peer as usize]).into_iter();
                        let taken: Vec<_> = taken.map(|event| match event {
                            ControlEvent::Message { peer, message } => (peer, message),
                            _ => unreachable!("nothing else was pushed"),
                        }).collect();
                        let expected = waiting.drain(..).filter(|(peer, generation, _)| *generation == device[*peer as usize]);
                        let expected: Vec<_> = expected.map(|(peer, _, number)| (peer, number)).collect();
                        prop_assert_eq!(taken, expected);
                    }
                }
            }
        }
    }
}

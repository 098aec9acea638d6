//! What the tests of the suite stand on: a world of devices of one backend in one process, polled
//! by the test.
//!
//! A test names what it waits for ([`World::until`]); every wait has a deadline and fails with what
//! was seen.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread;
use std::time::Duration;

use pleach_transport::{
    Device, DeviceConfig, Event, Inline, LossCause, Memory, Nanos, PostError, Rank, Region, Relay,
    RemoteSlice, Responder, Secret, SharedMemory, Signal, Signals, Slice, Source, SubmitError, Submitted,
    Transfer, TransferError, TransferId, Urgency, clock,
};
use pleach_vocabulary::random::Random;

/// What a test has a device do: a transfer, or a signal alone.
#[derive(Clone, Debug)]
pub(crate) enum Submission {
    Signal(Signal),
    Transfer(Transfer),
}

impl From<Transfer> for Submission {
    fn from(transfer: Transfer) -> Self {
        Self::Transfer(transfer)
    }
}

impl Submission {
    pub(crate) fn submit(
        self,
        device: &mut (impl Device + ?Sized),
        peer: Rank,
        id: TransferId,
    ) -> Result<Submitted, SubmitError> {
        match self {
            Self::Signal(signal) => device.signal(peer, &signal, id),
            Self::Transfer(transfer) => device.submit(peer, transfer, id),
        }
    }
}

/// How long a test waits for anything, in real time. Generous: machines are loaded.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// How long a test watches that something does *not* happen, where time is real.
const WATCHED: Duration = Duration::from_millis(60);

/// Rounds of polling in which something must not happen; also where time is virtual.
const WATCHED_ROUNDS: u32 = 300;

/// How long an inbox is held at most.
const HOLD_MAX: Duration = Duration::from_secs(10);

/// Signal slots a rank keeps for each peer in the worlds of the suite.
pub(crate) const SIGNAL_SLOTS: usize = 16;

/// Room for events that `poll` is given, unless a test sets another.
const EVENT_CAPACITY: usize = 16;

/// First byte of a message that tells a peer that regions were registered; not kept in the inbox.
const ANNOUNCEMENT: u8 = 0xA7;

/// First byte of a message that is answered, with `!` in its place.
pub(crate) const QUESTION: u8 = b'?';
/// Has an [`Inbox`] pass on what follows the next byte, which is the rank to pass it to. Other
/// messages do not begin with it.
pub(crate) const PASS_ON: u8 = 0xA8;

/// How the devices of a backend are made. To instantiate the suite implement this and name it in
/// `main.rs`.
pub(crate) trait Backend: Sized {
    /// How the backend is called in failures.
    const NAME: &'static str;

    /// Whether time passes by itself and devices may be used on different threads at once. A
    /// simulation says no, and is spared the tests about threads and sleeping.
    const LIVE: bool;

    /// Puts and gets of this length do not end with their submission.
    const LONG_BYTES: usize = 512;

    /// How long after a rank is gone its peers know it from their transfers, if nobody tells them:
    /// over TCP half a second.
    const FAILED_AFTER: Duration = Duration::from_millis(600);

    /// Runs a test, several times where runs differ (a simulation: once a seed).
    fn repeat(test: fn()) {
        test();
    }

    /// A new fabric for `world_size` ranks, independent of all others.
    fn start(world_size: u32) -> Self;

    /// The device of `config.rank`.
    fn device(&mut self, config: DeviceConfig) -> Box<dyn Device>;

    /// Memory that the devices register.
    fn memory(&self, len: usize) -> Arc<dyn Memory>;

    /// The time to poll with: the clock, or virtual time, moved on to where something can happen.
    fn tick(&mut self) -> Nanos;

    /// Ends a rank without bye.
    fn kill(&mut self, device: Box<dyn Device>) {
        drop(device);
    }
}

/// A [`Backend`] as a value, so that a test is compiled once and not once a backend.
#[derive(Clone, Copy)]
pub(crate) struct BackendKind {
    /// How the backend is called in failures.
    pub(crate) name: &'static str,
    /// See [`Backend::LIVE`].
    pub(crate) live: bool,
    /// See [`Backend::LONG_BYTES`].
    pub(crate) long_bytes: usize,
    /// See [`Backend::FAILED_AFTER`].
    pub(crate) failed_after: Duration,
    start: fn(u32) -> Box<dyn Started>,
}

impl BackendKind {
    /// The kind of a backend.
    pub(crate) fn of<B: Backend + 'static>() -> Self {
        Self {
            name: B::NAME,
            live: B::LIVE,
            long_bytes: B::LONG_BYTES,
            failed_after: B::FAILED_AFTER,
            start: |world_size| Box::new(B::start(world_size)),
        }
    }
}

/// The methods of a [`Backend`] that was started.
pub(crate) trait Started {
    fn device(&mut self, config: DeviceConfig) -> Box<dyn Device>;
    fn memory(&self, len: usize) -> Arc<dyn Memory>;
    fn tick(&mut self) -> Nanos;
    fn kill(&mut self, device: Box<dyn Device>);
}

impl<B: Backend> Started for B {
    fn device(&mut self, config: DeviceConfig) -> Box<dyn Device> {
        Backend::device(self, config)
    }

    fn memory(&self, len: usize) -> Arc<dyn Memory> {
        Backend::memory(self, len)
    }

    fn tick(&mut self) -> Nanos {
        Backend::tick(self)
    }

    fn kill(&mut self, device: Box<dyn Device>) {
        Backend::kill(self, device);
    }
}

/// How a transfer ended.
pub(crate) type Ending = Result<u64, TransferError>;

/// Devices of one backend, all in this process.
pub(crate) struct World {
    kind: BackendKind,
    backend: Box<dyn Started>,
    stations: Vec<Station>,
    next_id: u64,
    batch: Vec<Event>,
}

struct Station {
    device: Option<Box<dyn Device>>,
    polled: bool,
    log: Vec<Event>,
    endings: HashMap<TransferId, Vec<Ending>>,
    inbox: Arc<Inbox>,
}

/// Keeps the messages and losses of one rank; answers questions.
#[derive(Default)]
pub(crate) struct Inbox {
    state: Mutex<InboxState>,
}

/// What an [`Inbox`] keeps.
#[derive(Default)]
pub(crate) struct InboxState {
    /// Messages in order of arrival.
    pub(crate) messages: Vec<(Rank, Vec<u8>)>,
    /// Losses in the order in which they were reported.
    pub(crate) losses: Vec<(Rank, LossCause)>,
    /// How many messages had come before each of the losses.
    pub(crate) heard_before: Vec<usize>,
    /// The peer that is told of each loss.
    pub(crate) reports_to: Option<Rank>,
    announcements: HashMap<Rank, u64>,
}

impl Inbox {
    /// What has come so far.
    pub(crate) fn state(&self) -> MutexGuard<'_, InboxState> {
        self.state.lock().expect("no test panics while it holds an inbox")
    }
}

/// Ends the hold of an [`Inbox`] when it is dropped.
pub(crate) struct Hold(#[expect(dead_code, reason = "only dropped")] Sender<()>);

impl Inbox {
    /// Lets no message or loss in until the hold is dropped, or [`HOLD_MAX`] has passed: then
    /// whoever waits for the test itself goes on.
    pub(crate) fn hold(self: &Arc<Self>) -> Hold {
        let (inbox, (release, released), (holds, is_held)) = (Arc::clone(self), channel(), channel());
        thread::spawn(move || {
            let _state = inbox.state();
            holds.send(()).expect("the test waits");
            // An error either way: nothing is ever sent.
            let _ = released.recv_timeout(HOLD_MAX);
        });
        is_held.recv().expect("the thread holds it");
        Hold(release)
    }
}

impl Responder for Inbox {
    fn message(&self, from: Rank, message: &[u8]) -> Option<Vec<u8>> {
        let mut state = self.state();
        if message.first() == Some(&ANNOUNCEMENT) {
            *state.announcements.entry(from).or_default() += 1;
            return None;
        }
        state.messages.push((from, message.to_vec()));
        let question = message.strip_prefix(&[QUESTION])?;
        Some([b"!", question].concat())
    }

    fn lost(&self, peer: Rank, cause: &LossCause) {
        let mut state = self.state();
        let heard = state.messages.len();
        state.heard_before.push(heard);
        state.losses.push((peer, cause.clone()));
    }

    fn message_relaying(&self, from: Rank, message: &[u8], relay: &mut Relay<'_>) -> Option<Vec<u8>> {
        if let Some([to, rest @ ..]) = message.strip_prefix(&[PASS_ON]) {
            relay(Rank::from(*to), rest, Urgency::Ordinary).expect("the test has connected them");
        }
        self.message(from, message)
    }

    fn lost_relaying(&self, peer: Rank, cause: &LossCause, relay: &mut Relay<'_>) {
        self.lost(peer, cause);
        let reports_to = self.state().reports_to;
        if let Some(to) = reports_to {
            relay(to, &[b'#', peer as u8], Urgency::Urgent).expect("the test has connected them");
        }
    }
}

impl World {
    /// A world of `ranks`, none connected.
    pub(crate) fn new(kind: BackendKind, ranks: u32) -> Self {
        Self::with(kind, ranks, |_| {})
    }

    /// A world of `ranks`, none connected, each made from a configuration that the test may change.
    pub(crate) fn with(kind: BackendKind, ranks: u32, change: impl Fn(&mut DeviceConfig)) -> Self {
        let mut backend = (kind.start)(ranks);
        let stations = (0..ranks).map(|rank| station(&mut *backend, rank, ranks, &change)).collect();
        Self { kind, backend, stations, next_id: 1, batch: Vec::with_capacity(EVENT_CAPACITY) }
    }

    /// A world of `ranks`, each connected to each other.
    pub(crate) fn connected(kind: BackendKind, ranks: u32) -> Self {
        let mut world = Self::new(kind, ranks);
        world.connect_all();
        world
    }

    /// Connects each rank to each other and waits until all are.
    pub(crate) fn connect_all(&mut self) {
        let ranks = self.stations.len() as u32;
        for (from, to) in pairs(ranks) {
            let address = self.device(to).info().address.clone();
            self.device(from).connect(to, &address).expect("connecting to a peer of the world starts");
        }
        self.until("all pairs to be connected", |world| {
            pairs(ranks).all(|(from, to)| world.saw(from, &Event::Connected { peer: to }) > 0)
        });
    }

    /// The device of a rank that was neither taken nor killed.
    pub(crate) fn device(&mut self, rank: Rank) -> &mut dyn Device {
        let device = self.stations[rank as usize].device.as_mut();
        device.expect("the rank still has its device").as_mut()
    }

    /// The device of a rank, to be used on another thread; the world polls it no more.
    pub(crate) fn take(&mut self, rank: Rank) -> Box<dyn Device> {
        self.stations[rank as usize].device.take().expect("the rank still has its device")
    }

    /// Ends a rank without bye.
    pub(crate) fn kill(&mut self, rank: Rank) {
        let device = self.take(rank);
        self.backend.kill(device);
    }

    /// Gives a rank to another process, with nothing known of what came before. Returns the device
    /// that had the rank, if it has not ended.
    pub(crate) fn replace(&mut self, rank: Rank) -> Option<Box<dyn Device>> {
        self.replace_as(rank, |_| {})
    }

    /// As [`World::replace`], from a configuration that the test may change.
    pub(crate) fn replace_as(
        &mut self,
        rank: Rank,
        change: impl Fn(&mut DeviceConfig),
    ) -> Option<Box<dyn Device>> {
        let ranks = self.stations.len() as u32;
        let new = station(&mut *self.backend, rank, ranks, &change);
        std::mem::replace(&mut self.stations[rank as usize], new).device
    }

    /// Starts to connect two ranks, the first one first.
    pub(crate) fn start_pair(&mut self, first: Rank, second: Rank) {
        for (from, to) in [(first, second), (second, first)] {
            let address = self.device(to).info().address.clone();
            self.device(from).connect(to, &address).expect("connecting to a peer of the world starts");
        }
    }

    /// Connects two ranks and waits until they are, for the `time`-th time at each end.
    pub(crate) fn connect_pair(&mut self, [one, other]: [Rank; 2], times: [usize; 2]) {
        self.start_pair(one, other);
        self.until_connected([one, other], times);
    }

    /// Waits until two ranks are connected, for the `time`-th time at each end.
    pub(crate) fn until_connected(&mut self, [one, other]: [Rank; 2], times: [usize; 2]) {
        self.until("a pair to be connected", |world| {
            world.saw(one, &Event::Connected { peer: other }) == times[0]
                && world.saw(other, &Event::Connected { peer: one }) == times[1]
        });
    }

    /// Whether `pump` polls this rank; a rank that is not polled stands for one that is stopped or
    /// busy.
    pub(crate) fn set_polled(&mut self, rank: Rank, polled: bool) {
        self.stations[rank as usize].polled = polled;
    }

    /// How much room `poll` is given from now on.
    pub(crate) fn set_event_capacity(&mut self, capacity: usize) {
        self.batch = Vec::with_capacity(capacity);
    }

    /// `wanted` bytes, or the most that one transfer takes.
    pub(crate) fn longest(&mut self, wanted: usize) -> usize {
        let most = self.device(0).info().transfer_bytes_max;
        wanted.min(usize::try_from(most).unwrap_or(usize::MAX))
    }

    /// The messages and losses of a rank.
    pub(crate) fn inbox(&self, rank: Rank) -> Arc<Inbox> {
        Arc::clone(&self.stations[rank as usize].inbox)
    }

    /// The backend, for memory and time.
    pub(crate) fn backend(&mut self) -> &mut dyn Started {
        &mut *self.backend
    }

    /// The kind of the backend.
    pub(crate) fn kind(&self) -> BackendKind {
        self.kind
    }

    /// Polls every rank once and keeps what it says.
    pub(crate) fn pump(&mut self) {
        let mut idle = true;
        for station in self.stations.iter_mut().filter(|station| station.polled) {
            let Some(device) = station.device.as_mut() else { continue };
            let (now, capacity) = (self.backend.tick(), self.batch.capacity());
            device.poll(now, &mut self.batch);
            assert_eq!(self.batch.capacity(), capacity, "poll grew the vector of events");
            idle &= self.batch.is_empty();
            for event in self.batch.drain(..) {
                station.keep(event);
            }
        }
        if idle && self.kind.live {
            std::thread::yield_now();
        }
    }

    /// Polls until something holds; fails with what was seen when it does not come.
    pub(crate) fn until(&mut self, what: &str, mut holds: impl FnMut(&mut Self) -> bool) {
        let deadline = clock::now() + PATIENCE;
        while !holds(self) {
            let seen = |world: &Self| {
                format!("{}: {PATIENCE:?} passed without {what}{}", self.kind.name, world.seen())
            };
            assert!(clock::now() < deadline, "{}", seen(self));
            self.pump();
        }
    }

    /// Polls for a while and calls `check` every time: for what must not happen.
    pub(crate) fn watch(&mut self, mut check: impl FnMut(&mut Self)) {
        watch_all(std::slice::from_mut(self), |_, world| check(world));
    }

    /// New registered memory of a rank. All peers it is connected to have heard of it.
    pub(crate) fn region(&mut self, rank: Rank, len: usize) -> Region {
        let memory = self.backend.memory(len);
        self.register(rank, memory)
    }

    /// Registers memory of the test. All peers the rank is connected to have heard of it.
    pub(crate) fn register(&mut self, rank: Rank, memory: Arc<dyn Memory>) -> Region {
        let region = self.device(rank).register(memory).expect("the backend's own memory is registered");
        self.announce(rank);
        region
    }

    /// New registered memory of a rank for one peer alone, with these bytes.
    pub(crate) fn region_for(&mut self, rank: Rank, peer: Rank, bytes: &[u8]) -> Region {
        let memory = self.backend.memory(bytes.len());
        let region = self.device(rank).register_for(peer, memory).expect("the backend's own memory");
        self.announce(rank);
        region.whole().store(bytes);
        region
    }

    /// New registered memory of a rank that its peers can only read and that holds these bytes.
    pub(crate) fn lent_region_of(&mut self, rank: Rank, bytes: &[u8]) -> Region {
        let memory = SharedMemory::lendable(bytes.len()).expect("the system gives memory");
        let region = self.register(rank, memory);
        region.whole().store(bytes);
        region
    }

    /// New registered memory that holds these bytes.
    pub(crate) fn region_of(&mut self, rank: Rank, bytes: &[u8]) -> Region {
        let region = self.region(rank, bytes.len());
        region.whole().store(bytes);
        region
    }

    /// Waits until all peers have a message that was sent after everything so far: a key travels by
    /// message, and what was registered or released before is known to who received a later
    /// message.
    pub(crate) fn announce(&mut self, rank: Rank) {
        for peer in 0..self.stations.len() as u32 {
            if peer == rank || !self.is_up(rank, peer) || !self.is_up(peer, rank) {
                continue;
            }
            let heard =
                |world: &Self| world.inbox(peer).state().announcements.get(&rank).copied().unwrap_or(0);
            let before = heard(self);
            self.post(rank, peer, &[ANNOUNCEMENT]);
            self.until("a message to arrive", |world| heard(world) > before);
        }
    }

    /// Posts a message, polling as long as there is no room for it.
    pub(crate) fn post(&mut self, from: Rank, to: Rank, message: &[u8]) {
        let mut posted = false;
        self.until("room for a message", |world| {
            posted = match world.device(from).post(to, message, Urgency::Ordinary) {
                Ok(()) => true,
                Err(PostError::QueueFull { .. }) => false,
                Err(error) => panic!("{}: posting from {from} to {to} failed: {error}", world.kind.name),
            };
            posted
        });
    }

    /// Submits under a new name.
    pub(crate) fn try_submit(
        &mut self,
        from: Rank,
        to: Rank,
        what: impl Into<Submission>,
    ) -> Result<TransferId, SubmitError> {
        let id = TransferId(self.next_id);
        self.next_id += 1;
        let submitted = what.into().submit(self.device(from), to, id)?;
        if let Submitted::Ended(value) = submitted {
            self.stations[from as usize].keep(Event::Done { id, result: Ok(value) });
        }
        Ok(id)
    }

    /// Submits under a new name, polling as long as the queue is full.
    pub(crate) fn submit(&mut self, from: Rank, to: Rank, what: impl Into<Submission>) -> TransferId {
        let (what, mut id) = (what.into(), None);
        self.until("room in the queue", |world| {
            match world.try_submit(from, to, what.clone()) {
                Ok(accepted) => id = Some(accepted),
                Err(SubmitError::QueueFull { .. }) => {}
                Err(error) => panic!("{}: {from} to {to} was not accepted: {error}", world.kind.name),
            }
            id.is_some()
        });
        id.expect("`until` has returned")
    }

    /// Whether a bad remote slice is an error of its transfer. RDMA does not check keys: it may
    /// cost the pair there.
    pub(crate) fn checks_keys(&mut self) -> bool {
        !self.device(0).info().fabric.ends_with("verbs")
    }

    /// Submits and waits for the end, which must come once.
    pub(crate) fn carry_out(&mut self, from: Rank, to: Rank, what: impl Into<Submission>) -> Ending {
        let id = self.submit(from, to, what);
        self.finish(from, id)
    }

    /// Waits for the end of a transfer.
    pub(crate) fn finish(&mut self, rank: Rank, id: TransferId) -> Ending {
        self.until("a transfer to end", |world| !world.endings(rank, id).is_empty());
        self.ending(rank, id)
    }

    /// How a transfer ended, which it must have, once.
    pub(crate) fn ending(&self, rank: Rank, id: TransferId) -> Ending {
        let endings = self.endings(rank, id);
        assert_eq!(endings.len(), 1, "{}: {id:?} of rank {rank} must end once: {endings:?}", self.kind.name);
        endings[0].clone()
    }

    /// Waits until all these transfers have ended, watches for more, and returns how each ended.
    pub(crate) fn finish_all(&mut self, rank: Rank, ids: &[TransferId]) -> Vec<Ending> {
        self.until("all transfers to end", |world| ids.iter().all(|id| !world.endings(rank, *id).is_empty()));
        self.watch(|_| {});
        ids.iter().map(|id| self.ending(rank, *id)).collect()
    }

    /// All ends of a transfer so far.
    pub(crate) fn endings(&self, rank: Rank, id: TransferId) -> &[Ending] {
        self.stations[rank as usize].endings.get(&id).map_or(&[], Vec::as_slice)
    }

    /// How often an event was seen by a rank.
    pub(crate) fn saw(&self, rank: Rank, event: &Event) -> usize {
        self.log(rank).iter().filter(|seen| *seen == event).count()
    }

    /// Shows that after a loss or a fence no transfer was said to have been carried out (with one
    /// peer under test).
    pub(crate) fn check_nothing_succeeds_after(&self, rank: Rank, end: &Event) {
        let after = self.log(rank).iter().skip_while(|event| *event != end);
        let succeeded = after.filter(|event| matches!(event, Event::Done { result: Ok(_), .. })).count();
        assert_eq!(succeeded, 0, "{}: after {end:?} all transfers fail", self.kind.name);
    }

    /// Every event of a rank in order.
    pub(crate) fn log(&self, rank: Rank) -> &[Event] {
        &self.stations[rank as usize].log
    }

    /// The losses of `peer` that a rank saw.
    pub(crate) fn losses(&self, rank: Rank, peer: Rank) -> Vec<LossCause> {
        let lost = |event: &Event| match event {
            Event::PeerLost { peer: who, cause } if *who == peer => Some(cause.clone()),
            _ => None,
        };
        self.log(rank).iter().filter_map(lost).collect()
    }

    /// Waits for the loss of a peer and returns its cause.
    pub(crate) fn until_lost(&mut self, rank: Rank, peer: Rank) -> LossCause {
        self.until("the loss of a peer", |world| !world.losses(rank, peer).is_empty());
        self.losses(rank, peer).remove(0)
    }

    /// The signal slots that `rank` keeps for `peer`.
    pub(crate) fn signal_slots(&mut self, rank: Rank, peer: Rank) -> Signals {
        self.device(rank).signal_slots(peer)
    }

    /// How many signals of `peer` a signal slot of `rank` has received.
    pub(crate) fn count(&mut self, rank: Rank, peer: Rank, signal_slot: u16) -> u64 {
        self.signal_slots(rank, peer).count(signal_slot)
    }

    /// Shows that two ranks still reach each other, in both directions.
    pub(crate) fn check_pair(&mut self, one: Rank, other: Rank) {
        const SIGNAL_SLOT: u16 = SIGNAL_SLOTS as u16 - 1;
        for (from, to) in [(one, other), (other, one)] {
            let before = self.count(to, from, SIGNAL_SLOT);
            let ending = self.carry_out(from, to, Submission::Signal(signal(SIGNAL_SLOT, b"still here")));
            assert_eq!(ending, Ok(0), "{}: {from} no longer reaches {to}", self.kind.name);
            self.until("a signal between ranks that were not touched", |world| {
                world.count(to, from, SIGNAL_SLOT) == before + 1
            });
        }
    }

    fn is_up(&self, rank: Rank, peer: Rank) -> bool {
        let mut up = false;
        for event in self.log(rank) {
            match event {
                Event::Connected { peer: who } if *who == peer => up = true,
                Event::PeerLost { peer: who, .. }
                | Event::Departed { peer: who }
                | Event::Severed { peer: who }
                    if *who == peer =>
                {
                    up = false;
                }
                _ => {}
            }
        }
        up && self.stations[rank as usize].device.is_some()
    }

    fn seen(&self) -> String {
        let mut text = String::new();
        for (rank, station) in self.stations.iter().enumerate() {
            let notable =
                station.log.iter().filter(|event| !matches!(event, Event::Done { result: Ok(_), .. }));
            let last: Vec<_> = notable.rev().take(12).collect();
            let state = station.inbox.state();
            let _ = write!(
                text,
                "\n  rank {rank}: {} transfers ended, {} messages, losses {:?}; latest first: {last:?}",
                station.endings.len(),
                state.messages.len(),
                state.losses,
            );
        }
        text
    }
}

impl Station {
    fn keep(&mut self, event: Event) {
        if let Event::Done { id, result } = &event {
            self.endings.entry(*id).or_default().push(result.clone());
        }
        if let Event::PeerLost { peer, cause } = &event {
            let told = self.inbox.state().losses.iter().filter(|(who, _)| who == peer).count();
            let is_loss = |event: &&Event| matches!(event, Event::PeerLost { peer: of, .. } if of == peer);
            let polled = 1 + self.log.iter().filter(is_loss).count();
            assert_eq!(told, polled, "the responder hears of a loss ({cause}) once, and before it is polled");
        }
        self.log.push(event);
    }
}

fn station(
    backend: &mut dyn Started,
    rank: Rank,
    world_size: u32,
    change: &impl Fn(&mut DeviceConfig),
) -> Station {
    let inbox = Arc::new(Inbox::default());
    let mut config = DeviceConfig {
        rank,
        world_size,
        secret: Some(Secret::new(b"known to both ends")),
        signal_slots: SIGNAL_SLOTS,
        connect_timeout: PATIENCE,
        interface: None,
        address: None,
        responder: Arc::clone(&inbox) as Arc<dyn Responder>,
    };
    change(&mut config);
    let device = Some(backend.device(config));
    Station { device, polled: true, log: Vec::new(), endings: HashMap::new(), inbox }
}

/// All ordered pairs of different ranks.
pub(crate) fn pairs(ranks: u32) -> impl Iterator<Item = (Rank, Rank)> {
    (0..ranks).flat_map(move |from| (0..ranks).filter(move |to| *to != from).map(move |to| (from, to)))
}

/// A signal with these bytes beside it.
pub(crate) fn signal(signal_slot: u16, payload: &[u8]) -> Signal {
    Signal { signal_slot, payload: Inline::new(payload).expect("the payload fits a slot") }
}

/// A put of a slice with a signal in `signal_slot`, if any.
pub(crate) fn put(src: &Slice, dst: RemoteSlice, signal_slot: Option<u16>) -> Transfer {
    Transfer::Put {
        src: Source::Slice(src.clone()),
        dst,
        signal: signal_slot.map(|signal_slot| signal(signal_slot, b"")),
    }
}

/// As [`World::watch`] of several worlds at the same time; `check` is given the number of its
/// world.
pub(crate) fn watch_all(worlds: &mut [World], mut check: impl FnMut(usize, &mut World)) {
    let is_live = worlds.iter().any(|world| world.kind.live);
    let end = clock::now() + WATCHED;
    let mut rounds = 0;
    while rounds < WATCHED_ROUNDS || (is_live && clock::now() < end) {
        for (number, world) in worlds.iter_mut().enumerate() {
            world.pump();
            check(number, world);
        }
        rounds += 1;
    }
}

/// Bytes that look random and differ between seeds.
pub(crate) fn noise(seed: u64, len: usize) -> Vec<u8> {
    let mut random = Random::new(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ 0xD1B5_4A32_D192_ED03);
    let mut bytes = Vec::with_capacity(len.next_multiple_of(8));
    while bytes.len() < len {
        bytes.extend_from_slice(&random.bits().to_le_bytes());
    }
    bytes.truncate(len);
    bytes
}

/// Fails with the first difference, not with megabytes.
#[track_caller]
pub(crate) fn assert_bytes(got: &[u8], want: &[u8], what: &str) {
    assert_eq!(got.len(), want.len(), "{what}: length");
    let Some(at) = got.iter().zip(want).position(|(got, want)| got != want) else { return };
    let wrong = got.iter().zip(want).filter(|(got, want)| got != want).count();
    panic!("{what}: {wrong} of {} bytes differ, first byte {at}: {} for {}", got.len(), got[at], want[at]);
}

/// Says why a test does not apply to a backend.
pub(crate) fn skip(backend: BackendKind, reason: &str) {
    crate::skipped::skip(format_args!("{} {reason}", backend.name));
}

/// Says which part of a test does not apply to a backend.
pub(crate) fn skip_part(backend: BackendKind, reason: &str) {
    crate::skipped::skip_part(format_args!("{} {reason}", backend.name));
}

//! Byte streams between the ranks of a device: what HTTP/2 runs on where there is no socket.
//!
//! A stream joins this rank with one peer. Each of its two directions has a ring of [`RING_BYTES`]
//! at the receiver. The sender stores a piece of at most [`PIECE_BYTES`] there and raises a signal
//! that tells how many bytes it has. Where the peer's ring is not mapped, the sender stores the
//! piece in a ring of its own, and puts it into the same place of the receiver's. The receiver
//! copies it out. A signal without bytes ends the direction. Pieces take their signal slots in
//! turn.
//!
//! The receiver gives back what it has read by signals without data, *credits*: one for
//! [`CREDIT_PUTS`] pieces, and one for [`CREDIT_BYTES`] bytes. So a credit, which may have to wake
//! the sender's thread, is rare, and a sender whose receiver has read everything has room.
//!
//! The task that writes stores the bytes and sends them itself, and a task that reads finds what
//! has come. A thread polls the device for what a fabric leaves to polls, wakes the tasks that
//! wait, and sleeps on the device's wake source. It never waits awake: what it waits for is often
//! the work of a task on its own processor.
//!
//! **Invariant:** a part of the receiver's ring, and a signal slot, is written only after a credit
//! for what was there before; a part of the sender's ring also only after its put has ended. So a
//! signal's payload is read before the next one overwrites it, and a peer that is slow stops the
//! sender and nothing else.
//!
//! **The limit:** each byte is copied once at each end, and put once where nothing is mapped. At
//! most [`PUTS`] pieces of [`RING_BYTES`] in all are under way. Pages of a ring that were not used
//! take no memory.

mod http2;
mod incoming;
mod outgoing;
mod ring;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, VecDeque};
use std::io::{self, ErrorKind, IoSlice};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Context, Poll, Waker};
use std::thread::JoinHandle;
use std::time::Duration;

use pleach_transport::device::{Flush, Wake};
use pleach_transport::mutex::lock;
use pleach_transport::{
    Device, Event, Inline, Memory, Nanos, Rank, Region, RegisterError, RemoteSlice, SharedMemory, Signal,
    Signals, Slice, SubmitError, Submitted, TransferId, clock, sleep,
};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tonic::transport;
use tonic::transport::server::Connected;

use self::http2::Connector;
pub use self::http2::{client, server};
use self::incoming::{Awaited, Incoming, WrongPut};
use self::outgoing::{Outgoing, SeenRoom, Submission, Unsent};
use self::ring::RING_BYTES;

/// The bytes of a piece at most: the receiver copies one out while the sender stores the next.
const PIECE_BYTES: usize = 256 << 10;

/// Pieces of a direction that are under way.
const PUTS: usize = 32;

/// Pieces for which there is one credit.
const CREDIT_PUTS: u64 = 8;

/// Bytes for which there is one credit.
const CREDIT_BYTES: u64 = 512 << 10;

/// Signal slots of a stream at each end: one a piece, those of the two kinds of credits, and that
/// in which the peer tells where its ring is.
const CREDITS_OF_PUTS: u16 = PUTS as u16;
const CREDITS_OF_BYTES: u16 = CREDITS_OF_PUTS + 1;
const ANNOUNCED: u16 = CREDITS_OF_BYTES + 1;
const SLOTS: u16 = ANNOUNCED + 1;

/// A remote slice as it is announced.
const ANNOUNCED_BYTES: usize = 24;

/// The longest sleep while a signal waits for room in a queue.
const RETRY_PAUSE: Duration = Duration::from_millis(5);

/// The longest sleep.
const SLEEP_MAX: Duration = Duration::from_secs(1);

/// Events of a device that are taken at once.
const EVENTS_AT_ONCE: usize = 64;

/// How long the end waits until everything that was sent has left.
const CLOSE_LIMIT: Duration = Duration::from_secs(5);

/// Names signals without data, whose ends do not matter.
const NO_PUT: TransferId = TransferId(u64::MAX);

/// The signal slots that a device needs for so many streams with each peer.
#[must_use]
pub fn signal_slots(streams: u16) -> usize {
    usize::from(streams) * usize::from(SLOTS)
}

/// Why there are no streams.
#[derive(pleach_derive::ErrorDebug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenStreamsError {
    /// There is no memory.
    #[error("no memory for the rings of a stream ({0}); free memory on this host")]
    Memory(#[source] io::Error),
    /// Memory was not registered.
    #[error("no registered memory for a stream: {0}")]
    Register(#[source] RegisterError),
    /// The device has too few signal slots.
    #[error("the device has {has} signal slots for each peer, and the streams need {needed}")]
    SignalSlots {
        /// The slots of the device.
        has: usize,
        /// Those that are needed.
        needed: usize,
    },
    /// There is no thread.
    #[error("no thread for streams: {0}")]
    Thread(#[source] io::Error),
}

/// What the streams of a device have done since they were opened, exact.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct StreamCounts {
    /// Pieces that were sent, the ends of directions included.
    pub pieces: u64,
    /// Those of them that the thread had to carry on, because their sender could not send all.
    pub carried_on: u64,
    /// Credits that were given.
    pub credits: u64,
    /// How often the thread has polled the device.
    pub polls: u64,
    /// How often the thread has woken a task.
    pub wakes: u64,
}

/// The streams of a device, which lives until they are closed. Dropping it closes them.
pub struct ByteStreams {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

/// A task takes the lock of its direction before that of the core; nothing takes two directions.
struct Shared {
    streams: Vec<Stream>,
    core: Mutex<Core>,
    waker: Arc<dyn Wake>,
    /// The thread is to end. Release store pairs with its acquire load.
    is_over: AtomicBool,
}

struct Stream {
    peer: Rank,
    outgoing: Mutex<Outgoing>,
    incoming: Mutex<Incoming>,
}

/// What tasks and the thread share: the device, and who waits for it.
struct Core {
    device: Box<dyn Device>,
    events: Vec<Event>,
    /// By the place of their stream.
    waiters: Vec<Waiters>,
    /// Streams that nobody has any more: what comes is dropped.
    dropped: Vec<usize>,
    /// Signals for which a queue had no room.
    waiting: VecDeque<(Rank, Signal)>,
    /// A transfer that a task began is under way: the thread has to poll.
    must_poll: bool,
    /// Why a peer does nothing any more.
    gone: BTreeMap<Rank, String>,
    counts: StreamCounts,
}

/// The tasks that wait for one stream.
struct Waiters {
    peer: Rank,
    /// The first of its signal slots.
    slot: u16,
    signals: Signals,
    reader: Option<(Awaited, Waker)>,
    writer: Option<(SeenRoom, Waker)>,
    /// Puts that have ended and that the writer does not know of, a bit for each number.
    ended: u32,
}

/// A stream to one peer. Reads and writes are as those of a socket: `shutdown` ends this direction,
/// and a peer that is gone is [`ErrorKind::ConnectionReset`].
pub struct ByteStream {
    shared: Arc<Shared>,
    peer: Rank,
    /// Its place among the streams.
    place: usize,
}

impl std::fmt::Debug for ByteStream {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "ByteStream(to rank {})", self.peer)
    }
}

impl std::fmt::Debug for ByteStreams {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("ByteStreams")
    }
}

impl ByteStreams {
    /// Opens so many streams with each of these peers, to which the device is connected. `events`
    /// came before. The peers open as many. Returns the streams with the first peer, then those
    /// with the next one; a stream with a peer is that of the same place there.
    ///
    /// # Errors
    ///
    /// See [`OpenStreamsError`].
    pub fn open(
        device: Box<dyn Device>,
        events: Vec<Event>,
        peers: &[Rank],
        streams: u16,
    ) -> Result<(Self, Vec<ByteStream>), OpenStreamsError> {
        let (has, needed) = (device.info().signal_slots, signal_slots(streams));
        if has < needed {
            return Err(OpenStreamsError::SignalSlots { has, needed });
        }
        let waker = device.info().waker.clone();
        let mut core = Core {
            device,
            events: Vec::with_capacity(EVENTS_AT_ONCE),
            waiters: Vec::new(),
            dropped: Vec::new(),
            waiting: VecDeque::new(),
            must_poll: false,
            gone: BTreeMap::new(),
            counts: StreamCounts::default(),
        };
        let mut all = Vec::new();
        for peer in peers {
            for number in 0..streams {
                all.push(core.add_stream(*peer, number * SLOTS)?);
            }
        }
        events.into_iter().for_each(|event| core.event(event));
        core.signal_waiting();
        let is_over = AtomicBool::new(false);
        let shared = Arc::new(Shared { streams: all, core: Mutex::new(core), waker, is_over });
        let of_thread = shared.clone();
        let thread = std::thread::Builder::new().name("pleach-streams".to_owned());
        let thread = thread.spawn(move || of_thread.drive()).map_err(OpenStreamsError::Thread)?;
        let stream =
            |(place, of): (usize, &Stream)| ByteStream { shared: shared.clone(), peer: of.peer, place };
        let opened = shared.streams.iter().enumerate().map(stream).collect();
        Ok((Self { shared, thread: Some(thread) }, opened))
    }

    /// Registers memory with the device.
    ///
    /// # Errors
    ///
    /// See [`RegisterError`].
    pub fn register(&self, memory: Arc<dyn Memory>) -> Result<Region, RegisterError> {
        self.shared.core().device.register(memory)
    }

    /// What the streams have done so far.
    #[must_use]
    pub fn counts(&self) -> StreamCounts {
        self.shared.core().counts
    }
}

impl Drop for ByteStreams {
    fn drop(&mut self) {
        self.shared.is_over.store(true, Ordering::Release);
        self.shared.waker.wake();
        if let Some(thread) = self.thread.take() {
            // A panic of the thread was printed there.
            drop(thread.join());
        }
        let mut core = self.shared.core();
        core.device.leave();
        let until = clock::now() + CLOSE_LIMIT;
        while !core.device.flush(Flush::All) && clock::now() < until {
            core.poll(clock::now());
            std::thread::yield_now();
        }
        // Streams that are still held end.
        for stream in &self.shared.streams {
            core.gone.entry(stream.peer).or_insert_with(|| "the streams of this rank were closed".to_owned());
        }
        let ready = core.take_ready();
        drop(core);
        ready.into_iter().for_each(Waker::wake);
    }
}

impl Shared {
    /// The thread's function.
    fn drive(&self) {
        while !self.is_over.load(Ordering::Acquire) {
            let mut core = self.core();
            core.poll(clock::now());
            let mut ready = core.take_ready();
            let (dropped, limit) = (core.dropped.clone(), core.sleep_max());
            if ready.is_empty() {
                sleep::unless_ready(
                    &mut Some(core),
                    |core| core.as_mut().and_then(|core| core.device.arm()),
                    |core| {
                        ready = core.as_mut().map(|core| core.take_ready()).unwrap_or_default();
                        !ready.is_empty() || self.is_over.load(Ordering::Acquire)
                    },
                    |core, armed| {
                        drop(core.take());
                        armed.wait(clock::now(), limit);
                    },
                );
            } else {
                drop(core);
            }
            // A task that is woken may run here at once, and takes the lock.
            ready.into_iter().for_each(Waker::wake);
            dropped.into_iter().for_each(|place| self.drop_incoming(place));
        }
    }

    fn core(&self) -> MutexGuard<'_, Core> {
        lock(&self.core)
    }

    /// Gives the core back. If a transfer that is under way needs polls, the thread, which may
    /// sleep, is woken for them.
    fn wake_to_poll(&self, mut core: MutexGuard<'_, Core>) {
        let must_poll = std::mem::take(&mut core.must_poll);
        drop(core);
        if must_poll {
            self.waker.wake();
        }
    }

    /// Sends the first of these bytes, as many as there is room for in one piece; none end the
    /// direction. False: there is no room.
    fn put(&self, place: usize, outgoing: &mut Outgoing, unsent: &mut Unsent<'_>) -> io::Result<bool> {
        self.core().prepare(place, outgoing)?;
        if !outgoing.has_put() {
            return Ok(false);
        }
        // Without the core's lock, for which the thread would wait.
        let (mut rest, mut count) = (*unsent, 0);
        while let Some(bytes) = rest.first() {
            let stored = outgoing.store(count, bytes);
            if stored == 0 {
                break;
            }
            rest.pass(stored);
            count += stored;
        }
        if count == 0 && unsent.first().is_some() {
            return Ok(false);
        }
        let mut core = self.core();
        let was_sent = core.send(place, outgoing, count);
        self.wake_to_poll(core);
        if was_sent? {
            *unsent = rest;
            return Ok(true);
        }
        Ok(false)
    }

    /// Sends as many of these bytes as there is room for. Nothing: there is none, and the writer is
    /// woken when there is.
    fn write(&self, place: usize, context: &Context<'_>, slices: &[IoSlice<'_>]) -> Poll<io::Result<usize>> {
        let outgoing = &mut *lock(&self.streams[place].outgoing);
        if outgoing.is_ended() {
            return Poll::Ready(Err(ErrorKind::BrokenPipe.into()));
        }
        let mut unsent = Unsent::of(slices);
        while unsent.first().is_some() {
            match self.put(place, outgoing, &mut unsent) {
                Ok(true) => {}
                Ok(false) => break,
                // The next call has the error.
                Err(_) if unsent.passed() > 0 => break,
                Err(error) => return Poll::Ready(Err(error)),
            }
        }
        if unsent.passed() > 0 || unsent.first().is_none() {
            return Poll::Ready(Ok(unsent.passed()));
        }
        self.wait_for_room(place, outgoing, Outgoing::has_room, context)
    }

    /// Ends this direction.
    fn end(&self, place: usize, context: &Context<'_>) -> Poll<io::Result<()>> {
        let outgoing = &mut *lock(&self.streams[place].outgoing);
        if outgoing.is_ended() || self.put(place, outgoing, &mut Unsent::of(&[]))? {
            return Poll::Ready(Ok(()));
        }
        self.wait_for_room(place, outgoing, Outgoing::has_put, context)
    }

    /// Has a writer woken when there may be room.
    fn wait_for_room<T>(
        &self,
        place: usize,
        outgoing: &mut Outgoing,
        has_room: impl FnOnce(&Outgoing) -> bool,
        context: &Context<'_>,
    ) -> Poll<io::Result<T>> {
        let mut core = self.core();
        let Waiters { slot, signals, .. } = &core.waiters[place];
        // Before the last look at the room.
        let seen = SeenRoom::of(signals, *slot);
        core.prepare(place, outgoing)?;
        // There is room already, or a queue has refused the put: the writer tries again after a
        // poll. The ends of puts come by polls too.
        let has_room = has_room(outgoing);
        let is_new = core.waiters[place].writer.is_none();
        core.must_poll |= has_room || (is_new && outgoing.has_under_way());
        let seen = if has_room { SeenRoom::NOTHING } else { seen };
        core.waiters[place].writer = Some((seen, context.waker().clone()));
        self.wake_to_poll(core);
        Poll::Pending
    }

    /// Reads what has come.
    fn read(&self, place: usize, context: &Context<'_>, into: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = into.filled().len();
        let Stream { peer, incoming, .. } = &self.streams[place];
        let incoming = &mut *lock(incoming);
        loop {
            let read = incoming.read(into);
            self.give_credits(*peer, incoming);
            read.map_err(|error| wrong_put(*peer, &error))?;
            if into.filled().len() > before || into.remaining() == 0 || incoming.is_ended() {
                return Poll::Ready(Ok(()));
            }
            let mut core = self.core();
            if incoming.has_come() {
                continue;
            }
            // What came before the peer went was read first.
            core.check(*peer)?;
            core.waiters[place].reader = Some((incoming.awaited(), context.waker().clone()));
            return Poll::Pending;
        }
    }

    fn give_credits(&self, peer: Rank, incoming: &mut Incoming) {
        let mut credits = incoming.credits().peekable();
        if credits.peek().is_none() {
            return;
        }
        let mut core = self.core();
        for slot in credits {
            core.counts.credits += 1;
            core.waiting.push_back((peer, signal(slot, &[])));
        }
        core.signal_waiting();
        self.wake_to_poll(core);
    }

    /// Nobody has the stream any more: what comes is dropped, and this direction ends. The thread
    /// goes on with it.
    fn drop_incoming(&self, place: usize) {
        let Stream { peer, incoming, .. } = &self.streams[place];
        // A peer that is gone needs no end.
        drop(self.end(place, &Context::from_waker(Waker::noop())));
        let incoming = &mut *lock(incoming);
        let skipped = incoming.skip();
        self.give_credits(*peer, incoming);
        let mut core = self.core();
        if skipped.is_ok() && !incoming.is_ended() && !core.gone.contains_key(peer) {
            // Also where something has come by now: then the thread does not sleep.
            core.waiters[place].reader = Some((incoming.awaited(), Waker::noop().clone()));
        }
    }
}

impl Core {
    fn add_stream(&mut self, peer: Rank, slot: u16) -> Result<Stream, OpenStreamsError> {
        let mut ring = || -> Result<Slice, OpenStreamsError> {
            let memory = SharedMemory::new(RING_BYTES).map_err(OpenStreamsError::Memory)?;
            let region = self.device.register_for(peer, memory).map_err(OpenStreamsError::Register)?;
            Ok(region.whole())
        };
        let (incoming, outgoing) = (ring()?, ring()?);
        let RemoteSlice { key, offset, len } = incoming.remote();
        let mut announced = [0; ANNOUNCED_BYTES];
        for (place, word) in announced.chunks_exact_mut(8).zip([key.0, offset, len]) {
            place.copy_from_slice(&word.to_le_bytes());
        }
        self.waiting.push_back((peer, signal(slot + ANNOUNCED, &announced)));
        let signals = self.device.signal_slots(peer);
        let (reader, writer) = (None, None);
        self.waiters.push(Waiters { peer, slot, signals: signals.clone(), reader, writer, ended: 0 });
        let may_map = self.device.info().reach.get(peer as usize).is_some_and(|reach| reach.maps);
        Ok(Stream {
            peer,
            outgoing: Mutex::new(Outgoing::new(signals.clone(), slot, outgoing, may_map)),
            incoming: Mutex::new(Incoming::new(signals, slot, incoming)),
        })
    }

    /// Makes progress.
    fn poll(&mut self, now: Nanos) {
        self.counts.polls += 1;
        let mut events = std::mem::take(&mut self.events);
        loop {
            self.device.poll(now, &mut events);
            let may_have_more = events.len() >= EVENTS_AT_ONCE;
            events.drain(..).for_each(|event| self.event(event));
            if !may_have_more {
                break;
            }
        }
        self.events = events;
        self.must_poll = false;
        self.signal_waiting();
    }

    fn sleep_max(&self) -> Duration {
        if self.waiting.is_empty() { SLEEP_MAX } else { RETRY_PAUSE }
    }

    fn event(&mut self, event: Event) {
        match event {
            Event::Done { id: NO_PUT, .. } | Event::Connected { .. } | Event::Drained { .. } => {}
            Event::Done { id, result } => {
                let Waiters { peer, ended, .. } = &mut self.waiters[id.0 as usize / PUTS];
                *ended |= 1 << (id.0 as usize % PUTS);
                if let Err(error) = result {
                    self.gone.entry(*peer).or_insert_with(|| error.to_string());
                }
            }
            Event::PeerLost { peer, cause } => {
                self.gone.entry(peer).or_insert_with(|| cause.to_string());
            }
            Event::Departed { peer } | Event::Severed { peer } => {
                self.gone.entry(peer).or_insert_with(|| "it has left".to_owned());
            }
        }
    }

    /// Sends the signals that wait, as far as there is room.
    fn signal_waiting(&mut self) {
        if self.waiting.is_empty() {
            return;
        }
        // In order for each peer; one whose queue is full holds up no other.
        let mut kept: VecDeque<(Rank, Signal)> = VecDeque::new();
        for (peer, signal) in std::mem::take(&mut self.waiting) {
            if kept.iter().any(|(full, _)| *full == peer) {
                kept.push_back((peer, signal));
                continue;
            }
            match self.device.signal(peer, &signal, NO_PUT) {
                Ok(_) => {}
                Err(SubmitError::QueueFull { .. }) => kept.push_back((peer, signal)),
                Err(error) => {
                    self.gone.entry(peer).or_insert_with(|| error.to_string());
                }
            }
        }
        self.waiting = kept;
        self.send_all();
    }

    /// What was submitted goes out, and a peer that was about to sleep is woken. False: the thread
    /// has to go on with it.
    fn send_all(&mut self) -> bool {
        let is_sent = self.device.flush(Flush::Transfers) && self.waiting.is_empty();
        self.must_poll |= !is_sent;
        is_sent
    }

    /// Takes the tasks that can go on.
    fn take_ready(&mut self) -> Vec<Waker> {
        let mut ready = Vec::new();
        for Waiters { peer, slot, signals, reader, writer, ended } in &mut self.waiters {
            let is_gone = !self.gone.is_empty() && self.gone.contains_key(peer);
            let may_read = |(awaited, _): &mut (Awaited, Waker)| is_gone || awaited.has_come(signals);
            let may_write = |(seen, _): &mut (SeenRoom, Waker)| {
                is_gone || *ended != 0 || *seen != SeenRoom::of(signals, *slot)
            };
            ready.extend(reader.take_if(may_read).map(|(_, waker)| waker));
            ready.extend(writer.take_if(may_write).map(|(_, waker)| waker));
        }
        self.counts.wakes += ready.len() as u64;
        ready
    }

    /// What a writer has to know before it writes.
    fn prepare(&mut self, place: usize, outgoing: &mut Outgoing) -> io::Result<()> {
        let Waiters { peer, ended, .. } = &mut self.waiters[place];
        let peer = *peer;
        outgoing.end_puts(std::mem::take(ended));
        self.check(peer)?;
        outgoing.learn(peer, |ring| self.device.map(peer, ring))
    }

    /// Sends bytes that were stored. False: the queue has no room.
    fn send(&mut self, place: usize, outgoing: &mut Outgoing, count: usize) -> io::Result<bool> {
        let peer = self.waiters[place].peer;
        let submitted = match outgoing.send(place, count)? {
            Submission::Signal(signal) => self.device.signal(peer, &signal, NO_PUT).map(|_| false),
            Submission::Put(put, id) => {
                self.device.submit(peer, put, id).map(|submitted| submitted == Submitted::UnderWay)
            }
        };
        match submitted {
            Ok(is_under_way) => {
                outgoing.sent(count, is_under_way);
                self.counts.pieces += 1;
                self.counts.carried_on += u64::from(!self.send_all());
                Ok(true)
            }
            Err(SubmitError::QueueFull { .. }) => {
                self.must_poll = true;
                Ok(false)
            }
            Err(error) => Err(io::Error::new(ErrorKind::ConnectionReset, error.to_string())),
        }
    }

    fn check(&self, peer: Rank) -> io::Result<()> {
        let Some(cause) = self.gone.get(&peer) else { return Ok(()) };
        Err(io::Error::new(ErrorKind::ConnectionReset, format!("rank {peer} is gone: {cause}")))
    }
}

fn wrong_put(peer: Rank, error: &WrongPut) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, format!("rank {peer} broke the protocol: {error}"))
}

/// A signal with this payload.
fn signal(signal_slot: u16, payload: &[u8]) -> Signal {
    Signal { signal_slot, payload: Inline::new(payload).unwrap_or(Inline::EMPTY) }
}

impl ByteStream {
    /// The peer.
    #[must_use]
    pub fn peer(&self) -> Rank {
        self.peer
    }

    /// A channel of tonic to the server that the peer runs on this stream
    /// (`Server::serve_with_incoming`). `server`: with what tonic is to connect, such as
    /// [`client`]; its address counts for nothing. There is one connection: calls fail when it has
    /// ended.
    ///
    /// # Errors
    ///
    /// tonic's, where the peer is gone or speaks no HTTP/2.
    pub async fn channel(self, server: transport::Endpoint) -> Result<transport::Channel, transport::Error> {
        server.connect_with_connector(Connector::of(self)).await
    }
}

impl AsyncRead for ByteStream {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.shared.read(self.place, context, into)
    }
}

impl AsyncWrite for ByteStream {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.shared.write(self.place, context, &[IoSlice::new(bytes)])
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.shared.write(self.place, context, slices)
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, _context: &mut Context<'_>) -> Poll<io::Result<()>> {
        // What was written is on its way: the thread sees to it.
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.shared.end(self.place, context)
    }
}

impl Drop for ByteStream {
    fn drop(&mut self) {
        // The peer reads to its end, as that of a socket; the thread ends it where there is no
        // room.
        self.shared.core().dropped.push(self.place);
        self.shared.drop_incoming(self.place);
    }
}

impl Connected for ByteStream {
    type ConnectInfo = Rank;

    /// The peer.
    fn connect_info(&self) -> Rank {
        self.peer
    }
}

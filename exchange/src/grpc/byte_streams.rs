//! Byte streams between the ranks of a device: what HTTP/2 runs on where there is no socket.
//!
//! A stream joins this rank with one peer. Each of its two directions has a ring of [`RING_BYTES`]
//! at the receiver. The sender copies bytes into a ring of its own and puts them into the same
//! place of the receiver's; the put's signal tells how many they are. The receiver copies them out,
//! and answers each put by a signal without data, a credit. A signal without bytes ends the
//! direction. Puts take their signal slots in turn.
//!
//! Tasks start transfers themselves. A thread polls the device, wakes tasks, and sleeps on the
//! device's wake source.
//!
//! **Invariant:** a part of the receiver's ring, and a signal slot, is written only after the
//! credit of the put that had it before; a part of the sender's ring also only after that put has
//! ended. So a signal's payload is read before the next one overwrites it, and a peer that is slow
//! stops the sender and nothing else.
//!
//! **The limit:** each byte is copied twice and put once, and at most [`PUTS`] puts of
//! [`RING_BYTES`] in all are under way. Pages of a ring that were not used take no memory.

use std::collections::{BTreeMap, VecDeque};
use std::future::Ready;
use std::io::{self, ErrorKind};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Context, Poll, Waker};
use std::thread::JoinHandle;
use std::time::Duration;

use hyper_util::rt::TokioIo;
use pleach_transport::device::{Flush, Wake};
use pleach_transport::mutex::lock;
use pleach_transport::{
    Device, Event, Inline, Memory, Nanos, Rank, Region, RegionKey, RegisterError, RemoteSlice, SharedMemory,
    Signal, Signals, Slice, Source, SubmitError, Submitted, Transfer, TransferId, clock, sleep,
};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tonic::codegen::http::Uri;
use tonic::transport;
use tonic::transport::server::Connected;

/// The bytes of a direction that are under way: a message of most models, so that a sender that
/// computes next need not wait for credits.
const RING_BYTES: usize = 4 << 20;

/// Puts of a direction that are under way.
const PUTS: usize = 32;

/// Signal slots of a stream at each end: one a put, that of credits, and that in which the peer
/// tells where its ring is.
const CREDITS: u16 = PUTS as u16;
const ANNOUNCED: u16 = CREDITS + 1;
const SLOTS: u16 = ANNOUNCED + 1;

/// A remote slice as it is announced.
const ANNOUNCED_BYTES: usize = 24;

/// How long the thread looks for events before it sleeps.
const WATCH_LIMIT: Duration = Duration::from_micros(50);

/// The longest sleep: what waits for room in a queue is tried again.
const SLEEP_MAX: Duration = Duration::from_millis(5);

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

/// The streams of a device, which lives until they are closed. Dropping it closes them.
pub struct ByteStreams {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    core: Mutex<Core>,
    waker: Arc<dyn Wake>,
    /// The thread is to end. Release store pairs with its acquire load.
    is_over: AtomicBool,
}

struct Core {
    device: Box<dyn Device>,
    events: Vec<Event>,
    streams: Vec<Stream>,
    /// Signals for which a queue had no room.
    waiting: VecDeque<(Rank, Signal)>,
    /// A transfer that a task began is under way: the thread has to poll.
    must_poll: bool,
    /// Why a peer does nothing any more.
    gone: BTreeMap<Rank, String>,
}

struct Stream {
    peer: Rank,
    /// The first of its signal slots.
    slot: u16,
    signals: Signals,
    outgoing: Outgoing,
    incoming: Incoming,
    /// Nobody has the stream any more: what comes is dropped.
    is_dropped: bool,
}

struct Outgoing {
    /// This end's ring.
    ring: Slice,
    /// The peer's ring, once it has announced it.
    remote: Option<RemoteSlice>,
    /// Puts that were begun, and those of them whose parts of the rings are free again.
    begun: u64,
    free: u64,
    /// The bytes of the puts between the two, and whether they have ended.
    under_way: VecDeque<(usize, bool)>,
    /// Where the next put begins, and the bytes of the ring that are free.
    at: usize,
    room: usize,
    is_ended: bool,
    waker: Option<Waker>,
}

struct Incoming {
    ring: Slice,
    /// Puts that were read to their end.
    read: u64,
    /// Where the next byte is, and the bytes of the present put that were read.
    at: usize,
    of_put: usize,
    is_ended: bool,
    waker: Option<Waker>,
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
            streams: Vec::new(),
            waiting: VecDeque::new(),
            must_poll: false,
            gone: BTreeMap::new(),
        };
        for peer in peers {
            for number in 0..streams {
                core.add_stream(*peer, number * SLOTS)?;
            }
        }
        events.into_iter().for_each(|event| core.event(event));
        core.signal_waiting();
        let shared = Arc::new(Shared { core: Mutex::new(core), waker, is_over: AtomicBool::new(false) });
        let of_thread = shared.clone();
        let thread = std::thread::Builder::new().name("pleach-streams".to_owned());
        let thread = thread.spawn(move || of_thread.drive()).map_err(OpenStreamsError::Thread)?;
        let peers: Vec<Rank> = shared.core().streams.iter().map(|stream| stream.peer).collect();
        let stream = |(place, peer)| ByteStream { shared: shared.clone(), peer, place };
        let opened = peers.into_iter().enumerate().map(stream).collect();
        Ok((Self { shared, thread: Some(thread) }, opened))
    }

    /// Registers memory with the device.
    ///
    /// # Errors
    ///
    /// See [`RegisterError`].
    pub fn register(&self, memory: Arc<dyn Memory>) -> Result<Region, RegisterError> {
        lock(&self.shared.core).device.register(memory)
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
        let mut core = lock(&self.shared.core);
        core.device.leave();
        let until = clock::now() + CLOSE_LIMIT;
        while !core.device.flush(Flush::All) && clock::now() < until {
            core.poll(clock::now());
            std::thread::yield_now();
        }
        // Streams that are still held end.
        let peers: Vec<Rank> = core.streams.iter().map(|stream| stream.peer).collect();
        for peer in peers {
            core.gone.entry(peer).or_insert_with(|| "the streams of this rank were closed".to_owned());
        }
        core.wake_tasks();
    }
}

impl Shared {
    /// The thread's function.
    fn drive(&self) {
        let mut watched_since = clock::now();
        while !self.is_over.load(Ordering::Acquire) {
            let now = clock::now();
            let mut core = lock(&self.core);
            if core.poll(now) {
                watched_since = now;
            }
            if now.since(watched_since) < WATCH_LIMIT {
                drop(core);
                std::thread::yield_now();
                continue;
            }
            sleep::unless_ready(
                &mut Some(core),
                |core| core.as_mut().and_then(|core| core.device.arm()),
                |core| {
                    core.as_mut().is_some_and(|core| core.wake_tasks())
                        || self.is_over.load(Ordering::Acquire)
                },
                |core, armed| {
                    drop(core.take());
                    armed.wait(clock::now(), SLEEP_MAX);
                },
            );
        }
    }

    fn core(&self) -> MutexGuard<'_, Core> {
        lock(&self.core)
    }

    /// A transfer that is under way needs polls, and the thread may sleep.
    fn wake_to_poll(&self, core: &Core) {
        if core.must_poll {
            self.waker.wake();
        }
    }
}

impl Core {
    fn add_stream(&mut self, peer: Rank, slot: u16) -> Result<(), OpenStreamsError> {
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
        self.streams.push(Stream {
            peer,
            slot,
            signals: self.device.signal_slots(peer),
            outgoing: Outgoing {
                ring: outgoing,
                remote: None,
                begun: 0,
                free: 0,
                under_way: VecDeque::with_capacity(PUTS),
                at: 0,
                room: RING_BYTES,
                is_ended: false,
                waker: None,
            },
            incoming: Incoming { ring: incoming, read: 0, at: 0, of_put: 0, is_ended: false, waker: None },
            is_dropped: false,
        });
        Ok(())
    }

    /// Makes progress. True: something has happened.
    fn poll(&mut self, now: Nanos) -> bool {
        let mut events = std::mem::take(&mut self.events);
        let mut has_news = false;
        loop {
            self.device.poll(now, &mut events);
            let may_have_more = events.len() >= EVENTS_AT_ONCE;
            has_news |= !events.is_empty();
            events.drain(..).for_each(|event| self.event(event));
            if !may_have_more {
                break;
            }
        }
        self.events = events;
        self.must_poll = false;
        for place in 0..self.streams.len() {
            if self.streams[place].is_dropped {
                self.drop_incoming(place);
            }
        }
        self.signal_waiting();
        self.wake_tasks() || has_news
    }

    fn event(&mut self, event: Event) {
        match event {
            Event::Done { id: NO_PUT, .. } | Event::Connected { .. } | Event::Drained { .. } => {}
            Event::Done { id, result } => {
                let stream = &mut self.streams[id.0 as usize / PUTS];
                let Outgoing { under_way, free, .. } = &mut stream.outgoing;
                // Its slot says which of those under way it is.
                let before = (id.0 as usize + PUTS - (*free % PUTS as u64) as usize) % PUTS;
                if let Some((_, has_ended)) = under_way.get_mut(before) {
                    *has_ended = true;
                }
                if let Err(error) = result {
                    self.gone.entry(stream.peer).or_insert_with(|| error.to_string());
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
        while let Some((peer, signal)) = self.waiting.pop_front() {
            match self.device.signal(peer, &signal, NO_PUT) {
                Ok(submitted) => self.must_poll |= submitted == Submitted::UnderWay,
                Err(SubmitError::QueueFull { .. }) => {
                    self.must_poll = true;
                    return self.waiting.push_front((peer, signal));
                }
                Err(error) => {
                    self.gone.entry(peer).or_insert_with(|| error.to_string());
                }
            }
        }
    }

    /// Wakes the tasks that can go on. True: there were some.
    fn wake_tasks(&mut self) -> bool {
        let mut had_some = false;
        for stream in &mut self.streams {
            let is_gone = self.gone.contains_key(&stream.peer);
            let may_read = is_gone || stream.incoming_bytes().is_some();
            let may_write = is_gone || stream.room() > 0;
            let wakers = [(may_read, &mut stream.incoming.waker), (may_write, &mut stream.outgoing.waker)];
            for (_, waker) in wakers.into_iter().filter(|(may, _)| *may) {
                if let Some(waker) = waker.take() {
                    waker.wake();
                    had_some = true;
                }
            }
        }
        had_some
    }

    /// Puts the first of these bytes into the peer's ring, as many as there is room for in one
    /// piece; none end the direction. Nothing: there is no room.
    fn put(&mut self, place: usize, bytes: &[u8]) -> io::Result<Option<usize>> {
        let stream = &mut self.streams[place];
        let room = stream.room();
        let (peer, outgoing) = (stream.peer, &mut stream.outgoing);
        let Some(remote) = outgoing.remote.filter(|_| room > 0) else { return Ok(None) };
        let count = bytes.len().min(room).min(RING_BYTES - outgoing.at);
        let part = outgoing.at..outgoing.at + count;
        let out_of_bounds = |_| io::Error::from(ErrorKind::InvalidData);
        let src = outgoing.ring.slice(part.clone()).map_err(out_of_bounds)?;
        let dst = remote.slice(part.start as u64..part.end as u64).map_err(out_of_bounds)?;
        src.store(&bytes[..count]);
        let number = (outgoing.begun % PUTS as u64) as usize;
        let signal = signal(stream.slot + number as u16, &(count as u32).to_le_bytes());
        let id = TransferId((place * PUTS + number) as u64);
        let put = Transfer::Put { src: Source::Slice(src), dst, signal: Some(signal) };
        match self.device.submit(peer, put, id) {
            Ok(submitted) => {
                let has_ended = submitted != Submitted::UnderWay;
                outgoing.begun += 1;
                outgoing.under_way.push_back((count, has_ended));
                outgoing.at = (outgoing.at + count) % RING_BYTES;
                outgoing.room -= count;
                self.must_poll |= !has_ended;
                Ok(Some(count))
            }
            Err(SubmitError::QueueFull { .. }) => {
                self.must_poll = true;
                Ok(None)
            }
            Err(error) => Err(io::Error::new(ErrorKind::ConnectionReset, error.to_string())),
        }
    }

    fn check(&self, peer: Rank) -> io::Result<()> {
        let Some(cause) = self.gone.get(&peer) else { return Ok(()) };
        Err(io::Error::new(ErrorKind::ConnectionReset, format!("rank {peer} is gone: {cause}")))
    }

    /// Writes as much as there is room for. Nothing: there is none.
    fn write(&mut self, place: usize, bytes: &[u8]) -> io::Result<Option<usize>> {
        self.check(self.streams[place].peer)?;
        let mut written = 0;
        while written < bytes.len()
            && let Some(count) = self.put(place, &bytes[written..])?
        {
            written += count;
        }
        Ok(Some(written).filter(|written| *written > 0 || bytes.is_empty()))
    }

    /// Ends this direction. Nothing: there is no room.
    fn end(&mut self, place: usize) -> io::Result<Option<()>> {
        if self.streams[place].outgoing.is_ended {
            return Ok(Some(()));
        }
        self.check(self.streams[place].peer)?;
        if self.put(place, &[])?.is_none() {
            return Ok(None);
        }
        self.streams[place].outgoing.is_ended = true;
        Ok(Some(()))
    }

    /// Nobody has the stream any more: what comes is dropped, and this direction ends.
    fn drop_incoming(&mut self, place: usize) {
        let stream = &mut self.streams[place];
        // No more are under way, whatever the peer counts.
        for _ in 0..PUTS {
            let Some(bytes @ 1..) = stream.incoming_bytes() else { break };
            stream.incoming.next(bytes);
            self.waiting.push_back((stream.peer, signal(stream.slot + CREDITS, &[])));
        }
        // A peer that is gone needs no end.
        drop(self.end(place));
    }

    /// Reads as much as has come. Nothing: the bytes are still to come.
    fn read(&mut self, place: usize, into: &mut ReadBuf<'_>) -> io::Result<Option<()>> {
        let before = into.filled().len();
        while into.remaining() > 0 {
            let stream = &mut self.streams[place];
            let Some(bytes) = stream.incoming_bytes() else { break };
            let incoming = &mut stream.incoming;
            if bytes == 0 {
                incoming.is_ended = true;
                break;
            }
            if bytes > RING_BYTES - (incoming.at - incoming.of_put) {
                let text = format!("rank {} broke the protocol: a put of {bytes} bytes", stream.peer);
                return Err(io::Error::new(ErrorKind::InvalidData, text));
            }
            let count = into.remaining().min(bytes - incoming.of_put);
            let source = incoming.ring.slice(incoming.at..incoming.at + count);
            let source = source.map_err(|_| io::Error::from(ErrorKind::InvalidData))?;
            source.load(into.initialize_unfilled_to(count));
            into.advance(count);
            (incoming.at, incoming.of_put) = (incoming.at + count, incoming.of_put + count);
            if incoming.of_put == bytes {
                incoming.next(bytes);
                self.waiting.push_back((stream.peer, signal(stream.slot + CREDITS, &[])));
            }
        }
        self.signal_waiting();
        let has_all = into.filled().len() > before || into.remaining() == 0;
        if has_all || self.streams[place].incoming.is_ended {
            return Ok(Some(()));
        }
        // What came before the peer went was read first.
        self.check(self.streams[place].peer)?;
        Ok(None)
    }
}

impl Stream {
    /// The bytes that can be put.
    fn room(&mut self) -> usize {
        let outgoing = &mut self.outgoing;
        if outgoing.remote.is_none() && self.signals.count(self.slot + ANNOUNCED) > 0 {
            let payload = self.signals.payload(self.slot + ANNOUNCED);
            let mut words = payload.as_chunks::<8>().0.iter().map(|word| u64::from_le_bytes(*word));
            let mut next = || words.next().unwrap_or_default();
            let (key, offset, len) = (RegionKey(next()), next(), next());
            outgoing.remote = Some(RemoteSlice { key, offset, len });
        }
        let credits = self.signals.count(self.slot + CREDITS);
        while outgoing.free < credits
            && let Some((bytes, _)) = outgoing.under_way.pop_front_if(|(_, has_ended)| *has_ended)
        {
            outgoing.free += 1;
            outgoing.room += bytes;
        }
        let may_put = outgoing.remote.is_some() && !outgoing.is_ended && outgoing.under_way.len() < PUTS;
        if may_put { outgoing.room } else { 0 }
    }

    /// The bytes of the next put, if it has come.
    fn incoming_bytes(&self) -> Option<usize> {
        let (turn, number) = (self.incoming.read / PUTS as u64, self.incoming.read % PUTS as u64);
        let slot = self.slot + number as u16;
        if self.incoming.is_ended {
            return Some(0);
        }
        let has_come = self.signals.count(slot) > turn;
        let [a, b, c, d, ..] = self.signals.payload(slot);
        has_come.then_some(u32::from_le_bytes([a, b, c, d]) as usize)
    }
}

impl Incoming {
    /// The present put, of so many bytes, was read.
    fn next(&mut self, bytes: usize) {
        self.at = (self.at - self.of_put + bytes) % RING_BYTES;
        (self.of_put, self.read) = (0, self.read + 1);
    }
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
    /// (`Server::serve_with_incoming`). `server`: with what tonic is to connect; its address counts
    /// for nothing. There is one connection: calls fail when it has ended.
    ///
    /// # Errors
    ///
    /// tonic's, where the peer is gone or speaks no HTTP/2.
    pub async fn channel(self, server: transport::Endpoint) -> Result<transport::Channel, transport::Error> {
        server.connect_with_connector(Connector(Some(self))).await
    }
}

/// Gives tonic the stream, once.
struct Connector(Option<ByteStream>);

impl tower_service::Service<Uri> for Connector {
    type Response = TokioIo<ByteStream>;
    type Error = io::Error;
    type Future = Ready<io::Result<TokioIo<ByteStream>>>;

    fn poll_ready(&mut self, _context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _server: Uri) -> Self::Future {
        let stream = self.0.take().map(TokioIo::new);
        std::future::ready(
            stream.ok_or_else(|| io::Error::new(ErrorKind::ConnectionReset, "the stream has ended")),
        )
    }
}

/// Ready with the result, or pending with the waker in its place.
fn ready_or<T>(
    result: io::Result<Option<T>>,
    waker: &mut Option<Waker>,
    context: &Context<'_>,
) -> Poll<io::Result<T>> {
    match result.transpose() {
        Some(result) => Poll::Ready(result),
        None => {
            *waker = Some(context.waker().clone());
            Poll::Pending
        }
    }
}

impl AsyncRead for ByteStream {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let mut core = self.shared.core();
        let read = core.read(self.place, into);
        self.shared.wake_to_poll(&core);
        ready_or(read, &mut core.streams[self.place].incoming.waker, context)
    }
}

impl AsyncWrite for ByteStream {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let mut core = self.shared.core();
        let written = core.write(self.place, bytes);
        self.shared.wake_to_poll(&core);
        ready_or(written, &mut core.streams[self.place].outgoing.waker, context)
    }

    fn poll_flush(self: Pin<&mut Self>, _context: &mut Context<'_>) -> Poll<io::Result<()>> {
        // What was written is on its way: the thread sees to it.
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut core = self.shared.core();
        let ended = core.end(self.place);
        self.shared.wake_to_poll(&core);
        ready_or(ended, &mut core.streams[self.place].outgoing.waker, context)
    }
}

impl Drop for ByteStream {
    fn drop(&mut self) {
        // The peer reads to its end, as that of a socket; the thread ends it where there is no
        // room.
        let mut core = self.shared.core();
        core.streams[self.place].is_dropped = true;
        core.drop_incoming(self.place);
        core.signal_waiting();
        self.shared.wake_to_poll(&core);
    }
}

impl Connected for ByteStream {
    type ConnectInfo = Rank;

    /// The peer.
    fn connect_info(&self) -> Rank {
        self.peer
    }
}

//! The control plane: a stream between each two ranks, beside the data. It carries messages and
//! detects the loss of a peer. `tcp` consists of the control plane and data connections, `verbs` of
//! the control plane and queue pairs. `shm` has streams of its own, because its messages carry
//! descriptors, but uses the same parts.
//!
//! | type | purpose | in `shm` |
//! | --- | --- | --- |
//! | [`Control`] | the device's end, one for a device: commands out, events in | |
//! | [`FabricMessage`] | messages of the fabric itself, apart from those of its users | |
//! | [`watcher`] | the thread that reads the streams, also while nobody polls the device | |
//! | [`handshake`] | both ends prove that they know the secret ([`auth`](crate::auth)) | |
//! | [`Link`] | the stream of one pair, as it is written | |
//! | [`Outgoing`] | the queue of frames to send, with limits | yes |
//! | [`Commands`] | the device's commands to its watcher, and what wakes the watcher | yes |
//! | [`WatcherThread`] | the watcher's thread; it ends in bounded time, and a forked child has none | yes |
//! | [`ReleasedRegions`] | regions that were released and that peers must be told about | |
//! | [`packet`] | packets with descriptors, and the user of the process at the other end | yes |
//!
//! A pair has one stream, and as many data connections in each direction as the fabric asks for.
//! Data connections are dialed and authenticated with the stream, then they belong to the fabric.
//! The rank with the higher number dials, and retries after a pause while nobody listens. The
//! listener sends "ready" when its device wants the pair and all connections of the pair are there.
//! The dialer takes "ready" as the beginning. From then on the stream carries [`frame`]s: messages
//! for the responder, messages of the fabric, bye.
//!
//! **Invariants:**
//!
//! * *Authentication first.* No byte of a connection is used before both ends have proved the
//!   secret. An unauthenticated connection costs bounded memory and time.
//! * *Order.* The events of one peer come in the order of the peer's actions:
//!   [`ControlEvent::Opened`] first, [`ControlEvent::Departed`] after a bye, [`ControlEvent::Lost`]
//!   last and at most once. The responder hears of a loss before the device does.
//! * *The first cause counts.* A loss that is seen on a data connection or a queue pair becomes a
//!   command ([`Control::lose`]). The watcher first reads the stream to its end, so all that the
//!   peer sent still counts, a bye above all. The reported cause is the first that was seen,
//!   however the stream ends. The reason of a refusal replaces both.
//! * *Bounds.* Posts wait up to a number of bytes, then the caller gets an error. A peer that
//!   causes more replies than it reads is lost. An urgent message has a slot of its own.
//! * *Pairs are independent.* Each pair is connected when its device asks, at any time or never.
//!   Nothing waits for a pair. A peer that dials before the device asks for it is authenticated and
//!   waits.

mod event_flag;
mod frame;
mod handshake;
mod interfaces;
mod open_error;
mod outgoing;
// Loom builds have no user of this module.
#[cfg(not(loom))]
#[allow(unsafe_code)]
pub(crate) mod packet;
mod releases;
mod slab;
pub(crate) mod socket;
#[cfg(test)]
mod tests;
mod thread;
mod watcher;

use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::{SendFlags, Shutdown};

pub(crate) use self::event_flag::EventFlag;
use self::frame::Frame;
use self::handshake::Identity;
pub use self::interfaces::interface_addresses;
pub(crate) use self::interfaces::listening_ip;
pub use self::open_error::OpenError;
pub(crate) use self::outgoing::{FrameKind, Outgoing, OutgoingFull};
pub(crate) use self::releases::ReleasedRegions;
pub(crate) use self::slab::{SECOND_DESCRIPTOR, Slab};
pub(crate) use self::thread::WatcherThread;
use self::watcher::Watcher;
use crate::clock::Nanos;
use crate::device::{
    Address, ConnectError, DeviceConfig, LossCause, MESSAGE_BYTES_MAX, PostError, Responder, Wake,
};
use crate::mutex::lock;
use crate::{Rank, clock};

/// How long dropping a device that departed waits for its peers to read the bye.
const LINGER_LIMIT: Duration = Duration::from_secs(1);

/// Additional time for the watcher to end; it takes longer only when a responder blocks.
pub(crate) const WATCHER_END_LIMIT: Duration = Duration::from_secs(1);

/// A message of a fabric to itself at another rank.
pub(crate) trait FabricMessage: Sized + Send + 'static {
    /// Decodes what a peer sent; `None`, for any other message, ends the pair.
    fn decode(bytes: &[u8]) -> Option<Self>;

    /// The reason, if the message says that the peer makes no connection and closes the stream.
    fn refusal(&self) -> Option<LossCause> {
        None
    }
}

/// Decodes bytes as each message that a peer can send: for fuzzing.
///
/// # Panics
///
/// When a decoded message does not survive encoding and decoding.
pub(crate) fn check_decoders(bytes: &[u8]) {
    use self::handshake::{HELLO_BYTES, Hello};
    if let Some(bytes) = bytes.first_chunk::<HELLO_BYTES>()
        && let Ok(hello) = Hello::decode(bytes)
    {
        assert_eq!(Hello::decode(&hello.encode()), Ok(hello));
    }
    if let Ok(Some((frame, used))) = Frame::decode(bytes) {
        assert_eq!(frame.to_bytes(), &bytes[..used]);
    }
}

/// One rank's control plane. See the module. Dropping it ends the watcher; peers that got a bye
/// have a second to read it.
pub(crate) struct Control<M> {
    rank: Rank,
    world_size: u32,
    signal_slots: usize,
    address: Address,
    fabric: &'static str,
    connect_timeout: Duration,
    /// Whether the secret is valid beyond this host.
    has_secret: bool,
    /// The wake source of `shared`; polls reach it with one pointer less.
    wake_source: Arc<EventFlag>,
    shared: Arc<Shared<M>>,
    thread: WatcherThread,
    has_sent_bye: bool,
}

impl<M: FabricMessage> Control<M> {
    /// Listens, on loopback or at the configured interface, and starts the watcher. Each pair of
    /// this fabric gets `data_connections` in each direction.
    pub(crate) fn new(
        config: DeviceConfig,
        fabric: &'static str,
        data_connections: u8,
    ) -> Result<Self, OpenError> {
        let ip = listening_ip(config.interface.as_deref(), config.address)?;
        let has_secret = config.secret.as_ref().is_some_and(|secret| !secret.is_of_this_host());
        if !ip.is_loopback() && !has_secret {
            return Err(OpenError::SecretRequired { address: ip });
        }
        if config.secret.is_none() {
            return Err(OpenError::NoSecret);
        }
        let (listener, bound) =
            socket::listen_on(ip).map_err(|source| OpenError::Listen { address: ip, source })?;
        let system = |resource| move |source: io::Error| OpenError::System { resource, source };
        let signal_slots = config.signal_slots.min(usize::from(u16::MAX) + 1);
        let identity = Identity {
            rank: config.rank,
            world_size: config.world_size,
            data_connections,
            signal_slots: signal_slots as u32,
            process: std::process::id(),
            host: socket::host_identity(),
            secret: config.secret,
        };
        let shared = Shared::new(config.responder, config.world_size);
        let shared = Arc::new(shared.map_err(system("event descriptors"))?);
        let watcher =
            Watcher::new(Arc::clone(&shared), identity, listener).map_err(system("epoll descriptor"))?;
        let name = format!("pleach-{fabric}-{}", config.rank);
        let thread = WatcherThread::spawn(name, || watcher.run()).map_err(system("watcher thread"))?;
        Ok(Self {
            rank: config.rank,
            world_size: config.world_size,
            signal_slots,
            address: socket::to_text(bound),
            fabric,
            connect_timeout: config.connect_timeout,
            has_secret,
            wake_source: Arc::clone(&shared.wake_source),
            shared,
            thread,
            has_sent_bye: false,
        })
    }

    /// As [`Device::connect`](crate::device::Device::connect); ends with [`ControlEvent::Opened`]
    /// or [`ControlEvent::Lost`]. Further calls for a peer do nothing.
    pub(crate) fn connect(&self, peer: Rank, address: &Address) -> Result<(), ConnectError> {
        if peer >= self.world_size || peer == self.rank {
            return Err(ConnectError::Peer { peer, own: self.rank, world_size: self.world_size });
        }
        let target = socket::from_text(address)
            .ok_or_else(|| ConnectError::Address { fabric: self.fabric, address: address.clone() })?;
        if !target.ip().is_loopback() && !self.has_secret {
            let source = io::Error::new(
                io::ErrorKind::PermissionDenied,
                "a shared secret is required, since the address is not loopback; write one with 'pleach secret FILE' and set PLEACH_SECRET_FILE=FILE",
            );
            return Err(ConnectError::System { peer, address: address.clone(), source });
        }
        if self.shared.link(peer).request() {
            // The rank with the higher number dials, so that the two never dial each other at once.
            let dial = (self.rank > peer).then_some(target);
            let deadline = clock::now() + self.connect_timeout;
            self.shared.commands.send(Command::Connect { peer, dial, deadline });
        }
        Ok(())
    }

    /// Sends a message of the fabric to a peer. Returns false when the peer is not connected or
    /// does not read.
    pub(crate) fn send_message(&self, peer: Rank, message: &[u8]) -> bool {
        self.shared.send_frame(peer, &Frame::Fabric(message))
    }
}

impl<M> Control<M> {
    pub(crate) fn rank(&self) -> Rank {
        self.rank
    }

    pub(crate) fn world_size(&self) -> u32 {
        self.world_size
    }

    /// The listener's address.
    pub(crate) fn address(&self) -> &Address {
        &self.address
    }

    /// Signal slots that this rank keeps for each peer.
    pub(crate) fn signal_slots(&self) -> usize {
        self.signal_slots
    }

    /// The flag that wakes the device; set when there are events.
    pub(crate) fn wake_source(&self) -> &Arc<EventFlag> {
        &self.wake_source
    }

    /// A new list of released regions; an addition wakes the device.
    pub(crate) fn releases(&self) -> ReleasedRegions {
        ReleasedRegions::new(Arc::downgrade(&self.wake_source))
    }

    /// Whether [`Control::take_events`] returns an event. One load: for polls.
    pub(crate) fn has_events(&self) -> bool {
        self.shared.has_events()
    }

    /// The events since the last call.
    pub(crate) fn take_events(&self) -> Vec<ControlEvent<M>> {
        self.shared.take_events()
    }

    /// As [`Device::post`](crate::device::Device::post); an urgent message is one of
    /// [`Urgency::Urgent`](crate::device::Urgency::Urgent).
    pub(crate) fn post(&self, peer: Rank, message: &[u8], is_urgent: bool) -> Result<(), PostError> {
        let link = self.shared.links.get(peer as usize).ok_or(PostError::NotConnected { peer })?;
        if link.post(peer, message, is_urgent)? {
            self.shared.commands.send(Command::Flush { peer });
        }
        Ok(())
    }

    /// Sends a bye to a peer, if it is connected: the end of the stream is then no loss.
    pub(crate) fn send_bye(&mut self, peer: Rank) {
        self.has_sent_bye = true;
        self.shared.send_frame(peer, &Frame::Bye);
    }

    /// Whether frames wait to be sent to a peer.
    pub(crate) fn has_output(&self, peer: Rank) -> bool {
        self.shared.link(peer).has_output()
    }

    /// Ends a pair for a cause that was seen elsewhere than on its stream. The peer is lost after
    /// all that it sent has been read, unless it sent a bye.
    pub(crate) fn lose(&self, peer: Rank, cause: LossCause) {
        // The stream may end meanwhile, as a consequence.
        self.shared.link(peer).suspect(cause.clone());
        self.shared.commands.send(Command::Lose { peer, cause });
    }

    /// Ends a pair; what the peer has sent and nobody has read is dropped.
    pub(crate) fn lose_at_once(&self, peer: Rank, cause: LossCause) {
        self.shared.lose(peer, cause);
    }

    /// Records why one of the two ranks makes no connection.
    pub(crate) fn refuse(&self, peer: Rank, cause: LossCause) {
        self.shared.link(peer).refuse(cause);
    }

    /// The cause to report for a peer whose loss looks like `seen`.
    pub(crate) fn cause(&self, peer: Rank, seen: LossCause) -> LossCause {
        self.shared.link(peer).cause(seen)
    }

    /// Ignores the peer from now on.
    pub(crate) fn sever(&self, peer: Rank) {
        self.shared.link(peer).end(State::Severed);
        self.shared.commands.send(Command::Sever { peer });
    }
}

impl<M> Drop for Control<M> {
    fn drop(&mut self) {
        // A forked child has no watcher thread to wait for, and the streams belong to its parent.
        if self.thread.is_forked() {
            return;
        }
        let linger = if self.has_sent_bye { LINGER_LIMIT } else { Duration::ZERO };
        self.shared.commands.send(Command::Stop { linger_until: clock::now() + linger });
        self.thread.join(linger + WATCHER_END_LIMIT);
        for link in &self.shared.links {
            link.close();
        }
    }
}

/// From the watcher to the device.
pub(crate) enum ControlEvent<M> {
    /// The pair has its control stream and its data connections, if the fabric has some.
    Opened {
        peer: Rank,
        /// Signal slots that the peer keeps for this rank.
        signal_slots: usize,
        to_peer: Vec<OwnedFd>,
        from_peer: Vec<OwnedFd>,
    },
    /// A message of the fabric itself.
    Message { peer: Rank, message: M },
    /// The peer sent a bye: the end of its stream will be no loss.
    Departed { peer: Rank },
    /// The peer is lost; comes at most once, after all that the peer sent.
    Lost { peer: Rank, cause: LossCause },
}

/// From the device to the watcher.
enum Command {
    /// Dial the address, or wait for the peer when there is none.
    Connect { peer: Rank, dial: Option<SocketAddr>, deadline: Nanos },
    /// Frames wait to be sent on the control stream.
    Flush { peer: Rank },
    /// Ignore this peer from now on.
    Sever { peer: Rank },
    /// The peer is lost, for a cause that was seen elsewhere than on its control stream.
    Lose { peer: Rank, cause: LossCause },
    /// End; peers that got a bye may read it until this time.
    Stop { linger_until: Nanos },
}

/// The commands of a device to its watcher, which sleeps on the flag.
pub(crate) struct Commands<C> {
    waiting: Mutex<Vec<C>>,
    wake: EventFlag,
}

impl<C> Commands<C> {
    pub(crate) fn new() -> std::io::Result<Self> {
        Ok(Self { waiting: Mutex::new(Vec::new()), wake: EventFlag::new()? })
    }

    pub(crate) fn send(&self, command: C) {
        lock(&self.waiting).push(command);
        self.wake.wake();
    }

    /// All commands since the last call, in order.
    pub(crate) fn take(&self) -> Vec<C> {
        std::mem::take(&mut *lock(&self.waiting))
    }

    /// Set when there are commands; drain it before taking them.
    pub(crate) fn wake(&self) -> &EventFlag {
        &self.wake
    }
}

/// The state that the polling thread and the watcher thread share. None of it is on the data path:
/// a poll without events reads two flags.
struct Shared<M> {
    responder: Arc<dyn Responder>,
    /// Wakes the device.
    wake_source: Arc<EventFlag>,
    commands: Commands<Command>,
    events: Mutex<Vec<ControlEvent<M>>>,
    has_events: AtomicBool,
    links: Vec<Link>,
}

impl<M> Shared<M> {
    fn new(responder: Arc<dyn Responder>, world_size: u32) -> std::io::Result<Self> {
        Ok(Self {
            responder,
            wake_source: Arc::new(EventFlag::new()?),
            commands: Commands::new()?,
            events: Mutex::new(Vec::new()),
            has_events: AtomicBool::new(false),
            links: (0..world_size).map(|_| Link::default()).collect(),
        })
    }

    fn link(&self, peer: Rank) -> &Link {
        &self.links[peer as usize]
    }

    fn has_events(&self) -> bool {
        // Acquire: pairs with the release in `send`; the lock orders the events themselves.
        self.has_events.load(Ordering::Acquire)
    }

    fn take_events(&self) -> Vec<ControlEvent<M>> {
        let mut events = lock(&self.events);
        // Release: under the lock, so it never hides events that are still there.
        self.has_events.store(false, Ordering::Release);
        std::mem::take(&mut *events)
    }

    fn send(&self, event: ControlEvent<M>) {
        let mut events = lock(&self.events);
        events.push(event);
        // Release: pairs with the acquire in `has_events`.
        self.has_events.store(true, Ordering::Release);
        drop(events);
        self.wake_source.wake();
    }

    /// Sends a frame on the fabric's behalf; false when the peer is not connected. A peer that does
    /// not read is found out by other means.
    fn send_frame(&self, peer: Rank, frame: &Frame<'_>) -> bool {
        let waits = self.link(peer).send_frame(frame);
        if waits == Ok(true) {
            self.commands.send(Command::Flush { peer });
        }
        waits.is_ok()
    }

    /// Marks a peer lost. The first of several reports counts; a severed peer is not lost.
    fn lose(&self, peer: Rank, cause: LossCause) {
        let cause = self.link(peer).cause(cause);
        if self.link(peer).end(State::Lost) {
            self.responder.lost(peer, &cause);
            self.send(ControlEvent::Lost { peer, cause });
        }
    }
}

/// The state of a peer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum State {
    #[default]
    Unconnected,
    Open,
    /// The peer sent a bye.
    Departed,
    Lost,
    Severed,
}

/// The control stream to one peer, as both threads write it: the state of the peer, and the frames
/// to send.
#[derive(Default)]
struct Link(Mutex<Inner>);

#[derive(Default)]
struct Inner {
    state: State,
    /// The device has asked to be connected.
    is_requested: bool,
    stream: Option<Arc<OwnedFd>>,
    outgoing: Outgoing,
    has_sent_bye: bool,
    /// Why the peer will be lost, after all that it sent has been read.
    suspected: Option<LossCause>,
    /// Why one of the two ranks makes no connection; more precise than the loss that follows.
    refused: Option<LossCause>,
}

impl Link {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        lock(&self.0)
    }

    fn state(&self) -> State {
        self.lock().state
    }

    /// Records that the device wants the peer; false when it did before, or the peer has a later
    /// state.
    fn request(&self) -> bool {
        let mut link = self.lock();
        link.state == State::Unconnected && !std::mem::replace(&mut link.is_requested, true)
    }

    /// Records a cause that was seen elsewhere; the first cause counts.
    fn suspect(&self, cause: LossCause) {
        self.lock().suspected.get_or_insert(cause);
    }

    /// Records why one of the two ranks makes no connection; the first reason counts.
    fn refuse(&self, cause: LossCause) {
        self.lock().refused.get_or_insert(cause);
    }

    /// The cause to report for a peer whose loss looks like `seen`.
    fn cause(&self, seen: LossCause) -> LossCause {
        let link = self.lock();
        link.refused.clone().or_else(|| link.suspected.clone()).unwrap_or(seen)
    }

    /// Marks the pair connected; false when it was severed meanwhile.
    fn open(&self, stream: Arc<OwnedFd>) -> bool {
        let mut link = self.lock();
        if link.state != State::Unconnected {
            return false;
        }
        link.state = State::Open;
        link.stream = Some(stream);
        true
    }

    /// Marks the peer departed.
    fn depart(&self) {
        let mut link = self.lock();
        if link.state == State::Open {
            link.state = State::Departed;
        }
    }

    /// Whether a bye was sent to a peer that is still connected.
    fn lingers(&self) -> bool {
        let link = self.lock();
        link.has_sent_bye && link.stream.is_some()
    }

    /// Ends the link as lost or severed. Returns whether this was the first end.
    fn end(&self, state: State) -> bool {
        let mut link = self.lock();
        if matches!(link.state, State::Lost | State::Severed) {
            return false;
        }
        link.state = state;
        link.close();
        true
    }

    /// Closes the stream.
    fn close(&self) {
        self.lock().close();
    }

    /// Sends nothing more; the peer may still read what was sent.
    fn shutdown_write(&self) {
        if let Some(stream) = &self.lock().stream {
            let _ = rustix::net::shutdown(stream, Shutdown::Write);
        }
    }

    /// Sends a user's message, or queues what the socket does not take. Returns whether frames
    /// wait.
    fn post(&self, peer: Rank, message: &[u8], is_urgent: bool) -> Result<bool, PostError> {
        if message.len() > MESSAGE_BYTES_MAX {
            return Err(PostError::TooLong { bytes: message.len() });
        }
        let mut link = self.lock();
        if link.state != State::Open || link.stream.is_none() || link.has_sent_bye {
            return Err(PostError::NotConnected { peer });
        }
        let kind = if is_urgent { FrameKind::Urgent } else { FrameKind::Post };
        let frame = Frame::Message(message).to_bytes();
        link.outgoing.push(kind, frame).map_err(|OutgoingFull| PostError::QueueFull { peer })?;
        Ok(link.flush())
    }

    /// Sends a frame of the watcher or the fabric; returns whether frames wait.
    fn send_frame(&self, frame: &Frame<'_>) -> Result<bool, SendError> {
        let mut link = self.lock();
        if link.stream.is_none() {
            return Err(SendError::NotConnected);
        }
        let kind = match frame {
            Frame::Message(_) | Frame::Fabric(_) => FrameKind::Reply,
            Frame::Ready | Frame::Bye => FrameKind::Single,
        };
        link.outgoing.push(kind, frame.to_bytes()).map_err(|OutgoingFull| SendError::BacklogFull)?;
        link.has_sent_bye |= *frame == Frame::Bye;
        Ok(link.flush())
    }

    /// Sends what the socket takes; returns whether frames still wait.
    fn flush(&self) -> bool {
        self.lock().flush()
    }

    fn has_output(&self) -> bool {
        !self.lock().outgoing.is_empty()
    }
}

/// Why a frame was not sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SendError {
    /// The peer has no stream, not yet or not any more.
    NotConnected,
    /// The peer does not read what was sent before.
    BacklogFull,
}

impl Inner {
    fn close(&mut self) {
        self.outgoing.clear();
        if let Some(stream) = self.stream.take() {
            // The watcher wakes and removes the stream; a forked child does not keep it open.
            let _ = rustix::net::shutdown(&stream, Shutdown::Both);
        }
    }

    fn flush(&mut self) -> bool {
        let Some(stream) = &self.stream else { return false };
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        match self.outgoing.flush(|bytes| rustix::net::send(stream, bytes, flags)) {
            Ok(()) => false,
            Err(Errno::AGAIN) => true,
            Err(_) => {
                // The watcher reads the same stream and finds the cause.
                self.outgoing.clear();
                false
            }
        }
    }
}

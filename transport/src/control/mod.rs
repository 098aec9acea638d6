//! The control plane: a stream between each two ranks, beside the data. It carries messages and
//! detects the loss of a peer. `tcp` consists of the control plane and data connections, `verbs` of
//! the control plane and queue pairs, `shm` of the control plane and memory.
//!
//! | type | purpose |
//! | --- | --- |
//! | [`Control`] | the device's end, one for a device: commands out |
//! | [`FabricHandler`] | the fabric's end in the watcher thread: events in |
//! | [`ControlEventQueue`] | the handler of `tcp` and `verbs`: keeps the events until the device polls |
//! | [`watcher`] | the thread that reads the streams, also while nobody polls the device |
//! | [`handshake`] | both ends prove that they know the secret ([`auth`](crate::auth)) |
//! | [`KnownProcesses`] | the processes that have had each rank |
//! | [`ControlStream`] | the stream of one pair, as it is written |
//! | [`Outgoing`] | the queue of frames to send, with limits |
//! | [`WatcherThread`] | the watcher's thread; it ends in bounded time, and a forked child has none |
//! | [`ReleasedRegions`] | regions that were released and that peers must be told about |
//! | [`packet`] | bytes with descriptors, and the user of the process at the other end |
//!
//! A pair has one stream, and as many data connections in each direction as the fabric asks for.
//! Data connections are dialed and authenticated with the stream, then they belong to the fabric.
//! The rank with the higher number dials, and retries after a pause while nobody listens. The
//! listener sends "ready" when its device wants the pair and all connections of the pair are there.
//! The dialer takes "ready" as the beginning. From then on the stream carries [`frame`]s: messages
//! for the responder, messages of the fabric, bye.
//!
//! Streams are TCP connections or Unix sockets ([`Network`]). Unix sockets reach ranks of one user
//! on one host, and carry files: both ends send theirs with a "ready", the dialer first. A Unix
//! socket has a random name that only this job knows, so a failed attempt means that the peer has
//! ended or is at fault. The failure is reported at once, not at the deadline.
//!
//! A rank may be given to another process when its peer has ended ([`Control::connect`] with
//! `is_again`, contract line 16). This begins a *generation* of the pair. The watcher begins it
//! too, when it comes to that command, and tells the fabric ([`FabricHandler::restarted`]). The
//! listener tells a process that comes too early that the rank is taken, and it dials again until
//! its deadline. It refuses processes that had the rank.
//!
//! **Invariants:**
//!
//! * *Authentication first.* No byte of a connection is used before both ends have proved the
//!   secret. An unauthenticated connection costs bounded memory and time.
//! * *One protection.* Both ends want TLS on a connection or neither ([`tls`](crate::tls)); with
//!   TLS no byte goes in clear after the hellos. The writer of a stream is under its lock, its
//!   reader is the watcher's alone.
//! * *Order.* The events of one peer come in the order of the peer's actions:
//!   [`ControlEvent::Opened`] first, [`ControlEvent::Departed`] after a bye, [`ControlEvent::Lost`]
//!   last and at most once. The responder hears of a loss before the device does.
//! * *The first cause counts.* A loss that is seen on a data connection or a queue pair becomes a
//!   command ([`Control::lose`]). The watcher first reads the stream to its end, so all that the
//!   peer sent still counts, a bye above all. The reported cause is the first that was seen,
//!   however the stream ends. The reason of a refusal replaces both.
//! * *Bounds.* Posts wait up to a number of bytes, then the caller gets an error. A peer that
//!   causes more replies than it reads is lost. An urgent message has a slot of its own.
//! * *Generations do not mix.* The connections, frames, causes and states of a generation are
//!   dropped before the next one begins, by the thread that reads them. Events have the number of
//!   their generation, and the device drops those of former ones.
//! * *Pairs are independent.* Each pair is connected when its device asks, at any time or never.
//!   Nothing waits for a pair. A peer that dials before the device asks for it is authenticated and
//!   waits.

mod event_flag;
mod events;
mod frame;
mod handshake;
#[cfg(all(test, feature = "tls"))]
mod handshake_tests;
mod history;
mod interfaces;
mod open_error;
mod outgoing;
#[allow(unsafe_code)]
pub(crate) mod packet;
mod releases;
pub(crate) mod socket;
#[cfg(test)]
pub(crate) mod tests;
mod thread;
mod watcher;

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::Shutdown;

pub(crate) use self::event_flag::EventFlag;
pub(crate) use self::events::{ControlEvent, ControlEventQueue, FabricMessage};
pub(crate) use self::frame::ControlFrame;
use self::handshake::{EndRanks, Identity};
pub(crate) use self::history::KnownProcesses;
pub(crate) use self::interfaces::listening_ip;
pub use self::interfaces::{interface_addresses, listening_address};
pub use self::open_error::OpenError;
use self::outgoing::{FrameKind, Outgoing, OutgoingFull};
pub(crate) use self::releases::ReleasedRegions;
use self::socket::DialTarget;
pub(crate) use self::socket::Network;
pub use self::socket::{host_identity, tune_stream};
use self::thread::WatcherThread;
use self::watcher::Watcher;
use crate::clock::Nanos;
use crate::device::{
    Address, ConnectError, DeviceConfig, Incarnation, LossCause, MESSAGE_BYTES_MAX, Meeting, PostError,
    Relay, Responder, Wake,
};
use crate::mutex::lock;
use crate::tls::{Session, Tls, TlsMode, TlsReader, TlsWriter};
use crate::{Rank, clock};

/// How long dropping a device that departed waits for its peers to read the bye.
const LINGER_LIMIT: Duration = Duration::from_secs(1);

/// Additional time for the watcher to end; it takes longer only when a responder blocks.
const WATCHER_END_LIMIT: Duration = Duration::from_secs(1);

/// Files that came with a message; `None`: this process may open no more files, so they were
/// dropped.
pub(crate) type ReceivedFiles = Option<Vec<OwnedFd>>;

/// Sends bytes with files whole, or fails.
pub(crate) type SendWithFiles<'a> = dyn FnMut(&[u8], &[BorrowedFd<'_>]) -> Result<(), Errno> + 'a;

/// How a pair is connected.
#[derive(Clone, Copy)]
pub(crate) enum PairKind<'a> {
    /// Both are in one world, and this is the peer's address.
    InWorld(&'a Address),
    /// They share no world.
    BetweenWorlds(Meeting<'a>),
}

/// A connection whose handshake is over.
pub(crate) struct ProtectedSocket {
    socket: OwnedFd,
    session: Option<Session>,
}

impl ProtectedSocket {
    /// With its keys, if it speaks TLS.
    fn new(socket: OwnedFd, session: Option<Session>) -> Self {
        Self { socket, session }
    }

    /// The socket, and what seals and opens its bytes if it speaks TLS.
    pub(crate) fn split(self) -> (OwnedFd, Option<TlsWriter>, Option<Box<TlsReader>>) {
        let (writer, reader) = self.session.map(Session::split).unzip();
        (self.socket, writer, reader.map(Box::new))
    }
}

/// A pair that has its control stream and its data connections.
pub(crate) struct OpenedPair {
    /// The device at the other end.
    pub(crate) incarnation: Incarnation,
    /// This rank in the world of the peer.
    pub(crate) own_rank: Rank,
    /// Signal slots that the peer keeps for this rank.
    pub(crate) signal_slots: u32,
    /// The data connections to the peer, and those from it.
    pub(crate) data: [Vec<ProtectedSocket>; 2],
    /// The files that the peer sent, over Unix sockets.
    pub(crate) files: Vec<OwnedFd>,
    /// The control stream.
    pub(crate) stream: Arc<OwnedFd>,
}

/// The fabric's end of its control plane. The watcher thread calls it, and it never blocks. Waking
/// it wakes the device.
pub(crate) trait FabricHandler: Wake {
    /// Another process may have the rank from now on: what comes belongs to this generation of the
    /// pair. The first generation is zero, and begins without a call.
    fn restarted(&self, peer: Rank, generation: u32);

    /// The pair is open. Returns a descriptor of the peer's process, if the peer sent one. Called
    /// before any other method for this generation of the pair.
    fn opened(&self, peer: Rank, pair: OpenedPair) -> Result<Option<OwnedFd>, LossCause>;

    /// Handles a message of the fabric itself, with the files that came with it. If the message is
    /// the reason for which the peer will close the stream, `refuse` is called with the reason.
    fn message(
        &self,
        peer: Rank,
        message: &[u8],
        files: ReceivedFiles,
        refuse: &dyn Fn(LossCause),
    ) -> Result<(), LossCause>;

    /// The peer sent a bye: the end of its stream will be no loss.
    fn departed(&self, peer: Rank);

    /// The peer is lost; called at most once a generation, after all that the peer sent.
    fn lost(&self, peer: Rank, cause: LossCause);

    /// Sends "ready". Over Unix sockets "ready" carries the files that the peer gets before the
    /// pair is open.
    fn send_ready(&self, _peer: Rank, ready: &[u8], send: &mut SendWithFiles<'_>) -> Result<(), Errno> {
        send(ready, &[])
    }

    /// Over Unix sockets: sends the messages with files that wait for this peer, before all other
    /// frames that wait. Called with the stream's lock held.
    fn send_waiting(&self, _peer: Rank, _send: &mut SendWithFiles<'_>) -> Result<(), Errno> {
        Ok(())
    }

    /// Whether messages wait for [`FabricHandler::send_waiting`].
    fn has_waiting(&self, _peer: Rank) -> bool {
        false
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
    if let Ok(Some((frame, used))) = ControlFrame::decode(bytes) {
        assert_eq!(frame.to_bytes(), &bytes[..used]);
    }
}

/// One rank's control plane. See the module. Dropping it ends the watcher. Peers that got a bye
/// over TCP have a second to read it.
pub(crate) struct Control<H> {
    rank: Rank,
    world_size: u32,
    signal_slots: usize,
    address: Address,
    fabric: &'static str,
    network: Network,
    connect_timeout: Duration,
    /// The current generation of each pair.
    generations: Vec<u32>,
    /// Whether the secret is valid beyond this host.
    has_secret: bool,
    handler: Arc<H>,
    shared: Arc<Shared>,
    thread: WatcherThread,
    has_sent_bye: bool,
}

impl<H: FabricHandler + 'static> Control<H> {
    /// Listens, over TCP on loopback or at the configured interface, and starts the watcher.
    pub(crate) fn new(
        config: DeviceConfig,
        known: KnownProcesses,
        fabric: &'static str,
        network: Network,
        handler: H,
    ) -> Result<Self, OpenError> {
        let has_secret = config.secret.as_ref().is_some_and(|secret| !secret.is_of_this_host());
        let (listener, address) = network.listen(&config, has_secret)?;
        // The kernel protects Unix sockets.
        let tls = match &config.secret {
            Some(secret) if !network.is_unix() => {
                let tls = secret.tls()?;
                // All addresses of a host are not one address, and are reached from other hosts.
                let ip = listening_address_of(&address).unwrap_or(std::net::Ipv4Addr::UNSPECIFIED.into());
                let protection = tls.asked(ip);
                tracing::info!(
                    rank = config.rank,
                    address = address.0,
                    "{fabric}: who connects here {protection}"
                );
                if !cfg!(feature = "tls") && tls.mode() == TlsMode::Auto && !ip.is_loopback() {
                    tracing::warn!(
                        rank = config.rank,
                        "{fabric}: built without the feature 'tls': connections of other hosts are in clear"
                    );
                }
                tls
            }
            _ => Tls::new(TlsMode::Off, None)?,
        };
        let system = |resource| move |source: io::Error| OpenError::System { resource, source };
        let signal_slots = config.signal_slots.min(usize::from(u16::MAX) + 1);
        let identity = Identity {
            rank: config.rank,
            world_size: config.world_size,
            data_connections: network.data_connections(),
            signal_slots: signal_slots as u32,
            process: std::process::id(),
            incarnation: known.own(),
            host: socket::host_identity(),
            secret: config.secret.map(|secret| secret.with_tls(tls)),
        };
        let handler = Arc::new(handler);
        let shared = Shared {
            responder: config.responder,
            handler: Arc::clone(&handler) as _,
            known,
            commands: Commands::new().map_err(system("event descriptors"))?,
            streams: (0..config.world_size).map(|_| ControlStream::default()).collect(),
        };
        let shared = Arc::new(shared);
        let watcher = Watcher::new(Arc::clone(&shared), identity, network, listener)
            .map_err(system("epoll descriptor"))?;
        let name = format!("pleach-{fabric}-{}", config.rank);
        let thread = WatcherThread::spawn(name, || watcher.run()).map_err(system("watcher thread"))?;
        Ok(Self {
            rank: config.rank,
            world_size: config.world_size,
            signal_slots,
            address,
            fabric,
            network,
            connect_timeout: config.connect_timeout,
            generations: vec![0; config.world_size as usize],
            has_secret,
            handler,
            shared,
            thread,
            has_sent_bye: false,
        })
    }
}

impl<H> Control<H> {
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

    pub(crate) fn handler(&self) -> &Arc<H> {
        &self.handler
    }

    /// The streams, for messages with files that other threads have to send.
    pub(crate) fn streams(&self) -> Streams {
        Streams(Arc::downgrade(&self.shared))
    }

    /// The current generation of a pair.
    pub(crate) fn generation(&self, peer: Rank) -> u32 {
        self.generations[peer as usize]
    }

    /// As [`Device::connect`](crate::device::Device::connect); ends with [`FabricHandler::opened`]
    /// or [`FabricHandler::lost`]. With `is_again` a new generation of the pair begins: its end was
    /// polled. Otherwise further calls for a peer do nothing.
    pub(crate) fn connect(
        &mut self,
        peer: Rank,
        kind: PairKind<'_>,
        is_again: bool,
    ) -> Result<(), ConnectError> {
        let dial = self.dial(peer, kind)?;
        if is_again {
            self.generations[peer as usize] += 1;
        } else if !self.shared.stream(peer).request() {
            return Ok(());
        }
        self.shared.commands.send(Command::Connect {
            peer,
            generation: self.generations[peer as usize],
            share_world: matches!(kind, PairKind::InWorld(_)),
            dial,
            timeout: self.connect_timeout,
        });
        Ok(())
    }

    /// Whether [`Control::connect`] takes these arguments.
    pub(crate) fn check(&self, peer: Rank, kind: PairKind<'_>) -> Result<(), ConnectError> {
        self.dial(peer, kind).map(drop)
    }

    /// What to dial, if this rank dials.
    fn dial(&self, peer: Rank, kind: PairKind<'_>) -> Result<Option<(DialTarget, EndRanks)>, ConnectError> {
        if peer >= self.world_size || peer == self.rank {
            return Err(ConnectError::Peer { peer, own: self.rank, world_size: self.world_size });
        }
        // In one world the rank with the higher number dials, so that the two never dial each other
        // at once.
        let (address, dialer, share_world, dials) = match kind {
            PairKind::InWorld(address) => (address, self.rank, true, self.rank > peer),
            PairKind::BetweenWorlds(Meeting::Dial { address, own }) => (address, own, false, true),
            PairKind::BetweenWorlds(Meeting::Await) => return Ok(None),
        };
        let target = self.target(peer, address)?;
        Ok(dials.then_some((target, EndRanks { dialer, listener: peer, share_world })))
    }

    fn target(&self, peer: Rank, address: &Address) -> Result<DialTarget, ConnectError> {
        let target = self
            .network
            .target(address)
            .ok_or_else(|| ConnectError::Address { fabric: self.fabric, address: address.clone() })?;
        if target.is_beyond_this_host() && !self.has_secret {
            let source = io::Error::new(
                io::ErrorKind::PermissionDenied,
                "a shared secret is required, since the address is not loopback; write one with 'pleach secret FILE' and set PLEACH_SECRET_FILE=FILE",
            );
            return Err(ConnectError::System { peer, address: address.clone(), source });
        }
        Ok(target)
    }

    /// Sends a message of the fabric to a peer. Returns false when the peer is not connected or
    /// does not read.
    pub(crate) fn send_message(&self, peer: Rank, message: &[u8]) -> bool {
        self.shared.send_frame(peer, &ControlFrame::Fabric(message)).is_ok()
    }

    /// As [`Device::post`](crate::device::Device::post); an urgent message is one of
    /// [`Urgency::Urgent`](crate::device::Urgency::Urgent).
    pub(crate) fn post(&self, peer: Rank, message: &[u8], is_urgent: bool) -> Result<(), PostError> {
        self.shared.post(peer, message, is_urgent)
    }

    /// Sends a bye to a peer, if it is connected: the end of the stream is then no loss.
    pub(crate) fn send_bye(&mut self, peer: Rank) {
        self.has_sent_bye = true;
        let _ = self.shared.send_frame(peer, &ControlFrame::Bye);
    }

    /// Whether frames wait to be sent to a peer.
    pub(crate) fn has_output(&self, peer: Rank) -> bool {
        self.shared.stream(peer).has_output(peer, &*self.shared.handler)
    }

    /// Ends a pair for a cause that was seen elsewhere than on its stream. The peer is lost after
    /// all that it sent has been read, unless it sent a bye.
    pub(crate) fn lose(&self, peer: Rank, cause: LossCause) {
        // The stream may end meanwhile, as a consequence.
        self.shared.stream(peer).suspect(cause.clone());
        self.shared.commands.send(Command::Lose { peer, cause });
    }

    /// Ends a pair; what the peer has sent and nobody has read is dropped.
    pub(crate) fn lose_at_once(&self, peer: Rank, cause: LossCause) {
        self.shared.lose(peer, cause);
    }

    /// Records why one of the two ranks makes no connection.
    pub(crate) fn refuse(&self, peer: Rank, cause: LossCause) {
        self.shared.stream(peer).refuse(cause);
    }

    /// The cause to report for a peer whose loss looks like `seen`.
    pub(crate) fn cause(&self, peer: Rank, seen: LossCause) -> LossCause {
        self.shared.stream(peer).cause(seen)
    }

    /// Ignores the peer from now on.
    pub(crate) fn sever(&self, peer: Rank) {
        self.shared.stream(peer).end(StreamState::Severed);
        self.shared.commands.send(Command::Sever { peer });
    }

    /// Ends the watcher and closes all streams, as a drop does. Further calls do nothing.
    pub(crate) fn shut_down(&mut self) {
        // A forked child has no watcher thread to wait for, and the streams belong to its parent.
        if self.thread.is_forked() {
            return;
        }
        // Bytes that wait in a Unix socket outlive its sender.
        let lingers = self.has_sent_bye && !self.network.is_unix();
        let linger = if lingers { LINGER_LIMIT } else { Duration::ZERO };
        self.shared.commands.send(Command::Stop { linger_until: clock::now() + linger });
        self.thread.join(linger + WATCHER_END_LIMIT);
        for link in &self.shared.streams {
            link.close();
        }
    }
}

impl<H> Drop for Control<H> {
    fn drop(&mut self) {
        self.shut_down();
    }
}

/// The streams of a control plane, while it exists.
pub(crate) struct Streams(Weak<Shared>);

impl Streams {
    /// As [`Control::post`].
    pub(crate) fn post(&self, peer: Rank, message: &[u8], is_urgent: bool) -> Result<(), PostError> {
        self.0.upgrade().ok_or(PostError::NotConnected { peer })?.post(peer, message, is_urgent)
    }

    /// Sends what waits for a peer ([`FabricHandler::send_waiting`]), now or when there is room.
    pub(crate) fn flush(&self, peer: Rank) {
        if let Some(shared) = self.0.upgrade() {
            shared.flush(peer);
        }
    }
}

/// From the device to the watcher.
enum Command {
    /// Dial the target, or wait for the peer when there is none.
    Connect {
        peer: Rank,
        generation: u32,
        share_world: bool,
        dial: Option<(DialTarget, EndRanks)>,
        timeout: Duration,
    },
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
struct Commands {
    waiting: Mutex<Vec<Command>>,
    wake: EventFlag,
}

impl Commands {
    fn new() -> std::io::Result<Self> {
        Ok(Self { waiting: Mutex::new(Vec::new()), wake: EventFlag::new()? })
    }

    fn send(&self, command: Command) {
        lock(&self.waiting).push(command);
        self.wake.wake();
    }

    /// All commands since the last call, in order.
    fn take(&self) -> Vec<Command> {
        std::mem::take(&mut *lock(&self.waiting))
    }
}

/// The state that the polling thread and the watcher thread share. None of it is on the data path.
struct Shared {
    responder: Arc<dyn Responder>,
    handler: Arc<dyn FabricHandler>,
    known: KnownProcesses,
    commands: Commands,
    streams: Vec<ControlStream>,
}

impl Shared {
    fn stream(&self, peer: Rank) -> &ControlStream {
        &self.streams[peer as usize]
    }

    /// Sends what the stream takes; the watcher sends the rest.
    fn flush(&self, peer: Rank) {
        if self.stream(peer).flush(peer, &*self.handler) != Flushed::All {
            self.commands.send(Command::Flush { peer });
        }
    }

    /// As [`Control::post`].
    fn post(&self, peer: Rank, message: &[u8], is_urgent: bool) -> Result<(), PostError> {
        let link = self.streams.get(peer as usize).ok_or(PostError::NotConnected { peer })?;
        link.post(peer, message, is_urgent)?;
        self.flush(peer);
        Ok(())
    }

    /// Hands a message of a peer to the responder, which may send others; returns the answer.
    fn respond(&self, peer: Rank, message: &[u8]) -> Option<Vec<u8>> {
        let relay: &mut Relay<'_> = &mut |to, message, urgency| self.post(to, message, urgency.is_urgent());
        self.responder.message_relaying(peer, message, relay)
    }

    /// Sends a frame of the watcher or the fabric.
    fn send_frame(&self, peer: Rank, frame: &ControlFrame<'_>) -> Result<(), SendError> {
        self.stream(peer).queue(frame)?;
        self.flush(peer);
        Ok(())
    }

    /// Marks a peer lost. The first of several reports counts; a severed peer is not lost.
    fn lose(&self, peer: Rank, cause: LossCause) {
        let cause = self.stream(peer).cause(cause);
        if self.stream(peer).end(StreamState::Lost) {
            let relay: &mut Relay<'_> =
                &mut |to, message, urgency| self.post(to, message, urgency.is_urgent());
            self.responder.lost_relaying(peer, &cause, relay);
            self.handler.lost(peer, cause);
        }
    }
}

/// The state of a peer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum StreamState {
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
struct ControlStream(Mutex<Inner>);

#[derive(Default)]
struct Inner {
    state: StreamState,
    /// The device has asked to be connected.
    is_requested: bool,
    stream: Option<Arc<OwnedFd>>,
    /// What seals the bytes of the stream, if it speaks TLS.
    writer: Option<TlsWriter>,
    outgoing: Outgoing,
    has_sent_bye: bool,
    /// Why the peer will be lost, after all that it sent has been read.
    suspected: Option<LossCause>,
    /// Why one of the two ranks makes no connection; more precise than the loss that follows.
    refused: Option<LossCause>,
}

impl ControlStream {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        lock(&self.0)
    }

    fn state(&self) -> StreamState {
        self.lock().state
    }

    /// Records that the device wants the peer; false when it did before, or the peer has a later
    /// state.
    fn request(&self) -> bool {
        let mut link = self.lock();
        link.state == StreamState::Unconnected && !std::mem::replace(&mut link.is_requested, true)
    }

    /// Forgets all of the process that had the rank: the device wants another one.
    fn renew(&self) {
        let mut link = self.lock();
        link.close();
        *link = Inner { is_requested: true, ..Inner::default() };
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

    /// Marks the pair connected, and calls `begin` before anything else is sent; false when the
    /// pair was severed meanwhile.
    fn open(
        &self,
        stream: Arc<OwnedFd>,
        mut writer: Option<TlsWriter>,
        begin: impl FnOnce(&OwnedFd, Option<&mut TlsWriter>),
    ) -> bool {
        let mut link = self.lock();
        if link.state != StreamState::Unconnected {
            return false;
        }
        begin(&stream, writer.as_mut());
        link.state = StreamState::Open;
        (link.stream, link.writer) = (Some(stream), writer);
        true
    }

    /// Marks the peer departed.
    fn depart(&self) {
        let mut link = self.lock();
        if link.state == StreamState::Open {
            link.state = StreamState::Departed;
        }
    }

    /// Whether a bye was sent to a peer that is still connected.
    fn lingers(&self) -> bool {
        let link = self.lock();
        link.has_sent_bye && link.stream.is_some()
    }

    /// Ends the link as lost or severed. Returns whether this was the first end.
    fn end(&self, state: StreamState) -> bool {
        let mut link = self.lock();
        if matches!(link.state, StreamState::Lost | StreamState::Severed) {
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

    /// Queues a user's message.
    fn post(&self, peer: Rank, message: &[u8], is_urgent: bool) -> Result<(), PostError> {
        if message.len() > MESSAGE_BYTES_MAX {
            return Err(PostError::TooLong { bytes: message.len() });
        }
        let mut link = self.lock();
        if link.state != StreamState::Open || link.stream.is_none() || link.has_sent_bye {
            return Err(PostError::NotConnected { peer });
        }
        let kind = if is_urgent { FrameKind::Urgent } else { FrameKind::Post };
        let frame = ControlFrame::Message(message).to_bytes();
        link.outgoing.push(kind, frame).map_err(|OutgoingFull| PostError::QueueFull { peer })
    }

    /// Queues a frame of the watcher or the fabric.
    fn queue(&self, frame: &ControlFrame<'_>) -> Result<(), SendError> {
        let mut link = self.lock();
        if link.stream.is_none() {
            return Err(SendError::NotConnected);
        }
        let kind = match frame {
            ControlFrame::Message(_) | ControlFrame::Fabric(_) => FrameKind::Reply,
            ControlFrame::Ready | ControlFrame::Bye => FrameKind::Single,
        };
        link.outgoing.push(kind, frame.to_bytes()).map_err(|OutgoingFull| SendError::BacklogFull)?;
        link.has_sent_bye |= *frame == ControlFrame::Bye;
        Ok(())
    }

    /// Sends what the stream takes.
    fn flush(&self, peer: Rank, handler: &dyn FabricHandler) -> Flushed {
        let mut link = self.lock();
        let Some(stream) = link.stream.clone() else { return Flushed::All };
        let mut send_waiting = |message: &[u8], files: &[BorrowedFd<'_>]| {
            packet::send(&stream, &ControlFrame::Fabric(message).to_bytes(), files).map(drop)
        };
        let Inner { outgoing, writer, .. } = &mut *link;
        let sent = match writer {
            None => handler
                .send_waiting(peer, &mut send_waiting)
                .and_then(|()| outgoing.flush(|bytes| packet::send(&stream, bytes, &[]))),
            Some(writer) => outgoing
                .flush(|bytes| send_sealed(&stream, writer, bytes))
                .and_then(|()| send_rest(&stream, writer)),
        };
        match sent {
            Ok(()) => Flushed::All,
            Err(Errno::AGAIN) => Flushed::StreamFull,
            Err(Errno::TOOMANYREFS | Errno::NOBUFS | Errno::NOMEM) => Flushed::SystemFull,
            Err(_) => {
                // The watcher reads the same stream and finds the cause.
                link.outgoing.clear();
                Flushed::All
            }
        }
    }

    fn has_output(&self, peer: Rank, handler: &dyn FabricHandler) -> bool {
        let link = self.lock();
        let is_sealed = link.writer.as_ref().is_some_and(|writer| !writer.waiting().is_empty());
        link.stream.is_some() && (!link.outgoing.is_empty() || is_sealed || handler.has_waiting(peer))
    }
}

/// Seals bytes and sends what the stream takes of them; takes none while sealed bytes wait. Fails
/// with `AGAIN` then.
fn send_sealed(stream: &OwnedFd, writer: &mut TlsWriter, bytes: &[u8]) -> Result<usize, Errno> {
    send_rest(stream, writer)?;
    writer.seal(bytes);
    // What is sealed counts as sent whatever happens, as it must not be sealed again. The next call
    // meets an error that lasts.
    let _ = send_rest(stream, writer);
    Ok(bytes.len())
}

/// Sends the sealed bytes that wait; fails with `AGAIN` when the stream is full.
fn send_rest(stream: &OwnedFd, writer: &mut TlsWriter) -> Result<(), Errno> {
    while !writer.waiting().is_empty() {
        match packet::send(stream, writer.waiting(), &[]) {
            Ok(count) => writer.sent(count),
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno),
        }
    }
    Ok(())
}

/// The address on which a listener of this address listens; `None`: processes of its host alone
/// reach it. That of a device of several fabrics ends in that of the one between hosts.
#[must_use]
pub fn listening_address_of(address: &Address) -> Option<std::net::IpAddr> {
    let last = address.0.rsplit(' ').next().unwrap_or_default();
    Network::Tcp { data_connections: 0 }.target(&Address(last.to_owned()))?.ip()
}

/// How a flush ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Flushed {
    /// All frames are in the stream, or it broke.
    All,
    /// Frames wait for room in the stream.
    StreamFull,
    /// The stream may have room, but the system takes no more now: no memory, or too many files of
    /// this user are in flight.
    SystemFull,
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
        self.writer = None;
        if let Some(stream) = self.stream.take() {
            // The watcher wakes and removes the stream; a forked child does not keep it open.
            let _ = rustix::net::shutdown(&stream, Shutdown::Both);
        }
    }
}

//! The watcher thread: it accepts, dials and authenticates connections, reads control streams, and
//! detects losses, whether or not anybody polls the device.
//!
//! **Invariant:** bytes of an unauthenticated connection are not believed, answered at length or
//! kept. Before authentication a connection costs one slot, at most one fixed-size message of
//! memory (with TLS, the state of a handshake and one signature), and [`HANDSHAKE_LIMIT`] of time.
//! However many of them come, authenticated peers get their turn after a few of them
//! ([`accepting`](crate::accepting)).

mod joining;

use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use rustix::event::epoll;
use rustix::io::Errno;

use super::frame::{ControlFrame, HEADER_BYTES};
use super::handshake::{EndRanks, Handshake, Hello, Identity, Progress};
use super::packet::{self, Packet, ReceiveError};
use super::socket::DialTarget;
use super::{
    Command, Flushed, Network, ProtectedSocket, ReceivedFiles, SendError, Shared, StreamState, socket,
};
use crate::accepting::{AcceptPause, UnauthenticatedConnections};
use crate::clock::Nanos;
use crate::device::{Incarnation, LossCause, MESSAGE_BYTES_MAX, ProtocolViolation};
use crate::slab::Slab;
use crate::tls::{TlsReader, TlsWriter};
use crate::{Rank, clock};

/// Time limit of a handshake.
const HANDSHAKE_LIMIT: Duration = Duration::from_secs(5);

/// Warnings about rejected connections; the limit keeps a flood out of the log.
const WARNINGS_MAX: u32 = 16;

/// Unauthenticated connections at once; with many ranks the limit is higher.
const HANDSHAKES_MIN: usize = 256;

/// Pauses between attempts to dial.
const DIAL_PAUSE_MIN: Duration = Duration::from_millis(5);
const DIAL_PAUSE_MAX: Duration = Duration::from_millis(500);

/// Receives from one stream before the others get their turn.
const RECEIVES_AT_ONCE: usize = 16;

/// Receives from the stream of a peer that is gone: more than its buffer holds.
const RECEIVES_LEFT_MAX: usize = 4096;

/// How long after its stream closed a process may take to end, so that the cause is right.
const PROCESS_END_LIMIT: Duration = Duration::from_millis(50);

/// The pause before sending again when the system has no room for more files or bytes.
const SYSTEM_FULL_PAUSE: Duration = Duration::from_millis(5);

const LISTENER: u64 = u64::MAX;
const WAKE: u64 = u64::MAX - 1;

pub(super) struct Watcher {
    shared: Arc<Shared>,
    identity: Identity,
    network: Network,
    epoll: OwnedFd,
    listener: OwnedFd,
    rest: AcceptPause,
    connections: Slab<WatchedFile>,
    /// The tokens of accepted connections that are not authenticated.
    unauthenticated: UnauthenticatedConnections,
    warnings_left: u32,
    peers: Vec<WatchedPeer>,
    lingering_until: Option<Nanos>,
}

impl Watcher {
    pub(super) fn new(
        shared: Arc<Shared>,
        identity: Identity,
        network: Network,
        listener: OwnedFd,
    ) -> std::io::Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        epoll::add(&epoll, &listener, epoll::EventData::new_u64(LISTENER), epoll::EventFlags::IN)?;
        epoll::add(&epoll, &shared.commands.wake, epoll::EventData::new_u64(WAKE), epoll::EventFlags::IN)?;
        let peers = (0..identity.world_size).map(|_| WatchedPeer::default()).collect();
        Ok(Self {
            shared,
            identity,
            network,
            epoll,
            listener,
            rest: AcceptPause::default(),
            connections: Slab::default(),
            unauthenticated: UnauthenticatedConnections::default(),
            warnings_left: WARNINGS_MAX,
            peers,
            lingering_until: None,
        })
    }

    /// The thread's function: returns when it is told to stop.
    pub(super) fn run(mut self) {
        let mut events = Vec::with_capacity(64);
        loop {
            let now = clock::now();
            self.take_commands(now);
            if self.has_lingered(now) {
                return;
            }
            let next = self.handle_timers(now);
            let timeout = next.map(|next| {
                let wait = next.since(now);
                rustix::time::Timespec {
                    tv_sec: wait.as_secs() as i64,
                    tv_nsec: i64::from(wait.subsec_nanos()),
                }
            });
            events.clear();
            // The only possible error is an interruption: poll again.
            let _ = epoll::wait(&self.epoll, rustix::buffer::spare_capacity(&mut events), timeout.as_ref());
            let now = clock::now();
            for event in events.drain(..) {
                let token = event.data.u64();
                match token {
                    WAKE => {
                        self.shared.commands.wake.drain();
                    }
                    LISTENER => self.accept(now),
                    _ => self.serve(token, now),
                }
            }
        }
    }

    fn take_commands(&mut self, now: Nanos) {
        for command in self.shared.commands.take() {
            match command {
                Command::Connect { peer, generation, share_world, dial, timeout } => {
                    self.begin(peer, generation);
                    let retry_at = dial.as_ref().map(|_| now);
                    let (deadline, pause) = (now + timeout, DIAL_PAUSE_MIN);
                    self.peers[peer as usize].request =
                        Some(ConnectRequest { timeout, deadline, share_world, dial, retry_at, pause });
                    self.try_open(peer, now);
                    self.lose_if_rejected(peer);
                }
                Command::Flush { peer } => self.watch_output(peer, now),
                Command::Sever { peer } => {
                    // The device has done so, but a connect before may have renewed the stream.
                    self.shared.stream(peer).end(StreamState::Severed);
                    self.forget(peer);
                }
                Command::Lose { peer, cause } => self.lose(peer, cause, now),
                Command::Stop { linger_until } => {
                    let _ = epoll::delete(&self.epoll, &self.listener);
                    for link in self.shared.streams.iter().filter(|link| link.lingers()) {
                        link.shutdown_write();
                    }
                    self.lingering_until = Some(linger_until);
                }
            }
        }
    }

    /// Begins a generation of a pair, if it has not begun: forgets all of the generation before.
    fn begin(&mut self, peer: Rank, generation: u32) {
        if self.peers[peer as usize].generation == generation {
            return;
        }
        self.forget(peer);
        let known = &mut self.peers[peer as usize];
        (known.generation, known.violation) = (generation, None);
        self.shared.stream(peer).renew();
        self.shared.handler.restarted(peer, generation);
    }

    /// Whether every peer that got a bye has had time to read it.
    fn has_lingered(&self, now: Nanos) -> bool {
        self.lingering_until
            .is_some_and(|until| now >= until || !self.shared.streams.iter().any(|link| link.lingers()))
    }

    /// Handles timers that have expired; returns when the next one expires.
    fn handle_timers(&mut self, now: Nanos) -> Option<Nanos> {
        let mut next = self.lingering_until;
        let mut earliest = |time: Nanos| next = Some(next.map_or(time, |next: Nanos| next.min(time)));
        if let Some(until) = self.rest.end(&self.epoll, &self.listener, LISTENER, now) {
            earliest(until);
        }
        let mut late = Vec::new();
        for (token, connection) in self.connections.iter() {
            if let WatchedFile::Handshake(pending) = connection {
                if now >= pending.deadline { late.push(token) } else { earliest(pending.deadline) }
            }
        }
        let (mut lost, mut dials, mut ended, mut rested) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        for (peer, known) in self.peers.iter().enumerate() {
            if let Some((until, cause)) = &known.ending {
                if now >= *until { ended.push((peer as Rank, cause.clone())) } else { earliest(*until) }
            }
            if let Some(until) = known.output_paused_until {
                if now >= until { rested.push(peer as Rank) } else { earliest(until) }
            }
            let Some(request) = &known.request else { continue };
            if now >= request.deadline {
                lost.push(peer as Rank);
                continue;
            }
            earliest(request.deadline);
            match request.retry_at {
                Some(at) if now >= at => dials.push(peer as Rank),
                Some(at) => earliest(at),
                None => {}
            }
        }
        // Drops, dials and sends set new times. The caller does not wait, and asks for these.
        let sets_times = !(late.is_empty() && dials.is_empty() && rested.is_empty());
        for token in late {
            self.drop_handshake(token, now);
        }
        for peer in lost {
            self.connect_timed_out(peer);
        }
        for peer in dials {
            self.dial(peer, now);
        }
        for (peer, cause) in ended {
            self.end(peer, cause);
        }
        for peer in rested {
            self.peers[peer as usize].output_paused_until = None;
            self.watch_output(peer, now);
        }
        if sets_times { Some(now) } else { next }
    }

    fn connect_timed_out(&mut self, peer: Rank) {
        let known = &self.peers[peer as usize];
        let limit = known.request.as_ref().map_or(Duration::ZERO, |request| request.timeout);
        let cause = known.violation.map_or(LossCause::NotReached(limit), LossCause::Protocol);
        self.end(peer, cause);
    }

    /// Drops all connections of a peer and marks the peer lost.
    fn end(&mut self, peer: Rank, cause: LossCause) {
        self.forget(peer);
        self.shared.lose(peer, cause);
    }

    fn insert(&mut self, connection: WatchedFile, flags: epoll::EventFlags) -> std::io::Result<u64> {
        let peer = connection.peer();
        let token = self.connections.insert(connection);
        if let Some(peer) = peer {
            self.peers[peer as usize].tokens.push(token);
        }
        let added = match self.connections.find(token) {
            Some(connection) => {
                epoll::add(&self.epoll, connection.file(), epoll::EventData::new_u64(token), flags)
            }
            None => Ok(()),
        };
        if let Err(error) = added {
            self.remove(token);
            return Err(error.into());
        }
        Ok(token)
    }

    /// Sets the events that epoll reports of a connection.
    fn watch(&self, token: u64, flags: epoll::EventFlags) -> rustix::io::Result<()> {
        let Some(connection) = self.connections.find(token) else { return Ok(()) };
        epoll::modify(&self.epoll, connection.file(), epoll::EventData::new_u64(token), flags)
    }

    fn remove(&mut self, token: u64) -> Option<WatchedFile> {
        let connection = self.connections.remove(token)?;
        if let Some(peer) = connection.peer() {
            self.peers[peer as usize].tokens.retain(|other| *other != token);
        }
        if let WatchedFile::Handshake(pending) = &connection
            && let Origin::Accepted(from) = pending.origin
        {
            self.unauthenticated.remove(from, token);
        }
        // Explicitly, because a forked child may keep the connection open.
        let _ = epoll::delete(&self.epoll, connection.file());
        Some(connection)
    }

    fn serve(&mut self, token: u64, now: Nanos) {
        match self.connections.find(token) {
            Some(WatchedFile::Handshake(_)) => self.serve_handshake(token, now),
            Some(&WatchedFile::Control { peer, .. }) => {
                self.serve_control(token, peer, RECEIVES_AT_ONCE, now);
            }
            Some(&WatchedFile::Process { peer, .. }) => self.process_ended(token, peer, now),
            None => {}
        }
    }

    /// The token of a peer's control stream.
    fn control_token(&self, peer: Rank) -> Option<u64> {
        let is_control =
            |token: &u64| matches!(self.connections.find(*token), Some(WatchedFile::Control { .. }));
        self.peers[peer as usize].tokens.iter().copied().find(is_control)
    }

    fn serve_control(&mut self, token: u64, peer: Rank, receives_max: usize, now: Nanos) {
        if self.shared.stream(peer).state() == StreamState::Severed {
            self.remove(token);
            return;
        }
        let cause = match self.drain_control(token, peer, receives_max, now) {
            Ok(()) => {
                self.watch_output(peer, now);
                return;
            }
            Err(cause) => cause,
        };
        self.remove(token);
        match self.shared.stream(peer).state() {
            // The bye came before.
            StreamState::Departed => {
                self.shared.stream(peer).close();
                self.forget(peer);
            }
            // The pair did not exist yet: the listener may be about to take a newer attempt.
            StreamState::Unconnected
                if !self.network.is_unix() && !matches!(cause, LossCause::Protocol(_)) =>
            {
                self.dial_again(peer, now);
            }
            // The process may be ending, which is the better cause.
            StreamState::Open if self.network.is_unix() && !matches!(cause, LossCause::Protocol(_)) => {
                self.peers[peer as usize].ending = Some((now + PROCESS_END_LIMIT, cause));
            }
            _ => self.end(peer, cause),
        }
    }

    /// Receives up to `receives_max` times, and handles the frames.
    fn drain_control(
        &mut self,
        token: u64,
        peer: Rank,
        receives_max: usize,
        now: Nanos,
    ) -> Result<(), LossCause> {
        for _ in 0..receives_max {
            let Some(WatchedFile::Control { stream, received, reader, .. }) =
                self.connections.find_mut(token)
            else {
                return Ok(());
            };
            let packet = match reader {
                None => packet::receive(stream, received.room()).inspect(|packet| received.add(packet.bytes)),
                Some(reader) => receive_sealed(stream, reader, received),
            };
            let packet = match packet {
                Ok(packet) if packet.bytes == 0 => return Err(LossCause::ConnectionClosed),
                Ok(packet) => packet,
                // After a reset of a Unix socket comes all that the peer had sent before.
                Err(ReceiveError::System(Errno::INTR | Errno::CONNRESET)) => continue,
                Err(ReceiveError::System(Errno::AGAIN)) => return Ok(()),
                Err(ReceiveError::System(errno)) => return Err(socket::loss(&errno.into())),
                Err(ReceiveError::Violation(violation)) => return Err(violation.into()),
            };
            // Moved out and back, so that a frame may borrow it while the watcher changes.
            let mut moved = std::mem::take(received);
            let mut files = (!packet.files_lost).then_some(packet.files);
            let mut used = 0;
            while let Some((frame, count)) = ControlFrame::decode(&moved.bytes[used..moved.filled])? {
                used += count;
                self.handle_frame(peer, &frame, files.as_mut().map(std::mem::take), now)?;
            }
            if self.network.is_unix() && used != moved.filled {
                return Err(ProtocolViolation::MalformedFrame.into());
            }
            moved.consume(used);
            if let Some(WatchedFile::Control { received, .. }) = self.connections.find_mut(token) {
                *received = moved;
            }
        }
        Ok(())
    }

    fn handle_frame(
        &mut self,
        peer: Rank,
        frame: &ControlFrame<'_>,
        files: ReceivedFiles,
        now: Nanos,
    ) -> Result<(), LossCause> {
        let shared = Arc::clone(&self.shared);
        let link = shared.stream(peer);
        let has_files = files.as_ref().is_some_and(|files| !files.is_empty());
        match (link.state(), frame) {
            (StreamState::Unconnected, ControlFrame::Ready) => self.ready(peer, files, now)?,
            (StreamState::Open | StreamState::Departed, ControlFrame::Fabric(message)) => {
                shared.handler.message(peer, message, files, &|cause| link.refuse(cause))?;
            }
            (StreamState::Severed | StreamState::Lost, _) => {}
            _ if has_files => return Err(ProtocolViolation::MalformedFrame.into()),
            (StreamState::Open | StreamState::Departed, ControlFrame::Message(message)) => {
                if let Some(reply) = shared.respond(peer, message) {
                    let reply = ControlFrame::Message(&reply[..reply.len().min(MESSAGE_BYTES_MAX)]);
                    if shared.send_frame(peer, &reply) == Err(SendError::BacklogFull) {
                        return Err(ProtocolViolation::TooManyRequests.into());
                    }
                }
                shared.handler.wake();
            }
            (StreamState::Open, ControlFrame::Bye) => {
                link.depart();
                shared.handler.departed(peer);
            }
            _ => return Err(ProtocolViolation::MalformedFrame.into()),
        }
        Ok(())
    }

    /// Sends what the stream takes, and watches it for room as long as frames wait.
    fn watch_output(&mut self, peer: Rank, now: Nanos) {
        if self.peers[peer as usize].output_paused_until.is_some() {
            return;
        }
        let flushed = self.shared.stream(peer).flush(peer, &*self.shared.handler);
        if flushed == Flushed::SystemFull {
            // Room in the stream means nothing then.
            self.peers[peer as usize].output_paused_until = Some(now + SYSTEM_FULL_PAUSE);
        }
        let waits = flushed == Flushed::StreamFull;
        let Some(token) = self.control_token(peer) else { return };
        let Some(WatchedFile::Control { watches_output, .. }) = self.connections.find(token) else { return };
        let output = if waits { epoll::EventFlags::OUT } else { epoll::EventFlags::empty() };
        if *watches_output != waits
            && self.watch(token, epoll::EventFlags::IN | output).is_ok()
            && let Some(WatchedFile::Control { watches_output, .. }) = self.connections.find_mut(token)
        {
            *watches_output = waits;
        }
    }

    /// The peer's process is gone.
    fn process_ended(&mut self, token: u64, peer: Rank, now: Nanos) {
        self.remove(token);
        self.lose(peer, LossCause::ProcessEnded, now);
    }

    /// Marks the peer lost for a cause that was seen elsewhere than on its control stream. Contract
    /// line 4: what it sent before still counts.
    fn lose(&mut self, peer: Rank, cause: LossCause, now: Nanos) {
        if let Some(control) = self.control_token(peer) {
            self.serve_control(control, peer, RECEIVES_LEFT_MAX, now);
        }
        match self.shared.stream(peer).state() {
            // The pair did not exist yet: a newer process may be about to come.
            StreamState::Unconnected if cause == LossCause::ProcessEnded => {}
            StreamState::Unconnected | StreamState::Open => self.end(peer, cause),
            // A forked child may keep the stream open.
            StreamState::Departed => {
                self.shared.stream(peer).close();
                self.forget(peer);
            }
            _ => {}
        }
    }
}

/// A descriptor that the watcher waits for.
enum WatchedFile {
    Handshake(Box<PendingHandshake>),
    Control {
        peer: Rank,
        stream: Arc<OwnedFd>,
        received: ReceiveBuffer,
        /// What opens the bytes of the stream, if it speaks TLS.
        reader: Option<Box<TlsReader>>,
        watches_output: bool,
    },
    Process {
        peer: Rank,
        file: OwnedFd,
    },
}

impl WatchedFile {
    fn file(&self) -> BorrowedFd<'_> {
        match self {
            Self::Handshake(pending) => pending.socket.as_fd(),
            Self::Control { stream, .. } => stream.as_fd(),
            Self::Process { file, .. } => file.as_fd(),
        }
    }

    /// The peer of the connection; `None` for an accepted connection that is not authenticated.
    fn peer(&self) -> Option<Rank> {
        match self {
            Self::Handshake(pending) => pending.origin.dialed(),
            Self::Control { peer, .. } | Self::Process { peer, .. } => Some(*peer),
        }
    }
}

/// Bytes of a control stream that are no whole frame yet.
#[derive(Default)]
struct ReceiveBuffer {
    bytes: Vec<u8>,
    filled: usize,
}

impl ReceiveBuffer {
    fn new() -> Self {
        Self { bytes: vec![0; 2 * (HEADER_BYTES + MESSAGE_BYTES_MAX)], filled: 0 }
    }

    /// Never empty: the longest frame fits, and whole frames are consumed.
    fn room(&mut self) -> &mut [u8] {
        &mut self.bytes[self.filled..]
    }

    /// `count` bytes have come into the room.
    fn add(&mut self, count: usize) {
        self.filled += count;
    }

    /// Adds bytes, for which it grows: a record may be longer than the longest frame.
    fn append(&mut self, bytes: &[u8]) {
        let end = self.filled + bytes.len();
        if self.bytes.len() < end {
            self.bytes.resize(end, 0);
        }
        self.bytes[self.filled..end].copy_from_slice(bytes);
        self.filled = end;
    }

    fn consume(&mut self, count: usize) {
        self.bytes.copy_within(count..self.filled, 0);
        self.filled -= count;
    }
}

/// Receives once and opens all whole records. The bytes of the packet are those of the stream.
fn receive_sealed(
    stream: &OwnedFd,
    reader: &mut TlsReader,
    received: &mut ReceiveBuffer,
) -> Result<Packet, ReceiveError> {
    let packet = packet::receive(stream, reader.room(1))?;
    reader.received(packet.bytes);
    loop {
        let plain = reader.plain().map_err(|fault| ReceiveError::Violation(fault.into()))?;
        let count = plain.len();
        if count == 0 {
            return Ok(packet);
        }
        received.append(plain);
        reader.take(count);
    }
}

/// The origin of a connection that is not authenticated.
#[derive(Clone, Copy)]
enum Origin {
    /// This rank dialed the peer.
    Dialed(Rank),
    /// Another process dialed this rank, from this address.
    Accepted(IpAddr),
}

impl Origin {
    /// The peer that this rank dialed.
    fn dialed(self) -> Option<Rank> {
        match self {
            Self::Dialed(peer) => Some(peer),
            Self::Accepted(_) => None,
        }
    }
}

/// A connection whose handshake is under way.
struct PendingHandshake {
    socket: OwnedFd,
    handshake: Handshake,
    deadline: Nanos,
    origin: Origin,
    /// The result; the handshake ends when all bytes are sent.
    verdict: Option<Progress>,
}

/// The watcher's state of a peer, connected or not.
#[derive(Default)]
struct WatchedPeer {
    generation: u32,
    request: Option<ConnectRequest>,
    connections_of_attempt: Option<PairConnections>,
    /// Why a process that claimed to be this peer was rejected.
    violation: Option<ProtocolViolation>,
    /// The stream has ended without a bye; the process may be ending until this time.
    ending: Option<(Nanos, LossCause)>,
    /// Nothing is sent until this time, because the system had no room.
    output_paused_until: Option<Nanos>,
    /// The tokens of the peer's connections.
    tokens: Vec<u64>,
}

/// A connection to a peer that the device asked for and that does not exist yet.
struct ConnectRequest {
    timeout: Duration,
    deadline: Nanos,
    share_world: bool,
    dial: Option<(DialTarget, EndRanks)>,
    retry_at: Option<Nanos>,
    pause: Duration,
}

/// Authenticated connections of one attempt.
struct PairConnections {
    session: u64,
    incarnation: Incarnation,
    share_world: bool,
    /// This rank in the world of the peer.
    own_rank: Rank,
    signal_slots: u32,
    process: Option<u32>,
    control: Option<ProtectedSocket>,
    /// The control stream once the watcher reads it (the dialer waits for "ready"), and what seals
    /// its bytes.
    reading: Option<(Arc<OwnedFd>, Option<TlsWriter>)>,
    to_peer: Vec<Option<ProtectedSocket>>,
    from_peer: Vec<Option<ProtectedSocket>>,
}

impl PairConnections {
    fn new(hello: &Hello, identity: &Identity) -> Self {
        let same_host = hello.host == identity.host && hello.host != [0; 16];
        let none = || (0..identity.data_connections).map(|_| None).collect();
        Self {
            session: hello.session,
            incarnation: hello.incarnation,
            share_world: !hello.is_of_other_world(),
            own_rank: hello.expected,
            signal_slots: hello.signal_slots,
            process: same_host.then_some(hello.process),
            control: None,
            reading: None,
            to_peer: none(),
            from_peer: none(),
        }
    }

    fn has_all_data_connections(&self) -> bool {
        self.to_peer.iter().chain(&self.from_peer).all(Option::is_some)
    }
}

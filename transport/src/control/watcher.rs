//! The watcher thread: it accepts, dials and authenticates connections, reads control streams, and
//! detects losses, whether or not anybody polls the device.
//!
//! **Invariant:** bytes of an unauthenticated connection are not believed, answered at length or
//! kept. Before authentication a connection costs one slot, at most one fixed-size message of
//! memory, and [`HANDSHAKE_LIMIT`] of time. However many of them come, authenticated peers get
//! their turn after a few of them ([`accepting`](crate::accepting)).

mod joining;

use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use rustix::event::epoll;
use rustix::net::RecvFlags;

use super::frame::Frame;
use super::handshake::{Handshake, Hello, Identity, Progress};
use super::slab::Slab;
use super::{Command, ControlEvent, FabricMessage, SendError, Shared, State, socket};
use crate::accepting::{AcceptPause, UnauthenticatedConnections};
use crate::clock::Nanos;
use crate::device::{LossCause, MESSAGE_BYTES_MAX, ProtocolViolation, Wake};
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

const LISTENER: u64 = u64::MAX;
const WAKE: u64 = u64::MAX - 1;

pub(super) struct Watcher<M> {
    shared: Arc<Shared<M>>,
    identity: Identity,
    epoll: OwnedFd,
    listener: OwnedFd,
    rest: AcceptPause,
    connections: Slab<Connection>,
    /// The slots of accepted connections that are not authenticated.
    unauthenticated: UnauthenticatedConnections,
    warnings_left: u32,
    peers: Vec<Peer>,
    lingering_until: Option<Nanos>,
}

impl<M: FabricMessage> Watcher<M> {
    pub(super) fn new(
        shared: Arc<Shared<M>>,
        identity: Identity,
        listener: OwnedFd,
    ) -> std::io::Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        epoll::add(&epoll, &listener, epoll::EventData::new_u64(LISTENER), epoll::EventFlags::IN)?;
        epoll::add(&epoll, shared.commands.wake(), epoll::EventData::new_u64(WAKE), epoll::EventFlags::IN)?;
        let peers = (0..identity.world_size).map(|_| Peer::default()).collect();
        Ok(Self {
            shared,
            identity,
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
                        self.shared.commands.wake().drain();
                    }
                    LISTENER => self.accept(now),
                    _ => {
                        if let Some(slot) = self.connections.find(token) {
                            self.serve(slot, now);
                        }
                    }
                }
            }
        }
    }

    fn take_commands(&mut self, now: Nanos) {
        for command in self.shared.commands.take() {
            match command {
                Command::Connect { peer, dial, deadline } => {
                    let retry_at = dial.map(|_| now);
                    let pause = DIAL_PAUSE_MIN;
                    self.peers[peer as usize].request =
                        Some(ConnectRequest { since: now, deadline, dial, retry_at, pause, session: 0 });
                    self.try_open(peer);
                }
                Command::Flush { peer } => self.watch_output(peer),
                Command::Sever { peer } => self.forget(peer),
                Command::Lose { peer, cause } => self.lose(peer, cause, now),
                Command::Stop { linger_until } => {
                    let _ = epoll::delete(&self.epoll, &self.listener);
                    for link in self.shared.links.iter().filter(|link| link.lingers()) {
                        link.shutdown_write();
                    }
                    self.lingering_until = Some(linger_until);
                }
            }
        }
    }

    /// Whether every peer that got a bye has had time to read it.
    fn has_lingered(&self, now: Nanos) -> bool {
        self.lingering_until
            .is_some_and(|until| now >= until || !self.shared.links.iter().any(|link| link.lingers()))
    }

    /// Handles timers that have expired; returns when the next one expires.
    fn handle_timers(&mut self, now: Nanos) -> Option<Nanos> {
        let mut next = self.lingering_until;
        let mut earliest = |time: Nanos| next = Some(next.map_or(time, |next: Nanos| next.min(time)));
        if let Some(until) = self.rest.end(&self.epoll, &self.listener, LISTENER, now) {
            earliest(until);
        }
        let mut late = Vec::new();
        for (slot, connection) in self.connections.iter() {
            if let Connection::Handshake(pending) = connection {
                if now >= pending.deadline { late.push(slot) } else { earliest(pending.deadline) }
            }
        }
        let (mut lost, mut dials) = (Vec::new(), Vec::new());
        for (peer, known) in self.peers.iter().enumerate() {
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
        for slot in late {
            self.drop_handshake(slot, now);
        }
        for peer in lost {
            self.connect_timed_out(peer, now);
        }
        for peer in dials {
            self.dial(peer, now);
        }
        next
    }

    fn connect_timed_out(&mut self, peer: Rank, now: Nanos) {
        let known = &self.peers[peer as usize];
        let waited = known.request.as_ref().map_or(Duration::ZERO, |request| now.since(request.since));
        let cause = known.violation.map_or(LossCause::NotReached(waited), LossCause::Protocol);
        self.forget(peer);
        self.shared.lose(peer, cause);
    }

    fn insert(&mut self, connection: Connection, flags: epoll::EventFlags) -> std::io::Result<usize> {
        let peer = connection.peer();
        let slot = self.connections.insert(connection);
        if let Some(peer) = peer {
            self.peers[peer as usize].slots.push(slot);
        }
        let added = match self.connections.value(slot) {
            Some(connection) => epoll::add(&self.epoll, connection.file(), self.data(slot), flags),
            None => Ok(()),
        };
        if let Err(error) = added {
            self.remove(slot);
            return Err(error.into());
        }
        Ok(slot)
    }

    /// The event data of a connection in epoll.
    fn data(&self, slot: usize) -> epoll::EventData {
        epoll::EventData::new_u64(self.connections.token(slot))
    }

    /// Sets the events that epoll reports of a connection.
    fn watch(&self, slot: usize, flags: epoll::EventFlags) -> rustix::io::Result<()> {
        let Some(connection) = self.connections.value(slot) else { return Ok(()) };
        epoll::modify(&self.epoll, connection.file(), self.data(slot), flags)
    }

    fn remove(&mut self, slot: usize) -> Option<Connection> {
        let connection = self.connections.remove(slot)?;
        if let Some(peer) = connection.peer() {
            self.peers[peer as usize].slots.retain(|other| *other != slot);
        }
        if let Connection::Handshake(pending) = &connection
            && let Origin::Accepted(from) = pending.origin
        {
            self.unauthenticated.remove(from, slot as u64);
        }
        // Explicitly, because a forked child may keep the connection open.
        let _ = epoll::delete(&self.epoll, connection.file());
        Some(connection)
    }

    fn serve(&mut self, slot: usize, now: Nanos) {
        match self.connections.value(slot) {
            Some(Connection::Handshake(_)) => self.serve_handshake(slot, now),
            Some(&Connection::Control { peer, .. }) => self.serve_control(slot, peer, now),
            Some(&Connection::Process { peer, .. }) => self.process_ended(slot, peer, now),
            None => {}
        }
    }

    /// The slot of a peer's control stream.
    fn control_slot(&self, peer: Rank) -> Option<usize> {
        let is_control =
            |slot: &usize| matches!(self.connections.value(*slot), Some(Connection::Control { .. }));
        self.peers[peer as usize].slots.iter().copied().find(is_control)
    }

    fn serve_control(&mut self, slot: usize, peer: Rank, now: Nanos) {
        if self.shared.link(peer).state() == State::Severed {
            self.remove(slot);
            return;
        }
        let cause = match self.drain_control(slot, peer) {
            Ok(()) => {
                self.watch_output(peer);
                return;
            }
            Err(cause) => cause,
        };
        self.remove(slot);
        match self.shared.link(peer).state() {
            // The bye came before.
            State::Departed => {
                self.shared.link(peer).close();
                self.forget(peer);
            }
            // The pair did not exist yet: the listener may be about to take a newer attempt.
            State::Unconnected if !matches!(cause, LossCause::Protocol(_)) => self.dial_again(peer, now),
            _ => {
                self.forget(peer);
                self.shared.lose(peer, cause);
            }
        }
    }

    /// Reads and handles all frames that have arrived.
    fn drain_control(&mut self, slot: usize, peer: Rank) -> Result<(), LossCause> {
        loop {
            let Some(Connection::Control { stream, reader, .. }) = self.connections.value_mut(slot) else {
                return Ok(());
            };
            match rustix::net::recv(&**stream, rustix::buffer::spare_capacity(reader), RecvFlags::DONTWAIT) {
                Ok((_, 0)) => return Err(LossCause::ConnectionClosed),
                Ok(_) => {}
                Err(rustix::io::Errno::INTR) => continue,
                Err(rustix::io::Errno::AGAIN) => return Ok(()),
                Err(error) => return Err(socket::loss(&error.into())),
            }
            let mut bytes = std::mem::take(reader);
            let mut used = 0;
            let result = loop {
                match Frame::decode(&bytes[used..]) {
                    Ok(Some((frame, count))) => {
                        used += count;
                        if let Err(violation) = self.handle_frame(peer, &frame) {
                            break Err(LossCause::Protocol(violation));
                        }
                    }
                    Ok(None) => break Ok(()),
                    Err(violation) => break Err(LossCause::Protocol(violation)),
                }
            };
            bytes.drain(..used);
            if let Some(Connection::Control { reader, .. }) = self.connections.value_mut(slot) {
                *reader = bytes;
            }
            result?;
        }
    }

    fn handle_frame(&mut self, peer: Rank, frame: &Frame<'_>) -> Result<(), ProtocolViolation> {
        let shared = Arc::clone(&self.shared);
        let link = shared.link(peer);
        match (link.state(), frame) {
            (State::Unconnected, Frame::Ready) => {
                let complete = self.peers[peer as usize]
                    .connections_of_attempt
                    .as_ref()
                    .is_some_and(PairConnections::has_all_data_connections);
                if !complete {
                    return Err(ProtocolViolation::UnexpectedAnswer);
                }
                self.open(peer, None);
            }
            (State::Open | State::Departed, Frame::Message(message)) => {
                if let Some(reply) = self.shared.responder.message(peer, message) {
                    let reply = Frame::Message(&reply[..reply.len().min(MESSAGE_BYTES_MAX)]);
                    if link.send_frame(&reply) == Err(SendError::BacklogFull) {
                        return Err(ProtocolViolation::TooManyRequests);
                    }
                }
                self.shared.wake_source.wake();
            }
            (State::Open | State::Departed, Frame::Fabric(message)) => {
                let message = M::decode(message).ok_or(ProtocolViolation::MalformedFrame)?;
                // Before the event: the peer closes the stream after it, and then the cause is
                // asked for.
                if let Some(cause) = message.refusal() {
                    link.refuse(cause);
                }
                shared.send(ControlEvent::Message { peer, message });
            }
            (State::Open, Frame::Bye) => {
                link.depart();
                shared.send(ControlEvent::Departed { peer });
            }
            (State::Severed | State::Lost, _) => {}
            _ => return Err(ProtocolViolation::MalformedFrame),
        }
        Ok(())
    }

    /// Sends what the stream takes, and watches it for room as long as frames wait.
    fn watch_output(&mut self, peer: Rank) {
        let waits = self.shared.link(peer).flush();
        let Some(slot) = self.control_slot(peer) else { return };
        let Some(Connection::Control { watches_output, .. }) = self.connections.value(slot) else { return };
        let output = if waits { epoll::EventFlags::OUT } else { epoll::EventFlags::empty() };
        if *watches_output != waits
            && self.watch(slot, epoll::EventFlags::IN | output).is_ok()
            && let Some(Connection::Control { watches_output, .. }) = self.connections.value_mut(slot)
        {
            *watches_output = waits;
        }
    }

    /// The peer's process is gone.
    fn process_ended(&mut self, slot: usize, peer: Rank, now: Nanos) {
        self.remove(slot);
        self.lose(peer, LossCause::ProcessEnded, now);
    }

    /// Marks the peer lost for a cause that was seen elsewhere than on its control stream. Contract
    /// line 4: what it sent before still counts.
    fn lose(&mut self, peer: Rank, cause: LossCause, now: Nanos) {
        if let Some(control) = self.control_slot(peer) {
            self.serve_control(control, peer, now);
        }
        match self.shared.link(peer).state() {
            // The pair did not exist yet: a newer process may be about to come.
            State::Unconnected if cause == LossCause::ProcessEnded => {}
            State::Unconnected | State::Open => {
                self.forget(peer);
                self.shared.lose(peer, cause);
            }
            // A forked child may keep the stream open.
            State::Departed => {
                self.shared.link(peer).close();
                self.forget(peer);
            }
            _ => {}
        }
    }
}

/// A descriptor that the watcher waits for.
enum Connection {
    Handshake(Box<PendingHandshake>),
    Control { peer: Rank, stream: Arc<OwnedFd>, reader: Vec<u8>, watches_output: bool },
    Process { peer: Rank, file: OwnedFd },
}

impl Connection {
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
            Self::Handshake(pending) => pending.origin.dialed().map(|(peer, _)| peer),
            Self::Control { peer, .. } | Self::Process { peer, .. } => Some(*peer),
        }
    }
}

/// The origin of a connection that is not authenticated.
#[derive(Clone, Copy)]
enum Origin {
    /// This rank dialed the peer, in the attempt with this session number.
    Dialed(Rank, u64),
    /// Another process dialed this rank, from this address.
    Accepted(IpAddr),
}

impl Origin {
    /// The peer that this rank dialed, and the session number of the attempt.
    fn dialed(self) -> Option<(Rank, u64)> {
        match self {
            Self::Dialed(peer, session) => Some((peer, session)),
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
struct Peer {
    request: Option<ConnectRequest>,
    connections_of_attempt: Option<PairConnections>,
    /// Why a process that claimed to be this peer was rejected.
    violation: Option<ProtocolViolation>,
    /// The slots of the peer's connections.
    slots: Vec<usize>,
}

/// A connection to a peer that the device asked for and that does not exist yet.
struct ConnectRequest {
    since: Nanos,
    deadline: Nanos,
    dial: Option<SocketAddr>,
    retry_at: Option<Nanos>,
    pause: Duration,
    /// The session number of the attempt under way.
    session: u64,
}

/// Authenticated connections of one attempt.
struct PairConnections {
    session: u64,
    signal_slots: u32,
    process: Option<u32>,
    control: Option<OwnedFd>,
    /// The control stream once the watcher reads it (the dialer waits for "ready").
    reading: Option<Arc<OwnedFd>>,
    to_peer: Vec<Option<OwnedFd>>,
    from_peer: Vec<Option<OwnedFd>>,
}

impl PairConnections {
    fn new(hello: &Hello, identity: &Identity) -> Self {
        let same_host = hello.host == identity.host && hello.host != [0; 16];
        let none = || (0..identity.data_connections).map(|_| None).collect();
        Self {
            session: hello.session,
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

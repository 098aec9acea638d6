//! The watcher thread: accepts, dials and proves connections, reads control streams, and notices
//! losses, whether or not anybody polls the device.
//!
//! **Invariant:** nothing that a stranger sends is believed, answered at length or kept: before its
//! proof a connection costs one slot, at most one fixed-size message of memory, and
//! [`HANDSHAKE_LIMIT`] of time. However many come, those that have proved themselves get their turn
//! after a few of them ([`accepting`](crate::accepting)).

mod joining;

use std::net::{IpAddr, SocketAddr};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use rustix::event::epoll;
use rustix::net::RecvFlags;

use super::LANES;
use super::control::ControlFrame;
use super::handshake::{Handshake, Hello, Identity, Progress};
use super::shared::{Mail, Order, Shared, Standing};
use super::socket;
use crate::Rank;
use crate::accepting::{Rest, Unproved};
use crate::clock::{self, Nanos};
use crate::device::{LossCause, MESSAGE_BYTES_MAX, ProtocolViolation, Ring};

/// How long a connection may take to prove itself.
const HANDSHAKE_LIMIT: Duration = Duration::from_secs(5);

/// Warnings about those who are turned away, so that a flood of them does not fill a log.
const WARNINGS_MAX: u32 = 16;

/// Unproved connections at once at least; with many ranks more.
const HANDSHAKES_MIN: usize = 256;

/// Pauses between attempts to dial.
const DIAL_PAUSE_MIN: Duration = Duration::from_millis(5);
const DIAL_PAUSE_MAX: Duration = Duration::from_millis(500);

/// Connections of one attempt: the control stream and the lanes of both directions.
const CONNECTIONS: usize = 1 + 2 * LANES;

const LISTENER: u64 = u64::MAX;
const WAKE: u64 = u64::MAX - 1;

pub(super) struct Watcher {
    shared: Arc<Shared>,
    identity: Identity,
    epoll: OwnedFd,
    listener: OwnedFd,
    rest: Rest,
    connections: Vec<Option<Connection>>,
    free: Vec<usize>,
    /// The slots of those that somebody dialed and that are not proved.
    unproved: Unproved,
    warnings_left: u32,
    generation: u32,
    peers: Vec<Plan>,
    lingering_until: Option<Nanos>,
}

/// Something that the watcher waits for.
struct Connection {
    generation: u32,
    kind: Kind,
}

enum Kind {
    Handshake(Box<Proving>),
    Control { peer: Rank, stream: Arc<OwnedFd>, reader: Vec<u8>, watched_output: bool },
    Process { peer: Rank, file: OwnedFd },
}

/// How a connection that is not proved came about.
#[derive(Clone, Copy)]
enum Origin {
    /// This rank dialed that peer, in that attempt.
    Dialed(Rank, u64),
    /// Somebody dialed this rank from there.
    Accepted(IpAddr),
}

impl Origin {
    /// Whom this rank dialed, and in which attempt.
    fn dialed(self) -> Option<(Rank, u64)> {
        match self {
            Self::Dialed(peer, session) => Some((peer, session)),
            Self::Accepted(_) => None,
        }
    }
}

/// A connection that is not proved yet.
struct Proving {
    socket: OwnedFd,
    handshake: Handshake,
    deadline: Nanos,
    origin: Origin,
    /// Over as soon as everything is sent.
    verdict: Option<Progress>,
}

/// What is intended with a peer.
#[derive(Default)]
struct Plan {
    wanted: Option<Wanted>,
    arrivals: Option<Arrivals>,
    /// Why somebody who said to be this peer was turned away.
    violation: Option<ProtocolViolation>,
}

struct Wanted {
    since: Nanos,
    deadline: Nanos,
    dial: Option<SocketAddr>,
    retry_at: Option<Nanos>,
    pause: Duration,
    /// The attempt under way.
    session: u64,
}

/// Proved connections of one attempt.
struct Arrivals {
    session: u64,
    cells: u32,
    process: Option<u32>,
    control: Option<OwnedFd>,
    /// The control stream's place once it is being read (the dialer awaits "ready").
    reading: Option<Arc<OwnedFd>>,
    to_peer: [Option<OwnedFd>; LANES],
    from_peer: [Option<OwnedFd>; LANES],
}

impl Arrivals {
    fn new(hello: &Hello, identity: &Identity) -> Self {
        let same_host = hello.host == identity.host && hello.host != [0; 16];
        Self {
            session: hello.session,
            cells: hello.cells,
            process: same_host.then_some(hello.process),
            control: None,
            reading: None,
            to_peer: Default::default(),
            from_peer: Default::default(),
        }
    }

    fn lanes_complete(&self) -> bool {
        self.to_peer.iter().chain(&self.from_peer).all(Option::is_some)
    }
}

impl Watcher {
    pub(super) fn new(shared: Arc<Shared>, identity: Identity, listener: OwnedFd) -> std::io::Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        epoll::add(&epoll, &listener, epoll::EventData::new_u64(LISTENER), epoll::EventFlags::IN)?;
        epoll::add(&epoll, &shared.wake, epoll::EventData::new_u64(WAKE), epoll::EventFlags::IN)?;
        let peers = (0..identity.world_size).map(|_| Plan::default()).collect();
        Ok(Self {
            shared,
            identity,
            epoll,
            listener,
            rest: Rest::default(),
            connections: Vec::new(),
            free: Vec::new(),
            unproved: Unproved::default(),
            warnings_left: WARNINGS_MAX,
            generation: 0,
            peers,
            lingering_until: None,
        })
    }

    /// The thread: until it is told to stop.
    pub(super) fn run(mut self) {
        let mut events = Vec::with_capacity(64);
        loop {
            let now = clock::now();
            if self.take_orders(now) || self.has_lingered(now) {
                return;
            }
            let next = self.keep_time(now);
            let timeout = next.map(|next| {
                let wait = next.since(now);
                rustix::time::Timespec {
                    tv_sec: wait.as_secs() as i64,
                    tv_nsec: i64::from(wait.subsec_nanos()),
                }
            });
            events.clear();
            // An error can only be an interruption: look again.
            let _ = epoll::wait(&self.epoll, rustix::buffer::spare_capacity(&mut events), timeout.as_ref());
            let now = clock::now();
            for event in events.drain(..) {
                let token = event.data.u64();
                match token {
                    WAKE => {
                        self.shared.wake.silence();
                    }
                    LISTENER => self.accept(now),
                    _ => self.serve(token, now),
                }
            }
        }
    }

    /// Returns whether to end at once.
    fn take_orders(&mut self, now: Nanos) -> bool {
        for order in self.shared.take_orders() {
            match order {
                Order::Connect { peer, dial, deadline } => {
                    let retry_at = dial.map(|_| now);
                    let pause = DIAL_PAUSE_MIN;
                    self.peers[peer as usize].wanted =
                        Some(Wanted { since: now, deadline, dial, retry_at, pause, session: 0 });
                    self.try_open(peer);
                }
                Order::Flush { peer } => self.watch_output(peer),
                Order::Sever { peer } => self.forget(peer),
                Order::Lose { peer, cause } => self.lose(peer, cause, now),
                Order::Stop { linger_until } => {
                    let _ = epoll::delete(&self.epoll, &self.listener);
                    for link in self.shared.links.iter().filter(|link| link.lingers()) {
                        link.shutdown_write();
                    }
                    self.lingering_until = Some(linger_until);
                }
            }
        }
        false
    }

    /// Whether everybody who was told goodbye has had the time to read it.
    fn has_lingered(&self, now: Nanos) -> bool {
        self.lingering_until
            .is_some_and(|until| now >= until || !self.shared.links.iter().any(|link| link.lingers()))
    }

    /// Acts on what is due; returns when something will be.
    fn keep_time(&mut self, now: Nanos) -> Option<Nanos> {
        let mut next = self.lingering_until;
        let mut earliest = |time: Nanos| next = Some(next.map_or(time, |next: Nanos| next.min(time)));
        if let Some(until) = self.rest.end(&self.epoll, &self.listener, LISTENER, now) {
            earliest(until);
        }
        let mut late = Vec::new();
        for (slot, connection) in self.connections.iter().enumerate() {
            if let Some(Connection { kind: Kind::Handshake(proving), .. }) = connection {
                if now >= proving.deadline { late.push(slot) } else { earliest(proving.deadline) }
            }
        }
        let (mut lost, mut dials) = (Vec::new(), Vec::new());
        for (peer, plan) in self.peers.iter().enumerate() {
            let Some(wanted) = &plan.wanted else { continue };
            if now >= wanted.deadline {
                lost.push(peer as Rank);
                continue;
            }
            earliest(wanted.deadline);
            match wanted.retry_at {
                Some(at) if now >= at => dials.push(peer as Rank),
                Some(at) => earliest(at),
                None => {}
            }
        }
        for slot in late {
            self.drop_handshake(slot, now);
        }
        for peer in lost {
            self.not_reached(peer, now);
        }
        for peer in dials {
            self.dial(peer, now);
        }
        next
    }

    fn not_reached(&mut self, peer: Rank, now: Nanos) {
        let plan = &mut self.peers[peer as usize];
        let waited = plan.wanted.as_ref().map_or(Duration::ZERO, |wanted| now.since(wanted.since));
        let cause = plan.violation.map_or(LossCause::NotReached(waited), LossCause::Protocol);
        self.forget(peer);
        self.shared.lose(peer, cause);
    }

    fn insert(&mut self, kind: Kind, flags: epoll::EventFlags) -> std::io::Result<usize> {
        self.generation = self.generation.wrapping_add(1);
        let slot = self.free.pop().unwrap_or_else(|| {
            self.connections.push(None);
            self.connections.len() - 1
        });
        let data = epoll::EventData::new_u64(u64::from(self.generation) << 32 | slot as u64);
        let added = match &kind {
            Kind::Handshake(proving) => epoll::add(&self.epoll, &proving.socket, data, flags),
            Kind::Control { stream, .. } => epoll::add(&self.epoll, stream, data, flags),
            Kind::Process { file, .. } => epoll::add(&self.epoll, file, data, flags),
        };
        if let Err(error) = added {
            self.free.push(slot);
            return Err(error.into());
        }
        self.connections[slot] = Some(Connection { generation: self.generation, kind });
        Ok(slot)
    }

    fn remove(&mut self, slot: usize) -> Option<Kind> {
        let connection = self.connections[slot].take()?;
        self.free.push(slot);
        // Explicitly, as a forked child may keep the connection open.
        let _ = match &connection.kind {
            Kind::Handshake(proving) => {
                if let Origin::Accepted(from) = proving.origin {
                    self.unproved.remove(from, slot as u64);
                }
                epoll::delete(&self.epoll, &proving.socket)
            }
            Kind::Control { stream, .. } => epoll::delete(&self.epoll, stream),
            Kind::Process { file, .. } => epoll::delete(&self.epoll, file),
        };
        Some(connection.kind)
    }

    fn serve(&mut self, token: u64, now: Nanos) {
        let slot = (token & 0xffff_ffff) as usize;
        let Some(Some(connection)) = self.connections.get(slot) else { return };
        if u64::from(connection.generation) != token >> 32 {
            return;
        }
        match &connection.kind {
            Kind::Handshake(_) => self.serve_handshake(slot, now),
            Kind::Control { peer, .. } => {
                let peer = *peer;
                self.serve_control(slot, peer, now);
            }
            Kind::Process { peer, .. } => {
                let peer = *peer;
                self.process_ended(slot, peer, now);
            }
        }
    }

    fn serve_control(&mut self, slot: usize, peer: Rank, now: Nanos) {
        if self.shared.link(peer).standing() == Standing::Severed {
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
        match self.shared.link(peer).standing() {
            // Its goodbye came before.
            Standing::Goodbye => {
                self.shared.link(peer).close();
                self.forget(peer);
            }
            // Before the pair was there: the listener may be about to take a newer attempt.
            Standing::Unconnected if !matches!(cause, LossCause::Protocol(_)) => self.dial_again(peer, now),
            _ => {
                self.forget(peer);
                self.shared.lose(peer, cause);
            }
        }
    }

    /// Reads what is there and acts on it.
    fn drain_control(&mut self, slot: usize, peer: Rank) -> Result<(), LossCause> {
        loop {
            let Some(Connection { kind: Kind::Control { stream, reader, .. }, .. }) =
                &mut self.connections[slot]
            else {
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
                match ControlFrame::decode(&bytes[used..]) {
                    Ok(Some((frame, count))) => {
                        used += count;
                        if let Err(violation) = self.act(peer, &frame) {
                            break Err(LossCause::Protocol(violation));
                        }
                    }
                    Ok(None) => break Ok(()),
                    Err(violation) => break Err(LossCause::Protocol(violation)),
                }
            };
            bytes.drain(..used);
            if let Some(Connection { kind: Kind::Control { reader, .. }, .. }) = &mut self.connections[slot] {
                *reader = bytes;
            }
            result?;
        }
    }

    fn act(&mut self, peer: Rank, frame: &ControlFrame<'_>) -> Result<(), ProtocolViolation> {
        let shared = Arc::clone(&self.shared);
        let link = shared.link(peer);
        match (link.standing(), frame) {
            (Standing::Unconnected, ControlFrame::Ready) => {
                let complete =
                    self.peers[peer as usize].arrivals.as_ref().is_some_and(Arrivals::lanes_complete);
                if !complete {
                    return Err(ProtocolViolation::UnexpectedAnswer);
                }
                self.open(peer, None);
            }
            (Standing::Open | Standing::Goodbye, ControlFrame::Message(message)) => {
                if let Some(reply) = self.shared.responder.message(peer, message) {
                    let reply = ControlFrame::Message(&reply[..reply.len().min(MESSAGE_BYTES_MAX)]);
                    link.say(&reply).ok_or(ProtocolViolation::TooManyRequests)?;
                }
                self.shared.bell.ring();
            }
            (Standing::Open | Standing::Goodbye, ControlFrame::Revoked(key)) => {
                shared.send(Mail::Revoked { peer, key: *key });
            }
            (Standing::Open, ControlFrame::Bye) => link.goodbye_came(),
            (Standing::Severed | Standing::Lost, _) => {}
            _ => return Err(ProtocolViolation::MalformedFrame),
        }
        Ok(())
    }

    /// Wakes when the peer's control stream takes more, as long as something waits for that.
    fn watch_output(&mut self, peer: Rank) {
        let waits = self.shared.link(peer).flush();
        for slot in 0..self.connections.len() {
            if let Some(Connection {
                kind: Kind::Control { peer: of, stream, watched_output, .. },
                generation,
            }) = &mut self.connections[slot]
                && *of == peer
                && *watched_output != waits
            {
                let output = if waits { epoll::EventFlags::OUT } else { epoll::EventFlags::empty() };
                let data = epoll::EventData::new_u64(u64::from(*generation) << 32 | slot as u64);
                let flags = epoll::EventFlags::IN | output;
                if epoll::modify(&self.epoll, &**stream, data, flags).is_ok() {
                    *watched_output = waits;
                }
            }
        }
    }

    /// The peer's process is gone.
    fn process_ended(&mut self, slot: usize, peer: Rank, now: Nanos) {
        self.remove(slot);
        self.lose(peer, LossCause::ProcessEnded, now);
    }

    /// The peer is lost, as something else than its control stream tells. Contract line 4: what it
    /// said before still counts.
    fn lose(&mut self, peer: Rank, cause: LossCause, now: Nanos) {
        let control = (0..self.connections.len()).find(|slot| {
            matches!(&self.connections[*slot],
                Some(Connection { kind: Kind::Control { peer: of, .. }, .. }) if *of == peer)
        });
        if let Some(control) = control {
            self.serve_control(control, peer, now);
        }
        match self.shared.link(peer).standing() {
            // Before the pair was there: a newer process may be about to come.
            Standing::Unconnected if cause == LossCause::ProcessEnded => {}
            Standing::Unconnected | Standing::Open => {
                self.forget(peer);
                self.shared.lose(peer, cause);
            }
            // A forked child may keep the stream open.
            Standing::Goodbye => {
                self.shared.link(peer).close();
                self.forget(peer);
            }
            _ => {}
        }
    }
}

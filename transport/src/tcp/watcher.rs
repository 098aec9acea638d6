//! The watcher thread: accepts, dials and proves connections, reads control streams, and notices losses, whether or not
//! anybody polls the device.
//!
//! **Invariant:** nothing that a stranger sends is believed, answered at length or kept: before its proof a connection
//! costs one slot, at most one fixed-size message of memory, and [`HANDSHAKE_LIMIT`] of time.

use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use rustix::event::epoll;
use rustix::net::{RecvFlags, SendFlags, SocketFlags};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use super::LANES;
use super::control::{CONTROL_HEADER_BYTES, ControlFrame};
use super::handshake::{Handshake, Hello, Identity, Progress, Role};
use super::shared::{Mail, Order, Shared, Standing};
use super::socket;
use crate::Rank;
use crate::clock::{self, Nanos};
use crate::device::{LossCause, MESSAGE_BYTES_MAX, ProtocolViolation, Ring};

/// How long a connection may take to prove itself.
const HANDSHAKE_LIMIT: Duration = Duration::from_secs(5);

/// Unproved connections at once at least; with many ranks more.
const HANDSHAKES_MIN: usize = 256;

/// Pauses between attempts to dial.
const DIAL_PAUSE_MIN: Duration = Duration::from_millis(5);
const DIAL_PAUSE_MAX: Duration = Duration::from_millis(500);

/// Pause before accepting again after the system had no descriptor left.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Connections of one attempt: the control stream and the lanes of both directions.
const CONNECTIONS: usize = 1 + 2 * LANES;

const LISTENER: u64 = u64::MAX;
const WAKE: u64 = u64::MAX - 1;

pub(super) struct Watcher {
    shared: Arc<Shared>,
    identity: Identity,
    epoll: OwnedFd,
    listener: OwnedFd,
    listener_paused_until: Option<Nanos>,
    connections: Vec<Option<Connection>>,
    free: Vec<usize>,
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

/// A connection that is not proved yet.
struct Proving {
    socket: OwnedFd,
    handshake: Handshake,
    deadline: Nanos,
    /// Whom this rank dialed, and in which attempt; `None`: somebody dialed this rank.
    dialed: Option<(Rank, u64)>,
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
            listener_paused_until: None,
            connections: Vec::new(),
            free: Vec::new(),
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
        if let Some(until) = self.listener_paused_until {
            if now >= until {
                self.listener_paused_until = None;
                let data = epoll::EventData::new_u64(LISTENER);
                let _ = epoll::add(&self.epoll, &self.listener, data, epoll::EventFlags::IN);
            } else {
                earliest(until);
            }
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
            Kind::Handshake(proving) => epoll::delete(&self.epoll, &proving.socket),
            Kind::Control { stream, .. } => epoll::delete(&self.epoll, stream),
            Kind::Process { file, .. } => epoll::delete(&self.epoll, file),
        };
        Some(connection.kind)
    }

    fn accept(&mut self, now: Nanos) {
        loop {
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            match rustix::net::accept_with(&self.listener, flags) {
                Ok(socket) => {
                    self.make_room();
                    let handshake = Handshake::listen(&self.identity);
                    let deadline = now + HANDSHAKE_LIMIT;
                    let proving = Proving { socket, handshake, deadline, dialed: None, verdict: None };
                    // No room in the kernel: the stranger is dropped.
                    let _ = self.insert(Kind::Handshake(Box::new(proving)), epoll::EventFlags::IN);
                }
                Err(rustix::io::Errno::INTR | rustix::io::Errno::CONNABORTED) => {}
                Err(rustix::io::Errno::AGAIN) => return,
                Err(_) => {
                    // Out of descriptors or memory: the listener would be ready for ever.
                    let _ = epoll::delete(&self.epoll, &self.listener);
                    self.listener_paused_until = Some(now + ACCEPT_PAUSE);
                    return;
                }
            }
        }
    }

    /// Drops the oldest unproved connection when there are too many.
    fn make_room(&mut self) {
        let max = HANDSHAKES_MIN.max(2 * CONNECTIONS * self.peers.len());
        let arriving =
            self.connections.iter().enumerate().filter_map(|(slot, connection)| match connection {
                Some(Connection { kind: Kind::Handshake(proving), .. }) if proving.dialed.is_none() => {
                    Some((proving.deadline, slot))
                }
                _ => None,
            });
        let (count, oldest) = arriving.fold((0, None), |(count, oldest), entry| {
            (count + 1, Some(oldest.map_or(entry, |o| entry.min(o))))
        });
        if let Some((_, slot)) = oldest
            && count >= max
        {
            self.remove(slot);
        }
    }

    fn dial(&mut self, peer: Rank, now: Nanos) {
        self.abandon_attempt(peer);
        let session = session();
        let Some(wanted) = &mut self.peers[peer as usize].wanted else { return };
        wanted.session = session;
        wanted.retry_at = None;
        let Some(address) = wanted.dial else { return };
        let deadline = wanted.deadline.min(now + HANDSHAKE_LIMIT);
        let lanes = (0..LANES as u8).flat_map(|lane| [(Role::ToListener, lane), (Role::ToDialer, lane)]);
        for (role, lane) in std::iter::once((Role::Control, 0)).chain(lanes) {
            let handshake = Handshake::dial(&self.identity, role, lane, peer, session);
            let inserted = socket::dial(&address).and_then(|socket| {
                let dialed = Some((peer, session));
                let proving = Proving { socket, handshake, deadline, dialed, verdict: None };
                let flags = epoll::EventFlags::IN | epoll::EventFlags::OUT;
                self.insert(Kind::Handshake(Box::new(proving)), flags)
            });
            if inserted.is_err() {
                self.dial_again(peer, now);
                return;
            }
        }
    }

    /// Drops all of an attempt that did not lead to a pair.
    fn abandon_attempt(&mut self, peer: Rank) {
        let slots: Vec<usize> = (0..self.connections.len())
            .filter(|slot| match &self.connections[*slot] {
                Some(Connection { kind: Kind::Handshake(proving), .. }) => {
                    proving.dialed.is_some_and(|(dialed, _)| dialed == peer)
                }
                Some(Connection {
                    kind: Kind::Control { peer: of, .. } | Kind::Process { peer: of, .. },
                    ..
                }) => *of == peer,
                None => false,
            })
            .collect();
        for slot in slots {
            self.remove(slot);
        }
        self.peers[peer as usize].arrivals = None;
    }

    fn dial_again(&mut self, peer: Rank, now: Nanos) {
        self.abandon_attempt(peer);
        if let Some(wanted) = &mut self.peers[peer as usize].wanted
            && wanted.dial.is_some()
        {
            wanted.retry_at = Some(now + wanted.pause);
            wanted.pause = (wanted.pause * 2).min(DIAL_PAUSE_MAX);
        }
    }

    fn forget(&mut self, peer: Rank) {
        self.abandon_attempt(peer);
        self.peers[peer as usize].wanted = None;
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

    fn drop_handshake(&mut self, slot: usize, now: Nanos) {
        if let Some(Kind::Handshake(proving)) = self.remove(slot)
            && let Some((peer, _)) = proving.dialed
        {
            self.dial_again(peer, now);
        }
    }

    fn serve_handshake(&mut self, slot: usize, now: Nanos) {
        loop {
            let Some(Connection { kind: Kind::Handshake(proving), generation }) = &mut self.connections[slot]
            else {
                return;
            };
            if !send_outgoing(proving) {
                self.drop_handshake(slot, now);
                return;
            }
            if proving.handshake.outgoing().is_empty() {
                if let Some(verdict) = proving.verdict {
                    self.conclude(slot, verdict, now);
                    return;
                }
            } else if proving.verdict.is_some() {
                // Nothing but room to send is awaited.
                let data = epoll::EventData::new_u64(u64::from(*generation) << 32 | slot as u64);
                let _ = epoll::modify(&self.epoll, &proving.socket, data, epoll::EventFlags::OUT);
                return;
            }
            let flags = RecvFlags::DONTWAIT;
            match rustix::net::recv(&proving.socket, proving.handshake.room(), flags) {
                Ok((0, _)) => {
                    self.drop_handshake(slot, now);
                    return;
                }
                Ok((count, _)) => {
                    let progress = match proving.handshake.received(count) {
                        Progress::Asked(hello) => {
                            let decision = decide(&self.peers, &self.shared, &hello);
                            proving.handshake.admit(decision)
                        }
                        progress => progress,
                    };
                    if progress != Progress::Under {
                        proving.verdict = Some(progress);
                    }
                }
                Err(rustix::io::Errno::INTR) => {}
                Err(rustix::io::Errno::AGAIN | rustix::io::Errno::NOTCONN) => {
                    // Dialed sockets are watched for room until they are connected.
                    if proving.handshake.outgoing().is_empty() {
                        let data = epoll::EventData::new_u64(u64::from(*generation) << 32 | slot as u64);
                        let _ = epoll::modify(&self.epoll, &proving.socket, data, epoll::EventFlags::IN);
                    }
                    return;
                }
                Err(_) => {
                    self.drop_handshake(slot, now);
                    return;
                }
            }
        }
    }

    /// A handshake is over.
    fn conclude(&mut self, slot: usize, verdict: Progress, now: Nanos) {
        let Some(Kind::Handshake(proving)) = self.remove(slot) else { return };
        match (verdict, proving.dialed) {
            (Progress::Done(hello), _) => {
                if socket::tune(&proving.socket).is_ok() {
                    self.arrived(&hello, proving.socket, proving.dialed);
                } else if let Some((peer, _)) = proving.dialed {
                    self.dial_again(peer, now);
                }
            }
            (Progress::Failed(violation, _), Some((peer, _))) => {
                self.forget(peer);
                self.shared.lose(peer, LossCause::Protocol(violation));
            }
            (Progress::Failed(violation, claimed), None) => {
                tracing::warn!(?claimed, %violation, "a connection was turned away");
                let plan = claimed.and_then(|rank| self.peers.get_mut(rank as usize));
                if let Some(plan) = plan {
                    plan.violation = Some(violation);
                }
            }
            _ => {}
        }
    }

    /// A proved connection joins the others of its attempt.
    fn arrived(&mut self, hello: &Hello, socket: OwnedFd, dialed: Option<(Rank, u64)>) {
        let peer = hello.rank;
        let Some(plan) = self.peers.get_mut(peer as usize) else { return };
        let current = plan.arrivals.as_ref().is_some_and(|arrivals| arrivals.session == hello.session);
        if !current {
            plan.arrivals = Some(Arrivals::new(hello, &self.identity));
        }
        let Some(arrivals) = &mut plan.arrivals else { return };
        let lane = usize::from(hello.lane);
        let sends = (hello.role == Role::ToListener) == dialed.is_some();
        let place = match hello.role {
            Role::Control => &mut arrivals.control,
            _ if sends => &mut arrivals.to_peer[lane],
            _ => &mut arrivals.from_peer[lane],
        };
        *place = Some(socket);
        if dialed.is_some() && arrivals.lanes_complete() {
            // The listener's "ready" comes here, perhaps before its last word on a lane has been read: it waits for that.
            self.read_control(peer);
        }
        self.try_open(peer);
    }

    fn read_control(&mut self, peer: Rank) {
        let Some(arrivals) = &mut self.peers[peer as usize].arrivals else { return };
        let Some(control) = arrivals.control.take() else { return };
        let _ = socket::tune_control(&control);
        let stream = Arc::new(control);
        arrivals.reading = Some(Arc::clone(&stream));
        let reader = Vec::with_capacity(2 * (CONTROL_HEADER_BYTES + MESSAGE_BYTES_MAX));
        let kind = Kind::Control { peer, stream, reader, watched_output: false };
        // Without room in the kernel the pair does not come about and times out.
        let _ = self.insert(kind, epoll::EventFlags::IN);
    }

    /// The listener's end: opens the pair when all is there and wanted.
    fn try_open(&mut self, peer: Rank) {
        let plan = &mut self.peers[peer as usize];
        let listens = plan.wanted.as_ref().is_some_and(|wanted| wanted.dial.is_none());
        let complete = plan
            .arrivals
            .as_ref()
            .is_some_and(|arrivals| arrivals.lanes_complete() && arrivals.control.is_some());
        if listens && complete {
            self.read_control(peer);
            self.open(peer, Some(&ControlFrame::Ready));
        }
    }

    /// Opens a pair, saying something before this rank's device can say anything.
    fn open(&mut self, peer: Rank, first: Option<&ControlFrame<'_>>) {
        let plan = &mut self.peers[peer as usize];
        let Some(arrivals) = plan.arrivals.take() else { return };
        plan.wanted = None;
        let Some(stream) = arrivals.reading else { return };
        if !self.shared.link(peer).open(stream) {
            return;
        }
        if let Some(first) = first {
            self.shared.link(peer).say(first);
        }
        if let Some(file) = arrivals.process.and_then(open_process) {
            let _ = self.insert(Kind::Process { peer, file }, epoll::EventFlags::IN);
        }
        self.shared.send(Mail::Opened {
            peer,
            cells: arrivals.cells as usize,
            out: arrivals.to_peer.into_iter().flatten().collect(),
            incoming: arrivals.from_peer.into_iter().flatten().collect(),
        });
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

    /// The peer's process is gone; what it said before still counts.
    fn process_ended(&mut self, slot: usize, peer: Rank, now: Nanos) {
        self.remove(slot);
        let control = (0..self.connections.len()).find(|slot| {
            matches!(&self.connections[*slot],
                Some(Connection { kind: Kind::Control { peer: of, .. }, .. }) if *of == peer)
        });
        if let Some(control) = control {
            self.serve_control(control, peer, now);
        }
        match self.shared.link(peer).standing() {
            Standing::Open => {
                self.forget(peer);
                self.shared.lose(peer, LossCause::ProcessEnded);
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

/// Whether a proved dialer is welcome.
fn decide(peers: &[Plan], shared: &Shared, hello: &Hello) -> Result<(), ProtocolViolation> {
    let plan = peers.get(hello.rank as usize).ok_or(ProtocolViolation::WrongRank)?;
    // A rank that is connected, or is to be dialed, does not come a second time.
    let expected = shared.link(hello.rank).standing() == Standing::Unconnected
        && plan.wanted.as_ref().is_none_or(|wanted| wanted.dial.is_none());
    if expected { Ok(()) } else { Err(ProtocolViolation::WrongRank) }
}

/// Returns false when the connection is broken.
fn send_outgoing(proving: &mut Proving) -> bool {
    loop {
        let outgoing = proving.handshake.outgoing();
        if outgoing.is_empty() {
            return true;
        }
        match rustix::net::send(&proving.socket, outgoing, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
            Ok(count) => drop(outgoing.drain(..count)),
            Err(rustix::io::Errno::INTR) => {}
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::NOTCONN) => return true,
            Err(_) => return false,
        }
    }
}

/// Opens a process of this host; readable when it has ended.
fn open_process(process: u32) -> Option<OwnedFd> {
    let pid = Pid::from_raw(i32::try_from(process).ok()?)?;
    pidfd_open(pid, PidfdFlags::empty()).ok()
}

fn session() -> u64 {
    crate::memory::random_key().0
}

//! How pairs are connected: dialing, accepting, handshakes, and the opening of a pair.

use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use rustix::event::epoll;
use rustix::net::{RecvFlags, SendFlags, SocketAddrAny, SocketFlags};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use super::{Connection, Origin, PairConnections, Peer, PendingHandshake};
use super::{DIAL_PAUSE_MAX, HANDSHAKE_LIMIT, HANDSHAKES_MIN, Watcher};
use crate::Rank;
use crate::accepting::ACCEPTS_AT_ONCE;
use crate::clock::Nanos;
use crate::control::FabricMessage;
use crate::control::State;
use crate::control::frame::{Frame, HEADER_BYTES};
use crate::control::handshake::{Handshake, Hello, Progress, Role};
use crate::control::socket;
use crate::control::{ControlEvent, Shared};
use crate::device::files_allowed;
use crate::device::{LossCause, MESSAGE_BYTES_MAX, ProtocolViolation};

impl<M: FabricMessage> Watcher<M> {
    /// Accepts connections, up to a limit, so that connections that exist get their turn.
    pub(super) fn accept(&mut self, now: Nanos) {
        for _ in 0..ACCEPTS_AT_ONCE {
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            match rustix::net::acceptfrom_with(&self.listener, flags) {
                Ok((socket, from)) => self.accepted(socket, from, now),
                Err(rustix::io::Errno::INTR | rustix::io::Errno::CONNABORTED) => {}
                Err(rustix::io::Errno::AGAIN) => return,
                Err(errno) => {
                    // Out of descriptors or memory. If more unauthenticated connections exist than
                    // peers can have, those use them up.
                    if self.unauthenticated.len() > self.connections_max() {
                        return self.drop_oldest_unauthenticated();
                    }
                    self.rest.begin(&self.epoll, &self.listener, now);
                    return self.cannot_open(&errno.into());
                }
            }
        }
    }

    /// The most connections that all peers together have.
    fn connections_max(&self) -> usize {
        self.identity.connections() * self.peers.len()
    }

    fn accepted(&mut self, socket: OwnedFd, from: Option<SocketAddrAny>, now: Nanos) {
        // The kernel knows the address, unless the connection has ended meanwhile.
        let Some(Ok(from)) = from.map(SocketAddr::try_from) else { return };
        if self.unauthenticated.len() >= HANDSHAKES_MIN.max(2 * self.connections_max()) {
            self.drop_oldest_unauthenticated();
        }
        let origin = Origin::Accepted(from.ip());
        let handshake = Handshake::listen(&self.identity);
        let pending =
            PendingHandshake { socket, handshake, deadline: now + HANDSHAKE_LIMIT, origin, verdict: None };
        // If the kernel has no room, the connection is dropped.
        if let Ok(slot) = self.insert(Connection::Handshake(Box::new(pending)), epoll::EventFlags::IN) {
            self.unauthenticated.add(from.ip(), slot as u64);
            // At once: bytes that have come already keep it from being counted as a connection that
            // sends nothing.
            self.serve_handshake(slot, now);
        }
    }

    fn drop_oldest_unauthenticated(&mut self) {
        if let Some(slot) = self.unauthenticated.first_to_drop() {
            self.remove(slot as usize);
        }
    }

    pub(super) fn dial(&mut self, peer: Rank, now: Nanos) {
        self.abandon_attempt(peer);
        let session = session();
        let Some(request) = &mut self.peers[peer as usize].request else { return };
        request.session = session;
        request.retry_at = None;
        let Some(address) = request.dial else { return };
        let deadline = request.deadline.min(now + HANDSHAKE_LIMIT);
        let data = (0..self.identity.data_connections)
            .flat_map(|index| [(Role::ToListener, index), (Role::ToDialer, index)]);
        for (role, index) in std::iter::once((Role::Control, 0)).chain(data) {
            let handshake = Handshake::dial(&self.identity, role, index, peer, session);
            let inserted = socket::dial(&address).and_then(|socket| {
                let origin = Origin::Dialed(peer, session);
                let pending = PendingHandshake { socket, handshake, deadline, origin, verdict: None };
                let flags = epoll::EventFlags::IN | epoll::EventFlags::OUT;
                self.insert(Connection::Handshake(Box::new(pending)), flags)
            });
            if let Err(error) = inserted {
                self.dial_again(peer, now);
                return self.cannot_open(&error);
            }
        }
    }

    /// Gives up the peers that are not connected if this process may open no more files; they would
    /// wait until their deadline.
    fn cannot_open(&mut self, error: &std::io::Error) {
        if files_allowed(error).is_none() {
            return;
        }
        for peer in 0..self.peers.len() as Rank {
            if self.peers[peer as usize].request.is_some() {
                self.forget(peer);
                self.shared.lose(peer, LossCause::unconnected(error));
            }
        }
    }

    /// Drops all connections of an attempt that did not lead to a pair.
    fn abandon_attempt(&mut self, peer: Rank) {
        for slot in self.peers[peer as usize].slots.clone() {
            self.remove(slot);
        }
        self.peers[peer as usize].connections_of_attempt = None;
    }

    pub(super) fn dial_again(&mut self, peer: Rank, now: Nanos) {
        self.abandon_attempt(peer);
        if let Some(request) = &mut self.peers[peer as usize].request
            && request.dial.is_some()
        {
            request.retry_at = Some(now + request.pause);
            request.pause = (request.pause * 2).min(DIAL_PAUSE_MAX);
        }
    }

    pub(super) fn forget(&mut self, peer: Rank) {
        self.abandon_attempt(peer);
        self.peers[peer as usize].request = None;
    }

    pub(super) fn drop_handshake(&mut self, slot: usize, now: Nanos) {
        if let Some(Connection::Handshake(pending)) = self.remove(slot)
            && let Some((peer, _)) = pending.origin.dialed()
        {
            self.dial_again(peer, now);
        }
    }

    pub(super) fn serve_handshake(&mut self, slot: usize, now: Nanos) {
        loop {
            let Some(Connection::Handshake(pending)) = self.connections.value_mut(slot) else { return };
            if !send_outgoing(pending) {
                self.drop_handshake(slot, now);
                return;
            }
            if pending.handshake.outgoing().is_empty() {
                if let Some(verdict) = pending.verdict {
                    self.finish_handshake(slot, verdict, now);
                    return;
                }
            } else if pending.verdict.is_some() {
                // Only room to send is missing.
                let _ = self.watch(slot, epoll::EventFlags::OUT);
                return;
            }
            let flags = RecvFlags::DONTWAIT;
            match rustix::net::recv(&pending.socket, pending.handshake.room(), flags) {
                Ok((0, _)) => {
                    self.drop_handshake(slot, now);
                    return;
                }
                Ok((count, _)) => {
                    let progress = match pending.handshake.received(count) {
                        Progress::AwaitsAdmission(hello) => {
                            let decision = admission(&self.peers, &self.shared, &hello);
                            pending.handshake.admit(decision)
                        }
                        progress => progress,
                    };
                    if progress != Progress::Pending {
                        pending.verdict = Some(progress);
                    } else if let Origin::Accepted(from) = pending.origin
                        && pending.handshake.has_received_hello()
                    {
                        self.unauthenticated.hello_received(from, slot as u64);
                    }
                }
                Err(rustix::io::Errno::INTR) => {}
                Err(rustix::io::Errno::AGAIN | rustix::io::Errno::NOTCONN) => {
                    // Dialed sockets are watched for room until they are connected.
                    if pending.handshake.outgoing().is_empty() {
                        let _ = self.watch(slot, epoll::EventFlags::IN);
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

    /// Acts on the result of a handshake.
    fn finish_handshake(&mut self, slot: usize, verdict: Progress, now: Nanos) {
        let Some(Connection::Handshake(pending)) = self.remove(slot) else { return };
        let dialed = pending.origin.dialed();
        match (verdict, dialed) {
            (Progress::Done(hello), _) => {
                if socket::tune(&pending.socket).is_ok() {
                    self.add_connection(&hello, pending.socket, dialed);
                } else if let Some((peer, _)) = dialed {
                    self.dial_again(peer, now);
                }
            }
            (Progress::Failed(violation, _), Some((peer, _))) => {
                self.forget(peer);
                self.shared.lose(peer, LossCause::Protocol(violation));
            }
            (Progress::Failed(violation, claimed), None) => {
                if self.warnings_left > 0 {
                    self.warnings_left -= 1;
                    tracing::warn!(?claimed, %violation, "a connection was turned away");
                }
                let known = claimed.and_then(|rank| self.peers.get_mut(rank as usize));
                if let Some(known) = known {
                    known.violation = Some(violation);
                }
            }
            _ => {}
        }
    }

    /// Adds an authenticated connection to the others of its attempt.
    fn add_connection(&mut self, hello: &Hello, socket: OwnedFd, dialed: Option<(Rank, u64)>) {
        let peer = hello.rank;
        let Some(known) = self.peers.get_mut(peer as usize) else { return };
        let current = known
            .connections_of_attempt
            .as_ref()
            .is_some_and(|connections_of_attempt| connections_of_attempt.session == hello.session);
        if !current {
            known.connections_of_attempt = Some(PairConnections::new(hello, &self.identity));
        }
        let Some(connections_of_attempt) = &mut known.connections_of_attempt else { return };
        let index = usize::from(hello.index);
        let sends = (hello.role == Role::ToListener) == dialed.is_some();
        let place = match hello.role {
            Role::Control => &mut connections_of_attempt.control,
            _ if sends => &mut connections_of_attempt.to_peer[index],
            _ => &mut connections_of_attempt.from_peer[index],
        };
        *place = Some(socket);
        if dialed.is_some() && connections_of_attempt.has_all_data_connections() {
            // "Ready" comes on the control stream, perhaps before the verdict on a data connection
            // has been read: it waits for that.
            self.read_control(peer);
        }
        self.try_open(peer);
    }

    fn read_control(&mut self, peer: Rank) {
        let Some(connections_of_attempt) = &mut self.peers[peer as usize].connections_of_attempt else {
            return;
        };
        let Some(control) = connections_of_attempt.control.take() else { return };
        let _ = socket::tune_control(&control);
        let stream = Arc::new(control);
        connections_of_attempt.reading = Some(Arc::clone(&stream));
        let reader = Vec::with_capacity(2 * (HEADER_BYTES + MESSAGE_BYTES_MAX));
        let control = Connection::Control { peer, stream, reader, watches_output: false };
        // If the kernel has no room, the pair is not connected and times out.
        let _ = self.insert(control, epoll::EventFlags::IN);
    }

    /// Opens the pair on the listener's side when all connections exist and the device wants it.
    pub(super) fn try_open(&mut self, peer: Rank) {
        let known = &self.peers[peer as usize];
        let listens = known.request.as_ref().is_some_and(|request| request.dial.is_none());
        let complete = known.connections_of_attempt.as_ref().is_some_and(|connections_of_attempt| {
            connections_of_attempt.has_all_data_connections() && connections_of_attempt.control.is_some()
        });
        if listens && complete {
            self.read_control(peer);
            self.open(peer, Some(&Frame::Ready));
        }
    }

    /// Opens a pair and sends `first` before this rank's device can send anything.
    pub(super) fn open(&mut self, peer: Rank, first: Option<&Frame<'_>>) {
        let known = &mut self.peers[peer as usize];
        let Some(connections_of_attempt) = known.connections_of_attempt.take() else { return };
        known.request = None;
        let Some(stream) = connections_of_attempt.reading else { return };
        if !self.shared.link(peer).open(stream) {
            return;
        }
        if let Some(first) = first {
            let _ = self.shared.link(peer).send_frame(first);
        }
        if let Some(file) = connections_of_attempt.process.and_then(open_process) {
            let _ = self.insert(Connection::Process { peer, file }, epoll::EventFlags::IN);
        }
        self.shared.send(ControlEvent::Opened {
            peer,
            signal_slots: connections_of_attempt.signal_slots as usize,
            to_peer: connections_of_attempt.to_peer.into_iter().flatten().collect(),
            from_peer: connections_of_attempt.from_peer.into_iter().flatten().collect(),
        });
    }
}

/// Whether to admit an authenticated dialer.
fn admission<M>(peers: &[Peer], shared: &Shared<M>, hello: &Hello) -> Result<(), ProtocolViolation> {
    let known = peers.get(hello.rank as usize).ok_or(ProtocolViolation::WrongRank)?;
    // A rank that is connected, or that this rank dials, does not dial again.
    let expected = shared.link(hello.rank).state() == State::Unconnected
        && known.request.as_ref().is_none_or(|request| request.dial.is_none());
    if expected { Ok(()) } else { Err(ProtocolViolation::WrongRank) }
}

/// Returns false when the connection is broken.
fn send_outgoing(pending: &mut PendingHandshake) -> bool {
    loop {
        let outgoing = pending.handshake.outgoing();
        if outgoing.is_empty() {
            return true;
        }
        match rustix::net::send(&pending.socket, outgoing, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
            Ok(count) => drop(outgoing.drain(..count)),
            Err(rustix::io::Errno::INTR) => {}
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::NOTCONN) => return true,
            Err(_) => return false,
        }
    }
}

/// Opens a process of this host; the descriptor is readable when the process has ended.
fn open_process(process: u32) -> Option<OwnedFd> {
    let pid = Pid::from_raw(i32::try_from(process).ok()?)?;
    pidfd_open(pid, PidfdFlags::empty()).ok()
}

fn session() -> u64 {
    crate::region::random_key().0
}

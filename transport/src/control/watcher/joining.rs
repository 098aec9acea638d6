//! How pairs are connected: dialing, accepting, handshakes, and the opening of a pair.

use std::net::IpAddr;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::event::epoll;
use rustix::io::Errno;
use rustix::net::SendFlags;
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use super::{DIAL_PAUSE_MAX, HANDSHAKE_LIMIT, HANDSHAKES_MIN, Watcher};
use super::{Origin, PairConnections, PendingHandshake, ReceiveBuffer, WatchedFile, WatchedPeer};
use crate::Rank;
use crate::accepting::ACCEPTS_AT_ONCE;
use crate::clock::Nanos;
use crate::control::frame::ControlFrame;
use crate::control::handshake::{Handshake, Hello, Progress, Role};
use crate::control::packet::{self, ReceiveError};
use crate::control::{
    FabricHandler, OpenedPair, ProtectedSocket, ReceivedFiles, Shared, StreamState, send_sealed,
};
use crate::device::files_allowed;
use crate::device::{LossCause, Protection, ProtocolViolation};
use crate::tls::TlsWriter;

impl Watcher {
    /// Accepts connections, up to a limit, so that connections that exist get their turn.
    pub(super) fn accept(&mut self, now: Nanos) {
        for _ in 0..ACCEPTS_AT_ONCE {
            match self.network.accept(&self.listener) {
                Ok(Some((socket, from))) => self.accepted(socket, from, now),
                Ok(None) | Err(Errno::INTR | Errno::CONNABORTED) => {}
                Err(Errno::AGAIN) => return,
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

    fn accepted(&mut self, socket: OwnedFd, from: IpAddr, now: Nanos) {
        if self.unauthenticated.len() >= HANDSHAKES_MIN.max(2 * self.connections_max()) {
            self.drop_oldest_unauthenticated();
        }
        let origin = Origin::Accepted(from);
        let handshake = Handshake::listen(&self.identity, from);
        let pending =
            PendingHandshake { socket, handshake, deadline: now + HANDSHAKE_LIMIT, origin, verdict: None };
        // If the kernel has no room, the connection is dropped.
        if let Ok(token) = self.insert(WatchedFile::Handshake(Box::new(pending)), epoll::EventFlags::IN) {
            self.unauthenticated.add(from, token);
            // At once: bytes that have come already keep it from being counted as a connection that
            // sends nothing.
            self.serve_handshake(token, now);
        }
    }

    fn drop_oldest_unauthenticated(&mut self) {
        if let Some(token) = self.unauthenticated.first_to_drop() {
            self.remove(token);
        }
    }

    pub(super) fn dial(&mut self, peer: Rank, now: Nanos) {
        self.abandon_attempt(peer);
        let session = session();
        let Some(request) = &mut self.peers[peer as usize].request else { return };
        request.retry_at = None;
        // Over Unix sockets this is the only attempt: a listener takes the end of the stream for
        // the end of the peer.
        let deadline = if self.network.is_unix() {
            request.deadline
        } else {
            request.deadline.min(now + HANDSHAKE_LIMIT)
        };
        let data = (0..self.identity.data_connections)
            .flat_map(|index| [(Role::ToListener, index), (Role::ToDialer, index)]);
        for (role, index) in std::iter::once((Role::Control, 0)).chain(data) {
            let request = self.peers[peer as usize].request.as_ref();
            let Some((target, ends)) = request.and_then(|request| request.dial.as_ref()) else { return };
            let protection = target.ip().map_or(Protection::Clear, |ip| self.identity.asked(ip));
            let handshake = Handshake::dial(&self.identity, (role, index), *ends, session, protection);
            let inserted = target.dial().and_then(|socket| {
                let origin = Origin::Dialed(peer);
                let pending = PendingHandshake { socket, handshake, deadline, origin, verdict: None };
                let flags = epoll::EventFlags::IN | epoll::EventFlags::OUT;
                self.insert(WatchedFile::Handshake(Box::new(pending)), flags)
            });
            if let Err(error) = inserted {
                // A Unix socket whose listener is gone has no successor of its name.
                if self.network.is_unix() && error.kind() != std::io::ErrorKind::WouldBlock {
                    self.end(peer, LossCause::unconnected(&error));
                } else {
                    self.dial_again(peer, now);
                }
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
                self.end(peer, LossCause::unconnected(error));
            }
        }
    }

    /// Drops all connections of an attempt that did not lead to a pair.
    fn abandon_attempt(&mut self, peer: Rank) {
        for token in self.peers[peer as usize].tokens.clone() {
            self.remove(token);
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
        let known = &mut self.peers[peer as usize];
        (known.request, known.ending, known.output_paused_until) = (None, None, None);
    }

    pub(super) fn drop_handshake(&mut self, token: u64, now: Nanos) {
        if let Some(WatchedFile::Handshake(pending)) = self.remove(token)
            && let Some(peer) = pending.origin.dialed()
        {
            self.dial_again(peer, now);
        }
    }

    pub(super) fn serve_handshake(&mut self, token: u64, now: Nanos) {
        loop {
            let Some(WatchedFile::Handshake(pending)) = self.connections.find_mut(token) else { return };
            if !send_outgoing(pending) {
                self.drop_handshake(token, now);
                return;
            }
            if pending.handshake.outgoing().is_empty() {
                if let Some(verdict) = pending.verdict {
                    self.finish_handshake(token, verdict, now);
                    return;
                }
            } else if pending.verdict.is_some() {
                // Only room to send is missing.
                let _ = self.watch(token, epoll::EventFlags::OUT);
                return;
            }
            // Files that come before their sender is authenticated are closed unseen.
            let received = packet::receive(&pending.socket, pending.handshake.room());
            match received.map(|packet| packet.bytes) {
                Ok(0) => {
                    self.drop_handshake(token, now);
                    return;
                }
                Ok(count) => {
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
                        self.unauthenticated.hello_received(from, token);
                    }
                }
                Err(ReceiveError::System(Errno::INTR)) => {}
                Err(ReceiveError::System(Errno::AGAIN | Errno::NOTCONN)) => {
                    // Dialed sockets are watched for room until they are connected.
                    if pending.handshake.outgoing().is_empty() {
                        let _ = self.watch(token, epoll::EventFlags::IN);
                    }
                    return;
                }
                Err(_) => {
                    self.drop_handshake(token, now);
                    return;
                }
            }
        }
    }

    /// Acts on the result of a handshake.
    fn finish_handshake(&mut self, token: u64, verdict: Progress, now: Nanos) {
        let Some(WatchedFile::Handshake(mut pending)) = self.remove(token) else { return };
        let dialed = pending.origin.dialed();
        match (verdict, dialed) {
            (Progress::Done(hello), Some(peer)) if self.shared.known.had_rank(peer, hello.incarnation) => {
                self.end(peer, ProtocolViolation::FormerProcess.into());
            }
            (Progress::Done(hello), _) => {
                if self.network.tune(&pending.socket).is_ok() {
                    let session = pending.handshake.take_session();
                    let connection = ProtectedSocket::new(pending.socket, session);
                    self.add_connection(&hello, connection, dialed.is_some(), now);
                } else if let Some(peer) = dialed {
                    self.dial_again(peer, now);
                }
            }
            // The process that has the rank there may be about to end.
            (Progress::Failed(violation @ ProtocolViolation::RankTaken, _), Some(peer)) => {
                self.peers[peer as usize].violation = Some(violation);
                self.dial_again(peer, now);
            }
            (Progress::Failed(violation, _), Some(peer)) => self.end(peer, LossCause::Protocol(violation)),
            // Neither speaks against the process that this rank may wait for.
            (Progress::Failed(ProtocolViolation::RankTaken | ProtocolViolation::FormerProcess, _), None) => {}
            (Progress::Failed(violation, claimed), None) => {
                if self.warnings_left > 0 {
                    self.warnings_left -= 1;
                    tracing::warn!(?claimed, %violation, "a connection was turned away");
                }
                if let Some(peer) = claimed.filter(|rank| *rank < self.identity.world_size) {
                    self.peers[peer as usize].violation = Some(violation);
                    self.lose_if_rejected(peer);
                }
            }
            _ => {}
        }
    }

    /// Over Unix sockets: marks a peer lost if this rank waits for the peer and has rejected the
    /// peer's attempt. The peer makes no second attempt.
    pub(super) fn lose_if_rejected(&mut self, peer: Rank) {
        let known = &self.peers[peer as usize];
        if self.network.is_unix()
            && known.request.is_some()
            && known.connections_of_attempt.is_none()
            && let Some(violation) = known.violation
        {
            self.end(peer, LossCause::Protocol(violation));
        }
    }

    /// Adds an authenticated connection to the others of its attempt.
    fn add_connection(&mut self, hello: &Hello, connection: ProtectedSocket, is_dialer: bool, now: Nanos) {
        let peer = hello.rank;
        let Some(known) = self.peers.get(peer as usize) else { return };
        let attempt = known.connections_of_attempt.as_ref();
        if attempt.is_none_or(|attempt| attempt.session != hello.session) {
            if !is_dialer {
                // The stream of the attempt before may be read already.
                self.abandon_attempt(peer);
            }
            self.peers[peer as usize].connections_of_attempt =
                Some(PairConnections::new(hello, &self.identity));
        }
        let known = &mut self.peers[peer as usize];
        let Some(connections_of_attempt) = &mut known.connections_of_attempt else { return };
        let index = usize::from(hello.index);
        let sends = (hello.role == Role::ToListener) == is_dialer;
        let place = match hello.role {
            Role::Control => &mut connections_of_attempt.control,
            _ if sends => &mut connections_of_attempt.to_peer[index],
            _ => &mut connections_of_attempt.from_peer[index],
        };
        *place = Some(connection);
        if is_dialer && connections_of_attempt.has_all_data_connections() {
            // "Ready" comes on the control stream, perhaps before the verdict on a data connection
            // has been read: it waits for that.
            if let Some(stream) = self.read_control(peer)
                && self.network.is_unix()
            {
                send_ready(&*self.shared.handler, peer, &stream, None);
            }
        }
        self.try_open(peer, now);
    }

    /// Begins to read the control stream of an attempt.
    fn read_control(&mut self, peer: Rank) -> Option<Arc<OwnedFd>> {
        let connections_of_attempt = self.peers[peer as usize].connections_of_attempt.as_mut()?;
        let control = connections_of_attempt.control.take()?;
        let (control, writer, reader) = control.split();
        let _ = self.network.tune_control(&control);
        let stream = Arc::new(control);
        connections_of_attempt.reading = Some((Arc::clone(&stream), writer));
        let (control, received) = (Arc::clone(&stream), ReceiveBuffer::new());
        let control = WatchedFile::Control { peer, stream: control, received, reader, watches_output: false };
        // If the kernel has no room, the pair is not connected and times out.
        let _ = self.insert(control, epoll::EventFlags::IN);
        Some(stream)
    }

    /// On the listener's side, when all connections exist and the device wants the pair: opens the
    /// pair, over Unix sockets as soon as the dialer's files have come.
    pub(super) fn try_open(&mut self, peer: Rank, now: Nanos) {
        let known = &self.peers[peer as usize];
        let Some(request) = known.request.as_ref().filter(|request| request.dial.is_none()) else { return };
        let attempt = known.connections_of_attempt.as_ref();
        // It came before this rank asked for it, and may have had the rank since, over another
        // fabric of this device.
        let is_refused = |attempt: &PairConnections| {
            attempt.share_world != request.share_world
                || self.shared.known.had_rank(peer, attempt.incarnation)
        };
        if attempt.is_some_and(is_refused) {
            return self.abandon_attempt(peer);
        }
        let complete = attempt.is_some_and(|connections_of_attempt| {
            connections_of_attempt.has_all_data_connections() && connections_of_attempt.control.is_some()
        });
        if complete {
            self.read_control(peer);
            if !self.network.is_unix() {
                self.open(peer, Vec::new(), now);
            }
        }
    }

    /// Handles a "ready" of the other end, with the files of its rank.
    pub(super) fn ready(&mut self, peer: Rank, files: ReceivedFiles, now: Nanos) -> Result<(), LossCause> {
        let attempt = self.peers[peer as usize].connections_of_attempt.as_ref();
        let complete = attempt.is_some_and(PairConnections::has_all_data_connections);
        if !complete || !(self.dials(peer) || self.network.is_unix()) {
            return Err(ProtocolViolation::UnexpectedAnswer.into());
        }
        let files = files.ok_or_else(|| LossCause::unconnected(&Errno::MFILE.into()))?;
        self.open(peer, files, now);
        Ok(())
    }

    /// Whether this rank is the end that dials.
    fn dials(&self, peer: Rank) -> bool {
        let request = self.peers[peer as usize].request.as_ref();
        request.is_some_and(|request| request.dial.is_some())
    }

    /// Opens a pair. The listener sends "ready" before this rank's device can send anything.
    fn open(&mut self, peer: Rank, files: Vec<OwnedFd>, now: Nanos) {
        let dials = self.dials(peer);
        let known = &mut self.peers[peer as usize];
        let Some(connections_of_attempt) = known.connections_of_attempt.take() else { return };
        known.request = None;
        let Some((stream, writer)) = connections_of_attempt.reading else { return };
        let shared = Arc::clone(&self.shared);
        let begin = |stream: &OwnedFd, writer: Option<&mut TlsWriter>| {
            if !dials {
                send_ready(&*shared.handler, peer, stream, writer);
            }
        };
        if !shared.stream(peer).open(Arc::clone(&stream), writer, begin) {
            return;
        }
        shared.known.give(peer, connections_of_attempt.incarnation);
        let pair = OpenedPair {
            incarnation: connections_of_attempt.incarnation,
            own_rank: connections_of_attempt.own_rank,
            signal_slots: connections_of_attempt.signal_slots,
            data: [connections_of_attempt.to_peer, connections_of_attempt.from_peer]
                .map(|connections| connections.into_iter().flatten().collect()),
            files,
            stream,
        };
        let process = match shared.handler.opened(peer, pair) {
            Ok(process) => process.or_else(|| connections_of_attempt.process.and_then(open_process)),
            Err(cause) => return self.end(peer, cause),
        };
        if let Some(file) = process
            && let Err(error) = self.insert(WatchedFile::Process { peer, file }, epoll::EventFlags::IN)
        {
            return self.end(peer, LossCause::unconnected(&error));
        }
        self.watch_output(peer, now);
    }
}

/// Sends "ready" on a new stream, which has room for it. If it fails all the same, the stream is
/// broken, and its end or the deadline is detected.
fn send_ready(handler: &dyn FabricHandler, peer: Rank, stream: &OwnedFd, mut writer: Option<&mut TlsWriter>) {
    let mut send = |bytes: &[u8], files: &[BorrowedFd<'_>]| match &mut writer {
        Some(writer) => send_sealed(stream, writer, bytes).map(drop),
        None => packet::send(stream, bytes, files).map(drop),
    };
    if let Err(errno) = handler.send_ready(peer, &ControlFrame::Ready.to_bytes(), &mut send) {
        tracing::debug!(%errno, "a handshake packet was not sent");
    }
}

/// Whether to admit an authenticated dialer.
fn admission(peers: &[WatchedPeer], shared: &Shared, hello: &Hello) -> Result<(), ProtocolViolation> {
    let known = peers.get(hello.rank as usize).ok_or(ProtocolViolation::WrongRank)?;
    // A rank that this rank dials does not dial.
    let is_expected = known
        .request
        .as_ref()
        .is_none_or(|request| request.dial.is_none() && request.share_world != hello.is_of_other_world());
    if !is_expected {
        return Err(ProtocolViolation::WrongRank);
    }
    if shared.known.had_rank(hello.rank, hello.incarnation) {
        return Err(ProtocolViolation::FormerProcess);
    }
    match shared.stream(hello.rank).state() {
        StreamState::Unconnected => Ok(()),
        _ => Err(ProtocolViolation::RankTaken),
    }
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
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN | Errno::NOTCONN) => return true,
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

//! What the watcher waits for and what it knows of each peer.

use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use crate::Rank;
use crate::clock::Nanos;
use crate::control::handshake::{Handshake, Hello, Identity, Progress};
use crate::device::ProtocolViolation;

/// A descriptor that the watcher waits for.
pub(super) enum Connection {
    Handshake(Box<PendingHandshake>),
    Control { peer: Rank, stream: Arc<OwnedFd>, reader: Vec<u8>, watches_output: bool },
    Process { peer: Rank, file: OwnedFd },
}

impl Connection {
    pub(super) fn file(&self) -> BorrowedFd<'_> {
        match self {
            Self::Handshake(pending) => pending.socket.as_fd(),
            Self::Control { stream, .. } => stream.as_fd(),
            Self::Process { file, .. } => file.as_fd(),
        }
    }

    /// The peer of the connection; `None` for an accepted connection that is not authenticated.
    pub(super) fn peer(&self) -> Option<Rank> {
        match self {
            Self::Handshake(pending) => pending.origin.dialed().map(|(peer, _)| peer),
            Self::Control { peer, .. } | Self::Process { peer, .. } => Some(*peer),
        }
    }
}

/// The origin of a connection that is not authenticated.
#[derive(Clone, Copy)]
pub(super) enum Origin {
    /// This rank dialed the peer, in the attempt with this session number.
    Dialed(Rank, u64),
    /// Another process dialed this rank, from this address.
    Accepted(IpAddr),
}

impl Origin {
    /// The peer that this rank dialed, and the session number of the attempt.
    pub(super) fn dialed(self) -> Option<(Rank, u64)> {
        match self {
            Self::Dialed(peer, session) => Some((peer, session)),
            Self::Accepted(_) => None,
        }
    }
}

/// A connection whose handshake is under way.
pub(super) struct PendingHandshake {
    pub(super) socket: OwnedFd,
    pub(super) handshake: Handshake,
    pub(super) deadline: Nanos,
    pub(super) origin: Origin,
    /// The result; the handshake ends when all bytes are sent.
    pub(super) verdict: Option<Progress>,
}

/// The watcher's state of a peer, connected or not.
#[derive(Default)]
pub(super) struct Peer {
    pub(super) request: Option<ConnectRequest>,
    pub(super) connections_of_attempt: Option<PairConnections>,
    /// Why a process that claimed to be this peer was rejected.
    pub(super) violation: Option<ProtocolViolation>,
    /// The slots of the peer's connections.
    pub(super) slots: Vec<usize>,
}

/// A connection to a peer that the device asked for and that does not exist yet.
pub(super) struct ConnectRequest {
    pub(super) since: Nanos,
    pub(super) deadline: Nanos,
    pub(super) dial: Option<SocketAddr>,
    pub(super) retry_at: Option<Nanos>,
    pub(super) pause: Duration,
    /// The session number of the attempt under way.
    pub(super) session: u64,
}

/// Authenticated connections of one attempt.
pub(super) struct PairConnections {
    pub(super) session: u64,
    pub(super) signal_slots: u32,
    pub(super) process: Option<u32>,
    pub(super) control: Option<OwnedFd>,
    /// The control stream once the watcher reads it (the dialer waits for "ready").
    pub(super) reading: Option<Arc<OwnedFd>>,
    pub(super) to_peer: Vec<Option<OwnedFd>>,
    pub(super) from_peer: Vec<Option<OwnedFd>>,
}

impl PairConnections {
    pub(super) fn new(hello: &Hello, identity: &Identity) -> Self {
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

    pub(super) fn has_all_data_connections(&self) -> bool {
        self.to_peer.iter().chain(&self.from_peer).all(Option::is_some)
    }
}

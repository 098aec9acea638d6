//! What the watcher waits for and what it knows of each peer.

use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use crate::Rank;
use crate::clock::Nanos;
use crate::control::handshake::{Handshake, Hello, Identity, Progress};
use crate::device::ProtocolViolation;

/// Something that the watcher waits for.
pub(super) enum Connection {
    Handshake(Box<Proving>),
    Control { peer: Rank, stream: Arc<OwnedFd>, reader: Vec<u8>, watches_output: bool },
    Process { peer: Rank, file: OwnedFd },
}

impl Connection {
    pub(super) fn file(&self) -> BorrowedFd<'_> {
        match self {
            Self::Handshake(proving) => proving.socket.as_fd(),
            Self::Control { stream, .. } => stream.as_fd(),
            Self::Process { file, .. } => file.as_fd(),
        }
    }

    /// The peer that it belongs to; none while somebody who dialed this rank has proved nothing.
    pub(super) fn peer(&self) -> Option<Rank> {
        match self {
            Self::Handshake(proving) => proving.origin.dialed().map(|(peer, _)| peer),
            Self::Control { peer, .. } | Self::Process { peer, .. } => Some(*peer),
        }
    }
}

/// How a connection that is not proved came about.
#[derive(Clone, Copy)]
pub(super) enum Origin {
    /// This rank dialed that peer, in that attempt.
    Dialed(Rank, u64),
    /// Somebody dialed this rank from there.
    Accepted(IpAddr),
}

impl Origin {
    /// Whom this rank dialed, and in which attempt.
    pub(super) fn dialed(self) -> Option<(Rank, u64)> {
        match self {
            Self::Dialed(peer, session) => Some((peer, session)),
            Self::Accepted(_) => None,
        }
    }
}

/// A connection that is not proved yet.
pub(super) struct Proving {
    pub(super) socket: OwnedFd,
    pub(super) handshake: Handshake,
    pub(super) deadline: Nanos,
    pub(super) origin: Origin,
    /// Over as soon as everything is sent.
    pub(super) verdict: Option<Progress>,
}

/// What the watcher knows of a peer, connected or not.
#[derive(Default)]
pub(super) struct Peer {
    pub(super) wanted: Option<Wanted>,
    pub(super) arrivals: Option<Arrivals>,
    /// Why somebody who said to be this peer was turned away.
    pub(super) violation: Option<ProtocolViolation>,
    /// The slots of its connections.
    pub(super) slots: Vec<usize>,
}

/// A pair that the device wants and that is not there yet.
pub(super) struct Wanted {
    pub(super) since: Nanos,
    pub(super) deadline: Nanos,
    pub(super) dial: Option<SocketAddr>,
    pub(super) retry_at: Option<Nanos>,
    pub(super) pause: Duration,
    /// The attempt under way.
    pub(super) session: u64,
}

/// Proved connections of one attempt.
pub(super) struct Arrivals {
    pub(super) session: u64,
    pub(super) signal_slots: u32,
    pub(super) process: Option<u32>,
    pub(super) control: Option<OwnedFd>,
    /// The control stream's place once it is being read (the dialer awaits "ready").
    pub(super) reading: Option<Arc<OwnedFd>>,
    pub(super) to_peer: Vec<Option<OwnedFd>>,
    pub(super) from_peer: Vec<Option<OwnedFd>>,
}

impl Arrivals {
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

//! The watcher: one thread a device that sleeps on the listener, the control streams and the peers'
//! processes.
//!
//! It connects, decodes peers' frames (hostile until decoded), answers messages through the
//! responder, and detects losses: at once by the process descriptor, which reports a killed process
//! also while its forked children hold its sockets open. It blocks only in `epoll_wait`.

mod handshake;

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use rustix::event::epoll;
use rustix::io::Errno;
use rustix::time::Timespec;

use super::directory::FlushResult;
use super::frame::FRAME_BYTES_MAX;
use super::peer_status::ConnectionEnd;
use super::shared::{Command, Shared};
use crate::Rank;
use crate::accepting::AcceptPause;
use crate::auth::{Challenges, Secret, TAG_BYTES};
use crate::clock::{self, Nanos};
use crate::control::packet::{self, Packet, ReceiveError};
use crate::control::{SECOND_DESCRIPTOR, Slab};
use crate::device::files_allowed;
use crate::device::{DeviceConfig, LossCause, Responder};

/// Packets taken from one stream before the others get their turn.
const PACKETS_AT_ONCE: usize = 16;

/// Packets of an ended process in its stream at most; the stream's buffer holds fewer.
const PACKETS_LEFT_MAX: usize = 4096;

/// How long after its stream closed a process may take to end, so that the cause is right.
const PROCESS_END_LIMIT: Duration = Duration::from_millis(50);

/// The pause before dialing again when the listener's backlog is full.
const DIAL_AGAIN_AFTER: Duration = Duration::from_millis(5);

/// The pause before sending again when the system has no room for more descriptors.
const SYSTEM_FULL_PAUSE: Duration = Duration::from_millis(5);

/// Unauthenticated connections; further ones are rejected.
const UNAUTHENTICATED_MAX: usize = 1024;

const EVENTS_AT_ONCE: usize = 32;
const LISTENER: u64 = u64::MAX;
const WAKE: u64 = u64::MAX - 1;

/// What this rank's device has asked for of a peer.
enum ConnectState {
    /// `connect` was not called yet.
    NotRequested,
    /// Not yet asked for, and an early connection of the peer was lost.
    LostBeforeConnect(LossCause),
    /// Dial, as soon as the other's queue has room.
    Dial { name: String, again_at: Nanos, deadline: Nanos },
    /// A connection, under way or expected.
    Connection { deadline: Nanos },
    /// Connected once, or lost.
    Settled,
}

/// The phase of a connection.
enum Phase {
    /// Accepted: expects `Hello`.
    Unauthenticated {
        deadline: Nanos,
    },
    /// `Hello` came, but `connect` was not called here yet.
    Parked {
        peer: Rank,
        signal_slots: u32,
        challenge: [u8; TAG_BYTES],
    },
    /// Dialed, `Hello` sent.
    AwaitWelcome {
        peer: Rank,
        challenge: [u8; TAG_BYTES],
    },
    /// `Welcome` sent.
    AwaitGrant {
        peer: Rank,
        signal_slots: u32,
        challenges: Challenges,
    },
    /// `Grant` sent.
    AwaitAccept {
        peer: Rank,
        signal_slots: u32,
    },
    Open {
        peer: Rank,
        has_sent_bye: bool,
    },
    /// Its stream has ended without a bye; its process may be ending.
    Ending {
        peer: Rank,
        cause: LossCause,
        deadline: Nanos,
    },
}

impl Phase {
    fn peer(&self) -> Option<Rank> {
        match self {
            Self::Unauthenticated { .. } => None,
            Self::Parked { peer, .. }
            | Self::AwaitWelcome { peer, .. }
            | Self::AwaitGrant { peer, .. }
            | Self::AwaitAccept { peer, .. }
            | Self::Open { peer, .. }
            | Self::Ending { peer, .. } => Some(*peer),
        }
    }
}

struct Connection {
    stream: Arc<OwnedFd>,
    process: Option<OwnedFd>,
    phase: Phase,
}

pub(super) struct Watcher {
    shared: Arc<Shared>,
    responder: Arc<dyn Responder>,
    secret: Option<Secret>,
    listener: OwnedFd,
    connect_timeout: Duration,
    connections: Slab<Connection>,
    connect_states: Vec<ConnectState>,
    /// Peers to which nothing can be sent before that time, though their streams have room.
    paused: Vec<(Rank, Nanos)>,
    /// A pause of accepts, when this process may open no more files.
    rest: AcceptPause,
    buffer: Vec<u8>,
}

impl Watcher {
    pub(super) fn new(shared: Arc<Shared>, config: &DeviceConfig, listener: OwnedFd) -> io::Result<Self> {
        for (file, token) in [(listener.as_fd(), LISTENER), (shared.commands.wake().as_fd(), WAKE)] {
            epoll::add(&*shared.epoll, file, epoll::EventData::new_u64(token), epoll::EventFlags::IN)?;
        }
        Ok(Self {
            responder: config.responder.clone(),
            secret: config.secret.clone(),
            listener,
            connect_timeout: config.connect_timeout,
            connections: Slab::default(),
            connect_states: (0..config.world_size).map(|_| ConnectState::NotRequested).collect(),
            paused: Vec::new(),
            rest: AcceptPause::default(),
            buffer: vec![0; FRAME_BYTES_MAX],
            shared,
        })
    }

    /// Runs until the device is dropped.
    pub(super) fn run(mut self) {
        let mut events = Vec::with_capacity(EVENTS_AT_ONCE);
        loop {
            for command in self.shared.commands.take() {
                match command {
                    Command::Connect { peer, dial } => self.connect(peer, dial),
                    Command::Cut { peer } => {
                        self.connect_states[peer as usize] = ConnectState::Settled;
                        self.close_all_of(peer);
                    }
                    Command::Stop => return,
                }
            }
            let limit = self.expire(clock::now()).map(|limit| Timespec {
                tv_sec: limit.as_secs() as i64,
                tv_nsec: i64::from(limit.subsec_nanos()),
            });
            events.clear();
            let waited =
                epoll::wait(&*self.shared.epoll, rustix::buffer::spare_capacity(&mut events), limit.as_ref());
            // Interrupted: poll again.
            if waited.is_err() {
                continue;
            }
            for event in &events {
                self.event(event.data.u64(), event.flags);
            }
        }
    }

    fn connect(&mut self, peer: Rank, dial: Option<String>) {
        let deadline = clock::now() + self.connect_timeout;
        match (&self.connect_states[peer as usize], dial) {
            (ConnectState::LostBeforeConnect(cause), _) => {
                let cause = cause.clone();
                self.lose(peer, cause);
            }
            (ConnectState::NotRequested, Some(name)) => {
                self.connect_states[peer as usize] =
                    ConnectState::Dial { name, again_at: Nanos::ZERO, deadline };
                self.dial(peer);
            }
            (ConnectState::NotRequested, None) => {
                self.connect_states[peer as usize] = ConnectState::Connection { deadline };
                let is_early = |connection: &Connection| matches!(&connection.phase, Phase::Parked { peer: early, .. } if *early == peer);
                if let Some(index) = self.connections.slots(is_early).first().copied() {
                    self.send_welcome(index);
                }
            }
            _ => {}
        }
    }

    fn dial(&mut self, peer: Rank) {
        let ConnectState::Dial { name, again_at, deadline } = &mut self.connect_states[peer as usize] else {
            return;
        };
        let deadline = *deadline;
        match packet::dial(name) {
            Ok(stream) => {
                self.connect_states[peer as usize] = ConnectState::Connection { deadline };
                self.send_hello(peer, stream);
            }
            Err(Errno::AGAIN) => *again_at = clock::now() + DIAL_AGAIN_AFTER,
            Err(errno) => self.lose(peer, LossCause::unconnected(&errno.into())),
        }
    }

    /// Handles expired timers; returns the time until the next.
    fn expire(&mut self, now: Nanos) -> Option<Duration> {
        let accepting = self.rest.end(&*self.shared.epoll, &self.listener, LISTENER, now);
        for peer in 0..self.connect_states.len() as Rank {
            match &self.connect_states[peer as usize] {
                ConnectState::Dial { deadline, .. } | ConnectState::Connection { deadline }
                    if *deadline <= now =>
                {
                    self.lose(peer, LossCause::NotReached(self.connect_timeout));
                }
                ConnectState::Dial { again_at, .. } if *again_at <= now => self.dial(peer),
                _ => {}
            }
        }
        for index in self.connections.slots(|_| true) {
            match self.phase(index) {
                Some(Phase::Unauthenticated { deadline }) if *deadline <= now => self.close(index),
                Some(Phase::Ending { peer, cause, deadline }) if *deadline <= now => {
                    let (peer, cause) = (*peer, cause.clone());
                    self.lose(peer, cause);
                }
                _ => {}
            }
        }
        self.paused.retain(|&(peer, until)| {
            let is_over = until <= now;
            if is_over {
                // If it fails again, room in the stream is asked for again, and the next pause
                // follows.
                self.shared.directory().flush(peer);
            }
            !is_over
        });
        let rests = self.paused.iter().map(|&(_, until)| until);
        let connect_states = self.connect_states.iter().filter_map(|want| match want {
            ConnectState::Dial { again_at, deadline, .. } => Some(*again_at.min(deadline)),
            ConnectState::Connection { deadline } => Some(*deadline),
            _ => None,
        });
        let phases = self.connections.iter().filter_map(|(_, connection)| match &connection.phase {
            Phase::Unauthenticated { deadline } | Phase::Ending { deadline, .. } => Some(*deadline),
            _ => None,
        });
        connect_states.chain(phases).chain(rests).chain(accepting).min().map(|next| next.since(now))
    }

    fn event(&mut self, token: u64, flags: epoll::EventFlags) {
        match token {
            LISTENER => self.accept(),
            WAKE => {
                self.shared.commands.wake().drain();
            }
            _ => {
                // An earlier event of the same batch may have ended the connection.
                let Some(index) = self.connections.find(token) else { return };
                let is_process = token & SECOND_DESCRIPTOR != 0;
                if is_process {
                    self.process_ended(index);
                } else {
                    self.stream_ready(index, flags);
                }
            }
        }
    }

    fn accept(&mut self) {
        for _ in 0..PACKETS_AT_ONCE {
            match packet::accept(&self.listener) {
                Ok(stream) => {
                    let is_unauthenticated =
                        |connection: &Connection| matches!(connection.phase, Phase::Unauthenticated { .. });
                    let unauthenticated = self.connections.slots(is_unauthenticated).len();
                    if unauthenticated < UNAUTHENTICATED_MAX && packet::is_same_user(&stream) {
                        let deadline = clock::now() + self.connect_timeout;
                        self.add(stream, Phase::Unauthenticated { deadline });
                    }
                }
                Err(Errno::AGAIN) => return,
                Err(Errno::INTR | Errno::CONNABORTED) => {}
                Err(errno) => {
                    // Out of descriptors or memory.
                    self.rest.begin(&*self.shared.epoll, &self.listener, clock::now());
                    return self.cannot_accept(&errno.into());
                }
            }
        }
    }

    /// Gives up the peers whose connections have no room; they would wait until their deadline.
    fn cannot_accept(&mut self, error: &io::Error) {
        if files_allowed(error).is_none() {
            return;
        }
        for peer in 0..self.connect_states.len() as Rank {
            if matches!(self.connect_states[peer as usize], ConnectState::Connection { .. }) {
                self.lose(peer, LossCause::unconnected(error));
            }
        }
    }

    fn stream_ready(&mut self, index: usize, flags: epoll::EventFlags) {
        if flags.contains(epoll::EventFlags::OUT)
            && let Some(Phase::Open { peer, .. }) = self.phase(index)
        {
            let peer = *peer;
            let mut directory = self.shared.directory();
            if directory.flush(peer) == FlushResult::SystemFull {
                directory.pause(peer);
                self.paused.push((peer, clock::now() + SYSTEM_FULL_PAUSE));
            }
        }
        self.read(index, PACKETS_AT_ONCE);
    }

    /// Takes up to `packets_max` packets from a stream.
    fn read(&mut self, index: usize, packets_max: usize) {
        for _ in 0..packets_max {
            let Some(connection) = self.connections.value(index) else { return };
            if matches!(connection.phase, Phase::Ending { .. }) {
                return;
            }
            let stream = connection.stream.clone();
            match packet::receive(&stream, &mut self.buffer) {
                // The other end closed before it had read everything; what it had sent before comes
                // next.
                Err(ReceiveError::System(Errno::INTR | Errno::CONNRESET)) => {}
                Err(ReceiveError::System(Errno::AGAIN)) => return,
                Err(ReceiveError::System(errno)) => {
                    return self.stream_ended(index, LossCause::ConnectionBroke(errno.kind()));
                }
                Err(ReceiveError::Violation(violation)) => return self.fail(index, violation.into()),
                Ok(Packet { bytes: 0, .. }) => return self.stream_ended(index, LossCause::ConnectionClosed),
                Ok(packet) => {
                    // Moved out and back, so that the frame may borrow it while the watcher
                    // changes.
                    let buffer = std::mem::take(&mut self.buffer);
                    let bytes = packet.bytes.min(buffer.len());
                    if let Err(cause) = self.packet(index, &buffer[..bytes], packet) {
                        self.fail(index, cause);
                    }
                    self.buffer = buffer;
                }
            }
        }
    }

    fn process_ended(&mut self, index: usize) {
        if let Some(Phase::Ending { peer, .. }) = self.phase(index) {
            let peer = *peer;
            return self.lose(peer, LossCause::ProcessEnded);
        }
        // The last packet before its end may be a bye.
        self.read(index, PACKETS_LEFT_MAX);
        if self.connections.value(index).is_some() {
            self.fail(index, LossCause::ProcessEnded);
        }
    }

    fn stream_ended(&mut self, index: usize, cause: LossCause) {
        let Some(connection) = self.connections.value_mut(index) else { return };
        if let (Phase::Open { peer, has_sent_bye: false }, Some(_)) = (&connection.phase, &connection.process)
        {
            let deadline = clock::now() + PROCESS_END_LIMIT;
            connection.phase = Phase::Ending { peer: *peer, cause, deadline };
            let _ = epoll::delete(&*self.shared.epoll, &*connection.stream);
        } else {
            self.fail(index, cause);
        }
    }

    /// A connection ended without a bye, unless a bye came before.
    fn fail(&mut self, index: usize, cause: LossCause) {
        match self.phase(index) {
            None | Some(Phase::Unauthenticated { .. }) => self.close(index),
            Some(&Phase::Open { peer, has_sent_bye: true }) => {
                self.close(index);
                self.shared.directory().close(peer);
            }
            Some(Phase::Parked { peer, .. }) => {
                let peer = *peer as usize;
                self.close(index);
                if matches!(self.connect_states[peer], ConnectState::NotRequested) {
                    self.connect_states[peer] = ConnectState::LostBeforeConnect(cause);
                }
            }
            Some(phase) => {
                if let Some(peer) = phase.peer() {
                    self.lose(peer, cause);
                }
            }
        }
    }

    /// Marks a peer lost: closes its connections, tells the responder, then the poller.
    fn lose(&mut self, peer: Rank, cause: LossCause) {
        self.connect_states[peer as usize] = ConnectState::Settled;
        self.close_all_of(peer);
        let is_cut = {
            let mut directory = self.shared.directory();
            directory.close(peer);
            directory.is_cut(peer)
        };
        if !is_cut {
            tracing::debug!(rank = self.shared.rank, peer, %cause, "peer lost");
            self.responder.lost(peer, &cause);
            self.shared.peer_status().status_of(peer).end = Some(ConnectionEnd::Lost(cause));
            self.shared.publish();
        }
    }

    fn phase(&self, index: usize) -> Option<&Phase> {
        self.connections.value(index).map(|connection| &connection.phase)
    }

    /// A new connection; its index, if it can be watched.
    fn add(&mut self, stream: OwnedFd, phase: Phase) -> Option<usize> {
        let stream = Arc::new(stream);
        let index = self.connections.insert(Connection { stream: Arc::clone(&stream), process: None, phase });
        let data = epoll::EventData::new_u64(self.connections.token(index));
        if epoll::add(&*self.shared.epoll, &*stream, data, epoll::EventFlags::IN).is_err() {
            self.connections.remove(index);
            return None;
        }
        Some(index)
    }

    /// Ends all connections of a peer.
    fn close_all_of(&mut self, peer: Rank) {
        for index in self.connections.slots(|connection| connection.phase.peer() == Some(peer)) {
            self.close(index);
        }
    }

    /// Ends a connection here and, also where a forked child holds its socket, at the other end.
    fn close(&mut self, index: usize) {
        if let Some(connection) = self.connections.remove(index) {
            let _ = epoll::delete(&*self.shared.epoll, &*connection.stream);
            if let Some(process) = &connection.process {
                let _ = epoll::delete(&*self.shared.epoll, process);
            }
            let _ = rustix::net::shutdown(&*connection.stream, rustix::net::Shutdown::Both);
        }
    }
}

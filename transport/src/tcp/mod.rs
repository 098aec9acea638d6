//! `tcp`: the device contract over sockets, anywhere.
//!
//! Each pair has a control stream of the [control plane](crate::control), which is read also while
//! nobody polls, and [`CONNECTIONS`] data connections in each direction, which `poll` itself writes
//! and reads. Frames ([`frame`]) name region, offset and signal. Data are sent straight out of
//! registered memory and received straight into it. The target itself raises the signal of a put,
//! when it has received all bytes of the put (`put_arrived` in `pair.rs`).
//!
//! * A connection carries data in one direction only. So closing after a bye never destroys bytes
//!   that the peer has not read, and the two directions do not share a connection.
//! * Transfers of [`SPLIT_BYTES_MIN`] and more travel in pieces on all connections. Connection 0
//!   announces the pieces on the others, which are not read otherwise: an idle poll costs one call
//!   a peer.
//! * `Done` of a put means that the socket has taken it. The owner of a region answers the first
//!   put to it, so that a bad key is an error of its transfer. Later puts need no answer until the
//!   owner revokes the key. If a put crosses with the revocation, the target drops the put and
//!   refuses it; this rank logs the refusal.
//!
//! **Draining** marks every connection ([`Frame::DrainMark`](frame::Frame::DrainMark)) behind what
//! was submitted. When all marks have come the peer answers on every connection, behind its answers
//! to all from before. So the marks prove that puts have landed, the answers that this rank's
//! transfers have ended, and sending the answers that the peer's gets read nothing here any more.
//! `pair.rs` counts all three on each connection.
//!
//! **Invariant:** memory is written only by the polling thread, for an open pair, inside a region
//! of which the thread holds a handle. So dropping a pair's connections is the fence (contract line
//! 9).

mod connection;
pub mod frame;
#[allow(unsafe_code)]
mod memory;
mod pair;
mod regions;

use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use rustix::event::epoll;

use self::pair::{EventQueue, Outcome, Pair, PairState};
use self::regions::{Regions, Revoked};
use crate::Rank;
use crate::clock::Nanos;
use crate::control::{
    Control, ControlEvent, ControlEventQueue, KnownProcesses, Network, OpenedPair, PairKind, ReleasedRegions,
    Streams, socket,
};
pub use crate::control::{OpenError, interface_addresses};
use crate::device::{
    Address, Armed, ConnectError, Device, DeviceConfig, DeviceInfo, Event, Flush, Holder, Incarnation,
    LossCause, MapError, Meeting, PostError, Reach, RegisterError, SetupCounts, SubmitError, Submitted,
    Transfer, TransferError, TransferId, Urgency, WakeSource, awaits_end, check_only,
};
use crate::memory::{Memory, Space};
use crate::region::{Mapped, ReadOnlyMapped, Region, Registry, RemoteSlice, random_key};
use crate::signals::{Signal, Signals};

/// Decodes bytes with every decoder of this fabric: for fuzzing.
///
/// # Panics
///
/// When a decoded value does not survive encoding and decoding.
#[doc(hidden)]
pub fn check_decoders(bytes: &[u8]) {
    crate::control::check_decoders(bytes);
}

/// Data connections of a pair in each direction.
pub const CONNECTIONS: usize = 2;

/// Transfers of at least this many bytes travel on all connections.
pub const SPLIT_BYTES_MIN: usize = 1 << 20;

/// Transfers under way to one peer.
pub const QUEUE_DEPTH: usize = 1024;

/// Events that wait to be polled before submits are refused.
const EVENTS_MAX: usize = 4 * QUEUE_DEPTH;

const FABRIC: &str = "tcp";

/// Epoll data of the wake source; all other data are peers.
const WAKE_SOURCE: u64 = u64::MAX;

/// One rank's end of the tcp fabric.
pub struct TcpDevice {
    // The data connections close before the control streams, so that peers read all that was sent.
    peers: Vec<Peer>,
    control: Control<ControlEventQueue<Revoked>>,
    info: DeviceInfo,
    epoll: Arc<OwnedFd>,
    signal_slots: Vec<OnceLock<Signals>>,
    /// The process that has each rank, or had it last.
    incarnations: Vec<Option<Incarnation>>,
    regions: Regions,
    releases: Arc<ReleasedRegions>,
    registry: Arc<dyn Registry>,
    /// Peers whose connections are read.
    open: Vec<Rank>,
    /// Peers with frames to send.
    sending: Vec<Rank>,
    event_queue: EventQueue,
    /// The last poll left work that wakes nobody.
    unfinished: bool,
    is_leaving: bool,
    now: Nanos,
}

enum Peer {
    Idle,
    Connecting,
    Open(Box<OpenPeer>),
    Lost(LossCause),
    Severed,
}

struct OpenPeer {
    pair: Pair,
    /// The peer's bye has come: nothing more is received from it, but it may still get this rank's
    /// bye.
    departed: bool,
    /// A connection broke; the peer's bye may still come until this time.
    suspect: Option<(Nanos, LossCause)>,
    /// Nothing more can come, because a connection from the peer broke. When a connection to the
    /// peer broke, data that the peer sent before can still come.
    is_silent: bool,
    /// Whether it is among those to send to.
    is_listed: bool,
}

impl TcpDevice {
    /// Listens, on loopback or at the configured interface, and starts the watcher. A secret is
    /// required also on loopback, because every user of the host can connect there;
    /// [`Secret::fresh`](crate::Secret::fresh) suffices for it.
    ///
    /// # Errors
    ///
    /// See [`OpenError`].
    pub fn new(config: DeviceConfig) -> Result<Self, OpenError> {
        let known = KnownProcesses::fresh(config.world_size);
        Self::of_process(config, known)
    }

    /// As [`TcpDevice::new`], for a device that is one with others.
    pub(crate) fn of_process(config: DeviceConfig, known: KnownProcesses) -> Result<Self, OpenError> {
        let (world_size, incarnation) = (config.world_size, known.own());
        let network = Network::Tcp { data_connections: CONNECTIONS as u8 };
        let control = Control::new(config, known, FABRIC, network, ControlEventQueue::new()?)?;
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)
            .and_then(|epoll| {
                let data = epoll::EventData::new_u64(WAKE_SOURCE);
                epoll::add(&epoll, control.wake_source(), data, epoll::EventFlags::IN).map(|()| epoll)
            })
            .map_err(|error| OpenError::System { resource: "epoll descriptor", source: error.into() })?;
        let releases = Arc::new(control.releases());
        let reach = Reach { fabric: FABRIC, maps: false, passive: false, queue_depth: QUEUE_DEPTH };
        let info = DeviceInfo {
            rank: control.rank(),
            incarnation,
            address: control.address().clone(),
            fabric: FABRIC,
            registers_freely: true,
            signal_slots: control.signal_slots(),
            transfer_bytes_max: frame::TRANSFER_BYTES_MAX,
            reach: vec![reach; world_size as usize],
            waker: Arc::clone(control.handler()) as _,
            setup: Arc::default(),
        };
        Ok(Self {
            peers: (0..world_size).map(|_| Peer::Idle).collect(),
            info,
            control,
            epoll: Arc::new(epoll),
            signal_slots: (0..world_size).map(|_| OnceLock::new()).collect(),
            incarnations: vec![None; world_size as usize],
            regions: Regions::default(),
            registry: Arc::clone(&releases) as Arc<dyn Registry>,
            releases,
            open: Vec::new(),
            sending: Vec::new(),
            event_queue: EventQueue::with_capacity(64),
            unfinished: false,
            is_leaving: false,
            now: Nanos::ZERO,
        })
    }

    /// The registry of this device's regions.
    pub(crate) fn registry(&self) -> Arc<dyn Registry> {
        Arc::clone(&self.registry)
    }

    /// Sets the registry of later regions; the caller's registry must inform the previous one.
    pub(crate) fn replace_registry(&mut self, registry: Arc<dyn Registry>) {
        self.registry = registry;
    }

    /// The streams of its control plane.
    pub(crate) fn streams(&self) -> Streams {
        self.control.streams()
    }

    /// Counts set-up work together with the other device of a hybrid device.
    pub(crate) fn count_in(&mut self, setup: &Arc<SetupCounts>) {
        self.info.setup = Arc::clone(setup);
    }

    /// Makes a region of the shared registry reachable by its key, for one peer or for all.
    pub(crate) fn adopt(&mut self, region: &Region, only: Option<Rank>) {
        debug_assert!(region.belongs_to(&self.registry), "released regions are told to the shared registry");
        self.regions.insert(region, only);
    }

    /// Registers memory, for one peer or for all.
    fn register_only(
        &mut self,
        memory: Arc<dyn Memory>,
        only: Option<Rank>,
    ) -> Result<Region, RegisterError> {
        check_only(only, self.info.rank, self.control.world_size())?;
        match memory.space() {
            Space::Host => {}
            space => return Err(RegisterError::Space { fabric: FABRIC, space }),
        }
        let region = Region::new(memory, random_key(), Arc::clone(&self.registry));
        self.regions.insert(&region, only);
        self.info.setup.count_registered();
        Ok(region)
    }

    /// The descriptor that `arm` returns, always the same.
    pub(crate) fn wake_file(&self) -> &OwnedFd {
        &self.epoll
    }

    /// As [`Device::post`](crate::device::Device::post).
    fn post_message(&mut self, peer: Rank, message: &[u8], is_urgent: bool) -> Result<(), PostError> {
        match self.peers.get(peer as usize) {
            Some(Peer::Open(open)) if !open.departed => {}
            _ => return Err(PostError::NotConnected { peer }),
        }
        // A peer that has this message must know all earlier releases.
        if self.releases.has_any() {
            self.release_regions();
        }
        self.control.post(peer, message, is_urgent)
    }

    fn check(&self, peer: Rank, transfer: &Transfer) -> Result<(), SubmitError> {
        transfer.check(&self.registry, self.info.transfer_bytes_max)?;
        self.expect_room(peer)
    }

    /// Whether the event queue has room for the events of one more transfer.
    fn expect_room(&self, peer: Rank) -> Result<(), SubmitError> {
        if self.event_queue.len() >= EVENTS_MAX {
            return Err(SubmitError::QueueFull { peer });
        }
        Ok(())
    }

    fn list_sending(&mut self, peer: Rank) {
        if let Peer::Open(open) = &mut self.peers[peer as usize]
            && !open.is_listed
            && open.suspect.is_none()
            && open.pair.state().has_output()
        {
            open.is_listed = true;
            self.sending.push(peer);
        }
    }

    fn take_events(&mut self) {
        for event in self.control.take_events() {
            match event {
                ControlEvent::Opened { peer, pair } => self.opened(peer, pair),
                ControlEvent::Message { peer, message: Revoked(key) } => {
                    if let Peer::Open(open) = &mut self.peers[peer as usize] {
                        open.pair.state().revoked(key);
                    }
                }
                // Data may still be on their way; the last data frame is a bye too.
                ControlEvent::Departed { .. } => {}
                ControlEvent::Lost { peer, cause } => {
                    let error = TransferError::Lost { peer, cause: cause.clone() };
                    if !matches!(self.peers[peer as usize], Peer::Lost(_) | Peer::Severed) {
                        self.close(peer, Peer::Lost(cause.clone()), &error);
                        self.event_queue.push_back(Event::PeerLost { peer, cause });
                    }
                }
            }
        }
    }

    /// What is known of the process that has a rank, or had it last.
    pub(crate) fn holder(&self, peer: Rank) -> Holder {
        match self.peers.get(peer as usize) {
            None | Some(Peer::Idle) => Holder::Nobody,
            Some(Peer::Connecting) => Holder::Connecting,
            Some(Peer::Open(open)) if !open.departed => Holder::Connected,
            _ if awaits_end(self.event_queue.iter(), peer) => Holder::Ends,
            Some(Peer::Open(_) | Peer::Lost(_) | Peer::Severed) => Holder::Gone,
        }
    }

    /// Takes memory that is for this peer alone from all peers: another process gets its rank.
    pub(crate) fn orphan(&mut self, peer: Rank) {
        self.regions.orphan(peer);
    }

    /// Waits no more for a process that was to be connected: the one that comes is of this host.
    pub(crate) fn cancel(&mut self, peer: Rank) {
        if self.holder(peer) == Holder::Connecting {
            self.control.sever(peer);
            self.close(peer, Peer::Severed, &TransferError::Severed { peer });
        }
    }

    /// As [`Device::connect`], in either way.
    fn start_connecting(&mut self, peer: Rank, kind: PairKind<'_>) -> Result<(), ConnectError> {
        self.control.check(peer, kind)?;
        let is_again = self.holder(peer).is_succeeded(peer)?;
        self.control.connect(peer, kind, is_again)?;
        if is_again {
            self.close(peer, Peer::Idle, &TransferError::Departed { peer });
            self.signal_slots[peer as usize] = OnceLock::new();
            self.orphan(peer);
        }
        if let slot @ Peer::Idle = &mut self.peers[peer as usize] {
            *slot = Peer::Connecting;
        }
        Ok(())
    }

    fn opened(&mut self, peer: Rank, opened: OpenedPair) {
        if !matches!(self.peers[peer as usize], Peer::Connecting) {
            return;
        }
        self.incarnations[peer as usize] = Some(opened.incarnation);
        let mut pair = Pair::new(peer, self.signal_slots(peer), opened);
        if let Err(error) = pair.watch(&self.epoll, true, false) {
            self.control.lose_at_once(peer, socket::loss(&error.into()));
            return;
        }
        if self.is_leaving {
            pair.state().say_bye();
        }
        let open = OpenPeer { pair, departed: false, suspect: None, is_silent: false, is_listed: false };
        self.peers[peer as usize] = Peer::Open(Box::new(open));
        self.open.push(peer);
        self.list_sending(peer);
        self.info.setup.count_connected();
        self.event_queue.push_back(Event::Connected { peer });
    }

    /// Closes all connections of a pair and ends its transfers with `error`.
    fn close(&mut self, peer: Rank, then: Peer, error: &TransferError) {
        self.open.retain(|open| *open != peer);
        self.sending.retain(|sending| *sending != peer);
        if let Peer::Open(mut open) = std::mem::replace(&mut self.peers[peer as usize], then) {
            open.pair.close(&self.epoll);
            open.pair.state().fail_all(error, false, &mut self.event_queue);
        }
    }

    fn departed(&mut self, peer: Rank) {
        self.open.retain(|open| *open != peer);
        let slot = std::mem::replace(&mut self.peers[peer as usize], Peer::Idle);
        let Peer::Open(mut open) = slot else { return };
        open.pair.close_incoming(&self.epoll);
        open.departed = true;
        open.suspect = None;
        open.pair.state().peer_departed(&mut self.event_queue);
        self.peers[peer as usize] = Peer::Open(open);
        self.event_queue.push_back(Event::Departed { peer });
    }

    /// Removes released regions and tells the peers that rely on them.
    fn release_regions(&mut self) {
        for key in self.releases.take() {
            for peer in self.regions.remove(key) {
                // A peer that does not read is found out by other means.
                self.control.send_message(peer, &Revoked(key).encode());
            }
        }
    }

    fn deliver(&mut self, events: &mut Vec<Event>) {
        let room = events.capacity() - events.len();
        let count = room.min(self.event_queue.len());
        events.extend(self.event_queue.drain(..count));
    }
}

// SAFETY: the conformance suite tests each line of the contract.
#[allow(unsafe_code)]
unsafe impl Device for TcpDevice {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn register(&mut self, memory: Arc<dyn Memory>) -> Result<Region, RegisterError> {
        self.register_only(memory, None)
    }

    fn register_for(&mut self, peer: Rank, memory: Arc<dyn Memory>) -> Result<Region, RegisterError> {
        self.register_only(memory, Some(peer))
    }

    fn map(&mut self, _peer: Rank, _slice: &RemoteSlice) -> Result<Mapped, MapError> {
        Err(MapError::Unsupported { fabric: FABRIC })
    }

    fn map_read_only(&mut self, _peer: Rank, _slice: &RemoteSlice) -> Result<ReadOnlyMapped, MapError> {
        Err(MapError::Unsupported { fabric: FABRIC })
    }

    fn connect(&mut self, peer: Rank, address: &Address) -> Result<(), ConnectError> {
        self.start_connecting(peer, PairKind::InWorld(address))
    }

    fn meet(&mut self, peer: Rank, meeting: Meeting<'_>) -> Result<(), ConnectError> {
        self.start_connecting(peer, PairKind::BetweenWorlds(meeting))
    }

    fn incarnation(&self, peer: Rank) -> Option<Incarnation> {
        self.incarnations.get(peer as usize).copied().flatten()
    }

    fn sever(&mut self, peer: Rank) {
        self.control.sever(peer);
        self.close(peer, Peer::Severed, &TransferError::Severed { peer });
        self.event_queue.push_back(Event::Severed { peer });
    }

    fn submit(&mut self, peer: Rank, transfer: Transfer, id: TransferId) -> Result<Submitted, SubmitError> {
        self.expect_open(peer)?;
        self.check(peer, &transfer)?;
        self.queue(peer, |state| state.submit(transfer, id))
    }

    fn signal(&mut self, peer: Rank, signal: &Signal, id: TransferId) -> Result<Submitted, SubmitError> {
        self.expect_open(peer)?;
        self.expect_room(peer)?;
        self.queue(peer, |state| state.signal(signal, id))
    }

    fn drain(&mut self, peer: Rank) -> Result<(), SubmitError> {
        self.expect_open(peer)?;
        self.queue(peer, PairState::drain).map(drop)
    }

    fn signal_slots(&self, peer: Rank) -> Signals {
        self.signal_slots[peer as usize].get_or_init(|| Signals::new(self.info.signal_slots)).clone()
    }

    fn post(&mut self, peer: Rank, message: &[u8], urgency: Urgency) -> Result<(), PostError> {
        self.post_message(peer, message, urgency == Urgency::Urgent)
    }

    fn poll(&mut self, now: Nanos, events: &mut Vec<Event>) {
        self.now = now;
        self.unfinished = false;
        if self.control.wake_source().is_set() {
            self.control.wake_source().drain();
        }
        if self.control.has_events() {
            self.take_events();
        }
        if self.releases.has_any() {
            self.release_regions();
        }
        if !self.sending.is_empty() {
            self.flush_connections();
        }
        self.receive();
        // Answers, and frames that had to wait for a frame of the peer.
        if !self.sending.is_empty() {
            self.flush_connections();
        }
        self.expire_suspects();
        if self.control.has_events() {
            self.take_events();
        }
        self.deliver(events);
    }

    fn arm(&mut self) -> Option<Armed> {
        let is_woken = self.control.wake_source().drain();
        let sendable = self.sending.iter().any(|peer| match &self.peers[*peer as usize] {
            Peer::Open(open) => open.pair.is_ready_to_send(),
            _ => false,
        });
        if is_woken
            || sendable
            || self.unfinished
            || self.control.has_events()
            || !self.event_queue.is_empty()
        {
            return None;
        }
        for state in &mut self.peers {
            if let Peer::Open(open) = state
                && open.pair.watch(&self.epoll, !open.is_silent, open.suspect.is_none()).is_err()
            {
                return None;
            }
        }
        let suspects = self.open.iter().filter_map(|peer| match &self.peers[*peer as usize] {
            Peer::Open(open) => open.suspect.as_ref().map(|(until, _)| *until),
            _ => None,
        });
        Some(Armed { wake_source: WakeSource::File(Arc::clone(&self.epoll)), until: suspects.min() })
    }

    fn leave(&mut self) {
        self.is_leaving = true;
        for peer in 0..self.control.world_size() {
            if let Peer::Open(open) = &mut self.peers[peer as usize] {
                open.pair.state().say_bye();
                self.list_sending(peer);
            }
        }
        self.flush_connections();
    }

    fn flush(&mut self, scope: Flush) -> bool {
        if !self.sending.is_empty() {
            self.flush_connections();
        }
        (0..).zip(&self.peers).all(|(rank, peer)| match peer {
            Peer::Open(open) => {
                let is_sent = open.suspect.is_none() && open.pair.is_flushed();
                is_sent && (scope == Flush::Transfers || !self.control.has_output(rank))
            }
            _ => true,
        })
    }
}

impl TcpDevice {
    /// Whether transfers to a peer are accepted.
    fn expect_open(&mut self, peer: Rank) -> Result<(), SubmitError> {
        if self.control.has_events() {
            // The owner of a key may have revoked it.
            self.take_events();
        }
        match self.peers.get(peer as usize) {
            Some(Peer::Open(open)) if open.departed || self.is_leaving => Err(SubmitError::Departed { peer }),
            Some(Peer::Open(_)) => Ok(()),
            None | Some(Peer::Idle | Peer::Connecting) => Err(SubmitError::NotConnected { peer }),
            Some(Peer::Lost(cause)) => Err(SubmitError::Lost { peer, kind: cause.kind() }),
            Some(Peer::Severed) => Err(SubmitError::Severed { peer }),
        }
    }

    /// Queues a frame for an open peer, and lists the peer among those to send to.
    fn queue(
        &mut self,
        peer: Rank,
        queue: impl FnOnce(&mut PairState) -> Result<(), SubmitError>,
    ) -> Result<Submitted, SubmitError> {
        if let Peer::Open(open) = &mut self.peers[peer as usize] {
            queue(open.pair.state())?;
            if !open.is_listed && open.suspect.is_none() {
                open.is_listed = true;
                self.sending.push(peer);
            }
        }
        Ok(Submitted::UnderWay)
    }
}

/// Up to this number of open peers a poll reads all their sockets; with more peers epoll first
/// tells which sockets are ready.
const DIRECT_PEERS_MAX: usize = 4;

/// Peers that one poll serves at most when epoll tells which are ready; the next poll serves the
/// others.
const READY_MAX: usize = 64;

/// How long a poll waits for the bye of a peer whose connection broke, from the last bytes on.
const BYE_GRACE: Duration = Duration::from_millis(500);

impl TcpDevice {
    /// Sends what the sockets take.
    fn flush_connections(&mut self) {
        let mut sending = std::mem::take(&mut self.sending);
        sending.retain(|peer| {
            let Peer::Open(open) = &mut self.peers[*peer as usize] else { return false };
            let state = open.pair.state();
            let had_said_bye = state.has_said_bye();
            match state.flush(&mut self.event_queue) {
                Ok(()) => {}
                Err(_) if open.departed => state.give_up(&mut self.event_queue),
                Err(cause) => {
                    open.suspect.get_or_insert((self.now + BYE_GRACE, cause));
                    open.is_listed = false;
                    return false;
                }
            }
            state.queue_bye();
            if !had_said_bye && state.has_said_bye() {
                self.control.send_bye(*peer);
            }
            open.is_listed = state.has_output();
            open.is_listed
        });
        // The list had no other additions meanwhile.
        self.sending = sending;
    }

    fn receive_from(&mut self, peer: Rank) {
        let Peer::Open(open) = &mut self.peers[peer as usize] else { return };
        if open.departed || open.is_silent {
            return;
        }
        let outcome = open.pair.receive(&mut self.regions, &mut self.event_queue);
        if let Some((until, _)) = &mut open.suspect
            && open.pair.has_received()
        {
            *until = self.now + BYE_GRACE;
        }
        open.pair.state().queue_bye();
        match outcome {
            Ok(Outcome::Idle) => self.list_sending(peer),
            Ok(Outcome::More) => {
                self.unfinished = true;
                self.list_sending(peer);
            }
            Ok(Outcome::Left) => {
                self.departed(peer);
                self.list_sending(peer);
            }
            Err(cause @ LossCause::Protocol(_)) => self.control.lose_at_once(peer, cause),
            // The peer's last message is on the control stream, which the watcher reads; a
            // connection may end before that.
            Err(cause) => {
                open.is_silent = true;
                open.suspect.get_or_insert((self.now + BYE_GRACE, cause));
            }
        }
    }

    fn receive(&mut self) {
        if self.open.len() <= DIRECT_PEERS_MAX {
            // By index, because a departing peer leaves the list. A peer that is skipped by that is
            // served by the next poll.
            let mut at = 0;
            while let Some(peer) = self.open.get(at).copied() {
                self.receive_from(peer);
                at += 1;
            }
            return;
        }
        // Announced data are under way already: no need to ask.
        let mut at = 0;
        while let Some(peer) = self.open.get(at).copied() {
            if let Peer::Open(open) = &self.peers[peer as usize]
                && open.pair.expects_more()
            {
                self.receive_from(peer);
            }
            at += 1;
        }
        let mut space = [const { MaybeUninit::uninit() }; READY_MAX];
        let at_once = rustix::time::Timespec { tv_sec: 0, tv_nsec: 0 };
        // After an interruption no peer is known to be ready, and the next poll asks again.
        let Ok((ready, _)) = epoll::wait(&self.epoll, &mut space, Some(&at_once)) else { return };
        self.unfinished |= ready.len() == READY_MAX;
        for event in ready {
            let token = event.data.u64();
            if token < u64::from(self.control.world_size()) {
                self.receive_from(token as Rank);
            }
        }
    }

    fn expire_suspects(&mut self) {
        for at in 0..self.open.len() {
            let peer = self.open[at];
            if let Peer::Open(open) = &mut self.peers[peer as usize]
                && let Some((until, cause)) = &mut open.suspect
                && self.now >= *until
            {
                // This process may have been stopped all that time, and its watcher too.
                *until = Nanos::MAX;
                self.control.lose(peer, cause.clone());
            }
        }
    }
}

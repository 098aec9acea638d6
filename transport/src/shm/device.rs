//! The device: the part that runs on its owner's thread. Its side of the contract is in
//! [`contract`].
//!
//! **Invariant:** a transfer under way is in exactly one of `large`, `waiting`, `copies` and
//! `events` until its `Done` is returned; none of them has a trace of a transfer that submit
//! reported as ended.

mod contract;

use std::collections::VecDeque;
use std::io;
use std::ptr::NonNull;
use std::sync::atomic::{Ordering, fence};
use std::sync::{Arc, Weak};
use std::time::Duration;

use rustix::io::Errno;

use super::copies::{GpuCopies, gpu_failed};
use super::fence::{Fence, REFUSAL_LIMIT};
use super::link::{PeerMemory, PeerRegion, SIGNAL_SLOTS_MAX, WakePage, slot_of};
use super::message::RegionMessage;
use super::page_detachment;
use super::peer_status::{ConnectionEnd, SlotState};
use super::shared::{Shared, wake_sleepers};
use super::transfer::{
    HostCopy, LargeCopy, PIECE_BYTES, POLL_BYTES, TransferRequest, WaitingTransfer, apply_atomic, store,
};
use super::wake_word;
use crate::Rank;
use crate::clock::Nanos;
use crate::control::{self, Control, KnownProcesses, Network, PairKind, Streams};
use crate::device::{
    ConnectError, DeviceConfig, DeviceInfo, Event, Holder, LossCause, Reach, Source, SubmitError, Submitted,
    TransferError, TransferId, awaits_end,
};
use crate::drain::Drains;
use crate::last_resort;
use crate::processors;
use crate::region::{RegionKey, Registry, RemoteSlice, Sharing};
use crate::signals::Signal;

pub(super) const FABRIC: &str = "shm";

/// Most transfers under way to one peer.
const QUEUE_DEPTH: usize = 256;

/// Longest transfer, in bytes.
const TRANSFER_BYTES_MAX: u64 = 1 << 40;

/// Number of polls after which peers are woken that may have been about to sleep when they were
/// signalled.
const DUE_POLLS: u32 = 4;

/// How long the announcement of an existing region may be on its way.
const ANNOUNCEMENT_LIMIT: Duration = Duration::from_secs(10);

/// The reach of every peer.
const REACH: Reach = Reach { fabric: FABRIC, maps: true, passive: true, queue_depth: QUEUE_DEPTH };

/// Why the device was not made.
#[derive(pleach_derive::ErrorDebug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// A rank outside its world.
    #[error("rank {rank} is not in a world of {world_size}")]
    Rank {
        /// The rank.
        rank: Rank,
        /// The number of ranks.
        world_size: u32,
    },
    /// More signal slots than signals can address.
    #[error("{signal_slots} signal slots for each peer are more than 65536")]
    Signals {
        /// The number.
        signal_slots: usize,
    },
    /// The operating system refused a resource of every rank: shared memory, or a descriptor of its
    /// own process (Linux 5.3 or later).
    #[error("the system refused shared memory or a process descriptor (Linux 5.3 or later?)")]
    System(#[source] io::Error),
    /// The control plane was not made.
    #[error(transparent)]
    Control(#[from] control::OpenError),
}

/// One rank's end of shared memory. See [`crate::shm`].
pub struct ShmDevice {
    shared: Arc<Shared>,
    registry: Arc<dyn Registry>,
    wake_source: Arc<WakePage>,
    info: DeviceInfo,
    peers: Vec<Peer>,
    /// Peers that were signalled and may have been about to sleep. They are checked again after one
    /// fence.
    due: Vec<Rank>,
    /// Polls since the first of these signals.
    polls_due: u32,
    large: VecDeque<LargeCopy>,
    waiting: VecDeque<WaitingTransfer>,
    /// Copies by GPUs.
    copies: GpuCopies,
    fence: Fence,
    severing: Vec<Rank>,
    events: VecDeque<(Rank, Event)>,
    /// Peers whose drain marks wait for transfers of this rank to end.
    draining: Vec<Rank>,
    /// Whether the stream of one of these peers took no mark.
    has_unsent_marks: bool,
    /// Whether a peer is being severed or drained, or this rank leaves. It is one flag, so that a
    /// poll checks once.
    has_rare_work: bool,
    is_armed: bool,
    is_leaving: bool,
    control: Control<Shared>,
}

struct Peer {
    state: State,
    /// Transfers that were submitted and whose end was not reported to the caller.
    under_way: usize,
    /// The transfers under way that were too long, or too early, for submit to carry out.
    pending: usize,
    is_due: bool,
    has_sent_bye: bool,
    /// The regions that `map` has returned, each once.
    mapped: Vec<Weak<PeerRegion>>,
}

enum State {
    Unconnected,
    Connecting,
    Connected(Box<Connected>),
    Lost(LossCause),
    Departed,
    Severed,
}

impl State {
    /// Whether the peer may still exist and see how this rank ends.
    fn may_see_end(&self) -> bool {
        matches!(self, Self::Connected(_) | Self::Departed)
    }
}

struct Connected {
    link: PeerMemory,
    /// The counts of the peer's signal slots.
    counts: Vec<u64>,
    regions: Vec<SlotState>,
    /// The drains of the pair, with the stages [`OWN_MARK`] and [`PEER_MARK`].
    drains: Drains,
}

/// The data of a transfer that waited for the announcement of its region.
struct Waited {
    /// When the transfer is refused.
    deadline: Nanos,
    /// The number of drains of this rank before the transfer.
    drains_before: u64,
}

/// The stage of a drain: this rank's earlier transfers have ended, and the peer was told so.
const OWN_MARK: usize = 0;

/// The stage of a drain: the peer's earlier transfers have ended.
const PEER_MARK: usize = 1;

/// The location of a remote slice.
enum RemoteLocation<'a> {
    Mapped(NonNull<u8>, &'a Arc<PeerRegion>),
    /// The slice is on a GPU. The import of the region has the address.
    OnGpu(&'a Arc<PeerRegion>),
    /// The region exists, but is not announced yet.
    NotAnnounced,
    /// The region exists, but this process could not map it.
    Unmappable,
    Refused,
}

impl ShmDevice {
    /// A device that listens at a new address.
    ///
    /// # Errors
    ///
    /// See [`OpenError`].
    pub fn new(config: DeviceConfig) -> Result<Self, OpenError> {
        let known = KnownProcesses::fresh(config.world_size);
        Self::of_process(config, known)
    }

    /// The streams of the control plane.
    pub(crate) fn streams(&self) -> Streams {
        self.control.streams()
    }

    /// As [`ShmDevice::new`], for a device that forms one device together with others.
    pub(crate) fn of_process(config: DeviceConfig, known: KnownProcesses) -> Result<Self, OpenError> {
        let incarnation = known.own();
        let DeviceConfig { rank, world_size, signal_slots, .. } = config;
        if rank >= world_size {
            return Err(OpenError::Rank { rank, world_size });
        }
        if signal_slots > SIGNAL_SLOTS_MAX {
            return Err(OpenError::Signals { signal_slots });
        }
        let shared = Shared::new(&config).map_err(OpenError::System)?;
        let control = Control::new(config, known, FABRIC, Network::Unix, shared)?;
        let shared = control.handler().clone();
        shared.set_streams(control.streams());
        page_detachment::register_device(&shared);
        let info = DeviceInfo {
            rank,
            incarnation,
            address: control.address().clone(),
            fabric: FABRIC,
            registers_freely: false,
            signal_slots,
            transfer_bytes_max: TRANSFER_BYTES_MAX,
            reach: vec![REACH; world_size as usize],
            waker: shared.clone(),
            setup: Arc::default(),
        };
        Ok(Self {
            registry: shared.clone(),
            wake_source: shared.own.wake_source.clone(),
            shared,
            info,
            peers: (0..world_size).map(|_| Peer::new()).collect(),
            due: Vec::with_capacity(world_size as usize),
            polls_due: 0,
            large: VecDeque::new(),
            waiting: VecDeque::new(),
            copies: GpuCopies::default(),
            fence: Fence::default(),
            severing: Vec::new(),
            events: VecDeque::new(),
            draining: Vec::new(),
            has_unsent_marks: false,
            has_rare_work: false,
            is_armed: false,
            is_leaving: false,
            control,
        })
    }

    /// Limits the length of transfers to that of the other device of a hybrid device.
    pub(crate) fn limit_transfers(&mut self, bytes_max: u64) {
        self.info.transfer_bytes_max = self.info.transfer_bytes_max.min(bytes_max);
    }

    /// The registry of this device's regions.
    pub(crate) fn registry(&self) -> Arc<dyn Registry> {
        self.registry.clone()
    }

    /// Sets the registry of later regions; the caller's registry must inform the previous one.
    pub(crate) fn replace_registry(&mut self, registry: Arc<dyn Registry>) {
        self.registry = registry;
    }

    fn peer(&self, rank: Rank) -> Option<&Peer> {
        self.peers.get(rank as usize)
    }

    /// Raises a signal, and wakes the target if it has slept for long. [`Self::wake_due`] wakes a
    /// target that is just going to sleep.
    #[inline]
    fn raise_signal(&mut self, rank: Rank, signal: &Signal) {
        let peer = &mut self.peers[rank as usize];
        let State::Connected(connected) = &mut peer.state else { return };
        connected.signal(signal);
        let word = connected.link.wake_source.as_ref();
        if wake_word::must_wake(word) {
            wake_sleepers(word);
        }
        if !peer.is_due {
            peer.is_due = true;
            self.due.push(rank);
        }
    }

    /// Calls [`Self::wake_due`] after some polls. Before, the cache lines of the signals are on
    /// their way to their targets, and the fence would wait for them. This wait is in vain if the
    /// answer comes first.
    fn wake_due_sometime(&mut self) {
        if self.due.is_empty() {
            return;
        }
        self.polls_due += 1;
        if self.polls_due > DUE_POLLS {
            self.wake_due();
        }
    }

    /// Makes one fence for all signals since the last call, and wakes targets. After this no target
    /// sleeps in spite of a signal.
    #[inline]
    fn wake_due(&mut self) {
        if self.due.is_empty() {
            return;
        }
        self.polls_due = 0;
        // Partner: the fence in `wake_word::arm`.
        fence(Ordering::SeqCst);
        for rank in self.due.drain(..) {
            let peer = &mut self.peers[rank as usize];
            peer.is_due = false;
            if let State::Connected(connected) = &peer.state {
                let word = connected.link.wake_source.as_ref();
                if wake_word::must_wake(word) {
                    // The woken peer may have gone to sleep because this rank's processor seemed to
                    // be elsewhere.
                    self.shared.own.wake_source.publish_processor(processors::current());
                    wake_sleepers(word);
                }
            }
        }
    }

    fn done(&mut self, peer: Rank, id: TransferId, result: Result<u64, TransferError>) {
        self.events.push_back((peer, Event::Done { id, result }));
    }

    /// Carries out a request whose remote slice was checked, or queues the request for poll.
    fn start(
        &mut self,
        rank: Rank,
        request: TransferRequest,
        id: TransferId,
        waited: Option<&Waited>,
    ) -> Submitted {
        let State::Connected(connected) = &self.peers[rank as usize].state else {
            unreachable!("the caller looked, and what waits goes when the peer goes")
        };
        let (address, region) = match connected.locate(request.remote()) {
            RemoteLocation::OnGpu(region) => {
                let region = region.clone();
                let drains_before = connected.drains_before(waited);
                return self.start_on_gpu(rank, request, id, region, drains_before);
            }
            RemoteLocation::Mapped(_, region) if !region.is_writable() && request.writes() => {
                self.refuse(rank, request.remote().key, id);
                return Submitted::UnderWay;
            }
            RemoteLocation::Mapped(_, region) if self.copies.reaches(&request) => {
                let region = region.clone();
                let drains_before = connected.drains_before(waited);
                return self.start_on_gpu(rank, request, id, region, drains_before);
            }
            RemoteLocation::Mapped(address, region) => (address, region),
            // The region will not be announced to this rank.
            RemoteLocation::NotAnnounced if connected.is_for_others(request.remote().key) => {
                self.refuse(rank, request.remote().key, id);
                return Submitted::UnderWay;
            }
            RemoteLocation::NotAnnounced => {
                let drains_before = connected.drains_before(waited);
                let deadline = waited.map(|waited| waited.deadline);
                self.peers[rank as usize].pending += 1;
                self.waiting.push_back(WaitingTransfer { peer: rank, id, request, deadline, drains_before });
                return Submitted::UnderWay;
            }
            RemoteLocation::Refused | RemoteLocation::Unmappable => {
                self.refuse(rank, request.remote().key, id);
                return Submitted::UnderWay;
            }
        };
        if matches!(request, TransferRequest::Atomic { .. }) && !address.cast::<u64>().is_aligned() {
            // This happens only for a region that begins at an unaligned address, see `submit`.
            self.refuse(rank, request.remote().key, id);
            return Submitted::UnderWay;
        }
        let (len, key) = (request.len(), request.remote().key);
        let is_get = matches!(request, TransferRequest::Get { .. });
        let mut value = 0;
        let (copy, signal) = match request {
            TransferRequest::Atomic { op, .. } => {
                // SAFETY: `place` found all of the slice mapped; submit checked its length and
                // alignment.
                value = unsafe { apply_atomic(address, op) };
                (None, None)
            }
            TransferRequest::Put { src: Source::Inline(bytes), signal, .. } => {
                // SAFETY: `place` found all of the slice mapped, and submit checked that both ends
                // have the same length.
                unsafe { store(bytes.as_bytes(), address) };
                (None, signal)
            }
            TransferRequest::Put { src: Source::Slice(src), signal, .. } => {
                (Some(HostCopy::Put { src, dst: address, signal }), signal)
            }
            TransferRequest::Get { dst, .. } => (Some(HostCopy::Get { src: address, dst }), None),
        };
        if let Some(copy) = copy {
            if len > PIECE_BYTES {
                let region = region.clone();
                let drains_before = connected.drains_before(waited);
                self.peers[rank as usize].pending += 1;
                self.large.push_back(LargeCopy { peer: rank, id, copy, done: 0, region, drains_before });
                return Submitted::UnderWay;
            }
            // SAFETY: `place` found all of the slice mapped, and submit checked that both ends have
            // the same length.
            unsafe { copy.run(0, len) };
            if is_get && !region.is_shared() {
                self.refuse(rank, key, id);
                return Submitted::UnderWay;
            }
        }
        if let Some(signal) = signal {
            self.raise_signal(rank, &signal);
        }
        Submitted::Ended(value)
    }

    /// As `start`, for a request with an end on a GPU. The copy ends later.
    fn start_on_gpu(
        &mut self,
        peer: Rank,
        request: TransferRequest,
        id: TransferId,
        region: Arc<PeerRegion>,
        drains_before: u64,
    ) -> Submitted {
        let key = request.remote().key;
        match self.copies.begin(peer, request, id, region, drains_before) {
            Ok(true) => self.peers[peer as usize].pending += 1,
            Ok(false) => self.refuse(peer, key, id),
            Err(error) => self.done(peer, id, Err(TransferError::Fabric { peer, error: gpu_failed(error) })),
        }
        Submitted::UnderWay
    }

    /// Ends the copies that GPUs have finished.
    fn advance_copies(&mut self) {
        while let Some((copy, result)) = self.copies.next_ended() {
            let peer = copy.peer;
            let result = match (copy.failure, result) {
                (Some(failure), _) => Err(failure),
                (None, Err(error)) => Err(TransferError::Fabric { peer, error: gpu_failed(error) }),
                (None, Ok(())) => {
                    self.peers[peer as usize].pending -= 1;
                    if let Some(signal) = copy.signal {
                        self.raise_signal(peer, &signal);
                    }
                    Ok(0)
                }
            };
            self.done(peer, copy.id, result);
        }
    }

    fn refuse(&mut self, peer: Rank, key: RegionKey, id: TransferId) {
        self.done(peer, id, Err(TransferError::Refused { peer, key }));
    }

    /// Copies parts of large transfers, one transfer after the other.
    fn advance_large(&mut self) {
        let mut budget = POLL_BYTES;
        while budget > 0
            && let Some(mut large) = self.large.pop_front()
        {
            let rank = large.peer;
            let State::Connected(connected) = &self.peers[rank as usize].state else { continue };
            let key = large.region.key;
            if !connected.link.keys.holds(key) {
                self.peers[rank as usize].pending -= 1;
                self.refuse(rank, key, large.id);
                continue;
            }
            let bytes = PIECE_BYTES.min(large.copy.len() - large.done);
            // SAFETY: the range lies inside both ends, which were checked when the transfer was
            // started, and `region` is held.
            unsafe { large.copy.run(large.done, bytes) };
            large.done += bytes;
            budget = budget.saturating_sub(bytes);
            if large.done < large.copy.len() {
                self.large.push_back(large);
                continue;
            }
            if matches!(large.copy, HostCopy::Get { .. }) && !large.region.is_shared() {
                self.peers[rank as usize].pending -= 1;
                self.refuse(rank, key, large.id);
                continue;
            }
            if let HostCopy::Put { signal: Some(signal), .. } = large.copy {
                self.raise_signal(rank, &signal);
            }
            self.peers[rank as usize].pending -= 1;
            self.done(rank, large.id, Ok(0));
        }
    }

    /// Starts transfers whose region has been announced meanwhile.
    fn retry_waiting(&mut self, now: Nanos) {
        for _ in 0..self.waiting.len() {
            let Some(waiting) = self.waiting.pop_front() else { return };
            self.peers[waiting.peer as usize].pending -= 1;
            let deadline = waiting.deadline.unwrap_or(now + ANNOUNCEMENT_LIMIT);
            if deadline <= now {
                self.refuse(waiting.peer, waiting.request.remote().key, waiting.id);
                continue;
            }
            let waited = Waited { deadline, drains_before: waiting.drains_before };
            let started = self.start(waiting.peer, waiting.request, waiting.id, Some(&waited));
            if let Submitted::Ended(value) = started {
                self.done(waiting.peer, waiting.id, Ok(value));
            }
        }
    }

    /// Takes over the changes that the watcher has published.
    fn take_changes(&mut self) {
        // Acquire: pairs with the release in `publish`. The flag is cleared first, because a later
        // change sets it again.
        if !self.shared.has_changes.load(Ordering::Relaxed)
            || !self.shared.has_changes.swap(false, Ordering::Acquire)
        {
            return;
        }
        let shared = self.shared.clone();
        let mut garbage = Vec::new();
        let mut ended = Vec::new();
        {
            let mut peer_status = shared.peer_status();
            while let Some((rank, status)) = peer_status.next() {
                // The watcher has not reached the connect of this generation yet, and will publish
                // more changes.
                if status.generation != self.control.generation(rank) {
                    continue;
                }
                if let Some(link) = status.link.take() {
                    self.connected(rank, link);
                }
                while let Some((slot, state)) = status.next_slot() {
                    if let State::Connected(connected) = &mut self.peers[rank as usize].state {
                        if let SlotState::Mapped(region) = &state {
                            region.set_key_table(&connected.link.keys);
                        }
                        garbage.push(connected.set(slot, state));
                    } else {
                        garbage.push(state);
                    }
                }
                let marks = std::mem::take(&mut status.drain_marks);
                if let (State::Connected(connected), 1..) = (&mut self.peers[rank as usize].state, marks) {
                    connected.drains.pass(PEER_MARK, marks);
                    while let Some(drained) = connected.drains.next_drained(rank) {
                        self.events.push_back((rank, drained));
                    }
                }
                if let Some(end) = status.end.take() {
                    ended.push((rank, end));
                }
            }
        }
        // Unmapping may take long, so it is not done under the lock.
        drop(garbage);
        for (rank, end) in ended {
            self.ended(rank, end);
        }
    }

    /// As [`Device::connect`](crate::device::Device::connect), for both kinds of pairs.
    fn start_connecting(&mut self, peer: Rank, kind: PairKind<'_>) -> Result<(), ConnectError> {
        self.control.check(peer, kind)?;
        let is_again = self.holder(peer).is_succeeded(peer)?;
        // The signal slots are made before the watcher can begin the generation and send them.
        self.make_signal_slots(peer, is_again)
            .map_err(|refused| ConnectError::SignalSlots { peer, source: refused.into() })?;
        if is_again {
            self.orphan(peer);
        }
        self.control.connect(peer, kind, is_again)?;
        let known = &mut self.peers[peer as usize];
        known.has_sent_bye &= !is_again;
        if is_again || matches!(known.state, State::Unconnected) {
            known.state = State::Connecting;
        }
        Ok(())
    }

    /// What is known of the process that has a rank, or had it last.
    pub(crate) fn holder(&self, peer: Rank) -> Holder {
        let mut events = self.events.iter().map(|(_, event)| event);
        match self.peer(peer).map(|peer| &peer.state) {
            _ if self.severing.contains(&peer) => Holder::Ends,
            None | Some(State::Unconnected) => Holder::Nobody,
            Some(State::Connecting) => Holder::Connecting,
            Some(State::Connected(_)) => Holder::Connected,
            Some(State::Lost(_) | State::Departed | State::Severed) if awaits_end(&mut events, peer) => {
                Holder::Ends
            }
            Some(State::Lost(_) | State::Departed | State::Severed) => Holder::Gone,
        }
    }

    /// Takes memory that is for this peer alone from all peers: another process gets its rank.
    pub(crate) fn orphan(&mut self, peer: Rank) {
        self.shared.directory().orphan(peer, &self.shared.own.keys);
    }

    /// Waits no more for a process that was to be connected: the one that comes is of another host.
    pub(crate) fn cancel(&mut self, peer: Rank) {
        if self.holder(peer) == Holder::Connecting {
            self.control.sever(peer);
            self.disconnect(peer, State::Severed, &TransferError::Severed { peer });
        }
    }

    /// Makes the signal slots for a peer that is to be connected.
    fn make_signal_slots(&self, peer: Rank, is_again: bool) -> Result<(), Errno> {
        let signal_slots = &self.shared.signal_slots;
        if is_again {
            return signal_slots.renew(peer, self.control.generation(peer) + 1);
        }
        signal_slots.of(peer).failure().map_or(Ok(()), Err)
    }

    fn connected(&mut self, rank: Rank, link: PeerMemory) {
        let peer = &mut self.peers[rank as usize];
        if !matches!(peer.state, State::Connecting) {
            return;
        }
        let counts = vec![0; link.signal_slots.len()];
        let drains = Drains::default();
        peer.state = State::Connected(Box::new(Connected { link, counts, regions: Vec::new(), drains }));
        // There is room for all transfers that can be under way, so that the data path does not
        // allocate.
        let links = self.peers.iter().filter(|peer| matches!(peer.state, State::Connected(_))).count();
        let room = links * QUEUE_DEPTH;
        self.large.reserve(room.saturating_sub(self.large.len()));
        self.events.reserve(room.saturating_sub(self.events.len()));
        self.info.setup.count_connected();
        self.events.push_back((rank, Event::Connected { peer: rank }));
    }

    fn ended(&mut self, rank: Rank, end: ConnectionEnd) {
        if !matches!(self.peers[rank as usize].state, State::Connecting | State::Connected(_)) {
            return;
        }
        let (state, event, error) = match end {
            ConnectionEnd::Lost(cause) => (
                State::Lost(cause.clone()),
                Event::PeerLost { peer: rank, cause: cause.clone() },
                TransferError::Lost { peer: rank, cause },
            ),
            ConnectionEnd::Departed => {
                (State::Departed, Event::Departed { peer: rank }, TransferError::Departed { peer: rank })
            }
        };
        self.events.push_back((rank, event));
        self.disconnect(rank, state, &error);
    }

    /// Ends all transfers of a peer.
    fn disconnect(&mut self, rank: Rank, state: State, error: &TransferError) {
        let before = std::mem::replace(&mut self.peers[rank as usize].state, state);
        let mut failed = Vec::new();
        self.large.retain(|large| {
            large.peer != rank || {
                failed.push(large.id);
                false
            }
        });
        self.waiting.retain(|waiting| {
            waiting.peer != rank || {
                failed.push(waiting.id);
                false
            }
        });
        for id in failed {
            self.done(rank, id, Err(error.clone()));
        }
        // A GPU cannot be stopped. These copies end when it has finished.
        self.copies.fail(rank, error);
        self.peers[rank as usize].pending = 0;
        let forgotten = self.shared.peer_status().forget(rank);
        drop((before, forgotten));
    }

    /// Carries out work that few polls have.
    #[cold]
    fn advance_rare_work(&mut self, now: Nanos) {
        if !self.draining.is_empty() {
            self.advance_drains();
        }
        if !self.severing.is_empty() {
            self.advance_fence(now);
        }
        if self.is_leaving {
            self.send_byes();
        }
        self.has_rare_work = self.is_leaving || !self.severing.is_empty() || !self.draining.is_empty();
    }

    /// Sends the drain marks for peers to which all earlier transfers have ended.
    fn advance_drains(&mut self) {
        self.has_unsent_marks = false;
        let draining = std::mem::take(&mut self.draining);
        self.draining = draining.into_iter().filter(|&rank| !self.advance_drains_of(rank)).collect();
    }

    /// Sends the drain marks for a peer. Returns whether all marks are sent, or the peer is gone.
    fn advance_drains_of(&mut self, rank: Rank) -> bool {
        let first_under_way = self.drains_before_first(rank);
        let peer = &mut self.peers[rank as usize];
        let State::Connected(connected) = &mut peer.state else { return true };
        if peer.has_sent_bye {
            return true;
        }
        let drains = &mut connected.drains;
        while drains.passed(OWN_MARK) < drains.begun() && first_under_way > drains.passed(OWN_MARK) {
            if !self.control.send_message(rank, &RegionMessage::DrainMark.encode()) {
                // The peer does not read; the next poll tries again, until the peer is lost.
                self.has_unsent_marks = true;
                return false;
            }
            drains.pass(OWN_MARK, 1);
        }
        while let Some(drained) = drains.next_drained(rank) {
            self.events.push_back((rank, drained));
        }
        drains.passed(OWN_MARK) == drains.begun()
    }

    /// The least number of drains before a transfer to the peer that is under way; the largest
    /// number if there is no such transfer.
    fn drains_before_first(&mut self, rank: Rank) -> u64 {
        let large = self.large.iter().filter(|large| large.peer == rank).map(|large| large.drains_before);
        let waiting = self.waiting.iter().filter(|waiting| waiting.peer == rank);
        let first = large.chain(waiting.map(|waiting| waiting.drains_before)).min().unwrap_or(u64::MAX);
        first.min(self.copies.drains_before_first(rank))
    }

    fn advance_fence(&mut self, now: Nanos) {
        if !self.copies.is_empty() {
            return;
        }
        if let Err(error) = self.fence.advance(now) {
            last_resort::abort(format_args!(
                "rank {}: memory could not be taken back from a severed peer within {REFUSAL_LIMIT:?}: {error}; {}",
                self.shared.rank,
                crate::memory::UNMAPPED_REMEDY
            ));
        }
        if self.fence.holds() {
            for rank in std::mem::take(&mut self.severing) {
                self.events.push_back((rank, Event::Severed { peer: rank }));
            }
        }
    }

    /// Sends a bye to each peer without pending transfers, also to departed peers. These may still
    /// serve other ranks, and would report this rank as lost when its process ends.
    fn send_byes(&mut self) {
        for (rank, peer) in self.peers.iter_mut().enumerate() {
            if !peer.has_sent_bye && peer.pending == 0 && peer.state.may_see_end() {
                peer.has_sent_bye = true;
                self.control.send_bye(rank as Rank);
            }
        }
    }

    fn has_work(&self) -> bool {
        !self.events.is_empty()
            || !self.large.is_empty()
            || !self.copies.is_empty()
            || !self.severing.is_empty()
            || self.has_unsent_marks
            || (!self.draining.is_empty() && self.copies.is_unsettled())
            || self.waiting.iter().any(|waiting| waiting.deadline.is_none())
    }
}

impl Peer {
    fn new() -> Self {
        Self {
            state: State::Unconnected,
            under_way: 0,
            pending: 0,
            is_due: false,
            has_sent_bye: false,
            mapped: Vec::new(),
        }
    }

    fn connected(&self, peer: Rank) -> Result<&Connected, SubmitError> {
        match &self.state {
            State::Connected(connected) => Ok(connected),
            State::Unconnected | State::Connecting => Err(SubmitError::NotConnected { peer }),
            State::Lost(cause) => Err(SubmitError::Lost { peer, kind: cause.kind() }),
            State::Departed => Err(SubmitError::Departed { peer }),
            State::Severed => Err(SubmitError::Severed { peer }),
        }
    }
}

impl Connected {
    fn signal(&mut self, signal: &Signal) {
        let count = &mut self.counts[usize::from(signal.signal_slot)];
        *count = count.wrapping_add(1);
        self.link.signal_slots.signal_as(signal, *count);
    }

    fn locate(&self, slice: &RemoteSlice) -> RemoteLocation<'_> {
        // The owner's own table is read, so that a dropped region is refused at once.
        if !self.link.keys.holds(slice.key) {
            return RemoteLocation::Refused;
        }
        match self.regions.get(usize::from(slot_of(slice.key))) {
            Some(SlotState::Mapped(region)) if region.key == slice.key && region.is_on_gpu() => {
                RemoteLocation::OnGpu(region)
            }
            Some(SlotState::Mapped(region)) if region.key == slice.key => region
                .locate(slice)
                .map_or(RemoteLocation::Refused, |address| RemoteLocation::Mapped(address, region)),
            Some(SlotState::Unmappable(key)) if *key == slice.key => RemoteLocation::Unmappable,
            _ => RemoteLocation::NotAnnounced,
        }
    }

    /// Whether the peer has registered the region for another rank than this one. Not inlined,
    /// because transfers to announced regions do not need it.
    #[cold]
    #[inline(never)]
    fn is_for_others(&self, key: RegionKey) -> bool {
        !self.link.keys.is_for(key, self.link.own_rank)
    }

    /// The number of drains of this rank before a transfer that is started now.
    fn drains_before(&self, waited: Option<&Waited>) -> u64 {
        waited.map_or(self.drains.begun(), |waited| waited.drains_before)
    }

    fn set(&mut self, slot: u16, state: SlotState) -> SlotState {
        let at = usize::from(slot);
        if self.regions.len() <= at {
            self.regions.resize(at + 1, SlotState::Empty);
        }
        std::mem::replace(&mut self.regions[at], state)
    }

    fn check_signal(&self, signal: Option<&Signal>) -> Result<(), SubmitError> {
        match signal {
            Some(signal) if usize::from(signal.signal_slot) >= self.link.signal_slots.len() => {
                Err(SubmitError::NoSuchSignalSlot {
                    signal_slot: signal.signal_slot,
                    signal_slots: self.link.signal_slots.len(),
                })
            }
            _ => Ok(()),
        }
    }
}

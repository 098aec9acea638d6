//! A whole fabric in one process: one thread, one seed, virtual time.
//!
//! A [`World`] holds a clock, a [`Network`] and everything under way on it; [`World::device`] gives
//! each rank its [`SimDevice`]. Bytes are real. Time does not pass by itself: the driver of the
//! ranks calls [`World::advance`], which goes to the next event, and polls the ranks in between.
//! [`Faults`] are the plan of faults; checkers are [`Observer`]s.
//!
//! **Invariant:** a run is a function of the code and the seed. One seeded [`Random`] gives each
//! purpose a stream of its own. Events at the same instant and collections have an order that the
//! seed decides; no address, clock or hash order has any effect. Every event is folded into a
//! [`TraceHash`], so two runs of one seed can be compared by one number.
//!
//! The device uses all freedom that the contract gives to a device, and no more. The source of a
//! put is read as late as `Done` allows. With the matching [`FaultKind`]s the bytes of a put become
//! visible in random pieces at random times up to the instant of its signal; transfers, signals and
//! completions overtake each other; queues hold one transfer; ranks freeze and die; links fail; and
//! the two ends of a pair detect it at different times. Without faults and shared links a put of
//! `n` bytes is visible exactly `latency + n / bandwidth` after the submit.
//!
//! With [`Options::moves_bytes`] off only times are simulated: no byte of a transfer's payload is
//! copied, so memory of any size can take part without being touched.
//!
//! A rank whose device has died gets another one by [`World::device`] again, as another process
//! would take the rank (contract line 16). What the dead device sent and has not arrived may still
//! arrive. All ranks are in one world: [`Device::meet`](crate::Device::meet) is refused.
//!
//! Driving `n` ranks:
//!
//! ```
//! use std::sync::Arc;
//! use std::time::Duration;
//! use pleach_transport::sim::{Network, Options, World};
//! use pleach_transport::{Device, DeviceConfig, Event, Nanos, Rank, Responder, LossCause};
//!
//! struct Silent;
//! impl Responder for Silent {
//!     fn message(&self, _: Rank, _: &[u8]) -> Option<Vec<u8>> { None }
//!     fn lost(&self, _: Rank, _: &LossCause) {}
//! }
//!
//! let world = World::new(Options::new(Network::full_mesh(3, 1_000_000_000, Duration::from_micros(2)), 42));
//! let mut devices: Vec<_> = (0..3).map(|rank| world.device(DeviceConfig {
//!     rank, world_size: 3, secret: None, signal_slots: 8, connect_timeout: Duration::from_secs(1), interface: None, address: None,
//!     responder: Arc::new(Silent),
//! })).collect();
//! let addresses: Vec<_> = devices.iter().map(|device| device.info().address.clone()).collect();
//! for device in &mut devices {
//!     let rank = device.info().rank;
//!     for peer in (0..3).filter(|&peer| peer != rank) {
//!         device.connect(peer, &addresses[peer as usize]).unwrap();
//!     }
//! }
//! let mut connected = 0;
//! let mut events = Vec::with_capacity(16);
//! while connected < 6 {
//!     assert!(world.advance(None), "nothing will ever happen any more");
//!     for rank in world.take_woken() {
//!         devices[rank as usize].poll(world.now(), &mut events);
//!         connected += events.drain(..).filter(|event| matches!(event, Event::Connected { .. })).count();
//!     }
//! }
//! assert_eq!(world.now(), Nanos(2_000));
//! ```

#[allow(unsafe_code)]
mod alias;
mod device;
mod faults;
mod flows;
mod network;
mod observer;
mod pair;
mod queues;
mod random;
mod regions;
mod sequence_map;
mod trace;
mod transfers;
mod world;

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

pub use device::SimDevice;
pub use faults::{DELAY_MAX, DETECTION, FREEZE_MAX, Fault, FaultKind, FaultKinds, Faults, UnknownFault};
pub use flows::{FlowId, Flows};
pub use network::{Link, LinkId, LinkSharing, Network, NetworkBuilder, NetworkError, NodeId, Route};
pub use observer::{Access, AccessKind, Actor, Observer, Record, TransferNumber};
pub use random::{MILLION, Random};
pub use trace::TraceHash;
pub use world::{AllowedMutant, Mutant, Options, World};

use self::alias::Alias;
use self::pair::PeerState;
use self::queues::{FlowProgress, Queues};
use self::regions::RegionTable;
use self::sequence_map::SequenceMap;
use self::trace::Trace;
use self::transfers::ActiveTransfer;
use crate::Rank;
use crate::clock::Nanos;
use crate::device::{Event, Incarnation, LossCause, Responder, SetupCounts, Wake};
use crate::region::{RegionKey, Slice};
use crate::signals::Signal;

/// A call to make when the world's lock is released.
enum Callback {
    Message { responder: Arc<dyn Responder>, from: Rank, to: Rank, message: Vec<u8> },
    Lost { responder: Arc<dyn Responder>, rank: Rank, peer: Rank, cause: LossCause },
}

/// A simulated event.
#[derive(Clone, Debug)]
enum SimEvent {
    /// The bytes of a put or get enter the wire; an atomic is carried out.
    Depart(TransferNumber),
    /// One of the pieces of a transfer lands.
    Piece(TransferNumber),
    /// The remaining bytes land.
    Arrive(TransferNumber),
    /// The submitter's `Done` becomes ready.
    Complete(TransferNumber),
    /// The oldest control message from the first to the second arrives.
    Message(Rank, Rank),
    Connected(Rank, Rank),
    ConnectTimeout(Rank, Rank, Duration),
    /// The first rank finds out that it has lost this device of the second.
    Detect(Rank, Rank, LossCause, Incarnation),
    /// The first rank has fenced the second.
    Fenced(Rank, Rank),
    /// A drain mark of the first rank, of this device, arrives at the second.
    DrainMark(Rank, Rank, Option<Incarnation>),
    /// For a mutant: a signal of the first rank to the second is late.
    LateSignal(Rank, Rank, Signal),
    /// For a mutant: bytes are stored once more in memory of this rank.
    Rewrite(Rank, Actor, Slice, Vec<u8>),
    InjectFault(Fault),
    Unfreeze(Rank),
    /// A region of the rank becomes known to peers.
    Announce(Rank),
}

/// The time of an event, and its order among events of the same instant: random if links are shared
/// fairly, then first come.
type QueueKey = (Nanos, u64, u64);

/// A device event that waits to be polled.
struct Ready {
    event: Event,
    /// For `Done`: the peer and the transfer.
    transfer: Option<(Rank, TransferNumber)>,
}

/// A device's wake source; the world and the rank's wakers hold it.
#[derive(Debug, Default)]
struct WakeWord {
    word: AtomicU32,
    /// A thread may sleep on it, or is about to. A world that one thread drives is never slept on,
    /// and its wakes cost no system call.
    is_armed: AtomicBool,
}

impl AsRef<AtomicU32> for WakeWord {
    fn as_ref(&self) -> &AtomicU32 {
        &self.word
    }
}

impl Wake for WakeWord {
    fn wake(&self) {
        // Sequentially consistent, as in `arm`: a thread that armed the wake source has read this
        // wake, or this wake sees the arming. So a thread that wakes also sees the reason.
        self.word.fetch_add(1, Ordering::SeqCst);
        if self.is_armed.swap(false, Ordering::SeqCst) {
            let _ = rustix::thread::futex::wake(&self.word, rustix::thread::futex::Flags::empty(), u32::MAX);
        }
    }
}

impl WakeWord {
    /// The number of wakes. Acquire: pairs with the release in `wake`.
    fn woken(&self) -> u32 {
        self.word.load(Ordering::Acquire)
    }

    /// Arms the wake source; returns the number of wakes.
    fn arm(&self) -> u32 {
        // Sequentially consistent: pairs with `wake`, see there.
        self.is_armed.store(true, Ordering::SeqCst);
        self.word.load(Ordering::SeqCst)
    }
}

/// The state of a rank, of the last device that was made for it.
#[derive(Default)]
struct RankState {
    incarnation: Option<Incarnation>,
    /// Present while its device exists.
    responder: Option<Arc<dyn Responder>>,
    made: bool,
    signal_slots: usize,
    setup: Arc<SetupCounts>,
    dead: bool,
    left: bool,
    frozen_until: Nanos,
    /// When its watcher continues.
    stopped_until: Nanos,
    table: Arc<RegionTable>,
    wake_source: Arc<WakeWord>,
    wake_seen: u32,
    ready: VecDeque<Ready>,
    /// Signal slots with new signals, by peer; `None` until [`World::take_signalled`] is first
    /// called.
    signalled: Option<Vec<(Rank, u16)>>,
    /// Simulated events that wait for a poll of this rank.
    inbox: VecDeque<SimEvent>,
}

/// A rank's mapping of another rank's memory.
struct RankMapping {
    alias: Weak<Alias>,
    owner_base: usize,
}

/// The transfers on the links, by the way of sharing.
enum LinkScheduler {
    Fair(Flows),
    InOrder(Queues),
}

impl LinkScheduler {
    fn new(network: &Arc<Network>) -> Self {
        match network.sharing() {
            LinkSharing::Fair => Self::Fair(Flows::new(network.clone())),
            LinkSharing::InOrder => Self::InOrder(Queues::new(network.clone())),
        }
    }

    fn start(&mut self, now: Nanos, from: Rank, to: Rank, bytes: u64) -> FlowId {
        match self {
            Self::Fair(flows) => flows.start(now, from, to, bytes),
            Self::InOrder(queues) => queues.start(now, from, to, bytes),
        }
    }

    fn stop(&mut self, now: Nanos, flow: FlowId) {
        match self {
            Self::Fair(flows) => flows.stop(now, flow),
            Self::InOrder(queues) => queues.stop(flow),
        }
    }

    /// The time of the next event.
    fn next(&self) -> Option<Nanos> {
        match self {
            Self::Fair(flows) => flows.next_end().map(|(at, _)| at),
            Self::InOrder(queues) => queues.next_step(),
        }
    }

    /// Carries out the next event. Bytes that leave fairly shared links arrive a latency later,
    /// which the caller adds.
    fn step(&mut self) -> Option<FlowProgress> {
        match self {
            Self::Fair(flows) => flows.next_end().map(|(_, flow)| FlowProgress::Left(flow)),
            Self::InOrder(queues) => queues.step(),
        }
    }
}

struct State {
    now: Nanos,
    root: Random,
    delays: Random,
    choices: Random,
    keys: Random,
    ties: Random,
    incarnations: Random,
    queue: BTreeMap<QueueKey, SimEvent>,
    queued: u64,
    network: Arc<Network>,
    scheduler: LinkScheduler,
    flow_of: SequenceMap<FlowId, TransferNumber>,
    transfers: SequenceMap<TransferNumber, ActiveTransfer>,
    submitted: u64,
    ranks: Vec<RankState>,
    /// By rank and peer.
    peer_states: Vec<PeerState>,
    /// By mapper, owner and key.
    mappings: BTreeMap<(Rank, Rank, RegionKey), RankMapping>,
    faults: Faults,
    maps: bool,
    passive: bool,
    signals_before_ends: bool,
    hosts: Vec<u32>,
    queue_depth: usize,
    transfer_bytes_max: u64,
    moves_bytes: bool,
    mutant: Option<Mutant>,
    observer: Option<Box<dyn Observer>>,
    trace: Trace,
    callbacks: Vec<Callback>,
    /// The number of wakes of any rank.
    wakes: u64,
}

impl State {
    fn new(options: Options) -> Self {
        let root = Random::new(options.seed);
        let network = Arc::new(options.network);
        let mut state = Self {
            now: Nanos::ZERO,
            delays: root.split("delays"),
            choices: root.split("choices"),
            keys: root.split("keys"),
            ties: root.split("ties"),
            incarnations: root.split("incarnations"),
            root,
            queue: BTreeMap::new(),
            queued: 0,
            scheduler: LinkScheduler::new(&network),
            flow_of: SequenceMap::new(),
            transfers: SequenceMap::new(),
            submitted: 0,
            ranks: (0..network.ranks()).map(|_| RankState::default()).collect(),
            peer_states: (0..u64::from(network.ranks()).pow(2)).map(|_| PeerState::default()).collect(),
            network,
            mappings: BTreeMap::new(),
            queue_depth: options.faults.queue_depth.unwrap_or(options.queue_depth),
            faults: options.faults,
            maps: options.maps,
            passive: options.passive,
            signals_before_ends: options.signals_before_ends,
            hosts: options.hosts,
            transfer_bytes_max: options.transfer_bytes_max,
            moves_bytes: options.moves_bytes,
            mutant: options.mutant.map(|allowed| allowed.0),
            observer: None,
            trace: Trace::new(options.seed),
            callbacks: Vec::new(),
            wakes: 0,
        };
        for (at, fault) in state.faults.timed.clone() {
            state.at(at, SimEvent::InjectFault(fault));
        }
        state
    }

    fn event(&mut self, name: &'static str, words: &[u64]) {
        self.trace.event(self.now, name, words);
    }

    fn note(&mut self, record: impl FnOnce() -> Record) {
        if let Some(observer) = &mut self.observer {
            observer.observe(self.now, &record());
        }
    }

    fn at(&mut self, when: Nanos, event: SimEvent) -> QueueKey {
        self.queued += 1;
        // Links that serve one transfer after the other serve them in the order of submission.
        let tie = if matches!(self.scheduler, LinkScheduler::InOrder(_)) { 0 } else { self.ties.bits() };
        let key = (when.max(self.now), tie, self.queued);
        self.queue.insert(key, event);
        key
    }

    fn after(&mut self, wait: Duration, event: SimEvent) -> QueueKey {
        self.at(self.now + wait, event)
    }

    /// Cancels an event; ignored if it has happened.
    fn cancel(&mut self, key: QueueKey) {
        self.queue.remove(&key);
    }

    /// The random delay of an event.
    fn random_delay(&mut self) -> Duration {
        let mut late = Duration::ZERO;
        if !self.faults.reorder.is_zero() {
            late += self.up_to(self.faults.reorder);
        }
        if self.faults.delay_per_million > 0 && self.delays.chance(self.faults.delay_per_million) {
            late += self.up_to(self.faults.delay);
        }
        late
    }

    /// A random time up to `limit`.
    fn up_to(&mut self, limit: Duration) -> Duration {
        Duration::from_nanos(self.delays.between(0, u64::try_from(limit.as_nanos()).unwrap_or(u64::MAX)))
    }

    fn next_event(&self) -> Option<Nanos> {
        let queued = self.queue.first_key_value().map(|(&(at, ..), _)| at);
        [queued, self.scheduler.next()].into_iter().flatten().min()
    }

    fn advance(&mut self, wakeup: Option<Nanos>) -> bool {
        let next = self.next_event();
        match (next, wakeup) {
            (None, None) => return false,
            (next, Some(wakeup)) if next.is_none_or(|next| wakeup < next) => {
                self.now = self.now.max(wakeup);
                return true;
            }
            _ => {}
        }
        let queued = self.queue.first_key_value().map(|(&(at, ..), _)| at);
        match self.scheduler.next() {
            Some(at) if queued.is_none_or(|queued| at <= queued) => {
                self.now = self.now.max(at);
                match self.scheduler.step() {
                    Some(FlowProgress::Left(flow)) => self.drained(flow),
                    Some(FlowProgress::Arrived(flow)) => self.left_last_link(flow),
                    None => {}
                }
            }
            _ => {
                if let Some(((at, ..), event)) = self.queue.pop_first() {
                    self.now = self.now.max(at);
                    self.handle_or_defer(event);
                }
            }
        }
        true
    }

    /// As [`State::advance`], on to the first instant at which a rank is woken, with all events of
    /// that instant.
    fn advance_instant(&mut self, wakeup: Option<Nanos>) -> bool {
        let wakes = self.wakes;
        if !self.advance(wakeup) {
            return false;
        }
        let is_quiet = |state: &Self| state.wakes == wakes && state.callbacks.is_empty();
        while is_quiet(self) && wakeup.is_none_or(|wakeup| self.now < wakeup) && self.advance(wakeup) {}
        // Callbacks may post again at this instant: the next call goes on with that.
        while self.callbacks.is_empty() && self.next_event().is_some_and(|at| at <= self.now) {
            self.advance(None);
        }
        true
    }

    /// Whether two ranks are on one host.
    fn are_neighbours(&self, rank: Rank, peer: Rank) -> bool {
        self.hosts.get(rank as usize) == self.hosts.get(peer as usize)
    }

    /// Whether two ranks map each other's memory.
    fn maps(&self, rank: Rank, peer: Rank) -> bool {
        self.maps && self.are_neighbours(rank, peer)
    }

    /// Whether transfers between two ranks need no polls.
    fn is_passive(&self, rank: Rank, peer: Rank) -> bool {
        self.passive && self.are_neighbours(rank, peer)
    }

    /// The rank whose poll the event needs, if any.
    fn needs_poll_of(&self, event: &SimEvent) -> Option<Rank> {
        let number = match event {
            SimEvent::Depart(number) | SimEvent::Piece(number) | SimEvent::Arrive(number) => number,
            _ => return None,
        };
        let active = self.transfers.find(number)?;
        if self.is_passive(active.sender(), active.receiver()) {
            return None;
        }
        match event {
            SimEvent::Depart(_) => Some(active.sender()),
            _ => Some(active.receiver()),
        }
    }

    fn handle_or_defer(&mut self, event: SimEvent) {
        match self.needs_poll_of(&event) {
            Some(rank) => {
                if !self.ranks[rank as usize].dead {
                    self.ranks[rank as usize].inbox.push_back(event);
                    self.wake(rank);
                }
            }
            None => self.handle(event),
        }
    }

    fn handle(&mut self, event: SimEvent) {
        match event {
            SimEvent::Depart(number) => self.depart(number),
            SimEvent::Piece(number) => self.land_piece(number),
            SimEvent::Arrive(number) => self.arrive(number),
            SimEvent::Complete(number) => self.complete(number),
            SimEvent::Message(from, to) => self.deliver_message(from, to),
            SimEvent::Connected(rank, peer) => self.connected(rank, peer),
            SimEvent::ConnectTimeout(rank, peer, limit) => self.connect_timed_out(rank, peer, limit),
            SimEvent::Detect(rank, peer, cause, incarnation) => {
                self.detect(rank, peer, cause, Some(incarnation));
            }
            SimEvent::Fenced(rank, peer) => self.fenced(rank, peer),
            SimEvent::DrainMark(from, to, device) => self.drain_marked(from, to, device),
            SimEvent::LateSignal(from, to, signal) => self.raise_late(from, to, &signal),
            SimEvent::Rewrite(owner, actor, slice, bytes) => {
                slice.store(&bytes);
                self.accessed(actor, owner, &slice, AccessKind::Write);
            }
            SimEvent::InjectFault(fault) => self.inject(fault),
            SimEvent::Unfreeze(rank) => {
                self.event("thaw", &[u64::from(rank)]);
                self.wake(rank);
            }
            SimEvent::Announce(rank) => {
                self.event("announce", &[u64::from(rank)]);
                for peer in 0..self.ranks.len() as Rank {
                    self.wake(peer);
                }
            }
        }
    }

    /// Carries out events that wait for a rank's poll: at least one, in random number and order.
    fn process_inbox(&mut self, rank: Rank) {
        let waiting = self.ranks[rank as usize].inbox.len();
        if waiting == 0 {
            return;
        }
        let shuffled = !self.faults.reorder.is_zero();
        let count = if shuffled { self.choices.between(1, waiting as u64) as usize } else { waiting };
        for _ in 0..count {
            let inbox_len = self.ranks[rank as usize].inbox.len();
            if inbox_len == 0 {
                return;
            }
            let index = if shuffled { self.choices.index(inbox_len) } else { 0 };
            if let Some(event) = self.ranks[rank as usize].inbox.remove(index) {
                self.handle(event);
            }
        }
    }

    fn is_frozen(&self, rank: Rank) -> bool {
        self.now < self.ranks[rank as usize].frozen_until
    }

    fn wake(&mut self, rank: Rank) {
        self.wakes += 1;
        self.ranks[rank as usize].wake_source.wake();
    }

    fn push_ready(&mut self, rank: Rank, event: Event, transfer: Option<(Rank, TransferNumber)>) {
        self.ranks[rank as usize].ready.push_back(Ready { event, transfer });
        self.wake(rank);
    }

    fn take_woken(&mut self) -> Vec<Rank> {
        let now = self.now;
        let mut woken = Vec::new();
        for (rank, state) in self.ranks.iter_mut().enumerate() {
            // Events that a poll left, or had no room for, are a reason to poll again.
            let waiting = !state.inbox.is_empty() || !state.ready.is_empty();
            let count = state.wake_source.woken();
            if state.dead || now < state.frozen_until || (count == state.wake_seen && !waiting) {
                continue;
            }
            state.wake_seen = count;
            woken.push(rank as Rank);
        }
        woken
    }

    fn inject(&mut self, fault: Fault) {
        match fault {
            Fault::Freeze { rank, duration, watcher } => {
                self.event("freeze", &[u64::from(rank), duration.as_nanos() as u64, u64::from(watcher)]);
                let until = self.now + duration;
                let state = &mut self.ranks[rank as usize];
                state.frozen_until = state.frozen_until.max(until);
                if watcher {
                    state.stopped_until = state.stopped_until.max(until);
                }
                self.at(until, SimEvent::Unfreeze(rank));
            }
            Fault::LinkDown { link } => {
                self.event("link-down", &[u64::from(link.0)]);
                for (low, high) in self.network.pairs_over(link) {
                    for (rank, peer) in [(low, high), (high, low)] {
                        self.cut_for_ever(rank, peer);
                        self.detect_later(rank, peer, LossCause::LinkDown);
                    }
                }
            }
            Fault::RankDeath { rank } => self.die(rank, LossCause::ProcessEnded),
            Fault::OneSidedLoss { rank, peer } => {
                self.event("one-sided-loss", &[u64::from(rank), u64::from(peer)]);
                let broke = LossCause::ConnectionBroke(std::io::ErrorKind::ConnectionReset);
                if self.is_reachable(rank, peer) {
                    self.detect(rank, peer, broke.clone(), None);
                    self.detect_later(peer, rank, broke);
                }
            }
        }
    }

    fn detect_later(&mut self, rank: Rank, peer: Rank, cause: LossCause) {
        let wait = self.up_to(self.faults.detection);
        // A rank without a device is lost by nobody.
        if let Some(incarnation) = self.ranks[peer as usize].incarnation {
            self.after(wait, SimEvent::Detect(rank, peer, cause, incarnation));
        }
    }

    fn accessed(&mut self, by: Actor, owner: Rank, slice: &Slice, kind: AccessKind) {
        let now = self.now;
        self.note(|| {
            let start = slice.as_ptr() as usize;
            let offset = slice.offset() as u64;
            Record::Access(Access {
                by,
                owner,
                key: slice.region().key(),
                range: offset..offset + slice.len() as u64,
                addresses: start..start + slice.len(),
                kind,
                start: now,
                end: now,
            })
        });
    }

    fn accessed_by_rank(&mut self, rank: Rank, address: usize, len: usize, kind: AccessKind, start: Nanos) {
        if self.observer.is_none() {
            return;
        }
        let mapped = self.mappings.range((rank, 0, RegionKey(0))..(rank + 1, 0, RegionKey(0))).find_map(
            |(&(_, owner, key), mapping)| {
                let alias = mapping.alias.upgrade()?;
                let base = alias.base().as_ptr() as usize;
                let inside = address >= base && address + len <= base + alias.len();
                inside.then(|| (owner, key, (address - base) as u64, mapping.owner_base + (address - base)))
            },
        );
        let own = || {
            let (key, offset) = self.ranks[rank as usize].table.containing(address, len)?;
            Some((rank, key, offset, address))
        };
        let (owner, key, offset, address) =
            mapped.or_else(own).unwrap_or((rank, RegionKey::NONE, address as u64, address));
        let end = self.now;
        self.note(|| {
            Record::Access(Access {
                by: Actor::Rank(rank),
                owner,
                key,
                range: offset..offset + len as u64,
                addresses: address..address + len,
                kind,
                start,
                end,
            })
        });
    }
}

//! What is behind a world's lock: the clock, the queue of what will happen, and the ranks.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use crate::Rank;
use crate::clock::Nanos;
use crate::device::{Event, LossCause, Responder, Wake};
use crate::memory::{Alias, Memory};
use crate::region::{RegionKey, Slice};
use crate::sim::faults::{Fault, Faults};
use crate::sim::flight::Flight;
use crate::sim::flows::{FlowId, Flows};
use crate::sim::network::{Network, Sharing};
use crate::sim::numbered::Numbered;
use crate::sim::observer::{Access, AccessKind, Actor, Observer, Record, TransferNumber};
use crate::sim::pair::Side;
use crate::sim::queues::{Passage, Queues};
use crate::sim::random::Random;
use crate::sim::regions::RegionTable;
use crate::sim::trace::Trace;
use crate::sim::world::{Canary, Options};

/// What a world calls when its lock is free.
pub(super) enum Callback {
    Message { responder: Arc<dyn Responder>, from: Rank, to: Rank, message: Vec<u8> },
    Lost { responder: Arc<dyn Responder>, peer: Rank, cause: LossCause },
}

/// What will happen at some instant.
#[derive(Clone, Debug)]
pub(super) enum Happening {
    /// A put's bytes, or a get's, begin their way; an atomic is carried out.
    Depart(TransferNumber),
    /// One of the pieces of a transfer lands.
    Piece(TransferNumber),
    /// The rest of it lands.
    Arrive(TransferNumber),
    /// The submitter learns that it is done.
    Complete(TransferNumber),
    /// The oldest control message from the first to the second arrives.
    Message(Rank, Rank),
    Connected(Rank, Rank),
    ConnectTimeout(Rank, Rank, Duration),
    Detect(Rank, Rank, LossCause),
    /// The first no longer hears the second.
    Fenced(Rank, Rank),
    Inflict(Fault),
    Thaw(Rank),
    /// A region of the rank becomes known to peers.
    Announce(Rank),
}

/// When something happens, and in which order among what happens at the same instant: random where
/// links are shared fairly, then first come.
pub(super) type QueueKey = (Nanos, u64, u64);

/// An event that waits to be polled.
pub(super) struct Ready {
    pub(super) event: Event,
    /// For `Done`: to whom it went, and which it was.
    pub(super) transfer: Option<(Rank, TransferNumber)>,
}

/// A device's wake source, of which the world and the rank's wakers hold handles.
#[derive(Debug, Default)]
pub(super) struct WakeWord {
    word: AtomicU32,
    /// Somebody may sleep on it, or is about to. Who drives a world in one thread never does, and
    /// wakes for nothing.
    is_armed: AtomicBool,
}

impl AsRef<AtomicU32> for WakeWord {
    fn as_ref(&self) -> &AtomicU32 {
        &self.word
    }
}

impl Wake for WakeWord {
    fn wake(&self) {
        // Sequentially consistent, as in `arm`: whoever armed the wake source has read this wake,
        // or is seen to have armed it. So a rank that wakes also sees why.
        self.word.fetch_add(1, Ordering::SeqCst);
        if self.is_armed.swap(false, Ordering::SeqCst) {
            let _ = rustix::thread::futex::wake(&self.word, rustix::thread::futex::Flags::empty(), u32::MAX);
        }
    }
}

impl WakeWord {
    /// How often it was woken. Acquire: pairs with the release in `wake`.
    pub(super) fn woken(&self) -> u32 {
        self.word.load(Ordering::Acquire)
    }

    /// The same for somebody who will sleep until it is woken again.
    pub(super) fn arm(&self) -> u32 {
        // Sequentially consistent: pairs with `wake`, see there.
        self.is_armed.store(true, Ordering::SeqCst);
        self.word.load(Ordering::SeqCst)
    }
}

/// A rank as the world sees it.
#[derive(Default)]
pub(super) struct RankState {
    /// Present from the making of its device to its drop.
    pub(super) responder: Option<Arc<dyn Responder>>,
    pub(super) made: bool,
    pub(super) signal_slots: usize,
    pub(super) dead: bool,
    pub(super) left: bool,
    pub(super) frozen_until: Nanos,
    /// Until when its watcher sleeps too.
    pub(super) stopped_until: Nanos,
    pub(super) table: Arc<RegionTable>,
    pub(super) wake_source: Arc<WakeWord>,
    pub(super) wake_seen: u32,
    pub(super) ready: VecDeque<Ready>,
    /// Signal slots in which something has come, for whom; nothing as long as nobody asks.
    pub(super) noticed: Option<Vec<(Rank, u16)>>,
    /// What waits for this rank to poll.
    pub(super) inbox: VecDeque<Happening>,
}

/// One rank's view of memory of another.
pub(super) struct View {
    pub(super) alias: Weak<Alias>,
    pub(super) owner_base: usize,
}

/// What is on the links, shared in one way or the other.
pub(super) enum Wires {
    Fair(Flows),
    InOrder(Queues),
}

impl Wires {
    fn new(network: &Arc<Network>) -> Self {
        match network.sharing() {
            Sharing::Fair => Self::Fair(Flows::new(network.clone())),
            Sharing::InOrder => Self::InOrder(Queues::new(network.clone())),
        }
    }

    pub(super) fn start(&mut self, now: Nanos, from: Rank, to: Rank, bytes: u64) -> FlowId {
        match self {
            Self::Fair(flows) => flows.start(now, from, to, bytes),
            Self::InOrder(queues) => queues.start(now, from, to, bytes),
        }
    }

    pub(super) fn stop(&mut self, now: Nanos, flow: FlowId) {
        match self {
            Self::Fair(flows) => flows.stop(now, flow),
            Self::InOrder(queues) => queues.stop(flow),
        }
    }

    /// When something happens next.
    fn next(&self) -> Option<Nanos> {
        match self {
            Self::Fair(flows) => flows.next_end().map(|(at, _)| at),
            Self::InOrder(queues) => queues.next_step(),
        }
    }

    /// Lets it happen. What leaves fairly shared links arrives a latency later, which is for who
    /// asks to see to.
    fn step(&mut self) -> Option<Passage> {
        match self {
            Self::Fair(flows) => flows.next_end().map(|(_, flow)| Passage::Left(flow)),
            Self::InOrder(queues) => queues.step(),
        }
    }
}

pub(super) struct State {
    pub(super) now: Nanos,
    pub(super) root: Random,
    pub(super) delays: Random,
    pub(super) choices: Random,
    pub(super) keys: Random,
    ties: Random,
    queue: BTreeMap<QueueKey, Happening>,
    queued: u64,
    pub(super) network: Arc<Network>,
    pub(super) wires: Wires,
    pub(super) flow_of: Numbered<FlowId, TransferNumber>,
    pub(super) flights: Numbered<TransferNumber, Flight>,
    pub(super) submitted: u64,
    pub(super) ranks: Vec<RankState>,
    /// By rank and peer.
    pub(super) sides: Vec<Side>,
    /// By mapper, owner and key.
    pub(super) views: BTreeMap<(Rank, Rank, RegionKey), View>,
    pub(super) faults: Faults,
    pub(super) maps: bool,
    passive: bool,
    hosts: Vec<u32>,
    pub(super) queue_depth: usize,
    pub(super) transfer_bytes_max: u64,
    pub(super) moves_bytes: bool,
    pub(super) canary: Option<Canary>,
    pub(super) observer: Option<Box<dyn Observer>>,
    pub(super) trace: Trace,
    pub(super) callbacks: Vec<Callback>,
    /// How often any rank was woken in here.
    wakes: u64,
}

impl State {
    pub(super) fn new(options: Options) -> Self {
        let root = Random::new(options.seed);
        let network = Arc::new(options.network);
        let mut state = Self {
            now: Nanos::ZERO,
            delays: root.split("delays"),
            choices: root.split("choices"),
            keys: root.split("keys"),
            ties: root.split("ties"),
            root,
            queue: BTreeMap::new(),
            queued: 0,
            wires: Wires::new(&network),
            flow_of: Numbered::new(),
            flights: Numbered::new(),
            submitted: 0,
            ranks: (0..network.ranks()).map(|_| RankState::default()).collect(),
            sides: (0..u64::from(network.ranks()).pow(2)).map(|_| Side::default()).collect(),
            network,
            views: BTreeMap::new(),
            queue_depth: options.faults.queue_depth.unwrap_or(options.queue_depth),
            faults: options.faults,
            maps: options.maps,
            passive: options.passive,
            hosts: options.hosts,
            transfer_bytes_max: options.transfer_bytes_max,
            moves_bytes: options.moves_bytes,
            canary: options.canary,
            observer: None,
            trace: Trace::new(options.seed),
            callbacks: Vec::new(),
            wakes: 0,
        };
        for (at, fault) in state.faults.timed.clone() {
            state.at(at, Happening::Inflict(fault));
        }
        state
    }

    pub(super) fn event(&mut self, name: &'static str, words: &[u64]) {
        self.trace.event(self.now, name, words);
    }

    pub(super) fn note(&mut self, record: impl FnOnce() -> Record) {
        if let Some(observer) = &mut self.observer {
            observer.observe(self.now, &record());
        }
    }

    pub(super) fn at(&mut self, when: Nanos, happening: Happening) -> QueueKey {
        self.queued += 1;
        // Links that carry one transfer after the other carry them in the order in which they were
        // submitted.
        let tie = if matches!(self.wires, Wires::InOrder(_)) { 0 } else { self.ties.bits() };
        let key = (when.max(self.now), tie, self.queued);
        self.queue.insert(key, happening);
        key
    }

    pub(super) fn after(&mut self, wait: Duration, happening: Happening) -> QueueKey {
        self.at(self.now + wait, happening)
    }

    /// Lets something not happen; nothing if it has.
    pub(super) fn cancel(&mut self, key: QueueKey) {
        self.queue.remove(&key);
    }

    /// How much later than the network says something comes.
    pub(super) fn lateness(&mut self) -> Duration {
        let mut late = Duration::ZERO;
        if !self.faults.reorder.is_zero() {
            late += self.up_to(self.faults.reorder);
        }
        if self.faults.delay_per_million > 0 && self.delays.chance(self.faults.delay_per_million) {
            late += self.up_to(self.faults.delay);
        }
        late
    }

    /// A random time up to this.
    pub(super) fn up_to(&mut self, limit: Duration) -> Duration {
        Duration::from_nanos(self.delays.between(0, u64::try_from(limit.as_nanos()).unwrap_or(u64::MAX)))
    }

    pub(super) fn next_event(&self) -> Option<Nanos> {
        let queued = self.queue.first_key_value().map(|(&(at, ..), _)| at);
        [queued, self.wires.next()].into_iter().flatten().min()
    }

    pub(super) fn advance(&mut self, wakeup: Option<Nanos>) -> bool {
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
        match self.wires.next() {
            Some(at) if queued.is_none_or(|queued| at <= queued) => {
                self.now = self.now.max(at);
                match self.wires.step() {
                    Some(Passage::Left(flow)) => self.drained(flow),
                    Some(Passage::Arrived(flow)) => self.came_through(flow),
                    None => {}
                }
            }
            _ => {
                if let Some(((at, ..), happening)) = self.queue.pop_first() {
                    self.now = self.now.max(at);
                    self.happen_or_wait(happening);
                }
            }
        }
        true
    }

    /// As [`State::advance`], on to the first instant at which a rank is woken, and all that
    /// happens at it.
    pub(super) fn advance_instant(&mut self, wakeup: Option<Nanos>) -> bool {
        let wakes = self.wakes;
        if !self.advance(wakeup) {
            return false;
        }
        let is_quiet = |state: &Self| state.wakes == wakes && state.callbacks.is_empty();
        while is_quiet(self) && wakeup.is_none_or(|wakeup| self.now < wakeup) && self.advance(wakeup) {}
        // What is called back for may post again at this instant: that goes on with the next call.
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
    pub(super) fn maps(&self, rank: Rank, peer: Rank) -> bool {
        self.maps && self.are_neighbours(rank, peer)
    }

    /// Whether transfers between two ranks need nobody to be polled.
    pub(super) fn is_passive(&self, rank: Rank, peer: Rank) -> bool {
        self.passive && self.are_neighbours(rank, peer)
    }

    /// Whose poll it takes, if any's.
    fn waits_for(&self, happening: &Happening) -> Option<Rank> {
        let number = match happening {
            Happening::Depart(number) | Happening::Piece(number) | Happening::Arrive(number) => number,
            _ => return None,
        };
        let flight = self.flights.find(number)?;
        if self.is_passive(flight.sender(), flight.receiver()) {
            return None;
        }
        match happening {
            Happening::Depart(_) => Some(flight.sender()),
            _ => Some(flight.receiver()),
        }
    }

    fn happen_or_wait(&mut self, happening: Happening) {
        match self.waits_for(&happening) {
            Some(rank) => {
                if !self.ranks[rank as usize].dead {
                    self.ranks[rank as usize].inbox.push_back(happening);
                    self.wake(rank);
                }
            }
            None => self.happen(happening),
        }
    }

    fn happen(&mut self, happening: Happening) {
        match happening {
            Happening::Depart(number) => self.depart(number),
            Happening::Piece(number) => self.land_piece(number),
            Happening::Arrive(number) => self.arrive(number),
            Happening::Complete(number) => self.complete(number),
            Happening::Message(from, to) => self.deliver_message(from, to),
            Happening::Connected(rank, peer) => self.connected(rank, peer),
            Happening::ConnectTimeout(rank, peer, limit) => self.not_reached(rank, peer, limit),
            Happening::Detect(rank, peer, cause) => self.detect(rank, peer, cause),
            Happening::Fenced(rank, peer) => self.fenced(rank, peer),
            Happening::Inflict(fault) => self.inflict(fault),
            Happening::Thaw(rank) => {
                self.event("thaw", &[u64::from(rank)]);
                self.wake(rank);
            }
            Happening::Announce(rank) => {
                self.event("announce", &[u64::from(rank)]);
                for peer in 0..self.ranks.len() as Rank {
                    self.wake(peer);
                }
            }
        }
    }

    /// What a rank's poll does to what waited for it: some of it, in some order, and never nothing.
    pub(super) fn work_off(&mut self, rank: Rank) {
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
            if let Some(happening) = self.ranks[rank as usize].inbox.remove(index) {
                self.happen(happening);
            }
        }
    }

    pub(super) fn is_frozen(&self, rank: Rank) -> bool {
        self.now < self.ranks[rank as usize].frozen_until
    }

    pub(super) fn wake(&mut self, rank: Rank) {
        self.wakes += 1;
        self.ranks[rank as usize].wake_source.wake();
    }

    pub(super) fn push_ready(&mut self, rank: Rank, event: Event, transfer: Option<(Rank, TransferNumber)>) {
        self.ranks[rank as usize].ready.push_back(Ready { event, transfer });
        self.wake(rank);
    }

    pub(super) fn take_woken(&mut self) -> Vec<Rank> {
        let now = self.now;
        let mut woken = Vec::new();
        for (rank, state) in self.ranks.iter_mut().enumerate() {
            // What a poll left behind, or found no room for, is a reason to poll again.
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

    pub(super) fn inflict(&mut self, fault: Fault) {
        match fault {
            Fault::Freeze { rank, duration, watcher } => {
                self.event("freeze", &[u64::from(rank), duration.as_nanos() as u64, u64::from(watcher)]);
                let until = self.now + duration;
                let state = &mut self.ranks[rank as usize];
                state.frozen_until = state.frozen_until.max(until);
                if watcher {
                    state.stopped_until = state.stopped_until.max(until);
                }
                self.at(until, Happening::Thaw(rank));
            }
            Fault::LinkDown { link } => {
                self.event("link-down", &[u64::from(link.0)]);
                for (low, high) in self.network.pairs_over(link) {
                    for (rank, peer) in [(low, high), (high, low)] {
                        self.cut_wire(rank, peer);
                        self.detect_later(rank, peer, LossCause::LinkDown);
                    }
                }
            }
            Fault::RankDeath { rank } => self.die(rank, LossCause::ProcessEnded),
            Fault::OneSidedLoss { rank, peer } => {
                self.event("one-sided-loss", &[u64::from(rank), u64::from(peer)]);
                let broke = LossCause::ConnectionBroke(std::io::ErrorKind::ConnectionReset);
                if self.is_reachable(rank, peer) {
                    self.detect(rank, peer, broke.clone());
                    self.detect_later(peer, rank, broke);
                }
            }
        }
    }

    pub(super) fn detect_later(&mut self, rank: Rank, peer: Rank, cause: LossCause) {
        let wait = self.up_to(self.faults.detection);
        self.after(wait, Happening::Detect(rank, peer, cause));
    }

    pub(super) fn accessed(&mut self, by: Actor, owner: Rank, slice: &Slice, kind: AccessKind) {
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

    pub(super) fn accessed_by_rank(
        &mut self,
        rank: Rank,
        address: usize,
        len: usize,
        kind: AccessKind,
        start: Nanos,
    ) {
        if self.observer.is_none() {
            return;
        }
        let mapped = self.views.range((rank, 0, RegionKey(0))..(rank + 1, 0, RegionKey(0))).find_map(
            |(&(_, owner, key), view)| {
                let alias = view.alias.upgrade()?;
                let base = alias.base().as_ptr() as usize;
                let inside = address >= base && address + len <= base + alias.len();
                inside.then(|| (owner, key, (address - base) as u64, view.owner_base + (address - base)))
            },
        );
        let own = || {
            let (key, offset) = self.ranks[rank as usize].table.holding(address, len)?;
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

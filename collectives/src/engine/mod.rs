//! The engine: one rank's runs, from call to outcome. Pure: it takes `now`, polls a [`Device`] and
//! never blocks.
//!
//! [`Engine`] composes these parts, each of which keeps one invariant:
//!
//! | part | invariant |
//! | --- | --- |
//! | `admission` | Runs are numbered in the order of their calls. A run begins only when its bank is free, and its gate open |
//! | `run` | No byte of a peer is used before a signal of the peer in this run was compared with this rank's call |
//! | `fast_path` | A short call leaves the fast path between two steps only, and goes on as an ordinary run at the same step |
//! | `signals` | A signal is consumed once. A credit is never more than the peer has completed |
//! | `bank` | All ranks assign the same banks of signal slots and scratch, because the calls alone decide |
//! | `status_board` | What a rank does can be asked at any time, also while its engine is busy elsewhere |
//! | `queries` | A peer has at most one unanswered query of this rank |
//! | `deadlock` | A cycle that was found was there as a whole at one instant |
//! | `failure`, `agreement` | The first fault ends the group; outcomes are given out when the ranks agree on the fault and no peer can touch local memory |
//!
//! A [`Program`] is what was proved, made ready for one rank; a [`Plan`] is what the calls of one
//! shape share. A rank that waits longer than [`QUERY_AFTER`] asks the ranks that it waits for what
//! they are doing: so a rank that was asked for something else is found although neither rank does
//! anything wrong by itself.
//!
//! Runs read and write memory by its address. So other crates neither make addresses nor start runs
//! on memory that a run does not hold. Groups do, which hold or borrow the memory, and simulated
//! ranks ([`Member::start`](crate::simulate::Member::start)).
//!
//! ```compile_fail,E0624
//! pleach_collectives::engine::Address::of(&mut [0; 8]);
//! ```
//! ```compile_fail,E0624
//! # use pleach_collectives::{engine::{Bytes, Engine, Plan}};
//! # use std::{sync::Arc, time::Duration};
//! fn start(engine: &mut Engine, plan: &Arc<Plan>) {
//!     let _ = engine.start(plan, Bytes::None, Bytes::None, Duration::ZERO);
//! }
//! ```

mod address;
mod admission;
mod agreement;
mod bank;
mod deadlock;
mod failure;
mod fast_path;
mod fault;
#[cfg(test)]
mod hostile;
mod message;
mod observer;
mod plan;
mod queries;
mod run;
mod signals;
mod status_board;

use std::sync::Arc;
use std::time::Duration;

use pleach_transport::{
    Device, Event, Flush, Nanos, PostError, RegisterError, RemoteSlice, SharedMemory, Signals, Slice, Space,
    TransferId, Urgency,
};
use pleach_vocabulary::{Collective, Rank};

pub use address::{Address, Bytes};
pub use admission::Gate;
pub use bank::{TooLarge, signal_slots};
pub use deadlock::DEADLOCK_AFTER;
pub use fault::{Fault, FaultKind};
pub use plan::{Plan, PlanError, Program};
pub use queries::QUERY_AFTER;
pub use signals::Witness;
pub use status_board::StatusBoard;

use crate::call::CountsError;
use crate::compute::{Compute, ComputeError};
use crate::observe::Observations;
use admission::Admission;
use bank::Bank;
use deadlock::DeadlockDetector;
use failure::FailureState;
use fast_path::FastPath;
use message::Message;
use observer::Observer;
use queries::Queries;
use signals::PeerSignals;

/// A rank that was not polled for longer, because it was stopped or did something else, has not
/// waited for answers meanwhile.
const UNSEEN_MAX: Duration = Duration::from_millis(50);
const _: () = assert!(UNSEEN_MAX.as_nanos() > queries::QUERY_INTERVAL_MAX.as_nanos());
/// Events taken from the device at a time.
const EVENTS_MAX: usize = 256;

/// Names a run of an engine until its outcome was taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RunId {
    slot: u8,
    issue: u64,
}

/// Why a call was not accepted.
#[derive(Clone, pleach_derive::ErrorDebug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// The group has failed before.
    #[error("the group has failed: {0}")]
    Failed(Arc<Fault>),
    /// Too many operations are under way.
    #[error("more than {RUNS_MAX} operations are under way; wait for some")]
    TooManyRuns,
    /// Input or output is not as long as the counts say.
    #[error(transparent)]
    Counts(#[from] CountsError),
}

/// Why an engine could not be made.
#[derive(pleach_derive::ErrorDebug, thiserror::Error)]
#[non_exhaustive]
pub enum EngineError {
    /// No scratch memory.
    #[error(
        "{bytes} bytes of scratch memory cannot be had: {source}; {}",
        pleach_transport::memory::remedy(source)
    )]
    Scratch {
        /// The number of bytes.
        bytes: u64,
        /// The cause.
        #[source]
        source: std::io::Error,
    },
    /// The processor that computes cannot reach scratch memory.
    #[error("scratch memory: {0}")]
    Compute(#[from] ComputeError),
    /// The device refuses scratch memory.
    #[error("scratch memory cannot be registered: {0}")]
    Register(#[from] RegisterError),
    /// A peer is not connected.
    #[error("peers cannot be told of scratch memory: {0}")]
    Post(#[from] PostError),
}

/// A sequence of runs, numbered from 0: the collectives of the group, or the messages from one rank
/// to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Stream {
    Collectives,
    Messages { from: Rank, to: Rank },
}

impl Stream {
    fn of(collective: Collective) -> Self {
        match collective {
            Collective::SendRecv { from, to } => Self::Messages { from, to },
            _ => Self::Collectives,
        }
    }

    fn to_word(self) -> u64 {
        match self {
            Self::Collectives => u64::MAX,
            Self::Messages { from, to } => u64::from(from) | u64::from(to) << 32,
        }
    }

    fn from_word(word: u64) -> Self {
        if word == u64::MAX {
            Self::Collectives
        } else {
            Self::Messages { from: word as u32, to: (word >> 32) as u32 }
        }
    }
}

/// The values that a run has from its place in its stream.
#[derive(Clone, Copy, Debug)]
struct RunNumber {
    number: u64,
    /// Signature of the run's call and of all calls before it.
    history: u64,
    bank: Bank,
}

/// Names a step of a run; transfers carry it as their id.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct StepAddress {
    lane: u32,
    slot: u32,
    step: u32,
}

/// The id of transfers whose end no run waits for.
const NO_TRANSFER: TransferId = TransferId(u64::MAX);

/// Most runs of an engine at a time, chunks under way of a lane, lanes of a rank and steps of a
/// lane that a transfer's id can name.
const RUNS_MAX: usize = 255;
const WINDOW_MAX: u32 = 255;
const LANES_MAX: usize = 1 << 24;
const STEPS_MAX: u32 = 1 << 24;

impl StepAddress {
    fn id(self, run: u8) -> TransferId {
        TransferId(
            u64::from(run)
                | u64::from(self.slot) << 8
                | u64::from(self.lane) << 16
                | u64::from(self.step) << 40,
        )
    }

    fn of(id: TransferId) -> Self {
        Self {
            slot: (id.0 >> 8) as u32 & 0xff,
            lane: (id.0 >> 16) as u32 & 0xff_ffff,
            step: (id.0 >> 40) as u32,
        }
    }

    /// The run that a transfer belongs to.
    fn run_of(id: TransferId) -> u8 {
        (id.0 & 0xff) as u8
    }
}

/// This rank's scratch, and where its peers' is. **Invariant:** no run begins before all peers are
/// connected and have said where theirs is.
struct Scratch {
    /// `None` when the group has failed: nobody reads it any more.
    own: Option<Slice>,
    /// By rank.
    announced: Vec<Option<RemoteSlice>>,
    connected: Vec<bool>,
    /// As `announced`; empty until every peer is ready.
    peers: Vec<RemoteSlice>,
}

impl Scratch {
    fn new(own: Slice, rank: Rank, ranks: u32) -> Self {
        let mut announced = vec![None; ranks as usize];
        announced[rank as usize] = Some(own.remote());
        let connected = (0..ranks).map(|peer| peer == rank).collect();
        let mut scratch = Self { own: Some(own), announced, connected, peers: Vec::new() };
        scratch.look_whether_ready();
        scratch
    }

    /// This rank's scratch.
    #[inline]
    fn own(&self) -> &Slice {
        let Some(own) = &self.own else { unreachable!("a group that works has scratch") };
        own
    }

    #[inline]
    fn is_ready(&self) -> bool {
        !self.peers.is_empty()
    }

    fn not_ready(&self) -> impl Iterator<Item = Rank> + '_ {
        let peers = self.announced.iter().zip(&self.connected).zip(0..);
        peers.filter(|((slice, connected), _)| slice.is_none() || !**connected).map(|(_, peer)| peer)
    }

    /// Peers whose connection is still on its way.
    fn unconnected(&self) -> impl Iterator<Item = Rank> + '_ {
        self.connected.iter().zip(0..).filter(|(connected, _)| !**connected).map(|(_, peer)| peer)
    }

    fn look_whether_ready(&mut self) {
        if !self.is_ready() && self.not_ready().next().is_none() {
            self.peers = self.announced.iter().flatten().copied().collect();
        }
    }

    fn connected(&mut self, peer: Rank) {
        self.connected[peer as usize] = true;
        self.look_whether_ready();
    }

    /// A peer has said where its scratch is; only the first time counts.
    fn announced(&mut self, peer: Rank, slice: RemoteSlice) {
        let ranks = self.announced.len() as u32;
        if let Some(announced) = self.announced.get_mut(peer as usize)
            && slice.len == bank::scratch_bytes(ranks)
        {
            announced.get_or_insert(slice);
        }
        self.look_whether_ready();
    }
}

/// The device, memory and signals that runs act on.
struct Context {
    rank: Rank,
    ranks: u32,
    device: Box<dyn Device>,
    compute: Box<dyn Compute>,
    signals: PeerSignals,
    scratch: Scratch,
    /// How many collectives this rank has completed, without a gap.
    completed: u64,
    /// Every signal that comes is told by [`Run::mark_signalled`](run::Run::mark_signalled), so
    /// that signal slots need not be looked at.
    hears_all: bool,
    now: Nanos,
    /// How long this rank has been in the call, in nanoseconds; zero where nobody has read the
    /// clock.
    elapsed_ns: u64,
}

impl Context {
    /// All ranks but this one.
    fn peers(&self) -> impl Iterator<Item = Rank> + use<> {
        let own = self.rank;
        (0..self.ranks).filter(move |peer| *peer != own)
    }

    /// Tells a peer where this rank's scratch is.
    fn announce_scratch(&mut self, peer: Rank) -> Result<(), PostError> {
        let scratch = self.scratch.announced[self.rank as usize].expect("known since this engine was made");
        self.device.post(peer, &Message::Scratch(scratch).encode(), Urgency::Ordinary)
    }
}

/// One rank's engine; see the module.
pub struct Engine {
    context: Context,
    admission: Admission,
    fast_path: FastPath,
    board: Arc<StatusBoard>,
    queries: Queries,
    deadlocks: DeadlockDetector,
    failure: FailureState,
    observer: Observer,
    /// Kept for their memory.
    events: Vec<Event>,
    signalled: Vec<(Rank, u16)>,
}

impl Engine {
    /// An engine of a connected device whose responder is `board`. Tells the peers where its
    /// scratch is.
    pub(crate) fn new(
        device: Box<dyn Device>,
        compute: Box<dyn Compute>,
        board: Arc<StatusBoard>,
        ranks: u32,
    ) -> Result<Self, EngineError> {
        let mut engine = Self::connecting(device, compute, board, ranks)?;
        for peer in engine.context.peers() {
            engine.context.announce_scratch(peer)?;
            engine.context.scratch.connected(peer);
        }
        Ok(engine)
    }

    /// An engine of a device that still connects; it tells each peer where its scratch is when the
    /// peer is connected.
    pub(crate) fn connecting(
        mut device: Box<dyn Device>,
        compute: Box<dyn Compute>,
        board: Arc<StatusBoard>,
        ranks: u32,
    ) -> Result<Self, EngineError> {
        let rank = device.info().rank;
        let bytes = bank::scratch_bytes(ranks);
        let memory =
            SharedMemory::new(bytes as usize).map_err(|source| EngineError::Scratch { bytes, source })?;
        let scratch = device.register(compute.staging(memory)?)?.whole();
        let space = scratch.region().memory().space();
        assert!(scratch.len() as u64 >= bytes, "staging is {} bytes long, not {bytes}", scratch.len());
        assert!(space == Space::Host || space == compute.space(), "staging is in {space}");
        let signal_slots = (0..ranks)
            .map(|peer| if peer == rank { Signals::new(0) } else { device.signal_slots(peer) })
            .collect();
        Ok(Self {
            context: Context {
                rank,
                ranks,
                device,
                compute,
                signals: PeerSignals::new(signal_slots),
                scratch: Scratch::new(scratch, rank, ranks),
                completed: 0,
                hears_all: false,
                now: Nanos::ZERO,
                elapsed_ns: 0,
            },
            admission: Admission::new(rank, ranks, board.clone()),
            fast_path: FastPath::closed(),
            board,
            queries: Queries::default(),
            deadlocks: DeadlockDetector::default(),
            failure: FailureState::default(),
            observer: Observer::new(Arc::new(Observations::new(rank, ranks, Nanos::ZERO, None))),
            events: Vec::with_capacity(EVENTS_MAX),
            signalled: Vec::new(),
        })
    }

    /// Installs a checker.
    pub fn witness(&mut self, witness: Box<dyn Witness>) {
        *self.context.signals.witness() = Some(witness);
    }

    /// This rank.
    #[must_use]
    pub fn rank(&self) -> Rank {
        self.context.rank
    }

    /// How many ranks there are.
    #[must_use]
    pub fn ranks(&self) -> u32 {
        self.context.ranks
    }

    /// The device, to register memory and to sleep on.
    pub fn device(&mut self) -> &mut dyn Device {
        &mut *self.context.device
    }

    /// The kind of memory in which peers put the bytes that this rank combines.
    #[must_use]
    pub fn scratch_space(&self) -> Space {
        let scratch = self.context.scratch.own.as_ref();
        scratch.map_or(Space::Host, |scratch| scratch.region().memory().space())
    }

    /// Whether all peers have said where their scratch is; runs begin then.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        self.context.scratch.is_ready()
    }

    /// Peers that are not connected yet, or have not said where their scratch is.
    pub fn not_ready(&self) -> impl Iterator<Item = Rank> + '_ {
        self.context.scratch.not_ready()
    }

    /// The fault that ended the group, once no peer can touch this rank's memory.
    #[must_use]
    pub fn failure(&self) -> Option<&Arc<Fault>> {
        self.failure.fault()
    }

    /// Whether the group has failed and every peer that can be reached was told why.
    #[must_use]
    pub fn has_told_failure(&self) -> bool {
        self.is_severing() || self.failure().is_some()
    }

    /// Whether this rank's memory is being taken out of its peers' reach: work of its own, which
    /// waits for nobody.
    #[must_use]
    pub fn is_severing(&self) -> bool {
        self.failure.is_severing()
    }

    /// Whether no run is unfinished.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.admission.is_idle()
    }

    /// When to poll at the latest if the device's wake source does not wake this rank; the device
    /// may want it earlier ([`pleach_transport::Armed::until`]).
    #[must_use]
    pub fn next_wakeup(&self) -> Option<Nanos> {
        let seen_at = self.observer.seen_at();
        if self.failure.is_active() {
            self.admission.next_wakeup(&*self.context.compute, seen_at)
        } else {
            // A failing group waits for its fence, not for its runs.
            self.failure.next_wakeup(seen_at)
        }
    }

    /// Makes progress; true when anything moved.
    pub fn poll(&mut self, now: Nanos) -> bool {
        let mut moved = false;
        let unseen = self.observer.see(now);
        if unseen > UNSEEN_MAX {
            // Answers that came meanwhile were not read yet.
            self.queries.postpone(unseen);
        }
        if self.board.has_unread() {
            self.read_messages(now);
            moved = true;
        }
        self.context.device.poll(now, &mut self.events);
        if !self.events.is_empty() {
            let mut events = std::mem::take(&mut self.events);
            self.handle(&mut events, now);
            self.events = events;
            moved = true;
        }
        self.take_signalled();
        if self.failure.is_active() {
            moved | self.advance_runs(now) | self.check_compute(now) | self.check_time(now)
        } else {
            moved | self.advance_failure(now)
        }
    }

    /// Goes as far as peers' signals allow, where peers act without this rank's device being polled
    /// ([`pleach_transport::Reach::passive`]). It reads neither the device nor the clock, so `now`
    /// may be old where computing takes no time. It costs a tenth of [`Engine::poll`], which it
    /// does not replace. True when anything moved.
    pub fn poll_signals(&mut self, now: Nanos) -> bool {
        if !self.failure.is_active() || self.board.has_unread() {
            return false;
        }
        if self.context.signals.poll_awaited() == Some(false) {
            return false;
        }
        self.context.hears_all = false;
        self.advance_runs(now)
    }

    /// The poll between arming the device's wake source and sleeping on it: takes all that has come
    /// in signal slots since the last poll, which wakes nobody. True when something has come; then
    /// nobody may sleep.
    pub fn poll_before_sleep(&mut self, now: Nanos) -> bool {
        if self.board.has_unread() {
            return true;
        }
        if !self.failure.is_active() {
            return false;
        }
        self.context.hears_all = false;
        self.advance_runs(now)
    }

    /// Hands on the submitted transfers; see [`Device::flush`].
    pub fn flush(&mut self) -> bool {
        self.context.device.flush(Flush::Transfers)
    }

    /// Says bye to the peers; see [`Device::leave`].
    pub fn leave(&mut self) {
        self.context.device.leave();
    }

    /// Hands on everything; whether it has gone out.
    pub fn flush_all(&mut self) -> bool {
        self.context.device.flush(Flush::All)
    }

    /// Events of the device that somebody else polled.
    pub(crate) fn accept(&mut self, mut events: Vec<Event>, now: Nanos) {
        self.handle(&mut events, now);
    }

    fn handle(&mut self, events: &mut Vec<Event>, now: Nanos) {
        for event in events.drain(..) {
            match event {
                Event::Done { id: NO_TRANSFER, .. } => {}
                Event::Connected { peer } => {
                    // A peer that is lost again already has an event of its own.
                    let _ = self.context.announce_scratch(peer);
                    self.context.scratch.connected(peer);
                    self.failure.tell_again();
                }
                Event::Done { id, result: Ok(_) } => {
                    if self.failure.is_active() {
                        self.admission.transfer_done(id);
                    }
                }
                // The loss behind it has an event of its own; a severed peer's transfers were given
                // up here.
                Event::Done { result: Err(error), id } => self.transfer_failed(id, &error, now),
                Event::PeerLost { peer, cause } => {
                    self.board.agreement().lose(peer);
                    let fault = self.fault_of_loss(peer, cause.kind(), cause.to_string(), None, now);
                    self.fail(fault, now);
                }
                Event::Departed { peer } => {
                    self.board.agreement().lose(peer);
                    self.queries.has_left(peer);
                }
                Event::Severed { peer } => self.failure.severed(peer),
            }
        }
    }

    /// Has the lanes looked at whose signals have come, where the witness names their signal slots.
    fn take_signalled(&mut self) {
        let Some(witness) = self.context.signals.witness() else { return };
        self.context.hears_all = witness.take_signalled(&mut self.signalled);
        for (from, signal_slot) in self.signalled.drain(..) {
            self.admission.mark_signalled(from, signal_slot);
        }
    }

    /// Acts on the messages of peers since the last time.
    fn read_messages(&mut self, now: Nanos) {
        for (peer, message) in self.board.take_unread() {
            match message {
                Message::Scratch(slice) => self.context.scratch.announced(peer, slice),
                // The peer is in another call than this rank.
                Message::Query { stream, record } => self.compare(peer, stream, &record, now),
                Message::Answer { stream, comparison, record, completed, blocked_on } => {
                    self.context.signals.hear_credit(peer, stream, completed);
                    self.read_answer(peer, stream, comparison, &record, blocked_on, now);
                }
                Message::ProbeAnswer { probe, stream, run, has_entered, blocked } => {
                    let fault = self.read_probe_answer(peer, probe, (stream, run), has_entered, blocked, now);
                    if let Some(fault) = fault {
                        self.fail(fault, now);
                    }
                }
                Message::Probe { .. } | Message::Claim { .. } => {}
            }
        }
        if self.board.has_failed() {
            self.begin_failing(now);
        }
    }

    /// Whether the processor that computes has failed; then the group has.
    fn check_compute(&mut self, now: Nanos) -> bool {
        let Some(error) = self.context.compute.failure() else { return false };
        let fault = self.fault(FaultKind::Compute, self.context.rank, error.to_string(), None, now);
        self.fail(fault, now);
        true
    }
}

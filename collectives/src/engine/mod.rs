//! The engine: one rank's runs, from call to outcome. Pure: it takes `now`, polls a [`Device`] and
//! never blocks.
//!
//! * Calls are numbered in the order in which they are made, and admitted in that order as their
//!   banks are free (`bank`).
//! * A run is carried out by its executor (`run`) from a [`Program`], which only a proof can make.
//! * Who waits longer than [`QUERY_AFTER`] asks those it waits for what they are doing (`board`);
//!   so a rank that was asked for something else is found although neither of them does anything
//!   wrong by itself.
//! * Who is blocked looks whether those it waits for wait for it (`circle`).
//! * The first [`Fault`] ends the group: it is told to all, the ranks agree on one verdict
//!   (`agreement`), every peer is severed, and **only when no peer can touch local memory any more
//!   are the calls' outcomes given out**.
//!
//! Runs read and write memory by its address, so other crates neither make addresses nor start runs
//! on memory that a run does not hold; groups do, who hold it or borrow it, and simulated ranks
//! ([`Member::start`](crate::simulate::Member::start)).
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
mod at;
mod bank;
mod board;
mod bytes;
mod calls;
mod circle;
mod credit;
mod fault;
mod gate;
mod ground;
mod header;
mod hold;
#[cfg(test)]
mod hostile;
mod layout;
mod message;
mod news;
mod observed;
mod outbox;
mod places;
mod plan;
mod priority;
mod program;
mod records;
mod run;
mod short;
mod slots;
mod step;
mod stream;
mod trouble;
mod waiting;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use pleach_transport::{
    Device, Event, Flush, Mapped, Nanos, PostError, RegisterError, RemoteSlice, SharedMemory, Signals, Slice,
    Space, Urgency,
};

pub use address::Address;
use agreement::Talk;
pub use bank::{TooLarge, signal_slots};
use board::Answer;
pub use board::Board;
pub use bytes::Bytes;
use calls::Journal;
pub use circle::CIRCLE_AFTER;
use circle::Circles;
use credit::Credits;
pub use fault::{Fault, FaultKind};
pub use gate::Gate;
pub use ground::Witness;
pub use plan::{Plan, PlanError};
pub use program::Program;

use pleach_vocabulary::Rank;

use crate::call::CountsError;
use crate::compute::{Compute, ComputeError, Job};
use crate::observe::Observations;
use at::RUNS_MAX;
use bank::Banks;
use ground::Blocked;
use message::Message;
use observed::Observer;
use priority::Priorities;
use run::Run;
use stream::Stream;

/// How long a run may make no progress before peers are asked what they are doing.
pub const QUERY_AFTER: Duration = Duration::from_millis(1);
/// Longest time between two such questions.
const QUERY_INTERVAL_MAX: Duration = Duration::from_millis(32);
/// A peer that has not answered for so long says nothing, whatever it said before.
const SILENT_AFTER: Duration = Duration::from_millis(100);
/// A rank that has not looked for longer, as it was stopped or did something else, has not waited
/// for answers meanwhile.
const UNSEEN_MAX: Duration = Duration::from_millis(50);
const _: () = assert!(UNSEEN_MAX.as_nanos() > QUERY_INTERVAL_MAX.as_nanos());
/// How long a rank tries to tell its peers the verdict before it severs them.
const FLOOD_TIME: Duration = Duration::from_millis(20);
/// The same where a peer that can be reached was called gone by another rank: it has not agreed,
/// and has to hear the verdict to know it.
const FLOOD_TIME_EXPELLED: Duration = Duration::from_millis(100);
/// How often one signal slot is looked at in a glance: some hundred nanoseconds.
const LOOKS: u32 = 128;
/// How long who was refused an access waits to be told why, or to see that the peer is gone, before
/// it blames it.
const DOUBT_TIME: Duration = Duration::from_millis(150);
/// How long a failed group waits for a GPU to end its kernels. They run for milliseconds; one that
/// runs longer hangs, and the process is aborted, since its memory may not be given back while
/// kernels write there.
const COMPUTE_END_LIMIT: Duration = Duration::from_secs(10);
/// How long a device may take to sever all peers, which is this rank's own work: several TiB of
/// memory are copied in that time. Longer only a defect takes, and the process is aborted.
const SEVER_LIMIT: Duration = Duration::from_secs(1800);
/// How often a failed group looks whether its GPU is through.
const COMPUTE_END_INTERVAL: Duration = Duration::from_millis(1);
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
        /// How many.
        bytes: u64,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// Who computes cannot reach scratch memory.
    #[error("scratch memory: {0}")]
    Compute(#[from] ComputeError),
    /// The device refuses scratch memory.
    #[error("scratch memory cannot be registered: {0}")]
    Register(#[from] RegisterError),
    /// A peer is not connected.
    #[error("peers cannot be told of scratch memory: {0}")]
    Post(#[from] PostError),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Free,
    Queued,
    Active,
    Finished,
}

struct SlotOfRun {
    run: Option<Run>,
    state: State,
    /// Closed, where there is one.
    gate: Option<Gate>,
    issue: u64,
    timeout: Duration,
    /// When it was first seen by a poll that knew the time, and when it is given up.
    times: Option<Times>,
    /// It has moved since.
    has_moved: bool,
    query_at: Nanos,
    query_interval: Duration,
}

/// A question to a peer that it has not answered.
#[derive(Clone, Copy)]
struct Asked {
    since: Nanos,
    about: (Stream, u64),
}

#[derive(Clone, Copy)]
struct Times {
    begun_at: Nanos,
    deadline: Nanos,
}

enum Phase {
    Active,
    /// A peer refuses what only a peer that has failed refuses: no run goes on, and for a moment
    /// its reason is waited for.
    Doubting {
        fault: Box<Fault>,
        since: Nanos,
        deadline: Option<Nanos>,
    },
    Failing {
        talk: Talk,
        /// Once the ranks have agreed on it.
        verdict: Option<Arc<Fault>>,
        sever_at: Nanos,
        is_severing: bool,
        waiting_for: Vec<bool>,
    },
    Failed(Arc<Fault>),
}

/// See the module.
pub struct Engine {
    device: Box<dyn Device>,
    compute: Box<dyn Compute>,
    board: Arc<Board>,
    rank: Rank,
    ranks: u32,
    signal_slots: Vec<Signals>,
    consumed: Vec<Vec<u64>>,
    credits: Credits,
    /// Gone when the group has failed: nobody reads it any more, so it need not be kept from peers.
    scratch: Option<Slice>,
    peer_scratch: Vec<Option<RemoteSlice>>,
    /// The same without the options, once all are known.
    peer_scratch_known: Vec<RemoteSlice>,
    connected: Vec<bool>,
    /// What each peer said last of what it does.
    answers: BTreeMap<Rank, Answer>,
    /// The question to each peer that is unanswered.
    asked: BTreeMap<Rank, Asked>,
    left: Vec<bool>,
    circles: Circles,
    slots: Vec<SlotOfRun>,
    /// Unfinished runs in the order of their calls.
    order: Vec<u8>,
    priorities: Priorities,
    /// Closed ones among the unfinished runs.
    gates: usize,
    issues: u64,
    next_run: u64,
    completed: u64,
    history: u64,
    banks: Banks,
    journal: Journal,
    /// See [`Engine::is_passive`].
    is_passive: bool,
    /// How long the short way waits.
    rounds_max: u32,
    /// By rank, where the short way may write it.
    peer_scratch_mapped: Vec<Option<Mapped>>,
    short_job: Job,
    /// Where the last look at the runs stopped.
    blocked: Option<Blocked>,
    events: Vec<Event>,
    /// Signal slots in which something has come, as far as the device says.
    noticed: Vec<(Rank, u16)>,
    /// It has said all since runs were looked at last.
    hears_all: bool,
    witness: Option<Box<dyn Witness>>,
    observer: Observer,
    phase: Phase,
    /// When a poll first found the group failing.
    failing_since: Option<Nanos>,
}

impl Engine {
    /// An engine of a connected device whose responder is `board`. Tells the peers where its
    /// scratch is.
    ///
    /// # Errors
    ///
    /// See [`EngineError`].
    pub(crate) fn new(
        device: Box<dyn Device>,
        compute: Box<dyn Compute>,
        board: Arc<Board>,
        ranks: u32,
    ) -> Result<Self, EngineError> {
        let mut engine = Self::connecting(device, compute, board, ranks)?;
        let rank = engine.rank;
        for peer in (0..ranks).filter(|peer| *peer != rank) {
            engine.greet(peer)?;
            engine.connected[peer as usize] = true;
        }
        Ok(engine)
    }

    /// An engine of a device that still connects; it tells each peer where its scratch is as that
    /// is there.
    ///
    /// # Errors
    ///
    /// See [`EngineError`].
    pub(crate) fn connecting(
        mut device: Box<dyn Device>,
        compute: Box<dyn Compute>,
        board: Arc<Board>,
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
        let signal_slots: Vec<Signals> = (0..ranks)
            .map(|peer| if peer == rank { Signals::new(0) } else { device.signal_slots(peer) })
            .collect();
        let mut peer_scratch = vec![None; ranks as usize];
        peer_scratch[rank as usize] = Some(scratch.remote());
        let mut engine = Self {
            device,
            compute,
            journal: Journal::new(rank, board.clone(), ranks),
            board,
            rank,
            ranks,
            consumed: signal_slots.iter().map(|signal_slots| vec![0; signal_slots.len()]).collect(),
            signal_slots,
            credits: Credits::new(ranks),
            scratch: Some(scratch),
            peer_scratch,
            peer_scratch_known: Vec::new(),
            connected: (0..ranks).map(|peer| peer == rank).collect(),
            answers: BTreeMap::new(),
            asked: BTreeMap::new(),
            left: vec![false; ranks as usize],
            circles: Circles::default(),
            slots: Vec::new(),
            order: Vec::new(),
            priorities: Priorities::default(),
            gates: 0,
            issues: 0,
            next_run: 0,
            completed: 0,
            history: 0,
            banks: Banks::default(),
            is_passive: false,
            rounds_max: 0,
            peer_scratch_mapped: Vec::new(),
            short_job: step::empty_job(),
            blocked: None,
            events: Vec::with_capacity(EVENTS_MAX),
            noticed: Vec::new(),
            hears_all: false,
            witness: None,
            observer: Observer::new(Arc::new(Observations::new(rank, ranks, Nanos::ZERO, None))),
            phase: Phase::Active,
            failing_since: None,
        };
        engine.note_scratch();
        Ok(engine)
    }

    fn greet(&mut self, peer: Rank) -> Result<(), PostError> {
        let scratch = self.peer_scratch[self.rank as usize].expect("known since this engine was made");
        self.device.post(peer, &Message::Scratch(scratch).encode(), Urgency::Ordinary)
    }

    /// Installs a checker.
    pub fn witness(&mut self, witness: Box<dyn Witness>) {
        self.witness = Some(witness);
    }

    /// This rank.
    #[must_use]
    pub fn rank(&self) -> Rank {
        self.rank
    }

    /// How many ranks there are.
    #[must_use]
    pub fn ranks(&self) -> u32 {
        self.ranks
    }

    /// The device, to register memory and to sleep on.
    pub fn device(&mut self) -> &mut dyn Device {
        &mut *self.device
    }

    /// What memory peers put in what this rank combines.
    #[must_use]
    pub fn scratch_space(&self) -> Space {
        self.scratch.as_ref().map_or(Space::Host, |scratch| scratch.region().memory().space())
    }

    /// Whether all peers have said where their scratch is; runs begin then.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        self.peer_scratch_known.len() == self.ranks as usize
    }

    /// Peers that have not said yet where their scratch is.
    pub fn not_ready(&self) -> impl Iterator<Item = Rank> + '_ {
        (0..self.ranks)
            .filter(|peer| self.peer_scratch[*peer as usize].is_none() || !self.connected[*peer as usize])
    }

    /// What ended the group, once its memory is out of its peers' reach.
    #[must_use]
    pub fn failure(&self) -> Option<&Arc<Fault>> {
        match &self.phase {
            Phase::Failed(fault) => Some(fault),
            _ => None,
        }
    }

    /// Whether the group has failed and every peer that can be reached has been told why.
    #[must_use]
    pub fn has_told_failure(&self) -> bool {
        self.is_severing() || self.failure().is_some()
    }

    /// Whether this rank's memory is being taken out of its peers' reach: work of its own, which
    /// waits for nobody.
    #[must_use]
    pub fn is_severing(&self) -> bool {
        matches!(self.phase, Phase::Failing { is_severing: true, .. })
    }

    /// Whether no run is unfinished.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.order.is_empty()
    }

    /// When to poll at the latest even if the device's wake source does not ring; the device may
    /// want it earlier ([`pleach_transport::Armed::until`]).
    #[must_use]
    pub fn next_wakeup(&self) -> Option<Nanos> {
        let is_active = matches!(self.phase, Phase::Active);
        let runs = self.order.iter().filter_map(|slot| {
            let slot = &self.slots[usize::from(*slot)];
            // A failing group waits for its fence, not for its runs.
            let run = slot.run.as_ref().filter(|_| is_active)?;
            let computed = if run.is_computing() {
                self.compute.next_wakeup().unwrap_or(Nanos::ZERO)
            } else {
                Nanos::MAX
            };
            // What has not been seen yet wants to be.
            let timed = slot.times.map_or(Nanos::ZERO, |times| times.deadline.min(slot.query_at));
            let gated = slot.gate_wakeup(self.observer.seen_at).unwrap_or(Nanos::MAX);
            Some(computed.min(timed).min(gated))
        });
        let failing = match &self.phase {
            Phase::Failing { talk, verdict: None, .. } => Some(talk.wakeup()),
            Phase::Failing { sever_at, is_severing: false, .. } => {
                Some((*sever_at).max(self.observer.seen_at + COMPUTE_END_INTERVAL))
            }
            Phase::Doubting { since, deadline, .. } => {
                Some(deadline.unwrap_or(Nanos::MAX).min(*since + DOUBT_TIME))
            }
            _ => None,
        };
        runs.chain(failing).min()
    }

    /// Makes progress; true when anything moved.
    pub fn poll(&mut self, now: Nanos) -> bool {
        let mut moved = false;
        let unseen = now.since(self.observer.seen_at);
        self.observer.seen_at = now;
        if unseen > UNSEEN_MAX {
            // What peers answered meanwhile has not been read yet.
            self.asked.values_mut().for_each(|asked| asked.since += unseen);
        }
        if self.board.has_news() {
            self.read_news(now);
            moved = true;
        }
        self.device.poll(now, &mut self.events);
        if !self.events.is_empty() {
            self.read_events(now);
            moved = true;
        }
        self.hear_signals();
        match self.phase {
            Phase::Active => moved | self.advance_runs(now) | self.check_compute(now) | self.check_time(now),
            Phase::Doubting { .. } => moved | self.end_doubt(now),
            Phase::Failing { .. } => moved | self.agree(now) | self.sever(now),
            Phase::Failed(_) => moved,
        }
    }

    /// Goes as far as what peers did by themselves allows, where they can
    /// ([`pleach_transport::Reach::passive`]): neither the device nor the time is looked at, so
    /// `now` may be old where computing takes no time. Not instead of [`Engine::poll`], but many
    /// times between two of it: it costs a tenth. True when anything moved.
    pub fn glance(&mut self, now: Nanos) -> bool {
        if !matches!(self.phase, Phase::Active) || self.board.has_news() {
            return false;
        }
        if let Some(Blocked { from, signal_slot, count }) = self.blocked {
            // The tightest of loops: what is on its way is seen at once, and nothing else is stored
            // meanwhile.
            let signal_slots = &self.signal_slots[from as usize];
            if (0..LOOKS).all(|_| signal_slots.count(signal_slot) == count) {
                return false;
            }
        }
        self.hears_all = false;
        self.advance_runs(now)
    }

    /// The look between arming the device's wake source and sleeping on it: takes all that has come
    /// in signal slots since the last poll, which wakes nobody. True when something has
    /// come; then nobody may sleep.
    pub fn look_again(&mut self, now: Nanos) -> bool {
        if self.board.has_news() {
            return true;
        }
        if !matches!(self.phase, Phase::Active) {
            return false;
        }
        self.hears_all = false;
        self.advance_runs(now)
    }

    /// Whether all peers write here without this rank's device being polled, and what is computed
    /// ends at once: then [`Engine::glance`] is worth it.
    #[must_use]
    pub fn is_passive(&self) -> bool {
        self.is_passive
    }

    /// Hands on what was submitted; see [`Device::flush`].
    pub fn flush(&mut self) -> bool {
        self.device.flush(Flush::Transfers)
    }

    /// Says bye to the peers; see [`Device::leave`].
    pub fn leave(&mut self) {
        self.device.leave();
    }

    /// Hands on everything; whether it has gone out.
    pub fn flush_all(&mut self) -> bool {
        self.device.flush(Flush::All)
    }
}

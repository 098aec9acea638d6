//! The engine: one rank's runs, from call to outcome. Pure: it takes `now`, polls a [`Device`] and never blocks.
//!
//! * Calls are numbered in the order in which they are made, and admitted in that order as their banks are free (`bank`).
//! * A run is carried out by its executor (`run`) from a [`Program`], which only a proof can make.
//! * Who waits longer than [`QUERY_AFTER`] asks those it waits for what they are doing (`board`); so a rank that
//!   was asked for something else is found although neither of them does anything wrong by itself.
//! * Who is blocked looks whether those it waits for wait for it (`circle`).
//! * The first [`Fault`] ends the group: it is told to all, every peer is severed, and **only when no peer can touch
//!   local memory any more are the calls' outcomes given out**.

mod address;
mod bank;
mod board;
mod circle;
mod counts;
mod exchange;
mod fault;
mod header;
mod layout;
mod message;
mod observed;
mod places;
mod plan;
mod priority;
mod program;
mod run;
mod signature;
mod step;
mod trouble;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use pleach_transport::{
    Cells, Device, Event, Inline, Mapped, Nanos, Notice, PostError, RegisterError, RemoteSlice, SharedMemory,
    Slice, Transfer,
};

pub use address::Address;
pub use bank::{CELLS, TooLarge};
use board::Answer;
pub use board::Board;
pub use circle::CIRCLE_AFTER;
use circle::Circles;
pub use counts::{Counts, CountsError, Paired};
pub use fault::{Fault, FaultKind};
pub use plan::{Plan, PlanError};
pub use program::Program;
pub use run::{Bytes, Witness};
pub use signature::{Amount, Descriptor};

use crate::Rank;
use crate::compute::{Compute, Job};
use crate::observe::Observations;
use bank::{Banks, CREDIT_CELL, Class};
use message::{Message, Record, Verdict};
use observed::Observer;
use priority::Priorities;
use run::{Bank, Blocked, Ground, NOBODY, Parameters, RUNS_MAX, Run, run_of};
use signature::Stream;

/// How long a run may make no progress before peers are asked what they are doing.
pub const QUERY_AFTER: Duration = Duration::from_millis(1);
/// Longest time between two such questions.
const QUERY_INTERVAL_MAX: Duration = Duration::from_millis(32);
/// A peer that has not answered for so long says nothing, whatever it said before.
const SILENT_AFTER: Duration = Duration::from_millis(100);
/// How long a failing group tries to tell its peers before it severs them.
const FLOOD_TIME: Duration = Duration::from_millis(20);
/// How often one cell is looked at in a glance: some hundred nanoseconds.
const LOOKS: u32 = 128;
/// How long who was refused an access waits to be told why, or to see that the peer is gone, before it blames it.
const DOUBT_TIME: Duration = Duration::from_millis(150);
/// Events taken from the device at a time.
const EVENTS_MAX: usize = 256;

/// Names a run of an engine until its outcome was taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RunId {
    slot: u8,
    issue: u64,
}

/// Why a call was not accepted.
#[derive(Clone, Debug, thiserror::Error)]
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
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EngineError {
    /// No scratch memory.
    #[error(
        "{bytes} bytes of scratch memory cannot be had; free memory on its host, or raise its limit ('ulimit -v')"
    )]
    Scratch {
        /// How many.
        bytes: u64,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// The device refuses scratch memory.
    #[error("scratch memory cannot be registered")]
    Register(#[from] RegisterError),
    /// A peer is not connected.
    #[error("peers cannot be told of scratch memory")]
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
    issue: u64,
    timeout: Duration,
    /// When it was first seen by a poll that knew the time, and when it is given up.
    times: Option<Times>,
    /// It has moved since.
    has_moved: bool,
    query_at: Nanos,
    query_interval: Duration,
}

#[derive(Clone, Copy)]
struct Times {
    begun_at: Nanos,
    deadline: Nanos,
}

enum Phase {
    Active,
    /// A peer refuses what only a peer that has failed refuses: no run goes on, and for a moment its reason is waited for.
    Doubting {
        fault: Box<Fault>,
        since: Nanos,
        deadline: Option<Nanos>,
    },
    Failing {
        fault: Arc<Fault>,
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
    cells: Vec<Cells>,
    consumed: Vec<Vec<u64>>,
    credits: Vec<u64>,
    /// Gone when the group has failed: nobody reads it any more, so it need not be kept from peers.
    scratch: Option<Slice>,
    peer_scratch: Vec<Option<RemoteSlice>>,
    /// The same without the options, once all are known.
    peer_scratch_known: Vec<RemoteSlice>,
    connected: Vec<bool>,
    /// What each peer said last of what it does.
    answers: BTreeMap<Rank, Answer>,
    /// Since when a question to a peer is unanswered.
    asked: BTreeMap<Rank, Nanos>,
    left: Vec<bool>,
    circles: Circles,
    slots: Vec<SlotOfRun>,
    /// Unfinished runs in the order of their calls.
    order: Vec<u8>,
    priorities: Priorities,
    issues: u64,
    next_run: u64,
    completed: u64,
    history: u64,
    banks: Banks,
    message_runs: BTreeMap<(Rank, Rank), u64>,
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
    witness: Option<Box<dyn Witness>>,
    observer: Observer,
    phase: Phase,
}

impl Engine {
    /// An engine of a connected device whose responder is `board`. Tells the peers where its scratch is.
    ///
    /// # Errors
    ///
    /// See [`EngineError`].
    pub fn new(
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

    /// An engine of a device that still connects; it tells each peer where its scratch is as that is there.
    ///
    /// # Errors
    ///
    /// See [`EngineError`].
    pub fn connecting(
        mut device: Box<dyn Device>,
        compute: Box<dyn Compute>,
        board: Arc<Board>,
        ranks: u32,
    ) -> Result<Self, EngineError> {
        let rank = device.rank();
        let bytes = bank::scratch_bytes(ranks);
        let memory =
            SharedMemory::new(bytes as usize).map_err(|source| EngineError::Scratch { bytes, source })?;
        let scratch = device.register(memory)?.whole();
        let cells: Vec<Cells> = (0..ranks)
            .map(|peer| if peer == rank { Cells::on_heap(0) } else { device.cells(peer) })
            .collect();
        let mut peer_scratch = vec![None; ranks as usize];
        peer_scratch[rank as usize] = Some(scratch.remote());
        let mut engine = Self {
            device,
            compute,
            board,
            rank,
            ranks,
            consumed: cells.iter().map(|cells| vec![0; cells.len()]).collect(),
            cells,
            credits: vec![0; ranks as usize],
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
            issues: 0,
            next_run: 0,
            completed: 0,
            history: 0,
            banks: Banks::default(),
            message_runs: BTreeMap::new(),
            is_passive: false,
            rounds_max: 0,
            peer_scratch_mapped: Vec::new(),
            short_job: step::empty_job(),
            blocked: None,
            events: Vec::with_capacity(EVENTS_MAX),
            witness: None,
            observer: Observer::new(Arc::new(Observations::new(rank, ranks, Nanos::ZERO, None))),
            phase: Phase::Active,
        };
        engine.note_scratch();
        Ok(engine)
    }

    fn greet(&mut self, peer: Rank) -> Result<(), PostError> {
        let scratch = self.peer_scratch[self.rank as usize].expect("known since this engine was made");
        self.device.post(peer, &Message::Scratch(scratch).encode())
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

    /// Whether this rank's memory is being taken out of its peers' reach: work of its own, which waits for nobody.
    #[must_use]
    pub fn is_severing(&self) -> bool {
        matches!(self.phase, Phase::Failing { is_severing: true, .. })
    }

    /// Whether no run is unfinished.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.order.is_empty()
    }

    /// When to poll at the latest even if the device's bell does not ring.
    #[must_use]
    pub fn next_wakeup(&self) -> Option<Nanos> {
        let is_active = matches!(self.phase, Phase::Active);
        let runs = self.order.iter().filter_map(|slot| {
            let slot = &self.slots[usize::from(*slot)];
            // A failing group waits for silence, not for its runs.
            let run = slot.run.as_ref().filter(|_| is_active)?;
            let computed = if run.is_computing() {
                self.compute.next_wakeup().unwrap_or(Nanos::ZERO)
            } else {
                Nanos::MAX
            };
            // What has not been seen yet wants to be.
            let timed = slot.times.map_or(Nanos::ZERO, |times| times.deadline.min(slot.query_at));
            Some(computed.min(timed))
        });
        let failing = match &self.phase {
            Phase::Failing { sever_at, is_severing: false, .. } => Some(*sever_at),
            Phase::Doubting { since, deadline, .. } => {
                Some(deadline.unwrap_or(Nanos::MAX).min(*since + DOUBT_TIME))
            }
            _ => None,
        };
        runs.chain(failing).chain(self.device.next_wakeup()).min()
    }

    /// Accepts a call; its run begins when its turn comes, its time with the next poll. `input` and `output` are as long as
    /// the collective's parts say; the output may be the input (or hold it as one of its parts).
    ///
    /// # Errors
    ///
    /// See [`StartError`].
    pub fn start(
        &mut self,
        plan: &Arc<Plan>,
        input: Bytes,
        output: Bytes,
        timeout: Duration,
    ) -> Result<RunId, StartError> {
        if matches!(self.phase, Phase::Failing { .. } | Phase::Failed(_)) {
            return Err(StartError::Failed(self.failure_during(plan)));
        }
        plan.check_lengths(&input, &output)?;
        let slot = self.free_slot().ok_or(StartError::TooManyRuns)?;
        let (number, history, bank) = self.number(plan);
        let parameters = Parameters { number, history, bank, input, output };
        let entry = &mut self.slots[usize::from(slot)];
        match &mut entry.run {
            Some(run) => run.begin(plan, parameters),
            None => entry.run = Some(Run::new(slot, plan, parameters)),
        }
        let id = self.enter(slot, State::Queued, timeout);
        if self.order.len() == 1 && self.is_passive {
            // What peers wait for goes out first; what is left to be noted takes no time of theirs.
            self.blocked = None;
            self.glance(Nanos::ZERO);
        }
        let record = Record {
            run: number,
            signature: plan.signature,
            history,
            descriptor: plan.descriptor.to_words(),
        };
        if let Counts::Paired(counts) = &plan.counts {
            self.board.begin_paired(number, counts.clone());
        }
        self.board.begin(plan.stream, &record);
        Ok(id)
    }

    /// Puts the run of a slot among those that are under way.
    fn enter(&mut self, slot: u8, state: State, timeout: Duration) -> RunId {
        self.issues += 1;
        let entry = &mut self.slots[usize::from(slot)];
        if let Some(run) = &mut entry.run {
            run.noted.sample = self.observer.take_sample();
        }
        entry.state = state;
        entry.issue = self.issues;
        entry.timeout = timeout;
        entry.times = None;
        entry.query_interval = QUERY_AFTER;
        self.order.push(slot);
        RunId { slot, issue: self.issues }
    }

    /// Why the group has failed, as the first call that is told of it sees it.
    fn failure_during(&mut self, plan: &Plan) -> Arc<Fault> {
        let (Phase::Failing { fault, .. } | Phase::Failed(fault)) = &mut self.phase else {
            unreachable!("asked of a group that has failed")
        };
        if fault.during.is_none() {
            // It was found between two calls: the first that is told of it says which it was.
            let fault = Arc::make_mut(fault);
            (fault.during, fault.run) = (Some(plan.descriptor), self.next_run);
        }
        fault.clone()
    }

    fn free_slot(&mut self) -> Option<u8> {
        if let Some(index) = self.slots.iter().position(|slot| slot.state == State::Free) {
            return Some(index as u8);
        }
        if self.slots.len() == RUNS_MAX {
            return None;
        }
        self.slots.push(SlotOfRun {
            run: None,
            state: State::Free,
            issue: 0,
            timeout: Duration::ZERO,
            times: None,
            has_moved: false,
            query_at: Nanos::ZERO,
            query_interval: QUERY_AFTER,
        });
        Some(self.slots.len() as u8 - 1)
    }

    /// Number, history and bank of the next run of this plan's stream.
    fn number(&mut self, plan: &Plan) -> (u64, u64, Bank) {
        match plan.stream {
            Stream::Collectives => {
                let number = self.next_run;
                self.next_run += 1;
                self.history = signature::chain(self.history, plan.signature);
                (number, self.history, self.banks.take(plan.class, number))
            }
            Stream::Messages { from, to } => {
                let next = self.message_runs.entry((from, to)).or_default();
                let number = *next;
                *next += 1;
                (number, plan.signature, bank::message_bank(self.rank, from, to, number))
            }
        }
    }

    /// Whether a run has ended well and its outcome was not taken.
    #[must_use]
    pub fn has_ended(&self, id: RunId) -> bool {
        self.slots[usize::from(id.slot)].state == State::Finished
    }

    /// The outcome of a run, once; `None` while it is under way.
    ///
    /// # Panics
    ///
    /// When the run's outcome was taken before.
    pub fn take_outcome(&mut self, id: RunId) -> Option<Result<(), Arc<Fault>>> {
        let slot = &mut self.slots[usize::from(id.slot)];
        assert!(slot.issue == id.issue && slot.state != State::Free, "an outcome is taken once");
        if slot.state == State::Finished {
            slot.state = State::Free;
            return Some(Ok(()));
        }
        let Phase::Failed(fault) = &self.phase else { return None };
        slot.state = State::Free;
        if let Some(run) = &mut slot.run {
            run.release();
        }
        self.order.retain(|other| *other != id.slot);
        Some(Err(fault.clone()))
    }

    /// Makes progress; true when anything moved.
    pub fn poll(&mut self, now: Nanos) -> bool {
        let mut moved = false;
        self.observer.seen_at = now;
        if self.board.has_news() {
            self.read_news(now);
            moved = true;
        }
        self.device.poll(now, &mut self.events);
        if !self.events.is_empty() {
            self.read_events(now);
            moved = true;
        }
        match self.phase {
            Phase::Active => moved | self.advance_runs(now) | self.check_time(now),
            Phase::Doubting { .. } => moved | self.end_doubt(now),
            Phase::Failing { .. } => moved | self.sever(now),
            Phase::Failed(_) => moved,
        }
    }

    /// Goes as far as what peers did by themselves allows, where they can ([`pleach_transport::Reach::passive`]): neither
    /// the device nor the time is looked at, so `now` may be old where computing takes no time. Not instead of
    /// [`Engine::poll`], but many times between two of it: it costs a tenth. True when anything moved.
    pub fn glance(&mut self, now: Nanos) -> bool {
        if !matches!(self.phase, Phase::Active) || self.board.has_news() {
            return false;
        }
        if let Some(Blocked { from, cell, count }) = self.blocked {
            // The tightest of loops: what is on its way is seen at once, and nothing else is stored meanwhile.
            let cells = &self.cells[from as usize];
            if (0..LOOKS).all(|_| cells.count(cell) == count) {
                return false;
            }
        }
        self.advance_runs(now)
    }

    /// Whether all peers write here without this rank's device being polled, and what is computed ends at once: then
    /// [`Engine::glance`] is worth it.
    #[must_use]
    pub fn is_passive(&self) -> bool {
        self.is_passive
    }

    /// Hands on what was submitted; see [`Device::flush`].
    pub fn flush(&mut self) -> bool {
        self.device.flush()
    }

    /// Says goodbye to the peers; see [`Device::leave`].
    pub fn leave(&mut self) {
        self.device.leave();
    }

    /// Whether everything has gone out.
    #[must_use]
    pub fn is_flushed(&self) -> bool {
        self.device.is_flushed()
    }

    fn advance_runs(&mut self, now: Nanos) -> bool {
        if !self.is_ready() {
            return false;
        }
        self.blocked = None;
        if self.priorities.matter() {
            return self.advance_by_priority(now);
        }
        let mut moved = false;
        let mut index = 0;
        let mut may_admit = true;
        while index < self.order.len() {
            let slot = self.order[index];
            if self.admit(index, &mut may_admit) == State::Active {
                match self.advance(slot, now) {
                    Ok(true) => moved = true,
                    Ok(false) => {}
                    Err(fault) => {
                        self.fail(*fault, now);
                        return true;
                    }
                }
                if self.slots[usize::from(slot)].state == State::Finished {
                    self.order.remove(index);
                    self.note_completed();
                    continue;
                }
            }
            index += 1;
        }
        moved
    }

    /// Admits a run, by its place in the order, if its turn has come. `may_admit`: whether that of the collectives has.
    fn admit(&mut self, index: usize, may_admit: &mut bool) -> State {
        let slot = usize::from(self.order[index]);
        let entry = &self.slots[slot];
        if entry.state != State::Queued {
            return entry.state;
        }
        let Some(run) = &entry.run else { unreachable!("an ordered slot holds a run") };
        let stream = run.stream();
        let is_free = match stream {
            Stream::Collectives => *may_admit && self.completed >= run.parameters.bank.needed,
            // One message of a pair at a time; earlier ones stand earlier in the order.
            stream => !has_earlier(&self.slots, &self.order[..index], stream),
        };
        if is_free {
            self.slots[slot].state = State::Active;
        } else {
            *may_admit &= stream != Stream::Collectives;
        }
        self.slots[slot].state
    }

    fn advance(&mut self, slot: u8, now: Nanos) -> Result<bool, Box<Fault>> {
        let elapsed_ns = self.elapsed_ns(slot, now);
        let entry = &mut self.slots[usize::from(slot)];
        let (Some(run), Some(scratch)) = (&mut entry.run, &self.scratch) else {
            unreachable!("an active slot holds a run, and a group that works has scratch")
        };
        let mut ground = Ground {
            device: &mut *self.device,
            compute: &mut *self.compute,
            cells: &self.cells,
            consumed: &mut self.consumed,
            credits: &mut self.credits,
            scratch,
            peer_scratch: &self.peer_scratch_known,
            completed: self.completed,
            witness: self.witness.as_deref_mut(),
            blocked: &mut self.blocked,
            now,
            elapsed_ns,
        };
        let moved = match run.advance(&mut ground) {
            Ok(moved) => moved,
            Err(trouble) => return Err(Box::new(self.fault_of(slot, &trouble, now))),
        };
        if elapsed_ns > 0 && !run.is_complete() {
            run.look_for_arrivals(&ground);
        }
        entry.has_moved |= moved;
        if run.is_complete() {
            entry.state = State::Finished;
            run.release();
            if entry.query_interval > QUERY_AFTER {
                self.board.block_on(None);
            }
            if run.stream() == Stream::Collectives {
                let number = run.parameters.number;
                let class = run.plan().class;
                self.note_completed_run(slot, number, class);
            }
            self.note_ended(slot, now);
        }
        if moved {
            self.note_moved(slot);
        }
        Ok(moved)
    }

    /// Tells those who wrote to this rank and heard nothing from it that their bank is free again.
    fn note_completed_run(&mut self, slot: u8, number: u64, class: Class) {
        if !bank::credit_is_due(class, number) {
            return;
        }
        // Without a gap: earlier runs may be under way still, and then their banks are not free.
        let unfinished = self.first_unfinished(Some(slot));
        let Some(run) = &self.slots[usize::from(slot)].run else { return };
        let program = run.plan().program.clone();
        self.tell_progress(&program, class, number, unfinished);
    }

    /// `unfinished`: the first collective that is not complete, now that run `number` is.
    fn tell_progress(&mut self, program: &Program, class: Class, number: u64, unfinished: u64) {
        if !bank::credit_is_due(class, number) {
            return;
        }
        if let Some(witness) = &mut self.witness {
            witness.completed(unfinished);
        }
        for peer in &program.silent_to {
            let payload = Inline::new(&unfinished.to_le_bytes()).expect("8 bytes fit");
            let notice = Notice { cell: CREDIT_CELL, payload };
            // Lost, left or full: then the peer asks when it needs to know.
            let _ = self.device.submit(*peer, Transfer::Notify(notice), NOBODY);
        }
    }

    /// Number of the first collective that is not complete.
    fn first_unfinished(&self, except: Option<u8>) -> u64 {
        let unfinished = self.order.iter().filter(|slot| Some(**slot) != except).filter_map(|slot| {
            let run = self.slots[usize::from(*slot)].run.as_ref()?;
            (run.stream() == Stream::Collectives).then_some(run.parameters.number)
        });
        unfinished.min().unwrap_or(self.next_run)
    }

    fn note_completed(&mut self) {
        self.completed = self.first_unfinished(None);
        if let Some(witness) = &mut self.witness {
            witness.completed(self.completed);
        }
        self.board.complete(self.completed);
    }

    /// Events of the device that somebody else polled.
    pub fn accept(&mut self, mut events: Vec<Event>, now: Nanos) {
        self.handle(&mut events, now);
    }

    fn read_events(&mut self, now: Nanos) {
        let mut events = std::mem::take(&mut self.events);
        self.handle(&mut events, now);
        self.events = events;
    }

    fn handle(&mut self, events: &mut Vec<Event>, now: Nanos) {
        for event in events.drain(..) {
            match event {
                Event::Done { id: NOBODY, .. } => {}
                Event::Connected { peer } => {
                    // Lost again already: that is told by its own event.
                    let _ = self.greet(peer);
                    self.connected[peer as usize] = true;
                    self.note_scratch();
                }
                Event::Done { id, result: Ok(_) } => {
                    if matches!(self.phase, Phase::Active)
                        && let Some(run) = self.slots.get_mut(run_of(id)).and_then(|slot| slot.run.as_mut())
                    {
                        run.transfer_done(id);
                    }
                }
                // The loss behind it is told by its own event; a severed peer's transfers were given up here.
                Event::Done { result: Err(error), id } => self.transfer_failed(id, &error, now),
                Event::PeerLost { peer, cause } => {
                    let fault = self.fault(FaultKind::Lost, peer, cause.to_string(), None, now);
                    self.fail(fault, now);
                }
                Event::Left { peer } => self.left[peer as usize] = true,
                Event::Severed { peer } => {
                    if let Phase::Failing { waiting_for, .. } = &mut self.phase {
                        waiting_for[peer as usize] = false;
                    }
                }
            }
        }
    }

    pub(super) fn read_news(&mut self, now: Nanos) {
        let news = self.board.take_news();
        for (peer, slice) in news.scratch {
            if let Some(entry) = self.peer_scratch.get_mut(peer as usize)
                && slice.len == bank::scratch_bytes(self.ranks)
            {
                entry.get_or_insert(slice);
            }
        }
        self.note_scratch();
        for (peer, stream, theirs) in news.differs {
            self.compare(peer, stream, &theirs, now);
        }
        for (peer, standing) in news.standings {
            if let Some(fault) = self.read_standing(peer, &standing, now) {
                self.fail(fault, now);
            }
        }
        for answer in news.answers {
            let Answer { peer, stream, verdict, record, completed, .. } = answer;
            if let Some(credit) = self.credits.get_mut(peer as usize) {
                *credit = (*credit).max(completed);
            }
            if let Some(witness) = &mut self.witness {
                witness.heard_completed(peer, completed);
            }
            match verdict {
                Verdict::Different => self.compare(peer, stream, &record, now),
                Verdict::EarlierDiffers => self.ask_earlier(peer, stream, record.run),
                Verdict::Same | Verdict::NotYet | Verdict::Forgotten => {}
            }
            self.asked.remove(&peer);
            self.answers.insert(peer, answer);
        }
        if let Some(mut fault) = news.fault {
            if fault.during.is_none() && fault.found_by != self.rank {
                // Who found it was in no call; this rank's own says what it ended.
                let run = self.order.first().and_then(|slot| self.slots[usize::from(*slot)].run.as_ref());
                if let Some(run) = run {
                    (fault.during, fault.run) = (Some(run.plan().descriptor), run.parameters.number);
                }
            } else if fault.during.is_none() {
                let slot = self.order.first().copied();
                let own = self.fault(fault.kind, fault.subject, std::mem::take(&mut fault.detail), slot, now);
                fault = own;
            }
            self.settle(fault, now);
        }
    }

    fn note_scratch(&mut self) {
        if !self.is_ready() && self.not_ready().next().is_none() {
            self.peer_scratch_known = self.peer_scratch.iter().flatten().copied().collect();
        }
    }
}

/// Whether an earlier run of the stream is unfinished.
fn has_earlier(slots: &[SlotOfRun], earlier: &[u8], stream: Stream) -> bool {
    earlier
        .iter()
        .any(|slot| slots[usize::from(*slot)].run.as_ref().is_some_and(|run| run.stream() == stream))
}

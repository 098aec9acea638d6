//! Admission: from a call to its outcome. Which runs there are, in which order they begin, and
//! which of them goes first.
//!
//! * A call gets a number, a bank and a slot, in the order of calls. A slot holds one run at a time
//!   and is used again for its memory.
//! * A run begins when its turn has come: a collective when its bank is free, a message when the
//!   one before between the same ranks has ended.
//! * A [`Gate`] keeps a run from beginning until work elsewhere, as in a GPU's stream, is done.
//!   This rank touches no byte of the run's memory before, nor does a peer, which does so only
//!   after a signal of this run. Later calls wait for their turn behind the run.
//! * Where pairs connect on first use, a run begins when the peers of its plan are ready. It asks
//!   for their connections when it is accepted. Later collectives wait for their turn behind it.
//! * Of the runs that have begun, one of a higher priority takes all steps that it can before one
//!   of a lower priority takes its next. So an operation that was started late but is needed early,
//!   as the first layer's gradients are, overtakes operations that were started before.
//!
//! **Invariant:** numbers, banks and signatures follow from the order of calls alone. Gates and
//! priorities decide about time, so ranks need not agree about them.

use std::cmp::Reverse;
use std::sync::Arc;
use std::time::Duration;

use pleach_transport::{Nanos, TransferId};
use pleach_vocabulary::Rank;
use pleach_vocabulary::digest::chain;

use super::fault::{Fault, FaultKind};
use super::plan::{Plan, Program};
use super::queries::{QUERY_AFTER, QUERY_DOUBLINGS_MAX, QUERY_INTERVAL_MAX};
use super::run::{LaneProgress, Parameters, RoundInput, Run};
use super::status_board::{MessageRecords, StatusBoard};
use super::{
    Banks, Bytes, Engine, MessageBanks, RUNS_MAX, RunId, RunNumber, ScratchLayout, StartError, StepAddress,
    Stream, credit_is_due, message_credit_is_due,
};
use crate::call::Counts;
use crate::compute::{Compute, ComputeError};

/// Returns whether the gate is open; called again and again until it is. Never waits. An error ends
/// the group.
pub type Gate = Box<dyn FnMut() -> Result<bool, ComputeError> + Send>;

/// How often a rank that has nothing else to do looks at a closed gate: nothing wakes the rank when
/// the gate opens.
const GATE_INTERVAL: Duration = Duration::from_micros(50);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Free,
    Queued,
    Active,
    Finished,
}

#[derive(Clone, Copy)]
struct Times {
    begun_at: Nanos,
    deadline: Nanos,
}

/// A slot for runs. There may be a run in it that has ended.
struct RunSlot {
    run: Option<Run>,
    state: State,
    /// The gate of a queued run while it is closed.
    gate: Option<Gate>,
    /// Peers of a queued run's plan are not ready yet.
    awaits_peers: bool,
    /// The run's time does not run yet: see [`Engine::hold_time`].
    is_held: bool,
    issue: u64,
    priority: i32,
    timeout: Duration,
    /// Since the first poll that knew the time.
    times: Option<Times>,
    /// Whether the run has moved since its time was checked.
    has_moved: bool,
    query_at: Nanos,
    /// How often peers were queried about the run since it moved last.
    queries: u32,
}

impl RunSlot {
    fn is_free(&self) -> bool {
        matches!(self.state, State::Free | State::Finished)
    }

    fn stream(&self) -> Option<Stream> {
        self.run.as_ref().map(Run::stream)
    }

    /// Whether peers were queried about the run since it moved last.
    fn has_queried(&self) -> bool {
        self.queries > 0
    }
}

/// What is due for a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Due {
    Nothing,
    Query,
    /// Its deadline has passed.
    Fault,
}

/// The runs of an engine; see the module.
pub(super) struct Admission {
    rank: Rank,
    layout: ScratchLayout,
    slots: Vec<RunSlot>,
    /// Unfinished runs in the order of their calls.
    order: Vec<u8>,
    /// How many unfinished runs have a priority that is not the usual one.
    prioritized: usize,
    /// By priority; kept for its memory.
    by_priority: Vec<u8>,
    /// How many unfinished runs have a closed gate.
    closed_gates: usize,
    /// How long a run may make no progress before peers are queried about it: [`QUERY_AFTER`] for
    /// each rank that takes turns on this rank's processor.
    query_after: Duration,
    /// How many unfinished runs await peers.
    awaiting_peers: usize,
    issues: u64,
    /// Number of the next collective.
    next_run: u64,
    /// Signature of all collectives so far.
    history: u64,
    banks: Banks,
    board: Arc<StatusBoard>,
    /// By peer: the board's records of the messages sent to it, and of those received from it.
    messages: Vec<[Option<Arc<MessageRecords>>; 2]>,
}

impl Admission {
    pub(super) fn new(rank: Rank, layout: ScratchLayout, board: Arc<StatusBoard>) -> Self {
        Self {
            rank,
            layout,
            slots: Vec::new(),
            order: Vec::new(),
            prioritized: 0,
            by_priority: Vec::new(),
            closed_gates: 0,
            query_after: QUERY_AFTER,
            awaiting_peers: 0,
            issues: 0,
            next_run: 0,
            history: 0,
            banks: Banks::default(),
            board,
            messages: vec![[None, None]; layout.ranks as usize],
        }
    }

    /// Tells the signatures of this engine's collectives from those of others. Before the first
    /// call.
    pub(crate) fn seed(&mut self, seed: u64) {
        self.history = seed;
    }

    /// Whether no run is unfinished.
    #[inline]
    pub(super) fn is_idle(&self) -> bool {
        self.order.is_empty()
    }

    /// When the runs want to be polled at the latest.
    pub(super) fn next_wakeup(&self, compute: &dyn Compute, seen_at: Nanos) -> Option<Nanos> {
        let runs = self.order.iter().filter_map(|slot| {
            let slot = &self.slots[usize::from(*slot)];
            let computes = slot.run.as_ref()?.is_computing();
            let computed = if computes { compute.next_wakeup().unwrap_or(Nanos::ZERO) } else { Nanos::MAX };
            // A run that no poll has seen yet wants to be seen.
            let timed = slot.times.map_or(Nanos::ZERO, |times| times.deadline.min(slot.query_at));
            let timed = if slot.is_held { Nanos::MAX } else { timed };
            let gated = slot.gate.as_ref().map_or(Nanos::MAX, |_| seen_at + GATE_INTERVAL);
            Some(computed.min(timed).min(gated))
        });
        runs.min()
    }

    /// A slot and a number for the next call of this plan. `None`: all slots are taken.
    ///
    /// A slot whose run has ended well is used again before its outcome was taken: the next run's
    /// issue tells that it has ended, so an outcome that nobody asks for costs nothing.
    #[inline]
    pub(super) fn number(&mut self, plan: &Plan) -> Option<(u8, RunNumber)> {
        let slot = self.free_slot()?;
        let number = match plan.stream() {
            Stream::Collectives => {
                let number = self.next_run;
                self.next_run += 1;
                self.history = chain(self.history, plan.signature());
                RunNumber {
                    number,
                    history: self.history,
                    bank: self.banks.take(plan.class(), number, self.layout.ranks),
                }
            }
            Stream::Messages { from, to } => {
                let number = self.messages(from, to).begun();
                let banks = MessageBanks::new(self.rank, self.layout, from, to);
                RunNumber { number, history: plan.signature(), bank: banks.of(plan.class(), number) }
            }
        };
        Some((slot, number))
    }

    /// A slot for another run. `None`: all are taken.
    #[inline]
    pub(crate) fn free_slot(&mut self) -> Option<u8> {
        match self.slots.iter().position(RunSlot::is_free) {
            Some(slot) => Some(slot as u8),
            None => self.add_slot(),
        }
    }

    fn add_slot(&mut self) -> Option<u8> {
        if self.slots.len() == RUNS_MAX {
            return None;
        }
        self.slots.push(RunSlot {
            run: None,
            state: State::Free,
            gate: None,
            awaits_peers: false,
            is_held: false,
            issue: 0,
            priority: 0,
            timeout: Duration::ZERO,
            times: None,
            has_moved: false,
            query_at: Nanos::ZERO,
            queries: 0,
        });
        Some(self.slots.len() as u8 - 1)
    }

    /// Several ranks take turns on this rank's processor. A run then takes longer by as much
    /// without any fault, and queries would take turns from the ranks that it waits for.
    pub(super) fn share_processor(&mut self, ranks: u32) {
        self.query_after = (QUERY_AFTER * ranks).clamp(QUERY_AFTER, QUERY_INTERVAL_MAX);
    }

    /// The records of the messages from one rank to another, one of which this rank is.
    fn messages(&mut self, from: Rank, to: Rank) -> &MessageRecords {
        let (peer, role) = if self.rank == from { (to, 0) } else { (from, 1) };
        self.messages[peer as usize][role].get_or_insert_with(|| self.board.messages(from, to))
    }

    /// Tells the status board that a run with this number has begun.
    #[inline]
    pub(super) fn publish(&mut self, plan: &Plan, number: &RunNumber) {
        let record = plan.record(number.number, number.history);
        match plan.stream() {
            Stream::Collectives => self.board.collectives().begin(&record),
            Stream::Messages { from, to } => self.messages(from, to).begin(&record),
        }
    }

    /// Puts a run into its slot. With `progress` the run has begun, and those steps are complete.
    pub(super) fn enter(
        &mut self,
        slot: u8,
        plan: &Arc<Plan>,
        parameters: Parameters,
        progress: Option<&LaneProgress>,
        timeout: Duration,
    ) -> (RunId, &mut Run) {
        self.issues += 1;
        self.order.push(slot);
        let entry = &mut self.slots[usize::from(slot)];
        entry.state = if progress.is_some() { State::Active } else { State::Queued };
        entry.issue = self.issues;
        entry.awaits_peers = false;
        entry.is_held = false;
        entry.priority = 0;
        entry.timeout = timeout;
        entry.times = None;
        entry.queries = 0;
        let run = match &mut entry.run {
            Some(run) => {
                run.begin(plan, parameters);
                run
            }
            empty => empty.insert(Run::new(slot, plan, parameters)),
        };
        if let Some(progress) = progress {
            run.resume(plan, progress);
        }
        (RunId { slot, issue: self.issues }, run)
    }

    /// The run of a slot, which may have ended.
    pub(super) fn run(&self, slot: u8) -> Option<&Run> {
        self.slots.get(usize::from(slot))?.run.as_ref()
    }

    /// The run of a slot if it is under way and has begun.
    pub(super) fn active(&self, slot: u8) -> Option<&Run> {
        self.slots.get(usize::from(slot)).filter(|entry| entry.state == State::Active)?.run.as_ref()
    }

    /// Unfinished runs in the order of their calls.
    pub(super) fn unfinished(&self) -> &[u8] {
        &self.order
    }

    /// When a run was seen first.
    pub(super) fn begun_at(&self, slot: u8) -> Option<Nanos> {
        self.slots.get(usize::from(slot))?.times.map(|times| times.begun_at)
    }

    /// The program of a run that waits until its peers are ready.
    pub(crate) fn unconnected_program(&self, slot: u8) -> Option<Arc<Program>> {
        let entry = self.slots.get(usize::from(slot)).filter(|entry| entry.awaits_peers)?;
        Some(entry.run.as_ref()?.plan().program().clone())
    }

    /// Whether the run waits for its gate.
    pub(super) fn is_gated(&self, slot: u8) -> bool {
        self.slots[usize::from(slot)].gate.is_some()
    }

    /// Number of the next collective.
    pub(super) fn next_run(&self) -> u64 {
        self.next_run
    }

    /// Signature of all collectives so far.
    #[cfg(test)]
    pub(super) fn history(&self) -> u64 {
        self.history
    }

    /// The deadline that passes first.
    pub(super) fn first_deadline(&self) -> Option<Nanos> {
        let times = self.order.iter().filter_map(|slot| self.slots[usize::from(*slot)].times);
        times.map(|times| times.deadline).min()
    }

    /// The run that has to end before the rank's thread goes on that waits for `awaited`; of its
    /// stream, the runs before it have to end too.
    pub(super) fn blocking_slot(&self, awaited: RunId) -> Option<u8> {
        let entry = self.slots.get(usize::from(awaited.slot)).filter(|entry| entry.issue == awaited.issue)?;
        let stream = entry.stream()?;
        match entry.state {
            State::Active => Some(awaited.slot),
            State::Queued => self.order.iter().copied().find(|slot| {
                let entry = &self.slots[usize::from(*slot)];
                entry.state == State::Active && entry.stream() == Some(stream)
            }),
            State::Free | State::Finished => None,
        }
    }

    /// What is due for a run now, and whether the run goes on after peers were queried about it.
    pub(super) fn due(&mut self, slot: u8, now: Nanos) -> (Due, bool) {
        let entry = &mut self.slots[usize::from(slot)];
        let Some(run) = entry.run.as_mut().filter(|_| !entry.is_held) else { return (Due::Nothing, false) };
        let times = *entry.times.get_or_insert_with(|| {
            entry.has_moved = true;
            Times { begun_at: now, deadline: now + entry.timeout }
        });
        let has_mismatch = run.take_mismatch().is_some();
        let goes_on = entry.has_moved && entry.has_queried();
        if std::mem::take(&mut entry.has_moved) {
            entry.queries = 0;
            entry.query_at = now + self.query_after;
        }
        // A signal that does not match leads to a query at once, but only once: it is seen again at
        // every poll.
        let asks_early = has_mismatch && !entry.has_queried();
        if now >= times.deadline {
            return (Due::Fault, goes_on);
        }
        if now < entry.query_at && !asks_early {
            return (Due::Nothing, goes_on);
        }
        entry.queries += 1;
        let doublings = entry.queries.min(QUERY_DOUBLINGS_MAX);
        entry.query_at = now + (self.query_after * (1 << doublings)).min(QUERY_INTERVAL_MAX);
        (Due::Query, goes_on)
    }

    /// The next query about a run is due at this time at the latest.
    pub(super) fn query_by(&mut self, slot: u8, at: Nanos) {
        let query_at = &mut self.slots[usize::from(slot)].query_at;
        *query_at = (*query_at).min(at);
    }

    /// A transfer has ended well.
    pub(super) fn transfer_done(&mut self, id: TransferId) {
        let slot = self.slots.get_mut(usize::from(StepAddress::run_of(id)));
        if let Some(run) = slot.and_then(|slot| slot.run.as_mut()) {
            run.transfer_done(id);
        }
    }

    /// A signal has come in this signal slot.
    pub(super) fn mark_signalled(&mut self, from: Rank, signal_slot: u16) {
        for slot in &self.order {
            if let Some(run) = &mut self.slots[usize::from(*slot)].run {
                run.mark_signalled(from, signal_slot);
            }
        }
    }

    /// No run goes on; they let go of peers' memory.
    pub(super) fn stop_runs(&mut self) {
        self.slots.iter_mut().filter_map(|slot| slot.run.as_mut()).for_each(Run::stop);
    }

    /// Lets a run begin, by its place in the order, if its turn has come; whether it has begun.
    /// `may_admit`: whether the turn of the collectives has come.
    fn admit(&mut self, index: usize, completed: u64, may_admit: &mut bool) -> bool {
        let slot = usize::from(self.order[index]);
        let entry = &self.slots[slot];
        if entry.state != State::Queued {
            return entry.state == State::Active;
        }
        let Some(run) = &entry.run else { unreachable!("an ordered slot holds a run") };
        let stream = run.stream();
        let is_free = match stream {
            _ if entry.gate.is_some() || entry.awaits_peers => false,
            Stream::Collectives => *may_admit && completed >= run.needed_runs(),
            // One message of a pair at a time; earlier ones stand earlier in the order.
            stream => !self.has_earlier(index, stream),
        };
        if is_free {
            self.slots[slot].state = State::Active;
        } else {
            *may_admit &= stream != Stream::Collectives;
        }
        is_free
    }

    /// Whether an earlier run of the stream is unfinished.
    fn has_earlier(&self, index: usize, stream: Stream) -> bool {
        self.order[..index].iter().any(|slot| self.slots[usize::from(*slot)].stream() == Some(stream))
    }

    /// Number of the first collective that is not complete.
    #[inline]
    fn first_unfinished(&self, except: Option<u8>) -> u64 {
        let unfinished = self.order.iter().filter(|slot| Some(**slot) != except).filter_map(|slot| {
            let run = self.slots[usize::from(*slot)].run.as_ref()?;
            (run.stream() == Stream::Collectives).then_some(run.number())
        });
        unfinished.min().unwrap_or(self.next_run)
    }

    /// Takes a finished run out of the order.
    fn forget(&mut self, slot: u8) {
        self.order.retain(|other| *other != slot);
        let priority = std::mem::take(&mut self.slots[usize::from(slot)].priority);
        self.prioritized -= usize::from(priority != 0);
    }
}

impl Engine {
    /// Accepts a call. Its run begins when its turn comes, its time with the next poll. `input` and
    /// `output` are as long as the collective's parts say; the output may be the input, or hold it
    /// as one of its parts. The plan is one of this rank in this group. Bytes that the caller holds
    /// stay until the run's outcome was taken.
    pub(crate) fn start(
        &mut self,
        plan: &Arc<Plan>,
        input: Bytes,
        output: Bytes,
        timeout: Duration,
    ) -> Result<RunId, StartError> {
        self.start_behind(None, plan, input, output, timeout)
    }

    /// As [`Engine::start`], of data of a round of a partial all-reduce, on all ranks.
    pub(crate) fn start_round(
        &mut self,
        round: RoundInput,
        plan: &Arc<Plan>,
        [input, output]: [Bytes; 2],
        timeout: Duration,
    ) -> Result<RunId, StartError> {
        self.start_as(None, Some(round), plan, [input, output], timeout)
    }

    /// As [`Engine::start`] with a gate: the run begins when the gate is open and its turn has
    /// come. Its time runs from now on.
    pub(crate) fn start_behind(
        &mut self,
        gate: Option<Gate>,
        plan: &Arc<Plan>,
        input: Bytes,
        output: Bytes,
        timeout: Duration,
    ) -> Result<RunId, StartError> {
        self.start_as(gate, None, plan, [input, output], timeout)
    }

    fn start_as(
        &mut self,
        gate: Option<Gate>,
        round: Option<RoundInput>,
        plan: &Arc<Plan>,
        [input, output]: [Bytes; 2],
        timeout: Duration,
    ) -> Result<RunId, StartError> {
        if let Some(fault) = self.failure.verdict_during(plan.descriptor()) {
            return Err(StartError::Failed(fault));
        }
        plan.check_lengths(&input, &output)?;
        let (slot, number) = self.admission.number(plan).ok_or(StartError::TooManyRuns)?;
        let parameters = Parameters::new(number, input, output).in_round(round);
        let (id, run) = self.admission.enter(slot, plan, parameters, None, timeout);
        run.observe_from(self.observer.take_sample());
        self.admission.closed_gates += usize::from(gate.is_some());
        self.admission.slots[usize::from(slot)].gate = gate;
        if !self.context.scratch.has_all(plan.program().peers()) {
            self.admission.slots[usize::from(slot)].awaits_peers = true;
            self.admission.awaiting_peers += 1;
            self.connect_to(plan.program().peers().iter().copied());
        }
        if self.admission.order.len() == 1 && self.is_passive() {
            // Signals that peers wait for go out first: the notes below take no time of the peers.
            self.context.signals.forget_awaited();
            self.poll_signals(Nanos::ZERO);
        }
        if let Counts::Paired(counts) = plan.counts() {
            self.board.begin_paired(number.number, counts.clone());
        }
        self.admission.publish(plan, &number);
        Ok(id)
    }

    /// Has a run that was just started go before those of lower priorities; the usual one is 0.
    pub fn prioritize(&mut self, id: RunId, priority: i32) {
        let entry = &mut self.admission.slots[usize::from(id.slot)];
        if priority != 0 && entry.issue == id.issue && !entry.is_free() {
            self.admission.prioritized += usize::from(entry.priority == 0);
            entry.priority = priority;
        }
    }

    /// Whether the time of a run stands still: then it has no deadline, and peers are not queried
    /// about it. Of a run that was just started, until its peers are expected to begin it.
    pub(crate) fn hold_time(&mut self, id: RunId, is_held: bool) {
        let entry = &mut self.admission.slots[usize::from(id.slot)];
        if entry.issue == id.issue {
            entry.is_held = is_held;
        }
    }

    /// Whether a run has ended well and its outcome was not taken.
    #[must_use]
    pub fn has_ended(&self, id: RunId) -> bool {
        let slot = &self.admission.slots[usize::from(id.slot)];
        slot.state == State::Finished || slot.issue != id.issue
    }

    /// The outcome of a run, once; `None` while it is under way.
    ///
    /// # Panics
    ///
    /// When the run's outcome was taken before and is known no more.
    pub fn take_outcome(&mut self, id: RunId) -> Option<Result<(), Arc<Fault>>> {
        let slot = &mut self.admission.slots[usize::from(id.slot)];
        if slot.issue != id.issue {
            // Only a run that has ended well makes room for another one.
            assert!(slot.issue > id.issue, "the run is one of this engine");
            return Some(Ok(()));
        }
        assert!(slot.state != State::Free, "an outcome is taken once");
        if slot.state == State::Finished {
            slot.state = State::Free;
            return Some(Ok(()));
        }
        let fault = self.failure.fault()?.clone();
        slot.state = State::Free;
        slot.gate = None;
        if let Some(run) = &mut slot.run {
            run.release();
        }
        self.admission.forget(id.slot);
        Some(Err(fault))
    }

    /// Who has contributed to a round whose run has ended well, by bits. `None`: another call was
    /// made since, which has taken the run's place.
    pub(crate) fn contributors(&self, id: RunId) -> Option<u32> {
        let slot = &self.admission.slots[usize::from(id.slot)];
        slot.run.as_ref().filter(|_| slot.issue == id.issue).map(Run::contributors)
    }

    /// Admits and advances runs; true when anything moved, or the group has failed.
    pub(super) fn advance_runs(&mut self, now: Nanos) -> bool {
        if !self.is_ready() {
            return false;
        }
        self.context.signals.forget_awaited();
        if self.admission.closed_gates > 0 && !self.look_at_gates(now) {
            return true;
        }
        if self.admission.awaiting_peers > 0 {
            self.look_at_peers();
        }
        if self.admission.prioritized > 0 {
            return self.advance_by_priority(now);
        }
        let mut moved = false;
        let mut index = 0;
        let mut may_admit = true;
        while index < self.admission.order.len() {
            let slot = self.admission.order[index];
            if self.admission.admit(index, self.context.completed, &mut may_admit) {
                match self.advance(slot, now) {
                    Ok(true) => moved = true,
                    Ok(false) => {}
                    Err(fault) => {
                        self.fail(*fault, now);
                        return true;
                    }
                }
                if self.admission.slots[usize::from(slot)].state == State::Finished {
                    self.admission.order.remove(index);
                    self.note_completed();
                    continue;
                }
            }
            index += 1;
        }
        moved
    }

    /// As [`Engine::advance_runs`], where runs have different priorities.
    fn advance_by_priority(&mut self, now: Nanos) -> bool {
        let mut slots = std::mem::take(&mut self.admission.by_priority);
        slots.clear();
        let mut may_admit = true;
        for index in 0..self.admission.order.len() {
            if self.admission.admit(index, self.context.completed, &mut may_admit) {
                slots.push(self.admission.order[index]);
            }
        }
        // Stable: of equal priorities the earlier call goes first.
        slots.sort_by_key(|slot| Reverse(self.admission.slots[usize::from(*slot)].priority));
        let mut moved = None;
        for slot in slots.iter().copied() {
            let priority = self.admission.slots[usize::from(slot)].priority;
            if moved.is_some_and(|before| before > priority) {
                // A run that has moved may move again, and goes first.
                break;
            }
            match self.advance(slot, now) {
                Ok(true) => moved = Some(priority),
                Ok(false) => {}
                Err(fault) => {
                    self.fail(*fault, now);
                    moved = Some(priority);
                    break;
                }
            }
            if self.admission.slots[usize::from(slot)].state == State::Finished {
                self.admission.forget(slot);
                self.note_completed();
            }
        }
        self.admission.by_priority = slots;
        moved.is_some()
    }

    /// Looks at all gates; false when one of them has failed, and the group with it.
    fn look_at_gates(&mut self, now: Nanos) -> bool {
        for index in 0..self.admission.order.len() {
            let slot = self.admission.order[index];
            let entry = &mut self.admission.slots[usize::from(slot)];
            match entry.gate.as_mut().map(|is_open| is_open()) {
                None | Some(Ok(false)) => {}
                Some(Ok(true)) => {
                    entry.gate = None;
                    entry.has_moved = true;
                    self.admission.closed_gates -= 1;
                }
                Some(Err(error)) => {
                    let rank = self.context.rank;
                    let fault = self.fault(FaultKind::Compute, rank, error.to_string(), Some(slot), now);
                    self.fail(fault, now);
                    return false;
                }
            }
        }
        true
    }

    /// Looks which runs have their peers now.
    fn look_at_peers(&mut self) {
        for slot in &self.admission.order {
            let entry = &mut self.admission.slots[usize::from(*slot)];
            if let Some(run) = entry.run.as_ref().filter(|_| entry.awaits_peers)
                && self.context.scratch.has_all(run.plan().program().peers())
            {
                entry.awaits_peers = false;
                entry.has_moved = true;
                self.admission.awaiting_peers -= 1;
            }
        }
    }

    fn advance(&mut self, slot: u8, now: Nanos) -> Result<bool, Box<Fault>> {
        let begun_at = self.admission.begun_at(slot);
        let elapsed_ns = self.observer.elapsed_ns(begun_at, now);
        (self.context.now, self.context.elapsed_ns) = (now, elapsed_ns);
        let entry = &mut self.admission.slots[usize::from(slot)];
        let Some(run) = &mut entry.run else { unreachable!("an active slot holds a run") };
        let moved = match run.advance(&mut self.context) {
            Ok(moved) => moved,
            Err(error) => return Err(Box::new(self.fault_of_step(slot, &error, now))),
        };
        if elapsed_ns > 0 && !run.is_complete() {
            run.look_for_arrivals(&self.context);
        }
        entry.has_moved |= moved;
        if run.is_complete() {
            entry.state = State::Finished;
            run.release();
            let (stream, number, class) = (run.stream(), run.number(), run.plan().class());
            if entry.has_queried() {
                self.board.block_on(None);
            }
            if stream != Stream::Collectives {
                self.note_completed_message(stream, number);
            } else if credit_is_due(class, number) {
                self.send_credits_of_run(slot);
            }
            if let Some(run) = self.admission.run(slot) {
                self.observer.note_ended(run, begun_at, now);
            }
        }
        if moved {
            self.note_moved(slot);
        }
        Ok(moved)
    }

    /// Sends credits to the peers that wrote to this rank and may hear by no signal that their bank
    /// is free again: peers that this rank does not signal and, where other runs are under way, all
    /// of them, as the signals of these runs may have gone out before.
    fn send_credits_of_run(&mut self, slot: u8) {
        // Without a gap: earlier runs may be under way still, and then their banks are not free.
        let unfinished = self.admission.first_unfinished(Some(slot));
        let is_alone = unfinished == self.admission.next_run;
        let Some(run) = self.admission.run(slot) else { return };
        let program = run.plan().program().clone();
        self.send_credits(Stream::Collectives, program.credited(is_alone), unfinished);
    }

    fn send_credits(&mut self, stream: Stream, peers: &[Rank], completed: u64) {
        self.context.signals.send_credits(&mut *self.context.device, stream, peers, completed);
    }

    fn note_completed(&mut self) {
        let admission = &self.admission;
        let completed =
            if admission.order.is_empty() { admission.next_run } else { admission.first_unfinished(None) };
        self.context.completed = completed;
        if let Some(witness) = self.context.signals.witness() {
            witness.completed(Stream::Collectives.to_word(), completed);
        }
        self.board.collectives().complete(completed);
    }

    /// A message has ended here: the rank that receives it says so now and then.
    fn note_completed_message(&mut self, stream: Stream, number: u64) {
        let Stream::Messages { from, to } = stream else { return };
        if self.context.rank != to {
            return;
        }
        let completed = number + 1;
        self.admission.messages(from, to).complete(completed);
        let told: &[Rank] = if message_credit_is_due(number) { &[from] } else { &[] };
        self.send_credits(stream, told, completed);
    }

    /// A call with this number was carried out at once: no other run is unfinished. Always inlined:
    /// it is a part of the shortest calls, and of rounds.
    #[expect(clippy::inline_always, reason = "27 instructions of the 8-byte path")]
    #[inline(always)]
    pub(super) fn note_carried_out(&mut self, plan: &Plan, number: u64) {
        if plan.stream() == Stream::Collectives {
            if credit_is_due(plan.class(), number) {
                self.send_credits(Stream::Collectives, plan.program().credited(true), number + 1);
            }
            self.note_completed();
        } else {
            self.note_completed_message(plan.stream(), number);
        }
        self.observer.note_carried_out(plan, number);
    }
}

#[cfg(test)]
mod tests;

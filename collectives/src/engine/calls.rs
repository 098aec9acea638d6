//! From a call to its outcome: its number, its bank, its slot.

use std::sync::Arc;
use std::time::Duration;

use pleach_transport::Nanos;
use pleach_vocabulary::Rank;

use super::at::RUNS_MAX;
use super::bank::{Bank, MessageBanks};
use super::board::{Board, Messages};
use super::bytes::Bytes;
use super::fault::Fault;
use super::gate::Gate;
use super::message::Record;
use super::plan::Plan;
use super::run::{Parameters, Run};
use super::stream::Stream;
use super::{Engine, Phase, QUERY_AFTER, RunId, SlotOfRun, StartError, State};
use crate::call::{self, Counts};

/// Where the engine notes its runs for those who ask: on the board, of which it keeps what it
/// writes for each message.
pub(super) struct Journal {
    rank: Rank,
    board: Arc<Board>,
    /// By peer: what is sent to it, and what is received from it.
    messages: Vec<[Option<Arc<Messages>>; 2]>,
}

impl Journal {
    pub(super) fn new(rank: Rank, board: Arc<Board>, ranks: u32) -> Self {
        Self { rank, board, messages: vec![[None, None]; ranks as usize] }
    }

    /// The messages from one rank to another, one of which this rank is.
    pub(super) fn messages(&mut self, from: Rank, to: Rank) -> &Messages {
        let (peer, role) = if self.rank == from { (to, 0) } else { (from, 1) };
        self.messages[peer as usize][role].get_or_insert_with(|| self.board.messages(from, to))
    }

    /// A run that was numbered has begun.
    pub(super) fn begin(&mut self, stream: Stream, record: &Record) {
        match stream {
            Stream::Collectives => self.board.collectives().begin(record),
            Stream::Messages { from, to } => self.messages(from, to).begin(record),
        }
    }
}

impl Engine {
    /// Accepts a call; its run begins when its turn comes, its time with the next poll. `input` and
    /// `output` are as long as the collective's parts say; the output may be the input (or hold it
    /// as one of its parts). The plan is one of this rank in this group. Where bytes are held by
    /// the caller, they stay until the run's outcome was taken.
    ///
    /// # Errors
    ///
    /// See [`StartError`].
    pub(crate) fn start(
        &mut self,
        plan: &Arc<Plan>,
        input: Bytes,
        output: Bytes,
        timeout: Duration,
    ) -> Result<RunId, StartError> {
        self.start_behind(None, plan, input, output, timeout)
    }

    /// The same with a gate: the run begins when that is open and its turn has come. Its time runs
    /// from now on.
    ///
    /// # Errors
    ///
    /// See [`StartError`].
    pub(crate) fn start_behind(
        &mut self,
        gate: Option<Gate>,
        plan: &Arc<Plan>,
        input: Bytes,
        output: Bytes,
        timeout: Duration,
    ) -> Result<RunId, StartError> {
        if let Some(fault) = self.failure_during(plan) {
            return Err(StartError::Failed(fault));
        }
        plan.check_lengths(&input, &output)?;
        let slot = self.free_slot().ok_or(StartError::TooManyRuns)?;
        let (number, history, bank) = self.number(plan);
        let parameters = Parameters { number, history, bank, input, output };
        self.seat(slot, plan, parameters);
        let id = self.enter(slot, State::Queued, timeout);
        self.put_gate(id, gate);
        if self.order.len() == 1 && self.is_passive {
            // What peers wait for goes out first; what is left to be noted takes no time of theirs.
            self.blocked = None;
            self.glance(Nanos::ZERO);
        }
        if let Counts::Paired(counts) = &plan.counts {
            self.board.begin_paired(number, counts.clone());
        }
        self.journal.begin(plan.stream, &plan.record(number, history));
        Ok(id)
    }

    /// The slot's run, made one of this plan.
    pub(super) fn seat(&mut self, slot: u8, plan: &Arc<Plan>, parameters: Parameters) -> &mut Run {
        match &mut self.slots[usize::from(slot)].run {
            Some(run) => {
                run.begin(plan, parameters);
                run
            }
            empty => empty.insert(Run::new(slot, plan, parameters)),
        }
    }

    /// Puts the run of a slot among those that are under way.
    pub(super) fn enter(&mut self, slot: u8, state: State, timeout: Duration) -> RunId {
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

    /// Why the group has failed, as the first call that is told of it sees it; once the ranks have
    /// agreed on that. Until then calls are accepted and do not begin.
    fn failure_during(&mut self, plan: &Plan) -> Option<Arc<Fault>> {
        let (Phase::Failing { verdict: Some(fault), .. } | Phase::Failed(fault)) = &mut self.phase else {
            return None;
        };
        if fault.during.is_none() && fault.told_during.is_none() {
            Arc::make_mut(fault).told_during = Some(plan.descriptor);
        }
        Some(fault.clone())
    }

    /// A slot for another run. One whose run has ended well may be taken before its outcome was:
    /// that it has, the next run's issue tells, so an outcome that nobody asks for costs nothing.
    #[inline]
    pub(super) fn free_slot(&mut self) -> Option<u8> {
        let is_free = |slot: &SlotOfRun| matches!(slot.state, State::Free | State::Finished);
        if let Some(index) = self.slots.iter().position(is_free) {
            return Some(index as u8);
        }
        if self.slots.len() == RUNS_MAX {
            return None;
        }
        self.slots.push(SlotOfRun {
            run: None,
            state: State::Free,
            gate: None,
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
    #[inline]
    pub(super) fn number(&mut self, plan: &Plan) -> (u64, u64, Bank) {
        match plan.stream {
            Stream::Collectives => {
                let number = self.next_run;
                self.next_run += 1;
                self.history = call::chain(self.history, plan.signature);
                (number, self.history, self.banks.take(plan.class, number, self.ranks))
            }
            Stream::Messages { from, to } => {
                let number = self.journal.messages(from, to).begun();
                let banks = MessageBanks { rank: self.rank, ranks: self.ranks, from, to };
                (number, plan.signature, banks.of(plan.class, number))
            }
        }
    }

    /// Whether a run has ended well and its outcome was not taken.
    #[must_use]
    pub fn has_ended(&self, id: RunId) -> bool {
        let slot = &self.slots[usize::from(id.slot)];
        slot.state == State::Finished || slot.issue != id.issue
    }

    /// The outcome of a run, once; `None` while it is under way.
    ///
    /// # Panics
    ///
    /// When the run's outcome was taken before and is known no more.
    pub fn take_outcome(&mut self, id: RunId) -> Option<Result<(), Arc<Fault>>> {
        let slot = &mut self.slots[usize::from(id.slot)];
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
        let Phase::Failed(fault) = &self.phase else { return None };
        slot.state = State::Free;
        slot.gate = None;
        if let Some(run) = &mut slot.run {
            run.release();
        }
        self.order.retain(|other| *other != id.slot);
        Some(Err(fault.clone()))
    }
}

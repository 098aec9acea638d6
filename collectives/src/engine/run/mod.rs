//! One rank's share of one run: the executor.
//!
//! A pure state machine over a [`Device`](pleach_transport::Device) and a
//! [`Compute`](crate::compute::Compute): it never blocks and reads no clock. A run is made of
//!
//! * its [`Lanes`]: how far each lane is in its chunks, and each chunk in its steps;
//! * its memory ([`steps`]): where the bytes are that steps read and write;
//! * its [`PendingPuts`], where links set the pace;
//! * the jobs that are computed piece by piece;
//! * in a round of a partial all-reduce, who contributes and whose inputs are absent ([`absence`]).
//!
//! **Invariant:** no byte that a peer sent or shares is used before a signal of that peer *in this
//! run* was compared with this rank's own signature. Every signal carries run and signature
//! ([`super::signals`]), and a wait that sees another one does not complete. In a round, the lower
//! half of a signature may differ by bits of ranks, and the upper half may be inverted.

mod absence;
mod steps;

use std::sync::Arc;

use pleach_transport::{MapError, Nanos, SubmitError, TransferId};
use pleach_vocabulary::Rank;

use super::Bank;
use super::address::advance;
use super::fast_path::LANES_MAX;
use super::plan::{ChunkStep, OpProgram, Plan, PutProgram};
use super::signals::{Header, InRound, PeerSignals};
use super::{Bytes, Context, RunNumber, StepAddress, Stream};
use crate::compute::Job;
use absence::Absence;
pub(crate) use absence::{CONTRIBUTORS_MAX, Contributors, RoundDivisor, RoundInput};
use steps::{PendingPuts, RunMemory};

/// Why a run cannot go on.
#[derive(Debug)]
pub(super) enum StepError {
    Submit { peer: Rank, error: SubmitError },
    Map { peer: Rank, error: MapError },
}

/// By lane: how many steps are complete, in a run of one chunk a lane.
pub(super) type LaneProgress = [u32; LANES_MAX];

/// Bytes of chunks that a lane may combine or copy before the next lane has its turn.
const TURN_BYTES: usize = 1 << 20;

/// Steps ahead of a lane that are searched for signals that have come already.
const STEPS_AHEAD_MAX: u32 = 64;
/// Nanoseconds between two such searches, at least; and at least this share of the time waited.
const SEARCH_NS_MIN: u64 = 1000;
const SEARCH_SHARE: u64 = 32;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum StepState {
    #[default]
    NotIssued,
    UnderWay,
    Complete,
}

#[derive(Clone, Copy, Debug, Default)]
struct LaneState {
    /// Chunks before this one are complete.
    first: u32,
    /// Chunks from this one on have not begun.
    next: u32,
    /// Only the wait reasons of its chunks keep the lane from going on.
    is_settled: bool,
    /// Its next chunk waits for slower lanes.
    is_at_limit: bool,
}

/// A chunk under way.
#[derive(Clone, Copy, Debug, Default)]
struct Instance {
    chunk: u32,
    /// The step that is issued next.
    program_counter: u32,
    /// Steps that are not complete.
    remaining: u32,
    wait_reason: WaitReason,
}

/// The reason why a chunk under way waits, as of the last look.
#[derive(Clone, Copy, Debug, Default)]
enum WaitReason {
    /// It was not looked at yet, or may go on at any time: room at a peer, memory within reach.
    #[default]
    Unknown,
    /// Steps of its lane, whose ends are told.
    Steps,
    /// The next signal in a signal slot that is kept for a peer.
    Signal { from: Rank, signal_slot: u16 },
}

/// How far the lanes of a run are.
///
/// A rank in a packed collective has hundreds of lanes with several chunks under way each, and
/// every event concerns one of them. **Invariant:** a settled lane goes on only by a signal that
/// one of its chunks waits for, or by the end of one of its own steps, which unsettles it. So does
/// the rise of the limit that the lane had reached.
#[derive(Default)]
struct Lanes {
    lanes: Vec<LaneState>,
    /// By lane and slot of its window.
    instances: Vec<Instance>,
    states: Vec<StepState>,
    unfinished: u32,
    /// No lane begins this chunk or a later one.
    chunk_limit: u32,
}

impl Lanes {
    fn reset(&mut self, plan: &Plan, is_same_plan: bool) {
        let lanes = plan.lanes().len();
        if !is_same_plan {
            self.instances.resize(lanes * plan.window() as usize, Instance::default());
            self.states.resize(plan.states() as usize, StepState::NotIssued);
        }
        self.lanes.clear();
        self.lanes.resize(lanes, LaneState::default());
        self.unfinished = lanes as u32;
        self.chunk_limit = plan.skew_limit();
    }

    fn instance(&mut self, plan: &Plan, address: StepAddress) -> &mut Instance {
        &mut self.instances[(address.lane * plan.window() + address.slot) as usize]
    }

    /// Retires complete chunks and begins those that may; true when any began.
    fn begin_chunks(&mut self, plan: &Plan, lane_number: u32) -> bool {
        let (window, chunks) = (plan.window(), plan.chunks(lane_number));
        let steps = plan.steps(lane_number).len();
        let first_instance = lane_number * window;
        let state = &mut self.lanes[lane_number as usize];
        while state.first < state.next
            && self.instances[(first_instance + state.first % window) as usize].remaining == 0
        {
            state.first += 1;
            if state.first == chunks {
                self.unfinished -= 1;
            }
        }
        let mut began = false;
        state.is_at_limit = false;
        while state.next < chunks {
            if state.next >= self.chunk_limit {
                state.is_at_limit = true;
                break;
            }
            let slot = state.next % window;
            let instance = &mut self.instances[(first_instance + slot) as usize];
            if state.next >= window && instance.remaining != 0 {
                break;
            }
            *instance = Instance {
                chunk: state.next,
                program_counter: 0,
                remaining: steps as u32,
                wait_reason: WaitReason::Unknown,
            };
            let states = plan.state_of(StepAddress { lane: lane_number, slot, step: 0 });
            self.states[states..states + steps].fill(StepState::NotIssued);
            state.next += 1;
            began = true;
        }
        began
    }

    /// Whether a step of the same lane, `lag` chunks earlier, is complete.
    fn is_complete(&self, plan: &Plan, of: ChunkStep<'_>, step: u32, lag: u32) -> bool {
        let address = of.address();
        let Some(earlier) = of.chunk().checked_sub(lag) else { return true };
        if earlier < self.lanes[address.lane as usize].first {
            return true;
        }
        let slot = earlier % plan.window();
        // An instance that already serves a later chunk has completed the earlier one.
        self.instances[(address.lane * plan.window() + slot) as usize].chunk != earlier
            || self.states[plan.state_of(StepAddress { slot, step, ..address })] == StepState::Complete
    }

    /// A step that was under way is complete.
    fn complete(&mut self, plan: &Plan, address: StepAddress) {
        let state = plan.state_of(address);
        debug_assert_eq!(self.states[state], StepState::UnderWay);
        self.states[state] = StepState::Complete;
        self.instance(plan, address).remaining -= 1;
        self.unsettle(address.lane);
    }

    fn unsettle(&mut self, lane: u32) {
        self.lanes[lane as usize].is_settled = false;
    }

    /// Whether the lane may go on: where it cannot, that is seen at little cost, also with many
    /// chunks under way.
    fn may_advance(&self, plan: &Plan, context: &mut Context, lane: u32) -> bool {
        let state = self.lanes[lane as usize];
        if !state.is_settled {
            return true;
        }
        !context.hears_all
            && (state.first..state.next).any(|chunk| {
                match self.instances[(lane * plan.window() + chunk % plan.window()) as usize].wait_reason {
                    WaitReason::Signal { from, signal_slot } => context.signals.has_come(from, signal_slot),
                    WaitReason::Unknown | WaitReason::Steps => false,
                }
            })
    }

    /// The lane was looked at, `wholly` or until its turn was over.
    fn settle(&mut self, plan: &Plan, lane: u32, wholly: bool) {
        let state = &mut self.lanes[lane as usize];
        let mut under_way = (state.first..state.next)
            .map(|chunk| self.instances[(lane * plan.window() + chunk % plan.window()) as usize].wait_reason);
        state.is_settled = wholly && under_way.all(|reason| !matches!(reason, WaitReason::Unknown));
    }

    /// Where links limit how far lanes may be ahead of the slowest one: raises the limit as far as
    /// the slowest lane allows. True when that lets any lane go on.
    fn raise_chunk_limit(&mut self, plan: &Plan) -> bool {
        let unfinished =
            self.lanes.iter().zip(plan.lanes()).filter(|(state, lane)| state.first < plan.chunks(*lane));
        let slowest = unfinished.map(|(state, _)| state.first).min();
        let limit = slowest.map_or(u32::MAX, |first| first.saturating_add(plan.skew_limit()));
        if limit <= self.chunk_limit {
            return false;
        }
        self.chunk_limit = limit;
        let mut were_any = false;
        for state in self.lanes.iter_mut().filter(|state| state.is_at_limit) {
            state.is_settled = false;
            were_any = true;
        }
        were_any
    }

    /// Chunks under way, each at the step that is issued next, which may be one behind the last.
    fn under_way<'a>(&'a self, plan: &'a Plan) -> impl Iterator<Item = ChunkStep<'a>> {
        self.lanes.iter().zip(plan.lanes()).flat_map(move |(state, lane)| {
            (state.first..state.next).map(move |chunk| {
                let instance = self.instances[(lane * plan.window() + chunk % plan.window()) as usize];
                plan.chunk_step(lane, chunk, instance.program_counter)
            })
        })
    }
}

struct ActiveJob {
    address: StepAddress,
    job: Job,
    /// It only copies the source of a put to registered memory.
    stages: bool,
}

/// Observations of one run: see [`super::observer`].
#[derive(Debug, Default)]
struct RunObserver {
    /// When the call began, if that is to be known exactly.
    sample: Option<Nanos>,
    /// When signals are searched for next, in nanoseconds of the run.
    search_ns: u64,
    /// How much later than this rank the peers that were heard made the call, in nanoseconds.
    arrivals: Vec<(Rank, u64)>,
}

impl RunObserver {
    fn reset(&mut self) {
        self.sample = None;
        self.search_ns = 0;
        self.arrivals.clear();
    }

    /// A signal of a peer was seen when this rank had been in the call for so long.
    fn arrived(&mut self, from: Rank, header: &Header, elapsed_ns: u64) {
        let skew_ns = elapsed_ns.saturating_sub(header.elapsed_ns());
        match self.arrivals.iter_mut().find(|(peer, _)| *peer == from) {
            Some((_, least_ns)) => *least_ns = (*least_ns).min(skew_ns),
            None => self.arrivals.push((from, skew_ns)),
        }
    }
}

/// The values that differ between the runs of a plan.
pub(super) struct Parameters {
    number: RunNumber,
    input: Bytes,
    output: Bytes,
    /// In a round of a partial all-reduce.
    round: Option<Absence>,
}

impl Parameters {
    pub(super) fn new(number: RunNumber, input: Bytes, output: Bytes) -> Self {
        Self { number, input, output, round: None }
    }

    /// The same in a round, in which inputs may be absent.
    pub(crate) fn in_round(self, round: Option<RoundInput>) -> Self {
        Self { round: round.map(Absence::new), ..self }
    }
}

/// One rank's share of one run; see the module. Reused from run to run, so that a run allocates
/// nothing.
pub(super) struct Run {
    /// Only [`Run::advance`] and [`Run::transfer_done`] take it out, for their own time.
    plan: Option<Arc<Plan>>,
    parameters: Parameters,
    slot_in_engine: u8,
    lanes: Lanes,
    memory: RunMemory,
    pending_puts: PendingPuts,
    jobs: Vec<ActiveJob>,
    /// Puts whose source was copied to registered memory.
    staged: Vec<StepAddress>,
    spare_jobs: Vec<Job>,
    /// Bytes of chunks that were combined or copied in this lane's turn; at least [`TURN_BYTES`]
    /// when it is over.
    turn_bytes: usize,
    /// A peer whose signal did not match, to be asked what it is doing.
    mismatch: Option<Rank>,
    observer: RunObserver,
    /// In a round: who has contributed, by bits, once the run is complete.
    contributors: u32,
}

/// The result of trying a step.
enum Issue {
    Blocked,
    /// Until a signal comes in this signal slot.
    NotSignalled {
        from: Rank,
        signal_slot: u16,
    },
    UnderWay,
    Complete,
}

impl Run {
    pub(super) fn new(slot_in_engine: u8, plan: &Arc<Plan>, parameters: Parameters) -> Self {
        let mut run = Self {
            plan: None,
            parameters,
            slot_in_engine,
            lanes: Lanes::default(),
            memory: RunMemory::default(),
            pending_puts: PendingPuts::default(),
            jobs: Vec::new(),
            staged: Vec::new(),
            spare_jobs: Vec::new(),
            turn_bytes: 0,
            mismatch: None,
            observer: RunObserver::default(),
            contributors: 0,
        };
        run.reset(plan);
        run
    }

    /// Starts another run in the same memory.
    pub(super) fn begin(&mut self, plan: &Arc<Plan>, parameters: Parameters) {
        self.parameters = parameters;
        self.reset(plan);
    }

    fn reset(&mut self, plan: &Arc<Plan>) {
        let is_same_plan = self.plan.as_ref().is_some_and(|before| Arc::ptr_eq(before, plan));
        if !is_same_plan {
            self.plan = Some(plan.clone());
        }
        self.lanes.reset(plan, is_same_plan);
        if plan.is_paced() {
            self.pending_puts.reset(plan.under_way_max());
        }
        self.memory.reset(plan);
        self.staged.clear();
        self.mismatch = None;
        self.observer.reset();
    }

    /// Continues after the steps that are complete in every lane, in a run of one chunk a lane.
    pub(super) fn resume(&mut self, plan: &Plan, progress: &LaneProgress) {
        for (lane, done) in plan.lanes().zip(progress.iter().copied()) {
            self.lanes.begin_chunks(plan, lane);
            let first = StepAddress { lane, slot: 0, step: 0 };
            let states = plan.state_of(first);
            self.lanes.states[states..states + done as usize].fill(StepState::Complete);
            let instance = self.lanes.instance(plan, first);
            instance.program_counter = done;
            instance.remaining -= done;
            self.lanes.begin_chunks(plan, lane);
        }
    }

    /// The time at which the call began, if that is to be known exactly.
    pub(super) fn observe_from(&mut self, sample: Option<Nanos>) {
        self.observer.sample = sample;
    }

    /// When the call began, if that is known exactly, and how much later than this rank its peers
    /// made the call, in nanoseconds.
    pub(super) fn observed(&self) -> (Option<Nanos>, &[(Rank, u64)]) {
        (self.observer.sample, &self.observer.arrivals)
    }

    /// Gives the caller's buffers back; no pointer into them is used afterwards.
    pub(super) fn release(&mut self) {
        self.parameters.input = Bytes::None;
        self.parameters.output = Bytes::None;
        let round = self.parameters.round.take();
        self.contributors = round.map_or(0, |round| round.contributors().known());
        self.stop();
    }

    /// Who has contributed to a round, by bits, once its run is complete.
    pub(crate) fn contributors(&self) -> u32 {
        self.contributors
    }

    /// Goes on no more: drops its jobs and its mappings of peers' memory.
    pub(super) fn stop(&mut self) {
        while let Some(active) = self.jobs.pop() {
            self.spare_jobs.push(active.job);
        }
        self.memory.forget_peers();
    }

    pub(super) fn plan(&self) -> &Arc<Plan> {
        self.plan.as_ref().expect("taken out by methods that put it back")
    }

    pub(super) fn stream(&self) -> Stream {
        self.plan().stream()
    }

    /// The run's number in its stream.
    pub(super) fn number(&self) -> u64 {
        self.parameters.number.number
    }

    fn bank(&self) -> &Bank {
        &self.parameters.number.bank
    }

    /// How many runs of its stream have to be complete before its bank is free.
    pub(super) fn needed_runs(&self) -> u64 {
        self.bank().needed()
    }

    pub(super) fn is_complete(&self) -> bool {
        self.lanes.unfinished == 0
    }

    /// Whether something of this run is being computed here and now.
    pub(super) fn is_computing(&self) -> bool {
        !self.jobs.is_empty()
    }

    /// A peer whose signal did not match since this was asked last.
    pub(super) fn take_mismatch(&mut self) -> Option<Rank> {
        self.mismatch.take()
    }

    /// Goes as far as it can; true when anything moved.
    pub(super) fn advance(&mut self, context: &mut Context) -> Result<bool, StepError> {
        let Some(plan) = self.plan.take() else { return Ok(false) };
        let moved = self.advance_lanes(&plan, context);
        self.plan = Some(plan);
        moved
    }

    fn advance_lanes(&mut self, plan: &Plan, context: &mut Context) -> Result<bool, StepError> {
        let mut moved = !self.jobs.is_empty() && self.advance_jobs(plan, context);
        if plan.is_paced() {
            moved |= self.submit_pending(plan, context)?;
        }
        for lane in plan.lanes() {
            if self.lanes.lanes[lane as usize].first < plan.chunks(lane)
                && self.lanes.may_advance(plan, context, lane)
            {
                moved |= self.advance_lane(plan, context, lane)?;
            }
        }
        Ok(plan.is_paced() && self.lanes.raise_chunk_limit(plan) || moved)
    }

    /// Goes on until nothing moves, or for [`TURN_BYTES`]: while this rank combines its own chunks,
    /// peers wait for the signals of its other lanes.
    fn advance_lane(&mut self, plan: &Plan, context: &mut Context, lane: u32) -> Result<bool, StepError> {
        let mut moved = false;
        self.turn_bytes = 0;
        loop {
            let state = self.lanes.lanes[lane as usize];
            let mut is_any_complete = false;
            for chunk in state.first..state.next {
                let step = plan.chunk_step(lane, chunk, 0);
                moved |= self.advance_chunk(context, step)?;
                is_any_complete |= self.lanes.instance(plan, step.address()).remaining == 0;
                if self.turn_bytes >= TURN_BYTES {
                    break;
                }
            }
            let may_begin = state.next == 0 || is_any_complete || state.is_at_limit;
            let began = may_begin && self.lanes.begin_chunks(plan, lane);
            moved |= began;
            if !began || self.turn_bytes >= TURN_BYTES {
                self.lanes.settle(plan, lane, self.turn_bytes < TURN_BYTES);
                return Ok(moved);
            }
        }
    }

    fn advance_chunk(&mut self, context: &mut Context, first: ChunkStep<'_>) -> Result<bool, StepError> {
        let plan = first.plan();
        let steps = plan.steps(first.address().lane).len() as u32;
        let program_counter = self.lanes.instance(plan, first.address()).program_counter;
        let mut step_number = program_counter;
        let mut completed = 0;
        let mut wait_reason = WaitReason::Steps;
        while step_number < steps {
            let step = first.with_step(step_number);
            if !step.after().iter().all(|&(earlier, lag)| self.lanes.is_complete(plan, step, earlier, lag)) {
                break;
            }
            let state = plan.state_of(step.address());
            match self.issue(context, step)? {
                Issue::Blocked => {
                    wait_reason = WaitReason::Unknown;
                    break;
                }
                Issue::NotSignalled { from, signal_slot } => {
                    wait_reason = WaitReason::Signal { from, signal_slot };
                    break;
                }
                Issue::UnderWay => self.lanes.states[state] = StepState::UnderWay,
                Issue::Complete => {
                    self.lanes.states[state] = StepState::Complete;
                    completed += 1;
                }
            }
            step_number += 1;
        }
        let instance = self.lanes.instance(plan, first.address());
        instance.program_counter = step_number;
        instance.remaining -= completed;
        instance.wait_reason = wait_reason;
        Ok(step_number != program_counter)
    }

    /// A transfer of this run ended well.
    pub(super) fn transfer_done(&mut self, id: TransferId) {
        let Some(plan) = self.plan.take() else { return };
        let address = StepAddress::of(id);
        if plan.is_paced() {
            let chunk = self.lanes.instance(&plan, address).chunk;
            let step = plan.chunk_step(address.lane, chunk, address.step);
            if let OpProgram::Put(put) = step.op() {
                // Another put may have its turn.
                self.pending_puts.ended(put.to, step.bytes());
            }
        }
        self.lanes.complete(&plan, address);
        self.plan = Some(plan);
    }

    fn advance_jobs(&mut self, plan: &Plan, context: &mut Context) -> bool {
        let mut moved = false;
        let mut index = 0;
        while index < self.jobs.len() {
            let done_before = self.jobs[index].job.elements_done;
            if advance(&mut *context.compute, &mut self.jobs[index].job, context.now)
                && self.has_read_whole(plan, index)
            {
                let ActiveJob { address, job, stages } = self.jobs.swap_remove(index);
                self.spare_jobs.push(job);
                if stages {
                    self.lanes.unsettle(address.lane);
                    self.staged.push(address);
                } else {
                    self.lanes.complete(plan, address);
                }
                moved = true;
            } else {
                moved |= self.jobs[index].job.elements_done != done_before;
                index += 1;
            }
        }
        moved
    }

    /// Whether a job that is done has read all bytes before their owners took them away.
    fn has_read_whole(&self, plan: &Plan, index: usize) -> bool {
        let ActiveJob { address, stages, .. } = self.jobs[index];
        match &plan.steps(address.lane)[address.step as usize].op() {
            OpProgram::Reduce { from, .. } if !stages => self.memory.are_shared(plan, plan.places(*from)),
            _ => true,
        }
    }

    /// Whether a peer's signal is of the call that this run carries out.
    fn is_of_this_call(&self, plan: &Plan, from: Rank, header: &Header) -> bool {
        match &self.parameters.round {
            None => header.is_of(self.number(), plan.mark(self.parameters.number.history, from)),
            Some(_) => self.told(plan, from, header).is_some(),
        }
    }

    /// What a peer's signal tells, if it is of this run and the run is in a round.
    fn told(&self, plan: &Plan, from: Rank, header: &Header) -> Option<InRound> {
        let history = plan.mark(self.parameters.number.history, from);
        let round = self.parameters.round.as_ref()?;
        round.contributors().of(header, self.number(), history)
    }

    /// A signal has come in a signal slot that is kept for this peer; the lane that waits on it, if
    /// one does, is to be looked at.
    pub(super) fn mark_signalled(&mut self, from: Rank, signal_slot: u16) {
        let offset = self.bank().incoming_offset(signal_slot);
        if let Some(lane) = offset.and_then(|offset| self.plan().lane_waiting_on(from, offset)) {
            self.lanes.unsettle(lane);
        }
    }

    /// The peers without whose next signals this run does not go on.
    pub(super) fn needs_signal(&self) -> impl Iterator<Item = Rank> + '_ {
        self.waits(1).map(|(_, from, _)| from)
    }

    /// The next waits of every chunk under way, among that many steps: with the peer and its signal
    /// slot.
    fn waits(&self, steps_max: u32) -> impl Iterator<Item = (ChunkStep<'_>, Rank, u16)> {
        let plan = &**self.plan();
        self.lanes.under_way(plan).flat_map(move |next| {
            let StepAddress { lane, step: first, .. } = next.address();
            let steps = plan.steps(lane).len() as u32;
            let steps =
                (first..steps.min(first.saturating_add(steps_max))).map(move |step| next.with_step(step));
            steps.filter_map(|step| match step.op() {
                OpProgram::Wait { from, signal_slot, .. } => {
                    Some((step, *from, self.wait_slot(step, *signal_slot)))
                }
                _ => None,
            })
        })
    }

    /// The signal slot of a wait.
    fn wait_slot(&self, step: ChunkStep<'_>, signal_slot: u32) -> u16 {
        self.bank().incoming(step.signal_offset(signal_slot))
    }

    /// Whether a signal of the peer says that its call of this run's number is another one than
    /// this run's.
    pub(super) fn differs_by_signal(&self, signals: &PeerSignals, peer: Rank) -> bool {
        self.waits(1).filter(|(_, from, _)| *from == peer).any(|(step, from, signal_slot)| {
            let header = signals.unconsumed(from, signal_slot);
            header.is_some_and(|header| {
                header.is_of_run(self.number()) && !self.is_of_this_call(step.plan(), from, &header)
            })
        })
    }

    /// Searches for signals of peers at steps that this run has not come to: the step that it waits
    /// for now may hide them.
    pub(super) fn look_for_arrivals(&mut self, context: &Context) {
        let elapsed_ns = context.elapsed_ns;
        if elapsed_ns < self.observer.search_ns {
            return;
        }
        self.observer.search_ns = elapsed_ns + SEARCH_NS_MIN.max(elapsed_ns / SEARCH_SHARE);
        let mut observer = std::mem::take(&mut self.observer);
        for (_, from, signal_slot) in self.waits(STEPS_AHEAD_MAX) {
            let header = context.signals.unconsumed(from, signal_slot);
            if let Some(header) = header.filter(|header| header.is_of_run(self.number())) {
                observer.arrived(from, &header, elapsed_ns);
            }
        }
        self.observer = observer;
    }

    /// The peers for whose steps this run waits, each with the step in words. A peer that has done
    /// its step does not count, also where this run has not come to it since, as others of a higher
    /// priority went first.
    pub(super) fn waits_for(&self, signals: &PeerSignals, found: &mut dyn FnMut(Rank, &dyn Fn() -> String)) {
        let plan = &**self.plan();
        for next in self.lanes.under_way(plan) {
            let StepAddress { lane, step: program_counter, .. } = next.address();
            let mut tell = |step: ChunkStep<'_>, peer: Rank, what: &str| {
                found(peer, &|| format!("{what}, {step}"));
            };
            let issued =
                (0..program_counter.min(plan.steps(lane).len() as u32)).map(|step| next.with_step(step));
            for step in issued {
                let state = self.lanes.states[plan.state_of(step.address())];
                if let OpProgram::Put(put) = step.op()
                    && state == StepState::UnderWay
                {
                    tell(step, put.to, "a put to it that does not complete");
                }
            }
            if program_counter as usize == plan.steps(lane).len() {
                continue;
            }
            match next.op() {
                OpProgram::Wait { from, signal_slot, .. } => {
                    let header = signals.unconsumed(*from, self.wait_slot(next, *signal_slot));
                    if !header.is_some_and(|header| self.is_of_this_call(plan, *from, &header)) {
                        tell(next, *from, "a wait for its signal");
                    }
                }
                OpProgram::Signal { to, .. } | OpProgram::Put(PutProgram { to, .. }) => {
                    if signals.credit(*to, plan.stream()) < self.needed_runs() {
                        tell(next, *to, "a write that it has no room for yet");
                    }
                }
                OpProgram::Reduce { from, into, .. } => {
                    let places = plan.places(*from).iter().chain(plan.places(*into));
                    for place in places.filter(|place| !plan.is_own(place)) {
                        tell(next, place.rank, "its memory, which is out of reach");
                    }
                }
            }
        }
    }
}

//! One rank's share of one run: the executor.
//!
//! A pure state machine over a [`Device`](pleach_transport::Device) and a
//! [`Compute`](crate::compute::Compute): it never blocks and reads no clock. Each lane walks its
//! chunks, each chunk under way has a program counter (steps are issued in order) and the states of
//! its steps. What a step does is in [`super::step`].
//!
//! **Invariant:** no byte that a peer sent or shares is used before a signal of that peer *in this
//! run* was compared with this rank's own signature: every signal carries run and signature
//! ([`super::header`]), and a wait that sees another one does not complete.

use std::sync::Arc;

use pleach_transport::{MapError, Mapped, SubmitError, TransferId};
use pleach_vocabulary::Rank;

use super::address::advance;
use super::at::At;
use super::bank::Bank;
use super::bytes::Bytes;
use super::ground::Ground;
use super::header::Landing;
use super::hold::Hold;
use super::observed::Noted;
use super::outbox::Outboxes;
use super::plan::{LanePlan, Plan};
use super::program::{LaneProgram, OpProgram};
use super::short::Progress;
use super::stream::Stream;
use crate::compute::Job;

/// Why a run cannot go on.
#[derive(Debug)]
pub(super) enum Trouble {
    Submit { peer: Rank, error: SubmitError },
    Map { peer: Rank, error: MapError },
}

/// What a lane may combine or copy before the next one has its turn, in bytes of chunks.
const TURN_BYTES: usize = 1 << 20;

const NOT_ISSUED: u8 = 0;
const UNDER_WAY: u8 = 1;
const COMPLETE: u8 = 2;

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct LaneState {
    /// Chunks before this one are complete.
    pub(super) first: u32,
    /// Chunks from this one on have not begun.
    pub(super) next: u32,
    /// Nothing but what its chunks are known to wait for makes it go on: see [`Hold`].
    pub(super) is_settled: bool,
    /// Its next chunk waits for other lanes: see [`Run::catch_up`].
    pub(super) is_ahead: bool,
}

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Instance {
    pub(super) chunk: u32,
    pub(super) program_counter: u32,
    remaining: u32,
    pub(super) hold: Hold,
}

#[derive(Debug, Default)]
pub(super) struct PeerState {
    pub(super) heard: bool,
    pub(super) input: Landing,
    pub(super) output: Landing,
    pub(super) input_mapped: Option<Mapped>,
    pub(super) output_mapped: Option<Mapped>,
    pub(super) scratch_mapped: Option<Mapped>,
}

/// A step with all that it stands in.
#[derive(Clone, Copy)]
pub(super) struct Site<'a> {
    pub(super) plan: &'a Plan,
    pub(super) lane: &'a LaneProgram,
    pub(super) at: At,
    pub(super) chunk: u32,
}

impl Site<'_> {
    /// Length of the chunk.
    pub(super) fn bytes(&self) -> usize {
        self.plan.layout.chunk_bytes(self.lane.block, self.chunk)
    }
}

pub(super) struct ActiveJob {
    at: At,
    pub(super) job: Job,
    /// It only brings what the step puts to where it is put from.
    stages: bool,
}

/// What differs between the runs of a plan.
pub(super) struct Parameters {
    pub(super) number: u64,
    pub(super) history: u64,
    pub(super) bank: Bank,
    pub(super) input: Bytes,
    pub(super) output: Bytes,
}

/// See the module. Reused from run to run, so that a run allocates nothing.
pub(super) struct Run {
    /// Only [`Run::advance`] takes it out, for its own time.
    plan: Option<Arc<Plan>>,
    pub(super) parameters: Parameters,
    pub(super) slot_in_engine: u8,
    pub(super) lanes: Vec<LaneState>,
    pub(super) instances: Vec<Instance>,
    states: Vec<u8>,
    lanes_left: u32,
    /// No lane has begun this chunk or a later one.
    pub(super) horizon: u32,
    pub(super) peers: Vec<PeerState>,
    pub(super) touched: Vec<Rank>,
    jobs: Vec<ActiveJob>,
    /// Puts whose bytes were brought to where they are put from.
    pub(super) staged: Vec<At>,
    pub(super) spare_jobs: Vec<Job>,
    /// Where links set the pace.
    pub(super) outboxes: Outboxes,
    /// Bytes of chunks that were combined or copied in this lane's turn; at least [`TURN_BYTES`]
    /// when it is over.
    pub(super) turn_bytes: usize,
    /// A peer whose signal did not match, to be asked what it is doing.
    pub(super) suspect: Option<Rank>,
    pub(super) noted: Noted,
}

pub(super) enum Issue {
    Blocked,
    /// Until something comes in this signal slot.
    Unnoticed {
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
            lanes: Vec::new(),
            instances: Vec::new(),
            states: Vec::new(),
            lanes_left: 0,
            horizon: 0,
            peers: Vec::new(),
            touched: Vec::new(),
            jobs: Vec::new(),
            staged: Vec::new(),
            spare_jobs: Vec::new(),
            outboxes: Outboxes::default(),
            turn_bytes: 0,
            suspect: None,
            noted: Noted::default(),
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
        let lanes = plan.lanes.len();
        if !self.plan.as_ref().is_some_and(|before| Arc::ptr_eq(before, plan)) {
            self.plan = Some(plan.clone());
            self.instances.resize(lanes * plan.program.window as usize, Instance::default());
            self.states.resize(plan.states as usize, NOT_ISSUED);
        }
        self.lanes.clear();
        self.lanes.resize(lanes, LaneState::default());
        self.lanes_left = lanes as u32;
        self.horizon = plan.lead;
        if plan.is_paced() {
            self.outboxes.reset(&plan.under_way_max);
        }
        if self.peers.len() != plan.program.ranks as usize {
            self.peers = (0..plan.program.ranks).map(|_| PeerState::default()).collect();
            self.touched.clear();
        }
        self.forget_peers();
        self.staged.clear();
        self.suspect = None;
        self.noted.reset();
    }

    /// Goes on where so many steps of every lane are complete, in a run of one chunk a lane.
    pub(super) fn resume(&mut self, plan: &Plan, progress: &Progress) {
        for (number, lane) in plan.program.lanes.iter().enumerate() {
            self.begin_chunks(plan, number as u32, lane);
            let done = progress[number];
            let states = plan.lanes[number].states as usize;
            self.states[states..states + done as usize].fill(COMPLETE);
            let instance = &mut self.instances[number * plan.program.window as usize];
            instance.program_counter = done;
            instance.remaining = lane.steps - done;
            self.begin_chunks(plan, number as u32, lane);
        }
    }

    fn forget_peers(&mut self) {
        while let Some(rank) = self.touched.pop() {
            self.peers[rank as usize] = PeerState::default();
        }
    }

    /// Gives back what belongs to the caller; no pointer of it is used afterwards.
    pub(super) fn release(&mut self) {
        self.parameters.input = Bytes::None;
        self.parameters.output = Bytes::None;
        self.stop();
    }

    /// Goes on no more: lets go of what it was computing and of peers' memory.
    pub(super) fn stop(&mut self) {
        while let Some(active) = self.jobs.pop() {
            self.spare_jobs.push(active.job);
        }
        self.forget_peers();
    }

    pub(super) fn plan(&self) -> &Arc<Plan> {
        self.plan.as_ref().expect("taken out by `advance` alone, which puts it back")
    }

    pub(super) fn is_complete(&self) -> bool {
        self.lanes_left == 0
    }

    pub(super) fn stream(&self) -> Stream {
        self.plan().stream
    }

    /// Goes as far as it can; true when anything moved.
    pub(super) fn advance(&mut self, ground: &mut Ground<'_>) -> Result<bool, Trouble> {
        let Some(plan) = self.plan.take() else { return Ok(false) };
        let moved = self.advance_lanes(&plan, ground);
        self.plan = Some(plan);
        moved
    }

    fn advance_lanes(&mut self, plan: &Plan, ground: &mut Ground<'_>) -> Result<bool, Trouble> {
        let mut moved = !self.jobs.is_empty() && self.advance_jobs(plan, ground);
        if plan.is_paced() {
            moved |= self.send_waiting(plan, ground)?;
        }
        for (lane_number, lane) in plan.program.lanes.iter().enumerate() {
            if self.lanes[lane_number].first < plan.lanes[lane_number].chunks
                && self.may_advance(plan.program.window, ground, lane_number as u32)
            {
                moved |= self.advance_lane(plan, ground, lane_number as u32, lane)?;
            }
        }
        Ok(self.catch_up(plan) || moved)
    }

    /// Goes on until nothing moves, or for [`TURN_BYTES`]: while this rank combines its own chunks,
    /// peers wait for what its other lanes tell them.
    fn advance_lane(
        &mut self,
        plan: &Plan,
        ground: &mut Ground<'_>,
        lane_number: u32,
        lane: &LaneProgram,
    ) -> Result<bool, Trouble> {
        let mut moved = false;
        self.turn_bytes = 0;
        loop {
            let state = self.lanes[lane_number as usize];
            let mut is_any_complete = false;
            for chunk in state.first..state.next {
                let at = At { lane: lane_number, slot: chunk % plan.program.window, step: 0 };
                moved |= self.advance_instance(ground, Site { plan, lane, at, chunk })?;
                is_any_complete |= self.instance(plan, at).remaining == 0;
                if self.turn_bytes >= TURN_BYTES {
                    break;
                }
            }
            let may_begin = state.next == 0 || is_any_complete || state.is_ahead;
            let began = may_begin && self.begin_chunks(plan, lane_number, lane);
            moved |= began;
            if !began || self.turn_bytes >= TURN_BYTES {
                self.settle(plan.program.window, lane_number, self.turn_bytes < TURN_BYTES);
                return Ok(moved);
            }
        }
    }

    /// The next lane has its turn.
    pub(super) fn end_turn(&mut self) {
        self.turn_bytes = TURN_BYTES;
    }

    /// Retires complete chunks and begins those that may; true when any began.
    fn begin_chunks(&mut self, plan: &Plan, lane_number: u32, lane: &LaneProgram) -> bool {
        let window = plan.program.window;
        let LanePlan { chunks, states } = plan.lanes[lane_number as usize];
        let first_instance = lane_number * window;
        let state = &mut self.lanes[lane_number as usize];
        while state.first < state.next
            && self.instances[(first_instance + state.first % window) as usize].remaining == 0
        {
            state.first += 1;
            if state.first == chunks {
                self.lanes_left -= 1;
            }
        }
        let mut began = false;
        state.is_ahead = false;
        while state.next < chunks {
            if state.next >= self.horizon {
                state.is_ahead = true;
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
                remaining: lane.steps,
                hold: Hold::Anything,
            };
            let states = (states + slot * lane.steps) as usize;
            self.states[states..states + lane.steps as usize].fill(NOT_ISSUED);
            state.next += 1;
            began = true;
        }
        began
    }

    fn state_index(plan: &Plan, lane: &LaneProgram, at: At) -> usize {
        (plan.lanes[at.lane as usize].states + at.slot * lane.steps + at.step) as usize
    }

    /// Whether the step has begun and is not complete.
    pub(super) fn is_under_way(&self, plan: &Plan, lane: &LaneProgram, at: At) -> bool {
        self.states[Self::state_index(plan, lane, at)] == UNDER_WAY
    }

    pub(super) fn instance(&mut self, plan: &Plan, at: At) -> &mut Instance {
        &mut self.instances[(at.lane * plan.program.window + at.slot) as usize]
    }

    fn is_dependency_complete(&self, site: Site<'_>, step: u32, lag: u32) -> bool {
        let Site { plan, lane, at, chunk } = site;
        let Some(earlier) = chunk.checked_sub(lag) else { return true };
        if earlier < self.lanes[at.lane as usize].first {
            return true;
        }
        let window = plan.program.window;
        let slot = earlier % window;
        // An instance that already serves a later chunk has completed the earlier one.
        self.instances[(at.lane * window + slot) as usize].chunk != earlier
            || self.states[Self::state_index(plan, lane, At { slot, step, ..at })] == COMPLETE
    }

    fn advance_instance(&mut self, ground: &mut Ground<'_>, site: Site<'_>) -> Result<bool, Trouble> {
        let Site { plan, lane, at, .. } = site;
        let program = &*plan.program;
        let program_counter = self.instance(plan, at).program_counter;
        let mut step_number = program_counter;
        let mut completed = 0;
        let mut hold = Hold::Steps;
        while step_number < lane.steps {
            let step = &program.steps[(lane.first_step + step_number) as usize];
            let site = Site { at: At { step: step_number, ..at }, ..site };
            let after = &program.after[step.after.0 as usize..step.after.1 as usize];
            if !after.iter().all(|&(step, lag)| self.is_dependency_complete(site, step, lag)) {
                break;
            }
            let issue = match &step.op {
                OpProgram::Wait { from, signal_slot, landing } => {
                    self.wait(ground, site, (*from, *signal_slot, *landing))
                }
                OpProgram::Signal { to, signal_slot } => {
                    self.signal(ground, site, (*to, *signal_slot), &[])?
                }
                OpProgram::Put(put) => self.put(ground, site, put)?,
                OpProgram::Reduce { from, into, completes } => {
                    let places = &program.places;
                    let from = &places[from.0 as usize..from.1 as usize];
                    let into = &places[into.0 as usize..into.1 as usize];
                    self.reduce(ground, site, from, into, *completes)?
                }
            };
            let state = Self::state_index(plan, lane, site.at);
            match issue {
                Issue::Blocked => {
                    hold = Hold::Anything;
                    break;
                }
                Issue::Unnoticed { from, signal_slot } => {
                    hold = Hold::Signal { from, signal_slot };
                    break;
                }
                Issue::UnderWay => self.states[state] = UNDER_WAY,
                Issue::Complete => {
                    self.states[state] = COMPLETE;
                    completed += 1;
                }
            }
            step_number += 1;
        }
        let instance = self.instance(plan, at);
        instance.program_counter = step_number;
        instance.remaining -= completed;
        instance.hold = hold;
        Ok(step_number != program_counter)
    }

    pub(super) fn complete(&mut self, plan: &Plan, at: At) {
        let lane = &plan.program.lanes[at.lane as usize];
        let state = Self::state_index(plan, lane, at);
        debug_assert_eq!(self.states[state], UNDER_WAY);
        self.states[state] = COMPLETE;
        self.instance(plan, at).remaining -= 1;
        self.lanes[at.lane as usize].is_settled = false;
    }

    /// A transfer of this run ended well.
    pub(super) fn transfer_done(&mut self, id: TransferId) {
        let Some(plan) = self.plan.take() else { return };
        let at = At::of(id);
        if plan.is_paced() {
            self.make_room(&plan, at);
        }
        self.complete(&plan, at);
        self.plan = Some(plan);
    }

    /// What is computed piece by piece.
    pub(super) fn compute(&mut self, at: At, job: Job) {
        self.jobs.push(ActiveJob { at, job, stages: false });
    }

    /// What brings a put's bytes to where they are put from.
    pub(super) fn stage(&mut self, at: At, job: Job) {
        self.jobs.push(ActiveJob { at, job, stages: true });
    }

    /// Whether a put's bytes are on their way there.
    pub(super) fn is_staging(&self, at: At) -> bool {
        self.jobs.iter().any(|job| job.stages && job.at == at)
    }

    fn advance_jobs(&mut self, plan: &Plan, ground: &mut Ground<'_>) -> bool {
        let mut moved = false;
        let mut index = 0;
        while index < self.jobs.len() {
            let done_before = self.jobs[index].job.elements_done;
            if advance(ground.compute, &mut self.jobs[index].job, ground.now)
                && self.has_read_whole(plan, index)
            {
                let ActiveJob { at, job, stages } = self.jobs.swap_remove(index);
                self.spare_jobs.push(job);
                if stages {
                    self.lanes[at.lane as usize].is_settled = false;
                    self.staged.push(at);
                } else {
                    self.complete(plan, at);
                }
                moved = true;
            } else {
                moved |= self.jobs[index].job.elements_done != done_before;
                index += 1;
            }
        }
        moved
    }

    /// Whether a job that is done has read nothing that its owner had taken away; as in
    /// [`Run::reduce`].
    fn has_read_whole(&self, plan: &Plan, index: usize) -> bool {
        let ActiveJob { at, stages, .. } = self.jobs[index];
        let program = &*plan.program;
        let step = program.lanes[at.lane as usize].first_step + at.step;
        match &program.steps[step as usize].op {
            OpProgram::Reduce { from, .. } if !stages => {
                self.are_shared(program.rank, &program.places[from.0 as usize..from.1 as usize])
            }
            _ => true,
        }
    }

    /// Whether something of this run is being computed here and now.
    pub(super) fn is_computing(&self) -> bool {
        !self.jobs.is_empty()
    }
}

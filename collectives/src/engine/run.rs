//! One rank's share of one run: the executor.
//!
//! A pure state machine over a [`Device`] and a [`Compute`]: it never blocks and reads no clock. Each lane walks its
//! chunks, each chunk under way has a program counter (steps are issued in order) and the states of its steps. What a
//! step does is in [`super::step`].
//!
//! **Invariant:** no byte that a peer sent or shares is used before a notice of that peer *in this run* was compared with
//! this rank's own signature: every notice carries run and signature ([`super::header`]), and a wait that sees another
//! one does not complete.

use std::sync::Arc;

use pleach_transport::{
    Cells, Device, LentSlice, MapError, Mapped, Nanos, RemoteSlice, Slice, SubmitError, TransferId,
};

use super::address::{Address, advance};
use super::credit::Credits;
use super::header::{Header, Landing};
use super::hold::Hold;
use super::observed::Noted;
use super::plan::{LanePlan, Plan};
use super::program::{LaneProgram, OpProgram, PutProgram};
use super::short::Progress;
use super::signature::Stream;
use crate::Rank;
use crate::compute::{Compute, Job};

/// A caller's bytes for the time of a run.
#[derive(Clone, Debug)]
pub enum Bytes {
    /// There are none (this rank gives or gets nothing).
    None,
    /// Registered: peers may touch it in place.
    Registered(Slice),
    /// Registered, and held by the caller until the run's outcome was taken.
    Lent(LentSlice),
    /// Only this rank touches it; what peers must see is staged through scratch.
    Private {
        /// First byte; valid until the run's outcome was taken.
        base: Address,
        /// How many bytes.
        len: usize,
    },
}

impl Bytes {
    pub(super) fn base(&self) -> Address {
        match self {
            Self::None => Address::NULL,
            Self::Registered(slice) => Address(slice.as_ptr()),
            Self::Lent(slice) => Address(slice.as_ptr()),
            Self::Private { base, .. } => *base,
        }
    }

    pub(super) fn landing(&self) -> Landing {
        let remote = match self {
            Self::Registered(slice) => slice.remote(),
            Self::Lent(slice) => slice.remote(),
            Self::None | Self::Private { .. } => return Landing::default(),
        };
        Landing { key: remote.key, offset: remote.offset }
    }

    pub(crate) fn len(&self) -> usize {
        match self {
            Self::None => 0,
            Self::Registered(slice) => slice.len(),
            Self::Lent(slice) => slice.len(),
            Self::Private { len, .. } => *len,
        }
    }

    pub(super) fn is_registered(&self) -> bool {
        matches!(self, Self::Registered(_) | Self::Lent(_))
    }
}

/// Told what a rank acts on; for checkers.
pub trait Witness: Send {
    /// The rank goes on because the cell that it keeps for `from` counts `count`.
    fn consumed(&mut self, from: Rank, cell: u16, count: u64);

    /// So many runs of a sequence (the group's collectives, the messages from one rank to another) are complete here, from
    /// the first one on without a gap; peers may be told from now on.
    fn completed(&mut self, sequence: u64, runs: u64);

    /// The rank has written to a peer's memory through a mapping, other than by its processor ([`Compute`]).
    fn wrote(&mut self, address: *const u8, len: usize);

    /// The rank knows, otherwise than by a notice that it waited for, that `from` has completed so many runs of a sequence.
    fn heard_completed(&mut self, from: Rank, sequence: u64, runs: u64);
}

/// What a run stands on; owned by the engine.
pub(super) struct Ground<'a> {
    pub(super) device: &'a mut dyn Device,
    pub(super) compute: &'a mut dyn Compute,
    /// By rank; empty for this rank.
    pub(super) cells: &'a [Cells],
    /// By rank and cell: how many notices were consumed.
    pub(super) consumed: &'a mut [Vec<u64>],
    pub(super) credits: &'a mut Credits,
    pub(super) scratch: &'a Slice,
    /// By rank.
    pub(super) peer_scratch: &'a [RemoteSlice],
    /// How many runs this rank has completed.
    pub(super) completed: u64,
    pub(super) witness: Option<&'a mut (dyn Witness + 'static)>,
    /// A cell of this rank that a wait found as it was.
    pub(super) blocked: &'a mut Option<Blocked>,
    /// Every notice that comes is told by [`Run::stir`], so that cells need not be looked at.
    pub(super) hears_all: bool,
    pub(super) now: Nanos,
    /// How long this rank has been in the call, in nanoseconds; zero where nobody has looked at the clock.
    pub(super) elapsed_ns: u64,
}

impl Ground<'_> {
    /// Whether the cell's next notice has come; remembers that it is waited for where it has not.
    pub(super) fn has_come(&mut self, from: Rank, cell: u16) -> bool {
        let count = self.consumed[from as usize][usize::from(cell)];
        let has_come = self.cells[from as usize].count(cell) != count;
        if !has_come {
            *self.blocked = Some(Blocked { from, cell, count });
        }
        has_come
    }

    /// Whether the peer is known to have completed so many runs of the stream; remembers that its next credit is waited for
    /// where it is not.
    pub(super) fn has_completed(&mut self, peer: Rank, stream: Stream, runs: u64) -> bool {
        if self.credits.of(peer, stream) >= runs {
            return true;
        }
        let cells = &self.cells[peer as usize];
        let found = self.credits.look(peer, stream, runs, cells, self.witness.as_deref_mut());
        if let Err((cell, count)) = found {
            *self.blocked = Some(Blocked { from: peer, cell, count });
        }
        found.is_ok()
    }

    /// The run goes on because of that notice, whose header was found to be that of the call.
    pub(super) fn consume(&mut self, from: Rank, cell: u16, header: &Header, stream: Stream) {
        let consumed = &mut self.consumed[from as usize][usize::from(cell)];
        *consumed += 1;
        if let Some(witness) = &mut self.witness {
            witness.consumed(from, cell, *consumed);
        }
        self.credits.hear(from, stream, header.completed());
    }
}

/// A cell whose next notice some run waits for.
#[derive(Clone, Copy, Debug)]
pub(super) struct Blocked {
    pub(super) from: Rank,
    pub(super) cell: u16,
    /// What it counts as long as nothing has come.
    pub(super) count: u64,
}

/// Which cells and which scratch a run uses: the same on all ranks but for the messages between two.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Bank {
    /// First cell that this rank notifies at its peers.
    pub(super) notify_base: u32,
    /// First cell that this rank waits on.
    pub(super) wait_base: u32,
    /// Where its slots begin in this rank's scratch, in bytes.
    pub(super) scratch_base: u64,
    /// Where they begin in a peer's scratch, in bytes.
    pub(super) peer_scratch_base: u64,
    /// A peer may be written to when it has completed so many runs: then it does not use this bank any more.
    pub(super) needed: u64,
}

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
}

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Instance {
    chunk: u32,
    program_counter: u32,
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

/// Names a step of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct At {
    pub(super) lane: u32,
    pub(super) slot: u32,
    pub(super) step: u32,
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
    pub(super) peers: Vec<PeerState>,
    pub(super) touched: Vec<Rank>,
    jobs: Vec<ActiveJob>,
    /// Puts whose bytes were brought to where they are put from.
    pub(super) staged: Vec<At>,
    pub(super) spare_jobs: Vec<Job>,
    /// Bytes of chunks that were combined or copied in this lane's turn; at least [`TURN_BYTES`] when it is over.
    pub(super) turn_bytes: usize,
    /// A peer whose notice did not match, to be asked what it is doing.
    pub(super) suspect: Option<Rank>,
    pub(super) noted: Noted,
}

pub(super) enum Issue {
    Blocked,
    /// Until something comes in this cell.
    Unnoticed {
        from: Rank,
        cell: u16,
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
            peers: Vec::new(),
            touched: Vec::new(),
            jobs: Vec::new(),
            staged: Vec::new(),
            spare_jobs: Vec::new(),
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
        for (lane_number, lane) in plan.program.lanes.iter().enumerate() {
            if self.lanes[lane_number].first < plan.lanes[lane_number].chunks
                && self.may_advance(plan.program.window, ground, lane_number as u32)
            {
                moved |= self.advance_lane(plan, ground, lane_number as u32, lane)?;
            }
        }
        Ok(moved)
    }

    /// Goes on until nothing moves, or for [`TURN_BYTES`]: while this rank combines its own chunks, peers wait for what its
    /// other lanes tell them.
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
            let may_begin = state.next == 0 || is_any_complete;
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
        while state.next < chunks {
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

    fn instance(&mut self, plan: &Plan, at: At) -> &mut Instance {
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
                OpProgram::Wait { from, cell, landing } => self.wait(ground, site, (*from, *cell, *landing)),
                OpProgram::Notify { to, cell } => self.notify(ground, site, (*to, *cell), &[])?,
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
                Issue::Unnoticed { from, cell } => {
                    hold = Hold::Notice { from, cell };
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

    fn complete(&mut self, plan: &Plan, at: At) {
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
        self.complete(&plan, At::of(id));
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
            if advance(ground.compute, &mut self.jobs[index].job, ground.now) {
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

    /// Whether something of this run is being computed here and now.
    pub(super) fn is_computing(&self) -> bool {
        !self.jobs.is_empty()
    }

    /// Chunks under way: lane, slot, chunk, next step.
    pub(super) fn under_way(&self, found: &mut dyn FnMut(u32, u32, u32, u32)) {
        let window = self.plan().program.window;
        for (lane, state) in (0..).zip(&self.lanes) {
            for chunk in state.first..state.next {
                let slot = chunk % window;
                let instance = self.instances[(lane * window + slot) as usize];
                found(lane, slot, chunk, instance.program_counter);
            }
        }
    }

    /// The peers without whose next notices this run does not go on.
    pub(super) fn needs_notice(&self, found: &mut dyn FnMut(Rank)) {
        let program = &*self.plan().program;
        for (lane_number, lane) in program.lanes.iter().enumerate() {
            let state = self.lanes[lane_number];
            for chunk in state.first..state.next {
                let slot = chunk % program.window;
                let instance = self.instances[lane_number * program.window as usize + slot as usize];
                if instance.program_counter < lane.steps
                    && let OpProgram::Wait { from, .. } =
                        program.steps[(lane.first_step + instance.program_counter) as usize].op
                {
                    found(from);
                }
            }
        }
    }

    /// The peers whose doing this run waits for, each with the step in words.
    pub(super) fn waits_for(&self, credits: &Credits, found: &mut dyn FnMut(Rank, &dyn Fn() -> String)) {
        let plan = &**self.plan();
        let program = &*plan.program;
        for (lane_number, lane) in program.lanes.iter().enumerate() {
            let state = self.lanes[lane_number];
            for chunk in state.first..state.next {
                let slot = chunk % program.window;
                let instance = self.instances[lane_number * program.window as usize + slot as usize];
                let mut tell = |step: u32, peer: Rank, what: &str| {
                    found(peer, &|| {
                        let block = lane.block_id;
                        format!("{what}, block {block} chunk {chunk} lane {lane_number} step {step}")
                    });
                };
                for step in 0..instance.program_counter.min(lane.steps) {
                    let at = At { lane: lane_number as u32, slot, step };
                    if let OpProgram::Put(PutProgram { to, .. }) =
                        program.steps[(lane.first_step + step) as usize].op
                        && self.states[Self::state_index(plan, lane, at)] == UNDER_WAY
                    {
                        tell(step, to, "a put to it that does not complete");
                    }
                }
                if instance.program_counter < lane.steps {
                    let step = instance.program_counter;
                    match program.steps[(lane.first_step + step) as usize].op {
                        OpProgram::Wait { from, .. } => tell(step, from, "a wait for its notice"),
                        OpProgram::Notify { to, .. } | OpProgram::Put(PutProgram { to, .. }) => {
                            if credits.of(to, plan.stream) < self.parameters.bank.needed {
                                tell(step, to, "a write that it has no room for yet");
                            }
                        }
                        OpProgram::Reduce { from, into, .. } => {
                            let places = program.places[from.0 as usize..from.1 as usize].iter();
                            let places = places.chain(&program.places[into.0 as usize..into.1 as usize]);
                            for place in places.filter(|place| place.rank != program.rank) {
                                tell(step, place.rank, "its memory, which is out of reach");
                            }
                        }
                    }
                }
            }
        }
    }
}

/// Of transfers whose end nobody waits for.
pub(super) const NOBODY: TransferId = TransferId(u64::MAX);

/// Most runs of an engine at a time, chunks under way of a lane, lanes of a rank and steps of a lane that a transfer's
/// id can name.
pub(super) const RUNS_MAX: usize = 255;
pub(super) const WINDOW_MAX: u32 = 255;
pub(super) const LANES_MAX: usize = 1 << 24;
pub(super) const STEPS_MAX: u32 = 1 << 24;

impl At {
    pub(super) fn id(self, run: u8) -> TransferId {
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
}

/// Which of the engine's runs a transfer belongs to.
pub(super) fn run_of(id: TransferId) -> usize {
    (id.0 & 0xff) as usize
}

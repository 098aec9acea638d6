//! One rank's share of one run: the executor.
//!
//! A pure state machine over a [`Device`] and a [`Compute`]: it never blocks and reads no clock. Each lane walks its
//! chunks, each chunk under way has a program counter (steps are issued in order) and the states of its steps.
//!
//! **Invariant:** no byte that a peer sent or shares is used before a notice of that peer *in this run* was compared with
//! this rank's own signature: every notice carries run and signature ([`Header`]), and a wait that sees another one does
//! not complete.

use std::sync::Arc;

use pleach_transport::{
    Cells, Device, Inline, MapError, Mapped, Nanos, Notice, RegionKey, RemoteSlice, Slice, Source,
    SubmitError, Submitted, Transfer, TransferId,
};

use super::address::{Address, advance};
use super::bank::CREDIT_CELL;
use super::header::{Header, INLINE_DATA_BYTES, Landing};
use super::layout::Layout;
use super::program::{LaneProgram, OpProgram, PlaceAt, Program};
use super::signature::{Descriptor, Stream};
use crate::Rank;
use crate::collective::{DataType, ReduceOp};
use crate::compute::{Compute, Job};

/// A caller's bytes for the time of a run.
#[derive(Clone, Debug)]
pub enum Bytes {
    /// There are none (this rank gives or gets nothing).
    None,
    /// Registered: peers may touch it in place.
    Registered(Slice),
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
            Self::Private { base, .. } => *base,
        }
    }

    fn landing(&self) -> Landing {
        match self {
            Self::Registered(slice) => {
                let remote = slice.remote();
                Landing { key: remote.key, offset: remote.offset }
            }
            _ => Landing { key: RegionKey::NONE, offset: 0 },
        }
    }

    pub(super) fn is_registered(&self) -> bool {
        matches!(self, Self::Registered(_))
    }
}

/// Told what a rank acts on; for checkers.
pub trait Witness: Send {
    /// The rank goes on because the cell that it keeps for `from` counts `count`.
    fn consumed(&mut self, from: Rank, cell: u16, count: u64);

    /// So many runs of this rank are complete, from the first one on without a gap; peers may be told from now on.
    fn completed(&mut self, runs: u64);

    /// The rank knows, otherwise than by a notice that it waited for, that `from` has completed so many runs.
    fn heard_completed(&mut self, from: Rank, runs: u64);
}

/// What a run stands on; owned by the engine.
pub(super) struct Ground<'a> {
    pub(super) device: &'a mut dyn Device,
    pub(super) compute: &'a mut dyn Compute,
    /// By rank; empty for this rank.
    pub(super) cells: &'a [Cells],
    /// By rank and cell: how many notices were consumed.
    pub(super) consumed: &'a mut [Vec<u64>],
    /// By rank: how many runs it has completed, as last heard.
    pub(super) credits: &'a mut [u64],
    pub(super) scratch: &'a Slice,
    /// By rank.
    pub(super) peer_scratch: &'a [RemoteSlice],
    /// How many runs this rank has completed.
    pub(super) completed: u64,
    pub(super) witness: Option<&'a mut (dyn Witness + 'static)>,
    pub(super) now: Nanos,
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

const NOT_ISSUED: u8 = 0;
const UNDER_WAY: u8 = 1;
const COMPLETE: u8 = 2;

#[derive(Clone, Copy, Debug, Default)]
struct LaneState {
    /// Chunks before this one are complete.
    first: u32,
    /// Chunks from this one on have not begun.
    next: u32,
    chunks: u32,
    /// Where its states begin.
    states: u32,
}

#[derive(Clone, Copy, Debug, Default)]
struct Instance {
    chunk: u32,
    program_counter: u32,
    remaining: u32,
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

#[derive(Clone, Copy, Debug)]
pub(super) struct At {
    pub(super) lane: u32,
    pub(super) slot: u32,
    pub(super) step: u32,
}

struct ActiveJob {
    at: At,
    job: Job,
}

/// What a run is made of; see [`Run::begin`].
pub(super) struct Parameters {
    pub(super) program: Arc<Program>,
    pub(super) descriptor: Descriptor,
    pub(super) number: u64,
    pub(super) history: u64,
    pub(super) bank: Bank,
    pub(super) chunk_bytes: usize,
    pub(super) input: Bytes,
    pub(super) output: Bytes,
    pub(super) deadline: Nanos,
    pub(super) begun_at: Nanos,
}

/// See the module. Reused from run to run, so that a run allocates nothing.
pub(super) struct Run {
    pub(super) parameters: Parameters,
    slot_in_engine: u8,
    pub(super) layout: Layout,
    /// Data travel in the cells themselves.
    pub(super) inline: bool,
    lanes: Vec<LaneState>,
    instances: Vec<Instance>,
    states: Vec<u8>,
    lanes_left: u32,
    pub(super) peers: Vec<PeerState>,
    pub(super) touched: Vec<Rank>,
    jobs: Vec<ActiveJob>,
    spare_jobs: Vec<Job>,
    /// A peer whose notice did not match, to be asked what it is doing.
    pub(super) suspect: Option<Rank>,
}

enum Issue {
    Blocked,
    UnderWay,
    Complete,
}

impl Run {
    pub(super) fn new(slot_in_engine: u8, parameters: Parameters) -> Self {
        let mut run = Self {
            parameters,
            slot_in_engine,
            layout: Layout::default(),
            inline: false,
            lanes: Vec::new(),
            instances: Vec::new(),
            states: Vec::new(),
            lanes_left: 0,
            peers: Vec::new(),
            touched: Vec::new(),
            jobs: Vec::new(),
            spare_jobs: Vec::new(),
            suspect: None,
        };
        run.reset();
        run
    }

    /// Starts another run in the same memory.
    pub(super) fn begin(&mut self, parameters: Parameters) {
        self.parameters = parameters;
        self.reset();
    }

    fn reset(&mut self) {
        let Parameters { program, descriptor, chunk_bytes, .. } = &self.parameters;
        let data_type = descriptor.data_type;
        self.layout.set(program, descriptor.count as usize, data_type.bytes(), *chunk_bytes);
        self.inline = !program.maps && *chunk_bytes <= INLINE_DATA_BYTES;
        let window = program.window;
        self.lanes.clear();
        let mut states = 0;
        for lane in &program.lanes {
            let chunks = self.layout.chunks(lane.block);
            self.lanes.push(LaneState { first: 0, next: 0, chunks, states });
            states += lane.steps * window;
        }
        self.lanes_left = program.lanes.len() as u32;
        self.instances.clear();
        self.instances.resize(program.lanes.len() * window as usize, Instance::default());
        self.states.clear();
        self.states.resize(states as usize, NOT_ISSUED);
        if self.peers.len() != program.ranks as usize {
            self.peers = (0..program.ranks).map(|_| PeerState::default()).collect();
            self.touched.clear();
        }
        for rank in self.touched.drain(..) {
            self.peers[rank as usize] = PeerState::default();
        }
        self.suspect = None;
    }

    /// Gives back what belongs to the caller; no pointer of it is used afterwards.
    pub(super) fn release(&mut self) {
        self.parameters.input = Bytes::None;
        self.parameters.output = Bytes::None;
        self.stop();
    }

    /// Goes on no more: lets go of what it was computing and of peers' memory.
    pub(super) fn stop(&mut self) {
        let Self { jobs, spare_jobs, .. } = self;
        spare_jobs.extend(jobs.drain(..).map(|active| active.job));
        for rank in self.touched.drain(..) {
            self.peers[rank as usize] = PeerState::default();
        }
    }

    pub(super) fn is_complete(&self) -> bool {
        self.lanes_left == 0
    }

    pub(super) fn stream(&self) -> Stream {
        Stream::of(self.parameters.descriptor.collective)
    }

    /// Goes as far as it can; true when anything moved.
    pub(super) fn advance(&mut self, ground: &mut Ground<'_>) -> Result<bool, Trouble> {
        let mut moved = self.advance_jobs(ground);
        let program = self.parameters.program.clone();
        for (lane_number, lane) in program.lanes.iter().enumerate() {
            let state = self.lanes[lane_number];
            if state.first == state.chunks {
                continue;
            }
            moved |= self.advance_lane(ground, &program, lane_number as u32, lane)?;
        }
        Ok(moved)
    }

    fn advance_lane(
        &mut self,
        ground: &mut Ground<'_>,
        program: &Program,
        lane_number: u32,
        lane: &LaneProgram,
    ) -> Result<bool, Trouble> {
        let mut moved = false;
        loop {
            let state = self.lanes[lane_number as usize];
            for chunk in state.first..state.next {
                let at = At { lane: lane_number, slot: chunk % program.window, step: 0 };
                moved |= self.advance_instance(ground, program, lane, at)?;
            }
            if !self.begin_chunks(program, lane_number, lane) {
                return Ok(moved);
            }
            moved = true;
        }
    }

    /// Retires complete chunks and begins those that may; true when any began.
    fn begin_chunks(&mut self, program: &Program, lane_number: u32, lane: &LaneProgram) -> bool {
        let window = program.window;
        let first_instance = lane_number * window;
        let state = &mut self.lanes[lane_number as usize];
        while state.first < state.next
            && self.instances[(first_instance + state.first % window) as usize].remaining == 0
        {
            state.first += 1;
            if state.first == state.chunks {
                self.lanes_left -= 1;
            }
        }
        let mut began = false;
        while state.next < state.chunks {
            let slot = state.next % window;
            let instance = &mut self.instances[(first_instance + slot) as usize];
            if state.next >= window && instance.remaining != 0 {
                break;
            }
            *instance = Instance { chunk: state.next, program_counter: 0, remaining: lane.steps };
            let states = (state.states + slot * lane.steps) as usize;
            self.states[states..states + lane.steps as usize].fill(NOT_ISSUED);
            state.next += 1;
            began = true;
        }
        began
    }

    fn state_index(&self, lane: &LaneProgram, at: At) -> usize {
        (self.lanes[at.lane as usize].states + at.slot * lane.steps + at.step) as usize
    }

    fn instance(&mut self, at: At) -> &mut Instance {
        &mut self.instances[(at.lane * self.parameters.program.window + at.slot) as usize]
    }

    fn is_dependency_complete(&self, lane: &LaneProgram, at: At, chunk: u32, step: u32, lag: u32) -> bool {
        let Some(earlier) = chunk.checked_sub(lag) else { return true };
        if earlier < self.lanes[at.lane as usize].first {
            return true;
        }
        let window = self.parameters.program.window;
        let slot = earlier % window;
        // An instance that already serves a later chunk has completed the earlier one.
        self.instances[(at.lane * window + slot) as usize].chunk != earlier
            || self.states[self.state_index(lane, At { slot, step, ..at })] == COMPLETE
    }

    fn advance_instance(
        &mut self,
        ground: &mut Ground<'_>,
        program: &Program,
        lane: &LaneProgram,
        at: At,
    ) -> Result<bool, Trouble> {
        let Instance { chunk, program_counter, .. } = *self.instance(at);
        let mut step_number = program_counter;
        while step_number < lane.steps {
            let step = program.steps[(lane.first_step + step_number) as usize];
            let at = At { step: step_number, ..at };
            let after = &program.after[step.after.0 as usize..step.after.1 as usize];
            if !after.iter().all(|&(step, lag)| self.is_dependency_complete(lane, at, chunk, step, lag)) {
                break;
            }
            let issue = match step.op {
                OpProgram::Wait { from, cell, landing } => {
                    self.wait(ground, lane, at, chunk, (from, cell, landing))
                }
                OpProgram::Notify { to, cell } => self.notify(ground, at, (to, cell), &[])?,
                OpProgram::Put { to, cell, src, dst, bounce } => {
                    self.put(ground, lane, at, chunk, PutAt { to, cell, src, dst, bounce })?
                }
                OpProgram::Reduce { from, into, completes } => {
                    let places = &program.places;
                    let from = &places[from.0 as usize..from.1 as usize];
                    let into = &places[into.0 as usize..into.1 as usize];
                    self.reduce(ground, lane, at, chunk, from, into, completes)?
                }
            };
            let state = self.state_index(lane, at);
            match issue {
                Issue::Blocked => break,
                Issue::UnderWay => self.states[state] = UNDER_WAY,
                Issue::Complete => {
                    self.states[state] = COMPLETE;
                    self.instance(at).remaining -= 1;
                }
            }
            step_number += 1;
        }
        self.instance(at).program_counter = step_number;
        Ok(step_number != program_counter)
    }

    fn complete(&mut self, at: At) {
        let lane = self.parameters.program.lanes[at.lane as usize];
        let state = self.state_index(&lane, at);
        debug_assert_eq!(self.states[state], UNDER_WAY);
        self.states[state] = COMPLETE;
        self.instance(at).remaining -= 1;
    }

    /// A transfer of this run ended well.
    pub(super) fn transfer_done(&mut self, id: TransferId) {
        self.complete(At::of(id));
    }

    fn cell(&self, base: u32, cell: u32, slot: u32) -> u16 {
        // The engine chose a bank with room for all cells, and banks end below 65,536.
        (base + cell * self.parameters.program.window + slot) as u16
    }

    fn wait(
        &mut self,
        ground: &mut Ground<'_>,
        lane: &LaneProgram,
        at: At,
        chunk: u32,
        (from, cell, landing): (Rank, u32, Option<PlaceAt>),
    ) -> Issue {
        let cell = self.cell(self.parameters.bank.wait_base, cell, at.slot);
        let cells = &ground.cells[from as usize];
        let consumed = &mut ground.consumed[from as usize][usize::from(cell)];
        if cells.count(cell) == *consumed {
            return Issue::Blocked;
        }
        let payload = cells.payload(cell);
        let header = Header::decode(&payload);
        if header.history != self.parameters.history || header.run != self.parameters.number {
            self.suspect = Some(from);
            return Issue::Blocked;
        }
        *consumed += 1;
        if let Some(witness) = &mut ground.witness {
            witness.consumed(from, cell, *consumed);
        }
        if self.stream() == Stream::Collectives {
            let credit = &mut ground.credits[from as usize];
            *credit = (*credit).max(header.completed());
        }
        if self.inline {
            if let Some(place) = landing {
                let bytes = self.layout.chunk_bytes(lane.block, chunk);
                let into = self.local(ground.scratch, lane, at, chunk, place);
                into.store(&header.data(&payload)[..bytes]);
            }
        } else if !self.peers[from as usize].heard {
            self.touched.push(from);
            let (input, output) = Header::landings(&payload);
            self.peers[from as usize] = PeerState { heard: true, input, output, ..PeerState::default() };
        }
        Issue::Complete
    }

    fn header(&self, ground: &Ground<'_>) -> Header {
        let Parameters { number, history, .. } = self.parameters;
        Header::new(
            number,
            history,
            if self.stream() == Stream::Collectives { ground.completed } else { number },
        )
    }

    fn payload(&self, ground: &Ground<'_>, data: &[u8]) -> Inline {
        let header = self.header(ground);
        if self.inline {
            header.with_data(data)
        } else if self.parameters.program.exposes_input || self.parameters.program.exposes_output {
            header.with_landings(self.parameters.input.landing(), self.parameters.output.landing())
        } else {
            header.alone()
        }
    }

    /// Whether the peer is known not to use this run's bank any more.
    pub(super) fn may_write(&self, ground: &mut Ground<'_>, to: Rank) -> bool {
        let needed = self.parameters.bank.needed;
        let credit = &mut ground.credits[to as usize];
        if *credit < needed && ground.cells[to as usize].count(CREDIT_CELL) > 0 {
            let payload = ground.cells[to as usize].payload(CREDIT_CELL);
            // One word, stored at once: the newest credit or the one before it, both true.
            let told = u64::from_le_bytes(payload[..8].try_into().expect("8 bytes"));
            *credit = (*credit).max(told);
            if let Some(witness) = &mut ground.witness {
                witness.heard_completed(to, told);
            }
        }
        *credit >= needed
    }

    fn notify(
        &self,
        ground: &mut Ground<'_>,
        at: At,
        (to, cell): (Rank, u32),
        data: &[u8],
    ) -> Result<Issue, Trouble> {
        if !self.may_write(ground, to) {
            return Ok(Issue::Blocked);
        }
        let cell = self.cell(self.parameters.bank.notify_base, cell, at.slot);
        let notice = Notice { cell, payload: self.payload(ground, data) };
        match ground.device.submit(to, Transfer::Notify(notice), NOBODY) {
            Ok(_) => Ok(Issue::Complete),
            Err(SubmitError::QueueFull { .. }) => Ok(Issue::Blocked),
            Err(error) => Err(Trouble::Submit { peer: to, error }),
        }
    }

    fn put(
        &mut self,
        ground: &mut Ground<'_>,
        lane: &LaneProgram,
        at: At,
        chunk: u32,
        put: PutAt,
    ) -> Result<Issue, Trouble> {
        if !self.may_write(ground, put.to) || !self.is_within_reach(ground, put.dst) {
            return Ok(Issue::Blocked);
        }
        let bytes = self.layout.chunk_bytes(lane.block, chunk);
        if self.inline {
            let mut data = [0; INLINE_DATA_BYTES];
            self.local(ground.scratch, lane, at, chunk, put.src).load(&mut data[..bytes]);
            return self.notify(ground, at, (put.to, put.cell), &data[..bytes]);
        }
        let cell = self.cell(self.parameters.bank.notify_base, put.cell, at.slot);
        let notice = Notice { cell, payload: self.payload(ground, &[]) };
        let src = self.source(ground, lane, at, chunk, &put, bytes);
        let dst = self.remote(ground, lane, at, chunk, put.dst, bytes as u64);
        let transfer = Transfer::Put { src: Source::Slice(src), dst, notice: Some(notice) };
        match ground.device.submit(put.to, transfer, at.id(self.slot_in_engine)) {
            Ok(Submitted::Ended(_)) => Ok(Issue::Complete),
            Ok(Submitted::UnderWay) => Ok(Issue::UnderWay),
            Err(SubmitError::QueueFull { .. }) => Ok(Issue::Blocked),
            Err(error) => Err(Trouble::Submit { peer: put.to, error }),
        }
    }

    #[allow(clippy::too_many_arguments)]
    fn reduce(
        &mut self,
        ground: &mut Ground<'_>,
        lane: &LaneProgram,
        at: At,
        chunk: u32,
        from: &[PlaceAt],
        into: &[PlaceAt],
        completes: bool,
    ) -> Result<Issue, Trouble> {
        let bytes = self.layout.chunk_bytes(lane.block, chunk);
        if bytes == 0 {
            return Ok(Issue::Complete);
        }
        let descriptor = self.parameters.descriptor;
        let mut job = self.spare_jobs.pop().unwrap_or_else(empty_job);
        job.data_type = descriptor.data_type;
        job.op = descriptor.op;
        let divides = completes && descriptor.op == ReduceOp::Avg;
        job.divide_by = if divides { self.parameters.program.ranks } else { 1 };
        job.elements = bytes / descriptor.data_type.bytes();
        job.elements_done = 0;
        job.from.clear();
        job.into.clear();
        for (place, is_source) in
            from.iter().map(|place| (*place, true)).chain(into.iter().map(|place| (*place, false)))
        {
            let address = if place.rank == self.parameters.program.rank {
                self.local(ground.scratch, lane, at, chunk, place)
            } else {
                match self.mapped(ground, lane, at, chunk, place) {
                    Ok(Some(address)) => address,
                    Ok(None) => {
                        self.spare_jobs.push(job);
                        return Ok(Issue::Blocked);
                    }
                    Err(trouble) => return Err(trouble),
                }
            };
            if is_source {
                job.from.push(address.0.cast_const());
            } else if (job.from.len() > 1 || job.from[0] != address.0.cast_const())
                && !job.into.contains(&address.0)
            {
                // A copy onto itself is nothing, and two places that are one memory are written once.
                job.into.push(address.0);
            }
        }
        if job.into.is_empty() || advance(ground.compute, &mut job, ground.now) {
            self.spare_jobs.push(job);
            return Ok(Issue::Complete);
        }
        self.jobs.push(ActiveJob { at, job });
        Ok(Issue::UnderWay)
    }

    fn advance_jobs(&mut self, ground: &mut Ground<'_>) -> bool {
        let mut moved = false;
        let mut index = 0;
        while index < self.jobs.len() {
            let done_before = self.jobs[index].job.elements_done;
            if advance(ground.compute, &mut self.jobs[index].job, ground.now) {
                let ActiveJob { at, job } = self.jobs.swap_remove(index);
                self.spare_jobs.push(job);
                self.complete(at);
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

    /// The peers without whose next notices this run does not go on.
    pub(super) fn needs_notice(&self, found: &mut dyn FnMut(Rank)) {
        let program = &self.parameters.program;
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
    pub(super) fn waits_for(&self, credits: &[u64], found: &mut dyn FnMut(Rank, &dyn Fn() -> String)) {
        let program = &self.parameters.program;
        for (lane_number, lane) in program.lanes.iter().enumerate() {
            let state = self.lanes[lane_number];
            for chunk in state.first..state.next {
                let slot = chunk % program.window;
                let instance = self.instances[lane_number * program.window as usize + slot as usize];
                let mut tell = |step: u32, peer: Rank, what: &str| {
                    found(peer, &|| {
                        format!("{what}, block {} chunk {chunk} lane {lane_number} step {step}", lane.block)
                    });
                };
                for step in 0..instance.program_counter.min(lane.steps) {
                    let at = At { lane: lane_number as u32, slot, step };
                    if let OpProgram::Put { to, .. } = program.steps[(lane.first_step + step) as usize].op
                        && self.states[self.state_index(lane, at)] == UNDER_WAY
                    {
                        tell(step, to, "a put to it that does not complete");
                    }
                }
                if instance.program_counter < lane.steps {
                    let step = instance.program_counter;
                    match program.steps[(lane.first_step + step) as usize].op {
                        OpProgram::Wait { from, .. } => tell(step, from, "a wait for its notice"),
                        OpProgram::Notify { to, .. } | OpProgram::Put { to, .. } => {
                            if credits[to as usize] < self.parameters.bank.needed {
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

fn empty_job() -> Job {
    Job {
        data_type: DataType::U8,
        op: ReduceOp::Sum,
        divide_by: 1,
        from: Vec::new(),
        into: Vec::new(),
        elements: 0,
        elements_done: 0,
    }
}

/// What a put needs to know.
pub(super) struct PutAt {
    pub(super) to: Rank,
    pub(super) cell: u32,
    pub(super) src: PlaceAt,
    pub(super) dst: PlaceAt,
    pub(super) bounce: u32,
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
}

/// Which of the engine's runs a transfer belongs to.
pub(super) fn run_of(id: TransferId) -> usize {
    (id.0 & 0xff) as usize
}

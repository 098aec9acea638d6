//! The fast path of the smallest calls: a run that is carried out at once, on the caller's stack.
//!
//! A plan can take the fast path when every lane has one chunk and its data travel in the signal
//! slots, or are a few kilobytes that are put in peers' scratch, which is mapped here. Then each
//! step ends with its issue: a run only remembers how far each lane has come ([`LaneProgress`]),
//! and the plan knows where everything lies ([`FastPlan`]). Banks, credits, numbers, signatures and
//! consumed signals are those of [`super::run`].
//!
//! **Invariant:** a run leaves the fast path between two steps only, and goes on as an ordinary run
//! at the same step. So the ordinary run handles all that takes longer than some polls, all doubts
//! and all failures.
//!
//! Signals that peers wait for go out first. Notes for the status board and the counters come
//! after, while the peers' signals are on their way.

use std::sync::Arc;
use std::time::Duration;

use pleach_schedule::Part;
use pleach_transport::{Inline, Mapped, Nanos, Signal};
use pleach_vocabulary::Rank;

use super::address::{Address, Bytes, NO_DATA, advance};
use super::plan::{ChunkStep, OpProgram, PlaceSlot, Plan};
use super::run::{LaneProgress, Parameters};
use super::signals::Header;
use super::{Context, Engine, NO_TRANSFER, RoundInput, RunId, RunNumber, StartError, Stream};
use crate::call::Descriptor;
use crate::compute::Job;

/// How often a run on the fast path polls for its peers' signals before it becomes an ordinary one:
/// some microseconds.
const ROUNDS_MAX: u32 = 16;
/// Longest chunk on the fast path, in bytes: a peer waits while it is copied.
const CHUNK_BYTES_MAX: usize = 8 << 10;
/// Most lanes of a plan on the fast path.
pub(super) const LANES_MAX: usize = 8;

/// The steps of a plan on the fast path, with everything known that does not differ from run to
/// run.
#[derive(Debug)]
pub(super) struct FastPlan {
    lanes: Vec<Vec<FastStep>>,
}

#[derive(Debug)]
enum FastStep {
    /// `into`: from where the peer's bank begins; in the signal when there is none.
    Send {
        to: Rank,
        signal_slot: u32,
        from: BufferOffset,
        into: Option<usize>,
        bytes: usize,
    },
    Wait {
        from: Rank,
        signal_slot: u32,
        into: Option<BufferOffset>,
        bytes: usize,
    },
    Reduce {
        from: Vec<BufferOffset>,
        into: Vec<BufferOffset>,
        elements: usize,
        divide_by: u32,
    },
}

/// Where some bytes of this rank are, `usize` from where the memory begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum BufferOffset {
    Input(usize),
    Output(usize),
    /// Of this run's bank.
    Scratch(usize),
}

impl FastPlan {
    /// `None` when the plan cannot take the fast path.
    pub(super) fn new(plan: &Plan, chunk_bytes: usize) -> Option<Self> {
        let is_one_chunk = plan.lanes().all(|lane| plan.chunks(lane) == 1);
        let is_small = chunk_bytes <= CHUNK_BYTES_MAX && plan.lanes().len() <= LANES_MAX;
        if !is_small || !is_one_chunk || !(plan.is_inline() || keeps_to_scratch(plan)) {
            return None;
        }
        let lanes = plan.lanes().map(|lane| {
            let steps = 0..plan.steps(lane).len() as u32;
            steps.map(|step| FastStep::new(plan.chunk_step(lane, 0, step))).collect()
        });
        Some(Self { lanes: lanes.collect() })
    }

    /// Where it divides, it divides by this number.
    pub(crate) fn divide_averages_by(&mut self, divisor: u32) {
        for step in self.lanes.iter_mut().flatten() {
            if let FastStep::Reduce { divide_by, .. } = step
                && *divide_by > 1
            {
                *divide_by = divisor;
            }
        }
    }
}

impl FastStep {
    fn new(step: ChunkStep<'_>) -> Self {
        let (plan, bytes) = (step.plan(), step.bytes());
        let scratch = |place: &PlaceSlot| step.scratch_offset(place.slot) as usize;
        let offset = |place: &PlaceSlot| match place.part {
            Part::Input | Part::SharedInput => BufferOffset::Input(step.buffer_offset(*place)),
            Part::Output | Part::SharedOutput => BufferOffset::Output(step.buffer_offset(*place)),
            Part::Scratch(_) => BufferOffset::Scratch(scratch(place)),
        };
        let offsets = |range| plan.places(range).iter().map(offset).collect();
        match step.op() {
            OpProgram::Signal { to, signal_slot } => Self::Send {
                to: *to,
                signal_slot: step.signal_offset(*signal_slot),
                from: BufferOffset::Scratch(0),
                into: None,
                bytes: 0,
            },
            OpProgram::Put(put) => Self::Send {
                to: put.to,
                signal_slot: step.signal_offset(put.signal_slot),
                from: offset(&put.src),
                into: (!plan.is_inline()).then(|| scratch(&put.dst)),
                bytes,
            },
            OpProgram::Wait { from, signal_slot, into } => Self::Wait {
                from: *from,
                signal_slot: step.signal_offset(*signal_slot),
                into: into.as_ref().filter(|_| plan.is_inline()).map(offset),
                bytes,
            },
            OpProgram::Reduce { from, into, completes } => Self::Reduce {
                from: offsets(*from),
                into: offsets(*into),
                elements: bytes / plan.descriptor().data_type.bytes(),
                divide_by: plan.divisor(*completes),
            },
        }
    }
}

/// Whether the ranks touch nothing of each other but scratch, and that by puts alone.
fn keeps_to_scratch(plan: &Plan) -> bool {
    let is_own = |place: &PlaceSlot| matches!(place.part, Part::Input | Part::Output | Part::Scratch(_));
    let is_scratch = |place: &PlaceSlot| matches!(place.part, Part::Scratch(_));
    let mut steps = plan.lanes().flat_map(|lane| plan.steps(lane));
    !plan.maps()
        && !plan.exposes_buffers()
        && steps.all(|step| match step.op() {
            OpProgram::Put(put) => is_own(&put.src) && is_scratch(&put.dst),
            OpProgram::Reduce { from, into, .. } => {
                plan.places(*from).iter().chain(plan.places(*into)).all(is_own)
            }
            OpProgram::Signal { .. } | OpProgram::Wait { .. } => true,
        })
}

/// Whether calls may take the fast path here, with the memory that it uses. **Invariant:** peers'
/// scratch is mapped only where every peer acts without this rank's device being polled.
pub(super) struct FastPath {
    is_passive: bool,
    /// How often a run polls for a signal before it becomes an ordinary one.
    rounds_max: u32,
    /// By rank: peers' scratch, where it is mapped.
    mapped: Vec<Option<Mapped>>,
    /// Kept for its memory.
    job: Job,
}

impl FastPath {
    /// No call takes it.
    pub(super) fn closed() -> Self {
        Self { is_passive: false, rounds_max: 0, mapped: Vec::new(), job: Job::empty() }
    }

    /// Lets go of peers' memory: no call takes the fast path any more.
    pub(super) fn close(&mut self) {
        self.mapped.clear();
    }
}

/// What runs on the fast path act on.
struct FastContext<'a> {
    context: &'a mut Context,
    job: &'a mut Job,
    mapped: &'a [Option<Mapped>],
}

/// The round of a partial all-reduce that a run on the fast path is of, in which this rank's input
/// is not absent; `()` where it is of none, which takes no instruction.
trait OfRound {
    fn round(&mut self) -> Option<&mut RoundInput>;
    fn into_round(self) -> Option<RoundInput>;
}

impl OfRound for () {
    #[inline]
    fn round(&mut self) -> Option<&mut RoundInput> {
        None
    }

    #[inline]
    fn into_round(self) -> Option<RoundInput> {
        None
    }
}

impl OfRound for RoundInput {
    fn round(&mut self) -> Option<&mut RoundInput> {
        Some(self)
    }

    fn into_round(self) -> Option<RoundInput> {
        Some(self)
    }
}

/// One run on the fast path.
struct FastRun<'a, R> {
    plan: &'a Plan,
    fast: &'a FastPlan,
    number: &'a RunNumber,
    input: Address,
    output: Address,
    /// This run's bank of scratch.
    scratch: Address,
    progress: LaneProgress,
    round: R,
}

impl<'a, R: OfRound> FastRun<'a, R> {
    /// A run that has done nothing yet.
    fn new(
        (plan, fast): (&'a Plan, &'a FastPlan),
        number: &'a RunNumber,
        [input, output]: [&Bytes; 2],
        round: R,
        context: &Context,
    ) -> Self {
        let scratch = Address(context.scratch.own().as_ptr()).add(number.bank.scratch(0));
        let (input, output) = (input.base(), output.base());
        Self { plan, fast, number, input, output, scratch, progress: [0; LANES_MAX], round }
    }

    /// Goes as far as it can without waiting; true when it is complete.
    fn advance(&mut self, on: &mut FastContext<'_>) -> bool {
        let mut is_complete = true;
        for (number, lane) in self.fast.lanes.iter().enumerate() {
            while let Some(step) = lane.get(self.progress[number] as usize)
                && self.step(on, step)
            {
                self.progress[number] += 1;
            }
            is_complete &= self.progress[number] as usize == lane.len();
        }
        is_complete
    }

    /// Polls for the awaited signal; false when there is none, or it does not come.
    fn poll(&self, on: &FastContext<'_>) -> bool {
        match on.context.signals.poll_awaited() {
            None => false,
            // Another lane may have something to do.
            Some(has_come) => has_come || self.fast.lanes.len() > 1,
        }
    }

    /// Whether the step is complete now.
    fn step(&mut self, on: &mut FastContext<'_>, step: &FastStep) -> bool {
        match step {
            FastStep::Send { to, signal_slot, from, into, bytes } => {
                self.send(on, (*to, *signal_slot), *from, *into, *bytes)
            }
            FastStep::Wait { from, signal_slot, into, bytes } => {
                self.wait(on, *from, *signal_slot, *into, *bytes)
            }
            FastStep::Reduce { from, into, elements, divide_by } => {
                self.reduce(on, from, into, *elements, *divide_by)
            }
        }
    }

    fn address(&self, offset: BufferOffset) -> Address {
        match offset {
            BufferOffset::Input(offset) => self.input.add(offset),
            BufferOffset::Output(offset) => self.output.add(offset),
            BufferOffset::Scratch(offset) => self.scratch.add(offset),
        }
    }

    fn send(
        &mut self,
        on: &mut FastContext<'_>,
        (to, signal_slot): (Rank, u32),
        from: BufferOffset,
        into: Option<usize>,
        bytes: usize,
    ) -> bool {
        let RunNumber { number, history, bank } = self.number;
        if !on.context.signals.has_completed(to, self.plan.stream(), bank.needed()) {
            return false;
        }
        let (data, data_bytes) = match into {
            None => (self.address(from).load_words(bytes), bytes),
            Some(offset) => {
                let Some(peer) = &on.mapped[to as usize] else { return false };
                let into = Address(peer.as_ptr()).add(bank.peer_scratch(offset as u64) as usize);
                self.address(from).copy_to(into, bytes);
                if let Some(witness) = on.context.signals.witness() {
                    witness.wrote(into.0.cast_const(), bytes);
                }
                (NO_DATA, 0)
            }
        };
        let is_collective = self.plan.stream() == Stream::Collectives;
        let completed = if is_collective { on.context.completed } else { *number };
        let mut header = Header::new(*number, *history, completed);
        if let Some(round) = self.round.round() {
            header = header.telling(round.contributors.told(false));
        }
        let payload: Inline = header.with_data(&data, data_bytes);
        let signal = Signal { signal_slot: bank.outgoing(signal_slot), payload };
        // Where the device refuses, an ordinary run tries again and finds out why.
        on.context.device.signal(to, &signal, NO_TRANSFER).is_ok()
    }

    fn wait(
        &mut self,
        on: &mut FastContext<'_>,
        from: Rank,
        signal_slot: u32,
        into: Option<BufferOffset>,
        bytes: usize,
    ) -> bool {
        let signal_slot = self.number.bank.incoming(signal_slot);
        if !on.context.signals.has_come(from, signal_slot) {
            return false;
        }
        let (header, data) = on.context.signals.read(from, signal_slot);
        let RunNumber { number, history, .. } = *self.number;
        match self.round.round() {
            None if header.is_of(number, history) => {}
            None => return false,
            // Bytes that were left out are the matter of an ordinary run.
            Some(round) => match round.contributors.of(&header, number, history) {
                Some(told) if !told.is_neutral => round.contributors.learn(told),
                _ => return false,
            },
        }
        on.context.signals.consume(from, signal_slot, &header, self.plan.stream());
        if let Some(offset) = into {
            self.address(offset).store_words(&data, bytes);
        }
        true
    }

    fn reduce(
        &mut self,
        on: &mut FastContext<'_>,
        from: &[BufferOffset],
        into: &[BufferOffset],
        elements: usize,
        divide_by: u32,
    ) -> bool {
        if elements == 0 {
            return true;
        }
        let Descriptor { data_type, op, .. } = *self.plan.descriptor();
        let divide_by = match self.round.round() {
            Some(round) if divide_by > 1 => round.divisor(divide_by),
            _ => divide_by,
        };
        on.job.begin(data_type, op, elements, divide_by);
        for offset in from {
            let address = self.address(*offset).0.cast_const();
            on.job.from.push(address);
        }
        for offset in into {
            let address = self.address(*offset).0;
            on.job.add_destination(address);
        }
        if on.job.into.is_empty() {
            return true;
        }
        let is_complete = advance(&mut *on.context.compute, on.job, on.context.now);
        debug_assert!(is_complete, "a few bytes are computed at once where this path is taken");
        is_complete
    }
}

/// A run of a round that was begun.
#[derive(Clone, Copy, Debug)]
pub(crate) enum RoundRun {
    /// It has been carried out already, with the inputs of these ranks, by bits.
    CarriedOut {
        contributors: u32,
    },
    UnderWay(RunId),
}

impl Engine {
    /// Enables the fast path and [`Engine::poll_signals`] under three conditions: scratch is ready;
    /// every peer can write to this rank's memory while this rank does not poll its device; and
    /// jobs end immediately. `is_crowded`: other ranks need this processor, so that polling again
    /// and again only delays them. Call this function when the engine is ready.
    pub fn enable_fast_path(&mut self, is_crowded: bool) {
        let context = &mut self.context;
        let is_passive = context.peers().all(|peer| context.device.info().reach[peer as usize].passive);
        self.fast_path.is_passive =
            context.scratch.is_ready() && context.compute.is_immediate() && is_passive;
        self.fast_path.rounds_max = if is_crowded { 0 } else { ROUNDS_MAX };
        self.fast_path.mapped = vec![None; context.ranks as usize];
        if self.fast_path.is_passive {
            for peer in context.peers() {
                self.map_for_fast_path(peer);
            }
        }
    }

    /// Maps a peer's scratch for the fast path, when the path is enabled and the peer ready.
    pub(crate) fn map_for_fast_path(&mut self, peer: Rank) {
        let context = &mut self.context;
        if !self.fast_path.is_passive || !self.failure.is_active() || !context.scratch.has(peer) {
            return;
        }
        let mapped = &mut self.fast_path.mapped[peer as usize];
        if mapped.is_none() {
            let scratch = context.scratch.peers[peer as usize];
            // Where it is not mapped, puts go the ordinary way.
            let found = context.device.map(peer, &scratch).ok();
            *mapped = found.filter(|found| found.is_on_host() && found.len() as u64 >= scratch.len);
        }
    }

    /// Whether the conditions of [`Engine::enable_fast_path`] hold, so that
    /// [`Engine::poll_signals`] can find something.
    #[must_use]
    pub fn is_passive(&self) -> bool {
        self.fast_path.is_passive
    }

    /// As [`Engine::start`], for a caller that waits for the outcome: `None` when the call has been
    /// carried out already.
    pub(crate) fn carry_out(
        &mut self,
        plan: &Arc<Plan>,
        input: &Bytes,
        output: &Bytes,
        timeout: Duration,
    ) -> Result<Option<RunId>, StartError> {
        match plan.fast() {
            Some(fast) if self.is_fast_path_open(plan) => {
                Ok(self.carry_out_at_once((plan, fast), [input, output], (), timeout)?.ok())
            }
            _ => self.start(plan, input.clone(), output.clone(), timeout).map(Some),
        }
    }

    #[inline]
    fn is_fast_path_open(&self, plan: &Plan) -> bool {
        self.fast_path.is_passive
            && self.admission.is_idle()
            && self.context.scratch.has_all(plan.program().peers())
            && self.failure.is_active()
            && !self.board.has_unread()
    }

    /// As [`Engine::start_round`], for a caller that waits for the outcome.
    pub(crate) fn carry_out_round(
        &mut self,
        round: RoundInput,
        plan: &Arc<Plan>,
        [input, output]: [&Bytes; 2],
        timeout: Duration,
    ) -> Result<RoundRun, StartError> {
        let run = match plan.fast() {
            Some(fast) if !round.is_absent && self.is_fast_path_open(plan) => {
                self.carry_out_at_once((plan, fast), [input, output], round, timeout)?
            }
            _ => Ok(self.start_round(round, plan, [input.clone(), output.clone()], timeout)?),
        };
        Ok(match run {
            Ok(run) => RoundRun::UnderWay(run),
            Err(round) => RoundRun::CarriedOut { contributors: round.contributors.known() },
        })
    }

    /// The run that goes on, or what is known of its round where it was carried out.
    fn carry_out_at_once<R: OfRound>(
        &mut self,
        (plan, fast): (&Arc<Plan>, &FastPlan),
        [input, output]: [&Bytes; 2],
        round: R,
        timeout: Duration,
    ) -> Result<Result<RunId, R>, StartError> {
        let (slot, number) = self.admission.number(plan).ok_or(StartError::TooManyRuns)?;
        let context = &mut self.context;
        context.signals.forget_awaited();
        (context.now, context.elapsed_ns, context.hears_all) = (Nanos::ZERO, 0, false);
        let mut run = FastRun::new((plan, fast), &number, [input, output], round, context);
        let on = &mut FastContext { context, job: &mut self.fast_path.job, mapped: &self.fast_path.mapped };
        let mut is_complete = run.advance(on);
        self.admission.publish(plan, &number);
        let mut rounds = 0;
        while !is_complete && rounds < self.fast_path.rounds_max && run.poll(on) {
            is_complete = run.advance(on);
            rounds += 1;
        }
        if is_complete {
            let round = run.round;
            self.note_carried_out(plan, number.number);
            return Ok(Err(round));
        }
        let FastRun { progress, round, .. } = run;
        let parameters = Parameters::new(number, input.clone(), output.clone());
        let parameters = parameters.in_round(round.into_round());
        let (id, run) = self.admission.enter(slot, plan, parameters, Some(&progress), timeout);
        run.observe_from(self.observer.take_sample());
        Ok(Ok(id))
    }
}

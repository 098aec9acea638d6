//! The short way of the smallest calls: a run carried out at once, on the caller's stack.
//!
//! A plan is *short* when every lane has one chunk and its data travel in the signal slots, or are
//! a few kilobytes that are put in peers' scratch, which is mapped here. Then each step ends with
//! its issue, so that all a run has to remember is how far each lane has come ([`Progress`]), and
//! where everything lies is known from the plan ([`Short`]). What decides is the same as in
//! [`super::run`]: banks, credits, numbers, signatures, the signal slots consumed.
//!
//! **Invariant:** a run leaves this way between two steps only, and goes on as an ordinary one at
//! the same step ([`super::run::Run::resume`]): so whatever takes longer than some looks, any doubt
//! and any trouble is the ordinary way's.
//!
//! What peers wait for goes out first; what is only noted comes after, while their signals are on
//! their way.

use std::sync::Arc;
use std::time::Duration;

use pleach_schedule::Part;
use pleach_transport::{Inline, Mapped, Nanos, Signal};
use pleach_vocabulary::Rank;

use super::address::{Address, DATA_WORDS, advance};
use super::at::NOBODY;
use super::bank::{self, Bank};
use super::bytes::Bytes;
use super::ground::{Blocked, Ground};
use super::header::{Header, INLINE_DATA_BYTES};
use super::layout::Layout;
use super::plan::Plan;
use super::program::{OpProgram, PlaceAt, Program};
use super::run::Parameters;
use super::step::{add_destination, divisor, prepare};
use super::stream::Stream;
use super::{Engine, LOOKS, Phase, RunId, StartError, State};
use crate::call::Descriptor;
use crate::compute::Job;

/// How often a run on the short way looks for its peers' signals, each time up to [`super::LOOKS`]
/// times in a row: some microseconds.
const ROUNDS_MAX: u32 = 16;
/// Longest chunk that goes the short way, in bytes: what is copied while a peer waits for it.
const CHUNK_BYTES_MAX: usize = 8 << 10;
/// Most lanes of a short plan.
pub(super) const LANES_MAX: usize = 8;

/// A short plan's steps, with everything known that does not differ from run to run.
#[derive(Debug)]
pub(super) struct Short {
    lanes: Vec<Vec<ShortStep>>,
}

#[derive(Debug)]
enum ShortStep {
    /// `into`: from where the peer's bank begins; in the signal when there is none.
    Send {
        to: Rank,
        signal_slot: u32,
        from: Spot,
        into: Option<usize>,
        bytes: usize,
    },
    Wait {
        from: Rank,
        signal_slot: u32,
        into: Option<Spot>,
        bytes: usize,
    },
    Reduce {
        from: Vec<Spot>,
        into: Vec<Spot>,
        elements: usize,
        divide_by: u32,
    },
}

/// Where some bytes of this rank are, `usize` from where the memory begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Spot {
    Input(usize),
    Output(usize),
    /// Of this run's bank.
    Scratch(usize),
}

/// By lane: how many steps are complete.
pub(super) type Progress = [u32; LANES_MAX];

impl Short {
    /// `None` when the plan is not short.
    pub(super) fn of(
        program: &Program,
        layout: &Layout,
        (chunk_bytes, unit_bytes): (usize, usize),
        descriptor: &Descriptor,
    ) -> Option<Self> {
        let is_inline = !program.maps && chunk_bytes <= INLINE_DATA_BYTES;
        let is_one_chunk = program.lanes.iter().all(|lane| layout.chunks(lane.block) == 1);
        let is_short = chunk_bytes <= CHUNK_BYTES_MAX && program.lanes.len() <= LANES_MAX && is_one_chunk;
        if !is_short || !(is_inline || keeps_to_scratch(program)) {
            return None;
        }
        let lanes = program.lanes.iter().map(|lane| {
            let bytes = layout.chunk_bytes(lane.block, 0);
            let spot = |place: &PlaceAt| {
                let at = || layout.offset(program, lane.block, 0, *place);
                match place.part {
                    Part::Input | Part::SharedInput => Spot::Input(at()),
                    Part::Output | Part::SharedOutput => Spot::Output(at()),
                    Part::Scratch(_) => Spot::Scratch((place.slot * program.window) as usize * unit_bytes),
                }
            };
            let spots = |range: (u32, u32)| {
                program.places[range.0 as usize..range.1 as usize].iter().map(spot).collect::<Vec<_>>()
            };
            let steps = &program.steps[lane.first_step as usize..(lane.first_step + lane.steps) as usize];
            let step = |op: &OpProgram| match op {
                OpProgram::Signal { to, signal_slot } => ShortStep::Send {
                    to: *to,
                    signal_slot: *signal_slot,
                    from: Spot::Scratch(0),
                    into: None,
                    bytes: 0,
                },
                OpProgram::Put(put) => {
                    let at = (put.dst.slot * program.window) as usize * unit_bytes;
                    let into = (!is_inline).then_some(at);
                    ShortStep::Send {
                        to: put.to,
                        signal_slot: put.signal_slot,
                        from: spot(&put.src),
                        into,
                        bytes,
                    }
                }
                OpProgram::Wait { from, signal_slot, landing } => {
                    let into = landing.as_ref().filter(|_| is_inline).map(spot);
                    ShortStep::Wait { from: *from, signal_slot: *signal_slot, into, bytes }
                }
                OpProgram::Reduce { from, into, completes } => ShortStep::Reduce {
                    from: spots(*from),
                    into: spots(*into),
                    elements: bytes / descriptor.data_type.bytes(),
                    divide_by: divisor(program, descriptor, *completes),
                },
            };
            steps.iter().map(|program| step(&program.op)).collect()
        });
        Some(Self { lanes: lanes.collect() })
    }
}

/// What differs between the runs of a plan.
pub(super) struct Numbered {
    number: u64,
    history: u64,
    bank: Bank,
    input: Address,
    output: Address,
}

/// Whether the ranks touch nothing of each other but scratch, and that by puts alone.
fn keeps_to_scratch(program: &Program) -> bool {
    let is_own = |place: &PlaceAt| matches!(place.part, Part::Input | Part::Output | Part::Scratch(_));
    let is_scratch = |place: &PlaceAt| matches!(place.part, Part::Scratch(_));
    !program.maps
        && !program.exposes_input
        && !program.exposes_output
        && program.places.iter().all(is_own)
        && program.steps.iter().all(|step| match &step.op {
            OpProgram::Put(put) => is_own(&put.src) && is_scratch(&put.dst),
            _ => true,
        })
}

/// One run on the short way.
pub(super) struct ShortRun<'a, 'g> {
    pub(super) plan: &'a Plan,
    pub(super) short: &'a Short,
    pub(super) call: Numbered,
    pub(super) ground: &'a mut Ground<'g>,
    pub(super) job: &'a mut Job,
    /// By rank: peers' scratch, where it is mapped.
    pub(super) mapped: &'a [Option<Mapped>],
    pub(super) progress: Progress,
}

impl ShortRun<'_, '_> {
    /// Goes as far as it can without waiting; true when it is complete.
    pub(super) fn advance(&mut self) -> bool {
        let mut is_complete = true;
        for (number, lane) in self.short.lanes.iter().enumerate() {
            while let Some(step) = lane.get(self.progress[number] as usize)
                && self.step(step)
            {
                self.progress[number] += 1;
            }
            is_complete &= self.progress[number] as usize == lane.len();
        }
        is_complete
    }

    /// Looks for the signal that is waited for; false when there is none to look for, or it does
    /// not come.
    fn look(&self) -> bool {
        let Some(Blocked { from, signal_slot, count }) = *self.ground.blocked else { return false };
        let signal_slots = &self.ground.signal_slots[from as usize];
        // The tightest of loops: what is on its way is seen at once, and nothing else is stored
        // meanwhile.
        for _ in 0..LOOKS {
            if signal_slots.count(signal_slot) != count {
                return true;
            }
        }
        // Another lane may have something to do.
        self.short.lanes.len() > 1
    }

    /// Whether the step is complete now.
    fn step(&mut self, step: &ShortStep) -> bool {
        match step {
            ShortStep::Send { to, signal_slot, from, into, bytes } => {
                self.send((*to, *signal_slot), *from, *into, *bytes)
            }
            ShortStep::Wait { from, signal_slot, into, bytes } => {
                self.wait(*from, *signal_slot, *into, *bytes)
            }
            ShortStep::Reduce { from, into, elements, divide_by } => {
                self.reduce(from, into, *elements, *divide_by)
            }
        }
    }

    fn address(&self, spot: Spot) -> Address {
        match spot {
            Spot::Input(offset) => self.call.input.add(offset),
            Spot::Output(offset) => self.call.output.add(offset),
            Spot::Scratch(offset) => {
                Address(self.ground.scratch.as_ptr()).add(self.call.bank.scratch_base as usize + offset)
            }
        }
    }

    /// The signal slot of the first (and only) chunk.
    fn signal_slot(&self, base: u32, signal_slot: u32) -> u16 {
        (base + signal_slot * self.plan.program.window) as u16
    }

    fn send(
        &mut self,
        (to, signal_slot): (Rank, u32),
        from: Spot,
        into: Option<usize>,
        bytes: usize,
    ) -> bool {
        let Numbered { number, history, bank, .. } = &self.call;
        if !self.ground.has_completed(to, self.plan.stream, bank.needed) {
            return false;
        }
        let data = match into {
            None => (self.address(from).load_words(bytes), bytes),
            Some(offset) => {
                let Some(peer) = &self.mapped[to as usize] else { return false };
                let into = Address(peer.as_ptr()).add(bank.peer_scratch_base as usize + offset);
                self.address(from).copy_to(into, bytes);
                if let Some(witness) = &mut self.ground.witness {
                    witness.wrote(into.0.cast_const(), bytes);
                }
                ([0; DATA_WORDS], 0)
            }
        };
        let is_collective = self.plan.stream == Stream::Collectives;
        let completed = if is_collective { self.ground.completed } else { *number };
        let payload: Inline = Header::new(*number, *history, completed).with_words(&data.0, data.1);
        let signal = Signal { signal_slot: self.signal_slot(bank.signal_base, signal_slot), payload };
        // What cannot go is tried again, and understood, on the ordinary way.
        self.ground.device.signal(to, &signal, NOBODY).is_ok()
    }

    fn wait(&mut self, from: Rank, signal_slot: u32, into: Option<Spot>, bytes: usize) -> bool {
        let signal_slot = self.signal_slot(self.call.bank.wait_base, signal_slot);
        if !self.ground.has_come(from, signal_slot) {
            return false;
        }
        let payload = self.ground.signal_slots[from as usize].payload_words(signal_slot);
        let (header, data) = Header::decode_words(&payload);
        if header.history != self.call.history || header.run != self.call.number {
            return false;
        }
        self.ground.consume(from, signal_slot, &header, self.plan.stream);
        if let Some(spot) = into {
            self.address(spot).store_words(&data, bytes);
        }
        true
    }

    fn reduce(&mut self, from: &[Spot], into: &[Spot], elements: usize, divide_by: u32) -> bool {
        if elements == 0 {
            return true;
        }
        prepare(self.job, &self.plan.descriptor, elements, divide_by);
        for spot in from {
            let address = self.address(*spot).0.cast_const();
            self.job.from.push(address);
        }
        for spot in into {
            let address = self.address(*spot);
            add_destination(self.job, address);
        }
        if self.job.into.is_empty() {
            return true;
        }
        let is_complete = advance(self.ground.compute, self.job, self.ground.now);
        debug_assert!(is_complete, "a few bytes are computed at once where this way is taken");
        is_complete
    }
}

impl Engine {
    /// Allows the short way and [`Engine::glance`] where they are possible at all: all peers write
    /// here without this rank's device being polled, and what is computed ends at once.
    /// `is_crowded`: other ranks need this processor, so that looking again and again only delays
    /// them. To be called when all peers are ready.
    pub fn look_directly(&mut self, is_crowded: bool) {
        let peers = (0..self.ranks).filter(|peer| *peer != self.rank);
        let is_passive = peers.clone().all(|peer| self.device.info().reach[peer as usize].passive);
        self.is_passive = self.is_ready() && self.compute.is_immediate() && is_passive;
        self.rounds_max = if is_crowded { 0 } else { ROUNDS_MAX };
        self.peer_scratch_mapped = vec![None; self.ranks as usize];
        if self.is_passive {
            for peer in peers {
                let scratch = self.peer_scratch_known[peer as usize];
                // Where it is not mapped, puts go the ordinary way.
                let mapped = self.device.map(peer, &scratch).ok();
                self.peer_scratch_mapped[peer as usize] =
                    mapped.filter(|mapped| mapped.is_on_host() && mapped.len() as u64 >= scratch.len);
            }
        }
    }

    /// As [`Engine::start`], for who waits for the outcome: `None` when the call has been carried
    /// out already.
    ///
    /// # Errors
    ///
    /// See [`StartError`].
    pub(crate) fn carry_out(
        &mut self,
        plan: &Arc<Plan>,
        input: &Bytes,
        output: &Bytes,
        timeout: Duration,
    ) -> Result<Option<RunId>, StartError> {
        match &plan.short {
            Some(short)
                if self.is_passive
                    && self.order.is_empty()
                    && self.is_ready()
                    && matches!(self.phase, Phase::Active)
                    && !self.board.has_news() =>
            {
                self.carry_out_at_once(plan, short, input, output, timeout)
            }
            _ => self.start(plan, input.clone(), output.clone(), timeout).map(Some),
        }
    }

    fn carry_out_at_once(
        &mut self,
        plan: &Arc<Plan>,
        short: &Short,
        input: &Bytes,
        output: &Bytes,
        timeout: Duration,
    ) -> Result<Option<RunId>, StartError> {
        let slot = self.free_slot().ok_or(StartError::TooManyRuns)?;
        let (number, history, bank) = self.number(plan);
        let Some(scratch) = &self.scratch else { unreachable!("a group that works has scratch") };
        self.blocked = None;
        let mut ground = Ground {
            device: &mut *self.device,
            compute: &mut *self.compute,
            signal_slots: &self.signal_slots,
            consumed: &mut self.consumed,
            credits: &mut self.credits,
            scratch,
            peer_scratch: &self.peer_scratch_known,
            completed: self.completed,
            witness: self.witness.as_deref_mut(),
            blocked: &mut self.blocked,
            hears_all: false,
            now: Nanos::ZERO,
            elapsed_ns: 0,
        };
        let mut run = ShortRun {
            plan,
            short,
            call: Numbered { number, history, bank, input: input.base(), output: output.base() },
            ground: &mut ground,
            job: &mut self.short_job,
            mapped: &self.peer_scratch_mapped,
            progress: [0; LANES_MAX],
        };
        let mut is_complete = run.advance();
        self.journal.begin(plan.stream, &plan.record(number, history));
        let mut rounds = 0;
        while !is_complete && rounds < self.rounds_max && run.look() {
            is_complete = run.advance();
            rounds += 1;
        }
        let progress = run.progress;
        if !is_complete {
            let parameters =
                Parameters { number, history, bank, input: input.clone(), output: output.clone() };
            return Ok(Some(self.resume(slot, plan, parameters, &progress, timeout)));
        }
        if plan.stream == Stream::Collectives {
            if bank::credit_is_due(plan.class, number) {
                self.tell_progress(plan.stream, &plan.program.silent_to, number + 1);
            }
            self.note_completed();
        } else {
            self.note_completed_message(plan.stream, number);
        }
        self.note_ended_at_once(plan, number);
        Ok(None)
    }

    fn resume(
        &mut self,
        slot: u8,
        plan: &Arc<Plan>,
        parameters: Parameters,
        progress: &Progress,
        timeout: Duration,
    ) -> RunId {
        self.seat(slot, plan, parameters).resume(plan, progress);
        self.enter(slot, State::Active, timeout)
    }
}

//! Proof that a schedule does what its collective demands.
//!
//! [`verify`] knows a schedule only by the words of [`crate::Schedule`], and shares no code with
//! whoever made it. It may refuse a schedule that would do; what it accepts is right: for every
//! size, every number of chunks, every speed of ranks, links and memory, and every placement.
//!
//! # What is proved
//!
//! * *Form*: everything that is named exists; inputs are never written; a rank's private slices are
//!   its own (`form`).
//! * *Signals*: each signal or put has one wait and each wait one of them; a signal slot instance
//!   is signalled again only after the wait that consumed the signal before.
//! * *No deadlock*: the events are ordered (`graph`).
//! * *No race*: of two accesses to the same bytes, one a write, one ends before the other begins
//!   (`memory`, `order`).
//! * *Presence*: another rank's shared slices are touched, and its scratch is read, only after
//!   something that this rank did in this run; and whatever is touched of it, that is over before
//!   it ends.
//! * *Result*: at the end every output holds just the contributions that the collective says, each
//!   once, and ranks that end with the same block end with the same expression, so with the same
//!   bits (`value`). Nobody leaves a barrier before all have entered it.
//! * All this with every combination, rank by rank, of shared slices that are the slice itself or
//!   apart from it, and of output in place of input or apart from it (`memory`).
//!
//! # What is not
//!
//! That a put or reduce into another rank's *scratch* finds it free of earlier runs: the runtime's
//! credits see to it. That transfers complete, peers live, and all ranks run the same schedule with
//! the same chunks: executor and group see to that. How long it takes. And that the operation is
//! commutative, which all are.

mod barrier;
mod classes;
pub mod form;
mod graph;
mod memory;
mod order;
mod value;
mod violation;

pub use self::violation::{Access, Placement, SignalSlotName, Site, Violation};
use pleach_vocabulary::{Collective, Rank};

use self::barrier::Heard;
use self::classes::{Classes, of_rank};
use self::graph::{Graph, LaneRef, LanesByBlock, NONE, complete};
use self::memory::Memory;
use self::order::{Chunk, Order};
use crate::{BlockId, Op, Part, Schedule};

/// A schedule that [`verify`] accepted, with what the proof found out about it.
#[derive(Debug)]
pub struct Proof {
    schedule: Schedule,
    facts: Facts,
}

/// Proves the schedule or says what is wrong with it.
///
/// # Errors
///
/// The first [`Violation`] that was found, or that the schedule is too large or too intricate to be
/// verified.
pub fn verify(schedule: Schedule) -> Result<Proof, Violation> {
    let steps = form::check(&schedule)?;
    let lanes = LanesByBlock::new(&schedule);
    let mut facts = Facts::new(&schedule, steps);
    if schedule.collective == Collective::Barrier {
        let mut heard = Heard::new(schedule.ranks());
        for block in 0..schedule.blocks.len() as BlockId {
            let (graph, _) = prove(&schedule, block, lanes.of(block), &mut facts)?;
            heard.add(&graph)?;
        }
        heard.check(schedule.ranks())?;
    } else {
        let mut classes = Classes::new(&schedule, &lanes);
        for block in 0..schedule.blocks.len() as BlockId {
            if let Some(proved) = classes.find(block) {
                if classes.reordered() {
                    let graph = Graph::new(&schedule, block, lanes.of(block))?;
                    value::check(&graph, &Memory::new(&graph))?;
                }
                facts.copy(&lanes, proved, block, &classes);
            } else {
                let (_, by_copies_alone) = prove(&schedule, block, lanes.of(block), &mut facts)?;
                classes.learn(block, by_copies_alone);
            }
        }
    }
    Ok(Proof { schedule, facts })
}

/// Proves one block. Says also whether equal values in it are copies
/// ([`value::Outcome::by_copies_alone`]).
fn prove<'a>(
    schedule: &'a Schedule,
    block: BlockId,
    lanes: &'a [LaneRef],
    facts: &mut Facts,
) -> Result<(Graph<'a>, bool), Violation> {
    let graph = Graph::new(schedule, block, lanes)?;
    let memory = Memory::new(&graph);
    let mut order = Order::new(&graph)?;
    if !schedule.has_one_chunk() {
        check_signal_slots(&graph, &mut order)?;
    }
    memory.check_races(&graph, &mut order)?;
    memory.check_presence(&graph, &mut order)?;
    let outcome = value::check(&graph, &memory)?;
    for step in 0..graph.steps.len() as u32 {
        let site = graph.site(step);
        let fact = match graph.steps[step as usize].op {
            Op::Wait { .. } => match graph.steps[graph.matched[step as usize] as usize].op {
                Op::Put { dst, .. } => landing_fact(dst),
                _ => 0,
            },
            _ if outcome.completes[step as usize] => COMPLETES,
            _ => 0,
        };
        let steps = facts.of_lane(LaneRef { rank: site.rank, lane: site.lane });
        facts.steps[steps.start + site.step as usize] = fact;
    }
    Ok((graph, outcome.by_copies_alone))
}

/// That a signal slot is signalled for a chunk only after the signal of the chunk a window before
/// was consumed.
fn check_signal_slots(graph: &Graph<'_>, order: &mut Order<'_, '_>) -> Result<(), Violation> {
    for signal in 0..graph.steps.len() as u32 {
        let wait = graph.matched[signal as usize];
        if wait == NONE || matches!(graph.steps[signal as usize].op, Op::Wait { .. }) {
            continue;
        }
        if !order.ended_before(&[complete(wait)], Chunk::Window, signal)? {
            return Err(Violation::SignalSlotReused {
                signal: graph.site(signal),
                wait: graph.site(wait),
                signal_slot: SignalSlotName(graph.signal_slot(signal).unwrap_or(crate::SignalSlot(0))),
                chunk: graph.schedule.window,
            });
        }
    }
    Ok(())
}

/// Says that a reduce completes; other facts are those of [`landing_fact`].
const COMPLETES: u32 = 1 << 31;

fn landing_fact(part: Part) -> u32 {
    match part {
        Part::Input => 1,
        Part::Output => 2,
        Part::SharedInput => 3,
        Part::SharedOutput => 4,
        Part::Scratch(slot) => 5 + u32::from(slot),
    }
}

/// What is known of the steps, in four bytes each.
#[derive(Debug)]
struct Facts {
    /// By rank: where its lanes begin in `lanes`.
    ranks: Vec<u32>,
    /// By lane: where its steps begin in `steps`; and the number of steps.
    lanes: Vec<u32>,
    steps: Vec<u32>,
    exposes_input: Vec<bool>,
    exposes_output: Vec<bool>,
}

impl Facts {
    fn new(schedule: &Schedule, steps: u64) -> Self {
        let ranks = schedule.programs.len();
        let mut facts = Self {
            ranks: Vec::with_capacity(ranks),
            lanes: vec![0],
            steps: vec![0; steps as usize],
            exposes_input: vec![false; ranks],
            exposes_output: vec![false; ranks],
        };
        let mut before = 0;
        for (rank, program) in schedule.programs.iter().enumerate() {
            facts.ranks.push(facts.lanes.len() as u32 - 1);
            for lane in program {
                before += lane.steps.len() as u32;
                facts.lanes.push(before);
                lane.steps.iter().for_each(|step| facts.expose(rank as Rank, &step.op));
            }
        }
        facts
    }

    fn expose(&mut self, own: Rank, op: &Op) {
        let mut touch = |rank: Rank, part| match part {
            Part::SharedInput => self.exposes_input[rank as usize] = true,
            Part::SharedOutput => self.exposes_output[rank as usize] = true,
            _ => {}
        };
        match op {
            Op::Put { to, dst, .. } => touch(*to, *dst),
            Op::Reduce { from, into } => {
                let foreign = from.iter().chain(into).filter(|place| place.rank != own);
                foreign.for_each(|place| touch(place.rank, place.part));
            }
            Op::Signal { .. } | Op::Wait { .. } => {}
        }
    }

    fn of_lane(&self, lane: LaneRef) -> std::ops::Range<usize> {
        let lane = (self.ranks[lane.rank as usize] + lane.lane) as usize;
        self.lanes[lane] as usize..self.lanes[lane + 1] as usize
    }

    /// What is true of a block's steps is true of those of its renaming.
    fn copy(&mut self, lanes: &LanesByBlock, proved: BlockId, renamed: BlockId, classes: &Classes<'_>) {
        let mut remaining = lanes.of(renamed);
        while let Some(first) = remaining.first() {
            let own = of_rank(remaining, first.rank);
            let original = of_rank(lanes.of(proved), classes.original(first.rank));
            for (&from, &to) in original.iter().zip(own) {
                let (from, to) = (self.of_lane(from), self.of_lane(to));
                self.steps.copy_within(from, to.start);
            }
            remaining = &remaining[own.len()..];
        }
    }

    /// The fact about a step; 0 for one that does not exist.
    fn of(&self, rank: Rank, lane: usize, step: usize) -> u32 {
        let first = self.ranks.get(rank as usize).map(|&first| first as usize);
        let bounds = first.and_then(|first| self.lanes.get(first + lane..first + lane + 2));
        let fact = bounds.and_then(|bounds| self.steps[bounds[0] as usize..bounds[1] as usize].get(step));
        fact.copied().unwrap_or(0)
    }
}

impl Proof {
    /// What was proved.
    #[must_use]
    pub fn schedule(&self) -> &Schedule {
        &self.schedule
    }

    /// Where the bytes of the put land whose signal this wait consumes; `None` when it consumes a
    /// plain signal.
    #[must_use]
    pub fn landing(&self, rank: Rank, lane: usize, step: usize) -> Option<Part> {
        match self.facts.of(rank, lane, step) {
            0 | COMPLETES.. => None,
            1 => Some(Part::Input),
            2 => Some(Part::Output),
            3 => Some(Part::SharedInput),
            4 => Some(Part::SharedOutput),
            slot => Some(Part::Scratch((slot - 5) as u16)),
        }
    }

    /// Whether this reduce combines several sources into the complete result (so that an average
    /// divides here).
    #[must_use]
    pub fn completes(&self, rank: Rank, lane: usize, step: usize) -> bool {
        self.facts.of(rank, lane, step) == COMPLETES
    }

    /// Whether every result is the fold of all contributions from rank 0 on, in one pass (with two
    /// ranks the order makes no difference): the one expression of reproducible groups. True where
    /// nothing is reduced. Looks at all blocks again, so it takes about as long as the proof.
    ///
    /// # Errors
    ///
    /// None, as the schedule is proved; a [`Violation`] here would be a defect of `verify`.
    pub fn folds_in_rank_order(&self) -> Result<bool, Violation> {
        if !self.schedule.collective.reduces() {
            return Ok(true);
        }
        let lanes = LanesByBlock::new(&self.schedule);
        for block in 0..self.schedule.blocks.len() as BlockId {
            let graph = Graph::new(&self.schedule, block, lanes.of(block))?;
            if !value::check(&graph, &Memory::new(&graph))?.in_rank_order {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Whether peers read this rank's shared input.
    #[must_use]
    pub fn exposes_input(&self, rank: Rank) -> bool {
        self.facts.exposes_input.get(rank as usize).copied().unwrap_or(false)
    }

    /// Whether peers write or read this rank's shared output.
    #[must_use]
    pub fn exposes_output(&self, rank: Rank) -> bool {
        self.facts.exposes_output.get(rank as usize).copied().unwrap_or(false)
    }
}

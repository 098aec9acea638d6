//! Proof that a schedule does what its collective demands.
//!
//! [`verify`] relies on the definition of [`crate::Schedule`] alone, and shares no code with the
//! generators. It may refuse a schedule that would be correct. A schedule that it accepts is
//! correct for every size, every number of chunks, every speed of ranks, links and memory, and
//! every placement.
//!
//! # What is proved
//!
//! * *Form*: everything that is named exists; inputs are never written; a rank's private slices are
//!   its own (`form`).
//! * *Signals*: each signal or put has one wait and each wait one of them; a signal slot instance
//!   is signalled again only after the wait that consumed the signal before.
//! * *No deadlock*: the events are ordered (`graph`).
//! * *No race*: if two accesses to the same bytes are not both reads, one ends before the other
//!   begins (`memory`, `order`).
//! * *Presence*: a rank touches the shared slices of another rank, and reads its scratch, only
//!   after a step of the other rank in this run. Every such access ends before the other rank's run
//!   ends.
//! * *Result*: at the end every output holds exactly the contributions that the collective demands,
//!   each once. Ranks that end with the same block end with the same expression, so with the same
//!   bits (`value`). No rank leaves a barrier before all ranks have entered it.
//! * All of this holds for every combination, rank by rank, of two questions (`memory`): shared
//!   slices are the slice itself or other memory, and the output is the input or other memory.
//!
//! [`verify_family`] proves the same of a [`Family`](crate::Family), whose blocks are translations
//! of one block, on that block alone (`family`).
//!
//! # What is not proved
//!
//! * That another rank's *scratch* is free of earlier runs when a put or reduce writes it: the
//!   credits of the runtime ensure this.
//! * That transfers complete, that peers live, and that all ranks run the same schedule with the
//!   same chunks: the executor and the group ensure this.
//! * How long the schedule takes.
//! * That the operation is commutative. All operations are.

use std::borrow::Cow;
use std::ops::Range;
use std::sync::OnceLock;

use pleach_vocabulary::{Collective, Rank};

use crate::{BlockId, Lane, Op, Part, Schedule, SignalSlot, Step};
use classes::Classes;
use memory::{MemoryMap, check_values};
use order::{Chunk, HappensBefore};

pub use family::{FamilyFlaw, ProvedFamily, verify_family};
pub use partial::{NotPartial, expect_partial_rounds};
pub use violation::{Placement, SignalSlotName, Site, StepAccess, Violation};

mod classes;
mod family;
pub mod form;
mod memory;
mod order;
mod partial;
mod violation;

/// A schedule that [`verify`] accepted, or a family that [`verify_family`] accepted, with the facts
/// that the proof found. What is said of a rank, a lane and a step is the same for a family and for
/// the whole of the schedule that it describes.
#[derive(Debug)]
pub struct Proof {
    /// All lanes of all ranks. Of a family: empty until somebody asks for them.
    whole: OnceLock<Schedule>,
    family: Option<ProvedFamily>,
    /// About the steps of the whole; of a family: about those of its column.
    facts: Facts,
}

/// Proves the schedule, or returns the first violation.
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
        let mut reached = ReachedRanks::new(schedule.ranks());
        for block in 0..schedule.blocks.len() as BlockId {
            let (graph, _) = prove(&schedule, block, lanes.of(block), None, &mut facts)?;
            reached.add(&graph)?;
        }
        reached.check(schedule.ranks())?;
    } else {
        let mut classes = Classes::new(&schedule, &lanes);
        for block in 0..schedule.blocks.len() as BlockId {
            if let Some(proved) = classes.find(block) {
                if classes.reordered() {
                    let graph = Graph::new(&schedule, block, lanes.of(block))?;
                    check_values(&graph, &MemoryMap::new(&graph))?;
                }
                facts.copy(&lanes, proved, block, &classes);
            } else {
                let (_, by_copies_alone) = prove(&schedule, block, lanes.of(block), None, &mut facts)?;
                classes.learn(block, by_copies_alone);
            }
        }
    }
    Ok(Proof { whole: schedule.into(), family: None, facts })
}

/// Proves one block. Returns also whether equal values in it are copies
/// ([`memory::BlockResult::by_copies_alone`]). Where all ranks are known to be alike, the order of
/// events is examined for the rank `only`; everything else for all ranks.
fn prove<'a>(
    schedule: &'a Schedule,
    block: BlockId,
    lanes: &'a [LaneRef],
    only: Option<Rank>,
    facts: &mut Facts,
) -> Result<(Graph<'a>, bool), Violation> {
    let graph = Graph::new(schedule, block, lanes)?;
    let memory = MemoryMap::new(&graph);
    let mut order = HappensBefore::new(&graph)?;
    if !schedule.has_one_chunk() {
        check_signal_slots(&graph, &mut order, only)?;
    }
    memory.check_races(&graph, &mut order, only)?;
    memory.check_presence(&graph, &mut order, only)?;
    let outcome = check_values(&graph, &memory)?;
    for step in 0..graph.steps.len() as u32 {
        let site = graph.site(step);
        let fact = match graph.steps[step as usize].op {
            Op::Wait { .. } => match graph.steps[graph.matched[step as usize] as usize].op {
                Op::Put { dst, .. } => put_target_fact(dst),
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

/// Checks that a signal slot is signalled for a chunk only after the signal of the chunk a window
/// before was consumed.
fn check_signal_slots(
    graph: &Graph<'_>,
    order: &mut HappensBefore<'_, '_>,
    only: Option<Rank>,
) -> Result<(), Violation> {
    for signal in 0..graph.steps.len() as u32 {
        let wait = graph.matched[signal as usize];
        if wait == NONE
            || matches!(graph.steps[signal as usize].op, Op::Wait { .. })
            || skips(only, graph.rank(signal))
        {
            continue;
        }
        if !order.ended_before(&[complete(wait)], Chunk::Window, signal)? {
            return Err(Violation::SignalSlotReused {
                signal: graph.site(signal),
                wait: graph.site(wait),
                signal_slot: SignalSlotName(graph.signal_slot(signal).unwrap_or(SignalSlot(0))),
                chunk: graph.schedule.window,
            });
        }
    }
    Ok(())
}

/// Whether this rank is not to be examined.
fn skips(only: Option<Rank>, rank: Rank) -> bool {
    only.is_some_and(|only| only != rank)
}

/// Says that a reduce completes; other facts are those of [`put_target_fact`].
const COMPLETES: u32 = 1 << 31;

fn put_target_fact(part: Part) -> u32 {
    match part {
        Part::Input => 1,
        Part::Output => 2,
        Part::SharedInput => 3,
        Part::SharedOutput => 4,
        Part::Scratch(slot) => 5 + u32::from(slot),
    }
}

/// The analysed steps, in four bytes each.
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
        let mut access = |rank: Rank, part| match part {
            Part::SharedInput => self.exposes_input[rank as usize] = true,
            Part::SharedOutput => self.exposes_output[rank as usize] = true,
            _ => {}
        };
        match op {
            Op::Put { to, dst, .. } => access(*to, *dst),
            Op::Reduce { from, into } => {
                let foreign = from.iter().chain(into).filter(|place| place.rank != own);
                foreign.for_each(|place| access(place.rank, place.part));
            }
            Op::Signal { .. } | Op::Wait { .. } => {}
        }
    }

    fn of_lane(&self, lane: LaneRef) -> std::ops::Range<usize> {
        let lane = (self.ranks[lane.rank as usize] + lane.lane) as usize;
        self.lanes[lane] as usize..self.lanes[lane + 1] as usize
    }

    /// Copies the facts about a block's steps to the steps of a block that only has other ranks.
    fn copy(&mut self, lanes: &LanesByBlock, proved: BlockId, renamed: BlockId, classes: &Classes<'_>) {
        let mut remaining = lanes.of(renamed);
        while let Some(first) = remaining.first() {
            let own = lanes_of_rank(remaining, first.rank);
            let original = lanes_of_rank(lanes.of(proved), classes.original(first.rank));
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
    fn of_family(family: ProvedFamily, facts: Facts) -> Self {
        Self { whole: OnceLock::new(), family: Some(family), facts }
    }

    /// The schedule that was proved, with the lanes of all ranks. Of a family, the first call makes
    /// them, which takes the time and memory that [`Proof::lanes`] saves.
    #[must_use]
    pub fn schedule(&self) -> &Schedule {
        self.whole.get_or_init(|| {
            let Some(family) = &self.family else { unreachable!("a proof is of a schedule or a family") };
            family.unfolded()
        })
    }

    /// The family that was proved, if the proof is of one.
    #[must_use]
    pub fn family(&self) -> Option<&ProvedFamily> {
        self.family.as_ref()
    }

    /// The lanes of one rank. Of a family, those of other ranks are not made.
    #[must_use]
    pub fn lanes(&self, rank: Rank) -> Cow<'_, [Lane]> {
        match &self.family {
            Some(family) => Cow::Owned(family.lanes(rank)),
            None => Cow::Borrowed(&self.schedule().programs[rank as usize]),
        }
    }

    /// What was found about a step.
    fn fact(&self, rank: Rank, lane: usize, step: usize) -> u32 {
        match &self.family {
            Some(family) if rank < self.ranks() && lane < family.column().blocks.len() => {
                let block = family.block(rank, lane as u32);
                self.facts.of(family.position(rank, block), 0, step)
            }
            Some(_) => 0,
            None => self.facts.of(rank, lane, step),
        }
    }

    fn ranks(&self) -> u32 {
        self.facts.ranks.len() as u32
    }

    /// The part that a put writes, where this wait consumes the signal of the put. `None` if the
    /// wait consumes a plain signal.
    #[must_use]
    pub fn put_target(&self, rank: Rank, lane: usize, step: usize) -> Option<Part> {
        match self.fact(rank, lane, step) {
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
        self.fact(rank, lane, step) == COMPLETES
    }

    /// Whether every result is the fold of all contributions from rank 0 on, in one pass (with two
    /// ranks the order makes no difference). This is the only expression that reproducible groups
    /// accept. True if nothing is reduced. All blocks are examined again, so the call takes about
    /// as long as the proof.
    ///
    /// # Errors
    ///
    /// None, as the schedule is proved; a [`Violation`] here would be a defect of `verify`.
    pub fn folds_in_rank_order(&self) -> Result<bool, Violation> {
        // The blocks of a family differ in the order of their sources.
        let schedule = match &self.family {
            Some(family) => &family.unfolded(),
            None => self.schedule(),
        };
        if !schedule.collective.reduces() {
            return Ok(true);
        }
        let lanes = LanesByBlock::new(schedule);
        for block in 0..schedule.blocks.len() as BlockId {
            let graph = Graph::new(schedule, block, lanes.of(block))?;
            if !check_values(&graph, &MemoryMap::new(&graph))?.in_rank_order {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Whether peers read this rank's shared input.
    #[must_use]
    pub fn exposes_input(&self, rank: Rank) -> bool {
        self.exposes(&self.facts.exposes_input, rank)
    }

    /// Whether peers write or read this rank's shared output.
    #[must_use]
    pub fn exposes_output(&self, rank: Rank) -> bool {
        self.exposes(&self.facts.exposes_output, rank)
    }

    /// In a family, every rank stands at each place of the column in one of its blocks.
    fn exposes(&self, by_rank: &[bool], rank: Rank) -> bool {
        match self.family {
            Some(_) => rank < self.ranks() && by_rank.contains(&true),
            None => by_rank.get(rank as usize).copied().unwrap_or(false),
        }
    }
}

// Checks that no rank leaves a barrier before all ranks have entered it.

/// Most words that are kept for the events of a block: 1 GiB.
const MAX_WORDS: u64 = 1 << 27;

/// By rank: the ranks that it knows to have arrived when its own steps end.
#[derive(Debug)]
struct ReachedRanks {
    words: usize,
    bits: Vec<u64>,
}

impl ReachedRanks {
    fn new(ranks: u32) -> Self {
        let words = ranks.div_ceil(u64::BITS) as usize;
        let mut reached = Self { words, bits: vec![0; words * ranks as usize] };
        for rank in 0..ranks as usize {
            reached.bits[rank * words + rank / 64] |= 1 << (rank % 64);
        }
        reached
    }

    /// Adds the knowledge that the lanes of a block carry. At every event a rank knows what was
    /// known at the events before it, and that it has arrived itself.
    fn add(&mut self, graph: &Graph<'_>) -> Result<(), Violation> {
        let needed = graph.events() as u64 * self.words as u64;
        if needed > MAX_WORDS {
            return Err(Violation::TooLarge {
                what: "words about the events of a barrier",
                found: needed,
                most: MAX_WORDS,
            });
        }
        let mut sorted: Vec<Event> = (0..graph.events() as u32).collect();
        sorted.sort_unstable_by_key(|&event| graph.position[event as usize]);
        let mut known = vec![0u64; needed as usize];
        for event in sorted {
            let start = event as usize * self.words;
            let rank = graph.rank(event / 2) as usize;
            known[start + rank / 64] |= 1 << (rank % 64);
            graph.predecessors(event, |before, lag| {
                if lag == 0 {
                    for word in 0..self.words {
                        known[start + word] |= known[before as usize * self.words + word];
                    }
                }
            });
            for word in 0..self.words {
                self.bits[rank * self.words + word] |= known[start + word];
            }
        }
        Ok(())
    }

    fn check(&self, ranks: u32) -> Result<(), Violation> {
        let knows = |rank: Rank, other: Rank| {
            self.bits[rank as usize * self.words + other as usize / 64] & (1 << (other % 64)) != 0
        };
        for rank in 0..ranks {
            if let Some(missing) = (0..ranks).find(|&other| !knows(rank, other)) {
                return Err(Violation::LeavesEarly { rank, missing });
            }
        }
        Ok(())
    }
}

// One block of a schedule as a graph of events.
//
// Lanes of different blocks share neither signal slots nor bytes and nothing orders them, so each
// block is a problem of its own. A step `i` has two events: it is issued, `S(i)`, and it is
// complete, `F(i)`. The edges are those of the [schedule's](crate::Schedule) words:
//
// * `S(i) -> F(i)`, and `S(i) -> S(i + 1)` in a chunk of a lane;
// * `F(i) -> S(i + 1)` if `i` is a wait;
// * `F(d) -> S(i)` for every `d` that `i` is after, from the chunk of the lag;
// * `S(signal) -> F(wait)` for the signal or put that the wait consumes;
// * all `F` of a lane in chunk `c - window` `->` its first `S` in chunk `c`.
//
// No edge leads to an earlier chunk. So a cycle lies within one chunk, and as every chunk has the
// same inner edges, one chunk shows every deadlock.

/// No step.
const NONE: u32 = u32::MAX;

/// An event within a chunk: [`issued`] or [`complete`] of a step of the block.
type Event = u32;

fn issued(step: u32) -> Event {
    step * 2
}

fn complete(step: u32) -> Event {
    step * 2 + 1
}

/// A lane: its rank, and its number in that rank's program.
#[derive(Clone, Copy, Debug)]
struct LaneRef {
    rank: Rank,
    lane: u32,
}

/// The lanes of a rank among those of a block.
fn lanes_of_rank(lanes: &[LaneRef], rank: Rank) -> &[LaneRef] {
    let from = lanes.partition_point(|lane| lane.rank < rank);
    let count = lanes[from..].iter().take_while(|lane| lane.rank == rank).count();
    &lanes[from..from + count]
}

/// The lanes of every block, ordered by rank and number.
#[derive(Debug)]
struct LanesByBlock {
    starts: Vec<u32>,
    lanes: Vec<LaneRef>,
}

impl LanesByBlock {
    fn new(schedule: &Schedule) -> Self {
        let all = || schedule.programs.iter().flatten();
        let mut starts = vec![0; schedule.blocks.len() + 1];
        for lane in all() {
            starts[lane.block as usize + 1] += 1;
        }
        for block in 0..schedule.blocks.len() {
            starts[block + 1] += starts[block];
        }
        let mut next = starts.clone();
        let mut lanes = vec![LaneRef { rank: 0, lane: 0 }; all().count()];
        for (rank, program) in schedule.programs.iter().enumerate() {
            for (number, lane) in program.iter().enumerate() {
                let place = &mut next[lane.block as usize];
                lanes[*place as usize] = LaneRef { rank: rank as Rank, lane: number as u32 };
                *place += 1;
            }
        }
        Self { starts, lanes }
    }

    fn of(&self, block: BlockId) -> &[LaneRef] {
        let block = block as usize;
        &self.lanes[self.starts[block] as usize..self.starts[block + 1] as usize]
    }
}

/// The lanes of one block, their steps numbered through, with the edges between them.
#[derive(Debug)]
struct Graph<'a> {
    schedule: &'a Schedule,
    block: BlockId,
    lanes: &'a [LaneRef],
    /// The first step of each lane, and the number of steps.
    starts: Vec<u32>,
    /// The lane of each step, as an index of `lanes`.
    lane_of: Vec<u32>,
    steps: Vec<&'a Step>,
    /// For a signal or put its wait, for a wait its signal or put.
    matched: Vec<u32>,
    /// The steps that are after a step in the same chunk: where each one's begin in `dependents`.
    dependent_starts: Vec<u32>,
    dependents: Vec<u32>,
    /// The place of each event in an order that follows the edges.
    position: Vec<u32>,
    /// The steps in the order in which they are issued.
    order: Vec<u32>,
    /// Whether a step is after one of an earlier chunk within the window.
    has_lags: bool,
}

impl<'a> Graph<'a> {
    /// Matches signals with waits and orders the events, or says why that cannot be.
    fn new(schedule: &'a Schedule, block: BlockId, lanes: &'a [LaneRef]) -> Result<Self, Violation> {
        let mut starts = vec![0];
        let mut lane_of = Vec::new();
        let mut steps = Vec::new();
        for (index, lane) in lanes.iter().enumerate() {
            steps.extend(&schedule.programs[lane.rank as usize][lane.lane as usize].steps);
            lane_of.resize(steps.len(), index as u32);
            starts.push(steps.len() as u32);
        }
        let window = schedule.window;
        let has_lags = steps.iter().any(|step| step.after.iter().any(|&(_, lag)| lag > 0 && lag < window));
        let mut graph = Self {
            schedule,
            block,
            lanes,
            starts,
            lane_of,
            matched: vec![NONE; steps.len()],
            steps,
            dependent_starts: Vec::new(),
            dependents: Vec::new(),
            position: Vec::new(),
            order: Vec::new(),
            has_lags,
        };
        graph.match_signals()?;
        graph.find_dependents();
        graph.sort()?;
        Ok(graph)
    }

    fn events(&self) -> usize {
        self.steps.len() * 2
    }

    /// The rank of the step.
    fn rank(&self, step: u32) -> Rank {
        self.lanes[self.lane_of[step as usize] as usize].rank
    }

    /// The steps of the lane in which this step is.
    fn lane_steps(&self, step: u32) -> Range<u32> {
        let lane = self.lane_of[step as usize] as usize;
        self.starts[lane]..self.starts[lane + 1]
    }

    fn same_lane(&self, one: u32, other: u32) -> bool {
        self.lane_of[one as usize] == self.lane_of[other as usize]
    }

    fn is_wait(&self, step: u32) -> bool {
        matches!(self.steps[step as usize].op, Op::Wait { .. })
    }

    fn site(&self, step: u32) -> Site {
        let lane = self.lanes[self.lane_of[step as usize] as usize];
        let step = step - self.lane_steps(step).start;
        Site { rank: lane.rank, lane: lane.lane, block: self.block, step }
    }

    /// The signal slot of a signal or a wait.
    fn signal_slot(&self, step: u32) -> Option<SignalSlot> {
        match self.steps[step as usize].op {
            Op::Signal { signal_slot, .. } | Op::Put { signal_slot, .. } | Op::Wait { signal_slot, .. } => {
                Some(signal_slot)
            }
            Op::Reduce { .. } => None,
        }
    }

    fn match_signals(&mut self) -> Result<(), Violation> {
        // (from, to, signal slot, is a wait, step): a signal sorts just before its wait.
        let mut end_events: Vec<(Rank, Rank, u16, bool, u32)> = Vec::new();
        for (number, step) in self.steps.iter().enumerate() {
            let number = number as u32;
            let own = self.rank(number);
            match step.op {
                Op::Signal { to, signal_slot } | Op::Put { to, signal_slot, .. } => {
                    end_events.push((own, to, signal_slot.0, false, number));
                }
                Op::Wait { from, signal_slot } => end_events.push((from, own, signal_slot.0, true, number)),
                Op::Reduce { .. } => {}
            }
        }
        end_events.sort_unstable();
        for group in end_events.chunk_by(|one, other| (one.0, one.1, one.2) == (other.0, other.1, other.2)) {
            let (from, to, signal_slot) = (group[0].0, group[0].1, SignalSlotName(SignalSlot(group[0].2)));
            match *group {
                [(.., false, signal), (.., true, wait)] => {
                    self.matched[signal as usize] = wait;
                    self.matched[wait as usize] = signal;
                }
                [(.., false, first), (.., false, second), ..] => {
                    let (first, second) = (self.site(first), self.site(second));
                    return Err(Violation::SignalledTwice { first, second, signal_slot });
                }
                [.., (.., true, first), (.., true, second)] => {
                    let (first, second) = (self.site(first), self.site(second));
                    return Err(Violation::WaitedTwice { first, second, signal_slot });
                }
                [(.., false, signal), ..] => {
                    return Err(Violation::Unconsumed { site: self.site(signal), to, signal_slot });
                }
                [(.., wait), ..] => {
                    return Err(Violation::NeverSignalled { site: self.site(wait), from, signal_slot });
                }
                [] => {}
            }
        }
        Ok(())
    }

    fn find_dependents(&mut self) {
        let mut starts = vec![0; self.steps.len() + 1];
        for (number, step) in self.steps.iter().enumerate() {
            let first = self.lane_steps(number as u32).start;
            for &(earlier, lag) in &step.after {
                starts[(first + earlier) as usize + 1] += u32::from(lag == 0);
            }
        }
        for step in 0..self.steps.len() {
            starts[step + 1] += starts[step];
        }
        let mut next = starts.clone();
        let mut dependents = vec![0; starts[self.steps.len()] as usize];
        for (number, step) in self.steps.iter().enumerate() {
            let first = self.lane_steps(number as u32).start;
            for &(earlier, _) in step.after.iter().filter(|(_, lag)| *lag == 0) {
                let place = &mut next[(first + earlier) as usize];
                dependents[*place as usize] = number as u32;
                *place += 1;
            }
        }
        self.dependent_starts = starts;
        self.dependents = dependents;
    }

    /// Whether the step is after the event by its own list, or stands behind it in a lane that the
    /// event blocks.
    fn is_just_before(&self, event: Event, later: u32) -> bool {
        let step = event / 2;
        let listed = |&(earlier, lag): &(u32, u32)| lag == 0 && self.lane_steps(step).start + earlier == step;
        event == complete(step)
            && self.same_lane(step, later)
            && (self.is_wait(step) && step < later || self.steps[later as usize].after.iter().any(listed))
    }

    /// The events just after this one in the same chunk.
    fn successors(&self, event: Event, mut visit: impl FnMut(Event)) {
        let step = event / 2;
        let next = Some(step + 1).filter(|next| self.lane_steps(step).contains(next));
        if event == issued(step) {
            visit(complete(step));
            if let Some(next) = next {
                visit(issued(next));
            }
            if !self.is_wait(step) && self.matched[step as usize] != NONE {
                visit(complete(self.matched[step as usize]));
            }
        } else {
            if let Some(next) = next.filter(|_| self.is_wait(step)) {
                visit(issued(next));
            }
            let step = step as usize;
            let range = self.dependent_starts[step] as usize..self.dependent_starts[step + 1] as usize;
            self.dependents[range].iter().for_each(|&dependent| visit(issued(dependent)));
        }
    }

    /// The events just before this one, each with the number of chunks by which it is earlier. The
    /// caller adds those of the window.
    fn predecessors(&self, event: Event, mut visit: impl FnMut(Event, u32)) {
        let step = event / 2;
        let first = self.lane_steps(step).start;
        if event == complete(step) {
            if self.is_wait(step) {
                visit(issued(self.matched[step as usize]), 0);
            }
            visit(issued(step), 0);
        } else {
            for &(earlier, lag) in &self.steps[step as usize].after {
                visit(complete(first + earlier), lag);
            }
            if step > first {
                visit(if self.is_wait(step - 1) { complete(step - 1) } else { issued(step - 1) }, 0);
            }
        }
    }

    /// Orders the events of a chunk along the edges.
    fn sort(&mut self) -> Result<(), Violation> {
        let mut missing = vec![0u32; self.events()];
        for event in 0..self.events() as u32 {
            self.successors(event, |next| missing[next as usize] += 1);
        }
        let mut sorted: Vec<Event> =
            (0..self.events() as u32).filter(|&event| missing[event as usize] == 0).collect();
        let mut done = 0;
        while done < sorted.len() {
            let event = sorted[done];
            done += 1;
            self.successors(event, |next| {
                missing[next as usize] -= 1;
                if missing[next as usize] == 0 {
                    sorted.push(next);
                }
            });
        }
        if sorted.len() < self.events() {
            return Err(Violation::Deadlock { cycle: self.cycle(&missing) });
        }
        self.position = vec![0; self.events()];
        for (position, &event) in sorted.iter().enumerate() {
            self.position[event as usize] = position as u32;
        }
        self.order = sorted.iter().filter(|&event| event % 2 == 0).map(|event| event / 2).collect();
        Ok(())
    }

    /// A cycle among the events that miss a predecessor. The path back from any of them meets an
    /// event twice.
    fn cycle(&self, missing: &[u32]) -> Vec<Site> {
        let mut seen_at = vec![NONE; self.events()];
        let mut path = Vec::new();
        let mut event = missing.iter().position(|&count| count > 0).unwrap_or(0) as Event;
        while seen_at[event as usize] == NONE {
            seen_at[event as usize] = path.len() as u32;
            path.push(event);
            let mut before = event;
            self.predecessors(event, |earlier, lag| {
                if lag == 0 && missing[earlier as usize] > 0 {
                    before = earlier;
                }
            });
            event = before;
        }
        let mut cycle: Vec<Site> =
            path[seen_at[event as usize] as usize..].iter().map(|event| self.site(event / 2)).collect();
        cycle.dedup();
        if cycle.len() > 1 && cycle.first() == cycle.last() {
            cycle.pop();
        }
        cycle
    }
}

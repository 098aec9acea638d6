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

use std::collections::HashMap;

use pleach_vocabulary::{Collective, Rank};

use crate::{BlockId, Op, Part, Place, Schedule, Step};
use form::{has_input, has_output};
use graph::{Chunk, Event, Graph, LaneRef, LanesByBlock, NONE, Order, complete};
use memory::{Memory, check_values};

pub use violation::{Access, Placement, SignalSlotName, Site, Violation};

pub mod form;
mod graph;
mod memory;
mod violation;

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
        let mut reached = ReachedRanks::new(schedule.ranks());
        for block in 0..schedule.blocks.len() as BlockId {
            let (graph, _) = prove(&schedule, block, lanes.of(block), &mut facts)?;
            reached.add(&graph)?;
        }
        reached.check(schedule.ranks())?;
    } else {
        let mut classes = Classes::new(&schedule, &lanes);
        for block in 0..schedule.blocks.len() as BlockId {
            if let Some(proved) = classes.find(block) {
                if classes.reordered() {
                    let graph = Graph::new(&schedule, block, lanes.of(block))?;
                    check_values(&graph, &Memory::new(&graph))?;
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
/// ([`BlockResult::by_copies_alone`]).
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
    let outcome = check_values(&graph, &memory)?;
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

/// Checks that a signal slot is signalled for a chunk only after the signal of the chunk a window
/// before was consumed.
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

    /// What is true of a block's steps is true of those of its renaming.
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
            if !check_values(&graph, &Memory::new(&graph))?.in_rank_order {
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

// Checks that no rank leaves a barrier before all ranks have entered it.

/// Most words that are kept for the events of a block: 1 GiB.
const MAX_WORDS: u64 = 1 << 27;

/// By rank: of whom it has heard when it ends.
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

    /// Adds what is heard through the lanes of a block: at every event, what was at those before
    /// it, and its own rank.
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

// Blocks that are equal up to the names of the ranks.
//
// In a ring of 1,024 ranks that is written block by block, every block is the first block rotated.
// The proof of a block holds for another block if some bijective renaming of the ranks maps the
// lanes of the one to the lanes of the other, step by step, and keeps which ranks have the block
// in their input, which have it in their output, and which contribute to it. Every check depends
// on these properties alone.
//
// A reduce may list its sources in another order. The order matters only for the expression of the
// result, and not for two sources. Expressions matter only if two steps must combine the same
// expression. If three or more sources are reordered and this is so, values are evaluated again
// ([`Classes::reordered`]).
//
// The renaming is guessed by following the names from one rank on, and then verified: all lanes of
// all ranks are compared under it.

/// To how many proved blocks of the same signature a block is compared.
const MAX_REPRESENTATIVES: usize = 4;
/// With how many ranks of a block a representative's anchor is tried.
const MAX_CANDIDATES: usize = 4;
/// No rank yet.
const UNNAMED: Rank = Rank::MAX;

/// A proved block, and a rank of it with a shape that few ranks of it have.
#[derive(Clone, Copy, Debug)]
struct Representative {
    block: BlockId,
    anchor: Rank,
    shape: u64,
    /// No reordering of its sources can matter.
    by_copies_alone: bool,
}

/// Proved blocks and the renaming that was found last.
#[derive(Debug)]
struct Classes<'a> {
    schedule: &'a Schedule,
    lanes: &'a LanesByBlock,
    known: HashMap<u64, Vec<Representative>>,
    /// The shape and rank of each lane of the present block, ordered.
    shapes: Vec<(u64, Rank)>,
    signature: u64,
    /// The name in the present block of each rank of the representative.
    renamed: Vec<Rank>,
    /// The other way round.
    original: Vec<Rank>,
    /// Ranks whose lanes are still to be compared.
    open: Vec<Rank>,
    /// Lists of several sources that are still to be compared.
    sources: Vec<(&'a [Place], &'a [Place])>,
    /// Whether a reduce of three or more sources lists them in another order.
    reordered: bool,
}

impl<'a> Classes<'a> {
    fn new(schedule: &'a Schedule, lanes: &'a LanesByBlock) -> Self {
        let unnamed = vec![UNNAMED; schedule.programs.len()];
        Self {
            schedule,
            lanes,
            known: HashMap::new(),
            shapes: Vec::new(),
            signature: 0,
            renamed: unnamed.clone(),
            original: unnamed,
            open: Vec::new(),
            sources: Vec::new(),
            reordered: false,
        }
    }

    /// A proved block of which this one is a renaming. [`Classes::original`] tells the ranks.
    fn find(&mut self, block: BlockId) -> Option<BlockId> {
        self.sign(block);
        let representatives = self.known.get(&self.signature).cloned().unwrap_or_default();
        for representative in representatives {
            let first = self.shapes.partition_point(|&(shape, _)| shape < representative.shape);
            let candidates: Vec<Rank> = self.shapes[first..]
                .iter()
                .take_while(|(shape, _)| *shape == representative.shape)
                .take(MAX_CANDIDATES)
                .map(|&(_, rank)| rank)
                .collect();
            for candidate in candidates {
                if self.renames(representative, block, candidate) {
                    self.reordered &= !representative.by_copies_alone;
                    return Some(representative.block);
                }
            }
        }
        None
    }

    /// The rank of the block that [`Classes::find`] returned that is called `rank` in the one it
    /// was asked for.
    fn original(&self, rank: Rank) -> Rank {
        self.original[rank as usize]
    }

    /// Whether values have to be looked at again: in what [`Classes::find`] returned three or more
    /// sources are in another order, and that may matter.
    fn reordered(&self) -> bool {
        self.reordered
    }

    /// The block that [`Classes::find`] was asked for last has been proved.
    fn learn(&mut self, block: BlockId, by_copies_alone: bool) {
        let rarest = self.shapes.chunk_by(|one, other| one.0 == other.0).min_by_key(|same| same.len());
        let representatives = self.known.entry(self.signature).or_default();
        if let Some(&(shape, anchor)) = rarest.and_then(<[_]>::first)
            && representatives.len() < MAX_REPRESENTATIVES
        {
            representatives.push(Representative { block, anchor, shape, by_copies_alone });
        }
    }

    fn sign(&mut self, block: BlockId) {
        self.shapes.clear();
        self.signature = 0;
        for lane in self.lanes.of(block) {
            let mut shape = LaneHash(u64::from(self.role(lane.rank, block)));
            for step in &self.schedule.programs[lane.rank as usize][lane.lane as usize].steps {
                shape.add_step(step, lane.rank);
            }
            let shape = shape.finish();
            self.shapes.push((shape, lane.rank));
            self.signature = self.signature.wrapping_add(shape);
        }
        self.shapes.sort_unstable();
    }

    /// Whether the block is in the rank's input, in its output, and contributed to by it.
    fn role(&self, rank: Rank, block: BlockId) -> u8 {
        let part = self.schedule.blocks[block as usize].part;
        u8::from(has_input(self.schedule, rank, part))
            | u8::from(has_output(self.schedule, rank, part)) << 1
            | u8::from(self.schedule.collective.contributes(rank, part, self.schedule.ranks())) << 2
    }

    /// Whether there is a renaming that turns the representative into the block and calls its
    /// anchor `candidate`.
    fn renames(&mut self, representative: Representative, block: BlockId, candidate: Rank) -> bool {
        self.renamed.fill(UNNAMED);
        self.original.fill(UNNAMED);
        self.open.clear();
        self.sources.clear();
        self.reordered = false;
        if !self.rename(representative.anchor, candidate) || !self.compare_open(representative.block, block) {
            return false;
        }
        // Whom the steps do not lead to keeps its place among those: nothing but the comparison
        // supports it.
        let mut free = 0;
        for rank in 0..self.renamed.len() {
            if self.renamed[rank] == UNNAMED {
                while self.original[free] != UNNAMED {
                    free += 1;
                }
                if !self.rename(rank as Rank, free as Rank) || !self.compare_open(representative.block, block)
                {
                    return false;
                }
            }
        }
        self.compare_sources()
            && (0..self.renamed.len()).all(|rank| {
                self.role(rank as Rank, representative.block) == self.role(self.renamed[rank], block)
            })
    }

    fn rename(&mut self, from: Rank, to: Rank) -> bool {
        let (renamed, original) = (&mut self.renamed[from as usize], &mut self.original[to as usize]);
        if *renamed == UNNAMED && *original == UNNAMED {
            (*renamed, *original) = (to, from);
            self.open.push(from);
            return true;
        }
        *renamed == to && *original == from
    }

    /// Compares the lanes of all ranks that were renamed, and of those that this leads to.
    fn compare_open(&mut self, one: BlockId, other: BlockId) -> bool {
        let (schedule, lanes) = (self.schedule, self.lanes);
        while let Some(rank) = self.open.pop() {
            let renamed = self.renamed[rank as usize];
            let (of_one, of_other) =
                (lanes_of_rank(lanes.of(one), rank), lanes_of_rank(lanes.of(other), renamed));
            if of_one.len() != of_other.len() {
                return false;
            }
            for (one, other) in of_one.iter().zip(of_other) {
                let steps = |lane: &LaneRef| &schedule.programs[lane.rank as usize][lane.lane as usize].steps;
                let (one, other) = (steps(one), steps(other));
                if one.len() != other.len()
                    || !one.iter().zip(other).all(|(one, other)| self.same(one, other))
                {
                    return false;
                }
            }
        }
        true
    }

    fn same(&mut self, one: &'a Step, other: &'a Step) -> bool {
        one.after == other.after
            && match (&one.op, &other.op) {
                (
                    Op::Signal { to, signal_slot },
                    Op::Signal { to: other_to, signal_slot: other_signal_slot },
                ) => signal_slot == other_signal_slot && self.rename(*to, *other_to),
                (
                    Op::Wait { from, signal_slot },
                    Op::Wait { from: other_from, signal_slot: other_signal_slot },
                ) => signal_slot == other_signal_slot && self.rename(*from, *other_from),
                (
                    Op::Put { to, src, dst, signal_slot },
                    Op::Put { to: other_to, src: other_src, dst: other_dst, signal_slot: other_signal_slot },
                ) => {
                    (src, dst, signal_slot) == (other_src, other_dst, other_signal_slot)
                        && self.rename(*to, *other_to)
                }
                (Op::Reduce { from, into }, Op::Reduce { from: other_from, into: other_into }) => {
                    self.same_sources(from, other_from) && self.same_places(into, other_into)
                }
                _ => false,
            }
    }

    /// Sources are compared when all ranks have their names, regardless of their order.
    fn same_sources(&mut self, one: &'a [Place], other: &'a [Place]) -> bool {
        if let ([one], [other]) = (one, other) {
            return one.part == other.part && self.rename(one.rank, other.rank);
        }
        self.sources.push((one, other));
        one.len() == other.len()
    }

    fn compare_sources(&mut self) -> bool {
        for (one, other) in std::mem::take(&mut self.sources) {
            let renamed = |place: &Place| Place { rank: self.renamed[place.rank as usize], part: place.part };
            let mut one: Vec<Place> = one.iter().map(renamed).collect();
            if one != other {
                self.reordered |= one.len() > 2;
                let mut other = other.to_vec();
                one.sort_unstable();
                other.sort_unstable();
                if one != other {
                    return false;
                }
            }
        }
        true
    }

    fn same_places(&mut self, one: &[Place], other: &[Place]) -> bool {
        one.len() == other.len()
            && one
                .iter()
                .zip(other)
                .all(|(one, other)| one.part == other.part && self.rename(one.rank, other.rank))
    }
}

/// The lanes of a rank among those of a block.
fn lanes_of_rank(lanes: &[LaneRef], rank: Rank) -> &[LaneRef] {
    let from = lanes.partition_point(|lane| lane.rank < rank);
    let count = lanes[from..].iter().take_while(|lane| lane.rank == rank).count();
    &lanes[from..from + count]
}

/// A hash of a lane that no renaming changes.
struct LaneHash(u64);

impl LaneHash {
    fn add(&mut self, value: u64) {
        self.0 = (self.0.rotate_left(5) ^ value).wrapping_mul(0x517c_c1b7_2722_0a95);
    }

    fn add_place(&mut self, place: Place, own: Rank) {
        self.add_part(place.part);
        self.add(u64::from(place.rank == own));
    }

    fn add_part(&mut self, part: Part) {
        self.add(match part {
            Part::Input => 1,
            Part::Output => 2,
            Part::SharedInput => 3,
            Part::SharedOutput => 4,
            Part::Scratch(slot) => 5 + u64::from(slot),
        });
    }

    fn add_step(&mut self, step: &Step, own: Rank) {
        match &step.op {
            Op::Signal { signal_slot, .. } => self.add(u64::from(signal_slot.0) << 2),
            Op::Wait { signal_slot, .. } => self.add(u64::from(signal_slot.0) << 2 | 1),
            Op::Put { src, dst, signal_slot, .. } => {
                self.add(u64::from(signal_slot.0) << 2 | 2);
                self.add_part(*src);
                self.add_part(*dst);
            }
            Op::Reduce { from, into } => {
                self.add((from.len() as u64) << 32 | (into.len() as u64) << 2 | 3);
                let sources = from.iter().map(|&place| {
                    let mut source = LaneHash(1);
                    source.add_place(place, own);
                    source.finish()
                });
                self.add(sources.fold(0, u64::wrapping_add));
                into.iter().for_each(|&place| self.add_place(place, own));
            }
        }
        for &(earlier, lag) in &step.after {
            self.add(u64::from(earlier) << 32 | u64::from(lag));
        }
    }

    fn finish(&self) -> u64 {
        let mixed = (self.0 ^ self.0 >> 32).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        mixed ^ mixed >> 29
    }
}

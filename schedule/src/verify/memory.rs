//! What the steps of a block touch, and whether what conflicts is ordered.
//!
//! # Which places are the same memory
//!
//! At a rank the shared input may be the input, the shared output may be the output, and the output
//! may be the input: eight placements, each rank on its own. Where neither shared place is the
//! data, one window stands in for both. A copy between places that are the same memory is nothing.
//!
//! The edges between events do not depend on the placement, and a race lies in the memory of one
//! rank. So a schedule is free of races with every combination of placements exactly if every two
//! accesses that conflict in *some* placement of their rank are ordered: one pass over the pairs
//! with a mask of placements. (Checked one by one, most would be needed, as copies vanish in just
//! those placements in which others begin to conflict. With shared input, shared output and output
//! `-` apart or `=` the same, in this order: a peer's read of `SI` against `SO -> O` only in `=-=`
//! and `--?`, `I -> O` against `SO -> O` only in `?--`, and against a write of `SO` only in `?=-`.)
//!
//! Input and output have their own bytes for every chunk; scratch, and shared places that are
//! apart, have an instance for each chunk under way. So the former conflict within a chunk only,
//! the latter also with the chunk a window later ([`super::order`] explains why).

use std::collections::HashMap;

use pleach_vocabulary::Rank;

use super::order::{Chunk, HappensBefore};
use super::{Event, Graph, NONE, complete, issued, skips};
use crate::verify::form::{has_input, has_output};
use crate::verify::violation::{Placement, StepAccess, Violation, data_index};
use crate::{Op, Part, Place};

/// Most pairs of accesses that are compared in a block.
const MAX_PAIRS: u64 = 1 << 30;

/// The number of placements. Bit 0 of a placement's number: shared input is input; bit 1:
/// shared output is output; bit 2: output is input. Number 0: input and output apart, and one
/// window for both shared places.
const PLACEMENTS: usize = 8;
/// A mask with all of them.
const EVERY: u8 = 0xff;
/// [`MemoryAccess::place`] of scratch.
const SCRATCH: usize = 4;

/// Which memory a place (see [`data_index`]) is in a placement: the number of the first place that
/// is the same.
const fn memory_of(placement: usize, place: usize) -> usize {
    let (input, output) = (0, if placement & 4 != 0 { 0 } else { 1 });
    match place {
        2 if placement & 1 != 0 => input,
        3 if placement & 2 != 0 => output,
        3 if placement & 1 == 0 => 2,
        1 => output,
        other => other,
    }
}

/// In which placements two places are the same memory.
const SAME: [[u8; 5]; 5] = {
    let mut same = [[0; 5]; 5];
    let mut one = 0;
    while one < 25 {
        let mut placement = 0;
        while placement < PLACEMENTS {
            if memory_of(placement, one / 5) == memory_of(placement, one % 5) {
                same[one / 5][one % 5] |= 1 << placement;
            }
            placement += 1;
        }
        one += 1;
    }
    same
};

/// In which placements a place has an instance for each chunk under way, not bytes for every chunk.
const WINDOWED: [u8; 5] = [0, 0, !SAME[0][2], !SAME[1][3], EVERY];

fn placement(number: usize) -> Placement {
    Placement {
        shared_input_is_input: number & 1 != 0,
        shared_output_is_output: number & 2 != 0,
        in_place: number & 4 != 0,
    }
}

/// A place that a step reads or writes.
#[derive(Clone, Copy, Debug)]
struct MemoryAccess {
    step: u32,
    /// Index in [`MemoryMap::groups`].
    group: u32,
    /// [`data_index`], or [`SCRATCH`].
    place: u8,
    writes: bool,
    /// In which placements it happens at all.
    real: u8,
}

/// Memory that has nothing in common with any other: a rank's data of the block, or one scratch
/// slot of it.
#[derive(Clone, Copy, Debug)]
struct MemoryGroup {
    owner: Rank,
    /// `None`: the data.
    slot: Option<u16>,
}

/// Everything that is touched.
#[derive(Debug)]
pub(super) struct MemoryMap {
    /// By step: sources, then destinations, as listed.
    accesses: Vec<MemoryAccess>,
    starts: Vec<u32>,
    groups: Vec<MemoryGroup>,
    /// Touches ordered by group.
    by_group: Vec<u32>,
    group_starts: Vec<u32>,
}

impl MemoryMap {
    pub(super) fn new(graph: &Graph<'_>) -> Self {
        let mut accesses = Vec::new();
        let mut starts = vec![0];
        let mut keys: Vec<(Rank, Option<u16>, u32)> = Vec::new();
        for (number, step) in graph.steps.iter().enumerate() {
            let number = number as u32;
            let mut add = |place: Place, writes, real| {
                let slot = if let Part::Scratch(slot) = place.part { Some(slot) } else { None };
                keys.push((place.rank, slot, accesses.len() as u32));
                let place = data_index(place.part).unwrap_or(SCRATCH) as u8;
                accesses.push(MemoryAccess { step: number, group: NONE, place, writes, real });
            };
            let own = graph.rank(number);
            match &step.op {
                Op::Put { to, src, dst, .. } => {
                    add(Place { rank: own, part: *src }, false, EVERY);
                    add(Place { rank: *to, part: *dst }, true, EVERY);
                }
                Op::Reduce { from, into } => {
                    let vanishes = |into: &Place| match from[..] {
                        [source] if source.rank == own && into.rank == own => {
                            vanishing(source.part, into.part)
                        }
                        _ => 0,
                    };
                    let read = into.iter().fold(0, |real, into| real | !vanishes(into));
                    from.iter().for_each(|&place| add(place, false, read));
                    into.iter().for_each(|place| add(*place, true, !vanishes(place)));
                }
                Op::Signal { .. } | Op::Wait { .. } => {}
            }
            starts.push(accesses.len() as u32);
        }
        keys.sort_unstable();
        let mut groups: Vec<MemoryGroup> = Vec::new();
        let mut group_starts = Vec::new();
        let mut by_group = Vec::with_capacity(keys.len());
        for &(owner, slot, access) in &keys {
            if groups.last().is_none_or(|group| (group.owner, group.slot) != (owner, slot)) {
                groups.push(MemoryGroup { owner, slot });
                group_starts.push(by_group.len() as u32);
            }
            accesses[access as usize].group = groups.len() as u32 - 1;
            by_group.push(access);
        }
        group_starts.push(by_group.len() as u32);
        Self { accesses, starts, groups, by_group, group_starts }
    }

    /// The memory accesses of a step: sources, then destinations.
    fn of_step(&self, step: u32) -> &[MemoryAccess] {
        let step = step as usize;
        &self.accesses[self.starts[step] as usize..self.starts[step + 1] as usize]
    }

    /// The place of the group's owner.
    fn place(&self, access: &MemoryAccess) -> Place {
        let group = self.groups[access.group as usize];
        let part = match access.place {
            0 => Part::Input,
            1 => Part::Output,
            2 => Part::SharedInput,
            3 => Part::SharedOutput,
            _ => Part::Scratch(group.slot.unwrap_or_default()),
        };
        Place { rank: group.owner, part }
    }

    fn access(&self, graph: &Graph<'_>, access: &MemoryAccess, chunk: u32) -> Box<StepAccess> {
        let (site, place) = (graph.site(access.step), self.place(access));
        Box::new(StepAccess { site, chunk, writes: access.writes, place })
    }

    /// Checks that all conflicting accesses are ordered.
    pub(super) fn check_races(
        &self,
        graph: &Graph<'_>,
        order: &mut HappensBefore<'_, '_>,
        only: Option<Rank>,
    ) -> Result<(), Violation> {
        let mut pairs = 0;
        for (memory, bounds) in self.groups.iter().zip(self.group_starts.windows(2)) {
            if skips(only, memory.owner) {
                continue;
            }
            let group = &self.by_group[bounds[0] as usize..bounds[1] as usize];
            for (index, &write) in group.iter().enumerate() {
                let write = &self.accesses[write as usize];
                if !write.writes {
                    continue;
                }
                for (other_index, &other) in group.iter().enumerate() {
                    let other = &self.accesses[other as usize];
                    if other.writes && other_index < index {
                        continue; // seen from the other side
                    }
                    pairs += 1;
                    if pairs > MAX_PAIRS {
                        return Err(Violation::TooHard { block: graph.block, most: MAX_PAIRS });
                    }
                    self.check_pair(graph, order, write, other)?;
                }
            }
        }
        Ok(())
    }

    fn check_pair(
        &self,
        graph: &Graph<'_>,
        order: &mut HappensBefore<'_, '_>,
        one: &MemoryAccess,
        other: &MemoryAccess,
    ) -> Result<(), Violation> {
        let conflict = one.real & other.real & SAME[one.place as usize][other.place as usize];
        if conflict == 0 {
            return Ok(());
        }
        if one.step != other.step {
            let issue = |access: &MemoryAccess| graph.position[issued(access.step) as usize];
            let (first, second) = if issue(one) < issue(other) { (one, other) } else { (other, one) };
            if !order.ended_before(end_events(graph, first).as_slice(), Chunk::First, second.step)? {
                let (first, second) = (self.access(graph, first, 0), self.access(graph, second, 0));
                return Err(Violation::Race { first, second });
            }
        }
        if conflict & WINDOWED[one.place as usize] == 0 || graph.schedule.has_one_chunk() {
            return Ok(());
        }
        for (first, second) in [(one, other), (other, one)] {
            if !order.ended_before(end_events(graph, first).as_slice(), Chunk::Window, second.step)? {
                let first = self.access(graph, first, 0);
                let second = self.access(graph, second, graph.schedule.window);
                return Err(Violation::Race { first, second });
            }
        }
        Ok(())
    }

    /// Checks that a rank touches the slices of another rank only while that rank is known to be in
    /// this run: after a signal of that rank to the rank that touches the slices. The signal says
    /// where the slices are.
    pub(super) fn check_presence(
        &self,
        graph: &Graph<'_>,
        order: &mut HappensBefore<'_, '_>,
        only: Option<Rank>,
    ) -> Result<(), Violation> {
        let mut wanted = vec![false; graph.schedule.programs.len()];
        let hubs = order.hubs();
        let heard = first_waits(graph);
        for step in (0..graph.steps.len() as u32).filter(|&step| !skips(only, graph.rank(step))) {
            let own = graph.rank(step);
            let put = matches!(graph.steps[step as usize].op, Op::Put { .. });
            let foreign = |access: &&MemoryAccess| self.groups[access.group as usize].owner != own;
            // Writing into scratch needs no earlier word: the runtime's credits guard the bank. A
            // put ends at its wait.
            let early = |access: &&MemoryAccess| {
                let owner = self.groups[access.group as usize].owner;
                let has_heard =
                    || heard.get(&(graph.lane_of[step as usize], owner)).is_some_and(|&wait| wait < step);
                foreign(access) && !(access.writes && access.place as usize == SCRATCH) && !has_heard()
            };
            let late = |access: &&MemoryAccess| {
                foreign(access) && !put && !hubs.lead_to_rank(step, self.groups[access.group as usize].owner)
            };
            let accesses = self.of_step(step);
            if let Some(access) = self.absent(accesses.iter().filter(early), &mut wanted, |found| {
                order.signalled_before(step, found)
            })? {
                return Err(Violation::TouchedEarly { access: self.access(graph, access, 0) });
            }
            if let Some(access) = self
                .absent(accesses.iter().filter(late), &mut wanted, |found| order.ranks_after(step, found))?
            {
                return Err(Violation::TouchedLate { access: self.access(graph, access, 0) });
            }
        }
        Ok(())
    }

    /// The first touch whose owner the search does not find. `wanted` is all false before and
    /// after.
    fn absent<'t>(
        &self,
        accesses: impl Iterator<Item = &'t MemoryAccess> + Clone,
        wanted: &mut [bool],
        search: impl FnOnce(&mut dyn FnMut(Rank) -> bool) -> Result<bool, Violation>,
    ) -> Result<Option<&'t MemoryAccess>, Violation> {
        let owner = |access: &MemoryAccess| self.groups[access.group as usize].owner as usize;
        let mut missing = 0;
        for access in accesses.clone() {
            missing += usize::from(!std::mem::replace(&mut wanted[owner(access)], true));
        }
        if missing == 0 {
            return Ok(None);
        }
        let all = search(&mut |rank| {
            missing -= usize::from(std::mem::replace(&mut wanted[rank as usize], false));
            missing == 0
        })?;
        if all {
            return Ok(None);
        }
        Ok(accesses.into_iter().find(|access| wanted[owner(access)]))
    }

    /// The index of each rank's data among the groups, or [`NONE`].
    fn data_groups(&self, graph: &Graph<'_>) -> Vec<u32> {
        let mut lanes_of_rank = vec![NONE; graph.schedule.programs.len()];
        for (number, group) in self.groups.iter().enumerate() {
            if group.slot.is_none() {
                lanes_of_rank[group.owner as usize] = number as u32;
            }
        }
        lanes_of_rank
    }

    /// Whether the owner of the group has the block in its input.
    fn owner_has_input(&self, graph: &Graph<'_>, group: u32) -> bool {
        let part = graph.schedule.blocks[graph.block as usize].part;
        has_input(graph.schedule, self.groups[group as usize].owner, part)
    }
}

/// By lane and sender: the first step of the lane that waits for the sender. What stands behind it
/// in the lane is after it.
fn first_waits(graph: &Graph<'_>) -> HashMap<(u32, Rank), u32> {
    let mut waits = HashMap::new();
    for (step, lane) in (0..graph.steps.len() as u32).zip(&graph.lane_of) {
        if let Op::Wait { from, .. } = graph.steps[step as usize].op {
            waits.entry((*lane, from)).or_insert(step);
        }
    }
    waits
}

/// In which placements a copy between two places of a rank is nothing.
fn vanishing(from: Part, into: Part) -> u8 {
    match (data_index(from), data_index(into)) {
        (Some(from), Some(into)) => SAME[from][into],
        _ => 0,
    }
}

/// The events of which any one says that the access is over: a put's source is free when the put is
/// complete, and also when it has landed; a put's destination is written when it has landed.
struct EndEvents {
    events: [Event; 2],
    count: usize,
}

impl EndEvents {
    fn as_slice(&self) -> &[Event] {
        &self.events[..self.count]
    }
}

fn end_events(graph: &Graph<'_>, access: &MemoryAccess) -> EndEvents {
    let own = complete(access.step);
    match graph.steps[access.step as usize].op {
        Op::Put { .. } => {
            let landed = complete(graph.matched[access.step as usize]);
            EndEvents { events: [landed, own], count: if access.writes { 1 } else { 2 } }
        }
        _ => EndEvents { events: [own; 2], count: 1 },
    }
}

// The values of the places of a block: expressions over the contributions of the ranks.
//
// Steps are evaluated one after the other in an order that follows the edges. All conflicting
// accesses are ordered (this was checked before), so every order gives the same values, and a step
// may be evaluated when it is issued. One chunk is enough: edges lead only to the same or later
// chunks, so no step of another chunk comes between a write of this chunk and its reader.
//
// A value is the number of an expression. Equal expressions have equal numbers, so equal numbers
// mean equal bits. Two sources may be exchanged (the operations are commutative). More than two
// sources are folded from the left in one pass, which may round differently than step by step, so
// `a + b + c` is another expression than `(a + b)` then `+ c`.
//
// Every step must read the same value in all placements of the memory that it reads. By induction
// along the order, this also holds if every rank has another placement: the value of a source
// depends only on the placement of its own rank and on the values that were written, which are the
// same in all placements.

/// Nothing was written.
const UNDEFINED: u32 = u32::MAX;
/// Most words of sets of contributors in a block: 2 GiB.
const MAX_SET_WORDS: u64 = 1 << 28;

/// The number of an expression; below the number of ranks: that rank's contribution.
type Value = u32;

/// What the places of a rank's data hold, by placement and memory.
type Data = [[Value; 4]; PLACEMENTS];

/// The result of executing a block.
#[derive(Debug)]
pub(super) struct BlockResult {
    /// By step: whether it combines several sources into the complete result.
    pub(super) completes: Vec<bool>,
    /// Whether no two steps combined the same expression. Then places that hold the same value hold
    /// copies of one result, and would also do so if sources were listed in another order.
    pub(super) by_copies_alone: bool,
    /// Whether the result is the fold of all ranks' contributions in the order of the ranks, in one
    /// pass.
    pub(super) in_rank_order: bool,
}

/// Carries the block out and checks the end.
pub(super) fn check_values(graph: &Graph<'_>, memory: &MemoryMap) -> Result<BlockResult, Violation> {
    let schedule = graph.schedule;
    let part = schedule.blocks[graph.block as usize].part;
    let mut required = Set::empty(schedule.ranks());
    for rank in 0..schedule.ranks() {
        if schedule.collective.contributes(rank, part, schedule.ranks()) {
            required.insert(rank);
        }
    }
    let mut run = Evaluation {
        graph,
        memory,
        data: (0..memory.groups.len() as u32).map(|group| initial(graph, memory, group)).collect(),
        expressions: Expressions::new(schedule.ranks()),
    };
    let mut completes = vec![false; graph.steps.len()];
    let mut sources = Vec::new();
    for &step in &graph.order {
        let Some(value) = run.read(step, &mut sources)? else { continue };
        completes[step as usize] = sources.len() > 1 && run.expressions.is(value, &required);
        for access in memory.of_step(step).iter().filter(|access| access.writes) {
            run.write(access, value);
        }
    }
    let result = run.check_outputs(&required, part)?;
    let by_copies_alone = !run.expressions.combined_twice;
    let all: Vec<Value> = (0..schedule.ranks()).collect();
    let in_rank_order = match (result, all.len()) {
        (_, 1) | (None, _) => true,
        // Only the fold of all has this number: if no step made it, it is a new one.
        (Some(result), _) => run.expressions.combine(&all).is_ok_and(|fold| fold == result),
    };
    Ok(BlockResult { completes, by_copies_alone, in_rank_order })
}

fn initial(graph: &Graph<'_>, memory: &MemoryMap, group: u32) -> Data {
    let mut data = [[UNDEFINED; 4]; PLACEMENTS];
    let holds = memory.groups[group as usize];
    if holds.slot.is_none() && memory.owner_has_input(graph, group) {
        data.iter_mut().for_each(|places| places[0] = holds.owner);
    }
    data
}

struct Evaluation<'r, 'a> {
    graph: &'r Graph<'a>,
    memory: &'r MemoryMap,
    /// By group; scratch uses one place of it.
    data: Vec<Data>,
    expressions: Expressions,
}

/// Where in [`Data`] a touch is; scratch lies in the first place of every placement.
fn index(placement: usize, access: &MemoryAccess) -> usize {
    if access.place < 4 { memory_of(placement, access.place as usize) } else { 0 }
}

impl Evaluation<'_, '_> {
    /// The value that the step makes of its sources, if it has any.
    fn read(&mut self, step: u32, sources: &mut Vec<Value>) -> Result<Option<Value>, Violation> {
        if !matches!(self.graph.steps[step as usize].op, Op::Put { .. } | Op::Reduce { .. }) {
            return Ok(None);
        }
        sources.clear();
        let accesses = self.memory.of_step(step);
        for access in accesses.iter().filter(|access| !access.writes) {
            let data = &self.data[access.group as usize];
            let value = data[0][index(0, access)];
            let (site, place) = (self.graph.site(step), self.memory.place(access));
            if value == UNDEFINED {
                return Err(Violation::Undefined { site, place });
            }
            let differs = (0..PLACEMENTS).find(|&number| {
                access.real & (1 << number) != 0 && data[number][index(number, access)] != value
            });
            if let Some(number) = differs {
                return Err(Violation::PlacementMatters { site, place, placement: placement(number) });
            }
            sources.push(value);
        }
        if let [copied] = sources[..] {
            return Ok(Some(copied));
        }
        let limit = MAX_SET_WORDS;
        if self.expressions.words() > limit {
            return Err(Violation::TooHard { block: self.graph.block, most: limit });
        }
        match self.expressions.combine(sources) {
            Ok(value) => Ok(Some(value)),
            Err(DuplicateContribution { contributor, source }) => {
                let place = self.memory.place(&accesses[source]);
                Err(Violation::CountedTwice { site: self.graph.site(step), contributor, place })
            }
        }
    }

    fn write(&mut self, access: &MemoryAccess, value: Value) {
        let data = &mut self.data[access.group as usize];
        for (number, places) in data.iter_mut().enumerate() {
            if access.real & (1 << number) != 0 {
                places[index(number, access)] = value;
            }
        }
    }

    /// The value that all outputs have, if there are any.
    fn check_outputs(&self, required: &Set, part: u32) -> Result<Option<Value>, Violation> {
        let (schedule, block) = (self.graph.schedule, self.graph.block);
        let groups = self.memory.data_groups(self.graph);
        let mut first: Option<(Rank, Value)> = None;
        for rank in (0..schedule.ranks()).filter(|&rank| has_output(schedule, rank, part)) {
            let group = groups[rank as usize];
            let data = if group == NONE { None } else { Some(&self.data[group as usize]) };
            let value = data.map_or(UNDEFINED, |data| data[0][1]);
            let Some(data) = data.filter(|_| value != UNDEFINED) else {
                return Err(Violation::OutputMissing { rank, block });
            };
            match first {
                Some((_, agreed)) if agreed == value => {}
                _ => {
                    let set = self.expressions.set(value);
                    if let Some(contributor) = set.first_not_in(required) {
                        return Err(Violation::ContributionForeign { rank, block, contributor });
                    }
                    if let Some(contributor) = required.first_not_in(&set) {
                        return Err(Violation::ContributionMissing { rank, block, contributor });
                    }
                    if let Some((one, _)) = first {
                        return Err(Violation::DifferentBits { block, one, other: rank });
                    }
                    first = Some((rank, value));
                }
            }
            let differs = (0..PLACEMENTS).find(|&number| data[number][memory_of(number, 1)] != value);
            if let Some(number) = differs {
                return Err(Violation::OutputDepends { rank, block, placement: placement(number) });
            }
        }
        Ok(first.map(|(_, value)| value))
    }
}

/// A set of ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Set(Box<[u64]>);

impl Set {
    pub(crate) fn empty(ranks: u32) -> Self {
        Self(vec![0; ranks.div_ceil(u64::BITS) as usize].into())
    }

    pub(crate) fn insert(&mut self, rank: Rank) {
        self.0[rank as usize / 64] |= 1 << (rank % 64);
    }

    fn contains(&self, rank: Rank) -> bool {
        self.0[rank as usize / 64] & (1 << (rank % 64)) != 0
    }

    /// Adds the ranks of the other set.
    pub(crate) fn join(&mut self, other: &Self) {
        self.0.iter_mut().zip(&other.0).for_each(|(own, other)| *own |= other);
    }

    /// The ranks of both.
    pub(crate) fn intersection(&self, other: &Self) -> Self {
        Self(self.0.iter().zip(&other.0).map(|(own, other)| own & other).collect())
    }

    pub(crate) fn first_not_in(&self, other: &Self) -> Option<Rank> {
        first_bit(self.0.iter().zip(&other.0).map(|(own, other)| own & !other))
    }

    fn first_in_both(&self, other: &Self) -> Option<Rank> {
        first_bit(self.0.iter().zip(&other.0).map(|(own, other)| own & other))
    }
}

fn first_bit(words: impl Iterator<Item = u64>) -> Option<Rank> {
    words.enumerate().find(|(_, word)| *word != 0).map(|(at, word)| at as Rank * 64 + word.trailing_zeros())
}

/// A contributor that is in a source and in one before it.
#[derive(Debug)]
struct DuplicateContribution {
    contributor: Rank,
    source: usize,
}

/// Expressions and their contributors, each expression once.
#[derive(Debug)]
struct Expressions {
    ranks: u32,
    /// The fold of two, or of a fold and one more, each with its number.
    folds: HashMap<(bool, u32, u32), u32>,
    /// By fold: the value of it, if it is one.
    closed: Vec<Value>,
    /// By value from `ranks` on.
    sets: Vec<Set>,
    /// Whether an expression was combined a second time.
    combined_twice: bool,
}

impl Expressions {
    fn new(ranks: u32) -> Self {
        Self { ranks, folds: HashMap::new(), closed: Vec::new(), sets: Vec::new(), combined_twice: false }
    }

    /// The size of all sets.
    fn words(&self) -> u64 {
        self.sets.len() as u64 * u64::from(self.ranks.div_ceil(u64::BITS))
    }

    fn fold(&mut self, begins: bool, one: u32, other: u32) -> u32 {
        let next = self.closed.len() as u32;
        let fold = *self.folds.entry((begins, one, other)).or_insert(next);
        if fold == next {
            self.closed.push(UNDEFINED);
        }
        fold
    }

    fn combine(&mut self, sources: &[Value]) -> Result<Value, DuplicateContribution> {
        let mut fold = self.fold(true, sources[0].min(sources[1]), sources[0].max(sources[1]));
        for &source in &sources[2..] {
            fold = self.fold(false, fold, source);
        }
        if self.closed[fold as usize] != UNDEFINED {
            self.combined_twice = true;
            return Ok(self.closed[fold as usize]);
        }
        let mut union = Set::empty(self.ranks);
        for (number, &source) in sources.iter().enumerate() {
            if let Err(contributor) = self.join(&mut union, source) {
                return Err(DuplicateContribution { contributor, source: number });
            }
        }
        let value = self.ranks + self.sets.len() as u32;
        self.sets.push(union);
        self.closed[fold as usize] = value;
        Ok(value)
    }

    fn join(&self, union: &mut Set, value: Value) -> Result<(), Rank> {
        if value < self.ranks {
            if union.contains(value) {
                return Err(value);
            }
            union.insert(value);
            return Ok(());
        }
        let set = &self.sets[(value - self.ranks) as usize];
        if let Some(twice) = set.first_in_both(union) {
            return Err(twice);
        }
        union.join(set);
        Ok(())
    }

    fn set(&self, value: Value) -> Set {
        if value >= self.ranks {
            return self.sets[(value - self.ranks) as usize].clone();
        }
        let mut single = Set::empty(self.ranks);
        single.insert(value);
        single
    }

    fn is(&self, value: Value, set: &Set) -> bool {
        value >= self.ranks && self.sets[(value - self.ranks) as usize] == *set
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_of_placements_says_which_places_are_one_memory() {
        assert_eq!(memory_of(0, 2), 2);
        assert_eq!(memory_of(7, 3), 0);
        assert_eq!(SAME[0][1], 0b1111_0000, "input and output: in place");
        assert_eq!(
            SAME[2][3], 0b1001_0001,
            "the shared ones: if all are one, or both are apart from the data"
        );
        assert_eq!(SAME[4], [0, 0, 0, 0, EVERY], "scratch is apart");
        assert_eq!(WINDOWED, [0, 0, 0b0101_0101, 0b0011_0011, EVERY]);
    }
}

#[cfg(test)]
mod value_tests {
    use super::*;

    #[test]
    fn two_sources_commute_and_a_fold_of_three_is_not_a_fold_of_folds() {
        let mut expressions = Expressions::new(100);
        let mut combine = |sources: &[Value]| expressions.combine(sources).expect("disjoint");
        let pair = combine(&[3, 99]);
        assert_eq!(pair, combine(&[99, 3]));
        let nested = combine(&[pair, 7]);
        assert_ne!(nested, combine(&[3, 99, 7]));
        assert_eq!(combine(&[3, 99, 7]), combine(&[99, 3, 7]));
        assert_ne!(combine(&[3, 99, 7]), combine(&[3, 7, 99]));
        assert!(expressions.combined_twice);
        assert_eq!(expressions.set(nested).first_not_in(&expressions.set(pair)), Some(7));
    }

    #[test]
    fn a_contribution_in_two_sources_is_found_also_in_the_second_word() {
        let mut expressions = Expressions::new(100);
        let pair = expressions.combine(&[3, 99]).expect("disjoint");
        let twice = expressions.combine(&[1, 2, 99, pair]).expect_err("99 twice");
        assert_eq!((twice.contributor, twice.source), (99, 3));
    }
}

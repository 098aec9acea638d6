//! What the places of a block hold: expressions over the ranks' contributions instead of numbers.
//!
//! Steps are carried out one after the other in an order that follows the edges. All conflicting
//! accesses are ordered (that is checked before), so every order gives the same values, and a step
//! may be taken as done when it is issued. One chunk is enough: edges lead only to the same or
//! later chunks, so nothing of another chunk comes between a write of this chunk and its reader.
//!
//! A value is a number that stands for an expression; equal expressions have equal numbers, so that
//! equal numbers mean equal bits. Two sources may be exchanged (the operations are commutative);
//! more are folded from the left in one pass, which may round differently than step by step, so
//! `a + b + c` is another expression than `(a + b)` then `+ c`.
//!
//! Every step must read the same value in all placements of the memory it reads
//! ([`super::memory`]). Then, by induction along the order, that holds also when every rank has
//! another placement: each source's value depends only on the placement of its own rank and on what
//! was written into it, which is the same in all of them.

use std::collections::HashMap;

use pleach_vocabulary::Rank;

use super::form::has_output;
use super::graph::{Graph, NONE};
use super::memory::{Memory, PLACEMENTS, Touch, memory_of, placement};
use super::violation::Violation;
use crate::Op;

/// Nothing was written.
const UNDEFINED: u32 = u32::MAX;
/// Most words of sets of contributors in a block: 2 GiB.
const MAX_SET_WORDS: u64 = 1 << 28;

/// The number of an expression; below the number of ranks: that rank's contribution.
type Value = u32;

/// What the places of a rank's data hold, by placement and memory.
type Data = [[Value; 4]; PLACEMENTS];

/// What carrying a block out has shown.
#[derive(Debug)]
pub(super) struct Outcome {
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
pub(super) fn check(graph: &Graph<'_>, memory: &Memory) -> Result<Outcome, Violation> {
    let schedule = graph.schedule;
    let part = schedule.blocks[graph.block as usize].part;
    let mut required = Set::empty(schedule.ranks());
    for rank in 0..schedule.ranks() {
        if schedule.collective.contributes(rank, part, schedule.ranks()) {
            required.insert(rank);
        }
    }
    let mut run = Run {
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
        for touch in memory.of_step(step).iter().filter(|touch| touch.writes) {
            run.write(touch, value);
        }
    }
    let result = run.check_outputs(&required, part)?;
    let by_copies_alone = !run.expressions.met_again;
    let all: Vec<Value> = (0..schedule.ranks()).collect();
    let in_rank_order = match (result, all.len()) {
        (_, 1) | (None, _) => true,
        // Only the fold of all has this number: if no step made it, it is a new one.
        (Some(result), _) => run.expressions.combine(&all).is_ok_and(|fold| fold == result),
    };
    Ok(Outcome { completes, by_copies_alone, in_rank_order })
}

fn initial(graph: &Graph<'_>, memory: &Memory, group: u32) -> Data {
    let mut data = [[UNDEFINED; 4]; PLACEMENTS];
    let holds = memory.groups[group as usize];
    if holds.slot.is_none() && memory.owner_has_input(graph, group) {
        data.iter_mut().for_each(|places| places[0] = holds.owner);
    }
    data
}

struct Run<'r, 'a> {
    graph: &'r Graph<'a>,
    memory: &'r Memory,
    /// By group; scratch uses one place of it.
    data: Vec<Data>,
    expressions: Expressions,
}

/// Where in [`Data`] a touch is; scratch lies in the first place of every placement.
fn index(placement: usize, touch: &Touch) -> usize {
    if touch.place < 4 { memory_of(placement, touch.place as usize) } else { 0 }
}

impl Run<'_, '_> {
    /// The value that the step makes of its sources, if it has any.
    fn read(&mut self, step: u32, sources: &mut Vec<Value>) -> Result<Option<Value>, Violation> {
        if !matches!(self.graph.steps[step as usize].op, Op::Put { .. } | Op::Reduce { .. }) {
            return Ok(None);
        }
        sources.clear();
        let touches = self.memory.of_step(step);
        for touch in touches.iter().filter(|touch| !touch.writes) {
            let data = &self.data[touch.group as usize];
            let value = data[0][index(0, touch)];
            let (site, place) = (self.graph.site(step), self.memory.place(touch));
            if value == UNDEFINED {
                return Err(Violation::Undefined { site, place });
            }
            let differs = (0..PLACEMENTS).find(|&number| {
                touch.real & (1 << number) != 0 && data[number][index(number, touch)] != value
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
            Err(Twice { contributor, source }) => {
                let place = self.memory.place(&touches[source]);
                Err(Violation::CountedTwice { site: self.graph.site(step), contributor, place })
            }
        }
    }

    fn write(&mut self, touch: &Touch, value: Value) {
        let data = &mut self.data[touch.group as usize];
        for (number, places) in data.iter_mut().enumerate() {
            if touch.real & (1 << number) != 0 {
                places[index(number, touch)] = value;
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
struct Set(Box<[u64]>);

impl Set {
    fn empty(ranks: u32) -> Self {
        Self(vec![0; ranks.div_ceil(u64::BITS) as usize].into())
    }

    fn insert(&mut self, rank: Rank) {
        self.0[rank as usize / 64] |= 1 << (rank % 64);
    }

    fn contains(&self, rank: Rank) -> bool {
        self.0[rank as usize / 64] & (1 << (rank % 64)) != 0
    }

    fn first_not_in(&self, other: &Self) -> Option<Rank> {
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
struct Twice {
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
    met_again: bool,
}

impl Expressions {
    fn new(ranks: u32) -> Self {
        Self { ranks, folds: HashMap::new(), closed: Vec::new(), sets: Vec::new(), met_again: false }
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

    fn combine(&mut self, sources: &[Value]) -> Result<Value, Twice> {
        let mut fold = self.fold(true, sources[0].min(sources[1]), sources[0].max(sources[1]));
        for &source in &sources[2..] {
            fold = self.fold(false, fold, source);
        }
        if self.closed[fold as usize] != UNDEFINED {
            self.met_again = true;
            return Ok(self.closed[fold as usize]);
        }
        let mut union = Set::empty(self.ranks);
        for (number, &source) in sources.iter().enumerate() {
            if let Err(contributor) = self.join(&mut union, source) {
                return Err(Twice { contributor, source: number });
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
        union.0.iter_mut().zip(&set.0).for_each(|(own, other)| *own |= other);
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
    fn two_sources_commute_and_a_fold_of_three_is_not_a_fold_of_folds() {
        let mut expressions = Expressions::new(100);
        let mut combine = |sources: &[Value]| expressions.combine(sources).expect("disjoint");
        let pair = combine(&[3, 99]);
        assert_eq!(pair, combine(&[99, 3]));
        let nested = combine(&[pair, 7]);
        assert_ne!(nested, combine(&[3, 99, 7]));
        assert_eq!(combine(&[3, 99, 7]), combine(&[99, 3, 7]));
        assert_ne!(combine(&[3, 99, 7]), combine(&[3, 7, 99]));
        assert!(expressions.met_again);
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

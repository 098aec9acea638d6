//! Blocks that are equal up to the names of the ranks.
//!
//! In a ring of 1,024 ranks that is written block by block, every block is the first block rotated.
//! The proof of a block holds for another block if some bijective renaming of the ranks maps the
//! lanes of the one to the lanes of the other, step by step, and keeps which ranks have the block
//! in their input, which have it in their output, and which contribute to it. Every check depends
//! on these properties alone.
//!
//! A reduce may list its sources in another order. The order matters only for the expression of the
//! result, and not for two sources. Expressions matter only if two steps must combine the same
//! expression. If three or more sources are reordered and this is so, values are evaluated again
//! ([`Classes::reordered`]).
//!
//! The renaming is guessed by following the names from one rank on, and then verified: all lanes of
//! all ranks are compared under it.

use std::collections::HashMap;

use pleach_vocabulary::Rank;
use pleach_vocabulary::digest::mixed;

use super::form::{has_input, has_output};
use super::{LaneRef, LanesByBlock, lanes_of_rank};
use crate::{BlockId, Op, Part, Place, Schedule, Step};

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
pub(super) struct Classes<'a> {
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
    pub(super) fn new(schedule: &'a Schedule, lanes: &'a LanesByBlock) -> Self {
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
    pub(super) fn find(&mut self, block: BlockId) -> Option<BlockId> {
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
    pub(super) fn original(&self, rank: Rank) -> Rank {
        self.original[rank as usize]
    }

    /// Whether values have to be looked at again: in what [`Classes::find`] returned three or more
    /// sources are in another order, and that may matter.
    pub(super) fn reordered(&self) -> bool {
        self.reordered
    }

    /// The block that [`Classes::find`] was asked for last has been proved.
    pub(super) fn learn(&mut self, block: BlockId, by_copies_alone: bool) {
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
        mixed(self.0)
    }
}

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
//! the latter also with the chunk a window later ([`super::order`] says why no others need a look).

use pleach_vocabulary::Rank;

use super::form::has_input;
use super::graph::{Event, Graph, NONE, complete, issued};
use super::order::{Chunk, Order};
use super::violation::{Access, Placement, Violation, data_index};
use crate::{Op, Part, Place};

/// Most pairs of accesses that are compared in a block.
const MAX_PAIRS: u64 = 1 << 30;

/// How many placements there are. Bit 0 of a placement's number: shared input is input; bit 1:
/// shared output is output; bit 2: output is input. Number 0: input and output apart, and one
/// window for both shared places.
pub(super) const PLACEMENTS: usize = 8;
/// A mask with all of them.
const EVERY: u8 = 0xff;
/// [`Touch::place`] of scratch.
const SCRATCH: usize = 4;

/// Which memory a place (see [`data_index`]) is in a placement: the number of the first place that
/// is the same.
pub(super) const fn memory_of(placement: usize, place: usize) -> usize {
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

pub(super) fn placement(number: usize) -> Placement {
    Placement {
        shared_input_is_input: number & 1 != 0,
        shared_output_is_output: number & 2 != 0,
        in_place: number & 4 != 0,
    }
}

/// A place that a step reads or writes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Touch {
    pub(super) step: u32,
    /// Index in [`Memory::groups`].
    pub(super) group: u32,
    /// [`data_index`], or [`SCRATCH`].
    pub(super) place: u8,
    pub(super) writes: bool,
    /// In which placements it happens at all.
    pub(super) real: u8,
}

/// Memory that has nothing in common with any other: a rank's data of the block, or one scratch
/// slot of it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Group {
    pub(super) owner: Rank,
    /// `None`: the data.
    pub(super) slot: Option<u16>,
}

/// Everything that is touched.
#[derive(Debug)]
pub(super) struct Memory {
    /// By step: sources, then destinations, as listed.
    touches: Vec<Touch>,
    starts: Vec<u32>,
    pub(super) groups: Vec<Group>,
    /// Touches ordered by group.
    by_group: Vec<u32>,
    group_starts: Vec<u32>,
}

impl Memory {
    pub(super) fn new(graph: &Graph<'_>) -> Self {
        let mut touches = Vec::new();
        let mut starts = vec![0];
        let mut keys: Vec<(Rank, Option<u16>, u32)> = Vec::new();
        for (number, step) in graph.steps.iter().enumerate() {
            let number = number as u32;
            let mut add = |place: Place, writes, real| {
                let slot = if let Part::Scratch(slot) = place.part { Some(slot) } else { None };
                keys.push((place.rank, slot, touches.len() as u32));
                let place = data_index(place.part).unwrap_or(SCRATCH) as u8;
                touches.push(Touch { step: number, group: NONE, place, writes, real });
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
            starts.push(touches.len() as u32);
        }
        keys.sort_unstable();
        let mut groups: Vec<Group> = Vec::new();
        let mut group_starts = Vec::new();
        let mut by_group = Vec::with_capacity(keys.len());
        for &(owner, slot, touch) in &keys {
            if groups.last().is_none_or(|group| (group.owner, group.slot) != (owner, slot)) {
                groups.push(Group { owner, slot });
                group_starts.push(by_group.len() as u32);
            }
            touches[touch as usize].group = groups.len() as u32 - 1;
            by_group.push(touch);
        }
        group_starts.push(by_group.len() as u32);
        Self { touches, starts, groups, by_group, group_starts }
    }

    /// What a step touches: sources, then destinations.
    pub(super) fn of_step(&self, step: u32) -> &[Touch] {
        let step = step as usize;
        &self.touches[self.starts[step] as usize..self.starts[step + 1] as usize]
    }

    /// The place of the group's owner.
    pub(super) fn place(&self, touch: &Touch) -> Place {
        let group = self.groups[touch.group as usize];
        let part = match touch.place {
            0 => Part::Input,
            1 => Part::Output,
            2 => Part::SharedInput,
            3 => Part::SharedOutput,
            _ => Part::Scratch(group.slot.unwrap_or_default()),
        };
        Place { rank: group.owner, part }
    }

    fn access(&self, graph: &Graph<'_>, touch: &Touch, chunk: u32) -> Box<Access> {
        let (site, place) = (graph.site(touch.step), self.place(touch));
        Box::new(Access { site, chunk, writes: touch.writes, place })
    }

    /// That all conflicting accesses are ordered.
    pub(super) fn check_races(&self, graph: &Graph<'_>, order: &mut Order<'_, '_>) -> Result<(), Violation> {
        let mut pairs = 0;
        for bounds in self.group_starts.windows(2) {
            let group = &self.by_group[bounds[0] as usize..bounds[1] as usize];
            for (index, &write) in group.iter().enumerate() {
                let write = &self.touches[write as usize];
                if !write.writes {
                    continue;
                }
                for (other_index, &other) in group.iter().enumerate() {
                    let other = &self.touches[other as usize];
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
        order: &mut Order<'_, '_>,
        one: &Touch,
        other: &Touch,
    ) -> Result<(), Violation> {
        let conflict = one.real & other.real & SAME[one.place as usize][other.place as usize];
        if conflict == 0 {
            return Ok(());
        }
        if one.step != other.step {
            let issue = |touch: &Touch| graph.position[issued(touch.step) as usize];
            let (first, second) = if issue(one) < issue(other) { (one, other) } else { (other, one) };
            if !order.ended_before(ends(graph, first).as_slice(), Chunk::First, second.step)? {
                let (first, second) = (self.access(graph, first, 0), self.access(graph, second, 0));
                return Err(Violation::Race { first, second });
            }
        }
        if conflict & WINDOWED[one.place as usize] == 0 || graph.schedule.has_one_chunk() {
            return Ok(());
        }
        for (first, second) in [(one, other), (other, one)] {
            if !order.ended_before(ends(graph, first).as_slice(), Chunk::Window, second.step)? {
                let first = self.access(graph, first, 0);
                let second = self.access(graph, second, graph.schedule.window);
                return Err(Violation::Race { first, second });
            }
        }
        Ok(())
    }

    /// That the memory of other ranks is touched only while they are known to be in this run: their
    /// slices after a signal of theirs to the rank that touches them, which says where the slices
    /// are.
    pub(super) fn check_presence(
        &self,
        graph: &Graph<'_>,
        order: &mut Order<'_, '_>,
    ) -> Result<(), Violation> {
        let mut wanted = vec![false; graph.schedule.programs.len()];
        for step in 0..graph.steps.len() as u32 {
            let own = graph.rank(step);
            let put = matches!(graph.steps[step as usize].op, Op::Put { .. });
            let foreign = |touch: &&Touch| self.groups[touch.group as usize].owner != own;
            // Writing into scratch needs no earlier word: the runtime's credits guard the bank. A
            // put ends at its wait.
            let early = |touch: &&Touch| foreign(touch) && !(touch.writes && touch.place as usize == SCRATCH);
            let late = |touch: &&Touch| foreign(touch) && !put;
            let touches = self.of_step(step);
            if let Some(touch) = self
                .absent(touches.iter().filter(early), &mut wanted, |found| order.heard_before(step, found))?
            {
                return Err(Violation::TouchedEarly { access: self.access(graph, touch, 0) });
            }
            if let Some(touch) =
                self.absent(touches.iter().filter(late), &mut wanted, |found| order.ranks_after(step, found))?
            {
                return Err(Violation::TouchedLate { access: self.access(graph, touch, 0) });
            }
        }
        Ok(())
    }

    /// The first touch whose owner the search does not find. `wanted` is all false before and
    /// after.
    fn absent<'t>(
        &self,
        touches: impl Iterator<Item = &'t Touch> + Clone,
        wanted: &mut [bool],
        search: impl FnOnce(&mut dyn FnMut(Rank) -> bool) -> Result<bool, Violation>,
    ) -> Result<Option<&'t Touch>, Violation> {
        let owner = |touch: &Touch| self.groups[touch.group as usize].owner as usize;
        let mut missing = 0;
        for touch in touches.clone() {
            missing += usize::from(!std::mem::replace(&mut wanted[owner(touch)], true));
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
        Ok(touches.into_iter().find(|touch| wanted[owner(touch)]))
    }

    /// The index of each rank's data among the groups, or [`NONE`].
    pub(super) fn data_groups(&self, graph: &Graph<'_>) -> Vec<u32> {
        let mut of_rank = vec![NONE; graph.schedule.programs.len()];
        for (number, group) in self.groups.iter().enumerate() {
            if group.slot.is_none() {
                of_rank[group.owner as usize] = number as u32;
            }
        }
        of_rank
    }

    /// Whether the owner of the group has the block in its input.
    pub(super) fn owner_has_input(&self, graph: &Graph<'_>, group: u32) -> bool {
        let part = graph.schedule.blocks[graph.block as usize].part;
        has_input(graph.schedule, self.groups[group as usize].owner, part)
    }
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
struct Ends {
    events: [Event; 2],
    count: usize,
}

impl Ends {
    fn as_slice(&self) -> &[Event] {
        &self.events[..self.count]
    }
}

fn ends(graph: &Graph<'_>, touch: &Touch) -> Ends {
    let own = complete(touch.step);
    match graph.steps[touch.step as usize].op {
        Op::Put { .. } => {
            let landed = complete(graph.matched[touch.step as usize]);
            Ends { events: [landed, own], count: if touch.writes { 1 } else { 2 } }
        }
        _ => Ends { events: [own; 2], count: 1 },
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

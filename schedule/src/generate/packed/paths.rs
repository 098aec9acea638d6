//! Gather and scatter: each block along its path.

use pleach_vocabulary::Rank;

use super::{DATA, PASSING, PackedTrees, READY};
use crate::generate::program::{Program, Target};
use crate::generate::{Access, in_turn};
use crate::{Block, Lane, Part, Place, Schedule};

pub(super) fn along_paths(trees: &PackedTrees, blocks: Vec<Block>, access: Access) -> Schedule {
    let mut programs: Vec<Vec<(usize, Lane)>> = (0..trees.ranks).map(|_| Vec::new()).collect();
    for (block, tree) in (0..).zip(&trees.trees) {
        let Some(&(first, _)) = tree.edges.first() else {
            let mut lane = Program::new(access, tree.root, block);
            lane.copy(Part::Input, Part::Output);
            programs[tree.root as usize].extend(lane.finish().map(|lane| (usize::MAX, lane)));
            continue;
        };
        let path: Vec<Rank> = std::iter::once(first).chain(tree.edges.iter().map(|edge| edge.1)).collect();
        for (place, &rank) in path.iter().enumerate() {
            let before = place.checked_sub(1).map(|place| path[place]);
            let stop = Stop { before, is_second: place == 1, after: path.get(place + 1).copied() };
            let is_last_hop = place + 2 == path.len();
            let lane = stop.lane(Program::new(access, rank, block), is_last_hop);
            programs[rank as usize].extend(lane.map(|lane| (place, lane)));
        }
    }
    Schedule {
        collective: trees.collective,
        window: trees.pace.window,
        single_chunk: false,
        blocks,
        programs: in_turn(programs),
    }
}

/// A rank on a path.
struct Stop {
    before: Option<Rank>,
    /// The one before has the chunk in its input.
    is_second: bool,
    after: Option<Rank>,
}

impl Stop {
    /// What it does: as the ranks of a chain in a broadcast do, but that what is on its way lies in
    /// scratch memory.
    fn lane(&self, mut lane: Program<'_>, is_last_hop: bool) -> Option<Lane> {
        let own = if self.after.is_some() { PASSING } else { Part::Output };
        let mut held = Part::Input;
        let mut read = None;
        if let Some(before) = self.before {
            match lane.access(before) {
                Access::Put => {
                    lane.signal(before, READY, &[]);
                    lane.wait(before, DATA);
                    held = if self.after.is_some() { PASSING } else { Part::SharedOutput };
                }
                Access::Mapped => {
                    lane.wait(before, DATA);
                    let part = if self.is_second { Part::SharedInput } else { PASSING };
                    let step = lane.reduce(vec![Place { rank: before, part }], vec![lane.own(own)]);
                    lane.signal(before, READY, &[step]);
                    (held, read) = (PASSING, Some(step));
                }
            }
        }
        let Some(after) = self.after else {
            if held == Part::SharedOutput {
                lane.copy(Part::SharedOutput, Part::Output);
            }
            return lane.finish();
        };
        match lane.access(after) {
            Access::Put => {
                lane.wait(after, READY);
                let part = if is_last_hop { Part::SharedOutput } else { PASSING };
                lane.put(held, Target { rank: after, part, signal_slot: DATA });
            }
            Access::Mapped => {
                let shown = if self.before.is_some() {
                    read
                } else {
                    Some(lane.copy(Part::Input, Part::SharedInput))
                };
                lane.signal(after, DATA, shown.as_slice());
                lane.wait(after, READY);
            }
        }
        lane.finish()
    }
}

//! Around a ring, in as many blocks as ranks.
//!
//! Block `b` starts at rank `b + 1`, gathers one contribution after the other, and is complete at rank `b`, its owner
//! (reduce-scatter); the owner sends it around once more (all-gather). All blocks travel at the same time, so every
//! link carries the same.
//!
//! Cost for `p` ranks and `n` bytes (all-reduce; the whole for the others), for every rank:
//!
//! | collective | messages with data | bytes sent | bytes reduced |
//! |--|--|--|--|
//! | all-reduce | 2(p-1) | 2(p-1)/p·n | (p-1)/p·n |
//! | reduce-scatter | p-1 | (p-1)/p·n | (p-1)/p·n |
//! | all-gather | p-1 | (p-1)/p·n | 0 |
//!
//! In an all-reduce nothing but data is sent: that the result of a chunk came back says that everybody has done with
//! it. The other two need one `ready` for each block from its receiver.

use crate::collective::Collective;
use crate::schedule::{Cell, Lane, Part, Place, Schedule};

use super::program::{Program, Target};
use super::{Access, block_for_each_rank};

const PARTIAL: Cell = Cell(0);
const RESULT: Cell = Cell(1);
const READY: Cell = Cell(2);
const SLOT: Part = Part::Scratch(0);
const WINDOW: u32 = 2;

pub(super) fn schedule(collective: Collective, ranks: u32, access: Access) -> Schedule {
    let program = |rank: u32| -> Vec<Lane> {
        // In the order in which the blocks come by: first the one that starts here, last the own one.
        let blocks = (1..=ranks).map(|hop| (rank + ranks - hop) % ranks);
        blocks.filter_map(|block| lane(collective, ranks, access, rank, block)).collect()
    };
    let blocks = block_for_each_rank(collective, ranks);
    Schedule { collective, window: WINDOW, blocks, programs: (0..ranks).map(program).collect() }
}

fn lane(collective: Collective, ranks: u32, access: Access, rank: u32, block: u32) -> Option<Lane> {
    let mut lane = Program::new(access, rank, block);
    let ring = Ring {
        access,
        previous: (rank + ranks - 1) % ranks,
        next: (rank + 1) % ranks,
        owns: rank == block,
        hop: (rank + ranks - block - 1) % ranks,
        last_hop: ranks - 1,
    };
    match collective {
        Collective::AllReduce => {
            ring.gather_contributions(&mut lane, false);
            ring.pass_result_on(&mut lane, false);
        }
        Collective::ReduceScatter => ring.gather_contributions(&mut lane, true),
        _ => {
            if ring.owns {
                lane.wait(ring.next, READY);
                lane.deliver(&[Part::Input], &[Part::Output], Part::SharedOutput, &[ring.result_for_next()]);
            } else {
                lane.notify(ring.previous, READY, &[]);
                ring.pass_result_on(&mut lane, true);
            }
        }
    }
    lane.finish()
}

/// Where a rank stands in the ring of one block.
struct Ring {
    access: Access,
    previous: u32,
    next: u32,
    owns: bool,
    /// How many contributions come before this rank's.
    hop: u32,
    last_hop: u32,
}

impl Ring {
    fn result_for_next(&self) -> Target {
        Target { rank: self.next, part: Part::SharedOutput, cell: RESULT }
    }

    /// Adds this rank's contribution; the owner keeps the result, and passes it on unless it is `final_stop`. Then
    /// slots are free only when their owner says so.
    fn gather_contributions(&self, lane: &mut Program, final_stop: bool) {
        // Mapped, the first contribution is read where it is.
        let reads_in_place = self.access == Access::Mapped && self.hop == 1;
        let is_read_in_place = self.access == Access::Mapped && self.hop == 0;
        if is_read_in_place {
            let step = lane.copy(Part::Input, Part::SharedInput);
            lane.notify(self.next, PARTIAL, &[step]);
            if final_stop {
                lane.wait(self.next, READY);
            }
            return;
        }
        if final_stop && self.hop > 0 && !reads_in_place {
            lane.notify(self.previous, READY, &[]);
        }
        if self.hop > 0 {
            lane.wait(self.previous, PARTIAL);
        }
        let from = match self.hop {
            0 => vec![lane.own(Part::Input)],
            1 if reads_in_place => {
                vec![Place { rank: self.previous, part: Part::SharedInput }, lane.own(Part::Input)]
            }
            _ => vec![lane.own(SLOT), lane.own(Part::Input)],
        };
        let first_reduce = if self.hop == self.last_hop {
            let targets = [self.result_for_next()];
            let (staging, targets) = (Part::SharedOutput, if final_stop { &[][..] } else { &targets[..] });
            lane.deliver_places(from, &[Part::Output], staging, targets)
        } else {
            if final_stop {
                lane.wait(self.next, READY);
            }
            lane.deliver_places(from, &[], SLOT, &[Target { rank: self.next, part: SLOT, cell: PARTIAL }])
        };
        if final_stop && reads_in_place {
            lane.notify(self.previous, READY, &[first_reduce]);
        }
    }

    /// Takes the result and sends it on, up to the rank before the owner.
    fn pass_result_on(&self, lane: &mut Program, asks: bool) {
        if self.owns {
            return;
        }
        lane.wait(self.previous, RESULT);
        let goes_on = self.hop + 1 < self.last_hop;
        if goes_on && asks {
            lane.wait(self.next, READY);
        }
        let target = [self.result_for_next()];
        let targets = if goes_on { &target[..] } else { &[] };
        if targets.is_empty() {
            lane.copy(Part::SharedOutput, Part::Output);
        } else {
            lane.deliver(&[Part::SharedOutput], &[Part::Output], Part::SharedOutput, targets);
        }
    }
}

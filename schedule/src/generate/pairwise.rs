//! Every part straight from the rank that gives it to the one that gets it: gather, scatter,
//! all-to-all, send-recv.
//!
//! A block for each part. By puts, who gets it says that it is ready, and is put to; mapped, who
//! gives it says that it may be read, and it is read in place. Of its peers a rank turns to the one
//! at distance 1 first, then to the one at distance 2, giving upwards and taking from below, so
//! that in a round everybody is addressed by one other. Its own part comes last.
//!
//! Cost for `p` ranks and `n` bytes of one rank's whole (all-to-all: what it gives; gather,
//! scatter: what the root has):
//!
//! | collective | rounds | messages with data | bytes sent or received, at most |
//! |--|--|--|--|
//! | gather, scatter | 2 | p-1 at the root | (p-1)/p·n at the root |
//! | all-to-all | 2 | p-1 | (p-1)/p·n |
//! | send-recv | 2 | 1 | n |
//!
//! There is no form along a tree: blocks move one by one, so a tree would bring as many messages to
//! the root as come straight, and each later. That only the two ends touch a part is also what lets
//! its length be known to them alone.

use pleach_vocabulary::{Collective, Rank};

use super::{Access, block_for_each_part, ordered_lanes};
use super::{Program, Target};
use crate::{BlockId, Lane, Part, Place, Schedule, SignalSlot};

/// The part has come, or may be read.
const DATA: SignalSlot = SignalSlot(1);
/// The part may come, or has been read.
const READY: SignalSlot = SignalSlot(2);

const WINDOW: u32 = 2;

pub(super) fn schedule(collective: Collective, ranks: u32, access: Access) -> Schedule {
    let parts = collective.parts(ranks);
    let mut programs: Vec<Vec<(u32, Lane)>> = (0..ranks).map(|_| Vec::new()).collect();
    for part in 0..parts {
        let Some((from, to)) = collective.ends(part, ranks) else {
            unreachable!("of these each part has ends")
        };
        let distance = (to + ranks - from) % ranks;
        if distance == 0 {
            let mut lane = Program::new(access, from, part);
            lane.copy(Part::Input, Part::Output);
            programs[from as usize].extend(lane.finish().map(|lane| (ranks, lane)));
        } else {
            programs[from as usize].extend(give(access, from, to, part).map(|lane| (distance, lane)));
            programs[to as usize].extend(take(access, from, to, part).map(|lane| (distance, lane)));
        }
    }
    Schedule {
        collective,
        window: WINDOW,
        single_chunk: false,
        blocks: block_for_each_part(collective, ranks),
        programs: ordered_lanes(programs),
    }
}

fn give(access: Access, from: Rank, to: Rank, block: BlockId) -> Option<Lane> {
    let mut lane = Program::new(access, from, block);
    match access {
        Access::Put => {
            lane.wait(to, READY);
            lane.put(Part::Input, Target { rank: to, part: Part::SharedOutput, signal_slot: DATA });
        }
        Access::Mapped => {
            let shared = lane.copy(Part::Input, Part::SharedInput);
            lane.signal(to, DATA, &[shared]);
            lane.wait(to, READY);
        }
    }
    lane.finish()
}

fn take(access: Access, from: Rank, to: Rank, block: BlockId) -> Option<Lane> {
    let mut lane = Program::new(access, to, block);
    match access {
        Access::Put => {
            lane.signal(from, READY, &[]);
            lane.wait(from, DATA);
            lane.copy(Part::SharedOutput, Part::Output);
        }
        Access::Mapped => {
            lane.wait(from, DATA);
            let source = Place { rank: from, part: Part::SharedInput };
            let read = lane.reduce(vec![source], vec![lane.own(Part::Output)]);
            lane.signal(from, READY, &[read]);
        }
    }
    lane.finish()
}

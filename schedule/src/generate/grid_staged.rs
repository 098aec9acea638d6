//! Along the lines of a grid, one dimension at a time: in each a whole all-reduce among the ranks
//! of a line (BIDMach).
//!
//! Within a line it is a direct all-reduce: of each block one rank of the line, the one whose
//! coordinate is the block's, combines the line's results so far, in the order of the coordinate
//! from its own on, and gives the sum to the line. Everything is numbered relative to that rank, so
//! that all blocks are renamings of one another and are proved once.
//!
//! Cost for extents `a × b × …` and `n` bytes, for every rank, summed over the dimensions of extent
//! `e`; the vector is cut in as many blocks as ranks, so that each dimension can share it out
//! evenly:
//!
//! | rounds | messages with data | bytes sent | bytes reduced |
//! |--|--|--|--|
//! | Σ 2 | Σ 2(e-1)/e·p | Σ 2(e-1)/e·n | Σ (e-1)/e·n |
//!
//! For √p × √p that is 4(√p-1)/√p·n: about twice what [`grid`](super::grid) sends.

use pleach_vocabulary::{Collective, Rank};

use super::{Access, Cover, block_for_each_rank};
use super::{Program, Target};
use crate::rank_space::RankSpace;
use crate::{BlockId, Lane, Part, Place, Schedule, SignalSlot};

/// Between two ranks of a line data go one way in each block, or the other.
const DATA: SignalSlot = SignalSlot(0);
const WINDOW: u32 = 2;

pub(super) fn schedule(space: &RankSpace, access: Access, cover: Cover) -> Schedule {
    let ranks = space.size();
    let program = |rank: Rank| -> Vec<Lane> {
        let turns: Box<dyn Iterator<Item = BlockId>> = match cover {
            Cover::All => Box::new((1..=ranks).map(move |turn| (rank + turn) % ranks)),
            Cover::First => Box::new(std::iter::once(0)),
        };
        turns.filter_map(|block| lane(space, access, rank, block)).collect()
    };
    Schedule {
        collective: Collective::AllReduce,
        window: WINDOW,
        single_chunk: false,
        blocks: block_for_each_rank(Collective::AllReduce, ranks),
        programs: (0..ranks).map(program).collect(),
    }
}

fn lane(space: &RankSpace, access: Access, rank: Rank, block: BlockId) -> Option<Lane> {
    let mut lane = Program::new(access, rank, block);
    let dimensions: Vec<usize> =
        (0..space.extents().len()).rev().filter(|&d| space.extents()[d] > 1).collect();
    // What this rank has so far: first its input, then each line's sum, which others may read and
    // write.
    let mut first_slot = 0;
    for (stage, &dimension) in dimensions.iter().enumerate() {
        let line = Line { space, access, rank, dimension, first_slot, first: stage == 0 };
        let owner = space.moved(rank, dimension, space.coordinate(block, dimension));
        let last = stage + 1 == dimensions.len();
        if rank == owner {
            line.combine(&mut lane, last);
        } else {
            line.contribute(&mut lane, owner, last);
        }
        first_slot += space.extents()[dimension] as u16;
    }
    lane.finish()
}

/// A rank in its line.
struct Line<'a> {
    space: &'a RankSpace,
    access: Access,
    rank: Rank,
    dimension: usize,
    /// The line's first slot at the owner of a block.
    first_slot: u16,
    /// Nothing has been combined yet.
    first: bool,
}

impl Line<'_> {
    /// Where the owner of a block finds what a rank of its line gives.
    fn slot(&self, owner: Rank, rank: Rank) -> Part {
        let extent = self.space.extents()[self.dimension];
        let coordinate = |rank| self.space.coordinate(rank, self.dimension);
        Part::Scratch(self.first_slot + ((coordinate(rank) + extent - coordinate(owner)) % extent) as u16)
    }

    fn contribute(&self, lane: &mut Program, owner: Rank, last: bool) {
        match (self.access, self.first) {
            (Access::Put, true) => {
                lane.put(
                    Part::Input,
                    Target { rank: owner, part: self.slot(owner, self.rank), signal_slot: DATA },
                );
            }
            (Access::Put, false) => {
                // This leads to the next sum being written here, so the last one must have left.
                let leaving = lane.readers(Part::SharedOutput);
                let target = Target { rank: owner, part: self.slot(owner, self.rank), signal_slot: DATA };
                let step = lane.put(Part::SharedOutput, target);
                for reader in leaving {
                    lane.after_earlier(step, reader, 0);
                }
            }
            (Access::Mapped, true) => {
                let step = lane.copy(Part::Input, Part::SharedInput);
                lane.signal(owner, DATA, &[step]);
            }
            // The line before put it where it can be read.
            (Access::Mapped, false) => {
                let written = lane.last_write(Part::SharedOutput);
                lane.signal(owner, DATA, written.as_slice());
            }
        }
        lane.wait(owner, DATA);
        if last {
            lane.copy(Part::SharedOutput, Part::Output);
        }
    }

    fn combine(&self, lane: &mut Program, last: bool) {
        let members: Vec<Rank> = self.space.line(self.rank, self.dimension).collect();
        let own = members.iter().position(|&rank| rank == self.rank).unwrap_or(0);
        let peers: Vec<Rank> = members[own + 1..].iter().chain(&members[..own]).copied().collect();
        for &peer in &peers {
            lane.wait(peer, DATA);
        }
        let from = std::iter::once(&self.rank).chain(&peers).map(|&rank| {
            let part = match (self.access, self.first) {
                (_, true) if rank == self.rank => Part::Input,
                (_, false) if rank == self.rank => Part::SharedOutput,
                (Access::Put, _) => return lane.own(self.slot(self.rank, rank)),
                (Access::Mapped, true) => Part::SharedInput,
                (Access::Mapped, false) => Part::SharedOutput,
            };
            Place { rank, part }
        });
        let from = from.collect();
        let keep = if last { Part::Output } else { Part::SharedOutput };
        let target = |&rank| Target { rank, part: Part::SharedOutput, signal_slot: DATA };
        let targets: Vec<Target> = peers.iter().map(target).collect();
        lane.deliver_places(from, &[keep], Part::SharedOutput, &targets);
    }
}

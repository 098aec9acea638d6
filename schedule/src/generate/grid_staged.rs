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
//!
//! # Holes
//!
//! The ranks of a grid with holes are `l` full layers along the first dimension, and further ranks
//! in one layer more. A sum along the further layer would be missing on the lines that have a hole
//! there. So the full layers alone are the grid of the table above, and the vector is cut in as
//! many blocks as they have ranks. In each block, each further rank has a *proxy*: of the ranks on
//! its line along the first dimension, the one in the layer of the block. The proxy adds the
//! contribution of the rank that it represents to its own, before the first sum, and gives it the
//! result in the end.
//!
//! **Each contribution enters once.** A proxy contributes to the full grid for itself and for the
//! rank that it represents, which is one at most, and which has one proxy in each block. A further
//! rank gets a copy of the result, so it has the same bits.
//!
//! A further rank sends and receives `n` bytes, shared out evenly among its `l` proxies. A proxy
//! sends and combines `n/l` bytes more than the table says for the full layers: `2(l-1)/l·n + n/l`
//! bytes along the first dimension. In a grid of `l + 1` full layers that are `2l/(l+1)·n`, so what
//! the holes add is `(l-1)/(l(l+1))·n`, a sixth of `n` at most. There are no more rounds than the
//! table says: proxies give the last sums, so theirs are one round ahead. Only where `l` is 1 there
//! are two rounds more. No rank has more peers than in the grid of `l + 1` full layers.
//!
//! A grid with holes is no [`Family`](crate::Family): it is made and proved whole.

use pleach_vocabulary::{Collective, Rank};

use super::{Access, Cover, block_for_each_rank};
use super::{Program, Target};
use crate::rank_space::RankSpace;
use crate::{BlockId, Lane, Part, Place, Schedule, SignalSlot};

/// Between two ranks of a line data go one way in each block, or the other.
const DATA: SignalSlot = SignalSlot(0);
const WINDOW: u32 = 2;

pub(super) fn schedule(space: &RankSpace, access: Access, cover: Cover) -> Schedule {
    let grid = Grid::new(space, access);
    let blocks = grid.full.ranks();
    let program = |rank: Rank| -> Vec<Lane> {
        let turns: Box<dyn Iterator<Item = BlockId>> = match cover {
            Cover::All => Box::new((1..=blocks).map(move |turn| (rank + turn) % blocks)),
            Cover::First => Box::new(std::iter::once(0)),
        };
        turns.filter_map(|block| grid.lane(rank, block)).collect()
    };
    Schedule {
        collective: Collective::AllReduce,
        window: WINDOW,
        single_chunk: false,
        blocks: block_for_each_rank(Collective::AllReduce, blocks),
        programs: (0..space.ranks()).map(program).collect(),
    }
}

/// A grid of full layers, with the ranks that its ranks represent.
struct Grid<'a> {
    space: &'a RankSpace,
    access: Access,
    /// The layers without holes, whose ranks are the first ones.
    full: RankSpace,
    /// The dimension along which there are layers.
    layered: usize,
    /// Where the contribution of a represented rank is put.
    given: Part,
    /// Where a proxy has its own contribution and the one of the rank that it represents, combined.
    combined: Part,
}

impl<'a> Grid<'a> {
    fn new(space: &'a RankSpace, access: Access) -> Self {
        let (full, layered) = space.full_layers();
        // Behind the slots of the lines.
        let slots = full.extents().iter().filter(|&&extent| extent > 1).sum::<u32>() as u16;
        let (given, combined) = (Part::Scratch(slots), Part::Scratch(slots + 1));
        Self { space, access, full, layered, given, combined }
    }

    /// The rank behind the full layers that a rank represents in a block.
    fn represented(&self, proxy: Rank, block: BlockId) -> Option<Rank> {
        let is_proxy = self.full.coordinate(proxy, self.layered) == self.full.coordinate(block, self.layered);
        is_proxy.then(|| self.space.moved(proxy, self.layered, self.full.extents()[self.layered]))?
    }

    /// The proxy of a rank behind the full layers in a block.
    fn proxy(&self, represented: Rank, block: BlockId) -> Option<Rank> {
        self.space.moved(represented, self.layered, self.full.coordinate(block, self.layered))
    }

    /// What a rank has in a block.
    fn lane(&self, rank: Rank, block: BlockId) -> Option<Lane> {
        let mut lane = Program::new(self.access, rank, block);
        if rank >= self.full.ranks() {
            self.give_to_proxy(&mut lane, self.proxy(rank, block)?);
            return lane.finish();
        }
        let extents = self.full.extents();
        let dimensions: Vec<usize> = (0..extents.len()).rev().filter(|&d| extents[d] > 1).collect();
        // What this rank has so far: first its input, then each line's sum, which others may read
        // and write.
        let mut first_slot = 0;
        for (stage, &dimension) in dimensions.iter().enumerate() {
            let (first, last) = (stage == 0, stage + 1 == dimensions.len());
            let line = Line { grid: self, rank, block, dimension, first_slot, first, last };
            let coordinate = self.full.coordinate(block, dimension);
            let owner = self.full.moved(rank, dimension, coordinate)?;
            if rank == owner {
                line.combine(&mut lane);
            } else {
                line.contribute(&mut lane, owner);
            }
            first_slot += extents[dimension] as u16;
        }
        lane.finish()
    }

    /// What a represented rank does.
    fn give_to_proxy(&self, lane: &mut Program, proxy: Rank) {
        match self.access {
            Access::Put => {
                lane.put(Part::Input, Target { rank: proxy, part: self.given, signal_slot: DATA });
            }
            Access::Mapped => {
                let step = lane.copy(Part::Input, Part::SharedInput);
                lane.signal(proxy, DATA, &[step]);
            }
        }
        lane.wait(proxy, DATA);
        lane.copy(Part::SharedOutput, Part::Output);
    }
}

/// A rank in its line.
struct Line<'a> {
    grid: &'a Grid<'a>,
    rank: Rank,
    block: BlockId,
    dimension: usize,
    /// The line's first slot at the owner of a block.
    first_slot: u16,
    /// Nothing has been combined yet.
    first: bool,
    /// The sum is the result.
    last: bool,
}

impl Line<'_> {
    /// Where the owner of a block finds what a rank of its line gives.
    fn slot(&self, owner: Rank, rank: Rank) -> Part {
        let extent = self.grid.full.extents()[self.dimension];
        let coordinate = |rank| self.grid.full.coordinate(rank, self.dimension);
        Part::Scratch(self.first_slot + ((coordinate(rank) + extent - coordinate(owner)) % extent) as u16)
    }

    /// The rank that this one represents.
    fn represented(&self) -> Option<Rank> {
        self.grid.represented(self.rank, self.block)
    }

    /// Where the result of the represented rank goes.
    fn represented_target(&self) -> Option<Target> {
        let rank = self.represented().filter(|_| self.last)?;
        Some(Target { rank, part: Part::SharedOutput, signal_slot: DATA })
    }

    /// This rank's input, and that of the rank that it represents once it is there.
    fn inputs(&self, lane: &mut Program) -> Vec<Place> {
        let mut inputs = vec![lane.own(Part::Input)];
        if let Some(rank) = self.represented() {
            lane.wait(rank, DATA);
            inputs.push(match self.grid.access {
                Access::Put => lane.own(self.grid.given),
                Access::Mapped => Place { rank, part: Part::SharedInput },
            });
        }
        inputs
    }

    fn contribute(&self, lane: &mut Program, owner: Rank) {
        let target = Target { rank: owner, part: self.slot(owner, self.rank), signal_slot: DATA };
        let is_proxy = self.represented().is_some();
        match (self.grid.access, self.first) {
            (access, true) if is_proxy => {
                let (inputs, combined) = (self.inputs(lane), self.grid.combined);
                let step = lane.reduce(inputs, vec![lane.own(combined)]);
                match access {
                    Access::Put => lane.put(combined, target),
                    Access::Mapped => lane.signal(owner, DATA, &[step]),
                };
            }
            (Access::Put, true) => {
                lane.put(Part::Input, target);
            }
            (Access::Put, false) => {
                // This leads to the next sum being written here, so the last one must have left.
                let leaving = lane.readers(Part::SharedOutput);
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
        if self.last {
            let targets = self.represented_target();
            lane.deliver(&[Part::SharedOutput], &[Part::Output], Part::SharedOutput, targets.as_slice());
        }
    }

    fn combine(&self, lane: &mut Program) {
        let members: Vec<Rank> = self.grid.full.line(self.rank, self.dimension).collect();
        let own = members.iter().position(|&rank| rank == self.rank).unwrap_or(0);
        let peers: Vec<Rank> = members[own + 1..].iter().chain(&members[..own]).copied().collect();
        let mut from = if self.first { self.inputs(lane) } else { vec![lane.own(Part::SharedOutput)] };
        for &peer in &peers {
            lane.wait(peer, DATA);
        }
        from.extend(peers.iter().map(|&rank| {
            let part = match (self.grid.access, self.first) {
                (Access::Put, _) => return lane.own(self.slot(self.rank, rank)),
                (Access::Mapped, true) if self.grid.represented(rank, self.block).is_some() => {
                    self.grid.combined
                }
                (Access::Mapped, true) => Part::SharedInput,
                (Access::Mapped, false) => Part::SharedOutput,
            };
            Place { rank, part }
        }));
        let keep = if self.last { Part::Output } else { Part::SharedOutput };
        let target = |&rank| Target { rank, part: Part::SharedOutput, signal_slot: DATA };
        let targets: Vec<Target> = peers.iter().map(target).chain(self.represented_target()).collect();
        lane.deliver_places(from, &[keep], Part::SharedOutput, &targets);
    }
}

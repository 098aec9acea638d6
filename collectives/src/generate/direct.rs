//! Every rank with every other, in one hop.
//!
//! All-reduce and reduce-scatter: rank `r` owns block `r` and combines all contributions to it in one pass, in rank
//! order; all-gather: it gives block `r` to everybody. Every rank begins with another peer, so that nobody is
//! addressed by all at once. Rooted collectives move everything between the root and each of the others.
//!
//! Cost for `p` ranks and `n` bytes (of the whole). By puts, every rank:
//!
//! | collective | messages with data | bytes sent | bytes reduced |
//! |--|--|--|--|
//! | all-reduce | 2(p-1) | 2(p-1)/p·n | (p-1)/p·n |
//! | reduce-scatter | p-1 | (p-1)/p·n | (p-1)/p·n |
//! | all-gather | p-1 | (p-1)/p·n | 0 |
//! | broadcast | p-1 at the root | (p-1)·n at the root | 0 |
//! | reduce | 1 at all but the root | n | (p-1)·n at the root |
//!
//! All take one round but for all-reduce, which takes two. Mapped, the passes are the same and nothing else moves: the
//! owner of a block reads what the others share of it and, in an all-reduce, writes the result to all of them;
//! all-gather and broadcast are read by those who want them, all at once.

use crate::collective::Collective;
use crate::schedule::{Cell, Lane, Part, Place, Schedule};

use super::program::{Program, Target};
use super::{Access, block_for_each_rank, one_block};

/// Tells that data have come, or may be read.
const DATA: Cell = Cell(0);
/// Tells that data may come, or have been read.
const READY: Cell = Cell(1);
const WINDOW: u32 = 2;

pub(super) fn schedule(collective: Collective, ranks: u32, access: Access) -> Schedule {
    let split =
        matches!(collective, Collective::AllReduce | Collective::AllGather | Collective::ReduceScatter);
    let blocks = if split { block_for_each_rank(collective, ranks) } else { one_block() };
    let program = |rank: u32| -> Vec<Lane> {
        let lane = |block| Direct { collective, ranks, access, rank, block }.lane();
        if split {
            // Others wait for what this rank gives, so its own block comes last.
            (1..=ranks).map(|turn| (rank + turn) % ranks).filter_map(lane).collect()
        } else {
            lane(0).into_iter().collect()
        }
    };
    Schedule { collective, window: WINDOW, programs: (0..ranks).map(program).collect(), blocks }
}

/// One lane.
struct Direct {
    collective: Collective,
    ranks: u32,
    access: Access,
    rank: u32,
    block: u32,
}

impl Direct {
    fn lane(&self) -> Option<Lane> {
        let mut lane = Program::new(self.access, self.rank, self.block);
        match (self.collective, self.access) {
            (Collective::AllReduce, Access::Put) => self.all_reduce_by_puts(&mut lane),
            (Collective::AllReduce, Access::Mapped) => self.reduce_mapped(&mut lane, self.block, true),
            (Collective::ReduceScatter, Access::Put) => self.reduce_by_puts(&mut lane, self.block),
            (Collective::ReduceScatter, Access::Mapped) => self.reduce_mapped(&mut lane, self.block, false),
            (Collective::Reduce { root }, Access::Put) => self.reduce_by_puts(&mut lane, root),
            (Collective::Reduce { root }, Access::Mapped) => self.reduce_mapped(&mut lane, root, false),
            (Collective::AllGather, _) => self.spread(&mut lane, self.block),
            (Collective::Broadcast { root }, _) => self.spread(&mut lane, root),
            (Collective::SendRecv { from, to }, _) if self.rank == from => self.give(&mut lane, &[to]),
            (Collective::SendRecv { from, to }, _) if self.rank == to => self.take(&mut lane, from),
            (Collective::SendRecv { .. } | Collective::Barrier, _) => {}
        }
        lane.finish()
    }

    /// All other ranks, this one's successor first.
    fn peers(&self) -> Vec<u32> {
        (1..self.ranks).map(|turn| (self.rank + turn) % self.ranks).collect()
    }

    /// The slot of the owner's scratch where a peer's contribution goes.
    fn slot(owner: u32, peer: u32) -> Part {
        Part::Scratch((if peer < owner { peer } else { peer - 1 }) as u16)
    }

    /// Where the owner finds everybody's contribution, in rank order.
    fn contributions(&self) -> Vec<Place> {
        let place = |peer: u32| match self.access {
            _ if peer == self.rank => Place { rank: peer, part: Part::Input },
            Access::Put => Place { rank: self.rank, part: Self::slot(self.rank, peer) },
            Access::Mapped => Place { rank: peer, part: Part::SharedInput },
        };
        (0..self.ranks).map(place).collect()
    }

    /// That the result came says that the contribution was taken, so nothing else is asked for.
    fn all_reduce_by_puts(&self, lane: &mut Program) {
        let owner = self.block;
        if self.rank != owner {
            lane.put(Part::Input, Target { rank: owner, part: Self::slot(owner, self.rank), cell: DATA });
            lane.wait(owner, DATA);
            lane.copy(Part::SharedOutput, Part::Output);
            return;
        }
        let peers = self.peers();
        for &peer in &peers {
            lane.wait(peer, DATA);
        }
        let targets: Vec<Target> =
            peers.iter().map(|&rank| Target { rank, part: Part::SharedOutput, cell: DATA }).collect();
        lane.deliver_places(self.contributions(), &[Part::Output], Part::SharedOutput, &targets);
    }

    /// A slot is free once its owner has said so.
    fn reduce_by_puts(&self, lane: &mut Program, owner: u32) {
        if self.rank != owner {
            lane.wait(owner, READY);
            lane.put(Part::Input, Target { rank: owner, part: Self::slot(owner, self.rank), cell: DATA });
            return;
        }
        let peers = self.peers();
        for &peer in &peers {
            lane.notify(peer, READY, &[]);
        }
        for &peer in &peers {
            lane.wait(peer, DATA);
        }
        lane.reduce(self.contributions(), vec![lane.own(Part::Output)]);
    }

    fn reduce_mapped(&self, lane: &mut Program, owner: u32, to_all: bool) {
        if self.rank != owner {
            let step = lane.copy(Part::Input, Part::SharedInput);
            lane.notify(owner, DATA, &[step]);
            lane.wait(owner, READY);
            if to_all {
                lane.copy(Part::SharedOutput, Part::Output);
            }
            return;
        }
        let peers = self.peers();
        for &peer in &peers {
            lane.wait(peer, DATA);
        }
        let mut into = vec![lane.own(Part::Output)];
        if to_all {
            into.extend(peers.iter().map(|&rank| Place { rank, part: Part::SharedOutput }));
        }
        let step = lane.reduce(self.contributions(), into);
        for &peer in &peers {
            lane.notify(peer, READY, &[step]);
        }
    }

    /// From the source to everybody else.
    fn spread(&self, lane: &mut Program, source: u32) {
        if self.rank == source {
            self.give(lane, &self.peers());
            lane.copy(Part::Input, Part::Output);
        } else {
            self.take(lane, source);
        }
    }

    fn give(&self, lane: &mut Program, peers: &[u32]) {
        match self.access {
            Access::Put => {
                for &rank in peers {
                    lane.wait(rank, READY);
                    lane.put(Part::Input, Target { rank, part: Part::SharedOutput, cell: DATA });
                }
            }
            Access::Mapped => {
                let step = lane.copy(Part::Input, Part::SharedInput);
                for &rank in peers {
                    lane.notify(rank, DATA, &[step]);
                }
                for &rank in peers {
                    lane.wait(rank, READY);
                }
            }
        }
    }

    fn take(&self, lane: &mut Program, from: u32) {
        match self.access {
            Access::Put => {
                lane.notify(from, READY, &[]);
                lane.wait(from, DATA);
                lane.copy(Part::SharedOutput, Part::Output);
            }
            Access::Mapped => {
                lane.wait(from, DATA);
                let step = lane.reduce(
                    vec![Place { rank: from, part: Part::SharedInput }],
                    vec![lane.own(Part::Output)],
                );
                lane.notify(from, READY, &[step]);
            }
        }
    }
}

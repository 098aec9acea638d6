//! Exchanges of halves, quarters, … (reduce-scatter by halving), and back (all-gather by doubling):
//! Rabenseifner's.
//!
//! Let `q` be the highest power of two that is not above `p`. `q` ranks take part; each of the
//! `p - q` others, which are the even ones of the first 2(p - q), gives its data to its successor
//! first and has the result from it in the end. Each block's way is a binomial tree: in the step at
//! distance `d` (q/2, …, 2, 1) a rank sends those of its blocks whose owner differs from it in bit
//! `d`, and takes the others.
//!
//! Cost for `q` participants and `n` bytes of the whole (in `q` blocks for an all-reduce), for
//! every participant that is no proxy; blocks move one by one, so a step at distance `d`
//! is `d` messages:
//!
//! | collective | rounds | messages with data | bytes sent | bytes reduced |
//! |--|--|--|--|--|
//! | all-reduce | 2 log2 q | 2(q-1) | 2(q-1)/q·n | (q-1)/q·n |
//! | reduce-scatter | log2 q | q-1 | (q-1)/q·n | (q-1)/q·n |
//! | all-gather | log2 q | q-1 | (q-1)/q·n | 0 |
//!
//! When `p` is no power of two there is one more round each way: in an all-reduce the others send
//! `n` bytes, and their proxies send `n` bytes more and reduce `n` bytes more.

use pleach_vocabulary::{Collective, Rank};

use super::{Access, Cover, PowerOfTwoGroup, Tree, TreePair, TreeSchedule, block_for_each_rank};
use crate::{Block, Schedule};

const WINDOW: u32 = 2;

pub(super) fn schedule(collective: Collective, ranks: u32, access: Access, cover: Cover) -> Schedule {
    let group = PowerOfTwoGroup::new(ranks);
    let (blocks, all_reduce) = match collective {
        Collective::AllReduce => (vec![Block { part: 0, weight: 1 }; group.participants as usize], true),
        _ => (block_for_each_rank(collective, ranks), false),
    };
    let count = blocks.len() as u32;
    let owner = |block: u32| if all_reduce { group.rank(block) } else { block };
    let position = |rank: Rank| if all_reduce { group.number(group.proxy(rank)) } else { rank };
    TreeSchedule {
        collective,
        ranks,
        links: access.into(),
        window: WINDOW,
        blocks,
        shape: &|block| TreePair::both(group.tree(owner(block))),
        lane_order: &|rank, block| (block + count - position(rank) % count + count - 1) % count,
        cover,
    }
    .schedule()
}

impl PowerOfTwoGroup {
    /// The way of a block to its owner: the participants' binomial tree, with the others hanging on
    /// it.
    fn tree(&self, owner: Rank) -> Tree {
        let proxy = self.proxy(owner);
        let root = self.number(proxy);
        let above = (owner != proxy).then_some((proxy, owner));
        let others = (0..self.others()).map(|number| (2 * number, 2 * number + 1));
        let others = others.filter(move |&(other, _)| other != owner);
        // Those that are farther away have fewer below them, and contribute first.
        let participants = (1..self.participants).rev().map(move |distance| {
            let nearer = distance & !(1 << distance.ilog2());
            (self.rank(root ^ distance), self.rank(root ^ nearer))
        });
        Tree::new(self.ranks, others.chain(participants).chain(above))
    }
}

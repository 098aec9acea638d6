//! A ring, with as many blocks as ranks.
//!
//! Block `b` starts at rank `b + 1`, collects one contribution after the other, and is complete at
//! rank `b`, its owner (reduce-scatter). The owner sends it around once more (all-gather). All
//! blocks travel at the same time, so every link carries the same amount. An all-reduce of more
//! than two ranks has p-1 more signals: a rank tells the rank before it, which will write the
//! result, that it may write.
//!
//! Cost for `p` ranks and `n` bytes of the whole, for every rank:
//!
//! | collective | rounds | messages with data | bytes sent | bytes reduced |
//! |--|--|--|--|--|
//! | all-reduce | 2(p-1) | 2(p-1) | 2(p-1)/p·n | (p-1)/p·n |
//! | reduce-scatter | p-1 | p-1 | (p-1)/p·n | (p-1)/p·n |
//! | all-gather | p-1 | p-1 | (p-1)/p·n | 0 |

use pleach_vocabulary::Collective;

use super::{Access, Cover, Tree, TreePair, TreeSchedule, block_for_each_rank};
use crate::Schedule;

const WINDOW: u32 = 2;

pub(super) fn schedule(collective: Collective, ranks: u32, access: Access, cover: Cover) -> Schedule {
    TreeSchedule {
        collective,
        ranks,
        links: access.into(),
        window: WINDOW,
        blocks: block_for_each_rank(collective, ranks),
        shape: &|block| TreePair {
            up: Tree::chain_before(ranks, block),
            down: Some(Tree::chain_after(ranks, block)),
        },
        // In the order in which they come by: first the one that starts here.
        lane_order: &|rank, block| match collective {
            Collective::AllGather => (rank + ranks - block) % ranks,
            _ => (rank + ranks - block - 1) % ranks,
        },
        cover,
    }
    .schedule()
}

//! Every rank with every other, in one hop.
//!
//! All-reduce and reduce-scatter: rank `r` owns block `r` and combines all contributions to it in
//! one pass, in rank order; all-gather: it gives block `r` to everybody. Every rank begins with
//! another peer, so that nobody is addressed by all at once. Reduce and broadcast move everything
//! between the root and each of the others. Where every part has one rank that gives it and one
//! that gets it, see [`super::pairwise`].
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
//! All take one round but for all-reduce, which takes two. Mapped, the passes are the same and
//! nothing else moves: the owner of a block reads what the others share of it and, in an
//! all-reduce, writes the result to all of them; all-gather and broadcast are read by those who
//! want them, all at once.

use pleach_vocabulary::Collective;

use super::{Access, Cover, Tree, TreePair, TreeSchedule, block_for_each_rank, one_block, pairwise};
use crate::Schedule;

const WINDOW: u32 = 2;

pub(super) fn schedule(collective: Collective, ranks: u32, access: Access, cover: Cover) -> Schedule {
    let whole = |tree: &dyn Fn() -> Tree| {
        let shape = |_| TreePair::both(tree());
        let (window, blocks) = (WINDOW, one_block());
        let links = access.into();
        let lane_order = &|_, _| 0;
        TreeSchedule { collective, ranks, links, window, blocks, shape: &shape, lane_order, cover }.schedule()
    };
    match collective {
        Collective::Reduce { root } | Collective::Broadcast { root } => whole(&|| Tree::star(ranks, root)),
        _ if collective.ends(0, ranks).is_some() => pairwise::schedule(collective, ranks, access),
        _ => TreeSchedule {
            collective,
            ranks,
            links: access.into(),
            window: WINDOW,
            blocks: block_for_each_rank(collective, ranks),
            shape: &|block| TreePair::both(Tree::star(ranks, block)),
            // Others wait for what this rank gives them, so its own block comes last.
            lane_order: &|rank, block| (block + ranks - rank - 1) % ranks,
            cover,
        }
        .schedule(),
    }
}

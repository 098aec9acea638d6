//! A chain that begins at the root: broadcast downwards, reduce upwards.
//!
//! Every rank but the last (for reduce: but the root) sends everything once, so the bandwidth is
//! optimal once the pipeline is full.
//!
//! Cost for `p` ranks, `n` bytes and `k` chunks: p-2+k rounds, and for every rank at most k
//! messages, n bytes sent, and (reduce) n bytes reduced.

use pleach_vocabulary::Collective;

use super::{Access, Cover, Tree, TreePair, TreeSchedule, one_block};
use crate::Schedule;

const WINDOW: u32 = 2;

pub(super) fn schedule(collective: Collective, ranks: u32, access: Access) -> Schedule {
    let root = collective.root().unwrap_or(0);
    TreeSchedule {
        collective,
        ranks,
        links: access.into(),
        window: WINDOW,
        blocks: one_block(),
        shape: &|_| TreePair::both(Tree::chain_after(ranks, root)),
        lane_order: &|_, _| 0,
        cover: Cover::All,
    }
    .schedule()
}

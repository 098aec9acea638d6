//! Along a chain that begins at the root: broadcast down, reduce up.
//!
//! Every rank but the last sends everything once (a reduce: every rank but the root), so the
//! bandwidth is the best there is once the pipeline is full.
//!
//! Cost for `p` ranks, `n` bytes and `k` chunks: p-2+k rounds, for every rank at most k messages, n
//! bytes sent, and (reduce) n bytes reduced.

use pleach_vocabulary::Collective;

use super::tree::{Tree, TreePair, TreeSchedule};
use super::{Access, one_block};
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
    }
    .schedule()
}

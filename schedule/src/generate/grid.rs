//! Along the lines of a grid: reduce-scatter dimension after dimension, all-gather back.
//!
//! Ranks are the points of a [`RankSpace`], the last dimension that of neighbours (ranks of one
//! host, when they are numbered so): it comes first, with the most data, and last on the way back.
//! In each dimension a rank talks only to its line, directly. Each block goes to the rank it
//! belongs to by correcting one coordinate after the other.
//!
//! Cost for extents `a × b × …` with product `p`, and `n` bytes of the whole, for every rank;
//! blocks move one by one:
//!
//! | collective | rounds | messages with data | bytes sent | bytes reduced |
//! |--|--|--|--|--|
//! | all-reduce | 2 a dimension | 2(p-1) | 2(p-1)/p·n | (p-1)/p·n |
//! | reduce-scatter, all-gather | 1 a dimension | p-1 | (p-1)/p·n | (p-1)/p·n, 0 |
//!
//! to (a-1) + (b-1) + … peers, instead of p-1.

use pleach_vocabulary::Collective;

use super::{Access, Cover, Tree, TreePair, TreeSchedule, block_for_each_rank};
use crate::Schedule;
use crate::rank_space::RankSpace;

const WINDOW: u32 = 2;

pub(super) fn schedule(collective: Collective, space: &RankSpace, access: Access, cover: Cover) -> Schedule {
    let ranks = space.size();
    TreeSchedule {
        collective,
        ranks,
        links: access.into(),
        window: WINDOW,
        blocks: block_for_each_rank(collective, ranks),
        shape: &|block| TreePair::both(tree(space, block)),
        lane_order: &|rank, block| (block + ranks - rank - 1) % ranks,
        cover,
    }
    .schedule()
}

/// The way to a rank: everybody corrects the last coordinate that differs.
fn tree(space: &RankSpace, root: u32) -> Tree {
    let ranks = space.size();
    let dimensions = space.extents().len();
    // Those that have only one coordinate to correct wait for those that have more, which therefore
    // come first. Else the order is that of the displacement from the root, so all trees are
    // translations of one another.
    let mut edges: Vec<(usize, u32, u32)> = Vec::with_capacity(ranks as usize - 1);
    for displacement in 1..ranks {
        let rank = space.translated(root, displacement);
        let differs =
            |&dimension: &usize| space.coordinate(rank, dimension) != space.coordinate(root, dimension);
        if let Some(dimension) = (0..dimensions).rev().find(differs) {
            let parent = space.moved(rank, dimension, space.coordinate(root, dimension));
            edges.push((dimensions - dimension, rank, parent));
        }
    }
    edges.sort_by_key(|&(order, ..)| order);
    Tree::new(ranks, edges.into_iter().map(|(_, rank, parent)| (rank, parent)))
}

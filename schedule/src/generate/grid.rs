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
//!
//! # Holes
//!
//! `p` ranks on the first of `P` places are as many blocks. Where the next coordinate to correct
//! leads to a hole, a rank corrects the coordinate before that one. There always is a coordinate
//! that leads to a rank. Let `k` be the first one that differs, from `x` at the rank to `y` at the
//! owner. If `y < x`, correcting it leads to a place before the rank, which is no hole. If `x < y`,
//! correcting any later one leads to a place before the owner; and if there is no later one,
//! correcting `k` leads to the owner.
//!
//! **Each contribution enters once.** Each correction leads nearer to the owner, so the steps of
//! all ranks are a tree of the block, and in a tree each rank gives its parent, once, what it has
//! and what it was given. Its depth and the peers of a rank are not more than in the full grid.
//!
//! **Bytes.** The ranks together send what those of any algorithm must: in an all-reduce
//! `2(p-1)·n`. In each block a rank sends at most one message up, and down as many as it has
//! children. With `h = P - p` holes, a rank has in all blocks at most `P-1 + h·g` children, where
//! `g` is the largest product of all extents but the last and one more; 1 in two dimensions. For
//! `P-1` is the number in the full grid. Each of the others is a place and a block for which the
//! next correction leads to a hole. The hole differs from the parent in two coordinates, so it
//! names the child. The block agrees with the hole or the parent in the earlier of the two
//! coordinates and from the later one on, which leaves at most the product of the other extents
//! before the later one. So a rank sends at most
//!
//! | collective | bytes sent | in two dimensions |
//! |--|--|--|
//! | all-reduce | (p-1 + P-1 + h·g)/p·n | 2(P-1)/p·n |
//! | reduce-scatter | (p-1)/p·n | (p-1)/p·n |
//! | all-gather | (P-1 + h·g)/p·n | (P-1 + h)/p·n |
//!
//! In two dimensions that is as many blocks as in the full grid, of `n/p` bytes instead of `n/P`.
//! A grid with holes is no [`Family`](crate::Family): no translation takes it to itself. It is made
//! and proved whole.
//!
//! On a mesh of links, where a hole is a chip that has failed, Kumar and Jouppi (arXiv 2011.03605)
//! lead the rings of an all-reduce around it. Here a hole breaks no link, only a line.

use pleach_vocabulary::{Collective, Rank};

use super::{Access, Cover, Tree, TreePair, TreeSchedule, block_for_each_rank};
use crate::Schedule;
use crate::rank_space::RankSpace;

const WINDOW: u32 = 2;

pub(super) fn schedule(collective: Collective, space: &RankSpace, access: Access, cover: Cover) -> Schedule {
    let ranks = space.ranks();
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

/// The way to a rank: everybody corrects the last coordinate that differs and leads to a rank.
fn tree(space: &RankSpace, root: Rank) -> Tree {
    // The order is that of the displacement from the root, so in a full grid all trees are
    // translations of one another.
    let others = (1..space.places()).filter_map(|displacement| space.translated(root, displacement));
    let mut edges: Vec<(Rank, Rank)> = others.map(|rank| (rank, parent(space, rank, root))).collect();
    let mut parents = vec![root; space.ranks() as usize];
    for &(rank, parent) in &edges {
        parents[rank as usize] = parent;
    }
    // By rank: how many ranks are below it, one below the other.
    let mut heights = vec![0; space.ranks() as usize];
    for &(rank, _) in &edges {
        let (mut above, mut height) = (rank, 0);
        while above != root {
            (above, height) = (parents[above as usize], height + 1);
            let highest = &mut heights[above as usize];
            *highest = height.max(*highest);
        }
    }
    // Those that wait for nobody come first.
    edges.sort_by_key(|&(rank, _)| heights[rank as usize]);
    Tree::new(space.ranks(), edges)
}

/// The rank that is one coordinate nearer to the root. Were there none, it would be the root
/// itself, so that sums are right whatever the holes.
fn parent(space: &RankSpace, rank: Rank, root: Rank) -> Rank {
    let corrected = |dimension| {
        let right = space.coordinate(root, dimension);
        (right != space.coordinate(rank, dimension)).then(|| space.moved(rank, dimension, right))?
    };
    (0..space.extents().len()).rev().find_map(corrected).unwrap_or(root)
}

//! Two binary trees, each for half of the data; an inner rank of one is a leaf of the other.
//!
//! The first tree is the one in which position `i` of `1..=m` is a leaf when odd and else lies above the positions
//! around it, as many to each side as its lowest set bit allows. The second is its mirror image when `m` is even, else
//! shifted by one. So every rank has children in at most one of them, and its link carries each byte about once a
//! direction and phase (Sanders, Speck and Träff; NCCL's trees). An all-reduce takes all ranks into the trees; with a root, the trees
//! are made of the others and the root stands above both.
//!
//! Cost for `p` ranks and `n` bytes, d = floor(log2 m) the depth of a tree of `m` positions:
//!
//! | collective | m | rounds | bytes sent, at most | bytes reduced, at most |
//! |--|--|--|--|--|
//! | all-reduce | p | 2d (+ 2 where the last positions hang lower) | 2n | n |
//! | broadcast | p-1 | d+1 | n | 0 |
//! | reduce | p-1 | d+1 | n | n |

use crate::Rank;
use crate::collective::Collective;
use crate::schedule::{Block, BlockId, Schedule};

use super::Access;
use super::tree::{Forest, Shape, Tree};

/// Chunks under way where nothing but the way up and down again limits them. More would only cost scratch.
const WINDOW_MAX: u32 = 16;
const WINDOW: u32 = 2;

pub(super) fn schedule(collective: Collective, ranks: u32, access: Access) -> Schedule {
    let trees = double_tree_edges(ranks, collective.root());
    let shape = |block: BlockId| Shape::both(Tree::new(ranks, trees[block as usize].iter().copied()));
    let window = match collective {
        Collective::AllReduce => shape(0).round_trip().clamp(WINDOW, WINDOW_MAX),
        _ => WINDOW,
    };
    let blocks = vec![Block { part: 0, weight: 1 }; 2];
    Forest {
        collective,
        ranks,
        links: access.into(),
        window,
        blocks,
        shape: &shape,
        turn: &|rank, block| (rank + block) % 2,
    }
    .schedule()
}

/// Child and parent of all edges of the first and the second tree over `ranks` ranks.
pub(crate) fn double_tree_edges(ranks: u32, root: Option<Rank>) -> [Vec<(Rank, Rank)>; 2] {
    [false, true].map(|second| match root {
        None => edges(ranks, second),
        Some(root) => {
            let rank = |position: Rank| (root + 1 + position) % ranks;
            let others = ranks - 1;
            let top = [(rank(top(others, second)), root)];
            let edges = edges(others, second).into_iter();
            top.into_iter().chain(edges.map(|(child, parent)| (rank(child), rank(parent)))).collect()
        }
    })
}

/// Which of `count` ranks stands at a position (from 1) of the first or second tree.
fn rank_at(position: u32, count: u32, second: bool) -> Rank {
    match (second, count % 2) {
        (false, _) => position - 1,
        (true, 0) => count - position,
        (true, _) => position % count,
    }
}

/// The root of a tree over `count` ranks: the position with the most trailing zeros.
fn top(count: u32, second: bool) -> Rank {
    rank_at(1 << count.ilog2(), count, second)
}

/// Child and parent.
fn edges(count: u32, second: bool) -> Vec<(Rank, Rank)> {
    let mut edges = Vec::with_capacity(count as usize - 1);
    let mut ranges = vec![(1u32, count, None)];
    while let Some((first, last, parent)) = ranges.pop() {
        let position = most_trailing_zeros(first, last);
        if let Some(parent) = parent {
            edges.push((rank_at(position, count, second), rank_at(parent, count, second)));
        }
        if position < last {
            ranges.push((position + 1, last, Some(position)));
        }
        if first < position {
            ranges.push((first, position - 1, Some(position)));
        }
    }
    edges
}

/// Of the numbers in a range, the one that the highest power of two divides.
fn most_trailing_zeros(first: u32, last: u32) -> u32 {
    // What first - 1 and last have in common above their highest different bit, and that bit.
    last >> (last ^ (first - 1)).ilog2() << (last ^ (first - 1)).ilog2()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_rank_has_children_in_both_trees_and_none_has_more_than_two() {
        for count in 1..200 {
            let mut inner = vec![0; count as usize];
            for second in [false, true] {
                let edges = edges(count, second);
                assert_eq!(edges.len(), count as usize - 1);
                let mut children = vec![0; count as usize];
                for (_, parent) in edges {
                    children[parent as usize] += 1;
                }
                for (rank, &children) in children.iter().enumerate() {
                    assert!(children <= 2, "{count} ranks, rank {rank}");
                    inner[rank] += u32::from(children > 0);
                }
                let parentless: Vec<u32> = (0..count)
                    .filter(|&rank| !super::edges(count, second).iter().any(|&(child, _)| child == rank))
                    .collect();
                assert_eq!(parentless, [top(count, second)]);
            }
            assert!(inner.iter().all(|&trees| trees <= 1), "{count} ranks: {inner:?}");
        }
    }

    #[test]
    fn trees_are_as_deep_as_the_logarithm() {
        for count in 1..200u32 {
            for second in [false, true] {
                let depth = Shape::both(Tree::new(count, edges(count, second))).round_trip() / 2;
                assert!(depth <= count.ilog2(), "{count} ranks: {depth}");
            }
        }
    }
}

//! Two binary trees, each for half of the data; an inner rank of one is a leaf of the other.
//!
//! The first tree is the one in which position `i` of `1..=m` is a leaf when odd and else lies
//! above the positions around it, as many to each side as its lowest set bit allows. The second is
//! its mirror image when `m` is even, else shifted by one. So every rank has children in at most
//! one of them, and its link carries each byte about once a direction and phase (Sanders, Speck and
//! Träff; NCCL's trees). An all-reduce takes all ranks into the trees; with a root, the trees are
//! made of the others and the root stands above both.
//!
//! Cost for `p` ranks and `n` bytes, d = floor(log2 m) the depth of a tree of `m` positions:
//!
//! | collective | m | rounds | bytes sent, at most | bytes reduced, at most |
//! |--|--|--|--|--|
//! | all-reduce | p | 2d (+ 2 where the last positions hang lower) | 2n | n |
//! | broadcast | p-1 | d+1 | n | 0 |
//! | reduce | p-1 | d+1 | n | n |

use pleach_packing::double_tree_edges;
use pleach_vocabulary::Collective;

use super::{Access, Cover, Tree, TreePair, TreeSchedule};
use crate::{Block, BlockId, Schedule};

/// Chunks under way where nothing but the way up and down again limits them. More would only cost
/// scratch.
const WINDOW_MAX: u32 = 16;
const WINDOW: u32 = 2;

pub(super) fn schedule(collective: Collective, ranks: u32, access: Access) -> Schedule {
    let trees = double_tree_edges(ranks, collective.root());
    let shape = |block: BlockId| TreePair::both(Tree::new(ranks, trees[block as usize].iter().copied()));
    let window = match collective {
        Collective::AllReduce => shape(0).round_trip().clamp(WINDOW, WINDOW_MAX),
        _ => WINDOW,
    };
    let blocks = vec![Block { part: 0, weight: 1 }; 2];
    TreeSchedule {
        collective,
        ranks,
        links: access.into(),
        window,
        blocks,
        shape: &shape,
        lane_order: &|rank, block| (rank + block) % 2,
        cover: Cover::All,
    }
    .schedule()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn trees_are_as_deep_as_the_logarithm() {
        for count in 1..200u32 {
            for second in [false, true] {
                let edges = double_tree_edges(count, None)[usize::from(second)].clone();
                let depth = TreePair::both(Tree::new(count, edges)).round_trip() / 2;
                assert!(depth <= count.ilog2(), "{count} ranks: {depth}");
            }
        }
    }
}

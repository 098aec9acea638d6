//! The two trees of a double tree (Sanders, Speck and Träff, "Two-tree algorithms for full
//! bandwidth broadcast, reduction and scan", 2009). Each rank has children in at most one of the
//! trees, so each link carries half of the data.

use pleach_vocabulary::Rank;

/// The edges (child, parent) of the first and of the second tree over `ranks` ranks.
pub fn double_tree_edges(ranks: u32, root: Option<Rank>) -> [Vec<(Rank, Rank)>; 2] {
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

/// The rank at a position (from 1) of the first or second tree over `count` ranks.
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

/// The edges of a tree, each as (child, parent).
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

/// The number in a range that is divisible by the highest power of two.
fn most_trailing_zeros(first: u32, last: u32) -> u32 {
    // The common leading bits of `first - 1` and `last`, then the highest bit in which they differ.
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
}

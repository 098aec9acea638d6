//! Trees that are the same and should be one.

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};

use pleach_vocabulary::Rank;

use super::Flaw;
use crate::topology::NodeId;
use crate::{Edge, Tree};

/// Refuses trees of the same root, edges and ways, whatever the order of their edges.
pub(super) fn none(trees: &[Tree]) -> Result<(), Flaw> {
    let mut seen: BTreeMap<(Rank, u64), Vec<usize>> = BTreeMap::new();
    for (index, tree) in trees.iter().enumerate() {
        // A sum does not depend on the order, so nothing has to be sorted unless two are alike.
        let sum = tree.edges.iter().fold(0_u64, |sum, edge| sum.wrapping_add(hash(edge)));
        let alike = seen.entry((tree.root, sum)).or_default();
        if let Some(&first) = alike.iter().find(|&&other| ways(&trees[other]) == ways(tree)) {
            return Err(Flaw::Twins { first, second: index });
        }
        alike.push(index);
    }
    Ok(())
}

fn hash(edge: &Edge) -> u64 {
    let mut hasher = DefaultHasher::new();
    (edge.from, edge.to).hash(&mut hasher);
    let paths = edge.paths.iter().map(|path| {
        let mut hasher = DefaultHasher::new();
        path.hops.hash(&mut hasher);
        hasher.finish()
    });
    paths.fold(0_u64, u64::wrapping_add).hash(&mut hasher);
    hasher.finish()
}

/// Sender, receiver and all ways between them.
type Ways<'a> = (Rank, Rank, Vec<&'a [NodeId]>);

fn ways(tree: &Tree) -> Vec<Ways<'_>> {
    let ways = tree.edges.iter().map(|edge| {
        let mut paths: Vec<&[NodeId]> = edge.paths.iter().map(|path| path.hops.as_slice()).collect();
        paths.sort_unstable();
        (edge.from, edge.to, paths)
    });
    let mut ways: Vec<_> = ways.collect();
    ways.sort_unstable();
    ways
}

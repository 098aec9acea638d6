//! Merges equal trees, and scales the weights of trees until a link is full.

use std::collections::BTreeMap;

use pleach_vocabulary::{Collective, Rank};

use super::{Rate, Tree};
use crate::topology::{NodeId, Topology};

/// Merges equal trees, and adds their weights. Each edge has one path.
pub(super) fn merged(trees: Vec<Tree>) -> Vec<Tree> {
    let mut places: BTreeMap<(Rank, Vec<Vec<NodeId>>), usize> = BTreeMap::new();
    let mut merged: Vec<Tree> = Vec::new();
    for tree in trees {
        let mut paths: Vec<_> = tree.edges.iter().map(|edge| edge.paths[0].hops.clone()).collect();
        paths.sort_unstable();
        let place = *places.entry((tree.root, paths)).or_insert(merged.len());
        match merged.get_mut(place) {
            Some(same) => scale_to(same, same.weight + tree.weight),
            None => merged.push(tree),
        }
    }
    merged
}

fn scale_to(tree: &mut Tree, weight: Rate) {
    let factor = weight / tree.weight;
    tree.weight = weight;
    for path in tree.edges.iter_mut().flat_map(|edge| &mut edge.paths) {
        path.weight *= factor;
    }
}

/// The factor by which all weights can be multiplied until a link is full; `None` if nothing moves
/// or a link does not exist.
fn room(topology: &Topology, collective: Collective, trees: &[Tree]) -> Option<Rate> {
    let mut loads: BTreeMap<(NodeId, NodeId), Rate> = BTreeMap::new();
    for path in trees.iter().flat_map(|tree| &tree.edges).flat_map(|edge| &edge.paths) {
        for pair in path.hops.windows(2) {
            *loads.entry((pair[0], pair[1])).or_default() += path.weight;
            if collective == Collective::AllReduce {
                *loads.entry((pair[1], pair[0])).or_default() += path.weight;
            }
        }
    }
    let mut least: Option<Rate> = None;
    for ((from, to), load) in loads {
        let room = Rate::from(i128::from(topology.link(from, to)?.bytes_per_s)) / load;
        least = Some(least.map_or(room, |least| least.min(room)));
    }
    least
}

/// Scales all weights until a link is full.
pub(super) fn fitted(topology: &Topology, collective: Collective, mut trees: Vec<Tree>) -> Option<Vec<Tree>> {
    let room = room(topology, collective, &trees)?;
    for tree in &mut trees {
        scale_to(tree, tree.weight * room);
    }
    Some(trees)
}

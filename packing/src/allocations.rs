//! The parts of a server that jobs get: every connected set of ranks, up to isomorphism.

use std::collections::BTreeMap;

use pleach_vocabulary::Rank;

use crate::topology::{NodeId, NodeKind, Topology};

/// An allocation, and how many others are like it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Allocation {
    /// The first of those that are alike, in order of their ranks.
    pub ranks: Vec<Rank>,
    /// How many choices of ranks have such links, this one counted.
    pub alike: u32,
    /// Its ranks, the switches, and the links between them.
    pub topology: Topology,
}

/// All connected allocations of those sizes up to isomorphism, by size and then by ranks. Two are
/// alike where ranks, switches and bandwidths of one are those of the other under other names.
///
/// Of `n` ranks there are 2ⁿ choices: for servers, not for clusters.
///
/// # Panics
///
/// When there are more than 20 ranks.
#[must_use]
pub fn allocations(topology: &Topology, sizes: std::ops::RangeInclusive<u32>) -> Vec<Allocation> {
    let ranks = topology.ranks();
    assert!(ranks <= 20, "2^{ranks} choices of ranks are too many");
    let mut choices: Vec<Vec<Rank>> = (1..1_u32 << ranks)
        .filter(|choice| sizes.contains(&choice.count_ones()))
        .map(|choice| (0..ranks).filter(|rank| choice >> rank & 1 == 1).collect())
        .collect();
    choices.sort_by_key(|choice| (choice.len(), choice.clone()));
    let mut found: Vec<Allocation> = Vec::new();
    let mut by_invariants: BTreeMap<Vec<NodeInvariant>, Vec<usize>> = BTreeMap::new();
    for ranks in choices {
        let Ok(topology) = topology.only(&ranks) else { continue };
        let invariants = invariants(&topology);
        let mut sorted = invariants.clone();
        sorted.sort_unstable();
        let candidates = by_invariants.entry(sorted).or_default();
        let same = candidates.iter().find(|&&index| is_isomorphic(&found[index].topology, &topology));
        match same {
            Some(&index) => found[index].alike += 1,
            None => {
                candidates.push(found.len());
                found.push(Allocation { ranks, alike: 1, topology });
            }
        }
    }
    found
}

/// What a node sees around it: whether it is a rank, and the bandwidths of its links out and in
/// with the kinds of their other ends.
type NodeInvariant = (bool, Vec<(u64, bool)>, Vec<(u64, bool)>);

fn invariants(topology: &Topology) -> Vec<NodeInvariant> {
    let is_rank = |node: NodeId| topology.nodes()[node.0 as usize].kind == NodeKind::Rank;
    let mut invariants: Vec<NodeInvariant> = (0..topology.nodes().len())
        .map(|node| (is_rank(NodeId(node as u32)), Vec::new(), Vec::new()))
        .collect();
    for link in topology.links() {
        invariants[link.from.0 as usize].1.push((link.bytes_per_s, is_rank(link.to)));
        invariants[link.to.0 as usize].2.push((link.bytes_per_s, is_rank(link.from)));
    }
    for (_, out, into) in &mut invariants {
        out.sort_unstable();
        into.sort_unstable();
    }
    invariants
}

/// Whether there are names by which one is the other.
fn is_isomorphic(one: &Topology, other: &Topology) -> bool {
    let (of_one, of_other) = (invariants(one), invariants(other));
    one.nodes().len() == other.nodes().len()
        && one.links().len() == other.links().len()
        && assign(one, other, &of_one, &of_other, &mut Vec::new())
}

/// Gives the nodes of one, in order, to those of the other, with all links among those given.
fn assign(
    one: &Topology,
    other: &Topology,
    of_one: &[NodeInvariant],
    of_other: &[NodeInvariant],
    given: &mut Vec<NodeId>,
) -> bool {
    let node = given.len();
    if node == of_one.len() {
        return true;
    }
    let bandwidth = |topology: &Topology, from, to| topology.link(from, to).map(|link| link.bytes_per_s);
    for (image, invariant) in of_other.iter().enumerate() {
        let image = NodeId(image as u32);
        if given.contains(&image) || *invariant != of_one[node] {
            continue;
        }
        let this = NodeId(node as u32);
        let fits = given.iter().enumerate().all(|(earlier, &its)| {
            let earlier = NodeId(earlier as u32);
            bandwidth(one, this, earlier) == bandwidth(other, image, its)
                && bandwidth(one, earlier, this) == bandwidth(other, its, image)
        });
        if fits {
            given.push(image);
            if assign(one, other, of_one, of_other, given) {
                return true;
            }
            given.pop();
        }
    }
    false
}

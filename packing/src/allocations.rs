//! The parts of a server that jobs can get: every connected set of ranks, up to isomorphism.

use std::collections::BTreeMap;

use pleach_vocabulary::Rank;

use crate::topology::{NodeId, NodeKind, Topology};

/// An allocation, and the number of allocations that are isomorphic to it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Allocation {
    /// The first set of ranks of all isomorphic ones, in the order of their ranks.
    pub ranks: Vec<Rank>,
    /// How many sets of ranks have an isomorphic topology, this set included.
    pub alike: u32,
    /// The ranks of the allocation, the switches, and the links between them.
    pub topology: Topology,
}

/// All connected allocations of these sizes up to isomorphism, ordered by size and then by ranks.
/// Two allocations are isomorphic if renaming the ranks and switches of the first one gives the
/// second one, with the same bandwidths.
///
/// `n` ranks have 2ⁿ subsets, so this is for servers and not for clusters.
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

/// The surroundings of a node: whether the node is a rank, then the bandwidths of its outgoing and
/// of its incoming links, each with whether the other end is a rank.
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

/// Whether renaming the nodes of one topology gives the other topology.
fn is_isomorphic(one: &Topology, other: &Topology) -> bool {
    let (of_one, of_other) = (invariants(one), invariants(other));
    one.nodes().len() == other.nodes().len()
        && one.links().len() == other.links().len()
        && assign(one, other, &of_one, &of_other, &mut Vec::new())
}

/// Maps the nodes of `one`, in order, to nodes of `other`. All links among the mapped nodes must
/// agree.
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

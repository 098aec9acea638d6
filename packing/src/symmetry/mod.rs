//! Symmetry of a topology: automorphisms of its graph.
//!
//! An automorphism maps nodes to nodes of the same kind and links to links of the same bandwidth.
//! Names, numbers and latencies do not count, so a topology and its shuffled copy have the same
//! symmetry, found with about the same work. A [`Symmetry`] is a set of *generators*, of which all
//! other automorphisms are products, with the *orbits* of nodes. A [`Semiregular`] is a group of
//! automorphisms that maps the trees of one rank to many ranks so that links of an orbit share the
//! load evenly.
//!
//! **Invariant:** every generator was verified link by link. The search is bounded: beyond its
//! limits there are fewer generators and smaller orbits, and never a permutation that is no
//! automorphism.
//!
//! After B. D. McKay and A. Piperno, Practical graph isomorphism II (2014), and H. Katebi, K. A.
//! Sakallah and I. L. Markov, Symmetry and satisfiability: an update (2010).

use pleach_vocabulary::Rank;

use crate::topology::{NodeId, NodeKind, Topology};
use automorphisms::{Graph, Limits, automorphisms, end_of_first_path};
pub(crate) use semiregular::Semiregular;

mod automorphisms;
mod semiregular;
#[cfg(test)]
mod tests;

/// The limits of one search: about two seconds of work, the nodes individualised in vain on the
/// path to one automorphism, and the nodes individualised one after the other.
const LIMITS: Limits = Limits { work: 400_000_000, failures: 2_000, depth: 4_096 };

/// The work limit of a search for an order of all nodes: some tenths of a second.
const ORDER_WORK_MAX: u64 = 50_000_000;

/// Most nodes of a topology that is searched.
pub(crate) const SYMMETRY_NODES_MAX: usize = 8_192;

/// The symmetry of a topology, see the module.
#[derive(Clone, Debug)]
pub(crate) struct Symmetry {
    generators: Vec<Permutation>,
    node_orbits: Vec<u32>,
    node_orbit_count: usize,
}

impl Symmetry {
    /// The symmetry of a topology.
    #[must_use]
    pub(crate) fn of(topology: &Topology) -> Self {
        Self::fixing(topology, &[])
    }

    /// The symmetry of the automorphisms that fix each of these nodes.
    #[must_use]
    pub(crate) fn fixing(topology: &Topology, fixed: &[NodeId]) -> Self {
        if topology.nodes().len() > SYMMETRY_NODES_MAX {
            return Self::from_generators(topology, Vec::new());
        }
        Self::from_generators(topology, automorphisms(&graph(topology, fixed, Vec::new()), LIMITS).generators)
    }

    fn from_generators(topology: &Topology, generators: Vec<Permutation>) -> Self {
        let mut nodes = UnionFind::new(topology.nodes().len());
        generators.iter().for_each(|generator| nodes.merge_along(generator));
        let (node_orbits, node_orbit_count) = nodes.numbered();
        Self { generators, node_orbits, node_orbit_count }
    }

    /// The generators: all other automorphisms are products of them.
    #[must_use]
    pub(crate) fn generators(&self) -> &[Permutation] {
        &self.generators
    }

    /// Whether only the identity was found.
    #[must_use]
    pub(crate) fn is_trivial(&self) -> bool {
        self.generators.is_empty()
    }

    /// The number of a node's orbit. Orbits are numbered in the order of their first nodes.
    #[must_use]
    pub(crate) fn node_orbit(&self, node: NodeId) -> usize {
        self.node_orbits[node.0 as usize] as usize
    }

    /// The number of orbits of nodes.
    #[must_use]
    pub(crate) fn node_orbit_count(&self) -> usize {
        self.node_orbit_count
    }

    /// The first rank of every orbit of ranks.
    #[must_use]
    pub(crate) fn rank_representatives(&self, topology: &Topology) -> Vec<Rank> {
        let mut seen = vec![false; self.node_orbit_count];
        let is_first =
            |&rank: &Rank| !std::mem::replace(&mut seen[self.node_orbit(topology.node(rank))], true);
        (0..topology.ranks()).filter(is_first).collect()
    }
}

/// All nodes in an order that depends on the links alone, with this node first. If refinement
/// leaves only nodes with equal links in one colour, the orders of a topology and of its shuffled
/// copy differ by an automorphism. `None` if the search takes long.
#[must_use]
pub(super) fn order_from(topology: &Topology, first: NodeId) -> Option<Vec<NodeId>> {
    if topology.nodes().len() > SYMMETRY_NODES_MAX {
        return None;
    }
    let limits = Limits { work: ORDER_WORK_MAX, failures: 0, depth: SYMMETRY_NODES_MAX };
    let order = end_of_first_path(&graph(topology, &[first], Vec::new()), limits)?;
    let others = order.into_iter().map(NodeId).filter(|node| *node != first);
    Some(std::iter::once(first).chain(others).collect())
}

/// The graph of a topology with additional arcs. Each of the nodes in `fixed` has a colour of its
/// own.
fn graph(topology: &Topology, fixed: &[NodeId], mut arcs: Vec<(u32, u32, u64)>) -> Graph {
    let colour = |kind| u64::from(kind == NodeKind::Switch);
    let mut colours: Vec<u64> = topology.nodes().iter().map(|node| colour(node.kind)).collect();
    for (index, node) in fixed.iter().enumerate() {
        // Ranks have the colour 0 and switches the colour 1.
        colours[node.0 as usize] = index as u64 + 2;
    }
    arcs.extend(topology.links().iter().map(|link| (link.from.0, link.to.0, link.bytes_per_s)));
    Graph::new(colours, arcs)
}

/// The orbits of links under these automorphisms: the orbit of each link, and the number of orbits.
fn link_orbits(topology: &Topology, generators: &[Permutation]) -> (Vec<u32>, usize) {
    let links = topology.links();
    let mut ends = vec![Vec::new(); topology.nodes().len()];
    for (index, link) in links.iter().enumerate() {
        ends[link.from.0 as usize].push(index);
        ends[link.to.0 as usize].push(index);
    }
    let mut classes = UnionFind::new(links.len());
    for generator in generators {
        let moved = (0..ends.len() as u32).filter(|&node| generator.of(node) != node);
        for &index in moved.flat_map(|node| &ends[node as usize]) {
            let image = carried_link(topology, index, generator);
            debug_assert_eq!(links[image].bytes_per_s, links[index].bytes_per_s);
            classes.merge(index as u32, image as u32);
        }
    }
    classes.numbered()
}

/// The place in [`Topology::links`] of the image of a link under an automorphism.
fn carried_link(topology: &Topology, link: usize, automorphism: &Permutation) -> usize {
    let link = &topology.links()[link];
    let (from, to) = (NodeId(automorphism.of(link.from.0)), NodeId(automorphism.of(link.to.0)));
    topology.link_place(from, to).expect("an automorphism carries links to links")
}

// Permutations of nodes, and a union-find structure.

/// The image of every node. Numbers are those of nodes.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Permutation(Vec<u32>);

impl Permutation {
    /// The identity.
    #[must_use]
    pub(crate) fn identity(nodes: usize) -> Self {
        Self((0..nodes as u32).collect())
    }

    /// The permutation that maps node i to `images[i]`.
    ///
    /// # Panics
    ///
    /// When two nodes have the same image, or an image is not a node.
    #[must_use]
    pub(crate) fn new(images: Vec<u32>) -> Self {
        let mut taken = vec![false; images.len()];
        for &image in &images {
            assert!(!std::mem::replace(&mut taken[image as usize], true), "two nodes go to {image}");
        }
        Self(images)
    }

    /// The image of a node.
    #[must_use]
    pub(crate) fn of(&self, node: u32) -> u32 {
        self.0[node as usize]
    }

    /// The images of all nodes.
    #[must_use]
    pub(crate) fn images(&self) -> &[u32] {
        &self.0
    }

    /// The product: first this permutation, then the other one.
    #[must_use]
    pub(crate) fn then(&self, after: &Self) -> Self {
        Self(self.0.iter().map(|&image| after.of(image)).collect())
    }

    /// The inverse permutation.
    #[must_use]
    pub(crate) fn inverse(&self) -> Self {
        let mut images = vec![0; self.0.len()];
        for (node, &image) in self.0.iter().enumerate() {
            images[image as usize] = node as u32;
        }
        Self(images)
    }

    /// The cycles of the permutation, cycles of one node included. Each cycle begins with its
    /// smallest node.
    #[must_use]
    pub(crate) fn cycles(&self) -> Vec<Vec<u32>> {
        let mut seen = vec![false; self.0.len()];
        let mut cycles = Vec::new();
        for start in 0..self.0.len() as u32 {
            let mut cycle = Vec::new();
            let mut node = start;
            while !std::mem::replace(&mut seen[node as usize], true) {
                cycle.push(node);
                node = self.of(node);
            }
            if !cycle.is_empty() {
                cycles.push(cycle);
            }
        }
        cycles
    }
}

/// Disjoint sets that can be merged (union-find).
#[derive(Clone, Debug)]
struct UnionFind(Vec<u32>);

impl UnionFind {
    /// Each member is a set of its own.
    fn new(members: usize) -> Self {
        Self((0..members as u32).collect())
    }

    /// The smallest member of the set that holds this member.
    fn first(&mut self, member: u32) -> u32 {
        let mut member = member;
        while self.0[member as usize] != member {
            self.0[member as usize] = self.0[self.0[member as usize] as usize];
            member = self.0[member as usize];
        }
        member
    }

    /// Merges the sets of two members. Returns whether they were in different sets.
    fn merge(&mut self, one: u32, other: u32) -> bool {
        let (one, other) = (self.first(one), self.first(other));
        self.0[one.max(other) as usize] = one.min(other);
        one != other
    }

    /// Merges the orbits that a permutation joins.
    fn merge_along(&mut self, permutation: &Permutation) {
        for (node, &image) in permutation.images().iter().enumerate() {
            self.merge(node as u32, image);
        }
    }

    /// The number of each member's set, and the number of sets. Sets are numbered in the order of
    /// their smallest members.
    fn numbered(mut self) -> (Vec<u32>, usize) {
        let mut numbers = vec![0; self.0.len()];
        let mut count = 0;
        for member in 0..self.0.len() as u32 {
            let first = self.first(member);
            if first == member {
                numbers[member as usize] = count;
                count += 1;
            } else {
                numbers[member as usize] = numbers[first as usize];
            }
        }
        (numbers, count as usize)
    }
}

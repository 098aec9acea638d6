//! Checks a packing: every property is computed again from the topology, by code that does not
//! pack.
//!
//! [`check`] verifies that trees span all ranks in the right direction, that their edges follow
//! existing links and pass through switches only, that no link exceeds its capacity, that the
//! weights sum to the rate, and that the [`Certificate`] evaluates to the
//! bound. A defect is a [`Flaw`] with its place. A correct packing gives a [`Checked`]: the load of
//! each link and the depth of each tree.
//!
//! **Invariant:** this module uses the types of a packing and none of the modules that pack, no
//! flow and no search. Arithmetic is exact: all weights are integers over one common denominator,
//! and sums are checked for overflow.
//!
//! # The order of edges
//!
//! An edge comes after the edge that brings the data to its sender. In trees towards the root, an
//! edge comes before the edge that takes the data on from its receiver. Edges of different branches
//! may come in any order.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{DefaultHasher, Hash as _, Hasher as _};

use num_rational::Ratio;
use pleach_vocabulary::{Collective, Rank};

use crate::topology::{NodeId, Topology};
use crate::{Certificate, Edge, Packing, Path, Rate, Tree};

pub use flaw::{CertificateFlaw, Flaw, PathFlaw};

mod flaw;

/// The loads of the links and the depths of the trees of a correct packing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Checked {
    /// The load of every link, in the order of [`Topology::links`].
    pub loads: Vec<LinkLoad>,
    /// The depth of every tree, in the order of [`Packing::trees`].
    pub depths: Vec<Depth>,
}

/// The load of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinkLoad {
    /// The node where the link begins.
    pub from: NodeId,
    /// The node where the link ends.
    pub to: NodeId,
    /// The most that the link can carry, in bytes a second.
    pub capacity: u64,
    /// The load of the link, in bytes a second. For all-reduce, both uses of each tree count.
    pub load: Rate,
}

/// The distance from the root of a tree to its farthest rank, in edges and in links.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Depth {
    /// The largest number of edges between the root and a rank. An edge is a step from rank to
    /// rank.
    pub edges: u32,
    /// The largest number of links between the root and a rank. Links to and from switches count.
    pub links: u32,
}

impl LinkLoad {
    /// The load divided by the capacity: 1 if the link is full.
    #[must_use]
    pub fn utilisation(&self) -> Rate {
        self.load / Rate::from(i128::from(self.capacity))
    }
}

impl Checked {
    /// The depth of the deepest tree.
    #[must_use]
    pub fn depth(&self) -> Depth {
        let deepest = |depth: fn(&Depth) -> u32| self.depths.iter().map(depth).max().unwrap_or(0);
        Depth { edges: deepest(|depth| depth.edges), links: deepest(|depth| depth.links) }
    }

    /// The utilisation of the busiest link; zero where nothing moves.
    #[must_use]
    pub fn busiest(&self) -> Rate {
        self.loads.iter().map(LinkLoad::utilisation).max().unwrap_or_default()
    }
}

/// Checks all properties of a packing of a topology.
///
/// # Errors
///
/// The first [`Flaw`] found.
pub fn check(topology: &Topology, packing: &Packing) -> Result<Checked, Flaw> {
    let form = TreeForm::of(packing.collective).ok_or(Flaw::NotPacked { collective: packing.collective })?;
    if let Some(root) = form.root.filter(|&root| root >= topology.ranks()) {
        return Err(Flaw::NoSuchRoot { root, ranks: topology.ranks() });
    }
    let units = Units::of(packing)?;
    if topology.ranks() == 1 {
        return check_single_rank(topology, packing);
    }
    let mut loads = Loads::of(topology);
    let mut depths = Vec::with_capacity(packing.trees.len());
    let mut walk = TreeWalk::of(topology, form);
    for (index, tree) in packing.trees.iter().enumerate() {
        depths.push(walk.tree(index, tree)?);
        loads.add(index, tree, &units, form.both_ways)?;
    }
    expect_no_duplicates(&packing.trees)?;
    let loads = loads.within_capacity(&units)?;
    check_sums(topology, packing, form, &units)?;
    if packing.rate > packing.bound {
        return Err(Flaw::AboveBound { rate: packing.rate, bound: packing.bound });
    }
    check_certificate(topology, packing)?;
    Ok(Checked { loads, depths })
}

/// A single rank has nothing to move, so nothing may be packed.
fn check_single_rank(topology: &Topology, packing: &Packing) -> Result<Checked, Flaw> {
    let zero = Rate::default();
    if !packing.trees.is_empty() || packing.rate != zero || packing.bound != zero {
        return Err(Flaw::SingleRankHasTrees);
    }
    check_certificate(topology, packing)?;
    let none = Units::of(packing)?;
    Ok(Checked { loads: Loads::of(topology).within_capacity(&none)?, depths: Vec::new() })
}

/// The form of the trees of a collective.
#[derive(Clone, Copy)]
struct TreeForm {
    /// Data move to the root, not from it.
    inward: bool,
    /// Each tree is used backwards as well.
    both_ways: bool,
    /// Entries are paths, each of one rank's data.
    paths: bool,
    /// The root of all trees; `None` if any rank may be the root of a tree.
    root: Option<Rank>,
    /// Each rank's share of the whole is the same.
    blocks: bool,
}

impl TreeForm {
    fn of(collective: Collective) -> Option<Self> {
        let form = |inward, paths, root, blocks| Self { inward, both_ways: false, paths, root, blocks };
        Some(match collective {
            Collective::Broadcast { root } => form(false, false, Some(root), false),
            Collective::Reduce { root } => form(true, false, Some(root), false),
            Collective::AllGather => form(false, false, None, true),
            Collective::ReduceScatter => form(true, false, None, true),
            Collective::Scatter { root } => form(false, true, Some(root), true),
            Collective::Gather { root } => form(true, true, Some(root), true),
            Collective::AllReduce => Self { both_ways: true, ..form(true, false, None, false) },
            _ => return None,
        })
    }
}

/// Visits the edges of trees from the root on.
struct TreeWalk<'a> {
    topology: &'a Topology,
    form: TreeForm,
    /// By rank: its depth, if the tree has been found to hold the rank.
    depths: Vec<Option<Depth>>,
}

impl<'a> TreeWalk<'a> {
    fn of(topology: &'a Topology, form: TreeForm) -> Self {
        Self { topology, form, depths: vec![None; topology.ranks() as usize] }
    }

    /// Checks one tree, and returns its depth.
    fn tree(&mut self, index: usize, tree: &Tree) -> Result<Depth, Flaw> {
        let ranks = self.topology.ranks();
        if tree.root >= ranks || self.form.root.is_some_and(|root| root != tree.root) {
            return Err(Flaw::Root { tree: index, root: tree.root });
        }
        self.depths.fill(None);
        self.depths[tree.root as usize] = Some(Depth::default());
        let mut at = tree.root;
        let mut deepest = Depth::default();
        for number in 0..tree.edges.len() {
            let edge_index = if self.form.inward { tree.edges.len() - 1 - number } else { number };
            let edge = &tree.edges[edge_index];
            let (near, far) = if self.form.inward { (edge.to, edge.from) } else { (edge.from, edge.to) };
            if let Some(&rank) = [near, far].iter().find(|&&rank| rank >= ranks) {
                return Err(Flaw::NoSuchRank { tree: index, edge: edge_index, rank });
            }
            let near_depth = self.depths[near as usize].filter(|_| !self.form.paths || near == at);
            let near_depth =
                near_depth.ok_or(Flaw::Detached { tree: index, edge: edge_index, rank: near })?;
            let links = check_paths(self.topology, edge).map_err(|(path, flaw)| Flaw::Path {
                tree: index,
                edge: edge_index,
                path,
                flaw,
            })?;
            let depth = Depth { edges: near_depth.edges + 1, links: near_depth.links + links };
            if self.depths[far as usize].replace(depth).is_some() {
                return Err(Flaw::ReachedTwice { tree: index, edge: edge_index, rank: far });
            }
            deepest.edges = deepest.edges.max(depth.edges);
            deepest.links = deepest.links.max(depth.links);
            at = far;
        }
        let left = self.depths.iter().position(Option::is_none).filter(|_| !self.form.paths);
        if let Some(rank) = left {
            return Err(Flaw::NotSpanning { tree: index, rank: rank as Rank });
        }
        Ok(deepest)
    }
}

/// Checks every path of an edge. Returns the largest number of links of a path, or the index of the
/// first bad path with its flaw.
fn check_paths(topology: &Topology, edge: &Edge) -> Result<u32, (usize, PathFlaw)> {
    if edge.paths.is_empty() {
        return Err((0, PathFlaw::None));
    }
    let mut longest = 0;
    for (index, path) in edge.paths.iter().enumerate() {
        check_path(topology, edge, path).map_err(|flaw| (index, flaw))?;
        let again = edge.paths[..index].iter().any(|other| other.hops == path.hops);
        if again {
            return Err((index, PathFlaw::ListedTwice));
        }
        longest = longest.max(path.hops.len() as u32 - 1);
    }
    Ok(longest)
}

fn check_path(topology: &Topology, edge: &Edge, path: &Path) -> Result<(), PathFlaw> {
    if let Some(&node) = path.hops.iter().find(|node| node.0 as usize >= topology.nodes().len()) {
        return Err(PathFlaw::UnknownNode { node });
    }
    let (from, to) = (topology.node(edge.from), topology.node(edge.to));
    if path.hops.len() < 2 || path.hops.first() != Some(&from) || path.hops.last() != Some(&to) {
        return Err(PathFlaw::Ends { from, to });
    }
    let between = &path.hops[1..path.hops.len() - 1];
    for (index, &node) in between.iter().enumerate() {
        if let Some(rank) = topology.rank(node) {
            return Err(PathFlaw::ThroughRank { rank });
        }
        if between[..index].contains(&node) {
            return Err(PathFlaw::NodeTwice { node });
        }
    }
    Ok(())
}

/// The load of every link so far, in [`Units`].
struct Loads<'a> {
    topology: &'a Topology,
    loads: Vec<i128>,
}

impl<'a> Loads<'a> {
    fn of(topology: &'a Topology) -> Self {
        Self { topology, loads: vec![0; topology.links().len()] }
    }

    /// Adds the loads of a tree. The weights of its paths must be positive, and at each edge they
    /// must sum to the weight of the tree.
    fn add(&mut self, index: usize, tree: &Tree, units: &Units, both_ways: bool) -> Result<(), Flaw> {
        let weight = units.positive(tree.weight).ok_or(Flaw::TreeWeight { tree: index })?;
        for (edge_index, edge) in tree.edges.iter().enumerate() {
            let mut sum: i128 = 0;
            for (path_index, path) in edge.paths.iter().enumerate() {
                let wrong = |flaw| Flaw::Path { tree: index, edge: edge_index, path: path_index, flaw };
                let share = units.positive(path.weight).ok_or(wrong(PathFlaw::Weight))?;
                sum = sum.checked_add(share).ok_or(Flaw::Overflow)?;
                for pair in path.hops.windows(2) {
                    self.link(pair[0], pair[1], share).map_err(wrong)?;
                    if both_ways {
                        self.link(pair[1], pair[0], share).map_err(wrong)?;
                    }
                }
            }
            if sum != weight {
                let sum = units.rate(sum);
                return Err(Flaw::PathSum { tree: index, edge: edge_index, sum, weight: tree.weight });
            }
        }
        Ok(())
    }

    fn link(&mut self, from: NodeId, to: NodeId, share: i128) -> Result<(), PathFlaw> {
        let links = self.topology.links();
        let link = links.binary_search_by_key(&(from, to), |link| (link.from, link.to));
        let load = &mut self.loads[link.map_err(|_| PathFlaw::NoLink { from, to })?];
        // A sum that does not fit is far above any capacity, so the largest number stands for it.
        *load = load.saturating_add(share);
        Ok(())
    }

    fn within_capacity(self, units: &Units) -> Result<Vec<LinkLoad>, Flaw> {
        let pairs = self.topology.links().iter().zip(self.loads);
        let checked = pairs.map(|(link, load)| {
            let (from, to, capacity) = (link.from, link.to, link.bytes_per_s);
            let load = units.rate(load);
            if load > Rate::from(i128::from(capacity)) {
                return Err(Flaw::Overload { from, to, load, capacity });
            }
            Ok(LinkLoad { from, to, capacity, load })
        });
        checked.collect()
    }
}

/// Checks that the weights sum to the rate. Where each rank has a block of its own, checks also
/// that the weights for each block sum to the same share of the rate.
fn check_sums(topology: &Topology, packing: &Packing, form: TreeForm, units: &Units) -> Result<(), Flaw> {
    let mut blocks = vec![0_i128; topology.ranks() as usize];
    for tree in &packing.trees {
        let block = &mut blocks[block_of(tree, form) as usize];
        *block =
            units.exact(tree.weight).and_then(|weight| block.checked_add(weight)).ok_or(Flaw::Overflow)?;
    }
    let sum = blocks.iter().try_fold(0_i128, |sum, &block| sum.checked_add(block)).ok_or(Flaw::Overflow)?;
    if units.rate(sum) != packing.rate {
        return Err(Flaw::RateSum { sum: units.rate(sum), rate: packing.rate });
    }
    let share = packing.rate / Rate::from(i128::from(topology.ranks()));
    for (rank, &block) in blocks.iter().enumerate().filter(|_| form.blocks) {
        let block: Ratio<i128> = units.rate(block);
        if block != share {
            return Err(Flaw::Share { rank: rank as Rank, sum: block, share });
        }
    }
    Ok(())
}

/// The rank whose block the tree carries. For a path it is the rank at the end away from the root,
/// for other trees the root.
fn block_of(tree: &Tree, form: TreeForm) -> Rank {
    let far = if form.inward {
        tree.edges.first().map(|edge| edge.from)
    } else {
        tree.edges.last().map(|edge| edge.to)
    };
    far.filter(|_| form.paths).unwrap_or(tree.root)
}

// Evaluates a certificate by the formulas in the documentation of the crate.

/// Checks that the certificate is one for this collective and shows the bound.
fn check_certificate(topology: &Topology, packing: &Packing) -> Result<(), Flaw> {
    let value = evaluate(topology, packing.collective, &packing.certificate).map_err(Flaw::Certificate)?;
    if value == packing.bound {
        Ok(())
    } else {
        Err(Flaw::Certificate(CertificateFlaw::Value { value, bound: packing.bound }))
    }
}

/// The bound that a certificate shows.
fn evaluate(
    topology: &Topology,
    collective: Collective,
    certificate: &Certificate,
) -> Result<Rate, CertificateFlaw> {
    let check_single_rank = topology.ranks() == 1;
    match certificate {
        Certificate::Alone if check_single_rank => Ok(Rate::default()),
        Certificate::Cut { nodes } if !check_single_rank => cut(topology, collective, nodes),
        Certificate::Partition { parts } if !check_single_rank && collective == Collective::AllReduce => {
            partition(topology, parts)
        }
        _ => Err(CertificateFlaw::Kind),
    }
}

fn cut(topology: &Topology, collective: Collective, nodes: &[NodeId]) -> Result<Rate, CertificateFlaw> {
    let sides = Sides::of(topology, &[nodes])?;
    let inside = sides.ranks[0];
    let outside = topology.ranks() - inside;
    if inside == 0 || outside == 0 {
        return Err(CertificateFlaw::SeparatesNothing);
    }
    let root = match collective {
        Collective::Broadcast { root }
        | Collective::Reduce { root }
        | Collective::Scatter { root }
        | Collective::Gather { root } => Some(root),
        _ => None,
    };
    if let Some(root) = root.filter(|&root| sides.part_of(topology.node(root)).is_none()) {
        return Err(CertificateFlaw::RootOutside { root });
    }
    let ranks = i128::from(topology.ranks());
    let leaving = || Ok(sides.leaving(topology)[0]);
    let entering = || Ok(sides.entering(topology)[0]);
    let of_all = |bandwidth: i128, some: u32| Ratio::new(bandwidth * ranks, i128::from(some));
    match collective {
        Collective::Broadcast { .. } | Collective::AllReduce => leaving().map(Rate::from),
        Collective::Reduce { .. } => entering().map(Rate::from),
        Collective::AllGather => leaving().map(|bandwidth| of_all(bandwidth, inside)),
        Collective::ReduceScatter => entering().map(|bandwidth| of_all(bandwidth, inside)),
        Collective::Scatter { .. } => leaving().map(|bandwidth| of_all(bandwidth, outside)),
        Collective::Gather { .. } => entering().map(|bandwidth| of_all(bandwidth, outside)),
        _ => Err(CertificateFlaw::Kind),
    }
}

/// The bound of a partition. A switch may be in no part; a rank may not.
fn partition(topology: &Topology, parts: &[Vec<NodeId>]) -> Result<Rate, CertificateFlaw> {
    let parts: Vec<&[NodeId]> = parts.iter().map(Vec::as_slice).collect();
    let sides = Sides::of(topology, &parts)?;
    if parts.len() < 2 {
        return Err(CertificateFlaw::SeparatesNothing);
    }
    if let Some(part) = sides.ranks.iter().position(|&ranks| ranks == 0) {
        return Err(CertificateFlaw::PartWithoutRank { part });
    }
    if let Some(rank) = (0..topology.ranks()).find(|&rank| sides.part_of(topology.node(rank)).is_none()) {
        return Err(CertificateFlaw::RankInNoPart { rank });
    }
    let leaving: i128 = sides.leaving(topology).iter().sum();
    Ok(Ratio::new(leaving, 2 * (parts.len() as i128 - 1)))
}

/// Disjoint sets of nodes.
struct Sides {
    /// By node: the index of its set.
    parts: Vec<Option<usize>>,
    /// By set: the number of its ranks.
    ranks: Vec<u32>,
}

impl Sides {
    fn of(topology: &Topology, sets: &[&[NodeId]]) -> Result<Self, CertificateFlaw> {
        let mut parts = vec![None; topology.nodes().len()];
        let mut ranks = vec![0; sets.len()];
        for (index, set) in sets.iter().enumerate() {
            for &node in *set {
                let part = parts.get_mut(node.0 as usize).ok_or(CertificateFlaw::UnknownNode { node })?;
                if part.replace(index).is_some() {
                    return Err(CertificateFlaw::NodeTwice { node });
                }
                ranks[index] += u32::from(topology.rank(node).is_some());
            }
        }
        Ok(Self { parts, ranks })
    }

    fn part_of(&self, node: NodeId) -> Option<usize> {
        self.parts[node.0 as usize]
    }

    /// By set: the bandwidth that leaves it.
    fn leaving(&self, topology: &Topology) -> Vec<i128> {
        self.across(topology, |from, _| from)
    }

    /// By set: the bandwidth that enters it.
    fn entering(&self, topology: &Topology) -> Vec<i128> {
        self.across(topology, |_, to| to)
    }

    fn across(
        &self,
        topology: &Topology,
        side: impl Fn(Option<usize>, Option<usize>) -> Option<usize>,
    ) -> Vec<i128> {
        let mut sums = vec![0; self.ranks.len()];
        for link in topology.links() {
            let (from, to) = (self.part_of(link.from), self.part_of(link.to));
            if let Some(part) = side(from, to).filter(|_| from != to) {
                sums[part] += i128::from(link.bytes_per_s);
            }
        }
        sums
    }
}

// Refuses equal trees.

/// Refuses trees of the same root, edges and paths, whatever the order of their edges.
fn expect_no_duplicates(trees: &[Tree]) -> Result<(), Flaw> {
    let mut seen: BTreeMap<(Rank, u64), Vec<usize>> = BTreeMap::new();
    for (index, tree) in trees.iter().enumerate() {
        // The sum does not depend on the order of the edges, so edges are sorted only where two
        // sums are equal.
        let sum = tree.edges.iter().fold(0_u64, |sum, edge| sum.wrapping_add(hash(edge)));
        let same_hash = seen.entry((tree.root, sum)).or_default();
        if let Some(&first) = same_hash.iter().find(|&&other| edge_paths(&trees[other]) == edge_paths(tree)) {
            return Err(Flaw::Duplicate { first, second: index });
        }
        same_hash.push(index);
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

/// Sender, receiver and all paths between them.
type EdgePaths<'a> = (Rank, Rank, Vec<&'a [NodeId]>);

fn edge_paths(tree: &Tree) -> Vec<EdgePaths<'_>> {
    let edge_paths = tree.edges.iter().map(|edge| {
        let mut paths: Vec<&[NodeId]> = edge.paths.iter().map(|path| path.hops.as_slice()).collect();
        paths.sort_unstable();
        (edge.from, edge.to, paths)
    });
    let mut edge_paths: Vec<_> = edge_paths.collect();
    edge_paths.sort_unstable();
    edge_paths
}

// Weights as integers over one denominator, so that sums are fast and exact.

/// The largest common denominator. With it, every capacity and sums of many capacities fit in 127
/// bits.
const DENOMINATOR_MAX: i128 = 1 << 60;

/// The common denominator of all weights of a packing.
struct Units {
    denominator: i128,
}

impl Units {
    /// Finds the common denominator, and checks that every rate is a number.
    fn of(packing: &Packing) -> Result<Self, Flaw> {
        let mut denominators = BTreeSet::new();
        let mut last = 0;
        let trees = packing.trees.iter();
        let weights = trees.flat_map(|tree| {
            let paths = tree.edges.iter().flat_map(|edge| &edge.paths).map(|path| path.weight);
            paths.chain([tree.weight])
        });
        for weight in weights.chain([packing.rate, packing.bound]) {
            // Most weights have the denominator of the weight before.
            if *weight.denom() != last {
                last = *weight.denom();
                denominators.insert(last);
            }
        }
        let mut denominator: i128 = 1;
        for other in denominators {
            if other < 1 {
                return Err(Flaw::Denominator);
            }
            let multiple = denominator / greatest_divisor(denominator, other);
            denominator =
                multiple.checked_mul(other).filter(|&all| all <= DENOMINATOR_MAX).ok_or(Flaw::Overflow)?;
        }
        Ok(Self { denominator })
    }

    /// A weight in units; `None` if it does not fit.
    fn exact(&self, weight: Rate) -> Option<i128> {
        weight.numer().checked_mul(self.denominator / weight.denom())
    }

    /// A weight in units; `None` if it does not fit or is not positive.
    fn positive(&self, weight: Rate) -> Option<i128> {
        self.exact(weight).filter(|&units| units > 0)
    }

    /// Units as a rate.
    fn rate(&self, units: i128) -> Rate {
        Ratio::new(units, self.denominator)
    }
}

fn greatest_divisor(mut one: i128, mut other: i128) -> i128 {
    while other != 0 {
        (one, other) = (other, one % other);
    }
    one
}

//! Packing of symmetric topologies: one rank of each orbit is packed for all.
//!
//! A [group of automorphisms](super::symmetry) maps the trees of one rank to trees of all other
//! ranks, and loads the links of an orbit evenly. So it suffices to find the trees of one rank of
//! each orbit such that for every orbit of links
//!
//! `Σ weight · uses of the orbit ≤ bandwidth of the orbit / elements of the group`.
//!
//! This loses nothing, because the average of any packing over the group is such a packing. The
//! [rate](best) comes from cuts, with one maximum flow for each orbit of ranks and one more for
//! each cut found. The trees come from a linear program with one row for each orbit of links,
//! solved by column generation ([`master`], [`pricing`]), and are made exact by [`rounding`]. A
//! root has at most as many trees as there are orbits of links and of ranks.
//!
//! For all-reduce the trees are used in both directions, and only the sum of the weights of all
//! trees matters.
//!
//! **Invariant:** weights and loads are exact. Floating point is used only to choose
//! trees. If the exact weights of these trees do not reach the bound, the rate is below the bound.

use std::collections::BTreeMap;

use num_rational::Ratio;
use pleach_vocabulary::{Collective, Rank};

use super::depth::reduce_depth;
use super::digraph::greatest_divisor;
use super::flow::{Amount, Network};
use super::rate::{Bottleneck, signed};
use super::symmetry::{Semiregular, Symmetry};
use super::{Certificate, Edge, Packing, Path, Rate, Tree};
use crate::topology::{NodeId, Topology};
use master::solve_master;
use pricing::{Column, DepthRule, Pricing};
use rounding::{edges_of, rounded_trees};

mod master;
mod pricing;
mod rounding;
#[cfg(test)]
mod tests;

/// How often trees are asked for at rising prices, for each orbit of links, before the program is
/// solved.
const ROUNDS_PER_ORBIT: usize = 2;

/// The surcharges on edges of deep trees that are tried; see [`DepthRule::Surcharged`].
const SURCHARGES: [f64; 3] = [0.5, 0.1, 0.02];

/// Most ranks for which surcharges are tried, and for which trees exchange edges in the end.
const SURCHARGED_RANKS_MAX: u32 = 256;

/// Most ranks. The cost of a tree between each pair of ranks is kept, and each rank has trees of
/// its own.
pub(crate) const SYMMETRIC_RANKS_MAX: u32 = 2_048;

/// Most orbits of links: the linear program keeps a square matrix of them.
const LINK_ORBITS_MAX: usize = 1_024;

/// All-gather or reduce-scatter on a topology with automorphisms. `None` if no group of
/// automorphisms moves every rank, or if the topology has too many ranks or orbits of links.
#[must_use]
pub(crate) fn pack_all_gather(
    topology: &Topology,
    collective: Collective,
    trees_per_root: Option<u32>,
) -> Option<Packing> {
    let is_towards = collective == Collective::ReduceScatter;
    let reversed = is_towards.then(|| topology.reversed());
    let topology = reversed.as_ref().unwrap_or(topology);
    let (symmetry, group) = group_of(topology)?;
    let best = best(topology, &symmetry);
    let mut packed =
        OrbitPacker { topology, group: &group, both_ways: false, per_root: best.rate, trees_per_root }
            .trees();
    if is_towards {
        packed.trees.iter_mut().for_each(Tree::turn);
    }
    let ranks = i128::from(topology.ranks());
    let nodes = (0..topology.nodes().len()).filter(|&node| best.cut[node]).map(|node| NodeId(node as u32));
    let mut packing = Packing {
        collective,
        rate: packed.per_root * ranks,
        bound: best.rate * ranks,
        certificate: Certificate::Cut { nodes: nodes.collect() },
        trees: packed.trees,
    };
    if !packed.is_shallow && topology.ranks() <= SURCHARGED_RANKS_MAX {
        reduce_depth(&mut packing, topology);
    }
    Some(packing)
}

/// All-reduce on a topology with automorphisms, at most at this rate. Links must carry as much in
/// both directions. `None` if no group of automorphisms moves every rank, or if the topology has
/// too many ranks or orbits of links.
#[must_use]
pub(crate) fn pack_all_reduce(
    topology: &Topology,
    bound: Rate,
    certificate: Certificate,
    trees_per_root: Option<u32>,
) -> Option<Packing> {
    let (_, group) = group_of(topology)?;
    // The roots of trees do not matter, so trees of one orbit of roots are enough.
    let per_root = bound / i128::from(group.elements().len() as u32);
    let mut packed =
        OrbitPacker { topology, group: &group, both_ways: true, per_root, trees_per_root }.trees();
    packed.trees.iter_mut().for_each(Tree::turn);
    let rate = packed.trees.iter().map(|tree| tree.weight).sum();
    let mut packing =
        Packing { collective: Collective::AllReduce, rate, bound, certificate, trees: packed.trees };
    if !packed.is_shallow && topology.ranks() <= SURCHARGED_RANKS_MAX {
        reduce_depth(&mut packing, topology);
    }
    Some(packing)
}

fn group_of(topology: &Topology) -> Option<(Symmetry, Semiregular)> {
    if !(2..=SYMMETRIC_RANKS_MAX).contains(&topology.ranks()) {
        return None;
    }
    let symmetry = Symmetry::of(topology);
    let group = (!symmetry.is_trivial()).then(|| Semiregular::of(topology, &symmetry))?;
    let is_worth_it = group.elements().len() > 1 && group.link_orbit_sizes().len() <= LINK_ORBITS_MAX;
    is_worth_it.then_some((symmetry, group))
}

/// The largest rate at which all ranks can send to all others at once, by Newton's steps on
/// violated cuts. There is one flow for each orbit of ranks and one more for each cut found. There
/// must be at least two ranks.
fn best(topology: &Topology, symmetry: &Symmetry) -> Bottleneck {
    let ranks = i128::from(topology.ranks());
    let source = topology.nodes().len();
    let unit = topology.links().iter().fold(0, |unit, link| greatest_divisor(unit, link.bytes_per_s.into()));
    let mut network = Network::new(source + 1);
    let capacity = |bytes_per_s: u64| Amount::from(bytes_per_s) / unit;
    let mut arcs = Vec::with_capacity(topology.links().len());
    for link in topology.links() {
        arcs.push(network.add(link.from.0 as usize, link.to.0 as usize, 0, 0));
    }
    let supplies: Vec<_> =
        (0..topology.ranks()).map(|rank| network.add(source, topology.node(rank).0 as usize, 0, 0)).collect();
    let value = |cut: &[bool]| {
        let leaves =
            topology.links().iter().filter(|link| cut[link.from.0 as usize] && !cut[link.to.0 as usize]);
        let inside = (0..topology.ranks()).filter(|&rank| cut[topology.node(rank).0 as usize]).count();
        Ratio::new(leaves.map(|link| signed(capacity(link.bytes_per_s))).sum::<i128>(), inside as i128)
    };
    let all_but =
        |rank: Rank| (0..source).map(|node| node != topology.node(rank).0 as usize).collect::<Vec<_>>();
    let representatives = symmetry.rank_representatives(topology);
    let firsts =
        representatives.iter().map(|&rank| all_but(rank)).map(|cut| Bottleneck { rate: value(&cut), cut });
    let mut best = firsts.min_by_key(|best| best.rate).expect("there is a rank");
    let rescale = |network: &mut Network, rate: Rate| {
        let (supply, scale) = (rate.numer().unsigned_abs(), rate.denom().unsigned_abs());
        for (&arc, link) in arcs.iter().zip(topology.links()) {
            network.set_capacity(arc, capacity(link.bytes_per_s) * scale);
        }
        supplies.iter().for_each(|&arc| _ = network.set_capacity(arc, supply));
    };
    rescale(&mut network, best.rate);
    for rank in representatives {
        loop {
            let wanted = (best.rate.numer() * ranks).unsigned_abs();
            if network.max_flow_value(source, topology.node(rank).0 as usize, wanted) == wanted {
                break;
            }
            let cut: Vec<bool> = (0..source).map(|node| network.is_source_side(node)).collect();
            best = Bottleneck { rate: value(&cut), cut };
            rescale(&mut network, best.rate);
        }
    }
    Bottleneck { rate: best.rate * signed(unit), cut: best.cut }
}

/// The packing problem for one rank of each orbit.
struct OrbitPacker<'t> {
    topology: &'t Topology,
    group: &'t Semiregular,
    both_ways: bool,
    /// The rate aimed for.
    per_root: Rate,
    trees_per_root: Option<u32>,
}

/// Trees, and the rate that every root reaches.
struct OrbitTrees {
    trees: Vec<Tree>,
    per_root: Rate,
    /// Whether every rank of every tree has the least possible depth.
    is_shallow: bool,
}

impl OrbitPacker<'_> {
    fn trees(&self) -> OrbitTrees {
        let Self { topology, group, both_ways, per_root, .. } = *self;
        let mut bandwidth = vec![Rate::default(); group.link_orbit_sizes().len()];
        for (index, link) in topology.links().iter().enumerate() {
            bandwidth[group.link_orbit(index)] += i128::from(link.bytes_per_s);
        }
        let elements = group.elements().len() as i128;
        let carries: Vec<Rate> = bandwidth.into_iter().map(|all| all / elements / per_root).collect();
        let in_floats: Vec<f64> =
            carries.iter().map(|&one| *one.numer() as f64 / *one.denom() as f64).collect();
        let groups = if both_ways { 1 } else { group.representatives().len() };
        let pricing = Pricing::new(topology, group, both_ways);
        let rounds = ROUNDS_PER_ORBIT * carries.len();
        let solve = |depth| {
            solve_master(&in_floats, groups, rounds, |orbit, prices| {
                pricing.cheapest_tree(orbit, prices, depth)
            })
        };
        let is_small = topology.ranks() <= SURCHARGED_RANKS_MAX;
        let surcharges = SURCHARGES.iter().filter(|_| is_small).map(|&part| DepthRule::Surcharged(part));
        let depth =
            [DepthRule::Least].into_iter().chain(surcharges).map(solve).find(|solution| solution.fits);
        let solution = depth.unwrap_or_else(|| solve(DepthRule::Surcharged(0.0)));
        let (columns, load) = rounded_trees(&pricing, &carries, groups, &solution, self.trees_per_root);
        let is_shallow = columns.iter().all(|(column, _)| pricing.is_shallowest(column));
        let per_root = per_root / load;
        let mut trees = Vec::new();
        for (columns, part) in grouped_by_edges(columns) {
            let elements = 0..group.elements().len();
            trees.extend(elements.map(|element| self.image(&columns, element, part, per_root)));
        }
        trees.sort_by_key(|tree| tree.root);
        OrbitTrees { trees, per_root, is_shallow }
    }

    /// The image of a tree under an element of the group. The columns of the tree differ only in
    /// the paths of their edges.
    fn image(&self, columns: &[(Column, Rate)], element: usize, part: Rate, per_root: Rate) -> Tree {
        let images = &self.group.elements()[element];
        let image = |rank: Rank| {
            let image = NodeId(images.of(self.topology.node(rank).0));
            self.topology.rank(image).expect("an automorphism carries ranks to ranks")
        };
        let first = &columns[0].0;
        let mut edges = Vec::with_capacity(first.edges.len());
        for (place, &(from, to, _)) in first.edges.iter().enumerate() {
            let mut paths: Vec<Path> = Vec::with_capacity(columns.len());
            for (column, part) in columns {
                let hops: Vec<NodeId> =
                    column.edges[place].2.iter().map(|&node| NodeId(images.of(node))).collect();
                let weight = part * per_root;
                match paths.iter_mut().find(|path| path.hops == hops) {
                    Some(path) => path.weight += weight,
                    None => paths.push(Path { hops, weight }),
                }
            }
            edges.push(Edge { from: image(from), to: image(to), paths });
        }
        Tree { root: image(self.group.representatives()[first.orbit]), weight: part * per_root, edges }
    }
}

/// The columns by their edges.
type ColumnsByEdges = BTreeMap<(usize, Vec<(Rank, Rank)>), Vec<(Column, Rate)>>;

/// The columns grouped by their edges, with the sum of the weights of each group. A group is one
/// tree, whose edges follow the paths of all its columns.
fn grouped_by_edges(columns: Vec<(Column, Rate)>) -> Vec<(Vec<(Column, Rate)>, Rate)> {
    let mut grouped_by_edges = ColumnsByEdges::new();
    for (column, part) in columns.into_iter().filter(|(_, part)| *part.numer() != 0) {
        grouped_by_edges.entry(edges_of(&column)).or_default().push((column, part));
    }
    let sum = |columns: &Vec<(Column, Rate)>| columns.iter().map(|(_, part)| part).sum();
    grouped_by_edges
        .into_values()
        .map(|columns| (sum(&columns), columns))
        .map(|(sum, columns)| (columns, sum))
        .collect()
}

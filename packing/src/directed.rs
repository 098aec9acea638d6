//! Broadcast, reduce, all-gather and reduce-scatter: trees along which data move in one direction.
//!
//! The demand gives the roots of the trees: the root of a broadcast, or every rank equally for an
//! all-gather. [`best_rate`] gives the rate and the certificate. Capacities are scaled until the
//! rate is an integer number of trees. Then trees are [extracted](super::extraction), or switches
//! are removed and arborescences are packed. At last the [depth](super::depth) of the trees is
//! reduced. Reduce and reduce-scatter are packed on reversed links, and their trees are reversed.
//!
//! The result is optimal if every switch can be balanced at the rate that cuts allow. This holds if
//! links carry as much in both directions. In all other cases the rate is the best that was found,
//! and the bound is that of cuts.

use std::collections::BTreeMap;

use pleach_vocabulary::{Collective, Rank};

use super::MAX_TREES_PER_ROOT;
use super::balance::{balanced, over_shortest_paths};
use super::depth::reduce_depth;
use super::digraph::Digraph;
use super::extraction::{self, RoutedTree};
use super::flow::Amount;
use super::rate::{Bottleneck, best_equal_weight, best_rate, signed, whole_trees};
use super::{Certificate, Edge, Packing, Path, Rate, Tree};
use crate::topology::{NodeId, Topology};

/// Packs trees from a root to all ranks (broadcast), from all ranks to a root (reduce), from every
/// rank (all-gather) or to every rank (reduce-scatter). Every root has `trees_per_root` trees of
/// equal weight, or as many as the optimum needs.
///
/// # Panics
///
/// When there are fewer than two ranks, the root is none of them, or `collective` is another one.
#[must_use]
pub(crate) fn pack_directed(
    topology: &Topology,
    collective: Collective,
    trees_per_root: Option<u32>,
) -> Packing {
    let ranks = topology.ranks() as usize;
    let (direction, is_towards) = match collective {
        Collective::Broadcast { root } => (demand_of_root(ranks, root), false),
        Collective::Reduce { root } => (demand_of_root(ranks, root), true),
        Collective::AllGather => (vec![1; ranks], false),
        Collective::ReduceScatter => (vec![1; ranks], true),
        _ => panic!("{collective} does not go one way along trees"),
    };
    let (graph, unit) = Digraph::of(topology);
    let graph = if is_towards { graph.reversed() } else { graph };
    let best = best_rate(&graph, &direction).expect("there are two ranks and something to send");
    let unit = Rate::from_integer(signed(unit));
    let trees = Forest::new(&graph, &direction, best.rate, trees_per_root).trees(unit, is_towards);
    let rate = trees.iter().map(|tree| tree.weight).sum();
    let blocks = Rate::from_integer(signed(direction.iter().sum()));
    let bound = best.rate * blocks * unit;
    let mut packing = Packing { collective, rate, bound, certificate: certificate(best), trees };
    reduce_depth(&mut packing, topology);
    packing
}

fn demand_of_root(ranks: usize, root: Rank) -> Vec<Amount> {
    (0..ranks).map(|rank| Amount::from(rank == root as usize)).collect()
}

/// The cut as a certificate.
pub(super) fn certificate(best: Bottleneck) -> Certificate {
    let nodes = best.cut.iter().enumerate().filter(|(_, inside)| **inside);
    Certificate::Cut { nodes: nodes.map(|(node, _)| NodeId(node as u32)).collect() }
}

/// Trees with the paths of their edges. `unit` is the weight of one tree, in units of capacity.
pub(super) struct Forest {
    pub(super) unit: Rate,
    pub(super) trees: Vec<RoutedTree>,
}

/// Trees at the best rate; if a root would have too many, the best trees of equal weight.
fn best_forest(graph: &Digraph, direction: &[Amount], best: Rate) -> Forest {
    let exact = forest_at(graph, direction, best).unwrap_or_else(|| lower_forest(graph, direction, best));
    if exact.trees_per_root() <= MAX_TREES_PER_ROOT as usize {
        return exact;
    }
    let weight = |count: u32| {
        let demand = scaled(direction, count.into());
        best_equal_weight(graph, &demand, best / Rate::from_integer(count.into()))
            .map_or(Rate::default(), |units| units.tree * Rate::from_integer(count.into()))
    };
    // Of several equally good counts, the smallest is taken.
    let count = (1..=MAX_TREES_PER_ROOT).rev().max_by_key(|&count| weight(count)).unwrap_or(1);
    equal_trees(graph, direction, best, count)
}

/// Trees at a rate; `None` if switches cannot be balanced at it.
fn forest_at(graph: &Digraph, direction: &[Amount], rate: Rate) -> Option<Forest> {
    let (trees, parts) = (rate.numer().unsigned_abs(), rate.denom().unsigned_abs());
    let graph = graph.map(|_, _, capacity| capacity * parts);
    pack_forest(&graph, &scaled(direction, trees), Rate::new(1, *rate.denom()), true)
}

/// Trees at the largest fraction of the rate at which switches could be balanced.
fn lower_forest(graph: &Digraph, direction: &[Amount], best: Rate) -> Forest {
    let paths = shortest_path_forest(graph, direction, 1);
    highest_feasible(best, paths, |rate| forest_at(graph, direction, rate))
}

/// `count` trees of equal weight for each unit of demand, at the largest weight at which switches
/// could be balanced.
fn equal_trees(graph: &Digraph, direction: &[Amount], best: Rate, count: u32) -> Forest {
    let demand = scaled(direction, count.into());
    let best = best_equal_weight(graph, &demand, best / Rate::from_integer(count.into()));
    let best = best.expect("there are two ranks and something to send");
    pack_forest(&best.graph, &demand, best.tree, false).unwrap_or_else(|| {
        let total = demand.iter().sum();
        let paths = shortest_path_forest(graph, direction, count.into());
        highest_feasible(best.tree, paths, |tree| {
            pack_forest(&whole_trees(graph, tree, total), &demand, tree, false)
        })
    })
}

/// Number of steps of the search if the best rate is out of reach.
const RATE_STEPS: i128 = 64;

/// The forest at the highest feasible fraction of a rate, by bisection; `least` if it is at least
/// as good.
fn highest_feasible(best: Rate, least: Forest, forest_at: impl Fn(Rate) -> Option<Forest>) -> Forest {
    let (mut low, mut high) = (0, RATE_STEPS);
    let mut found = None;
    while high - low > 1 {
        let middle = i128::midpoint(low, high);
        let rate = best * Rate::new(middle, RATE_STEPS);
        match forest_at(rate) {
            Some(forest) => (found, low) = (Some((rate, forest)), middle),
            None => high = middle,
        }
    }
    match found {
        // In the forest over shortest paths, the unit is the rate for each unit of demand.
        Some((rate, forest)) if rate >= least.unit => forest,
        _ => least,
    }
}

/// Trees over shortest paths.
fn shortest_path_forest(graph: &Digraph, direction: &[Amount], count: Amount) -> Forest {
    let demand = scaled(direction, count);
    let loads = over_shortest_paths(graph, &demand);
    let load: BTreeMap<(usize, usize), Amount> =
        loads.edges().iter().map(|&(from, to, load)| ((from, to), load)).collect();
    let shares = graph.edges().iter().filter_map(|&(from, to, capacity)| {
        load.get(&(from, to)).map(|&load| Rate::new(signed(capacity), signed(load)))
    });
    let unit = shares.min().expect("something is sent");
    pack_forest(&loads, &demand, unit, false).expect("what goes over paths is balanced and enough")
}

fn scaled(direction: &[Amount], factor: Amount) -> Vec<Amount> {
    direction.iter().map(|amount| amount * factor).collect()
}

/// Trees that meet a demand, or parts of such trees; `None` if switches cannot be balanced.
fn pack_forest(graph: &Digraph, demand: &[Amount], unit: Rate, can_part: bool) -> Option<Forest> {
    let part = if graph.is_balanced() { None } else { Some(balanced(graph, demand)?) };
    let extracted = extraction::pack(part.as_ref().unwrap_or(graph), demand, can_part)?;
    Some(Forest { unit: unit / Rate::from_integer(signed(extracted.parts)), trees: merged(extracted.trees) })
}

/// Merges trees with the same root and edges.
pub(super) fn merged(trees: Vec<RoutedTree>) -> Vec<RoutedTree> {
    let mut places: BTreeMap<(Rank, Vec<(Rank, Rank)>), usize> = BTreeMap::new();
    let mut merged: Vec<RoutedTree> = Vec::with_capacity(trees.len());
    for mut tree in trees {
        let mut sorted = tree.edges.clone();
        sorted.sort_unstable();
        let ends = sorted.iter().map(|&(from, to, _)| (from, to)).collect();
        let place = *places.entry((tree.root, ends)).or_insert(merged.len());
        let Some(same) = merged.get_mut(place) else {
            merged.push(tree);
            continue;
        };
        same.amount += tree.amount;
        for (from, to, paths) in &mut same.edges {
            let more = tree.edges.iter_mut().find(|edge| (edge.0, edge.1) == (*from, *to));
            let (.., more) = more.expect("it has the same edges");
            for (nodes, amount) in more.drain(..) {
                match paths.iter_mut().find(|path| path.0 == nodes) {
                    Some(path) => path.1 += amount,
                    None => paths.push((nodes, amount)),
                }
            }
        }
    }
    merged
}

impl Forest {
    /// Trees from each rank in proportion to `direction`, whose best rate is `best`. There are
    /// `count` trees of equal weight for each unit of `direction`, or as many as the rate needs.
    pub(super) fn new(graph: &Digraph, direction: &[Amount], best: Rate, count: Option<u32>) -> Self {
        match count {
            Some(count) => equal_trees(graph, direction, best, count),
            None => best_forest(graph, direction, best),
        }
    }

    /// The largest number of trees of a single root.
    fn trees_per_root(&self) -> usize {
        let mut counts: BTreeMap<Rank, usize> = BTreeMap::new();
        self.trees.iter().for_each(|tree| *counts.entry(tree.root).or_default() += 1);
        counts.into_values().max().unwrap_or(0)
    }

    /// The trees over physical links, with weights in bytes a second. A unit of capacity is `unit`.
    /// With `is_towards` the trees are reversed.
    pub(super) fn trees(self, unit: Rate, is_towards: bool) -> Vec<Tree> {
        let one = self.unit * unit;
        let weight = |amount: Amount| one * Rate::from_integer(signed(amount));
        let mut trees = Vec::with_capacity(self.trees.len());
        for RoutedTree { root, amount, edges } in self.trees {
            let edges = edges.into_iter().map(|(from, to, paths)| {
                let paths = paths.into_iter().map(|(nodes, amount)| Path {
                    hops: nodes.into_iter().map(|node| NodeId(node as u32)).collect(),
                    weight: weight(amount),
                });
                Edge { from, to, paths: paths.collect() }
            });
            let mut tree = Tree { root, weight: weight(amount), edges: edges.collect() };
            if is_towards {
                tree.turn();
            }
            trees.push(tree);
        }
        trees
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::samples;
    use crate::samples::{Links, Random, best_by_enumeration};
    use crate::topology::preset;
    use crate::{PackOptions, check, pack};

    /// The least bound of all cuts, which no packing exceeds.
    fn bound(topology: &Topology, collective: Collective) -> Rate {
        let (graph, unit) = Digraph::of(topology);
        let ranks = topology.ranks() as usize;
        let (graph, demand) = match collective {
            Collective::Broadcast { root } => (graph, demand_of_root(ranks, root)),
            Collective::Reduce { root } => (graph.reversed(), demand_of_root(ranks, root)),
            Collective::AllGather => (graph, vec![1; ranks]),
            _ => (graph.reversed(), vec![1; ranks]),
        };
        let blocks: Amount = demand.iter().sum();
        best_by_enumeration(&graph, &demand) * Rate::from_integer(signed(blocks * unit))
    }

    fn one_way_collectives(root: Rank) -> [Collective; 4] {
        [
            Collective::Broadcast { root },
            Collective::Reduce { root },
            Collective::AllGather,
            Collective::ReduceScatter,
        ]
    }

    fn random_topology(random: &mut Random, links: Links) -> Topology {
        let switches = random.below(2) * 4;
        samples::topology(&samples::graph(random, 6, switches, links))
    }

    #[test]
    fn the_optimum_is_packed_wherever_switches_are_balanced() {
        let mut random = Random::new(41);
        let mut limited = 0;
        for round in 0..150 {
            let topology = random_topology(&mut random, [Links::Duplex, Links::Balanced][round % 2]);
            for collective in one_way_collectives(random.below(topology.ranks().into()) as Rank) {
                let packing = pack_directed(&topology, collective, None);
                check(&topology, &packing).unwrap_or_else(|flaw| panic!("{collective} {topology:?}: {flaw}"));
                assert_eq!(packing.bound, bound(&topology, collective), "{topology:?}");
                // If bandwidths are large and odd, the optimum may need more trees than a root may
                // have.
                let is_full = packing.trees.len() > MAX_TREES_PER_ROOT as usize / 2;
                assert!(packing.is_optimal() || is_full, "{collective} {topology:?}");
                limited += u32::from(!packing.is_optimal());
            }
        }
        assert!(limited < 30, "{limited}");
    }

    #[test]
    fn the_bound_is_right_and_the_gap_is_stated_where_switches_are_not_balanced() {
        let mut random = Random::new(42);
        let (mut optimal, mut all) = (0, 0);
        for _ in 0..100 {
            let topology = random_topology(&mut random, Links::Any);
            for collective in one_way_collectives(random.below(topology.ranks().into()) as Rank) {
                let packing = pack_directed(&topology, collective, None);
                check(&topology, &packing).unwrap_or_else(|flaw| panic!("{collective} {topology:?}: {flaw}"));
                assert_eq!(packing.bound, bound(&topology, collective), "{topology:?}");
                assert!(packing.rate > Rate::default());
                optimal += u32::from(packing.is_optimal());
                all += 1;
            }
        }
        assert!(optimal * 10 > all * 7, "{optimal} of {all}");
    }

    #[test]
    fn every_root_has_the_number_of_trees_that_was_asked_for() {
        let mut random = Random::new(43);
        for round in 0..60 {
            let topology =
                random_topology(&mut random, [Links::Duplex, Links::Balanced, Links::Any][round % 3]);
            let count = 1 + random.below(4) as u32;
            for collective in one_way_collectives(0) {
                let packing = pack_directed(&topology, collective, Some(count));
                check(&topology, &packing).unwrap_or_else(|flaw| panic!("{collective} {topology:?}: {flaw}"));
                let roots = if collective.root().is_some() { 1 } else { topology.ranks() };
                let one = packing.rate / Rate::from_integer((roots * count).into());
                assert!(packing.trees.iter().all(|tree| (tree.weight / one).is_integer()), "{packing:?}");
                let exact = pack_directed(&topology, collective, None);
                assert_eq!(exact.bound, packing.bound);
                assert!(packing.rate <= packing.bound);
            }
        }
    }

    /// The rates of presets in GB/s: broadcast, all-gather, and all-gather with one tree a root.
    fn rates(name: &str) -> [Rate; 3] {
        let topology = preset(name).unwrap();
        let asked = [
            (Collective::Broadcast { root: 0 }, None),
            (Collective::AllGather, None),
            (Collective::AllGather, Some(1)),
        ];
        asked.map(|(collective, trees_per_root)| {
            let options = PackOptions { trees_per_root, ..PackOptions::default() };
            let packing = pack(&topology, collective, &options).unwrap();
            check(&topology, &packing).unwrap();
            assert!(packing.is_optimal() || trees_per_root.is_some());
            packing.rate / Rate::from_integer(1_000_000_000)
        })
    }

    #[test]
    fn machines_reach_what_is_known_of_them() {
        let [rate, trees_in] = [Rate::new, |rate, _| Rate::from_integer(rate)];
        assert_eq!(rates("dgx-1v")[..2], [trees_in(150, 1), rate(1200, 7)]);
        assert_eq!(rates("dgx-1p")[..2], [trees_in(80, 1), rate(640, 7)]);
        assert_eq!(rates("dgx-a100:1")[1], rate(2400, 7));
        assert_eq!(rates("dgx-a100:2"), [trees_in(200, 1), rate(1040, 3), rate(2400, 7)]);
        assert_eq!(rates("mi250:1")[1..], [rate(2400, 7), rate(800, 3)]);
    }

    #[test]
    fn a_broadcast_has_whole_trees_of_links() {
        let topology = preset("dgx-1v").unwrap();
        let packing = pack_directed(&topology, Collective::Broadcast { root: 3 }, None);
        let link = Rate::from_integer(25_000_000_000);
        assert!(packing.trees.iter().all(|tree| (tree.weight / link).is_integer()), "{packing:?}");
        assert_eq!(packing.rate, link * Rate::from_integer(6));
    }
}

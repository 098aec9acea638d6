//! The best rate, and the bottleneck cut that proves it (ForestColl, section 5.1).
//!
//! With `d` unit trees for each rank, scaled by a rate x, trees exist while every cut S that lacks
//! a rank carries x·d(S). So the optimum is min `B⁺(S)`/d(S). [`best_rate`] finds it by Newton's
//! method on violated cuts (Dinkelbach 1967): the first rate comes from cuts around single ranks,
//! and each violated cut that a maximum flow finds gives the next rate. Rates only fall, so a
//! satisfied rank stays satisfied. There is one flow for each rank and one more for each cut found,
//! and the last cut is the certificate.
//!
//! [`best_equal_weight`] is the same for a given number of trees of equal weight (ForestColl's
//! fixed k): the largest weight of a tree such that the integer numbers of trees that links can
//! carry suffice.

use std::collections::BTreeSet;

use super::Rate;
use super::digraph::{DemandNetwork, Digraph};
use super::flow::Amount;

/// The optimal rate and the cut that proves it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Bottleneck {
    /// The rate for each unit of demand.
    pub rate: Rate,
    /// By node: whether it is inside the bottleneck cut.
    pub cut: Vec<bool>,
}

/// An amount as an integer of a rate.
///
/// # Panics
///
/// If the amount is too large for a rate. No amount of a topology is that large.
#[must_use]
pub(crate) fn signed(amount: Amount) -> i128 {
    i128::try_from(amount).expect("capacities of a topology stay far below 127 bits")
}

fn unsigned(value: i128) -> Amount {
    Amount::try_from(value).expect("rates are not negative")
}

/// The rate of a cut: its capacity divided by the demand inside. `None` if there is no demand
/// inside.
fn rate_of(graph: &Digraph, demand: &[Amount], cut: &[bool]) -> Option<Rate> {
    let inside: Amount =
        graph.ranks().iter().zip(demand).filter(|(rank, _)| cut[**rank]).map(|(_, amount)| amount).sum();
    (inside > 0).then(|| Rate::new(signed(graph.leaving(|node| cut[node])), signed(inside)))
}

/// The largest rate x such that every rank can send x times its demand to all other ranks at once.
/// It is in units of capacity for each unit of demand. `None` with fewer than two ranks or no
/// demand.
///
/// # Panics
///
/// When there are not as many demands as ranks.
#[must_use]
pub(crate) fn best_rate(graph: &Digraph, demand: &[Amount]) -> Option<Bottleneck> {
    let mut best = around_single_ranks(graph, demand)?;
    let mut supply = DemandNetwork::new(graph, demand);
    let rescale = |supply: &mut DemandNetwork, rate: Rate| {
        let (per_demand, factor) = (unsigned(*rate.numer()), unsigned(*rate.denom()));
        supply.rescale(graph, factor, demand.iter().map(|amount| amount * per_demand));
    };
    rescale(&mut supply, best.rate);
    for rank in 0..graph.ranks().len() {
        while supply.deficit(rank) > 0 {
            let cut: Vec<bool> = (0..graph.nodes()).map(|node| supply.is_inside(node)).collect();
            let rate = rate_of(graph, demand, &cut).expect("a cut that lacks something has demand inside");
            debug_assert!(rate < best.rate, "a violated cut gives a smaller rate");
            best = Bottleneck { rate, cut };
            rescale(&mut supply, best.rate);
        }
    }
    Some(best)
}

/// The best cut around a single rank, or around all ranks but one: a bound that needs no flow.
pub(super) fn around_single_ranks(graph: &Digraph, demand: &[Amount]) -> Option<Bottleneck> {
    if graph.ranks().len() < 2 {
        return None;
    }
    let degrees = graph.degrees();
    let total: Amount = demand.iter().sum();
    let mut least: Option<(Rate, usize, bool)> = None;
    for (&rank, &amount) in graph.ranks().iter().zip(demand) {
        for (capacity, inside, is_alone) in
            [(degrees[rank].1, amount, true), (degrees[rank].0, total - amount, false)]
        {
            if inside > 0 {
                let rate = Rate::new(signed(capacity), signed(inside));
                if least.is_none_or(|(before, ..)| rate < before) {
                    least = Some((rate, rank, is_alone));
                }
            }
        }
    }
    let (rate, rank, is_alone) = least?;
    Some(Bottleneck { rate, cut: (0..graph.nodes()).map(|node| (node == rank) == is_alone).collect() })
}

/// Capacities as numbers of trees, and the weight of a tree.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct EqualWeight {
    /// The weight of a tree, in units of capacity.
    pub tree: Rate,
    /// The number of trees that each edge carries.
    pub graph: Digraph,
}

/// The largest weight of trees of equal weight with `demand[v]` trees rooted at rank v. `best` is
/// the best rate for this demand. `None` with fewer than two ranks or no demand. Switches may lose
/// their balance if links are not symmetric.
///
/// # Panics
///
/// When there are not as many demands as ranks.
#[must_use]
pub(crate) fn best_equal_weight(graph: &Digraph, demand: &[Amount], best: Rate) -> Option<EqualWeight> {
    let total: Amount = demand.iter().sum();
    let floors = |tree: Rate| whole_trees(graph, tree, total);
    let is_feasible = |tree: Rate| DemandNetwork::new(&floors(tree), demand).is_feasible();
    let capacities: BTreeSet<Amount> = graph.edges().iter().map(|edge| edge.2).collect();
    if total == 0 || graph.ranks().len() < 2 || is_feasible(best) {
        return (total > 0 && graph.ranks().len() > 1)
            .then(|| EqualWeight { tree: best, graph: floors(best) });
    }
    // With this weight every edge carries all trees, so they can be packed.
    let mut low = Rate::new(signed(*capacities.first()?), signed(total));
    let mut high = best;
    let half = Rate::new(1, 2);
    while count_between(&capacities, low, high, total) > CANDIDATES_MAX {
        // Repeated halving would give larger and larger denominators. A rate near the middle serves
        // as well.
        let middle = neighbour((low + high) * half, low, high);
        *(if is_feasible(middle) { &mut low } else { &mut high }) = middle;
    }
    // The largest feasible weight makes some edge carry an integer number of trees.
    let mut candidates = vec![low];
    for &capacity in &capacities {
        let counts = trees_in(capacity, high).max(1)..=trees_in(capacity, low).min(total);
        let weights = counts.map(|count| Rate::new(signed(capacity), signed(count)));
        candidates.extend(weights.filter(|&tree| tree > low && tree < high));
    }
    candidates.sort_unstable();
    candidates.dedup();
    let tree = candidates[candidates.partition_point(|&tree| is_feasible(tree)) - 1];
    Some(EqualWeight { tree, graph: floors(tree) })
}

/// The number of trees of a weight that each edge carries, at most `total`.
#[must_use]
pub(crate) fn whole_trees(graph: &Digraph, tree: Rate, total: Amount) -> Digraph {
    graph.map(|_, _, capacity| trees_in(capacity, tree).min(total))
}

/// Number of candidate weights that are tried without halving the range first.
const CANDIDATES_MAX: Amount = 16;

/// An upper bound of the number of weights between two at which some edge carries an integer number
/// of trees.
fn count_between(capacities: &BTreeSet<Amount>, low: Rate, high: Rate, total: Amount) -> Amount {
    let count =
        |&capacity: &Amount| trees_in(capacity, low).min(total).saturating_sub(trees_in(capacity, high));
    capacities.iter().map(count).sum()
}

/// A rate between two others that has a small denominator and is near to `middle`.
fn neighbour(middle: Rate, low: Rate, high: Rate) -> Rate {
    let mut denominator = 1_i128;
    loop {
        let near = Rate::new((middle * denominator).round().to_integer(), denominator);
        if low < near && near < high {
            return near;
        }
        denominator *= 2;
    }
}

/// The number of trees of a weight that fit into a capacity.
fn trees_in(capacity: Amount, tree: Rate) -> Amount {
    unsigned(signed(capacity) * tree.denom() / tree.numer())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::samples::{Links, Random, best_by_enumeration, demand, graph};

    #[test]
    fn the_best_rate_is_the_least_of_all_cuts_and_its_cut_gives_it() {
        let mut random = Random::new(11);
        for round in 0..600 {
            let graph = graph(&mut random, 6, 3, [Links::Duplex, Links::Any][round % 2]);
            let demand = demand(&mut random, &graph);
            let best = best_rate(&graph, &demand).unwrap();
            assert_eq!(best.rate, best_by_enumeration(&graph, &demand), "{graph:?} {demand:?}");
            assert_eq!(rate_of(&graph, &demand, &best.cut), Some(best.rate));
            assert!(graph.ranks().iter().any(|&rank| !best.cut[rank]));
        }
    }

    #[test]
    fn whole_trees_have_the_largest_weight_that_fits() {
        let mut random = Random::new(12);
        for _ in 0..300 {
            let graph = graph(&mut random, 5, 2, Links::Duplex);
            let demand = demand(&mut random, &graph);
            let total: Amount = demand.iter().sum();
            let best = best_rate(&graph, &demand).unwrap().rate;
            let units = best_equal_weight(&graph, &demand, best).unwrap();
            let enough = |tree: Rate| {
                let floors = graph.map(|_, _, capacity| trees_in(capacity, tree).min(total));
                best_by_enumeration(&floors, &demand) >= Rate::from_integer(1)
            };
            assert!(units.tree <= best && enough(units.tree), "{graph:?} {demand:?}");
            let counts =
                |capacity: Amount| (1..=total).map(move |count| Rate::new(signed(capacity), signed(count)));
            let better = graph.edges().iter().flat_map(|edge| counts(edge.2));
            assert!(
                better.filter(|&tree| tree > units.tree).all(|tree| !enough(tree)),
                "{graph:?} {demand:?}"
            );
        }
    }

    #[test]
    fn one_rank_or_nothing_to_send_has_no_rate() {
        let alone = Digraph::new(1, vec![0], []);
        assert_eq!(best_rate(&alone, &[1]), None);
        let pair = Digraph::new(2, vec![0, 1], [(0, 1, 1), (1, 0, 1)]);
        assert_eq!(
            (best_rate(&pair, &[0, 0]), best_equal_weight(&pair, &[0, 0], Rate::from_integer(1))),
            (None, None)
        );
    }
}

//! Trees of short ways first, the exact machinery for what they leave.
//!
//! Splitting off switches and growing trees edge by edge ([`split`], [`trees`]) always finds trees
//! that carry everything, but rarely shallow ones, and asks for many flows. So first whole trees
//! are *peeled*: a tree of short ways is guessed, and as much of it is taken as leaves the rest
//! possible. Trees can be packed while every set X of nodes with a rank has
//!
//! ```text
//! slack(X) = demand in X + what enters X - sum of demands ≥ 0
//! ```
//!
//! and a tree of weight a that enters X e times lowers that by a·(e + [its root is in X] - 1),
//! which is never negative. A flow to every rank finds the sets that limit a, or else none does.
//! Sets that were found are remembered with their slack: the next tree that would enter one once
//! too often goes another way. A tree takes as much from a switch as it gives it, so what is left
//! can be peeled again, or split.
//!
//! Ways are as short as possible, counting one for each link and one for each edge; of ranks that
//! are equally far that which can pass most on is reached first, of equally short ways that over
//! the least used links is taken. A single root does better with some trees than with one: several
//! numbers of trees are tried, and the shallowest result is taken; parts of unit trees only where
//! one whole tree would do and be deeper by a third.
//!
//! **Invariant:** what is left can be packed, and with the trees that were peeled makes up all that
//! there was.

use pleach_vocabulary::Rank;

use super::Rate;
use super::digraph::Digraph;
use super::flow::Amount;
use super::search::signed;
use super::split::{self, Way};
use super::trees;

mod peeler;

use peeler::Peeler;

/// How many trees a single root is to have, at least, where that makes them shallower; and as many
/// as there are other ranks.
const AIMS: [Amount; 2] = [4, 16];
/// The most of them.
const AIM_MAX: Amount = 32;

/// Equal trees, and where their edges go.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Routed {
    /// Where they begin.
    pub(super) root: Rank,
    /// How many they are.
    pub(super) amount: Amount,
    /// From the root outwards, with ways that carry the amount together.
    pub(super) edges: Vec<(Rank, Rank, Vec<Way>)>,
}

/// Trees, of which so many together make one unit tree of what was asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Peeled {
    pub(super) parts: Amount,
    pub(super) trees: Vec<Routed>,
}

/// Packs `demand[v]` unit trees from every rank v to all others, shallow ones where possible. With
/// `can_part` they may be parts of unit trees, if that makes them shallower. None where they cannot
/// be packed, or where not as much enters as leaves some switch.
///
/// # Panics
///
/// When there are not as many demands as ranks.
pub(super) fn pack(graph: &Digraph, demand: &[Amount], can_part: bool) -> Option<Peeled> {
    if !graph.is_balanced() || !Peeler::new(graph, demand, 1).is_enough() {
        return None;
    }
    let mut best = pack_parts(graph, demand, 1, 1)?;
    let mut least = Depth::of(&best, demand.len());
    let is_one_root = demand.iter().filter(|&&amount| amount > 0).count() == 1;
    if can_part && is_one_root {
        let others = graph.ranks().len() as Amount - 1;
        let aims: Vec<Amount> = AIMS.into_iter().filter(|&aim| aim < others).chain([others]).collect();
        let total: Amount = demand.iter().sum();
        let ways = aims.iter().flat_map(|&aim| [(1, aim), (aim.min(AIM_MAX), aim.min(AIM_MAX))]);
        for (parts, aim) in ways.filter(|&(parts, aim)| parts > 1 || aim <= total) {
            let peeled = pack_parts(graph, demand, parts, aim)?;
            let depth = Depth::of(&peeled, demand.len());
            // Several whole trees are worth more than some depth, and a whole tree than a little.
            let is_worth_it = parts == best.parts || (total == 1 && depth.most * 4 <= least.most * 3);
            if depth < least && is_worth_it {
                (least, best) = (depth, peeled);
            }
        }
    }
    Some(best)
}

/// Whole trees of short ways from every rank, as many as are found without the exact machinery: no
/// more than `demand[v]` from v, of which each aims at the `aim`th part. None where not as much
/// enters as leaves some switch, or the demands cannot be met.
///
/// # Panics
///
/// When there are not as many demands as ranks.
pub(super) fn peel(graph: &Digraph, demand: &[Amount], aim: Amount) -> Option<Vec<Routed>> {
    let mut peeler = Peeler::new(graph, demand, aim);
    if !graph.is_balanced() || !peeler.is_enough() {
        return None;
    }
    peeler.peel();
    Some(peeler.peeled)
}

/// Packs with trees of which so many make a unit tree, of which each root is to have so many.
fn pack_parts(graph: &Digraph, demand: &[Amount], parts: Amount, aim: Amount) -> Option<Peeled> {
    let graph = &graph.map(|_, _, capacity| capacity * parts);
    let demand: Vec<Amount> = demand.iter().map(|amount| amount * parts).collect();
    let mut peeler = Peeler::new(graph, &demand, aim);
    peeler.peel();
    let Peeler { residuals, demand: rest, peeled: mut trees, .. } = peeler;
    if rest.iter().any(|&amount| amount > 0) {
        let edges =
            graph.edges().iter().zip(residuals).map(|(&(from, to, _), residual)| (from, to, residual));
        let left = Digraph::new(graph.nodes(), graph.ranks().to_vec(), edges);
        let mut split = split::remove_switches(&left, &rest)?;
        for tree in trees::pack(&split.graph, &rest)? {
            let mut way = |&(from, to): &(Rank, Rank)| {
                (from, to, split.routes.take(from as usize, to as usize, tree.amount))
            };
            let edges = tree.edges.iter().map(&mut way).collect();
            trees.push(Routed { root: tree.root, amount: tree.amount, edges });
        }
    }
    Some(Peeled { parts, trees })
}

/// How deep trees are: the deepest, then all by their weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Depth {
    most: usize,
    weighed: Rate,
}

impl Depth {
    /// Counts one for each link and one for each edge.
    fn of(peeled: &Peeled, ranks: usize) -> Self {
        let mut depth = Self { most: 0, weighed: Rate::default() };
        for tree in &peeled.trees {
            let mut times = vec![0; ranks];
            for (from, to, ways) in &tree.edges {
                let longest = ways.iter().map(|(nodes, _)| nodes.len()).max().unwrap_or(0);
                times[*to as usize] = times[*from as usize] + longest;
            }
            let most = times.into_iter().max().unwrap_or(0);
            depth.most = depth.most.max(most);
            depth.weighed += Rate::new(signed(tree.amount * most as Amount), signed(peeled.parts));
        }
        depth
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use pleach_vocabulary::Collective;

    use super::*;
    use crate::check;
    use crate::digraph::Supply;
    use crate::directed::pack_directed;
    use crate::samples::{Links, Random, demand, graph};
    use crate::topology::preset;

    /// What is left of a graph without trees; none when they use more than there is.
    fn without(graph: &Digraph, peeled: &Peeled) -> Option<BTreeMap<(usize, usize), Amount>> {
        let edges = graph.edges().iter();
        let mut left: BTreeMap<(usize, usize), Amount> =
            edges.map(|&(from, to, capacity)| ((from, to), capacity * peeled.parts)).collect();
        for (nodes, amount) in peeled.trees.iter().flat_map(|tree| &tree.edges).flat_map(|edge| &edge.2) {
            for pair in nodes.windows(2) {
                let edge = left.get_mut(&(pair[0], pair[1]))?;
                *edge = edge.checked_sub(*amount)?;
            }
        }
        Some(left)
    }

    #[test]
    fn trees_meet_every_demand_that_can_be_met_and_use_no_more_than_there_is() {
        let mut random = Random(10);
        let mut packed = 0;
        for round in 0..600 {
            let links = if round % 2 == 0 { Links::Duplex } else { Links::Balanced };
            let graph = graph(&mut random, 6, 3, links);
            let demand = demand(&mut random, &graph);
            let is_enough = Supply::new(&graph, &demand).is_enough();
            let peeled = pack(&graph, &demand, round % 3 != 0);
            assert_eq!(peeled.is_some(), is_enough && graph.is_balanced());
            let Some(peeled) = peeled else { continue };
            packed += 1;
            assert!(without(&graph, &peeled).is_some(), "a link is used too much");
            let mut met = vec![0; demand.len()];
            for tree in &peeled.trees {
                met[tree.root as usize] += tree.amount;
                let mut is_reached = vec![false; demand.len()];
                is_reached[tree.root as usize] = true;
                for (from, to, ways) in &tree.edges {
                    assert!(is_reached[*from as usize]);
                    assert!(!std::mem::replace(&mut is_reached[*to as usize], true));
                    assert_eq!(ways.iter().map(|way| way.1).sum::<Amount>(), tree.amount);
                    for (nodes, _) in ways {
                        assert_eq!(nodes.first(), Some(&graph.ranks()[*from as usize]));
                        assert_eq!(nodes.last(), Some(&graph.ranks()[*to as usize]));
                    }
                }
                assert!(is_reached.iter().all(|&is_reached| is_reached));
            }
            assert!(met.iter().zip(&demand).all(|(met, wanted)| *met == wanted * peeled.parts));
        }
        assert!(packed > 150, "{packed}");
    }

    #[test]
    fn a_switch_gives_every_rank_a_tree_that_reaches_all_others_at_once() {
        let ranks = 12;
        let edges = (0..ranks)
            .flat_map(|rank| [(rank, ranks, ranks as Amount - 1), (ranks, rank, ranks as Amount - 1)]);
        let graph = Digraph::new(ranks + 1, (0..ranks).collect(), edges);
        let peeled = pack(&graph, &vec![1; ranks], true).unwrap();
        assert_eq!(peeled.trees.len(), ranks);
        for tree in &peeled.trees {
            assert!(tree.edges.iter().all(|edge| edge.0 == tree.root));
        }
    }

    #[test]
    fn one_root_behind_a_switch_hands_parts_to_the_others_which_hand_them_on() {
        let ranks = 12;
        let edges = (0..ranks).flat_map(|rank| [(rank, ranks, 1), (ranks, rank, 1)]);
        let graph = Digraph::new(ranks + 1, (0..ranks).collect(), edges);
        let mut demand = vec![0; ranks];
        demand[3] = 1;
        let peeled = pack(&graph, &demand, true).unwrap();
        // Twice through the switch, three nodes each time.
        assert_eq!(Depth::of(&peeled, ranks).most, 6);
        let whole = pack(&graph, &demand, false).unwrap();
        assert_eq!((whole.parts, Depth::of(&whole, ranks).most), (1, 3 * (ranks - 1)));
    }

    #[test]
    fn ranks_behind_one_link_each_hand_parts_on_along_few_edges() {
        for (name, edges) in [("fat-tree:4", 4), ("dragonfly:2,3,3", 6), ("star:12", 3)] {
            let topology = preset(name).unwrap();
            let packing = pack_directed(&topology, Collective::Broadcast { root: 0 }, None);
            let checked = check(&topology, &packing).unwrap();
            assert!(packing.is_optimal() && checked.depth().edges <= edges, "{name}: {:?}", checked.depth());
        }
    }
}

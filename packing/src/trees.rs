//! Arborescence packing in a graph of ranks (Bérczi and Frank 2010, after Edmonds; ForestColl,
//! section 5.3).
//!
//! Equal partial trees form one [`PartialTrees`]. Some of these trees may take an edge x→y that
//! leaves them. Their number is limited by all other trees: `B⁻(X)` ≥ p(X) must hold for every set
//! X, where p(X) is the number of partial trees that do not touch X. Only sets with y and without x
//! that the partial trees touch lose capacity, so the number comes from one maximum flow. If it is
//! less than the number of trees, these are split in two. Some edge can always be taken while a
//! tree is not complete. Partial trees are completed one after the other, so few exist at the same
//! time. Slack only falls, so a set without slack answers later questions without a flow.
//!
//! **Invariant:** `B⁻(X)` ≥ p(X) for every set of ranks, with the remaining capacity of each edge.

use pleach_vocabulary::Rank;

use super::digraph::Digraph;
use super::flow::{Amount, ArcId, Network};

/// A number of equal trees.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Arborescence {
    /// The root.
    pub root: Rank,
    /// The number of trees.
    pub amount: Amount,
    /// The edges from the root outwards.
    pub edges: Vec<(Rank, Rank)>,
}

/// Packs `demand[v]` unit trees from every rank v to all others. The graph has no switches, and
/// node i is rank i. `None` if the demand is infeasible
/// ([`DemandNetwork::is_feasible`](super::digraph::DemandNetwork::is_feasible)).
///
/// # Panics
///
/// When there are switches, or not as many demands as ranks.
#[must_use]
pub(crate) fn pack(graph: &Digraph, demand: &[Amount]) -> Option<Vec<Arborescence>> {
    assert!(graph.ranks().iter().enumerate().all(|(rank, &node)| rank == node), "no switches");
    assert_eq!(graph.nodes(), graph.ranks().len(), "no switches");
    if !super::digraph::DemandNetwork::new(graph, demand).is_feasible() {
        return None;
    }
    let mut packer = ArborescencePacker::new(graph, demand);
    for (root, &amount) in demand.iter().enumerate() {
        packer.begin(root, amount);
        while let Some(class) = packer.partial.pop() {
            packer.complete(class);
        }
    }
    Some(packer.complete)
}

/// A set of ranks.
type Set = Vec<bool>;

/// A number of equal trees that do not span all ranks yet.
struct PartialTrees {
    amount: Amount,
    /// The ranks of the trees, in the order in which they were reached.
    reached: Vec<usize>,
    is_reached: Set,
    edges: Vec<(Rank, Rank)>,
    /// The node of the trees in the network.
    node: usize,
}

struct ArborescencePacker {
    ranks: usize,
    network: Network,
    source: usize,
    /// By rank: the heads of its edges, with their arcs.
    leaving: Vec<Vec<(usize, ArcId)>>,
    /// The arc from the source to each rank. Its capacity is the number of trees of this root that
    /// have not begun.
    roots: Vec<ArcId>,
    /// Free nodes of the network.
    free: Vec<usize>,
    /// By node of partial trees: the arc from the source, and the arcs to the ranks.
    class_arcs: Vec<(ArcId, Vec<ArcId>)>,
    partial: Vec<PartialTrees>,
    /// The number of trees in the network, begun or not.
    waiting: Amount,
    /// Sets without slack.
    tight: Vec<Set>,
    complete: Vec<Arborescence>,
}

/// More than any flow.
const UNLIMITED: Amount = Amount::MAX >> 8;

impl ArborescencePacker {
    fn new(graph: &Digraph, demand: &[Amount]) -> Self {
        let ranks = graph.nodes();
        let mut network = Network::new(ranks + 1);
        let roots = (0..ranks).map(|rank| network.add(ranks, rank, demand[rank], 0)).collect();
        let mut leaving = vec![Vec::new(); ranks];
        for &(from, to, capacity) in graph.edges() {
            leaving[from].push((to, network.add(from, to, capacity, 0)));
        }
        Self {
            ranks,
            network,
            source: ranks,
            leaving,
            roots,
            free: Vec::new(),
            class_arcs: Vec::new(),
            partial: Vec::new(),
            waiting: demand.iter().sum(),
            tight: Vec::new(),
            complete: Vec::new(),
        }
    }

    /// Begins the trees of a root.
    fn begin(&mut self, root: usize, amount: Amount) {
        if amount == 0 {
            return;
        }
        self.network.set_capacity(self.roots[root], 0);
        self.waiting -= amount;
        let mut is_reached = vec![false; self.ranks];
        is_reached[root] = true;
        self.suspend(PartialTrees { amount, reached: vec![root], is_reached, edges: Vec::new(), node: 0 });
    }

    /// Puts partial trees into the network.
    fn suspend(&mut self, mut class: PartialTrees) {
        class.node = self.free.pop().unwrap_or_else(|| self.add_class_node());
        let (arc, arcs) = &self.class_arcs[class.node];
        self.network.set_capacity(*arc, class.amount);
        for &rank in &class.reached {
            self.network.set_capacity(arcs[rank], UNLIMITED);
        }
        self.waiting += class.amount;
        self.partial.push(class);
    }

    fn add_class_node(&mut self) -> usize {
        let node = self.network.add_node();
        let arc = self.network.add(self.source, node, 0, 0);
        let arcs = (0..self.ranks).map(|rank| self.network.add(node, rank, 0, 0)).collect();
        self.class_arcs.push((arc, arcs));
        self.class_arcs.len() - 1
    }

    /// Takes partial trees out of the network.
    fn resume(&mut self, class: &PartialTrees) {
        let (arc, arcs) = &self.class_arcs[class.node];
        self.network.set_capacity(*arc, 0);
        for &rank in &class.reached {
            self.network.set_capacity(arcs[rank], 0);
        }
        self.free.push(class.node);
        self.waiting -= class.amount;
    }

    /// Grows partial trees until they span all ranks. Trees that cannot take an edge with the
    /// others are split off.
    fn complete(&mut self, mut class: PartialTrees) {
        self.resume(&class);
        // Ranks are used in the order in which they were reached, so trees stay shallow.
        let mut from_place = 0;
        while class.reached.len() < self.ranks {
            let from =
                *class.reached.get(from_place).expect("some edge can be taken while a rank is missing");
            for place in 0..self.leaving[from].len() {
                let (to, arc) = self.leaving[from][place];
                if class.is_reached[to] {
                    continue;
                }
                let amount = self.most(&class, from, to, arc);
                if amount > 0 {
                    self.take(&mut class, from, to, arc, amount);
                }
            }
            from_place += 1;
        }
        let PartialTrees { amount, reached, edges, .. } = class;
        self.complete.push(Arborescence { root: reached[0] as Rank, amount, edges });
    }

    /// The number of the partial trees that can take an edge.
    fn most(&mut self, class: &PartialTrees, from: usize, to: usize, arc: ArcId) -> Amount {
        let wanted = self.network.capacity(arc).min(class.amount);
        let loses = |set: &Set| set[to] && !set[from] && class.reached.iter().any(|&rank| set[rank]);
        if wanted == 0 || self.tight.iter().any(loses) {
            return 0;
        }
        // The source supplies all trees in the network, and the tail of the edge without limit.
        let root = self.roots[from];
        let before = self.network.capacity(root);
        self.network.set_capacity(root, UNLIMITED);
        let sum = self.network.max_flow_value(self.source, to, self.waiting + wanted);
        self.network.set_capacity(root, before);
        let amount = sum - self.waiting;
        if amount < wanted {
            // In both cases this set has no slack afterwards.
            let set: Set = (0..self.ranks).map(|rank| !self.network.is_source_side(rank)).collect();
            self.tight.push(set);
        }
        amount
    }

    /// Adds the edge to this number of the partial trees.
    fn take(&mut self, class: &mut PartialTrees, from: usize, to: usize, arc: ArcId, amount: Amount) {
        if amount < class.amount {
            self.suspend(PartialTrees {
                amount: class.amount - amount,
                reached: class.reached.clone(),
                is_reached: class.is_reached.clone(),
                edges: class.edges.clone(),
                node: 0,
            });
            class.amount = amount;
        }
        let left = self.network.capacity(arc) - amount;
        self.network.set_capacity(arc, left);
        class.reached.push(to);
        class.is_reached[to] = true;
        class.edges.push((from as Rank, to as Rank));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Rate;
    use crate::samples;
    use crate::samples::{Links, Random, best_by_enumeration};
    use std::collections::{BTreeMap, BTreeSet};

    /// Checks that trees span all ranks, have the requested number, and fit.
    fn check(graph: &Digraph, demand: &[Amount], trees: &[Arborescence]) {
        let mut left: BTreeMap<(usize, usize), Amount> =
            graph.edges().iter().map(|&(from, to, capacity)| ((from, to), capacity)).collect();
        let mut roots = vec![0; demand.len()];
        for tree in trees {
            assert!(tree.amount > 0);
            roots[tree.root as usize] += tree.amount;
            let mut reached = BTreeSet::from([tree.root]);
            for &(from, to) in &tree.edges {
                assert!(reached.contains(&from) && reached.insert(to));
                let edge = left.get_mut(&(from as usize, to as usize)).expect("trees use edges");
                *edge = edge.checked_sub(tree.amount).expect("no edge carries more than it can");
            }
            assert_eq!(reached.len(), demand.len());
        }
        assert_eq!(roots, demand);
    }

    #[test]
    fn as_many_trees_as_cuts_allow_are_packed_and_not_one_more() {
        let mut random = Random::new(31);
        let (mut with_more, mut without_more) = (0, 0);
        for round in 0..500 {
            let graph = samples::graph(&mut random, 7, 0, [Links::Duplex, Links::Any][round % 2]);
            let graph = {
                let mut numbers: Vec<usize> = vec![0; graph.nodes()];
                graph.ranks().iter().enumerate().for_each(|(number, &node)| numbers[node] = number);
                let edges =
                    graph.edges().iter().map(|&(from, to, capacity)| (numbers[from], numbers[to], capacity));
                Digraph::new(graph.nodes(), (0..graph.nodes()).collect(), edges)
            };
            let demand = samples::demand(&mut random, &graph);
            let rate = best_by_enumeration(&graph, &demand);
            let (numerator, denominator) = (*rate.numer() as Amount, *rate.denom() as Amount);
            let graph = graph.map(|_, _, capacity| capacity * denominator);
            let mut demand: Vec<Amount> = demand.iter().map(|amount| amount * numerator).collect();
            let trees = pack(&graph, &demand).unwrap();
            check(&graph, &demand, &trees);
            let more = random.below(demand.len() as u64) as usize;
            demand[more] += 1;
            let fits = best_by_enumeration(&graph, &demand) >= Rate::from_integer(1);
            let trees = pack(&graph, &demand);
            assert_eq!(trees.is_some(), fits);
            trees.into_iter().for_each(|trees| check(&graph, &demand, &trees));
            *(if fits { &mut with_more } else { &mut without_more }) += 1;
        }
        assert!(with_more > 50 && without_more > 50, "{with_more} {without_more}");
    }

    #[test]
    fn a_full_graph_is_packed_with_one_star_a_root() {
        let edges = (0..5).flat_map(|from| (0..5).map(move |to| (from, to, 3)));
        let graph = Digraph::new(5, (0..5).collect(), edges);
        let trees = pack(&graph, &[3; 5]).unwrap();
        check(&graph, &[3; 5], &trees);
    }
}

//! Switch removal by edge splitting (ForestColl, section 5.2), with the routes of the new edges.
//!
//! Splitting off γ of a pair of edges u→w→t at a switch w takes γ from both edges and adds γ to an
//! edge u→t. If as much enters as leaves w, then for each edge that leaves w there is an edge into
//! w such that some γ > 0 can be split off without loss for any rank (Bang-Jensen, Frank and
//! Jackson 1995). Each cut loses γ or nothing. So the largest γ is found by trying the full
//! capacity: the deficit of a rank is the excess. A tight cut stays tight, so known cuts answer
//! later questions without a flow.
//!
//! **Invariant:** every rank gets the sum of all demands, as much enters as leaves every switch,
//! and the routes that [`Routes`] hands out exceed the capacity of no link.

use std::collections::HashMap;

use super::digraph::{DemandNetwork, Digraph};
use super::flow::Amount;

/// A graph of ranks, whose nodes are the numbers of the ranks, with the routes of its edges.
#[derive(Clone, Debug)]
pub(crate) struct SwitchFreeGraph {
    /// The graph.
    pub graph: Digraph,
    /// The routes.
    pub routes: Routes,
}

/// The links behind the edges of a [`SwitchFreeGraph`].
#[derive(Clone, Debug, Default)]
pub(crate) struct Routes {
    /// The node of every rank.
    ranks: Vec<usize>,
    /// The remaining capacity of each link.
    links: HashMap<(usize, usize), Amount>,
    /// The amounts from one node to another over a third one.
    over: HashMap<(usize, usize), Vec<(usize, Amount)>>,
}

/// The nodes of a path from one rank to another, and its amount.
pub(crate) type WeightedPath = (Vec<usize>, Amount);

/// Removes all switches of a graph. `None` if the demand is infeasible
/// ([`DemandNetwork::is_feasible`]) or a switch is not balanced ([`Digraph::is_balanced`]).
#[must_use]
pub(crate) fn remove_switches(graph: &Digraph, demand: &[Amount]) -> Option<SwitchFreeGraph> {
    let mut splitter = Splitter::new(graph, demand);
    if !graph.is_balanced() || !splitter.supply.is_feasible() {
        return None;
    }
    for switch in graph.switches() {
        splitter.remove(switch);
    }
    Some(splitter.finish(graph))
}

struct Splitter {
    supply: DemandNetwork,
    nodes: usize,
    /// By node: the heads and tails of its edges. Some edges may have no capacity left.
    leaving: Vec<Vec<usize>>,
    entering: Vec<Vec<usize>>,
    routes: Routes,
    /// Cuts whose capacity is exactly the sum of all demands.
    tight: Vec<Vec<bool>>,
}

impl Splitter {
    fn new(graph: &Digraph, demand: &[Amount]) -> Self {
        let (mut leaving, mut entering) = (vec![Vec::new(); graph.nodes()], vec![Vec::new(); graph.nodes()]);
        let mut routes = Routes { ranks: graph.ranks().to_vec(), ..Routes::default() };
        for &(from, to, capacity) in graph.edges() {
            leaving[from].push(to);
            entering[to].push(from);
            routes.links.insert((from, to), capacity);
        }
        let (supply, nodes) = (DemandNetwork::new(graph, demand), graph.nodes());
        Self { supply, nodes, leaving, entering, routes, tight: Vec::new() }
    }

    fn remove(&mut self, switch: usize) {
        let (froms, tos) = (self.entering[switch].clone(), self.leaving[switch].clone());
        for &to in &tos {
            // A pair of edges that returns to its tail serves no rank, so such pairs come last.
            for &from in
                froms.iter().filter(|&&from| from != to).chain(froms.iter().filter(|&&from| from == to))
            {
                if self.supply.capacity(switch, to) == 0 {
                    break;
                }
                self.split_off(from, switch, to);
            }
            assert_eq!(self.supply.capacity(switch, to), 0, "a balanced switch can be split off");
        }
    }

    /// Splits off the largest possible amount.
    fn split_off(&mut self, from: usize, switch: usize, to: usize) {
        let mut amount = self.supply.capacity(from, switch).min(self.supply.capacity(switch, to));
        let loses = |cut: &Vec<bool>| cut[from] == cut[to] && cut[from] != cut[switch];
        if amount == 0 || self.tight.iter().any(loses) {
            return;
        }
        self.shift(from, switch, to, amount, true);
        // Giving an amount back loosens the cuts found before, so only the last cut is tight.
        let mut tight = None;
        let mut too_much = 0;
        let nodes = self.nodes;
        self.supply.visit_deficits(|supply, deficit| {
            tight = Some((0..nodes).map(|node| supply.is_inside(node)).collect());
            too_much += deficit;
            amount -= deficit;
            shift(supply, from, switch, to, deficit, false);
            amount > 0
        });
        self.tight.extend(tight);
        if amount > 0 && from != to {
            self.routes.over.entry((from, to)).or_default().push((switch, amount));
            for (list, node) in [(&mut self.leaving[from], to), (&mut self.entering[to], from)] {
                if !list.contains(&node) {
                    list.push(node);
                }
            }
        }
    }

    fn shift(&mut self, from: usize, switch: usize, to: usize, amount: Amount, is_off: bool) {
        shift(&mut self.supply, from, switch, to, amount, is_off);
    }

    fn finish(self, graph: &Digraph) -> SwitchFreeGraph {
        let ranks = graph.ranks();
        let mut numbers = vec![usize::MAX; self.nodes];
        for (number, &node) in ranks.iter().enumerate() {
            numbers[node] = number;
        }
        let mut edges = Vec::new();
        for &from in ranks {
            for &to in self.leaving[from].iter().filter(|&&to| numbers[to] != usize::MAX) {
                edges.push((numbers[from], numbers[to], self.supply.capacity(from, to)));
            }
        }
        let graph = Digraph::new(ranks.len(), (0..ranks.len()).collect(), edges);
        SwitchFreeGraph { graph, routes: self.routes }
    }
}

/// Moves an amount from the two edges over a switch to the direct edge, or back.
fn shift(supply: &mut DemandNetwork, from: usize, switch: usize, to: usize, amount: Amount, is_off: bool) {
    for (one, other, gains) in [(from, switch, !is_off), (switch, to, !is_off), (from, to, is_off)] {
        if one != other {
            let before = supply.capacity(one, other);
            supply.set_capacity(one, other, if gains { before + amount } else { before - amount });
        }
    }
}

impl Routes {
    /// Takes this amount from an edge between two ranks, and returns its paths. The amount is not
    /// available afterwards.
    ///
    /// # Panics
    ///
    /// When more is taken than the edge had.
    pub(crate) fn take(&mut self, from: usize, to: usize, amount: Amount) -> Vec<WeightedPath> {
        let paths = self.take_between(self.ranks[from], self.ranks[to], amount);
        let mut sums: Vec<WeightedPath> = Vec::with_capacity(paths.len());
        for (nodes, amount) in paths {
            let nodes = without_loops(nodes);
            match sums.iter_mut().find(|path| path.0 == nodes) {
                Some(path) => path.1 += amount,
                None => sums.push((nodes, amount)),
            }
        }
        sums
    }

    fn take_between(&mut self, from: usize, to: usize, mut amount: Amount) -> Vec<WeightedPath> {
        let mut paths = Vec::new();
        if let Some(left) = self.links.get_mut(&(from, to)) {
            let taken = amount.min(*left);
            *left -= taken;
            amount -= taken;
            if taken > 0 {
                paths.push((vec![from, to], taken));
            }
        }
        while amount > 0 {
            let over = self.over.get_mut(&(from, to)).and_then(|over| over.last_mut());
            let over = over.expect("no more is taken of an edge than it has");
            let (switch, taken) = (over.0, amount.min(over.1));
            over.1 -= taken;
            if over.1 == 0 {
                self.over.get_mut(&(from, to)).expect("it was there").pop();
            }
            amount -= taken;
            let first = self.take_between(from, switch, taken);
            let second = self.take_between(switch, to, taken);
            paths.extend(joined(first, second));
        }
        paths
    }
}

/// Joins paths that end at a node with paths that begin there. Both carry the same total.
fn joined(first: Vec<WeightedPath>, second: Vec<WeightedPath>) -> Vec<WeightedPath> {
    let mut paths = Vec::new();
    let mut second = second.into_iter();
    let mut rest: WeightedPath = (Vec::new(), 0);
    for (nodes, mut amount) in first {
        while amount > 0 {
            if rest.1 == 0 {
                rest = second.next().expect("both carry as much");
            }
            let taken = amount.min(rest.1);
            paths.push((nodes.iter().chain(&rest.0[1..]).copied().collect(), taken));
            amount -= taken;
            rest.1 -= taken;
        }
    }
    paths
}

/// Removes the cycles of a path.
fn without_loops(nodes: Vec<usize>) -> Vec<usize> {
    let mut straight: Vec<usize> = Vec::with_capacity(nodes.len());
    for node in nodes {
        match straight.iter().position(|&before| before == node) {
            Some(place) => straight.truncate(place + 1),
            None => straight.push(node),
        }
    }
    straight
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rate::best_rate;
    use crate::samples;
    use crate::samples::{Links, Random, best_by_enumeration};
    use std::collections::BTreeMap;

    /// A graph scaled so that its best rate is an integer, and its demands at that rate.
    fn at_its_best(random: &mut Random, links: Links) -> (Digraph, Vec<Amount>) {
        let graph = samples::graph(random, 6, 4, links);
        let demand = samples::demand(random, &graph);
        let rate = best_rate(&graph, &demand).unwrap().rate;
        let (numerator, denominator) = (*rate.numer() as Amount, *rate.denom() as Amount);
        (
            graph.map(|_, _, capacity| capacity * denominator),
            demand.iter().map(|amount| amount * numerator).collect(),
        )
    }

    #[test]
    fn without_switches_as_much_can_be_sent_as_with_them() {
        let mut random = Random::new(21);
        for round in 0..400 {
            let (graph, demand) = at_its_best(&mut random, [Links::Duplex, Links::Balanced][round % 2]);
            let switch_removal = remove_switches(&graph, &demand).unwrap();
            assert_eq!(switch_removal.graph.nodes(), graph.ranks().len());
            let rate = best_by_enumeration(&switch_removal.graph, &demand);
            assert_eq!(*rate.numer(), *rate.denom(), "{graph:?} {demand:?}");
        }
    }

    #[test]
    fn all_edges_together_go_over_no_link_more_than_it_carries() {
        let mut random = Random::new(22);
        for round in 0..400 {
            let (graph, demand) = at_its_best(&mut random, [Links::Duplex, Links::Balanced][round % 2]);
            let SwitchFreeGraph { graph: direct, mut routes } = remove_switches(&graph, &demand).unwrap();
            let mut left: BTreeMap<(usize, usize), Amount> =
                graph.edges().iter().map(|&(from, to, capacity)| ((from, to), capacity)).collect();
            for &(from, to, capacity) in direct.edges() {
                let half = capacity / 2;
                for taken in [half, capacity - half] {
                    let paths = routes.take(from, to, taken);
                    assert_eq!(paths.iter().map(|path| path.1).sum::<Amount>(), taken);
                    for (nodes, amount) in paths {
                        assert_eq!(
                            (nodes.first(), nodes.last()),
                            (Some(&graph.ranks()[from]), Some(&graph.ranks()[to]))
                        );
                        assert!(nodes[1..nodes.len() - 1].iter().all(|node| !graph.ranks().contains(node)));
                        for hop in nodes.windows(2) {
                            let link = left.get_mut(&(hop[0], hop[1])).expect("hops are links");
                            *link = link.checked_sub(amount).expect("no link carries more than it can");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn what_cannot_be_sent_or_is_not_balanced_is_not_split() {
        let star = [(0, 3, 2), (3, 0, 2), (1, 3, 2), (3, 1, 2), (2, 3, 2), (3, 2, 2)];
        let star = Digraph::new(4, vec![0, 1, 2], star);
        assert!(remove_switches(&star, &[1, 1, 1]).is_some());
        assert!(remove_switches(&star, &[2, 1, 1]).is_none());
        let lame = star.map(|from, _, capacity| if from == 3 { capacity - 1 } else { capacity });
        assert!(remove_switches(&lame, &[0, 0, 0]).is_none());
    }

    #[test]
    fn what_a_cut_forbids_is_forgotten_when_capacity_given_back_loosens_it() {
        // In this topology several ranks have a deficit after one attempt to split. If all their
        // cuts were kept as tight cuts, a switch would be left over.
        let topology = crate::topology::preset("dragonfly:4,2,2").unwrap();
        let collective = pleach_vocabulary::Collective::Broadcast { root: 0 };
        let packing = crate::directed::pack_directed(&topology, collective, None);
        crate::check(&topology, &packing).unwrap();
        assert!(packing.is_optimal());
    }
}

//! Extraction of short trees one at a time, before the exact algorithm packs the rest.
//!
//! Switch removal and arborescence packing ([`switch_removal`], [`trees`]) always find trees that
//! use the full rate, but the trees are rarely shallow and take many flows. So whole trees are
//! *extracted* first, as in Lovász's proof of Edmonds' theorem (1976) and the algorithm of Gabow
//! and Manu (1998): a tree of short paths is proposed, and the largest amount of it is taken that
//! leaves the rest feasible. The rest is feasible while every set X of nodes with a rank has
//!
//! ```text
//! slack(X) = demand in X + capacity into X - sum of demands ≥ 0
//! ```
//!
//! A tree of weight a that enters X e times lowers the slack by a·(e + [its root is in X] - 1),
//! which is never negative. A flow to every rank finds the sets that limit a. These sets are kept
//! with their slack, and the next tree that would enter such a set once too often takes another
//! path. A tree takes as much from a switch as it gives to it, so the rest stays balanced.
//!
//! Paths are as short as possible, where each link and each edge counts one. Of equally near ranks,
//! the rank with the most capacity to pass on comes first. Of equally short paths, the path over
//! the least used links comes first. A single root often gets a better result with several trees.
//! So several numbers of trees are tried, and the shallowest result is taken. Parts of unit trees
//! are taken only if one whole tree would suffice and would be deeper by a third.
//!
//! **Invariant:** the rest can be packed, and the extracted trees and the rest together are the
//! whole demand.

use std::cmp::Reverse;
use std::collections::BTreeSet;

use pleach_vocabulary::Rank;

use crate::digraph::Digraph;
use crate::flow::{Amount, ArcId, Network};
use crate::rate::signed;
use crate::switch_removal::WeightedPath;
use crate::{Rate, switch_removal, trees};

/// Numbers of trees of a single root that are tried; the number of other ranks is tried too.
const AIMS: [Amount; 2] = [4, 16];
/// Largest number of parts of a unit tree.
const AIM_MAX: Amount = 32;

/// A number of equal trees with the paths of their edges.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct RoutedTree {
    /// The root.
    pub(super) root: Rank,
    /// The number of trees.
    pub(super) amount: Amount,
    /// The edges from the root outwards, each with the paths that carry the amount together.
    pub(super) edges: Vec<(Rank, Rank, Vec<WeightedPath>)>,
}

/// Trees; `parts` of them make one unit tree.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Extracted {
    pub(super) parts: Amount,
    pub(super) trees: Vec<RoutedTree>,
}

/// Packs `demand[v]` unit trees from every rank v to all others, with small depth. With `can_part`
/// the trees may be parts of unit trees if that reduces their depth. `None` if the demand is
/// infeasible or a switch is not balanced.
///
/// # Panics
///
/// When there are not as many demands as ranks.
pub(super) fn pack(graph: &Digraph, demand: &[Amount], can_part: bool) -> Option<Extracted> {
    if !graph.is_balanced() || !Extractor::new(graph, demand, 1).is_feasible() {
        return None;
    }
    let mut best = pack_parts(graph, demand, 1, 1)?;
    let mut least = Depth::of(&best, demand.len());
    let is_one_root = demand.iter().filter(|&&amount| amount > 0).count() == 1;
    if can_part && is_one_root {
        let others = graph.ranks().len() as Amount - 1;
        let aims: Vec<Amount> = AIMS.into_iter().filter(|&aim| aim < others).chain([others]).collect();
        let total: Amount = demand.iter().sum();
        let paths = aims.iter().flat_map(|&aim| [(1, aim), (aim.min(AIM_MAX), aim.min(AIM_MAX))]);
        for (parts, aim) in paths.filter(|&(parts, aim)| parts > 1 || aim <= total) {
            let extracted = pack_parts(graph, demand, parts, aim)?;
            let depth = Depth::of(&extracted, demand.len());
            // If the whole trees are several, parts never replace them. A single whole tree is
            // replaced only if it is deeper by a third.
            let is_worth_it = parts == best.parts || (total == 1 && depth.most * 4 <= least.most * 3);
            if depth < least && is_worth_it {
                (least, best) = (depth, extracted);
            }
        }
    }
    Some(best)
}

/// Extracts whole trees of short paths, at most `demand[v]` from every rank v. Each tree has about
/// 1/`aim` of the demand of its root. `None` if the demand is infeasible or a switch is not
/// balanced.
/// balanced.
///
/// # Panics
///
/// When there are not as many demands as ranks.
pub(super) fn extract(graph: &Digraph, demand: &[Amount], aim: Amount) -> Option<Vec<RoutedTree>> {
    let mut extractor = Extractor::new(graph, demand, aim);
    if !graph.is_balanced() || !extractor.is_feasible() {
        return None;
    }
    extractor.extract_all();
    Some(extractor.extracted)
}

/// Packs trees of which `parts` make a unit tree, about `aim` for each root.
fn pack_parts(graph: &Digraph, demand: &[Amount], parts: Amount, aim: Amount) -> Option<Extracted> {
    let graph = &graph.map(|_, _, capacity| capacity * parts);
    let demand: Vec<Amount> = demand.iter().map(|amount| amount * parts).collect();
    let mut extractor = Extractor::new(graph, &demand, aim);
    extractor.extract_all();
    let Extractor { residuals, demand: rest, extracted: mut trees, .. } = extractor;
    if rest.iter().any(|&amount| amount > 0) {
        let edges =
            graph.edges().iter().zip(residuals).map(|(&(from, to, _), residual)| (from, to, residual));
        let left = Digraph::new(graph.nodes(), graph.ranks().to_vec(), edges);
        let mut switch_removal = switch_removal::remove_switches(&left, &rest)?;
        for tree in trees::pack(&switch_removal.graph, &rest)? {
            let mut path = |&(from, to): &(Rank, Rank)| {
                (from, to, switch_removal.routes.take(from as usize, to as usize, tree.amount))
            };
            let edges = tree.edges.iter().map(&mut path).collect();
            trees.push(RoutedTree { root: tree.root, amount: tree.amount, edges });
        }
    }
    Some(Extracted { parts, trees })
}

/// The depth of the deepest tree, then the weighted sum of the depths of all trees.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Depth {
    most: usize,
    weighed: Rate,
}

impl Depth {
    /// The depth of trees. Each link and each edge counts one.
    fn of(extracted: &Extracted, ranks: usize) -> Self {
        let mut depth = Self { most: 0, weighed: Rate::default() };
        for tree in &extracted.trees {
            let mut times = vec![0; ranks];
            for (from, to, paths) in &tree.edges {
                let longest = paths.iter().map(|(nodes, _)| nodes.len()).max().unwrap_or(0);
                times[*to as usize] = times[*from as usize] + longest;
            }
            let most = times.into_iter().max().unwrap_or(0);
            depth.most = depth.most.max(most);
            depth.weighed += Rate::new(signed(tree.amount * most as Amount), signed(extracted.parts));
        }
        depth
    }
}

// Candidate trees, and the largest amount of each that can be extracted.
//
// An [`Extractor`] holds the remaining graph and demand. It grows a candidate tree of short paths,
// asks by flows how much of it can be extracted, records the cuts that limit the amount, and takes
// the best of a few candidates.
//
// **Invariant:** the remaining demand is feasible in the remaining graph.

/// Number of candidates before a tree is taken that carries less than its root wants.
const GUESSES_MAX: usize = 6;

/// Number of candidates before a root is given up. Each failed candidate adds a constraint.
const FAILURES_MAX: usize = 48;

/// Largest number of violated cuts that one search returns.
const VIOLATED_CUTS_MAX: usize = 64;

/// Resolution at which the use of links is compared.
const USE_STEPS: Amount = 1024;

/// A set of nodes with the slack that limits trees.
struct CutConstraint {
    is_inside: Vec<bool>,
    /// The edges into the set.
    entering: Vec<usize>,
    slack: Amount,
}

struct Extractor<'a> {
    graph: &'a Digraph,
    /// The edges that begin at each node.
    leaving: Vec<Vec<usize>>,
    /// The rank of each node.
    numbers: Vec<Option<usize>>,
    /// The remaining capacity of each edge.
    residuals: Vec<Amount>,
    /// The remaining capacity out of each node.
    exits: Vec<Amount>,
    /// The remaining demand of each root.
    demand: Vec<Amount>,
    total: Amount,
    network: Network,
    /// The arc of each edge, and the arc from the source to each rank.
    arcs: Vec<ArcId>,
    demand_arcs: Vec<ArcId>,
    /// The order in which ranks are checked.
    order: Vec<usize>,
    constraints: Vec<CutConstraint>,
    /// The amount that each root wants in one tree.
    aims: Vec<Amount>,
    extracted: Vec<RoutedTree>,
}

/// A tree while it grows.
struct Candidate {
    /// Parent, child, and the edges of the path.
    edges: Vec<(usize, usize, Vec<usize>)>,
    /// The number of uses of each edge of the graph.
    uses: Vec<Amount>,
    /// The number of entries into each constraint, plus one if the root is inside.
    entries: Vec<Amount>,
    /// The number of constraints that close each edge of the graph.
    closed: Vec<u32>,
    /// The time at which each rank is reached.
    reached: Vec<Option<u64>>,
}

/// The end of a path; the smallest is the best.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Frontier {
    /// Whether the rank has no capacity left to pass data on. Such ranks come last, so that the
    /// tree does not end before it spans all ranks.
    is_end: bool,
    /// The time at which the node is reached.
    time: u64,
    /// The capacity that leaves the node.
    exit: Reverse<Amount>,
    /// The use of the most used link of the path.
    worst: Amount,
    node: usize,
}

impl Default for Frontier {
    /// Smaller than every other value.
    fn default() -> Self {
        Self { is_end: false, time: 0, exit: Reverse(Amount::MAX), worst: 0, node: 0 }
    }
}

impl<'a> Extractor<'a> {
    fn new(graph: &'a Digraph, demand: &[Amount], aim: Amount) -> Self {
        assert_eq!(graph.ranks().len(), demand.len(), "a demand for each rank");
        let source = graph.nodes();
        let mut network = Network::new(source + 1);
        let mut leaving = vec![Vec::new(); graph.nodes()];
        let mut arcs = Vec::with_capacity(graph.edges().len());
        for (edge, &(from, to, capacity)) in graph.edges().iter().enumerate() {
            leaving[from].push(edge);
            arcs.push(network.add(from, to, capacity, 0));
        }
        let mut exits = vec![0; graph.nodes()];
        graph.edges().iter().for_each(|&(from, _, capacity)| exits[from] += capacity);
        let mut numbers = vec![None; graph.nodes()];
        let mut demand_arcs = Vec::with_capacity(demand.len());
        for (rank, (&node, &amount)) in graph.ranks().iter().zip(demand).enumerate() {
            numbers[node] = Some(rank);
            demand_arcs.push(network.add(source, node, amount, 0));
        }
        Self {
            graph,
            leaving,
            numbers,
            residuals: graph.edges().iter().map(|edge| edge.2).collect(),
            exits,
            demand: demand.to_vec(),
            total: demand.iter().sum(),
            network,
            arcs,
            demand_arcs,
            order: (0..demand.len()).collect(),
            constraints: Vec::new(),
            aims: demand.iter().map(|amount| amount.div_ceil(aim)).collect(),
            extracted: Vec::new(),
        }
    }

    fn is_feasible(&mut self) -> bool {
        self.violated_cuts().is_empty()
    }

    /// The violated cuts with their deficits: for each rank the smallest set and, if different, the
    /// largest set with the same deficit. Ranks with a deficit are checked first the next time.
    fn violated_cuts(&mut self) -> Vec<(Vec<bool>, Amount)> {
        let source = self.graph.nodes();
        let mut violated_cuts: Vec<(Vec<bool>, Amount)> = Vec::new();
        let mut largest = Vec::new();
        for place in 0..self.order.len() {
            let node = self.graph.ranks()[self.order[place]];
            if violated_cuts.iter().any(|(is_inside, _)| is_inside[node]) {
                continue;
            }
            let deficit = self.total - self.network.max_flow_value(source, node, self.total);
            if deficit > 0 {
                self.order[violated_cuts.len()..=place].rotate_right(1);
                let far = (0..self.graph.nodes()).map(|node| !self.network.is_source_side(node)).collect();
                let mut near = self.network.sink_side(node);
                near.truncate(self.graph.nodes());
                if near != far && largest.iter().all(|(known, _)| *known != far) {
                    largest.push((far, deficit));
                }
                violated_cuts.push((near, deficit));
                if violated_cuts.len() >= VIOLATED_CUTS_MAX {
                    break;
                }
            }
        }
        violated_cuts.append(&mut largest);
        violated_cuts
    }

    /// Extracts trees from all roots until no root has another one.
    fn extract_all(&mut self) {
        let mut open: Vec<usize> = (0..self.demand.len()).collect();
        while !open.is_empty() {
            open.retain(|&root| self.demand[root] > 0);
            open.retain(|&root| self.extract_from(root));
        }
    }

    /// Extracts the best of a few candidates of a root; returns whether there was a candidate.
    fn extract_from(&mut self, root: usize) -> bool {
        let mut best: Option<(Amount, Candidate)> = None;
        let mut goal = self.demand[root].min(self.aims[root]);
        for guesses in 0..FAILURES_MAX {
            if guesses >= GUESSES_MAX && best.is_some() {
                break;
            }
            let Some(candidate) = self.grow_at_most(root, &mut goal) else { break };
            let amount = self.most(root, &candidate).min(self.aims[root]);
            if amount > best.as_ref().map_or(0, |(before, _)| *before) {
                best = Some((amount, candidate));
            }
            if amount >= goal {
                break;
            }
        }
        let Some((amount, candidate)) = best else { return false };
        self.take(root, amount, candidate);
        true
    }

    /// A candidate for the goal, which is halved until there is a candidate.
    fn grow_at_most(&self, root: usize, goal: &mut Amount) -> Option<Candidate> {
        while *goal > 0 {
            if let Some(candidate) = self.candidate(root, *goal) {
                return Some(candidate);
            }
            *goal /= 2;
        }
        None
    }

    /// A candidate of short paths for this amount, within the capacities and the known constraints.
    fn candidate(&self, root: usize, goal: Amount) -> Option<Candidate> {
        let ranks = self.demand.len();
        let mut candidate = Candidate {
            edges: Vec::with_capacity(ranks),
            uses: vec![0; self.arcs.len()],
            entries: vec![0; self.constraints.len()],
            closed: vec![0; self.arcs.len()],
            reached: vec![None; ranks],
        };
        candidate.reached[root] = Some(0);
        let node = self.graph.ranks()[root];
        for (place, constraint) in
            self.constraints.iter().enumerate().filter(|(_, constraint)| constraint.is_inside[node])
        {
            candidate.enter(place, constraint, goal);
        }
        // For every reached rank a lower bound of its next path: paths only get worse.
        let mut open = BTreeSet::from([(Frontier::default(), root)]);
        while candidate.edges.len() + 1 < ranks {
            let (_, from) = open.pop_first()?;
            let Some((next, path)) = self.nearest(&candidate, from, goal) else { continue };
            if open.first().is_some_and(|(sooner, _)| *sooner < next) {
                open.insert((next, from));
                continue;
            }
            for &edge in &path {
                candidate.uses[edge] += 1;
                let (from, to, _) = self.graph.edges()[edge];
                for (place, constraint) in self.constraints.iter().enumerate() {
                    if constraint.is_inside[to] && !constraint.is_inside[from] {
                        candidate.enter(place, constraint, goal);
                    }
                }
            }
            let to = self.numbers[next.node]?;
            candidate.reached[to] = Some(next.time);
            candidate.edges.push((from, to, path));
            open.insert((Frontier { time: next.time + 1, ..Frontier::default() }, to));
            open.insert((next, from));
        }
        Some(candidate)
    }

    /// The best path from a reached rank to a rank that is not reached, with its edges.
    fn nearest(&self, candidate: &Candidate, from: usize, goal: Amount) -> Option<(Frontier, Vec<usize>)> {
        let mut by: Vec<Option<usize>> = vec![None; self.graph.nodes()];
        let mut is_done = vec![false; self.graph.nodes()];
        let start = self.graph.ranks()[from];
        let first = Frontier { time: candidate.reached[from]? + 1, node: start, ..Frontier::default() };
        let mut left = BTreeSet::from([(first, usize::MAX)]);
        while let Some((next, edge)) = left.pop_first() {
            if std::mem::replace(&mut is_done[next.node], true) {
                continue;
            }
            by[next.node] = (edge != usize::MAX).then_some(edge);
            if self.numbers[next.node].is_some() && next.node != start {
                let mut path = Vec::new();
                let mut at = next.node;
                while let Some(edge) = by[at] {
                    path.push(edge);
                    at = self.graph.edges()[edge].0;
                }
                path.reverse();
                return Some((next, path));
            }
            for &edge in &self.leaving[next.node] {
                let node = self.graph.edges()[edge].1;
                if is_done[node] || self.numbers[node].is_some_and(|rank| candidate.reached[rank].is_some()) {
                    continue;
                }
                let used = (candidate.uses[edge] + 1) * goal;
                if candidate.closed[edge] == 0 && used <= self.residuals[edge] {
                    let capacity = self.graph.edges()[edge].2;
                    let use_of = (capacity - self.residuals[edge] + used) * USE_STEPS / capacity;
                    // Among ranks with the same time, those with the most capacity to pass on.
                    let exit = if self.numbers[node].is_some() { self.exits[node] } else { Amount::MAX };
                    let (time, worst) = (next.time + 1, next.worst.max(use_of));
                    left.insert((
                        Frontier { is_end: exit < goal, time, exit: Reverse(exit), worst, node },
                        edge,
                    ));
                }
            }
        }
        None
    }

    /// The largest amount of a candidate that can be extracted, at most the demand of its root.
    /// Records the constraints.
    fn most(&mut self, root: usize, candidate: &Candidate) -> Amount {
        let used = candidate.uses.iter().zip(&self.residuals).filter(|(uses, _)| **uses > 0);
        let links = used.map(|(uses, residual)| residual / uses).min();
        let mut amount = self.demand[root].min(links.unwrap_or(Amount::MAX));
        let node = self.graph.ranks()[root];
        while amount > 0 {
            self.set_network(root, candidate, amount);
            let violated_cuts = self.violated_cuts();
            if violated_cuts.is_empty() {
                break;
            }
            let tried = amount;
            for (is_inside, deficit) in violated_cuts {
                let entering: Vec<usize> = self.entering(&is_inside);
                let entries: Amount = entering.iter().map(|&edge| candidate.uses[edge]).sum();
                let loses = entries + Amount::from(is_inside[node]) - 1;
                let slack = loses * tried - deficit;
                amount = amount.min(slack / loses);
                self.constraints.push(CutConstraint { is_inside, entering, slack });
            }
        }
        self.restore_network(root, candidate);
        amount
    }

    fn entering(&self, is_inside: &[bool]) -> Vec<usize> {
        let edges = self.graph.edges().iter().enumerate();
        edges.filter(|(_, edge)| is_inside[edge.1] && !is_inside[edge.0]).map(|(place, _)| place).collect()
    }

    /// Sets the network as if this amount of the candidate were extracted.
    fn set_network(&mut self, root: usize, candidate: &Candidate, amount: Amount) {
        for (edge, &uses) in candidate.uses.iter().enumerate().filter(|(_, uses)| **uses > 0) {
            self.network.set_capacity(self.arcs[edge], self.residuals[edge] - uses * amount);
        }
        self.network.set_capacity(self.demand_arcs[root], self.demand[root] - amount);
        self.total = self.demand.iter().sum::<Amount>() - amount;
    }

    fn restore_network(&mut self, root: usize, candidate: &Candidate) {
        self.set_network(root, candidate, 0);
    }

    fn take(&mut self, root: usize, amount: Amount, candidate: Candidate) {
        let node = self.graph.ranks()[root];
        self.set_network(root, &candidate, amount);
        self.demand[root] -= amount;
        for ((residual, uses), &(from, ..)) in
            self.residuals.iter_mut().zip(&candidate.uses).zip(self.graph.edges())
        {
            *residual -= uses * amount;
            self.exits[from] -= uses * amount;
        }
        for constraint in &mut self.constraints {
            let entries: Amount = constraint.entering.iter().map(|&edge| candidate.uses[edge]).sum();
            constraint.slack -= amount * (entries + Amount::from(constraint.is_inside[node]) - 1);
        }
        let nodes = |path: &[usize]| {
            let first = self.graph.edges()[path[0]].0;
            let others = path.iter().map(|&edge| self.graph.edges()[edge].1);
            std::iter::once(first).chain(others).collect()
        };
        let routed = |(from, to, path): &(usize, usize, Vec<usize>)| {
            (*from as Rank, *to as Rank, vec![(nodes(path), amount)])
        };
        let edges = candidate.edges.iter().map(routed).collect();
        self.extracted.push(RoutedTree { root: root as Rank, amount, edges });
    }
}

impl Candidate {
    /// Counts one more entry into a constraint, and closes its edges if no further entry is
    /// possible.
    fn enter(&mut self, place: usize, constraint: &CutConstraint, goal: Amount) {
        let could = self.entries[place] == 0 || constraint.slack >= self.entries[place] * goal;
        self.entries[place] += 1;
        let can = constraint.slack >= self.entries[place] * goal;
        if could && !can {
            constraint.entering.iter().for_each(|&edge| self.closed[edge] += 1);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use pleach_vocabulary::Collective;

    use super::*;
    use crate::check;
    use crate::digraph::DemandNetwork;
    use crate::directed::pack_directed;
    use crate::samples::{Links, Random, demand, graph};
    use crate::topology::preset;

    /// The capacities that remain of a graph when the trees are taken from it; `None` if the trees
    /// use more than the graph has.
    fn without(graph: &Digraph, extracted: &Extracted) -> Option<BTreeMap<(usize, usize), Amount>> {
        let edges = graph.edges().iter();
        let mut left: BTreeMap<(usize, usize), Amount> =
            edges.map(|&(from, to, capacity)| ((from, to), capacity * extracted.parts)).collect();
        for (nodes, amount) in extracted.trees.iter().flat_map(|tree| &tree.edges).flat_map(|edge| &edge.2) {
            for pair in nodes.windows(2) {
                let edge = left.get_mut(&(pair[0], pair[1]))?;
                *edge = edge.checked_sub(*amount)?;
            }
        }
        Some(left)
    }

    #[test]
    fn trees_meet_every_demand_that_can_be_met_and_use_no_more_than_there_is() {
        let mut random = Random::new(10);
        let mut packed = 0;
        for round in 0..600 {
            let links = if round % 2 == 0 { Links::Duplex } else { Links::Balanced };
            let graph = graph(&mut random, 6, 3, links);
            let demand = demand(&mut random, &graph);
            let is_feasible = DemandNetwork::new(&graph, &demand).is_feasible();
            let extracted = pack(&graph, &demand, round % 3 != 0);
            assert_eq!(extracted.is_some(), is_feasible && graph.is_balanced());
            let Some(extracted) = extracted else { continue };
            packed += 1;
            assert!(without(&graph, &extracted).is_some(), "a link is used too much");
            let mut met = vec![0; demand.len()];
            for tree in &extracted.trees {
                met[tree.root as usize] += tree.amount;
                let mut is_reached = vec![false; demand.len()];
                is_reached[tree.root as usize] = true;
                for (from, to, paths) in &tree.edges {
                    assert!(is_reached[*from as usize]);
                    assert!(!std::mem::replace(&mut is_reached[*to as usize], true));
                    assert_eq!(paths.iter().map(|path| path.1).sum::<Amount>(), tree.amount);
                    for (nodes, _) in paths {
                        assert_eq!(nodes.first(), Some(&graph.ranks()[*from as usize]));
                        assert_eq!(nodes.last(), Some(&graph.ranks()[*to as usize]));
                    }
                }
                assert!(is_reached.iter().all(|&is_reached| is_reached));
            }
            assert!(met.iter().zip(&demand).all(|(met, wanted)| *met == wanted * extracted.parts));
        }
        assert!(packed > 150, "{packed}");
    }

    #[test]
    fn a_switch_gives_every_rank_a_tree_that_reaches_all_others_at_once() {
        let ranks = 12;
        let edges = (0..ranks)
            .flat_map(|rank| [(rank, ranks, ranks as Amount - 1), (ranks, rank, ranks as Amount - 1)]);
        let graph = Digraph::new(ranks + 1, (0..ranks).collect(), edges);
        let extracted = pack(&graph, &vec![1; ranks], true).unwrap();
        assert_eq!(extracted.trees.len(), ranks);
        for tree in &extracted.trees {
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
        let extracted = pack(&graph, &demand, true).unwrap();
        // The path goes through the switch twice, and counts three each time.
        assert_eq!(Depth::of(&extracted, ranks).most, 6);
        let trees_in = pack(&graph, &demand, false).unwrap();
        assert_eq!((trees_in.parts, Depth::of(&trees_in, ranks).most), (1, 3 * (ranks - 1)));
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

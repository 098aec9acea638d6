//! Heuristic packing for graphs that are too large for exact packing and have no symmetry.
//!
//! Exact packing takes about `ranks²` flows over all links, which takes hours for some hundred
//! ranks. Here trees of equal weight are grown one after the other, each in the time of a few
//! passes over the links. The bound is exact while one flow for each rank is affordable
//! ([`BOUND_WORK_MAX`]); beyond that it is the minimum cut around a single rank.
//!
//! Let `λ = trees / bound`, the optimal use of a link of one byte a second. The *price* of a link
//! is its number of uses divided by its bandwidth. It is at least `λ`, so all uses that the optimum
//! affords cost the same. A tree next reaches the rank with the smallest maximum price of the links
//! on its path. Of several such ranks, it takes the rank that it reaches first; the edges of one
//! rank leave one after the other. This gives trees of logarithmic depth. Edges that leave a rank
//! beyond its share so far have a price too. The weight of each tree is the smallest quotient of
//! bandwidth and uses over all links. Of trees for the same data, only the number of trees that
//! carries the most is kept.
//!
//! The trees of a single root are [extracted](super::extraction) first if there is time for a flow
//! to every rank after each of them. This often gives the optimum; otherwise the better result is
//! taken.
//!
//! **Invariant:** every tree spans all ranks, no link exceeds its capacity, and the rate is the sum
//! of the trees. The result depends on the topology alone: work is counted and not timed, and
//! prices are compared bit by bit.

use std::cmp::Reverse;
use std::collections::{BTreeSet, BinaryHeap};

use pleach_vocabulary::{Collective, Rank};

use crate::depth::reduce_depth;
use crate::digraph::Digraph;
use crate::directed::{Forest, certificate};
use crate::flow::{Amount, Network};
use crate::rate::{around_single_ranks, best_rate, signed};
use crate::scale::merged;
use crate::topology::{Link, NodeId, Topology};
use crate::{Certificate, Edge, MAX_TREES_PER_ROOT, Packing, Path, Rate, Tree, directed, extraction};

#[cfg(test)]
mod tests;

/// Largest value of ranks² × links for which a graph is packed exactly.
const EXACT_WORK_MAX: u64 = 1 << 26;

/// Largest value of ranks × links for which the bound is exact if the packing is not.
const BOUND_WORK_MAX: u64 = 1 << 26;

/// Largest value of ranks × links for which the trees of a root are extracted first.
const EXTRACTION_WORK_MAX: u64 = 1 << 23;

/// Approximate number of links that the growth of all trees visits.
const GROWTH_WORK_MAX: u64 = 1 << 26;

/// Fewest trees for the same data, so that the uses of a link are close to its share.
const TREES_MIN: u32 = 64;

/// If the optimum has fewer trees than this, more trees of less weight are extracted.
const SHARED_TREES_MIN: Amount = 4;

/// Most trees of an all-reduce.
const ALL_REDUCE_TREES_MAX: u32 = 256;

/// Number of trees for the same data, for each multiple of the largest bandwidth of a link in the
/// bound.
const TREES_PER_LINK: u32 = 4;

/// Number of edges by which a rank may exceed its share without a price.
const AHEAD_EDGES: f64 = 8.0;

/// Largest number of times that the path of a tree to a switch is improved.
const IMPROVEMENTS_MAX: u8 = 8;

/// Whether exact packing takes seconds at most.
pub(super) fn is_exact_within_reach(topology: &Topology) -> bool {
    let (ranks, links) = (u64::from(topology.ranks()), topology.links().len() as u64);
    ranks.saturating_mul(ranks).saturating_mul(links) <= EXACT_WORK_MAX
}

/// Whether a flow for every rank takes seconds at most.
pub(super) fn is_bound_within_reach(topology: &Topology) -> bool {
    u64::from(topology.ranks()) * topology.links().len() as u64 <= BOUND_WORK_MAX
}

/// Packs trees of equal weight, `trees_per_root` for each root (for all-reduce: for each rank).
///
/// # Panics
///
/// When there are fewer than two ranks, the root is none of them, or `collective` is not a
/// collective whose trees are used in one direction.
pub(super) fn pack_one_way(
    topology: &Topology,
    collective: Collective,
    trees_per_root: Option<u32>,
) -> Packing {
    let is_towards = matches!(collective, Collective::Reduce { .. } | Collective::ReduceScatter);
    let reversed = is_towards.then(|| topology.reversed());
    let grown_on = reversed.as_ref().unwrap_or(topology);
    let (graph, unit) = Digraph::of(grown_on);
    let ranks = topology.ranks() as usize;
    let demand: Vec<_> = match collective.root() {
        Some(root) => (0..ranks).map(|rank| u128::from(rank == root as usize)).collect(),
        None => vec![1; ranks],
    };
    let best = if is_bound_within_reach(topology) {
        best_rate(&graph, &demand)
    } else {
        around_single_ranks(&graph, &demand)
    };
    let best = best.expect("there are two ranks and something to send");
    let bound = best.rate * signed(demand.iter().sum()) * signed(unit);
    let mut packer = GreedyPacker::new(grown_on, false);
    let mut partial = None;
    let trees = match collective.root() {
        Some(root) => {
            if trees_per_root.is_none()
                && let Some(trees) = extracted(grown_on, &graph, root, best.rate, signed(unit))
            {
                let certificate = certificate(best.clone());
                let mut packing = packing_of(topology, collective, bound, certificate, trees, is_towards);
                reduce_depth(&mut packing, topology);
                if packing.is_optimal() {
                    return packing;
                }
                partial = Some(packing);
            }
            if is_bound_within_reach(topology) {
                packer.narrow_cuts = NarrowCuts::around(grown_on, root);
            }
            let count = trees_per_root.unwrap_or_else(|| packer.count(bound, MAX_TREES_PER_ROOT));
            packer.grow(&vec![root; count as usize], bound, trees_per_root.is_none())
        }
        None => {
            let count = trees_per_root.unwrap_or(1);
            let roots: Vec<Rank> = (0..count).flat_map(|_| 0..topology.ranks()).collect();
            packer.grow(&roots, bound, false)
        }
    };
    let trees = trees.expect("all ranks are reached from each");
    let grown = packing_of(topology, collective, bound, certificate(best), trees, is_towards);
    partial.filter(|partial: &Packing| partial.rate >= grown.rate).unwrap_or(grown)
}

/// Extracts whole trees at the best rate; `None` if this takes too much work or too many trees.
fn extracted(topology: &Topology, graph: &Digraph, root: Rank, best: Rate, unit: i128) -> Option<Vec<Tree>> {
    let work = u64::from(topology.ranks()) * topology.links().len() as u64;
    if work > EXTRACTION_WORK_MAX {
        return None;
    }
    let total = best.numer().unsigned_abs();
    // If bandwidths have no common divisor, the optimum has very many trees. Only few of them would
    // be found.
    if total > Amount::from(MAX_TREES_PER_ROOT) {
        return None;
    }
    // A single tree may have to be a chain.
    let shares = if total < SHARED_TREES_MIN { Amount::from(TREES_MIN) } else { 1 };
    let parts = best.denom().unsigned_abs() * shares;
    let graph = graph.map(|_, _, capacity| capacity * parts);
    let mut demand = vec![0; graph.ranks().len()];
    demand[root as usize] = total * shares;
    let trees = extraction::extract(&graph, &demand, Amount::from(TREES_MIN))?;
    Some(
        Forest { unit: Rate::new(unit, signed(parts)), trees: directed::merged(trees) }
            .trees(Rate::from_integer(1), false),
    )
    .filter(|trees| (1..=MAX_TREES_PER_ROOT as usize).contains(&trees.len()))
}

/// Packs trees of equal weight that are used in both directions, for an all-reduce with this bound,
/// with this average number of trees for each rank. `None` if some ranks are linked in one
/// direction only.
pub(super) fn pack_both_ways(
    topology: &Topology,
    bound: Rate,
    certificate: Certificate,
    trees_per_root: Option<u32>,
) -> Option<Packing> {
    let ranks = topology.ranks();
    let mut packer = GreedyPacker::new(topology, true);
    let count = trees_per_root
        .map_or_else(|| packer.count(bound, ALL_REDUCE_TREES_MAX), |count| count.saturating_mul(ranks));
    let roots: Vec<Rank> = (0..count).map(|tree| tree % ranks).collect();
    let trees = packer.grow(&roots, bound, trees_per_root.is_none())?;
    Some(packing_of(topology, Collective::AllReduce, bound, certificate, trees, true))
}

fn packing_of(
    topology: &Topology,
    collective: Collective,
    bound: Rate,
    certificate: Certificate,
    mut trees: Vec<Tree>,
    is_towards: bool,
) -> Packing {
    if is_towards {
        trees.iter_mut().for_each(Tree::turn);
    }
    debug_assert!(trees.iter().all(|tree| tree.edges.len() + 1 == topology.ranks() as usize));
    let rate = trees.iter().map(|tree| tree.weight).sum();
    Packing { collective, rate, bound, certificate, trees }
}

/// The price of a path, as the bits of a float that is not negative, and the time when its end is
/// reached.
type Cost = (u64, u32);

/// The state of the packing: the topology and the load of its links.
struct GreedyPacker<'t> {
    topology: &'t Topology,
    is_both_ways: bool,
    /// Where the links of each node begin in [`Topology::links`].
    first: Vec<usize>,
    /// The capacity of each link for trees, in bytes a second.
    carries: Vec<u64>,
    /// The number of edges of trees over each link.
    uses: Vec<u32>,
    /// The opposite link, if trees are used in both directions.
    back: Vec<usize>,
    /// By node: the capacity that leaves it, and the number of tree edges that leave it.
    exits: Vec<(f64, u32)>,
    /// The narrow cuts of a single root.
    narrow_cuts: NarrowCuts,
}

/// A tree while it grows.
struct PartialTree {
    /// By node: the link that leads to it.
    by: Vec<Option<usize>>,
    /// By node: how often its path was improved.
    improvements: Vec<u8>,
    /// By node: the time at which it was reached; ranks only.
    reached: Vec<Option<u32>>,
    /// By node: the number of edges that leave it.
    leaving: Vec<u32>,
    queue: BinaryHeap<Reverse<(Cost, u32)>>,
    /// The links of every edge, from its sender on.
    edges: Vec<Vec<usize>>,
}

/// The prices at the optimum.
struct PriceTarget {
    /// The price of a link at the optimum.
    price: f64,
    /// The share of all trees that exist after the present tree.
    progress: f64,
}

impl<'t> GreedyPacker<'t> {
    fn new(topology: &'t Topology, is_both_ways: bool) -> Self {
        let links = topology.links();
        let mut first = Vec::with_capacity(topology.nodes().len() + 1);
        first.push(0);
        for node in 0..topology.nodes().len() {
            first.push(first[node] + topology.leaving(NodeId(node as u32)).len());
        }
        let back = |link: &Link| topology.link_place(link.to, link.from);
        let backs: Vec<Option<usize>> =
            if is_both_ways { links.iter().map(back).collect() } else { Vec::new() };
        let carried = |(place, link): (usize, &Link)| match backs.get(place) {
            None => link.bytes_per_s,
            Some(back) => back.map_or(0, |back| links[back].bytes_per_s.min(link.bytes_per_s)),
        };
        let carries: Vec<u64> = links.iter().enumerate().map(carried).collect();
        let mut exits = vec![(0.0, 0); topology.nodes().len()];
        for (link, &carried) in links.iter().zip(&carries) {
            exits[link.from.0 as usize].0 += carried as f64;
        }
        let uses = vec![0; links.len()];
        let back = backs.into_iter().enumerate().map(|(place, back)| back.unwrap_or(place)).collect();
        Self { topology, is_both_ways, first, carries, uses, back, exits, narrow_cuts: NarrowCuts::default() }
    }

    /// The useful number of trees for the same data with this bound, at most `most`.
    fn count(&self, bound: Rate, most: u32) -> u32 {
        let widest = self.carries.iter().copied().max().unwrap_or(1).max(1);
        let wanted = (bound * i128::from(TREES_PER_LINK) / i128::from(widest)).ceil().to_integer();
        let affordable = GROWTH_WORK_MAX / (self.carries.len() as u64).max(1);
        let most = u64::from(most).min(affordable).max(1) as u32;
        u32::try_from(wanted).unwrap_or(u32::MAX).max(TREES_MIN).min(most)
    }

    /// Grows one tree from each of these roots. All trees have the same weight, and equal trees are
    /// merged. With `can_be_fewer` the trees carry the same data, and only the best number of them
    /// is kept. `None` if a root does not reach all ranks.
    fn grow(&mut self, roots: &[Rank], bound: Rate, can_be_fewer: bool) -> Option<Vec<Tree>> {
        let count = roots.len();
        let price = count as f64 * *bound.denom() as f64 / *bound.numer() as f64;
        let mut grown: Vec<(Rank, Vec<Vec<usize>>)> = Vec::with_capacity(count);
        let (mut most, mut best, mut kept) = (0.0_f64, 0.0, 0);
        for (tree, &root) in roots.iter().enumerate() {
            let target = PriceTarget { price, progress: (tree + 1) as f64 / count as f64 };
            let edges = self.grow_tree(root, &target)?;
            let dearest =
                edges.iter().flatten().map(|&link| self.uses[link] as f64 / self.carries[link] as f64);
            most = dearest.fold(most, f64::max);
            grown.push((root, edges));
            if !can_be_fewer || (tree + 1) as f64 / most > best {
                (best, kept) = ((tree + 1) as f64 / most, tree + 1);
            }
        }
        grown.truncate(kept);
        let weight = self.level(&grown);
        Some(merged(grown.into_iter().map(|(root, edges)| self.tree(root, weight, edges)).collect()))
    }

    /// The largest weight of each tree.
    fn level(&mut self, grown: &[(Rank, Vec<Vec<usize>>)]) -> Rate {
        self.uses.fill(0);
        grown.iter().flat_map(|(_, edges)| edges.iter().flatten()).for_each(|&link| self.load(link));
        let used = self.uses.iter().zip(&self.carries).filter(|(uses, _)| **uses > 0);
        let share = used.map(|(&uses, &carries)| Rate::new(carries.into(), uses.into())).min();
        share.expect("there are edges")
    }

    fn load(&mut self, link: usize) {
        self.uses[link] += 1;
        if self.is_both_ways {
            self.uses[self.back[link]] += 1;
        }
    }

    fn tree(&self, root: Rank, weight: Rate, edges: Vec<Vec<usize>>) -> Tree {
        let links = self.topology.links();
        let rank = |node: NodeId| self.topology.rank(node).expect("edges join ranks");
        let edge = |path: Vec<usize>| {
            let begin = links[path[0]].from;
            let hops: Vec<NodeId> =
                std::iter::once(begin).chain(path.iter().map(|&link| links[link].to)).collect();
            let to = rank(hops[hops.len() - 1]);
            Edge { from: rank(begin), to, paths: vec![Path { hops, weight }] }
        };
        Tree { root, weight, edges: edges.into_iter().map(edge).collect() }
    }

    /// Grows a tree and loads the links with it.
    fn grow_tree(&mut self, root: Rank, target: &PriceTarget) -> Option<Vec<Vec<usize>>> {
        let nodes = self.topology.nodes().len();
        let others = self.topology.ranks() as usize - 1;
        let mut grow_tree = PartialTree {
            by: vec![None; nodes],
            improvements: vec![0; nodes],
            reached: vec![None; nodes],
            leaving: vec![0; nodes],
            queue: BinaryHeap::new(),
            edges: Vec::with_capacity(others),
        };
        let root = self.topology.node(root).0 as usize;
        grow_tree.reached[root] = Some(0);
        self.relax(&mut grow_tree, root, target);
        while grow_tree.edges.len() < others {
            let Reverse((known, node)) = grow_tree.queue.pop()?;
            let node = node as usize;
            if grow_tree.reached[node].is_some() {
                continue;
            }
            // A tree may have loaded the path since the cost was computed.
            let cost = self.cost(&grow_tree, node, target);
            if cost > known {
                grow_tree.queue.push(Reverse((cost, node as u32)));
                continue;
            }
            if !self.is_rank(node) {
                self.relax(&mut grow_tree, node, target);
                continue;
            }
            self.attach(&mut grow_tree, node, cost.1);
            self.relax(&mut grow_tree, node, target);
        }
        Some(grow_tree.edges)
    }

    fn is_rank(&self, node: usize) -> bool {
        self.topology.rank(NodeId(node as u32)).is_some()
    }

    /// Adds a rank to the tree by its path.
    fn attach(&mut self, grow_tree: &mut PartialTree, node: usize, time: u32) {
        let links = self.topology.links();
        let mut path = Vec::new();
        let mut at = node;
        while let Some(link) = grow_tree.by[at].filter(|_| grow_tree.reached[at].is_none()) {
            path.push(link);
            at = links[link].from.0 as usize;
        }
        path.reverse();
        for &link in &path {
            self.load(link);
            self.narrow_cuts.enter(link);
        }
        self.exits[at].1 += 1;
        self.exits[node].1 += u32::from(self.is_both_ways);
        grow_tree.leaving[at] += 1;
        grow_tree.reached[node] = Some(time);
        grow_tree.edges.push(path);
    }

    /// Improves the paths to the neighbours of a node (as in Dijkstra's algorithm).
    fn relax(&self, grow_tree: &mut PartialTree, node: usize, target: &PriceTarget) {
        let cost = self.cost(grow_tree, node, target);
        for place in self.first[node]..self.first[node + 1] {
            let to = self.topology.links()[place].to.0 as usize;
            if self.carries[place] == 0 || grow_tree.reached[to].is_some() {
                continue;
            }
            let there = (cost.0.max(self.price(place, target)), cost.1 + 1);
            let may_be_better = grow_tree.improvements[to] < IMPROVEMENTS_MAX || self.is_rank(to);
            let is_better =
                grow_tree.by[to].is_none() || (may_be_better && there < self.cost(grow_tree, to, target));
            if is_better {
                grow_tree.by[to] = Some(place);
                grow_tree.improvements[to] = grow_tree.improvements[to].saturating_add(1);
                grow_tree.queue.push(Reverse((there, to as u32)));
            }
        }
    }

    /// The present cost of the known path to a node.
    fn cost(&self, grow_tree: &PartialTree, node: usize, target: &PriceTarget) -> Cost {
        let (mut at, mut price, mut hops) = (node, 0, 0);
        while let Some(link) = grow_tree.by[at].filter(|_| grow_tree.reached[at].is_none()) {
            price = price.max(self.price(link, target));
            hops += 1;
            at = self.topology.links()[link].from.0 as usize;
        }
        let start = self.cost_of_rank(grow_tree, at, target);
        (start.0.max(price), start.1 + hops)
    }

    /// The cost of one more edge that leaves a reached rank, without its links.
    fn cost_of_rank(&self, grow_tree: &PartialTree, node: usize, target: &PriceTarget) -> Cost {
        let (carries, edges) = self.exits[node];
        let all = carries * target.price;
        let share = (all * target.progress + AHEAD_EDGES).min(all).max(1.0);
        let price = target.price * (f64::from(edges + 1) / share).max(1.0);
        (price.to_bits(), grow_tree.reached[node].unwrap_or(0) + grow_tree.leaving[node])
    }

    /// The price of one more edge over a link.
    fn price(&self, link: usize, target: &PriceTarget) -> u64 {
        let of_sets = target.price * self.narrow_cuts.excess(link, target.price * target.progress);
        (f64::from(self.uses[link] + 1) / self.carries[link] as f64).max(of_sets).to_bits()
    }
}

// Narrow cuts, and the number of times that trees have entered them.
//
// Every tree enters every set without its root at least once. If the bandwidth into a set is little
// more than the bound, trees that enter it several times leave too little capacity for later trees,
// even if no link is full yet. One example is a server that all other servers reach over few NICs.
// Another example is the set of all nodes outside the server of the root. A flow to every rank
// finds such sets: they are its minimum cuts nearest to the rank and nearest to the root.

/// Largest number of sets that are kept.
const SETS_MAX: usize = 4_096;

/// The sets, and for each link the sets into which it leads.
#[derive(Debug, Default)]
struct NarrowCuts {
    sets: Vec<NarrowCut>,
    /// By place in [`Topology::links`]; empty if there are no sets.
    entered_by: Vec<Vec<u32>>,
}

#[derive(Debug)]
struct NarrowCut {
    /// The bandwidth into the set, in bytes a second.
    carries: f64,
    /// How often trees have entered the set.
    entries: u32,
}

impl NarrowCuts {
    /// The narrow cuts of a root with several ranks inside. A single rank needs no set, because
    /// every tree enters it once.
    fn around(topology: &Topology, root: Rank) -> Self {
        let links = topology.links();
        let mut network = Network::new(topology.nodes().len());
        for link in links {
            network.add(link.from.0 as usize, link.to.0 as usize, Amount::from(link.bytes_per_s), 0);
        }
        let root = topology.node(root).0 as usize;
        let ranks: Vec<usize> = (0..topology.ranks()).map(|rank| topology.node(rank).0 as usize).collect();
        let mut found: BTreeSet<Vec<bool>> = BTreeSet::new();
        for &rank in ranks.iter().filter(|&&rank| rank != root) {
            network.max_flow_value(root, rank, Amount::MAX);
            let far = (0..network.nodes()).map(|node| !network.is_source_side(node)).collect();
            for set in [network.sink_side(rank), far] {
                if ranks.iter().filter(|&&rank| set[rank]).count() > 1 && found.len() < SETS_MAX {
                    found.insert(set);
                }
            }
        }
        let mut narrow_cuts =
            Self { sets: Vec::with_capacity(found.len()), entered_by: vec![Vec::new(); links.len()] };
        for (number, set) in found.iter().enumerate() {
            let mut carries = 0.0;
            for (place, link) in links.iter().enumerate() {
                if set[link.to.0 as usize] && !set[link.from.0 as usize] {
                    narrow_cuts.entered_by[place].push(number as u32);
                    carries += link.bytes_per_s as f64;
                }
            }
            narrow_cuts.sets.push(NarrowCut { carries, entries: 0 });
        }
        narrow_cuts
    }

    /// Counts one more use of a link.
    fn enter(&mut self, link: usize) {
        for &set in self.entered_by.get(link).into_iter().flatten() {
            self.sets[set as usize].entries += 1;
        }
    }

    /// The largest excess of entries over the share so far, of all sets into which the link leads.
    /// One more use of the link counts. At least 1. `per_byte` is the number of entries so far for
    /// each byte a second of bandwidth into a set.
    fn excess(&self, link: usize, per_byte: f64) -> f64 {
        let excess = |&set: &u32| {
            let NarrowCut { carries, entries } = self.sets[set as usize];
            f64::from(entries + 1) / (carries * per_byte).max(1.0)
        };
        self.entered_by.get(link).into_iter().flatten().map(excess).fold(1.0, f64::max)
    }
}

//! Reduces the depth of trees without more load on any link.
//!
//! The depth of a tree has no influence on throughput, but the first byte takes the longest path
//! from root to leaf. Three steps reduce the depth and keep all loads:
//!
//! * A tree that is used in both directions (all-reduce) gets its root in its *centre*.
//! * Two trees *exchange* edges: if `A - e + f` and `B - f + e` are trees again, all loads stay the
//!   same. An exchange is made if the deeper of the two trees becomes less deep, or if neither
//!   becomes deeper and one becomes less deep. If the weights of the trees differ, the heavier tree
//!   is split.
//! * Trees with the same root and the same edges become *one* tree, even if their paths differ.
//!
//! The length of an edge is the latency of its slowest path plus one nanosecond, so that edges
//! count if no latencies are known.
//!
//! **Invariant:** these quantities do not change: the rate, the weight of each root (except for
//! all-reduce, where roots are free), and the total that each path of links carries. Amounts are
//! integers of a common unit.

use std::collections::BTreeMap;

use num_rational::Ratio;
use pleach_vocabulary::{Collective, Rank};

use super::digraph::greatest_divisor;
use super::flow::Amount;
use super::{Edge, Packing, Path, Rate, Tree};
use crate::topology::{NodeId, Topology};

/// Limit of the work of all exchanges for few ranks, in visited ranks: some milliseconds.
const WORK_MAX: usize = 200_000;
/// The same limit for many ranks: a fifth of a second. Packing many ranks takes longer in any case.
const WORK_MAX_OF_MANY: usize = 5_000_000;
/// Largest number of ranks for which the limit for few ranks holds.
const FEW_RANKS_MAX: u32 = 16;

/// Splitting may add this part of the number of trees, as a divisor.
const SPLITS_MAX_FRACTION: usize = 4;

/// The directions in which the edges of a tree are used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Direction {
    /// From the root.
    Out,
    /// To the root.
    In,
    /// Both directions; any rank may be the root.
    Both,
}

/// Parallel paths of an edge, each with its amount.
type Paths = Vec<(Vec<NodeId>, Amount)>;

/// An edge. It leads away from the root, or has no direction if any rank may be the root.
#[derive(Clone, Debug)]
struct TreeEdge {
    from: usize,
    to: usize,
    depth_ns: u64,
    paths: Paths,
}

#[derive(Clone, Debug)]
struct WeightedTree {
    root: usize,
    weight: Amount,
    edges: Vec<TreeEdge>,
    /// The length of the longest path from the root; if any rank may be the root, from the centre.
    depth_ns: u64,
}

/// Reduces the depth of the trees of a packing. Gather and scatter have no trees and stay
/// unchanged.
pub(super) fn reduce_depth(packing: &mut Packing, topology: &Topology) {
    let direction = match packing.collective {
        Collective::AllReduce => Direction::Both,
        Collective::Broadcast { .. } | Collective::AllGather => Direction::Out,
        Collective::Reduce { .. } | Collective::ReduceScatter => Direction::In,
        _ => return,
    };
    let Some(unit) = shared_unit(&packing.trees) else { return };
    let mut forest = Forest {
        direction,
        ranks: topology.ranks() as usize,
        trees: packing.trees.iter().map(|tree| WeightedTree::of(tree, unit, direction, topology)).collect(),
        work: 0,
        work_max: if topology.ranks() <= FEW_RANKS_MAX { WORK_MAX } else { WORK_MAX_OF_MANY },
    };
    forest.trees.iter_mut().for_each(|tree| tree.measure_depth(direction, topology.ranks() as usize));
    forest.merge();
    forest.exchange();
    forest.merge();
    packing.trees = forest.trees.iter().map(|tree| tree.packed(unit, direction)).collect();
}

/// The largest rate of which all weights are multiples; `None` if numbers get too large.
fn shared_unit(trees: &[Tree]) -> Option<Rate> {
    let paths = trees.iter().flat_map(|tree| &tree.edges).flat_map(|edge| &edge.paths);
    let weights = || trees.iter().map(|tree| tree.weight).chain(paths.clone().map(|path| path.weight));
    let mut denominator: i128 = 1;
    for weight in weights() {
        let common = greatest_divisor(denominator.unsigned_abs(), weight.denom().unsigned_abs());
        denominator = denominator.checked_mul(weight.denom() / common as i128)?;
    }
    let mut numerator = 0;
    for weight in weights() {
        let scaled = weight.numer().checked_mul(denominator / weight.denom())?;
        numerator = greatest_divisor(numerator, scaled.unsigned_abs());
    }
    (numerator != 0).then(|| Ratio::new(numerator as i128, denominator))
}

impl WeightedTree {
    fn of(tree: &Tree, unit: Rate, direction: Direction, topology: &Topology) -> Self {
        let amount = |weight: Rate| (weight / unit).to_integer().unsigned_abs();
        let edge = |edge: &Edge| {
            let mut paths: Paths =
                edge.paths.iter().map(|path| (path.hops.clone(), amount(path.weight))).collect();
            let (mut from, mut to) = (edge.from as usize, edge.to as usize);
            if direction == Direction::In {
                (from, to) = (to, from);
                paths.iter_mut().for_each(|(hops, _)| hops.reverse());
            }
            let depth_ns =
                edge.paths.iter().map(|path| latency_ns(&path.hops, topology)).max().unwrap_or(0) + 1;
            TreeEdge { from, to, depth_ns, paths }
        };
        Self {
            root: tree.root as usize,
            weight: amount(tree.weight),
            edges: tree.edges.iter().map(edge).collect(),
            depth_ns: 0,
        }
    }

    fn packed(&self, unit: Rate, direction: Direction) -> Tree {
        let mut edges = Vec::with_capacity(self.edges.len());
        let adjacency = Adjacency::of(&self.edges, self.edges.len() + 1);
        for (node, place) in adjacency.outwards(self.root) {
            let edge = &self.edges[place];
            let is_turned = direction == Direction::In || (direction == Direction::Both && edge.to == node);
            let mut paths: Vec<Path> = Vec::with_capacity(edge.paths.len());
            for (hops, amount) in &edge.paths {
                let mut hops = hops.clone();
                if is_turned {
                    hops.reverse();
                }
                paths.push(Path { hops, weight: unit * *amount as i128 });
            }
            let (from, to) = if is_turned { (edge.to, edge.from) } else { (edge.from, edge.to) };
            edges.push(Edge { from: from as Rank, to: to as Rank, paths });
        }
        if direction != Direction::Out {
            edges.reverse();
        }
        Tree { root: self.root as Rank, weight: unit * self.weight as i128, edges }
    }

    /// Finds the centre if any rank may be the root, and computes the length of the longest path.
    fn measure_depth(&mut self, direction: Direction, ranks: usize) {
        let adjacency = Adjacency::of(&self.edges, ranks);
        if direction != Direction::Both {
            self.depth_ns = adjacency.farthest(&self.edges, self.root).1.into_iter().max().unwrap_or(0);
            return;
        }
        let (one, _) = adjacency.farthest(&self.edges, 0);
        let (other, from_one) = adjacency.farthest(&self.edges, one);
        let (_, from_other) = adjacency.farthest(&self.edges, other);
        let middle = |&rank: &usize| (from_one[rank].max(from_other[rank]), rank);
        self.root = (0..ranks).min_by_key(middle).unwrap_or(0);
        self.depth_ns = from_one[self.root].max(from_other[self.root]);
    }

    /// Splits off a tree with this weight, path by path.
    fn split(&mut self, weight: Amount) -> Self {
        let mut other = self.clone();
        other.weight = weight;
        self.weight -= weight;
        for (kept, given) in self.edges.iter_mut().zip(&mut other.edges) {
            let mut left = weight;
            for ((_, kept), (_, given)) in kept.paths.iter_mut().zip(&mut given.paths) {
                *given = left.min(*kept);
                *kept -= *given;
                left -= *given;
            }
            kept.paths.retain(|path| path.1 != 0);
            given.paths.retain(|path| path.1 != 0);
        }
        other
    }

    /// The key that is equal for trees that can be merged.
    fn shape(&self, direction: Direction) -> (usize, Vec<(usize, usize)>) {
        let ends = |edge: &TreeEdge| match direction {
            Direction::Both => (edge.from.min(edge.to), edge.from.max(edge.to)),
            Direction::Out | Direction::In => (edge.from, edge.to),
        };
        let mut edges: Vec<(usize, usize)> = self.edges.iter().map(ends).collect();
        edges.sort_unstable();
        (self.root, edges)
    }
}

fn latency_ns(hops: &[NodeId], topology: &Topology) -> u64 {
    let link = |pair: &[NodeId]| topology.link(pair[0], pair[1]).map_or(0, |link| link.latency_ns);
    hops.windows(2).map(link).sum()
}

/// The edges at every rank, with their other ends. One list holds all of them, because a packing
/// has many trees.
struct Adjacency {
    /// For each rank, the place of its first entry in the list. The last element is the length of
    /// the list.
    starts: Vec<usize>,
    /// The other end of the edge and the index of the edge.
    list: Vec<(usize, usize)>,
}

impl Adjacency {
    fn of(edges: &[TreeEdge], ranks: usize) -> Self {
        let mut starts = vec![0; ranks + 1];
        for edge in edges {
            starts[edge.from + 1] += 1;
            starts[edge.to + 1] += 1;
        }
        for rank in 0..ranks {
            starts[rank + 1] += starts[rank];
        }
        let (mut next, mut list) = (starts.clone(), vec![(0, 0); 2 * edges.len()]);
        for (place, edge) in edges.iter().enumerate() {
            for (at, to) in [(edge.from, edge.to), (edge.to, edge.from)] {
                list[next[at]] = (to, place);
                next[at] += 1;
            }
        }
        Self { starts, list }
    }

    fn ranks(&self) -> usize {
        self.starts.len() - 1
    }

    fn at(&self, rank: usize) -> &[(usize, usize)] {
        &self.list[self.starts[rank]..self.starts[rank + 1]]
    }

    /// The ranks with the edge that leads to each, in breadth-first order from the root.
    fn outwards(&self, root: usize) -> Vec<(usize, usize)> {
        let mut found: Vec<(usize, usize)> = Vec::with_capacity(self.ranks());
        let (mut node, mut from, mut seen) = (root, usize::MAX, 0);
        loop {
            found.extend(self.at(node).iter().filter(|&&(_, place)| place != from));
            let Some(&next) = found.get(seen) else { return found };
            (node, from) = next;
            seen += 1;
        }
    }

    /// The first of the farthest ranks from this rank, and the distances of all ranks.
    fn farthest(&self, edges: &[TreeEdge], root: usize) -> (usize, Vec<u64>) {
        let mut distances = vec![0; self.ranks()];
        for (node, place) in self.outwards(root) {
            let edge = &edges[place];
            let parent = if edge.to == node { edge.from } else { edge.to };
            distances[node] = distances[parent] + edge.depth_ns;
        }
        let farthest = (0..distances.len()).max_by_key(|&rank| (distances[rank], std::cmp::Reverse(rank)));
        (farthest.unwrap_or(root), distances)
    }
}

struct Forest {
    direction: Direction,
    ranks: usize,
    trees: Vec<WeightedTree>,
    /// Visited ranks.
    work: usize,
    work_max: usize,
}

impl Forest {
    /// Merges trees with the same edges.
    fn merge(&mut self) {
        let mut shapes: BTreeMap<(usize, Vec<(usize, usize)>), WeightedTree> = BTreeMap::new();
        let direction = self.direction;
        for mut tree in self.trees.drain(..) {
            tree.edges.sort_by_key(|edge| (edge.from.min(edge.to), edge.from.max(edge.to)));
            let Some(same) = shapes.get_mut(&tree.shape(direction)) else {
                shapes.insert(tree.shape(direction), tree);
                continue;
            };
            same.weight += tree.weight;
            same.depth_ns = same.depth_ns.max(tree.depth_ns);
            for (edge, more) in same.edges.iter_mut().zip(tree.edges) {
                edge.depth_ns = edge.depth_ns.max(more.depth_ns);
                let is_turned = edge.from != more.from;
                for (mut hops, amount) in more.paths {
                    if is_turned {
                        hops.reverse();
                    }
                    match edge.paths.iter_mut().find(|path| path.0 == hops) {
                        Some(path) => path.1 += amount,
                        None => edge.paths.push((hops, amount)),
                    }
                }
            }
        }
        self.trees = shapes.into_values().collect();
        self.trees.sort_by_key(|tree| (tree.root, std::cmp::Reverse(tree.weight)));
    }

    /// Exchanges edges between trees until no exchange helps or the limit of the work is reached.
    fn exchange(&mut self) {
        let most = self.trees.len() + self.trees.len() / SPLITS_MAX_FRACTION;
        loop {
            let mut order: Vec<usize> = (0..self.trees.len()).collect();
            order.sort_by_key(|&tree| (std::cmp::Reverse(self.trees[tree].depth_ns), tree));
            let is_better = order.iter().any(|&tree| self.exchange_one(tree, most));
            if !is_better {
                return;
            }
        }
    }

    /// Reduces the depth of one tree by one exchange, if possible.
    fn exchange_one(&mut self, deep: usize, most: usize) -> bool {
        let adjacency = Adjacency::of(&self.trees[deep].edges, self.ranks);
        for place in self.longest_path(deep, &adjacency) {
            let inside = self.far_side(deep, place, &adjacency);
            for other in 0..self.trees.len() {
                let is_level = self.trees[other].weight == self.trees[deep].weight;
                if other == deep || (!is_level && self.trees.len() >= most) {
                    continue;
                }
                self.work += self.ranks;
                for partner in self.exchange_partners(deep, place, other, &inside) {
                    self.work += 4 * self.ranks;
                    if self.work >= self.work_max {
                        return false;
                    }
                    if self.try_exchange((deep, place), (other, partner)) {
                        return true;
                    }
                }
            }
        }
        false
    }

    /// The edges of a longest path of a tree.
    fn longest_path(&self, tree: usize, adjacency: &Adjacency) -> Vec<usize> {
        let tree = &self.trees[tree];
        let start = match self.direction {
            Direction::Both => adjacency.farthest(&tree.edges, tree.root).0,
            Direction::Out | Direction::In => tree.root,
        };
        let (mut node, _) = adjacency.farthest(&tree.edges, start);
        let mut above = vec![usize::MAX; self.ranks];
        adjacency.outwards(start).into_iter().for_each(|(to, place)| above[to] = place);
        let mut direction = Vec::new();
        while node != start {
            let edge = &tree.edges[above[node]];
            direction.push(above[node]);
            node = if edge.to == node { edge.from } else { edge.to };
        }
        direction
    }

    /// The ranks that a tree loses without an edge: the ranks on the far side of this edge.
    fn far_side(&self, tree: usize, place: usize, adjacency: &Adjacency) -> Vec<bool> {
        let mut is_cut = vec![false; self.ranks];
        let mut left = vec![self.trees[tree].edges[place].to];
        is_cut[left[0]] = true;
        while let Some(node) = left.pop() {
            for &(to, by) in adjacency.at(node) {
                if by != place && !std::mem::replace(&mut is_cut[to], true) {
                    left.push(to);
                }
            }
        }
        is_cut
    }

    /// The edges of another tree that can be exchanged for this edge.
    fn exchange_partners(&self, deep: usize, place: usize, other: usize, inside: &[bool]) -> Vec<usize> {
        let gone = &self.trees[deep].edges[place];
        let edges = &self.trees[other].edges;
        let same = |edge: &TreeEdge| {
            (edge.from, edge.to) == (gone.from, gone.to) || (edge.to, edge.from) == (gone.from, gone.to)
        };
        let rejoins = |edge: &TreeEdge| inside[edge.from] != inside[edge.to];
        // The edges of the cycle that this edge closes in the other tree.
        let adjacency = Adjacency::of(edges, self.ranks);
        let mut above = vec![(usize::MAX, usize::MAX); self.ranks];
        for (to, by) in adjacency.outwards(gone.from) {
            let edge = &edges[by];
            above[to] = (by, if edge.to == to { edge.from } else { edge.to });
        }
        let mut cycle = Vec::new();
        let mut node = gone.to;
        while node != gone.from {
            let (by, next) = above[node];
            cycle.push(by);
            node = next;
        }
        cycle.retain(|&by| {
            let edge = &edges[by];
            let fits = self.direction == Direction::Both || edge.to == gone.to;
            fits && rejoins(edge) && !same(edge)
        });
        cycle
    }

    /// Exchanges two edges if the deeper of the two trees becomes less deep, or if neither becomes
    /// deeper and one becomes less deep.
    fn try_exchange(&mut self, one: (usize, usize), other: (usize, usize)) -> bool {
        let (mut first, mut second) = (self.trees[one.0].clone(), self.trees[other.0].clone());
        let before = ordered(first.depth_ns, second.depth_ns);
        let weight = first.weight.min(second.weight);
        let first_rest = (first.weight > weight).then(|| first.split(first.weight - weight));
        let second_rest = (second.weight > weight).then(|| second.split(second.weight - weight));
        std::mem::swap(&mut first.edges[one.1], &mut second.edges[other.1]);
        if !self.is_tree(&first) || !self.is_tree(&second) {
            return false;
        }
        first.measure_depth(self.direction, self.ranks);
        second.measure_depth(self.direction, self.ranks);
        if ordered(first.depth_ns, second.depth_ns) >= before {
            return false;
        }
        self.trees[one.0] = first;
        self.trees[other.0] = second;
        self.trees.extend(first_rest.into_iter().chain(second_rest));
        true
    }

    /// Whether all ranks are reached from the root, in the direction of the edges if that matters.
    fn is_tree(&self, tree: &WeightedTree) -> bool {
        let adjacency = Adjacency::of(&tree.edges, self.ranks);
        let mut is_reached = vec![false; self.ranks];
        let mut left = vec![tree.root];
        is_reached[tree.root] = true;
        let mut reached = 1;
        while let Some(node) = left.pop() {
            for &(to, by) in adjacency.at(node) {
                let is_open = self.direction == Direction::Both || tree.edges[by].to == to;
                if is_open && !std::mem::replace(&mut is_reached[to], true) {
                    reached += 1;
                    left.push(to);
                }
            }
        }
        reached == self.ranks && tree.edges.len() + 1 == self.ranks
    }
}

fn ordered(one: u64, other: u64) -> (u64, u64) {
    (one.max(other), one.min(other))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Certificate;
    use crate::samples::Random;
    use crate::samples::random_topology;

    /// Random trees of random weights, whose loads may be anything.
    fn random_packing(random: &mut Random, topology: &Topology, collective: Collective) -> Packing {
        let ranks = u64::from(topology.ranks());
        let mut trees = Vec::new();
        for _ in 0..2 + random.below(6) {
            let root = match collective {
                Collective::Broadcast { root } | Collective::Reduce { root } => root,
                _ => random.below(ranks) as Rank,
            };
            let weight = Rate::new(1 + i128::from(random.below(4)), 3);
            trees.extend(random_tree(random, topology, root, weight, collective));
        }
        let rate = trees.iter().map(|tree| tree.weight).sum();
        Packing { collective, rate, bound: rate, certificate: Certificate::Alone, trees }
    }

    fn random_tree(
        random: &mut Random,
        topology: &Topology,
        root: Rank,
        weight: Rate,
        collective: Collective,
    ) -> Option<Tree> {
        let mut reached = vec![root];
        let mut edges = Vec::new();
        for _ in 0..1_000 {
            let from = reached[random.below(reached.len() as u64) as usize];
            let links = topology.leaving(topology.node(from));
            let to = links[random.below(links.len() as u64) as usize].to;
            let Some(to) = topology.rank(to).filter(|to| !reached.contains(to)) else { continue };
            reached.push(to);
            let hops = vec![topology.node(from), topology.node(to)];
            edges.push(Edge { from, to, paths: vec![Path { hops, weight }] });
        }
        let mut tree = Tree { root, weight, edges };
        let is_to_root = !matches!(collective, Collective::Broadcast { .. } | Collective::AllGather);
        if is_to_root {
            tree.edges.reverse();
            for edge in &mut tree.edges {
                std::mem::swap(&mut edge.from, &mut edge.to);
                edge.paths[0].hops.reverse();
            }
        }
        (reached.len() as u32 == topology.ranks()).then_some(tree)
    }

    /// The load of every link; for all-reduce, of both phases together.
    fn loads(packing: &Packing) -> BTreeMap<(NodeId, NodeId), Rate> {
        let mut loads = BTreeMap::new();
        for path in packing.trees.iter().flat_map(|tree| &tree.edges).flat_map(|edge| &edge.paths) {
            for pair in path.hops.windows(2) {
                let is_turned = packing.collective == Collective::AllReduce && pair[0] > pair[1];
                let ends = if is_turned { (pair[1], pair[0]) } else { (pair[0], pair[1]) };
                *loads.entry(ends).or_insert(Rate::from_integer(0)) += path.weight;
            }
        }
        loads
    }

    fn weights_of_roots(packing: &Packing) -> BTreeMap<Rank, Rate> {
        let mut weights = BTreeMap::new();
        for tree in &packing.trees {
            *weights.entry(tree.root).or_insert(Rate::from_integer(0)) += tree.weight;
        }
        weights
    }

    /// The depth of the deepest tree, and the depths of all trees times their weights.
    fn reach(packing: &Packing, topology: &Topology) -> (u64, Rate) {
        let paths = packing.trees.iter().map(|tree| crate::latency::longest_path_of_tree(tree, topology).0);
        let weighed = packing.trees.iter().zip(paths.clone());
        (paths.max().unwrap(), weighed.map(|(tree, direction)| tree.weight * direction as i128).sum())
    }

    #[test]
    fn loads_roots_and_rate_stay_and_no_packing_gets_deeper() {
        let mut random = Random::new(8);
        let (mut less_deep, mut rounds) = (0, 0);
        for round in 0..400 {
            let Some(topology) = random_topology(&mut random, 3 + round % 5, 0, true) else { continue };
            let collective = [
                Collective::AllReduce,
                Collective::Broadcast { root: 1 },
                Collective::Reduce { root: 2 },
                Collective::AllGather,
                Collective::ReduceScatter,
            ][round % 5];
            let before = random_packing(&mut random, &topology, collective);
            if before.trees.is_empty() {
                continue;
            }
            let mut after = before.clone();
            reduce_depth(&mut after, &topology);
            assert_eq!(loads(&after), loads(&before));
            assert_eq!(after.trees.iter().map(|tree| tree.weight).sum::<Rate>(), before.rate);
            if collective != Collective::AllReduce {
                assert_eq!(weights_of_roots(&after), weights_of_roots(&before));
            }
            for tree in &after.trees {
                assert_eq!(tree.edges.len() as u32 + 1, topology.ranks());
                for edge in &tree.edges {
                    assert_eq!(edge.paths.iter().map(|path| path.weight).sum::<Rate>(), tree.weight);
                    for path in &edge.paths {
                        assert_eq!(topology.rank(path.hops[0]), Some(edge.from));
                        assert_eq!(topology.rank(path.hops[1]), Some(edge.to));
                    }
                }
                assert_order(tree, collective);
            }
            let (was, is) = (reach(&before, &topology), reach(&after, &topology));
            assert!(is.0 <= was.0 && is.1 <= was.1, "{collective:?}: {was:?} became {is:?}");
            rounds += 1;
            less_deep += usize::from(is.1 < was.1);
        }
        assert!(rounds > 200 && less_deep > rounds / 2, "{less_deep} of {rounds}");
    }

    /// Checks the order of the edges. In a tree from the root, edges nearer to the root come first;
    /// in a tree to the root they come last.
    fn assert_order(tree: &Tree, collective: Collective) {
        let is_from_root = matches!(collective, Collective::Broadcast { .. } | Collective::AllGather);
        let mut reached = vec![tree.root];
        let edges = tree.edges.iter().map(|edge| (edge.from, edge.to));
        let outwards: Vec<(Rank, Rank)> =
            if is_from_root { edges.collect() } else { edges.rev().map(|(from, to)| (to, from)).collect() };
        for (near, far) in outwards {
            assert!(reached.contains(&near) && !reached.contains(&far), "{collective:?}: {tree:?}");
            reached.push(far);
        }
    }

    #[test]
    fn two_chains_become_two_trees_of_less_depth() {
        let mut builder = Topology::builder();
        let nodes: Vec<NodeId> = (0..6).map(|rank| builder.rank(format!("r{rank}"))).collect();
        for (place, &one) in nodes.iter().enumerate() {
            nodes[..place].iter().for_each(|&other| builder.duplex(other, one, 1, 1_000));
        }
        let topology = builder.build().unwrap();
        let chain = |ranks: [Rank; 6]| {
            let edge = |pair: &[Rank]| {
                let hops = vec![nodes[pair[0] as usize], nodes[pair[1] as usize]];
                let paths = vec![Path { hops, weight: Rate::from_integer(1) }];
                Edge { from: pair[0], to: pair[1], paths }
            };
            let edges = ranks.windows(2).map(edge).collect();
            Tree { root: ranks[0], weight: Rate::from_integer(1), edges }
        };
        let collective = Collective::Broadcast { root: 0 };
        let rate = Rate::from_integer(2);
        let trees = vec![chain([0, 1, 2, 3, 4, 5]), chain([0, 2, 4, 1, 3, 5])];
        let mut packing = Packing { collective, rate, bound: rate, certificate: Certificate::Alone, trees };
        reduce_depth(&mut packing, &topology);
        assert_eq!(reach(&packing, &topology).0, 3_000);
    }

    #[test]
    fn trees_of_one_shape_become_one_tree_with_all_their_paths() {
        let mut builder = Topology::builder();
        let (a, b) = (builder.rank("a"), builder.rank("b"));
        let (s, t) = (builder.switch("s"), builder.switch("t"));
        for switch in [s, t] {
            builder.duplex(a, switch, 2, 1_000);
            builder.duplex(switch, b, 2, 1_000);
        }
        let topology = builder.build().unwrap();
        let tree = |from: Rank, to: Rank, hops: [NodeId; 3]| Tree {
            root: to,
            weight: Rate::from_integer(2),
            edges: vec![Edge {
                from,
                to,
                paths: vec![Path { hops: hops.to_vec(), weight: Rate::from_integer(2) }],
            }],
        };
        let rate = Rate::from_integer(4);
        let trees = vec![tree(0, 1, [a, s, b]), tree(1, 0, [b, t, a])];
        let collective = Collective::AllReduce;
        let mut packing = Packing { collective, rate, bound: rate, certificate: Certificate::Alone, trees };
        reduce_depth(&mut packing, &topology);
        let [tree] = &packing.trees[..] else { panic!("{:?}", packing.trees) };
        assert_eq!((tree.root, tree.weight, tree.edges[0].paths.len()), (0, rate, 2));
        assert!(tree.edges[0].paths.iter().all(|path| path.hops[0] == b && path.hops[2] == a));
    }
}

//! Spanning trees without root, direction and weight, from which the strategies for comparison make
//! packings.
//!
//! **Invariant:** a [`SpanningTree`] spans all ranks, and each of its edges follows one path. The
//! result of [`WeightedTree::trees`] contains no tree twice. After [`fitted`](super::scale::fitted)
//! no link exceeds its capacity and one link is full.

use std::collections::BTreeMap;

use pleach_vocabulary::{Collective, Rank};

use super::scale::merged;
use super::{Edge, Packing, Path, Rate, Tree};
use crate::topology::{NodeId, Topology};

/// Two ranks and the nodes from one to the other, both included.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct RankPath {
    pub(super) from: Rank,
    pub(super) to: Rank,
    pub(super) hops: Vec<NodeId>,
}

impl RankPath {
    pub(super) fn reversed(&self) -> Self {
        Self { from: self.to, to: self.from, hops: self.hops.iter().rev().copied().collect() }
    }
}

/// A spanning tree whose edges have no direction yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct SpanningTree {
    pub(super) paths: Vec<RankPath>,
}

impl SpanningTree {
    /// All edges away from a root, nearer ones first.
    fn outward(&self, ranks: u32, root: Rank) -> Vec<RankPath> {
        let mut at = vec![Vec::new(); ranks as usize];
        for path in &self.paths {
            at[path.from as usize].push(path.clone());
            at[path.to as usize].push(path.reversed());
        }
        let mut reached = vec![false; ranks as usize];
        reached[root as usize] = true;
        let mut found: Vec<RankPath> = Vec::with_capacity(self.paths.len());
        let (mut rank, mut done) = (root, 0);
        loop {
            for path in &at[rank as usize] {
                if !std::mem::replace(&mut reached[path.to as usize], true) {
                    found.push(path.clone());
                }
            }
            let Some(next) = found.get(done) else { return found };
            (rank, done) = (next.to, done + 1);
        }
    }

    /// A tree whose data come from the root.
    pub(super) fn out_tree(&self, ranks: u32, root: Rank, weight: Rate) -> Tree {
        Tree { root, weight, edges: edges(self.outward(ranks, root), weight) }
    }

    /// A tree whose data go to the root.
    pub(super) fn in_tree(&self, ranks: u32, root: Rank, weight: Rate) -> Tree {
        let inward = self.outward(ranks, root).iter().rev().map(RankPath::reversed).collect();
        Tree { root, weight, edges: edges(inward, weight) }
    }

    /// From the root of a tree to each rank, in order of ranks.
    fn root_paths(&self, ranks: u32, root: Rank) -> Vec<Vec<RankPath>> {
        let mut root_paths = vec![Vec::new(); ranks as usize];
        for path in self.outward(ranks, root) {
            let mut root_path = root_paths[path.from as usize].clone();
            let to = path.to as usize;
            root_path.push(path);
            root_paths[to] = root_path;
        }
        root_paths
    }
}

/// A shape, who stands on top of it where that is free, and what it carries.
#[derive(Clone, Debug)]
pub(super) struct WeightedTree {
    pub(super) tree: SpanningTree,
    pub(super) default_root: Rank,
    pub(super) weight: Rate,
}

impl WeightedTree {
    /// The trees by which a collective uses these shapes: each all of the data in proportion to its
    /// weight.
    pub(super) fn trees(all: &[Self], ranks: u32, collective: Collective) -> Vec<Tree> {
        let block = Rate::from(i128::from(ranks));
        let every = 0..ranks;
        let trees = all.iter().flat_map(|Self { tree, default_root, weight }| -> Vec<Tree> {
            let share = weight / block;
            match collective {
                Collective::Broadcast { root } => vec![tree.out_tree(ranks, root, *weight)],
                Collective::Reduce { root } => vec![tree.in_tree(ranks, root, *weight)],
                Collective::AllReduce => vec![tree.in_tree(ranks, *default_root, *weight)],
                Collective::AllGather => {
                    every.clone().map(|root| tree.out_tree(ranks, root, share)).collect()
                }
                Collective::ReduceScatter => {
                    every.clone().map(|root| tree.in_tree(ranks, root, share)).collect()
                }
                Collective::Scatter { root } => root_paths(tree, ranks, root, share, false),
                Collective::Gather { root } => root_paths(tree, ranks, root, share, true),
                _ => Vec::new(),
            }
        });
        merged(trees.collect())
    }
}

fn root_paths(tree: &SpanningTree, ranks: u32, root: Rank, weight: Rate, inward: bool) -> Vec<Tree> {
    let root_paths = tree.root_paths(ranks, root).into_iter();
    let turned = root_paths.map(|root_path| match inward {
        true => root_path.iter().rev().map(RankPath::reversed).collect(),
        false => root_path,
    });
    turned.map(|root_path| Tree { root, weight, edges: edges(root_path, weight) }).collect()
}

fn edges(paths: Vec<RankPath>, weight: Rate) -> Vec<Edge> {
    let edge =
        |path: RankPath| Edge { from: path.from, to: path.to, paths: vec![Path { hops: path.hops, weight }] };
    paths.into_iter().map(edge).collect()
}

/// A packing of these trees, beside the bound that an optimal one has.
pub(super) fn with_bound_of(optimum: &Packing, trees: Vec<Tree>) -> Packing {
    Packing {
        collective: optimum.collective,
        rate: trees.iter().map(|tree| tree.weight).sum(),
        bound: optimum.bound,
        certificate: optimum.certificate.clone(),
        trees,
    }
}

/// From a rank to all others over one link or through switches only: the fewest hops, among these
/// the widest.
pub(super) fn paths_from(topology: &Topology, from: Rank) -> Vec<Option<RankPath>> {
    paths_over(topology, from, |_, _| true)
}

/// The same over the links that may be used.
pub(super) fn paths_over(
    topology: &Topology,
    from: Rank,
    may: impl Fn(NodeId, NodeId) -> bool,
) -> Vec<Option<RankPath>> {
    let start = topology.node(from);
    let mut before: BTreeMap<NodeId, (NodeId, u64)> = BTreeMap::from([(start, (start, u64::MAX))]);
    let mut layer = vec![start];
    while !layer.is_empty() {
        let mut next: BTreeMap<NodeId, (NodeId, u64)> = BTreeMap::new();
        for &node in layer.iter().filter(|&&node| node == start || topology.rank(node).is_none()) {
            let width = before[&node].1;
            let leaving = topology.leaving(node).iter();
            for link in leaving.filter(|link| !before.contains_key(&link.to) && may(link.from, link.to)) {
                let width = width.min(link.bytes_per_s);
                let best = next.entry(link.to).or_insert((node, width));
                if width > best.1 {
                    *best = (node, width);
                }
            }
        }
        layer = next.keys().copied().collect();
        before.extend(next);
    }
    let path = |to: Rank| {
        let mut hops = vec![topology.node(to)];
        while let Some(&(node, _)) = before.get(hops.last()?).filter(|_| hops.last() != Some(&start)) {
            hops.push(node);
        }
        hops.reverse();
        (to != from && hops[0] == start).then_some(RankPath { from, to, hops })
    };
    (0..topology.ranks()).map(path).collect()
}

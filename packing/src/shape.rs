//! Trees of ranks before they have a root, a direction and a weight, and how the strategies that do
//! not compute an optimum make packings of them.
//!
//! **Invariant:** a [`Shape`] spans all ranks, and each of its edges goes over one path. What comes
//! out of [`Weighted::trees`] has no tree twice; after [`fitted`](super::scale::fitted) no
//! link carries more than it can and one is full.

use std::collections::BTreeMap;

use pleach_vocabulary::{Collective, Rank};

use super::scale::merged;
use super::{Edge, Packing, Path, Rate, Tree};
use crate::topology::{NodeId, Topology};

/// Two ranks and the nodes from one to the other, both included.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Way {
    pub(super) from: Rank,
    pub(super) to: Rank,
    pub(super) hops: Vec<NodeId>,
}

impl Way {
    pub(super) fn reversed(&self) -> Self {
        Self { from: self.to, to: self.from, hops: self.hops.iter().rev().copied().collect() }
    }
}

/// A spanning tree whose edges have no direction yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Shape {
    pub(super) ways: Vec<Way>,
}

impl Shape {
    /// All edges away from a root, nearer ones first.
    fn outward(&self, ranks: u32, root: Rank) -> Vec<Way> {
        let mut at = vec![Vec::new(); ranks as usize];
        for way in &self.ways {
            at[way.from as usize].push(way.clone());
            at[way.to as usize].push(way.reversed());
        }
        let mut reached = vec![false; ranks as usize];
        reached[root as usize] = true;
        let mut found: Vec<Way> = Vec::with_capacity(self.ways.len());
        let (mut rank, mut done) = (root, 0);
        loop {
            for way in &at[rank as usize] {
                if !std::mem::replace(&mut reached[way.to as usize], true) {
                    found.push(way.clone());
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
        let inward = self.outward(ranks, root).iter().rev().map(Way::reversed).collect();
        Tree { root, weight, edges: edges(inward, weight) }
    }

    /// From the root of a tree to each rank, in order of ranks.
    fn branches(&self, ranks: u32, root: Rank) -> Vec<Vec<Way>> {
        let mut branches = vec![Vec::new(); ranks as usize];
        for way in self.outward(ranks, root) {
            let mut branch = branches[way.from as usize].clone();
            let to = way.to as usize;
            branch.push(way);
            branches[to] = branch;
        }
        branches
    }
}

/// A shape, who stands on top of it where that is free, and what it carries.
#[derive(Clone, Debug)]
pub(super) struct Weighted {
    pub(super) shape: Shape,
    pub(super) top: Rank,
    pub(super) weight: Rate,
}

impl Weighted {
    /// The trees by which a collective uses these shapes: each all of the data in proportion to its
    /// weight.
    pub(super) fn trees(all: &[Self], ranks: u32, collective: Collective) -> Vec<Tree> {
        let block = Rate::from(i128::from(ranks));
        let every = 0..ranks;
        let trees = all.iter().flat_map(|Self { shape, top, weight }| -> Vec<Tree> {
            let share = weight / block;
            match collective {
                Collective::Broadcast { root } => vec![shape.out_tree(ranks, root, *weight)],
                Collective::Reduce { root } => vec![shape.in_tree(ranks, root, *weight)],
                Collective::AllReduce => vec![shape.in_tree(ranks, *top, *weight)],
                Collective::AllGather => {
                    every.clone().map(|root| shape.out_tree(ranks, root, share)).collect()
                }
                Collective::ReduceScatter => {
                    every.clone().map(|root| shape.in_tree(ranks, root, share)).collect()
                }
                Collective::Scatter { root } => branches(shape, ranks, root, share, false),
                Collective::Gather { root } => branches(shape, ranks, root, share, true),
                _ => Vec::new(),
            }
        });
        merged(trees.collect())
    }
}

fn branches(shape: &Shape, ranks: u32, root: Rank, weight: Rate, inward: bool) -> Vec<Tree> {
    let branches = shape.branches(ranks, root).into_iter();
    let turned = branches.map(|branch| match inward {
        true => branch.iter().rev().map(Way::reversed).collect(),
        false => branch,
    });
    turned.map(|branch| Tree { root, weight, edges: edges(branch, weight) }).collect()
}

fn edges(ways: Vec<Way>, weight: Rate) -> Vec<Edge> {
    let edge = |way: Way| Edge { from: way.from, to: way.to, paths: vec![Path { hops: way.hops, weight }] };
    ways.into_iter().map(edge).collect()
}

/// A packing of these trees, beside the bound that an optimal one has.
pub(super) fn beside(optimum: &Packing, trees: Vec<Tree>) -> Packing {
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
pub(super) fn ways_from(topology: &Topology, from: Rank) -> Vec<Option<Way>> {
    ways_within(topology, from, |_, _| true)
}

/// The same over the links that may be used.
pub(super) fn ways_within(
    topology: &Topology,
    from: Rank,
    may: impl Fn(NodeId, NodeId) -> bool,
) -> Vec<Option<Way>> {
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
    let way = |to: Rank| {
        let mut hops = vec![topology.node(to)];
        while let Some(&(node, _)) = before.get(hops.last()?).filter(|_| hops.last() != Some(&start)) {
            hops.push(node);
        }
        hops.reverse();
        (to != from && hops[0] == start).then_some(Way { from, to, hops })
    };
    (0..topology.ranks()).map(way).collect()
}

//! Topologies and packings made by hand, each as good as can be.

use pleach_packing::topology::{LATENCY_NS, NodeId, Topology};
use pleach_packing::{Certificate, Edge, Packing, Path, Rate, Tree, check};
use pleach_vocabulary::{Collective, Rank};

pub(crate) fn whole(rate: i128) -> Rate {
    Rate::from(rate)
}

pub(crate) fn nodes(numbers: &[u32]) -> Vec<NodeId> {
    numbers.iter().map(|&number| NodeId(number)).collect()
}

pub(crate) fn path(hops: &[u32], weight: Rate) -> Path {
    Path { hops: nodes(hops), weight }
}

/// From rank to rank, where nodes are numbered like their ranks.
pub(crate) fn direct(from: Rank, to: Rank, weight: i128) -> Edge {
    Edge { from, to, paths: vec![path(&[from, to], whole(weight))] }
}

pub(crate) fn tree(root: Rank, weight: i128, edges: &[(Rank, Rank)]) -> Tree {
    let edges = edges.iter().map(|&(from, to)| direct(from, to, weight)).collect();
    Tree { root, weight: whole(weight), edges }
}

pub(crate) fn optimal(
    collective: Collective,
    rate: i128,
    certificate: Certificate,
    trees: Vec<Tree>,
) -> Packing {
    Packing { collective, rate: whole(rate), bound: whole(rate), certificate, trees }
}

pub(crate) fn cut(numbers: &[u32]) -> Certificate {
    Certificate::Cut { nodes: nodes(numbers) }
}

pub(crate) fn partition(parts: &[&[u32]]) -> Certificate {
    Certificate::Partition { parts: parts.iter().map(|part| nodes(part)).collect() }
}

/// Three ranks, each joined to each by 10 bytes a second.
pub(crate) fn triangle() -> Topology {
    let mut builder = Topology::builder();
    let [a, b, c] = ["a", "b", "c"].map(|name| builder.rank(name));
    for (one, other) in [(a, b), (b, c), (a, c)] {
        builder.duplex(one, other, 10, LATENCY_NS);
    }
    builder.build().unwrap()
}

/// `ranks` ranks around a switch, which is the last node.
pub(crate) fn star(ranks: u32, bytes_per_s: u64) -> Topology {
    let mut builder = Topology::builder();
    let ranks: Vec<_> = (0..ranks).map(|rank| builder.rank(format!("r{rank}"))).collect();
    let switch = builder.switch("s");
    for rank in ranks {
        builder.duplex(rank, switch, bytes_per_s, LATENCY_NS);
    }
    builder.build().unwrap()
}

/// Ranks a and b, joined by way of s, by way of t, and by s and then t.
pub(crate) fn two_ways() -> Topology {
    let mut builder = Topology::builder();
    let [a, b] = ["a", "b"].map(|name| builder.rank(name));
    let [s, t] = ["s", "t"].map(|name| builder.switch(name));
    for (one, other, bytes_per_s) in [(a, s, 6), (s, b, 4), (a, t, 3), (t, b, 5), (s, t, 2)] {
        builder.duplex(one, other, bytes_per_s, LATENCY_NS);
    }
    builder.build().unwrap()
}

pub(crate) fn broadcast_on_two_ways() -> Packing {
    let paths = vec![path(&[0, 2, 1], whole(4)), path(&[0, 3, 1], whole(3)), path(&[0, 2, 3, 1], whole(2))];
    let trees = vec![Tree { root: 0, weight: whole(9), edges: vec![Edge { from: 0, to: 1, paths }] }];
    optimal(Collective::Broadcast { root: 0 }, 9, cut(&[0]), trees)
}

pub(crate) fn broadcast_on_triangle() -> Packing {
    let trees = vec![tree(0, 10, &[(0, 1), (1, 2)]), tree(0, 10, &[(0, 2), (2, 1)])];
    optimal(Collective::Broadcast { root: 0 }, 20, cut(&[0]), trees)
}

pub(crate) fn reduce_on_triangle() -> Packing {
    let trees = vec![tree(0, 10, &[(2, 1), (1, 0)]), tree(0, 10, &[(1, 2), (2, 0)])];
    optimal(Collective::Reduce { root: 0 }, 20, cut(&[0]), trees)
}

pub(crate) fn all_gather_on_triangle() -> Packing {
    let trees =
        vec![tree(0, 10, &[(0, 1), (0, 2)]), tree(1, 10, &[(1, 0), (1, 2)]), tree(2, 10, &[(2, 0), (2, 1)])];
    optimal(Collective::AllGather, 30, cut(&[0, 1]), trees)
}

pub(crate) fn reduce_scatter_on_triangle() -> Packing {
    let trees =
        vec![tree(0, 10, &[(1, 0), (2, 0)]), tree(1, 10, &[(0, 1), (2, 1)]), tree(2, 10, &[(0, 2), (1, 2)])];
    optimal(Collective::ReduceScatter, 30, cut(&[0, 1]), trees)
}

pub(crate) fn scatter_on_triangle() -> Packing {
    let trees = vec![tree(0, 10, &[]), tree(0, 10, &[(0, 1)]), tree(0, 6, &[(0, 2)]), tree(0, 4, &[(0, 2)])];
    let mut packing = optimal(Collective::Scatter { root: 0 }, 30, cut(&[0]), trees);
    // The last goes the long way round, and so that it fits rank 1's goes 4 by rank 2.
    packing.trees[1] = tree(0, 6, &[(0, 1)]);
    packing.trees[3] = tree(0, 4, &[(0, 1), (1, 2)]);
    packing.trees.push(tree(0, 4, &[(0, 2), (2, 1)]));
    packing
}

pub(crate) fn gather_on_triangle() -> Packing {
    let trees =
        vec![tree(0, 10, &[]), tree(0, 10, &[(2, 0)]), tree(0, 6, &[(1, 0)]), tree(0, 4, &[(1, 2), (2, 0)])];
    let mut packing = optimal(Collective::Gather { root: 0 }, 30, cut(&[0]), trees);
    packing.trees[1] = tree(0, 6, &[(2, 0)]);
    packing.trees.push(tree(0, 4, &[(2, 1), (1, 0)]));
    packing
}

pub(crate) fn all_reduce_on_triangle() -> Packing {
    let trees =
        vec![tree(0, 5, &[(1, 0), (2, 0)]), tree(1, 5, &[(0, 1), (2, 1)]), tree(2, 5, &[(0, 2), (1, 2)])];
    optimal(Collective::AllReduce, 15, partition(&[&[0], &[1], &[2]]), trees)
}

/// Each rank sends its share to all others by way of the switch.
pub(crate) fn all_gather_on_star(ranks: u32, bytes_per_s: u64) -> Packing {
    let weight = Rate::new(i128::from(bytes_per_s), i128::from(ranks - 1));
    let others = |root| (0..ranks).filter(move |&rank| rank != root);
    let edge = |root, to| Edge { from: root, to, paths: vec![path(&[root, ranks, to], weight)] };
    let trees =
        (0..ranks).map(|root| Tree { root, weight, edges: others(root).map(|to| edge(root, to)).collect() });
    let rate = weight * Rate::from(i128::from(ranks));
    let certificate = Certificate::Cut { nodes: (1..=ranks).map(NodeId).collect() };
    Packing { collective: Collective::AllGather, rate, bound: rate, certificate, trees: trees.collect() }
}

/// The switch is in no part: 30 enter and leave the three ranks, and 30/(2·2) is less than the 10
/// of a cut.
pub(crate) fn all_reduce_on_star() -> Packing {
    let weight = Rate::new(5, 2);
    let others = |root| (0..3).filter(move |&rank| rank != root);
    let edge = |from, to| Edge { from, to, paths: vec![path(&[from, 3, to], weight)] };
    let trees =
        (0..3).map(|root| Tree { root, weight, edges: others(root).map(|from| edge(from, root)).collect() });
    let rate = Rate::new(15, 2);
    let certificate = partition(&[&[0], &[1], &[2]]);
    Packing { collective: Collective::AllReduce, rate, bound: rate, certificate, trees: trees.collect() }
}

/// All that is above, with where it is good.
pub(crate) fn all() -> Vec<(Topology, Packing)> {
    let on_triangle = [
        broadcast_on_triangle(),
        reduce_on_triangle(),
        all_gather_on_triangle(),
        reduce_scatter_on_triangle(),
        scatter_on_triangle(),
        gather_on_triangle(),
        all_reduce_on_triangle(),
    ];
    let mut all: Vec<_> = on_triangle.into_iter().map(|packing| (triangle(), packing)).collect();
    all.push((two_ways(), broadcast_on_two_ways()));
    all.push((star(3, 10), all_reduce_on_star()));
    all.push((star(5, 7), all_gather_on_star(5, 7)));
    all
}

#[test]
fn good_packings_are_accepted() {
    for (topology, packing) in all() {
        let checked =
            check(&topology, &packing).unwrap_or_else(|flaw| panic!("{:?}: {flaw}", packing.collective));
        assert_eq!(checked.loads.len(), topology.links().len());
        assert_eq!(checked.busiest(), whole(1), "{:?}: these are all tight somewhere", packing.collective);
    }
}

#[test]
fn loads_and_depths_are_those_of_the_trees() {
    let checked = check(&two_ways(), &broadcast_on_two_ways()).unwrap();
    let load = |from, to| {
        let link = checked.loads.iter().find(|link| (link.from, link.to) == (NodeId(from), NodeId(to)));
        link.unwrap().utilisation()
    };
    assert_eq!((load(0, 2), load(2, 0), load(0, 3)), (whole(1), whole(0), whole(1)));
    assert_eq!((checked.depth().edges, checked.depth().links), (1, 3));
    let checked = check(&triangle(), &gather_on_triangle()).unwrap();
    assert_eq!(checked.depths.iter().map(|depth| depth.edges).collect::<Vec<_>>(), [0, 1, 1, 2, 2]);
}

#[test]
fn a_single_rank_is_at_rest() {
    let topology = star(1, 10);
    let alone = optimal(Collective::AllReduce, 0, Certificate::Alone, Vec::new());
    assert_eq!(check(&topology, &alone).unwrap().busiest(), whole(0));
}

#[test]
fn a_thousand_trees_of_a_thousand_edges_are_checked_in_seconds() {
    let (topology, packing) = (star(1024, 1023), all_gather_on_star(1024, 1023));
    let checked = check(&topology, &packing).unwrap();
    assert!(checked.loads.iter().all(|link| link.utilisation() == whole(1)));
}

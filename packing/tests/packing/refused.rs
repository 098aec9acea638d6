//! Each property of good packings, spoilt, and what the checker says of it.

use std::mem::swap;

use pleach_packing::check::{CertificateFlaw, Flaw, PathFlaw};
use pleach_packing::topology::{LATENCY_NS, NodeId, Topology};
use pleach_packing::{Certificate, Edge, Packing, Rate, check};
use pleach_vocabulary::Collective;

use super::by_hand::*;

fn flaw(topology: &Topology, mut packing: Packing, spoil: impl FnOnce(&mut Packing)) -> Flaw {
    check(topology, &packing).expect("good before it is spoilt");
    spoil(&mut packing);
    check(topology, &packing).expect_err("spoilt")
}

#[test]
fn trees_that_do_not_span_or_lead_where_they_should_are_refused() {
    let triangle = &triangle();
    let broadcast = |spoil: fn(&mut Packing)| flaw(triangle, broadcast_on_triangle(), spoil);
    let missing = broadcast(|packing| packing.trees[1].edges.truncate(1));
    assert_eq!(missing, Flaw::NotSpanning { tree: 1, rank: 1 });
    let order = broadcast(|packing| packing.trees[0].edges.reverse());
    assert_eq!(order, Flaw::Detached { tree: 0, edge: 0, rank: 1 });
    let twice = broadcast(|packing| packing.trees[0].edges.push(direct(0, 2, 10)));
    assert_eq!(twice, Flaw::ReachedTwice { tree: 0, edge: 2, rank: 2 });
    let cycle = broadcast(|packing| packing.trees[0].edges[1] = direct(1, 0, 10));
    assert_eq!(cycle, Flaw::ReachedTwice { tree: 0, edge: 1, rank: 0 });
    let itself = broadcast(|packing| packing.trees[0].edges[0] = direct(0, 0, 10));
    assert_eq!(itself, Flaw::ReachedTwice { tree: 0, edge: 0, rank: 0 });
    let stranger = broadcast(|packing| packing.trees[0].edges[1].to = 3);
    assert_eq!(stranger, Flaw::NoSuchRank { tree: 0, edge: 1, rank: 3 });
    let root = broadcast(|packing| packing.trees[1].root = 1);
    assert_eq!(root, Flaw::Root { tree: 1, root: 1 });
    let direction = broadcast(|packing| {
        let edge = &mut packing.trees[1].edges[0];
        swap(&mut edge.from, &mut edge.to);
        edge.paths[0].hops.reverse();
    });
    assert_eq!(direction, Flaw::Detached { tree: 1, edge: 0, rank: 2 });
    let root = flaw(triangle, all_gather_on_triangle(), |packing| packing.trees[1].root = 7);
    assert_eq!(root, Flaw::Root { tree: 1, root: 7 });
}

#[test]
fn trees_towards_the_root_end_there() {
    let triangle = &triangle();
    for good in [reduce_on_triangle(), reduce_scatter_on_triangle(), all_reduce_on_triangle()] {
        let missing = flaw(triangle, good.clone(), |packing| drop(packing.trees[0].edges.remove(0)));
        assert!(matches!(missing, Flaw::NotSpanning { tree: 0, .. }), "{missing}");
        let direction = flaw(triangle, good.clone(), |packing| {
            let edge = packing.trees[0].edges.last_mut().unwrap();
            swap(&mut edge.from, &mut edge.to);
            edge.paths[0].hops.reverse();
        });
        assert!(matches!(direction, Flaw::Detached { tree: 0, .. }), "{direction}");
    }
    let order = flaw(triangle, reduce_on_triangle(), |packing| packing.trees[0].edges.reverse());
    assert_eq!(order, Flaw::Detached { tree: 0, edge: 1, rank: 1 });
    let outward = flaw(triangle, reduce_on_triangle(), |packing| {
        packing.collective = Collective::Broadcast { root: 0 }
    });
    assert!(matches!(outward, Flaw::Detached { tree: 0, .. }), "{outward}");
}

#[test]
fn entries_of_scatter_and_gather_are_paths_of_equal_blocks() {
    let triangle = &triangle();
    let scatter = |spoil: fn(&mut Packing)| flaw(triangle, scatter_on_triangle(), spoil);
    let fork = scatter(|packing| packing.trees[3].edges[1] = direct(0, 2, 4));
    assert_eq!(fork, Flaw::Detached { tree: 3, edge: 1, rank: 0 });
    let back = scatter(|packing| packing.trees[3].edges.push(direct(2, 1, 4)));
    assert_eq!(back, Flaw::ReachedTwice { tree: 3, edge: 2, rank: 1 });
    let no_own = scatter(|packing| drop(packing.trees.remove(0)));
    assert_eq!(no_own, Flaw::RateSum { sum: whole(20), rate: whole(30) });
    let unequal = scatter(|packing| {
        packing.trees[1].weight = whole(5);
        packing.trees[1].edges[0].paths[0].weight = whole(5);
        packing.trees[0].weight = whole(11);
    });
    assert_eq!(unequal, Flaw::Share { rank: 0, sum: whole(11), share: whole(10) });
    let gather = |spoil: fn(&mut Packing)| flaw(triangle, gather_on_triangle(), spoil);
    let elsewhere = gather(|packing| packing.trees[3].edges[1] = direct(2, 1, 4));
    assert_eq!(elsewhere, Flaw::Detached { tree: 3, edge: 1, rank: 1 });
    let unequal = gather(|packing| drop(packing.trees.pop()));
    assert_eq!(unequal, Flaw::RateSum { sum: whole(26), rate: whole(30) });
}

#[test]
fn each_rank_has_the_same_share() {
    for good in [all_gather_on_triangle(), reduce_scatter_on_triangle()] {
        let unequal = flaw(&triangle(), good, |packing| {
            packing.trees[0].weight = whole(9);
            packing.trees[0].edges.iter_mut().for_each(|edge| edge.paths[0].weight = whole(9));
            packing.rate = whole(29);
        });
        assert_eq!(unequal, Flaw::Share { rank: 0, sum: whole(9), share: Rate::new(29, 3) });
    }
}

#[test]
fn edges_go_over_links_that_are_there_and_through_switches_only() {
    let topology = &two_ways();
    let spoilt = |spoil: fn(&mut Edge)| {
        let flaw = flaw(topology, broadcast_on_two_ways(), |packing| spoil(&mut packing.trees[0].edges[0]));
        let Flaw::Path { tree: 0, edge: 0, path, flaw } = flaw else { panic!("{flaw}") };
        (path, flaw)
    };
    assert_eq!(spoilt(|edge| edge.paths.clear()), (0, PathFlaw::None));
    let no_link = PathFlaw::NoLink { from: NodeId(0), to: NodeId(1) };
    assert_eq!(spoilt(|edge| edge.paths[1].hops = nodes(&[0, 1])), (1, no_link));
    let ends = PathFlaw::Ends { from: NodeId(0), to: NodeId(1) };
    assert_eq!(spoilt(|edge| edge.paths[1].hops = nodes(&[0, 3])), (1, ends));
    assert_eq!(spoilt(|edge| edge.paths[1].hops = nodes(&[3, 1])), (1, ends));
    assert_eq!(spoilt(|edge| edge.paths[1].hops.clear()), (1, ends));
    let unknown = PathFlaw::UnknownNode { node: NodeId(9) };
    assert_eq!(spoilt(|edge| edge.paths[1].hops = nodes(&[0, 9, 1])), (1, unknown));
    let rank = PathFlaw::ThroughRank { rank: 1 };
    assert_eq!(spoilt(|edge| edge.paths[2].hops = nodes(&[0, 2, 1, 3, 1])), (2, rank));
    let cycle = PathFlaw::NodeTwice { node: NodeId(2) };
    assert_eq!(spoilt(|edge| edge.paths[2].hops = nodes(&[0, 2, 3, 2, 1])), (2, cycle));
    assert_eq!(spoilt(|edge| edge.paths[2].hops = nodes(&[0, 3, 1])), (2, PathFlaw::ListedTwice));
    assert_eq!(spoilt(|edge| edge.paths[2].weight = whole(0)), (2, PathFlaw::Weight));
    assert_eq!(spoilt(|edge| edge.paths[2].weight = whole(-1)), (2, PathFlaw::Weight));
}

#[test]
fn the_way_down_of_an_all_reduce_needs_links_too() {
    let mut builder = Topology::builder();
    let [a, b] = ["a", "b"].map(|name| builder.rank(name));
    let s = builder.switch("s");
    builder.duplex(a, b, 10, LATENCY_NS);
    builder.link(a, s, 5, LATENCY_NS);
    builder.link(s, b, 5, LATENCY_NS);
    let topology = builder.build().unwrap();
    let good = optimal(Collective::AllReduce, 10, cut(&[1]), vec![tree(1, 10, &[(0, 1)])]);
    let one_way =
        flaw(&topology, good, |packing| packing.trees[0].edges[0].paths[0].hops = nodes(&[0, 2, 1]));
    let no_link = PathFlaw::NoLink { from: NodeId(2), to: NodeId(0) };
    assert_eq!(one_way, Flaw::Path { tree: 0, edge: 0, path: 0, flaw: no_link });
}

#[test]
fn weights_that_are_none_or_do_not_sum_are_refused() {
    let triangle = &triangle();
    let broadcast = |spoil: fn(&mut Packing)| flaw(triangle, broadcast_on_triangle(), spoil);
    assert_eq!(broadcast(|packing| packing.trees[1].weight = whole(0)), Flaw::TreeWeight { tree: 1 });
    assert_eq!(broadcast(|packing| packing.trees[1].weight = Rate::new_raw(1, 0)), Flaw::Denominator);
    assert_eq!(broadcast(|packing| packing.trees[1].weight = Rate::new_raw(-1, -1)), Flaw::Denominator);
    assert_eq!(broadcast(|packing| packing.trees[1].weight = Rate::new(1, i128::MAX)), Flaw::Overflow);
    let less = broadcast(|packing| packing.trees[1].edges[1].paths[0].weight = whole(9));
    assert_eq!(less, Flaw::PathSum { tree: 1, edge: 1, sum: whole(9), weight: whole(10) });
    let rate = broadcast(|packing| packing.rate = whole(19));
    assert_eq!(rate, Flaw::RateSum { sum: whole(20), rate: whole(19) });
    let missing = broadcast(|packing| drop(packing.trees.pop()));
    assert_eq!(missing, Flaw::RateSum { sum: whole(10), rate: whole(20) });
    let bound = broadcast(|packing| packing.bound = whole(19));
    assert_eq!(bound, Flaw::AboveBound { rate: whole(20), bound: whole(19) });
}

#[test]
fn a_link_that_carries_more_than_it_can_is_named() {
    let overload = flaw(&triangle(), broadcast_on_triangle(), |packing| {
        packing.trees[0].weight = whole(11);
        packing.trees[0].edges.iter_mut().for_each(|edge| edge.paths[0].weight = whole(11));
        packing.rate = whole(21);
    });
    assert_eq!(overload, Flaw::Overload { from: NodeId(0), to: NodeId(1), load: whole(11), capacity: 10 });
    // Up alone there would be room for it.
    let both_ways = flaw(&triangle(), all_reduce_on_triangle(), |packing| {
        packing.trees[0].weight = whole(6);
        packing.trees[0].edges.iter_mut().for_each(|edge| edge.paths[0].weight = whole(6));
        packing.rate = whole(16);
    });
    assert_eq!(both_ways, Flaw::Overload { from: NodeId(0), to: NodeId(1), load: whole(11), capacity: 10 });
}

#[test]
fn the_same_tree_twice_is_refused_in_any_order_of_its_edges() {
    let twins = flaw(&triangle(), all_reduce_on_triangle(), |packing| {
        let first = &mut packing.trees[0];
        first.weight = Rate::new(5, 2);
        first.edges.iter_mut().for_each(|edge| edge.paths[0].weight = Rate::new(5, 2));
        let mut second = first.clone();
        second.edges.reverse();
        packing.trees.push(second);
    });
    assert_eq!(twins, Flaw::Duplicate { first: 0, second: 3 });
}

#[test]
fn certificates_that_show_nothing_are_refused() {
    let triangle = &triangle();
    let spoilt = |good: Packing, certificate: Certificate| {
        let flaw = flaw(triangle, good, |packing| packing.certificate = certificate);
        let Flaw::Certificate(flaw) = flaw else { panic!("{flaw}") };
        flaw
    };
    let broadcast = |certificate| spoilt(broadcast_on_triangle(), certificate);
    assert_eq!(broadcast(Certificate::Alone), CertificateFlaw::Kind);
    assert_eq!(broadcast(partition(&[&[0], &[1, 2]])), CertificateFlaw::Kind);
    assert_eq!(broadcast(cut(&[1])), CertificateFlaw::RootOutside { root: 0 });
    assert_eq!(broadcast(cut(&[])), CertificateFlaw::SeparatesNothing);
    assert_eq!(broadcast(cut(&[0, 1, 2])), CertificateFlaw::SeparatesNothing);
    assert_eq!(broadcast(cut(&[0, 5])), CertificateFlaw::UnknownNode { node: NodeId(5) });
    assert_eq!(broadcast(cut(&[0, 0])), CertificateFlaw::NodeTwice { node: NodeId(0) });
    let all_gather = spoilt(all_gather_on_triangle(), cut(&[2]));
    assert_eq!(all_gather, CertificateFlaw::Value { value: whole(60), bound: whole(30) });
    let scatter = spoilt(scatter_on_triangle(), cut(&[0, 2]));
    assert_eq!(scatter, CertificateFlaw::Value { value: whole(60), bound: whole(30) });
    let all_reduce = |certificate| spoilt(all_reduce_on_triangle(), certificate);
    assert_eq!(all_reduce(cut(&[0])), CertificateFlaw::Value { value: whole(20), bound: whole(15) });
    assert_eq!(all_reduce(partition(&[&[0, 1, 2]])), CertificateFlaw::SeparatesNothing);
    assert_eq!(all_reduce(partition(&[&[0], &[2]])), CertificateFlaw::RankInNoPart { rank: 1 });
    assert_eq!(all_reduce(partition(&[&[0, 1], &[1, 2]])), CertificateFlaw::NodeTwice { node: NodeId(1) });
    assert_eq!(all_reduce(partition(&[&[0, 1, 2], &[]])), CertificateFlaw::PartWithoutRank { part: 1 });
    let coarse = all_reduce(partition(&[&[0, 1], &[2]]));
    assert_eq!(coarse, CertificateFlaw::Value { value: whole(20), bound: whole(15) });
}

#[test]
fn a_bound_below_what_its_certificate_shows_is_refused() {
    let flaw = flaw(&triangle(), broadcast_on_triangle(), |packing| packing.bound = whole(30));
    assert_eq!(flaw, Flaw::Certificate(CertificateFlaw::Value { value: whole(20), bound: whole(30) }));
}

#[test]
fn cuts_count_what_leaves_or_enters_as_the_collective_needs() {
    let mut builder = Topology::builder();
    let [a, b] = ["a", "b"].map(|name| builder.rank(name));
    builder.link(a, b, 10, LATENCY_NS);
    builder.link(b, a, 4, LATENCY_NS);
    let topology = builder.build().unwrap();
    let one = |collective, rate, trees: Vec<_>| optimal(collective, rate, cut(&[0]), trees);
    let good = [
        one(Collective::Broadcast { root: 0 }, 10, vec![tree(0, 10, &[(0, 1)])]),
        one(Collective::Reduce { root: 0 }, 4, vec![tree(0, 4, &[(1, 0)])]),
        one(Collective::Scatter { root: 0 }, 20, vec![tree(0, 10, &[]), tree(0, 10, &[(0, 1)])]),
        one(Collective::Gather { root: 0 }, 8, vec![tree(0, 4, &[]), tree(0, 4, &[(1, 0)])]),
        one(Collective::ReduceScatter, 8, vec![tree(0, 4, &[(1, 0)]), tree(1, 4, &[(0, 1)])]),
        Packing {
            certificate: cut(&[1]),
            ..one(Collective::AllGather, 8, vec![tree(0, 4, &[(0, 1)]), tree(1, 4, &[(1, 0)])])
        },
        Packing { certificate: cut(&[1]), ..one(Collective::AllReduce, 4, vec![tree(0, 4, &[(1, 0)])]) },
    ];
    for packing in good {
        check(&topology, &packing).unwrap_or_else(|flaw| panic!("{:?}: {flaw}", packing.collective));
    }
}

#[test]
fn collectives_without_packings_and_roots_that_are_no_ranks_are_refused() {
    let triangle = triangle();
    let refused =
        |collective| flaw(&triangle, broadcast_on_triangle(), |packing| packing.collective = collective);
    assert_eq!(refused(Collective::AllToAll), Flaw::NotPacked { collective: Collective::AllToAll });
    assert_eq!(refused(Collective::Broadcast { root: 3 }), Flaw::NoSuchRoot { root: 3, ranks: 3 });
    let busy = optimal(Collective::AllReduce, 0, Certificate::Alone, Vec::new());
    assert_eq!(flaw(&star(1, 10), busy, |packing| packing.bound = whole(1)), Flaw::SingleRankHasTrees);
}

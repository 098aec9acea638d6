use pleach_packing::topology::{Builder, LATENCY_NS};
use pleach_packing::{Certificate, Edge, Path, Tree, check};

use pleach_packing::Rate;
use pleach_packing::topology::NodeId;

use super::*;

const GB_PER_S: u64 = 1_000_000_000;

/// Ranks a and b on a fast and a slow switch, c joined to b alone.
fn two_ways() -> (Builder, [NodeId; 5]) {
    let mut builder = Topology::builder();
    let (fast, a) = (builder.switch("fast"), builder.rank("a"));
    let (slow, b, c) = (builder.switch("slow"), builder.rank("b"), builder.rank("c"));
    for rank in [a, b] {
        builder.duplex(rank, slow, GB_PER_S, LATENCY_NS);
        builder.duplex(rank, fast, 3 * GB_PER_S, LATENCY_NS);
    }
    builder.duplex(b, c, GB_PER_S, LATENCY_NS);
    (builder, [a, b, c, fast, slow])
}

fn ends(routes: &Routes, route: &Route) -> Vec<(NodeId, NodeId)> {
    route.links.iter().map(|&link| (routes.links()[link].from, routes.links()[link].to)).collect()
}

#[test]
fn the_widest_of_equal_paths_is_taken() {
    let (builder, [a, b, _, fast, _]) = two_ways();
    let topology = builder.build().expect("connected");
    let wiring = Wiring::new(topology);
    let routes = wiring.routes();
    let [route] = routes.between(0, 1) else { panic!("{:?}", routes.between(0, 1)) };
    assert_eq!(ends(routes, route), [(a, fast), (fast, b)]);
    assert_eq!(routes.latency_ns(0, 1), 2_000);
    assert_eq!(routes.between(0, 0), [Route { links: Vec::new(), weight: 1 }]);
    assert_eq!((wiring.unjoined_pair(0, 1), wiring.unjoined_pair(1, 2)), (None, None));
    assert_eq!(wiring.unjoined_pair(2, 0), Some(["c", "a"]), "only over b");
}

#[test]
fn a_pair_is_routed_as_the_trees_of_a_packing_say_all_together() {
    let (builder, [a, b, c, fast, slow]) = two_ways();
    let topology = builder.build().expect("connected");
    let path =
        |hops: &[NodeId], weight: i128| Path { hops: hops.to_vec(), weight: Rate::from_integer(weight) };
    let tree = |variants: Vec<Path>, weight: i128| Tree {
        root: 0,
        weight: Rate::from_integer(weight),
        edges: vec![
            Edge { from: 0, to: 1, paths: variants },
            Edge { from: 1, to: 2, paths: vec![path(&[b, c], weight)] },
        ],
    };
    let packing = Packing {
        collective: Collective::Broadcast { root: 0 },
        rate: Rate::from_integer(8),
        bound: Rate::from_integer(8),
        certificate: Certificate::Alone,
        trees: vec![
            tree(vec![path(&[a, fast, b], 4), path(&[a, slow, b], 1)], 5),
            tree(vec![path(&[a, fast, b], 2), path(&[a, slow, b], 1)], 3),
        ],
    };
    let routes = Routes::new(&topology, Some(&packing)).expect("paths");
    let found: Vec<_> =
        routes.between(0, 1).iter().map(|route| (ends(&routes, route), route.weight)).collect();
    assert_eq!(found.len(), 2);
    let of = |over: NodeId| found.iter().find(|(links, _)| links[0] == (a, over)).expect("a route").1;
    // 6 over the fast switch, 2 over the slow one; weights are rounded to 2^-40.
    assert_eq!(of(fast) / 8, (3 * of(slow) + 1) / 8);
    assert_eq!(routes.between(1, 0).len(), 1, "nothing is sent back");
    let back = packing.trees[0].edges[0].paths[0].hops.iter().rev().copied().collect();
    let mut broken = packing;
    broken.trees[0].edges[0].paths[0].hops = back;
    assert_eq!(Routes::new(&topology, Some(&broken)), Err(WiringError::NoRoute { from: 0, to: 1 }));
}

#[test]
fn links_and_what_is_packed_for_them_have_a_number_of_their_own() {
    let wiring = |change: fn(&mut Builder)| {
        let (mut builder, _) = two_ways();
        change(&mut builder);
        Wiring::new(builder.build().expect("connected"))
    };
    let (one, same) = (wiring(|_| {}), wiring(|_| {}));
    let other = wiring(|builder| builder.link(NodeId(1), NodeId(0), 1, 0));
    assert_eq!((one.digest(), &one), (same.digest(), &same));
    assert_ne!(one.digest(), other.digest());
    assert_ne!(one, other);
}

#[test]
fn a_packing_over_links_that_are_not_there_is_refused() {
    let (builder, [a, b, c, ..]) = two_ways();
    let wiring = Wiring::new(builder.build().expect("connected"));
    let weight = Rate::from_integer(1);
    let edge =
        |from, to, hops: [NodeId; 2]| Edge { from, to, paths: vec![Path { hops: hops.to_vec(), weight }] };
    let packing = Packing {
        collective: Collective::Broadcast { root: 0 },
        rate: weight,
        bound: weight,
        certificate: Certificate::Alone,
        trees: vec![Tree { root: 0, weight, edges: vec![edge(0, 2, [a, c]), edge(2, 1, [c, b])] }],
    };
    let error = wiring.with_packing(packing).unwrap_err();
    assert!(error.to_string().contains("from 'a' to 'c', which no link joins"), "{error}");
}

#[test]
fn few_bytes_go_along_flat_trees_and_many_along_those_of_the_best_rate() {
    let topology = pleach_packing::topology::preset("star:16").expect("a preset");
    let wiring = Wiring::new(topology.clone());
    for collective in [Collective::Broadcast { root: 3 }, Collective::Reduce { root: 0 }] {
        let optimum = wiring.packed(collective).expect("a packing");
        let long = wiring.packed_for(collective, 1 << 30).expect("a packing");
        assert!(Arc::ptr_eq(&optimum, &long), "{collective}");
        let short = wiring.packed_for(collective, 8).expect("a packing");
        let depth = |packed: &Packed| check(&topology, &packed.packing).expect("right").depth().edges;
        assert!(depth(&short) < depth(&optimum), "{collective}: {} {}", depth(&short), depth(&optimum));
        assert!(short.packing.rate < optimum.packing.rate && short.packing.bound == optimum.packing.bound);
        assert!(Arc::ptr_eq(&short, &wiring.packed_for(collective, 7).expect("a packing")));
        // Its routes are found by its trees.
        let algorithm = Algorithm::Packed(Some(short.trees.clone()));
        let found = wiring.carried_out_by(collective, &algorithm).expect("it is one of these links");
        assert!(Arc::ptr_eq(&short, &found));
    }
}

#[test]
fn what_was_asked_for_by_name_is_taken_for_all_sizes() {
    let topology = pleach_packing::topology::preset("star:16").expect("a preset");
    let collective = Collective::Broadcast { root: 3 };
    let given = pack(&topology, collective, &PackOptions::default()).expect("a packing");
    let options = PackOptions { trees_per_root: Some(1), ..PackOptions::default() };
    let by_options = Wiring::new(topology.clone()).packed_by(options);
    let by_packing = Wiring::new(topology).with_packing(given).expect("a packing of these links");
    for wiring in [by_options, by_packing] {
        let all = wiring.packed(collective).expect("a packing");
        assert!(Arc::ptr_eq(&all, &wiring.packed_for(collective, 8).expect("a packing")));
    }
}

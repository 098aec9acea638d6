//! The most rings, and what collectives reach on them.

use pleach_packing::compare::ring::{one_way_rate, rings};
use pleach_packing::compare::rings as packed_rings;
use pleach_packing::topology::{LATENCY_NS, NodeId, Topology, preset};
use pleach_packing::{Rate, check};
use pleach_vocabulary::Collective;

use super::by_hand::star;
use super::graphs::{collectives, dgx_1v};
use super::strategies::bounded;

/// Links of 25 bytes a second; the third number counts them between two ranks.
fn graph(ranks: u32, links: &[(u32, u32, u64)]) -> Topology {
    let mut builder = Topology::builder();
    let ranks: Vec<NodeId> = (0..ranks).map(|rank| builder.rank(format!("g{rank}"))).collect();
    for &(one, other, count) in links {
        for _ in 0..count {
            builder.duplex(ranks[one as usize], ranks[other as usize], 25, LATENCY_NS);
        }
    }
    builder.build().unwrap()
}

#[test]
fn rings_reach_what_is_known_of_them_and_fill_a_link() {
    let volta = preset("dgx-1v").unwrap();
    let known =
        [(volta, 75_000_000_000), (star(5, 100), 50), (star(2, 100), 100), (graph(2, &[(0, 1, 3)]), 75)];
    for (topology, each_way) in known {
        let ranks = topology.ranks();
        assert_eq!(
            rings(&topology).each_way_bytes_per_s(),
            Rate::from(i128::from(each_way)),
            "{ranks} ranks"
        );
        for collective in collectives(ranks) {
            let packing = packed_rings(&topology, &bounded(&topology, collective)).unwrap();
            // Two ranks have one link between them, which a ring uses in both directions at once.
            let directions = if ranks == 2 { 1 } else { 2 };
            assert_eq!(
                packing.rate,
                one_way_rate(collective, ranks, each_way * directions),
                "{ranks} {collective}"
            );
            let checked =
                check(&topology, &packing).unwrap_or_else(|flaw| panic!("{ranks} {collective}: {flaw}"));
            assert_eq!(checked.busiest(), Rate::from(1), "{ranks} {collective}");
        }
    }
}

#[test]
fn an_allocation_without_a_ring_has_none() {
    let rings = rings(&dgx_1v().only(&[0, 1, 4]).unwrap());
    assert!(rings.cycles.is_empty() && rings.is_maximum && rings.trees(3, Collective::AllReduce).is_empty());
}

#[test]
fn parallel_links_are_parallel_rings() {
    let triangle = graph(3, &[(0, 1, 2), (1, 2, 2), (0, 2, 3)]);
    assert_eq!(rings(&triangle).cycles.len(), 2);
}

#[test]
fn servers_of_pascal_and_volta_have_two_and_three_rings() {
    for (name, most) in [("dgx-1p", 2), ("dgx-1v", 3)] {
        let rings = rings(&preset(name).unwrap());
        assert_eq!((rings.cycles.len(), rings.is_maximum), (most, true), "{name}");
    }
}

#[test]
fn rings_are_found_where_nobody_can_try_them_all() {
    for (name, each_way) in [
        ("torus:4x4", 50),
        ("torus:4x4x4", 75),
        ("torus:8x8", 25),
        ("dgx-a100:2", 100),
        ("mi250:1", 150),
        ("dgx-2", 75),
    ] {
        let topology = preset(name).unwrap();
        let rings = rings(&topology);
        let reached = rings.each_way_bytes_per_s() / Rate::from(1_000_000_000);
        assert!(reached >= Rate::from(each_way), "{name}: {reached}");
        let packing = packed_rings(&topology, &bounded(&topology, Collective::AllReduce)).unwrap();
        check(&topology, &packing).unwrap_or_else(|flaw| panic!("{name}: {flaw}"));
    }
}

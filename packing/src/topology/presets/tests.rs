use proptest::prelude::*;

use super::*;
use crate::topology::{NodeKind, TopologyError};

fn made(name: &str) -> Topology {
    preset(name).unwrap_or_else(|error| panic!("{name}: {error}"))
}

fn refused(name: &str) -> PresetError {
    match preset(name) {
        Err(error) => error,
        other => panic!("{name}: {other:?}"),
    }
}

/// The least capacity out of a set of ranks, in bytes a second. No two switches may be joined: each
/// switch then goes to the side where it adds less to the cut.
fn least_cut(topology: &Topology, inside: u32) -> u64 {
    let is_inside = |node: NodeId| topology.rank(node).map(|rank| inside >> rank & 1 == 1);
    let (mut cut, mut into, mut out_of) =
        (0, vec![0; topology.nodes().len()], vec![0; topology.nodes().len()]);
    for link in topology.links() {
        match (is_inside(link.from), is_inside(link.to)) {
            (Some(true), Some(false)) => cut += link.bytes_per_s,
            (Some(true), None) => into[link.to.0 as usize] += link.bytes_per_s,
            (None, Some(false)) => out_of[link.from.0 as usize] += link.bytes_per_s,
            (None, None) => panic!("two switches are joined"),
            _ => {}
        }
    }
    cut + into.iter().zip(&out_of).map(|(&into, &out_of)| into.min(out_of)).sum::<u64>()
}

/// N times the least B⁺(S) / ranks in S over all sets that lack a rank, in hundredths of a GB/s,
/// rounded.
fn best_all_gather(topology: &Topology) -> u64 {
    let ranks = topology.ranks();
    let rate = |set: u32| least_cut(topology, set) as f64 / f64::from(set.count_ones());
    let least = (1..(1_u32 << ranks) - 1).map(rate).fold(f64::INFINITY, f64::min);
    (least * f64::from(ranks) / 1e7).round() as u64
}

/// The least cut of all sets that hold rank 0 and lack a rank, in GB/s.
fn best_broadcast(topology: &Topology) -> u64 {
    let sets = 1..(1_u32 << topology.ranks()) - 1;
    sets.filter(|set| set & 1 == 1).map(|set| least_cut(topology, set)).min().unwrap() / GB_PER_S
}

#[test]
fn published_optima_of_all_gather_come_out() {
    assert_eq!(best_all_gather(&made("dgx-a100:1")), 34_286);
    assert_eq!(best_all_gather(&made("dgx-a100:2")), 34_667);
    assert_eq!(best_all_gather(&made("mi250:1")), 34_286);
}

#[test]
fn known_optima_of_hybrid_cube_meshes_come_out() {
    let v = made("dgx-1v");
    assert_eq!((best_broadcast(&v), best_all_gather(&v)), (6 * 25, 17_143));
    assert_eq!(best_broadcast(&v.only(&[0, 2, 3]).unwrap()), 3 * 25);
    assert_eq!(best_broadcast(&v.only(&[0, 3, 4, 7]).unwrap()), 3 * 25);
    assert_eq!(best_broadcast(&v.only(&[0, 1, 2, 4, 5]).unwrap()), 3 * 25);
    let p = made("dgx-1p");
    assert_eq!((best_broadcast(&p), best_all_gather(&p)), (4 * 20, 9_143));
    assert_eq!(best_broadcast(&p.only(&[0, 1, 2]).unwrap()), 2 * 20);
}

fn units(topology: &Topology, one: u32, other: u32) -> u32 {
    topology.link(topology.node(one), topology.node(other)).map_or(0, |link| link.count)
}

#[test]
fn ndv2_is_dgx_1v_with_other_numbers() {
    let (ndv2, dgx) = (made("ndv2"), made("dgx-1v"));
    let doubles: Vec<(u32, u32)> = (0..8)
        .flat_map(|one| (one + 1..8).map(move |other| (one, other)))
        .filter(|&(one, other)| units(&ndv2, one, other) == 2)
        .collect();
    assert_eq!(doubles, [(0, 1), (0, 4), (1, 3), (2, 3), (2, 6), (4, 5), (5, 7), (6, 7)]);
    let order = [0, 3, 1, 2, 4, 7, 5, 6];
    for one in 0..8 {
        for other in (0..8).filter(|&other| other != one) {
            let same = units(&dgx, order[one as usize], order[other as usize]);
            assert_eq!(units(&ndv2, one, other), same, "{one} {other}");
        }
    }
}

#[test]
fn every_die_of_mi250_has_seven_units() {
    let topology = made("mi250:2");
    for rank in 0..32 {
        let leaving = topology.leaving(topology.node(rank)).iter().map(|link| link.bytes_per_s).sum::<u64>();
        assert_eq!(leaving, (7 * 50 + 16) * GB_PER_S, "rank {rank}");
    }
}

/// The numbers of ranks, of switches and of links. Each direction of a link counts.
fn size(name: &str) -> (u32, usize, usize) {
    let topology = made(name);
    assert!(topology.is_symmetric(), "{name}");
    let switches = topology.nodes().iter().filter(|node| node.kind == NodeKind::Switch).count();
    (topology.ranks(), switches, topology.links().len())
}

#[test]
fn presets_have_the_size_of_what_they_are_named_after() {
    assert_eq!(size("dgx-1p"), (8, 0, 32));
    assert_eq!(size("dgx-2"), (16, 1, 32));
    assert_eq!(size("dgx-a100"), (8, 1, 16));
    assert_eq!(size("dgx-a100:4"), (32, 6, 128));
    assert_eq!(size("dgx-h100:128"), (1_024, 136, 4_096));
    assert_eq!(size("mi250:2"), (32, 1, 176));
    assert_eq!((size("ring:2"), size("ring:5")), ((2, 0, 2), (5, 0, 10)));
    assert_eq!(size("mesh:6"), (6, 0, 30));
    assert_eq!((size("torus:4x4"), size("torus:2x3x4")), ((16, 0, 64), (24, 0, 2 * (12 + 24 + 24))));
    assert_eq!((size("torus:1x5"), size("torus:2x2")), ((5, 0, 10), (4, 0, 8)));
    assert_eq!((size("fat-tree:2"), size("fat-tree:4")), ((2, 5, 12), (16, 20, 96)));
    assert_eq!(size("dragonfly:9,4,2"), (72, 36, 2 * (72 + 9 * 6 + 36)));
    assert_eq!(size("star:3"), (3, 1, 6));
}

#[test]
fn every_rank_of_a_torus_has_neighbours_in_every_direction() {
    let topology = made("torus:3x4x5");
    let rank = (4 + 2) * 5 + 4;
    assert_eq!(topology.name(topology.node(rank)), "x1y2z4");
    let leaving = topology.leaving(topology.node(rank)).iter();
    let mut names: Vec<&str> = leaving.map(|link| topology.name(link.to)).collect();
    names.sort_unstable();
    assert_eq!(names, ["x0y2z4", "x1y1z4", "x1y2z0", "x1y2z3", "x1y3z4", "x2y2z4"]);
}

#[test]
fn rails_join_the_same_gpu_of_all_boxes_and_planes_every_second_one() {
    let joined = |name: &str, switch: &str| {
        let topology = made(name);
        let node = topology.nodes().iter().position(|node| node.name == switch).unwrap();
        let leaving = topology.leaving(NodeId(node as u32)).iter();
        leaving.map(|link| topology.name(link.to).to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(joined("dgx-h100:2", "rail3"), ["box0.gpu3", "box1.gpu3"]);
    let odd = ["box0.gpu1", "box0.gpu3", "box0.gpu5", "box0.gpu7"];
    assert_eq!(joined("dgx-a100:2", "plane1")[..4], odd);
}

#[test]
fn the_pcie_ring_is_half_a_link_and_survives_an_allocation() {
    assert_eq!(made("dgx-1p").pcie_ring_bytes_per_s(), Some(10 * GB_PER_S));
    let some = made("dgx-1v").only(&[0, 1, 4]).unwrap();
    assert_eq!(some.pcie_ring_bytes_per_s(), Some(12_500_000_000));
    assert_eq!(some.reversed().pcie_ring_bytes_per_s(), Some(12_500_000_000));
    assert_eq!(made("dgx-2").pcie_ring_bytes_per_s(), None);
}

#[test]
fn a_bandwidth_after_the_at_sign_is_that_of_every_link() {
    for name in ["ring:4@12.5", "star:4@12.5", "fat-tree:4@12.5", "dragonfly:3,2,1@12.5"] {
        assert!(made(name).links().iter().all(|link| link.bytes_per_s == 12_500_000_000), "{name}");
    }
    assert_eq!(made("mesh:3").links()[0].bytes_per_s, 25 * GB_PER_S);
}

#[test]
fn what_is_no_preset_says_what_there_is() {
    assert!(
        refused("dgx-9").to_string().starts_with("there is no preset 'dgx-9'; there are dgx-1p, dgx-1v,")
    );
    for name in [
        "ring",
        "ring:",
        "ring:x",
        "ring:+3",
        "ring:3,4",
        "torus:4",
        "torus:2x2x2x2",
        "dgx-1v:2",
        "dgx-a100:2@5",
    ] {
        assert!(matches!(refused(name), PresetError::Form { .. }), "{name}");
    }
    for name in [
        "ring:1",
        "mesh:0",
        "star:1",
        "fat-tree:5",
        "fat-tree:0",
        "dgx-a100:0",
        "torus:0x4",
        "torus:1x1",
        "dragonfly:1,1,1",
    ] {
        assert!(matches!(refused(name), PresetError::Number { .. }), "{name}");
    }
    for name in [
        "ring:4097",
        "mesh:2000",
        "fat-tree:64",
        "torus:100x100",
        "dragonfly:1,4096,1",
        "dragonfly:4096,1,1",
        "dgx-h100:513",
    ] {
        assert!(matches!(refused(name), PresetError::TooLarge { .. }), "{name}");
    }
    for name in ["ring:4@", "ring:4@0", "ring:4@-1", "ring:4@nan", "ring:4@1e99"] {
        assert!(matches!(refused(name), PresetError::Bandwidth { .. }), "{name}");
    }
    let much = refused("mesh:100@9000000000");
    assert!(
        matches!(&much, PresetError::Topology { name, error: TopologyError::TooMuchBandwidth } if name.starts_with("mesh"))
    );
}

proptest! {
    #[test]
    fn no_name_panics(name in "(ring|mesh|torus|fat-tree|dragonfly|star|mi250|dgx-a100)(:[0-9]{1,3}|:[0-9]{20})?([x,][0-9]{1,20}){0,2}(@.{0,5})?") {
        let _ = preset(&name);
    }
}

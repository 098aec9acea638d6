use std::collections::BTreeSet;

use super::*;
use crate::check;
use crate::digraph::Digraph;
use crate::rate::best_rate;
use crate::samples::Random;
use crate::topology::preset;

/// The same graph with its nodes in another order.
fn shuffled(topology: &Topology, seed: u64) -> Topology {
    let mut random = Random::new(seed);
    let mut order: Vec<NodeId> = (0..topology.nodes().len() as u32).map(NodeId).collect();
    for place in 1..order.len() {
        order.swap(place, random.below(place as u64 + 1) as usize);
    }
    topology.in_order(&order)
}

/// The bound by the general search over all ranks.
fn general_bound(topology: &Topology) -> Rate {
    let (graph, unit) = Digraph::of(topology);
    let best = best_rate(&graph, &vec![1; topology.ranks() as usize]).unwrap();
    best.rate * i128::try_from(unit).unwrap() * i128::from(topology.ranks())
}

fn assert_optimal(name: &str, topology: &Topology, collective: Collective) -> Packing {
    let packing =
        pack_all_gather(topology, collective, None).unwrap_or_else(|| panic!("{name} has no symmetry"));
    check(topology, &packing).unwrap_or_else(|flaw| panic!("{name}: {flaw}"));
    assert!(packing.is_optimal(), "{name}: {} of {}", packing.rate, packing.bound);
    packing
}

const SMALL: [&str; 14] = [
    "dgx-1p",
    "dgx-1v",
    "dgx-2",
    "dgx-a100:1",
    "dgx-a100:2",
    "dgx-h100:2",
    "mi250:1",
    "mi250:2",
    "ring:8",
    "mesh:6",
    "torus:4x3",
    "star:5",
    "fat-tree:4",
    "dragonfly:3,2,2",
];

#[test]
fn presets_reach_the_bound_that_the_general_search_finds() {
    for name in SMALL {
        let topology = preset(name).unwrap();
        for collective in [Collective::AllGather, Collective::ReduceScatter] {
            let packing = assert_optimal(name, &topology, collective);
            assert_eq!((name, packing.bound), (name, general_bound(&topology)));
        }
    }
}

#[test]
fn sixty_four_ranks_of_any_preset_reach_it_too() {
    let names = [
        "dgx-a100:8",
        "dgx-h100:8",
        "mi250:4",
        "ring:64",
        "mesh:64",
        "torus:8x8",
        "torus:4x4x4",
        "star:64",
        "fat-tree:6",
        "dragonfly:4,4,4",
        "dragonfly:8,4,2",
    ];
    for name in names {
        let topology = preset(name).unwrap();
        assert_eq!(assert_optimal(name, &topology, Collective::AllGather).bound, general_bound(&topology));
    }
}

#[test]
fn a_shuffled_copy_reaches_the_same() {
    for name in ["dgx-1v", "dgx-a100:2", "mi250:1", "torus:4x4", "fat-tree:4", "dgx-h100:8"] {
        let topology = preset(name).unwrap();
        let packing = assert_optimal(name, &topology, Collective::AllGather);
        for seed in 0..3 {
            let copy = assert_optimal(name, &shuffled(&topology, seed), Collective::AllGather);
            assert_eq!((name, copy.rate), (name, packing.rate));
        }
    }
}

#[test]
fn trees_used_both_ways_reach_the_bound_of_partitions() {
    for name in SMALL.into_iter().chain(["dgx-h100:8", "mi250:4", "torus:8x8", "dragonfly:4,4,4"]) {
        let topology = preset(name).unwrap();
        let (bound, certificate) = crate::all_reduce::bound(&topology);
        let packing = pack_all_reduce(&topology, bound, certificate, None).unwrap();
        check(&topology, &packing).unwrap_or_else(|flaw| panic!("{name}: {flaw}"));
        assert!(packing.is_optimal(), "{name}: {} of {}", packing.rate, packing.bound);
    }
}

#[test]
fn trees_are_as_shallow_as_the_bound_allows_where_ranks_look_the_same() {
    for (name, most) in
        [("torus:8x8", 8), ("dgx-h100:8", 2), ("star:64", 1), ("fat-tree:6", 1), ("dragonfly:8,4,2", 3)]
    {
        let packing = pack_all_gather(&preset(name).unwrap(), Collective::AllGather, None).unwrap();
        let mut deepest = 0;
        for tree in &packing.trees {
            let mut depths = BTreeMap::from([(tree.root, 0)]);
            for edge in &tree.edges {
                depths.insert(edge.to, depths[&edge.from] + 1);
            }
            deepest = deepest.max(*depths.values().max().unwrap());
        }
        assert!(deepest <= most, "{name}: {deepest}");
    }
}

/// A cycle of ranks, with links to the ranks at some distances and with any bandwidths; sometimes
/// with two orbits of ranks and a switch.
fn random_cycle(random: &mut Random) -> Option<Topology> {
    let (ranks, orbits) = (3 + random.below(6) as u32, 1 + random.below(2) as u32);
    let mut builder = Topology::builder();
    (0..ranks * orbits).for_each(|rank| _ = builder.rank(format!("r{rank}")));
    let switch = (random.below(3) == 0).then(|| builder.switch("s"));
    for _ in 0..2 + random.below(3) {
        let (from, to) = (random.below(orbits.into()) as u32, random.below(orbits.into()) as u32);
        let (distance, bandwidth) = (random.below(ranks.into()) as u32, 1 + random.below(9));
        for rank in (0..ranks).filter(|_| from != to || distance != 0) {
            let ends = (NodeId(from * ranks + rank), NodeId(to * ranks + (rank + distance) % ranks));
            builder.link(ends.0, ends.1, bandwidth, 1);
        }
    }
    if let Some(switch) = switch {
        let bandwidth = 1 + random.below(9);
        (0..ranks * orbits).for_each(|rank| builder.duplex(NodeId(rank), switch, bandwidth, 1));
    }
    builder.build().ok()
}

#[test]
fn random_graphs_that_look_the_same_from_many_ranks_reach_the_bound() {
    let mut random = Random::new(5);
    let (mut packed, mut with_orbits) = (0, 0);
    for _ in 0..300 {
        let Some(topology) = random_cycle(&mut random) else { continue };
        let symmetry = Symmetry::of(&topology);
        assert_eq!(best(&topology, &symmetry).rate * i128::from(topology.ranks()), general_bound(&topology));
        let Some(packing) = pack_all_gather(&topology, Collective::AllGather, None) else { continue };
        check(&topology, &packing).unwrap_or_else(|flaw| panic!("{flaw}"));
        assert_eq!(packing.bound, general_bound(&topology));
        assert!(packing.is_optimal(), "{} of {} on {topology:?}", packing.rate, packing.bound);
        packed += 1;
        with_orbits += usize::from(symmetry.rank_representatives(&topology).len() > 1);
    }
    assert!(packed > 150 && with_orbits > 20, "{packed} packed, {with_orbits} of them with several orbits");
}

#[test]
fn a_given_number_of_trees_a_root_weigh_the_same_and_say_what_they_miss() {
    for name in ["dgx-1v", "mi250:1", "torus:4x4", "dgx-a100:2", "dgx-h100:4"] {
        let topology = preset(name).unwrap();
        for count in [1, 2, 3, 8] {
            let packing = pack_all_gather(&topology, Collective::AllGather, Some(count)).unwrap();
            check(&topology, &packing).unwrap_or_else(|flaw| panic!("{name}: {flaw}"));
            assert!(packing.rate <= packing.bound && packing.rate * 2 > packing.bound, "{name} {count}");
            let roots: BTreeSet<Rank> = packing.trees.iter().map(|tree| tree.root).collect();
            assert_eq!(roots.len(), topology.ranks() as usize);
            let share = packing.rate / i128::from(topology.ranks()) / i128::from(count);
            assert!(packing.trees.iter().all(|tree| (tree.weight / share).is_integer()), "{name} {count}");
        }
    }
}

#[test]
fn two_hundred_and_fifty_six_ranks_on_eight_rails_need_one_tree_each() {
    let topology = preset("dgx-h100:32").unwrap();
    let packing = pack_all_gather(&topology, Collective::AllGather, None).unwrap();
    assert!(packing.is_optimal());
    // Eight links of 50 GB/s enter a box of eight ranks. They carry all blocks but those of the
    // box.
    assert_eq!(packing.bound, Rate::new(8 * 50_000_000_000 * 256, 256 - 8));
    assert_eq!(packing.trees.len(), 256);
    assert!(packing.trees.iter().all(|tree| tree.edges.len() == 255));
}

#[test]
fn without_symmetry_there_is_nothing_to_do() {
    let mut builder = Topology::builder();
    let ranks: Vec<NodeId> = (0..4).map(|rank| builder.rank(format!("r{rank}"))).collect();
    for (place, pair) in ranks.windows(2).enumerate() {
        builder.duplex(pair[0], pair[1], 5 + place as u64, 1);
    }
    assert_eq!(pack_all_gather(&builder.build().unwrap(), Collective::AllGather, None), None);
}

//! What the other strategies make is right, and never better than what enumeration says can be.

use std::time::Duration;

use pleach_packing::allocations::allocations;
use pleach_packing::compare::blink::{BlinkOptions, trees};
use pleach_packing::compare::{StrategyError, double_tree, hybrid, rings, two_phases};
use pleach_packing::topology::{NodeId, Topology, preset};
use pleach_packing::{Certificate, Packing, Rate, Tree, check};
use pleach_vocabulary::Collective;
use proptest::test_runner::Config;
use proptest::{prop_assert, prop_assert_eq, proptest};

use super::graphs::{collectives, dgx_1v, duplex};
use super::{by_hand, oracle};

/// On a busy machine half a second of an integer program may be nothing.
fn options() -> BlinkOptions {
    BlinkOptions { time_limit: Duration::from_secs(30), ..BlinkOptions::default() }
}

/// A packing without trees whose bound is that of a cut that is not claimed to be the best.
pub(crate) fn bounded(topology: &Topology, collective: Collective) -> Packing {
    let root = collective.root().unwrap_or(0);
    let nodes = vec![topology.node(root)];
    let around =
        Rate::from(topology.leaving(nodes[0]).iter().map(|link| i128::from(link.bytes_per_s)).sum::<i128>());
    let ranks = Rate::from(i128::from(topology.ranks()));
    let bound = match collective {
        Collective::AllGather | Collective::ReduceScatter => around * ranks,
        Collective::Scatter { .. } | Collective::Gather { .. } => around * ranks / (ranks - Rate::from(1)),
        _ => around,
    };
    let certificate = Certificate::Cut { nodes };
    Packing { collective, rate: Rate::default(), bound, certificate, trees: Vec::new() }
}

fn of_trees(topology: &Topology, collective: Collective, trees: Vec<Tree>) -> Packing {
    let rate = trees.iter().map(|tree| tree.weight).sum();
    Packing { rate, trees, ..bounded(topology, collective) }
}

#[test]
fn blink_reaches_its_threshold_on_every_allocation() {
    for allocation in allocations(&dgx_1v(), 3..=4) {
        let topology = &allocation.topology;
        for collective in collectives(topology.ranks()) {
            let packing = of_trees(topology, collective, trees(topology, collective, &options()).unwrap());
            check(topology, &packing)
                .unwrap_or_else(|flaw| panic!("{:?} {collective}: {flaw}", allocation.ranks));
            let best = oracle::bound(topology, collective);
            assert!(packing.rate <= best, "{:?} {collective}", allocation.ranks);
            if matches!(
                collective,
                Collective::Broadcast { .. } | Collective::Reduce { .. } | Collective::AllReduce
            ) {
                // The weights lose at most a tenth at this ε, the integer program a twentieth of
                // the rest.
                assert!(
                    packing.rate >= best * Rate::new(85, 100),
                    "{:?} {collective}: {} of {best}",
                    allocation.ranks,
                    packing.rate
                );
            }
        }
    }
}

#[test]
fn blink_broadcasts_on_a_whole_server_by_six_trees_of_one_link() {
    let topology = dgx_1v();
    let collective = Collective::Broadcast { root: 0 };
    let packing = of_trees(&topology, collective, trees(&topology, collective, &options()).unwrap());
    check(&topology, &packing).unwrap();
    assert_eq!((packing.rate, packing.trees.len()), (Rate::from(150), 6));
    assert!(packing.trees.iter().all(|tree| tree.weight == Rate::from(25)));
}

#[test]
fn blink_uses_one_hop_trees_around_a_switch() {
    let topology = by_hand::star(6, 30);
    let all_reduce = of_trees(
        &topology,
        Collective::AllReduce,
        trees(&topology, Collective::AllReduce, &options()).unwrap(),
    );
    let checked = check(&topology, &all_reduce).unwrap();
    assert_eq!((all_reduce.trees.len(), checked.depth().edges, all_reduce.rate), (6, 1, Rate::from(18)));
    let broadcast = Collective::Broadcast { root: 2 };
    let packing = of_trees(&topology, broadcast, trees(&topology, broadcast, &options()).unwrap());
    check(&topology, &packing).unwrap();
    assert_eq!(packing.rate, Rate::from(30));
}

/// Two servers of `gpus` around a switch each, and a slow link of each to a second switch.
fn servers(gpus: u32) -> Topology {
    let mut builder = Topology::builder();
    let ranks: Vec<NodeId> = (0..2 * gpus).map(|rank| builder.rank(format!("g{rank}"))).collect();
    let inside = [builder.switch("nv0"), builder.switch("nv1")];
    let across = builder.switch("ib");
    for (rank, &node) in ranks.iter().enumerate() {
        builder.duplex(node, inside[rank / gpus as usize], 300, 1);
        builder.duplex(node, across, 25, 1);
    }
    builder.build().unwrap()
}

#[test]
fn blink_crosses_servers_in_three_phases() {
    let topology = servers(4);
    for collective in collectives(8) {
        let packing = of_trees(&topology, collective, trees(&topology, collective, &options()).unwrap());
        check(&topology, &packing).unwrap_or_else(|flaw| panic!("{collective}: {flaw}"));
        if collective == Collective::AllReduce {
            // Every rank's slow link is full of what crosses.
            assert_eq!((packing.rate, packing.trees.len()), (Rate::from(100), 8));
            // Inside to the local root, across, inside.
            assert!(packing.trees.iter().all(|tree| tree.edges.len() == 7));
        }
    }
}

#[test]
fn rings_and_double_trees_are_right_where_they_are_possible() {
    let mut possible = 0;
    for allocation in allocations(&dgx_1v(), 3..=8) {
        let topology = &allocation.topology;
        for collective in collectives(topology.ranks()) {
            for result in [
                rings(topology, &bounded(topology, collective)),
                double_tree(topology, &bounded(topology, collective)),
            ] {
                match result {
                    Ok(packing) => {
                        possible += 1;
                        check(topology, &packing)
                            .unwrap_or_else(|flaw| panic!("{:?} {collective}: {flaw}", allocation.ranks));
                    }
                    Err(
                        StrategyError::NoRing | StrategyError::Unjoined { .. } | StrategyError::NotFor { .. },
                    ) => {}
                    Err(other) => panic!("{:?} {collective}: {other}", allocation.ranks),
                }
            }
        }
    }
    assert!(possible > 100, "{possible}");
}

#[test]
fn two_phases_are_right_and_reach_half_of_an_all_gather() {
    for (topology, optimum) in [
        (by_hand::triangle(), by_hand::all_reduce_on_triangle()),
        (by_hand::star(3, 10), by_hand::all_reduce_on_star()),
    ] {
        let packing = two_phases(&topology, &optimum).unwrap();
        check(&topology, &packing).unwrap();
        assert_eq!(packing.rate, oracle::bound(&topology, Collective::AllGather) / Rate::from(2));
    }
}

#[test]
fn the_allocations_of_a_server_are_those_of_the_paper() {
    let by_size = |topology: &Topology| {
        let all = allocations(topology, 3..=8);
        (3..=8).map(|size| all.iter().filter(|one| one.ranks.len() == size).count()).collect::<Vec<_>>()
    };
    assert_eq!(by_size(&dgx_1v()), [5, 14, 14, 10, 2, 1]);
    let mut pascal = Topology::builder();
    let ranks: Vec<NodeId> = (0..8).map(|rank| pascal.rank(format!("g{rank}"))).collect();
    for (one, other) in
        dgx_1v().links().iter().map(|link| (link.from.0, link.to.0)).filter(|(one, other)| one < other)
    {
        pascal.duplex(ranks[one as usize], ranks[other as usize], 20, 1);
    }
    assert_eq!(by_size(&pascal.build().unwrap()), [2, 4, 3, 3, 1, 1]);
    // Every connected choice is alike to exactly one of them: 53 and 17 with those that are not
    // connected.
    let counted: u32 = allocations(&dgx_1v(), 3..=8).iter().map(|one| one.alike).sum();
    let connected = (1..256_u32).filter(|choice| choice.count_ones() >= 3);
    let connected = connected.filter(|choice| {
        dgx_1v().only(&(0..8).filter(|rank| choice >> rank & 1 == 1).collect::<Vec<_>>()).is_ok()
    });
    assert_eq!(counted, connected.count() as u32);
}

/// For an integer program on a random graph. Few graphs need more, but these have needed the whole
/// limit for each collective: six minutes with that of [`options`].
const RANDOM_GRAPH_LIMIT: Duration = Duration::from_secs(2);

proptest! {
    #![proptest_config(Config { cases: 24, ..Config::default() })]

    #[test]
    fn strategies_are_right_on_random_graphs(topology in duplex(6, 2)) {
        for collective in collectives(topology.ranks()) {
            let best = oracle::bound(&topology, collective);
            let bound = bounded(&topology, collective);
            let limited = BlinkOptions { time_limit: RANDOM_GRAPH_LIMIT, ..options() };
            let blink = trees(&topology, collective, &limited);
            let blink = blink.map(|trees| of_trees(&topology, collective, trees)).ok();
            let others = [rings(&topology, &bound).ok(), double_tree(&topology, &bound).ok()];
            for packing in others.into_iter().chain([blink]).flatten() {
                prop_assert_eq!(check(&topology, &packing).err(), None, "{}", collective);
                prop_assert!(packing.rate <= best, "{}: {} above {}", collective, packing.rate, best);
            }
        }
    }
}

#[test]
fn pcie_beside_blinks_trees_carries_what_its_set_up_leaves_time_for() {
    let topology = preset("dgx-1v").unwrap().only(&[0, 1, 4]).expect("an allocation");
    let collective = Collective::Broadcast { root: 0 };
    let blink = of_trees(&topology, collective, trees(&topology, collective, &options()).unwrap());
    // 25 GB/s over NVLink, 12.5 GB/s around the ring over PCIe.
    let gb_s = |rate: i128| Rate::from(rate * 100_000_000);
    let free = hybrid(&topology, &blink, 3_000_000_000, 0).expect("its PCIe is known");
    assert_eq!((free.rate, free.split.slow_bytes), (gb_s(375), 1_000_000_000));
    let dear = hybrid(&topology, &blink, 3_000_000_000, 40_000_000).expect("its PCIe is known");
    assert!(dear.rate < free.rate && dear.rate > blink.rate && dear.split.slow_bytes < 1_000_000_000);
    // Over the links alone that is through before.
    let short = hybrid(&topology, &blink, 25_000_000, 1_000_000).expect("its PCIe is known");
    assert_eq!((short.rate, short.split.slow_bytes), (blink.rate, 0));
    let star = preset("star:3").unwrap();
    assert_eq!(hybrid(&star, &blink, 1 << 30, 0), None);
}

use super::*;
use crate::compare::StrategyError;
use crate::samples;
use crate::samples::random_topology;
use crate::samples::{Links, Random};
use crate::topology::{LATENCY_NS, preset};
use crate::{PackError, PackOptions, Strategy, all_reduce, check, directed, pack};

fn one_way(root: Rank) -> [Collective; 4] {
    [
        Collective::Broadcast { root },
        Collective::Reduce { root },
        Collective::AllGather,
        Collective::ReduceScatter,
    ]
}

/// Ranks in a chain, and `links` more links. The bandwidths have no common divisor.
fn irregular(ranks: u32, links: u64, seed: u64) -> Topology {
    let mut random = Random::new(seed);
    let mut builder = Topology::builder();
    let nodes: Vec<NodeId> = (0..ranks).map(|rank| builder.rank(format!("r{rank}"))).collect();
    let mut join = |random: &mut Random, one: usize, other: usize| {
        builder.duplex(nodes[one], nodes[other], 1_000_000_000 + random.below(25_000_000_000), LATENCY_NS);
    };
    for rank in 1..nodes.len() {
        join(&mut random, rank - 1, rank);
    }
    for _ in 0..links {
        let (one, other) = (random.below(ranks.into()) as usize, random.below(ranks.into()) as usize);
        if one != other {
            join(&mut random, one, other);
        }
    }
    builder.build().expect("a chain joins all")
}

fn share(packing: &Packing) -> f64 {
    let share = packing.rate / packing.bound;
    *share.numer() as f64 / *share.denom() as f64
}

#[test]
fn small_graphs_are_packed_rightly_beside_the_exact_bound() {
    let mut random = Random::new(71);
    let (mut shares, mut count) = (0.0, 0);
    for round in 0..150 {
        let links = [Links::Duplex, Links::Balanced, Links::Any][round % 3];
        let topology = samples::topology(&samples::graph(&mut random, 6, 4, links));
        for collective in one_way(random.below(topology.ranks().into()) as Rank) {
            for trees_per_root in [None, Some(3)] {
                let packing = pack_one_way(&topology, collective, trees_per_root);
                check(&topology, &packing).unwrap_or_else(|flaw| panic!("{collective} {topology:?}: {flaw}"));
                let exact = directed::pack_directed(&topology, collective, None);
                assert_eq!(packing.bound, exact.bound);
                assert!(packing.rate > Rate::default());
                (shares, count) = (shares + share(&packing), count + 1);
            }
        }
    }
    let mean = shares / f64::from(count);
    assert!(mean > 0.6, "{mean}");
}

#[test]
fn trees_used_both_ways_are_right_and_there_are_none_over_links_that_lead_one_way() {
    let mut random = Random::new(72);
    let (mut packed, mut none) = (0, 0);
    for round in 0..200 {
        let (ranks, switches) = (2 + random.below(6) as usize, random.below(3) as usize);
        let Some(topology) = random_topology(&mut random, ranks, switches, round % 3 != 0) else { continue };
        let (bound, certificate) = all_reduce::bound(&topology);
        let exact = all_reduce::pack_all_reduce(&topology, None);
        let packing = pack_both_ways(&topology, bound, certificate, None);
        assert_eq!(packing.is_some(), exact.is_some());
        match packing {
            Some(packing) => {
                check(&topology, &packing).unwrap_or_else(|flaw| panic!("{topology:?}: {flaw}"));
                packed += 1;
            }
            None => none += 1,
        }
    }
    let mut builder = Topology::builder();
    let [one, other, third] = ["a", "b", "c"].map(|name| builder.rank(name));
    for (from, to) in [(one, other), (other, third), (third, one)] {
        builder.link(from, to, 10, LATENCY_NS);
    }
    let cycle = builder.build().expect("a cycle");
    let (bound, certificate) = all_reduce::bound(&cycle);
    assert_eq!(pack_both_ways(&cycle, bound, certificate, None), None);
    assert!(packed > 100, "{packed} {none}");
}

#[test]
fn a_graph_beyond_exact_packing_gets_flat_trees_near_the_bound() {
    let topology = irregular(200, 1_600, 5);
    assert!(!is_exact_within_reach(&topology));
    for collective in [Collective::Broadcast { root: 7 }, Collective::AllGather, Collective::AllReduce] {
        let packing = pack(&topology, collective, &PackOptions::default()).expect("a packing");
        let checked = check(&topology, &packing).unwrap_or_else(|flaw| panic!("{collective}: {flaw}"));
        assert!(share(&packing) > 0.4, "{collective}: {}", share(&packing));
        assert!(checked.depth().edges <= 40, "{collective}: {:?}", checked.depth());
        let again = pack(&topology, collective, &PackOptions::default()).expect("a packing");
        assert_eq!(packing, again, "the same for the same topology");
    }
}

#[test]
fn a_hundred_thousand_links_are_packed_with_a_bound_of_single_ranks() {
    let topology = irregular(6_000, 50_000, 6);
    assert!(topology.links().len() > 100_000 && !is_bound_within_reach(&topology));
    for collective in [Collective::Broadcast { root: 0 }, Collective::AllReduce] {
        let options = PackOptions { trees_per_root: None, ..PackOptions::default() };
        let packing = pack(&topology, collective, &options).expect("a packing");
        check(&topology, &packing).unwrap_or_else(|flaw| panic!("{collective}: {flaw}"));
        assert!(packing.rate > Rate::default() && packing.rate <= packing.bound);
    }
    let refused = |collective, strategy| {
        pack(&topology, collective, &PackOptions { strategy, trees_per_root: None }).unwrap_err()
    };
    for collective in [Collective::AllGather, Collective::ReduceScatter] {
        let error = refused(collective, Strategy::Optimal);
        assert_eq!(error, PackError::TooManyEdges { collective, ranks: 6_000, trees: 1 });
    }
    let collective = Collective::AllReduce;
    for strategy in Strategy::ALL.iter().copied().filter(|&strategy| strategy != Strategy::Optimal) {
        let (ranks, links) = (topology.ranks(), topology.links().len());
        let why = StrategyError::TooLarge { ranks, links };
        assert_eq!(refused(collective, strategy), PackError::Impossible { strategy, collective, why });
    }
}

#[test]
fn a_star_is_used_up_by_trees_through_its_switch() {
    let topology = preset("star:16").expect("a preset");
    let packing = pack_one_way(&topology, Collective::AllGather, None);
    check(&topology, &packing).expect("a packing");
    assert!(share(&packing) > 0.8, "{}", share(&packing));
    let broadcast = pack_one_way(&topology, Collective::Broadcast { root: 3 }, None);
    check(&topology, &broadcast).expect("a packing");
    assert!(share(&broadcast) > 0.6, "{}", share(&broadcast));
}

#[test]
fn a_root_of_many_servers_is_at_the_bound_with_flat_trees() {
    for (name, root, edges) in
        [("dgx-h100:8", 3, 10), ("dgx-a100:8", 0, 10), ("fat-tree:6", 7, 6), ("star:40", 1, 6)]
    {
        let topology = preset(name).expect("a preset");
        for collective in [Collective::Broadcast { root }, Collective::Reduce { root }] {
            let packing = pack_one_way(&topology, collective, None);
            let checked =
                check(&topology, &packing).unwrap_or_else(|flaw| panic!("{collective} {name}: {flaw}"));
            assert!(packing.is_optimal(), "{collective} {name}: {}", share(&packing));
            assert!(packing.trees.len() <= MAX_TREES_PER_ROOT as usize, "{}", packing.trees.len());
            assert!(checked.depth().edges <= edges, "{collective} {name}: {:?}", checked.depth());
        }
    }
}

#[test]
fn sets_into_which_little_leads_are_entered_once_by_each_tree() {
    // No whole tree can be extracted here, so all trees are grown.
    let topology = preset("dgx-h100:8").expect("a preset");
    let packing = pack_one_way(&topology, Collective::Broadcast { root: 0 }, Some(32));
    check(&topology, &packing).expect("a packing");
    assert!(share(&packing) > 0.6, "{}", share(&packing));
}

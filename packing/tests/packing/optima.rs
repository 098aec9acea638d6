//! What is packed is right, and as good as enumeration says anything can be.

use pleach_packing::topology::{Link, Topology, preset};
use pleach_packing::{PackError, PackOptions, Packing, check, compare, pack};
use pleach_vocabulary::Collective;
use proptest::test_runner::{Config, TestCaseError};
use proptest::{prop_assert, prop_assert_eq, proptest};

use super::graphs::{collectives, duplex, one_way};
use super::oracle;

fn packed(topology: &Topology, collective: Collective) -> Result<Packing, TestCaseError> {
    let packing = pack(topology, collective, &PackOptions::default())
        .map_err(|error| TestCaseError::fail(error.to_string()))?;
    check(topology, &packing).map_err(|flaw| TestCaseError::fail(format!("{collective}: {flaw}")))?;
    Ok(packing)
}

/// Checks that the optimum is met, and is what enumeration says.
fn is_optimal(topology: &Topology, collective: Collective) -> Result<(), TestCaseError> {
    let packing = packed(topology, collective)?;
    prop_assert_eq!(packing.bound, oracle::bound(topology, collective), "{}", collective);
    prop_assert_eq!(packing.rate, packing.bound, "{}", collective);
    Ok(())
}

/// Where links differ in their directions an all-reduce may miss its bound, and there is none where
/// ranks are not joined both ways.
fn all_reduce_uses_both_ways(topology: &Topology) -> Result<(), TestCaseError> {
    let mut both_ways = Topology::builder();
    for node in topology.nodes() {
        both_ways.node(node.name.clone(), node.kind);
    }
    for link in topology.links().iter().filter(|link| topology.link(link.to, link.from).is_some()) {
        both_ways.add(*link);
    }
    if both_ways.build().is_err() {
        let refused = pack(topology, Collective::AllReduce, &PackOptions::default());
        prop_assert_eq!(refused, Err(PackError::OneWay));
        return Ok(());
    }
    let packing = packed(topology, Collective::AllReduce)?;
    let best = oracle::bound(topology, Collective::AllReduce);
    prop_assert!(packing.rate <= best);
    // The gap is that to what enumeration finds; switches that lose what they take may hide some of
    // the cuts.
    prop_assert!(packing.bound == best || (topology.has_switches() && packing.bound > best));
    // What the weaker directions of all links carry is reached.
    let mut weaker = Topology::builder();
    for node in topology.nodes() {
        weaker.node(node.name.clone(), node.kind);
    }
    for link in topology.links() {
        if let Some(back) = topology.link(link.to, link.from) {
            weaker.add(Link { bytes_per_s: link.bytes_per_s.min(back.bytes_per_s), ..*link });
        }
    }
    let weaker = weaker.build().expect("it was joined both ways");
    prop_assert!(packing.rate >= oracle::bound(&weaker, Collective::AllReduce));
    Ok(())
}

proptest! {
    #![proptest_config(Config { cases: 48, ..Config::default() })]

    #[test]
    fn duplex_links_are_packed_optimally_for_every_collective(topology in duplex(6, 0)) {
        for collective in collectives(topology.ranks()) {
            is_optimal(&topology, collective)?;
        }
    }

    #[test]
    fn duplex_links_and_switches_are_packed_optimally_for_every_collective(topology in duplex(5, 3)) {
        for collective in collectives(topology.ranks()) {
            is_optimal(&topology, collective)?;
        }
    }

    #[test]
    fn links_in_one_direction_are_packed_optimally_for_what_goes_one_way(topology in one_way(6, 0)) {
        for collective in collectives(topology.ranks()) {
            if collective == Collective::AllReduce {
                all_reduce_uses_both_ways(&topology)?;
            } else {
                is_optimal(&topology, collective)?;
            }
        }
    }

    #[test]
    fn switches_that_give_more_than_they_take_may_leave_a_gap_and_nothing_is_exceeded(topology in one_way(4, 2)) {
        all_reduce_uses_both_ways(&topology)?;
        let one_way = collectives(topology.ranks()).into_iter().filter(|&one| one != Collective::AllReduce);
        for collective in one_way {
            let packing = packed(&topology, collective)?;
            let best = oracle::bound(&topology, collective);
            prop_assert!(packing.rate <= best, "{}: {} above {}", collective, packing.rate, best);
            // Flows lose nothing in switches.
            if matches!(collective, Collective::Scatter { .. } | Collective::Gather { .. }) {
                prop_assert_eq!(packing.rate, best, "{}", collective);
            }
        }
    }
}

#[test]
fn presets_of_up_to_ten_ranks_are_packed_optimally() {
    let names = [
        "dgx-1v",
        "dgx-1p",
        "dgx-a100:1",
        "dgx-h100:1",
        "ring:2",
        "ring:9",
        "mesh:6",
        "torus:3x3",
        "torus:2x2x2",
        "star:8",
        "dragonfly:2,2,1",
    ];
    for name in names {
        let topology = preset(name).unwrap_or_else(|error| panic!("{name}: {error}"));
        for collective in collectives(topology.ranks()) {
            is_optimal(&topology, collective).unwrap_or_else(|error| panic!("{name}: {error}"));
        }
    }
}

#[test]
fn a_comparison_names_what_is_best_and_prints() {
    let topology = preset("dgx-1v").unwrap().only(&[0, 1, 4]).unwrap();
    let optimum = packed(&topology, Collective::AllReduce).unwrap();
    let comparison = compare::compare(&topology, &optimum);
    let rates: Vec<_> = comparison.rows.iter().map(|row| row.outcome.rate()).collect();
    assert!(rates.iter().flatten().all(|&rate| rate <= optimum.bound));
    assert!(matches!(comparison.row("ring").unwrap().outcome, compare::Outcome::OverPcie(_)));
    let text = comparison.to_string();
    for word in ["optimal", "blink", "over PCIe", "not possible here", "reduce-scatter+all-gather"] {
        assert!(text.contains(word), "no '{word}' in\n{text}");
    }
}

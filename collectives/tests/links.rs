//! Packed collectives over the links of topologies, in virtual time: how near they come to what
//! links allow.

use std::sync::Arc;
use std::time::Duration;

use pleach_collectives::simulate::wired::{TimeError, Timed, choose, time};
use pleach_packing::topology::{LATENCY_NS, Topology, preset};
use pleach_packing::{Certificate, Edge, Packing, Path, Rate, Tree};
use pleach_schedule::Algorithm;
use pleach_schedule::select::SelectError;
use pleach_schedule::wiring::Wiring;
use pleach_vocabulary::{Collective, Rank};

/// What the promise is for, in bytes of the whole.
const BYTES: u64 = 256 << 20;
/// What completion may take beyond bytes over bound.
const SLACK: f64 = 0.05;

const ROOTED: Collective = Collective::Broadcast { root: 0 };
const TIMED: [Collective; 4] =
    [ROOTED, Collective::AllGather, Collective::ReduceScatter, Collective::AllReduce];

fn wiring(name: &str) -> Arc<Wiring> {
    Arc::new(Wiring::new(preset(name).expect("a preset")))
}

fn value(rate: Rate) -> f64 {
    *rate.numer() as f64 / *rate.denom() as f64
}

fn timed(wiring: &Arc<Wiring>, collective: Collective, algorithm: Option<&Algorithm>) -> Timed {
    let parts = u64::from(collective.parts(wiring.topology().ranks()));
    let part_bytes = usize::try_from(BYTES / parts).expect("a size");
    time(wiring, collective, part_bytes, algorithm).unwrap_or_else(|error| panic!("{collective}: {error}"))
}

/// Bytes over bound as a part of the time, and the time.
fn of_bound(wiring: &Arc<Wiring>, collective: Collective, algorithm: Option<&Algorithm>) -> (f64, Timed) {
    let packed = wiring.packed(collective).unwrap_or_else(|error| panic!("{collective}: {error}"));
    let timed = timed(wiring, collective, algorithm);
    (BYTES as f64 / value(packed.packing.bound) / timed.time.as_secs_f64(), timed)
}

/// Large collectives take no more than five percent beyond the bound.
fn are_near_the_bound(name: &str) {
    let wiring = wiring(name);
    for collective in TIMED {
        let (reached, timed) = of_bound(&wiring, collective, None);
        println!("{name} {collective}: {:.2} % by {}", reached * 100.0, timed.selection.algorithm);
        assert!(reached > 1.0 / (1.0 + SLACK), "{name} {collective}: {reached}\n{}", timed.selection);
        assert!(reached <= 1.0 + 1e-9, "{name} {collective}: {reached} of what nothing can exceed");
    }
}

/// A test for each topology, so that they share the processors.
macro_rules! near_the_bound {
    ($($test:ident: $name:literal,)*) => {$(
        #[test]
        fn $test() {
            are_near_the_bound($name);
        }
    )*};
}

near_the_bound! {
    large_collectives_of_a_dgx_1v_are_near_the_bound: "dgx-1v",
    large_collectives_of_a_dgx_a100_are_near_the_bound: "dgx-a100:1",
    large_collectives_of_two_dgx_h100_are_near_the_bound: "dgx-h100:2",
    large_collectives_of_a_star_are_near_the_bound: "star:8",
    large_collectives_of_a_ring_are_near_the_bound: "ring:8",
    large_collectives_of_a_ring_of_three_are_near_the_bound: "ring:3",
    large_collectives_of_a_fat_tree_are_near_the_bound: "fat-tree:2",
    large_collectives_of_a_dragonfly_are_near_the_bound: "dragonfly:3,2,2",
}

/// Trees of two weights, each direction with one kind more than the other: links that served first
/// what came first would send chunks around in crowds and be idle between them (94 % of the bound).
#[test]
fn links_of_a_torus_with_unequal_sides_are_kept_busy() {
    let (reached, timed) = of_bound(&wiring("torus:4x5"), Collective::AllReduce, None);
    assert!(reached > 0.98, "{reached}\n{}", timed.selection);
}

/// The window has to cover the whole way up and down: with chunks that cover a round trip to the
/// next rank alone it is 42 %.
#[test]
fn a_short_all_reduce_is_cut_into_no_more_chunks_than_its_window_covers() {
    let wiring = wiring("torus:3x5");
    let bytes = 8 << 20;
    let bound = value(wiring.packed(Collective::AllReduce).expect("a packing").packing.bound);
    let timed = time(&wiring, Collective::AllReduce, bytes, None).expect("a time");
    let reached = bytes as f64 / bound / timed.time.as_secs_f64();
    assert!(reached > 0.85, "{reached}\n{}", timed.selection);
}

/// Of two trees with opposite ways one reaches a rank 62 hops later than the other: that is no
/// reason to wait.
#[test]
fn a_broadcast_around_a_long_ring_is_not_held_up_by_what_is_still_under_way() {
    let (reached, timed) = of_bound(&wiring("ring:48"), ROOTED, None);
    assert!(reached > 0.97, "{reached}\n{}", timed.selection);
}

#[test]
fn few_bytes_go_sooner_along_flat_trees_than_along_those_of_the_best_rate() {
    let wiring = wiring("star:16");
    for collective in [ROOTED, Collective::Reduce { root: 2 }] {
        let best = wiring.packed(collective).expect("a packing");
        let deep = Algorithm::Packed(Some(best.trees.clone()));
        let time_of = |algorithm: &Algorithm, bytes: usize| {
            time(&wiring, collective, bytes, Some(algorithm))
                .unwrap_or_else(|error| panic!("{collective}: {error}"))
        };
        let (flat, deep_time) = (time_of(&Algorithm::Packed(None), 8), time_of(&deep, 8).time);
        assert!(flat.time < deep_time, "{collective}: {:?} and {deep_time:?}\n{}", flat.time, flat.selection);
        let auto = time(&wiring, collective, 8, None).expect("a choice");
        assert!(
            auto.selection.table.iter().filter(|row| matches!(row.algorithm, Algorithm::Packed(_))).count()
                == 1
        );
        assert!(
            auto.time <= deep_time,
            "{collective}: {:?} and {deep_time:?}\n{}",
            auto.time,
            auto.selection
        );
        let many = choose(&wiring, collective, BYTES as usize, Some(&Algorithm::Packed(None)));
        assert_eq!(many.expect("a choice").algorithm, deep, "{collective}: many bytes go at the best rate");
    }
}

#[test]
fn a_call_without_bytes_ends_along_packed_trees() {
    let wiring = wiring("star:4");
    for collective in [ROOTED, Collective::Reduce { root: 2 }, Collective::AllReduce, Collective::AllGather] {
        let timed = time(&wiring, collective, 0, Some(&Algorithm::Packed(None)));
        assert!(
            timed.is_ok(),
            "{collective}: {}",
            timed.err().map_or_else(String::new, |error| error.to_string())
        );
    }
}

fn edge(topology: &Topology, from: Rank, to: Rank, weight: Rate) -> Edge {
    let hops = vec![topology.node(from), topology.node(to)];
    Edge { from, to, paths: vec![Path { hops, weight }] }
}

/// Three ranks, each joined to each by 10 GB/s: three paths of two links carry half a link each.
fn triangle() -> (Topology, Packing) {
    let mut builder = Topology::builder();
    let nodes = ["a", "b", "c"].map(|name| builder.rank(name));
    for (one, other) in [(0, 1), (1, 2), (0, 2)] {
        builder.duplex(nodes[one], nodes[other], 10_000_000_000, LATENCY_NS);
    }
    let topology = builder.build().expect("connected");
    let weight = Rate::from_integer(5_000_000_000);
    let path = |middle: Rank| {
        let ends = [(middle + 1) % 3, (middle + 2) % 3];
        Tree { root: middle, weight, edges: ends.map(|end| edge(&topology, end, middle, weight)).to_vec() }
    };
    let packing = Packing {
        collective: Collective::AllReduce,
        rate: Rate::from_integer(15_000_000_000),
        bound: Rate::from_integer(15_000_000_000),
        certificate: Certificate::Partition { parts: nodes.map(|node| vec![node]).to_vec() },
        trees: (0..3).map(path).collect(),
    };
    (topology, packing)
}

#[test]
fn a_packing_made_by_hand_is_carried_out_at_its_rate() {
    let (topology, packing) = triangle();
    let wiring = Arc::new(Wiring::new(topology).with_packing(packing).expect("a packing"));
    let (reached, timed) = of_bound(&wiring, Collective::AllReduce, None);
    assert_eq!(timed.selection.algorithm.family(), "packed", "{}", timed.selection);
    assert!(reached > 1.0 / (1.0 + SLACK), "{reached}");
    let ring = of_bound(&wiring, Collective::AllReduce, Some(&Algorithm::Ring)).0;
    assert!((ring - 0.5).abs() < 0.02, "a ring of three uses each link one way: {ring}");
}

#[test]
fn what_prices_say_is_what_is_measured() {
    let wiring = wiring("star:4");
    for name in ["ring", "direct", "packed", "halving-doubling"] {
        for collective in [Collective::AllGather, Collective::ReduceScatter] {
            let algorithm = Algorithm::named(name, collective).expect("a name");
            let timed = timed(&wiring, collective, Some(&algorithm));
            let predicted = timed.selection.predicted_s().expect("its own row");
            let error = predicted / timed.time.as_secs_f64() - 1.0;
            assert!(
                error.abs() < 0.1,
                "{name} {collective}: {predicted} s predicted, {:?} taken",
                timed.time
            );
        }
    }
}

#[test]
fn an_algorithm_over_ranks_that_no_link_joins_is_refused_and_names_them() {
    let wiring = wiring("dgx-1v");
    let error = time(&wiring, Collective::AllReduce, 1 << 20, Some(&Algorithm::Ring)).unwrap_err();
    let TimeError::Select(SelectError::NotJoined { from_rank, to_rank, .. }) = error else {
        panic!("{error}")
    };
    let node = |rank| wiring.topology().node(rank);
    assert!(wiring.topology().link(node(from_rank), node(to_rank)).is_none());
    assert!(error.to_string().contains("which no link joins"), "{error}");
}

/// Four servers on a switch, of which the last has lost a part of its bandwidth.
fn degraded(percent_left: u64) -> Arc<Wiring> {
    let mut builder = Topology::builder();
    let switch = builder.switch("switch");
    for server in 0..8 {
        let node = builder.rank(format!("server{server}"));
        let percent = if server == 7 { percent_left } else { 100 };
        builder.duplex(node, switch, 25_000_000_000 / 100 * percent, LATENCY_NS);
    }
    Arc::new(Wiring::new(builder.build().expect("connected")))
}

#[test]
fn a_server_that_lost_half_of_its_bandwidth_slows_an_all_reduce_down_by_little() {
    let whole = timed(&degraded(100), Collective::AllReduce, None).time;
    for percent_left in [75, 50] {
        let wiring = degraded(percent_left);
        let (reached, packed) = of_bound(&wiring, Collective::AllReduce, None);
        let (ring_reached, ring) = of_bound(&wiring, Collective::AllReduce, Some(&Algorithm::Ring));
        let slower = |time: Duration| time.as_secs_f64() / whole.as_secs_f64() - 1.0;
        println!(
            "{percent_left} % left: packed {:.1} % of the bound, {:.1} % slower than before; ring {:.1} %, {:.1} %",
            reached * 100.0,
            slower(packed.time) * 100.0,
            ring_reached * 100.0,
            slower(ring.time) * 100.0
        );
        // Its trees have several weights: none may be ahead of its share.
        assert!(reached > 1.0 / (1.0 + SLACK), "{reached}");
        assert!(ring.time.as_secs_f64() > packed.time.as_secs_f64() * 1.1, "{ring:?} {packed:?}");
    }
}

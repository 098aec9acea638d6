//! Plans alone in virtual time beside real engines over the same links, their price by the cost
//! model, and the bounds that no time is below.

use std::sync::Arc;
use std::time::Duration;

use pleach_collectives::simulate::many::{
    ManyError, Prepared, RANKS_MAX, WHOLE_RANKS_MAX, algorithms, bound, hosts,
};
use pleach_collectives::simulate::wired::{choose, time};
use pleach_packing::topology::{Topology, preset, preset_up_to};
use pleach_schedule::cost::Platform;
use pleach_schedule::generate::{Access, generate};
use pleach_schedule::select::{CHUNK_BYTES, SelectError, candidates};
use pleach_schedule::wiring::Wiring;
use pleach_schedule::{Algorithm, HostMap};
use pleach_vocabulary::Collective;

/// Of the whole, in bytes: in a signal's own line, in one chunk, and in many.
const SIZES: [usize; 4] = [32, 8 << 10, 1 << 20, 24 << 20];

/// How far a time may be from that of real engines: it was the same to the nanosecond in all cases
/// that were tried.
const TOLERANCE: f64 = 0.001;

fn part_bytes(collective: Collective, ranks: u32, whole: usize) -> usize {
    whole / collective.parts(ranks) as usize
}

/// Every algorithm of a collective over these links: those without links, hierarchical ones, and
/// packed trees for this size.
fn all_algorithms(wiring: &Arc<Wiring>, collective: Collective, whole: usize) -> Vec<Algorithm> {
    let ranks = wiring.topology().ranks();
    let mut all = candidates(collective, ranks);
    all.extend(algorithms(collective, &hosts(wiring.topology())));
    all.sort();
    all.dedup();
    let packed =
        choose(wiring, collective, part_bytes(collective, ranks, whole), Some(&Algorithm::Packed(None)));
    all.extend(packed.map(|selection| selection.algorithm));
    all
}

/// The largest deviation from real engines, and how many times were compared.
fn compared(name: &str, collectives: &[Collective], sizes: &[usize]) -> (f64, usize) {
    let wiring = Arc::new(Wiring::new(preset(name).expect("a preset")));
    let ranks = wiring.topology().ranks();
    let (mut largest, mut count) = (0.0_f64, 0);
    for &collective in collectives {
        for &whole in sizes {
            for algorithm in all_algorithms(&wiring, collective, whole) {
                let bytes = part_bytes(collective, ranks, whole);
                let Ok(engines) = time(&wiring, collective, bytes, Some(&algorithm)) else { continue };
                let algorithm = engines.selection.algorithm;
                let what = format!("{name} {collective} by {algorithm}, {whole} bytes");
                let prepared = Prepared::wired(&wiring, collective, &algorithm).and_then(Prepared::unfolded);
                let prepared = match prepared {
                    // Engines send signals over ranks too, where no switches join two.
                    Err(ManyError::Select(SelectError::NotJoined { .. }))
                        if collective == Collective::Barrier =>
                    {
                        continue;
                    }
                    prepared => prepared,
                };
                let timed = prepared.and_then(|prepared| prepared.time(bytes));
                let timed = timed.unwrap_or_else(|error| panic!("{what}: {error}"));
                let off = timed.as_secs_f64() / engines.time.as_secs_f64() - 1.0;
                if off.abs() > largest {
                    largest = off.abs();
                    println!("{what}: {:?}, engines {:?}: {:+.3} %", timed, engines.time, off * 100.0);
                }
                count += 1;
            }
        }
    }
    println!("{name}: {count} times, {:.3} % off at most", largest * 100.0);
    (largest, count)
}

fn are_those_of_engines(name: &str, collectives: &[Collective], sizes: &[usize], least: usize) {
    let (largest, count) = compared(name, collectives, sizes);
    assert!(largest <= TOLERANCE, "{name}: {largest}");
    assert!(count >= least, "{name}: only {count} times");
}

#[test]
fn times_on_a_star_are_those_of_engines() {
    are_those_of_engines("star:6", &Collective::ALL, &SIZES, 100);
}

#[test]
fn times_on_a_torus_are_those_of_engines() {
    are_those_of_engines("torus:3x4", &Collective::ALL, &SIZES[1..3], 12);
}

#[test]
fn times_on_boxes_with_rails_are_those_of_engines() {
    are_those_of_engines("dgx-h100:2", &Collective::ALL, &SIZES[1..3], 20);
}

#[test]
fn times_on_irregular_links_are_those_of_engines() {
    are_those_of_engines("dgx-1v", &Collective::ALL, &SIZES, 10);
}

#[test]
fn times_of_many_ranks_are_those_of_engines() {
    are_those_of_engines("star:32", &[Collective::AllReduce], &[64 << 10, 1 << 20], 12);
    are_those_of_engines("dgx-a100:4", &[Collective::AllReduce], &[1 << 20], 5);
}

/// Without folding, the order of transfers that meet at a link is that of engines.
#[test]
fn folded_ranks_take_the_time_of_all() {
    let mut largest = 0.0_f64;
    let mut folded = 0;
    for name in ["star:48", "ring:24", "torus:6x8", "dgx-h100:6", "dgx-a100:4", "mesh:16", "fat-tree:4"] {
        let topology = preset(name).expect("a preset");
        for collective in [Collective::AllReduce, Collective::AllGather, Collective::ReduceScatter] {
            for algorithm in algorithms(collective, &hosts(&topology)) {
                for whole in [32, 96 << 10, 6 << 20] {
                    let Ok(few) = Prepared::new(&topology, collective, &algorithm) else { continue };
                    let ranks = topology.ranks();
                    if few.carried_out() == ranks {
                        continue;
                    }
                    let bytes = part_bytes(collective, ranks, whole);
                    let Ok(short) = few.time(bytes) else { continue };
                    let all = few.unfolded().expect("the same links");
                    assert_eq!(all.carried_out(), ranks);
                    let long = all.time(bytes).expect("it fits");
                    let off = short.as_secs_f64() / long.as_secs_f64() - 1.0;
                    if off.abs() > largest {
                        largest = off.abs();
                        println!(
                            "{name} {collective} {algorithm} {whole}: {short:?}, all {long:?}: {:+.3} %",
                            off * 100.0
                        );
                    }
                    folded += 1;
                }
            }
        }
    }
    println!("{folded} times, {:.3} % off at most", largest * 100.0);
    assert!(folded > 100, "only {folded} were folded");
    assert!(largest <= 0.05, "{largest}");
}

#[test]
fn prices_are_those_of_the_cost_model() {
    let mut compared = 0;
    for name in ["star:6", "torus:3x4", "dgx-h100:2", "dgx-a100:2"] {
        let wiring = Arc::new(Wiring::new(preset(name).expect("a preset")));
        let platform = Platform::wired(wiring.clone());
        let ranks = platform.ranks();
        for collective in [Collective::AllReduce, Collective::AllGather, Collective::Broadcast { root: 1 }] {
            for algorithm in algorithms(collective, &hosts(wiring.topology())) {
                let Ok(prepared) = Prepared::new(wiring.topology(), collective, &algorithm) else { continue };
                for part in [1usize, 4_096, 1 << 20, 24 << 20] {
                    let schedule = generate(collective, &algorithm, ranks, Access::Put).expect("it fits");
                    let whole = part as u64 * u64::from(collective.parts(ranks));
                    let expected = platform.time_over_links(&algorithm, &schedule, whole, CHUNK_BYTES);
                    let (expected, price) =
                        (expected.expect("links"), prepared.price(part as u64).as_secs_f64());
                    // Here blocks are whole bytes and times whole picoseconds.
                    let near = (price - expected).abs() <= 0.001 * expected + 20e-9;
                    assert!(near, "{name} {collective} {algorithm} {part}: {price} s, {expected} s");
                    compared += 1;
                }
            }
        }
    }
    assert!(compared > 80, "only {compared}");
}

#[test]
fn no_time_is_below_the_bound() {
    let mut least = f64::INFINITY;
    for name in ["star:32", "torus:4x8", "dgx-h100:16", "dgx-a100:8", "ring:16", "mi250:2", "star:256"] {
        let topology = preset(name).expect("a preset");
        let ranks = topology.ranks();
        for collective in [Collective::AllReduce, Collective::AllGather, Collective::ReduceScatter] {
            let bound = bound(&topology, collective).expect("a bound");
            assert!(bound.is_of_packing());
            for algorithm in algorithms(collective, &hosts(&topology)) {
                let Ok(prepared) = Prepared::new(&topology, collective, &algorithm) else { continue };
                for whole in [256 << 10, 64 << 20] {
                    let bytes = part_bytes(collective, ranks, whole);
                    let Ok(timed) = prepared.time(bytes) else { continue };
                    let moved = bytes as f64 * f64::from(collective.parts(ranks));
                    let bound_s = moved / bound.bytes_per_s();
                    let of_bound = timed.as_secs_f64() / bound_s;
                    least = least.min(of_bound);
                    assert!(of_bound >= 1.0 - 1e-6, "{name} {collective} {algorithm} {whole}: {of_bound}");
                }
            }
        }
    }
    println!("the least is {least:.4} of the bound's time");
    assert!(least < 1.5, "some algorithm comes near the bound: {least}");
}

#[test]
fn late_ranks_are_waited_for() {
    let topology = preset("star:8").expect("a preset");
    let prepared = Prepared::new(&topology, Collective::AllReduce, &Algorithm::Ring).expect("it fits");
    let prepared = prepared.unfolded().expect("the same");
    let whole = prepared.time(1 << 20).expect("it fits");
    let late = Duration::from_millis(3);
    let mut delays = vec![0; 8];
    delays[5] = late.as_nanos() as u64;
    let with_late = prepared.time_with_delays(1 << 20, &delays, u64::MAX).expect("it fits");
    assert!(with_late > late && with_late <= late + whole, "{with_late:?} of {whole:?}");
    assert_eq!(prepared.time_with_delays(1 << 20, &[0; 8], u64::MAX).expect("it fits"), whole);
}

#[test]
fn a_thousand_ranks_fold_to_few_and_more_are_refused_by_name() {
    let topology = preset("dgx-h100:128").expect("a preset");
    let hosts = hosts(&topology);
    assert_eq!(hosts, "128x8".parse::<HostMap>().expect("hosts"));
    let hierarchical = Algorithm::Hierarchical(Some(hosts));
    let prepared = Prepared::new(&topology, Collective::AllReduce, &hierarchical).expect("it fits");
    assert!(prepared.carried_out() <= 8, "{} ranks", prepared.carried_out());
    let timed = prepared.time(1 << 20).expect("it fits");
    let bound = bound(&topology, Collective::AllReduce).expect("a bound");
    assert!(timed.as_secs_f64() > (1 << 20) as f64 / bound.bytes_per_s());
    let refused = |topology: &Topology, algorithm: &Algorithm| {
        Prepared::new(topology, Collective::AllReduce, algorithm).expect_err("it is refused")
    };
    // Neighbours of a ring across boxes are on different rails.
    let error = refused(&topology, &Algorithm::Ring);
    assert!(matches!(error, ManyError::Select(SelectError::NotJoined { .. })), "{error}");
    let uneven = preset("star:258").expect("a preset");
    let error = refused(&uneven, &Algorithm::HalvingDoubling);
    assert!(matches!(error, ManyError::NoFamily { ranks: 258, .. }), "{error} above {WHOLE_RANKS_MAX}");
    let too_many = preset_up_to("star:20000", 20_000).expect("a preset");
    let error = refused(&too_many, &Algorithm::Ring);
    assert!(matches!(error, ManyError::TooManyRanks { .. }), "{error} above {RANKS_MAX}");
    let many = preset("star:1024").expect("a preset");
    let ring = Prepared::new(&many, Collective::AllReduce, &Algorithm::Ring).expect("it fits");
    let error = ring.time(1 << 20).expect_err("ranks have no room for so many signals");
    assert!(error.to_string().contains("signal slots"), "{error}");
    assert!(ring.price(1 << 20) > Duration::ZERO);
}

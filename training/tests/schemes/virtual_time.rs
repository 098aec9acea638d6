//! Times of simulations: in closed form where nothing varies.

use std::time::Duration;

use pleach_training::Simulation;
use pleach_training::simulation::{Settings, Simulated};

use super::model::{Linear, STEPS, price, scheme, settings, simulate};

/// Bytes of the parameters.
const BYTES: u64 = 84;

/// Bytes of the buckets of `sync:bucket=24`.
const BUCKETS: [u64; 5] = [12, 24, 4, 24, 20];

fn steady(ranks: u32, computing: &str) -> Settings {
    Settings { computing: computing.parse().expect("is a text"), ..settings(ranks) }
}

fn steps(count: u64, time: Duration) -> Duration {
    time * u32::try_from(count).expect("few steps")
}

#[test]
fn a_synchronous_step_takes_the_computing_and_the_last_bucket() {
    let computing = Duration::from_millis(10);
    let trained = simulate("sync", &steady(4, "10ms,cv=0"));
    assert_eq!(trained.time, steps(STEPS, computing + price(BYTES)));
    assert_eq!(trained.bytes_per_rank, STEPS * BYTES);
    // All buckets but the last travel while others are computed.
    let trained = simulate("sync:bucket=24,order=fifo", &steady(4, "10ms,cv=0"));
    assert_eq!(trained.time, steps(STEPS, computing + price(BUCKETS[4])));
    assert_eq!(trained.bytes_per_rank, STEPS * BYTES);
}

#[test]
fn operations_take_the_network_one_after_the_other() {
    // Computing takes no time to speak of, so all buckets wait for the network from the start.
    let trained = simulate("sync:bucket=24,order=fifo", &steady(4, "1ns,cv=0"));
    assert_eq!(trained.time, steps(STEPS, BUCKETS.map(price).into_iter().sum()));
}

#[test]
fn local_steps_exchange_less_often_and_once_at_the_end() {
    let trained = simulate("local-sgd:every=10", &steady(4, "10ms,cv=0"));
    assert_eq!(trained.time, steps(STEPS, Duration::from_millis(10)) + 3 * price(BYTES));
    assert_eq!(trained.bytes_per_rank, 3 * BYTES);
    assert_eq!(trained.staleness_max, 9);
    let trained = simulate("diloco:every=5", &steady(4, "10ms,cv=0"));
    assert_eq!((trained.bytes_per_rank, trained.staleness_max), (5 * BYTES, 4));
    assert!((trained.staleness_mean - 2.0).abs() < 1e-9, "{}", trained.staleness_mean);
    assert_eq!(simulate("sync", &steady(4, "10ms")).staleness_max, 0);
}

#[test]
fn the_slowest_rank_holds_all_up_and_they_wait_for_it() {
    let trained = simulate("sync", &steady(4, "10ms,cv=0,straggler=1:3"));
    assert_eq!(trained.time, steps(STEPS, Duration::from_millis(30) + price(BYTES)));
    // Three ranks of four wait two thirds of the time.
    assert!((trained.wait_share - 0.5).abs() < 1e-3, "{}", trained.wait_share);
}

#[test]
fn the_same_seed_gives_the_same_hash_and_another_one_other_times() {
    for text in ["sync:bucket=24", "local-sgd:every=3", "diloco:every=4"] {
        let trained = |seed| -> Simulated { simulate(text, &Settings { seed, ..settings(7) }) };
        let (one, again, other) = (trained(1), trained(1), trained(2));
        assert_eq!(one, again, "{text}");
        assert_ne!(one.hash, other.hash, "{text}");
        assert_eq!(one.parameters, other.parameters, "{text}: times change no bit of a deterministic scheme");
    }
}

#[test]
fn a_run_is_observed_at_each_step_and_at_its_end() {
    let simulation = Simulation::new(&Linear, &scheme("local-sgd:every=3"), &settings(3)).expect("has ranks");
    let mut seen = Vec::new();
    let trained = simulation
        .run(&mut price, &mut |observed| {
            seen.push((observed.step, observed.time, observed.parameters.to_vec()))
        })
        .expect("trains");
    assert_eq!(seen.iter().map(|(step, ..)| *step).collect::<Vec<_>>(), (0..=STEPS).collect::<Vec<_>>());
    assert!(seen.is_sorted_by_key(|(_, time, _)| *time));
    let (_, time, parameters) = seen.last().expect("the end is seen");
    assert_eq!((*time, parameters), (trained.time, &trained.parameters));
}

//! Trainings in virtual time: with exchanges at their price, and carried out by real engines.

#[path = "../src/cli/train/wires.rs"]
mod wires;

use std::sync::Arc;
use std::time::Duration;

use pleach::Rank;
use pleach::packing::topology;
use pleach::schedule::wiring::Wiring;
use pleach_training::simulation::{Fault, Faults, Settings, Simulated, SimulationError};
use pleach_training::{Layout, Learner, Scheme, Simulation};
use pleach_vocabulary::digest::{chain, hash_of_pair};
use pleach_vocabulary::random::Random;
use wires::Prices;

/// A linear model of several layers, whose ranks have different data.
struct Linear(Vec<usize>);

fn number(random: &mut Random) -> f32 {
    (random.bits() >> 40) as f32 / (1_u64 << 23) as f32 - 1.0
}

impl Learner for Linear {
    fn layout(&self) -> Layout {
        Layout::of(&self.0)
    }

    fn initial(&self) -> Vec<f32> {
        let mut random = Random::new(1);
        (0..self.layout().parameters()).map(|_| number(&mut random)).collect()
    }

    fn gradient(&self, rank: Rank, step: u64, parameters: &[f32], gradient: &mut [f32]) -> f32 {
        let mut random = Random::new(chain(hash_of_pair(3, rank.into()), step));
        let input: Vec<f32> = parameters.iter().map(|_| number(&mut random)).collect();
        let error = parameters.iter().zip(&input).map(|(x, a)| x * a).sum::<f32>() - rank as f32;
        gradient.iter_mut().zip(&input).for_each(|(gradient, input)| *gradient = 2.0 * error * input);
        error * error
    }
}

const STEPS: u64 = 12;

fn settings(ranks: u32, computing: &str) -> Settings {
    Settings {
        ranks,
        steps: STEPS,
        seed: 9,
        computing: computing.parse().expect("is a text"),
        learning_rate: 1e-6,
        momentum: 0.0,
        observed_every: STEPS,
    }
}

fn wiring(text: &str) -> Arc<Wiring> {
    Arc::new(Wiring::new(topology::source(text).expect("is a topology")))
}

/// The same training at prices and over engines.
fn both(
    learner: &Linear,
    (text, links): (&str, &str),
    settings: &Settings,
    faults: &Faults,
) -> [Result<Simulated, SimulationError>; 2] {
    let (scheme, wiring) = (text.parse::<Scheme>().expect("is a scheme"), wiring(links));
    let simulation = || Simulation::new(learner, &scheme, settings).expect("trains").with_faults(faults);
    let mut prices = Prices::new(Some(wiring.clone()));
    let priced = simulation().run(&mut prices, &mut |_| {});
    prices.verdict().expect("each price is there");
    let over = simulation().over_engines(|delays| wires::engines(&wiring, settings.seed, delays));
    [priced, over.and_then(|simulation| simulation.run(&mut |_| Duration::ZERO, &mut |_| {}))]
}

/// Schemes whose exchanges are averages over all ranks: engines carry them out.
const OF_AVERAGES: [&str; 12] = [
    "sync",
    "sync:bucket=4K,order=fifo",
    "sync:bucket=4K",
    "sync:compress=bf16",
    "sync:bucket=4K,compress=f8",
    "local-sgd:every=3",
    "local-sgd:every=5,compress=bf16",
    "diloco:every=4",
    "diloco:every=4,fragments=2,delay=1",
    "diloco:every=3,compress=f8",
    "easgd:every=2,mode=sync",
    "eamsgd:every=3,mode=sync,momentum=0.5",
];

/// 20 kB of parameters in three layers.
fn learner() -> Linear {
    Linear(vec![3000, 1500, 500])
}

/// How much longer the same training takes over engines, as a share; it has the same bits.
fn longer(text: &str, links: &str, computing: &str) -> f64 {
    let ranks = wiring(links).topology().ranks();
    let settings = settings(ranks, computing);
    let trained = both(&learner(), (text, links), &settings, &Faults::default());
    let [priced, over] =
        trained.map(|trained| trained.unwrap_or_else(|error| panic!("{text}, {links}: {error}")));
    assert!(priced.guarantee_held && over.guarantee_held, "{text}, {links}");
    assert_eq!(priced.parameters, over.parameters, "{text}, {links}: in every bit");
    assert_eq!(priced.bytes_per_rank, over.bytes_per_rank, "{text}, {links}");
    over.time.as_secs_f64() / priced.time.as_secs_f64() - 1.0
}

#[test]
fn prices_and_engines_give_the_same_bits_and_agree_in_time_within_5_percent() {
    // Engines of many ranks take long.
    for (links, schemes) in [
        ("star:2@1", &OF_AVERAGES[..]),
        ("star:3@1", &OF_AVERAGES),
        ("star:4@1", &OF_AVERAGES),
        ("star:7@0.5", &OF_AVERAGES),
        ("star:16@1", &["sync:bucket=4K", "diloco:every=3,compress=f8"]),
    ] {
        for text in schemes {
            let longer = longer(text, links, "10ms,cv=0.1");
            assert!(longer.abs() < 0.05, "{text}, {links}: {:+.1} %", longer * 100.0);
        }
    }
}

/// Computing takes no time to speak of. A price has no part in what calls do to each other, and is
/// that of one all-reduce where what is encoded takes two calls.
#[test]
fn where_exchanges_are_all_the_time_there_is_lone_and_plain_ones_agree_within_5_percent() {
    for (links, schemes) in [
        ("star:2@1", &OF_AVERAGES[..]),
        ("star:4@1", &OF_AVERAGES),
        ("star:16@1", &["sync", "sync:bucket=4K", "diloco:every=4"]),
    ] {
        for text in schemes {
            let is_plain = !["bucket", "compress"].iter().any(|key| text.contains(key));
            let (longer, most) = (longer(text, links, "1ns,cv=0"), if is_plain { 0.05 } else { 0.35 });
            assert!(longer.abs() < most, "{text}, {links}: {:+.1} %", longer * 100.0);
        }
    }
}

#[test]
fn faults_over_engines_change_no_bit_and_the_same_seed_gives_the_same_hash() {
    let passing = [Fault::Slow, Fault::Drift, Fault::Freeze, Fault::Delay, Fault::Reorder];
    for text in [
        "sync:bucket=4K",
        "sync:compress=bf16",
        "local-sgd:every=3",
        "diloco:every=4",
        "easgd:every=2,mode=sync",
    ] {
        let run = |faults: &Faults| {
            let [priced, over] = both(&learner(), (text, "star:4@1"), &settings(4, "10ms"), faults);
            assert_eq!(
                priced.map(|trained| trained.parameters),
                over.clone().map(|trained| trained.parameters)
            );
            over.unwrap_or_else(|error| panic!("{text}, {faults}: {error}"))
        };
        let without = run(&Faults::default());
        for fault in passing {
            let faults = Faults::of(&[fault]);
            let trained = run(&faults);
            assert_eq!(trained, run(&faults), "{text}, {faults}");
            assert_eq!(trained.parameters, without.parameters, "{text}, {faults}");
            let is_slow = matches!(fault, Fault::Slow | Fault::Drift | Fault::Freeze);
            assert!(trained.time != without.time || !is_slow, "{text}, {faults}");
        }
    }
}

#[test]
fn when_a_rank_ends_engines_find_out_which() {
    let faults = Faults::of(&[Fault::RankDeath]);
    for text in OF_AVERAGES {
        let [_, over] = both(&learner(), (text, "star:4@1"), &settings(4, "10ms"), &faults);
        let Err(SimulationError::Lost { lost, at, rank, .. }) = over else { panic!("{text}: {over:?}") };
        assert!((1..4).contains(&lost) && at < STEPS && rank != lost, "{text}: rank {lost} before step {at}");
    }
}

#[test]
fn what_engines_do_not_carry_out_is_refused_with_the_reason() {
    let refused = |text: &str, links: &str, ranks, faults: &[Fault]| {
        let faults = Faults::of(faults);
        let [_, over] = both(&Linear(vec![10]), (text, links), &settings(ranks, "10ms"), &faults);
        over.expect_err(text).to_string()
    };
    for text in ["gossip", "easgd", "downpour", "ssp", "bsp", "asp", "bap", "elastic-bsp"] {
        assert!(refused(text, "star:4@1", 4, &[]).contains("window"), "{text}");
    }
    for text in ["eager", "bidmach"] {
        assert!(refused(text, "star:4@1", 4, &[]).contains("a round opens without late ranks"), "{text}");
    }
    assert!(refused("sync", "ring:5", 5, &[]).contains("in the order of the ranks"));
    assert!(refused("sync", "star:65@1", 65, &[]).contains("at most 64"));
    assert!(refused("sync", "star:4@1", 4, &[Fault::LinkShrink]).contains("keep their rates"));
}

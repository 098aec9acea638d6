//! Trainings in virtual time: with exchanges at their price, and carried out by real engines.

#[path = "../src/cli/train/wires.rs"]
mod wires;

use std::sync::Arc;
use std::time::Duration;

use pleach::Rank;
use pleach::packing::topology;
use pleach::schedule::wiring::Wiring;
use pleach_training::simulation::{Engines, Exchanges, Fault, Faults, Settings, Simulated, SimulationError};
use pleach_training::{Layout, Learner, Scheme, Simulation};
use pleach_vocabulary::digest::{chain, hash_of_pair};
use pleach_vocabulary::random::Random;
use wires::Prices;

/// A linear model, whose ranks have different data.
struct Linear(Layout);

fn number(random: &mut Random) -> f32 {
    (random.bits() >> 40) as f32 / (1_u64 << 23) as f32 - 1.0
}

impl Learner for Linear {
    fn layout(&self) -> Layout {
        self.0.clone()
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
    let over = simulation().over_engines(connecting(&wiring, settings));
    [priced, over.and_then(|simulation| simulation.run(&mut |_| Duration::ZERO, &mut |_| {}))]
}

/// Connects engines.
fn connecting<'e>(
    wiring: &Arc<Wiring>,
    settings: &Settings,
) -> impl FnOnce(&Exchanges) -> Result<Box<dyn Engines + 'e>, String> + use<'e> {
    let (wiring, seed) = (wiring.clone(), settings.seed);
    move |exchanges| {
        let engines: Box<dyn Engines + 'e> = wires::engines(&wiring, seed, exchanges)?;
        Ok(engines)
    }
}

/// Schemes whose exchanges are averages over all ranks.
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

/// Schemes with other exchanges, whose results do not depend on times.
const EXACT: [&str; 13] = [
    "gossip:direction=push,peer=butterfly",
    "gossip:direction=push,peer=ring,every=2",
    "gossip:direction=push-sum,peer=butterfly,every=2",
    "gossip:direction=push-sum,peer=ring",
    "easgd:every=3,mode=round-robin",
    "eamsgd:every=3,mode=round-robin,momentum=0.5",
    "bsp",
    "elastic-bsp:lookahead=1",
    "ssp:staleness=0",
    "eager:activation=all,every=4",
    "eager:activation=quorum:4,late=drop,divisor=contributors,every=7",
    "bidmach",
    "bidmach:every=2,rate=0.5,dimensions=1",
];

/// Schemes by which it depends on times who reads, or counts, what.
const BY_TIMES: [&str; 19] = [
    "gossip",
    "gossip:peer=butterfly,every=2",
    "gossip:reads=torn",
    "gossip:direction=push",
    "gossip:direction=push-sum",
    "easgd:every=3",
    "eamsgd:every=3",
    "downpour:every=4",
    "ssp",
    "ssp:staleness=1",
    "dssp:low=1,high=4",
    "bap",
    "asp",
    "elastic-bsp",
    "elastic-bsp:lookahead=3,objective=range,prediction=last",
    "eager",
    "eager:activation=solo,late=correct,every=5",
    "eager:activation=solo,late=drop,divisor=contributors",
    "bidmach:every=2,threshold=0.6",
];

/// 20 kB of parameters in three layers.
fn learner() -> Linear {
    Linear(Layout::of(&[3000, 1500, 500]))
}

/// The same training in both, each of which keeps what the scheme guarantees.
fn both_held(text: &str, links: &str, computing: &str, faults: &Faults) -> [Simulated; 2] {
    let settings = settings(wiring(links).topology().ranks(), computing);
    both(&learner(), (text, links), &settings, faults).map(|trained| {
        let trained = trained.unwrap_or_else(|error| panic!("{text}, {links}, {faults}: {error}"));
        let is_right = trained.guarantee_held && trained.parameters_equal && trained.has_ended;
        let Simulated { guarantee_held, parameters_equal, has_ended, .. } = trained;
        assert!(is_right, "{text}, {links}, {faults}: {guarantee_held} {parameters_equal} {has_ended}");
        trained
    })
}

/// By how much times differ at most, as a share.
fn most(text: &str) -> f64 {
    match text {
        // Less than one of the few steps.
        _ if text.contains("round-robin") => 0.1,
        // A rank has one slot for words at a peer, which is free when the peer has heard the word
        // before, and prices let words wait otherwise.
        _ if text.contains("ssp") => 0.1,
        _ => 0.05,
    }
}

/// How much longer it takes over engines, as a share.
fn share([priced, over]: &[Simulated; 2]) -> f64 {
    over.time.as_secs_f64() / priced.time.as_secs_f64() - 1.0
}

/// How much longer the same training takes over engines, as a share; it has the same bits.
fn longer(text: &str, links: &str, computing: &str) -> f64 {
    let trained = both_held(text, links, computing, &Faults::default());
    let [priced, over] = &trained;
    assert_eq!(priced.parameters, over.parameters, "{text}, {links}: in every bit");
    assert_eq!(priced.bytes_per_rank, over.bytes_per_rank, "{text}, {links}");
    share(&trained)
}

#[test]
fn prices_and_engines_give_the_same_bits_and_agree_in_time_within_5_percent() {
    // Engines of many ranks take long.
    for (links, schemes) in [
        ("star:2@1", &OF_AVERAGES[..]),
        ("star:3@1", &OF_AVERAGES),
        ("star:4@1", &OF_AVERAGES),
        ("star:7@0.5", &OF_AVERAGES),
        ("star:4@1", &EXACT),
        ("star:16@1", &["sync:bucket=4K", "diloco:every=3,compress=f8", "bsp", "bidmach"]),
    ] {
        for text in schemes {
            let longer = longer(text, links, "10ms,cv=0.1");
            assert!(longer.abs() < most(text), "{text}, {links}: {:+.1} %", longer * 100.0);
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
fn where_times_decide_what_is_read_the_guarantees_hold_and_times_agree_within_5_percent() {
    for (links, schemes) in [
        ("star:2@1", &BY_TIMES[..]),
        ("star:4@1", &BY_TIMES),
        ("star:7@0.5", &["gossip", "easgd:every=3", "ssp", "elastic-bsp", "eager", "bidmach:threshold=0.6"]),
        ("star:16@1", &["gossip", "easgd:every=3", "ssp"]),
    ] {
        for text in schemes {
            let trained = both_held(text, links, "10ms,cv=0.1", &Faults::default());
            let longer = share(&trained);
            assert!(longer.abs() < most(text), "{text}, {links}: {:+.1} %", longer * 100.0);
            if links == "star:2@1" {
                let [_, again] = both_held(text, links, "10ms,cv=0.1", &Faults::default());
                assert_eq!(trained[1], again, "{text}, {links}: the same seed");
            }
        }
    }
}

/// Faults under which a training goes on.
const PASSING: [Fault; 5] = [Fault::Slow, Fault::Drift, Fault::Freeze, Fault::Delay, Fault::Reorder];

#[test]
fn faults_over_engines_change_no_bit_and_the_same_seed_gives_the_same_hash() {
    let schemes = [
        "sync:bucket=4K",
        "sync:compress=bf16",
        "local-sgd:every=3",
        "diloco:every=4",
        "easgd:every=2,mode=sync",
        "gossip:direction=push-sum,peer=ring",
        "easgd:every=3,mode=round-robin",
        "bsp",
        "eager:activation=all,every=4",
        "bidmach",
    ];
    // Each alone in turn, and all at once.
    for (text, fault) in schemes.into_iter().zip(PASSING.into_iter().cycle()) {
        let run = |faults: &Faults| {
            let [priced, over] = both_held(text, "star:4@1", "10ms", faults);
            assert_eq!(priced.parameters, over.parameters, "{text}, {faults}");
            over
        };
        let without = run(&Faults::default());
        let faults = Faults::of(&[fault]);
        let trained = run(&faults);
        assert_eq!(trained.parameters, without.parameters, "{text}, {faults}");
        let is_slow = matches!(fault, Fault::Slow | Fault::Drift | Fault::Freeze);
        assert!(trained.time != without.time || !is_slow, "{text}, {faults}");
        let all = Faults::of(&PASSING);
        assert_eq!(run(&all), run(&all), "{text}, {all}");
    }
}

#[test]
fn under_faults_engines_keep_what_schemes_guarantee_whatever_is_read() {
    for (text, fault) in BY_TIMES.into_iter().zip(PASSING.into_iter().cycle()) {
        let run = |faults: &Faults| both_held(text, "star:4@1", "10ms,cv=0.1", faults);
        run(&Faults::of(&[fault]));
        let all = Faults::of(&PASSING);
        let [[_, over], [_, again]] = [run(&all), run(&all)];
        assert_eq!(over, again, "{text}, {all}");
    }
}

/// The group of an engine ends when one of its ranks does, also where the scheme waits for nobody.
#[test]
fn when_a_rank_ends_engines_find_out_which() {
    let faults = Faults::of(&[Fault::RankDeath]);
    for text in OF_AVERAGES.into_iter().chain(EXACT).chain(BY_TIMES) {
        let [_, over] = both(&learner(), (text, "star:4@1"), &settings(4, "10ms"), &faults);
        let Err(SimulationError::Lost { lost, at, rank, .. }) = over else { panic!("{text}: {over:?}") };
        assert!((1..4).contains(&lost) && at < STEPS && rank != lost, "{text}: rank {lost} before step {at}");
    }
}

#[test]
fn a_training_over_engines_rests_and_goes_on() {
    let (wiring, settings) = (wiring("star:4@1"), settings(4, "10ms,cv=0.1"));
    for text in ["sync", "bsp", "ssp", "gossip", "easgd:every=3", "eager", "eager:activation=all", "bidmach"]
    {
        let (learner, scheme) = (learner(), text.parse::<Scheme>().expect("is a scheme"));
        let simulation = Simulation::new(&learner, &scheme, &settings).expect("trains");
        let over = simulation.over_engines(connecting(&wiring, &settings));
        let mut over = over.unwrap_or_else(|error| panic!("{text}: {error}"));
        over.run_to(5, &mut |_| Duration::ZERO, &mut |_| {})
            .unwrap_or_else(|error| panic!("{text}: {error}"));
        let saved = over.save().unwrap_or_else(|error| panic!("{text}: {error}"));
        let whole = over.run(&mut |_| Duration::ZERO, &mut |_| {});
        let whole = whole.unwrap_or_else(|error| panic!("{text}: {error}"));
        assert!(whole.guarantee_held && whole.parameters_equal && whole.steps == STEPS, "{text}");
        let restored = Simulation::restored(&learner, &scheme, &settings, &saved).expect("goes on");
        let restored = restored.over_engines(connecting(&wiring, &settings)).expect("connects");
        let restored = restored.run(&mut |_| Duration::ZERO, &mut |_| {});
        let restored = restored.unwrap_or_else(|error| panic!("{text}: {error}"));
        assert!(restored.guarantee_held && restored.parameters_equal, "{text}");
        if ["sync", "bsp", "eager:activation=all", "bidmach"].contains(&text) {
            assert_eq!(whole.parameters, restored.parameters, "{text}");
        }
    }
}

#[test]
fn of_a_table_engines_read_the_rows_that_have_changed() {
    let learner = Linear(Layout::table(40, 8));
    for text in ["bsp", "ssp", "easgd:every=2,mode=round-robin", "easgd:every=2"] {
        let settings = settings(4, "10ms,cv=0.1");
        let [priced, over] = both(&learner, (text, "star:4@1"), &settings, &Faults::default());
        let [priced, over] =
            [priced, over].map(|trained| trained.unwrap_or_else(|error| panic!("{text}: {error}")));
        assert!(over.guarantee_held && over.parameters_equal, "{text}");
        if EXACT.contains(&text) {
            assert_eq!(priced.parameters, over.parameters, "{text}");
            assert_eq!(priced.bytes_per_rank, over.bytes_per_rank, "{text}");
        }
    }
}

#[test]
fn grids_with_holes_have_lines_of_their_own_engines() {
    for (links, text) in [
        ("star:3@1", "bidmach"),
        ("star:5@1", "bidmach"),
        ("star:7@1", "bidmach:every=2,dimensions=3"),
        ("star:5@1", "bidmach:threshold=0.6"),
    ] {
        let [priced, over] = both_held(text, links, "10ms,cv=0.1", &Faults::default());
        if !text.contains("threshold") {
            assert_eq!(priced.parameters, over.parameters, "{text}, {links}");
            assert_eq!(priced.bytes_per_rank, over.bytes_per_rank, "{text}, {links}");
        }
    }
}

#[test]
fn what_engines_do_not_carry_out_is_refused_with_the_reason() {
    let refused = |text: &str, links: &str, ranks, faults: &[Fault]| {
        let (faults, learner) = (Faults::of(faults), Linear(Layout::of(&[10])));
        let [_, over] = both(&learner, (text, links), &settings(ranks, "10ms"), &faults);
        over.expect_err(text).to_string()
    };
    for text in ["sync", "eager"] {
        assert!(refused(text, "ring:5", 5, &[]).contains("in the order of the ranks"), "{text}");
    }
    // The ranks of a line are no neighbours.
    let line = refused("bidmach", "ring:5", 5, &[]);
    assert!(line.contains("line of ranks"), "{line}");
    assert!(refused("sync", "star:65@1", 65, &[]).contains("at most 64"));
    for text in ["sync", "gossip"] {
        assert!(refused(text, "star:4@1", 4, &[Fault::LinkShrink]).contains("keep their rates"), "{text}");
    }
}

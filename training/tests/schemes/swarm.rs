//! All schemes at once: many drawn worlds, each with links and computing times of its own.

use std::time::Duration;

use pleach_collectives::Rank;
use pleach_training::policy::Action;
use pleach_training::simulation::{
    Fault, Faults, Network, Settings, Simulated, SimulationError, TransferTime,
};
use pleach_training::{Learner as _, Simulation};
use pleach_vocabulary::random::Random;

use super::model::{Linear, STEPS, scheme, settings};
use super::mutants::mutated;

/// Schemes, and whether their result depends on times.
const SCHEMES: [(&str, bool); 40] = [
    ("sync:bucket=16", false),
    ("sync:bucket=16,order=fifo", false),
    ("sync:bucket=8,compress=bf16", false),
    ("local-sgd:every=3", false),
    ("diloco:every=4", false),
    ("gossip", true),
    ("gossip:every=2,peer=ring", true),
    ("gossip:direction=push", true),
    ("gossip:direction=push,peer=ring", false),
    ("gossip:direction=push-sum", true),
    ("gossip:direction=push-sum,every=3", true),
    ("gossip:direction=push-sum,peer=ring", false),
    ("easgd:every=1", true),
    ("easgd:every=3", true),
    ("easgd:every=2,mode=sync", false),
    ("easgd:every=2,mode=round-robin", false),
    ("eamsgd:every=3,momentum=0.5", true),
    ("eamsgd:every=1,mode=round-robin,momentum=0.5", false),
    ("downpour:every=2", true),
    ("ssp:staleness=1", true),
    ("ssp:staleness=4", true),
    ("bsp", false),
    ("dssp:low=1,high=4", true),
    ("dssp:low=0,high=2", true),
    ("bap:distance=8", true),
    ("bap:distance=30", true),
    ("asp", true),
    ("eager", true),
    ("eager:activation=solo,every=3", true),
    ("eager:activation=solo,late=drop,divisor=contributors,every=4", true),
    ("eager:activation=majority,late=correct,every=7", true),
    ("eager:activation=deadline:5ms,every=6", true),
    ("eager:activation=all,every=5", false),
    ("bidmach", false),
    ("bidmach:every=2,dimensions=3", false),
    ("bidmach:threshold=0.6", true),
    ("bidmach:dimensions=1,threshold=0.3,every=2", true),
    ("gossip:reads=torn,every=2", true),
    ("elastic-bsp:lookahead=1", false),
    ("elastic-bsp:lookahead=9", true),
];

/// Links whose times are drawn for each transfer: from much shorter to much longer than a step.
struct Drawn {
    random: Random,
    scale: u64,
}

impl Drawn {
    fn time(&mut self) -> Duration {
        Duration::from_nanos(self.random.bits() % self.scale)
    }
}

impl Network for Drawn {
    fn all_reduce(&mut self, _: u64) -> Duration {
        self.time()
    }

    fn transfer(&mut self, _: Rank, _: Rank, _: u64) -> TransferTime {
        TransferTime { latency: self.time(), sending: self.time() }
    }
}

const COMPUTING: [&str; 4] =
    ["10ms,cv=0", "10ms,cv=0.3,spread=0.5", "10ms,cv=1", "10ms,cv=0.1,straggler=0:9"];

const SCALES: [u64; 4] = [1, 100_000, 10_000_000, 100_000_000];

const SEEDS: u64 = 1600;

/// A world that is drawn, and its name.
fn world(text: &str, ranks: u32, seed: u64, mut random: Random) -> (Settings, Drawn, String) {
    let computing = COMPUTING[random.index(COMPUTING.len())];
    let scale = SCALES[random.index(SCALES.len())];
    let name = format!("seed {seed}: {text}, {ranks} ranks, {computing}, {scale} ns");
    let computing = computing.parse().expect("is a text");
    let settings = Settings { seed, learning_rate: 0.001, computing, ..settings(ranks) };
    (settings, Drawn { random, scale }, name)
}

/// The parameters at the end of a simulation in such a world.
fn end_of(text: &str, ranks: u32, seed: u64, random: Random) -> Vec<f32> {
    let (settings, mut drawn, world) = world(text, ranks, seed, random);
    let simulation = Simulation::new(&Linear, &scheme(text), &settings).expect("is not refused");
    let trained = simulation.run(&mut drawn, &mut |_| {});
    let trained = trained.unwrap_or_else(|error| panic!("{world}: {error}"));
    assert!(trained.guarantee_held && trained.parameters_equal, "{world}");
    trained.parameters
}

/// Lines of four ranks: those that make a round may wait in other lines meanwhile.
#[test]
fn grids_of_side_4_end_whatever_share_of_a_line_opens_a_round() {
    for seed in 0..240 {
        let random = &mut Random::new(seed);
        let threshold = ["0.2", "0.25", "0.4", "0.5", "0.6", "0.75", "0.9"][random.index(7)];
        let (every, dimensions) = (1 + random.index(3), 1 + random.index(3));
        let ranks = [16, 16, 15, 13, 27][random.index(5)];
        let text = format!("bidmach:every={every},dimensions={dimensions},threshold={threshold}");
        end_of(&text, ranks, seed, random.clone());
    }
}

#[test]
fn ranks_of_a_grid_that_wait_for_whatever_round_is_next_wait_in_a_circle() {
    let waiting = |_, _, actions: Vec<Action>| {
        let without_limit = |action| match action {
            Action::Contribute { id, line, vector, .. } => {
                Action::Contribute { id, line, vector, limit: u64::MAX }
            }
            other => other,
        };
        actions.into_iter().map(without_limit).collect()
    };
    let text = "bidmach:threshold=0.75";
    let is_stuck = |seed: &u64| {
        let (settings, mut drawn, _) = world(text, 16, *seed, Random::new(*seed));
        // Ranks get apart step by step.
        let settings = Settings { steps: 400, learning_rate: 0.0, ..settings };
        let plan = |rank| {
            let mut plan = mutated(scheme(text).plan(&Linear.layout(), rank, 16), rank, waiting);
            // After so many rounds in a row a rank is waited for.
            plan.lines.iter_mut().for_each(|line| line.activation = line.activation.staleness_max(8));
            plan
        };
        let simulation = Simulation::of_plans(&Linear, &settings, plan).expect("there are ranks");
        simulation.run(&mut drawn, &mut |_| {}).is_err()
    };
    let stuck = (0..120).filter(is_stuck).count();
    assert!(stuck > 0, "no simulation of 120 has stopped");
}

#[test]
fn each_scheme_ends_with_what_it_guarantees_whatever_the_times() {
    let mut results: Vec<Vec<Option<Vec<f32>>>> = vec![vec![None; 10]; SCHEMES.len()];
    for seed in 0..SEEDS {
        let mut random = Random::new(seed);
        let (number, ranks) = (random.index(SCHEMES.len()), 1 + random.index(9));
        let (text, depends_on_times) = SCHEMES[number];
        let parameters = end_of(text, ranks as u32, seed, random);
        if !depends_on_times {
            let before = results[number][ranks].get_or_insert_with(|| parameters.clone());
            assert_eq!(*before, parameters, "seed {seed}: {text}, {ranks} ranks");
        }
    }
    let compared = results.iter().flatten().flatten().count();
    assert!(compared > 80, "only {compared} results of schemes that do not depend on times");
}

/// A simulation in a drawn world under these faults.
fn under(faults: &Faults, text: &str, ranks: u32, seed: u64) -> Result<Simulated, SimulationError> {
    let (settings, mut drawn, _) = world(text, ranks, seed, Random::new(seed));
    let simulation = Simulation::new(&Linear, &scheme(text), &settings).expect("is not refused");
    simulation.with_faults(faults).run(&mut drawn, &mut |_| {})
}

/// Faults after which all ranks go on.
const PASSING: [Fault; 6] =
    [Fault::Slow, Fault::Drift, Fault::Freeze, Fault::Delay, Fault::Reorder, Fault::LinkShrink];

#[test]
fn faults_that_pass_break_no_guarantee_and_change_no_bit_of_schemes_that_do_not_depend_on_times() {
    for (number, (text, depends_on_times)) in (0..).zip(SCHEMES) {
        for seed in 10 * number..10 * number + 10 {
            let random = &mut Random::new(seed ^ 0xfa);
            let drawn: Vec<Fault> = PASSING.into_iter().filter(|_| random.index(2) == 1).collect();
            let (faults, ranks) = (Faults::of(&drawn), 1 + random.index(9) as u32);
            let world = format!("seed {seed}: {text}, {ranks} ranks, {faults}");
            let run = |faults| under(faults, text, ranks, seed);
            let trained = run(&faults).unwrap_or_else(|error| panic!("{world}: {error}"));
            assert!(trained.guarantee_held && trained.parameters_equal && trained.has_ended, "{world}");
            assert_eq!(run(&faults).as_ref(), Ok(&trained), "{world}: the same seed, the same hash");
            let without = run(&Faults::default()).expect("trains without faults");
            // One rank waits for no link, and a short delay may be hidden.
            if drawn.contains(&Fault::Drift) || drawn.is_empty() {
                assert_eq!(drawn.is_empty(), without.hash == trained.hash, "{world}");
            }
            if !depends_on_times {
                assert_eq!(without.parameters, trained.parameters, "{world}");
            }
        }
    }
}

#[test]
fn when_a_rank_ends_the_others_make_all_their_steps_or_the_rank_is_named() {
    let faults = Faults::of(&[Fault::RankDeath]);
    for (number, (text, _)) in (0..).zip(SCHEMES) {
        let mut goes_on = 0;
        for seed in 40 * number..40 * number + 40 {
            let ranks = 2 + Random::new(seed).index(8) as u32;
            match under(&faults, text, ranks, seed) {
                Ok(trained) => {
                    let (lost, at) = trained.lost.expect("one has ended");
                    assert!(!trained.has_ended && trained.guarantee_held, "seed {seed}: {text}");
                    assert!(lost > 0 && lost < ranks && at < STEPS, "seed {seed}: {text}");
                    assert_eq!(trained.steps, STEPS, "seed {seed}: {text}");
                    goes_on += 1;
                }
                Err(SimulationError::Lost { lost, at, rank, step }) => {
                    assert!(lost != rank && at < STEPS && step <= STEPS, "seed {seed}: {text}");
                }
                Err(error) => panic!("seed {seed}: {text}, {ranks} ranks: {error}"),
            }
        }
        let nobody_waits = match text.split(':').next() {
            Some("asp" | "downpour") => true,
            Some("easgd" | "eamsgd") => !text.contains("mode="),
            Some("gossip") => !text.contains("push") || !text.contains("peer="),
            _ => false,
        };
        match text {
            _ if text.starts_with("sync") => assert_eq!(goes_on, 0, "{text}: all wait for each other"),
            "bidmach:dimensions=1,threshold=0.3,every=2" => assert_eq!(goes_on, 40, "{text}: few are enough"),
            _ if nobody_waits => assert_eq!(goes_on, 40, "{text}: nobody waits"),
            _ => assert!(goes_on < 40, "{text}: some wait"),
        }
    }
}

#[test]
fn a_rank_that_is_named_ends_before_its_step_and_rank_0_does_not() {
    let ending = |text: &str, rank, step| {
        let (settings, mut drawn, _) = world(text, 4, 7, Random::new(7));
        let simulation = Simulation::new(&Linear, &scheme(text), &settings).expect("is not refused");
        simulation.ending(rank, step)?.run(&mut drawn, &mut |_| {})
    };
    let trained = ending("gossip", 2, 3).expect("nobody waits for it");
    assert_eq!((trained.lost, trained.steps), (Some((2, 3)), STEPS));
    let named = ending("sync", 2, 3).expect_err("all wait for it");
    assert!(matches!(named, SimulationError::Lost { lost: 2, at: 3, .. }), "{named}");
    for rank in [0, 4] {
        let refused = ending("gossip", rank, 3).expect_err("it cannot end");
        assert_eq!(refused, SimulationError::NoDeath { rank, ranks: 4 });
    }
}

//! All schemes at once: many drawn worlds, each with links and computing times of its own.

use std::time::Duration;

use pleach_collectives::Rank;
use pleach_training::Simulation;
use pleach_training::simulation::{Network, Settings, TransferTime};
use pleach_vocabulary::random::Random;

use super::model::{Linear, scheme, settings};

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

#[test]
fn each_scheme_ends_with_what_it_guarantees_whatever_the_times() {
    let mut results: Vec<Vec<Option<Vec<f32>>>> = vec![vec![None; 10]; SCHEMES.len()];
    for seed in 0..SEEDS {
        let mut random = Random::new(seed);
        let (number, ranks) = (random.index(SCHEMES.len()), 1 + random.index(9));
        let (text, depends_on_times) = SCHEMES[number];
        let computing = COMPUTING[random.index(COMPUTING.len())];
        let scale = SCALES[random.index(SCALES.len())];
        let world = format!("seed {seed}: {text}, {ranks} ranks, {computing}, {scale} ns");
        let settings = Settings {
            seed,
            learning_rate: 0.001,
            computing: computing.parse().expect("is a text"),
            ..settings(ranks as u32)
        };
        let simulation = Simulation::new(&Linear, &scheme(text), &settings).expect("is not refused");
        let trained = simulation.run(&mut Drawn { random, scale }, &mut |_| {});
        let trained = trained.unwrap_or_else(|error| panic!("{world}: {error}"));
        assert!(trained.guarantee_held && trained.parameters_equal, "{world}");
        if !depends_on_times {
            let before = results[number][ranks].get_or_insert_with(|| trained.parameters.clone());
            assert_eq!(*before, trained.parameters, "{world}");
        }
    }
    let compared = results.iter().flatten().flatten().count();
    assert!(compared > 80, "only {compared} results of schemes that do not depend on times");
}

//! Trainings in virtual time: with exchanges at their price, and carried out by real engines.

#[path = "../src/cli/train/wires.rs"]
mod wires;

use std::sync::Arc;
use std::time::Duration;

use pleach::packing::topology;
use pleach::schedule::wiring::Wiring;
use pleach::Rank;
use pleach_training::simulation::{Faults, Settings, Simulated, SimulationError};
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

#[test]
fn measure() {
    for ranks in [2_u32, 4, 8, 16] {
        let links = format!("star:{ranks}@1");
        for bytes in [84_usize, 2000, 20_000, 200_000, 2_000_000] {
            let learner = Linear(vec![bytes / 4]);
            let [priced, over] = both(&learner, ("sync", &links), &settings(ranks, "1ms,cv=0"), &Faults::default()).map(|r| r.expect("trains"));
            let c = STEPS as f64 * 1e-3;
            let old = pleach::collectives::simulate::wired::choose(&wiring(&links), pleach::Collective::AllReduce, bytes, None).unwrap();
            let row = old.table.iter().find(|row| row.algorithm == old.algorithm).unwrap();
            eprintln!("{ranks} ranks {bytes} B: cheapest {} {:.1} us, in order {:.1} us, engines {:.1} us, equal {}", old.algorithm, row.seconds*1e6,
                (priced.time.as_secs_f64()-c)/STEPS as f64*1e6, (over.time.as_secs_f64()-c)/STEPS as f64*1e6, priced.parameters == over.parameters);
        }
    }
}

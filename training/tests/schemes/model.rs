//! A small model whose ranks have different data, and runs of it.

use std::ops::Range;
use std::time::Duration;

use pleach_collectives::Rank;
use pleach_training::interpreter::{Plan, Vectors};
use pleach_training::policy::Vector;
use pleach_training::simulation::{Settings, Simulated, Simulation, SimulationError};
use pleach_training::{Layout, Learner, PolicyError, Scheme};
use pleach_vocabulary::digest::{chain, hash_of_pair};
use pleach_vocabulary::random::Random;

/// Steps of a run: no multiple of the periods in the tests, so the last exchange is a short one.
pub(crate) const STEPS: u64 = 25;

/// A linear model with a squared loss; the data of a rank and step are drawn.
pub(crate) struct Linear;

const LAYERS: [usize; 3] = [11, 7, 3];
const BATCH: usize = 4;

fn number(random: &mut Random) -> f32 {
    (random.bits() >> 40) as f32 / (1_u64 << 23) as f32 - 1.0
}

impl Learner for Linear {
    fn layout(&self) -> Layout {
        Layout::of(&LAYERS)
    }

    fn initial(&self) -> Vec<f32> {
        let mut random = Random::new(1);
        (0..self.layout().parameters()).map(|_| number(&mut random)).collect()
    }

    fn gradient(&self, rank: Rank, step: u64, parameters: &[f32], gradient: &mut [f32]) -> f32 {
        let mut random = Random::new(chain(hash_of_pair(3, rank.into()), step));
        gradient.fill(0.0);
        let mut loss = 0.0;
        for _ in 0..BATCH {
            let input: Vec<f32> = parameters.iter().map(|_| number(&mut random)).collect();
            let wanted = number(&mut random) + rank as f32;
            let error = parameters.iter().zip(&input).map(|(x, a)| x * a).sum::<f32>() - wanted;
            loss += error * error / BATCH as f32;
            for (gradient, input) in gradient.iter_mut().zip(&input) {
                *gradient += 2.0 * error * input / BATCH as f32;
            }
        }
        loss
    }
}

pub(crate) fn scheme(text: &str) -> Scheme {
    text.parse().unwrap_or_else(|error| panic!("{text}: {error}"))
}

/// Plain gradient descent on that many ranks.
pub(crate) fn settings(ranks: u32) -> Settings {
    Settings {
        ranks,
        steps: STEPS,
        seed: 9,
        computing: "10ms,cv=0.3,spread=0.5".parse().expect("is a text"),
        learning_rate: 0.02,
        momentum: 0.0,
        observed_every: 1,
    }
}

/// A microsecond, and a nanosecond a byte.
pub(crate) fn price(bytes: u64) -> Duration {
    Duration::from_micros(1) + Duration::from_nanos(bytes)
}

pub(crate) fn simulate(text: &str, settings: &Settings) -> Simulated {
    let simulation = Simulation::new(&Linear, &scheme(text), settings).expect("there are ranks");
    simulation.run(&mut price, &mut |_| {}).unwrap_or_else(|error| panic!("{text}: {error}"))
}

pub(crate) fn simulate_plans(plan: impl Fn(Rank) -> Plan) -> Result<Simulated, SimulationError> {
    Simulation::of_plans(&Linear, &settings(4), plan)?.run(&mut price, &mut |_| {})
}

/// The largest difference between two vectors, as a share of the largest element.
pub(crate) fn difference(left: &[f32], right: &[f32]) -> f32 {
    assert_eq!(left.len(), right.len());
    let largest = left.iter().fold(f32::MIN_POSITIVE, |largest, element| largest.max(element.abs()));
    let differences = left.iter().zip(right).map(|(left, right)| (left - right).abs());
    differences.fold(0.0, |worst: f32, next| if next > worst || next.is_nan() { next } else { worst })
        / largest
}

/// Differences that come from rounding are smaller, and those of other rules larger.
pub(crate) const ROUNDING: f32 = 1e-5;

/// Vectors of a rank without a group.
pub(crate) struct Plain(Vec<Vec<f32>>);

impl Plain {
    /// All elements of all vectors have this value.
    pub(crate) fn of(value: f32, parameters: usize) -> Self {
        Self(vec![vec![value; parameters]; Vector::COUNT])
    }

    pub(crate) fn vector(&mut self, name: Vector) -> &mut [f32] {
        &mut self.0[name.index()]
    }
}

impl Vectors for Plain {
    fn pieces<const N: usize>(&mut self, names: [Vector; N], piece: &Range<usize>) -> [&mut [f32]; N] {
        let vectors = self.0.get_disjoint_mut(names.map(Vector::index)).expect("different vectors");
        vectors.map(|vector| &mut vector[piece.clone()])
    }

    fn step(&mut self, _: &Range<usize>) -> Result<(), PolicyError> {
        Err(PolicyError::NoOptimizer)
    }

    fn publish(&mut self, _: Vector, _: &Range<usize>, _: u64) {
        panic!("there is no window")
    }
}

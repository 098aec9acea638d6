//! Bounded staleness: SSP (Ho et al. 2013) and BAP (Li et al. 2016). Steps in a second, regret, and
//! the choice of a bound.

use std::fmt::Write as _;
use std::ops::ControlFlow;
use std::sync::Mutex;

use pleach::Rank;
use pleach_training::{Layout, Learner};
use pleach_vocabulary::digest::{chain, hash_of_pair};
use pleach_vocabulary::random::Random;

use super::world::{End, Links, Target, World, computing, in_steps};
use super::{Claim, Material, Verdict, head, median};

pub(crate) const THROUGHPUT: &str = "SSP, BAP: steps/s";
pub(crate) const REGRET: &str = "SSP: regret";
pub(crate) const SWEEP: &str = "BAP: choice of the bound";

fn world(ranks: u32, learning_rate: f32, seed: u64, end: End) -> Result<World, String> {
    let (computing, links) = (computing("10ms,cv=0.3")?, Links::default());
    Ok(World {
        ranks,
        computing,
        links,
        learning_rate,
        momentum: 0.0,
        seed,
        end,
        rate_falls: false,
        death: None,
    })
}

/// Steps of a rank where steps in a second are counted.
const STEPS: u64 = 200;

/// How many times quicker ranks are with a bound of 3.
const GAINS: std::ops::RangeInclusive<f64> = 1.2..=2.0;

/// Steps of equal workers in a second.
pub(crate) fn throughput(material: &Material) -> Result<Claim, String> {
    let mut table =
        head(&["ranks", "steps/s, s = 0", "s = 3", "s = 10", "`bap:distance=32`", "s = 3 over s = 0"]);
    let mut gains = Vec::new();
    for &ranks in material.some(&[4, 8, 16, 32], 0..1) {
        let world = world(ranks, 0.1, material.seeds()[0], End::Steps(STEPS))?;
        let speed = |text: &str| -> Result<f64, String> {
            let trained = world.train_all(material.digits(), text, material.seeds())?;
            Ok(STEPS as f64 / median(trained.iter().map(|trained| trained.simulated.time.as_secs_f64())))
        };
        let texts = ["ssp:staleness=0", "ssp", "ssp:staleness=10", "bap:distance=32"];
        let [bulk, bounded, lax, versions] = texts.map(speed);
        let (bulk, bounded, lax, versions) = (bulk?, bounded?, lax?, versions?);
        gains.push(bounded / bulk);
        let _ = writeln!(
            table,
            "| {ranks} | {bulk:.1} | {bounded:.1} | {lax:.1} | {versions:.1} | {:.2} |",
            bounded / bulk
        );
    }
    let (least, most) =
        (gains.iter().copied().fold(f64::INFINITY, f64::min), gains.iter().copied().fold(0.0, f64::max));
    Ok(Claim {
        name: THROUGHPUT,
        claim: "1.2 to 2 times as quick as bulk synchronous workers",
        experiment: format!("equal workers, cv 0.3, 4 to 32 ranks, {STEPS} steps, free links"),
        acceptance: "steps/s of s = 3 over s = 0 in 1.2…2",
        found: format!("{least:.2} to {most:.2}"),
        verdict: Verdict::of(
            GAINS.contains(&least) && GAINS.contains(&most),
            "an owner hears of a question when its own step has ended, and the papers' servers answer at once",
        ),
        table,
    })
}

/// Weights of the convex problem, its ranks, and steps of each.
const DIMENSIONS: usize = 10;
const RANKS: u32 = 8;
const ROUNDS: u64 = 2048;
/// Steps in the short form.
const FEW_ROUNDS: u64 = 512;

/// The least slope of the mean regret over the number of steps, both as logarithms.
const SLOPE: f64 = -0.4;

/// Logistic regression, one sample a step, whose steps become shorter with the root of their
/// number. Keeps the losses: regret is theirs over those of the best weights.
struct Logistic {
    seed: u64,
    rounds: u64,
    /// By step and rank.
    losses: Mutex<Vec<f64>>,
}

/// A sample: inputs, and whether it is of the class.
type Sample = ([f64; DIMENSIONS], bool);

fn uniform(random: &mut Random) -> f64 {
    (random.bits() >> 11) as f64 / (1_u64 << 53) as f64
}

fn sigmoid(score: f64) -> f64 {
    1.0 / (1.0 + libm::exp(-score))
}

fn score(weights: &[f64; DIMENSIONS], inputs: &[f64; DIMENSIONS]) -> f64 {
    weights.iter().zip(inputs).map(|(weight, input)| weight * input).sum()
}

/// The loss of a score, and its derivative.
fn loss(score: f64, is_of_class: bool) -> (f64, f64) {
    let probability = sigmoid(score);
    if is_of_class {
        (-libm::log(probability), probability - 1.0)
    } else {
        (-libm::log(1.0 - probability), probability)
    }
}

impl Logistic {
    fn new(seed: u64, rounds: u64) -> Self {
        Self { seed, rounds, losses: Mutex::new(vec![0.0; (rounds * u64::from(RANKS)) as usize]) }
    }

    /// Drawn by weights that fit no sample surely: 1, -1, 1 and so on.
    fn sample(&self, rank: Rank, step: u64) -> Sample {
        let mut random = Random::new(chain(hash_of_pair(self.seed, rank.into()), step));
        let inputs = std::array::from_fn(|_| 2.0 * uniform(&mut random) - 1.0);
        let truth = std::array::from_fn(|at| if at % 2 == 0 { 1.0 } else { -1.0 });
        (inputs, uniform(&mut random) < sigmoid(score(&truth, &inputs)))
    }

    fn place(rank: Rank, step: u64) -> usize {
        (step * u64::from(RANKS) + u64::from(rank)) as usize
    }

    /// The weights of the least loss over all samples, by steps of the inverse curvature's bound.
    fn best(&self) -> [f64; DIMENSIONS] {
        let samples: Vec<Sample> = (0..self.rounds)
            .flat_map(|step| (0..RANKS).map(move |rank| (rank, step)))
            .map(|(rank, step)| self.sample(rank, step))
            .collect();
        let mut weights = [0.0; DIMENSIONS];
        for _ in 0..400 {
            let mut gradient = [0.0; DIMENSIONS];
            for (inputs, is_of_class) in &samples {
                let (_, slope) = loss(score(&weights, inputs), *is_of_class);
                gradient.iter_mut().zip(inputs).for_each(|(sum, input)| *sum += slope * input);
            }
            // The curvature is at most a quarter of the largest eigenvalue of the inputs' mean
            // square, which is about a third.
            let rate = 8.0 / samples.len() as f64;
            weights.iter_mut().zip(gradient).for_each(|(weight, sum)| *weight -= rate * sum);
        }
        weights
    }

    /// The slope of the mean regret from 32 steps on, by least squares over logarithms.
    fn slope(&self) -> Option<f64> {
        let (best, losses) = (self.best(), self.losses.lock().ok()?);
        let (mut regret, mut points) = (0.0, Vec::new());
        for step in 0..self.rounds {
            for rank in 0..RANKS {
                let (inputs, is_of_class) = self.sample(rank, step);
                regret += losses[Self::place(rank, step)] - loss(score(&best, &inputs), is_of_class).0;
            }
            let rounds = step + 1;
            if rounds >= 32 && rounds.is_power_of_two() && regret > 0.0 {
                let mean = regret / (rounds * u64::from(RANKS)) as f64;
                points.push((libm::log(rounds as f64), libm::log(mean)));
            }
        }
        let count = points.len() as f64;
        let mean = |of: fn(&(f64, f64)) -> f64| points.iter().map(of).sum::<f64>() / count;
        let (x, y) = (mean(|point| point.0), mean(|point| point.1));
        let covariance: f64 = points.iter().map(|point| (point.0 - x) * (point.1 - y)).sum();
        let variance: f64 = points.iter().map(|point| (point.0 - x).powi(2)).sum();
        (points.len() >= 4).then(|| covariance / variance)
    }
}

impl Learner for Logistic {
    fn layout(&self) -> Layout {
        Layout::of(&[DIMENSIONS])
    }

    fn initial(&self) -> Vec<f32> {
        vec![0.0; DIMENSIONS]
    }

    fn gradient(&self, rank: Rank, step: u64, parameters: &[f32], gradient: &mut [f32]) -> f32 {
        let (inputs, is_of_class) = self.sample(rank, step);
        let weights = std::array::from_fn(|at| f64::from(parameters[at]));
        let (loss, slope) = loss(score(&weights, &inputs), is_of_class);
        self.losses.lock().expect("nobody panics")[Self::place(rank, step)] = loss;
        let rate = 1.0 / libm::sqrt((step + 1) as f64);
        gradient.iter_mut().zip(inputs).for_each(|(sum, input)| *sum = (rate * slope * input) as f32);
        loss as f32
    }
}

/// Mean regret of a convex problem.
pub(crate) fn regret(material: &Material) -> Result<Claim, String> {
    let mut table = head(&["scheme", "slope, median", "least", "most"]);
    let (mut medians, rounds) = (Vec::new(), material.steps(ROUNDS, FEW_ROUNDS));
    let texts = ["ssp:staleness=0", "ssp:staleness=3", "ssp:staleness=10", "bap:distance=32", "asp"];
    for &text in material.some(&texts, 0..2) {
        let mut slopes = Vec::new();
        for &seed in material.seeds() {
            let learner = Logistic::new(seed, rounds);
            // Updates are divided by the number of ranks.
            let world = world(RANKS, 2.0, seed, End::Steps(rounds))?;
            let ran = world.run(&learner, text, &mut |_| ControlFlow::Continue(()))?;
            ran.ok_or_else(|| format!("{text}: the loss became infinite"))?;
            slopes.push(learner.slope().ok_or_else(|| format!("{text}: no regret to speak of"))?);
        }
        slopes.sort_by(f64::total_cmp);
        let (least, most) = (slopes[0], slopes[slopes.len() - 1]);
        let middle = median(slopes);
        let _ = writeln!(table, "| `{text}` | {middle:.2} | {least:.2} | {most:.2} |");
        if text.starts_with("ssp") {
            medians.push(middle);
        }
    }
    let text: Vec<String> = medians.iter().map(|slope| format!("{slope:.2}")).collect();
    Ok(Claim {
        name: REGRET,
        claim: "with a bound on staleness the mean regret of a convex problem goes to 0 as 1/√T",
        experiment: format!(
            "logistic regression of {DIMENSIONS} weights, {RANKS} ranks, {rounds} steps of one sample, steps as 1/√t, cv 0.3"
        ),
        acceptance: "log-log slope ≤ −0.4 for s = 0, 3, 10",
        found: text.join(", "),
        verdict: Verdict::of(
            medians.iter().all(|slope| *slope <= SLOPE),
            "stale updates add up faster than steps become shorter",
        ),
        table,
    })
}

/// Bounds that are compared, the time of their comparison in steps, and the loss that counts.
const BOUNDS: [u64; 5] = [0, 1, 3, 10, 30];
const COMPARED_STEPS: f64 = 60.0;
const LOSS: f64 = 0.5;

/// How much longer than the quickest the chosen bound may take.
const CHOICE: f64 = 1.05;

/// Progress of an update times updates in a second, which `--sweep` compares, beside the time to a
/// loss.
pub(crate) fn sweep(material: &Material) -> Result<Claim, String> {
    let digits = material.digits();
    let before = digits.reading(&pleach_training::Learner::initial(&digits.reader(material.seeds()[0]))).loss;
    let mut table =
        head(&["bound", "progress an update", "updates/s", "progress/s", "steps' time to the loss"]);
    let mut rows = Vec::new();
    for &bound in material.some(&BOUNDS, 1..3) {
        let text = format!("ssp:staleness={bound}");
        let world = world(16, 0.3, material.seeds()[0], End::Time(COMPARED_STEPS))?;
        let trained = world.train_all(digits, &text, material.seeds())?;
        let updates = |steps: u64| steps as f64 * 16.0;
        let by_update =
            median(trained.iter().map(|trained| (before - trained.loss) / updates(trained.simulated.steps)));
        let in_a_second = median(
            trained
                .iter()
                .map(|trained| updates(trained.simulated.steps) / trained.simulated.time.as_secs_f64()),
        );
        let progress = median(
            trained.iter().map(|trained| (before - trained.loss) / trained.simulated.time.as_secs_f64()),
        );
        let mut times = Vec::new();
        for &seed in material.seeds() {
            let world = World { seed, end: End::Time(20.0 * COMPARED_STEPS), ..world };
            let trained = world.train(digits, &text, Some(Target::Loss(LOSS)))?;
            let trained = trained.ok_or_else(|| format!("{text}: the loss became infinite"))?;
            times.push(trained.target_steps.unwrap_or_else(|| in_steps(trained.simulated.time)));
        }
        let time = median(times);
        let _ =
            writeln!(table, "| {bound} | {by_update:.2e} | {in_a_second:.0} | {progress:.3} | {time:.1} |");
        rows.push((bound, progress, time));
    }
    let best = rows.iter().max_by(|a, b| a.1.total_cmp(&b.1)).ok_or("no bounds")?;
    let quickest = rows.iter().min_by(|a, b| a.2.total_cmp(&b.2)).ok_or("no bounds")?;
    Ok(Claim {
        name: SWEEP,
        claim: "the bound is chosen where progress of an update times updates in a second is most",
        experiment: format!(
            "digits, 16 equal ranks, cv 0.3, η = 0.3, `--sweep staleness=0,1,3,10,30` after {COMPARED_STEPS} steps' time, \
             beside the time to a test loss of {LOSS}"
        ),
        acceptance: "the choice is within 5 % of the quickest",
        found: format!(
            "chosen s = {}, {:.2} of the time of the quickest, s = {}",
            best.0,
            best.2 / quickest.2,
            quickest.0
        ),
        verdict: Verdict::of(
            best.2 <= CHOICE * quickest.2,
            "progress is compared at one time, and the loss is reached at others",
        ),
        table,
    })
}

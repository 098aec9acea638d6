//! Local SGD: each rank makes eight steps by itself, then parameters are averaged.
//!
//! `pleach run -n 4 -- cargo run --release --example local_sgd [SCHEME]`
//!
//! Each rank has points of its own, and all learn one line through the points of all. SCHEME is any
//! other scheme whose ranks train models of their own, as `diloco:every=10` or
//! `local-sgd:every=8,warmup=50`.

use pleach::{Group, Options, Rank};
use pleach_training::{Layout, Sgd, Trainer};
use pleach_vocabulary::random::Random;

type Failure = Box<dyn std::error::Error>;

const STEPS: u64 = 400;
const LEARNING_RATE: f32 = 0.2;
/// Points of a rank.
const POINTS: usize = 64;
/// The line through the points of all ranks.
const SLOPE: f32 = 2.0;
const INTERCEPT: f32 = -1.0;

fn main() -> Result<(), Failure> {
    let scheme = std::env::args().nth(1).unwrap_or_else(|| "local-sgd:every=8".to_owned());
    let group = Group::join(&Options::from_env()?)?;
    let (rank, ranks) = (group.rank(), group.world_size());
    let points = points(rank, ranks);

    let layout = Layout::of(&[1, 1]);
    let mut sgd = Sgd::new(layout.parameters(), LEARNING_RATE, 0.0);
    let mut trainer = Trainer::new(&group, &scheme.parse()?, &layout, STEPS)?;
    trainer.parameters_mut().fill(0.0);
    let mut first = None;
    while let Some(mut step) = trainer.step()? {
        let (parameters, gradient) = step.vectors()?;
        let loss = mean_square(parameters, &points, gradient);
        first.get_or_insert(loss);
        step.update(|parameters, gradient| sgd.step(parameters, gradient), loss)?;
    }
    let trained = trainer.finish()?;

    let [slope, intercept] = [trained.parameters[0], trained.parameters[1]];
    let last = mean_square(&trained.parameters, &points, &mut [0.0; 2]);
    assert!(trained.guarantee_held && trained.parameters_equal, "{scheme} keeps what it guarantees");
    assert!((slope - SLOPE).abs() < 0.1 && (intercept - INTERCEPT).abs() < 0.1, "{slope} {intercept}");
    if rank == 0 {
        println!(
            "{ranks} ranks by {scheme}: the loss of rank 0 went from {:.3} to {last:.3}; the line is {slope:.2} x + {intercept:.2}, \
             after {} exchanges of all ranks",
            first.unwrap_or_default(),
            trained.progress.agreements
        );
    }
    Ok(group.close()?)
}

/// Points of a rank: above the line on even ranks, and as far below it on odd ones. So no rank
/// finds the line alone.
fn points(rank: Rank, ranks: u32) -> Vec<[f32; 2]> {
    let mut random = Random::new(7);
    let off = match (ranks % 2, rank % 2) {
        (1, _) => 0.0,
        (_, 0) => 0.5,
        _ => -0.5,
    };
    (0..POINTS)
        .map(|_| {
            let x = random.index(1 << 16) as f32 / 32768.0 - 1.0;
            [x, SLOPE * x + INTERCEPT + off]
        })
        .collect()
}

/// The mean square of what a line is wrong by; stores half of its gradient.
fn mean_square(line: &[f32], points: &[[f32; 2]], gradient: &mut [f32]) -> f32 {
    gradient.fill(0.0);
    let mut sum = 0.0;
    for [x, y] in points {
        let error = line[0] * x + line[1] - y;
        sum += error * error;
        gradient[0] += error * x / points.len() as f32;
        gradient[1] += error / points.len() as f32;
    }
    sum / points.len() as f32
}

//! BIDMach's loop on fixed members (Peng, UCB/EECS-2018-77): ranks in a grid train models of their
//! own, and average them elastically along the lines of the grid, without waiting for laggards.
//!
//! `pleach run -n 4 -- cargo run --release --example bidmach`
//!
//! After each step of its own a rank meets the ranks of its line along one dimension, the
//! dimensions in turn: `w = (1 - a) w + a * average`. A round opens when a share of the line is
//! there, so no operation has more than `n^(1/d)` ranks, rounded up, and a slow rank holds nobody
//! up.

use std::time::Duration;

use pleach::partial::{Activation, Divisor, Late, Partial};
use pleach::{Group, Options, Rank, ReduceOp};

type Failure = Box<dyn std::error::Error>;

const PARAMETERS: usize = 256;
const STEPS: usize = 100;
/// The elastic rate `a`, the share of a line that opens a round, and the learning rate.
const ELASTIC_RATE: f32 = 0.3;
const THRESHOLD: f64 = 0.75;
const LEARNING_RATE: f32 = 0.2;

fn main() -> Result<(), Failure> {
    let group = Group::join(&Options::from_env()?)?;
    let extents = grid(group.world_size());
    let mut lines: Vec<(Group, Partial<f32>)> = Vec::new();
    for dimension in 0..extents.len() {
        let line = group.line(&extents, dimension)?;
        let activation = Activation::laggard_resistant(THRESHOLD, line.world_size());
        let activation = activation.late(Late::Drop).divisor(Divisor::Contributors);
        let rounds = line.partial(PARAMETERS, activation)?;
        lines.push((line, rounds));
    }
    let longest = extents.iter().max().copied().unwrap_or(1);
    let mut model = vec![group.rank() as f32; PARAMETERS];
    for step in 0..STEPS {
        // A quadratic with its minimum at 1, of which each rank sees another part.
        for (index, parameter) in model.iter_mut().enumerate() {
            if index % group.world_size() as usize == group.rank() as usize {
                *parameter -= LEARNING_RATE * (*parameter - 1.0);
            }
        }
        compute(group.rank(), step);
        let dimension = step % lines.len();
        let (line, rounds) = &mut lines[dimension];
        rounds.contribution().copy_from_slice(&model);
        let round = rounds.contribute()?;
        assert!(round.contributors().len() <= longest && line.world_size() <= longest);
        for (parameter, average) in model.iter_mut().zip(round.result()) {
            *parameter += ELASTIC_RATE * (average - *parameter);
        }
    }
    for (_, rounds) in &mut lines {
        rounds.finish()?;
    }
    let worst = model.iter().fold(0.0, |worst: f32, parameter| worst.max((parameter - 1.0).abs()));
    let mut spread = [worst];
    group.all_reduce(&mut spread[..], ReduceOp::Max)?;
    if group.rank() == 0 {
        println!("grid {extents:?}: every parameter of every rank is within {:.4} of the minimum", spread[0]);
    }
    // Rank `r` began with all parameters at `r`.
    let began = group.world_size().max(2) as f32 - 1.0;
    assert!(spread[0] < 0.5 * began, "the models have not come together");
    Ok(group.close()?)
}

/// Two extents that are as near to each other as they can be.
fn grid(ranks: u32) -> [u32; 2] {
    let rows =
        (1..=ranks).take_while(|rows| rows * rows <= ranks).filter(|rows| ranks.is_multiple_of(*rows)).last();
    let rows = rows.unwrap_or(1);
    [rows, ranks / rows]
}

/// Rank 1 is a laggard.
#[expect(clippy::disallowed_methods, reason = "a rank that computes")]
fn compute(rank: Rank, step: usize) {
    let late = if rank == 1 && step.is_multiple_of(4) { 4 } else { 1 };
    std::thread::sleep(Duration::from_millis(late));
}

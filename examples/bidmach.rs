//! BIDMach's training (Peng, UCB/EECS-2018-77) on fixed members: ranks in a grid train models of
//! their own, and average them elastically along the lines of the grid, without waiting for
//! laggards.
//!
//! `pleach run -n 7 -- cargo run --release --example bidmach`
//!
//! The scheme `bidmach` is the loop: after each step a rank meets the ranks of its line in one
//! dimension, the dimensions in turn: `w = (1 - a) w + a * average`. A round opens when a share of
//! the line is there, so no exchange has more than `n^(1/d)` ranks, rounded up, and a slow rank
//! holds nobody up. Any number of ranks makes a grid: seven take seven places of 3 × 3.

use std::time::Duration;

use pleach::{Group, Options, Rank, RankSpace};
use pleach_training::{Layout, Trainer};

type Failure = Box<dyn std::error::Error>;

const SCHEME: &str = "bidmach:rate=0.3,dimensions=2,threshold=0.75";
const DIMENSIONS: u32 = 2;
const PARAMETERS: usize = 256;
const STEPS: u64 = 100;
const LEARNING_RATE: f32 = 0.2;
/// All parameters of all ranks begin there.
const BEGIN: f32 = 4.0;

fn main() -> Result<(), Failure> {
    let group = Group::join(&Options::from_env()?)?;
    let (rank, ranks) = (group.rank() as usize, group.world_size() as usize);
    let mut trainer = Trainer::new(&group, &SCHEME.parse()?, &Layout::of(&[PARAMETERS]), STEPS)?;
    trainer.parameters_mut().fill(BEGIN);
    while let Some(mut step) = trainer.step()? {
        let number = step.number();
        let (parameters, gradient) = step.vectors()?;
        // A quadratic with its minimum at 1, of which each rank sees another part.
        for (index, (slope, parameter)) in gradient.iter_mut().zip(parameters).enumerate() {
            *slope = if index % ranks == rank { parameter - 1.0 } else { 0.0 };
        }
        let loss = gradient.iter().map(|slope| slope * slope / 2.0).sum();
        compute(group.rank(), number);
        let descend = |parameters: &mut [f32], gradient: &[f32]| {
            parameters.iter_mut().zip(gradient).for_each(|(x, slope)| *x -= LEARNING_RATE * slope);
        };
        step.update(descend, loss)?;
    }
    let trained = trainer.finish()?;
    let far = |worst: f32, parameter: &f32| worst.max((parameter - 1.0).abs());
    let worst = trained.parameters.iter().fold(0.0, far);
    assert!(trained.guarantee_held && trained.parameters_equal, "{SCHEME} keeps what it guarantees");
    assert!(worst < 0.5 * (BEGIN - 1.0), "the models have not come together");
    // What the scheme guarantees, counted in each exchange: no more ranks than the longest line.
    let grid = RankSpace::balanced(group.world_size(), DIMENSIONS);
    let lines = (0..grid.extents().len()).map(|dimension| grid.line(group.rank(), dimension).count());
    let longest = lines.max().unwrap_or(1);
    assert!((longest as f64 - 1.0).powf(f64::from(DIMENSIONS)) < ranks as f64, "{longest} of {ranks} ranks");
    if rank == 0 {
        let extents = grid.extents();
        println!(
            "{SCHEME}: {ranks} ranks in a grid of {extents:?}, no exchange with more than {longest} ranks; \
             every parameter of every rank is within {worst:.4} of the minimum"
        );
    }
    Ok(group.close()?)
}

/// Rank 1 is a laggard.
#[expect(clippy::disallowed_methods, reason = "a rank that computes")]
fn compute(rank: Rank, step: u64) {
    let late = if rank == 1 && step.is_multiple_of(4) { 4 } else { 1 };
    std::thread::sleep(Duration::from_millis(late));
}

//! Gossip: after each step a rank reads the parameters of another rank and takes the mean of both.
//! No rank waits for a slower one.
//!
//! `pleach run -n 4 -- cargo run --release --example gossip [SCHEME]`
//!
//! The last rank is slow. SCHEME is any other scheme, as `easgd:every=5` or, to see what waiting
//! for the slow rank costs, `sync`.

use std::time::Duration;

use pleach::{Group, Options};
use pleach_training::{Layout, Sgd, Trainer};

type Failure = Box<dyn std::error::Error>;

const PARAMETERS: usize = 256;
const STEPS: u64 = 100;
const LEARNING_RATE: f32 = 0.2;

fn main() -> Result<(), Failure> {
    let scheme = std::env::args().nth(1).unwrap_or_else(|| "gossip:direction=pull".to_owned());
    let group = Group::join(&Options::from_env()?)?;
    let (rank, ranks) = (group.rank(), group.world_size());

    let layout = Layout::of(&[PARAMETERS]);
    let mut sgd = Sgd::new(PARAMETERS, LEARNING_RATE, 0.0);
    let mut trainer = Trainer::new(&group, &scheme.parse()?, &layout, STEPS)?;
    trainer.parameters_mut().fill(4.0);
    while let Some(mut step) = trainer.step()? {
        let (parameters, gradient) = step.vectors()?;
        // A quadratic with its minimum at 1, of which each rank sees another part.
        for (index, (slope, parameter)) in gradient.iter_mut().zip(parameters).enumerate() {
            let is_seen = index % ranks as usize == rank as usize;
            *slope = if is_seen { parameter - 1.0 } else { 0.0 };
        }
        let loss = gradient.iter().map(|slope| slope * slope / 2.0).sum();
        compute(rank + 1 == ranks);
        step.update(|parameters, gradient| sgd.step(parameters, gradient), loss)?;
    }
    let trained = trainer.finish()?;

    let far = |worst: f32, parameter: &f32| worst.max((parameter - 1.0).abs());
    let worst = trained.parameters.iter().fold(0.0, far);
    assert!(trained.guarantee_held && trained.parameters_equal, "{scheme} keeps what it guarantees");
    assert!(worst < 1.5, "the models have not come together: {worst}");
    println!(
        "rank {rank} of {ranks} by {scheme}: within {worst:.3} of the minimum, waited {:.0} % of the time",
        100.0 * trained.progress.waiting.as_secs_f64() / trained.progress.time.as_secs_f64()
    );
    Ok(group.close()?)
}

/// What the gradient would take.
#[expect(clippy::disallowed_methods, reason = "a rank that computes")]
fn compute(is_slow: bool) {
    std::thread::sleep(Duration::from_millis(if is_slow { 3 } else { 1 }));
}

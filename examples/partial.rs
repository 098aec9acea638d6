//! The code of docs/partial.md, run: a training loop that does not wait for late ranks.
//!
//! `pleach run -n 4 -- cargo run --release --example partial`

use std::time::Duration;

use pleach::partial::{Activation, Divisor, Late};
use pleach::{Group, Options, ReduceOp};

type Failure = Box<dyn std::error::Error>;

const PARAMETERS: usize = 1 << 10;
const STEPS: u64 = 20;

fn main() -> Result<(), Failure> {
    let group = Group::join(&Options::from_env()?)?;
    // Three quarters of the ranks open a round; the rest is carried to the next one.
    let quorum = (group.world_size() * 3).div_ceil(4);
    let activation = Activation::quorum(quorum).late(Late::Carry).divisor(Divisor::Contributors);
    let mut rounds = group.partial::<f32>(PARAMETERS, activation)?;
    let mut parameters = vec![0.0f32; PARAMETERS];
    for step in 0..STEPS {
        backward(&group, step, rounds.contribution());
        let round = rounds.contribute()?;
        for (parameter, gradient) in parameters.iter_mut().zip(round.result()) {
            *parameter -= 0.1 * gradient;
        }
    }
    let report = rounds.report()?;
    rounds.finish()?; // takes part in rounds until all ranks are here
    // Ranks that missed a result have other parameters: an all-reduce makes them one again.
    group.all_reduce(&mut parameters[..], ReduceOp::Avg)?;
    println!("rank {}: {report:?}", group.rank());
    Ok(group.close()?)
}

/// Stores this rank's gradients; one rank is late in each step.
#[expect(clippy::disallowed_methods, reason = "a rank that computes")]
fn backward(group: &Group, step: u64, gradients: &mut [f32]) {
    if step % u64::from(group.world_size()) == u64::from(group.rank()) {
        std::thread::sleep(Duration::from_millis(2));
    }
    gradients.fill(1.0);
}

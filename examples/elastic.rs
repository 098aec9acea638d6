//! A job that outlives its processes: four ranks descend together, one ends in the middle of a
//! step, and the others go on with that step.
//!
//! `cargo run --release --example elastic`
//!
//! The program starts itself as the four ranks. Each step adds one to every weight, whoever
//! contributes, so the weights at the end count the steps: each counted once.

use std::process::{Child, Command, exit};

use pleach::session::{Elastic, Seat, Session, Verdict};
use pleach::{Options, ReduceOp};

type Failure = Box<dyn std::error::Error>;

const RANKS: usize = 4;
const PARAMETERS: usize = 1 << 16;
const STEPS: u64 = 100;
/// The rank that ends, and its last step.
const ENDS: (Seat, u64) = (Seat(2), 40);

fn main() -> Result<(), Failure> {
    if std::env::var_os("PLEACH_RANK").is_some() { train() } else { start() }
}

/// Starts the ranks, and waits for all of them.
fn start() -> Result<(), Failure> {
    let folder = std::env::temp_dir().join(format!("pleach-elastic-{}", std::process::id()));
    std::fs::create_dir(&folder)?;
    let start = |rank: usize| {
        let mut command = Command::new(std::env::current_exe()?);
        command.env("PLEACH_RANK", rank.to_string()).env("PLEACH_WORLD_SIZE", RANKS.to_string());
        command.env("PLEACH_RENDEZVOUS", format!("file://{}", folder.display())).spawn()
    };
    let ranks: Vec<Child> = (0..RANKS).map(start).collect::<Result<_, _>>()?;
    let ended = ranks.into_iter().map(|mut rank| rank.wait()).collect::<Result<Vec<_>, _>>();
    std::fs::remove_dir_all(&folder)?;
    let trained = ended?.into_iter().filter(|status| status.success()).count();
    assert_eq!(trained, RANKS - 1, "all but one rank train to the end");
    Ok(())
}

/// One rank.
fn train() -> Result<(), Failure> {
    let mut session = Session::join(&Options::from_env()?, &Elastic::between(2, 8))?;
    let mut weights = session.state::<f32>("weights", PARAMETERS)?;
    let mut gradient = session.buffer::<f32>(PARAMETERS)?;
    while session.step() < STEPS {
        let seat = session.seat();
        let verdict = session.attempt(|group, step| {
            gradient.fill(1.0);
            if (seat, step) == ENDS {
                exit(1); // The others wait for its gradient by now.
            }
            group.all_reduce(&mut gradient, ReduceOp::Avg)
        })?;
        match verdict {
            Verdict::Committed => weights.update(|weights| {
                weights.iter_mut().zip(&*gradient).for_each(|(weight, slope)| *weight += slope);
            }),
            Verdict::Retry(change) => println!("{}: {change}", session.seat()),
        }
    }
    assert!(weights.iter().all(|weight| *weight == STEPS as f32), "each step counts once");
    Ok(session.leave()?)
}

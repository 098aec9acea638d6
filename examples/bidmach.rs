//! BIDMach's training (Peng, UCB/EECS-2018-77): ranks in a grid train models of their own, and
//! average them elastically along the lines of the grid.
//!
//! The scheme `bidmach` is the loop: after each step a rank meets the ranks of its line in one
//! dimension, the dimensions in turn: `w = (1 - a) w + a * average`. So no exchange has more than
//! `n^(1/d)` ranks, rounded up. Any number of ranks makes a grid: seven take seven places of 3 × 3.
//!
//! `cargo run --release --example bidmach`
//!
//! starts itself as seven ranks in a session, of which one ends in the middle of a step. The other
//! six go on in a grid of 2 × 3.
//!
//! `pleach run -n 7 -- cargo run --release --example bidmach`
//!
//! has fixed members. There a round opens when a share of the line is there, so a slow rank holds
//! nobody up.

use std::path::PathBuf;
use std::process::{Child, Command, exit};
use std::time::Duration;

use pleach::session::{Elastic, Seat, Session};
use pleach::{Group, Options, Rank, RankSpace};
use pleach_training::{Layout, Trained, Trainer};

type Failure = Box<dyn std::error::Error>;

/// With fixed members, and in a session, where an exchange counts on all or on none.
const SCHEMES: [&str; 2] = ["bidmach:rate=0.3,dimensions=2,threshold=0.75", "bidmach:rate=0.3,dimensions=2"];
const DIMENSIONS: u32 = 2;
const PARAMETERS: usize = 256;
const STEPS: u64 = 100;
const LEARNING_RATE: f32 = 0.2;
/// All parameters of all ranks begin there.
const BEGIN: f32 = 4.0;
/// What the program says to itself.
const MEMBER: &str = "member";
const MEMBERS: usize = 7;
/// The member that ends, and its last step.
const ENDS: (Seat, u64) = (Seat(3), 40);

fn main() -> Result<(), Failure> {
    let is_member = std::env::args().nth(1).as_deref() == Some(MEMBER);
    if !is_member && std::env::var_os("PLEACH_RANK").is_none() {
        return start();
    }
    let options = Options::from_env()?;
    let (layout, [fixed, elastic]) = (Layout::of(&[PARAMETERS]), SCHEMES);
    if is_member {
        let session = Session::join(&options, &Elastic::between(2, MEMBERS as u32))?;
        let trainer = Trainer::in_session(session, &elastic.parse()?, &layout, STEPS)?;
        return expect_together(elastic, &train(trainer)?);
    }
    let group = Group::join(&options)?;
    let trainer = Trainer::new(&group, &fixed.parse()?, &layout, STEPS)?;
    expect_together(fixed, &train(trainer)?)?;
    Ok(group.close()?)
}

/// Starts the members, and waits for all of them.
fn start() -> Result<(), Failure> {
    let folder = std::env::temp_dir().join(format!("pleach-bidmach-{}", std::process::id()));
    std::fs::create_dir(&folder)?;
    let mut members = Members { folder, ranks: Vec::new() };
    for rank in 0..MEMBERS {
        let mut command = Command::new(std::env::current_exe()?);
        command.arg(MEMBER).env("PLEACH_RANK", rank.to_string());
        command.env("PLEACH_WORLD_SIZE", MEMBERS.to_string());
        command.env("PLEACH_RENDEZVOUS", format!("file://{}", members.folder.display()));
        members.ranks.push(command.spawn()?);
    }
    let mut trained = 0;
    for rank in &mut members.ranks {
        trained += usize::from(rank.wait()?.success());
    }
    assert_eq!(trained, MEMBERS - 1, "all but one train to the end");
    Ok(())
}

/// The members that were started, and the folder where they meet. None outlives the value.
struct Members {
    folder: PathBuf,
    ranks: Vec<Child>,
}

impl Drop for Members {
    fn drop(&mut self) {
        for rank in &mut self.ranks {
            // It may have ended.
            let _ = rank.kill();
            let _ = rank.wait();
        }
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

/// One rank.
fn train(mut trainer: Trainer) -> Result<Trained, Failure> {
    trainer.parameters_mut().fill(BEGIN);
    while let Some(mut step) = trainer.step()? {
        let (number, (rank, ranks)) = (step.number(), step.members());
        let seat = step.session().map(Session::seat);
        let (parameters, gradient) = step.vectors()?;
        // A quadratic with its minimum at 1, of which each rank sees another part.
        for (index, (slope, parameter)) in gradient.iter_mut().zip(parameters).enumerate() {
            let is_own = index % ranks as usize == rank as usize;
            *slope = if is_own { parameter - 1.0 } else { 0.0 };
        }
        let loss = gradient.iter().map(|slope| slope * slope / 2.0).sum();
        compute(rank, number);
        if seat.is_some_and(|seat| (seat, number) == ENDS) {
            exit(1); // The others wait for it in its lines by now.
        }
        let descend = |parameters: &mut [f32], gradient: &[f32]| {
            parameters.iter_mut().zip(gradient).for_each(|(x, slope)| *x -= LEARNING_RATE * slope);
        };
        step.update(descend, loss)?;
    }
    Ok(trainer.finish()?)
}

fn expect_together(scheme: &str, trained: &Trained) -> Result<(), Failure> {
    let far = |worst: f32, parameter: &f32| worst.max((parameter - 1.0).abs());
    let worst = trained.parameters.iter().fold(0.0, far);
    assert!(trained.guarantee_held && trained.parameters_equal, "{scheme} keeps what it guarantees");
    assert!(worst < 0.5 * (BEGIN - 1.0), "the models have not come together");
    // What the scheme guarantees: no exchange has more ranks than the longest line.
    let (rank, ranks) = (trained.rank, trained.ranks);
    let grid = RankSpace::balanced(ranks, DIMENSIONS);
    let lines = (0..grid.extents().len()).map(|dimension| grid.line(rank, dimension).count());
    let longest = lines.max().unwrap_or(1);
    assert!(
        (longest as f64 - 1.0).powf(f64::from(DIMENSIONS)) < f64::from(ranks),
        "{longest} of {ranks} ranks"
    );
    if rank == 0 {
        let extents = grid.extents();
        println!(
            "{scheme}: {ranks} ranks in a grid of {extents:?}, no exchange with more than {longest} ranks; \
             every parameter of every rank is within {worst:.4} of the minimum"
        );
    }
    Ok(())
}

/// Rank 1 is a laggard.
#[expect(clippy::disallowed_methods, reason = "a rank that computes")]
fn compute(rank: Rank, step: u64) {
    let late = if rank == 1 && step.is_multiple_of(4) { 4 } else { 1 };
    std::thread::sleep(Duration::from_millis(late));
}

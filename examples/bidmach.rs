//! BIDMach's training (Peng, UCB/EECS-2018-77): ranks in a grid train models of their own, and
//! average them elastically along the lines of the grid.
//!
//! The scheme `bidmach` is the loop: after each step a rank meets the ranks of its line in one
//! dimension, the dimensions in turn: `w = (1 - a) w + a * average`. So no exchange before the end
//! has more than `n^(1/d)` ranks, rounded up: each rank counts that. At the end the models of all
//! ranks are averaged. Any number of ranks makes a grid: seven take seven places of 3 × 3.
//!
//! `cargo run --release --example bidmach`
//!
//! starts itself as seven ranks in a session, of which one ends in the middle of a step. The other
//! six go on in a grid of 2 × 3.
//!
//! `pleach run -n 7 -- cargo run --release --example bidmach`
//!
//! has fixed members. There a round opens when a share of the line is there, 0.6 of its ranks
//! rounded up: two of three. So a slow rank in a line of three holds nobody up.

use std::path::PathBuf;
use std::process::{Child, Command, exit};
use std::time::Duration;

use pleach::session::{Elastic, Seat, Session};
use pleach::{Group, Options, Rank, RankSpace};
use pleach_training::{Layout, Trained, Trainer};

type Failure = Box<dyn std::error::Error>;

/// With fixed members, and in a session, where an exchange counts on all or on none.
const SCHEMES: [&str; 2] = ["bidmach:rate=0.3,dimensions=2,threshold=0.6", "bidmach:rate=0.3,dimensions=2"];
const DIMENSIONS: u32 = 2;
const PARAMETERS: usize = 256;
const STEPS: u64 = 200;
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
        let (trained, most) = train(trainer)?;
        return expect_together(elastic, &trained, most);
    }
    let group = Group::join(&options)?;
    let trainer = Trainer::new(&group, &fixed.parse()?, &layout, STEPS)?;
    let (trained, most) = train(trainer)?;
    expect_together(fixed, &trained, most)?;
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

/// One rank. Also gives the most ranks that there were in a step.
fn train(mut trainer: Trainer) -> Result<(Trained, u32), Failure> {
    let mut most = 0;
    trainer.parameters_mut().fill(BEGIN);
    while let Some(mut step) = trainer.step()? {
        let (number, (rank, ranks)) = (step.number(), step.members());
        most = most.max(ranks);
        let seat = step.session().map(Session::seat);
        let (parameters, gradient) = step.vectors()?;
        // A quadratic with its minimum at 1, of which each rank sees another part.
        for (index, (slope, parameter)) in gradient.iter_mut().zip(parameters).enumerate() {
            let is_own = index % ranks as usize == rank as usize;
            *slope = if is_own { parameter - 1.0 } else { 0.0 };
        }
        let loss = gradient.iter().map(|slope| slope * slope / 2.0).sum();
        compute(rank, ranks, number);
        if seat.is_some_and(|seat| (seat, number) == ENDS) {
            exit(1); // The others wait for it in its lines by now.
        }
        let descend = |parameters: &mut [f32], gradient: &[f32]| {
            parameters.iter_mut().zip(gradient).for_each(|(x, slope)| *x -= LEARNING_RATE * slope);
        };
        step.update(descend, loss)?;
    }
    Ok((trainer.finish()?, most))
}

/// The least side of a grid of so many dimensions that has room for the ranks.
fn side(ranks: u32) -> u32 {
    (1..=ranks).find(|side: &u32| side.pow(DIMENSIONS) >= ranks).unwrap_or(1)
}

/// Expects what the scheme promises of a training of at most `most` ranks.
fn expect_together(scheme: &str, trained: &Trained, most: u32) -> Result<(), Failure> {
    let far = |worst: f32, parameter: &f32| worst.max((parameter - 1.0).abs());
    let worst = trained.parameters.iter().fold(0.0, far);
    assert!(trained.guarantee_held && trained.parameters_equal, "{scheme} keeps what it guarantees");
    assert!(worst < 0.5 * (BEGIN - 1.0), "the models have not come together: {worst} from the minimum");
    // What this rank took part in before the end, as counted where it was carried out.
    let (ranks, widest) = (trained.ranks, trained.progress.exchange_ranks_max);
    assert!((2..=side(most)).contains(&widest), "an exchange had {widest} of {most} ranks");
    if trained.rank == 0 {
        let grid = RankSpace::balanced(ranks, DIMENSIONS);
        let extents = grid.extents();
        println!(
            "{scheme}: {ranks} ranks in a grid of {extents:?}, no exchange before the end with more than \
             {widest} ranks; every parameter of every rank is within {worst:.4} of the minimum"
        );
    }
    Ok(())
}

/// The ranks are laggards in turn. One that always was would be in no round.
#[expect(clippy::disallowed_methods, reason = "a rank that computes")]
fn compute(rank: Rank, ranks: u32, step: u64) {
    let late = if step % u64::from(ranks) == u64::from(rank) { 4 } else { 1 };
    std::thread::sleep(Duration::from_millis(late));
}

//! Jin et al., "How to scale distributed deep learning?" (2016): where asynchronous ranks are
//! better, and ranks that lag.

use std::fmt::Write as _;

use super::images::Data;
use super::world::{End, Links, World, computing, in_steps};
use super::{Claim, Material, Verdict, head, median};

pub(crate) const CROSSING: &str = "Jin: crossing";
pub(crate) const LOST: &str = "Jin: a rank that stands still or ends";

const RANKS: [u32; 6] = [4, 8, 16, 32, 64, 128];
const SCHEMES: [&str; 3] = ["sync", "gossip", "easgd:every=1"];
const RATES: [f32; 4] = [0.5, 1.0, 1.6, 2.2];

/// Steps' time of a training.
const TIME: f64 = 220.0;

/// What an exchange takes, in steps: between two ranks, and a doubling of ranks of an all-reduce.
const EXCHANGE_STEPS: f64 = 0.03;

/// How much more the test loss of asynchronous ranks may be, where they are to be better.
const TOLERANCE: f64 = 1.01;

fn world(mnist: &Data, ranks: u32, times: &str, seed: u64) -> Result<World, String> {
    let links = Links {
        all_reduce_steps: EXCHANGE_STEPS * f64::from(ranks).log2(),
        transfer_steps: EXCHANGE_STEPS,
        bytes: mnist.parameter_bytes(),
    };
    let (computing, end) = (computing(times)?, End::Time(TIME));
    Ok(World {
        ranks,
        computing,
        links,
        learning_rate: 1.0,
        momentum: 0.0,
        seed,
        end,
        rate_falls: false,
        death: None,
    })
}

/// Test losses after equal time, of each of [`SCHEMES`], with the learning rates.
fn after_equal_time(
    material: &Material,
    mnist: &Data,
    ranks: u32,
    times: &str,
) -> Result<([f64; 3], [f32; 3]), String> {
    let seeds = material.seeds();
    let (mut losses, mut rates) = ([0.0; 3], [0.0; 3]);
    for ((text, loss), rate) in SCHEMES.iter().zip(&mut losses).zip(&mut rates) {
        let world = world(mnist, ranks, times, seeds[0])?;
        *rate = world.best_rate(mnist, text, material.some(&RATES, 0..1))?;
        let trained = World { learning_rate: *rate, ..world }.train_all(mnist, text, seeds)?;
        *loss = median(trained.iter().map(|trained| trained.loss));
    }
    Ok((losses, rates))
}

/// Asynchronous beside synchronous ranks.
pub(crate) fn crossing(material: &Material) -> Result<Claim, String> {
    let claim = "asynchronous ranks are better up to about 32, synchronous ones at about 100";
    let acceptance = "test loss after equal time, cv 0.1: the better of gossip and EASGD ≤ 1.01 × sync at 16 ranks and \
                      fewer, sync lower at 64 and more; cv 0.3 printed";
    let mnist = match material.images() {
        Ok(mnist) => mnist,
        Err(because) => return Ok(Claim::not_measured(CROSSING, claim, acceptance, because)),
    };
    let mut table =
        head(&["cv", "ranks", "sync (η)", "gossip (η)", "EASGD (η)", "better asynchronous / sync"]);
    let mut found = Vec::new();
    let mut holds = true;
    for &cv in material.some(&["0.1", "0.3"], 0..1) {
        let mut ahead = Vec::new();
        for &ranks in material.some(&RANKS, 0..1) {
            eprintln!("{CROSSING}: cv {cv}, {ranks} ranks");
            let (losses, rates) = after_equal_time(material, mnist, ranks, &format!("10ms,cv={cv}"))?;
            let [synchronous, gossip, elastic] = losses;
            let ratio = gossip.min(elastic) / synchronous;
            let cells = losses.iter().zip(&rates).map(|(loss, rate)| format!("{loss:.3} ({rate})"));
            let cells: Vec<String> = cells.collect();
            let _ = writeln!(table, "| {cv} | {ranks} | {} | {ratio:.3} |", cells.join(" | "));
            if cv == "0.1" {
                holds &= (ranks > 16 || ratio <= TOLERANCE) && (ranks < 64 || ratio > 1.0);
            }
            ahead.push((ranks, ratio > 1.0));
        }
        found.push(format!("cv {cv}: {}", said(&ahead)));
    }
    Ok(Claim {
        name: CROSSING,
        claim,
        experiment: "MNIST pooled to 14×14, 196-32-10, batch 16 a rank, 220 steps' time, no momentum, best η of four; an \
                     exchange takes 0.03 steps, an all-reduce 0.03·log2 p"
            .to_owned(),
        acceptance,
        found: found.join("; "),
        verdict: Verdict::of(
            holds,
            "where ranks are many, synchronous ones take the largest η that is offered and may bear a larger one; where \
             computing times vary much, waiting for the slowest costs more than averaging noise away brings",
        ),
        table,
    })
}

/// From how many ranks on synchronous ones are better.
fn said(ahead: &[(u32, bool)]) -> String {
    let from = ahead.iter().rev().take_while(|(_, is_ahead)| *is_ahead).last();
    let before = ahead.iter().filter(|(_, is_ahead)| *is_ahead).count();
    match from {
        None if before == 0 => "asynchronous ranks are better everywhere".to_owned(),
        None => format!("synchronous ranks are better in {before} of {} places, not at the end", ahead.len()),
        Some((ranks, _)) => format!("synchronous ranks are better from {ranks} on"),
    }
}

/// The rank that stands still, or ends, of so many.
const STILL: u32 = 5;
const RANKS_BESIDE: u32 = 16;

/// The step before which it ends: after a fifth of the time.
const ENDS_BEFORE: u64 = 44;

/// The share of steps that other ranks of gossip may lose.
const LOST_MAX: f64 = 0.02;

/// The share of steps that ranks lose at least that stand.
const STANDS_MIN: f64 = 0.9;

/// What becomes of the other ranks.
enum Others {
    /// Rank 0 makes so many steps, and their mean has this test loss.
    GoOn { steps: f64, loss: f64 },
    /// The training ends, and names the rank and its step.
    Name,
}

impl Others {
    /// Of trainings that all end in one way.
    fn of(world: &World, mnist: &Data, text: &str, seeds: &[u64]) -> Result<Self, String> {
        let early = |steps: u64, time: f64| steps as f64 * (TIME / time).min(1.0);
        match world.train_all(mnist, text, seeds) {
            Ok(trained) => {
                let steps = trained
                    .iter()
                    .map(|trained| early(trained.simulated.steps, in_steps(trained.simulated.time)));
                let loss = median(trained.iter().map(|trained| trained.loss));
                Ok(Self::GoOn { steps: median(steps), loss })
            }
            Err(error) => match world.death {
                Some((rank, step))
                    if error.contains(&format!("rank {rank} has ended before step {step}")) =>
                {
                    Ok(Self::Name)
                }
                _ => Err(error),
            },
        }
    }

    /// The share of steps that they lose; `None` where the rank is named.
    fn lost(&self, all: f64) -> Option<f64> {
        match self {
            Self::GoOn { steps, .. } => Some(1.0 - steps / all),
            Self::Name => None,
        }
    }

    /// Cells: the steps, the share that is lost, and the loss.
    fn cells(&self, all: f64) -> [String; 3] {
        match self {
            Self::GoOn { steps, loss } => {
                [format!("{steps:.0}"), format!("{:.1} %", (1.0 - steps / all) * 100.0), format!("{loss:.3}")]
            }
            Self::Name => [format!("rank {STILL} is named"), "–".to_owned(), "–".to_owned()],
        }
    }

    /// In words, with this share.
    fn said(&self, share: &str) -> String {
        match self {
            Self::GoOn { .. } => share.to_owned(),
            Self::Name => "the rank is named".to_owned(),
        }
    }
}

/// Sixteen ranks of which one never ends its first step, or ends.
pub(crate) fn lost_rank(material: &Material) -> Result<Claim, String> {
    let claim = "asynchronous ranks are resilient to ranks that lag or fail";
    let acceptance = "other ranks of gossip lose < 2 % of their steps; sync stands, or names the rank";
    let mnist = match material.images() {
        Ok(mnist) => mnist,
        Err(because) => return Ok(Claim::not_measured(LOST, claim, acceptance, because)),
    };
    let mut table = head(&[
        "scheme",
        "steps of rank 0, all well",
        "with a rank that stands",
        "lost",
        "with a rank that has ended",
        "lost",
        "test loss, all well",
        "with a rank that stands",
        "with a rank that has ended",
    ]);
    let (mut lost, mut found) = (Vec::new(), Vec::new());
    for text in SCHEMES {
        let standing = format!("10ms,cv=0.1,straggler={STILL}:1000");
        let well = world(mnist, RANKS_BESIDE, "10ms,cv=0.1", material.seeds()[0])?;
        let stands = world(mnist, RANKS_BESIDE, &standing, material.seeds()[0])?;
        let ended = World { death: Some((STILL, ENDS_BEFORE)), ..well };
        let others = |world: &World| Others::of(world, mnist, text, material.seeds());
        let Others::GoOn { steps: all, loss } = others(&well)? else {
            return Err(format!("{text}: a rank has ended where none does"));
        };
        let both = [others(&stands)?, others(&ended)?];
        let [[steps, share, standing_loss], [steps_beside, share_beside, loss_beside]] =
            both.each_ref().map(|others| others.cells(all));
        let _ = writeln!(
            table,
            "| `{text}` | {all:.0} | {steps} | {share} | {steps_beside} | {share_beside} | {loss:.3} | \
             {standing_loss} | {loss_beside} |"
        );
        found.push(format!("by `{text}` {share} and {}", both[1].said(&share_beside)));
        lost.push(both.map(|others| others.lost(all)));
    }
    let stands = lost[0].iter().all(|lost| lost.is_none_or(|lost| lost > STANDS_MIN));
    let goes_on = lost[1].iter().all(|lost| lost.is_some_and(|lost| lost < LOST_MAX));
    Ok(Claim {
        name: LOST,
        claim,
        experiment: format!(
            "MNIST, {RANKS_BESIDE} ranks, 220 steps' time, of which rank {STILL} never ends its first step, which is \
             harder than standing for a fifth of the time, or ends before step {ENDS_BEFORE}, after a fifth of it; η = 1"
        ),
        acceptance,
        found: format!(
            "other ranks lose beside the one that stands, and the one that has ended: {}",
            found.join(", ")
        ),
        verdict: Verdict::of(goes_on && stands, "ranks of gossip wait for the one that is lost"),
        table,
    })
}

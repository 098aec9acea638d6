//! Schemes that save messages, and the accuracy that they keep: BIDMach (Peng, UCB/EECS-2018-77),
//! DiLoCo (Douillard et al. 2023), eager-SGD (Li et al. 2020).

use std::fmt::Write as _;

use super::images::Data;
use super::world::{End, Links, Trained, World, computing};
use super::{Claim, Material, Verdict, head, median};

pub(crate) const PENG: &str = "Peng: grid";
pub(crate) const DILOCO_BYTES: &str = "DiLoCo: bytes";
pub(crate) const DILOCO: &str = "DiLoCo: quality";
pub(crate) const EAGER: &str = "eager-SGD: majority";

const LEARNING_RATE: f32 = 0.1;
const MOMENTUM: f32 = 0.9;

/// Points of accuracy that a scheme may lose: of a hundred.
const POINTS: f64 = 0.5;
const EAGER_POINTS: f64 = 1.0;

/// Local steps between two outer ones.
const EVERY: u64 = 50;

fn world(ranks: u32, times: &str, steps: u64, seed: u64) -> Result<World, String> {
    let computing = computing(times)?;
    let links = Links::default();
    let end = End::Steps(steps);
    Ok(World {
        ranks,
        computing,
        links,
        learning_rate: LEARNING_RATE,
        momentum: MOMENTUM,
        seed,
        end,
        rate_falls: false,
        death: None,
    })
}

/// The median accuracy, in points.
fn points(trained: &[Trained]) -> f64 {
    median(trained.iter().map(|trained| trained.accuracy * 100.0))
}

/// A set of images with the steps of a training.
type Training<'a> = (&'a Data, u64);

/// The sets that are there, with as many passes over the digits and over MNIST as are said; and why
/// one is not.
fn trainings(material: &Material, steps: impl Fn(&Data) -> u64) -> (Vec<Training<'_>>, Option<String>) {
    let mut sets = vec![(material.digits(), steps(material.digits()))];
    match material.mnist() {
        _ if material.is_short() => (sets, None),
        Ok(mnist) => {
            sets.push((mnist, steps(mnist)));
            (sets, None)
        }
        Err(because) => (sets, Some(format!("; MNIST not measured: {because}"))),
    }
}

/// Ranks that are compared: how many, how long they compute, and the points that they may lose.
struct Ranks {
    count: u32,
    times: &'static str,
    most: f64,
    /// Learning rates of which each scheme takes the best, and which fall by a cosine; none for the
    /// usual one, which stays.
    rates: &'static [f32],
}

/// How much accuracy schemes lose beside `sync`, of which the first counts: rows of a table, these
/// in words, and whether the first loses no more than it may on each set.
fn losses(
    material: &Material,
    texts: &[&str],
    ranks: &Ranks,
    steps: impl Fn(&Data) -> u64,
) -> Result<(String, String, bool), String> {
    let mut table = String::new();
    let (sets, missing) = trainings(material, steps);
    let (mut found, mut holds) = (Vec::new(), true);
    for (data, steps) in sets {
        let world = world(ranks.count, ranks.times, steps, material.seeds()[0])?;
        let world = World { rate_falls: !ranks.rates.is_empty(), ..world };
        let accuracy = |text: &str| -> Result<(f64, String), String> {
            if ranks.rates.is_empty() {
                return Ok((points(&world.train_all(data, text, material.seeds())?), String::new()));
            }
            let learning_rate = world.best_rate(data, text, ranks.rates)?;
            let world = World { learning_rate, ..world };
            let trained = world.train_all(data, text, material.seeds())?;
            Ok((points(&trained), format!(", η = {learning_rate}")))
        };
        let (synchronous, rate) = accuracy("sync")?;
        let _ = writeln!(table, "| {} | `sync`{rate} | {steps} | {synchronous:.2} % | |", data.name);
        for text in texts {
            let (accuracy, rate) = accuracy(text)?;
            let lost = synchronous - accuracy;
            let _ =
                writeln!(table, "| {} | `{text}`{rate} | {steps} | {accuracy:.2} % | {lost:.2} |", data.name);
            if *text == texts[0] {
                holds &= lost <= ranks.most;
            }
            found.push(format!("{}: `{text}` {lost:+.2} points lost", data.name));
        }
    }
    Ok((table, found.join(", ") + missing.as_deref().unwrap_or_default(), holds))
}

/// The head of the table of [`losses`].
fn losses_head() -> String {
    head(&["images", "scheme", "steps", "test accuracy", "points below `sync`"])
}

/// BIDMach's grid.
pub(crate) fn grid_keeps_quality(material: &Material) -> Result<Claim, String> {
    let epochs = |data: &Data| data.steps(if data.name == "MNIST" { 10 } else { 30 }, 16);
    let ranks = Ranks { count: 16, times: "10ms,cv=0.1", most: POINTS, rates: &[] };
    let (rows, found, holds) = losses(material, &["bidmach", "bidmach:threshold=0.75"], &ranks, epochs)?;
    Ok(Claim {
        name: PENG,
        claim: "all-reduce along the lines of a grid with elastic averaging keeps quality",
        experiment: "16 ranks, digits for 30 passes, MNIST for 10, η = 0.1, momentum 0.9".to_owned(),
        acceptance: "within 0.5 points of `sync`",
        found,
        verdict: Verdict::of(
            holds,
            "ranks that are pulled together by 0.3 in one dimension at a time train models of their own for longer",
        ),
        table: losses_head() + &rows,
    })
}

/// Outer steps of a training: their momentum takes tens of them.
const OUTER_STEPS: u64 = 30;
/// The same in the short form.
const FEW_OUTER_STEPS: u64 = 4;

/// Steps of a training whose ranks differ in speed.
fn eager_steps(data: &Data) -> u64 {
    if data.name == "MNIST" { 600 } else { 300 }
}

/// Bytes of DiLoCo.
pub(crate) fn outer_steps_save_bytes(material: &Material) -> Result<Claim, String> {
    let data = material.digits();
    let world = world(8, "10ms,cv=0.1", 2 * EVERY, material.seeds()[0])?;
    let bytes = |text: &str| -> Result<u64, String> {
        let trained = world.train_all(data, text, &material.seeds()[..1])?;
        Ok(trained[0].simulated.bytes_per_rank)
    };
    let (synchronous, outer) = (bytes("sync")?, bytes("diloco")?);
    Ok(Claim {
        name: DILOCO_BYTES,
        claim: "H times fewer bytes",
        experiment: format!("8 ranks, {} steps, every = {EVERY}", 2 * EVERY),
        acceptance: "bytes ÷ 50, to the byte",
        found: format!("{synchronous} B and {outer} B a rank, 1/{:.0}", synchronous as f64 / outer as f64),
        verdict: Verdict::of(outer * EVERY == synchronous, "an exchange has more bytes than the parameters"),
        table: String::new(),
    })
}

/// Accuracy of DiLoCo.
pub(crate) fn outer_steps_keep_quality(material: &Material) -> Result<Claim, String> {
    let texts = ["diloco", "diloco:outer-momentum=0.5", "local-sgd:every=50"];
    let rates = material.some(&[0.01, 0.03, 0.1], 2..3);
    let steps = EVERY * material.steps(OUTER_STEPS, FEW_OUTER_STEPS);
    let ranks = Ranks { count: 8, times: "10ms,cv=0.1", most: POINTS, rates };
    let (rows, found, holds) = losses(material, material.some(&texts, 0..1), &ranks, |_| steps)?;
    Ok(Claim {
        name: DILOCO,
        claim: "quality at H times fewer bytes",
        experiment: format!(
            "8 ranks, every = 50, {steps} steps, momentum 0.9, best η of three, which falls by a cosine"
        ),
        acceptance: "within 0.5 points of `sync`",
        found,
        verdict: Verdict::of(
            holds,
            "an outer momentum of 0.9 makes ten steps of one, and this network learns most of what it learns within one \
             period: with 0.5, or with plain averages, at most 0.3 points are lost; the paper trains a large model for hundreds of periods",
        ),
        table: losses_head() + &rows,
    })
}

/// Rounds of a majority.
pub(crate) fn majority_keeps_accuracy(material: &Material) -> Result<Claim, String> {
    let texts = ["eager", "eager:activation=solo"];
    let (mut rows, mut found, mut all_hold) = (String::new(), Vec::new(), true);
    let speeds =
        [("the same ranks are slow", "50ms,cv=0,spread=7"), ("each rank is slow at times", "225ms,cv=0.45")];
    for &(which, times) in material.some(&speeds, 1..2) {
        let ranks = Ranks { count: 8, times, most: EAGER_POINTS, rates: &[] };
        let (more, said, holds) = losses(material, &texts, &ranks, eager_steps)?;
        let _ = write!(rows, "| *{which}* | | | | |\n{more}");
        found.push(format!("{which}: {said}"));
        all_hold &= holds;
    }
    Ok(Claim {
        name: EAGER,
        claim: "a majority keeps accuracy",
        experiment: "8 ranks whose steps take 50 to 400 ms, drawn for each rank or anew in each step; 300 steps on digits \
                     and 600 on MNIST"
            .to_owned(),
        acceptance: "within 1 point of `sync`; solo printed",
        found: found.join("; "),
        verdict: Verdict::of(
            all_hold,
            "where the same ranks are always slow most of their gradients come late, and count at parameters that have \
             moved on; the paper's own curves for such ranks end at 90.0 and 92.6 %",
        ),
        table: losses_head() + &rows,
    })
}

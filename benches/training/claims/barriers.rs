//! Zhao et al., "Elastic bulk synchronous parallel model" (arXiv 2001.01347) and DSSP: where
//! barriers stand, and how long ranks wait.

use std::fmt::Write as _;
use std::path::Path;

use pleach_training::zipline::{Objective, Prediction, place};

use super::world::{End, Links, Trained, World, computing};
use super::{Claim, Material, Verdict, head, median};

pub(crate) const OPTIMAL: &str = "Zhao: ZipLine";
pub(crate) const WAITING: &str = "Zhao: waiting";
pub(crate) const LOSS: &str = "Zhao: accuracy";
pub(crate) const CREDITS: &str = "Zhao: DSSP";

/// The predictions of the authors' two matrices.
pub(crate) fn authors() -> Result<Vec<Vec<Prediction>>, String> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("training/tests/data/elasticbsp.txt");
    let text = std::fs::read_to_string(&path).map_err(|error| format!("{}: {error}", path.display()))?;
    let mut all = Vec::new();
    for line in text.lines().skip(3) {
        if line.starts_with('#') {
            all.push(Vec::new());
            continue;
        }
        let workers: &mut Vec<Prediction> = all.last_mut().ok_or("no heading before the first worker")?;
        for worker in line.split(' ') {
            let numbers = worker.split_once('+').and_then(|(next, interval)| {
                Some(Prediction { next: next.parse().ok()?, interval: interval.parse().ok()? })
            });
            workers.push(numbers.ok_or_else(|| format!("{worker} is no prediction"))?);
        }
    }
    Ok(all)
}

/// The smallest ranges of the authors' matrices.
pub(crate) fn zipline_is_optimal(_: &Material) -> Result<Claim, String> {
    let matrices = authors()?;
    let mut ranges = Vec::new();
    for (workers, lookahead) in matrices.iter().zip([15, 150]) {
        let barrier = place(workers, 0, lookahead, Objective::Range).map_err(|error| error.to_string())?;
        ranges.push(barrier.range());
    }
    Ok(Claim {
        name: OPTIMAL,
        claim: "ZipLine finds the smallest range",
        experiment: "the authors' matrices of 1,000 and 10 workers".to_owned(),
        acceptance: "1403 and 698 ms; equal to brute force in 10,000 cases",
        found: format!("{} and {} ms; brute force in `training/src/zipline/tests.rs`", ranges[0], ranges[1]),
        verdict: Verdict::of(
            ranges == [1403, 698],
            "the sweep looks at other windows than the authors' does",
        ),
        table: String::new(),
    })
}

/// Steps of a rank in an experiment on waiting.
const STEPS: u64 = 400;

fn world(ranks: u32, spread: f64, cv: f64, seed: u64) -> Result<World, String> {
    let computing = computing(&format!("10ms,cv={cv},spread={spread}"))?;
    let (links, end) = (Links::default(), End::Steps(STEPS));
    Ok(World {
        ranks,
        computing,
        links,
        learning_rate: 0.1,
        momentum: 0.0,
        seed,
        end,
        rate_falls: false,
        death: None,
    })
}

const SPREADS: [f64; 2] = [0.5, 1.0];
const CVS: [f64; 4] = [0.02, 0.1, 0.2, 0.3];
const RANKS: [u32; 2] = [4, 16];

/// How speeds differ, each with how times vary.
fn variations(material: &Material) -> Vec<(f64, f64)> {
    let spreads = material.some(&SPREADS, 0..1).iter();
    spreads.flat_map(|spread| material.some(&CVS, 0..1).iter().map(|cv| (*spread, *cv))).collect()
}

/// The median share of time that ranks wait, in percent.
fn waits(material: &Material, world: &World, text: &str) -> Result<f64, String> {
    let trained = world.train_all(material.digits(), text, material.seeds())?;
    Ok(median(trained.iter().map(|trained: &Trained| trained.early_waiting * 100.0)))
}

/// Waiting at ZipLine's barriers.
pub(crate) fn waiting(material: &Material) -> Result<Claim, String> {
    let texts = ["elastic-bsp:lookahead=1", "elastic-bsp", "elastic-bsp:lookahead=15", "bsp"];
    let mut table = head(&["ranks", "spread", "cv", "BSP", "lookahead 60", "lookahead 15", "`bsp`"]);
    let (mut most, mut ratios) = (f64::NEG_INFINITY, Vec::new());
    for &ranks in material.some(&RANKS, 0..1) {
        for (spread, cv) in variations(material) {
            let world = world(ranks, spread, cv, material.seeds()[0])?;
            let shares = texts.map(|text| waits(material, &world, text));
            let [bulk, far, near, table_bulk] = shares;
            let (bulk, far, near, table_bulk) = (bulk?, far?, near?, table_bulk?);
            most = most.max(far - bulk);
            if (spread, cv) == (0.5, 0.02) {
                ratios.push(far / bulk);
            }
            let _ = writeln!(
                table,
                "| {ranks} | {spread} | {cv} | {bulk:.1} % | {far:.1} % | {near:.1} % | {table_bulk:.1} % |"
            );
        }
    }
    let worst = ratios.iter().copied().fold(0.0, f64::max);
    Ok(Claim {
        name: WAITING,
        claim: "tunable, and less waiting than BSP",
        experiment: "speeds that differ by 1.5 and 2, cv 0.02 to 0.3, 4 and 16 ranks; the share of time with nothing to \
                     compute in the first half of 400 steps, beside `lookahead=1`"
            .to_owned(),
        acceptance: "≤ BSP's + 1 point everywhere, ≤ ¼ of it at spread 0.5, cv 0.02",
        found: format!("BSP's {most:+.1} points at most; {worst:.2} of it at spread 0.5, cv 0.02"),
        verdict: Verdict::of(most <= 1.0 && worst <= 0.25, "times that vary are predicted by their means"),
        table,
    })
}

/// Losses at the end.
pub(crate) fn final_loss(material: &Material) -> Result<Claim, String> {
    let mut table = head(&["ranks", "spread", "cv", "BSP: median", "least to most", "lookahead 60: median"]);
    let (mut within, mut all) = (0, 0);
    for &ranks in material.some(&RANKS, 0..1) {
        for &(spread, cv) in material.some(&[(0.5, 0.02), (0.5, 0.2), (1.0, 0.1)], 0..1) {
            let world = world(ranks, spread, cv, material.seeds()[0])?;
            let losses = |text| -> Result<Vec<f64>, String> {
                let trained = world.train_all(material.digits(), text, material.seeds())?;
                Ok(trained.iter().map(|trained| trained.loss).collect())
            };
            let (bulk, far) = (losses("elastic-bsp:lookahead=1")?, median(losses("elastic-bsp")?));
            let least = bulk.iter().copied().fold(f64::INFINITY, f64::min);
            let most = bulk.iter().copied().fold(0.0, f64::max);
            let middle = median(bulk);
            all += 1;
            within += u32::from((far - middle).abs() <= most - least);
            let _ = writeln!(
                table,
                "| {ranks} | {spread} | {cv} | {middle:.4} | {least:.4} to {most:.4} | {far:.4} |"
            );
        }
    }
    Ok(Claim {
        name: LOSS,
        claim: "accuracy comparable to BSP",
        experiment: format!("digits, {STEPS} steps of each rank, η = 0.1, no momentum"),
        acceptance: "medians of the final test loss differ by less than BSP's seeds do",
        found: format!("in {within} of {all} worlds"),
        verdict: Verdict::of(
            within == all,
            "ranks make up to 60 steps by themselves between barriers, where the paper's send each update to servers",
        ),
        table,
    })
}

/// Waiting by a dynamic bound.
pub(crate) fn credits(material: &Material) -> Result<Claim, String> {
    let mut table = head(&["ranks", "spread", "cv", "`ssp`", "`dssp`"]);
    let mut most = f64::NEG_INFINITY;
    for &ranks in material.some(&RANKS, 0..1) {
        for (spread, cv) in variations(material) {
            let world = world(ranks, spread, cv, material.seeds()[0])?;
            let (fixed, dynamic) = (waits(material, &world, "ssp")?, waits(material, &world, "dssp")?);
            most = most.max(dynamic - fixed);
            let _ = writeln!(table, "| {ranks} | {spread} | {cv} | {fixed:.1} % | {dynamic:.1} % |");
        }
    }
    Ok(Claim {
        name: CREDITS,
        claim: "a dynamic bound waits less than a fixed one",
        experiment: "as for waiting: `dssp:low=3,high=15` beside `ssp:staleness=3`".to_owned(),
        acceptance: "≤ that of `ssp` at the low bound + 2 points",
        found: format!("{most:+.1} points at most"),
        verdict: Verdict::of(
            most <= 2.0,
            "credits are spent where ranks are asked for copies in time, and all go at the pace of the slowest",
        ),
        table,
    })
}

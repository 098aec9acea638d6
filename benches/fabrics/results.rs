//! Medians of rounds, and what follows from them.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use serde_json::json;

use crate::machine::Machine;
use crate::rows::{Goal, Row, Runner};
use crate::run::Outcome;

/// Everything that was measured.
#[derive(Default)]
pub(crate) struct Results {
    /// By row, runner and bytes.
    rounds: BTreeMap<(&'static str, Runner, u64), Vec<Round>>,
    failures: BTreeMap<(&'static str, Runner), Vec<String>>,
}

/// What one round found, in us.
#[derive(Clone, Copy)]
struct Round {
    median_us: f64,
    late_us: f64,
}

/// Whether a goal was reached.
pub(crate) enum Verdict {
    /// Least and greatest speed of its sizes.
    Met(f64, f64),
    NotMet(f64, f64),
    /// Why nothing can be said.
    Unknown(String),
}

impl Results {
    /// Adds a round of a runner.
    pub(crate) fn add(&mut self, row: &Row, runner: Runner, outcome: Outcome) {
        for one in outcome.measured {
            // Sizes are those of whole parts; for what has none, once.
            let bytes = if row.sizes.len() == 1 { row.sizes[0] } else { one.bytes };
            self.rounds
                .entry((row.name, runner, bytes))
                .or_default()
                .push(Round { median_us: one.median_us, late_us: one.late_us });
        }
        if let Some(failure) = outcome.failure {
            self.failures.entry((row.name, runner)).or_default().push(failure);
        }
    }

    /// Median time over rounds, in us.
    pub(crate) fn median_us(&self, row: &Row, runner: Runner, bytes: u64) -> Option<f64> {
        let rounds = self.rounds.get(&(row.name, runner, bytes))?;
        Some(median(rounds.iter().map(|round| round.median_us).collect()))
    }

    /// Why a runner did not do all of a row: nothing of it, or not all of its rounds.
    pub(crate) fn failure(&self, row: &Row, runner: Runner) -> Option<String> {
        let failures = self.failures.get(&(row.name, runner))?;
        let last = failures.last()?;
        let is_measured = row.sizes.iter().any(|bytes| self.median_us(row, runner, *bytes).is_some());
        Some(match (is_measured, failures.len()) {
            (false, _) => format!("not measured: {last}"),
            (true, 1) => format!("one round ended early and counts for the sizes that it reached: {last}"),
            (true, rounds) => {
                format!("{rounds} rounds ended early and count for the sizes that they reached: {last}")
            }
        })
    }

    /// How many times as many elements a second one runner does as another.
    pub(crate) fn speed(&self, row: &Row, ours: Runner, against: Runner, bytes: u64) -> Option<f64> {
        let elements = against.element_bytes() / ours.element_bytes();
        Some(self.median_us(row, against, bytes)? / self.median_us(row, ours, bytes)? * elements)
    }

    /// Judges a goal by all sizes in its range that were measured.
    pub(crate) fn verdict(&self, row: &Row, goal: &Goal) -> Verdict {
        let sizes = row.sizes.iter().filter(|bytes| (goal.from..=goal.to).contains(*bytes));
        let beside_the_best = |bytes| {
            let against = goal.against.iter();
            against.filter_map(|against| self.speed(row, goal.ours, *against, bytes)).reduce(f64::min)
        };
        let speeds: Vec<f64> = sizes.copied().filter_map(beside_the_best).collect();
        let least = speeds.iter().copied().reduce(f64::min);
        let greatest = speeds.iter().copied().reduce(f64::max);
        match (least, greatest) {
            (Some(least), Some(greatest)) if least >= goal.speed => Verdict::Met(least, greatest),
            (Some(least), Some(greatest)) => Verdict::NotMet(least, greatest),
            _ => {
                let all = std::iter::once(goal.ours).chain(goal.against.iter().copied());
                let reasons =
                    all.filter_map(|one| Some(format!("{}: {}", one.name(), self.failure(row, one)?)));
                let reasons: Vec<_> = reasons.collect();
                Verdict::Unknown(if reasons.is_empty() {
                    "no such size".to_owned()
                } else {
                    reasons.join("; ")
                })
            }
        }
    }

    /// Writes everything as JSON.
    pub(crate) fn write(&self, path: &Path, rows: &[Row], machine: &Machine) -> Result<(), String> {
        let of_row = |row: &Row| {
            let measured: Vec<_> = (self.rounds.iter())
                .filter(|((name, ..), _)| *name == row.name)
                .map(|((_, runner, bytes), rounds)| {
                    let (medians, late): (Vec<f64>, Vec<f64>) =
                        rounds.iter().map(|round| (round.median_us, round.late_us)).unzip();
                    json!({
                        "runner": runner.name(),
                        "bytes": bytes,
                        "time_us": median(medians.clone()),
                        "time_us_p50": medians,
                        "time_us_p99": late,
                    })
                })
                .collect();
            json!({ "name": row.name, "title": row.title, "ranks": row.ranks, "measured": measured })
        };
        let all = json!({
            "machine": machine.lines(),
            "limits": machine.limits().iter().map(|(what, value, unit)| json!([what, value, unit])).collect::<Vec<_>>(),
            "rows": rows.iter().map(of_row).collect::<Vec<_>>(),
        });
        fs::write(path, format!("{all:#}\n")).map_err(|error| format!("{}: {error}", path.display()))?;
        eprintln!("all rounds are in {}", path.display());
        Ok(())
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    if values.len() % 2 == 1 { values[middle] } else { f64::midpoint(values[middle - 1], values[middle]) }
}

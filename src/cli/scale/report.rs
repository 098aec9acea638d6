//! The points of an outlook as a table and as JSON.

use std::time::Duration;

use serde_json::{Value, json};

use super::{Outlook, Point};
use crate::cli::bench::Size;
use crate::cli::output::{put, rounded};

/// The table, size by size.
pub(crate) fn text(outlook: &Outlook) -> String {
    let question = &outlook.question;
    let mut out = String::new();
    put!(out, "# {} on {}: nothing is run; times in us", question.collective, question.links);
    if let Some(part) = question.slow_link {
        put!(out, "# the slowest link of rank 0 has {part} of its bandwidth left");
    }
    if let Some((jitter, seed)) = question.jitter {
        put!(out, "# ranks make the call late by {jitter}, seed {seed}; the model adds the latest");
    }
    for &size in &question.sizes {
        let points = || outlook.points.iter().filter(|point| point.size == size);
        if points().next().is_none() {
            continue;
        }
        put!(out, "\n# {}", Size(size));
        put!(
            out,
            "{:>6}  {:<26} {:>12} {:>12} {:>8} {:>12} {:>9} {:>12}",
            "ranks",
            "algorithm",
            "model",
            "simulated",
            "model is",
            "bound",
            "of bound",
            "carried out"
        );
        for point in points() {
            put!(out, "{}", row(point));
        }
    }
    out
}

fn row(point: &Point) -> String {
    let micros = |time: Duration| format!("{:.2}", time.as_secs_f64() * 1e6);
    let none = || "-".to_owned();
    let (simulated, off, carried_out) = match &point.simulated {
        Ok((time, ranks)) => {
            let off = point.model.as_secs_f64() / time.as_secs_f64();
            (micros(*time), format!("{off:.3}x"), ranks.to_string())
        }
        Err(_) => (none(), none(), none()),
    };
    let bound = point.bound_s().map_or_else(none, |bound_s| format!("{:.2}", bound_s * 1e6));
    let part = point.efficiency().map_or_else(none, |part| format!("{:.2} %", part * 100.0));
    format!(
        "{:>6}  {:<26} {:>12} {simulated:>12} {off:>8} {bound:>12} {part:>9} {carried_out:>12}",
        point.ranks,
        point.algorithm,
        micros(point.model)
    )
}

/// A point for programs.
pub(crate) fn object(outlook: &Outlook, point: &Point) -> Value {
    let question = &outlook.question;
    let micros = |seconds: f64| rounded(seconds * 1e6, 3);
    let simulated = point.simulated.as_ref();
    json!({
        "collective": question.collective.name(),
        "topology": question.links.to_string(),
        "ranks": point.ranks,
        "bytes": point.bytes,
        "algorithm": point.algorithm,
        "model_us": micros(point.model.as_secs_f64()),
        "simulated_us": simulated.ok().map(|(time, _)| micros(time.as_secs_f64())),
        "carried_out": simulated.ok().map(|(_, ranks)| *ranks),
        "not_simulated": simulated.err(),
        "bound_us": point.bound_s().map(micros),
        "bound_is_of_packing": point.bound.map(|bound| bound.is_of_packing()),
        "of_bound": point.efficiency().map(|part| rounded(part, 6)),
        "slow_link": question.slow_link,
        "jitter": question.jitter.map(|(jitter, _)| jitter.to_string()),
        "seed": question.jitter.map(|(_, seed)| seed)
    })
}

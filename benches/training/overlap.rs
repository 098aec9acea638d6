//! How much of an exchange a training hides: two hosts as network namespaces, joined by a wire of
//! 2 Gb/s. It takes root, `ip` and `tc`.

use std::path::Path;
use std::process::Output;

use crate::claims::median;
use crate::limits::Limit;
use crate::links::{Hosts, Wire, ended, number};

const MEGABITS_PER_S: u32 = 2000;
/// 24,894,970 parameters on images of 64 pixels, in layers of which none holds up the others: the
/// averages of one layer travel while the next one is computed.
const MODEL: &str = "mlp:1880x1880x1880x1880x1880x1880x1880x1880";
/// Their bytes.
const BYTES: &str = "99579880";
const STEPS: &str = "24";
/// How often each comparison is made.
const TURNS: usize = 5;
/// The largest ratio of a step to the longer one of its two parts.
const STEP_MAX: f64 = 1.25;

/// The JSON of rank 0.
fn lines(outputs: &[Output]) -> Result<Vec<String>, String> {
    let failed = outputs.iter().find(|output| !output.status.success());
    match (failed, outputs.first()) {
        (Some(output), _) => Err(String::from_utf8_lossy(&output.stderr).into_owned()),
        (None, Some(first)) => {
            Ok(String::from_utf8_lossy(&first.stdout).lines().map(ToOwned::to_owned).collect())
        }
        (None, None) => Err("no rank was started".to_owned()),
    }
}

/// Seconds of a step, as rank 0 counts them.
fn step_s(outputs: &[Output]) -> Result<f64, String> {
    let lines = lines(outputs)?;
    let line = lines.iter().find(|line| line.contains("steps_per_s")).ok_or("rank 0 printed no steps")?;
    Ok(1.0 / number(line, "steps_per_s"))
}

pub(crate) fn overlap() -> Result<Vec<Limit>, String> {
    let wire = Wire { ends: [0, 1], megabits_per_s: Some(MEGABITS_PER_S) };
    let hosts = match Hosts::new(Path::new(env!("CARGO_BIN_EXE_pleach")), 2, &[wire]) {
        Ok(hosts) => hosts,
        Err(reason) => {
            let what = format!("a step of `sync` on 25 M parameters, two hosts, {MEGABITS_PER_S} Mbit/s");
            let found = format!("not measured, as there are no shaped networks here: {reason}");
            return Ok(vec![Limit::new(what, "≤ 1.25", found, None)]);
        }
    };
    let train = [
        "train",
        "--scheme",
        "sync",
        "--data",
        "synthetic",
        "--model",
        MODEL,
        "--batch",
        "16",
        "--steps",
        STEPS,
        "--json",
    ];
    let (mut computing, mut communicating, mut steps) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..TURNS {
        // Both hosts compute at the same time, as they do in the training.
        let alone = (0..2).map(|host| hosts.start(host, 0, 1, &train)).collect();
        computing.push(step_s(&ended(alone))?);
        let exchange = lines(&hosts.ranks(&["bench", "all-reduce", "--sizes", BYTES, "--json"]))?;
        let line = exchange.first().ok_or("rank 0 printed no times")?;
        communicating.push(number(line, "time_us_p50") * 1e-6);
        steps.push(step_s(&hosts.ranks(&train))?);
    }
    let [computing, communicating, step] = [computing, communicating, steps].map(median);
    let ratio = step / computing.max(communicating);
    let what = format!(
        "a step of `sync` on 25 M parameters, two hosts, {MEGABITS_PER_S} Mbit/s, over the longer one of computing \
         ({:.0} ms) and communicating ({:.0} ms) alone",
        computing * 1e3,
        communicating * 1e3
    );
    let found = format!("{ratio:.2} ({:.0} ms)", step * 1e3);
    Ok(vec![Limit::new(what, "≤ 1.25", found, Some(ratio <= STEP_MAX))])
}

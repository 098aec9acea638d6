//! One runner measures one row once.

use std::process::{Command, Stdio};

use serde_json::Value;

use crate::peers::Peers;
use crate::rows::{Fabric, Row, Runner};
use crate::signal;

/// How long a runner may take: for its start, and as many times the time for a size as it may spend
/// on filling and checking.
const START_LIMIT_S: u64 = 20;
const SIZE_LIMIT_FACTOR: u64 = 40;
const SIZE_LIMIT_MIN_MS: u64 = 4000;

/// What others' environments say about ranks.
const PREFIXES: [&str; 4] = ["PLEACH_", "OMPI_", "PMI_", "SLURM_"];

/// One size.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Measured {
    pub(crate) bytes: u64,
    pub(crate) median_us: f64,
    pub(crate) late_us: f64,
}

/// What came of it: sizes that were measured, and why others were not.
#[derive(Default)]
pub(crate) struct Outcome {
    pub(crate) measured: Vec<Measured>,
    pub(crate) failure: Option<String>,
}

/// Lets a runner measure a row.
pub(crate) fn run(peers: &Peers, row: &Row, runner: Runner, time_ms: u32) -> Outcome {
    let command = match runner {
        Runner::Signal => {
            return match signal::measure(u64::from(time_ms)) {
                Ok(measured) => Outcome { measured: vec![measured], failure: None },
                Err(error) => Outcome { measured: Vec::new(), failure: Some(error) },
            };
        }
        Runner::Pleach { arguments, .. } => Ok(pleach(row, arguments, time_ms)),
        _ => peers.command(row, runner, time_ms),
    };
    match command {
        Ok(command) => {
            let size_ms = (u64::from(time_ms) * SIZE_LIMIT_FACTOR).max(SIZE_LIMIT_MIN_MS);
            outcome(&command, START_LIMIT_S + size_ms * row.sizes.len() as u64 / 1000)
        }
        Err(reason) => Outcome { measured: Vec::new(), failure: Some(reason) },
    }
}

/// The built command.
fn pleach(row: &Row, arguments: &[&str], time_ms: u32) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pleach"));
    let fabric = if row.fabric == Fabric::Shm { "shm" } else { "tcp" };
    command.args(["bench", row.collective, "--json", "--fabric", fabric]).args(arguments);
    command.args(["--ranks", &row.ranks.to_string(), "--time", &time_ms.to_string()]);
    if row.fabric != Fabric::Shm {
        // As its peers.
        command.args(["--bind", "none"]);
    }
    if !row.fresh {
        command.arg("--reuse");
    }
    if row.collective != "barrier" {
        let sizes: Vec<_> = row.sizes.iter().map(u64::to_string).collect();
        command.args(["--sizes", &sizes.join(",")]);
    }
    command
}

/// Runs a command under a limit, and reads what it prints.
fn outcome(command: &Command, limit_s: u64) -> Outcome {
    let mut limited = Command::new("timeout");
    limited
        .args(["--kill-after=5", &limit_s.to_string()])
        .arg(command.get_program())
        .args(command.get_args());
    for (name, _) in std::env::vars_os() {
        if PREFIXES.iter().any(|prefix| name.to_string_lossy().starts_with(prefix)) {
            limited.env_remove(name);
        }
    }
    limited.envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))));
    let output = match limited.stdin(Stdio::null()).output() {
        Ok(output) => output,
        Err(error) => {
            return Outcome {
                measured: Vec::new(),
                failure: Some(format!("not started: timeout ({error})")),
            };
        }
    };
    let text = String::from_utf8_lossy(&output.stdout);
    let lines: Vec<_> = text.lines().filter_map(line).collect();
    let failure = if lines.iter().any(|(_, errors)| *errors > 0) {
        Some("wrong results".to_owned())
    } else if output.status.success() {
        None
    } else if output.status.code() == Some(124) {
        Some(format!("not done within {limit_s} s"))
    } else {
        let errors = String::from_utf8_lossy(&output.stderr);
        let mut lines = errors.lines();
        let said = lines
            .clone()
            .find(|line| line.contains("error:"))
            .or_else(|| lines.find(|line| !line.is_empty()));
        // What to do about it is for whoever typed the command.
        let said = said
            .map(|line| line.trim_start_matches("error: ").split(':').next().unwrap_or_default().to_owned());
        Some(said.unwrap_or_else(|| output.status.to_string()))
    };
    let right = lines.into_iter().filter(|(_, errors)| *errors == 0);
    Outcome { measured: right.map(|(measured, _)| measured).collect(), failure }
}

/// A line of results and how many elements were wrong.
fn line(text: &str) -> Option<(Measured, u64)> {
    let value: Value = serde_json::from_str(text).ok()?;
    let measured = Measured {
        bytes: value["bytes"].as_u64()?,
        median_us: value["time_us_p50"].as_f64()?,
        late_us: value["time_us_p99"].as_f64()?,
    };
    Some((measured, value["errors"].as_u64()?))
}

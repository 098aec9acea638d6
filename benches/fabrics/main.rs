//! `cargo bench --bench fabrics`: pleach beside its peers, in one run.
//!
//! A [`Row`] is one thing that is measured by several [`Runner`](rows::Runner)s: pleach (the built
//! command, `pleach bench --json`), Open MPI, MPICH, Gloo, and a loop that two processes run by
//! hand (`benches/peers/`). All measure by the same protocol, `benches/peers/measure.h` and
//! `src/cli/bench/live.rs`, and check their results. [`Results`] keeps the median of each round.
//!
//! **Invariant:** runners take turns, round by round, so that whatever else the machine does meets
//! all of them; only ratios of medians over rounds are judged. This reports and never fails because
//! something is slow.
//!
//! Peers are installed by `benches/install-peers`; what is absent is skipped with a reason.

use std::process::ExitCode;

use clap::Parser;

mod machine;
mod page;
mod peers;
mod plot;
#[path = "../report/mod.rs"]
mod report;
mod results;
mod rows;
mod run;
mod signal;
mod table;

use machine::Machine;
use peers::Peers;
use results::Results;
use rows::{Row, rows};

/// Rounds and ms for each size, of a whole run and of a quick one.
const ROUNDS: (u32, u32) = (5, 2);
const TIME_MS: (u32, u32) = (100, 20);

/// Measure pleach beside its peers.
#[derive(Debug, Parser)]
#[command(name = "fabrics", after_help = "Example:\n  cargo bench --bench fabrics -- --quick --only shm2")]
struct Arguments {
    /// Few sizes, short, 2 rounds
    #[arg(long)]
    quick: bool,
    /// Only rows whose names begin so, with commas between
    #[arg(long, value_name = "ROW,...", value_delimiter = ',')]
    only: Vec<String>,
    /// Exactly these sizes, in bytes, where a row has sizes
    #[arg(long, value_name = "BYTES,...", value_delimiter = ',')]
    sizes: Vec<u64>,
    /// How often everything is measured [default: 5, quick 2]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    rounds: Option<u32>,
    /// About so long for each size in a round [default: 100, quick 20]
    #[arg(long, value_name = "MS", value_parser = clap::value_parser!(u32).range(1..=60_000))]
    time: Option<u32>,
    /// Write docs/performance.md and docs/performance.svg
    #[arg(long, conflicts_with_all = ["quick", "only", "sizes"])]
    write_docs: bool,
    /// Given by cargo
    #[arg(long, hide = true)]
    bench: bool,
}

fn main() -> ExitCode {
    if signal::is_second_process() {
        signal::answer();
        return ExitCode::SUCCESS;
    }
    let arguments = Arguments::parse();
    report::ended(measure(&arguments))
}

fn measure(arguments: &Arguments) -> Result<(), String> {
    let rows = chosen(arguments)?;
    let folder = report::target()?.join("fabrics");
    let pick = |(whole, quick)| if arguments.quick { quick } else { whole };
    let rounds = arguments.rounds.unwrap_or(pick(ROUNDS));
    let time_ms = arguments.time.unwrap_or(pick(TIME_MS));
    let peers = Peers::build(&folder)?;
    for (runner, reason) in peers.absent() {
        eprintln!("skipped {}: {reason}", runner.name());
    }
    let machine = Machine::look(&peers, time_ms);
    let mut results = Results::default();
    for round in 0..rounds {
        for row in &rows {
            eprintln!("round {} of {rounds}: {}", round + 1, row.name);
            // Another one is first each time: nobody always runs on the memory that a certain other
            // one left.
            for place in 0..row.runners.len() {
                let runner = row.runners[(place + round as usize) % row.runners.len()];
                results.add(row, runner, run::run(&peers, row, runner, time_ms));
            }
        }
    }
    let text = table::all(&rows, &results, &machine);
    table::print(&text)?;
    results.write(&folder.join("fabrics.json"), &rows, &machine)?;
    if arguments.write_docs {
        page::write(&rows, &results, &machine, rounds)?;
    }
    Ok(())
}

/// The rows that were asked for.
fn chosen(arguments: &Arguments) -> Result<Vec<Row>, String> {
    let mut rows = rows(arguments.quick);
    let names: Vec<_> = rows.iter().map(|row| row.name).collect();
    if let Some(unknown) =
        arguments.only.iter().find(|only| !names.iter().any(|name| name.starts_with(*only)))
    {
        return Err(format!("no such row: {unknown}; there are {}", names.join(" ")));
    }
    rows.retain(|row| report::is_chosen(&arguments.only, row.name));
    if !arguments.sizes.is_empty() {
        for row in rows.iter_mut().filter(|row| row.sizes.len() > 1) {
            row.sizes = arguments.sizes.clone();
        }
    }
    Ok(rows)
}

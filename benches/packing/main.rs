//! `cargo bench --bench packing`: how good packings are and how long they take to make.
//!
//! A [`Target`](targets::Target) is a topology, the collectives that are packed on it, and a time
//! limit for all of them together. A [`Finding`](targets::Finding) is the result of a target.
//! Beside these, [`servers`] compares every allocation of a server with what other strategies
//! reach, and [`page`] writes the comparison down.
//!
//! **Invariant:** the checker has accepted every rate that is printed; its time is not counted.
//! Where an optimum is demanded, the rate must also equal the bound of its certificate. The
//! benchmark never fails because something is slow. It fails when a packing is wrong or not as good
//! as it has to be.

use std::process::ExitCode;

use clap::Parser;

mod page;
#[path = "../report/mod.rs"]
mod report;
mod servers;
mod targets;

use report::is_chosen;
use targets::{Finding, targets};

/// Measure how good packings are, and how long they take to make.
#[derive(Debug, Parser)]
#[command(
    name = "packing",
    after_help = "Example:\n  cargo bench --bench packing -- --only dgx-a100:2,mi250"
)]
struct Arguments {
    /// Only targets whose names begin with one of these, with commas between
    #[arg(long, value_name = "NAME,...", value_delimiter = ',')]
    only: Vec<String>,
    /// How often each target is measured; the median counts
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=1000))]
    rounds: u32,
    /// Write docs/packing.md
    #[arg(long, conflicts_with = "only")]
    write_docs: bool,
    /// Given by cargo
    #[arg(long, hide = true)]
    bench: bool,
}

fn main() -> ExitCode {
    match measure(&Arguments::parse()) {
        Ok(false) => ExitCode::FAILURE,
        outcome => report::ended(outcome.map(drop)),
    }
}

/// Whether everything was right and as good as it has to be.
fn measure(arguments: &Arguments) -> Result<bool, String> {
    let mut findings: Vec<Finding> = Vec::new();
    println!("{}", Finding::HEAD);
    for target in targets()?.into_iter().filter(|target| is_chosen(&arguments.only, target.name)) {
        let finding = target.measure(arguments.rounds);
        println!("{finding}");
        findings.push(finding);
    }
    let mut servers = Vec::new();
    for name in servers::NAMES.into_iter().filter(|name| is_chosen(&arguments.only, name)) {
        let server = servers::compare(name)?;
        println!("\n{}", server.means());
        servers.push(server);
    }
    if arguments.write_docs {
        page::write(&findings, &servers)?;
    }
    Ok(findings.iter().all(|finding| finding.failures.is_empty()))
}

//! `cargo bench --bench training`: the claims of the papers whose training schemes are here, and
//! what the crate itself must reach.
//!
//! 1. *Claims* ([`claims`]): each is an experiment in virtual time, or a plan. Any machine, busy or
//!    not, finds the same numbers.
//! 2. *Limits* ([`limits`]): times, allocations and memory of policies, planners, simulations and
//!    exchanges, measured beside what bounds them, in turn.
//!
//! A claim that does not hold is printed as not found, with the reason. The bench fails only where
//! an experiment cannot be made.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Parser;

mod allocations;
mod claims;
mod limits;
#[allow(dead_code)] // Only a part of it is used here.
#[path = "../../tests/links/mod.rs"]
mod links;
mod overlap;
#[path = "../../training/tests/told/mod.rs"]
mod told;

use claims::images::Data;
use claims::report::{ended, is_chosen, write_between};
use claims::{Claim, EXPERIMENTS, Material};

/// Look for the claims of the papers, and measure what the crate must reach.
#[derive(Debug, Parser)]
#[command(
    name = "training",
    after_help = "Example:\n  cargo bench --bench training -- --only Das,Zhang --seeds 3"
)]
struct Arguments {
    /// Only claims and limits whose names begin with one of these, with commas between
    #[arg(long, value_name = "NAME,...", value_delimiter = ',')]
    only: Vec<String>,
    /// How many seeds; medians count
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=100))]
    seeds: u32,
    /// The folder with the files of MNIST; without it what needs them is not measured
    #[arg(long, value_name = "DIR")]
    data: Option<PathBuf>,
    /// Write what was measured to docs/training.md
    #[arg(long)]
    write_docs: bool,
    /// Given by cargo
    #[arg(long, hide = true)]
    bench: bool,
}

fn main() -> ExitCode {
    ended(measure(&Arguments::parse()))
}

const MARKS: [&str; 2] = [
    "<!-- claims: written by cargo bench --bench training -- --write-docs -->",
    "<!-- end of the claims -->",
];

/// The first seed.
const SEED: u64 = 42;

fn measure(arguments: &Arguments) -> Result<(), String> {
    let mnist = match &arguments.data {
        Some(folder) => Ok(Data::mnist(folder)?),
        None => Err("there is no MNIST; give --data DIR".to_owned()),
    };
    let seeds = (0..arguments.seeds).map(|more| SEED + u64::from(more)).collect();
    let material = Material::new(Data::digits()?, mnist, seeds);
    let mut found = Vec::new();
    for (name, experiment) in EXPERIMENTS {
        if !is_chosen(&arguments.only, name) {
            continue;
        }
        eprintln!("{name}");
        let claim = experiment(&material).map_err(|error| format!("{name}: {error}"))?;
        print!("{}", claim.text());
        found.push(claim);
    }
    let limits = limits::measure(&arguments.only, &material)?;
    print!("\n{limits}");
    if arguments.write_docs {
        let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/training.md");
        let before =
            std::fs::read_to_string(&page).map_err(|error| format!("{}: {error}", page.display()))?;
        write_between(MARKS, &lines(&found, &limits, &before), page)?;
    }
    Ok(())
}

/// The beginning of the section of limits, and its end.
const LIMITS: [&str; 2] = ["\n**Limits**\n\n", "\n<!--"];

/// The table of claims, below it the numbers of each, and the limits. What was not measured stays
/// as it is on the page.
fn lines(found: &[Claim], limits: &str, before: &str) -> String {
    let mut text =
        "\n| source | claim | experiment | acceptance | found | verdict |\n|--|--|--|--|--|--|\n".to_owned();
    let of = |name| found.iter().find(|claim| claim.name == name);
    for (name, _) in EXPERIMENTS {
        text += &of(name).map_or_else(|| part(before, &format!("\n| {name} | "), "\n"), Claim::row);
    }
    for (name, _) in EXPERIMENTS {
        let heading = format!("\n**{name}**\n\n");
        text += &match of(name) {
            Some(claim) if claim.table.is_empty() => String::new(),
            Some(claim) => heading + &claim.table,
            None => part(before, &heading, "\n\n"),
        };
    }
    let [begin, end] = LIMITS;
    text + &if limits.is_empty() { part(before, begin, end) } else { format!("{begin}{limits}\n") }
}

/// The lines of the page from where these words begin to where those end; none if they are not
/// there.
fn part(page: &str, begin: &str, end: &str) -> String {
    let Some(start) = page.find(begin) else { return String::new() };
    let rest = &page[start + begin.len()..];
    let length = begin.len() + rest.find(end).unwrap_or(rest.len());
    let is_row = begin.starts_with("\n|");
    // A row without the line before it.
    page[start + usize::from(is_row)..start + length].to_owned() + "\n"
}

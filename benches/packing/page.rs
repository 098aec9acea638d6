//! `docs/packing.md`, all of it generated.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use pleach::packing::compare::{Comparison, Outcome};

use crate::servers::{COLLECTIVES, Server, rate};
use crate::targets::{Finding, as_f64, milliseconds};

const HEAD: &str = "# How good packings are\n\n\
Written by `cargo bench --bench packing -- --write-docs`. Rates are in GB/s, as in `pleach plan`: bytes of one rank's vector by time for\n\
broadcast and all-reduce, of the whole for all-gather. Every packing was accepted by the checker, which recomputes loads, trees and\n\
the bound from the links alone. These are rates of the links, not measured on GPUs.\n\n";

const ALLOCATIONS: &str = "All connected allocations of 3 to 8 GPUs, those that are alike once (`×` says how many there are). *ours* is the optimum, met exactly\n\
everywhere. *Blink* is its published method: multiplicative weights (ε = 0.1), few trees by an integer program, 5 % given up for\n\
that. *ring* is the most NVLink rings that fit; where there is none, a ring over PCIe, marked `p`: its rate is\n\
assumed to be half a link, was never measured, and enters no mean.\n\
*phases* is an optimal reduce-scatter followed by an optimal all-gather.\n\n";

/// Writes the page.
pub(crate) fn write(findings: &[Finding], servers: &[Server]) -> Result<(), String> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs");
    fs::create_dir_all(&folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    let path = folder.join("packing.md");
    let mut page = HEAD.to_owned();
    page += "## Targets\n\n\
             | what | within | took | rate / bound | trees | |\n|--|--:|--:|--:|--:|--|\n";
    for finding in findings {
        let (limit, time) = (milliseconds(finding.limit), milliseconds(finding.time));
        let _ = writeln!(
            page,
            "| {} | {limit} | {time} | {:.4} | {} | {} |",
            finding.what(),
            finding.least_share,
            finding.trees,
            finding.verdict()
        );
    }
    for server in servers {
        let _ = writeln!(page, "\n## Every allocation of {}\n\n{ALLOCATIONS}{}", server.name, means(server));
        page += &table(server);
    }
    fs::write(&path, page).map_err(|error| format!("{}: {error}", path.display()))
}

/// Ours by theirs, over all allocations.
fn means(server: &Server) -> String {
    let mut text = "| ours by | Blink: geometric mean | most | ring: geometric mean | most | phases: geometric mean | most |\n\
                    |--|--:|--:|--:|--:|--:|--:|\n"
        .to_owned();
    for (index, collective) in COLLECTIVES.into_iter().enumerate() {
        let _ = write!(text, "| {} |", collective.name());
        for strategy in ["blink", "ring", "reduce-scatter+all-gather"] {
            let cells = server.gain(index, strategy);
            let _ = match cells {
                Some((mean, largest)) => write!(text, " {mean:.3} | {largest:.2} |"),
                None => write!(text, " | |"),
            };
        }
        text += "\n";
    }
    text
}

fn table(server: &Server) -> String {
    let mut text = "\n| GPUs | × | broadcast: ours | Blink | ring | all-reduce: ours | Blink | ring | phases | all-gather: ours | Blink | ring |\n\
                    |--|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|\n"
        .to_owned();
    for (allocation, comparisons) in &server.rows {
        let ranks: Vec<String> = allocation.ranks.iter().map(ToString::to_string).collect();
        let _ = write!(text, "| {} | {} |", ranks.join(","), allocation.alike);
        for (index, comparison) in comparisons.iter().enumerate() {
            let mut strategies = vec!["optimal", "blink", "ring"];
            if index == 1 {
                strategies.push("reduce-scatter+all-gather");
            }
            for strategy in strategies {
                let _ = write!(text, " {} |", cell(comparison, strategy));
            }
        }
        text += "\n";
    }
    text
}

fn cell(comparison: &Comparison, strategy: &str) -> String {
    let Some(rate) = rate(comparison, strategy) else { return "-".to_owned() };
    let mark = match comparison.row(strategy).map(|row| &row.outcome) {
        Some(Outcome::OverPcie(_)) => " p",
        Some(Outcome::AtLeast(_)) => " or more",
        _ => "",
    };
    format!("{:.2}{mark}", as_f64(rate) / 1e9)
}

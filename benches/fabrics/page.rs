//! `docs/performance.md`: its measured part is written here, what people write around it is kept.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use crate::machine::Machine;
use crate::plot;
use crate::report::put_between;
use crate::results::Results;
use crate::rows::Row;
use crate::table::{goal_text, microseconds, size, times, verdict};

/// Around what is measured.
const MARKS: [&str; 2] = [
    "<!-- measured: written by cargo bench --bench fabrics -- --write-docs -->",
    "<!-- end of what is measured -->",
];

/// The page where there is none yet.
const HEAD: &str = "# Performance\n\npleach beside its peers on one machine. All tables and the picture come from one run of\n\n```sh\n\
    benches/install-peers\ncargo bench --bench fabrics -- --write-docs\n```\n\n";

/// Rows that are drawn.
const DRAWN: [&str; 2] = ["shm2", "tcp2"];

/// Writes the page and its picture.
pub(crate) fn write(rows: &[Row], results: &Results, machine: &Machine, rounds: u32) -> Result<(), String> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs");
    fs::create_dir_all(&folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    let path = folder.join("performance.md");
    let before = fs::read_to_string(&path).unwrap_or_else(|_| format!("{HEAD}{}\n", MARKS.join("\n")));
    let page = put_between(MARKS, &measured(rows, results, machine, rounds), &before)
        .map_err(|error| format!("{}: {error}", path.display()))?;
    fs::write(&path, page).map_err(|error| format!("{}: {error}", path.display()))?;
    let drawn: Vec<_> = rows.iter().filter(|row| DRAWN.contains(&row.name)).collect();
    let picture = path.with_extension("svg");
    fs::write(&picture, plot::svg(&drawn, results)).map_err(|error| format!("{}: {error}", picture.display()))
}

fn measured(rows: &[Row], results: &Results, machine: &Machine, rounds: u32) -> String {
    let mut text = String::from("\n![times over sizes](performance.svg)\n\n## Machine\n\n");
    for line in machine.lines() {
        let _ = writeln!(text, "* {line}");
    }
    for (what, value, unit) in machine.limits() {
        let _ = writeln!(text, "* {what}: {value:.1} {unit}");
    }
    let _ = writeln!(
        text,
        "\nTimes are medians over {rounds} rounds in which all took turns, each the median of samples of at\n\
         least 10 us. In brackets: how many times as many elements a second pleach does.\n\n## Goals\n\n| what | goal | found | |\n| --- | --- | --- | --- |"
    );
    for row in rows {
        for goal in &row.goals {
            let (word, found) = verdict(results, row, goal);
            let _ = writeln!(text, "| {} | {} | {found} | {word} |", row.title, goal_text(goal));
        }
    }
    for row in rows {
        let _ = writeln!(text, "\n## {}\n", row.title);
        let names: Vec<_> = row.runners.iter().map(|runner| format!("{} (us)", runner.name())).collect();
        let _ = writeln!(text, "| size | {} |\n| ---: |{}", names.join(" | "), " ---: |".repeat(names.len()));
        for bytes in &row.sizes {
            let cells = row.runners.iter().map(|runner| match results.median_us(row, *runner, *bytes) {
                Some(time) if *runner == row.runners[0] => microseconds(time),
                Some(time) => match results.speed(row, row.runners[0], *runner, *bytes) {
                    Some(speed) => format!("{} ({})", microseconds(time), times(speed)),
                    None => microseconds(time),
                },
                None => "-".to_owned(),
            });
            let _ = writeln!(text, "| {} | {} |", size(*bytes), cells.collect::<Vec<_>>().join(" | "));
        }
        for runner in &row.runners {
            if let Some(failure) = results.failure(row, *runner) {
                let _ = writeln!(text, "\n{}:\n{failure}", runner.name());
            }
        }
    }
    text.push('\n');
    text
}

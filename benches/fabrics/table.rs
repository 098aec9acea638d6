//! Tables as people read them.

use std::fmt::Write as _;
use std::io::Write as _;

use crate::machine::Machine;
use crate::results::{Results, Verdict};
use crate::rows::{Goal, Row, Runner};

/// All rows with their verdicts, for a terminal.
pub(crate) fn all(rows: &[Row], results: &Results, machine: &Machine) -> String {
    let mut text = String::new();
    for line in machine.lines() {
        let _ = writeln!(text, "# {line}");
    }
    for (what, value, unit) in machine.limits() {
        let _ = writeln!(text, "# {what}: {value:.1} {unit}");
    }
    let _ = writeln!(
        text,
        "# times in us; behind each, how many times as many elements a second the first column does"
    );
    for row in rows {
        let _ = writeln!(text, "\n{}: {}", row.name, row.title);
        let _ = write!(text, "{:>10}", "bytes");
        for runner in &row.runners {
            let width = if *runner == row.runners[0] { 14 } else { 22 };
            let _ = write!(text, "{:>width$}", runner.name());
        }
        for bytes in &row.sizes {
            let _ = write!(text, "\n{bytes:>10}");
            for runner in &row.runners {
                let time = results.median_us(row, *runner, *bytes);
                let _ = write!(text, "{:>14}", time.map_or_else(|| "-".to_owned(), microseconds));
                if *runner != row.runners[0] {
                    let speed = results.speed(row, row.runners[0], *runner, *bytes);
                    let _ = write!(text, "{:>8}", speed.map_or_else(String::new, times));
                }
            }
        }
        let _ = writeln!(text);
        for runner in &row.runners {
            if let Some(failure) = results.failure(row, *runner) {
                let _ = writeln!(text, "  {}: {failure}", runner.name());
            }
        }
        for goal in &row.goals {
            let (word, found) = verdict(results, row, goal);
            let _ = writeln!(text, "  {word:<12} {}: {found}", goal_text(goal));
        }
    }
    text
}

/// Whether a goal was met, and what was found.
pub(crate) fn verdict(results: &Results, row: &Row, goal: &Goal) -> (&'static str, String) {
    let range = |least: f64, greatest: f64| match times(least) == times(greatest) {
        true => times(least),
        false => format!("{} to {}", times(least), times(greatest)),
    };
    match results.verdict(row, goal) {
        Verdict::Met(least, greatest) => ("met", range(least, greatest)),
        Verdict::NotMet(least, greatest) => ("not met", range(least, greatest)),
        Verdict::Unknown(reason) => ("not measured", reason),
    }
}

/// A goal in words.
pub(crate) fn goal_text(goal: &Goal) -> String {
    let ours = match goal.ours {
        Runner::Pleach { element_bytes: 4, .. } | Runner::Signal => String::new(),
        ours => format!("{}, ", ours.name()),
    };
    let range = match (goal.from, goal.to) {
        (0, u64::MAX) => "all sizes".to_owned(),
        (from, u64::MAX) => format!("{} and up", size(from)),
        (0, to) => format!("below {}", size(to + 1)),
        (from, to) => format!("{} to {}", size(from), size(to)),
    };
    let against = match goal.against {
        [one] => one.name(),
        _ => "the best MPI",
    };
    format!("{ours}{range}: at least {} {against}'s speed", times(goal.speed))
}

/// Bytes as people say them.
pub(crate) fn size(bytes: u64) -> String {
    match bytes {
        bytes if bytes >= 1 << 20 && bytes.is_multiple_of(1 << 20) => format!("{} MiB", bytes >> 20),
        bytes if bytes >= 1 << 10 && bytes.is_multiple_of(1 << 10) => format!("{} KiB", bytes >> 10),
        bytes => format!("{bytes} B"),
    }
}

/// A time with three digits that count.
pub(crate) fn microseconds(time: f64) -> String {
    match time {
        time if time < 10.0 => format!("{time:.3}"),
        time if time < 100.0 => format!("{time:.2}"),
        time => format!("{time:.0}"),
    }
}

/// A ratio.
pub(crate) fn times(ratio: f64) -> String {
    if ratio < 10.0 { format!("{ratio:.2}x") } else { format!("{ratio:.1}x") }
}

/// On standard output.
pub(crate) fn print(text: &str) -> Result<(), String> {
    let mut out = std::io::stdout().lock();
    let written = out.write_all(text.as_bytes()).and_then(|()| out.flush());
    written.map_err(|error| format!("results not printed: standard output ({error}); give it a reader"))
}

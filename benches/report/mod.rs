//! What benches share: how they end, which of their rows are asked for, medians, and the part of a
//! page that a bench writes. It stands between two lines that mark it; what people write around
//! them is kept.

#![allow(dead_code)] // Not every bench needs all of it.

use std::fmt::Display;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Says why a bench failed, if it did.
pub(crate) fn ended(outcome: Result<(), impl Display>) -> ExitCode {
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Whether the name begins with one of these, or there are none.
pub(crate) fn is_chosen(only: &[String], name: &str) -> bool {
    only.is_empty() || only.iter().any(|only| name.starts_with(only))
}

/// Cargo's folder for what is built: this program is in `TARGET/release/deps`.
pub(crate) fn target() -> Result<PathBuf, String> {
    let program = std::env::current_exe().map_err(|error| format!("own program not found: {error}"))?;
    let target = program.ancestors().nth(3).map(PathBuf::from);
    target.ok_or_else(|| format!("{}: not in a target folder; run 'cargo bench'", program.display()))
}

/// Sorts the values, of which there is one at least, and takes the middle one: of an even number,
/// the greater of the two.
pub(crate) fn median(mut values: impl AsMut<[f64]>) -> f64 {
    let values = values.as_mut();
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Writes whole lines between the lines of the two marks of a page.
pub(crate) fn write_between(marks: [&str; 2], lines: &str, page: impl AsRef<Path>) -> Result<(), String> {
    let page = page.as_ref();
    let failed = |error: &dyn Display| format!("{}: {error}", page.display());
    let before = std::fs::read_to_string(page).map_err(|error| failed(&error))?;
    let after = put_between(marks, lines, &before).map_err(|error| failed(&error))?;
    std::fs::write(page, after).map_err(|error| failed(&error))
}

/// The page with these lines between its two marks.
pub(crate) fn put_between(marks: [&str; 2], lines: &str, page: &str) -> Result<String, String> {
    let [begin, end] = marks.map(|mark| place(mark, page));
    let (begin, end) = (begin?, end?);
    if end < begin {
        return Err(format!("'{}' stands before '{}'; exchange the two", marks[1], marks[0]));
    }
    Ok([&page[..begin], marks[0], "\n", lines, &page[end..]].concat())
}

/// Where the mark stands in the page.
fn place(mark: &str, page: &str) -> Result<usize, String> {
    match page.match_indices(mark).collect::<Vec<_>>()[..] {
        [(at, _)] => Ok(at),
        [] => Err(format!("it has no line '{mark}'; add it where the measured part belongs")),
        ref places => Err(format!("it has '{mark}' {} times; leave it once", places.len())),
    }
}

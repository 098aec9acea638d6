//! Standard output, and texts in JSON.

use std::fmt::Write as _;
use std::io::Write as _;

use super::CommandError;

/// Prints a result; who closes the pipe early has seen enough.
pub(super) fn print(what: &str, text: &str) -> Result<(), CommandError> {
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => Err(CommandError::failed(format!(
            "{what} not printed: standard output ({error}); write it elsewhere"
        ))),
        _ => Ok(()),
    }
}

/// A text as JSON has it.
pub(super) fn quoted(text: &str) -> String {
    let mut out = String::from('"');
    for character in text.chars() {
        // Writing into a `String` does not fail.
        let _ = match character {
            '"' | '\\' => write!(out, "\\{character}"),
            control if control < ' ' => write!(out, "\\u{:04x}", control as u32),
            other => write!(out, "{other}"),
        };
    }
    out.push('"');
    out
}

/// A list of values that are JSON already.
pub(super) fn list(items: impl IntoIterator<Item = String>) -> String {
    format!("[{}]", items.into_iter().collect::<Vec<_>>().join(","))
}

//! Standard output: text for people, JSON for programs.

use std::io::Write as _;

use serde_json::Value;

use super::CommandError;

/// Prints a result; a closed pipe is no error.
pub(super) fn print(what: &str, text: &str) -> Result<(), CommandError> {
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => Err(CommandError::failed(format!(
            "{what} not printed: standard output ({error}); write it elsewhere"
        ))),
        _ => Ok(()),
    }
}

/// Prints a value as one line of JSON.
pub(super) fn print_json(what: &str, value: &Value) -> Result<(), CommandError> {
    print(what, &format!("{value}\n"))
}

/// A number rounded to `places` decimal places.
pub(super) fn rounded(number: f64, places: i32) -> f64 {
    let unit = 10f64.powi(places);
    (number * unit).round() / unit
}

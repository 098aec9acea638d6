//! Standard output: text for people, JSON for programs.

use std::borrow::Cow;
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

/// Prints a remark beside the result.
pub(super) fn note(words: &str) {
    // Nobody is left to tell when standard error is closed.
    let _ = std::io::stderr().write_all(format!("note: {words}\n").as_bytes());
}

/// Prints a value as one line of JSON.
pub(super) fn print_json(what: &str, value: &Value) -> Result<(), CommandError> {
    print(what, &format!("{value}\n"))
}

/// Writes a line into a `String`, which takes all.
macro_rules! put {
    ($out:expr, $($what:tt)*) => {{
        use std::fmt::Write as _;
        let _ = writeln!($out, $($what)*);
    }};
}

pub(super) use put;

/// A text from outside in one line, with the characters escaped that terminals obey.
pub(super) fn visible(text: &str) -> Cow<'_, str> {
    if !text.contains(char::is_control) {
        return text.into();
    }
    let mut line = String::new();
    for character in text.chars() {
        if character.is_control() { line.extend(character.escape_default()) } else { line.push(character) }
    }
    line.into()
}

/// A text as XML holds it.
pub(super) fn escaped(text: &str) -> String {
    let visible = |character: char| if character.is_control() { ' ' } else { character };
    let text: String = text.chars().map(visible).collect();
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

/// A number rounded to `places` decimal places.
pub(super) fn rounded(number: f64, places: i32) -> f64 {
    let unit = 10f64.powi(places);
    (number * unit).round() / unit
}

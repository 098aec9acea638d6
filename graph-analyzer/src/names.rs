//! Names as the text form writes them: one word, or a text in quotes.

use std::fmt::Write as _;

/// A name as the text form writes it: in quotes if it would not be one word.
pub(crate) fn quoted(name: &str) -> String {
    let is_word = !name.is_empty() && word_length(name) == name.len() && !["-", "->"].contains(&name);
    // A symbol of digits would be a size.
    if is_word && !name.starts_with(|first: char| first.is_ascii_digit() || "+-.".contains(first)) {
        name.to_owned()
    } else {
        json_string(name)
    }
}

/// How many bytes at the start of a text belong to one word.
pub(crate) fn word_length(text: &str) -> usize {
    let is_inside = |letter: char| letter.is_ascii_alphanumeric() || "_./+-".contains(letter);
    let length = text.find(|letter| !is_inside(letter)).unwrap_or(text.len());
    // An arrow is a word of its own, also without white space before it.
    if text[length..].starts_with('>') && text[..length].ends_with('-') && length > 1 {
        length - 1
    } else {
        length
    }
}

/// A text in quotes, as JSON writes it.
pub(crate) fn json_string(text: &str) -> String {
    let mut written = String::with_capacity(text.len() + 2);
    written.push('"');
    for letter in text.chars() {
        match letter {
            '"' => written.push_str("\\\""),
            '\\' => written.push_str("\\\\"),
            // A control character is below 0x100.
            control if control.is_control() => drop(write!(written, "\\u{:04x}", control as u32)),
            other => written.push(other),
        }
    }
    written.push('"');
    written
}

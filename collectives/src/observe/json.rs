//! Text as a JSON string.

use std::fmt;

/// Written with its quotes.
pub(super) struct Quoted<'a>(pub(super) &'a str);

impl fmt::Display for Quoted<'_> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        use fmt::Write;
        formatter.write_char('"')?;
        for character in self.0.chars() {
            match character {
                '"' | '\\' => write!(formatter, "\\{character}")?,
                control if control < ' ' => write!(formatter, "\\u{:04x}", control as u32)?,
                other => formatter.write_char(other)?,
            }
        }
        formatter.write_char('"')
    }
}

#[cfg(test)]
mod tests {
    use super::Quoted;

    #[test]
    fn what_would_end_a_string_is_escaped() {
        assert_eq!(Quoted("a\"b\\c\nd é").to_string(), "\"a\\\"b\\\\c\\u000ad é\"");
    }
}

//! A text line by line and word by word, with the place of what is wrong.

use std::str::FromStr;

use super::{ParseError, Problem};

/// Most characters of the text that an error repeats.
const MAX_FOUND_CHARS: usize = 40;

/// A number in its shortest form.
pub(super) fn digits<T: FromStr>(word: &str) -> Option<T> {
    let shortest =
        word.bytes().all(|byte| byte.is_ascii_digit()) && (word.len() == 1 || !word.starts_with('0'));
    if shortest { word.parse().ok() } else { None }
}

/// The lines that say something, one after the other, and how far the present one is read.
pub(super) struct Lines<'a> {
    remaining: std::str::Lines<'a>,
    /// The present line without its comment; `None` at the end of the text.
    pub(super) line: Option<&'a str>,
    number: usize,
    /// How many bytes of the line are read, white space behind them included.
    pub(super) column: usize,
}

impl<'a> Lines<'a> {
    pub(super) fn new(text: &'a str) -> Self {
        let mut lines = Self { remaining: text.lines(), line: None, number: 0, column: 0 };
        lines.advance();
        lines
    }

    pub(super) fn advance(&mut self) {
        self.column = 0;
        for line in self.remaining.by_ref() {
            self.number += 1;
            let line = line.split('#').next().unwrap_or_default().trim_end();
            if !line.is_empty() {
                self.line = Some(line);
                self.skip_bytes(0);
                return;
            }
        }
        self.line = None;
        self.number += 1;
    }

    pub(super) fn rest(&self) -> &'a str {
        self.line.map_or("", |line| &line[self.column..])
    }

    pub(super) fn skip_bytes(&mut self, count: usize) {
        let rest = &self.rest()[count..];
        self.column += count + (rest.len() - rest.trim_start().len());
    }

    /// What stands here up to white space or a symbol.
    pub(super) fn word(&self) -> &'a str {
        let rest = self.rest();
        let ends = |character: char| !(character.is_alphanumeric() || character == '-' || character == '_');
        let word = &rest[..rest.find(ends).unwrap_or(rest.len())];
        // "a->b" is a word, a symbol and a word.
        word.strip_suffix('-').filter(|word| rest[word.len()..].starts_with("->")).unwrap_or(word)
    }

    pub(super) fn skip_word(&mut self) {
        self.skip_bytes(self.word().len());
    }

    pub(super) fn starts_with(&self, word: &str) -> bool {
        self.word() == word
    }

    pub(super) fn at(&self, symbol: &str) -> bool {
        self.rest().starts_with(symbol)
    }

    pub(super) fn keyword(&mut self, word: &str, what: &'static str) -> Result<(), ParseError> {
        if !self.starts_with(word) {
            return Err(self.expected(what));
        }
        self.skip_word();
        Ok(())
    }

    pub(super) fn symbol(&mut self, symbol: &str, what: &'static str) -> Result<(), ParseError> {
        if !self.at(symbol) {
            return Err(self.expected(what));
        }
        self.skip_bytes(symbol.len());
        Ok(())
    }

    pub(super) fn number<T: FromStr>(&mut self, what: &'static str) -> Result<T, ParseError> {
        let word = self.word();
        let number = if word.is_empty() { None } else { digits(word) };
        let number = number.ok_or_else(|| self.expected(what))?;
        self.skip_word();
        Ok(number)
    }

    pub(super) fn number_up_to(
        &mut self,
        what: &'static str,
        of: &'static str,
        most: u32,
    ) -> Result<u32, ParseError> {
        let column = self.column;
        let number = self.number(what)?;
        if number > most {
            return Err(self.error_at(column, Problem::TooMany { what: of, most: u64::from(most) }));
        }
        Ok(number)
    }

    pub(super) fn in_order(&mut self, what: &'static str, number: u64) -> Result<(), ParseError> {
        let column = self.column;
        let found: u64 = self.number("a number")?;
        if found != number {
            return Err(self.error_at(column, Problem::OutOfOrder { what, number, found }));
        }
        Ok(())
    }

    /// The line has been read to its end; on to the next.
    pub(super) fn end(&mut self) -> Result<(), ParseError> {
        if !self.rest().is_empty() {
            return Err(self.expected("the end of the line"));
        }
        self.advance();
        Ok(())
    }

    pub(super) fn expected(&self, what: &'static str) -> ParseError {
        let found = match self.line {
            None => "the end of the text".to_owned(),
            Some(_) if self.rest().is_empty() => "the end of the line".to_owned(),
            Some(_) if self.word().is_empty() => quote(self.rest()),
            Some(_) => quote(self.word()),
        };
        self.error_at(self.column, Problem::Expected { what, found })
    }

    pub(super) fn too_many(&self, what: &'static str, most: u64) -> ParseError {
        self.error_at(0, Problem::TooMany { what, most })
    }

    pub(super) fn error_at(&self, column: usize, problem: Problem) -> ParseError {
        let characters = self.line.map_or(0, |line| line[..column.min(line.len())].chars().count());
        ParseError { line: self.number, column: characters + 1, problem }
    }
}

pub(super) fn quote(text: &str) -> String {
    let shown: String = text.chars().take(MAX_FOUND_CHARS).flat_map(char::escape_debug).collect();
    format!("'{shown}'")
}

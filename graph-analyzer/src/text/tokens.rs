//! The tokens of a text: words, texts in quotes, symbols.

use std::str::FromStr;

use super::TextError;
use crate::names::word_length;

/// Walks over a text, token by token. A clone is a place in it.
#[derive(Clone)]
pub(super) struct Tokens<'a> {
    text: &'a str,
    /// Where the next token begins.
    at: usize,
    line: usize,
}

/// One token.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Token<'a> {
    Word(&'a str),
    /// With its quotes.
    Quoted(&'a str),
    Symbol(char),
    End,
}

impl<'a> Tokens<'a> {
    pub(super) fn new(text: &'a str) -> Self {
        let mut tokens = Self { text, at: 0, line: 1 };
        tokens.skip_space();
        tokens
    }

    /// The error that something else was expected than the next token.
    pub(super) fn expected(&self, what: &'static str) -> TextError {
        /// Longer texts are cut.
        const LETTERS_SHOWN: usize = 24;
        let rest = &self.text[self.at..];
        let line = rest.lines().next().unwrap_or_default();
        let shown: String = line.chars().take(LETTERS_SHOWN).collect();
        let found = if rest.is_empty() { "the end".to_owned() } else { format!("'{}'", shown.trim_end()) };
        TextError::Expected { line: self.line, what, found }
    }

    /// Skips a word if it is the next one.
    pub(super) fn skip(&mut self, word: &str) -> bool {
        let is_next = self.token().0 == Token::Word(word);
        if is_next {
            self.advance(word.len());
        }
        is_next
    }

    pub(super) fn keyword(&mut self, word: &str, what: &'static str) -> Result<(), TextError> {
        if self.skip(word) { Ok(()) } else { Err(self.expected(what)) }
    }

    pub(super) fn at_symbol(&self, symbol: char) -> bool {
        self.token().0 == Token::Symbol(symbol)
    }

    pub(super) fn skip_symbol(&mut self, symbol: char) -> bool {
        let is_next = self.at_symbol(symbol);
        if is_next {
            self.advance(symbol.len_utf8());
        }
        is_next
    }

    pub(super) fn symbol(&mut self, symbol: char) -> Result<(), TextError> {
        const SYMBOLS: [(char, &str); 7] = [
            ('(', "'('"),
            (')', "',' or ')'"),
            ('[', "'['"),
            (']', "',' or ']'"),
            ('{', "'{'"),
            ('}', "',' or '}'"),
            ('=', "'='"),
        ];
        let what = SYMBOLS.iter().find(|known| known.0 == symbol).map_or("a symbol", |known| known.1);
        if self.skip_symbol(symbol) { Ok(()) } else { Err(self.expected(what)) }
    }

    /// A word, or a text in quotes.
    pub(super) fn name(&mut self, what: &'static str) -> Result<String, TextError> {
        self.name_or_quoted(what).map(|(name, _)| name)
    }

    /// A word or a text, and whether it stood in quotes.
    pub(super) fn name_or_quoted(&mut self, what: &'static str) -> Result<(String, bool), TextError> {
        let (token, length) = self.token();
        let name = match token {
            Token::Word(word) if !["-", "->"].contains(&word) => (word.to_owned(), false),
            Token::Quoted(text) => (unquoted(text).ok_or_else(|| self.expected(what))?, true),
            _ => return Err(self.expected(what)),
        };
        self.advance(length);
        Ok(name)
    }

    pub(super) fn number<Number: FromStr>(&mut self, what: &'static str) -> Result<Number, TextError> {
        self.next_if_number().ok_or_else(|| self.expected(what))
    }

    /// The next word, if it is a number.
    pub(super) fn next_if_number<Number: FromStr>(&mut self) -> Option<Number> {
        let (Token::Word(word), length) = self.token() else { return None };
        let number = word.parse().ok()?;
        self.advance(length);
        Some(number)
    }

    pub(super) fn end(&mut self, what: &'static str) -> Result<(), TextError> {
        if self.token().0 == Token::End { Ok(()) } else { Err(self.expected(what)) }
    }

    /// The next token and its length in bytes.
    fn token(&self) -> (Token<'a>, usize) {
        let rest = &self.text[self.at..];
        let Some(first) = rest.chars().next() else { return (Token::End, 0) };
        if rest.starts_with("->") {
            return (Token::Word("->"), 2);
        }
        let length = word_length(rest);
        if length > 0 {
            return (Token::Word(&rest[..length]), length);
        }
        if first != '"' {
            return (Token::Symbol(first), first.len_utf8());
        }
        let mut is_escaped = false;
        for (place, letter) in rest.char_indices().skip(1) {
            match letter {
                '\n' => break,
                _ if is_escaped => is_escaped = false,
                '\\' => is_escaped = true,
                '"' => return (Token::Quoted(&rest[..=place]), place + 1),
                _ => {}
            }
        }
        // A quote that no other closes.
        (Token::Symbol(first), 1)
    }

    fn advance(&mut self, length: usize) {
        self.at += length;
        self.skip_space();
    }

    fn skip_space(&mut self) {
        loop {
            let rest = &self.text[self.at..];
            let trimmed = rest.trim_start();
            let space = rest.len() - trimmed.len();
            self.line += rest[..space].matches('\n').count();
            self.at += space;
            if !trimmed.starts_with('#') {
                return;
            }
            self.at += trimmed.find('\n').unwrap_or(trimmed.len());
        }
    }
}

/// What stands between quotes.
fn unquoted(text: &str) -> Option<String> {
    serde_json::from_str(text).ok()
}

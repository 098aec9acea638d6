//! A table of ranks: a line for a name or pattern of nodes.
//!
//! ```text
//! # pattern rank; the first line that matches a node decides
//! layer1/*   0
//! layer?/conv 1
//! *          2
//! ```
//!
//! `*` stands for any text, `?` for one letter. What follows a `#` after white space is a comment.

use pleach_vocabulary::Rank;

use super::{PlacementError, RANKS_MAX};
use crate::graph::{Graph, NAME_BYTES_MAX};

/// Most lines of a table.
const LINES_MAX: usize = 1 << 16;

/// A pattern and its rank.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Line {
    number: usize,
    pattern: String,
    rank: Rank,
}

/// Ranks by names of nodes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Table {
    lines: Vec<Line>,
}

/// Why a text is no table of a graph.
#[derive(Clone, pleach_derive::ErrorDebug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TableError {
    /// A line has another form.
    #[error("line {line} of the table: expected a name or pattern and a rank, found '{found}'")]
    Form {
        /// The line.
        line: usize,
        /// The line's text, shortened.
        found: String,
    },
    /// There are too many lines.
    #[error("the table has more than {LINES_MAX} lines; use patterns")]
    TooLong,
    /// No node has the name.
    #[error("line {line} of the table: no node matches '{pattern}'; {nearest}")]
    NoSuchNode {
        /// The line.
        line: usize,
        /// The pattern.
        pattern: String,
        /// The nearest name, in words.
        nearest: String,
    },
}

impl Table {
    /// Reads a table.
    ///
    /// # Errors
    ///
    /// [`TableError`] says the line that is none.
    pub fn parse(text: &str) -> Result<Self, TableError> {
        let mut lines = Vec::new();
        for (number, line) in (1..).zip(text.lines()) {
            if number > LINES_MAX {
                return Err(TableError::TooLong);
            }
            let line = line.trim();
            let line = line.find(" #").map_or(line, |comment| line[..comment].trim_end());
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            /// Longer lines are cut.
            const LETTERS_SHOWN: usize = 40;
            let wrong =
                || TableError::Form { line: number, found: line.chars().take(LETTERS_SHOWN).collect() };
            let (pattern, rank) = line.rsplit_once(char::is_whitespace).ok_or_else(wrong)?;
            let rank = rank.parse().ok().filter(|&rank| rank < RANKS_MAX).ok_or_else(wrong)?;
            let pattern = pattern.trim_end();
            if pattern.len() > NAME_BYTES_MAX {
                return Err(wrong());
            }
            lines.push(Line { number, pattern: pattern.to_owned(), rank });
        }
        Ok(Self { lines })
    }

    /// The rank of each node that is placed.
    pub(super) fn ranks_of(&self, graph: &Graph) -> Result<Vec<Option<Rank>>, PlacementError> {
        for line in &self.lines {
            if !graph.nodes().iter().any(|node| matches(&line.pattern, &node.name)) {
                let nearest = nearest(&line.pattern, graph);
                let nearest =
                    nearest.map_or_else(|| "correct it".to_owned(), |name| format!("did you mean '{name}'?"));
                let (line, pattern) = (line.number, line.pattern.clone());
                return Err(TableError::NoSuchNode { line, pattern, nearest }.into());
            }
        }
        let mut ranks = vec![None; graph.nodes().len()];
        for id in graph.placed_nodes() {
            let name = &graph.node(id).name;
            let line = self.lines.iter().find(|line| matches(&line.pattern, name));
            let unplaced = || PlacementError::Unplaced { node: name.clone(), what: "line in the table" };
            ranks[id.index()] = Some(line.ok_or_else(unplaced)?.rank);
        }
        Ok(ranks)
    }
}

/// Whether a pattern stands for a name.
fn matches(pattern: &str, name: &str) -> bool {
    let (pattern, name): (Vec<char>, Vec<char>) = (pattern.chars().collect(), name.chars().collect());
    let (mut at, mut place) = (0, 0);
    // After the last star: the place in the pattern, and how far its text reaches.
    let mut star: Option<(usize, usize)> = None;
    while place < name.len() {
        match pattern.get(at) {
            Some('*') => {
                star = Some((at + 1, place));
                at += 1;
            }
            Some(&letter) if letter == '?' || letter == name[place] => {
                at += 1;
                place += 1;
            }
            _ => {
                let Some((after, reached)) = star else { return false };
                star = Some((after, reached + 1));
                (at, place) = (after, reached + 1);
            }
        }
    }
    pattern[at..].iter().all(|&letter| letter == '*')
}

/// The name with the longest common beginning, if it has a half of the pattern.
fn nearest<'a>(pattern: &str, graph: &'a Graph) -> Option<&'a str> {
    let common =
        |name: &str| pattern.chars().zip(name.chars()).take_while(|(one, other)| one == other).count();
    let names = graph.nodes().iter().map(|node| node.name.as_str());
    names.filter(|name| common(name) * 2 >= pattern.chars().count()).max_by_key(|name| common(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_stand_for_names() {
        for (pattern, name) in
            [("a", "a"), ("*", ""), ("*", "abc"), ("a*c", "abbc"), ("a?c", "abc"), ("*b*b", "abab")]
        {
            assert!(matches(pattern, name), "{pattern} {name}");
        }
        for (pattern, name) in [("a", "ab"), ("", "a"), ("a?c", "ac"), ("a*b", "abc"), ("?", "")] {
            assert!(!matches(pattern, name), "{pattern} {name}");
        }
    }

    #[test]
    fn a_table_has_a_pattern_and_a_rank_a_line() {
        let table = Table::parse("# all\nconv 1/a 0 # first\n\n* 1\n").expect("it is a table");
        assert_eq!(table.lines[0], Line { number: 2, pattern: "conv 1/a".to_owned(), rank: 0 });
        assert_eq!(table.lines[1].rank, 1);
        assert!(
            Table::parse("conv").is_err()
                && Table::parse("* -1").is_err()
                && Table::parse("* 99999").is_err()
        );
    }
}

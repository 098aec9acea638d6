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

use std::collections::HashMap;
use std::str::Chars;

use pleach_vocabulary::Rank;

use super::{PlacementError, RANKS_MAX};
use crate::graph::{Graph, NAME_BYTES_MAX, NodeId};

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
            let line = without_comment(line).trim();
            if line.is_empty() {
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
        // Names are looked up; patterns are compared with each node.
        let is_pattern = |line: &&Line| line.pattern.contains(['*', '?']);
        let (patterns, names): (Vec<&Line>, Vec<&Line>) = self.lines.iter().partition(is_pattern);
        let mut by_name: HashMap<&str, &Line> = HashMap::new();
        for line in names {
            by_name.entry(&line.pattern).or_insert(line);
        }
        let mut ranks = vec![None; graph.nodes().len()];
        let mut is_found = vec![false; self.lines.last().map_or(0, |line| line.number + 1)];
        for (place, node) in graph.nodes().iter().enumerate() {
            let named = by_name.get(node.name.as_str()).copied();
            named.iter().for_each(|line| is_found[line.number] = true);
            let mut first = named;
            for line in &patterns {
                let is_earlier = first.is_none_or(|first| line.number < first.number);
                if (is_earlier || !is_found[line.number]) && matches(&line.pattern, &node.name) {
                    is_found[line.number] = true;
                    first = if is_earlier { Some(line) } else { first };
                }
            }
            let id = NodeId(place as u32);
            ranks[place] = first.filter(|_| !graph.is_constant(id)).map(|line| line.rank);
        }
        // A name that stands twice is found by its first line.
        let is_found = |line: &&Line| {
            is_found[line.number]
                || by_name.get(line.pattern.as_str()).is_some_and(|first| is_found[first.number])
        };
        if let Some(line) = self.lines.iter().find(|line| !is_found(line)) {
            let nearest = nearest(&line.pattern, graph);
            let nearest =
                nearest.map_or_else(|| "correct it".to_owned(), |name| format!("did you mean '{name}'?"));
            let (line, pattern) = (line.number, line.pattern.clone());
            return Err(TableError::NoSuchNode { line, pattern, nearest }.into());
        }
        for id in graph.placed_nodes() {
            if ranks[id.index()].is_none() {
                let node = graph.node(id).name.clone();
                return Err(PlacementError::Unplaced { node, what: "line in the table" });
            }
        }
        Ok(ranks)
    }
}

/// A line up to a `#` at its start or after white space.
fn without_comment(line: &str) -> &str {
    let begins = |&(at, _): &(usize, &str)| line[..at].chars().next_back().is_none_or(char::is_whitespace);
    line.match_indices('#').find(begins).map_or(line, |(at, _)| &line[..at])
}

/// Whether a pattern stands for a name.
fn matches(pattern: &str, name: &str) -> bool {
    let (mut pattern, mut name) = (pattern.chars(), name.chars());
    // After the last star: the rest of the pattern, and the name behind the star's text.
    let mut star: Option<(Chars<'_>, Chars<'_>)> = None;
    loop {
        let name_before = name.clone();
        match (pattern.next(), name.next()) {
            (None, None) => return true,
            (Some('*'), _) => {
                star = Some((pattern.clone(), name_before.clone()));
                name = name_before;
            }
            (Some(wanted), Some(letter)) if wanted == '?' || wanted == letter => {}
            // What is left of the pattern needs more letters than there are.
            (Some(_), None) => return false,
            _ => {
                let Some((after, text)) = &mut star else { return false };
                text.next();
                (pattern, name) = (after.clone(), text.clone());
            }
        }
    }
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
        for (pattern, name) in [
            ("a", "a"),
            ("*", ""),
            ("", ""),
            ("a**", "a"),
            ("*a", "aba"),
            ("*", "abc"),
            ("a*c", "abbc"),
            ("a?c", "abc"),
            ("*b*b", "abab"),
        ] {
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
        let commented = Table::parse("a 0\t# of 'a'\n\t# none\nlayer#1 2\n#b 3").expect("it is a table");
        let lines: Vec<(&str, Rank)> =
            commented.lines.iter().map(|line| (line.pattern.as_str(), line.rank)).collect();
        assert_eq!(lines, [("a", 0), ("layer#1", 2)]);
        assert!(
            Table::parse("conv").is_err()
                && Table::parse("* -1").is_err()
                && Table::parse("* 99999").is_err()
        );
    }
}

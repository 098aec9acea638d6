//! The text forms of LIBSVM: samples (`label index:value ...`, a line each) and models.
//!
//! **Invariant:** a file can be hostile. A line has a limit, an index has a limit, and memory grows
//! with what is really there.

use std::io::{self, BufRead, Read as _};

use super::samples::{FeatureError, Samples};

mod model;

pub use model::{ModelError, read_model, write_model};

/// Most bytes of a line.
const LINE_BYTES_MAX: u64 = 1 << 28;
/// Characters of a wrong word that an error shows.
const SHOWN_MAX: usize = 40;

/// Samples that were read.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Text {
    /// The samples that were kept. Their number of features is that of all samples.
    pub samples: Samples,
    /// Their labels.
    pub labels: Vec<i32>,
    /// How many samples the text has, kept or not.
    pub rows: usize,
}

/// Why there are no samples.
#[derive(pleach_derive::ErrorDebug, thiserror::Error)]
#[non_exhaustive]
pub enum TextError {
    /// The text cannot be read.
    #[error("it cannot be read ({0}); check the file and its permissions")]
    Unreadable(#[from] io::Error),
    /// There is no sample in it.
    #[error("it has no samples; give lines of the form 'label index:value ...'")]
    Empty,
    /// Something in it is wrong.
    #[error("line {line}, column {column}: {defect}")]
    Bad {
        /// From 1.
        line: usize,
        /// In bytes, from 1.
        column: usize,
        /// What is wrong.
        defect: Defect,
    },
}

/// An error in a text.
#[derive(pleach_derive::ErrorDebug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Defect {
    /// A label that is no whole number.
    #[error("the label '{0}' is no whole number of 32 bits; give the classes numbers")]
    Label(String),
    /// No pair.
    #[error("'{0}' is no pair of an index and a value; write 'index:value'")]
    Pair(String),
    /// An index that is no number.
    #[error("the index '{0}' is no number from 0; number the features from 1")]
    Index(String),
    /// A value that is no number.
    #[error("the value '{0}' is no number; write it like 0.5 or 1e-3")]
    Value(String),
    /// A feature that cannot be there.
    #[error(transparent)]
    Feature(#[from] FeatureError),
    /// A line without an end.
    #[error("the line has more than {LINE_BYTES_MAX} bytes; check that it is a text")]
    Long,
}

/// Reads samples, and keeps those for whose number `keeps` returns true. All are checked. An index
/// is kept as it stands, so the first feature usually has the index 1. Text behind `#` is skipped.
///
/// # Errors
///
/// See [`TextError`].
pub fn read(mut text: impl BufRead, mut keeps: impl FnMut(usize) -> bool) -> Result<Text, TextError> {
    let mut found = Text::default();
    let (mut line, mut pairs, mut unkept) = (Vec::new(), Vec::new(), Samples::new(0));
    for number in 1.. {
        line.clear();
        if text.by_ref().take(LINE_BYTES_MAX + 1).read_until(b'\n', &mut line)? == 0 {
            break;
        }
        let bad = |(column, defect)| TextError::Bad { line: number, column, defect };
        if line.len() as u64 > LINE_BYTES_MAX {
            return Err(bad((LINE_BYTES_MAX as usize, Defect::Long)));
        }
        pairs.clear();
        let Some(label) = parse_line(&line, &mut pairs).map_err(bad)? else { continue };
        let is_kept = keeps(found.rows);
        let samples = if is_kept { &mut found.samples } else { &mut unkept };
        // What the line was found to be, so this refuses nothing.
        samples.push(pairs.iter().copied()).map_err(|error| bad((1, error.into())))?;
        if is_kept {
            found.labels.push(label);
        } else {
            unkept.clear();
        }
        found.rows += 1;
    }
    if found.rows == 0 {
        return Err(TextError::Empty);
    }
    found.samples.widen(unkept.features());
    Ok(found)
}

type Pairs = Vec<(u32, f64)>;

/// The label of a line, whose features become `pairs`; `None` for a line without a sample.
fn parse_line(line: &[u8], pairs: &mut Pairs) -> Result<Option<i32>, (usize, Defect)> {
    let mut words = words(line);
    let Some((column, label)) = words.next() else { return Ok(None) };
    let label = number(label)
        .filter(|label| label.fract() == 0.0 && (f64::from(i32::MIN)..=f64::from(i32::MAX)).contains(label))
        .ok_or_else(|| (column, Defect::Label(shown(label))))? as i32;
    features(words, pairs)?;
    Ok(Some(label))
}

/// Adds the pairs of an index and a value to `pairs`.
fn features<'a>(
    words: impl Iterator<Item = (usize, &'a [u8])>,
    pairs: &mut Pairs,
) -> Result<(), (usize, Defect)> {
    for (column, word) in words {
        let colon = word.iter().position(|byte| *byte == b':');
        let (index, value) = match colon {
            Some(colon) => (&word[..colon], &word[colon + 1..]),
            None => return Err((column, Defect::Pair(shown(word)))),
        };
        let parsed =
            std::str::from_utf8(index).ok().filter(|digits| digits.bytes().all(|b| b.is_ascii_digit()));
        // An index beyond 32 bits is too large all the same.
        let parsed =
            parsed.filter(|digits| !digits.is_empty()).map(|digits| digits.parse().unwrap_or(u32::MAX));
        let index = parsed.ok_or_else(|| (column, Defect::Index(shown(index))))?;
        let value_column = column + word.len() - value.len();
        let value = number(value).ok_or_else(|| (value_column, Defect::Value(shown(value))))?;
        if let Some(error) = Samples::refusal(pairs.last().map(|(before, _)| *before), index, value) {
            return Err((column, error.into()));
        }
        pairs.push((index, value));
    }
    Ok(())
}

/// The words of a line before any `#`, with their columns from 1.
fn words(line: &[u8]) -> impl Iterator<Item = (usize, &[u8])> {
    let end = line.iter().position(|byte| *byte == b'#').unwrap_or(line.len());
    let mut at = 0;
    std::iter::from_fn(move || {
        let start = at + line[at..end].iter().position(|byte| !byte.is_ascii_whitespace())?;
        let length = line[start..end].iter().position(u8::is_ascii_whitespace).unwrap_or(end - start);
        at = start + length;
        Some((start + 1, &line[start..at]))
    })
}

fn number(word: &[u8]) -> Option<f64> {
    std::str::from_utf8(word).ok()?.parse().ok()
}

/// The beginning of a word, for an error.
fn shown(word: &[u8]) -> String {
    let text = String::from_utf8_lossy(word);
    text.chars().take(SHOWN_MAX).flat_map(char::escape_debug).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_are_read_with_all_features_and_only_those_asked_for() {
        let text = b"+1 1:0.5 3:-2\n\n-1  2:1e-3\t9:4 # 77:x\r\n# nothing\n1.0\n";
        let all = read(&text[..], |_| true).expect("is well formed");
        assert_eq!((all.rows, &all.labels[..], all.samples.features()), (3, &[1, -1, 1][..], 10));
        assert_eq!(all.samples.nonzero(0).collect::<Vec<_>>(), [(1, 0.5), (3, -2.0)]);
        assert_eq!(all.samples.nonzero(1).collect::<Vec<_>>(), [(2, 1e-3), (9, 4.0)]);
        let last = read(&text[..], |row| row == 2).expect("is well formed");
        assert_eq!((last.rows, &last.labels[..], last.samples.features()), (3, &[1][..], 10));
        assert_eq!(last.samples.nonzero(0).count(), 0);
    }

    #[test]
    fn what_is_wrong_is_named_with_its_line_and_column() {
        for (text, expected) in [
            ("1 1:2\nx 1:2\n", "line 2, column 1: the label 'x'"),
            ("1.5 1:2", "line 1, column 1: the label '1.5'"),
            ("nan 1:2", "line 1, column 1: the label 'nan'"),
            ("3000000000 1:2", "line 1, column 1: the label"),
            ("1 1:2 2", "line 1, column 7: '2' is no pair"),
            ("1 1:2\n-1 -3:1", "line 2, column 4: the index '-3'"),
            ("1 :1", "line 1, column 3: the index ''"),
            ("1 2:1 2:1", "line 1, column 7: feature 2 stands behind feature 2"),
            ("1 3:1  2:1", "line 1, column 8: feature 2 stands behind feature 3"),
            ("1 99999999999999999999:1", "line 1, column 3: feature 4294967295 is beyond the limit"),
            ("1 1:x", "line 1, column 5: the value 'x'"),
            ("1 1:nan", "line 1, column 3: feature 1 is not a finite"),
            ("1 1:inf", "line 1, column 3: feature 1 is not a finite"),
            ("1 1:1e300", "line 1, column 3: feature 1 is not a finite"),
            ("1 1:\u{1b}[31m", "the value '\\u{1b}[31m'"),
            ("", "no samples"),
            (" \n#1 1:1\n", "no samples"),
        ] {
            let error = read(text.as_bytes(), |_| false).expect_err(text).to_string();
            assert!(error.contains(expected), "{text:?}: {error}");
            assert_eq!(error, read(text.as_bytes(), |_| true).expect_err(text).to_string());
        }
        assert!(read(&b"\xff 1:1"[..], |_| true).is_err());
    }
}

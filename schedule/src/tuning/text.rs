//! The text form of a tuning file.
//!
//! ```text
//! pleach tuning 1
//!
//! world shm 1x4
//! near latency_ns 3.100e2 message_ns 1.180e2 put_bytes_per_s 2.190e10 combine_bytes_per_s 5.100e9
//! # collective         from algorithm            access window chunk
//! all-reduce              0 exchange             put         -  # at 8: 1.21 us; direct mapped 1.90 us
//! all-reduce             4K direct               mapped     16
//! all-reduce             4M ring                 put         -   64K
//! ```
//!
//! A line says one thing; what follows a `#` is for people. Sizes are bytes with K, M or G for
//! 2^10, 2^20 and 2^30, `-` leaves access or window to be chosen, and where no chunk stands that is
//! chosen as well. `far` has the form of `near`, for the links between hosts.

use std::fmt::{self, Write};
use std::str::FromStr;

use pleach_vocabulary::{Collective, UnknownName};

use super::error::{TuningFault, TuningParseError};
use super::{Tuning, TuningNote, TuningRow, TuningTable, Variant};
use crate::cost::CostModel;
use crate::generate::{Access, Algorithm};

/// The first line.
pub(super) const HEADER: &str = "pleach tuning 1";

/// Most rows that a file may have: collectives times sizes times worlds.
pub(super) const ROWS_MAX: usize = 10_000;

/// Largest size that a row may begin at, in bytes.
const FROM_BYTES_MAX: u64 = 1 << 50;

/// The numbers of a model, as they are called and in the order in which they are written.
const MODEL: [&str; 4] = ["latency_ns", "message_ns", "put_bytes_per_s", "combine_bytes_per_s"];

/// A model as its text says it, with four digits.
pub(super) fn as_written(model: &CostModel) -> CostModel {
    let mut words = written(model).into_iter();
    let mut next = || words.next().and_then(|(_, number)| number.parse().ok()).unwrap_or(f64::MAX);
    CostModel {
        latency_s: next() / 1e9,
        message_s: next() / 1e9,
        bytes_per_s: next(),
        reduce_bytes_per_s: next(),
    }
}

fn written(model: &CostModel) -> [(&'static str, String); 4] {
    let CostModel { latency_s, message_s, bytes_per_s, reduce_bytes_per_s } = *model;
    let numbers = [latency_s * 1e9, message_s * 1e9, bytes_per_s, reduce_bytes_per_s];
    std::array::from_fn(|index| (MODEL[index], format!("{:.3e}", numbers[index])))
}

/// The text of what is chosen.
pub(super) fn without_notes(tuning: &Tuning) -> String {
    let mut text = String::new();
    for table in &tuning.tables {
        // Writing to a string does not fail.
        let _ = write_table(&mut text, table, false);
    }
    text
}

impl fmt::Display for Tuning {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(formatter, "{HEADER}")?;
        for table in &self.tables {
            write!(formatter, "\n{table}")?;
        }
        Ok(())
    }
}

impl fmt::Display for TuningTable {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_table(formatter, self, true)
    }
}

fn write_table(out: &mut dyn Write, table: &TuningTable, with_notes: bool) -> fmt::Result {
    writeln!(out, "world {} {}", table.fabric, table.hosts)?;
    if let Some((near, far)) = &table.models {
        for (name, model) in [("near", near), ("far", far)] {
            write!(out, "{name}")?;
            for (what, number) in written(model) {
                write!(out, " {what} {number}")?;
            }
            writeln!(out)?;
        }
    }
    if with_notes {
        writeln!(
            out,
            "# {:<14} {:>8} {:<20} {:<6} {:>6} {:>5}",
            "collective", "from", "algorithm", "access", "window", "chunk"
        )?;
    }
    for TuningRow { collective, from_bytes, variant, note } in &table.rows {
        let access = variant.access.map_or("-".to_owned(), |access| access.to_string());
        let window = variant.window.map_or("-".to_owned(), |window| window.to_string());
        let (name, from, algorithm) = (collective.name(), Size(*from_bytes), variant.algorithm.to_string());
        write!(out, "{name:<16} {:>8} {algorithm:<20} {access:<6} {window:>6}", from.to_string())?;
        if let Some(bytes) = variant.chunk_bytes {
            write!(out, " {:>5}", Size(bytes).to_string())?;
        }
        if let Some(note) = note.as_ref().filter(|_| with_notes) {
            write!(out, "  # {note}")?;
        }
        writeln!(out)?;
    }
    Ok(())
}

impl fmt::Display for TuningNote {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "at {}: {:.2} us", Size(self.bytes), self.seconds * 1e6)?;
        let Some((variant, seconds)) = &self.next else { return Ok(()) };
        write!(formatter, "; {variant} {:.2} us", seconds * 1e6)
    }
}

impl FromStr for Tuning {
    type Err = TuningParseError;

    fn from_str(text: &str) -> Result<Self, TuningParseError> {
        let mut tuning = Self::default();
        let mut is_begun = false;
        let mut rows = 0;
        for (number, whole) in (1..).zip(text.lines()) {
            let line = whole.split('#').next().unwrap_or_default().trim();
            let at = |error| TuningParseError { line: number, error: Box::new(error) };
            if line.is_empty() {
                continue;
            }
            if !is_begun {
                if line != HEADER {
                    return Err(at(TuningFault::Header { found: shortened(line) }));
                }
                is_begun = true;
                continue;
            }
            tuning.read_line(&line.split_whitespace().collect::<Vec<_>>()).map_err(at)?;
            rows += 1;
            if rows > ROWS_MAX {
                return Err(at(TuningFault::TooMany));
            }
        }
        if is_begun {
            Ok(tuning)
        } else {
            Err(TuningParseError { line: 1, error: Box::new(TuningFault::Header { found: String::new() }) })
        }
    }
}

impl Tuning {
    fn read_line(&mut self, words: &[&str]) -> Result<(), TuningFault> {
        if words[0] == "world" {
            let table = world(words)?;
            if self.table(table.fabric, &table.hosts).is_some() {
                return Err(TuningFault::DuplicateWorld { fabric: table.fabric, hosts: table.hosts });
            }
            self.tables.push(table);
            return Ok(());
        }
        let collective = Collective::from_name(words[0]);
        if collective.is_none() && !["near", "far"].contains(&words[0]) {
            return Err(TuningFault::Keyword { found: shortened(words[0]) });
        }
        let table = self.tables.last_mut().ok_or(TuningFault::NoWorld)?;
        let Some(collective) = collective else {
            let model = model(words)?;
            // Until it is said otherwise, or where all links are alike, those between hosts are the
            // same.
            table.models = Some(match (words[0], table.models) {
                ("near", _) => (model, model),
                (_, models) => (models.map_or(model, |(near, _)| near), model),
            });
            return Ok(());
        };
        let row = row(collective, words)?;
        let last = table.rows.iter().rev().find(|other| other.collective == collective);
        let is_next = last.map_or(row.from_bytes == 0, |last| last.from_bytes < row.from_bytes);
        if !is_next {
            return Err(TuningFault::Order {
                collective: collective.name(),
                found: Size(row.from_bytes).to_string(),
                last: last.map_or_else(|| "none".to_owned(), |last| Size(last.from_bytes).to_string()),
            });
        }
        let variant = row.variant.to_string();
        table.push(row).map_err(|error| TuningFault::Unfit {
            collective: collective.name(),
            variant,
            error: Box::new(error),
        })
    }
}

fn world(words: &[&str]) -> Result<TuningTable, TuningFault> {
    let &[_, fabric, hosts] = words else {
        return Err(TuningFault::Words { found: words.len(), form: "world FABRIC HOSTSxRANKS" });
    };
    let fabric = fabric.parse().map_err(TuningFault::Name)?;
    Ok(TuningTable::new(fabric, hosts.parse().map_err(TuningFault::Name)?))
}

fn model(words: &[&str]) -> Result<CostModel, TuningFault> {
    if words.len() != 1 + 2 * MODEL.len() {
        return Err(TuningFault::Words {
            found: words.len(),
            form: "near latency_ns N message_ns N put_bytes_per_s N combine_bytes_per_s N",
        });
    }
    let mut numbers = [0.0; MODEL.len()];
    for ((number, pair), name) in numbers.iter_mut().zip(words[1..].chunks_exact(2)).zip(MODEL) {
        if pair[0] != name {
            return Err(TuningFault::Model { found: shortened(pair[0]), expected: name });
        }
        // Latencies may be nothing, rates may not.
        let is_valid =
            |value: &f64| value.is_finite() && (*value > 0.0 || (name.ends_with("ns") && *value == 0.0));
        let value = pair[1].parse().ok().filter(is_valid);
        *number = value.ok_or_else(|| TuningFault::Number { name, found: shortened(pair[1]) })?;
    }
    let [latency_ns, message_ns, bytes_per_s, reduce_bytes_per_s] = numbers;
    let model = CostModel {
        latency_s: latency_ns / 1e9,
        message_s: message_ns / 1e9,
        bytes_per_s,
        reduce_bytes_per_s,
    };
    Ok(as_written(&model))
}

fn row(collective: Collective, words: &[&str]) -> Result<TuningRow, TuningFault> {
    let (words, chunk) = match words {
        [words @ .., chunk] if words.len() == 5 => (words, Some(*chunk)),
        words => (words, None),
    };
    let &[_, from, algorithm, access, window] = words else {
        let form = "COLLECTIVE FROM ALGORITHM ACCESS WINDOW [CHUNK]";
        return Err(TuningFault::Words { found: words.len(), form });
    };
    let size = |text: &str| text.parse::<Size>().map_err(|()| TuningFault::Size { found: shortened(text) });
    let from_bytes = size(from)?.0;
    let chunk_bytes = chunk.map(size).transpose()?.map(|size| size.0);
    let algorithm = Algorithm::named(algorithm, collective).map_err(TuningFault::Name)?;
    let access = match access {
        "put" => Some(Access::Put),
        "mapped" => Some(Access::Mapped),
        "-" => None,
        other => {
            let (what, name, known) = ("access", shortened(other), "put mapped -".to_owned());
            return Err(TuningFault::Name(UnknownName { what, name, known }));
        }
    };
    let window = match window {
        "-" => None,
        number => Some(
            number.parse().map_err(|_| TuningFault::Number { name: "window", found: shortened(number) })?,
        ),
    };
    Ok(TuningRow {
        collective,
        from_bytes,
        variant: Variant { algorithm, access, window, chunk_bytes },
        note: None,
    })
}

/// Foreign text, shortened to fit an error message.
fn shortened(text: &str) -> String {
    text.chars().take(40).collect()
}

/// Bytes, as they are written here.
struct Size(u64);

impl FromStr for Size {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let (digits, shift) = match text.as_bytes().last() {
            Some(b'K') => (&text[..text.len() - 1], 10),
            Some(b'M') => (&text[..text.len() - 1], 20),
            Some(b'G') => (&text[..text.len() - 1], 30),
            _ => (text, 0),
        };
        let number: Option<u64> = digits.parse().ok().filter(|_| !digits.starts_with('+'));
        let bytes = number.and_then(|number| number.checked_mul(1 << shift));
        bytes.filter(|bytes| *bytes <= FROM_BYTES_MAX).map(Self).ok_or(())
    }
}

impl fmt::Display for Size {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let units = [(30, "G"), (20, "M"), (10, "K")];
        match units.into_iter().find(|(shift, _)| self.0 > 0 && self.0.is_multiple_of(1 << shift)) {
            Some((shift, letter)) => write!(formatter, "{}{letter}", self.0 >> shift),
            None => write!(formatter, "{}", self.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const GOOD: &str = "pleach tuning 1\n\n# by hand\nworld shm 1x4\n\
        near latency_ns 310 message_ns 1.18e2 put_bytes_per_s 2.19e10 combine_bytes_per_s 5.1e9\n\
        all-reduce 0 exchange put - # at 8: 1.2 us\nall-reduce 4K direct mapped 16\nbroadcast 0 chain - - 64K\n\
        world shm+tcp 2x2\nall-reduce 0 hierarchical:2x2 mapped -\n";

    #[test]
    fn what_is_printed_reads_back_as_the_same_with_the_same_digest() {
        let tuning: Tuning = GOOD.parse().expect("it is good");
        assert_eq!(tuning.tables().len(), 2);
        let shm = &tuning.tables()[0];
        assert_eq!(shm.models().map(|models| models.0.bytes_per_s), Some(2.19e10));
        let large = shm.variant(Collective::AllReduce, 1 << 20).expect("a row");
        assert_eq!(
            *large,
            Variant { access: Some(Access::Mapped), window: Some(16), ..Algorithm::Direct.into() }
        );
        let chunked = tuning.tables()[0].variant(Collective::Broadcast { root: 0 }, 1 << 22).expect("a row");
        assert_eq!(*chunked, Variant { chunk_bytes: Some(64 << 10), ..Algorithm::Chain.into() });
        let printed = tuning.to_string();
        let again: Tuning = printed.parse().expect("what is printed is good");
        assert_eq!((&again, again.digest()), (&tuning, tuning.digest()), "{printed}");
        assert_eq!(again.to_string(), printed);
    }

    #[test]
    fn a_note_says_what_was_measured_and_is_no_part_of_what_is_read() {
        let mut tuning: Tuning = GOOD.parse().expect("it is good");
        let plain = tuning.clone();
        let next = Some((Algorithm::Ring.into(), 2e-6));
        tuning.tables[0].rows[1].note = Some(TuningNote { bytes: 4096, seconds: 1.5e-6, next });
        let printed = tuning.to_string();
        assert!(printed.contains("# at 4K: 1.50 us; ring 2.00 us"), "{printed}");
        assert_eq!(printed.parse(), Ok(plain));
    }

    fn line_of(text: &str) -> (usize, String) {
        let TuningParseError { line, error } = text.parse::<Tuning>().expect_err(text);
        (line, error.to_string())
    }

    #[test]
    fn a_mistake_is_told_with_its_line() {
        let after = |line: &str| format!("pleach tuning 1\n# remark\nworld shm 1x4\n{line}\n");
        for (line, says) in [
            ("all-reduce 0 ring", "3 words; write COLLECTIVE FROM ALGORITHM ACCESS WINDOW [CHUNK]"),
            ("all-reduce 0 ring put - 1Q", "'1Q' is no size"),
            ("all-reduce 0 ring put - 8", "chunks of 8 bytes"),
            ("all-reduce 0 ring put - 1K 1", "7 words"),
            ("all-reduce 0 rind put -", "'rind'"),
            ("all-reduce 0 chain put -", "'chain'"),
            ("all-reduce 0 grid:3x1 put -", "all-reduce by grid:3x1 put"),
            ("all-reduce 4K ring put -", "begin at 0 and rise; the last was none"),
            ("all-reduce 0 ring put -\nall-reduce 0 ring put -", "the last was 0"),
            ("all-reduce 3Q ring put -", "'3Q' is no size"),
            ("all-reduce 0 ring push -", "'push' is no access; there are put mapped -"),
            ("all-reduce 0 ring put many", "window 'many' is no number"),
            ("all-reduce 0 ring put 0", "window"),
            ("all-sum 0 ring put -", "'all-sum' begins no line; there are world, near"),
            ("world shm 1x4", "world shm 1x4 has been"),
            ("world rdma 1x4", "'rdma' is no fabric"),
            ("world auto 1x4", "'auto' is no fabric"),
            ("world shm four", "'four'"),
            ("world shm", "2 words"),
            ("near latency_ns 1", "3 words"),
            ("near latency_ns 1 message_ns 1 put_bytes_per_s 0 combine_bytes_per_s 1", "put_bytes_per_s '0'"),
            ("near latency_ns 1 message_ns 1 put_bytes_per_s nan combine_bytes_per_s 1", "'nan'"),
            ("near latency_ns 1 message_us 1 put_bytes_per_s 1 combine_bytes_per_s 1", "'message_us' stands"),
        ] {
            let (number, error) = line_of(&after(line));
            assert_eq!(number, 3 + line.lines().count(), "{line}: {error}");
            assert!(error.contains(says), "{line}: {error}");
        }
        assert_eq!(line_of("pleach tuning 1\nall-reduce 0 ring put -").0, 2);
        assert!(line_of("pleach tuning 1\nworld tcp 1x4\nall-reduce 0 direct mapped -").1.contains("direct"));
        assert_eq!(line_of("[tuning]\n").0, 1);
        assert_eq!(line_of("").0, 1);
    }

    proptest! {
        #[test]
        fn no_text_is_more_than_refused(lines in proptest::collection::vec("[a-z0-9#:x+ -]{0,40}", 0..8)) {
            let text = format!("pleach tuning 1\nworld shm 1x4\n{}", lines.join("\n"));
            if let Ok(tuning) = text.parse::<Tuning>() {
                prop_assert_eq!(tuning.to_string().parse::<Tuning>(), Ok(tuning));
            }
        }
    }
}

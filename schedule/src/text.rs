//! The text form of a schedule: printed, read by people, compared line by line, parsed again.
//!
//! ```text
//! pleach-schedule 1                               # form and version
//! collective broadcast root 0                     # all-reduce, reduce root 2, send-recv from 0 to 1, ...
//! ranks 2
//! window 2                                        # and 'single-chunk' where blocks are never cut
//! block 0 part 0 weight 1                         # blocks in order
//! rank 0                                          # ranks in order; one that does nothing may be left out
//!   lane block 0
//!     0: copy input -> shared-input, output       # a place of this rank
//!     1: wait 1 slot 0                            # signal 1 slot 0 is its other half
//!     2: put shared-input -> 1.shared-output slot 1 after 0
//!     3: wait 1 slot 2
//! rank 1
//!   lane block 0
//!     0: signal 0 slot 0 after 2@1                # step 2 of one chunk earlier
//!     1: wait 0 slot 1
//!     2: copy shared-output -> output
//!     3: signal 0 slot 2 after 2
//! ```
//!
//! `reduce a + b + c -> d, e` combines several sources, `copy` is a reduce of one; `2.shared-input`
//! is the place of another rank. Steps carry their numbers because `after` names them. White space
//! within a line is free, what follows a `#` is a comment.
//!
//! Parsing takes time and memory in proportion to the text, whatever the text says: numbers are
//! compared with the limits below before anything is made of their size. It checks the form only;
//! whether a rank, a block or a step that is named exists is for
//! [`verify`](crate::verify::verify()) to say.

use std::fmt;
use std::str::FromStr;

use pleach_vocabulary::{Collective, Rank};

use crate::{Block, Lane, Op, Part, Place, Schedule, SignalSlot, Step, StepId};

#[cfg(test)]
mod tests;

/// Longest text that is parsed, in bytes: a ring of 1,024 ranks written block by block has a third
/// of it.
pub const MAX_TEXT_BYTES: usize = 1 << 30;
/// Most ranks of a schedule in text form.
pub const MAX_RANKS: u32 = 16_384;
/// Most steps of a schedule in text form, all ranks together.
pub const MAX_STEPS: usize = 1 << 25;
const FORM: &str = "pleach-schedule";
const VERSION: u32 = 1;

/// Where a text is no schedule, and why.
#[derive(Clone, pleach_derive::ErrorDebug, PartialEq, Eq, thiserror::Error)]
#[error("line {line}, column {column}: {problem}")]
pub struct ParseError {
    /// The line, from 1.
    pub line: usize,
    /// The character in the line, from 1.
    pub column: usize,
    /// The problem there.
    pub problem: ParseProblem,
}

/// A problem in a text.
#[derive(Clone, pleach_derive::ErrorDebug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ParseProblem {
    /// Something else stands there.
    #[error("expected {what}, found {found}")]
    Expected {
        /// The token that was expected.
        what: &'static str,
        /// The text that was found, shortened.
        found: String,
    },
    /// Lines are numbered and this one has not its number.
    #[error("expected {what} {number}, found {found}")]
    OutOfOrder {
        /// The things that are numbered.
        what: &'static str,
        /// The number that comes next.
        number: u64,
        /// The number that is there.
        found: u64,
    },
    /// Larger than this reader takes.
    #[error("{what}: at most {most} are possible")]
    TooMany {
        /// The kind of thing.
        what: &'static str,
        /// The limit.
        most: u64,
    },
}

impl Schedule {
    /// Reads the text form ([`text`](self)).
    ///
    /// # Errors
    ///
    /// [`ParseError`] says the line, the column and what was expected there.
    pub fn parse(text: &str) -> Result<Self, ParseError> {
        if text.len() > MAX_TEXT_BYTES {
            let problem = ParseProblem::TooMany { what: "bytes of text", most: MAX_TEXT_BYTES as u64 };
            return Err(ParseError { line: 1, column: 1, problem });
        }
        let mut lines = Lines::new(text);
        let mut schedule = header(&mut lines)?;
        let ranks = schedule.ranks();
        let mut next_rank = 0;
        let mut steps = 0;
        while lines.line.is_some() {
            if lines.starts_with("rank") {
                next_rank = begin_rank(&mut lines, next_rank, ranks)?;
            } else if lines.starts_with("lane") && next_rank > 0 {
                let block = lane(&mut lines)?;
                schedule.programs[next_rank as usize - 1].push(Lane { block, steps: Vec::new() });
            } else if let Some(program) = (next_rank as usize).checked_sub(1)
                && let Some(lane) = schedule.programs[program].last_mut()
            {
                steps += 1;
                let step = step(&mut lines, lane.steps.len(), next_rank - 1)?;
                if steps > MAX_STEPS {
                    return Err(lines.too_many("steps", MAX_STEPS as u64));
                }
                lane.steps.push(step);
            } else {
                let what = if next_rank == 0 {
                    "'block', or 'rank' and a number"
                } else {
                    "'lane', or 'rank' and a number"
                };
                return Err(lines.expected(what));
            }
            lines.end()?;
        }
        Ok(schedule)
    }
}

impl FromStr for Schedule {
    type Err = ParseError;

    fn from_str(text: &str) -> Result<Self, ParseError> {
        Self::parse(text)
    }
}

fn header(lines: &mut Lines<'_>) -> Result<Schedule, ParseError> {
    lines.keyword(FORM, "'pleach-schedule 1'")?;
    lines.number_up_to("the version 1 of the form", "version", VERSION)?;
    lines.end()?;
    lines.keyword("collective", "'collective'")?;
    let collective = collective(lines)?;
    lines.end()?;
    lines.keyword("ranks", "'ranks'")?;
    let ranks = lines.number_up_to("the number of ranks", "ranks", MAX_RANKS)?;
    lines.end()?;
    lines.keyword("window", "'window'")?;
    let window = lines.number("the number of chunks under way")?;
    let single_chunk = lines.starts_with("single-chunk");
    if single_chunk {
        lines.skip_word();
    }
    lines.end()?;
    let mut blocks = Vec::new();
    while lines.starts_with("block") {
        lines.keyword("block", "'block'")?;
        lines.in_order("block", blocks.len() as u64)?;
        lines.keyword("part", "'part'")?;
        let part = lines.number("the number of a part")?;
        lines.keyword("weight", "'weight'")?;
        let weight = lines.number("a weight")?;
        lines.end()?;
        blocks.push(Block { part, weight });
    }
    Ok(Schedule { collective, window, single_chunk, blocks, programs: vec![Vec::new(); ranks as usize] })
}

fn collective(lines: &mut Lines<'_>) -> Result<Collective, ParseError> {
    const WHAT: &str = "a collective: all-reduce reduce broadcast all-gather reduce-scatter gather scatter \
        all-to-all barrier send-recv";
    let Some(plain) = Collective::from_name(lines.word()) else { return Err(lines.expected(WHAT)) };
    lines.skip_word();
    let mut rank_after = |keyword, what| {
        lines.keyword(keyword, what)?;
        lines.number("the number of a rank")
    };
    Ok(match plain {
        Collective::SendRecv { .. } => {
            Collective::SendRecv { from: rank_after("from", "'from'")?, to: rank_after("to", "'to'")? }
        }
        rooted if rooted.root().is_some() => rooted.with_root(rank_after("root", "'root'")?),
        other => other,
    })
}

/// Reads `rank R` and returns `R + 1`.
fn begin_rank(lines: &mut Lines<'_>, next: Rank, ranks: u32) -> Result<Rank, ParseError> {
    lines.keyword("rank", "'rank'")?;
    let column = lines.column;
    let rank: u32 = lines.number("the number of a rank")?;
    let problem = if rank >= ranks {
        ParseProblem::TooMany { what: "ranks, as said above", most: u64::from(ranks) }
    } else if rank < next {
        ParseProblem::OutOfOrder { what: "rank", number: u64::from(next), found: u64::from(rank) }
    } else {
        return Ok(rank + 1);
    };
    Err(lines.error_at(column, problem))
}

fn lane(lines: &mut Lines<'_>) -> Result<u32, ParseError> {
    lines.keyword("lane", "'lane'")?;
    lines.keyword("block", "'block'")?;
    lines.number("the number of a block")
}

fn step(lines: &mut Lines<'_>, number: usize, own: Rank) -> Result<Step, ParseError> {
    if !lines.word().starts_with(|first: char| first.is_ascii_digit()) {
        return Err(lines.expected("a step such as '0: wait 1 slot 0', or 'lane', or 'rank'"));
    }
    lines.in_order("step", number as u64)?;
    lines.symbol(":", "':'")?;
    let op = operation(lines, own)?;
    let mut after = Vec::new();
    if lines.starts_with("after") {
        lines.skip_word();
        loop {
            let step: StepId = lines.number("the number of a step")?;
            let mut lag = 0;
            if lines.at("@") {
                lines.symbol("@", "'@'")?;
                lag = lines.number("a number of chunks")?;
            }
            after.push((step, lag));
            if lines.rest().is_empty() {
                break;
            }
        }
    }
    Ok(Step { op, after })
}

fn operation(lines: &mut Lines<'_>, own: Rank) -> Result<Op, ParseError> {
    let word = lines.word();
    if !["signal", "put", "wait", "copy", "reduce"].contains(&word) {
        return Err(lines.expected("an operation: signal put wait copy reduce"));
    }
    lines.skip_word();
    Ok(match word {
        "signal" => Op::Signal { to: lines.number("the rank to signal")?, signal_slot: signal_slot(lines)? },
        "wait" => Op::Wait { from: lines.number("the rank to hear from")?, signal_slot: signal_slot(lines)? },
        "put" => {
            let column = lines.column;
            let src = place(lines, own)?;
            if src.rank != own {
                let what = "a place of this rank as source of a put";
                let found = quote(&src.to_string());
                return Err(lines.error_at(column, ParseProblem::Expected { what, found }));
            }
            lines.symbol("->", "'->'")?;
            let dst = place(lines, own)?;
            Op::Put { to: dst.rank, src: src.part, dst: dst.part, signal_slot: signal_slot(lines)? }
        }
        several => {
            let mut from = vec![place(lines, own)?];
            if several == "reduce" {
                lines.symbol("+", "'+' and another source (one source is a 'copy')")?;
                from.push(place(lines, own)?);
                while lines.at("+") {
                    lines.symbol("+", "'+'")?;
                    from.push(place(lines, own)?);
                }
            }
            lines.symbol("->", if several == "reduce" { "'+' or '->'" } else { "'->'" })?;
            let mut into = vec![place(lines, own)?];
            while lines.at(",") {
                lines.symbol(",", "','")?;
                into.push(place(lines, own)?);
            }
            Op::Reduce { from, into }
        }
    })
}

fn signal_slot(lines: &mut Lines<'_>) -> Result<SignalSlot, ParseError> {
    lines.keyword("slot", "'slot'")?;
    lines.number("the number of a signal slot, below 65536").map(SignalSlot)
}

fn place(lines: &mut Lines<'_>, own: Rank) -> Result<Place, ParseError> {
    let rank = if lines.rest().starts_with(|first: char| first.is_ascii_digit()) {
        let rank = lines.number("the number of a rank")?;
        lines.symbol(".", "'.' between rank and part")?;
        rank
    } else {
        own
    };
    let part = match lines.word() {
        "input" => Part::Input,
        "output" => Part::Output,
        "shared-input" => Part::SharedInput,
        "shared-output" => Part::SharedOutput,
        word => match word.strip_prefix("scratch-").and_then(digits) {
            Some(slot) => Part::Scratch(slot),
            None => {
                return Err(lines.expected("a place: input output shared-input shared-output scratch-0 ..."));
            }
        },
    };
    lines.skip_word();
    Ok(Place { rank, part })
}

impl fmt::Display for Schedule {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(formatter, "{FORM} {VERSION}")?;
        writeln!(formatter, "collective {}", self.collective)?;
        writeln!(formatter, "ranks {}", self.programs.len())?;
        writeln!(
            formatter,
            "window {}{}",
            self.window,
            if self.single_chunk { " single-chunk" } else { "" }
        )?;
        for (number, block) in self.blocks.iter().enumerate() {
            writeln!(formatter, "block {number} part {} weight {}", block.part, block.weight)?;
        }
        for (rank, lanes) in self.programs.iter().enumerate() {
            writeln!(formatter, "rank {rank}")?;
            for lane in lanes {
                writeln!(formatter, "  lane block {}", lane.block)?;
                for (number, step) in lane.steps.iter().enumerate() {
                    write!(formatter, "    {number}: ")?;
                    print_operation(formatter, &step.op, rank as Rank)?;
                    for (position, (earlier, lag)) in step.after.iter().enumerate() {
                        formatter.write_str(if position == 0 { " after " } else { " " })?;
                        write!(formatter, "{earlier}")?;
                        if *lag > 0 {
                            write!(formatter, "@{lag}")?;
                        }
                    }
                    formatter.write_str("\n")?;
                }
            }
        }
        Ok(())
    }
}

fn print_operation(formatter: &mut fmt::Formatter<'_>, op: &Op, own: Rank) -> fmt::Result {
    match op {
        Op::Signal { to, signal_slot } => write!(formatter, "signal {to} slot {}", signal_slot.0),
        Op::Wait { from, signal_slot } => write!(formatter, "wait {from} slot {}", signal_slot.0),
        Op::Put { to, src, dst, signal_slot } => {
            write!(formatter, "put {src} -> {to}.{dst} slot {}", signal_slot.0)
        }
        Op::Reduce { from, into } => {
            formatter.write_str(if from.len() == 1 { "copy " } else { "reduce " })?;
            print_places(formatter, from, " + ", own)?;
            formatter.write_str(" -> ")?;
            print_places(formatter, into, ", ", own)
        }
    }
}

fn print_places(
    formatter: &mut fmt::Formatter<'_>,
    places: &[Place],
    between: &str,
    own: Rank,
) -> fmt::Result {
    for (position, place) in places.iter().enumerate() {
        if position > 0 {
            formatter.write_str(between)?;
        }
        if place.rank == own {
            write!(formatter, "{}", place.part)?;
        } else {
            write!(formatter, "{place}")?;
        }
    }
    Ok(())
}

// Reads a text line by line and word by word, and knows the position of errors.

/// Most characters of the text that an error repeats.
const MAX_FOUND_CHARS: usize = 40;

/// A number in its shortest form.
fn digits<T: FromStr>(word: &str) -> Option<T> {
    let shortest =
        word.bytes().all(|byte| byte.is_ascii_digit()) && (word.len() == 1 || !word.starts_with('0'));
    if shortest { word.parse().ok() } else { None }
}

/// The lines that say something, one after the other, and how far the present one is read.
struct Lines<'a> {
    remaining: std::str::Lines<'a>,
    /// The present line without its comment; `None` at the end of the text.
    line: Option<&'a str>,
    number: usize,
    /// How many bytes of the line are read, white space behind them included.
    column: usize,
}

impl<'a> Lines<'a> {
    fn new(text: &'a str) -> Self {
        let mut lines = Self { remaining: text.lines(), line: None, number: 0, column: 0 };
        lines.advance();
        lines
    }

    fn advance(&mut self) {
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

    fn rest(&self) -> &'a str {
        self.line.map_or("", |line| &line[self.column..])
    }

    fn skip_bytes(&mut self, count: usize) {
        let rest = &self.rest()[count..];
        self.column += count + (rest.len() - rest.trim_start().len());
    }

    /// The text from here up to white space or a symbol.
    fn word(&self) -> &'a str {
        let rest = self.rest();
        let ends = |character: char| !(character.is_alphanumeric() || character == '-' || character == '_');
        let word = &rest[..rest.find(ends).unwrap_or(rest.len())];
        // "a->b" is a word, a symbol and a word.
        word.strip_suffix('-').filter(|word| rest[word.len()..].starts_with("->")).unwrap_or(word)
    }

    fn skip_word(&mut self) {
        self.skip_bytes(self.word().len());
    }

    fn starts_with(&self, word: &str) -> bool {
        self.word() == word
    }

    fn at(&self, symbol: &str) -> bool {
        self.rest().starts_with(symbol)
    }

    fn keyword(&mut self, word: &str, what: &'static str) -> Result<(), ParseError> {
        if !self.starts_with(word) {
            return Err(self.expected(what));
        }
        self.skip_word();
        Ok(())
    }

    fn symbol(&mut self, symbol: &str, what: &'static str) -> Result<(), ParseError> {
        if !self.at(symbol) {
            return Err(self.expected(what));
        }
        self.skip_bytes(symbol.len());
        Ok(())
    }

    fn number<T: FromStr>(&mut self, what: &'static str) -> Result<T, ParseError> {
        let word = self.word();
        let number = if word.is_empty() { None } else { digits(word) };
        let number = number.ok_or_else(|| self.expected(what))?;
        self.skip_word();
        Ok(number)
    }

    fn number_up_to(&mut self, what: &'static str, of: &'static str, most: u32) -> Result<u32, ParseError> {
        let column = self.column;
        let number = self.number(what)?;
        if number > most {
            return Err(self.error_at(column, ParseProblem::TooMany { what: of, most: u64::from(most) }));
        }
        Ok(number)
    }

    fn in_order(&mut self, what: &'static str, number: u64) -> Result<(), ParseError> {
        let column = self.column;
        let found: u64 = self.number("a number")?;
        if found != number {
            return Err(self.error_at(column, ParseProblem::OutOfOrder { what, number, found }));
        }
        Ok(())
    }

    /// The line has been read to its end; on to the next.
    fn end(&mut self) -> Result<(), ParseError> {
        if !self.rest().is_empty() {
            return Err(self.expected("the end of the line"));
        }
        self.advance();
        Ok(())
    }

    fn expected(&self, what: &'static str) -> ParseError {
        let found = match self.line {
            None => "the end of the text".to_owned(),
            Some(_) if self.rest().is_empty() => "the end of the line".to_owned(),
            Some(_) if self.word().is_empty() => quote(self.rest()),
            Some(_) => quote(self.word()),
        };
        self.error_at(self.column, ParseProblem::Expected { what, found })
    }

    fn too_many(&self, what: &'static str, most: u64) -> ParseError {
        self.error_at(0, ParseProblem::TooMany { what, most })
    }

    fn error_at(&self, column: usize, problem: ParseProblem) -> ParseError {
        let characters = self.line.map_or(0, |line| line[..column.min(line.len())].chars().count());
        ParseError { line: self.number, column: characters + 1, problem }
    }
}

fn quote(text: &str) -> String {
    let shown: String = text.chars().take(MAX_FOUND_CHARS).flat_map(char::escape_debug).collect();
    format!("'{shown}'")
}

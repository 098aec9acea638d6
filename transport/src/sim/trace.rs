//! The trace of a run as a hash and, on request, as text.

use std::fmt;
use std::io::Write;

use pleach_vocabulary::digest::mixed;

use crate::clock::Nanos;

/// All events of a run, folded into 64 bits: the same commit and the same seed give the same hash.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TraceHash(pub u64);

impl fmt::Display for TraceHash {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{:016x}", self.0)
    }
}

/// Folds every event, and writes a line for each if a writer is set.
pub(super) struct Trace {
    hash: u64,
    events: u64,
    lines: Option<Box<dyn Write + Send>>,
}

impl Trace {
    pub(super) fn new(seed: u64) -> Self {
        Self { hash: mixed(seed), events: 0, lines: None }
    }

    pub(super) fn write_to(&mut self, lines: Box<dyn Write + Send>) {
        self.lines = Some(lines);
    }

    /// Records an event. Words and name must not depend on addresses or on anything else outside of
    /// the simulation.
    pub(super) fn event(&mut self, now: Nanos, name: &'static str, words: &[u64]) {
        self.events += 1;
        for word in [now.0, name.len() as u64].into_iter().chain(name.bytes().map(u64::from)) {
            self.hash = mixed(self.hash ^ word).wrapping_add(0x9e37_79b9_7f4a_7c15);
        }
        for &word in words {
            self.hash = mixed(self.hash ^ word).wrapping_add(0x9e37_79b9_7f4a_7c15);
        }
        if let Some(lines) = &mut self.lines {
            let words: Vec<String> = words.iter().map(u64::to_string).collect();
            // A full disk must not change the run; the lines just end.
            if writeln!(lines, "{:>12} {name} {}", now.0, words.join(" ")).is_err() {
                self.lines = None;
            }
        }
    }

    pub(super) fn events(&self) -> u64 {
        self.events
    }

    pub(super) fn hash(&self) -> TraceHash {
        TraceHash(mixed(self.hash ^ self.events))
    }

    pub(super) fn flush(&mut self) {
        if let Some(lines) = &mut self.lines {
            let _ = lines.flush();
        }
    }
}

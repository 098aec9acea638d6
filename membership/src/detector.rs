//! Whom a process suspects, and by what time.
//!
//! **Invariant:** time passes only while this process runs: between two calls it counts at most
//! twice the tick, so a process that was stopped has not waited meanwhile.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use pleach_transport::Nanos;

use crate::Process;

/// Ticks in the time after which a silent process is suspected.
const TICKS: u32 = 8;

/// Clock and suspicions of one process.
#[derive(Clone, Debug)]
pub(crate) struct Detector {
    suspect_after: Duration,
    clock: Nanos,
    polled: Nanos,
    ticked: Nanos,
    heard: BTreeMap<Process, Nanos>,
    connected: BTreeSet<Process>,
    lost: BTreeSet<Process>,
    silent: BTreeSet<Process>,
    late: BTreeSet<Process>,
}

impl Detector {
    pub(crate) fn new(suspect_after: Duration, now: Nanos) -> Self {
        Self {
            suspect_after,
            clock: Nanos::ZERO,
            polled: now,
            ticked: Nanos::ZERO,
            heard: BTreeMap::new(),
            connected: BTreeSet::new(),
            lost: BTreeSet::new(),
            silent: BTreeSet::new(),
            late: BTreeSet::new(),
        }
    }

    fn tick(&self) -> Duration {
        self.suspect_after / TICKS
    }

    /// Lets time pass; whether a tick has passed.
    pub(crate) fn advance(&mut self, now: Nanos) -> bool {
        self.clock += now.since(self.polled).min(2 * self.tick());
        self.polled = self.polled.max(now);
        let has_ticked = self.clock.since(self.ticked) >= self.tick();
        if has_ticked {
            self.ticked = self.clock;
        }
        has_ticked
    }

    /// When the next tick is due.
    pub(crate) fn next_tick(&self) -> Nanos {
        self.polled + self.tick().saturating_sub(self.clock.since(self.ticked))
    }

    /// The time for which this process has run.
    pub(crate) fn clock(&self) -> Nanos {
        self.clock
    }

    /// Whether this part of the time until suspicion, in eighths, has passed since.
    pub(crate) fn has_passed(&self, eighths: usize, since: Nanos) -> bool {
        let eighths = u32::try_from(eighths).unwrap_or(u32::MAX);
        self.clock.since(since) >= (self.suspect_after / 8).saturating_mul(eighths)
    }

    pub(crate) fn connected(&mut self, process: Process) {
        self.connected.insert(process);
        self.lost.remove(&process);
        self.heard(process);
    }

    pub(crate) fn is_connected(&self, process: Process) -> bool {
        self.connected.contains(&process)
    }

    pub(crate) fn connections(&self) -> impl Iterator<Item = Process> {
        self.connected.iter().copied()
    }

    pub(crate) fn lost(&mut self, process: Process) {
        self.connected.remove(&process);
        self.lost.insert(process);
    }

    pub(crate) fn heard(&mut self, process: Process) {
        self.silent.remove(&process);
        self.heard.insert(process, self.clock);
    }

    /// It keeps a call or a drain waiting beyond its deadline, whatever else is heard of it.
    pub(crate) fn late(&mut self, process: Process) {
        self.late.insert(process);
    }

    pub(crate) fn silent(&mut self, process: Process) {
        self.silent.insert(process);
    }

    pub(crate) fn is_lost(&self, process: Process) -> bool {
        self.lost.contains(&process)
    }

    /// Whether something was heard of a process within the time after which it is suspected.
    pub(crate) fn hears(&self, process: Process) -> bool {
        self.heard.get(&process).is_some_and(|heard| !self.has_passed(8, *heard))
    }

    /// Whether nothing was heard of a process since.
    pub(crate) fn is_silent_since(&self, process: Process, since: Nanos) -> bool {
        self.heard.get(&process).is_none_or(|heard| *heard < since)
    }

    /// Suspects those of these that were silent for too long.
    pub(crate) fn watch(&mut self, watched: impl Iterator<Item = Process>) {
        for process in watched {
            let heard = *self.heard.entry(process).or_insert(self.clock);
            if self.has_passed(8, heard) {
                self.silent.insert(process);
            }
        }
    }

    /// Those of these that are suspected.
    pub(crate) fn suspects(&self, members: &[Process]) -> BTreeSet<Process> {
        let is_suspect = |process: &&Process| {
            self.lost.contains(process) || self.silent.contains(process) || self.late.contains(process)
        };
        members.iter().filter(is_suspect).copied().collect()
    }

    /// A new epoch: deadlines of the old one are over, and silence is counted anew.
    pub(crate) fn enter(&mut self, members: &[Process]) {
        self.late.clear();
        for member in members {
            self.heard.insert(*member, self.clock);
        }
        self.silent.clear();
        self.lost.retain(|process| members.contains(process));
    }
}

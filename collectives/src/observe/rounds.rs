//! Counters of the rounds of one partial all-reduce, or of all partial all-reduces of a group.
//!
//! Each partial all-reduce of a group adds to them from a thread of its own. Relaxed: no other
//! memory depends on a number.

use std::sync::atomic::{AtomicU64, Ordering};

use pleach_vocabulary::Rank;

/// See the module.
#[derive(Debug)]
pub(crate) struct RoundCounters {
    rounds: AtomicU64,
    /// By rank.
    counted: Box<[AtomicU64]>,
    late: AtomicU64,
    dropped: AtomicU64,
    missed: AtomicU64,
}

/// The counts of the rounds of one rank so far: of one partial all-reduce, or of all partial
/// all-reduces of a group.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct PartialReport {
    /// The number of rounds that have ended on this rank.
    pub rounds: u64,
    /// By rank: the number of these rounds that have its contribution.
    pub counted: Vec<u64>,
    /// The number of contributions of this rank that came too late for their round.
    pub late: u64,
    /// The number of late contributions that were dropped.
    pub dropped: u64,
    /// The number of results that the caller of this rank never saw.
    pub missed: u64,
}

impl RoundCounters {
    pub(crate) fn new(ranks: u32) -> Self {
        let counter = || AtomicU64::new(0);
        Self {
            rounds: counter(),
            counted: (0..ranks).map(|_| counter()).collect(),
            late: counter(),
            dropped: counter(),
            missed: counter(),
        }
    }

    /// Counts a round that has ended.
    pub(crate) fn ended(&self, contributors: impl Iterator<Item = Rank>) {
        self.rounds.fetch_add(1, Ordering::Relaxed);
        for rank in contributors {
            if let Some(counted) = self.counted.get(rank as usize) {
                counted.fetch_add(1, Ordering::Relaxed);
            }
        }
    }

    /// Counts a round that the caller has seen.
    pub(crate) fn seen(&self, late: u64, dropped: u64, missed: u64) {
        for (counter, number) in [(&self.late, late), (&self.dropped, dropped), (&self.missed, missed)] {
            // All three are zero where nobody is late.
            if number > 0 {
                counter.fetch_add(number, Ordering::Relaxed);
            }
        }
    }

    pub(crate) fn report(&self) -> PartialReport {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        PartialReport {
            rounds: read(&self.rounds),
            counted: self.counted.iter().map(read).collect(),
            late: read(&self.late),
            dropped: read(&self.dropped),
            missed: read(&self.missed),
        }
    }
}

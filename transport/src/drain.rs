//! The drains of one end of a pair (contract line 17).
//!
//! What both ends submit travels over a few ordered streams. For each drain an end puts a mark
//! behind what it has submitted, on each stream. A *stage* is one thing that must have come so far:
//! this end's mark on one stream, or the peer's. **Invariant:** the n-th `Drained` is given once,
//! when every stage has passed its n-th mark. Stages pass marks in order, so a count each suffices,
//! and an end may be ahead of the other.

use crate::Rank;
use crate::device::{DRAINS_MAX, Event, SubmitError};

/// See the module.
#[derive(Debug)]
pub(crate) struct Drains {
    /// Drains of this end.
    begun: u64,
    /// How many of them were answered with `Drained`.
    told: u64,
    /// Marks that each stage has passed.
    passed: Vec<u64>,
}

/// With one stage an end.
impl Default for Drains {
    fn default() -> Self {
        Self::new(2)
    }
}

impl Drains {
    pub(crate) fn new(stages: usize) -> Self {
        Self { begun: 0, told: 0, passed: vec![0; stages] }
    }

    /// Begins a drain of this end.
    pub(crate) fn begin(&mut self, peer: Rank) -> Result<(), SubmitError> {
        if self.begun - self.told >= DRAINS_MAX {
            return Err(SubmitError::QueueFull { peer });
        }
        self.begun += 1;
        Ok(())
    }

    /// Whether a drain of this end awaits its `Drained`.
    pub(crate) fn is_under_way(&self) -> bool {
        self.told < self.begun
    }

    /// Drains that this end has begun.
    pub(crate) fn begun(&self) -> u64 {
        self.begun
    }

    /// Marks that a stage has passed.
    pub(crate) fn passed(&self, stage: usize) -> u64 {
        self.passed[stage]
    }

    /// Records that a stage has passed its next marks.
    pub(crate) fn pass(&mut self, stage: usize, marks: u64) {
        self.passed[stage] = self.passed[stage].saturating_add(marks);
    }

    /// The next `Drained`, if it is due.
    pub(crate) fn next_drained(&mut self, peer: Rank) -> Option<Event> {
        if !self.is_under_way() {
            return None;
        }
        let passed = self.passed.iter().copied().min().unwrap_or(0);
        (self.told < passed).then(|| {
            self.told += 1;
            Event::Drained { peer }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DRAINED: Option<Event> = Some(Event::Drained { peer: 7 });

    #[test]
    fn a_drain_is_told_once_when_every_stage_has_passed_it() {
        let mut drains = Drains::new(3);
        drains.pass(0, 2);
        drains.pass(1, 1);
        drains.pass(2, 1);
        assert_eq!(drains.next_drained(7), None, "this end has not drained");
        for _ in 0..2 {
            drains.begin(7).expect("room");
        }
        assert_eq!((drains.next_drained(7), drains.next_drained(7)), (DRAINED, None));
        drains.pass(1, 1);
        assert_eq!(drains.next_drained(7), None, "the third stage is not there yet");
        drains.pass(2, 5);
        assert_eq!((drains.next_drained(7), drains.next_drained(7)), (DRAINED, None));
        assert_eq!((drains.begun(), drains.passed(2)), (2, 6));
    }

    #[test]
    fn drains_that_wait_are_limited_and_room_comes_with_drained() {
        let mut drains = Drains::default();
        for _ in 0..DRAINS_MAX {
            drains.begin(7).expect("room");
        }
        assert_eq!(drains.begin(7), Err(SubmitError::QueueFull { peer: 7 }));
        drains.pass(0, 1);
        drains.pass(1, 1);
        assert_eq!(drains.next_drained(7), DRAINED);
        assert_eq!(drains.begin(7), Ok(()));
    }
}

//! What this rank did in the last runs of a stream, for those who ask while its engine may be busy
//! elsewhere.
//!
//! One thread at a time writes (who holds the engine), any may read. To note a run takes a few
//! stores, and no lock.

use std::sync::atomic::{AtomicU64, Ordering, fence};

use super::message::{Record, Verdict};
use crate::call::DESCRIPTOR_WORDS;

const RECORD_WORDS: usize = 3 + DESCRIPTOR_WORDS;

/// A record that one thread writes and others read: a sequence lock on atomics.
struct RecordSlot {
    /// Odd while it is written. Release store pairs with the acquire load in `read`.
    sequence: AtomicU64,
    words: [AtomicU64; RECORD_WORDS],
}

impl RecordSlot {
    const fn new() -> Self {
        Self { sequence: AtomicU64::new(0), words: [const { AtomicU64::new(0) }; RECORD_WORDS] }
    }

    fn write(&self, record: &Record) {
        let sequence = self.sequence.load(Ordering::Relaxed);
        self.sequence.store(sequence + 1, Ordering::Relaxed);
        // Pairs with the acquire fence in `read`: who reads a new word also sees the odd sequence.
        fence(Ordering::Release);
        let words = [record.run, record.signature, record.history].into_iter().chain(record.descriptor);
        for (slot, word) in self.words.iter().zip(words) {
            slot.store(word, Ordering::Relaxed);
        }
        self.sequence.store(sequence + 2, Ordering::Release);
    }

    fn read(&self) -> Option<Record> {
        let before = self.sequence.load(Ordering::Acquire);
        let words: [u64; RECORD_WORDS] = std::array::from_fn(|word| self.words[word].load(Ordering::Relaxed));
        fence(Ordering::Acquire);
        let unchanged =
            before != 0 && before.is_multiple_of(2) && self.sequence.load(Ordering::Relaxed) == before;
        let [run, signature, history, descriptor @ ..] = words;
        unchanged.then_some(Record { run, signature, history, descriptor })
    }
}

/// The last `LAST` runs of a stream that this rank has begun, and how many it has completed.
pub(super) struct Records<const LAST: usize> {
    slots: [RecordSlot; LAST],
    /// Release store in `begin` pairs with the acquire loads of readers: the record is there before
    /// its run counts.
    begun: AtomicU64,
    /// Without a gap. Release store in `complete` pairs with the acquire loads of readers.
    completed: AtomicU64,
}

impl<const LAST: usize> Records<LAST> {
    pub(super) const fn new() -> Self {
        let slots = [const { RecordSlot::new() }; LAST];
        Self { slots, begun: AtomicU64::new(0), completed: AtomicU64::new(0) }
    }

    /// This rank has entered a run: the one after the last.
    pub(super) fn begin(&self, record: &Record) {
        self.slots[record.run as usize % LAST].write(record);
        self.begun.store(record.run + 1, Ordering::Release);
    }

    pub(super) fn complete(&self, completed: u64) {
        self.completed.store(completed, Ordering::Release);
    }

    pub(super) fn begun(&self) -> u64 {
        self.begun.load(Ordering::Acquire)
    }

    pub(super) fn completed(&self) -> u64 {
        self.completed.load(Ordering::Acquire)
    }

    /// The runs of which a record may be left, oldest first.
    pub(super) fn last(&self) -> std::ops::Range<u64> {
        let begun = self.begun();
        begun.saturating_sub(LAST as u64)..begun
    }

    pub(super) fn record(&self, run: u64) -> Result<Record, Verdict> {
        if run >= self.begun() {
            return Err(Verdict::NotYet);
        }
        // An unreadable slot is one that is being overwritten: the run is long past.
        let record = self.slots[run as usize % LAST].read();
        record.filter(|record| record.run == run).ok_or(Verdict::Forgotten)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_runs_are_known_earlier_ones_forgotten_and_later_ones_not_begun() {
        let records = Records::<4>::new();
        assert_eq!(records.record(0), Err(Verdict::NotYet));
        for run in 0..6 {
            records.begin(&Record {
                run,
                signature: run + 100,
                history: 0,
                descriptor: [7; DESCRIPTOR_WORDS],
            });
            assert_eq!(records.record(run).expect("just begun").signature, run + 100);
        }
        assert_eq!((records.begun(), records.last()), (6, 2..6));
        assert_eq!(records.record(1), Err(Verdict::Forgotten));
        assert_eq!(records.record(2).expect("one of the last four").signature, 102);
        assert_eq!(records.record(6), Err(Verdict::NotYet));
    }
}

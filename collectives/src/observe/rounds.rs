//! Counters of the rounds of a group's partial all-reduces.
//!
//! The rounds of one partial all-reduce are the only writer of its counters, under the lock of
//! their group. So an addition is a load and a store. Relaxed: no other memory depends on a number.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use pleach_transport::mutex::lock;
use pleach_vocabulary::Rank;

use super::add;

/// The counters of one partial all-reduce; see the module.
#[derive(Debug)]
pub(crate) struct RoundCounters {
    rounds: AtomicU64,
    /// By rank.
    counted: Box<[AtomicU64]>,
    carried: AtomicU64,
    dropped: AtomicU64,
    corrected: AtomicU64,
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
    /// The number of contributions of this rank that came too late for their round: the sum of the
    /// three numbers below.
    pub late: u64,
    /// The number of late contributions that were carried to a later round.
    pub carried: u64,
    /// The number of late contributions that were dropped.
    pub dropped: u64,
    /// The number of late contributions that were given to the correction of a later round.
    pub corrected: u64,
    /// The number of results that the caller of this rank never saw.
    pub missed: u64,
}

impl RoundCounters {
    pub(crate) fn new(ranks: u32) -> Self {
        let counter = || AtomicU64::new(0);
        Self {
            rounds: counter(),
            counted: (0..ranks).map(|_| counter()).collect(),
            carried: counter(),
            dropped: counter(),
            corrected: counter(),
            missed: counter(),
        }
    }

    /// Counts a round that has ended.
    pub(crate) fn ended(&self, contributors: impl Iterator<Item = Rank>) {
        add(&self.rounds, 1);
        contributors.filter_map(|rank| self.counted.get(rank as usize)).for_each(|counted| add(counted, 1));
    }

    /// Counts a late contribution of the caller that is carried.
    pub(crate) fn carried(&self) {
        add(&self.carried, 1);
    }

    /// Counts a late contribution of the caller that is dropped.
    pub(crate) fn dropped(&self) {
        add(&self.dropped, 1);
    }

    /// Counts a late contribution of the caller that is given to a correction.
    pub(crate) fn corrected(&self) {
        add(&self.corrected, 1);
    }

    /// Counts results that the caller has missed.
    pub(crate) fn missed(&self, results: u64) {
        add(&self.missed, results);
    }

    pub(crate) fn report(&self) -> PartialReport {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let [carried, dropped, corrected] = [&self.carried, &self.dropped, &self.corrected].map(read);
        PartialReport {
            rounds: read(&self.rounds),
            counted: self.counted.iter().map(read).collect(),
            late: carried + dropped + corrected,
            carried,
            dropped,
            corrected,
            missed: read(&self.missed),
        }
    }
}

impl PartialReport {
    /// Adds the counts of other rounds of the same group.
    fn add(&mut self, other: &Self) {
        let Self { rounds, counted, late, carried, dropped, corrected, missed } = other;
        self.rounds += rounds;
        self.counted.resize(counted.len(), 0);
        self.counted.iter_mut().zip(counted).for_each(|(sum, counted)| *sum += counted);
        self.late += late;
        self.carried += carried;
        self.dropped += dropped;
        self.corrected += corrected;
        self.missed += missed;
    }
}

/// The counters of all partial all-reduces of a group.
#[derive(Debug, Default)]
pub(crate) struct RoundsOfGroup(Mutex<Counted>);

#[derive(Debug, Default)]
struct Counted {
    /// Rounds that nobody counts any more.
    over: Option<PartialReport>,
    going: Vec<Arc<RoundCounters>>,
}

impl RoundsOfGroup {
    /// The counters of a further partial all-reduce.
    pub(crate) fn begin(&self, ranks: u32) -> Arc<RoundCounters> {
        let counters = Arc::new(RoundCounters::new(ranks));
        let mut counted = lock(&self.0);
        let Counted { over, going } = &mut *counted;
        going.retain_mut(|counters| {
            let Some(counters) = Arc::get_mut(counters) else { return true };
            over.get_or_insert_default().add(&counters.report());
            false
        });
        going.push(counters.clone());
        counters
    }

    /// The sums; `None` before the first partial all-reduce.
    pub(crate) fn report(&self) -> Option<PartialReport> {
        let counted = lock(&self.0);
        let mut sum = counted.over.clone();
        counted.going.iter().for_each(|counters| sum.get_or_insert_default().add(&counters.report()));
        sum
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_of_rounds_that_are_over_stay_in_the_sum_and_take_no_further_memory() {
        let of_group = RoundsOfGroup::default();
        assert_eq!(of_group.report(), None);
        let going = of_group.begin(2);
        for count in [RoundCounters::carried, RoundCounters::corrected, RoundCounters::carried] {
            let counters = of_group.begin(2);
            counters.ended([1].into_iter());
            count(&counters);
            counters.missed(2);
        }
        going.ended([0, 1].into_iter());
        let late = PartialReport { late: 3, carried: 2, dropped: 0, corrected: 1, ..Default::default() };
        let expected = PartialReport { rounds: 4, counted: vec![1, 4], missed: 6, ..late };
        assert_eq!(of_group.report(), Some(expected));
        assert_eq!(lock(&of_group.0).going.len(), 2, "the last of those that are over, and one that goes on");
    }
}

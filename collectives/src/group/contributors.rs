//! Who contributes to the calls of a step: all ranks, but for those of a session that still read
//! its states ([`Heal::Hidden`](crate::session::Heal)).
//!
//! These take part in each call that reduces, with the neutral element in place of their input, and
//! an average is divided by the number of the others. Calls that do not reduce are refused, as there
//! is nothing that could stand for a block of theirs.
//!
//! **Invariant:** all ranks set the same number before the same call, between two steps. So they
//! divide alike, and refuse the same calls.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use super::{CollectiveError, Group};

/// See the module. All of it is relaxed: it is set between two steps by the thread that makes the
/// session's calls, and whoever makes a call of a step was told to by that thread since.
#[derive(Debug)]
pub(crate) struct Contributors {
    /// All contribute, and the memory is the host's: the shortest calls need not look further.
    are_all_here: AtomicBool,
    /// Zero: all of them.
    count: AtomicU32,
    /// This rank is none.
    is_absent: AtomicBool,
    is_on_host: bool,
}

impl Contributors {
    /// All ranks, whose data are in the host's memory or not.
    pub(crate) fn all(is_on_host: bool) -> Self {
        let (count, is_absent) = (AtomicU32::new(0), AtomicBool::new(false));
        Self { are_all_here: AtomicBool::new(is_on_host), count, is_absent, is_on_host }
    }

    /// Whether all contribute and the group works on the host's memory.
    #[inline(always)]
    pub(crate) fn are_all_here(&self) -> bool {
        self.are_all_here.load(Ordering::Relaxed)
    }

    /// An error unless all contribute.
    pub(crate) fn expect_all(&self) -> Result<(), CollectiveError> {
        let count = self.count.load(Ordering::Relaxed);
        if count == 0 { Ok(()) } else { Err(CollectiveError::Healing { contributors: count }) }
    }
}

impl Group {
    /// How many ranks contribute to the calls of this step: all, but for those of a session that
    /// still read its states ([`Heal::Hidden`](crate::session::Heal)). [`ReduceOp::Avg`] divides by
    /// this number; who sums and divides does the same.
    ///
    /// [`ReduceOp::Avg`]: pleach_vocabulary::ReduceOp::Avg
    #[must_use]
    pub fn contributors(&self) -> u32 {
        match self.shared.contributors.count.load(Ordering::Relaxed) {
            0 => self.world_size(),
            count => count,
        }
    }

    /// Whether this rank contributes. If not, the neutral element stands for its input in this
    /// step, so there is no need to compute that.
    #[must_use]
    pub fn contributes(&self) -> bool {
        !self.shared.contributors.is_absent.load(Ordering::Relaxed)
    }

    /// Only so many ranks contribute, or all; and whether this one does. Between two steps.
    pub(crate) fn set_contributors(&self, count: Option<u32>, contributes: bool) {
        let of = &self.shared.contributors;
        of.count.store(count.unwrap_or(0), Ordering::Relaxed);
        of.is_absent.store(!contributes, Ordering::Relaxed);
        of.are_all_here.store(of.is_on_host && count.is_none(), Ordering::Relaxed);
        self.shared.driver.lock().planner.divide_averages_by(count);
    }
}

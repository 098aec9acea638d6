//! Who contributes to the calls of a step: all ranks, but for those of a session that still read
//! its states ([`Heal::Hidden`](crate::session::Heal)).
//!
//! These take part in each call that reduces, with the neutral element in place of their input, and
//! an average is divided by the number of the others. Calls that do not reduce are refused, as
//! there is nothing that could stand for a block of theirs.
//!
//! **Invariant:** all ranks set the same number before the same call, between two steps. So they
//! divide alike, and refuse the same calls.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use super::CollectiveError;

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
        self.count().map_or(Ok(()), |contributors| Err(CollectiveError::Healing { contributors }))
    }

    /// How many there are; `None`: all.
    pub(crate) fn count(&self) -> Option<u32> {
        Some(self.count.load(Ordering::Relaxed)).filter(|count| *count > 0)
    }

    /// Whether this rank is one of them.
    pub(crate) fn contains_own(&self) -> bool {
        !self.is_absent.load(Ordering::Relaxed)
    }

    /// Only so many, or all; and whether this rank is one of them.
    pub(crate) fn set(&self, count: Option<u32>, contains_own: bool) {
        self.count.store(count.unwrap_or(0), Ordering::Relaxed);
        self.is_absent.store(!contains_own, Ordering::Relaxed);
        self.are_all_here.store(self.is_on_host && count.is_none(), Ordering::Relaxed);
    }
}

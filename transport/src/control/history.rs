//! The processes that have had each rank: none of them gets one again (contract, line 16).

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

use crate::Rank;
use crate::device::Incarnation;
use crate::mutex::lock;

/// Processes that had a rank and are refused it: more than ask for it again at the same time.
const INCARNATIONS_MAX: usize = 256;

/// Who this process is, and the processes that it knows by their ranks. The fabrics of one device
/// share it, so a process that had a rank over one of them does not get it over another.
#[derive(Clone)]
pub(crate) struct KnownProcesses {
    own: Incarnation,
    /// By rank: the last process first.
    of: Arc<Mutex<Vec<VecDeque<Incarnation>>>>,
}

impl KnownProcesses {
    /// Of a new process, which knows nobody.
    pub(crate) fn fresh(world_size: u32) -> Self {
        let none = (0..world_size).map(|_| VecDeque::new()).collect();
        Self { own: Incarnation::fresh(), of: Arc::new(Mutex::new(none)) }
    }

    /// This process.
    pub(crate) fn own(&self) -> Incarnation {
        self.own
    }

    /// The process that has the rank, or had it last.
    pub(crate) fn last(&self, rank: Rank) -> Option<Incarnation> {
        lock(&self.of).get(rank as usize)?.front().copied()
    }

    /// Whether the process has the rank or had it before.
    pub(crate) fn had_rank(&self, rank: Rank, process: Incarnation) -> bool {
        lock(&self.of).get(rank as usize).is_some_and(|known| known.contains(&process))
    }

    /// The process has the rank from now on.
    pub(crate) fn give(&self, rank: Rank, process: Incarnation) {
        if let Some(known) = lock(&self.of).get_mut(rank as usize) {
            known.push_front(process);
            known.truncate(INCARNATIONS_MAX);
        }
    }
}

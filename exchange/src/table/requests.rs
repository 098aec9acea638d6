//! The ids of the last requests. **Invariant:** an id is found as long as it is among the last
//! ones; zero is never found.

use std::collections::{BTreeSet, VecDeque};

/// See the module.
pub(crate) struct RecentRequests {
    limit: usize,
    known: BTreeSet<u64>,
    order: VecDeque<u64>,
}

impl RecentRequests {
    pub(crate) fn new(limit: usize) -> Self {
        Self { limit, known: BTreeSet::new(), order: VecDeque::new() }
    }

    pub(crate) fn contains(&self, id: u64) -> bool {
        self.known.contains(&id)
    }

    pub(crate) fn insert(&mut self, id: u64) {
        if id != 0 && self.known.insert(id) {
            self.order.push_back(id);
        }
        if self.order.len() > self.limit
            && let Some(oldest) = self.order.pop_front()
        {
            self.known.remove(&oldest);
        }
    }
}

//! Steps that were aborted or cleaned up.
//!
//! **Invariant:** of so many ends as the limit says the table knows everything; older ends are
//! forgotten. [`EndedSteps::has_ended_since`] is never wrongly false: where the answer is
//! forgotten, it is true.

use std::collections::BTreeMap;
use std::sync::Arc;

/// See the module.
pub(crate) struct EndedSteps {
    limit: usize,
    steps: BTreeMap<u64, End>,
    /// By the order of their ends.
    order: BTreeMap<u64, u64>,
    /// Ends up to this one may be forgotten.
    forgotten: u64,
}

/// The last end of a step.
struct End {
    /// Its place in the order of all requests.
    order: u64,
    /// Why it was aborted, unless it was cleaned up since.
    aborted: Option<Arc<str>>,
}

impl EndedSteps {
    pub(crate) fn new(limit: usize) -> Self {
        Self { limit, steps: BTreeMap::new(), order: BTreeMap::new(), forgotten: 0 }
    }

    /// Why a step was aborted, if it was.
    pub(crate) fn aborted(&self, step: u64) -> Option<&Arc<str>> {
        self.steps.get(&step)?.aborted.as_ref()
    }

    /// Whether the step was aborted or cleaned up after this place in the order of requests.
    pub(crate) fn has_ended_since(&self, step: u64, order: u64) -> bool {
        self.forgotten > order || self.steps.get(&step).is_some_and(|end| end.order > order)
    }

    /// The step was aborted. The first reason stays.
    pub(crate) fn abort(&mut self, step: u64, order: u64, reason: Arc<str>) {
        if self.aborted(step).is_none() {
            self.end(step, End { order, aborted: Some(reason) });
        }
    }

    /// The step was cleaned up: it may begin anew.
    pub(crate) fn clean_up(&mut self, step: u64, order: u64) {
        self.end(step, End { order, aborted: None });
    }

    fn end(&mut self, step: u64, end: End) {
        self.order.insert(end.order, step);
        if let Some(before) = self.steps.insert(step, end) {
            self.order.remove(&before.order);
        }
        while self.steps.len() > self.limit
            && let Some((order, step)) = self.order.pop_first()
        {
            self.steps.remove(&step);
            self.forgotten = order;
        }
    }
}

//! Where a thread waits for the end of its request.

use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

use pleach_transport::mutex::lock;

/// The end of a request, for the thread that waits for it.
pub(crate) struct Slot<R> {
    state: Mutex<SlotState<R>>,
    changed: Condvar,
}

enum SlotState<R> {
    Waiting,
    Ended(R),
    /// The result was taken, or nobody waits for it.
    Left,
}

impl<R> Slot<R> {
    pub(crate) fn new() -> Self {
        Self { state: Mutex::new(SlotState::Waiting), changed: Condvar::new() }
    }

    /// Ends the request. The result comes back when nobody waits for it.
    pub(crate) fn end(&self, result: R) -> Option<R> {
        let mut state = lock(&self.state);
        if !matches!(*state, SlotState::Waiting) {
            return Some(result);
        }
        *state = SlotState::Ended(result);
        self.changed.notify_all();
        None
    }

    /// The result, once.
    pub(crate) fn take(&self) -> Option<R> {
        let mut state = lock(&self.state);
        if !matches!(*state, SlotState::Ended(_)) {
            return None;
        }
        match std::mem::replace(&mut *state, SlotState::Left) {
            SlotState::Ended(result) => Some(result),
            SlotState::Waiting | SlotState::Left => None,
        }
    }

    /// The result, which stays.
    pub(crate) fn peek(&self) -> Option<R>
    where
        R: Clone,
    {
        match &*lock(&self.state) {
            SlotState::Ended(result) => Some(result.clone()),
            SlotState::Waiting | SlotState::Left => None,
        }
    }

    /// Whether the request has ended.
    pub(crate) fn has_ended(&self) -> bool {
        !matches!(*lock(&self.state), SlotState::Waiting)
    }

    /// The result, or that nobody waits for it from now on.
    pub(crate) fn leave(&self) -> Option<R> {
        let result = self.take();
        *lock(&self.state) = SlotState::Left;
        result
    }

    /// Waits for the end, as long as this.
    pub(crate) fn wait(&self, limit: Duration) {
        let state = lock(&self.state);
        let is_waiting = |state: &mut SlotState<R>| matches!(state, SlotState::Waiting);
        drop(
            self.changed.wait_timeout_while(state, limit, is_waiting).unwrap_or_else(PoisonError::into_inner),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_result_is_taken_once_and_comes_back_when_nobody_waits() {
        let slot = Slot::new();
        assert_eq!((slot.has_ended(), slot.take()), (false, None));
        slot.wait(Duration::ZERO);
        assert_eq!((slot.end(1), slot.end(2)), (None, Some(2)));
        slot.wait(Duration::MAX);
        assert_eq!((slot.take(), slot.take(), slot.end(3)), (Some(1), None, Some(3)));
        let left = Slot::new();
        assert_eq!((left.leave(), left.end(4)), (None, Some(4)));
    }
}

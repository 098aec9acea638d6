//! Where a thread waits for the end of its request.

use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

use pleach_transport::mutex::lock;

/// The end of a request, for the thread that waits for it.
pub(crate) struct Slot<R> {
    state: Mutex<SlotState<R>>,
    changed: Condvar,
}

/// What is called at the end of a request.
type EndCall = Box<dyn FnOnce() + Send>;

enum SlotState<R> {
    Waiting(Option<EndCall>),
    Ended(R),
    /// The result was taken, or nobody waits for it.
    Left,
}

impl<R> Slot<R> {
    pub(crate) fn new() -> Self {
        Self { state: Mutex::new(SlotState::Waiting(None)), changed: Condvar::new() }
    }

    /// Ends the request. The result comes back when nobody waits for it.
    pub(crate) fn end(&self, result: R) -> Option<R> {
        let mut state = lock(&self.state);
        let SlotState::Waiting(call) = &mut *state else { return Some(result) };
        let call = call.take();
        *state = SlotState::Ended(result);
        self.changed.notify_all();
        drop(state);
        if let Some(call) = call {
            call();
        }
        None
    }

    /// Has `call` called when the request ends; at once if it has ended. It is dropped uncalled
    /// when nobody waits any more.
    pub(crate) fn call_at_end(&self, call: EndCall) {
        let mut state = lock(&self.state);
        match &mut *state {
            SlotState::Waiting(place) => *place = Some(call),
            SlotState::Ended(_) | SlotState::Left => {
                drop(state);
                call();
            }
        }
    }

    /// The result, once.
    pub(crate) fn take(&self) -> Option<R> {
        let mut state = lock(&self.state);
        if !matches!(*state, SlotState::Ended(_)) {
            return None;
        }
        match std::mem::replace(&mut *state, SlotState::Left) {
            SlotState::Ended(result) => Some(result),
            SlotState::Waiting(_) | SlotState::Left => None,
        }
    }

    /// The result, which stays.
    pub(crate) fn peek(&self) -> Option<R>
    where
        R: Clone,
    {
        match &*lock(&self.state) {
            SlotState::Ended(result) => Some(result.clone()),
            SlotState::Waiting(_) | SlotState::Left => None,
        }
    }

    /// Whether the request has ended.
    pub(crate) fn has_ended(&self) -> bool {
        !matches!(*lock(&self.state), SlotState::Waiting(_))
    }

    /// The result, or that nobody waits for it from now on.
    pub(crate) fn leave(&self) -> Option<R> {
        // At once: a result that came between two steps would be lost to the next receiver.
        match std::mem::replace(&mut *lock(&self.state), SlotState::Left) {
            SlotState::Ended(result) => Some(result),
            SlotState::Waiting(_) | SlotState::Left => None,
        }
    }

    /// Waits for the end, as long as this.
    pub(crate) fn wait(&self, limit: Duration) {
        let state = lock(&self.state);
        let is_waiting = |state: &mut SlotState<R>| matches!(state, SlotState::Waiting(_));
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

    #[test]
    fn the_end_is_told_once_and_at_once_where_it_has_come() {
        let (told, heard) = std::sync::mpsc::channel();
        let call = |number: u32| {
            let told = told.clone();
            Box::new(move || told.send(number).expect("is heard"))
        };
        let slot = Slot::new();
        slot.call_at_end(call(1));
        assert!(heard.try_recv().is_err());
        assert_eq!((slot.end(()), slot.end(())), (None, Some(())));
        slot.call_at_end(call(2));
        let left = Slot::<()>::new();
        left.call_at_end(call(3));
        assert_eq!(left.leave(), None);
        assert_eq!(heard.try_iter().collect::<Vec<_>>(), [1, 2]);
    }
}

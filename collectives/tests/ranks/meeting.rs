//! Where threads of a test wait for each other.

use std::sync::{Condvar, Mutex};
use std::time::Duration;

/// How long who has come waits for the others.
const PATIENCE: Duration = Duration::from_secs(60);

/// A [`std::sync::Barrier`] with a limit of time. A thread whose call has failed never comes, and
/// the test has to fail then.
pub(crate) struct Meeting {
    threads: usize,
    /// How many have come so far, of all meetings.
    came: Mutex<usize>,
    changed: Condvar,
}

impl Meeting {
    /// Of so many threads.
    pub(crate) fn new(threads: usize) -> Self {
        Self { threads, came: Mutex::new(0), changed: Condvar::new() }
    }

    /// Waits for all.
    ///
    /// # Panics
    ///
    /// When one does not come.
    pub(crate) fn wait(&self) {
        let mut came = self.came.lock().expect("nobody panics with the lock");
        *came += 1;
        // Of the meetings before this one all have come.
        let all = came.next_multiple_of(self.threads);
        self.changed.notify_all();
        let waited = self.changed.wait_timeout_while(came, PATIENCE, |came| *came < all);
        let is_late = waited.expect("nobody panics with the lock").1.timed_out();
        assert!(!is_late, "another thread of the test does not come: its call may have failed");
    }
}

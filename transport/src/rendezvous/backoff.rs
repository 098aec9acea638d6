//! Exponential backoff between attempts, up to a deadline.

use std::time::Duration;

use crate::Nanos;
use crate::clock::now;

/// First pause between two attempts.
const PAUSE_MIN: Duration = Duration::from_millis(1);

/// Longest pause between two attempts.
const PAUSE_MAX: Duration = Duration::from_millis(50);

/// A series of attempts that ends at a deadline.
pub(super) struct Backoff {
    started: Nanos,
    deadline: Nanos,
    pause: Duration,
}

impl Backoff {
    pub(super) fn until(deadline: Nanos) -> Self {
        Self { started: now(), deadline, pause: PAUSE_MIN }
    }

    /// Sleeps for a pause; false when the time is up.
    pub(super) fn again(&mut self) -> bool {
        let left = self.deadline.since(now());
        if left.is_zero() {
            return false;
        }
        let pause = self.pause.min(left);
        let limit = rustix::time::Timespec { tv_sec: 0, tv_nsec: i64::from(pause.subsec_nanos()) };
        // A signal may end it early: then the next attempt comes a little earlier.
        let _ = rustix::event::poll(&mut [], Some(&limit));
        self.pause = (self.pause * 2).min(PAUSE_MAX);
        true
    }

    /// Time left.
    pub(super) fn left(&self) -> Duration {
        self.deadline.since(now())
    }

    /// Time passed.
    pub(super) fn waited(&self) -> Duration {
        now().since(self.started)
    }
}

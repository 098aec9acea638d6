//! How a thread goes to sleep without losing a wake-up: arm, check again, wait.
//!
//! A thread that polls has checked before it decides to sleep. An event can come between that check
//! and the arming of the wake source, and such an event wakes nobody. So the thread checks once
//! more *after* the arming; later events wake it. The group's driver, the tests of every device and
//! the models of all interleavings sleep by this one function.

/// Arms a wake source, checks again, and waits for the wake source if nothing has come. Returns
/// whether it has waited.
///
/// `arm` returns `None` when something may have come already. `check` returns whether something has
/// come; it checks everything that the sleeper waits for: signal slots, events, and requests of
/// other threads.
pub fn unless_ready<T: ?Sized, B>(
    sleeper: &mut T,
    arm: impl FnOnce(&mut T) -> Option<B>,
    check: impl FnOnce(&mut T) -> bool,
    wait: impl FnOnce(&mut T, B),
) -> bool {
    let Some(wake_source) = arm(sleeper) else { return false };
    if check(sleeper) {
        return false;
    }
    wait(sleeper, wake_source);
    true
}

//! How a thread goes to sleep without losing a wake-up: arm, look again, wait.
//!
//! A thread that polls has looked before it decides to sleep. News can come between that look and
//! the moment when the wake source is armed, and such news wakes nothing. So the thread looks once
//! more *after* the wake source was armed. News from then on wakes the sleeper. The group's
//! driver, the tests of every device and the models of every interleaving all sleep by this one
//! function.

/// Arms a wake source, looks again, and waits for the wake source if nothing has come. Returns
/// whether it has waited.
///
/// `arm` returns `None` where something may have come already. `look` returns whether something has
/// come, and looks at everything that the sleeper waits for: signal slots, events, and what other
/// threads told.
pub fn unless_news<T: ?Sized, B>(
    sleeper: &mut T,
    arm: impl FnOnce(&mut T) -> Option<B>,
    look: impl FnOnce(&mut T) -> bool,
    wait: impl FnOnce(&mut T, B),
) -> bool {
    let Some(wake_source) = arm(sleeper) else { return false };
    if look(sleeper) {
        return false;
    }
    wait(sleeper, wake_source);
    true
}

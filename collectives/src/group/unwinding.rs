//! What a panic must not leave.
//!
//! While an operation is under way, this rank and its peers read and write memory that a blocking
//! call has borrowed or that a `Pending` owns. A panic inside of the engine (a fault of pleach, or
//! of a subscriber of `tracing`) would free that memory as it unwinds, and the operation would go
//! on. Neither can be waited for then: the engine may have been left in the middle of a change.
//! **Invariant:** such a panic ends the process, with its reason printed, before it frees anything.

use std::io::Write as _;
use std::process;

/// Does work that uses memory which unwinding would free. Costs nothing where nothing panics.
pub(super) fn without_unwinding<T>(work: impl FnOnce() -> T) -> T {
    let unwinding = AbortOnUnwind;
    let value = work();
    std::mem::forget(unwinding);
    value
}

/// Dropped by unwinding alone.
struct AbortOnUnwind;

impl Drop for AbortOnUnwind {
    fn drop(&mut self) {
        end_process("a panic came up while collectives were under way on memory that it would free");
    }
}

/// Ends the process at once when a panic leaves its scope: for scopes with several ends.
pub(super) struct NoUnwinding {
    /// The scope may be one that itself runs because of a panic, as a drop does.
    was_panicking: bool,
}

impl NoUnwinding {
    pub(super) fn new() -> Self {
        Self { was_panicking: std::thread::panicking() }
    }
}

impl Drop for NoUnwinding {
    fn drop(&mut self) {
        if !self.was_panicking && std::thread::panicking() {
            drop(AbortOnUnwind);
        }
    }
}

/// Prints why and ends the process, without unwinding and without running what is due at its exit.
#[cold]
pub(super) fn end_process(reason: &str) -> ! {
    // Who cannot be told why still must not go on.
    let _ = writeln!(std::io::stderr(), "pleach: the process ends: {reason}");
    process::abort()
}

//! Programs that are stopped by a signal, and go on.

use std::process::Child;
use std::time::Duration;

use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};

/// What a stopped program is let go on after: shorter than the deadline of calls.
pub(crate) const PAUSE: Duration = Duration::from_millis(300);

/// Sends a signal; of a stop, waits until all threads have stopped.
pub(crate) fn signal(child: &Child, signal: Signal) {
    kill_process(Pid::from_child(child), signal).expect("it runs");
    if signal == Signal::STOP {
        let state = waitpid(Some(Pid::from_child(child)), WaitOptions::UNTRACED);
        assert!(state.expect("is a child").is_some_and(|(_, status)| status.stopped()));
    }
}

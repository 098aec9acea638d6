//! A thread of the group that carries on what was started while the caller computes.
//!
//! It wants the engine only while something is under way, and steps back at once for a thread that makes a call, which
//! drives everything itself. With nothing under way it is parked and costs nothing; while peers are waited for it sleeps on
//! the device's bell. **Invariants:** a run that was started is driven until it ends, whatever else happens, unless the
//! thread is stopped; and it is stopped, and gone, before its group is.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use pleach_transport::Ring;

use super::driver::Driver;

/// Longest time that the thread is parked, in case it is not woken by mistake.
const PARKED_MAX: Duration = Duration::from_secs(1);

/// Who carries on what was started by a `start_` call.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Progress {
    /// Whoever is in a call of the group, or tests or waits for something.
    #[default]
    WhenCalled,
    /// Besides, a thread of the group's own, so that the caller may compute meanwhile. It takes a part of a processor while
    /// something is under way; calls that block are not made slower while nothing is.
    Thread,
}

/// A running thread; dropping it ends it.
pub(super) struct ProgressThread {
    signal: Arc<Signal>,
    ringer: Arc<dyn Ring>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct Signal {
    /// Something was started. Release by who starts, acquire by the thread: it finds the run.
    has_work: AtomicBool,
    /// Release by who stops the thread, acquire by the thread.
    is_over: AtomicBool,
}

impl ProgressThread {
    pub(super) fn start(driver: Arc<Driver>, number: u64) -> std::io::Result<Self> {
        let signal = Arc::<Signal>::default();
        let (theirs, ringer) = (signal.clone(), driver.ringer());
        // As long as the system shows names.
        let name = format!("pleach-run-{}", number % 1000);
        let thread = thread::Builder::new().name(name).spawn(move || theirs.carry_on(&driver))?;
        Ok(Self { signal, ringer, thread: Some(thread) })
    }

    /// Says that something was started.
    pub(super) fn wake(&self) {
        if !self.signal.has_work.swap(true, Ordering::Release)
            && let Some(thread) = &self.thread
        {
            thread.thread().unpark();
        }
    }

    /// In a forked child there is no such thread.
    pub(super) fn forget(self) {
        std::mem::forget(self);
    }
}

impl Signal {
    fn carry_on(&self, driver: &Driver) {
        while !self.is_over.load(Ordering::Acquire) {
            if self.has_work.swap(false, Ordering::Acquire) {
                driver.carry_on(&self.is_over);
            } else {
                thread::park_timeout(PARKED_MAX);
            }
        }
    }
}

impl Drop for ProgressThread {
    fn drop(&mut self) {
        self.signal.is_over.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            // It may be asleep on the device's bell.
            self.ringer.ring();
            // A panic there has been reported by the thread itself.
            let _ = thread.join();
        }
    }
}

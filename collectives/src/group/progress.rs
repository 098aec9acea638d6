//! A thread of the group that carries on what was started while the caller computes.
//!
//! The first call of a group that is started starts the thread: a group whose calls all block has
//! none, unless its pairs connect on use. Then the thread also polls when a peer waits for a
//! connection to this rank, which may be in no call. The thread takes the engine only while
//! something is under way, and steps back at once for a thread that makes a call, which drives
//! everything itself. It stays back while that thread makes one call after the other. With nothing
//! under way the thread is parked and costs nothing; while peers are waited for it sleeps on the
//! device's wake source. Where a partial all-reduce waits for this rank's caller alone, the thread
//! is parked and looks from time to time.
//!
//! **Invariants:** a run that was started is driven until it ends, whatever else happens, unless
//! the thread is stopped; and the thread is stopped, and gone, before its group is.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use super::driver::Driver;
use pleach_transport::mutex::lock;

/// Longest time that the thread is parked, in case it is not woken by mistake.
const PARKED_MAX: Duration = Duration::from_secs(1);

/// Who carries on what was started by [`Group::start`](super::Group::start).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Progress {
    /// Callers alone: whoever is in a call of the group, or tests or waits for something. Transfers
    /// stand still while the caller computes.
    WhenCalled,
    /// Callers, and a thread of the group's own, so that transfers go on while the caller computes.
    /// The first call that is started starts the thread. It takes a part of a processor while
    /// something is under way; calls that block are not made slower while nothing is.
    #[default]
    Thread,
}

/// The thread of a group, from the first use that needs it; dropping it ends it.
pub(super) struct ProgressThread {
    wake_flag: Arc<WakeFlag>,
    driver: Arc<Driver>,
    name: String,
    thread: OnceLock<JoinHandle<()>>,
    /// Held by the call that starts the thread.
    starting: Mutex<()>,
}

#[derive(Default)]
struct WakeFlag {
    /// Something was started, or a peer waits for a connection. Release by who starts, acquire by
    /// the thread: it finds the run.
    has_work: AtomicBool,
    /// Release by who stops the thread, acquire by the thread.
    is_over: AtomicBool,
}

impl ProgressThread {
    /// Of the group with this number, if it is to have one. Nothing runs yet, unless pairs connect
    /// on use.
    pub(super) fn new(
        progress: Progress,
        driver: &Arc<Driver>,
        number: u64,
    ) -> std::io::Result<Option<Self>> {
        if progress == Progress::WhenCalled {
            return Ok(None);
        }
        let progress = Self {
            wake_flag: Arc::default(),
            driver: driver.clone(),
            // As long as the system shows names.
            name: format!("pleach-run-{}", number % 1000),
            thread: OnceLock::new(),
            starting: Mutex::new(()),
        };
        if progress.driver.board().relays() {
            progress.begin()?;
            progress.driver.board().alarm_by(progress.alarm());
            // A peer may have asked before there was an alarm, and a poll of the joining caller has
            // begun to connect to it. The pair is ready after more polls, and a connected peer does
            // not ring.
            progress.wake();
        }
        Ok(Some(progress))
    }

    /// Starts the thread where no call has done so yet. Before anything is put under way: an error
    /// leaves nothing behind.
    pub(super) fn begin(&self) -> std::io::Result<()> {
        if self.thread.get().is_some() {
            return Ok(());
        }
        let _starting = lock(&self.starting);
        if self.thread.get().is_none() {
            let (wake_flag, driver) = (self.wake_flag.clone(), self.driver.clone());
            let thread =
                thread::Builder::new().name(self.name.clone()).spawn(move || wake_flag.carry_on(&driver))?;
            self.thread.get_or_init(|| thread);
        }
        Ok(())
    }

    /// Says that something was started.
    pub(super) fn wake(&self) {
        if !self.wake_flag.has_work.swap(true, Ordering::Release)
            && let Some(thread) = self.thread.get()
        {
            thread.thread().unpark();
        }
    }

    /// What wakes the thread, which runs, from any thread: a peer waits for a connection.
    fn alarm(&self) -> impl Fn() + Send + Sync + 'static {
        let wake_flag = self.wake_flag.clone();
        let thread = self.thread.get().map(|thread| thread.thread().clone());
        move || {
            wake_flag.has_work.store(true, Ordering::Release);
            thread.iter().for_each(thread::Thread::unpark);
        }
    }

    /// In a forked child there is no such thread.
    pub(super) fn forget(self) {
        std::mem::forget(self);
    }
}

impl WakeFlag {
    fn carry_on(&self, driver: &Driver) {
        while !self.is_over.load(Ordering::Acquire) {
            if self.has_work.swap(false, Ordering::Acquire) {
                driver.carry_on(&self.has_work, &self.is_over);
            } else {
                thread::park_timeout(PARKED_MAX);
            }
        }
    }
}

impl Drop for ProgressThread {
    fn drop(&mut self) {
        self.wake_flag.is_over.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            // It may be asleep.
            self.driver.waker().wake();
            // A panic there has been reported by the thread itself.
            let _ = thread.join();
        }
    }
}

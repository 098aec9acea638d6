//! A device's watcher thread, and how long a device waits for its end.

use std::io;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::fork::Process;

/// See the module.
pub(crate) struct WatcherThread {
    /// The process of the thread: a forked child has no thread.
    process: Process,
    thread: Option<JoinHandle<()>>,
    /// Disconnected when the thread has ended in any way: the thread holds the only sender.
    end: Mutex<Receiver<()>>,
}

impl WatcherThread {
    pub(crate) fn spawn(name: String, run: impl FnOnce() + Send + 'static) -> io::Result<Self> {
        let (watches, end) = channel();
        let thread = std::thread::Builder::new().name(name).spawn(move || {
            let _watches: std::sync::mpsc::Sender<()> = watches;
            run();
        })?;
        Ok(Self { process: Process::current(), thread: Some(thread), end: Mutex::new(end) })
    }

    /// Whether this is a forked child of the process that made the device. A child must not use or
    /// close its copies of the streams.
    pub(crate) fn is_forked(&self) -> bool {
        !self.process.is_current()
    }

    /// Waits for the end of the thread, which was told to stop, up to a limit: a responder may
    /// block.
    pub(crate) fn join(&mut self, limit: Duration) {
        let Some(thread) = self.thread.take() else { return };
        // No wait when the watcher itself drops the device, through its responder: the watcher ends
        // when it returns from there.
        let is_watcher = thread.thread().id() == std::thread::current().id();
        let limit = if is_watcher { Duration::ZERO } else { limit };
        let end = self.end.get_mut().unwrap_or_else(PoisonError::into_inner);
        match end.recv_timeout(limit) {
            Err(RecvTimeoutError::Timeout) if is_watcher => {}
            Err(RecvTimeoutError::Timeout) => {
                let name = thread.thread().name().unwrap_or_default();
                tracing::warn!(name, "the responder blocks; its thread is left behind");
            }
            // The thread itself reported a panic.
            _ => drop(thread.join()),
        }
    }
}

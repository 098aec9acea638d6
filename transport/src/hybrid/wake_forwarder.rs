//! One wake source for a futex word and a file: a thread sleeps on the file, and wakes the word.
//!
//! The thread waits on its own epoll, where the file is listed for one shot. [`WakeForwarder::arm`]
//! enables the shot, [`WakeForwarder::disarm`] disables it: one system call each, only for a thread
//! that goes to sleep. A thread that polls causes no wake-ups.
//!
//! **Invariant:** from `arm` to `disarm` the file does not stay readable without a wake of the
//! word: enabling the shot checks the file, and so does every later change of its readiness.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::thread::{self, JoinHandle};

use rustix::event::{EventfdFlags, epoll, eventfd};

use crate::Rank;
use crate::device::Wake;
use crate::fork::Process;

/// Epoll data of the watched file.
const FILE: u64 = 0;

/// Epoll data of the request to stop.
const STOP: u64 = 1;

/// Events taken at a time: there are two sources.
const EVENTS: usize = 2;

/// See the module.
pub(super) struct WakeForwarder {
    epoll: Arc<OwnedFd>,
    stop: OwnedFd,
    thread: Option<JoinHandle<()>>,
    is_armed: bool,
    process: Process,
}

impl WakeForwarder {
    /// Between `file` and `wake_source`, not armed. The file must stay open while the forwarder is
    /// used.
    pub(super) fn new(rank: Rank, file: &OwnedFd, wake_source: Arc<dyn Wake>) -> io::Result<Self> {
        let epoll = Arc::new(epoll::create(epoll::CreateFlags::CLOEXEC)?);
        let stop = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        epoll::add(&epoll, file, epoll::EventData::new_u64(FILE), epoll::EventFlags::ONESHOT)?;
        epoll::add(&epoll, &stop, epoll::EventData::new_u64(STOP), epoll::EventFlags::IN)?;
        let waits = Arc::clone(&epoll);
        let thread = thread::Builder::new()
            .name(format!("pleach-wake-{rank}"))
            .spawn(move || forward_wakes(&waits, &*wake_source))?;
        Ok(Self { epoll, stop, thread: Some(thread), is_armed: false, process: Process::current() })
    }

    /// From now on the word is woken when the file is readable. After an error: poll again instead
    /// of sleeping.
    pub(super) fn arm(&mut self, file: &OwnedFd) -> io::Result<()> {
        self.set(file, epoll::EventFlags::IN | epoll::EventFlags::ONESHOT)?;
        self.is_armed = true;
        Ok(())
    }

    /// Stops waking the word.
    pub(super) fn disarm(&mut self, file: &OwnedFd) {
        if self.is_armed {
            self.is_armed = false;
            // It cannot fail for a file that is listed; a failure would cause one useless wake.
            let _ = self.set(file, epoll::EventFlags::ONESHOT);
        }
    }

    fn set(&self, file: &OwnedFd, flags: epoll::EventFlags) -> io::Result<()> {
        Ok(epoll::modify(&self.epoll, file, epoll::EventData::new_u64(FILE), flags)?)
    }
}

impl Drop for WakeForwarder {
    fn drop(&mut self) {
        // A forked child has no thread to end.
        if !self.process.is_current() {
            return;
        }
        // It fails only when the counter is full, and then the file is readable already.
        let _ = rustix::io::write(&self.stop, &1_u64.to_ne_bytes());
        if let Some(thread) = self.thread.take() {
            // The thread does nothing that panics.
            let _ = thread.join();
        }
    }
}

fn forward_wakes(epoll: &OwnedFd, wake_source: &dyn Wake) {
    let mut space = Vec::with_capacity(EVENTS);
    loop {
        space.clear();
        // Interrupted: no event was taken, so none is missed.
        if epoll::wait(epoll, rustix::buffer::spare_capacity(&mut space), None).is_err() {
            continue;
        }
        if space.iter().any(|event: &epoll::Event| event.data.u64() == STOP) {
            return;
        }
        if !space.is_empty() {
            wake_source.wake();
        }
    }
}

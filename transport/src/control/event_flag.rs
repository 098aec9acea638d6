//! A flag with a file descriptor that is readable while the flag is set. One thread sets the flag
//! to wake another thread that sleeps on descriptors.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::event::{EventfdFlags, eventfd};

use crate::device::Wake;

/// See the module.
pub(crate) struct EventFlag {
    file: OwnedFd,
    is_set: AtomicBool,
}

impl EventFlag {
    pub(crate) fn new() -> std::io::Result<Self> {
        let file = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self { file, is_set: AtomicBool::new(false) })
    }

    /// Whether it was set since it was last drained. One load: for polls.
    pub(crate) fn is_set(&self) -> bool {
        // Acquire: pairs with the release in `wake`.
        self.is_set.load(Ordering::Acquire)
    }

    /// Makes the file unreadable; returns whether the flag was set. All that the other thread wrote
    /// before it set the flag is visible then.
    pub(crate) fn drain(&self) -> bool {
        let mut count = [0; 8];
        // There may be nothing to read. Either the flag is not set, or `wake` has set it and not
        // written yet. In that case the write comes after this read, and wakes the next sleep
        // without need.
        let read = rustix::io::read(&self.file, &mut count).is_ok();
        // AcqRel: pairs with the swap in `wake`. A `wake` after this swap writes again.
        self.is_set.swap(false, Ordering::AcqRel) || read
    }
}

impl Wake for EventFlag {
    fn wake(&self) {
        // AcqRel: pairs with `drain` and `is_set`.
        if !self.is_set.swap(true, Ordering::AcqRel) {
            // The write fails only when the counter is full, and then the file is readable.
            let _ = rustix::io::write(&self.file, &1u64.to_ne_bytes());
        }
    }
}

impl AsFd for EventFlag {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flag_is_set_until_it_is_drained_and_its_file_readable_as_long() {
        let flag = EventFlag::new().expect("a descriptor");
        let is_readable = || {
            let mut poll = [rustix::event::PollFd::new(&flag, rustix::event::PollFlags::IN)];
            let at_once = rustix::time::Timespec { tv_sec: 0, tv_nsec: 0 };
            rustix::event::poll(&mut poll, Some(&at_once)) == Ok(1)
        };
        assert!(!flag.is_set() && !is_readable() && !flag.drain());
        flag.wake();
        flag.wake();
        assert!(flag.is_set() && is_readable());
        assert!(flag.drain());
        assert!(!flag.is_set() && !is_readable() && !flag.drain());
    }
}

//! Forks as programs make them without exec: the child holds whatever its parent had open.
#![allow(unsafe_code)]

use std::panic::{AssertUnwindSafe, catch_unwind};

use pleach::transport::clock::now;
use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};

use crate::ranks::{PATIENCE, pause};

/// Exit status of a child that panicked.
const PANICKED: i32 = 101;

/// Forks; the child ends with the status that `in_child` returns.
pub(crate) fn fork(in_child: impl FnOnce() -> i32) -> Pid {
    // SAFETY: the child uses what fork leaves intact only: memory, descriptors, and libc's own
    // locks, which it repairs.
    match unsafe { libc::fork() } {
        0 => {
            let status = catch_unwind(AssertUnwindSafe(in_child)).unwrap_or(PANICKED);
            // SAFETY: ends this process, without what the parent registered to run at its end.
            unsafe { libc::_exit(status) }
        }
        id => {
            Pid::from_raw(id).filter(|id| id.as_raw_nonzero().get() > 0).expect("there is room for a process")
        }
    }
}

/// Does nothing until it is killed; not for ever, should that be forgotten.
pub(crate) fn hold() -> i32 {
    let deadline = now() + PATIENCE * 2;
    while now() < deadline {
        pause();
    }
    0
}

/// The status with which a child ends; it is killed when it takes too long.
pub(crate) fn status(child: Pid) -> Result<i32, &'static str> {
    let deadline = now() + PATIENCE / 4;
    loop {
        let ended = waitpid(Some(child), WaitOptions::NOHANG).map_err(|_| "is no child")?;
        if let Some((_, status)) = ended {
            return status.exit_status().ok_or("was killed");
        }
        if now() >= deadline {
            let _ = kill_process(child, Signal::KILL);
            let _ = waitpid(Some(child), WaitOptions::empty());
            return Err("hangs");
        }
        pause();
    }
}

/// A process that ends with the test, somebody else's child.
pub(crate) struct Grandchild(pub(crate) Pid);

impl Drop for Grandchild {
    fn drop(&mut self) {
        let _ = kill_process(self.0, Signal::KILL);
    }
}

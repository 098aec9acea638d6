//! Detects at no cost whether this is still the process that made an object. After fork a child
//! holds the same handles, but its peers talk to the parent.
#![allow(unsafe_code)]

use std::sync::Once;
use std::sync::atomic::{AtomicU32, Ordering};

/// Forks between the first process that asked and this one. Relaxed: it changes only in a child,
/// which has one thread.
static FORKS: AtomicU32 = AtomicU32::new(0);

static REGISTER: Once = Once::new();

extern "C" fn count_fork() {
    FORKS.fetch_add(1, Ordering::Relaxed);
}

/// A process at a point in time.
#[derive(Clone, Copy, Debug)]
pub struct Process {
    forks: u32,
    id: u32,
}

impl Process {
    /// The current process.
    #[must_use]
    pub fn current() -> Self {
        REGISTER.call_once(|| {
            // SAFETY: the handler is a static function and accesses an atomic only, as is allowed
            // after fork. It fails only without memory; then a child is not detected, which costs
            // it an error message.
            let _ = unsafe { libc::pthread_atfork(None, None, Some(count_fork)) };
        });
        Self { forks: FORKS.load(Ordering::Relaxed), id: std::process::id() }
    }

    /// Whether it is still the current process.
    #[must_use]
    #[inline]
    pub fn is_current(&self) -> bool {
        self.forks == FORKS.load(Ordering::Relaxed)
    }

    /// Its process id.
    #[must_use]
    pub fn id(&self) -> u32 {
        self.id
    }
}

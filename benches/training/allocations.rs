//! Counts what this program allocates.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

/// The system's allocator, with counters.
struct Counting;

#[global_allocator]
static COUNTING: Counting = Counting;

// Relaxed: counters, read by the thread whose allocations they are to show, or after it has joined
// the others.
static COUNT: AtomicUsize = AtomicUsize::new(0);
static BYTES: AtomicUsize = AtomicUsize::new(0);
static MOST: AtomicUsize = AtomicUsize::new(0);

// SAFETY: passes everything on to the system's allocator.
#[allow(unsafe_code)]
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        COUNT.fetch_add(1, Ordering::Relaxed);
        let bytes = BYTES.fetch_add(layout.size(), Ordering::Relaxed) + layout.size();
        MOST.fetch_max(bytes, Ordering::Relaxed);
        // SAFETY: by the contract of this function.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, address: *mut u8, layout: Layout) {
        BYTES.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: by the contract of this function.
        unsafe { System.dealloc(address, layout) }
    }
}

/// What `body` returns, with the number of its allocations.
pub(crate) fn counted<T>(body: impl FnOnce() -> T) -> (T, usize) {
    let before = COUNT.load(Ordering::Relaxed);
    let result = body();
    (result, COUNT.load(Ordering::Relaxed) - before)
}

/// What `body` returns, with the most bytes that were allocated meanwhile.
pub(crate) fn most_bytes<T>(body: impl FnOnce() -> T) -> (T, usize) {
    MOST.store(BYTES.load(Ordering::Relaxed), Ordering::Relaxed);
    let result = body();
    (result, MOST.load(Ordering::Relaxed))
}

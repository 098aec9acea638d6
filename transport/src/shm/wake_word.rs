//! The wake source: one word in shared memory on which a rank sleeps and which its peers wake.
//!
//! Odd = its owner sleeps or is about to; even = awake. Arming makes it odd, waking makes it even
//! again and wakes. So of many senders only the first to find an odd word makes a syscall, and none
//! does while the owner is awake.
//!
//! **Invariant:** no wake-up is lost. The owner stores the odd word, passes a SeqCst fence, then
//! looks for news; a sender stores its news, passes a SeqCst fence, then looks at the word.
//! Whichever fence comes first in the total order, the other side sees what was stored before it:
//! the owner sees the news, or the sender sees the odd word.
//!
//! A peer may write nonsense into the word. The worst that comes of it is a sleep until its time
//! limit, or none.

use crate::primitive::{AtomicU32, Ordering, fence};

const ARMED: u32 = 1;

/// Says that the owner is going to sleep, and returns what the word holds meanwhile. News must be
/// looked for after this and before sleeping. Only the owner arms.
pub(crate) fn arm(word: &AtomicU32) -> u32 {
    let armed = word.load(Ordering::Relaxed) | ARMED;
    // A sender can change only an odd word. If it does so between the load and this store, its news
    // was stored before, and the fence below makes the owner's next look see it.
    word.store(armed, Ordering::Relaxed);
    // Partner: the fence in `wake`.
    fence(Ordering::SeqCst);
    armed
}

/// Says that the owner is awake. Acquire: pairs with the release of the sender that woke.
pub(crate) fn disarm(word: &AtomicU32) {
    let seen = word.load(Ordering::Acquire);
    if seen & ARMED != 0 {
        // Failure means that a sender did the same.
        let _ = word.compare_exchange(seen, seen.wrapping_add(1), Ordering::Acquire, Ordering::Acquire);
    }
}

/// For who has stored news: whether the owner must be woken by the caller. Never misses an owner
/// that sleeps.
#[must_use]
pub(crate) fn wake(word: &AtomicU32) -> bool {
    // Partner: the fence in `arm`.
    fence(Ordering::SeqCst);
    glance(word)
}

/// As [`wake`], for several wake sources after one fence of the caller's (`fence(SeqCst)` between
/// the news and this). Without a fence it may miss an owner that is just going to sleep, never one
/// that has slept for long.
#[must_use]
pub(crate) fn glance(word: &AtomicU32) -> bool {
    let seen = word.load(Ordering::Relaxed);
    // Release: what the caller stored before is visible to the owner that finds the word changed.
    seen & ARMED != 0
        && word.compare_exchange(seen, seen.wrapping_add(1), Ordering::Release, Ordering::Relaxed).is_ok()
}

//! The wake source: one word in shared memory. A rank sleeps on it, and its peers wake the rank.
//!
//! An odd word means that the owner sleeps or is about to sleep; an even word means that it is
//! awake. Arming makes the word odd. Waking makes it even again and wakes the owner. So only the
//! first of many senders that finds an odd word makes a system call, and no sender does while the
//! owner is awake.
//!
//! **Invariant:** no wake-up is lost. The owner stores the odd word, passes a SeqCst fence, then
//! checks for signals; a sender stores its signal, passes a SeqCst fence, then reads the word.
//! Whichever fence comes first in the total order, the other side sees the store before it: the
//! owner sees the signal, or the sender sees the odd word.
//!
//! A hostile peer may write anything into the word. At worst the owner sleeps until its time limit,
//! or does not sleep.

use crate::primitive::{AtomicU32, Ordering, fence};

const ARMED: u32 = 1;

/// Announces that the owner is going to sleep. Returns the value of the word. The owner must check
/// for signals after this call and before it sleeps. Only the owner arms.
pub(crate) fn arm(word: &AtomicU32) -> u32 {
    let armed = word.load(Ordering::Relaxed) | ARMED;
    // A sender can change only an odd word. If it does so between the load and this store, its
    // signal was stored before, and the fence below makes the owner's next check see it.
    word.store(armed, Ordering::Relaxed);
    // Partner: the fence in `wake`.
    fence(Ordering::SeqCst);
    armed
}

/// Announces that the owner is awake. Acquire: pairs with the release of the sender that woke it.
pub(crate) fn disarm(word: &AtomicU32) {
    let seen = word.load(Ordering::Acquire);
    if seen & ARMED != 0 {
        // Failure means that a sender did the same.
        let _ = word.compare_exchange(seen, seen.wrapping_add(1), Ordering::Acquire, Ordering::Acquire);
    }
}

/// For a sender that has stored a signal: returns whether the caller must wake the owner. The
/// answer is always right for an owner that sleeps.
#[must_use]
pub(crate) fn wake(word: &AtomicU32) -> bool {
    // Partner: the fence in `arm`.
    fence(Ordering::SeqCst);
    must_wake(word)
}

/// As [`wake`], for several wake sources after one fence of the caller: `fence(SeqCst)` between the
/// signal and this call. Without a fence the call may miss an owner that is going to sleep, but
/// never an owner that has slept for long.
#[must_use]
pub(crate) fn must_wake(word: &AtomicU32) -> bool {
    let seen = word.load(Ordering::Relaxed);
    // Release: the caller's earlier stores are visible to the owner that finds the word changed.
    seen & ARMED != 0
        && word.compare_exchange(seen, seen.wrapping_add(1), Ordering::Release, Ordering::Relaxed).is_ok()
}

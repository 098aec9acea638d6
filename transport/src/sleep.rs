//! How a thread goes to sleep without losing a wake-up: arm, check again, wait.
//!
//! A thread that polls has checked before it decides to sleep. An event can come between that check
//! and the arming of the wake source, and such an event wakes nobody. So the thread checks once
//! more *after* the arming; later events wake it. The group's driver, the tests of every device and
//! the models of all interleavings sleep by this one function.
//!
//! Two programs that share memory do it by a word instead of a wake source ([`announce`],
//! [`Waker`]). The sleeper alone writes the word, and the other end only reads it: so a peer that
//! may write nothing here can still wake this program, and does so by a file or a socket.
//!
//! **Invariant:** a message that comes after the sleeper has looked for the last time wakes it, and
//! one sleep is ended by one wake-up.

use crate::primitive::{Ordering, fence};

/// Arms a wake source, checks again, and waits for the wake source if nothing has come. Returns
/// whether it has waited.
///
/// `arm` returns `None` when something may have come already. `check` returns whether something has
/// come; it checks everything that the sleeper waits for: signal slots, events, and requests of
/// other threads.
pub fn unless_ready<T: ?Sized, B>(
    sleeper: &mut T,
    arm: impl FnOnce(&mut T) -> Option<B>,
    check: impl FnOnce(&mut T) -> bool,
    wait: impl FnOnce(&mut T, B),
) -> bool {
    let Some(wake_source) = arm(sleeper) else { return false };
    if check(sleeper) {
        return false;
    }
    wait(sleeper, wake_source);
    true
}

/// Says that this thread sleeps from now on: stores the next odd number into the word, which holds
/// `asleep`. The thread looks for messages once more after this, and sleeps only if none has come.
pub fn announce(asleep: u64, store: impl FnOnce(u64)) {
    // Another number than that of the last sleep, for which the other end may have woken this one.
    store((asleep + 1) | 1);
    // Partner: the fence in `Waker::must_wake`.
    fence(Ordering::SeqCst);
}

/// What the word holds when the thread is awake again; `None`: it says so already.
#[must_use]
pub fn awake(asleep: u64) -> Option<u64> {
    (asleep % 2 == 1).then_some(asleep + 1)
}

/// The other end of a sleeper's word.
#[derive(Clone, Copy, Debug, Default)]
pub struct Waker {
    /// The sleep for which the sleeper was woken last.
    woken: u64,
}

impl Waker {
    /// Whether the sleeper sleeps and was not woken from this sleep: then the caller wakes it. To
    /// be called after each message is there. `load` reads the word.
    pub fn must_wake(&mut self, load: impl FnOnce() -> u64) -> bool {
        // Partner: the fence in `announce`.
        fence(Ordering::SeqCst);
        let asleep = load();
        let must = asleep % 2 == 1 && asleep != self.woken;
        if must {
            self.woken = asleep;
        }
        must
    }
}

/// All interleavings: `RUSTFLAGS="--cfg loom" cargo test -p pleach-transport --lib --release loom`.
#[cfg(all(test, loom))]
pub(crate) mod loom_tests {
    use loom::sync::{Arc, Condvar, Mutex};
    use loom::thread;

    use super::{Waker, announce, awake};
    use crate::primitive::{AtomicU64, Ordering};

    /// Two ends of a link: what has come, the word of the sleeper, and the file that wakes it.
    struct Ends {
        messages: AtomicU64,
        asleep: AtomicU64,
        wakes: Mutex<u64>,
        woken: Condvar,
    }

    impl Ends {
        fn send(&self, waker: &mut Waker) {
            self.messages.fetch_add(1, Ordering::Release);
            if waker.must_wake(|| self.asleep.load(Ordering::Acquire)) {
                *self.wakes.lock().unwrap() += 1;
                self.woken.notify_one();
            }
        }

        /// Takes so many messages, and sleeps while there is none. Returns how often it slept.
        fn take(&self, messages: u64, looks_again: bool) -> u64 {
            let mut slept = 0;
            for taken in 0..messages {
                while self.messages.load(Ordering::Acquire) <= taken {
                    let asleep = self.asleep.load(Ordering::Relaxed);
                    announce(asleep, |number| self.asleep.store(number, Ordering::Release));
                    if !looks_again || self.messages.load(Ordering::Acquire) <= taken {
                        slept += 1;
                        let mut wakes = self.wakes.lock().unwrap();
                        // No deadline: a lost wake-up is a sleep for ever, which loom reports.
                        while *wakes == 0 {
                            wakes = self.woken.wait(wakes).unwrap();
                        }
                        *wakes = 0;
                    }
                    let asleep = self.asleep.load(Ordering::Relaxed);
                    awake(asleep).into_iter().for_each(|number| self.asleep.store(number, Ordering::Release));
                }
            }
            slept
        }
    }

    /// What a sleeper shares, which is not dropped while its model fails: loom has ended by then,
    /// and would end the process.
    pub(crate) struct Sleeper<T>(pub(crate) Option<Arc<T>>);

    impl<T> Drop for Sleeper<T> {
        fn drop(&mut self) {
            if std::thread::panicking() {
                std::mem::forget(self.0.take());
            }
        }
    }

    fn model(looks_again: bool) {
        const MESSAGES: u64 = 2;
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = Some(3);
        builder.check(move || {
            let ends = Arc::new(Ends {
                messages: AtomicU64::new(0),
                asleep: AtomicU64::new(0),
                wakes: Mutex::new(0),
                woken: Condvar::new(),
            });
            let sender = {
                let ends = ends.clone();
                thread::spawn(move || {
                    let mut waker = Waker::default();
                    (0..MESSAGES).for_each(|_| ends.send(&mut waker));
                })
            };
            for ends in Sleeper(Some(ends)).0.iter() {
                assert!(ends.take(MESSAGES, looks_again) <= MESSAGES, "each sleep is ended by a message");
            }
            sender.join().unwrap();
        });
    }

    #[test]
    fn loom_messages_wake_an_end_that_has_announced_its_sleep() {
        model(true);
    }

    #[test]
    #[should_panic = "deadlock"]
    fn loom_an_end_that_does_not_look_again_sleeps_for_ever() {
        model(false);
    }
}

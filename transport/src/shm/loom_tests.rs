//! Tests of all interleavings of senders that signal and an owner that sleeps. No wake-up is lost,
//! and bytes are visible with their signal.
//!
//! The models contain two parts of the driver: [`sleep::unless_ready`] and the wake word. They
//! contain neither the driver's checks between arming and waiting (a poll of the engine, requests
//! of other threads, the lock that the driver gives up) nor wake sources that are files. The test
//! `waking` of `pleach-collectives` sends a message at each of these points of the real driver.

#![allow(unsafe_code)]

use loom::cell::UnsafeCell;
use loom::sync::{Arc, Condvar, Mutex};
use loom::thread;

use super::wake_word;
use crate::primitive::{AtomicU32, Ordering, fence};
use crate::signals::{Inline, Signal, Signals};
use crate::sleep;
use crate::sleep::loom_tests::Sleeper;

/// The kernel's futex: compares the word and sleeps in one step, as seen by the waking thread.
struct Futex {
    queue: Mutex<()>,
    woken: Condvar,
}

impl Futex {
    fn wait(&self, word: &AtomicU32, seen: u32) {
        let mut queue = self.queue.lock().unwrap();
        // The model has no spurious wake-ups. So a lost wake-up is an endless sleep, which loom
        // reports.
        while word.load(Ordering::SeqCst) == seen {
            queue = self.woken.wait(queue).unwrap();
        }
    }

    fn wake(&self) {
        let _queue = self.queue.lock().unwrap();
        self.woken.notify_all();
    }
}

struct Host {
    word: AtomicU32,
    futex: Futex,
    signal_slots: Signals,
    /// The bytes that the put of each signal slot writes.
    bytes: Vec<UnsafeCell<u64>>,
}

// SAFETY: `bytes` is written by one sender each before its signal, and read by the owner after it;
// loom checks that.
unsafe impl Sync for Host {}
// SAFETY: as above.
unsafe impl Send for Host {}

impl Host {
    fn new(signal_slots: usize) -> Arc<Self> {
        Arc::new(Self {
            word: AtomicU32::new(0),
            futex: Futex { queue: Mutex::new(()), woken: Condvar::new() },
            signal_slots: Signals::new(signal_slots),
            bytes: (0..signal_slots).map(|_| UnsafeCell::new(0)).collect(),
        })
    }

    fn put(&self, signal_slot: u16) {
        // SAFETY: nobody else touches the bytes before the signal; loom checks that.
        self.bytes[usize::from(signal_slot)].with_mut(|bytes| unsafe { *bytes = 7 });
        let payload = Inline::new(&[9; 8]).unwrap();
        self.signal_slots.signal(&Signal { signal_slot, payload });
    }

    fn check(&self, signal_slot: u16) {
        // SAFETY: the signal was seen; loom checks that the write came before.
        self.bytes[usize::from(signal_slot)].with(|bytes| assert_eq!(unsafe { *bytes }, 7));
        assert_eq!(self.signal_slots.payload(signal_slot)[..8], [9; 8]);
    }

    fn has(&self, signal_slots: u16) -> bool {
        (0..signal_slots).all(|signal_slot| self.signal_slots.count(signal_slot) == 1)
    }

    /// Sleeps as the device and its caller do.
    fn sleep_until_all(&self, signal_slots: u16) {
        self.sleep_until_all_by(signal_slots, |host| host.has(signal_slots));
    }

    /// As above, with another check between arming and waiting.
    fn sleep_until_all_by(&self, signal_slots: u16, check: impl Fn(&Self) -> bool) {
        while !self.has(signal_slots) {
            sleep::unless_ready(
                &mut &*self,
                |host| Some(wake_word::arm(&host.word)),
                |host| check(host),
                |host, seen| host.futex.wait(&host.word, seen),
            );
            wake_word::disarm(&self.word);
        }
        (0..signal_slots).for_each(|signal_slot| self.check(signal_slot));
    }

    fn wake_if(&self, must: bool) {
        if must {
            self.futex.wake();
        }
    }
}

fn model(run: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(run);
}

#[test]
fn loom_a_signal_wakes_its_target_and_shows_its_bytes() {
    model(|| {
        let host = Host::new(1);
        let sender = {
            let host = host.clone();
            thread::spawn(move || {
                host.put(0);
                host.wake_if(wake_word::wake(&host.word));
            })
        };
        host.sleep_until_all(1);
        sender.join().unwrap();
    });
}

#[test]
fn loom_signals_looked_at_again_after_one_fence_wake_their_target() {
    model(|| {
        let host = Host::new(1);
        let sender = {
            let host = host.clone();
            thread::spawn(move || {
                host.put(0);
                host.wake_if(wake_word::must_wake(&host.word));
                // `wake_due` does the same in the next poll.
                fence(Ordering::SeqCst);
                host.wake_if(wake_word::must_wake(&host.word));
            })
        };
        host.sleep_until_all(1);
        sender.join().unwrap();
    });
}

#[test]
fn loom_two_senders_wake_one_target() {
    model(|| {
        let host = Host::new(2);
        let senders: Vec<_> = (0..2)
            .map(|signal_slot| {
                let host = host.clone();
                thread::spawn(move || {
                    host.put(signal_slot);
                    host.wake_if(wake_word::wake(&host.word));
                })
            })
            .collect();
        host.sleep_until_all(2);
        for sender in senders {
            sender.join().unwrap();
        }
    });
}

/// Proves that the model finds a signal between the last check and the arming, which wakes nobody.
#[test]
#[should_panic(expected = "deadlock")]
fn loom_without_the_second_look_a_wake_up_is_lost() {
    model(|| {
        let host = Host::new(1);
        let sender = {
            let host = host.clone();
            thread::spawn(move || {
                host.put(0);
                host.wake_if(wake_word::wake(&host.word));
            })
        };
        let sleeper = Sleeper(Some(host));
        sleeper.0.iter().for_each(|host| host.sleep_until_all_by(1, |_| false));
        sender.join().unwrap();
    });
}

/// Proves that the model finds a missing fence: a sender may check the word too early.
#[test]
#[should_panic(expected = "deadlock")]
fn loom_without_the_fence_a_wake_up_is_lost() {
    model(|| {
        let host = Host::new(1);
        let sender = {
            let host = host.clone();
            thread::spawn(move || {
                host.put(0);
                host.wake_if(wake_word::must_wake(&host.word));
            })
        };
        host.sleep_until_all(1);
        sender.join().unwrap();
    });
}

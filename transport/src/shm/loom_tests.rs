//! Every interleaving of senders that notify and an owner that sleeps: no wake-up is lost, and
//! bytes are visible with their notice.

#![allow(unsafe_code)]

use loom::cell::UnsafeCell;
use loom::sync::{Arc, Condvar, Mutex};
use loom::thread;

use super::bell;
use crate::cells::{Cells, Inline, Notice};
use crate::primitive::{AtomicU32, Ordering, fence};
use crate::sleep;

/// What the kernel does: compares the word and goes to sleep in one step as seen by who wakes.
struct Futex {
    queue: Mutex<()>,
    woken: Condvar,
}

impl Futex {
    fn wait(&self, word: &AtomicU32, seen: u32) {
        let mut queue = self.queue.lock().unwrap();
        // No spurious end: a lost wake-up is a sleep for ever, which loom reports.
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
    cells: Cells,
    /// What the put of each cell writes.
    bytes: Vec<UnsafeCell<u64>>,
}

// SAFETY: `bytes` is written by one sender each before its notice, and read by the owner after it;
// loom checks that.
unsafe impl Sync for Host {}
// SAFETY: as above.
unsafe impl Send for Host {}

impl Host {
    fn new(cells: usize) -> Arc<Self> {
        Arc::new(Self {
            word: AtomicU32::new(0),
            futex: Futex { queue: Mutex::new(()), woken: Condvar::new() },
            cells: Cells::on_heap(cells),
            bytes: (0..cells).map(|_| UnsafeCell::new(0)).collect(),
        })
    }

    fn put(&self, cell: u16) {
        // SAFETY: nobody else touches the bytes before the notice; loom checks that.
        self.bytes[usize::from(cell)].with_mut(|bytes| unsafe { *bytes = 7 });
        let payload = Inline::new(&[9; 8]).unwrap();
        self.cells.notify(&Notice { cell, payload });
    }

    fn check(&self, cell: u16) {
        // SAFETY: the notice was seen; loom checks that the write came before.
        self.bytes[usize::from(cell)].with(|bytes| assert_eq!(unsafe { *bytes }, 7));
        assert_eq!(self.cells.payload(cell)[..8], [9; 8]);
    }

    fn has(&self, cells: u16) -> bool {
        (0..cells).all(|cell| self.cells.count(cell) == 1)
    }

    /// As the device and its caller do it.
    fn sleep_until_all(&self, cells: u16) {
        self.sleep_until_all_by(cells, |host| host.has(cells));
    }

    /// The same with another look between arming and waiting.
    fn sleep_until_all_by(&self, cells: u16, look: impl Fn(&Self) -> bool) {
        while !self.has(cells) {
            sleep::unless_news(
                &mut &*self,
                |host| Some(bell::arm(&host.word)),
                |host| look(host),
                |host, seen| host.futex.wait(&host.word, seen),
            );
            bell::disarm(&self.word);
        }
        (0..cells).for_each(|cell| self.check(cell));
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
fn loom_a_notice_wakes_its_target_and_shows_its_bytes() {
    model(|| {
        let host = Host::new(1);
        let sender = {
            let host = host.clone();
            thread::spawn(move || {
                host.put(0);
                host.wake_if(bell::ring(&host.word));
            })
        };
        host.sleep_until_all(1);
        sender.join().unwrap();
    });
}

#[test]
fn loom_notices_looked_at_again_after_one_fence_wake_their_target() {
    model(|| {
        let host = Host::new(1);
        let sender = {
            let host = host.clone();
            thread::spawn(move || {
                host.put(0);
                host.wake_if(bell::glance(&host.word));
                // As `ring_due` does in the next poll.
                fence(Ordering::SeqCst);
                host.wake_if(bell::glance(&host.word));
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
            .map(|cell| {
                let host = host.clone();
                thread::spawn(move || {
                    host.put(cell);
                    host.wake_if(bell::ring(&host.word));
                })
            })
            .collect();
        host.sleep_until_all(2);
        for sender in senders {
            sender.join().unwrap();
        }
    });
}

/// A host that is not taken apart while its model fails: loom has ended by then, and would end the
/// process.
struct Sleeper(Option<Arc<Host>>);

impl Drop for Sleeper {
    fn drop(&mut self) {
        if std::thread::panicking() {
            std::mem::forget(self.0.take());
        }
    }
}

/// Shows that the model would find it: a notice between the last look and the arming wakes nobody.
#[test]
#[should_panic(expected = "deadlock")]
fn loom_without_the_second_look_a_wake_up_is_lost() {
    model(|| {
        let host = Host::new(1);
        let sender = {
            let host = host.clone();
            thread::spawn(move || {
                host.put(0);
                host.wake_if(bell::ring(&host.word));
            })
        };
        let sleeper = Sleeper(Some(host));
        sleeper.0.iter().for_each(|host| host.sleep_until_all_by(1, |_| false));
        sender.join().unwrap();
    });
}

/// Shows that the model would find it: without the fence a sender may look at the word too early.
#[test]
#[should_panic(expected = "deadlock")]
fn loom_without_the_fence_a_wake_up_is_lost() {
    model(|| {
        let host = Host::new(1);
        let sender = {
            let host = host.clone();
            thread::spawn(move || {
                host.put(0);
                host.wake_if(bell::glance(&host.word));
            })
        };
        host.sleep_until_all(1);
        sender.join().unwrap();
    });
}

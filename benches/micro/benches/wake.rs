//! The wake source of shared memory: what a wake costs while nobody sleeps, and how long a sleeper
//! takes to wake.
//!
//! The first is paid by every signal to a peer that may sleep, the second by ranks that share
//! processors: it is what a call takes there at least.
#![allow(missing_docs)] // criterion's macros

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use criterion::{Criterion, criterion_group, criterion_main};
use pleach_transport::device::{Device, LossCause, Responder, Wake};
use pleach_transport::rendezvous::{Fabric, FabricChoice, JoinOptions, World, join};
use pleach_transport::{Rank, clock};

/// Longest sleep: a wake-up that is missed shows as a time of this size.
const SLEEP_MAX: Duration = Duration::from_millis(100);

struct Quiet;

impl Responder for Quiet {
    fn message(&self, _from: Rank, _message: &[u8]) -> Option<Vec<u8>> {
        None
    }
    fn lost(&self, _peer: Rank, _cause: &LossCause) {}
}

fn device() -> Box<dyn Device> {
    let options = JoinOptions {
        fabric: FabricChoice::Only(Fabric::Shm),
        knobs: Vec::new(),
        signal_slots: 1,
        timeout: Duration::from_secs(10),
    };
    join(&World::alone(), &options, Arc::new(Quiet)).expect("a rank alone meets nobody").device
}

/// One of two that take turns asleep: its device, and the number of the turn that was given to it.
struct Sleeper {
    device: Box<dyn Device>,
    turn: Arc<AtomicU64>,
}

impl Sleeper {
    fn sleep_until(&mut self, turn: u64) {
        // Partner: the store in `wake`.
        while self.turn.load(Ordering::Acquire) < turn {
            if let Some(armed) = self.device.arm() {
                armed.wake_source.wait(SLEEP_MAX);
            }
        }
    }
}

/// How to wake a sleeper.
struct Waker {
    waker: Arc<dyn Wake>,
    turn: Arc<AtomicU64>,
}

impl Waker {
    fn wake(&self, turn: u64) {
        // Partner: the load in `sleep_until`.
        self.turn.store(turn, Ordering::Release);
        self.waker.wake();
    }
}

fn sleeper() -> (Sleeper, Waker) {
    let (device, turn) = (device(), Arc::new(AtomicU64::new(0)));
    let waker = Waker { waker: Arc::clone(&device.info().waker), turn: turn.clone() };
    (Sleeper { device, turn }, waker)
}

fn awake(criterion: &mut Criterion) {
    let mut device = device();
    let waker = Arc::clone(&device.info().waker);
    criterion.bench_function("wake source/woken, nobody sleeps", |bencher| bencher.iter(|| waker.wake()));
    criterion.bench_function("wake source/woken and armed", |bencher| {
        bencher.iter(|| {
            waker.wake();
            // It was woken: one attempt says so and takes it.
            assert!(device.arm().is_none());
        });
    });
}

/// One way of a ping-pong between two threads that both sleep.
fn asleep(criterion: &mut Criterion) {
    let round_trips = |trips: u64| -> Duration {
        let ((mut near, to_near), (mut far, to_far)) = (sleeper(), sleeper());
        std::thread::scope(|scope| {
            scope.spawn(move || {
                for trip in 1..=trips {
                    far.sleep_until(trip);
                    to_near.wake(trip);
                }
            });
            let began = clock::now();
            for trip in 1..=trips {
                to_far.wake(trip);
                near.sleep_until(trip);
            }
            clock::now() - began
        })
    };
    criterion.bench_function("wake source/a sleeper wakes", |bencher| {
        bencher.iter_custom(|ways| round_trips(ways.div_ceil(2)));
    });
}

criterion_group!(benches, awake, asleep);
criterion_main!(benches);

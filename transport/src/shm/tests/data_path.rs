//! The data path does not allocate, and makes no system call while peers are awake.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use super::{PATIENCE, Station, pair};
use crate::clock::{self, Nanos};
use crate::device::{AtomicOp, Device, Event, Source, Submitted, Transfer, TransferId};
use crate::region::{RemoteSlice, Slice};
use crate::signals::{Inline, Signal};

const ROUNDS: u64 = 2_000;

/// Bytes of a put that takes several polls.
const LONG_BYTES: usize = 700_000;

/// Counts the allocations of each thread.
struct Counting;

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

#[global_allocator]
static COUNTING: Counting = Counting;

// SAFETY: passes everything on to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // A thread that is ending does not count any more.
        let _ = ALLOCATIONS.try_with(|allocations| allocations.set(allocations.get() + 1));
        // SAFETY: by the contract of this function.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, address: *mut u8, layout: Layout) {
        // SAFETY: by the contract of this function.
        unsafe { System.dealloc(address, layout) }
    }
}

/// Two connected ranks, and all transfers and signals between them.
struct Traffic {
    stations: [Station; 2],
    events: Vec<Event>,
    source: Slice,
    target: RemoteSlice,
}

impl Traffic {
    fn new() -> Self {
        let [mut zero, mut one] = pair();
        let (source, region) = (zero.region(LONG_BYTES).whole(), one.region(LONG_BYTES));
        let target = region.remote();
        // The region is held to the end of the process: a dropped region would be refused.
        std::mem::forget(region);
        zero.until("the region", |zero| zero.device.map(1, &target).is_ok());
        // Handling the announcement of a region may allocate, and would fall into the traffic.
        let own = source.remote();
        one.until("the other region", |one| one.device.map(0, &own).is_ok());
        Self { stations: [zero, one], events: Vec::with_capacity(64), source, target }
    }

    fn run(&mut self, rounds: u64) {
        let [zero, one] = &mut self.stations;
        let signal = Signal { signal_slot: 1, payload: Inline::new(&[1; 48]).expect("fits") };
        for round in 0..rounds {
            let short = 64 * (round % 100) as usize;
            let word = self.target.slice(0..8).expect("inside");
            let put = |len: usize| Transfer::Put {
                src: Source::Slice(self.source.slice(0..len).expect("inside")),
                dst: self.target.slice(0..len as u64).expect("inside"),
                signal: Some(signal),
            };
            let get = Transfer::Get {
                src: self.target.slice(0..100).expect("inside"),
                dst: self.source.slice(0..100).expect("inside"),
            };
            let atomic = Transfer::Atomic { word, op: AtomicOp::Add(1) };
            let transfers = [put(short), put(LONG_BYTES), get, atomic];
            let count = transfers.len();
            let mut done = 0;
            for station in [&mut *zero, &mut *one] {
                let peer = 1 - station.device.info().rank;
                let submitted = station.device.signal(peer, &signal, TransferId(round)).expect("room");
                assert_eq!(submitted, Submitted::Ended(0));
            }
            for transfer in transfers {
                let submitted = zero.device.submit(1, transfer, TransferId(round)).expect("room");
                done += usize::from(submitted != Submitted::UnderWay);
            }
            assert_eq!(done, count - 1, "all but the long one end at once");
            while done < count {
                for station in [&mut *zero, &mut *one] {
                    station.device.poll(Nanos::ZERO, &mut self.events);
                    done += self.events.len();
                    assert!(
                        self.events.iter().all(|event| matches!(event, Event::Done { result: Ok(_), .. }))
                    );
                    self.events.clear();
                }
            }
        }
    }
}

#[test]
fn transfers_and_signals_allocate_nothing() {
    let mut traffic = Traffic::new();
    traffic.run(2);
    let before = ALLOCATIONS.get();
    assert!(before > 0, "the counter counts");
    traffic.run(ROUNDS / 10);
    assert_eq!(ALLOCATIONS.get(), before);
}

#[test]
fn mapping_a_region_again_allocates_nothing_and_remembers_nothing() {
    let mut traffic = Traffic::new();
    let Traffic { stations: [zero, _], target, .. } = &mut traffic;
    zero.device.map(1, target).expect("is known");
    let before = ALLOCATIONS.get();
    for _ in 0..ROUNDS {
        zero.device.map(1, target).expect("is known");
    }
    assert_eq!(ALLOCATIONS.get(), before);
}

#[test]
fn transfers_and_signals_call_no_system_while_the_peer_is_awake() {
    let mut traffic = Traffic::new();
    traffic.run(2);
    let (done, is_strict) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
    let (finished, started) = (done.clone(), is_strict.clone());
    std::thread::spawn(move || {
        // SAFETY: no memory is passed. From here on the kernel ends this thread at every system
        // call but read, write and exit.
        let strict = unsafe { libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_STRICT, 0, 0, 0) };
        started.store(strict == 0, Ordering::Release); // Pairs with the acquires below.
        traffic.run(ROUNDS / 10);
        finished.store(true, Ordering::Release);
        std::mem::forget((traffic, started, finished));
        // SAFETY: the call ends this thread alone, in the only way that is allowed. The values of
        // the thread were forgotten.
        unsafe { libc::syscall(libc::SYS_exit, 0) };
    });
    let deadline = clock::now() + PATIENCE;
    while !done.load(Ordering::Acquire) {
        assert!(clock::now() < deadline, "the thread was ended for calling the system");
        std::thread::park_timeout(Duration::from_millis(1));
    }
    assert!(is_strict.load(Ordering::Acquire), "the kernel has no strict mode");
}

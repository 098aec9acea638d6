//! A signal within one process: what it costs one thread to give and take, and the way between two
//! threads.
//!
//! Signal slots on the heap, so without any device; between processes and through the device,
//! `cargo bench --bench fabrics`.
#![allow(missing_docs)] // criterion's macros

use std::time::Duration;

use criterion::{Criterion, criterion_group, criterion_main};
use pleach_transport::{Inline, Signal, Signals, clock};

const SIGNAL_SLOT: u16 = 0;

fn signal(value: u64) -> Signal {
    Signal { signal_slot: SIGNAL_SLOT, payload: Inline::new(&value.to_ne_bytes()).expect("eight bytes fit") }
}

fn taken(signal_slots: &Signals) -> u64 {
    u64::from_ne_bytes(std::array::from_fn(|place| signal_slots.payload(SIGNAL_SLOT)[place]))
}

/// Gives and takes on one thread: instructions, no line moves.
fn one_thread(criterion: &mut Criterion) {
    let signal_slots = Signals::new(1);
    let mut count = 0;
    criterion.bench_function("signal/one thread", |bencher| {
        bencher.iter(|| {
            count += 1;
            signal_slots.signal(&signal(count));
            assert_eq!(signal_slots.count(SIGNAL_SLOT), count);
            assert_eq!(taken(&signal_slots), count);
        });
    });
}

/// Round trips that are timed together: few enough to fall between interruptions.
const TRIPS: u64 = 64;
/// How long trips are timed again because a thread had lost its processor during them; then they
/// count as they are, so that it ends on a machine that never has two processors free.
const PATIENCE: Duration = Duration::from_millis(200);
/// Asks the other thread how often it has lost its processor.
const LOST: u64 = u64::MAX;
/// Asks it to end.
const END: u64 = u64::MAX - 1;

/// How often this thread has lost its processor, or given it up.
fn processors_lost() -> u64 {
    let status = std::fs::read_to_string("/proc/thread-self/status").expect("there is a /proc");
    let counts = status.lines().filter(|line| line.contains("ctxt_switches:"));
    counts.filter_map(|line| line.rsplit('\t').next()?.parse::<u64>().ok()).sum()
}

/// One thread's end of a line each way.
struct End {
    there: Signals,
    back: Signals,
    /// Signals that were waited for.
    count: u64,
}

impl End {
    fn give(&self, value: u64) {
        self.there.signal(&signal(value));
    }

    /// The next value, waited for without yielding.
    fn take(&mut self) -> u64 {
        self.count += 1;
        while self.back.count(SIGNAL_SLOT) < self.count {
            std::hint::spin_loop();
        }
        taken(&self.back)
    }

    fn ask(&mut self, value: u64) -> u64 {
        self.give(value);
        self.take()
    }

    /// Gives back what comes until the end.
    fn echo(mut self) {
        loop {
            match self.take() {
                END => return,
                LOST => self.give(processors_lost()),
                value => self.give(value),
            }
        }
    }
}

/// The time of `wanted` round trips while each thread has a processor of its own.
fn time_round_trips(wanted: u64) -> Duration {
    let (one, other) = (Signals::new(1), Signals::new(1));
    let mut near = End { there: one.clone(), back: other.clone(), count: 0 };
    let far = End { there: other, back: one, count: 0 };
    std::thread::scope(|scope| {
        scope.spawn(move || far.echo());
        let (mut spent, mut trips_left) = (Duration::ZERO, wanted);
        let patient_until = clock::now() + PATIENCE;
        while trips_left > 0 {
            let trips = TRIPS.min(trips_left);
            let before = [near.ask(LOST), processors_lost()];
            let began = clock::now();
            for trip in 0..trips {
                assert_eq!(near.ask(trip), trip);
            }
            let took = clock::now() - began;
            let after = [processors_lost(), near.ask(LOST)];
            if (before[0], before[1]) == (after[1], after[0]) || began > patient_until {
                spent += took;
                trips_left -= trips;
            }
        }
        near.give(END);
        spent
    })
}

/// One way of a ping-pong between two threads, wherever the system puts them.
fn two_threads(criterion: &mut Criterion) {
    criterion.bench_function("signal/one way between threads", |bencher| {
        bencher.iter_custom(|variants| time_round_trips(variants.div_ceil(2)));
    });
}

criterion_group!(benches, one_thread, two_threads);
criterion_main!(benches);

//! A notice within one process: what it costs one thread to give and take, and the way between two threads.
//!
//! Cells on the heap, so without any device; between processes and through the device, `cargo bench --bench fabrics`.
#![allow(missing_docs)] // criterion's macros

use std::time::Duration;

use criterion::{Criterion, criterion_group, criterion_main};
use pleach_transport::{Cells, Inline, Notice, clock};

const CELL: u16 = 0;

fn notice(value: u64) -> Notice {
    Notice { cell: CELL, payload: Inline::new(&value.to_ne_bytes()).expect("eight bytes fit") }
}

fn taken(cells: &Cells) -> u64 {
    u64::from_ne_bytes(std::array::from_fn(|place| cells.payload(CELL)[place]))
}

/// Waits for a count without yielding.
fn wait(cells: &Cells, count: u64) {
    while cells.count(CELL) < count {
        std::hint::spin_loop();
    }
}

/// Gives and takes on one thread: instructions, no line moves.
fn one_thread(criterion: &mut Criterion) {
    let cells = Cells::on_heap(1);
    let mut count = 0;
    criterion.bench_function("notice/one thread", |bencher| {
        bencher.iter(|| {
            count += 1;
            cells.notify(&notice(count));
            assert_eq!(cells.count(CELL), count);
            assert_eq!(taken(&cells), count);
        });
    });
}

/// One way of a ping-pong between two threads, wherever the system puts them.
fn two_threads(criterion: &mut Criterion) {
    let round_trips = |trips: u64| -> Duration {
        let (there, back) = (Cells::on_heap(1), Cells::on_heap(1));
        std::thread::scope(|scope| {
            let (near, far) = (there.clone(), back.clone());
            scope.spawn(move || {
                for trip in 1..=trips {
                    wait(&near, trip);
                    far.notify(&notice(taken(&near)));
                }
            });
            let began = clock::now();
            for trip in 1..=trips {
                there.notify(&notice(trip));
                wait(&back, trip);
                assert_eq!(taken(&back), trip);
            }
            clock::now() - began
        })
    };
    criterion.bench_function("notice/one way between threads", |bencher| {
        bencher.iter_custom(|ways| round_trips(ways.div_ceil(2)));
    });
}

criterion_group!(benches, one_thread, two_threads);
criterion_main!(benches);

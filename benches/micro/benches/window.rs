//! Reads and writes of a window between two ranks of a host, over shared memory.
//!
//! `window/read 8 B` has a goal of 2 µs, and `window/read 100 MB` one of 1.2 times `window/copy
//! 100 MB`, the copy of as many bytes within a process.
#![allow(missing_docs)] // criterion's macros

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use pleach_collectives::{Group, Options, Rank, Window, Word};
use pleach_transport::rendezvous::{Fabric, FabricChoice, Launcher, Rendezvous, World};

/// Elements of the long window: 100 MB.
const LONG: usize = 25_000_000;

fn group(rank: Rank, folder: &Path) -> Group {
    let world = World {
        rank,
        world_size: 2,
        local_rank: Some(rank),
        rendezvous: Some(Rendezvous::File { folder: folder.to_owned() }),
        launcher: Launcher::Arguments,
        ..World::alone()
    };
    let mut options = Options::new(world);
    options.fabric = FabricChoice::Only(Fabric::Shm);
    Group::join(&options).expect("two threads of a host meet")
}

/// The end of rank 1: it publishes once, polls what is written, and publishes at intervals where it
/// is asked to.
fn serve(window: &mut Window<f32>, publishes: &AtomicBool, is_over: &AtomicBool) {
    let elements = vec![1.0; window.len()];
    window.publish(&elements, Word::EMPTY).expect("nothing fails");
    // Relaxed: switches alone.
    while !is_over.load(Ordering::Relaxed) {
        let limit = if publishes.load(Ordering::Relaxed) { 10 } else { 10_000 };
        window.wait(Duration::from_micros(limit), |_| ()).expect("nothing fails");
        if publishes.load(Ordering::Relaxed) {
            window.publish(&elements, Word::EMPTY).expect("nothing fails");
        }
    }
}

/// Runs `body` as rank 0, with the window of this many elements.
fn with_window(len: usize, body: impl FnOnce(&mut Window<f32>, &AtomicBool)) {
    let folder = std::env::temp_dir().join(format!("pleach-window-{}-{len}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("the folder is new");
    let (publishes, is_over) = (AtomicBool::new(false), AtomicBool::new(false));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let group = group(1, &folder);
            let mut window = group.window(len, 1).expect("both ask for the same");
            serve(&mut window, &publishes, &is_over);
            window.close().expect("nothing fails");
        });
        let group = group(0, &folder);
        let mut window = group.window(len, 1).expect("both ask for the same");
        let mut first = [0.0];
        while window.read(1, 0..1, &mut first).expect("nothing fails").0 == 0 {
            std::thread::yield_now();
        }
        body(&mut window, &publishes);
        is_over.store(true, Ordering::Relaxed);
        window.close().expect("nothing fails");
    });
    std::fs::remove_dir_all(&folder).ok();
}

fn short(criterion: &mut Criterion) {
    with_window(2, |window, publishes| {
        let mut into = [0.0; 2];
        criterion.bench_function("window/read 8 B", |bencher| {
            bencher.iter(|| window.read(1, 0..2, &mut into).expect("nothing fails"));
        });
        criterion.bench_function("window/read 8 B torn", |bencher| {
            bencher.iter(|| window.read_torn(1, 0..2, &mut into).expect("nothing fails"));
        });
        publishes.store(true, Ordering::Relaxed);
        criterion.bench_function("window/read 8 B while the owner publishes", |bencher| {
            bencher.iter(|| window.read(1, 0..2, &mut into).expect("nothing fails"));
        });
        publishes.store(false, Ordering::Relaxed);
        criterion.bench_function("window/publish 8 B", |bencher| {
            bencher.iter(|| window.publish(&[1.0, 2.0], Word::EMPTY).expect("nothing fails"));
        });
        criterion.bench_function("window/write 8 B and its credit", |bencher| {
            bencher.iter(|| window.write(1, 0, &[1.0, 2.0], Word::EMPTY).expect("nothing fails"));
        });
    });
}

fn long(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("window");
    group.throughput(Throughput::Bytes(4 * LONG as u64)).sample_size(20);
    let from = vec![1.0f32; LONG];
    let mut into = vec![0.0f32; LONG];
    with_window(LONG, |window, _| {
        group.bench_function("copy 100 MB", |bencher| {
            bencher.iter(|| std::hint::black_box(&mut into).copy_from_slice(std::hint::black_box(&from)));
        });
        group.bench_function("read 100 MB", |bencher| {
            bencher.iter(|| window.read(1, 0..LONG, &mut into).expect("nothing fails"));
        });
        group.bench_function("publish 100 MB", |bencher| {
            bencher.iter(|| window.publish(&from, Word::EMPTY).expect("nothing fails"));
        });
        group.bench_function("write 100 MB and its credit", |bencher| {
            bencher.iter(|| window.write(1, 0, &from, Word::EMPTY).expect("nothing fails"));
        });
    });
    group.finish();
}

criterion_group!(benches, short, long);
criterion_main!(benches);

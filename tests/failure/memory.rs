//! The memory that a fence takes. A survivor moves its registered memory out of the reach of its
//! peers by copies, and never holds two copies of all of it.

use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt;
use std::sync::mpsc;
use std::thread;

use pleach::transport::rendezvous::Fabric;
use rustix::process::Signal;

use crate::on_every_fabric;
use crate::ranks::{Ranks, many, pause};

/// Elements of the registered memory that is kept: 256 MiB of `f32`.
const ELEMENTS: u32 = 64 << 20;

/// Fewer samples between the death and the failure prove nothing.
const SAMPLES_MIN: usize = 3;

/// Tries, one of which must have [`SAMPLES_MIN`]: on a busy machine the sampler may not run in
/// between.
const TRIES: usize = 5;

/// The memory that a failing rank may need beside its registered memory: for the piece that it
/// copies, and for the text of the failure.
const BESIDE_KB: u64 = 8 << 10;

/// The memory of a process, in KiB: its private memory, and that of the memory files that it holds.
/// The private memory is read first. So a piece that is copied from a file between the two reads is
/// not counted twice.
fn memory_kb(process: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).expect("it lives");
    let field = |name: &str| -> u64 {
        let line = status.lines().find_map(|line| line.strip_prefix(name)).expect("the kernel tells it");
        line.trim_end_matches("kB").trim().parse().expect("a number")
    };
    let files = std::fs::read_dir(format!("/proc/{process}/fd")).expect("it lives");
    let is_memory = |path: &std::path::Path| {
        std::fs::read_link(path).is_ok_and(|target| target.to_string_lossy().starts_with("/memfd:"))
    };
    let held: BTreeMap<u64, u64> = files
        .filter_map(|file| {
            let path = file.ok()?.path();
            let metadata = is_memory(&path).then(|| std::fs::metadata(&path).ok())??;
            Some((metadata.ino(), metadata.blocks() / 2))
        })
        .collect();
    field("RssAnon:") + field("RssShmem:").max(held.values().sum())
}

fn a_survivor_needs_its_registered_memory_once_while_it_is_fenced(fabric: Fabric) {
    // Only memory that peers map has to be copied.
    let is_enough = |samples| fabric != Fabric::Shm || samples >= SAMPLES_MIN;
    assert!((0..TRIES).any(|_| is_enough(fence_one(fabric))), "the sampler never ran in time");
}

/// Fences a survivor, and sees that it needs no more memory. Returns the number of samples.
fn fence_one(fabric: Fabric) -> usize {
    // The third one dies. A process that has ended maps nothing, so what is copied is taken from
    // the second one, which lives and is severed too.
    let mut ranks = Ranks::join(fabric, 3);
    ranks.tell(0, &format!("keep all-reduce count=1000 idle={}", many(fabric, ELEMENTS)));
    ranks.tell(1, "keep all-reduce count=1000");
    ranks.tell(2, "keep all-reduce count=1000");
    ranks.expect_all("kept");
    // Memory that was never written takes no pages.
    ranks.tell_all("fill");
    ranks.expect_all("filled");
    ranks.tell_all("loop all-reduce count=1000");
    ranks.expect_all("begun");
    let process = ranks.id(0);
    let before_kb = memory_kb(process);
    let samples = thread::scope(|scope| {
        // The sampler ends when the sender is dropped, also if an assertion fails.
        let (sender, receiver) = mpsc::channel::<()>();
        let sampler = scope.spawn(move || {
            let mut samples = Vec::new();
            while receiver.try_recv() == Err(mpsc::TryRecvError::Empty) {
                samples.push(memory_kb(process));
                pause();
            }
            samples
        });
        ranks.signal(2, Signal::KILL);
        ranks.failure(0).expect("Lost", 2, "all-reduce of 1000 f32");
        drop(sender);
        sampler.join().expect("the rank lives")
    });
    let most_kb = samples.iter().max().copied().unwrap_or_default().max(memory_kb(process));
    println!("{fabric}: {before_kb} KiB before, {most_kb} KiB at most, {} samples", samples.len());
    assert!(most_kb <= before_kb + before_kb / 20 + BESIDE_KB, "{before_kb} KiB before: {samples:?}");
    ranks.end([0]);
    samples.len()
}

on_every_fabric!(a_survivor_needs_its_registered_memory_once_while_it_is_fenced);

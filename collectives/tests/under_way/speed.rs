//! What bundling, preparing and a thread cost and gain: side by side in one run, printed.
//!
//! `cargo test --release -p pleach-collectives --test under_way speed -- --ignored --nocapture`

use std::time::Duration;

use pleach_collectives::{Buffer, Group, Operation, Options, Progress};
use pleach_transport::clock;
use pleach_transport::rendezvous::{Fabric, World};
use pleach_vocabulary::ReduceOp;

use crate::ranks::with_group;

const ROUNDS: usize = 31;

/// Medians of the times of each of these, taken in turns, in nanoseconds a call.
fn medians(group: &Group, calls: usize, bodies: &mut [&mut dyn FnMut()]) -> Vec<f64> {
    let mut times = vec![Vec::new(); bodies.len()];
    for round in 0..ROUNDS + 3 {
        for (times, body) in times.iter_mut().zip(bodies.iter_mut()) {
            group.barrier().unwrap();
            let begun = clock::now();
            for _ in 0..calls {
                body();
            }
            let taken = clock::now().since(begun);
            if round >= 3 {
                times.push(taken.as_nanos() as f64 / calls as f64);
            }
        }
    }
    times.iter_mut().for_each(|times| times.sort_by(f64::total_cmp));
    times.iter().map(|times| times[times.len() / 2]).collect()
}

fn prepared(group: &Group) -> Vec<f64> {
    let mut plain: Buffer<f32> = group.buffer(2).unwrap();
    let mut prepared =
        group.prepare(Operation::all_reduce(group.buffer::<f32>(2).unwrap(), ReduceOp::Max)).unwrap();
    medians(
        group,
        1000,
        &mut [&mut || group.all_reduce(&mut plain, ReduceOp::Max).unwrap(), &mut || prepared.run().unwrap()],
    )
}

fn bundled(group: &Group, tensors: usize, len: usize) -> Vec<f64> {
    let mut single: Vec<Vec<f32>> = vec![vec![1.0; len]; tensors];
    let mut together = single.clone();
    let mut buffer: Buffer<f32> = group.buffer(tensors * len).unwrap();
    medians(
        group,
        3,
        &mut [
            &mut || single.iter_mut().for_each(|data| group.all_reduce(data, ReduceOp::Max).unwrap()),
            &mut || {
                let mut batch = group.batch();
                for data in &mut together {
                    batch.add(Operation::all_reduce(data, ReduceOp::Max)).unwrap();
                }
                batch.run().unwrap();
            },
            &mut || group.all_reduce(&mut buffer, ReduceOp::Max).unwrap(),
        ],
    )
}

#[test]
#[ignore = "prints times; run it on a quiet machine"]
fn speed() {
    for fabric in [Fabric::Shm, Fabric::Tcp] {
        for progress in [Progress::WhenCalled, Progress::Thread] {
            let times = with_group(
                fabric,
                2,
                |options| {
                    options.progress = progress;
                    options.timeout = Duration::from_secs(600);
                    options.spin = Options::new(World::alone()).spin;
                },
                |group| {
                    let shapes = [(100, 256), (1000, 64), (20, 2048), (20, 8192), (20, 16_384), (20, 65_536)];
                    let bundles = shapes.map(|(tensors, len)| (tensors, len, bundled(&group, tensors, len)));
                    (prepared(&group), bundles)
                },
            );
            let (prepared, bundles) = &times[0];
            println!(
                "{fabric} {progress:?}: all-reduce of 8 B: plain {:.0} ns, prepared {:.0} ns",
                prepared[0], prepared[1]
            );
            for (tensors, len, times) in bundles {
                let us = |index: usize| times[index] / 1000.0;
                println!(
                    "{fabric} {progress:?}: {tensors} tensors of {} B: one by one {:.1} us, batch {:.1} us, one buffer {:.1} us",
                    len * 4,
                    us(0),
                    us(1),
                    us(2)
                );
            }
        }
    }
}

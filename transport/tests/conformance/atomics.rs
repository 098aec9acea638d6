//! Atomics: one word, many peers, no update lost.

use std::collections::BTreeSet;

use pleach_transport::{AtomicOp, Region, RemoteSlice, Submitted, Transfer, TransferId, clock};

use crate::world::{BackendKind, Ending, PATIENCE, World, skip};

fn word_of(region: &Region, index: usize) -> RemoteSlice {
    region.slice(index * 8..index * 8 + 8).expect("inside").remote()
}

fn value_of(region: &Region, index: usize) -> u64 {
    let bytes = region.slice(index * 8..index * 8 + 8).expect("inside").to_vec();
    u64::from_ne_bytes(bytes.try_into().expect("eight bytes"))
}

fn add(word: RemoteSlice, value: u64) -> Transfer {
    Transfer::Atomic { word, op: AtomicOp::Add(value) }
}

fn swap(word: RemoteSlice, expected: u64, new: u64) -> Transfer {
    Transfer::Atomic { word, op: AtomicOp::CompareSwap { expected, new } }
}

pub(crate) fn an_add_returns_the_old_value_and_wraps(backend: BackendKind) {
    let mut world = World::connected(backend, 2);
    let words = world.region(1, 64);
    assert_eq!(world.carry_out(0, 1, add(word_of(&words, 2), 5)), Ok(0));
    assert_eq!(world.carry_out(0, 1, add(word_of(&words, 2), u64::MAX)), Ok(5));
    assert_eq!(world.carry_out(0, 1, add(word_of(&words, 2), 0)), Ok(4));
    assert_eq!(value_of(&words, 2), 4);
    assert!((0..8).filter(|index| *index != 2).all(|index| value_of(&words, index) == 0));
}

pub(crate) fn a_compare_swap_stores_only_where_the_value_is_expected(backend: BackendKind) {
    let mut world = World::connected(backend, 2);
    let words = world.region(1, 64);
    let word = word_of(&words, 7);
    assert_eq!(world.carry_out(0, 1, swap(word, 0, 17)), Ok(0), "success");
    assert_eq!(value_of(&words, 7), 17);
    assert_eq!(world.carry_out(0, 1, swap(word, 0, 99)), Ok(17), "failure returns what is there");
    assert_eq!(value_of(&words, 7), 17, "failure stores nothing");
    assert_eq!(world.carry_out(0, 1, swap(word, 17, u64::MAX)), Ok(17));
    assert_eq!(world.carry_out(0, 1, swap(word, u64::MAX, 1)), Ok(u64::MAX));
    assert_eq!(value_of(&words, 7), 1);
}

pub(crate) fn adds_of_several_peers_are_all_counted(backend: BackendKind) {
    const ADDS: usize = 100;
    let mut world = World::connected(backend, 4);
    let words = world.region(0, 8);
    let mut ids: Vec<(u32, TransferId)> = Vec::new();
    for _ in 0..ADDS {
        for rank in 1..4 {
            ids.push((rank, world.submit(rank, 0, add(word_of(&words, 0), 1))));
        }
    }
    let olds: Result<BTreeSet<u64>, _> = ids.iter().map(|(rank, id)| world.finish(*rank, *id)).collect();
    let expected: BTreeSet<u64> = (0..3 * ADDS as u64).collect();
    assert_eq!(olds, Ok(expected), "{}: every add saw another old value", backend.name);
    assert_eq!(value_of(&words, 0), 3 * ADDS as u64);
}

pub(crate) fn adds_of_peers_on_different_threads_are_all_counted(backend: BackendKind) {
    const ADDS: u64 = 500;
    if !backend.live {
        return skip(backend, "runs on one thread");
    }
    let mut world = World::connected(backend, 3);
    let words = world.region(0, 8);
    let word = word_of(&words, 0);
    let threads: Vec<_> = (1..3)
        .map(|rank| {
            let mut device = world.take(rank);
            std::thread::spawn(move || {
                let deadline = clock::now() + PATIENCE;
                let mut events = Vec::with_capacity(8);
                let mut olds: Vec<Ending> = Vec::new();
                for number in 0..ADDS {
                    let submitted = device.submit(0, add(word, 1), TransferId(number));
                    if let Submitted::Ended(old) = submitted.expect("one under way") {
                        olds.push(Ok(old));
                    }
                    while olds.len() as u64 <= number {
                        assert!(clock::now() < deadline, "add {number} of rank {rank} does not end");
                        device.poll(clock::now(), &mut events);
                        olds.extend(events.drain(..).filter_map(|event| match event {
                            pleach_transport::Event::Done { result, .. } => Some(result),
                            _ => None,
                        }));
                        std::thread::yield_now();
                    }
                }
                (device, olds)
            })
        })
        .collect();
    world.until("both threads to be through", |_| threads.iter().all(std::thread::JoinHandle::is_finished));
    let results: Vec<_> = threads.into_iter().map(|thread| thread.join().expect("no add failed")).collect();
    let olds: Result<BTreeSet<u64>, _> = results.iter().flat_map(|(_, olds)| olds.iter().cloned()).collect();
    assert_eq!(olds, Ok((0..2 * ADDS).collect()), "{}: every add saw another old value", backend.name);
    assert_eq!(value_of(&words, 0), 2 * ADDS);
}

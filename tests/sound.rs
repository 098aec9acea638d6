//! What a program that knows only this crate and has no `unsafe` may do with calls and their
//! memory: forget them, drop them half done and in any order. Its memory stays its own, and the
//! ranks go on.
#![forbid(unsafe_code)]

use std::mem::forget;
use std::thread;
use std::time::Duration;

use pleach::partial::{Activation, HostMemory, Partial, RawPartial, RawRound, Round};
use pleach::transport::rendezvous::{Fabric, FabricChoice, Rendezvous, World};
use pleach::window::{Arrival, PendingRead, Window, Word};
use pleach::{
    Batch, Buffer, CollectiveError, DataType, Group, Operation, Options, Pending, PendingError, Persistent,
    Rank, ReduceOp,
};

/// Longest time that anything here takes on a loaded machine.
const PATIENCE: Duration = Duration::from_secs(60);
const LEN: usize = 1 << 16;

/// Runs `body` as both ranks of a group over shared memory.
fn with_pair(name: &str, body: impl Fn(Group) + Sync) {
    let folder = std::env::temp_dir().join(format!("pleach-sound-{}-{name}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let join = |rank: Rank| {
        let rendezvous = Some(Rendezvous::File { folder: folder.clone() });
        let mut options = Options::new(World { rank, world_size: 2, rendezvous, ..World::alone() });
        options.fabric = FabricChoice::Only(Fabric::Shm);
        options.timeout = PATIENCE;
        Group::join(&options).unwrap()
    };
    thread::scope(|scope| {
        for rank in 0..2 {
            let (join, body) = (&join, &body);
            scope.spawn(move || body(join(rank)));
        }
    });
    std::fs::remove_dir_all(&folder).ok();
}

fn of(group: &Group, value: u32) -> Buffer<u32> {
    let mut buffer = group.buffer(LEN).unwrap();
    buffer.fill(value);
    buffer
}

/// What a call gives that was under way when its rank dropped the last handle of its group. By that
/// the rank has left: the peer may have left earlier, while the call needed it.
fn ended_or_left(call: Pending<Buffer<u32>>) -> Option<Buffer<u32>> {
    match call.wait() {
        Ok(data) => Some(data),
        Err(PendingError { error: CollectiveError::Failed(_), .. }) => None,
        Err(other) => panic!("{other}"),
    }
}

#[test]
fn memory_of_calls_that_are_dropped_or_forgotten_half_done_is_not_given_to_others() {
    with_pair("half-done", |group| {
        for round in 0..20 {
            drop(group.start(Operation::all_reduce(vec![round; LEN], ReduceOp::Sum)).unwrap());
            drop(group.start(Operation::all_reduce(of(&group, round), ReduceOp::Sum)).unwrap());
            forget(group.start(Operation::all_reduce(vec![round; LEN], ReduceOp::Sum)).unwrap());
            forget(group.start(Operation::all_reduce(of(&group, round), ReduceOp::Sum)).unwrap());
            // What these would write to if they had it back.
            let (others, registered) = (vec![7u32; LEN], of(&group, 7));
            let mut data = vec![round; LEN];
            group.all_reduce(&mut data, ReduceOp::Sum).unwrap();
            assert!(data.iter().all(|value| *value == 2 * round));
            assert!(others.iter().chain(registered.iter()).all(|value| *value == 7), "round {round}");
        }
        group.barrier().unwrap();
    });
}

#[test]
fn prepared_calls_and_batches_may_be_forgotten_at_any_point() {
    with_pair("prepared", |group| {
        for round in 0..10 {
            let mut prepared: Persistent<_> =
                group.prepare(Operation::all_reduce(of(&group, round), ReduceOp::Sum)).unwrap();
            prepared.run().unwrap();
            assert_eq!(prepared[LEN - 1], 2 * round);
            let started = prepared.start().unwrap();
            if round % 2 == 0 {
                forget(started)
            } else {
                drop(started)
            }
            let never_run = group.prepare(Operation::all_reduce(vec![round; LEN], ReduceOp::Sum)).unwrap();
            let mut given = vec![round; LEN];
            let mut batch: Batch = group.batch();
            batch.add(Operation::all_reduce(&mut given, ReduceOp::Sum)).unwrap();
            if round % 2 == 0 {
                forget(batch)
            } else {
                drop(batch)
            }
            assert!(given.iter().all(|value| *value == round), "no call was made");
            forget(never_run);
        }
        group.barrier().unwrap();
    });
}

#[test]
fn memory_outlives_its_group_and_calls_outlive_its_last_handle() {
    with_pair("outlives", |group| {
        let mut kept = of(&group, 1);
        group.all_reduce(&mut kept, ReduceOp::Sum).unwrap();
        let under_way: Pending<_> =
            group.clone().start(Operation::all_reduce(of(&group, 3), ReduceOp::Sum)).unwrap();
        let prepared = group.prepare(Operation::all_reduce(of(&group, 4), ReduceOp::Sum)).unwrap();
        group.barrier().unwrap();
        drop(group);
        assert!(ended_or_left(under_way).iter().flat_map(|data| data.iter()).all(|value| *value == 6));
        kept.fill(5);
        assert_eq!(kept[LEN - 1], 5);
        assert_eq!(prepared.into_data()[0], 4);
    });
}

#[test]
fn memory_of_one_group_may_be_given_to_another() {
    with_pair("foreign", |group| {
        let other = group.split(Some(0), group.rank()).unwrap().unwrap();
        let mut data = of(&group, 1);
        other.all_reduce(&mut data, ReduceOp::Sum).unwrap();
        drop(other);
        group.all_reduce(&mut data, ReduceOp::Sum).unwrap();
        assert!(data.iter().all(|value| *value == 4));
    });
}

#[test]
fn a_group_and_the_one_that_was_split_from_it_go_in_any_order_with_calls_under_way() {
    with_pair("split", |group| {
        for round in 1..5 {
            let part = group.split(Some(0), group.rank()).unwrap().unwrap();
            let above = group.start(Operation::all_reduce(vec![round; LEN], ReduceOp::Sum)).unwrap();
            let below = part.start(Operation::all_reduce(of(&part, round), ReduceOp::Sum)).unwrap();
            let foreign = part.start(Operation::all_reduce(of(&group, round), ReduceOp::Sum)).unwrap();
            if round % 2 == 0 {
                forget(above);
            } else {
                forget(part.start(Operation::all_reduce(of(&part, round), ReduceOp::Sum)).unwrap());
                drop(above);
            }
            // The other rank may have left already, while a call needed it.
            drop(part.barrier());
            drop(part);
            let others = of(&group, 7);
            for ended in [ended_or_left(foreign), ended_or_left(below)].into_iter().flatten() {
                assert!(ended.iter().all(|value| *value == 2 * round), "round {round}");
            }
            assert!(others.iter().all(|value| *value == 7), "round {round}");
        }
        let part = group.split(Some(0), group.rank()).unwrap().unwrap();
        drop(group);
        let mut data = of(&part, 1);
        part.all_reduce(&mut data, ReduceOp::Sum).unwrap();
        assert!(data.iter().all(|value| *value == 2), "a part outlives the whole");
    });
}

#[test]
fn memory_of_rounds_that_are_dropped_or_forgotten_is_not_given_to_others() {
    with_pair("rounds", |group| {
        let others = vec![7u32; LEN];
        for step in 0..6u32 {
            let mut rounds: Partial<u32, HostMemory> = group.partial(LEN, Activation::quorum(1)).unwrap();
            rounds.contribution().fill(step);
            let round: Round<'_, u32> = rounds.contribute().unwrap();
            let first = round.result()[0];
            assert!(round.result().iter().all(|element| *element == first) && first <= 2 * step);
            group.barrier().unwrap();
            // Half done: the contribution that is written is no round's.
            rounds.contribution().fill(step + 1);
            if step % 3 == 0 { forget(rounds) } else { drop(rounds) }
        }
        let mut raw = RawPartial::new(&group, LEN, DataType::U32, Activation::all()).unwrap();
        raw.contribution().fill(1);
        let round: RawRound<'_> = raw.contribute().unwrap();
        assert!(round.result().iter().all(|byte| *byte == 2));
        forget(round);
        group.barrier().unwrap();
        drop(raw);
        assert!(others.iter().all(|element| *element == 7));
        let mut sum = vec![1u32; LEN];
        group.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
        assert!(sum.iter().all(|element| *element == 2));
    });
}

#[test]
fn reads_and_windows_that_are_forgotten_or_dropped_half_done_touch_no_memory_of_others() {
    with_pair("windows", |group| {
        let peer = 1 - group.rank();
        let others = vec![7u32; LEN];
        for step in 1..=4u32 {
            let mut window: Window<u32> = group.window(LEN, 1).unwrap();
            window.publish(&vec![step; LEN], Word::EMPTY).unwrap();
            window.write(peer, 0, &vec![step; LEN], Word::EMPTY).unwrap();
            group.barrier().unwrap();
            let start = |window: &mut Window<u32>| -> PendingRead<Vec<u32>> {
                window.start_read(peer, 0..LEN, vec![0; LEN]).unwrap()
            };
            forget(start(&mut window));
            drop(start(&mut window));
            let mut half_done = start(&mut window);
            let is_alike = |elements: &[u32]| elements.iter().all(|element| *element == step);
            // The peer's second write may come while the first is polled.
            let mut seen = 0;
            while seen == 0 {
                seen += window.wait(PATIENCE, |it: Arrival<'_, u32>| assert!(is_alike(it.data()))).unwrap();
            }
            // A read outlives its window, and a slot is written while nobody looks at it.
            window.write(peer, 0, &vec![step; LEN], Word::EMPTY).unwrap();
            group.barrier().unwrap();
            if step % 2 == 0 {
                forget(window)
            } else {
                drop(window)
            }
            while !half_done.test() {
                thread::yield_now();
            }
            // Nobody leaves a window before the other rank has read.
            group.barrier().unwrap();
            assert!(half_done.wait().is_ok_and(|(_, _, elements)| is_alike(&elements)));
        }
        assert!(others.iter().all(|element| *element == 7));
    });
}

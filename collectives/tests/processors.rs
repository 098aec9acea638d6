//! Ranks that come to be on one processor although they might have two.

#[allow(dead_code)] // Not every test says where its ranks meet.
mod ranks;
#[path = "../../tests/skipped/mod.rs"]
mod skipped;

use pleach_collectives::{Group, Options};
use pleach_transport::processors::{Processors, current};
use pleach_transport::rendezvous::{Fabric, World};
use pleach_vocabulary::ReduceOp;

use ranks::with_group;
use skipped::skip;

/// Tries, each of which begins on one processor.
const TRIES: usize = 20;
/// Calls on one processor before the ranks may part: enough for each to have shown where it is.
const CALLS_TOGETHER: usize = 4;
/// Most calls of a try, about: ranks that only yield take hundreds on a busy machine, and do not
/// part on a quiet one.
const CALLS_MAX: usize = 1_000;
/// Most calls of all tries together: in each the ranks yield and sleep some times and then move,
/// now and then more than once.
const CALLS_OF_ALL_MAX: usize = 30 * TRIES;

/// The processors of both ranks, as one call tells them.
fn places(group: &Group) -> [i64; 2] {
    let mut places = [0; 2];
    places[group.rank() as usize] = i64::from(current());
    group.all_reduce(&mut places, ReduceOp::Sum).expect("both call it");
    places
}

/// How many calls ranks that begin on one processor make until they are on two.
fn calls_until_apart(group: &Group, all: &Processors, only: &Processors) -> usize {
    only.keep_this_thread().expect("it is one of its own");
    for _ in 0..CALLS_TOGETHER {
        let places = places(group);
        assert_eq!(places[0], places[1]);
    }
    all.keep_this_thread().expect("it might before");
    // Both have, before either looks.
    group.barrier().expect("both call it");
    let is_apart = || {
        let places = places(group);
        places[0] != places[1]
    };
    (1..CALLS_MAX).find(|_| is_apart()).unwrap_or(CALLS_MAX)
}

#[test]
fn ranks_on_one_processor_part_within_some_calls_though_all_processors_are_busy() {
    let all = Processors::allowed().expect("a machine of few processors");
    if all.len() < 2 {
        return skip("ranks on one processor cannot part");
    }
    let only = Processors::new(all.iter().take(1));
    let calls = with_group(
        Fabric::Shm,
        2,
        |options| options.spin = Options::new(World::alone()).spin,
        |group| (0..TRIES).map(|_| calls_until_apart(&group, &all, &only)).collect::<Vec<_>>(),
    );
    println!("calls until the ranks were apart: {:?}", calls[0]);
    assert!(calls[0].iter().sum::<usize>() <= CALLS_OF_ALL_MAX, "{:?}", calls[0]);
}

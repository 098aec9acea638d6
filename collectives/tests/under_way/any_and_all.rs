//! Several operations under way: which one is done first, and all of them.

use std::time::Duration;

use pleach_collectives::engine::FaultKind;
use pleach_collectives::{Buffer, CollectiveError, Operation, Pending, PendingError};
use pleach_transport::rendezvous::Fabric;
use pleach_vocabulary::ReduceOp;

use crate::ranks::with_group;

/// Longest time a test's calls may take on a loaded machine.
const PATIENCE: Duration = Duration::from_secs(60);

/// Too short for what cannot come.
const MOMENT: Duration = Duration::from_millis(20);

fn the_first_of_several_that_is_done_is_told(fabric: Fabric) {
    with_group(
        fabric,
        3,
        |_| {},
        |group| {
            let from = |peer| group.start(Operation::recv(vec![0u32; 3], peer)).unwrap();
            match group.rank() {
                0 => {
                    let mut pending = vec![from(1), from(2)];
                    // Rank 1 sends only after this rank has received what rank 2 sends.
                    assert_eq!(Pending::wait_any(&mut pending, PATIENCE), Some(1));
                    assert_eq!(pending.swap_remove(1).wait().unwrap(), [2; 3]);
                    assert_eq!(Pending::wait_any(&mut pending, MOMENT), None);
                    group.send(&[0u8], 1).unwrap();
                    assert_eq!(Pending::wait_any(&mut pending, PATIENCE), Some(0));
                    assert_eq!(pending.pop().unwrap().wait().unwrap(), [1; 3]);
                    assert_eq!(Pending::wait_any(&mut pending, PATIENCE), None, "there are none");
                }
                1 => {
                    group.recv(&mut [0u8], 0).unwrap();
                    group.send(&[1u32; 3], 0).unwrap();
                }
                _ => group.send(&[2u32; 3], 0).unwrap(),
            }
            group.barrier().unwrap();
        },
    );
}

fn the_first_of_two_groups_is_told(fabric: Fabric) {
    with_group(
        fabric,
        2,
        |_| {},
        |group| {
            let other = group.split(Some(0), group.rank()).unwrap().expect("a colour");
            if group.rank() == 0 {
                let of = |group: &pleach_collectives::Group| {
                    group.start(Operation::recv(vec![0u32; 1], 1)).unwrap()
                };
                let mut pending = vec![of(&group), of(&other)];
                assert_eq!(Pending::wait_any(&mut pending, MOMENT), None);
                group.send(&[0u8], 1).unwrap();
                assert_eq!(Pending::wait_any(&mut pending, PATIENCE), Some(1));
                group.send(&[0u8], 1).unwrap();
                assert_eq!(Pending::wait_all(pending).unwrap(), [[1], [2]]);
            } else {
                group.recv(&mut [0u8], 0).unwrap();
                other.send(&[2u32], 0).unwrap();
                group.recv(&mut [0u8], 0).unwrap();
                group.send(&[1u32], 0).unwrap();
            }
            group.barrier().unwrap();
            other.close().unwrap();
        },
    );
}

fn a_failure_ends_all_and_gives_all_memory_back(fabric: Fabric) {
    with_group(
        fabric,
        2,
        |_| {},
        |group| {
            if group.rank() == 1 {
                return;
            }
            let start = |len| group.start(Operation::recv(vec![0u32; len], 1)).unwrap();
            let mut pending: Vec<_> = (1..4).map(start).collect();
            let first = Pending::wait_any(&mut pending, PATIENCE);
            assert!(first.is_some(), "a failure is an end");
            let PendingError { error, data } = Pending::wait_all(pending).unwrap_err();
            assert_eq!(data.iter().map(Vec::len).collect::<Vec<_>>(), [1, 2, 3]);
            let CollectiveError::Failed(fault) = error else { panic!("{error}") };
            assert_eq!(fault.kind, FaultKind::Left, "{fault}");
        },
    );
}

fn buckets_of_one_buffer_are_reduced_one_by_one(fabric: Fabric) {
    const LENGTHS: [usize; 4] = [3, 0, 70_000, 1_000];
    with_group(
        fabric,
        2,
        |_| {},
        |group| {
            let mut flat = group.buffer::<u32>(LENGTHS.iter().sum()).unwrap();
            flat.iter_mut().zip(0..).for_each(|(element, index)| *element = index + group.rank());
            let address = flat.as_ptr();
            let start = |bucket| group.start(Operation::all_reduce(bucket, ReduceOp::Sum)).unwrap();
            let pending: Vec<_> = flat.split(&LENGTHS).unwrap().into_iter().map(start).collect();
            let flat = Buffer::join(Pending::wait_all(pending).unwrap()).unwrap();
            assert!(flat.iter().zip(0..).all(|(element, index)| *element == 2 * index + 1));
            assert_eq!(flat.as_ptr(), address, "the memory is the same");
        },
    );
}

crate::on_every_fabric! {
    the_first_of_several_that_is_done_is_told,
    the_first_of_two_groups_is_told,
    a_failure_ends_all_and_gives_all_memory_back,
    buckets_of_one_buffer_are_reduced_one_by_one,
}

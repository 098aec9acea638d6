//! A group that is split.

use std::time::Duration;

use pleach_collectives::engine::FaultKind;
use pleach_collectives::{CollectiveError, Group, JoinGroupError, SplitError};
use pleach_transport::rendezvous::Fabric;
use pleach_vocabulary::ReduceOp;

use crate::ranks::with_group;

/// The sum over a group of one number a rank.
fn sum(group: &Group, number: u64) -> u64 {
    let mut data = [number];
    group.all_reduce(&mut data, ReduceOp::Sum).unwrap();
    data[0]
}

fn ranks_of_a_colour_become_a_group_numbered_by_key_and_the_others_get_none(fabric: Fabric) {
    with_group(
        fabric,
        5,
        |_| (),
        |group| {
            let rank = group.rank();
            // Even ranks in reverse, odd ranks but 3 in order, 3 in none.
            let colour = (rank != 3).then_some(rank % 2);
            let key = if rank % 2 == 0 { 10 - rank } else { 0 };
            let part = group.split(colour, key).unwrap();
            match &part {
                Some(part) if rank % 2 == 0 => {
                    assert_eq!((part.world_size(), part.rank()), (3, (4 - rank) / 2));
                    assert_eq!(sum(part, rank.into()), 6);
                    let mut all = [0u32; 3];
                    part.all_gather(&[rank][..], &mut all[..]).unwrap();
                    assert_eq!(all, [4, 2, 0]);
                }
                Some(part) => {
                    assert_eq!((rank, part.world_size(), part.rank()), (1, 1, 0));
                    assert_eq!(sum(part, 9), 9);
                }
                None => assert_eq!(rank, 3),
            }
            assert_eq!(sum(&group, 1), 5, "the group that was split works on");
            let again = part.and_then(|part| part.split(Some(part.rank() / 2), 0).unwrap());
            if let Some(again) = &again {
                let expected = if rank == 4 || rank == 2 { 6 } else { u64::from(rank) };
                assert_eq!(sum(again, rank.into()), expected, "a part is split again");
            }
            assert_eq!(sum(&group, 1), 5);
        },
    );
}

/// Rank 0 holds what the others meet in; alone in its part it meets nobody there.
fn rank_0_may_leave_as_soon_as_the_group_is_split(fabric: Fabric) {
    with_group(
        fabric,
        4,
        |_| (),
        |group| {
            let rank = group.rank();
            let part = group.split(Some(rank.min(1)), 0).unwrap().unwrap();
            drop(group);
            assert_eq!(sum(&part, rank.into()), if rank == 0 { 0 } else { 6 });
            part.close().unwrap();
        },
    );
}

fn a_part_outlives_the_group_and_its_failure_is_its_own(fabric: Fabric) {
    with_group(
        fabric,
        4,
        |_| (),
        |group| {
            let rank = group.rank();
            let first = group.split(Some(rank / 2), 0).unwrap().unwrap();
            let second = group.split(Some(rank % 2), 0).unwrap().unwrap();
            if rank < 2 {
                first.abort();
                let error = first.barrier().unwrap_err();
                assert!(
                    matches!(&error, CollectiveError::Failed(fault) if fault.kind == FaultKind::Aborted),
                    "{error}"
                );
            } else {
                assert_eq!(sum(&first, 1), 2);
            }
            assert_eq!(sum(&group, 1), 4, "a part's failure is not the group's");
            group.close().unwrap();
            assert_eq!(sum(&second, rank.into()), u64::from(if rank % 2 == 0 { 2u8 } else { 4 }));
            second.close().unwrap();
        },
    );
}

fn a_rank_that_does_not_split_is_named_at_the_deadline(fabric: Fabric) {
    let (done, wait) = std::sync::mpsc::channel::<()>();
    let wait = std::sync::Mutex::new(wait);
    with_group(
        fabric,
        2,
        |_| (),
        |group| {
            if group.rank() == 1 {
                wait.lock().unwrap().recv_timeout(Duration::from_secs(60)).unwrap();
                return;
            }
            let error = group.within(Duration::from_millis(300)).split(Some(0), 0).unwrap_err();
            let SplitError::Collective(CollectiveError::Failed(fault)) = &error else { panic!("{error}") };
            assert_eq!((fault.kind, fault.subject), (FaultKind::TimedOut, 1), "{error}");
            done.send(()).unwrap();
        },
    );
}

fn an_all_gather_of_the_callers_is_no_split(fabric: Fabric) {
    with_group(
        fabric,
        2,
        |_| (),
        |group| {
            let error = if group.rank() == 0 {
                group.split(None, 0).map(|_| ()).unwrap_err()
            } else {
                SplitError::Collective(group.all_gather(&[0u64; 4], &mut [0u64; 8]).unwrap_err())
            };
            let SplitError::Collective(CollectiveError::Failed(fault)) = &error else { panic!("{error}") };
            assert_eq!(fault.kind, FaultKind::Mismatch, "{error}");
        },
    );
}

#[test]
fn a_rank_alone_is_split_into_itself() {
    let group = Group::join(&pleach_collectives::Options::new(pleach_transport::rendezvous::World::alone()));
    let group = group.unwrap_or_else(|error: JoinGroupError| panic!("{error}"));
    assert!(group.split(None, 0).unwrap().is_none());
    let part = group.split(Some(u32::MAX), u32::MAX).unwrap().unwrap();
    assert_eq!((part.rank(), part.world_size(), sum(&part, 3)), (0, 1, 3));
}

crate::on_every_fabric!(
    rank_0_may_leave_as_soon_as_the_group_is_split,
    ranks_of_a_colour_become_a_group_numbered_by_key_and_the_others_get_none,
    a_part_outlives_the_group_and_its_failure_is_its_own,
    a_rank_that_does_not_split_is_named_at_the_deadline,
    an_all_gather_of_the_callers_is_no_split,
);

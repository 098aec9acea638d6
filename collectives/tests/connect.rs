//! Groups whose pairs connect on first use, on real fabrics, by threads that are ranks.

#[path = "ranks/meeting.rs"]
mod meeting;
#[path = "../../tests/ports/mod.rs"]
mod ports;
#[path = "connect/processes.rs"]
mod processes;
mod ranks;

use std::time::Duration;

use pleach_collectives::engine::FaultKind;
use pleach_collectives::partial::Activation;
use pleach_collectives::{CollectiveError, Connect, Group, Options, ReduceOp, Word};
use pleach_schedule::Algorithm;
use pleach_transport::rendezvous::Fabric;

use meeting::Meeting;

/// More ranks than a rank has neighbours: each has eight of them when the group was joined.
const RANKS: u32 = 20;

fn with_group<T: Send>(fabric: Fabric, ranks: u32, body: impl Fn(Group) -> T + Sync) -> Vec<T> {
    ranks::with_group(fabric, ranks, |options| options.connect = Some(Connect::OnUse), body)
}

fn expect_sum(group: &Group, len: usize) {
    let rank = group.rank();
    let mut data: Vec<u32> = (0..len as u32).map(|index| index + rank).collect();
    group.all_reduce(&mut data, ReduceOp::Sum).expect("an all-reduce");
    let ranks = group.world_size();
    let all: u32 = (0..ranks).sum();
    assert!(data.iter().zip(0..).all(|(sum, index)| *sum == index * ranks + all), "rank {rank}");
}

fn calls_connect_what_they_need(fabric: Fabric) {
    with_group(fabric, RANKS, |group| {
        let (rank, ranks) = (group.rank(), group.world_size());
        let begun = group.info().connections;
        assert_eq!(begun, 8, "ranks are connected whose distance is 1, 2, 4 or 8");
        let ring = group.with_variant("ring".parse::<Algorithm>().expect("an algorithm"));
        expect_sum(&ring, 5_000);
        expect_sum(&group, 1);
        expect_sum(&group, 300_000);
        // Each sends to the rank that is three further, and receives from three before.
        let (to, from) = ((rank + 3) % ranks, (rank + ranks - 3) % ranks);
        let mut received = [0_u32];
        group.send(&[rank], to).expect("a message");
        group.recv(&mut received, from).expect("a message");
        assert_eq!(received, [from]);
        let mut all = vec![0; ranks as usize];
        group.all_gather(&[rank], &mut all).expect("an all-gather");
        assert_eq!(all, (0..ranks).collect::<Vec<_>>());
        let part = group.split(Some(rank % 2), rank).expect("a split").expect("this rank named a colour");
        expect_sum(&part, 10);
        group.barrier().expect("all are here");
    });
}

/// Ranks 0 and 3, and 10 and 3, are no neighbours among 20, and have either end's number higher.
fn a_message_goes_out_to_a_rank_that_is_in_no_call(fabric: Fabric) {
    let sent = &Meeting::new(RANKS as usize);
    with_group(fabric, RANKS, |group| {
        let own = match group.rank() {
            0 | 10 => group.send(&[group.rank()], 3),
            _ => Ok(()),
        };
        sent.wait();
        own.expect("it is sent while rank 3 is in no call");
        if group.rank() == 3 {
            for from in [0, 10] {
                let mut received = [77];
                group.recv(&mut received, from).expect("it was sent");
                assert_eq!(received, [from]);
            }
            assert_eq!(group.info().connections, 8 + 2);
        }
        group.barrier().expect("all are here");
    });
}

/// Only rank 0 makes calls on windows of other ranks, which are in no call.
fn a_window_of_a_rank_in_no_call_is_read_and_written(fabric: Fabric) {
    let done = &Meeting::new(RANKS as usize);
    with_group(fabric, RANKS, |group| {
        let (rank, ranks) = (group.rank(), group.world_size());
        let mut window = group.window::<u32>(2, 1).expect("all ask for the same");
        window.publish(&[rank, rank + 1], Word::EMPTY).expect("a version");
        group.barrier().expect("all are here");
        if rank == 0 {
            for peer in 1..ranks {
                let mut read = [0; 2];
                if peer % 2 == 0 {
                    window.read(peer, 0..2, &mut read).expect("a read");
                } else {
                    let pending = window.start_read(peer, 0..2, vec![0; 2]).expect("a read begins");
                    read.copy_from_slice(&pending.wait().expect("a read").2);
                }
                assert_eq!(read, [peer, peer + 1]);
                window.write(peer, 0, &[peer + 7], Word::from(u64::from(peer))).expect("a write");
            }
        }
        done.wait();
        if rank > 0 {
            let mut seen = Vec::new();
            while seen.is_empty() {
                window
                    .wait(Duration::from_secs(60), |arrival| seen.push((arrival.from, arrival.data()[0])))
                    .expect("the group works");
            }
            assert_eq!(seen, [(0, rank + 7)]);
        }
        group.barrier().expect("all are here");
        window.close().expect("all are here");
    });
}

/// Rank 3 is late: the others' rounds go on without it, and it takes part when it comes.
fn rounds_go_on_without_a_late_rank(fabric: Fabric) {
    let behind = &Meeting::new(RANKS as usize);
    with_group(fabric, RANKS, |group| {
        let rank = group.rank();
        let mut rounds = group.partial::<u32>(1, Activation::quorum(RANKS - 1)).expect("alike on all ranks");
        if rank != 3 {
            for _ in 0..3 {
                rounds.contribution()[0] = 1;
                assert!(rounds.contribute().expect("a round").result()[0] >= RANKS - 1);
            }
        }
        behind.wait();
        rounds.finish().expect("all finish");
        group.barrier().expect("all are here");
    });
}

fn windows_and_partial_sums_work_as_in_other_groups(fabric: Fabric) {
    with_group(fabric, RANKS, |group| {
        let (rank, ranks) = (group.rank(), group.world_size());
        let mut window = group.window::<u32>(2, 0).expect("all ask for the same");
        window.publish(&[rank, rank + 1], Word::EMPTY).expect("a version");
        group.barrier().expect("all are here");
        for peer in 0..ranks {
            let mut read = [0; 2];
            window.read(peer, 0..2, &mut read).expect("a read");
            assert_eq!(read, [peer, peer + 1]);
        }
        group.barrier().expect("all are here");
        let mut rounds = group.partial::<u32>(1, Activation::all()).expect("alike on all ranks");
        rounds.contribution()[0] = rank;
        let round = rounds.contribute().expect("a round");
        assert_eq!(round.result(), [(0..ranks).sum::<u32>()]);
        drop(round);
        rounds.finish().expect("all are here");
        group.barrier().expect("all are here");
    });
}

fn a_rank_that_left_and_one_that_is_late_are_named(fabric: Fabric) {
    let left = &Meeting::new(RANKS as usize);
    with_group(fabric, RANKS, |group| {
        let rank = group.rank();
        if rank == 3 {
            drop(group);
            left.wait();
            left.wait();
            return;
        }
        left.wait();
        // Rank 3 was never connected to ranks 0 and 10, of which one has a lower and one a higher
        // number.
        if [0, 10].contains(&rank) {
            let error = group.recv(&mut [0_u32], 3).expect_err("rank 3 has left");
            let CollectiveError::Failed(fault) = &error else { panic!("{error}") };
            assert_eq!((fault.kind, fault.subject), (FaultKind::Left, 3), "rank {rank}: {error}");
        }
        // The others pass messages on until then.
        left.wait();
    });
    let late = &Meeting::new(RANKS as usize);
    with_group(fabric, RANKS, |group| {
        if group.rank() == 0 {
            let error =
                group.within(Duration::from_millis(300)).recv(&mut [0_u32], 3).expect_err("it is late");
            let CollectiveError::Failed(fault) = &error else { panic!("{error}") };
            assert_eq!(fault.subject, 3, "{error}");
        }
        late.wait();
        if group.rank() == 7 {
            // The verdict came to a rank that was in no call.
            let error = group.barrier().expect_err("the group has failed");
            let CollectiveError::Failed(fault) = &error else { panic!("{error}") };
            assert_eq!(fault.subject, 3, "{error}");
        }
    });
}

macro_rules! on_every_fabric {
    ($($fabric:ident $name:ident),*) => {
        $(mod $name {
            use super::Fabric::$fabric;

            #[test]
            fn calls_connect_what_they_need() {
                super::calls_connect_what_they_need($fabric);
            }

            #[test]
            fn windows_and_partial_sums_work_as_in_other_groups() {
                super::windows_and_partial_sums_work_as_in_other_groups($fabric);
            }

            #[test]
            fn a_message_goes_out_to_a_rank_that_is_in_no_call() {
                super::a_message_goes_out_to_a_rank_that_is_in_no_call($fabric);
            }

            #[test]
            fn a_window_of_a_rank_in_no_call_is_read_and_written() {
                super::a_window_of_a_rank_in_no_call_is_read_and_written($fabric);
            }

            #[test]
            fn rounds_go_on_without_a_late_rank() {
                super::rounds_go_on_without_a_late_rank($fabric);
            }

            #[test]
            fn a_rank_that_left_and_one_that_is_late_are_named() {
                super::a_rank_that_left_and_one_that_is_late_are_named($fabric);
            }
        })*
    };
}
on_every_fabric!(Shm shm, Tcp tcp, Hybrid hybrid);

#[test]
fn ranks_that_connect_at_different_times_are_refused() {
    let folder = ranks::Folder::new();
    let folder = &folder;
    std::thread::scope(|scope| {
        let threads: Vec<_> = [Connect::AtJoin, Connect::OnUse]
            .into_iter()
            .zip(0..)
            .map(|(connect, rank)| {
                scope.spawn(move || {
                    let mut options = Options::new(ranks::world(rank, 2, &folder.0));
                    options.connect = Some(connect);
                    Group::join(&options).expect_err("they differ").to_string()
                })
            })
            .collect();
        for thread in threads {
            let error = thread.join().expect("no panic");
            assert!(error.contains("connect"), "{error}");
        }
    });
}

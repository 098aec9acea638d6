//! A thread of the group that carries on.

use std::sync::{Mutex, mpsc};
use std::thread;
use std::time::Duration;

use pleach_collectives::engine::FaultKind;
use pleach_collectives::{CollectiveError, Operation, Options, Progress};
use pleach_transport::clock;
use pleach_transport::rendezvous::Fabric;
use pleach_vocabulary::ReduceOp;

use crate::ranks::with_group;

/// Longest time a test's calls may take on a loaded machine.
const PATIENCE: Duration = Duration::from_secs(60);

/// Groups have a thread unless they are told otherwise.
fn with_thread(options: &mut Options) {
    assert_eq!(options.progress, Progress::Thread);
}

/// Waits until that many threads of this process drive the group of this number: a thread gets
/// its name, and its entry goes, a little after what begins and ends it has returned.
fn expect_threads(number: u64, expected: usize) {
    let begun = clock::now();
    while threads(number) != expected {
        assert!(clock::now().since(begun) < PATIENCE, "{} threads, not {expected}", threads(number));
        thread::yield_now();
    }
}

fn threads(number: u64) -> usize {
    let name = format!("pleach-run-{}\n", number % 1000);
    let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten();
    tasks.filter(|task| std::fs::read_to_string(task.path().join("comm")).is_ok_and(|it| it == name)).count()
}

fn what_is_started_ends_while_its_rank_is_in_no_call(fabric: Fabric) {
    let (done, wait) = mpsc::channel::<()>();
    let wait = Mutex::new(wait);
    with_group(fabric, 2, with_thread, |group| {
        let mut pending: Vec<_> = (1..5)
            .map(|number| {
                let data = vec![number + group.rank(); 300_000 * number as usize];
                group.start(Operation::all_reduce(data, ReduceOp::Sum)).unwrap()
            })
            .collect();
        if group.rank() == 0 {
            // Neither tests nor waits until its peer has all results, which it can only have from
            // here.
            wait.lock().unwrap().recv_timeout(PATIENCE).unwrap();
        }
        for (number, pending) in (1..5).zip(pending.drain(..)) {
            assert_eq!(pending.wait().unwrap(), vec![2 * number + 1; 300_000 * number as usize]);
        }
        if group.rank() == 1 {
            done.send(()).unwrap();
        }
        expect_threads(group.info().name.number, 1);
    });
}

fn calls_go_beside_what_is_under_way(fabric: Fabric) {
    with_group(fabric, 2, with_thread, |group| {
        let rank = group.rank();
        for round in 0..20 {
            let long =
                group.start(Operation::all_reduce(vec![rank + round; 200_000], ReduceOp::Sum)).unwrap();
            let mut short = [round];
            group.all_reduce(&mut short, ReduceOp::Sum).unwrap();
            assert_eq!(short, [2 * round]);
            let mut polled = group.start(Operation::all_reduce([round].to_vec(), ReduceOp::Max)).unwrap();
            while !polled.test() {
                thread::yield_now();
            }
            assert_eq!(long.wait().unwrap(), vec![2 * round + 1; 200_000]);
            assert_eq!(polled.wait().unwrap(), [round]);
        }
        group.close().unwrap();
    });
}

fn the_thread_is_no_second_caller_to_ranks_that_wait_for_each_other(fabric: Fabric) {
    with_group(fabric, 2, with_thread, |group| {
        // Thread and caller want the engine at the same time, again and again.
        for _ in 0..50 {
            let pending = group.start(Operation::all_reduce(vec![1u32; 20_000], ReduceOp::Sum)).unwrap();
            assert_eq!(pending.wait().unwrap(), vec![2; 20_000]);
        }
        let peer = 1 - group.rank();
        let error = group.recv(&mut [0u8; 8], peer).unwrap_err();
        let CollectiveError::Failed(fault) = &error else { panic!("{error}") };
        assert_eq!(fault.kind, FaultKind::Mismatch, "{error}");
    });
}

fn a_failure_ends_what_the_thread_carries_on(fabric: Fabric) {
    with_group(fabric, 2, with_thread, |group| {
        if group.rank() == 1 {
            group.abort();
        }
        // Started before or after it is known here.
        let error = match group.start(Operation::all_reduce(vec![1u8; 100_000], ReduceOp::Sum)) {
            Ok(pending) => pending.wait().unwrap_err(),
            Err(error) => error,
        };
        let CollectiveError::Failed(fault) = &error.error else { panic!("{error}") };
        assert_eq!((fault.kind, fault.subject), (FaultKind::Aborted, 1), "{error}");
        assert_eq!(error.data.len(), 100_000);
    });
}

fn a_deadline_passes_though_nobody_calls(fabric: Fabric) {
    let (done, wait) = mpsc::channel::<()>();
    let wait = Mutex::new(wait);
    with_group(fabric, 2, with_thread, |group| {
        if group.rank() == 1 {
            wait.lock().unwrap().recv_timeout(PATIENCE).unwrap();
            // The group has failed here too: the other rank's thread has said so, not this rank's
            // call.
            let error = group.barrier().unwrap_err();
            let CollectiveError::Failed(fault) = &error else { panic!("{error}") };
            assert_eq!((fault.kind, fault.found_by), (FaultKind::TimedOut, 0), "{error}");
            return;
        }
        let limited = group.within(Duration::from_millis(200));
        let pending = limited.start(Operation::all_reduce(vec![1u8; 10], ReduceOp::Sum)).unwrap();
        let error = pending.wait().unwrap_err();
        let CollectiveError::Failed(fault) = &error.error else { panic!("{error}") };
        assert_eq!((fault.kind, fault.subject), (FaultKind::TimedOut, 1), "{error}");
        done.send(()).unwrap();
    });
}

fn the_thread_ends_with_its_group_whatever_is_under_way(fabric: Fabric) {
    let (done, wait) = mpsc::channel::<()>();
    let wait = Mutex::new(wait);
    with_group(fabric, 2, with_thread, |group| {
        let number = group.info().name.number;
        group.barrier().unwrap();
        assert_eq!(threads(number), 0, "a group that has started nothing has no thread");
        if group.rank() == 1 {
            // Its peer's run never ends by itself.
            wait.lock().unwrap().recv_timeout(PATIENCE).unwrap();
            return;
        }
        let pending =
            group.within(PATIENCE * 10).start(Operation::all_reduce(vec![1u8; 10], ReduceOp::Sum)).unwrap();
        expect_threads(number, 1);
        drop(group);
        expect_threads(number, 0);
        done.send(()).unwrap();
        assert!(pending.wait().is_err(), "the peer has left");
    });
}

fn priorities_change_when_calls_end_and_not_what_they_give(fabric: Fabric) {
    for progress in [Progress::WhenCalled, Progress::Thread] {
        with_group(
            fabric,
            2,
            |options| options.progress = progress,
            |group| {
                let rank = group.rank();
                let pending: Vec<_> = (0..24)
                    .map(|number: u32| {
                        // Ranks need not agree.
                        let urgent = group.with_priority((number * (rank + 1) % 5) as i32 - 2);
                        let data = vec![number + rank; 1 + 40_000 * (number % 3) as usize];
                        urgent.start(Operation::all_reduce(data, ReduceOp::Sum)).unwrap()
                    })
                    .collect();
                for (number, pending) in (0..).zip(pending) {
                    let data = pending.wait().unwrap();
                    assert!(data.iter().all(|item| *item == 2 * number + 1), "{number}");
                }
            },
        );
    }
}

crate::on_every_fabric!(
    what_is_started_ends_while_its_rank_is_in_no_call,
    calls_go_beside_what_is_under_way,
    the_thread_is_no_second_caller_to_ranks_that_wait_for_each_other,
    a_failure_ends_what_the_thread_carries_on,
    a_deadline_passes_though_nobody_calls,
    the_thread_ends_with_its_group_whatever_is_under_way,
    priorities_change_when_calls_end_and_not_what_they_give,
);

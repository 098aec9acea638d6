//! Groups of threads on real fabrics: the surface that users hold.

#[path = "group/blocks.rs"]
mod blocks;
#[path = "ranks/meeting.rs"]
mod meeting;
mod ranks;
#[path = "group/tuning.rs"]
mod tuning;
#[path = "group/uneven.rs"]
mod uneven;
#[path = "group/waking.rs"]
mod waking;

use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use pleach_collectives::engine::{DEADLOCK_AFTER, FaultKind};
use pleach_collectives::{CollectiveError, Group, Operation, Options, RankSpace};
use pleach_schedule::Algorithm;
use pleach_transport::clock;
use pleach_transport::rendezvous::{Fabric, FabricChoice};
use pleach_vocabulary::{Rank, ReduceOp};

use blocks::{
    a_different_length_of_blocks_is_a_mismatch, a_rank_s_own_block_may_lie_at_its_place,
    blocks_go_where_they_belong, blocks_of_a_wrong_length_are_refused,
    blocks_under_way_give_their_memory_back,
};
use meeting::Meeting;
use uneven::{
    counts_that_do_not_fit_are_refused, ranks_that_expect_another_count_are_told_both,
    uneven_blocks_go_where_they_belong,
};

/// Longest time a test's calls may take on a loaded machine.
const PATIENCE: Duration = Duration::from_secs(60);

/// Runs `body` as every rank of a group and gives what each returned.
fn with_group<T: Send>(fabric: Fabric, ranks: u32, body: impl Fn(Group) -> T + Sync) -> Vec<T> {
    ranks::with_group(fabric, ranks, |_| {}, body)
}

fn every_operation_gives_the_right_result(fabric: Fabric) {
    for ranks in [1, 2, 3, 4] {
        with_group(fabric, ranks, |group| {
            let rank = group.rank() as i64;
            let n = i64::from(ranks);
            for count in [0usize, 1, 3, 1000, 300_000] {
                let value = |rank: i64, index: usize| rank * 7 + (index % 1013) as i64;
                let sum = |index: usize| (0..n).map(|rank| value(rank, index)).sum::<i64>();
                let own: Vec<i64> = (0..count).map(|index| value(rank, index)).collect();
                let sums: Vec<i64> = (0..count).map(sum).collect();

                let mut plain = own.clone();
                group.all_reduce(&mut plain, ReduceOp::Sum).unwrap();
                assert!(plain == sums, "all_reduce of a Vec, {count}");

                let mut buffer = group.buffer::<i64>(count).unwrap();
                buffer.copy_from_slice(&own);
                group.all_reduce(&mut buffer, ReduceOp::Sum).unwrap();
                assert!(buffer[..] == sums, "all_reduce of a Buffer, {count}");

                let mut apart = vec![0i64; count];
                group.run(Operation::all_reduce_into(&own, &mut apart, ReduceOp::Max)).unwrap();
                assert!(apart.iter().enumerate().all(|(index, item)| *item == value(n - 1, index)));

                for root in 0..ranks {
                    let mut data = own.clone();
                    group.reduce(&mut data, ReduceOp::Sum, root).unwrap();
                    assert!(
                        data == if root == group.rank() { &sums } else { &own }.clone(),
                        "reduce {count} {root}"
                    );
                    let mut data = own.clone();
                    group.broadcast(&mut data, root).unwrap();
                    assert!(
                        data.iter().enumerate().all(|(index, item)| *item == value(i64::from(root), index))
                    );
                }

                let mut gathered = vec![0i64; count * ranks as usize];
                group.all_gather(&own, &mut gathered).unwrap();
                let at = |position: usize| value((position / count.max(1)) as i64, position % count.max(1));
                assert!(
                    gathered.iter().enumerate().all(|(position, item)| *item == at(position)),
                    "all_gather {count}"
                );

                let mut part = vec![0i64; count];
                let whole: Vec<i64> = (0..count * ranks as usize).map(|index| value(rank, index)).collect();
                group.reduce_scatter(&whole, &mut part, ReduceOp::Sum).unwrap();
                let first = count * group.rank() as usize;
                assert!(
                    part.iter().enumerate().all(|(index, item)| *item == sum(first + index)),
                    "reduce_scatter"
                );

                if ranks > 1 {
                    let (next, previous) = ((group.rank() + 1) % ranks, (group.rank() + ranks - 1) % ranks);
                    let send = group.start(Operation::send(own.clone(), next)).unwrap();
                    let mut received = vec![0i64; count];
                    group.recv(&mut received, previous).unwrap();
                    assert!(
                        received.iter().enumerate().all(|(i, item)| *item == value(i64::from(previous), i))
                    );
                    assert_eq!(send.wait().unwrap(), own);
                }
                group.barrier().unwrap();
            }
            group.close().unwrap();
        });
    }
}

fn averages_and_half_floats_are_the_same_on_all_ranks(fabric: Fabric) {
    use half::{bf16, f16};
    let results = with_group(fabric, 3, |group| {
        let rank = group.rank() as f32;
        let mut wide: Vec<f32> = (0..10_000).map(|index| rank * 0.37 + index as f32 * 0.001).collect();
        let mut half: Vec<f16> = wide.iter().map(|value| f16::from_f32(*value)).collect();
        let mut brain: Vec<bf16> = wide.iter().map(|value| bf16::from_f32(*value)).collect();
        group.all_reduce(&mut wide, ReduceOp::Avg).unwrap();
        group.all_reduce(&mut half, ReduceOp::Avg).unwrap();
        group.all_reduce(&mut brain, ReduceOp::Avg).unwrap();
        (wide, half, brain)
    });
    let (wide, half, brain) = &results[0];
    assert!((wide[5000] - (5.0 + 0.37)).abs() < 1e-4, "{}", wide[5000]);
    assert!((half[5000].to_f32() - 5.37).abs() < 1e-2 && (brain[5000].to_f32() - 5.37).abs() < 1e-1);
    for other in &results[1..] {
        assert!(other.0.iter().zip(wide).all(|(a, b)| a.to_bits() == b.to_bits()));
        assert!(other.1.iter().zip(half).all(|(a, b)| a.to_bits() == b.to_bits()));
        assert!(other.2.iter().zip(brain).all(|(a, b)| a.to_bits() == b.to_bits()));
    }
}

fn several_operations_can_be_under_way(fabric: Fabric) {
    with_group(fabric, 2, |group| {
        let rank = group.rank() as f32;
        let pending: Vec<_> = (0..20)
            .map(|number| {
                let mut buffer = group.buffer::<f32>(1000 * (number + 1)).unwrap();
                buffer.fill(rank + number as f32);
                group.start(Operation::all_reduce(buffer, ReduceOp::Sum)).unwrap()
            })
            .collect();
        for (number, pending) in pending.into_iter().enumerate().rev() {
            let buffer = pending.wait().unwrap();
            assert!(buffer.iter().all(|value| *value == 1.0 + 2.0 * number as f32));
        }
        let mut polled = group.start(Operation::all_reduce(vec![rank], ReduceOp::Sum)).unwrap();
        while !polled.test() {
            thread::yield_now();
        }
        assert_eq!(polled.wait().unwrap(), [1.0]);
    });
}

fn threads_share_a_group(fabric: Fabric) {
    ranks::with_group(fabric, 2, several_threads, |group| {
        let peer = 1 - group.rank();
        thread::scope(|scope| {
            let other = group.clone();
            let receiver = scope.spawn(move || {
                let mut data = [0u8; 64];
                for round in 0..100u8 {
                    other.recv(&mut data, peer).unwrap();
                    assert_eq!(data, [round; 64]);
                }
            });
            for round in 0..100u8 {
                group.send(&[round; 64], peer).unwrap();
            }
            receiver.join().unwrap();
        });
    });
}

fn several_threads(options: &mut Options) {
    options.concurrent_calls = true;
}

/// Both ranks first receive; what they wait for another thread sends after this time, unless the
/// group has failed.
fn two_receives(group: &Group, sends_after: Duration) -> Result<(), CollectiveError> {
    let peer = 1 - group.rank();
    thread::scope(|scope| {
        let (other, (done, is_done)) = (group.clone(), mpsc::channel());
        let receiver = scope.spawn(move || {
            let result = other.recv(&mut [0u8; 64], peer);
            done.send(result.is_err()).unwrap();
            result
        });
        let has_failed = is_done.recv_timeout(sends_after) == Ok(true);
        let sent = if has_failed { Ok(()) } else { group.send(&[1u8; 64], peer) };
        sent.and(receiver.join().unwrap())
    })
}

fn receives_that_wait_for_each_other_are_a_mismatch_unless_threads_share_the_group(fabric: Fabric) {
    for error in with_group(fabric, 2, |group| two_receives(&group, PATIENCE).unwrap_err()) {
        assert_eq!(fault(&error).kind, FaultKind::Mismatch, "{error}");
        assert!(error.to_string().contains("concurrent_calls"), "{error}");
    }
    ranks::with_group(fabric, 2, several_threads, |group| two_receives(&group, DEADLOCK_AFTER * 10).unwrap());
}

fn fault(error: &CollectiveError) -> &pleach_collectives::engine::Fault {
    match error {
        CollectiveError::Failed(fault) => fault,
        other => panic!("{other}"),
    }
}

fn a_rank_that_does_not_come_is_named_at_the_deadline(fabric: Fabric) {
    let (done, wait) = mpsc::channel::<()>();
    let wait = std::sync::Mutex::new(wait);
    let both = Meeting::new(2);
    with_group(fabric, 3, |group| {
        if group.rank() == 2 {
            wait.lock().unwrap().recv_timeout(PATIENCE).unwrap();
            return;
        }
        let mut data = vec![1.0f32; 1000];
        let limit = Duration::from_secs(3);
        // Both callers wait for the same time, so that neither is late for the other.
        both.wait();
        let begun = clock::now();
        let error = group.within(limit).all_reduce(&mut data, ReduceOp::Sum).unwrap_err();
        let waited = clock::now().since(begun);
        assert_eq!((fault(&error).kind, fault(&error).subject), (FaultKind::TimedOut, 2), "{error}");
        assert!(
            error.to_string().contains("rank 2") && error.to_string().contains("all-reduce of 1000 f32"),
            "{error}"
        );
        // Whoever is told by the other one may have come later.
        let is_first = fault(&error).found_by == group.rank();
        assert!(!is_first || waited >= limit / 2, "{waited:?}");
        assert!(waited < PATIENCE / 2, "{waited:?}");
        let again = group.barrier().unwrap_err();
        assert_eq!(fault(&again), fault(&error), "the group refuses further work with the first cause");
        if group.rank() == 0 {
            done.send(()).unwrap();
        }
    });
}

fn a_rank_that_waited_in_an_earlier_call_is_not_taken_to_wait_still(fabric: Fabric) {
    let (done, wait) = mpsc::channel::<()>();
    let wait = std::sync::Mutex::new(wait);
    with_group(fabric, 3, |group| {
        let mut data = vec![1.0f32; 300_000];
        let ring = group.with_variant(Algorithm::Ring);
        if group.rank() == 2 {
            // Late enough to be asked what it is doing; then the others go on in many steps.
            let (_nobody, nothing) = mpsc::channel::<()>();
            nothing.recv_timeout(Duration::from_millis(30)).unwrap_err();
        }
        ring.all_reduce(&mut data, ReduceOp::Sum).unwrap();
        if group.rank() > 0 {
            let wait = wait.lock().unwrap();
            wait.recv_timeout(PATIENCE).unwrap();
            return;
        }
        let error = group.within(Duration::from_secs(2)).recv(&mut data, 1).unwrap_err();
        assert_eq!((fault(&error).kind, fault(&error).subject), (FaultKind::TimedOut, 1), "{error}");
        assert!(error.to_string().contains("for rank 1: it has not made this call yet (a wait"), "{error}");
        for _ in 0..2 {
            done.send(()).unwrap();
        }
    });
}

fn different_calls_are_an_error_that_names_both(fabric: Fabric) {
    type Body = fn(&Group) -> Result<(), CollectiveError>;
    let cases: [(&str, Body, &str, Body); 7] = [
        (
            "of 4 f32",
            |group| group.all_reduce(&mut [0f32; 4], ReduceOp::Sum),
            "of 8 f32",
            |group| group.all_reduce(&mut [0f32; 8], ReduceOp::Sum),
        ),
        (
            "f32",
            |group| group.all_reduce(&mut [0f32; 4], ReduceOp::Sum),
            "i32",
            |group| group.all_reduce(&mut [0i32; 4], ReduceOp::Sum),
        ),
        (
            "sum",
            |group| group.all_reduce(&mut [0f32; 4], ReduceOp::Sum),
            "max",
            |group| group.all_reduce(&mut [0f32; 4], ReduceOp::Max),
        ),
        (
            "all-reduce",
            |group| group.all_reduce(&mut vec![0f32; 100_000], ReduceOp::Sum),
            "barrier",
            Group::barrier,
        ),
        (
            "of 0 f32",
            |group| group.all_reduce(&mut [0f32; 0], ReduceOp::Sum),
            "of 1 f32",
            |group| group.all_reduce(&mut [0f32; 1], ReduceOp::Sum),
        ),
        (
            "all-gather",
            |group| group.all_gather(&[0f32; 4], &mut [0f32; 8]),
            "reduce-scatter",
            |group| group.reduce_scatter(&[0f32; 8], &mut [0f32; 4], ReduceOp::Sum),
        ),
        (
            "tag 1",
            |group| group.tagged(1).all_reduce(&mut [0f32; 4], ReduceOp::Sum),
            "tag 2",
            |group| group.tagged(2).all_reduce(&mut [0f32; 4], ReduceOp::Sum),
        ),
    ];
    for (first_name, first, second_name, second) in cases {
        with_group(fabric, 2, |group| {
            group.all_reduce(&mut [1u8], ReduceOp::Sum).unwrap();
            let begun = clock::now();
            let error = if group.rank() == 0 { first(&group) } else { second(&group) }.unwrap_err();
            let text = error.to_string();
            assert_eq!(fault(&error).kind, FaultKind::Mismatch, "{text}");
            assert!(text.contains(first_name) && text.contains(second_name), "{text}");
            assert!(clock::now().since(begun) < PATIENCE / 2, "long before the deadline");
        });
    }
}

fn a_different_root_is_found_at_the_latest_in_the_next_call(fabric: Fabric) {
    with_group(fabric, 3, |group| {
        // All have joined: who had not would be told by its join. Whom the others overtake is told
        // here, and again below.
        let _ = group.barrier();
        let mut data = [group.rank() as f32; 2];
        let root = if group.rank() == 1 { 1 } else { 0 };
        let first = group.broadcast(&mut data, root);
        let error = first.and_then(|()| group.barrier()).unwrap_err();
        assert_eq!(fault(&error).kind, FaultKind::Mismatch, "{error}");
        assert!(error.to_string().contains("root 0") && error.to_string().contains("root 1"), "{error}");
    });
}

fn abort_ends_a_blocked_call_at_once_everywhere(fabric: Fabric) {
    let (done, wait) = mpsc::channel::<()>();
    let wait = std::sync::Mutex::new(wait);
    with_group(fabric, 3, |group| {
        if group.rank() == 2 {
            // In no call until the others are through: else nobody would be blocked.
            let wait = wait.lock().unwrap();
            (0..2).for_each(|_| wait.recv_timeout(PATIENCE).unwrap());
        }
        let begun = clock::now();
        if group.rank() == 0 {
            let other = group.clone();
            let error = thread::scope(|scope| {
                scope.spawn(move || {
                    // Let the call block first; should it not have by then, it fails all the same.
                    let (_keep, never) = mpsc::channel::<()>();
                    never.recv_timeout(Duration::from_millis(100)).unwrap_err();
                    other.abort();
                });
                group.barrier().unwrap_err()
            });
            assert_eq!((fault(&error).kind, fault(&error).subject), (FaultKind::Aborted, 0), "{error}");
        } else {
            let error = group.barrier().unwrap_err();
            assert_eq!((fault(&error).kind, fault(&error).subject), (FaultKind::Aborted, 0), "{error}");
        }
        assert!(clock::now().since(begun) < PATIENCE / 2, "long before the deadline");
        done.send(()).unwrap();
    });
}

fn a_rank_that_leaves_early_is_named(fabric: Fabric) {
    with_group(fabric, 2, |group| {
        if group.rank() == 1 {
            drop(group);
            return;
        }
        let error = group.all_reduce(&mut [1f32; 10], ReduceOp::Sum).unwrap_err();
        assert_eq!((fault(&error).kind, fault(&error).subject), (FaultKind::Left, 1), "{error}");
    });
}

fn wrong_arguments_are_errors_that_harm_nobody(fabric: Fabric) {
    with_group(fabric, 2, |group| {
        let mut data = [1f32; 4];
        let wrong = group.all_gather(&data, &mut [0f32; 7]);
        assert!(matches!(wrong, Err(CollectiveError::Length { expected: 8, actual: 7, .. })));
        assert!(matches!(
            group.broadcast(&mut data, 2),
            Err(CollectiveError::NoSuchRank { rank: 2, world_size: 2 })
        ));
        // Whole pages of this would be more than there are addresses.
        assert!(matches!(group.buffer::<f64>(usize::MAX), Err(CollectiveError::Memory { .. })));
        let own = group.rank();
        assert!(matches!(group.send(&data, own), Err(CollectiveError::Own { .. })));
        group.all_reduce(&mut data, ReduceOp::Sum).unwrap();
        assert_eq!(data, [2.0; 4]);
        let clone = group.clone();
        group.close().unwrap();
        assert!(matches!(clone.barrier(), Err(CollectiveError::Closed)));
    });
}

macro_rules! on {
    ($fabric:expr, $module:ident: $($test:ident),* $(,)?) => {
        mod $module {
            $(
                #[test]
                fn $test() {
                    super::$test($fabric);
                }
            )*
        }
    };
}

macro_rules! on_every_fabric {
    ($($test:ident),* $(,)?) => {
        on!(pleach_transport::rendezvous::Fabric::Shm, shm: $($test),*);
        on!(pleach_transport::rendezvous::Fabric::Tcp, tcp: $($test),*);
        on!(pleach_transport::rendezvous::Fabric::Hybrid, hybrid: $($test),*);
    };
}

on_every_fabric!(
    every_operation_gives_the_right_result,
    blocks_go_where_they_belong,
    a_rank_s_own_block_may_lie_at_its_place,
    blocks_under_way_give_their_memory_back,
    blocks_of_a_wrong_length_are_refused,
    uneven_blocks_go_where_they_belong,
    ranks_that_expect_another_count_are_told_both,
    counts_that_do_not_fit_are_refused,
    a_different_length_of_blocks_is_a_mismatch,
    averages_and_half_floats_are_the_same_on_all_ranks,
    several_operations_can_be_under_way,
    threads_share_a_group,
    receives_that_wait_for_each_other_are_a_mismatch_unless_threads_share_the_group,
    a_rank_that_does_not_come_is_named_at_the_deadline,
    a_rank_that_waited_in_an_earlier_call_is_not_taken_to_wait_still,
    different_calls_are_an_error_that_names_both,
    a_different_root_is_found_at_the_latest_in_the_next_call,
    abort_ends_a_blocked_call_at_once_everywhere,
    a_rank_that_leaves_early_is_named,
    wrong_arguments_are_errors_that_harm_nobody,
);

/// With this arrangement of ranks on hosts, whatever is possible is taken.
fn on_hosts<T: Send>(hosts: &[u32], body: impl Fn(Group) -> T + Sync) -> Vec<T> {
    let change = |options: &mut Options| {
        options.fabric = FabricChoice::Auto;
        options.world.host = Some(format!("host-{}", hosts[options.world.rank as usize]));
    };
    ranks::with_group(Fabric::Hybrid, hosts.len() as u32, change, body)
}

#[test]
fn groups_find_out_which_ranks_are_neighbours_and_take_what_joins_them() {
    for (hosts, fabric, map) in [
        (&[0, 0, 0][..], Fabric::Shm, "1x3"),
        (&[0, 1, 2], Fabric::Tcp, "1x3"),
        (&[0, 0, 1, 1], Fabric::Hybrid, "2x2"),
        (&[5, 2, 5], Fabric::Hybrid, "0,1,0"),
    ] {
        let found = on_hosts(hosts, |group| (group.info().fabric, group.info().hosts.to_string()));
        assert!(found.iter().all(|found| *found == (Some(fabric), map.to_owned())), "{hosts:?}: {found:?}");
    }
}

#[test]
fn hierarchical_schedules_give_the_right_result_on_hosts_of_any_sizes() {
    use pleach_schedule::Algorithm;
    for hosts in [&[0, 0, 1, 1][..], &[0, 1, 0, 1, 0], &[0, 0, 0, 1], &[0, 1, 1, 2]] {
        let ranks = hosts.len();
        on_hosts(hosts, |group| {
            let own = group.rank() as usize;
            let named = group.with_variant(Algorithm::Hierarchical(None));
            for count in [1, 7, 5_000, 300_000] {
                let value = |rank: usize, index: usize| (rank * 1000 + index % 97) as i64;
                let sum = |index| (0..ranks).map(|rank| value(rank, index)).sum::<i64>();
                let all = |data: &[i64], expected: &dyn Fn(usize) -> i64, what: &str| {
                    let wrong = (0..data.len()).find(|&index| data[index] != expected(index));
                    assert_eq!(wrong, None, "{what} of {count} on {hosts:?}, rank {own}");
                };
                let mine = || (0..count).map(|index| value(own, index)).collect::<Vec<_>>();
                let mut registered = group.buffer(count).unwrap();
                registered.copy_from_slice(&mine());
                named.all_reduce(&mut registered, ReduceOp::Sum).unwrap();
                all(&registered, &sum, "all-reduce of a buffer");
                let mut private = mine();
                named.all_reduce(&mut private, ReduceOp::Sum).unwrap();
                all(&private, &sum, "all-reduce of a slice");
                // What the planner takes.
                private.copy_from_slice(&mine());
                group.all_reduce(&mut private, ReduceOp::Sum).unwrap();
                all(&private, &sum, "all-reduce by the best way");
                let root = count % ranks;
                private.copy_from_slice(&mine());
                named.reduce(&mut private, ReduceOp::Sum, root as Rank).unwrap();
                if own == root {
                    all(&private, &sum, "reduce");
                }
                private.copy_from_slice(&mine());
                named.broadcast(&mut private, root as Rank).unwrap();
                all(&private, &|index| value(root, index), "broadcast");
                let mut gathered = vec![0; count * ranks];
                named.all_gather(&mine(), &mut gathered).unwrap();
                all(&gathered, &|index| value(index / count, index % count), "all-gather");
                let long: Vec<i64> = (0..count * ranks).map(|index| value(own, index)).collect();
                let mut part = group.buffer(count).unwrap();
                named.reduce_scatter(&long, &mut part, ReduceOp::Sum).unwrap();
                all(&part, &|index| sum(own * count + index), "reduce-scatter");
                named.barrier().unwrap();
            }
            group.close().unwrap();
        });
    }
}

#[test]
fn each_rank_has_a_line_along_each_dimension_of_a_grid() {
    with_group(Fabric::Shm, 6, |group| {
        let rank = group.rank();
        let (row, column) = (rank / 3, rank % 3);
        let grid = RankSpace::new(&[2, 3], 6).unwrap();
        for (dimension, expected) in [(0, vec![column, column + 3]), (1, (3 * row..3 * row + 3).collect())] {
            let line = group.line(&grid, dimension).unwrap();
            assert_eq!(ranks_of(&line, rank), expected, "rank {rank} along dimension {dimension}");
        }
        for (grid, dimension) in [(RankSpace::balanced(7, 2), 0), (grid, 2)] {
            let error = group.line(&grid, dimension).unwrap_err().to_string();
            assert!(error.contains("make the grid for 6 ranks"), "{error}");
        }
    });
}

/// The ranks that take part in a collective of a line, by their numbers in the group.
fn ranks_of(line: &Group, rank: u32) -> Vec<u32> {
    let mut ranks = vec![0; line.world_size() as usize];
    line.all_gather(&[rank], &mut ranks).unwrap();
    ranks
}

#[test]
fn no_operation_along_a_grid_with_holes_has_more_ranks_than_the_root() {
    for (ranks, dimensions, most) in [(5, 2, 3), (7, 2, 3), (7, 3, 2)] {
        with_group(Fabric::Shm, ranks, |group| {
            let (rank, grid) = (group.rank(), RankSpace::balanced(ranks, dimensions));
            for dimension in 0..dimensions as usize {
                let line = group.line(&grid, dimension).unwrap();
                let members = ranks_of(&line, rank);
                assert!(members.len() <= most, "{members:?}");
                assert!(grid.line(rank, dimension).eq(members.iter().copied()), "{members:?}");
                let mut sum = [rank];
                line.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
                assert_eq!(sum[0], members.iter().sum::<u32>());
            }
        });
    }
    // Holes may be anywhere: the processes on the seats 0, 2, 3, 4, 5 and 8 of a square.
    let grid = RankSpace::of_seats(&[3, 3], vec![0, 2, 3, 4, 5, 8]).unwrap();
    with_group(Fabric::Shm, 6, |group| {
        let rank = group.rank();
        let [column, row] = [0, 1].map(|dimension| ranks_of(&group.line(&grid, dimension).unwrap(), rank));
        let rows = [[0, 1].as_slice(), &[0, 1], &[2, 3, 4], &[2, 3, 4], &[2, 3, 4], &[5]];
        let columns = [[0, 2].as_slice(), &[1, 4, 5], &[0, 2], &[3], &[1, 4, 5], &[1, 4, 5]];
        assert_eq!((&row[..], &column[..]), (rows[rank as usize], columns[rank as usize]));
    });
}

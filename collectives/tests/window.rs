//! Windows on real fabrics, by threads that are ranks.

mod ranks;

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use pleach_collectives::{
    CollectiveError, Element, Group, Options, Progress, Rank, Window, WindowError, Word,
};
use pleach_transport::clock;
use pleach_transport::rendezvous::Fabric;

/// Longest wait for a write that is on its way.
const PATIENCE: Duration = Duration::from_secs(60);

fn with_group<T: Send>(fabric: Fabric, ranks: u32, body: impl Fn(Group) -> T + Sync) -> Vec<T> {
    ranks::with_group(fabric, ranks, |_| {}, body)
}

/// A rank that computes.
#[expect(clippy::disallowed_methods, reason = "a rank that computes")]
fn compute_for(time: Duration) {
    std::thread::sleep(time);
}

/// This number where processors move memory, and a smaller one over devices that may be software.
fn some(fabric: Fabric, number: usize, over_rdma: usize) -> usize {
    if fabric == Fabric::Verbs { over_rdma } else { number }
}

/// What a rank publishes as a version.
fn value(rank: Rank, version: u64, index: usize) -> u64 {
    if version == 0 { 0 } else { u64::from(rank + 1) << 48 | version << 24 | index as u64 }
}

fn values(rank: Rank, version: u64, range: std::ops::Range<usize>) -> Vec<u64> {
    range.map(|index| value(rank, version, index)).collect()
}

/// Polls until `count` writes were seen.
fn wait_for<T: Element>(window: &mut Window<T>, count: usize, mut seen: impl FnMut(Rank, u16, Word, &[T])) {
    let mut left = count;
    while left > 0 {
        let came = window
            .wait(PATIENCE, |arrival| seen(arrival.from, arrival.slot, arrival.word, arrival.data()))
            .expect("the group works");
        assert!(came > 0 && came <= left, "{came} writes of {left}");
        left -= came;
    }
}

fn what_a_rank_publishes_is_what_all_ranks_read(fabric: Fabric) {
    for (ranks, len) in [(1, 3), (2, 0), (2, 1), (3, 1000), (4, some(fabric, 700_001, 40_001))] {
        with_group(fabric, ranks, |group| {
            let mut window = group.window::<u64>(len, 0).expect("all ask for the same");
            let rank = group.rank();
            assert_eq!((window.len(), window.is_empty(), window.slots()), (len, len == 0, 0));
            for version in 0..4 {
                if version > 0 {
                    let word = Word::new(&[version as u8; 48]).expect("48 bytes");
                    assert_eq!(window.publish(&values(rank, version, 0..len), word).unwrap(), version);
                }
                group.barrier().unwrap();
                for peer in 0..ranks {
                    for range in [0..len, len / 3..len - len / 4, len..len] {
                        let mut into = vec![9; range.len()];
                        let (read, word) = window.read(peer, range.clone(), &mut into).unwrap();
                        assert_eq!(read, version, "{fabric}: rank {rank} of {ranks} reads rank {peer}");
                        assert_eq!(word.as_bytes(), &[version as u8; 48]);
                        assert!(into == values(peer, version, range), "{fabric}: {version} of {peer}");
                    }
                }
                group.barrier().unwrap();
            }
            window.close().unwrap();
        });
    }
}

fn a_read_holds_one_version_while_the_owner_publishes(fabric: Fabric) {
    let len = |len| some(fabric, len, len.min(1000));
    for len in [1, len(50_000)] {
        let is_over = AtomicU32::new(0);
        let seen = with_group(fabric, 3, |group| {
            let mut window = group.window::<u64>(len, 0).unwrap();
            let mut versions = Vec::new();
            if group.rank() == 0 {
                let mut version = 0;
                // Relaxed: the number alone counts.
                while is_over.load(Ordering::Relaxed) < 2 {
                    version += 1;
                    window.publish(&vec![version; len], Word::from(version)).unwrap();
                    // Long enough for a read between every other two.
                    compute_for(Duration::from_micros(some(fabric, 50, 50_000) as u64));
                }
                versions.push(version);
            } else {
                let mut into = vec![0; len];
                let mut newest = 0;
                for _ in 0..some(fabric, 200, 10) {
                    let (version, word) = window.read(0, 0..len, &mut into).unwrap();
                    assert!(version >= newest, "{fabric}: version {version} after {newest}");
                    newest = version;
                    assert_eq!(word.number(), version);
                    assert!(into.iter().all(|element| *element == version), "{fabric}: of {version}");
                    versions.push(version);
                }
                is_over.fetch_add(1, Ordering::Relaxed);
            }
            window.close().unwrap();
            versions
        });
        for read in &seen[1..] {
            assert!(read.last() <= seen[0].last(), "{fabric}: {read:?}");
        }
    }
}

fn a_torn_read_takes_what_is_there(fabric: Fabric) {
    with_group(fabric, 2, |group| {
        let mut window = group.window::<u64>(1000, 0).unwrap();
        window.publish(&vec![7; 1000], Word::EMPTY).unwrap();
        group.barrier().unwrap();
        let mut into = [0; 10];
        let version = window.read_torn(1 - group.rank(), 5..15, &mut into).unwrap();
        assert_eq!((version, into), (1, [7; 10]));
        window.close().unwrap();
    });
}

fn a_started_read_owns_its_memory_and_gives_it_back(fabric: Fabric) {
    with_group(fabric, 2, |group| {
        let (len, peer) = (some(fabric, 300_000, 40_000), 1 - group.rank());
        let mut window = group.window::<u64>(len, 0).unwrap();
        window.publish(&values(group.rank(), 1, 0..len), Word::from(5)).unwrap();
        group.barrier().unwrap();
        let mut pending = Vec::new();
        for part in 0..8 {
            let range = part * 100..part * 100 + len / 2;
            pending.push((range.clone(), window.start_read(peer, range, vec![0; len / 2]).unwrap()));
        }
        let error = window.start_read(peer, 0..1, vec![3]).expect_err("nine are too many");
        assert!(matches!(error.error, CollectiveError::TooMany) && error.data == [3], "{error}");
        for (range, mut pending) in pending {
            while !pending.test() {
                std::thread::yield_now();
            }
            let (version, word, into) = pending.wait().unwrap();
            assert_eq!((version, word.number()), (1, 5));
            assert!(into == values(peer, 1, range));
        }
        // What is not waited for ends, and what is forgotten harms nobody.
        drop(window.start_read(peer, 0..len, vec![0; len]).unwrap());
        std::mem::forget(window.start_read(peer, 0..len, vec![0; len]).unwrap());
        let mut into = vec![0; len];
        window.read(peer, 0..len, &mut into).unwrap();
        assert!(into == values(peer, 1, 0..len));
        window.close().unwrap();
    });
}

fn every_write_is_polled_once_and_in_the_order_of_its_writer(fabric: Fabric) {
    for (ranks, slots, len) in [(2, 1, 1), (3, 4, 1000), (4, 2, 0), (2, 3, some(fabric, 40_000, 4000))] {
        with_group(fabric, ranks, |group| {
            let rank = group.rank();
            let mut window = group.window::<u64>(len, slots).unwrap();
            let writes = some(fabric, 40, 10) as u64;
            let mut next = vec![0; ranks as usize];
            let mut seen = |from: Rank, slot: u16, word: Word, data: &[u64]| {
                let number = next[from as usize];
                assert_eq!(word.number(), number, "{fabric}: of rank {from}");
                assert_eq!(u64::from(slot), number * 7 / 3 % u64::from(slots));
                let count = number as usize % (len + 1);
                assert!(data == values(from, number + 1, 0..count), "{fabric}: write {number}");
                next[from as usize] += 1;
            };
            for number in 0..writes {
                for peer in (0..ranks).filter(|peer| *peer != rank) {
                    let slot = (number * 7 / 3 % u64::from(slots)) as u16;
                    while !window.is_free(peer, slot).unwrap() {
                        let seen = &mut seen;
                        window.poll(|it| seen(it.from, it.slot, it.word, it.data())).unwrap();
                    }
                    let elements = values(rank, number + 1, 0..number as usize % (len + 1));
                    window.write(peer, slot, &elements, Word::from(number)).unwrap();
                }
            }
            while next.iter().sum::<u64>() < writes * u64::from(ranks - 1) {
                let mut seen = |from: Rank, slot: u16, word: Word, data: &[u64]| {
                    let number = next[from as usize];
                    assert_eq!((word.number(), u64::from(slot)), (number, number * 7 / 3 % u64::from(slots)));
                    assert!(data == values(from, number + 1, 0..number as usize % (len + 1)));
                    next[from as usize] += 1;
                };
                let came = window.wait(PATIENCE, |it| seen(it.from, it.slot, it.word, it.data())).unwrap();
                assert!(came > 0, "{fabric}: writes are missing");
            }
            group.barrier().unwrap();
            assert_eq!(window.poll(|_| ()).unwrap(), 0, "each was seen once");
            window.close().unwrap();
        });
    }
}

fn a_write_waits_for_the_credit_of_its_slot_alone(fabric: Fabric) {
    let has_polled = AtomicBool::new(false);
    with_group(fabric, 2, |group| {
        let mut window = group.window::<f32>(10, 2).unwrap();
        if group.rank() == 0 {
            window.write(1, 0, &[1.0; 10], Word::from(0)).unwrap();
            assert!(!window.is_free(1, 0).unwrap() && window.is_free(1, 1).unwrap());
            window.write(1, 1, &[2.0; 10], Word::from(1)).unwrap();
            group.barrier().unwrap();
            window.write(1, 0, &[3.0; 10], Word::from(2)).unwrap();
            // Acquire: pairs with the release of rank 1.
            assert!(has_polled.load(Ordering::Acquire), "{fabric}: before its credit");
            group.barrier().unwrap();
        } else {
            group.barrier().unwrap();
            compute_for(Duration::from_millis(30));
            has_polled.store(true, Ordering::Release);
            let mut sum = Vec::new();
            wait_for(&mut window, 3, |from, slot, word, data| {
                assert_eq!((from, data.len()), (0, 10));
                sum.push((slot, word.number(), data[9]));
            });
            assert_eq!(sum, [(0, 0, 1.0), (1, 1, 2.0), (0, 2, 3.0)], "{fabric}");
            group.barrier().unwrap();
        }
        window.close().unwrap();
    });
}

fn a_wait_for_a_write_ends_with_it_or_at_its_limit(fabric: Fabric) {
    with_group(fabric, 2, |group| {
        let mut window = group.window::<u8>(1, 1).unwrap();
        if group.rank() == 0 {
            let begun = clock::now();
            assert_eq!(window.wait(Duration::from_millis(20), |_| ()).unwrap(), 0);
            assert!(clock::now().since(begun) >= Duration::from_millis(20));
            group.barrier().unwrap();
            wait_for(&mut window, 1, |_, _, word, data| {
                assert_eq!((word, data), (Word::EMPTY, &[5][..]));
            });
        } else {
            group.barrier().unwrap();
            compute_for(Duration::from_millis(150));
            window.write(0, 0, &[5], Word::EMPTY).unwrap();
        }
        window.close().unwrap();
    });
}

fn a_wait_for_a_write_or_a_departure_ends_with_each_departure_once(fabric: Fabric) {
    with_group(fabric, 2, |group| {
        let mut window = group.window::<u8>(1, 1).unwrap();
        if group.rank() == 0 {
            assert!(!window.has_left(1));
            let begun = clock::now();
            assert_eq!(window.wait_or_departure(window.timeout(), |_| ()).unwrap(), 0);
            assert!(window.has_left(1) && clock::now().since(begun) < window.timeout() / 2);
            let begun = clock::now();
            assert_eq!(window.wait_or_departure(Duration::from_millis(20), |_| ()).unwrap(), 0);
            assert!(clock::now().since(begun) >= Duration::from_millis(20), "it was told before");
        } else {
            compute_for(Duration::from_millis(50));
        }
        drop(window);
        group.barrier().unwrap();
    });
}

#[test]
fn ranks_that_ask_for_different_windows_are_told_both() {
    let errors = with_group(Fabric::Shm, 3, |group| {
        let slots = if group.rank() == 1 { 2 } else { 1 };
        let error = group.window::<f32>(5, slots).err().expect("they differ").to_string();
        let of_type = if group.rank() == 2 {
            group.window::<f32>(5, 1).map(drop)
        } else {
            group.window::<i32>(6, 1).map(drop)
        };
        let of_type = of_type.expect_err("they differ").to_string();
        // The group works as before.
        group.barrier().unwrap();
        (error, of_type)
    });
    for (error, of_type) in errors {
        for text in ["5 f32 with 1 slots", "5 f32 with 2 slots", "ask for the same on all"] {
            assert!(error.contains(text), "{error}");
        }
        for text in ["5 f32 with 1 slots", "6 i32 with 1 slots"] {
            assert!(of_type.contains(text), "{of_type}");
        }
    }
}

#[test]
fn what_a_window_has_not_is_refused_and_hurts_nobody() {
    with_group(Fabric::Shm, 2, |group| {
        let mut window = group.window::<f32>(5, 1).unwrap();
        let (rank, peer) = (group.rank(), 1 - group.rank());
        let mut into = [0.0; 3];
        let errors = [
            window.read(peer, 3..6, &mut into).map(drop),
            window.read(peer, 0..2, &mut into).map(drop),
            window.read(2, 0..3, &mut into).map(drop),
            window.publish(&[1.0; 4], Word::EMPTY).map(drop),
            window.write(peer, 1, &[1.0], Word::EMPTY),
            window.write(peer, 0, &[1.0; 6], Word::EMPTY),
            window.write(rank, 0, &[1.0], Word::EMPTY),
            window.write(2, 0, &[1.0], Word::EMPTY),
        ];
        let texts = errors.map(|result| result.expect_err("it makes no sense").to_string());
        assert_eq!(
            texts,
            [
                "elements 3..6 do not lie inside a window of 5",
                "what a read fills has 3 elements, not 2",
                "rank 2 is not in this group of 2 (ranks are 0 to 1)",
                "what is published has 4 elements, not 5",
                "a window of 1 slots has no slot 1; they are numbered from 0",
                "elements 0..6 do not lie inside a window of 5",
                &format!("rank {rank} cannot send to or receive from itself"),
                "rank 2 is not in this group of 2 (ranks are 0 to 1)",
            ]
        );
        #[expect(clippy::reversed_empty_ranges, reason = "a caller's mistake")]
        let reversed = window.read(peer, 3..1, &mut []).expect_err("it makes no sense");
        assert!(matches!(reversed, CollectiveError::OutsideWindow { start: 3, end: 1, len: 5 }));
        window.write(peer, 0, &[4.0], Word::EMPTY).unwrap();
        wait_for(&mut window, 1, |_, _, _, data| assert_eq!(data, [4.0]));
        window.close().unwrap();
        let error = group.window::<f32>(5, u16::MAX).err().expect("no such many signal slots");
        assert!(matches!(error, WindowError::TooManySlots { slots: u16::MAX, .. }), "{error}");
        let error = group.window::<f32>(usize::MAX, 1).err().expect("no such much memory");
        assert!(matches!(error, WindowError::TooLong { len: usize::MAX, .. }), "{error}");
        group.barrier().unwrap();
    });
}

fn without_a_thread_there_is_a_window_where_nobody_has_to_poll(fabric: Fabric) {
    let called = |options: &mut Options| options.progress = Progress::WhenCalled;
    ranks::with_group(fabric, 2, called, |group| {
        let (rank, peer) = (group.rank(), 1 - group.rank());
        let made = group.window::<u64>(3, 1);
        if fabric != Fabric::Shm {
            let error = made.err().expect("nobody would answer");
            assert!(matches!(error, WindowError::NoThread), "{error}");
            return group.barrier().unwrap();
        }
        let mut window = made.unwrap();
        window.publish(&values(rank, 1, 0..3), Word::EMPTY).unwrap();
        group.barrier().unwrap();
        let pending = window.start_read(peer, 0..3, vec![0; 3]).unwrap();
        let (_, _, into) = pending.wait().unwrap();
        assert_eq!(into, values(peer, 1, 0..3));
        window.write(peer, 0, &into, Word::EMPTY).unwrap();
        wait_for(&mut window, 1, |_, _, _, data| assert_eq!(data, values(rank, 1, 0..3)));
        window.close().unwrap();
    });
}

fn a_rank_that_leaves_is_named_by_those_that_read_and_those_that_write(fabric: Fabric) {
    let errors = with_group(fabric, 3, |group| {
        let mut window = group.window::<u64>(100, 1).unwrap();
        // All have it.
        group.barrier().unwrap();
        if group.rank() == 2 {
            return None;
        }
        let mut into = vec![0; 100];
        Some(loop {
            let result = if group.rank() == 0 {
                window.read(2, 0..100, &mut into).map(drop)
            } else {
                window.write(2, 0, &into, Word::EMPTY)
            };
            if let Err(error) = result {
                let again = window.publish(&into, Word::EMPTY).expect_err("it stays so").to_string();
                assert_eq!(error.to_string(), again);
                break error.to_string();
            }
        })
    });
    for error in errors.iter().flatten() {
        assert!(error.contains("rank 2 has closed the group"), "{fabric}: {error}");
    }
    assert_eq!(errors[0], errors[1], "{fabric}");
}

fn a_rank_that_does_not_poll_is_named_when_the_time_is_up(fabric: Fabric) {
    let short = |options: &mut Options| options.timeout = Duration::from_secs(4);
    let errors = ranks::with_group(fabric, 3, short, |group| {
        let mut window = group.window::<u64>(1, 1).unwrap();
        let error = if group.rank() == 0 {
            window.write(2, 0, &[1], Word::EMPTY).unwrap();
            window.write(2, 0, &[2], Word::EMPTY).expect_err("it is never polled")
        } else {
            // What takes no write, until it is told.
            let deadline = clock::now() + PATIENCE;
            loop {
                if let Err(error) = window.publish(&[7][..], Word::EMPTY) {
                    break error;
                }
                assert!(clock::now() < deadline, "the group has failed");
                compute_for(Duration::from_millis(5));
            }
        };
        error.to_string()
    });
    for error in &errors {
        assert!(
            error.contains("for rank 2: the credit of slot 0 of a window, which it has not polled"),
            "{fabric}: {error}"
        );
        assert_eq!(*error, errors[0]);
    }
}

fn a_write_whose_reader_panics_frees_its_slot(fabric: Fabric) {
    with_group(fabric, 2, |group| {
        let mut window = group.window::<u64>(1, 1).unwrap();
        for round in 0..3 {
            if group.rank() == 0 {
                window.write(1, 0, &[round], Word::EMPTY).unwrap();
                continue;
            }
            let seen = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                window.wait(PATIENCE, |_| std::panic::resume_unwind(Box::new("of the test")))
            }));
            assert!(seen.is_err(), "it has panicked");
        }
        group.barrier().unwrap();
    });
}

#[test]
fn windows_and_their_group_do_not_disturb_each_other() {
    with_group(Fabric::Tcp, 2, |group| {
        let (rank, peer) = (group.rank(), 1 - group.rank());
        let mut windows = [group.window::<u64>(2, 1).unwrap(), group.window::<u64>(3, 1).unwrap()];
        for (window, version) in windows.iter_mut().zip(1..) {
            let len = window.len();
            window.publish(&values(rank, version, 0..len), Word::EMPTY).unwrap();
            window.write(peer, 0, &[version], Word::EMPTY).unwrap();
        }
        let mut sum = vec![1.0f32; 1000];
        group.all_reduce(&mut sum, pleach_collectives::ReduceOp::Sum).unwrap();
        let [first, second] = &mut windows;
        wait_for(second, 1, |_, _, _, data| assert_eq!(data, [2]));
        wait_for(first, 1, |_, _, _, data| assert_eq!(data, [1]));
        for (window, version) in windows.into_iter().zip(1..) {
            let mut window = window;
            let mut into = vec![0; window.len()];
            window.read(peer, 0..into.len(), &mut into).unwrap();
            assert_eq!(into, values(peer, version, 0..into.len()));
            window.close().unwrap();
        }
        group.barrier().unwrap();
    });
}

/// Each of these functions as a test on each fabric.
macro_rules! on_every_fabric {
    ($($test:ident),* $(,)?) => {
        mod shm {
            $(#[test] fn $test() { super::$test(super::Fabric::Shm); })*
        }
        mod tcp {
            $(#[test] fn $test() { super::$test(super::Fabric::Tcp); })*
        }
        /// Ranks of even and of odd numbers are on different hosts.
        mod hybrid {
            $(#[test] fn $test() { super::$test(super::Fabric::Hybrid); })*
        }
        mod verbs {
            $(#[test]
            #[ignore = "needs RDMA devices: where there are some, run it with --ignored verbs::"]
            fn $test() { super::$test(super::Fabric::Verbs); })*
        }
    };
}

on_every_fabric!(
    what_a_rank_publishes_is_what_all_ranks_read,
    a_read_holds_one_version_while_the_owner_publishes,
    a_torn_read_takes_what_is_there,
    a_started_read_owns_its_memory_and_gives_it_back,
    every_write_is_polled_once_and_in_the_order_of_its_writer,
    a_write_waits_for_the_credit_of_its_slot_alone,
    a_wait_for_a_write_ends_with_it_or_at_its_limit,
    a_wait_for_a_write_or_a_departure_ends_with_each_departure_once,
    without_a_thread_there_is_a_window_where_nobody_has_to_poll,
    a_rank_that_leaves_is_named_by_those_that_read_and_those_that_write,
    a_rank_that_does_not_poll_is_named_when_the_time_is_up,
    a_write_whose_reader_panics_frees_its_slot,
);

//! The order beside brute force.

use std::collections::HashSet;

use proptest::prelude::*;

use super::sequence::{by_ready, lateness};
use super::*;

/// The least lateness of all sequences that begin with these jobs.
fn brute_force(jobs: &[Job], sequence: &mut Vec<u32>, best: &mut i64) {
    if sequence.len() == jobs.len() {
        *best = lateness(jobs, sequence).min(*best);
    }
    for job in 0..jobs.len() as u32 {
        if !sequence.contains(&job) {
            sequence.push(job);
            brute_force(jobs, sequence, best);
            sequence.pop();
        }
    }
}

fn jobs(most: usize) -> impl Strategy<Value = Vec<Job>> {
    let job = (0..40_i64, 0..60_i64, 1..25_i64).prop_map(|(ready, due, time)| Job { ready, due, time });
    prop::collection::vec(job, 1..=most)
}

fn expect_optimal(jobs: &[Job]) -> Result<(), TestCaseError> {
    let mut least = i64::MAX;
    brute_force(jobs, &mut Vec::new(), &mut least);
    let sequence = planned(jobs);
    let mut sorted = sequence.clone();
    sorted.sort_unstable();
    prop_assert_eq!(sorted, (0..jobs.len() as u32).collect::<Vec<_>>());
    let found = lateness(jobs, &sequence);
    // Below 0 nothing waits, and the search ends early.
    prop_assert_eq!(found.max(0), least.max(0));
    prop_assert!(found <= lateness(jobs, &by_ready(jobs)));
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4_000))]
    #[test]
    fn few_pieces_are_in_the_order_that_brute_force_finds(jobs in jobs(6)) {
        expect_optimal(&jobs)?;
    }

    #[test]
    fn many_pieces_are_late_by_at_most_the_longest_piece_beyond_the_bound_and_never_more_than_fifo(
        jobs in jobs(200),
    ) {
        let found = lateness(&jobs, &planned(&jobs));
        let longest = jobs.iter().map(|job| job.time).max().expect("there are jobs");
        prop_assert!(found.max(0) <= (preemptive(&jobs) + longest).max(0), "{found}");
        prop_assert!(found <= lateness(&jobs, &by_ready(&jobs)));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]
    #[test]
    fn eight_pieces_are_in_the_order_that_brute_force_finds(jobs in jobs(8)) {
        expect_optimal(&jobs)?;
    }
}

/// The lateness if each unit of time goes to the job that is ready and due first.
fn preemptive(jobs: &[Job]) -> i64 {
    let mut left: Vec<i64> = jobs.iter().map(|job| job.time).collect();
    let (mut now, mut worst) = (0, i64::MIN);
    while left.iter().any(|&left| left > 0) {
        let open = (0..jobs.len()).filter(|&job| left[job] > 0 && jobs[job].ready <= now);
        let next = open.min_by_key(|&job| jobs[job].due);
        now += 1;
        let Some(next) = next else { continue };
        left[next] -= 1;
        if left[next] == 0 {
            worst = worst.max(now - jobs[next].due);
        }
    }
    worst
}

#[test]
fn a_piece_that_is_about_to_come_may_be_waited_for() {
    // Without idle time the long job would delay the short one by 9.
    let jobs = [Job { ready: 0, due: 100, time: 10 }, Job { ready: 1, due: 2, time: 1 }];
    let sequence = planned(&jobs);
    assert_eq!((sequence.as_slice(), lateness(&jobs, &sequence)), (&[1, 0][..], 0));
}

const GIGABYTE: Link = Link { bytes_per_s: 1_000_000_000, piece_ns: 0 };

/// Layers of a backward pass: the last is ready first, and the first is needed first.
fn layers(count: u64, bytes: u64) -> Vec<Bucket> {
    let layer = |number: u64| Bucket {
        ready_ns: (count - 1 - number) * 1_000,
        needed_ns: (count + number) * 1_000,
        bytes,
    };
    (0..count).map(layer).collect()
}

#[test]
fn every_byte_is_exchanged_once_and_first_layers_go_first_where_that_helps() {
    let buckets = layers(8, 2_500);
    let order = Order::planned(&buckets, GIGABYTE, 1_000).expect("a profile");
    let fifo = Order::fifo(&buckets, GIGABYTE, 1_000).expect("a profile");
    for order in [&order, &fifo] {
        let mut next = vec![0; buckets.len()];
        let mut pieces: Vec<_> = order.pieces().iter().collect();
        pieces.sort_by_key(|piece| (piece.bucket, piece.range.start));
        for piece in pieces {
            assert_eq!(piece.range.start, next[piece.bucket]);
            assert!(piece.range.end - piece.range.start <= 1_000);
            next[piece.bucket] = piece.range.end;
        }
        assert!(next.iter().zip(&buckets).all(|(end, bucket)| *end == bucket.bytes));
        let late =
            order.done_ns().iter().zip(&buckets).map(|(done, bucket)| done.saturating_sub(bucket.needed_ns));
        assert_eq!(late.max(), Some(order.delay_ns()));
        assert_eq!(delay_ns(&buckets, GIGABYTE, order.pieces().to_vec()), order.delay_ns());
    }
    assert!(order.delay_ns() < fifo.delay_ns(), "{} {}", order.delay_ns(), fifo.delay_ns());
    // The same profile gives the same list, and the same hash.
    let again = Order::planned(&buckets, GIGABYTE, 1_000).expect("a profile");
    assert_eq!(HashSet::from([order.clone(), again]).len(), 1);
    // A link that is quick enough needs no plan.
    let quick = Link { bytes_per_s: 100_000_000_000, piece_ns: 0 };
    assert_eq!(Order::planned(&buckets, quick, 1_000), Order::fifo(&buckets, quick, 1_000));
}

#[test]
fn messages_cost_time_for_each_piece() {
    let link = Link { bytes_per_s: 1_000_000_000, piece_ns: 500 };
    let bucket = Bucket { ready_ns: 100, needed_ns: 200, bytes: 2_001 };
    let order = Order::planned(&[bucket], link, 1_000).expect("a profile");
    assert_eq!((order.pieces().len(), order.done_ns(), order.delay_ns()), (3, &[3_601][..], 3_401));
}

#[test]
fn empty_profiles_and_buckets_have_no_pieces() {
    let nothing = Order::planned(&[], GIGABYTE, 1).expect("nothing");
    assert_eq!((nothing.pieces().len(), nothing.delay_ns()), (0, 0));
    let bucket = Bucket { ready_ns: 5, needed_ns: 0, bytes: 0 };
    let order = Order::planned(&[bucket], GIGABYTE, 1).expect("no bytes");
    assert_eq!((order.pieces().len(), order.delay_ns(), order.done_ns()), (0, 0, &[0][..]));
}

#[test]
fn profiles_that_cannot_be_are_refused_with_what_to_do() {
    let bucket = Bucket { ready_ns: 0, needed_ns: 0, bytes: 1 << 40 };
    let refused = |bucket, link, piece| Order::planned(&[bucket], link, piece).expect_err("bad").to_string();
    assert!(refused(bucket, GIGABYTE, 0).contains("give the largest number of bytes of a piece"));
    assert!(refused(bucket, Link { bytes_per_s: 0, ..GIGABYTE }, 1 << 30).contains("measure the link"));
    assert!(refused(bucket, GIGABYTE, 1 << 10).contains("1073741824 pieces, at most 1048576"));
    assert!(refused(bucket, Link { bytes_per_s: 1, ..GIGABYTE }, 1 << 30).starts_with("bucket 0 has a time"));
    let late = Bucket { ready_ns: u64::MAX, ..bucket };
    assert!(refused(late, GIGABYTE, 1 << 30).starts_with("bucket 0 has a time"));
    let huge = Bucket { bytes: u64::MAX, ..bucket };
    assert!(refused(huge, GIGABYTE, u64::MAX).starts_with("bucket 0 has a time"));
    let most = [huge, huge];
    assert!(matches!(Order::planned(&most, GIGABYTE, 1), Err(OrderError::TooMany { pieces: u64::MAX })));
}

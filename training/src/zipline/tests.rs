//! ZipLine beside brute force and the authors' own matrices.

use pleach_transport::clock;
use proptest::prelude::*;

use super::*;

/// The predictions of the authors' generator: 1,000 workers, and 10.
fn authors() -> [Vec<Prediction>; 2] {
    let text = include_str!("../../tests/data/elasticbsp.txt");
    let mut all = Vec::new();
    for line in text.lines().skip(3) {
        if line.starts_with('#') {
            all.push(Vec::new());
            continue;
        }
        let workers = line.split(' ').map(|worker| {
            let (next, interval) = worker.split_once('+').expect("two numbers");
            let number = |text: &str| text.parse().expect("a number");
            Prediction { next: number(next), interval: number(interval) }
        });
        all.last_mut().expect("a heading comes first").extend(workers);
    }
    all.try_into().expect("two sets")
}

#[test]
fn the_matrices_of_the_authors_have_the_ranges_that_the_authors_found() {
    let [thousand, ten] = authors();
    assert_eq!((thousand.len(), ten.len()), (1_000, 10));
    let range = |workers: &[Prediction], lookahead| {
        let barrier = place(workers, 0, lookahead, Objective::Range).expect("a barrier");
        (barrier.range(), barrier.compared)
    };
    // The authors' list of this matrix has 13,795 ranges; that of the smallest is 1403 ms.
    assert_eq!(range(&thousand, 15), (1_403, 13_795));
    assert_eq!([20, 150, 1_000].map(|lookahead| range(&thousand, lookahead).0), [1_400, 1_382, 1_371]);
    assert_eq!(range(&ten, 150).0, 698);
}

fn workers(most: usize) -> impl Strategy<Value = Vec<Prediction>> {
    let worker =
        (0..40_u64, 8..24_u64).prop_map(|(next, interval)| Prediction { next: 100 + next, interval });
    prop::collection::vec(worker, 1..=most)
}

/// Each choice of one push a worker: its latest and earliest push and the waiting.
fn each_selection(workers: &[Prediction], lookahead: u32, mut look: impl FnMut(u64, u64, u64)) {
    let mut chosen = vec![0; workers.len()];
    loop {
        let times =
            || workers.iter().zip(&chosen).map(|(worker, &push)| worker.next + push * worker.interval);
        let (begin, end) = (times().min().expect("a worker"), times().max().expect("a worker"));
        look(begin, end, times().map(|time| end - time).sum());
        let Some(next) = chosen.iter().position(|&push| push + 1 < u64::from(lookahead)) else { return };
        chosen[next] += 1;
        chosen[..next].fill(0);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(10_000))]
    #[test]
    fn the_barrier_is_that_of_brute_force(workers in workers(4), lookahead in 3..5_u32, now in 0..100_u64) {
        let range = place(&workers, now, lookahead, Objective::Range).expect("a barrier");
        let share = place(&workers, now, lookahead, Objective::Share).expect("a barrier");
        let (mut least_range, mut least_share) = (u64::MAX, (u64::MAX, 1));
        each_selection(&workers, lookahead, |begin, end, waiting| {
            least_range = least_range.min(end - begin);
            // Crosswise, as fractions.
            if u128::from(waiting) * u128::from(least_share.1) < u128::from(least_share.0) * u128::from(end - now) {
                least_share = (waiting, end - now);
            }
        });
        prop_assert_eq!(range.range(), least_range);
        prop_assert_eq!(share.waiting * u128::from(least_share.1), u128::from(least_share.0) * u128::from(share.at - now));
        for barrier in [range, share] {
            prop_assert!(barrier.iterations.iter().all(|&iterations| (1..=lookahead).contains(&iterations)));
            let push = |(worker, &count): (&Prediction, &u32)| worker.next + u64::from(count - 1) * worker.interval;
            let pushes: Vec<u64> = workers.iter().zip(&barrier.iterations).map(push).collect();
            prop_assert_eq!(pushes.iter().min(), Some(&barrier.first));
            prop_assert_eq!(pushes.iter().max(), Some(&barrier.at));
            let waiting: u64 = pushes.iter().map(|push| barrier.at - push).sum();
            prop_assert_eq!(barrier.waiting, u128::from(waiting));
        }
    }
}

#[test]
fn a_lookahead_of_one_is_a_barrier_after_each_iteration() {
    let workers = [Prediction { next: 10, interval: 10 }, Prediction { next: 95, interval: 95 }];
    for objective in [Objective::Range, Objective::Share] {
        let barrier = place(&workers, 0, 1, objective).expect("a barrier");
        assert_eq!((barrier.iterations, barrier.at, barrier.compared), (vec![1, 1], 95, 1));
    }
}

#[test]
fn of_many_workers_that_begin_together_the_range_is_least_at_once_and_the_share_later() {
    let worker = |number: u64| 1_000 + number * 500 / 15;
    let workers: Vec<Prediction> =
        (0..16).map(worker).map(|interval| Prediction { next: interval, interval }).collect();
    let barrier = |objective| place(&workers, 0, 15, objective).expect("a barrier");
    let (range, share) = (barrier(Objective::Range), barrier(Objective::Share));
    assert_eq!(range.iterations, [1; 16]);
    assert!(share.iterations.iter().all(|&iterations| iterations > 5), "{share:?}");
    // A quarter of the share, crosswise.
    assert!(4 * share.waiting * u128::from(range.at) < range.waiting * u128::from(share.at));
}

#[test]
fn a_lookahead_that_does_not_reach_is_refused_with_the_least_that_does() {
    let workers = [Prediction { next: 10, interval: 10 }, Prediction { next: 95, interval: 95 }];
    assert_eq!(
        place(&workers, 0, 9, Objective::Share),
        Err(ZipLineError::ShortLookahead { lookahead: 9, least: 10 })
    );
    let error = place(&workers, 0, 9, Objective::Share).expect_err("short").to_string();
    assert!(error.ends_with("give at least 10"), "{error}");
    assert!(place(&workers, 0, 10, Objective::Share).is_ok());
}

#[test]
fn predictions_that_cannot_be_are_refused() {
    let good = Prediction { next: 10, interval: 10 };
    let refused = |workers: &[Prediction], now, lookahead| {
        place(workers, now, lookahead, Objective::Share).expect_err("bad")
    };
    assert_eq!(refused(&[], 0, 1), ZipLineError::Workers { workers: 0 });
    assert_eq!(refused(&[good], 0, 0), ZipLineError::NoLookahead);
    assert_eq!(
        refused(&[good, Prediction { interval: 0, ..good }], 0, 1),
        ZipLineError::Prediction { worker: 1 }
    );
    assert_eq!(refused(&[good], 11, 1), ZipLineError::Prediction { worker: 0 });
    let late = Prediction { next: u64::MAX, ..good };
    assert_eq!(refused(&[late], 0, 1), ZipLineError::TooLate { worker: 0 });
    assert!(place(&[late], u64::MAX - 5, 2, Objective::Share).is_ok_and(|barrier| barrier.at == u64::MAX));
    assert!(place(&[late], u64::MAX, 1, Objective::Share).is_ok());
    let slow = Prediction { interval: TIME_MAX, ..good };
    assert_eq!(refused(&[slow], 0, u32::MAX), ZipLineError::TooLate { worker: 0 });
}

#[test]
fn intervals_are_predicted_by_their_mean_or_the_last_one() {
    let mut intervals = Intervals::default();
    assert_eq!((intervals.predicted(Predictor::Mean), intervals.predicted(Predictor::Last)), (None, None));
    for interval in [10, 20, 60] {
        intervals.add(interval);
    }
    assert_eq!(
        (intervals.predicted(Predictor::Mean), intervals.predicted(Predictor::Last)),
        (Some(30), Some(60))
    );
    let mut quick = Intervals::default();
    quick.add(0);
    assert_eq!((quick.predicted(Predictor::Mean), quick.predicted(Predictor::Last)), (Some(1), Some(1)));
}

/// Run by hand, on an idle machine: `cargo test --release -p pleach-training -- --ignored zipline`.
#[test]
#[ignore = "measures times: run it alone, from a release build"]
fn a_thousand_workers_take_milliseconds() {
    let [thousand, _] = authors();
    let tenfold: Vec<Prediction> = (0..10_u64)
        .flat_map(|copy| {
            thousand.iter().map(move |worker| Prediction { next: worker.next + 7 * copy, ..*worker })
        })
        .collect();
    for (workers, most_ms) in [(&thousand, 10.0), (&tenfold, 150.0)] {
        for objective in [Objective::Range, Objective::Share] {
            let once = || {
                let began = clock::now();
                std::hint::black_box(place(workers, 0, 150, objective).expect("a barrier"));
                (clock::now() - began).as_secs_f64() * 1e3
            };
            let mut times: Vec<f64> = (0..9).map(|_| once()).collect();
            times.sort_by(f64::total_cmp);
            println!("{} workers, R = 150, {objective:?}: {:.2} ms", workers.len(), times[4]);
            assert!(times[4] < most_ms, "{times:?}");
        }
    }
}

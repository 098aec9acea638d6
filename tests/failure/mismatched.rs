//! Ranks that make different calls are told so, with both calls, and no rank gets a wrong number.

use std::time::Duration;

use pleach::transport::Nanos;
use pleach::transport::clock::now;
use pleach::transport::rendezvous::Fabric;

use crate::on_every_fabric;
use crate::ranks::{Failure, Outcome, Ranks, allowed, report};

/// From when the last rank has entered its call until every call that fails has returned. The ranks
/// themselves take a tenth of it: the simulator, in which nothing else runs, holds each seed to
/// 100 ms (`MISMATCH_NOTICED_WITHIN`, `ABORT_NOTICED_WITHIN`). Here other work may keep a rank from
/// running in each of the tries, so a limit that is to say something about the ranks leaves room.
const FOUND_WITHIN: Duration = Duration::from_secs(1);

/// Tries, the fastest of which is held to [`FOUND_WITHIN`].
const TRIES: usize = 5;

/// Calls that three ranks make at the same time, and words of every error about them.
pub(crate) struct Case {
    pub(crate) calls: [&'static str; 3],
    pub(crate) words: [&'static str; 2],
}

const CASES: &[Case] = &[
    Case { calls: ["all-reduce", "all-reduce", "barrier"], words: ["all-reduce of 4 f32", "barrier"] },
    Case {
        calls: ["all-reduce count=5", "all-reduce", "all-reduce"],
        words: ["all-reduce of 5 f32", "all-reduce of 4 f32"],
    },
    Case {
        calls: ["all-reduce count=3000000", "all-reduce count=3000001", "all-reduce count=3000000"],
        words: ["3000000 f32", "3000001 f32"],
    },
    Case { calls: ["all-reduce", "all-reduce type=i32", "all-reduce"], words: ["4 f32", "4 i32"] },
    Case { calls: ["all-reduce", "all-reduce op=max", "all-reduce"], words: ["(sum)", "(max)"] },
    Case { calls: ["broadcast root=0", "broadcast root=0", "broadcast root=1"], words: ["root 0", "root 1"] },
    Case { calls: ["reduce root=1", "reduce root=2", "reduce root=1"], words: ["root 1", "root 2"] },
    Case { calls: ["broadcast root=2", "broadcast root=2", "reduce root=2"], words: ["broadcast", "reduce"] },
    Case { calls: ["all-gather", "all-gather count=1", "all-gather"], words: ["of 4 f32", "of 1 f32"] },
];

/// Repeats an experiment until one try is in time, and reports what each took. The experiment
/// returns how long the ranks did not know.
pub(crate) fn in_time(what: &str, fabric: Fabric, experiment: impl Fn() -> Duration) {
    let within = allowed(fabric, FOUND_WITHIN);
    let tries: Vec<Duration> = (0..TRIES)
        .map(|_| {
            let took = experiment();
            report(&format!("{what}, told after"), fabric, took);
            took
        })
        .take_while(|took| *took > within)
        .collect();
    assert!(tries.len() < TRIES, "{what}: not one of {tries:?} within {within:?}");
}

/// Sees what became of calls that differ; those that end well without depending on anybody close.
/// How long it took from when the last rank had entered its call until the last call that failed
/// returned.
fn expect_mismatch(ranks: &mut Ranks, words: [&str; 2]) -> Duration {
    let mut failed = 0;
    let check = |rank: u32, failure: &Failure| {
        assert_eq!(failure.kind, "Mismatch", "rank {rank}: {}", failure.text);
        assert!(words.iter().all(|word| failure.text.contains(word)), "{words:?}: {}", failure.text);
    };
    let mut later = Vec::new();
    let (mut entered, mut returned) = (Nanos::ZERO, Nanos::ZERO);
    for rank in 0..3 {
        let outcome = ranks.outcome(rank);
        entered = entered.max(outcome.entered());
        match outcome {
            Outcome::Done { .. } => later.push(rank),
            Outcome::Failed(failure) => {
                check(rank, &failure);
                returned = returned.max(failure.at);
                failed += 1;
            }
        }
    }
    // Where all of them only gave something, what differs shows when they next meet.
    let nobody_waited = failed == 0;
    if nobody_waited {
        entered = now();
    }
    later.iter().for_each(|rank| ranks.tell(*rank, "close"));
    for rank in later {
        let failure = ranks.failure(rank);
        check(rank, &failure);
        if nobody_waited {
            returned = returned.max(failure.at);
        }
        failed += 1;
    }
    assert_eq!(failed, 3);
    returned.since(entered)
}

/// Makes the calls of each case, and expects an error on every rank that names both calls in time.
pub(crate) fn expect_errors_that_name_both(fabric: Fabric, cases: &[Case]) {
    for case in cases {
        in_time(&case.calls.join(", "), fabric, || {
            let mut ranks = Ranks::join(fabric, 3);
            ranks.tell_all("call barrier");
            (0..3).for_each(|rank| assert!(matches!(ranks.outcome(rank), Outcome::Done { .. })));
            for (rank, call) in case.calls.iter().enumerate() {
                ranks.tell(rank as u32, &format!("call {call}"));
            }
            let took = expect_mismatch(&mut ranks, case.words);
            ranks.end(0..3);
            took
        });
    }
}

fn different_calls_are_an_error_that_names_both(fabric: Fabric) {
    expect_errors_that_name_both(fabric, CASES);
}

fn a_rank_that_makes_one_call_more_is_found_where_the_calls_differ(fabric: Fabric) {
    in_time("one call more", fabric, || {
        let mut ranks = Ranks::join(fabric, 3);
        // Alike but for their number: rank 1 is one behind from the second on.
        for rank in 0..3 {
            let times = if rank == 1 { 4 } else { 3 };
            for _ in 0..times {
                ranks.tell(rank, "call all-reduce");
            }
            ranks.tell(rank, "call barrier");
        }
        for _ in 0..2 {
            (0..3).for_each(|rank| assert!(matches!(ranks.outcome(rank), Outcome::Done { .. })));
        }
        for rank in 0..3 {
            // Who is ahead may have ended the group before this rank's third call was through.
            if let Outcome::Failed(failure) = ranks.outcome(rank) {
                assert_eq!(failure.kind, "Mismatch", "{}", failure.text);
            }
        }
        let took = expect_mismatch(&mut ranks, ["all-reduce", "barrier"]);
        ranks.end(0..3);
        took
    });
}

fn one_call_more_is_found_at_close(fabric: Fabric) {
    in_time("a call before closing", fabric, || {
        let mut ranks = Ranks::join(fabric, 3);
        ranks.tell(2, "call broadcast root=2");
        ranks.tell_all("close");
        if let Outcome::Failed(failure) = ranks.outcome(2) {
            assert_eq!(failure.kind, "Mismatch", "{}", failure.text);
        }
        let took = expect_mismatch(&mut ranks, ["broadcast", "barrier"]);
        ranks.end(0..3);
        took
    });
}

on_every_fabric!(
    different_calls_are_an_error_that_names_both,
    a_rank_that_makes_one_call_more_is_found_where_the_calls_differ,
    one_call_more_is_found_at_close,
);

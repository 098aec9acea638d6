//! A rank that is killed or stopped ends the reads and writes of a window: of all survivors, with
//! one verdict.

use std::time::Duration;

use pleach::transport::clock::now;
use pleach::transport::rendezvous::Fabric;
use rustix::process::Signal;

use crate::on_every_fabric;
use crate::ranks::{PATIENCE, Ranks, allowed, many, report};

/// How long survivors may take to find a killed rank on a machine that is busy with other things.
const FOUND_WITHIN: Duration = Duration::from_secs(10);
/// How long a stopped rank is waited for, and any other one while the window is made.
const DEADLINE: Duration = Duration::from_secs(2);
/// The same over devices that may be software.
const VERBS_DEADLINE: Duration = Duration::from_secs(20);
/// How much later than the deadline a call may return on a machine that is busy with other things.
const TARDINESS: Duration = Duration::from_secs(10);

fn deadline(fabric: Fabric) -> Duration {
    if fabric == Fabric::Verbs { VERBS_DEADLINE } else { DEADLINE }
}

/// Ranks with a window, of which rank 0 and rank 1 are in these calls.
fn with_window(fabric: Fabric, deadline: Duration, calls: [&str; 2]) -> Ranks {
    let mut ranks = Ranks::join(fabric, 3);
    let (elements, within) = (many(fabric, 100_000), deadline.as_millis());
    ranks.tell_all(&format!("window count={elements} within={within}"));
    ranks.expect_all("made");
    for (rank, call) in (0..).zip(calls) {
        ranks.tell(rank, call);
        ranks.expect(rank, "begun");
    }
    ranks
}

/// Sees that both survivors name rank 2, alike, and that nothing of their memory changes later.
fn expect_verdict(mut ranks: Ranks, fabric: Fabric, kind: &str, then: Signal, limit: Duration) {
    let begun = now();
    let failures = [ranks.failure(0), ranks.failure(1)];
    for failure in &failures {
        failure.expect(kind, 2, "");
        let took = failure.at.since(begun);
        report(&format!("a window of which rank 2 is {kind} ends after"), fabric, took);
        assert!(took < allowed(fabric, limit), "{took:?}");
    }
    assert_eq!(failures[0].text, failures[1].text, "survivors say the same");
    ranks.signal(2, then);
    for rank in 0..2 {
        ranks.tell(rank, "check");
        ranks.expect(rank, "unchanged");
    }
    ranks.end([0, 1]);
}

fn a_killed_rank_is_lost_to_those_that_read_and_write(fabric: Fabric) {
    // Longer than anything takes: rank 2 gives no credits.
    let ranks = with_window(fabric, allowed(fabric, PATIENCE), ["read 2", "write 2"]);
    ranks.signal(2, Signal::KILL);
    expect_verdict(ranks, fabric, "Lost", Signal::KILL, FOUND_WITHIN);
}

fn a_stopped_rank_is_named_by_those_that_write(fabric: Fabric) {
    let ranks = with_window(fabric, deadline(fabric), ["write 2", "write 2"]);
    ranks.stop(2);
    expect_verdict(ranks, fabric, "TimedOut", Signal::CONT, DEADLINE + TARDINESS);
}

fn a_stopped_rank_is_read_where_it_need_not_poll_and_named_elsewhere(fabric: Fabric) {
    let ranks = with_window(fabric, deadline(fabric), ["read 2", "read 2"]);
    ranks.stop(2);
    if matches!(fabric, Fabric::Shm | Fabric::Verbs) {
        // Its memory is read for longer than the deadline.
        let until = now() + deadline(fabric) + DEADLINE;
        while now() < until {
            std::thread::yield_now();
        }
        ranks.signal(2, Signal::KILL);
        expect_verdict(ranks, fabric, "Lost", Signal::KILL, FOUND_WITHIN);
    } else {
        expect_verdict(ranks, fabric, "TimedOut", Signal::CONT, DEADLINE + TARDINESS);
    }
}

on_every_fabric!(
    a_killed_rank_is_lost_to_those_that_read_and_write,
    a_stopped_rank_is_named_by_those_that_write,
    a_stopped_rank_is_read_where_it_need_not_poll_and_named_elsewhere,
);

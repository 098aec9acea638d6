//! A rank that is stopped is named at the deadline; when it is continued, nothing of the survivors'
//! memory changes.

use std::time::Duration;

use pleach::transport::clock::now;
use pleach::transport::rendezvous::Fabric;
use rustix::process::Signal;

use crate::on_every_fabric;
use crate::ranks::{Outcome, Ranks, allowed, many, report};

/// The deadline of calls. Calls of ranks that run must keep it too, so it is far longer than they
/// take.
const DEADLINE: Duration = Duration::from_secs(2);

/// How much later than the deadline a call may return on a machine that is busy with other things.
const TARDINESS: Duration = Duration::from_secs(10);

/// A deadline that calls of this kind keep on this machine now.
fn deadline(ranks: &mut Ranks, call: &str) -> Duration {
    ranks.tell_all(&format!("call {call}"));
    let took = (0..3).map(|rank| match ranks.outcome(rank) {
        Outcome::Done { after, .. } => after,
        Outcome::Failed(failure) => panic!("{}", failure.text),
    });
    DEADLINE.max(took.max().unwrap_or_default() * 8)
}

/// Stops rank 2 while all are in the same call; the others time out, reuse their memory, and keep
/// it.
fn stop(fabric: Fabric, call: &str, during: &str) {
    let mut ranks = Ranks::join(fabric, 3);
    let deadline = deadline(&mut ranks, call);
    ranks.tell_all(&format!("keep {call}"));
    ranks.expect_all("kept");
    // Rank 2 waits longer than the others, so that it is they who time out.
    for (rank, within) in [(0, deadline), (1, deadline), (2, deadline * 100)] {
        ranks.tell(rank, &format!("loop {call} within={}", within.as_millis()));
    }
    ranks.expect_all("begun");
    let stopped_at = now();
    ranks.stop(2);
    for rank in 0..2 {
        let failure = ranks.failure(rank);
        failure.expect("TimedOut", 2, during);
        let names_step = ["waited ", " ms for rank 2: ", " step "];
        assert!(names_step.iter().all(|part| failure.text.contains(part)), "{}", failure.text);
        report(&format!("{during}: stopped rank named after"), fabric, failure.at.since(stopped_at));
        assert!(failure.after < deadline + allowed(fabric, TARDINESS), "{:?} of {deadline:?}", failure.after);
        ranks.tell(rank, "fill");
        ranks.expect(rank, "filled");
    }
    ranks.signal(2, Signal::CONT);
    ranks.failure(2).expect("TimedOut", 2, during);
    for rank in 0..2 {
        ranks.tell(rank, "check");
        ranks.expect(rank, "unchanged");
        ranks.tell(rank, "call barrier");
        assert_eq!(ranks.failure(rank).kind, "TimedOut", "the first cause stays");
        ranks.tell(rank, "check");
        ranks.expect(rank, "unchanged");
    }
    ranks.end(0..3);
}

fn a_rank_stopped_in_a_small_all_reduce_is_named_at_the_deadline(fabric: Fabric) {
    stop(fabric, "all-reduce count=2", "all-reduce of 2 f32");
}

fn a_rank_stopped_in_the_middle_of_a_large_all_reduce_changes_nothing_later(fabric: Fabric) {
    let elements = many(fabric, 16_777_216);
    stop(fabric, &format!("all-reduce count={elements}"), &format!("all-reduce of {elements} f32"));
}

fn a_rank_stopped_in_the_middle_of_a_private_all_reduce_changes_nothing_later(fabric: Fabric) {
    let elements = many(fabric, 4_194_304);
    let call = format!("all-reduce count={elements} memory=private");
    stop(fabric, &call, &format!("all-reduce of {elements} f32"));
}

fn a_rank_stopped_outside_of_a_call_is_named_at_the_deadline(fabric: Fabric) {
    let mut ranks = Ranks::join(fabric, 3);
    ranks.stop(2);
    for rank in 0..2 {
        ranks.tell(rank, &format!("call all-reduce count=1000 within={}", DEADLINE.as_millis()));
    }
    let failures = [ranks.failure(0), ranks.failure(1)];
    for failure in &failures {
        failure.expect("TimedOut", 2, "all-reduce of 1000 f32");
        assert!(failure.after < DEADLINE + allowed(fabric, TARDINESS), "{:?}", failure.after);
    }
    ranks.signal(2, Signal::CONT);
    // The call that the others made: another one would be told to differ from theirs. What they
    // gave may be read before the news that they have ended: then this call ends well, and the next
    // does not.
    ranks.tell(2, "call all-reduce count=1000");
    let failure = match ranks.outcome(2) {
        Outcome::Failed(failure) => failure,
        Outcome::Done { .. } => {
            ranks.tell(2, "call all-reduce count=1000");
            ranks.failure(2)
        }
    };
    assert_eq!(failure.text, failures[0].text, "what the others say");
    ranks.end(0..3);
}

on_every_fabric!(
    a_rank_stopped_in_a_small_all_reduce_is_named_at_the_deadline,
    a_rank_stopped_in_the_middle_of_a_large_all_reduce_changes_nothing_later,
    a_rank_stopped_in_the_middle_of_a_private_all_reduce_changes_nothing_later,
    a_rank_stopped_outside_of_a_call_is_named_at_the_deadline,
);

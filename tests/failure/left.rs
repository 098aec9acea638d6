//! Who ends well is no failure for those that do not need it; who ends without closing is lost to
//! those that do. Forks.

use std::time::Duration;

use pleach::transport::clock::now;
use pleach::transport::rendezvous::Fabric;

use crate::on_every_fabric;
use crate::ranks::{Outcome, Ranks, allowed, many, report};

/// It should be some milliseconds; this is for machines that are busy with other things.
const FOUND_WITHIN: Duration = Duration::from_secs(5);

fn expect_done(ranks: &mut Ranks, rank: u32) {
    if let Outcome::Failed(failure) = ranks.outcome(rank) {
        panic!("rank {rank}: {}", failure.text);
    }
}

fn a_rank_that_closes_is_no_failure(fabric: Fabric) {
    let mut ranks = Ranks::join(fabric, 3);
    ranks.tell_all("close");
    (0..3).for_each(|rank| expect_done(&mut ranks, rank));
    ranks.end(0..3);
}

fn a_rank_that_leaves_is_no_failure_to_those_that_do_not_need_it(fabric: Fabric) {
    let mut ranks = Ranks::join(fabric, 3);
    ranks.tell_all("call all-reduce count=1000");
    (0..3).for_each(|rank| expect_done(&mut ranks, rank));
    ranks.tell(2, "drop");
    ranks.expect(2, "dropped");
    ranks.tell(2, "quit");
    assert!(ranks.reap(2).success());
    for round in 0..3 {
        let (from, to) = (round % 2, 1 - round % 2);
        ranks.tell(from, &format!("call send peer={to} count=100000"));
        ranks.tell(to, &format!("call recv peer={from} count=100000"));
        expect_done(&mut ranks, from);
        expect_done(&mut ranks, to);
    }
    ranks.tell(0, "call all-reduce");
    ranks.tell(1, "call all-reduce");
    for rank in 0..2 {
        ranks.failure(rank).expect("Left", 2, "all-reduce of 4 f32");
    }
    ranks.end([0, 1]);
}

/// Rank 2 ends by this command; the others need it.
fn ends_without_closing(fabric: Fabric, command: &str) {
    let mut ranks = Ranks::join(fabric, 3);
    ranks.tell_all("call barrier");
    (0..3).for_each(|rank| expect_done(&mut ranks, rank));
    for rank in 0..2 {
        ranks.tell(rank, "loop all-reduce count=100");
    }
    let told_at = now();
    ranks.tell(2, command);
    for rank in 0..2 {
        let failure = ranks.failure(rank);
        failure.expect("Lost", 2, "all-reduce of 100 f32");
        let took = failure.at.since(told_at);
        report(&format!("a rank that ends by {command} is found after"), fabric, took);
        assert!(took < allowed(fabric, FOUND_WITHIN), "{took:?}");
    }
    ranks.reap(2);
    ranks.end([0, 1]);
}

fn a_rank_that_exits_without_closing_is_lost(fabric: Fabric) {
    ends_without_closing(fabric, "exit");
}

fn a_rank_that_panics_is_lost(fabric: Fabric) {
    ends_without_closing(fabric, "panic");
}

fn a_forked_child_is_refused_and_its_parent_goes_on(fabric: Fabric) {
    let mut ranks = Ranks::join(fabric, 3);
    ranks.tell(0, "fork-using");
    ranks.expect(0, "Ok(0)");
    ranks.tell(1, "call send peer=0 count=3 memory=private");
    expect_done(&mut ranks, 0);
    expect_done(&mut ranks, 1);
    let [more, private] = [1_000_000, 100_000].map(|elements| many(fabric, elements));
    for call in ["count=2", &format!("count={more}"), &format!("count={private} memory=private")] {
        ranks.tell_all(&format!("call all-reduce {call}"));
        (0..3).for_each(|rank| expect_done(&mut ranks, rank));
    }
    ranks.tell_all("close");
    (0..3).for_each(|rank| expect_done(&mut ranks, rank));
    ranks.end(0..3);
}

on_every_fabric!(
    a_rank_that_closes_is_no_failure,
    a_rank_that_leaves_is_no_failure_to_those_that_do_not_need_it,
    a_rank_that_exits_without_closing_is_lost,
    a_rank_that_panics_is_lost,
    a_forked_child_is_refused_and_its_parent_goes_on,
);

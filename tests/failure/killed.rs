//! A rank that is killed is found by every survivor at once, wherever it was, also when forked
//! children of it live on.

use std::time::Duration;

use pleach::transport::clock::now;
use pleach::transport::rendezvous::Fabric;
use rustix::process::{Pid, Signal};

use crate::children::Grandchild;
use crate::on_every_fabric;
use crate::ranks::{Outcome, Ranks, allowed, many, report};

/// How long survivors may take to find a killed rank on a machine that is busy with other things;
/// 212 ms at most were measured on two processors. Their calls would wait for 60 s.
const FOUND_WITHIN: Duration = Duration::from_secs(10);

const SMALL: &str = "all-reduce count=2";

/// A call that takes long, and how it is described.
fn large(fabric: Fabric) -> [String; 2] {
    let elements = many(fabric, 4_194_304);
    [format!("all-reduce count={elements}"), format!("all-reduce of {elements} f32")]
}

/// Kills rank 2 and sees what the others say of the calls that they are in or make now.
fn kill(ranks: &mut Ranks, fabric: Fabric, during: &str, then: &[(u32, &str)]) {
    let killed_at = now();
    ranks.signal(2, Signal::KILL);
    for (rank, call) in then {
        ranks.tell(*rank, call);
    }
    let failures = [ranks.failure(0), ranks.failure(1)];
    for failure in &failures {
        failure.expect("Lost", 2, during);
        let took = failure.at.since(killed_at);
        report(&format!("a rank killed in {during} is found after"), fabric, took);
        assert!(took < allowed(fabric, FOUND_WITHIN), "{took:?}");
    }
    assert_eq!(failures[0].text, failures[1].text, "survivors say the same");
    for (rank, first) in failures.iter().enumerate() {
        for call in ["barrier", "all-reduce memory=private", "recv peer=2"] {
            ranks.tell(rank as u32, &format!("call {call}"));
            let again = ranks.failure(rank as u32);
            assert_eq!(again.text, first.text, "later calls return the first cause");
        }
        ranks.tell(rank as u32, "close");
        assert_eq!(ranks.failure(rank as u32).text, first.text);
    }
}

fn a_rank_killed_inside_a_small_all_reduce_is_lost_to_all(fabric: Fabric) {
    let mut ranks = Ranks::join(fabric, 3);
    ranks.tell_all(&format!("loop {SMALL}"));
    ranks.expect_all("begun");
    kill(&mut ranks, fabric, "all-reduce of 2 f32", &[]);
    ranks.end([0, 1]);
}

fn a_rank_killed_inside_a_large_all_reduce_is_lost_to_all(fabric: Fabric) {
    let [large, during] = large(fabric);
    let mut ranks = Ranks::join(fabric, 3);
    ranks.tell_all(&format!("loop {large}"));
    ranks.expect_all("begun");
    kill(&mut ranks, fabric, &during, &[]);
    ranks.end([0, 1]);
}

fn a_rank_killed_outside_of_a_call_is_lost_to_those_who_wait_for_it(fabric: Fabric) {
    let [large, during] = large(fabric);
    let mut ranks = Ranks::join(fabric, 3);
    for rank in 0..2 {
        ranks.tell(rank, &format!("loop {large}"));
    }
    ranks.tell(2, &format!("call {large} op=max"));
    assert!(matches!(ranks.outcome(2), Outcome::Done { .. }));
    ranks.expect(0, "begun");
    ranks.expect(1, "begun");
    kill(&mut ranks, fabric, &during, &[]);
    ranks.end([0, 1]);
}

fn a_rank_killed_while_all_are_idle_is_named_by_the_next_call(fabric: Fabric) {
    let mut ranks = Ranks::join(fabric, 3);
    ranks.tell_all("call barrier");
    (0..3).for_each(|rank| assert!(matches!(ranks.outcome(rank), Outcome::Done { .. })));
    kill(
        &mut ranks,
        fabric,
        "all-reduce of 2 f32",
        &[(0, "loop all-reduce count=2"), (1, "loop all-reduce count=2")],
    );
    ranks.end([0, 1]);
}

fn a_killed_rank_whose_forked_children_live_on_is_lost_all_the_same(fabric: Fabric) {
    let [large, during] = large(fabric);
    let mut ranks = Ranks::join(fabric, 3);
    ranks.tell(2, "fork-holding");
    let child = ranks.hear(2).parse().ok().and_then(Pid::from_raw).expect("is a process");
    let child = Grandchild(child);
    ranks.tell_all(&format!("loop {large}"));
    ranks.expect_all("begun");
    kill(&mut ranks, fabric, &during, &[]);
    assert!(rustix::process::test_kill_process(child.0).is_ok(), "the child lives on");
    ranks.end([0, 1]);
}

on_every_fabric!(
    a_rank_killed_inside_a_small_all_reduce_is_lost_to_all,
    a_rank_killed_inside_a_large_all_reduce_is_lost_to_all,
    a_rank_killed_outside_of_a_call_is_lost_to_those_who_wait_for_it,
    a_rank_killed_while_all_are_idle_is_named_by_the_next_call,
    a_killed_rank_whose_forked_children_live_on_is_lost_all_the_same,
);

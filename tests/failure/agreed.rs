//! All survivors are told the same, word by word: after several deaths at once, after a stop, and
//! where a link is cut.

use std::time::Duration;

use pleach::transport::clock::now;
use pleach::transport::rendezvous::Fabric;
use rustix::process::{Pid, Signal};

use crate::mismatched::in_time;
use crate::on_every_fabric;
use crate::ranks::{Outcome, Ranks, wait};
use crate::sockets;

const LOOP: &str = "loop all-reduce count=1000";

/// The kind and the text that all of these ranks end with.
pub(crate) fn agreed(ranks: &mut Ranks, survivors: &[u32]) -> (String, String) {
    let failures: Vec<_> = survivors.iter().map(|rank| ranks.failure(*rank)).collect();
    let first = &failures[0];
    for (rank, failure) in survivors.iter().zip(&failures) {
        assert_eq!(failure.text, first.text, "ranks {} and {rank} say different things", survivors[0]);
    }
    (first.kind.clone(), first.text.clone())
}

fn survivors_of_one_two_or_three_deaths_say_the_same(fabric: Fabric) {
    for deaths in 1..=3 {
        let mut ranks = Ranks::join(fabric, 5);
        ranks.tell_all(LOOP);
        ranks.expect_all("begun");
        let first_dead = 5 - deaths;
        (first_dead..5).for_each(|rank| ranks.signal(rank, Signal::KILL));
        let survivors: Vec<u32> = (0..first_dead).collect();
        let (kind, text) = agreed(&mut ranks, &survivors);
        assert_eq!(kind, "Lost", "{text}");
        ranks.end(survivors);
    }
}

/// How long a rank that knows of a death is in no call.
const IDLE_FOR: Duration = Duration::from_millis(200);

fn survivors_that_are_told_in_different_calls_say_the_same(fabric: Fabric) {
    let mut ranks = Ranks::join(fabric, 3);
    ranks.tell_all("call barrier");
    (0..3).for_each(|rank| assert!(matches!(ranks.outcome(rank), Outcome::Done { .. })));
    ranks.signal(2, Signal::KILL);
    ranks.reap(2);
    wait(IDLE_FOR);
    ranks.tell(0, "call recv peer=2 count=100000");
    ranks.tell(1, "call send peer=2 count=100000");
    let (kind, text) = agreed(&mut ranks, &[0, 1]);
    assert!(kind == "Lost" && text.starts_with("rank 2 is lost"), "{text}");
    ranks.end([0, 1]);
}

fn a_rank_that_was_stopped_and_continued_is_told_what_the_others_say(fabric: Fabric) {
    let mut ranks = Ranks::join(fabric, 3);
    for (rank, within) in [(0, 4000), (1, 4000), (2, 600_000)] {
        ranks.tell(rank, &format!("{LOOP} within={within}"));
    }
    ranks.expect_all("begun");
    ranks.stop(2);
    let (kind, text) = agreed(&mut ranks, &[0, 1]);
    assert!(kind == "TimedOut" && text.contains("for rank 2"), "{text}");
    ranks.signal(2, Signal::CONT);
    assert_eq!(ranks.failure(2).text, text, "the rank that was stopped");
    ranks.end(0..3);
}

fn ranks_between_which_a_link_is_cut_and_a_third_one_say_the_same(fabric: Fabric) {
    let mut ranks = Ranks::join(fabric, 3);
    ranks.tell_all(LOOP);
    ranks.expect_all("begun");
    let [one, other] = [0, 1].map(|rank| Pid::from_raw(ranks.id(rank) as i32).expect("is a process"));
    let cut = sockets::cut_between(&[one], &[other]).expect("they may be traced");
    assert!(cut > 0, "there are connections between ranks 0 and 1");
    let (kind, text) = agreed(&mut ranks, &[0, 1, 2]);
    assert_eq!(kind, "Lost", "{text}");
    assert!(text.starts_with("rank 0 is lost") || text.starts_with("rank 1 is lost"), "{text}");
    ranks.end(0..3);
}

fn an_abort_outside_of_a_call_ends_the_calls_of_all_ranks(fabric: Fabric) {
    in_time("an abort outside of a call", fabric, || {
        let mut ranks = Ranks::join(fabric, 3);
        ranks.tell_all("call barrier");
        (0..3).for_each(|rank| assert!(matches!(ranks.outcome(rank), Outcome::Done { .. })));
        ranks.tell(1, "call barrier within=20000");
        ranks.tell(2, "call barrier within=20000");
        wait(Duration::from_millis(50));
        let told_at = now();
        ranks.tell(0, "abort");
        let failures = [1, 2].map(|rank| ranks.failure(rank));
        for failure in &failures {
            assert_eq!((failure.kind.as_str(), failure.subject), ("Aborted", Some(0)), "{}", failure.text);
        }
        ranks.tell(0, "call barrier");
        assert_eq!(ranks.failure(0).kind, "Aborted");
        ranks.end(0..3);
        failures.iter().map(|failure| failure.at.since(told_at)).max().expect("there are two")
    });
}

fn an_abort_from_another_thread_ends_blocked_calls_on_all_ranks(fabric: Fabric) {
    in_time("an abort in a call", fabric, || {
        let mut ranks = Ranks::join(fabric, 3);
        // Ranks 1 and 2 make the same call (a loop takes the maximum), rank 0 another kind, so all
        // are blocked.
        ranks.tell(0, "call recv peer=2");
        ranks.tell(1, "call all-reduce count=1000 op=max");
        ranks.tell(2, "loop all-reduce count=1000");
        let told_at = now();
        ranks.tell(0, "abort");
        let failures = [0, 1, 2].map(|rank| ranks.failure(rank));
        for failure in &failures {
            assert_eq!((failure.kind.as_str(), failure.subject), ("Aborted", Some(0)), "{}", failure.text);
        }
        ranks.end(0..3);
        failures.iter().map(|failure| failure.at.since(told_at)).max().expect("there are three")
    });
}

on_every_fabric!(
    survivors_of_one_two_or_three_deaths_say_the_same,
    survivors_that_are_told_in_different_calls_say_the_same,
    a_rank_that_was_stopped_and_continued_is_told_what_the_others_say,
    ranks_between_which_a_link_is_cut_and_a_third_one_say_the_same,
    an_abort_outside_of_a_call_ends_the_calls_of_all_ranks,
    an_abort_from_another_thread_ends_blocked_calls_on_all_ranks,
);

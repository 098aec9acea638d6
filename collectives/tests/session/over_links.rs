//! Sessions on hosts whose links are cut: hosts are network namespaces with a wire between any two.
//! Nothing says that a wire is cut, so members find out by what they do not hear.

use std::time::Duration;

use super::job::{Job, Told};
use super::links::{Hosts, Wire};
use super::skipped::skip;

/// Without a secret no two hosts meet.
const SECRET: &str = "secret=7";

/// Where hosts meet: rank 0 holds it, unless they have registers in the job's folder.
const PORT: u16 = 29_500;

/// Members on so many hosts of their own. Where they meet at one of them, they make the records
/// themselves, or else (`is_stored`) the store does. Says why there are no such hosts here.
fn job(hosts: usize, size: u32, is_stored: bool, settings: &[&str]) -> Option<Job> {
    let pairs = (0..hosts).flat_map(|one| (0..one).map(move |other| [other, one]));
    let wires: Vec<Wire> = pairs.map(|ends| Wire { ends, megabits_per_s: None }).collect();
    let program = std::env::current_exe().expect("a path");
    let hosts = match Hosts::new(&program, hosts, &wires) {
        Ok(hosts) => hosts,
        Err(reason) => {
            skip(format_args!("no networks here: {reason}"));
            return None;
        }
    };
    let meet = match is_stored {
        true => "meet=folder".to_owned(),
        false => format!("meet=tcp://{}:{PORT}", hosts.address(0)),
    };
    let seats = format!("hosts={}", size as usize / hosts.count());
    let job = Job::start_on(hosts, "tcp", size, &[&[&meet, SECRET, &seats], settings].concat());
    Some(job)
}

/// Both ways between each of these and each of those.
fn all_ways(these: &[usize], those: &[usize]) -> Vec<(usize, usize)> {
    let pairs = these.iter().flat_map(|one| those.iter().map(|other| (*one, *other)));
    pairs.flat_map(|(one, other)| [(one, other), (other, one)]).collect()
}

fn cut(job: &Job, ways: &[(usize, usize)]) {
    ways.iter().for_each(|(from, to)| job.hosts().cut(*from, *to).expect("is there"));
}

fn mend(job: &Job, ways: &[(usize, usize)]) {
    ways.iter().for_each(|(from, to)| job.hosts().mend(*from, *to).expect("was cut"));
}

/// Of the two at the ends of a link that carries nothing, one way or both, the one on the higher
/// seat goes, and hears of it from the third.
fn one_of_two_goes(ways: &[(usize, usize)]) {
    let Some(mut job) = job(3, 3, false, &["suspect=2000", "watch=1"]) else { return };
    job.await_step(0, 5);
    cut(&job, ways);
    job.await_all_of(&[0, 1]);
    job.await_told(2, |told| matches!(told, Told::End(_)));
    job.finish();
    job.check();
    assert_eq!([job.ends(0), job.ends(1), job.ends(2)], [vec![], vec![], vec!["Expelled"]]);
}

#[test]
fn of_two_that_do_not_reach_each_other_one_goes() {
    one_of_two_goes(&all_ways(&[0], &[2]));
}

#[test]
fn of_two_of_which_one_does_not_hear_the_other_one_goes() {
    one_of_two_goes(&[(2, 0)]);
}

/// It is alone, makes no step any more, and says so. When the links are back it may join.
#[test]
fn who_is_cut_off_alone_has_no_quorum_and_the_others_go_on() {
    let settings = ["suspect=2000", "quorum=1500", "state=300000"];
    let Some(mut job) = job(3, 3, false, &settings) else { return };
    job.await_step(0, 5);
    let ways = all_ways(&[0, 1], &[2]);
    cut(&job, &ways);
    job.await_all_of(&[0, 1]);
    job.await_told(2, |told| matches!(told, Told::End(_)));
    mend(&job, &ways);
    let again = job.spawn(2, &[]);
    job.await_told(again, |told| *told == Told::Joined(2));
    job.await_all_of(&[0, 1, again]);
    job.finish();
    job.check();
    assert_eq!([job.ends(0), job.ends(1), job.ends(2)], [vec![], vec![], vec!["NoQuorum"]]);
}

/// Two and two: neither half knows that the other one has ended.
#[test]
fn neither_of_two_halves_goes_on_without_a_store() {
    let Some(mut job) = job(2, 4, false, &["suspect=2000", "quorum=1500"]) else { return };
    job.await_step(0, 5);
    cut(&job, &all_ways(&[0], &[1]));
    for seat in 0..4 {
        job.await_told(seat, |told| matches!(told, Told::End(_)));
    }
    job.finish();
    job.check();
    for seat in 0..4 {
        assert_eq!(job.ends(seat), ["NoQuorum"], "seat {seat}");
    }
}

/// Both halves can write what they agree on in the store, once. The other half is out by it.
#[test]
fn one_of_two_halves_goes_on_with_a_store() {
    let Some(mut job) = job(2, 4, true, &["suspect=2000", "watch=1"]) else { return };
    job.await_step(0, 5);
    cut(&job, &all_ways(&[0], &[1]));
    let out = job.await_one(&[0, 1, 2, 3], |told| matches!(told, Told::End(_)));
    let (stay, go) = if out < 2 { ([2, 3], [0, 1]) } else { ([0, 1], [2, 3]) };
    job.await_all_of(&stay);
    for seat in go {
        job.await_told(seat, |told| matches!(told, Told::End(_)));
    }
    job.finish();
    job.check();
    for (seats, ends) in [(stay, vec![]), (go, vec!["Expelled"])] {
        seats.iter().for_each(|seat| assert_eq!(job.ends(*seat), ends, "seat {seat}"));
    }
}

/// With a store too, who is cut off alone lets the others have it.
#[test]
fn who_is_cut_off_alone_is_out_by_the_record_in_the_store() {
    let Some(mut job) = job(3, 3, true, &["suspect=2000", "watch=1"]) else { return };
    job.await_step(0, 5);
    cut(&job, &all_ways(&[0], &[1, 2]));
    job.await_all_of(&[1, 2]);
    job.await_told(0, |told| matches!(told, Told::End(_)));
    job.finish();
    job.check();
    assert_eq!([job.ends(0), job.ends(1), job.ends(2)], [vec!["Expelled"], vec![], vec![]]);
}

/// Each time for less than a member may be silent: steps wait, and nothing else happens.
#[test]
fn a_link_that_comes_and_goes_costs_no_member_and_no_step() {
    let Some(mut job) = job(3, 3, false, &["suspect=6000"]) else { return };
    let ways = all_ways(&[0], &[2]);
    for turn in 0..6 {
        let so_far = job.committed(0).last().map_or(0, |(step, _)| *step);
        job.await_step(0, so_far + 3);
        cut(&job, &ways[..1 + turn % 2]);
        job.listen(Duration::from_millis(60 * turn as u64));
        mend(&job, &ways[..1 + turn % 2]);
    }
    job.await_further_steps();
    job.finish();
    job.check();
    for seat in 0..3 {
        assert_eq!((job.retries(seat), job.ends(seat)), (0, vec![]), "seat {seat}");
    }
}

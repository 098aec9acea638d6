//! Sessions whose members share memory inside of hosts and take sockets across. Hosts are those of
//! names (`PLEACH_HOST`): two seats in a row have one, unless a member is told another name.

use rustix::process::Signal;

use super::job::{Job, Told, seed};
use super::{Random, go_on_without_seat_2};

const FABRIC: &str = "shm+tcp";

#[test]
fn survivors_of_a_death_go_on_with_what_they_have() {
    go_on_without_seat_2(FABRIC, &["hosts=2"], 20);
}

#[test]
fn processes_of_hosts_with_members_and_of_a_new_one_join() {
    let mut job = Job::start(FABRIC, 3, &["hosts=2", "state=1500000"]);
    job.await_step(0, 5);
    // Beside the last one, then two of a host that has none, then one more of the first.
    for (seat, host) in [(3, "host-1"), (4, "host-2"), (5, "host-2"), (6, "host-0")] {
        let joined = job.spawn(seat, &[&format!("host={host}")]);
        job.await_told(joined, |told| *told == Told::Joined(seat));
        job.await_all_of(&(0..=joined).collect::<Vec<u32>>());
    }
    job.finish();
    job.check();
    for member in 0..7 {
        assert_eq!((job.retries(member), job.ends(member)), (0, vec![]), "member {member}");
        assert_eq!(job.set_up(member).1, 6, "member {member}: connected to each once");
    }
}

/// It is joined by memory, then by sockets, then by memory again.
#[test]
fn a_seat_is_taken_by_processes_of_one_host_after_another() {
    let mut job = Job::start(FABRIC, 4, &["hosts=2"]);
    let mut holder = 1;
    for host in ["host-1", "host-2", "host-0"] {
        job.await_step(holder, 5);
        job.signal(holder, Signal::KILL);
        job.await_all_after(holder, &[0, 2, 3]);
        holder = job.spawn(1, &[&format!("host={host}")]);
        job.await_told(holder, |told| *told == Told::Joined(1));
        job.await_all_of(&[0, 2, 3, holder]);
    }
    job.finish();
    job.check();
    for seat in [0, 2, 3] {
        assert_eq!(job.set_up(seat).1, 6, "seat {seat}: each process was connected to once");
    }
}

/// It gives seats to newcomers, and its successor is of another host than it was.
#[test]
fn the_first_member_dies_and_one_of_another_host_comes_in_its_place() {
    let mut job = Job::start(FABRIC, 3, &["hosts=2"]);
    job.await_step(1, 5);
    job.signal(0, Signal::KILL);
    let again = job.spawn(0, &["host=host-3"]);
    job.await_told(again, |told| *told == Told::Joined(0));
    job.await_all_of(&[1, 2, again]);
    job.finish();
    job.check();
}

#[test]
fn who_is_told_to_leave_costs_the_others_no_retry() {
    let mut job = Job::start(FABRIC, 4, &["hosts=2"]);
    for (seat, rest) in [(1, &[0, 2, 3][..]), (2, &[0, 3])] {
        job.await_step(seat, 10);
        job.tell(seat, Signal::TERM);
        job.await_told(seat, |told| *told == Told::End("Left".to_owned()));
        job.await_all_of(rest);
    }
    // One of another host on the seat of a process that left, and had memory of the others mapped.
    let joined = job.spawn(1, &["host=host-1"]);
    job.await_all_of(&[0, 3, joined]);
    job.finish();
    job.check();
    for seat in 0..4 {
        assert_eq!(job.retries(seat), 0, "seat {seat}");
    }
}

#[test]
fn who_was_stopped_on_the_other_host_is_out_and_changes_nothing() {
    let mut job = Job::start(FABRIC, 4, &["hosts=2", "suspect=500", "watch=1"]);
    for (seat, rest) in [(3, &[0, 1, 2][..]), (1, &[0, 2])] {
        job.await_step(0, 5);
        job.signal(seat, Signal::STOP);
        job.await_all_of(rest);
        job.signal(seat, Signal::CONT);
        job.await_told(seat, |told| *told == Told::End("Expelled".to_owned()));
    }
    job.finish();
    job.check();
}

/// Parts of an epoch's group meet anew, also with a member of a host that had none.
#[test]
fn parts_are_made_anew_after_a_death_and_a_join() {
    let mut job = Job::start(FABRIC, 4, &["hosts=2", "parts=1"]);
    job.await_step(0, 5);
    job.signal(3, Signal::KILL);
    job.await_all_of(&[0, 1, 2]);
    let joined = job.spawn(4, &[]);
    job.await_all_of(&[0, 1, 2, joined]);
    job.finish();
    job.check();
}

/// Members are killed and told to leave at any moment, and others of any host come in their place.
#[test]
fn whoever_ends_and_wherever_others_come_from_no_step_is_lost_or_repeated() {
    let seed = seed();
    let mut random = Random::new(seed);
    let mut job = Job::start(FABRIC, 4, &["hosts=2", "state=300000"]);
    // By seat: the number of its member.
    let mut members = [0, 1, 2, 3];
    job.await_all_of(&members);
    for round in 0..5 {
        let seat = random.below(4);
        let [host, dies] = [3, 2].map(|below| random.below(below));
        let struck = members[seat as usize];
        job.listen(std::time::Duration::from_millis(random.below(60)));
        if dies == 0 {
            job.signal(struck, Signal::KILL);
        } else {
            job.tell(struck, Signal::TERM);
            job.await_told(struck, |told| *told == Told::End("Left".to_owned()));
        }
        let joined = job.spawn(seat as u32, &[&format!("host=host-{host}")]);
        members[seat as usize] = joined;
        job.await_told(joined, |told| matches!(told, Told::Joined(_)));
        job.await_all_of(&members);
        println!("round {round}: seat {seat} is {}", if dies == 0 { "killed" } else { "left" });
    }
    job.finish();
    job.check_or(&format!("PLEACH_TEST_SEED={seed}"));
}

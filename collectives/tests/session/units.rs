//! Members that come and go in units of several seats.

use std::time::Duration;

use rustix::process::Signal;

use super::job::{Job, Told};

mod shm {
    #[test]
    fn a_unit_falls_with_one_of_its_members_and_comes_back_whole() {
        super::a_unit_falls_with_one_of_its_members_and_comes_back_whole("shm");
    }
}

mod tcp {
    #[test]
    fn a_unit_falls_with_one_of_its_members_and_comes_back_whole() {
        super::a_unit_falls_with_one_of_its_members_and_comes_back_whole("tcp");
    }
}

fn a_unit_falls_with_one_of_its_members_and_comes_back_whole(fabric: &str) {
    let mut job = Job::start(fabric, 4, &["unit=2", "fewest=2", "state=4", "audit=1"]);
    job.await_step(0, 5);
    job.signal(2, Signal::KILL);
    job.await_told(3, |told| matches!(told, Told::End(_)));
    job.await_all_of(&[0, 1]);
    let one = job.spawn(2, &[]);
    job.await_further_steps();
    assert!(!job.told(one).iter().any(|told| matches!(told, Told::Joined(_))), "half a unit waits");
    let other = job.spawn(3, &[]);
    job.await_all_of(&[0, 1, one, other]);
    job.finish();
    job.check();
    assert_eq!(job.ends(3), ["Expelled"]);
    assert_eq!(job.retries(one) + job.retries(other), 0, "a planned join");
}

/// The job begins with the unit of ranks 0 and 1, and rank 2 waits for rank 3.
#[test]
fn ranks_begin_in_whole_units() {
    let mut job = Job::start_without("shm", 4, &[1, 3], &["unit=2", "fewest=2", "state=4", "begin=200"]);
    let third = 1; // The second process of those that have come.
    job.listen(Duration::from_millis(600));
    assert!([0, third].iter().all(|rank| job.told(*rank).is_empty()), "no unit is whole");
    let second = job.spawn(1, &[]);
    job.await_all_of(&[0, second]);
    assert!(job.told(third).is_empty(), "its unit is not whole");
    let fourth = job.spawn(3, &[]);
    job.await_all_of(&[0, second, third, fourth]);
    job.finish();
}

#[test]
fn where_no_unit_is_whole_members_say_so() {
    let mut job = Job::start("shm", 4, &["unit=2", "fewest=2", "state=4", "quorum=500"]);
    job.await_step(0, 5);
    for seat in [1, 2] {
        job.signal(seat, Signal::KILL);
    }
    for seat in [0, 3] {
        job.await_told(seat, |told| matches!(told, Told::End(_)));
        assert_eq!(job.ends(seat), ["UnitsLost"], "seat {seat}");
    }
    job.finish();
    job.check();
}

#[test]
fn limits_that_are_no_multiples_of_the_unit_are_refused() {
    let mut job = Job::start("shm", 1, &["unit=2", "fewest=1"]);
    job.await_told(0, |told| matches!(told, Told::End(_)));
    assert_eq!(job.ends(0), ["Unsupported"]);
    job.finish();
}

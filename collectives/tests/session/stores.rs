//! Sessions whose records lie in a store: a folder, etcd, PyTorch's `TCPStore`.
//!
//! The members are on "hosts" of different names, so none of them is the witness of another one's
//! end: without the store half of them could not go on.

use super::job::{Job, Told};
use super::outside_stores::{Etcd, TorchStore};
use super::ports::reserve;
use super::skipped::skip;
use rustix::process::Signal;

/// Without a secret of the user's no store of others is used.
const SECRET: &str = "secret=7";

/// Two of four hosts vanish, and then one more: the others go on each time.
fn half_of_the_hosts_vanish(meet: &str) {
    let mut job = Job::start("tcp", 4, &[meet, SECRET, "hosts=1", "suspect=2000"]);
    job.await_step(0, 5);
    for seat in [2, 3] {
        job.signal(seat, Signal::KILL);
    }
    job.await_all_of(&[0, 1]);
    job.signal(0, Signal::KILL);
    job.await_all_of(&[1]);
    job.finish();
    job.check();
    assert_eq!(job.ends(1), [""; 0]);
}

/// Three of four at once, so one is left, which is less than half.
fn three_of_four_hosts_vanish(meet: &str) {
    let mut job = Job::start("tcp", 4, &[meet, SECRET, "hosts=1", "suspect=2000"]);
    job.await_step(3, 5);
    for seat in [0, 1, 2] {
        job.signal(seat, Signal::KILL);
    }
    job.await_all_of(&[3]);
    job.finish();
    job.check();
}

/// Who was stopped is out by the record in the store, also where most were.
fn who_was_stopped_is_out(meet: &str) {
    let mut job = Job::start("tcp", 3, &[meet, SECRET, "hosts=1", "suspect=2000", "watch=1"]);
    job.await_step(0, 5);
    for seat in [1, 2] {
        job.signal(seat, Signal::STOP);
    }
    job.await_all_of(&[0]);
    for seat in [1, 2] {
        job.signal(seat, Signal::CONT);
    }
    for seat in [1, 2] {
        job.await_told(seat, |told| matches!(told, Told::End(_)));
    }
    job.finish();
    job.check();
    assert_eq!([job.ends(1), job.ends(2)], [["Expelled"], ["Expelled"]]);
    assert_eq!(job.ends(0), [""; 0]);
}

/// A process joins, and one joins after the first member has died, at the seats' rank 0.
fn processes_join(meet: &str) {
    let mut job = Job::start("tcp", 2, &[meet, SECRET, "hosts=1", "suspect=2000", "state=70000"]);
    job.await_step(0, 5);
    let joined = job.spawn(2, &[]);
    job.await_all_of(&[0, 1, joined]);
    job.signal(0, Signal::KILL);
    job.await_all_of(&[1, joined]);
    let again = job.spawn(0, &[]);
    job.await_told(again, |told| matches!(told, Told::Joined(_)));
    job.await_all_of(&[1, joined, again]);
    job.finish();
    job.check();
}

/// The store is away while nothing changes, and no member misses it. When members change, all say
/// that it is away.
fn a_store_that_is_away(meet: &str, end: impl FnOnce()) {
    let mut job = Job::start("tcp", 4, &[meet, SECRET, "hosts=1", "suspect=2000"]);
    job.await_step(0, 5);
    end();
    job.await_further_steps();
    job.signal(3, Signal::KILL);
    for seat in [0, 1, 2] {
        job.await_told(seat, |told| matches!(told, Told::End(_)));
    }
    job.finish();
    job.check();
    for seat in [0, 1, 2] {
        assert_eq!(job.ends(seat), ["Store"], "seat {seat}");
    }
}

#[test]
fn without_a_store_half_of_the_hosts_are_too_few() {
    let mut job = Job::start("tcp", 4, &["hosts=1", "suspect=2000"]);
    job.await_step(0, 5);
    for seat in [2, 3] {
        job.signal(seat, Signal::KILL);
    }
    for seat in [0, 1] {
        job.await_told(seat, |told| matches!(told, Told::End(_)));
    }
    job.finish();
    job.check();
    assert_eq!([job.ends(0), job.ends(1)], [["NoQuorum"], ["NoQuorum"]]);
}

mod folder {
    #[test]
    fn half_of_the_hosts_vanish() {
        super::half_of_the_hosts_vanish("meet=folder");
    }

    #[test]
    fn three_of_four_hosts_vanish() {
        super::three_of_four_hosts_vanish("meet=folder");
    }

    #[test]
    fn who_was_stopped_is_out() {
        super::who_was_stopped_is_out("meet=folder");
    }

    #[test]
    fn processes_join() {
        super::processes_join("meet=folder");
    }
}

mod etcd {
    use super::*;

    fn etcd(count: u16) -> Option<Etcd> {
        let etcd = Etcd::start(count, reserve(2 * count), &[]);
        if etcd.is_none() {
            skip("etcd is not installed (Debian's package etcd-server)");
        }
        etcd
    }

    fn meet(etcd: &Etcd) -> String {
        format!("meet={}", etcd.address("jobs/of-a-test"))
    }

    #[test]
    fn half_of_the_hosts_vanish() {
        let Some(etcd) = etcd(1) else { return };
        super::half_of_the_hosts_vanish(&meet(&etcd));
    }

    #[test]
    fn three_of_four_hosts_vanish_and_one_of_three_nodes() {
        let Some(mut etcd) = etcd(3) else { return };
        let meet = meet(&etcd);
        let mut job = Job::start("tcp", 4, &[&meet, SECRET, "hosts=1", "suspect=2000"]);
        job.await_step(3, 5);
        etcd.kill(0);
        for seat in [0, 1, 2] {
            job.signal(seat, Signal::KILL);
        }
        job.await_all_of(&[3]);
        job.finish();
        job.check();
    }

    #[test]
    fn who_was_stopped_is_out() {
        let Some(etcd) = etcd(1) else { return };
        super::who_was_stopped_is_out(&meet(&etcd));
    }

    #[test]
    fn processes_join() {
        let Some(etcd) = etcd(1) else { return };
        super::processes_join(&meet(&etcd));
    }

    #[test]
    fn a_store_that_is_away_is_missed_when_members_change() {
        let Some(mut etcd) = etcd(1) else { return };
        let meet = meet(&etcd);
        a_store_that_is_away(&meet, || etcd.kill(0));
    }
}

mod torch {
    use super::*;

    fn store() -> Option<TorchStore> {
        let store = TorchStore::start();
        if store.is_none() {
            skip("there is no python with torch");
        }
        store
    }

    fn meet(store: &TorchStore) -> String {
        format!("meet={}", store.address())
    }

    #[test]
    fn half_of_the_hosts_vanish() {
        let Some(store) = store() else { return };
        super::half_of_the_hosts_vanish(&meet(&store));
    }

    #[test]
    fn who_was_stopped_is_out() {
        let Some(store) = store() else { return };
        super::who_was_stopped_is_out(&meet(&store));
    }

    #[test]
    fn processes_join() {
        let Some(store) = store() else { return };
        super::processes_join(&meet(&store));
    }

    #[test]
    fn a_store_that_is_away_is_missed_when_members_change() {
        let Some(store) = store() else { return };
        let meet = meet(&store);
        a_store_that_is_away(&meet, || drop(store));
    }
}

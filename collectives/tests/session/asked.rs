//! What people ask of a running job: who is there, that a member leaves, and that members are dead.

use std::time::Duration;

use pleach_collectives::session::asks::{AskError, MemberRow, MemberState, certify, drain, members};
use pleach_collectives::session::{Process, Seat};
use pleach_transport::auth::Secret;
use pleach_transport::clock::now;
use pleach_transport::rendezvous::World;
use rustix::process::Signal;

use super::job::{Job, Told};
use super::ports::reserve;

const LIMIT: Duration = Duration::from_secs(20);

/// Whoever asks at this address with the secret of the jobs here.
fn asker(address: &str) -> World {
    let rendezvous = Some(address.parse().expect("an address"));
    World { rendezvous, secret: Some(Secret::new(&[7; 32])), ..World::alone() }
}

/// Asks until the members are as wanted.
fn await_members(asker: &World, mut wanted: impl FnMut(&[MemberRow]) -> bool) -> Vec<MemberRow> {
    let until = now() + Duration::from_secs(60);
    loop {
        let found = members(asker, LIMIT);
        if let Ok(rows) = &found
            && wanted(rows)
        {
            return found.expect("is there");
        }
        assert!(now() < until, "{found:?}");
    }
}

fn start(address: &str, size: u32, settings: &[&str]) -> Job {
    let meet = format!("meet={address}");
    let settings: Vec<&str> =
        [&meet, "secret=7", "suspect=2000"].into_iter().chain(settings.iter().copied()).collect();
    Job::start("tcp", size, &settings)
}

fn are(rows: &[MemberRow], count: usize, state: MemberState) -> bool {
    rows.iter().filter(|row| row.state == state).count() == count
}

#[test]
fn members_are_named_and_one_leaves_that_is_asked_to() {
    let address = format!("tcp://127.0.0.1:{}", reserve(1));
    let (mut job, asker) = (start(&address, 3, &[]), asker(&address));
    let rows = await_members(&asker, |rows| are(rows, 3, MemberState::Member));
    let seats: Vec<u32> = rows.iter().map(|row| row.process.seat.0).collect();
    assert_eq!(seats, [0, 1, 2]);
    assert!(rows.iter().all(|row| row.epoch == Some(0)), "{rows:?}");
    let error = certify(&asker, rows[1].process, LIMIT).expect_err("it is reached");
    assert!(matches!(error, AskError::Refused(_)) && error.to_string().contains("--drain"), "{error}");
    let error = certify(&asker, Process::new(1, 5), LIMIT).expect_err("is nobody");
    assert!(error.to_string().contains("is no member"), "{error}");
    let error = drain(&asker, Seat(7), LIMIT).expect_err("nobody is there");
    assert!(error.to_string().contains("no member is on seat 7"), "{error}");
    for seat in [1, 0] {
        drain(&asker, Seat(seat), LIMIT).expect("is asked");
        job.await_told(seat, |told| *told == Told::End("Left".to_owned()));
    }
    let rows = await_members(&asker, |rows| are(rows, 1, MemberState::Member));
    let shown: Vec<_> = rows.iter().map(|row| (row.process.seat.0, row.epoch, row.state)).collect();
    let out = |seat, epoch| (seat, Some(epoch), MemberState::Out);
    assert_eq!(shown, [out(0, 2), out(1, 1), (2, Some(2), MemberState::Member)]);
    job.await_all_of(&[2]);
    job.finish();
    job.check();
    assert_eq!(job.retries(2), 0, "leaving costs the others no retry");
}

/// A process that joins has none of the states until it has read them, and says how far it is.
#[test]
fn who_joins_is_healing_until_it_has_the_states() {
    let address = format!("tcp://127.0.0.1:{}", reserve(1));
    let (mut job, asker) = (start(&address, 2, &["state=4000000"]), asker(&address));
    job.await_step(0, 3);
    let joined = job.spawn(2, &["holds=1"]);
    job.await_told(joined, |told| matches!(told, Told::Joined(_)));
    let is_of_three = |rows: &[MemberRow]| rows.len() == 3 && rows.iter().all(|row| row.epoch == Some(1));
    let rows = await_members(&asker, is_of_three);
    let states: Vec<String> = rows.iter().map(|row| row.state.to_string()).collect();
    assert_eq!(states, ["member", "member", "healing 0 %"]);
    job.let_go_on();
    let mut shares = vec![0];
    await_members(&asker, |rows| {
        for row in rows {
            if let MemberState::Healing { percent } = row.state {
                assert_eq!(row.process.seat, Seat(2), "the others have them: {rows:?}");
                shares.push(percent);
            }
        }
        are(rows, 3, MemberState::Member)
    });
    assert!(shares.is_sorted() && shares.iter().all(|percent| *percent < 100), "{shares:?}");
    job.await_all_of(&[0, 1, joined]);
    job.finish();
    job.check();
}

/// Half of the hosts are lost, no witness says so, and no store makes records: the others wait
/// until a person answers for the dead.
#[test]
fn a_person_certifies_that_half_of_the_hosts_are_lost() {
    let address = format!("tcp://127.0.0.1:{}", reserve(1));
    let (mut job, asker) = (start(&address, 4, &["hosts=1", "quorum=60000"]), asker(&address));
    job.await_step(0, 5);
    for seat in [2, 3] {
        job.signal(seat, Signal::KILL);
    }
    let rows = await_members(&asker, |rows| are(rows, 2, MemberState::Suspected));
    for row in rows.iter().filter(|row| row.state == MemberState::Suspected) {
        certify(&asker, row.process, LIMIT).expect("it is dead");
    }
    job.await_all_of(&[0, 1]);
    job.finish();
    job.check();
}

/// No rank is of the first host of the address, which is one for documentation. The holder of the
/// server for joiners is killed, the lowest seat of those left opens it again, and a process joins.
#[test]
fn of_several_places_one_is_served_again_when_its_holder_is_lost() {
    let port = reserve(1);
    let address = format!("tcp://192.0.2.1:{port},127.0.0.1:{port}");
    let (mut job, asker) = (start(&address, 3, &[]), asker(&address));
    job.await_step(1, 5);
    job.signal(0, Signal::KILL);
    let rows = await_members(&asker, |rows| are(rows, 2, MemberState::Member));
    assert!(rows[0].process.seat == Seat(0) && rows[0].state == MemberState::Out, "{rows:?}");
    let joined = job.spawn(0, &[]);
    job.await_told(joined, |told| matches!(told, Told::Joined(_)));
    job.await_all_of(&[1, 2, joined]);
    job.finish();
    job.check();
}

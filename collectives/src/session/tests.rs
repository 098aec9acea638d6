use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use pleach_membership::Message;
use pleach_packing::topology::preset;
use pleach_transport::rendezvous::{Rendezvous, World};
use pleach_transport::{PostError, Responder as _, rendezvous::FabricChoice};

use super::*;
use crate::engine::EngineError;

/// How long a question may take, on a busy machine.
const ASK_LIMIT: Duration = Duration::from_secs(60);
/// Questions that are answered while a process waits for a seat, at least: some twenty are, and one
/// or two if they had to wait for that process.
const ANSWERS_MIN: u32 = 4;

fn alone() -> Session {
    let mut options = Options::new(World::alone());
    options.fabric = FabricChoice::Only(pleach_transport::rendezvous::Fabric::Tcp);
    Session::join(&options, &Elastic::between(1, 1)).expect("joins")
}

#[test]
fn questions_are_answered_while_a_process_waits_for_a_seat() {
    let folder = std::env::temp_dir().join(format!("pleach-full-{}", std::process::id()));
    std::fs::create_dir(&folder).expect("a new folder");
    let world = World { rendezvous: Some(Rendezvous::File { folder: folder.clone() }), ..World::alone() };
    let mut options = Options::new(world.clone());
    options.fabric = FabricChoice::Only(pleach_transport::rendezvous::Fabric::Tcp);
    let full = Session::join(&options, &Elastic::between(1, 1)).expect("joins");
    let answers = std::thread::scope(|scope| {
        let newcomer = scope.spawn(|| {
            let error = Session::join(&options, &Elastic::between(1, 1)).expect_err("there is no seat");
            assert!(error.to_string().contains("all its 1 seats are taken"), "{error}");
        });
        let mut answers = 0;
        while !newcomer.is_finished() {
            let rows = asks::members(&world, ASK_LIMIT).expect("the job runs");
            assert_eq!(rows.len(), 1);
            answers += 1;
            // A server answers a number of them, and is opened anew then.
            std::thread::park_timeout(Duration::from_millis(200));
        }
        newcomer.join().expect("it was refused");
        answers
    });
    drop(full);
    std::fs::remove_dir_all(folder).expect("it is there");
    println!("{answers} questions were answered meanwhile");
    assert!(answers >= ANSWERS_MIN, "questions waited: {answers} were answered");
}

/// As a fence does, that makes much memory private.
#[test]
fn who_works_with_the_device_at_length_lets_others_have_it_in_turn() {
    /// How often the device is wanted.
    const TIMES: usize = 15;
    /// Turns of the other thread that a wait may see: one is under way, and more pass while this
    /// thread does not run. Of an unfair lock some waits see hundreds.
    const TURNS_MAX: u32 = 20;
    /// How long a turn takes: longer than this thread is kept from running, as a rule.
    const TURN: Duration = Duration::from_millis(10);
    let session = alone();
    // Relaxed: only counts, and the scope joins the thread.
    let (turns, is_enough) = (AtomicU32::new(0), AtomicBool::new(false));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !is_enough.load(Ordering::Relaxed) {
                let _device = session.device.lock();
                std::thread::park_timeout(TURN);
                turns.fetch_add(1, Ordering::Relaxed);
            }
        });
        let waits = (0..TIMES).map(|_| {
            let so_far = turns.load(Ordering::Relaxed);
            // The other thread has it again.
            while turns.load(Ordering::Relaxed) == so_far {
                std::thread::yield_now();
            }
            let before = turns.load(Ordering::Relaxed);
            drop(session.device.lock());
            turns.load(Ordering::Relaxed) - before
        });
        let waits: Vec<u32> = waits.collect();
        is_enough.store(true, Ordering::Relaxed);
        let long = waits.iter().filter(|turns| **turns > TURNS_MAX).count();
        assert!(long <= 1, "waits have seen {waits:?} turns");
    });
}

#[test]
fn a_topology_without_links_of_some_seats_is_refused() {
    let mut options = Options::new(World::alone());
    options.topology = Some(Arc::new(preset("star:4@1").expect("a topology")));
    let error = Session::join(&options, &Elastic::between(1, 5)).expect_err("a seat has no links");
    assert!(error.to_string().contains("a topology of fewer ranks than seats"), "{error}");
}

#[test]
fn an_epoch_that_could_not_be_entered_ends_and_the_next_one_is_entered() {
    let mut session = alone();
    assert_eq!(session.next().expect("a step begins"), 0);
    assert_eq!(session.commit(Ok(())).expect("alone"), Verdict::Committed);
    let record = session.member.lock().entered().expect("is a member");
    session.epoch = None;
    drop(session.member.lock().close());
    let full = EngineError::Post(PostError::QueueFull { peer: 0 });
    session.could_not_enter(&record, GroupError::Engine(full)).expect("is tried again");
    assert_eq!(session.next().expect("a step begins"), 1);
    assert_eq!(session.epoch(), 1, "not in the epoch that could not be entered");
    session.leave().expect("is left");
}

#[test]
fn who_names_a_seat_that_there_is_not_ends_the_session_with_an_error() {
    let mut session = alone();
    let record = Record::first(vec![Process::new(7, 1)]).expect("has a member");
    for part in envelope::parts(&Message::Decided(Arc::new(record))) {
        assert_eq!(session.incoming.message(0, &part), None, "nothing is answered");
    }
    let until = clock::now() + session.setting.options().timeout;
    let error = loop {
        match session.attempt(|_, _| Ok(())) {
            Ok(verdict) => assert_eq!(verdict, Verdict::Committed),
            Err(error) => break error,
        }
        assert!(clock::now() < until, "it was told");
    };
    let SessionError::NoSuchSeat { from, seat, seats } = &error else { panic!("{error}") };
    assert_eq!((from.seat, *seat, *seats), (Seat(0), Seat(7), 1));
}

#[test]
fn who_has_given_up_makes_no_group() {
    let mut session = alone();
    let record = session.await_entry().expect("is a member");
    // The thread of the session may give up after the caller has last looked.
    session.member.drop_session();
    assert!(!session.enter(&record).expect("is not tried"), "nothing would end the group");
}

#[test]
fn a_group_whose_epoch_no_record_has_ended_ends_with_the_session() {
    let mut session = alone();
    assert_eq!(session.next().expect("a step begins"), 0);
    let group = session.group().expect("has begun").clone();
    session.end_group();
    let error = group.all_reduce(&mut [1_i32], pleach_vocabulary::ReduceOp::Sum).expect_err("has ended");
    assert!(error.is_change(), "{error}");
}

#[test]
fn a_signal_that_tells_to_leave_is_seen_at_the_end_of_the_step() {
    let mut session = alone();
    session.next().expect("a step begins");
    session.member.leaves_when().store(true, std::sync::atomic::Ordering::Relaxed);
    assert_eq!(session.commit(Ok(())).expect("alone"), Verdict::Committed);
    let error = session.next().expect_err("leaves");
    assert!(matches!(error, SessionError::Left), "{error}");
}

#[test]
fn who_is_told_to_leave_while_too_few_are_left_waits_for_nobody() {
    let mut session = alone();
    session.elastic.fewest = 2;
    session.member.leaves_when().store(true, std::sync::atomic::Ordering::Relaxed);
    let begun = clock::now();
    let error = session.next().expect_err("leaves");
    assert!(matches!(error, SessionError::Left), "{error}");
    assert!(clock::now().since(begun) < session.elastic.fewest_wait / 4, "nobody is awaited");
}

#[test]
fn a_state_that_is_being_changed_is_not_read() {
    let mut session = alone();
    let mut state = session.state::<u8>("w", 8).expect("has memory");
    assert_eq!(session.attempt(|_, _| Ok(())).expect("alone"), Verdict::Committed);
    state.update(|bytes| {
        bytes.fill(1);
        let error = session.audit().expect_err("would read what changes");
        assert!(matches!(&error, SessionError::StateInUse(name) if name == "w"), "{error}");
    });
    session.audit().expect("nobody changes it");
    let error = session.state::<u8>(&"w".repeat(1025), 8).expect_err("is too long");
    assert!(error.to_string().contains("1025 bytes; give at most 1024"), "{error}");
}

#[test]
fn who_is_interrupted_while_it_leaves_is_told_so() {
    let mut session = alone();
    session.interrupted_by(|| true);
    let until = clock::now() + session.setting.options().timeout;
    while !session.member.lock().is_interrupted() {
        session.member.ask_whether_interrupted();
        assert!(clock::now() < until, "it is asked now and then");
    }
    let error = session.leave().expect_err("is interrupted");
    assert!(matches!(error, SessionError::Interrupted), "{error}");
}

#[test]
fn a_change_names_all_that_left_also_with_an_epoch_in_between() {
    let members = |seats: &[u32]| -> Vec<Process> {
        seats.iter().map(|seat| Process::new(*seat, u64::from(*seat) + 7)).collect()
    };
    let first = Record::first(members(&[0, 1, 2, 3])).expect("has members");
    let died = |seat: u32| pleach_membership::Cause { process: members(&[seat])[0], reason: Reason::Died };
    let second = first.next(members(&[0, 1, 3]), 4, Agreed::Retry, vec![died(2)]).expect("has members");
    let third = second.next(members(&[0, 1]), 4, Agreed::Retry, vec![died(3)]).expect("has members");
    let change = Change::between(&first, &third, Vec::new());
    assert_eq!((change.from, change.epoch), (0, 2));
    let left: Vec<u32> = change.left.iter().map(|(process, _)| process.seat.0).collect();
    assert_eq!(left, [2, 3]);
    assert_eq!(change.left[1].1, Reason::Died);
}

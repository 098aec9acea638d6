//! Sessions that meet over TCP, with and without a secret.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::thread;

use pleach_collectives::{Elastic, JoinGroupError, Options, ReduceOp, Session, SessionError, Verdict};
use pleach_transport::auth::Secret;
use pleach_transport::rendezvous::{
    Fabric, FabricChoice, JoinError, Launcher, OpenStoreError, Rendezvous, World,
};

use super::ports;

fn options(rank: u32, port: u16, secret: Option<u8>) -> Options {
    let mut options = Options::new(World {
        rank,
        world_size: 2,
        rendezvous: Some(Rendezvous::Tcp { host: "127.0.0.1".to_owned(), port }),
        secret: secret.map(|byte| Secret::new(&[byte; 32])),
        launcher: Launcher::Arguments,
        ..World::alone()
    });
    options.fabric = FabricChoice::Only(Fabric::Tcp);
    options
}

/// Makes steps until three members have made one. Returns who made the last one, as bits.
fn run(options: &Options, enough: &AtomicBool, steps: &Sender<u64>) -> Result<u64, SessionError> {
    let mut session = Session::join(options, &Elastic::between(1, 4))?;
    let seat = session.seat().0;
    let mut sums = session.buffer::<u64>(2)?;
    loop {
        let verdict = session.attempt(|group, _| {
            // Relaxed: a later step sees it too.
            (sums[0], sums[1]) = (1 << seat, u64::from(enough.load(Ordering::Relaxed)));
            group.all_reduce(&mut sums, ReduceOp::Sum)
        })?;
        if verdict == Verdict::Committed {
            if sums[0].count_ones() == 3 {
                enough.store(true, Ordering::Relaxed);
            }
            if sums[1] > 0 {
                session.leave()?;
                return Ok(sums[0]);
            }
            // Nobody listens any more once the others have come.
            let _ = steps.send(session.step());
        }
    }
}

fn joins_with_the_secret_alone(secret: Option<u8>) {
    let port = ports::reserve(1);
    let enough = Arc::new(AtomicBool::new(false));
    let (sender, steps) = channel();
    let start = |rank: u32| {
        let (enough, sender) = (Arc::clone(&enough), sender.clone());
        thread::spawn(move || run(&options(rank, port, secret), &enough, &sender))
    };
    let founders = [start(0), start(1)];
    steps.recv().expect("a step was made");
    let other = run(&options(3, port, Some(9)), &enough, &sender);
    if secret.is_some() {
        let is_refused = matches!(
            other,
            Err(SessionError::Join(JoinGroupError::Join(JoinError::Open(
                OpenStoreError::WrongSecret { .. }
            ))))
        );
        assert!(is_refused, "{other:?}");
    } else {
        other.expect_err("the job has another secret");
    }
    let third = start(2);
    for member in founders.into_iter().chain([third]) {
        assert_eq!(member.join().expect("does not panic").expect("goes on"), 0b111);
    }
}

#[test]
fn a_process_with_the_secret_joins_and_one_with_another_does_not() {
    joins_with_the_secret_alone(Some(7));
}

#[test]
fn a_process_of_the_same_user_joins_where_there_is_no_secret() {
    joins_with_the_secret_alone(None);
}

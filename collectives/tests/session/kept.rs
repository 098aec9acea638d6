//! What a program keeps of a session beyond it, and options that sessions do not take.

use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::channel;
use std::thread;
use std::time::Duration;

use pleach_collectives::session::Heal;
use pleach_collectives::{Connect, Elastic, Operation, Options, ReduceOp, Session, SessionError};
use pleach_transport::Space;
use pleach_transport::rendezvous::{Fabric, FabricChoice, Launcher, Rendezvous, World};

/// How long an operation may take to end on a busy machine.
const PATIENCE: Duration = Duration::from_secs(30);

/// A new folder to meet in.
pub(crate) fn folder() -> PathBuf {
    // Relaxed: only uniqueness matters.
    static FOLDERS: AtomicU32 = AtomicU32::new(0);
    let number = FOLDERS.fetch_add(1, Ordering::Relaxed);
    std::env::temp_dir().join(format!("pleach-kept-{}-{number}", std::process::id()))
}

fn options(rank: u32, fabric: Fabric, folder: PathBuf) -> Options {
    let mut options = Options::new(World {
        rank,
        world_size: 2,
        rendezvous: Some(Rendezvous::File { folder }),
        launcher: Launcher::Arguments,
        ..World::alone()
    });
    options.fabric = FabricChoice::Only(fabric);
    options
}

/// An operation that was started, and a handle of the group, that outlive the session. Nobody else
/// takes part in the operation.
fn ends_when_the_session_does(fabric: Fabric, leaves: bool) {
    let folder = folder();
    let (over, is_over) = channel::<()>();
    let other = {
        let options = options(1, fabric, folder.clone());
        thread::spawn(move || {
            let mut session = Session::join(&options, &Elastic::between(1, 2)).expect("joins");
            session.next().expect("a step begins");
            // Ends when the other end is dropped.
            let _ = is_over.recv();
        })
    };
    let mut session =
        Session::join(&options(0, fabric, folder.clone()), &Elastic::between(1, 2)).expect("joins");
    session.next().expect("a step begins");
    let group = session.group().expect("has begun").clone();
    let buffer = session.buffer::<f32>(1000).expect("there is memory");
    let mut pending = group.start(Operation::all_reduce(buffer, ReduceOp::Sum)).expect("is started");
    if leaves {
        session.leave().expect("is left");
    } else {
        drop(session);
    }
    assert!(pending.wait_for(PATIENCE), "it has ended");
    pending.wait().expect_err("nobody took part");
    group.barrier().expect_err("the session is over");
    drop(over);
    other.join().expect("ends well");
    let _ = std::fs::remove_dir_all(&folder);
}

#[test]
fn what_outlives_a_session_that_is_dropped_ends_with_an_error() {
    ends_when_the_session_does(Fabric::Tcp, false);
    ends_when_the_session_does(Fabric::Shm, false);
}

#[test]
fn what_outlives_a_session_that_was_left_ends_with_an_error() {
    ends_when_the_session_does(Fabric::Tcp, true);
}

/// A commit that waits for the other member's step, which does not end.
fn ends_when_it_is_interrupted(fabric: Fabric) {
    let folder = folder();
    let (over, is_over) = channel::<()>();
    let other = {
        let options = options(1, fabric, folder.clone());
        thread::spawn(move || {
            let mut session = Session::join(&options, &Elastic::between(1, 2)).expect("joins");
            session.next().expect("a step begins");
            // Ends when the other end is dropped.
            let _ = is_over.recv();
            session.commit(Ok(())).expect("goes on alone");
            session.step()
        })
    };
    let mut session =
        Session::join(&options(0, fabric, folder.clone()), &Elastic::between(1, 2)).expect("joins");
    session.next().expect("a step begins");
    session.interrupted_by(|| true);
    assert!(matches!(session.commit(Ok(())), Err(SessionError::Interrupted)));
    assert!(matches!(session.next(), Err(SessionError::Interrupted)), "it is over");
    drop(session);
    drop(over);
    // Both were ready. Whether the other one has heard it before the session ended is open.
    assert!(other.join().expect("ends well") <= 1, "no step but that one has begun");
    let _ = std::fs::remove_dir_all(&folder);
}

#[test]
fn a_call_that_waits_ends_when_it_is_interrupted() {
    ends_when_it_is_interrupted(Fabric::Tcp);
    ends_when_it_is_interrupted(Fabric::Shm);
}

#[test]
fn options_that_sessions_do_not_take_are_refused() {
    let refused = |change: fn(&mut Options, &mut Elastic)| {
        let (mut options, mut elastic) = (Options::new(World::alone()), Elastic::between(1, 2));
        change(&mut options, &mut elastic);
        match Session::join(&options, &elastic) {
            Err(SessionError::Unsupported { option, .. }) => option,
            other => panic!("{other:?}"),
        }
    };
    assert!(refused(|options, _| options.connect = Some(Connect::OnUse)).contains("connect"));
    let hidden_on_gpu = |options: &mut Options, elastic: &mut Elastic| {
        (options.space, elastic.heal) = (Space::Gpu { ordinal: 0 }, Heal::Hidden);
    };
    assert!(refused(hidden_on_gpu).contains("Heal::Hidden"));
}

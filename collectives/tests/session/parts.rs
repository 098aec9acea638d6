//! Groups, windows and partial all-reduces in the epochs of a session.

use std::any::Any;
use std::path::Path;
use std::sync::mpsc::{Sender, channel};
use std::thread;
use std::time::Duration;

use pleach_collectives::partial::{Activation, Late, Own};
use pleach_collectives::session::Split;
use pleach_collectives::{
    CollectiveError, Elastic, Group, Operation, Options, Partial, ReduceOp, Session, Verdict, Window, Word,
};
use pleach_transport::rendezvous::{Fabric, FabricChoice, Launcher, Rendezvous, World};

use super::kept::folder;

/// How long anything may take on a machine that is busy with other things.
const PATIENCE: Duration = Duration::from_secs(60);

/// Elements of a window and of a round.
const LEN: usize = 5_000;

/// What a member process makes of the group of each epoch.
pub(crate) struct Parts {
    /// Members of even and of odd seats.
    halves: Split,
    /// Of the epoch in which it was made.
    window: Option<Window<u64>>,
}

impl Parts {
    pub(crate) fn of(session: &mut Session) -> Self {
        Self { halves: session.split(|member| Some(member.seat.0 % 2)), window: None }
    }

    /// Makes some, and uses those that are there.
    pub(crate) fn use_in(&mut self, group: &Group, seat: u32, step: u64) -> Result<(), CollectiveError> {
        if group.contributors() < group.world_size() {
            assert!(self.halves.group().is_none(), "somebody heals");
            return Ok(());
        }
        let half = self.halves.group().expect("each member has a colour");
        let mut sums = [1, u64::from(seat % 2)];
        half.all_reduce(&mut sums, ReduceOp::Sum)?;
        assert_eq!(sums, [u64::from(half.world_size()), u64::from(half.world_size() * (seat % 2))]);

        let pair = group.split(Some(group.rank() / 2), 0)?.expect("it has a colour");
        let mut last = vec![u64::from(group.rank()); 2];
        pair.all_reduce(&mut last, ReduceOp::Max)?;
        let expected = (group.rank() | 1).min(group.world_size() - 1);
        assert_eq!(last, [u64::from(expected); 2]);
        // A part of a part.
        let alone = pair.split(Some(pair.rank()), 0)?.expect("it has a colour");
        alone.barrier()?;

        let mut rounds = group.partial::<u64>(LEN, Activation::all())?;
        rounds.contribution().fill(step + 1);
        let round = rounds.contribute().map_err(CollectiveError::from)?;
        let members = u64::from(group.world_size());
        assert!(round.result().iter().all(|sum| *sum == members * (step + 1)));
        rounds.finish().map_err(CollectiveError::from)?;
        self.use_window(group, step)
    }

    fn use_window(&mut self, group: &Group, step: u64) -> Result<(), CollectiveError> {
        // All members have the window of one epoch, or none.
        if let Some(window) = &mut self.window
            && let Err(error) = window.publish(&vec![step; LEN], Word::from(step))
        {
            if !error.is_change() {
                return Err(error);
            }
            self.window = None;
        }
        if self.window.is_none() {
            let mut window = group.window::<u64>(LEN, 1)?;
            window.publish(&vec![step; LEN], Word::from(step))?;
            self.window = Some(window);
        }
        let window = self.window.as_mut().expect("it was made");
        group.barrier()?;
        let next = (group.rank() + 1) % group.world_size();
        let read = match window.start_read(next, 0..LEN, vec![0; LEN]) {
            Ok(read) => read.wait(),
            Err(error) => Err(error),
        };
        let (_, word, elements) = read.map_err(|failed| {
            assert_eq!(failed.data.len(), LEN, "the memory comes back");
            failed.error
        })?;
        assert!(word.number() == step && elements.iter().all(|it| *it == step), "step {step}");
        if next != group.rank() {
            window.write(next, 0, &elements, word)?;
            let mut come = 0;
            while come == 0 {
                come = window.wait(PATIENCE, |arrival| {
                    assert!(arrival.data().iter().all(|it| *it == step), "step {step}");
                })?;
            }
        }
        group.barrier()
    }

    /// The epoch in which the window was made may be over.
    pub(crate) fn expect_ended(&mut self) {
        let mut into = vec![7; LEN];
        if let Some(window) = &mut self.window
            && let Err(error) = window.read(0, 0..LEN, &mut into)
        {
            assert!(error.is_change(), "{error}");
        }
    }
}

fn options(rank: u32, fabric: Fabric, folder: &Path) -> Options {
    let mut options = Options::new(World {
        rank,
        world_size: 3,
        rendezvous: Some(Rendezvous::File { folder: folder.to_owned() }),
        launcher: Launcher::Arguments,
        ..World::alone()
    });
    options.fabric = FabricChoice::Only(fabric);
    options
}

fn elastic() -> Elastic {
    let mut elastic = Elastic::between(2, 3);
    elastic.suspect_after = Duration::from_secs(2);
    elastic
}

/// What a member has made, which it keeps until its session is dropped.
type Attempt = Result<Box<dyn Any>, CollectiveError>;

/// Three members. The last one ends when both others have said that they wait for it in `waits`;
/// then they go on without it.
fn goes_on_without_one(fabric: Fabric, waits: impl Fn(&Group, u32, &dyn Fn()) -> Attempt + Sync) {
    let folder = folder();
    let (say, said) = channel::<()>();
    thread::scope(|scope| {
        let member = |rank: u32, say: Sender<()>| {
            let (folder, waits) = (&folder, &waits);
            move || {
                let mut session = Session::join(&options(rank, fabric, folder), &elastic()).expect("joins");
                let mut attempts = Vec::new();
                while session.step() < 1 {
                    let verdict = session.attempt(|group, _| {
                        let is_there = group.world_size() == 3;
                        waits(group, rank, &|| {
                            if is_there {
                                say.send(()).expect("is heard")
                            }
                        })?;
                        assert!(!is_there, "who is gone was waited for");
                        Ok(())
                    });
                    attempts.push(verdict.expect("two members are enough"));
                }
                assert!(matches!(&attempts[0], Verdict::Retry(change) if change.left.len() == 1));
                assert_eq!(attempts[1..], [Verdict::Committed]);
                assert_eq!(session.epoch(), 1, "one death is one change");
                session.leave().expect("is left");
            }
        };
        let members = [0, 1].map(|rank| scope.spawn(member(rank, say.clone())));
        let mut last = Session::join(&options(2, fabric, &folder), &elastic()).expect("joins");
        last.next().expect("a step begins");
        let group = last.group().expect("has begun").clone();
        // It makes the same, and then it is waited for.
        let made = waits(&group, 2, &|| {
            for _ in 0..2 {
                said.recv_timeout(PATIENCE).expect("both come so far");
            }
        });
        drop(last);
        drop(made);
        for member in members {
            member.join().expect("goes on");
        }
    });
    let _ = std::fs::remove_dir_all(&folder);
}

/// On each fabric.
fn on_fabrics(test: impl Fn(Fabric)) {
    [Fabric::Shm, Fabric::Tcp].into_iter().for_each(test);
}

fn leaves(rank: u32, group: &Group) -> bool {
    rank == 2 && group.world_size() == 3
}

#[test]
fn a_call_in_a_part_ends_with_the_epoch() {
    on_fabrics(|fabric| {
        goes_on_without_one(fabric, |group, rank, waits| {
            let part = group.split(Some(7), group.world_size() - group.rank())?.expect("has a colour");
            assert_eq!(part.rank(), group.world_size() - 1 - group.rank());
            let mut sums = vec![1_u32; 1000];
            part.all_reduce(&mut sums, ReduceOp::Sum)?;
            assert!(sums.iter().all(|sum| *sum == group.world_size()));
            waits();
            if leaves(rank, group) {
                return Ok(Box::new(part));
            }
            let started = part.start(Operation::all_reduce(vec![1_u64; 3000], ReduceOp::Sum));
            let ended = started.map_err(|failed| failed.error)?.wait();
            let failed = match ended {
                Ok(sums) => {
                    assert!(sums.iter().all(|sum| *sum == u64::from(group.world_size())));
                    return Ok(Box::new(part));
                }
                Err(failed) => failed,
            };
            assert_eq!(failed.data.len(), 3000, "the memory comes back");
            assert!(failed.error.is_change(), "{}", failed.error);
            Err(failed.error)
        });
    });
}

#[test]
fn a_window_ends_with_the_epoch_and_gives_memory_back() {
    on_fabrics(|fabric| {
        goes_on_without_one(fabric, |group, rank, waits| {
            let mut window = group.window::<u32>(LEN, 1)?;
            window.publish(&vec![group.rank() + 1; LEN], Word::EMPTY)?;
            group.barrier()?;
            let last = group.world_size() - 1;
            let mut theirs = vec![0; LEN];
            window.read(last, 0..LEN, &mut theirs)?;
            assert!(theirs.iter().all(|it| *it == last + 1));
            waits();
            if leaves(rank, group) {
                return Ok(Box::new(window));
            }
            if group.world_size() == 2 {
                window.close()?;
                return Ok(Box::new(()));
            }
            // Nobody writes to this rank.
            let error = window.wait(PATIENCE, |_| panic!("nobody writes")).expect_err("the epoch ends");
            assert!(error.is_change(), "{error}");
            let failed = window.start_read(last, 0..LEN, theirs).expect_err("it is over");
            assert!(failed.error.is_change() && failed.data.len() == LEN);
            assert!(failed.data.iter().all(|it| *it == last + 1), "nobody changes it any more");
            Err(error)
        });
    });
}

/// What a rank has given and what is in no result is in its contribution afterwards.
#[test]
fn rounds_end_with_the_epoch_and_what_they_carry_stays() {
    on_fabrics(|fabric| {
        goes_on_without_one(fabric, |group, rank, waits| {
            let activation = Activation::quorum(1).late(Late::Carry);
            let mut rounds: Partial<u64> = group.partial(10, activation)?;
            let is_late = group.rank() == 1;
            let carried = if is_late {
                // The others have made a round: this rank's contribution is carried to the next.
                group.barrier()?;
                rounds.contribution().fill(100);
                assert_eq!(rounds.contribute().map_err(CollectiveError::from)?.own(), Own::Carried);
                100
            } else {
                rounds.contribution().fill(1);
                // Of the two, one may open the round before the other one is ready.
                let own = rounds.contribute().map_err(CollectiveError::from)?.own();
                group.barrier()?;
                u64::from(own == Own::Carried)
            };
            waits();
            if leaves(rank, group) {
                return Ok(Box::new(rounds));
            }
            if group.world_size() == 2 {
                rounds.finish().map_err(CollectiveError::from)?;
                return Ok(Box::new(()));
            }
            // The epoch ends.
            let error = group.barrier().expect_err("the last rank is gone");
            assert!(error.is_change(), "{error}");
            rounds.contribution().fill(1000);
            let failed = CollectiveError::from(rounds.contribute().map(drop).expect_err("is over"));
            assert!(failed.is_change(), "{failed}");
            let held: Vec<u64> = rounds.contribution().to_vec();
            assert_eq!(held, [1000 + carried; 10]);
            Err(error)
        });
    });
}

#[test]
fn what_is_kept_of_a_part_ends_with_the_session() {
    on_fabrics(|fabric| {
        let folder = folder();
        let mut alone = options(0, fabric, &folder);
        alone.world.world_size = 1;
        let mut session = Session::join(&alone, &Elastic::between(1, 1)).expect("joins");
        let halves = session.split(|_| Some(3));
        let nobody = session.split(|_| None);
        assert!(halves.group().is_none(), "no step has begun");
        session.next().expect("a step begins");
        let part = halves.group().expect("has a colour");
        assert!(nobody.group().is_none());
        part.barrier().expect("it works");
        drop(session);
        let error = part.barrier().expect_err("the session is over");
        assert!(error.is_change(), "{error}");
        assert!(halves.group().is_none());
        let _ = std::fs::remove_dir_all(&folder);
    });
}

/// It has not left the session: nobody accuses it.
#[test]
fn who_leaves_a_part_that_others_need_stays_and_all_repeat_the_step() {
    on_fabrics(|fabric| {
        let folder = folder();
        thread::scope(|scope| {
            let members: Vec<_> = (0..3)
                .map(|rank| {
                    let folder = &folder;
                    scope.spawn(move || {
                        let options = options(rank, fabric, folder);
                        let mut session = Session::join(&options, &elastic()).expect("joins");
                        let mut attempts = Vec::new();
                        while session.step() < 1 {
                            let is_first = attempts.is_empty();
                            let verdict = session.attempt(|group, _| {
                                assert_eq!(group.world_size(), 3);
                                let part = group.split(Some(0), 0)?.expect("has a colour");
                                if is_first && rank == 2 {
                                    drop(part);
                                    return group.barrier();
                                }
                                part.barrier()?;
                                group.barrier()
                            });
                            attempts.push(verdict.expect("all are there"));
                        }
                        let Verdict::Retry(change) = &attempts[0] else { panic!("the part was needed") };
                        assert!(change.is_of_nobody(), "{change}");
                        assert_eq!(attempts[1..], [Verdict::Committed]);
                        session.leave().expect("is left");
                    })
                })
                .collect();
            for member in members {
                member.join().expect("goes on");
            }
        });
        let _ = std::fs::remove_dir_all(&folder);
    });
}

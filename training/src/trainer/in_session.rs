//! A training in a session: members end, stop or are out of reach, and the others go on; processes
//! join.
//!
//! Each step is an attempt of the session, in the group of an epoch. What the policy asks about by
//! [`Action::Commit`](crate::policy::Action::Commit) is the attempt's verdict. Where it is no, or a
//! call of the group has failed, what is under way comes back, and the policy hears of the members
//! with the next attempt ([`Event::Membership`]).
//!
//! The parameters are a state of the session: a copy of them, made when a step is committed. A
//! process that joins after the first step begins with what it has read there.
//!
//! An attempt of the first step begins with a comparison of what has to be the same on all members,
//! and gives all of them the parameters of rank 0, as often as it is repeated: so all members of an
//! attempt make the same calls. One more attempt behind the last step compares the parameters.
//!
//! **Invariants:** parameters, and what the program's optimizer keeps, change by committed steps
//! alone, each once. The states are what all members have after the last of them. The policy is
//! told of the members before the first operation in an epoch. No operation of an epoch that is
//! over has memory of the trainer.

use pleach_collectives::session::{Session, SessionError, State, Verdict};
use pleach_collectives::{Buffer, CollectiveError, Group};
use pleach_transport::clock;
use pleach_vocabulary::digest::chain;

use super::metrics::TrainingMetrics;
use super::{Started, Step, TrainError, Trained, Trainer, Wanted, Work};
use crate::interpreter::Vectors as _;
use crate::policy::{Event, Vector};

/// Elements of [`InSession::facts`].
const FACTS: usize = 3;

/// The session of a training.
pub(crate) struct InSession {
    session: Session,
    /// The parameters after the last committed step.
    parameters: State<f32>,
    /// The places where all members have had the same parameters, a hash over these, and a hash of
    /// what has to be the same on all members.
    facts: State<u64>,
    /// Whether this process takes the parameters from there: others have made the steps before.
    has_joined: bool,
    /// The epoch in whose group the trainer works.
    epoch: Option<u64>,
    attempt: Attempt,
    /// Whether the policy knows the members, and has asked for the step that comes next.
    is_told: bool,
    /// Whether the policy asks for the verdict.
    is_asked: bool,
    /// Why the attempt has failed here already.
    failed: Option<CollectiveError>,
}

/// How far the newest attempt is.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Attempt {
    /// It has begun, and the program does not know of it.
    New {
        step: u64,
    },
    /// It has no verdict yet.
    UnderWay,
    Over,
}

impl InSession {
    /// In the group of this process's first attempt, which begins. So many parameters.
    pub(crate) fn new(mut session: Session, parameters: usize) -> Result<(Self, Group), TrainError> {
        let parameters = session.state("parameters of the training", parameters)?;
        let facts: State<u64> = session.state("facts of the training", FACTS)?;
        let step = session.next()?;
        if step > 0 && facts[..] == [0; FACTS] {
            return Err(TrainError::Late { step });
        }
        let (epoch, group) = (session.attempted_epoch(), session.group()?.clone());
        let attempt = Attempt::New { step };
        let (has_joined, is_told, is_asked) = (step > 0, false, false);
        let failed = None;
        let in_session =
            Self { session, parameters, facts, has_joined, epoch, attempt, is_told, is_asked, failed };
        Ok((in_session, group))
    }

    pub(crate) fn session(&self) -> &Session {
        &self.session
    }

    /// Leaves the session.
    pub(crate) fn leave(self) {
        // Whatever the others do, this process has left.
        let _ = self.session.leave();
    }

    /// Registered memory for all epochs.
    pub(crate) fn buffer(&mut self, len: usize) -> Result<Buffer<f32>, SessionError> {
        self.session.buffer(len)
    }

    /// The policy asks for the verdict.
    pub(crate) fn ask(&mut self) {
        self.is_asked = true;
    }

    /// Whether the policy has asked for the verdict since the last call.
    pub(crate) fn take_question(&mut self) -> bool {
        std::mem::take(&mut self.is_asked)
    }

    /// An operation of the attempt has failed: the rest of it is of no use.
    pub(crate) fn fail(&mut self, error: CollectiveError) {
        self.failed.get_or_insert(error);
    }

    pub(crate) fn has_failed(&self) -> bool {
        self.failed.is_some()
    }

    /// The error of [`InSession::fail`].
    pub(crate) fn take_failure(&mut self) -> Result<(), CollectiveError> {
        self.failed.take().map_or(Ok(()), Err)
    }

    /// Begins an attempt, unless a new one has. Returns its step, and the group if it is another
    /// one.
    fn begin(&mut self) -> Result<(u64, Option<Group>), SessionError> {
        let step = match self.attempt {
            Attempt::New { step } => step,
            Attempt::UnderWay | Attempt::Over => self.session.next()?,
        };
        self.attempt = Attempt::UnderWay;
        let newest = self.session.attempted_epoch();
        if self.epoch == newest {
            return Ok((step, None));
        }
        (self.epoch, self.is_told) = (newest, false);
        Ok((step, Some(self.session.group()?.clone())))
    }

    /// Ends the attempt. Returns whether it is committed.
    fn commit(&mut self, outcome: Result<(), CollectiveError>) -> Result<bool, SessionError> {
        (self.attempt, self.failed, self.is_asked) = (Attempt::Over, None, false);
        let is_committed = self.session.commit(outcome)? == Verdict::Committed;
        self.is_told &= is_committed;
        Ok(is_committed)
    }
}

fn session_of(trainer: &mut Trainer) -> &mut InSession {
    trainer.in_session.as_mut().expect("is asked of trainings in sessions")
}

/// The next attempt of a step; `None` after the last one.
pub(crate) fn attempt(trainer: &mut Trainer) -> Result<Option<Step<'_>>, TrainError> {
    loop {
        give_up_what_was_left(trainer)?;
        if session_of(trainer).session.step() >= trainer.steps {
            return Ok(None);
        }
        let number = begin(trainer)?;
        if number == 0 && !is_prepared(trainer)? {
            continue;
        }
        if !std::mem::replace(&mut session_of(trainer).is_told, true) {
            trainer.began.get_or_insert_with(clock::now);
            let ranks = trainer.group.world_size();
            trainer.drive(Event::Membership { ranks, step: number }, &mut |_, _| {})?;
        }
        return Ok(Some(Step { trainer, number }));
    }
}

/// The verdict of the members on what the policy has asked about: whether it counts.
pub(crate) fn is_committed(trainer: &mut Trainer) -> Result<bool, TrainError> {
    let is_committed = session_of(trainer).commit(Ok(()))?;
    if !is_committed {
        take_back(trainer);
    }
    Ok(is_committed)
}

/// A step was made: keeps what a process that joins needs.
pub(crate) fn keep(trainer: &mut Trainer) {
    let agreement = trainer.interpreter.agreement();
    // It does not change after the first step.
    let same = match session_of(trainer).facts[..] {
        [.., 0] => compared(trainer),
        _ => 0,
    };
    let all = 0..trainer.layout.parameters();
    let Trainer { vectors, in_session: Some(in_session), .. } = trainer else { return };
    let [parameters] = vectors.pieces([Vector::Parameters], &all);
    in_session.parameters.update(|kept| kept.copy_from_slice(parameters));
    in_session.facts.update(|facts| {
        (facts[0], facts[1]) = (agreement.places, agreement.digest);
        facts[2] = facts[2].max(same);
    });
}

/// A hash of what has to be the same on all members, other than 0.
fn compared(trainer: &Trainer) -> u64 {
    let scheme = trainer.scheme.to_string().bytes().fold(0, |hash, byte| chain(hash, byte.into()));
    trainer.compared.iter().fold(scheme, |hash, (_, value)| chain(hash, *value)).max(1)
}

/// Takes what the others have kept, if this process has joined.
fn take_over(trainer: &mut Trainer) -> Result<(), TrainError> {
    if !std::mem::take(&mut session_of(trainer).has_joined) {
        return Ok(());
    }
    let same = compared(trainer);
    let (all, rank) = (0..trainer.layout.parameters(), trainer.group.rank());
    let Trainer { vectors, interpreter, in_session: Some(in_session), .. } = trainer else {
        return Ok(());
    };
    let [places, digest, theirs] = in_session.facts[..] else { unreachable!("there are so many") };
    if same != theirs {
        let what = "the hash of scheme, layout, number of steps and what the program compares";
        let [own, theirs] = [same, theirs].map(|hash| format!("{hash:#x}"));
        return Err(TrainError::Different { what, rank, own, other: u32::from(rank == 0), theirs });
    }
    let [parameters] = vectors.pieces([Vector::Parameters], &all);
    parameters.copy_from_slice(&in_session.parameters);
    interpreter.take_over(places, digest);
    Ok(())
}

/// Ends an attempt that has failed here. All members repeat it.
pub(crate) fn give_up(trainer: &mut Trainer, error: CollectiveError) -> Result<(), TrainError> {
    let committed = session_of(trainer).commit(Err(error));
    trainer.requested = None;
    take_back(trainer);
    committed?;
    Ok(())
}

/// Compares the parameters of all members after the last step.
pub(crate) fn finish(trainer: &mut Trainer) -> Result<Trained, TrainError> {
    let end = loop {
        give_up_what_was_left(trainer)?;
        if begin(trainer)? == 0 && !is_prepared(trainer)? {
            continue;
        }
        trainer.requested = None;
        // Sums for the order of steps that do not come any more.
        take_back(trainer);
        match trainer.compare_end() {
            Ok(end) if session_of(trainer).commit(Ok(()))? => break end,
            Ok(_) => {}
            Err(error) => give_up(trainer, error)?,
        }
    };
    trainer.trained(end)
}

/// Ends an attempt that the program has left without [`Step::update`].
fn give_up_what_was_left(trainer: &mut Trainer) -> Result<(), TrainError> {
    let rank = trainer.group.rank();
    if session_of(trainer).attempt == Attempt::UnderWay {
        give_up(trainer, CollectiveError::Own { rank })?;
    }
    Ok(())
}

/// Begins an attempt, and takes the group of its epoch, and what the members have if this process
/// has joined.
fn begin(trainer: &mut Trainer) -> Result<u64, TrainError> {
    let (number, group) = session_of(trainer).begin()?;
    if let Some(group) = group {
        take_back(trainer);
        trainer.metrics = TrainingMetrics::new(&group);
        trainer.group = group;
    }
    take_over(trainer)?;
    Ok(number)
}

/// Whether all members train the same, with the parameters of rank 0; else the attempt is over.
fn is_prepared(trainer: &mut Trainer) -> Result<bool, TrainError> {
    let prepared = trainer.compare().and_then(|()| Ok(trainer.share_parameters()?));
    match prepared {
        Ok(()) => Ok(true),
        Err(TrainError::Collective(error)) => give_up(trainer, error).map(|()| false),
        Err(error) => Err(error),
    }
}

/// Takes the memory of operations back, whatever became of them: nobody needs their results.
fn take_back(trainer: &mut Trainer) {
    trainer.asked.clear();
    while let Some(Started { asked, work }) = trainer.started.pop_front() {
        match (asked.wanted, work) {
            (Wanted::Average { vector, piece, .. }, Work::Average(pending)) => {
                let _ = trainer.back(vector, piece.start, pending.wait());
            }
            (_, Work::Average(pending)) => drop(pending.wait()),
            (_, Work::Total(pending)) => drop(pending.wait()),
            (_, Work::Parts(pending)) => drop(pending.wait()),
        }
    }
}

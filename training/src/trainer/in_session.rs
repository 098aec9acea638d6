//! A training in a session: members end, stop or are out of reach, and the others go on; processes
//! join.
//!
//! The session makes attempts, each in the group of an epoch, and says of each whether all members
//! are done with it. The policy asks by [`Action::Commit`](crate::policy::Action::Commit). Where
//! the answer is no, or a call of the group has failed, what is under way comes back, and the
//! policy hears of the members with the next attempt ([`Event::Membership`]).
//!
//! There are two forms. Where members *share steps*, an attempt is one of a step: it begins before
//! the gradient, and is repeated with that. Where members make steps *by themselves*, it is one of
//! an exchange: it begins after the exchange before, and a member makes its steps in it. A member
//! that hears of another epoch between two of these enters it at once, as the others wait for it
//! there.
//!
//! What all members have in common after a commit ([`Scheme::shared_vectors`]) is a state of the
//! session: a copy, made when a step or an exchange is committed. A process that joins after the
//! first step begins with what it has read there. Where members make steps by themselves it makes
//! all steps between the last exchange and the next, and the others wait for it there. Where
//! members have no vector in common a process begins with the model of one ([`super::models`]).
//!
//! In the beginning members compare what has to be the same on all of them, and get the parameters
//! of rank 0. That is a part of each attempt of the first step, or the first exchange. So all
//! members of an attempt make the same calls. One more attempt behind the last step, or the last
//! exchange, compares the parameters.
//!
//! **Invariants:** what members share changes by committed attempts alone, each once, and so does
//! what the program's optimizer keeps where they share steps; a step that a member makes by itself
//! is made once. The states are what all members have after the last committed attempt. The policy
//! is told of the members before the first operation in an epoch. No operation of an epoch that is
//! over has memory of the trainer.

use pleach_collectives::session::{Heal, Session, SessionError, State, Verdict};
use pleach_collectives::{Buffer, CollectiveError, Group};
use pleach_transport::clock;
use pleach_vocabulary::digest::chain;

use super::metrics::TrainingMetrics;
use super::models::{Models, hand_over};
use super::{Started, Step, TrainError, Trained, Trainer, Wanted, Work, arguments};
use crate::interpreter::Vectors as _;
use crate::ledger::PolicyError;
use crate::policy::{Event, Vector};
use crate::scheme::{Scheme, SharedVector};

/// Elements of [`Kept::facts`].
const FACTS: usize = 5;

/// The session of a training.
pub(crate) struct InSession {
    session: Session,
    /// What a process that joins begins with.
    kept: Kept,
    /// Where each member has a model of its own.
    models: Option<Models>,
    /// Whether this process has joined when all steps were made.
    is_over: bool,
    /// Whether this process begins with that: others have made the steps before.
    has_joined: bool,
    /// The epoch in whose group the trainer works.
    epoch: Option<u64>,
    attempt: Attempt,
    /// Whether the program computes a step.
    is_computing: bool,
    /// Whether the policy knows the members, and has asked for the step that comes next.
    is_told: bool,
    /// Whether the policy asks for the verdict.
    is_asked: bool,
    /// Why the attempt has failed here already.
    failed: Option<CollectiveError>,
}

/// States of the session.
struct Kept {
    /// Vectors after the last commit, and the vectors that begin as copies of them.
    vectors: Vec<(State<f32>, SharedVector)>,
    /// The places where all members have had the same parameters, a hash over these, the step that
    /// comes next, whether all steps are made, and a hash of what has to be the same on all
    /// members.
    facts: State<u64>,
}

impl Kept {
    fn new(
        session: &mut Session,
        shared_vectors: &'static [SharedVector],
        parameters: usize,
    ) -> Result<Self, SessionError> {
        let mut state = |shared: &SharedVector| {
            let state = session.state(&format!("{} of the training", shared.vector.name()), parameters)?;
            Ok((state, *shared))
        };
        let vectors = shared_vectors.iter().map(&mut state).collect::<Result<_, SessionError>>()?;
        Ok(Self { vectors, facts: session.state("facts of the training", FACTS)? })
    }

    /// Whether a trainer has made the steps before.
    fn is_of_a_training(&self) -> bool {
        self.facts[..] != [0; FACTS]
    }
}

/// How far the newest attempt is.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Attempt {
    /// It has begun, and the program does not know of it.
    New {
        step: u64,
    },
    /// It has no verdict yet.
    UnderWay {
        /// All members train the same, with the same parameters in the beginning.
        is_prepared: bool,
    },
    Over,
}

impl InSession {
    /// In the group of this process's first attempt, which begins, with so many parameters.
    pub(crate) fn new(
        mut session: Session,
        scheme: &Scheme,
        parameters: usize,
    ) -> Result<(Self, Group), TrainError> {
        if session.heals() == Heal::Hidden {
            return Err(TrainError::HealsInStep);
        }
        let kept = Kept::new(&mut session, scheme.shared_vectors(), parameters)?;
        let models = scheme.has_own_models().then(|| Models::new(parameters));
        let step = session.next()?;
        if step > 0 && !kept.is_of_a_training() {
            let reason = "its members have made steps without a trainer";
            return Err(TrainError::Late { step, reason });
        }
        let (epoch, group) = (session.attempted_epoch(), session.group()?.clone());
        let attempt = Attempt::New { step };
        let (has_joined, [is_computing, is_told, is_asked]) = (step > 0, [false; 3]);
        let failed = None;
        let own = Self {
            session,
            kept,
            models,
            is_over: false,
            has_joined,
            epoch,
            attempt,
            is_computing,
            is_told,
            is_asked,
            failed,
        };
        Ok((own, group))
    }

    pub(crate) fn session(&self) -> &Session {
        &self.session
    }

    /// Where each member has a model of its own.
    pub(crate) fn models(&mut self) -> Option<&mut Models> {
        self.models.as_mut()
    }

    /// Leaves the session.
    pub(crate) fn leave(self) -> Result<(), SessionError> {
        self.session.leave()
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

    /// Whether the program computes a step.
    pub(crate) fn is_computing(&self) -> bool {
        self.is_computing
    }

    /// The program has computed its step.
    pub(crate) fn come_back(&mut self) {
        self.is_computing = false;
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
            Attempt::UnderWay { .. } | Attempt::Over => self.session.next()?,
        };
        self.attempt = Attempt::UnderWay { is_prepared: step > 0 };
        let newest = self.session.attempted_epoch();
        if self.epoch == newest {
            return Ok((step, None));
        }
        (self.epoch, self.is_told) = (newest, false);
        Ok((step, Some(self.session.group()?.clone())))
    }

    fn is_under_way(&self) -> bool {
        matches!(self.attempt, Attempt::UnderWay { .. })
    }

    /// Whether there is a newer epoch than that of the attempt.
    fn is_left_behind(&self) -> bool {
        Some(self.session.epoch()) != self.epoch
    }

    /// Ends the attempt. Returns whether it is committed.
    fn commit(&mut self, outcome: Result<(), CollectiveError>) -> Result<bool, SessionError> {
        (self.attempt, self.failed, self.is_asked) = (Attempt::Over, None, false);
        self.is_computing = false;
        let is_committed = self.session.commit(outcome)? == Verdict::Committed;
        self.is_told &= is_committed;
        Ok(is_committed)
    }
}

fn session_of(trainer: &mut Trainer) -> &mut InSession {
    trainer.in_session.as_mut().expect("is asked of trainings in sessions")
}

/// The next step, which may be the one before once more; `None` after the last one.
pub(crate) fn attempt(trainer: &mut Trainer) -> Result<Option<Step<'_>>, TrainError> {
    loop {
        give_up_what_was_left(trainer)?;
        if shares_steps(trainer) {
            if session_of(trainer).session.step() >= trainer.steps {
                return Ok(None);
            }
        } else if trainer.requested.is_some_and(|step| step >= trainer.steps) {
            return Ok(None);
        }
        if !is_ready(trainer)? {
            continue;
        }
        // A process that joins behind the last exchange has no step to make.
        let has_all = trainer.requested.is_some_and(|step| step >= trainer.steps);
        if session_of(trainer).is_over || (has_all && !shares_steps(trainer)) {
            return Ok(None);
        }
        let Some(number) = trainer.requested else {
            return Err(PolicyError::Stuck { step: trainer.interpreter.next_step() }.into());
        };
        session_of(trainer).is_computing = true;
        return Ok(Some(Step { trainer, number }));
    }
}

/// Whether the step of the scheme is the session's. The policy of a session is a scheme's.
fn shares_steps(trainer: &Trainer) -> bool {
    trainer.scheme.is_some_and(|scheme| scheme.shares_steps())
}

/// Has an attempt under way whose members the policy knows; false: it is over already.
fn is_ready(trainer: &mut Trainer) -> Result<bool, TrainError> {
    let is_by_step = shares_steps(trainer);
    let own = session_of(trainer);
    if !own.is_under_way() {
        let number = begin(trainer)?;
        if number == 0 && !is_prepared(trainer)? {
            return Ok(false);
        }
        if number == 0 && !is_by_step {
            // Else a member that has made steps would lose them where the first exchange fails.
            if is_committed(trainer)? {
                keep_beginning(trainer);
            }
            return Ok(false);
        }
    } else if own.is_left_behind() {
        give_up_own(trainer)?;
        return Ok(false);
    }
    let own = session_of(trainer);
    if !std::mem::replace(&mut own.is_told, true) {
        let number = own.session.step();
        match hand_over(trainer, number) {
            Err(TrainError::Collective(error)) => return give_up(trainer, error).map(|()| false),
            handed_over => handed_over?,
        }
        // The first attempt of members that make steps by themselves is no exchange.
        let (committed, step) = if is_by_step {
            (number, number)
        } else {
            (number.saturating_sub(1), trainer.interpreter.unfinished_step())
        };
        let ranks = trainer.group.world_size();
        if !session_of(trainer).is_over {
            trainer.began.get_or_insert_with(clock::now);
            trainer.requested = None;
            if !goes_on(trainer, Event::Membership { ranks, step, committed })? {
                return Ok(false);
            }
        }
    }
    // The policy may have ended the exchange that it had to repeat.
    Ok(session_of(trainer).is_under_way())
}

/// Tells the policy of an event. Where the group fails, the attempt is over; returns whether not.
fn goes_on(trainer: &mut Trainer, event: Event) -> Result<bool, TrainError> {
    // Steps are made where the program ends one.
    match trainer.drive(event, &mut |_, _| {}) {
        Err(TrainError::Collective(error)) => give_up(trainer, error).map(|()| false),
        driven => driven.map(|()| true),
    }
}

/// The verdict of the members on what the policy has asked about: whether it counts.
pub(crate) fn is_committed(trainer: &mut Trainer) -> Result<bool, TrainError> {
    if !goes_on_to_the_next(trainer)? {
        return Ok(false);
    }
    let is_committed = session_of(trainer).commit(Ok(()))?;
    if !is_committed {
        take_back(trainer);
    }
    Ok(is_committed)
}

/// Something was committed: keeps what a process that joins needs.
pub(crate) fn keep(trainer: &mut Trainer) {
    let interpreter = &trainer.interpreter;
    let (agreement, next) = (interpreter.agreement(), interpreter.joins_at());
    let is_over = interpreter.has_ended().into();
    // It does not change after the first step.
    let is_first = session_of(trainer).kept.facts[FACTS - 1] == 0;
    let same = if is_first { compared(trainer) } else { 0 };
    let all = 0..trainer.layout.parameters();
    let Trainer { vectors, in_session: Some(InSession { kept, models, .. }), .. } = trainer else {
        return;
    };
    for (kept, SharedVector { vector, .. }) in &mut kept.vectors {
        let [elements] = vectors.pieces([*vector], &all);
        kept.update(|kept| kept.copy_from_slice(elements));
    }
    if let Some(models) = models {
        let [parameters] = vectors.pieces([Vector::Parameters], &all);
        models.keep(parameters);
    }
    kept.facts.update(|facts| {
        let same = facts[FACTS - 1].max(same);
        facts.copy_from_slice(&[agreement.places, agreement.digest, next, is_over, same]);
    });
}

/// All members have the parameters of rank 0, and the policy has not begun. What a process that
/// joins has the parameters from, begins with them, as where the policy begins.
fn keep_beginning(trainer: &mut Trainer) {
    let all = 0..trainer.layout.parameters();
    let Trainer { vectors, in_session: Some(InSession { kept, .. }), .. } = trainer else { return };
    for (_, SharedVector { vector, copies }) in &kept.vectors {
        if copies.contains(&Vector::Parameters) {
            let [parameters, shared] = vectors.pieces([Vector::Parameters, *vector], &all);
            shared.copy_from_slice(parameters);
        }
    }
    keep(trainer);
}

/// A hash of what has to be the same on all members, other than 0.
fn compared(trainer: &Trainer) -> u64 {
    let scheme = trainer.name.bytes().fold(0, |hash, byte| chain(hash, byte.into()));
    trainer.compared.iter().fold(scheme, |hash, (_, value)| chain(hash, *value)).max(1)
}

/// Takes what the others have kept, if this process has joined.
fn take_over(trainer: &mut Trainer) -> Result<(), TrainError> {
    if !std::mem::take(&mut session_of(trainer).has_joined) {
        return Ok(());
    }
    let same = compared(trainer);
    let (all, rank) = (0..trainer.layout.parameters(), trainer.group.rank());
    let Trainer { vectors, interpreter, in_session: Some(own), .. } = trainer else { return Ok(()) };
    let kept = &own.kept;
    let [places, digest, next, is_over, theirs] = kept.facts[..] else { unreachable!("there are so many") };
    if same != theirs {
        let what = "the hash of scheme, layout, number of steps and what the program compares";
        let [own, theirs] = [same, theirs].map(|hash| format!("{hash:#x}"));
        return Err(TrainError::Different { what, rank, own, other: u32::from(rank == 0), theirs });
    }
    for (kept, SharedVector { vector, copies }) in &kept.vectors {
        for vector in std::iter::once(vector).chain(*copies) {
            let [elements] = vectors.pieces([*vector], &all);
            elements.copy_from_slice(kept);
        }
    }
    interpreter.take_over(places, digest, next);
    own.models.iter_mut().for_each(Models::miss);
    own.is_over = is_over != 0;
    Ok(())
}

/// Ends an attempt that has failed here. All members repeat it.
pub(crate) fn give_up(trainer: &mut Trainer, error: CollectiveError) -> Result<(), TrainError> {
    trainer.requested = None;
    if !goes_on_to_the_next(trainer)? {
        return Ok(());
    }
    let committed = session_of(trainer).commit(Err(error));
    take_back(trainer);
    committed?;
    Ok(())
}

/// Begins an attempt where the policy has asked for one exchange behind the other; false: in
/// another epoch, where nothing of the one that is over counts.
fn goes_on_to_the_next(trainer: &mut Trainer) -> Result<bool, TrainError> {
    if session_of(trainer).is_under_way() {
        return Ok(true);
    }
    begin(trainer)?;
    Ok(session_of(trainer).is_told)
}

/// Ends the training of this member, and compares the parameters of all members.
pub(crate) fn finish(trainer: &mut Trainer) -> Result<Trained, TrainError> {
    let end = loop {
        give_up_what_was_left(trainer)?;
        if shares_steps(trainer) {
            if begin(trainer)? == 0 && !is_prepared(trainer)? {
                continue;
            }
            trainer.requested = None;
            // Sums for the order of steps that do not come any more.
            take_back(trainer);
        } else if !is_ready(trainer)? {
            continue;
        } else if !trainer.interpreter.is_stopped() && !session_of(trainer).is_over {
            trainer.requested = None;
            goes_on(trainer, Event::Stop)?;
            continue;
        }
        match trainer.compare_end() {
            Ok(end) if session_of(trainer).commit(Ok(()))? => break end,
            Ok(_) => {}
            Err(error) => give_up(trainer, error)?,
        }
    };
    trainer.trained(end)
}

/// Ends the attempt of a step that the program has left without [`Step::update`].
fn give_up_what_was_left(trainer: &mut Trainer) -> Result<(), TrainError> {
    let own = session_of(trainer);
    let is_left = own.is_computing || own.attempt == Attempt::UnderWay { is_prepared: false };
    if is_left { give_up_own(trainer) } else { Ok(()) }
}

fn give_up_own(trainer: &mut Trainer) -> Result<(), TrainError> {
    let rank = trainer.group.rank();
    give_up(trainer, CollectiveError::Own { rank })
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
    let compared = arguments::compare(&trainer.group, &trainer.name, &trainer.compared);
    let prepared = compared.and_then(|()| Ok(trainer.share_parameters()?));
    match prepared {
        Ok(()) => {
            session_of(trainer).attempt = Attempt::UnderWay { is_prepared: true };
            Ok(true)
        }
        Err(TrainError::Collective(error)) => give_up(trainer, error).map(|()| false),
        Err(error) => Err(error),
    }
}

/// Takes the memory of operations back, whatever became of them: nobody needs their results.
fn take_back(trainer: &mut Trainer) {
    trainer.asked.clear();
    trainer.lines.forget();
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

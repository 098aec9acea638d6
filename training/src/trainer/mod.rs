//! Trains on the ranks of a group: the driver of a [`Scheme`] whose gradients the program computes.
//!
//! ```
//! use pleach_collectives::{Group, Options};
//! use pleach_training::{Layout, Sgd, Trainer};
//! # use pleach_transport::rendezvous::World;
//! # let group = Group::join(&Options::new(World::alone()))?;
//! let layout = Layout::of(&[3, 1]);
//! let mut trainer = Trainer::new(&group, &"local-sgd:every=8".parse()?, &layout, 20)?;
//! let mut sgd = Sgd::new(layout.parameters(), 0.1, 0.9);
//! while let Some(mut step) = trainer.step()? {
//!     let (parameters, gradient) = step.vectors()?;
//!     let loss = parameters.iter().map(|x| (x - 1.0).powi(2)).sum();
//!     gradient.iter_mut().zip(parameters).for_each(|(g, x)| *g = 2.0 * (x - 1.0));
//!     step.update(|parameters, gradient| sgd.step(parameters, gradient), loss)?;
//! }
//! let trained = trainer.finish()?;
//! assert!(trained.parameters_equal);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Operations are carried on by the group's thread while the program computes. A rank that has
//! nothing to compute waits for them in the order in which they were started. Reads and writes of a
//! scheme go through a [`Window`](pleach_collectives::Window) on the program's thread: a rank hears
//! of what its peers have written when its gradient is complete, or when it waits.

mod arguments;
mod buckets;
mod checkpoints;
mod error;
mod in_session;
mod line;
mod mean;
mod messages;
mod metrics;
mod models;
mod registered;
mod rounds;
mod trained;

pub(crate) use checkpoints::Kept;

use std::collections::VecDeque;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::Duration;

use pleach_collectives::session::{Session, SessionError};
use pleach_collectives::{Buffer, CollectiveError, Group, Operation, Pending, PendingError, Rank, ReduceOp};
use pleach_transport::clock::{self, Nanos};
use pleach_vocabulary::digest::chain;

use crate::compression::{Compression, Parts};
use crate::interpreter::{Interpreter, Plan, Request, Vectors, combine, digest, encode};
use crate::layout::{Bucket, Layout};
use crate::ledger::PolicyError;
use crate::policy::{Event, OperationId, Outcome, Vector};
use crate::replay::{Log, Whole};
use crate::rows::Rows;
use crate::scheme::Scheme;
pub use error::TrainError;
use in_session::InSession;
use messages::Messages;
use metrics::TrainingMetrics;
use registered::RegisteredVectors;
pub use registered::VectorMemory;
use rounds::Lines;
pub use trained::{Progress, Trained};

/// Compared between ranks: the checkpoint that they go on from.
const CHECKPOINT: &str = "the mark of the checkpoint";

/// What all ranks have at the end, compared.
struct End {
    progress: Progress,
    guarantee_held: bool,
    parameters_equal: bool,
}

/// An operation that was started.
struct Started {
    asked: Asked,
    work: Work,
}

/// What of an operation is under way.
enum Work {
    /// All of it, with the piece.
    Average(Pending<Buffer<f32>>),
    /// Encoded parts travel to their owners; what comes is the second buffer.
    Parts(Pending<(Buffer<u8>, Buffer<u8>)>),
    /// The sums of numbers.
    Total(Pending<Buffer<u64>>),
}

/// What the policy has asked for.
struct Asked {
    id: OperationId,
    wanted: Wanted,
}

/// An all-reduce.
enum Wanted {
    /// Of a piece of a vector.
    Average { vector: Vector, piece: Range<usize>, compression: Compression },
    /// Of numbers.
    Total(Vec<u64>),
}

/// What a rank did, and how long that took.
#[derive(Clone, Copy, Debug, Default)]
struct Times {
    steps: u64,
    /// With nothing to compute.
    waiting: Duration,
    /// With an operation under way.
    communicating: Duration,
    /// When the first of the operations under way was started.
    busy_since: Option<Nanos>,
    /// Bytes of the pieces that were averaged, read and written.
    bytes: u64,
    /// See [`Progress::exchange_ranks_max`].
    exchange_ranks_max: u32,
}

/// A training of one rank; see the module.
pub struct Trainer {
    /// In a session: of the epoch of the newest attempt.
    group: Group,
    in_session: Option<InSession>,
    /// The text of the scheme, or the name of the program's own policy.
    name: String,
    /// `None`: the policy is the program's own.
    scheme: Option<Scheme>,
    layout: Layout,
    steps: u64,
    /// What must be the same on all ranks, besides the scheme.
    compared: Vec<(&'static str, u64)>,
    interpreter: Interpreter,
    vectors: RegisteredVectors,
    requests: Vec<Request>,
    /// Operations that the policy has asked for and that are not started.
    asked: VecDeque<Asked>,
    started: VecDeque<Started>,
    /// Registered memory of encoded pieces that are there, and memory to encode in.
    spare_bytes: Vec<[Buffer<u8>; 2]>,
    encoded: Vec<u8>,
    messages: Messages,
    lines: Lines,
    /// The step that the policy has asked for.
    requested: Option<u64>,
    /// By bucket: whether the policy was told that this step needs it.
    needed: Vec<bool>,
    is_by_bucket: bool,
    began: Option<Nanos>,
    /// The event with which the policy begins.
    begins_with: Event,
    /// The checkpoint that was saved or taken last.
    checkpoint: Option<PathBuf>,
    log: Option<Log>,
    times: Times,
    /// See [`Progress::spread`].
    spread: Option<f64>,
    /// Whether it is measured before the last exchange.
    is_checked: bool,
    metrics: TrainingMetrics,
}

impl Trainer {
    /// A training of `steps` steps; the arguments are the same on all ranks. The parameters begin
    /// as zeros: see [`Trainer::parameters_mut`].
    ///
    /// # Errors
    ///
    /// No memory, or it cannot be registered; [`TrainError::NoParameters`],
    /// [`TrainError::Refused`].
    pub fn new(group: &Group, scheme: &Scheme, layout: &Layout, steps: u64) -> Result<Self, TrainError> {
        if layout.parameters() == 0 {
            return Err(TrainError::NoParameters);
        }
        let plan = scheme.plan(layout, group.rank(), group.world_size())?;
        let vectors = RegisteredVectors::new(&plan, |len| group.buffer(len))?;
        let scheme = (scheme.to_string(), Some(*scheme));
        Ok(Self::with_vectors(group, (plan, vectors), scheme, layout, steps))
    }

    /// A training by a policy of the program's own, as
    /// [`Simulation::of_plans`](crate::Simulation::of_plans) simulates it. All ranks give the same
    /// name, which is compared, and which checkpoints keep as that of the scheme. A plan is one of
    /// this layout, and of this rank in the group.
    ///
    /// [`Trainer::averaged`] is asked for at the same place among the averages of all ranks. The
    /// spread is not measured before the last exchange. A log could not be replayed, so there is
    /// none.
    ///
    /// # Errors
    ///
    /// [`TrainError::Plan`]; those of [`Trainer::new`].
    pub fn of_plan(
        group: &Group,
        name: &str,
        plan: Plan,
        layout: &Layout,
        steps: u64,
    ) -> Result<Self, TrainError> {
        if layout.parameters() == 0 {
            return Err(TrainError::NoParameters);
        }
        arguments::check_plan(&plan, layout, group)?;
        let vectors = RegisteredVectors::new(&plan, |len| group.buffer(len))?;
        Ok(Self::with_vectors(group, (plan, vectors), (name.to_owned(), None), layout, steps))
    }

    /// A training of `steps` steps in a session, which it leaves at its end; the arguments are
    /// the same on all members. When members end, stop or are out of reach, the others go on
    /// ([`Scheme::after_loss`]), each with what it has made by itself. By [`Scheme::Sync`] a step
    /// in which that happened is computed again, by the members that there are then
    /// ([`Step::members`]). By other schemes the exchange is made again. Each step and each
    /// exchange counts once, on all of them.
    ///
    /// A step of the session is a step of `Sync`, and an exchange of other schemes, the first of
    /// which gives all members the parameters of rank 0. So the deadline of a call
    /// (`Options::timeout`) covers the steps between two exchanges.
    ///
    /// A process that joins while the others train begins with what they have in common: their
    /// parameters, those of the last exchange where ranks make steps by themselves, the anchor of
    /// the outer optimizer, or the centre. By `Bidmach` it begins with the model of one of them.
    /// By `Sync`, what the program's optimizer keeps is a state of the program's own
    /// ([`Session::state`]), declared before this call, and changed with each step; it is there
    /// when this returns.
    ///
    /// The session makes steps by this trainer alone. Where it is told to leave
    /// ([`Session::leave_on`]), a call returns `SessionError::Left`: see [`Trainer::leave`].
    ///
    /// # Errors
    ///
    /// [`Refusal::Members`](crate::Refusal::Members), if nobody trains by the scheme in a session;
    /// [`TrainError::Late`]; [`TrainError::HealsInStep`]; [`TrainError::Session`]; those of
    /// [`Trainer::new`].
    pub fn in_session(
        session: Session,
        scheme: &Scheme,
        layout: &Layout,
        steps: u64,
    ) -> Result<Self, TrainError> {
        if layout.parameters() == 0 {
            return Err(TrainError::NoParameters);
        }
        scheme.plan_in_session(layout, 0, 1)?;
        let (seat, seats) = (session.seat().0, session.seats());
        let (mut in_session, group) = InSession::new(session, scheme, layout.parameters())?;
        let plan = scheme.plan_in_session(layout, seat, seats)?;
        let vectors = RegisteredVectors::new(&plan, |len| in_session.buffer(len))?;
        let (in_session, scheme) = (Some(in_session), (scheme.to_string(), Some(*scheme)));
        Ok(Self { in_session, ..Self::with_vectors(&group, (plan, vectors), scheme, layout, steps) })
    }

    fn with_vectors(
        group: &Group,
        (plan, vectors): (Plan, RegisteredVectors),
        (name, scheme): (String, Option<Scheme>),
        layout: &Layout,
        steps: u64,
    ) -> Self {
        let numbers = layout.layers().iter().copied().chain(layout.row());
        let hash = numbers.fold(0, |hash, number| chain(hash, number as u64));
        Self {
            group: group.clone(),
            in_session: None,
            name,
            scheme,
            layout: layout.clone(),
            steps,
            compared: vec![("the hash of the layout", hash), ("the number of steps", steps), (CHECKPOINT, 0)],
            needed: vec![false; plan.buckets.len()],
            interpreter: Interpreter::new(plan, false),
            vectors,
            requests: Vec::new(),
            asked: VecDeque::new(),
            started: VecDeque::new(),
            spare_bytes: Vec::new(),
            encoded: Vec::new(),
            messages: Messages::new(group.world_size()),
            lines: Lines::default(),
            requested: None,
            is_by_bucket: false,
            began: None,
            begins_with: Event::Start,
            checkpoint: None,
            log: None,
            times: Times::default(),
            spread: None,
            is_checked: false,
            metrics: TrainingMetrics::new(group),
        }
    }

    /// The session of a training in one.
    #[must_use]
    pub fn session(&self) -> Option<&Session> {
        self.in_session.as_ref().map(InSession::session)
    }

    /// Refuses what a training in a session has not.
    fn expect_group(&self, what: &'static str) -> Result<(), TrainError> {
        if self.in_session.is_some() { Err(TrainError::InSession { what }) } else { Ok(()) }
    }

    /// The same training, which hashes the parameters wherever the scheme guarantees that all ranks
    /// have the same. [`Trainer::finish`] compares the hashes. Otherwise only the parameters at the
    /// end are compared. [`Progress::spread`] is measured before the last exchange.
    #[must_use]
    pub fn checked(mut self) -> Self {
        self.interpreter.hash_agreements();
        self.is_checked = true;
        self
    }

    /// The same training, which writes what its policy is told, and what that does, to a file of
    /// this rank in a folder; see [`crate::replay`]. Before the first step, and before
    /// [`Trainer::restore`].
    ///
    /// # Errors
    ///
    /// The file cannot be made. That it cannot be written is an error of [`Trainer::finish`].
    /// [`TrainError::NoScheme`], by a policy of the program's own.
    pub fn logged(self, folder: &Path) -> Result<Self, TrainError> {
        self.logged_as(folder, None)
    }

    /// The same of a training that is a part of another one.
    pub(crate) fn logged_as(mut self, folder: &Path, part_of: Option<Whole>) -> Result<Self, TrainError> {
        self.expect_group("a log")?;
        let place = (self.group.rank(), self.group.world_size());
        let scheme = self.scheme.ok_or(TrainError::NoScheme)?;
        let log = Log::create(folder, &scheme, &self.layout, place, self.is_by_bucket, part_of)?;
        self.interpreter.wrap(|policy| log.of(policy));
        self.log = Some(log);
        Ok(self)
    }

    /// The same training, which compares one more number between all ranks before the first step,
    /// such as a seed or a hash of data. `what` names it, as "the seed".
    #[must_use]
    pub fn comparing(mut self, what: &'static str, value: u64) -> Self {
        self.compared.push((what, value));
        self
    }

    /// The parameters. Before the first step: those of rank 0 are where all ranks begin.
    pub fn parameters_mut(&mut self) -> &mut [f32] {
        let [parameters] = self.vectors.pieces([Vector::Parameters], &(0..self.layout.parameters()));
        parameters
    }

    /// The memory of the parameters and of the gradient, for programs in other languages: each has
    /// as many elements as the layout. It stays where it is as long as the trainer, the [`Trained`]
    /// or these values. `None` while a bucket is being averaged.
    ///
    /// A program that reaches it by its address leaves such a bucket alone, and everything while a
    /// call is under way, but for what [`Step::update`] hands to the optimizer.
    pub fn memory(&mut self) -> Option<[VectorMemory; 2]> {
        let [parameters, gradient] = [Vector::Parameters, Vector::Gradient]
            .map(|vector| self.vectors.memory(vector, self.layout.parameters()));
        Some([parameters?, gradient?])
    }

    /// How far this rank has come.
    #[must_use]
    pub fn progress(&self) -> Progress {
        let time = self.began.map_or(Duration::ZERO, |began| clock::now().since(began));
        let Times { steps, waiting, communicating, bytes, exchange_ranks_max, .. } = self.times;
        let (staleness, agreements) = (self.interpreter.staleness(), self.interpreter.agreement().places);
        Progress {
            steps,
            time,
            waiting,
            communicating,
            bytes,
            exchange_ranks_max,
            staleness,
            agreements,
            spread: self.spread,
        }
    }

    /// The mean of all ranks' parameters, between two steps. All ranks call it, after as many
    /// steps. Meanwhile this rank answers its peers. The training is as before, but with
    /// [`Scheme::Bap`]: there others may wait until this rank has a newer copy of the table, so it
    /// takes one.
    ///
    /// With [`Scheme::ElasticBsp`] ranks make different numbers of steps, and all have the same
    /// parameters at its barriers: a rank gets these there by itself, and an error elsewhere.
    ///
    /// # Errors
    ///
    /// [`TrainError::UnderWay`], if a bucket is ready already; [`TrainError::NoCommonPlace`]; see
    /// [`TrainError`].
    pub fn averaged(&mut self) -> Result<Buffer<f32>, TrainError> {
        self.expect_group("the mean between two steps")?;
        if let Some(mut step) = self.step()? {
            step.vectors()?;
        }
        match self.scheme {
            Some(Scheme::ElasticBsp { .. }) => mean::at_barrier(self),
            _ => mean::of(self),
        }
    }

    /// The next step of this rank; `None` after the last one. The first call compares the arguments
    /// of all ranks and gives all ranks the parameters of rank 0. In a session it may be the step
    /// before once more, as nobody has applied it.
    ///
    /// # Errors
    ///
    /// See [`TrainError`].
    pub fn step(&mut self) -> Result<Option<Step<'_>>, TrainError> {
        if self.in_session.is_some() {
            return in_session::attempt(self);
        }
        if self.began.is_none() {
            self.begin()?;
        }
        match self.requested {
            Some(number) if number < self.steps => Ok(Some(Step { trainer: self, number })),
            _ => {
                self.stop()?;
                Ok(None)
            }
        }
    }

    /// The step that has begun and has not ended: for those who cannot keep a [`Step`], as programs
    /// in other languages.
    pub fn begun(&mut self) -> Option<Step<'_>> {
        let is_computed = |in_session: &InSession| in_session.is_computing();
        let has_begun = self.began.is_some() && self.in_session.as_ref().is_none_or(is_computed);
        let number = self.requested.filter(|number| has_begun && *number < self.steps)?;
        Some(Step { trainer: self, number })
    }

    /// Ends the training after the steps made so far, which are as many on all ranks, and compares
    /// the parameters of all ranks.
    ///
    /// # Errors
    ///
    /// See [`TrainError`].
    pub fn finish(mut self) -> Result<Trained, TrainError> {
        let trained = self.last_exchange()?;
        // Whatever the others do, this rank has ended.
        let _ = self.leave();
        Ok(trained)
    }

    /// As [`Trainer::finish`]. After an error the program gets the trainer back, to leave a session
    /// or to go on.
    ///
    /// # Errors
    ///
    /// See [`TrainError`].
    pub fn end(mut self) -> Result<Trained, (TrainError, Box<Self>)> {
        match self.last_exchange() {
            Ok(trained) => {
                let _ = self.leave(); // As above.
                Ok(trained)
            }
            Err(error) => Err((error, Box::new(self))),
        }
    }

    /// Leaves the session of a training in one: after `SessionError::Left`, or for good before
    /// the last step. The others go on. (To drop the trainer is to them as the end of the process.)
    ///
    /// # Errors
    ///
    /// Those of [`Session::leave`].
    pub fn leave(mut self) -> Result<(), SessionError> {
        let in_session = self.in_session.take();
        // The group of an epoch ends before its session.
        drop(self);
        in_session.map_or(Ok(()), InSession::leave)
    }

    fn last_exchange(&mut self) -> Result<Trained, TrainError> {
        if self.in_session.is_some() {
            return in_session::finish(self);
        }
        if self.began.is_none() {
            self.begin()?;
        }
        self.stop()?;
        let end = self.compare_end()?;
        self.trained(end)
    }

    /// Compares what all ranks have at the end.
    fn compare_end(&mut self) -> Result<End, CollectiveError> {
        let progress = self.progress();
        let agreement = self.interpreter.agreement();
        let hashes = [digest(self.parameters_mut()), chain(agreement.digest, agreement.places)];
        let broken = u64::from(agreement.is_broken);
        let ([parameters_equal, agreed], broken) = compare_on_all(&self.group, hashes, broken)?;
        Ok(End { progress, guarantee_held: agreed && broken == 0, parameters_equal })
    }

    /// What is left of the training.
    fn trained(&mut self, end: End) -> Result<Trained, TrainError> {
        let End { progress, guarantee_held, parameters_equal } = end;
        self.metrics.set(&progress);
        let all = 0..self.layout.parameters();
        if let Some(window) = self.vectors.window.take() {
            window.close()?;
        }
        self.log.take().map_or(Ok(()), |log| log.end())?;
        let [parameters, gradient] = [Vector::Parameters, Vector::Gradient]
            .map(|vector| self.vectors.take(vector, &all).expect("no operation is under way"));
        let (rank, ranks) = (self.group.rank(), self.group.world_size());
        let remark = self.interpreter.remark();
        Ok(Trained { rank, ranks, parameters, gradient, progress, guarantee_held, parameters_equal, remark })
    }

    fn begin(&mut self) -> Result<(), TrainError> {
        arguments::compare(&self.group, &self.name, &self.compared)?;
        // In a checkpoint each rank has its own.
        if self.begins_with == Event::Start {
            self.share_parameters()?;
        }
        self.open_window()?;
        self.open_lines()?;
        self.began = Some(clock::now());
        self.drive(self.begins_with, &mut |_, _| {})?;
        if self.vectors.window.is_some() {
            self.group.barrier()?;
        }
        Ok(())
    }

    /// Gives all ranks the parameters of rank 0.
    fn share_parameters(&mut self) -> Result<(), CollectiveError> {
        let all = 0..self.layout.parameters();
        let mut parameters = self.vectors.take(Vector::Parameters, &all).expect("nothing is under way");
        let sent = self.group.broadcast(&mut parameters, 0);
        self.vectors.put(Vector::Parameters, 0, parameters);
        sent
    }

    fn stop(&mut self) -> Result<(), TrainError> {
        // Only a rank that is asked to compute has not been stopped.
        if self.requested.is_some() {
            // Else ranks would ask for the mean at different places among their averages.
            let has_common_place =
                self.scheme.is_some_and(|scheme| !matches!(scheme, Scheme::ElasticBsp { .. }));
            if self.is_checked && has_common_place {
                self.need_all()?;
                mean::of(self)?;
            }
            self.requested = None;
            self.drive(Event::Stop, &mut |_, _| {})?;
        }
        Ok(())
    }

    /// Tells the policy of an event, and goes on until there is something to compute.
    fn drive(
        &mut self,
        event: Event,
        optimizer: &mut dyn FnMut(&mut [f32], &[f32]),
    ) -> Result<(), TrainError> {
        self.deliver(event, optimizer)?;
        loop {
            if self.in_session.as_mut().is_some_and(InSession::take_question) {
                if !in_session::is_committed(self)? {
                    return Ok(());
                }
                self.deliver(Event::Committed, optimizer)?;
                in_session::keep(self);
                continue;
            }
            if self.send_next(optimizer)? {
                continue;
            }
            if self.give_next(optimizer)? {
                continue;
            }
            if self.requested.is_some() {
                // What the policy does not wait for travels while the program computes.
                return self.start_asked();
            }
            if self.hear_next(optimizer)? {
                continue;
            }
            if self.started.is_empty()
                && self.asked.len() == 1
                && let Some(Asked { id, wanted: Wanted::Average { vector, piece, .. } }) =
                    self.asked.pop_front_if(|asked| asked.is_plain())
            {
                self.run(vector, &piece)?;
                self.deliver(Event::Done(id, Outcome::Averaged), optimizer)?;
                continue;
            }
            self.start_asked()?;
            if let Some(started) = self.started.pop_front() {
                self.await_started(started, optimizer)?;
                continue;
            }
            if (self.interpreter.has_ended() && self.messages.are_sent()) || self.interpreter.is_at_rest() {
                return Ok(());
            }
            self.await_message()?;
        }
    }

    /// A bucket of the gradient is complete.
    fn ready(&mut self, bucket: Bucket) -> Result<(), TrainError> {
        if self.in_session.as_ref().is_some_and(InSession::has_failed) {
            return Ok(());
        }
        self.need_all()?;
        self.hear_ended()?;
        self.deliver(Event::Ready(bucket), &mut |_, _| {})?;
        self.start_asked()
    }

    /// The gradient of a step is complete.
    fn complete(
        &mut self,
        step: u64,
        optimizer: &mut dyn FnMut(&mut [f32], &[f32]),
    ) -> Result<(), TrainError> {
        self.times.steps += 1;
        if let Some(in_session) = &mut self.in_session {
            in_session.come_back();
            in_session.take_failure()?;
        }
        self.need_all()?;
        for bucket in 0..self.interpreter.buckets().len() {
            if self.interpreter.is_unfinished(bucket) {
                self.deliver(Event::Ready(bucket), &mut |_, _| {})?;
            }
        }
        self.hear_all(optimizer)?;
        self.requested = None;
        if self.vectors.window.is_some() {
            // Ranks that share a processor take turns step by step. Otherwise one would make all
            // steps of its time slice against parameters that no other rank renews meanwhile.
            std::thread::yield_now();
        }
        self.drive(Event::Computed { step }, optimizer)
    }

    /// Waits for the end of an all-reduce.
    fn await_started(
        &mut self,
        started: Started,
        optimizer: &mut dyn FnMut(&mut [f32], &[f32]),
    ) -> Result<(), TrainError> {
        let Started { asked: Asked { id, wanted }, work } = started;
        let before = clock::now();
        let mut totals = None;
        let part = match (wanted, work) {
            (Wanted::Average { vector, piece, .. }, Work::Average(pending)) => {
                self.back(vector, piece.start, pending.wait())
            }
            (Wanted::Average { vector, piece, compression }, Work::Parts(pending)) => {
                self.exchange_averages(vector, &piece, compression, pending)
            }
            (_, Work::Total(pending)) => match pending.wait() {
                Ok(sums) => {
                    totals = Some(sums);
                    Ok(())
                }
                Err(PendingError { error, .. }) => Err(error.into()),
            },
            (Wanted::Total(_), _) => unreachable!("numbers are added up"),
        };
        let now = clock::now();
        self.times.waiting += now.since(before);
        if self.started.is_empty() {
            let since = self.times.busy_since.take().unwrap_or(now);
            self.times.communicating += now.since(since);
        }
        part?;
        let Some(totals) = totals else {
            return self.deliver(Event::Done(id, Outcome::Averaged), optimizer);
        };
        for (place, total) in (0..).zip(totals.iter()) {
            self.deliver(Event::Totalled { place, total: *total }, optimizer)?;
        }
        self.deliver(Event::Done(id, Outcome::Totalled), optimizer)
    }

    /// Puts the piece of an operation back, also after an error.
    fn back(
        &mut self,
        vector: Vector,
        begin: usize,
        result: Result<Buffer<f32>, PendingError<Buffer<f32>>>,
    ) -> Result<(), TrainError> {
        let (part, error) = match result {
            Ok(part) => (part, None),
            Err(PendingError { error, data }) => (data, Some(error)),
        };
        self.vectors.put(vector, begin, part);
        error.map_or(Ok(()), |error| Err(error.into()))
    }

    /// Tells the policy of an event and notes what it asks for.
    fn deliver(
        &mut self,
        event: Event,
        optimizer: &mut dyn FnMut(&mut [f32], &[f32]),
    ) -> Result<(), TrainError> {
        let now = Nanos(clock::now().0 - self.began.unwrap_or_default().0);
        self.interpreter.deliver(event, now, &mut self.vectors, optimizer, &mut self.requests)?;
        self.vectors.take_error()?;
        for request in self.requests.drain(..) {
            match request {
                Request::Compute { step } => {
                    self.requested = Some(step);
                    self.needed.fill(false);
                }
                // The interpreter knows which.
                Request::Supply { .. } => {}
                Request::Average { id, vector, piece, compression } => {
                    let wanted = Wanted::Average { vector, piece, compression };
                    self.asked.push_back(Asked { id, wanted });
                }
                Request::Total { id, numbers } => {
                    self.asked.push_back(Asked { id, wanted: Wanted::Total(numbers) });
                }
                Request::Contribute { .. }
                | Request::StepAside { .. }
                | Request::ComeBack { .. }
                | Request::Leave { .. } => {
                    self.lines.ask(request);
                }
                Request::Commit { .. } => self.in_session.as_mut().ok_or(PolicyError::NoSession)?.ask(),
                request => self.messages.ask(request),
            }
        }
        Ok(())
    }

    /// Notes an exchange of so many ranks.
    fn note_exchange(&mut self, ranks: u32) {
        if !self.interpreter.is_stopped() {
            self.times.exchange_ranks_max = self.times.exchange_ranks_max.max(ranks);
        }
    }

    /// Carries an operation out that is the only one: a blocking call needs no other thread.
    fn run(&mut self, vector: Vector, piece: &Range<usize>) -> Result<(), TrainError> {
        self.note_exchange(self.group.world_size());
        let mut part = self.vectors.take(vector, piece).expect("the ledger found it free");
        self.times.bytes += size_of_val(&part[..]) as u64;
        let before = clock::now();
        let result = self.group.run(Operation::all_reduce(&mut part, ReduceOp::Avg));
        let time = clock::now().since(before);
        self.times.waiting += time;
        self.times.communicating += time;
        self.vectors.put(vector, piece.start, part);
        Ok(result?)
    }

    fn start_asked(&mut self) -> Result<(), TrainError> {
        while let Some(asked) = self.asked.pop_front() {
            if let Wanted::Average { .. } = asked.wanted {
                self.note_exchange(self.group.world_size());
            }
            let work = match &asked.wanted {
                Wanted::Total(numbers) => self.start_total(numbers)?,
                Wanted::Average { vector, piece, compression: Compression::None } => {
                    let part = self.vectors.take(*vector, piece).expect("the ledger found it free");
                    self.times.bytes += size_of_val(&part[..]) as u64;
                    match self.group.start(Operation::all_reduce(part, ReduceOp::Avg)) {
                        Ok(pending) => Work::Average(pending),
                        Err(error) => return self.back(*vector, piece.start, Err(error)),
                    }
                }
                Wanted::Average { vector, piece, compression } => {
                    self.start_compressed(*vector, piece, *compression)?
                }
            };
            self.times.busy_since.get_or_insert_with(clock::now);
            self.started.push_back(Started { asked, work });
        }
        Ok(())
    }

    fn start_total(&mut self, numbers: &[u64]) -> Result<Work, TrainError> {
        let mut sums = self.group.buffer(numbers.len())?;
        sums.copy_from_slice(numbers);
        let pending = self.group.start(Operation::all_reduce(sums, ReduceOp::Sum));
        Ok(Work::Total(pending.map_err(|failed| failed.error)?))
    }
}

impl Asked {
    /// Whether a blocking call carries it out.
    fn is_plain(&self) -> bool {
        matches!(self.wanted, Wanted::Average { compression: Compression::None, .. })
    }
}

/// Compressed averages: encoded parts go to their owners while the program computes, and what the
/// owners make of them comes back when this rank waits for it.
impl Trainer {
    fn parts(&self, piece: &Range<usize>, compression: Compression) -> Parts {
        Parts { compression, ranks: self.group.world_size(), elements: piece.len() }
    }

    fn start_compressed(
        &mut self,
        vector: Vector,
        piece: &Range<usize>,
        compression: Compression,
    ) -> Result<Work, TrainError> {
        let parts = self.parts(piece, compression);
        encode(&mut self.vectors, &parts, vector, piece, &mut self.encoded);
        let len = self.encoded.len();
        let [mut input, output] = match self.spare_bytes.iter().position(|[one, _]| one.len() == len) {
            Some(place) => self.spare_bytes.swap_remove(place),
            None => [self.group.buffer(len)?, self.group.buffer(len)?],
        };
        input.copy_from_slice(&self.encoded);
        self.times.bytes += compression.bytes(piece.len()) as u64;
        let pending =
            self.group.start(Operation::all_to_all(input, output)).map_err(|failed| failed.error)?;
        Ok(Work::Parts(pending))
    }

    fn exchange_averages(
        &mut self,
        vector: Vector,
        piece: &Range<usize>,
        compression: Compression,
        pending: Pending<(Buffer<u8>, Buffer<u8>)>,
    ) -> Result<(), TrainError> {
        let parts = self.parts(piece, compression);
        let (input, mut output) = pending.wait().map_err(|failed| failed.error)?;
        combine(&mut self.vectors, &parts, self.group.rank(), piece, &output, &mut self.encoded);
        self.group.all_gather(&self.encoded[..], &mut output)?;
        let [elements] = self.vectors.pieces([vector], piece);
        parts.decode(&output, elements);
        self.spare_bytes.push([input, output]);
        Ok(())
    }
}

/// Whether each of these numbers is the same on all ranks, and the largest of one more.
fn compare_on_all<const N: usize>(
    group: &Group,
    numbers: [u64; N],
    one: u64,
) -> Result<([bool; N], u64), CollectiveError> {
    // The largest number and the complement of the smallest one; equal if they are complements.
    let mut extremes: Vec<u64> = numbers.into_iter().flat_map(|number| [number, !number]).collect();
    extremes.push(one);
    group.all_reduce(&mut extremes, ReduceOp::Max)?;
    let equal = std::array::from_fn(|place| extremes[2 * place] == !extremes[2 * place + 1]);
    Ok((equal, extremes[2 * N]))
}

/// A step of a rank: the gradient of one batch, and the update that follows.
pub struct Step<'a> {
    trainer: &'a mut Trainer,
    number: u64,
}

impl Step<'_> {
    /// Its number, from 0.
    #[must_use]
    pub fn number(&self) -> u64 {
        self.number
    }

    /// The number of this rank in this step, and the number of ranks, which each contribute their
    /// share. In a session both may differ from step to step.
    #[must_use]
    pub fn members(&self) -> (Rank, u32) {
        (self.trainer.group.rank(), self.trainer.group.world_size())
    }

    /// The session of a training in one.
    #[must_use]
    pub fn session(&self) -> Option<&Session> {
        self.trainer.session()
    }

    /// The buckets of the gradient, in the order in which they should become ready.
    #[must_use]
    pub fn buckets(&self) -> &[Range<usize>] {
        self.trainer.interpreter.buckets()
    }

    /// The parameters, and the gradient to be written.
    ///
    /// # Errors
    ///
    /// [`TrainError::UnderWay`], if a bucket of this step is ready already: then
    /// [`Step::bucket`] has the others.
    pub fn vectors(&mut self) -> Result<(&[f32], &mut [f32]), TrainError> {
        self.trainer.need_all()?;
        let parameters = self.trainer.layout.parameters();
        let is_ready = |bucket: &Bucket| !self.trainer.interpreter.is_unfinished(*bucket);
        if let Some(bucket) = (0..self.buckets().len()).find(is_ready) {
            return Err(TrainError::UnderWay { bucket, step: self.number });
        }
        let vectors = self.trainer.vectors.for_computing(parameters, &(0..parameters));
        Ok(vectors.expect("no bucket is ready"))
    }

    /// The rows of a table, of which this step reads and changes some. Nothing was added to the
    /// gradient.
    ///
    /// # Errors
    ///
    /// [`TrainError::NoRows`]; those of [`Step::vectors`].
    pub fn rows(&mut self) -> Result<Rows<'_>, TrainError> {
        let row = self.trainer.layout.row().ok_or(TrainError::NoRows)?;
        let (parameters, gradient) = self.vectors()?;
        Ok(Rows::new(row, parameters, gradient))
    }

    /// The parameters, and a bucket of the gradient to be written.
    ///
    /// # Errors
    ///
    /// [`TrainError::UnderWay`], if it is ready already; [`PolicyError::Bucket`], if there is none.
    pub fn bucket(&mut self, bucket: Bucket) -> Result<(&[f32], &mut [f32]), TrainError> {
        let Some(piece) = self.buckets().get(bucket).cloned() else {
            return Err(PolicyError::Bucket { bucket, step: self.number }.into());
        };
        self.trainer.need_all()?;
        if !self.trainer.interpreter.is_unfinished(bucket) {
            return Err(TrainError::UnderWay { bucket, step: self.number });
        }
        let parameters = self.trainer.layout.parameters();
        let vectors = self.trainer.vectors.for_computing(parameters, &piece);
        Ok(vectors.expect("the bucket is not ready"))
    }

    /// Says that a bucket of the gradient is complete. It may travel while the others are computed.
    ///
    /// # Errors
    ///
    /// [`PolicyError::Bucket`]; see [`TrainError`].
    pub fn ready(&mut self, bucket: Bucket) -> Result<(), TrainError> {
        let started = self.trainer.ready(bucket);
        match (&mut self.trainer.in_session, started) {
            // The step is computed to its end, and repeated.
            (Some(in_session), Err(TrainError::Collective(error))) => {
                in_session.fail(error);
                Ok(())
            }
            (_, started) => started,
        }
    }

    /// Says that the gradient is complete, also the buckets that were not reported, and goes on
    /// until there is something to compute. `optimizer` makes a step of the parameters by the
    /// gradient, when the scheme says so. `loss` is checked only.
    ///
    /// # Errors
    ///
    /// [`TrainError::Loss`], which aborts the group; see [`TrainError`].
    pub fn update(self, mut optimizer: impl FnMut(&mut [f32], &[f32]), loss: f32) -> Result<(), TrainError> {
        let Self { trainer, number: step } = self;
        if !loss.is_finite() {
            trainer.abort();
            let (rank, checkpoint) = (trainer.group.rank(), trainer.checkpoint.take());
            return Err(TrainError::Loss { rank, step, loss, checkpoint });
        }
        match trainer.complete(step, &mut optimizer) {
            Err(TrainError::Collective(error)) if trainer.in_session.is_some() => {
                in_session::give_up(trainer, error)?;
            }
            completed => completed?,
        }
        trainer.metrics.set(&trainer.progress());
        Ok(())
    }
}

//! Trains in virtual time: all ranks in this process, with real gradients.
//!
//! Each rank has its own policy, vectors and optimizer. Gradients are computed for real, and take a
//! computing time that is drawn ([`Computing`]) or was recorded ([`RecordedTimes`]). An all-reduce
//! begins when its last rank has asked for it and the one before has ended. It takes the time that
//! the [`Network`] says, and adds in the order of ranks, as groups do that are
//! [reproducible](pleach_collectives::Reproducible) for a world size. A one-sided read takes the
//! version that is published when it begins. Reads, writes and words take the time that the network
//! says; a rank sends one at a time, and receives one at a time. Those of one rank do not hold up
//! all-reduces.
//!
//! Those are *priced* exchanges. [`Simulation::over_engines`] has them carried out by engines in
//! place of that. [`Faults`] befall ranks and links.
//!
//! **Invariants:** a run is a function of the learner, the scheme and the [`Settings`]: threads
//! compute gradients, and their number changes no bit. An event is handled after all events of
//! earlier instants, and events of one instant in the order in which they were made.

mod averages;
mod computing;
mod engines;
mod error;
mod faults;
mod gradients;
pub mod hybrid;
mod in_lines;
mod mail;
mod network;
mod one_sided;
mod passes;
mod rank;
mod recorded;
mod report;
mod rounds;

use std::collections::VecDeque;
use std::ops::{ControlFlow, Range};
use std::sync::Arc;
use std::time::Duration;

use pleach_collectives::Rank;
use pleach_transport::clock::Nanos;

use crate::checkpoint::{CheckpointError, RankState};
use crate::interpreter::{Plan, Request};
use crate::layout::Bucket;
use crate::learner::Learner;
use crate::ledger::PolicyError;
use crate::policy::{Event, OperationId, Outcome, Reads, Vector};
use crate::scheme::Scheme;
use crate::state::StateError;
use averages::average;
use engines::OverEngines;
use faults::DrawnFaults;
use gradients::Threads;
use mail::{Mail, Message};
use network::{Agenda, OnTheWay, Transfers};
use rank::{SimulatedRank, Wanted};
use rounds::{Completed, Rounds};

pub use computing::{Computing, ComputingTextError};
pub use engines::{
    Arrived, Call as EngineCall, ENGINES_MAX, Engines, Exchanges, LineWord, ReadEnded, RoundEnded,
};
pub use error::SimulationError;
pub use faults::{DRIFT_STEPS, Delays, FAULTS_WITHIN_STEPS, Fault, Faults, UnknownFault};
pub use network::{Network, TransferTime};
pub use recorded::{RecordError, RecordedTimes};
pub use report::{Observation, Settings, Simulated};

/// Parameters from which several threads compute gradients: below, to hand them over takes longer.
const THREADS_FROM: usize = 512;

/// What happens at an instant.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Happening {
    /// A bucket of a rank is computed.
    Ready { rank: Rank, bucket: Bucket },
    /// The forward pass of a rank comes to a bucket.
    Needs { rank: Rank, bucket: Bucket },
    /// A rank has computed a gradient.
    Computed { rank: Rank, step: u64 },
    /// The oldest all-reduce has ended.
    Averaged,
    /// A message is at its receiver.
    Arrives { rank: Rank, message: u64 },
    /// The elements of a read are at the reader.
    ReadEnds { rank: Rank, message: u64 },
    /// The round of a line has ended.
    RoundEnds { line: usize },
    /// The next round of a line may open.
    Look { line: usize },
    /// An operation of a rank in a round has ended.
    Combined { rank: Rank, message: u64 },
    /// The elements of a write may be changed.
    Written { rank: Rank, id: OperationId },
}

/// A read under way.
#[derive(Debug)]
struct Reading {
    id: OperationId,
    into: Vector,
    piece: Range<usize>,
    from: Rank,
    reads: Reads,
    version: u64,
    word: u64,
    /// None: nothing was published yet.
    elements: Option<Arc<[f32]>>,
}

/// An all-reduce of which at least one rank has asked.
#[derive(Debug)]
struct Call {
    first: Rank,
    wanted: Wanted,
    /// The sums of numbers so far.
    totals: Vec<u64>,
    /// By rank.
    asked: Vec<Option<OperationId>>,
    missing: u32,
}

/// Ranks in virtual time; see the module.
pub struct Simulation<'a, L> {
    learner: &'a L,
    /// The parameters of the model.
    parameters: usize,
    /// Threads that compute gradients, at most.
    threads: usize,
    settings: Settings,
    /// In place of drawn ones.
    recorded: Option<Arc<RecordedTimes>>,
    /// What a gradient takes longer.
    exchanges: Duration,
    faults: Faults,
    /// Of a simulation that has begun, if there are any.
    drawn_faults: Option<DrawnFaults>,
    /// The rank that is to end, and the step before which it does.
    death: Option<(Rank, u64)>,
    /// None: exchanges take the time that the network says.
    engines: Option<OverEngines<'a>>,
    ranks: Vec<SimulatedRank>,
    now: Nanos,
    happenings: Agenda<Happening>,
    calls: VecDeque<Call>,
    calls_ended: u64,
    /// When the network is free for the next all-reduce.
    free_from: Nanos,
    transfers: Transfers,
    mail: Mail,
    messages: OnTheWay<Message>,
    readings: OnTheWay<Reading>,
    rounds: Vec<Rounds>,
    /// By rank and its line: which of the rounds.
    lines: Vec<Vec<usize>>,
    completed: OnTheWay<Completed>,
    requests: Vec<Request>,
    /// Whether rank 0 has begun a step that is to be observed.
    is_observed: bool,
    /// The event with which ranks go on.
    begins_with: Event,
    /// The step before which ranks come to rest.
    pauses_at: Option<u64>,
    /// When it is broken off.
    ends_at: Option<Nanos>,
    /// When rank 0 may be observed again, and how much later the next time.
    observed_from: Nanos,
    observed_apart: Duration,
}

impl<'a, L: Learner> Simulation<'a, L> {
    /// Ranks that train by this scheme.
    ///
    /// # Errors
    ///
    /// No ranks, no parameters, or the scheme does not train on so many ranks.
    pub fn new(learner: &'a L, scheme: &Scheme, settings: &Settings) -> Result<Self, SimulationError> {
        let layout = learner.layout();
        let ranks = settings.ranks;
        // A scheme is refused for all ranks or for none.
        if ranks > 0 {
            scheme.plan_by_bucket(&layout, 0, ranks)?;
        }
        let plan = |rank| scheme.plan_by_bucket(&layout, rank, ranks).expect("it was not refused for rank 0");
        Self::of_plans(learner, settings, plan)
    }

    /// The same ranks, which take computing times that were recorded, in place of those that
    /// [`Settings::computing`] draws.
    #[must_use]
    pub fn with_times(self, recorded: Arc<RecordedTimes>) -> Self {
        Self { recorded: Some(recorded), ..self }
    }

    /// The same ranks, each gradient of which takes so much longer, for exchanges that are a part
    /// of it. That counts as computing.
    #[must_use]
    pub fn with_exchanges(self, exchanges: Duration) -> Self {
        Self { exchanges, ..self }
    }

    /// The same ranks, which these faults befall: which rank, when and how much is drawn from
    /// [`Settings::seed`].
    #[must_use]
    pub fn with_faults(self, faults: &Faults) -> Self {
        Self { faults: faults.clone(), ..self }
    }

    /// The same ranks, of which this one ends before this step, as by [`Fault::RankDeath`].
    ///
    /// # Errors
    ///
    /// [`SimulationError::NoDeath`].
    pub fn ending(self, rank: Rank, step: u64) -> Result<Self, SimulationError> {
        let ranks = self.settings.ranks;
        if rank == 0 || rank >= ranks {
            return Err(SimulationError::NoDeath { rank, ranks });
        }
        Ok(Self { death: Some((rank, step)), ..self })
    }

    /// The same ranks, which [`Simulation::run_until`] breaks off after so much virtual time,
    /// wherever they are then. They are observed at the end, and before it at most so often; steps
    /// between two observations are [`Settings::observed_every`] or more.
    #[must_use]
    pub fn until(self, end: Duration, observations: u32) -> Self {
        Self { ends_at: Some(Nanos::ZERO + end), observed_apart: end / observations.max(1), ..self }
    }

    /// The same ranks, each with an engine, which carries its exchanges out over wires that
    /// `connect` makes for them. A network is not asked for times any more. It comes after
    /// computing times and faults.
    ///
    /// # Errors
    ///
    /// [`SimulationError::NoEngines`], [`SimulationError::EngineRanks`]; the engines do not
    /// connect.
    pub fn over_engines(
        mut self,
        connect: impl FnOnce(&Exchanges) -> Result<Box<dyn Engines + 'a>, String>,
    ) -> Result<Self, SimulationError> {
        let ranks = self.settings.ranks;
        if ranks > ENGINES_MAX {
            return Err(SimulationError::EngineRanks { ranks });
        }
        if self.faults.contains(Fault::LinkShrink) {
            let (what, why) = (Fault::LinkShrink.name(), "simulated wires keep their rates");
            return Err(SimulationError::NoEngines { what, why });
        }
        self.draw_faults();
        let delays = self.drawn_faults.as_ref().map_or_else(Delays::default, DrawnFaults::delays);
        let (window, contribution) = (self.ranks[0].window(), self.parameters);
        let lines = self.rounds.iter().map(|rounds| rounds.line().clone()).collect();
        let exchanges = Exchanges { delays, window, lines, contribution };
        let engines = connect(&exchanges).map_err(|cause| SimulationError::Engine { rank: 0, cause })?;
        self.engines = Some(OverEngines::new(engines, self.now, window, &self.lines));
        Ok(self)
    }

    /// Ranks that train by these policies.
    ///
    /// # Errors
    ///
    /// No ranks or no parameters.
    pub fn of_plans(
        learner: &'a L,
        settings: &Settings,
        plan: impl Fn(Rank) -> Plan,
    ) -> Result<Self, SimulationError> {
        if settings.ranks == 0 {
            return Err(SimulationError::NoRanks);
        }
        let parameters = learner.layout().parameters();
        if parameters == 0 {
            return Err(SimulationError::NoParameters);
        }
        // To ask for the processors takes longer than a gradient of a small model.
        let threads = match parameters {
            ..THREADS_FROM => 1,
            _ => std::thread::available_parallelism().map_or(1, usize::from),
        };
        let initial = learner.initial();
        let rank = |rank| SimulatedRank::new(rank, plan(rank), &initial, learner, settings);
        let ranks = (0..settings.ranks).map(rank);
        let ranks: Vec<SimulatedRank> = ranks.collect();
        let mail = Mail::new(ranks.len(), ranks[0].slots());
        let (rounds, lines) = Rounds::of_lines(ranks.iter().map(SimulatedRank::lines));
        Ok(Self {
            learner,
            parameters,
            threads,
            settings: *settings,
            recorded: None,
            exchanges: Duration::ZERO,
            faults: Faults::default(),
            drawn_faults: None,
            death: None,
            engines: None,
            ranks,
            now: Nanos::ZERO,
            happenings: Agenda::default(),
            calls: VecDeque::new(),
            calls_ended: 0,
            free_from: Nanos::ZERO,
            transfers: Transfers::default(),
            mail,
            messages: OnTheWay::default(),
            readings: OnTheWay::default(),
            rounds,
            lines,
            completed: OnTheWay::default(),
            requests: Vec::new(),
            is_observed: false,
            begins_with: Event::Start,
            pauses_at: None,
            ends_at: None,
            observed_from: Nanos::ZERO,
            observed_apart: Duration::ZERO,
        })
    }

    /// Ranks that go on from where [`Simulation::save`] was called, by the same scheme and with the
    /// same settings, but for the number of steps.
    ///
    /// # Errors
    ///
    /// As [`Simulation::new`], and the states are not those of such ranks.
    pub fn restored(
        learner: &'a L,
        scheme: &Scheme,
        settings: &Settings,
        saved: &[RankState],
    ) -> Result<Self, SimulationError> {
        let mut simulation = Self::new(learner, scheme, settings)?;
        if saved.len() != simulation.ranks.len() {
            return Err(SimulationError::World { saved: saved.len(), ranks: settings.ranks });
        }
        for (rank, saved) in simulation.ranks.iter_mut().zip(saved) {
            let number = rank.number();
            let failed = |error: CheckpointError| SimulationError::Checkpoint {
                rank: number,
                reason: error.to_string(),
            };
            simulation.now = rank.restore(saved).map_err(failed)?;
        }
        simulation.begins_with = Event::Resume;
        Ok(simulation)
    }

    /// Trains until each rank has come to rest before this step, over these links.
    ///
    /// # Errors
    ///
    /// See [`SimulationError`].
    pub fn run_to(
        &mut self,
        step: u64,
        network: &mut dyn Network,
        observe: &mut dyn FnMut(&Observation<'_>),
    ) -> Result<(), SimulationError> {
        self.pauses_at = Some(step.min(self.settings.steps));
        let _ = self.work(network, &mut |observed| {
            observe(observed);
            ControlFlow::Continue(())
        })?;
        self.pauses_at = None;
        self.begins_with = Event::Resume;
        self.expect_all(SimulatedRank::is_at_rest)?;
        if let Some((lost, at)) = self.lost() {
            // It has no state to be saved, and nobody goes on with it.
            let rank = self.survivors().next().expect("rank 0 does not end");
            return Err(SimulationError::Lost { lost, at, rank: rank.number(), step: rank.step() });
        }
        self.rounds.iter_mut().for_each(Rounds::reopen);
        self.engines.as_mut().map_or(Ok(()), OverEngines::reopen)
    }

    /// The states of all ranks, which are at rest.
    ///
    /// # Errors
    ///
    /// The scheme keeps no checkpoints.
    pub fn save(&mut self) -> Result<Vec<RankState>, SimulationError> {
        let now = self.now;
        let save = |rank: &mut SimulatedRank| {
            let number = rank.number();
            let failed = |error: StateError| (number, error.to_string());
            rank.save(now).map_err(failed)
        };
        let saved: Result<_, _> = self.ranks.iter_mut().map(save).collect();
        saved.map_err(|(rank, reason)| SimulationError::Checkpoint { rank, reason })
    }

    /// As [`Simulation::run_until`], to the end.
    ///
    /// # Errors
    ///
    /// See [`SimulationError`].
    pub fn run(
        self,
        network: &mut dyn Network,
        observe: &mut dyn FnMut(&Observation<'_>),
    ) -> Result<Simulated, SimulationError> {
        self.run_until(network, &mut |observed| {
            observe(observed);
            ControlFlow::Continue(())
        })
    }

    /// Trains over these links until `observe` breaks off, or to the end. `observe` is called
    /// whenever rank 0 has begun a step that is to be observed, and at the end.
    ///
    /// # Errors
    ///
    /// See [`SimulationError`].
    pub fn run_until(
        mut self,
        network: &mut dyn Network,
        observe: &mut dyn FnMut(&Observation<'_>) -> ControlFlow<()>,
    ) -> Result<Simulated, SimulationError> {
        if self.work(network, observe)?.is_break() {
            return Ok(self.simulated(false));
        }
        self.expect_all(SimulatedRank::has_ended)?;
        let _ = self.observe(observe);
        let has_ended = self.lost().is_none();
        Ok(self.simulated(has_ended))
    }

    /// Lets ranks go on until nothing happens any more, or `observe` breaks off.
    fn work(
        &mut self,
        network: &mut dyn Network,
        observe: &mut dyn FnMut(&Observation<'_>) -> ControlFlow<()>,
    ) -> Result<ControlFlow<()>, SimulationError> {
        self.draw_faults();
        Threads::with(self.learner, self.threads, |threads| self.work_with(threads, network, observe))
    }

    fn work_with(
        &mut self,
        threads: &Threads,
        network: &mut dyn Network,
        observe: &mut dyn FnMut(&Observation<'_>) -> ControlFlow<()>,
    ) -> Result<ControlFlow<()>, SimulationError> {
        for rank in 0..self.settings.ranks {
            self.deliver(rank, self.begins_with, network)?;
        }
        loop {
            if std::mem::take(&mut self.is_observed) && self.observe(observe).is_break() {
                return Ok(ControlFlow::Break(()));
            }
            if self.engines_go_on(network)? {
                continue;
            }
            if let Some(end) = self.ends_at.filter(|end| self.is_over(*end)) {
                self.now = end;
                let _ = self.observe(observe);
                return Ok(ControlFlow::Break(()));
            }
            let Some((now, happening)) = self.happenings.take() else { break };
            self.now = now;
            match happening {
                Happening::Ready { rank, bucket } => {
                    while self.ranks[rank as usize].lacks_gradient() {
                        threads.compute(&mut self.ranks, self.learner);
                    }
                    if let Some((step, loss)) = self.ranks[rank as usize].infinite_loss() {
                        return Err(SimulationError::Loss { rank, step, loss: loss.to_string() });
                    }
                    self.deliver(rank, Event::Ready(bucket), network)?;
                }
                Happening::Needs { rank, bucket } => {
                    self.deliver(rank, Event::Needed(bucket), network)?;
                    self.pass_forward(rank, bucket);
                }
                Happening::Computed { rank, step } => {
                    self.hear_all(rank, network)?;
                    self.ranks[rank as usize].end_computing(now);
                    self.deliver(rank, Event::Computed { step }, network)?;
                }
                Happening::Averaged => self.averaged(network)?,
                Happening::Arrives { rank, message } => {
                    let message = self.messages.take(message);
                    self.mail.come(rank, message);
                    if !self.ranks[rank as usize].is_computing() {
                        self.hear_all(rank, network)?;
                    }
                }
                Happening::ReadEnds { rank, message } => self.read(rank, message, network)?,
                Happening::RoundEnds { line } => {
                    self.rounds[line].end();
                    self.look_at_round(line, network);
                }
                Happening::Look { line } => self.look_at_round(line, network),
                Happening::Combined { rank, message } => {
                    let completed = self.completed.take(message);
                    if let Some((vector, result)) = completed.result {
                        let all = 0..result.len();
                        self.ranks[rank as usize].piece(vector, &all).copy_from_slice(&result);
                    }
                    let leaves = matches!(completed.outcome, Outcome::Left { .. });
                    if !leaves || self.ranks[rank as usize].has_left() {
                        self.deliver(rank, Event::Done(completed.id, completed.outcome), network)?;
                    }
                }
                Happening::Written { rank, id } => {
                    self.deliver(rank, Event::Done(id, Outcome::Written), network)?;
                }
            }
        }
        Ok(ControlFlow::Continue(()))
    }

    /// Lets engines go on before the next thing happens. Returns whether one has ended an
    /// operation, or time has passed.
    fn engines_go_on(&mut self, network: &mut dyn Network) -> Result<bool, SimulationError> {
        let Some(engines) = &mut self.engines else { return Ok(false) };
        let ended = engines.ended(&mut self.ranks);
        let ended = ended.map_err(|error| self.because_of_loss(error))?;
        if !ended.is_empty() {
            for (rank, event) in ended {
                self.deliver(rank, event, network)?;
            }
            return Ok(true);
        }
        let mut heard = false;
        for rank in 0..self.settings.ranks {
            heard |= !self.ranks[rank as usize].is_computing() && self.hear_all(rank, network)?;
        }
        let (next, now) = (self.happenings.next_at(), self.now);
        let Some(engines) = self.engines.as_mut().filter(|_| !heard) else { return Ok(heard) };
        let is_due = next.into_iter().chain(self.ends_at).any(|at| at <= now);
        if is_due || (next.is_none() && engines.are_idle()) {
            return Ok(false);
        }
        let awaited = engines.awaited().filter(|_| next.is_none());
        if let Some((number, missing)) = awaited.filter(|(_, rank)| !self.ranks[*rank as usize].is_lost()) {
            return Err(SimulationError::Stuck { number, missing });
        }
        let has_advanced = engines.advance(next.into_iter().chain(self.ends_at).min());
        self.now = engines.now();
        if has_advanced { Ok(true) } else { Err(self.because_of_loss(self.standstill())) }
    }

    /// Why no wire moves any more, though ranks wait for what they have asked for.
    fn standstill(&self) -> SimulationError {
        match self.engines.as_ref().and_then(OverEngines::blocked) {
            Some((rank, peer)) => {
                SimulationError::Silence { rank, peer, step: self.ranks[rank as usize].step() }
            }
            None => {
                let cause = format!("nothing moves any more at {}", self.now);
                SimulationError::Engine { rank: 0, cause }
            }
        }
    }

    /// Whether nothing more happens up to this instant. Engines have come to it, or to an earlier
    /// end of all that they do.
    fn is_over(&self, end: Nanos) -> bool {
        let engines_go_on = || self.engines.as_ref().is_some_and(|engines| !engines.are_idle());
        self.happenings.next_at().map_or_else(engines_go_on, |at| at > end)
    }

    /// What engines found, or that a rank has ended, if that is why.
    fn because_of_loss(&self, error: SimulationError) -> SimulationError {
        let standing = self.survivors().next().expect("rank 0 does not end");
        let (rank, step) = (standing.number(), standing.step());
        self.lost().map_or(error, |(lost, at)| SimulationError::Lost { lost, at, rank, step })
    }

    /// Draws the faults, if there are any and they are not drawn.
    fn draw_faults(&mut self) {
        if self.drawn_faults.is_none() && !self.faults.is_empty() {
            let unit = self.computing_time(0, 0);
            self.drawn_faults = Some(DrawnFaults::draw(&self.faults, &self.settings, unit));
        }
    }

    /// The rank that has ended, and the step before which it did.
    fn lost(&self) -> Option<(Rank, u64)> {
        report::lost(&self.ranks)
    }

    /// All ranks but one that has ended.
    fn survivors(&self) -> impl Iterator<Item = &SimulatedRank> {
        report::survivors(&self.ranks)
    }

    /// Checks that all ranks are done; where one has ended, that the others have made all their
    /// steps.
    fn expect_all(&self, is_done: fn(&SimulatedRank) -> bool) -> Result<(), SimulationError> {
        let is_standing = |rank: &&SimulatedRank| !is_done(rank) || self.mail.has_outgoing(rank.number());
        if let Some((lost, at)) = self.lost() {
            let standing = self.survivors().find(|rank| !rank.has_made_all_steps() && is_standing(rank));
            return standing.map_or(Ok(()), |rank| {
                Err(SimulationError::Lost { lost, at, rank: rank.number(), step: rank.step() })
            });
        }
        if let Some(call) = self.calls.front() {
            let missing = call.asked.iter().position(Option::is_none).unwrap_or_default() as Rank;
            return Err(SimulationError::Stuck { number: self.calls_ended, missing });
        }
        if let Some(rank) = self.ranks.iter().find(is_standing) {
            let peer = self.mail.awaits(rank.number()).unwrap_or_else(|| rank.awaits());
            let step = rank.step();
            return Err(SimulationError::Silence { rank: rank.number(), peer, step });
        }
        Ok(())
    }

    /// Tells a rank of messages, until it computes or there are no more. Returns whether it did.
    fn hear_all(&mut self, rank: Rank, network: &mut dyn Network) -> Result<bool, SimulationError> {
        let (was_computing, mut heard) = (self.ranks[rank as usize].is_computing(), false);
        if !self.ranks[rank as usize].is_lost() {
            self.mail.gather(rank);
        }
        while !self.ranks[rank as usize].is_lost()
            && self.ranks[rank as usize].is_computing() == was_computing
            && let Some(Message { from, word, elements }) = self.next_message(rank)?
        {
            heard = true;
            let event = match elements {
                None => Event::Told { from, word },
                Some(elements) => {
                    self.ranks[rank as usize].take_arrival(self.mail.gathered(&elements));
                    if self.engines.is_none() {
                        // The writer has its credit back.
                        self.mail.give_credit(from, rank);
                        self.send_outgoing(from, network);
                    }
                    Event::Arrived { from, word }
                }
            };
            self.deliver(rank, event, network)?;
        }
        Ok(heard)
    }

    /// The next message that has come to a rank and that it has not heard of.
    fn next_message(&mut self, rank: Rank) -> Result<Option<Message>, SimulationError> {
        let Some(engines) = &mut self.engines else { return Ok(self.mail.hear(rank)) };
        let message = engines.next_message(rank);
        message.map_err(|error| self.because_of_loss(error))
    }

    /// Sends what a rank has to send, in its order, as far as it has credits.
    fn send_outgoing(&mut self, rank: Rank, network: &mut dyn Network) {
        while self.mail.has_outgoing(rank)
            && !self.ranks[rank as usize].is_lost()
            && let Some((written, to, bytes, message)) = self.mail.next_sent(rank)
        {
            self.ranks[rank as usize].count(message.element_bytes());
            let time = self.transfer_time(network, rank, to, bytes);
            let at = self.transfers.send(time, (self.now, Duration::ZERO), rank, to);
            let message = self.messages.put(message);
            self.happen(at, Happening::Arrives { rank: to, message });
            if let Some(id) = written {
                self.happen(self.now, Happening::Written { rank, id });
            }
        }
    }

    fn leave(&mut self, rank: Rank, id: OperationId, into: Option<Vector>, network: &mut dyn Network) {
        self.ranks[rank as usize].leave();
        for line in self.lines[rank as usize].clone() {
            self.rounds[line].leave(rank, id, into);
            self.look_at_round(line, network);
        }
    }

    /// Ends operations of a line that have come to their end, and opens its next round if it is
    /// time.
    fn look_at_round(&mut self, line: usize, network: &mut dyn Network) {
        for completed in self.rounds[line].completed() {
            let rank = completed.rank;
            let message = self.completed.put(completed);
            self.happen(self.now, Happening::Combined { rank, message });
        }
        let (is_open, look_at) = self.rounds[line].open(self.now);
        if is_open {
            let bytes = (size_of::<f32>() * self.parameters) as u64;
            let ranks = self.rounds[line].ranks();
            let (time, among) = if ranks.len() == self.ranks.len() {
                (network.all_reduce(bytes), None)
            } else {
                (network.all_reduce_among(ranks, bytes), Some(ranks))
            };
            let time = match &mut self.drawn_faults {
                Some(faults) => faults.all_reduce(time, self.now, among),
                None => time,
            };
            self.happen(self.now + time, Happening::RoundEnds { line });
        }
        if let Some(at) = look_at {
            self.happen(at, Happening::Look { line });
        }
    }

    /// Begins a read of what a rank has published.
    fn begin_reading(
        &mut self,
        rank: Rank,
        from: Rank,
        (id, into, piece, reads): (OperationId, Vector, Range<usize>, Reads),
        network: &mut dyn Network,
    ) {
        let (version, word, elements) = self.ranks[from as usize].published();
        let stamps = self.ranks[from as usize].stamps().filter(|_| reads == Reads::Consistent);
        let (bytes, asks_twice) = self.ranks[rank as usize].read(from, stamps, piece.len());
        // The request goes to the owner first.
        let mut latency = self.transfer_time(network, rank, from, 0).latency;
        if asks_twice {
            latency += self.transfer_time(network, from, rank, 0).latency;
            latency += self.transfer_time(network, rank, from, 0).latency;
        }
        let time = self.transfer_time(network, from, rank, bytes);
        let at = self.transfers.send(time, (self.now, latency), from, rank);
        let reading = Reading { id, into, piece, from, reads, version, word, elements };
        let message = self.readings.put(reading);
        self.happen(at, Happening::ReadEnds { rank, message });
    }

    fn read(&mut self, rank: Rank, message: u64, network: &mut dyn Network) -> Result<(), SimulationError> {
        let Reading { id, into, piece, from, reads, version, mut word, elements } =
            self.readings.take(message);
        let target = self.ranks[rank as usize].piece(into, &piece);
        match elements {
            Some(elements) => target.copy_from_slice(&elements),
            None => target.fill(0.0),
        }
        if reads == Reads::Torn
            && let (_, _, Some(newest)) = self.ranks[from as usize].published()
        {
            let target = self.ranks[rank as usize].piece(into, &piece);
            // The owner publishes while the elements are on their way: the second half is newer.
            let half = target.len() / 2;
            target[half..].copy_from_slice(&newest[half..]);
            word = 0;
        }
        self.deliver(rank, Event::Done(id, Outcome::Read { version, word }), network)
    }

    /// How long a transfer takes that begins now.
    fn transfer_time(&mut self, network: &mut dyn Network, from: Rank, to: Rank, bytes: u64) -> TransferTime {
        let time = network.transfer(from, to, bytes);
        match &mut self.drawn_faults {
            Some(faults) => faults.transfer(time, self.now, [from, to]),
            None => time,
        }
    }

    fn happen(&mut self, at: Nanos, happening: Happening) {
        self.happenings.put(at, happening);
    }

    /// Tells a rank's policy of an event and sees to what it asks for.
    fn deliver(
        &mut self,
        rank: Rank,
        event: Event,
        network: &mut dyn Network,
    ) -> Result<(), SimulationError> {
        if self.ranks[rank as usize].is_lost() {
            return Ok(());
        }
        let mut requests = std::mem::take(&mut self.requests);
        let delivered = self.ranks[rank as usize].deliver(event, self.now, &mut requests);
        delivered.map_err(|error| SimulationError::Policy { rank, error })?;
        if let Some(engines) = &mut self.engines {
            let published = engines.publish(&self.ranks[rank as usize]);
            published.map_err(|error| self.because_of_loss(error))?;
        }
        let mut ends_with = None;
        let mut refused = Vec::new();
        let copied = self.engines.is_none().then(|| self.ranks[rank as usize].copy_for(&requests)).flatten();
        for request in requests.drain(..) {
            let request = match &mut self.engines {
                Some(engines) => engines.take(rank, request),
                None => Ok(Some(request)),
            };
            let Some(request) = request.map_err(|error| self.because_of_loss(error))? else { continue };
            match request {
                Request::Compute { step } if self.pauses_at == Some(step) => ends_with = Some(Event::Pause),
                Request::Compute { step } if step < self.settings.steps => self.begin_computing(rank, step),
                Request::Compute { .. } => ends_with = Some(Event::Stop),
                Request::Supply { bucket } => {
                    if self.ranks[rank as usize].end_waiting(bucket, self.now) {
                        self.pass_forward(rank, bucket);
                    }
                }
                Request::Average { id, vector, piece, compression } => {
                    let bytes = compression.bytes(piece.len()) as u64;
                    let wanted = Wanted::Average { vector, piece, compression };
                    self.ranks[rank as usize].count(bytes);
                    self.ask(rank, id, (wanted, &[], bytes), network)?;
                }
                Request::Total { id, numbers } => {
                    let wanted = Wanted::Total { numbers: numbers.len() };
                    self.ask(rank, id, (wanted, &numbers, size_of_val(&numbers[..]) as u64), network)?;
                }
                Request::Contribute { id, line, vector, limit } => {
                    let all = 0..self.parameters;
                    let rank_state = &mut self.ranks[rank as usize];
                    let given = rank_state.piece(vector, &all).to_vec();
                    let line = self.lines[rank as usize][line];
                    if self.rounds[line].contribute(rank, id, (vector, limit), given) {
                        self.ranks[rank as usize].count((size_of::<f32>() * all.len()) as u64);
                    }
                    self.look_at_round(line, network);
                }
                Request::StepAside { line } => {
                    let line = self.lines[rank as usize][line];
                    self.rounds[line].step_aside(rank);
                    self.look_at_round(line, network);
                }
                Request::ComeBack { line } => {
                    let line = self.lines[rank as usize][line];
                    self.rounds[line].come_back(rank);
                }
                Request::Leave { id, into } => self.leave(rank, id, into, network),
                Request::Read { id, from, into, piece, reads } => {
                    self.begin_reading(rank, from, (id, into, piece, reads), network);
                }
                Request::Write { id, to, waits: false, .. }
                    if self.engines.is_some() || !self.mail.has_credit(rank, to) =>
                {
                    refused.push((id, Outcome::Refused { by: to }));
                }
                Request::Write { id, to, from, piece, word, waits: _ } => {
                    let elements = self.ranks[rank as usize].elements(copied.as_ref(), from, &piece);
                    self.mail.write([rank, to], id, word, elements);
                    self.send_outgoing(rank, network);
                }
                Request::Commit { .. } => {
                    let error = PolicyError::NoSession;
                    return Err(SimulationError::Policy { rank, error });
                }
                Request::Tell { to, word } => {
                    self.mail.tell([rank, to], word);
                    self.send_outgoing(rank, network);
                }
            }
        }
        self.requests = requests;
        for (id, outcome) in refused {
            self.deliver(rank, Event::Done(id, outcome), network)?;
        }
        ends_with.map_or(Ok(()), |event| self.deliver(rank, event, network))
    }

    /// How long a rank takes for a step if no fault befalls it.
    fn computing_time(&self, rank: Rank, step: u64) -> Duration {
        let Settings { computing, seed, .. } = self.settings;
        let recorded = self.recorded.as_ref().map(|times| times.time(seed, rank, step));
        recorded.unwrap_or_else(|| computing.time(seed, rank, step)) + self.exchanges
    }

    fn begin_computing(&mut self, rank: Rank, step: u64) {
        let (now, mut time) = (self.now, self.computing_time(rank, step));
        let drawn = self.drawn_faults.as_ref().and_then(DrawnFaults::death);
        if self.death.into_iter().chain(drawn).any(|death| death == (rank, step)) {
            self.engines.iter_mut().for_each(|engines| engines.end(rank));
            return self.ranks[rank as usize].lose();
        }
        if let Some(faults) = &self.drawn_faults {
            time = faults.computing(rank, step, time);
            let frozen = faults.frozen(rank, step);
            if let Some(engines) = self.engines.as_mut().filter(|_| !frozen.is_zero()) {
                engines.freeze(rank, frozen);
            }
        }
        match self.ranks[rank as usize].begin_computing(step, now, time) {
            Some(bucket) => self.happen(now, Happening::Needs { rank, bucket }),
            None => {
                let end = self.ranks[rank as usize].forward_end(now);
                self.pass_backward(rank, end);
            }
        }
    }

    /// Goes on with the forward pass of a rank at a bucket, if it has it.
    fn pass_forward(&mut self, rank: Rank, bucket: Bucket) {
        if let Some(end) = self.ranks[rank as usize].pass_forward(bucket, self.now) {
            match bucket.checked_sub(1) {
                Some(bucket) => self.happen(end, Happening::Needs { rank, bucket }),
                None => self.pass_backward(rank, end),
            }
        }
    }

    /// A rank has, or will have without waiting, all parameters of its step, and begins the
    /// backward pass then.
    fn pass_backward(&mut self, rank: Rank, begin: Nanos) {
        let step = self.ranks[rank as usize].step();
        let is_observed = rank == 0 && step.is_multiple_of(self.settings.observed_every.max(1));
        if is_observed && self.now >= self.observed_from {
            self.is_observed = true;
            self.observed_from = self.now + self.observed_apart;
        }
        self.ranks[rank as usize].begin_backward(begin);
        for bucket in 0..self.ranks[rank as usize].buckets() {
            let at = self.ranks[rank as usize].ready_at(begin, bucket);
            self.happen(at, Happening::Ready { rank, bucket });
        }
        let end = self.ranks[rank as usize].backward_end(begin);
        self.happen(end, Happening::Computed { rank, step });
    }

    /// Notes that a rank asks for an all-reduce; the last one lets it begin.
    fn ask(
        &mut self,
        rank: Rank,
        id: OperationId,
        (wanted, numbers, bytes): (Wanted, &[u64], u64),
        network: &mut dyn Network,
    ) -> Result<(), SimulationError> {
        if let Some(engines) = &mut self.engines {
            let asked = engines.ask(&mut self.ranks[rank as usize], id, wanted, numbers);
            return asked.map_err(|error| self.because_of_loss(error));
        }
        let place = self.ranks[rank as usize].ask() - self.calls_ended;
        let place = place as usize;
        if place == self.calls.len() {
            let asked = vec![None; self.ranks.len()];
            let missing = self.settings.ranks;
            let totals = vec![0; numbers.len()];
            self.calls.push_back(Call { first: rank, wanted: wanted.clone(), totals, asked, missing });
        }
        let call = &mut self.calls[place];
        if call.wanted != wanted {
            return Err(SimulationError::Mismatch {
                number: self.calls_ended + place as u64,
                first: call.first,
                of_first: call.wanted.to_string(),
                other: rank,
                of_other: wanted.to_string(),
            });
        }
        for (total, number) in call.totals.iter_mut().zip(numbers) {
            *total = total.wrapping_add(*number);
        }
        call.asked[rank as usize] = Some(id);
        call.missing -= 1;
        if call.missing == 0 {
            let (begin, time) = (self.free_from.max(self.now), network.all_reduce(bytes));
            let time = match &mut self.drawn_faults {
                Some(faults) => faults.all_reduce(time, begin, None),
                None => time,
            };
            self.free_from = begin + time;
            self.happen(self.free_from, Happening::Averaged);
        }
        Ok(())
    }

    /// Ends the oldest all-reduce: ranks ask in one order, so it is the one that began first.
    fn averaged(&mut self, network: &mut dyn Network) -> Result<(), SimulationError> {
        let call = self.calls.pop_front().expect("an all-reduce began");
        self.calls_ended += 1;
        let average = match &call.wanted {
            Wanted::Average { vector, piece, compression } => {
                let average = average(&mut self.ranks, *vector, piece, *compression);
                Some((*vector, piece, average))
            }
            Wanted::Total { .. } => None,
        };
        let outcome = if average.is_some() { Outcome::Averaged } else { Outcome::Totalled };
        for (rank, id) in (0..).zip(call.asked) {
            let id = id.expect("all ranks have asked");
            // Just before the rank steps by it, so that it is in the cache still.
            if let Some((vector, piece, average)) = &average {
                self.ranks[rank as usize].piece(*vector, piece).copy_from_slice(average);
            }
            for (place, total) in (0..).zip(&call.totals) {
                self.deliver(rank, Event::Totalled { place, total: *total }, network)?;
            }
            self.deliver(rank, Event::Done(id, outcome), network)?;
        }
        Ok(())
    }

    fn observe(&mut self, observe: &mut dyn FnMut(&Observation<'_>) -> ControlFlow<()>) -> ControlFlow<()> {
        let parameters = report::mean(&mut self.ranks, self.parameters);
        observe(&Observation {
            time: self.now.since(Nanos::ZERO),
            step: self.ranks[0].step(),
            parameters: &parameters,
            staleness: report::staleness_mean(&self.ranks),
            wait_share: report::wait_share(&self.ranks, self.now),
        })
    }

    fn simulated(mut self, has_ended: bool) -> Simulated {
        Simulated::of(&mut self.ranks, &self.settings, self.parameters, self.now, has_ended)
    }
}

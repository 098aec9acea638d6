//! One rank between its policy and a driver: keeps the ledger, carries updates out, and hands what
//! takes time (computing, operations) to the driver.
//!
//! **Invariant:** both drivers change vectors through this module, or by the operations and the
//! computing that it has handed out. So the same events give the same bits in either.

use std::ops::Range;

use pleach_collectives::Rank;
use pleach_transport::clock::Nanos;
use pleach_vocabulary::digest::chain;

use crate::checkpoint::{CheckpointError, RankState, vector};
use crate::compression::{Compression, Parts};
use crate::layout::Bucket;
use crate::ledger::{Ledger, PolicyError, User};
use crate::lines::Line;
use crate::policy::{Action, Actions, Event, OperationId, Policy, Reads, TableAction, Update, Vector};
use crate::shares::WindowPlan;
use crate::state::{State, StateError};
use crate::table::Table;

/// The vectors of one rank, as a driver keeps them.
pub trait Vectors {
    /// The same piece of several different vectors, none of which an operation uses.
    fn pieces<const N: usize>(&mut self, names: [Vector; N], piece: &Range<usize>) -> [&mut [f32]; N];

    /// Makes a step of the optimizer in a piece, which no operation uses.
    ///
    /// # Errors
    ///
    /// [`PolicyError::NoOptimizer`].
    fn step(&mut self, piece: &Range<usize>) -> Result<(), PolicyError>;

    /// Whether all steps are made by [`Vectors::step`].
    fn has_optimizer(&self) -> bool {
        false
    }

    /// Publishes a piece of a vector, which is this rank's share of it, with a word.
    fn publish(&mut self, vector: Vector, piece: &Range<usize>, word: u64);
}

/// What takes time, and is the driver's to carry out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Request {
    /// Compute the gradient of a step.
    Compute {
        /// The step.
        step: u64,
    },
    /// Let computing use a bucket; see [`Action::Supply`].
    Supply {
        /// The bucket.
        bucket: Bucket,
    },
    /// Add up; see [`Action::Total`].
    Total {
        /// Its number.
        id: OperationId,
        /// The numbers of this rank.
        numbers: Vec<u64>,
    },
    /// Start an all-reduce; see [`Action::Average`] and [`Action::AverageCompressed`].
    Average {
        /// Its number.
        id: OperationId,
        /// The vector.
        vector: Vector,
        /// The elements.
        piece: Range<usize>,
        /// How they are encoded.
        compression: Compression,
    },
    /// Start a read; see [`Action::Read`].
    Read {
        /// Its number.
        id: OperationId,
        /// The peer.
        from: Rank,
        /// Where the elements go.
        into: Vector,
        /// The elements: the share of the peer.
        piece: Range<usize>,
        /// Whether they are of one version.
        reads: Reads,
    },
    /// Contribute to a round; see [`Action::Contribute`].
    Contribute {
        /// Its number.
        id: OperationId,
        /// Which of the plan's lines.
        line: usize,
        /// The vector.
        vector: Vector,
        /// The highest number of a round that is waited for.
        limit: u64,
    },
    /// Have nothing to give; see [`Action::StepAside`].
    StepAside {
        /// Which of the plan's lines.
        line: usize,
    },
    /// Be waited for; see [`Action::ComeBack`].
    ComeBack {
        /// Which of the plan's lines.
        line: usize,
    },
    /// Give nothing to any line any more; see [`Action::Leave`].
    Leave {
        /// Its number.
        id: OperationId,
        /// Where late contributions go.
        into: Option<Vector>,
    },
    /// Start a write; see [`Action::Write`].
    Write {
        /// Its number.
        id: OperationId,
        /// The peer.
        to: Rank,
        /// The vector.
        from: Vector,
        /// The elements: the share of the peer.
        piece: Range<usize>,
        /// Goes with them.
        word: u64,
        /// Whether it waits for a credit.
        waits: bool,
    },
    /// Ask for the verdict of a step; see [`Action::Commit`].
    Commit {
        /// The step.
        step: u64,
    },
    /// Send a word; see [`Action::Tell`].
    Tell {
        /// The peer.
        to: Rank,
        /// The word.
        word: u64,
    },
}

/// A policy with what a driver needs to know to run it on a model.
pub struct Plan {
    /// The decisions.
    pub policy: Box<dyn Policy>,
    /// The buckets of the gradient.
    pub buckets: Vec<Range<usize>>,
    /// The vectors that the policy names.
    pub vectors: Vec<Vector>,
    /// The elements of a vector.
    pub parameters: usize,
    /// For schemes with one-sided exchanges.
    pub window: Option<WindowPlan>,
    /// For schemes whose ranks contribute to rounds: as many on all ranks.
    pub lines: Vec<Line>,
}

/// The state of a rank; see the module.
pub struct Interpreter {
    plan: Plan,
    ledger: Ledger,
    actions: Actions,
    /// The step that comes next.
    next_step: u64,
    /// Of a step that was begun bucket by bucket, by bucket: whether computing has it.
    supplied: Option<Vec<bool>>,
    is_stopped: bool,
    /// Whether the policy comes to rest for a checkpoint.
    is_paused: bool,
    /// A rank for whose word the policy waits.
    awaits: Option<Rank>,
    /// Whether the policy waits for the verdict of a step.
    awaits_verdict: bool,
    /// Whether a write has come, of which the policy is being told.
    has_arrival: bool,
    /// This rank's shard, once the policy has begun one.
    table: Option<Table>,
    agreement: Agreement,
    staleness: Staleness,
}

/// How old parameters were when gradients were computed at them: in steps that this rank had made
/// since its last exchange with others.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Staleness {
    /// Of the next step.
    next: u64,
    /// Whether a gradient is there whose step is not made.
    has_gradient: bool,
    sum: u64,
    steps: u64,
    most: u64,
    histogram: [u64; Staleness::BOUNDS.len() + 1],
}

impl Staleness {
    /// The most of each bin of the histogram; the last bin has no bound.
    pub const BOUNDS: [u64; 9] = [0, 1, 2, 4, 8, 16, 32, 64, 128];

    /// How many steps were as stale as each bin says: more than the bound before and at most its
    /// own ([`Staleness::BOUNDS`]).
    #[must_use]
    pub fn histogram(&self) -> [u64; Self::BOUNDS.len() + 1] {
        self.histogram
    }

    /// The sum over all steps.
    #[must_use]
    pub fn sum(&self) -> u64 {
        self.sum
    }

    /// The mean over all steps.
    #[must_use]
    pub fn mean(&self) -> f64 {
        self.sum as f64 / self.steps.max(1) as f64
    }

    /// Of the step that comes next: 0 where an exchange has just ended.
    #[must_use]
    pub fn next(&self) -> u64 {
        self.next
    }

    /// The largest of all steps.
    #[must_use]
    pub fn most(&self) -> u64 {
        self.most
    }

    fn computed(&mut self) {
        self.sum = self.sum.saturating_add(self.next);
        self.steps += 1;
        self.most = self.most.max(self.next);
        self.histogram[Self::BOUNDS.partition_point(|bound| *bound < self.next)] += 1;
        self.next += 1;
        self.has_gradient = true;
    }

    /// The step of the newest gradient is made, or never will be.
    fn end_gradient(&mut self) {
        self.has_gradient = false;
    }

    /// The parameters hold work of others now. A gradient that was computed before is a step that
    /// follows.
    fn exchanged(&mut self) {
        self.next = u64::from(self.has_gradient);
    }
}

/// What is kept of the places where a vector is the same on all ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Agreement {
    /// The number of such places.
    pub places: u64,
    /// A hash over the bits of the vector at all of them, where these are hashed.
    pub digest: u64,
    /// Whether vectors are hashed.
    pub is_hashed: bool,
    /// Whether something was lost or doubled that the scheme conserves.
    pub is_broken: bool,
}

impl Interpreter {
    /// A rank before [`Event::Start`]. `hashes`: whether vectors are hashed wherever the policy
    /// says that they are the same on all ranks.
    #[must_use]
    pub fn new(plan: Plan, hashes: bool) -> Self {
        Self {
            ledger: Ledger::of(&plan.vectors),
            plan,
            actions: Actions::default(),
            next_step: 0,
            supplied: None,
            is_stopped: false,
            is_paused: false,
            awaits: None,
            awaits_verdict: false,
            has_arrival: false,
            table: None,
            agreement: Agreement { is_hashed: hashes, ..Agreement::default() },
            staleness: Staleness::default(),
        }
    }

    /// From here on, vectors are hashed wherever the policy says that they are the same on all
    /// ranks.
    pub fn hash_agreements(&mut self) {
        self.agreement.is_hashed = true;
    }

    /// Puts another policy around that of this rank, before its first event.
    pub(crate) fn wrap(&mut self, around: impl FnOnce(Box<dyn Policy>) -> Box<dyn Policy>) {
        /// Holds a policy's place while it is moved.
        struct Nothing;
        impl Policy for Nothing {
            fn on(&mut self, _: Event, _: Nanos, _: &mut Actions) {}
        }
        let policy = std::mem::replace(&mut self.plan.policy, Box::new(Nothing));
        self.plan.policy = around(policy);
    }

    /// The buckets of the gradient.
    #[must_use]
    pub fn buckets(&self) -> &[Range<usize>] {
        &self.plan.buckets
    }

    /// The elements of a vector.
    #[must_use]
    pub fn parameters(&self) -> usize {
        self.plan.parameters
    }

    /// The places so far where a vector is the same on all ranks.
    #[must_use]
    pub fn agreement(&self) -> Agreement {
        self.agreement
    }

    /// What people are to be told of the training so far, where the policy of this rank knows of
    /// it.
    #[must_use]
    pub fn remark(&self) -> Option<String> {
        self.plan.policy.remark()
    }

    /// Goes on with so many places, and a hash over them, that the other ranks have come to, and
    /// with the step that comes next there.
    pub fn take_over(&mut self, places: u64, digest: u64, next_step: u64) {
        (self.agreement.places, self.agreement.digest) = (places, digest);
        self.next_step = next_step;
    }

    /// The one-sided exchanges of the policy.
    #[must_use]
    pub fn window(&self) -> Option<&WindowPlan> {
        self.plan.window.as_ref()
    }

    /// The lines of this rank.
    #[must_use]
    pub fn lines(&self) -> &[Line] {
        &self.plan.lines
    }

    /// A peer for whose word or write the policy waits.
    #[must_use]
    pub fn awaits(&self) -> Option<Rank> {
        self.awaits
    }

    /// Whether the policy has come to its end: nothing is under way, and it waits for nothing.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        self.is_stopped && self.awaits.is_none() && !self.awaits_verdict && self.ledger.is_empty()
    }

    /// Whether the policy has come to rest after [`Event::Pause`].
    #[must_use]
    pub fn is_at_rest(&self) -> bool {
        self.is_paused && self.awaits.is_none() && self.ledger.is_empty()
    }

    /// The state of this rank, which is at rest, with numbers of the driver and without the vectors
    /// of the program.
    ///
    /// # Errors
    ///
    /// The policy does not say what it remembers.
    pub fn save(&mut self, vectors: &mut impl Vectors, own: &mut [u64]) -> Result<RankState, StateError> {
        let mut state = State::saving();
        self.state(&mut state);
        state.field(own);
        let mut saved = RankState::new(state.finish()?);
        for name in self.saved_vectors() {
            let [elements] = vectors.pieces([name], &(0..self.plan.parameters));
            saved.insert(name.name(), elements);
        }
        Ok(saved)
    }

    /// Takes the state of a rank over, before [`Event::Resume`] takes the place of
    /// [`Event::Start`].
    ///
    /// # Errors
    ///
    /// The state is not that of a rank with such a plan. Then this rank is of no use any more.
    pub fn restore(
        &mut self,
        saved: &RankState,
        vectors: &mut impl Vectors,
        own: &mut [u64],
    ) -> Result<(), CheckpointError> {
        for name in self.saved_vectors() {
            let [elements] = vectors.pieces([name], &(0..self.plan.parameters));
            elements.copy_from_slice(vector(saved, name.name(), self.plan.parameters)?);
        }
        let mut state = State::restoring(saved.state());
        self.state(&mut state);
        state.field(own);
        state.finish()?;
        self.is_paused = true;
        Ok(())
    }

    /// The vectors whose elements outlive a step.
    fn saved_vectors(&self) -> impl Iterator<Item = Vector> + use<> {
        let of_a_step = |vector: &Vector| matches!(vector, Vector::Gradient | Vector::Arrival);
        self.plan.vectors.clone().into_iter().filter(move |vector| !of_a_step(vector))
    }

    fn state(&mut self, state: &mut State<'_>) {
        state.field(&mut self.next_step);
        let Agreement { places, digest, is_broken, is_hashed: _ } = &mut self.agreement;
        state.field(places);
        state.bits(digest);
        state.field(is_broken);
        // At rest each gradient has made its step.
        let Staleness { next, sum, steps, most, histogram, has_gradient: _ } = &mut self.staleness;
        [next, sum, steps, most].into_iter().for_each(|number| state.field(number));
        state.field(&mut histogram[..]);
        let mut has_table = self.table.is_some();
        state.field(&mut has_table);
        if has_table && self.table.is_none() {
            match self.plan.window {
                Some(plan) => {
                    let shard = vec![0.0; plan.share(plan.rank, self.plan.parameters).len()];
                    self.table = Some(Table::new(&shard, plan.ranks, true).of_rows(plan.row));
                }
                None => state.refuse(StateError::Value),
            }
        }
        if let Some(table) = &mut self.table {
            state.field(table);
        }
        self.plan.policy.state(state);
    }

    /// The step that comes next.
    #[must_use]
    pub fn next_step(&self) -> u64 {
        self.next_step
    }

    /// The first step whose gradient is not computed to its end.
    #[must_use]
    pub fn unfinished_step(&self) -> u64 {
        self.next_step - u64::from(self.ledger.has_computing())
    }

    /// Behind an exchange that counts on all members of a session: the step with which a process
    /// begins that joins then.
    #[must_use]
    pub fn joins_at(&self) -> u64 {
        self.plan.policy.joins_at(self.unfinished_step())
    }

    /// Whether the policy was told that there are no more steps.
    #[must_use]
    pub fn is_stopped(&self) -> bool {
        self.is_stopped
    }

    /// Whether there is no further step, and the newest gradient was used.
    #[must_use]
    pub fn has_made_all_steps(&self) -> bool {
        self.is_stopped && !self.staleness.has_gradient
    }

    /// How old parameters were.
    #[must_use]
    pub fn staleness(&self) -> Staleness {
        self.staleness
    }

    /// Tells the policy of an event and carries out what follows. What takes time is appended to
    /// `requests`. `optimizer` makes a step of the parameters by the gradient.
    ///
    /// # Errors
    ///
    /// The policy or the driver broke an invariant.
    pub fn deliver(
        &mut self,
        event: Event,
        now: Nanos,
        vectors: &mut impl Vectors,
        optimizer: &mut dyn FnMut(&mut [f32], &[f32]),
        requests: &mut Vec<Request>,
    ) -> Result<(), PolicyError> {
        self.note(event)?;
        self.awaits = None;
        self.has_arrival = matches!(event, Event::Arrived { .. });
        let mut actions = std::mem::take(&mut self.actions);
        self.plan.policy.on(event, now, &mut actions);
        let carried_out =
            actions.drain().try_for_each(|action| self.carry_out(action, vectors, optimizer, requests));
        self.actions = actions;
        self.has_arrival = false;
        carried_out?;
        let is_held = self.is_stopped || self.is_paused || self.awaits.is_some() || self.awaits_verdict;
        if self.ledger.is_empty() && !is_held {
            return Err(PolicyError::Stuck { step: self.next_step });
        }
        Ok(())
    }

    /// Frees what the event says is no longer in use.
    fn note(&mut self, event: Event) -> Result<(), PolicyError> {
        match event {
            Event::Start | Event::Arrived { .. } | Event::Told { .. } | Event::Totalled { .. } => Ok(()),
            Event::Needed(bucket) => {
                let is_there = self.supplied.as_ref().is_some_and(|supplied| bucket < supplied.len());
                let step = self.next_step.saturating_sub(1);
                if is_there { Ok(()) } else { Err(PolicyError::Bucket { bucket, step }) }
            }
            Event::Ready(bucket) => self.end_bucket(bucket),
            Event::Computed { step } => {
                let is_missing = |bucket: &Bucket| self.is_unfinished(*bucket) || !self.is_supplied(*bucket);
                let missing = (0..self.plan.buckets.len()).find(is_missing);
                if let Some(bucket) = missing {
                    return Err(PolicyError::Incomplete { step, bucket });
                }
                self.ledger.end_computing();
                self.staleness.computed();
                Ok(())
            }
            Event::Done(id, _) => self.ledger.end_operation(id),
            Event::Committed => {
                self.awaits_verdict = false;
                Ok(())
            }
            Event::Membership { step, .. } => {
                self.ledger.abandon();
                self.staleness.end_gradient();
                (self.awaits_verdict, self.supplied, self.next_step) = (false, None, step);
                Ok(())
            }
            Event::Pause => {
                self.ledger.end_computing();
                self.next_step = self.next_step.saturating_sub(1);
                self.is_paused = true;
                Ok(())
            }
            Event::Resume => {
                self.is_paused = false;
                Ok(())
            }
            Event::Stop => {
                self.next_step = self.unfinished_step();
                self.ledger.end_computing();
                self.is_stopped = true;
                Ok(())
            }
        }
    }

    fn end_bucket(&mut self, bucket: Bucket) -> Result<(), PolicyError> {
        let is_ended = self.plan.buckets.get(bucket).is_some_and(|piece| self.ledger.end_bucket(piece));
        // The step that comes next is the one after the step that is computed.
        let step = self.next_step.saturating_sub(1);
        if is_ended { Ok(()) } else { Err(PolicyError::Bucket { bucket, step }) }
    }

    /// Whether the step that is computed has a bucket: all, unless it was begun bucket by bucket.
    #[must_use]
    pub fn is_supplied(&self, bucket: Bucket) -> bool {
        self.supplied.as_ref().is_none_or(|supplied| supplied.get(bucket) == Some(&true))
    }

    /// Whether the step was begun bucket by bucket, so that its pass asks for each.
    #[must_use]
    pub fn is_by_bucket(&self) -> bool {
        self.supplied.is_some()
    }

    /// Whether the gradient of a bucket is being computed.
    #[must_use]
    pub fn is_unfinished(&self, bucket: Bucket) -> bool {
        self.plan.buckets.get(bucket).is_some_and(|piece| self.ledger.is_computing(piece))
    }

    fn carry_out(
        &mut self,
        action: Action,
        vectors: &mut impl Vectors,
        optimizer: &mut dyn FnMut(&mut [f32], &[f32]),
        requests: &mut Vec<Request>,
    ) -> Result<(), PolicyError> {
        match action {
            Action::Compute { step } => {
                if step != self.next_step || self.is_stopped {
                    return Err(PolicyError::Order { step, expected: self.next_step });
                }
                self.ledger.begin_computing(self.plan.parameters, &self.plan.buckets)?;
                self.supplied = None;
                self.next_step = step + 1;
                requests.push(Request::Compute { step });
            }
            Action::Begin { step } => {
                if step != self.next_step || self.is_stopped || self.ledger.has_computing() {
                    return Err(PolicyError::Order { step, expected: self.next_step });
                }
                let supplied = self.supplied.get_or_insert_default();
                supplied.clear();
                supplied.resize(self.plan.buckets.len(), false);
                self.next_step = step + 1;
                requests.push(Request::Compute { step });
            }
            Action::Supply { bucket } => self.supply(bucket, requests)?,
            Action::Total { id, numbers } => {
                self.ledger.begin_operation(id, Vector::Parameters, &(0..0), false)?;
                requests.push(Request::Total { id, numbers });
            }
            Action::Average { id, vector, piece } => {
                self.average(id, vector, piece, Compression::None, requests)?;
            }
            Action::AverageCompressed { id, vector, piece, compression } => {
                self.average(id, vector, piece, compression, requests)?;
            }
            Action::Contribute { id, line, vector, limit } => {
                self.expect_line(line)?;
                self.expect_no_arrival(vector)?;
                self.ledger.begin_operation(id, vector, &(0..self.plan.parameters), true)?;
                requests.push(Request::Contribute { id, line, vector, limit });
            }
            Action::StepAside { line } => {
                self.expect_line(line)?;
                requests.push(Request::StepAside { line });
            }
            Action::ComeBack { line } => {
                self.expect_line(line)?;
                requests.push(Request::ComeBack { line });
            }
            Action::Leave { id, into } => {
                let elements = if into.is_some() { 0..self.plan.parameters } else { 0..0 };
                let vector = into.unwrap_or(Vector::Parameters);
                self.expect_no_arrival(vector)?;
                self.ledger.begin_operation(id, vector, &elements, true)?;
                requests.push(Request::Leave { id, into });
            }
            Action::Read { id, from, into, reads } => {
                let piece = self.share_of_peer(from)?;
                self.expect_no_arrival(into)?;
                self.ledger.begin_operation(id, into, &piece, true)?;
                requests.push(Request::Read { id, from, into, piece, reads });
            }
            Action::Write { id, to, from, word, waits } => {
                let piece = self.share_of_peer(to)?;
                self.expect_no_arrival(from)?;
                self.ledger.begin_operation(id, from, &piece, false)?;
                requests.push(Request::Write { id, to, from, piece, word, waits });
            }
            Action::Publish { vector, word } => {
                let plan = self.plan.window.ok_or(PolicyError::NoWindow)?;
                let piece = plan.share(plan.rank, self.plan.parameters);
                self.expect_no_arrival(vector)?;
                self.ledger.check(User::Update, vector, &piece, false)?;
                vectors.publish(vector, &piece, word);
            }
            Action::Tell { to, word } => {
                self.share_of_peer(to)?;
                requests.push(Request::Tell { to, word });
            }
            Action::Commit { step } => {
                self.awaits_verdict = true;
                requests.push(Request::Commit { step });
            }
            Action::Await { from } => {
                self.share_of_peer(from)?;
                self.awaits = Some(from);
            }
            Action::Update(update) => self.update(&update, vectors, optimizer)?,
            Action::Table(action) => self.work_with_table(action, vectors)?,
            Action::Agreed(vector) => self.agree(vector, vectors)?,
            Action::Exchanged => self.staleness.exchanged(),
            Action::Conserved(is_conserved) => self.agreement.is_broken |= !is_conserved,
            Action::Refuse { from, word } => return Err(PolicyError::Word { from, word }),
        }
        Ok(())
    }

    fn average(
        &mut self,
        id: OperationId,
        vector: Vector,
        piece: Range<usize>,
        compression: Compression,
        requests: &mut Vec<Request>,
    ) -> Result<(), PolicyError> {
        self.expect_inside(&piece)?;
        self.expect_no_arrival(vector)?;
        if compression.keeps_residuals() {
            for residual in [Vector::Residual, Vector::OwnedResidual] {
                self.ledger.check(User::Operation(id), residual, &piece, true)?;
            }
        }
        self.ledger.begin_operation(id, vector, &piece, true)?;
        requests.push(Request::Average { id, vector, piece, compression });
        Ok(())
    }

    fn supply(&mut self, bucket: Bucket, requests: &mut Vec<Request>) -> Result<(), PolicyError> {
        let refused = PolicyError::Supplied { bucket, step: self.next_step.saturating_sub(1) };
        let is_begun = !self.is_stopped && !self.is_paused;
        match self.supplied.as_mut().and_then(|supplied| supplied.get_mut(bucket)) {
            Some(supplied) if is_begun && !*supplied => {
                self.ledger.begin_bucket(&self.plan.buckets[bucket])?;
                *supplied = true;
                requests.push(Request::Supply { bucket });
                Ok(())
            }
            _ => Err(refused),
        }
    }

    /// The share of a rank, which must be a peer.
    fn share_of_peer(&self, peer: Rank) -> Result<Range<usize>, PolicyError> {
        let plan = self.plan.window.ok_or(PolicyError::NoWindow)?;
        if peer == plan.rank || peer >= plan.ranks {
            return Err(PolicyError::Peer { rank: peer, own: plan.rank, ranks: plan.ranks });
        }
        Ok(plan.share(peer, self.plan.parameters))
    }

    fn expect_line(&self, line: usize) -> Result<(), PolicyError> {
        let lines = self.plan.lines.len();
        if line < lines { Ok(()) } else { Err(PolicyError::NoLine { line, lines }) }
    }

    fn work_with_table(
        &mut self,
        action: TableAction,
        vectors: &mut impl Vectors,
    ) -> Result<(), PolicyError> {
        let plan = self.plan.window.ok_or(PolicyError::NoWindow)?;
        let share = plan.share(plan.rank, self.plan.parameters);
        let (vector, writes) = match action {
            TableAction::Begin { from, .. } | TableAction::Add { from, .. } => (from, false),
            TableAction::Read { into, .. } => (into, true),
        };
        if vector == Vector::Arrival && (writes || !self.has_arrival) {
            return Err(PolicyError::NoArrival);
        }
        self.ledger.check(User::Update, vector, &share, writes)?;
        let [elements] = vectors.pieces([vector], &share);
        match (action, &mut self.table) {
            (TableAction::Begin { is_ordered, .. }, table) => {
                *table = Some(Table::new(elements, plan.ranks, is_ordered).of_rows(plan.row));
            }
            (TableAction::Add { rank, .. }, Some(table)) if rank < plan.ranks => table.add(rank, elements),
            (TableAction::Read { with_pending, .. }, Some(table)) => table.read(elements, with_pending),
            _ => return Err(PolicyError::NoTable),
        }
        Ok(())
    }

    fn expect_no_arrival(&self, vector: Vector) -> Result<(), PolicyError> {
        if vector == Vector::Arrival { Err(PolicyError::NoArrival) } else { Ok(()) }
    }

    fn expect_inside(&self, piece: &Range<usize>) -> Result<(), PolicyError> {
        let parameters = self.plan.parameters;
        if piece.start <= piece.end && piece.end <= parameters {
            Ok(())
        } else {
            Err(PolicyError::Outside { piece: piece.clone(), parameters })
        }
    }

    fn update(
        &mut self,
        update: &Update,
        vectors: &mut impl Vectors,
        optimizer: &mut dyn FnMut(&mut [f32], &[f32]),
    ) -> Result<(), PolicyError> {
        if self.is_stopped && *update == Update::Step {
            return Err(PolicyError::AfterStop);
        }
        let piece = update.piece().cloned().unwrap_or(0..self.plan.parameters);
        self.expect_inside(&piece)?;
        for vector in update.reads() {
            if *vector == Vector::Arrival && !self.has_arrival {
                return Err(PolicyError::NoArrival);
            }
            self.ledger.check(User::Update, *vector, &piece, false)?;
        }
        for vector in update.writes() {
            self.expect_no_arrival(*vector)?;
            self.ledger.check(User::Update, *vector, &piece, true)?;
        }
        if matches!(update, Update::Step | Update::StepPiece { .. }) {
            self.staleness.end_gradient();
        }
        apply(update, &piece, vectors, optimizer)
    }

    fn agree(&mut self, vector: Vector, vectors: &mut impl Vectors) -> Result<(), PolicyError> {
        let all = 0..self.plan.parameters;
        self.expect_no_arrival(vector)?;
        self.ledger.check(User::Update, vector, &all, false)?;
        self.agreement.places += 1;
        if vector == Vector::Parameters {
            self.staleness.exchanged();
        }
        if self.agreement.is_hashed {
            let [elements] = vectors.pieces([vector], &all);
            self.agreement.digest = chain(self.agreement.digest, digest(elements));
        }
        Ok(())
    }
}

/// A hash over the bits of elements.
#[must_use]
pub fn digest(elements: &[f32]) -> u64 {
    /// Hashes side by side, as each waits for its multiplication.
    const LANES: usize = 4;
    /// 2⁶⁴ divided by the golden ratio.
    const FACTOR: u64 = 0x9e37_79b9_7f4a_7c15;
    let word = |pair: &[f32]| {
        let high = pair.get(1).map_or(0, |element| u64::from(element.to_bits()));
        high << 32 | u64::from(pair[0].to_bits())
    };
    let mut lanes = [0_u64; LANES];
    let mut blocks = elements.chunks_exact(2 * LANES);
    for block in &mut blocks {
        for (lane, pair) in lanes.iter_mut().zip(block.chunks_exact(2)) {
            *lane = (lane.rotate_left(29) ^ word(pair)).wrapping_mul(FACTOR);
        }
    }
    let rest = blocks.remainder().chunks(2).map(word);
    lanes.into_iter().chain(rest).fold(elements.len() as u64, chain)
}

/// Encodes a piece of a rank for all owners of its parts.
pub(crate) fn encode(
    vectors: &mut impl Vectors,
    parts: &Parts,
    vector: Vector,
    piece: &Range<usize>,
    out: &mut Vec<u8>,
) {
    if parts.compression.keeps_residuals() {
        let [elements, residual] = vectors.pieces([vector, Vector::Residual], piece);
        parts.encode(elements, residual, out);
    } else {
        let [elements] = vectors.pieces([vector], piece);
        parts.encode(elements, &mut [], out);
    }
}

/// Encodes the average of the parts of all ranks that this rank owns.
pub(crate) fn combine(
    vectors: &mut impl Vectors,
    parts: &Parts,
    own: Rank,
    piece: &Range<usize>,
    blocks: &[u8],
    out: &mut Vec<u8>,
) {
    if parts.compression.keeps_residuals() {
        let part = parts.part(own);
        let owned = piece.start + part.start..piece.start + part.end;
        let [residual] = vectors.pieces([Vector::OwnedResidual], &owned);
        parts.combine(own, blocks, residual, out);
    } else {
        parts.combine(own, blocks, &mut [], out);
    }
}

/// The arithmetic of an update.
fn apply(
    update: &Update,
    piece: &Range<usize>,
    vectors: &mut impl Vectors,
    optimizer: &mut dyn FnMut(&mut [f32], &[f32]),
) -> Result<(), PolicyError> {
    match *update {
        Update::StepPiece { .. } => return vectors.step(piece),
        Update::Step if vectors.has_optimizer() => return vectors.step(piece),
        Update::Step => {
            let [parameters, gradient] = vectors.pieces([Vector::Parameters, Vector::Gradient], piece);
            optimizer(parameters, gradient);
        }
        Update::Copy { from, into, .. } => {
            let [from, into] = vectors.pieces([from, into], piece);
            into.copy_from_slice(from);
        }
        Update::Mix { into, alpha, from, beta, .. } => {
            let [from, into] = vectors.pieces([from, into], piece);
            for (into, from) in into.iter_mut().zip(from) {
                *into = alpha * *into + beta * *from;
            }
        }
        Update::Scale { vector, factor, .. } => {
            let [elements] = vectors.pieces([vector], piece);
            elements.iter_mut().for_each(|element| *element *= factor);
        }
        Update::Elastic { rate, .. } => {
            let [delta, parameters, centre] =
                vectors.pieces([Vector::Delta, Vector::Parameters, Vector::Centre], piece);
            for ((delta, parameter), centre) in delta.iter_mut().zip(parameters).zip(centre) {
                *delta = rate * (*parameter - *centre);
            }
        }
        Update::Difference { .. } => {
            let [delta, anchor, parameters] =
                vectors.pieces([Vector::Delta, Vector::Anchor, Vector::Parameters], piece);
            for ((delta, anchor), parameter) in delta.iter_mut().zip(anchor).zip(parameters) {
                *delta = *anchor - *parameter;
            }
        }
        Update::Outer { learning_rate, momentum, .. } => {
            let names = [Vector::Velocity, Vector::Anchor, Vector::Parameters, Vector::Delta];
            let [velocity, anchor, parameters, delta] = vectors.pieces(names, piece);
            let written = velocity.iter_mut().zip(anchor).zip(parameters);
            for (((velocity, anchor), parameter), delta) in written.zip(delta) {
                *velocity = momentum * *velocity + *delta;
                *anchor -= learning_rate * (*delta + momentum * *velocity);
                *parameter = *anchor;
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_step_is_in_the_bin_of_its_staleness() {
        let mut staleness = Staleness::default();
        // An exchange after 3 steps, and then none in 140.
        for steps in [3, 140] {
            (0..steps).for_each(|_| {
                staleness.computed();
                staleness.end_gradient();
            });
            staleness.exchanged();
        }
        // 0 and 1 come twice, and so do 2; then 3 and 4, 5 to 8, and so on to 139.
        assert_eq!(staleness.histogram(), [2, 2, 2, 2, 4, 8, 16, 32, 64, 11]);
        assert_eq!(staleness.histogram().iter().sum::<u64>(), 143);
        assert_eq!((staleness.most(), staleness.sum()), (139, 3 + 139 * 70));
    }

    #[test]
    fn a_step_that_is_made_after_an_exchange_counts_from_there() {
        let mut staleness = Staleness::default();
        staleness.computed();
        staleness.exchanged();
        assert_eq!(staleness.next(), 1, "its gradient was computed before");
        staleness.end_gradient();
        staleness.computed();
        staleness.end_gradient();
        assert_eq!(staleness.next(), 2);
        staleness.exchanged();
        assert_eq!((staleness.next(), staleness.most(), staleness.sum()), (0, 1, 1));
    }

    #[test]
    fn a_digest_changes_with_each_bit_with_the_order_and_with_the_length() {
        let elements: Vec<f32> = (0..21_u8).map(f32::from).collect();
        let same = digest(&elements);
        assert_eq!(digest(&elements.clone()), same);
        for place in 0..elements.len() {
            for bit in 0..32 {
                let mut other = elements.clone();
                other[place] = f32::from_bits(other[place].to_bits() ^ 1 << bit);
                assert_ne!(digest(&other), same, "bit {bit} of element {place}");
                // Two signs that change must not cancel each other.
                let next = (place + 8) % elements.len();
                other[next] = f32::from_bits(other[next].to_bits() ^ 1 << bit);
                assert_ne!(digest(&other), same, "bit {bit} of elements {place} and {next}");
            }
        }
        let swapped: Vec<f32> = elements.iter().rev().copied().collect();
        assert_ne!(digest(&swapped), same);
        assert_ne!(digest(&[0.0; 16]), digest(&[0.0; 17]));
    }
}

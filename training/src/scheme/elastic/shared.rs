//! A centre of which each rank owns a share, which peers read and write to.
//!
//! In an exchange a rank reads the shares of all owners, and sends each of them what it changes its
//! share by. An owner adds what comes, and publishes its share again. At the end each rank reads
//! the whole centre, when all changes were added.
//!
//! * *Elastic*: the change is `d = a(x - c)`. It travels while the gradient at `x` is computed, and
//!   after the step `x ← x - d`.
//! * *DOWNPOUR*: the change is what the steps since the last exchange have changed, `d = x - x'`.
//!   Then `x ← c + d`, which is the centre after that change.
//!
//! Without turns no rank waits for another before the end. A change for which an owner has no
//! credit is refused:
//!
//! * *Elastic*: the exchange of that share is left out. Its centre and its parameters stay as they
//!   are.
//! * *DOWNPOUR*: the change is kept. The anchor of that share becomes the centre that was read, so
//!   the next change `x - x'` holds the one that was refused, and the last one is sent at the end,
//!   with the steps since then.
//!
//! **Invariants:** the centre has changed by the sum of all changes: each is added once, by itself
//! or as a part of a later one. With turns, ranks exchange in the order of ranks, each with the
//! centre that all before it have changed.

use std::ops::Range;

use pleach_collectives::Rank;
use pleach_transport::clock::Nanos;

use super::LocalStep;
use super::turns::Turns;
use crate::policy::{Action, Actions, Event, OperationIds, Outcome, Policy, Reads, Update, Vector};
use crate::scheme::finish::{Finish, Word};
use crate::shares::WindowPlan;
use crate::state::State;

/// How a rank and the centre change each other.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Rule {
    /// By this moving rate.
    Elastic(f32),
    /// DOWNPOUR.
    Downpour,
}

/// What a rank does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// It computes.
    Computing,
    /// It waits for its turn.
    Waiting,
    /// It reads the centre for an exchange.
    Exchanging,
    /// It waits for the last changes of its share.
    Finishing,
    /// It waits until all owners have published the last version of their shares.
    Awaiting,
    /// It reads the centre at the end, or has done so.
    Ending,
}

/// The policy of [`Scheme::Elastic`](crate::Scheme::Elastic) whose mode is not `sync`, and of
/// [`Scheme::Downpour`](crate::Scheme::Downpour).
#[derive(Debug)]
pub(crate) struct SharedCentre {
    local: LocalStep,
    rule: Rule,
    every: u64,
    plan: WindowPlan,
    share: Range<usize>,
    turns: Option<Turns>,
    phase: Phase,
    next_step: u64,
    ids: OperationIds,
    reading: u32,
    writing: u32,
    /// With DOWNPOUR, by rank: whether a change of its share was refused and not sent since.
    is_kept: Vec<bool>,
    /// Whether parameters are pulled after the next step.
    is_pulled: bool,
    /// The version of this rank's share, as it counts them.
    published: u64,
    /// By rank: whether it has published the last version of its share.
    is_final: Vec<bool>,
    finish: Finish,
}

impl SharedCentre {
    pub(crate) fn new(local: LocalStep, rule: Rule, every: u64, plan: WindowPlan, takes_turns: bool) -> Self {
        Self {
            local,
            rule,
            every,
            plan,
            share: plan.share(plan.rank, local.parameters),
            turns: takes_turns.then(|| Turns::new(plan.rank, plan.ranks)),
            phase: Phase::Computing,
            next_step: 0,
            ids: OperationIds::default(),
            reading: 0,
            writing: 0,
            is_kept: vec![false; plan.ranks as usize],
            is_pulled: false,
            published: 0,
            is_final: vec![false; plan.ranks as usize],
            finish: Finish::new(plan),
        }
    }

    fn copy(&self, from: Vector, into: Vector, actions: &mut Actions) {
        actions.update(Update::Copy { from, into, piece: 0..self.local.parameters });
    }

    /// `into ← into + beta·from`.
    fn add(&self, into: Vector, from: Vector, beta: f32, actions: &mut Actions) {
        actions.update(Update::Mix { into, alpha: 1.0, from, beta, piece: 0..self.local.parameters });
    }

    fn start(&mut self, actions: &mut Actions) {
        self.copy(Vector::Parameters, Vector::Centre, actions);
        if self.rule == Rule::Downpour {
            self.copy(Vector::Parameters, Vector::Anchor, actions);
        }
        self.publish(actions);
        self.compute(actions);
    }

    fn publish(&mut self, actions: &mut Actions) {
        actions.push(Action::Publish { vector: Vector::Centre, word: self.published });
        self.published += 1;
    }

    fn compute(&mut self, actions: &mut Actions) {
        self.phase = Phase::Computing;
        self.local.look_ahead(actions);
        actions.compute(self.next_step);
    }

    fn computed(&mut self, step: u64, actions: &mut Actions) {
        self.local.step(actions);
        if std::mem::take(&mut self.is_pulled) {
            self.add(Vector::Parameters, Vector::Delta, -1.0, actions);
        }
        self.next_step = step + 1;
        if !self.next_step.is_multiple_of(self.every) {
            return self.compute(actions);
        }
        self.phase = Phase::Waiting;
        self.try_turn(actions);
    }

    fn try_turn(&mut self, actions: &mut Actions) {
        if self.turns.as_ref().is_some_and(|turns| turns.missing().is_some()) {
            return;
        }
        if let Some(turns) = &mut self.turns {
            turns.take();
        }
        self.phase = Phase::Exchanging;
        self.read(actions);
    }

    /// Reads the whole centre.
    fn read(&mut self, actions: &mut Actions) {
        for from in self.plan.peers() {
            let id = self.ids.take();
            actions.push(Action::Read { id, from, into: Vector::Centre, reads: Reads::Consistent });
            self.reading += 1;
        }
        self.has_read(actions);
    }

    fn has_read(&mut self, actions: &mut Actions) {
        // The writes of the last exchange use the change still.
        if self.reading > 0 || self.writing > 0 {
            return;
        }
        match self.phase {
            Phase::Exchanging => self.exchange(actions),
            Phase::Ending => {
                self.copy(Vector::Centre, Vector::Parameters, actions);
                actions.push(Action::Agreed(Vector::Parameters));
            }
            _ => {}
        }
    }

    fn exchange(&mut self, actions: &mut Actions) {
        match self.rule {
            Rule::Elastic(rate) => {
                actions.update(Update::Elastic { rate, piece: 0..self.local.parameters });
                self.is_pulled = true;
            }
            Rule::Downpour => {
                self.copy(Vector::Parameters, Vector::Delta, actions);
                self.add(Vector::Delta, Vector::Anchor, -1.0, actions);
                self.copy(Vector::Centre, Vector::Parameters, actions);
                self.add(Vector::Parameters, Vector::Delta, 1.0, actions);
                self.copy(Vector::Parameters, Vector::Anchor, actions);
            }
        }
        self.change(Vector::Delta, actions);
        for to in self.plan.peers() {
            self.is_kept[to as usize] = false;
            self.write(to, self.turns.is_some(), actions);
        }
        actions.push(Action::Exchanged);
        self.compute(actions);
    }

    /// Sends the owner of a share what this rank changes it by.
    fn write(&mut self, to: Rank, waits: bool, actions: &mut Actions) {
        let id = self.ids.take();
        actions.push(Action::Write { id, to, from: Vector::Delta, word: self.next_step, waits });
        self.writing += 1;
        self.finish.sent(to);
    }

    /// An owner has no credit for a change, and the share stays as it is.
    fn refused(&mut self, by: Rank, actions: &mut Actions) {
        self.finish.refused(by);
        let piece = self.plan.share(by, self.local.parameters);
        match self.rule {
            Rule::Elastic(_) => actions.update(Update::Scale { vector: Vector::Delta, factor: 0.0, piece }),
            Rule::Downpour => {
                self.is_kept[by as usize] = true;
                actions.update(Update::Copy { from: Vector::Centre, into: Vector::Anchor, piece });
            }
        }
    }

    /// After the last step: sends the changes that were refused.
    fn send_kept(&mut self, actions: &mut Actions) {
        for to in self.plan.peers() {
            if !std::mem::take(&mut self.is_kept[to as usize]) {
                continue;
            }
            let piece = self.plan.share(to, self.local.parameters);
            let (from, into) = (Vector::Parameters, Vector::Delta);
            actions.update(Update::Copy { from, into, piece: piece.clone() });
            let from = Vector::Anchor;
            actions.update(Update::Mix { into, alpha: 1.0, from, beta: -1.0, piece });
            self.write(to, true, actions);
        }
    }

    /// Adds a change to this rank's share.
    fn change(&mut self, from: Vector, actions: &mut Actions) {
        let (into, piece) = (Vector::Centre, self.share.clone());
        actions.update(Update::Mix { into, alpha: 1.0, from, beta: 1.0, piece });
        self.publish(actions);
        if let Some(turns) = &mut self.turns {
            turns.added(actions);
        }
    }

    /// Returns whether a rank sends this word now.
    fn told(&mut self, from: Rank, word: u64) -> bool {
        match Word::decode(word) {
            Word::Round(_) => self.turns.as_mut().is_some_and(|turns| turns.owner_is_ready(from)),
            Word::Finished(sent) => self.finish.told(from, sent),
            Word::Result(_) => {
                self.finish.has_told(from) && !std::mem::replace(&mut self.is_final[from as usize], true)
            }
            Word::Held(_) => false,
        }
    }

    /// Adds a peer's change to this rank's share; returns whether that writes now.
    fn arrived(&mut self, from: Rank, actions: &mut Actions) -> bool {
        if !self.finish.came(from) || self.turns.as_ref().is_some_and(|turns| !turns.is_next(from)) {
            return false;
        }
        self.change(Vector::Arrival, actions);
        true
    }

    /// Goes on where this rank waits for others.
    fn advance(&mut self, actions: &mut Actions) {
        if self.phase == Phase::Waiting {
            self.try_turn(actions);
        }
        if self.phase == Phase::Finishing && self.finish.missing().is_none() {
            actions.push(Action::Conserved(self.finish.has_all()));
            for peer in self.plan.peers() {
                Word::Result(self.published).tell(peer, actions);
            }
            self.is_final[self.plan.rank as usize] = true;
            self.phase = Phase::Awaiting;
        }
        let mut missing = self.missing();
        if self.phase == Phase::Awaiting && missing.is_none() {
            self.phase = Phase::Ending;
            self.read(actions);
            missing = self.missing();
        }
        if let Some(from) = missing {
            actions.push(Action::Await { from });
        }
    }

    /// A rank for whose word this one waits.
    fn missing(&self) -> Option<Rank> {
        match self.phase {
            Phase::Waiting => self.turns.as_ref().and_then(Turns::missing),
            Phase::Finishing => self.finish.missing(),
            Phase::Awaiting => self.is_final.iter().position(|is_final| !is_final).map(|rank| rank as Rank),
            Phase::Computing | Phase::Exchanging | Phase::Ending => None,
        }
    }
}

impl Policy for SharedCentre {
    fn on(&mut self, event: Event, _now: Nanos, actions: &mut Actions) {
        match event {
            Event::Start => self.start(actions),
            Event::Ready(_) | Event::Needed(_) | Event::Totalled { .. } | Event::Pause => {}
            Event::Committed | Event::Membership { .. } => {}
            Event::Resume => {
                self.publish(actions);
                // It has looked ahead already.
                actions.compute(self.next_step);
            }
            Event::Computed { step } => self.computed(step, actions),
            Event::Done(_, outcome @ (Outcome::Written | Outcome::Refused { .. })) => {
                if let Outcome::Refused { by } = outcome {
                    self.refused(by, actions);
                }
                self.writing -= 1;
                self.has_read(actions);
            }
            Event::Done(..) => {
                self.reading -= 1;
                self.has_read(actions);
            }
            Event::Arrived { from, word } => {
                if !self.arrived(from, actions) {
                    return actions.push(Action::Refuse { from, word });
                }
            }
            Event::Told { from, word } => {
                if !self.told(from, word) {
                    return actions.push(Action::Refuse { from, word });
                }
            }
            Event::Stop => {
                self.send_kept(actions);
                self.finish.begin(actions);
                self.phase = Phase::Finishing;
            }
        }
        self.advance(actions);
    }

    fn state(&mut self, state: &mut State<'_>) {
        if let Some(turns) = &mut self.turns {
            state.field(turns);
        }
        state.field(&mut self.next_step);
        state.field(&mut self.ids);
        if self.rule == Rule::Downpour {
            state.field(&mut self.is_kept);
        }
        state.field(&mut self.is_pulled);
        state.field(&mut self.published);
        state.field(&mut self.finish);
    }
}

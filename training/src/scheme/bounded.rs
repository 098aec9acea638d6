//! Bounded staleness (SSP; Ho et al. 2013) over a table whose shards the ranks own; with a bound of
//! 0 bulk synchronous (BSP).
//!
//! A step is a clock. A rank trains at its copy of the table, adds what each step changes, divided
//! by the number of ranks, to the copy and to the table, and goes on. In clock c with bound s it
//! takes a new copy if the one it has lacks a clock below c - s: it asks all owners for shards in
//! which c - s clocks are complete, and waits. Its question goes to an owner behind its updates, so
//! the answer holds them too.
//!
//! **Invariants:** a copy in clock c holds all updates of clocks up to c - s - 1, and all of the
//! rank's own. No rank is more than s clocks ahead of the slowest; owners check that. With bound 0
//! owners show complete clocks alone, so the result has the same bits in each run.

use std::ops::Range;

use pleach_collectives::Rank;
use pleach_transport::clock::Nanos;

use crate::policy::{Action, Actions, Event, OperationIds, Outcome, Policy, TableAction, Update, Vector};
use crate::scheme::finish::{Finish, Word};
use crate::shares::WindowPlan;
use crate::state::State;

/// What a rank does besides owning a shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// It computes.
    Computing,
    /// It has computed, and the last change is still being written.
    Computed,
    /// It waits until owners have so many complete clocks.
    Asking(u64),
    /// It reads.
    Reading,
    /// It has the last copy, and answers others.
    Finishing,
    /// It has ended.
    Ended,
}

/// The policy of [`Scheme::Ssp`](crate::Scheme::Ssp) and [`Scheme::Bsp`](crate::Scheme::Bsp).
#[derive(Debug)]
pub(crate) struct BoundedStaleness {
    parameters: usize,
    plan: WindowPlan,
    staleness: u64,
    phase: Phase,
    is_stopped: bool,
    next_step: u64,
    ids: OperationIds,
    reading: u32,
    writing: u32,
    /// Complete clocks in the copy.
    copied: u64,
    /// By rank: complete clocks that it has answered with.
    answers: Vec<Option<u64>>,
    /// By rank: the clocks that it has added to this rank's shard.
    clocks: Vec<u64>,
    /// Ranks that ask, and how many complete clocks each asks for.
    asked: Vec<(Rank, u64)>,
    /// Whether the shard was not published as it is.
    is_changed: bool,
    /// Whether a rank was further ahead than it may.
    is_exceeded: bool,
    finish: Finish,
}

impl BoundedStaleness {
    pub(crate) fn new(parameters: usize, staleness: u64, plan: WindowPlan) -> Self {
        let ranks = plan.ranks as usize;
        Self {
            parameters,
            plan,
            staleness,
            phase: Phase::Computing,
            is_stopped: false,
            next_step: 0,
            ids: OperationIds::default(),
            reading: 0,
            writing: 0,
            copied: 0,
            answers: vec![None; ranks],
            clocks: vec![0; ranks],
            asked: Vec::new(),
            is_changed: true,
            is_exceeded: false,
            finish: Finish::new(plan),
        }
    }

    fn whole(&self) -> Range<usize> {
        0..self.parameters
    }

    fn copy(&self, from: Vector, into: Vector, actions: &mut Actions) {
        actions.update(Update::Copy { from, into, piece: self.whole() });
    }

    fn mix(&self, into: Vector, from: Vector, beta: f32, actions: &mut Actions) {
        actions.update(Update::Mix { into, alpha: 1.0, from, beta, piece: self.whole() });
    }

    /// Complete clocks of this rank's shard.
    fn complete(&self) -> u64 {
        self.clocks.iter().copied().min().unwrap_or(0)
    }

    /// Makes the step, and sends what it changes.
    fn step(&mut self, actions: &mut Actions) {
        self.copy(Vector::Parameters, Vector::Anchor, actions);
        actions.update(Update::Step);
        self.copy(Vector::Parameters, Vector::Delta, actions);
        self.mix(Vector::Delta, Vector::Anchor, -1.0, actions);
        let factor = 1.0 / self.plan.ranks as f32;
        actions.update(Update::Scale { vector: Vector::Delta, factor, piece: self.whole() });
        self.copy(Vector::Anchor, Vector::Parameters, actions);
        self.mix(Vector::Parameters, Vector::Delta, 1.0, actions);
        self.add(self.plan.rank, Vector::Delta, actions);
        for to in self.plan.peers() {
            let id = self.ids.take();
            actions.push(Action::Write { id, to, from: Vector::Delta, word: self.next_step });
            self.writing += 1;
            self.finish.sent(to);
        }
        self.next_step += 1;
        let needed = self.next_step.saturating_sub(self.staleness);
        if self.copied >= needed {
            self.phase = Phase::Computing;
            actions.compute(self.next_step);
        } else {
            self.ask(needed, actions);
        }
    }

    /// Adds an update to this rank's shard.
    fn add(&mut self, rank: Rank, from: Vector, actions: &mut Actions) {
        actions.push(Action::Table(TableAction::Add { rank, from }));
        self.is_exceeded |= self.clocks[rank as usize] > self.complete() + self.staleness;
        self.clocks[rank as usize] += 1;
        self.is_changed = true;
        self.answer(actions);
    }

    /// Answers the ranks that ask for no more clocks than are complete.
    fn answer(&mut self, actions: &mut Actions) {
        let complete = self.complete();
        let (ready, later): (Vec<_>, Vec<_>) =
            self.asked.drain(..).partition(|(_, needed)| *needed <= complete);
        self.asked = later;
        if !ready.is_empty() && std::mem::take(&mut self.is_changed) {
            let with_pending = self.staleness > 0;
            actions.push(Action::Table(TableAction::Read { into: Vector::Centre, with_pending }));
            actions.push(Action::Publish { vector: Vector::Centre, word: complete });
        }
        for (rank, _) in ready {
            Word::Result(complete).tell(rank, actions);
        }
    }

    /// Asks all owners for so many complete clocks.
    fn ask(&mut self, needed: u64, actions: &mut Actions) {
        self.phase = Phase::Asking(needed);
        self.answers.fill(None);
        for owner in self.plan.peers() {
            Word::Round(needed).tell(owner, actions);
        }
    }

    /// Goes on where this rank waits for others.
    fn advance(&mut self, actions: &mut Actions) {
        if self.phase == Phase::Computed && self.writing == 0 {
            self.step(actions);
        }
        if matches!(self.phase, Phase::Asking(_)) && self.missing().is_none() {
            let answers = self.answers.iter().flatten().copied();
            self.copied = answers.chain([self.complete()]).min().unwrap_or(0);
            self.phase = Phase::Reading;
            for from in self.plan.peers() {
                let id = self.ids.take();
                actions.push(Action::Read { id, from, into: Vector::Fetched });
                self.reading += 1;
            }
            let with_pending = self.staleness > 0;
            actions.push(Action::Table(TableAction::Read { into: Vector::Fetched, with_pending }));
        }
        if self.phase == Phase::Reading && self.reading == 0 {
            self.copy(Vector::Fetched, Vector::Parameters, actions);
            actions.push(Action::Exchanged);
            if self.is_stopped {
                self.phase = Phase::Finishing;
                self.finish.begin(actions);
            } else {
                self.phase = Phase::Computing;
                actions.compute(self.next_step);
            }
        }
        if self.phase == Phase::Finishing && self.missing().is_none() {
            self.phase = Phase::Ended;
            actions.push(Action::Conserved(!self.is_exceeded && self.finish.has_all()));
            actions.push(Action::Agreed(Vector::Parameters));
        }
        if let Some(from) = self.missing() {
            actions.push(Action::Await { from });
        }
    }

    /// A rank for whose word or update this one waits.
    fn missing(&self) -> Option<Rank> {
        match self.phase {
            Phase::Asking(needed) => {
                let unanswered = self.plan.peers().find(|peer| self.answers[*peer as usize].is_none());
                let slow = || self.plan.peers().find(|peer| self.clocks[*peer as usize] < needed);
                unanswered.or_else(slow)
            }
            Phase::Finishing => self.finish.missing(),
            Phase::Computing | Phase::Computed | Phase::Reading | Phase::Ended => None,
        }
    }
}

impl Policy for BoundedStaleness {
    fn on(&mut self, event: Event, _now: Nanos, actions: &mut Actions) {
        match event {
            Event::Start => {
                actions.push(Action::Table(TableAction::Begin { from: Vector::Parameters }));
                actions.compute(0);
            }
            Event::Ready(_) | Event::Pause => {}
            Event::Resume => {
                self.is_changed = true;
                actions.compute(self.next_step);
            }
            Event::Computed { .. } => self.phase = Phase::Computed,
            Event::Done(_, Outcome::Written) => self.writing -= 1,
            Event::Done(..) => self.reading -= 1,
            Event::Arrived { from, .. } => {
                self.finish.came(from);
                self.add(from, Vector::Arrival, actions);
            }
            Event::Told { from, word } => match Word::decode(word) {
                Word::Round(needed) => {
                    self.asked.push((from, needed));
                    self.answer(actions);
                }
                Word::Result(complete) => self.answers[from as usize] = Some(complete),
                Word::Finished(sent) => self.finish.told(from, sent),
            },
            Event::Stop => {
                self.is_stopped = true;
                self.ask(self.next_step, actions);
            }
        }
        self.advance(actions);
    }

    fn state(&mut self, state: &mut State<'_>) {
        state.field(&mut self.next_step);
        state.field(&mut self.ids);
        state.field(&mut self.copied);
        state.field(&mut self.clocks);
        state.field(&mut self.is_exceeded);
        state.field(&mut self.finish);
    }
}

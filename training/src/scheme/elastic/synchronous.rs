//! Elastic averaging of all ranks at once: each rank has the whole centre, and an all-reduce adds
//! up how far it is pulled: `c ← c + a·Σ(x_i - c)`.
//!
//! **Invariant:** the centre has the same bits on all ranks after each exchange. An exchange is
//! under way while the next gradient is computed. Where the number of ranks changes, the next
//! moving rate is that of as many as there are. In a session an exchange is committed when the next
//! one is due, so a process that joins begins at the centre with the next one, to which it gives
//! nothing.

use pleach_transport::clock::Nanos;

use super::LocalStep;
use crate::policy::{Action, Actions, Event, OperationIds, Policy, Update, Vector};
use crate::state::State;

/// The policy of [`Scheme::Elastic`](crate::Scheme::Elastic) whose mode is `sync`.
#[derive(Debug)]
pub(crate) struct ReplicatedCentre {
    local: LocalStep,
    /// The moving rate of all ranks together.
    moving: f32,
    ranks: u32,
    every: u64,
    next_step: u64,
    ids: OperationIds,
    /// Whether parameters are pulled after the next step.
    is_pulled: bool,
    is_averaging: bool,
    /// Whether the next exchange waits for the end of the last one.
    is_due: bool,
    is_stopped: bool,
}

impl ReplicatedCentre {
    pub(crate) fn new(local: LocalStep, moving: f32, ranks: u32, every: u64) -> Self {
        Self {
            local,
            moving,
            ranks,
            every,
            next_step: 0,
            ids: OperationIds::default(),
            is_pulled: false,
            is_averaging: false,
            is_due: false,
            is_stopped: false,
        }
    }

    fn copy(&self, from: Vector, into: Vector, actions: &mut Actions) {
        actions.update(Update::Copy { from, into, piece: 0..self.local.parameters });
    }

    fn mix(&self, into: Vector, from: Vector, beta: f32, actions: &mut Actions) {
        actions.update(Update::Mix { into, alpha: 1.0, from, beta, piece: 0..self.local.parameters });
    }

    fn computed(&mut self, step: u64, actions: &mut Actions) {
        self.local.step(actions);
        if std::mem::take(&mut self.is_pulled) {
            self.mix(Vector::Parameters, Vector::Delta, -1.0, actions);
        }
        self.next_step = step + 1;
        if !self.next_step.is_multiple_of(self.every) {
            return self.compute(actions);
        }
        if self.is_averaging {
            self.is_due = true;
        } else {
            self.exchange(actions);
        }
    }

    fn exchange(&mut self, actions: &mut Actions) {
        let (piece, rate) = (0..self.local.parameters, self.moving / self.ranks as f32);
        actions.update(Update::Elastic { rate, piece: piece.clone() });
        self.copy(Vector::Delta, Vector::Fetched, actions);
        let id = self.ids.take();
        actions.push(Action::Average { id, vector: Vector::Fetched, piece });
        (self.is_averaging, self.is_pulled) = (true, true);
        actions.push(Action::Exchanged);
        self.compute(actions);
    }

    fn averaged(&mut self, actions: &mut Actions) {
        self.is_averaging = false;
        self.mix(Vector::Centre, Vector::Fetched, self.ranks as f32, actions);
        actions.push(Action::Agreed(Vector::Centre));
        if self.is_stopped {
            self.end(actions);
        } else if std::mem::take(&mut self.is_due) {
            self.exchange(actions);
        }
    }

    fn compute(&self, actions: &mut Actions) {
        self.local.look_ahead(actions);
        actions.compute(self.next_step);
    }

    fn end(&self, actions: &mut Actions) {
        self.copy(Vector::Centre, Vector::Parameters, actions);
        actions.push(Action::Agreed(Vector::Parameters));
    }
}

impl Policy for ReplicatedCentre {
    fn on(&mut self, event: Event, _now: Nanos, actions: &mut Actions) {
        match event {
            Event::Start => {
                self.copy(Vector::Parameters, Vector::Centre, actions);
                self.compute(actions);
            }
            Event::Ready(_)
            | Event::Needed(_)
            | Event::Totalled { .. }
            | Event::Arrived { .. }
            | Event::Told { .. }
            | Event::Committed
            | Event::Pause => {}
            Event::Membership { ranks, step, .. } => {
                self.ranks = ranks;
                // A process that has joined: the others have begun an exchange behind that step.
                self.is_due |= self.next_step == 0 && step > 0;
                self.next_step = step;
            }
            Event::Resume if std::mem::take(&mut self.is_due) => self.exchange(actions),
            // It has looked ahead already.
            Event::Resume => actions.compute(self.next_step),
            Event::Computed { step } => self.computed(step, actions),
            Event::Done(..) => self.averaged(actions),
            Event::Stop => {
                self.is_stopped = true;
                if !self.is_averaging {
                    self.end(actions);
                }
            }
        }
    }

    fn state(&mut self, state: &mut State<'_>) {
        state.field(&mut self.next_step);
        state.field(&mut self.ids);
        state.field(&mut self.is_pulled);
    }
}

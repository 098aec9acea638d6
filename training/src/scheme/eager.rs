//! Eager-SGD (Li et al. 2020): gradients are combined in rounds that do not wait for late ranks, so
//! ranks miss results now and then, and their parameters drift apart. Now and then parameters are
//! averaged over all ranks.
//!
//! For that average a rank steps aside: nobody waits for its gradient while it waits for theirs.
//!
//! Before a checkpoint all ranks leave the rounds, of which the last one combines the gradients
//! that no other has. Each rank adds that result to its first one after the checkpoint, which is of
//! new rounds.
//!
//! **Invariants:** all ranks have the same parameters after each average, and the last step of a
//! training is followed by one. A gradient that is carried to a checkpoint is in one result of each
//! rank after it, if steps follow: what is late at the end of a training is in none.

use pleach_transport::clock::Nanos;

use crate::policy::{Action, Actions, Event, OperationIds, Outcome, Policy, Update, Vector};
use crate::state::State;

/// The policy of [`Scheme::Eager`](super::Scheme::Eager).
#[derive(Debug)]
pub(crate) struct Eager {
    parameters: usize,
    every: u64,
    /// Whether ranks may be in different rounds when they come to an average.
    steps_aside: bool,
    /// Whether sums of gradients are divided.
    divides: bool,
    next_step: u64,
    /// Steps since the parameters of all ranks were the same.
    steps: u64,
    ids: OperationIds,
    is_stopped: bool,
    /// Whether it comes to rest before a checkpoint.
    is_paused: bool,
    /// Whether [`Vector::Delta`] holds gradients from before the checkpoint.
    carries: bool,
}

impl Eager {
    pub(crate) fn new(parameters: usize, every: u64, steps_aside: bool, divides: bool) -> Self {
        Self {
            parameters,
            every,
            steps_aside,
            divides,
            next_step: 0,
            steps: 0,
            ids: OperationIds::default(),
            is_stopped: false,
            is_paused: false,
            carries: false,
        }
    }

    fn combined(&mut self, actions: &mut Actions) {
        if std::mem::take(&mut self.carries) {
            let (into, from, piece) = (Vector::Gradient, Vector::Delta, 0..self.parameters);
            actions.update(Update::Mix { into, alpha: 1.0, from, beta: 1.0, piece });
        }
        actions.update(Update::Step);
        actions.push(Action::Exchanged);
        self.next_step += 1;
        self.steps += 1;
        if self.steps == self.every {
            if self.steps_aside {
                actions.push(Action::StepAside { line: 0 });
            }
            self.average(actions);
        } else {
            actions.compute(self.next_step);
        }
    }

    fn average(&mut self, actions: &mut Actions) {
        let (id, vector) = (self.ids.take(), Vector::Parameters);
        actions.push(Action::Average { id, vector, piece: 0..self.parameters });
    }
}

impl Policy for Eager {
    fn on(&mut self, event: Event, _now: Nanos, actions: &mut Actions) {
        match event {
            Event::Start => actions.compute(0),
            Event::Ready(_)
            | Event::Needed(_)
            | Event::Totalled { .. }
            | Event::Arrived { .. }
            | Event::Told { .. }
            | Event::Committed
            | Event::Membership { .. } => {}
            Event::Pause => {
                self.is_paused = true;
                // No gradient is late where ranks wait for all.
                let into = self.steps_aside.then_some(Vector::Delta);
                actions.push(Action::Leave { id: self.ids.take(), into });
            }
            Event::Resume => {
                self.is_paused = false;
                actions.compute(self.next_step);
            }
            Event::Computed { .. } => {
                let (id, vector) = (self.ids.take(), Vector::Gradient);
                actions.push(Action::Contribute { id, line: 0, vector, limit: u64::MAX });
            }
            Event::Done(_, Outcome::Combined { .. }) => self.combined(actions),
            Event::Done(_, Outcome::Left { carries }) if self.is_paused => self.carries |= carries,
            Event::Done(_, Outcome::Left { .. }) => {
                if self.steps > 0 {
                    self.average(actions);
                }
            }
            Event::Done(..) => {
                self.steps = 0;
                actions.push(Action::Agreed(Vector::Parameters));
                if !self.is_stopped {
                    if self.steps_aside {
                        actions.push(Action::ComeBack { line: 0 });
                    }
                    actions.compute(self.next_step);
                }
            }
            Event::Stop => {
                self.is_stopped = true;
                actions.push(Action::Leave { id: self.ids.take(), into: None });
            }
        }
    }

    fn state(&mut self, state: &mut State<'_>) {
        state.field(&mut self.next_step);
        state.field(&mut self.steps);
        state.field(&mut self.ids);
        state.field(&mut self.carries);
    }

    fn remark(&self) -> Option<String> {
        let remark = "sums of gradients are not divided, so more contributors make a step longer; a \
                      learning rate that was found for averages is as many times too large as there are ranks";
        (!self.divides).then(|| remark.to_owned())
    }
}

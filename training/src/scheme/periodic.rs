//! Local steps, and an exchange of parameters now and then: local SGD and DiLoCo.
//!
//! In an exchange local SGD averages parameters. DiLoCo averages what the steps since the last
//! exchange changed (the pseudo-gradient), and an outer optimizer takes its step by that
//! (Douillard et al. 2023, algorithm 1).
//!
//! Compressed local SGD averages changes too: that is DiLoCo whose outer step is the average.
//!
//! **Invariants:** exchanges are after the same steps on all ranks, and the last step of a training
//! is followed by one. While an exchange is under way nothing is computed.

use std::ops::Range;

use pleach_transport::clock::Nanos;

use crate::compression::Compression;
use crate::policy::{Action, Actions, Event, OperationIds, Policy, Update, Vector};
use crate::state::State;

/// The parameters of an outer optimizer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Outer {
    /// Of a step.
    pub(crate) learning_rate: f32,
    /// The share of the velocity that is kept.
    pub(crate) momentum: f32,
}

/// The policy of [`Scheme::LocalSgd`](super::Scheme::LocalSgd) and
/// [`Scheme::Diloco`](super::Scheme::Diloco).
#[derive(Debug)]
pub(crate) struct Periodic {
    whole: Range<usize>,
    every: u64,
    warmup: u64,
    outer: Option<Outer>,
    /// Of changes; the gradients of synchronous steps are not compressed.
    compression: Compression,
    /// Local steps since the parameters of all ranks were the same.
    local_steps: u64,
    next_step: u64,
    ids: OperationIds,
    is_stopped: bool,
}

impl Periodic {
    /// An exchange every `every` steps, after `warmup` synchronous ones.
    pub(crate) fn new(
        parameters: usize,
        every: u64,
        warmup: u64,
        outer: Option<Outer>,
        compression: Compression,
    ) -> Self {
        let whole = 0..parameters;
        Self {
            whole,
            every,
            warmup,
            outer,
            compression,
            local_steps: 0,
            next_step: 0,
            ids: OperationIds::default(),
            is_stopped: false,
        }
    }

    fn average(&mut self, vector: Vector, compression: Compression, actions: &mut Actions) {
        let id = self.ids.take();
        actions.average(id, vector, self.whole.clone(), compression);
    }

    /// Changes are counted from here.
    fn set_anchor(&self, actions: &mut Actions) {
        if self.outer.is_some() {
            let (from, into) = (Vector::Parameters, Vector::Anchor);
            actions.update(Update::Copy { from, into, piece: self.whole.clone() });
        }
    }

    fn exchange(&mut self, actions: &mut Actions) {
        if self.outer.is_some() {
            actions.update(Update::Difference { piece: self.whole.clone() });
            self.average(Vector::Delta, self.compression, actions);
        } else {
            self.average(Vector::Parameters, Compression::None, actions);
        }
    }

    fn computed(&mut self, step: u64, actions: &mut Actions) {
        self.next_step = step + 1;
        if step < self.warmup {
            return self.average(Vector::Gradient, Compression::None, actions);
        }
        actions.update(Update::Step);
        self.local_steps += 1;
        if self.local_steps == self.every {
            self.exchange(actions);
        } else {
            actions.compute(self.next_step);
        }
    }

    fn averaged(&mut self, actions: &mut Actions) {
        if self.local_steps == 0 {
            // The gradient of a synchronous step.
            actions.update(Update::Step);
            self.set_anchor(actions);
        } else if let Some(Outer { learning_rate, momentum }) = self.outer {
            actions.update(Update::Outer { learning_rate, momentum, piece: self.whole.clone() });
        }
        self.local_steps = 0;
        actions.push(Action::Agreed(Vector::Parameters));
        if !self.is_stopped {
            actions.compute(self.next_step);
        }
    }
}

impl Policy for Periodic {
    fn on(&mut self, event: Event, _now: Nanos, actions: &mut Actions) {
        match event {
            Event::Start => {
                self.set_anchor(actions);
                actions.compute(0);
            }
            Event::Ready(_)
            | Event::Needed(_)
            | Event::Totalled { .. }
            | Event::Arrived { .. }
            | Event::Told { .. }
            | Event::Committed
            | Event::Pause => {}
            // A process that has joined has made none.
            Event::Membership { step, .. } => self.next_step = step,
            Event::Resume => actions.compute(self.next_step),
            Event::Computed { step } => self.computed(step, actions),
            Event::Done(..) => self.averaged(actions),
            Event::Stop => {
                self.is_stopped = true;
                if self.local_steps > 0 {
                    self.exchange(actions);
                }
            }
        }
    }

    fn state(&mut self, state: &mut State<'_>) {
        state.field(&mut self.local_steps);
        state.field(&mut self.next_step);
        state.field(&mut self.ids);
    }
}

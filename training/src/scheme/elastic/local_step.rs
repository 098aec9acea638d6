//! The step of a rank by itself, with the momentum of EAMSGD if there is one.
//!
//! With momentum δ a rank looks ahead before the gradient: `v ← δv`, `x ← x + v`. What the
//! optimizer changes then is added to `v`. The optimizer itself has no momentum.

use crate::policy::{Actions, Update, Vector};

/// See the module.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LocalStep {
    pub(crate) parameters: usize,
    pub(crate) momentum: Option<f32>,
}

impl LocalStep {
    /// Goes to where the gradient is taken.
    pub(crate) fn look_ahead(&self, actions: &mut Actions) {
        let Some(factor) = self.momentum else { return };
        actions.update(Update::Scale { vector: Vector::Velocity, factor, piece: 0..self.parameters });
        self.add(Vector::Parameters, 1.0, Vector::Velocity, actions);
    }

    /// Steps by the gradient.
    pub(crate) fn step(&self, actions: &mut Actions) {
        if self.momentum.is_none() {
            return actions.update(Update::Step);
        }
        let (from, into) = (Vector::Parameters, Vector::Anchor);
        actions.update(Update::Copy { from, into, piece: 0..self.parameters });
        actions.update(Update::Step);
        self.add(Vector::Anchor, -1.0, Vector::Parameters, actions);
        self.add(Vector::Velocity, 1.0, Vector::Anchor, actions);
    }

    /// `into ← alpha·into + from`.
    fn add(&self, into: Vector, alpha: f32, from: Vector, actions: &mut Actions) {
        actions.update(Update::Mix { into, alpha, from, beta: 1.0, piece: 0..self.parameters });
    }
}

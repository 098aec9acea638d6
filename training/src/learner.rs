//! What ranks train, where the driver computes gradients by itself; and the local optimizer.

use std::ops::Range;

use pleach_collectives::Rank;

use crate::layout::Layout;

/// A model with its data. The gradient is a function of the rank, the step and the parameters
/// alone, so the same training runs on real ranks and in virtual time.
pub trait Learner: Sync {
    /// The layers of the model.
    fn layout(&self) -> Layout;

    /// The parameters with which all ranks begin.
    fn initial(&self) -> Vec<f32>;

    /// How much time a pass spends in each layer, in any unit: as many numbers as the layout has
    /// layers. A simulation shares computing times out by it; unless changed, a layer takes time
    /// for each parameter.
    fn work(&self) -> Vec<u64> {
        self.layout().layers().iter().map(|length| *length as u64).collect()
    }

    /// Stores the gradient of the mean loss over the rank's batch of this step, and returns that
    /// loss. Both slices are as long as the layout.
    fn gradient(&self, rank: Rank, step: u64, parameters: &[f32], gradient: &mut [f32]) -> f32;
}

/// Stochastic gradient descent with momentum: `v ← momentum·v - rate·g`, `x ← x + v`.
#[derive(Clone, Debug)]
pub struct Sgd {
    learning_rate: f32,
    momentum: f32,
    velocity: Vec<f32>,
    /// Whether any velocity may be other than 0.
    is_moving: bool,
}

impl Sgd {
    /// For that number of parameters, at rest.
    #[must_use]
    pub fn new(parameters: usize, learning_rate: f32, momentum: f32) -> Self {
        Self { learning_rate, momentum, velocity: vec![0.0; parameters], is_moving: false }
    }

    /// What a checkpoint has to keep of it.
    #[must_use]
    pub fn velocity(&self) -> &[f32] {
        &self.velocity
    }

    /// The velocity, to be restored.
    pub fn velocity_mut(&mut self) -> &mut [f32] {
        self.is_moving = true;
        &mut self.velocity
    }

    /// Goes a step against the gradient.
    pub fn step(&mut self, parameters: &mut [f32], gradient: &[f32]) {
        self.step_piece(0..parameters.len(), parameters, gradient);
    }

    /// The same for some elements alone, which are those of both slices.
    ///
    /// # Panics
    ///
    /// There are fewer parameters.
    pub fn step_piece(&mut self, piece: Range<usize>, parameters: &mut [f32], gradient: &[f32]) {
        if self.momentum == 0.0 {
            // What a checkpoint had of another momentum.
            if std::mem::take(&mut self.is_moving) {
                self.velocity.fill(0.0);
            }
            assert!(piece.end <= self.velocity.len(), "a piece of the parameters");
            for (parameter, gradient) in parameters.iter_mut().zip(gradient) {
                *parameter -= self.learning_rate * gradient;
            }
            return;
        }
        self.is_moving = true;
        let moving = parameters.iter_mut().zip(&mut self.velocity[piece]);
        for ((parameter, velocity), gradient) in moving.zip(gradient) {
            *velocity = self.momentum * *velocity - self.learning_rate * gradient;
            *parameter += *velocity;
        }
    }
}

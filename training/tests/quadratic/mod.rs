//! The smallest model on which elastic averaging may diverge.

use pleach_training::{Layout, Learner};
use pleach_vocabulary::Rank;

/// `f(x) = x²/2` in one dimension, from 1: the gradient is `x` on all ranks.
pub(crate) struct Quadratic;

impl Learner for Quadratic {
    fn layout(&self) -> Layout {
        Layout::of(&[1])
    }

    fn initial(&self) -> Vec<f32> {
        vec![1.0]
    }

    fn gradient(&self, _: Rank, _: u64, parameters: &[f32], gradient: &mut [f32]) -> f32 {
        gradient.copy_from_slice(parameters);
        parameters[0] * parameters[0] / 2.0
    }
}

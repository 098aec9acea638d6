//! One step in time: what computes when, and what waits for what.
//!
//! Time begins with the backward pass. When the next forward pass has ended, all weights have been
//! exchanged, as each layer waited for its own. So a step is one backward pass and the forward pass
//! behind it, and nothing is left over for the next.

use super::{LayerPlan, PlanError};
use crate::order::{Job, by_ready, finish_times, planned};

/// Into how many parts the exchange of a layer is cut at most. It has no more than its messages.
const PARTS_MAX: u64 = 64;

/// Longest time of a step.
const STEP_MAX_S: f64 = 1e6;

const NS_PER_S: f64 = 1e9;

/// In which order weight gradients are exchanged.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OrderRule {
    /// The order that lets the next forward pass wait least.
    #[default]
    Planned,
    /// First come, first served, each layer as a whole.
    Fifo,
}

/// A step of a network over ranks.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Timeline {
    layers: Vec<LayerPlan>,
    step_s: f64,
    delay_s: f64,
}

impl Timeline {
    pub(crate) fn layers(&self) -> &[LayerPlan] {
        &self.layers
    }

    /// The time of the step.
    pub(crate) fn step_s(&self) -> f64 {
        self.step_s
    }

    /// The part of it in which the forward pass waits for weights.
    pub(crate) fn delay_s(&self) -> f64 {
        self.delay_s
    }
}

/// The step of these layers.
pub(crate) fn timeline(layers: Vec<LayerPlan>, order: OrderRule) -> Result<Timeline, PlanError> {
    let busy_s: f64 = layers.iter().map(|layer| layer.computing_s() + layer.exposed_s()).sum();
    let exchanges_s: f64 = layers.iter().map(LayerPlan::overlapped_s).sum();
    if busy_s + exchanges_s > STEP_MAX_S {
        return Err(PlanError::TooLong { step_s: busy_s + exchanges_s });
    }
    let mut now_s = 0.0;
    let mut ready_s = vec![0.0; layers.len()];
    for (layer, ready_s) in layers.iter().zip(&mut ready_s).rev() {
        now_s += layer.backward_s() + layer.exposed_s() - layer.exposed_before_s();
        *ready_s = now_s;
    }
    let (mut jobs, mut layer_of) = (Vec::new(), Vec::new());
    for (number, (layer, ready_s)) in layers.iter().zip(ready_s).enumerate() {
        let parts = match order {
            OrderRule::Fifo => layer.weights().messages.min(1),
            OrderRule::Planned => layer.weights().messages.min(PARTS_MAX),
        };
        let (ready, due, time) = (ns(ready_s), ns(now_s), ns(layer.overlapped_s()));
        let parts = parts as i64;
        let part = |part: i64| Job { ready, due, time: time * (part + 1) / parts - time * part / parts };
        jobs.extend((0..parts).map(part));
        layer_of.resize(jobs.len(), number);
        now_s += layer.exposed_before_s() + layer.pass_s();
    }
    let sequence = match order {
        OrderRule::Planned => planned(&jobs),
        OrderRule::Fifo => by_ready(&jobs),
    };
    let mut late_s = vec![0.0; layers.len()];
    for (&job, end) in sequence.iter().zip(finish_times(&jobs, &sequence)) {
        let late = end - jobs[job as usize].due;
        late_s[layer_of[job as usize]] = late.max(0) as f64 / NS_PER_S;
    }
    let delay_s = late_s.iter().copied().fold(0.0, f64::max);
    let layers = layers.into_iter().zip(late_s).map(|(layer, late_s)| layer.delayed(late_s)).collect();
    Ok(Timeline { layers, step_s: now_s + delay_s, delay_s })
}

/// In nanoseconds.
fn ns(time_s: f64) -> i64 {
    (time_s * NS_PER_S).round() as i64
}

//! Synchronous SGD: each step is made by the average of all ranks' gradients.
//!
//! **Invariants:** buckets are averaged in their order on each rank, whatever the order in which
//! they become ready, as all ranks must start operations in one order. The step is made once, when
//! the averages of all buckets are there.

use std::ops::Range;

use pleach_transport::clock::Nanos;

use crate::layout::Bucket;
use crate::policy::{Action, Actions, Event, OperationIds, Policy, Update, Vector};

/// The policy of [`Scheme::Sync`](super::Scheme::Sync).
#[derive(Debug)]
pub(crate) struct Synchronous {
    buckets: Vec<Range<usize>>,
    /// By bucket: whether its gradient is ready in this step.
    is_ready: Vec<bool>,
    /// The buckets whose average was started in this step.
    started: usize,
    /// The buckets whose average is there.
    averaged: usize,
    ids: OperationIds,
    /// The step whose gradient is complete.
    computed: Option<u64>,
}

impl Synchronous {
    /// For these buckets.
    pub(crate) fn new(buckets: Vec<Range<usize>>) -> Self {
        let is_ready = vec![false; buckets.len()];
        Self { buckets, is_ready, started: 0, averaged: 0, ids: OperationIds::default(), computed: None }
    }

    fn ready(&mut self, bucket: Bucket, actions: &mut Actions) {
        self.is_ready[bucket] = true;
        while self.is_ready.get(self.started) == Some(&true) {
            let (id, piece) = (self.ids.take(), self.buckets[self.started].clone());
            actions.push(Action::Average { id, vector: Vector::Gradient, piece });
            self.started += 1;
        }
    }

    /// Makes the step if everything for it is there.
    fn step(&mut self, actions: &mut Actions) {
        let Some(step) = self.computed.filter(|_| self.averaged == self.buckets.len()) else { return };
        actions.update(Update::Step);
        actions.push(Action::Agreed(Vector::Parameters));
        self.is_ready.fill(false);
        (self.started, self.averaged, self.computed) = (0, 0, None);
        actions.compute(step + 1);
    }
}

impl Policy for Synchronous {
    fn on(&mut self, event: Event, _now: Nanos, actions: &mut Actions) {
        match event {
            Event::Start => actions.compute(0),
            Event::Ready(bucket) => self.ready(bucket, actions),
            Event::Computed { step } => {
                self.computed = Some(step);
                self.step(actions);
            }
            Event::Done(..) => {
                self.averaged += 1;
                self.step(actions);
            }
            // The parameters are the same already, and nobody tells anything.
            Event::Stop | Event::Arrived { .. } | Event::Told { .. } => {}
        }
    }
}

//! Synchronous SGD: each step is made by the average of all ranks' gradients.
//!
//! **Invariants:** buckets are averaged in their order on each rank, whatever the order in which
//! they become ready, as all ranks must start operations in one order. The step is made once, when
//! the averages of all buckets are there.

use std::ops::Range;

use pleach_transport::clock::Nanos;

use crate::compression::Compression;
use crate::layout::Bucket;
use crate::policy::{Action, Actions, Event, OperationIds, Policy, Update, Vector};
use crate::state::State;

/// The policy of [`Scheme::Sync`](super::Scheme::Sync).
#[derive(Debug)]
pub(crate) struct Synchronous {
    buckets: Vec<Range<usize>>,
    compression: Compression,
    /// By bucket: whether its gradient is ready in this step.
    is_ready: Vec<bool>,
    /// The buckets whose average was started in this step.
    started: usize,
    /// The buckets whose average is there.
    averaged: usize,
    ids: OperationIds,
    next_step: u64,
    /// Whether the gradient of the step is complete.
    is_computed: bool,
}

impl Synchronous {
    /// For these buckets.
    pub(crate) fn new(buckets: Vec<Range<usize>>, compression: Compression) -> Self {
        let is_ready = vec![false; buckets.len()];
        Self {
            buckets,
            compression,
            is_ready,
            started: 0,
            averaged: 0,
            ids: OperationIds::default(),
            next_step: 0,
            is_computed: false,
        }
    }

    fn ready(&mut self, bucket: Bucket, actions: &mut Actions) {
        self.is_ready[bucket] = true;
        while self.is_ready.get(self.started) == Some(&true) {
            let (id, piece) = (self.ids.take(), self.buckets[self.started].clone());
            actions.average(id, Vector::Gradient, piece, self.compression);
            self.started += 1;
        }
    }

    /// Makes the step if everything for it is there.
    fn step(&mut self, actions: &mut Actions) {
        if !self.is_computed || self.averaged < self.buckets.len() {
            return;
        }
        actions.update(Update::Step);
        actions.push(Action::Agreed(Vector::Parameters));
        self.is_ready.fill(false);
        (self.started, self.averaged, self.is_computed) = (0, 0, false);
        self.next_step += 1;
        actions.compute(self.next_step);
    }
}

impl Policy for Synchronous {
    fn on(&mut self, event: Event, _now: Nanos, actions: &mut Actions) {
        match event {
            Event::Start | Event::Resume => actions.compute(self.next_step),
            Event::Ready(bucket) => self.ready(bucket, actions),
            Event::Computed { .. } => {
                self.is_computed = true;
                self.step(actions);
            }
            Event::Done(..) => {
                self.averaged += 1;
                self.step(actions);
            }
            // The parameters are the same already, and nobody tells anything.
            Event::Pause | Event::Stop | Event::Arrived { .. } | Event::Told { .. } => {}
        }
    }

    fn state(&mut self, state: &mut State<'_>) {
        state.field(&mut self.next_step);
        state.field(&mut self.ids);
    }
}

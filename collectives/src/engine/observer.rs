//! What the engine notes of its runs: when calls began and ended, and when peers came. See
//! [`crate::observe`].

use std::sync::Arc;
use std::time::Duration;

use pleach_transport::Nanos;

use super::plan::Plan;
use super::run::Run;
use super::{Engine, StatusBoard};
use crate::observe::{FailureRecord, Observations, Report, TimedCall, UnfinishedCall};

/// What the engine notes. **Invariant:** the clock is not read for this; see [`crate::observe`].
pub(super) struct Observer {
    observations: Arc<Observations>,
    /// When the call that is about to be made began, if that is to be known exactly.
    sample: Option<Nanos>,
    /// A timed call that has ended where nobody knew the time.
    open: Option<TimedCall>,
    /// The time of the last poll.
    seen_at: Nanos,
}

impl Observer {
    pub(super) fn new(observations: Arc<Observations>) -> Self {
        Self { observations, sample: None, open: None, seen_at: Nanos::ZERO }
    }

    /// The time of the last poll.
    pub(super) fn seen_at(&self) -> Nanos {
        self.seen_at
    }

    /// This is a poll; how long ago the last one was.
    pub(super) fn see(&mut self, now: Nanos) -> Duration {
        now.since(std::mem::replace(&mut self.seen_at, now))
    }

    /// When the call that is made now began, if that is to be known exactly.
    pub(super) fn take_sample(&mut self) -> Option<Nanos> {
        self.sample.take()
    }

    /// How long a run has been under way, in nanoseconds, as far as anybody has read the clock;
    /// else zero.
    #[inline]
    pub(super) fn elapsed_ns(&self, begun_at: Option<Nanos>, now: Nanos) -> u64 {
        begun_at.map_or(0, |begun_at| now.max(self.seen_at).0.saturating_sub(begun_at.0))
    }

    /// A run has ended well; a poll saw it first at `begun_at`.
    pub(super) fn note_ended(&mut self, run: &Run, begun_at: Option<Nanos>, now: Nanos) {
        let observations = &self.observations;
        let shape = observations.count(run.plan().shape());
        let (sample, arrivals) = run.observed();
        let Some(begun) = sample.or(begun_at) else { return };
        let latest = observations.arrivals(arrivals);
        let call = *run.plan().descriptor();
        let timed = TimedCall { run: run.number(), call, shape, begun, ended: begun, latest };
        let has_waited = begun_at.is_some();
        if has_waited || now > Nanos::ZERO {
            let ended = now.max(self.seen_at);
            observations.time(TimedCall { ended, ..timed }, has_waited);
        } else {
            self.open = Some(timed);
        }
    }

    /// A call was carried out in so short a time that nobody read the clock.
    #[inline]
    pub(super) fn note_carried_out(&mut self, plan: &Plan, number: u64) {
        let shape = self.observations.count(plan.shape());
        if let Some(begun) = self.sample.take() {
            let call = *plan.descriptor();
            self.open = Some(TimedCall { run: number, call, shape, begun, ended: begun, latest: None });
        }
    }
}

impl Engine {
    /// Has other counters written than those that only this engine knows.
    #[must_use]
    pub(crate) fn observed_by(mut self, observations: Arc<Observations>) -> Self {
        self.observer = Observer::new(observations);
        self
    }

    /// What is known of this rank's runs; `board` is this engine's.
    #[must_use]
    pub fn report(&self, board: &StatusBoard, now: Nanos) -> Report {
        self.observer.observations.report(board.under_way(), board.waits_for(), now)
    }

    /// Whether the next call should be told its time by [`Engine::begin_time`].
    pub(crate) fn wants_time(&self) -> bool {
        self.observer.observations.wants_time()
    }

    /// The next call begins now, if it wants to know.
    pub(crate) fn begin_time(&mut self, now: Option<Nanos>) {
        self.observer.sample = now;
        self.observer.open = None;
    }

    /// Whether a call that was to be timed has ended where nobody knew the time: then
    /// [`Engine::end_time`] is due.
    pub(crate) fn wants_end_time(&self) -> bool {
        self.observer.open.is_some()
    }

    /// That call has ended now.
    pub(crate) fn end_time(&mut self, now: Nanos) {
        if let Some(timed) = self.observer.open.take() {
            self.observer.observations.time(TimedCall { ended: now, ..timed }, false);
        }
    }

    /// What this rank is doing when its group fails.
    pub(super) fn note_failure(&self, text: String, now: Nanos) {
        let unfinished = self.admission.unfinished().iter().filter_map(|slot| {
            let run = self.admission.run(*slot)?;
            Some(UnfinishedCall {
                run: run.number(),
                call: *run.plan().descriptor(),
                algorithm: run.plan().program().algorithm().to_owned(),
                begun: self.admission.begun_at(*slot),
                waits_for: self.waits_for(*slot).into_iter().collect(),
            })
        });
        self.observer.observations.failed(FailureRecord { text, at: now, unfinished: unfinished.collect() });
    }
}

//! The observations of the engine: when calls began and ended, and when signals of peers arrived.
//! See [`crate::observe`].

use std::sync::Arc;
use std::time::Duration;

use pleach_transport::Nanos;

use super::plan::Plan;
use super::run::Run;
use super::{Engine, StatusBoard};
use crate::observe::{FailureRecord, Observations, Report, TimedCall, UnfinishedCall};

/// Notes observations. **Invariant:** it never reads the clock; see [`crate::observe`].
pub(super) struct Observer {
    observations: Arc<Observations>,
    /// The begin of the call that is about to be made, if it is timed exactly.
    sample: Option<Nanos>,
    /// A timed call that has ended before the clock was read.
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

    /// Records a poll; returns how long ago the last poll was.
    pub(super) fn see(&mut self, now: Nanos) -> Duration {
        now.since(std::mem::replace(&mut self.seen_at, now))
    }

    /// The begin of the call that is made now, if it is timed exactly.
    pub(super) fn take_sample(&mut self) -> Option<Nanos> {
        self.sample.take()
    }

    /// How long a run has been under way at the last reading of the clock, in nanoseconds. Zero if
    /// no poll has seen the run.
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

    /// A call was carried out so quickly that the clock was not read.
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
    /// Writes these counters, which others read too, in place of the engine's own.
    #[must_use]
    pub(crate) fn observed_by(mut self, observations: Arc<Observations>) -> Self {
        self.observer = Observer::new(observations);
        self
    }

    /// The report of this rank's runs; `board` is this engine's.
    #[must_use]
    pub fn report(&self, board: &StatusBoard, now: Nanos) -> Report {
        self.observer.observations.report(board.under_way(), board.waits_for(), now)
    }

    /// Whether the caller must tell the time of the next call by [`Engine::begin_time`].
    pub(crate) fn wants_time(&self) -> bool {
        self.observer.observations.wants_time()
    }

    /// The next call begins now. `None` if it is not timed.
    pub(crate) fn begin_time(&mut self, now: Option<Nanos>) {
        self.observer.sample = now;
        self.observer.open = None;
    }

    /// Whether a timed call has ended before the clock was read. Then the caller must call
    /// [`Engine::end_time`].
    pub(crate) fn wants_end_time(&self) -> bool {
        self.observer.open.is_some()
    }

    /// The call that [`Engine::wants_end_time`] reports has ended now.
    pub(crate) fn end_time(&mut self, now: Nanos) {
        if let Some(timed) = self.observer.open.take() {
            self.observer.observations.time(TimedCall { ended: now, ..timed }, false);
        }
    }

    /// Notes the work of this rank at the time when its group fails.
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

//! What the engine notes of its runs: when calls began and ended, and when peers came. See
//! [`crate::observe`].

use std::sync::Arc;

use pleach_transport::Nanos;
use pleach_vocabulary::Rank;

use super::at::At;
use super::ground::Ground;
use super::header::Header;
use super::plan::Plan;
use super::program::OpProgram;
use super::run::{Run, Site};
use super::{Board, Engine};
use crate::observe::{Failure, Flight, Observations, Report, Unfinished};

/// Steps ahead of a lane that are looked at for signals that have come already.
const STEPS_AHEAD_MAX: u32 = 64;
/// Nanoseconds between two such looks, at least; and at least this share of the time waited.
const LOOK_NS_MIN: u64 = 1000;
const LOOK_SHARE: u64 = 32;

/// The engine's own part.
pub(super) struct Observer {
    pub(super) observations: Arc<Observations>,
    /// When the call that is about to be made began, if that is to be known exactly.
    sample: Option<Nanos>,
    /// A call that has ended on a way on which nobody knows the time.
    open: Option<Flight>,
    /// The last time that the engine was told.
    pub(super) seen_at: Nanos,
}

/// A run's own part.
#[derive(Debug, Default)]
pub(super) struct Noted {
    pub(super) sample: Option<Nanos>,
    /// When signals are looked for next, in nanoseconds of the run.
    look_ns: u64,
    /// How much later than this rank the peers that were heard made the call, in nanoseconds.
    arrivals: Vec<(Rank, u64)>,
}

impl Noted {
    pub(super) fn reset(&mut self) {
        self.sample = None;
        self.look_ns = 0;
        self.arrivals.clear();
    }

    /// A signal of a peer was seen when this rank had been in the call for so long.
    pub(super) fn arrived(&mut self, from: Rank, header: &Header, elapsed_ns: u64) {
        let lateness_ns = elapsed_ns.saturating_sub(header.elapsed_ns());
        match self.arrivals.iter_mut().find(|(peer, _)| *peer == from) {
            Some((_, least_ns)) => *least_ns = (*least_ns).min(lateness_ns),
            None => self.arrivals.push((from, lateness_ns)),
        }
    }
}

impl Observer {
    pub(super) fn new(observations: Arc<Observations>) -> Self {
        Self { observations, sample: None, open: None, seen_at: Nanos::ZERO }
    }

    pub(super) fn take_sample(&mut self) -> Option<Nanos> {
        self.sample.take()
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
    pub fn report(&self, board: &Board, now: Nanos) -> Report {
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
        if let Some(flight) = self.observer.open.take() {
            self.observer.observations.time(Flight { ended: now, ..flight }, false);
        }
    }

    /// How long a run has been under way, in nanoseconds, as far as anybody looked at the clock;
    /// else zero.
    pub(super) fn elapsed_ns(&self, slot: u8, now: Nanos) -> u64 {
        let times = self.slots[usize::from(slot)].times;
        times.map_or(0, |times| now.max(self.observer.seen_at).0.saturating_sub(times.begun_at.0))
    }

    /// A run has ended well.
    pub(super) fn note_ended(&mut self, slot: u8, now: Nanos) {
        let entry = &self.slots[usize::from(slot)];
        let Some(run) = &entry.run else { return };
        let observations = &self.observer.observations;
        let seat = observations.count(&run.plan().shape);
        let Some(begun) = run.noted.sample.or(entry.times.map(|times| times.begun_at)) else { return };
        let latest = observations.arrivals(&run.noted.arrivals);
        let call = run.plan().descriptor;
        let flight = Flight { run: run.parameters.number, call, seat, begun, ended: begun, latest };
        let has_waited = entry.times.is_some();
        if has_waited || now > Nanos::ZERO {
            let ended = now.max(self.observer.seen_at);
            observations.time(Flight { ended, ..flight }, has_waited);
        } else {
            self.observer.open = Some(flight);
        }
    }

    /// A call was carried out in so short a time that nobody looked at the clock.
    #[inline]
    pub(super) fn note_ended_at_once(&mut self, plan: &Plan, number: u64) {
        let seat = self.observer.observations.count(&plan.shape);
        if let Some(begun) = self.observer.sample.take() {
            let call = plan.descriptor;
            self.observer.open = Some(Flight { run: number, call, seat, begun, ended: begun, latest: None });
        }
    }

    /// What this rank is doing as its group fails.
    pub(super) fn note_failure(&self, text: String, now: Nanos) {
        let unfinished = self.order.iter().filter_map(|slot| {
            let entry = &self.slots[usize::from(*slot)];
            let run = entry.run.as_ref()?;
            Some(Unfinished {
                run: run.parameters.number,
                call: run.plan().descriptor,
                algorithm: run.plan().program.algorithm().to_owned(),
                begun: entry.times.map(|times| times.begun_at),
                waits_for: self.waits_for(*slot).into_iter().collect(),
            })
        });
        self.observer.observations.failed(Failure { text, at: now, unfinished: unfinished.collect() });
    }
}

impl Run {
    /// Looks which peers have come that this run gets to only later: what it waits for now may hide
    /// them.
    pub(super) fn look_for_arrivals(&mut self, ground: &Ground<'_>) {
        let elapsed_ns = ground.elapsed_ns;
        if elapsed_ns < self.noted.look_ns {
            return;
        }
        self.noted.look_ns = elapsed_ns + LOOK_NS_MIN.max(elapsed_ns / LOOK_SHARE);
        let plan = self.plan().clone();
        let mut noted = std::mem::take(&mut self.noted);
        self.waits_ahead(STEPS_AHEAD_MAX, &mut |lane, slot, chunk, step, from, signal_slot| {
            let at = At { lane, slot, step };
            let site = Site { plan: &plan, lane: &plan.program.lanes[lane as usize], at, chunk };
            let signal_slot = self.signal_slot(self.parameters.bank.wait_base, signal_slot, site);
            let signal_slots = &ground.signal_slots[from as usize];
            if signal_slots.count(signal_slot) != ground.consumed[from as usize][usize::from(signal_slot)] {
                let header = Header::decode(&signal_slots.payload(signal_slot));
                if header.run == self.parameters.number {
                    noted.arrived(from, &header, elapsed_ns);
                }
            }
        });
        self.noted = noted;
    }

    /// The next waits of every chunk under way.
    fn waits_ahead(&self, steps: u32, found: &mut dyn FnMut(u32, u32, u32, u32, Rank, u32)) {
        let plan = self.plan();
        let program = &*plan.program;
        self.under_way(&mut |lane_number, slot, chunk, program_counter| {
            let lane = &program.lanes[lane_number as usize];
            for step in program_counter..lane.steps.min(program_counter.saturating_add(steps)) {
                if let OpProgram::Wait { from, signal_slot, .. } =
                    program.steps[(lane.first_step + step) as usize].op
                {
                    found(lane_number, slot, chunk, step, from, signal_slot);
                }
            }
        });
    }
}

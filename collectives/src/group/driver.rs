//! One engine, many threads: who waits for a run drives all of them.
//!
//! The engine is behind one lock, uncontended in the common case of one calling thread. A driver looks once a round
//! whether another thread wants in ([`Driver::lock`]) and then steps back. Waiting is: poll without a pause, poll with
//! yields, then arm the device's bell and sleep. Every wait has a deadline, the run's own.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use pleach_transport::{Nanos, Ring, clock, fork};

use super::error::CollectiveError;
use super::planner::Planner;
use crate::engine::{Board, Engine, Fault, RunId};

/// Polls between two looks at the clock.
const POLLS_PER_CLOCK: u32 = 16;
/// Glances before the device and the clock are looked at: some microseconds.
const GLANCES: u32 = 16;
/// How long to poll before the first yield. A peer that is awake on a processor of its own answers much sooner; one that
/// was put on this very processor can only answer after a yield.
const YIELD_AFTER: Duration = Duration::from_micros(2);
/// Longest sleep, in case a bell is missed by mistake.
const SLEEP_MAX: Duration = Duration::from_millis(100);

/// Longest time that a call which is done waits until its last words have gone out; longer only peers take that do not
/// read, and what is left then goes out with the next call.
const FLUSH_TIME_MAX: Duration = Duration::from_secs(1);

/// What the lock guards.
pub(super) struct Core {
    pub(super) engine: Engine,
    pub(super) planner: Planner,
}

pub(super) struct Driver {
    core: Mutex<Core>,
    /// Threads that want the lock. Relaxed: only a hint to the driver; the lock orders everything else.
    waiting: AtomicUsize,
    board: Arc<Board>,
    ringer: Arc<dyn Ring>,
    /// The process whose engine this is.
    pub(super) process: fork::Process,
    /// How long to poll before the first sleep.
    spin: Duration,
    /// Whether other ranks need this processor: then polling without yields only delays them.
    pub(super) is_crowded: bool,
}

impl Driver {
    pub(super) fn new(mut core: Core, board: Arc<Board>, spin: Duration, is_crowded: bool) -> Self {
        let ringer = core.engine.device().ringer();
        let process = fork::Process::current();
        Self {
            core: Mutex::new(core),
            waiting: AtomicUsize::new(0),
            board,
            ringer,
            process,
            spin,
            is_crowded,
        }
    }

    /// Engine and planner, for a short time.
    pub(super) fn lock(&self) -> MutexGuard<'_, Core> {
        if let Ok(core) = self.core.try_lock() {
            return core;
        }
        self.waiting.fetch_add(1, Ordering::Relaxed);
        // The driver may be asleep with the lock.
        self.ringer.ring();
        let mut core = self.core.lock().unwrap_or_else(PoisonError::into_inner);
        // Two threads at once: the one that is blocked may depend on what the other is about to call.
        core.engine.allow_concurrent_calls(true);
        self.waiting.fetch_sub(1, Ordering::Relaxed);
        core
    }

    pub(super) fn abort(&self) {
        self.board.abort();
        self.ringer.ring();
    }

    /// Drives the engine until `look` finds what it looks for, or `until` has passed.
    pub(super) fn drive<'a, T>(
        &'a self,
        mut core: MutexGuard<'a, Core>,
        until: Nanos,
        mut look: impl FnMut(&mut Engine) -> Option<T>,
    ) -> Option<T> {
        let mut now = clock::now();
        let mut idle_since = now;
        let polls = if self.is_crowded { 1 } else { POLLS_PER_CLOCK };
        loop {
            let mut moved = false;
            for _ in 0..polls {
                moved |= core.engine.poll(now);
                if let Some(found) = look(&mut core.engine) {
                    return Some(found);
                }
                std::hint::spin_loop();
            }
            now = clock::now();
            if now >= until {
                return None;
            }
            if moved {
                idle_since = now;
            }
            let idle = now.since(idle_since);
            if self.waiting.load(Ordering::Relaxed) > 0 {
                drop(core);
                std::thread::yield_now();
                core = self.lock();
            } else if idle < self.spin {
                // Not while silence is made: that is this rank's own work, and each yield would cost it a turn of everybody.
                if !core.engine.is_severing() && (self.is_crowded || idle > YIELD_AFTER) {
                    std::thread::yield_now();
                }
            } else {
                now = sleep(&mut core.engine, now, until);
            }
        }
    }

    /// Drives the engine until the run's outcome is known; its own deadline ends it.
    pub(super) fn finish(&self, mut core: MutexGuard<'_, Core>, run: RunId) -> Result<(), Arc<Fault>> {
        if core.engine.is_passive() && !self.is_crowded && glance(&mut core.engine, run) {
            return Ok(());
        }
        core.engine.await_run(run);
        self.outcome(core, run, Nanos::MAX).expect("an unlimited drive ends with what it looks for")
    }

    /// Before a call is refused because the group has failed: waits until no peer can touch this rank's memory any more,
    /// which is this rank's own work.
    pub(super) fn silence(&self, core: MutexGuard<'_, Core>, error: &CollectiveError, limit: Duration) {
        if matches!(error, CollectiveError::Failed(_)) && core.engine.failure().is_none() {
            self.drive(core, clock::now() + limit, |engine| engine.failure().map(|_| ()));
        }
    }

    /// The run's outcome, if it is known until then. What its last steps told the peers has gone out by then: this rank
    /// may poll nothing for a long time now, while they wait for it.
    pub(super) fn outcome(
        &self,
        core: MutexGuard<'_, Core>,
        run: RunId,
        until: Nanos,
    ) -> Option<Result<(), Arc<Fault>>> {
        let (outcome, is_flushed) = self.drive(core, until, |engine| {
            let outcome = engine.take_outcome(run)?;
            Some((outcome, engine.flush()))
        })?;
        if outcome.is_ok() && !is_flushed {
            self.drive(self.lock(), clock::now() + FLUSH_TIME_MAX, |engine| {
                (engine.flush() || engine.failure().is_some()).then_some(())
            });
        }
        Some(outcome)
    }
}

/// The short way, on which no system is called: true when the run has ended well and nothing is left to be done for it.
fn glance(engine: &mut Engine, run: RunId) -> bool {
    for _ in 0..GLANCES {
        if engine.has_ended(run) {
            return engine.flush() && matches!(engine.take_outcome(run), Some(Ok(())));
        }
        engine.glance(Nanos::ZERO);
    }
    false
}

/// Sleeps until something can happen; the time afterwards.
fn sleep(engine: &mut Engine, now: Nanos, until: Nanos) -> Nanos {
    let wake_at = engine.next_wakeup().unwrap_or(Nanos::MAX).min(until);
    let limit = wake_at.since(now).min(SLEEP_MAX);
    if !limit.is_zero()
        && let Some(bell) = engine.device().arm()
    {
        bell.wait(limit);
    }
    clock::now()
}

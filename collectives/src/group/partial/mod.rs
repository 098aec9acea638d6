//! Partial all-reduce as users hold it: see [`crate::partial`] for how a round goes.
//!
//! [`RawPartial`] does it; [`Partial`] gives it types, and `start` begins it.
//!
//! **Invariant:** the caller's thread touches a contribution or a result only while the rounds do
//! not: a contribution from the moment at which [`Rounds::free_contribution`] names it until it is
//! handed over (a failed group holds none), and a result while [`Partial`] is borrowed by the
//! [`Round`] that shows it. Methods that touch contributions are called by those that borrow the
//! [`RawPartial`] mutably.
//!
//! [`Rounds::free_contribution`]: crate::partial::Rounds::free_contribution
#![allow(unsafe_code)]

mod error;
mod start;
mod typed;

use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use pleach_transport::mutex::lock;
use pleach_transport::{Nanos, clock};

use super::Group;
use super::driver::{Core, INTERRUPT_INTERVAL};
use super::error::CollectiveError;
use super::gpu::GpuBuffer;
use super::premultiplied::Scaling;
use crate::compute::{Compute, ComputeError, DefaultEnvironment, Job};
use crate::engine::Bytes;
use crate::exact::BlockSums;
use crate::partial::{Awaited, Ended, Own, PartialReport, RankSet, Seen, Terms};

pub use error::PartialError;
pub use typed::{GpuMemory, HostMemory, Partial, Round};

/// How long rounds that are dropped wait for the end of a round that was bound ahead: the others
/// may be carrying it out, though this rank has not heard that it is open.
const AHEAD_LIMIT: Duration = Duration::from_millis(100);

/// As [`Partial`], of elements whose type is known when the program runs.
pub struct RawPartial {
    /// Dropped before the memory below: its engine may touch that until then.
    group: Group,
    terms: Terms,
    contributions: Vec<Bytes>,
    results: [Bytes; 3],
    corrections: Vec<Bytes>,
    /// Where sums of floats are exact.
    exact: Option<BlockSums>,
    /// What combines a late contribution with the next one. Only the caller locks it.
    compute: Mutex<Box<dyn Compute>>,
    /// On a GPU: what the bytes above name, in their order, and the neutral elements.
    on_gpu: Vec<GpuBuffer<u8>>,
    /// The contribution that the caller writes.
    current: usize,
    /// The contribution whose round was not waited for.
    started: Option<usize>,
    has_finished: bool,
}

/// As [`Round`], of elements whose type is known when the program runs.
pub struct RawRound<'a> {
    partial: &'a RawPartial,
    ended: Ended,
    awaited: Awaited,
}

impl RawPartial {
    /// As [`Partial::contribution`], in bytes.
    pub fn contribution(&mut self) -> &mut [u8] {
        let bytes = self.contribution_bytes();
        // SAFETY: memory of the host: only the rounds of a `GpuPartial` are elsewhere, and that
        // gives no slices out. The rounds do not hold this contribution (see the module), and the
        // borrow of `self` keeps the caller from handing it over meanwhile.
        unsafe { std::slice::from_raw_parts_mut(bytes.base().0, bytes.len()) }
    }

    fn contribution_bytes(&self) -> &Bytes {
        &self.contributions[self.current]
    }

    /// As [`Partial::contribute`].
    ///
    /// # Errors
    ///
    /// See there.
    pub fn contribute(&mut self) -> Result<RawRound<'_>, PartialError> {
        let mut core = self.hand_over()?;
        core.begin_round();
        match self.await_round(core) {
            Ok((ended, awaited, free)) => {
                // The caller has written nothing meanwhile; what was used last is in the caches.
                self.current = free;
                self.round(ended, awaited)
            }
            Err(error) => {
                self.take_back()?;
                Err(error.into())
            }
        }
    }

    /// As [`Partial::start_contribute`].
    ///
    /// # Errors
    ///
    /// See there.
    pub fn start_contribute(&mut self) -> Result<(), PartialError> {
        let free = self.hand_over()?.expect_rounds().free_contribution();
        self.started = Some(std::mem::replace(&mut self.current, free));
        // The caller is about to compute.
        self.group.shared.wake_progress();
        Ok(())
    }

    /// Hands the current contribution over, which is the rounds' from then on.
    fn hand_over(&self) -> Result<MutexGuard<'_, Core>, PartialError> {
        self.expect_going()?;
        self.await_stream()?;
        let driver = &self.group.shared.driver;
        let mut facts = Vec::new();
        if self.terms.activation.factor().is_some() {
            // A group that has failed multiplies nothing, so nothing is added either that was
            // multiplied.
            expect_working(&driver.lock())?;
        }
        if self.terms.activation.factor().is_some() || self.exact.is_some() {
            facts = self.prepare();
        }
        let mut core = driver.lock();
        if let Err(error) = expect_working(&core) {
            drop(core);
            self.take_back()?;
            return Err(error.into());
        }
        while let Some(late) = core.expect_rounds().take_late() {
            drop(core);
            self.add_to_current(late)?;
            core = driver.lock();
        }
        core.expect_rounds().hand_over(self.current, facts);
        Ok(core)
    }

    /// Multiplies the contribution by this rank's factor. Gives its facts where sums are exact.
    /// Other threads and peers go on meanwhile.
    fn prepare(&self) -> Vec<i32> {
        let bytes = self.contribution_bytes();
        let _environment = DefaultEnvironment::enter();
        if let Some(factor) = self.terms.activation.factor() {
            let (scaling, base) = (Scaling { data_type: self.terms.data_type, factor }, bytes.base());
            scaling.products(base, base, bytes.len());
        }
        self.exact.map_or_else(Vec::new, |sums| sums.facts(bytes))
    }

    /// As [`Partial::wait`].
    ///
    /// # Errors
    ///
    /// See there.
    pub fn wait(&mut self) -> Result<RawRound<'_>, PartialError> {
        self.group.expect_open()?;
        let Some(started) = self.started.take() else { return Err(PartialError::NotStarted) };
        match self.await_round(self.group.shared.driver.lock()) {
            // What the caller has written meanwhile stays where it is.
            Ok((ended, awaited, _)) => self.round(ended, awaited),
            Err(error) => {
                self.current = started;
                self.take_back()?;
                Err(error.into())
            }
        }
    }

    /// As [`Partial::abstain`].
    ///
    /// # Errors
    ///
    /// See there.
    pub fn abstain(&mut self) -> Result<RawRound<'_>, PartialError> {
        self.expect_going()?;
        self.await_stream()?;
        let mut core = self.group.shared.driver.lock();
        core.expect_rounds().abstain();
        let (ended, awaited, _) = self.await_round(core)?;
        // Rounds go on without this rank from now on.
        self.group.shared.wake_progress();
        self.round(ended, awaited)
    }

    /// As [`Partial::next_round`].
    ///
    /// # Errors
    ///
    /// See there.
    pub fn next_round(&self) -> Result<Option<u64>, PartialError> {
        self.expect_going()?;
        let mut core = self.group.shared.driver.lock();
        expect_working(&core)?;
        Ok(core.expect_rounds().next_round())
    }

    /// As [`Partial::abort`].
    pub fn abort(&self) {
        self.group.abort();
    }

    /// As [`Partial::step_aside`].
    ///
    /// # Errors
    ///
    /// See there.
    pub fn step_aside(&mut self) -> Result<(), PartialError> {
        self.expect_going()?;
        self.group.shared.driver.lock().expect_rounds().step_aside();
        // Others may wait for the word.
        self.group.shared.wake_progress();
        Ok(())
    }

    /// As [`Partial::come_back`].
    ///
    /// # Errors
    ///
    /// See there.
    pub fn come_back(&mut self) -> Result<(), PartialError> {
        self.expect_going()?;
        self.group.shared.driver.lock().expect_rounds().come_back();
        self.group.shared.wake_progress();
        Ok(())
    }

    /// As [`Partial::finish`].
    ///
    /// # Errors
    ///
    /// See there.
    pub fn finish(&mut self) -> Result<RawRound<'_>, PartialError> {
        self.expect_going()?;
        self.await_stream()?;
        self.has_finished = true;
        let mut core = self.group.shared.driver.lock();
        core.expect_rounds().finish();
        let (ended, awaited, _) = self.await_round(core)?;
        self.round(ended, awaited)
    }

    /// As [`Partial::report`].
    ///
    /// # Errors
    ///
    /// See there.
    pub fn report(&self) -> Result<PartialReport, PartialError> {
        self.group.expect_own_process()?;
        Ok(self.group.shared.driver.lock().expect_rounds().report())
    }

    fn expect_going(&self) -> Result<(), PartialError> {
        self.group.expect_open()?;
        match (self.has_finished, self.started) {
            (true, _) => Err(PartialError::Finished),
            (false, Some(_)) => Err(PartialError::UnderWay),
            (false, None) => Ok(()),
        }
    }

    /// Waits until the stream has done what was put into it before: the contribution is ready then,
    /// and the stream reads no result any more. Rounds go on meanwhile.
    fn await_stream(&self) -> Result<(), CollectiveError> {
        self.group.stream.as_ref().map_or(Ok(()), |stream| self.group.wait_for_mark(&stream.record_event()?))
    }

    /// After the group has failed: combines with the current contribution what was handed over
    /// before and is in no result.
    fn take_back(&self) -> Result<(), CollectiveError> {
        loop {
            let held = self.group.shared.driver.lock().expect_rounds().take_back(self.current);
            let Some(held) = held else { return Ok(()) };
            self.add_to_current(held)?;
        }
    }

    /// Combines a late contribution with the current one, in the current one.
    fn add_to_current(&self, late: usize) -> Result<(), CollectiveError> {
        let [current, late] = [self.current, late].map(|index| self.contributions[index].base().0);
        let (mut job, mut compute) = (Job::empty(), lock(&self.compute));
        job.begin(self.terms.data_type, self.terms.activation.op(), self.terms.len, 1);
        job.from.extend([late.cast_const(), current.cast_const()]);
        job.add_destination(current);
        // SAFETY: both are contributions of `len` elements that the rounds do not hold: the current
        // one, and a late one that they have just given up. They are apart.
        while self.terms.len > 0 && !unsafe { compute.advance(&mut job, Nanos::ZERO) } {
            if let Some(ComputeError::Cuda(error)) = compute.failure() {
                return Err(error.clone().into());
            }
            std::hint::spin_loop();
        }
        Ok(())
    }

    /// Waits for a round. The rounds end a wait that takes too long.
    fn await_round(&self, mut core: MutexGuard<'_, Core>) -> Result<Seen, CollectiveError> {
        let driver = &self.group.shared.driver;
        if let Some(found) = driver.poll_round(&mut core) {
            return Ok(found);
        }
        let mut core = Some(core);
        loop {
            let until = match self.group.interrupted {
                Some(_) => clock::now() + INTERRUPT_INTERVAL,
                None => Nanos::MAX,
            };
            let locked = core.take().unwrap_or_else(|| driver.lock());
            let found = driver.drive_core(locked, until, |core| match core.take_round() {
                Some(round) => {
                    // Peers wait for the last signals, and this rank may not poll for long.
                    core.engine.flush();
                    Some(Ok(round))
                }
                None => core.engine.failure().cloned().map(Err),
            });
            match found {
                Some(found) => return found.map_err(CollectiveError::Failed),
                None if self.group.interrupted.is_some_and(|interrupted| interrupted()) => driver.abort(),
                None => {}
            }
        }
    }

    /// A round that has ended, if anything was given to it.
    fn round(&self, ended: Ended, awaited: Awaited) -> Result<RawRound<'_>, PartialError> {
        if !ended.has_result() && awaited.round().is_some() {
            return Err(PartialError::NothingGiven { round: ended.number });
        }
        Ok(RawRound { partial: self, ended, awaited })
    }
}

impl Drop for RawPartial {
    /// Ends the active round, which needs this rank, before the group is left. A round that was
    /// bound ahead and is not known to be open gets [`AHEAD_LIMIT`]: it may never open.
    fn drop(&mut self) {
        let shared = &self.group.shared;
        if !shared.driver.is_own_process() || std::thread::panicking() {
            return;
        }
        let mut core = shared.driver.lock();
        core.expect_rounds().stop();
        let now = clock::now();
        let ended = shared.driver.drive_core(core, now + AHEAD_LIMIT.min(shared.close_timeout), |core| {
            (core.expect_rounds().is_idle() || core.engine.failure().is_some()).then_some(())
        });
        if ended.is_none() {
            shared.driver.drive_core(shared.driver.lock(), now + shared.close_timeout, |core| {
                (core.expect_rounds().has_no_open() || core.engine.failure().is_some()).then_some(())
            });
        }
    }
}

impl RawRound<'_> {
    /// As [`Round::result`], in bytes. Also after the borrow, they stay as they are until another
    /// round is asked for or the rounds are dropped: the C ABI gives their address out.
    #[must_use]
    pub fn result(&self) -> &[u8] {
        bytes_of(self.result_bytes())
    }

    fn result_bytes(&self) -> &Bytes {
        &self.partial.results[self.ended.result]
    }

    /// As [`Round::correction`], in bytes, which stay as those of the result do.
    #[must_use]
    pub fn correction(&self) -> Option<(&RankSet, &[u8])> {
        Some((self.ended.corrected.as_ref()?, bytes_of(&self.partial.corrections[self.ended.result])))
    }

    /// As [`Round::contributors`].
    #[must_use]
    pub fn contributors(&self) -> &RankSet {
        &self.ended.contributors
    }

    /// As [`Round::own`].
    #[must_use]
    pub fn own(&self) -> Own {
        self.awaited.own()
    }

    /// As [`Round::number`].
    #[must_use]
    pub fn number(&self) -> u64 {
        self.ended.number
    }

    /// As [`Round::missed`].
    #[must_use]
    pub fn missed(&self) -> u64 {
        self.awaited.missed(&self.ended)
    }
}

/// An error if the group has failed.
fn expect_working(core: &Core) -> Result<(), CollectiveError> {
    core.engine.failure().map_or(Ok(()), |fault| Err(CollectiveError::Failed(fault.clone())))
}

/// A result that the caller reads.
fn bytes_of(bytes: &Bytes) -> &[u8] {
    // SAFETY: memory of the host, as only a `GpuPartial` has other memory, and that gives no slices
    // out. The rounds write no result that the caller reads (see the module).
    unsafe { std::slice::from_raw_parts(bytes.base().0, bytes.len()) }
}

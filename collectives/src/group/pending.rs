//! A collective under way that owns its memory.

use std::sync::Arc;
use std::time::Duration;

use pleach_transport::clock;

use super::driver::Driver;
use super::error::CollectiveError;
use super::expect_own_process;
use crate::engine::RunId;

/// A collective under way. It owns what it works on and gives it back when it is done, also with an error.
///
/// It makes progress while any thread of the group is in a call, or while it is tested or waited for, and with
/// [`Progress::Thread`](super::Progress) also otherwise. Dropping it waits
/// for its end (its deadline bounds that); forgetting it leaks the memory and nothing else.
#[must_use = "a collective that is not waited for ends when this is dropped"]
pub struct Pending<D> {
    driver: Arc<Driver>,
    run: Option<RunId>,
    outcome: Option<Result<(), CollectiveError>>,
    data: Option<D>,
}

/// What starting a collective gives: it under way, or why it is not, with its memory.
pub type Started<D> = Result<Pending<D>, PendingError<D>>;

/// A non-blocking collective that failed, with its memory.
#[derive(Debug, thiserror::Error)]
#[error("{error}")]
pub struct PendingError<D> {
    /// Why.
    pub error: CollectiveError,
    /// What it worked on; the contents of outputs are unspecified, nobody changes them any more.
    pub data: D,
}

impl<D> std::fmt::Debug for Pending<D> {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "Pending({:?})", self.run)
    }
}

impl<D> Pending<D> {
    pub(super) fn new(driver: Arc<Driver>, run: RunId, data: D) -> Self {
        Self { driver, run: Some(run), outcome: None, data: Some(data) }
    }

    /// Makes some progress; whether it is done. Never blocks for long.
    pub fn test(&mut self) -> bool {
        self.wait_for(Duration::ZERO)
    }

    /// Waits at most `limit`; whether it is done.
    pub fn wait_for(&mut self, limit: Duration) -> bool {
        self.refuse_in_child();
        if let Some(run) = self.run {
            let found = self.driver.outcome(self.driver.lock(), run, clock::now() + limit);
            let Some(outcome) = found else { return false };
            self.run = None;
            self.outcome = Some(outcome.map_err(CollectiveError::Failed));
        }
        true
    }

    /// Waits until it is done, at most until its deadline, and gives the memory back.
    ///
    /// # Errors
    ///
    /// Why it failed, with the memory.
    ///
    /// # Panics
    ///
    /// Never: what it owns is there until this call.
    pub fn wait(mut self) -> Result<D, PendingError<D>> {
        self.finish();
        let data = self.data.take().expect("taken only here");
        match self.outcome.take().unwrap_or(Ok(())) {
            Ok(()) => Ok(data),
            Err(error) => Err(PendingError { error, data }),
        }
    }

    /// Ends the group's work on all ranks, this collective included, and waits for that.
    ///
    /// # Errors
    ///
    /// As [`Pending::wait`]; the collective may have ended well before.
    pub fn abort(self) -> Result<D, PendingError<D>> {
        self.driver.abort();
        self.wait()
    }

    /// In a forked child the collective is the parent's: here it ends with an error and this copy of the memory.
    fn refuse_in_child(&mut self) {
        if self.run.is_some()
            && let Err(error) = expect_own_process(self.driver.process)
        {
            self.run = None;
            self.outcome = Some(Err(error));
        }
    }

    fn finish(&mut self) {
        self.refuse_in_child();
        if let Some(run) = self.run.take() {
            self.outcome = Some(self.driver.finish(self.driver.lock(), run).map_err(CollectiveError::Failed));
        }
    }
}

impl<D> Drop for Pending<D> {
    fn drop(&mut self) {
        self.finish();
    }
}

//! Reads that go on while their caller does something else.

use pleach_transport::clock;

use crate::group::Group;
use crate::group::error::CollectiveError;
use crate::group::pending::PendingError;
use crate::group::unwinding::without_unwinding;
use crate::window::{ReadId, Word};

/// A read under way that owns its memory: see
/// [`Window::start_read`](super::Window::start_read). The drop waits for its end, at most until its
/// deadline.
#[must_use = "a read that is not waited for ends when this is dropped"]
pub struct PendingRead<D> {
    group: Group,
    read: Option<ReadId>,
    outcome: Option<Result<(u64, Word), CollectiveError>>,
    data: Option<D>,
}

impl<D> std::fmt::Debug for PendingRead<D> {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "PendingRead({:?})", self.read)
    }
}

impl<D> PendingRead<D> {
    /// A read into memory of `data`, which is under way.
    pub(crate) fn new(group: Group, read: ReadId, data: D) -> Self {
        Self { group, read: Some(read), outcome: None, data: Some(data) }
    }

    /// Makes some progress; returns whether the read has ended.
    pub fn test(&mut self) -> bool {
        let Some(read) = self.read.filter(|_| self.is_here()) else { return true };
        let group = &self.group;
        let core = group.shared.driver.lock();
        let found = group.drive_window(core, clock::now(), |core| core.expect_window().0.reads.take(read));
        if let Err(error) = &found {
            group.shared.driver.lock().expect_window().0.reads.forget(read);
            self.outcome = Some(Err(error.clone()));
        } else if let Ok(Some(found)) = found {
            self.outcome = Some(Ok(found));
        }
        self.read = self.read.filter(|_| self.outcome.is_none());
        self.read.is_none()
    }

    /// Waits until the read has ended, and returns the version and the word of the elements, and
    /// the memory.
    ///
    /// # Errors
    ///
    /// As of [`Window::read`](super::Window::read), with the memory.
    ///
    /// # Panics
    ///
    /// Never: the memory is there until this call.
    pub fn wait(mut self) -> Result<(u64, Word, D), PendingError<D>> {
        self.finish();
        let data = self.data.take().expect("taken only here");
        match self.outcome.take().expect("a read that has ended has an outcome") {
            Ok((version, word)) => Ok((version, word, data)),
            Err(error) => Err(PendingError { error, data }),
        }
    }

    /// In a forked child the read is the parent's: here it ends with an error.
    fn is_here(&mut self) -> bool {
        if let Err(error) = self.group.expect_own_process() {
            (self.read, self.outcome) = (None, Some(Err(error)));
        }
        self.read.is_some()
    }

    fn finish(&mut self) {
        if self.read.is_some()
            && self.is_here()
            && let Some(read) = self.read.take()
        {
            let core = self.group.shared.driver.lock();
            self.outcome = Some(without_unwinding(|| self.group.finish_read(core, read)));
        }
    }
}

impl<D> Drop for PendingRead<D> {
    fn drop(&mut self) {
        self.finish();
    }
}

//! Operations of a batch that are under way, on memory that the batch borrows.
//!
//! **Invariant:** a flight that is gone has waited for all of them, so what they worked on is
//! nobody else's again.

use pleach_transport::{Slice, clock};

use super::Group;
use super::batch::{Bucket, keep_staging, take_staging};
use super::data::Buffer;
use super::error::CollectiveError;
use super::fused::RUNS_AT_ONCE;
use super::lent::Lent;
use super::operation::Operation;
use super::unwinding::{end_process, without_unwinding};
use crate::engine::RunId;

/// See the module.
pub(super) struct Flight<'a> {
    group: Group,
    /// How much memory fused operations need, in bytes, and where it is free from.
    staging_bytes: usize,
    staging: Option<Slice>,
    used_bytes: usize,
    flying: Vec<Flying<'a>>,
}

struct Flying<'a> {
    run: RunId,
    lent: Lent,
    fused: Option<(Bucket<'a>, Buffer<u8>)>,
}

impl<'a> Flight<'a> {
    pub(super) fn new(group: Group, staging_bytes: usize) -> Self {
        Self { group, staging_bytes, staging: None, used_bytes: 0, flying: Vec::new() }
    }

    pub(super) fn start(&mut self, group: &Group, operation: Operation) -> Result<(), CollectiveError> {
        self.make_room(0)?;
        self.launch(group, operation, None)
    }

    pub(super) fn start_bucket(&mut self, bucket: Bucket<'a>) -> Result<(), CollectiveError> {
        self.make_room(bucket.room())?;
        if self.staging.is_none() {
            self.staging = Some(take_staging(&self.group, self.staging_bytes)?);
        }
        let staging = self.staging.as_ref().expect("just taken");
        let begin = self.used_bytes;
        let part = staging.slice(begin..begin + bucket.room()).expect("there is room for every bucket");
        self.used_bytes += bucket.room();
        let mut buffer = Buffer::new(part, bucket.bytes(), self.group.shared.number);
        let operation = bucket.pack(self.group.shared.number, &mut buffer);
        self.launch(&bucket.group(), operation, Some((bucket, buffer)))
    }

    /// Waits for what was started where one more, with so many bytes, would be too much.
    fn make_room(&mut self, bytes: usize) -> Result<(), CollectiveError> {
        if self.flying.len() == RUNS_AT_ONCE || self.used_bytes + bytes > self.staging_bytes {
            self.finish()?;
        }
        Ok(())
    }

    fn launch(
        &mut self,
        group: &Group,
        mut operation: Operation,
        fused: Option<(Bucket<'a>, Buffer<u8>)>,
    ) -> Result<(), CollectiveError> {
        let driver = &self.group.shared.driver;
        let mut core = driver.lock();
        let lent = group.lend(&mut core.engine, &mut operation)?;
        match group.begin(&mut core, operation, None) {
            Ok(run) => {
                self.flying.push(Flying { run, lent, fused });
                Ok(())
            }
            Err(error) => {
                driver.silence(core, &error, group.timeout);
                group.take_back(&lent);
                Err(error)
            }
        }
    }

    /// Waits for all that was started; the first error.
    pub(super) fn finish(&mut self) -> Result<(), CollectiveError> {
        without_unwinding(|| self.finish_all())
    }

    fn finish_all(&mut self) -> Result<(), CollectiveError> {
        let mut result = Ok(());
        for Flying { run, lent, fused } in self.flying.drain(..) {
            let driver = &self.group.shared.driver;
            let outcome = driver.finish(driver.lock(), run).map_err(CollectiveError::Failed);
            self.group.take_back(&lent);
            if outcome.is_ok()
                && let Some((mut bucket, buffer)) = fused
            {
                bucket.unpack(&buffer);
            }
            result = result.and(outcome);
        }
        self.used_bytes = 0;
        result
    }
}

impl Drop for Flight<'_> {
    fn drop(&mut self) {
        // What came before has been told; what is under way still must end before the borrow does.
        let _ = self.finish();
        if let Some(staging) = self.staging.take() {
            keep_staging(staging, &self.group.shared.staging);
        }
    }
}

impl Group {
    /// Waits until the device has let go of what was lent to it for one call: its own housekeeping,
    /// done when it is polled. A peer that does not read what it asked for can keep it from that;
    /// then the group ends, which takes the memory out of every peer's reach.
    pub(super) fn take_back(&self, lent: &Lent) {
        if lent.is_empty() {
            return;
        }
        let driver = &self.shared.driver;
        let is_returned = || {
            let until = clock::now() + self.shared.close_timeout;
            driver.drive(driver.lock(), until, |_| lent.is_returned().then_some(())).is_some()
        };
        if is_returned() {
            return;
        }
        self.abort();
        if !is_returned() {
            end_process("a device holds memory that was lent for one call, and would write to it later");
        }
    }
}

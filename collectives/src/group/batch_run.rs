//! Calls of a batch that are under way, on memory that the batch borrows or owns.
//!
//! **Invariant:** a run of a batch that is gone has waited for all of them, or has left that to who
//! has their memory, so what they worked on is nobody else's again.

use std::sync::Arc;

use pleach_transport::clock;

use super::Group;
use super::bound::BoundCall;
use super::error::CollectiveError;
use super::fused::{Bucket, Copy, Entry, RUNS_AT_ONCE};
use super::pending::Completion;
use super::premultiplied::Products;
use super::staging::Staging;
use super::stream_order::StreamWork;
use super::temporary_registration::TemporaryRegistration;
use super::unwinding::{end_process, without_unwinding};
use crate::compute::ComputeError;
use crate::engine::RunId;

/// See the module.
pub(super) struct BatchRun {
    group: Group,
    before: StreamWork,
    /// Whether memory is lent meanwhile: who leaves it cannot take that back.
    lends: bool,
    /// How much memory fused calls need, in bytes, and where it is free from.
    staging_bytes: usize,
    staging: Option<Staging>,
    used_bytes: usize,
    launched: Vec<Launched>,
}

struct Launched {
    run: RunId,
    registration: TemporaryRegistration,
    /// What is copied when it is over.
    results: Vec<Copy>,
    /// Memory of the call's own.
    products: Products,
}

impl BatchRun {
    /// A run for calls of `group`, which begin after the work in `before`.
    pub(super) fn new(group: Group, before: StreamWork, lends: bool, staging_bytes: usize) -> Self {
        Self { group, before, lends, staging_bytes, staging: None, used_bytes: 0, launched: Vec::new() }
    }

    /// Starts a call by itself.
    pub(super) fn start(&mut self, Entry { group, mut call }: Entry) -> Result<(), CollectiveError> {
        self.make_room(0)?;
        call.expect_alive()?;
        call.gate = self.before.gate(call.foreign.take())?;
        let products = call.premultiply();
        self.launch(&group, call, Vec::new(), products)
    }

    /// Starts a fused call.
    pub(super) fn start_bucket(&mut self, bucket: &Bucket) -> Result<(), CollectiveError> {
        self.make_room(bucket.room())?;
        let staging = match &mut self.staging {
            Some(staging) => staging,
            empty => empty.insert(Staging::take(&self.group, self.staging_bytes)?),
        };
        let begin = self.used_bytes;
        self.used_bytes += bucket.room();
        let side_by_side = staging.base().add(begin);
        let mut call = bucket.call(&staging.bytes(&self.group, begin..begin + bucket.bytes())?);
        call.gate = staging.pack(&self.before, bucket.inputs(side_by_side)).map_err(in_compute)?;
        self.launch(&bucket.group(), call, bucket.results(side_by_side), Products::new())
    }

    /// Waits for started calls until one more call of `bytes` is within the limits.
    fn make_room(&mut self, bytes: usize) -> Result<(), CollectiveError> {
        if self.launched.len() == RUNS_AT_ONCE || self.used_bytes + bytes > self.staging_bytes {
            self.finish()?;
        }
        Ok(())
    }

    fn launch(
        &mut self,
        group: &Group,
        mut call: BoundCall,
        results: Vec<Copy>,
        products: Products,
    ) -> Result<(), CollectiveError> {
        let driver = &self.group.shared.driver;
        let mut core = driver.lock();
        let registration = if self.lends {
            group.lend(&mut core.engine, &mut call)?
        } else {
            TemporaryRegistration::default()
        };
        core.begin_time();
        let run = group.begin(&mut core, call, None);
        without_unwinding(|| core.end_time());
        match run {
            Ok(run) => {
                self.launched.push(Launched { run, registration, results, products });
                Ok(())
            }
            Err(error) => {
                driver.wait_fenced(core, &error, group.timeout);
                group.take_back(&registration);
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
        for Launched { run, registration, results, products: _products } in self.launched.drain(..) {
            let driver = &self.group.shared.driver;
            let outcome = driver.finish(driver.lock(), run, None).map_err(CollectiveError::Failed);
            self.group.take_back(&registration);
            let outcome = outcome.and_then(|()| match &self.staging {
                Some(staging) if !results.is_empty() => Ok(staging.unpack(&results)?),
                _ => Ok(()),
            });
            result = result.and(outcome);
        }
        self.used_bytes = 0;
        let settled = self.staging.as_ref().map_or(Ok(()), Staging::settle);
        result.and(settled.map_err(CollectiveError::from))
    }

    /// What was started, to be waited for by who has its memory, and what is left to be done then.
    pub(super) fn leave<D>(mut self) -> (Vec<RunId>, Completion<D>) {
        assert!(!self.lends, "what was lent is taken back here");
        let shared = Arc::downgrade(&self.group.shared);
        let staging = self.staging.take();
        let launched = std::mem::take(&mut self.launched);
        let runs = launched.iter().map(|launched| launched.run).collect();
        let completion = move |_: &mut D| {
            // What is to be kept until here goes with this.
            let launched = launched;
            let Some(staging) = staging else { return Ok(()) };
            let outcome = launched.iter().try_for_each(|launched| staging.unpack(&launched.results));
            let outcome = outcome.and(staging.settle());
            if let Some(shared) = shared.upgrade() {
                staging.keep(&shared);
            }
            Ok(outcome?)
        };
        (runs, Box::new(completion))
    }
}

impl Drop for BatchRun {
    fn drop(&mut self) {
        // What came before has been told; what is under way still must end before the borrow does.
        let _ = self.finish();
        if let Some(staging) = self.staging.take() {
            staging.keep(&self.group.shared);
        }
    }
}

/// Of a gate that was looked at before anybody waits for it.
fn in_compute(error: ComputeError) -> CollectiveError {
    match error {
        ComputeError::Cuda(error) => CollectiveError::Gpu(error),
        other => unreachable!("copies are no reductions: {other}"),
    }
}

impl Group {
    /// Waits until the device has let go of what was lent to it for one call: its own housekeeping,
    /// done when it is polled. A peer that does not read what it asked for can keep it from that;
    /// then the group ends, which takes the memory out of every peer's reach.
    pub(super) fn take_back(&self, registration: &TemporaryRegistration) {
        if registration.is_empty() {
            return;
        }
        let driver = &self.shared.driver;
        let is_returned = || {
            let until = clock::now() + self.shared.close_timeout;
            driver.drive(driver.lock(), until, |_| registration.is_returned().then_some(())).is_some()
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

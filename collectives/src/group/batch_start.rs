//! Batches that are started and waited for later, as the gradients of a layer are while the next
//! one's are computed.
//!
//! The tensors are the pending batch's until it ends: a borrow that is forgotten would leave peers
//! writing into memory that is used otherwise. They are fused as those of a [`Batch`](super::Batch)
//! are, into memory that the group keeps, so a rank may start what its peers run and wait for.

use std::collections::VecDeque;
use std::sync::Arc;

use pleach_transport::Slice;
use pleach_vocabulary::ReduceOp;

use super::Group;
use super::batch::{Alone, Job, bytes_of, keep_staging, take_staging};
use super::data::{Buffer, Element, OwnedData};
use super::error::CollectiveError;
use super::fused::{self, RUNS_AT_ONCE};
use super::operation::Operation;
use super::pending::{Completion, Pending, PendingError, Started};
use super::unwinding::without_unwinding;
use crate::engine::RunId;

/// Operations that were started.
struct Under {
    runs: Vec<RunId>,
    /// How many of them have ended.
    ended: usize,
    /// By fused operation: the tensors whose results lie side by side, and where.
    staged: Vec<(Vec<usize>, Buffer<u8>)>,
    /// All of that memory.
    staging: Option<Slice>,
}

impl Group {
    /// Starts [`Group::all_reduce`] of each of these tensors; short ones are fused. Results are
    /// those of a [`batch`](Group::batch) of the same calls, which other ranks may run instead. Of
    /// more than 64 operations that are not fused the first ones are waited for here.
    ///
    /// # Errors
    ///
    /// See [`CollectiveError`]; the memory comes back with it.
    pub fn start_all_reduce_batch<D: OwnedData>(&self, mut tensors: Vec<D>, op: ReduceOp) -> Started<Vec<D>> {
        let mut under = Under { runs: Vec::new(), ended: 0, staged: Vec::new(), staging: None };
        let started = self
            .refuse_to_start(D::Element::DATA_TYPE, op)
            .and_then(|()| self.expect_open())
            .and_then(|()| self.shared.begin_progress())
            .and_then(|()| without_unwinding(|| self.start_all(&mut tensors, op, &mut under)));
        let driver = self.shared.driver.clone();
        let runs = under.runs.split_off(under.ended);
        if let Err(error) = started {
            // What was started before still works on the tensors.
            let outcome = Pending::of_all(driver, runs, tensors, None).wait();
            let data = outcome.unwrap_or_else(|failed| failed.data);
            return Err(PendingError { error, data });
        }
        let pending = Pending::of_all(driver, runs, tensors, Some(self.unpacking(under)));
        self.shared.wake_progress();
        Ok(pending)
    }

    fn start_all<D: OwnedData>(
        &self,
        tensors: &mut [D],
        op: ReduceOp,
        under: &mut Under,
    ) -> Result<(), CollectiveError> {
        let jobs = self.batched(tensors, op)?;
        let room = fused::room(&jobs);
        let mut begin = 0;
        for job in jobs {
            match job {
                Job::Fused(bucket) => {
                    let staging = match &mut under.staging {
                        Some(staging) => staging,
                        empty => empty.insert(take_staging(self, room)?),
                    };
                    let part =
                        staging.slice(begin..begin + bucket.room()).expect("there is room for every bucket");
                    begin += bucket.room();
                    let mut buffer = Buffer::new(part, bucket.bytes(), self.shared.number);
                    let operation = bucket.pack(self.shared.number, &mut buffer);
                    under.staged.push((bucket.places().to_vec(), buffer));
                    self.start_one(&bucket.group(), operation, under)?;
                }
                Job::Alone(group, Alone::Long(operation, _)) => self.start_one(&group, operation, under)?,
                Job::Alone(_, Alone::Call(_)) => unreachable!("exact calls are refused before"),
            }
        }
        Ok(())
    }

    fn start_one(
        &self,
        group: &Self,
        operation: Operation,
        under: &mut Under,
    ) -> Result<(), CollectiveError> {
        let driver = &self.shared.driver;
        if under.runs.len() - under.ended == RUNS_AT_ONCE {
            let run = under.runs[under.ended];
            under.ended += 1;
            driver.finish(driver.lock(), run).map_err(CollectiveError::Failed)?;
        }
        under.runs.push(group.launch(operation, None)?);
        Ok(())
    }

    /// The tensors' all-reduces as they are fused: the same for the same lengths.
    fn batched<'a, D: OwnedData>(
        &self,
        tensors: &'a mut [D],
        op: ReduceOp,
    ) -> Result<VecDeque<Job<'a>>, CollectiveError> {
        let mut batch = self.batch();
        for tensor in tensors {
            batch.all_reduce(tensor, op)?;
        }
        Ok(batch.jobs())
    }

    /// Copies what was fused back to where it belongs, and lets the group have the memory, if it is
    /// still there.
    fn unpacking<D: OwnedData>(&self, under: Under) -> Completion<Vec<D>> {
        let shared = Arc::downgrade(&self.shared);
        Box::new(move |tensors| {
            for (places, results) in under.staged {
                let mut at = 0;
                for place in places {
                    let tensor = bytes_of(&mut tensors[place]);
                    tensor.copy_from_slice(&results[at..at + tensor.len()]);
                    at += tensor.len();
                }
            }
            if let (Some(staging), Some(shared)) = (under.staging, shared.upgrade()) {
                keep_staging(staging, &shared.staging);
            }
            Ok(())
        })
    }
}

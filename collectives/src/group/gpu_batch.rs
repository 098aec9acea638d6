//! Batches on a GPU's memory: many operations in one pass, in the order of a stream.
//!
//! As batches on the host's memory ([`super::batch`]): short operations are fused as they are
//! there, and the others are started one after the other before any is waited for. How they are
//! copied and waited for: [`super::gpu_flight`].

use std::marker::PhantomData;

use pleach_transport::cuda::Stream;
use pleach_vocabulary::{Collective, Rank, ReduceOp};

use super::Group;
use super::data::Element;
use super::error::CollectiveError;
use super::fused::{self, Entry, FUSED_BYTES_MAX, Kind, STAGING_BYTES_MAX, Work, expect_meaning, fused};
use super::gpu::GpuBuffer;
use super::gpu_flight::{GpuFlight, GpuPart};
use super::gpu_operation::GpuOperation;
use super::on_stream::{Before, OnStream};
use super::pending::{Pending, PendingError, Started};

/// Operations on GPU memory that are carried out together by [`GpuBatch::run`], after the earlier
/// work of the stream that the batch was made with. Results are those of the same calls one by one
/// in the order in which they were added; where the group is not
/// [reproducible](crate::Reproducible), a sum of floats may be rounded another way, as it may at
/// another length.
#[must_use = "a batch does nothing until it is run"]
pub struct GpuBatch<'a> {
    group: Group,
    /// What is in them comes first.
    streams: Vec<&'a Stream>,
    entries: Vec<Entry<GpuPart, GpuOperation>>,
    /// What the operations work on.
    _data: PhantomData<&'a mut [u8]>,
}

impl<'a> OnStream<'a> {
    /// [`Group::batch`] on GPU memory: it begins when the stream has done what was put into it
    /// before it is run.
    pub fn batch(&self) -> GpuBatch<'a> {
        let (group, streams) = (self.group.clone(), vec![self.stream]);
        GpuBatch { group, streams, entries: Vec::new(), _data: PhantomData }
    }

    /// Starts [`OnStream::all_reduce`] of each of these tensors; short ones are fused. Results are
    /// those of a [`batch`](OnStream::batch) of the same calls, which other ranks may run instead.
    /// Of more than 64 operations that are not fused the first ones are waited for here.
    ///
    /// # Errors
    ///
    /// See [`CollectiveError`]; the memory comes back with it.
    pub fn start_all_reduce_batch<T: Element>(
        &self,
        tensors: Vec<GpuBuffer<T>>,
        op: ReduceOp,
    ) -> Started<Vec<GpuBuffer<T>>> {
        let flight = match self.start_all(&tensors, op) {
            Ok(flight) => flight,
            // What was started before has ended with its flight.
            Err(error) => return Err(PendingError { error, data: tensors }),
        };
        self.group.shared.wake_progress();
        let (runs, completion) = flight.leave();
        Ok(Pending::of_all(self.group.shared.driver.clone(), runs, tensors, Some(completion)))
    }

    fn start_all<T: Element>(
        &self,
        tensors: &[GpuBuffer<T>],
        op: ReduceOp,
    ) -> Result<GpuFlight, CollectiveError> {
        self.group.shared.begin_progress()?;
        let mut batch = self.batch();
        tensors.iter().try_for_each(|tensor| batch.add_all_reduce(tensor, op))?;
        batch.start(usize::MAX)
    }
}

impl<'a> GpuBatch<'a> {
    /// Adds [`OnStream::all_reduce`].
    ///
    /// # Errors
    ///
    /// The operation has no meaning for the elements, or the group does not work on that memory;
    /// nothing was added.
    pub fn all_reduce<T: Element>(
        &mut self,
        data: &'a mut GpuBuffer<T>,
        op: ReduceOp,
    ) -> Result<&mut Self, CollectiveError> {
        self.add_all_reduce(data, op)?;
        Ok(self)
    }

    /// Adds [`OnStream::reduce`].
    ///
    /// # Errors
    ///
    /// As [`GpuBatch::all_reduce`], or there is no such root; nothing was added.
    pub fn reduce<T: Element>(
        &mut self,
        data: &'a mut GpuBuffer<T>,
        op: ReduceOp,
        root: Rank,
    ) -> Result<&mut Self, CollectiveError> {
        expect_meaning(op, T::DATA_TYPE)?;
        let alone = GpuOperation::reduce(&self.group, data, op, root)?;
        Ok(self.add(Kind::Reduce(op, root), data, alone))
    }

    /// Adds [`OnStream::broadcast`].
    ///
    /// # Errors
    ///
    /// There is no such root, or the group does not work on that memory; nothing was added.
    pub fn broadcast<T: Element>(
        &mut self,
        data: &'a mut GpuBuffer<T>,
        root: Rank,
    ) -> Result<&mut Self, CollectiveError> {
        let alone = GpuOperation::broadcast(&self.group, data, root)?;
        Ok(self.add(Kind::Broadcast(root), data, alone))
    }

    /// Adds [`OnStream::all_gather`].
    ///
    /// # Errors
    ///
    /// The lengths do not fit, or the group does not work on that memory; nothing was added.
    pub fn all_gather<T: Element>(
        &mut self,
        input: &'a GpuBuffer<T>,
        output: &'a mut GpuBuffer<T>,
    ) -> Result<&mut Self, CollectiveError> {
        let alone = GpuOperation::moving(&self.group, Collective::AllGather, input, output)?;
        Ok(self.put(Work::Alone(alone)))
    }

    /// Adds [`OnStream::send`]. Of a send and a receive in one batch neither waits for the other's
    /// end.
    ///
    /// # Errors
    ///
    /// There is no such peer, or the group does not work on that memory; nothing was added.
    pub fn send<T: Element>(
        &mut self,
        data: &'a GpuBuffer<T>,
        to: Rank,
    ) -> Result<&mut Self, CollectiveError> {
        let alone = GpuOperation::send(&self.group, data, to)?;
        Ok(self.put(Work::Alone(alone)))
    }

    /// Adds [`OnStream::recv`].
    ///
    /// # Errors
    ///
    /// There is no such peer, or the group does not work on that memory; nothing was added.
    pub fn recv<T: Element>(
        &mut self,
        data: &'a mut GpuBuffer<T>,
        from: Rank,
    ) -> Result<&mut Self, CollectiveError> {
        let alone = GpuOperation::recv(&self.group, data, from)?;
        Ok(self.put(Work::Alone(alone)))
    }

    /// Adds another batch of the same group behind what was added so far; all of it comes after the
    /// earlier work of both batches' streams. Each call keeps the tag and the algorithm of the
    /// handle that its batch was made by.
    ///
    /// # Errors
    ///
    /// [`CollectiveError::MixedGroups`]; nothing was added then.
    pub fn append(&mut self, other: GpuBatch<'a>) -> Result<&mut Self, CollectiveError> {
        self.group.expect_same(&other.group)?;
        self.streams.extend(other.streams);
        self.entries.extend(other.entries);
        Ok(self)
    }

    /// How many operations were added.
    #[must_use]
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether none was added.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Carries out all operations and returns when this rank's part of each is done and the GPU is
    /// through with the data. All ranks run batches of the same operations in the same order; each
    /// may take as long as the handle's deadline. Of no operations it is nothing.
    ///
    /// # Errors
    ///
    /// See [`CollectiveError`]: the first operation's that failed. The contents of what was added
    /// are unspecified then.
    pub fn run(self) -> Result<(), CollectiveError> {
        if self.entries.is_empty() {
            return Ok(());
        }
        self.start(STAGING_BYTES_MAX)?.finish()
    }

    /// Starts all operations; those that are fused have at most so much memory at a time, in bytes.
    fn start(self, staging_bytes_max: usize) -> Result<GpuFlight, CollectiveError> {
        self.group.expect_open()?;
        self.streams.iter().try_for_each(|stream| self.group.expect_gpu(stream.gpu()))?;
        let before = Before::new(self.streams.iter().copied())?;
        let jobs = fused(self.entries);
        let mut flight = GpuFlight::new(self.group, before, fused::room(&jobs).min(staging_bytes_max));
        jobs.into_iter().try_for_each(|job| flight.start(job))?;
        Ok(flight)
    }

    fn add_all_reduce<T: Element>(
        &mut self,
        data: &GpuBuffer<T>,
        op: ReduceOp,
    ) -> Result<(), CollectiveError> {
        expect_meaning(op, T::DATA_TYPE)?;
        let alone = GpuOperation::all_reduce(&self.group, data, op)?;
        self.add(Kind::AllReduce(op), data, alone);
        Ok(())
    }

    /// Adds what can be fused if it is short.
    fn add<T: Element>(&mut self, kind: Kind, data: &GpuBuffer<T>, alone: GpuOperation) -> &mut Self {
        let is_short = data.len() * size_of::<T>() <= FUSED_BYTES_MAX;
        self.put(if is_short {
            Work::Short(kind, T::DATA_TYPE, GpuPart::of(data))
        } else {
            Work::Alone(alone)
        })
    }

    fn put(&mut self, work: Work<GpuPart, GpuOperation>) -> &mut Self {
        self.entries.push(Entry { group: self.group.clone(), work });
        self
    }
}

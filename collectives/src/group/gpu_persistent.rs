//! Calls on a GPU's memory that are made again and again: checked, chosen and planned once.
//!
//! **Invariant:** as of [`super::persistent`]: the memory of a persistent call is its own and keeps
//! its length.

use std::fmt;
use std::sync::Arc;

use pleach_transport::cuda::Stream;
use pleach_vocabulary::{Collective, Rank, ReduceOp};

use super::Group;
use super::data::Element;
use super::error::CollectiveError;
use super::gpu::GpuBuffer;
use super::gpu_operation::GpuOperation;
use super::on_stream::OnStream;
use super::pending::{PendingError, Started};
use crate::engine::Plan;

/// A collective on GPU memory that is planned and can be run as often as wanted, each time in the
/// order of some stream. It owns its memory, which kernels and copies reach by the buffers'
/// addresses between runs.
///
/// A run is a call like any other: it matches the same call of the other ranks, persistent there or
/// not.
pub struct GpuPersistent<D> {
    group: Group,
    plan: Arc<Plan>,
    make: Make<D>,
    op: ReduceOp,
    root: Rank,
    data: D,
}

/// The operation on this memory.
type Make<D> = fn(&Group, &D, ReduceOp, Rank) -> Result<GpuOperation, CollectiveError>;

/// What preparing gives: the call, or why there is none, with its memory.
type Prepared<D> = Result<GpuPersistent<D>, PendingError<D>>;

impl<D> fmt::Debug for GpuPersistent<D> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "GpuPersistent({})", self.plan.descriptor())
    }
}

impl OnStream<'_> {
    /// Prepares [`OnStream::all_reduce`] of this memory, through the group's handle: with its
    /// deadline, tag and algorithm. Local. Which stream a run comes after is said when it is run.
    ///
    /// # Errors
    ///
    /// See [`CollectiveError`]; the memory comes back with it.
    pub fn prepare_all_reduce<T: Element>(
        &self,
        data: GpuBuffer<T>,
        op: ReduceOp,
    ) -> Result<GpuPersistent<GpuBuffer<T>>, PendingError<GpuBuffer<T>>> {
        self.prepare(data, op, 0, |group, data, op, _| GpuOperation::all_reduce(group, data, op))
    }

    /// Prepares [`OnStream::reduce`].
    ///
    /// # Errors
    ///
    /// As [`OnStream::prepare_all_reduce`].
    pub fn prepare_reduce<T: Element>(
        &self,
        data: GpuBuffer<T>,
        op: ReduceOp,
        root: Rank,
    ) -> Result<GpuPersistent<GpuBuffer<T>>, PendingError<GpuBuffer<T>>> {
        self.prepare(data, op, root, GpuOperation::reduce)
    }

    /// Prepares [`OnStream::broadcast`].
    ///
    /// # Errors
    ///
    /// As [`OnStream::prepare_all_reduce`].
    pub fn prepare_broadcast<T: Element>(
        &self,
        data: GpuBuffer<T>,
        root: Rank,
    ) -> Result<GpuPersistent<GpuBuffer<T>>, PendingError<GpuBuffer<T>>> {
        self.prepare(data, ReduceOp::Sum, root, |group, data, _, root| {
            GpuOperation::broadcast(group, data, root)
        })
    }

    /// Prepares [`OnStream::all_gather`].
    ///
    /// # Errors
    ///
    /// As [`OnStream::prepare_all_reduce`].
    #[allow(clippy::type_complexity)]
    pub fn prepare_all_gather<T: Element>(
        &self,
        input: GpuBuffer<T>,
        output: GpuBuffer<T>,
    ) -> Result<GpuPersistent<(GpuBuffer<T>, GpuBuffer<T>)>, PendingError<(GpuBuffer<T>, GpuBuffer<T>)>> {
        self.prepare((input, output), ReduceOp::Sum, 0, |group, (input, output), _, _| {
            GpuOperation::moving(group, Collective::AllGather, input, output)
        })
    }

    /// Prepares [`OnStream::reduce_scatter`].
    ///
    /// # Errors
    ///
    /// As [`OnStream::prepare_all_reduce`].
    #[allow(clippy::type_complexity)]
    pub fn prepare_reduce_scatter<T: Element>(
        &self,
        input: GpuBuffer<T>,
        output: GpuBuffer<T>,
        op: ReduceOp,
    ) -> Result<GpuPersistent<(GpuBuffer<T>, GpuBuffer<T>)>, PendingError<(GpuBuffer<T>, GpuBuffer<T>)>> {
        self.prepare((input, output), op, 0, |group, (input, output), op, _| {
            GpuOperation::reducing(group, Collective::ReduceScatter, op, input, output)
        })
    }

    fn prepare<D>(&self, data: D, op: ReduceOp, root: Rank, make: Make<D>) -> Prepared<D> {
        let group = self.group.clone();
        let operation = make(&group, &data, op, root);
        match operation.and_then(|it| group.kept_plan(&it.operation)) {
            Ok(plan) => Ok(GpuPersistent { group, plan, make, op, root, data }),
            Err(error) => Err(PendingError { error, data }),
        }
    }
}

impl<D> GpuPersistent<D> {
    /// Carries it out once, as the blocking call on this stream does.
    ///
    /// # Errors
    ///
    /// See [`CollectiveError`].
    pub fn run(&mut self, stream: &Stream) -> Result<(), CollectiveError> {
        let operation = (self.make)(&self.group, &self.data, self.op, self.root)?;
        self.group.on(stream).run_by(operation, Some(&self.plan))
    }

    /// Starts it, as the `start_` call on this stream does; it comes back with the outcome.
    ///
    /// # Errors
    ///
    /// See [`CollectiveError`]; this comes back with it.
    #[allow(clippy::result_large_err)] // What was to be started comes back, as with every start.
    pub fn start(self, stream: &Stream) -> Started<Self> {
        let operation = (self.make)(&self.group, &self.data, self.op, self.root);
        let (group, plan) = (self.group.clone(), self.plan.clone());
        group.on(stream).start_by(operation, Some(&plan), self)
    }

    /// Gives the memory back.
    #[must_use]
    pub fn into_data(self) -> D {
        self.data
    }
}

impl<T: Element> GpuPersistent<GpuBuffer<T>> {
    /// The memory that it works on.
    #[must_use]
    pub fn data(&self) -> &GpuBuffer<T> {
        &self.data
    }

    /// [`GpuBuffer::store`] to it.
    ///
    /// # Errors
    ///
    /// As there.
    pub fn store(&mut self, elements: &[T]) -> Result<(), CollectiveError> {
        self.data.store(elements)
    }
}

impl<T: Element> GpuPersistent<(GpuBuffer<T>, GpuBuffer<T>)> {
    /// What the next run reads.
    #[must_use]
    pub fn input(&self) -> &GpuBuffer<T> {
        &self.data.0
    }

    /// [`GpuBuffer::store`] to the input.
    ///
    /// # Errors
    ///
    /// As there.
    pub fn store(&mut self, elements: &[T]) -> Result<(), CollectiveError> {
        self.data.0.store(elements)
    }

    /// What the last run wrote.
    #[must_use]
    pub fn output(&self) -> &GpuBuffer<T> {
        &self.data.1
    }
}

//! Calls on a GPU's memory that take their place in a stream.
//!
//! **Invariant:** a call begins when the stream has done what was put into it before the call, and
//! it is over when the GPU is through with the data: what is put into any stream after that finds
//! the result. Nothing is put into the stream but a mark, and neither another stream nor the whole
//! GPU is waited for. A blocking call waits for the mark on the caller's thread, and is over when
//! it returns. A started one returns at once and begins behind a gate that is open when the mark is
//! reached ([`Gate`]); it is over when its [`Pending`](super::Pending) says so. No stream waits for
//! a call: it would wait for this rank's own thread to go on, and work of others that shares a
//! queue of the GPU with it would too.

use std::sync::Arc;
use std::time::Duration;

use pleach_transport::clock;
use pleach_transport::cuda::{CudaError, ForeignMemory, Mark, Stream};
use pleach_vocabulary::{Collective, Rank, ReduceOp};

use super::Group;
use super::data::Element;
use super::error::CollectiveError;
use super::gpu::GpuBuffer;
use super::gpu_operation::GpuOperation;
use super::operation::Operation;
use super::pending::Started;
use crate::engine::{Gate, Plan};

/// How often a blocking call that waits for a stream looks at it while it carries on what else the
/// group does.
const LOOK_EVERY: Duration = Duration::from_micros(20);

/// A group whose calls take their place in a stream: see [`Group::on`].
#[derive(Clone, Copy, Debug)]
pub struct OnStream<'a> {
    pub(super) group: &'a Group,
    pub(super) stream: &'a Stream,
}

impl Group {
    /// The same group, for calls on GPU memory: each begins when this stream, of the group's GPU,
    /// has done what was put into it before the call, and is over when the GPU is through with the
    /// data: when a blocking call returns, or the [`Pending`](super::Pending) of a started one has
    /// ended. What is put into any stream after that finds the result.
    #[must_use]
    pub fn on<'a>(&'a self, stream: &'a Stream) -> OnStream<'a> {
        OnStream { group: self, stream }
    }
}

impl OnStream<'_> {
    /// Whose calls they are.
    #[must_use]
    pub fn group(&self) -> &Group {
        self.group
    }

    /// [`Group::all_reduce`].
    ///
    /// # Errors
    ///
    /// See [`CollectiveError`].
    pub fn all_reduce<T: Element>(
        &self,
        data: &mut GpuBuffer<T>,
        op: ReduceOp,
    ) -> Result<(), CollectiveError> {
        self.run(GpuOperation::all_reduce(self.group, data, op)?)
    }

    /// [`Group::all_reduce_into`].
    ///
    /// # Errors
    ///
    /// See [`CollectiveError`].
    pub fn all_reduce_into<T: Element>(
        &self,
        input: &GpuBuffer<T>,
        output: &mut GpuBuffer<T>,
        op: ReduceOp,
    ) -> Result<(), CollectiveError> {
        self.run(GpuOperation::reducing(self.group, Collective::AllReduce, op, input, output)?)
    }

    /// [`Group::reduce`].
    ///
    /// # Errors
    ///
    /// See [`CollectiveError`].
    pub fn reduce<T: Element>(
        &self,
        data: &mut GpuBuffer<T>,
        op: ReduceOp,
        root: Rank,
    ) -> Result<(), CollectiveError> {
        self.run(GpuOperation::reduce(self.group, data, op, root)?)
    }

    /// [`Group::broadcast`].
    ///
    /// # Errors
    ///
    /// See [`CollectiveError`].
    pub fn broadcast<T: Element>(&self, data: &mut GpuBuffer<T>, root: Rank) -> Result<(), CollectiveError> {
        self.run(GpuOperation::broadcast(self.group, data, root)?)
    }

    /// [`Group::all_gather`].
    ///
    /// # Errors
    ///
    /// See [`CollectiveError`].
    pub fn all_gather<T: Element>(
        &self,
        input: &GpuBuffer<T>,
        output: &mut GpuBuffer<T>,
    ) -> Result<(), CollectiveError> {
        self.run(GpuOperation::moving(self.group, Collective::AllGather, input, output)?)
    }

    /// [`Group::reduce_scatter`].
    ///
    /// # Errors
    ///
    /// See [`CollectiveError`].
    pub fn reduce_scatter<T: Element>(
        &self,
        input: &GpuBuffer<T>,
        output: &mut GpuBuffer<T>,
        op: ReduceOp,
    ) -> Result<(), CollectiveError> {
        self.run(GpuOperation::reducing(self.group, Collective::ReduceScatter, op, input, output)?)
    }

    /// [`Group::gather`]; on ranks other than the root the output is left as it is.
    ///
    /// # Errors
    ///
    /// See [`CollectiveError`].
    pub fn gather<T: Element>(
        &self,
        input: &GpuBuffer<T>,
        output: &mut GpuBuffer<T>,
        root: Rank,
    ) -> Result<(), CollectiveError> {
        self.run(GpuOperation::moving(self.group, Collective::Gather { root }, input, output)?)
    }

    /// [`Group::scatter`]; of ranks other than the root the input is not looked at.
    ///
    /// # Errors
    ///
    /// See [`CollectiveError`].
    pub fn scatter<T: Element>(
        &self,
        input: &GpuBuffer<T>,
        output: &mut GpuBuffer<T>,
        root: Rank,
    ) -> Result<(), CollectiveError> {
        self.run(GpuOperation::moving(self.group, Collective::Scatter { root }, input, output)?)
    }

    /// [`Group::all_to_all`].
    ///
    /// # Errors
    ///
    /// See [`CollectiveError`].
    pub fn all_to_all<T: Element>(
        &self,
        input: &GpuBuffer<T>,
        output: &mut GpuBuffer<T>,
    ) -> Result<(), CollectiveError> {
        self.run(GpuOperation::moving(self.group, Collective::AllToAll, input, output)?)
    }

    /// [`Group::send`].
    ///
    /// # Errors
    ///
    /// See [`CollectiveError`].
    pub fn send<T: Element>(&self, data: &GpuBuffer<T>, to: Rank) -> Result<(), CollectiveError> {
        self.run(GpuOperation::send(self.group, data, to)?)
    }

    /// [`Group::recv`].
    ///
    /// # Errors
    ///
    /// See [`CollectiveError`].
    pub fn recv<T: Element>(&self, data: &mut GpuBuffer<T>, from: Rank) -> Result<(), CollectiveError> {
        self.run(GpuOperation::recv(self.group, data, from)?)
    }

    /// Starts [`OnStream::all_reduce`].
    ///
    /// # Errors
    ///
    /// See [`CollectiveError`]; the memory comes back with it.
    pub fn start_all_reduce<T: Element>(&self, data: GpuBuffer<T>, op: ReduceOp) -> Started<GpuBuffer<T>> {
        self.start(GpuOperation::all_reduce(self.group, &data, op), data)
    }

    /// Starts [`OnStream::reduce`].
    ///
    /// # Errors
    ///
    /// See [`CollectiveError`]; the memory comes back with it.
    pub fn start_reduce<T: Element>(
        &self,
        data: GpuBuffer<T>,
        op: ReduceOp,
        root: Rank,
    ) -> Started<GpuBuffer<T>> {
        self.start(GpuOperation::reduce(self.group, &data, op, root), data)
    }

    /// Starts [`OnStream::broadcast`].
    ///
    /// # Errors
    ///
    /// See [`CollectiveError`]; the memory comes back with it.
    pub fn start_broadcast<T: Element>(&self, data: GpuBuffer<T>, root: Rank) -> Started<GpuBuffer<T>> {
        self.start(GpuOperation::broadcast(self.group, &data, root), data)
    }

    /// Starts [`OnStream::all_gather`].
    ///
    /// # Errors
    ///
    /// See [`CollectiveError`]; the memory comes back with it.
    pub fn start_all_gather<T: Element>(
        &self,
        input: GpuBuffer<T>,
        output: GpuBuffer<T>,
    ) -> Started<(GpuBuffer<T>, GpuBuffer<T>)> {
        let operation = GpuOperation::moving(self.group, Collective::AllGather, &input, &output);
        self.start(operation, (input, output))
    }

    /// Starts [`OnStream::reduce_scatter`].
    ///
    /// # Errors
    ///
    /// See [`CollectiveError`]; the memory comes back with it.
    pub fn start_reduce_scatter<T: Element>(
        &self,
        input: GpuBuffer<T>,
        output: GpuBuffer<T>,
        op: ReduceOp,
    ) -> Started<(GpuBuffer<T>, GpuBuffer<T>)> {
        let operation = GpuOperation::reducing(self.group, Collective::ReduceScatter, op, &input, &output);
        self.start(operation, (input, output))
    }

    /// Starts [`OnStream::gather`].
    ///
    /// # Errors
    ///
    /// See [`CollectiveError`]; the memory comes back with it.
    pub fn start_gather<T: Element>(
        &self,
        input: GpuBuffer<T>,
        output: GpuBuffer<T>,
        root: Rank,
    ) -> Started<(GpuBuffer<T>, GpuBuffer<T>)> {
        let operation = GpuOperation::moving(self.group, Collective::Gather { root }, &input, &output);
        self.start(operation, (input, output))
    }

    /// Starts [`OnStream::scatter`].
    ///
    /// # Errors
    ///
    /// See [`CollectiveError`]; the memory comes back with it.
    pub fn start_scatter<T: Element>(
        &self,
        input: GpuBuffer<T>,
        output: GpuBuffer<T>,
        root: Rank,
    ) -> Started<(GpuBuffer<T>, GpuBuffer<T>)> {
        let operation = GpuOperation::moving(self.group, Collective::Scatter { root }, &input, &output);
        self.start(operation, (input, output))
    }

    /// Starts [`OnStream::all_to_all`].
    ///
    /// # Errors
    ///
    /// See [`CollectiveError`]; the memory comes back with it.
    pub fn start_all_to_all<T: Element>(
        &self,
        input: GpuBuffer<T>,
        output: GpuBuffer<T>,
    ) -> Started<(GpuBuffer<T>, GpuBuffer<T>)> {
        let operation = GpuOperation::moving(self.group, Collective::AllToAll, &input, &output);
        self.start(operation, (input, output))
    }

    /// Starts [`OnStream::send`].
    ///
    /// # Errors
    ///
    /// See [`CollectiveError`]; the memory comes back with it.
    pub fn start_send<T: Element>(&self, data: GpuBuffer<T>, to: Rank) -> Started<GpuBuffer<T>> {
        self.start(GpuOperation::send(self.group, &data, to), data)
    }

    /// Starts [`OnStream::recv`].
    ///
    /// # Errors
    ///
    /// See [`CollectiveError`]; the memory comes back with it.
    pub fn start_recv<T: Element>(&self, data: GpuBuffer<T>, from: Rank) -> Started<GpuBuffer<T>> {
        self.start(GpuOperation::recv(self.group, &data, from), data)
    }

    /// Carries the operation out, after the stream's earlier work.
    fn run(&self, operation: GpuOperation) -> Result<(), CollectiveError> {
        self.run_by(operation, None)
    }

    /// The same by its plan, where that is known.
    pub(super) fn run_by(
        &self,
        operation: GpuOperation,
        plan: Option<&Arc<Plan>>,
    ) -> Result<(), CollectiveError> {
        self.group.expect_open()?;
        self.group.expect_gpu(self.stream.gpu())?;
        self.group.wait_for_mark(&self.stream.mark()?)?;
        operation.expect_alive()?;
        self.group.blocking_by(operation.operation, plan)
    }

    /// Starts the operation behind the stream's earlier work.
    fn start<D>(&self, operation: Result<GpuOperation, CollectiveError>, data: D) -> Started<D> {
        self.start_by(operation, None, data)
    }

    /// The same by its plan, where that is known.
    pub(super) fn start_by<D>(
        &self,
        operation: Result<GpuOperation, CollectiveError>,
        plan: Option<&Arc<Plan>>,
        data: D,
    ) -> Started<D> {
        let behind = operation.and_then(|GpuOperation { operation, foreign }| {
            self.group.expect_open()?;
            self.group.expect_gpu(self.stream.gpu())?;
            let before = Before::new([self.stream])?;
            Ok(Operation { gate: before.gate(foreign)?, ..operation })
        });
        self.group.start_by(behind, plan, data)
    }
}

impl Group {
    /// Waits until the mark is reached, at most as long as a call may take, carrying on what else
    /// the group does.
    pub(super) fn wait_for_mark(&self, mark: &Mark) -> Result<(), CollectiveError> {
        let began = clock::now();
        while !mark.is_reached()? {
            let now = clock::now();
            let waited = now.since(began);
            if waited >= self.timeout {
                return Err(
                    CudaError::Late { ordinal: self.gpu().map_or(0, |gpu| gpu.ordinal()), waited }.into()
                );
            }
            let driver = &self.shared.driver;
            driver.drive(driver.lock(), now + LOOK_EVERY, |_| None::<()>);
        }
        Ok(())
    }
}

/// What calls come after: the work that was in some streams.
#[derive(Clone, Debug)]
pub(super) struct Before(Arc<Vec<Mark>>);

impl Before {
    /// All that is in these streams now.
    pub(super) fn new<'a>(streams: impl IntoIterator<Item = &'a Stream>) -> Result<Self, CudaError> {
        Ok(Self(Arc::new(streams.into_iter().map(Stream::mark).collect::<Result<_, _>>()?)))
    }

    /// Whether all of it is done.
    pub(super) fn is_done(&self) -> Result<bool, CudaError> {
        for mark in &*self.0 {
            if !mark.is_reached()? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Open when all of it is done; none is needed where it is already. The memory is looked at
    /// once more then.
    pub(super) fn gate(&self, foreign: Vec<ForeignMemory>) -> Result<Option<Gate>, CudaError> {
        if self.is_done()? {
            return Ok(None);
        }
        let before = self.clone();
        Ok(Some(Box::new(move || {
            if !before.is_done()? {
                return Ok(false);
            }
            foreign.iter().try_for_each(ForeignMemory::expect_alive)?;
            Ok(true)
        })))
    }
}

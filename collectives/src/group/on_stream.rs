//! Calls on a GPU's memory that take their place in a stream.
//!
//! **Invariant:** a call begins when the stream has done what was put into it before the call, and it is over when the GPU is
//! through with the data: what is put into any stream after that finds the result. Nothing is put into the stream but a
//! mark, and neither another stream nor the whole GPU is waited for. A blocking call waits for the mark on the caller's
//! thread, and is over when it returns. A started one returns at once and begins behind a gate that is open when the
//! mark is reached ([`Gate`]); it is over when its [`Pending`](super::Pending) says so. No stream waits for a call: it would
//! wait for this rank's own thread to go on, and work of others that shares a queue of the GPU with it would too.

use std::time::Duration;

use pleach_transport::clock;
use pleach_transport::cuda::{CudaError, ForeignMemory, Mark, Stream};

use super::Group;
use super::data::Element;
use super::error::CollectiveError;
use super::gpu::GpuBuffer;
use super::operation::Operation;
use super::pending::Started;
use crate::Rank;
use crate::collective::{Collective, ReduceOp};
use crate::engine::{Bytes, Counts, Gate};
use crate::parts::Parts;

/// How often a blocking call that waits for a stream looks at it while it carries on what else the group does.
const LOOK_EVERY: Duration = Duration::from_micros(20);

/// A group whose calls take their place in a stream: see [`Group::on`].
#[derive(Clone, Copy, Debug)]
pub struct OnStream<'a> {
    group: &'a Group,
    stream: &'a Stream,
}

impl Group {
    /// The same group, for calls on GPU memory: each begins when this stream, of the group's GPU, has done what was put into
    /// it before the call, and is over when the GPU is through with the data: when a blocking call returns, or the
    /// [`Pending`](super::Pending) of a started one has ended. What is put into any stream after that finds the result.
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
        self.run(self.all_reduce_operation(data, op)?)
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
        self.run(self.reducing_between(Collective::AllReduce, op, input, output)?)
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
        self.run(self.reduce_operation(data, op, root)?)
    }

    /// [`Group::broadcast`].
    ///
    /// # Errors
    ///
    /// See [`CollectiveError`].
    pub fn broadcast<T: Element>(&self, data: &mut GpuBuffer<T>, root: Rank) -> Result<(), CollectiveError> {
        self.run(self.broadcast_operation(data, root)?)
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
        self.run(self.moving_between(Collective::AllGather, input, output)?)
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
        self.run(self.reducing_between(Collective::ReduceScatter, op, input, output)?)
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
        self.run(self.moving_between(Collective::Gather { root }, input, output)?)
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
        self.run(self.moving_between(Collective::Scatter { root }, input, output)?)
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
        self.run(self.moving_between(Collective::AllToAll, input, output)?)
    }

    /// [`Group::send`].
    ///
    /// # Errors
    ///
    /// See [`CollectiveError`].
    pub fn send<T: Element>(&self, data: &GpuBuffer<T>, to: Rank) -> Result<(), CollectiveError> {
        self.run(self.send_operation(data, to)?)
    }

    /// [`Group::recv`].
    ///
    /// # Errors
    ///
    /// See [`CollectiveError`].
    pub fn recv<T: Element>(&self, data: &mut GpuBuffer<T>, from: Rank) -> Result<(), CollectiveError> {
        self.run(self.recv_operation(data, from)?)
    }

    /// Starts [`OnStream::all_reduce`].
    ///
    /// # Errors
    ///
    /// See [`CollectiveError`]; the memory comes back with it.
    pub fn start_all_reduce<T: Element>(&self, data: GpuBuffer<T>, op: ReduceOp) -> Started<GpuBuffer<T>> {
        let operation = self.all_reduce_operation(&data, op);
        self.start(operation, data)
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
        let operation = self.reduce_operation(&data, op, root);
        self.start(operation, data)
    }

    /// Starts [`OnStream::broadcast`].
    ///
    /// # Errors
    ///
    /// See [`CollectiveError`]; the memory comes back with it.
    pub fn start_broadcast<T: Element>(&self, data: GpuBuffer<T>, root: Rank) -> Started<GpuBuffer<T>> {
        let operation = self.broadcast_operation(&data, root);
        self.start(operation, data)
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
        let operation = self.moving_between(Collective::AllGather, &input, &output);
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
        let operation = self.reducing_between(Collective::ReduceScatter, op, &input, &output);
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
        let operation = self.moving_between(Collective::Gather { root }, &input, &output);
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
        let operation = self.moving_between(Collective::Scatter { root }, &input, &output);
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
        let operation = self.moving_between(Collective::AllToAll, &input, &output);
        self.start(operation, (input, output))
    }

    /// Starts [`OnStream::send`].
    ///
    /// # Errors
    ///
    /// See [`CollectiveError`]; the memory comes back with it.
    pub fn start_send<T: Element>(&self, data: GpuBuffer<T>, to: Rank) -> Started<GpuBuffer<T>> {
        let operation = self.send_operation(&data, to);
        self.start(operation, data)
    }

    /// Starts [`OnStream::recv`].
    ///
    /// # Errors
    ///
    /// See [`CollectiveError`]; the memory comes back with it.
    pub fn start_recv<T: Element>(&self, data: GpuBuffer<T>, from: Rank) -> Started<GpuBuffer<T>> {
        let operation = self.recv_operation(&data, from);
        self.start(operation, data)
    }

    fn all_reduce_operation<T: Element>(
        &self,
        data: &GpuBuffer<T>,
        op: ReduceOp,
    ) -> Result<Operation, CollectiveError> {
        let bytes = data.bytes(self.group)?;
        self.reducing::<T>(Collective::AllReduce, op, data.len(), bytes.clone(), bytes)
    }

    fn reduce_operation<T: Element>(
        &self,
        data: &GpuBuffer<T>,
        op: ReduceOp,
        root: Rank,
    ) -> Result<Operation, CollectiveError> {
        self.group.expect_rank(root)?;
        let input = data.bytes(self.group)?;
        let output = if self.group.rank() == root { input.clone() } else { Bytes::None };
        self.reducing::<T>(Collective::Reduce { root }, op, data.len(), input, output)
    }

    fn broadcast_operation<T: Element>(
        &self,
        data: &GpuBuffer<T>,
        root: Rank,
    ) -> Result<Operation, CollectiveError> {
        self.group.expect_rank(root)?;
        let output = data.bytes(self.group)?;
        let input = if self.group.rank() == root { output.clone() } else { Bytes::None };
        Ok(self.moving::<T>(Collective::Broadcast { root }, data.len(), input, output))
    }

    fn send_operation<T: Element>(
        &self,
        data: &GpuBuffer<T>,
        to: Rank,
    ) -> Result<Operation, CollectiveError> {
        self.group.expect_peer(to)?;
        let collective = Collective::SendRecv { from: self.group.rank(), to };
        Ok(self.moving::<T>(collective, data.len(), data.bytes(self.group)?, Bytes::None))
    }

    fn recv_operation<T: Element>(
        &self,
        data: &GpuBuffer<T>,
        from: Rank,
    ) -> Result<Operation, CollectiveError> {
        self.group.expect_peer(from)?;
        let collective = Collective::SendRecv { from, to: self.group.rank() };
        Ok(self.moving::<T>(collective, data.len(), Bytes::None, data.bytes(self.group)?))
    }

    /// Elements of one buffer reduced into another one.
    fn reducing_between<T: Element>(
        &self,
        collective: Collective,
        op: ReduceOp,
        input: &GpuBuffer<T>,
        output: &GpuBuffer<T>,
    ) -> Result<Operation, CollectiveError> {
        let (count, from, into) = self.between(collective, input, output)?;
        self.reducing::<T>(collective, op, count, from, into)
    }

    /// Elements of one buffer moved to another one.
    fn moving_between<T: Element>(
        &self,
        collective: Collective,
        input: &GpuBuffer<T>,
        output: &GpuBuffer<T>,
    ) -> Result<Operation, CollectiveError> {
        let (count, from, into) = self.between(collective, input, output)?;
        Ok(self.moving::<T>(collective, count, from, into))
    }

    /// Elements of a part, and both buffers as an engine takes them, where this rank's matter.
    fn between<T: Element>(
        &self,
        collective: Collective,
        input: &GpuBuffer<T>,
        output: &GpuBuffer<T>,
    ) -> Result<(usize, Bytes, Bytes), CollectiveError> {
        let (rank, ranks) = (self.group.rank(), self.group.world_size());
        let count = self.group.part_len(collective, input.len(), output.len())?;
        let bytes = |buffer: &GpuBuffer<T>, parts: Parts| {
            if parts.is_empty() { Ok(Bytes::None) } else { buffer.bytes(self.group) }
        };
        let from = bytes(input, collective.input_parts(rank, ranks))?;
        let into = bytes(output, collective.output_parts(rank, ranks))?;
        Ok((count, from, into))
    }

    fn reducing<T: Element>(
        &self,
        collective: Collective,
        op: ReduceOp,
        count: usize,
        input: Bytes,
        output: Bytes,
    ) -> Result<Operation, CollectiveError> {
        if self.group.exact_for(T::DATA_TYPE, op)?.is_some() {
            return Err(CollectiveError::ExactOnGpu);
        }
        Ok(Operation { op, ..self.moving::<T>(collective, count, input, output) })
    }

    fn moving<T: Element>(
        &self,
        collective: Collective,
        count: usize,
        input: Bytes,
        output: Bytes,
    ) -> Operation {
        let (op, counts, space) = (ReduceOp::Sum, Counts::Each(count), self.group.space());
        Operation { collective, data_type: T::DATA_TYPE, op, counts, input, output, space, gate: None }
    }

    /// Carries the operation out, after the stream's earlier work.
    fn run(&self, operation: Operation) -> Result<(), CollectiveError> {
        self.group.expect_open()?;
        self.group.expect_gpu(self.stream.gpu())?;
        self.follow_stream()?;
        self.group.blocking(operation)
    }

    /// Waits until the stream has done what is in it, carrying on what else the group does.
    fn follow_stream(&self) -> Result<(), CollectiveError> {
        let mark = self.stream.mark()?;
        let began = clock::now();
        while !mark.is_reached()? {
            let now = clock::now();
            let waited = now.since(began);
            if waited >= self.group.timeout {
                let ordinal = self.stream.gpu().ordinal();
                return Err(CudaError::Late { ordinal, waited }.into());
            }
            let driver = &self.group.shared.driver;
            driver.drive(driver.lock(), now + LOOK_EVERY, |_| None::<()>);
        }
        Ok(())
    }

    /// Starts the operation behind the stream's earlier work.
    fn start<D: Buffers>(&self, operation: Result<Operation, CollectiveError>, data: D) -> Started<D> {
        let behind = operation.and_then(|operation| {
            self.group.expect_open()?;
            self.group.expect_gpu(self.stream.gpu())?;
            Ok(Operation { gate: gate(self.stream.mark()?, data.foreign())?, ..operation })
        });
        self.group.start(behind, data)
    }
}

/// What a started call keeps until it has ended.
trait Buffers {
    /// What somebody may free before it begins.
    fn foreign(&self) -> Vec<ForeignMemory>;
}

impl<T: Element> Buffers for GpuBuffer<T> {
    fn foreign(&self) -> Vec<ForeignMemory> {
        self.foreign().cloned().into_iter().collect()
    }
}

impl<T: Element> Buffers for (GpuBuffer<T>, GpuBuffer<T>) {
    fn foreign(&self) -> Vec<ForeignMemory> {
        self.0.foreign().into_iter().chain(self.1.foreign()).cloned().collect()
    }
}

/// Open when the mark is reached; none is needed where it is already. The memory is looked at once more then.
fn gate(mark: Mark, foreign: Vec<ForeignMemory>) -> Result<Option<Gate>, CudaError> {
    if mark.is_reached()? {
        return Ok(None);
    }
    Ok(Some(Box::new(move || {
        if !mark.is_reached()? {
            return Ok(false);
        }
        foreign.iter().try_for_each(ForeignMemory::expect_alive)?;
        Ok(true)
    })))
}

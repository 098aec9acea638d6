//! Operations on a GPU's memory as data.

use pleach_transport::cuda::{CudaError, ForeignMemory};
use pleach_vocabulary::{Collective, Parts, Rank, ReduceOp};

use super::Group;
use super::data::Element;
use super::error::CollectiveError;
use super::gpu::GpuBuffer;
use super::operation::{self, Operation};
use crate::engine::Bytes;

/// An operation, and what somebody may free before it begins.
pub(super) struct GpuOperation {
    pub(super) operation: Operation,
    pub(super) foreign: Vec<ForeignMemory>,
}

impl GpuOperation {
    pub(super) fn all_reduce<T: Element>(
        group: &Group,
        data: &GpuBuffer<T>,
        op: ReduceOp,
    ) -> Result<Self, CollectiveError> {
        let bytes = data.bytes(group)?;
        let operation = reducing::<T>(group, Collective::AllReduce, op, data.len(), bytes.clone(), bytes)?;
        Ok(Self::on(data, operation))
    }

    pub(super) fn reduce<T: Element>(
        group: &Group,
        data: &GpuBuffer<T>,
        op: ReduceOp,
        root: Rank,
    ) -> Result<Self, CollectiveError> {
        group.expect_rank(root)?;
        let input = data.bytes(group)?;
        let output = if group.rank() == root { input.clone() } else { Bytes::None };
        let operation = reducing::<T>(group, Collective::Reduce { root }, op, data.len(), input, output)?;
        Ok(Self::on(data, operation))
    }

    pub(super) fn broadcast<T: Element>(
        group: &Group,
        data: &GpuBuffer<T>,
        root: Rank,
    ) -> Result<Self, CollectiveError> {
        group.expect_rank(root)?;
        let output = data.bytes(group)?;
        let input = if group.rank() == root { output.clone() } else { Bytes::None };
        let operation = moving::<T>(group, Collective::Broadcast { root }, data.len(), input, output);
        Ok(Self::on(data, operation))
    }

    pub(super) fn send<T: Element>(
        group: &Group,
        data: &GpuBuffer<T>,
        to: Rank,
    ) -> Result<Self, CollectiveError> {
        group.expect_peer(to)?;
        let collective = Collective::SendRecv { from: group.rank(), to };
        let operation = moving::<T>(group, collective, data.len(), data.bytes(group)?, Bytes::None);
        Ok(Self::on(data, operation))
    }

    pub(super) fn recv<T: Element>(
        group: &Group,
        data: &GpuBuffer<T>,
        from: Rank,
    ) -> Result<Self, CollectiveError> {
        group.expect_peer(from)?;
        let collective = Collective::SendRecv { from, to: group.rank() };
        let operation = moving::<T>(group, collective, data.len(), Bytes::None, data.bytes(group)?);
        Ok(Self::on(data, operation))
    }

    fn on<T: Element>(data: &GpuBuffer<T>, operation: Operation) -> Self {
        Self { operation, foreign: data.foreign().into_iter().cloned().collect() }
    }

    /// Elements of one buffer reduced into another one.
    pub(super) fn reducing<T: Element>(
        group: &Group,
        collective: Collective,
        op: ReduceOp,
        input: &GpuBuffer<T>,
        output: &GpuBuffer<T>,
    ) -> Result<Self, CollectiveError> {
        let (count, [from, into], foreign) = between(group, collective, input, output)?;
        Ok(Self { operation: reducing::<T>(group, collective, op, count, from, into)?, foreign })
    }

    /// Elements of one buffer moved to another one.
    pub(super) fn moving<T: Element>(
        group: &Group,
        collective: Collective,
        input: &GpuBuffer<T>,
        output: &GpuBuffer<T>,
    ) -> Result<Self, CollectiveError> {
        let (count, [from, into], foreign) = between(group, collective, input, output)?;
        Ok(Self { operation: moving::<T>(group, collective, count, from, into), foreign })
    }

    /// Refuses it where somebody has freed its memory.
    pub(super) fn expect_alive(&self) -> Result<(), CudaError> {
        self.foreign.iter().try_for_each(ForeignMemory::expect_alive)
    }
}

/// Elements of a part, and both buffers as an engine takes them, where this rank's matter, with
/// what may be freed of these.
fn between<T: Element>(
    group: &Group,
    collective: Collective,
    input: &GpuBuffer<T>,
    output: &GpuBuffer<T>,
) -> Result<(usize, [Bytes; 2], Vec<ForeignMemory>), CollectiveError> {
    let (rank, ranks) = (group.rank(), group.world_size());
    let count = group.part_len(collective, input.len(), output.len())?;
    let mut foreign = Vec::new();
    let mut bytes = |buffer: &GpuBuffer<T>, parts: Parts| {
        if parts.is_empty() {
            return Ok(Bytes::None);
        }
        foreign.extend(buffer.foreign().cloned());
        buffer.bytes(group)
    };
    let from = bytes(input, collective.input_parts(rank, ranks))?;
    let into = bytes(output, collective.output_parts(rank, ranks))?;
    group.expect_apart_or_in_place(collective, &from, &into)?;
    Ok((count, [from, into], foreign))
}

fn reducing<T: Element>(
    group: &Group,
    collective: Collective,
    op: ReduceOp,
    count: usize,
    input: Bytes,
    output: Bytes,
) -> Result<Operation, CollectiveError> {
    if group.exact_for(T::DATA_TYPE, op)?.is_some() {
        return Err(CollectiveError::ExactOnGpu);
    }
    Ok(Operation { op, ..moving::<T>(group, collective, count, input, output) })
}

fn moving<T: Element>(
    group: &Group,
    collective: Collective,
    count: usize,
    input: Bytes,
    output: Bytes,
) -> Operation {
    let on_host = operation::moving(collective, T::DATA_TYPE, count, input, output);
    Operation { space: group.space(), ..on_host }
}

//! The operations of a group as data: which collective, of what, from and to which bytes; arguments
//! checked.

use pleach_transport::Space;
use pleach_vocabulary::{Collective, DataType, Rank, ReduceOp};

use super::Group;
use super::data::{Buffer, Data, DataMut, Element, destination, first_of, source};
use super::error::CollectiveError;
use crate::call::Counts;
use crate::engine::{Bytes, Gate};

/// One operation, as the calls below put it.
pub(super) struct Operation {
    pub(super) collective: Collective,
    pub(super) data_type: DataType,
    pub(super) op: ReduceOp,
    /// Elements of the parts.
    pub(super) counts: Counts,
    pub(super) input: Bytes,
    pub(super) output: Bytes,
    /// Where the bytes live.
    pub(super) space: Space,
    /// What a started one waits for before it begins; a blocking one has none.
    pub(super) gate: Option<Gate>,
}

impl Operation {
    /// One on the host's memory that begins when its turn comes.
    pub(super) fn on_host(
        collective: Collective,
        data_type: DataType,
        op: ReduceOp,
        counts: Counts,
        input: Bytes,
        output: Bytes,
    ) -> Self {
        Self { collective, data_type, op, counts, input, output, space: Space::Host, gate: None }
    }
}

impl Group {
    pub(super) fn all_reduce_operation<D: DataMut + ?Sized>(&self, data: &mut D, op: ReduceOp) -> Operation {
        let count = data.elements().len();
        let bytes = destination(data, self.shared.number);
        operation::<D>(Collective::AllReduce, op, Counts::Each(count), bytes.clone(), bytes)
    }

    /// An all-reduce (sum) of a buffer's first elements.
    pub(super) fn first_operation<T: Element>(&self, data: &mut Buffer<T>, count: usize) -> Operation {
        let bytes = first_of(data, self.shared.number, count);
        operation::<[T]>(Collective::AllReduce, ReduceOp::Sum, Counts::Each(count), bytes.clone(), bytes)
    }

    pub(super) fn reduce_operation<D: DataMut + ?Sized>(
        &self,
        data: &mut D,
        op: ReduceOp,
        root: Rank,
    ) -> Result<Operation, CollectiveError> {
        self.expect_rank(root)?;
        let count = data.elements().len();
        let input = destination(data, self.shared.number);
        let output = if self.rank() == root { input.clone() } else { Bytes::None };
        Ok(operation::<D>(Collective::Reduce { root }, op, Counts::Each(count), input, output))
    }

    pub(super) fn broadcast_operation<D: DataMut + ?Sized>(
        &self,
        data: &mut D,
        root: Rank,
    ) -> Result<Operation, CollectiveError> {
        self.expect_rank(root)?;
        let count = data.elements().len();
        let output = destination(data, self.shared.number);
        let input = if self.rank() == root { output.clone() } else { Bytes::None };
        Ok(moving(Collective::Broadcast { root }, D::Element::DATA_TYPE, count, input, output))
    }

    pub(super) fn all_gather_operation<I, O>(
        &self,
        input: &I,
        output: &mut O,
    ) -> Result<Operation, CollectiveError>
    where
        I: Data + ?Sized,
        O: DataMut + ?Sized,
    {
        let count = self.part_len(Collective::AllGather, input.elements().len(), output.elements().len())?;
        let (input, output) = (source(input, self.shared.number), destination(output, self.shared.number));
        Ok(moving(Collective::AllGather, I::Element::DATA_TYPE, count, input, output))
    }

    pub(super) fn reduce_scatter_operation<I, O>(
        &self,
        input: &I,
        output: &mut O,
        op: ReduceOp,
    ) -> Result<Operation, CollectiveError>
    where
        I: Data + ?Sized,
        O: DataMut + ?Sized,
    {
        let count =
            self.part_len(Collective::ReduceScatter, input.elements().len(), output.elements().len())?;
        let (input, output) = (source(input, self.shared.number), destination(output, self.shared.number));
        Ok(operation::<I>(Collective::ReduceScatter, op, Counts::Each(count), input, output))
    }

    pub(super) fn send_operation<D: Data + ?Sized>(
        &self,
        data: &D,
        to: Rank,
    ) -> Result<Operation, CollectiveError> {
        self.expect_peer(to)?;
        let collective = Collective::SendRecv { from: self.rank(), to };
        let input = source(data, self.shared.number);
        Ok(moving(collective, D::Element::DATA_TYPE, data.elements().len(), input, Bytes::None))
    }

    pub(super) fn recv_operation<D: DataMut + ?Sized>(
        &self,
        data: &mut D,
        from: Rank,
    ) -> Result<Operation, CollectiveError> {
        self.expect_peer(from)?;
        let collective = Collective::SendRecv { from, to: self.rank() };
        let count = data.elements().len();
        let output = destination(data, self.shared.number);
        Ok(moving(collective, D::Element::DATA_TYPE, count, Bytes::None, output))
    }

    /// Elements of a part, by how many the input and the output have; what this rank has no part of
    /// is not looked at. The root that the collective names is checked first.
    pub(super) fn part_len(
        &self,
        collective: Collective,
        input: usize,
        output: usize,
    ) -> Result<usize, CollectiveError> {
        let times_ranks = |count: usize| count.saturating_mul(self.world_size() as usize);
        if let Some(root) = collective.root() {
            self.expect_rank(root)?;
        }
        let (count, what, expected, actual) = match collective {
            Collective::AllGather => {
                (input, "the output of all-gather (input times ranks)", times_ranks(input), output)
            }
            Collective::ReduceScatter => {
                (output, "the input of reduce-scatter (output times ranks)", times_ranks(output), input)
            }
            Collective::Gather { root } if root == self.rank() => {
                (input, "the root's output of gather (input times ranks)", times_ranks(input), output)
            }
            Collective::Scatter { root } if root == self.rank() => {
                (output, "the root's input of scatter (output times ranks)", times_ranks(output), input)
            }
            Collective::AllToAll => {
                let count = input / self.world_size() as usize;
                let what = "the input of all-to-all (a block of one length for each rank)";
                expect_length(what, times_ranks(count), input)?;
                (count, "the output of all-to-all (as long as the input)", input, output)
            }
            Collective::AllReduce => (input, "the output of all-reduce", input, output),
            Collective::Scatter { .. } => return Ok(output),
            // One buffer is both, or the other one is another rank's.
            _ => return Ok(input),
        };
        expect_length(what, expected, actual)?;
        Ok(count)
    }

    /// Input and output are apart, or lie as in place: the one is the other, or a rank's own part
    /// at its place in it. Of host memory the borrows say so; memory of GPUs may have several
    /// names.
    pub(super) fn expect_apart_or_in_place(
        &self,
        collective: Collective,
        input: &Bytes,
        output: &Bytes,
    ) -> Result<(), CollectiveError> {
        let (rank, ranks) = (self.rank(), self.world_size());
        let place = |bytes: &Bytes| {
            let start = bytes.base().0 as usize;
            start..start + bytes.len()
        };
        let (from, into) = (place(input), place(output));
        if from.is_empty() || into.is_empty() || from.end <= into.start || into.end <= from.start {
            return Ok(());
        }
        let (inputs, outputs) = (collective.input_parts(rank, ranks), collective.output_parts(rank, ranks));
        // What goes to a rank and what comes from it would lie at the same place.
        let has_no_such_form = collective == Collective::AllToAll && ranks > 1;
        let (inner, outer, inner_parts, outer_parts) = if inputs.len() <= outputs.len() {
            (from, into, inputs, outputs)
        } else {
            (into, from, outputs, inputs)
        };
        let own = inner_parts.iter().next().filter(|own| outer_parts.contains(*own));
        let before = own.map(|own| outer_parts.position(own) as usize * (outer.len() / outer_parts.len()));
        let is_in_place = before.is_some_and(|before| inner.start == outer.start + before);
        if is_in_place && !has_no_such_form { Ok(()) } else { Err(CollectiveError::Overlap { collective }) }
    }

    pub(super) fn expect_rank(&self, rank: Rank) -> Result<(), CollectiveError> {
        let world_size = self.world_size();
        if rank < world_size { Ok(()) } else { Err(CollectiveError::NoSuchRank { rank, world_size }) }
    }

    pub(super) fn expect_peer(&self, rank: Rank) -> Result<(), CollectiveError> {
        self.expect_rank(rank)?;
        if rank == self.rank() { Err(CollectiveError::Own { rank }) } else { Ok(()) }
    }
}

/// An operation on elements of the type of `D`.
pub(super) fn operation<D: Data + ?Sized>(
    collective: Collective,
    op: ReduceOp,
    counts: Counts,
    input: Bytes,
    output: Bytes,
) -> Operation {
    Operation::on_host(collective, D::Element::DATA_TYPE, op, counts, input, output)
}

pub(super) fn moving(
    collective: Collective,
    data_type: DataType,
    count: usize,
    input: Bytes,
    output: Bytes,
) -> Operation {
    Operation::on_host(collective, data_type, ReduceOp::Sum, Counts::Each(count), input, output)
}

pub(super) fn barrier_operation() -> Operation {
    moving(Collective::Barrier, DataType::U8, 0, Bytes::None, Bytes::None)
}

pub(super) fn expect_length(
    what: &'static str,
    expected: usize,
    actual: usize,
) -> Result<(), CollectiveError> {
    if expected == actual { Ok(()) } else { Err(CollectiveError::Length { what, expected, actual }) }
}

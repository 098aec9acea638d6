//! Operations that a group can carry out: the arguments are checked, and the bytes are known.

use std::ops::Range;
use std::sync::Arc;

use pleach_transport::Space;
use pleach_transport::cuda::{CudaError, ForeignMemory};

use super::Group;
use super::data::{Operand, part};
use super::error::CollectiveError;
use super::operation::{BlockCounts, Call, Form};
use super::premultiplied::Given;
use crate::call::{Counts, Paired};
use crate::engine::{Bytes, Gate};
use pleach_vocabulary::Parts;
use pleach_vocabulary::Rank;
use pleach_vocabulary::{Collective, DataType, ReduceOp};

/// An operation of one group, on memory that stays until the operation has ended.
pub(super) struct BoundCall {
    pub(super) collective: Collective,
    pub(super) data_type: DataType,
    pub(super) op: ReduceOp,
    /// Elements of the parts.
    pub(super) counts: Counts,
    pub(super) input: Bytes,
    pub(super) output: Bytes,
    /// The gate that a started operation waits for before it begins. A blocking operation has none.
    pub(super) gate: Option<Gate>,
    /// Memory that other code may free before the operation begins.
    pub(super) foreign: Option<Box<[ForeignMemory]>>,
    /// What this rank gives in place of its input.
    pub(super) given: Option<Given>,
    /// Whether it consists of several operations, so that its result depends on no order.
    pub(super) is_exact: bool,
}

impl BoundCall {
    /// An operation on memory that no other code frees, whose result may depend on the order.
    #[inline]
    pub(super) fn new(
        collective: Collective,
        data_type: DataType,
        op: ReduceOp,
        counts: Counts,
        input: Bytes,
        output: Bytes,
    ) -> Self {
        Self {
            collective,
            data_type,
            op,
            counts,
            input,
            output,
            gate: None,
            foreign: None,
            given: None,
            is_exact: false,
        }
    }

    /// Whether its input or its output is memory that no device knows.
    #[inline]
    pub(super) fn is_private(&self) -> bool {
        matches!(self.input, Bytes::Private { .. }) || matches!(self.output, Bytes::Private { .. })
    }

    /// An error if other code has freed its memory.
    pub(super) fn expect_alive(&self) -> Result<(), CudaError> {
        self.foreign.iter().flatten().try_for_each(ForeignMemory::expect_alive)
    }
}

impl Group {
    /// The call on its only memory.
    #[inline(always)] // The operand is taken apart where it is made: nothing is moved.
    pub(super) fn bound(&self, call: &Call, operand: Operand) -> Result<BoundCall, CollectiveError> {
        if !self.is_plain(call, &operand) {
            return self.bound_in_general(call, [operand, Operand::none()]);
        }
        let Call { collective, data_type, op, .. } = *call;
        let Operand { bytes, len, .. } = operand;
        let (input, output) = (bytes.clone(), bytes);
        Ok(BoundCall::new(collective, data_type, op, Counts::Each(len), input, output))
    }

    /// Whether nothing is to be checked, as in the shortest calls.
    #[inline(always)]
    fn is_plain(&self, call: &Call, operand: &Operand) -> bool {
        let is_whole = call.collective == Collective::AllReduce && call.form == Form::InPlace;
        let is_here = operand.space == Space::Host && self.shared.contributors.are_all_here();
        is_whole && call.counts.is_none() && is_here && self.exact.is_none() && !call.op.has_factor()
    }

    /// The call on these operands: its input and its output, or its only operand.
    #[inline(never)]
    pub(super) fn bound_in_general(
        &self,
        call: &Call,
        [mut first, mut second]: [Operand; 2],
    ) -> Result<BoundCall, CollectiveError> {
        let Call { data_type, op, form, .. } = *call;
        let (rank, ranks) = (self.rank(), self.world_size());
        let collective = self.named(call)?;
        let inputs = collective.input_parts(rank, ranks);
        let outputs = collective.output_parts(rank, ranks);
        let own = self.own_block(call.counts.as_deref(), first.len);
        let lengths = match form {
            Form::Apart | Form::Nothing => [first.len, second.len],
            Form::Sent => [first.len, 0],
            Form::Received => [0, first.len],
            Form::InPlace if inputs.len() < outputs.len() && !inputs.is_empty() => [own.len(), first.len],
            Form::InPlace if outputs.len() < inputs.len() && !outputs.is_empty() => [first.len, own.len()],
            Form::InPlace => [first.len; 2],
        };
        let counts = match call.counts.as_deref() {
            None => Counts::Each(self.part_len(collective, form, lengths)?),
            Some(counts) => self.uneven_counts(collective, form, counts, lengths)?,
        };
        // An operand without a part of this rank is not checked.
        if form == Form::Apart && inputs.is_empty() {
            first = Operand::none();
        }
        if outputs.is_empty() {
            second = Operand::none();
        }
        self.expect_space(first.space, first.len)?;
        self.expect_space(second.space, second.len)?;
        let foreign: Box<[_]> = first.foreign.take().into_iter().chain(second.foreign.take()).collect();
        let (input, output) = match form {
            Form::Apart | Form::Sent | Form::Nothing => (first.bytes, second.bytes),
            Form::Received => (Bytes::None, first.bytes),
            Form::InPlace => {
                let size = data_type.bytes();
                let at = |own_parts: Parts, others: Parts| match own_parts.len() {
                    0 => Bytes::None,
                    count if count >= others.len() => first.bytes.clone(),
                    _ => part(&first.bytes, own.start * size..own.end * size),
                };
                (at(inputs, outputs), at(outputs, inputs))
            }
        };
        if form == Form::Apart {
            self.expect_apart_or_in_place(collective, &counts, &input, &output)?;
        }
        let call = BoundCall::new(collective, data_type, op, counts, input, output);
        let mut call = BoundCall { foreign: (!foreign.is_empty()).then_some(foreign), ..call };
        if collective.reduces() {
            self.reducing(&mut call)?;
        } else if collective != Collective::Barrier {
            self.shared.contributors.expect_all()?;
        }
        Ok(call)
    }

    /// Sets what this rank gives to a call that reduces, and whether that is exact.
    fn reducing(&self, call: &mut BoundCall) -> Result<(), CollectiveError> {
        let (op, data_type) = (call.op, call.data_type);
        let (sum, factor) = op.parted();
        (call.op, call.given) = (sum, factor.map(Given::Products));
        if factor.is_some() {
            if !op.fits(data_type) {
                return Err(CollectiveError::Meaningless { op, data_type });
            }
            if self.gpu().is_some() {
                return Err(CollectiveError::NoKernel { op });
            }
        }
        call.is_exact = self.is_exact(data_type, call.op)?;
        if !self.contributes() && call.op.fits(data_type) {
            call.given = Some(Given::Neutral(call.op));
        }
        Ok(())
    }

    /// The collective. For a send or a receive, the call names the peer, and this adds this rank.
    fn named(&self, call: &Call) -> Result<Collective, CollectiveError> {
        let rank = self.rank();
        let collective = match (call.collective, call.form) {
            (Collective::SendRecv { to, .. }, Form::Sent) => Collective::SendRecv { from: rank, to },
            (Collective::SendRecv { from, .. }, Form::Received) => Collective::SendRecv { from, to: rank },
            (other, _) => other,
        };
        if let Collective::SendRecv { from, to } = collective {
            self.expect_peer(if from == rank { to } else { from })?;
        }
        collective.root().map_or(Ok(()), |root| self.expect_rank(root))?;
        Ok(collective)
    }

    /// This rank's block, in elements, of memory with `len` elements and a block for each rank.
    fn own_block(&self, counts: Option<&BlockCounts>, len: usize) -> Range<usize> {
        let (rank, ranks) = (self.rank() as usize, self.world_size() as usize);
        let (start, count) = match counts {
            Some(BlockCounts::Listed(list)) => {
                (sum(list.iter().take(rank)), list.get(rank).copied().unwrap_or(0))
            }
            _ => (rank * (len / ranks), len / ranks),
        };
        start..start.saturating_add(count)
    }

    /// Elements of a part, from the lengths of input and output. The length of an operand without a
    /// part of this rank is not checked.
    fn part_len(
        &self,
        collective: Collective,
        form: Form,
        [input, output]: [usize; 2],
    ) -> Result<usize, CollectiveError> {
        let ranks = self.world_size() as usize;
        let is_root = collective.root().is_none_or(|root| root == self.rank());
        let in_place = form == Form::InPlace;
        let (count, whole, what) = match collective {
            Collective::AllGather if in_place => {
                (input, output, "the data of all-gather (a block for each rank)")
            }
            Collective::AllGather => (input, output, "the output of all-gather (input times ranks)"),
            Collective::ReduceScatter if in_place => {
                (output, input, "the data of reduce-scatter (a block for each rank)")
            }
            Collective::ReduceScatter => (output, input, "the input of reduce-scatter (output times ranks)"),
            Collective::Gather { .. } if is_root && in_place => {
                (input, output, "the root's data of gather (a block for each rank)")
            }
            Collective::Gather { .. } if is_root => {
                (input, output, "the root's output of gather (input times ranks)")
            }
            Collective::Scatter { .. } if is_root && in_place => {
                (output, input, "the root's data of scatter (a block for each rank)")
            }
            Collective::Scatter { .. } if is_root => {
                (output, input, "the root's input of scatter (output times ranks)")
            }
            Collective::AllToAll => {
                let count = input / ranks;
                let what = "the input of all-to-all (a block of one length for each rank)";
                expect_length(what, count.saturating_mul(ranks), input)?;
                expect_length("the output of all-to-all (as long as the input)", input, output)?;
                return Ok(count);
            }
            Collective::AllReduce | Collective::Reduce { .. } | Collective::Broadcast { .. } if is_root => {
                let what = match collective {
                    Collective::AllReduce => "the output of all-reduce",
                    Collective::Reduce { .. } => "the root's output of reduce",
                    _ => "the root's output of broadcast",
                };
                expect_length(what, input, output)?;
                return Ok(input);
            }
            // Of the two operands, the other one has a meaning at another rank.
            Collective::Scatter { .. } | Collective::Broadcast { .. } => return Ok(output),
            Collective::SendRecv { to, .. } if to == self.rank() => return Ok(output),
            _ => return Ok(input),
        };
        expect_length(what, count.saturating_mul(ranks), whole)?;
        Ok(count)
    }

    /// The counts of blocks of different lengths, as the engine takes them.
    fn uneven_counts(
        &self,
        collective: Collective,
        form: Form,
        counts: &BlockCounts,
        [input, output]: [usize; 2],
    ) -> Result<Counts, CollectiveError> {
        let in_place = form == Form::InPlace;
        let is_root = collective.root() == Some(self.rank());
        match (collective, counts) {
            (Collective::AllGather, BlockCounts::Listed(list)) => {
                let (own, all) = self.own_and_all("all-gather", list)?;
                let (first, second) = if in_place {
                    ("this rank's block of all-gather", "the data of all-gather (all counts together)")
                } else {
                    (
                        "the input of all-gather (this rank's count)",
                        "the output of all-gather (all counts together)",
                    )
                };
                expect_length(first, own, input)?;
                expect_length(second, all, output)?;
                Ok(Counts::listed(list))
            }
            (Collective::ReduceScatter, BlockCounts::Listed(list)) => {
                let (own, all) = self.own_and_all("reduce-scatter", list)?;
                let (first, second) = if in_place {
                    (
                        "the data of reduce-scatter (all counts together)",
                        "this rank's block of reduce-scatter",
                    )
                } else {
                    (
                        "the input of reduce-scatter (all counts together)",
                        "the output of reduce-scatter (this rank's count)",
                    )
                };
                expect_length(first, all, input)?;
                expect_length(second, own, output)?;
                Ok(Counts::listed(list))
            }
            (Collective::Gather { root }, BlockCounts::Listed(list)) => {
                let mut paired = self.nothing();
                paired.given[root as usize] = input;
                if is_root {
                    let (own, all) = self.own_and_all("gather at the root", list)?;
                    expect_length("the root's input of gather (its own count)", own, input)?;
                    expect_length("the root's output of gather (all counts)", all, output)?;
                    paired.taken.copy_from_slice(list);
                }
                Ok(Counts::Paired(Arc::new(paired)))
            }
            (Collective::Scatter { root }, BlockCounts::Listed(list)) => {
                let mut paired = self.nothing();
                paired.taken[root as usize] = output;
                if is_root {
                    let (own, all) = self.own_and_all("scatter at the root", list)?;
                    expect_length("the root's output of scatter (its own count)", own, output)?;
                    expect_length("the root's input of scatter (all counts)", all, input)?;
                    paired.given.copy_from_slice(list);
                }
                Ok(Counts::Paired(Arc::new(paired)))
            }
            (Collective::AllToAll, BlockCounts::PairCounts { send, receive }) => {
                let (own_sent, sent) = self.own_and_all("what all-to-all sends", send)?;
                let (own_received, received) = self.own_and_all("what all-to-all receives", receive)?;
                expect_length("the input of all-to-all (all it sends)", sent, input)?;
                expect_length("the output of all-to-all (all it receives)", received, output)?;
                expect_length("what a rank receives from itself in all-to-all", own_sent, own_received)?;
                let paired = Paired { given: send.clone(), taken: receive.clone() };
                Ok(Counts::Paired(Arc::new(paired)))
            }
            _ => Err(CollectiveError::NoSuchCounts { collective }),
        }
    }

    /// This rank's count and the sum of all counts, from a list with a count for each rank.
    fn own_and_all(&self, what: &'static str, counts: &[usize]) -> Result<(usize, usize), CollectiveError> {
        let (expected, actual) = (self.world_size() as usize, counts.len());
        if expected != actual {
            return Err(CollectiveError::CountOfCounts { what, expected, actual });
        }
        Ok((counts[self.rank() as usize], sum(counts)))
    }

    /// The counts of a rank that gives and gets nothing.
    fn nothing(&self) -> Paired {
        let ranks = self.world_size() as usize;
        Paired { given: vec![0; ranks], taken: vec![0; ranks] }
    }

    /// Checks that input and output are apart, or lie as in place: one is the other, or a rank's
    /// own part at its place in the other. Borrows ensure this for host memory. Memory of GPUs, and
    /// memory that is given by its address, may have several names.
    fn expect_apart_or_in_place(
        &self,
        collective: Collective,
        counts: &Counts,
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
        // The block for a rank and the block from that rank would lie at the same place.
        let has_no_such_form = collective == Collective::AllToAll && ranks > 1;
        let (inner, outer, inner_parts, outer_parts) = if inputs.len() <= outputs.len() {
            (from, into, inputs, outputs)
        } else {
            (into, from, outputs, inputs)
        };
        let own = inner_parts.iter().next().filter(|own| outer_parts.contains(*own));
        let list = match counts {
            Counts::Each(_) => None,
            Counts::Listed(list) => Some(&list[..]),
            Counts::Paired(paired) if matches!(collective, Collective::Gather { .. }) => {
                Some(&paired.taken[..])
            }
            Counts::Paired(paired) => Some(&paired.given[..]),
        };
        let before = own.map(|own| {
            let parts = outer_parts.position(own) as usize;
            match list {
                None => parts * (outer.len() / outer_parts.len()),
                // A part's bytes, of an element's, of as many elements as there are before it.
                Some(list) => sum(list.iter().take(parts)) * (outer.len() / sum(list)),
            }
        });
        let is_in_place = before.is_some_and(|before| inner.start == outer.start + before);
        if is_in_place && !has_no_such_form { Ok(()) } else { Err(CollectiveError::Overlap { collective }) }
    }

    fn expect_rank(&self, rank: Rank) -> Result<(), CollectiveError> {
        let world_size = self.world_size();
        if rank < world_size { Ok(()) } else { Err(CollectiveError::NoSuchRank { rank, world_size }) }
    }

    fn expect_peer(&self, rank: Rank) -> Result<(), CollectiveError> {
        self.expect_rank(rank)?;
        if rank == self.rank() { Err(CollectiveError::Own { rank }) } else { Ok(()) }
    }
}

fn sum<'a>(counts: impl IntoIterator<Item = &'a usize>) -> usize {
    counts.into_iter().fold(0, |sum, count| sum.saturating_add(*count))
}

pub(super) fn expect_length(
    what: &'static str,
    expected: usize,
    actual: usize,
) -> Result<(), CollectiveError> {
    if expected == actual { Ok(()) } else { Err(CollectiveError::Length { what, expected, actual }) }
}

//! The operations of a group as values: the collective, its parameters and its memory. An operation
//! is described once, and carried out in one of four ways: [`Group::run`](super::Group::run),
//! [`Group::start`](super::Group::start), [`Group::prepare`](super::Group::prepare),
//! [`Batch::add`](super::Batch::add).

use std::fmt;

use super::Group;
use super::bound::BoundCall;
use super::data::{Data, DataMut, Element, Operand, destination, source};
use super::error::CollectiveError;
use pleach_vocabulary::Rank;
use pleach_vocabulary::{Collective, DataType, ReduceOp};

/// A call of a group as a value: the operation, and the memory `D` that it works on. `D` is one
/// [`Data`], a pair of input and output, or nothing. The memory is owned or borrowed; a started
/// operation owns it.
///
/// ```
/// use pleach_collectives::{Group, Operation, Options, ReduceOp};
/// # use pleach_transport::rendezvous::World;
/// # let group = Group::join(&Options::new(World::alone())).unwrap();
/// let mut gradient = [1.0f32, 2.0];
/// group.run(Operation::all_reduce(&mut gradient, ReduceOp::Sum))?;
/// let pending = group.start(Operation::all_reduce(vec![1.0f32, 2.0], ReduceOp::Sum))?;
/// assert_eq!(pending.wait()?, gradient);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// A call is described in the same way whether its memory is the host's or a GPU's. A form that
/// cannot work has no function here. One example is an all-to-all in place: the block for a rank
/// and the block from that rank would lie at the same place. An output cannot be an input of
/// another element type, and cannot be memory that is only read:
///
/// ```compile_fail,E0271
/// # use pleach_collectives::Operation;
/// let operation = Operation::all_gather(&[1.0f32], &mut [0.0f64; 4]);
/// ```
/// ```compile_fail,E0277
/// # use pleach_collectives::Operation;
/// let operation = Operation::broadcast(&[1.0f32], 0);
/// ```
#[must_use = "an operation does nothing until it is run, started, prepared or added to a batch"]
pub struct Operation<D> {
    data: D,
    call: Call,
    operands: Operands<D>,
}

/// The memory's bytes, as the group of this number takes them.
pub(super) enum Operands<D> {
    /// Of the only memory.
    One(fn(&mut D, u64) -> Result<Operand, CollectiveError>),
    /// Of the input and of the output.
    Two(fn(&mut D, u64) -> Result<[Operand; 2], CollectiveError>),
}

/// The operation that a call asks for.
#[derive(Debug)]
pub(super) struct Call {
    /// For a send or a receive, only the peer in it has a meaning.
    pub(super) collective: Collective,
    pub(super) data_type: DataType,
    pub(super) op: ReduceOp,
    pub(super) form: Form,
    /// The counts, if blocks are of different lengths.
    pub(super) counts: Option<Box<BlockCounts>>,
}

/// Which operands a call has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Form {
    /// An input and an output.
    Apart,
    /// One operand that is input and output, or of which a part is the input or the output.
    InPlace,
    /// An input alone.
    Sent,
    /// An output alone.
    Received,
    /// None.
    Nothing,
}

/// Elements of blocks of different lengths.
#[derive(Clone, Debug)]
pub(super) enum BlockCounts {
    /// By rank.
    Listed(Vec<usize>),
    /// What goes to each rank and what comes from it.
    PairCounts { send: Vec<usize>, receive: Vec<usize> },
}

impl<D> fmt::Debug for Operation<D> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "Operation({} of {})", self.call.collective, self.call.data_type)
    }
}

impl<D: DataMut> Operation<D> {
    /// Replaces every rank's `data` by the reduction of all of them.
    #[inline]
    pub fn all_reduce(data: D, op: ReduceOp) -> Self {
        Self::in_place(Collective::AllReduce, data, op)
    }

    /// Replaces the root's `data` by the reduction of every rank's `data`. The `data` of the other
    /// ranks stay as they are.
    #[inline]
    pub fn reduce(data: D, op: ReduceOp, root: Rank) -> Self {
        Self::in_place(Collective::Reduce { root }, data, op)
    }

    /// Replaces every rank's `data` by the root's `data`.
    #[inline]
    pub fn broadcast(data: D, root: Rank) -> Self {
        Self::in_place(Collective::Broadcast { root }, data, ReduceOp::Sum)
    }

    /// Fills every rank's `data`, which has a block for each rank, with all ranks' blocks. Rank `r`
    /// gives the block `r` of its own `data`.
    pub fn all_gather_in_place(data: D) -> Self {
        Self::in_place(Collective::AllGather, data, ReduceOp::Sum)
    }

    /// Replaces block `r` of rank `r`'s `data`, which has a block for each rank, by block `r` of
    /// the reduction of all. The other blocks stay as they are.
    pub fn reduce_scatter_in_place(data: D, op: ReduceOp) -> Self {
        Self::in_place(Collective::ReduceScatter, data, op)
    }

    /// Fills the root's `data`, which has a block for each rank, with all ranks' blocks. The root's
    /// own block is at its place there. The `data` of each other rank is the block that it gives.
    pub fn gather_in_place(data: D, root: Rank) -> Self {
        Self::in_place(Collective::Gather { root }, data, ReduceOp::Sum)
    }

    /// Stores block `r` of the root's `data`, which has a block for each rank, in rank `r`'s
    /// `data`. The root's `data` stays as it is.
    pub fn scatter_in_place(data: D, root: Rank) -> Self {
        Self::in_place(Collective::Scatter { root }, data, ReduceOp::Sum)
    }

    /// Receives `data` from a rank that sends as many elements of the same type.
    #[inline]
    pub fn recv(data: D, from: Rank) -> Self {
        let collective = Collective::SendRecv { from, to: from };
        Self::on_one(collective, data, ReduceOp::Sum, Form::Received)
    }

    #[inline]
    fn in_place(collective: Collective, data: D, op: ReduceOp) -> Self {
        Self::on_one(collective, data, op, Form::InPlace)
    }

    #[inline]
    fn on_one(collective: Collective, data: D, op: ReduceOp, form: Form) -> Self {
        let operands = Operands::One(|data, group| destination(data, group));
        Self { data, call: Call::new::<D::Element>(collective, op, form), operands }
    }
}

impl<D: Data> Operation<D> {
    /// Sends `data` to a rank that receives as many elements of the same type. The operation is
    /// done when `data` may be changed again.
    ///
    /// A send of more than 8 KiB is done when the receiver has made its call. Fewer bytes may be
    /// sent before that call. If the receiver then asks for another length or type, the receiver
    /// gets an error at once, and this rank gets it at a later call. Do not rely on sends that end
    /// early: when a few messages wait at the receiver, a send waits too.
    #[inline]
    pub fn send(data: D, to: Rank) -> Self {
        let collective = Collective::SendRecv { from: to, to };
        let operands = Operands::One(|data, group| source(data, group));
        Self { data, call: Call::new::<D::Element>(collective, ReduceOp::Sum, Form::Sent), operands }
    }
}

impl<I: Data, O: DataMut<Element = I::Element>> Operation<(I, O)> {
    /// Stores the reduction of every rank's `input` in every rank's `output`.
    #[inline]
    pub fn all_reduce_into(input: I, output: O, op: ReduceOp) -> Self {
        Self::apart(Collective::AllReduce, input, output, op)
    }

    /// Stores the reduction of every rank's `input` in the root's `output`. The `output` of other
    /// ranks is not used; it may be empty.
    pub fn reduce_into(input: I, output: O, op: ReduceOp, root: Rank) -> Self {
        Self::apart(Collective::Reduce { root }, input, output, op)
    }

    /// Stores the root's `input` in every rank's `output`. The `input` of other ranks is not used;
    /// it may be empty.
    pub fn broadcast_into(input: I, output: O, root: Rank) -> Self {
        Self::apart(Collective::Broadcast { root }, input, output, ReduceOp::Sum)
    }

    /// Stores every rank's `input` in every rank's `output`, one after the other in rank order.
    #[inline]
    pub fn all_gather(input: I, output: O) -> Self {
        Self::apart(Collective::AllGather, input, output, ReduceOp::Sum)
    }

    /// Stores block `r` of the reduction of every rank's `input` in rank `r`'s `output`.
    #[inline]
    pub fn reduce_scatter(input: I, output: O, op: ReduceOp) -> Self {
        Self::apart(Collective::ReduceScatter, input, output, op)
    }

    /// Stores every rank's `input` in the root's `output`, one after the other in rank order. The
    /// `output` of other ranks is not used; it may be empty.
    #[inline]
    pub fn gather(input: I, output: O, root: Rank) -> Self {
        Self::apart(Collective::Gather { root }, input, output, ReduceOp::Sum)
    }

    /// Stores block `r` of the root's `input`, which has a block for each rank, in rank `r`'s
    /// `output`. The `input` of other ranks is not used; it may be empty.
    #[inline]
    pub fn scatter(input: I, output: O, root: Rank) -> Self {
        Self::apart(Collective::Scatter { root }, input, output, ReduceOp::Sum)
    }

    /// Stores block `r` of rank `s`'s `input` as block `s` of rank `r`'s `output`; both have a
    /// block for each rank.
    #[inline]
    pub fn all_to_all(input: I, output: O) -> Self {
        Self::apart(Collective::AllToAll, input, output, ReduceOp::Sum)
    }

    #[inline]
    fn apart(collective: Collective, input: I, output: O, op: ReduceOp) -> Self {
        let operands = Operands::Two(|(input, output): &mut (I, O), group| {
            Ok([source(input, group)?, destination(output, group)?])
        });
        let call = Call::new::<I::Element>(collective, op, Form::Apart);
        Self { data: (input, output), call, operands }
    }
}

impl Operation<()> {
    /// Ends when every rank has called it.
    pub fn barrier() -> Self {
        let operands = Operands::One(|(), _| Ok(Operand::none()));
        let call = Call::new::<u8>(Collective::Barrier, ReduceOp::Sum, Form::Nothing);
        Self { data: (), call, operands }
    }
}

impl<D> Operation<D> {
    /// The same operation with blocks of different lengths: the block of rank `r` has `counts[r]`
    /// elements.
    ///
    /// All ranks pass the same counts to an all-gather and to a reduce-scatter. For a gather and a
    /// scatter only the counts of the root are used; those of the other ranks may be empty. Every
    /// two ranks compare the counts between them before a byte is moved.
    pub fn with_counts(self, counts: &[usize]) -> Self {
        self.with_block_counts(BlockCounts::Listed(counts.to_vec()))
    }

    /// The same for an all-to-all. Rank `r` gets the next `send[r]` elements of the input and gives
    /// `receive[r]` elements of the output. In both, blocks lie in rank order without gaps. The
    /// number that one rank sends to another must be the number that the other receives from it.
    pub fn with_send_and_receive_counts(self, send: &[usize], receive: &[usize]) -> Self {
        let (send, receive) = (send.to_vec(), receive.to_vec());
        self.with_block_counts(BlockCounts::PairCounts { send, receive })
    }

    fn with_block_counts(mut self, counts: BlockCounts) -> Self {
        self.call.counts = Some(Box::new(counts));
        self
    }

    /// An operation whose element type is known when the program runs.
    #[inline]
    pub(super) fn untyped(call: Call, data: D, operands: Operands<D>) -> Self {
        Self { data, call, operands }
    }

    /// The call of this group, with checked arguments.
    #[inline(always)]
    pub(super) fn bind(&mut self, group: &Group) -> Result<BoundCall, CollectiveError> {
        let number = group.shared.number;
        match self.operands {
            Operands::One(operand) => group.bound(&self.call, operand(&mut self.data, number)?),
            Operands::Two(operands) => group.bound_in_general(&self.call, operands(&mut self.data, number)?),
        }
    }

    /// The memory that it works on.
    pub(super) fn data(&self) -> &D {
        &self.data
    }

    /// The same, to be written. The caller changes no length.
    pub(super) fn data_mut(&mut self) -> &mut D {
        &mut self.data
    }

    /// The memory alone.
    pub(super) fn into_data(self) -> D {
        self.data
    }
}

impl Call {
    #[inline]
    fn new<T: Element>(collective: Collective, op: ReduceOp, form: Form) -> Self {
        Self { collective, data_type: T::DATA_TYPE, op, form, counts: None }
    }
}

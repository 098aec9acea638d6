//! Operations on memory whose element type is known when the program runs, as callers from C and
//! Python have it: no generic parameter stands between them and an [`Operation`].
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::fmt;
use std::sync::Arc;

use pleach_transport::Slice;

use super::Group;
use super::batch::BorrowedData;
use super::data::{Buffer, Element, Operand, OwnedData, private};
use super::error::CollectiveError;
use super::gpu::{GpuBuffer, Held};
use super::operation::{Call, Form, Operands, Operation};
use super::registered::Registered;
use super::summary::Summary;
use crate::engine::{Address, Bytes};
use pleach_vocabulary::{Collective, DataType, ReduceOp};

/// Where elements of a raw operation are, and how many: at an address of the host's memory, or in a
/// buffer, which stays as long as this names it.
#[derive(Clone, Debug)]
pub struct RawData {
    place: Place,
    count: usize,
}

#[derive(Clone, Debug)]
enum Place {
    Address(Address),
    /// Registered with the group of this number.
    Buffer {
        memory: Slice,
        group: u64,
        held: usize,
        held_type: DataType,
    },
    /// Of memory that the group of this number has registered; any type of element.
    Registered {
        memory: Slice,
        group: u64,
    },
    GpuBuffer {
        memory: Arc<Held>,
        held: usize,
        held_type: DataType,
    },
}

impl RawData {
    /// `count` elements that begin at an address. The address is null where there are none. Memory
    /// that is registered or on a GPU is named by its buffer instead.
    #[must_use]
    #[inline]
    pub fn at(address: *mut c_void, count: usize) -> Self {
        Self { place: Place::Address(Address(address.cast())), count }
    }

    /// The elements of a buffer.
    #[must_use]
    pub fn of<T: Element>(buffer: &Buffer<T>) -> Self {
        let ((memory, group), held) = (buffer.held(), buffer.len());
        Self { place: Place::Buffer { memory, group, held, held_type: T::DATA_TYPE }, count: held }
    }

    /// `count` elements of registered memory, from byte `from` on; `None` where the memory ends
    /// before that byte.
    #[must_use]
    pub fn registered(registered: &Registered, from: usize, count: usize) -> Option<Self> {
        let (memory, group) = registered.from(from)?;
        Some(Self { place: Place::Registered { memory, group }, count })
    }

    /// `count` elements of any type from a byte of a buffer on; `None` where the buffer ends before
    /// that byte.
    #[must_use]
    pub fn within(buffer: &Buffer<u8>, byte: usize, count: usize) -> Option<Self> {
        let (memory, group) = buffer.held();
        let memory = memory.slice(byte..memory.len()).ok()?;
        Some(Self { place: Place::Registered { memory, group }, count })
    }

    /// The elements of a buffer on a GPU.
    #[must_use]
    pub fn of_gpu<T: Element>(buffer: &GpuBuffer<T>) -> Self {
        let (memory, held) = (buffer.held(), buffer.len());
        Self { place: Place::GpuBuffer { memory, held, held_type: T::DATA_TYPE }, count: held }
    }

    /// The first of them alone.
    #[must_use]
    pub fn first(self, count: usize) -> Self {
        Self { count, ..self }
    }

    /// All-reduces these elements in place, as [`Group::all_reduce`] does. This is the shortest
    /// way: no operation is made. [`Operation::from_raw`] has all collectives.
    ///
    /// # Errors
    ///
    /// As of [`Operation::from_raw`] and [`Group::run`].
    ///
    /// # Safety
    ///
    /// Until it has returned this is memory of this process with that many elements, and no other
    /// code reads or writes there.
    pub unsafe fn all_reduce(
        &self,
        group: &Group,
        data_type: DataType,
        op: ReduceOp,
    ) -> Result<(), CollectiveError> {
        self.expect(data_type)?;
        let (collective, form) = (Collective::AllReduce, Form::InPlace);
        let call = Call { collective, data_type, op, form, counts: None };
        let operand = self.operand(group.shared.number, data_type.bytes())?;
        group.blocking(&mut group.bound(&call, operand)?, None)
    }

    /// Whether this is the same registered or unregistered memory of the host.
    #[inline]
    fn is_same(&self, other: &Self) -> bool {
        let is_one = match (&self.place, &other.place) {
            (Place::Address(one), Place::Address(other)) => one == other,
            (
                Place::Registered { memory, group } | Place::Buffer { memory, group, .. },
                Place::Registered { memory: other, group: other_group }
                | Place::Buffer { memory: other, group: other_group, .. },
            ) => memory.as_ptr() == other.as_ptr() && group == other_group,
            _ => false,
        };
        is_one && self.count == other.count
    }

    #[inline(always)]
    fn expect(&self, data_type: DataType) -> Result<(), CollectiveError> {
        let (count, size) = (self.count, data_type.bytes());
        // Sizes of elements are powers of two: a mask costs less than a division.
        let aligned = |base: *mut u8| match base as usize & (size - 1) {
            0 => Ok(()),
            _ => Err(CollectiveError::Misaligned { data_type, address: base as u64 }),
        };
        if count.checked_mul(size).is_none_or(|bytes| bytes > isize::MAX as usize) {
            return Err(CollectiveError::TooLong { count, data_type });
        }
        match self.place {
            Place::Address(Address(base)) if count > 0 && base.is_null() => {
                Err(CollectiveError::Null { count })
            }
            Place::Address(Address(base)) => aligned(base),
            Place::Registered { ref memory, .. } if count * size > memory.len() => {
                let (held, held_type) = (memory.len() / size, data_type);
                Err(CollectiveError::OtherElements { held_type, held, data_type, count })
            }
            Place::Registered { ref memory, .. } => aligned(memory.as_ptr()),
            Place::Buffer { held, held_type, .. } | Place::GpuBuffer { held, held_type, .. } => {
                let is_there = held_type == data_type && count <= held;
                let other = CollectiveError::OtherElements { held_type, held, data_type, count };
                if is_there { Ok(()) } else { Err(other) }
            }
        }
    }

    #[inline(always)]
    fn operand(&self, group: u64, size: usize) -> Result<Operand, CollectiveError> {
        let bytes = self.count * size;
        let bytes = match &self.place {
            Place::Address(Address(base)) => private(*base, bytes),
            Place::Buffer { memory, group: of, .. } | Place::Registered { memory, group: of }
                if *of == group =>
            {
                // SAFETY: `self` holds a handle of the memory and outlives the run, as all data of
                // an operation do. A batch drops its operations, so it takes a handle of its own.
                let lent = unsafe { memory.lend() };
                Bytes::Lent(lent.part(0..bytes).expect("looked at before"))
            }
            Place::Buffer { memory, .. } | Place::Registered { memory, .. } => {
                private(memory.as_ptr(), bytes)
            }
            Place::GpuBuffer { memory, .. } => return memory.operand(group, self.count, size),
        };
        Ok(Operand::on_host(bytes, self.count))
    }
}

/// The memory of a raw operation: its input and its output, or the only one.
#[derive(Clone, Debug)]
pub struct RawPair {
    size: usize,
    first: Option<RawData>,
    second: Option<RawData>,
}

impl Operation<RawPair> {
    /// An operation on elements of a type that is known when the program runs. Of the two ranks of
    /// a message only the other rank is read. A rank without an input receives.
    ///
    /// Input and output are in place if both name the same memory, or if one is the rank's own
    /// block inside the other. Otherwise they must not overlap. What a rank has no part in may be
    /// `None`. Blocks of different lengths: [`Operation::with_counts`].
    ///
    /// # Errors
    ///
    /// The memory cannot hold such elements: it is null or misaligned, or a buffer of others. What
    /// a group finds wrong it says when the operation is run, started, prepared or added.
    ///
    /// # Safety
    ///
    /// From the first time that the operation is run, started, prepared or added to a batch, until
    /// the call has returned, the [`Pending`](super::Pending) has ended, the
    /// [`Persistent`](super::Persistent) is gone or the batch has returned or ended, both are
    /// memory of this process with that many elements. No other code writes there while a call is
    /// under way, nor reads the output.
    pub unsafe fn from_raw(
        collective: Collective,
        data_type: DataType,
        op: ReduceOp,
        input: Option<RawData>,
        output: Option<RawData>,
    ) -> Result<Self, CollectiveError> {
        input.iter().chain(&output).try_for_each(|data| data.expect(data_type))?;
        let call = |form| Call { collective, data_type, op, form, counts: None };
        if collective == Collective::AllReduce
            && let (Some(data), Some(output)) = (&input, &output)
            && data.is_same(output)
            && let Some(data) = input
        {
            let operands = Operands::One(|pair: &mut RawPair, group| pair.operand(&pair.first, group));
            let data = RawPair { size: data_type.bytes(), first: Some(data), second: None };
            return Ok(Self::untyped(call(Form::InPlace), data, operands));
        }
        let form = match collective {
            Collective::SendRecv { .. } if input.is_none() => Form::Received,
            Collective::SendRecv { .. } => Form::Sent,
            Collective::Barrier => Form::Nothing,
            _ => Form::Apart,
        };
        let operands = Operands::Two(|pair: &mut RawPair, group| {
            Ok([pair.operand(&pair.first, group)?, pair.operand(&pair.second, group)?])
        });
        // The only memory of a message comes first.
        let [first, second] = if form == Form::Received { [output, None] } else { [input, output] };
        Ok(Self::untyped(call(form), RawPair { size: data_type.bytes(), first, second }, operands))
    }
}

impl RawPair {
    #[inline(always)]
    fn operand(&self, data: &Option<RawData>, group: u64) -> Result<Operand, CollectiveError> {
        data.as_ref().map_or_else(|| Ok(Operand::none()), |data| data.operand(group, self.size))
    }
}

impl OwnedData for RawPair {}
impl BorrowedData<'_> for RawPair {
    const IS_HELD_BY_OPERATION: bool = true;
}

impl Summary for RawPair {
    fn summarize(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let count = |data: &Option<RawData>| data.as_ref().map_or(0, |data| data.count);
        if self.second.is_none() {
            return write!(formatter, "RawPair({} elements)", count(&self.first));
        }
        write!(formatter, "RawPair({} and {} elements)", count(&self.first), count(&self.second))
    }
}

//! Batches: many operations in one pass, as the buckets of data-parallel training are.
//!
//! Short operations of one kind, element type, tag and algorithm are *fused*: their data are copied
//! side by side into a registered buffer that the group keeps, one operation works on it, and the
//! results are copied back. A hundred tensors of a kilobyte then cost about as much as one of a
//! hundred. The others are started one after the other before any is waited for.
//!
//! What is fused with what, and why ranks agree about it: [`super::fused`].

use std::collections::VecDeque;
use std::marker::PhantomData;
use std::sync::{Arc, Mutex, PoisonError};

use pleach_transport::{SharedMemory, Slice, Space};
use pleach_vocabulary::{Rank, ReduceOp};

use super::Group;
use super::data::{Buffer, Data, DataMut, Element, destination};
use super::error::{CollectiveError, GroupName};
use super::flight::Flight;
use super::fused::{
    self, Entry, FUSED_BYTES_MAX, Kind, STAGING_BYTES_MAX, STAGING_BYTES_MIN, Work, expect_meaning, fused,
};
use super::operation::Operation;

/// Operations that are carried out together by [`Batch::run`]. Results are those of the same calls
/// one by one in the order in which they were added; where the group is not
/// [reproducible](crate::Reproducible), a sum of floats may be rounded another way, as it may at
/// another length.
#[must_use = "a batch does nothing until it is run"]
pub struct Batch<'a> {
    group: Group,
    entries: Vec<Entry<&'a mut [u8], Alone<'a>>>,
}

/// A blocking call on what it has borrowed.
pub(super) type Call<'a> = Box<dyn FnOnce(&Group) -> Result<(), CollectiveError> + 'a>;

/// What is not fused.
pub(super) enum Alone<'a> {
    /// The borrow is of what the operation's bytes are in.
    Long(Operation, PhantomData<&'a mut [u8]>),
    /// A call of its own: made of several operations.
    Call(Call<'a>),
}

/// What is carried out on host memory.
pub(super) type Job<'a> = fused::Job<&'a mut [u8], Alone<'a>>;
/// What is fused on host memory.
pub(super) type Bucket<'a> = fused::Bucket<&'a mut [u8]>;

impl Group {
    /// An empty batch of operations of this group.
    pub fn batch<'a>(&self) -> Batch<'a> {
        Batch { group: self.clone(), entries: Vec::new() }
    }

    /// What errors call this group.
    #[must_use]
    pub fn name(&self) -> GroupName {
        GroupName { number: self.shared.number, rank: self.rank(), world_size: self.world_size() }
    }

    /// Refuses what a handle of another group is behind.
    pub(super) fn expect_same(&self, other: &Self) -> Result<(), CollectiveError> {
        let (first, second) = (self.name(), other.name());
        if first == second { Ok(()) } else { Err(CollectiveError::MixedGroups { first, second }) }
    }
}

impl<'a> Batch<'a> {
    /// Adds [`Group::all_reduce`].
    ///
    /// # Errors
    ///
    /// The operation has no meaning for the elements; nothing was added.
    pub fn all_reduce<D: DataMut + ?Sized>(
        &mut self,
        data: &'a mut D,
        op: ReduceOp,
    ) -> Result<&mut Self, CollectiveError> {
        let data_type = D::Element::DATA_TYPE;
        expect_meaning(op, data_type)?;
        if self.group.exact_for(data_type, op)?.is_some() {
            return Ok(
                self.add(Work::Alone(Alone::Call(Box::new(move |group: &Group| group.all_reduce(data, op)))))
            );
        }
        if is_short(data) {
            return Ok(self.add(Work::Short(Kind::AllReduce(op), data_type, bytes_of(data))));
        }
        let operation = self.group.all_reduce_operation(data, op);
        Ok(self.add(Work::Alone(Alone::Long(operation, PhantomData))))
    }

    /// Adds [`Group::reduce`].
    ///
    /// # Errors
    ///
    /// The operation has no meaning for the elements, or there is no such root; nothing was added.
    pub fn reduce<D: DataMut + ?Sized>(
        &mut self,
        data: &'a mut D,
        op: ReduceOp,
        root: Rank,
    ) -> Result<&mut Self, CollectiveError> {
        let data_type = D::Element::DATA_TYPE;
        expect_meaning(op, data_type)?;
        self.group.expect_rank(root)?;
        if self.group.exact_for(data_type, op)?.is_some() {
            return Ok(self
                .add(Work::Alone(Alone::Call(Box::new(move |group: &Group| group.reduce(data, op, root))))));
        }
        if is_short(data) {
            return Ok(self.add(Work::Short(Kind::Reduce(op, root), data_type, bytes_of(data))));
        }
        let operation = self.group.reduce_operation(data, op, root)?;
        Ok(self.add(Work::Alone(Alone::Long(operation, PhantomData))))
    }

    /// Adds [`Group::broadcast`].
    ///
    /// # Errors
    ///
    /// There is no such root; nothing was added.
    pub fn broadcast<D: DataMut + ?Sized>(
        &mut self,
        data: &'a mut D,
        root: Rank,
    ) -> Result<&mut Self, CollectiveError> {
        self.group.expect_rank(root)?;
        if is_short(data) {
            return Ok(self.add(Work::Short(Kind::Broadcast(root), D::Element::DATA_TYPE, bytes_of(data))));
        }
        let operation = self.group.broadcast_operation(data, root)?;
        Ok(self.add(Work::Alone(Alone::Long(operation, PhantomData))))
    }

    /// Adds [`Group::all_gather`].
    ///
    /// # Errors
    ///
    /// The lengths do not fit; nothing was added.
    pub fn all_gather<T: Element, I, O>(
        &mut self,
        input: &'a I,
        output: &'a mut O,
    ) -> Result<&mut Self, CollectiveError>
    where
        I: Data<Element = T> + ?Sized,
        O: DataMut<Element = T> + ?Sized,
    {
        let operation = self.group.all_gather_operation(input, output)?;
        Ok(self.add(Work::Alone(Alone::Long(operation, PhantomData))))
    }

    /// Adds [`Group::send`]. Of a send and a receive in one batch neither waits for the other's
    /// end.
    ///
    /// # Errors
    ///
    /// There is no such peer; nothing was added.
    pub fn send<D: Data + ?Sized>(&mut self, data: &'a D, to: Rank) -> Result<&mut Self, CollectiveError> {
        let operation = self.group.send_operation(data, to)?;
        Ok(self.add(Work::Alone(Alone::Long(operation, PhantomData))))
    }

    /// Adds [`Group::recv`].
    ///
    /// # Errors
    ///
    /// There is no such peer; nothing was added.
    pub fn recv<D: DataMut + ?Sized>(
        &mut self,
        data: &'a mut D,
        from: Rank,
    ) -> Result<&mut Self, CollectiveError> {
        let operation = self.group.recv_operation(data, from)?;
        Ok(self.add(Work::Alone(Alone::Long(operation, PhantomData))))
    }

    /// Adds another batch of the same group behind what was added so far. Each call keeps the tag
    /// and the algorithm of the handle that its batch was made by.
    ///
    /// # Errors
    ///
    /// [`CollectiveError::MixedGroups`]; nothing was added then.
    pub fn append(&mut self, other: Batch<'a>) -> Result<&mut Self, CollectiveError> {
        self.group.expect_same(&other.group)?;
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

    /// Carries out all operations and returns when this rank's part of each is done. All ranks run
    /// batches of the same operations in the same order; each may take as long as the handle's
    /// deadline. Of no operations it is nothing.
    ///
    /// # Errors
    ///
    /// See [`CollectiveError`]: the first operation's that failed. The contents of what was added
    /// are unspecified then.
    pub fn run(self) -> Result<(), CollectiveError> {
        if self.entries.is_empty() {
            return Ok(());
        }
        self.group.expect_open()?;
        let jobs = fused(self.entries);
        let mut flight = Flight::new(self.group.clone(), fused::room(&jobs).min(STAGING_BYTES_MAX));
        for job in jobs {
            match job {
                Job::Fused(bucket) => flight.start_bucket(bucket)?,
                Job::Alone(group, Alone::Long(operation, _)) => flight.start(&group, operation)?,
                Job::Alone(group, Alone::Call(call)) => {
                    flight.finish()?;
                    call(&group)?;
                }
            }
        }
        flight.finish()
    }

    fn add(&mut self, work: Work<&'a mut [u8], Alone<'a>>) -> &mut Self {
        self.entries.push(Entry { group: self.group.clone(), work });
        self
    }
}

impl<'a> Batch<'a> {
    /// What is to be carried out.
    pub(super) fn jobs(self) -> VecDeque<Job<'a>> {
        fused(self.entries)
    }
}

impl Bucket<'_> {
    /// Copies its parts side by side, where this rank's matter, and gives the operation on all of
    /// them.
    pub(super) fn pack(&self, number: u64, staging: &mut Buffer<u8>) -> Operation {
        let mut at = 0;
        for part in self.given() {
            staging[at..at + part.len()].copy_from_slice(part);
            at += part.len();
        }
        self.operation(&destination(staging, number), Space::Host)
    }

    /// Copies the results back, where this rank has some.
    pub(super) fn unpack(&mut self, staging: &Buffer<u8>) {
        let mut at = 0;
        for part in self.gotten() {
            part.copy_from_slice(&staging[at..at + part.len()]);
            at += part.len();
        }
    }
}

/// Registered memory for fused operations, the group's own; made or made larger when it is asked
/// for.
pub(super) fn take_staging(group: &Group, bytes: usize) -> Result<Slice, CollectiveError> {
    let kept = group.shared.staging.lock().unwrap_or_else(PoisonError::into_inner).take();
    if let Some(kept) = kept.filter(|kept| kept.len() >= bytes) {
        return Ok(kept);
    }
    let bytes = bytes.next_power_of_two().max(STAGING_BYTES_MIN);
    let memory = SharedMemory::new(bytes)
        .map_err(|source| CollectiveError::Memory { bytes, source: Arc::new(source) })?;
    let region = group.shared.driver.lock().engine.device().register(memory);
    Ok(region.map_err(|error| CollectiveError::Register(Arc::new(error)))?.whole())
}

/// Takes registered memory back for later batches, if it is not too much and more than what is
/// kept.
pub(super) fn keep_staging(staging: Slice, kept: &Mutex<Option<Slice>>) {
    let mut kept = kept.lock().unwrap_or_else(PoisonError::into_inner);
    let is_better = kept.as_ref().is_none_or(|kept| kept.len() < staging.len());
    if is_better && staging.len() <= STAGING_BYTES_MAX {
        *kept = Some(staging);
    }
}

fn is_short<D: Data + ?Sized>(data: &D) -> bool {
    size_of_val(data.elements()) <= FUSED_BYTES_MAX
}

pub(super) fn bytes_of<D: DataMut + ?Sized>(data: &mut D) -> &mut [u8] {
    bytemuck::cast_slice_mut(data.elements_mut())
}

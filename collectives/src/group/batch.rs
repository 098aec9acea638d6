//! Batches: many operations in one pass, as the buckets of data-parallel training are.
//!
//! Short operations of one kind, element type, tag and algorithm are *fused*: their data are copied side by side into a
//! registered buffer that the group keeps, one operation works on it, and the results are copied back. A hundred tensors of
//! a kilobyte then cost about as much as one of a hundred. The others are started one after the other before any is waited
//! for.
//!
//! **Invariants:** what is fused with what depends only on the sequence of calls and their lengths, which is the same on
//! all ranks; and a fused operation carries a digest of those lengths as its mark, so that ranks that disagree about where
//! one tensor ends are told, as they would be one by one.

use std::collections::VecDeque;
use std::marker::PhantomData;
use std::sync::{Arc, Mutex, PoisonError};

use pleach_transport::{SharedMemory, Slice};

use super::Group;
use super::data::{Buffer, Data, DataMut, Element, destination};
use super::error::{CollectiveError, GroupName};
use super::flight::Flight;
use super::operation::Operation;
use crate::Rank;
use crate::collective::{Collective, DataType, ReduceOp};
use crate::engine::{Bytes, Counts};

/// Longest data that are fused, in bytes; beyond, two copies cost more than a call. Measured over shm and tcp with twenty tensors
/// of two ranks: at 32 KiB fused takes 0.57 and 0.75 of the time of one by one, at 64 KiB 1.2 and 1.07, at 256 KiB twice.
const FUSED_BYTES_MAX: usize = 32 << 10;
/// Longest data of a fused operation, in bytes: what follows is copied while peers still work on it.
const BUCKET_BYTES_MAX: usize = 4 << 20;
/// Most memory that a group keeps for fusing, in bytes.
const STAGING_BYTES_MAX: usize = 16 << 20;
/// Least memory that is registered for it, in bytes.
const STAGING_BYTES_MIN: usize = 256 << 10;
/// Where the data of a fused operation may begin, in bytes.
const ALIGN_BYTES: usize = 64;

/// Operations that are carried out together by [`Batch::run`]. Results are those of the same calls one by one in the order
/// in which they were added; where the group is not [reproducible](crate::Reproducible), a sum of floats may be rounded
/// another way, as it may at another length.
#[must_use = "a batch does nothing until it is run"]
pub struct Batch<'a> {
    group: Group,
    entries: Vec<Entry<'a>>,
}

struct Entry<'a> {
    /// With the tag and the algorithm of the call.
    group: Group,
    work: Work<'a>,
}

/// A blocking call on what it has borrowed.
pub(super) type Call<'a> = Box<dyn FnOnce(&Group) -> Result<(), CollectiveError> + 'a>;

enum Work<'a> {
    /// To be fused with its like.
    Short(Kind, DataType, &'a mut [u8]),
    /// By itself. The borrow is of what the operation's bytes are in.
    Long(Operation, PhantomData<&'a mut [u8]>),
    /// A call of its own: made of several operations.
    Call(Call<'a>),
}

/// What can be fused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    AllReduce(ReduceOp),
    Reduce(ReduceOp, Rank),
    Broadcast(Rank),
}

/// A fused operation.
pub(super) struct Bucket<'a> {
    group: Group,
    kind: Kind,
    data_type: DataType,
    parts: Vec<&'a mut [u8]>,
    /// Their places among the operations that were added.
    places: Vec<usize>,
    bytes: usize,
}

pub(super) enum Job<'a> {
    Fused(Bucket<'a>),
    Long(Group, Operation),
    Call(Group, Call<'a>),
}

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
            return Ok(self.add(Work::Call(Box::new(move |group: &Group| group.all_reduce(data, op)))));
        }
        if is_short(data) {
            return Ok(self.add(Work::Short(Kind::AllReduce(op), data_type, bytes_of(data))));
        }
        let operation = self.group.all_reduce_operation(data, op);
        Ok(self.add(Work::Long(operation, PhantomData)))
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
            return Ok(self.add(Work::Call(Box::new(move |group: &Group| group.reduce(data, op, root)))));
        }
        if is_short(data) {
            return Ok(self.add(Work::Short(Kind::Reduce(op, root), data_type, bytes_of(data))));
        }
        let operation = self.group.reduce_operation(data, op, root)?;
        Ok(self.add(Work::Long(operation, PhantomData)))
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
        Ok(self.add(Work::Long(operation, PhantomData)))
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
        Ok(self.add(Work::Long(operation, PhantomData)))
    }

    /// Adds [`Group::send`]. Of a send and a receive in one batch neither waits for the other's end.
    ///
    /// # Errors
    ///
    /// There is no such peer; nothing was added.
    pub fn send<D: Data + ?Sized>(&mut self, data: &'a D, to: Rank) -> Result<&mut Self, CollectiveError> {
        let operation = self.group.send_operation(data, to)?;
        Ok(self.add(Work::Long(operation, PhantomData)))
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
        Ok(self.add(Work::Long(operation, PhantomData)))
    }

    /// Adds another batch of the same group behind what was added so far. Each call keeps the tag and the algorithm of the
    /// handle that its batch was made by.
    ///
    /// # Errors
    ///
    /// [`CollectiveError::MixedGroups`]; nothing was added then.
    pub fn append(&mut self, other: Batch<'a>) -> Result<&mut Self, CollectiveError> {
        let (first, second) = (self.group.name(), other.group.name());
        if first != second {
            return Err(CollectiveError::MixedGroups { first, second });
        }
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

    /// Carries out all operations and returns when this rank's part of each is done. All ranks run batches of the same
    /// operations in the same order; each may take as long as the handle's deadline. Of no operations it is nothing.
    ///
    /// # Errors
    ///
    /// See [`CollectiveError`]: the first operation's that failed. The contents of what was added are unspecified then.
    pub fn run(self) -> Result<(), CollectiveError> {
        if self.entries.is_empty() {
            return Ok(());
        }
        self.group.expect_open()?;
        let jobs = fused(self.entries);
        let staged: usize = jobs.iter().map(|job| if let Job::Fused(it) = job { it.room() } else { 0 }).sum();
        let mut flight = Flight::new(self.group.clone(), staged.min(STAGING_BYTES_MAX));
        for job in jobs {
            match job {
                Job::Fused(bucket) => flight.start_bucket(bucket)?,
                Job::Long(group, operation) => flight.start(&group, operation)?,
                Job::Call(group, call) => {
                    flight.finish()?;
                    call(&group)?;
                }
            }
        }
        flight.finish()
    }

    fn add(&mut self, work: Work<'a>) -> &mut Self {
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

/// What is to be carried out, in the order of its first operations.
fn fused(entries: Vec<Entry<'_>>) -> VecDeque<Job<'_>> {
    let mut jobs: VecDeque<Job<'_>> = VecDeque::new();
    for (place, Entry { group, work }) in entries.into_iter().enumerate() {
        match work {
            Work::Short(kind, data_type, part) => {
                let open = jobs.iter_mut().rev().find_map(|job| match job {
                    Job::Fused(bucket) if bucket.takes(&group, kind, data_type) => Some(bucket),
                    _ => None,
                });
                match open {
                    Some(bucket) if bucket.bytes + part.len() <= BUCKET_BYTES_MAX => bucket.push(part, place),
                    _ => {
                        let (parts, places) = (Vec::new(), Vec::new());
                        let mut bucket = Bucket { group, kind, data_type, parts, places, bytes: 0 };
                        bucket.push(part, place);
                        jobs.push_back(Job::Fused(bucket));
                    }
                }
            }
            Work::Long(operation, _) => jobs.push_back(Job::Long(group, operation)),
            Work::Call(call) => jobs.push_back(Job::Call(group, call)),
        }
    }
    jobs
}

impl<'a> Bucket<'a> {
    fn takes(&self, group: &Group, kind: Kind, data_type: DataType) -> bool {
        let is_like = self.kind == kind && self.data_type == data_type;
        is_like && self.group.tag == group.tag && self.group.way == group.way
    }

    fn push(&mut self, part: &'a mut [u8], place: usize) {
        self.bytes += part.len();
        self.parts.push(part);
        self.places.push(place);
    }

    /// Which of the operations that were added it is made of.
    pub(super) fn places(&self) -> &[usize] {
        &self.places
    }

    /// Bytes of its data.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Bytes of staging memory that it needs.
    pub(super) fn room(&self) -> usize {
        self.bytes.next_multiple_of(ALIGN_BYTES)
    }

    /// Its handle, whose calls match only those of buckets with parts of the same lengths.
    pub(super) fn group(&self) -> Group {
        let words = std::iter::once(BATCH_MARK).chain(self.parts.iter().map(|part| part.len() as u32));
        self.group.tagged_further(words.fold(0x811c_9dc5, mixed))
    }

    /// Copies its parts side by side, where this rank's matter, and gives the operation on all of them.
    pub(super) fn pack(&self, staging: &mut Buffer<u8>) -> Operation {
        let rank = self.group.rank();
        if !matches!(self.kind, Kind::Broadcast(root) if root != rank) {
            let mut at = 0;
            for part in &self.parts {
                staging[at..at + part.len()].copy_from_slice(part);
                at += part.len();
            }
        }
        let bytes = destination(staging, self.group.shared.number);
        let at = |is_there: bool| if is_there { bytes.clone() } else { Bytes::None };
        let (collective, op, input, output) = match self.kind {
            Kind::AllReduce(op) => (Collective::AllReduce, op, at(true), at(true)),
            Kind::Reduce(op, root) => (Collective::Reduce { root }, op, at(true), at(rank == root)),
            Kind::Broadcast(root) => {
                (Collective::Broadcast { root }, ReduceOp::Sum, at(rank == root), at(true))
            }
        };
        let counts = Counts::Each(self.bytes / self.data_type.bytes());
        Operation::on_host(collective, self.data_type, op, counts, input, output)
    }

    /// Copies the results back, where this rank has some.
    pub(super) fn unpack(&mut self, staging: &Buffer<u8>) {
        let rank = self.group.rank();
        let has_results = match self.kind {
            Kind::AllReduce(_) => true,
            Kind::Reduce(_, root) => root == rank,
            Kind::Broadcast(root) => root != rank,
        };
        if has_results {
            let mut at = 0;
            for part in &mut self.parts {
                part.copy_from_slice(&staging[at..at + part.len()]);
                at += part.len();
            }
        }
    }
}

/// Sets fused operations apart from others.
const BATCH_MARK: u32 = 0x4241_5443;

/// FNV-1a over words and a rotation, so that an order of lengths has a digest of its own.
fn mixed(digest: u32, word: u32) -> u32 {
    (digest ^ word).wrapping_mul(0x0100_0193).rotate_left(5)
}

/// Registered memory for fused operations, the group's own; made or made larger when it is asked for.
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

/// Takes registered memory back for later batches, if it is not too much and more than what is kept.
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

fn expect_meaning(op: ReduceOp, data_type: DataType) -> Result<(), CollectiveError> {
    if op.fits(data_type) { Ok(()) } else { Err(CollectiveError::Meaningless { op, data_type }) }
}

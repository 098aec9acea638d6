//! What of a batch is fused into one operation, and how that operation is told apart from others;
//! wherever the data lie.
//!
//! **Invariants:** what is fused with what depends only on the sequence of calls and their lengths,
//! which is the same on all ranks; and a fused operation carries a digest of those lengths as its
//! mark, so that ranks that disagree about where one tensor ends are told, as they would be one by
//! one.

use std::collections::VecDeque;

use pleach_transport::Space;
use pleach_vocabulary::{Collective, DataType, Rank, ReduceOp};

use super::Group;
use super::error::CollectiveError;
use super::operation::Operation;
use crate::call::Counts;
use crate::engine::Bytes;

/// Longest data that are fused, in bytes; beyond, two copies cost more than a call. Measured over
/// shm and tcp with twenty tensors of two ranks: at 32 KiB fused takes 0.57 and 0.75 of the time of
/// one by one, at 64 KiB 1.2 and 1.07, at 256 KiB twice. Not measured on a GPU, where copies are
/// quicker and calls are slower.
pub(super) const FUSED_BYTES_MAX: usize = 32 << 10;
/// Longest data of a fused operation, in bytes: what follows is copied while peers still work on
/// it.
const BUCKET_BYTES_MAX: usize = 4 << 20;
/// Where the data of a fused operation may begin, in bytes.
const ALIGN_BYTES: usize = 64;
/// Most operations of a batch under way at a time: others of the group find room beside them.
pub(super) const RUNS_AT_ONCE: usize = 64;
/// Most memory that a group keeps for fusing, in bytes.
pub(super) const STAGING_BYTES_MAX: usize = 16 << 20;
/// Least memory that is registered for it, in bytes.
pub(super) const STAGING_BYTES_MIN: usize = 256 << 10;

/// What can be fused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    AllReduce(ReduceOp),
    Reduce(ReduceOp, Rank),
    Broadcast(Rank),
}

/// The data of an operation that may be fused.
pub(super) trait Part {
    /// How long they are.
    fn bytes(&self) -> usize;
}

impl Part for &mut [u8] {
    fn bytes(&self) -> usize {
        self.len()
    }
}

/// An operation of a batch.
pub(super) struct Entry<P, A> {
    /// With the tag and the algorithm of the call.
    pub(super) group: Group,
    pub(super) work: Work<P, A>,
}

pub(super) enum Work<P, A> {
    /// To be fused with its like.
    Short(Kind, DataType, P),
    /// By itself.
    Alone(A),
}

/// What is carried out.
pub(super) enum Job<P, A> {
    Fused(Bucket<P>),
    Alone(Group, A),
}

/// A fused operation.
pub(super) struct Bucket<P> {
    group: Group,
    kind: Kind,
    data_type: DataType,
    parts: Vec<P>,
    /// Their places among the operations that were added.
    places: Vec<usize>,
    bytes: usize,
}

/// What is to be carried out, in the order of its first operations.
pub(super) fn fused<P: Part, A>(entries: Vec<Entry<P, A>>) -> VecDeque<Job<P, A>> {
    let mut jobs: VecDeque<Job<P, A>> = VecDeque::new();
    for (place, Entry { group, work }) in entries.into_iter().enumerate() {
        match work {
            Work::Short(kind, data_type, part) => {
                let open = jobs.iter_mut().rev().find_map(|job| match job {
                    Job::Fused(bucket) if bucket.takes(&group, kind, data_type) => Some(bucket),
                    _ => None,
                });
                match open {
                    Some(bucket) if bucket.bytes + part.bytes() <= BUCKET_BYTES_MAX => {
                        bucket.push(part, place);
                    }
                    _ => {
                        let (parts, places) = (Vec::new(), Vec::new());
                        let mut bucket = Bucket { group, kind, data_type, parts, places, bytes: 0 };
                        bucket.push(part, place);
                        jobs.push_back(Job::Fused(bucket));
                    }
                }
            }
            Work::Alone(alone) => jobs.push_back(Job::Alone(group, alone)),
        }
    }
    jobs
}

/// Bytes of staging memory that all fused operations need together.
pub(super) fn room<'a, P: 'a + Part, A: 'a>(jobs: impl IntoIterator<Item = &'a Job<P, A>>) -> usize {
    jobs.into_iter().map(|job| if let Job::Fused(bucket) = job { bucket.room() } else { 0 }).sum()
}

impl<P: Part> Bucket<P> {
    fn takes(&self, group: &Group, kind: Kind, data_type: DataType) -> bool {
        let is_like = self.kind == kind && self.data_type == data_type;
        is_like && self.group.tag == group.tag && self.group.way == group.way
    }

    fn push(&mut self, part: P, place: usize) {
        self.bytes += part.bytes();
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
        let words = std::iter::once(BATCH_MARK).chain(self.parts.iter().map(|part| part.bytes() as u32));
        self.group.tagged_further(words.fold(0x811c_9dc5, mixed))
    }

    /// What is copied side by side first: its parts, where this rank's matter.
    pub(super) fn given(&self) -> &[P] {
        let is_given = !matches!(self.kind, Kind::Broadcast(root) if root != self.group.rank());
        if is_given { &self.parts } else { &[] }
    }

    /// Where results are copied to in the end: its parts, where this rank has results.
    pub(super) fn gotten(&mut self) -> &mut [P] {
        let rank = self.group.rank();
        let is_gotten = match self.kind {
            Kind::AllReduce(_) => true,
            Kind::Reduce(_, root) => root == rank,
            Kind::Broadcast(root) => root != rank,
        };
        if is_gotten { &mut self.parts } else { &mut [] }
    }

    /// The operation on all parts, which lie side by side there.
    pub(super) fn operation(&self, bytes: &Bytes, space: Space) -> Operation {
        let rank = self.group.rank();
        let at = |is_there: bool| if is_there { bytes.clone() } else { Bytes::None };
        let (collective, op, input, output) = match self.kind {
            Kind::AllReduce(op) => (Collective::AllReduce, op, at(true), at(true)),
            Kind::Reduce(op, root) => (Collective::Reduce { root }, op, at(true), at(rank == root)),
            Kind::Broadcast(root) => {
                (Collective::Broadcast { root }, ReduceOp::Sum, at(rank == root), at(true))
            }
        };
        let (data_type, gate) = (self.data_type, None);
        let counts = Counts::Each(self.bytes / data_type.bytes());
        Operation { collective, data_type, op, counts, input, output, space, gate }
    }
}

/// Sets fused operations apart from others.
const BATCH_MARK: u32 = 0x4241_5443;

/// FNV-1a over words and a rotation, so that an order of lengths has a digest of its own.
fn mixed(digest: u32, word: u32) -> u32 {
    (digest ^ word).wrapping_mul(0x0100_0193).rotate_left(5)
}

/// Refuses an operation that has no meaning for the elements.
pub(super) fn expect_meaning(op: ReduceOp, data_type: DataType) -> Result<(), CollectiveError> {
    if op.fits(data_type) { Ok(()) } else { Err(CollectiveError::Meaningless { op, data_type }) }
}

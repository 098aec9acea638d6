//! What of a batch is fused into one operation, and how that operation is told apart from others;
//! wherever the data lie.
//!
//! **Invariants:** what is fused with what depends only on the sequence of calls and their lengths,
//! which is the same on all ranks; and a fused operation carries a digest of those lengths as its
//! mark, so that ranks that disagree about where one tensor ends are told, as they would be one by
//! one.

use pleach_transport::cuda::ForeignMemory;

use super::Group;
use super::bound::BoundCall;
use super::premultiplied::Scaling;
use crate::call::Counts;
use crate::engine::{Address, Bytes};
use pleach_vocabulary::digest::chain;
use pleach_vocabulary::{Collective, DataType, Parts, ReduceOp};

/// Longest data that are fused, in bytes; beyond, two copies cost more than a call. Measured over
/// shm and tcp with twenty tensors of two ranks: at 32 KiB fused takes 0.57 and 0.75 of the time of
/// one by one, at 64 KiB 1.2 and 1.07, at 256 KiB twice. Not measured on a GPU, where copies are
/// quicker and calls are slower.
const FUSED_BYTES_MAX: usize = 32 << 10;
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

/// A call of a batch, with the tag and the algorithm of its handle.
pub(super) struct Entry {
    pub(super) group: Group,
    pub(super) call: BoundCall,
}

/// What is carried out.
pub(super) enum BatchItem {
    Fused(Bucket),
    Single(Entry),
}

/// Calls that are carried out as one.
pub(super) struct Bucket {
    group: Group,
    collective: Collective,
    op: ReduceOp,
    data_type: DataType,
    calls: Vec<BoundCall>,
    bytes: usize,
}

/// What is to be carried out, in the order of its first operations.
pub(super) fn fused(entries: Vec<Entry>) -> Vec<BatchItem> {
    let mut jobs: Vec<BatchItem> = Vec::new();
    for Entry { group, call } in entries {
        if !is_short(&call) {
            jobs.push(BatchItem::Single(Entry { group, call }));
            continue;
        }
        let open = jobs.iter_mut().rev().find_map(|job| match job {
            BatchItem::Fused(bucket) if bucket.takes(&group, &call) => Some(bucket),
            _ => None,
        });
        match open {
            Some(bucket) if bucket.bytes + bytes_of(&call) <= BUCKET_BYTES_MAX => bucket.push(call),
            _ => {
                let BoundCall { collective, op, data_type, .. } = call;
                let mut bucket = Bucket { group, collective, op, data_type, calls: Vec::new(), bytes: 0 };
                bucket.push(call);
                jobs.push(BatchItem::Fused(bucket));
            }
        }
    }
    jobs
}

/// How long the only part of a call's data is, the same on every rank.
fn bytes_of(call: &BoundCall) -> usize {
    call.input.len().max(call.output.len())
}

fn is_short(call: &BoundCall) -> bool {
    use Collective::{AllReduce, Broadcast, Reduce};
    let can_be = matches!(call.collective, AllReduce | Reduce { .. } | Broadcast { .. });
    can_be && !call.is_exact && bytes_of(call) <= FUSED_BYTES_MAX
}

/// Bytes of staging memory that all fused operations need together.
pub(super) fn room(jobs: &[BatchItem]) -> usize {
    jobs.iter().map(|job| if let BatchItem::Fused(bucket) = job { bucket.room() } else { 0 }).sum()
}

impl Bucket {
    fn takes(&self, group: &Group, call: &BoundCall) -> bool {
        let is_like = self.collective == call.collective && self.op == call.op;
        let is_alike = is_like && self.data_type == call.data_type;
        is_alike && self.group.tag == group.tag && self.group.variant == group.variant
    }

    fn push(&mut self, call: BoundCall) {
        self.bytes += bytes_of(&call);
        self.calls.push(call);
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
        let lengths = self.calls.iter().map(|call| bytes_of(call) as u64);
        self.group.tagged_further(lengths.fold(BATCH_MARK, chain) as u32)
    }

    /// What is copied side by side first, to this place: the inputs, where this rank has some.
    pub(super) fn inputs(&self, side_by_side: Address) -> Vec<Copy> {
        let copy = |call: &BoundCall, at| {
            let (from, bytes, foreign) = (call.input.base(), call.input.len(), call.foreign.clone());
            let scaling = call.factor.map(|factor| Scaling { data_type: call.data_type, factor });
            Copy { from, into: at, bytes, foreign, scaling }
        };
        self.copies(side_by_side, copy)
    }

    /// What is copied in the end, from this place: the results, where this rank has some. That of
    /// the root of a broadcast is there already.
    pub(super) fn results(&self, side_by_side: Address) -> Vec<Copy> {
        let is_there = |call: &BoundCall| {
            let is_moved = matches!(self.collective, Collective::Broadcast { .. });
            is_moved && call.input.base() == call.output.base()
        };
        let copy = |call: &BoundCall, at| {
            let bytes = if is_there(call) { 0 } else { call.output.len() };
            let (into, foreign) = (call.output.base(), call.foreign.clone());
            Copy { from: at, into, bytes, foreign, scaling: None }
        };
        self.copies(side_by_side, copy)
    }

    fn copies(&self, side_by_side: Address, copy: impl Fn(&BoundCall, Address) -> Copy) -> Vec<Copy> {
        let mut at = side_by_side;
        let mut copies = Vec::with_capacity(self.calls.len());
        for call in &self.calls {
            copies.push(copy(call, at));
            at = at.add(bytes_of(call));
        }
        copies.retain(|copy| copy.bytes > 0);
        copies
    }

    /// The call on all parts, which lie side by side there.
    pub(super) fn call(&self, bytes: &Bytes) -> BoundCall {
        let (rank, ranks) = (self.group.rank(), self.group.world_size());
        let at = |parts: Parts| if parts.is_empty() { Bytes::None } else { bytes.clone() };
        let input = at(self.collective.input_parts(rank, ranks));
        let output = at(self.collective.output_parts(rank, ranks));
        let counts = Counts::Each(self.bytes / self.data_type.bytes());
        BoundCall::new(self.collective, self.data_type, self.op, counts, input, output)
    }
}

/// A copy between a call's memory and the memory where it is fused.
pub(super) struct Copy {
    pub(super) from: Address,
    pub(super) into: Address,
    pub(super) bytes: usize,
    /// Memory of the call that is somebody else's.
    pub(super) foreign: Option<Box<[ForeignMemory]>>,
    /// How the elements are multiplied meanwhile.
    pub(super) scaling: Option<Scaling>,
}

/// Sets fused operations apart from others.
const BATCH_MARK: u64 = 0x4241_5443;

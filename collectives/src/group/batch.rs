//! Batches: many operations in one pass, as the buckets of data-parallel training are.
//!
//! Short operations of one kind, element type, tag and algorithm are *fused*: their data are copied
//! side by side into registered memory that the group keeps ([`Staging`]), one operation works on
//! it ([`Bucket`]), and the results are copied back. A hundred tensors of a kilobyte then cost
//! about as much as one of a hundred. The others are started one after the other before any is
//! waited for ([`BatchRun`]). A batch that is started is fused as one that is run, so a rank may
//! start what its peers run and wait for.
//!
//! **Invariants:**
//!
//! * Only the sequence of calls and their lengths decide which calls are fused together, and these
//!   are the same on all ranks. A fused operation carries a digest of those lengths as its mark. So
//!   ranks that disagree about where one tensor ends get an error, as they would get for single
//!   calls.
//! * A GPU's copies go into a stream of the group's own, and only when nothing keeps them waiting
//!   there. Copies of inputs go in when the work before the batch is done (the fused call's gate
//!   puts them in). Copies of results go in when the call is over. So the copies end soon whatever
//!   else happens, no stream waits for a call, and the memory of both sides is released only after
//!   them.
//! * When a run of a batch is gone, all its calls have ended, or the owner of their memory waits
//!   for them. So nobody else uses memory that a call still works on.
#![allow(unsafe_code)]

use std::marker::PhantomData;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use pleach_transport::Slice;
use pleach_transport::cuda::{CudaError, CudaEvent, ForeignMemory, Stream};
use pleach_transport::mutex::lock;

use super::bound::BoundCall;
use super::data::{Data, OwnedData, destination, part};
use super::error::{CollectiveError, NotExact};
use super::gpu::GpuBuffer;
use super::pending::{Completion, Pending, PendingError, Started};
use super::premultiplied::{Given, Products};
use super::stream_order::StreamWork;
use super::temporary_registration::TemporaryRegistration;
use super::unwinding::without_unwinding;
use super::{Group, Operation, Shared};
use crate::call::Counts;
use crate::compute::ComputeError;
use crate::engine::{Address, Bytes, Gate, RunId};
use pleach_vocabulary::digest::chain;
use pleach_vocabulary::{Collective, DataType, Parts, ReduceOp};

/// Longest data that are fused, in bytes. Above this length two copies cost more than a call.
/// Measured over shm and tcp with twenty tensors of two ranks, as time of the fused operation
/// divided by the time of single calls: at 32 KiB 0.57 and 0.75, at 64 KiB 1.2 and 1.07, at 256 KiB
/// 2. Not measured on a GPU, where copies are quicker and calls are slower.
const FUSED_BYTES_MAX: usize = 32 << 10;
/// Longest data of a fused operation, in bytes: what follows is copied while peers still work on
/// it.
const BUCKET_BYTES_MAX: usize = 4 << 20;
/// Where the data of a fused operation may begin, in bytes.
const ALIGN_BYTES: usize = 64;
/// Most operations of a batch under way at a time. The limit leaves room for other operations of
/// the group.
const RUNS_AT_ONCE: usize = 64;
/// Most memory that a group keeps for fusing, in bytes.
const STAGING_BYTES_MAX: usize = 16 << 20;
/// Least memory that is registered for it, in bytes.
const STAGING_BYTES_MIN: usize = 256 << 10;
/// Sets fused operations apart from others.
const BATCH_MARK: u64 = 0x4241_5443;
/// How long copies inside of a GPU may take before that is an error.
const COPY_LIMIT: Duration = Duration::from_secs(60);

/// Operations that are carried out together, by [`Batch::run`] or [`Batch::start`]. The results are
/// those of the same calls, made singly in the order in which they were added. Where the group is
/// not [reproducible](crate::Reproducible), a sum of floats may be rounded in another way, as it
/// may be at another length.
#[must_use = "a batch does nothing until it is run or started"]
pub struct Batch<'a> {
    group: Group,
    entries: Vec<Entry>,
    /// What the operations work on.
    _data: PhantomData<&'a mut [u8]>,
}

/// What an operation of a batch may work on: memory that it borrows, alone or in a pair, or none. A
/// batch that is started owns the memory as a whole: see [`Batch::start`].
pub trait BorrowedData<'a> {
    /// Whether the operation alone holds the memory's registration, which a batch then holds.
    #[doc(hidden)]
    const IS_HELD_BY_OPERATION: bool = false;
}

impl BorrowedData<'_> for () {}
impl<'a, D: Data + ?Sized> BorrowedData<'a> for &'a D {}
impl<'a, D: Data + ?Sized> BorrowedData<'a> for &'a mut D {}
impl<'a, I: BorrowedData<'a>, O: BorrowedData<'a>> BorrowedData<'a> for (I, O) {}

impl Group {
    /// An empty batch of operations of this group.
    pub fn batch<'a>(&self) -> Batch<'a> {
        Batch { group: self.clone(), entries: Vec::new(), _data: PhantomData }
    }
}

impl<'a> Batch<'a> {
    /// Adds an operation. If a batch holds a send and a receive, neither waits for the other's end.
    ///
    /// # Errors
    ///
    /// See [`CollectiveError`]; nothing was added then.
    pub fn add<D: BorrowedData<'a>>(
        &mut self,
        mut operation: Operation<D>,
    ) -> Result<&mut Self, CollectiveError> {
        let mut call = operation.bind(&self.group)?;
        if D::IS_HELD_BY_OPERATION {
            hold(&mut call);
        }
        let (op, data_type) = (call.op, call.data_type);
        if !op.fits(data_type) {
            return Err(CollectiveError::Meaningless { op, data_type });
        }
        self.group.expect_stream(call.input.len() + call.output.len())?;
        self.entries.push(Entry { group: self.group.clone(), call });
        Ok(self)
    }

    /// Adds the operations of another batch of the same group behind those of this batch. The
    /// joined batch begins after the earlier work of the streams of both batches. Each call keeps
    /// the tag and the algorithm of the handle that made its batch.
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

    /// Carries out all operations and returns when this rank's part of each is done. All ranks run
    /// batches of the same operations in the same order; each may take as long as the handle's
    /// deadline. An empty batch does nothing.
    ///
    /// # Errors
    ///
    /// See [`CollectiveError`]: the error of the first operation that failed. The contents of all
    /// buffers of the batch are unspecified then.
    pub fn run(self) -> Result<(), CollectiveError> {
        if self.entries.is_empty() {
            return Ok(());
        }
        launch_all(self.group, self.entries, true)?.finish()
    }
}

impl Batch<'static> {
    /// Adds operations on memory that the batch owns from now on, and starts them all. `fill` gets
    /// the batch and the memory. A started batch owns all of its memory: with a borrow that is
    /// forgotten (`mem::forget`), peers would write into memory that has another use by then. At
    /// most 64 operations that are not fused are under way at a time. If there are more, this call
    /// waits for the first ones.
    ///
    /// ```
    /// use pleach_collectives::{Group, Operation, Options, ReduceOp};
    /// # use pleach_transport::rendezvous::World;
    /// # let group = Group::join(&Options::new(World::alone())).unwrap();
    /// let gradients = vec![vec![1.0f32; 10], vec![2.0; 1000]];
    /// let pending = group.batch().start(gradients, |batch, gradients| {
    ///     gradients.iter_mut().try_for_each(|gradient| {
    ///         batch.add(Operation::all_reduce(gradient, ReduceOp::Avg)).map(|_| ())
    ///     })
    /// })?;
    /// let gradients = pending.wait()?;
    /// # assert_eq!(gradients[1].len(), 1000);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    ///
    /// See [`CollectiveError`], and the errors of `fill`; the memory comes back with the error.
    pub fn start<D, F>(self, mut data: D, fill: F) -> Started<D>
    where
        D: OwnedData,
        F: for<'d> FnOnce(&mut Batch<'d>, &'d mut D) -> Result<(), CollectiveError>,
    {
        let group = self.group.clone();
        let filled = {
            let mut batch: Batch<'_> = self;
            fill(&mut batch, &mut data).map(|()| batch.entries)
        };
        let batch_run = filled.and_then(|entries| {
            group.expect_open()?;
            group.shared.begin_progress()?;
            launch_all(group.clone(), entries, false)
        });
        match batch_run {
            Ok(batch_run) => {
                group.shared.wake_progress();
                let (runs, completion) = batch_run.leave();
                Ok(Pending::of_all(group.shared.driver.clone(), runs, data, Some(completion)))
            }
            // What was started before has ended with its run.
            Err(error) => Err(PendingError { error, data }),
        }
    }
}

/// Has a call hold the registrations of its memory, which until then its operation holds.
fn hold(call: &mut BoundCall) {
    for bytes in [&mut call.input, &mut call.output] {
        if let Bytes::Lent(slice) = bytes {
            *bytes = Bytes::Registered(slice.hold());
        }
    }
}

/// Starts all calls of a batch. With `is_run` the caller waits here: then fused calls may take
/// turns in less staging memory, and a call may consist of several operations.
fn launch_all(group: Group, entries: Vec<Entry>, is_run: bool) -> Result<BatchRun, CollectiveError> {
    group.expect_open()?;
    let before = StreamWork::new(distinct_streams(&entries))?;
    let jobs = fused(entries);
    let staging_bytes_max = if is_run { STAGING_BYTES_MAX } else { usize::MAX };
    let mut batch_run = BatchRun::new(group, before, is_run, room(&jobs).min(staging_bytes_max));
    jobs.into_iter().try_for_each(|job| match job {
        BatchItem::Fused(bucket) => batch_run.start_bucket(&bucket),
        BatchItem::Single(Entry { group, mut call }) if call.is_exact => {
            if !is_run {
                let (op, data_type) = (call.op, call.data_type);
                return Err(CollectiveError::NotExact { op, data_type, reason: NotExact::Started });
            }
            batch_run.finish()?;
            group.blocking(&mut call, None)
        }
        BatchItem::Single(entry) => batch_run.start(entry),
    })?;
    Ok(batch_run)
}

/// The streams that calls come after, each once.
fn distinct_streams(entries: &[Entry]) -> Vec<&Stream> {
    let mut streams: Vec<&Stream> = Vec::new();
    for stream in entries.iter().filter_map(|entry| entry.group.stream.as_ref()) {
        if !streams.contains(&stream) {
            streams.push(stream);
        }
    }
    streams
}

/// A call of a batch, with the tag and the algorithm of its handle.
struct Entry {
    group: Group,
    call: BoundCall,
}

/// What is carried out.
enum BatchItem {
    Fused(Bucket),
    Single(Entry),
}

/// Calls that are carried out as one.
struct Bucket {
    group: Group,
    collective: Collective,
    op: ReduceOp,
    data_type: DataType,
    calls: Vec<BoundCall>,
    bytes: usize,
}

/// What is to be carried out, in the order of its first operations.
fn fused(entries: Vec<Entry>) -> Vec<BatchItem> {
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
fn room(jobs: &[BatchItem]) -> usize {
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

    /// Bytes of staging memory that it needs.
    fn room(&self) -> usize {
        self.bytes.next_multiple_of(ALIGN_BYTES)
    }

    /// Its handle, whose calls match only those of buckets with parts of the same lengths.
    fn group(&self) -> Group {
        let lengths = self.calls.iter().map(|call| bytes_of(call) as u64);
        self.group.tagged_further(lengths.fold(BATCH_MARK, chain) as u32)
    }

    /// What is copied side by side first, to this place: the inputs, where this rank has some.
    fn inputs(&self, side_by_side: Address) -> Vec<Copy> {
        let copy = |call: &BoundCall, at| {
            let (from, bytes, foreign) = (call.input.base(), call.input.len(), call.foreign.clone());
            let given = call.given.map(|given| (given, call.data_type));
            let registered = registered(&call.input);
            Copy { from, into: at, bytes, foreign, registered, given }
        };
        self.copies(side_by_side, copy)
    }

    /// What is copied in the end, from this place: the results, where this rank has some. That of
    /// the root of a broadcast is there already.
    fn results(&self, side_by_side: Address) -> Vec<Copy> {
        let is_there = |call: &BoundCall| {
            let is_moved = matches!(self.collective, Collective::Broadcast { .. });
            is_moved && call.input.base() == call.output.base()
        };
        let copy = |call: &BoundCall, at| {
            let bytes = if is_there(call) { 0 } else { call.output.len() };
            let (into, foreign) = (call.output.base(), call.foreign.clone());
            let registered = registered(&call.output);
            Copy { from: at, into, bytes, foreign, registered, given: None }
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
    fn call(&self, bytes: &Bytes) -> BoundCall {
        let (rank, ranks) = (self.group.rank(), self.group.world_size());
        let at = |parts: Parts| if parts.is_empty() { Bytes::None } else { bytes.clone() };
        let input = at(self.collective.input_parts(rank, ranks));
        let output = at(self.collective.output_parts(rank, ranks));
        let counts = Counts::Each(self.bytes / self.data_type.bytes());
        BoundCall::new(self.collective, self.data_type, self.op, counts, input, output)
    }
}

/// A copy between a call's memory and the memory where it is fused.
struct Copy {
    from: Address,
    into: Address,
    bytes: usize,
    /// Memory of the call that is somebody else's.
    foreign: Option<Box<[ForeignMemory]>>,
    #[expect(dead_code, reason = "registered memory of the call, held until the end of the copy")]
    registered: Option<Slice>,
    /// What is stored in place of the elements.
    given: Option<(Given, DataType)>,
}

fn registered(bytes: &Bytes) -> Option<Slice> {
    if let Bytes::Registered(slice) = bytes { Some(slice.clone()) } else { None }
}

/// Calls of a batch that are under way, on memory that the batch borrows or owns.
struct BatchRun {
    group: Group,
    before: StreamWork,
    /// Whether the memory is lent until the end: a caller that leaves the run cannot take it back.
    lends: bool,
    /// How much memory fused calls need, in bytes, and where it is free from.
    staging_bytes: usize,
    staging: Option<Staging>,
    used_bytes: usize,
    launched: Vec<Launched>,
}

struct Launched {
    run: RunId,
    registration: TemporaryRegistration,
    /// What is copied when it is over.
    results: Vec<Copy>,
    /// Memory of the call's own.
    products: Products,
}

impl BatchRun {
    /// A run for calls of `group`, which begin after the work in `before`.
    fn new(group: Group, before: StreamWork, lends: bool, staging_bytes: usize) -> Self {
        Self { group, before, lends, staging_bytes, staging: None, used_bytes: 0, launched: Vec::new() }
    }

    /// Starts a call by itself.
    fn start(&mut self, Entry { group, mut call }: Entry) -> Result<(), CollectiveError> {
        self.make_room(0)?;
        call.expect_alive()?;
        call.gate = self.before.gate(call.foreign.take())?;
        let products = call.premultiply();
        self.launch(&group, call, Vec::new(), products)
    }

    /// Starts a fused call.
    fn start_bucket(&mut self, bucket: &Bucket) -> Result<(), CollectiveError> {
        self.make_room(bucket.room())?;
        let staging = match &mut self.staging {
            Some(staging) => staging,
            empty => empty.insert(Staging::take(&self.group, self.staging_bytes)?),
        };
        let begin = self.used_bytes;
        self.used_bytes += bucket.room();
        let side_by_side = staging.base().add(begin);
        let mut call = bucket.call(&staging.bytes(&self.group, begin..begin + bucket.bytes)?);
        call.gate = staging.pack(&self.before, bucket.inputs(side_by_side)).map_err(in_compute)?;
        self.launch(&bucket.group(), call, bucket.results(side_by_side), Products::new())
    }

    /// Waits for started calls until one more call of `bytes` is within the limits.
    fn make_room(&mut self, bytes: usize) -> Result<(), CollectiveError> {
        if self.launched.len() == RUNS_AT_ONCE || self.used_bytes + bytes > self.staging_bytes {
            self.finish()?;
        }
        Ok(())
    }

    fn launch(
        &mut self,
        group: &Group,
        mut call: BoundCall,
        results: Vec<Copy>,
        products: Products,
    ) -> Result<(), CollectiveError> {
        let driver = &self.group.shared.driver;
        let mut core = driver.lock();
        let registration = if self.lends {
            group.lend(&mut core.engine, &mut call)?
        } else {
            TemporaryRegistration::default()
        };
        core.begin_time();
        let run = group.begin(&mut core, call, None);
        without_unwinding(|| core.end_time());
        match run {
            Ok(run) => {
                self.launched.push(Launched { run, registration, results, products });
                Ok(())
            }
            Err(error) => {
                driver.wait_fenced(core, &error, group.timeout);
                group.take_back(&registration);
                Err(error)
            }
        }
    }

    /// Waits for all that was started; the first error.
    fn finish(&mut self) -> Result<(), CollectiveError> {
        without_unwinding(|| self.finish_all())
    }

    fn finish_all(&mut self) -> Result<(), CollectiveError> {
        let mut result = Ok(());
        for Launched { run, registration, results, products: _products } in self.launched.drain(..) {
            let driver = &self.group.shared.driver;
            let outcome = driver.finish(driver.lock(), run, None).map_err(CollectiveError::Failed);
            self.group.take_back(&registration);
            let outcome = outcome.and_then(|()| match &self.staging {
                Some(staging) if !results.is_empty() => Ok(staging.unpack(&results)?),
                _ => Ok(()),
            });
            result = result.and(outcome);
        }
        self.used_bytes = 0;
        let settled = self.staging.as_ref().map_or(Ok(()), Staging::settle);
        result.and(settled.map_err(CollectiveError::from))
    }

    /// The started calls, for the owner of their memory to wait for, and the work that is left
    /// after them.
    fn leave<D>(mut self) -> (Vec<RunId>, Completion<D>) {
        assert!(!self.lends, "what was lent is taken back here");
        let shared = Arc::downgrade(&self.group.shared);
        let staging = self.staging.take();
        let launched = std::mem::take(&mut self.launched);
        let runs = launched.iter().map(|launched| launched.run).collect();
        let completion = move |_: &mut D| {
            // What is to be kept until here goes with this.
            let launched = launched;
            let Some(staging) = staging else { return Ok(()) };
            let outcome = launched.iter().try_for_each(|launched| staging.unpack(&launched.results));
            let outcome = outcome.and(staging.settle());
            if let Some(shared) = shared.upgrade() {
                staging.keep(&shared);
            }
            Ok(outcome?)
        };
        (runs, Box::new(completion))
    }
}

impl Drop for BatchRun {
    fn drop(&mut self) {
        // What came before has been told; what is under way still must end before the borrow does.
        let _ = self.finish();
        if let Some(staging) = self.staging.take() {
            staging.keep(&self.group.shared);
        }
    }
}

/// The error of a gate that was polled before anybody waits for it.
fn in_compute(error: ComputeError) -> CollectiveError {
    match error {
        ComputeError::Cuda(error) => CollectiveError::Gpu(error),
        other => unreachable!("copies are no reductions: {other}"),
    }
}

/// Memory where short calls of a batch are fused: registered, the group's own.
pub(super) enum Staging {
    Host(Slice),
    Gpu { memory: GpuBuffer<u8>, copies: Arc<Stream> },
}

impl Staging {
    /// Takes the staging memory that the group has kept; allocates memory if there is none, or too
    /// little.
    fn take(group: &Group, bytes: usize) -> Result<Self, CollectiveError> {
        let kept = lock(&group.shared.staging).take();
        if let Some(kept) = kept.filter(|kept| kept.len() >= bytes) {
            return Ok(kept);
        }
        let bytes = bytes.next_power_of_two().max(STAGING_BYTES_MIN);
        if group.shared.gpu.is_some() {
            let memory = group.gpu_buffer(bytes)?;
            let copies = Arc::new(Stream::new(memory.gpu())?);
            return Ok(Self::Gpu { memory, copies });
        }
        Ok(Self::Host(group.new_registered(bytes)?))
    }

    /// Keeps the memory for later batches of the group, if it is not too much and more than the
    /// kept one.
    fn keep(self, shared: &Shared) {
        let mut kept = lock(&shared.staging);
        let is_better = kept.as_ref().is_none_or(|kept| kept.len() < self.len());
        if is_better && self.len() <= STAGING_BYTES_MAX {
            *kept = Some(self);
        }
    }

    fn len(&self) -> usize {
        match self {
            Self::Host(memory) => memory.len(),
            Self::Gpu { memory, .. } => memory.len(),
        }
    }

    /// Where it begins.
    fn base(&self) -> Address {
        match self {
            Self::Host(memory) => Address(memory.as_ptr()),
            Self::Gpu { memory, .. } => Address(memory.as_ptr()),
        }
    }

    /// A part of it, for a call of this group.
    fn bytes(&mut self, group: &Group, range: Range<usize>) -> Result<Bytes, CollectiveError> {
        Ok(match self {
            Self::Host(memory) => Bytes::Registered(memory.slice(range).expect("there is room for it")),
            Self::Gpu { memory, .. } => part(&destination(memory, group.shared.number)?.bytes, range),
        })
    }

    /// Copies inputs side by side after the work in `before`. The returned gate opens when the
    /// copies are done; `None` if they are done already.
    fn pack(&self, before: &StreamWork, copies: Vec<Copy>) -> Result<Option<Gate>, ComputeError> {
        let stream = match self {
            Self::Host(_) => {
                copies.iter().for_each(copy_on_host);
                return Ok(None);
            }
            Self::Gpu { copies, .. } => copies.clone(),
        };
        let before = before.clone();
        let mut packed: Option<CudaEvent> = None;
        let mut gate = move || {
            let mark = match &mut packed {
                Some(mark) => mark,
                None if !before.is_done()? => return Ok(false),
                empty => empty.insert(put(&stream, &copies)?),
            };
            Ok(mark.is_reached()?)
        };
        Ok(if gate()? { None } else { Some(Box::new(gate)) })
    }

    /// Copies results to their places. The copies are done when this memory has
    /// [settled](Self::settle).
    fn unpack(&self, results: &[Copy]) -> Result<(), CudaError> {
        match self {
            Self::Host(_) => results.iter().for_each(copy_on_host),
            Self::Gpu { copies, .. } => drop(put(copies, results)?),
        }
        Ok(())
    }

    /// Waits until no copy is under way.
    fn settle(&self) -> Result<(), CudaError> {
        let Self::Gpu { copies, .. } = self else { return Ok(()) };
        let mark = copies.record_event()?;
        match mark.wait(COPY_LIMIT) {
            // Nothing keeps them waiting, so they end; only then may the memory go back.
            Err(late @ CudaError::Late { .. }) => mark.wait_or_abort().and(Err(late)),
            outcome => outcome,
        }
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        // A call that failed may have been let go of between its copies.
        if let Err(error) = self.settle() {
            tracing::error!(%error, "copies were under way when their memory was let go of");
        }
    }
}

fn copy_on_host(Copy { from, into, bytes, given, .. }: &Copy) {
    if let Some((given, data_type)) = given {
        return given.make(*data_type, *from, *into, *bytes);
    }
    // SAFETY: one is memory that the batch borrows or owns, of that length, the other a part of
    // the staging memory that this batch alone has; no call is under way on either.
    unsafe { std::ptr::copy_nonoverlapping(from.0.cast_const(), into.0, *bytes) }
}

/// Puts copies into the stream; the mark behind them. What was freed is not touched.
fn put(stream: &Stream, copies: &[Copy]) -> Result<CudaEvent, CudaError> {
    for Copy { from, into, bytes, foreign, .. } in copies {
        foreign.iter().flatten().try_for_each(ForeignMemory::expect_alive)?;
        // SAFETY: both lie on the GPU and are so long: one is a buffer that the batch borrows or
        // owns, the other a part of the staging memory that this batch alone has; who lets go of
        // either waits for the copies first (`settle`).
        unsafe { stream.copy(from.0, into.0, *bytes)? };
    }
    stream.record_event()
}

//! Batches: many operations in one pass, as the buckets of data-parallel training are.
//!
//! Short operations of one kind, element type, tag and algorithm are *fused*: their data are copied
//! side by side into registered memory that the group keeps, one operation works on it, and the
//! results are copied back. A hundred tensors of a kilobyte then cost about as much as one of a
//! hundred. The others are started one after the other before any is waited for.
//!
//! What is fused with what, and why ranks agree about it: [`super::fused`]. A batch that is started
//! is fused as one that is run, so a rank may start what its peers run and wait for.

use std::marker::PhantomData;

use pleach_transport::cuda::Stream;

use super::batch_run::BatchRun;
use super::data::{Data, OwnedData};
use super::error::{CollectiveError, NotExact};
use super::fused::{self, BatchItem, Entry, STAGING_BYTES_MAX, fused};
use super::pending::{Pending, PendingError, Started};
use super::stream_order::StreamWork;
use super::{Group, Operation};

/// Operations that are carried out together, by [`Batch::run`] or [`Batch::start`]. Results are
/// those of the same calls one by one in the order in which they were added; where the group is not
/// [reproducible](crate::Reproducible), a sum of floats may be rounded another way, as it may at
/// another length.
#[must_use = "a batch does nothing until it is run or started"]
pub struct Batch<'a> {
    group: Group,
    entries: Vec<Entry>,
    /// What the operations work on.
    _data: PhantomData<&'a mut [u8]>,
}

/// What an operation of a batch may work on: memory that it borrows, alone or in a pair, or none. A
/// batch that is started owns the memory as a whole: see [`Batch::start`].
pub trait BorrowedData<'a> {}

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
    /// Adds an operation. Of a send and a receive in one batch neither waits for the other's end.
    ///
    /// # Errors
    ///
    /// See [`CollectiveError`]; nothing was added then.
    pub fn add<D: BorrowedData<'a>>(
        &mut self,
        mut operation: Operation<D>,
    ) -> Result<&mut Self, CollectiveError> {
        let call = operation.bind(&self.group)?;
        let (op, data_type) = (call.op, call.data_type);
        if !op.fits(data_type) {
            return Err(CollectiveError::Meaningless { op, data_type });
        }
        self.group.expect_stream(call.input.len() + call.output.len())?;
        self.entries.push(Entry { group: self.group.clone(), call });
        Ok(self)
    }

    /// Adds another batch of the same group behind what was added so far; all of it comes after the
    /// earlier work of both batches' streams. Each call keeps the tag and the algorithm of the
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
        launch_all(self.group, self.entries, true)?.finish()
    }
}

impl Batch<'static> {
    /// Adds operations on memory that the batch owns from now on, and starts them all: `fill` is
    /// given the batch and the memory. A borrow that is forgotten would leave peers writing into
    /// memory that is used otherwise, so what is started owns all of it. Of more than 64 operations
    /// that are not fused the first ones are waited for here.
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
    /// See [`CollectiveError`], and what `fill` says; the memory comes back with it.
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

/// Starts all calls of a batch; what is run may take turns, and consist of several operations.
fn launch_all(group: Group, entries: Vec<Entry>, is_run: bool) -> Result<BatchRun, CollectiveError> {
    group.expect_open()?;
    let before = StreamWork::new(distinct_streams(&entries))?;
    let jobs = fused(entries);
    let staging_bytes_max = if is_run { STAGING_BYTES_MAX } else { usize::MAX };
    let mut batch_run = BatchRun::new(group, before, is_run, fused::room(&jobs).min(staging_bytes_max));
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

//! Groups: what users hold.
//!
//! A [`Group`] is a cheap handle (clone it, share it between threads) of this rank's place in a
//! group of ranks. All ranks call the same operations in the same order; send and receive match
//! pair by pair. A call is a value, an [`Operation`], and is carried out in one of four ways:
//!
//! * run: the call blocks until this rank's part is done, at most until its deadline
//!   ([`Group::within`]). The methods with the collectives' names do this.
//! * started: the call returns a [`Pending`] that owns the memory.
//! * prepared, as a [`Persistent`].
//! * added to a [`Batch`].
//!
//! The first failure ends the group: from then on every call returns its cause, on every rank. All
//! ranks that survive and reach each other return the same cause, because the ranks agree on it
//! before a call returns an error ([`crate::engine::Fault`]). When a call has returned, with any
//! result, no peer changes a byte of the caller's memory any more.
//!
//! Two things are **not** promised:
//!
//! * That a call ends alike on all ranks. The ranks agree on why the group has failed, not on the
//!   last call that succeeded. When a rank fails, one survivor may already have the result of the
//!   call and go on to the next call, while another survivor gets the error. [`Group::completed`]
//!   says how far a rank came.
//! * The result of a call in which another rank makes a different call. A rank that waits for the
//!   differing rank never returns. Another rank may return before it learns of the difference, and
//!   the differing rank may have put its bytes into the same scratch. The group then fails on every
//!   rank with an error that names both calls. So a result is certain when a later
//!   [`Group::barrier`] has succeeded.

mod batch;
mod bound;
mod calls;
mod contributors;
mod data;
mod driver;
mod epoch;
mod error;
mod exact;
mod gpu;
mod info;
mod join;
mod observed;
mod operation;
mod options;
mod partial;
mod parts;
mod pending;
mod persistent;
mod planner;
mod premultiplied;
mod probe;
mod progress;
mod raw;
mod registered;
mod run;
mod set_topology;
mod split;
mod stream_order;
mod summary;
mod temporary_registration;
mod unwinding;
mod window;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use pleach_transport::cuda::{Gpu, Stream};
use pleach_transport::rendezvous::{Fabric, KnownRanks, Store};
use pleach_transport::{Address, Device, Event, Memory, SetupCounts, Slice, Space, clock};

pub use batch::{Batch, BorrowedData};
pub use data::{Buffer, Data, DataMut, Element, OwnedData};
pub(crate) use epoch::{CarriedGroup, Place, Setting, session_buffer, session_number, session_settings};
pub use error::{CollectiveError, GroupError, GroupName, NotExact};
pub use gpu::GpuBuffer;
pub use info::GroupInfo;
pub use join::JoinGroupError;
pub(crate) use join::expect_memory;
pub use operation::Operation;
pub use options::Options;
pub use partial::{GpuMemory, HostMemory, Partial, PartialError, RawPartial, RawRound, Round};
pub(crate) use parts::Parts;
pub use pending::{Pending, PendingError, Started};
pub use persistent::Persistent;
pub use planner::{Planner, PlannerCache};
pub use pleach_transport::rendezvous::Connect;
pub use probe::ProbeError;
pub use progress::Progress;
pub use raw::{RawData, RawPair};
pub use registered::Registered;
pub use set_topology::{SetTopologyError, TopologyName};
pub use split::SplitError;
pub use window::{Arrival, PendingRead, Window, WindowError};

use pleach_schedule::cost::Platform;
use pleach_schedule::generate::{Access, Variant};
use pleach_schedule::hosts::HostMap;
use pleach_schedule::tuning::TuningTable;
use pleach_vocabulary::{Collective, DataType, Rank, ReduceOp};

use crate::call::Counts;
use crate::compute::{Compute, ComputeError};
use crate::engine::{Engine, EngineError, ScratchLayout, StatusBoard, memory_for_peers};
use crate::reproducible::Reproducible;
use batch::Staging;
use bound::BoundCall;
use contributors::Contributors;
use data::{destination, part};
use driver::Driver;
use exact::Exact;
use observed::Observed;
use parts::{InEpoch, NewPart};
use progress::ProgressThread;

/// A handle of a group of ranks; see the module.
#[derive(Clone)]
pub struct Group {
    shared: Arc<Shared>,
    timeout: Duration,
    variant: Option<Variant>,
    tag: u32,
    priority: i32,
    fabric: Option<Fabric>,
    exact: Option<Arc<Exact>>,
    /// The stream whose earlier work comes before the calls.
    stream: Option<Stream>,
    /// Called at intervals while a call waits; true aborts the group.
    interrupted: Option<fn() -> bool>,
}

struct Shared {
    /// Dropped before the driver that it drives.
    progress: Option<ProgressThread>,
    driver: Arc<Driver>,
    rank: Rank,
    world_size: u32,
    hosts: HostMap,
    /// Distinguishes this group's buffers from those of other groups of this process.
    number: u64,
    close_timeout: Duration,
    /// Set once by close or drop. Relaxed: the flag only refuses calls; the driver's lock guards
    /// all that a call touches.
    is_closed: AtomicBool,
    /// Memory for batches, while none uses it.
    staging: Mutex<Option<Staging>>,
    /// The store where the ranks met. Rank 0's table keeps late comers out as long as the group
    /// lives.
    store: Option<Arc<Mutex<Box<dyn Store>>>>,
    /// What the ranks know of each other since they met, for parts of the group.
    known: Option<Arc<KnownRanks>>,
    /// In an epoch of a session.
    in_epoch: Option<InEpoch>,
    /// The GPU whose memory the calls work on, if they work on a GPU's memory.
    gpu: Option<Arc<Gpu>>,
    /// Whether peers reach that memory.
    shares_gpu: bool,
    contributors: Contributors,
    /// The options of the join, for the groups that this group is split into.
    options: Options,
    /// Counts the calls of [`Group::split`]. Relaxed: only rank 0's number counts, and each caller
    /// orders its own calls.
    splits: AtomicU64,
    /// The device's counts of registrations and connections.
    setup: Arc<SetupCounts>,
}

/// A device that is connected to all ranks, as a group takes it.
pub struct Connection {
    /// Connected to every other rank.
    pub device: Box<dyn Device>,
    /// Events that the device has already reported, and that no engine has seen.
    pub events: Vec<Event>,
    /// The device's responder.
    pub board: Arc<StatusBoard>,
    /// The ranks on their hosts. It is the same on all ranks, because they choose their schedules
    /// by it.
    pub platform: Platform,
    /// Ranks for each processor of this host that this rank may run on, rounded up. A rank that
    /// waits yields at once where they are several.
    pub ranks_a_processor: u32,
    /// Where the ranks met.
    pub store: Option<Box<dyn Store>>,
}

/// What a group knows of its ranks.
#[derive(Default)]
struct Known {
    /// For the parts of the group, where its ranks have met.
    ranks: Option<Arc<KnownRanks>>,
    /// By rank: the addresses of the devices, where pairs connect on first use.
    addresses: Vec<Address>,
}

/// Of what a group is made.
enum Origin<'a> {
    /// Ranks that have met, or a device of a caller's.
    Job,
    /// What a session carries from epoch to epoch.
    Epoch(CarriedGroup<'a>),
    /// Ranks of an epoch that have met again.
    Part(NewPart),
}

/// Numbers groups of this process. Relaxed: only uniqueness matters.
static GROUPS: AtomicU64 = AtomicU64::new(1);

/// The number of the next group.
fn next_number() -> u64 {
    GROUPS.fetch_add(1, Ordering::Relaxed)
}

impl std::fmt::Debug for Group {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "Group(rank {} of {})", self.shared.rank, self.shared.world_size)
    }
}

impl Connection {
    /// A group over this device.
    pub fn into_group(self, compute: Box<dyn Compute>, options: &Options) -> Result<Group, GroupError> {
        Group::assembled(None, self, compute, Known::default(), options, Origin::Job)
    }
}

impl Group {
    /// A group whose calls take the variants of a table.
    fn assembled(
        table: Option<Arc<TuningTable>>,
        connection: Connection,
        compute: Box<dyn Compute>,
        known: Known,
        options: &Options,
        origin: Origin<'_>,
    ) -> Result<Self, GroupError> {
        let Connection { device, events, board, platform, ranks_a_processor, store } = connection;
        let (rank, world_size) = (device.info().rank, platform.ranks());
        let hosts = platform.hosts.clone();
        let neighbours = (0..world_size).filter(|&peer| peer != rank && hosts.are_neighbours(rank, peer));
        assert!(
            platform.access == Access::Put
                || neighbours.into_iter().all(|peer| device.info().reach[peer as usize].maps),
            "the device maps what the platform says it does"
        );
        let gpu = match compute.space() {
            Space::Gpu { ordinal } => Some(Gpu::open(ordinal).map_err(ComputeError::from)?),
            _ => None,
        };
        let observed = Observed::new(options, &board, rank, world_size)?;
        let planner = Planner::new(rank, platform, options.algorithm.clone()).tuned_by(table);
        let planner = if gpu.is_some() { planner.untouched_by_host() } else { planner };
        let layout = ScratchLayout { ranks: world_size, gpus_copy: planner.gpus_copy() };
        let engine = match &origin {
            Origin::Job | Origin::Part(_) => {
                Engine::new(device, compute, board.clone(), layout, known.addresses)?
            }
            Origin::Epoch(carried) => {
                Engine::of_epoch(device, compute, board.clone(), layout, carried.engine)
                    .map_err(EngineError::Post)?
            }
        };
        let mut engine = engine.observed_by(observed.observations().clone());
        engine.accept(events, clock::now());
        engine.allow_concurrent_calls(options.concurrent_calls);
        engine.share_processor(ranks_a_processor);
        let planner = match options.reproducible {
            Reproducible::No => planner,
            Reproducible::PerWorldSize | Reproducible::Exact => planner.in_rank_order(),
        };
        let shares_gpu = gpu.is_some() && engine.scratch_space() != Space::Host;
        let setup = Arc::clone(&engine.device().info().setup);
        let driver =
            Driver::new(engine, planner, board, world_size, options.spin, ranks_a_processor, observed);
        let ready = driver.drive(driver.lock(), clock::now() + options.timeout, |engine| {
            engine.failure().cloned().map(Err).or_else(|| engine.is_ready().then_some(Ok(())))
        });
        match ready {
            Some(Ok(())) => {}
            Some(Err(fault)) => return Err(GroupError::Failed(fault)),
            None => {
                let missing = driver.lock().engine.not_ready().collect();
                return Err(GroupError::Silent { missing, limit: options.timeout });
            }
        }
        driver.enable_fast_path();
        let driver = Arc::new(driver);
        let (number, in_epoch) = match origin {
            Origin::Job => (next_number(), None),
            Origin::Part(part) => (next_number(), Some(part.made(&driver))),
            Origin::Epoch(carried) => {
                (carried.number, Some(InEpoch::whole(Arc::clone(carried.parts), world_size)))
            }
        };
        let progress = ProgressThread::new(options.progress, &driver, number).map_err(GroupError::Thread)?;
        let shared = Arc::new(Shared {
            progress,
            driver,
            rank,
            world_size,
            hosts,
            number,
            close_timeout: options.close_timeout,
            is_closed: AtomicBool::new(false),
            staging: Mutex::default(),
            store: store.map(|store| Arc::new(Mutex::new(store))),
            known: known.ranks,
            in_epoch,
            contributors: Contributors::all(gpu.is_none()),
            gpu,
            shares_gpu,
            options: options.clone(),
            splits: AtomicU64::new(0),
            setup,
        });
        let exact = (options.reproducible == Reproducible::Exact).then(Arc::default);
        Ok(Self {
            shared,
            timeout: options.timeout,
            variant: None,
            tag: 0,
            priority: 0,
            fabric: None,
            exact,
            stream: None,
            interrupted: None,
        })
    }

    /// This rank, from 0.
    #[must_use]
    pub fn rank(&self) -> Rank {
        self.shared.rank
    }

    /// How many ranks there are.
    #[must_use]
    pub fn world_size(&self) -> u32 {
        self.shared.world_size
    }

    /// How many ranks contribute to the calls of this step: all, but for those of a session that
    /// still read its states ([`Heal::Hidden`](crate::session::Heal)). [`ReduceOp::Avg`] divides by
    /// this number; who sums and divides does the same.
    #[must_use]
    pub fn contributors(&self) -> u32 {
        self.shared.contributors.count().unwrap_or(self.shared.world_size)
    }

    /// Whether this rank contributes. If not, the neutral element stands for its input in this
    /// step, so there is no need to compute that.
    #[must_use]
    pub fn contributes(&self) -> bool {
        self.shared.contributors.contains_own()
    }

    /// Only so many ranks contribute, or all; and whether this one does. Between two steps.
    pub(crate) fn set_contributors(&self, count: Option<u32>, contributes: bool) {
        self.shared.contributors.set(count, contributes);
        self.shared.driver.lock().planner.divide_averages_by(count);
    }

    /// The same group, with this deadline for each call.
    #[must_use]
    pub fn within(&self, timeout: Duration) -> Self {
        Self { timeout, ..self.clone() }
    }

    /// The same group, using this algorithm or variant (on all ranks) for the calls made through
    /// it.
    #[must_use]
    pub fn with_variant(&self, variant: impl Into<Variant>) -> Self {
        Self { variant: Some(variant.into()), ..self.clone() }
    }

    /// The same group, with a tag that must be equal on all ranks for calls to match. The tag
    /// distinguishes calls that are alike otherwise.
    #[must_use]
    pub fn tagged(&self, tag: u32) -> Self {
        Self { tag, ..self.clone() }
    }

    /// The same group, with a priority for its calls. Its calls go before calls of lower priorities
    /// that are under way at the same time, and end before them if possible. The usual priority is
    /// 0. Ranks may have different priorities.
    ///
    /// Calls are admitted in the order in which they are made: eight short ones at a time, and two
    /// long ones (above some tens of kilobytes). Priority decides only among the admitted calls.
    #[must_use]
    pub fn with_priority(&self, priority: i32) -> Self {
        Self { priority, ..self.clone() }
    }

    /// The same group, whose calls ask this function every 50 ms while they wait, on the thread
    /// that made the call. If the function returns true, the group is aborted: a call cannot return
    /// while peers may still write to its memory. Operations that were started do not ask.
    #[must_use]
    pub fn interrupted_by(&self, interrupted: fn() -> bool) -> Self {
        Self { interrupted: Some(interrupted), ..self.clone() }
    }

    /// The same group, for calls that have no data of a caller.
    fn in_no_stream(self) -> Self {
        Self { stream: None, ..self }
    }

    /// The same group, whose calls match only calls with the same mark, besides the tag.
    pub(crate) fn tagged_further(&self, mark: u32) -> Self {
        self.tagged(self.tag.rotate_left(16) ^ mark)
    }

    /// Replaces the first elements of every rank's `data` by the sum of all of them.
    pub(crate) fn all_reduce_first<T: Element>(
        &self,
        data: &mut Buffer<T>,
        count: usize,
    ) -> Result<(), CollectiveError> {
        let whole = destination(data, self.shared.number)?.bytes;
        let bytes = part(&whole, 0..count * size_of::<T>());
        let (collective, counts) = (Collective::AllReduce, Counts::Each(count));
        let (input, output) = (bytes.clone(), bytes);
        let mut call = BoundCall::new(collective, T::DATA_TYPE, ReduceOp::Sum, counts, input, output);
        self.blocking(&mut call, None)
    }

    /// The name of the algorithm that a call through this handle takes for that many bytes of one
    /// part (see [`Collective`]). Local; makes and proves the schedule if that has not been done.
    pub fn algorithm_for(
        &self,
        collective: Collective,
        part_bytes: usize,
    ) -> Result<String, CollectiveError> {
        let mut core = self.shared.driver.lock();
        let program = core.planner.program(collective, part_bytes, self.variant.as_ref())?;
        Ok(program.algorithm().to_owned())
    }

    /// `len` zeroed elements that collectives work on in place, without copies.
    ///
    /// # Errors
    ///
    /// No memory, or it cannot be registered.
    pub fn buffer<T: Element>(&self, len: usize) -> Result<Buffer<T>, CollectiveError> {
        self.expect_own_process()?;
        self.expect_host()?;
        let memory = self.new_registered(len.saturating_mul(size_of::<T>()))?;
        Ok(Buffer::new(memory, len, self.shared.number))
    }

    /// `bytes` zeroed bytes that peers can map, registered.
    fn new_registered(&self, bytes: usize) -> Result<Slice, CollectiveError> {
        let memory = memory_for_peers(bytes)
            .map_err(|source| CollectiveError::Memory { bytes, source: Arc::new(source) })?;
        self.registered(memory)
    }

    /// Registers memory with the device of this group.
    fn registered(&self, memory: Arc<dyn Memory>) -> Result<Slice, CollectiveError> {
        let region = self.shared.driver.lock().engine.device().register(memory);
        Ok(region.map_err(|error| CollectiveError::Register(Arc::new(error)))?.whole())
    }

    /// Ends the group's work on all ranks: calls under way, here and there, return at once with an
    /// error. Any thread may call it, also while this rank is in no call. It returns when the peers
    /// have been told. It does nothing when the group is closed.
    pub fn abort(&self) {
        if self.expect_open().is_ok() {
            self.shared.driver.abort();
        }
    }

    /// How many collectives this rank has completed, each with its result; sends and receives do
    /// not count. On the host's memory a [`commit`](crate::session::Session::commit) makes two.
    ///
    /// When a group fails, one rank may have got the result of a call that ends with the error on
    /// another rank. Survivors find out which result all of them have by comparing this number, in
    /// the group that they join next.
    #[must_use]
    pub fn completed(&self) -> u64 {
        self.shared.driver.completed()
    }

    /// Meets all ranks once more and leaves the group; finds out what calls of theirs had nothing
    /// to do with this rank but differed.
    pub fn close(self) -> Result<(), CollectiveError> {
        let met = self.within(self.shared.close_timeout).in_no_stream().barrier();
        self.shared.leave();
        met
    }

    /// Whether the operation is made exact.
    #[inline]
    fn is_exact(&self, data_type: DataType, op: ReduceOp) -> Result<bool, CollectiveError> {
        if self.exact.is_none() { Ok(false) } else { self.must_be_exact(data_type, op) }
    }

    /// The same in an exact group.
    fn must_be_exact(&self, data_type: DataType, op: ReduceOp) -> Result<bool, CollectiveError> {
        let reason = match op {
            _ if !data_type.is_float() => return Ok(false),
            ReduceOp::Min | ReduceOp::Max => return Ok(false),
            _ if !op.fits(data_type) => return Err(CollectiveError::Meaningless { op, data_type }),
            _ if self.gpu().is_some() => NotExact::OnGpu,
            ReduceOp::Sum | ReduceOp::Avg => return Ok(true),
            _ => NotExact::Operation,
        };
        Err(CollectiveError::NotExact { op, data_type, reason })
    }

    /// Carries a call out exactly.
    fn exactly(&self, call: &BoundCall) -> Result<(), CollectiveError> {
        let exact = self.exact.as_ref().expect("exact calls are those of exact groups");
        // The integers that it is made of are no floats.
        exact.carry_out(&Self { exact: None, ..self.clone() }, call)
    }

    fn expect_own_process(&self) -> Result<(), CollectiveError> {
        self.shared.driver.expect_own_process()
    }

    fn expect_open(&self) -> Result<(), CollectiveError> {
        self.expect_own_process()?;
        if self.shared.is_closed.load(Ordering::Relaxed) { Err(CollectiveError::Closed) } else { Ok(()) }
    }
}

impl Shared {
    /// Says bye and lets go out what is still to go out.
    fn leave(&self) {
        if self.is_closed.swap(true, Ordering::Relaxed) || !self.driver.is_own_process() {
            return;
        }
        let mut core = self.driver.lock();
        if core.engine.failure().is_some() {
            return;
        }
        core.engine.leave();
        let until = clock::now() + self.close_timeout;
        self.driver
            .drive(core, until, |engine| (engine.flush_all() || engine.failure().is_some()).then_some(()));
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        if !self.driver.is_own_process() {
            // Closing anything would close it for the parent, and the threads of the device and of
            // the store are not here to be joined.
            std::mem::forget(self.driver.clone());
            std::mem::forget(self.store.clone());
            if let Some(progress) = self.progress.take() {
                progress.forget();
            }
        } else if !std::thread::panicking() {
            // A panic is no bye: without one the peers are told that this rank is lost.
            self.leave();
        }
    }
}

impl Shared {
    /// Before something is started: the thread that carries it on runs, where the group has one.
    fn begin_progress(&self) -> Result<(), CollectiveError> {
        let Some(progress) = &self.progress else { return Ok(()) };
        progress.begin().map_err(|error| CollectiveError::Thread(Arc::new(error)))
    }

    /// After something was started.
    fn wake_progress(&self) {
        if let Some(progress) = &self.progress {
            progress.wake();
        }
    }
}

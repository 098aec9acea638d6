//! Partial all-reduce as users hold it: see [`crate::partial`] for how a round goes.
//!
//! **Invariant:** the caller's thread touches a contribution or a result only while the rounds do
//! not: a contribution from the moment at which [`Rounds::free_contribution`] names it until it is
//! handed over (a failed group holds none), and a result while [`Partial`] is borrowed by the
//! [`Round`] that shows it.
#![allow(unsafe_code)]

use std::marker::PhantomData;
use std::sync::Arc;
use std::sync::MutexGuard;

use pleach_transport::cuda::PinnedMemory;
use pleach_transport::{Nanos, Slice, Space, clock};
use pleach_vocabulary::{Collective, DataType, Rank, ReduceOp};

use super::bound::BoundCall;
use super::data::Element;
use super::driver::{Core, Driver, INTERRUPT_INTERVAL, Served};
use super::error::{CollectiveError, NotExact};
use super::gpu::GpuBuffer;
use super::premultiplied::Scaling;
use super::split::SplitError;
use super::{Group, Progress};
use crate::call::Counts;
use crate::compute::cuda::{CudaCompute, StagingSpace};
use crate::compute::{Compute, ComputeError, HostCompute, Job};
use crate::engine::{Bytes, Plan, memory_for_peers};
use crate::exact::BlockSums;
use crate::partial::{
    Activation, ActivationError, Awaited, CONTRIBUTIONS, DataPlans, EXACT_CONTRIBUTIONS, Ended, ExactPlans,
    ExactSums, Late, Own, PartialReport, RankSet, Rounds, RoundsMemory, Terms, WORDS, neutral,
};

/// Most ranks of rounds whose sums of floats are exact and in which a late contribution may go
/// beside another one of its rank: exact sums have room for 4096 numbers.
const EXACT_RANKS_MAX: u32 = 2048;

/// Sets the comparison of terms apart from a caller's own all-gather.
const PARTIAL_MARK: u32 = 0x5041_5254;

/// Why there is no partial all-reduce, or no result of a round.
#[derive(pleach_derive::ErrorDebug, thiserror::Error)]
#[non_exhaustive]
pub enum PartialError {
    /// The group does not work, or memory cannot be had.
    #[error(transparent)]
    Collective(#[from] CollectiveError),
    /// It cannot be carried out as it was asked for.
    #[error(transparent)]
    Activation(#[from] ActivationError),
    /// Ranks asked for different things.
    #[error(
        "rank {rank} asks for a partial all-reduce of {theirs}, rank {own_rank} of {own}; ask for the same on all"
    )]
    Differs {
        /// The first rank that asks for something else than this one.
        rank: Rank,
        /// What it asks for.
        theirs: String,
        /// This rank.
        own_rank: Rank,
        /// What this rank asks for.
        own: String,
    },
    /// The ranks did not meet for the rounds.
    #[error("the rounds of a partial all-reduce have no group of their own: {0}")]
    Split(#[from] SplitError),
    /// No rank had anything to give.
    #[error(
        "round {round} has no result: no rank had anything to give; call finish when the data are used up"
    )]
    NothingGiven {
        /// The round.
        round: u64,
    },
    /// The round of a started contribution was not waited for.
    #[error("a contribution of this rank is under way; wait for its round first (Partial::wait)")]
    UnderWay,
    /// No contribution was started.
    #[error("no contribution of this rank is under way; start one first (Partial::start_contribute)")]
    NotStarted,
    /// This rank has finished.
    #[error("this rank has finished its partial all-reduce; make a new one")]
    Finished,
}

/// The rounds of a partial all-reduce of `len` elements, at one rank.
///
/// One thread uses it at a time. The rank takes part in rounds while this thread computes, by the
/// progress thread of a group that the rounds have for themselves. All ranks must hold their
/// `Partial` until all have [finished](Partial::finish): a rank that drops it before leaves the
/// group, and ends it for the others.
///
/// `M`: the memory of contributions and results, [`HostMemory`] or [`GpuMemory`].
pub struct Partial<T, M = HostMemory> {
    raw: RawPartial,
    _elements: PhantomData<fn(M) -> T>,
}

/// The result of a round.
pub struct Round<'a, T, M = HostMemory> {
    raw: RawRound<'a>,
    _elements: PhantomData<fn(M) -> T>,
}

/// Contributions and results of a [`Partial`] are slices.
#[derive(Clone, Copy, Debug)]
pub enum HostMemory {}

/// Contributions and results of a [`Partial`] are in the memory of the group's GPU.
#[derive(Clone, Copy, Debug)]
pub enum GpuMemory {}

/// As [`Partial`], of elements whose type is known when the program runs.
pub struct RawPartial {
    /// Dropped before the memory below: its engine may touch that until then.
    group: Group,
    terms: Terms,
    contributions: Vec<Bytes>,
    results: [Bytes; 3],
    corrections: Vec<Bytes>,
    /// Where sums of floats are exact.
    exact: Option<BlockSums>,
    /// What combines a late contribution with the next one.
    compute: Box<dyn Compute>,
    /// On a GPU: what the bytes above name, in their order, and the neutral elements.
    on_gpu: Vec<GpuBuffer<u8>>,
    /// The contribution that the caller writes.
    current: usize,
    /// The contribution whose round was not waited for.
    started: Option<usize>,
    has_finished: bool,
}

/// As [`Round`], of elements whose type is known when the program runs.
pub struct RawRound<'a> {
    partial: &'a RawPartial,
    ended: Ended,
    awaited: Awaited,
}

/// Fills this many bytes of memory with copies of an element, piece by piece: the system may not
/// have the memory for a copy of the whole.
fn fill(
    bytes: usize,
    element: &[u8],
    mut store: impl FnMut(usize, &[u8]) -> Result<(), CollectiveError>,
) -> Result<(), CollectiveError> {
    const PIECE_BYTES: usize = 64 << 10;
    let piece = element.repeat(PIECE_BYTES / element.len().max(1));
    (0..bytes).step_by(piece.len()).try_for_each(|start| {
        let end = bytes.min(start + piece.len());
        store(start, &piece[..end - start])
    })
}

impl Group {
    /// Rounds of a partial sum of `len` elements: an all-reduce that does not wait for late ranks,
    /// and says whose contributions are in the result. All ranks call it with the same length and
    /// activation, and it returns when all have.
    ///
    /// ```
    /// # use pleach_collectives::{Group, Options, partial::Activation};
    /// # use pleach_transport::rendezvous::World;
    /// # let group = Group::join(&Options::new(World::alone()))?;
    /// let mut rounds = group.partial::<f32>(3, Activation::quorum(1))?;
    /// for step in 0..2 {
    ///     rounds.contribution().fill(step as f32);
    ///     let round = rounds.contribute()?;
    ///     assert_eq!((round.result(), round.contributors().len()), (&[step as f32; 3][..], 1));
    /// }
    /// rounds.finish()?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    ///
    /// See [`PartialError`]; the same on all ranks.
    pub fn partial<T: Element>(
        &self,
        len: usize,
        activation: Activation,
    ) -> Result<Partial<T>, PartialError> {
        Ok(Partial { raw: RawPartial::new(self, len, T::DATA_TYPE, activation)?, _elements: PhantomData })
    }

    /// Compares what the ranks ask for.
    fn agree_on(&self, terms: Terms) -> Result<(), PartialError> {
        let mut all = vec![0; WORDS * self.world_size() as usize];
        let plain = Self { variant: None, stream: None, ..self.tagged_further(PARTIAL_MARK) };
        plain.gather_words(&terms.to_words(), &mut all)?;
        let Some((rank, theirs)) = terms.find_difference(&all) else { return Ok(()) };
        let own = terms.to_string();
        Err(PartialError::Differs { rank, theirs, own_rank: self.rank(), own })
    }

    /// Begins the rounds in this group, which nothing else uses, for the group `observed`.
    fn into_partial(self, terms: Terms, observed: &Self) -> Result<RawPartial, CollectiveError> {
        let Terms { len, data_type, activation, .. } = terms;
        let is_exact = self.is_exact(data_type, activation.op())?;
        let exact = is_exact.then(|| BlockSums::new(data_type, len));
        let bytes = len.saturating_mul(data_type.bytes());
        let mut on_gpu = Vec::new();
        let mut memory = || self.memory_for_rounds(bytes, &mut on_gpu);
        let buffers = if is_exact { EXACT_CONTRIBUTIONS } else { CONTRIBUTIONS };
        let contributions = (0..buffers).map(|_| memory()).collect::<Result<Vec<_>, _>>()?;
        let results = [memory()?, memory()?, memory()?];
        let corrects = activation.late_rule() == Late::Correct;
        let corrections =
            (0..if corrects { 3 } else { 0 }).map(|_| memory()).collect::<Result<Vec<_>, _>>()?;
        let neutral_bytes = if is_exact { Bytes::None } else { memory()? };
        let element = neutral(data_type, activation.op());
        fill(neutral_bytes.len(), &element, |start, piece| match (&neutral_bytes, on_gpu.last_mut()) {
            (_, Some(buffer)) => buffer.store_at(start, piece),
            (Bytes::Registered(slice), None) => {
                slice.slice(start..start + piece.len()).expect("inside of the slice").store(piece);
                Ok(())
            }
            _ => Ok(()),
        })?;
        let place = (self.rank(), self.world_size());
        let words = Rounds::set_words(&terms, place.1);
        let set = [self.memory_for_set(words)?, self.memory_for_set(words)?];
        let memory = RoundsMemory {
            contributions: contributions.clone(),
            results: results.clone(),
            corrections: corrections.clone(),
            neutral: neutral_bytes,
            set,
        };
        let compute: Box<dyn Compute> = match self.gpu() {
            Some(gpu) => Box::new(CudaCompute::new(gpu, StagingSpace::Host)?),
            None => Box::new(HostCompute::new()),
        };
        self.shared.begin_progress()?;
        let mut core = self.shared.driver.lock();
        let sum = Self { variant: None, ..self.clone() };
        let set_plan = sum.all_reduce_plan(&mut core, DataType::U64, ReduceOp::Sum, words)?;
        let data = match exact {
            Some(sums) => self.exact_plans(&mut core, sums, corrects)?,
            None => {
                let op = Rounds::data_op(&terms);
                DataPlans::Combined(self.all_reduce_plan(&mut core, data_type, op, len)?)
            }
        };
        let rounds = Rounds::new(place, &terms, self.timeout, (set_plan, data), memory);
        let rounds = rounds.observed_by(observed.shared.driver.observed.observations().clone());
        core.served = Some(Served::Rounds(Box::new(rounds)));
        drop(core);
        self.shared.wake_progress();
        Ok(RawPartial {
            group: self,
            terms,
            contributions,
            results,
            corrections,
            exact,
            compute,
            on_gpu,
            current: 0,
            started: None,
            has_finished: false,
        })
    }

    /// Memory of the kind that the group works on.
    fn memory_for_rounds(
        &self,
        bytes: usize,
        on_gpu: &mut Vec<GpuBuffer<u8>>,
    ) -> Result<Bytes, CollectiveError> {
        if self.gpu().is_none() {
            return Ok(Bytes::Registered(self.new_registered(bytes)?));
        }
        let buffer = self.gpu_buffer(bytes)?;
        let named = buffer.operand(self.shared.number)?.bytes;
        on_gpu.push(buffer);
        Ok(named)
    }

    /// Memory on the host for a set of so many words, which a GPU reaches as well.
    fn memory_for_set(&self, words: usize) -> Result<Slice, CollectiveError> {
        let bytes = words * size_of::<u64>();
        let Some(gpu) = self.gpu() else { return self.new_registered(bytes) };
        let memory = memory_for_peers(bytes)
            .map_err(|source| CollectiveError::Memory { bytes, source: Arc::new(source) })?;
        self.registered(PinnedMemory::new(gpu, memory)?)
    }

    /// The plans of exact rounds.
    fn exact_plans(
        &self,
        core: &mut Core,
        sums: BlockSums,
        corrects: bool,
    ) -> Result<DataPlans, CollectiveError> {
        let parts_max = if corrects { 2 } else { 1 };
        let plain = Self { variant: None, ..self.clone() };
        let facts = plain.all_reduce_plan(
            core,
            DataType::I32,
            ReduceOp::Max,
            ExactSums::facts_len(sums, parts_max),
        )?;
        let possible = sums.possible_words().into_iter();
        let plans = possible
            .map(|words| Ok((words, self.all_reduce_plan(core, DataType::I64, ReduceOp::Sum, words)?)));
        let plans = ExactPlans { facts, words: plans.collect::<Result<_, CollectiveError>>()? };
        let exact = ExactSums::new(sums, plans, parts_max, EXACT_CONTRIBUTIONS);
        Ok(DataPlans::Exact(Box::new(exact)))
    }

    fn all_reduce_plan(
        &self,
        core: &mut Core,
        data_type: DataType,
        op: ReduceOp,
        len: usize,
    ) -> Result<Arc<Plan>, CollectiveError> {
        let (collective, counts) = (Collective::AllReduce, Counts::Each(len));
        let call = BoundCall::new(collective, data_type, op, counts, Bytes::None, Bytes::None);
        self.plan(&mut core.planner, &call).cloned()
    }
}

impl<T: Element> Partial<T> {
    /// The memory of the next contribution: `len` elements, of any value, which nobody else
    /// touches until [`Partial::contribute`].
    pub fn contribution(&mut self) -> &mut [T] {
        bytemuck::cast_slice_mut(self.raw.contribution())
    }
}

impl<T: Element> Partial<T, GpuMemory> {
    /// As [`Group::partial`], in the memory of the GPU that the group works on. A contribution is
    /// ready when the stream of this handle ([`Group::on`]) has done what was put into it before
    /// the contribution is handed over. A rank that is not ready is bound without its contribution,
    /// and the GPU reads no byte of it.
    ///
    /// # Errors
    ///
    /// See [`PartialError`]; the same on all ranks but for a missing stream. There are no exact
    /// sums of floats and no factors there.
    pub fn on_gpu(group: &Group, len: usize, activation: Activation) -> Result<Self, PartialError> {
        if group.gpu().is_none() {
            let data = Space::Gpu { ordinal: 0 };
            return Err(CollectiveError::Space { group: Space::Host, data }.into());
        }
        let raw = RawPartial::in_any_memory(group, len, T::DATA_TYPE, activation)?;
        Ok(Self { raw, _elements: PhantomData })
    }

    /// Where the next contribution is, for kernels and copies of the GPU: `len` elements, of any
    /// value, which nobody else touches until [`Partial::contribute`].
    pub fn contribution(&mut self) -> *mut T {
        self.raw.contribution_bytes().base().0.cast()
    }

    /// Copies elements of the host's memory over the first ones of the next contribution; returns
    /// when they are there.
    ///
    /// # Errors
    ///
    /// There are more than `len`, or what the driver says.
    pub fn store(&mut self, elements: &[T]) -> Result<(), CollectiveError> {
        let current = self.raw.current;
        self.raw.on_gpu[current].store(bytemuck::cast_slice(elements))
    }
}

impl<T: Element, M> Partial<T, M> {
    /// Hands the contribution over, times this rank's factor if the operation has one. Returns when
    /// the round that counts it has ended or, where it
    /// came too late, the newest round that was bound without it.
    ///
    /// # Errors
    ///
    /// The group has failed: [`Partial::contribution`] is still what it was, times the factor and
    /// with the late contribution that was carried. Or this rank has finished.
    pub fn contribute(&mut self) -> Result<Round<'_, T, M>, PartialError> {
        self.raw.contribute().map(Round::of)
    }

    /// Hands the contribution over and returns at once, on a GPU when the contribution is ready.
    /// [`Partial::contribution`] is other memory from now on, so the next contribution can be
    /// computed while the round goes on.
    ///
    /// ```
    /// # use pleach_collectives::{Group, Options, partial::Activation};
    /// # use pleach_transport::rendezvous::World;
    /// # let group = Group::join(&Options::new(World::alone()))?;
    /// let mut rounds = group.partial::<f32>(3, Activation::all())?;
    /// rounds.contribution().fill(1.0);
    /// rounds.start_contribute()?;
    /// rounds.contribution().fill(2.0); // while the round goes on
    /// assert_eq!(rounds.wait()?.result(), [1.0; 3]);
    /// rounds.finish()?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    ///
    /// As of [`Partial::contribute`]; or the round of the contribution before was not waited for.
    pub fn start_contribute(&mut self) -> Result<(), PartialError> {
        self.raw.start_contribute()
    }

    /// Waits for the round of the contribution that was started: see [`Partial::contribute`].
    ///
    /// # Errors
    ///
    /// As of [`Partial::contribute`]; or no contribution was started.
    pub fn wait(&mut self) -> Result<Round<'_, T, M>, PartialError> {
        self.raw.wait().map(Round::of)
    }

    /// Has nothing to give to the next round. Nobody waits for this rank until it contributes
    /// again, or until all ranks have abstained from one round. Returns as [`Partial::contribute`]
    /// does.
    ///
    /// # Errors
    ///
    /// The group has failed, this rank has finished, or no rank had anything to give.
    pub fn abstain(&mut self) -> Result<Round<'_, T, M>, PartialError> {
        self.raw.abstain().map(Round::of)
    }

    /// Gives nothing any more, and goes on to take part in the rounds of other ranks until all have
    /// finished. Returns the last round, in which the late contributions are that are still
    /// carried; its set may be empty.
    ///
    /// # Errors
    ///
    /// The group has failed, or this rank has finished before.
    pub fn finish(&mut self) -> Result<Round<'_, T, M>, PartialError> {
        self.raw.finish().map(Round::of)
    }

    /// How the rounds went so far.
    ///
    /// # Errors
    ///
    /// This process is a fork of the one that the group belongs to.
    pub fn report(&self) -> Result<PartialReport, PartialError> {
        self.raw.report()
    }

    /// The number of elements.
    #[must_use]
    pub fn len(&self) -> usize {
        self.raw.terms.len
    }

    /// Whether there are no elements.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.raw.terms.len == 0
    }
}

impl RawPartial {
    /// As [`Group::partial`].
    ///
    /// # Errors
    ///
    /// See [`PartialError`]; the same on all ranks.
    pub fn new(
        group: &Group,
        len: usize,
        data_type: DataType,
        activation: Activation,
    ) -> Result<Self, PartialError> {
        group.expect_host()?;
        Self::in_any_memory(group, len, data_type, activation)
    }

    /// The same in the memory that the group works on.
    fn in_any_memory(
        group: &Group,
        len: usize,
        data_type: DataType,
        activation: Activation,
    ) -> Result<Self, PartialError> {
        group.expect_open()?;
        group.expect_stream(len)?;
        let has_thread = group.shared.options.progress == Progress::Thread;
        let can_multiply = activation
            .factor()
            .is_none_or(|factor| group.gpu().is_none() && ReduceOp::PremulSum(factor).fits(data_type));
        let terms = Terms { len, data_type, activation, has_thread, can_multiply };
        group.agree_on(terms)?;
        terms.check(group.world_size())?;
        if group.is_exact(data_type, activation.op())?
            && activation.late_rule() != Late::Drop
            && group.world_size() > EXACT_RANKS_MAX
        {
            let (op, reason) = (activation.op(), NotExact::Partial);
            return Err(CollectiveError::NotExact { op, data_type, reason }.into());
        }
        let Some(own) = group.split(Some(0), group.rank())? else { unreachable!("this rank named a colour") };
        let own = Group {
            interrupted: group.interrupted,
            variant: group.variant.clone(),
            stream: group.stream.clone(),
            ..own
        };
        Ok(own.into_partial(terms, group)?)
    }

    /// As [`Partial::contribution`], in bytes.
    pub fn contribution(&mut self) -> &mut [u8] {
        let bytes = self.contribution_bytes();
        // SAFETY: memory of the host: only the rounds of a `GpuPartial` are elsewhere, and that
        // gives no slices out. The rounds do not hold this contribution (see the module), and the
        // borrow of `self` keeps the caller from handing it over meanwhile.
        unsafe { std::slice::from_raw_parts_mut(bytes.base().0, bytes.len()) }
    }

    fn contribution_bytes(&self) -> &Bytes {
        &self.contributions[self.current]
    }

    /// As [`Partial::contribute`].
    ///
    /// # Errors
    ///
    /// See there.
    pub fn contribute(&mut self) -> Result<RawRound<'_>, PartialError> {
        self.start_contribute()?;
        self.wait()
    }

    /// As [`Partial::start_contribute`].
    ///
    /// # Errors
    ///
    /// See there.
    pub fn start_contribute(&mut self) -> Result<(), PartialError> {
        self.expect_going()?;
        self.await_stream()?;
        let driver = self.group.shared.driver.clone();
        if let Some(fault) = driver.lock().engine.failure() {
            return Err(CollectiveError::Failed(fault.clone()).into());
        }
        // Other threads and peers go on meanwhile.
        let bytes = &self.contributions[self.current];
        if let Some(factor) = self.terms.activation.factor() {
            let (scaling, base) = (Scaling { data_type: self.terms.data_type, factor }, bytes.base());
            scaling.products(base, base, bytes.len());
        }
        let facts = self.exact.map_or_else(Vec::new, |sums| sums.facts(bytes));
        let mut core = driver.lock();
        while let Some(late) = core.expect_rounds().take_late() {
            drop(core);
            self.add_to_current(late)?;
            core = driver.lock();
        }
        core.expect_rounds().hand_over(self.current, facts);
        self.started = Some(self.current);
        self.current = core.expect_rounds().free_contribution();
        Ok(())
    }

    /// As [`Partial::wait`].
    ///
    /// # Errors
    ///
    /// See there.
    pub fn wait(&mut self) -> Result<RawRound<'_>, PartialError> {
        self.group.expect_open()?;
        let Some(started) = self.started.take() else { return Err(PartialError::NotStarted) };
        let driver = self.group.shared.driver.clone();
        let current = std::mem::replace(&mut self.current, started);
        let (ended, awaited) = match self.await_round(&driver, driver.lock()) {
            Ok(found) => found,
            Err(error) => {
                let companion = driver.lock().expect_rounds().take_companion(started);
                companion.map_or(Ok(()), |late| self.add_to_current(late))?;
                return Err(error.into());
            }
        };
        // What the caller has written meanwhile stays where it is.
        self.current = current;
        self.round(ended, awaited)
    }

    /// As [`Partial::abstain`].
    ///
    /// # Errors
    ///
    /// See there.
    pub fn abstain(&mut self) -> Result<RawRound<'_>, PartialError> {
        self.expect_going()?;
        self.await_stream()?;
        let driver = self.group.shared.driver.clone();
        let mut core = driver.lock();
        core.expect_rounds().abstain();
        let (ended, awaited) = self.await_round(&driver, core)?;
        self.round(ended, awaited)
    }

    /// As [`Partial::finish`].
    ///
    /// # Errors
    ///
    /// See there.
    pub fn finish(&mut self) -> Result<RawRound<'_>, PartialError> {
        self.expect_going()?;
        self.await_stream()?;
        self.has_finished = true;
        let driver = self.group.shared.driver.clone();
        let mut core = driver.lock();
        core.expect_rounds().finish();
        let (ended, awaited) = self.await_round(&driver, core)?;
        self.round(ended, awaited)
    }

    /// As [`Partial::report`].
    ///
    /// # Errors
    ///
    /// See there.
    pub fn report(&self) -> Result<PartialReport, PartialError> {
        self.group.expect_own_process()?;
        Ok(self.group.shared.driver.lock().expect_rounds().report())
    }

    fn expect_going(&self) -> Result<(), PartialError> {
        self.group.expect_open()?;
        match (self.has_finished, self.started) {
            (true, _) => Err(PartialError::Finished),
            (false, Some(_)) => Err(PartialError::UnderWay),
            (false, None) => Ok(()),
        }
    }

    /// Waits until the stream has done what was put into it before: the contribution is ready then,
    /// and the stream reads no result any more. Rounds go on meanwhile.
    fn await_stream(&self) -> Result<(), CollectiveError> {
        self.group.stream.as_ref().map_or(Ok(()), |stream| self.group.wait_for_mark(&stream.record_event()?))
    }

    /// Combines a late contribution with the current one, in the current one.
    fn add_to_current(&mut self, late: usize) -> Result<(), CollectiveError> {
        let [current, late] = [self.current, late].map(|index| self.contributions[index].base().0);
        let mut job = Job::empty();
        job.begin(self.terms.data_type, self.terms.activation.op(), self.terms.len, 1);
        job.from.extend([late.cast_const(), current.cast_const()]);
        job.add_destination(current);
        // SAFETY: both are contributions of `len` elements that the rounds do not hold: the current
        // one, and a late one that they have just given up. They are apart.
        while self.terms.len > 0 && !unsafe { self.compute.advance(&mut job, Nanos::ZERO) } {
            if let Some(ComputeError::Cuda(error)) = self.compute.failure() {
                return Err(error.clone().into());
            }
            std::hint::spin_loop();
        }
        Ok(())
    }

    /// Waits for a round. The rounds end a wait that takes too long.
    fn await_round(
        &self,
        driver: &Driver,
        core: MutexGuard<'_, Core>,
    ) -> Result<(Ended, Awaited), CollectiveError> {
        let mut core = Some(core);
        loop {
            let until = match self.group.interrupted {
                Some(_) => clock::now() + INTERRUPT_INTERVAL,
                None => Nanos::MAX,
            };
            let locked = core.take().unwrap_or_else(|| driver.lock());
            let found = driver.drive_core(locked, until, |core| match core.take_round() {
                Some(round) => {
                    // Peers wait for the last signals, and this rank may not poll for long.
                    core.engine.flush();
                    Some(Ok(round))
                }
                None => core.engine.failure().cloned().map(Err),
            });
            match found {
                Some(found) => return found.map_err(CollectiveError::Failed),
                None if self.group.interrupted.is_some_and(|interrupted| interrupted()) => driver.abort(),
                None => {}
            }
        }
    }

    /// A round that has ended, if anything was given to it.
    fn round(&self, ended: Ended, awaited: Awaited) -> Result<RawRound<'_>, PartialError> {
        let is_empty =
            ended.contributors.is_empty() && ended.corrected.as_ref().is_none_or(RankSet::is_empty);
        if is_empty && awaited.round.is_some() {
            return Err(PartialError::NothingGiven { round: ended.number });
        }
        Ok(RawRound { partial: self, ended, awaited })
    }
}

impl Drop for RawPartial {
    /// Ends the active round, which needs this rank, before the group is left.
    fn drop(&mut self) {
        let shared = &self.group.shared;
        if !shared.driver.process.is_current() || std::thread::panicking() {
            return;
        }
        let mut core = shared.driver.lock();
        core.expect_rounds().stop();
        let until = clock::now() + shared.close_timeout;
        shared.driver.drive_core(core, until, |core| {
            (core.expect_rounds().is_idle() || core.engine.failure().is_some()).then_some(())
        });
    }
}

impl<T: Element> Round<'_, T> {
    /// The combined contributions of [`Round::contributors`], divided as the activation says: the
    /// same bits on all ranks.
    #[must_use]
    pub fn result(&self) -> &[T] {
        bytemuck::cast_slice(self.raw.result())
    }

    /// With [`Late::Correct`], the combined contributions that came too late for an earlier round,
    /// divided as the result is, and whose they are. `None`: all ranks were in the round before, or
    /// there was none.
    #[must_use]
    pub fn correction(&self) -> Option<(&RankSet, &[T])> {
        self.raw.correction().map(|(set, bytes)| (set, bytemuck::cast_slice(bytes)))
    }
}

impl<T: Element> Round<'_, T, GpuMemory> {
    /// Where the result is, as in host memory [`Round::result`]: for kernels and copies of the GPU
    /// in the stream of the rounds, which have ended when the next round is asked for.
    #[must_use]
    pub fn result(&self) -> *const T {
        self.raw.result_bytes().base().0.cast_const().cast()
    }

    /// The result, copied to the host's memory.
    ///
    /// # Errors
    ///
    /// What the driver says.
    pub fn to_vec(&self) -> Result<Vec<T>, CollectiveError> {
        self.load(self.raw.partial.contributions.len())
    }

    /// The correction, copied to the host's memory, and whose late contributions are in it, as in
    /// host memory [`Round::correction`].
    ///
    /// # Errors
    ///
    /// What the driver says.
    pub fn correction(&self) -> Result<Option<(&RankSet, Vec<T>)>, CollectiveError> {
        let Some(set) = &self.raw.ended.corrected else { return Ok(None) };
        let partial = self.raw.partial;
        Ok(Some((set, self.load(partial.contributions.len() + partial.results.len())?)))
    }

    /// The round's one of the buffers from `first` on.
    fn load(&self, first: usize) -> Result<Vec<T>, CollectiveError> {
        let mut elements = vec![T::zeroed(); self.raw.partial.terms.len];
        let buffer = &self.raw.partial.on_gpu[first + self.raw.ended.result];
        buffer.load(bytemuck::cast_slice_mut(&mut elements))?;
        Ok(elements)
    }
}

impl<'a, T: Element, M> Round<'a, T, M> {
    fn of(raw: RawRound<'a>) -> Self {
        Self { raw, _elements: PhantomData }
    }

    /// Whose contributions are in the result: the same set on all ranks.
    #[must_use]
    pub fn contributors(&self) -> &RankSet {
        self.raw.contributors()
    }

    /// What became of this rank's own contribution.
    #[must_use]
    pub fn own(&self) -> Own {
        self.raw.own()
    }

    /// The round's number, from 0.
    #[must_use]
    pub fn number(&self) -> u64 {
        self.raw.number()
    }

    /// How many rounds lie between the round that this rank saw before and this one: their results
    /// are lost to it.
    #[must_use]
    pub fn missed(&self) -> u64 {
        self.raw.missed()
    }
}

impl RawRound<'_> {
    /// As [`Round::result`], in bytes. Also after the borrow, they stay as they are until another
    /// round is asked for or the rounds are dropped: the C ABI gives their address out.
    #[must_use]
    pub fn result(&self) -> &[u8] {
        bytes_of(self.result_bytes())
    }

    fn result_bytes(&self) -> &Bytes {
        &self.partial.results[self.ended.result]
    }

    /// As [`Round::correction`], in bytes, which stay as those of the result do.
    #[must_use]
    pub fn correction(&self) -> Option<(&RankSet, &[u8])> {
        Some((self.ended.corrected.as_ref()?, bytes_of(&self.partial.corrections[self.ended.result])))
    }

    /// As [`Round::contributors`].
    #[must_use]
    pub fn contributors(&self) -> &RankSet {
        &self.ended.contributors
    }

    /// As [`Round::own`].
    #[must_use]
    pub fn own(&self) -> Own {
        self.awaited.own
    }

    /// As [`Round::number`].
    #[must_use]
    pub fn number(&self) -> u64 {
        self.ended.number
    }

    /// As [`Round::missed`].
    #[must_use]
    pub fn missed(&self) -> u64 {
        self.ended.number - self.awaited.seen
    }
}

/// A result that the caller reads.
fn bytes_of(bytes: &Bytes) -> &[u8] {
    // SAFETY: memory of the host, as only a `GpuPartial` has other memory, and that gives no slices
    // out. The rounds write no result that the caller reads (see the module).
    unsafe { std::slice::from_raw_parts(bytes.base().0, bytes.len()) }
}

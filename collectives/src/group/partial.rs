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

use pleach_transport::{Nanos, Slice, clock};
use pleach_vocabulary::{Collective, DataType, Rank, ReduceOp};

use super::bound::BoundCall;
use super::data::Element;
use super::driver::{Core, Driver, INTERRUPT_INTERVAL, Served};
use super::error::{CollectiveError, NotExact};
use super::split::SplitError;
use super::{Group, Progress};
use crate::call::Counts;
use crate::compute::{Compute, HostCompute, Job};
use crate::engine::{Bytes, Plan};
use crate::partial::{
    Activation, ActivationError, Awaited, Ended, Late, Own, PartialReport, RankSet, Rounds, RoundsMemory,
    Terms, WORDS, neutral,
};

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
pub struct Partial<T> {
    raw: RawPartial,
    _element: PhantomData<T>,
}

/// The result of a round.
pub struct Round<'a, T> {
    raw: RawRound<'a>,
    _element: PhantomData<T>,
}

/// As [`Partial`], of elements whose type is known when the program runs.
pub struct RawPartial {
    group: Group,
    terms: Terms,
    contributions: [Slice; 3],
    results: [Slice; 3],
    corrections: Vec<Slice>,
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

/// Fills a slice with an element again and again, in pieces: a copy of it all may be more memory
/// than there is.
fn store_repeated(slice: &Slice, element: &[u8]) {
    const PIECE_BYTES: usize = 64 << 10;
    let piece = element.repeat(PIECE_BYTES / element.len().max(1));
    let mut start = 0;
    while start < slice.len() {
        let end = slice.len().min(start + piece.len());
        let part = slice.slice(start..end).expect("inside of the slice");
        part.store(&piece[..end - start]);
        start = end;
    }
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
        Ok(Partial { raw: RawPartial::new(self, len, T::DATA_TYPE, activation)?, _element: PhantomData })
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

    /// Begins the rounds in this group, which nothing else uses.
    fn into_partial(self, terms: Terms) -> Result<RawPartial, CollectiveError> {
        let bytes = terms.len.saturating_mul(terms.data_type.bytes());
        let slice = || self.new_registered(bytes);
        let contributions = [slice()?, slice()?, slice()?];
        let results = [slice()?, slice()?, slice()?];
        let corrects = terms.activation.late_rule() == Late::Correct;
        let corrections =
            (0..if corrects { 3 } else { 0 }).map(|_| slice()).collect::<Result<Vec<_>, _>>()?;
        let neutral_slice = slice()?;
        store_repeated(&neutral_slice, &neutral(terms.data_type, terms.activation.op()));
        let memory = RoundsMemory {
            contributions: contributions.clone(),
            results: results.clone(),
            corrections: corrections.clone(),
            neutral: neutral_slice,
        };
        self.shared.begin_progress()?;
        let place = (self.rank(), self.world_size());
        let mut core = self.shared.driver.lock();
        let words = Rounds::set_words(&terms, place.1);
        let sum = Group { variant: None, ..self.clone() };
        let set_plan = sum.all_reduce_plan(&mut core, DataType::U64, ReduceOp::Sum, words)?;
        let data_plan =
            self.all_reduce_plan(&mut core, terms.data_type, Rounds::data_op(&terms), terms.len)?;
        let rounds = Rounds::new(place, &terms, self.timeout, [set_plan, data_plan], memory);
        core.served = Some(Served::Rounds(Box::new(rounds)));
        drop(core);
        self.shared.wake_progress();
        Ok(RawPartial {
            group: self,
            terms,
            contributions,
            results,
            corrections,
            current: 0,
            started: None,
            has_finished: false,
        })
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

    /// Hands the contribution over. Returns when the round that counts it has ended or, where it
    /// came too late, the newest round that was bound without it.
    ///
    /// # Errors
    ///
    /// The group has failed: [`Partial::contribution`] is still what it was, with the late
    /// contribution that was carried. Or this rank has finished.
    pub fn contribute(&mut self) -> Result<Round<'_, T>, PartialError> {
        self.raw.contribute().map(Round::of)
    }

    /// Hands the contribution over and returns at once. [`Partial::contribution`] is other memory
    /// from now on, so the next contribution can be computed while the round goes on.
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
    pub fn wait(&mut self) -> Result<Round<'_, T>, PartialError> {
        self.raw.wait().map(Round::of)
    }

    /// Has nothing to give to the next round. Nobody waits for this rank until it contributes
    /// again, or until all ranks have abstained from one round. Returns as [`Partial::contribute`]
    /// does.
    ///
    /// # Errors
    ///
    /// The group has failed, this rank has finished, or no rank had anything to give.
    pub fn abstain(&mut self) -> Result<Round<'_, T>, PartialError> {
        self.raw.abstain().map(Round::of)
    }

    /// Gives nothing any more, and goes on to take part in the rounds of other ranks until all have
    /// finished. Returns the last round, in which the late contributions are that are still
    /// carried; its set may be empty.
    ///
    /// # Errors
    ///
    /// The group has failed, or this rank has finished before.
    pub fn finish(&mut self) -> Result<Round<'_, T>, PartialError> {
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
        group.expect_open()?;
        let has_thread = group.shared.options.progress == Progress::Thread;
        let terms = Terms { len, data_type, activation, has_thread };
        group.agree_on(terms)?;
        terms.check(group.world_size())?;
        group.expect_host()?;
        if group.exact.is_some() && data_type.is_float() {
            let (op, reason) = (activation.op(), NotExact::Partial);
            return Err(CollectiveError::NotExact { op, data_type, reason }.into());
        }
        let Some(own) = group.split(Some(0), group.rank())? else { unreachable!("this rank named a colour") };
        let own = Group { interrupted: group.interrupted, variant: group.variant.clone(), ..own };
        Ok(own.into_partial(terms)?)
    }

    /// As [`Partial::contribution`], in bytes.
    pub fn contribution(&mut self) -> &mut [u8] {
        let slice = &self.contributions[self.current];
        // SAFETY: the rounds do not hold this contribution (see the module), and the borrow of
        // `self` keeps the caller from handing it over meanwhile.
        unsafe { std::slice::from_raw_parts_mut(slice.as_ptr(), slice.len()) }
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
        let driver = self.group.shared.driver.clone();
        let mut core = driver.lock();
        if let Some(fault) = core.engine.failure() {
            return Err(CollectiveError::Failed(fault.clone()).into());
        }
        while let Some(late) = core.expect_rounds().take_late() {
            // Other threads and peers go on meanwhile.
            drop(core);
            self.add_to_current(late);
            core = driver.lock();
        }
        core.expect_rounds().hand_over(self.current);
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
        let (ended, awaited) = self.await_round(&driver, driver.lock())?;
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
        Ok(self.group.shared.driver.lock().expect_rounds().report().clone())
    }

    fn expect_going(&self) -> Result<(), PartialError> {
        self.group.expect_open()?;
        match (self.has_finished, self.started) {
            (true, _) => Err(PartialError::Finished),
            (false, Some(_)) => Err(PartialError::UnderWay),
            (false, None) => Ok(()),
        }
    }

    /// Combines a late contribution with the current one, in the current one.
    fn add_to_current(&self, late: usize) {
        let [current, late] = [self.current, late].map(|index| self.contributions[index].as_ptr());
        let mut job = Job::empty();
        job.begin(self.terms.data_type, self.terms.activation.op(), self.terms.len, 1);
        job.from.extend([late.cast_const(), current.cast_const()]);
        job.add_destination(current);
        let mut compute = HostCompute::new();
        // SAFETY: both are contributions of `len` elements that the rounds do not hold: the current
        // one, and a late one that they have just given up. They are apart.
        while self.terms.len > 0 && !unsafe { compute.advance(&mut job, Nanos::ZERO) } {}
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

impl<'a, T: Element> Round<'a, T> {
    fn of(raw: RawRound<'a>) -> Self {
        Self { raw, _element: PhantomData }
    }

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
        self.bytes(&self.partial.results)
    }

    /// As [`Round::correction`], in bytes, which stay as those of the result do.
    #[must_use]
    pub fn correction(&self) -> Option<(&RankSet, &[u8])> {
        Some((self.ended.corrected.as_ref()?, self.bytes(&self.partial.corrections)))
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

    /// The one of these results that the round has.
    fn bytes(&self, results: &[Slice]) -> &[u8] {
        let slice = &results[self.ended.result];
        // SAFETY: the rounds write no result that the caller reads (see the module).
        unsafe { std::slice::from_raw_parts(slice.as_ptr(), slice.len()) }
    }
}

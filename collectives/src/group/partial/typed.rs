//! Partial all-reduce of elements whose type is known when the program is compiled.

use std::marker::PhantomData;

use pleach_transport::Space;

use super::super::Group;
use super::super::data::Element;
use super::super::error::CollectiveError;
use super::{PartialError, RawPartial, RawRound};
use crate::partial::{Activation, Own, PartialReport, RankSet};

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

    /// The number of the round that counts a contribution which is handed over now; `None` where a
    /// round goes on, or has ended, that this rank has not seen and does not wait for it. A rank
    /// that takes part in several partial all-reduces can so keep from waiting for rounds that only
    /// ranks far ahead of it have come to.
    ///
    /// # Errors
    ///
    /// The group has failed, a contribution is under way, or this rank has finished.
    pub fn next_round(&self) -> Result<Option<u64>, PartialError> {
        self.raw.next_round()
    }

    /// Says that this rank gives nothing until it contributes again, and waits for no round, other
    /// than [`Partial::abstain`]: for something else that all ranks do together, as an average of
    /// parameters. Rounds go on meanwhile, and nobody waits for this rank there.
    ///
    /// # Errors
    ///
    /// A contribution is under way, or this rank has finished.
    pub fn step_aside(&mut self) -> Result<(), PartialError> {
        self.raw.step_aside()
    }

    /// Says that rounds are to wait for this rank again, which has stepped aside. The others may
    /// hear of it a moment later than of a contribution.
    ///
    /// # Errors
    ///
    /// A contribution is under way, or this rank has finished.
    pub fn come_back(&mut self) -> Result<(), PartialError> {
        self.raw.come_back()
    }

    /// Ends the rounds on all ranks: their calls, and those of this rank, return an error that
    /// names this rank. The group that the rounds were made of goes on.
    pub fn abort(&self) {
        self.raw.abort();
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

impl<T: Element> Round<'_, T> {
    /// The combined contributions of [`Round::contributors`], divided as the activation says: the
    /// same bits on all ranks.
    #[must_use]
    pub fn result(&self) -> &[T] {
        bytemuck::cast_slice(self.raw.result())
    }

    /// With [`Late::Correct`](crate::partial::Late::Correct), the combined contributions that came
    /// too late for the round before, divided as the result is, and whose they are: the same on all
    /// ranks. `None`: all ranks were in the round before, or there was none.
    ///
    /// All of them were too late for the round `number() - 1`, and no rank of the set is in that
    /// round. A rank that has missed several rounds may have meant its contribution for an older
    /// one. Such older rounds differ between the ranks of a correction, so a correction names none.
    /// Each rank knows the rounds that its own contribution was too late for: its call gave the
    /// newest of them, and the oldest was [`Round::missed`] results before.
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

    /// How many results of rounds between the one that this rank saw before and this one are lost
    /// to it. A round to which no rank gave anything has no result.
    #[must_use]
    pub fn missed(&self) -> u64 {
        self.raw.missed()
    }
}

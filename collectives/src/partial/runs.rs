//! The runs of the round that a rank is bound to: one adds the set, in which each rank has its own
//! bit, and one reduces the data. Late contributions that are reduced apart have another one, and
//! exact sums have several, one after the other.
//!
//! **Invariant:** all runs of a round read what was bound to it, at one instant. So the set is that
//! of the data. All ranks start them in the same order, which the activation alone says.

use std::sync::Arc;
use std::time::Duration;

use pleach_transport::Slice;
use pleach_vocabulary::Rank;

use super::RankSet;
use super::activation::{Divisor, Terms};
use super::contributions::{Contribution, Contributions};
use super::exact::{ExactSums, Part};
#[cfg(test)]
use super::rounds::Mutant;
use crate::engine::{Bytes, Engine, FastCall, Plan, RoundInput, RunId, StartError};

/// The memory of one rank's rounds, in bytes of the data but for the sets.
pub(crate) struct RoundsMemory {
    /// [`CONTRIBUTIONS`] of them, or [`EXACT_CONTRIBUTIONS`].
    pub(crate) contributions: Vec<Bytes>,
    /// One that the caller reads, one that has ended since, one that is written.
    pub(crate) results: [Bytes; 3],
    /// The same for late contributions, where these are reduced apart.
    pub(crate) corrections: Vec<Bytes>,
    /// Where sums are not exact.
    pub(crate) neutral: Bytes,
    /// What the set's run reads and writes, on the host: a bit for each rank, then as many words
    /// for late contributions that are reduced apart.
    pub(crate) set: [Slice; 2],
}

/// The caller writes one contribution, one was handed over, and one may be late or in the active
/// round.
pub(crate) const CONTRIBUTIONS: usize = 3;
/// Where sums are exact, a late contribution may go beside the one that was handed over.
pub(crate) const EXACT_CONTRIBUTIONS: usize = 4;

/// How the data of a round are reduced.
pub(crate) enum DataPlans {
    /// By one run.
    Combined(Arc<Plan>),
    /// Without rounding.
    Exact(Box<ExactSums>),
}

/// What a rank is bound to a round with.
#[derive(Clone, Copy, Debug)]
struct Binding {
    given: Option<Contributions>,
    late: Option<Contributions>,
    /// Late contributions are reduced apart.
    corrects: bool,
    /// Which of the results is written, and which of the corrections.
    result: usize,
    /// The time of the runs does not run until [`RoundRuns::start_time`].
    is_held: bool,
}

/// What the runs of a round have found so far.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    UnderWay,
    /// The set cannot have come about by each rank adding its own bit.
    WrongSet,
    Ended,
}

/// The runs of a rank's rounds, one round after the other; see the module.
pub(crate) struct RoundRuns {
    rank: Rank,
    ranks: u32,
    division: Divisor,
    timeout: Duration,
    set_plan: Arc<Plan>,
    data: DataPlans,
    memory: RoundsMemory,
    /// The memory of the set, as runs have it, and what this rank stores in it or has loaded.
    set_bytes: [Bytes; 2],
    set_words: Vec<u64>,
    bound: Binding,
    set: Option<RunId>,
    /// Whose contributions are in the result, and whose are in the correction, once the run of the
    /// set has ended.
    contributors: RankSet,
    corrected: RankSet,
    /// Of sums that are not exact: data, then correction.
    combined: [Option<RunId>; 2],
    has_started_data: bool,
    is_set_wrong: bool,
    /// What is to be done wrong.
    #[cfg(test)]
    mutant: Option<Mutant>,
}

/// Whether a run has ended; then it is known no more.
fn take_ended(run: &mut Option<RunId>, engine: &mut Engine) -> bool {
    let Some(ended) = run.filter(|run| engine.has_ended(*run)) else { return false };
    *run = None;
    matches!(engine.take_outcome(ended), Some(Ok(())))
}

impl RoundRuns {
    /// No round is bound.
    pub(crate) fn new(
        (rank, ranks): (Rank, u32),
        terms: &Terms,
        timeout: Duration,
        (set_plan, data): (Arc<Plan>, DataPlans),
        memory: RoundsMemory,
    ) -> Self {
        let set_bytes = memory.set.each_ref().map(|slice| Bytes::Staged(slice.clone()));
        let set_words = vec![0; memory.set[0].len() / size_of::<u64>()];
        let bound = Binding { given: None, late: None, corrects: false, result: 0, is_held: false };
        Self {
            rank,
            ranks,
            division: terms.activation.division(),
            timeout,
            set_plan,
            data,
            memory,
            set_bytes,
            set_words,
            bound,
            set: None,
            contributors: RankSet::default(),
            corrected: RankSet::default(),
            combined: [None; 2],
            has_started_data: false,
            is_set_wrong: false,
            #[cfg(test)]
            mutant: None,
        }
    }

    /// Has the runs do something wrong.
    #[cfg(test)]
    pub(crate) fn mutate(&mut self, mutant: Option<Mutant>) {
        self.mutant = mutant;
    }

    /// Whether sums are exact.
    pub(crate) fn is_exact(&self) -> bool {
        matches!(self.data, DataPlans::Exact(_))
    }

    /// Where sums are exact, what the numbers of a contribution are like that is handed over.
    pub(crate) fn note(&mut self, contribution: Contribution, facts: Vec<i32>) {
        if let DataPlans::Exact(exact) = &mut self.data {
            exact.note(contribution, facts);
        }
    }

    /// Whether the time of the runs does not run.
    pub(crate) fn are_held(&self) -> bool {
        self.bound.is_held
    }

    /// Has the time of the runs run.
    pub(crate) fn start_time(&mut self, engine: &mut Engine) {
        self.bound.is_held = false;
        let [data, correction] = self.combined;
        for run in [self.set, data, correction].into_iter().flatten() {
            engine.hold_time(run, false);
        }
    }

    /// Starts the runs of a round, with what is given and what is late, which is reduced apart if
    /// the round `corrects`. The round before has ended. `result`: which of the results is written,
    /// and which of the corrections. `is_held`: the time of the runs does not run until
    /// [`RoundRuns::start_time`]. `may_wait`: for some microseconds, if they are likely to end
    /// meanwhile.
    pub(crate) fn bind(
        &mut self,
        engine: &mut Engine,
        [given, late]: [Option<Contributions>; 2],
        (corrects, result): (bool, usize),
        (is_held, may_wait): (bool, bool),
    ) -> Result<(), StartError> {
        self.bound = Binding { given, late, corrects, result, is_held };
        (self.contributors, self.corrected) = (RankSet::default(), RankSet::default());
        (self.has_started_data, self.is_set_wrong) = (false, false);
        #[cfg(test)]
        if self.mutant == Some(Mutant::TornBinding) {
            self.bound.given = None;
        }
        self.store_set(given.is_some(), late.is_some());
        if may_wait && self.carry_out(engine)? {
            return Ok(());
        }
        // Peers wait for data longer than for the set. Where the set is the divisor, it goes first.
        if self.division != Divisor::Contributors {
            self.start_data(engine, None)?;
        }
        let [input, output] = self.set_bytes.clone();
        let run = engine.start(&self.set_plan, input, output, self.timeout)?;
        engine.hold_time(run, self.bound.is_held);
        self.set = Some(run);
        if let DataPlans::Exact(exact) = &mut self.data {
            exact.bind(engine, &[self.bound.given, late], self.timeout)?;
        }
        Ok(())
    }

    /// Carries both runs out at once, if they are short. False: nothing has begun.
    fn carry_out(&mut self, engine: &mut Engine) -> Result<bool, StartError> {
        let Binding { given, corrects, result, is_held, .. } = self.bound;
        let contribution = given.and_then(|given| given.iter().next());
        let (DataPlans::Combined(plan), Some(contribution)) = (&self.data, contribution) else {
            return Ok(false);
        };
        if corrects || self.division == Divisor::Contributors {
            return Ok(false);
        }
        let RoundsMemory { contributions, results, neutral, .. } = &self.memory;
        let data = FastCall { plan, input: &contributions[contribution], output: &results[result] };
        let [input, output] = &self.set_bytes;
        let set = FastCall { plan: &self.set_plan, input, output };
        let round = || RoundInput { divide_by: None, neutral: neutral.clone(), is_absent: false };
        let Some([data, set]) = engine.carry_out_both([data, set], round, self.timeout)? else {
            return Ok(false);
        };
        for run in [data, set].into_iter().flatten() {
            engine.hold_time(run, is_held);
        }
        (self.combined[0], self.set, self.has_started_data) = (data, set, true);
        if set.is_none() {
            self.note_set();
        }
        Ok(true)
    }

    /// Stores this rank's bits where the run of the set reads them.
    fn store_set(&mut self, gives: bool, corrects: bool) {
        let half = RankSet::words_for(self.ranks);
        let (index, bit) = ((self.rank / u64::BITS) as usize, 1u64 << (self.rank % u64::BITS));
        let input = &self.memory.set[0];
        let words = &mut self.set_words;
        words.fill(0);
        words[index] = if gives { bit } else { 0 };
        if corrects {
            words[half + index] = bit;
        }
        #[cfg(test)]
        if self.mutant == Some(Mutant::BitTwice) && self.rank == 0 {
            words[index] *= 2;
        }
        input.store(bytemuck::cast_slice(words));
    }

    /// The run of the set has ended.
    fn note_set(&mut self) {
        self.memory.set[1].load(bytemuck::cast_slice_mut(&mut self.set_words));
        self.contributors = self.read_set(0);
        if self.bound.corrects {
            self.corrected = self.read_set(RankSet::words_for(self.ranks));
        }
        self.is_set_wrong = self.has_wrong_bits();
    }

    /// The set that has come out in the words from `first` on.
    fn read_set(&self, first: usize) -> RankSet {
        RankSet::of_words(self.set_words[first..first + RankSet::words_for(self.ranks)].to_vec())
    }

    /// Starts the runs of the data, unless sums are exact.
    fn start_data(&mut self, engine: &mut Engine, divide_by: Option<u32>) -> Result<(), StartError> {
        let DataPlans::Combined(plan) = &self.data else { return Ok(()) };
        let Binding { given, late, corrects, result, is_held } = self.bound;
        let RoundsMemory { contributions, results, corrections, neutral, .. } = &self.memory;
        #[cfg(test)]
        let is_mute = self.mutant == Some(Mutant::MuteContribution) && self.rank == 1;
        let mut start = |given: Option<Contributions>, output: &Bytes| -> Result<RunId, StartError> {
            let contribution = given.and_then(|given| given.iter().next());
            let input = contribution.map_or(neutral, |contribution| &contributions[contribution]);
            let is_absent = contribution.is_none();
            #[cfg(test)]
            let is_absent = is_absent || is_mute;
            // Peers read nothing of an input that is absent.
            let round = RoundInput { divide_by, neutral: neutral.clone(), is_absent };
            let run = engine.start_round(round, plan, [input.clone(), output.clone()], self.timeout)?;
            engine.hold_time(run, is_held);
            Ok(run)
        };
        self.has_started_data = true;
        self.combined[0] = Some(start(given, &results[result])?);
        if corrects {
            self.combined[1] = Some(start(late, &corrections[result])?);
        }
        Ok(())
    }

    /// Goes on with the exact sums.
    fn advance_exact(&mut self, engine: &mut Engine) -> Result<bool, StartError> {
        let DataPlans::Exact(exact) = &mut self.data else { return Ok(false) };
        let divide_by = match (self.set, self.division) {
            (Some(_), _) => None,
            (None, Divisor::None) => Some(1),
            (None, Divisor::World) => Some(self.ranks),
            (None, Divisor::Contributors) => Some(self.contributors.len().max(1)),
        };
        let RoundsMemory { contributions, results, corrections, .. } = &self.memory;
        let inputs = |given: Option<Contributions>| -> Vec<&Bytes> {
            given.into_iter().flat_map(Contributions::iter).map(|it| &contributions[it]).collect()
        };
        let Binding { given, late, corrects, result, .. } = self.bound;
        let mut parts = vec![Part { inputs: inputs(given), result: &results[result] }];
        if corrects {
            parts.push(Part { inputs: inputs(late), result: &corrections[result] });
        }
        exact.advance(engine, divide_by, &parts, self.timeout)
    }

    /// Looks what has ended; true when anything has.
    pub(crate) fn advance(&mut self, engine: &mut Engine) -> Result<bool, StartError> {
        let mut moved = take_ended(&mut self.set, engine);
        if moved {
            self.note_set();
            if self.is_set_wrong {
                return Ok(moved);
            }
            if !self.has_started_data {
                self.start_data(engine, Some(self.contributors.len().max(1)))?;
            }
        }
        moved |= self.advance_exact(engine)?;
        for run in &mut self.combined {
            moved |= take_ended(run, engine);
        }
        Ok(moved)
    }

    /// Whether a set cannot have come about by each rank adding its own bit.
    fn has_wrong_bits(&self) -> bool {
        let sets = [(&self.contributors, self.bound.given), (&self.corrected, self.bound.late)];
        let is_wrong = |(set, own): (&RankSet, Option<Contributions>)| {
            set.contains(self.rank) != own.is_some() || !set.is_below(self.ranks)
        };
        sets.into_iter().any(is_wrong)
    }

    pub(crate) fn stage(&self) -> Stage {
        let have_data_ended = match &self.data {
            DataPlans::Combined(_) => self.has_started_data && self.combined == [None; 2],
            DataPlans::Exact(exact) => exact.is_idle(),
        };
        match self.set {
            _ if self.is_set_wrong => Stage::WrongSet,
            None if have_data_ended => Stage::Ended,
            _ => Stage::UnderWay,
        }
    }

    /// Whose contributions are in the result, and whose are in the correction, of a round that has
    /// ended.
    pub(crate) fn take_sets(&mut self) -> (RankSet, RankSet) {
        (std::mem::take(&mut self.contributors), std::mem::take(&mut self.corrected))
    }
}

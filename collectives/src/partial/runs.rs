//! The runs of the round that a rank is bound to. One reduces the data, and its signals tell the
//! set (the engine's `run::absence`). Late contributions that are reduced apart have another run.
//! Where signals do not tell the set, one more run adds it ([`SetSum`]): with more than
//! [`CONTRIBUTORS_MAX`] ranks, without data, and where sums are exact, which take several runs, one
//! after the other.
//!
//! **Invariant:** all runs of a round read what was bound to it, at one instant. So the set is that
//! of the data. All ranks start them in the same order, which the activation alone says.

use std::sync::Arc;
use std::time::Duration;

use pleach_vocabulary::Rank;

use super::RankSet;
use super::activation::{Divisor, Terms};
use super::contributions::{Contribution, Contributions};
use super::exact::{ExactSums, Part};
#[cfg(test)]
use super::rounds::Mutant;
use super::set_sum::SetSum;
use crate::engine::{
    Bytes, CONTRIBUTORS_MAX, Contributors, Engine, Plan, RoundDivisor, RoundInput, RoundRun, RunId,
    StartError,
};

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

/// Whether signals tell the set of rounds of so many ranks and elements.
pub(crate) fn is_set_told(is_exact: bool, ranks: u32, len: usize) -> bool {
    !is_exact && ranks <= CONTRIBUTORS_MAX && len > 0
}

/// What a rank is bound to a round with.
#[derive(Clone, Copy, Debug)]
struct Binding {
    given: Option<Contributions>,
    late: Option<Contributions>,
    /// What this rank tells of itself: whether it contributes, to the data and to the correction.
    gives: [bool; 2],
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
    data: DataPlans,
    memory: RoundsMemory,
    bound: Binding,
    /// Where signals do not tell the set.
    set: Option<SetSum>,
    /// Whose contributions are in the result, and whose are in the correction, once they are known.
    contributors: RankSet,
    corrected: RankSet,
    /// Of sums that are not exact: data, then correction.
    combined: [Option<RunId>; 2],
    has_started: [bool; 2],
    is_set_wrong: bool,
    /// What is to be done wrong.
    #[cfg(test)]
    mutant: Option<Mutant>,
}

impl RoundRuns {
    /// No round is bound.
    pub(crate) fn new(
        (rank, ranks): (Rank, u32),
        terms: &Terms,
        timeout: Duration,
        (set, data): (Option<SetSum>, DataPlans),
        memory: RoundsMemory,
    ) -> Self {
        let bound = Binding {
            given: None,
            late: None,
            gives: [false; 2],
            corrects: false,
            result: 0,
            is_held: false,
        };
        Self {
            rank,
            ranks,
            division: terms.activation.division(),
            timeout,
            data,
            memory,
            bound,
            set,
            contributors: RankSet::default(),
            corrected: RankSet::default(),
            combined: [None; 2],
            has_started: [false; 2],
            is_set_wrong: false,
            #[cfg(test)]
            mutant: None,
        }
    }

    /// Has the runs do something wrong.
    #[cfg(test)]
    pub(crate) fn mutate(&mut self, mutant: Option<Mutant>) {
        self.mutant = mutant;
        if mutant == Some(Mutant::OtherBit) {
            self.set.iter_mut().for_each(SetSum::add_bit_twice);
        }
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
        self.set.iter().for_each(|set| set.hold_time(engine, false));
        self.combined.into_iter().flatten().for_each(|run| engine.hold_time(run, false));
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
        let gives = [given, late].map(|given| given.is_some());
        self.bound = Binding { given, late, gives, corrects, result, is_held };
        (self.contributors, self.corrected) = (RankSet::default(), RankSet::default());
        (self.has_started, self.is_set_wrong) = ([false; 2], false);
        #[cfg(test)]
        if self.mutant == Some(Mutant::TornBinding) {
            self.bound.given = None;
        }
        // Peers wait for data longer than for the set. Where the set is the divisor, it goes first.
        if self.set.is_none() || self.division != Divisor::Contributors {
            self.start_data(engine, may_wait && self.set.is_none())?;
        }
        if let Some(set) = &mut self.set {
            set.start(engine, self.bound.gives, self.timeout)?;
            set.hold_time(engine, is_held);
        }
        if let DataPlans::Exact(exact) = &mut self.data {
            exact.bind(engine, &[self.bound.given, late], self.timeout)?;
        }
        Ok(())
    }

    /// Starts the runs of the data, unless sums are exact.
    fn start_data(&mut self, engine: &mut Engine, may_wait: bool) -> Result<(), StartError> {
        self.start_combined(engine, 0, may_wait && !self.bound.corrects)?;
        self.start_correction(engine)?;
        Ok(())
    }

    /// Starts the run of the correction when its divisor is known, which is that of the data; true
    /// if it was started.
    fn start_correction(&mut self, engine: &mut Engine) -> Result<bool, StartError> {
        let is_divisor_known =
            self.division != Divisor::Contributors || self.set.is_some() || self.combined[0].is_none();
        let starts = self.bound.corrects && self.has_started == [true, false] && is_divisor_known;
        if starts {
            self.start_combined(engine, 1, false)?;
        }
        Ok(starts)
    }

    /// Starts the run of the data or, as the other `part`, that of the correction.
    fn start_combined(&mut self, engine: &mut Engine, part: usize, may_wait: bool) -> Result<(), StartError> {
        self.has_started[part] = true;
        let DataPlans::Combined(plan) = &self.data else { return Ok(()) };
        let RoundsMemory { contributions, results, corrections, neutral, .. } = &self.memory;
        let output = &[results, corrections.as_slice()][part][self.bound.result];
        let given = [self.bound.given, self.bound.late][part];
        let contribution = given.and_then(|given| given.iter().next());
        // Peers read nothing of an input that is absent.
        let input = contribution.map_or(neutral, |contribution| &contributions[contribution]);
        let divisor = match self.division {
            Divisor::None | Divisor::World => RoundDivisor::Ranks,
            Divisor::Contributors if self.set.is_none() && part == 0 => RoundDivisor::Contributors,
            Divisor::Contributors => RoundDivisor::Number(self.contributors.len().max(1)),
        };
        let (is_absent, others) = (contribution.is_none(), Contributors::among(self.ranks));
        let contributors = if self.bound.gives[part] { others.with(self.rank) } else { others };
        #[cfg(test)]
        let (is_absent, contributors) = match self.mutant {
            Some(Mutant::MuteContribution) if self.rank == 1 => (true, contributors),
            Some(Mutant::OtherBit) if self.rank == 0 => (is_absent, others.with(1)),
            _ => (is_absent, contributors),
        };
        let round = RoundInput { divisor, neutral: neutral.clone(), is_absent, contributors };
        let run = if may_wait {
            engine.carry_out_round(round, plan, [input, output], self.timeout)?
        } else {
            let run = engine.start_round(round, plan, [input.clone(), output.clone()], self.timeout)?;
            RoundRun::UnderWay(run)
        };
        match run {
            RoundRun::CarriedOut { contributors } => self.note_told(part, contributors),
            RoundRun::UnderWay(run) => {
                engine.hold_time(run, self.bound.is_held);
                self.combined[part] = Some(run);
                // Before another run takes its place.
                self.take_combined(engine, part);
            }
        }
        Ok(())
    }

    /// Whether the run of this part has ended; then its set is known, if signals tell it.
    fn take_combined(&mut self, engine: &mut Engine, part: usize) -> bool {
        let Some(run) = self.combined[part].take_if(|run| engine.has_ended(*run)) else { return false };
        let contributors = engine.contributors(run);
        let has_ended = matches!(engine.take_outcome(run), Some(Ok(())));
        if has_ended {
            self.note_told(part, contributors.expect("asked before another call is made"));
        }
        has_ended
    }

    /// The signals of a part's run have told these contributors, by bits.
    fn note_told(&mut self, part: usize, contributors: u32) {
        if self.set.is_some() {
            return;
        }
        let set = RankSet::of_words(&[contributors.into()]);
        let own = [self.bound.given, self.bound.late][part];
        self.is_set_wrong |= set.contains(self.rank) != own.is_some();
        *[&mut self.contributors, &mut self.corrected][part] = set;
    }

    /// Goes on with the exact sums.
    fn advance_exact(&mut self, engine: &mut Engine) -> Result<bool, StartError> {
        let is_set_under_way = self.is_set_under_way();
        let DataPlans::Exact(exact) = &mut self.data else { return Ok(false) };
        let divide_by = match self.division {
            _ if is_set_under_way => None,
            Divisor::None => Some(1),
            Divisor::World => Some(self.ranks),
            Divisor::Contributors => Some(self.contributors.len().max(1)),
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
        let sets = self.set.as_mut().and_then(|set| set.take_ended(engine));
        let mut moved = sets.is_some();
        if let Some([contributors, late]) = sets {
            let corrected = if self.bound.corrects { late } else { RankSet::default() };
            (self.contributors, self.corrected) = (contributors, corrected);
            self.is_set_wrong = self.has_wrong_bits();
            if self.is_set_wrong {
                return Ok(moved);
            }
            if !self.has_started[0] {
                self.start_data(engine, false)?;
            }
        }
        moved |= self.advance_exact(engine)?;
        for part in 0..self.combined.len() {
            moved |= self.take_combined(engine, part);
        }
        Ok(self.start_correction(engine)? | moved)
    }

    /// Whether [`RoundRuns::advance`] has nothing to do, as far as that is soon found.
    pub(crate) fn are_all_under_way(&self, engine: &Engine) -> bool {
        match self.combined {
            [Some(run), None] => self.set.is_none() && !engine.has_ended(run),
            _ => false,
        }
    }

    fn is_set_under_way(&self) -> bool {
        self.set.as_ref().is_some_and(SetSum::is_under_way)
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
            DataPlans::Combined(_) => {
                self.has_started == [true, self.bound.corrects] && self.combined == [None; 2]
            }
            DataPlans::Exact(exact) => exact.is_idle(),
        };
        match have_data_ended && !self.is_set_under_way() {
            _ if self.is_set_wrong => Stage::WrongSet,
            true => Stage::Ended,
            false => Stage::UnderWay,
        }
    }

    /// Whose contributions are in the result, and whose are in the correction, of a round that has
    /// ended.
    pub(crate) fn take_sets(&mut self) -> (RankSet, RankSet) {
        (std::mem::take(&mut self.contributors), std::mem::take(&mut self.corrected))
    }
}

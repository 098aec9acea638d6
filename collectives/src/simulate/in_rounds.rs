//! The rounds of a partial all-reduce at one simulated rank: their memory, and a caller who
//! contributes, and takes results, without a thread of its own.
//!
//! **Invariant:** as [`RawPartial`](crate::RawPartial) does it: a contribution is stored where the
//! rounds do not read, and handed over together with a late one that they have given up.

use std::time::Duration;

use pleach_schedule::generate::Variant;
use pleach_transport::{SharedMemory, Slice};
use pleach_vocabulary::{Collective, DataType, Rank, ReduceOp};

use super::Member;
use super::in_window::elements;
use crate::call::{Counts, Descriptor};
use crate::engine::Bytes;
use crate::exact::BlockSums;
use crate::group::CollectiveError;
use crate::partial::{
    CONTRIBUTIONS, DataPlans, EXACT_CONTRIBUTIONS, ExactPlans, ExactSums, Late, Rounds, RoundsMemory, SetSum,
    Terms, is_set_told, neutral,
};

/// The memory of a rank's rounds, as its caller reaches it.
pub(crate) struct RoundsSlices {
    contributions: Vec<Slice>,
    results: Vec<Slice>,
    corrections: Vec<Slice>,
}

impl RoundsSlices {
    pub(crate) fn contribution(&self, number: usize) -> &Slice {
        &self.contributions[number]
    }

    pub(crate) fn result(&self, number: usize) -> &Slice {
        &self.results[number]
    }

    pub(crate) fn correction(&self, number: usize) -> &Slice {
        &self.corrections[number]
    }
}

/// Of vectors of so many elements and multiples of them the set is added.
const SET_SUM_EVERY: usize = 3;

/// Whether the set of rounds of so many ranks is added, and not told by signals.
pub(crate) fn is_set_added(terms: &Terms, ranks: u32) -> bool {
    let is_exact = terms.data_type == DataType::F64;
    !is_set_told(is_exact, ranks, terms.len) || terms.len.is_multiple_of(SET_SUM_EVERY)
}

/// Makes the rounds of a rank at a place among so many; `None` leaves it to the planner how their
/// data are reduced. Sums of `f64` are exact.
///
/// # Errors
///
/// No schedule carries them out.
pub(crate) fn make_rounds(
    member: &mut Member,
    place: (Rank, u32),
    terms: &Terms,
    variant: Option<&Variant>,
    timeout: Duration,
) -> Result<(Rounds, RoundsSlices), CollectiveError> {
    let Terms { len, data_type, activation, .. } = *terms;
    let is_exact = data_type == DataType::F64;
    let mut register = |bytes: usize| {
        let memory = SharedMemory::new(bytes.max(1)).expect("memory of a simulated caller");
        let region = member.engine.device().register(memory).expect("shared memory");
        region.slice(0..bytes).expect("as long as asked for")
    };
    let bytes = len * data_type.bytes();
    let mut all_of = |count: usize| -> Vec<Slice> { (0..count).map(|_| register(bytes)).collect() };
    let named = |slices: &[Slice]| -> Vec<Bytes> {
        slices.iter().map(|slice| Bytes::Registered(slice.clone())).collect()
    };
    let own = RoundsSlices {
        contributions: all_of(if is_exact { EXACT_CONTRIBUTIONS } else { CONTRIBUTIONS }),
        results: all_of(3),
        corrections: all_of(3),
    };
    let neutral_slice = register(bytes);
    neutral_slice.store(&neutral(data_type, activation.op()).repeat(len));
    let set_words = SetSum::words(terms, place.1);
    let set_memory = [register(set_words * 8), register(set_words * 8)];
    let memory = RoundsMemory {
        contributions: named(&own.contributions),
        results: named(&own.results).try_into().expect("three"),
        corrections: named(&own.corrections),
        neutral: Bytes::Registered(neutral_slice),
    };
    let mut plan = |data_type, op, count, variant: Option<&Variant>| {
        let (collective, counts) = (Collective::AllReduce, Counts::Each(count));
        let amount = counts.amount();
        let descriptor = Descriptor { collective, amount, data_type, op, tag: 0 };
        member.planner.plan(&descriptor, &counts, variant).cloned()
    };
    let data = if is_exact {
        let sums = BlockSums::new(data_type, len);
        let parts = if activation.late_rule() == Late::Correct { 2 } else { 1 };
        let facts = plan(DataType::I32, ReduceOp::Max, ExactSums::facts_len(sums, parts), None)?;
        let possible = sums.possible_words().into_iter();
        let by_words = possible.map(|words| Ok((words, plan(DataType::I64, ReduceOp::Sum, words, None)?)));
        let plans = ExactPlans { facts, words: by_words.collect::<Result<_, CollectiveError>>()? };
        DataPlans::Exact(Box::new(ExactSums::new(sums, plans, parts, EXACT_CONTRIBUTIONS)))
    } else {
        DataPlans::Combined(plan(data_type, Rounds::data_op(terms), len, variant)?)
    };
    // Some lengths stand for rounds of so many ranks that signals do not tell the set.
    let set = if is_set_added(terms, place.1) {
        Some(SetSum::new(place, plan(DataType::U64, ReduceOp::Sum, set_words, None)?, set_memory))
    } else {
        None
    };
    Ok((Rounds::new(place, terms, timeout, (set, data), memory), own))
}

/// A round that has ended, as a rank sees it.
#[derive(Clone, Debug, PartialEq)]
pub struct RoundSeen {
    /// How many ranks have contributed.
    pub contributors: u32,
    /// What their contributions come to.
    pub result: Vec<f32>,
    /// What late contributions come to, where they are reduced apart and there are some.
    pub correction: Option<Vec<f32>>,
}

/// The rounds of `f32` of one rank, whose [`Member`] has them.
pub(crate) struct RankRounds {
    memory: RoundsSlices,
    /// The contribution that is stored next.
    current: usize,
}

/// The rounds that were made for the rank.
fn rounds_of(member: &mut Member) -> &mut Rounds {
    member.rounds.as_mut().expect("made with the rank")
}

impl RankRounds {
    /// Makes the rounds of a rank, which are the member's then.
    pub(crate) fn new(
        member: &mut Member,
        place: (Rank, u32),
        terms: &Terms,
        timeout: Duration,
    ) -> Result<Self, CollectiveError> {
        let (rounds, memory) = make_rounds(member, place, terms, None, timeout)?;
        let current = rounds.free_contribution();
        member.rounds = Some(rounds);
        Ok(Self { memory, current })
    }

    /// See [`Partial::contribute`](crate::Partial::contribute); the result is there later.
    pub(crate) fn contribute(&mut self, member: &mut Member, contribution: &[f32]) {
        let mut contribution = contribution.to_vec();
        let rounds = rounds_of(member);
        while let Some(late) = rounds.take_late() {
            let late = elements(self.memory.contribution(late));
            contribution.iter_mut().zip(late).for_each(|(sum, late)| *sum += late);
        }
        self.memory.contribution(self.current).store(bytemuck::cast_slice(&contribution));
        rounds.hand_over(self.current, Vec::new());
        let Member { engine, rounds, .. } = member;
        rounds.iter_mut().for_each(|rounds| rounds.begin(engine));
    }

    /// The round for which the rank waits, once it has ended.
    pub(crate) fn take(&mut self, member: &mut Member) -> Option<RoundSeen> {
        let rounds = rounds_of(member);
        let (ended, _, free) = rounds.take_ended()?;
        self.current = free;
        let late = ended.corrected.filter(|ranks| !ranks.is_empty());
        Some(RoundSeen {
            contributors: ended.contributors.len(),
            result: elements(self.memory.result(ended.result)),
            correction: late.map(|_| elements(self.memory.correction(ended.result))),
        })
    }
}

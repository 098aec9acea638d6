//! A run in a round of a partial all-reduce: inputs that are absent, and who contributes.
//!
//! A rank that gives nothing to a round gives neutral elements, which nobody has to read. Combined
//! with anything, a neutral element leaves the other operand as it is, bit for bit
//! ([`crate::partial`]). So a step that combines leaves out the sources that are known to be
//! neutral, if there is another one. Three things are known: a rank's own input, from its call; a
//! peer's input, from the header of the peer's signals; and what this rank's scratch holds. A put
//! of neutral elements to scratch is a signal that says so, and moves no bytes.
//!
//! **Invariant:** a place that holds neutral elements is known to do so by every rank that reads
//! it, or holds their bytes. Scratch may be known to hold them and not hold their bytes: that is so
//! only in schedules in which no rank maps another's scratch, so its own rank alone reads it.
//! Outputs always hold their bytes.
//!
//! **Who contributes.** A rank knows of itself when its run begins. It tells all that it knows with
//! each signal of the run, and knows what it was told by the signals that it has waited for. Data
//! that depend on a rank's input reach another rank only behind a chain of signals of this run, as
//! the proof of the schedule orders them. That rank sends the first signal of the chain, and each
//! further sender passes on what it knows. So a rank that has combined all inputs knows all
//! contributors, and takes no other rank for one.
//!
//! A signal has room for [`CONTRIBUTORS_MAX`] ranks. Where there are more, none are told of.

use std::collections::BTreeSet;

use pleach_schedule::Part;
use pleach_transport::Slice;
use pleach_vocabulary::Rank;

use super::Run;
use crate::engine::Bytes;
use crate::engine::address::Address;
use crate::engine::plan::{ChunkStep, PlaceSlot, PutProgram};
use crate::engine::signals::{Header, InRound};

/// Most ranks of a round whose signals tell who contributes.
pub(crate) const CONTRIBUTORS_MAX: u32 = u32::BITS;

/// The ranks of which a rank knows that they contribute to a round, a bit each; see the module.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Contributors {
    known: u32,
    /// The bits of all ranks. Zero if the signals do not tell of ranks.
    ranks: u32,
}

impl Contributors {
    /// Those of rounds of so many ranks, of which none is known. Nothing is told of too many.
    pub(crate) fn among(ranks: u32) -> Self {
        let told = (1..=CONTRIBUTORS_MAX).contains(&ranks);
        Self { known: 0, ranks: if told { u32::MAX >> (CONTRIBUTORS_MAX - ranks) } else { 0 } }
    }

    /// The same, of which this one is known as well.
    #[must_use]
    pub(crate) fn with(self, rank: Rank) -> Self {
        Self { known: self.known | 1u32.checked_shl(rank).unwrap_or(0) & self.ranks, ..self }
    }

    /// Those that are known, by bits.
    pub(crate) fn known(self) -> u32 {
        self.known
    }

    /// What a signal tells of them. `is_neutral`: it is in place of a put of neutral elements.
    #[inline]
    pub(in crate::engine) fn told(self, is_neutral: bool) -> InRound {
        InRound { is_neutral, contributors: self.known }
    }

    /// What a signal tells if it is of this run and history of calls.
    #[inline]
    pub(in crate::engine) fn of(self, header: &Header, run: u64, history: u64) -> Option<InRound> {
        header.in_round(run, history, self.ranks)
    }

    /// This rank has waited for a signal that tells this.
    #[inline]
    pub(in crate::engine) fn learn(&mut self, told: InRound) {
        self.known |= told.contributors;
    }
}

/// The divisor of an average in a round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RoundDivisor {
    /// The number of ranks.
    Ranks,
    /// This number.
    Number(u32),
    /// The number of contributors, which are known where a sum is complete.
    Contributors,
}

/// What a run in a round of a partial all-reduce needs beside its input and output.
#[derive(Clone, Debug)]
pub(crate) struct RoundInput {
    pub(crate) divisor: RoundDivisor,
    /// Neutral elements, as many as the input has.
    pub(crate) neutral: Bytes,
    /// The input is nothing but neutral elements.
    pub(crate) is_absent: bool,
    /// This rank, if its input is not absent.
    pub(crate) contributors: Contributors,
}

impl RoundInput {
    /// The divisor of an average over so many ranks, where all inputs are combined.
    pub(crate) fn divisor(&self, ranks: u32) -> u32 {
        match self.divisor {
            RoundDivisor::Ranks => ranks,
            RoundDivisor::Number(number) => number,
            RoundDivisor::Contributors => self.contributors.known.count_ones().max(1),
        }
    }
}

/// What a run knows to be absent, and who contributes; see the module.
pub(crate) struct Absence {
    input: RoundInput,
    /// Places of this rank's scratch that hold nothing but neutral elements, by their offsets in
    /// the bank.
    scratch: BTreeSet<u64>,
}

impl Absence {
    pub(crate) fn new(input: RoundInput) -> Self {
        Self { input, scratch: BTreeSet::new() }
    }

    /// The divisor of an average over so many ranks, where all inputs are combined.
    pub(crate) fn divisor(&self, ranks: u32) -> u32 {
        self.input.divisor(ranks)
    }

    /// Whether this rank's input is absent.
    pub(crate) fn is_absent(&self) -> bool {
        self.input.is_absent
    }

    /// Who contributes, as far as this rank knows.
    pub(crate) fn contributors(&self) -> Contributors {
        self.input.contributors
    }

    /// A place of this rank was written, or is to be taken for written.
    fn note(&mut self, scratch_offset: u64, is_neutral: bool) {
        if is_neutral {
            self.scratch.insert(scratch_offset);
        } else {
            self.scratch.remove(&scratch_offset);
        }
    }
}

/// Whether the place is scratch of this rank of which nobody else has to know what it holds.
fn is_kept(step: ChunkStep<'_>, place: &PlaceSlot) -> bool {
    let plan = step.plan();
    matches!(place.part, Part::Scratch(_)) && plan.is_own(place) && plan.keeps_scratch_to_itself()
}

impl Run {
    /// Whether the place is known to hold nothing but neutral elements.
    #[inline]
    pub(crate) fn is_neutral(&self, step: ChunkStep<'_>, place: PlaceSlot) -> bool {
        self.parameters.round.as_ref().is_some_and(|round| match place.part {
            Part::Input | Part::SharedInput if step.plan().is_own(&place) => round.is_absent(),
            Part::SharedInput => self.memory.is_absent(&place),
            Part::Scratch(_) if is_kept(step, &place) => {
                round.scratch.contains(&step.scratch_offset(place.slot))
            }
            Part::Input | Part::Output | Part::SharedOutput | Part::Scratch(_) => false,
        })
    }

    /// Where as many neutral elements are as the longest chunk has.
    pub(crate) fn neutral_address(&self) -> Option<Address> {
        self.parameters.round.as_ref().map(|round| round.input.neutral.base())
    }

    /// The same memory, to be put.
    pub(crate) fn neutral_elements(&self) -> Option<&Slice> {
        match &self.parameters.round.as_ref()?.input.neutral {
            Bytes::Registered(slice) | Bytes::Staged(slice) => Some(slice),
            Bytes::None | Bytes::Lent(_) | Bytes::Private { .. } => None,
        }
    }

    /// Whether nothing but neutral elements would be stored, and only where this rank alone has to
    /// know it. Then it knows, and nothing need be stored.
    pub(crate) fn leaves_out(&mut self, step: ChunkStep<'_>, from: &[PlaceSlot], into: &[PlaceSlot]) -> bool {
        let leaves_out = self.parameters.round.is_some()
            && into.iter().all(|place| is_kept(step, place))
            && from.iter().all(|place| self.is_neutral(step, *place));
        if leaves_out {
            self.note_written(step, into, true);
        }
        leaves_out
    }

    /// A step stores bytes in these places.
    pub(crate) fn note_stored(&mut self, step: ChunkStep<'_>, into: &[PlaceSlot]) {
        if self.parameters.round.is_some() {
            self.note_written(step, into, false);
        }
    }

    fn note_written(&mut self, step: ChunkStep<'_>, into: &[PlaceSlot], is_neutral: bool) {
        let Some(round) = &mut self.parameters.round else { return };
        for place in into.iter().filter(|place| is_kept(step, place)) {
            round.note(step.scratch_offset(place.slot), is_neutral);
        }
    }

    /// A signal of this round has come, with the data of a put to this place or in place of it.
    /// False: it is in place of a put whose bytes are needed.
    pub(crate) fn note_put(&mut self, step: ChunkStep<'_>, told: InRound, into: Option<PlaceSlot>) -> bool {
        if let Some(round) = &mut self.parameters.round {
            round.input.contributors.learn(told);
        }
        let Some(place) = into.filter(|place| is_kept(step, place)) else { return !told.is_neutral };
        self.note_written(step, &[place], told.is_neutral);
        true
    }

    /// Whether a put moves no bytes, as the peer takes its signal for neutral elements.
    pub(crate) fn is_told_alone(&self, step: ChunkStep<'_>, put: &PutProgram) -> bool {
        self.parameters.round.is_some()
            && matches!(put.dst.part, Part::Scratch(_))
            && step.plan().keeps_scratch_to_itself()
            && self.is_neutral(step, put.src)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn as_many_ranks_are_told_of_as_a_signal_has_room_for() {
        for (ranks, bits) in [(1, 1), (2, 0b11), (32, u32::MAX), (33, 0), (1000, 0)] {
            let all = (0..ranks).fold(Contributors::among(ranks), Contributors::with);
            assert_eq!(all.known(), bits, "{ranks} ranks");
        }
        assert_eq!(Contributors::among(3).with(3).with(40).known(), 0, "no ranks of the group");
    }

    #[test]
    fn an_average_is_divided_by_those_that_are_known_then() {
        let contributors = Contributors::among(4).with(1);
        let (neutral, divisor) = (Bytes::None, RoundDivisor::Contributors);
        let mut round = RoundInput { divisor, neutral, is_absent: false, contributors };
        let header = Header::new(5, 77, 5).telling(Contributors::among(4).with(3).told(false));
        let told = contributors.of(&header, 5, 77).expect("of this run");
        round.contributors.learn(told);
        assert_eq!((round.divisor(4), round.contributors.known()), (2, 0b1010));
        let divisor = |divisor| RoundInput { divisor, ..round.clone() }.divisor(4);
        assert_eq!([RoundDivisor::Ranks, RoundDivisor::Number(3)].map(divisor), [4, 3]);
    }
}

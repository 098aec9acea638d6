//! The end of a training whose ranks write to each other, and the words of such trainings.
//!
//! A rank that has made its last step tells each peer how many writes it has sent to it. Words and
//! writes of one rank come in their order. So a rank that all peers have told has heard of all
//! writes, and can compare their numbers. No peer reads or writes any more.

use pleach_collectives::Rank;

use crate::policy::{Action, Actions};
use crate::shares::WindowPlan;
use crate::state::{Remembered, State};

/// A word between policies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Word {
    /// A round or a turn may begin.
    Round(u64),
    /// The sender writes no more; it has sent so many writes to the receiver.
    Finished(u64),
    /// The sender has heard of all writes; its result. Also the answer to a question.
    Result(u64),
    /// The sender holds so many updates of the receiver.
    Held(u64),
}

/// Bits of the number in a word. The bits above them say which word it is.
const NUMBER_BITS: u32 = 62;

impl Word {
    /// The largest number. A larger one is sent as this one.
    pub(crate) const MOST: u64 = (1 << NUMBER_BITS) - 1;

    pub(crate) fn encode(self) -> u64 {
        let (kind, number) = match self {
            Self::Round(number) => (0, number),
            Self::Finished(number) => (1, number),
            Self::Result(number) => (2, number),
            Self::Held(number) => (3, number),
        };
        kind << NUMBER_BITS | number.min(Self::MOST)
    }

    pub(crate) fn decode(word: u64) -> Self {
        let number = word & Self::MOST;
        match word >> NUMBER_BITS {
            0 => Self::Round(number),
            1 => Self::Finished(number),
            2 => Self::Result(number),
            _ => Self::Held(number),
        }
    }

    pub(crate) fn tell(self, to: Rank, actions: &mut Actions) {
        actions.push(Action::Tell { to, word: self.encode() });
    }
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Finish {
    plan: WindowPlan,
    /// By rank: the writes sent to it.
    sent: Vec<u64>,
    /// By rank: the writes of it that have come.
    come: Vec<u64>,
    /// By rank: the writes that it has sent, once it has told.
    told: Vec<Option<u64>>,
    /// Whether any has told.
    is_told: bool,
    /// The first peer that has not told, or the number of ranks. It is not looked for anew at each
    /// word, as there are words of all ranks.
    missing: Rank,
    has_begun: bool,
}

impl Finish {
    pub(crate) fn new(plan: WindowPlan) -> Self {
        let ranks = plan.ranks as usize;
        let mut finish = Self {
            plan,
            sent: vec![0; ranks],
            come: vec![0; ranks],
            told: vec![None; ranks],
            is_told: false,
            missing: 0,
            has_begun: false,
        };
        finish.look_for_missing();
        finish
    }

    fn look_for_missing(&mut self) {
        let has_told = |rank: Rank| rank == self.plan.rank || self.has_told(rank);
        let missing = (self.missing..self.plan.ranks).find(|rank| !has_told(*rank));
        self.missing = missing.unwrap_or(self.plan.ranks);
    }

    /// All ranks but this one.
    pub(crate) fn peers(&self) -> impl Iterator<Item = Rank> + use<> {
        self.plan.peers()
    }

    /// Notes a write to a rank.
    pub(crate) fn sent(&mut self, to: Rank) {
        self.sent[to as usize] += 1;
    }

    /// Notes that the last write to a rank was refused.
    pub(crate) fn refused(&mut self, by: Rank) {
        self.sent[by as usize] -= 1;
    }

    /// Notes a write of a rank; returns whether that has not told that it writes no more.
    pub(crate) fn came(&mut self, from: Rank) -> bool {
        self.come[from as usize] += 1;
        !self.has_told(from)
    }

    /// Notes that a rank writes no more; returns whether it has not told that before.
    pub(crate) fn told(&mut self, from: Rank, sent: u64) -> bool {
        let is_first = self.told[from as usize].replace(sent).is_none();
        self.is_told = true;
        self.look_for_missing();
        is_first
    }

    /// Whether a rank has told that it writes no more.
    pub(crate) fn has_told(&self, from: Rank) -> bool {
        self.is_told && self.told[from as usize].is_some()
    }

    /// This rank writes and reads no more.
    pub(crate) fn begin(&mut self, actions: &mut Actions) {
        self.has_begun = true;
        for peer in self.plan.peers() {
            Word::Finished(self.sent[peer as usize]).tell(peer, actions);
        }
    }

    /// Whether this rank has made its last step.
    pub(crate) fn has_begun(&self) -> bool {
        self.has_begun
    }

    /// A peer that may write or read still; `None` at the end of all.
    pub(crate) fn missing(&self) -> Option<Rank> {
        Some(self.missing).filter(|peer| *peer < self.plan.ranks)
    }

    /// Whether each write of each peer has come once. To be asked when none is missing.
    pub(crate) fn has_all(&self) -> bool {
        self.plan.peers().all(|peer| self.told[peer as usize] == Some(self.come[peer as usize]))
    }
}

impl Remembered for Finish {
    fn visit(&mut self, state: &mut State<'_>) {
        state.field(&mut self.sent);
        state.field(&mut self.come);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_word_comes_back_from_its_number() {
        for number in [0, 1, 77, Word::MOST] {
            for word in
                [Word::Round(number), Word::Finished(number), Word::Result(number), Word::Held(number)]
            {
                assert_eq!(Word::decode(word.encode()), word);
            }
        }
        assert_eq!(Word::decode(Word::Result(u64::MAX).encode()), Word::Result(Word::MOST));
    }
}

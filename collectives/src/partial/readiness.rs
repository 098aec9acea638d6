//! A rank's word to rank 0 about its readiness, a number in a signal slot.
//!
//! **Invariant:** each word of a rank is a greater number than the word before, so that the newest
//! word is the greatest. A word is about a round, and holds for later rounds as far as
//! [`ReadyWord::of`] says.

use pleach_vocabulary::Rank;

/// What a rank has said of a round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Readiness {
    /// Nothing: its caller computes.
    Silent,
    /// It has a contribution.
    Ready,
    /// It has nothing to give, and waits for the round.
    Abstains,
    /// It has had nothing to give in an earlier round, and has said nothing since.
    Absent,
    /// It will give nothing any more, and waits for the last round.
    Finished,
}

/// By number, as a word has them.
const ALL: [Readiness; 5] =
    [Readiness::Abstains, Readiness::Finished, Readiness::Ready, Readiness::Silent, Readiness::Absent];

/// The bits of a word: the readiness, how many words of the round came before, and the round plus
/// one.
const READINESS_BITS: u32 = 3;
const ROUND_SHIFT: u32 = 16;

/// See the module. The default is that of a rank that has said nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct ReadyWord(u64);

impl ReadyWord {
    /// The word in a signal slot.
    pub(crate) fn heard(number: u64) -> Self {
        Self(number)
    }

    /// The number for a signal slot.
    pub(crate) fn number(self) -> u64 {
        self.0
    }

    /// The word that says this of a round, said after this one.
    pub(crate) fn then(self, round: u64, readiness: Readiness) -> Self {
        let first = (round + 1) << ROUND_SHIFT;
        // A rank says few words a round: its caller waits for the round after each.
        let number = if self.0 >= first { (self.0 >> READINESS_BITS) + 1 } else { first >> READINESS_BITS };
        let kind = ALL.iter().position(|other| *other == readiness).unwrap_or(0) as u64;
        Self(number << READINESS_BITS | kind)
    }

    /// What it says of its own round. A number that no rank says is silent.
    pub(crate) fn readiness(self) -> Readiness {
        let kind = (self.0 & ((1 << READINESS_BITS) - 1)) as usize;
        ALL.get(kind).copied().unwrap_or(Readiness::Silent)
    }

    /// The round that it is about; `None`: nothing was said.
    pub(crate) fn round(self) -> Option<u64> {
        (self.0 >> ROUND_SHIFT).checked_sub(1)
    }

    /// What it says of a round; in the rounds from `all_present` on no rank is absent that was so
    /// before.
    pub(crate) fn of(self, round: u64, all_present: u64) -> Readiness {
        let Some(own) = self.round() else { return Readiness::Silent };
        match self.readiness() {
            Readiness::Abstains | Readiness::Absent if own < all_present => Readiness::Silent,
            Readiness::Abstains if own >= round => Readiness::Abstains,
            Readiness::Abstains | Readiness::Absent => Readiness::Absent,
            Readiness::Ready if own < round => Readiness::Silent,
            readiness => readiness,
        }
    }
}

/// The newest words of all ranks, as rank 0 has heard them.
pub(crate) struct ReadyWords(Vec<ReadyWord>);

impl ReadyWords {
    /// Nothing was said.
    pub(crate) fn new(ranks: u32) -> Self {
        Self(vec![ReadyWord::default(); ranks as usize])
    }

    /// Takes each rank's word, unless a newer one was heard.
    pub(crate) fn hear(&mut self, heard: impl Fn(Rank) -> ReadyWord) {
        for (word, rank) in self.0.iter_mut().zip(0..) {
            *word = heard(rank).max(*word);
        }
    }

    /// What each rank says of a round, as in [`ReadyWord::of`].
    pub(crate) fn of(&self, round: u64, all_present: u64) -> impl Fn(Rank) -> Readiness {
        move |rank| self.0[rank as usize].of(round, all_present)
    }
}

#[cfg(test)]
mod tests {
    use super::Readiness::{Absent, Abstains, Finished, Ready, Silent};
    use super::*;

    #[test]
    fn words_grow_and_mean_what_was_said_until_their_round_has_passed() {
        let mut word = ReadyWord::default();
        assert_eq!((word.round(), word.of(0, 0)), (None, Silent));
        for (round, said) in
            [(0, Silent), (0, Abstains), (0, Ready), (1, Abstains), (3, Ready), (3, Abstains)]
        {
            let next = word.then(round, said);
            assert!(next > word, "{round} {said:?}");
            assert_eq!((next.readiness(), next.round()), (said, Some(round)));
            word = next;
        }
        let of_rounds = |said| [2, 3, 4].map(|round| ReadyWord::default().then(3, said).of(round, 0));
        assert_eq!(of_rounds(Ready), [Ready, Ready, Silent]);
        assert_eq!(of_rounds(Abstains), [Abstains, Abstains, Absent]);
        assert_eq!(of_rounds(Absent), [Absent; 3]);
        assert_eq!(of_rounds(Finished), [Finished; 3]);
        assert_eq!(of_rounds(Silent), [Silent; 3]);
        for (said, expected) in [(Absent, Silent), (Finished, Finished), (Ready, Ready)] {
            assert_eq!(ReadyWord::default().then(3, said).of(3, 4), expected);
        }
    }

    #[test]
    fn a_number_that_no_rank_says_is_silent() {
        for kind in ALL.len() as u64..1 << READINESS_BITS {
            assert_eq!(ReadyWord::heard(4 << ROUND_SHIFT | kind).of(3, 0), Silent);
        }
    }
}

//! Counts: the lengths of the parts of a call, and which ranks know them.
//!
//! A schedule does not depend on the lengths of parts. Ranks must agree on how each part is cut
//! into chunks, and where a peer's part begins. There are three kinds of [`Counts`]:
//!
//! * *Each*: all parts are equally long. The length is in the signature that every signal carries.
//! * *Listed*: every rank was given the same list. A digest of the list is in the signature.
//! * *Paired*: only the rank that gives a part and the rank that gets it know its length. Then no
//!   other rank may touch the part (`Program::is_private` of the engine). Nothing that all ranks
//!   must do alike depends on a length: the schedule, the size of chunks and the class of banks are
//!   those of parts of unknown length.
//!
//! **Invariant:** no byte of a part is used, and none is written to a peer's slice, before the two
//! ranks have compared their counts. For *paired* counts the two ranks compare like this:
//!
//! * A rank marks every signal to a peer: it mixes the signature with the two counts between the
//!   two, given and taken ([`PairCounts::mark`]). A wait for a signal of the peer completes only if
//!   the signal carries the mark that this rank computes from its own counts.
//! * Each of the two waits for a signal of the other before it touches the other's memory. A put
//!   waits until the part may come, a reader until the part may be read. So when their counts
//!   differ, both stay at their first wait and query each other.
//! * Query and answer carry both counts, and the call ends with a mismatch that names them. A third
//!   rank learns of the mismatch by the failure of the group. It may have ended this call before,
//!   and later calls that were under way at the same time.
//! * The addresses of buffers are also those of the pair: an address says where this part begins in
//!   the sender's slice, since the peer does not know the lengths of the parts before it.
//! * A peer that lies can spoil only the parts that it gives or gets. A reader reads as many bytes
//!   as its own count says. A put writes to the place that its receiver named, as many bytes as the
//!   sender's own count says.

use std::hash::Hasher;
use std::sync::Arc;

use pleach_vocabulary::digest::{Hasher64, chain};
use pleach_vocabulary::{Collective, Rank};

use super::Amount;

/// Elements of the parts of a call. See the module.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Counts {
    /// All parts have this many.
    Each(usize),
    /// By part; every rank has the same list.
    Listed(Arc<[usize]>),
    /// The parts that this rank gives and gets.
    Paired(Arc<Paired>),
}

/// The lengths of the parts that one rank gives to every rank and gets from it, by rank, in
/// elements.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Paired {
    /// To each rank.
    pub given: Vec<usize>,
    /// From each rank.
    pub taken: Vec<usize>,
}

/// The lengths of the parts between two ranks, in elements, as both must see them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PairCounts {
    pub(crate) low: Rank,
    pub(crate) high: Rank,
    /// From the lower rank to the higher one.
    pub(crate) up: u64,
    /// From the higher rank to the lower one.
    pub(crate) down: u64,
}

/// The schedule for paired counts is chosen as for parts of this many bytes.
const PAIRED_PLAN_BYTES: usize = 1 << 20;

/// Longest input or output of a call, in bytes: all that a process can address. The code computes
/// places of chunks in integers that can hold a multiple of this, so no count makes an integer
/// overflow.
pub(crate) const CALL_BYTES_MAX: usize = 1 << 47;

/// Why counts do not fit the call.
#[derive(Clone, Copy, pleach_derive::ErrorDebug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CountsError {
    /// The list has another number of counts.
    #[error("there are {actual} counts for {expected}")]
    Number {
        /// How many there must be.
        expected: usize,
        /// How many there are.
        actual: usize,
    },
    /// Input or output has another length than the counts say.
    #[error("the counts are those of {expected} bytes of {what}, which has {actual}")]
    Length {
        /// Input or output.
        what: &'static str,
        /// The length by the counts.
        expected: usize,
        /// Its length.
        actual: usize,
    },
    /// The parts are longer than any memory.
    #[error("the counts are those of more than {} bytes at one rank", CALL_BYTES_MAX)]
    TooLong,
    /// The parts of an output do not lie one after the other in the list.
    #[error("an all-to-all takes no list of all its counts; say what this rank gives and gets")]
    NotListed,
    /// A rank touches a part whose length only the two ends of the part know.
    #[error("the schedule leads parts over ranks that do not know how long they are; use direct")]
    NotPrivate,
}

impl Counts {
    /// Counts by a list. A list of equal counts becomes [`Self::Each`], so no counts have two
    /// forms.
    #[must_use]
    pub fn listed(list: &[usize]) -> Self {
        match list {
            [] => Self::Each(0),
            [first, rest @ ..] if rest.iter().all(|count| count == first) => Self::Each(*first),
            _ => Self::Listed(list.into()),
        }
    }

    /// Elements of a rank's input or output, whichever is longer.
    pub(crate) fn elements(&self, collective: Collective, (rank, ranks): (Rank, u32)) -> usize {
        match self {
            Self::Each(count) => {
                let inputs = collective.input_parts(rank, ranks).len();
                inputs.max(collective.output_parts(rank, ranks).len()).saturating_mul(*count)
            }
            Self::Listed(list) => sum(list.iter().copied()),
            Self::Paired(paired) => sum(paired.given.iter().copied()).max(sum(paired.taken.iter().copied())),
        }
    }

    /// Bytes of a part to choose a schedule for: the same on all ranks.
    #[must_use]
    pub fn plan_bytes(&self, element_bytes: usize) -> usize {
        self.longest().map_or(PAIRED_PLAN_BYTES, |count| count.saturating_mul(element_bytes))
    }

    /// Elements of the longest part, where all ranks know it.
    pub(crate) fn longest(&self) -> Option<usize> {
        match self {
            Self::Each(count) => Some(*count),
            Self::Listed(list) => Some(list.iter().copied().max().unwrap_or(0)),
            Self::Paired(_) => None,
        }
    }

    /// The amount that must be the same on all ranks.
    #[must_use]
    pub fn amount(&self) -> Amount {
        match self {
            Self::Each(count) => Amount::Each(*count as u64),
            Self::Listed(list) => {
                let mut hasher = Hasher64::default();
                list.iter().for_each(|count| hasher.write_u64(*count as u64));
                let digest = hasher.finish();
                let all = list.iter().fold(0u64, |sum, count| sum.saturating_add(*count as u64));
                Amount::Listed { all, digest: (digest ^ digest >> 32) as u32 }
            }
            Self::Paired(_) => Amount::Paired,
        }
    }

    /// Whether a collective of that many ranks can have these counts. `is_private`: no rank touches
    /// parts that it neither gives nor gets.
    pub(crate) fn check_for(
        &self,
        collective: Collective,
        ranks: u32,
        is_private: bool,
    ) -> Result<(), CountsError> {
        let number = |expected: u32, list: &[usize]| {
            let (expected, actual) = (expected as usize, list.len());
            if actual == expected { Ok(()) } else { Err(CountsError::Number { expected, actual }) }
        };
        match self {
            Self::Each(_) => Ok(()),
            Self::Listed(_) if collective == Collective::AllToAll => Err(CountsError::NotListed),
            Self::Listed(list) => number(collective.parts(ranks), list),
            Self::Paired(_) if !is_private => Err(CountsError::NotPrivate),
            Self::Paired(paired) => {
                number(ranks, &paired.given)?;
                number(ranks, &paired.taken)
            }
        }
    }

    /// Refuses counts of more bytes than there can be.
    pub(crate) fn check_sum(
        &self,
        collective: Collective,
        place: (Rank, u32),
        element_bytes: usize,
    ) -> Result<(), CountsError> {
        // Checked also if this rank has no part: its places are computed for the longest part.
        let longest = self.elements(collective, place).max(self.longest().unwrap_or(0));
        let bytes = longest.saturating_mul(element_bytes);
        if bytes <= CALL_BYTES_MAX { Ok(()) } else { Err(CountsError::TooLong) }
    }

    /// Whether input and output are as long as the counts say.
    pub(crate) fn check_lengths(
        &self,
        collective: Collective,
        (rank, ranks): (Rank, u32),
        element_bytes: usize,
        [input_bytes, output_bytes]: [usize; 2],
    ) -> Result<(), CountsError> {
        let (given, taken): (usize, usize) = match self {
            Self::Each(_) => return Ok(()),
            Self::Listed(list) => {
                let all = |parts: pleach_vocabulary::Parts| sum(parts.iter().map(|part| list[part as usize]));
                (all(collective.input_parts(rank, ranks)), all(collective.output_parts(rank, ranks)))
            }
            Self::Paired(paired) => (sum(paired.given.iter().copied()), sum(paired.taken.iter().copied())),
        };
        let length = |what, expected: usize, actual| {
            let expected = expected.saturating_mul(element_bytes);
            if actual == expected { Ok(()) } else { Err(CountsError::Length { what, expected, actual }) }
        };
        length("input", given, input_bytes)?;
        length("output", taken, output_bytes)
    }
}

fn sum(counts: impl Iterator<Item = usize>) -> usize {
    counts.fold(0, usize::saturating_add)
}

impl Paired {
    /// The lengths between this rank and a peer; `None` when there is no such peer.
    pub(crate) fn between(&self, own: Rank, peer: Rank) -> Option<PairCounts> {
        let given = *self.given.get(peer as usize)? as u64;
        let taken = *self.taken.get(peer as usize)? as u64;
        let (up, down) = if own < peer { (given, taken) } else { (taken, given) };
        Some(PairCounts { low: own.min(peer), high: own.max(peer), up, down })
    }
}

impl PairCounts {
    /// A signature for the signals between the two. Never zero.
    pub(crate) fn mark(self, signature: u64) -> u64 {
        chain(chain(signature, self.up), self.down).max(1)
    }

    pub(crate) fn amount(self) -> Amount {
        let Self { low, high, up, down } = self;
        Amount::Pair { low, high, up, down }
    }

    /// The lengths as words on the wire. A rooted collective uses only one direction.
    pub(crate) fn to_words(self, collective: Collective) -> [u64; 2] {
        match collective.root() {
            Some(root) => [u64::from(root), self.up.max(self.down)],
            None => [self.down, self.up],
        }
    }

    pub(crate) fn from_words(collective: Collective, low: Rank, high: Rank, words: [u64; 2]) -> Self {
        let (down, up) = match collective {
            Collective::Gather { root } if root == low => (words[1], 0),
            Collective::Gather { .. } => (0, words[1]),
            Collective::Scatter { root } if root == high => (words[1], 0),
            Collective::Scatter { .. } => (0, words[1]),
            _ => (words[0], words[1]),
        };
        Self { low, high, up, down }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_ranks_mark_alike_exactly_if_their_counts_agree() {
        let one = Paired { given: vec![0, 7, 3], taken: vec![0, 5, 1] };
        let other = Paired { given: vec![5, 2, 9], taken: vec![7, 2, 9] };
        let (there, back) = (one.between(0, 1).expect("a peer"), other.between(1, 0).expect("a peer"));
        assert_eq!(there, back);
        assert_eq!(there.mark(77), back.mark(77));
        let differing = Paired { given: vec![5, 2, 9], taken: vec![8, 2, 9] }.between(1, 0).expect("a peer");
        assert_ne!(there.mark(77), differing.mark(77));
        let exchanged = PairCounts { up: there.down, down: there.up, ..there };
        assert_ne!(there.mark(77), exchanged.mark(77));
        assert_ne!(there.mark(77), there.mark(78));
    }

    #[test]
    fn what_goes_between_two_ranks_survives_the_wire() {
        let between = |up, down| PairCounts { low: 2, high: 5, up, down };
        for (collective, sent) in [
            (Collective::AllToAll, between(u64::MAX, 1)),
            (Collective::Gather { root: 2 }, between(0, 9)),
            (Collective::Gather { root: 5 }, between(9, 0)),
            (Collective::Scatter { root: 2 }, between(9, 0)),
            (Collective::Scatter { root: 5 }, between(0, 9)),
        ] {
            let words = sent.to_words(collective);
            assert_eq!(PairCounts::from_words(collective, 2, 5, words), sent, "{collective}");
        }
    }

    #[test]
    fn a_list_of_equal_counts_is_one_count() {
        assert_eq!(Counts::listed(&[4, 4, 4]), Counts::Each(4));
        assert_eq!(Counts::listed(&[0, 0]), Counts::Each(0));
        assert!(matches!(Counts::listed(&[4, 4, 5]), Counts::Listed(_)));
        assert_ne!(Counts::listed(&[4, 5]).amount(), Counts::listed(&[5, 4]).amount());
        assert_eq!(Counts::listed(&[4, 5]).plan_bytes(8), 40);
    }
}

//! A set of ranks, as the words that an all-reduce adds. Ranks below 64 need no allocation.

use std::fmt;

use pleach_vocabulary::Rank;

/// A set of ranks of one group.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct RankSet {
    /// Bit `r` stands for rank `r` below 64.
    first: u64,
    /// The same of the ranks from 64 on, in words; the last word is not zero.
    more: Vec<u64>,
}

impl RankSet {
    /// How many words hold a set of ranks below `ranks`.
    pub(crate) fn words_for(ranks: u32) -> usize {
        ranks.div_ceil(u64::BITS) as usize
    }

    /// The set that these words hold.
    pub(crate) fn of_words(words: &[u64]) -> Self {
        let Some((first, more)) = words.split_first() else { return Self::default() };
        // Equal sets are equal however many ranks their groups have.
        let len = more.iter().rposition(|word| *word != 0).map_or(0, |last| last + 1);
        Self { first: *first, more: more[..len].to_vec() }
    }

    fn words(&self) -> impl Iterator<Item = u64> + '_ {
        std::iter::once(self.first).chain(self.more.iter().copied())
    }

    /// Whether the rank is in the set.
    #[must_use]
    pub fn contains(&self, rank: Rank) -> bool {
        let word = match (rank / u64::BITS) as usize {
            0 => Some(&self.first),
            index => self.more.get(index - 1),
        };
        word.is_some_and(|word| word >> (rank % u64::BITS) & 1 == 1)
    }

    /// How many ranks are in the set.
    #[must_use]
    pub fn len(&self) -> u32 {
        self.words().map(u64::count_ones).sum()
    }

    /// Whether no rank is in the set.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.first == 0 && self.more.is_empty()
    }

    /// The ranks in ascending order.
    pub fn iter(&self) -> impl Iterator<Item = Rank> + '_ {
        let places = |word: u64| {
            std::iter::successors(Some(word).filter(|word| *word != 0), |word| {
                Some(word & (word - 1)).filter(|rest| *rest != 0)
            })
        };
        let ranks = move |(index, word): (usize, u64)| {
            let first = index as Rank * u64::BITS;
            places(word).map(move |rest| first + rest.trailing_zeros())
        };
        self.words().enumerate().flat_map(ranks)
    }

    /// Whether every rank in the set is below this one.
    pub(crate) fn is_below(&self, ranks: u32) -> bool {
        let last = self.more.last().unwrap_or(&self.first);
        self.more.len() as u32 * u64::BITS + (u64::BITS - last.leading_zeros()) <= ranks
    }
}

impl FromIterator<Rank> for RankSet {
    fn from_iter<I: IntoIterator<Item = Rank>>(ranks: I) -> Self {
        let mut set = Self::default();
        for rank in ranks {
            let bit = 1 << (rank % u64::BITS);
            match (rank / u64::BITS) as usize {
                0 => set.first |= bit,
                index => {
                    set.more.resize(set.more.len().max(index), 0);
                    set.more[index - 1] |= bit;
                }
            }
        }
        set
    }
}

impl fmt::Display for RankSet {
    /// The ranks with commas between them, in ascending order; `none` for no ranks.
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_empty() {
            return formatter.write_str("none");
        }
        for (index, rank) in self.iter().enumerate() {
            let comma = if index == 0 { "" } else { "," };
            write!(formatter, "{comma}{rank}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_set_holds_the_ranks_that_were_put_in_across_words() {
        let ranks = [0, 5, 63, 64, 130];
        let set: RankSet = ranks.into_iter().collect();
        assert_eq!(set.iter().collect::<Vec<_>>(), ranks);
        assert_eq!((set.len(), set.is_empty(), set.to_string()), (5, false, "0,5,63,64,130".to_owned()));
        assert!(!set.contains(1) && !set.contains(131) && !set.contains(100_000));
        assert!(set.is_below(131) && !set.is_below(130) && RankSet::default().is_below(0));
        let none = RankSet::of_words(&[0; 2]);
        assert_eq!((&none, RankSet::of_words(&[3, 0])), (&RankSet::default(), [0, 1].into_iter().collect()));
        assert!(none.is_empty() && none.to_string() == "none" && none.iter().next().is_none());
        assert_eq!([1, 64, 65, 128, 129].map(RankSet::words_for), [1, 1, 2, 2, 3]);
    }
}

//! A set of ranks, as the words that an all-reduce adds.

use std::fmt;

use pleach_vocabulary::Rank;

/// A set of ranks of one group.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct RankSet {
    /// Bit `r % 64` of word `r / 64` stands for rank `r`.
    words: Vec<u64>,
}

impl RankSet {
    /// How many words hold a set of ranks below `ranks`.
    pub(crate) fn words_for(ranks: u32) -> usize {
        ranks.div_ceil(u64::BITS) as usize
    }

    /// The set that these words hold.
    pub(crate) fn of_words(mut words: Vec<u64>) -> Self {
        // Equal sets are equal however many ranks their groups have.
        while words.pop_if(|word| *word == 0).is_some() {}
        Self { words }
    }

    /// Whether the rank is in the set.
    #[must_use]
    pub fn contains(&self, rank: Rank) -> bool {
        let word = self.words.get((rank / u64::BITS) as usize);
        word.is_some_and(|word| word >> (rank % u64::BITS) & 1 == 1)
    }

    /// How many ranks are in the set.
    #[must_use]
    pub fn len(&self) -> u32 {
        self.words.iter().map(|word| word.count_ones()).sum()
    }

    /// Whether no rank is in the set.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.words.iter().all(|word| *word == 0)
    }

    /// The ranks in ascending order.
    pub fn iter(&self) -> impl Iterator<Item = Rank> + '_ {
        let places = |word: u64| {
            std::iter::successors(Some(word).filter(|word| *word != 0), |word| {
                Some(word & (word - 1)).filter(|rest| *rest != 0)
            })
        };
        let ranks = move |(index, word): (usize, &u64)| {
            let first = index as Rank * u64::BITS;
            places(*word).map(move |rest| first + rest.trailing_zeros())
        };
        self.words.iter().enumerate().flat_map(ranks)
    }

    /// Whether every rank in the set is below this one.
    pub(crate) fn is_below(&self, ranks: u32) -> bool {
        // The last word is not zero.
        let end = self.words.last().map_or(0, |last| u64::BITS - last.leading_zeros());
        self.words.is_empty() || (self.words.len() as u32 - 1) * u64::BITS + end <= ranks
    }
}

impl FromIterator<Rank> for RankSet {
    fn from_iter<I: IntoIterator<Item = Rank>>(ranks: I) -> Self {
        let mut words = Vec::new();
        for rank in ranks {
            let index = (rank / u64::BITS) as usize;
            words.resize(words.len().max(index + 1), 0);
            words[index] |= 1 << (rank % u64::BITS);
        }
        Self { words }
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
        let none = RankSet::of_words(vec![0; RankSet::words_for(65)]);
        assert_eq!(
            (&none, RankSet::of_words(vec![3, 0])),
            (&RankSet::default(), [0, 1].into_iter().collect())
        );
        assert!(none.is_empty() && none.to_string() == "none" && none.iter().next().is_none());
        assert_eq!([1, 64, 65, 128, 129].map(RankSet::words_for), [1, 1, 2, 2, 3]);
    }
}

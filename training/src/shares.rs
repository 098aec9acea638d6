//! Which elements each rank publishes, and its peers write to it.
//!
//! **Invariant:** the parts of [`Shares::Parts`] hold each element once, and none is longer than
//! the first. Those of a table have whole rows.

use std::ops::Range;

use pleach_collectives::Rank;

/// How elements are shared out over ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shares {
    /// Each rank has all elements.
    Whole,
    /// Each rank has a part. The last ranks have less, or none, if elements cannot be divided.
    Parts,
}

/// What one-sided exchanges of a scheme need; see [`crate::policy`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WindowPlan {
    /// This rank.
    pub rank: Rank,
    /// The number of ranks, at least 1.
    pub ranks: u32,
    /// The share of each rank.
    pub shares: Shares,
    /// Most writes to a peer that the peer has not heard of, at least 1.
    pub slots: u16,
    /// Elements of a row, of a [table](crate::Layout::table).
    pub row: Option<usize>,
}

impl WindowPlan {
    /// The share of a rank, of so many elements.
    #[must_use]
    pub fn share(&self, rank: Rank, elements: usize) -> Range<usize> {
        match self.shares {
            Shares::Whole => 0..elements,
            Shares::Parts => {
                let part = self.longest(elements);
                let begin = elements.min(part.saturating_mul(rank as usize));
                begin..elements.min(begin + part)
            }
        }
    }

    /// The length of the longest share.
    #[must_use]
    pub fn longest(&self, elements: usize) -> usize {
        match self.shares {
            Shares::Whole => elements,
            Shares::Parts => {
                let row = self.row.unwrap_or(1);
                elements.div_ceil(row).div_ceil(self.ranks as usize) * row
            }
        }
    }

    /// The elements that a rank publishes at most: its share, and a stamp for each row of it (see
    /// `copies`).
    #[must_use]
    pub fn published(&self, elements: usize) -> usize {
        let longest = self.longest(elements);
        longest + self.row.map_or(0, |row| longest / row)
    }

    /// All ranks but this one.
    pub fn peers(&self) -> impl Iterator<Item = Rank> + use<> {
        let own = self.rank;
        (0..self.ranks).filter(move |rank| *rank != own)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn parts_hold_each_element_once_and_none_is_longer_than_the_first(
            elements in 0_usize..200,
            ranks in 1_u32..40,
            row in prop::option::of(1_usize..9),
        ) {
            let plan = WindowPlan { rank: 0, ranks, shares: Shares::Parts, slots: 1, row };
            let elements = elements * row.unwrap_or(1);
            let parts: Vec<_> = (0..ranks).map(|rank| plan.share(rank, elements)).collect();
            prop_assert_eq!(parts[0].len(), plan.longest(elements).min(elements));
            let mut end = 0;
            for part in parts {
                prop_assert_eq!(part.start, end);
                prop_assert!(part.len().is_multiple_of(row.unwrap_or(1)));
                prop_assert!(part.len() <= plan.longest(elements));
                end = part.end;
            }
            prop_assert_eq!(end, elements);
        }
    }
}

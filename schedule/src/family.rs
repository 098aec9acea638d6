//! Families: schedules of which one block, or one rank, describes all others. Read the first
//! comment of [`Family`].

use pleach_vocabulary::Rank;

use crate::{BlockId, Schedule};

/// A schedule that one of its blocks, or the lane of one of its ranks, describes.
///
/// A schedule with a block for each of `n` ranks has about `n²` lanes. In a family all blocks are
/// one block, translated; so it is written down, made and proved in the length of that block, and a
/// rank finds its own lanes without those of others. A schedule of one block, in which all ranks do
/// the same, is a family by its ranks.
///
/// # What a family means
///
/// The ranks are the points of a grid of [`Family::extents`], the last coordinate varying fastest:
/// a ring of `n` has the extents `n`, ranks that differ in single bits have `2 × 2 × …`. They are
/// the elements of a group: to translate rank `r` by rank `t` is to add their coordinates, each
/// modulo its extent. Every translation is a bijection of the ranks, and rank 0 translates nothing.
///
/// By blocks ([`Symmetry::Blocks`]), [`Family::column`] has all blocks of the schedule, as many as
/// ranks, but only the lanes of block 0. The lanes of block `b` at rank `r` are those of block 0 at
/// the rank that `b` translates to `r`, with every rank that they name translated by `b`. The
/// sources of a reduce are then ordered as [`Family::source_order`] says, and the lanes of a rank
/// as [`Family::lane_order`] says.
///
/// By ranks ([`Symmetry::Ranks`]), the column has the only block, and the lane of rank 0 alone. The
/// lane of rank `r` is that of rank 0, with every rank that it names translated by `r`.
///
/// So a family is no claim about a schedule that exists elsewhere: it is the definition of one,
/// and a rank whose lanes follow the definition needs no word of its peers that theirs do too, but
/// that they have the same family. [`verify_family`](crate::verify::verify_family) proves it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Family {
    /// Of what the others are translations.
    pub symmetry: Symmetry,
    /// The schedule with the lanes of block 0 alone, or with the lane of rank 0 alone.
    pub column: Schedule,
    /// The extents of the grid of ranks.
    pub extents: Vec<u32>,
    /// In which order a reduce combines.
    pub source_order: SourceOrder,
    /// In which order a rank turns to its blocks.
    pub lane_order: LaneOrder,
}

/// Of what the lanes of a family are translations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Symmetry {
    /// Those of every block, of the lanes of block 0.
    Blocks,
    /// Those of every rank, of the lane of rank 0.
    Ranks,
}

/// In which order the reduces of a translated block combine their sources.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SourceOrder {
    /// As in block 0.
    AsTranslated,
    /// In the order of the ranks that contribute. A place of another rank is contributed by that
    /// rank. A scratch slot is contributed by the rank that writes it (the first such rank in the
    /// column, where there are several), and every other own place by the rank itself.
    ByContributor,
}

/// In which order a rank turns to its blocks. The order does not matter to the proof.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LaneOrder {
    /// Rank `r` begins with block `r` plus this number, and goes on to the block after it.
    Ascending(u32),
    /// Rank `r` begins with block `r` minus this number, and goes on to the block before it.
    Descending(u32),
}

impl LaneOrder {
    /// The block to which a rank turns at this turn, from 0 on, of `blocks` in all.
    pub(crate) fn block(self, rank: Rank, turn: u32, blocks: u32) -> BlockId {
        match self {
            Self::Ascending(start) => (rank + start % blocks + turn) % blocks,
            Self::Descending(start) => (rank + 2 * blocks - start % blocks - turn) % blocks,
        }
    }
}

/// The translations of a grid of ranks. **Invariant:** the product of the extents is the number of
/// ranks, none is 0, so every translation is a bijection: digit by digit the shift of a cycle.
#[derive(Clone, Debug)]
pub(crate) struct Translations {
    extents: Vec<u32>,
    /// Every extent is 2: coordinates are bits, and their sum is an exclusive or.
    are_bits: bool,
}

impl Translations {
    /// Of the grid of these extents; `None` unless it has exactly `ranks` points.
    pub(crate) fn new(extents: &[u32], ranks: u32) -> Option<Self> {
        let points = extents.iter().try_fold(1u32, |points, &extent| points.checked_mul(extent))?;
        let are_bits = extents.iter().all(|&extent| extent == 2);
        (points == ranks && ranks > 0).then(|| Self { extents: extents.to_vec(), are_bits })
    }

    /// Rank `rank` translated by `by`.
    pub(crate) fn add(&self, rank: Rank, by: Rank) -> Rank {
        self.combine(rank, by, |coordinate, by, extent| {
            let sum = coordinate + by;
            if sum >= extent { sum - extent } else { sum }
        })
    }

    /// The rank that `by` translates to `rank`.
    pub(crate) fn subtract(&self, rank: Rank, by: Rank) -> Rank {
        self.combine(
            rank,
            by,
            |coordinate, by, extent| {
                if coordinate >= by { coordinate - by } else { coordinate + extent - by }
            },
        )
    }

    #[inline]
    fn combine(&self, rank: Rank, by: Rank, of: impl Fn(u32, u32, u32) -> u32) -> Rank {
        if self.are_bits {
            return rank ^ by;
        }
        let (mut rank, mut by, mut stride, mut result) = (rank, by, 1, 0);
        for &extent in self.extents.iter().rev() {
            result += of(rank % extent, by % extent, extent) * stride;
            (rank, by, stride) = (rank / extent, by / extent, stride * extent);
        }
        result
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn translations_are_a_commutative_group_that_takes_rank_0_to_every_rank() {
        for extents in [&[7][..], &[2, 2, 2], &[3, 4], &[1, 5], &[2, 3, 2]] {
            let ranks = extents.iter().product();
            let group = Translations::new(extents, ranks).expect("it fits");
            for one in 0..ranks {
                assert_eq!((group.add(0, one), group.subtract(one, one)), (one, 0));
                let mut images: Vec<Rank> = (0..ranks).map(|rank| group.add(rank, one)).collect();
                for (rank, &image) in (0..).zip(&images) {
                    assert_eq!((group.subtract(image, one), group.add(one, rank)), (rank, image));
                    let twice = |by| group.add(group.add(rank, one), by);
                    assert!((0..ranks).all(|by| twice(by) == group.add(rank, group.add(one, by))));
                }
                images.sort_unstable();
                assert!(images.into_iter().eq(0..ranks), "{extents:?}: {one} is no bijection");
            }
        }
        let grid = Translations::new(&[3, 4], 12).expect("it fits");
        assert_eq!((grid.add(7, 5), grid.add(11, 1)), (8, 8), "a coordinate does not carry over");
        for (extents, ranks) in [(&[3, 4][..], 13), (&[0], 0), (&[4, 0], 4), (&[1 << 20, 1 << 20], 0)] {
            assert!(Translations::new(extents, ranks).is_none(), "{extents:?} of {ranks}");
        }
    }

    #[test]
    fn both_orders_turn_to_every_block_once() {
        for order in [LaneOrder::Ascending(1), LaneOrder::Descending(1), LaneOrder::Descending(0)] {
            for rank in 0..5 {
                let mut blocks: Vec<BlockId> = (0..5).map(|turn| order.block(rank, turn, 5)).collect();
                let second = match order {
                    LaneOrder::Ascending(_) => blocks[0] + 1,
                    LaneOrder::Descending(_) => blocks[0] + 4,
                };
                assert_eq!(blocks[1], second % 5);
                blocks.sort_unstable();
                assert_eq!(blocks, [0, 1, 2, 3, 4]);
            }
        }
        assert_eq!(LaneOrder::Descending(1).block(0, 0, 5), 4);
        assert_eq!(LaneOrder::Ascending(1).block(4, 0, 5), 0);
    }
}

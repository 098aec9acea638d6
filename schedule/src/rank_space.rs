//! Ranks as the points of a grid.
//!
//! A [`RankSpace`] is an affine map: the rank at coordinates `c` is `offset + c·strides`. The
//! coordinates of rank `r` in a space of extents 2×3 in row-major order:
//!
//! ```text
//!            column 0  1  2
//!     row 0         0  1  2      strides 3, 1
//!     row 1         3  4  5
//! ```
//!
//! A *line* along a dimension is the set of points in which only that coordinate varies.

use pleach_vocabulary::Rank;

/// Ranks as the points of a grid. See the module.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct RankSpace {
    offset: Rank,
    extents: Vec<u32>,
    strides: Vec<u32>,
}

impl RankSpace {
    /// The ranks from `offset` on, the last coordinate varying fastest; `None` when they cannot be
    /// counted.
    #[must_use]
    pub(crate) fn row_major(offset: Rank, extents: &[u32]) -> Option<Self> {
        let mut strides = vec![1; extents.len()];
        let mut size = 1u32;
        for (stride, &extent) in strides.iter_mut().zip(extents).rev() {
            *stride = size;
            size = size.checked_mul(extent)?;
        }
        offset.checked_add(size)?;
        Some(Self { offset, extents: extents.to_vec(), strides })
    }

    /// How many points along each dimension.
    #[must_use]
    pub(crate) fn extents(&self) -> &[u32] {
        &self.extents
    }

    /// The number of ranks.
    #[must_use]
    pub(crate) fn size(&self) -> u32 {
        self.extents.iter().product()
    }

    /// Where a rank of this space lies along a dimension.
    #[must_use]
    pub(crate) fn coordinate(&self, rank: Rank, dimension: usize) -> u32 {
        (rank - self.offset) / self.strides[dimension] % self.extents[dimension]
    }

    /// The rank on the same line along `dimension` at another coordinate.
    #[must_use]
    pub(crate) fn moved(&self, rank: Rank, dimension: usize, coordinate: u32) -> Rank {
        let stride = self.strides[dimension];
        rank - self.coordinate(rank, dimension) * stride + coordinate * stride
    }

    /// The rank that is displaced from `rank` as `displacement` is from the first rank: each
    /// coordinate is added, modulo its extent.
    #[must_use]
    pub(crate) fn translated(&self, rank: Rank, displacement: Rank) -> Rank {
        let sum = |dimension: usize| {
            let displaced = displacement / self.strides[dimension] % self.extents[dimension];
            (self.coordinate(rank, dimension) + displaced) % self.extents[dimension] * self.strides[dimension]
        };
        self.offset + (0..self.extents.len()).map(sum).sum::<u32>()
    }

    /// The ranks of the line through `rank` along `dimension`, in the order of that coordinate.
    pub(crate) fn line(&self, rank: Rank, dimension: usize) -> impl Iterator<Item = Rank> + '_ {
        (0..self.extents[dimension]).map(move |coordinate| self.moved(rank, dimension, coordinate))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_rank_lies_on_one_line_along_each_dimension() {
        let space = RankSpace::row_major(5, &[2, 3, 4]).expect("24 ranks");
        assert_eq!(space.size(), 24);
        for dimension in 0..3 {
            let mut seen = [0; 24];
            for rank in 5..29 {
                if space.coordinate(rank, dimension) == 0 {
                    for member in space.line(rank, dimension) {
                        seen[member as usize - 5] += 1;
                        for other in (0..3).filter(|&other| other != dimension) {
                            assert_eq!(space.coordinate(member, other), space.coordinate(rank, other));
                        }
                    }
                }
            }
            assert_eq!(seen, [1; 24]);
        }
        assert_eq!(space.line(5 + 7, 1).collect::<Vec<_>>(), [8, 12, 16]);
    }

    #[test]
    fn a_space_that_does_not_fit_into_the_ranks_is_refused() {
        assert_eq!(RankSpace::row_major(0, &[1 << 20, 1 << 20]), None);
        assert_eq!(RankSpace::row_major(u32::MAX, &[1]), None);
    }
}

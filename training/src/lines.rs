//! Lines of ranks that combine contributions in rounds, and grids whose lines they are.
//!
//! Ranks are the points of a grid of `d` dimensions, whose sides are the least number with whose
//! `d`-th power there is a point for each. A line of a dimension has the ranks that differ in that
//! coordinate alone. The last lines may be shorter, as the last points of the grid have no ranks.
//!
//! **Invariant:** in each dimension each rank is in one line, and no line is longer than
//! `n^(1/d)`, rounded up. So an average along lines keeps the mean of all ranks.

use pleach_collectives::Rank;
use pleach_collectives::partial::Activation;

/// Ranks that combine contributions in rounds (partial all-reduce).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Line {
    /// The ranks, this one among them, in ascending order; the same on all of them.
    pub ranks: Vec<Rank>,
    /// When rounds open, and what becomes of late contributions.
    pub activation: Activation,
}

/// The side of a grid of so many ranks, which are at least 1.
#[must_use]
pub fn side(ranks: u32, dimensions: u32) -> u32 {
    let is_enough = |side: &u32| side.checked_pow(dimensions.max(1)).is_none_or(|points| points >= ranks);
    (1..).find(is_enough).unwrap_or(ranks)
}

/// The line of a rank in one dimension.
#[must_use]
pub fn line(rank: Rank, ranks: u32, dimensions: u32, dimension: u32) -> Vec<Rank> {
    let side = side(ranks, dimensions);
    // A side of 1 has one point; else a power that is too large holds no second rank.
    let stride = side.saturating_pow(dimension);
    let coordinate = rank / stride % side;
    let first = rank - coordinate * stride;
    (0..side)
        .filter_map(|step| step.checked_mul(stride)?.checked_add(first))
        .filter(|it| *it < ranks)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_rank_is_in_one_line_of_each_dimension_and_no_line_is_longer_than_the_root() {
        for ranks in 1..=130_u32 {
            for dimensions in 1..=8 {
                let longest = f64::from(ranks).powf(1.0 / f64::from(dimensions));
                // A root that is a whole number must not be rounded up.
                let longest = (longest - 1e-9).ceil() as usize;
                for dimension in 0..dimensions {
                    for rank in 0..ranks {
                        let own = line(rank, ranks, dimensions, dimension);
                        assert!(own.contains(&rank) && own.len() <= longest && own.is_sorted());
                        let is_shared = |other: &Rank| line(*other, ranks, dimensions, dimension) == own;
                        assert!(own.iter().all(is_shared), "{rank} of {ranks}, {dimension} of {dimensions}");
                    }
                }
            }
        }
    }

    #[test]
    fn a_grid_that_is_full_has_rows_and_columns() {
        assert_eq!((line(4, 9, 2, 0), line(4, 9, 2, 1)), (vec![3, 4, 5], vec![1, 4, 7]));
        assert_eq!((line(6, 8, 2, 0), line(6, 8, 2, 1)), (vec![6, 7], vec![0, 3, 6]));
        assert_eq!(line(5, 8, 3, 2), [1, 5]);
        assert_eq!(line(2, 5, 1, 0), [0, 1, 2, 3, 4]);
    }
}

//! Ranks as the points of a grid, which may have holes.
//!
//! A *seat* is a point of the grid. Seats are numbered in row-major order: the last coordinate
//! varies fastest. Ranks are the seats that are taken, in ascending order, and the other seats are
//! *holes*. Seven ranks in a grid of 3×3:
//!
//! ```text
//!            column 0  1  2
//!     row 0         0  1  2      strides 3, 1
//!     row 1         3  4  5
//!     row 2         6  ·  ·
//! ```
//!
//! A *line* along a dimension has the ranks that differ in that coordinate alone.
//!
//! **Invariant:** seats ascend, and each lies in the grid. So along each dimension each rank is in
//! one line, which has at most as many ranks as the extent.
//!
//! A process that leaves leaves a hole, and a process that joins takes the lowest hole. The other
//! seats stay, so that is a change of one line along each dimension ([`RankSpace::changed_lines`]).
//! BIDMach keeps its square grid full: it moves the node that came last to the place of the node
//! that left, and so changes two lines along each dimension.

use std::collections::{BTreeMap, BTreeSet};

use pleach_vocabulary::Rank;

/// Most dimensions of a grid.
pub const GRID_DIMENSIONS_MAX: usize = 16;

/// Ranks as the points of a grid that may have holes; see the module's comment in the source.
///
/// Seats are the points, numbered with the last coordinate varying fastest. Ranks are the seats
/// that are taken, in ascending order.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct RankSpace {
    extents: Vec<u32>,
    /// How far apart the seats of a line are, by dimension.
    strides: Vec<u64>,
    /// By rank, ascending.
    seats: Vec<u32>,
}

/// A line of a grid.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct GridLine {
    /// The dimension along which its seats differ.
    pub dimension: usize,
    /// The seats that are taken, ascending.
    pub seats: Vec<u32>,
}

/// Why ranks are not the points of a grid.
#[derive(Clone, pleach_derive::ErrorDebug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SpaceError {
    /// The grid has fewer places than there are ranks.
    #[error(
        "a grid of {} has {places} places for {ranks} ranks; give extents whose product is {ranks} at least, \
         as {}",
        text(extents),
        text(&balanced_extents(*ranks, extents.len() as u32))
    )]
    TooFewPlaces {
        /// The extents that were given.
        extents: Vec<u32>,
        /// Their product.
        places: u64,
        /// The number of ranks.
        ranks: u32,
    },
    /// The grid ends before a seat.
    #[error("a grid of {} has the seats 0 to {}, not {seat}; give larger extents", text(extents), places - 1)]
    NoSuchSeat {
        /// The extents that were given.
        extents: Vec<u32>,
        /// Their product.
        places: u64,
        /// The seat.
        seat: u32,
    },
    /// Two ranks have one seat.
    #[error("seat {seat} is taken twice; give each rank a seat of its own")]
    SeatTwice {
        /// The seat.
        seat: u32,
    },
    /// More dimensions than a grid may have.
    #[error("a grid of {dimensions} dimensions; give {GRID_DIMENSIONS_MAX} at most")]
    TooManyDimensions {
        /// Their number.
        dimensions: usize,
    },
    /// There is nobody.
    #[error("a grid has at least 1 rank; give 1 rank or more")]
    NoRanks,
}

/// Extents as in the names of algorithms: `3x3`.
pub(crate) fn text(extents: &[u32]) -> String {
    let extents: Vec<String> = extents.iter().map(u32::to_string).collect();
    extents.join("x")
}

/// The number of points.
pub(crate) fn product(extents: &[u32]) -> u64 {
    extents.iter().fold(1, |places: u64, &extent| places.saturating_mul(u64::from(extent)))
}

/// Extents that differ by one at most and have a place for each rank, none of them above the root
/// of the number of ranks, rounded up. Smaller extents come first. No ranks count as one rank, no
/// dimensions as one, and more than [`GRID_DIMENSIONS_MAX`] as that many.
#[must_use]
pub fn balanced_extents(ranks: u32, dimensions: u32) -> Vec<u32> {
    let (ranks, dimensions) = (u64::from(ranks.max(1)), dimensions.clamp(1, GRID_DIMENSIONS_MAX as u32));
    // As many of the extents are `side`, and the others are one less.
    let places = |side: u64, many: u32| {
        side.saturating_pow(many).saturating_mul((side - 1).saturating_pow(dimensions - many))
    };
    let side =
        if dimensions == 1 { ranks } else { (1..).find(|&s| places(s, dimensions) >= ranks).unwrap_or(1) };
    let many = (1..dimensions).find(|&many| places(side, many) >= ranks).unwrap_or(dimensions);
    let (side, many) = (side as u32, many as usize);
    let mut extents = vec![side - 1; dimensions as usize - many];
    extents.resize(dimensions as usize, side);
    extents
}

fn check_dimensions(extents: &[u32]) -> Result<(), SpaceError> {
    let dimensions = extents.len();
    if dimensions > GRID_DIMENSIONS_MAX { Err(SpaceError::TooManyDimensions { dimensions }) } else { Ok(()) }
}

impl RankSpace {
    /// So many ranks on the first seats of a grid of these extents. Lines without a rank are left
    /// out: 6 ranks in 3×3 are 2×3.
    ///
    /// # Errors
    ///
    /// The grid has fewer places than there are ranks, or too many dimensions, or there are no
    /// ranks.
    pub fn new(extents: &[u32], ranks: u32) -> Result<Self, SpaceError> {
        check_dimensions(extents)?;
        let mut extents = extents.to_vec();
        let places = product(&extents);
        if ranks == 0 {
            return Err(SpaceError::NoRanks);
        }
        if places < u64::from(ranks) {
            return Err(SpaceError::TooFewPlaces { extents, places, ranks });
        }
        for dimension in 0..extents.len() {
            let layer = product(&extents[dimension + 1..]);
            extents[dimension] = u64::from(ranks).div_ceil(layer).min(u64::from(extents[dimension])) as u32;
            // The first layer has no hole, so it needs all of the other extents.
            if extents[dimension] > 1 {
                break;
            }
        }
        Self::of_seats(&extents, (0..ranks).collect())
    }

    /// So many ranks on the first seats of a grid of so many dimensions with
    /// [balanced extents](balanced_extents): no line is longer than `n^(1/d)`, rounded up. No ranks
    /// count as one rank, no dimensions as one, and more than [`GRID_DIMENSIONS_MAX`] as that many.
    #[must_use]
    pub fn balanced(ranks: u32, dimensions: u32) -> Self {
        let extents = balanced_extents(ranks, dimensions);
        Self { strides: strides(&extents), extents, seats: (0..ranks.max(1)).collect() }
    }

    /// The ranks that take these seats of a grid of these extents.
    ///
    /// # Errors
    ///
    /// See [`SpaceError`].
    pub fn of_seats(extents: &[u32], mut seats: Vec<u32>) -> Result<Self, SpaceError> {
        check_dimensions(extents)?;
        seats.sort_unstable();
        if let Some(twice) = seats.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(SpaceError::SeatTwice { seat: twice[0] });
        }
        let Some(&last) = seats.last() else { return Err(SpaceError::NoRanks) };
        let (places, extents) = (product(extents), extents.to_vec());
        if u64::from(last) >= places {
            return Err(match places {
                0 => SpaceError::TooFewPlaces { extents, places, ranks: seats.len() as u32 },
                _ => SpaceError::NoSuchSeat { extents, places, seat: last },
            });
        }
        Ok(Self { strides: strides(&extents), extents, seats })
    }

    /// How many points there are along each dimension.
    #[must_use]
    pub fn extents(&self) -> &[u32] {
        &self.extents
    }

    /// The number of ranks.
    #[must_use]
    pub fn ranks(&self) -> u32 {
        self.seats.len() as u32
    }

    /// The number of points, holes among them.
    #[must_use]
    pub fn places(&self) -> u64 {
        product(&self.extents)
    }

    /// The seat of a rank; `None` where there is no such rank.
    #[must_use]
    pub fn seat(&self, rank: Rank) -> Option<u32> {
        self.seats.get(rank as usize).copied()
    }

    /// The rank on a seat; `None` where there is a hole.
    #[must_use]
    pub fn rank_at(&self, seat: u32) -> Option<Rank> {
        match self.seats.get(seat as usize) {
            // As seats ascend, all before it are taken.
            Some(&taken) if taken == seat => Some(seat),
            _ => self.seats.binary_search(&seat).ok().map(|rank| rank as Rank),
        }
    }

    /// Where a rank of this space lies along a dimension.
    ///
    /// # Panics
    ///
    /// When there is no such rank or dimension.
    #[must_use]
    pub fn coordinate(&self, rank: Rank, dimension: usize) -> u32 {
        self.digit(self.seats[rank as usize].into(), dimension)
    }

    /// The ranks of the line through `rank` along `dimension`, in the order of that coordinate.
    ///
    /// # Panics
    ///
    /// When there is no such rank or dimension.
    pub fn line(&self, rank: Rank, dimension: usize) -> impl Iterator<Item = Rank> + '_ {
        (0..self.extents[dimension]).filter_map(move |coordinate| self.moved(rank, dimension, coordinate))
    }

    /// The seat that the next process to join takes, if there is a hole.
    #[must_use]
    pub fn lowest_hole(&self) -> Option<u32> {
        let taken = (0..).zip(&self.seats).take_while(|(seat, taken)| seat == *taken).count();
        (self.places() > taken as u64).then_some(taken as u32)
    }

    /// This space and one more rank, with the seat that it takes: the lowest hole. A grid without
    /// holes gets [balanced extents](balanced_extents) for one rank more. `None` where no more
    /// seats can be numbered.
    #[must_use]
    pub fn with_joiner(&self) -> Option<(Self, u32)> {
        let (extents, seat) = match self.lowest_hole() {
            Some(seat) => (self.extents.clone(), seat),
            None => {
                let seat = self.ranks();
                (balanced_extents(seat.checked_add(1)?, self.extents.len() as u32), seat)
            }
        };
        let seats = self.seats.iter().copied().chain([seat]).collect();
        Some((Self::of_seats(&extents, seats).ok()?, seat))
    }

    /// This space without the rank on a seat, where a hole stays. `None` where nobody is left.
    #[must_use]
    pub fn without(&self, seat: u32) -> Option<Self> {
        let seats: Vec<u32> = self.seats.iter().copied().filter(|&taken| taken != seat).collect();
        (!seats.is_empty()).then(|| Self { seats, ..self.clone() })
    }

    /// The lines of this space that `before` does not have: those that are to be planned anew.
    /// `renewed` are seats that another process has taken since.
    #[must_use]
    pub fn changed_lines(&self, before: &Self, renewed: &[u32]) -> Vec<GridLine> {
        let former: BTreeSet<GridLine> = before.lines().collect();
        let is_new =
            |line: &GridLine| !former.contains(line) || line.seats.iter().any(|seat| renewed.contains(seat));
        self.lines().filter(is_new).collect()
    }

    /// All lines, along the first dimension first.
    fn lines(&self) -> impl Iterator<Item = GridLine> + '_ {
        (0..self.extents.len()).flat_map(|dimension| {
            let mut lines: BTreeMap<u64, Vec<u32>> = BTreeMap::new();
            for &seat in &self.seats {
                let coordinate = u64::from(self.digit(seat.into(), dimension));
                let first = u64::from(seat) - coordinate * self.strides[dimension];
                lines.entry(first).or_default().push(seat);
            }
            lines.into_values().map(move |seats| GridLine { dimension, seats })
        })
    }

    /// The rank on the same line along `dimension` at another coordinate; `None` where there is
    /// none.
    pub(crate) fn moved(&self, rank: Rank, dimension: usize, coordinate: u32) -> Option<Rank> {
        let (seat, stride) = (u64::from(self.seats[rank as usize]), self.strides[dimension]);
        if coordinate >= self.extents[dimension] {
            return None;
        }
        let first = seat - u64::from(self.digit(seat, dimension)) * stride;
        let moved = first.checked_add(u64::from(coordinate).checked_mul(stride)?)?;
        self.rank_at(u32::try_from(moved).ok()?)
    }

    /// The rank that is displaced from `rank` as the point `displacement` is from the first point:
    /// each coordinate is added, modulo its extent. `None` where there is a hole.
    pub(crate) fn translated(&self, rank: Rank, displacement: u64) -> Option<Rank> {
        let sum = |dimension: usize| {
            let extent = self.extents[dimension];
            let displaced =
                u64::from(self.coordinate(rank, dimension)) + u64::from(self.digit(displacement, dimension));
            displaced % u64::from(extent) * self.strides[dimension]
        };
        self.rank_at(u32::try_from((0..self.extents.len()).map(sum).sum::<u64>()).ok()?)
    }

    /// Whether there is no hole.
    pub(crate) fn is_full(&self) -> bool {
        self.places() == u64::from(self.ranks())
    }

    /// The layers without holes of a space of the first seats, and along which dimension there
    /// are several layers.
    pub(crate) fn full_layers(&self) -> (Self, usize) {
        let dimension = self.extents.iter().position(|&extent| extent > 1).unwrap_or(0);
        let layer = self.strides.get(dimension).copied().unwrap_or(1);
        let layers = u64::from(self.ranks()) / layer;
        let mut extents = self.extents.clone();
        if let Some(extent) = extents.get_mut(dimension) {
            *extent = layers as u32;
        }
        let seats = self.seats.iter().copied().take_while(|&seat| u64::from(seat) < layers * layer).collect();
        (Self { extents, strides: self.strides.clone(), seats }, dimension)
    }

    /// A coordinate of a point.
    fn digit(&self, point: u64, dimension: usize) -> u32 {
        (point / self.strides[dimension] % u64::from(self.extents[dimension])) as u32
    }
}

fn strides(extents: &[u32]) -> Vec<u64> {
    (0..extents.len()).map(|dimension| product(&extents[dimension + 1..])).collect()
}

#[cfg(test)]
mod tests {
    use pleach_vocabulary::random::Random;

    use super::*;

    /// The least number whose power is not below the ranks.
    fn root(ranks: u32, dimensions: u32) -> u32 {
        (1..=ranks).find(|side| side.saturating_pow(dimensions) >= ranks).expect("the number itself")
    }

    /// Checks that along each dimension each rank is in one line, and that lines go along
    /// dimensions.
    fn check(space: &RankSpace) {
        let dimensions = space.extents().len();
        for dimension in 0..dimensions {
            let mut seen = vec![0; space.ranks() as usize];
            for rank in 0..space.ranks() {
                let line: Vec<Rank> = space.line(rank, dimension).collect();
                assert!(line.contains(&rank) && line.is_sorted(), "{space:?}: {line:?}");
                assert!(line.len() as u32 <= space.extents()[dimension], "{space:?}: {line:?}");
                for &member in &line {
                    assert!(space.line(member, dimension).eq(line.iter().copied()), "{space:?}");
                    for other in (0..dimensions).filter(|&other| other != dimension) {
                        assert_eq!(space.coordinate(member, other), space.coordinate(rank, other));
                    }
                }
                if line[0] == rank {
                    line.iter().for_each(|&member| seen[member as usize] += 1);
                }
            }
            assert!(seen.iter().all(|&seen| seen == 1), "{space:?}: {seen:?}");
        }
    }

    #[test]
    fn every_rank_lies_on_one_line_along_each_dimension() {
        let space = RankSpace::new(&[2, 3, 4], 24).expect("24 ranks");
        check(&space);
        assert_eq!(space.line(7, 1).collect::<Vec<_>>(), [3, 7, 11]);
        for ranks in 1..=24 {
            check(&RankSpace::new(&[2, 3, 4], ranks).expect("as many or more places"));
        }
        let mut random = Random::new(5);
        for _ in 0..200 {
            let seats: Vec<u32> = (0..24).filter(|_| random.bits().is_multiple_of(2)).collect();
            if !seats.is_empty() {
                check(&RankSpace::of_seats(&[4, 2, 3], seats).expect("24 seats"));
            }
        }
    }

    #[test]
    fn a_grid_of_more_dimensions_than_the_limit_is_refused() {
        let most = GRID_DIMENSIONS_MAX;
        assert_eq!(RankSpace::new(&vec![2; most], 1 << 16).expect("the limit").extents().len(), most);
        let error = SpaceError::TooManyDimensions { dimensions: most + 1 };
        assert_eq!(RankSpace::new(&vec![2; most + 1], 4), Err(error.clone()));
        assert_eq!(RankSpace::of_seats(&vec![1; most + 1], vec![0]), Err(error.clone()));
        assert_eq!(error.to_string(), "a grid of 17 dimensions; give 16 at most");
        assert_eq!(balanced_extents(1 << 20, u32::MAX).len(), most);
        check(&RankSpace::balanced(100, u32::MAX));
    }

    #[test]
    fn no_line_of_a_balanced_grid_is_longer_than_the_root_and_no_line_is_without_a_rank() {
        for ranks in 1..=130 {
            for dimensions in 1..=8 {
                let (space, longest) = (RankSpace::balanced(ranks, dimensions), root(ranks, dimensions));
                check(&space);
                let extents = space.extents();
                assert_eq!(extents.len(), dimensions as usize);
                assert!(extents.iter().all(|extent| (longest.max(2) - 1..=longest).contains(extent)));
                assert!(space.places() >= ranks.into() && extents.is_sorted(), "{extents:?} for {ranks}");
                // Any smaller extents would hold fewer.
                assert_eq!(RankSpace::new(extents, ranks).expect("it fits"), space, "{ranks}");
            }
        }
        assert_eq!(balanced_extents(7, 2), [3, 3]);
        assert_eq!(balanced_extents(10, 3), [2, 2, 3]);
        assert_eq!(balanced_extents(1 << 31, 1), [1 << 31]);
        assert_eq!(balanced_extents(u32::MAX, 2), [65536, 65536]);
        assert_eq!(balanced_extents(0, 0), [1]);
    }

    #[test]
    fn lines_without_a_rank_are_left_out() {
        let extents = |extents: &[u32], ranks| RankSpace::new(extents, ranks).expect("it fits").extents;
        assert_eq!(extents(&[3, 3], 6), [2, 3]);
        assert_eq!(extents(&[3, 3], 3), [1, 3]);
        assert_eq!(extents(&[1000, 1000], 7), [1, 7]);
        assert_eq!(extents(&[1 << 20, 1 << 20, 1 << 20], 7), [1, 1, 7]);
        assert_eq!(extents(&[u32::MAX, 2], 7), [4, 2]);
        assert_eq!(extents(&[4, 5, 6], 7), [1, 2, 6]);
    }

    #[test]
    fn what_does_not_fit_is_refused_with_what_does() {
        let refused = |extents: &[u32], ranks| RankSpace::new(extents, ranks).unwrap_err().to_string();
        assert_eq!(
            refused(&[2, 3], 7),
            "a grid of 2x3 has 6 places for 7 ranks; give extents whose product is 7 at least, as 3x3"
        );
        assert!(refused(&[0, 3], 1).contains("0 places for 1 ranks"));
        assert!(refused(&[4], 0).contains("at least 1 rank"));
        let seats = |seats: &[u32]| RankSpace::of_seats(&[2, 2], seats.to_vec()).unwrap_err();
        assert_eq!(seats(&[0, 4]), SpaceError::NoSuchSeat { extents: vec![2, 2], places: 4, seat: 4 });
        assert_eq!(seats(&[3, 1, 3]), SpaceError::SeatTwice { seat: 3 });
        assert_eq!(seats(&[]), SpaceError::NoRanks);
    }

    #[test]
    fn a_leaver_leaves_a_hole_that_the_next_joiner_takes_and_one_line_a_dimension_changes() {
        let space = RankSpace::balanced(9, 2);
        let left = space.without(4).expect("eight are left");
        assert_eq!((left.rank_at(4), left.rank_at(5), left.seat(4)), (None, Some(4), Some(5)));
        let line = |dimension, seats: &[u32]| GridLine { dimension, seats: seats.to_vec() };
        assert_eq!(left.changed_lines(&space, &[]), [line(0, &[1, 7]), line(1, &[3, 5])]);
        let two_left = left.without(1).expect("seven are left");
        assert_eq!(two_left.lowest_hole(), Some(1));
        let (joined, seat) = two_left.with_joiner().expect("there is a hole");
        assert_eq!((seat, &joined), (1, &left));
        assert_eq!(joined.changed_lines(&two_left, &[]), [line(0, &[1, 7]), line(1, &[0, 1, 2])]);
        // One process for another on a seat.
        assert_eq!(space.changed_lines(&space, &[4]), [line(0, &[1, 4, 7]), line(1, &[3, 4, 5])]);
        assert!(space.changed_lines(&space, &[]).is_empty());
        let alone = RankSpace::balanced(1, 2);
        assert_eq!(alone.without(0), None);
        assert_eq!(alone.without(3), Some(alone.clone()), "nobody was there");
    }

    #[test]
    fn a_full_grid_grows_and_stays_balanced_while_processes_come_and_go() {
        for dimensions in 1..=4 {
            let mut random = Random::new(dimensions.into());
            let mut space = RankSpace::balanced(1, dimensions);
            let mut most = 1;
            for _ in 0..300 {
                let next = match random.index(3) {
                    0 => space.without(space.seats[random.index(space.seats.len())]),
                    _ => space.with_joiner().map(|(joined, _)| joined),
                };
                let Some(next) = next else { continue };
                most = most.max(next.ranks());
                check(&next);
                let longest = *next.extents().iter().max().expect("a dimension");
                assert!(longest <= root(most, dimensions), "{next:?}, at most {most} ranks");
                let changed = next.changed_lines(&space, &[]);
                if next.extents() == space.extents() {
                    assert!(changed.len() <= dimensions as usize, "{next:?} after {space:?}");
                } else {
                    assert!(space.is_full() && next.ranks() == space.ranks() + 1, "{next:?} after {space:?}");
                }
                // What has not changed is there before and after, and nothing else.
                let former: BTreeSet<GridLine> = space.lines().collect();
                let (new, old): (Vec<_>, Vec<_>) = next.lines().partition(|line| changed.contains(line));
                assert!(old.iter().all(|line| former.contains(line)));
                assert!(new.iter().all(|line| !former.contains(line)));
                space = next;
            }
        }
    }

    #[test]
    fn full_layers_are_all_but_the_last_one_where_it_has_holes() {
        let layers = |extents: &[u32], ranks| {
            let (full, dimension) = RankSpace::new(extents, ranks).expect("it fits").full_layers();
            assert!(full.is_full());
            (full.extents, dimension)
        };
        assert_eq!(layers(&[3, 3], 7), (vec![2, 3], 0));
        assert_eq!(layers(&[3, 3], 9), (vec![3, 3], 0));
        assert_eq!(layers(&[2, 2, 3], 5), (vec![1, 1, 3], 1));
        assert_eq!(layers(&[7], 7), (vec![7], 0));
        assert_eq!(layers(&[3, 3], 1), (vec![1, 1], 0));
    }
}

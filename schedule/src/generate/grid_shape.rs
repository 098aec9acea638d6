//! [`GridShape`]: the shape of a grid of ranks, as the names of algorithms give it.

use std::fmt;
use std::str::FromStr;

pub use crate::rank_space::GRID_DIMENSIONS_MAX;
use crate::rank_space::{RankSpace, SpaceError, balanced_extents, text};

/// The shape of a grid of ranks. In the name of an algorithm it is `3x3`, or `2d`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum GridShape {
    /// So many places along each dimension. The last coordinate varies fastest, and the places
    /// behind the last rank are holes.
    Extents(Vec<u32>),
    /// So many dimensions, with [balanced extents](balanced_extents).
    Dimensions(u8),
}

impl GridShape {
    /// The extents of a grid for so many ranks.
    #[must_use]
    pub fn extents(&self, ranks: u32) -> Vec<u32> {
        match self {
            Self::Extents(extents) => extents.clone(),
            Self::Dimensions(dimensions) => balanced_extents(ranks, u32::from(*dimensions)),
        }
    }

    /// The first so many points of the grid.
    ///
    /// # Errors
    ///
    /// See [`SpaceError`].
    pub fn space(&self, ranks: u32) -> Result<RankSpace, SpaceError> {
        RankSpace::new(&self.extents(ranks), ranks)
    }
}

impl From<Vec<u32>> for GridShape {
    fn from(extents: Vec<u32>) -> Self {
        Self::Extents(extents)
    }
}

impl fmt::Display for GridShape {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Extents(extents) => formatter.write_str(&text(extents)),
            Self::Dimensions(dimensions) => write!(formatter, "{dimensions}d"),
        }
    }
}

impl FromStr for GridShape {
    type Err = ();

    /// Extents and dimensions are numbers above 0, at most [`GRID_DIMENSIONS_MAX`] dimensions.
    fn from_str(shape: &str) -> Result<Self, ()> {
        let number = |text: &str| text.parse().ok().filter(|&number: &u32| number > 0);
        let has_few = |dimensions: usize| dimensions <= GRID_DIMENSIONS_MAX;
        if let Some(dimensions) = shape.strip_suffix('d') {
            let dimensions = number(dimensions).filter(|&dimensions| has_few(dimensions as usize));
            return dimensions.map(|dimensions| Self::Dimensions(dimensions as u8)).ok_or(());
        }
        let extents: Option<Vec<u32>> = shape.split('x').map(number).collect();
        extents.filter(|extents| has_few(extents.len())).map(Self::Extents).ok_or(())
    }
}

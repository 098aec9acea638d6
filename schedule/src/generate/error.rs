//! Why no schedule can be made.

use pleach_vocabulary::Collective;

use super::packed::PackedError;
use super::{Algorithm, GridShape, RANKS_MAX};
use crate::rank_space::balanced_extents;

/// Why no schedule can be made.
#[derive(Clone, pleach_derive::ErrorDebug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum GenerateError {
    /// A group has at least one rank.
    #[error("a schedule needs at least 1 rank; give a rank count from 1 to {RANKS_MAX}")]
    NoRanks,
    /// More ranks than slots and signal slots can be numbered for.
    #[error("{algorithm} makes schedules for at most {limit} ranks, not {ranks}; choose another algorithm")]
    TooManyRanks {
        /// The algorithm.
        algorithm: Algorithm,
        /// The number of ranks.
        ranks: u32,
        /// The limit.
        limit: u32,
    },
    /// The algorithm does something else.
    #[error("{algorithm} is no algorithm for {}; there are {}", collective.name(), known.join(" "))]
    WrongCollective {
        /// The algorithm.
        algorithm: Algorithm,
        /// The collective.
        collective: Collective,
        /// The values that are known.
        known: &'static [&'static str],
    },
    /// The grid has fewer places than there are ranks.
    #[error(
        "{algorithm} has {places} places for {ranks} ranks; give extents whose product is {ranks} at least, as {}",
        enlarged(algorithm, *ranks)
    )]
    GridDoesNotFit {
        /// The grid.
        algorithm: Algorithm,
        /// The product of its extents.
        places: u64,
        /// The number of ranks.
        ranks: u32,
    },
    /// The hosts have not as many ranks as there are.
    #[error("{algorithm} is for {places} ranks, not {ranks}; say which are on one host, as hierarchical:2x{}", ranks.div_ceil(2))]
    HostsDoNotFit {
        /// The algorithm with its hosts.
        algorithm: Algorithm,
        /// How many ranks these have.
        places: u32,
        /// The number of ranks.
        ranks: u32,
    },
    /// There is no packing.
    #[error("packed needs the links that join the {ranks} ranks; give a topology")]
    NoTopology {
        /// The number of ranks.
        ranks: u32,
    },
    /// The packing is for something else.
    #[error(
        "{algorithm} is for {packed} of {packed_ranks} ranks, not for {collective} of {ranks}; pack for that"
    )]
    WrongPacking {
        /// The packing.
        algorithm: Algorithm,
        /// For what it is.
        packed: Collective,
        /// For how many ranks.
        packed_ranks: u32,
        /// The collective.
        collective: Collective,
        /// Of how many ranks.
        ranks: u32,
    },
    /// The packing is not valid for these ranks.
    #[error(transparent)]
    Packed(#[from] PackedError),
    /// The collective names a rank that is not there.
    #[error("rank {rank} of {collective} does not exist; there are ranks 0 to {}", ranks - 1)]
    NoSuchRank {
        /// The rank.
        rank: u32,
        /// The collective.
        collective: Collective,
        /// The number of ranks.
        ranks: u32,
    },
}

/// A grid of as many dimensions that has a place for each rank.
fn enlarged(algorithm: &Algorithm, ranks: u32) -> Algorithm {
    let enlarged =
        |shape: &GridShape| GridShape::Extents(balanced_extents(ranks, shape.extents(ranks).len() as u32));
    match algorithm {
        Algorithm::Grid(shape) => Algorithm::Grid(enlarged(shape)),
        Algorithm::GridStaged(shape) => Algorithm::GridStaged(enlarged(shape)),
        other => other.clone(),
    }
}

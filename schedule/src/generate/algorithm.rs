//! The algorithms by name, which ranks and collectives each is for, and their schedules.
//!
//! **To add an algorithm**, for example for all-reduce:
//!
//! 1. Write its file beside this one. Its `schedule` function makes the lanes of all ranks with
//!    `Program`.
//! 2. Here, add a variant to [`Algorithm`] and its name to `names` (the collectives
//!    that it carries out), `family`, `from_str` and, without extents, `PLAIN`. [`generate`] calls
//!    the new file, and [`check`] limits the number of ranks.
//! 3. Give it a price in `cost/formulae.rs`. `None` there means: the steps of the schedule are
//!    counted.
//! 4. Add it to [`candidates`](crate::select::candidates), so that selections and `pleach tune`
//!    consider it.
//! 5. If all its blocks are translations of block 0, add it to `family.rs`, so that a rank makes
//!    its own lanes alone.
//! 6. Add it to `tests.rs` and to `collectives/tests/simulated.rs`. `schedule/tests/verify/`
//!    proves every name without a change.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use pleach_vocabulary::{Collective, UnknownName};

use super::packed::{self, PackedTrees};
use super::{
    Access, Cover, FAMILY_RANKS_MAX, GenerateError, GridShape, Program, chain, direct, double_tree, eager,
    exchange, grid, grid_staged, halving_doubling, hierarchical, one_block, recursive_doubling, ring,
};
use crate::hosts::HostMap;
use crate::rank_space::product;
use crate::{Lane, Schedule};

/// How a collective is carried out.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Algorithm {
    /// Every rank with every other, in one hop.
    Direct,
    /// Straight to the scratch of those who get it, without a word of theirs before: for few bytes.
    Eager,
    /// The same along a binomial tree.
    EagerTree,
    /// Everything to everybody, in one round.
    Exchange,
    /// Exchanges of everything with the rank at distance 1, 2, 4, …
    RecursiveDoubling,
    /// Exchanges of halves, quarters, … and back.
    HalvingDoubling,
    /// Around a ring.
    Ring,
    /// Two binary trees, each for half of the data; an inner rank of one is a leaf of the other.
    DoubleTree,
    /// Along a chain.
    Chain,
    /// Along the lines of a grid of this shape, which may have holes: reduce-scatter dimension
    /// after dimension, all-gather back.
    Grid(GridShape),
    /// Along the lines of a grid, which may have holes: a whole all-reduce in each dimension, one
    /// after the other.
    GridStaged(GridShape),
    /// Inside every host, and across hosts by one rank of each for a share of the data. Its
    /// mappings stay inside hosts. `None`: the hosts of the group that carries it out.
    Hierarchical(Option<HostMap>),
    /// Along the trees of a packing, which are for one collective. `None`: what is packed for the
    /// topology of the group that carries it out.
    Packed(Option<Arc<PackedTrees>>),
}

impl Algorithm {
    /// Those whose names may stand without extents.
    const PLAIN: [Self; 11] = [
        Self::Direct,
        Self::Eager,
        Self::EagerTree,
        Self::Exchange,
        Self::RecursiveDoubling,
        Self::HalvingDoubling,
        Self::Ring,
        Self::DoubleTree,
        Self::Chain,
        Self::Hierarchical(None),
        Self::Packed(None),
    ];

    /// The names of the algorithms that carry out a collective. `AxB` stands for the extents of a
    /// grid, as `grid:2x3`, or for a number of dimensions, as `grid:2d`.
    #[must_use]
    pub fn names(collective: Collective) -> &'static [&'static str] {
        match collective {
            Collective::AllReduce => &[
                "direct",
                "exchange",
                "recursive-doubling",
                "halving-doubling",
                "ring",
                "double-tree",
                "grid:AxB",
                "grid-staged:AxB",
                "hierarchical:HxR",
                "packed",
            ],
            Collective::Reduce { .. } | Collective::Broadcast { .. } => {
                &["direct", "eager", "eager-tree", "double-tree", "chain", "hierarchical:HxR", "packed"]
            }
            Collective::AllGather | Collective::ReduceScatter => {
                &["direct", "eager", "ring", "halving-doubling", "grid:AxB", "hierarchical:HxR", "packed"]
            }
            Collective::Barrier => &["recursive-doubling", "hierarchical:HxR"],
            Collective::Gather { .. } | Collective::Scatter { .. } => &["direct", "eager", "packed"],
            Collective::AllToAll | Collective::SendRecv { .. } => &["direct", "eager"],
        }
    }

    /// The longest part of the collective that it carries between `ranks`, in bytes, where
    /// there is a limit.
    #[must_use]
    pub fn part_bytes_max(&self, collective: Collective, ranks: u32) -> Option<u64> {
        matches!(self, Self::Eager | Self::EagerTree).then(|| eager::part_bytes_max(collective, ranks))
    }

    /// Whether it can carry out the collective.
    #[must_use]
    pub fn carries_out(&self, collective: Collective) -> bool {
        Self::names(collective).iter().any(|name| name.split(':').next() == Some(self.family()))
    }

    /// The algorithm of this name, which must be able to carry out the collective.
    ///
    /// # Errors
    ///
    /// Lists the names that the collective knows.
    pub fn named(name: &str, collective: Collective) -> Result<Self, UnknownName> {
        let unknown = || UnknownName {
            what: "algorithm for this collective",
            name: name.to_owned(),
            known: Self::names(collective).join(" "),
        };
        let algorithm: Self = name.parse().map_err(|_| unknown())?;
        if algorithm.carries_out(collective) { Ok(algorithm) } else { Err(unknown()) }
    }

    /// Its name without extents.
    #[must_use]
    pub fn family(&self) -> &'static str {
        match self {
            Self::Direct => "direct",
            Self::Eager => "eager",
            Self::EagerTree => "eager-tree",
            Self::Exchange => "exchange",
            Self::RecursiveDoubling => "recursive-doubling",
            Self::HalvingDoubling => "halving-doubling",
            Self::Ring => "ring",
            Self::DoubleTree => "double-tree",
            Self::Chain => "chain",
            Self::Grid(_) => "grid",
            Self::GridStaged(_) => "grid-staged",
            Self::Hierarchical(_) => "hierarchical",
            Self::Packed(_) => "packed",
        }
    }
}

impl fmt::Display for Algorithm {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.family())?;
        if let Self::Grid(shape) | Self::GridStaged(shape) = self {
            write!(formatter, ":{shape}")?;
        }
        if let Self::Hierarchical(Some(hosts)) = self {
            write!(formatter, ":{hosts}")?;
        }
        if let Self::Packed(Some(trees)) = self {
            write!(formatter, ":{:08x}", trees.digest() >> 32)?;
        }
        Ok(())
    }
}

impl FromStr for Algorithm {
    type Err = UnknownName;

    fn from_str(name: &str) -> Result<Self, UnknownName> {
        let unknown = || {
            UnknownName {
            what: "algorithm",
            name: name.to_owned(),
            known:
                "direct eager eager-tree exchange recursive-doubling halving-doubling ring double-tree chain grid:AxB grid-staged:AxB hierarchical:HxR packed"
                    .to_owned(),
        }
        };
        if let Some(plain) = Self::PLAIN.into_iter().find(|plain| plain.family() == name) {
            return Ok(plain);
        }
        let (family, shape) = name.split_once(':').ok_or_else(unknown)?;
        match family {
            "hierarchical" => Ok(Self::Hierarchical(Some(shape.parse().map_err(|_| unknown())?))),
            "grid" => Ok(Self::Grid(shape.parse().map_err(|()| unknown())?)),
            "grid-staged" => Ok(Self::GridStaged(shape.parse().map_err(|()| unknown())?)),
            _ => Err(unknown()),
        }
    }
}

/// Most ranks of a schedule with a block for each rank that is made whole.
pub const RANKS_MAX: u32 = 4096;
/// Most ranks of an algorithm in which every rank talks to every other.
pub const DIRECT_RANKS_MAX: u32 = 1024;
/// Most ranks of an exchange, in which each sends everything to all others; it is for ranks that
/// share a host.
pub const EXCHANGE_RANKS_MAX: u32 = 64;
/// Most ranks of an all-to-all, which has a block for every two of them.
pub const ALL_TO_ALL_RANKS_MAX: u32 = 256;

/// Makes the schedule by which `ranks` ranks carry out a collective.
pub fn generate(
    collective: Collective,
    algorithm: &Algorithm,
    ranks: u32,
    access: Access,
) -> Result<Schedule, GenerateError> {
    let hosts = check(collective, algorithm, ranks)?;
    if ranks == 1 || matches!(collective, Collective::SendRecv { from, to } if from == to) {
        return Ok(single_rank(collective, ranks, access));
    }
    let space = |shape: &GridShape| {
        shape.space(ranks).map_err(|_| {
            let places = product(&shape.extents(ranks));
            GenerateError::GridDoesNotFit { algorithm: algorithm.clone(), places, ranks }
        })
    };
    Ok(match algorithm {
        Algorithm::Direct => direct::schedule(collective, ranks, access, Cover::All),
        Algorithm::Eager => eager::schedule(collective, ranks, access, &eager::EagerTree::Star),
        Algorithm::EagerTree => eager::schedule(collective, ranks, access, &eager::EagerTree::Binomial),
        Algorithm::Exchange => exchange::schedule(collective, ranks, access),
        Algorithm::RecursiveDoubling => recursive_doubling::schedule(collective, ranks, access, Cover::All),
        Algorithm::HalvingDoubling => halving_doubling::schedule(collective, ranks, access, Cover::All),
        Algorithm::Ring => ring::schedule(collective, ranks, access, Cover::All),
        Algorithm::DoubleTree => double_tree::schedule(collective, ranks, access),
        Algorithm::Chain => chain::schedule(collective, ranks, access),
        Algorithm::Grid(shape) => grid::schedule(collective, &space(shape)?, access, Cover::All),
        Algorithm::GridStaged(shape) => grid_staged::schedule(&space(shape)?, access, Cover::All),
        Algorithm::Hierarchical(_) => hierarchical::schedule(collective, &hosts, access, Cover::All),
        Algorithm::Packed(Some(trees)) => packed::schedule(trees, access),
        Algorithm::Packed(None) => return Err(GenerateError::NoTopology { ranks }),
    })
}

/// Whether there is such a schedule; for an algorithm of hosts, which rank it has where (else all
/// on one).
pub fn check(collective: Collective, algorithm: &Algorithm, ranks: u32) -> Result<HostMap, GenerateError> {
    check_up_to(RANKS_MAX, collective, algorithm, ranks)
}

/// As [`check`], for at most so many ranks.
pub(super) fn check_up_to(
    ranks_max: u32,
    collective: Collective,
    algorithm: &Algorithm,
    ranks: u32,
) -> Result<HostMap, GenerateError> {
    if ranks == 0 {
        return Err(GenerateError::NoRanks);
    }
    if !algorithm.carries_out(collective) {
        let known = Algorithm::names(collective);
        return Err(GenerateError::WrongCollective { algorithm: algorithm.clone(), collective, known });
    }
    let limit = match collective {
        Collective::AllToAll => ALL_TO_ALL_RANKS_MAX,
        Collective::AllReduce | Collective::AllGather | Collective::ReduceScatter
            if matches!(algorithm, Algorithm::Direct | Algorithm::Eager) =>
        {
            DIRECT_RANKS_MAX
        }
        Collective::AllReduce if *algorithm == Algorithm::Exchange => EXCHANGE_RANKS_MAX,
        // These have one block or two, however many ranks.
        _ if matches!(algorithm, Algorithm::DoubleTree | Algorithm::Chain) => FAMILY_RANKS_MAX,
        _ => ranks_max,
    };
    if ranks > limit {
        return Err(GenerateError::TooManyRanks { algorithm: algorithm.clone(), ranks, limit });
    }
    if let Algorithm::Grid(shape) | Algorithm::GridStaged(shape) = algorithm {
        let places = product(&shape.extents(ranks));
        if places < u64::from(ranks) {
            return Err(GenerateError::GridDoesNotFit { algorithm: algorithm.clone(), places, ranks });
        }
    }
    match algorithm {
        Algorithm::Packed(None) if ranks > 1 => return Err(GenerateError::NoTopology { ranks }),
        Algorithm::Packed(Some(trees)) if (trees.collective(), trees.ranks()) != (collective, ranks) => {
            return Err(GenerateError::WrongPacking {
                algorithm: algorithm.clone(),
                packed: trees.collective(),
                packed_ranks: trees.ranks(),
                collective,
                ranks,
            });
        }
        _ => {}
    }
    let hosts = match algorithm {
        Algorithm::Hierarchical(hosts) => {
            let places = hosts.as_ref().map_or(0, HostMap::ranks);
            let unfit = || GenerateError::HostsDoNotFit { algorithm: algorithm.clone(), places, ranks };
            hosts.clone().filter(|_| places == ranks).ok_or_else(unfit)?
        }
        _ => HostMap::one(ranks),
    };
    let named = match collective {
        Collective::SendRecv { from, to } => [from, to],
        _ => [collective.root().unwrap_or(0); 2],
    };
    match named.into_iter().find(|&rank| rank >= ranks) {
        Some(rank) => Err(GenerateError::NoSuchRank { rank, collective, ranks }),
        None => Ok(hosts),
    }
}

/// Nobody to talk to: who has input and output copies.
fn single_rank(collective: Collective, ranks: u32, access: Access) -> Schedule {
    use crate::Part::{Input, Output};
    let lanes = |rank| -> Vec<Lane> {
        let mut lane = Program::new(access, rank, 0);
        if !collective.input_parts(rank, ranks).is_empty() {
            lane.copy(Input, Output);
        }
        lane.finish().into_iter().collect()
    };
    Schedule {
        collective,
        window: 1,
        single_chunk: false,
        blocks: one_block(),
        programs: (0..ranks).map(lanes).collect(),
    }
}

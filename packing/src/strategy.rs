//! The entry of the crate: [`pack`], its options and its errors.

use std::cmp::Reverse;
use std::fmt;
use std::str::FromStr;

use pleach_vocabulary::{Collective, Rank, UnknownName, named};

use super::all_reduce::pack_all_reduce;
#[cfg(feature = "compare")]
use super::all_reduce::pack_in_two_phases;
use super::canonical::CanonicalTopology;
#[cfg(feature = "compare")]
use super::compare::blink::BlinkOptions;
#[cfg(feature = "compare")]
use super::compare::{self, StrategyError};
use super::directed::pack_directed;
use super::latency::longest_path;
use super::orbits::pack_all_gather;
use super::scatter::pack_scatter;
use super::{Certificate, EDGES_MAX, MAX_TREES_PER_ROOT, Packing, Rate, greedy};
use crate::topology::Topology;

/// Largest number of ranks that are also packed one by one where an optimal packing by symmetry has
/// deep trees.
const ONE_BY_ONE_RANKS_MAX: u32 = 64;

/// If no path from root to leaf has more than this number of edges, no search for shallower trees
/// is made.
const SHALLOW_EDGES: u32 = 2;

/// The strategy that finds trees.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Strategy {
    /// The best trees that links allow.
    #[default]
    Optimal,
    /// Blink's algorithm: multiplicative weights, then fewer trees.
    #[cfg(feature = "compare")]
    Blink,
    /// Edge-disjoint Hamiltonian cycles.
    #[cfg(feature = "compare")]
    Ring,
    /// Two binary trees.
    #[cfg(feature = "compare")]
    DoubleTree,
    /// All-reduce in two phases one after the other.
    #[cfg(feature = "compare")]
    ReduceScatterAllGather,
}

impl Strategy {
    /// All strategies.
    pub const ALL: &[Self] = &[
        Self::Optimal,
        #[cfg(feature = "compare")]
        Self::Blink,
        #[cfg(feature = "compare")]
        Self::Ring,
        #[cfg(feature = "compare")]
        Self::DoubleTree,
        #[cfg(feature = "compare")]
        Self::ReduceScatterAllGather,
    ];

    /// The name of the strategy on the command line.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Optimal => "optimal",
            #[cfg(feature = "compare")]
            Self::Blink => "blink",
            #[cfg(feature = "compare")]
            Self::Ring => "ring",
            #[cfg(feature = "compare")]
            Self::DoubleTree => "double-tree",
            #[cfg(feature = "compare")]
            Self::ReduceScatterAllGather => "reduce-scatter+all-gather",
        }
    }
}

impl fmt::Display for Strategy {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(self.name())
    }
}

impl FromStr for Strategy {
    type Err = UnknownName;

    fn from_str(name: &str) -> Result<Self, UnknownName> {
        named("strategy", Self::ALL, Self::name, name)
    }
}

/// The options of [`pack`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PackOptions {
    /// The strategy.
    pub strategy: Strategy,
    /// The number of trees of equal weight of each root, from 1 to [`MAX_TREES_PER_ROOT`]; `None`:
    /// as many as the optimum needs. For all-reduce, whose trees may have any root, this is the
    /// average number of trees for each rank.
    pub trees_per_root: Option<u32>,
}

impl PackOptions {
    /// Whether trees may be flatter than those of the optimum if short messages take less time with
    /// them.
    #[must_use]
    pub fn may_be_shallow(&self) -> bool {
        self.strategy == Strategy::Optimal && self.trees_per_root.is_none()
    }
}

/// Why nothing was packed.
#[derive(Clone, pleach_derive::ErrorDebug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PackError {
    /// A collective for which trees are of no use.
    #[error(
        "{collective}: there is nothing to pack; trees are for all-reduce, reduce, broadcast, all-gather, reduce-scatter, gather and scatter"
    )]
    NothingToPack {
        /// The collective.
        collective: Collective,
    },
    /// The root is not a rank of the topology.
    #[error("{collective}: there is no rank {root} in this topology: there are {ranks}, numbered from 0")]
    NoSuchRoot {
        /// The collective.
        collective: Collective,
        /// The root.
        root: Rank,
        /// The number of ranks.
        ranks: u32,
    },
    /// The number of trees is 0 or more than [`MAX_TREES_PER_ROOT`].
    #[error("{given} trees a root: a root has 1 to {MAX_TREES_PER_ROOT}")]
    TreesPerRoot {
        /// The number that was given.
        given: u32,
    },
    /// A number of trees is given for a collective or strategy that does not use it.
    #[error("{collective}: a number of trees a root means nothing here; leave it out")]
    NoTreesToCount {
        /// The collective.
        collective: Collective,
    },
    /// The strategy is not for this collective.
    #[cfg(feature = "compare")]
    #[error("{collective}: strategy {strategy} is not for it; use 'optimal'")]
    NotFor {
        /// The strategy.
        strategy: Strategy,
        /// The collective.
        collective: Collective,
    },
    /// Trees from or to every rank together have more than [`EDGES_MAX`] edges.
    #[error(
        "{collective}: {trees} trees a root for {ranks} ranks have more than {EDGES_MAX} edges, which takes gigabytes; take fewer ranks or trees"
    )]
    TooManyEdges {
        /// The collective.
        collective: Collective,
        /// The number of ranks.
        ranks: u32,
        /// The least number of trees of a root.
        trees: u32,
    },
    /// Trees are used in both directions, but some ranks are joined only by links that lead one
    /// way.
    #[error(
        "all-reduce uses every link both ways, and some ranks are joined only by links that lead one way; give those links their other direction"
    )]
    OneWay,
    /// The strategy finds no packing of this topology.
    #[cfg(feature = "compare")]
    #[error("{collective}: strategy {strategy}: {why}; use 'optimal'")]
    Impossible {
        /// The strategy.
        strategy: Strategy,
        /// The collective.
        collective: Collective,
        /// The cause.
        #[source]
        why: StrategyError,
    },
}

/// Packs trees for a collective. [`check`](super::check()) checks the result.
pub fn pack(
    topology: &Topology,
    collective: Collective,
    options: &PackOptions,
) -> Result<Packing, PackError> {
    if matches!(collective, Collective::SendRecv { .. } | Collective::Barrier | Collective::AllToAll) {
        return Err(PackError::NothingToPack { collective });
    }
    let ranks = topology.ranks();
    if let Some(root) = collective.root().filter(|&root| root >= ranks) {
        return Err(PackError::NoSuchRoot { collective, root, ranks });
    }
    if let Some(given) = options.trees_per_root {
        if given == 0 || given > MAX_TREES_PER_ROOT {
            return Err(PackError::TreesPerRoot { given });
        }
        let has_trees =
            |collective| !matches!(collective, Collective::Gather { .. } | Collective::Scatter { .. });
        if !has_trees(collective) {
            return Err(PackError::NoTreesToCount { collective });
        }
    }
    expect_memory(topology, collective, options)?;
    match options.strategy {
        Strategy::Optimal if ranks == 1 => Ok(alone(collective)),
        Strategy::Optimal => optimal(topology, collective, options),
        #[cfg(feature = "compare")]
        _ => other(topology, collective, options),
    }
}

/// Checks that a packing with trees for every rank fits in memory.
fn expect_memory(
    topology: &Topology,
    collective: Collective,
    options: &PackOptions,
) -> Result<(), PackError> {
    let (ranks, trees) = (topology.ranks(), options.trees_per_root.unwrap_or(1));
    let is_from_all = matches!(collective, Collective::AllGather | Collective::ReduceScatter)
        || options.trees_per_root.is_some();
    let edges = u64::from(ranks) * u64::from(ranks) * u64::from(trees);
    match is_from_all && collective.root().is_none() && edges > EDGES_MAX {
        true => Err(PackError::TooManyEdges { collective, ranks, trees }),
        false => Ok(()),
    }
}

/// The packing of another strategy, with the bound of the optimal packing.
#[cfg(feature = "compare")]
fn other(topology: &Topology, collective: Collective, options: &PackOptions) -> Result<Packing, PackError> {
    let strategy = options.strategy;
    let not_here = |why| match why {
        StrategyError::NotFor { .. } => PackError::NotFor { strategy, collective },
        why => PackError::Impossible { strategy, collective, why },
    };
    compare::expect_in_reach(topology, strategy).map_err(not_here)?;
    if topology.ranks() == 1 {
        return Ok(alone(collective));
    }
    if strategy == Strategy::ReduceScatterAllGather && collective == Collective::AllReduce {
        return pack_in_two_phases(topology, options.trees_per_root).ok_or(PackError::OneWay);
    }
    if options.trees_per_root.is_some() {
        return Err(PackError::NoTreesToCount { collective });
    }
    let best = optimal(topology, collective, &PackOptions::default())?;
    let packed = match strategy {
        Strategy::Optimal => Ok(best),
        Strategy::Blink => compare::blink(topology, &best, &BlinkOptions::default()),
        Strategy::Ring => compare::rings(topology, &best),
        Strategy::DoubleTree => compare::double_tree(topology, &best),
        // All-reduce was packed above, and this strategy is for all-reduce only.
        Strategy::ReduceScatterAllGather => Err(StrategyError::NotFor { collective }),
    };
    packed.map_err(not_here)
}

fn optimal(topology: &Topology, collective: Collective, options: &PackOptions) -> Result<Packing, PackError> {
    match collective {
        Collective::AllGather | Collective::ReduceScatter => Ok(pack_blocks(topology, collective, options)),
        Collective::Broadcast { .. } | Collective::Reduce { .. } => {
            Ok(one_by_one(topology, collective, options))
        }
        Collective::Gather { .. } | Collective::Scatter { .. } => Ok(pack_scatter(topology, collective)),
        Collective::AllReduce => pack_all_reduce(topology, options.trees_per_root).ok_or(PackError::OneWay),
        _ => Err(PackError::NothingToPack { collective }),
    }
}

/// Packs a block of each rank by symmetry: trees are found for one rank of each orbit and mapped to
/// all other ranks. If there is no symmetry, or the packing misses the bound, or its trees are not
/// shallow, ranks are also packed one by one. The better packing is taken.
fn pack_blocks(topology: &Topology, collective: Collective, options: &PackOptions) -> Packing {
    let symmetric = pack_all_gather(topology, collective, options.trees_per_root);
    let depth = |packing: &Packing| longest_path(packing, topology);
    let is_large = topology.ranks() > ONE_BY_ONE_RANKS_MAX;
    match symmetric {
        Some(packing) if packing.is_optimal() && (is_large || depth(&packing).1 <= SHALLOW_EDGES) => packing,
        symmetric => {
            let general = one_by_one(topology, collective, options);
            let is_better = |symmetric: &Packing| {
                (general.rate, Reverse(depth(&general))) <= (symmetric.rate, Reverse(depth(symmetric)))
            };
            symmetric.filter(is_better).unwrap_or(general)
        }
    }
}

/// An exact packing if this takes seconds. Otherwise a greedy packing, which visits every link for
/// each tree.
fn one_by_one(topology: &Topology, collective: Collective, options: &PackOptions) -> Packing {
    match greedy::is_exact_within_reach(topology) {
        true => pack_directed(topology, collective, options.trees_per_root),
        false => {
            let pack = |topology: &Topology, collective| {
                greedy::pack_one_way(topology, collective, options.trees_per_root)
            };
            match collective.root().and_then(|root| CanonicalTopology::from_rank(topology, root)) {
                Some(canonical) => canonical.pack(collective, pack),
                None => pack(topology, collective),
            }
        }
    }
}

/// The packing of a single rank.
fn alone(collective: Collective) -> Packing {
    let zero = Rate::default();
    Packing { collective, rate: zero, bound: zero, certificate: Certificate::Alone, trees: Vec::new() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::topology::preset;

    fn error(collective: Collective, options: &PackOptions) -> PackError {
        pack(&preset("mesh:3").unwrap(), collective, options).unwrap_err()
    }

    #[test]
    fn strategies_are_known_by_their_names() {
        for &strategy in Strategy::ALL {
            assert_eq!(strategy.name().parse(), Ok(strategy));
        }
        let unknown = "best".parse::<Strategy>().unwrap_err().to_string();
        assert!(unknown.starts_with("'best' is no strategy; there are optimal"), "{unknown}");
    }

    #[test]
    fn what_cannot_be_packed_is_refused_with_its_reason() {
        let options = PackOptions::default();
        for collective in [Collective::AllToAll, Collective::Barrier, Collective::SendRecv { from: 0, to: 1 }]
        {
            assert_eq!(error(collective, &options), PackError::NothingToPack { collective });
        }
        let collective = Collective::Gather { root: 3 };
        assert_eq!(error(collective, &options), PackError::NoSuchRoot { collective, root: 3, ranks: 3 });
        let counted = |given| PackOptions { trees_per_root: Some(given), ..PackOptions::default() };
        for given in [0, MAX_TREES_PER_ROOT + 1] {
            assert_eq!(error(Collective::AllGather, &counted(given)), PackError::TreesPerRoot { given });
        }
        let collective = Collective::Scatter { root: 0 };
        assert_eq!(error(collective, &counted(1)), PackError::NoTreesToCount { collective });
    }

    #[test]
    fn one_rank_has_nothing_to_move() {
        let mut builder = Topology::builder();
        builder.rank("a");
        let topology = builder.build().unwrap();
        for collective in [Collective::AllGather, Collective::AllReduce, Collective::Gather { root: 0 }] {
            let packing = pack(&topology, collective, &PackOptions::default()).unwrap();
            super::super::check(&topology, &packing).unwrap();
            assert_eq!(packing.certificate, Certificate::Alone);
        }
    }
}

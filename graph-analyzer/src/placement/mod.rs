//! Which rank runs which node.
//!
//! A [`Placement`] is given, by a [table](Placement::table) of names or by the
//! [stages](Placement::stages) in the file, or computed: [`Placement::pipeline`] cuts the graph's
//! order into contiguous parts with the least bottleneck, [`Placement::min_cut`] minimizes the
//! bytes that cross.
//!
//! The caller gives inputs to the first rank and takes outputs from the last one. A tensor crosses
//! once to each rank that uses it. Nodes that compute constants are placed nowhere: each part has
//! those that it uses.
//!
//! **Invariant:** every rank has a node. That parts form no cycle is for
//! [`Partition`](crate::partition::Partition) to check; computed placements never form any.

use std::collections::BTreeMap;

use pleach_transport::Space;
use pleach_vocabulary::Rank;

use crate::costs::Costs;
use crate::graph::{Graph, NodeId};
use dataflow::Dataflow;

mod dataflow;
mod division;
mod min_cut;
mod pipeline;
mod refinement;
mod table;

pub use table::{Table, TableError};

/// Most ranks of a placement.
pub const RANKS_MAX: u32 = 1024;

/// A rank for each node that is placed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    ranks: u32,
    rank_of: Vec<Option<Rank>>,
    /// The ranks that have what they receive elsewhere than in the host's memory.
    spaces: BTreeMap<Rank, Space>,
}

/// Why there is no placement.
#[derive(Clone, pleach_derive::ErrorDebug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PlacementError {
    /// A number of ranks that is none.
    #[error("{ranks} ranks; give a number from 1 to {RANKS_MAX}")]
    RankCount {
        /// The number.
        ranks: u32,
    },
    /// Some rank would have no node.
    #[error("{ranks} ranks for {nodes} nodes that can be placed; take at most {nodes} ranks")]
    MoreRanksThanNodes {
        /// The ranks.
        ranks: u32,
        /// The nodes that are not constants.
        nodes: usize,
    },
    /// A rank has no node.
    #[error("rank {rank} of {ranks} has no node; place a node there, or take fewer ranks")]
    EmptyRank {
        /// The rank.
        rank: Rank,
        /// The number of ranks.
        ranks: u32,
    },
    /// A node is placed nowhere.
    #[error("node '{node}' has no {what}; give it one")]
    Unplaced {
        /// The node.
        node: String,
        /// What it lacks.
        what: &'static str,
    },
    /// A node is placed on a rank that is not there.
    #[error("node '{node}' is on rank {rank}, and there are {ranks} ranks; correct one of the numbers")]
    NoSuchRank {
        /// The node.
        node: String,
        /// The rank.
        rank: Rank,
        /// The number of ranks.
        ranks: u32,
    },
    /// The parts are too large for the ranks.
    #[error(
        "no pipeline of {ranks} ranks fits: a rank needs at least {needed} bytes, which is {} more than the limit of {limit}; \
         allow more memory or take more ranks", .needed - .limit
    )]
    Memory {
        /// The ranks.
        ranks: u32,
        /// The least memory of the fullest rank.
        needed: u64,
        /// The limit.
        limit: u64,
    },
    /// The parts cannot be so even.
    #[error(
        "no parts are within {percent} % of the average: the most even ones found exceed it by {reached} %; allow more"
    )]
    Imbalance {
        /// The limit.
        percent: u32,
        /// What was reached.
        reached: u32,
    },
    /// Memory is named for a rank that there is not.
    #[error("rank {rank} is to have its tensors elsewhere, and there are {ranks} ranks, from 0 on")]
    NoSpaceOf {
        /// The rank.
        rank: Rank,
        /// The number of ranks.
        ranks: u32,
    },
    /// A table is none of this graph.
    #[error(transparent)]
    Table(#[from] TableError),
}

impl Placement {
    /// Everything on one rank.
    #[must_use]
    pub fn whole(graph: &Graph) -> Self {
        let mut rank_of = vec![None; graph.nodes().len()];
        for node in graph.placed_nodes() {
            rank_of[node.index()] = Some(0);
        }
        Self { ranks: 1, rank_of, spaces: BTreeMap::new() }
    }

    /// Contiguous parts of the graph's order with the least bottleneck: the longest time of
    /// computing or receiving of a rank, under a memory limit in bytes. Among those the least bytes
    /// cross. Exact for up to 4,096 nodes; in longer graphs only some positions are cut.
    ///
    /// # Errors
    ///
    /// [`PlacementError`]: too many ranks, or a part that fits no rank.
    pub fn pipeline(
        graph: &Graph,
        ranks: u32,
        costs: &Costs,
        memory: Option<u64>,
    ) -> Result<Self, PlacementError> {
        let dataflow = Dataflow::new(graph, costs);
        check_count(ranks, dataflow.len())?;
        let ends = pipeline::cut(&dataflow, ranks, costs, memory)?;
        Ok(Self::of(graph, ranks, &dataflow, &division::ranks_of(&ends)))
    }

    /// Parts between which few bytes cross; no part may compute longer than the average by more
    /// than `imbalance` percent. Exact for two ranks without that limit; otherwise refined from the
    /// best contiguous parts.
    ///
    /// # Errors
    ///
    /// [`PlacementError`]: too many ranks, or parts that cannot be so even.
    pub fn min_cut(
        graph: &Graph,
        ranks: u32,
        costs: &Costs,
        imbalance: Option<u32>,
    ) -> Result<Self, PlacementError> {
        let dataflow = Dataflow::new(graph, costs);
        check_count(ranks, dataflow.len())?;
        let rank_of = match (ranks, imbalance) {
            (1, _) => vec![0; dataflow.len()],
            (2, None) => min_cut::two_parts(&dataflow),
            _ => refinement::few_crossings(&dataflow, ranks, imbalance)?,
        };
        Ok(Self::of(graph, ranks, &dataflow, &rank_of))
    }

    /// The stages that the file gives to nodes, as ranks.
    ///
    /// # Errors
    ///
    /// [`PlacementError`]: a node without a stage, or a stage without a node.
    pub fn stages(graph: &Graph) -> Result<Self, PlacementError> {
        let mut rank_of = vec![None; graph.nodes().len()];
        for node in graph.placed_nodes() {
            let stage = graph.node(node).stage;
            let unplaced =
                || PlacementError::Unplaced { node: graph.node(node).name.clone(), what: "pipeline_stage" };
            rank_of[node.index()] = Some(stage.ok_or_else(unplaced)?);
        }
        Self::given(graph, None, rank_of)
    }

    /// The ranks that a table gives to names of nodes. Without `ranks`, the table's highest rank is
    /// the last.
    ///
    /// # Errors
    ///
    /// [`PlacementError`]: a name that no node has, a node without a rank, or a rank without a
    /// node.
    pub fn table(graph: &Graph, table: &Table, ranks: Option<u32>) -> Result<Self, PlacementError> {
        let rank_of = table.ranks_of(graph)?;
        Self::given(graph, ranks, rank_of)
    }

    /// Checks ranks that were given.
    fn given(graph: &Graph, ranks: Option<u32>, rank_of: Vec<Option<Rank>>) -> Result<Self, PlacementError> {
        let last = rank_of.iter().enumerate().filter_map(|(node, rank)| Some(((*rank)?, node))).max();
        let (last, node) = last.unwrap_or((0, 0));
        if last >= ranks.unwrap_or(RANKS_MAX) {
            let node = graph.node(NodeId(node as u32)).name.clone();
            return Err(PlacementError::NoSuchRank { node, rank: last, ranks: ranks.unwrap_or(RANKS_MAX) });
        }
        let ranks = ranks.unwrap_or(last + 1);
        let placed = rank_of.iter().flatten().count();
        check_count(ranks, placed)?;
        let mut has_node = vec![false; ranks as usize];
        rank_of.iter().flatten().for_each(|&rank| has_node[rank as usize] = true);
        if let Some(rank) = has_node.iter().position(|has| !has)
            && placed > 0
        {
            return Err(PlacementError::EmptyRank { rank: rank as Rank, ranks });
        }
        Ok(Self { ranks, rank_of, spaces: BTreeMap::new() })
    }

    fn of(graph: &Graph, ranks: u32, dataflow: &Dataflow, ranks_of_placed: &[Rank]) -> Self {
        let mut rank_of = vec![None; graph.nodes().len()];
        for (node, &rank) in dataflow.nodes.iter().zip(ranks_of_placed) {
            rank_of[node.index()] = Some(rank);
        }
        Self { ranks, rank_of, spaces: BTreeMap::new() }
    }

    /// The same nodes on the same ranks, of which this one has the tensors that it receives in this
    /// memory. Each rank has them in the host's memory otherwise.
    ///
    /// # Errors
    ///
    /// [`PlacementError::NoSpaceOf`]: there is no such rank.
    pub fn with_space(mut self, rank: Rank, space: Space) -> Result<Self, PlacementError> {
        if rank >= self.ranks {
            return Err(PlacementError::NoSpaceOf { rank, ranks: self.ranks });
        }
        self.spaces.insert(rank, space);
        Ok(self)
    }

    /// The memory in which a rank has the tensors that it receives.
    #[must_use]
    pub fn space_of(&self, rank: Rank) -> Space {
        self.spaces.get(&rank).copied().unwrap_or(Space::Host)
    }

    /// The number of ranks.
    #[must_use]
    pub fn ranks(&self) -> u32 {
        self.ranks
    }

    /// The rank of a node; nothing for a node that computes constants.
    #[must_use]
    pub fn rank_of(&self, node: NodeId) -> Option<Rank> {
        self.rank_of[node.index()]
    }
}

/// A graph of constants alone fits one rank.
fn check_count(ranks: u32, nodes: usize) -> Result<(), PlacementError> {
    if ranks == 0 || ranks > RANKS_MAX {
        return Err(PlacementError::RankCount { ranks });
    }
    if ranks > 1 && ranks as usize > nodes {
        return Err(PlacementError::MoreRanksThanNodes { ranks, nodes });
    }
    Ok(())
}

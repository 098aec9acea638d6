//! Blink's own way (Wang et al., MLSys 2020), as a strategy to compare with.
//!
//! * Links that join ranks directly: [multiplicative weights](weights) over shortest arborescences,
//!   then [few of the trees](fewer) by an integer program, within 5 % of what the weights reached.
//!   Reduce is a broadcast over reversed links; an all-reduce goes up and down the same trees with
//!   a root; an all-gather is that without the reduction: of each tree every rank uses what leads
//!   from it; gather and scatter are a reduce and a broadcast of which each branch carries only its
//!   own rank's block.
//! * [Switches](mod@switched): one-hop trees, and three phases across servers, which with all else
//!   that has several switches is as much as the paper says.
//! * [Two classes of links](hybrid) share the data by what the use of the slower ones costs at
//!   first.
//! * The size of chunks (`tuning::chunks` of `pleach-schedule`) is searched for while calls are
//!   measured, by `pleach tune`, for all algorithms.
//!
//! None of it is optimal, and nothing here proves anything: bound and certificate come from
//! elsewhere, the weights are rounded to exact rationals that fit.

use std::time::Duration;

use pleach_vocabulary::{Collective, Rank};

use super::EDGES_MAX;
use super::Tree;
use super::scale::fitted;
use super::shape::Weighted;
use crate::topology::Topology;

mod arborescence;
mod fewer;
pub mod hybrid;
mod point_to_point;
mod switched;
mod weights;

/// What the paper leaves open.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BlinkOptions {
    /// How small the steps of the weights are. The paper's count of trees speaks for 0.1.
    pub epsilon: f64,
    /// Which share of the rate may be lost for few trees.
    pub threshold: f64,
    /// How long one integer program may take. What it has found by then is used.
    pub time_limit: Duration,
}

impl Default for BlinkOptions {
    fn default() -> Self {
        Self { epsilon: 0.1, threshold: 0.05, time_limit: Duration::from_millis(500) }
    }
}

/// Why Blink has no trees.
#[derive(Clone, Copy, pleach_derive::ErrorDebug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BlinkError {
    /// Its trees would have to join two ranks.
    #[error("ranks {from} and {to} are not joined by a link or through switches only")]
    Unjoined {
        /// One.
        from: Rank,
        /// The other one.
        to: Rank,
    },
    /// Its many thin trees have more than [`EDGES_MAX`] edges.
    #[error("its {trees} trees have more than {EDGES_MAX} edges, one set for each rank's block")]
    TooLarge {
        /// How many there are before each rank uses all of them.
        trees: usize,
    },
}

/// The trees by which Blink carries out a collective, with weights that fit. None for a single
/// rank.
///
/// # Errors
///
/// Where Blink has no trees for this topology.
pub fn trees(
    topology: &Topology,
    collective: Collective,
    options: &BlinkOptions,
) -> Result<Vec<Tree>, BlinkError> {
    let ranks = topology.ranks();
    if ranks == 1 {
        return Ok(Vec::new());
    }
    match collective {
        Collective::Reduce { root } => {
            let broadcast = trees(&topology.reversed(), Collective::Broadcast { root }, options)?;
            return Ok(broadcast.into_iter().map(turned).collect());
        }
        Collective::Gather { root } => {
            let scatter = trees(&topology.reversed(), Collective::Scatter { root }, options)?;
            return Ok(scatter.into_iter().map(turned).collect());
        }
        _ => {}
    }
    if topology.has_switches() {
        return switched(topology, collective, options);
    }
    let (by, root) = match collective {
        Collective::Broadcast { root } | Collective::Scatter { root } => {
            (Collective::Broadcast { root }, root)
        }
        _ => (Collective::AllReduce, 0),
    };
    let shapes = point_to_point::shapes(topology, by, root, options)?;
    every_use(&shapes, ranks, collective)
}

/// Trees of equal shares, as heavy as the links allow.
fn switched(
    topology: &Topology,
    collective: Collective,
    options: &BlinkOptions,
) -> Result<Vec<Tree>, BlinkError> {
    let ranks = topology.ranks();
    let mut shapes = switched::shapes(topology, options)?;
    let stars = shapes.iter().all(|weighted| weighted.shape.ways.iter().all(|way| way.from == weighted.top));
    let mut tops: Vec<Rank> = shapes.iter().map(|weighted| weighted.top).collect();
    tops.sort_unstable();
    let is_own = tops.into_iter().eq(0..ranks);
    let trees = match collective {
        // Each rank is on top of one tree, which carries its block.
        Collective::AllGather if is_own => {
            shapes.iter().map(|tree| tree.shape.out_tree(ranks, tree.top, tree.weight)).collect()
        }
        Collective::ReduceScatter if is_own => {
            shapes.iter().map(|tree| tree.shape.in_tree(ranks, tree.top, tree.weight)).collect()
        }
        Collective::Scatter { root } if stars => {
            shapes.retain(|star| star.top == root);
            Weighted::trees(&shapes, ranks, collective)
        }
        // The root hands each of the others its share, who pass it on; by its own star it would
        // send it to all.
        Collective::Broadcast { root } if stars && ranks > 2 => {
            shapes.retain(|star| star.top != root);
            Weighted::trees(&shapes, ranks, collective)
        }
        _ => every_use(&shapes, ranks, collective)?,
    };
    fitted(topology, collective, trees).ok_or(BlinkError::Unjoined { from: 0, to: 1 })
}

/// The trees of all shapes, where these are not too many.
fn every_use(shapes: &[Weighted], ranks: u32, collective: Collective) -> Result<Vec<Tree>, BlinkError> {
    let uses = match collective {
        Collective::AllGather | Collective::ReduceScatter => ranks as usize,
        _ => 1,
    };
    let trees = shapes.len();
    match trees.saturating_mul(uses).saturating_mul(ranks as usize) > EDGES_MAX as usize {
        true => Err(BlinkError::TooLarge { trees }),
        false => Ok(Weighted::trees(shapes, ranks, collective)),
    }
}

/// The same tree on reversed links.
fn turned(mut tree: Tree) -> Tree {
    tree.turn();
    tree
}

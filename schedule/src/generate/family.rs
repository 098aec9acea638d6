//! Which algorithms make families: schedules whose blocks are translations of block 0.
//!
//! Made are the lanes of block 0, in as much time and memory as that block has steps. A rank that
//! has [proved](crate::verify::verify_family) the family makes its own lanes from it, and nobody
//! makes the others'.
//!
//! | algorithm | extents of the group | for |
//! |--|--|--|
//! | direct, ring | `p` | all |
//! | halving-doubling | `2 × 2 × …` | `p` a power of two |
//! | recursive-doubling, by ranks | `2 × 2 × …` | all-reduce, `p` a power of two |
//! | grid, grid-staged | those of the grid | grids without holes |
//! | hierarchical | hosts × ranks of a host | hosts of one size, one after the other |
//!
//! They are all-reduce, all-gather and reduce-scatter, in which a rank is like any other. Not among
//! them are collectives with a root, which have few blocks: for them, for double trees and for
//! barriers the whole schedule is as long as one block or two. Exchange is for few ranks.
//! Packings, proxies of other numbers than powers of two, hosts of different size and grids with
//! holes have no such symmetry: these are made and proved whole.

use pleach_vocabulary::Collective;

use super::algorithm::check_up_to;
use super::{Access, Algorithm, Cover, GenerateError, direct, grid, grid_staged, halving_doubling, ring};
use super::{hierarchical, recursive_doubling};
use crate::family::{Family, LaneOrder, SourceOrder, Symmetry};
use crate::hosts::HostMap;
use crate::rank_space::RankSpace;

/// Most ranks of a family, and of a schedule that is as short.
pub const FAMILY_RANKS_MAX: u32 = 16_384;

/// The family by which `ranks` ranks carry out a collective: the schedule that
/// [`generate`](super::generate) makes whole. `None` where that schedule is not made of one block.
///
/// # Errors
///
/// There is no such schedule.
pub fn family(
    collective: Collective,
    algorithm: &Algorithm,
    ranks: u32,
    access: Access,
) -> Result<Option<Family>, GenerateError> {
    let hosts = check_up_to(FAMILY_RANKS_MAX, collective, algorithm, ranks)?;
    if ranks == 1
        || !matches!(collective, Collective::AllReduce | Collective::AllGather | Collective::ReduceScatter)
    {
        return Ok(None);
    }
    let cover = Cover::First;
    // Others wait for what a rank gives them, so its own block comes last.
    let mut lane_order = LaneOrder::Ascending(1);
    let mut source_order = SourceOrder::ByContributor;
    let mut symmetry = Symmetry::Blocks;
    let bits = || vec![2; ranks.ilog2() as usize];
    let (column, extents) = match algorithm {
        Algorithm::Direct => (direct::schedule(collective, ranks, access, cover), vec![ranks]),
        Algorithm::Ring => {
            lane_order = LaneOrder::Descending(u32::from(collective != Collective::AllGather));
            (ring::schedule(collective, ranks, access, cover), vec![ranks])
        }
        Algorithm::HalvingDoubling if ranks.is_power_of_two() => {
            (halving_doubling::schedule(collective, ranks, access, cover), bits())
        }
        Algorithm::RecursiveDoubling if ranks.is_power_of_two() => {
            (symmetry, source_order) = (Symmetry::Ranks, SourceOrder::AsTranslated);
            (recursive_doubling::schedule(collective, ranks, access, cover), bits())
        }
        Algorithm::Grid(shape) | Algorithm::GridStaged(shape) => {
            let Some(space) = shape.space(ranks).ok().filter(RankSpace::is_full) else { return Ok(None) };
            let column = if let Algorithm::Grid(_) = algorithm {
                grid::schedule(collective, &space, access, cover)
            } else {
                source_order = SourceOrder::AsTranslated;
                grid_staged::schedule(&space, access, cover)
            };
            (column, space.extents().to_vec())
        }
        Algorithm::Hierarchical(_) => {
            let Some(size) = even_size(&hosts) else { return Ok(None) };
            (hierarchical::schedule(collective, &hosts, access, cover), vec![ranks / size, size])
        }
        _ => return Ok(None),
    };
    Ok(Some(Family { symmetry, column, extents, source_order, lane_order }))
}

/// The number of ranks of a host, if all have as many, one host after the other.
fn even_size(hosts: &HostMap) -> Option<u32> {
    let size = hosts.ranks() / hosts.hosts().max(1);
    let is_even = (0..).zip(hosts.by_rank()).all(|(rank, &host): (u32, _)| host * size == rank - rank % size);
    (size > 0 && is_even).then_some(size)
}

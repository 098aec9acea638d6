//! What other ways reach on the same links.

use pleach::collectives::packing::{PackError, PackOptions, Rate, Strategy, pack};

use super::outcome::Plan;

/// Most ranks of a topology on which others are tried: their search for rings and trees is not made for more.
const RANKS_MAX: u32 = 64;

/// Another way, and what it reaches.
pub(super) struct Compared {
    pub(super) name: &'static str,
    /// Or why it is not possible here.
    pub(super) rate: Result<Rate, String>,
    /// What the reader has to know besides.
    pub(super) note: &'static str,
}

/// All ways that the plan did not take.
pub(super) fn others(plan: &Plan) -> Vec<Compared> {
    let Plan { topology, packing, .. } = plan;
    if !(2..=RANKS_MAX).contains(&topology.ranks()) {
        return Vec::new();
    }
    let compared = |strategy: Strategy| {
        let options = PackOptions { strategy, ..PackOptions::default() };
        let rate = match pack(topology, packing.collective, &options) {
            Ok(packing) => Ok(packing.rate),
            Err(PackError::NotFor { .. }) => return None,
            Err(error) => Err(error.to_string()),
        };
        Some(Compared { name: strategy.name(), rate, note: "" })
    };
    Strategy::ALL.into_iter().filter(|&strategy| strategy != plan.strategy).filter_map(compared).collect()
}

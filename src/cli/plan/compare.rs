//! What other ways reach on the same links.

use pleach::collectives::packing::compare::{NotHere, Outcome, Row, compare};
use pleach::collectives::packing::{PackOptions, Packing, Rate, Strategy, pack};

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

/// All ways that the plan did not take, and that there are for its collective.
pub(super) fn others(plan: &Plan) -> Vec<Compared> {
    let Plan { topology, packing, strategy, .. } = plan;
    if !(2..=RANKS_MAX).contains(&topology.ranks()) {
        return Vec::new();
    }
    let best: Option<Packing> = match strategy {
        Strategy::Optimal => Some(packing.clone()),
        _ => pack(topology, packing.collective, &PackOptions::default()).ok(),
    };
    let Some(best) = best else { return Vec::new() };
    let rows = compare(topology, &best).rows;
    rows.into_iter().filter(|row| row.strategy != strategy.name()).filter_map(compared).collect()
}

fn compared(row: Row) -> Option<Compared> {
    let Row { strategy: name, outcome } = row;
    Some(match outcome {
        Outcome::Packed(packing) => Compared { name, rate: Ok(packing.rate), note: "" },
        Outcome::OverPcie(rate) => Compared { name, rate: Ok(rate), note: "over PCIe" },
        Outcome::NotHere(NotHere::NotFor { .. }) => return None,
        Outcome::NotHere(why) => Compared { name, rate: Err(why.to_string()), note: "" },
    })
}

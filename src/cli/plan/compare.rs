//! What other ways reach on the same links.

use pleach::packing::compare::{Hybrid, Outcome, Row, StrategyError, compare, hybrid};
use pleach::packing::{PackOptions, Packing, Rate, Strategy, pack};

use super::outcome::Plan;

/// Most ranks of a topology on which others are tried: their search for rings and trees is not made
/// for more.
const RANKS_MAX: u32 = 64;

/// Another way, and what it reaches.
pub(super) struct Compared {
    pub(super) name: &'static str,
    /// Or why it is not possible here.
    pub(super) rate: Result<Rate, String>,
    /// What the reader has to know besides.
    pub(super) note: String,
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
    let mixed = rows.iter().find_map(|row| over_pcie_too(plan, row));
    let others = rows.into_iter().filter(|row| row.strategy != strategy.name()).filter_map(compared);
    others.chain(mixed).collect()
}

/// Blink's trees with PCIe beside them, where it was said what that costs and what the call
/// carries.
fn over_pcie_too(plan: &Plan, row: &Row) -> Option<Compared> {
    let Outcome::Packed(blink) = &row.outcome else { return None };
    if row.strategy != Strategy::Blink.name() {
        return None;
    }
    let (bytes, setup_ns) = (plan.bytes?, plan.pcie_setup_ns?);
    let Hybrid { split, rate } = hybrid(&plan.topology, blink, bytes, setup_ns)?;
    let part = split.slow_bytes as f64 * 100.0 / bytes as f64;
    Some(Compared { name: "blink and PCIe", rate: Ok(rate), note: format!("{part:.1} % over PCIe") })
}

fn compared(row: Row) -> Option<Compared> {
    let Row { strategy: name, outcome } = row;
    Some(match outcome {
        Outcome::Packed(packing) => Compared { name, rate: Ok(packing.rate), note: String::new() },
        Outcome::AtLeast(packing) => Compared { name, rate: Ok(packing.rate), note: "at least".to_owned() },
        Outcome::OverPcie(rate) => Compared { name, rate: Ok(rate), note: "over PCIe".to_owned() },
        Outcome::StrategyError(StrategyError::NotFor { .. }) => return None,
        Outcome::StrategyError(why) => Compared { name, rate: Err(why.to_string()), note: String::new() },
    })
}

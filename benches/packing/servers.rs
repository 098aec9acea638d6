//! Every allocation of a server: ours, Blink's strategy, rings.

use pleach::Collective;
use pleach::packing::allocations::{Allocation, allocations};
use pleach::packing::compare::{Comparison, Outcome, compare as compare_strategies};
use pleach::packing::topology::{Topology, preset};
use pleach::packing::{PackOptions, Rate, check, pack};

use crate::targets::as_f64;

/// The servers of Blink's paper.
pub(crate) const NAMES: [&str; 2] = ["dgx-1v", "dgx-1p"];

/// What a server's allocations reach.
pub(crate) struct Server {
    pub(crate) name: &'static str,
    pub(crate) rows: Vec<(Allocation, Vec<Comparison>)>,
}

/// Compared in this order.
pub(crate) const COLLECTIVES: [Collective; 3] =
    [Collective::Broadcast { root: 0 }, Collective::AllReduce, Collective::AllGather];

/// Packs everything; whatever has trees is checked.
pub(crate) fn compare(name: &'static str) -> Result<Server, String> {
    let server = preset(name).map_err(|error| format!("{name}: {error}"))?;
    let mut rows = Vec::new();
    for allocation in allocations(&server, 3..=8) {
        let comparisons = compare_one(&allocation.topology)
            .map_err(|error| format!("{name}, ranks {:?}: {error}", allocation.ranks))?;
        rows.push((allocation, comparisons));
    }
    Ok(Server { name, rows })
}

fn compare_one(topology: &Topology) -> Result<Vec<Comparison>, String> {
    let options = PackOptions::default();
    let optimal = |collective| pack(topology, collective, &options).map_err(|error| error.to_string());
    let mut comparisons = Vec::new();
    for collective in COLLECTIVES {
        let comparison = compare_strategies(topology, &optimal(collective)?);
        for row in &comparison.rows {
            if let Outcome::Packed(packing) | Outcome::AtLeast(packing) = &row.outcome {
                let checked = check(topology, packing);
                checked.map_err(|flaw| format!("{collective}, {}: {flaw}", row.strategy))?;
            }
        }
        comparisons.push(comparison);
    }
    Ok(comparisons)
}

/// The rate of a strategy.
pub(crate) fn rate(comparison: &Comparison, strategy: &str) -> Option<Rate> {
    comparison.row(strategy).and_then(|row| row.outcome.rate())
}

impl Server {
    /// The geometric mean over allocations of the optimal rate by the rate of another strategy, and
    /// the largest ratio. Allocations count where the other strategy has links to use: the rate of
    /// a ring over PCIe is an assumption, and an assumption enters no mean.
    pub(crate) fn gain(&self, collective: usize, strategy: &str) -> Option<(f64, f64)> {
        let gains: Vec<f64> = self
            .rows
            .iter()
            .filter_map(|(_, comparisons)| {
                let comparison = &comparisons[collective];
                let row = comparison.row(strategy)?;
                if matches!(row.outcome, Outcome::OverPcie(_)) {
                    return None;
                }
                Some(as_f64(rate(comparison, "optimal")? / row.outcome.rate()?))
            })
            .collect();
        let sum: f64 = gains.iter().map(|gain| gain.ln()).sum();
        let largest = gains.iter().copied().reduce(f64::max)?;
        Some(((sum / gains.len() as f64).exp(), largest))
    }

    /// These, for a terminal.
    pub(crate) fn means(&self) -> String {
        let mut text =
            format!("{}: {} allocations of 3 to 8 GPUs; ours by theirs", self.name, self.rows.len());
        for (index, collective) in COLLECTIVES.into_iter().enumerate() {
            text += &format!("\n  {:<11}", collective.name());
            for strategy in ["blink", "ring", "double-tree", "reduce-scatter+all-gather"] {
                if let Some((mean, largest)) = self.gain(index, strategy) {
                    text += &format!("  {strategy}: mean {mean:.3}, most {largest:.2}");
                }
            }
        }
        text
    }
}

//! The pipeline with the least bottleneck.

use super::PlacementError;
use super::dataflow::Dataflow;
use super::division::{PartCost, least_largest, least_received};
use crate::costs::Costs;

/// The ends of the parts.
pub(super) fn cut(
    dataflow: &Dataflow,
    ranks: u32,
    costs: &Costs,
    memory: Option<u64>,
) -> Result<Vec<usize>, PlacementError> {
    let time = |cost: &PartCost| cost.compute_ns.max(costs.transfer_ns(cost.received_bytes));
    let limit = memory.unwrap_or(u64::MAX);
    let fits = |cost: &PartCost| cost.memory_bytes <= limit;
    let too_large = || {
        let needed = least_largest(dataflow, ranks, &|cost| cost.memory_bytes, &|_| true);
        PlacementError::Memory { ranks, needed: needed.unwrap_or(u64::MAX), limit }
    };
    // A guess of the bottleneck ends most sweeps early. If parts within it exist, the least
    // bottleneck is among them; otherwise the guess is doubled.
    let total_ns = dataflow.total_ns();
    let average_ns = total_ns / u64::from(ranks);
    let mut guess_ns = average_ns + average_ns / 4;
    let bottleneck = loop {
        let within = |cost: &PartCost| fits(cost) && time(cost) <= guess_ns;
        if let Some(bottleneck) = least_largest(dataflow, ranks, &time, &within) {
            break bottleneck;
        }
        guess_ns = match guess_ns {
            u64::MAX => return Err(too_large()),
            large if large > total_ns => u64::MAX,
            small => small * 2 + 1,
        };
    };
    let fits = |cost: &PartCost| fits(cost) && time(cost) <= bottleneck;
    least_received(dataflow, ranks, &fits).ok_or_else(too_large)
}

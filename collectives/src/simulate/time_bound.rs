//! How long calls may take at most in virtual time without harmful faults.

use std::time::Duration;

use super::scenario::Scenario;
use crate::engine::QUERY_AFTER;

/// How much slower than this model a call may be.
const FACTOR: u32 = 4;
/// Chunks are taken to be at least so long, in bytes.
const CHUNK_BYTES_MIN: u64 = 4096;
/// Signals one after the other that move one chunk from a rank to the next, with the answer that
/// makes room.
const SIGNALS_A_HOP: u32 = 4;
/// The longest that a rank waits until it asks for room, in periods of asking: they double up
/// to 32.
const ASKING: u32 = 64;

/// From when the last rank has entered call `call` until it must be over: the slowest schedule
/// (every chunk once around all ranks and back, one after the other, each delayed as much as can
/// be, all bytes of all ranks over one link), times [`FACTOR`]; that of all calls up to this one,
/// since all of them may be under way.
pub(super) fn time_bound(scenario: &Scenario, call: usize) -> Duration {
    let Scenario { network, faults, ranks, .. } = scenario;
    let ranks = *ranks;
    let latency = (1..ranks).map(|peer| network.latency(0, peer)).max().unwrap_or_default();
    let delay = if faults.delay_per_million > 0 { faults.delay } else { Duration::ZERO };
    let hop = (latency + faults.reorder + delay + Duration::from_nanos(100)) * SIGNALS_A_HOP;
    let bytes_per_s = network.links().iter().map(|link| link.bytes_per_s).min().unwrap_or(1_000_000_000);
    let of = |plan: &super::CallPlan| {
        let whole = plan.whole_bytes(ranks) as u64;
        let chunks = (whole / CHUNK_BYTES_MIN) as u32 / ranks + 1;
        let moved = Duration::from_nanos(2 * whole * u64::from(ranks) * 1_000_000_000 / bytes_per_s);
        hop * (2 * ranks * chunks) + moved + QUERY_AFTER * ASKING
    };
    let freezes = faults.timed.len() as u32 * pleach_transport::sim::FREEZE_MAX;
    let late: Duration = scenario.calls[..=call].iter().filter_map(|plan| Some(plan.late?.1)).sum();
    scenario.calls[..=call].iter().map(of).sum::<Duration>() * FACTOR + freezes + late
}

//! Real wires of different bandwidths: what packed trees gain over a ring is what is predicted, by
//! the bytes that each wire has carried. Times are printed: the ranks may share their processors
//! with other work.

#[allow(dead_code)] // Ranks do not meet in other ways here.
mod links;
mod skipped;

use std::path::Path;

use links::{Hosts, IRREGULAR, IRREGULAR_HOSTS, all_reduce};
use skipped::skip;

/// A message that takes a ring about a second.
const BYTES: &str = "8M";

/// How far the gain may be from the predicted one. Heads of frames and acknowledgements are sent
/// too, and predictions have latencies.
const TOLERANCE: f64 = 0.1;

#[test]
fn packed_all_reduce_gains_over_a_ring_on_real_wires_what_is_predicted() {
    let hosts = match Hosts::new(Path::new(env!("CARGO_BIN_EXE_pleach")), IRREGULAR_HOSTS, &IRREGULAR) {
        Ok(hosts) => hosts,
        Err(reason) => return skip(format_args!("no shaped networks here: {reason}")),
    };
    let [ring, packed] = ["ring", "packed"].map(|algorithm| all_reduce(&hosts, algorithm, BYTES));
    let ((real_s, predicted_s, busy_s), (packed_s, packed_predicted_s, packed_busy_s)) = (ring, packed);
    let (gain, predicted) = (busy_s / packed_busy_s, predicted_s / packed_predicted_s);
    println!(
        "ring {real_s:.3} s (predicted {predicted_s:.3}), packed {packed_s:.3} s (predicted \
         {packed_predicted_s:.3}), gain {:.2}, by bytes {gain:.2} (predicted {predicted:.2})",
        real_s / packed_s
    );
    assert!(predicted > 2.0, "the topology was chosen for a ring to be slow: {predicted}");
    assert!((gain / predicted - 1.0).abs() < TOLERANCE, "{gain} by the bytes on wires, not {predicted}");
}

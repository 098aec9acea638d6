//! Real wires of different bandwidths: what packed trees gain over a ring is what is predicted.

#[allow(dead_code)] // Ranks do not meet in other ways here.
mod links;
mod skipped;

use std::path::Path;

use links::{Hosts, IRREGULAR, IRREGULAR_HOSTS, all_reduce};
use skipped::skip;

/// A message that takes a ring about a second.
const BYTES: &str = "8M";

/// How far the measured gain may be from the predicted one: wires are shaped by tokens.
const TOLERANCE: f64 = 0.3;

/// Tries, one of which is held to [`TOLERANCE`]: four ranks may share two processors with other
/// work, which takes a different part of each measurement.
const TRIES: usize = 5;

#[test]
fn packed_all_reduce_gains_over_a_ring_on_real_wires_what_is_predicted() {
    let hosts = match Hosts::new(Path::new(env!("CARGO_BIN_EXE_pleach")), IRREGULAR_HOSTS, &IRREGULAR) {
        Ok(hosts) => hosts,
        Err(reason) => return skip(format_args!("no shaped networks here: {reason}")),
    };
    let mut gains = Vec::new();
    for _ in 0..TRIES {
        let (ring_s, ring_predicted_s) = all_reduce(&hosts, "ring", BYTES);
        let (packed_s, packed_predicted_s) = all_reduce(&hosts, "packed", BYTES);
        let (gain, predicted) = (ring_s / packed_s, ring_predicted_s / packed_predicted_s);
        println!(
            "ring {ring_s:.3} s (predicted {ring_predicted_s:.3}), packed {packed_s:.3} s (predicted \
             {packed_predicted_s:.3}), gain {gain:.2} (predicted {predicted:.2})"
        );
        assert!(predicted > 2.0, "the topology was chosen for a ring to be slow: {predicted}");
        if (gain / predicted - 1.0).abs() < TOLERANCE {
            return;
        }
        gains.push((gain, predicted));
    }
    panic!("not one of the gains is as predicted: {gains:.2?}");
}

//! An all-reduce over hosts whose wires differ: around a ring, and along packed trees.
//!
//! Builds four hosts of network namespaces and shapes the wires between them, so it takes root, `ip` and `tc`:
//! `cargo build && sudo target/debug/examples/irregular_links target/debug/pleach`.

#[path = "../tests/links/mod.rs"]
mod links;

use std::path::Path;

use links::{Hosts, IRREGULAR, IRREGULAR_HOSTS, all_reduce};

fn main() {
    let pleach = std::env::args().nth(1).unwrap_or_else(|| "target/debug/pleach".to_owned());
    let hosts = match Hosts::new(Path::new(&pleach), IRREGULAR_HOSTS, &IRREGULAR) {
        Ok(hosts) => hosts,
        Err(reason) => {
            eprintln!(
                "error: no shaped networks: {reason}; run it as root on a host with ip, tc and sch_tbf"
            );
            std::process::exit(1);
        }
    };
    println!("{:>8} {:>8} {:>12} {:>12}", "bytes", "trees", "measured", "predicted");
    for bytes in ["1M", "8M", "32M"] {
        let mut times = Vec::new();
        for algorithm in ["ring", "packed"] {
            let (measured_s, predicted_s) = all_reduce(&hosts, algorithm, bytes);
            println!("{bytes:>8} {algorithm:>8} {measured_s:>10.3} s {predicted_s:>10.3} s");
            times.push((measured_s, predicted_s));
        }
        let gain = |of: fn(&(f64, f64)) -> f64| of(&times[0]) / of(&times[1]);
        println!("{bytes:>8} {:>8} {:>11.2}x {:>11.2}x", "gain", gain(|time| time.0), gain(|time| time.1));
    }
}

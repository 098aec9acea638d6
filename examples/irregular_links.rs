//! An all-reduce over hosts whose wires differ: around a ring, and along packed trees.
//!
//! Builds four hosts of network namespaces and shapes the wires between them, so it takes root,
//! `ip` and `tc`:
//! `cargo build --release --examples --bins && sudo target/release/examples/irregular_links`. It
//! runs the `pleach` that was built in the same folder of `target`; another one can be named:
//! `irregular_links PATH`.

#[allow(dead_code)] // Ranks do not meet in other ways here.
#[path = "../tests/links/mod.rs"]
mod links;

use std::path::{Path, PathBuf};

use links::{Hosts, IRREGULAR, IRREGULAR_HOSTS, all_reduce};

fn main() {
    let pleach = std::env::args_os().nth(1).map_or_else(built_beside, PathBuf::from);
    if !pleach.is_file() {
        eprintln!(
            "error: no pleach: {} is not there; build it by 'cargo build' (with --release for a release example), or name \
             it: irregular_links PATH",
            pleach.display()
        );
        std::process::exit(2);
    }
    let hosts = match Hosts::new(&pleach, IRREGULAR_HOSTS, &IRREGULAR) {
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
            let (measured_s, predicted_s, _) = all_reduce(&hosts, algorithm, bytes);
            println!("{bytes:>8} {algorithm:>8} {measured_s:>10.3} s {predicted_s:>10.3} s");
            times.push((measured_s, predicted_s));
        }
        let gain = |of: fn(&(f64, f64)) -> f64| of(&times[0]) / of(&times[1]);
        println!("{bytes:>8} {:>8} {:>11.2}x {:>11.2}x", "gain", gain(|time| time.0), gain(|time| time.1));
    }
}

/// The command of this example's own profile: examples are built into a folder beside it.
fn built_beside() -> PathBuf {
    let own = std::env::current_exe().unwrap_or_default();
    let folder = own.parent().and_then(Path::parent);
    folder.unwrap_or(Path::new("")).join("pleach")
}

//! What part of the bound collectives reach over the links of topologies, in virtual time.
//!
//! `cargo run --release -p pleach-collectives --example links -- 256 dgx-1v dgx-a100:2 torus:4x4`: mebibytes of the whole, then
//! presets.

use std::sync::Arc;

use pleach_collectives::Collective;
use pleach_collectives::packing::Rate;
use pleach_collectives::simulate::wired::time;
use pleach_collectives::topology::preset;
use pleach_collectives::wiring::Wiring;
use pleach_transport::clock::now;

fn main() {
    let mut arguments = std::env::args().skip(1);
    let mebibytes: u64 = arguments.next().and_then(|text| text.parse().ok()).unwrap_or(256);
    let bytes = mebibytes << 20;
    for name in arguments {
        let topology = match preset(&name) {
            Ok(topology) => topology,
            Err(error) => {
                eprintln!("error: {error}");
                std::process::exit(2);
            }
        };
        let wiring = Arc::new(Wiring::new(topology));
        let ranks = wiring.topology().ranks();
        let collectives = [
            Collective::Broadcast { root: 0 },
            Collective::AllGather,
            Collective::ReduceScatter,
            Collective::AllReduce,
        ];
        for collective in collectives {
            let begin = now();
            let packed = match wiring.packed(collective) {
                Ok(packed) => packed,
                Err(error) => {
                    println!("{name:<14} {:<15} {error}", collective.name());
                    continue;
                }
            };
            let (packing_s, begin) = (now().since(begin).as_secs_f64(), now());
            let value = |rate: Rate| *rate.numer() as f64 / *rate.denom() as f64;
            let bound = value(packed.packing.bound);
            let part_bytes = (bytes / u64::from(collective.parts(ranks))) as usize;
            match time(&wiring, collective, part_bytes, None) {
                Ok(timed) => println!(
                    "{name:<14} {:<15} {:>8.3} GB/s bound, {:>6.2} % of it in {:>10.1} us by {:<16} ({} trees, {} hops, \
                     window {}, {} chunks; packed in {packing_s:.3} s, simulated in {:.1} s)",
                    collective.name(),
                    bound / 1e9,
                    bytes as f64 / bound / timed.time.as_secs_f64() * 100.0,
                    timed.time.as_secs_f64() * 1e6,
                    timed.choice.algorithm.to_string(),
                    packed.trees.trees(),
                    packed.trees.pace().hops,
                    packed.trees.pace().window,
                    packed.trees.pace().chunks(bytes),
                    now().since(begin).as_secs_f64(),
                ),
                Err(error) => println!("{name:<14} {:<15} {error}", collective.name()),
            }
        }
    }
}

//! What part of the bound collectives reach over the links of topologies, in virtual time.
//!
//! `cargo run --release -p pleach-collectives --example links -- 256 dgx-1v dgx-a100:2 torus:4x4`:
//! mebibytes of the whole, then presets; without these all of them, in sizes up to 64 ranks, which
//! takes long. Names of collectives among them leave out the others. Each row is what
//! `pleach bench COLLECTIVE --fabric sim --topology PRESET --sizes 256M` measures, and the same on
//! every machine but for how long packing and simulating took. Ends with status 1 when a collective
//! took more than 5 % longer than its bytes over the bound.

use std::process::ExitCode;
use std::sync::Arc;

use pleach_collectives::simulate::wired::time;
use pleach_packing::Rate;
use pleach_packing::topology::source;
use pleach_schedule::wiring::Wiring;
use pleach_transport::clock::now;
use pleach_vocabulary::Collective;

/// How much longer than bytes over bound a collective may take.
const SLACK: f64 = 0.05;

const COLLECTIVES: [Collective; 4] = [
    Collective::Broadcast { root: 0 },
    Collective::AllGather,
    Collective::ReduceScatter,
    Collective::AllReduce,
];

/// Every preset, the quickest to simulate first.
const PRESETS: &str = "star:4 mesh:4 ring:4 dgx-1p dgx-1v ndv2 dgx-a100:1 dgx-h100:1 star:8 mesh:8 ring:8 dgx-2 torus:3x3 \
                       dragonfly:3,2,2 star:16 mesh:16 ring:16 torus:4x4 fat-tree:4 dgx-h100:2 dgx-a100:2 mi250:1 torus:3x3x3 \
                       dgx-h100:3 dgx-h100:4 dgx-a100:4 mi250:2 dragonfly:4,2,4 ring:32 torus:4x8 dgx-h100:5 dgx-h100:6 dgx-h100:7 \
                       dgx-h100:8 dgx-a100:8 star:64 mesh:64 torus:8x8 torus:4x4x4 fat-tree:6 dragonfly:4,4,4 mi250:4 ring:64";

fn main() -> ExitCode {
    let mut arguments = std::env::args().skip(1);
    let mebibytes: u64 = arguments.next().and_then(|text| text.parse().ok()).unwrap_or(256);
    let (asked, mut names): (Vec<String>, Vec<String>) =
        arguments.partition(|name| COLLECTIVES.iter().any(|collective| collective.name() == name));
    if names.is_empty() {
        names = PRESETS.split_whitespace().map(str::to_owned).collect();
    }
    let mut is_within = true;
    for name in names {
        let wiring = match source(&name) {
            Ok(topology) => Arc::new(Wiring::new(topology)),
            Err(error) => {
                eprintln!("error: {error}");
                return ExitCode::from(2);
            }
        };
        let is_asked =
            |collective: &Collective| asked.is_empty() || asked.iter().any(|name| name == collective.name());
        for collective in COLLECTIVES.into_iter().filter(is_asked) {
            match row(&name, &wiring, collective, mebibytes << 20) {
                Ok(reached) => is_within &= reached * (1.0 + SLACK) >= 1.0,
                Err(error) => {
                    println!("{name:<14} {:<15} {error}", collective.name());
                    is_within = false;
                }
            }
        }
    }
    if is_within { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Measures one collective, prints it, and says which part of the bound was reached.
fn row(name: &str, wiring: &Arc<Wiring>, collective: Collective, bytes: u64) -> Result<f64, String> {
    let begin = now();
    let packed = wiring.packed(collective).map_err(|error| error.to_string())?;
    let (packing_s, begin) = (now().since(begin).as_secs_f64(), now());
    let value = |rate: Rate| *rate.numer() as f64 / *rate.denom() as f64;
    let bound = value(packed.packing.bound);
    let part_bytes = (bytes / u64::from(collective.parts(wiring.topology().ranks()))) as usize;
    let timed = time(wiring, collective, part_bytes, None).map_err(|error| error.to_string())?;
    let reached = bytes as f64 / bound / timed.time.as_secs_f64();
    println!(
        "{name:<14} {:<15} {:>8.3} GB/s bound, {:>6.2} % of it in {:>10.1} us by {:<16} ({} trees, {} hops, window {}, {} chunks; \
         packed in {packing_s:.3} s, simulated in {:.1} s)",
        collective.name(),
        bound / 1e9,
        reached * 100.0,
        timed.time.as_secs_f64() * 1e6,
        timed.selection.algorithm.to_string(),
        packed.trees.trees(),
        packed.trees.pacing().hops,
        packed.trees.pacing().window,
        packed.trees.pacing().chunks(bytes),
        now().since(begin).as_secs_f64(),
    );
    Ok(reached)
}

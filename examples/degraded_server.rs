//! A server loses part of its bandwidth, the group is told, and plans anew.
//!
//! Eight servers on a switch, 25 GB/s each; the last one's link degrades. First in virtual time:
//! how near an all-reduce of 256 MiB comes to what the links left allow, with the trees of before,
//! with new ones, and around a ring. Then for real: ranks of a group over shared memory, told of
//! the new links between two collectives.
//!
//! `cargo run --release --example degraded_server`

use std::path::Path;
use std::sync::Arc;

use pleach::collectives::simulate::wired::time;
use pleach::packing::Rate;
use pleach::packing::topology::{LATENCY_NS, Topology};
use pleach::schedule::wiring::Wiring;
use pleach::transport::rendezvous::{Fabric, FabricChoice, Launcher, Rendezvous, World};
use pleach::tuning::Algorithm;
use pleach::{Collective, Group, Options, Rank, ReduceOp};

const SERVERS: u32 = 8;
const BYTES_PER_S: u64 = 25_000_000_000;
/// What each rank contributes, in bytes.
const BYTES: usize = 256 << 20;
/// Ranks of the group that runs here.
const RANKS: u32 = 4;
/// What these contribute, in elements.
const ELEMENTS: usize = 1 << 20;

type Failure = Box<dyn std::error::Error + Send + Sync>;

fn main() -> Result<(), Failure> {
    simulated()?;
    live()
}

/// Servers on a switch, of which the last one has so much of its bandwidth left.
fn servers(count: u32, percent_left: u64) -> Result<Topology, Failure> {
    let mut builder = Topology::builder();
    let switch = builder.switch("switch");
    for server in 0..count {
        let node = builder.rank(format!("server{server}"));
        let percent = if server + 1 == count { percent_left } else { 100 };
        builder.duplex(node, switch, BYTES_PER_S / 100 * percent, LATENCY_NS);
    }
    Ok(builder.build()?)
}

fn simulated() -> Result<(), Failure> {
    println!(
        "all-reduce of 256 MiB over {SERVERS} servers, in virtual time; the part of bytes / bound that is reached"
    );
    println!("{:>5} {:>12} {:>12} {:>12} {:>12}", "left", "bound GB/s", "trees kept", "new trees", "ring");
    let before = Wiring::new(servers(SERVERS, 100)?).packed(Collective::AllReduce)?;
    for percent_left in [100, 75, 50, 25] {
        let links = servers(SERVERS, percent_left)?;
        let kept = Arc::new(Wiring::new(links.clone()).with_packing(before.packing.clone())?);
        let anew = Arc::new(Wiring::new(links));
        let bound = value(anew.packed(Collective::AllReduce)?.packing.bound);
        let reached = |wiring: &Arc<Wiring>, algorithm: Algorithm| -> Result<String, Failure> {
            let timed = time(wiring, Collective::AllReduce, BYTES, Some(&algorithm))?;
            let part = BYTES as f64 / bound / timed.time.as_secs_f64();
            Ok(format!("{:.1} %", part * 100.0))
        };
        println!(
            "{:>5} {:>12.2} {:>12} {:>12} {:>12}",
            format!("{percent_left} %"),
            bound / 1e9,
            reached(&kept, Algorithm::Packed(None))?,
            reached(&anew, Algorithm::Packed(None))?,
            reached(&anew, Algorithm::Ring)?
        );
    }
    Ok(())
}

fn value(rate: Rate) -> f64 {
    *rate.numer() as f64 / *rate.denom() as f64
}

fn live() -> Result<(), Failure> {
    let folder = std::env::temp_dir().join(format!("pleach-degraded-{}", std::process::id()));
    std::fs::create_dir_all(&folder)?;
    println!("\na group of {RANKS} ranks over shared memory, all-reduces of {ELEMENTS} elements");
    let ended = std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..RANKS)
            .map(|rank| {
                let folder = &folder;
                scope.spawn(move || one(rank, folder))
            })
            .collect();
        ranks.into_iter().try_for_each(|rank| rank.join().unwrap_or_else(|_| Err("a rank panicked".into())))
    });
    std::fs::remove_dir_all(&folder)?;
    ended
}

fn one(rank: Rank, folder: &Path) -> Result<(), Failure> {
    let mut options = Options::new(World {
        rank,
        world_size: RANKS,
        local_rank: Some(rank),
        rendezvous: Some(Rendezvous::File { folder: folder.to_owned() }),
        launcher: Launcher::Arguments,
        ..World::alone()
    });
    options.fabric = FabricChoice::Only(Fabric::Shm);
    options.topology = Some(Arc::new(servers(RANKS, 100)?));
    let group = Group::join(&options)?;
    for percent_left in [100, 50] {
        if percent_left != 100 {
            // All ranks are told the same; nobody has to leave or join again.
            group.set_topology(Some(&servers(RANKS, percent_left)?))?;
        }
        let mut data = vec![u64::from(rank) + 1; ELEMENTS];
        group.all_reduce(&mut data[..], ReduceOp::Sum)?;
        let sum = u64::from(RANKS * (RANKS + 1) / 2);
        if data.iter().any(|element| *element != sum) {
            return Err(format!("rank {rank}: a sum is not {sum}").into());
        }
        if rank == 0 {
            let algorithm = group.algorithm_for(Collective::AllReduce, ELEMENTS * size_of::<u64>())?;
            println!("{percent_left:>4} % left: by {algorithm}, every sum right");
        }
    }
    Ok(group.close()?)
}

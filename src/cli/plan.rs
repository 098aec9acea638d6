//! `pleach plan`: the best that links allow for a collective, why nothing does better, and the
//! schedule that reaches it.

use std::path::PathBuf;
use std::time::Duration;

use pleach::packing::topology::{Origin, SourceOptions, Topology, source_with};
use pleach::packing::{PackOptions, Strategy, check, pack, pack_for};
use pleach::transport::clock;
use pleach::{Collective, Rank};

use super::CommandError;
use super::bench::Size;
use super::output::{print, print_json};
use super::schedule::collective;

mod captions;
mod compare;
mod dot;
mod files;
mod json;
mod layout;
mod outcome;
mod report;
mod strands;
mod svg;
#[cfg(test)]
mod tests;
mod way;
mod words;

use outcome::Plan;

/// Arguments of `pleach plan`.
#[derive(Debug, clap::Args)]
#[command(
    allow_negative_numbers = true,
    after_help = "Example:\n  pleach plan all-reduce --topology dgx-1v --only 0,1,4,5,6\n  \
    pleach plan all-gather --topology dgx-a100:2 --svg plan.svg --msccl plan.xml\n  \
    pleach plan broadcast --topology cluster.toml --root 3 --json\n\n\
    Rates are bytes of one rank's vector (all-reduce, reduce, broadcast) or of all blocks together (the others) by time.\n\
    docs/topologies.md describes the files, and the names that stand for known machines."
)]
pub(crate) struct Arguments {
    /// all-reduce, reduce, broadcast, all-gather, reduce-scatter, gather or scatter
    #[arg(value_parser = collective)]
    collective: Collective,
    /// A preset (dgx-1v, dgx-a100:2, torus:4x4, …), 'machine' for this one, or a file: TOML, NCCL
    /// XML, or what 'nvidia-smi topo -m' prints
    #[arg(long, value_name = "PRESET|FILE")]
    topology: String,
    /// Only these ranks, renumbered from 0 in this order, by number or name: 0,3,4,7 or gpu0,gpu3
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    only: Vec<String>,
    /// The root of a broadcast, reduce, gather or scatter, 0 where not given
    #[arg(long, value_name = "RANK")]
    root: Option<Rank>,
    /// optimal, blink, ring, double-tree or reduce-scatter+all-gather
    #[arg(long, value_name = "NAME", default_value = "optimal")]
    strategy: String,
    /// The best that so many trees of equal weight reach, for each root
    #[arg(long, value_name = "K")]
    trees_per_root: Option<u32>,
    /// What one call carries, as 64K or 1G: where few bytes go sooner along fewer or flatter trees
    /// than those of the best rate, take these
    #[arg(long, value_name = "SIZE")]
    bytes: Option<Size>,
    /// Compare with Blink's hybrid as well: PCIe beside the links, which costs so much time at
    /// first (measured where it is to be used)
    #[arg(long, value_name = "US", requires = "bytes", value_parser = clap::value_parser!(u64).range(..=60_000_000))]
    pcie_setup_us: Option<u64>,
    /// What one NVLink carries in each direction, where 'nvidia-smi topo -m' does not say it
    #[arg(long, value_name = "GB/S", default_value_t = 25.0)]
    nvlink_gb_s: f64,
    /// Print the plan as JSON, with exact rates
    #[arg(long)]
    json: bool,
    /// Draw it
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// Write it for graphviz
    #[arg(long, value_name = "FILE")]
    dot: Option<PathBuf>,
    /// Write its schedule as an MSCCL algorithm, for MSCCL and RCCL
    #[arg(long, value_name = "FILE")]
    msccl: Option<PathBuf>,
    /// Write its schedule, for 'pleach verify'
    #[arg(long, value_name = "FILE")]
    schedule: Option<PathBuf>,
}

/// Runs `pleach plan`.
pub(crate) fn run(arguments: &Arguments) -> Result<(), CommandError> {
    let topology = read(arguments)?;
    let collective = rooted(arguments, &topology)?;
    let plan = made(arguments, topology, collective)?;
    files::write(arguments, &plan)?;
    if arguments.json {
        return print_json("plan", &json::object(&plan));
    }
    let compared = compare::others(&plan);
    print("plan", &report::text(&plan, &compared))
}

/// The topology that was asked for, with a word on what it does not say itself.
fn read(arguments: &Arguments) -> Result<Topology, CommandError> {
    let nvlink = arguments.nvlink_gb_s * 1e9;
    if !(nvlink >= 1.0 && nvlink < i64::MAX as f64) {
        return Err(CommandError::usage(format!(
            "no bandwidth: --nvlink-gb-s {}; give what one NVLink carries in a direction, as 25",
            arguments.nvlink_gb_s
        )));
    }
    let options = SourceOptions { nvlink_bytes_per_s: nvlink.round() as u64 };
    let (topology, origin) = source_with(&arguments.topology, &options)
        .map_err(|error| CommandError::usage(format!("no topology: {error}")))?;
    if let Origin::SmiMatrix { nvlink_bytes_per_s } = origin {
        files::note(&format!(
            "{} counts NVLinks and does not say what they carry: {} a link in each direction assumed \
             (--nvlink-gb-s)",
            arguments.topology,
            words::rate(nvlink_bytes_per_s as f64)
        ));
    }
    if arguments.only.is_empty() {
        return Ok(topology);
    }
    let only: Result<Vec<Rank>, _> =
        arguments.only.iter().map(|name| rank_named(name, &topology, &arguments.topology)).collect();
    let only = topology.only(&only?);
    only.map_err(|error| CommandError::usage(format!("no such allocation: {}, {error}", arguments.topology)))
}

/// The rank of this number or name.
fn rank_named(name: &str, topology: &Topology, source: &str) -> Result<Rank, CommandError> {
    let has_name = |rank: &Rank| topology.name(topology.node(*rank)) == name;
    name.parse().ok().or_else(|| (0..topology.ranks()).find(has_name)).ok_or_else(|| {
        let last = topology.ranks() - 1;
        let names = [0, last].map(|rank| topology.name(topology.node(rank)));
        CommandError::usage(format!(
            "no such rank: '{name}' of {source}; give numbers from 0 to {last}, or names as {} and {}",
            names[0], names[1]
        ))
    })
}

fn rooted(arguments: &Arguments, topology: &Topology) -> Result<Collective, CommandError> {
    let collective = arguments.collective;
    let Some(root) = arguments.root else { return Ok(collective) };
    if collective.root().is_none() {
        return Err(CommandError::usage(format!(
            "root {root}: {} has no root; leave it out",
            collective.name()
        )));
    }
    if root >= topology.ranks() {
        return Err(CommandError::usage(format!(
            "no such root: rank {root} of {}; its ranks are 0 to {}",
            arguments.topology,
            topology.ranks() - 1
        )));
    }
    Ok(collective.with_root(root))
}

/// Packs and has it checked.
fn made(arguments: &Arguments, topology: Topology, collective: Collective) -> Result<Plan, CommandError> {
    let strategy: Strategy = arguments.strategy.parse().map_err(|error| {
        CommandError::usage(format!("no such strategy: {error}; leave it out for the optimal one"))
    })?;
    let options = PackOptions { strategy, trees_per_root: arguments.trees_per_root };
    let began = clock::now();
    let packed = match arguments.bytes {
        Some(Size(bytes)) => pack_for(&topology, collective, &options, bytes),
        None => pack(&topology, collective, &options),
    };
    let packing =
        packed.map_err(|error| CommandError::usage(format!("no plan: {}, {error}", arguments.topology)))?;
    let generation = Duration::from_nanos(clock::now().0.saturating_sub(began.0));
    let checked = check(&topology, &packing).map_err(|flaw| {
        CommandError::failed(format!(
            "wrong plan: {} over {}, {flaw}; this is a defect of pleach, please report it",
            collective, arguments.topology
        ))
    })?;
    let mut source = arguments.topology.clone();
    if !arguments.only.is_empty() {
        source = format!("{source} ranks {}", arguments.only.join(","));
    }
    let bytes = arguments.bytes.map(|Size(bytes)| bytes);
    let pcie_setup_ns = arguments.pcie_setup_us.map(|us| us * 1_000);
    Ok(Plan { source, topology, packing, checked, strategy, generation, bytes, pcie_setup_ns })
}

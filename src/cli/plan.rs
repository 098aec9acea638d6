//! `pleach plan`: computes the optimal trees for a collective on given links, with the bound, its
//! certificate and the schedule.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use pleach::packing::check::Checked;
use pleach::packing::topology::{Link, NodeId, NodeKind, Origin, SourceOptions, Topology, source_with};
use pleach::packing::{Certificate, PackOptions, Packing, Rate, Strategy, check, pack, pack_for};
use pleach::schedule::generate::packed::PackedTrees;
use pleach::schedule::msccl::{ExportError, Exported, MAX_STEPS_RCCL};
use pleach::schedule::verify::verify;
use pleach::schedule::{Access, Algorithm, Schedule, generate, msccl};
use pleach::transport::clock;
use pleach::{Collective, Rank};

use crate::cli::CommandError;
use crate::cli::bench::Size;
use crate::cli::output::{note, print, print_json};
use crate::cli::schedule::collective;

mod dot;
mod json;
mod layout;
mod report;
mod svg;
#[cfg(test)]
mod tests;

/// Arguments of `pleach plan`.
#[derive(Debug, clap::Args)]
#[command(
    allow_negative_numbers = true,
    after_help = "Example:\n  pleach plan all-reduce --topology dgx-1v --only 0,1,4,5,6\n  \
    pleach plan all-gather --topology dgx-a100:2 --svg plan.svg --msccl plan.xml\n  \
    pleach plan broadcast --topology cluster.toml --root 3 --json\n\n\
    Rates count the bytes of one rank's vector (all-reduce, reduce, broadcast) or of all blocks together (the others).\n\
    docs/topologies.md describes the files and the presets."
)]
pub(crate) struct Arguments {
    /// all-reduce, reduce, broadcast, all-gather, reduce-scatter, gather or scatter
    #[arg(value_parser = collective)]
    collective: Collective,
    /// A preset (dgx-1v, dgx-a100:2, torus:4x4, …), 'machine' for this machine, or a file: TOML,
    /// NCCL XML, or the output of 'nvidia-smi topo -m'
    #[arg(long, value_name = "PRESET|FILE")]
    topology: String,
    /// Only these ranks, renumbered from 0 in this order, by number or name: 0,3,4,7 or gpu0,gpu3
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    only: Vec<String>,
    /// The root of a broadcast, reduce, gather or scatter [default: 0]
    #[arg(long, value_name = "RANK")]
    root: Option<Rank>,
    /// optimal, blink, ring, double-tree or reduce-scatter+all-gather
    #[arg(long, value_name = "NAME", default_value = "optimal")]
    strategy: String,
    /// Take this number of trees of equal weight for each root
    #[arg(long, value_name = "K")]
    trees_per_root: Option<u32>,
    /// The size of one call, such as 64K or 1G: for few bytes, take fewer trees or trees of less
    /// depth than those of the best rate
    #[arg(long, value_name = "SIZE")]
    bytes: Option<Size>,
    /// Also compare with Blink's hybrid, which uses PCIe too after this set-up time (measure it on
    /// the machine)
    #[arg(long, value_name = "US", requires = "bytes", value_parser = clap::value_parser!(u64).range(..=60_000_000))]
    pcie_setup_us: Option<u64>,
    /// Bandwidth of one NVLink in each direction, for the output of 'nvidia-smi topo -m'
    #[arg(long, value_name = "GB/S", default_value_t = 25.0)]
    nvlink_gb_s: f64,
    /// Print the plan as JSON, with exact rates
    #[arg(long)]
    json: bool,
    /// Draw the plan to an SVG file
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// Write the plan for graphviz
    #[arg(long, value_name = "FILE")]
    dot: Option<PathBuf>,
    /// Write the schedule of the plan as an MSCCL algorithm, for MSCCL and RCCL
    #[arg(long, value_name = "FILE")]
    msccl: Option<PathBuf>,
    /// Write the schedule of the plan, for 'pleach verify'
    #[arg(long, value_name = "FILE")]
    schedule: Option<PathBuf>,
}

/// Runs `pleach plan`.
pub(crate) fn run(arguments: &Arguments) -> Result<(), CommandError> {
    let topology = read(arguments)?;
    let collective = rooted(arguments, &topology)?;
    let plan = packed_plan(arguments, topology, collective)?;
    write_files(arguments, &plan)?;
    if arguments.json {
        return print_json("plan", &json::object(&plan));
    }
    let results = report::other_strategies(&plan);
    print("plan", &report::text(&plan, &results))
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
        note(&format!(
            "{} counts NVLinks and does not say what they carry: {} a link in each direction assumed \
             (--nvlink-gb-s)",
            arguments.topology,
            rate_in_words(nvlink_bytes_per_s as f64)
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
fn packed_plan(
    arguments: &Arguments,
    topology: Topology,
    collective: Collective,
) -> Result<Plan, CommandError> {
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

// The plan.

/// A packing of a topology, checked, and how it was made.
struct Plan {
    /// What was asked for with `--topology`, and `--only`.
    source: String,
    topology: Topology,
    packing: Packing,
    /// Loads and depths, as the independent checker found them.
    checked: Checked,
    /// The strategy that packed the trees.
    strategy: Strategy,
    /// From the topology to the packing with its certificate.
    generation: Duration,
    /// The bytes of a call, if given.
    bytes: Option<u64>,
    /// The setup time of PCIe beside the links, if given.
    pcie_setup_ns: Option<u64>,
}

impl Plan {
    /// How much of what it can carry a link does carry, from 0 to 1.
    fn utilisation(&self, link: usize) -> f64 {
        number(self.checked.loads[link].utilisation())
    }

    /// Whether a link leads from one set of the certificate to elsewhere, in the direction that
    /// counts.
    fn is_narrow(&self, link: &Link) -> bool {
        let part_of = |node: NodeId| match &self.packing.certificate {
            Certificate::Cut { nodes } => nodes.contains(&node).then_some(0),
            Certificate::Partition { parts } => parts.iter().position(|part| part.contains(&node)),
            Certificate::Alone => None,
        };
        let (from, to) = if enters(&self.packing) { (link.to, link.from) } else { (link.from, link.to) };
        let from = part_of(from);
        from.is_some() && from != part_of(to)
    }
}

/// Whether a cut of this collective is about what enters its nodes.
fn enters(packing: &Packing) -> bool {
    use pleach::Collective::{Gather, Reduce, ReduceScatter};
    matches!(packing.collective, Gather { .. } | Reduce { .. } | ReduceScatter)
}

/// A rate as a number, for showing.
fn number(rate: Rate) -> f64 {
    *rate.numer() as f64 / *rate.denom() as f64
}

/// In 10⁹ bytes a second.
fn gb_s(rate: Rate) -> f64 {
    number(rate) / 1e9
}

// Rates, links and certificates in words.

/// Most names that a sentence lists.
const NAMES_SHOWN_MAX: usize = 8;
/// Most kinds of links that a sentence lists.
const KINDS_SHOWN_MAX: usize = 3;
/// Most parts that a sentence lists.
const PARTS_SHOWN_MAX: usize = 6;

/// Bytes a second as people write them: four digits, in the unit that fits.
fn rate_in_words(bytes_per_s: f64) -> String {
    let (unit, name) = match bytes_per_s {
        gigabytes if gigabytes >= 1e8 || gigabytes == 0.0 => (1e9, "GB/s"),
        megabytes if megabytes >= 1e5 => (1e6, "MB/s"),
        kilobytes if kilobytes >= 1e2 => (1e3, "kB/s"),
        _ => (1.0, "B/s"),
    };
    format!("{} {name}", digits(bytes_per_s / unit))
}

/// Four significant digits, without zeros at the end.
fn digits(value: f64) -> String {
    if value == 0.0 || !value.is_finite() {
        return "0".to_owned();
    }
    let before_the_point = value.abs().log10().floor() as i32 + 1;
    let after_the_point = (4 - before_the_point).clamp(0, 12) as usize;
    let text = format!("{value:.after_the_point$}");
    if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.').to_owned() } else { text }
}

/// A count and what is counted.
fn counted(count: usize, one: &str) -> String {
    format!("{count} {one}{}", if count == 1 { "" } else { "s" })
}

/// Why nothing goes faster.
struct Reason {
    /// In a sentence without its point.
    sentence: String,
    /// The bound as it follows from that.
    sum: String,
}

/// The certificate of a packing in words.
fn reason_in_words(topology: &Topology, packing: &Packing) -> Reason {
    match &packing.certificate {
        Certificate::Cut { nodes } => cut_reason(topology, packing, nodes),
        Certificate::Partition { parts } => partition_reason(topology, packing, parts),
        Certificate::Alone => Reason {
            sentence: format!("{} is alone: nothing has to move", topology.name(topology.node(0))),
            sum: String::new(),
        },
    }
}

fn cut_reason(topology: &Topology, packing: &Packing, nodes: &[NodeId]) -> Reason {
    let is_inside = membership(topology, &[nodes]);
    let inside = |node: NodeId| is_inside[node.0 as usize].is_some();
    let enters = enters(packing);
    let crosses = |link: &&Link| {
        let (from, to) = if enters { (link.to, link.from) } else { (link.from, link.to) };
        inside(from) && !inside(to)
    };
    let links: Vec<&Link> = topology.links().iter().filter(crosses).collect();
    let bandwidth: u128 = links.iter().map(|link| u128::from(link.bytes_per_s)).sum();
    let all = topology.ranks();
    let within = (0..all).filter(|&rank| inside(topology.node(rank))).count() as u32;
    let outside: Vec<NodeId> = every(topology).filter(|&node| !inside(node)).collect();
    // Whoever is fewer is named; the links are the same.
    let (named, is_left) =
        if within <= all - within { (nodes, !enters) } else { (outside.as_slice(), enters) };
    let verb = if is_left { "left" } else { "reached" };
    let who = nodes_in_words(topology, named);
    let over = links_in_words(&links);
    let blocks = match packing.collective {
        Collective::AllGather | Collective::ReduceScatter => Some(within),
        Collective::Scatter { .. } | Collective::Gather { .. } => Some(all - within),
        _ => None,
    };
    let bandwidth = rate_in_words(bandwidth as f64);
    let bound = rate_in_words(number(packing.bound));
    match blocks {
        Some(blocks) => Reason {
            sentence: format!(
                "{who} can only be {verb} by {over}, which {blocks} of {all} blocks have to take"
            ),
            sum: format!("{bandwidth} × {all}/{blocks} = {bound}"),
        },
        None => Reason {
            sentence: format!("{who} can only be {verb} by {over}"),
            sum: if links.len() > 1 { format!("together {bound}") } else { String::new() },
        },
    }
}

fn partition_reason(topology: &Topology, packing: &Packing, parts: &[Vec<NodeId>]) -> Reason {
    let slices: Vec<&[NodeId]> = parts.iter().map(Vec::as_slice).collect();
    let part_of = membership(topology, &slices);
    let part = |node: NodeId| part_of[node.0 as usize];
    let leaving: Vec<&Link> = topology
        .links()
        .iter()
        .filter(|link| part(link.from).is_some() && part(link.from) != part(link.to))
        .collect();
    let trees = parts.len() as u32 - 1;
    let bound = rate_in_words(number(packing.bound));
    let covers_all = every(topology).all(|node| part(node).is_some());
    let from = |index: usize| -> Vec<&Link> {
        leaving.iter().copied().filter(|link| part(link.from) == Some(index)).collect()
    };
    let sum = |links: &[&Link]| links.iter().map(|link| u128::from(link.bytes_per_s)).sum::<u128>();
    if let ([one, other], false) = (parts, covers_all)
        && sum(&from(0)) == sum(&from(1))
    {
        let (fewer, links) = if other.len() < one.len() { (other, from(1)) } else { (one, from(0)) };
        let who = nodes_in_words(topology, fewer);
        return Reason {
            sentence: format!("{who} can only be left by {}", links_in_words(&links)),
            sum: if links.len() > 1 { format!("together {bound}") } else { String::new() },
        };
    }
    if !(covers_all && topology.is_symmetric()) {
        let total = rate_in_words(leaving.iter().map(|link| link.bytes_per_s as f64).sum());
        return Reason {
            sentence: format!(
                "{} are left by links of {total} in all, and an all-reduce takes {} times its rate of them",
                parts_in_words(topology, parts),
                2 * trees
            ),
            sum: format!("{total} / {} = {bound}", 2 * trees),
        };
    }
    let once: Vec<&Link> = leaving.into_iter().filter(|link| link.from < link.to).collect();
    let total = rate_in_words(once.iter().map(|link| link.bytes_per_s as f64).sum());
    let over = links_in_words(&once);
    if let [one, other] = parts {
        let fewer = if other.len() < one.len() { other } else { one };
        let verb = if fewer.len() == 1 { "is" } else { "are" };
        return Reason {
            sentence: format!("{} {verb} joined to the rest by {over}", nodes_in_words(topology, fewer)),
            sum: String::new(),
        };
    }
    Reason {
        sentence: format!(
            "{} are joined by {over}, of which every tree takes {trees}",
            parts_in_words(topology, parts)
        ),
        sum: format!("{total} / {trees} = {bound}"),
    }
}

fn every(topology: &Topology) -> impl Iterator<Item = NodeId> {
    (0..topology.nodes().len() as u32).map(NodeId)
}

/// In which of the sets each node is.
fn membership(topology: &Topology, sets: &[&[NodeId]]) -> Vec<Option<usize>> {
    let mut part_of = vec![None; topology.nodes().len()];
    for (index, set) in sets.iter().enumerate() {
        for node in *set {
            part_of[node.0 as usize] = Some(index);
        }
    }
    part_of
}

/// `2 links of 25 GB/s and one of 50 GB/s, 100 GB/s in all`.
fn links_in_words(links: &[&Link]) -> String {
    let mut kinds: BTreeMap<u64, u32> = BTreeMap::new();
    for link in links {
        let count = if link.bytes_per_s.is_multiple_of(u64::from(link.count)) { link.count } else { 1 };
        *kinds.entry(link.bytes_per_s / u64::from(count)).or_default() += count;
    }
    let total = rate_in_words(links.iter().map(|link| link.bytes_per_s as f64).sum());
    let many: u32 = kinds.values().sum();
    if kinds.is_empty() {
        return "nothing".to_owned();
    }
    if kinds.len() > KINDS_SHOWN_MAX {
        return format!("{many} links of {total} in all");
    }
    let mut words: Vec<String> = Vec::new();
    for (&each, &count) in kinds.iter().rev() {
        let each = rate_in_words(each as f64);
        let first = words.is_empty();
        words.push(match (count, first) {
            (1, true) => format!("one link of {each}"),
            (1, false) => format!("one of {each}"),
            (count, true) => format!("{count} links of {each}"),
            (count, false) => format!("{count} of {each}"),
        });
    }
    if kinds.len() == 1 { enumerated(&words) } else { format!("{}, {total} in all", enumerated(&words)) }
}

/// `a, b and c`.
fn enumerated(words: &[String]) -> String {
    match words {
        [] => String::new(),
        [only] => only.clone(),
        [before @ .., last] => format!("{} and {last}", before.join(", ")),
    }
}

/// `g0`, or `these 3 ranks (g0 g1 g2)`, with the switches among them counted.
fn nodes_in_words(topology: &Topology, nodes: &[NodeId]) -> String {
    let of_kind = |kind| -> Vec<&str> {
        let is_kind = |node: &&NodeId| topology.nodes()[node.0 as usize].kind == kind;
        nodes.iter().filter(is_kind).map(|&node| topology.name(node)).collect()
    };
    let (ranks, switches) = (of_kind(NodeKind::Rank), of_kind(NodeKind::Switch));
    let shifted = match switches.as_slice() {
        [] => String::new(),
        [only] => format!(" with {only}"),
        many => format!(" with {}", counted(many.len(), "switch").replace("switchs", "switches")),
    };
    match ranks.as_slice() {
        [only] => format!("{only}{shifted}"),
        many => format!("these {} ranks ({}){shifted}", many.len(), listed(many)),
    }
}

fn listed(names: &[&str]) -> String {
    if names.len() <= NAMES_SHOWN_MAX {
        return names.join(" ");
    }
    format!("{} … {}", names[..NAMES_SHOWN_MAX - 2].join(" "), names[names.len() - 1])
}

/// `the 8 ranks`, or `these 3 parts (a b | c | d)`.
fn parts_in_words(topology: &Topology, parts: &[Vec<NodeId>]) -> String {
    if parts.iter().all(|part| part.len() == 1) {
        return format!("the {} ranks", parts.len());
    }
    let names = |part: &Vec<NodeId>| {
        let names: Vec<&str> = part.iter().map(|&node| topology.name(node)).collect();
        listed(&names)
    };
    if parts.len() > PARTS_SHOWN_MAX {
        return format!("{} parts of up to {}", parts.len(), counted(largest(parts), "node"));
    }
    format!("these {} parts ({})", parts.len(), parts.iter().map(names).collect::<Vec<_>>().join(" | "))
}

fn largest(parts: &[Vec<NodeId>]) -> usize {
    parts.iter().map(Vec::len).max().unwrap_or_default()
}

/// The gap to the bound in words.
fn verdict_in_words(packing: &Packing) -> String {
    if packing.is_optimal() {
        return "optimal: no forwarding schedule can be faster".to_owned();
    }
    let share: Rate = packing.rate / packing.bound;
    format!(
        "{:.1} % of the bound of {}; whether more is possible is open",
        (number(share) * 100.0).min(99.9),
        rate_in_words(number(packing.bound))
    )
}

// Files of a plan: pictures and schedules.

/// Writes every file that was asked for.
fn write_files(arguments: &Arguments, plan: &Plan) -> Result<(), CommandError> {
    if let Some(path) = &arguments.svg {
        save("picture", path, &svg::picture(plan))?;
    }
    if let Some(path) = &arguments.dot {
        save("graph", path, &dot::graph(plan))?;
    }
    if arguments.schedule.is_none() && arguments.msccl.is_none() {
        return Ok(());
    }
    let schedule = schedule_of(plan)?;
    if let Some(path) = &arguments.msccl {
        save("algorithm", path, &export_msccl(arguments, plan, &schedule, path)?)?;
    }
    if let Some(path) = &arguments.schedule {
        save("schedule", path, &schedule.to_string())?;
        expect_proved(plan, schedule)?;
    }
    Ok(())
}

fn schedule_of(plan: &Plan) -> Result<Schedule, CommandError> {
    let none =
        |error: &dyn std::fmt::Display| CommandError::usage(format!("no schedule: {}, {error}", plan.source));
    if plan.topology.ranks() == 1 {
        return Err(none(&"there is one rank, and nothing to move; take more of them"));
    }
    let trees = PackedTrees::new(&plan.packing, &plan.topology, 0).map_err(|error| none(&error))?;
    let algorithm = Algorithm::Packed(Some(Arc::new(trees)));
    generate(plan.packing.collective, &algorithm, plan.topology.ranks(), Access::Put)
        .map_err(|error| none(&error))
}

fn expect_proved(plan: &Plan, schedule: Schedule) -> Result<(), CommandError> {
    verify(schedule).map(|_| ()).map_err(|violation| {
        CommandError::failed(format!(
            "wrong schedule: {}, {violation}; this is a defect of pleach, please report it",
            plan.source
        ))
    })
}

/// The schedule in MSCCL's form, read back and proved before anybody gets it.
fn export_msccl(
    arguments: &Arguments,
    plan: &Plan,
    schedule: &Schedule,
    path: &Path,
) -> Result<String, CommandError> {
    let Exported { xml, chunks, channels, thread_blocks, steps, loss } =
        msccl::export(schedule).map_err(|error| {
            let advice =
                if matches!(error, ExportError::TooMany { .. }) { smaller(arguments, plan) } else { "" };
            CommandError::usage(format!("no algorithm: {}, {error}{advice}", path.display()))
        })?;
    let read = msccl::import(&xml).map_err(|error| {
        CommandError::failed(format!(
            "wrong algorithm: {}, {error}; this is a defect of pleach, please report it",
            path.display()
        ))
    })?;
    expect_proved(plan, read)?;
    let mut words = format!(
        "{}: proved; {chunks} chunks, {channels} channels, up to {thread_blocks} thread blocks a GPU; not run on GPUs here",
        path.display()
    );
    if loss > 0.0 {
        words.push_str(&format!(
            "; shares are rounded to chunks, which costs up to {:.2} % of the rate",
            loss * 100.0
        ));
    }
    if steps > MAX_STEPS_RCCL {
        words.push_str(&format!("; RCCL takes {MAX_STEPS_RCCL} steps a thread block, and there are {steps}"));
    }
    if let Some(root) = plan.packing.collective.root() {
        words.push_str(&format!("; the format has no root: it is for calls with root {root} alone"));
    }
    note(&words);
    Ok(xml)
}

/// What to do where an algorithm would be too large.
fn smaller(arguments: &Arguments, plan: &Plan) -> &'static str {
    match plan.strategy {
        Strategy::Optimal | Strategy::ReduceScatterAllGather if arguments.trees_per_root.is_none() => {
            "; plan with fewer trees (--trees-per-root 1)"
        }
        Strategy::Optimal | Strategy::ReduceScatterAllGather => {
            "; take fewer ranks (--only), or fewer trees by another strategy (--strategy double-tree)"
        }
        _ => "; take fewer ranks (--only), or fewer trees (--strategy optimal --trees-per-root 1)",
    }
}

fn save(what: &str, path: &Path, text: &str) -> Result<(), CommandError> {
    std::fs::write(path, text).map_err(|error| {
        CommandError::usage(format!("{what} not written: {} ({error}); name another file", path.display()))
    })
}

//! `pleach bench`: how long collectives take, size by size, with every result checked.
//!
//! A [`Task`] describes the collective and its memory, [`sizes`] the sizes. `live` measures real
//! ranks, `simulated` measures ranks in virtual time. Both fill and check memory by the same
//! `pattern` and return a [`Measurement`], which [`Report`] prints. **Invariant:** only the
//! collective is timed, and every iteration is checked: its output is checked before it is
//! overwritten, or (`--reuse`) it is the input of the next iteration.

use std::io::Write;
use std::sync::Arc;
use std::time::Duration;

use pleach::packing::topology::Topology;
use pleach::schedule::cost::Platform;
use pleach::schedule::select::SelectError;
use pleach::schedule::wiring::Wiring;
use pleach::schedule::{Access, CostModel, Variant, select_named};
use pleach::transport::rendezvous::{Fabric, FabricChoice, World};
use pleach::tuning::Algorithm;
use pleach::{Collective, DataType, Group, Options, Rank, ReduceOp, Reproducible};
use serde_json::json;

use crate::cli::CommandError;

use crate::cli::launch::{Bind, WorldArguments, is_one_of_several, rank_count, rank_or_launch};
use crate::cli::metrics::MetricsAddress;
use crate::cli::output::rounded;
use crate::cli::schedule::collective;
use live::MemoryKind;

pub(super) use sizes::Size;
use sizes::Sweep;

mod live;
mod many;
mod partial;
mod pattern;
mod recovery;
mod simulated;
mod sizes;

/// Ranks that are started where nothing says how many: they have a processor each on any machine.
const DEFAULT_RANKS: u32 = 2;

/// Shortest sample: what is shorter is mostly the clock's own time.
const SAMPLE_MIN: Duration = Duration::from_micros(10);

/// Most iterations of a sample.
const SAMPLE_ITERATIONS_MAX: usize = 256;

/// Longest time for a size that can be asked for, in ms.
const TIME_MAX_MS: i64 = 3_600_000;

/// Arguments of `pleach bench`.
#[derive(Debug, clap::Args)]
#[command(
    allow_negative_numbers = true,
    after_help = "Examples:\n  pleach bench\n  \
    pleach bench all-gather --fabric shm --ranks 4 --min 1K --max 16M --factor 2 --dtype bf16\n  \
    mpirun -n 4 pleach bench all-reduce --algorithm ring --json\n  \
    pleach bench all-gather --fabric sim --topology dgx-a100:2 --sizes 256M\n  \
    pleach bench recovery --fault stop --ranks 4 --samples 20 --json\n\n\
    K, M and G are 2^10, 2^20 and 2^30; GB/s is 10^9 bytes a second. The size is the vector of one rank; for all-gather,\n\
    reduce-scatter, gather, scatter and all-to-all it is the blocks of all ranks together. A sample has enough iterations\n\
    to last 10 us; its time is that of the slowest rank, divided by the iterations. busbw is algbw times 2(n-1)/n for\n\
    all-reduce, times (n-1)/n for collectives with blocks, and equal to algbw for the others. errors counts the wrong\n\
    elements of all iterations and ranks."
)]
pub(crate) struct Arguments {
    /// all-reduce, reduce, broadcast, all-gather, reduce-scatter, gather, scatter, all-to-all,
    /// barrier, send-recv, partial-all-reduce or recovery (of a session from the fault of a rank)
    #[arg(value_parser = measured, default_value = "all-reduce")]
    collective: Measurable,
    /// The fabric: shm, tcp, shm+tcp (by host), verbs (RDMA), shm+verbs, auto or sim (virtual
    /// time) [default: auto; on one host also tcp]
    #[arg(long, value_name = "FABRIC", value_parser = fabric)]
    fabric: Option<BenchFabric>,
    /// The links between the ranks: a preset (dgx-a100:2, torus:4x4, ...) or a file; with --fabric
    /// sim the ranks and links are those of the topology
    #[arg(long, value_name = "PRESET|FILE", conflicts_with = "ranks")]
    topology: Option<String>,
    /// The root of a reduce, broadcast, gather or scatter
    #[arg(long, value_name = "RANK")]
    root: Option<Rank>,
    /// How many ranks to start here [default: 2; recovery: 4]
    #[arg(long, value_name = "N")]
    ranks: Option<u32>,
    /// Smallest size
    #[arg(short = 'b', long, value_name = "BYTES", default_value = "8")]
    min: Size,
    /// Largest size; of partial-all-reduce 1M at most, and --sizes goes further
    #[arg(short = 'e', long, value_name = "BYTES", default_value = "64M")]
    max: Size,
    /// Ratio of one size to the size before
    #[arg(short, long, value_name = "FACTOR", default_value_t = 4, value_parser = clap::value_parser!(u64).range(2..))]
    factor: u64,
    /// Exactly these sizes, separated by commas
    #[arg(long, value_name = "BYTES,...", value_delimiter = ',', conflicts_with_all = ["min", "max", "factor"])]
    sizes: Vec<Size>,
    /// Type of an element: f32, f64, f16, bf16, f8e4m3, f8e5m2, i32, i64, i16, i8, u32, u64, u16 or
    /// u8; names of other libraries too (float, fp16, bfloat16, int32)
    #[arg(long, value_name = "TYPE", default_value = "f32")]
    dtype: DataType,
    /// The reduction: sum, prod, min, max, avg; for integers also and, or, xor
    #[arg(long, value_name = "OP", default_value = "sum")]
    op: ReduceOp,
    /// direct, exchange, recursive-doubling, halving-doubling, ring, double-tree, chain, grid:AxB,
    /// grid-staged:AxB (any number of ranks up to A·B; also 2d: two dimensions, balanced),
    /// hierarchical (with the hosts of the group), hierarchical:HxR, packed (for a topology) or
    /// auto
    #[arg(long, value_name = "NAME", default_value = "auto")]
    algorithm: String,
    /// Iterations of each size before the measured ones [default: fewer for larger sizes]
    #[arg(long, value_name = "W", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    warmup: Option<u32>,
    /// Measured iterations of each size, rounded up to whole samples [default: fewer for larger
    /// sizes]
    #[arg(long, value_name = "I", value_parser = clap::value_parser!(u32).range(1..=100_000_000))]
    iterations: Option<u32>,
    /// Measure each size for about this time, instead of a number of iterations
    #[arg(long, value_name = "MS", conflicts_with = "iterations", value_parser = clap::value_parser!(u32).range(1..=TIME_MAX_MS))]
    time: Option<u32>,
    /// Memory of the data: registered or host (registered with the group), slice (any memory of the
    /// process), cuda:N (GPU N of every process) or cuda (ranks of a host take its GPUs in turn)
    #[arg(long, value_name = "KIND", default_value = "registered")]
    memory: MemoryKind,
    /// When float sums have the same bits again: no (in the same call), per-world-size (with the
    /// same number of ranks) or exact (with any order and number of ranks)
    #[arg(long, value_name = "LEVEL", default_value_t = Reproducible::No)]
    reproducible: Reproducible,
    /// Run all iterations of a sample on the same memory, as other benchmarks do
    #[arg(long)]
    reuse: bool,
    /// Processors that each rank started here is bound to [default: core, if there are enough
    /// cores]
    #[arg(long, value_name = "HOW", value_enum)]
    bind: Option<Bind>,
    /// Serve metrics for Prometheus and 'pleach top'; rank r of a host listens on PORT + r;
    /// without IP the address is loopback
    #[arg(long, value_name = "[IP:]PORT")]
    metrics: Option<MetricsAddress>,
    /// Print results as JSON, one object for each line
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    partial: partial::PartialArguments,
    #[command(flatten)]
    recovery: recovery::RecoveryArguments,
    #[command(flatten)]
    world: WorldArguments,
}

/// What can be measured.
#[derive(Clone, Copy, Debug)]
enum Measurable {
    Collective(Collective),
    PartialAllReduce,
    Recovery,
}

fn measured(name: &str) -> Result<Measurable, String> {
    if name == "partial-all-reduce" {
        return Ok(Measurable::PartialAllReduce);
    }
    if name == "recovery" {
        return Ok(Measurable::Recovery);
    }
    let others = |error| format!("{error} partial-all-reduce recovery");
    collective(name).map(Measurable::Collective).map_err(others)
}

/// The transport of the bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum BenchFabric {
    Real(Fabric),
    /// The best that joins each pair of ranks.
    Best,
    Simulated,
}

/// The fabric of this name.
pub(super) fn fabric_choice(name: &str) -> Result<FabricChoice, String> {
    match fabric(name)? {
        BenchFabric::Real(fabric) => Ok(FabricChoice::Only(fabric)),
        BenchFabric::Best => Ok(FabricChoice::Auto),
        BenchFabric::Simulated => Err("there are shm tcp shm+tcp verbs shm+verbs auto".to_owned()),
    }
}

fn fabric(name: &str) -> Result<BenchFabric, String> {
    match name {
        "shm" => Ok(BenchFabric::Real(Fabric::Shm)),
        "tcp" => Ok(BenchFabric::Real(Fabric::Tcp)),
        "shm+tcp" => Ok(BenchFabric::Real(Fabric::Hybrid)),
        "verbs" => Ok(BenchFabric::Real(Fabric::Verbs)),
        "shm+verbs" => Ok(BenchFabric::Real(Fabric::HybridVerbs)),
        "auto" => Ok(BenchFabric::Best),
        "sim" => Ok(BenchFabric::Simulated),
        _ => Err("there are shm tcp sim shm+tcp verbs shm+verbs auto".to_owned()),
    }
}

/// The measurement to run.
#[derive(Clone, Debug)]
struct Task {
    collective: Collective,
    data_type: DataType,
    op: ReduceOp,
    ranks: u32,
    /// `None`: the best one for each size.
    variant: Option<Variant>,
    warmup: Option<u32>,
    iterations: Option<u32>,
    /// For each size, about.
    time: Option<Duration>,
    memory: MemoryKind,
    reproducible: Reproducible,
    reuse: bool,
}

impl Task {
    /// Whether it is carried out by collectives of integers.
    fn is_exact(&self) -> bool {
        self.reproducible == Reproducible::Exact
            && self.collective.reduces()
            && self.data_type.is_float()
            && matches!(self.op, ReduceOp::Sum | ReduceOp::Avg)
    }

    /// Elements of a part for a size: as many as are whole on every rank.
    fn count(&self, bytes: u64) -> usize {
        (bytes / (u64::from(self.blocks()) * self.data_type.bytes() as u64)) as usize
    }

    /// How many parts a size is of: those that are together at one rank.
    fn blocks(&self) -> u32 {
        match self.collective {
            Collective::AllToAll => self.ranks,
            other => other.parts(self.ranks),
        }
    }

    /// Bytes of the whole buffer when each part has `count` elements.
    fn whole_bytes(&self, count: usize) -> u64 {
        count as u64 * self.data_type.bytes() as u64 * u64::from(self.blocks())
    }
}

/// Elements of an iteration's memory on `rank`: of the input, which is the output too where there
/// is no other; and of the output.
fn lengths(task: &Task, rank: Rank, count: usize) -> (usize, Option<usize>) {
    let all = count * task.ranks as usize;
    match task.collective {
        Collective::AllGather => (count, Some(all)),
        Collective::ReduceScatter => (all, Some(count)),
        Collective::Gather { root } if rank == root => (count, Some(all)),
        Collective::Scatter { root } => (if rank == root { all } else { 0 }, Some(count)),
        Collective::AllToAll => (all, Some(all)),
        _ => (count, None),
    }
}

/// The results for one size.
#[derive(Clone, Debug)]
struct Measurement {
    algorithm: String,
    /// Elements of a part.
    count: usize,
    /// The time of an iteration, by sample.
    samples: Vec<Duration>,
    /// Wrong elements of all iterations and ranks.
    errors: u64,
    /// The limits of the links, if they are known.
    over_links: Option<OverLinks>,
}

/// The limits of the links.
#[derive(Clone, Copy, Debug)]
struct OverLinks {
    /// The upper bound, in bytes a second; unknown without a packing.
    bound_bytes_per_s: Option<f64>,
    /// The prediction of the cost model, in seconds.
    predicted_s: f64,
    /// How many ranks were carried out, as plans alone, without data. The others do the same.
    carried_out: Option<u32>,
}

/// Runs `pleach bench`.
pub(crate) fn run(arguments: &Arguments) -> Result<(), CommandError> {
    let collective = match arguments.collective {
        Measurable::Collective(collective) => collective,
        Measurable::PartialAllReduce => return partial::run(arguments),
        Measurable::Recovery => return recovery::run(arguments),
    };
    let topology = simulated::links(arguments)?;
    if let Some(topology) = topology.as_ref().filter(|links| simulated::are_many(arguments, links)) {
        return many::run(arguments, collective, topology);
    }
    let wiring = topology.map(|topology| Arc::new(Wiring::new(topology)));
    let joined = wiring.as_ref().map(|wiring| wiring.topology().ranks());
    let ranks = match joined {
        Some(ranks) if arguments.fabric == Some(BenchFabric::Simulated) => ranks,
        _ => rank_count(&arguments.world, arguments.ranks.or(joined), DEFAULT_RANKS, 0)?,
    };
    let task = task(arguments, collective, ranks, wiring.as_ref())?;
    let sweep = sweep(arguments, task.collective)?;
    if let Some(wiring) = wiring.as_ref().filter(|_| arguments.fabric == Some(BenchFabric::Simulated)) {
        expect_simulated(arguments)?;
        return simulated::measure_links(arguments, &task, &sweep, wiring);
    }
    expect_memory(&task, &sweep, arguments)?;
    if arguments.fabric == Some(BenchFabric::Simulated) {
        return simulate(arguments, &task, &sweep);
    }
    // Before anything is started: else every rank would say the same.
    task.memory.expect_there().map_err(CommandError::failed)?;
    let Some(world) =
        rank_or_launch(&arguments.world, arguments.ranks.or(joined), DEFAULT_RANKS, arguments.bind)?
    else {
        return Ok(());
    };
    let topology = wiring.map(|wiring| Arc::new(wiring.topology().clone()));
    let selection = match arguments.fabric {
        Some(BenchFabric::Real(fabric)) => FabricChoice::Only(fabric),
        _ => FabricChoice::Auto,
    };
    let (mut errors, used) = measure_over(selection, &world, &task, &sweep, (arguments, topology.as_ref()))?;
    if arguments.fabric.is_none() && used == Fabric::Shm {
        let tcp = FabricChoice::Only(Fabric::Tcp);
        errors += measure_over(tcp, &world, &task, &sweep, (arguments, topology.as_ref()))?.0;
    }
    // The error is that of the job; one rank says it.
    if world.rank == 0 { verdict(errors) } else { Ok(()) }
}

/// The sizes that were asked for.
fn sweep(arguments: &Arguments, collective: Collective) -> Result<Sweep, CommandError> {
    let Arguments { min, max, factor, sizes, dtype, .. } = arguments;
    match collective {
        Collective::Barrier => Ok(Sweep::empty()),
        _ if sizes.is_empty() => Sweep::new(*min, *max, *factor, *dtype).map_err(CommandError::typed),
        _ => Sweep::of(sizes, *dtype).map_err(CommandError::typed),
    }
}

/// The validated arguments.
fn task(
    arguments: &Arguments,
    collective: Collective,
    ranks: u32,
    wiring: Option<&Arc<Wiring>>,
) -> Result<Task, CommandError> {
    let Arguments { dtype: data_type, op, .. } = *arguments;
    let collective = rooted(arguments.root, collective, ranks)?;
    let name = &arguments.algorithm;
    // The size and the model do not matter: whether there is such a schedule is the question.
    let anywhere = match wiring {
        Some(wiring) => Platform::wired(wiring.clone()),
        None => Platform::one_host(ranks, Access::Put, CostModel::TCP),
    };
    select_named(name, collective, 8, &anywhere).map_err(|error| {
        CommandError::typed(match error {
            SelectError::Name(error) => {
                let (collective, known) = (collective.name(), error.known);
                format!("unknown algorithm: '{name}' for {collective}; use one of auto {known}")
            }
            error => format!("no schedule: {name} {collective} of {ranks} ranks; {error}"),
        })
    })?;
    expect_meaning(collective, op, data_type)?;
    if collective.reduces() && ranks > pattern::ranks_max(data_type, op) {
        return Err(CommandError::typed(format!(
            "not exact: the {op} of {ranks} ranks cannot be checked in {data_type}; use f32 or another --op"
        )));
    }
    // By name, as hosts that are not named are the group's. "auto" is none.
    let variant = Algorithm::named(name, collective).ok().map(Variant::from);
    let Arguments { warmup, iterations, memory, reproducible, reuse, .. } = *arguments;
    let time = arguments.time.map(|ms| Duration::from_millis(ms.into()));
    Ok(Task {
        collective,
        data_type,
        op,
        ranks,
        variant,
        warmup,
        iterations,
        time,
        memory,
        reproducible,
        reuse,
    })
}

/// Refuses a reduction that has no meaning for a type.
fn expect_meaning(collective: Collective, op: ReduceOp, data_type: DataType) -> Result<(), CommandError> {
    if collective.reduces() && !op.fits(data_type) {
        let known = ReduceOp::fitting(data_type);
        return Err(CommandError::usage(format!(
            "no such reduction: {op} has no meaning for {data_type}; use one of {known}"
        )));
    }
    Ok(())
}

/// The collective with the root that was asked for.
fn rooted(root: Option<Rank>, collective: Collective, ranks: u32) -> Result<Collective, CommandError> {
    match root {
        None => Ok(collective),
        Some(root) if collective.root().is_none() => {
            Err(CommandError::usage(format!("root {root}: {} has no root; leave it out", collective.name())))
        }
        Some(root) if root >= ranks => Err(CommandError::usage(format!(
            "root {root}: there are ranks 0 to {}; name one of them",
            ranks - 1
        ))),
        Some(root) => Ok(collective.with_root(root)),
    }
}

/// Measures all sizes on real ranks; how many elements were wrong, and what the bytes moved over.
fn measure_over(
    selection: FabricChoice,
    world: &World,
    task: &Task,
    sweep: &Sweep,
    (arguments, topology): (&Arguments, Option<&Arc<Topology>>),
) -> Result<(u64, Fabric), CommandError> {
    let mut options = Options::from_env_in(world.clone());
    options.topology = topology.cloned();
    options.fabric = selection;
    options.reproducible = task.reproducible;
    options.observe.metrics = arguments.metrics.map(|address| address.0).or(options.observe.metrics);
    let group = Group::join(&options).map_err(CommandError::joining)?;
    let fabric = group.info().fabric.unwrap_or(Fabric::Tcp);
    let name = fabric.to_string();
    let mut report = (group.rank() == 0).then(|| Report::new(task, &name, arguments.json));
    let one_clock = live::share_a_clock(&group).map_err(CommandError::failed)?;
    let measured = task.memory.group(&group, world.local_rank).map_err(CommandError::failed)?;
    let mut errors = 0;
    if let Some(report) = &mut report {
        report.head()?;
    }
    for bytes in sweep.sizes() {
        let measured =
            live::measure(&group, &measured, task, bytes, one_clock).map_err(CommandError::failed)?;
        errors += measured.errors;
        if let Some(report) = &mut report {
            report.row(&measured)?;
        }
    }
    drop(measured);
    group.close().map_err(CommandError::failed)?;
    Ok((errors, fabric))
}

/// Refuses what is about real ranks.
fn expect_simulated(arguments: &Arguments) -> Result<(), CommandError> {
    if is_one_of_several(&arguments.world)? {
        return Err(CommandError::usage(
            "one process too many: sim runs all ranks in one process; start it once, without a launcher",
        ));
    }
    if arguments.bind.is_some()
        || arguments.reuse
        || arguments.metrics.is_some()
        || arguments.time.is_some()
        || arguments.reproducible != Reproducible::No
        || arguments.memory != MemoryKind::Registered
    {
        return Err(CommandError::usage(
            "not simulated: --bind, --reuse, --reproducible, --time, --memory and --metrics are about real ranks; leave them away with --fabric sim",
        ));
    }
    Ok(())
}

fn simulate(arguments: &Arguments, task: &Task, sweep: &Sweep) -> Result<(), CommandError> {
    expect_simulated(arguments)?;
    let mut report = Report::new(task, "sim", arguments.json).noting(simulated::NOTE);
    let mut simulation = simulated::Simulation::new(task)?;
    report.head()?;
    let mut errors = 0;
    for bytes in sweep.sizes() {
        let measured = simulation.measure(bytes)?;
        errors += measured.errors;
        report.row(&measured)?;
    }
    verdict(errors)
}

fn verdict(errors: u64) -> Result<(), CommandError> {
    if errors == 0 {
        return Ok(());
    }
    Err(CommandError::failed(format!(
        "wrong results: {errors} elements; look at the rows with errors, and report them with this command line"
    )))
}

// Prints rows for people (the columns of nccl-tests) and as JSON.

/// Prints rows of one fabric as they come.
struct Report<'a> {
    task: &'a Task,
    fabric: &'a str,
    as_json: bool,
    note: String,
    topology: Option<&'a str>,
    /// Whether plans were carried out without data, so that there is nothing to check.
    is_of_plans: bool,
}

impl<'a> Report<'a> {
    fn new(task: &'a Task, fabric: &'a str, as_json: bool) -> Self {
        Self { task, fabric, as_json, note: String::new(), topology: None, is_of_plans: false }
    }

    /// With more said about the fabric.
    fn noting(self, note: impl Into<String>) -> Self {
        Self { note: note.into(), ..self }
    }

    /// Over the links of this topology: rows say how near they come to the bound.
    fn over(self, topology: &'a str) -> Self {
        Self { topology: Some(topology), ..self }
    }

    /// Of plans that were carried out without data.
    fn of_plans(self) -> Self {
        Self { is_of_plans: true, ..self }
    }

    /// What all rows have in common, and the names of the columns.
    fn head(&mut self) -> Result<(), CommandError> {
        if self.as_json {
            return Ok(());
        }
        let (collective, fabric, ranks) = (self.task.collective, self.fabric, self.task.ranks);
        let host = pleach::transport::rendezvous::host_name();
        let note = &self.note;
        let more = if self.topology.is_some() { ["of bound", "predicted", "(%)", "(us)"] } else { [""; 4] };
        let more = |measure_size: usize| match more[measure_size] {
            "" => String::new(),
            _ => format!(" {:>9} {:>12}", more[measure_size], more[measure_size + 1]),
        };
        let ranks_carried_out = |words: &str| match self.is_of_plans {
            true => format!(" {words:>12}"),
            false => String::new(),
        };
        let (names, units) =
            (more(0) + &ranks_carried_out("carried out"), more(2) + &ranks_carried_out("(ranks)"));
        print(&format!(
            "# pleach bench {collective}: fabric {fabric}{note}, {ranks} ranks, host {host}\n\
             #{:>11} {:>11} {:>5} {:>4} {:>20} {:>12} {:>12} {:>9} {:>9} {:>7}{names}\n\
             #{:>11} {:>11} {:>5} {:>4} {:>20} {:>12} {:>12} {:>9} {:>9} {:>7}{units}\n",
            "bytes",
            "count",
            "dtype",
            "op",
            "algorithm",
            "time p50",
            "time p99",
            "algbw",
            "busbw",
            "errors",
            "(B)",
            "(elements)",
            "",
            "",
            "",
            "(us)",
            "(us)",
            "(GB/s)",
            "(GB/s)",
            "",
        ))
    }

    fn row(&mut self, measured: &Measurement) -> Result<(), CommandError> {
        let Task { collective, data_type, op, ranks, .. } = self.task;
        let Measurement { algorithm, count, samples, errors, over_links } = measured;
        let op = if collective.reduces() { op.name() } else { "none" };
        let bytes = self.task.whole_bytes(*count);
        let mut sorted = samples.clone();
        sorted.sort_unstable();
        let (median, late) = (percentile(&sorted, 50), percentile(&sorted, 99));
        let algorithm_bandwidth = if bytes == 0 { 0.0 } else { bytes as f64 / median.as_secs_f64() / 1e9 };
        let bus_bandwidth = algorithm_bandwidth * bus_factor(*collective, *ranks);
        let (median, late) = (micros(median), micros(late));
        let bound = over_links.and_then(|over| over.bound_bytes_per_s).filter(|_| bytes > 0);
        let of_bound = bound.map(|bound| algorithm_bandwidth * 1e9 / bound);
        if self.as_json {
            let collective = collective.name();
            let mut row = json!({
                "collective": collective,
                "fabric": self.fabric,
                "algorithm": algorithm,
                "dtype": data_type.name(),
                "op": op,
                "ranks": ranks,
                "bytes": bytes,
                "time_us_p50": rounded(median, 3),
                "time_us_p99": rounded(late, 3),
                "algbw_gb_s": rounded(algorithm_bandwidth, 6),
                "busbw_gb_s": rounded(bus_bandwidth, 6),
                "errors": errors
            });
            if let (Some(topology), Some(over)) = (self.topology, over_links) {
                row["topology"] = topology.into();
                row["bound_gb_s"] = bound.map(|bound| rounded(bound / 1e9, 6)).into();
                row["of_bound"] = of_bound.map(|part| rounded(part, 6)).into();
                row["predicted_us"] = rounded(over.predicted_s * 1e6, 3).into();
                if let Some(carried_out) = over.carried_out {
                    row["carried_out"] = carried_out.into();
                    row["errors"] = serde_json::Value::Null;
                }
            }
            return print(&format!("{row}\n"));
        }
        let more = over_links.map_or(String::new(), |over| {
            let part = of_bound.map_or("-".to_owned(), |part| format!("{:.2}", part * 100.0));
            let ranks = over.carried_out.map_or(String::new(), |ranks| format!(" {ranks:>12}"));
            format!(" {part:>9} {:>12.2}{ranks}", over.predicted_s * 1e6)
        });
        let errors = if self.is_of_plans { "-".to_owned() } else { errors.to_string() };
        print(&format!(
            " {bytes:>11} {count:>11} {:>5} {op:>4} {algorithm:>20} {median:>12.2} {late:>12.2} \
             {algorithm_bandwidth:>9.3} {bus_bandwidth:>9.3} {errors:>7}{more}\n",
            data_type.name()
        ))
    }
}

/// Bytes over the busiest link for each byte of the size, as nccl-tests has it.
fn bus_factor(collective: Collective, ranks: u32) -> f64 {
    let ranks = f64::from(ranks);
    match collective {
        Collective::AllReduce => 2.0 * (ranks - 1.0) / ranks,
        Collective::AllGather
        | Collective::ReduceScatter
        | Collective::Gather { .. }
        | Collective::Scatter { .. }
        | Collective::AllToAll => (ranks - 1.0) / ranks,
        _ => 1.0,
    }
}

/// The smallest sample that is not below `percent` per cent of the samples.
fn percentile(sorted: &[Duration], percent: usize) -> Duration {
    let place = (sorted.len() * percent).div_ceil(100).max(1) - 1;
    sorted.get(place).copied().unwrap_or_default()
}

fn micros(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e6
}

fn print(text: &str) -> Result<(), CommandError> {
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_bytes()).and_then(|()| out.flush()).map_err(|error| {
        CommandError::failed(format!("results not printed: standard output ({error}); give it a reader"))
    })
}

// Checks that the largest size fits into the memory of this host, before anything is started.
//
// The kernel overcommits memory. Without this check a size that is much too large ends with the
// death of some process.

/// Refuses what cannot fit.
fn expect_memory(task: &Task, sweep: &Sweep, arguments: &Arguments) -> Result<(), CommandError> {
    let largest = Size(sweep.sizes().max().unwrap_or_default());
    let is_simulated = arguments.fabric == Some(BenchFabric::Simulated);
    // A launcher's other ranks answer for themselves, here or on their hosts.
    let ranks = if !is_simulated && is_one_of_several(&arguments.world)? { 1 } else { task.ranks };
    let needed = needed(task, largest, ranks);
    match std::fs::read_to_string("/proc/meminfo").ok().and_then(|text| available(&text)) {
        Some(available) if needed > available => Err(CommandError::usage(format!(
            "not enough memory: {largest} needs {} for {ranks} ranks, and this host has {} left; give a smaller --max",
            whole_units(needed),
            whole_units(available),
        ))),
        _ => Ok(()),
    }
}

/// Bytes of the buffers of one iteration on the first `ranks` ranks.
fn needed(task: &Task, largest: Size, ranks: u32) -> u64 {
    let count = task.count(largest.0);
    let elements = |rank| {
        let (data, output) = lengths(task, rank, count);
        data as u64 + output.unwrap_or_default() as u64
    };
    (0..ranks).map(elements).sum::<u64>() * task.data_type.bytes() as u64
}

/// `MemAvailable` of `/proc/meminfo`: memory without swapping.
fn available(table: &str) -> Option<u64> {
    let line = table.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kibibytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kibibytes.checked_mul(1024)
}

/// To whole units, upwards.
fn whole_units(bytes: u64) -> Size {
    let unit = if bytes >= 1 << 30 { 1 << 30 } else { 1 << 20 };
    Size(bytes.div_ceil(unit) * unit)
}

#[cfg(test)]
mod report_tests {
    use super::*;

    #[test]
    fn percentiles_are_samples_and_one_sample_is_all_of_them() {
        let sorted: Vec<_> = (1..=200).map(Duration::from_micros).collect();
        assert_eq!(percentile(&sorted, 50), Duration::from_micros(100));
        assert_eq!(percentile(&sorted, 99), Duration::from_micros(198));
        assert_eq!(percentile(&sorted[..1], 50), percentile(&sorted[..1], 99));
    }

    #[test]
    fn bus_bandwidth_has_the_factors_of_nccl_tests() {
        assert_eq!(bus_factor(Collective::AllReduce, 4), 1.5);
        assert_eq!(bus_factor(Collective::AllGather, 4), 0.75);
        assert_eq!(bus_factor(Collective::ReduceScatter, 2), 0.5);
        assert_eq!(bus_factor(Collective::Gather { root: 0 }, 4), 0.75);
        assert_eq!(bus_factor(Collective::Scatter { root: 0 }, 4), 0.75);
        assert_eq!(bus_factor(Collective::AllToAll, 4), 0.75);
        assert_eq!(bus_factor(Collective::Broadcast { root: 0 }, 4), 1.0);
        assert_eq!(bus_factor(Collective::AllReduce, 1), 0.0);
    }
}

#[cfg(test)]
mod room_tests {
    use super::*;

    #[test]
    fn the_kernels_table_is_read() {
        let table = "MemTotal:       24689764 kB\nMemFree:          310 kB\nMemAvailable:   22020096 kB\n";
        assert_eq!(available(table), Some(21 << 30));
        for broken in ["", "MemAvailable:", "MemAvailable: x kB", "MemAvailable: 99999999999999999999 kB"] {
            assert_eq!(available(broken), None, "{broken}");
        }
    }

    #[test]
    fn sizes_are_told_in_units_that_can_be_read() {
        assert_eq!(whole_units((3 << 30) + 1).to_string(), "4G");
        assert_eq!(whole_units(5 << 20).to_string(), "5M");
    }
}

//! `pleach graph run`: runs a model on several ranks.
//!
//! Every rank reads the model, and places it as all others do. The last rank gets the outputs, and
//! compares them with `--check`; rank 0 prints the reports of all.

use std::fmt::Display;
use std::hash::Hasher as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use pleach::graph::onnx::{Model, TensorFile};
use pleach::graph::run::channels::signal_slots;
use pleach::graph::run::{
    Copies, Job, JobError, Onnxruntime, RankOptions, Regions, Rten, Runtime, Tensor, TensorRef,
    TensorTransport, run_rank,
};
use pleach::graph::{Costs, Graph, Machine, Partition};
use pleach::transport::Rank;
use pleach::transport::rendezvous::{DEFAULT_JOIN_TIMEOUT, FabricChoice, JoinOptions, Joined, World, join};
use pleach_vocabulary::digest::Hasher64;

#[cfg(feature = "grpc")]
use super::over_grpc;
use super::placing::ModelArguments;
use super::run_report::{RankLine, Report, Verdict, exchange};
use super::source::{self, Source};
use crate::cli::CommandError;
use crate::cli::launch::{WorldArguments, rank_count, rank_or_launch};
use crate::cli::output::visible;
use crate::cli::silent::SilentResponder;

/// How long a rank waits for a tensor.
const PATIENCE: Duration = Duration::from_secs(60);

/// The largest difference from the whole model, as a share of its largest number.
const DIFFERENCE_MAX: f64 = 1e-4;

/// The seed of inputs that are drawn.
const INPUT_SEED: u64 = 1;

/// Arguments of `pleach graph run`.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  pleach graph run model.onnx --ranks 2 --check\n  \
    pleach graph run model.onnx --ranks 4 --place min-cut --dim batch=8 --random-weights 1 --json\n  \
    mpirun -n 2 pleach graph run model.onnx --input x.pb --iterations 100\n\n\
    docs/graph.md describes how tensors cross and what is printed.")]
pub(crate) struct Arguments {
    #[command(flatten)]
    model: ModelArguments,
    /// The fabric: shm, tcp, shm+tcp, verbs, shm+verbs or auto
    #[arg(long, value_name = "FABRIC", default_value_t)]
    fabric: FabricChoice,
    /// What runs the nodes
    #[arg(long, value_enum, default_value_t = RuntimeChoice::Rten)]
    runtime: RuntimeChoice,
    /// The library of onnxruntime [default: ORT_DYLIB_PATH, or libonnxruntime.so.1]
    #[arg(long, value_name = "FILE")]
    library: Option<PathBuf>,
    /// How tensors cross: from where they were computed, copied first, by gRPC over streams of the
    /// fabric, or by gRPC over sockets of one host (the last two in builds with gRPC)
    #[arg(long, value_enum, default_value_t = TransferChoice::ZeroCopy)]
    transfer: TransferChoice,
    /// How many times the model runs
    #[arg(long, value_name = "N", default_value_t = 20, value_parser = clap::value_parser!(u64).range(1..))]
    iterations: u64,
    /// How many iterations may be under way
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=64))]
    depth: u32,
    /// A tensor as an input; once for each input, in order [default: drawn at random]
    #[arg(long, value_name = "FILE.pb")]
    input: Vec<PathBuf>,
    /// Draw weights of which the file gives only the shape
    #[arg(long, value_name = "SEED")]
    random_weights: Option<u64>,
    /// Compare all outputs with those of one process
    #[arg(long)]
    check: bool,
    /// Print results as JSON, one object a line
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    world: WorldArguments,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum RuntimeChoice {
    Rten,
    Onnxruntime,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum TransferChoice {
    ZeroCopy,
    Copy,
    GrpcFabric,
    Grpc,
}

impl TransferChoice {
    fn name(self) -> &'static str {
        match self {
            Self::ZeroCopy => "zero-copy",
            Self::Copy => "copy",
            Self::GrpcFabric => "grpc-fabric",
            Self::Grpc => "grpc",
        }
    }

    /// Whether the sender copies tensors into registered memory. gRPC copies them into messages.
    fn copies(self) -> Copies {
        match self {
            Self::Copy => Copies::Sender,
            Self::ZeroCopy | Self::GrpcFabric | Self::Grpc => Copies::None,
        }
    }
}

/// What all ranks read alike.
struct Loaded {
    model: Model,
    graph: Graph,
    partition: Partition,
    runtime: Box<dyn Runtime>,
}

impl Loaded {
    fn read(arguments: &Arguments) -> Result<Self, CommandError> {
        let ranks = rank_count(&arguments.world, arguments.model.ranks, 1)?;
        let (source, graph) = source::read(&arguments.model.model)?;
        let graph = graph.with_dims(&arguments.model.dims()).map_err(|error| wrong(arguments, &error))?;
        let costs = Costs::estimated(&graph, &Machine::TYPICAL);
        let placement = arguments.model.place(&graph, &costs, ranks, None, None)?;
        let partition = Partition::new(&graph, &placement).map_err(|error| wrong(arguments, &error))?;
        let model = match source {
            Source::Onnx(model) => *model,
            Source::Text | Source::Json => Model::of_graph(&graph),
        };
        let runtime: Box<dyn Runtime> = match arguments.runtime {
            RuntimeChoice::Rten => Box::new(Rten::new()),
            RuntimeChoice::Onnxruntime => onnxruntime(arguments.library.as_deref())?,
        };
        Ok(Self { model, graph, partition, runtime })
    }

    fn job<'a>(&'a self, arguments: &'a Arguments) -> Job<'a> {
        Job {
            model: &self.model,
            folder: arguments.model.model.parent().unwrap_or(Path::new("")),
            graph: &self.graph,
            partition: &self.partition,
            runtime: &*self.runtime,
            random_weights: arguments.random_weights,
        }
    }
}

fn wrong(arguments: &Arguments, error: &dyn Display) -> CommandError {
    CommandError::typed(format!("no run: {}, {}", arguments.model.shown(), visible(&error.to_string())))
}

/// Runs `pleach graph run`.
pub(crate) fn run(arguments: &Arguments) -> Result<(), CommandError> {
    #[cfg(not(feature = "grpc"))]
    if matches!(arguments.transfer, TransferChoice::Grpc | TransferChoice::GrpcFabric) {
        return Err(no_grpc());
    }
    let loaded = Loaded::read(arguments)?;
    let job = loaded.job(arguments);
    job.check().map_err(|error| wrong(arguments, &error))?;
    let inputs = inputs(arguments, &job)?;
    let ranks = job.ranks();
    let Some(world) = rank_or_launch(&arguments.world, Some(ranks), ranks, None)? else { return Ok(()) };
    let rank = world.rank;
    // What a runtime refuses is said before ranks wait for each other.
    let part = job.load_part(rank).map_err(|error| wrong(arguments, &error))?;
    let copies = arguments.transfer.copies();
    #[cfg_attr(not(feature = "grpc"), expect(unused_mut, reason = "gRPC exchanges addresses there"))]
    let Joined { device, events, mut store, fabric, is_crowded, hosts, .. } =
        join_ranks(arguments, &job, &world)?;
    let is_one_host = hosts.iter().all(|host| *host == hosts[0]);
    let mut transport: Box<dyn TensorTransport> = match arguments.transfer {
        TransferChoice::ZeroCopy | TransferChoice::Copy => {
            let reach = device.info().reach.clone();
            let maps = |one: Rank, other: Rank| {
                let peer = if one == rank { other } else { one };
                reach.get(peer as usize).is_some_and(|reach| reach.maps)
            };
            let channels = job.channels(&maps, copies);
            let opened = Regions::open(device, events, channels, arguments.depth, PATIENCE, is_crowded);
            Box::new(opened.map_err(|error| failed(rank, &error))?)
        }
        #[cfg(feature = "grpc")]
        TransferChoice::Grpc | TransferChoice::GrpcFabric => {
            let (channels, patience) = (job.channels(&|_, _| false, copies), PATIENCE);
            let Arguments { depth, iterations, .. } = *arguments;
            let plan = over_grpc::Plan { rank, ranks, channels, depth, iterations, patience };
            let is_on_sockets = arguments.transfer == TransferChoice::Grpc;
            let opened =
                over_grpc::OverGrpc::open(plan, is_on_sockets, (device, events), store.as_deref_mut());
            Box::new(opened.map_err(|error| failed(rank, &error))?)
        }
        #[cfg(not(feature = "grpc"))]
        TransferChoice::Grpc | TransferChoice::GrpcFabric => return Err(no_grpc()),
    };
    let options = RankOptions { iterations: arguments.iterations, depth: arguments.depth, copies };
    let is_checked = arguments.check && rank + 1 == ranks;
    let mut outputs = SeenOutputs { sets: inputs.len(), of_sets: Vec::new(), are_equal: true };
    let mut on_outputs = |iteration, seen: &[TensorRef<'_>]| {
        if is_checked {
            outputs.add(iteration, seen);
        }
    };
    let report = run_rank(&job, part, &mut *transport, &inputs, options, &mut on_outputs)
        .map_err(|error| failed(rank, &error))?;
    // After the run, so that nobody waits for it.
    let verdict = is_checked.then(|| outputs.verdict(&job, &inputs)).transpose();
    let verdict = verdict.map_err(|error| failed(rank, &error))?;
    let line = RankLine { report, verdict };
    let Some(lines) = exchange(store, rank, ranks, line)? else { return Ok(()) };
    let report = Report {
        lines,
        runtime: loaded.runtime.name(),
        fabric: fabric.to_string(),
        transfer: arguments.transfer.name(),
        is_one_host,
        partition: &loaded.partition,
    };
    report.print(arguments.json)?;
    report.check(DIFFERENCE_MAX)
}

#[cfg(not(feature = "grpc"))]
fn no_grpc() -> CommandError {
    CommandError::usage("no run: this build has no gRPC; build pleach with --features grpc")
}

/// Signal slots for each peer.
fn slots(arguments: &Arguments, job: &Job<'_>) -> usize {
    match arguments.transfer {
        #[cfg(feature = "grpc")]
        TransferChoice::GrpcFabric => pleach::exchange::grpc::byte_streams::signal_slots(over_grpc::STREAMS),
        transfer => signal_slots(&job.channels(&|_, _| false, transfer.copies()), arguments.depth),
    }
}

fn failed(rank: Rank, error: &dyn Display) -> CommandError {
    CommandError::failed(format!("run ended: rank {rank}, {}", visible(&error.to_string())))
}

fn onnxruntime(library: Option<&Path>) -> Result<Box<dyn Runtime>, CommandError> {
    let runtime = Onnxruntime::open(library);
    let runtime = runtime
        .map_err(|error| CommandError::typed(format!("no runtime: {}", visible(&error.to_string()))))?;
    Ok(Box::new(runtime))
}

/// The inputs of the iterations by turns. There is one set more than slots, so that what an earlier
/// iteration left in a slot is not right by chance.
fn inputs(arguments: &Arguments, job: &Job<'_>) -> Result<Vec<Vec<Tensor>>, CommandError> {
    if arguments.input.is_empty() {
        let sets = u64::from(arguments.depth) + 1;
        return job.random_inputs(sets, INPUT_SEED).map_err(|error| wrong(arguments, &error));
    }
    let file = |path: &PathBuf| {
        let shown = path.display();
        let bytes = std::fs::read(path).map_err(|error| {
            CommandError::typed(format!("input not read: {shown} ({error}); name a file with one tensor"))
        })?;
        TensorFile::decode(bytes).map_err(|error| {
            CommandError::typed(format!("no input: {shown}, {}", visible(&error.to_string())))
        })
    };
    let files = arguments.input.iter().map(file).collect::<Result<Vec<_>, _>>()?;
    Ok(vec![job.inputs(files).map_err(|error| wrong(arguments, &error))?])
}

fn join_ranks(arguments: &Arguments, job: &Job<'_>, world: &World) -> Result<Joined, CommandError> {
    let mut hasher = Hasher64::default();
    hasher.write(job.graph.to_string().as_bytes());
    hasher.write(format!("{:?}", job.partition.crossings()).as_bytes());
    let knob = |name: &str, value: String| (name.to_owned(), value);
    let options = JoinOptions {
        fabric: arguments.fabric,
        knobs: vec![
            knob("model", format!("{:016x}", hasher.finish())),
            knob("--iterations", arguments.iterations.to_string()),
            knob("--depth", arguments.depth.to_string()),
            knob("--transfer", arguments.transfer.name().to_owned()),
            knob("--runtime", job.runtime.name().to_owned()),
            knob("--random-weights", format!("{:?}", arguments.random_weights)),
        ],
        signal_slots: slots(arguments, job),
        timeout: world.join_timeout.unwrap_or(DEFAULT_JOIN_TIMEOUT),
    };
    join(world, &options, Arc::new(SilentResponder)).map_err(CommandError::failed)
}

/// The outputs of a run.
struct SeenOutputs {
    /// The number of sets of inputs.
    sets: usize,
    /// The outputs of the first iteration with each set.
    of_sets: Vec<Vec<Tensor>>,
    /// Whether later iterations have the same.
    are_equal: bool,
}

impl SeenOutputs {
    fn add(&mut self, iteration: u64, seen: &[TensorRef<'_>]) {
        let set = (iteration % self.sets as u64) as usize;
        match self.of_sets.get(set) {
            None => {
                let tensor =
                    |seen: &TensorRef<'_>| Tensor { form: seen.form.clone(), bytes: seen.bytes.to_vec() };
                self.of_sets.push(seen.iter().map(tensor).collect());
            }
            Some(first) => {
                let is_same = |(first, seen): (&Tensor, &TensorRef<'_>)| {
                    first.form == *seen.form && first.bytes == seen.bytes
                };
                self.are_equal &= first.len() == seen.len() && first.iter().zip(seen).all(is_same);
            }
        }
    }

    /// Compares them with the outputs of the same parts one after another.
    fn verdict(&self, job: &Job<'_>, inputs: &[Vec<Tensor>]) -> Result<Verdict, JobError> {
        let reference = job.reference(&inputs[..self.of_sets.len()])?;
        Ok(Verdict {
            equal_to_parts: self.are_equal && reference.outputs == self.of_sets,
            largest_difference: reference.largest_difference,
        })
    }
}

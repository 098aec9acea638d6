//! A model on ranks: what `run` and `serve` have in common.
//!
//! Every rank reads the model, and places it as all others do.

use std::fmt::Display;
use std::hash::Hasher as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use pleach::graph::onnx::Model;
use pleach::graph::run::channels::signal_slots;
use pleach::graph::run::{Copies, Job, Onnxruntime, Regions, Rten, Runtime, TransportError};
use pleach::graph::{Costs, Graph, Machine, Partition};
use pleach::transport::rendezvous::{DEFAULT_JOIN_TIMEOUT, FabricChoice, JoinOptions, Joined, World, join};
use pleach::transport::{Device, Event, Rank};
use pleach_vocabulary::digest::Hasher64;

use super::placing::ModelArguments;
use super::source::{self, Source};
use crate::cli::CommandError;
use crate::cli::launch::{WorldArguments, rank_count};
use crate::cli::output::visible;
use crate::cli::silent::SilentResponder;

/// How long a rank waits for a tensor, if nothing else is said.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// A model on ranks, and how they run it.
#[derive(Debug, clap::Args)]
pub(crate) struct JobArguments {
    #[command(flatten)]
    pub(crate) model: ModelArguments,
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
    /// fabric, or by gRPC over sockets of one host (the last two for 'run')
    #[arg(long, value_enum, default_value_t = TransferChoice::ZeroCopy)]
    pub(crate) transfer: TransferChoice,
    /// How many iterations may be under way
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=64))]
    pub(crate) depth: u32,
    /// Draw weights of which the file gives only the shape
    #[arg(long, value_name = "SEED")]
    random_weights: Option<u64>,
    #[command(flatten)]
    pub(crate) world: WorldArguments,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum RuntimeChoice {
    Rten,
    Onnxruntime,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum TransferChoice {
    ZeroCopy,
    Copy,
    GrpcFabric,
    Grpc,
}

impl TransferChoice {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::ZeroCopy => "zero-copy",
            Self::Copy => "copy",
            Self::GrpcFabric => "grpc-fabric",
            Self::Grpc => "grpc",
        }
    }

    /// Whether the sender copies tensors into registered memory. gRPC copies them into messages.
    pub(crate) fn copies(self) -> Copies {
        match self {
            Self::Copy => Copies::Sender,
            Self::ZeroCopy | Self::GrpcFabric | Self::Grpc => Copies::None,
        }
    }
}

/// What all ranks read alike.
pub(crate) struct Loaded {
    model: Model,
    graph: Graph,
    pub(crate) partition: Partition,
    pub(crate) runtime: Box<dyn Runtime>,
}

impl Loaded {
    /// Reads a model for the ranks of the world; with a caller, the last of them computes nothing.
    pub(crate) fn read(arguments: &JobArguments, has_caller: bool) -> Result<Self, CommandError> {
        let callers = u32::from(has_caller);
        let ranks = rank_count(&arguments.world, arguments.model.ranks, 1, callers)?;
        let Some(ranks) = ranks.checked_sub(callers).filter(|ranks| *ranks > 0) else {
            let text = "no run: there is one rank, and one more has to serve; start two ranks or more";
            return Err(CommandError::typed(text));
        };
        let (source, graph) = source::read(&arguments.model.model)?;
        let graph = graph.with_dims(&arguments.model.dims()).map_err(|error| wrong(arguments, &error))?;
        let costs = Costs::estimated(&graph, &Machine::TYPICAL);
        let placement = arguments.model.place(&graph, &costs, ranks, None, None)?;
        let cut = if has_caller { Partition::with_caller } else { Partition::new };
        let partition = cut(&graph, &placement).map_err(|error| wrong(arguments, &error))?;
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

    pub(crate) fn job<'a>(&'a self, arguments: &'a JobArguments) -> Job<'a> {
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

pub(crate) fn wrong(arguments: &JobArguments, error: &dyn Display) -> CommandError {
    CommandError::typed(format!("no run: {}, {}", arguments.model.shown(), visible(&error.to_string())))
}

fn onnxruntime(library: Option<&Path>) -> Result<Box<dyn Runtime>, CommandError> {
    let runtime = Onnxruntime::open(library);
    let runtime = runtime
        .map_err(|error| CommandError::typed(format!("no runtime: {}", visible(&error.to_string()))))?;
    Ok(Box::new(runtime))
}

/// Joins the other ranks. All have to have the same model, options and `knobs`.
pub(crate) fn join_ranks(
    arguments: &JobArguments,
    job: &Job<'_>,
    world: &World,
    signal_slots: usize,
    knobs: &[(&str, String)],
) -> Result<Joined, CommandError> {
    let mut hasher = Hasher64::default();
    hasher.write(job.graph.to_string().as_bytes());
    hasher.write(format!("{:?}", job.partition.crossings()).as_bytes());
    let common = [
        ("model", format!("{:016x}", hasher.finish())),
        ("--depth", arguments.depth.to_string()),
        ("--transfer", arguments.transfer.name().to_owned()),
        ("--runtime", job.runtime.name().to_owned()),
        ("--random-weights", format!("{:?}", arguments.random_weights)),
    ];
    let knobs = common.iter().chain(knobs).map(|(name, value)| ((*name).to_owned(), value.clone()));
    let options = JoinOptions {
        fabric: arguments.fabric,
        knobs: knobs.collect(),
        signal_slots,
        timeout: world.join_timeout.unwrap_or(DEFAULT_JOIN_TIMEOUT),
    };
    join(world, &options, Arc::new(SilentResponder)).map_err(CommandError::failed)
}

/// Signal slots for each peer, for tensors by registered memory.
pub(crate) fn slots(arguments: &JobArguments, job: &Job<'_>) -> usize {
    signal_slots(&job.channels(&|_, _| false, arguments.transfer.copies()), arguments.depth)
}

/// Opens the channels of a job over a device.
pub(crate) fn open_regions(
    arguments: &JobArguments,
    job: &Job<'_>,
    (device, events): (Box<dyn Device>, Vec<Event>),
    patience: Duration,
    is_crowded: bool,
) -> Result<Regions, TransportError> {
    let reach = device.info().reach.clone();
    let maps = |one: Rank, other: Rank| {
        let own = device.info().rank;
        let peer = if one == own { other } else { one };
        reach.get(peer as usize).is_some_and(|reach| reach.maps)
    };
    let channels = job.channels(&maps, arguments.transfer.copies());
    Regions::open(device, events, channels, arguments.depth, patience, is_crowded)
}

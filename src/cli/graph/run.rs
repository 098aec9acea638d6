//! `pleach graph run`: runs a model on several ranks.
//!
//! The last rank gets the outputs, and compares them with `--check`; rank 0 prints the reports of
//! all.

use std::fmt::Display;
use std::path::PathBuf;
use std::time::Duration;

use pleach::graph::onnx::TensorFile;
use pleach::graph::run::{Job, JobError, RankOptions, Tensor, TensorRef, TensorTransport, run_rank};
use pleach::transport::Rank;
use pleach::transport::rendezvous::Joined;

use super::job::{JobArguments, Loaded, PATIENCE, TransferChoice, join_ranks, open_regions, slots, wrong};
use super::over_grpc;
use super::run_report::{RankLine, Report, Verdict, exchange, report_patience};
use crate::cli::CommandError;
use crate::cli::launch::rank_or_launch;
use crate::cli::output::visible;

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
    job: JobArguments,
    /// How many times the model runs
    #[arg(long, value_name = "N", default_value_t = 20, value_parser = clap::value_parser!(u64).range(1..))]
    iterations: u64,
    /// A tensor as an input; once for each input, in order [default: drawn at random]
    #[arg(long, value_name = "FILE.pb")]
    input: Vec<PathBuf>,
    /// How long a rank waits for a tensor, or for a receiver to release one
    #[arg(long, value_name = "S", default_value_t = PATIENCE.as_secs(),
        value_parser = clap::value_parser!(u64).range(1..=86_400))]
    timeout: u64,
    /// Compare all outputs with those of one process
    #[arg(long)]
    check: bool,
    /// Print results as JSON, one object a line
    #[arg(long)]
    json: bool,
}

/// Runs `pleach graph run`.
pub(crate) fn run(arguments: &Arguments) -> Result<(), CommandError> {
    let of_job = &arguments.job;
    let loaded = Loaded::read(of_job, false)?;
    let job = loaded.job(of_job);
    job.check().map_err(|error| wrong(of_job, &error))?;
    let inputs = inputs(arguments, &job)?;
    let ranks = job.ranks();
    let Some(world) = rank_or_launch(&of_job.world, Some(ranks), ranks, None)? else { return Ok(()) };
    let rank = world.rank;
    // What a runtime refuses is said before ranks wait for each other.
    let part = job.load_part(rank).map_err(|error| wrong(of_job, &error))?;
    let (copies, patience) = (of_job.transfer.copies(), Duration::from_secs(arguments.timeout));
    let iterations = ("--iterations", arguments.iterations.to_string());
    let Joined { device, events, mut store, fabric, ranks_a_processor, ranks_here, hosts, .. } =
        join_ranks(of_job, &job, &world, signal_slots(of_job, &job), &[iterations])?;
    // Sockets and RDMA alone do not find out who shares memory.
    let is_one_host = ranks_here == ranks || hosts.iter().all(|host| *host == hosts[0]);
    let mut transport: Box<dyn TensorTransport> = match of_job.transfer {
        TransferChoice::ZeroCopy | TransferChoice::Copy => {
            let opened =
                open_regions(of_job, &job, (device, events), patience, ranks_a_processor[rank as usize] > 1);
            Box::new(opened.map_err(|error| failed(rank, &error))?)
        }
        TransferChoice::Grpc | TransferChoice::GrpcFabric => {
            let channels = job.channels(&|_, _| false, copies);
            let (depth, iterations) = (of_job.depth, arguments.iterations);
            let plan = over_grpc::Plan { rank, ranks, channels, depth, iterations, patience };
            let is_on_sockets = of_job.transfer == TransferChoice::Grpc;
            let opened =
                over_grpc::OverGrpc::open(plan, is_on_sockets, (device, events), store.as_deref_mut());
            Box::new(opened.map_err(|error| failed(rank, &error))?)
        }
    };
    let options = RankOptions { iterations: arguments.iterations, depth: of_job.depth, copies };
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
    let patience = report_patience(patience, of_job.depth, ranks, arguments.check);
    let Some(lines) = exchange(store, rank, ranks, line, patience)? else { return Ok(()) };
    let report = Report {
        lines,
        runtime: loaded.runtime.name(),
        fabric: fabric.to_string(),
        transfer: of_job.transfer.name(),
        is_one_host,
        partition: &loaded.partition,
    };
    report.print(arguments.json)?;
    report.check(DIFFERENCE_MAX)
}

/// Signal slots for each peer.
fn signal_slots(arguments: &JobArguments, job: &Job<'_>) -> usize {
    match arguments.transfer {
        TransferChoice::GrpcFabric => pleach::exchange::grpc::byte_streams::signal_slots(over_grpc::STREAMS),
        _ => slots(arguments, job),
    }
}

fn failed(rank: Rank, error: &dyn Display) -> CommandError {
    CommandError::failed(format!("run ended: rank {rank}, {}", visible(&error.to_string())))
}

/// The inputs of the iterations by turns. There is one set more than slots, so that what an earlier
/// iteration left in a slot is not right by chance.
fn inputs(arguments: &Arguments, job: &Job<'_>) -> Result<Vec<Vec<Tensor>>, CommandError> {
    if arguments.input.is_empty() {
        let sets = u64::from(arguments.job.depth) + 1;
        return job.random_inputs(sets, INPUT_SEED).map_err(|error| wrong(&arguments.job, &error));
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
    Ok(vec![job.inputs(files).map_err(|error| wrong(&arguments.job, &error))?])
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

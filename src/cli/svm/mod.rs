//! `pleach svm`: ranks that train a support vector machine together.
//!
//! Each rank reads the samples and keeps its part. `--shrink` may be given several times; then a
//! machine is trained with each, on the same ranks, and a table shows what shrinking saved.

use std::fs::File;
use std::io::{BufWriter, Write as _};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use pleach::transport::clock;
use pleach::transport::rendezvous::FabricChoice;
use pleach::{Group, Options, ReduceOp};
use pleach_training::svm::{
    Kernel, Model, Outcome, Parameters, Progress, Selection, Shrinking, ShrinkingTextError, Svm, SvmError,
    Training, libsvm,
};
use serde_json::{Value, json};

use crate::cli::bench::Size;
use crate::cli::launch::{WorldArguments, rank_or_launch};
use crate::cli::output::{put, rounded};
use crate::cli::{CommandError, output, progress};
use curves::Curve;
use source::{Labelled, Labels, Part, Source};

mod curves;
mod source;

/// Most ranks that are started where nothing says how many: the bits do not depend on it.
const DEFAULT_RANKS_MAX: usize = 4;

/// Steps of the progress bar.
const BAR_STEPS: u64 = 100;

/// Iterations between two looks of the bar at the gap.
const BAR_ITERATIONS: u64 = 64;

/// Arguments of `pleach svm`.
#[derive(Debug, clap::Args)]
#[command(
    allow_negative_numbers = true,
    after_help = "Examples:\n  pleach svm digits\n  pleach svm digits --labels even --gamma 0.1 --shrink none --shrink 5%:single\n  pleach svm train.txt --test test.txt --c 10 --output model"
)]
pub(crate) struct Arguments {
    /// A file in LIBSVM's form, a folder with the files of MNIST, or 'digits' for the built-in ones
    #[arg(value_name = "FILE|DIR|digits")]
    source: Source,
    /// Two classes: even and odd labels, or one label and all others [default: each label is a
    /// class]
    #[arg(long, value_name = "even|LABEL")]
    labels: Option<Labels>,
    /// Samples that the machine is judged by, in LIBSVM's form [default: images held out of the
    /// training, or the samples of the file themselves]
    #[arg(long, value_name = "FILE")]
    test: Option<PathBuf>,
    /// The penalty of a sample on the wrong side
    #[arg(long, value_name = "C", default_value_t = 1.0)]
    c: f64,
    /// The factor of the squared distance in the RBF kernel [default: 1 / features]
    #[arg(long, value_name = "G")]
    gamma: Option<f64>,
    /// The largest violation of the conditions of optimality at the end
    #[arg(long, value_name = "T", default_value_t = 1e-3)]
    tolerance: f64,
    /// When samples are left out first: none, after N iterations, or after P % of the samples; and
    /// when they come back: at the end (single), or also once before (multi). Several times: trains
    /// with each [default: 5%:single]
    #[arg(long, value_name = "none|N|P%[:single|:multi]")]
    shrink: Vec<Shrink>,
    /// How a pair of samples is chosen: the one that violates most, or the one that gains most
    #[arg(long, value_name = "first|second", default_value = "second")]
    selection: SelectionName,
    /// Bytes of kernel rows that each rank keeps
    #[arg(long, value_name = "SIZE", default_value = "200M")]
    cache: Size,
    /// How many ranks to start here [default: one a processor, at most 4]
    #[arg(long, value_name = "N")]
    ranks: Option<u32>,
    /// The fabric: shm, tcp, shm+tcp, verbs, shm+verbs or auto
    #[arg(long, value_name = "FABRIC", default_value_t)]
    fabric: FabricChoice,
    /// Write the model to this file, in LIBSVM's form; of several --shrink the last one
    #[arg(long, value_name = "MODEL")]
    output: Option<PathBuf>,
    /// Draw the active samples and the gap over the iterations in this folder
    #[arg(long, value_name = "DIR")]
    curves: Option<PathBuf>,
    /// Print results as JSON, one object a line
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    world: WorldArguments,
}

#[derive(Clone, Copy, Debug, clap::ValueEnum)]
enum SelectionName {
    First,
    Second,
}

/// A shrinking with the name that was typed.
#[derive(Clone, Debug)]
struct Shrink {
    name: String,
    shrinking: Shrinking,
}

impl FromStr for Shrink {
    type Err = ShrinkingTextError;

    fn from_str(text: &str) -> Result<Self, ShrinkingTextError> {
        Ok(Self { name: text.to_owned(), shrinking: text.parse()? })
    }
}

/// A machine with what it took.
struct Trained {
    name: String,
    model: Model,
    training: Training,
    accuracy: f64,
    train_s: f64,
}

/// Runs `pleach svm`.
pub(crate) fn run(arguments: &Arguments) -> Result<(), CommandError> {
    // Before any rank is started, so that what is wrong is said once.
    let load = |place| arguments.source.part(arguments.test.as_deref(), arguments.labels, place);
    let whole = load((0, 1)).map_err(CommandError::typed)?;
    let usual_ranks = std::thread::available_parallelism().map_or(1, usize::from).min(DEFAULT_RANKS_MAX);
    let usual_ranks = usual_ranks.min(whole.train_rows) as u32;
    let Some(world) = rank_or_launch(&arguments.world, arguments.ranks, usual_ranks, None)? else {
        return Ok(());
    };
    let place = (world.rank as usize, world.world_size as usize);
    let part = if place.1 == 1 { whole } else { load(place).map_err(CommandError::typed)? };
    let mut options = Options::from_env_in(world);
    options.fabric = arguments.fabric;
    let group = Group::join(&options).map_err(CommandError::joining)?;

    let stop = Arc::new(AtomicBool::new(false));
    stop_on_interrupt(&stop).map_err(|error| {
        CommandError::failed(format!(
            "signals not handled: SIGINT ({error}); look at the limits of this host"
        ))
    })?;
    let usual = Shrink { name: "5%:single".to_owned(), shrinking: Shrinking::default() };
    let shrinks = if arguments.shrink.is_empty() { std::slice::from_ref(&usual) } else { &arguments.shrink };
    let (mut all, mut curves) = (Vec::new(), Vec::new());
    for shrink in shrinks {
        let mut curve = Curve::new(shrink.name.clone());
        let trained = train(&group, arguments, shrink, &part, &mut curve, &stop)?;
        let is_stopped = trained.training.outcome == Outcome::Stopped;
        all.push(trained);
        curves.push(curve);
        if is_stopped {
            break;
        }
    }
    let (rank, ranks) = (group.rank(), group.world_size());
    group.close().map_err(CommandError::failed)?;
    if rank != 0 {
        return Ok(());
    }
    report(arguments, &part, ranks, &all, &curves)
}

/// Has the first Ctrl-C ask for the model so far, and a second one end the process.
fn stop_on_interrupt(stop: &Arc<AtomicBool>) -> std::io::Result<()> {
    /// Of a process that SIGINT ended, as shells say it.
    const STATUS: i32 = 130;
    let signal = signal_hook::consts::SIGINT;
    signal_hook::flag::register_conditional_shutdown(signal, STATUS, stop.clone())?;
    signal_hook::flag::register(signal, stop.clone())?;
    Ok(())
}

fn parameters(arguments: &Arguments, shrinking: Shrinking, features: u32) -> Parameters {
    let gamma = arguments.gamma.unwrap_or(1.0 / f64::from(features.max(1)));
    Parameters {
        c: arguments.c,
        tolerance: arguments.tolerance,
        shrinking,
        selection: match arguments.selection {
            SelectionName::First => Selection::First,
            SelectionName::Second => Selection::Second,
        },
        cache_bytes: usize::try_from(arguments.cache.0).unwrap_or(usize::MAX),
        ..Parameters::new(Kernel::Rbf { gamma })
    }
}

fn train(
    group: &Group,
    arguments: &Arguments,
    shrink: &Shrink,
    part: &Part,
    curve: &mut Curve,
    stop: &AtomicBool,
) -> Result<Trained, CommandError> {
    let mut features = [part.train.samples.features()];
    group.all_reduce(&mut features, ReduceOp::Max).map_err(CommandError::failed)?;
    let parameters = parameters(arguments, shrink.shrinking, features[0]);
    let bar = progress::bar("training", BAR_STEPS, group.rank() == 0);
    let observe = |progress: &Progress| {
        if arguments.curves.is_some() {
            curve.add(progress);
        }
        if progress.iterations.is_multiple_of(BAR_ITERATIONS) {
            bar.set_position(done(progress, parameters.tolerance));
            let share = 100 * progress.active / progress.samples.max(1);
            bar.set_message(format!("gap {:.1e}, {share} % active", progress.gap));
        }
        // Relaxed: nothing else is passed on with the flag.
        if stop.load(Ordering::Relaxed) { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    };
    let Labelled { samples, labels } = &part.train;
    let begin = clock::now();
    let trained = Svm::train_observed(group, samples, labels, &parameters, observe);
    let train_s = (clock::now() - begin).as_secs_f64();
    bar.finish_and_clear();
    let model = trained.map_err(|error| match error {
        SvmError::Collective(_) | SvmError::Malformed { .. } | SvmError::NoProgress { .. } => {
            CommandError::failed(error)
        }
        error => CommandError::typed(error),
    })?;
    let judged = part.test.as_ref().unwrap_or(&part.train);
    let accuracy = accuracy(group, &model, judged)?;
    let training = *model.training().expect("it was trained here");
    Ok(Trained { name: shrink.name.clone(), model, training, accuracy, train_s })
}

/// How far training is, by the gap: each tenth of it takes about as long.
fn done(progress: &Progress, tolerance: f64) -> u64 {
    /// That of the first iteration: errors are the labels.
    const FIRST_GAP: f64 = 2.0;
    let share = (FIRST_GAP / progress.gap).ln() / (FIRST_GAP / tolerance).ln();
    let share = (progress.problem as f64 + share.clamp(0.0, 1.0)) / progress.problems as f64;
    (share * BAR_STEPS as f64) as u64
}

/// The share of all ranks' samples whose class is predicted.
fn accuracy(group: &Group, model: &Model, judged: &Labelled) -> Result<f64, CommandError> {
    let Labelled { samples, labels } = judged;
    let predicted = model.predict(samples);
    let right = predicted.as_ref().map_or(0, |predicted| {
        predicted.iter().zip(labels).filter(|(predicted, label)| predicted == label).count()
    });
    let mut counts = [right as u64, labels.len() as u64, u64::from(predicted.is_err())];
    group.all_reduce(&mut counts, ReduceOp::Sum).map_err(CommandError::failed)?;
    let [right, all, refused] = counts;
    match predicted {
        Err(error) => Err(CommandError::typed(error)),
        Ok(_) if refused > 0 => Err(CommandError::typed("bad samples: another rank's; its error says more")),
        Ok(_) => Ok(right as f64 / all.max(1) as f64),
    }
}

/// Writes and prints everything, on rank 0.
fn report(
    arguments: &Arguments,
    part: &Part,
    ranks: u32,
    all: &[Trained],
    curves: &[Curve],
) -> Result<(), CommandError> {
    let last = all.last().expect("at least one was trained");
    if let Some(path) = &arguments.output {
        write_model(&last.model, path)?;
    }
    if let Some(folder) = &arguments.curves {
        let title = format!("{} samples, {ranks} ranks", part.train_rows);
        curves::write(folder, &title, curves).map_err(|error| {
            let folder = folder.display();
            CommandError::failed(format!("curves not written: {folder} ({error}); name another folder"))
        })?;
    }
    let features = last.model.vectors().features();
    if arguments.json {
        for trained in all {
            output::print_json("results", &row(trained, ranks, part.train_rows, features))?;
        }
    } else {
        output::print("results", &table(arguments, all, ranks, part, features))?;
    }
    verdict(last)
}

fn row(trained: &Trained, ranks: u32, samples: usize, features: u32) -> Value {
    let Trained { model, training, accuracy, train_s, .. } = trained;
    let intercepts = model.intercepts();
    json!({
        "ranks": ranks,
        "samples": samples,
        "features": features,
        "iterations": training.iterations,
        "kernel_evaluations": training.kernel_evaluations,
        "reconstructions": training.reconstructions,
        "support_vectors": model.support_vectors(),
        "bounded": training.bounded,
        "objective": training.objective,
        "intercept": if let [only] = intercepts[..] { json!(only) } else { json!(intercepts) },
        "accuracy": rounded(*accuracy, 6),
        "train_s": rounded(*train_s, 6),
        "us_per_iteration": rounded(train_s * 1e6 / training.iterations.max(1) as f64, 3),
    })
}

fn table(arguments: &Arguments, all: &[Trained], ranks: u32, part: &Part, features: u32) -> String {
    let mut out = String::new();
    let judged = match (&arguments.test, &part.test) {
        (Some(path), _) => format!("{}", path.display()),
        (None, Some(_)) => "samples held out of the training".to_owned(),
        (None, None) => "the samples of the training themselves".to_owned(),
    };
    put!(out, "# {} samples of {features} features on {ranks} ranks; accuracy on {judged}", part.train_rows);
    put!(
        out,
        "{:<12} {:>10} {:>15} {:>8} {:>7} {:>8} {:>16} {:>9} {:>9} {:>8}",
        "shrink",
        "iterations",
        "kernel values",
        "vectors",
        "bounded",
        "rebuilt",
        "objective",
        "accuracy",
        "seconds",
        "us/iter"
    );
    for Trained { name, model, training, accuracy, train_s } in all {
        put!(
            out,
            "{name:<12} {:>10} {:>15} {:>8} {:>7} {:>8} {:>16.8} {accuracy:>9.4} {train_s:>9.3} {:>8.1}",
            training.iterations,
            training.kernel_evaluations,
            model.support_vectors(),
            training.bounded,
            training.reconstructions,
            training.objective,
            train_s * 1e6 / training.iterations.max(1) as f64
        );
    }
    if let Some(none) = all.iter().find(|trained| trained.name == "none") {
        for trained in all.iter().filter(|trained| trained.name != "none") {
            let saved = |with: f64, without: f64| (1.0 - with / without) * 100.0;
            put!(
                out,
                "# {} saved {:.1} % of the kernel values and {:.1} % of the time of 'none'",
                trained.name,
                saved(trained.training.kernel_evaluations as f64, none.training.kernel_evaluations as f64),
                saved(trained.train_s, none.train_s)
            );
        }
    }
    out
}

fn write_model(model: &Model, path: &Path) -> Result<(), CommandError> {
    let written = File::create(path).and_then(|file| {
        let mut file = BufWriter::new(file);
        libsvm::write_model(model, &mut file)?;
        file.flush()
    });
    written.map_err(|error| {
        let path = path.display();
        CommandError::failed(format!("model not written: {path} ({error}); name a file on a disk with room"))
    })
}

/// Whether training came to its end.
fn verdict(last: &Trained) -> Result<(), CommandError> {
    let Training { outcome, iterations, gap, .. } = last.training;
    match outcome {
        Outcome::Converged => Ok(()),
        Outcome::Stopped => Err(CommandError::failed(format!(
            "training stopped: SIGINT came after {iterations} iterations at a gap of {gap:.1e}; the results are those so far"
        ))),
        Outcome::IterationsMax => Err(CommandError::failed(format!(
            "not converged: {iterations} iterations left a gap of {gap:.1e}; scale the features, lower --c or raise --tolerance"
        ))),
    }
}

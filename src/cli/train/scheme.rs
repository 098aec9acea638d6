//! `pleach train --scheme`: real ranks that train by a scheme, and what the scheme guarantees.

use std::ops::Range;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use pleach::transport::clock;
use pleach::{CollectiveError, Group};
use pleach_training::interpreter::Staleness;
use pleach_training::{Learner as _, Scheme, Sgd, TrainError, Trained, Trainer};
use serde_json::json;

use super::computing::record;
use super::data::Synthetic;
use super::hybrid;
use super::learner::DigitReader;
use super::{Arguments, train_alone};
use crate::cli::digits::DataSet;
use crate::cli::output::{note, print, print_json, put, rounded};
use crate::cli::{CommandError, progress};

/// How much less accurate than one rank a training by `--partial` may be.
const ACCURACY_LOSS_MAX: f64 = 0.02;

/// What a rank tells of its training.
#[derive(Clone, Copy, Debug)]
struct RankRow {
    steps_per_s: f64,
    communication_share: f64,
    wait_share: f64,
    staleness_max: u64,
    staleness: [u64; Staleness::BOUNDS.len() + 1],
    bytes_per_step: f64,
    /// None where it was not measured.
    spread: Option<f64>,
}

/// Trains by each scheme, one after the other.
pub(crate) fn run(
    arguments: &Arguments,
    schemes: &[Scheme],
    group: Group,
    (data, endless): (&DataSet, Option<&Synthetic>),
) -> Result<(), CommandError> {
    let reader = DigitReader::new(&data.train, &arguments.model, &arguments.training).with_endless(endless);
    let (mut broken, mut by_rounds) = (None, None);
    for scheme in schemes {
        let optimizer = arguments.training.optimizer(scheme, group.world_size())?;
        let (trained, kept) = match scheme {
            Scheme::Hybrid { groups } => hybrid::train(arguments, &group, *groups, &reader, optimizer)?,
            _ => {
                let (trained, kept, times) =
                    train(arguments, &group, scheme, &reader, optimizer).map_err(|error| match error {
                        TrainError::Refused(refusal) => CommandError::usage(refusal),
                        error => CommandError::failed(error),
                    })?;
                if let Some(path) = arguments.keeping.record() {
                    record(&group, &times, path)?;
                }
                (trained, kept)
            }
        };
        let rows = RankRow::gather(&group, &trained).map_err(CommandError::failed)?;
        let holds = trained.guarantee_held && trained.parameters_equal;
        if group.rank() == 0 {
            if let Some(remark) = &trained.remark {
                note(&format!("{scheme}: {remark}"));
            }
            let accuracy = reader.reading(&trained.parameters, &data.test).accuracy;
            let report = Report { scheme, rows, trained, accuracy, examined: data.test.len() };
            if arguments.partial.is_some() {
                // One rank is trained when the others have left.
                by_rounds = Some(report);
            } else {
                report.print(arguments.json, None)?;
            }
            if let (Some(path), false) = (kept, arguments.json) {
                print("results", &format!("checkpoint in {}\n", path.display()))?;
            }
        }
        if !holds && broken.is_none() {
            broken = Some(scheme);
        }
    }
    let rank = group.rank();
    group.close().map_err(CommandError::failed)?;
    let mut worse = None;
    if let Some(report) = by_rounds {
        let one_rank = train_alone(&arguments.model, &data.train, arguments.epochs());
        let of_one = one_rank.network.accuracy(&data.test);
        report.print(arguments.json, Some(of_one))?;
        // That not all gradients are in each step must not show.
        worse = Some((report.accuracy, of_one)).filter(|(own, of_one)| own + ACCURACY_LOSS_MAX < *of_one);
    }
    match broken {
        Some(scheme) if rank == 0 => Err(CommandError::failed(format!(
            "guarantee broken: {scheme} says that {}, and that did not hold; report this with PLEACH_LOG=debug",
            scheme.guarantee()
        ))),
        _ => match worse {
            Some((accuracy, of_one)) => Err(CommandError::failed(format!(
                "it has learned less: test accuracy {accuracy:.4}, and {of_one:.4} by one rank; take an activation that \
                 waits for more ranks"
            ))),
            None => Ok(()),
        },
    }
}

/// Returns the training, the newest checkpoint, and what each step took to compute, if that is to
/// be recorded.
fn train(
    arguments: &Arguments,
    group: &Group,
    scheme: &Scheme,
    reader: &DigitReader<'_>,
    (learning_rate, momentum): (f32, f32),
) -> Result<(Trained, Option<PathBuf>, Vec<Duration>), TrainError> {
    let (training, keeping) = (&arguments.training, &arguments.keeping);
    let (layout, rank, ranks) = (reader.layout(), group.rank(), group.world_size());
    let steps = training.steps(arguments.epochs_by(scheme), reader.images(), ranks);
    let trainer = Trainer::new(group, scheme, &layout, steps)?
        .checked()
        .comparing("the hash of the data and the batch", reader.hash())
        .comparing("the seed", training.seed)
        .comparing("the bits of the learning rate", learning_rate.to_bits().into())
        .comparing("the bits of the momentum", momentum.to_bits().into());
    // The trainer steps in pieces of the parameters as averages come, and checkpoints have the
    // velocity.
    let sgd = Arc::new(Mutex::new(Sgd::new(layout.parameters(), learning_rate, momentum)));
    let stepping = sgd.clone();
    let trainer = trainer.by_bucket(move |piece, parameters, gradient| {
        lock(&stepping).step_piece(piece, parameters, gradient);
    })?;
    let mut trainer = keeping.begin(trainer, &sgd, rank, &reader.initial(), None)?;
    let first = trainer.next_step();
    let bar = progress::bar("training", steps - first, rank == 0);
    let mut kept = None;
    let (mut times, mut whole) = (Vec::new(), vec![0.0; layout.parameters()]);
    loop {
        kept = keeping.save(&mut trainer, &sgd, first, steps, None)?.or(kept);
        let Some(mut step) = trainer.step()? else { break };
        let number = step.number();
        let mut computed = Duration::ZERO;
        let mut timed = |body: &mut dyn FnMut()| {
            let begun = clock::now();
            body();
            computed += clock::now() - begun;
        };
        let buckets: Vec<Range<usize>> = step.buckets().to_vec();
        let batch = reader.batch(rank, number);
        let mut passes = reader.network().passes(&mut batch.samples());
        // The first layers are in the last bucket.
        for (bucket, piece) in buckets.iter().enumerate().rev() {
            whole[piece.clone()].copy_from_slice(step.parameters(bucket)?);
            timed(&mut || passes.forward(&whole[..piece.end]));
        }
        let loss = passes.begin_backward(reader.scale());
        timed(&mut || arguments.skew.sleep(rank, ranks, number));
        for (bucket, piece) in buckets.iter().enumerate() {
            let (parameters, gradient) = step.bucket(bucket)?;
            timed(&mut || passes.backward(piece, parameters, gradient));
            step.ready(bucket)?;
        }
        if keeping.record().is_some() {
            times.push(computed);
        }
        step.end(loss)?;
        bar.inc(1);
    }
    bar.finish_and_clear();
    Ok((trainer.finish()?, kept, times))
}

/// The optimizer of this rank. It computes nothing that could be left half done.
pub(crate) fn lock(sgd: &Mutex<Sgd>) -> std::sync::MutexGuard<'_, Sgd> {
    sgd.lock().unwrap_or_else(PoisonError::into_inner)
}

impl RankRow {
    /// The rows of all ranks.
    fn gather(group: &Group, trained: &Trained) -> Result<Vec<Self>, CollectiveError> {
        let progress = &trained.progress;
        let seconds = progress.time.as_secs_f64();
        let steps = progress.steps as f64;
        let mut own = vec![
            steps / seconds,
            progress.communicating.as_secs_f64() / seconds,
            progress.waiting.as_secs_f64() / seconds,
            progress.staleness.most() as f64,
            progress.bytes as f64 / steps.max(1.0),
            progress.spread.unwrap_or(f64::NAN),
        ];
        let numbers = own.len();
        own.extend(progress.staleness.histogram().map(|steps| steps as f64));
        let mut all = vec![0.0; own.len() * group.world_size() as usize];
        group.all_gather(&own[..], &mut all)?;
        let row = |row: &[f64]| Self {
            steps_per_s: row[0],
            communication_share: row[1],
            wait_share: row[2],
            staleness_max: row[3] as u64,
            staleness: std::array::from_fn(|bin| row[numbers + bin] as u64),
            bytes_per_step: row[4],
            spread: (!row[5].is_nan()).then_some(row[5]),
        };
        Ok(all.chunks_exact(own.len()).map(row).collect())
    }
}

/// A histogram of staleness in JSON: of each bin its most, null of the last, and its steps.
pub(crate) fn bins(histogram: &[u64]) -> serde_json::Value {
    let bounds = Staleness::BOUNDS.iter().map(Some).chain([None]);
    bounds.zip(histogram).map(|(most, steps)| json!([most, steps])).collect()
}

/// What is told of a training.
struct Report<'a> {
    scheme: &'a Scheme,
    rows: Vec<RankRow>,
    trained: Trained,
    /// Of the test images, and their number.
    accuracy: f64,
    examined: usize,
}

impl Report<'_> {
    /// `of_one`: the test accuracy of one rank.
    fn print(&self, as_json: bool, of_one: Option<f64>) -> Result<(), CommandError> {
        let Self { scheme, rows, trained, accuracy, examined } = self;
        let holds = trained.guarantee_held && trained.parameters_equal;
        if as_json {
            for (rank, row) in rows.iter().enumerate() {
                let row = json!({
                    "rank": rank,
                    "steps_per_s": rounded(row.steps_per_s, 3),
                    "communication_share": rounded(row.communication_share, 4),
                    "wait_share": rounded(row.wait_share, 4),
                    "staleness_max": row.staleness_max,
                    "staleness_histogram": bins(&row.staleness),
                    "bytes_per_step": rounded(row.bytes_per_step, 1),
                    "spread": row.spread.map(|spread| rounded(spread, 6)),
                });
                print_json("results", &row)?;
            }
            let mut last = json!({
                "scheme": scheme.to_string(),
                "ranks": rows.len(),
                "test_accuracy": rounded(*accuracy, 4),
                "parameters_equal": trained.parameters_equal,
                "guarantee_held": holds,
            });
            if let Some(of_one) = of_one {
                last["test_accuracy_of_one_rank"] = json!(rounded(of_one, 4));
            }
            return print_json("results", &last);
        }
        let mut out = format!("{scheme}: {} steps\n", trained.progress.steps);
        put!(out, "rank    steps/s  communicating    waiting  staleness  bytes/step     spread");
        for (rank, row) in rows.iter().enumerate() {
            let [communicating, waiting] =
                [row.communication_share, row.wait_share].map(|share| share * 100.0);
            let spread = row.spread.map_or_else(|| "-".to_owned(), |spread| format!("{spread:.2e}"));
            put!(
                out,
                "{rank:>4} {:>10.1} {communicating:>12.1} % {waiting:>8.1} % {:>10} {:>11.1} {spread:>10}",
                row.steps_per_s,
                row.staleness_max,
                row.bytes_per_step
            );
        }
        let held = if holds { "yes" } else { "NO" };
        put!(out, "{} ({} times, and at the end): {held}", scheme.guarantee(), trained.progress.agreements);
        if let Some(of_one) = of_one {
            put!(out, "the test accuracy of one rank is {of_one:.4}");
        }
        put!(out, "test accuracy {accuracy:.4} on {examined} images never seen before");
        print("results", &out)
    }
}

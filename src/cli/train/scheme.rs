//! `pleach train --scheme`: real ranks that train by a scheme, and what the scheme guarantees.

use std::path::PathBuf;

use pleach::{CollectiveError, Group};
use pleach_training::{Learner as _, Scheme, Sgd, TrainError, Trained, Trainer};
use serde_json::json;

use super::Arguments;
use super::hybrid;
use super::learner::DigitReader;
use crate::cli::digits::DataSet;
use crate::cli::output::{print, print_json, put, rounded};
use crate::cli::{CommandError, progress};

/// What a rank tells of its training.
#[derive(Clone, Copy, Debug)]
struct RankRow {
    steps_per_s: f64,
    communication_share: f64,
    wait_share: f64,
    staleness_max: u64,
    bytes_per_step: f64,
}

/// Trains by each scheme, one after the other.
pub(crate) fn run(arguments: &Arguments, group: Group, data: &DataSet) -> Result<(), CommandError> {
    let reader = DigitReader::new(&data.train, &arguments.model, &arguments.training);
    let mut broken = None;
    for scheme in &arguments.scheme {
        let optimizer = arguments.training.optimizer(scheme, group.world_size())?;
        let (trained, kept) = match scheme {
            Scheme::Hybrid { groups } => {
                (hybrid::train(arguments, &group, *groups, &reader, optimizer)?, None)
            }
            _ => train(arguments, &group, scheme, &reader, optimizer).map_err(|error| match error {
                TrainError::Refused(refusal) => CommandError::usage(refusal),
                error => CommandError::failed(error),
            })?,
        };
        let rows = RankRow::gather(&group, &trained).map_err(CommandError::failed)?;
        let holds = trained.guarantee_held && trained.parameters_equal;
        if group.rank() == 0 {
            report(arguments.json, scheme, &rows, &trained, &reader, data)?;
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
    match broken {
        Some(scheme) if rank == 0 => Err(CommandError::failed(format!(
            "guarantee broken: {scheme} says that {}, and that did not hold; report this with PLEACH_LOG=debug",
            scheme.guarantee()
        ))),
        _ => Ok(()),
    }
}

fn train(
    arguments: &Arguments,
    group: &Group,
    scheme: &Scheme,
    reader: &DigitReader<'_>,
    (learning_rate, momentum): (f32, f32),
) -> Result<(Trained, Option<PathBuf>), TrainError> {
    let (training, keeping) = (&arguments.training, &arguments.keeping);
    let (layout, rank, ranks) = (reader.layout(), group.rank(), group.world_size());
    let steps = training.steps(arguments.epochs, reader.images(), ranks);
    let trainer = Trainer::new(group, scheme, &layout, steps)?
        .checked()
        .comparing("the hash of the data and the batch", reader.hash())
        .comparing("the seed", training.seed)
        .comparing("the bits of the learning rate", learning_rate.to_bits().into())
        .comparing("the bits of the momentum", momentum.to_bits().into());
    let mut sgd = Sgd::new(layout.parameters(), learning_rate, momentum);
    let mut trainer = keeping.begin(trainer, &mut sgd, rank, &reader.initial())?;
    let first = trainer.next_step();
    let bar = progress::bar("training", steps - first, rank == 0);
    let mut kept = None;
    loop {
        kept = keeping.save(&mut trainer, &sgd, first, steps)?.or(kept);
        let Some(mut step) = trainer.step()? else { break };
        let number = step.number();
        let (parameters, gradient) = step.vectors()?;
        let loss = reader.gradient(rank, number, parameters, gradient);
        arguments.skew.sleep(rank, ranks, number);
        step.update(|parameters, gradient| sgd.step(parameters, gradient), loss)?;
        bar.inc(1);
    }
    bar.finish_and_clear();
    Ok((trainer.finish()?, kept))
}

impl RankRow {
    /// The rows of all ranks.
    fn gather(group: &Group, trained: &Trained) -> Result<Vec<Self>, CollectiveError> {
        let seconds = trained.time.as_secs_f64();
        let steps = trained.steps as f64;
        let own = [
            steps / seconds,
            trained.communicating.as_secs_f64() / seconds,
            trained.waiting.as_secs_f64() / seconds,
            trained.staleness.most() as f64,
            trained.bytes as f64 / steps.max(1.0),
        ];
        let mut all = vec![0.0; own.len() * group.world_size() as usize];
        group.all_gather(&own, &mut all)?;
        let row = |row: &[f64]| Self {
            steps_per_s: row[0],
            communication_share: row[1],
            wait_share: row[2],
            staleness_max: row[3] as u64,
            bytes_per_step: row[4],
        };
        Ok(all.chunks_exact(own.len()).map(row).collect())
    }
}

fn report(
    as_json: bool,
    scheme: &Scheme,
    rows: &[RankRow],
    trained: &Trained,
    reader: &DigitReader<'_>,
    data: &DataSet,
) -> Result<(), CommandError> {
    let accuracy = reader.reading(&trained.parameters, &data.test).accuracy;
    let holds = trained.guarantee_held && trained.parameters_equal;
    if as_json {
        for (rank, row) in rows.iter().enumerate() {
            let row = json!({
                "rank": rank,
                "steps_per_s": rounded(row.steps_per_s, 1),
                "communication_share": rounded(row.communication_share, 4),
                "wait_share": rounded(row.wait_share, 4),
                "staleness_max": row.staleness_max,
                "bytes_per_step": rounded(row.bytes_per_step, 1),
            });
            print_json("results", &row)?;
        }
        let last = json!({
            "scheme": scheme.to_string(),
            "ranks": rows.len(),
            "test_accuracy": rounded(accuracy, 4),
            "parameters_equal": trained.parameters_equal,
            "guarantee_held": holds,
        });
        return print_json("results", &last);
    }
    let mut out = format!("{scheme}: {} steps\n", trained.steps);
    put!(out, "rank    steps/s  communicating    waiting  staleness  bytes/step");
    for (rank, row) in rows.iter().enumerate() {
        let [communicating, waiting] = [row.communication_share, row.wait_share].map(|share| share * 100.0);
        put!(
            out,
            "{rank:>4} {:>10.1} {communicating:>12.1} % {waiting:>8.1} % {:>10} {:>11.1}",
            row.steps_per_s,
            row.staleness_max,
            row.bytes_per_step
        );
    }
    let held = if holds { "yes" } else { "NO" };
    put!(out, "{} ({} times, and at the end): {held}", scheme.guarantee(), trained.agreements);
    put!(out, "test accuracy {accuracy:.4} on {} images never seen before", data.test.len());
    print("results", &out)
}

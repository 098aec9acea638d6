//! `pleach train --simulate`: schemes in virtual time, over links of a topology.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use pleach::collectives::simulate::wired::choose;
use pleach::packing::topology;
use pleach::schedule::select::SelectError;
use pleach::schedule::wiring::Wiring;
use pleach::{Collective, Rank};
use pleach_training::simulation::{Network, Settings, Simulated, Simulation, SimulationError, TransferTime};
use pleach_training::{Reading, Scheme};
use serde_json::json;

use super::Arguments;
use super::curves::{self, Curve};
use super::learner::DigitReader;
use crate::cli::CommandError;
use crate::cli::digits::DataSet;
use crate::cli::output::{print, print_json, put, rounded};

/// Most simulated ranks: each has vectors of its own.
pub(crate) const RANKS_MAX: u32 = 1024;

/// Points of a curve, besides the last.
const POINTS: u64 = 50;

/// Trains by each scheme, one after the other.
pub(crate) fn run(arguments: &Arguments, ranks: u32, data: &DataSet) -> Result<(), CommandError> {
    let mut prices = Prices::new(arguments, ranks)?;
    let training = &arguments.training;
    if let Some(rank) = arguments.compute.straggler().filter(|rank| *rank >= ranks) {
        let error = format!("no such rank: straggler {rank} of {ranks} ranks; give 0 to {}", ranks - 1);
        return Err(CommandError::typed(error));
    }
    let reader = DigitReader::new(&data.train, &arguments.model, training);
    let steps = training.steps(arguments.epochs, reader.images(), ranks);
    let settings = |(learning_rate, momentum)| Settings {
        ranks,
        steps,
        seed: training.seed,
        computing: arguments.compute,
        learning_rate,
        momentum,
        observed_every: if arguments.curves.is_some() { steps.div_ceil(POINTS) } else { steps },
    };
    let title = format!(
        "{ranks} simulated ranks over {}, computing {}, {steps} steps of {} images",
        prices.source, arguments.compute, training.batch
    );
    let (mut all, mut drawn) = (Vec::new(), Vec::new());
    for scheme in &arguments.scheme {
        let mut curve = Curve::new(scheme.to_string());
        let settings = settings(training.optimizer(scheme, ranks)?);
        let simulation = Simulation::new(&reader, scheme, &settings).map_err(|error| match error {
            SimulationError::Refused(refusal) => CommandError::usage(refusal),
            error => CommandError::failed(error),
        })?;
        let simulated = simulation.run(&mut prices, &mut |observed| {
            if arguments.curves.is_some() {
                curve.add(observed, reader.reading(observed.parameters, &data.test));
            }
        });
        prices.verdict()?;
        let simulated = simulated.map_err(CommandError::failed)?;
        let reading = reader.reading(&simulated.parameters, &data.test);
        if arguments.json {
            print_json("results", &row(scheme, &settings, &simulated, reading))?;
        }
        all.push((scheme, simulated, reading));
        drawn.push(curve);
    }
    if !arguments.json {
        print("results", &table(&title, &all))?;
    }
    if let Some(folder) = &arguments.curves {
        curves::write(folder, &title, &drawn).map_err(|error| {
            let folder = folder.display();
            CommandError::failed(format!("curves not written: {folder} ({error}); name another folder"))
        })?;
    }
    verdict(&all)
}

/// How long all-reduces take, by bytes, and transfers, by their links.
struct Prices {
    source: String,
    /// None for one rank, which has no links.
    wiring: Option<Arc<Wiring>>,
    known: HashMap<u64, Duration>,
    failed: Option<SelectError>,
}

impl Prices {
    fn new(arguments: &Arguments, ranks: u32) -> Result<Self, CommandError> {
        let source = arguments.topology.clone().unwrap_or_else(|| format!("star:{ranks}@1"));
        let is_alone = ranks == 1 && arguments.topology.is_none();
        let wiring = if is_alone {
            None
        } else {
            let topology = topology::source(&source).map_err(CommandError::typed)?;
            if topology.ranks() != ranks {
                let has = topology.ranks();
                return Err(CommandError::typed(format!(
                    "ranks contradict: --simulate {ranks}, but {source} has {has}; give --simulate {has}"
                )));
            }
            Some(Arc::new(Wiring::new(topology)))
        };
        Ok(Self { source, wiring, known: HashMap::new(), failed: None })
    }

    /// Whether each price was found.
    fn verdict(&mut self) -> Result<(), CommandError> {
        self.failed.take().map_or(Ok(()), |error| {
            Err(CommandError::failed(format!("no schedule over {}: {error}", self.source)))
        })
    }
}

impl Network for Prices {
    /// The time of the schedule that is chosen for these links.
    fn all_reduce(&mut self, bytes: u64) -> Duration {
        let Some(wiring) = &self.wiring else { return Duration::ZERO };
        if let Some(price) = self.known.get(&bytes) {
            return *price;
        }
        let chosen =
            choose(wiring, Collective::AllReduce, usize::try_from(bytes).unwrap_or(usize::MAX), None);
        let price = match chosen {
            Ok(chosen) => {
                let row = chosen.table.iter().find(|row| row.algorithm == chosen.algorithm);
                Duration::from_secs_f64(row.map_or(0.0, |row| row.seconds))
            }
            Err(error) => {
                self.failed = Some(error);
                Duration::ZERO
            }
        };
        self.known.insert(bytes, price);
        price
    }

    /// The bytes take all routes between two ranks, each its share, and a route is as quick as its
    /// slowest link.
    fn transfer(&mut self, from: Rank, to: Rank, bytes: u64) -> TransferTime {
        let Some(wiring) = &self.wiring else { return TransferTime::default() };
        let routes = wiring.routes();
        let between = routes.between(from, to);
        let all: f64 = between.iter().map(|route| route.weight as f64).sum();
        let sending = between.iter().map(|route| {
            let slowest = route.links.iter().map(|link| routes.links()[*link].bytes_per_s).min();
            let share = route.weight as f64 / all;
            share * bytes as f64 / slowest.map_or(f64::INFINITY, |rate| rate as f64)
        });
        let latency = Duration::from_nanos(routes.latency_ns(from, to));
        TransferTime { latency, sending: Duration::from_secs_f64(sending.fold(0.0, f64::max)) }
    }
}

fn row(scheme: &Scheme, settings: &Settings, simulated: &Simulated, reading: Reading) -> serde_json::Value {
    let virtual_s = simulated.time.as_secs_f64();
    json!({
        "scheme": scheme.to_string(),
        "ranks": settings.ranks,
        "seed": settings.seed,
        "lr": settings.learning_rate,
        "virtual_s": rounded(virtual_s, 9),
        "steps": simulated.steps,
        "test_loss": rounded(reading.loss, 6),
        "test_accuracy": rounded(reading.accuracy, 4),
        "time_to_target_s": null,
        "steps_per_s": rounded(simulated.steps as f64 / virtual_s, 3),
        "wait_share": rounded(simulated.wait_share, 6),
        "staleness_mean": rounded(simulated.staleness_mean, 4),
        "staleness_max": simulated.staleness_max,
        "bytes_per_rank": simulated.bytes_per_rank,
        "hash": format!("{:016x}", simulated.hash),
    })
}

fn table(title: &str, all: &[(&Scheme, Simulated, Reading)]) -> String {
    let mut out = format!("# {title}\n");
    let width = all.iter().map(|(scheme, ..)| scheme.to_string().len()).max().unwrap_or(0).max(10);
    put!(
        out,
        "{:<width$} {:>10} {:>9} {:>9} {:>9} {:>12} {:>9} {:>8}  {:<16}",
        "scheme",
        "virtual s",
        "steps/s",
        "waiting",
        "staleness",
        "bytes a rank",
        "test loss",
        "accuracy",
        "hash"
    );
    for (scheme, simulated, reading) in all {
        let virtual_s = simulated.time.as_secs_f64();
        put!(
            out,
            "{:<width$} {virtual_s:>10.3} {:>9.1} {:>7.1} % {:>9.2} {:>12} {:>9.4} {:>8.4}  {:016x}",
            scheme.to_string(),
            simulated.steps as f64 / virtual_s,
            simulated.wait_share * 100.0,
            simulated.staleness_mean,
            simulated.bytes_per_rank,
            reading.loss,
            reading.accuracy,
            simulated.hash
        );
    }
    for (scheme, simulated, _) in all {
        let held = if holds(simulated) { "yes" } else { "NO" };
        put!(out, "{}: {}: {held}", scheme.name(), scheme.guarantee());
    }
    out
}

fn holds(simulated: &Simulated) -> bool {
    simulated.guarantee_held && simulated.parameters_equal
}

fn verdict(all: &[(&Scheme, Simulated, Reading)]) -> Result<(), CommandError> {
    match all.iter().find(|(_, simulated, _)| !holds(simulated)) {
        None => Ok(()),
        Some((scheme, ..)) => Err(CommandError::failed(format!(
            "guarantee broken: {scheme} says that {}, and that did not hold; report this with PLEACH_LOG=debug",
            scheme.guarantee()
        ))),
    }
}

//! `pleach train --simulate`: schemes in virtual time, over links of a topology.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::Duration;

use pleach::packing::topology;
use pleach::schedule::wiring::Wiring;
use pleach_training::hybrid::{Shards, groups_of};
use pleach_training::simulation::hybrid::{OfGroups, ShardLinks};
use pleach_training::simulation::{
    Exchanges, Observation, RecordedTimes, Settings, Simulated, Simulation, SimulationError,
};
use pleach_training::{Learner, Reading, Scheme};
use serde_json::json;

use super::curves::{self, Curve};
use super::data::Synthetic;
use super::learner::DigitReader;
use super::scheme::bins;
use super::until::Until;
use super::wires::{Prices, engines};
use super::{Arguments, Fidelity};
use crate::cli::CommandError;
use crate::cli::digits::DataSet;
use crate::cli::output::{note, print, print_json, put, rounded};

/// Most simulated ranks: each has vectors of its own.
pub(crate) const RANKS_MAX: u32 = 1024;

/// Points of a curve, besides the last.
const POINTS: u32 = 50;

/// Observations for `--until`, at most.
const LOOKS: u64 = 200;

/// Steps of a simulation that ends by time: more than any makes.
const ENDLESS: u64 = 1 << 40;

/// A simulation and what came of it.
struct Run {
    scheme: Scheme,
    settings: Settings,
    simulated: Simulated,
    reading: Reading,
    /// Of the test images, before the first step.
    loss_before: f64,
    /// When what was asked for was reached.
    target: Option<Duration>,
}

/// What is the same for all runs.
struct Runs<'a> {
    arguments: &'a Arguments,
    data: &'a DataSet,
    endless: Option<&'a Synthetic>,
    ranks: u32,
    steps: u64,
    /// Computing times, where they are not drawn.
    recorded: Option<Arc<RecordedTimes>>,
    source: String,
    /// None for one rank, which has no links.
    wiring: Option<Arc<Wiring>>,
    prices: Prices,
}

/// Trains by each scheme, one after the other.
pub(crate) fn run(
    arguments: &Arguments,
    schemes: &[Scheme],
    ranks: u32,
    (data, endless): (&DataSet, Option<&Synthetic>),
) -> Result<(), CommandError> {
    let (source, wiring) = links(arguments, ranks)?;
    let training = &arguments.training;
    if let Some(rank) = arguments.compute.drawn().straggler().filter(|rank| *rank >= ranks) {
        let error = format!("no such rank: straggler {rank} of {ranks} ranks; give 0 to {}", ranks - 1);
        return Err(CommandError::typed(error));
    }
    let steps = match arguments.until {
        Some(Until::Steps(steps)) => steps,
        Some(Until::Time(_)) if training.steps.is_none() => ENDLESS,
        _ => training.steps(arguments.epochs(), data.train.len(), ranks),
    };
    let length = if steps == ENDLESS { String::new() } else { format!("{steps} steps of ") };
    let faults = match &arguments.faults {
        none if none.is_empty() => String::new(),
        faults => format!(", faults {faults}"),
    };
    let title = format!(
        "{ranks} simulated ranks over {}, computing {}, {length}{} images{faults}",
        source, arguments.compute, training.batch
    );
    let recorded = arguments.compute.recorded().map_err(CommandError::usage)?;
    let prices = Prices::new(wiring.clone());
    let mut runs = Runs { arguments, data, endless, ranks, steps, recorded, source, wiring, prices };
    let (mut all, mut drawn) = (Vec::new(), Vec::new());
    for scheme in schemes {
        let swept = match &arguments.sweep {
            Some(sweep) => sweep.of(scheme).map_err(CommandError::usage)?,
            None => vec![*scheme],
        };
        let from = all.len();
        for scheme in swept {
            let rate = runs.best_rate(&scheme)?;
            for seed in (0..arguments.seeds).map(|more| training.seed.wrapping_add(more.into())) {
                let mut curve = Curve::new(scheme.to_string());
                let run = runs.run(&scheme, seed, rate, &mut curve)?;
                // Once is enough: other seeds differ little.
                let is_told = all[from..]
                    .iter()
                    .any(|other: &Run| other.scheme == scheme && other.simulated.remark.is_some());
                if let Some(remark) = run.simulated.remark.as_ref().filter(|_| !is_told) {
                    note(&format!("{scheme}: {remark}"));
                }
                if arguments.json {
                    print_json("results", &run.row(arguments.sweep.is_some()))?;
                }
                all.push(run);
                drawn.push(curve);
            }
        }
        if let (Some(sweep), true) = (&arguments.sweep, arguments.json) {
            let best = best(&all[from..]).to_string();
            print_json("results", &json!({ "sweep": sweep.key, "best": best }))?;
        }
    }
    if !arguments.json {
        let mut out = table(&title, &all);
        if training.has_several_rates() {
            put!(out, "learning rates were chosen by the loss on a fifth of the images to learn from");
        }
        if arguments.sweep.is_some() {
            out += &sweep_table(&all);
        }
        print("results", &out)?;
    }
    if let Some(folder) = &arguments.curves {
        curves::write(folder, &title, &drawn).map_err(|error| {
            let folder = folder.display();
            CommandError::failed(format!("curves not written: {folder} ({error}); name another folder"))
        })?;
    }
    verdict(&all)
}

impl Runs<'_> {
    fn settings(&self, seed: u64, (learning_rate, momentum): (f32, f32)) -> Settings {
        let (ranks, steps) = (self.ranks, self.steps);
        let observed_every = match self.arguments.until {
            Some(Until::Time(_)) => 1,
            Some(Until::Accuracy(_) | Until::Loss(_)) => steps.div_ceil(LOOKS),
            _ if self.arguments.curves.is_some() => steps.div_ceil(POINTS.into()),
            _ => steps,
        };
        let computing = self.arguments.compute.drawn();
        Settings { ranks, steps, seed, computing, learning_rate, momentum, observed_every }
    }

    fn simulation<'a, L: Learner>(
        &self,
        learner: &'a L,
        scheme: &Scheme,
        settings: &Settings,
    ) -> Result<Simulation<'a, L>, CommandError> {
        let simulation = Simulation::new(learner, scheme, settings).map_err(refused)?;
        let simulation = simulation.with_faults(&self.arguments.faults);
        let simulation = match &self.recorded {
            Some(times) => simulation.with_times(times.clone()),
            None => simulation,
        };
        let simulation = match self.arguments.until {
            Some(Until::Time(end)) => simulation.until(end, POINTS),
            _ => simulation,
        };
        match (&self.wiring, self.arguments.fidelity) {
            (Some(wiring), Fidelity::Engine) => {
                let connect = |exchanges: &Exchanges| engines(wiring, settings.seed, exchanges);
                simulation.over_engines(connect).map_err(refused)
            }
            _ => Ok(simulation),
        }
    }

    /// Trains until `watch` breaks off, or to the end.
    fn train(
        &mut self,
        reader: &DigitReader<'_>,
        scheme: &Scheme,
        settings: &Settings,
        watch: &mut dyn FnMut(&Observation<'_>) -> ControlFlow<()>,
    ) -> Result<Result<Simulated, SimulationError>, CommandError> {
        let Scheme::Hybrid { groups } = scheme else {
            return Ok(self.simulation(reader, scheme, settings)?.run_until(&mut self.prices, watch));
        };
        if self.arguments.fidelity == Fidelity::Engine {
            let (what, why) = ("hybrid", "exchanges inside of a group of ranks are a part of its gradient");
            return Err(CommandError::usage(SimulationError::NoEngines { what, why }));
        }
        let (network, batch) = (reader.network(), self.arguments.training.batch);
        let groups = groups_of(network, *groups, batch, self.ranks).map_err(CommandError::usage)?;
        let members = self.ranks / groups;
        let (learner, shards) = (OfGroups::new(reader, groups, members), Shards::new(network, members));
        let calls = shards.calls(batch as usize);
        let exchanges = ShardLinks::new(&mut self.prices, groups, members).exchanges(&calls);
        let [sync, ..] = Scheme::ALL;
        let simulation = self.simulation(&learner, &sync, settings)?.with_exchanges(exchanges);
        let simulated = simulation.run_until(&mut ShardLinks::new(&mut self.prices, groups, members), watch);
        let shard = (size_of::<f32>() * shards.layout().parameters()) as u64;
        let bytes_of_a_step = shard + shards.activation_bytes(batch as usize);
        Ok(simulated
            .map(|simulated| Simulated { bytes_per_rank: simulated.steps * bytes_of_a_step, ..simulated }))
    }

    /// The learning rate of the least loss on images held out; the one that there is.
    fn best_rate(&mut self, scheme: &Scheme) -> Result<f32, CommandError> {
        let training = &self.arguments.training;
        let rates = training.rates(scheme, self.ranks);
        if let [rate] = rates[..] {
            return Ok(rate);
        }
        let (learned, chosen_by) = self.data.train.validation();
        let reader = DigitReader::new(&learned, &self.arguments.model, training).with_endless(self.endless);
        let mut best: Option<(f64, f32)> = None;
        for rate in rates {
            let settings = self.settings(training.seed, (rate, training.momentum(scheme)?));
            let loss = match self.train(&reader, scheme, &settings, &mut |_| ControlFlow::Continue(()))? {
                Ok(simulated) => reader.reading(&simulated.parameters, &chosen_by).loss,
                // Too large a rate is what a choice is for.
                Err(SimulationError::Loss { .. }) => f64::INFINITY,
                Err(error) => return Err(CommandError::failed(error)),
            };
            if best.is_none_or(|(least, _)| loss < least) {
                best = Some((loss, rate));
            }
        }
        Ok(best.expect("there are several rates").1)
    }

    fn run(&mut self, scheme: &Scheme, seed: u64, rate: f32, curve: &mut Curve) -> Result<Run, CommandError> {
        let (arguments, data) = (self.arguments, self.data);
        let settings = self.settings(seed, (rate, arguments.training.momentum(scheme)?));
        let reader = DigitReader::new(&data.train, &arguments.model, &arguments.training)
            .with_endless(self.endless)
            .with_seed(seed);
        let mut target = None;
        let simulated = self.train(&reader, scheme, &settings, &mut |observed| {
            let is_target = matches!(arguments.until, Some(Until::Accuracy(_) | Until::Loss(_)));
            if arguments.curves.is_some() || is_target {
                let reading = reader.reading(observed.parameters, &data.test);
                curve.add(observed, reading);
                let is_reached = match arguments.until {
                    Some(Until::Accuracy(share)) => reading.accuracy >= share,
                    Some(Until::Loss(loss)) => reading.loss <= loss,
                    _ => false,
                };
                if is_reached {
                    target = Some(observed.time);
                    return ControlFlow::Break(());
                }
            }
            ControlFlow::Continue(())
        })?;
        self.prices
            .verdict()
            .map_err(|error| CommandError::failed(format!("no schedule over {}: {error}", self.source)))?;
        let simulated = simulated.map_err(CommandError::failed)?;
        let reading = reader.reading(&simulated.parameters, &data.test);
        let loss_before = reader.reading(&reader.initial(), &data.test).loss;
        Ok(Run { scheme: *scheme, settings, simulated, reading, loss_before, target })
    }
}

fn refused(error: SimulationError) -> CommandError {
    match error {
        SimulationError::Refused(refusal) => CommandError::usage(refusal),
        SimulationError::NoEngines { .. } | SimulationError::EngineRanks { .. } => CommandError::usage(error),
        error => CommandError::failed(error),
    }
}

/// The links that were asked for, as text, and as what they are; one rank has none.
fn links(arguments: &Arguments, ranks: u32) -> Result<(String, Option<Arc<Wiring>>), CommandError> {
    let source = arguments.topology.clone().unwrap_or_else(|| format!("star:{ranks}@1"));
    if ranks == 1 && arguments.topology.is_none() {
        return Ok((source, None));
    }
    let topology = topology::source(&source).map_err(CommandError::typed)?;
    if topology.ranks() != ranks {
        let has = topology.ranks();
        return Err(CommandError::typed(format!(
            "ranks contradict: --simulate {ranks}, but {source} has {has}; give --simulate {has}"
        )));
    }
    Ok((source, Some(Arc::new(Wiring::new(topology)))))
}

impl Run {
    /// How much the test loss has become less by an update of one rank, and updates in a second.
    fn progress(&self) -> [f64; 2] {
        let updates = self.simulated.steps as f64 * f64::from(self.settings.ranks);
        if updates == 0.0 {
            return [0.0; 2];
        }
        [(self.loss_before - self.reading.loss) / updates, updates / self.simulated.time.as_secs_f64()]
    }

    fn row(&self, is_swept: bool) -> serde_json::Value {
        let Self { scheme, settings, simulated, reading, target, .. } = self;
        let virtual_s = simulated.time.as_secs_f64();
        let mut row = json!({
            "scheme": scheme.to_string(),
            "ranks": settings.ranks,
            "seed": settings.seed,
            "lr": settings.learning_rate,
            "virtual_s": rounded(virtual_s, 9),
            "steps": simulated.steps,
            "test_loss": rounded(reading.loss, 6),
            "test_accuracy": rounded(reading.accuracy, 4),
            "time_to_target_s": target.map(|time| rounded(time.as_secs_f64(), 9)),
            "steps_per_s": rounded(simulated.steps as f64 / virtual_s, 3),
            "wait_share": rounded(simulated.wait_share, 6),
            "staleness_mean": rounded(simulated.staleness_mean, 4),
            "staleness_max": simulated.staleness_max,
            "staleness_histogram": bins(&simulated.staleness_histogram),
            "bytes_per_rank": simulated.bytes_per_rank,
            "hash": format!("{:016x}", simulated.hash),
        });
        if is_swept {
            let [by_update, updates] = self.progress();
            row["progress_per_update"] = json!(rounded(by_update, 9));
            row["updates_per_s"] = json!(rounded(updates, 3));
            row["progress_per_s"] = json!(rounded(by_update * updates, 6));
        }
        row
    }

    fn holds(&self) -> bool {
        // One that was broken off has ranks in the middle of exchanges.
        let simulated = &self.simulated;
        simulated.guarantee_held && (simulated.parameters_equal || !simulated.has_ended)
    }
}

fn width(all: &[Run]) -> usize {
    all.iter().map(|run| run.scheme.to_string().len()).max().unwrap_or(0).max(10)
}

fn table(title: &str, all: &[Run]) -> String {
    let mut out = format!("# {title}\n");
    let width = width(all);
    put!(
        out,
        "{:<width$} {:>6} {:>7} {:>10} {:>9} {:>9} {:>9} {:>12} {:>9} {:>8} {:>9}  {:<16}",
        "scheme",
        "seed",
        "lr",
        "virtual s",
        "steps/s",
        "waiting",
        "staleness",
        "bytes a rank",
        "test loss",
        "accuracy",
        "target s",
        "hash"
    );
    for Run { scheme, settings, simulated, reading, target, .. } in all {
        let virtual_s = simulated.time.as_secs_f64();
        let target = target.map_or_else(|| "-".to_owned(), |time| format!("{:.3}", time.as_secs_f64()));
        put!(
            out,
            "{:<width$} {:>6} {:>7} {virtual_s:>10.3} {:>9.1} {:>7.1} % {:>9.2} {:>12} {:>9.4} {:>8.4} {target:>9}  {:016x}",
            scheme.to_string(),
            settings.seed,
            settings.learning_rate,
            simulated.steps as f64 / virtual_s,
            simulated.wait_share * 100.0,
            simulated.staleness_mean,
            simulated.bytes_per_rank,
            reading.loss,
            reading.accuracy,
            simulated.hash
        );
    }
    for run in all {
        let held = match (run.holds(), run.simulated.has_ended, run.simulated.lost) {
            (false, ..) => "NO".to_owned(),
            (true, true, _) => "yes".to_owned(),
            (true, false, None) => "broken off before the end, so far yes".to_owned(),
            (true, false, Some((rank, step))) => {
                format!(
                    "rank {rank} ended before step {step}, and the others made no last exchange, so far yes"
                )
            }
        };
        put!(out, "{}: {}: {held}", run.scheme.name(), run.scheme.guarantee());
    }
    out
}

/// Progress of each value, and the best one.
fn sweep_table(all: &[Run]) -> String {
    let mut out = String::new();
    let width = width(all);
    put!(out, "{:<width$} {:>19} {:>12} {:>12}", "scheme", "progress an update", "updates/s", "progress/s");
    for run in all {
        let [by_update, updates] = run.progress();
        put!(
            out,
            "{:<width$} {by_update:>19.3e} {updates:>12.1} {:>12.5}",
            run.scheme.to_string(),
            by_update * updates
        );
    }
    put!(out, "most progress in a second: {}", best(all));
    out
}

/// The scheme that made most progress in a second, in the mean of its seeds.
fn best(all: &[Run]) -> Scheme {
    let mean = |scheme: &Scheme| {
        let own: Vec<f64> = all
            .iter()
            .filter(|run| run.scheme == *scheme)
            .map(|run| run.progress().into_iter().product())
            .collect();
        own.iter().sum::<f64>() / own.len() as f64
    };
    let schemes = all.iter().map(|run| run.scheme);
    schemes.max_by(|left, right| mean(left).total_cmp(&mean(right))).expect("a sweep has values")
}

fn verdict(all: &[Run]) -> Result<(), CommandError> {
    match all.iter().find(|run| !run.holds()) {
        None => Ok(()),
        Some(Run { scheme, .. }) => Err(CommandError::failed(format!(
            "guarantee broken: {scheme} says that {}, and that did not hold; report this with PLEACH_LOG=debug",
            scheme.guarantee()
        ))),
    }
}

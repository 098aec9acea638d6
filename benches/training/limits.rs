//! What the crate must reach: times, allocations and memory.
//!
//! A busy machine changes little here: times of one thread and shares are of processor time, and an
//! exchange stands beside a copy of as many bytes, in turn. The load stands below the table.

use std::fmt::Write as _;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use pleach::transport::clock;
use pleach::window::{Window, Word};
use pleach::{Fabric, FabricChoice, Group, Options, Rank, ReduceOp, World};
use pleach_training::parallelize::{Machine, Network, Planner};
use pleach_training::policy::Actions;
use pleach_training::simulation::Settings;
use pleach_training::zipline::{Objective, Prediction, place};
use pleach_training::{Layout, Learner, Scheme, Sgd, Simulation, Trainer};
use rustix::time::{ClockId, clock_gettime};

use crate::allocations::{counted, most_bytes};
use crate::claims::images::Data;
use crate::claims::ranks::{Folder, with_group, world};
use crate::claims::report::is_chosen;
use crate::claims::world::Links;
use crate::claims::{Material, barriers, median};
use crate::overlap::overlap;
use crate::told::{RANKS, halves, plan, schemes, settings, tell};

/// A row: the quantity, its goal, its value, and whether it is reached; `None`: not measured.
pub(crate) struct Limit {
    what: String,
    goal: &'static str,
    found: String,
    is_reached: Option<bool>,
}

impl Limit {
    pub(crate) fn new(what: String, goal: &'static str, found: String, is_reached: Option<bool>) -> Self {
        Self { what, goal, found, is_reached }
    }
}

type Measurement = (&'static str, fn(&Material) -> Result<Vec<Limit>, String>);

const MEASUREMENTS: [Measurement; 7] = [
    ("limit: policies", policies),
    ("limit: planners", planners),
    ("limit: simulated ranks", simulated_ranks),
    ("limit: a thousand ranks", thousand_ranks),
    ("limit: exchanges", exchanges),
    ("limit: loops", loops),
    ("limit: overlap", |_| overlap()),
];

/// Measures those of these names; returns the table, empty if there are none.
pub(crate) fn measure(only: &[String], material: &Material) -> Result<String, String> {
    let mut table = String::new();
    for (name, measurement) in MEASUREMENTS.into_iter().filter(|(name, _)| is_chosen(only, name)) {
        eprintln!("{name}");
        for Limit { what, goal, found, is_reached } in
            measurement(material).map_err(|error| format!("{name}: {error}"))?
        {
            let reached = match is_reached {
                Some(true) => "yes",
                Some(false) => "**no**",
                None => "–",
            };
            let _ = writeln!(table, "| {what} | {goal} | {found} | {reached} |");
        }
    }
    if table.is_empty() {
        return Ok(table);
    }
    let processors = std::thread::available_parallelism().map_or(0, usize::from);
    let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let load = load.split(' ').next().unwrap_or("unknown").to_owned();
    Ok(format!(
        "| what | goal | found | reached |\n|--|--|--|--|\n{table}\nMeasured on {processors} processors with a load of {load}.\n"
    ))
}

// ---- Policies.

/// How often events are told.
const TIMES: usize = 31;
const EVENT_NS: f64 = 200.0;

/// Times and allocations of an event, of the worst scheme.
fn policies(_: &Material) -> Result<Vec<Limit>, String> {
    let (mut slowest, mut hungriest) = ((0.0, String::new()), (0, String::new()));
    for scheme in schemes() {
        let [warming, counted_events] = halves(&scheme, 0, &mut Links::default());
        let mut each_ns = Vec::new();
        let mut fewest = usize::MAX;
        for _ in 0..TIMES {
            let (mut plan, mut actions) = (plan(&scheme, 0), Actions::default());
            tell(plan.policy.as_mut(), &warming, &mut actions);
            let began = processor_ns(ClockId::ThreadCPUTime);
            let ((), allocations) = counted(|| tell(plan.policy.as_mut(), &counted_events, &mut actions));
            let took_ns = processor_ns(ClockId::ThreadCPUTime) - began;
            each_ns.push(took_ns as f64 / counted_events.len() as f64);
            fewest = fewest.min(allocations);
        }
        let each_ns = median(each_ns);
        println!(
            "{scheme}: {} events, {each_ns:.0} ns and {fewest} allocations after the first half",
            warming.len() + counted_events.len()
        );
        if each_ns > slowest.0 {
            slowest = (each_ns, scheme.name().to_owned());
        }
        if fewest > hungriest.0 {
            hungriest = (fewest, scheme.name().to_owned());
        }
    }
    let of = |name: &str| if name.is_empty() { "all schemes".to_owned() } else { format!("`{name}`") };
    Ok(vec![
        Limit {
            what: format!("an event of a policy with its actions, the slowest of all schemes, {RANKS} ranks"),
            goal: "≤ 200 ns",
            found: format!("{:.0} ns ({})", slowest.0, of(&slowest.1)),
            is_reached: Some(slowest.0 <= EVENT_NS),
        },
        Limit {
            what: "allocations of a policy in the second half of a training".to_owned(),
            goal: "0",
            found: format!("{} ({})", hungriest.0, of(&hungriest.1)),
            is_reached: Some(hungriest.0 == 0),
        },
    ])
}

// ---- Planners.

/// The median time of several runs of one thread, in milliseconds of its processor.
fn median_ms(mut body: impl FnMut()) -> f64 {
    median((0..9).map(|_| {
        let began = processor_ns(ClockId::ThreadCPUTime);
        body();
        (processor_ns(ClockId::ThreadCPUTime) - began) as f64 / 1e6
    }))
}

fn planners(_: &Material) -> Result<Vec<Limit>, String> {
    let authors = barriers::authors()?;
    let thousand = authors.first().ok_or("the authors have a matrix")?;
    let shifted = |copy: u64| thousand.iter().map(move |it| Prediction { next: it.next + 7 * copy, ..*it });
    let tenfold: Vec<Prediction> = (0..10).flat_map(shifted).collect();
    let mut limits = Vec::new();
    for (workers, goal, most_ms) in [(thousand, "< 10 ms", 10.0), (&tenfold, "< 150 ms", 150.0)] {
        let worst = [Objective::Range, Objective::Share]
            .map(|objective| median_ms(|| drop(std::hint::black_box(place(workers, 0, 150, objective)))));
        let worst = worst[0].max(worst[1]);
        limits.push(Limit {
            what: format!("ZipLine, {} workers, R = 150", workers.len()),
            goal,
            found: format!("{worst:.1} ms"),
            is_reached: Some(worst < most_ms),
        });
    }
    let network = Network::named("vgg-a").ok_or("no network vgg-a")?;
    let machine = Machine::named("haswell-aries").ok_or("no machine haswell-aries")?;
    let took_ms = median_ms(|| {
        let planner = Planner::new(&network, &machine, 512);
        for doubling in 0..=10 {
            std::hint::black_box(planner.plan(1 << doubling).is_ok());
        }
    });
    limits.push(Limit {
        what: "`parallelize` VGG-A on 1, 2, 4 … 1,024 nodes".to_owned(),
        goal: "< 1 s",
        found: format!("{took_ms:.0} ms"),
        is_reached: Some(took_ms < 1e3),
    });
    Ok(limits)
}

// ---- Simulations.

fn processor_ns(clock: ClockId) -> u64 {
    let time = clock_gettime(clock);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// A learner that counts the processor time of its gradients.
struct Timed<'a, L> {
    inner: &'a L,
    /// Relaxed: read after the threads that add to it have ended.
    gradients_ns: AtomicU64,
}

impl<L: Learner> Learner for Timed<'_, L> {
    fn layout(&self) -> Layout {
        self.inner.layout()
    }

    fn initial(&self) -> Vec<f32> {
        self.inner.initial()
    }

    fn gradient(&self, rank: Rank, step: u64, parameters: &[f32], gradient: &mut [f32]) -> f32 {
        let began = processor_ns(ClockId::ThreadCPUTime);
        let loss = self.inner.gradient(rank, step, parameters, gradient);
        self.gradients_ns.fetch_add(processor_ns(ClockId::ThreadCPUTime) - began, Ordering::Relaxed);
        loss
    }
}

/// Enough that the end, at which each rank tells all others, counts little.
const SIMULATED_STEPS: u64 = 200;

const SIMULATED: [&str; 3] = ["sync", "gossip", "easgd"];

/// The share of processor time that a simulation takes beside its gradients.
fn simulated_ranks(material: &Material) -> Result<Vec<Limit>, String> {
    let data = material.mnist().unwrap_or_else(|_| material.digits());
    let reader = data.reader(material.seeds()[0]);
    let mut limits = Vec::new();
    for text in SIMULATED {
        let scheme: Scheme = text.parse().map_err(|error| format!("{text}: {error}"))?;
        let mut each_us = Vec::new();
        let shares = (0..3).map(|_| {
            let timed = Timed { inner: &reader, gradients_ns: AtomicU64::new(0) };
            let settings = Settings { learning_rate: 0.05, ..settings(128, SIMULATED_STEPS) };
            let simulation =
                Simulation::new(&timed, &scheme, &settings).map_err(|error| error.to_string())?;
            let began = processor_ns(ClockId::ProcessCPUTime);
            simulation.run(&mut Links::default(), &mut |_| {}).map_err(|error| error.to_string())?;
            let all = processor_ns(ClockId::ProcessCPUTime) - began;
            let gradients = timed.gradients_ns.load(Ordering::Relaxed) as f64;
            each_us.push(gradients / 1e3 / (128 * SIMULATED_STEPS) as f64);
            Ok(1.0 - gradients / all as f64)
        });
        let share = median(shares.collect::<Result<Vec<f64>, String>>()?);
        limits.push(Limit {
            what: format!("`--simulate 128 --scheme {text}` on {}, beside its gradients", data.name),
            goal: "≤ 20 % of the run",
            found: format!(
                "{:.1} % of processor time, where a gradient takes {:.0} µs",
                share * 100.0,
                median(each_us)
            ),
            is_reached: Some(share <= 0.2),
        });
    }
    Ok(limits)
}

/// The most memory of a simulation of a thousand ranks.
fn thousand_ranks(material: &Material) -> Result<Vec<Limit>, String> {
    const MOST_BYTES: usize = 2 << 30;
    let reader = material.digits().reader(material.seeds()[0]);
    let parameters = reader.layout().parameters();
    let mut limits = Vec::new();
    for text in SIMULATED {
        let scheme: Scheme = text.parse().map_err(|error| format!("{text}: {error}"))?;
        let settings = Settings { learning_rate: 0.05, ..settings(1024, 10) };
        let (ran, bytes) = most_bytes(|| {
            let simulation = Simulation::new(&reader, &scheme, &settings)?;
            simulation.run(&mut Links::default(), &mut |_| {})
        });
        ran.map_err(|error| format!("{text}: {error}"))?;
        limits.push(Limit {
            what: format!("`--simulate 1024 --scheme {text}`, {parameters} parameters"),
            goal: "≤ 2 GiB",
            found: format!("{:.0} MiB", bytes as f64 / f64::from(1 << 20)),
            is_reached: Some(bytes <= MOST_BYTES),
        });
    }
    Ok(limits)
}

// ---- Exchanges.

/// Parameters of an exchange.
const LONG: usize = 25_000_000;

fn group(rank: Rank, folder: &Path) -> Result<Group, String> {
    let mut options = Options::new(world(rank, 2, folder));
    options.fabric = FabricChoice::Only(Fabric::Shm);
    Group::join(&options).map_err(|error| error.to_string())
}

/// Rank 1: publishes once, and takes what is written, until it is over.
fn serve(window: &mut Window<f32>, is_over: &AtomicBool) -> Result<(), String> {
    let failed = |error: pleach::CollectiveError| error.to_string();
    window.publish(&vec![1.0; window.len()], Word::EMPTY).map_err(failed)?;
    // Relaxed: a switch alone, which rank 0 sets.
    while !is_over.load(Ordering::Relaxed) {
        window.wait(Duration::from_millis(1), |_| ()).map_err(failed)?;
    }
    Ok(())
}

/// Runs `body` as rank 0 of two threads, with a window of so many elements.
fn with_window<T>(len: usize, body: impl FnOnce(&mut Window<f32>) -> Result<T, String>) -> Result<T, String> {
    let folder = Folder::new();
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let peer = scope.spawn(|| {
            let group = group(1, &folder.0)?;
            let mut window = group.window(len, 1).map_err(|error| error.to_string())?;
            serve(&mut window, &is_over)?;
            window.close().map_err(|error| error.to_string())
        });
        let ended = (|| {
            let group = group(0, &folder.0)?;
            let mut window = group.window(len, 1).map_err(|error| error.to_string())?;
            let mut first = [0.0];
            while window.read(1, 0..1, &mut first).map_err(|error| error.to_string())?.0 == 0 {
                std::thread::yield_now();
            }
            let ended = body(&mut window)?;
            is_over.store(true, Ordering::Relaxed);
            window.close().map_err(|error| error.to_string())?;
            Ok(ended)
        })();
        is_over.store(true, Ordering::Relaxed);
        peer.join().map_err(|_| "rank 1 panicked".to_owned())?.and(ended)
    })
}

/// Nanoseconds of one run.
fn once_ns(body: impl FnOnce() -> Result<(), String>) -> Result<f64, String> {
    let began = clock::now();
    body()?;
    Ok(clock::now().since(began).as_nanos() as f64)
}

fn exchanges(_: &Material) -> Result<Vec<Limit>, String> {
    const READS: u32 = 1000;
    const TURNS: usize = 9;
    const COPIES: f64 = 1.2;
    let failed = |error: pleach::CollectiveError| error.to_string();
    let short_ns = with_window(2, |window| {
        let mut into = [0.0; 2];
        let each = (0..101).map(|_| {
            let all = once_ns(|| {
                (0..READS).try_for_each(|_| window.read(1, 0..2, &mut into).map(drop).map_err(failed))
            });
            Ok(all? / f64::from(READS))
        });
        Ok(median(each.collect::<Result<Vec<f64>, String>>()?))
    })?;
    let [pull, elastic] = with_window(LONG, |window| {
        let (from, mut into) = (vec![1.0_f32; LONG], vec![0.0_f32; LONG]);
        let [mut pulls, mut elastics] = [const { Vec::new() }; 2];
        for _ in 0..TURNS {
            let copied = once_ns(|| {
                std::hint::black_box(&mut into).copy_from_slice(std::hint::black_box(&from));
                Ok(())
            })?;
            let pulled = once_ns(|| window.read(1, 0..LONG, &mut into).map(drop).map_err(failed))?;
            let exchanged = once_ns(|| {
                // The other rank's half of the centre, and what changes it.
                window.read(1, LONG / 2..LONG, &mut into[LONG / 2..]).map_err(failed)?;
                window.write(1, 0, &from[LONG / 2..], Word::EMPTY).map_err(failed)
            })?;
            pulls.push(pulled / copied);
            elastics.push(exchanged / copied);
        }
        Ok([pulls, elastics].map(median))
    })?;
    let ratio = |what: &str, found: f64| Limit {
        what: format!("{what} of 25 M parameters, 2 ranks, shm, over a copy of 100 MB in turn"),
        goal: "≤ 1.2",
        found: format!("{found:.2}"),
        is_reached: Some(found <= COPIES),
    };
    Ok(vec![
        ratio("gossip pull (a read of the peer's)", pull),
        ratio("elastic exchange (half read, half written)", elastic),
        Limit {
            what: "window read of 8 B, shm, 2 threads".to_owned(),
            goal: "≤ 2 µs",
            found: format!("{:.2} µs", short_ns / 1e3),
            is_reached: Some(short_ns <= 2e3),
        },
    ])
}

// ---- The loop of synchronous SGD.

/// Steps that one loop makes before the other has its turn; and the turns of each.
const TURN_STEPS: u64 = 100;
const LOOP_TURNS: usize = 25;

/// The least share of the steps of the loop by hand.
const LOOP_SHARE: f64 = 0.98;

/// Steps in a second of a trainer by `sync` over those of a loop by hand, which computes gradients,
/// averages them in registered memory and makes the step.
fn share_of_loop(group: &Group, data: &Data) -> Result<f64, String> {
    let failed = |error: pleach::CollectiveError| error.to_string();
    let not_trained = |error: pleach_training::TrainError| error.to_string();
    let reader = data.reader(0);
    let (rank, layout) = (group.rank(), reader.layout());
    let part = group.split(Some(0), 0).map_err(|error| error.to_string())?.ok_or("no part")?;
    let scheme = "sync".parse::<Scheme>().map_err(|error| error.to_string())?;
    let mut trainer = Trainer::new(&part, &scheme, &layout, u64::MAX).map_err(not_trained)?;
    trainer.parameters_mut().copy_from_slice(&reader.initial());
    let mut parameters = reader.initial();
    let mut gradient = group.buffer::<f32>(layout.parameters()).map_err(failed)?;
    let [mut by_hand, mut by_trainer] = [(); 2].map(|()| Sgd::new(layout.parameters(), 0.05, 0.9));
    let mut shares = Vec::new();
    for turn in 0..=LOOP_TURNS {
        group.barrier().map_err(failed)?;
        let loop_ns = once_ns(|| {
            (0..TURN_STEPS).try_for_each(|step| {
                reader.gradient(rank, step, &parameters, &mut gradient);
                group.all_reduce(&mut gradient, ReduceOp::Avg).map_err(failed)?;
                by_hand.step(&mut parameters, &gradient);
                Ok(())
            })
        })?;
        group.barrier().map_err(failed)?;
        let trainer_ns = once_ns(|| {
            (0..TURN_STEPS).try_for_each(|_| {
                let mut step = trainer.step().map_err(not_trained)?.ok_or("no step")?;
                let number = step.number();
                let (parameters, gradient) = step.vectors().map_err(not_trained)?;
                let loss = reader.gradient(rank, number, parameters, gradient);
                let stepped =
                    |parameters: &mut [f32], gradient: &[f32]| by_trainer.step(parameters, gradient);
                step.update(stepped, loss).map_err(not_trained)
            })
        })?;
        if turn > 0 {
            shares.push(loop_ns / trainer_ns);
        }
    }
    trainer.finish().map_err(not_trained)?;
    Ok(median(shares))
}

fn loops(material: &Material) -> Result<Vec<Limit>, String> {
    let data = material.mnist().unwrap_or_else(|_| material.digits());
    let of = |ranks: u32| {
        // As ranks of programs spin, not as those of tests.
        let spins = |options: &mut Options| options.spin = Options::new(World::alone()).spin;
        let shares = with_group(Fabric::Shm, ranks, spins, |group| share_of_loop(&group, data));
        let share = median(shares.into_iter().collect::<Result<Vec<f64>, String>>()?);
        Ok(Limit {
            what: format!(
                "steps/s by `sync` over those of the same loop by hand, {}, batch of 16, {ranks} ranks, shm, in turn",
                data.name
            ),
            goal: "≥ 0.98",
            found: format!("{share:.3}"),
            is_reached: Some(share >= LOOP_SHARE),
        })
    };
    [2, 4].into_iter().map(of).collect()
}

//! Synchronous SGD bucket by bucket: the order of pieces changes times and no bit, and all ranks
//! follow one order.

use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use pleach_collectives::{Group, Rank};
use pleach_training::interpreter::Plan;
use pleach_training::policy::{Action, Actions, Event, Outcome, Update};
use pleach_training::replay::{LogError, replay_all};
use pleach_training::simulation::{Settings, Simulated, Simulation, SimulationError};
use pleach_training::{Layout, Learner, Policy, PolicyError, Sgd, TrainError, Trained, Trainer};
use pleach_transport::clock::Nanos;
use pleach_transport::rendezvous::Fabric;
use pleach_vocabulary::random::Random;

use super::checkpoints::Folder;
use super::model::{Linear, scheme, settings, simulate, simulate_plans};
use super::mutants::{Mutation, mutated};
use super::real::{RANKS, with_group};

/// Layers that go to a rank's number each, with work of their own.
struct Deep {
    layers: Vec<usize>,
    work: Vec<u64>,
}

impl Learner for Deep {
    fn layout(&self) -> Layout {
        Layout::of(&self.layers)
    }

    fn initial(&self) -> Vec<f32> {
        vec![0.0; self.layout().parameters()]
    }

    fn work(&self) -> Vec<u64> {
        self.work.clone()
    }

    fn gradient(&self, rank: Rank, _: u64, parameters: &[f32], gradient: &mut [f32]) -> f32 {
        gradient.iter_mut().zip(parameters).for_each(|(gradient, x)| *gradient = x - rank as f32);
        1.0
    }
}

/// Trains for so many steps of 10 ms, over a network that takes this time for a byte.
fn timed(learner: &Deep, text: &str, steps: u64, byte_ns: u64) -> Simulated {
    let computing = "10ms,cv=0".parse().expect("is a text");
    let settings = Settings { steps, computing, learning_rate: 0.1, ..settings(4) };
    let simulation = Simulation::new(learner, &scheme(text), &settings).expect("there are ranks");
    let network = &mut |bytes: u64| Duration::from_nanos(bytes * byte_ns);
    let trained = simulation.run(network, &mut |_| {}).expect("trains");
    assert!(trained.guarantee_held && trained.parameters_equal, "{text}");
    trained
}

#[test]
fn the_order_changes_no_bit() {
    for ranks in [1, 2, 4, 7] {
        let world = Settings { momentum: 0.9, learning_rate: 0.005, ..settings(ranks) };
        let whole = simulate("sync", &world).parameters;
        for text in
            ["sync:bucket=16", "sync:bucket=16,order=fifo", "sync:bucket=4", "sync:bucket=4,order=fifo"]
        {
            assert_eq!(simulate(text, &world).parameters, whole, "{text} on {ranks} ranks");
        }
    }
    let compressed = ["sync:bucket=24,compress=f8", "sync:bucket=24,compress=f8,order=fifo"];
    let [planned, fifo] = compressed.map(|text| simulate(text, &settings(4)).parameters);
    assert_eq!(planned, fifo);
}

#[test]
fn first_layers_first_hides_what_first_come_first_served_does_not() {
    // Eight layers of 8 KB: the network needs 12.3 ms for them, and a step computes for 10 ms.
    let learner = Deep { layers: vec![2_048; 8], work: vec![1; 8] };
    let steps = 60;
    let fifo = timed(&learner, "sync:bucket=8K,order=fifo", steps, 188);
    let planned = timed(&learner, "sync:bucket=8K", steps, 188);
    assert_eq!(planned.parameters, fifo.parameters);
    let ratio = fifo.time.as_secs_f64() / planned.time.as_secs_f64();
    println!("fifo takes {ratio:.3} times as long as planned");
    assert!(ratio > 1.1, "{:?} {:?}", planned.time, fifo.time);
    // Where the network is quick nothing is gained, and nothing is lost but the exchanges.
    let [fifo, planned] =
        ["sync:bucket=8K,order=fifo", "sync:bucket=8K"].map(|text| timed(&learner, text, steps, 10).time);
    assert!(planned <= fifo + Duration::from_micros(10), "{planned:?} {fifo:?}");
}

#[test]
fn vgg_a_takes_first_layers_first_where_communicating_takes_as_long_as_computing() {
    // Das et al.: a thousandth of the parameters, of which each takes a thousand times as long.
    // Work is multiply-adds of a layer, in thousands.
    const LAYERS: [(usize, u64); 11] = [
        (2, 87_000),
        (74, 925_000),
        (295, 925_000),
        (590, 1_850_000),
        (1_180, 925_000),
        (2_359, 1_850_000),
        (2_359, 462_000),
        (2_359, 462_000),
        (102_760, 103_000),
        (16_777, 17_000),
        (4_096, 4_000),
    ];
    // The first six are first come, first served.
    const STEPS: u64 = 100;
    let learner = Deep {
        layers: LAYERS.iter().map(|(parameters, _)| *parameters).collect(),
        work: LAYERS.iter().map(|(_, work)| *work).collect(),
    };
    // The computing of a step by 1.3 TFLOP/s a node, and 2·(N−1)/N times the bytes.
    for (nodes, bytes_per_s, least) in [(16.0, 1.1e9, 1.15), (64.0, 6e9, 1.2)] {
        let computing_s = 3.0 * 2.0 * 7.6e9 * 256.0 / nodes / 1.3e12;
        let byte_ns = 1e9 * 1_000.0 * 2.0 * (nodes - 1.0) / nodes / bytes_per_s;
        let [fifo, planned] = ["sync:bucket=64K,order=fifo", "sync:bucket=64K"].map(|text| {
            let computing = format!("{:.3}ms,cv=0", computing_s * 1e3).parse().expect("is a text");
            let settings = Settings { steps: STEPS, computing, learning_rate: 0.1, ..settings(2) };
            let simulation = Simulation::new(&learner, &scheme(text), &settings).expect("there are ranks");
            let network = &mut |bytes: u64| Duration::from_nanos((bytes as f64 * byte_ns) as u64);
            simulation.run(network, &mut |_| {}).expect("trains").time.as_secs_f64()
        });
        println!("{nodes} nodes: fifo takes {:.3} times as long as planned", fifo / planned);
        assert!(fifo / planned >= least, "{nodes} nodes: {fifo} {planned}");
    }
}

#[test]
fn a_planned_order_is_never_slower_than_first_come_first_served() {
    let mut quicker = 0;
    for seed in 0..60 {
        let mut random = Random::new(seed);
        let count = 2 + random.index(7);
        let layers: Vec<usize> = (0..count).map(|_| 100 + random.index(3_000)).collect();
        let work = (0..count).map(|_| 1 + random.index(20) as u64).collect();
        let bytes: usize = 4 * layers.iter().sum::<usize>();
        let (learner, steps) = (Deep { layers, work }, 20);
        // From a tenth to twice of what a step computes.
        let byte_ns = (1 + random.index(20) as u64) * 1_000_000 / bytes as u64;
        let [fifo, planned] = ["sync:bucket=4K,order=fifo", "sync:bucket=4K"]
            .map(|text| timed(&learner, text, steps, byte_ns).time);
        // Two exchanges, of a profile and of a digest.
        let numbers = 8 * (3 + 2 * bytes.div_ceil(2_000) as u64) + 8;
        assert!(planned <= fifo + Duration::from_nanos(numbers * byte_ns), "{seed}: {planned:?} {fifo:?}");
        quicker += u32::from(planned < fifo);
    }
    println!("planned is quicker in {quicker} of 60 networks");
    assert!(quicker >= 15, "{quicker}");
}

/// A policy of a rank that goes on in the order of its first step.
struct Stale {
    inner: Box<dyn Policy>,
    first: Vec<std::ops::Range<usize>>,
    averages: usize,
}

impl Policy for Stale {
    fn on(&mut self, event: Event, now: Nanos, actions: &mut Actions) {
        self.inner.on(event, now, actions);
        let right: Vec<Action> = actions.drain().collect();
        for mut action in right {
            if let Action::Average { piece, .. } = &mut action {
                // Of 21 parameters in pieces of four.
                if self.averages < 6 {
                    self.first.push(piece.clone());
                }
                *piece = self.first[self.averages % 6].clone();
                self.averages += 1;
            }
            actions.push(action);
        }
    }
}

/// A policy of a rank that hears other sums than the others, as if its list were of another time.
struct Deaf {
    inner: Box<dyn Policy>,
    steps: u64,
}

impl Policy for Deaf {
    fn on(&mut self, event: Event, now: Nanos, actions: &mut Actions) {
        let event = match event {
            Event::Totalled { place: 0, total } => {
                self.steps = total;
                event
            }
            // A microsecond a byte, all buckets ready at once, and the last one needed first.
            Event::Totalled { place: 1, .. } => Event::Totalled { place: 1, total: 8_000_000 },
            Event::Totalled { place: 2, .. } => Event::Totalled { place: 2, total: 8_000 },
            Event::Totalled { place, .. } => {
                let (bucket, is_needed) = ((place - 3) / 2, (place - 3) % 2 == 1);
                let mean = if is_needed { 16_000 * (5 - u64::from(bucket)) } else { 0 };
                Event::Totalled { place, total: mean * self.steps }
            }
            other => other,
        };
        self.inner.on(event, now, actions);
    }
}

/// Four ranks of which rank 3 has another policy, in a world where an order is planned.
fn with_odd_rank(odd: fn(Box<dyn Policy>) -> Box<dyn Policy>) -> Result<Simulated, SimulationError> {
    let plan = |rank| -> Plan {
        let plan =
            scheme("sync:bucket=16").plan_by_bucket(&Linear.layout(), rank, 4).expect("is not refused");
        if rank == 3 { Plan { policy: odd(plan.policy), ..plan } } else { plan }
    };
    let slow = &mut |bytes: u64| Duration::from_micros(150 * bytes);
    Simulation::of_plans(&Linear, &settings(4), plan)?.run(slow, &mut |_| {})
}

#[test]
fn a_rank_with_a_stale_plan_is_caught() {
    let right = with_odd_rank(|policy| policy).expect("all ranks follow one order");
    assert!(right.guarantee_held && right.parameters_equal);
    // It compares what it would do, and is found out before it does it.
    let told_else = with_odd_rank(|inner| Box::new(Deaf { inner, steps: 0 })).expect("all keep their order");
    assert!(!told_else.guarantee_held && told_else.parameters_equal);
    // It says that it follows the others, and does not.
    let stale = with_odd_rank(|inner| Box::new(Stale { inner, first: Vec::new(), averages: 0 }))
        .expect_err("it differs");
    match &stale {
        SimulationError::Mismatch { first: 3, .. } | SimulationError::Mismatch { other: 3, .. } => {}
        SimulationError::Policy { rank: 3, error: PolicyError::InUse { .. } } => {}
        other => panic!("{other}"),
    }
}

fn by_bucket(mutation: Mutation) -> Result<Simulated, SimulationError> {
    let text = "sync:bucket=16";
    simulate_plans(|rank| mutated(scheme(text).plan_by_bucket(&Linear.layout(), rank, 4), rank, mutation))
}

#[test]
fn buckets_that_are_not_averaged_are_neither_stepped_nor_computed_with() {
    let error = |mutation| match by_bucket(mutation) {
        Err(SimulationError::Policy { error, .. }) => error,
        other => panic!("{other:?}"),
    };
    assert!(by_bucket(|_, _, actions| actions).expect("trains").guarantee_held);
    // A step by a gradient that is being averaged.
    let early = error(|_, event, mut actions| {
        if matches!(event, Event::Computed { .. }) {
            actions.push(Action::Update(Update::StepPiece { piece: 0..2 }));
        }
        actions
    });
    assert!(matches!(early, PolicyError::InUse { .. }), "{early}");
    // A bucket whose average is under way, handed to the next step.
    let early = error(|_, event, mut actions| {
        if matches!(event, Event::Computed { .. }) {
            actions.push(Action::Supply { bucket: 5 });
        }
        actions
    });
    assert!(matches!(early, PolicyError::InUse { .. }), "{early}");
    // Handed twice, or when no step is begun.
    let twice = error(|_, event, mut actions| {
        if matches!(event, Event::Needed(2)) {
            actions.push(Action::Supply { bucket: 2 });
        }
        actions
    });
    assert!(matches!(twice, PolicyError::Supplied { bucket: 2, .. }), "{twice}");
    let unknown = error(|_, event, mut actions| {
        if matches!(event, Event::Needed(2)) {
            actions.push(Action::Supply { bucket: 99 });
        }
        actions
    });
    assert!(matches!(unknown, PolicyError::Supplied { bucket: 99, .. }), "{unknown}");
    // Never handed: the forward pass waits for ever, and the rank is named.
    let never = by_bucket(|rank, event, actions| {
        let is_kept = |action: &Action| !matches!(action, Action::Supply { bucket: 4 });
        if rank == 2 && !matches!(event, Event::Start) {
            actions.into_iter().filter(is_kept).collect()
        } else {
            actions
        }
    });
    let error = never.expect_err("rank 2 does not go on");
    assert!(error.to_string().contains("rank 2"), "{error}");
    // Parameters that change while computing reads them.
    let changed = by_bucket(|_, event, mut actions| {
        if let Event::Done(_, Outcome::Averaged) = event
            && actions.iter().all(|action| !matches!(action, Action::Begin { .. }))
        {
            actions.push(Action::Update(Update::StepPiece { piece: 20..21 }));
        }
        actions
    });
    let Err(SimulationError::Policy { error, .. }) = changed else { panic!("{changed:?}") };
    assert!(matches!(error, PolicyError::InUse { .. }), "{error}");
}

/// Trains bucket by bucket as the simulation does.
fn train(group: &Group, text: &str, settings: &Settings, steps: u64) -> Result<Trained, TrainError> {
    let layout = Linear.layout();
    let mut sgd = Sgd::new(layout.parameters(), settings.learning_rate, settings.momentum);
    let mut trainer = Trainer::new(group, &scheme(text), &layout, settings.steps)?
        .checked()
        .by_bucket(move |piece, parameters, gradient| sgd.step_piece(piece, parameters, gradient))?;
    trainer.parameters_mut().copy_from_slice(&Linear.initial());
    while let Some(mut step) = trainer.step()? {
        let number = step.number();
        if number == steps {
            break;
        }
        let buckets = step.buckets().to_vec();
        let mut parameters = vec![0.0; layout.parameters()];
        for (bucket, piece) in buckets.iter().enumerate().rev() {
            parameters[piece.clone()].copy_from_slice(step.parameters(bucket)?);
        }
        let mut gradient = vec![0.0; layout.parameters()];
        let loss = Linear.gradient(group.rank(), number, &parameters, &mut gradient);
        // Ranks report in different orders.
        for place in 0..buckets.len() {
            let bucket = (place + group.rank() as usize) % buckets.len();
            step.bucket(bucket)?.1.copy_from_slice(&gradient[buckets[bucket].clone()]);
            step.ready(bucket)?;
        }
        step.end(loss)?;
        if number == 7 {
            let mean = trainer.averaged()?;
            assert!(mean.iter().all(|element| element.is_finite()));
        }
    }
    trainer.finish()
}

#[test]
fn ranks_that_train_bucket_by_bucket_end_with_the_bits_of_the_simulation() {
    let world = Settings { momentum: 0.9, learning_rate: 0.005, ..settings(RANKS) };
    for fabric in [Fabric::Shm, Fabric::Tcp] {
        for text in [
            "sync:bucket=16",
            "sync:bucket=16,order=fifo",
            "sync:bucket=24,compress=bf16",
            "sync",
            "local-sgd:every=3",
        ] {
            // To the end, and to a step before it.
            for steps in [world.steps, 12] {
                let all = with_group(fabric, |group| {
                    let trained = train(&group, text, &world, steps).expect("trains");
                    group.close().expect("all ranks close");
                    trained
                });
                let simulated = simulate(text, &Settings { steps, ..world }).parameters;
                for trained in all {
                    let held =
                        trained.guarantee_held && trained.parameters_equal && trained.progress.steps == steps;
                    assert!(held, "{text}, {fabric:?}, {steps}");
                    let spread = trained.progress.spread.expect("it is checked");
                    assert!(spread < 1e-6 || text.starts_with("local"), "{text}, {fabric:?}: {spread}");
                    assert_eq!(trained.parameters[..], simulated, "{text}, {fabric:?}, {steps}");
                }
            }
        }
    }
}

/// Trains bucket by bucket to the end of `steps`, from a checkpoint and to another one before step
/// 11, with a log if there is a folder for it.
fn train_kept(
    group: &Group,
    (text, steps): (&str, u64),
    from: Option<&Path>,
    to: Option<&Path>,
    logs: Option<&Path>,
    world: &Settings,
) -> Result<Trained, TrainError> {
    let layout = Linear.layout();
    let sgd = Arc::new(Mutex::new(Sgd::new(layout.parameters(), world.learning_rate, world.momentum)));
    let lock = || sgd.lock().expect("no step panics");
    let in_trainer = Arc::clone(&sgd);
    let trainer = Trainer::new(group, &scheme(text), &layout, steps)?;
    let mut trainer = trainer.by_bucket(move |piece, parameters, gradient| {
        in_trainer.lock().expect("no step panics").step_piece(piece, parameters, gradient);
    })?;
    if let Some(folder) = logs {
        trainer = trainer.logged(folder)?;
    }
    match from {
        None => trainer.parameters_mut().copy_from_slice(&Linear.initial()),
        Some(folder) => {
            let saved = trainer.restore(folder)?;
            lock().velocity_mut().copy_from_slice(saved.own_vector("velocity").expect("was saved"));
        }
    }
    loop {
        if let Some(folder) = to.filter(|_| trainer.next_step() == 11) {
            // With all buckets there the optimizer is at rest.
            if let Some(mut step) = trainer.step()? {
                step.vectors()?;
            }
            let velocity = lock().velocity().to_vec();
            trainer.save(folder, &[("velocity", &velocity)])?;
        }
        let Some(mut step) = trainer.step()? else { break };
        let number = step.number();
        let (parameters, gradient) = step.vectors()?;
        let loss = Linear.gradient(group.rank(), number, parameters, gradient);
        (0..step.buckets().len()).try_for_each(|bucket| step.ready(bucket))?;
        step.end(loss)?;
    }
    trainer.finish()
}

#[test]
fn a_training_bucket_by_bucket_goes_on_from_a_checkpoint_bit_for_bit() {
    let world = Settings { momentum: 0.9, learning_rate: 0.005, ..settings(RANKS) };
    let whole = simulate("sync:bucket=16", &world).parameters;
    let folder = Folder::new("by-bucket");
    // The first process goes on after its checkpoint for a while.
    for (steps, from, to) in [(15, None, Some(folder.path())), (world.steps, Some(folder.path()), None)] {
        let all = with_group(Fabric::Tcp, |group| {
            let training = ("sync:bucket=16", steps);
            let trained = train_kept(&group, training, from, to, None, &world).expect("trains");
            group.close().expect("all ranks close");
            trained
        });
        for trained in all {
            assert!(trained.parameters_equal, "{steps} steps");
            if steps == world.steps {
                assert_eq!(trained.parameters[..], whole);
            }
        }
    }
}

#[test]
fn the_log_of_a_training_bucket_by_bucket_is_replayed_from_the_start_and_from_a_checkpoint() {
    let world = Settings { learning_rate: 0.005, ..settings(RANKS) };
    for text in ["sync:bucket=16", "sync:bucket=16,order=fifo", "local-sgd:every=3"] {
        let (logs, kept) = (Folder::new("by-bucket-logs"), Folder::new("by-bucket-logged"));
        for (steps, from, to) in [(15, None, Some(kept.path())), (world.steps, Some(kept.path()), None)] {
            with_group(Fabric::Shm, |group| {
                train_kept(&group, (text, steps), from, to, Some(logs.path()), &world).expect("trains");
                group.close().expect("all ranks close");
            });
            let all = replay_all(logs.path()).unwrap_or_else(|error| panic!("{text}: {error}"));
            assert_eq!(all.len(), RANKS as usize, "{text}");
            assert!(all.iter().all(|replayed| replayed.is_complete && replayed.events > 11), "{text}");
            let log = std::fs::read_to_string(logs.path().join("rank-2.log")).expect("was written");
            assert!(log.contains("\"by_bucket\":true"), "{text}");
            if text.starts_with("sync") {
                for word in ["\"Needed\"", "\"Begin\"", "\"Supply\"", "\"StepPiece\""] {
                    assert!(log.contains(word), "{text}: no {word}");
                }
                assert_eq!(log.contains("\"Pause\""), to.is_some(), "{text}");
            }
        }
        if text.starts_with("sync") {
            // A bucket that the policy has supplied, and another one in the log.
            let file = logs.path().join("rank-2.log");
            let log = std::fs::read_to_string(&file).expect("was written");
            let changed = log.replacen("{\"Supply\":{\"bucket\":1}}", "{\"Supply\":{\"bucket\":0}}", 1);
            assert_ne!(changed, log);
            std::fs::write(&file, changed).expect("there is space");
            let error = replay_all(logs.path()).expect_err("it was changed");
            assert!(matches!(error, LogError::Different { .. }), "{text}: {error}");
            // The policy of another kind of training asks for other things.
            let changed = log.replacen("\"by_bucket\":true", "\"by_bucket\":false", 1);
            std::fs::write(&file, changed).expect("there is space");
            replay_all(logs.path()).expect_err("that is another policy");
        }
    }
}

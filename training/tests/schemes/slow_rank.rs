//! Schemes by which nobody waits, beside a rank that is much slower.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use pleach_collectives::Rank;
use pleach_training::interpreter::Plan;
use pleach_training::policy::{Action, Actions, Event, Update, Vector};
use pleach_training::simulation::{Settings, Simulated};
use pleach_training::{Layout, Learner, Policy, Simulation, Trainer};
use pleach_transport::clock::Nanos;
use pleach_transport::rendezvous::Fabric;

use super::model::{Linear, ROUNDING, STEPS, price, scheme, settings};
use super::mutants::{Mutation, mutated};
use super::ranks;

/// Schemes that say that no rank waits for another before the end.
const NOBODY_WAITS: [&str; 11] = [
    "asp",
    "easgd:every=1",
    "easgd",
    "eamsgd:every=2",
    "downpour:every=1",
    "downpour",
    "gossip",
    "gossip:direction=push",
    "gossip:direction=push,every=3",
    "gossip:direction=push-sum",
    "gossip:direction=push-sum,every=3",
];

/// By rank: when its newest gradient was complete.
type Ends = Arc<Mutex<Vec<Duration>>>;

/// Keeps when a rank has computed.
struct Timed {
    inner: Box<dyn Policy>,
    rank: Rank,
    ends: Ends,
}

impl Policy for Timed {
    fn on(&mut self, event: Event, now: Nanos, actions: &mut Actions) {
        if let Event::Computed { .. } = event {
            self.ends.lock().expect("nobody panics")[self.rank as usize] = Duration::from_nanos(now.0);
        }
        self.inner.on(event, now, actions);
    }
}

/// Trains over free links; returns when the last gradient of each rank was complete, too.
pub(crate) fn ends(text: &str, settings: &Settings) -> (Vec<Duration>, Simulated) {
    let ends = Ends::new(Mutex::new(vec![Duration::ZERO; settings.ranks as usize]));
    let plan = |rank| {
        let plan = scheme(text).plan(&Linear.layout(), rank, settings.ranks).expect("is not refused");
        Plan { policy: Box::new(Timed { inner: plan.policy, rank, ends: ends.clone() }), ..plan }
    };
    let simulation = Simulation::of_plans(&Linear, settings, plan).expect("there are ranks");
    let trained = simulation.run(&mut |_: u64| Duration::ZERO, &mut |_| {}).expect("trains");
    let ends = ends.lock().expect("nobody panics").clone();
    (ends, trained)
}

/// Steps a second of each rank until its last one, and the training.
fn speeds(text: &str, settings: &Settings) -> (Vec<f64>, Simulated) {
    let (ends, trained) = ends(text, settings);
    (ends.iter().map(|end| settings.steps as f64 / end.as_secs_f64()).collect(), trained)
}

fn world(ranks: u32, steps: u64, computing: &str) -> Settings {
    let computing = computing.parse().expect("is a text");
    Settings { computing, steps, learning_rate: 0.001, ..settings(ranks) }
}

#[test]
fn no_rank_is_slower_beside_a_rank_that_is_a_hundred_times_slower() {
    for text in NOBODY_WAITS {
        let (alone, _) = speeds(text, &world(16, 60, "10ms,cv=0.1"));
        let (beside, trained) = speeds(text, &world(16, 60, "10ms,cv=0.1,straggler=5:100"));
        assert!(trained.guarantee_held && trained.parameters_equal, "{text}");
        for (rank, (alone, beside)) in alone.iter().zip(&beside).enumerate() {
            assert!(rank == 5 || *beside >= 0.98 * alone, "{text}: rank {rank}, {alone:.1} {beside:.1}");
        }
        assert!(beside[5] < 1.5, "{text}: that rank is slow: {:.1}", beside[5]);
    }
}

#[test]
fn ranks_with_a_bound_wait_for_one_that_is_a_hundred_times_slower() {
    for text in ["bsp", "ssp", "bap:distance=32", "easgd:every=1,mode=round-robin"] {
        let (beside, _) = speeds(text, &world(4, 40, "10ms,cv=0.1,straggler=2:100"));
        assert!(beside[0] < 50.0, "{text}: {:.1}", beside[0]);
    }
}

/// Ranks that move to their number in step 0, and stay there by themselves. Keeps the parameters
/// with which the newest gradient of each rank is computed.
struct Moved(Mutex<[f32; 4]>);

impl Learner for Moved {
    fn layout(&self) -> Layout {
        Layout::of(&[8])
    }

    fn initial(&self) -> Vec<f32> {
        vec![0.0; 8]
    }

    fn gradient(&self, rank: Rank, step: u64, parameters: &[f32], gradient: &mut [f32]) -> f32 {
        // Rank 2 is the slow one, and owns these.
        self.0.lock().expect("nobody panics")[rank as usize] = parameters[4];
        gradient.fill(if step == 0 { -(rank as f32) } else { 0.0 });
        1.0
    }
}

/// What the centre and all ranks have together in an element of a slow owner's share.
fn together(mutation: Mutation) -> f32 {
    // The last exchange is before the last two steps, so all are pulled by it.
    let settings = Settings { learning_rate: 1.0, ..world(4, 26, "10ms,cv=0.1,straggler=2:30") };
    let learner = Moved(Mutex::default());
    let plan = |rank| {
        let plan = scheme("easgd:every=3,moving=1").plan(&learner.layout(), rank, settings.ranks);
        mutated(plan, rank, mutation)
    };
    let simulation = Simulation::of_plans(&learner, &settings, plan).expect("there are ranks");
    let trained = simulation.run(&mut price, &mut |_| {}).expect("trains");
    assert!(trained.guarantee_held && trained.parameters_equal);
    let ranks: f32 = learner.0.into_inner().expect("nobody panics").iter().sum();
    trained.parameters[4] + ranks
}

#[test]
fn the_centre_gains_what_ranks_are_pulled_by_also_where_changes_are_refused() {
    let all = (0..4).sum::<u32>() as f32;
    let found = together(|_, _, actions| actions);
    assert!((found - all).abs() <= 10.0 * ROUNDING, "{found}");
    // Ranks that are pulled by a change that was refused.
    let pulled = together(|_, _, mut actions| {
        let is_undone = |action: &Action| {
            matches!(action, Action::Update(Update::Scale { vector: Vector::Delta, factor: 0.0, .. }))
        };
        actions.retain(|action| !is_undone(action));
        actions
    });
    assert!((pulled - all).abs() > 0.01, "{pulled}");
}

const RANKS: u32 = 4;

/// Longer than all steps of the others take.
const LIMIT: Duration = Duration::from_secs(120);

/// Trains; rank 1 stands before its step 3 until all others have made their last one.
fn train_beside_one_that_stands(fabric: Fabric, text: &str) {
    let (done, all_done): (Sender<Rank>, Receiver<Rank>) = channel();
    let all_done = Mutex::new(all_done);
    let all = ranks::with_group(
        fabric,
        RANKS,
        |options| options.timeout = 2 * LIMIT,
        |group| {
            let mut trainer =
                Trainer::new(&group, &scheme(text), &Linear.layout(), STEPS).expect("has memory");
            while let Some(step) = trainer.step().expect("goes on") {
                let number = step.number();
                if (group.rank(), number) == (1, 3) {
                    let all_done = all_done.lock().expect("one rank takes it");
                    for _ in 1..RANKS {
                        all_done.recv_timeout(LIMIT).unwrap_or_else(|_| panic!("{text}: one waits"));
                    }
                }
                step.update(|parameters, _| parameters[0] += 1.0, 1.0).expect("goes on");
                if number + 1 == STEPS && group.rank() != 1 {
                    done.send(group.rank()).expect("rank 1 is there");
                }
            }
            let trained = trainer.finish().expect("ends");
            group.close().expect("all ranks close");
            trained
        },
    );
    assert!(all.iter().all(|trained| trained.guarantee_held && trained.parameters_equal), "{text}");
    if text == "asp" {
        // Each step of each rank is in the table once: a quarter of 1.
        assert_eq!(all[0].parameters[0], STEPS as f32, "{text}");
    }
    if text == "downpour:every=1" {
        assert_eq!(all[0].parameters[0], (STEPS * u64::from(RANKS)) as f32, "{text}");
    }
}

#[test]
fn a_rank_that_stands_keeps_no_other_from_its_last_step() {
    for fabric in [Fabric::Shm, Fabric::Tcp] {
        for text in NOBODY_WAITS {
            train_beside_one_that_stands(fabric, text);
        }
    }
}

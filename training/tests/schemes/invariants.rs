//! What schemes guarantee, and which of them are the same.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use pleach_training::interpreter::Plan;
use pleach_training::policy::{Action, Actions, Event, Vector};
use pleach_training::simulation::Settings;
use pleach_training::{Learner, Policy, Simulation};
use pleach_transport::clock::Nanos;

use super::model::{Linear, ROUNDING, difference, scheme, settings, simulate, simulate_plans};

pub(crate) const ALL: [&str; 45] = [
    "sync",
    "sync:bucket=8,order=fifo",
    "sync:bucket=16",
    "sync:bucket=24,compress=bf16",
    "sync:compress=f8",
    "local-sgd",
    "local-sgd:every=3,warmup=5",
    "local-sgd:every=3,warmup=5,compress=f8",
    "diloco:every=4,compress=bf16",
    "diloco:every=4,compress=f8",
    "diloco:every=6,fragments=3",
    "diloco:every=6,fragments=3,delay=2,mix=0.5",
    "diloco:every=4,delay=3",
    "diloco:every=5,fragments=5,delay=4,compress=f8",
    "diloco:every=5,fragments=layers,delay=2",
    "diloco:every=4",
    "diloco:every=7,outer-lr=1,outer-momentum=0",
    "gossip",
    "gossip:every=3,peer=ring",
    "gossip:direction=push",
    "gossip:direction=push-sum",
    "gossip:direction=push-sum,peer=ring,every=2",
    "easgd:every=3",
    "easgd:every=2,mode=round-robin",
    "easgd:every=2,mode=sync",
    "eamsgd:every=3",
    "eamsgd:every=4,mode=sync,momentum=0.5",
    "downpour:every=4",
    "ssp",
    "ssp:staleness=1",
    "bsp",
    "dssp:low=1,high=4",
    "dssp",
    "bap",
    "bap:distance=9",
    "asp",
    "eager",
    "eager:activation=solo,every=3",
    "eager:activation=all,divisor=contributors,every=4",
    "eager:activation=solo,late=correct,every=5",
    "bidmach",
    "bidmach:every=2,dimensions=3,threshold=0.6",
    "gossip:reads=torn",
    "elastic-bsp",
    "elastic-bsp:lookahead=3,objective=range,prediction=last",
];

#[test]
fn all_ranks_have_the_same_parameters_after_each_exchange_and_at_the_end() {
    for text in ALL {
        for ranks in [1, 2, 4, 7] {
            for momentum in [0.0, 0.9] {
                let trained = simulate(text, &Settings { momentum, learning_rate: 0.005, ..settings(ranks) });
                assert!(trained.guarantee_held && trained.parameters_equal, "{text} on {ranks} ranks");
            }
        }
    }
}

#[test]
fn the_length_of_buckets_changes_no_bit() {
    let whole = simulate("sync", &settings(4));
    for text in ["sync:bucket=4", "sync:bucket=16", "sync:bucket=40"] {
        assert_eq!(simulate(text, &settings(4)).parameters, whole.parameters, "{text}");
    }
}

#[test]
fn local_sgd_with_an_average_after_each_step_is_synchronous_up_to_rounding() {
    let synchronous = simulate("sync", &settings(4)).parameters;
    let by_one = difference(&synchronous, &simulate("local-sgd:every=1", &settings(4)).parameters);
    assert!(by_one <= ROUNDING, "{by_one:e}");
    let by_two = difference(&synchronous, &simulate("local-sgd:every=2", &settings(4)).parameters);
    assert!(by_two > 10.0 * ROUNDING, "averaging half as often must show: {by_two:e}");
}

#[test]
fn a_warmup_to_the_end_is_synchronous_bit_for_bit() {
    let synchronous = simulate("sync", &settings(4)).parameters;
    assert_eq!(simulate("local-sgd:warmup=25", &settings(4)).parameters, synchronous);
    assert_ne!(simulate("local-sgd:warmup=24,every=2", &settings(4)).parameters, synchronous);
}

#[test]
fn fragments_send_as_much_at_other_times_and_a_delay_hides_the_exchange() {
    let world = Settings { steps: 24, ..settings(4) };
    let whole = simulate("diloco:every=6,outer-lr=1,outer-momentum=0", &world);
    let cut = simulate("diloco:every=6,outer-lr=1,outer-momentum=0,fragments=3", &world);
    // Each of 4 periods sends all; at the end all is sent once more.
    assert_eq!((whole.bytes_per_rank, cut.bytes_per_rank), (4 * 84, 5 * 84));
    // The fragments that ranks do not exchange are local, so results differ, but not by much.
    let apart = difference(&whole.parameters, &cut.parameters);
    assert!(apart > ROUNDING && apart < 0.5, "{apart:e}");
    // With a price of 3 ms and steps of 10 ms an exchange of one step before hides.
    let timed = |text: &str| {
        let steady = Settings { computing: "10ms,cv=0".parse().expect("is a text"), ..world };
        let simulation = Simulation::new(&Linear, &scheme(text), &steady).expect("is not refused");
        let slow = &mut |_: u64| Duration::from_millis(3);
        simulation.run(slow, &mut |_| {}).expect("trains").time
    };
    let millis = Duration::from_millis;
    assert_eq!(timed("diloco:every=6"), millis(24 * 10 + 4 * 3));
    // The last of the four is under way at the end, and one more follows.
    assert_eq!(timed("diloco:every=6,delay=1"), millis(24 * 10 + 2 * 3));
    for text in
        ["diloco:every=4,fragments=5", "diloco:every=4,fragments=4000000000", "diloco:every=4,delay=4"]
    {
        let refused = scheme(text).plan(&Linear.layout(), 0, 4).err().expect("does not fit").to_string();
        assert!(refused.contains("at most 4"), "{refused}");
    }
}

#[test]
fn compressed_averages_come_near_and_what_encoding_loses_is_sent_later() {
    for (exact, compressed) in [
        ("sync:bucket=24", ["sync:bucket=24,compress=bf16", "sync:bucket=24,compress=f8"]),
        ("local-sgd:every=3", ["local-sgd:every=3,compress=bf16", "local-sgd:every=3,compress=f8"]),
        ("diloco:every=4", ["diloco:every=4,compress=bf16", "diloco:every=4,compress=f8"]),
    ] {
        let parameters = simulate(exact, &settings(4)).parameters;
        let bytes = |text| simulate(text, &settings(4)).bytes_per_rank;
        for (text, most, share) in [(compressed[0], 0.01, 0.51), (compressed[1], 0.04, 0.32)] {
            let worst = difference(&parameters, &simulate(text, &settings(4)).parameters);
            assert!(worst > ROUNDING && worst < most, "{text}: {worst:e}");
            assert!(bytes(text) as f64 <= share * bytes(exact) as f64, "{text}");
        }
    }
}

#[test]
fn diloco_whose_outer_step_is_the_average_is_local_sgd_up_to_rounding() {
    let local = simulate("local-sgd:every=4", &settings(4)).parameters;
    let by_average = simulate("diloco:every=4,outer-lr=1,outer-momentum=0", &settings(4)).parameters;
    let difference_of = |parameters: &[f32]| difference(&local, parameters);
    assert!(difference_of(&by_average) <= ROUNDING, "{:e}", difference_of(&by_average));
    let by_momentum = simulate("diloco:every=4,outer-lr=1,outer-momentum=0.5", &settings(4)).parameters;
    assert!(difference_of(&by_momentum) > 10.0 * ROUNDING, "momentum must show");
}

#[test]
fn synchronous_training_is_that_of_one_rank_with_the_mean_gradient() {
    let ranks = 4;
    let mut parameters = Linear.initial();
    let mut gradient = vec![0.0; parameters.len()];
    for step in 0..settings(ranks).steps {
        let mut sum = vec![0.0; parameters.len()];
        for rank in 0..ranks {
            Linear.gradient(rank, step, &parameters, &mut gradient);
            sum.iter_mut().zip(&gradient).for_each(|(sum, element)| *sum += element);
        }
        let rate = settings(ranks).learning_rate / ranks as f32;
        parameters.iter_mut().zip(&sum).for_each(|(parameter, sum)| *parameter -= rate * sum);
    }
    let worst = difference(&parameters, &simulate("sync", &settings(ranks)).parameters);
    assert!(worst <= ROUNDING, "{worst:e}");
}

/// DiLoCo as published, in one loop: inner gradient descent, outer Nesterov momentum.
pub(crate) fn diloco_by_hand(every: u64, outer_rate: f32, outer_momentum: f32) -> Vec<f32> {
    let Settings { ranks, steps, learning_rate, .. } = settings(4);
    let mut global = Linear.initial();
    let (mut velocity, mut gradient) = (vec![0.0; global.len()], vec![0.0; global.len()]);
    let mut step = 0;
    while step < steps {
        let last = steps.min(step + every);
        let mut changes = vec![0.0; global.len()];
        for rank in 0..ranks {
            let mut local = global.clone();
            for step in step..last {
                Linear.gradient(rank, step, &local, &mut gradient);
                local.iter_mut().zip(&gradient).for_each(|(local, g)| *local -= learning_rate * g);
            }
            let both = global.iter().zip(&local);
            changes.iter_mut().zip(both).for_each(|(change, (global, local))| *change += global - local);
        }
        for ((global, velocity), change) in global.iter_mut().zip(&mut velocity).zip(&changes) {
            let change = change / ranks as f32;
            *velocity = outer_momentum * *velocity + change;
            *global -= outer_rate * (change + outer_momentum * *velocity);
        }
        step = last;
    }
    global
}

#[test]
fn diloco_is_the_published_algorithm() {
    let simulated = simulate("diloco:every=4", &settings(4)).parameters;
    let worst = difference(&diloco_by_hand(4, 0.7, 0.9), &simulated);
    assert!(worst <= ROUNDING, "{worst:e}");
}

/// Events and their times, with the actions that followed.
type Log = Vec<(Event, Nanos, Vec<Action>)>;

/// Keeps the events of a policy with the actions that followed.
struct Recorded {
    inner: Box<dyn Policy>,
    log: Arc<Mutex<Log>>,
}

impl Policy for Recorded {
    fn on(&mut self, event: Event, now: Nanos, actions: &mut Actions) {
        self.inner.on(event, now, actions);
        self.log.lock().expect("nobody panics").push((event, now, actions.as_slice().to_vec()));
    }
}

/// Simulates with policies of this kind, and tells one more the events of rank 2: the first event
/// to which it answers otherwise.
fn first_difference(text: &str, kind: impl Fn(Box<dyn Policy>) -> Box<dyn Policy>) -> Option<Event> {
    let plan = |rank| {
        let plan = scheme(text).plan(&Linear.layout(), rank, 4).expect("trains on four ranks");
        Plan { policy: kind(plan.policy), ..plan }
    };
    let log = Arc::new(Mutex::new(Vec::new()));
    let recorded = |rank| {
        let mut plan = plan(rank);
        if rank == 2 {
            plan.policy = Box::new(Recorded { inner: plan.policy, log: log.clone() });
        }
        plan
    };
    simulate_plans(recorded).unwrap_or_else(|error| panic!("{text}: {error}"));
    let (log, mut again) = (log.lock().expect("nobody panics"), plan(2).policy);
    assert!(log.len() > 25, "{text}: {} events", log.len());
    let differs = |(event, now, expected): &&(Event, Nanos, Vec<Action>)| {
        let mut actions = Actions::default();
        again.on(*event, *now, &mut actions);
        actions.as_slice() != &expected[..]
    };
    log.iter().find(differs).map(|(event, ..)| *event)
}

#[test]
fn a_policy_that_hears_the_same_events_again_asks_for_the_same() {
    for text in ALL {
        assert_eq!(first_difference(text, |policy| policy), None, "{text}");
    }
}

/// A policy that decides by something else than its events: how often any of its kind was asked.
struct Moody(Box<dyn Policy>);

impl Policy for Moody {
    fn on(&mut self, event: Event, now: Nanos, actions: &mut Actions) {
        // Relaxed: any number will do.
        static ASKED: AtomicU64 = AtomicU64::new(0);
        self.0.on(event, now, actions);
        if event == Event::Start && ASKED.fetch_add(1, Ordering::Relaxed) >= 4 {
            actions.push(Action::Agreed(Vector::Parameters));
        }
    }
}

#[test]
fn a_policy_that_decides_by_anything_else_is_found_out() {
    assert_eq!(first_difference("local-sgd", |policy| Box::new(Moody(policy))), Some(Event::Start));
}

//! Events that a policy was told in a simulated training, to be told again to a new one: for what a
//! policy alone takes.

use std::sync::{Arc, Mutex};

use pleach_collectives::Rank;
use pleach_training::interpreter::Plan;
use pleach_training::policy::{Actions, Event};
use pleach_training::simulation::{Computing, Network, Settings};
use pleach_training::{Layout, Learner, Policy, Scheme, Simulation};
use pleach_transport::clock::Nanos;

/// Ranks and steps of the trainings whose events are told again.
pub(crate) const RANKS: u32 = 16;
pub(crate) const STEPS: u64 = 200;

pub(crate) type Events = Vec<(Event, Nanos)>;

/// A model of a few parameters, whose gradients cost nothing.
pub(crate) struct Small;

impl Learner for Small {
    fn layout(&self) -> Layout {
        Layout::of(&[40, 40, 40, 40])
    }

    fn initial(&self) -> Vec<f32> {
        vec![1.0; 160]
    }

    fn gradient(&self, rank: Rank, step: u64, parameters: &[f32], gradient: &mut [f32]) -> f32 {
        let own = (u64::from(rank) + step) as f32 * 1e-3;
        gradient.iter_mut().zip(parameters).for_each(|(gradient, x)| *gradient = 0.01 * x + own);
        1.0
    }
}

/// Keeps the events of a policy.
struct Recorded {
    inner: Box<dyn Policy>,
    events: Arc<Mutex<Events>>,
}

impl Policy for Recorded {
    fn on(&mut self, event: Event, now: Nanos, actions: &mut Actions) {
        self.events.lock().expect("nobody panics").push((event, now));
        self.inner.on(event, now, actions);
    }
}

pub(crate) fn settings(ranks: u32, steps: u64) -> Settings {
    let computing = Computing::default();
    Settings { ranks, steps, seed: 9, computing, learning_rate: 1e-3, momentum: 0.0, observed_every: steps }
}

/// The schemes whose policies are told events: all, as the shards of `hybrid` train by `sync`.
pub(crate) fn schemes() -> impl Iterator<Item = Scheme> {
    Scheme::ALL.into_iter().filter(|scheme| !matches!(scheme, Scheme::Hybrid { .. }))
}

pub(crate) fn plan(scheme: &Scheme, rank: Rank) -> Plan {
    scheme.plan(&Small.layout(), rank, RANKS).unwrap_or_else(|error| panic!("{scheme}: {error}"))
}

/// The events of a rank in a training until its last step is made, in two halves. The end has
/// actions of its own, which come once.
pub(crate) fn halves(scheme: &Scheme, rank: Rank, network: &mut dyn Network) -> [Events; 2] {
    let events = Arc::new(Mutex::new(Vec::new()));
    let recorded = |number| {
        let plan = plan(scheme, number);
        if number != rank {
            return plan;
        }
        Plan { policy: Box::new(Recorded { inner: plan.policy, events: events.clone() }), ..plan }
    };
    let simulation =
        Simulation::of_plans(&Small, &settings(RANKS, STEPS), recorded).expect("there are ranks");
    let ran = simulation.run(network, &mut |_| {});
    ran.unwrap_or_else(|error| panic!("{scheme}: {error}"));
    let mut first = events.lock().expect("nobody panics").clone();
    first.truncate(first.iter().position(|(event, _)| *event == Event::Stop).unwrap_or(first.len()));
    let second = first.split_off(first.len() / 2);
    [first, second]
}

pub(crate) fn tell(policy: &mut dyn Policy, events: &[(Event, Nanos)], actions: &mut Actions) {
    for (event, now) in events {
        policy.on(*event, *now, actions);
        std::hint::black_box(&*actions);
        actions.drain().for_each(drop);
    }
}

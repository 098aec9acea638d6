//! What policies allocate: nothing, once they have seen what comes again and again.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use pleach_collectives::Rank;
use pleach_training::interpreter::Plan;
use pleach_training::policy::{Actions, Event};
use pleach_training::simulation::{Computing, Settings};
use pleach_training::{Layout as Layers, Learner, Policy, Scheme, Simulation};
use pleach_transport::clock::Nanos;

/// Counts what each thread allocates.
struct Counting;

thread_local! {
    static ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
}

#[global_allocator]
static COUNTING: Counting = Counting;

// SAFETY: passes everything on to the system's allocator.
#[allow(unsafe_code)]
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // A thread that ends counts no more.
        let _ = ALLOCATIONS.try_with(|allocations| allocations.set(allocations.get() + 1));
        // SAFETY: by the contract of this function.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, address: *mut u8, layout: Layout) {
        // SAFETY: by the contract of this function.
        unsafe { System.dealloc(address, layout) }
    }
}

const RANKS: u32 = 16;
const STEPS: u64 = 200;

/// A few parameters, whose gradients cost nothing.
struct Small;

impl Learner for Small {
    fn layout(&self) -> Layers {
        Layers::of(&[40, 40, 40, 40])
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

type Events = Vec<(Event, Nanos)>;

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

fn plan(scheme: &Scheme, rank: Rank) -> Plan {
    scheme.plan(&Small.layout(), rank, RANKS).unwrap_or_else(|error| panic!("{scheme}: {error}"))
}

/// What a rank is told in a training until its last step is made.
fn events(scheme: &Scheme, rank: Rank) -> Events {
    let events = Arc::new(Mutex::new(Vec::new()));
    let recorded = |number| {
        let plan = plan(scheme, number);
        if number != rank {
            return plan;
        }
        Plan { policy: Box::new(Recorded { inner: plan.policy, events: events.clone() }), ..plan }
    };
    let computing = Computing::default();
    let (learning_rate, momentum, observed_every) = (1e-3, 0.0, STEPS);
    let settings =
        Settings { ranks: RANKS, steps: STEPS, seed: 9, computing, learning_rate, momentum, observed_every };
    let simulation = Simulation::of_plans(&Small, &settings, recorded).expect("there are ranks");
    let ran = simulation.run(&mut |_: u64| Duration::ZERO, &mut |_| {});
    ran.unwrap_or_else(|error| panic!("{scheme}: {error}"));
    let mut events = events.lock().expect("nobody panics").clone();
    // The end has actions of its own, which come once.
    events.truncate(events.iter().position(|(event, _)| *event == Event::Stop).unwrap_or(events.len()));
    events
}

fn tell(policy: &mut dyn Policy, events: &[(Event, Nanos)], actions: &mut Actions) {
    for (event, now) in events {
        policy.on(*event, *now, actions);
        actions.drain().for_each(drop);
    }
}

#[test]
fn no_policy_allocates_in_the_second_half_of_a_training() {
    // The shards of `hybrid` train by `sync`.
    for scheme in Scheme::ALL.into_iter().filter(|scheme| !matches!(scheme, Scheme::Hybrid { .. })) {
        for rank in [0, 5] {
            let events = events(&scheme, rank);
            assert!(events.len() as u64 > STEPS, "{scheme}: {} events", events.len());
            let (first, second) = events.split_at(events.len() / 2);
            let (mut plan, mut actions) = (plan(&scheme, rank), Actions::default());
            tell(plan.policy.as_mut(), first, &mut actions);
            let before = ALLOCATIONS.with(Cell::get);
            tell(plan.policy.as_mut(), second, &mut actions);
            let allocations = ALLOCATIONS.with(Cell::get) - before;
            assert_eq!(allocations, 0, "{scheme}, rank {rank}: in {} events", second.len());
        }
    }
}

//! Bounded staleness: who may be how far ahead, and mutants.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use pleach_collectives::Rank;
use pleach_training::interpreter::Plan;
use pleach_training::policy::{Action, Actions, Event, TableAction, Update, Vector};
use pleach_training::simulation::{Computing, Settings, Simulated, SimulationError};
use pleach_training::{Layout, Learner, Policy, Simulation};
use pleach_transport::clock::Nanos;
use pleach_vocabulary::random::Random;

use super::model::{Linear, ROUNDING, STEPS, difference, price, scheme, settings, simulate};
use super::mutants::{Mutation, mutated};
use super::slow_rank::ends;

const RANKS: u32 = 4;

/// What ranks did, in the order of virtual time: the rank, the step, and whether it began it.
type Log = Arc<Mutex<Vec<(Rank, u64, bool)>>>;

/// Keeps when a rank begins and ends steps.
struct Watched {
    inner: Box<dyn Policy>,
    rank: Rank,
    log: Log,
}

impl Policy for Watched {
    fn on(&mut self, event: Event, now: Nanos, actions: &mut Actions) {
        self.inner.on(event, now, actions);
        let mut log = self.log.lock().expect("nobody panics");
        if let Event::Computed { step } = event {
            log.push((self.rank, step, false));
        }
        for action in actions.as_slice() {
            if let Action::Compute { step } = action {
                log.push((self.rank, *step, true));
            }
        }
    }
}

/// Trains with one rank that is three times slower; returns how far ahead of the slowest rank the
/// quickest was when it began a step, too.
fn watch(text: &str, mutation: Mutation) -> (Result<Simulated, SimulationError>, u64) {
    let log = Log::default();
    let plan = |rank| {
        let plan = mutated(scheme(text).plan(&Linear.layout(), rank, RANKS), rank, mutation);
        Plan { policy: Box::new(Watched { inner: plan.policy, rank, log: log.clone() }), ..plan }
    };
    let computing = "10ms,cv=0.3,straggler=2:3".parse().expect("is a text");
    let settings = Settings { computing, ..settings(RANKS) };
    let simulation = Simulation::of_plans(&Linear, &settings, plan).expect("there are ranks");
    let trained = simulation.run(&mut price, &mut |_| {});
    let (mut ended, mut ahead) = ([0_u64; RANKS as usize], 0);
    for (rank, step, begins) in log.lock().expect("nobody panics").iter() {
        if !begins {
            ended[*rank as usize] = step + 1;
        } else if *step < STEPS {
            ahead = ahead.max(step - ended.iter().min().expect("there are ranks"));
        }
    }
    (trained, ahead)
}

/// Counts for itself how many steps a rank has made since it took in work of others, whenever it
/// begins a gradient.
struct Aged {
    inner: Box<dyn Policy>,
    steps: u64,
    begun: u64,
    /// Of each gradient that was computed, of all ranks.
    ages: Arc<Mutex<Vec<u64>>>,
}

impl Policy for Aged {
    fn on(&mut self, event: Event, now: Nanos, actions: &mut Actions) {
        self.inner.on(event, now, actions);
        if let Event::Computed { .. } = event {
            self.ages.lock().expect("nobody panics").push(self.begun);
        }
        for action in actions.as_slice() {
            match action {
                Action::Update(Update::Step) => self.steps += 1,
                Action::Exchanged | Action::Agreed(Vector::Parameters) => self.steps = 0,
                Action::Compute { .. } => self.begun = self.steps,
                _ => {}
            }
        }
    }
}

#[test]
fn staleness_is_the_steps_that_a_rank_has_made_since_it_took_in_work_of_others() {
    for text in [
        "sync",
        "local-sgd:every=4",
        "local-sgd:every=3,warmup=4",
        "diloco:every=6,fragments=3,delay=2,mix=0.5",
        "gossip",
        "gossip:direction=push",
        "easgd:every=3",
        "easgd:every=3,mode=sync",
        "downpour:every=3",
        "eager",
        "bidmach",
        "elastic-bsp:lookahead=7",
        "bsp",
        "ssp",
        "ssp:staleness=10",
        "dssp",
        "bap:distance=9",
        "asp",
    ] {
        let ages = Arc::new(Mutex::new(Vec::new()));
        let plan = |rank| {
            let plan = scheme(text).plan(&Linear.layout(), rank, RANKS).expect("trains on four ranks");
            let aged = Aged { inner: plan.policy, steps: 0, begun: 0, ages: ages.clone() };
            Plan { policy: Box::new(aged), ..plan }
        };
        let simulation = Simulation::of_plans(&Linear, &settings(RANKS), plan).expect("there are ranks");
        let trained = simulation.run(&mut price, &mut |_| {}).expect("trains");
        let ages = ages.lock().expect("nobody panics");
        let mean = ages.iter().sum::<u64>() as f64 / ages.len() as f64;
        let most = ages.iter().copied().max().expect("there were steps");
        assert_eq!(trained.staleness_max, most, "{text}");
        assert!((trained.staleness_mean - mean).abs() < 1e-9, "{text}: {} {mean}", trained.staleness_mean);
    }
}

fn right(_: Rank, _: Event, actions: Vec<Action>) -> Vec<Action> {
    actions
}

#[test]
fn a_rank_is_as_far_ahead_as_the_bound_allows_and_no_further() {
    for staleness in [0, 1, 3, 7] {
        let (trained, ahead) = watch(&format!("ssp:staleness={staleness}"), right);
        let trained = trained.expect("trains");
        assert!(trained.guarantee_held && trained.parameters_equal, "{staleness}");
        // The slow rank is a third as quick, so the others come to the bound.
        if staleness < 7 {
            assert_eq!(ahead, staleness);
        }
        assert!(ahead <= staleness);
    }
    let (_, unbounded) = watch("ssp:staleness=1000", right);
    assert!(unbounded > 10, "nobody waits: {unbounded}");
}

#[test]
fn a_dynamic_bound_is_never_above_the_high_one_and_of_equal_bounds_is_the_fixed_one() {
    let mut furthest = 0;
    for (low, high) in [(0, 2), (1, 4), (2, 9)] {
        let (trained, ahead) = watch(&format!("dssp:low={low},high={high}"), right);
        let trained = trained.expect("trains");
        assert!(trained.guarantee_held && trained.parameters_equal && ahead <= high, "{ahead} of {high}");
        furthest = furthest.max(ahead - low);
    }
    assert!(furthest > 0, "no credit was ever given");
    for (bound, ranks) in [(0, 4), (1, 7), (3, 4)] {
        let fixed = simulate(&format!("ssp:staleness={bound}"), &settings(ranks));
        let dynamic = simulate(&format!("dssp:low={bound},high={bound}"), &settings(ranks));
        assert_eq!(fixed.parameters, dynamic.parameters, "{bound}, {ranks} ranks");
        assert_eq!((fixed.time, fixed.hash), (dynamic.time, dynamic.hash), "{bound}, {ranks} ranks");
    }
}

/// Learns to count. Each share has an element for each rank, to which each step of the rank adds 1.
/// So a copy shows which updates it holds: those of a rank are added in its order.
struct Counting {
    /// How many steps of another rank the copy of a step may lack.
    lacks: u64,
    /// Whether a copy has to hold all updates of its rank.
    has_own: bool,
    /// What copies lacked or held twice.
    wrong: Mutex<Vec<String>>,
}

impl Learner for Counting {
    fn layout(&self) -> Layout {
        Layout::of(&[(RANKS * RANKS) as usize])
    }

    fn initial(&self) -> Vec<f32> {
        vec![0.0; (RANKS * RANKS) as usize]
    }

    fn gradient(&self, rank: Rank, step: u64, parameters: &[f32], gradient: &mut [f32]) -> f32 {
        gradient.fill(0.0);
        let shares = parameters.chunks_exact(RANKS as usize).zip(gradient.chunks_exact_mut(RANKS as usize));
        for (owner, (counts, gradient)) in shares.enumerate() {
            // Updates are divided by the number of ranks.
            gradient[rank as usize] = -(RANKS as f32);
            for (other, count) in (0..).zip(counts.iter().map(|count| *count as u64)) {
                let is_right = if other != rank {
                    count + self.lacks >= step && count <= STEPS
                } else {
                    count == step || !self.has_own && count < step
                };
                if !is_right {
                    let what = format!("step {step} of {rank}: share {owner} has {count} of {other}");
                    self.wrong.lock().expect("nobody panics").push(what);
                }
            }
        }
        1.0
    }
}

/// What copies lacked in a drawn world, by a scheme that bounds that by so many steps; or why the
/// simulation ended.
fn lacked(text: &str, lacks: u64, seed: u64, mutation: Mutation) -> Result<Vec<String>, SimulationError> {
    lacked_by(text, lacks, seed, &|rank, plan| mutated(Ok(plan), rank, mutation))
}

fn lacked_by(
    text: &str,
    lacks: u64,
    seed: u64,
    changed: &dyn Fn(Rank, Plan) -> Plan,
) -> Result<Vec<String>, SimulationError> {
    let has_own = text != "asp";
    let learner = Counting { lacks, has_own, wrong: Mutex::default() };
    let mut random = Random::new(seed);
    let computing =
        ["10ms,cv=0.3", "10ms,cv=1", "10ms,cv=0.1,straggler=2:3", "10ms,cv=0.1,straggler=1:30", "10ms,cv=0"];
    let computing = computing[random.index(computing.len())].parse().expect("is a text");
    let settings = Settings { computing, seed, learning_rate: 1.0, ..settings(RANKS) };
    let plan = |rank| {
        let plan = scheme(text).plan(&learner.layout(), rank, RANKS).expect("trains on four ranks");
        changed(rank, plan)
    };
    let simulation = Simulation::of_plans(&learner, &settings, plan).expect("there are ranks");
    let longest = [1, 1_000_000, 30_000_000][random.index(3)];
    let mut links = |_: u64| Duration::from_nanos(random.bits() % longest);
    let trained = simulation.run(&mut links, &mut |_| {})?;
    let mut wrong = learner.wrong.into_inner().expect("nobody panics");
    if trained.parameters.iter().any(|count| *count != STEPS as f32) {
        wrong.push(format!("the end: {:?}", trained.parameters));
    }
    Ok(wrong)
}

#[test]
fn a_copy_holds_all_updates_of_its_rank_and_those_of_others_up_to_the_bound() {
    for (text, lacks) in [
        ("bsp", 0),
        ("ssp:staleness=1", 1),
        ("ssp:staleness=2", 2),
        ("ssp", 3),
        ("ssp:staleness=10", 10),
        ("dssp:low=0,high=2", 2),
        ("dssp:low=1,high=4", 4),
        ("dssp", 15),
        ("bap:distance=9", STEPS),
        ("asp", STEPS),
    ] {
        for seed in 0..40 {
            let wrong = lacked(text, lacks, seed, right).unwrap_or_else(|error| panic!("{text}: {error}"));
            assert!(wrong.is_empty(), "{text}, seed {seed}: {} times, {}", wrong.len(), wrong[0]);
        }
    }
}

#[test]
fn what_a_copy_lacks_shows() {
    let found = |text: &str, lacks: u64, mutation: Mutation| {
        (0..40).any(|seed| lacked(text, lacks, seed, mutation).is_ok_and(|wrong| !wrong.is_empty()))
    };
    // A bound that is one too large.
    assert!(found("ssp:staleness=3", 2, right));
    // Own updates lost where a rank reads its own shard.
    assert!(found("ssp", 3, |rank, _, mut actions| {
        for action in &mut actions {
            if let (0, Action::Table(TableAction::Read { into: Vector::Parameters, with_pending })) =
                (rank, action)
            {
                *with_pending = false;
            }
        }
        actions
    }));
    // An owner that answers, and does not publish.
    assert!(found("ssp", 3, |rank, event, mut actions| {
        actions
            .retain(|action| rank != 1 || event == Event::Start || !matches!(action, Action::Publish { .. }));
        actions
    }));
    // An answer that is taken for that to the next question, too, which went behind an update.
    let hasty = |rank, plan: Plan| {
        let policy: Box<dyn Policy> = if rank == 2 { Box::new(Hasty(plan.policy)) } else { plan.policy };
        Plan { policy, ..plan }
    };
    assert!((0..40).any(|seed| lacked_by("ssp", 3, seed, &hasty).is_ok_and(|wrong| !wrong.is_empty())));
}

/// Takes each answer for that to the next question, too.
struct Hasty(Box<dyn Policy>);

impl Policy for Hasty {
    fn on(&mut self, event: Event, now: Nanos, actions: &mut Actions) {
        self.0.on(event, now, actions);
        if let Event::Told { from, word } = event
            && word >> 62 == 2
        {
            self.0.on(Event::Told { from, word: word + (1 << 42) }, now, actions);
        }
    }
}

/// How long equal ranks take if they wait for nothing but the bound: step c of a rank begins when
/// its step before has ended, and step c - s - 1 of all others.
fn ideal(computing: &Computing, settings: &Settings, staleness: u64) -> f64 {
    let mut ends: Vec<Vec<f64>> = Vec::new();
    for step in 0..settings.steps {
        let before = step.checked_sub(staleness + 1).map(|step| &ends[step as usize]);
        let bound = before.map_or(0.0, |ends| ends.iter().copied().fold(0.0, f64::max));
        let end = |rank: Rank| {
            let own = ends.last().map_or(0.0, |ends| ends[rank as usize]);
            own.max(bound) + computing.time(settings.seed, rank, step).as_secs_f64()
        };
        let row = (0..settings.ranks).map(end).collect();
        ends.push(row);
    }
    ends.last().map_or(0.0, |ends| ends.iter().copied().fold(0.0, f64::max))
}

#[test]
fn ranks_of_equal_speed_wait_for_little_more_than_the_bound() {
    let computing: Computing = "10ms,cv=0.3".parse().expect("is a text");
    let mut wrong = Vec::new();
    for ranks in [4, 8, 16] {
        let settings = Settings { computing, steps: 100, learning_rate: 0.002, ..settings(ranks) };
        // An owner hears of a question within a step of its own, so bounds of 1 and 2 are too short
        // to ask in time.
        for (staleness, most) in [(0, 1.0), (3, 1.15), (5, 1.05), (10, 1.05)] {
            let text = format!("ssp:staleness={staleness}");
            let simulation = Simulation::new(&Linear, &scheme(&text), &settings).expect("is not refused");
            let trained = simulation.run(&mut |_: u64| Duration::ZERO, &mut |_| {}).expect("trains");
            let took = trained.time.as_secs_f64() / ideal(&computing, &settings, staleness);
            println!("{ranks} ranks, staleness {staleness}: {took:.3} of the time of the bound alone");
            if !(0.999..most + 0.001).contains(&took) {
                wrong.push((ranks, staleness, took));
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:?}");
}

#[test]
fn versions_bound_what_copies_lack_and_not_how_far_ranks_are_apart() {
    let ahead = |text: &str| {
        let (trained, ahead) = watch(text, right);
        let trained = trained.expect("trains");
        assert!(trained.guarantee_held && trained.parameters_equal, "{text}");
        ahead
    };
    // The slow rank takes three times as long, and has a new copy after each of its steps.
    let [clocks, few, versions] = ["ssp:staleness=3", "bap:distance=3", "bap:distance=32"].map(ahead);
    assert!(clocks == 3 && few < versions && versions > 8, "{clocks} {few} {versions}");
}

#[test]
fn a_rank_that_pushes_more_than_copies_may_lack_shows_in_the_guarantee() {
    let laxer = |of_rank_0: &str| {
        let plan = |rank| {
            let text = if rank == 0 { of_rank_0 } else { "bap:distance=3" };
            mutated(scheme(text).plan(&Linear.layout(), rank, RANKS), rank, right)
        };
        let computing = "10ms,cv=0.3,straggler=2:9".parse().expect("is a text");
        let settings = Settings { computing, ..settings(RANKS) };
        let simulation = Simulation::of_plans(&Linear, &settings, plan).expect("there are ranks");
        simulation.run(&mut price, &mut |_| {}).expect("trains").guarantee_held
    };
    assert!(laxer("bap:distance=3") && !laxer("bap:distance=30"));
}

#[test]
fn without_a_bound_no_rank_waits_before_the_end() {
    let computing: Computing = "10ms,cv=0.1,straggler=2:5".parse().expect("is a text");
    let settings = Settings { computing, ..settings(RANKS) };
    let all_steps = |rank| (0..STEPS).map(|step| computing.time(settings.seed, rank, step)).sum::<Duration>();
    let (ends, trained) = ends("asp", &settings);
    assert!(trained.guarantee_held && trained.parameters_equal);
    // A rank that waited would end later than its steps take.
    assert_eq!(ends, (0..RANKS).map(all_steps).collect::<Vec<_>>());
    let refused = scheme("bap:distance=2").plan(&Linear.layout(), 0, RANKS).err().expect("is refused");
    assert!(refused.to_string().contains("give distance at least 3"), "{refused}");
}

#[test]
fn a_rank_whose_bound_is_laxer_shows_in_the_guarantee_of_owners() {
    let held = |of_rank_0: &str| {
        let plan = |rank| {
            let text = if rank == 0 { of_rank_0 } else { "ssp:staleness=1" };
            mutated(scheme(text).plan(&Linear.layout(), rank, RANKS), rank, right)
        };
        let computing = "10ms,cv=0.3,straggler=2:3".parse().expect("is a text");
        let settings = Settings { computing, ..settings(RANKS) };
        let simulation = Simulation::of_plans(&Linear, &settings, plan).expect("there are ranks");
        simulation.run(&mut price, &mut |_| {}).expect("trains").guarantee_held
    };
    assert!(held("ssp:staleness=1") && !held("ssp:staleness=3"));
}

#[test]
fn an_owner_whose_updates_are_counted_twice_shows() {
    let (trained, _) = watch("ssp:staleness=1", |rank, event, mut actions| {
        if let (1, Event::Arrived { from: 3, .. }) = (rank, event) {
            let place = actions.iter().position(|action| matches!(action, Action::Table(_)));
            let place = place.expect("it is added");
            actions.insert(place, actions[place].clone());
        }
        actions
    });
    let right = watch("ssp:staleness=1", right).0.expect("trains");
    let wrong = trained.expect("trains");
    assert!(difference(&right.parameters, &wrong.parameters) > 10.0 * ROUNDING);
}

#[test]
fn a_bound_of_0_is_bulk_synchronous_bit_for_bit_and_local_sgd_of_one_step_up_to_rounding() {
    for ranks in [1, 2, 4, 7] {
        let bulk = simulate("bsp", &settings(ranks)).parameters;
        assert_eq!(bulk, simulate("ssp:staleness=0", &settings(ranks)).parameters, "{ranks} ranks");
        let averaged = simulate("local-sgd:every=1", &settings(ranks)).parameters;
        let worst = difference(&bulk, &averaged);
        assert!(worst <= ROUNDING, "{ranks} ranks: {worst:e}");
        if ranks > 1 {
            assert_ne!(bulk, simulate("ssp:staleness=2", &settings(ranks)).parameters, "{ranks} ranks");
        }
    }
    let other_times = Settings { seed: 77, ..settings(4) };
    assert_eq!(simulate("bsp", &other_times).parameters, simulate("bsp", &settings(4)).parameters);
}

#[test]
fn ranks_of_equal_speed_wait_less_with_a_bound_above_0() {
    let computing = "10ms,cv=0.3".parse().expect("is a text");
    let settings = Settings { computing, steps: 100, learning_rate: 0.002, ..settings(8) };
    let time = |text: &str| {
        let simulation = Simulation::new(&Linear, &scheme(text), &settings).expect("is not refused");
        simulation.run(&mut price, &mut |_| {}).expect("trains").time.as_secs_f64()
    };
    let [bulk, bounded] = ["bsp", "ssp:staleness=3"].map(time);
    assert!(bounded < 0.95 * bulk, "{bulk} {bounded}");
}

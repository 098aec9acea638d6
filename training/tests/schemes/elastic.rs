//! Elastic averaging: the published algorithm, where it is stable, and its mutants.

use std::time::Duration;

use pleach_collectives::Rank;
use pleach_training::policy::{Action, Event, Update, Vector};
use pleach_training::simulation::{Settings, SimulationError};
use pleach_training::{Layout, Learner, PolicyError, Scheme, Simulation};

use super::model::{Linear, ROUNDING, difference, price, scheme, settings, simulate};
use super::mutants::mutant;
use super::quadratic::Quadratic;

/// Elastic averaging of four ranks that take turns, in one loop: the centre at the end. `momentum`
/// is that of EAMSGD.
fn by_hand(every: u64, momentum: f32) -> Vec<f32> {
    let Settings { ranks, steps, learning_rate, .. } = settings(4);
    let rate = 0.9 / ranks as f32;
    let mut centre = Linear.initial();
    let mut local = vec![centre.clone(); ranks as usize];
    let mut velocity = vec![vec![0.0; centre.len()]; ranks as usize];
    let mut gradient = vec![0.0; centre.len()];
    for step in 0..=steps {
        for rank in 0..ranks {
            let (x, v) = (&mut local[rank as usize], &mut velocity[rank as usize]);
            let mut delta = vec![0.0; x.len()];
            if step > 0 && step % every == 0 {
                for ((delta, x), centre) in delta.iter_mut().zip(&*x).zip(&mut centre) {
                    *delta = rate * (x - *centre);
                    *centre += *delta;
                }
            }
            if step == steps {
                continue;
            }
            for (x, v) in x.iter_mut().zip(&mut *v) {
                *v *= momentum;
                *x += *v;
            }
            Linear.gradient(rank, step, x, &mut gradient);
            for (((x, v), gradient), delta) in x.iter_mut().zip(v).zip(&gradient).zip(&delta) {
                *x -= learning_rate * gradient;
                *v -= learning_rate * gradient;
                *x -= delta;
            }
        }
    }
    centre
}

#[test]
fn ranks_that_take_turns_are_the_published_algorithm() {
    for every in [1, 3, 4] {
        let text = format!("easgd:every={every},mode=round-robin");
        let worst = difference(&by_hand(every, 0.0), &simulate(&text, &settings(4)).parameters);
        assert!(worst <= ROUNDING, "{text}: {worst:e}");
        let text = format!("eamsgd:every={every},mode=round-robin,momentum=0.5");
        let worst = difference(&by_hand(every, 0.5), &simulate(&text, &settings(4)).parameters);
        assert!(worst <= ROUNDING, "{text}: {worst:e}");
    }
}

/// How far the centre is from the minimum after so many turns of each rank.
fn distance(ranks: u32, learning_rate: f32, rate: f64, mode: &str, steps: u64) -> f32 {
    let moving = rate * f64::from(ranks);
    let scheme: Scheme = format!("easgd:every=1,mode={mode},moving={moving}").parse().expect("is a scheme");
    let settings = Settings {
        learning_rate,
        steps,
        computing: "1ms,cv=0".parse().expect("is a text"),
        ..settings(ranks)
    };
    let simulation = Simulation::new(&Quadratic, &scheme, &settings).expect("is not refused");
    match simulation.run(&mut price, &mut |_| {}) {
        Ok(trained) => trained.parameters[0].abs(),
        Err(SimulationError::Loss { .. }) => f32::INFINITY,
        Err(error) => panic!("{error}"),
    }
}

/// The largest moving rate at which ranks that take turns are stable (Zhang et al. 2015, section
/// 3.1): exact for odd numbers of ranks.
fn bound(learning_rate: f64) -> f64 {
    (4.0 - 2.0 * learning_rate) / (4.0 - learning_rate)
}

#[test]
fn turns_are_stable_at_the_published_bound_and_for_odd_ranks_not_above_it() {
    for ranks in 1..=9 {
        for learning_rate in [0.5, 1.0] {
            let bound = bound(learning_rate);
            let at = |rate, steps| distance(ranks, learning_rate as f32, rate, "round-robin", steps);
            assert!(at(bound, 600) <= 2.0, "{ranks} ranks, {learning_rate}: {}", at(bound, 600));
            if ranks % 2 == 1 {
                let late = at(1.01 * bound, 600);
                assert!(late > 100.0, "{ranks} ranks, {learning_rate}: {late}");
            }
        }
    }
}

#[test]
fn all_at_once_is_stable_as_far_as_the_closed_form_says() {
    for (ranks, learning_rate, bound) in [(8, 0.1, 0.2209), (8, 0.5, 0.2143), (8, 1.0, 0.2)] {
        let at = |rate| distance(ranks, learning_rate, rate, "sync", 3000);
        assert!(at(0.99 * bound) <= 1.0, "{learning_rate}: {}", at(0.99 * bound));
        // Above 2/(p + 1) the scheme is refused.
        let above = (1.01 * bound).min(1.999 / 9.0);
        assert!(above <= bound || at(above) > 100.0, "{learning_rate}: {}", at(above));
    }
}

#[test]
fn a_gradient_is_as_old_as_the_steps_since_an_exchange_with_the_centre() {
    // An all-reduce takes three steps and a half, and its end changes the centre alone.
    let ages = (0..60_u64).map(|step| step % 10);
    let (most, sum) = (9, ages.clone().sum::<u64>());
    let below = |bound: u64| ages.clone().filter(|age| *age <= bound).count() as u64 * 4;
    let settings = Settings { steps: 60, computing: "10ms,cv=0".parse().expect("is a text"), ..settings(4) };
    for text in ["easgd:mode=sync", "eamsgd:mode=sync", "easgd", "eamsgd"] {
        let simulation = Simulation::new(&Linear, &scheme(text), &settings).expect("is not refused");
        let takes = if text.ends_with("sync") { Duration::from_millis(35) } else { Duration::ZERO };
        let trained = simulation.run(&mut |_: u64| takes, &mut |_| {}).expect("trains");
        let [none, one, two, four, eight, more, ..] = trained.staleness_histogram;
        let found = [none, none + one, none + one + two, none + one + two + four];
        assert_eq!(found, [0, 1, 2, 4].map(below), "{text}");
        assert_eq!((eight, more), (below(8) - below(4), below(16) - below(8)), "{text}");
        assert_eq!(trained.staleness_max, most, "{text}");
        assert!((trained.staleness_mean - sum as f64 / 60.0).abs() < 1e-9, "{text}");
    }
}

/// Parameters that lose a sixteenth of the rank's number at each step of 1/16, whatever they are.
/// Sums of such numbers are exact.
struct Steady;

impl Learner for Steady {
    fn layout(&self) -> Layout {
        Layout::of(&[7])
    }

    fn initial(&self) -> Vec<f32> {
        vec![1.0; 7]
    }

    fn gradient(&self, rank: Rank, _: u64, _: &[f32], gradient: &mut [f32]) -> f32 {
        gradient.fill(rank as f32 + 1.0);
        1.0
    }
}

fn steady(ranks: u32) -> Settings {
    Settings { learning_rate: 0.0625, steps: 24, ..settings(ranks) }
}

#[test]
fn the_centre_changes_by_the_sum_of_all_changes() {
    for ranks in [1, 2, 3, 4, 9] {
        for every in [1, 2, 3, 8] {
            let scheme = scheme(&format!("downpour:every={every}"));
            let computing = "10ms,cv=0.3,straggler=0:30".parse().expect("is a text");
            // With an owner that is so slow changes are refused, and sent together later.
            let beside_a_slow_one = Settings { computing, ..steady(ranks) };
            for settings in [steady(ranks), beside_a_slow_one] {
                the_centre_changes_by_all(&scheme, &settings, every);
            }
        }
    }
}

fn the_centre_changes_by_all(scheme: &Scheme, settings: &Settings, every: u64) {
    let ranks = settings.ranks;
    let simulation = Simulation::new(&Steady, scheme, settings).expect("is not refused");
    let trained = simulation.run(&mut price, &mut |_| {}).expect("trains");
    // Each step of each rank is in the centre once: 24 steps of a sixteenth of its number.
    let all: u32 = (1..=ranks).sum();
    assert_eq!(trained.parameters, vec![1.0 - 1.5 * all as f32; 7], "{ranks} ranks, every {every}");
    assert!(trained.guarantee_held, "{ranks} ranks");
}

#[test]
fn momentum_of_0_is_none() {
    for mode in ["async", "sync", "round-robin"] {
        let without = simulate(&format!("easgd:every=3,mode={mode}"), &settings(4));
        let with = simulate(&format!("eamsgd:every=3,momentum=0,mode={mode}"), &settings(4));
        let worst = difference(&without.parameters, &with.parameters);
        assert!(worst <= ROUNDING, "{mode}: {worst:e}");
    }
}

fn is_arrival(action: &Action) -> bool {
    matches!(action, Action::Update(Update::Mix { from: Vector::Arrival, .. }))
}

#[test]
fn a_change_that_is_added_twice_or_never_shows() {
    let right = by_hand(3, 0.0);
    let text = "easgd:every=3,mode=round-robin";
    let twice = mutant(text, |_, _, mut actions| {
        if let Some(place) = actions.iter().position(is_arrival) {
            actions.insert(place, actions[place].clone());
        }
        actions
    });
    let never = mutant(text, |rank, _, mut actions| {
        actions.retain(|action| rank != 1 || !is_arrival(action));
        actions
    });
    for wrong in [twice, never] {
        let worst = difference(&right, &wrong.expect("trains").parameters);
        assert!(worst > 10.0 * ROUNDING, "{worst:e}");
    }
}

#[test]
fn a_change_that_goes_to_another_owner_shows_in_the_guarantee() {
    let lost = mutant("easgd:every=5", |rank, _, actions| {
        let lose = |action| match action {
            Action::Write { id, to: 2, from, word, waits } if rank == 1 => {
                Action::Write { id, to: 3, from, word, waits }
            }
            other => other,
        };
        actions.into_iter().map(lose).collect()
    });
    assert!(!lost.expect("trains").guarantee_held);
}

#[test]
fn an_owner_that_tells_nobody_of_a_turn_is_found_out() {
    let untold = mutant("easgd:every=3,mode=round-robin", |rank, event, actions| {
        let is_kept = |action: &Action| {
            rank != 2 || !matches!((event, action), (Event::Arrived { .. }, Action::Tell { .. }))
        };
        actions.into_iter().filter(is_kept).collect()
    });
    let Err(SimulationError::Silence { .. }) = untold else { panic!("{untold:?}") };
}

#[test]
fn elements_of_a_write_are_read_when_it_comes_and_not_later() {
    let late = mutant("easgd:every=3", |_, event, mut actions| {
        if let Event::Computed { step: 7 } = event {
            let (from, into) = (Vector::Arrival, Vector::Fetched);
            actions.push(Action::Update(Update::Copy { from, into, piece: 0..1 }));
        }
        actions
    });
    assert!(matches!(late, Err(SimulationError::Policy { error: PolicyError::NoArrival, .. })), "{late:?}");
}

#[test]
fn a_change_that_is_overwritten_while_it_is_written_is_refused() {
    let overwritten = mutant("easgd:every=3", |_, _, mut actions| {
        if let Some(place) = actions.iter().rposition(|action| matches!(action, Action::Write { .. })) {
            let vector = Vector::Delta;
            actions.insert(place + 1, Action::Update(Update::Scale { vector, factor: 2.0, piece: 0..21 }));
        }
        actions
    });
    let Err(SimulationError::Policy { error, .. }) = overwritten else { panic!("{overwritten:?}") };
    assert!(matches!(error, PolicyError::InUse { vector: Vector::Delta, .. }), "{error}");
}

#[test]
fn moving_rates_that_diverge_for_each_model_are_refused() {
    let refused = |text: &str, ranks| {
        let refused = Simulation::new(&Linear, &scheme(text), &settings(ranks)).err();
        refused.map(|error| error.to_string())
    };
    for (text, ranks, part) in [
        ("easgd:moving=1.61,mode=sync", 4, "easgd:moving=1.61,mode=sync diverges on 4 ranks"),
        ("easgd:moving=4.01", 4, "give moving at most 4"),
        ("eamsgd:moving=1.01,mode=round-robin", 1, "is 1.01; give moving at most 1"),
    ] {
        let error = refused(text, ranks).expect("it is refused");
        assert!(error.contains(part), "{error}");
    }
    for (text, ranks) in [("easgd:moving=1.6,mode=sync", 4), ("easgd:moving=4", 4), ("easgd:moving=1", 1)] {
        assert_eq!(refused(text, ranks), None, "{text}");
    }
}

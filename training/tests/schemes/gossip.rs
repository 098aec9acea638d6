//! Gossip: what mixes, what is conserved, and mutants.

use pleach_collectives::Rank;
use pleach_training::policy::{Action, Event, Update, Vector};
use pleach_training::simulation::{Settings, Simulated, SimulationError};
use pleach_training::{Layout, Learner, PolicyError, Simulation};

use super::model::{Linear, difference, price, scheme, settings, simulate};
use super::mutants::{Mutation, mutant, mutated};

/// A model whose parameters are moved by a step 0 of each rank alone: to the number of the rank, in
/// units of which sums are exact. No other step moves them.
struct Spread;

const PARAMETERS: usize = 5;

impl Learner for Spread {
    fn layout(&self) -> Layout {
        Layout::of(&[PARAMETERS])
    }

    fn initial(&self) -> Vec<f32> {
        vec![0.0; PARAMETERS]
    }

    fn gradient(&self, rank: Rank, step: u64, _: &[f32], gradient: &mut [f32]) -> f32 {
        gradient.fill(if step == 0 { -(rank as f32) } else { 0.0 });
        1.0
    }
}

fn spread(ranks: u32, steps: u64) -> Settings {
    Settings { learning_rate: 1.0, steps, ..settings(ranks) }
}

/// Mutates nothing.
fn right(_: Rank, _: Event, actions: Vec<Action>) -> Vec<Action> {
    actions
}

/// Trains the spread model, where the parameters of ranks at the end are not averaged: those of
/// each rank are hashed instead.
fn unaveraged(text: &str, settings: &Settings, mutation: Mutation) -> Result<Simulated, SimulationError> {
    let plan = |rank| mutated(scheme(text).plan(&Spread.layout(), rank, settings.ranks), rank, mutation);
    Simulation::of_plans(&Spread, settings, plan)?.run(&mut price, &mut |_| {})
}

/// Leaves the average at the end out.
fn without_average(_: Rank, _: Event, actions: Vec<Action>) -> Vec<Action> {
    actions.into_iter().filter(|action| !matches!(action, Action::Average { .. })).collect()
}

#[test]
fn a_butterfly_mixes_all_ranks_in_as_many_exchanges_as_the_number_has_bits() {
    for direction in ["push", "push-sum"] {
        for ranks in [2_u32, 4, 8, 16, 32] {
            let exchanges = u64::from(ranks.ilog2());
            let text = format!("gossip:direction={direction},peer=butterfly");
            // A step before each exchange; the last one is followed by an exchange too.
            let mixed = unaveraged(&text, &spread(ranks, exchanges), without_average).expect("trains");
            assert!(mixed.parameters_equal, "{text}, {ranks} ranks");
            let mean = (ranks - 1) as f32 / 2.0;
            assert_eq!(mixed.parameters, vec![mean; PARAMETERS], "{text}, {ranks} ranks");
            if exchanges > 1 {
                let before = unaveraged(&text, &spread(ranks, exchanges - 1), without_average);
                let before = before.expect("trains");
                assert!(!before.parameters_equal, "{text}, {ranks} ranks: one exchange less must show");
            }
        }
    }
}

#[test]
fn a_butterfly_that_takes_the_same_peer_again_does_not_mix() {
    let same_peer: Mutation = |rank, event, actions| {
        let to_neighbour = |action| match action {
            Action::Tell { word, .. } if word < 1 << 62 => Action::Tell { to: rank ^ 1, word },
            Action::Write { id, from, word, waits, .. } => {
                Action::Write { id, to: rank ^ 1, from, word, waits }
            }
            other => other,
        };
        without_average(rank, event, actions).into_iter().map(to_neighbour).collect()
    };
    let mixed = unaveraged("gossip:direction=push,peer=butterfly", &spread(8, 3), same_peer);
    // Ranks wait for the peers whose turn it is, or they are not mixed.
    assert!(!mixed.is_ok_and(|mixed| mixed.parameters_equal));
}

#[test]
fn push_sum_conserves_the_sum_exactly_and_push_does_not() {
    for ranks in [2_u32, 3, 7, 8, 16] {
        for peer in ["uniform", "ring"] {
            for (steps, slower) in [(1, 1), (2, 1), (9, 1), (9, 30)] {
                let text = format!("gossip:direction=push-sum,peer={peer}");
                // Beside a rank that is so slow writes are refused.
                let computing = format!("10ms,cv=0.3,spread=0.5,straggler=1:{slower}");
                let computing = computing.parse().expect("is a text");
                let settings = Settings { computing, ..spread(ranks, steps) };
                let simulation = Simulation::new(&Spread, &scheme(&text), &settings);
                let trained =
                    simulation.expect("is not refused").run(&mut price, &mut |_| {}).expect("trains");
                // Numbers of ranks and their halves have few bits, so sums of them are exact.
                let mean = (0..ranks).sum::<u32>() as f32 / ranks as f32;
                assert_eq!(
                    trained.parameters,
                    vec![mean; PARAMETERS],
                    "{text}, {ranks} ranks, {steps} steps"
                );
                assert!(trained.guarantee_held && trained.parameters_equal, "{text}");
            }
        }
    }
    let simulation = Simulation::new(&Spread, &scheme("gossip:direction=push"), &spread(7, 9));
    let trained = simulation.expect("is not refused").run(&mut price, &mut |_| {}).expect("trains");
    assert_ne!(trained.parameters, vec![3.0; PARAMETERS]);
}

#[test]
fn a_weight_that_is_lost_shows_in_the_guarantee() {
    let lost: Mutation = |rank, _, actions| {
        let lose = |action| match action {
            Action::Write { id, to, from, word, waits } if rank == 1 => {
                Action::Write { id, to, from, word: word / 2, waits }
            }
            other => other,
        };
        actions.into_iter().map(lose).collect()
    };
    let settings = spread(4, 6);
    let held = |mutation| {
        unaveraged("gossip:direction=push-sum", &settings, mutation).expect("trains").guarantee_held
    };
    assert!(held(right) && !held(lost));
}

#[test]
fn a_write_that_goes_elsewhere_shows_in_the_guarantee() {
    let astray = mutant("gossip:direction=push", |rank, event, actions| {
        let lead = |action| match action {
            Action::Write { id, to, from, word, waits }
                if rank == 2 && event == (Event::Computed { step: 4 }) =>
            {
                Action::Write { id, to: if to == 3 { 0 } else { 3 }, from, word, waits }
            }
            other => other,
        };
        actions.into_iter().map(lead).collect()
    });
    let astray = astray.expect("trains");
    assert!(!astray.guarantee_held && astray.parameters_equal);
}

#[test]
fn a_read_is_mixed_in_when_it_has_ended_and_not_before() {
    let early = mutant("gossip", |_, event, mut actions| {
        if let Event::Computed { step: 3 } = event {
            let (into, from) = (Vector::Parameters, Vector::Fetched);
            actions.push(Action::Update(Update::Mix { into, alpha: 0.5, from, beta: 0.5, piece: 0..21 }));
        }
        actions
    });
    let Err(SimulationError::Policy { error, .. }) = early else { panic!("{early:?}") };
    assert!(matches!(error, PolicyError::InUse { vector: Vector::Fetched, .. }), "{error}");
}

#[test]
fn a_rank_that_never_says_that_it_has_ended_is_found_out() {
    for text in ["gossip", "gossip:direction=push-sum"] {
        let untold = mutant(text, |rank, event, actions| match event {
            Event::Stop if rank == 1 => {
                actions.into_iter().filter(|action| !matches!(action, Action::Tell { to: 3, .. })).collect()
            }
            _ => actions,
        });
        let Err(error) = untold else { panic!("{text}: rank 3 is never told") };
        assert!(error.to_string().contains("rank 3"), "{error}");
    }
}

#[test]
fn what_has_no_window_or_names_no_peer_is_refused() {
    let error = |text: &str, mutation| match mutant(text, mutation) {
        Err(SimulationError::Policy { error, .. }) => error,
        other => panic!("{text}: {other:?}"),
    };
    let tell: Mutation = |_, _, mut actions| {
        actions.push(Action::Tell { to: 1, word: 7 });
        actions
    };
    assert_eq!(error("sync", tell), PolicyError::NoWindow);
    assert_eq!(
        error("gossip", |rank, _, mut actions| {
            actions.push(Action::Tell { to: rank, word: 7 });
            actions
        }),
        PolicyError::Peer { rank: 0, own: 0, ranks: 4 }
    );
    assert_eq!(
        error("gossip", |_, _, mut actions| {
            actions.push(Action::Await { from: 4 });
            actions
        }),
        PolicyError::Peer { rank: 4, own: 0, ranks: 4 }
    );
}

#[test]
fn ranks_that_pull_come_closer_to_each_other() {
    // Without any exchange ranks would stay at their numbers.
    let far = |text: &str| {
        let mut far = 0.0;
        let simulation = Simulation::new(&Spread, &scheme(text), &spread(8, 12)).expect("is not refused");
        let trained =
            simulation.run(&mut price, &mut |observed| far = observed.parameters[0]).expect("trains");
        assert!(trained.guarantee_held && trained.parameters_equal, "{text}");
        (far - 3.5).abs()
    };
    // The mean of all ranks is not conserved, and stays between the smallest and the largest.
    for text in ["gossip", "gossip:peer=ring", "gossip:peer=butterfly,every=2"] {
        assert!(far(text) < 3.5, "{text}");
    }
    let [often, seldom] = ["gossip", "gossip:every=24"].map(|text| simulate(text, &settings(4)).parameters);
    assert!(difference(&often, &seldom) > 1e-4, "exchanges must show");
}

#[test]
fn a_butterfly_of_ranks_that_are_no_power_of_two_is_refused() {
    for (text, ranks) in [("gossip:peer=butterfly", 6), ("gossip:direction=push,peer=butterfly", 3)] {
        let refused = Simulation::new(&Linear, &scheme(text), &settings(ranks)).err().expect("is refused");
        assert!(refused.to_string().contains("take peer=ring"), "{refused}");
    }
}

//! Checkpoints: a training that goes on from one ends as the one that was never left.

use pleach_training::Simulation;
use pleach_training::checkpoint::RankState;
use pleach_training::simulation::{Settings, Simulated, SimulationError};

use super::invariants::ALL;
use super::model::{Linear, price, scheme, settings, simulate};
use super::real::DETERMINISTIC;

/// The step of the checkpoint: no multiple of the periods in the tests.
const HALF: u64 = 11;

fn world(ranks: u32) -> Settings {
    Settings { momentum: 0.9, learning_rate: 0.005, ..settings(ranks) }
}

/// The states at the checkpoint, and the training that goes on without leaving.
fn saved(text: &str, settings: &Settings) -> (Vec<RankState>, Simulated) {
    let mut simulation = Simulation::new(&Linear, &scheme(text), settings).expect("is not refused");
    simulation.run_to(HALF, &mut price, &mut |_| {}).unwrap_or_else(|error| panic!("{text}: {error}"));
    let saved = simulation.save().unwrap_or_else(|error| panic!("{text}: {error}"));
    (saved, simulation.run(&mut price, &mut |_| {}).unwrap_or_else(|error| panic!("{text}: {error}")))
}

fn resumed(text: &str, settings: &Settings, saved: &[RankState]) -> Result<Simulated, SimulationError> {
    let simulation = Simulation::restored(&Linear, &scheme(text), settings, saved)?;
    simulation.run(&mut price, &mut |_| {})
}

/// As a file has it.
fn through_files(saved: &[RankState]) -> Vec<RankState> {
    let again = |rank: &RankState| RankState::decode(&rank.encode().expect("is short")).expect("is a file");
    saved.iter().map(again).collect()
}

#[test]
fn half_a_training_and_the_other_half_are_the_whole_one_bit_for_bit_by_each_scheme() {
    for text in ALL {
        for ranks in [1, 2, 4, 7] {
            let (saved, whole) = saved(text, &world(ranks));
            assert!(whole.guarantee_held && whole.parameters_equal, "{text}");
            let other_half = resumed(text, &world(ranks), &through_files(&saved)).expect("goes on");
            assert_eq!(other_half, whole, "{text} on {ranks} ranks");
        }
    }
}

#[test]
fn ranks_rest_for_a_checkpoint_also_where_one_is_far_behind_by_schemes_without_clocks() {
    let computing = "10ms,cv=0.3,straggler=1:5".parse().expect("is a text");
    for text in ["bap:distance=3", "bap:distance=9", "bap", "asp"] {
        let settings = Settings { computing, ..world(4) };
        let (saved, whole) = saved(text, &settings);
        // All have the whole table.
        let copy = |rank: &RankState| rank.vector("parameters").expect("was saved").to_vec();
        assert!(saved.iter().all(|rank| copy(rank) == copy(&saved[0])), "{text}");
        assert!(whole.guarantee_held && whole.parameters_equal, "{text}");
        assert_eq!(resumed(text, &settings, &saved).expect("goes on"), whole, "{text}");
    }
}

#[test]
fn a_checkpoint_changes_no_bit_where_results_do_not_depend_on_times() {
    for text in DETERMINISTIC {
        let (_, with) = saved(text, &world(4));
        let without = simulate(text, &world(4));
        assert_eq!(with.parameters, without.parameters, "{text}");
        assert_eq!(with.guarantee_held, without.guarantee_held, "{text}");
    }
}

#[test]
fn half_a_training_ends_where_the_checkpoint_is_taken() {
    // The training of 11 steps is saved before its last exchange.
    for text in ["local-sgd:every=4", "diloco:every=4", "easgd:every=3,mode=sync", "gossip", "ssp"] {
        let short = Settings { steps: HALF, ..world(4) };
        let (at_its_end, _) = saved(text, &short);
        let (on_the_way, whole) = saved(text, &world(4));
        assert_eq!(at_its_end, on_the_way, "{text}");
        assert_eq!(resumed(text, &world(4), &at_its_end).expect("goes on"), whole, "{text}");
    }
}

#[test]
fn a_part_of_the_state_that_is_lost_shows() {
    let text = "diloco:every=4,compress=f8";
    let (states, whole) = saved(text, &world(4));
    for lost in ["anchor", "velocity", "optimizer", "residual", "owned residual"] {
        let mut states = states.clone();
        let zeros = vec![0.0; 21];
        states.iter_mut().for_each(|state| state.insert(lost, &zeros));
        let wrong = resumed(text, &world(4), &states).expect("goes on");
        assert_ne!(wrong.parameters, whole.parameters, "{lost}");
    }
}

#[test]
fn gradients_that_rounds_carry_are_a_part_of_the_state() {
    let mut carried = 0;
    for rule in ["carry", "correct"] {
        let text = format!("eager:activation=solo,late={rule},every=9");
        for ranks in [4, 7] {
            let (mut states, whole) = saved(&text, &world(ranks));
            let late: Vec<Vec<f32>> =
                states.iter().map(|state| state.vector("delta").expect("was saved").to_vec()).collect();
            assert!(late.iter().all(|other| *other == late[0]), "the last round is the same on all ranks");
            if late[0].iter().any(|element| *element != 0.0) {
                carried += 1;
                let zeros = vec![0.0; late[0].len()];
                states.iter_mut().for_each(|state| state.insert("delta", &zeros));
                let wrong = resumed(&text, &world(ranks), &states).expect("goes on");
                assert_ne!(wrong.parameters, whole.parameters, "{text} on {ranks} ranks");
            }
        }
    }
    assert!(carried > 0, "something is late in one of them");
}

#[test]
fn states_of_other_ranks_or_schemes_are_refused() {
    let (mut states, _) = saved("diloco:every=4", &world(4));
    let error = resumed("local-sgd", &world(3), &states).expect_err("there are four states");
    assert_eq!(error, SimulationError::World { saved: 4, ranks: 3 });
    let error = resumed("easgd:mode=sync", &world(4), &states).expect_err("has no centre").to_string();
    assert!(error.contains("'centre'"), "{error}");
    let error = resumed("ssp", &world(4), &states).expect_err("has no table").to_string();
    assert!(error.contains("'centre'"), "{error}");
    states[2] = RankState::new(Vec::new());
    let error = resumed("diloco:every=4", &world(4), &states).expect_err("is empty").to_string();
    assert!(error.contains("rank 2") && error.contains("'parameters'"), "{error}");
}

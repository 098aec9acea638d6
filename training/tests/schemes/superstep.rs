//! ElasticBSP: where its barriers stand, and what ranks wait.

use pleach_collectives::Rank;
use pleach_training::policy::{Action, Event};
use pleach_training::simulation::{Settings, Simulated, SimulationError};
use pleach_training::{Learner, PolicyError, Simulation};

use super::model::{Linear, ROUNDING, difference, price, scheme, settings, simulate};
use super::mutants::{Mutation, mutated};

fn world(ranks: u32, computing: &str) -> Settings {
    let computing = computing.parse().expect("is a text");
    Settings { computing, steps: 200, learning_rate: 0.0005, ..settings(ranks) }
}

#[test]
fn a_lookahead_of_1_is_an_average_after_each_step_up_to_rounding() {
    for ranks in [1, 2, 4, 7] {
        let averaged = simulate("local-sgd:every=1", &settings(ranks)).parameters;
        let from = |text: &str| difference(&averaged, &simulate(text, &settings(ranks)).parameters);
        // All come to one more barrier at the end, and average what is equal.
        let worst = from("elastic-bsp:lookahead=1");
        assert!(worst <= ROUNDING, "{ranks} ranks: {worst:e}");
        assert!(ranks == 1 || from("elastic-bsp:lookahead=5") > 10.0 * ROUNDING, "{ranks} ranks");
    }
}

/// The longest superstep of a rank, by its staleness, and the share of time that ranks waited until
/// rank 0 had made half of its steps: later, quick ranks wait for the others to end.
fn superstep_and_waiting(text: &str, settings: &Settings) -> (u64, f64) {
    let simulation = Simulation::new(&Linear, &scheme(text), settings).expect("is not refused");
    let mut waiting = 0.0;
    let trained = simulation.run(&mut price, &mut |observed| {
        if observed.step <= settings.steps / 2 {
            waiting = observed.wait_share;
        }
    });
    let trained = trained.expect("trains");
    assert!(trained.guarantee_held && trained.parameters_equal, "{text}");
    (trained.staleness_max + 1, waiting)
}

#[test]
fn a_superstep_is_no_longer_than_the_lookahead_and_ranks_wait_less_than_at_barriers_after_each_step() {
    for ranks in [4, 16] {
        let steady = world(ranks, "10ms,cv=0.02,spread=0.5");
        let (_, bulk) = superstep_and_waiting("elastic-bsp:lookahead=1", &steady);
        for lookahead in [5, 15, 60] {
            let (longest, waiting) =
                superstep_and_waiting(&format!("elastic-bsp:lookahead={lookahead}"), &steady);
            assert!(longest <= lookahead && longest > 1, "{ranks} ranks: {longest} of {lookahead}");
            if lookahead == 60 {
                assert!(waiting <= bulk / 4.0, "{ranks} ranks: {waiting} {bulk}");
            }
        }
    }
}

#[test]
fn a_rank_so_slow_that_no_lookahead_reaches_it_has_a_barrier_after_each_step() {
    let slow = world(4, "10ms,cv=0,straggler=2:9");
    let (longest, _) = superstep_and_waiting("elastic-bsp:lookahead=5", &slow);
    assert_eq!(longest, 1);
    let (longest, _) = superstep_and_waiting("elastic-bsp:lookahead=9", &slow);
    assert_eq!(longest, 9);
}

fn mutant(mutation: Mutation) -> Result<Simulated, SimulationError> {
    let settings = world(4, "10ms,cv=0.02,spread=0.5");
    let plan =
        |rank| mutated(scheme("elastic-bsp:lookahead=9").plan(&Linear.layout(), rank, 4), rank, mutation);
    Simulation::of_plans(&Linear, &settings, plan)?.run(&mut price, &mut |_| {})
}

#[test]
fn a_superstep_that_is_too_long_is_refused() {
    let long = mutant(|rank, _, actions| {
        let lengthen = |action| match action {
            Action::Tell { to: 1, word } if rank == 0 && (1..10).contains(&word) => {
                Action::Tell { to: 1, word: 10 }
            }
            other => other,
        };
        actions.into_iter().map(lengthen).collect()
    });
    let Err(SimulationError::Policy { rank: 1, error }) = long else { panic!("{long:?}") };
    assert_eq!(error, PolicyError::Word { from: 0, word: 10 });
}

#[test]
fn a_barrier_that_is_told_to_one_rank_too_few_is_found_out() {
    let untold: fn(Rank, Event, Vec<Action>) -> Vec<Action> = |rank, _, actions| {
        let is_kept = |action: &Action| rank != 0 || !matches!(action, Action::Tell { to: 3, .. });
        actions.into_iter().filter(is_kept).collect()
    };
    let Err(error) = mutant(untold) else { panic!("rank 3 is never told") };
    assert!(error.to_string().contains("rank 3"), "{error}");
}

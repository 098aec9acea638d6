//! Rounds that do not wait for late ranks: eager-SGD and BIDMach's grid.

use pleach_collectives::Group;
use pleach_training::checkpoint::RankState;
use pleach_training::policy::Action;
use pleach_training::simulation::Settings;
use pleach_training::{Layout, Learner, Simulation, Trainer};
use pleach_transport::rendezvous::Fabric;

use super::meeting::Meeting;
use super::model::{Linear, ROUNDING, STEPS, difference, price, scheme, settings, simulate};
use super::mutants::mutated;
use super::ranks;

fn skewed(ranks: u32) -> Settings {
    let computing = "10ms,cv=0.1,straggler=1:4".parse().expect("is a text");
    Settings { computing, ..settings(ranks) }
}

#[test]
fn rounds_of_all_ranks_are_synchronous_bit_for_bit() {
    for ranks in [1, 2, 4, 7] {
        let synchronous = simulate("sync", &settings(ranks));
        for text in ["eager:activation=all", "eager:activation=all,divisor=contributors,late=drop,every=3"] {
            let eager = simulate(text, &settings(ranks));
            // The parameters are averaged at the end, and a seventh of seven times them is rounded.
            let worst = difference(&eager.parameters, &synchronous.parameters);
            assert!(worst <= if ranks == 7 { ROUNDING } else { 0.0 }, "{text}, {ranks} ranks: {worst:e}");
        }
        let solo = simulate("eager:activation=solo,every=4", &settings(ranks));
        assert!(ranks == 1 || solo.parameters != synchronous.parameters);
    }
}

#[test]
fn rounds_hold_nobody_up_and_averages_of_the_parameters_do() {
    let time = |text: &str| simulate(text, &skewed(4)).time.as_secs_f64();
    let (synchronous, solo) = (time("sync"), time("eager:activation=solo,every=25"));
    // All end with the slow rank, which has 25 steps of 40 ms to make.
    assert!((synchronous / solo - 1.0).abs() < 0.1, "{synchronous} {solo}");
    let waiting = |text: &str| {
        let simulation = Simulation::new(&Linear, &scheme(text), &skewed(4)).expect("is not refused");
        let mut early = 0.0;
        let trained = simulation.run(&mut price, &mut |observed| {
            if observed.step == 20 {
                early = observed.wait_share;
            }
        });
        assert!(trained.expect("trains").guarantee_held, "{text}");
        early
    };
    let [all, majority, solo] =
        ["all", "majority", "solo"].map(|it| waiting(&format!("eager:activation={it},every=25")));
    assert!(all > 0.5 && majority < 0.8 * all && solo < 0.2, "{all} {majority} {solo}");
}

#[test]
fn late_gradients_are_carried_corrected_or_dropped() {
    // One parameter vector after so many steps tells the rules apart.
    let by = |late: &str| simulate(&format!("eager:activation=solo,late={late},every=25"), &skewed(4));
    let [carried, dropped, corrected] = ["carry", "drop", "correct"].map(by);
    for trained in [&carried, &dropped, &corrected] {
        assert!(trained.guarantee_held && trained.parameters_equal);
    }
    assert!(difference(&carried.parameters, &dropped.parameters) > 10.0 * ROUNDING);
    assert!(difference(&corrected.parameters, &dropped.parameters) > 10.0 * ROUNDING);
}

#[test]
fn full_averages_come_after_as_many_steps_as_were_asked_for() {
    let places = |every| {
        let simulated = simulate(&format!("eager:activation=solo,every={every}"), &settings(4));
        simulated.bytes_per_rank
    };
    // 84 bytes of the parameters: a gradient each step, and 25 steps have so many averages.
    for (every, averages) in [(5, 5), (10, 3), (25, 1), (100, 1)] {
        assert_eq!(places(every), 84 * (STEPS + averages), "{every}");
    }
}

#[test]
fn a_grid_of_one_dimension_and_a_rate_of_1_is_local_sgd_up_to_rounding() {
    for ranks in [2, 4, 7] {
        let averaged = simulate("local-sgd:every=1", &settings(ranks)).parameters;
        let grid = simulate("bidmach:rate=1,dimensions=1", &settings(ranks)).parameters;
        assert!(difference(&averaged, &grid) <= ROUNDING, "{ranks} ranks");
        let slower = simulate("bidmach:rate=0.3,dimensions=1", &settings(ranks)).parameters;
        assert!(difference(&averaged, &slower) > 10.0 * ROUNDING, "{ranks} ranks");
    }
}

#[test]
fn no_line_is_longer_than_the_root_of_the_number_of_ranks() {
    for ranks in 1..40 {
        for dimensions in 1..4_u32 {
            let text = format!("bidmach:dimensions={dimensions}");
            for rank in 0..ranks {
                let plan = scheme(&text).plan(&Linear.layout(), rank, ranks).expect("is not refused");
                assert_eq!(plan.lines.len(), dimensions as usize);
                for line in &plan.lines {
                    let longest = (1..).find(|side: &u32| side.pow(dimensions) >= ranks);
                    assert!(line.ranks.len() as u32 <= longest.expect("there is one"), "{text}: {line:?}");
                    assert!(line.ranks.contains(&rank) && line.ranks.is_sorted());
                }
            }
        }
    }
}

#[test]
fn ranks_of_a_line_have_the_same_line_also_in_a_grid_with_holes() {
    let lines = |rank, ranks, dimensions| {
        let scheme = scheme(&format!("bidmach:dimensions={dimensions}"));
        let plan = scheme.plan(&Linear.layout(), rank, ranks).expect("is not refused");
        plan.lines.into_iter().map(|line| line.ranks).collect::<Vec<_>>()
    };
    for ranks in 1..30 {
        for dimensions in 1..=4 {
            for rank in 0..ranks {
                for (number, line) in lines(rank, ranks, dimensions).into_iter().enumerate() {
                    let is_shared = |member: &u32| lines(*member, ranks, dimensions)[number] == line;
                    assert!(
                        line.iter().all(is_shared),
                        "{rank} of {ranks}, {dimensions} dimensions: {line:?}"
                    );
                }
            }
        }
    }
    assert_eq!(lines(4, 9, 2), [vec![3, 4, 5], vec![1, 4, 7]]);
    assert_eq!(
        (lines(6, 7, 2), lines(2, 7, 2)),
        (vec![vec![6], vec![0, 3, 6]], vec![vec![0, 1, 2], vec![2, 5]])
    );
    assert_eq!(lines(5, 8, 3)[2], [1, 5]);
}

#[test]
fn a_grid_of_any_number_of_ranks_keeps_what_it_guarantees() {
    for ranks in 2..=14 {
        for text in ["bidmach:dimensions=2", "bidmach:dimensions=3", "bidmach:dimensions=2,threshold=0.6"] {
            let simulated = simulate(text, &Settings { learning_rate: 0.005, ..settings(ranks) });
            assert!(simulated.guarantee_held && simulated.parameters_equal, "{text}, {ranks} ranks");
        }
    }
}

#[test]
fn the_ranks_of_an_exchange_are_counted_but_for_the_last_one() {
    const RANKS: u32 = 7;
    for (text, most) in [
        ("sync", RANKS),
        ("local-sgd:every=3", RANKS),
        ("local-sgd:every=100", 0),
        ("eager:activation=all", RANKS),
        ("bsp", 2),
        ("bidmach:dimensions=1", RANKS),
        ("bidmach:dimensions=2", 3),
        ("bidmach:dimensions=2,threshold=0.6", 3),
        ("bidmach:dimensions=3", 2),
    ] {
        let all = ranks::with_group(
            Fabric::Shm,
            RANKS,
            |_| {},
            |group: Group| {
                let mut trainer =
                    Trainer::new(&group, &scheme(text), &Layout::of(&[20]), 8).expect("is not refused");
                while let Some(mut step) = trainer.step().expect("goes on") {
                    step.vectors().expect("no bucket is ready").1.fill(1.0);
                    let mut descend =
                        |x: &mut [f32], g: &[f32]| x.iter_mut().zip(g).for_each(|(x, g)| *x -= g);
                    step.update(&mut descend, 1.0).expect("goes on");
                }
                let trained = trainer.finish().expect("ends");
                group.close().expect("all ranks close");
                trained.progress.exchange_ranks_max
            },
        );
        // A rank of a grid that was late may have left its longest line's rounds out.
        let counted = all.iter().copied().max();
        assert!(counted == Some(most) && all.iter().all(|ranks| *ranks <= most), "{text}: {all:?}");
    }
}

#[test]
fn a_threshold_below_1_holds_nobody_up() {
    let time = |text: &str| {
        let mut half = 0.0;
        let simulation = Simulation::new(&Linear, &scheme(text), &skewed(9)).expect("is not refused");
        let trained = simulation.run(&mut price, &mut |observed| {
            if observed.step == STEPS / 2 {
                half = observed.time.as_secs_f64();
            }
        });
        assert!(trained.expect("trains").guarantee_held, "{text}");
        half
    };
    let (all, most) = (time("bidmach"), time("bidmach:threshold=0.6"));
    assert!(most < 0.6 * all, "{all} {most}");
}

#[test]
fn ranks_that_do_not_step_aside_hold_a_slow_one_up_for_ever() {
    // It waits for their gradients, and they for its parameters.
    let without = |_, _, actions: Vec<Action>| {
        actions.into_iter().filter(|it| !matches!(it, Action::StepAside { .. })).collect()
    };
    let trained = |mutation| {
        let scheme = scheme("eager:activation=quorum:3,every=4");
        let plan = |rank| mutated(scheme.plan(&Linear.layout(), rank, 4), rank, mutation);
        let simulation = Simulation::of_plans(&Linear, &skewed(4), plan).expect("there are ranks");
        simulation.run(&mut price, &mut |_| {})
    };
    assert!(trained(|_, _, actions| actions).expect("trains").guarantee_held);
    let error = trained(without).expect_err("the slow rank waits").to_string();
    assert!(error.contains("rank 1"), "{error}");
}

#[test]
fn activations_that_never_open_a_round_are_refused() {
    for (text, part) in
        [("eager:activation=quorum:5", "name 1 to 4 ranks"), ("eager:activation=quorum:0", "at once")]
    {
        let refused = scheme(text).plan(&Linear.layout(), 0, 4).err().expect("is refused").to_string();
        assert!(refused.contains(part) && refused.starts_with(text), "{refused}");
    }
    let plan = mutated(scheme("eager").plan(&Linear.layout(), 0, 4), 0, |_, _, actions| actions);
    assert_eq!(plan.lines.len(), 1);
}

/// The parameters of both ranks after two steps, between which they save their states: rank 1 gives
/// its first gradient when the round of rank 0 has ended. `goes_on`: in another training.
fn carried_to_a_checkpoint(text: &str, goes_on: bool) -> Vec<(RankState, Vec<f32>)> {
    const GRADIENTS: [f32; 2] = [1.0, 2.0];
    let (layout, has_ended) = (Layout::of(&[3]), Meeting::new(2));
    let train = |group: Group| {
        let step = |trainer: &mut Trainer, value: f32| {
            let mut step = trainer.step().expect("goes on").expect("there is a step");
            step.vectors().expect("no bucket is ready").1.fill(value);
            let mut descend = |x: &mut [f32], g: &[f32]| x.iter_mut().zip(g).for_each(|(x, g)| *x -= g);
            step.update(&mut descend, 1.0).expect("goes on");
        };
        let new = || Trainer::new(&group, &scheme(text), &layout, 2).expect("has memory");
        let mut trainer = new();
        let rank = group.rank();
        if rank == 1 {
            trainer.step().expect("begins");
            has_ended.wait();
        }
        step(&mut trainer, GRADIENTS[rank as usize]);
        if rank == 0 {
            has_ended.wait();
        }
        let state = trainer.rank_state(&[]).expect("is saved");
        if goes_on {
            trainer = new();
            trainer.restore_rank(Ok(state.clone())).expect("is a state");
        }
        step(&mut trainer, 0.0);
        let parameters = trainer.parameters_mut().to_vec();
        assert!(trainer.finish().expect("ends").parameters_equal, "{text}");
        group.close().expect("all ranks close");
        (state, parameters)
    };
    ranks::with_group(Fabric::Shm, 2, |_| {}, train)
}

#[test]
fn a_late_gradient_is_carried_across_a_checkpoint_and_counts_once_on_each_rank() {
    for (rule, expected) in [("carry", -1.5), ("correct", -1.5), ("drop", -0.5)] {
        let text = format!("eager:activation=solo,late={rule},every=9");
        for goes_on in [false, true] {
            for (state, parameters) in carried_to_a_checkpoint(&text, goes_on) {
                let carried = if rule == "drop" { 0.0 } else { 1.0 };
                assert_eq!(state.vector("delta"), Some(&[carried; 3][..]), "{text}");
                assert_eq!(parameters, [expected; 3], "{text}, in another training: {goes_on}");
            }
        }
    }
}

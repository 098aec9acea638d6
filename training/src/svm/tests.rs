//! The solver against the conditions of optimality, against a solver that tries everything, and
//! against itself on other numbers of ranks.

use std::ops::ControlFlow;

use pleach_collectives::{Group, Options};
use pleach_transport::rendezvous::{Fabric, World};
use pleach_vocabulary::random::Random;
use proptest::prelude::*;

use super::kernel::Query;
use super::oracle::{gram, least_objective, violation};
use super::solver::{Problem, Solver};
use super::*;

#[path = "../../../collectives/tests/ranks/mod.rs"]
mod ranks;

/// Samples with labels.
#[derive(Clone, Debug)]
struct Labelled {
    samples: Samples,
    labels: Vec<i32>,
}

impl Labelled {
    fn part(&self, rank: u32, ranks: u32) -> Self {
        let [from, to] = [rank, rank + 1].map(|rank| self.labels.len() * rank as usize / ranks as usize);
        Self { samples: self.samples.pick(from..to), labels: self.labels[from..to].to_vec() }
    }

    fn signs(&self, positive: i32) -> Vec<f64> {
        self.labels.iter().map(|label| if *label == positive { 1.0 } else { -1.0 }).collect()
    }
}

/// Points around centres that overlap, one centre a class.
fn clouds(count: usize, classes: i32, features: u32, seed: u64) -> Labelled {
    let mut random = Random::new(seed);
    let mut uniform = move || (random.bits() >> 11) as f64 / (1u64 << 53) as f64;
    let (mut samples, mut labels) = (Samples::new(features), Vec::new());
    for at in 0..count {
        let class = at as i32 % classes;
        let centre = |feature: u32| if feature as i32 % classes == class { 0.6 } else { 0.0 };
        let row: Vec<(u32, f64)> =
            (0..features).map(|feature| (feature, centre(feature) + uniform() + uniform() - 1.0)).collect();
        samples.push(row).expect("is a sample");
        labels.push(class);
    }
    Labelled { samples, labels }
}

fn rbf(c: f64, gamma: f64, tolerance: f64) -> Parameters {
    Parameters { c, tolerance, ..Parameters::new(Kernel::Rbf { gamma }) }
}

fn alone() -> Group {
    Group::join(&Options::new(World::alone())).expect("a rank alone joins")
}

fn train_alone(data: &Labelled, parameters: &Parameters) -> Model {
    Svm::train(&alone(), &data.samples, &data.labels, parameters).expect("is trained")
}

/// Runs `body` as every rank of a group.
fn with_group<T: Send>(fabric: Fabric, ranks: u32, body: impl Fn(Group) -> T + Sync) -> Vec<T> {
    ranks::with_group(fabric, ranks, |_| {}, body)
}

fn train_together(fabric: Fabric, ranks: u32, data: &Labelled, parameters: &Parameters) -> Vec<Model> {
    with_group(fabric, ranks, |group| {
        let part = data.part(group.rank(), group.world_size());
        let model = Svm::train(&group, &part.samples, &part.labels, parameters).expect("is trained");
        group.close().expect("all ranks close");
        model
    })
}

/// The factors of all samples times their labels, of a model of two classes.
fn coefficients(model: &Model, samples: usize) -> Vec<f64> {
    let mut coefficients = vec![0.0; samples];
    for (vector, number) in model.support().iter().enumerate() {
        coefficients[*number as usize] = model.coefficients(vector)[0];
    }
    coefficients
}

/// Panics unless the conditions of optimality hold for all samples of two classes.
fn assert_optimal(data: &Labelled, model: &Model, parameters: &Parameters) {
    let gram = gram(parameters.kernel, &data.samples);
    let signs = data.signs(model.labels()[0]);
    let coefficients = coefficients(model, signs.len());
    let (violation, objective) = violation(&gram, &signs, &coefficients, parameters.c);
    let training = model.training().expect("was trained");
    let [of_error, of_objective] = rounding(&gram, &coefficients);
    assert!(violation <= parameters.tolerance + of_error, "violated by {violation:e}: {training:?}");
    assert!(
        (training.objective - objective).abs() <= 1e-6 * objective.abs() + of_objective,
        "{training:?} {objective}"
    );
}

/// By how much an error and the objective may be off, as kernel values are rounded to 32 bits: each
/// is in an error once for each factor, and in the objective once for each pair of factors, halved.
fn rounding(gram: &[Vec<f64>], coefficients: &[f64]) -> [f64; 2] {
    let largest = gram.iter().flatten().fold(0.0, |largest: f64, value| largest.max(value.abs()));
    let sum: f64 = coefficients.iter().map(|one| one.abs()).sum();
    [1e-7 * largest * sum, 1e-7 * largest * sum * sum / 2.0]
}

const SHRINKINGS: [Shrinking; 5] = [
    Shrinking::Never,
    Shrinking::Every { first: FirstCheck::Iterations(2), reconstruction: Reconstruction::Single },
    Shrinking::Every { first: FirstCheck::Iterations(2), reconstruction: Reconstruction::Multi },
    Shrinking::Every { first: FirstCheck::Share(0.05), reconstruction: Reconstruction::Single },
    Shrinking::Every { first: FirstCheck::Share(0.5), reconstruction: Reconstruction::Multi },
];

#[test]
fn every_kernel_selection_and_shrinking_ends_at_an_optimum() {
    let data = clouds(150, 2, 5, 1);
    for kernel in [
        Kernel::Linear,
        Kernel::Rbf { gamma: 0.5 },
        Kernel::Polynomial { degree: 3, gamma: 0.2, offset: 1.0 },
        Kernel::Sigmoid { gamma: 0.01, offset: 0.0 },
    ] {
        let mut objectives = Vec::new();
        for selection in [Selection::First, Selection::Second] {
            for shrinking in SHRINKINGS {
                let parameters =
                    Parameters { c: 3.0, tolerance: 1e-4, shrinking, selection, ..Parameters::new(kernel) };
                let model = train_alone(&data, &parameters);
                assert_optimal(&data, &model, &parameters);
                objectives.push(model.training().expect("was trained").objective);
            }
        }
        let spread = objectives.iter().map(|one| (one - objectives[0]).abs()).fold(0.0, f64::max);
        assert!(spread <= 1e-4 * objectives[0].abs(), "{kernel:?}: {objectives:?}");
    }
}

#[test]
fn any_number_of_ranks_over_any_fabric_has_the_same_bits() {
    let two = clouds(121, 2, 7, 2);
    let three = clouds(60, 3, 4, 3);
    for (data, fabrics) in [(&two, &[Fabric::Shm, Fabric::Tcp][..]), (&three, &[Fabric::Shm])] {
        for (selection, cache_bytes) in [(Selection::Second, 4_000), (Selection::First, 1 << 20)] {
            let shrinking =
                Shrinking::Every { first: FirstCheck::Iterations(7), reconstruction: Reconstruction::Multi };
            let parameters = Parameters { shrinking, selection, cache_bytes, ..rbf(5.0, 0.4, 1e-3) };
            let expected = train_alone(data, &parameters);
            assert!(expected.training().expect("was trained").reconstructions > 0);
            for fabric in fabrics {
                for ranks in [1, 2, 3, 4] {
                    for model in train_together(*fabric, ranks, data, &parameters) {
                        let mut training = *model.training().expect("was trained");
                        let of_one = expected.training().expect("was trained");
                        // Ranks with fewer samples keep more rows.
                        training.kernel_evaluations = of_one.kernel_evaluations;
                        let model = Model { training: Some(training), ..model };
                        assert!(model == expected, "{fabric:?} {ranks}:\n{model:?}\n{expected:?}");
                    }
                }
            }
        }
    }
}

#[test]
fn a_rank_without_samples_of_a_class_takes_part() {
    let mut data = clouds(40, 2, 3, 4);
    let order: Vec<usize> =
        (0..40).filter(|at| at % 2 == 0).chain((0..40).filter(|at| at % 2 == 1)).collect();
    data.samples = data.samples.pick(order.iter().copied());
    data.labels = order.iter().map(|at| 10 + *at as i32 % 2 + if *at % 10 == 0 { 5 } else { 0 }).collect();
    let parameters = rbf(2.0, 0.3, 1e-3);
    let expected = train_alone(&data, &parameters);
    assert_eq!(expected.labels(), [10, 11, 15]);
    for model in train_together(Fabric::Shm, 4, &data, &parameters) {
        assert_eq!(
            model.predict(&data.samples).expect("fits"),
            expected.predict(&data.samples).expect("fits")
        );
        assert_eq!(model.intercepts(), expected.intercepts());
    }
}

/// Runs `body` with a solver of all samples, of two classes, on a rank alone.
fn with_solver<T>(data: &Labelled, parameters: &Parameters, body: impl FnOnce(Solver<'_>) -> T) -> T {
    let group = alone();
    let norms: Vec<f64> = (0..data.samples.len()).map(|sample| data.samples.row(sample).norm()).collect();
    body(
        Solver::new(Problem {
            group: &group,
            parameters,
            samples: &data.samples,
            norm_max: norms.iter().copied().fold(0.0, f64::max),
            norms: &norms,
            features: data.samples.features(),
            members: (0..data.samples.len() as u32).collect(),
            signs: data.signs(1),
        })
        .expect("is a problem"),
    )
}

/// By how much the conditions are violated at the end, with or without the mutant.
fn violation_with(data: &Labelled, parameters: &Parameters, trusts_active_samples: bool) -> f64 {
    let solution = with_solver(data, parameters, |mut solver| {
        solver.trusts_active_samples = trusts_active_samples;
        solver.solve(&mut |_| ControlFlow::Continue(())).expect("is solved")
    });
    let gram = gram(parameters.kernel, &data.samples);
    violation(&gram, &data.signs(1), &solution.coefficients, parameters.c).0
}

#[test]
fn convergence_on_active_samples_alone_is_a_violation_that_the_conditions_show() {
    let shrinking =
        Shrinking::Every { first: FirstCheck::Iterations(2), reconstruction: Reconstruction::Single };
    let mut caught = 0;
    for seed in 0..5 {
        let data = clouds(120, 2, 3, 100 + seed);
        let parameters = Parameters { shrinking, ..rbf(10.0, 1.0, 1e-3) };
        assert!(violation_with(&data, &parameters, false) <= 1.1e-3);
        caught += u32::from(violation_with(&data, &parameters, true) > 1e-2);
    }
    assert!(caught > 0, "no sample was left out that the solution needs");
}

#[test]
fn a_kernel_value_that_is_kept_has_the_bits_of_one_made_alone_and_is_made_once() {
    let data = clouds(200, 2, 9, 300);
    let shrinking =
        Shrinking::Every { first: FirstCheck::Iterations(2), reconstruction: Reconstruction::Single };
    let all = 0..200;
    let [mut whole, mut partial] = [0, 0];
    for kernel in [
        Kernel::Linear,
        Kernel::Rbf { gamma: 0.4 },
        Kernel::Polynomial { degree: 3, gamma: 0.2, offset: 1.0 },
        Kernel::Sigmoid { gamma: 0.01, offset: 0.1 },
    ] {
        // All rows, and forty.
        for cache_bytes in [1 << 20, 40 * 832] {
            let parameters = Parameters { c: 5.0, shrinking, cache_bytes, ..Parameters::new(kernel) };
            with_solver(&data, &parameters, |mut solver| {
                let solution = solver.solve(&mut |_| ControlFlow::Continue(())).expect("is solved");
                assert!(solution.reconstructions > 0 && solution.outcome == Outcome::Converged);
                let mut query = Query::new(9);
                let mut made = 0;
                for (place, number) in solver.cache.kept().collect::<Vec<_>>() {
                    query.set(data.samples.row(number as usize));
                    let entry = solver.cache.entry(place);
                    let missing: Vec<u32> = entry.missing(all.clone()).collect();
                    for at in all.clone().filter(|at| !missing.contains(at)) {
                        let (mut alone, norm) = ([0.0], data.samples.row(at as usize).norm());
                        query.fill(kernel, &data.samples, &[at], |_| norm, &mut alone);
                        let kept = entry.row[at as usize];
                        assert_eq!(kept.to_bits(), alone[0].to_bits(), "{kernel:?}: {number} with {at}");
                    }
                    assert_eq!(entry.made_count(), all.len() - missing.len());
                    made += entry.made_count() as u64;
                    *(if missing.is_empty() { &mut whole } else { &mut partial }) += 1;
                }
                if solver.cache.keeps_all() {
                    assert_eq!(solution.kernel_evaluations, made, "{kernel:?}");
                    let is_kept = |number: usize| solver.cache.has(number as u32);
                    let mut coefficients = solution.coefficients.iter().enumerate();
                    assert!(coefficients.all(|(number, one)| *one == 0.0 || is_kept(number)), "{kernel:?}");
                } else {
                    assert!(cache_bytes < 1 << 20 && solution.kernel_evaluations > made, "{kernel:?}");
                }
            });
        }
    }
    assert!(whole > 0 && partial > 0, "{whole} whole rows, {partial} partial ones");
}

#[test]
fn a_model_has_the_same_bits_whichever_rows_are_kept() {
    let data = clouds(150, 2, 6, 301);
    for reconstruction in [Reconstruction::Single, Reconstruction::Multi] {
        let shrinking = Shrinking::Every { first: FirstCheck::Iterations(5), reconstruction };
        let mut evaluations = Vec::new();
        let mut models = Vec::new();
        // No row, one, some, all.
        for (cache_bytes, ranks) in
            [(0, 1), (0, 3), (700, 1), (10_000, 1), (10_000, 3), (1 << 20, 1), (1 << 20, 3)]
        {
            let parameters = Parameters { shrinking, cache_bytes, ..rbf(5.0, 0.4, 1e-4) };
            let mut model = train_together(Fabric::Shm, ranks, &data, &parameters).remove(0);
            let training = model.training.as_mut().expect("was trained");
            assert!(training.reconstructions > 0);
            evaluations.push(std::mem::take(&mut training.kernel_evaluations));
            models.push(model);
        }
        assert!(models.iter().all(|model| *model == models[0]), "{models:?}");
        // Fewer are made where more rows are kept, and with all rows as many on any ranks.
        assert!(evaluations[0] > evaluations[3] && evaluations[3] > evaluations[5], "{evaluations:?}");
        assert_eq!((evaluations[0], evaluations[5]), (evaluations[1], evaluations[6]));
    }
}

#[test]
fn with_a_cache_of_all_rows_shrinking_takes_no_more_kernel_values_than_none() {
    for (seed, tolerance) in [(200, 1e-3), (201, 1e-3), (202, 1e-6)] {
        let data = clouds(240, 2, 5, seed);
        for ranks in [1, 3] {
            let of = |shrinking| {
                let parameters = Parameters { shrinking, ..rbf(5.0, 0.4, tolerance) };
                *train_together(Fabric::Shm, ranks, &data, &parameters)[0].training().expect("was trained")
            };
            let none = of(Shrinking::Never);
            for shrinking in &SHRINKINGS[1..4] {
                let shrunk = of(*shrinking);
                assert!(shrunk.reconstructions > 0, "{shrinking:?}: nothing was left out");
                assert!(
                    shrunk.kernel_evaluations <= none.kernel_evaluations,
                    "{ranks} ranks, {shrinking:?}: {} for {}",
                    shrunk.kernel_evaluations,
                    none.kernel_evaluations
                );
            }
        }
    }
}

#[test]
fn a_step_to_a_bound_is_progress_even_if_the_errors_hide_it() {
    // A factor of this problem ends a rounding away from its bound.
    let data = clouds(4, 2, 3, 11_758_189_228_333_642_514);
    let kernel = Kernel::Polynomial { degree: 2, gamma: 0.5, offset: 1.0 };
    let parameters = Parameters { c: 30.0, tolerance: 1e-7, ..Parameters::new(kernel) };
    assert_optimal(&data, &train_alone(&data, &parameters), &parameters);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn small_problems_have_the_least_objective(
        seed in any::<u64>(),
        count in 3usize..24,
        c in prop::sample::select(vec![0.05, 1.0, 30.0]),
        kernel in 0..3,
        first in any::<bool>(),
    ) {
        let kernel = match kernel {
            0 => Kernel::Linear,
            1 => Kernel::Rbf { gamma: 0.8 },
            _ => Kernel::Polynomial { degree: 2, gamma: 0.5, offset: 1.0 },
        };
        let data = clouds(count, 2, 3, seed);
        let selection = if first { Selection::First } else { Selection::Second };
        let shrinking = Shrinking::Every { first: FirstCheck::Iterations(2), reconstruction: Reconstruction::Multi };
        let parameters = Parameters { c, tolerance: 1e-7, selection, shrinking, ..Parameters::new(kernel) };
        let model = train_alone(&data, &parameters);
        assert_optimal(&data, &model, &parameters);
        let gram = gram(kernel, &data.samples);
        let least = least_objective(&gram, &data.signs(1), c);
        let found = model.training().expect("was trained").objective;
        let [_, of_objective] = rounding(&gram, &coefficients(&model, count));
        let allowed = 1e-5 * least.abs().max(1e-3) + of_objective;
        prop_assert!((found - least).abs() <= allowed, "{found} {least}");
    }
}

#[test]
fn an_observer_stops_all_ranks_at_one_iteration_with_the_model_so_far() {
    let data = clouds(100, 2, 4, 5);
    let parameters = rbf(5.0, 0.4, 1e-5);
    let models = with_group(Fabric::Shm, 3, |group| {
        let part = data.part(group.rank(), 3);
        let stops = group.rank() == 1;
        Svm::train_observed(&group, &part.samples, &part.labels, &parameters, |progress| {
            if stops && progress.iterations == 20 {
                ControlFlow::Break(())
            } else {
                ControlFlow::Continue(())
            }
        })
        .expect("is stopped")
    });
    for model in &models {
        let training = model.training().expect("was trained");
        assert_eq!((training.outcome, training.iterations), (Outcome::Stopped, 21));
        assert!(training.gap > parameters.tolerance && model.support_vectors() > 2);
        assert_eq!(model, &models[0]);
    }
    let limited = train_alone(&data, &Parameters { iterations_max: Some(10), ..parameters });
    let training = limited.training().expect("was trained");
    assert_eq!((training.outcome, training.iterations), (Outcome::IterationsMax, 10));
}

#[test]
fn bad_arguments_are_named_and_no_rank_waits_for_another() {
    let data = clouds(6, 2, 2, 6);
    let group = alone();
    let train = |labels: &[i32], parameters: &Parameters| {
        Svm::train(&group, &data.samples, labels, parameters).expect_err("is refused").to_string()
    };
    let good = rbf(1.0, 1.0, 1e-3);
    let of_share =
        |share| Shrinking::Every { first: FirstCheck::Share(share), reconstruction: Reconstruction::Single };
    for (parameters, expected) in [
        (rbf(0.0, 1.0, 1e-3), "C is 0; give a number above 0"),
        (rbf(1.0, -1.0, 1e-3), "gamma is -1; give a number above 0"),
        (rbf(1.0, f64::NAN, 1e-3), "gamma is NaN"),
        (rbf(1.0, 1.0, 0.0), "the tolerance is 0"),
        (Parameters { shrinking: of_share(1.5), ..good.clone() }, "the share of samples"),
    ] {
        let error = train(&data.labels, &parameters);
        assert!(error.contains(expected), "{error}");
    }
    assert!(train(&data.labels[..5], &good).contains("5 labels for 6 samples"));
    assert!(train(&[7; 6], &good).contains("all samples have the label 7"));
    let errors = with_group(Fabric::Shm, 3, |group| {
        let part = data.part(group.rank(), 3);
        let c = if group.rank() == 2 { -1.0 } else { 1.0 };
        let bad =
            Svm::train(&group, &part.samples, &part.labels, &rbf(c, 1.0, 1e-3)).expect_err("is refused");
        let c = if group.rank() == 1 { 2.0 } else { 1.0 };
        let other =
            Svm::train(&group, &part.samples, &part.labels, &rbf(c, 1.0, 1e-3)).expect_err("is refused");
        let few = if group.rank() == 0 { part.samples.pick(0..1) } else { Samples::new(2) };
        let few = Svm::train(&group, &few, &vec![1; few.len()], &good).expect_err("is refused");
        [bad, other, few].map(|error| error.to_string())
    });
    assert!(errors[0][0].contains("rank 2 has bad input") && errors[2][0].contains("C is -1"), "{errors:?}");
    for [_, other, few] in &errors {
        assert!(other.contains("rank 1 has other parameters than rank 0"), "{other}");
        assert!(few.contains("1 samples for 3 ranks"), "{few}");
    }
}

#[test]
fn values_beyond_numbers_and_pairs_without_progress_are_errors_on_all_ranks() {
    let mut data = clouds(12, 2, 2, 7);
    let steep = Parameters::new(Kernel::Polynomial { degree: 300, gamma: 50.0, offset: 1.0 });
    let mut huge = Samples::new(2);
    for at in 0..12 {
        huge.push([(0, 1e18 + f64::from(at) * 1e15), (1, 1e18)]).expect("is a sample");
    }
    for (samples, parameters, expected) in [
        (data.samples.clone(), steep, "beyond the range of numbers"),
        (huge, Parameters::new(Kernel::Linear), "no step makes progress"),
    ] {
        data.samples = samples;
        let errors = with_group(Fabric::Shm, 2, |group| {
            let part = data.part(group.rank(), 2);
            let result = Svm::train(&group, &part.samples, &part.labels, &parameters);
            result.expect_err("is refused").to_string()
        });
        assert!(errors.iter().all(|error| error.contains(expected)), "{errors:?}");
    }
}

#[test]
fn a_lost_rank_ends_the_others() {
    let data = clouds(200, 2, 4, 8);
    let errors = with_group(Fabric::Shm, 3, |group| {
        let part = data.part(group.rank(), 3);
        let leaves = group.rank() == 2;
        let leaving = group.clone();
        let result =
            Svm::train_observed(&group, &part.samples, &part.labels, &rbf(5.0, 0.4, 1e-6), |progress| {
                if leaves && progress.iterations == 10 {
                    leaving.abort();
                }
                ControlFlow::Continue(())
            });
        result.expect_err("a rank is lost").to_string()
    });
    assert!(errors[0].contains("rank 2"), "{errors:?}");
    assert_eq!(errors[0], errors[1]);
}

#[test]
fn a_model_that_was_written_and_read_predicts_the_same() {
    for (classes, kernel) in [
        (2, Kernel::Linear),
        (3, Kernel::Rbf { gamma: 0.3 }),
        (2, Kernel::Polynomial { degree: 2, gamma: 0.5, offset: 1.0 }),
        (4, Kernel::Sigmoid { gamma: 0.1, offset: 0.5 }),
    ] {
        let data = clouds(60, classes, 5, 9);
        let model = train_alone(&data, &Parameters::new(kernel));
        let mut written = Vec::new();
        libsvm::write_model(&model, &mut written).expect("fits memory");
        let read = libsvm::read_model(&written[..]).expect("is well formed");
        assert_eq!(read.decisions(&data.samples), model.decisions(&data.samples));
        assert_eq!(read.predict(&data.samples), model.predict(&data.samples));
        let mut again = Vec::new();
        libsvm::write_model(&read, &mut again).expect("fits memory");
        assert_eq!(again, written);
        for cut in 0..written.len() {
            assert!(libsvm::read_model(&written[..cut]).is_err(), "cut after {cut} bytes");
        }
    }
}

/// Texts of both kinds that are well formed.
const TEXTS: [&str; 2] = [
    "+1 1:0.5 3:-2\n-1 2:1e-3 9:4 # text\n",
    "svm_type c_svc\nkernel_type rbf\ngamma 0.5\nnr_class 2\ntotal_sv 2\nrho -0.25\nlabel 1 -1\nnr_sv 1 1\nSV\n1 1:0.5 \n-1 2:0.1 \n",
];

proptest! {
    #![proptest_config(ProptestConfig { cases: 2_000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn damaged_texts_are_read_or_refused(
        which in 0..TEXTS.len(),
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>(), 0..3), 0..6),
    ) {
        let mut text = TEXTS[which].as_bytes().to_vec();
        for (place, byte, kind) in changes {
            let at = place.index(text.len());
            match kind {
                0 => text[at] = byte,
                1 => text.insert(at, b"0123456789:.-e \n"[usize::from(byte) % 16]),
                _ if text.len() > 1 => drop(text.remove(at)),
                _ => {}
            }
        }
        let text = &text[..];
        if let Ok(all) = libsvm::read(text, |_| true) {
            prop_assert_eq!((all.samples.len(), all.labels.len()), (all.rows, all.rows));
            let features = all.samples.features();
            let indices = (0..all.rows).flat_map(|row| all.samples.nonzero(row));
            prop_assert!(indices.into_iter().all(|(index, value)| index < features && value.is_finite()));
        }
        if let Ok(model) = libsvm::read_model(text) {
            let (mut written, mut again) = (Vec::new(), Vec::new());
            libsvm::write_model(&model, &mut written).expect("fits memory");
            let read = libsvm::read_model(&written[..]).expect("was written");
            libsvm::write_model(&read, &mut again).expect("fits memory");
            prop_assert_eq!(written, again);
        }
    }
}

#[test]
fn samples_with_more_features_than_the_training_are_refused() {
    let data = clouds(20, 2, 3, 10);
    let model = train_alone(&data, &rbf(1.0, 1.0, 1e-3));
    let wide = clouds(4, 2, 5, 11);
    let error = model.predict(&wide.samples).expect_err("has more features");
    assert_eq!(error, PredictError::Features { samples: 5, model: 3 });
}

//! Training: what all ranks agree on, pairs of classes, and the model of their solutions.

use std::ops::ControlFlow;

use pleach_collectives::{Group, ReduceOp};

use super::error::SvmError;
use super::exchange::gather;
use super::kernel::Kernel;
use super::model::{Model, Training};
use super::samples::Samples;
use super::solver::{Outcome, Problem, Solution, Solver};
use super::{FirstCheck, Parameters, Shrinking};

/// Most classes: each pair of them is a problem.
const CLASSES_MAX: usize = 1_024;

/// Trains support vector machines.
#[derive(Clone, Copy, Debug)]
pub struct Svm;

/// Where training is.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Progress {
    /// The number of the pair of classes, from 0.
    pub problem: usize,
    /// How many pairs of classes there are.
    pub problems: usize,
    /// Iterations of this pair so far.
    pub iterations: u64,
    /// The largest violation of the conditions among the active samples.
    pub gap: f64,
    /// The samples that take part, of all ranks.
    pub active: usize,
    /// The samples of the pair, of all ranks.
    pub samples: usize,
}

impl Svm {
    /// Trains a machine on the samples of all ranks. Each rank gives its own samples with their
    /// labels; those of rank 0 are the first. All ranks get the same model.
    ///
    /// # Errors
    ///
    /// See [`SvmError`]. All ranks end then.
    pub fn train(
        group: &Group,
        samples: &Samples,
        labels: &[i32],
        parameters: &Parameters,
    ) -> Result<Model, SvmError> {
        Self::train_observed(group, samples, labels, parameters, |_| ControlFlow::Continue(()))
    }

    /// The same, and calls `observe` in each iteration. When it breaks on any rank, all ranks stop
    /// at the same iteration, and the model is the one that they have by then.
    ///
    /// # Errors
    ///
    /// As [`Svm::train`].
    pub fn train_observed(
        group: &Group,
        samples: &Samples,
        labels: &[i32],
        parameters: &Parameters,
        mut observe: impl FnMut(&Progress) -> ControlFlow<()>,
    ) -> Result<Model, SvmError> {
        let agreed = Agreed::new(group, samples, labels, parameters)?;
        let norms: Vec<f64> = (0..samples.len()).map(|sample| samples.row(sample).norm()).collect();
        let mut norm_max = [norms.iter().copied().fold(0.0, f64::max)];
        group.all_reduce(&mut norm_max, ReduceOp::Max)?;
        let pairs = agreed.pairs();
        let mut training = Training::default();
        let mut columns = Columns::new(samples.len(), agreed.classes.len());
        let mut rhos = Vec::new();
        for (number, &(first, second)) in pairs.iter().enumerate() {
            let label_of = |class: usize| agreed.classes[class];
            let members: Vec<u32> = (0..samples.len() as u32)
                .filter(|sample| [first, second].map(label_of).contains(&labels[*sample as usize]))
                .collect();
            let sign = |sample: &u32| if labels[*sample as usize] == label_of(first) { 1.0 } else { -1.0 };
            let problem = Problem {
                group,
                parameters,
                samples,
                norms: &norms,
                norm_max: norm_max[0],
                features: agreed.features,
                signs: members.iter().map(sign).collect(),
                members: members.clone(),
            };
            let problems = pairs.len();
            let solution = Solver::new(problem)?.solve(&mut |state| {
                observe(&Progress {
                    problem: number,
                    problems,
                    iterations: state.iterations,
                    gap: state.gap,
                    active: state.active,
                    samples: state.samples,
                })
            })?;
            columns.add(&members, &solution, (first, second));
            training.add(&solution);
            rhos.push(solution.rho);
            if solution.outcome == Outcome::Stopped {
                // The other pairs have no solution: their decisions are 0.
                rhos.resize(pairs.len(), 0.0);
                break;
            }
        }
        let mut evaluations = [training.kernel_evaluations];
        group.all_reduce(&mut evaluations, ReduceOp::Sum)?;
        training.kernel_evaluations = evaluations[0];
        columns.model(group, &agreed, samples, labels, parameters.kernel, rhos, training)
    }
}

/// What all ranks have found to be so.
struct Agreed {
    /// Labels, as the model has them: of two the larger one first, of more the smallest.
    classes: Vec<i32>,
    features: u32,
    /// The number of this rank's first sample.
    offset: usize,
}

impl Agreed {
    fn new(
        group: &Group,
        samples: &Samples,
        labels: &[i32],
        parameters: &Parameters,
    ) -> Result<Self, SvmError> {
        let own_error = refusal(samples, labels, parameters);
        // Everything that ranks must know of each other before the first call that depends on it.
        let own = [u64::from(own_error.is_some()), samples.len() as u64, samples.features().into()];
        let digest = parameter_words(parameters);
        let own: Vec<u64> = own.into_iter().chain(digest).collect();
        let mut all = vec![0u64; own.len() * group.world_size() as usize];
        group.all_gather(&own[..], &mut all[..])?;
        if let Some(error) = own_error {
            return Err(error);
        }
        let ranks: Vec<&[u64]> = all.chunks_exact(own.len()).collect();
        if let Some(rank) = ranks.iter().position(|words| words[0] != 0) {
            return Err(SvmError::OtherRank { rank: rank as u32 });
        }
        if let Some(rank) = ranks.iter().position(|words| words[3..] != ranks[0][3..]) {
            return Err(SvmError::ParametersDiffer { rank: rank as u32 });
        }
        let count: u64 = ranks.iter().map(|words| words[1]).sum();
        if count < group.world_size().into() {
            return Err(SvmError::FewSamples { samples: count, ranks: group.world_size() });
        }
        if count >= u32::MAX.into() {
            return Err(SvmError::ManySamples { samples: count });
        }
        let offset: u64 = ranks[..group.rank() as usize].iter().map(|words| words[1]).sum();
        let features = ranks.iter().map(|words| words[2] as u32).max().unwrap_or(0);
        Ok(Self { classes: classes(group, labels)?, features, offset: offset as usize })
    }

    /// The pairs of classes, each a problem.
    fn pairs(&self) -> Vec<(usize, usize)> {
        let count = self.classes.len();
        (0..count).flat_map(|first| (first + 1..count).map(move |second| (first, second))).collect()
    }
}

/// The labels of all ranks.
fn classes(group: &Group, labels: &[i32]) -> Result<Vec<i32>, SvmError> {
    let mut own = labels.to_vec();
    own.sort_unstable();
    own.dedup();
    let mut classes = gather(group, &own)?.items;
    classes.sort_unstable();
    classes.dedup();
    if let [label] = classes[..] {
        return Err(SvmError::OneLabel { label });
    }
    if classes.len() > CLASSES_MAX {
        return Err(SvmError::ManyLabels { classes: classes.len(), max: CLASSES_MAX });
    }
    if classes.len() == 2 {
        classes.reverse();
    }
    Ok(classes)
}

/// What is wrong with a rank's own arguments.
fn refusal(samples: &Samples, labels: &[i32], parameters: &Parameters) -> Option<SvmError> {
    if labels.len() != samples.len() {
        return Some(SvmError::Labels { labels: labels.len(), samples: samples.len() });
    }
    let above = |value: f64| value > 0.0 && value.is_finite();
    let (gamma, offset) = match parameters.kernel {
        Kernel::Linear => (1.0, 0.0),
        Kernel::Rbf { gamma } => (gamma, 0.0),
        Kernel::Polynomial { gamma, offset, .. } | Kernel::Sigmoid { gamma, offset } => (gamma, offset),
    };
    let share = match parameters.shrinking {
        Shrinking::Every { first: FirstCheck::Share(share), .. } => share,
        _ => 1.0,
    };
    let checks = [
        ("C", parameters.c, above(parameters.c), "a number above 0"),
        ("gamma", gamma, above(gamma), "a number above 0"),
        ("the kernel's offset", offset, offset.is_finite(), "a finite number"),
        ("the tolerance", parameters.tolerance, above(parameters.tolerance), "a number above 0"),
        (
            "the share of samples before the first check",
            share,
            above(share) && share <= 1.0,
            "above 0 and at most 1 (100 %)",
        ),
    ];
    let bad = checks.into_iter().find(|(_, _, holds, _)| !holds);
    bad.map(|(name, value, _, range)| SvmError::Parameter { name, value, range })
}

/// All parameters, to be compared with those of other ranks.
fn parameter_words(parameters: &Parameters) -> Vec<u64> {
    let Parameters { kernel, c, tolerance, shrinking, selection, cache_bytes, iterations_max } = parameters;
    let shrinking = match shrinking {
        Shrinking::Never => [0; 3],
        Shrinking::Every { first, reconstruction } => {
            let (kind, number) = match first {
                FirstCheck::Iterations(iterations) => (1, *iterations),
                FirstCheck::Share(share) => (2, share.to_bits()),
            };
            [kind, number, *reconstruction as u64]
        }
    };
    let numbers = [
        c.to_bits(),
        tolerance.to_bits(),
        *selection as u64,
        *cache_bytes as u64,
        iterations_max.unwrap_or(u64::MAX),
    ];
    kernel.bits().into_iter().chain(numbers).chain(shrinking).collect()
}

/// The coefficients of this rank's samples: one against each other class.
struct Columns {
    others: usize,
    /// `others` for each sample.
    coefficients: Vec<f64>,
}

impl Columns {
    fn new(samples: usize, classes: usize) -> Self {
        Self { others: classes - 1, coefficients: vec![0.0; samples * (classes - 1)] }
    }

    /// A sample of the first class has its coefficient against the second in column
    /// `second - 1`, one of the second class in column `first`.
    fn add(&mut self, members: &[u32], solution: &Solution, (first, second): (usize, usize)) {
        let own = &solution.coefficients[solution.offset..][..members.len()];
        for (sample, coefficient) in members.iter().zip(own) {
            if *coefficient != 0.0 {
                let column = if *coefficient > 0.0 { second - 1 } else { first };
                self.coefficients[*sample as usize * self.others + column] = *coefficient;
            }
        }
    }

    /// The model of the support vectors of all ranks, by class and then in their order.
    #[allow(clippy::too_many_arguments)]
    fn model(
        &self,
        group: &Group,
        agreed: &Agreed,
        samples: &Samples,
        labels: &[i32],
        kernel: Kernel,
        rhos: Vec<f64>,
        training: Training,
    ) -> Result<Model, SvmError> {
        let row = |sample: usize| &self.coefficients[sample * self.others..][..self.others];
        let own: Vec<usize> =
            (0..samples.len()).filter(|sample| row(*sample).iter().any(|value| *value != 0.0)).collect();
        let own_numbers: Vec<u32> = own.iter().map(|sample| (agreed.offset + sample) as u32).collect();
        let own_labels: Vec<i32> = own.iter().map(|sample| labels[*sample]).collect();
        let own_coefficients: Vec<f64> = own.iter().flat_map(|sample| row(*sample).iter().copied()).collect();
        let mut words = Vec::new();
        own.iter().for_each(|sample| samples.row(*sample).put_words(&mut words));
        let numbers = gather(group, &own_numbers)?;
        let labels = gather(group, &own_labels)?.items;
        let coefficients = gather(group, &own_coefficients)?.items;
        let words = gather(group, &words)?;
        let vectors = vectors(&words.items, &words.counts, &numbers.counts, agreed.features)?;
        let order: Vec<usize> = {
            let mut order: Vec<usize> = (0..labels.len()).collect();
            let class = |at: &usize| agreed.classes.iter().position(|label| *label == labels[*at]);
            order.sort_by_key(|at| (class(at), numbers.items[*at]));
            order
        };
        let of_class = |label: &i32| labels.iter().filter(|other| *other == label).count();
        Ok(Model {
            kernel,
            class_counts: agreed.classes.iter().map(of_class).collect(),
            classes: agreed.classes.clone(),
            rhos,
            vectors: vectors.pick(order.iter().copied()),
            coefficients: order
                .iter()
                .flat_map(|at| coefficients[at * self.others..][..self.others].iter().copied())
                .collect(),
            numbers: order.iter().map(|at| numbers.items[*at]).collect(),
            features: Some(agreed.features),
            training: Some(training),
        })
    }
}

/// The rows that all ranks sent.
fn vectors(
    words: &[u32],
    word_counts: &[usize],
    row_counts: &[usize],
    features: u32,
) -> Result<Samples, SvmError> {
    let mut vectors = Samples::new(features);
    let mut rest = words;
    for ((rank, words), rows) in (0..).zip(word_counts).zip(row_counts) {
        let (mut own, behind) = rest.split_at(*words);
        for _ in 0..*rows {
            own = vectors.push_words(own).ok_or(SvmError::Malformed { rank })?;
        }
        rest = behind;
    }
    Ok(vectors)
}

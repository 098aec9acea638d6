//! Models: support vectors with their coefficients, and what they predict.

use super::kernel::{Kernel, Query};
use super::samples::Samples;
use super::solver::{Outcome, Solution};

/// A trained machine.
///
/// Two classes make one decision: above 0 it is the larger label. Of more classes each pair makes
/// one, and the class with the most votes is predicted, the smallest of those that have as many.
#[derive(Clone, Debug, PartialEq)]
pub struct Model {
    pub(crate) kernel: Kernel,
    pub(crate) classes: Vec<i32>,
    /// Of each pair of classes.
    pub(crate) rhos: Vec<f64>,
    /// The support vectors of each class stand together, in the order of `classes`.
    pub(crate) class_counts: Vec<usize>,
    pub(crate) vectors: Samples,
    /// Of each support vector, against each other class.
    pub(crate) coefficients: Vec<f64>,
    /// The numbers of the support vectors among the samples. None if the model was read.
    pub(crate) numbers: Vec<u32>,
    /// `None` if the model was read.
    pub(crate) features: Option<u32>,
    pub(crate) training: Option<Training>,
}

/// What training did, over all pairs of classes and all ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct Training {
    /// How the last pair ended that did not converge, or that all have.
    pub outcome: Outcome,
    /// The iterations.
    pub iterations: u64,
    /// Kernel values that were computed.
    pub kernel_evaluations: u64,
    /// How often samples that were left out came back.
    pub reconstructions: u64,
    /// Factors that are at C.
    pub bounded: u64,
    /// The dual objective, which is minimized.
    pub objective: f64,
    /// The largest violation of the conditions that is left.
    pub gap: f64,
    /// Steps along which the kernel was not positive. Where there are any, the solution is one of
    /// several.
    pub negative_curvatures: u64,
}

impl Training {
    pub(crate) fn add(&mut self, solution: &Solution) {
        if solution.outcome != Outcome::Converged {
            self.outcome = solution.outcome;
        }
        self.iterations += solution.iterations;
        self.kernel_evaluations += solution.kernel_evaluations;
        self.reconstructions += solution.reconstructions;
        self.bounded += solution.bounded;
        self.objective += solution.objective;
        self.gap = self.gap.max(solution.gap);
        self.negative_curvatures += solution.negative_curvatures;
    }
}

/// Why nothing is predicted.
#[derive(pleach_derive::ErrorDebug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PredictError {
    /// The samples have features that those of the training did not have.
    #[error(
        "the samples have {samples} features, the model was trained with {model}; give samples with the same features"
    )]
    Features {
        /// Of the samples.
        samples: u32,
        /// Of the model.
        model: u32,
    },
}

impl Model {
    /// The labels, in the order of [`Model::intercepts`]: of two the larger one first, of more the
    /// smallest one first. A model that was read has the order of its file.
    #[must_use]
    pub fn labels(&self) -> &[i32] {
        &self.classes
    }

    /// The number of support vectors.
    #[must_use]
    pub fn support_vectors(&self) -> usize {
        self.vectors.len()
    }

    /// The support vectors, those of each class together, in the order of [`Model::labels`].
    #[must_use]
    pub fn vectors(&self) -> &Samples {
        &self.vectors
    }

    /// How many support vectors each class has.
    #[must_use]
    pub fn class_counts(&self) -> &[usize] {
        &self.class_counts
    }

    /// The numbers of the support vectors among the samples of all ranks; none if the model was
    /// read from a file.
    #[must_use]
    pub fn support(&self) -> &[u32] {
        &self.numbers
    }

    /// The coefficients of a support vector: its factor times 1 or -1, against each other class.
    ///
    /// # Panics
    ///
    /// If there is no support vector of this number.
    #[must_use]
    pub fn coefficients(&self, vector: usize) -> &[f64] {
        let others = self.classes.len() - 1;
        &self.coefficients[vector * others..][..others]
    }

    /// What is added to the sum over the support vectors, for each pair of classes: first with
    /// second, first with third, and so on.
    #[must_use]
    pub fn intercepts(&self) -> Vec<f64> {
        self.rhos.iter().map(|rho| -rho).collect()
    }

    /// The kernel.
    #[must_use]
    pub fn kernel(&self) -> Kernel {
        self.kernel
    }

    /// What training did; `None` if the model was read from a file.
    #[must_use]
    pub fn training(&self) -> Option<&Training> {
        self.training.as_ref()
    }

    /// The labels of these samples.
    ///
    /// # Errors
    ///
    /// See [`PredictError`].
    pub fn predict(&self, samples: &Samples) -> Result<Vec<i32>, PredictError> {
        let pairs = self.rhos.len();
        let vote = |decisions: &[f64]| {
            let count = self.classes.len();
            let mut votes = vec![0u32; count];
            let pairs = (0..count).flat_map(|first| (first + 1..count).map(move |second| (first, second)));
            for ((first, second), decision) in pairs.zip(decisions) {
                votes[if *decision > 0.0 { first } else { second }] += 1;
            }
            let most = votes.iter().copied().max().unwrap_or(0);
            let best = votes.iter().position(|votes| *votes == most).unwrap_or(0);
            self.classes[best]
        };
        Ok(self.decisions(samples)?.chunks_exact(pairs).map(vote).collect())
    }

    /// The share of these samples whose label is predicted.
    ///
    /// # Errors
    ///
    /// See [`PredictError`].
    pub fn accuracy(&self, samples: &Samples, labels: &[i32]) -> Result<f64, PredictError> {
        let predicted = self.predict(samples)?;
        let right = predicted.iter().zip(labels).filter(|(predicted, label)| predicted == label).count();
        Ok(right as f64 / labels.len().max(1) as f64)
    }

    /// The decision of each pair of classes for each sample, sample by sample: above 0 is a vote
    /// for the first of the pair.
    ///
    /// # Errors
    ///
    /// See [`PredictError`].
    pub fn decisions(&self, samples: &Samples) -> Result<Vec<f64>, PredictError> {
        if let Some(model) = self.features
            && samples.features() > model
        {
            return Err(PredictError::Features { samples: samples.features(), model });
        }
        let norms: Vec<f64> = (0..self.vectors.len()).map(|vector| self.vectors.row(vector).norm()).collect();
        let all: Vec<u32> = (0..self.vectors.len() as u32).collect();
        let mut query = Query::new(samples.features().max(self.vectors.features()));
        let mut values = vec![0.0; all.len()];
        let mut decisions = Vec::with_capacity(samples.len() * self.rhos.len());
        for sample in 0..samples.len() {
            query.set(samples.row(sample));
            query.fill(self.kernel, &self.vectors, &all, |at| norms[at], &mut values);
            self.decide(&values, &mut decisions);
        }
        Ok(decisions)
    }

    /// Adds the decisions of all pairs for a sample with these kernel values.
    fn decide(&self, values: &[f32], decisions: &mut Vec<f64>) {
        let others = self.classes.len() - 1;
        let starts: Vec<usize> = self
            .class_counts
            .iter()
            .scan(0, |end, count| {
                let start = *end;
                *end += count;
                Some(start)
            })
            .collect();
        let sum = |class: usize, column: usize| {
            let vectors = starts[class]..starts[class] + self.class_counts[class];
            let term =
                |vector: usize| self.coefficients[vector * others + column] * f64::from(values[vector]);
            vectors.map(term).sum::<f64>()
        };
        let count = self.classes.len();
        let pairs = (0..count).flat_map(|first| (first + 1..count).map(move |second| (first, second)));
        for ((first, second), rho) in pairs.zip(&self.rhos) {
            decisions.push(sum(first, second - 1) + sum(second, first) - rho);
        }
    }
}

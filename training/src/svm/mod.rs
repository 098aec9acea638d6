//! A support vector machine, trained by sequential minimal optimization over the ranks of a group.
//!
//! Each rank holds some samples, the first ones on rank 0. An iteration changes the factors of two
//! samples. The ranks find the pair by one all-gather of a few bytes (two for
//! [`Selection::Second`]), the owner of a sample broadcasts it where its kernel row is not kept,
//! and each rank makes the rows for its own samples and updates their errors. Samples that seem to
//! stay at their bound are left out (*shrinking*). Their errors are made anew from all support
//! vectors, which travel around the ranks in a ring, before the solver may say that it has
//! converged.
//!
//! * [`Samples`], [`libsvm`]: rows, and the text forms of LIBSVM.
//! * `wide`, `kernel`, `sum`: the arithmetic. `cache`: kernel rows that are kept.
//! * `exchange`: the messages of an iteration. `solver`: one problem of two classes.
//! * `train`: several classes, and the model. [`Model`]: predictions.
//!
//! **Invariants:**
//!
//! * The solution has the same bits on any number of ranks, over any fabric and on any machine: the
//!   collectives move values and add none, and sums over samples are made in the order of samples
//!   or are exact ([`sum`]).
//! * All ranks decide alike in each iteration, since they decide by what all have received. So no
//!   rank waits for one that has ended. What a rank finds out alone travels with the next exchange.
//! * Convergence is declared on all samples only.
//!
//! ```
//! use pleach_collectives::{Group, Options};
//! use pleach_training::svm::{Kernel, Parameters, Samples, Svm};
//! # use pleach_transport::rendezvous::World;
//! # let options = Options::new(World::alone());
//! let group = Group::join(&options)?;
//! let mut samples = Samples::new(2);
//! samples.push_dense(&[0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 1.0, 1.0], 2)?;
//! let parameters = Parameters { c: 10.0, ..Parameters::new(Kernel::Rbf { gamma: 1.0 }) };
//! let model = Svm::train(&group, &samples, &[-1, 1, 1, -1], &parameters)?;
//! assert_eq!(model.predict(&samples)?, [-1, 1, 1, -1]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod cache;
mod error;
mod exchange;
mod kernel;
pub mod libsvm;
mod model;
#[cfg(test)]
mod oracle;
mod reconstruct;
mod samples;
mod shrinking;
mod solver;
mod sum;
#[cfg(test)]
mod tests;
mod train;
mod wide;

pub use error::SvmError;
pub use kernel::Kernel;
pub use model::{Model, PredictError, Training};
pub use samples::{FEATURES_MAX, FeatureError, Samples};
pub use shrinking::{FirstCheck, Reconstruction, Shrinking, ShrinkingTextError};
pub use solver::Outcome;
pub use train::{Progress, Svm};

/// How a support vector machine is trained; the same on all ranks.
#[derive(Clone, Debug, PartialEq)]
pub struct Parameters {
    /// How samples are compared.
    pub kernel: Kernel,
    /// The penalty of a sample on the wrong side, and the largest factor of a sample: above 0.
    pub c: f64,
    /// The solver has converged when the largest violation of the conditions of optimality is below
    /// this: above 0.
    pub tolerance: f64,
    /// Which samples are left out, and when they come back.
    pub shrinking: Shrinking,
    /// How a pair of samples is chosen.
    pub selection: Selection,
    /// The bytes of kernel rows that a rank keeps. All ranks keep as many rows.
    pub cache_bytes: usize,
    /// The solver ends after so many iterations for a pair of classes, converged or not. Unless
    /// changed it is 100 for each sample, and at least ten million.
    pub iterations_max: Option<u64>,
}

impl Parameters {
    /// The usual parameters with this kernel: those of LIBSVM, with shrinking after 5 % of the
    /// samples.
    #[must_use]
    pub fn new(kernel: Kernel) -> Self {
        Self {
            kernel,
            c: 1.0,
            tolerance: 1e-3,
            shrinking: Shrinking::default(),
            selection: Selection::default(),
            cache_bytes: 200 << 20,
            iterations_max: None,
        }
    }
}

/// How a pair of samples is chosen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Selection {
    /// The pair that violates the conditions most (Keerthi et al., modification 2): one exchange an
    /// iteration.
    First,
    /// The sample that violates most, and the one that gains most with it (Fan et al., LIBSVM): two
    /// exchanges an iteration, and fewer iterations.
    #[default]
    Second,
}

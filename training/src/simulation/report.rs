//! What a simulation is given, and what it tells.

use std::time::Duration;

use pleach_collectives::Rank;

use super::computing::Computing;
use crate::interpreter::Staleness;

/// What is simulated, besides the learner and the scheme.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Settings {
    /// The number of ranks, at least 1.
    pub ranks: u32,
    /// The steps of each rank.
    pub steps: u64,
    /// The seed of computing times.
    pub seed: u64,
    /// How long ranks compute.
    pub computing: Computing,
    /// The learning rate of local optimizers.
    pub learning_rate: f32,
    /// The momentum of local optimizers.
    pub momentum: f32,
    /// Steps of rank 0 between two observations, at least 1.
    pub observed_every: u64,
}

/// The state of a simulation at an instant.
#[derive(Debug)]
pub struct Observation<'a> {
    /// Virtual time since the beginning.
    pub time: Duration,
    /// The step that rank 0 makes next.
    pub step: u64,
    /// The mean of all ranks' parameters.
    pub parameters: &'a [f32],
    /// The mean staleness of all steps so far.
    pub staleness: f64,
    /// The share of time so far in which ranks had nothing to compute.
    pub wait_share: f64,
}

/// A finished simulation.
#[derive(Clone, Debug, PartialEq)]
pub struct Simulated {
    /// Virtual time.
    pub time: Duration,
    /// The mean of all ranks' parameters.
    pub parameters: Vec<f32>,
    /// The steps of each rank; of rank 0, if it was broken off.
    pub steps: u64,
    /// Whether it came to its end.
    pub has_ended: bool,
    /// The rank that has ended before the others, by
    /// [`Fault::RankDeath`](super::faults::Fault::RankDeath), and the step that it did not make.
    /// The others have made all their steps, if the simulation was not broken off, and the last
    /// exchange was not made. What is said of all ranks is said of the others.
    pub lost: Option<(Rank, u64)>,
    /// The share of time in which ranks had nothing to compute.
    pub wait_share: f64,
    /// The mean staleness of all steps ([`Staleness`]).
    pub staleness_mean: f64,
    /// The largest staleness.
    pub staleness_max: u64,
    /// How many steps of all ranks were as stale as each bin says
    /// ([`Staleness::histogram`](crate::interpreter::Staleness::histogram)).
    pub staleness_histogram: [u64; Staleness::BOUNDS.len() + 1],
    /// Bytes of the vectors that a rank gave to be averaged, read and wrote.
    pub bytes_per_rank: u64,
    /// Whether ranks were the same wherever the scheme says so, and conserved what it conserves; of
    /// a simulation that was broken off only the latter.
    pub guarantee_held: bool,
    /// Whether all ranks have the same parameters at the end, bit for bit.
    pub parameters_equal: bool,
    /// A hash of all ranks' parameters and of the virtual time.
    pub hash: u64,
}

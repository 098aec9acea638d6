//! What a simulation is given, and what it tells.

use std::time::Duration;

use pleach_collectives::Rank;
use pleach_transport::clock::Nanos;
use pleach_vocabulary::digest::chain;

use super::computing::Computing;
use super::rank::SimulatedRank;
use crate::interpreter::{Staleness, digest};
use crate::policy::Vector;

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
    /// What people are to be told of the scheme's values, if there is something.
    pub remark: Option<String>,
    /// A hash of all ranks' parameters and of the virtual time.
    pub hash: u64,
}

impl Simulated {
    /// Of these ranks, at this instant.
    pub(crate) fn of(
        ranks: &mut [SimulatedRank],
        settings: &Settings,
        parameters: usize,
        now: Nanos,
        has_ended: bool,
    ) -> Self {
        let all = 0..parameters;
        let digests = ranks.iter_mut().map(|rank| digest(rank.piece(Vector::Parameters, &all)));
        let digests: Vec<u64> = digests.collect();
        let parameters = mean(ranks, parameters);
        let ranks = &*ranks;
        let agreement = ranks[0].agreement();
        let is_equal = survivors(ranks).all(|rank| digests[rank.number() as usize] == digests[0]);
        Self {
            time: now.since(Nanos::ZERO),
            parameters,
            steps: if has_ended { settings.steps } else { ranks[0].step() },
            has_ended,
            lost: lost(ranks),
            wait_share: wait_share(ranks, now),
            staleness_mean: staleness_mean(ranks),
            staleness_max: survivors(ranks).map(|rank| rank.staleness().most()).max().unwrap_or(0),
            staleness_histogram: survivors(ranks).fold([0; Staleness::BOUNDS.len() + 1], |mut sums, rank| {
                sums.iter_mut().zip(rank.staleness().histogram()).for_each(|(sum, steps)| *sum += steps);
                sums
            }),
            bytes_per_rank: ranks[0].bytes(),
            guarantee_held: ranks.iter().all(|rank| !rank.agreement().is_broken)
                && (!has_ended || ranks.iter().all(|rank| rank.agreement() == agreement)),
            parameters_equal: is_equal,
            remark: ranks[0].remark(),
            hash: digests.into_iter().fold(now.0, chain),
        }
    }
}

/// The rank that has ended, and the step before which it did.
pub(crate) fn lost(ranks: &[SimulatedRank]) -> Option<(Rank, u64)> {
    ranks.iter().find(|rank| rank.is_lost()).map(|rank| (rank.number(), rank.step()))
}

/// All ranks but one that has ended.
pub(crate) fn survivors(ranks: &[SimulatedRank]) -> impl Iterator<Item = &SimulatedRank> {
    ranks.iter().filter(|rank| !rank.is_lost())
}

/// The mean of all ranks' parameters, of which there are so many.
pub(crate) fn mean(ranks: &mut [SimulatedRank], parameters: usize) -> Vec<f32> {
    let all = 0..parameters;
    let mut sum = vec![0.0_f64; all.len()];
    for rank in ranks.iter_mut().filter(|rank| !rank.is_lost()) {
        let parameters = rank.piece(Vector::Parameters, &all);
        sum.iter_mut().zip(parameters).for_each(|(sum, element)| *sum += f64::from(*element));
    }
    let ranks = survivors(ranks).count() as f64;
    sum.into_iter().map(|sum| (sum / ranks) as f32).collect()
}

pub(crate) fn staleness_mean(ranks: &[SimulatedRank]) -> f64 {
    let means = survivors(ranks).map(|rank| rank.staleness().mean());
    means.sum::<f64>() / survivors(ranks).count() as f64
}

pub(crate) fn wait_share(ranks: &[SimulatedRank], now: Nanos) -> f64 {
    let computing: f64 = survivors(ranks).map(|rank| rank.computing(now).as_secs_f64()).sum();
    let all = now.since(Nanos::ZERO).as_secs_f64() * survivors(ranks).count() as f64;
    if all > 0.0 { 1.0 - computing / all } else { 0.0 }
}

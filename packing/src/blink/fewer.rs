//! Few trees instead of many thin ones (Blink, MLSys 2020, section 3.2.1).
//!
//! Of the candidates that the weights found, an integer program chooses those that go at the rate
//! of one link each, as many as fit. Where that is more than a threshold below what the weights had
//! reached, more and more of them (1, 2, 4 and so on, the heaviest first: the paper does not say
//! which) may carry any share, until it is not. When all may, it is a linear program; and should
//! even that fail, the weights stay as they were.
//!
//! **Invariant:** what comes out fits exactly: the solver's numbers are made rationals with one
//! small denominator, and divided by the largest overload that is left.

use std::time::Duration;

use good_lp::solvers::microlp::microlp;
use good_lp::{Expression, ProblemVariables, Solution as _, SolverModel as _, WithTimeLimit as _, variable};

use super::weights::{Candidate, Network};
use crate::Rate;

/// How many candidates the program may choose from: those with the largest weights. Beyond that the
/// solver takes minutes.
const CANDIDATES_MAX: usize = 96;

/// Denominators that are tried before weights are rounded down.
const DENOMINATORS: std::ops::RangeInclusive<i128> = 1..=360;

/// The denominator of weights that are rounded down.
const DENOMINATOR_FINE: i128 = 1 << 20;

/// By how much a solver's number may miss the rational that it stands for.
const MISS: f64 = 1e-6;

/// Each candidate's weight, zero for most, in the unit of capacities. `capacities` are those of the
/// network, exactly.
pub(super) fn few(
    network: &Network,
    capacities: &[Rate],
    candidates: &[Candidate],
    threshold: f64,
    time_limit: Duration,
) -> Vec<Rate> {
    let rate: f64 = candidates.iter().map(|candidate| candidate.weight).sum();
    let chosen = &candidates[..candidates.len().min(CANDIDATES_MAX)];
    let mut shared = 0;
    loop {
        if let Some(weights) = program(network, chosen, shared, time_limit) {
            let weights = exact(capacities, chosen, &weights);
            let reached: Rate = weights.iter().sum();
            if to_f64(reached) >= (1.0 - threshold) * rate {
                return weights;
            }
        }
        if shared >= chosen.len() {
            let weights: Vec<f64> = candidates.iter().map(|candidate| candidate.weight).collect();
            return exact(capacities, candidates, &weights);
        }
        shared = (2 * shared).max(1).min(chosen.len());
    }
}

/// The most that the candidates carry when all but the first `shared` carry one or nothing.
fn program(
    network: &Network,
    candidates: &[Candidate],
    shared: usize,
    time_limit: Duration,
) -> Option<Vec<f64>> {
    let mut variables = ProblemVariables::new();
    let weights: Vec<_> = (0..candidates.len())
        .map(|index| variables.add(if index < shared { variable().min(0.0) } else { variable().binary() }))
        .collect();
    let all: Expression = weights.iter().sum();
    let mut loads: Vec<Expression> = vec![Expression::from(0.0); network.capacities.len()];
    for (candidate, &weight) in candidates.iter().zip(&weights) {
        for &resource in &candidate.resources {
            loads[resource] += weight;
        }
    }
    let mut model = variables.maximise(all).using(microlp).with_time_limit(time_limit.as_secs_f64());
    for (load, &capacity) in loads.into_iter().zip(&network.capacities) {
        model = model.with(load.leq(capacity));
    }
    let solution = model.solve().ok()?;
    Some(weights.into_iter().map(|weight| solution.value(weight)).collect())
}

/// Rationals near the weights, scaled down by the largest overload.
fn exact(capacities: &[Rate], candidates: &[Candidate], weights: &[f64]) -> Vec<Rate> {
    let near = |denominator: i128| {
        let close = |&weight: &f64| {
            let scaled = weight * denominator as f64;
            (scaled - scaled.round()).abs() <= MISS * denominator as f64
        };
        weights.iter().all(close)
    };
    let neat = DENOMINATORS.into_iter().find(|&denominator| near(denominator));
    let whole = |&weight: &f64| match neat {
        Some(denominator) => (weight * denominator as f64).round().max(0.0) as i128,
        None => (weight * DENOMINATOR_FINE as f64).floor().max(0.0) as i128,
    };
    let denominator = neat.unwrap_or(DENOMINATOR_FINE);
    let weights: Vec<i128> = weights.iter().map(whole).collect();
    let mut loads = vec![0_i128; capacities.len()];
    for (candidate, weight) in candidates.iter().zip(&weights) {
        for &resource in &candidate.resources {
            loads[resource] += weight;
        }
    }
    let loads = loads.into_iter().zip(capacities);
    let overload = loads.map(|(load, capacity)| Rate::new(load, denominator) / capacity).max();
    let overload = overload.unwrap_or_default().max(Rate::from(1));
    weights.into_iter().map(|weight| Rate::new(weight, denominator) / overload).collect()
}

fn to_f64(rate: Rate) -> f64 {
    *rate.numer() as f64 / *rate.denom() as f64
}

//! Nearly optimal weights by many small steps (Garg and Könemann 1998; Blink, MLSys 2020,
//! section 3.2).
//!
//! Every resource (a link, or both directions of one) has a length. Again and again the shortest
//! tree is taken, its weight grows by its scarcest capacity, and what it uses grows longer, so that
//! the next tree goes elsewhere. In the end all weights are divided by the largest overload. The
//! result is at least 1 - O(ε) of the optimum.
//!
//! The textbook starts with lengths of `(1+ε)((1+ε)m)^(-1/ε)/c`, 10⁻³³ for small ε, which is where
//! floating point breaks. Only ratios of lengths choose a tree, so here they start at 1/c, are
//! divided by the largest when that gets large, and the factor to the textbook's is kept as a
//! logarithm.

use std::collections::BTreeMap;

use super::arborescence::{Arc, shortest};

/// When lengths are divided by the largest.
const LENGTH_MAX: f64 = 1e100;

/// How many tree edges are looked at in all before the weights have to be good enough: about a
/// second.
const WORK_MAX: u64 = 400_000_000;

/// Ranks, arcs and what arcs use.
#[derive(Clone, Debug)]
pub(super) struct Network {
    pub(super) ranks: usize,
    pub(super) root: usize,
    pub(super) arcs: Vec<Arc>,
    /// Of every arc.
    pub(super) resources: Vec<usize>,
    /// Of every resource.
    pub(super) capacities: Vec<f64>,
}

/// A tree as the resources that it uses, each once, in order; and the arcs by which it was found
/// first.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Candidate {
    pub(super) resources: Vec<usize>,
    pub(super) arcs: Vec<usize>,
    pub(super) weight: f64,
}

/// Trees and their weights, which no capacity is less than; the heaviest first. Empty where no tree
/// spans.
pub(super) fn multiplicative(network: &Network, epsilon: f64) -> Vec<Candidate> {
    let resources = network.capacities.len();
    let mut lengths: Vec<f64> = network.capacities.iter().map(|capacity| capacity.recip()).collect();
    // Logarithm of the factor from these lengths to the textbook's.
    let mut factor = (1.0 + epsilon).ln() - ((1.0 + epsilon) * resources as f64).ln() / epsilon;
    let mut found: BTreeMap<Vec<usize>, (Vec<usize>, f64)> = BTreeMap::new();
    let mut work = 0;
    while work < WORK_MAX {
        work += (network.ranks * network.arcs.len()).max(1) as u64;
        let arc_lengths: Vec<f64> = network.resources.iter().map(|&resource| lengths[resource]).collect();
        let Some(arcs) = shortest(network.ranks, network.root, &network.arcs, &arc_lengths) else { break };
        let length: f64 = arcs.iter().map(|&arc| arc_lengths[arc]).sum();
        if factor + length.ln() >= 0.0 {
            break;
        }
        let mut used: Vec<usize> = arcs.iter().map(|&arc| network.resources[arc]).collect();
        used.sort_unstable();
        let least = used.iter().map(|&resource| network.capacities[resource]).fold(f64::INFINITY, f64::min);
        for &resource in &used {
            lengths[resource] *= 1.0 + epsilon * least / network.capacities[resource];
        }
        found.entry(used).or_insert((arcs, 0.0)).1 += least;
        let longest = lengths.iter().copied().fold(0.0, f64::max);
        if longest > LENGTH_MAX {
            lengths.iter_mut().for_each(|length| *length /= longest);
            factor += longest.ln();
        }
    }
    within_capacity(network, found)
}

fn within_capacity(network: &Network, found: BTreeMap<Vec<usize>, (Vec<usize>, f64)>) -> Vec<Candidate> {
    let mut loads = vec![0.0; network.capacities.len()];
    for (resources, (_, weight)) in &found {
        for &resource in resources {
            loads[resource] += weight;
        }
    }
    let overload = loads.iter().zip(&network.capacities).map(|(load, capacity)| load / capacity);
    let overload = overload.fold(0.0, f64::max);
    let candidate = |(resources, (arcs, weight))| Candidate { resources, arcs, weight: weight / overload };
    let mut candidates: Vec<_> = found.into_iter().map(candidate).collect();
    candidates.sort_by(|one, other| other.weight.total_cmp(&one.weight));
    candidates
}

//! Trees over links that join ranks directly: weights by many small steps, then few of the trees.

use std::collections::BTreeMap;

use pleach_vocabulary::{Collective, Rank};

use super::arborescence::Arc;
use super::weights::{Network, multiplicative};
use super::{BlinkError, BlinkOptions, fewer};
use crate::Rate;
use crate::shape::{Shape, Way, Weighted};
use crate::topology::{NodeId, Topology};

/// The trees of a topology without switches, and their weights in bytes a second.
///
/// Broadcast uses each direction of a link by itself; every other collective here goes up and down
/// the same tree, which uses both.
pub(super) fn shapes(
    topology: &Topology,
    collective: Collective,
    root: Rank,
    options: &BlinkOptions,
) -> Result<Vec<Weighted>, BlinkError> {
    let one_way = matches!(collective, Collective::Broadcast { .. });
    let links = links(topology, one_way);
    // Trees of weight one have the bandwidth of the slowest link.
    let unit = links.iter().map(|link| link.bytes_per_s).min().unwrap_or(1);
    let capacities: Vec<Rate> =
        links.iter().map(|link| Rate::new(i128::from(link.bytes_per_s), i128::from(unit))).collect();
    let (mut arcs, mut resources) = (Vec::new(), Vec::new());
    for (index, link) in links.iter().enumerate() {
        arcs.push(Arc { from: link.from as usize, to: link.to as usize });
        resources.push(index);
        if !one_way {
            arcs.push(Arc { from: link.to as usize, to: link.from as usize });
            resources.push(index);
        }
    }
    let network = Network {
        ranks: topology.ranks() as usize,
        root: root as usize,
        arcs,
        resources,
        capacities: links.iter().map(|link| link.bytes_per_s as f64 / unit as f64).collect(),
    };
    let candidates = multiplicative(&network, options.epsilon);
    if candidates.is_empty() {
        // Every topology is connected, but perhaps not by links that go both ways.
        return Err(BlinkError::Unjoined { from: root, to: Rank::from(root == 0) });
    }
    let weights = fewer::few(&network, &capacities, &candidates, options.threshold, options.time_limit);
    let none = Rate::default();
    let chosen = candidates.into_iter().zip(weights).filter(|(_, weight)| *weight > none);
    let weighted = chosen.map(|(candidate, weight)| {
        let ways = candidate.arcs.iter().map(|&arc| {
            let Arc { from, to } = network.arcs[arc];
            let (from, to) = (from as Rank, to as Rank);
            Way { from, to, hops: vec![topology.node(from), topology.node(to)] }
        });
        let weight = weight * Rate::from(i128::from(unit));
        Weighted { shape: Shape { ways: ways.collect() }, top: root, weight }
    });
    Ok(weighted.collect())
}

/// A link between ranks, in one direction or as much as it carries in both.
struct Joint {
    from: Rank,
    to: Rank,
    bytes_per_s: u64,
}

fn links(topology: &Topology, one_way: bool) -> Vec<Joint> {
    let mut joints: BTreeMap<(NodeId, NodeId), Joint> = BTreeMap::new();
    for link in topology.links() {
        let (Some(from), Some(to)) = (topology.rank(link.from), topology.rank(link.to)) else { continue };
        if one_way {
            joints.insert((link.from, link.to), Joint { from, to, bytes_per_s: link.bytes_per_s });
        } else if let Some(back) = topology.link(link.to, link.from).filter(|_| from < to) {
            let bytes_per_s = link.bytes_per_s.min(back.bytes_per_s);
            joints.insert((link.from, link.to), Joint { from, to, bytes_per_s });
        }
    }
    joints.into_values().collect()
}

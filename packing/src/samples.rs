//! Random graphs for tests, and their properties by enumeration.

use super::Rate;
use super::digraph::Digraph;
use super::flow::Amount;
use super::rate::signed;
use crate::topology::{LATENCY_NS, NodeId, NodeKind, Topology};
pub(crate) use pleach_vocabulary::random::Random;

/// A capacity: usually small, sometimes large and odd.
fn capacity(random: &mut Random) -> Amount {
    let large = if random.below(16) == 0 { 1_000_003 } else { 1 };
    Amount::from(1 + random.below(6)) * large
}

/// The condition on links.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Links {
    /// Every link has a reverse link of the same capacity.
    Duplex,
    /// Links may be in one direction only, but as much enters as leaves every switch: links lie on
    /// cycles.
    Balanced,
    /// Any links.
    Any,
}

/// A graph in which all ranks reach each other, with 2 to `ranks_max` ranks and at most
/// `switches_max` switches. Nodes are shuffled.
pub(crate) fn graph(random: &mut Random, ranks_max: u64, switches_max: u64, links: Links) -> Digraph {
    loop {
        let ranks = 2 + random.below(ranks_max - 1);
        let nodes = ranks + random.below(switches_max + 1);
        let mut order: Vec<usize> = (0..nodes as usize).collect();
        for place in 1..order.len() {
            order.swap(place, random.below(place as u64 + 1) as usize);
        }
        let mut edges = Vec::new();
        for _ in 0..nodes + random.below(nodes + 2) {
            let length = if links == Links::Balanced { 2 + random.below(3) } else { 2 };
            let cycle: Vec<usize> = (0..length).map(|_| random.below(nodes) as usize).collect();
            let capacity = capacity(random);
            edges.push((cycle[0], cycle[1], capacity));
            match links {
                Links::Duplex => edges.push((cycle[1], cycle[0], capacity)),
                Links::Any => {}
                Links::Balanced => {
                    let next = cycle[1..].iter().zip(cycle[2..].iter().chain([&cycle[0]]));
                    edges.extend(next.map(|(&from, &to)| (from, to, capacity)));
                }
            }
        }
        let graph = Digraph::new(nodes as usize, order[..ranks as usize].to_vec(), edges);
        if best_by_enumeration(&graph, &vec![1; ranks as usize]) > Rate::from_integer(0) {
            return graph;
        }
    }
}

/// Demands; at least one demand is not zero.
pub(crate) fn demand(random: &mut Random, graph: &Digraph) -> Vec<Amount> {
    let ranks = graph.ranks().len();
    let mut demand: Vec<Amount> = match random.below(3) {
        0 => vec![1; ranks],
        1 => vec![0; ranks],
        _ => (0..ranks).map(|_| Amount::from(random.below(4))).collect(),
    };
    if demand.iter().all(|&amount| amount == 0) {
        demand[random.below(ranks as u64) as usize] = 1;
    }
    demand
}

/// The best rate by enumeration: the least capacity out of a set for each unit of demand in the
/// set, over all sets that lack a rank.
pub(crate) fn best_by_enumeration(graph: &Digraph, demand: &[Amount]) -> Rate {
    let mut least: Option<Rate> = None;
    for set in 0..1_u32 << graph.nodes() {
        let is_inside = |node: usize| set >> node & 1 == 1;
        let ranks = graph.ranks().iter().zip(demand);
        let inside: Amount = ranks.filter(|(rank, _)| is_inside(**rank)).map(|(_, amount)| amount).sum();
        if inside > 0 && graph.ranks().iter().any(|&rank| !is_inside(rank)) {
            let rate = Rate::new(signed(graph.leaving(is_inside)), signed(inside));
            least = Some(least.map_or(rate, |least| least.min(rate)));
        }
    }
    least.expect("two ranks and some demand")
}

/// A graph as a topology with the same numbers of nodes; ranks stay in their order.
pub(crate) fn topology(graph: &Digraph) -> Topology {
    let mut builder = Topology::builder();
    let switches = graph.switches();
    for node in 0..graph.nodes() {
        let kind = if switches.contains(&node) { NodeKind::Switch } else { NodeKind::Rank };
        builder.node(format!("n{node}"), kind);
    }
    for &(from, to, capacity) in graph.edges() {
        builder.link(NodeId(from as u32), NodeId(to as u32), capacity as u64, LATENCY_NS);
    }
    builder.build().expect("all ranks reach each other")
}

/// A random topology, or `None` if its ranks do not reach each other. Nodes are the ranks, then the
/// switches.
pub(crate) fn random_topology(
    random: &mut Random,
    ranks: usize,
    switches: usize,
    symmetric: bool,
) -> Option<Topology> {
    let mut builder = Topology::builder();
    let mut nodes: Vec<NodeId> = (0..ranks).map(|rank| builder.rank(format!("r{rank}"))).collect();
    nodes.extend((0..switches).map(|switch| builder.switch(format!("s{switch}"))));
    let density = 1 + random.below(4);
    for (place, &one) in nodes.iter().enumerate() {
        for &other in &nodes[..place] {
            if random.below(5) < density {
                let there = 1 + random.below(7);
                let back = if symmetric { there } else { 1 + random.below(7) };
                builder.link(one, other, there, LATENCY_NS);
                builder.link(other, one, back, LATENCY_NS);
            }
        }
    }
    builder.build().ok()
}

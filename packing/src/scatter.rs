//! Scatter and gather: a flow of one block for each rank.
//!
//! Nothing is copied or combined, so these are flows. The root sends the same amount to every other
//! rank, and the optimum is N·min `B⁺(S)` / ranks outside S over sets S with the root. Newton's
//! method on violated cuts finds it, as for trees. For this, a sink takes the same amount from
//! every rank. The last flow is decomposed into paths. Gather is packed on reversed links, and its
//! paths are reversed.

use pleach_vocabulary::{Collective, Rank};

use super::digraph::Digraph;
use super::directed::certificate;
use super::flow::{Amount, ArcId, Network};
use super::rate::{Bottleneck, signed};
use super::{Edge, Packing, Path, Rate, Tree};
use crate::topology::{NodeId, Topology};

/// Packs the paths of every block from the root, or to the root for gather. The root's own block is
/// an entry without edges.
///
/// # Panics
///
/// When there are fewer than two ranks, the root is none of them, or `collective` is another one.
#[must_use]
pub(crate) fn pack_scatter(topology: &Topology, collective: Collective) -> Packing {
    let (root, is_towards) = match collective {
        Collective::Scatter { root } => (root, false),
        Collective::Gather { root } => (root, true),
        _ => panic!("{collective} does not go over paths"),
    };
    let (graph, unit) = Digraph::of(topology);
    let graph = if is_towards { graph.reversed() } else { graph };
    let mut blocks = ScatterNetwork::new(&graph, root as usize);
    let best = blocks.solve();
    let unit = Rate::from_integer(signed(unit));
    let block = best.rate * unit;
    let mut trees = vec![Tree { root, weight: block, edges: Vec::new() }];
    let one = unit / Rate::from_integer(*best.rate.denom());
    for (nodes, amount) in blocks.paths() {
        let weight = one * Rate::from_integer(signed(amount));
        let mut path = Tree { root, weight, edges: edges(topology, &nodes, weight) };
        if is_towards {
            path.turn();
        }
        trees.push(path);
    }
    let rate = block * Rate::from_integer(topology.ranks().into());
    Packing { collective, rate, bound: rate, certificate: certificate(best), trees }
}

/// The edges of a path: one from each rank on it to the next.
fn edges(topology: &Topology, nodes: &[usize], weight: Rate) -> Vec<Edge> {
    let rank = |node: usize| topology.rank(NodeId(node as u32));
    let mut edges = Vec::new();
    let mut from: Option<(Rank, usize)> = None;
    for (place, &node) in nodes.iter().enumerate() {
        if let Some(to) = rank(node) {
            if let Some((from, begin)) = from {
                let hops = nodes[begin..=place].iter().map(|&node| NodeId(node as u32)).collect();
                edges.push(Edge { from, to, paths: vec![Path { hops, weight }] });
            }
            from = Some((to, place));
        }
    }
    edges
}

/// A graph with a sink that takes the same amount from each rank but the root.
struct ScatterNetwork<'graph> {
    graph: &'graph Digraph,
    network: Network,
    root: usize,
    sink: usize,
    /// The arc of each edge, in the order of the edges.
    arcs: Vec<ArcId>,
    /// Every rank but the root, with its arc to the sink.
    sink_arcs: Vec<(usize, ArcId)>,
}

impl<'graph> ScatterNetwork<'graph> {
    fn new(graph: &'graph Digraph, root: usize) -> Self {
        let mut network = Network::new(graph.nodes() + 1);
        let (root, sink) = (graph.ranks()[root], graph.nodes());
        let arcs = graph.edges().iter().map(|&(from, to, _)| network.add(from, to, 0, 0)).collect();
        let others = graph.ranks().iter().filter(|&&rank| rank != root);
        let sink_arcs = others.map(|&rank| (rank, network.add(rank, sink, 0, 0))).collect();
        Self { graph, network, root, sink, arcs, sink_arcs }
    }

    /// Finds the largest rate that every rank can get at once, with its cut. The network then holds
    /// the flow of that rate, scaled by the denominator of the rate.
    fn solve(&mut self) -> Bottleneck {
        let mut cut = vec![false; self.graph.nodes()];
        cut[self.root] = true;
        loop {
            let outside = self.sink_arcs.iter().filter(|(rank, _)| !cut[*rank]).count();
            let leaves = self.graph.leaving(|node| cut[node]);
            let rate = Rate::new(signed(leaves), outside as i128);
            let (share, factor) = (rate.numer().unsigned_abs(), rate.denom().unsigned_abs());
            for (&arc, edge) in self.arcs.iter().zip(self.graph.edges()) {
                self.network.set_capacity(arc, edge.2 * factor);
            }
            for &(_, arc) in &self.sink_arcs {
                self.network.set_capacity(arc, share);
            }
            let wanted = share * self.sink_arcs.len() as Amount;
            if self.network.max_flow(self.root, self.sink, wanted) == wanted {
                return Bottleneck { rate, cut };
            }
            cut = (0..self.graph.nodes()).map(|node| self.network.is_source_side(node)).collect();
        }
    }

    /// Decomposes the flow into paths from the root.
    fn paths(&self) -> Vec<(Vec<usize>, Amount)> {
        let mut flow: Vec<Amount> = self.arcs.iter().map(|&arc| self.network.flow(arc)).collect();
        let mut left: Vec<Amount> = vec![0; self.graph.nodes()];
        self.sink_arcs.iter().for_each(|&(rank, arc)| left[rank] = self.network.flow(arc));
        let mut leaving = vec![Vec::new(); self.graph.nodes()];
        for (place, edge) in self.graph.edges().iter().enumerate() {
            leaving[edge.0].push(place);
        }
        let mut paths = Vec::new();
        let mut path: Vec<usize> = Vec::new();
        let mut node = self.root;
        loop {
            if left[node] > 0 {
                let amount = path.iter().map(|&edge| flow[edge]).fold(left[node], Amount::min);
                left[node] -= amount;
                path.iter().for_each(|&edge| flow[edge] -= amount);
                let nodes = path.iter().map(|&edge| self.graph.edges()[edge].1);
                paths.push((std::iter::once(self.root).chain(nodes).collect(), amount));
                path.clear();
                node = self.root;
                continue;
            }
            let Some(&edge) = leaving[node].iter().find(|&&edge| flow[edge] > 0) else {
                assert_eq!(node, self.root, "what enters a node leaves it");
                return paths;
            };
            let to = self.graph.edges()[edge].1;
            path.push(edge);
            let begin = |&edge: &usize| self.graph.edges()[edge].0 == to;
            if let Some(place) = path.iter().position(begin) {
                // A cycle in the flow carries nothing to a rank, so it is removed.
                let amount = path[place..].iter().map(|&edge| flow[edge]).fold(Amount::MAX, Amount::min);
                path[place..].iter().for_each(|&edge| flow[edge] -= amount);
                path.truncate(place);
            }
            node = to;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check;
    use crate::samples;
    use crate::samples::{Links, Random};

    /// N times a minimum over the sets with the root: the capacity that leaves the set, divided by
    /// the number of ranks outside.
    fn bound(graph: &Digraph, root: usize) -> Rate {
        let node = graph.ranks()[root];
        let sets = (0..1_u32 << graph.nodes()).filter(|set| set >> node & 1 == 1);
        let rates = sets.filter_map(|set| {
            let is_inside = |node: usize| set >> node & 1 == 1;
            let outside = graph.ranks().iter().filter(|&&rank| !is_inside(rank)).count();
            (outside > 0).then(|| Rate::new(signed(graph.leaving(is_inside)), outside as i128))
        });
        rates.min().unwrap() * Rate::from_integer(graph.ranks().len() as i128)
    }

    #[test]
    fn scatter_and_gather_reach_the_least_of_all_cuts() {
        let mut random = Random::new(51);
        for round in 0..300 {
            let links = [Links::Duplex, Links::Balanced, Links::Any][round % 3];
            let topology = samples::topology(&samples::graph(&mut random, 6, 3, links));
            let root = random.below(topology.ranks().into()) as Rank;
            let (graph, unit) = Digraph::of(&topology);
            for collective in [Collective::Scatter { root }, Collective::Gather { root }] {
                let packing = pack_scatter(&topology, collective);
                check(&topology, &packing).unwrap_or_else(|flaw| panic!("{collective} {topology:?}: {flaw}"));
                let graph = if collective == (Collective::Gather { root }) {
                    graph.reversed()
                } else {
                    graph.clone()
                };
                assert_eq!(packing.rate, bound(&graph, root as usize) * Rate::from_integer(signed(unit)));
                assert!(packing.is_optimal());
            }
        }
    }

    #[test]
    fn the_block_of_the_root_goes_nowhere_and_each_rank_gets_as_much() {
        let topology = crate::topology::preset("star:4@10").unwrap();
        let packing = pack_scatter(&topology, Collective::Scatter { root: 1 });
        let block = Rate::new(10_000_000_000, 3);
        let of = |rank: Rank| {
            let ends =
                packing.trees.iter().filter(|tree| tree.edges.last().map_or(1, |edge| edge.to) == rank);
            ends.map(|tree| tree.weight).sum::<Rate>()
        };
        assert_eq!([0, 1, 2, 3].map(of), [block; 4]);
        assert_eq!(packing.rate, block * Rate::from_integer(4));
    }
}

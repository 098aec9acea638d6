//! Integer digraphs on which trees are packed, and the network that decides whether a demand is
//! feasible.
//!
//! A [`Digraph`] is a topology whose bandwidths are divided by their greatest common divisor, or
//! multiplied by a factor that makes rates integers. A *demand* is the number of unit trees of
//! which each rank is the root. Without switches, such trees exist if and only if a source that
//! gives each rank its demand can send the sum of all demands to every rank (Edmonds 1973). With
//! balanced switches the same holds (Bang-Jensen, Frank and Jackson 1995). [`DemandNetwork`] is
//! that network.
//!
//! **Invariant:** edges are ordered and unique, none has capacity zero, none leads from a node to
//! itself.

use std::collections::{BTreeMap, HashMap};

use super::flow::{Amount, ArcId, Network};
use crate::topology::Topology;

/// Nodes, of which some are ranks, and edges with integer capacities. See the module.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Digraph {
    nodes: usize,
    ranks: Vec<usize>,
    edges: Vec<(usize, usize, Amount)>,
}

impl Digraph {
    /// Makes a digraph of these edges. The capacities of parallel edges add up. Edges without
    /// capacity and edges from a node to itself are left out. `ranks` are the nodes of the ranks in
    /// their order.
    #[must_use]
    pub(crate) fn new(
        nodes: usize,
        ranks: Vec<usize>,
        edges: impl IntoIterator<Item = (usize, usize, Amount)>,
    ) -> Self {
        let mut sums: BTreeMap<(usize, usize), Amount> = BTreeMap::new();
        for (from, to, capacity) in edges {
            if from != to && capacity > 0 {
                *sums.entry((from, to)).or_default() += capacity;
            }
        }
        let edges = sums.into_iter().map(|((from, to), capacity)| (from, to, capacity)).collect();
        Self { nodes, ranks, edges }
    }

    /// The digraph of a topology, with the same numbers of nodes. Also returns the number of bytes
    /// a second for one unit of capacity.
    #[must_use]
    pub(crate) fn of(topology: &Topology) -> (Self, Amount) {
        let links = topology.links();
        let unit = links.iter().fold(0, |unit, link| greatest_divisor(unit, link.bytes_per_s.into())).max(1);
        let ranks = (0..topology.ranks()).map(|rank| topology.node(rank).0 as usize).collect();
        let edges = links
            .iter()
            .map(|link| (link.from.0 as usize, link.to.0 as usize, Amount::from(link.bytes_per_s) / unit));
        (Self::new(topology.nodes().len(), ranks, edges), unit)
    }

    /// The number of nodes.
    #[must_use]
    pub(crate) fn nodes(&self) -> usize {
        self.nodes
    }

    /// The node of every rank.
    #[must_use]
    pub(crate) fn ranks(&self) -> &[usize] {
        &self.ranks
    }

    /// The tail, the head and the capacity of each edge.
    #[must_use]
    pub(crate) fn edges(&self) -> &[(usize, usize, Amount)] {
        &self.edges
    }

    /// The same digraph with other capacities. Edges that get no capacity are left out.
    #[must_use]
    pub(crate) fn map(&self, mut capacity: impl FnMut(usize, usize, Amount) -> Amount) -> Self {
        let edges = self.edges.iter().map(|&(from, to, before)| (from, to, capacity(from, to, before)));
        Self::new(self.nodes, self.ranks.clone(), edges)
    }

    /// The same digraph with all edges reversed.
    #[must_use]
    pub(crate) fn reversed(&self) -> Self {
        let edges = self.edges.iter().map(|&(from, to, capacity)| (to, from, capacity));
        Self::new(self.nodes, self.ranks.clone(), edges)
    }

    /// The capacity that leaves a set of nodes.
    #[must_use]
    pub(crate) fn leaving(&self, is_inside: impl Fn(usize) -> bool) -> Amount {
        let crosses = |edge: &&(usize, usize, Amount)| is_inside(edge.0) && !is_inside(edge.1);
        self.edges.iter().filter(crosses).map(|edge| edge.2).sum()
    }

    /// The capacity that enters and the capacity that leaves each node.
    #[must_use]
    pub(crate) fn degrees(&self) -> Vec<(Amount, Amount)> {
        let mut degrees = vec![(0, 0); self.nodes];
        for &(from, to, capacity) in &self.edges {
            degrees[from].1 += capacity;
            degrees[to].0 += capacity;
        }
        degrees
    }

    /// Which nodes are switches.
    #[must_use]
    pub(crate) fn switches(&self) -> Vec<usize> {
        let mut is_rank = vec![false; self.nodes];
        for &rank in &self.ranks {
            is_rank[rank] = true;
        }
        (0..self.nodes).filter(|&node| !is_rank[node]).collect()
    }

    /// Whether as much enters as leaves every switch.
    #[must_use]
    pub(crate) fn is_balanced(&self) -> bool {
        let degrees = self.degrees();
        self.switches().into_iter().all(|switch| degrees[switch].0 == degrees[switch].1)
    }
}

/// The network of a digraph, with a source that gives each rank its demand.
#[derive(Clone, Debug)]
pub(crate) struct DemandNetwork {
    network: Network,
    source: usize,
    /// The arc of each edge.
    arcs: HashMap<(usize, usize), ArcId>,
    /// The arc from the source to each rank.
    demand_arcs: Vec<ArcId>,
    /// The node of every rank.
    ranks: Vec<usize>,
    total: Amount,
    /// The order in which ranks are checked: ranks that lacked something last time come first.
    order: Vec<usize>,
}

impl DemandNetwork {
    /// The network of a digraph, in which each rank gets its element of `demand`.
    ///
    /// # Panics
    ///
    /// When there are not as many demands as ranks.
    #[must_use]
    pub(crate) fn new(graph: &Digraph, demand: &[Amount]) -> Self {
        assert_eq!(graph.ranks.len(), demand.len(), "a demand for each rank");
        let mut network = Network::new(graph.nodes + 1);
        let source = graph.nodes;
        let demand_arcs =
            graph.ranks.iter().zip(demand).map(|(&rank, &amount)| network.add(source, rank, amount, 0));
        let demand_arcs = demand_arcs.collect();
        let (ranks, order) = (graph.ranks.clone(), (0..graph.ranks.len()).collect());
        let total = demand.iter().sum();
        let mut supply = Self { network, source, arcs: HashMap::new(), demand_arcs, ranks, total, order };
        for &(from, to, capacity) in &graph.edges {
            let arc = supply.arc(from, to);
            supply.network.set_capacity(arc, capacity);
        }
        supply
    }

    /// The arc of an edge. If there is none, an arc without capacity is made. Two edges in opposite
    /// directions are one pair of arcs.
    fn arc(&mut self, from: usize, to: usize) -> ArcId {
        if let Some(&arc) = self.arcs.get(&(from, to)) {
            return arc;
        }
        let arc = self.network.add(from, to, 0, 0);
        self.arcs.insert((from, to), arc);
        self.arcs.insert((to, from), arc ^ 1);
        arc
    }

    /// The capacity of an edge.
    #[must_use]
    pub(crate) fn capacity(&self, from: usize, to: usize) -> Amount {
        self.arcs.get(&(from, to)).map_or(0, |&arc| self.network.capacity(arc))
    }

    /// Sets the capacity of an edge.
    pub(crate) fn set_capacity(&mut self, from: usize, to: usize, capacity: Amount) {
        let arc = self.arc(from, to);
        self.network.set_capacity(arc, capacity);
    }

    /// Gives each edge its capacity in the digraph times a factor, and gives the ranks other
    /// demands.
    pub(crate) fn rescale(&mut self, graph: &Digraph, factor: Amount, demand: impl Iterator<Item = Amount>) {
        for &(from, to, capacity) in &graph.edges {
            self.set_capacity(from, to, capacity * factor);
        }
        self.total = 0;
        for (&arc, amount) in self.demand_arcs.iter().zip(demand) {
            self.network.set_capacity(arc, amount);
            self.total += amount;
        }
    }

    /// How much a rank lacks of the sum of all demands. If it lacks something,
    /// [`DemandNetwork::is_inside`] describes the cut.
    pub(crate) fn deficit(&mut self, rank: usize) -> Amount {
        self.total - self.network.max_flow_value(self.source, self.ranks[rank], self.total)
    }

    /// Whether a node is on the source's side of the cut of the last rank that lacked something.
    #[must_use]
    pub(crate) fn is_inside(&self, node: usize) -> bool {
        self.network.is_source_side(node)
    }

    /// Checks every rank. Ranks that lacked something last time come first. For each rank that
    /// lacks something, `on_deficit` gets the deficit and the network, which it may change. It
    /// returns whether to continue.
    pub(crate) fn visit_deficits(&mut self, mut on_deficit: impl FnMut(&mut Self, Amount) -> bool) -> bool {
        for place in 0..self.order.len() {
            let rank = self.order[place];
            let deficit = self.deficit(rank);
            if deficit > 0 {
                self.order[..=place].rotate_right(1);
                if !on_deficit(self, deficit) {
                    return false;
                }
            }
        }
        true
    }

    /// Whether every rank gets the sum of all demands.
    pub(crate) fn is_feasible(&mut self) -> bool {
        self.visit_deficits(|_, _| false)
    }
}

/// The greatest common divisor; if one number is zero, the other number.
#[must_use]
pub(crate) fn greatest_divisor(mut one: Amount, mut other: Amount) -> Amount {
    while other != 0 {
        (one, other) = (other, one % other);
    }
    one
}

//! A topology with its nodes in canonical order, and packings of it mapped back.
//!
//! A heuristic that grows one tree after the other takes the first of several equally good
//! candidates, so its result depends on the numbers of nodes: a broadcast on `dgx-h100:128` reaches
//! its bound for the preset, and sometimes only seven eighths of it for a shuffled copy. In the
//! order of [`order_from`] both give the same result.
//!
//! **Invariant:** the renumbering is a bijection that maps ranks to ranks and links to links.

use pleach_vocabulary::{Collective, Rank};

use super::symmetry::order_from;
use super::{Certificate, Packing};
use crate::topology::{NodeId, Topology};

pub(super) struct CanonicalTopology<'t> {
    original: &'t Topology,
    topology: Topology,
    /// By number in this topology: the node of the original topology.
    nodes: Vec<NodeId>,
}

impl<'t> CanonicalTopology<'t> {
    /// The topology with this rank as the first; `None` if the search of the order takes long.
    pub(super) fn from_rank(original: &'t Topology, first: Rank) -> Option<Self> {
        let nodes = order_from(original, original.node(first))?;
        let topology = original.in_order(&nodes);
        Some(Self { original, topology, nodes })
    }

    /// Packs the topology as it is numbered here, with its first rank as the root, and reads the
    /// packing back.
    pub(super) fn pack(
        &self,
        collective: Collective,
        pack: impl FnOnce(&Topology, Collective) -> Packing,
    ) -> Packing {
        let mut packing = pack(&self.topology, collective.with_root(0));
        packing.collective = collective;
        for tree in &mut packing.trees {
            tree.root = self.rank(tree.root);
            for edge in &mut tree.edges {
                (edge.from, edge.to) = (self.rank(edge.from), self.rank(edge.to));
                edge.paths.iter_mut().for_each(|path| self.map_back(&mut path.hops));
            }
        }
        match &mut packing.certificate {
            Certificate::Cut { nodes } => self.map_back(nodes),
            Certificate::Partition { parts } => parts.iter_mut().for_each(|part| self.map_back(part)),
            Certificate::Alone => {}
        }
        packing
    }

    fn rank(&self, rank: Rank) -> Rank {
        let node = self.nodes[self.topology.node(rank).0 as usize];
        self.original.rank(node).expect("ranks are ranks there too")
    }

    fn map_back(&self, nodes: &mut [NodeId]) {
        nodes.iter_mut().for_each(|node| *node = self.nodes[node.0 as usize]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::topology::preset;
    use crate::{PackOptions, check, pack};

    /// The same topology with all nodes in another order.
    fn shuffled(topology: &Topology, step: usize) -> Topology {
        let nodes = topology.nodes().len();
        let order: Vec<NodeId> = (0..nodes).map(|place| NodeId((place * step % nodes) as u32)).collect();
        topology.in_order(&order)
    }

    #[test]
    fn a_broadcast_over_a_shuffled_copy_of_many_servers_goes_at_the_same_rate() {
        // 48 servers have 384 ranks, which are not packed exactly. The steps have no divisor in
        // common with the 440 nodes.
        let servers = preset("dgx-h100:48").unwrap();
        let rate = |topology: &Topology, root: Rank| {
            let collective = Collective::Broadcast { root };
            let packing = pack(topology, collective, &PackOptions::default()).unwrap();
            check(topology, &packing).unwrap_or_else(|flaw| panic!("{flaw}"));
            packing.rate
        };
        let expected = rate(&servers, 0);
        for (step, root) in [(1, 77), (7, 0), (123, 5), (207, 300), (309, 41)] {
            assert_eq!(rate(&shuffled(&servers, step), root), expected, "step {step}, root {root}");
        }
    }
}

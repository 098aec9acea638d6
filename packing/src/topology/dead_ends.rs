//! What no data between ranks pass through.

use std::collections::BTreeSet;

use crate::topology::{Builder, Link, NodeId, NodeKind};

impl Builder {
    /// Leaves out switches that have only one neighbour, again and again: nothing between ranks
    /// goes through them.
    pub(super) fn without_dead_ends(self) -> Self {
        let mut neighbours = vec![BTreeSet::new(); self.nodes.len()];
        for link in &self.links {
            neighbours[link.from.0 as usize].insert(link.to);
            neighbours[link.to.0 as usize].insert(link.from);
        }
        let is_switch = |node: usize| self.nodes[node].kind == NodeKind::Switch;
        let mut is_left_out = vec![false; self.nodes.len()];
        let mut suspects: Vec<usize> = (0..self.nodes.len()).filter(|&node| is_switch(node)).collect();
        while let Some(node) = suspects.pop() {
            if neighbours[node].len() < 2 && !std::mem::replace(&mut is_left_out[node], true) {
                for neighbour in std::mem::take(&mut neighbours[node]) {
                    let neighbour = neighbour.0 as usize;
                    neighbours[neighbour].remove(&NodeId(node as u32));
                    if is_switch(neighbour) {
                        suspects.push(neighbour);
                    }
                }
            }
        }
        let mut kept = Self { pcie_ring_bytes_per_s: self.pcie_ring_bytes_per_s, ..Self::default() };
        let mut numbers = vec![None; self.nodes.len()];
        for (number, node) in self.nodes.into_iter().enumerate().filter(|(number, _)| !is_left_out[*number]) {
            numbers[number] = Some(kept.node(node.name, node.kind));
        }
        for link in self.links {
            if let (Some(from), Some(to)) = (numbers[link.from.0 as usize], numbers[link.to.0 as usize]) {
                kept.add(Link { from, to, ..link });
            }
        }
        kept
    }
}

#[cfg(test)]
mod tests {
    use crate::topology::{LATENCY_NS, Topology};

    #[test]
    fn chains_of_switches_that_lead_nowhere_are_left_out() {
        let mut builder = Topology::builder();
        let [root, bridge, nic] = ["root", "bridge", "nic"].map(|name| builder.switch(name));
        let (a, b) = (builder.rank("a"), builder.rank("b"));
        for (one, other) in [(root, bridge), (bridge, nic), (root, a), (root, b)] {
            builder.duplex(one, other, 1, LATENCY_NS);
        }
        let topology = builder.without_dead_ends().build().unwrap();
        let names: Vec<&str> = topology.nodes().iter().map(|node| node.name.as_str()).collect();
        assert_eq!((names, topology.links().len()), (vec!["root", "a", "b"], 4));
    }
}

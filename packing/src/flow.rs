//! Exact maximum flows, and the minimum cut that proves them.
//!
//! A [`Network`] has arcs with integer capacities and a flow. [`Network::max_flow`] finds the
//! maximum flow (Dinic 1970: blocking flows over shortest paths) or stops at a limit. The nodes
//! that the last search reached are then the smallest source side of a minimum cut. A search
//! allocates no memory: a network is filled once, and capacities are changed between searches.
//!
//! **Invariant:** an arc and its reverse are a pair whose residual capacities always sum to their
//! capacities. So the flow of an arc is its capacity minus its residual, and opposite flows over
//! one pair cancel.

/// A capacity or flow. Bandwidths of a topology sum to at most 2⁶³ and are scaled by factors that
/// stay far below 2⁶⁴, so sums of these fit.
pub(crate) type Amount = u128;

/// An arc's number. Its reverse has the same number with the lowest bit flipped.
pub(crate) type ArcId = u32;

/// Marks nodes that a search did not reach.
const UNREACHED: u32 = u32::MAX;

/// Nodes, arcs and a flow. See the module.
#[derive(Clone, Debug, Default)]
pub(crate) struct Network {
    /// The arcs that begin at each node, with the node where each arc ends.
    leaving: Vec<Vec<(ArcId, u32)>>,
    capacities: Vec<Amount>,
    residuals: Vec<Amount>,
    /// The distance of each node from the source, in the last search.
    levels: Vec<u32>,
    /// By node: the next arc to try.
    next: Vec<u32>,
    queue: Vec<u32>,
    /// The arcs of the present path, each with the node from which the search took it.
    path: Vec<(ArcId, u32)>,
}

impl Network {
    /// A network without nodes and arcs.
    #[must_use]
    pub(crate) fn new(nodes: usize) -> Self {
        let mut network = Self::default();
        for _ in 0..nodes {
            network.add_node();
        }
        network
    }

    /// Adds a node and gives its number.
    pub(crate) fn add_node(&mut self) -> usize {
        self.leaving.push(Vec::new());
        self.levels.push(UNREACHED);
        self.next.push(0);
        self.leaving.len() - 1
    }

    /// The number of nodes.
    #[must_use]
    pub(crate) fn nodes(&self) -> usize {
        self.leaving.len()
    }

    /// Adds an arc and its reverse, each with its capacity. Arcs between the same nodes stay
    /// separate.
    ///
    /// # Panics
    ///
    /// When a node is not there.
    pub(crate) fn add(&mut self, from: usize, to: usize, capacity: Amount, backwards: Amount) -> ArcId {
        assert!(from < self.nodes() && to < self.nodes(), "no such node");
        let arc = self.capacities.len() as ArcId;
        self.leaving[from].push((arc, to as u32));
        self.leaving[to].push((arc ^ 1, from as u32));
        self.capacities.extend([capacity, backwards]);
        self.residuals.extend([capacity, backwards]);
        arc
    }

    /// The capacity of an arc.
    #[must_use]
    pub(crate) fn capacity(&self, arc: ArcId) -> Amount {
        self.capacities[arc as usize]
    }

    /// Changes the capacity of an arc. If the flow over the arc is larger, all flow is forgotten.
    /// Returns whether the flow was kept.
    pub(crate) fn set_capacity(&mut self, arc: ArcId, capacity: Amount) -> bool {
        let arc = arc as usize;
        let residual = (self.residuals[arc] + capacity).checked_sub(self.capacities[arc]);
        self.capacities[arc] = capacity;
        match residual {
            Some(residual) => self.residuals[arc] = residual,
            None => self.reset(),
        }
        residual.is_some()
    }

    /// The flow over an arc; zero if the flow goes over its reverse.
    #[must_use]
    pub(crate) fn flow(&self, arc: ArcId) -> Amount {
        self.capacities[arc as usize].saturating_sub(self.residuals[arc as usize])
    }

    /// Forgets the flow.
    pub(crate) fn reset(&mut self) {
        self.residuals.copy_from_slice(&self.capacities);
    }

    /// The largest flow from `source` to `sink`, or `limit` if the flow is larger. The flow of
    /// earlier calls is forgotten.
    ///
    /// # Panics
    ///
    /// When source and sink are the same.
    pub(crate) fn max_flow(&mut self, source: usize, sink: usize, limit: Amount) -> Amount {
        self.reset();
        self.augment(source, sink, limit)
    }

    /// The largest flow from `source` to `sink`, at most `limit`. The value and the sides of the
    /// cut are those of [`Network::max_flow`], but the flow itself may be a different largest flow.
    /// Paths are walked back from the sink, and each step comes nearer to the source. In a network
    /// that leads to many ranks this is faster, because most steps from the source lead to other
    /// ranks than the sink.
    ///
    /// # Panics
    ///
    /// When source and sink are the same.
    pub(crate) fn max_flow_value(&mut self, source: usize, sink: usize, limit: Amount) -> Amount {
        assert_ne!(source, sink, "a flow goes somewhere");
        self.reset();
        let mut sum = 0;
        while sum < limit && self.label_levels(source, sink) {
            sum += self.blocking_flow(sink, source, limit - sum, Self::retreat);
        }
        sum
    }

    /// Adds to the present flow as much as can go from `source` to `sink`, at most `limit`. Returns
    /// the added amount.
    ///
    /// # Panics
    ///
    /// When source and sink are the same.
    pub(crate) fn augment(&mut self, source: usize, sink: usize, limit: Amount) -> Amount {
        assert_ne!(source, sink, "a flow goes somewhere");
        let mut sum = 0;
        while sum < limit && self.label_levels(source, sink) {
            sum += self.blocking_flow(source, sink, limit - sum, Self::advance);
        }
        sum
    }

    /// Whether a node is on the source's side of the minimum cut that the last search found: the
    /// smallest such side. The result has no meaning after a search that stopped at its limit.
    #[must_use]
    pub(crate) fn is_source_side(&self, node: usize) -> bool {
        self.levels[node] != UNREACHED
    }

    /// The smallest sink side of a minimum cut, after a largest flow to the sink. It holds the
    /// nodes from which more could flow to the sink.
    #[must_use]
    pub(crate) fn sink_side(&self, sink: usize) -> Vec<bool> {
        let mut is_inside = vec![false; self.nodes()];
        is_inside[sink] = true;
        let mut found = vec![sink];
        while let Some(node) = found.pop() {
            for &(arc, from) in &self.leaving[node] {
                if self.residuals[arc as usize ^ 1] != 0
                    && !std::mem::replace(&mut is_inside[from as usize], true)
                {
                    found.push(from as usize);
                }
            }
        }
        is_inside
    }

    /// Labels nodes with their distance from the source; stops at the sink.
    fn label_levels(&mut self, source: usize, sink: usize) -> bool {
        self.levels.fill(UNREACHED);
        self.queue.clear();
        self.queue.push(source as u32);
        self.levels[source] = 0;
        let mut seen = 0;
        while let Some(&node) = self.queue.get(seen) {
            seen += 1;
            let level = self.levels[node as usize] + 1;
            for &(arc, to) in &self.leaving[node as usize] {
                if self.residuals[arc as usize] != 0 && self.levels[to as usize] == UNREACHED {
                    self.levels[to as usize] = level;
                    if to as usize == sink {
                        return true;
                    }
                    self.queue.push(to);
                }
            }
        }
        false
    }

    /// Fills shortest paths between source and sink until no path is left, at most `limit` in all.
    /// `step` walks each path from `start` to `goal`.
    fn blocking_flow(
        &mut self,
        start: usize,
        goal: usize,
        limit: Amount,
        step: impl Fn(&mut Self, usize) -> Option<usize>,
    ) -> Amount {
        self.next.fill(0);
        self.path.clear();
        let (mut node, mut sum) = (start, 0);
        while sum < limit {
            if node == goal {
                let (amount, place) = self.bottleneck(limit - sum);
                for &(arc, _) in &self.path {
                    self.residuals[arc as usize] -= amount;
                    self.residuals[arc as usize ^ 1] += amount;
                }
                sum += amount;
                node = self.path[place].1 as usize;
                self.path.truncate(place);
            } else if let Some(there) = step(self, node) {
                node = there;
            } else if let Some((_, before)) = self.path.pop() {
                // No arc leads on from here, so the arc to this node is not tried again.
                node = before as usize;
                self.next[node] += 1;
            } else {
                break;
            }
        }
        sum
    }

    /// Takes an arc that leads one step away from the source, if there is one.
    fn advance(&mut self, node: usize) -> Option<usize> {
        let level = self.levels[node] + 1;
        let leaving = &self.leaving[node];
        let tried = self.next[node] as usize;
        let useful = |&&(arc, to): &&(ArcId, u32)| {
            self.residuals[arc as usize] != 0 && self.levels[to as usize] == level
        };
        let Some(found) = leaving[tried..].iter().position(|entry| useful(&entry)) else {
            self.next[node] = leaving.len() as u32;
            return None;
        };
        let (arc, to) = leaving[tried + found];
        self.next[node] = (tried + found) as u32;
        self.path.push((arc, node as u32));
        Some(to as usize)
    }

    /// Takes an arc backwards, to a node one step nearer to the source, if there is such an arc.
    fn retreat(&mut self, node: usize) -> Option<usize> {
        let level = self.levels[node].checked_sub(1)?;
        let leaving = &self.leaving[node];
        let tried = self.next[node] as usize;
        let useful = |&&(arc, from): &&(ArcId, u32)| {
            self.residuals[arc as usize ^ 1] != 0 && self.levels[from as usize] == level
        };
        let Some(found) = leaving[tried..].iter().position(|entry| useful(&entry)) else {
            self.next[node] = leaving.len() as u32;
            return None;
        };
        let (arc, from) = leaving[tried + found];
        self.next[node] = (tried + found) as u32;
        self.path.push((arc ^ 1, node as u32));
        Some(from as usize)
    }

    /// The most that the path can carry, at most `limit`, and the place of the first arc that is
    /// full with this amount.
    fn bottleneck(&self, limit: Amount) -> (Amount, usize) {
        let mut least = (limit, 0);
        for (place, &(arc, _)) in self.path.iter().enumerate() {
            if self.residuals[arc as usize] < least.0 {
                least = (self.residuals[arc as usize], place);
            }
        }
        least
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::samples::Random;

    type Arcs = Vec<(usize, usize, Amount)>;

    fn random_network(random: &mut Random) -> (Network, Arcs) {
        let nodes = 2 + random.below(7) as usize;
        let mut network = Network::new(nodes);
        let mut arcs = Arcs::new();
        for _ in 0..random.below(3 * nodes as u64 + 1) {
            let (from, to) = (random.below(nodes as u64) as usize, random.below(nodes as u64) as usize);
            if from != to {
                let large = if random.below(8) == 0 { u128::from(u64::MAX) } else { 1 };
                let capacity = u128::from(random.below(9)) * large;
                let backwards = u128::from(random.below(3));
                network.add(from, to, capacity, backwards);
                arcs.extend([(from, to, capacity), (to, from, backwards)]);
            }
        }
        (network, arcs)
    }

    fn cut(arcs: &Arcs, is_inside: impl Fn(usize) -> bool) -> Amount {
        arcs.iter().filter(|arc| is_inside(arc.0) && !is_inside(arc.1)).map(|arc| arc.2).sum()
    }

    fn least_cut(nodes: usize, arcs: &Arcs, source: usize, sink: usize) -> Amount {
        (0..1_u32 << nodes)
            .filter(|set| set >> source & 1 == 1 && set >> sink & 1 == 0)
            .map(|set| cut(arcs, |node| set >> node & 1 == 1))
            .min()
            .unwrap()
    }

    #[test]
    fn the_largest_flow_is_the_least_cut_of_all_and_the_side_found_is_such_a_cut() {
        let mut random = Random::new(1);
        for _ in 0..3_000 {
            let (mut network, arcs) = random_network(&mut random);
            let (source, sink) = (0, network.nodes() - 1);
            let least = least_cut(network.nodes(), &arcs, source, sink);
            assert_eq!(network.max_flow(source, sink, Amount::MAX), least);
            assert!(network.is_source_side(source) && !network.is_source_side(sink));
            assert_eq!(cut(&arcs, |node| network.is_source_side(node)), least);
            let sides = |network: &Network| {
                let source_side = (0..network.nodes()).map(|node| network.is_source_side(node));
                (source_side.collect::<Vec<_>>(), network.sink_side(sink))
            };
            let known = sides(&network);
            assert_eq!(network.max_flow_value(source, sink, Amount::MAX), least);
            assert_eq!(sides(&network), known, "walked from the sink, the smallest sides are the same");
            let limit = least / 2;
            assert_eq!(network.max_flow_value(source, sink, limit), limit);
        }
    }

    #[test]
    fn a_flow_stays_within_capacities_and_only_source_and_sink_gain_or_lose() {
        let mut random = Random::new(2);
        for _ in 0..1_000 {
            let (mut network, _) = random_network(&mut random);
            let (source, sink) = (0, network.nodes() - 1);
            let limit = u128::from(random.below(20));
            let sum = network.max_flow(source, sink, limit);
            assert!(sum <= limit);
            for node in 0..network.nodes() {
                let leaves: Amount = network.leaving[node].iter().map(|&(arc, _)| network.flow(arc)).sum();
                let enters: Amount =
                    network.leaving[node].iter().map(|&(arc, _)| network.flow(arc ^ 1)).sum();
                let more = if node == source { sum } else { 0 };
                let less = if node == sink { sum } else { 0 };
                assert_eq!(leaves + less, enters + more);
            }
            for arc in 0..network.capacities.len() as ArcId {
                assert!(network.flow(arc) <= network.capacity(arc));
            }
        }
    }

    #[test]
    fn a_flow_goes_on_after_a_limit_and_a_change_of_capacity() {
        let mut random = Random::new(3);
        let (mut was_kept, mut was_lost) = (0, 0);
        for _ in 0..2_000 {
            let (mut network, mut arcs) = random_network(&mut random);
            let (source, sink) = (0, network.nodes() - 1);
            let limit = u128::from(random.below(10));
            let first = network.max_flow(source, sink, limit);
            let whole = least_cut(network.nodes(), &arcs, source, sink);
            assert_eq!(first + network.clone().augment(source, sink, Amount::MAX), whole);
            if arcs.is_empty() {
                continue;
            }
            let changed = random.below(arcs.len() as u64) as usize;
            arcs[changed].2 = u128::from(random.below(9));
            let is_kept = network.set_capacity(changed as ArcId, arcs[changed].2);
            *(if is_kept { &mut was_kept } else { &mut was_lost }) += 1;
            let before = if is_kept { first } else { 0 };
            let least = least_cut(network.nodes(), &arcs, source, sink);
            assert_eq!(before + network.augment(source, sink, Amount::MAX), least);
        }
        assert!(was_kept > 50 && was_lost > 50, "{was_kept} {was_lost}");
    }

    #[test]
    fn a_line_of_many_nodes_needs_no_deep_stack() {
        let nodes = 100_000;
        let mut network = Network::new(nodes);
        for node in 1..nodes {
            network.add(node - 1, node, 5, 0);
        }
        assert_eq!(network.max_flow(0, nodes - 1, Amount::MAX), 5);
    }
}

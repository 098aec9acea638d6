//! The routes from one rank through switches, found as the links of a group find them: the fewest
//! links, among these the least latency, among these the most bandwidth.
//!
//! **Invariant:** the route to a rank is that of [`pleach_schedule::wiring::Routes`] where switches
//! join the two ranks. [`RouteSearch`] looks at switches and at the rank that is asked for alone,
//! so that the few routes of a rank among thousands are found without looking at all ranks.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use pleach_packing::topology::{NodeId, Topology};
use pleach_vocabulary::Rank;

/// How good a path is: links, nanoseconds, and less for more bandwidth.
type PathCost = (u32, u64, Reverse<u64>);

/// The best path to a node.
#[derive(Clone, Copy, Debug)]
struct Best {
    cost: PathCost,
    before: NodeId,
    /// No other path is as good.
    is_only: bool,
}

/// The links of a topology, by where they end.
pub(crate) struct Entering<'a> {
    topology: &'a Topology,
    /// By node: places of links.
    places: Vec<Vec<u32>>,
}

impl<'a> Entering<'a> {
    pub(crate) fn new(topology: &'a Topology) -> Self {
        let mut places = vec![Vec::new(); topology.nodes().len()];
        for (place, link) in (0..).zip(topology.links()) {
            places[link.to.0 as usize].push(place);
        }
        Self { topology, places }
    }
}

/// A route that was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct FoundRoute {
    links: Vec<u32>,
    is_only: bool,
}

impl FoundRoute {
    /// Places of its links in the topology, in order.
    pub(crate) fn links(&self) -> &[u32] {
        &self.links
    }

    /// Whether no other route is as good, so that a symmetry of the links takes it to the route
    /// between the images of its ends.
    pub(crate) fn is_only(&self) -> bool {
        self.is_only
    }
}

/// The best paths from a rank to all switches.
pub(crate) struct RouteSearch<'a> {
    entering: &'a Entering<'a>,
    start: NodeId,
    switches: BTreeMap<NodeId, Best>,
}

impl<'a> RouteSearch<'a> {
    pub(crate) fn new(entering: &'a Entering<'a>, from: Rank) -> Self {
        let topology = entering.topology;
        let start = topology.node(from);
        let mut switches: BTreeMap<NodeId, Best> = BTreeMap::new();
        let mut open = BTreeSet::from([((0, 0, Reverse(u64::MAX)), start)]);
        // Dijkstra's algorithm: each further link makes a cost larger.
        while let Some((cost, node)) = open.pop_first() {
            if switches.get(&node).is_some_and(|known| known.cost < cost) {
                continue;
            }
            for link in topology.leaving(node).iter().filter(|link| topology.rank(link.to).is_none()) {
                let there = further(cost, link.latency_ns, link.bytes_per_s);
                match switches.get_mut(&link.to) {
                    Some(known) if known.cost < there => {}
                    Some(known) if known.cost == there => known.is_only = false,
                    _ => {
                        switches.insert(link.to, Best { cost: there, before: node, is_only: true });
                        open.insert((there, link.to));
                    }
                }
            }
        }
        Self { entering, start, switches }
    }

    /// The route to a rank; none where no switches join the two.
    pub(crate) fn to(&self, to: Rank) -> Option<FoundRoute> {
        let topology = self.entering.topology;
        let end = topology.node(to);
        let mut best: Option<Best> = None;
        let mut candidates: Vec<(PathCost, NodeId, &u32)> = self.entering.places[end.0 as usize]
            .iter()
            .filter_map(|place| {
                let from = topology.links()[*place as usize].from;
                Some((self.cost(from)?, from, place))
            })
            .collect();
        candidates.sort_unstable();
        for (cost, before, &place) in candidates {
            let link = &topology.links()[place as usize];
            let there = further(cost, link.latency_ns, link.bytes_per_s);
            match &mut best {
                Some(known) if known.cost < there => {}
                Some(known) if known.cost == there => known.is_only = false,
                _ => best = Some(Best { cost: there, before, is_only: true }),
            }
        }
        let mut at = best?;
        let (mut nodes, mut is_only) = (vec![end], at.is_only);
        while at.before != self.start {
            nodes.push(at.before);
            at = *self.switches.get(&at.before)?;
            is_only &= at.is_only;
        }
        nodes.push(self.start);
        nodes.reverse();
        let places = nodes.windows(2).map(|ends| Some(topology.link_place(ends[0], ends[1])? as u32));
        Some(FoundRoute { links: places.collect::<Option<_>>()?, is_only })
    }

    /// The cost of the best path to a node that paths lead through.
    fn cost(&self, node: NodeId) -> Option<PathCost> {
        if node == self.start {
            return Some((0, 0, Reverse(u64::MAX)));
        }
        self.switches.get(&node).map(|best| best.cost)
    }
}

fn further((links, nanos, Reverse(width)): PathCost, latency_ns: u64, bytes_per_s: u64) -> PathCost {
    (links + 1, nanos.saturating_add(latency_ns), Reverse(width.min(bytes_per_s)))
}

#[cfg(test)]
mod tests {
    use pleach_packing::topology::preset;
    use pleach_schedule::wiring::Wiring;

    use super::*;

    #[test]
    fn routes_are_those_of_the_wiring_of_a_group() {
        for name in
            ["dgx-a100:3", "dgx-1v", "torus:3x4", "fat-tree:4", "dragonfly:3,2,2", "star:5", "mi250:2"]
        {
            let topology = preset(name).expect("a preset");
            let wiring = Wiring::new(topology.clone());
            let entering = Entering::new(&topology);
            let (mut joined, mut pairs) = (0, 0);
            for from in 0..topology.ranks() {
                let search = RouteSearch::new(&entering, from);
                for to in (0..topology.ranks()).filter(|&to| to != from) {
                    pairs += 1;
                    match search.to(to) {
                        Some(found) => {
                            let links: Vec<usize> = found.links.iter().map(|&link| link as usize).collect();
                            assert_eq!(links, wiring.routes().between(from, to)[0].links, "{name}");
                            joined += 1;
                        }
                        None => assert!(wiring.unjoined_pair(from, to).is_some(), "{name}: {from} to {to}"),
                    }
                }
            }
            assert!(joined > 0 && joined <= pairs, "{name}");
        }
    }

    #[test]
    fn a_route_that_another_one_equals_is_not_the_only_one() {
        let topology = preset("fat-tree:4").expect("a preset");
        let entering = Entering::new(&topology);
        let search = RouteSearch::new(&entering, 0);
        assert!(search.to(1).expect("under one switch").is_only);
        assert!(!search.to(15).expect("over one of four cores").is_only);
    }
}

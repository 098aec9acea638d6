//! The network: nodes, one-way links with bandwidth and latency, and routes for each ordered pair
//! of ranks.
//!
//! A pair has one route, or several with weights: then every transfer is split over them in
//! proportion, and has arrived when its last part has. [`LinkSharing`] says how transfers share
//! links.
//!
//! **Invariant:** a [`Network`] has a route between any two of its ranks. It is plain data without
//! time; [`super::flows`] and [`super::queues`] share links over time.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::Rank;

/// A rank's port or a switch. Rank `r` is node `r`, switches follow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NodeId(pub u32);

/// Names one direction of a wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LinkId(pub u32);

/// One direction of a wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Link {
    /// The node where bytes enter.
    pub from: NodeId,
    /// The node where bytes come out.
    pub to: NodeId,
    /// Bandwidth in bytes a second, at least 1.
    pub bytes_per_s: u64,
    /// The time of a byte from end to end.
    pub latency: Duration,
}

/// A route from a rank to another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Route {
    /// Its links, in order.
    pub links: Vec<LinkId>,
    /// Its share of the bytes, relative to the pair's other routes; at least 1.
    pub weight: u64,
}

/// How concurrent transfers share a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkSharing {
    /// All at once, each with a fair share: as packets of different connections.
    Fair,
    /// One after the other, in the order of their arrival: as messages on a queue pair. A transfer
    /// without bytes does not wait.
    InOrder,
}

/// Why a network was not built.
#[derive(Clone, pleach_derive::ErrorDebug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NetworkError {
    /// No path of links leads from one rank to another.
    #[error("no links lead from rank {from} to rank {to}")]
    Disconnected {
        /// The first rank of the path.
        from: Rank,
        /// The last rank of it.
        to: Rank,
    },
    /// A given route does not lead from link to link.
    #[error("the route from rank {from} to rank {to} is no path from the one to the other")]
    BrokenRoute {
        /// The first rank of the route.
        from: Rank,
        /// The last rank of it.
        to: Rank,
    },
    /// A pair of ranks whose routes weigh nothing.
    #[error("the routes from rank {from} to rank {to} have no weight")]
    NoWeight {
        /// The first rank.
        from: Rank,
        /// The last rank.
        to: Rank,
    },
    /// A link to or from a node that was not made.
    #[error("a link names node {node}, there are {nodes}")]
    NoSuchNode {
        /// The node.
        node: u32,
        /// The number of ranks.
        nodes: u32,
    },
    /// A link that carries nothing.
    #[error("the link from node {from} to node {to} carries 0 bytes a second")]
    NoBandwidth {
        /// The first node.
        from: u32,
        /// The last node.
        to: u32,
    },
}

/// Ranks, switches, links and routes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Network {
    ranks: u32,
    links: Vec<Link>,
    sharing: LinkSharing,
    /// Row by row: the routes from rank `row` to rank `column`; one without links on the diagonal.
    routes: Vec<Vec<Route>>,
    /// In the same order: the time on the longest of them.
    latencies: Vec<Duration>,
}

impl Network {
    /// A wire of its own between any two ranks, of this many bytes a second in each direction.
    ///
    /// # Panics
    ///
    /// When the bandwidth is zero.
    #[must_use]
    pub fn full_mesh(ranks: u32, bytes_per_s: u64, latency: Duration) -> Self {
        let mut builder = Self::builder(ranks);
        for low in 0..ranks {
            for high in low + 1..ranks {
                builder.wire(NodeId(low), NodeId(high), bytes_per_s, latency);
            }
        }
        builder.build().expect("every pair has a wire of positive bandwidth")
    }

    /// All ranks on one switch, by a wire of this many bytes a second in each direction; the
    /// latency is that of a wire, so it counts twice from rank to rank.
    ///
    /// # Panics
    ///
    /// When the bandwidth is zero.
    #[must_use]
    pub fn star(ranks: u32, bytes_per_s: u64, latency: Duration) -> Self {
        let mut builder = Self::builder(ranks);
        let switch = builder.switch();
        for rank in 0..ranks {
            builder.wire(NodeId(rank), switch, bytes_per_s, latency);
        }
        builder.build().expect("every rank has a wire of positive bandwidth to the switch")
    }

    /// A network of this many ranks and no links yet.
    #[must_use]
    pub fn builder(ranks: u32) -> NetworkBuilder {
        NetworkBuilder { ranks, nodes: ranks, links: Vec::new(), routes: BTreeMap::new() }
    }

    /// The same with links that are shared in this way; they are shared fairly otherwise.
    #[must_use]
    pub fn shared(self, sharing: LinkSharing) -> Self {
        Self { sharing, ..self }
    }

    /// How transfers share a link.
    #[must_use]
    pub fn sharing(&self) -> LinkSharing {
        self.sharing
    }

    /// The number of ranks.
    #[must_use]
    pub fn ranks(&self) -> u32 {
        self.ranks
    }

    /// All links.
    #[must_use]
    pub fn links(&self) -> &[Link] {
        &self.links
    }

    /// One link.
    ///
    /// # Panics
    ///
    /// When there is no such link.
    #[must_use]
    pub fn link(&self, link: LinkId) -> &Link {
        &self.links[link.0 as usize]
    }

    /// The links that bytes from `from` to `to` take, in order, on the first of the pair's routes;
    /// none from a rank to itself.
    ///
    /// # Panics
    ///
    /// When one of them is no rank of this network.
    #[must_use]
    pub fn route(&self, from: Rank, to: Rank) -> &[LinkId] {
        &self.routes(from, to)[0].links
    }

    /// All routes of a pair, at least one.
    ///
    /// # Panics
    ///
    /// When one of them is no rank of this network.
    #[must_use]
    pub fn routes(&self, from: Rank, to: Rank) -> &[Route] {
        &self.routes[self.pair(from, to)]
    }

    fn pair(&self, from: Rank, to: Rank) -> usize {
        assert!(from < self.ranks && to < self.ranks, "ranks {from} and {to} of {}", self.ranks);
        from as usize * self.ranks as usize + to as usize
    }

    /// How long a byte is under way from `from` to `to`, on the longest of the pair's routes.
    ///
    /// # Panics
    ///
    /// When one of them is no rank of this network.
    #[must_use]
    pub fn latency(&self, from: Rank, to: Rank) -> Duration {
        self.latencies[self.pair(from, to)]
    }

    /// The pairs of ranks (smaller first) that have a route over this link in at least one
    /// direction.
    #[must_use]
    pub fn pairs_over(&self, link: LinkId) -> Vec<(Rank, Rank)> {
        let mut pairs = Vec::new();
        for low in 0..self.ranks {
            for high in low + 1..self.ranks {
                let mut routes = self.routes(low, high).iter().chain(self.routes(high, low));
                if routes.any(|route| route.links.contains(&link)) {
                    pairs.push((low, high));
                }
            }
        }
        pairs
    }
}

/// Makes a [`Network`].
#[derive(Clone, Debug)]
pub struct NetworkBuilder {
    ranks: u32,
    nodes: u32,
    links: Vec<Link>,
    routes: BTreeMap<(Rank, Rank), Vec<Route>>,
}

impl NetworkBuilder {
    /// Adds a switch.
    pub fn switch(&mut self) -> NodeId {
        self.nodes += 1;
        NodeId(self.nodes - 1)
    }

    /// Adds one direction of a wire.
    pub fn link(&mut self, from: NodeId, to: NodeId, bytes_per_s: u64, latency: Duration) -> LinkId {
        self.links.push(Link { from, to, bytes_per_s, latency });
        LinkId(self.links.len() as u32 - 1)
    }

    /// Adds both directions of a wire: `a` to `b` and back.
    pub fn wire(&mut self, a: NodeId, b: NodeId, bytes_per_s: u64, latency: Duration) -> [LinkId; 2] {
        [self.link(a, b, bytes_per_s, latency), self.link(b, a, bytes_per_s, latency)]
    }

    /// Fixes the route of an ordered pair; others take a path with the fewest links, among these
    /// the one of the least latency, among these the one whose links were added first.
    pub fn route(&mut self, from: Rank, to: Rank, links: &[LinkId]) -> &mut Self {
        self.routes(from, to, vec![Route { links: links.to_vec(), weight: 1 }])
    }

    /// Fixes the routes of an ordered pair, over which everything is split by weight.
    pub fn routes(&mut self, from: Rank, to: Rank, routes: Vec<Route>) -> &mut Self {
        self.routes.insert((from, to), routes);
        self
    }

    /// The network.
    ///
    /// # Errors
    ///
    /// See [`NetworkError`].
    pub fn build(self) -> Result<Network, NetworkError> {
        for link in &self.links {
            for node in [link.from, link.to] {
                if node.0 >= self.nodes {
                    return Err(NetworkError::NoSuchNode { node: node.0, nodes: self.nodes });
                }
            }
            if link.bytes_per_s == 0 {
                return Err(NetworkError::NoBandwidth { from: link.from.0, to: link.to.0 });
            }
        }
        let mut routes = Vec::with_capacity((self.ranks * self.ranks) as usize);
        for from in 0..self.ranks {
            let reached_by = self.shortest_paths(NodeId(from));
            for to in 0..self.ranks {
                let one = |links| vec![Route { links, weight: 1 }];
                routes.push(match self.routes.get(&(from, to)) {
                    _ if from == to => one(Vec::new()),
                    Some(given) => self.checked_routes(from, to, given)?,
                    None => self
                        .path_back(&reached_by, NodeId(from), NodeId(to))
                        .map(one)
                        .ok_or(NetworkError::Disconnected { from, to })?,
                });
            }
        }
        let time = |route: &Route| route.links.iter().map(|link| self.links[link.0 as usize].latency).sum();
        let longest = |routes: &Vec<Route>| routes.iter().map(time).max().unwrap_or_default();
        let latencies = routes.iter().map(longest).collect();
        Ok(Network { ranks: self.ranks, links: self.links, sharing: LinkSharing::Fair, routes, latencies })
    }

    fn checked_routes(&self, from: Rank, to: Rank, given: &[Route]) -> Result<Vec<Route>, NetworkError> {
        // The sum is what everything is divided by.
        let sum = given.iter().try_fold(0u64, |sum, route| sum.checked_add(route.weight));
        if sum.is_none_or(|sum| sum == 0) {
            return Err(NetworkError::NoWeight { from, to });
        }
        let used = given.iter().filter(|route| route.weight > 0);
        used.map(|route| {
            let links = self.checked_route(from, to, &route.links)?;
            Ok(Route { links, weight: route.weight })
        })
        .collect()
    }

    fn checked_route(&self, from: Rank, to: Rank, given: &[LinkId]) -> Result<Vec<LinkId>, NetworkError> {
        let mut at = NodeId(from);
        for link in given {
            match self.links.get(link.0 as usize) {
                Some(link) if link.from == at => at = link.to,
                _ => return Err(NetworkError::BrokenRoute { from, to }),
            }
        }
        if at == NodeId(to) { Ok(given.to_vec()) } else { Err(NetworkError::BrokenRoute { from, to }) }
    }

    /// For every node the link by which it is best reached from `source`; ranks forward like
    /// switches.
    fn shortest_paths(&self, source: NodeId) -> Vec<Option<LinkId>> {
        let mut reached_by = vec![None; self.nodes as usize];
        let mut cost = vec![None; self.nodes as usize];
        cost[source.0 as usize] = Some((0u32, Duration::ZERO));
        // Bellman-Ford in rounds: at most as many as nodes, ends at the first one without a change.
        for _ in 0..self.nodes {
            let mut changed = false;
            for (index, link) in self.links.iter().enumerate() {
                let Some((hops, latency)) = cost[link.from.0 as usize] else { continue };
                let through = (hops + 1, latency + link.latency);
                let there = &mut cost[link.to.0 as usize];
                if there.is_none_or(|known| through < known) {
                    *there = Some(through);
                    reached_by[link.to.0 as usize] = Some(LinkId(index as u32));
                    changed = true;
                }
            }
            if !changed {
                break;
            }
        }
        reached_by
    }

    fn path_back(&self, reached_by: &[Option<LinkId>], from: NodeId, to: NodeId) -> Option<Vec<LinkId>> {
        let mut path = Vec::new();
        let mut at = to;
        while at != from {
            let link = reached_by[at.0 as usize]?;
            path.push(link);
            at = self.links[link.0 as usize].from;
        }
        path.reverse();
        Some(path)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MICRO: Duration = Duration::from_micros(1);

    #[test]
    fn a_full_mesh_has_one_link_from_every_rank_to_every_other() {
        let network = Network::full_mesh(4, 1_000, MICRO);
        assert_eq!(network.links().len(), 12);
        for from in 0..4 {
            for to in 0..4 {
                let ends: Vec<_> = network.route(from, to).iter().map(|&link| network.link(link)).collect();
                assert_eq!(ends.len(), usize::from(from != to));
                assert!(ends.iter().all(|link| link.from == NodeId(from) && link.to == NodeId(to)));
            }
        }
    }

    #[test]
    fn routes_have_the_fewest_links_and_then_the_least_latency() {
        let mut builder = Network::builder(2);
        let [slow, fast] = [builder.switch(), builder.switch()];
        for (switch, latency) in [(slow, 5 * MICRO), (fast, MICRO)] {
            builder.wire(NodeId(0), switch, 1, latency);
            builder.wire(switch, NodeId(1), 1, latency);
        }
        let network = builder.build().expect("connected");
        assert_eq!(network.latency(0, 1), 2 * MICRO);
        assert_eq!(network.link(network.route(0, 1)[0]).to, fast);
    }

    #[test]
    fn a_given_route_is_taken_and_a_broken_one_is_refused() {
        let mut builder = Network::builder(2);
        builder.wire(NodeId(0), NodeId(1), 1, MICRO);
        let [detour, _] = builder.wire(NodeId(0), NodeId(1), 1, 9 * MICRO);
        builder.route(0, 1, &[detour]);
        assert_eq!(builder.clone().build().expect("a path").latency(0, 1), 9 * MICRO);
        builder.route(1, 0, &[detour]);
        assert_eq!(builder.build(), Err(NetworkError::BrokenRoute { from: 1, to: 0 }));
    }

    #[test]
    fn several_routes_are_as_long_as_the_longest_and_those_without_weight_are_left_out() {
        let mut builder = Network::builder(2);
        let [near, _] = builder.wire(NodeId(0), NodeId(1), 1, MICRO);
        let [far, _] = builder.wire(NodeId(0), NodeId(1), 1, 9 * MICRO);
        let route = |link, weight| Route { links: vec![link], weight };
        builder.routes(0, 1, vec![route(near, 3), route(far, 1)]);
        let network = builder.clone().build().expect("paths");
        assert_eq!((network.latency(0, 1), network.routes(0, 1).len()), (9 * MICRO, 2));
        builder.routes(0, 1, vec![route(near, 3), route(far, 0)]);
        let network = builder.clone().build().expect("paths");
        assert_eq!((network.latency(0, 1), network.routes(0, 1).len()), (MICRO, 1));
        builder.routes(0, 1, vec![route(near, 0)]);
        assert_eq!(builder.build(), Err(NetworkError::NoWeight { from: 0, to: 1 }));
    }

    #[test]
    fn ranks_without_a_path_are_named() {
        let mut builder = Network::builder(3);
        builder.wire(NodeId(0), NodeId(1), 1, MICRO);
        assert_eq!(builder.build(), Err(NetworkError::Disconnected { from: 0, to: 2 }));
    }

    #[test]
    fn a_shared_link_names_all_pairs_that_lose_it() {
        let network = Network::star(3, 1, MICRO);
        let uplink = network.route(0, 1)[0];
        assert_eq!(network.pairs_over(uplink), [(0, 1), (0, 2)]);
    }
}

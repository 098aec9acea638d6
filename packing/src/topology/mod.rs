//! The links of a job: ranks, switches and links.
//!
//! A [`Topology`] is a directed graph with capacities. Its nodes are ranks, which send, receive and
//! combine data, and switches, which forward data and neither copy nor combine. Bandwidths are
//! integers, so all results (the [packing](crate) and its bound) are exact.
//!
//! **Invariant:** every rank reaches every other rank. There is at most one link between two nodes
//! in each direction. Names are unique. The bandwidths of all links together fit in 63 bits.
//! [`Builder::build`] is the only constructor and refuses everything else, so code that uses a
//! topology need not check it.

use std::collections::{BTreeMap, HashMap};
use std::fmt;

use pleach_vocabulary::Rank;

pub use decimal::{NumberFault, bytes_per_s, gb_per_s};
pub use presets::{PRESET_RANKS_MAX, PRESETS, PresetError, PresetForm, preset, preset_up_to};
#[cfg(feature = "files")]
pub use source::{
    FILE_BYTES_MAX, Origin, SourceOptions, THIS_MACHINE, TopologySourceError, load, parse, source,
    source_with,
};
#[cfg(feature = "files")]
pub use text::{TextError, TextFault};

mod decimal;
#[cfg(feature = "files")]
pub mod file;
#[cfg(feature = "files")]
pub mod machine;
#[cfg(feature = "files")]
pub mod nccl;
mod presets;
#[cfg(feature = "files")]
pub mod smi;
#[cfg(feature = "files")]
mod source;
#[cfg(test)]
mod tests;
#[cfg(feature = "files")]
mod text;

/// A node's number in [`Topology::nodes`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NodeId(pub u32);

/// The kind of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum NodeKind {
    /// Sends, receives and combines.
    Rank,
    /// Forwards.
    Switch,
}

/// A rank or a switch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Node {
    /// Unique in its topology.
    pub name: String,
    /// Its kind.
    pub kind: NodeKind,
}

/// All links from one node to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Link {
    /// The node where bytes enter.
    pub from: NodeId,
    /// The node where bytes leave.
    pub to: NodeId,
    /// The bandwidth of all these links together, in bytes a second; at least 1.
    pub bytes_per_s: u64,
    /// The latency of a byte, in nanoseconds; the longest one of all parallel links.
    pub latency_ns: u64,
    /// The number of parallel links that are added up here.
    pub count: u32,
}

/// The default latency of a byte, in nanoseconds.
pub const LATENCY_NS: u64 = 1_000;

/// Most nodes of a topology.
pub const NODES_MAX: usize = 1 << 16;

/// Most links that may be added to a topology.
pub const LINKS_MAX: usize = 1 << 20;

/// The largest sum of the bandwidths of a topology's links, in bytes a second.
pub const BANDWIDTH_SUM_MAX: u64 = 1 << 63;

/// Ranks, switches and links. See the module.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Topology {
    nodes: Vec<Node>,
    /// The links, sorted by origin and target.
    links: Vec<Link>,
    /// The place where the links of each node begin. The last element is the number of links.
    first: Vec<usize>,
    /// The node of every rank.
    ranks: Vec<NodeId>,
    /// The rank of every node.
    numbers: Vec<Option<Rank>>,
    /// The bandwidth of a ring over the hosts' PCIe, beside the links.
    pcie_ring_bytes_per_s: Option<u64>,
}

/// Why a topology was not made.
#[derive(Clone, pleach_derive::ErrorDebug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TopologyError {
    /// There is no rank to carry out a collective.
    #[error("a topology has at least one rank; this one has none")]
    NoRanks,
    /// Some ranks cannot reach others.
    #[error("disconnected: {}; join them by links, or take the ranks of one part", listed(.parts))]
    Disconnected {
        /// The names of the ranks that reach each other, part by part.
        parts: Vec<Vec<String>>,
    },
    /// A name that two nodes have.
    #[error("there are two nodes '{name}'; give each a name of its own")]
    DuplicateName {
        /// The name.
        name: String,
    },
    /// A name that cannot be printed in a line.
    #[error("{name:?} is no name of a node; use one or more characters, without control characters")]
    BadName {
        /// The name.
        name: String,
    },
    /// A link names a node that is not there.
    #[error("a link names node '{name}', which is not there")]
    UnknownNode {
        /// The name.
        name: String,
    },
    /// A link has no bandwidth.
    #[error("the link from '{from}' to '{to}' carries nothing; give it a positive bandwidth")]
    NoBandwidth {
        /// The node where the link begins.
        from: String,
        /// The node where the link ends.
        to: String,
    },
    /// A link from a node to itself.
    #[error("a link joins '{name}' to itself")]
    Loop {
        /// The name.
        name: String,
    },
    /// The bandwidths sum to more than [`BANDWIDTH_SUM_MAX`].
    #[error("the links carry more than {BANDWIDTH_SUM_MAX} bytes a second together; are their units right?")]
    TooMuchBandwidth,
    /// There are more nodes or links than the limit.
    #[error("more than {limit} {what}")]
    TooMany {
        /// The kind of thing.
        what: &'static str,
        /// The limit.
        limit: usize,
    },
    /// A requested rank is not there.
    #[error("there is no rank {rank}: there are {ranks}, numbered from 0")]
    NoSuchRank {
        /// The rank.
        rank: Rank,
        /// The number of ranks.
        ranks: u32,
    },
    /// A rank was requested twice.
    #[error("rank {rank} is listed twice")]
    RankTwice {
        /// The rank.
        rank: Rank,
    },
}

/// Most names of a part that an error lists.
const NAMES_SHOWN_MAX: usize = 8;

fn listed(parts: &[Vec<String>]) -> String {
    let part = |names: &Vec<String>| {
        let shown = names[..names.len().min(NAMES_SHOWN_MAX)].join(", ");
        let more = names.len().saturating_sub(NAMES_SHOWN_MAX);
        if more == 0 { format!("{{{shown}}}") } else { format!("{{{shown} and {more} more}}") }
    };
    let shown: Vec<String> = parts.iter().take(NAMES_SHOWN_MAX).map(part).collect();
    let more = parts.len().saturating_sub(NAMES_SHOWN_MAX);
    let more = if more == 0 { String::new() } else { format!(" and {more} more parts") };
    format!("{}{more} do not reach each other", shown.join(", "))
}

impl Topology {
    /// A topology under construction, without nodes.
    #[must_use]
    pub fn builder() -> Builder {
        Builder::default()
    }

    /// All nodes.
    #[must_use]
    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    /// All links, sorted by origin and then by target.
    #[must_use]
    pub fn links(&self) -> &[Link] {
        &self.links
    }

    /// The links that begin at a node, sorted by target.
    #[must_use]
    pub fn leaving(&self, node: NodeId) -> &[Link] {
        &self.links[self.first[node.0 as usize]..self.first[node.0 as usize + 1]]
    }

    /// The link from one node to another.
    #[must_use]
    pub fn link(&self, from: NodeId, to: NodeId) -> Option<&Link> {
        self.link_place(from, to).map(|place| &self.links[place])
    }

    /// The place in [`links`](Self::links) of the link from one node to another.
    #[must_use]
    pub fn link_place(&self, from: NodeId, to: NodeId) -> Option<usize> {
        let place = self.leaving(from).binary_search_by_key(&to, |link| link.to).ok()?;
        Some(self.first[from.0 as usize] + place)
    }

    /// The number of ranks.
    #[must_use]
    pub fn ranks(&self) -> u32 {
        self.ranks.len() as u32
    }

    /// The node of a rank.
    ///
    /// # Panics
    ///
    /// When there is no such rank.
    #[must_use]
    pub fn node(&self, rank: Rank) -> NodeId {
        self.ranks[rank as usize]
    }

    /// The rank of a node; `None` for a switch.
    #[must_use]
    pub fn rank(&self, node: NodeId) -> Option<Rank> {
        self.numbers[node.0 as usize]
    }

    /// The bandwidth of a ring of all ranks through their host's PCIe, in bytes a second, if it is
    /// known. The ring is not a link. A comparison uses it where links form no ring, as libraries
    /// do.
    #[must_use]
    pub fn pcie_ring_bytes_per_s(&self) -> Option<u64> {
        self.pcie_ring_bytes_per_s
    }

    /// The name of a node.
    #[must_use]
    pub fn name(&self, node: NodeId) -> &str {
        &self.nodes[node.0 as usize].name
    }

    /// Whether every link has the same capacity as its reverse.
    #[must_use]
    pub fn is_symmetric(&self) -> bool {
        self.links.iter().all(|link| {
            self.link(link.to, link.from).is_some_and(|back| back.bytes_per_s == link.bytes_per_s)
        })
    }

    /// Whether there are switches.
    #[must_use]
    pub fn has_switches(&self) -> bool {
        self.nodes.len() > self.ranks.len()
    }

    /// The topology of an allocation: these ranks, numbered as listed, all switches, and the links
    /// between them.
    ///
    /// # Errors
    ///
    /// A rank is not there or is listed twice, or the ranks do not reach each other without the
    /// other ranks.
    pub fn only(&self, ranks: &[Rank]) -> Result<Self, TopologyError> {
        let mut builder = Builder { pcie_ring_bytes_per_s: self.pcie_ring_bytes_per_s, ..Builder::default() };
        let mut kept = vec![None; self.nodes.len()];
        for &rank in ranks {
            let node = *self
                .ranks
                .get(rank as usize)
                .ok_or(TopologyError::NoSuchRank { rank, ranks: self.ranks() })?;
            if kept[node.0 as usize].is_some() {
                return Err(TopologyError::RankTwice { rank });
            }
            kept[node.0 as usize] = Some(builder.rank(self.name(node)));
        }
        for (index, node) in self.nodes.iter().enumerate() {
            if node.kind == NodeKind::Switch {
                kept[index] = Some(builder.switch(&node.name));
            }
        }
        for link in &self.links {
            if let (Some(from), Some(to)) = (kept[link.from.0 as usize], kept[link.to.0 as usize]) {
                builder.add(Link { from, to, ..*link });
            }
        }
        builder.build()
    }

    /// The topology with all links reversed.
    #[must_use]
    pub fn reversed(&self) -> Self {
        let mut builder = Builder {
            nodes: self.nodes.clone(),
            links: Vec::with_capacity(self.links.len()),
            pcie_ring_bytes_per_s: self.pcie_ring_bytes_per_s,
        };
        for link in &self.links {
            builder.add(Link { from: link.to, to: link.from, ..*link });
        }
        builder.build().expect("what holds for links holds for their reverse")
    }

    /// The topology with its nodes renumbered in this order, which must have each node once. Ranks
    /// are renumbered in this order too.
    #[must_use]
    pub fn in_order(&self, nodes: &[NodeId]) -> Self {
        let mut numbers = vec![NodeId(0); nodes.len()];
        let mut builder = Builder {
            nodes: Vec::with_capacity(nodes.len()),
            links: Vec::with_capacity(self.links.len()),
            pcie_ring_bytes_per_s: self.pcie_ring_bytes_per_s,
        };
        for &NodeId(node) in nodes {
            let Node { name, kind } = self.nodes[node as usize].clone();
            numbers[node as usize] = builder.node(name, kind);
        }
        let number = |node: NodeId| numbers[node.0 as usize];
        for link in &self.links {
            builder.add(Link { from: number(link.from), to: number(link.to), ..*link });
        }
        builder.build().expect("what holds for links holds whatever the numbers of their ends")
    }
}

/// A topology under construction.
#[derive(Clone, Debug, Default)]
pub struct Builder {
    nodes: Vec<Node>,
    links: Vec<Link>,
    pcie_ring_bytes_per_s: Option<u64>,
}

impl Builder {
    /// Adds a rank. Its number is the next one.
    pub fn rank(&mut self, name: impl Into<String>) -> NodeId {
        self.node(name.into(), NodeKind::Rank)
    }

    /// Adds a switch.
    pub fn switch(&mut self, name: impl Into<String>) -> NodeId {
        self.node(name.into(), NodeKind::Switch)
    }

    /// Adds a node.
    pub fn node(&mut self, name: String, kind: NodeKind) -> NodeId {
        self.nodes.push(Node { name, kind });
        NodeId(self.nodes.len() as u32 - 1)
    }

    /// Adds a link in one direction. Links that join the two nodes already stay.
    pub fn link(&mut self, from: NodeId, to: NodeId, bytes_per_s: u64, latency_ns: u64) {
        self.add(Link { from, to, bytes_per_s, latency_ns, count: 1 });
    }

    /// Adds a link in each direction.
    pub fn duplex(&mut self, one: NodeId, other: NodeId, bytes_per_s: u64, latency_ns: u64) {
        self.link(one, other, bytes_per_s, latency_ns);
        self.link(other, one, bytes_per_s, latency_ns);
    }

    /// Adds a link that stands for several parallel links.
    pub fn add(&mut self, link: Link) {
        self.links.push(link);
    }

    /// Sets the bandwidth of a ring of all ranks through their host's PCIe, in bytes a second.
    pub fn pcie_ring(&mut self, bytes_per_s: u64) {
        self.pcie_ring_bytes_per_s = Some(bytes_per_s);
    }

    /// Checks the whole topology.
    pub fn build(self) -> Result<Topology, TopologyError> {
        let Self { nodes, links, pcie_ring_bytes_per_s } = self;
        for (what, count, limit) in [("nodes", nodes.len(), NODES_MAX), ("links", links.len(), LINKS_MAX)] {
            if count > limit {
                return Err(TopologyError::TooMany { what, limit });
            }
        }
        let mut names = HashMap::with_capacity(nodes.len());
        for node in &nodes {
            if node.name.is_empty() || node.name.contains(char::is_control) {
                return Err(TopologyError::BadName { name: node.name.clone() });
            }
            if names.insert(node.name.as_str(), ()).is_some() {
                return Err(TopologyError::DuplicateName { name: node.name.clone() });
            }
        }
        let links = merged(&nodes, links)?;
        let mut first = vec![0; nodes.len() + 1];
        for link in &links {
            first[link.from.0 as usize + 1] += 1;
        }
        for node in 0..nodes.len() {
            first[node + 1] += first[node];
        }
        let (mut ranks, mut numbers) = (Vec::new(), Vec::with_capacity(nodes.len()));
        for (index, node) in nodes.iter().enumerate() {
            let is_rank = node.kind == NodeKind::Rank;
            numbers.push(is_rank.then_some(ranks.len() as Rank));
            if is_rank {
                ranks.push(NodeId(index as u32));
            }
        }
        if ranks.is_empty() {
            return Err(TopologyError::NoRanks);
        }
        let topology = Topology { nodes, links, first, ranks, numbers, pcie_ring_bytes_per_s };
        topology.check_connected()?;
        Ok(topology)
    }
}

/// Merges all links from one node to another to one link.
fn merged(nodes: &[Node], links: Vec<Link>) -> Result<Vec<Link>, TopologyError> {
    let name = |node: NodeId| nodes.get(node.0 as usize).map(|node| node.name.clone());
    let mut merged: BTreeMap<(NodeId, NodeId), Link> = BTreeMap::new();
    let mut sum: u64 = 0;
    for link in links {
        let named = |node: NodeId| {
            name(node).ok_or_else(|| TopologyError::UnknownNode { name: format!("number {}", node.0) })
        };
        let (from, to) = (named(link.from)?, named(link.to)?);
        if link.from == link.to {
            return Err(TopologyError::Loop { name: from });
        }
        if link.bytes_per_s == 0 {
            return Err(TopologyError::NoBandwidth { from, to });
        }
        let total = sum.checked_add(link.bytes_per_s).filter(|&total| total <= BANDWIDTH_SUM_MAX);
        sum = total.ok_or(TopologyError::TooMuchBandwidth)?;
        let entry = merged.entry((link.from, link.to));
        entry
            .and_modify(|all| {
                all.bytes_per_s += link.bytes_per_s;
                all.latency_ns = all.latency_ns.max(link.latency_ns);
                all.count = all.count.saturating_add(link.count);
            })
            .or_insert(link);
    }
    Ok(merged.into_values().collect())
}

impl Topology {
    /// Checks that the first rank reaches all ranks and all ranks reach the first rank.
    fn check_connected(&self) -> Result<(), TopologyError> {
        let mut backwards = vec![Vec::new(); self.nodes.len()];
        for link in &self.links {
            backwards[link.to.0 as usize].push(link.from);
        }
        let forwards = |node: NodeId| self.leaving(node).iter().map(|link| link.to).collect::<Vec<_>>();
        let mut left: Vec<NodeId> = self.ranks.clone();
        let mut parts = Vec::new();
        while let Some(&start) = left.first() {
            let reached = reach(self.nodes.len(), start, forwards);
            let reaching = reach(self.nodes.len(), start, |node| backwards[node.0 as usize].clone());
            let is_part = |node: &NodeId| reached[node.0 as usize] && reaching[node.0 as usize];
            let (part, others) = left.iter().partition(|node| is_part(node));
            left = others;
            let part: Vec<NodeId> = part;
            parts.push(part.iter().map(|&node| self.name(node).to_owned()).collect());
        }
        if parts.len() == 1 { Ok(()) } else { Err(TopologyError::Disconnected { parts }) }
    }
}

fn reach(nodes: usize, start: NodeId, next: impl Fn(NodeId) -> Vec<NodeId>) -> Vec<bool> {
    let mut reached = vec![false; nodes];
    let mut left = vec![start];
    reached[start.0 as usize] = true;
    while let Some(node) = left.pop() {
        for node in next(node) {
            if !std::mem::replace(&mut reached[node.0 as usize], true) {
                left.push(node);
            }
        }
    }
    reached
}

impl fmt::Display for NodeId {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "node {}", self.0)
    }
}

#[cfg(feature = "files")]
impl Builder {
    /// Removes switches that have at most one neighbour, again and again. No path between ranks
    /// leads through such a switch.
    fn without_dead_ends(self) -> Self {
        let mut neighbours = vec![std::collections::BTreeSet::new(); self.nodes.len()];
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
mod dead_ends_tests {
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

//! Trees where ranks are joined by switches: one hop inside a server, three phases across servers.
//!
//! Around a switch each of m ranks is the root of a tree that leads to all others directly, for its
//! m-th of the data (Blink, MLSys 2020, section 3.4). Across servers the data are cut into
//! partitions, each of which has a root in every server: it is reduced inside each server to that
//! root, reduced and broadcast in one hop among these roots, and broadcast inside each server
//! (appendix A.2). As a tree over all ranks that is: the trees of all servers, and a star among
//! their roots; each root is the middle of one star.
//!
//! What a server is is found in the graph: what stays together over links that are faster than the
//! slowest ones which, taken away, leave parts of two ranks or more each.

use std::collections::{BTreeMap, BTreeSet};

use pleach_vocabulary::{Collective, Rank};

use super::{BlinkError, BlinkOptions, point_to_point};
use crate::Rate;
use crate::shape::{Shape, Way, Weighted, ways_from, ways_within};
use crate::topology::{Link, NodeId, NodeKind, Topology};

/// The trees of a topology that has switches, all of the same weight.
pub(super) fn shapes(topology: &Topology, options: &BlinkOptions) -> Result<Vec<Weighted>, BlinkError> {
    match servers(topology) {
        Some(servers) => three_phases(topology, &servers, options),
        None => one_hop(topology),
    }
}

/// A star around each rank.
fn one_hop(topology: &Topology) -> Result<Vec<Weighted>, BlinkError> {
    (0..topology.ranks())
        .map(|top| {
            let ways = star(top, ways_from(topology, top), 0..topology.ranks())?;
            Ok(Weighted { shape: Shape { ways }, top, weight: Rate::from(1) })
        })
        .collect()
}

/// The ways from one rank to others.
fn star(
    middle: Rank,
    ways: Vec<Option<Way>>,
    others: impl Iterator<Item = Rank>,
) -> Result<Vec<Way>, BlinkError> {
    let mut ways = ways;
    let others = others.filter(|&other| other != middle);
    others.map(|to| ways[to as usize].take().ok_or(BlinkError::Unjoined { from: middle, to })).collect()
}

/// Ranks that belong together, and the bandwidth above which they do.
struct Servers {
    ranks: Vec<Vec<Rank>>,
    slower_bytes_per_s: u64,
}

fn servers(topology: &Topology) -> Option<Servers> {
    let bandwidths: BTreeSet<u64> = topology.links().iter().map(|link| link.bytes_per_s).collect();
    bandwidths.into_iter().find_map(|slower_bytes_per_s| {
        let ranks = together(topology, |link| link.bytes_per_s > slower_bytes_per_s);
        let are_servers = ranks.len() > 1 && ranks.iter().all(|ranks| ranks.len() > 1);
        are_servers.then_some(Servers { ranks, slower_bytes_per_s })
    })
}

/// Ranks that links of this kind join, in any direction.
fn together(topology: &Topology, kind: impl Fn(&Link) -> bool) -> Vec<Vec<Rank>> {
    let mut part: Vec<usize> = (0..topology.nodes().len()).collect();
    fn top(part: &mut [usize], mut node: usize) -> usize {
        while part[node] != node {
            part[node] = part[part[node]];
            node = part[node];
        }
        node
    }
    for link in topology.links().iter().filter(|link| kind(link)) {
        let (one, other) = (top(&mut part, link.from.0 as usize), top(&mut part, link.to.0 as usize));
        part[one.max(other)] = one.min(other);
    }
    let mut parts: BTreeMap<usize, Vec<Rank>> = BTreeMap::new();
    for rank in 0..topology.ranks() {
        parts.entry(top(&mut part, topology.node(rank).0 as usize)).or_default().push(rank);
    }
    parts.into_values().collect()
}

fn three_phases(
    topology: &Topology,
    servers: &Servers,
    options: &BlinkOptions,
) -> Result<Vec<Weighted>, BlinkError> {
    let inside: Vec<Vec<Vec<Way>>> = servers
        .ranks
        .iter()
        .map(|ranks| inside(topology, ranks, servers, options))
        .collect::<Result<_, _>>()?;
    // As many partitions as trees, and so many that every rank that has a link to other servers is
    // a root.
    let partitions = inside.iter().map(Vec::len).chain(servers.ranks.iter().map(Vec::len)).max().unwrap_or(0);
    let mut shapes = Vec::with_capacity(partitions * servers.ranks.len());
    for partition in 0..partitions {
        let roots: Vec<Rank> = servers.ranks.iter().map(|ranks| ranks[partition % ranks.len()]).collect();
        let trees = inside.iter().flat_map(|trees| trees[partition % trees.len()].iter().cloned());
        let trees: Vec<Way> = trees.collect();
        for &middle in &roots {
            // Roots meet over what joins servers, also where they have other links.
            let slow = |from, to| {
                topology.link(from, to).is_some_and(|link| link.bytes_per_s <= servers.slower_bytes_per_s)
            };
            let mut ways = star(middle, ways_within(topology, middle, slow), roots.iter().copied())
                .or_else(|_| star(middle, ways_from(topology, middle), roots.iter().copied()))?;
            ways.extend(trees.iter().cloned());
            shapes.push(Weighted { shape: Shape { ways }, top: middle, weight: Rate::from(1) });
        }
    }
    Ok(shapes)
}

/// The trees of one server: one hop over its switches, or those of its links.
fn inside(
    topology: &Topology,
    ranks: &[Rank],
    servers: &Servers,
    options: &BlinkOptions,
) -> Result<Vec<Vec<Way>>, BlinkError> {
    let fast = |link: &&Link| link.bytes_per_s > servers.slower_bytes_per_s;
    let mut builder = Topology::builder();
    let mut numbers: BTreeMap<NodeId, NodeId> = BTreeMap::new();
    for &rank in ranks {
        numbers.insert(topology.node(rank), builder.rank(topology.name(topology.node(rank))));
    }
    let links: Vec<&Link> = topology.links().iter().filter(fast).collect();
    let is_switch = |node: NodeId| topology.nodes()[node.0 as usize].kind == NodeKind::Switch;
    let switches = links.iter().flat_map(|link| [link.from, link.to]).filter(|&node| is_switch(node));
    for switch in switches.collect::<BTreeSet<NodeId>>() {
        numbers.insert(switch, builder.switch(topology.name(switch)));
    }
    for link in links {
        if let (Some(&from), Some(&to)) = (numbers.get(&link.from), numbers.get(&link.to)) {
            builder.add(Link { from, to, ..*link });
        }
    }
    let unjoined = BlinkError::Unjoined { from: ranks[0], to: ranks[1] };
    let server = builder.build().map_err(|_| unjoined)?;
    let has_switch_links = server.links().iter().any(|link| server.rank(link.to).is_none());
    let shapes = match has_switch_links {
        true => one_hop(&server),
        false => point_to_point::shapes(&server, Collective::AllReduce, 0, options),
    };
    let back: BTreeMap<NodeId, NodeId> = numbers.into_iter().map(|(whole, own)| (own, whole)).collect();
    let way = |way: Way| Way {
        from: ranks[way.from as usize],
        to: ranks[way.to as usize],
        hops: way.hops.iter().map(|node| back[node]).collect(),
    };
    let shapes = shapes.map_err(|_| unjoined)?;
    Ok(shapes.into_iter().map(|weighted| weighted.shape.ways.into_iter().map(way).collect()).collect())
}

//! Blink's algorithm (Wang et al., MLSys 2020), as a strategy for comparison.
//!
//! * Links between ranks: multiplicative weights (section 3.2) over minimum arborescences, then an
//!   integer program that reduces the number of trees (section 3.2.1), within 5 % of the rate of
//!   the weights. Reduce is a broadcast over reversed links. All-reduce uses the same trees upwards
//!   and downwards. All-gather is an all-reduce without the reduction. Gather and scatter are a
//!   reduce and a broadcast in which each branch carries the block of its own rank alone.
//! * Switches (section 3.4, appendix A.2): one-hop trees inside a server, three phases across
//!   servers. The paper says nothing about other topologies with several switches. They get the
//!   same trees.
//! * [Two classes of links](hybrid) share the data according to the set-up time of the slower
//!   class.
//! * `pleach tune` searches for the chunk size while calls are measured (`tuning::chunks` of
//!   `pleach-schedule`), for all algorithms.
//!
//! The result is not optimal and has no proof of its own. The bound and the certificate come from
//! the optimal packing, and the weights are rounded to exact rationals that fit the links.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use good_lp::solvers::microlp::microlp;
use good_lp::{Expression, ProblemVariables, Solution as _, SolverModel as _, WithTimeLimit as _, variable};
use pleach_vocabulary::{Collective, Rank};

use super::{RankPath, SpanningTree, WeightedTree, paths_from, paths_over};
use crate::scale::fitted;
use crate::topology::{Link, NodeId, NodeKind, Topology};
use crate::{EDGES_MAX, Rate, Tree};
use arborescence::{Arc, shortest};

mod arborescence;
pub mod hybrid;

/// The parameters that the paper leaves open.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BlinkOptions {
    /// The size of the steps of the weights. The number of trees in the paper suggests 0.1.
    pub epsilon: f64,
    /// The share of the rate that may be lost to have fewer trees.
    pub threshold: f64,
    /// Time limit of one integer program. The best result at this time is used.
    pub time_limit: Duration,
}

impl Default for BlinkOptions {
    fn default() -> Self {
        Self { epsilon: 0.1, threshold: 0.05, time_limit: Duration::from_millis(500) }
    }
}

/// Why Blink has no trees.
#[derive(Clone, Copy, pleach_derive::ErrorDebug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BlinkError {
    /// A tree needs an edge between two ranks that neither a link nor switches join.
    #[error("ranks {from} and {to} are not joined by a link or through switches only")]
    Unjoined {
        /// The sender.
        from: Rank,
        /// The receiver.
        to: Rank,
    },
    /// The trees together have more than [`EDGES_MAX`] edges.
    #[error("its {trees} trees have more than {EDGES_MAX} edges, one set for each rank's block")]
    TooLarge {
        /// The number of trees before each rank uses all of them.
        trees: usize,
    },
}

/// The trees by which Blink carries out a collective, with weights that fit. A single rank has no
/// trees.
///
/// # Errors
///
/// If Blink has no trees for this topology.
pub fn trees(
    topology: &Topology,
    collective: Collective,
    options: &BlinkOptions,
) -> Result<Vec<Tree>, BlinkError> {
    let ranks = topology.ranks();
    if ranks == 1 {
        return Ok(Vec::new());
    }
    match collective {
        Collective::Reduce { root } => {
            let broadcast = trees(&topology.reversed(), Collective::Broadcast { root }, options)?;
            return Ok(broadcast.into_iter().map(reversed_tree).collect());
        }
        Collective::Gather { root } => {
            let scatter = trees(&topology.reversed(), Collective::Scatter { root }, options)?;
            return Ok(scatter.into_iter().map(reversed_tree).collect());
        }
        _ => {}
    }
    if topology.has_switches() {
        return switched(topology, collective, options);
    }
    let (by, root) = match collective {
        Collective::Broadcast { root } | Collective::Scatter { root } => {
            (Collective::Broadcast { root }, root)
        }
        _ => (Collective::AllReduce, 0),
    };
    let shapes = direct_shapes(topology, by, root, options)?;
    rooted_trees(&shapes, ranks, collective)
}

/// Trees of equal shares, as heavy as the links allow.
fn switched(
    topology: &Topology,
    collective: Collective,
    options: &BlinkOptions,
) -> Result<Vec<Tree>, BlinkError> {
    let ranks = topology.ranks();
    let mut shapes = switched_shapes(topology, options)?;
    let stars = shapes
        .iter()
        .all(|weighted| weighted.tree.paths.iter().all(|path| path.from == weighted.default_root));
    let mut roots: Vec<Rank> = shapes.iter().map(|weighted| weighted.default_root).collect();
    roots.sort_unstable();
    let has_each_rank = roots.into_iter().eq(0..ranks);
    let trees = match collective {
        // Each rank is the root of one tree, which carries its block.
        Collective::AllGather if has_each_rank => {
            shapes.iter().map(|tree| tree.tree.out_tree(ranks, tree.default_root, tree.weight)).collect()
        }
        Collective::ReduceScatter if has_each_rank => {
            shapes.iter().map(|tree| tree.tree.in_tree(ranks, tree.default_root, tree.weight)).collect()
        }
        Collective::Scatter { root } if stars => {
            shapes.retain(|star| star.default_root == root);
            WeightedTree::trees(&shapes, ranks, collective)
        }
        // For each other rank, the root sends one share to that rank, which passes the share on.
        // The root's own star is left out: in it the root would send the share to every rank
        // itself.
        Collective::Broadcast { root } if stars && ranks > 2 => {
            shapes.retain(|star| star.default_root != root);
            WeightedTree::trees(&shapes, ranks, collective)
        }
        _ => rooted_trees(&shapes, ranks, collective)?,
    };
    fitted(topology, collective, trees).ok_or(BlinkError::Unjoined { from: 0, to: 1 })
}

/// The trees of all shapes, if they are not too many.
fn rooted_trees(
    shapes: &[WeightedTree],
    ranks: u32,
    collective: Collective,
) -> Result<Vec<Tree>, BlinkError> {
    let uses = match collective {
        Collective::AllGather | Collective::ReduceScatter => ranks as usize,
        _ => 1,
    };
    let trees = shapes.len();
    match trees.saturating_mul(uses).saturating_mul(ranks as usize) > EDGES_MAX as usize {
        true => Err(BlinkError::TooLarge { trees }),
        false => Ok(WeightedTree::trees(shapes, ranks, collective)),
    }
}

/// The same tree on reversed links.
fn reversed_tree(mut tree: Tree) -> Tree {
    tree.turn();
    tree
}

// Trees over links between ranks: multiplicative weights, then fewer trees.

/// The trees of a topology without switches, and their weights in bytes a second.
///
/// Broadcast uses each direction of a link by itself; every other collective here goes up and down
/// the same tree, which uses both.
fn direct_shapes(
    topology: &Topology,
    collective: Collective,
    root: Rank,
    options: &BlinkOptions,
) -> Result<Vec<WeightedTree>, BlinkError> {
    let one_way = matches!(collective, Collective::Broadcast { .. });
    let links = links(topology, one_way);
    // A tree of weight one has the bandwidth of the slowest link.
    let unit = links.iter().map(|link| link.bytes_per_s).min().unwrap_or(1);
    let capacities: Vec<Rate> =
        links.iter().map(|link| Rate::new(i128::from(link.bytes_per_s), i128::from(unit))).collect();
    let (mut arcs, mut resources) = (Vec::new(), Vec::new());
    for (index, link) in links.iter().enumerate() {
        arcs.push(Arc { from: link.from as usize, to: link.to as usize });
        resources.push(index);
        if !one_way {
            arcs.push(Arc { from: link.to as usize, to: link.from as usize });
            resources.push(index);
        }
    }
    let network = Network {
        ranks: topology.ranks() as usize,
        root: root as usize,
        arcs,
        resources,
        capacities: links.iter().map(|link| link.bytes_per_s as f64 / unit as f64).collect(),
    };
    let candidates = multiplicative_weights(&network, options.epsilon);
    if candidates.is_empty() {
        // Every topology is connected, but its ranks may be joined only by links that lead one way.
        return Err(BlinkError::Unjoined { from: root, to: Rank::from(root == 0) });
    }
    let weights =
        reduce_tree_count(&network, &capacities, &candidates, options.threshold, options.time_limit);
    let none = Rate::default();
    let chosen = candidates.into_iter().zip(weights).filter(|(_, weight)| *weight > none);
    let weighted = chosen.map(|(candidate, weight)| {
        let paths = candidate.arcs.iter().map(|&arc| {
            let Arc { from, to } = network.arcs[arc];
            let (from, to) = (from as Rank, to as Rank);
            RankPath { from, to, hops: vec![topology.node(from), topology.node(to)] }
        });
        let weight = weight * Rate::from(i128::from(unit));
        WeightedTree { tree: SpanningTree { paths: paths.collect() }, default_root: root, weight }
    });
    Ok(weighted.collect())
}

/// A link between ranks, in one direction or in both. For both directions, its bandwidth is the
/// smaller one of the two.
struct UsableLink {
    from: Rank,
    to: Rank,
    bytes_per_s: u64,
}

fn links(topology: &Topology, one_way: bool) -> Vec<UsableLink> {
    let mut usable: BTreeMap<(NodeId, NodeId), UsableLink> = BTreeMap::new();
    for link in topology.links() {
        let (Some(from), Some(to)) = (topology.rank(link.from), topology.rank(link.to)) else { continue };
        if one_way {
            usable.insert((link.from, link.to), UsableLink { from, to, bytes_per_s: link.bytes_per_s });
        } else if let Some(back) = topology.link(link.to, link.from).filter(|_| from < to) {
            let bytes_per_s = link.bytes_per_s.min(back.bytes_per_s);
            usable.insert((link.from, link.to), UsableLink { from, to, bytes_per_s });
        }
    }
    usable.into_values().collect()
}

// Trees over switches: one hop inside a server, three phases across servers.
//
// Around a switch each of m ranks is the root of a one-hop tree to all others, for its m-th of the
// data (Blink, section 3.4). Across servers the data are cut into partitions, each with a root in
// every server. A partition is reduced inside each server to its root, reduced and broadcast in
// one hop among the roots, and broadcast inside each server (appendix A.2). As a tree over all
// ranks this is the trees of all servers and a star among their roots; each root is the centre of
// one star.
//
// The servers are found in the graph: they are the components over links faster than `b`, for the
// smallest bandwidth `b` for which there are several components with two ranks or more each.

/// The trees of a topology that has switches, all of the same weight.
fn switched_shapes(topology: &Topology, options: &BlinkOptions) -> Result<Vec<WeightedTree>, BlinkError> {
    match servers(topology) {
        Some(servers) => three_phases(topology, &servers, options),
        None => one_hop(topology),
    }
}

/// A star around each rank.
fn one_hop(topology: &Topology) -> Result<Vec<WeightedTree>, BlinkError> {
    (0..topology.ranks())
        .map(|default_root| {
            let paths = star(default_root, paths_from(topology, default_root), 0..topology.ranks())?;
            Ok(WeightedTree { tree: SpanningTree { paths }, default_root, weight: Rate::from(1) })
        })
        .collect()
}

/// The paths from one rank to others.
fn star(
    middle: Rank,
    paths: Vec<Option<RankPath>>,
    others: impl Iterator<Item = Rank>,
) -> Result<Vec<RankPath>, BlinkError> {
    let mut paths = paths;
    let others = others.filter(|&other| other != middle);
    others.map(|to| paths[to as usize].take().ok_or(BlinkError::Unjoined { from: middle, to })).collect()
}

/// Ranks that belong together, and the bandwidth above which links join them.
struct Servers {
    ranks: Vec<Vec<Rank>>,
    slower_bytes_per_s: u64,
}

fn servers(topology: &Topology) -> Option<Servers> {
    let bandwidths: BTreeSet<u64> = topology.links().iter().map(|link| link.bytes_per_s).collect();
    bandwidths.into_iter().find_map(|slower_bytes_per_s| {
        let ranks = connected_ranks(topology, |link| link.bytes_per_s > slower_bytes_per_s);
        let are_servers = ranks.len() > 1 && ranks.iter().all(|ranks| ranks.len() > 1);
        are_servers.then_some(Servers { ranks, slower_bytes_per_s })
    })
}

/// Ranks that links of this kind join, in any direction.
fn connected_ranks(topology: &Topology, kind: impl Fn(&Link) -> bool) -> Vec<Vec<Rank>> {
    let mut part: Vec<usize> = (0..topology.nodes().len()).collect();
    fn default_root(part: &mut [usize], mut node: usize) -> usize {
        while part[node] != node {
            part[node] = part[part[node]];
            node = part[node];
        }
        node
    }
    for link in topology.links().iter().filter(|link| kind(link)) {
        let (one, other) =
            (default_root(&mut part, link.from.0 as usize), default_root(&mut part, link.to.0 as usize));
        part[one.max(other)] = one.min(other);
    }
    let mut parts: BTreeMap<usize, Vec<Rank>> = BTreeMap::new();
    for rank in 0..topology.ranks() {
        parts.entry(default_root(&mut part, topology.node(rank).0 as usize)).or_default().push(rank);
    }
    parts.into_values().collect()
}

fn three_phases(
    topology: &Topology,
    servers: &Servers,
    options: &BlinkOptions,
) -> Result<Vec<WeightedTree>, BlinkError> {
    let trees_inside: Vec<Vec<Vec<RankPath>>> = servers
        .ranks
        .iter()
        .map(|ranks| trees_inside(topology, ranks, servers, options))
        .collect::<Result<_, _>>()?;
    // The number of partitions is the largest number of trees or of ranks of a server, so every
    // rank with a link to other servers is a root.
    let partitions =
        trees_inside.iter().map(Vec::len).chain(servers.ranks.iter().map(Vec::len)).max().unwrap_or(0);
    let mut shapes = Vec::with_capacity(partitions * servers.ranks.len());
    for partition in 0..partitions {
        let roots: Vec<Rank> = servers.ranks.iter().map(|ranks| ranks[partition % ranks.len()]).collect();
        let trees = trees_inside.iter().flat_map(|trees| trees[partition % trees.len()].iter().cloned());
        let trees: Vec<RankPath> = trees.collect();
        for &middle in &roots {
            // Roots are joined by the slow links between servers, even where other links join them
            // too.
            let slow = |from, to| {
                topology.link(from, to).is_some_and(|link| link.bytes_per_s <= servers.slower_bytes_per_s)
            };
            let mut paths = star(middle, paths_over(topology, middle, slow), roots.iter().copied())
                .or_else(|_| star(middle, paths_from(topology, middle), roots.iter().copied()))?;
            paths.extend(trees.iter().cloned());
            shapes.push(WeightedTree {
                tree: SpanningTree { paths },
                default_root: middle,
                weight: Rate::from(1),
            });
        }
    }
    Ok(shapes)
}

/// The trees of one server: one hop over its switches, or the trees of its links.
fn trees_inside(
    topology: &Topology,
    ranks: &[Rank],
    servers: &Servers,
    options: &BlinkOptions,
) -> Result<Vec<Vec<RankPath>>, BlinkError> {
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
        false => direct_shapes(&server, Collective::AllReduce, 0, options),
    };
    let back: BTreeMap<NodeId, NodeId> = numbers.into_iter().map(|(whole, own)| (own, whole)).collect();
    let path = |path: RankPath| RankPath {
        from: ranks[path.from as usize],
        to: ranks[path.to as usize],
        hops: path.hops.iter().map(|node| back[node]).collect(),
    };
    let shapes = shapes.map_err(|_| unjoined)?;
    Ok(shapes.into_iter().map(|weighted| weighted.tree.paths.into_iter().map(path).collect()).collect())
}

// Nearly optimal weights by multiplicative weights (Garg and Könemann 1998; Blink, section 3.2).
//
// Every resource (a link, or both directions of a link) has a length. In each step the minimum
// arborescence is taken, its weight grows by its smallest capacity, and the lengths of its
// resources grow. In the end all weights are divided by the largest overload. The result is at
// least 1 - O(ε) of the optimum.
//
// The textbook starts with lengths of `(1+ε)((1+ε)m)^(-1/ε)/c`, 10⁻³³ for small ε, which exceeds
// the precision of floats. Only ratios of lengths choose a tree. So lengths start at 1/c here, are
// divided by the largest length when that gets large, and the factor to the lengths of the
// textbook is kept as a logarithm.

/// Lengths are divided by the largest length when that is above this.
const LENGTH_MAX: f64 = 1e100;

/// Most tree edges that are followed before the weights must be good enough: about a second.
const WORK_MAX: u64 = 400_000_000;

/// Ranks, arcs, and the resources that arcs use.
#[derive(Clone, Debug)]
struct Network {
    ranks: usize,
    root: usize,
    arcs: Vec<Arc>,
    /// By arc: the resource that it uses.
    resources: Vec<usize>,
    /// By resource.
    capacities: Vec<f64>,
}

/// A tree: the resources that it uses, each once and in order, and the arcs with which it was found
/// first.
#[derive(Clone, Debug, PartialEq)]
struct Candidate {
    resources: Vec<usize>,
    arcs: Vec<usize>,
    weight: f64,
}

/// Trees with weights that fit the capacities, the heaviest first. Empty if no tree spans all
/// ranks.
fn multiplicative_weights(network: &Network, epsilon: f64) -> Vec<Candidate> {
    let resources = network.capacities.len();
    let mut lengths: Vec<f64> = network.capacities.iter().map(|capacity| capacity.recip()).collect();
    // Logarithm of the factor from the lengths here to the lengths of the textbook.
    let mut factor = (1.0 + epsilon).ln() - ((1.0 + epsilon) * resources as f64).ln() / epsilon;
    let mut found: BTreeMap<Vec<usize>, (Vec<usize>, f64)> = BTreeMap::new();
    let mut work = 0;
    while work < WORK_MAX {
        work += (network.ranks * network.arcs.len()).max(1) as u64;
        let arc_lengths: Vec<f64> = network.resources.iter().map(|&resource| lengths[resource]).collect();
        let Some(arcs) = shortest(network.ranks, network.root, &network.arcs, &arc_lengths) else { break };
        let length: f64 = arcs.iter().map(|&arc| arc_lengths[arc]).sum();
        if factor + length.ln() >= 0.0 {
            break;
        }
        let mut used: Vec<usize> = arcs.iter().map(|&arc| network.resources[arc]).collect();
        used.sort_unstable();
        let least = used.iter().map(|&resource| network.capacities[resource]).fold(f64::INFINITY, f64::min);
        for &resource in &used {
            lengths[resource] *= 1.0 + epsilon * least / network.capacities[resource];
        }
        found.entry(used).or_insert((arcs, 0.0)).1 += least;
        let longest = lengths.iter().copied().fold(0.0, f64::max);
        if longest > LENGTH_MAX {
            lengths.iter_mut().for_each(|length| *length /= longest);
            factor += longest.ln();
        }
    }
    within_capacity(network, found)
}

fn within_capacity(network: &Network, found: BTreeMap<Vec<usize>, (Vec<usize>, f64)>) -> Vec<Candidate> {
    let mut loads = vec![0.0; network.capacities.len()];
    for (resources, (_, weight)) in &found {
        for &resource in resources {
            loads[resource] += weight;
        }
    }
    let overload = loads.iter().zip(&network.capacities).map(|(load, capacity)| load / capacity);
    let overload = overload.fold(0.0, f64::max);
    let candidate = |(resources, (arcs, weight))| Candidate { resources, arcs, weight: weight / overload };
    let mut candidates: Vec<_> = found.into_iter().map(candidate).collect();
    candidates.sort_by(|one, other| other.weight.total_cmp(&one.weight));
    candidates
}

// Fewer trees by an integer program (Blink, section 3.2.1).
//
// The program chooses candidates of the multiplicative weights, as many as fit when each candidate
// carries the rate of one link. If their rate is more than a threshold below the rate of the
// weights, the 1, 2, 4 and so on heaviest candidates may carry any share (the paper does not say
// which). If all candidates may carry any share, the program is linear. If even that fails, the
// weights stay unchanged.
//
// **Invariant:** the result fits exactly: the numbers of the solver become rationals with one
// small denominator, and are divided by the largest remaining overload.

/// The number of candidates of the program: those with the largest weights. With more candidates,
/// the solver takes minutes.
const CANDIDATES_MAX: usize = 96;

/// The denominators to try before weights are rounded down.
const DENOMINATORS: std::ops::RangeInclusive<i128> = 1..=360;

/// The denominator of weights that are rounded down.
const DENOMINATOR_FINE: i128 = 1 << 20;

/// Largest difference between a number of the solver and the rational for it.
const MISS: f64 = 1e-6;

/// The weight of each candidate, zero for most, in the unit of the capacities. `capacities` are the
/// exact capacities of the network.
fn reduce_tree_count(
    network: &Network,
    capacities: &[Rate],
    candidates: &[Candidate],
    threshold: f64,
    time_limit: Duration,
) -> Vec<Rate> {
    let rate: f64 = candidates.iter().map(|candidate| candidate.weight).sum();
    let chosen = &candidates[..candidates.len().min(CANDIDATES_MAX)];
    let mut shared = 0;
    loop {
        if let Some(weights) = solve_program(network, chosen, shared, time_limit) {
            let weights = rationalised(capacities, chosen, &weights);
            let reached: Rate = weights.iter().sum();
            if to_f64(reached) >= (1.0 - threshold) * rate {
                return weights;
            }
        }
        if shared >= chosen.len() {
            let weights: Vec<f64> = candidates.iter().map(|candidate| candidate.weight).collect();
            return rationalised(capacities, candidates, &weights);
        }
        shared = (2 * shared).max(1).min(chosen.len());
    }
}

/// The weights with the largest sum. The first `shared` candidates may have any weight; every other
/// candidate has weight 0 or 1.
fn solve_program(
    network: &Network,
    candidates: &[Candidate],
    shared: usize,
    time_limit: Duration,
) -> Option<Vec<f64>> {
    let mut variables = ProblemVariables::new();
    let weights: Vec<_> = (0..candidates.len())
        .map(|index| variables.add(if index < shared { variable().min(0.0) } else { variable().binary() }))
        .collect();
    let all: Expression = weights.iter().sum();
    let mut loads: Vec<Expression> = vec![Expression::from(0.0); network.capacities.len()];
    for (candidate, &weight) in candidates.iter().zip(&weights) {
        for &resource in &candidate.resources {
            loads[resource] += weight;
        }
    }
    let mut model = variables.maximise(all).using(microlp).with_time_limit(time_limit.as_secs_f64());
    for (load, &capacity) in loads.into_iter().zip(&network.capacities) {
        model = model.with(load.leq(capacity));
    }
    let solution = model.solve().ok()?;
    Some(weights.into_iter().map(|weight| solution.value(weight)).collect())
}

/// Rationals near the weights, scaled down by the largest overload.
fn rationalised(capacities: &[Rate], candidates: &[Candidate], weights: &[f64]) -> Vec<Rate> {
    let is_close_with = |denominator: i128| {
        let close = |&weight: &f64| {
            let scaled = weight * denominator as f64;
            (scaled - scaled.round()).abs() <= MISS * denominator as f64
        };
        weights.iter().all(close)
    };
    let small_denominator = DENOMINATORS.into_iter().find(|&denominator| is_close_with(denominator));
    let whole = |&weight: &f64| match small_denominator {
        Some(denominator) => (weight * denominator as f64).round().max(0.0) as i128,
        None => (weight * DENOMINATOR_FINE as f64).floor().max(0.0) as i128,
    };
    let denominator = small_denominator.unwrap_or(DENOMINATOR_FINE);
    let weights: Vec<i128> = weights.iter().map(whole).collect();
    let mut loads = vec![0_i128; capacities.len()];
    for (candidate, weight) in candidates.iter().zip(&weights) {
        for &resource in &candidate.resources {
            loads[resource] += weight;
        }
    }
    let loads = loads.into_iter().zip(capacities);
    let overload = loads.map(|(load, capacity)| Rate::new(load, denominator) / capacity).max();
    let overload = overload.unwrap_or_default().max(Rate::from(1));
    weights.into_iter().map(|weight| Rate::new(weight, denominator) / overload).collect()
}

fn to_f64(rate: Rate) -> f64 {
    *rate.numer() as f64 / *rate.denom() as f64
}

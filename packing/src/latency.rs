//! Packings with fewer trees, or trees of less depth, for short messages.
//!
//! An optimal packing is best for large messages. The first byte takes the latency of the longest
//! path, and so do all bytes of a short message. [`predicted_ns`] gives the time of a packing for a
//! number of bytes. [`pack_for`] takes the fastest of several packings: the optimum, the optimum
//! without its deepest trees, and single trees over paths of least latency in which at most 1, 2, 4
//! and so on edges use the same link. Few uses make a deep tree of high bandwidth, many uses a flat
//! tree of low bandwidth.
//!
//! **Invariant:** the result is a packing for the same collective with the bound and certificate of
//! the optimum, and it is not slower than the optimum by [`predicted_ns`].

use num_rational::Ratio;
use pleach_vocabulary::{Collective, Rank};

use super::scale::fitted;
use super::{Edge, PackError, PackOptions, Packing, Path, Rate, Tree, pack};
use crate::topology::{Link, NodeId, Topology};

/// Cost of a chunk without its bytes: one signal written and one read, in nanoseconds.
const CHUNK_NS: u64 = 500;

/// Largest number of ranks for which packings of less depth are computed.
const FLAT_RANKS_MAX: u32 = 64;

/// Packs for a collective of `bytes` bytes, counted as the rate counts them. With the optimal
/// strategy and no given number of trees, the result is the fastest of several packings. Otherwise
/// it is the result of [`pack`]. A group with a topology does the same; see `Wiring` of
/// `pleach-schedule`.
pub fn pack_for(
    topology: &Topology,
    collective: Collective,
    options: &PackOptions,
    bytes: u64,
) -> Result<Packing, PackError> {
    let packing = pack(topology, collective, options)?;
    Ok(if options.may_be_shallow() { fastest(packing, topology, bytes) } else { packing })
}

/// The predicted time of a packing for `bytes` bytes, in nanoseconds. Bytes are counted as the rate
/// counts them.
///
/// Let `d` be the number of edges and `l` the latency of the longest path (up and down together for
/// all-reduce), `t` the time of the bytes at the rate, and `k` the number of chunks. The time is `l
/// + (1 + (d-1)/k)·t + k·CHUNK_NS`, for the best `k`.
#[must_use]
pub fn predicted_ns(packing: &Packing, topology: &Topology, bytes: u64) -> u64 {
    let turns = if packing.collective == Collective::AllReduce { 2 } else { 1 };
    let (latency_ns, edges) = longest_path(packing, topology);
    if packing.rate == Ratio::from_integer(0) {
        return 0;
    }
    let per_ns = *packing.rate.numer() as f64 / *packing.rate.denom() as f64 / 1e9;
    let data_ns = bytes as f64 / per_ns;
    let behind = f64::from((turns * edges).saturating_sub(1));
    let chunks = (behind * data_ns / CHUNK_NS as f64).sqrt().floor().max(1.0);
    let sum_ns = (1.0 + behind / chunks) * data_ns + chunks * CHUNK_NS as f64;
    sum_ns as u64 + u64::from(turns) * latency_ns
}

/// The latency of the longest path between root and leaf in any tree, in nanoseconds, and the
/// largest number of edges of such a path.
#[must_use]
pub fn longest_path(packing: &Packing, topology: &Topology) -> (u64, u32) {
    let paths = packing.trees.iter().map(|tree| longest_path_of_tree(tree, topology));
    paths.fold((0, 0), |most, path| (most.0.max(path.0), most.1.max(path.1)))
}

/// The latency and the number of edges of the longest path of one tree.
pub(super) fn longest_path_of_tree(tree: &Tree, topology: &Topology) -> (u64, u32) {
    let mut paths = vec![None; topology.ranks() as usize];
    paths[tree.root as usize] = Some((0, 0));
    let (mut left, mut most) = (tree.edges.len(), (0, 0));
    // Edges are ordered either from the root or to the root.
    let mut pass = |edge: &Edge, paths: &mut Vec<Option<(u64, u32)>>| {
        let ends = [(edge.from, edge.to), (edge.to, edge.from)];
        for (near, far) in ends.map(|(near, far)| (near as usize, far as usize)) {
            if let (Some((latency_ns, edges)), None) = (paths[near], paths[far]) {
                let path = (latency_ns + edge_ns(edge, topology), edges + 1);
                most = (most.0.max(path.0), most.1.max(path.1));
                paths[far] = Some(path);
                left -= 1;
                return;
            }
        }
    };
    tree.edges.iter().for_each(|edge| pass(edge, &mut paths));
    tree.edges.iter().rev().for_each(|edge| pass(edge, &mut paths));
    debug_assert_eq!(left, 0, "edges are in order");
    most
}

/// The latency of a byte over an edge, on the slowest of its paths.
fn edge_ns(edge: &Edge, topology: &Topology) -> u64 {
    let link = |pair: &[NodeId]| topology.link(pair[0], pair[1]).map_or(0, |link| link.latency_ns);
    edge.paths.iter().map(|path| path.hops.windows(2).map(link).sum()).max().unwrap_or(0)
}

/// The fastest packing for `bytes` bytes: the optimum, or a packing with fewer trees or less depth.
fn fastest(optimum: Packing, topology: &Topology, bytes: u64) -> Packing {
    let mut all = vec![optimum];
    all.extend(shallower_packings(&all[0], topology));
    let place = fastest_packing(&all, topology, bytes);
    all.swap_remove(place)
}

/// The index of the fastest of some packings for the same collective; the first one if several are
/// equally fast.
///
/// # Panics
///
/// If there is no packing.
#[must_use]
pub fn fastest_packing(packings: &[Packing], topology: &Topology, bytes: u64) -> usize {
    let time = |&place: &usize| predicted_ns(&packings[place], topology, bytes);
    (0..packings.len()).min_by_key(time).expect("there are packings")
}

/// Packings with fewer trees or less depth than the optimum, each of which is the fastest for some
/// number of bytes. Empty if there are so many ranks that the search would take longer than the
/// optimum.
#[must_use]
pub fn shallower_packings(optimum: &Packing, topology: &Topology) -> Vec<Packing> {
    if topology.ranks() > FLAT_RANKS_MAX {
        return Vec::new();
    }
    let mut found = without_deepest(optimum, topology);
    found.extend(single_tree_packings(optimum, topology));
    // The highest rate first; a packing with a lower rate and no less depth is never faster.
    found.sort_by_key(|packing| (std::cmp::Reverse(packing.rate), longest_path(packing, topology)));
    let mut least = longest_path(optimum, topology);
    found.retain(|packing| {
        let path = longest_path(packing, topology);
        let is_flatter = path.0 < least.0 || path.1 < least.1;
        least = if is_flatter { (least.0.min(path.0), least.1.min(path.1)) } else { least };
        is_flatter
    });
    found
}

/// The packings without the deepest trees, if all trees carry the same data.
fn without_deepest(packing: &Packing, topology: &Topology) -> Vec<Packing> {
    if !matches!(
        packing.collective,
        Collective::AllReduce | Collective::Broadcast { .. } | Collective::Reduce { .. }
    ) {
        return Vec::new();
    }
    let depth = |tree: &Tree| longest_path_of_tree(tree, topology);
    let mut depths: Vec<(u64, u32)> = packing.trees.iter().map(depth).collect();
    depths.sort_unstable();
    depths.dedup();
    depths.pop();
    let kept = |most: &(u64, u32)| {
        let trees = packing.trees.iter().filter(|tree| depth(tree) <= *most).cloned();
        with_trees(packing, trees.collect())
    };
    depths.iter().map(kept).collect()
}

/// A packing for the same collective with other trees.
fn with_trees(packing: &Packing, trees: Vec<Tree>) -> Packing {
    let rate = trees.iter().map(|tree| tree.weight).sum();
    Packing { trees, rate, ..packing.clone() }
}

/// Packings with one tree for each root over the paths of least latency.
fn single_tree_packings(packing: &Packing, topology: &Topology) -> Vec<Packing> {
    let ranks = topology.ranks();
    let (roots, is_one): (Vec<Rank>, bool) = match packing.collective {
        Collective::AllReduce => ((0..ranks).collect(), true),
        Collective::Broadcast { root } | Collective::Reduce { root } => (vec![root], true),
        Collective::AllGather | Collective::ReduceScatter => ((0..ranks).collect(), false),
        _ => return Vec::new(),
    };
    let is_inwards = matches!(packing.collective, Collective::Reduce { .. } | Collective::ReduceScatter);
    let reversed;
    let grown_on = if is_inwards {
        reversed = topology.reversed();
        &reversed
    } else {
        topology
    };
    let mut flat = Vec::new();
    let is_both_ways = packing.collective == Collective::AllReduce;
    let roots = if is_both_ways { middle(grown_on).into_iter().collect() } else { roots };
    let mut uses = 1;
    loop {
        let grow = |&root: &Rank| shallow_tree(grown_on, root, uses, is_both_ways);
        let trees: Vec<Option<Tree>> = roots.iter().map(grow).collect();
        let is_last = uses > ranks;
        if is_one {
            let one = trees.into_iter().flatten().min_by_key(|tree| longest_path_of_tree(tree, grown_on));
            flat.extend(one.map(|tree| vec![tree]));
        } else if let Some(all) = trees.into_iter().collect::<Option<Vec<Tree>>>() {
            flat.push(all);
        }
        if is_last {
            break;
        }
        uses *= 2;
    }
    let to_root = is_inwards || packing.collective == Collective::AllReduce;
    let mut packings = Vec::with_capacity(flat.len());
    for trees in flat {
        // All weights are equal, and scaling keeps them equal.
        let Some(mut trees) = fitted(grown_on, packing.collective, trees) else { continue };
        if to_root {
            trees.iter_mut().for_each(Tree::turn);
        }
        packings.push(with_trees(packing, trees));
    }
    packings
}

/// The rank with the least latency to all others over links that lead in both directions.
fn middle(topology: &Topology) -> Option<Rank> {
    let ranks = topology.ranks();
    let tree = |root| {
        shallow_tree(topology, root, ranks, true).map(|tree| (longest_path_of_tree(&tree, topology), root))
    };
    (0..ranks).filter_map(tree).min().map(|(_, root)| root)
}

/// The tree of least latency from the root in which no link serves more than `uses` edges; `None`
/// if there is none. It leads away from the root and has weight one byte a second.
fn shallow_tree(topology: &Topology, root: Rank, uses: u32, is_both_ways: bool) -> Option<Tree> {
    let mut used = std::collections::BTreeMap::new();
    let mut reached: Vec<Option<u64>> = vec![None; topology.ranks() as usize];
    reached[root as usize] = Some(0);
    let mut edges: Vec<Edge> = Vec::new();
    while edges.len() + 1 < topology.ranks() as usize {
        let is_open = |link: &Link| {
            let free = used.get(&(link.from, link.to)).is_none_or(|&count| count < uses);
            free && (!is_both_ways || topology.link(link.to, link.from).is_some())
        };
        let (hops, latency_ns) = nearest_rank(topology, &reached, is_open)?;
        for pair in hops.windows(2) {
            *used.entry((pair[0], pair[1])).or_insert(0) += 1;
        }
        let from = topology.rank(hops[0])?;
        let to = topology.rank(*hops.last()?)?;
        reached[to as usize] = Some(latency_ns);
        edges.push(Edge { from, to, paths: vec![Path { hops, weight: Rate::from_integer(1) }] });
    }
    Some(Tree { root, weight: Rate::from_integer(1), edges })
}

/// The path of least arrival time from a reached rank through switches to a rank that is not
/// reached, and that time.
fn nearest_rank(
    topology: &Topology,
    reached: &[Option<u64>],
    is_open: impl Fn(&Link) -> bool,
) -> Option<(Vec<NodeId>, u64)> {
    let mut above = vec![None; topology.nodes().len()];
    let mut left = std::collections::BTreeSet::new();
    for (rank, latency_ns) in (0..).zip(reached) {
        left.extend(latency_ns.map(|latency_ns| (latency_ns, 0_u32, topology.node(rank), None)));
    }
    // Ranks are ordered by time, then by edges, then by number. At equal times the tree of less
    // depth is taken.
    while let Some((latency_ns, hops, node, from)) = left.pop_first() {
        let is_start = from.is_none();
        if above[node.0 as usize].is_some() {
            continue;
        }
        above[node.0 as usize] = Some(from);
        let rank = topology.rank(node);
        if rank.is_some_and(|rank| reached[rank as usize].is_none()) {
            let mut path = vec![node];
            while let Some(Some(from)) = above[path[path.len() - 1].0 as usize] {
                path.push(from);
            }
            path.reverse();
            return Some((path, latency_ns));
        }
        if rank.is_none() || is_start {
            for link in topology.leaving(node).iter().filter(|link| is_open(link)) {
                if above[link.to.0 as usize].is_none() {
                    left.insert((latency_ns + link.latency_ns, hops + 1, link.to, Some(node)));
                }
            }
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Certificate;
    use crate::samples::Random;
    use crate::samples::random_topology;
    use crate::topology::LATENCY_NS;
    use std::collections::BTreeMap;

    const GB_S: u64 = 1_000_000_000;

    fn switched(ranks: u32) -> Topology {
        let mut builder = Topology::builder();
        let nodes: Vec<NodeId> = (0..ranks).map(|rank| builder.rank(format!("r{rank}"))).collect();
        let switch = builder.switch("s");
        nodes.into_iter().for_each(|node| builder.duplex(node, switch, 25 * GB_S, LATENCY_NS));
        builder.build().unwrap()
    }

    /// A chain of all ranks, from the root or to the root.
    fn chain(topology: &Topology, collective: Collective, rate: Rate) -> Packing {
        let switch = NodeId(topology.ranks());
        let mut tree = Tree { root: 0, weight: rate, edges: Vec::new() };
        for to in 1..topology.ranks() {
            let hops = vec![topology.node(to - 1), switch, topology.node(to)];
            tree.edges.push(Edge { from: to - 1, to, paths: vec![Path { hops, weight: rate }] });
        }
        if collective == Collective::AllReduce {
            tree.turn();
        }
        Packing { collective, rate, bound: rate, certificate: Certificate::Alone, trees: vec![tree] }
    }

    #[test]
    fn the_time_is_that_of_the_longest_way_and_of_the_bytes_at_the_rate() {
        let topology = switched(3);
        let rate = Rate::from_integer(i128::from(GB_S));
        let broadcast = chain(&topology, Collective::Broadcast { root: 0 }, rate);
        assert_eq!(predicted_ns(&broadcast, &topology, 0), 4 * LATENCY_NS + CHUNK_NS);
        // One chunk is best here, as further chunks would cost more than they save. 100 bytes take
        // 100 ns over each of two edges.
        assert_eq!(predicted_ns(&broadcast, &topology, 100), 4 * LATENCY_NS + CHUNK_NS + 200);
        // 20 chunks of 10 kB each.
        assert_eq!(predicted_ns(&broadcast, &topology, 200_000), 4_000 + 210_000 + 20 * CHUNK_NS);
        let all_reduce = chain(&topology, Collective::AllReduce, rate);
        assert_eq!(predicted_ns(&all_reduce, &topology, 100), 8 * LATENCY_NS + CHUNK_NS + 400);
    }

    #[test]
    fn few_bytes_go_over_flat_trees_and_many_over_the_optimum() {
        let topology = switched(16);
        for collective in [Collective::AllReduce, Collective::Broadcast { root: 0 }] {
            let optimum = chain(&topology, collective, Rate::from_integer(i128::from(26 * GB_S)));
            let depths: Vec<u32> = [8, 1 << 14, 1 << 20, 1 << 30]
                .map(|bytes| {
                    longest_path_of_tree(&fastest(optimum.clone(), &topology, bytes).trees[0], &topology).1
                })
                .to_vec();
            assert_eq!((depths[0], depths[3]), (1, 15), "{collective:?}: {depths:?}");
            assert!(depths.is_sorted() && depths[1] < 15, "{collective:?}: {depths:?}");
            assert_eq!(fastest(optimum.clone(), &topology, 1 << 30), optimum);
        }
    }

    #[test]
    fn what_is_packed_for_few_bytes_is_flat_and_what_is_asked_for_is_left_alone() {
        let topology = crate::topology::preset("dgx-1v").unwrap();
        let collective = Collective::Broadcast { root: 2 };
        let options = PackOptions::default();
        let optimum = pack(&topology, collective, &options).unwrap();
        assert_eq!(pack_for(&topology, collective, &options, 1 << 32), Ok(optimum.clone()));
        let flat = pack_for(&topology, collective, &options, 8).unwrap();
        crate::check(&topology, &flat).unwrap();
        assert!(flat.rate < optimum.rate && flat.bound == optimum.bound);
        assert!(longest_path(&flat, &topology) < longest_path(&optimum, &topology));
        assert!(predicted_ns(&flat, &topology, 8) < predicted_ns(&optimum, &topology, 8));
        let options = PackOptions { trees_per_root: Some(1), ..options };
        assert_eq!(pack_for(&topology, collective, &options, 8), pack(&topology, collective, &options));
    }

    fn assert_fits(packing: &Packing, topology: &Topology) {
        let mut loads = BTreeMap::new();
        for path in packing.trees.iter().flat_map(|tree| &tree.edges).flat_map(|edge| &edge.paths) {
            for pair in path.hops.windows(2) {
                *loads.entry((pair[0], pair[1])).or_insert(Rate::from_integer(0)) += path.weight;
                if packing.collective == Collective::AllReduce {
                    *loads.entry((pair[1], pair[0])).or_insert(Rate::from_integer(0)) += path.weight;
                }
            }
        }
        for ((from, to), load) in loads {
            let link = topology.link(from, to).expect("paths go over links");
            assert!(load <= Rate::from_integer(i128::from(link.bytes_per_s)));
        }
    }

    #[test]
    fn flat_trees_reach_all_ranks_and_no_link_carries_more_than_it_can() {
        let mut random = Random::new(9);
        let mut trees = 0;
        for round in 0..300 {
            let ranks = 2 + random.below(6) as usize;
            let Some(topology) = random_topology(&mut random, ranks, round % 3, round % 2 == 0) else {
                continue;
            };
            let collective = [
                Collective::AllReduce,
                Collective::Broadcast { root: 1 },
                Collective::Reduce { root: 0 },
                Collective::AllGather,
                Collective::ReduceScatter,
            ][round % 5];
            let rate = Rate::from_integer(1);
            let none =
                Packing { collective, rate, bound: rate, certificate: Certificate::Alone, trees: Vec::new() };
            let flat = single_tree_packings(&none, &topology);
            assert!(!flat.is_empty());
            for packing in flat {
                assert_fits(&packing, &topology);
                assert_eq!(packing.rate, packing.trees.iter().map(|tree| tree.weight).sum());
                for tree in &packing.trees {
                    assert!(tree.weight > Rate::from_integer(0));
                    assert_reaches(tree, &topology, collective);
                    trees += 1;
                }
            }
        }
        assert!(trees > 1_000, "{trees}");
    }

    fn assert_reaches(tree: &Tree, topology: &Topology, collective: Collective) {
        let is_outwards = matches!(collective, Collective::Broadcast { .. } | Collective::AllGather);
        let mut reached = vec![false; ranks_of(topology)];
        reached[tree.root as usize] = true;
        let mut edges: Vec<(Rank, Rank)> = tree.edges.iter().map(|edge| (edge.from, edge.to)).collect();
        if !is_outwards {
            edges = edges.into_iter().rev().map(|(from, to)| (to, from)).collect();
        }
        for (near, far) in edges {
            assert!(reached[near as usize] && !std::mem::replace(&mut reached[far as usize], true));
        }
        assert!(reached.iter().all(|&is_reached| is_reached));
        for edge in &tree.edges {
            let hops = &edge.paths[0].hops;
            assert_eq!(topology.rank(hops[0]), Some(edge.from));
            assert_eq!(topology.rank(hops[hops.len() - 1]), Some(edge.to));
            assert!(hops[1..hops.len() - 1].iter().all(|&node| topology.rank(node).is_none()));
        }
    }

    fn ranks_of(topology: &Topology) -> usize {
        topology.ranks() as usize
    }

    #[test]
    fn without_its_deepest_trees_a_packing_has_the_rate_of_the_others() {
        let topology = switched(4);
        let collective = Collective::AllReduce;
        let mut packing = chain(&topology, collective, Rate::from_integer(3));
        let none = Packing { trees: Vec::new(), ..packing.clone() };
        let flat = single_tree_packings(&none, &topology).pop().unwrap();
        packing.trees.extend(flat.trees.clone());
        let less = without_deepest(&packing, &topology);
        assert_eq!(less.len(), 1);
        assert_eq!((less[0].trees.clone(), less[0].rate), (flat.trees, flat.rate));
        assert_eq!(less[0].bound, packing.bound);
    }
}

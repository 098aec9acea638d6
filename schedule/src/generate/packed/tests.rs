use std::collections::BTreeMap;
use std::sync::Arc;

use pleach_packing::topology::{LATENCY_NS, NodeId};
use pleach_packing::{Certificate, Edge, Path, Tree as PackedTree};
use pleach_vocabulary::random::Random;

use super::super::interpreter::{LAYOUTS, collectives, interpret};
use super::super::{Algorithm, generate};
use super::*;
use crate::Op;
use crate::verify::verify;

/// Everything that has a packing.
fn packed_collectives(ranks: u32) -> Vec<Collective> {
    let mut all = collectives(ranks).to_vec();
    all.retain(|collective| {
        !matches!(collective, Collective::AllToAll | Collective::Barrier | Collective::SendRecv { .. })
    });
    all
}

/// Every rank joined to every other one.
fn complete(ranks: u32) -> Topology {
    let mut builder = Topology::builder();
    let nodes: Vec<NodeId> = (0..ranks).map(|rank| builder.rank(format!("r{rank}"))).collect();
    for (index, &one) in nodes.iter().enumerate() {
        for &other in &nodes[index + 1..] {
            builder.duplex(one, other, 1_000_000_000, LATENCY_NS);
        }
    }
    builder.build().expect("connected")
}

fn edge(topology: &Topology, from: Rank, to: Rank, weight: Rate) -> Edge {
    let hops = vec![topology.node(from), topology.node(to)];
    Edge { from, to, paths: vec![Path { hops, weight }] }
}

/// A tree of all ranks, drawn at random; edges in the order that packings have.
fn random_tree(
    topology: &Topology,
    random: &mut Random,
    upwards: bool,
    root: Rank,
    weight: Rate,
) -> PackedTree {
    let ranks = topology.ranks();
    let mut link_latency_ns = vec![root];
    let mut left: Vec<Rank> = (0..ranks).filter(|&rank| rank != root).collect();
    let mut edges = Vec::new();
    while !left.is_empty() {
        let child = left.swap_remove(random.index(left.len()));
        let parent = link_latency_ns[random.index(link_latency_ns.len())];
        link_latency_ns.push(child);
        let (from, to) = if upwards { (child, parent) } else { (parent, child) };
        edges.push(edge(topology, from, to, weight));
    }
    if upwards {
        edges.reverse();
    }
    PackedTree { root, weight, edges }
}

/// A path that visits some ranks on the way.
fn random_path(
    topology: &Topology,
    random: &mut Random,
    (from, to, root): (Rank, Rank, Rank),
    weight: Rate,
) -> PackedTree {
    let mut between: Vec<Rank> = (0..topology.ranks()).filter(|&rank| rank != from && rank != to).collect();
    random.shuffle(&mut between);
    between.truncate(random.index(between.len() + 1));
    let stops: Vec<Rank> = [from].into_iter().chain(between).chain([to]).collect();
    let edges = stops.windows(2).map(|pair| edge(topology, pair[0], pair[1], weight)).collect();
    PackedTree { root, weight, edges }
}

fn random_packing(topology: &Topology, collective: Collective, random: &mut Random) -> Packing {
    let ranks = topology.ranks();
    let weight = |random: &mut Random| {
        Rate::new((1 + i128::from(random.below(9))) * 1_000_000_000, 1 + i128::from(random.below(5)))
    };
    let mut trees = Vec::new();
    for part in 0..collective.parts(ranks) {
        for _ in 0..=random.below(3) {
            let weight = weight(random);
            trees.push(match collective {
                Collective::Gather { root } if part != root => {
                    random_path(topology, random, (part, root, root), weight)
                }
                Collective::Scatter { root } if part != root => {
                    random_path(topology, random, (root, part, root), weight)
                }
                Collective::Gather { root } | Collective::Scatter { root } => {
                    PackedTree { root, weight, edges: Vec::new() }
                }
                _ => {
                    let any = random.below(u64::from(ranks)) as Rank;
                    let own = if collective.parts(ranks) == 1 { any } else { part };
                    let root = collective.root().unwrap_or(own);
                    random_tree(topology, random, collective.reduces(), root, weight)
                }
            });
        }
    }
    packing(collective, trees)
}

fn packing(collective: Collective, trees: Vec<PackedTree>) -> Packing {
    let rate = trees.iter().fold(Rate::from_integer(0), |sum, tree| sum + tree.weight);
    Packing { collective, rate, bound: rate, certificate: Certificate::Alone, trees }
}

/// Proves and interprets schedules of random packings of `ranks`; returns the number of schedules.
fn prove_random_packings(ranks: u32, random: &mut Random) -> usize {
    let mut proved = 0;
    let topology = complete(ranks);
    for collective in packed_collectives(ranks) {
        for draw in 0..2 {
            let packing = random_packing(&topology, collective, random);
            let trees = Arc::new(PackedTrees::new(&packing, &topology, 0).expect("a packing"));
            assert_eq!(trees.loss(), Rate::from_integer(0));
            let algorithm = Algorithm::Packed(Some(trees));
            for access in [Access::Put, Access::Mapped] {
                let schedule = generate(collective, &algorithm, ranks, access).expect("it fits");
                let what = || format!("{collective}, {ranks} ranks, {access}, draw {draw}");
                for layout in LAYOUTS {
                    let chunks = schedule.window + 1;
                    interpret(&schedule, layout, chunks, random.bits())
                        .unwrap_or_else(|error| panic!("{}, {layout:?}: {error}", what()));
                }
                assert_eq!(schedule.blocks.len(), packing.trees.len());
                verify(schedule).unwrap_or_else(|violation| panic!("{}: {violation}", what()));
                proved += 1;
            }
        }
    }
    proved
}

/// Of one rank count: collectives, draws, forms.
const RANDOM_PACKINGS: usize = 7 * 2 * 2;

#[test]
fn schedules_of_random_packings_are_proved_and_do_their_collective_in_any_order_and_layout() {
    let mut random = Random::new(11);
    for ranks in 2..=5 {
        assert_eq!(prove_random_packings(ranks, &mut random), RANDOM_PACKINGS);
    }
}

/// As the test before, which another thread runs: six ranks take as long as all fewer together.
#[test]
fn schedules_of_random_packings_of_six_ranks_are_proved_and_do_their_collective() {
    assert_eq!(prove_random_packings(6, &mut Random::new(12)), RANDOM_PACKINGS);
}

/// What each link carries in a chunk of every block, weighted, is what the trees of the packing
/// carry over it.
#[test]
fn every_edge_carries_the_share_of_its_trees_and_nothing_else() {
    let mut random = Random::new(5);
    for collective in packed_collectives(5) {
        let topology = complete(5);
        let packing = random_packing(&topology, collective, &mut random);
        let trees = Arc::new(PackedTrees::new(&packing, &topology, 0).expect("a packing"));
        let algorithm = Algorithm::Packed(Some(trees));
        let schedule = generate(collective, &algorithm, 5, Access::Put).expect("it fits");
        let mut total = BTreeMap::new();
        for block in &schedule.blocks {
            *total.entry(block.part).or_insert(0i128) += i128::from(block.weight);
        }
        let mut sent: BTreeMap<(Rank, Rank), Rate> = BTreeMap::new();
        for (from, lanes) in (0..).zip(&schedule.programs) {
            for lane in lanes {
                let block = schedule.blocks[lane.block as usize];
                for step in &lane.steps {
                    if let Op::Put { to, .. } = step.op {
                        let share = Rate::new(block.weight.into(), total[&block.part]);
                        *sent.entry((from, to)).or_insert(Rate::from_integer(0)) += share;
                    }
                }
            }
        }
        let mut wanted: BTreeMap<(Rank, Rank), Rate> = BTreeMap::new();
        for tree in &packing.trees {
            let part = |tree: &PackedTree| {
                let edges: Vec<_> = tree.edges.iter().map(|edge| (edge.from, edge.to)).collect();
                part_of(collective, 0, tree, &edges, 5).expect("it is one")
            };
            let mut all = packing.trees.iter().filter(|other| part(other) == part(tree));
            let sum = all.by_ref().fold(Rate::from_integer(0), |sum, other| sum + other.weight);
            for edge in &tree.edges {
                let mut carry = |from, to| {
                    *wanted.entry((from, to)).or_insert(Rate::from_integer(0)) += tree.weight / sum;
                };
                carry(edge.from, edge.to);
                if collective == Collective::AllReduce {
                    carry(edge.to, edge.from);
                }
            }
        }
        assert_eq!(sent, wanted, "{collective}");
    }
}

#[test]
fn weights_that_do_not_fit_are_rounded_and_the_loss_is_told() {
    let topology = complete(2);
    let tree = |numerator, denominator| {
        let weight = Rate::new(numerator, denominator);
        PackedTree { root: 0, weight, edges: vec![edge(&topology, 0, 1, weight)] }
    };
    let weights = |trees: Vec<PackedTree>| {
        let packing = packing(Collective::Broadcast { root: 0 }, trees);
        let trees = PackedTrees::new(&packing, &topology, 0).expect("a packing");
        (trees.trees.iter().map(|tree| tree.weight).collect::<Vec<_>>(), trees.loss())
    };
    let exact_weights =
        weights(vec![tree(50_000_000_000, 7), tree(25_000_000_000, 14), tree(25_000_000_000, 1)]);
    assert_eq!(exact_weights, ([8, 2, 28].iter().map(|weight| weight / 2).collect(), Rate::from_integer(0)));
    let (rounded, loss) = weights(vec![tree(1_000_000_007, 1_000_003), tree(998_244_353, 999_983)]);
    assert_eq!(rounded[0], u32::MAX);
    assert!(loss > Rate::from_integer(0) && loss < Rate::new(1, 1_000_000_000), "{loss}");
}

#[test]
fn what_is_no_packing_of_the_ranks_is_refused_with_the_tree_that_shows_it() {
    let topology = complete(3);
    let one = Rate::from_integer(1);
    let refused =
        |collective, trees| PackedTrees::new(&packing(collective, trees), &topology, 0).unwrap_err();
    let tree = |root, edges: &[(Rank, Rank)]| PackedTree {
        root,
        weight: one,
        edges: edges.iter().map(|&(from, to)| edge(&topology, from.min(2), to.min(2), one)).collect(),
    };
    let broadcast = Collective::Broadcast { root: 0 };
    let short = tree(0, &[(0, 1)]);
    assert_eq!(refused(broadcast, vec![short]), PackedError::NotSpanning { tree: 0, root: 0 });
    let cycle = tree(0, &[(1, 2), (2, 1)]);
    assert_eq!(refused(broadcast, vec![cycle]), PackedError::NotSpanning { tree: 0, root: 0 });
    let elsewhere = tree(1, &[(1, 0), (1, 2)]);
    assert_eq!(refused(broadcast, vec![elsewhere]), PackedError::NotSpanning { tree: 0, root: 1 });
    let only = tree(0, &[(0, 1), (0, 2)]);
    assert_eq!(refused(Collective::AllGather, vec![only]), PackedError::Uncovered { rank: 1 });
    let nothing = PackedTree { weight: Rate::from_integer(0), ..tree(0, &[(0, 1), (1, 2)]) };
    assert_eq!(refused(broadcast, vec![nothing]), PackedError::NoWeight { tree: 0 });
    let mut far = tree(0, &[(0, 1), (1, 2)]);
    far.edges[1].to = 9;
    assert_eq!(refused(broadcast, vec![far]), PackedError::NoSuchRank { tree: 0, rank: 9, ranks: 3 });
    let jump = tree(0, &[(1, 2), (0, 1)]);
    let gather = Collective::Gather { root: 0 };
    assert_eq!(refused(gather, vec![jump]), PackedError::NoPath { tree: 0, rank: 1, root: 0 });
    let to_all = PackedError::NotPacked { collective: Collective::AllToAll };
    assert_eq!(refused(Collective::AllToAll, vec![tree(0, &[(0, 1)])]), to_all);
}

#[test]
fn an_edge_without_a_link_names_both_ends() {
    let mut builder = Topology::builder();
    let (a, b, c) = (builder.rank("a"), builder.rank("b"), builder.rank("c"));
    builder.duplex(a, b, 1, LATENCY_NS);
    builder.duplex(b, c, 1, LATENCY_NS);
    let line = builder.build().expect("connected");
    let one = Rate::from_integer(1);
    let trees = vec![PackedTree {
        root: 0,
        weight: one,
        edges: vec![edge(&line, 0, 1, one), edge(&line, 0, 2, one)],
    }];
    let error = PackedTrees::new(&packing(Collective::Broadcast { root: 0 }, trees), &line, 0).unwrap_err();
    assert!(error.to_string().contains("from 'a' to 'c', which no link joins"), "{error}");
}

#[test]
fn a_packing_carries_out_its_own_collective_and_no_other() {
    let topology = complete(3);
    let packing = random_packing(&topology, Collective::AllReduce, &mut Random::new(1));
    let algorithm =
        Algorithm::Packed(Some(Arc::new(PackedTrees::new(&packing, &topology, 0).expect("a packing"))));
    assert!(algorithm.to_string().starts_with("packed:"), "{algorithm}");
    let refused =
        |collective, ranks| generate(collective, &algorithm, ranks, Access::Put).unwrap_err().to_string();
    assert!(refused(Collective::AllGather, 3).contains("for all-reduce of 3 ranks, not for all-gather of 3"));
    assert!(refused(Collective::AllReduce, 4).contains("not for all-reduce of 4"));
    let nowhere = generate(Collective::AllReduce, &Algorithm::Packed(None), 3, Access::Put).unwrap_err();
    assert!(nowhere.to_string().contains("give a topology"), "{nowhere}");
    assert_eq!("packed".parse(), Ok(Algorithm::Packed(None)));
}

#[test]
fn chunks_are_more_for_longer_ways_and_no_shorter_than_the_window_covers() {
    let pacing = PacingPolicy {
        bytes_per_s: 1_000_000_000,
        hops: 4,
        latency_ns: 4_000,
        round_trip_ns: 2_000,
        occupancy_ns: 2_000,
        occupancy_turns: 2,
        chunk_ns: 0,
        chunks_per_hop: 64,
        window: 8,
        skew_limit: 28,
    };
    assert_eq!(pacing.chunks(1 << 30), 4 * 64);
    assert_eq!(PacingPolicy { hops: 8, ..pacing }.chunks(1 << 30), 8 * 64);
    // 10 µs of data, and a round trip of 2 µs that six chunks have to cover.
    assert_eq!(pacing.chunks(10_000), 10_000 / 333);
    assert_eq!(pacing.chunks(0), 1);
    // The square root of hops times time over the cost of a chunk: 4 · 1 s / 4 ms.
    assert_eq!(PacingPolicy { chunk_ns: 4_000_000, ..pacing }.chunks(1_000_000_000), 31);
    // An all-reduce holds its place until the result is there.
    assert_eq!(PacingPolicy { occupancy_ns: 4_000, ..pacing }.chunks(10_000), 10_000 / 666);
    assert_eq!(
        PacingPolicy { occupancy_turns: 5, ..pacing }.chunks(10_000),
        10_000 / 666,
        "three of eight chunks are under way"
    );
    // A chunk of 100 ns; 40 of them pass while one is under way.
    assert_eq!(pacing.skew_limit_of(10_000, 100), 28 + 40);
    assert_eq!(pacing.skew_limit_of(1 << 40, 100), 28);
}

//! Topologies to try packings on: random ones, and one that is known by heart.

use pleach_packing::topology::{LATENCY_NS, NodeId, Topology};
use pleach_vocabulary::{Collective, Rank};
use proptest::prelude::{Just, Strategy, any};
use proptest::{collection, option};

/// The links of a DGX-1 with Volta GPUs, 25 bytes a second each.
pub(crate) fn dgx_1v() -> Topology {
    let double = [(0, 3), (0, 4), (1, 2), (1, 5), (2, 3), (4, 7), (5, 6), (6, 7)];
    let single = [(0, 1), (0, 2), (1, 3), (2, 6), (3, 7), (4, 5), (4, 6), (5, 7)];
    let mut builder = Topology::builder();
    let ranks: Vec<NodeId> = (0..8).map(|rank| builder.rank(format!("g{rank}"))).collect();
    let links = double.iter().map(|ends| (ends, 50)).chain(single.iter().map(|ends| (ends, 25)));
    for (&(one, other), bytes_per_s) in links {
        builder.duplex(ranks[one], ranks[other], bytes_per_s, LATENCY_NS);
    }
    builder.build().unwrap()
}

/// All that can be packed, with rank 0 or the last as root.
pub(crate) fn collectives(ranks: u32) -> Vec<Collective> {
    let rooted = |root: Rank| {
        [
            Collective::Broadcast { root },
            Collective::Reduce { root },
            Collective::Scatter { root },
            Collective::Gather { root },
        ]
    };
    let all = [Collective::AllReduce, Collective::AllGather, Collective::ReduceScatter];
    all.into_iter().chain(rooted(0)).chain(rooted(ranks - 1)).collect()
}

/// Links of equal bandwidth in both directions between ranks and switches up to a number, all of
/// them connected.
pub(crate) fn duplex(ranks_max: u32, switches_max: u32) -> impl Strategy<Value = Topology> {
    (2..=ranks_max, 0..=switches_max).prop_flat_map(|(ranks, switches)| {
        let nodes = (ranks + switches) as usize;
        // Each node after the first hangs on an earlier one; and any two may be joined besides.
        let hangs = collection::vec((any::<proptest::sample::Index>(), 1..7_u64), nodes - 1);
        let more = collection::vec(option::weighted(0.35, 1..7_u64), nodes * (nodes - 1) / 2);
        (Just((ranks, switches)), hangs, more).prop_map(|((ranks, switches), hangs, more)| {
            let (mut builder, nodes) = nodes_of(ranks, switches);
            for (index, (on, bytes_per_s)) in hangs.iter().enumerate() {
                builder.duplex(nodes[index + 1], nodes[on.index(index + 1)], *bytes_per_s, LATENCY_NS);
            }
            for ((one, other), bytes_per_s) in pairs(nodes.len()).zip(&more) {
                if let Some(bytes_per_s) = bytes_per_s {
                    builder.duplex(nodes[one], nodes[other], *bytes_per_s, LATENCY_NS);
                }
            }
            builder.build().expect("every node hangs on another")
        })
    })
}

/// Links in one direction, with a cycle of some through all nodes.
pub(crate) fn one_way(ranks_max: u32, switches_max: u32) -> impl Strategy<Value = Topology> {
    (2..=ranks_max, 0..=switches_max).prop_flat_map(|(ranks, switches)| {
        let nodes = (ranks + switches) as usize;
        let cycle = collection::vec(1..7_u64, nodes);
        let more = collection::vec(option::weighted(0.25, 1..7_u64), nodes * (nodes - 1));
        (Just((ranks, switches)), cycle, more).prop_map(|((ranks, switches), cycle, more)| {
            let (mut builder, nodes) = nodes_of(ranks, switches);
            for (index, &bytes_per_s) in cycle.iter().enumerate() {
                builder.link(nodes[index], nodes[(index + 1) % nodes.len()], bytes_per_s, LATENCY_NS);
            }
            let both = pairs(nodes.len()).flat_map(|(one, other)| [(one, other), (other, one)]);
            for ((from, to), bytes_per_s) in both.zip(&more) {
                if let Some(bytes_per_s) = bytes_per_s {
                    builder.link(nodes[from], nodes[to], *bytes_per_s, LATENCY_NS);
                }
            }
            builder.build().expect("a cycle joins all")
        })
    })
}

fn nodes_of(ranks: u32, switches: u32) -> (pleach_packing::topology::Builder, Vec<NodeId>) {
    let mut builder = Topology::builder();
    let mut nodes: Vec<NodeId> = (0..ranks).map(|rank| builder.rank(format!("r{rank}"))).collect();
    nodes.extend((0..switches).map(|switch| builder.switch(format!("s{switch}"))));
    (builder, nodes)
}

fn pairs(nodes: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..nodes).flat_map(move |one| (one + 1..nodes).map(move |other| (one, other)))
}

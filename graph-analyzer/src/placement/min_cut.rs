//! Two parts between which the fewest bytes cross, exactly, by a maximum flow.
//!
//! In the network each node of the graph and each tensor is a vertex. A tensor's edge from its
//! producer has the tensor's bytes; from the tensor, edges without limit lead to its consumers, so
//! it is paid for once. Edges without limit from consumers to producers keep the first part closed:
//! data never flow back. The source produces the caller's inputs, the sink consumes the outputs.
//!
//! A part without nodes is no part. If the minimum has one, a node is held in it: one that needs no
//! other in the first part, one that no other needs in the second.

use petgraph::algo::dinics;
use petgraph::graph::{DiGraph, NodeIndex};
use petgraph::visit::EdgeRef;
use pleach_vocabulary::Rank;

use super::dataflow::Dataflow;

/// Most pairs of nodes that are held in the two parts, one flow each.
const HELD_PAIRS_MAX: usize = 1024;

/// Most edges of all these flows together; one flow is made in any case.
const HELD_EDGES_MAX: usize = 1 << 24;

/// The rank of each place.
pub(super) fn two_parts(dataflow: &Dataflow) -> Vec<Rank> {
    let free = cut(dataflow, None, None);
    if has_both(&free) {
        return free;
    }
    let count = dataflow.len();
    let starts: Vec<usize> =
        (0..count).filter(|&place| dataflow.predecessors(place).next().is_none()).collect();
    let ends: Vec<usize> = (0..count).filter(|&place| dataflow.successors(place).next().is_none()).collect();
    let edges: usize = dataflow.tensors.iter().map(|tensor| 1 + tensor.consumers.len() * 2).sum();
    let most = (HELD_EDGES_MAX / edges.max(1)).clamp(1, HELD_PAIRS_MAX);
    let pairs = starts.iter().flat_map(|&start| ends.iter().map(move |&end| (start, end)));
    let pairs = pairs.filter(|(start, end)| start != end).take(most);
    let cuts = pairs.map(|(start, end)| cut(dataflow, Some(start), Some(end)));
    // Two nodes or more have such a pair.
    cuts.min_by_key(|ranks| dataflow.all_crossing_bytes(ranks, 2)).unwrap_or(free)
}

fn has_both(ranks: &[Rank]) -> bool {
    ranks.contains(&0) && ranks.contains(&1)
}

/// The minimum cut with `first` in the first part and `second` in the second.
fn cut(dataflow: &Dataflow, first: Option<usize>, second: Option<usize>) -> Vec<Rank> {
    let unlimited = dataflow.tensors.iter().map(|tensor| tensor.bytes).sum::<u64>() + 1;
    let mut network: DiGraph<(), u64> = DiGraph::new();
    let (source, sink) = (network.add_node(()), network.add_node(()));
    let nodes: Vec<NodeIndex> = (0..dataflow.len()).map(|_| network.add_node(())).collect();
    for tensor in &dataflow.tensors {
        let vertex = network.add_node(());
        let producer = tensor.producer.map_or(source, |place| nodes[place]);
        network.add_edge(producer, vertex, tensor.bytes);
        for &consumer in &tensor.consumers {
            network.add_edge(vertex, nodes[consumer], unlimited);
            if tensor.producer.is_some() {
                network.add_edge(nodes[consumer], producer, unlimited);
            }
        }
        if tensor.is_output {
            network.add_edge(vertex, sink, unlimited);
        }
    }
    if let Some(place) = first {
        network.add_edge(source, nodes[place], unlimited);
    }
    if let Some(place) = second {
        network.add_edge(nodes[place], sink, unlimited);
    }
    let (_, flows) = dinics(&network, source, sink);
    // What the source still reaches is the first part.
    let mut is_first = vec![false; network.node_count()];
    let mut open = vec![source];
    is_first[source.index()] = true;
    while let Some(vertex) = open.pop() {
        let forward = network.edges(vertex).filter(|edge| flows[edge.id().index()] < *edge.weight());
        let forward = forward.map(|edge| edge.target());
        let backward = network.edges_directed(vertex, petgraph::Incoming);
        let backward = backward.filter(|edge| flows[edge.id().index()] > 0).map(|edge| edge.source());
        for next in forward.chain(backward) {
            if !std::mem::replace(&mut is_first[next.index()], true) {
                open.push(next);
            }
        }
    }
    nodes.iter().map(|node| Rank::from(!is_first[node.index()])).collect()
}

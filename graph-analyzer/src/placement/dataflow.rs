//! A graph as the placements see it: placed nodes with times, tensors with bytes.

use pleach_vocabulary::Rank;

use crate::costs::{Costs, assumed_bytes};
use crate::graph::{Graph, NodeId, Producer, ValueId};

/// A tensor that may cross.
#[derive(Clone, Debug)]
pub(super) struct Tensor {
    pub(super) bytes: u64,
    /// The place of the node that computes it; nothing for what the caller gives.
    pub(super) producer: Option<usize>,
    /// Places of the nodes that use it, each once.
    pub(super) consumers: Vec<usize>,
    /// Whether the caller gets it.
    pub(super) is_output: bool,
}

/// Nodes by place in an order, and tensors by number.
#[derive(Clone, Debug)]
pub(super) struct Dataflow {
    /// The nodes in order.
    pub(super) nodes: Vec<NodeId>,
    /// By place: nanoseconds of computing.
    pub(super) node_ns: Vec<u64>,
    pub(super) tensors: Vec<Tensor>,
    /// By place: the tensors that a node uses, each once.
    pub(super) uses: Vec<Vec<usize>>,
    /// By place: the tensors that a node computes.
    pub(super) results: Vec<Vec<usize>>,
    /// By place: the constants that a node uses, with their bytes.
    pub(super) constants: Vec<Vec<(ValueId, u64)>>,
}

impl Dataflow {
    pub(super) fn new(graph: &Graph, costs: &Costs) -> Self {
        let nodes = graph.placed_nodes();
        let mut place_of = vec![usize::MAX; graph.nodes().len()];
        nodes.iter().enumerate().for_each(|(place, node)| place_of[node.index()] = place);
        let mut dataflow = Self {
            node_ns: nodes.iter().map(|node| costs.node_ns[node.index()]).collect(),
            tensors: Vec::new(),
            uses: vec![Vec::new(); nodes.len()],
            results: vec![Vec::new(); nodes.len()],
            constants: vec![Vec::new(); nodes.len()],
            nodes,
        };
        let is_output = graph.output_flags();
        for (number, value) in graph.values().iter().enumerate() {
            let consumers: Vec<usize> = value.consumers.iter().map(|node| place_of[node.index()]).collect();
            let bytes = assumed_bytes(&value.tensor);
            if value.is_constant {
                let constant = (ValueId(number as u32), bytes);
                let placed = consumers.into_iter().filter(|&place| place != usize::MAX);
                placed.for_each(|place| dataflow.constants[place].push(constant));
                continue;
            }
            let producer = match value.producer {
                Producer::Node(node) => Some(place_of[node.index()]),
                _ => None,
            };
            let tensor = dataflow.tensors.len();
            consumers.iter().for_each(|&place| dataflow.uses[place].push(tensor));
            if let Some(producer) = producer {
                dataflow.results[producer].push(tensor);
            }
            dataflow.tensors.push(Tensor { bytes, producer, consumers, is_output: is_output[number] });
        }
        dataflow
    }

    /// The number of nodes.
    pub(super) fn len(&self) -> usize {
        self.nodes.len()
    }

    /// The time of all nodes.
    pub(super) fn total_ns(&self) -> u64 {
        self.node_ns.iter().sum()
    }

    /// Places of the nodes of which a node uses results.
    pub(super) fn predecessors(&self, place: usize) -> impl Iterator<Item = usize> + '_ {
        self.uses[place].iter().filter_map(|&tensor| self.tensors[tensor].producer)
    }

    /// Places of the nodes that use results of a node.
    pub(super) fn successors(&self, place: usize) -> impl Iterator<Item = usize> + '_ {
        self.results[place].iter().flat_map(|&tensor| self.tensors[tensor].consumers.iter().copied())
    }

    /// The bytes of a tensor that cross, with these ranks of the nodes.
    pub(super) fn crossing_bytes(&self, tensor: usize, rank_of: &[Rank], last: Rank) -> u64 {
        let tensor = &self.tensors[tensor];
        let from = tensor.producer.map_or(0, |place| rank_of[place]);
        let mut to: Vec<Rank> = tensor.consumers.iter().map(|&place| rank_of[place]).collect();
        to.extend(tensor.is_output.then_some(last));
        to.sort_unstable();
        to.dedup();
        tensor.bytes * to.iter().filter(|&&rank| rank != from).count() as u64
    }

    /// All bytes that cross.
    pub(super) fn all_crossing_bytes(&self, rank_of: &[Rank], ranks: u32) -> u64 {
        (0..self.tensors.len()).map(|tensor| self.crossing_bytes(tensor, rank_of, ranks - 1)).sum()
    }

    /// The same with the nodes in another topological order: places of this one.
    pub(super) fn reordered(&self, order: &[usize]) -> Self {
        let mut place_of = vec![0; order.len()];
        order.iter().enumerate().for_each(|(place, &before)| place_of[before] = place);
        let mut dataflow = self.clone();
        for (place, &before) in order.iter().enumerate() {
            dataflow.nodes[place] = self.nodes[before];
            dataflow.node_ns[place] = self.node_ns[before];
            dataflow.uses[place].clone_from(&self.uses[before]);
            dataflow.results[place].clone_from(&self.results[before]);
            dataflow.constants[place].clone_from(&self.constants[before]);
        }
        for tensor in &mut dataflow.tensors {
            tensor.producer = tensor.producer.map(|before| place_of[before]);
            tensor.consumers.iter_mut().for_each(|consumer| *consumer = place_of[*consumer]);
        }
        dataflow
    }
}

//! Parts of a graph, and the tensors that cross between them.
//!
//! [`Partition::new`] cuts a graph by a [`Placement`]: each rank gets a [`Part`], and each tensor
//! that another rank uses becomes one [`Crossing`] for each such rank.
//!
//! The buffers of a part, for its [memory plan](crate::plan), live as follows. What a node computes
//! lives from this node to the last one of the part that uses it; to the end, if another rank or
//! the caller gets it. The caller's inputs live from the start. A slot lives throughout, because
//! the sender fills it while the receiver computes. Weights and dynamic tensors are in no plan.
//!
//! **Invariant:** the parts form no cycle, and no constant crosses.

use std::collections::BTreeMap;

use pleach_vocabulary::Rank;

use crate::graph::{Graph, NodeId, Producer, ValueId};
use crate::order::topological;
use crate::placement::Placement;
use crate::plan::{BUFFER_BYTES_MAX, Buffer};
use crate::transfer::{SLOTS, Transfer};

/// A tensor that goes from one rank to another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Crossing {
    /// The tensor.
    pub value: ValueId,
    /// The sender.
    pub from: Rank,
    /// The receiver.
    pub to: Rank,
    /// How it crosses.
    pub transfer: Transfer,
}

/// What a buffer of a part holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Contents {
    /// What the caller gives.
    Input,
    /// What a node of the part computes.
    Result,
    /// A slot of a tensor that comes from another rank.
    Slot,
}

/// A buffer of a part.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PartBuffer {
    /// The tensor in it.
    pub value: ValueId,
    /// What it holds.
    pub contents: Contents,
    /// Size and lifetime, in numbers of the part's nodes.
    pub buffer: Buffer,
}

/// What a rank runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// The rank.
    pub rank: Rank,
    /// The nodes in order, with those that compute the constants that the part uses.
    pub nodes: Vec<NodeId>,
    /// The constants that the nodes use.
    pub constants: Vec<ValueId>,
    /// The buffers of known size.
    buffers: Vec<PartBuffer>,
}

impl Part {
    /// The buffers of known size.
    #[must_use]
    pub fn buffers(&self) -> &[PartBuffer] {
        &self.buffers
    }

    /// What a plan of this part plans.
    #[must_use]
    pub fn plan_buffers(&self) -> Vec<Buffer> {
        self.buffers.iter().map(|buffer| buffer.buffer.clone()).collect()
    }

    /// The bytes of the constants whose size is known.
    #[must_use]
    pub fn weight_bytes(&self, graph: &Graph) -> u64 {
        let bytes = self.constants.iter().filter_map(|&constant| graph.value(constant).tensor.bytes());
        bytes.fold(0, u64::saturating_add)
    }
}

/// Why parts are none.
#[derive(Clone, pleach_derive::ErrorDebug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PartitionError {
    /// Parts need each other.
    #[error("the parts form a cycle: {cycle}; place one of these tensors' nodes with its users")]
    Cycle {
        /// The cycle with the tensors that close it.
        cycle: String,
    },
}

/// A graph in parts. See the module.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Partition {
    parts: Vec<Part>,
    crossings: Vec<Crossing>,
}

impl Partition {
    /// Cuts a graph.
    ///
    /// # Errors
    ///
    /// [`PartitionError::Cycle`]: data would flow from a part through others back into it.
    pub fn new(graph: &Graph, placement: &Placement) -> Result<Self, PartitionError> {
        let crossings = crossings(graph, placement);
        refuse_cycles(graph, placement.ranks(), &crossings)?;
        let mut parts: Vec<Part> = (0..placement.ranks())
            .map(|rank| Part { rank, nodes: Vec::new(), constants: Vec::new(), buffers: Vec::new() })
            .collect();
        place_nodes(graph, placement, &mut parts);
        for part in &mut parts {
            part.buffers = buffers(graph, placement, part, &crossings);
        }
        Ok(Self { parts, crossings })
    }

    /// The parts by rank.
    #[must_use]
    pub fn parts(&self) -> &[Part] {
        &self.parts
    }

    /// The tensors that cross, by number and then by receiver.
    #[must_use]
    pub fn crossings(&self) -> &[Crossing] {
        &self.crossings
    }

    /// The bytes that cross in one iteration, of the tensors whose size is known.
    #[must_use]
    pub fn crossing_bytes(&self) -> u64 {
        let bytes = self.crossings.iter().map(|crossing| match crossing.transfer {
            Transfer::Static { bytes } => bytes,
            Transfer::Dynamic { .. } => 0,
        });
        bytes.fold(0, u64::saturating_add)
    }
}

/// The rank that has a value first; nothing for constants.
fn home(graph: &Graph, placement: &Placement, id: ValueId) -> Option<Rank> {
    let value = graph.value(id);
    match value.producer {
        _ if value.is_constant => None,
        Producer::Input => Some(0),
        Producer::Weight { .. } => None,
        Producer::Node(node) => placement.rank_of(node),
    }
}

fn crossings(graph: &Graph, placement: &Placement) -> Vec<Crossing> {
    let mut is_output = vec![false; graph.values().len()];
    graph.outputs().iter().for_each(|output| is_output[output.index()] = true);
    let mut crossings = Vec::new();
    for (number, value) in graph.values().iter().enumerate() {
        let id = ValueId(number as u32);
        let Some(from) = home(graph, placement, id) else { continue };
        let mut to: Vec<Rank> = value.consumers.iter().filter_map(|&node| placement.rank_of(node)).collect();
        to.extend(is_output[number].then(|| placement.ranks() - 1));
        to.sort_unstable();
        to.dedup();
        let transfer = Transfer::of(&value.tensor);
        let receivers = to.into_iter().filter(|&rank| rank != from);
        crossings.extend(receivers.map(|to| Crossing { value: id, from, to, transfer }));
    }
    crossings
}

/// Data of inputs come before everything, and those of outputs after it: only what nodes compute
/// for nodes can close a cycle.
fn refuse_cycles(graph: &Graph, ranks: u32, crossings: &[Crossing]) -> Result<(), PartitionError> {
    let mut by_edge: BTreeMap<(Rank, Rank), ValueId> = BTreeMap::new();
    for crossing in crossings {
        let value = graph.value(crossing.value);
        let is_computed = matches!(value.producer, Producer::Node(_));
        if is_computed && !value.consumers.is_empty() {
            by_edge.entry((crossing.from, crossing.to)).or_insert(crossing.value);
        }
    }
    let mut needs: Vec<Vec<u32>> = vec![Vec::new(); ranks as usize];
    by_edge.keys().for_each(|(from, to)| needs[*to as usize].push(*from));
    topological(&needs).map(drop).map_err(|cycle| {
        let mut text = String::new();
        for (place, &rank) in cycle.iter().enumerate() {
            let next = cycle[(place + 1) % cycle.len()];
            let tensor = by_edge.get(&(rank, next)).map_or("", |&value| &graph.value(value).name);
            text += &format!("rank {rank} -> ('{tensor}') -> ");
        }
        let first = cycle.first().copied().unwrap_or(0);
        PartitionError::Cycle { cycle: format!("{text}rank {first}") }
    })
}

/// Gives each part its nodes, and the constants that these use with the nodes that compute them.
fn place_nodes(graph: &Graph, placement: &Placement, parts: &mut [Part]) {
    for (rank, part) in parts.iter_mut().enumerate() {
        let mut is_here = vec![false; graph.nodes().len()];
        let mut is_used = vec![false; graph.values().len()];
        let is_last = rank as u32 + 1 == placement.ranks();
        // Backwards, so that what a constant is computed from is found too.
        for number in (0..graph.nodes().len() as u32).rev().map(NodeId) {
            let node = graph.node(number);
            let is_constant = graph.is_constant(number);
            let is_needed = || {
                let mut results = node.results().map(|result| (result, graph.value(result)));
                // What nobody uses lies with the last part, as the caller's outputs do.
                results.any(|(id, value)| {
                    is_used[id.index()] || (is_last && is_unused(graph, id, value.consumers.len()))
                })
            };
            let here =
                if is_constant { is_needed() } else { placement.rank_of(number) == Some(rank as Rank) };
            if here {
                is_here[number.index()] = true;
                for used in node.uses().filter(|&used| graph.value(used).is_constant) {
                    is_used[used.index()] = true;
                }
                if !is_constant {
                    part.constants.extend(node.uses().filter(|&used| graph.value(used).is_constant));
                }
            }
        }
        let here = is_here.iter().enumerate().filter(|(_, here)| **here);
        part.nodes = here.map(|(number, _)| NodeId(number as u32)).collect();
        part.constants.sort_unstable();
        part.constants.dedup();
    }
}

/// Whether the last part has to have a constant: the caller gets it, or nothing uses it.
fn is_unused(graph: &Graph, id: ValueId, consumers: usize) -> bool {
    consumers == 0 || graph.outputs().contains(&id)
}

fn buffers(graph: &Graph, placement: &Placement, part: &Part, crossings: &[Crossing]) -> Vec<PartBuffer> {
    let placed = part.nodes.iter().filter(|&&node| placement.rank_of(node) == Some(part.rank));
    let placed: Vec<NodeId> = placed.copied().collect();
    let end = placed.len().max(1) as u64;
    let moment = |node: NodeId| placed.binary_search(&node).ok().map(|place| place as u64);
    let mut lives_on = vec![false; graph.values().len()];
    graph.outputs().iter().for_each(|output| lives_on[output.index()] = true);
    let sent = crossings.iter().filter(|crossing| crossing.from == part.rank);
    sent.for_each(|crossing| lives_on[crossing.value.index()] = true);
    let mut buffers = Vec::new();
    let mut add = |value: ValueId, contents, start: u64| {
        let Some(bytes) = graph.value(value).tensor.bytes().filter(|&bytes| bytes <= BUFFER_BYTES_MAX) else {
            return;
        };
        let last = graph.value(value).consumers.iter().filter_map(|&node| moment(node)).max();
        let last = if lives_on[value.index()] { end } else { last.unwrap_or(start) + 1 };
        buffers.push(PartBuffer { value, contents, buffer: Buffer { lifetime: start..last, bytes } });
    };
    if part.rank == 0 {
        graph.inputs().iter().for_each(|&input| add(input, Contents::Input, 0));
    }
    for (place, &node) in placed.iter().enumerate() {
        graph.node(node).results().for_each(|result| add(result, Contents::Result, place as u64));
    }
    for crossing in crossings.iter().filter(|crossing| crossing.to == part.rank) {
        if let Transfer::Static { bytes } = crossing.transfer {
            let buffer = Buffer { lifetime: 0..end, bytes };
            let slot = PartBuffer { value: crossing.value, contents: Contents::Slot, buffer };
            buffers.extend(std::iter::repeat_n(slot, SLOTS as usize));
        }
    }
    buffers
}

//! Parts of a graph, and the tensors that cross between them.
//!
//! [`Partition::new`] cuts a graph by a [`Placement`]: each rank gets a [`Part`], and each tensor
//! that another rank uses becomes one [`Crossing`] for each such rank.
//!
//! The buffers of a part, for its [memory plan](crate::plan), live as follows. The result of a node
//! lives from this node to the last node of the part that uses it. If another rank or the caller
//! gets the result, it lives to the end. The caller's inputs live from the start. A slot lives
//! throughout, because the sender fills it while the receiver computes. Weights and dynamic tensors
//! are in no plan.
//!
//! **Invariant:** the parts form no cycle, and no constant crosses.

use std::collections::{BTreeMap, HashSet};

use pleach_transport::Space;
use pleach_vocabulary::Rank;

use crate::graph::{Graph, NodeId, Producer, ValueId};
use crate::order::topological;
use crate::placement::Placement;
use crate::plan::{BUFFER_BYTES_MAX, BUFFERS_MAX, Buffer};
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
    /// Where the receiver has it. Metadata and signals are in the host's memory in any case.
    pub space: Space,
}

/// The contents of a buffer of a part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Contents {
    /// A value that the caller gives.
    Input,
    /// A value that a node of the part computes.
    Result,
    /// A slot of a tensor that comes from another rank.
    Slot,
}

/// A buffer of a part.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PartBuffer {
    /// The tensor in it.
    pub value: ValueId,
    /// The contents.
    pub contents: Contents,
    /// Size and lifetime, in numbers of the part's nodes.
    pub buffer: Buffer,
}

/// The part of a graph that one rank runs.
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

    /// The buffers that a memory plan of this part places.
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

/// Why a placement does not give valid parts.
#[derive(Clone, pleach_derive::ErrorDebug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PartitionError {
    /// Parts need each other.
    #[error("the parts form a cycle: {cycle}; place one of these tensors' nodes with its users")]
    Cycle {
        /// The cycle with the tensors that close it.
        cycle: String,
    },
    /// A part has more buffers than a memory plan takes.
    #[error("rank {rank} has {buffers} buffers, and a memory plan at most {BUFFERS_MAX}; take more ranks")]
    TooManyBuffers {
        /// The rank.
        rank: Rank,
        /// Its buffers.
        buffers: usize,
    },
}

/// A graph in parts. See the module.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Partition {
    parts: Vec<Part>,
    crossings: Vec<Crossing>,
    caller: Option<Rank>,
}

/// How a placement is cut: its ranks with the caller's, who gives inputs, and who gets outputs.
#[derive(Clone, Copy)]
struct Ends<'a> {
    placement: &'a Placement,
    ranks: u32,
    inputs: Rank,
    outputs: Rank,
}

impl Partition {
    /// Cuts a graph.
    ///
    /// # Errors
    ///
    /// [`PartitionError`]: data would flow from a part through others back into it, or a part has
    /// more buffers than a memory plan takes.
    pub fn new(graph: &Graph, placement: &Placement) -> Result<Self, PartitionError> {
        Self::cut(graph, placement, None)
    }

    /// Cuts a graph whose inputs and outputs are at a rank of its own, which follows those of the
    /// placement and has no nodes but those of constants that are outputs.
    ///
    /// # Errors
    ///
    /// As [`Partition::new`].
    pub fn with_caller(graph: &Graph, placement: &Placement) -> Result<Self, PartitionError> {
        Self::cut(graph, placement, Some(placement.ranks()))
    }

    fn cut(graph: &Graph, placement: &Placement, caller: Option<Rank>) -> Result<Self, PartitionError> {
        let is_output = graph.output_flags();
        let ranks = placement.ranks();
        let ends = match caller {
            None => Ends { placement, ranks, inputs: 0, outputs: ranks - 1 },
            Some(rank) => Ends { placement, ranks: ranks + 1, inputs: rank, outputs: rank },
        };
        let crossings = crossings(graph, ends, &is_output);
        refuse_cycles(graph, ends.ranks, &crossings)?;
        let mut parts: Vec<Part> = (0..ends.ranks)
            .map(|rank| Part { rank, nodes: Vec::new(), constants: Vec::new(), buffers: Vec::new() })
            .collect();
        place_nodes(graph, placement, &mut parts, &is_output);
        let ranks = ends.ranks as usize;
        let (mut sent, mut received) = (vec![HashSet::new(); ranks], vec![Vec::new(); ranks]);
        for crossing in &crossings {
            sent[crossing.from as usize].insert(crossing.value);
            received[crossing.to as usize].push(crossing);
        }
        for ((part, sent), received) in parts.iter_mut().zip(&sent).zip(&received) {
            let lives_on = |value: ValueId| is_output[value.index()] || sent.contains(&value);
            part.buffers = buffers(graph, ends, part, &lives_on, received);
            if part.buffers.len() > BUFFERS_MAX {
                return Err(PartitionError::TooManyBuffers { rank: part.rank, buffers: part.buffers.len() });
            }
        }
        Ok(Self { parts, crossings, caller })
    }

    /// The rank that gives inputs and gets outputs and does nothing else; nothing if there is none.
    #[must_use]
    pub fn caller(&self) -> Option<Rank> {
        self.caller
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
        let bytes = self.crossings.iter().map(|crossing| crossing.transfer.bytes());
        bytes.fold(0, u64::saturating_add)
    }
}

/// The rank that computes a value or gets it from the caller; `None` for constants.
fn home(graph: &Graph, ends: Ends<'_>, id: ValueId) -> Option<Rank> {
    let value = graph.value(id);
    match value.producer {
        _ if value.is_constant => None,
        Producer::Input => Some(ends.inputs),
        Producer::Weight { .. } => None,
        Producer::Node(node) => ends.placement.rank_of(node),
    }
}

fn crossings(graph: &Graph, ends: Ends<'_>, is_output: &[bool]) -> Vec<Crossing> {
    let mut crossings = Vec::new();
    for (number, value) in graph.values().iter().enumerate() {
        let id = ValueId(number as u32);
        let Some(from) = home(graph, ends, id) else { continue };
        let rank_of = |&node: &NodeId| ends.placement.rank_of(node);
        let mut to: Vec<Rank> = value.consumers.iter().filter_map(rank_of).collect();
        to.extend(is_output[number].then_some(ends.outputs));
        to.sort_unstable();
        to.dedup();
        let transfer = Transfer::of(&value.tensor);
        let receivers = to.into_iter().filter(|&rank| rank != from);
        let space = |to| ends.placement.space_of(to);
        crossings.extend(receivers.map(|to| Crossing { value: id, from, to, transfer, space: space(to) }));
    }
    crossings
}

/// Refuses parts that form a cycle. Data of inputs come before everything, and those of outputs
/// after it. So only values that nodes compute for nodes can close a cycle.
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

/// Gives each part its nodes. A part also gets the constants that these nodes use, and the nodes
/// that compute the constants. A value that no node uses is in the last part, as the caller's
/// outputs are.
fn place_nodes(graph: &Graph, placement: &Placement, parts: &mut [Part], is_output: &[bool]) {
    let is_wanted = |result: ValueId| graph.value(result).consumers.is_empty() || is_output[result.index()];
    let mut open: Vec<NodeId> = Vec::new();
    for number in (0..graph.nodes().len() as u32).map(NodeId) {
        match placement.rank_of(number) {
            Some(rank) => parts[rank as usize].nodes.push(number),
            None if graph.node(number).results().any(is_wanted) => open.push(number),
            None => {}
        }
    }
    // By node: the last part that got it as the computer of a constant.
    let mut part_of: Vec<Option<Rank>> = vec![None; graph.nodes().len()];
    for part in parts.iter_mut().rev() {
        let used = part.nodes.iter().flat_map(|&node| graph.node(node).uses());
        part.constants = used.filter(|&used| graph.value(used).is_constant).collect();
        part.constants.sort_unstable();
        part.constants.dedup();
        let computer = |value: ValueId| match graph.value(value).producer {
            Producer::Node(node) => Some(node),
            _ => None,
        };
        open.extend(part.constants.iter().filter_map(|&constant| computer(constant)));
        while let Some(node) = open.pop() {
            if part_of[node.index()].replace(part.rank) != Some(part.rank) {
                part.nodes.push(node);
                open.extend(graph.node(node).uses().filter_map(computer));
            }
        }
        part.nodes.sort_unstable();
    }
}

fn buffers(
    graph: &Graph,
    ends: Ends<'_>,
    part: &Part,
    lives_on: &dyn Fn(ValueId) -> bool,
    received: &[&Crossing],
) -> Vec<PartBuffer> {
    let placed = part.nodes.iter().filter(|&&node| ends.placement.rank_of(node) == Some(part.rank));
    let placed: Vec<NodeId> = placed.copied().collect();
    let end = placed.len().max(1) as u64;
    let moment = |node: NodeId| placed.binary_search(&node).ok().map(|place| place as u64);
    let mut buffers = Vec::new();
    let mut add = |value: ValueId, contents, start: u64| {
        let Some(bytes) = graph.value(value).tensor.bytes().filter(|&bytes| bytes <= BUFFER_BYTES_MAX) else {
            return;
        };
        let last = graph.value(value).consumers.iter().filter_map(|&node| moment(node)).max();
        let last = if lives_on(value) { end } else { last.unwrap_or(start) + 1 };
        buffers.push(PartBuffer { value, contents, buffer: Buffer { lifetime: start..last, bytes } });
    };
    if part.rank == ends.inputs {
        graph.inputs().iter().for_each(|&input| add(input, Contents::Input, 0));
    }
    for (place, &node) in placed.iter().enumerate() {
        graph.node(node).results().for_each(|result| add(result, Contents::Result, place as u64));
    }
    for crossing in received {
        // The plan is that of the host's memory.
        if let (Transfer::Static { bytes }, Space::Host) = (crossing.transfer, crossing.space) {
            let buffer = Buffer { lifetime: 0..end, bytes };
            let slot = PartBuffer { value: crossing.value, contents: Contents::Slot, buffer };
            buffers.extend(std::iter::repeat_n(slot, SLOTS as usize));
        }
    }
    buffers
}

//! What each rank gets, computes and sends: the parts of a graph as models of their own.

use std::collections::HashSet;
use std::path::Path;

use pleach_transport::{Rank, Space};

use super::channels::{Channel, Form, TensorForm};
use super::runtime::{Program, Runtime, RuntimeError};
use crate::element::ElementType;
use crate::graph::{Dim, Graph, NodeId, Producer, ValueId};
use crate::onnx::{Cut, Model};
use crate::partition::Partition;

/// Whether tensors are copied into registered memory before they cross.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Copies {
    /// The producing operator writes into registered memory.
    None,
    /// The sender copies each tensor.
    Sender,
}

/// A model, its parts and a runtime: what all ranks of a run know.
#[derive(Clone, Copy)]
pub struct Job<'a> {
    /// The model.
    pub model: &'a Model,
    /// The folder of the model, for weights in files.
    pub folder: &'a Path,
    /// The graph of the model, with its shapes.
    pub graph: &'a Graph,
    /// The parts.
    pub partition: &'a Partition,
    /// The runtime.
    pub runtime: &'a dyn Runtime,
    /// Draws weights of which the file gives only the shape.
    pub random_weights: Option<u64>,
}

impl std::fmt::Debug for Job<'_> {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "Job({} by {})", self.graph.name(), self.runtime.name())
    }
}

/// Why a graph does not run.
#[derive(pleach_derive::ErrorDebug, thiserror::Error)]
#[non_exhaustive]
pub enum JobError {
    /// An input has dimensions that are not bound.
    #[error("the input '{input}' has a free dimension; give --dim {symbol}=SIZE")]
    FreeSymbol {
        /// The input.
        input: String,
        /// The symbol.
        symbol: String,
    },
    /// Nothing is known of the shape of an input.
    #[error("the shape of the input '{input}' is unknown; give it with --input FILE.pb")]
    UnknownInput {
        /// The input.
        input: String,
    },
    /// An input has another type or shape.
    #[error("the input '{input}' is {expected}, and the file has {found}; give another --input")]
    OtherInput {
        /// The input.
        input: String,
        /// As the model says.
        expected: String,
        /// As the file says.
        found: String,
    },
    /// The runtime holds the elements of an input in a type that does not have a number.
    #[error("the number {number} of the input '{input}' is no {element}, as which {runtime} holds it")]
    OutOfRange {
        /// The input.
        input: String,
        /// The number.
        number: i64,
        /// The type in the runtime.
        element: ElementType,
        /// The runtime.
        runtime: &'static str,
    },
    /// The number of inputs is another.
    #[error("{found} files of inputs for {expected} inputs; give --input once for each input, in order")]
    Inputs {
        /// The inputs of the model.
        expected: usize,
        /// The files.
        found: usize,
    },
    /// A tensor of text would cross.
    #[error("the tensor '{tensor}' of text cannot cross; place its users on rank {rank}")]
    Text {
        /// The tensor.
        tensor: String,
        /// The rank that computes it.
        rank: Rank,
    },
    /// A tensor is to be in memory that the runtime does not read.
    #[error("the tensor '{tensor}' is to be in {space}, and {runtime} reads the host's memory alone")]
    Space {
        /// The tensor.
        tensor: String,
        /// The memory.
        space: Space,
        /// The runtime.
        runtime: &'static str,
    },
    /// The runtime does not run a part.
    #[error("rank {rank}: {error}")]
    Runtime {
        /// The rank.
        rank: Rank,
        /// The reason.
        #[source]
        error: RuntimeError,
    },
}

/// What one rank gets, computes and sends. Crossings are numbers in [`Partition::crossings`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RankPlan {
    /// The nodes, in order.
    pub nodes: Vec<NodeId>,
    /// The values that the nodes use and this rank does not compute.
    pub needs: Vec<ValueId>,
    /// The values that cross from here, or that the caller gets.
    pub computes: Vec<ValueId>,
    /// Crossings that the nodes need.
    pub incoming: Vec<usize>,
    /// Crossings that only the caller gets.
    pub incoming_outputs: Vec<usize>,
    /// Values that cross from here, with their crossings.
    pub outgoing: Vec<(ValueId, Vec<usize>)>,
}

/// The part of a rank, loaded by the runtime.
pub struct Part {
    pub(crate) rank: Rank,
    pub(crate) plan: RankPlan,
    /// Nothing if nothing is computed.
    pub(crate) program: Option<Box<dyn Program>>,
}

impl std::fmt::Debug for Part {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "Part({}, {} nodes)", self.rank, self.plan.nodes.len())
    }
}

impl Job<'_> {
    /// The number of ranks.
    #[must_use]
    pub fn ranks(&self) -> u32 {
        self.partition.parts().len() as u32
    }

    /// What a rank does.
    #[must_use]
    pub fn rank_plan(&self, rank: Rank) -> RankPlan {
        let part = &self.partition.parts()[rank as usize];
        let mut plan = RankPlan { nodes: part.nodes.clone(), ..RankPlan::default() };
        let own: HashSet<NodeId> = part.nodes.iter().copied().collect();
        let is_own = |value: ValueId| match self.graph.value(value).producer {
            Producer::Node(node) => own.contains(&node),
            Producer::Weight { .. } => true,
            Producer::Input => false,
        };
        let used = part.nodes.iter().flat_map(|&node| self.graph.node(node).uses());
        plan.needs = used.filter(|&used| !is_own(used)).collect();
        plan.needs.sort_unstable();
        plan.needs.dedup();
        let mut computed: Vec<ValueId> = Vec::new();
        for (number, crossing) in self.partition.crossings().iter().enumerate() {
            if crossing.to == rank {
                let is_needed = plan.needs.binary_search(&crossing.value).is_ok();
                if is_needed { &mut plan.incoming } else { &mut plan.incoming_outputs }.push(number);
            }
            if crossing.from == rank {
                match plan.outgoing.iter_mut().find(|(value, _)| *value == crossing.value) {
                    Some((_, crossings)) => crossings.push(number),
                    None => plan.outgoing.push((crossing.value, vec![number])),
                }
                computed.extend(is_own(crossing.value).then_some(crossing.value));
            }
        }
        if rank + 1 == self.ranks() {
            let crosses = |value: ValueId| {
                self.partition
                    .crossings()
                    .iter()
                    .any(|crossing| crossing.value == value && crossing.to == rank)
            };
            let is_wanted = |value: &ValueId| is_own(*value) && !crosses(*value);
            computed.extend(self.graph.outputs().iter().copied().filter(is_wanted));
        }
        computed.sort_unstable();
        computed.dedup();
        plan.computes = computed;
        plan
    }

    /// The type in which the runtime holds a value.
    pub(crate) fn element(&self, value: ValueId) -> Option<ElementType> {
        self.graph.value(value).tensor.element.and_then(|element| self.runtime.element(element))
    }

    /// The type and dimensions of a value in the runtime, if they are fixed.
    #[must_use]
    pub fn form(&self, value: ValueId) -> Option<TensorForm> {
        let form =
            TensorForm { element: self.element(value)?, dims: self.graph.value(value).tensor.sizes()? };
        form.bytes().map(|_| form)
    }

    /// Checks that everything that is sent or given is known and can be sent.
    ///
    /// # Errors
    ///
    /// [`JobError`] names the value.
    pub fn check(&self) -> Result<(), JobError> {
        for crossing in self.partition.crossings() {
            let value = self.graph.value(crossing.value);
            if value.tensor.element == Some(ElementType::Text) {
                return Err(JobError::Text { tensor: value.name.clone(), rank: crossing.from });
            }
            if crossing.space != Space::Host {
                let (tensor, runtime) = (value.name.clone(), self.runtime.name());
                return Err(JobError::Space { tensor, space: crossing.space, runtime });
            }
            self.check_element(crossing.value, crossing.from)?;
        }
        self.graph.inputs().iter().try_for_each(|&input| self.check_element(input, 0))
    }

    fn check_element(&self, value: ValueId, rank: Rank) -> Result<(), JobError> {
        let value_of = self.graph.value(value);
        match value_of.tensor.element {
            Some(element) if self.runtime.element(element).is_none() => {
                let error = RuntimeError::Element {
                    runtime: self.runtime.name(),
                    tensor: value_of.name.clone(),
                    element: element.to_string(),
                    remedy: "run with --runtime onnxruntime",
                };
                Err(JobError::Runtime { rank, error })
            }
            _ => Ok(()),
        }
    }

    /// The channels of all ranks: those of tensors, then those of states if there is a caller.
    /// `maps` tells whether two ranks map each other's memory; both must know the same.
    #[must_use]
    pub fn channels(&self, maps: &dyn Fn(Rank, Rank) -> bool, copies: Copies) -> Vec<Channel> {
        let crossing = |crossing: &crate::partition::Crossing| {
            let maps = maps(crossing.from, crossing.to);
            let value = self.graph.value(crossing.value);
            let form = match self.form(crossing.value).and_then(|form| form.bytes()) {
                Some(bytes) if maps && copies == Copies::None => Form::Lend { bytes },
                Some(bytes) => Form::Put { bytes },
                None => Form::Fetch {
                    element: self.element(crossing.value),
                    dimensions: value.tensor.shape.as_ref().map(Vec::len),
                },
            };
            let crate::partition::Crossing { from, to, space, .. } = *crossing;
            Channel { tensor: value.name.clone(), from, to, form, space }
        };
        let crossings = self.partition.crossings().iter().map(crossing);
        crossings.chain(self.state_channels()).collect()
    }

    /// Loads the part of a rank.
    ///
    /// # Errors
    ///
    /// [`JobError`]: a weight is not there, or the runtime does not take the part.
    pub fn load_part(&self, rank: Rank) -> Result<Part, JobError> {
        let plan = self.rank_plan(rank);
        let program = self.load(rank, &plan.nodes, &plan.needs, &plan.computes)?;
        Ok(Part { rank, plan, program })
    }

    /// Loads some nodes as a model of their own; nothing if nothing is wanted of them.
    pub(crate) fn load(
        &self,
        rank: Rank,
        nodes: &[NodeId],
        inputs: &[ValueId],
        outputs: &[ValueId],
    ) -> Result<Option<Box<dyn Program>>, JobError> {
        if outputs.is_empty() {
            return Ok(None);
        }
        let cut = Cut {
            graph: self.graph,
            nodes,
            inputs,
            outputs,
            folder: self.folder,
            random_weights: self.random_weights,
            rewrites: self.runtime.needs_rewrites(),
        };
        let failed = |error| JobError::Runtime { rank, error };
        let model = self.model.cut(&cut).map_err(|error| failed(error.into()))?;
        let names = |values: &[ValueId]| -> Vec<&str> {
            values.iter().map(|&value| self.graph.value(value).name.as_str()).collect()
        };
        self.runtime.load(model.encode(), &names(inputs), &names(outputs)).map(Some).map_err(failed)
    }

    /// An error if the shape of an input is not known.
    pub(crate) fn check_input(&self, input: ValueId) -> Result<(), JobError> {
        let value = self.graph.value(input);
        let name = || value.name.clone();
        for dim in value.tensor.shape.iter().flatten() {
            match dim {
                Dim::Symbol(symbol) => {
                    return Err(JobError::FreeSymbol { input: name(), symbol: symbol.to_string() });
                }
                Dim::Unknown => return Err(JobError::UnknownInput { input: name() }),
                Dim::Fixed(_) => {}
            }
        }
        if self.form(input).is_none() {
            return Err(JobError::UnknownInput { input: name() });
        }
        Ok(())
    }
}

//! A data-flow graph: nodes that compute tensors from tensors.
//!
//! A [`Graph`] comes from ONNX ([`Graph::from_onnx`]), from its [text form](crate::text), or from a
//! [`GraphBuilder`]. It is a value: nothing here reads the bytes of weights.
//!
//! **Invariant:** nodes are in a topological order, each value has one producer and a name of its
//! own, and every number of a node or value is in range. Only [`GraphBuilder::build`] makes graphs,
//! and it refuses a graph that breaks this.
//!
//! A value is *constant* if it is a weight, or if an operator that draws no random numbers computes
//! it from constants alone. Constants lie where they are used and never cross between ranks. So a
//! node that computes constants has no rank of its own: it is in each part that uses its result.

use std::collections::{BTreeSet, HashSet};
use std::fmt;
use std::sync::Arc;

use crate::element::ElementType;

mod builder;

pub use builder::{GraphBuilder, GraphError, NodeDraft};

/// Most nodes of a graph.
pub const NODES_MAX: usize = 1 << 20;
/// Most values of a graph.
pub const VALUES_MAX: usize = 1 << 22;
/// Most inputs of all nodes together, those of bodies included.
pub const USES_MAX: usize = 1 << 24;
/// Longest name of a node, value, operator, symbol or attribute, in bytes.
pub const NAME_BYTES_MAX: usize = 4096;
/// Most dimensions of a tensor.
pub const DIMENSIONS_MAX: usize = 64;
/// Most integers of a constant that are kept for the inference of shapes.
pub const KEPT_INTEGERS_MAX: usize = 1024;

/// The number of a node, in a topological order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NodeId(pub u32);

/// The number of a value: first inputs, then weights, then results of nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ValueId(pub u32);

impl NodeId {
    /// As an index.
    #[must_use]
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

impl ValueId {
    /// As an index.
    #[must_use]
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// One dimension of a tensor.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Dim {
    /// This many elements.
    Fixed(u64),
    /// As many elements as the value of the symbol with this name.
    Symbol(Arc<str>),
    /// The number of elements is not known.
    Unknown,
}

impl fmt::Display for Dim {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Fixed(size) => write!(formatter, "{size}"),
            Self::Symbol(name) => formatter.write_str(&crate::names::quoted(name)),
            Self::Unknown => formatter.write_str("?"),
        }
    }
}

/// The facts about a tensor that are known before the graph runs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TensorType {
    /// The type of its elements.
    pub element: Option<ElementType>,
    /// Its dimensions.
    pub shape: Option<Vec<Dim>>,
}

impl TensorType {
    /// A tensor of fixed shape.
    #[must_use]
    pub fn fixed(element: ElementType, dims: &[u64]) -> Self {
        Self { element: Some(element), shape: Some(dims.iter().map(|&size| Dim::Fixed(size)).collect()) }
    }

    /// The number of elements, if all dimensions are fixed.
    #[must_use]
    pub fn elements(&self) -> Option<u64> {
        self.shape.as_ref()?.iter().try_fold(1_u64, |product, dim| match dim {
            Dim::Fixed(size) => product.checked_mul(*size),
            Dim::Symbol(_) | Dim::Unknown => None,
        })
    }

    /// The number of bytes, if all dimensions and the type are fixed.
    #[must_use]
    pub fn bytes(&self) -> Option<u64> {
        self.element?.bytes(self.elements()?)
    }

    /// The sizes, if all dimensions are fixed.
    #[must_use]
    pub fn sizes(&self) -> Option<Vec<u64>> {
        let fixed = |dim: &Dim| if let Dim::Fixed(size) = dim { Some(*size) } else { None };
        self.shape.as_ref()?.iter().map(fixed).collect()
    }
}

impl fmt::Display for TensorType {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.element.map_or("?", ElementType::name))?;
        match &self.shape {
            None => formatter.write_str(" ?"),
            Some(dims) => {
                let dims: Vec<String> = dims.iter().map(ToString::to_string).collect();
                write!(formatter, " [{}]", dims.join(", "))
            }
        }
    }
}

/// The place of a weight's bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WeightSource {
    /// In the model.
    Model,
    /// In another file.
    File {
        /// The path, relative to the folder of the model. It does not lead out of that folder.
        path: String,
        /// The first byte.
        offset: u64,
    },
}

/// The origin of a value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Producer {
    /// The caller gives the value.
    Input,
    /// The value is in the model.
    Weight {
        /// The place of its bytes.
        source: WeightSource,
        /// The integers of a small constant, for the inference of shapes.
        integers: Option<Vec<i64>>,
    },
    /// A node computes the value.
    Node(NodeId),
}

/// A tensor that flows through the graph.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Value {
    /// Its name, which no other value has.
    pub name: String,
    /// Its type and shape, as far as they are known.
    pub tensor: TensorType,
    /// Its origin.
    pub producer: Producer,
    /// The nodes that use it, in order, each once.
    pub consumers: Vec<NodeId>,
    /// Whether it is a weight or is computed from weights alone.
    pub is_constant: bool,
}

/// A tensor in an attribute. Only the facts that the inference of shapes needs are kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Literal {
    /// The type of its elements.
    pub element: ElementType,
    /// Its dimensions.
    pub dims: Vec<u64>,
    /// Its elements, if they are integers and few.
    pub integers: Option<Vec<i64>>,
}

/// The value of an attribute.
#[derive(Clone, Debug, PartialEq)]
pub enum AttributeValue {
    /// A whole number.
    Int(i64),
    /// A number.
    Float(f32),
    /// A text.
    Text(String),
    /// Whole numbers.
    Ints(Vec<i64>),
    /// Numbers.
    Floats(Vec<f32>),
    /// Texts.
    Texts(Vec<String>),
    /// A tensor.
    Tensor(Literal),
}

/// A parameter of a node.
#[derive(Clone, Debug, PartialEq)]
pub struct Attribute {
    /// Its name.
    pub name: String,
    /// Its value.
    pub value: AttributeValue,
}

/// A step of the computation.
#[derive(Clone, Debug, PartialEq)]
pub struct Node {
    /// Its name; several nodes may have the same name.
    pub name: String,
    /// The name of its operator.
    pub operator: String,
    /// The set of operators that defines the operator; empty for ONNX's own set.
    pub domain: String,
    /// Inputs in order; an optional one may be missing.
    pub inputs: Vec<Option<ValueId>>,
    /// The values of the graph outside that the bodies of an `If`, `Loop` or `Scan` use.
    pub captured: Vec<ValueId>,
    /// Outputs in order; an optional one may be missing.
    pub outputs: Vec<Option<ValueId>>,
    /// Parameters, except bodies.
    pub attributes: Vec<Attribute>,
    /// The stage of a pipeline to which the file assigns it.
    pub stage: Option<u32>,
}

impl Node {
    /// The values that the node uses, those of its bodies included. A value may come twice.
    pub fn uses(&self) -> impl Iterator<Item = ValueId> + '_ {
        self.inputs.iter().flatten().chain(&self.captured).copied()
    }

    /// The values that the node computes.
    pub fn results(&self) -> impl Iterator<Item = ValueId> + '_ {
        self.outputs.iter().flatten().copied()
    }

    /// The attribute of this name.
    #[must_use]
    pub fn attribute(&self, name: &str) -> Option<&AttributeValue> {
        self.attributes.iter().find(|attribute| attribute.name == name).map(|attribute| &attribute.value)
    }
}

/// The version of a set of operators.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OperatorSet {
    /// The set of operators; empty for ONNX's own set.
    pub domain: String,
    /// The version.
    pub version: u32,
}

/// A data-flow graph. See the module.
#[derive(Clone, Debug, PartialEq)]
pub struct Graph {
    name: String,
    operator_sets: Vec<OperatorSet>,
    values: Vec<Value>,
    nodes: Vec<Node>,
    inputs: Vec<ValueId>,
    outputs: Vec<ValueId>,
}

impl Graph {
    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The versions of the operators.
    #[must_use]
    pub fn operator_sets(&self) -> &[OperatorSet] {
        &self.operator_sets
    }

    /// The version of ONNX's own operators, if the graph names one.
    #[must_use]
    pub fn opset(&self) -> Option<u32> {
        self.operator_sets.iter().find(|set| set.domain.is_empty()).map(|set| set.version)
    }

    /// All values, by number.
    #[must_use]
    pub fn values(&self) -> &[Value] {
        &self.values
    }

    /// All nodes, in a topological order.
    #[must_use]
    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    /// The values that the caller gives.
    #[must_use]
    pub fn inputs(&self) -> &[ValueId] {
        &self.inputs
    }

    /// The values that the caller gets; a value may come twice.
    #[must_use]
    pub fn outputs(&self) -> &[ValueId] {
        &self.outputs
    }

    /// A value.
    #[must_use]
    pub fn value(&self, id: ValueId) -> &Value {
        &self.values[id.index()]
    }

    /// A node.
    #[must_use]
    pub fn node(&self, id: NodeId) -> &Node {
        &self.nodes[id.index()]
    }

    /// The value of this name.
    #[must_use]
    pub fn find(&self, name: &str) -> Option<ValueId> {
        self.values.iter().position(|value| value.name == name).map(|place| ValueId(place as u32))
    }

    /// Whether a node computes only constants.
    #[must_use]
    pub fn is_constant(&self, node: NodeId) -> bool {
        let node = self.node(node);
        node.results().next().is_some() && node.results().all(|result| self.value(result).is_constant)
    }

    /// The nodes that need a rank, in order: those that do not compute only constants.
    #[must_use]
    pub fn placed_nodes(&self) -> Vec<NodeId> {
        (0..self.nodes.len() as u32).map(NodeId).filter(|&node| !self.is_constant(node)).collect()
    }

    /// The symbols in the dimensions, in the order in which they appear, each once.
    #[must_use]
    pub fn symbols(&self) -> Vec<Arc<str>> {
        let (mut symbols, mut is_seen) = (Vec::new(), HashSet::new());
        let shapes = self.values.iter().filter_map(|value| value.tensor.shape.as_ref());
        for dim in shapes.flatten() {
            if let Dim::Symbol(name) = dim
                && is_seen.insert(name)
            {
                symbols.push(Arc::clone(name));
            }
        }
        symbols
    }

    /// The operators at which shapes are lost, each once, in the order of their names. All inputs
    /// of a node with such an operator have shapes, and a result has none. Either the operator has
    /// no rule, or its rule does not cover the node.
    #[must_use]
    pub fn operators_without_shapes(&self) -> Vec<String> {
        let has_shape = |id: ValueId| self.value(id).tensor.shape.is_some();
        let is_loss = |node: &&Node| node.uses().all(has_shape) && !node.results().all(has_shape);
        let name = |node: &Node| match node.domain.as_str() {
            "" => node.operator.clone(),
            domain => format!("{domain}:{}", node.operator),
        };
        self.nodes.iter().filter(is_loss).map(name).collect::<BTreeSet<_>>().into_iter().collect()
    }

    /// By number of a value: whether the caller gets it.
    pub(crate) fn output_flags(&self) -> Vec<bool> {
        let mut is_output = vec![false; self.values.len()];
        self.outputs.iter().for_each(|output| is_output[output.index()] = true);
        is_output
    }

    /// The same graph with other types of its values, by number.
    pub(crate) fn with_tensors(&self, tensors: Vec<TensorType>) -> Self {
        let mut graph = self.clone();
        for (value, tensor) in graph.values.iter_mut().zip(tensors) {
            value.tensor = tensor;
        }
        graph
    }

    /// The same graph with a stage for each node.
    #[must_use]
    pub fn with_stages(&self, stages: &[Option<u32>]) -> Self {
        let mut graph = self.clone();
        for (node, stage) in graph.nodes.iter_mut().zip(stages) {
            node.stage = *stage;
        }
        graph
    }
}

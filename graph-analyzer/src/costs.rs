//! What nodes and transfers cost, estimated from shapes.
//!
//! A node takes the time of its arithmetic operations plus that of the bytes that it reads and
//! writes, at two rates of a [`Machine`]. A dimension of which the size is not known counts as 1.

use crate::element::ElementType;
use crate::graph::{AttributeValue, Dim, Graph, Node, TensorType};

/// What a rank and the links between ranks can do.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Machine {
    /// Additions and multiplications a second, in `f32`.
    pub operations_per_s: f64,
    /// Bytes a second, from and to memory.
    pub bytes_per_s: f64,
    /// Bytes a second, from one rank to another.
    pub transfer_bytes_per_s: f64,
}

impl Machine {
    /// One core of a server, and peers that read each other's memory: `--costs measured` measures
    /// these rates.
    pub const TYPICAL: Self =
        Self { operations_per_s: 2.0e10, bytes_per_s: 1.0e10, transfer_bytes_per_s: 5.0e9 };
}

/// The time of each node, and the rate of transfers.
#[derive(Clone, Debug, PartialEq)]
pub struct Costs {
    /// By node: nanoseconds, at least 1.
    pub node_ns: Vec<u64>,
    /// Bytes a second, from one rank to another.
    pub transfer_bytes_per_s: f64,
}

impl Costs {
    /// Estimates the costs of a graph whose shapes were inferred.
    #[must_use]
    pub fn estimated(graph: &Graph, machine: &Machine) -> Self {
        let time = |node: &Node| {
            let values = node.uses().chain(node.results());
            let bytes: f64 = values.map(|id| assumed_bytes(&graph.value(id).tensor) as f64).sum();
            let seconds = operations(graph, node) / machine.operations_per_s + bytes / machine.bytes_per_s;
            ((seconds * 1e9) as u64).clamp(1, NODE_NS_MAX)
        };
        Self {
            node_ns: graph.nodes().iter().map(time).collect(),
            transfer_bytes_per_s: machine.transfer_bytes_per_s,
        }
    }

    /// How long a transfer of so many bytes takes.
    pub(crate) fn transfer_ns(&self, bytes: u64) -> u64 {
        (bytes as f64 / self.transfer_bytes_per_s * 1e9) as u64
    }
}

/// Longest time of a node, so that sums over all nodes stay exact.
const NODE_NS_MAX: u64 = 1 << 40;

/// Largest size of a tensor that is assumed, so that sums over all tensors stay exact.
const ASSUMED_BYTES_MAX: u64 = 1 << 40;

/// The size of a tensor; unknown dimensions count as 1, unknown elements as `f32`.
pub(crate) fn assumed_bytes(tensor: &TensorType) -> u64 {
    let element = tensor.element.unwrap_or(ElementType::F32);
    let bytes = assumed_elements(tensor).and_then(|elements| element.bytes(elements));
    bytes.unwrap_or(0).min(ASSUMED_BYTES_MAX)
}

fn assumed_elements(tensor: &TensorType) -> Option<u64> {
    let dims = tensor.shape.as_deref().unwrap_or_default();
    dims.iter().try_fold(1_u64, |product, dim| product.checked_mul(assumed_size(dim)))
}

fn assumed_size(dim: &Dim) -> u64 {
    if let Dim::Fixed(size) = dim { *size } else { 1 }
}

/// The arithmetic operations of a node.
fn operations(graph: &Graph, node: &Node) -> f64 {
    let tensor = |place: usize| node.inputs.get(place).copied().flatten().map(|id| &graph.value(id).tensor);
    let elements = |tensor: &TensorType| assumed_elements(tensor).unwrap_or(u64::MAX) as f64;
    let dim = |place: usize, from_end: usize| {
        let dims = tensor(place).and_then(|tensor| tensor.shape.as_deref()).unwrap_or_default();
        dims.len()
            .checked_sub(from_end)
            .and_then(|at| dims.get(at))
            .map_or(1.0, |dim| assumed_size(dim) as f64)
    };
    let results: f64 = node.results().map(|id| elements(&graph.value(id).tensor)).sum();
    // The weights of one channel of a convolution.
    let window = || {
        let weights = tensor(1).map_or(1.0, elements);
        let channels = tensor(1).and_then(|tensor| tensor.shape.as_ref()?.first().map(assumed_size));
        weights / channels.unwrap_or(1).max(1) as f64
    };
    match node.operator.as_str() {
        // Each element of a result is a sum of products over the channels and the window.
        "Conv" | "ConvInteger" => 2.0 * results * window(),
        "ConvTranspose" => 2.0 * tensor(0).map_or(1.0, elements) * window(),
        "MatMul" | "MatMulInteger" => 2.0 * results * dim(0, 1),
        "Gemm" => {
            let is_transposed = matches!(node.attribute("transA"), Some(AttributeValue::Int(1)));
            2.0 * results * dim(0, if is_transposed { 2 } else { 1 })
        }
        "MaxPool" | "AveragePool" | "LpPool" => {
            let window = match node.attribute("kernel_shape") {
                Some(AttributeValue::Ints(sizes)) => sizes.iter().map(|&size| size as f64).product(),
                _ => 1.0,
            };
            results * window
        }
        // These move bytes alone.
        "Reshape" | "Flatten" | "Squeeze" | "Unsqueeze" | "Identity" | "Transpose" | "Concat" | "Split"
        | "Slice" | "Gather" | "Shape" | "Expand" | "Pad" | "Cast" => 0.0,
        // Several passes over the elements, with functions.
        "Softmax" | "LogSoftmax" | "LRN" | "LayerNormalization" | "Gelu" | "Erf" | "Exp" | "Tanh"
        | "Sigmoid" => 8.0 * results,
        _ => results.max(tensor(0).map_or(0.0, elements)),
    }
}

//! Cuts a model: some of its nodes become a model of their own, with the weights that they use.

use std::collections::{HashMap, HashSet};
use std::io;
use std::path::Path;

use super::proto::{
    GraphProto, NodeProto, TensorProto, TensorShapeProto, TypeProto, ValueInfoProto,
    tensor_proto::DataLocation, tensor_shape_proto, type_proto,
};
use super::weights::WeightFiles;
use super::{Model, random, rewrites};
use crate::element::ElementType;
use crate::graph::{Dim, Graph, Node, NodeId, Producer, Value, ValueId, WeightSource};

/// The first version of the form in which weights need not be inputs.
const WEIGHTS_IR_VERSION: i64 = 4;

/// Largest weight that is read from a file, in bytes: a model cannot hold more.
const WEIGHT_BYTES_MAX: u64 = super::MODEL_BYTES_MAX as u64;

/// Some nodes of a model, to become one of their own.
#[derive(Clone, Copy, Debug)]
pub struct Cut<'a> {
    /// The graph of the model, with its shapes.
    pub graph: &'a Graph,
    /// The nodes, in order.
    pub nodes: &'a [NodeId],
    /// The values that are given.
    pub inputs: &'a [ValueId],
    /// The values that are wanted.
    pub outputs: &'a [ValueId],
    /// The folder of the model, for weights in files.
    pub folder: &'a Path,
    /// Draws weights of which the file gives only the shape.
    pub random_weights: Option<u64>,
    /// Whether operators that rten lacks are expressed by others, where shapes are known: `LRN` by
    /// a pool over channels, and the `Softmax` of old versions by the new one.
    pub rewrites: bool,
}

/// Why a part of a model is no model.
#[derive(pleach_derive::ErrorDebug, thiserror::Error)]
#[non_exhaustive]
pub enum CutError {
    /// The values of a weight are not there.
    #[error("the file gives only the shape of the weight '{weight}'; give --random-weights SEED")]
    NoValues {
        /// The weight.
        weight: String,
    },
    /// A file with weights was not read.
    #[error("the weight '{weight}' was not read from {path} ({source}); put the file beside the model")]
    File {
        /// The weight.
        weight: String,
        /// The file.
        path: String,
        /// The system's error.
        #[source]
        source: io::Error,
    },
    /// The weights of a part are longer than a file of a model can be.
    #[error("the part has {bytes} bytes of weights, and a model at most {WEIGHT_BYTES_MAX}; take more ranks")]
    TooLarge {
        /// The bytes.
        bytes: u64,
    },
}

impl Model {
    /// A model of some nodes. Its inputs and outputs have the names and types of the graph.
    ///
    /// # Errors
    ///
    /// [`CutError`]: a weight has no values, or its file was not read.
    pub fn cut(&self, cut: &Cut<'_>) -> Result<Self, CutError> {
        let whole = self.proto.graph.as_ref();
        let by_output: HashMap<&str, &NodeProto> = whole
            .iter()
            .flat_map(|graph| &graph.node)
            .flat_map(|node| node.output.iter().map(move |name| (name.as_str(), node)))
            .collect();
        let weights: HashMap<&str, &TensorProto> =
            whole.iter().flat_map(|graph| &graph.initializer).map(|tensor| (tensor.name(), tensor)).collect();
        let info = |&value: &ValueId| value_info(cut.graph, value);
        let mut part = GraphProto {
            name: whole.and_then(|graph| graph.name.clone()),
            input: cut.inputs.iter().map(info).collect(),
            output: cut.outputs.iter().map(info).collect(),
            ..GraphProto::default()
        };
        let mut used: HashSet<ValueId> = cut.outputs.iter().copied().collect();
        for &id in cut.nodes {
            let node = cut.graph.node(id);
            let Some(name) = node.results().next().map(|result| cut.graph.value(result).name.as_str()) else {
                continue;
            };
            let Some(&proto) = by_output.get(name) else { continue };
            if let Some(drawn) = cut.random_weights.and_then(|seed| random_result(cut.graph, node, seed)) {
                part.initializer.push(drawn);
            } else if let Some(nodes) = rewritten(cut, node, proto) {
                used.extend(node.uses());
                part.node.extend(nodes.nodes);
                part.initializer.extend(nodes.weights);
            } else {
                used.extend(node.uses());
                part.node.push(proto.clone());
            }
        }
        let sparse = whole.iter().flat_map(|graph| &graph.sparse_initializer);
        part.sparse_initializer = sparse.cloned().collect();
        let mut used: Vec<ValueId> = used.into_iter().collect();
        used.sort_unstable();
        let (mut bytes, mut files) = (0, WeightFiles::new(cut.folder));
        for value in used.into_iter().map(|id| cut.graph.value(id)) {
            let Some(&tensor) = weights.get(value.name.as_str()) else { continue };
            bytes += value.tensor.bytes().unwrap_or(0);
            if bytes > WEIGHT_BYTES_MAX {
                return Err(CutError::TooLarge { bytes });
            }
            part.initializer.push(weight(cut, tensor, value, &mut files)?);
        }
        let mut model = self.clone_without_graph();
        model.proto.ir_version = Some(model.proto.ir_version().max(WEIGHTS_IR_VERSION));
        model.proto.graph = Some(part);
        Ok(model)
    }

    fn clone_without_graph(&self) -> Self {
        let proto = super::proto::ModelProto {
            ir_version: self.proto.ir_version,
            opset_import: self.proto.opset_import.clone(),
            producer_name: Some("pleach".to_owned()),
            functions: self.proto.functions.clone(),
            ..Default::default()
        };
        Self { proto }
    }
}

/// A weight that replaces a node which fills a tensor with one number.
fn random_result(graph: &Graph, node: &Node, seed: u64) -> Option<TensorProto> {
    let result = node.results().next().filter(|_| node.operator == "ConstantOfShape")?;
    let value = graph.value(result);
    let is_drawn = value.is_constant && value.tensor.element == Some(ElementType::F32);
    random::draw(&value.name, &value.tensor.sizes().filter(|_| is_drawn)?, seed)
}

fn rewritten(cut: &Cut<'_>, node: &Node, proto: &NodeProto) -> Option<rewrites::Replacement> {
    let input = (*node.inputs.first()?).filter(|_| cut.rewrites && node.domain.is_empty())?;
    let dims = cut.graph.value(input).tensor.sizes()?;
    rewrites::replacement(proto, cut.graph.opset().unwrap_or(1), &dims)
}

/// A weight with its values.
fn weight(
    cut: &Cut<'_>,
    tensor: &TensorProto,
    value: &Value,
    files: &mut WeightFiles<'_>,
) -> Result<TensorProto, CutError> {
    let weight = || tensor.name().to_owned();
    if tensor.data_location() == DataLocation::External {
        let (Producer::Weight { source: WeightSource::File { path, offset }, .. }, Some(bytes)) =
            (&value.producer, value.tensor.bytes())
        else {
            return Err(CutError::NoValues { weight: weight() });
        };
        let raw = files.bytes(path, *offset, bytes).map_err(|source| {
            let path = cut.folder.join(path).display().to_string();
            CutError::File { weight: weight(), path, source }
        })?;
        let mut tensor = tensor.clone();
        (tensor.data_location, tensor.external_data) = (None, Vec::new());
        tensor.raw_data = Some(raw);
        return Ok(tensor);
    }
    if has_values(tensor) {
        return Ok(tensor.clone());
    }
    let dims: Vec<u64> = tensor.dims.iter().map(|dim| dim.unsigned_abs()).collect();
    let is_float = ElementType::from_onnx(tensor.data_type()) == Some(ElementType::F32);
    let drawn = cut.random_weights.filter(|_| is_float);
    let drawn = drawn.and_then(|seed| random::draw(tensor.name(), &dims, seed));
    drawn.ok_or_else(|| CutError::NoValues { weight: weight() })
}

fn has_values(tensor: &TensorProto) -> bool {
    let is_empty = tensor.raw_data.is_none()
        && tensor.float_data.is_empty()
        && tensor.int32_data.is_empty()
        && tensor.int64_data.is_empty()
        && tensor.double_data.is_empty()
        && tensor.uint64_data.is_empty()
        && tensor.string_data.is_empty();
    !is_empty || tensor.dims.contains(&0)
}

fn value_info(graph: &Graph, id: ValueId) -> ValueInfoProto {
    use tensor_shape_proto::{Dimension, dimension};
    let value = graph.value(id);
    let dim = |dim: &Dim| Dimension {
        value: match dim {
            Dim::Fixed(size) => Some(dimension::Value::DimValue(*size as i64)),
            Dim::Symbol(name) => Some(dimension::Value::DimParam(name.to_string())),
            Dim::Unknown => None,
        },
        ..Dimension::default()
    };
    let tensor = value.tensor.element.map(|element| type_proto::Tensor {
        elem_type: Some(element.to_onnx()),
        shape: value
            .tensor
            .shape
            .as_ref()
            .map(|dims| TensorShapeProto { dim: dims.iter().map(dim).collect() }),
    });
    let of = tensor.map(|tensor| TypeProto {
        value: Some(type_proto::Value::TensorType(tensor)),
        ..TypeProto::default()
    });
    ValueInfoProto { name: Some(value.name.clone()), r#type: of, ..ValueInfoProto::default() }
}

//! A model of a graph that came from its text form or its JSON.

use super::Model;
use super::proto::{
    AttributeProto, GraphProto, ModelProto, NodeProto, OperatorSetIdProto, StringStringEntryProto,
    TensorProto, attribute_proto::AttributeType, tensor_proto::DataLocation,
};
use crate::graph::{Attribute, AttributeValue, Dim, Graph, Literal, Producer, Value, WeightSource};

use prost::bytes::Bytes;

/// The version of the form, and of ONNX's operators if the graph names none.
const IR_VERSION: i64 = 10;
const OPERATORS_VERSION: i64 = 17;

impl Model {
    /// A model of a graph. Weights have the values that the graph keeps, which are few integers, or
    /// those of their file; otherwise only their shape. Bodies of operators are not kept.
    #[must_use]
    pub fn of_graph(graph: &Graph) -> Self {
        let mut sets: Vec<OperatorSetIdProto> = graph
            .operator_sets()
            .iter()
            .map(|set| OperatorSetIdProto {
                domain: Some(set.domain.clone()),
                version: Some(i64::from(set.version)),
            })
            .collect();
        if graph.opset().is_none() {
            sets.push(OperatorSetIdProto { domain: Some(String::new()), version: Some(OPERATORS_VERSION) });
        }
        let name = |id: Option<crate::graph::ValueId>| {
            id.map_or_else(String::new, |id| graph.value(id).name.clone())
        };
        let node = |node: &crate::graph::Node| NodeProto {
            name: Some(node.name.clone()),
            op_type: Some(node.operator.clone()),
            domain: Some(node.domain.clone()),
            input: node.inputs.iter().map(|&id| name(id)).collect(),
            output: node.outputs.iter().map(|&id| name(id)).collect(),
            attribute: node.attributes.iter().map(attribute).collect(),
            ..NodeProto::default()
        };
        let proto = GraphProto {
            name: Some(graph.name().to_owned()),
            node: graph.nodes().iter().map(node).collect(),
            initializer: graph.values().iter().filter_map(weight).collect(),
            ..GraphProto::default()
        };
        Self {
            proto: ModelProto {
                ir_version: Some(IR_VERSION),
                opset_import: sets,
                graph: Some(proto),
                ..ModelProto::default()
            },
        }
    }
}

fn weight(value: &Value) -> Option<TensorProto> {
    let Producer::Weight { source, integers } = &value.producer else { return None };
    let dim = |dim: &Dim| if let Dim::Fixed(size) = dim { *size as i64 } else { 0 };
    let element = value.tensor.element?;
    let dims: Vec<i64> = value.tensor.shape.iter().flatten().map(dim).collect();
    let mut tensor = tensor(element.to_onnx(), dims, integers.as_deref());
    tensor.name = Some(value.name.clone());
    if let WeightSource::File { path, offset } = source {
        tensor.data_location = Some(DataLocation::External as i32);
        let entry = |key: &str, value: String| StringStringEntryProto {
            key: Some(key.to_owned()),
            value: Some(value),
        };
        tensor.external_data = vec![entry("location", path.clone()), entry("offset", offset.to_string())];
    }
    Some(tensor)
}

fn tensor(element: i32, dims: Vec<i64>, integers: Option<&[i64]>) -> TensorProto {
    use crate::element::ElementType;
    let mut tensor = TensorProto { dims, data_type: Some(element), ..TensorProto::default() };
    match (ElementType::from_onnx(element), integers) {
        (Some(ElementType::I64), Some(integers)) => tensor.int64_data = integers.to_vec(),
        (Some(_), Some(integers)) => {
            tensor.int32_data = integers.iter().map(|&integer| integer as i32).collect()
        }
        _ => {}
    }
    tensor
}

fn attribute(attribute: &Attribute) -> AttributeProto {
    let mut proto = AttributeProto { name: Some(attribute.name.clone()), ..AttributeProto::default() };
    let text = |text: &String| Bytes::copy_from_slice(text.as_bytes());
    let kind = match &attribute.value {
        AttributeValue::Int(value) => {
            proto.i = Some(*value);
            AttributeType::Int
        }
        AttributeValue::Float(value) => {
            proto.f = Some(*value);
            AttributeType::Float
        }
        AttributeValue::Text(value) => {
            proto.s = Some(text(value));
            AttributeType::String
        }
        AttributeValue::Ints(values) => {
            proto.ints.clone_from(values);
            AttributeType::Ints
        }
        AttributeValue::Floats(values) => {
            proto.floats.clone_from(values);
            AttributeType::Floats
        }
        AttributeValue::Texts(values) => {
            proto.strings = values.iter().map(text).collect();
            AttributeType::Strings
        }
        AttributeValue::Tensor(Literal { element, dims, integers }) => {
            let dims = dims.iter().map(|&dim| dim as i64).collect();
            proto.t = Some(tensor(element.to_onnx(), dims, integers.as_deref()));
            AttributeType::Tensor
        }
    };
    proto.r#type = Some(kind as i32);
    proto
}

//! Operators that a runtime lacks, or has in their later form alone, expressed by others.
//!
//! * `LRN`: an average of squares over channels is a pool, if the channels are an axis of their own
//!   beside one axis for all others.
//! * `Softmax` and `LogSoftmax` before version 13: over all axes from one on, as if they were one.

use prost::bytes::Bytes;

use super::proto::{
    AttributeProto, NodeProto, TensorProto, attribute_proto::AttributeType, tensor_proto::DataType,
};

/// Nodes in the place of one, and the constants that they use.
pub(crate) struct Replacement {
    pub(crate) nodes: Vec<NodeProto>,
    pub(crate) weights: Vec<TensorProto>,
}

/// The first version of ONNX's operators whose `Softmax` is over a single axis.
const SOFTMAX_VERSION: u32 = 13;

/// The same as this node of ONNX's own operators, for an input with these dimensions; nothing if
/// the node can stay.
pub(crate) fn replacement(node: &NodeProto, version: u32, dims: &[u64]) -> Option<Replacement> {
    match node.op_type() {
        "LRN" => lrn(node, dims),
        "Softmax" | "LogSoftmax" if version < SOFTMAX_VERSION => softmax(node, dims),
        _ => None,
    }
}

fn softmax(node: &NodeProto, dims: &[u64]) -> Option<Replacement> {
    let ([input], [output]) = (node.input.as_slice(), node.output.as_slice()) else { return None };
    let axis =
        node.attribute.iter().find(|attribute| attribute.name() == "axis").map_or(1, AttributeProto::i);
    let axis = if axis < 0 { axis + dims.len() as i64 } else { axis };
    let (before, after) = dims.split_at_checked(usize::try_from(axis).ok()?)?;
    let flat = [before, after].map(|dims| dims.iter().product::<u64>() as i64);
    let back: Vec<i64> = dims.iter().map(|&dim| dim as i64).collect();
    let name = |step: &str| format!("{output}/softmax/{step}");
    let weights = vec![integers(name("flat"), &flat), integers(name("back"), &back)];
    let mut normalized = step(node.op_type(), &[&name("input")], &name("output"));
    normalized.attribute = vec![int("axis", 1)];
    let nodes = vec![
        step("Reshape", &[input, &name("flat")], &name("input")),
        normalized,
        step("Reshape", &[&name("output"), &name("back")], output),
    ];
    Some(Replacement { nodes, weights })
}

fn step(operator: &str, inputs: &[&str], output: &str) -> NodeProto {
    NodeProto {
        op_type: Some(operator.to_owned()),
        name: Some(format!("{output}/{operator}")),
        input: inputs.iter().map(|&input| input.to_owned()).collect(),
        output: vec![output.to_owned()],
        ..NodeProto::default()
    }
}

fn lrn(node: &NodeProto, dims: &[u64]) -> Option<Replacement> {
    let ([input], [output]) = (node.input.as_slice(), node.output.as_slice()) else { return None };
    let (&batch, rest) = dims.split_first()?;
    let (&channels, places) = rest.split_first()?;
    let attribute = |name: &str| node.attribute.iter().find(|attribute| attribute.name() == name);
    let float = |name, usual| attribute(name).map_or(usual, AttributeProto::f);
    let size = attribute("size").map(AttributeProto::i).filter(|&size| size > 0)?;
    let name = |step: &str| format!("{output}/lrn/{step}");
    let flat = [batch, 1, channels, places.iter().product()].map(|dim| dim as i64);
    let back: Vec<i64> = dims.iter().map(|&dim| dim as i64).collect();
    let weights = vec![
        integers(name("flat"), &flat),
        integers(name("back"), &back),
        number(name("alpha"), float("alpha", 1e-4)),
        number(name("bias"), float("bias", 1.0)),
        number(name("beta"), float("beta", 0.75)),
    ];
    let mut pool = step("AveragePool", &[&name("squares1")], &name("mean1"));
    let before = (size - 1) / 2;
    pool.attribute = vec![
        ints("kernel_shape", &[size, 1]),
        ints("strides", &[1, 1]),
        ints("pads", &[before, 0, size - 1 - before, 0]),
        int("count_include_pad", 1),
    ];
    let nodes = vec![
        step("Mul", &[input, input], &name("squares")),
        step("Reshape", &[&name("squares"), &name("flat")], &name("squares1")),
        pool,
        step("Reshape", &[&name("mean1"), &name("back")], &name("mean")),
        step("Mul", &[&name("mean"), &name("alpha")], &name("scaled")),
        step("Add", &[&name("scaled"), &name("bias")], &name("sum")),
        step("Pow", &[&name("sum"), &name("beta")], &name("divisor")),
        step("Div", &[input, &name("divisor")], output),
    ];
    Some(Replacement { nodes, weights })
}

fn integers(name: String, values: &[i64]) -> TensorProto {
    TensorProto {
        name: Some(name),
        dims: vec![values.len() as i64],
        data_type: Some(DataType::Int64 as i32),
        int64_data: values.to_vec(),
        ..TensorProto::default()
    }
}

fn number(name: String, value: f32) -> TensorProto {
    TensorProto {
        name: Some(name),
        data_type: Some(DataType::Float as i32),
        raw_data: Some(Bytes::copy_from_slice(&value.to_le_bytes())),
        ..TensorProto::default()
    }
}

fn ints(name: &str, values: &[i64]) -> AttributeProto {
    AttributeProto {
        name: Some(name.to_owned()),
        r#type: Some(AttributeType::Ints as i32),
        ints: values.to_vec(),
        ..AttributeProto::default()
    }
}

fn int(name: &str, value: i64) -> AttributeProto {
    AttributeProto {
        name: Some(name.to_owned()),
        r#type: Some(AttributeType::Int as i32),
        i: Some(value),
        ..AttributeProto::default()
    }
}

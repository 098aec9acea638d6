//! Makes a graph of a model.

use std::collections::HashSet;
use std::sync::Arc;

use prost::bytes::Bytes;

use super::OnnxError;
use super::proto::{
    AttributeProto, GraphProto, ModelProto, NodeProto, SparseTensorProto, TensorProto, TypeProto,
    ValueInfoProto, attribute_proto::AttributeType, tensor_proto::DataLocation,
    tensor_shape_proto::dimension, type_proto,
};
use crate::element::ElementType;
use crate::graph::{
    Attribute, AttributeValue, DIMENSIONS_MAX, Dim, Graph, GraphBuilder, GraphError, KEPT_INTEGERS_MAX,
    Literal, NodeDraft, TensorType, USES_MAX, WeightSource,
};

/// Another name of ONNX's own operators.
const ONNX_DOMAIN: &str = "ai.onnx";

pub(super) fn graph(model: &ModelProto) -> Result<Graph, OnnxError> {
    let missing = || OnnxError::NoModel { reason: "it has no graph".to_owned() };
    let graph = model.graph.as_ref().ok_or_else(missing)?;
    let mut builder = GraphBuilder::new(graph.name());
    for set in &model.opset_import {
        let version = u32::try_from(set.version()).unwrap_or(u32::MAX);
        builder.operator_set(plain_domain(set.domain()), version);
    }
    let mut weights: HashSet<&str> = HashSet::new();
    for tensor in &graph.initializer {
        weights.insert(tensor.name());
        let literal = literal(tensor)?;
        let integers = literal.integers.clone();
        builder.weight(
            tensor.name(),
            TensorType::fixed(literal.element, &literal.dims),
            source(tensor)?,
            integers,
        );
    }
    for tensor in &graph.sparse_initializer {
        let (name, dense) = sparse(tensor)?;
        weights.insert(name);
        builder.weight(name, dense, WeightSource::Model, None);
    }
    // Until version 3 of the form, weights are inputs too.
    for input in graph.input.iter().filter(|input| !weights.contains(input.name())) {
        builder.input(input.name(), tensor_type(input));
    }
    let declared = graph.value_info.iter().chain(&graph.output);
    let declared: std::collections::HashMap<&str, &ValueInfoProto> =
        declared.map(|info| (info.name(), info)).collect();
    let mut uses = 0;
    for node in &graph.node {
        let mut draft = node_draft(node, &mut uses)?;
        for (name, tensor) in &mut draft.outputs {
            if let Some(info) = declared.get(name.as_str()) {
                *tensor = tensor_type(info);
            }
        }
        builder.node(draft);
    }
    for output in &graph.output {
        builder.output(output.name());
    }
    Ok(builder.build()?)
}

fn plain_domain(domain: &str) -> &str {
    if domain == ONNX_DOMAIN { "" } else { domain }
}

fn node_draft(node: &NodeProto, uses: &mut usize) -> Result<NodeDraft, OnnxError> {
    let mut captured = Vec::new();
    for attribute in &node.attribute {
        for body in attribute.g.iter().chain(&attribute.graphs) {
            let scope = &mut Vec::new();
            captures(body, scope, &mut captured, uses)?;
        }
    }
    captured.sort_unstable();
    captured.dedup();
    let stage = node.device_configurations.iter().find_map(|configuration| configuration.pipeline_stage);
    let attributes = node.attribute.iter().filter_map(|attribute| self::attribute(attribute).transpose());
    Ok(NodeDraft {
        name: node.name().to_owned(),
        operator: node.op_type().to_owned(),
        domain: plain_domain(node.domain()).to_owned(),
        inputs: node.input.clone(),
        captured,
        outputs: node.output.iter().map(|name| (name.clone(), TensorType::default())).collect(),
        attributes: attributes.collect::<Result<_, _>>()?,
        stage: stage.and_then(|stage| u32::try_from(stage).ok()),
    })
}

/// Collects the names that a body uses and that neither it nor a body around it defines. `scope`
/// has the names that the bodies around it define.
fn captures<'a>(
    body: &'a GraphProto,
    scope: &mut Vec<HashSet<&'a str>>,
    captured: &mut Vec<String>,
    uses: &mut usize,
) -> Result<(), OnnxError> {
    let inputs = body.input.iter().map(ValueInfoProto::name);
    let weights = body.initializer.iter().map(TensorProto::name);
    let sparse = body.sparse_initializer.iter().filter_map(|tensor| Some(tensor.values.as_ref()?.name()));
    let results = body.node.iter().flat_map(|node| node.output.iter().map(String::as_str));
    scope.push(inputs.chain(weights).chain(sparse).chain(results).collect());
    let used = body.node.iter().flat_map(|node| &node.input).map(String::as_str);
    for name in used.chain(body.output.iter().map(ValueInfoProto::name)) {
        *uses += 1;
        if *uses > USES_MAX {
            return Err(GraphError::TooMany { what: "inputs of nodes", most: USES_MAX }.into());
        }
        if !name.is_empty() && !scope.iter().any(|names| names.contains(name)) {
            captured.push(name.to_owned());
        }
    }
    let bodies = body.node.iter().flat_map(|node| &node.attribute);
    for inner in bodies.flat_map(|attribute| attribute.g.iter().chain(&attribute.graphs)) {
        captures(inner, scope, captured, uses)?;
    }
    scope.pop();
    Ok(())
}

/// An attribute, if it is of a kind that graphs keep.
fn attribute(proto: &AttributeProto) -> Result<Option<Attribute>, OnnxError> {
    let text = |bytes: &Bytes| String::from_utf8_lossy(bytes).into_owned();
    let value = match proto.r#type() {
        AttributeType::Int => AttributeValue::Int(proto.i()),
        AttributeType::Float => AttributeValue::Float(proto.f()),
        AttributeType::String => AttributeValue::Text(text(proto.s.as_ref().unwrap_or(&Bytes::new()))),
        AttributeType::Ints => AttributeValue::Ints(proto.ints.clone()),
        AttributeType::Floats => AttributeValue::Floats(proto.floats.clone()),
        AttributeType::Strings => AttributeValue::Texts(proto.strings.iter().map(text).collect()),
        AttributeType::Tensor => match &proto.t {
            Some(tensor) => AttributeValue::Tensor(literal(tensor)?),
            None => return Ok(None),
        },
        _ => return Ok(None),
    };
    Ok(Some(Attribute { name: proto.name().to_owned(), value }))
}

fn tensor_error(tensor: &TensorProto, problem: impl Into<String>) -> OnnxError {
    OnnxError::Tensor { name: tensor.name().to_owned(), problem: problem.into() }
}

/// The type of a tensor in the model, and its integers if they are few. Its size has to be that of
/// its bytes.
fn literal(tensor: &TensorProto) -> Result<Literal, OnnxError> {
    let wrong = |problem: String| tensor_error(tensor, problem);
    let element = ElementType::from_onnx(tensor.data_type())
        .ok_or_else(|| wrong(format!("has elements of an unknown type {}", tensor.data_type())))?;
    if tensor.dims.len() > DIMENSIONS_MAX {
        return Err(GraphError::TooMany { what: "dimensions of a tensor", most: DIMENSIONS_MAX }.into());
    }
    let dims: Vec<u64> = tensor
        .dims
        .iter()
        .map(|&dim| u64::try_from(dim).map_err(|_| wrong(format!("has a dimension of {dim}"))))
        .collect::<Result<_, _>>()?;
    let elements = dims.iter().try_fold(1_u64, |product, &dim| product.checked_mul(dim));
    let elements = elements.ok_or_else(|| wrong("is larger than any memory".to_owned()))?;
    if element != ElementType::Text && element.bytes(elements).is_none() {
        return Err(wrong("is larger than any memory".to_owned()));
    }
    if tensor.data_location() == DataLocation::External {
        return Ok(Literal { element, dims, integers: None });
    }
    if let (Some(raw), Some(bytes)) = (&tensor.raw_data, element.bytes(elements))
        && raw.len() as u64 != bytes
    {
        return Err(wrong(format!("has {} bytes and dimensions for {bytes}", raw.len())));
    }
    let integers =
        if elements <= KEPT_INTEGERS_MAX as u64 { integers(tensor, element, elements) } else { None };
    Ok(Literal { element, dims, integers })
}

/// The elements of a tensor of whole numbers.
fn integers(tensor: &TensorProto, element: ElementType, elements: u64) -> Option<Vec<i64>> {
    let raw = tensor.raw_data.as_ref();
    let integers: Vec<i64> = match (element, raw) {
        (ElementType::I64, Some(raw)) => raw
            .chunks_exact(8)
            .map(|bytes| i64::from_le_bytes(bytes.try_into().unwrap_or_default()))
            .collect(),
        (ElementType::I32, Some(raw)) => raw
            .chunks_exact(4)
            .map(|bytes| i64::from(i32::from_le_bytes(bytes.try_into().unwrap_or_default())))
            .collect(),
        (ElementType::Bool | ElementType::U8, Some(raw)) => raw.iter().map(|&byte| i64::from(byte)).collect(),
        (ElementType::I64, None) => tensor.int64_data.clone(),
        (ElementType::I32 | ElementType::Bool | ElementType::U8, None) => {
            tensor.int32_data.iter().map(|&int| i64::from(int)).collect()
        }
        _ => return None,
    };
    (integers.len() as u64 == elements).then_some(integers)
}

/// Where the bytes of a weight are.
fn source(tensor: &TensorProto) -> Result<WeightSource, OnnxError> {
    if tensor.data_location() != DataLocation::External {
        return Ok(WeightSource::Model);
    }
    let entry = |key: &str| {
        let found = tensor.external_data.iter().find(|entry| entry.key() == key);
        found.map(super::proto::StringStringEntryProto::value)
    };
    let path = entry("location").unwrap_or_default();
    let offset = entry("offset").map_or(Ok(0), str::parse);
    let offset = offset.map_err(|_| tensor_error(tensor, "has an offset that is no number"))?;
    Ok(WeightSource::File { path: path.to_owned(), offset })
}

/// The name and type of the dense form of a sparse weight.
fn sparse(sparse: &SparseTensorProto) -> Result<(&str, TensorType), OnnxError> {
    let none = || OnnxError::NoModel { reason: "a sparse weight has no values".to_owned() };
    let values = sparse.values.as_ref().ok_or_else(none)?;
    let dim = |&dim: &i64| u64::try_from(dim).ok();
    let dims: Option<Vec<u64>> = sparse.dims.iter().map(dim).collect();
    let dims = dims.ok_or_else(|| tensor_error(values, "has a dimension below zero"))?;
    let literal = literal(values)?;
    Ok((values.name(), TensorType::fixed(literal.element, &dims)))
}

/// The type of a value; nothing is known of sequences, maps and optional values.
fn tensor_type(info: &ValueInfoProto) -> TensorType {
    let tensor = match info.r#type.as_ref().and_then(|of: &TypeProto| of.value.as_ref()) {
        Some(type_proto::Value::TensorType(tensor)) => tensor,
        _ => return TensorType::default(),
    };
    let dim = |dim: &super::proto::tensor_shape_proto::Dimension| match &dim.value {
        Some(dimension::Value::DimValue(size)) => u64::try_from(*size).map_or(Dim::Unknown, Dim::Fixed),
        Some(dimension::Value::DimParam(name)) if !name.is_empty() => Dim::Symbol(Arc::from(name.as_str())),
        _ => Dim::Unknown,
    };
    TensorType {
        element: ElementType::from_onnx(tensor.elem_type()),
        shape: tensor.shape.as_ref().map(|shape| shape.dim.iter().map(dim).collect()),
    }
}

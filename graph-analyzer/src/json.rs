//! The JSON of a graph: the text form's lines as one object.
//!
//! ```json
//! {"form": "pleach-graph", "version": 1, "graph": "tiny",
//!  "opsets": [{"domain": "", "version": 17}],
//!  "inputs": [{"name": "x", "type": "f32", "shape": ["batch", 16, null]}],
//!  "consts": [{"name": "s", "type": "i64", "shape": [2], "integers": [4, -1]}],
//!  "nodes": [{"name": "first", "operator": "MatMul", "inputs": ["x", null],
//!             "outputs": [{"name": "y", "type": "f32", "shape": null}],
//!             "attributes": [{"name": "axis", "value": {"int": 1}}], "stage": 0}],
//!  "outputs": ["y"]}
//! ```
//!
//! A dimension is a size, the name of a symbol, or null. Empty lists and fields that say nothing
//! are left out. Numbers that JSON does not have are texts: `"NaN"`, `"inf"`, `"-inf"`.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::element::ElementType;
use crate::graph::{
    Attribute, AttributeValue, Dim, Graph, GraphBuilder, GraphError, Literal, NodeDraft, Producer,
    TensorType, ValueId, WeightSource,
};
use crate::text::{FORM, MAX_TEXT_BYTES, VERSION};

/// Why a JSON text is no graph.
#[derive(pleach_derive::ErrorDebug, thiserror::Error)]
#[non_exhaustive]
pub enum JsonError {
    /// It is no JSON of this form.
    #[error("no JSON of a graph: {0}")]
    Form(#[from] serde_json::Error),
    /// It is of another form or version.
    #[error("the form is '{form}' {version}, not '{FORM}' {VERSION}; write it again")]
    Version {
        /// The form.
        form: String,
        /// The version.
        version: u32,
    },
    /// There is no such type.
    #[error("no type of elements is '{name}'; use one as f32")]
    Element {
        /// The name.
        name: String,
    },
    /// The text is longer than this reader takes.
    #[error("the text has more than {MAX_TEXT_BYTES} bytes; use a smaller graph")]
    TooLong,
    /// The object is no graph.
    #[error(transparent)]
    Graph(#[from] GraphError),
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct GraphObject {
    form: String,
    version: u32,
    graph: String,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    opsets: Vec<OpsetObject>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    inputs: Vec<ValueObject>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    consts: Vec<ConstObject>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    nodes: Vec<NodeObject>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    outputs: Vec<String>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct OpsetObject {
    #[serde(default, skip_serializing_if = "String::is_empty")]
    domain: String,
    version: u32,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct ValueObject {
    name: String,
    #[serde(default, rename = "type")]
    element: Option<String>,
    #[serde(default)]
    shape: Option<Vec<DimObject>>,
}

#[derive(Serialize, Deserialize)]
#[serde(untagged)]
enum DimObject {
    Fixed(u64),
    Symbol(String),
    Unknown(()),
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct ConstObject {
    name: String,
    #[serde(default, rename = "type")]
    element: Option<String>,
    #[serde(default)]
    shape: Option<Vec<DimObject>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    integers: Option<Vec<i64>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    file: Option<FileObject>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct FileObject {
    path: String,
    offset: u64,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct NodeObject {
    name: String,
    operator: String,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    domain: String,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    inputs: Vec<Option<String>>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    captures: Vec<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    outputs: Vec<Option<ValueObject>>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    attributes: Vec<AttributeObject>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    stage: Option<u32>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct AttributeObject {
    name: String,
    value: AttributeValueObject,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum AttributeValueObject {
    Int(i64),
    Float(FloatObject),
    Text(String),
    Ints(Vec<i64>),
    Floats(Vec<FloatObject>),
    Texts(Vec<String>),
    Tensor(LiteralObject),
}

#[derive(Serialize, Deserialize)]
#[serde(untagged)]
enum FloatObject {
    Finite(f32),
    Other(String),
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct LiteralObject {
    #[serde(rename = "type")]
    element: String,
    shape: Vec<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    integers: Option<Vec<i64>>,
}

impl Graph {
    /// Reads the [JSON](crate::json) of a graph.
    ///
    /// # Errors
    ///
    /// [`JsonError`]: no JSON, another form, or no graph.
    pub fn from_json(text: &str) -> Result<Self, JsonError> {
        if text.len() > MAX_TEXT_BYTES {
            return Err(JsonError::TooLong);
        }
        let object: GraphObject = serde_json::from_str(text)?;
        if object.form != FORM || object.version != VERSION {
            return Err(JsonError::Version { form: object.form, version: object.version });
        }
        let mut builder = GraphBuilder::new(&object.graph);
        for set in object.opsets {
            builder.operator_set(&set.domain, set.version);
        }
        for input in object.inputs {
            builder.input(&input.name, tensor(input.element, input.shape)?);
        }
        for weight in object.consts {
            let source = match weight.file {
                Some(FileObject { path, offset }) => WeightSource::File { path, offset },
                None => WeightSource::Model,
            };
            builder.weight(&weight.name, tensor(weight.element, weight.shape)?, source, weight.integers);
        }
        for object in object.nodes {
            builder.node(node(object)?);
        }
        for output in &object.outputs {
            builder.output(output);
        }
        Ok(builder.build()?)
    }

    /// Writes the [JSON](crate::json) of the graph.
    #[must_use]
    pub fn to_json(&self) -> String {
        let name = |id: &ValueId| self.value(*id).name.clone();
        let mut object = GraphObject {
            form: FORM.to_owned(),
            version: VERSION,
            graph: self.name().to_owned(),
            opsets: Vec::new(),
            inputs: self.inputs().iter().map(|&input| value_object(self, input)).collect(),
            consts: Vec::new(),
            nodes: self.nodes().iter().map(|node| node_object(self, node)).collect(),
            outputs: self.outputs().iter().map(name).collect(),
        };
        for set in self.operator_sets() {
            object.opsets.push(OpsetObject { domain: set.domain.clone(), version: set.version });
        }
        for value in self.values() {
            if let Producer::Weight { source, integers } = &value.producer {
                let file = match source {
                    WeightSource::Model => None,
                    WeightSource::File { path, offset } => {
                        Some(FileObject { path: path.clone(), offset: *offset })
                    }
                };
                let (element, shape) = type_objects(&value.tensor);
                let integers = integers.clone();
                object.consts.push(ConstObject { name: value.name.clone(), element, shape, integers, file });
            }
        }
        // Maps with keys of texts, and numbers: there is JSON of every such object.
        serde_json::to_string(&object).unwrap_or_default()
    }
}

fn tensor(element: Option<String>, shape: Option<Vec<DimObject>>) -> Result<TensorType, JsonError> {
    let dim = |object| match object {
        DimObject::Fixed(size) => Dim::Fixed(size),
        DimObject::Symbol(name) => Dim::Symbol(Arc::from(name)),
        DimObject::Unknown(()) => Dim::Unknown,
    };
    let element = element.map(named_element).transpose()?;
    Ok(TensorType { element, shape: shape.map(|dims| dims.into_iter().map(dim).collect()) })
}

fn named_element(name: String) -> Result<ElementType, JsonError> {
    ElementType::from_name(&name).ok_or(JsonError::Element { name })
}

fn node(object: NodeObject) -> Result<NodeDraft, JsonError> {
    let output = |output: Option<ValueObject>| match output {
        Some(ValueObject { name, element, shape }) => Ok((name, tensor(element, shape)?)),
        None => Ok((String::new(), TensorType::default())),
    };
    let attribute =
        |object: AttributeObject| Ok(Attribute { name: object.name, value: attribute_value(object.value)? });
    Ok(NodeDraft {
        name: object.name,
        operator: object.operator,
        domain: object.domain,
        inputs: object.inputs.into_iter().map(Option::unwrap_or_default).collect(),
        captured: object.captures,
        outputs: object.outputs.into_iter().map(output).collect::<Result<_, JsonError>>()?,
        attributes: object.attributes.into_iter().map(attribute).collect::<Result<_, JsonError>>()?,
        stage: object.stage,
    })
}

fn attribute_value(object: AttributeValueObject) -> Result<AttributeValue, JsonError> {
    let float = |object| match object {
        FloatObject::Finite(float) => Ok(float),
        FloatObject::Other(text) => text
            .parse()
            .map_err(|_| JsonError::Form(serde::de::Error::custom(format!("'{text}' is no number")))),
    };
    Ok(match object {
        AttributeValueObject::Int(int) => AttributeValue::Int(int),
        AttributeValueObject::Float(object) => AttributeValue::Float(float(object)?),
        AttributeValueObject::Text(text) => AttributeValue::Text(text),
        AttributeValueObject::Ints(ints) => AttributeValue::Ints(ints),
        AttributeValueObject::Floats(floats) => {
            AttributeValue::Floats(floats.into_iter().map(float).collect::<Result<_, JsonError>>()?)
        }
        AttributeValueObject::Texts(texts) => AttributeValue::Texts(texts),
        AttributeValueObject::Tensor(LiteralObject { element, shape, integers }) => {
            AttributeValue::Tensor(Literal { element: named_element(element)?, dims: shape, integers })
        }
    })
}

fn type_objects(tensor: &TensorType) -> (Option<String>, Option<Vec<DimObject>>) {
    let dim = |dim: &Dim| match dim {
        Dim::Fixed(size) => DimObject::Fixed(*size),
        Dim::Symbol(name) => DimObject::Symbol(name.to_string()),
        Dim::Unknown => DimObject::Unknown(()),
    };
    let element = tensor.element.map(|element| element.name().to_owned());
    (element, tensor.shape.as_ref().map(|dims| dims.iter().map(dim).collect()))
}

fn value_object(graph: &Graph, id: ValueId) -> ValueObject {
    let value = graph.value(id);
    let (element, shape) = type_objects(&value.tensor);
    ValueObject { name: value.name.clone(), element, shape }
}

fn node_object(graph: &Graph, node: &crate::graph::Node) -> NodeObject {
    let name = |id: ValueId| graph.value(id).name.clone();
    NodeObject {
        name: node.name.clone(),
        operator: node.operator.clone(),
        domain: node.domain.clone(),
        inputs: node.inputs.iter().map(|input| input.map(name)).collect(),
        captures: node.captured.iter().map(|&id| name(id)).collect(),
        outputs: node.outputs.iter().map(|output| output.map(|id| value_object(graph, id))).collect(),
        attributes: node.attributes.iter().map(attribute_object).collect(),
        stage: node.stage,
    }
}

fn attribute_object(attribute: &Attribute) -> AttributeObject {
    let float = |float: f32| {
        if float.is_finite() { FloatObject::Finite(float) } else { FloatObject::Other(format!("{float:?}")) }
    };
    let value = match &attribute.value {
        AttributeValue::Int(int) => AttributeValueObject::Int(*int),
        AttributeValue::Float(value) => AttributeValueObject::Float(float(*value)),
        AttributeValue::Text(text) => AttributeValueObject::Text(text.clone()),
        AttributeValue::Ints(ints) => AttributeValueObject::Ints(ints.clone()),
        AttributeValue::Floats(floats) => {
            AttributeValueObject::Floats(floats.iter().map(|&value| float(value)).collect())
        }
        AttributeValue::Texts(texts) => AttributeValueObject::Texts(texts.clone()),
        AttributeValue::Tensor(literal) => AttributeValueObject::Tensor(LiteralObject {
            element: literal.element.name().to_owned(),
            shape: literal.dims.clone(),
            integers: literal.integers.clone(),
        }),
    };
    AttributeObject { name: attribute.name.clone(), value }
}

//! The element types of a node's results.

use super::Like;
use crate::element::ElementType;
use crate::graph::{AttributeValue, Node, TensorType};

/// Whose type a result has.
enum Source {
    /// That of an input.
    Input(usize),
    Always(ElementType),
    /// The number of a type in an attribute, or another source.
    Attribute(&'static str, ElementType),
}

/// The types of the results, in order; what is not known is left out.
pub(super) fn of_results(node: &Node, inputs: &[Option<&TensorType>]) -> Vec<Option<ElementType>> {
    if !node.domain.is_empty() {
        return Vec::new();
    }
    let sources = sources(node);
    let of = |source: &Source| match source {
        Source::Input(place) => inputs.get(*place).copied().flatten().and_then(|tensor| tensor.element),
        Source::Always(element) => Some(*element),
        Source::Attribute(name, default) => match node.attribute(name) {
            Some(AttributeValue::Int(number)) => ElementType::from_onnx(i32::try_from(*number).ok()?),
            Some(AttributeValue::Tensor(literal)) => Some(literal.element),
            _ => Some(*default),
        },
    };
    sources.iter().map(of).collect()
}

fn sources(node: &Node) -> Vec<Source> {
    use ElementType::{Bool, F32, I32, I64, U8};
    use Source::{Always, Attribute, Input};
    match node.operator.as_str() {
        "Shape" | "Size" | "ArgMax" | "ArgMin" | "NonZero" | "NonMaxSuppression" => vec![Always(I64)],
        "Equal" | "Greater" | "GreaterOrEqual" | "Less" | "LessOrEqual" | "And" | "Or" | "Xor" | "Not"
        | "IsNaN" | "IsInf" => vec![Always(Bool)],
        "ConstantOfShape" => vec![Attribute("value", F32)],
        "Constant" => vec![constant(node)],
        "RandomNormal" | "RandomUniform" => vec![Attribute("dtype", F32)],
        "Cast" => match node.attribute("to") {
            Some(AttributeValue::Int(_)) => vec![Attribute("to", F32)],
            _ => Vec::new(),
        },
        "CastLike" | "Where" | "OneHot" if node.operator == "OneHot" => vec![Input(2)],
        "CastLike" | "Where" => vec![Input(1)],
        "TopK" => vec![Input(0), Always(I64)],
        "MaxPool" => vec![Input(0), Always(I64)],
        "Unique" => vec![Input(0), Always(I64), Always(I64), Always(I64)],
        "Dropout" => vec![Input(0), Always(Bool)],
        "DequantizeLinear" => vec![Input(1)],
        "DynamicQuantizeLinear" => vec![Always(U8), Always(F32), Always(U8)],
        "MatMulInteger" | "ConvInteger" => vec![Always(I32)],
        "Split" => node.outputs.iter().map(|_| Input(0)).collect(),
        "LSTM" => vec![Input(0), Input(0), Input(0)],
        "GRU" | "RNN" => vec![Input(0), Input(0)],
        operator if matches!(super::like_first_input(operator), Some(Like::Both | Like::Type)) => {
            vec![Input(0)]
        }
        _ => Vec::new(),
    }
}

fn constant(node: &Node) -> Source {
    let kinds = [
        ("value_int", ElementType::I64),
        ("value_ints", ElementType::I64),
        ("value_float", ElementType::F32),
        ("value_floats", ElementType::F32),
        ("value_string", ElementType::Text),
        ("value_strings", ElementType::Text),
    ];
    let kind = kinds.iter().find(|(name, _)| node.attribute(name).is_some());
    kind.map_or(Source::Attribute("value", ElementType::F32), |(_, element)| Source::Always(*element))
}

//! The text form of a graph: printed, read by people, parsed again.
//!
//! ```text
//! pleach-graph 1                                        # form and version
//! graph "tiny"
//! opset 17                                              # of ONNX; others: opset com.example 2
//! input x f32 [batch, 16]                               # a dimension: size, symbol, or ?
//! const w f32 [16, 4]                                   # a weight in the model
//! const s i64 [2] = 4 -1                                # a small constant
//! const v f32 [4] in "weights.bin" at 4096              # a weight in another file
//! node first MatMul(x, w) -> h f32 [batch, 4]           # types may be '? ?'
//! node second com.example:Scale(h, -, v) captures (w) -> y f32 [batch, 4], - { axis = 1, to = f[0.5] } stage 1
//! output y
//! ```
//!
//! Lines stand in this order. `-` is an input or output that is missing. A name with other
//! characters than letters, digits and `_./+-` stands in quotes, as JSON writes strings. Attributes
//! are whole numbers, numbers with a point, texts in quotes, lists (`[1, 2]`, `f[0.5]`, `t["a"]`)
//! and tensors (`i64 [2] = 1 2`). White space is free; what follows a `#` is a comment.
//!
//! **Invariant:** what is printed parses to the same graph. Parsing takes time and memory in
//! proportion to the text.

use std::fmt;
use std::sync::Arc;

use crate::element::ElementType;
use crate::graph::{
    Attribute, AttributeValue, DIMENSIONS_MAX, Dim, Graph, GraphBuilder, GraphError, KEPT_INTEGERS_MAX,
    Literal, NodeDraft, Producer, TensorType, ValueId, WeightSource,
};
use crate::names::{json_string, quoted};
use tokens::Tokens;

mod tokens;

/// Longest text that is parsed, in bytes.
pub const MAX_TEXT_BYTES: usize = 1 << 30;

pub(crate) const FORM: &str = "pleach-graph";
pub(crate) const VERSION: u32 = 1;

/// Where a text is no graph, and why.
#[derive(Clone, pleach_derive::ErrorDebug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TextError {
    /// Something else stands there.
    #[error("line {line}: expected {what}, found {found}")]
    Expected {
        /// The line, from 1.
        line: usize,
        /// What was expected.
        what: &'static str,
        /// What was found, shortened.
        found: String,
    },
    /// The text is longer than this reader takes.
    #[error("the text has more than {MAX_TEXT_BYTES} bytes; use a smaller graph")]
    TooLong,
    /// The lines are no graph.
    #[error(transparent)]
    Graph(#[from] GraphError),
}

impl Graph {
    /// Reads the text form ([`text`](self)).
    ///
    /// # Errors
    ///
    /// [`TextError`] says the line and what was expected there, or why the lines are no graph.
    pub fn from_text(text: &str) -> Result<Self, TextError> {
        if text.len() > MAX_TEXT_BYTES {
            return Err(TextError::TooLong);
        }
        let tokens = &mut Tokens::new(text);
        tokens.keyword(FORM, "'pleach-graph 1'")?;
        tokens.keyword(&VERSION.to_string(), "the version 1 of the form")?;
        tokens.keyword("graph", "'graph' and a name")?;
        let mut builder = GraphBuilder::new(&tokens.name("the name of the graph")?);
        while tokens.skip("opset") {
            let (first, is_quoted) = tokens.name_or_quoted("a version, or a domain and a version")?;
            match first.parse() {
                Ok(version) if !is_quoted => builder.operator_set("", version),
                _ => builder.operator_set(&first, tokens.number("a version")?),
            };
        }
        while tokens.skip("input") {
            let name = tokens.name("the name of an input")?;
            builder.input(&name, tensor(tokens)?);
        }
        while tokens.skip("const") {
            constant(tokens, &mut builder)?;
        }
        while tokens.skip("node") {
            builder.node(node(tokens)?);
        }
        while tokens.skip("output") {
            builder.output(&tokens.name("the name of a value")?);
        }
        tokens.end("'opset', 'input', 'const', 'node' or 'output', in this order")?;
        Ok(builder.build()?)
    }
}

fn tensor(tokens: &mut Tokens<'_>) -> Result<TensorType, TextError> {
    let element = if tokens.skip_symbol('?') { None } else { Some(element(tokens)?) };
    if tokens.skip_symbol('?') {
        return Ok(TensorType { element, shape: None });
    }
    let dim = |tokens: &mut Tokens<'_>| {
        if tokens.skip_symbol('?') {
            return Ok(Dim::Unknown);
        }
        let (name, is_quoted) = tokens.name_or_quoted("a size, a symbol or '?'")?;
        Ok(match name.parse() {
            Ok(size) if !is_quoted => Dim::Fixed(size),
            _ => Dim::Symbol(Arc::from(name)),
        })
    };
    let shape = list(tokens, ['[', ']'], DIMENSIONS_MAX, dim)?;
    Ok(TensorType { element, shape: Some(shape) })
}

fn element(tokens: &mut Tokens<'_>) -> Result<ElementType, TextError> {
    const WHAT: &str = "a type as f32, or '?'";
    let found = tokens.clone();
    let name = tokens.name(WHAT)?;
    ElementType::from_name(&name).ok_or_else(|| found.expected(WHAT))
}

/// A list in brackets, with commas.
fn list<T>(
    tokens: &mut Tokens<'_>,
    [open, close]: [char; 2],
    most: usize,
    item: impl Fn(&mut Tokens<'_>) -> Result<T, TextError>,
) -> Result<Vec<T>, TextError> {
    tokens.symbol(open)?;
    let mut items = Vec::new();
    if tokens.skip_symbol(close) {
        return Ok(items);
    }
    loop {
        if items.len() >= most {
            return Err(GraphError::TooMany { what: "items of a list", most }.into());
        }
        items.push(item(tokens)?);
        if !tokens.skip_symbol(',') {
            tokens.symbol(close)?;
            return Ok(items);
        }
    }
}

fn constant(tokens: &mut Tokens<'_>, builder: &mut GraphBuilder) -> Result<(), TextError> {
    let name = tokens.name("the name of a weight")?;
    let tensor = tensor(tokens)?;
    let integers = integers(tokens)?;
    let source = if tokens.skip("in") {
        let path = tokens.name("the name of a file")?;
        tokens.keyword("at", "'at' and the first byte")?;
        WeightSource::File { path, offset: tokens.number("the first byte")? }
    } else {
        WeightSource::Model
    };
    builder.weight(&name, tensor, source, integers);
    Ok(())
}

/// `= 1 2 3`, or nothing.
fn integers(tokens: &mut Tokens<'_>) -> Result<Option<Vec<i64>>, TextError> {
    if !tokens.skip_symbol('=') {
        return Ok(None);
    }
    let mut integers = Vec::new();
    while let Some(integer) = tokens.next_if_number() {
        if integers.len() >= KEPT_INTEGERS_MAX {
            return Err(
                GraphError::TooMany { what: "integers of a constant", most: KEPT_INTEGERS_MAX }.into()
            );
        }
        integers.push(integer);
    }
    Ok(Some(integers))
}

fn node(tokens: &mut Tokens<'_>) -> Result<NodeDraft, TextError> {
    let name = tokens.name("the name of a node")?;
    let mut operator = tokens.name("an operator")?;
    let mut domain = String::new();
    if tokens.skip_symbol(':') {
        domain = std::mem::replace(&mut operator, tokens.name("an operator")?);
    }
    let optional = |tokens: &mut Tokens<'_>| {
        Ok(if tokens.skip("-") { String::new() } else { tokens.name("the name of a value, or '-'")? })
    };
    let inputs = list(tokens, ['(', ')'], usize::MAX, optional)?;
    let captured = if tokens.skip("captures") {
        list(tokens, ['(', ')'], usize::MAX, |tokens| tokens.name("the name of a value"))?
    } else {
        Vec::new()
    };
    let mut outputs = Vec::new();
    if tokens.skip("->") {
        loop {
            let name = optional(tokens)?;
            let tensor = if name.is_empty() { TensorType::default() } else { tensor(tokens)? };
            outputs.push((name, tensor));
            if !tokens.skip_symbol(',') {
                break;
            }
        }
    }
    let attributes =
        if tokens.at_symbol('{') { list(tokens, ['{', '}'], usize::MAX, attribute)? } else { Vec::new() };
    let stage = if tokens.skip("stage") { Some(tokens.number("the number of a stage")?) } else { None };
    Ok(NodeDraft { name, operator, domain, inputs, captured, outputs, attributes, stage })
}

fn attribute(tokens: &mut Tokens<'_>) -> Result<Attribute, TextError> {
    const WHAT: &str = "a number, a text in quotes, a list or a tensor";
    let name = tokens.name("the name of an attribute")?;
    tokens.symbol('=')?;
    if tokens.at_symbol('[') {
        let ints = list(tokens, ['[', ']'], usize::MAX, |tokens| tokens.number("a whole number"))?;
        return Ok(Attribute { name, value: AttributeValue::Ints(ints) });
    }
    let found = tokens.clone();
    let (word, is_quoted) = tokens.name_or_quoted(WHAT)?;
    let value = if is_quoted {
        AttributeValue::Text(word)
    } else if word == "f" {
        AttributeValue::Floats(list(tokens, ['[', ']'], usize::MAX, |tokens| tokens.number("a number"))?)
    } else if word == "t" {
        AttributeValue::Texts(list(tokens, ['[', ']'], usize::MAX, |tokens| tokens.name("a text"))?)
    } else if let Some(element) = ElementType::from_name(&word) {
        let dims = list(tokens, ['[', ']'], DIMENSIONS_MAX, |tokens| tokens.number("a size"))?;
        AttributeValue::Tensor(Literal { element, dims, integers: integers(tokens)? })
    } else if let Ok(number) = word.parse() {
        AttributeValue::Int(number)
    } else if let Ok(number) = word.parse() {
        AttributeValue::Float(number)
    } else {
        return Err(found.expected(WHAT));
    };
    Ok(Attribute { name, value })
}

/// Prints the text form.
impl fmt::Display for Graph {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(formatter, "{FORM} {VERSION}\ngraph {}", quoted(self.name()))?;
        for set in self.operator_sets() {
            match set.domain.as_str() {
                "" => writeln!(formatter, "opset {}", set.version)?,
                // A domain that reads as a number stands in quotes, as every name that does.
                domain => writeln!(formatter, "opset {} {}", quoted(domain), set.version)?,
            }
        }
        for value in self.values() {
            match &value.producer {
                Producer::Input => writeln!(formatter, "input {} {}", quoted(&value.name), value.tensor)?,
                Producer::Weight { source, integers } => {
                    write!(formatter, "const {} {}", quoted(&value.name), value.tensor)?;
                    write_integers(formatter, integers.as_deref())?;
                    if let WeightSource::File { path, offset } = source {
                        write!(formatter, " in {} at {offset}", quoted(path))?;
                    }
                    writeln!(formatter)?;
                }
                Producer::Node(_) => {}
            }
        }
        for node in self.nodes() {
            write_node(formatter, self, node)?;
        }
        for &output in self.outputs() {
            writeln!(formatter, "output {}", quoted(&self.value(output).name))?;
        }
        Ok(())
    }
}

fn write_node(formatter: &mut fmt::Formatter<'_>, graph: &Graph, node: &crate::graph::Node) -> fmt::Result {
    let name = |id: ValueId| quoted(&graph.value(id).name);
    let inputs: Vec<String> =
        node.inputs.iter().map(|input| input.map_or_else(|| "-".to_owned(), name)).collect();
    write!(formatter, "node {} ", quoted(&node.name))?;
    if !node.domain.is_empty() {
        write!(formatter, "{}:", quoted(&node.domain))?;
    }
    write!(formatter, "{}({})", quoted(&node.operator), inputs.join(", "))?;
    if !node.captured.is_empty() {
        let captured: Vec<String> = node.captured.iter().map(|&id| name(id)).collect();
        write!(formatter, " captures ({})", captured.join(", "))?;
    }
    for (place, output) in node.outputs.iter().enumerate() {
        formatter.write_str(if place == 0 { " -> " } else { ", " })?;
        match output {
            Some(id) => write!(formatter, "{} {}", name(*id), graph.value(*id).tensor)?,
            None => formatter.write_str("-")?,
        }
    }
    for (place, attribute) in node.attributes.iter().enumerate() {
        formatter.write_str(if place == 0 { " { " } else { ", " })?;
        write!(formatter, "{} = ", quoted(&attribute.name))?;
        write_attribute(formatter, &attribute.value)?;
    }
    if !node.attributes.is_empty() {
        formatter.write_str(" }")?;
    }
    if let Some(stage) = node.stage {
        write!(formatter, " stage {stage}")?;
    }
    writeln!(formatter)
}

fn write_attribute(formatter: &mut fmt::Formatter<'_>, value: &AttributeValue) -> fmt::Result {
    match value {
        AttributeValue::Int(int) => write!(formatter, "{int}"),
        // With a point, an exponent or letters, so that it is no whole number.
        AttributeValue::Float(float) => write!(formatter, "{float:?}"),
        AttributeValue::Text(text) => formatter.write_str(&json_string(text)),
        AttributeValue::Ints(ints) => write!(formatter, "{ints:?}"),
        AttributeValue::Floats(floats) => write!(formatter, "f{floats:?}"),
        AttributeValue::Texts(texts) => {
            let texts: Vec<String> = texts.iter().map(|text| json_string(text)).collect();
            write!(formatter, "t[{}]", texts.join(", "))
        }
        AttributeValue::Tensor(Literal { element, dims, integers }) => {
            write!(formatter, "{element} {dims:?}")?;
            write_integers(formatter, integers.as_deref())
        }
    }
}

fn write_integers(formatter: &mut fmt::Formatter<'_>, integers: Option<&[i64]>) -> fmt::Result {
    let Some(integers) = integers else { return Ok(()) };
    formatter.write_str(" =")?;
    integers.iter().try_for_each(|integer| write!(formatter, " {integer}"))
}

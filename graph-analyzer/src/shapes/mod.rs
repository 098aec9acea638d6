//! Shapes and types of all values, from those of the inputs.
//!
//! [`Graph::with_dims`] binds symbols to sizes and infers the rest, node by node. What the file
//! says of a value and what its operator says are put together: of each dimension a fixed size is
//! best, then a symbol. Operators follow `rten-shape-inference`; [`rules`] names the rule of each
//! operator with its attributes, [`elements`] the type of its results.
//!
//! **Invariant:** an operator without a rule, and one whose sizes are too large for exact
//! arithmetic, makes its outputs unknown: never wrong. Sizes that contradict are an error.

use std::sync::Arc;

use rten_shape_inference::{InferShapesError, SymExpr, SymTensor, SymbolGen};

use crate::graph::{Dim, Graph, Node, NodeId, Producer, TensorType, Value};

mod elements;
mod rules;

/// Deepest expression of a dimension that is followed on; a deeper one becomes unknown.
const EXPRESSION_DEPTH_MAX: u32 = 8;

/// Largest number inside of an expression: products of two stay exact.
const COEFFICIENT_MAX: i32 = 1 << 15;

/// Longest vector of values that is followed.
const VECTOR_MAX: usize = crate::graph::KEPT_INTEGERS_MAX;

/// Why shapes cannot be.
#[derive(Clone, pleach_derive::ErrorDebug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ShapeError {
    /// No dimension has this symbol.
    #[error("no dimension is called '{name}'; {known}")]
    NoSuchSymbol {
        /// The name.
        name: String,
        /// The symbols that there are, in words.
        known: String,
    },
    /// The file says something else than the operator.
    #[error(
        "'{value}' is {declared} in the file, and {inferred} by its node '{node}'; correct the dimensions"
    )]
    Contradiction {
        /// The value.
        value: String,
        /// The type that the file declares.
        declared: String,
        /// The type that the operator computes.
        inferred: String,
        /// The node.
        node: String,
    },
    /// The inputs of a node do not fit together.
    #[error("the inputs of node '{node}' ({operator}) do not fit together: {inputs}; correct the dimensions")]
    Incompatible {
        /// The node.
        node: String,
        /// Its operator.
        operator: String,
        /// The types of its inputs.
        inputs: String,
    },
}

impl Graph {
    /// The same graph with symbols bound to sizes, and with the types of all values inferred.
    ///
    /// # Errors
    ///
    /// [`ShapeError`]: a symbol that no dimension has, or dimensions that contradict.
    pub fn with_dims(&self, sizes: &[(&str, u64)]) -> Result<Self, ShapeError> {
        let symbols = self.symbols();
        for (name, _) in sizes {
            if !symbols.iter().any(|symbol| **symbol == **name) {
                let known = match symbols.as_slice() {
                    [] => "all dimensions of the file are fixed or unknown".to_owned(),
                    symbols => format!("there are {}", symbols.join(", ")),
                };
                return Err(ShapeError::NoSuchSymbol { name: (*name).to_owned(), known });
            }
        }
        let declared = self.values().iter().map(|value| bound(&value.tensor, sizes)).collect();
        let mut inference = Inference {
            graph: self,
            tensors: declared,
            known: vec![None; self.values().len()],
            symbols: SymbolGen::new(),
        };
        inference.start();
        for number in 0..self.nodes().len() as u32 {
            inference.visit(NodeId(number))?;
        }
        Ok(self.with_tensors(inference.tensors))
    }
}

/// A type with symbols replaced by sizes.
fn bound(tensor: &TensorType, sizes: &[(&str, u64)]) -> TensorType {
    let size_of = |name: &str| sizes.iter().rev().find(|(known, _)| *known == name).map(|(_, size)| *size);
    let dim = |dim: &Dim| match dim {
        Dim::Symbol(name) => size_of(name).map_or_else(|| dim.clone(), Dim::Fixed),
        other => other.clone(),
    };
    TensorType {
        element: tensor.element,
        shape: tensor.shape.as_ref().map(|dims| dims.iter().map(dim).collect()),
    }
}

/// The types so far.
struct Inference<'a> {
    graph: &'a Graph,
    tensors: Vec<TensorType>,
    /// What is known of values for the rules: shapes, or values of shapes.
    known: Vec<Option<SymTensor>>,
    symbols: SymbolGen,
}

impl Inference<'_> {
    /// Inputs and weights.
    fn start(&mut self) {
        for (number, value) in self.graph.values().iter().enumerate() {
            let integers = match &value.producer {
                Producer::Node(_) => continue,
                Producer::Input => None,
                Producer::Weight { integers, .. } => integers.as_deref(),
            };
            self.known[number] = rules::constant(integers, &self.tensors[number]);
            if self.known[number].is_none() {
                self.known[number] = Some(self.symbolic(&self.tensors[number].clone()));
            }
        }
    }

    fn visit(&mut self, id: NodeId) -> Result<(), ShapeError> {
        let node = self.graph.node(id);
        let inputs: Vec<Option<SymTensor>> = node
            .inputs
            .iter()
            .map(|input| input.and_then(|input| self.known[input.index()].clone()))
            .collect();
        let input_types: Vec<Option<&TensorType>> =
            node.inputs.iter().map(|input| input.map(|input| &self.tensors[input.index()])).collect();
        let elements = elements::of_results(node, &input_types);
        let inferred = match rules::infer(node, self.graph.opset(), inputs, &mut self.symbols) {
            Some(Ok(results)) => results,
            Some(Err(InferShapesError::IncompatibleShapes)) => {
                let types = input_types.iter().flatten().map(ToString::to_string).collect::<Vec<_>>();
                return Err(ShapeError::Incompatible {
                    node: node.name.clone(),
                    operator: node.operator.clone(),
                    inputs: types.join(", "),
                });
            }
            Some(Err(_)) | None => Vec::new(),
        };
        for (place, output) in node.outputs.iter().enumerate() {
            let Some(output) = output else { continue };
            let result = inferred.get(place).map(|result| self.simplified(result));
            let element = elements.get(place).copied().flatten();
            let own = TensorType { element, shape: result.as_ref().and_then(dims) };
            let declared = &self.tensors[output.index()];
            let merged = merged(declared, &own)
                .ok_or_else(|| contradiction(node, self.graph.value(*output), declared, &own))?;
            // A shape that the file knows better is followed; values of a shape go with the rule.
            let is_better = own.shape != merged.shape;
            self.known[output.index()] = match result {
                Some(result) if !is_better => Some(result),
                Some(result) if result.values().is_some() => Some(result),
                _ => Some(self.symbolic(&merged)),
            };
            self.tensors[output.index()] = merged;
        }
        Ok(())
    }

    /// The expressions of a type. A dimension of which nothing is known is a symbol of its own.
    fn symbolic(&mut self, tensor: &TensorType) -> SymTensor {
        let Some(dims) = &tensor.shape else { return SymTensor::unknown("nothing is known") };
        let expression = |dim: &Dim| match dim {
            Dim::Fixed(size) => {
                i32::try_from(*size).map_or_else(|_| self.symbols.gen_positive(), SymExpr::Value)
            }
            Dim::Symbol(name) => SymExpr::pos_var(name),
            Dim::Unknown => self.symbols.gen_positive(),
        };
        SymTensor::from_shape(dims.iter().map(expression).collect())
    }

    /// A result in its simplest form, in which arithmetic stays exact.
    fn simplified(&mut self, result: &SymTensor) -> SymTensor {
        let simple = |expression: &SymExpr| {
            let simple = expression.simplify();
            let is_large = |part: &SymExpr| matches!(part, SymExpr::Value(number) if number.unsigned_abs() > COEFFICIENT_MAX as u32);
            let is_composite = !matches!(simple, SymExpr::Value(_) | SymExpr::Var(_));
            let is_negative = matches!(simple, SymExpr::Value(size) if size < 0);
            let is_beyond =
                is_composite && (simple.exceeds_depth(EXPRESSION_DEPTH_MAX) || simple.iter().any(is_large));
            (simple, is_beyond, is_negative)
        };
        if let Some(values) = result.values() {
            if values.len() > VECTOR_MAX {
                let length = SymExpr::Value(i32::try_from(values.len()).unwrap_or(i32::MAX));
                return SymTensor::from_shape(vec![length]);
            }
            let of = |expression: &SymExpr| {
                let (simple, is_beyond, _) = simple(expression);
                if is_beyond { self.symbols.generate() } else { simple }
            };
            let values: Vec<SymExpr> = values.iter().map(of).collect();
            return match (result.as_scalar(), values.as_slice()) {
                (Some(_), [only]) => SymTensor::from_scalar(only.clone()),
                _ => SymTensor::from_vec(values),
            };
        }
        let Some(shape) = result.shape() else { return SymTensor::unknown("nothing is known") };
        let of = |expression: SymExpr| {
            let (simple, is_beyond, is_negative) = simple(&expression);
            if is_beyond || is_negative { self.symbols.gen_positive() } else { simple }
        };
        SymTensor::from_shape(shape.map(of).collect())
    }
}

/// The dimensions of a result. An expression of several symbols is unknown.
fn dims(result: &SymTensor) -> Option<Vec<Dim>> {
    let dim = |expression: SymExpr| match expression {
        SymExpr::Value(size) => u64::try_from(size).map_or(Dim::Unknown, Dim::Fixed),
        SymExpr::Var(symbol) if !symbol.synthetic => Dim::Symbol(Arc::from(symbol.name.as_str())),
        _ => Dim::Unknown,
    };
    Some(result.shape()?.map(dim).collect())
}

/// The best of two types of one value; nothing if they contradict.
fn merged(declared: &TensorType, inferred: &TensorType) -> Option<TensorType> {
    let element = match (declared.element, inferred.element) {
        (Some(one), Some(other)) if one != other => return None,
        (one, other) => one.or(other),
    };
    let shape = match (&declared.shape, &inferred.shape) {
        (Some(one), Some(other)) => {
            if one.len() != other.len() {
                return None;
            }
            let dim = |(one, other): (&Dim, &Dim)| match (one, other) {
                (Dim::Fixed(one), Dim::Fixed(other)) => (one == other).then_some(Dim::Fixed(*one)),
                (fixed @ Dim::Fixed(_), _) | (_, fixed @ Dim::Fixed(_)) => Some(fixed.clone()),
                (Dim::Unknown, other) => Some(other.clone()),
                // Of two symbols the inferred one is that of the inputs.
                (one, Dim::Unknown) => Some(one.clone()),
                (_, other) => Some(other.clone()),
            };
            Some(one.iter().zip(other).map(dim).collect::<Option<Vec<Dim>>>()?)
        }
        (one, other) => one.clone().or_else(|| other.clone()),
    };
    Some(TensorType { element, shape })
}

fn contradiction(node: &Node, value: &Value, declared: &TensorType, inferred: &TensorType) -> ShapeError {
    ShapeError::Contradiction {
        value: value.name.clone(),
        declared: declared.to_string(),
        inferred: inferred.to_string(),
        node: node.name.clone(),
    }
}

//! Shapes and types of all values, from those of the inputs.
//!
//! [`Graph::with_dims`] binds symbols to sizes and infers the rest, node by node. What the file
//! says of a value and what its operator says are put together: of each dimension a fixed size is
//! best, then a symbol. Operators follow `rten-shape-inference`; [`rules`] names the rule of each
//! operator with its attributes, [`elements`] the type of its results.
//!
//! **Invariant:** an operator without a rule, and one whose sizes are too large for exact
//! arithmetic, makes its outputs unknown: never wrong. Sizes that contradict are an error.

use std::collections::HashMap;
use std::sync::Arc;

use rten_shape_inference::{InferShapesError, SymExpr, SymTensor, SymbolGen};

use crate::graph::{DIMENSIONS_MAX, Dim, Graph, Node, NodeId, Producer, TensorType, Value};

mod elements;
mod rules;

/// Deepest expression of a dimension that is followed on; a deeper one becomes unknown.
const EXPRESSION_DEPTH_MAX: u32 = 8;

/// Largest number inside of an expression: products of two stay exact.
const COEFFICIENT_MAX: i32 = 1 << 15;

/// Longest vector of values that is followed.
const VECTOR_MAX: usize = crate::graph::KEPT_INTEGERS_MAX;

/// Most inputs of a node whose shapes are followed; the results of a node with more are unknown.
const INPUTS_MAX: usize = 1024;

/// Most dimensions and values that are followed, over all inputs and results of all nodes. This
/// bounds the memory and the time of an inference; what comes later is unknown.
const FOLLOWED_MAX: usize = 1 << 24;

/// Most inputs of a node that an error names.
const INPUTS_SHOWN: usize = 16;

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
        let named = symbols.into_iter().map(|name| (Arc::clone(&name), SymExpr::pos_var(&name)));
        let mut inference = Inference {
            graph: self,
            tensors: declared,
            known: vec![None; self.values().len()],
            named: named.collect(),
            symbols: SymbolGen::new(),
            followed: 0,
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
    /// The symbols of the file, each made once: a name may be long, and dimensions are many.
    named: HashMap<Arc<str>, SymExpr>,
    symbols: SymbolGen,
    /// Dimensions and values so far, against [`FOLLOWED_MAX`].
    followed: usize,
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
            let known = rules::constant(integers, &self.tensors[number]);
            let known = known.unwrap_or_else(|| self.symbolic(&self.tensors[number].clone()));
            self.known[number] = Some(self.followed(known));
        }
    }

    fn visit(&mut self, id: NodeId) -> Result<(), ShapeError> {
        let node = self.graph.node(id);
        let inferred = self.results(node)?;
        let input_types: Vec<Option<&TensorType>> =
            node.inputs.iter().map(|input| input.map(|input| &self.tensors[input.index()])).collect();
        let elements = elements::of_results(node, &input_types);
        for (place, output) in node.outputs.iter().enumerate() {
            let Some(output) = output else { continue };
            let result = inferred.get(place).map(|result| {
                let simplified = self.simplified(result);
                self.followed(simplified)
            });
            let element = elements.get(place).copied().flatten();
            let own = TensorType { element, shape: result.as_ref().and_then(|result| self.dims(result)) };
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

    /// What the rule of a node says of its results.
    fn results(&mut self, node: &Node) -> Result<Vec<SymTensor>, ShapeError> {
        if node.inputs.len() > INPUTS_MAX {
            return Ok(Vec::new());
        }
        let mut inputs = Vec::with_capacity(node.inputs.len());
        for input in &node.inputs {
            let known = input.and_then(|input| self.known[input.index()].clone());
            inputs.push(known.map(|known| self.followed(known)));
        }
        match rules::infer(node, self.graph.opset(), inputs, &mut self.symbols) {
            Some(Ok(results)) => Ok(results),
            Some(Err(InferShapesError::IncompatibleShapes)) => {
                let types = node.inputs.iter().flatten().map(|input| &self.tensors[input.index()]);
                let count = types.clone().count();
                let shown: Vec<String> = types.take(INPUTS_SHOWN).map(ToString::to_string).collect();
                let mut inputs = shown.join(", ");
                if count > INPUTS_SHOWN {
                    inputs += &format!(", and {} more", count - INPUTS_SHOWN);
                }
                let (node, operator) = (node.name.clone(), node.operator.clone());
                Err(ShapeError::Incompatible { node, operator, inputs })
            }
            Some(Err(_)) | None => Ok(Vec::new()),
        }
    }

    /// The same while not too much was followed, and nothing afterwards.
    fn followed(&mut self, tensor: SymTensor) -> SymTensor {
        let count = tensor.values().map(<[SymExpr]>::len).or(tensor.ndim()).unwrap_or(0);
        self.followed = self.followed.saturating_add(count);
        if self.followed > FOLLOWED_MAX { SymTensor::unknown("too much is known") } else { tensor }
    }

    /// The dimensions of a result. An expression of several symbols is unknown.
    fn dims(&self, result: &SymTensor) -> Option<Vec<Dim>> {
        let dim = |expression: SymExpr| match expression {
            SymExpr::Value(size) => u64::try_from(size).map_or(Dim::Unknown, Dim::Fixed),
            SymExpr::Var(symbol) => {
                let named = self.named.get_key_value(symbol.name.as_str());
                named
                    .filter(|_| !symbol.synthetic)
                    .map_or(Dim::Unknown, |(name, _)| Dim::Symbol(Arc::clone(name)))
            }
            _ => Dim::Unknown,
        };
        Some(result.shape()?.map(dim).collect())
    }

    /// The expressions of a type. A dimension of which nothing is known is a symbol of its own.
    fn symbolic(&mut self, tensor: &TensorType) -> SymTensor {
        let Some(dims) = &tensor.shape else { return SymTensor::unknown("nothing is known") };
        let expression = |dim: &Dim| match dim {
            Dim::Fixed(size) => {
                i32::try_from(*size).map_or_else(|_| self.symbols.gen_positive(), SymExpr::Value)
            }
            Dim::Symbol(name) => match self.named.get(name) {
                Some(known) => known.clone(),
                None => self.symbols.gen_positive(),
            },
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
        let shape = result.shape().filter(|shape| shape.len() <= DIMENSIONS_MAX);
        let Some(shape) = shape else { return SymTensor::unknown("nothing is known") };
        let of = |expression: SymExpr| {
            let (simple, is_beyond, is_negative) = simple(&expression);
            if is_beyond || is_negative { self.symbols.gen_positive() } else { simple }
        };
        SymTensor::from_shape(shape.map(of).collect())
    }
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

/// What the first result of an operator has in common with its first input.
#[derive(Clone, Copy)]
enum Like {
    Both,
    /// The shape alone; the type is another one, or follows from an attribute.
    Shape,
    /// The type alone.
    Type,
}

fn like_first_input(operator: &str) -> Option<Like> {
    LIKE_FIRST_INPUT.iter().find(|(name, _)| *name == operator).map(|(_, like)| *like)
}

/// Operators by name. Those with the shape of the first input have one result.
const LIKE_FIRST_INPUT: &[(&str, Like)] = &[
    ("Abs", Like::Both),
    ("Acos", Like::Both),
    ("Acosh", Like::Both),
    ("Add", Like::Type),
    ("Asin", Like::Both),
    ("Asinh", Like::Both),
    ("Atan", Like::Both),
    ("Atanh", Like::Both),
    ("AveragePool", Like::Type),
    ("BatchNormalization", Like::Both),
    ("Bernoulli", Like::Shape),
    ("BitShift", Like::Type),
    ("BitwiseAnd", Like::Type),
    ("BitwiseNot", Like::Both),
    ("BitwiseOr", Like::Type),
    ("BitwiseXor", Like::Type),
    ("Ceil", Like::Both),
    ("Celu", Like::Both),
    ("Clip", Like::Both),
    ("Compress", Like::Type),
    ("Concat", Like::Type),
    ("Conv", Like::Type),
    ("ConvTranspose", Like::Type),
    ("Cos", Like::Both),
    ("Cosh", Like::Both),
    ("CumSum", Like::Both),
    ("DepthToSpace", Like::Type),
    ("DequantizeLinear", Like::Shape),
    ("Div", Like::Type),
    ("Einsum", Like::Type),
    ("Elu", Like::Both),
    ("Erf", Like::Both),
    ("Exp", Like::Both),
    ("Expand", Like::Type),
    ("EyeLike", Like::Shape),
    ("Flatten", Like::Type),
    ("Floor", Like::Both),
    ("Gather", Like::Type),
    ("GatherElements", Like::Type),
    ("GatherND", Like::Type),
    ("Gelu", Like::Both),
    ("Gemm", Like::Type),
    ("GlobalAveragePool", Like::Type),
    ("GlobalLpPool", Like::Type),
    ("GlobalMaxPool", Like::Type),
    ("GridSample", Like::Type),
    ("GroupNormalization", Like::Both),
    ("HardSigmoid", Like::Both),
    ("HardSwish", Like::Both),
    ("Hardmax", Like::Both),
    ("Identity", Like::Type),
    ("InstanceNormalization", Like::Both),
    ("IsInf", Like::Shape),
    ("IsNaN", Like::Shape),
    ("LRN", Like::Both),
    ("LayerNormalization", Like::Both),
    ("LeakyRelu", Like::Both),
    ("Log", Like::Both),
    ("LogSoftmax", Like::Both),
    ("LpNormalization", Like::Both),
    ("LpPool", Like::Type),
    ("MatMul", Like::Type),
    ("Max", Like::Type),
    ("Mean", Like::Type),
    ("MeanVarianceNormalization", Like::Both),
    ("Min", Like::Type),
    ("Mish", Like::Both),
    ("Mod", Like::Type),
    ("Mul", Like::Type),
    ("Neg", Like::Type),
    ("Not", Like::Shape),
    ("PRelu", Like::Both),
    ("Pad", Like::Type),
    ("Pow", Like::Type),
    ("QuantizeLinear", Like::Shape),
    ("RMSNormalization", Like::Both),
    ("RandomNormalLike", Like::Shape),
    ("RandomUniformLike", Like::Shape),
    ("Range", Like::Type),
    ("Reciprocal", Like::Both),
    ("ReduceL1", Like::Type),
    ("ReduceL2", Like::Type),
    ("ReduceLogSum", Like::Type),
    ("ReduceLogSumExp", Like::Type),
    ("ReduceMax", Like::Type),
    ("ReduceMean", Like::Type),
    ("ReduceMin", Like::Type),
    ("ReduceProd", Like::Type),
    ("ReduceSum", Like::Type),
    ("ReduceSumSquare", Like::Type),
    ("Relu", Like::Both),
    ("Reshape", Like::Type),
    ("Resize", Like::Type),
    ("ReverseSequence", Like::Both),
    ("Round", Like::Both),
    ("Scatter", Like::Both),
    ("ScatterElements", Like::Both),
    ("ScatterND", Like::Both),
    ("Selu", Like::Both),
    ("Shrink", Like::Both),
    ("Sigmoid", Like::Both),
    ("Sign", Like::Both),
    ("Sin", Like::Both),
    ("Sinh", Like::Both),
    ("Slice", Like::Type),
    ("Softmax", Like::Both),
    ("Softplus", Like::Both),
    ("Softsign", Like::Both),
    ("SpaceToDepth", Like::Type),
    ("Sqrt", Like::Both),
    ("Squeeze", Like::Type),
    ("Sub", Like::Type),
    ("Sum", Like::Type),
    ("Swish", Like::Both),
    ("Tan", Like::Both),
    ("Tanh", Like::Both),
    ("ThresholdedRelu", Like::Both),
    ("Tile", Like::Type),
    ("Transpose", Like::Type),
    ("Trilu", Like::Both),
    ("Unsqueeze", Like::Type),
    ("Upsample", Like::Type),
];

//! The rule of each operator: attributes of the node, and the function of `rten-shape-inference`
//! that they parametrize.
//!
//! That crate computes with 32-bit numbers. Inputs whose sizes could leave them are not given to it
//! ([`are_exact`]), nor are attributes that no valid model has.

use rten_shape_inference::{
    BinaryOp, InferShapes, InferShapesContext, InferShapesError, ReductionOp, SymExpr, SymTensor, SymbolGen,
    UnaryOp, VariadicOp, ops,
};

use super::Like;
use crate::graph::{AttributeValue, DIMENSIONS_MAX, Literal, Node, TensorType};

/// Largest attribute and value in arithmetic: products of two stay exact.
const NUMBER_MAX: i64 = 1 << 15;

/// Largest size that a shape can name: the number above stands for all that are larger.
const SIZE_MAX: i32 = i32::MAX - 1;

/// Most inputs of an `Einsum`. Each element of its result's shape visits all of them.
const EINSUM_INPUTS_MAX: usize = 16;

/// Longest equation of an `Einsum`, in bytes.
const EQUATION_BYTES_MAX: usize = 4096;

/// First version of ONNX's operators in which binary operators broadcast as they do today.
const BROADCAST_SINCE: u32 = 7;

type Results = Result<Vec<SymTensor>, InferShapesError>;

/// The shapes of a node's results; nothing if there is no rule.
pub(super) fn infer(
    node: &Node,
    opset: Option<u32>,
    inputs: Vec<Option<SymTensor>>,
    symbols: &mut SymbolGen,
) -> Option<Results> {
    // A graph without a version is one of today.
    let opset = opset.unwrap_or(u32::MAX);
    if !node.domain.is_empty() || !are_exact(&inputs) || opset < BROADCAST_SINCE {
        return None;
    }
    let rule = Rule { node, opset, inputs, symbols };
    rule.elementwise_rule().unwrap_or_else(Rule::other_rule)
}

/// What is known of a constant with these integers.
pub(super) fn constant(integers: Option<&[i64]>, tensor: &TensorType) -> Option<SymTensor> {
    let integers = integers?;
    let rank = tensor.shape.as_ref()?.len();
    let value = |&integer: &i64| SymExpr::Value(clamped(integer));
    match (rank, integers) {
        (0, [only]) => Some(SymTensor::from_scalar(value(only))),
        (1, all) => Some(SymTensor::from_vec(all.iter().map(value).collect())),
        _ => None,
    }
}

/// Ends of slices are often the largest number that there is. The smallest one has no negative, so
/// the number beside it is the lower end.
fn clamped(integer: i64) -> i32 {
    integer.clamp(-i64::from(i32::MAX), i64::from(i32::MAX)) as i32
}

/// Whether all products of sizes stay within 32 bits.
fn are_exact(inputs: &[Option<SymTensor>]) -> bool {
    inputs.iter().flatten().all(|input| {
        if input.values().is_some() {
            return true;
        }
        let Some(mut shape) = input.shape() else { return true };
        let product = shape.try_fold(1_i32, |product, dim| {
            let largest = dim
                .iter()
                .filter_map(|part| if let SymExpr::Value(size) = part { Some(*size) } else { None });
            product
                .checked_mul(largest.fold(1, |most, size| most.max(size.checked_abs().unwrap_or(i32::MAX))))
        });
        product.is_some()
    })
}

/// A node with what is known of its inputs.
struct Rule<'a> {
    node: &'a Node,
    opset: u32,
    inputs: Vec<Option<SymTensor>>,
    symbols: &'a mut SymbolGen,
}

impl Rule<'_> {
    fn apply(self, rule: &dyn InferShapes) -> Option<Results> {
        Some(rule.infer_shapes(InferShapesContext::new(&self.inputs), self.symbols))
    }

    /// Only these inputs, in this order.
    fn with_inputs(mut self, places: &[usize]) -> Self {
        self.inputs = places.iter().map(|&place| self.inputs.get(place).cloned().flatten()).collect();
        self
    }

    /// The same with a constant vector from an attribute in the place of an input that later
    /// versions have.
    fn with_vector(mut self, place: usize, attribute: &str) -> Self {
        if self.inputs.get(place).is_none_or(Option::is_none)
            && let Some(AttributeValue::Ints(ints)) = self.node.attribute(attribute)
        {
            self.inputs.resize(self.inputs.len().max(place + 1), None);
            let values = ints.iter().map(|&int| SymExpr::Value(clamped(int))).collect();
            self.inputs[place] = Some(SymTensor::from_vec(values));
        }
        self
    }

    fn int(&self, name: &str) -> Option<i64> {
        match self.node.attribute(name) {
            Some(AttributeValue::Int(int)) => Some(*int),
            _ => None,
        }
    }

    fn small(&self, name: &str, default: i64) -> Option<i32> {
        let int = self.int(name).unwrap_or(default);
        (-NUMBER_MAX..=NUMBER_MAX).contains(&int).then_some(int as i32)
    }

    fn is_set(&self, name: &str) -> bool {
        self.int(name).unwrap_or(0) != 0
    }

    fn ints(&self, name: &str) -> Option<&[i64]> {
        match self.node.attribute(name) {
            Some(AttributeValue::Ints(ints)) => Some(ints),
            _ => None,
        }
    }

    /// Small numbers of an attribute, or `count` times the default.
    fn sizes(&self, name: &str, least: i64, default: usize, count: usize) -> Option<Vec<usize>> {
        match self.ints(name) {
            Some(ints) if ints.len() == count => {
                ints.iter().map(|&int| (least..=NUMBER_MAX).contains(&int).then_some(int as usize)).collect()
            }
            Some(_) => None,
            None => Some(vec![default; count]),
        }
    }

    fn rank(&self, input: usize) -> Option<usize> {
        self.inputs.get(input)?.as_ref()?.ndim()
    }

    /// Whether all values in the inputs are small enough for arithmetic.
    fn has_small_values(&self) -> bool {
        let values = self.inputs.iter().flatten().filter_map(SymTensor::values).flatten();
        let mut numbers = values.flat_map(SymExpr::iter);
        numbers.all(|part| !matches!(part, SymExpr::Value(number) if i64::from(*number).abs() > NUMBER_MAX))
    }

    /// Whether the values of an input are known.
    fn has_values(&self, input: usize) -> bool {
        self.inputs.get(input).and_then(Option::as_ref).and_then(SymTensor::values).is_some()
    }

    /// Whether an input can be a shape: few values, which are -1 or sizes up to `most`.
    fn is_shape(&self, input: usize, most: i32) -> bool {
        let Some(shape) = self.inputs.get(input).and_then(Option::as_ref) else { return true };
        let Some(values) = shape.values() else {
            // Results get as many dimensions as this vector is long.
            return !matches!(shape.size(0), Some(SymExpr::Value(length)) if length > DIMENSIONS_MAX as i32);
        };
        let is_size =
            |part: &SymExpr| !matches!(part, SymExpr::Value(number) if !(-1..=most).contains(number));
        values.len() <= DIMENSIONS_MAX && values.iter().flat_map(SymExpr::iter).all(is_size)
    }

    /// Whether every input of which the values are known has one value.
    fn has_single_values(&self) -> bool {
        self.inputs.iter().flatten().filter_map(SymTensor::values).all(|values| values.len() == 1)
    }

    /// Whether some known step of a slice is 0.
    fn has_zero_step(&self) -> bool {
        let steps =
            self.inputs.get(4).and_then(Option::as_ref).and_then(SymTensor::values).unwrap_or_default();
        steps.iter().any(|step| matches!(step, SymExpr::Value(0)))
    }

    /// Whether the axes in an input, if they are known, are different ones of the first input with
    /// so many dimensions more. A rule takes an axis that repeats as often as it comes.
    fn has_distinct_axes(&self, input: usize, added: usize) -> bool {
        let axes = self.inputs.get(input).and_then(Option::as_ref).and_then(SymTensor::values);
        let (Some(axes), Some(rank)) = (axes, self.rank(0)) else { return true };
        let rank = rank + added;
        if axes.len() > rank || rank > DIMENSIONS_MAX {
            return false;
        }
        let mut is_taken = [false; DIMENSIONS_MAX];
        axes.iter().all(|axis| {
            let SymExpr::Value(axis) = axis else { return true };
            let place = if *axis < 0 { i64::from(*axis) + rank as i64 } else { i64::from(*axis) };
            let place = usize::try_from(place).ok().filter(|&place| place < rank);
            place.is_some_and(|place| !std::mem::replace(&mut is_taken[place], true))
        })
    }

    /// Operators that work element by element, and others whose result has the shape of an input.
    fn elementwise_rule(self) -> Result<Option<Results>, Self> {
        Ok(match self.node.operator.as_str() {
            operator if matches!(super::like_first_input(operator), Some(Like::Both | Like::Shape)) => {
                self.with_inputs(&[0]).apply(&UnaryOp)
            }
            "And" | "Or" | "Xor" | "BitwiseAnd" | "BitwiseOr" | "BitwiseXor" | "BitShift" | "Greater"
            | "GreaterOrEqual" | "Less" | "LessOrEqual" | "Mod" | "Pow" => self.apply(&BinaryOp),
            "Max" | "Min" | "Mean" | "Sum" => self.apply(&VariadicOp),
            "Add" | "Sub" | "Mul" | "Div" | "Equal" if !self.has_small_values() => self.apply(&BinaryOp),
            "Add" => self.apply(&ops::Add),
            "Sub" => self.apply(&ops::Sub),
            "Mul" => self.apply(&ops::Mul),
            "Div" => self.apply(&ops::Div),
            "Equal" => self.apply(&ops::Equal),
            "Neg" if self.has_small_values() => self.apply(&ops::Neg),
            "Where" => self.apply(&ops::Where),
            "Identity" => self.with_inputs(&[0]).apply(&ops::Identity),
            // Values of shapes stay what they are in other whole numbers.
            "Cast" if self.int("to").is_some_and(|to| to == 6 || to == 7) => self.apply(&ops::Identity),
            "Cast" | "CastLike" => self.with_inputs(&[0]).apply(&UnaryOp),
            "Dropout" => self.with_inputs(&[0]).apply(&ops::Dropout),
            "DynamicQuantizeLinear" => self.apply(&ops::DynamicQuantizeLinear),
            "Expand" if self.has_values(1) && self.is_shape(1, SIZE_MAX) => self.apply(&ops::Expand),
            _ => return Err(self),
        })
    }

    fn other_rule(self) -> Option<Results> {
        let axis = |rule: &Self, default| rule.small("axis", default);
        match self.node.operator.as_str() {
            "Constant" => self.constant(),
            "ConstantOfShape" if self.is_shape(0, SIZE_MAX) => self.constant_of_shape(),
            "Shape" => {
                let bound = |rule: &Self, name: &str| rule.int(name).map(|_| rule.small(name, 0));
                let (start, end) = (bound(&self, "start"), bound(&self, "end"));
                let rule = ops::Shape {
                    start: start.map_or(Some(None), |start| start.map(Some))?,
                    end: end.map_or(Some(None), |end| end.map(Some))?,
                };
                self.apply(&rule)
            }
            "Size" => self.apply(&ops::Size),
            "Range" if self.has_small_values() && self.has_single_values() => self.apply(&ops::Range),
            "OneHot" if self.has_small_values() => {
                let rule = ops::OneHot { axis: axis(&self, -1)? };
                self.apply(&rule)
            }
            "Concat" => {
                let rule = ops::Concat { axis: axis(&self, 1)? };
                self.apply(&rule)
            }
            "Tile" if self.has_small_values() => self.apply(&ops::Tile),
            "Gather" => {
                let rule = ops::Gather { axis: axis(&self, 0)? };
                self.apply(&rule)
            }
            "GatherElements" => self.apply(&ops::GatherElements),
            "GatherND" => {
                let rule = ops::GatherND { batch_dims: usize::try_from(self.small("batch_dims", 0)?).ok()? };
                self.apply(&rule)
            }
            "Split" => self.split(),
            "Slice" => self.slice(),
            "Einsum" => match self.node.attribute("equation") {
                Some(AttributeValue::Text(equation))
                    if self.inputs.len() <= EINSUM_INPUTS_MAX && equation.len() <= EQUATION_BYTES_MAX =>
                {
                    let equation = equation.clone();
                    self.apply(&ops::Einsum { equation: &equation })
                }
                _ => None,
            },
            "TopK" => {
                let rule = ops::TopK { axis: Some(axis(&self, -1)?) };
                if self.opset < 10 || !self.is_shape(1, SIZE_MAX) { None } else { self.apply(&rule) }
            }
            "NonZero" => self.apply(&ops::NonZero),
            "NonMaxSuppression" => self.apply(&ops::NonMaxSuppression),
            "GridSample" => self.apply(&ops::GridSample),
            "LSTM" | "GRU" => self.recurrent(),
            _ => self.layout_rule(),
        }
    }

    /// Operators that lay elements out anew, and those of linear algebra.
    fn layout_rule(self) -> Option<Results> {
        match self.node.operator.as_str() {
            "Reshape" if self.is_shape(1, SIZE_MAX) => {
                let rule = ops::Reshape { allow_zero: self.is_set("allowzero") };
                self.apply(&rule)
            }
            "Flatten" => {
                let rule = ops::Flatten { axis: self.small("axis", 1)? };
                self.apply(&rule)
            }
            "Squeeze" => self.with_vector(1, "axes").apply(&ops::Squeeze),
            "Unsqueeze" => self.unsqueeze(),
            "Transpose" => self.transpose(),
            "DepthToSpace" => {
                let block_size = u32::try_from(self.small("blocksize", 0)?).ok().filter(|&size| size > 0)?;
                self.apply(&ops::DepthToSpace { block_size })
            }
            "Pad" if self.opset >= 11 && self.has_small_values() && self.has_distinct_axes(3, 0) => {
                self.apply(&ops::Pad)
            }
            "Resize" if self.opset >= 11 && self.has_small_values() => self.apply(&ops::Resize),
            "MatMul" => self.apply(&ops::MatMul),
            "MatMulInteger" => self.with_inputs(&[0, 1]).apply(&ops::MatMul),
            "QLinearMatMul" => self.with_inputs(&[0, 3]).apply(&ops::MatMul),
            "Gemm" if [0, 1].iter().all(|&input| self.rank(input) == Some(2)) => {
                let rule =
                    ops::Gemm { transpose_a: self.is_set("transA"), transpose_b: self.is_set("transB") };
                self.apply(&rule)
            }
            "Conv" => self.with_inputs(&[0, 1]).convolution(),
            "ConvInteger" => self.with_inputs(&[0, 1]).convolution(),
            "QLinearConv" => self.with_inputs(&[0, 3]).convolution(),
            "ConvTranspose" => self.with_inputs(&[0, 1]).transposed_convolution(),
            "MaxPool" | "AveragePool" | "LpPool" => self.pool(),
            "GlobalAveragePool" | "GlobalMaxPool" | "GlobalLpPool" => self.apply(&ops::GlobalPool),
            operator if operator.starts_with("Reduce") || operator == "ArgMax" || operator == "ArgMin" => {
                self.reduction()
            }
            _ => None,
        }
    }

    fn constant(self) -> Option<Results> {
        let of = |integers: Option<&[i64]>, dims: &[u64]| {
            let dims: Vec<SymExpr> = dims
                .iter()
                .map(|&dim| i32::try_from(dim).map(SymExpr::Value))
                .collect::<Result<_, _>>()
                .ok()?;
            let rank = dims.len();
            let value = |&integer: &i64| SymExpr::Value(clamped(integer));
            Some(Ok(vec![match (rank, integers) {
                (0, Some([only])) => SymTensor::from_scalar(value(only)),
                (1, Some(all)) => SymTensor::from_vec(all.iter().map(value).collect()),
                _ => SymTensor::from_shape(dims),
            }]))
        };
        self.node.attributes.iter().find_map(|attribute| match (attribute.name.as_str(), &attribute.value) {
            ("value", AttributeValue::Tensor(Literal { dims, integers, .. })) => {
                of(integers.as_deref(), dims)
            }
            ("value_int", AttributeValue::Int(int)) => of(Some(&[*int]), &[]),
            ("value_ints", AttributeValue::Ints(ints)) => of(Some(ints), &[ints.len() as u64]),
            ("value_float", _) | ("value_string", _) => of(None, &[]),
            ("value_floats", AttributeValue::Floats(floats)) => of(None, &[floats.len() as u64]),
            ("value_strings", AttributeValue::Texts(texts)) => of(None, &[texts.len() as u64]),
            _ => None,
        })
    }

    fn constant_of_shape(self) -> Option<Results> {
        let value = match self.node.attribute("value") {
            Some(AttributeValue::Tensor(Literal { integers: Some(integers), .. })) => {
                integers.first().map(|&int| clamped(int))
            }
            _ => None,
        };
        // A long vector of equal values is known by its length alone.
        let is_short = self.is_shape(0, super::VECTOR_MAX as i32);
        self.apply(&ops::ConstantOfShape { value: value.filter(|_| is_short) })
    }

    fn split(mut self) -> Option<Results> {
        let axis = self.small("axis", 0)?;
        self = self.with_vector(1, "split");
        let count = self.node.outputs.len();
        if self.inputs.get(1).is_none_or(Option::is_none) {
            // Equal parts; the last one is smaller if it has to be.
            let rank = self.rank(0)?;
            let place = if axis < 0 { axis + i32::try_from(rank).ok()? } else { axis };
            let place = usize::try_from(place).ok().filter(|&place| place < rank)?;
            let SymExpr::Value(size) = self.inputs[0].as_ref()?.size(place)? else { return None };
            let count = i32::try_from(count).ok().filter(|&count| count > 0)?;
            let part = size.checked_add(count - 1)? / count;
            let last = size - part * (count - 1);
            if last < 0 || (self.opset < 18 && size % count != 0) {
                return None;
            }
            let sizes =
                (1..=count).map(|number| SymExpr::Value(if number < count { part } else { last })).collect();
            self.inputs.resize(2, None);
            self.inputs[1] = Some(SymTensor::from_vec(sizes));
        }
        let rule = ops::Split { axis, num_outputs: u32::try_from(count).ok() };
        self.apply(&rule)
    }

    fn slice(mut self) -> Option<Results> {
        if self.opset < 10 {
            let rank = self.ints("starts")?.len() as i64;
            self = self.with_vector(1, "starts").with_vector(2, "ends").with_vector(3, "axes");
            if self.inputs.get(3).is_none_or(Option::is_none) {
                self.inputs.resize(4, None);
                let axes = (0..rank).map(|axis| SymExpr::Value(axis as i32)).collect();
                self.inputs[3] = Some(SymTensor::from_vec(axes));
            }
        }
        if self.has_zero_step() || !self.has_distinct_axes(3, 0) {
            return None;
        }
        self.apply(&ops::Slice)
    }

    fn unsqueeze(mut self) -> Option<Results> {
        self = self.with_vector(1, "axes");
        let axes = self.inputs.get(1).and_then(Option::as_ref).and_then(SymTensor::values);
        // Axes are those of the result.
        let added = axes.map_or(0, <[SymExpr]>::len);
        if self.has_distinct_axes(1, added) { self.apply(&ops::Unsqueeze) } else { None }
    }

    fn transpose(self) -> Option<Results> {
        let rank = self.rank(0)?;
        let Some(order) = self.ints("perm") else { return self.apply(&ops::Transpose { perm: None }) };
        let order: Option<Vec<usize>> =
            order.iter().map(|&axis| usize::try_from(axis).ok().filter(|&axis| axis < rank)).collect();
        let order = order.filter(|order| order.len() == rank)?;
        self.apply(&ops::Transpose { perm: Some(&order) })
    }

    /// The padding of a convolution or pool over so many dimensions; nothing for the same size.
    fn padding(&self, spatial: usize) -> Option<Option<Vec<usize>>> {
        match self.node.attribute("auto_pad") {
            Some(AttributeValue::Text(mode)) if mode.starts_with("SAME") => return Some(None),
            Some(AttributeValue::Text(mode)) if mode == "VALID" => return Some(Some(vec![0; spatial * 2])),
            _ => {}
        }
        self.sizes("pads", 0, 0, spatial * 2).map(Some)
    }

    /// The number of dimensions over which a convolution or pool goes, if its rule knows it.
    fn spatial(&self) -> Option<usize> {
        self.rank(0)?.checked_sub(2).filter(|spatial| (1..=2).contains(spatial))
    }

    fn convolution(self) -> Option<Results> {
        let spatial = self.spatial()?;
        let (strides, dilations) =
            (self.sizes("strides", 1, 1, spatial)?, self.sizes("dilations", 1, 1, spatial)?);
        let pads = self.padding(spatial)?;
        let padding = pads.as_deref().map_or(ops::Padding::Same, ops::Padding::Fixed);
        self.apply(&ops::Conv { dilations: &dilations, padding, strides: &strides })
    }

    fn transposed_convolution(self) -> Option<Results> {
        let spatial = self.spatial()?;
        // With a shape that is given, padding follows from it.
        if self.node.attribute("output_shape").is_some() {
            return None;
        }
        let (strides, dilations) =
            (self.sizes("strides", 1, 1, spatial)?, self.sizes("dilations", 1, 1, spatial)?);
        let output_padding = self.sizes("output_padding", 0, 0, spatial)?;
        let pads = self.padding(spatial)?;
        let padding = pads.as_deref().map_or(ops::Padding::Same, ops::Padding::Fixed);
        let groups = usize::try_from(self.small("group", 1)?).ok().filter(|&groups| groups > 0)?;
        self.apply(&ops::ConvTranspose {
            groups,
            padding,
            strides: &strides,
            dilations: &dilations,
            output_padding: Some(&output_padding),
        })
    }

    fn pool(self) -> Option<Results> {
        let spatial = self.spatial()?;
        self.ints("kernel_shape")?;
        let kernel_size = self.sizes("kernel_shape", 1, 1, spatial)?;
        let (strides, dilations) =
            (self.sizes("strides", 1, 1, spatial)?, self.sizes("dilations", 1, 1, spatial)?);
        let pads = self.padding(spatial)?;
        let padding = pads.as_deref().map_or(ops::Padding::Same, ops::Padding::Fixed);
        let ceil_mode = self.is_set("ceil_mode");
        let has_indices = self.node.outputs.len() > 1;
        let mut results = self.with_inputs(&[0]).apply(&ops::Pool {
            dilations: &dilations,
            kernel_size: &kernel_size,
            padding,
            strides: &strides,
            ceil_mode,
        })?;
        if let (Ok(results), true) = (&mut results, has_indices) {
            results.extend(results.first().cloned());
        }
        Some(results)
    }

    fn reduction(mut self) -> Option<Results> {
        let keep_dims = self.int("keepdims").unwrap_or(1) != 0;
        if self.node.operator.starts_with("Arg") {
            let axes = [self.small("axis", 0)?];
            return self.with_inputs(&[0]).apply(&ReductionOp { axes: Some(&axes), keep_dims });
        }
        let has_axes_input = self.inputs.get(1).is_some_and(Option::is_some);
        let given = self.node.inputs.get(1).is_some_and(Option::is_some);
        if given && !has_axes_input {
            return None;
        }
        self.inputs.truncate(if has_axes_input { 2 } else { 1 });
        let axes: Option<Vec<i32>> =
            self.ints("axes").map(|axes| axes.iter().map(|&axis| clamped(axis)).collect());
        let is_empty = |axes: &Option<SymTensor>| {
            axes.as_ref().and_then(SymTensor::values).is_some_and(<[SymExpr]>::is_empty)
        };
        let has_none = if has_axes_input { self.inputs.get(1).is_some_and(is_empty) } else { axes.is_none() };
        if has_none {
            return if self.is_set("noop_with_empty_axes") {
                self.with_inputs(&[0]).apply(&UnaryOp)
            } else {
                self.with_inputs(&[0]).apply(&ReductionOp { axes: None, keep_dims })
            };
        }
        self.apply(&ReductionOp { axes: axes.as_deref(), keep_dims })
    }

    fn recurrent(self) -> Option<Results> {
        // The other layout and its rule are rare.
        if self.is_set("layout") {
            return None;
        }
        let direction = || match self.node.attribute("direction") {
            Some(AttributeValue::Text(direction)) if direction == "bidirectional" => {
                ops::Direction::Bidirectional
            }
            _ => ops::Direction::Unidirectional,
        };
        match self.node.operator.as_str() {
            "LSTM" => {
                let rule = ops::LSTM { direction: direction() };
                self.apply(&rule)
            }
            _ => {
                let rule = ops::GRU { direction: direction() };
                self.apply(&rule)
            }
        }
    }
}

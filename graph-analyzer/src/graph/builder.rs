//! Makes graphs: resolves names, orders nodes, refuses what is no graph.

use std::collections::HashMap;
use std::path::{Component, Path};

use super::{
    Attribute, AttributeValue, DIMENSIONS_MAX, Dim, Graph, KEPT_INTEGERS_MAX, NAME_BYTES_MAX, NODES_MAX,
    Node, NodeId, OperatorSet, Producer, TensorType, USES_MAX, VALUES_MAX, Value, ValueId, WeightSource,
};
use crate::order::topological;

/// Operators that draw random numbers, so that nodes without inputs compute no constants.
const RANDOM: &[&str] =
    &["RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Bernoulli", "Multinomial"];

/// Why a graph cannot be built.
#[derive(Clone, pleach_derive::ErrorDebug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum GraphError {
    /// Something has no name.
    #[error("{what} without a name; give it one")]
    Unnamed {
        /// The kind of thing.
        what: &'static str,
    },
    /// Two values have one name.
    #[error("two values have the name '{name}'; rename one of them")]
    SameName {
        /// The name.
        name: String,
    },
    /// A name that no value has.
    #[error("no value has the name '{name}', which {user} uses; correct the name")]
    NoSuchValue {
        /// The name.
        name: String,
        /// A node, or 'the output'.
        user: String,
    },
    /// Nodes need each other.
    #[error("the nodes form a cycle: {}; remove an edge of it", .nodes.join(" -> "))]
    Cycle {
        /// Names of the nodes, in the direction of the data.
        nodes: Vec<String>,
    },
    /// A weight's file could lie anywhere.
    #[error(
        "the weight '{weight}' is in '{path}', which is no path below the model's folder; export the model again"
    )]
    WeightPath {
        /// The weight.
        weight: String,
        /// The path.
        path: String,
    },
    /// Larger than a graph may be.
    #[error("{what}: at most {most} are possible; use a smaller model")]
    TooMany {
        /// The kind of thing.
        what: &'static str,
        /// The limit.
        most: usize,
    },
}

/// A node before its names are resolved. An empty name of an input or output says that it is
/// missing.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct NodeDraft {
    /// Its name; if it is empty, the node takes that of its first output.
    pub name: String,
    /// What it does.
    pub operator: String,
    /// Whose operator it is; empty for ONNX's own.
    pub domain: String,
    /// Names of the inputs.
    pub inputs: Vec<String>,
    /// Names of what its bodies use of the graph outside.
    pub captured: Vec<String>,
    /// Names of the outputs, and what is known of them.
    pub outputs: Vec<(String, TensorType)>,
    /// Parameters.
    pub attributes: Vec<Attribute>,
    /// The stage of a pipeline.
    pub stage: Option<u32>,
}

/// Collects what a graph has, in any order.
#[derive(Clone, Debug, Default)]
pub struct GraphBuilder {
    name: String,
    operator_sets: Vec<OperatorSet>,
    inputs: Vec<(String, TensorType)>,
    weights: Vec<Value>,
    nodes: Vec<NodeDraft>,
    outputs: Vec<String>,
}

impl GraphBuilder {
    /// An empty graph of this name.
    #[must_use]
    pub fn new(name: &str) -> Self {
        Self { name: name.to_owned(), ..Self::default() }
    }

    /// Names a version of operators.
    pub fn operator_set(&mut self, domain: &str, version: u32) -> &mut Self {
        self.operator_sets.push(OperatorSet { domain: domain.to_owned(), version });
        self
    }

    /// Adds a value that the caller gives.
    pub fn input(&mut self, name: &str, tensor: TensorType) -> &mut Self {
        self.inputs.push((name.to_owned(), tensor));
        self
    }

    /// Adds a value that is in the model, with its integers if they are known.
    pub fn weight(
        &mut self,
        name: &str,
        tensor: TensorType,
        source: WeightSource,
        integers: Option<Vec<i64>>,
    ) -> &mut Self {
        let producer = Producer::Weight { source, integers };
        let name = name.to_owned();
        self.weights.push(Value { name, tensor, producer, consumers: Vec::new(), is_constant: true });
        self
    }

    /// Adds a node.
    pub fn node(&mut self, node: NodeDraft) -> &mut Self {
        self.nodes.push(node);
        self
    }

    /// Says that the caller gets the value of this name.
    pub fn output(&mut self, name: &str) -> &mut Self {
        self.outputs.push(name.to_owned());
        self
    }

    /// Makes the graph.
    ///
    /// # Errors
    ///
    /// [`GraphError`]: a name that is missing, that two values have or that no value has; a cycle;
    /// a limit that is exceeded.
    pub fn build(self) -> Result<Graph, GraphError> {
        self.check_limits()?;
        let Self { name, operator_sets, inputs, weights, mut nodes, outputs } = self;
        for node in &mut nodes {
            if node.operator.is_empty() {
                return Err(GraphError::Unnamed { what: "an operator" });
            }
            if node.name.is_empty() {
                let output = node.outputs.iter().map(|(name, _)| name).find(|name| !name.is_empty());
                node.name = output.unwrap_or(&node.operator).clone();
            }
        }
        let nodes = in_order(nodes)?;
        let mut values = Values::default();
        let mut graph = Graph {
            name,
            operator_sets,
            values: Vec::new(),
            nodes: Vec::new(),
            inputs: Vec::new(),
            outputs: Vec::new(),
        };
        for (name, tensor) in inputs {
            let producer = Producer::Input;
            let value = Value { name, tensor, producer, consumers: Vec::new(), is_constant: false };
            graph.inputs.push(values.add(value)?);
        }
        for weight in weights {
            values.add(weight)?;
        }
        for (number, draft) in nodes.into_iter().enumerate() {
            let node = values.resolve(NodeId(number as u32), draft)?;
            graph.nodes.push(node);
        }
        for name in outputs {
            let user = || "an output".to_owned();
            graph
                .outputs
                .push(values.find(&name).ok_or_else(|| GraphError::NoSuchValue { name, user: user() })?);
        }
        graph.values = values.values;
        Ok(graph)
    }

    /// What every form of a graph has to keep to.
    fn check_limits(&self) -> Result<(), GraphError> {
        let of = |node: &NodeDraft| node.inputs.len() + node.captured.len();
        let results: usize = self.nodes.iter().map(|node| node.outputs.len()).sum();
        let uses = self.nodes.iter().map(of).sum::<usize>() + self.outputs.len();
        limit("nodes", self.nodes.len(), NODES_MAX)?;
        limit("values", self.inputs.len() + self.weights.len() + results, VALUES_MAX)?;
        limit("inputs of nodes", uses, USES_MAX)?;
        check_name(&self.name)?;
        self.operator_sets.iter().try_for_each(|set| check_name(&set.domain))?;
        self.outputs.iter().try_for_each(|name| check_name(name))?;
        self.inputs.iter().try_for_each(|(name, tensor)| check_value(name, tensor))?;
        self.weights.iter().try_for_each(check_weight)?;
        self.nodes.iter().try_for_each(check_node)
    }
}

fn limit(what: &'static str, count: usize, most: usize) -> Result<(), GraphError> {
    if count > most { Err(GraphError::TooMany { what, most }) } else { Ok(()) }
}

fn check_name(name: &str) -> Result<(), GraphError> {
    limit("bytes of a name", name.len(), NAME_BYTES_MAX)
}

fn check_value(name: &str, tensor: &TensorType) -> Result<(), GraphError> {
    check_name(name)?;
    let dims = tensor.shape.as_deref().unwrap_or_default();
    limit("dimensions of a tensor", dims.len(), DIMENSIONS_MAX)?;
    dims.iter().try_for_each(|dim| if let Dim::Symbol(name) = dim { check_name(name) } else { Ok(()) })
}

fn check_integers(integers: Option<&[i64]>) -> Result<(), GraphError> {
    limit("integers of a constant", integers.map_or(0, <[i64]>::len), KEPT_INTEGERS_MAX)
}

fn check_weight(weight: &Value) -> Result<(), GraphError> {
    check_value(&weight.name, &weight.tensor)?;
    let Producer::Weight { source, integers } = &weight.producer else { return Ok(()) };
    check_integers(integers.as_deref())?;
    let WeightSource::File { path, .. } = source else { return Ok(()) };
    check_name(path)?;
    let mut parts = Path::new(path).components();
    let is_inside = !path.is_empty()
        && parts.all(|part| matches!(part, Component::Normal(_) | Component::CurDir))
        && !path.contains(['\\', '\0']);
    if is_inside {
        Ok(())
    } else {
        Err(GraphError::WeightPath { weight: weight.name.clone(), path: path.clone() })
    }
}

fn check_node(node: &NodeDraft) -> Result<(), GraphError> {
    [&node.name, &node.operator, &node.domain].into_iter().try_for_each(|name| check_name(name))?;
    node.inputs.iter().chain(&node.captured).try_for_each(|name| check_name(name))?;
    node.outputs.iter().try_for_each(|(name, tensor)| check_value(name, tensor))?;
    node.attributes.iter().try_for_each(|attribute| {
        check_name(&attribute.name)?;
        let AttributeValue::Tensor(literal) = &attribute.value else { return Ok(()) };
        limit("dimensions of a tensor", literal.dims.len(), DIMENSIONS_MAX)?;
        check_integers(literal.integers.as_deref())
    })
}

/// The drafts in a topological order.
fn in_order(nodes: Vec<NodeDraft>) -> Result<Vec<NodeDraft>, GraphError> {
    let mut producers: HashMap<&str, u32> = HashMap::new();
    for (number, node) in nodes.iter().enumerate() {
        for (name, _) in node.outputs.iter().filter(|(name, _)| !name.is_empty()) {
            if producers.insert(name, number as u32).is_some() {
                return Err(GraphError::SameName { name: name.clone() });
            }
        }
    }
    let needs = |node: &NodeDraft| {
        let uses = node.inputs.iter().chain(&node.captured);
        let mut needs: Vec<u32> = uses.filter_map(|name| producers.get(name.as_str()).copied()).collect();
        needs.sort_unstable();
        needs.dedup();
        needs
    };
    let needs: Vec<Vec<u32>> = nodes.iter().map(needs).collect();
    let order = topological(&needs).map_err(|cycle| {
        /// A cycle of a whole model is no help.
        const NAMES_SHOWN: usize = 16;
        let mut names: Vec<String> =
            cycle.iter().take(NAMES_SHOWN).map(|&number| nodes[number as usize].name.clone()).collect();
        if cycle.len() > NAMES_SHOWN {
            names.push("…".to_owned());
        }
        names.extend(cycle.first().map(|&first| nodes[first as usize].name.clone()));
        GraphError::Cycle { nodes: names }
    })?;
    let mut nodes: Vec<Option<NodeDraft>> = nodes.into_iter().map(Some).collect();
    Ok(order.into_iter().filter_map(|number| nodes[number as usize].take()).collect())
}

/// Values with their names.
#[derive(Default)]
struct Values {
    values: Vec<Value>,
    numbers: HashMap<String, ValueId>,
}

impl Values {
    fn find(&self, name: &str) -> Option<ValueId> {
        self.numbers.get(name).copied()
    }

    fn add(&mut self, value: Value) -> Result<ValueId, GraphError> {
        if value.name.is_empty() {
            return Err(GraphError::Unnamed { what: "an input or weight" });
        }
        let id = ValueId(self.values.len() as u32);
        if self.numbers.insert(value.name.clone(), id).is_some() {
            return Err(GraphError::SameName { name: value.name });
        }
        self.values.push(value);
        Ok(id)
    }

    /// Makes a node whose inputs are there already.
    fn resolve(&mut self, id: NodeId, draft: NodeDraft) -> Result<Node, GraphError> {
        let NodeDraft { name, operator, domain, inputs, captured, outputs, attributes, stage } = draft;
        let find = |used: &String| {
            let missing = || GraphError::NoSuchValue { name: used.clone(), user: format!("node '{name}'") };
            self.find(used).ok_or_else(missing)
        };
        let optional = |used: &String| if used.is_empty() { Ok(None) } else { find(used).map(Some) };
        let inputs = inputs.iter().map(optional).collect::<Result<Vec<_>, _>>()?;
        let mut captured = captured.iter().map(find).collect::<Result<Vec<_>, _>>()?;
        captured.sort_unstable();
        captured.dedup();
        let mut is_constant = !RANDOM.contains(&operator.as_str());
        for used in inputs.iter().flatten().chain(&captured) {
            let value = &mut self.values[used.index()];
            is_constant &= value.is_constant;
            if value.consumers.last() != Some(&id) {
                value.consumers.push(id);
            }
        }
        let mut results = Vec::with_capacity(outputs.len());
        for (name, tensor) in outputs {
            if name.is_empty() {
                results.push(None);
                continue;
            }
            let producer = Producer::Node(id);
            let value = Value { name, tensor, producer, consumers: Vec::new(), is_constant };
            results.push(Some(self.add(value)?));
        }
        Ok(Node { name, operator, domain, inputs, captured, outputs: results, attributes, stage })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn draft(operator: &str, inputs: &[&str], outputs: &[&str]) -> NodeDraft {
        NodeDraft {
            operator: operator.to_owned(),
            inputs: inputs.iter().map(ToString::to_string).collect(),
            outputs: outputs.iter().map(|name| (name.to_string(), TensorType::default())).collect(),
            ..NodeDraft::default()
        }
    }

    #[test]
    fn nodes_come_in_a_topological_order_and_take_names_of_their_outputs() {
        let mut builder = GraphBuilder::new("g");
        builder.input("x", TensorType::default());
        builder.node(draft("Relu", &["a"], &["b"])).node(draft("Relu", &["x", "x"], &["a"])).output("b");
        let graph = builder.build().expect("it is a graph");
        let names: Vec<&str> = graph.nodes().iter().map(|node| node.name.as_str()).collect();
        assert_eq!(names, ["a", "b"]);
        assert_eq!(
            graph.value(graph.inputs()[0]).consumers,
            [NodeId(0)],
            "a node that uses a value twice counts once"
        );
    }

    #[test]
    fn a_node_of_weights_computes_constants_unless_it_draws_random_numbers() {
        let mut builder = GraphBuilder::new("g");
        builder.weight("w", TensorType::default(), WeightSource::Model, None);
        builder.node(draft("Relu", &["w"], &["c"])).node(draft("RandomNormalLike", &["w"], &["r"]));
        builder.node(draft("Add", &["c", "r"], &["sum"]));
        let graph = builder.build().expect("it is a graph");
        assert_eq!(graph.placed_nodes(), [NodeId(1), NodeId(2)]);
    }

    #[test]
    fn what_is_no_graph_is_refused_by_name() {
        let error = |nodes: &[NodeDraft]| {
            let mut builder = GraphBuilder::new("g");
            builder.input("x", TensorType::default());
            for node in nodes {
                builder.node(node.clone());
            }
            builder.build().expect_err("it is no graph").to_string()
        };
        let cycle = error(&[draft("Relu", &["b"], &["a"]), draft("Relu", &["a"], &["b"])]);
        assert!(cycle.starts_with("the nodes form a cycle: "), "{cycle}");
        assert!(cycle.contains("a -> b -> a") || cycle.contains("b -> a -> b"), "{cycle}");
        let missing = error(&[draft("Relu", &["y"], &["a"])]);
        assert_eq!(missing, "no value has the name 'y', which node 'a' uses; correct the name");
        assert!(error(&[draft("Relu", &[], &["x"])]).contains("two values have the name 'x'"));
        assert!(error(&[draft("", &["x"], &["a"])]).contains("an operator without a name"));
        let wide = TensorType { element: None, shape: Some(vec![Dim::Unknown; DIMENSIONS_MAX + 1]) };
        let mut node = draft("Relu", &["x"], &[]);
        node.outputs.push(("a".to_owned(), wide));
        assert!(error(&[node]).contains("dimensions of a tensor"));
    }
}

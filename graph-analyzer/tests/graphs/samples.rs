//! Graphs for tests.

use std::path::PathBuf;

use pleach_graph_analyzer::graph::{NodeDraft, TensorType};
use pleach_graph_analyzer::{ElementType, Graph, GraphBuilder};
use proptest::prelude::{Strategy, any, prop};

/// The names of the nine light models.
pub(crate) const LIGHT: [&str; 9] = [
    "bvlc_alexnet",
    "densenet121",
    "inception_v1",
    "inception_v2",
    "resnet50",
    "shufflenet",
    "squeezenet",
    "vgg19",
    "zfnet512",
];

/// A file of the tests' data.
pub(crate) fn data(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(name)
}

/// The bytes of a light model.
pub(crate) fn light_bytes(name: &str) -> Vec<u8> {
    std::fs::read(data(&format!("light/light_{name}.onnx"))).expect("the model is in the tree")
}

/// A light model with inferred shapes.
pub(crate) fn light(name: &str) -> Graph {
    let graph = Graph::from_onnx(&light_bytes(name)).expect("it is a model");
    graph.with_dims(&[]).expect("its shapes can be inferred")
}

/// The names of values whose size is not known.
pub(crate) fn without_size(graph: &Graph) -> Vec<&str> {
    let values = graph.values().iter().filter(|value| value.tensor.bytes().is_none());
    values.map(|value| value.name.as_str()).collect()
}

/// A node of a sample graph: what it uses, by number of earlier nodes, and the bytes of its result.
#[derive(Clone, Debug)]
pub(crate) struct SampleNode {
    pub(crate) uses: Vec<usize>,
    pub(crate) bytes: u64,
}

/// A graph of `n0`, `n1`, … with results of these sizes. Nodes without earlier ones use the input.
/// What nothing uses is an output.
pub(crate) fn graph_of(nodes: &[SampleNode], input_bytes: u64) -> Graph {
    let mut builder = GraphBuilder::new("sample");
    builder.input("x", TensorType::fixed(ElementType::U8, &[input_bytes]));
    let is_used = |number: usize| nodes.iter().any(|node| node.uses.contains(&number));
    for (number, node) in nodes.iter().enumerate() {
        let inputs: Vec<String> = if node.uses.is_empty() {
            vec!["x".to_owned()]
        } else {
            node.uses.iter().map(|used| format!("n{used}")).collect()
        };
        builder.node(NodeDraft {
            operator: "Made".to_owned(),
            inputs,
            outputs: vec![(format!("n{number}"), TensorType::fixed(ElementType::U8, &[node.bytes]))],
            ..NodeDraft::default()
        });
        if !is_used(number) {
            builder.output(&format!("n{number}"));
        }
    }
    builder.build().expect("it is a graph")
}

/// Graphs of at least two nodes and at most so many.
pub(crate) fn sample_nodes(most: usize) -> impl Strategy<Value = Vec<SampleNode>> {
    let node = (any::<u64>(), 1_u64..1000, 0_usize..4);
    prop::collection::vec(node, 2..=most).prop_map(|drawn| {
        let make = |(number, (seed, bytes, count)): (usize, (u64, u64, usize))| {
            let mut uses: Vec<usize> =
                (0..count.min(number)).map(|place| (seed >> (place * 8)) as usize % number).collect();
            uses.sort_unstable();
            uses.dedup();
            SampleNode { uses, bytes }
        };
        drawn.into_iter().enumerate().map(make).collect()
    })
}

//! A transformer whose batch and length are symbols, as PyTorch exports it.

use std::sync::Arc;

use pleach_graph_analyzer::graph::Dim;
use pleach_graph_analyzer::plan::Effort;
use pleach_graph_analyzer::transfer::Transfer;
use pleach_graph_analyzer::{Costs, Graph, Machine, MemoryPlan, Partition, Placement};

use super::samples::{data, without_size};

fn transformer() -> Graph {
    let bytes = std::fs::read(data("transformer/transformer.onnx")).expect("the model is in the tree");
    Graph::from_onnx(&bytes).expect("it is a model")
}

fn halves(graph: &Graph) -> Partition {
    let costs = Costs::estimated(graph, &Machine::TYPICAL);
    let placement = Placement::pipeline(graph, 2, &costs, None).expect("there are enough nodes");
    Partition::new(graph, &placement).expect("a pipeline has no cycle")
}

#[test]
fn batch_and_length_go_through_all_layers() {
    let graph = transformer().with_dims(&[]).expect("it has shapes");
    let symbol = |name: &str| Dim::Symbol(Arc::from(name));
    let logits = graph.value(graph.find("logits").expect("it is the output")).tensor.shape.clone();
    assert_eq!(logits, Some(vec![symbol("batch"), symbol("length"), Dim::Fixed(64)]));
    assert!(graph.operators_without_shapes().is_empty());
    // Four heads of eight elements, twice.
    let weights = vec![symbol("batch"), Dim::Fixed(4), symbol("length"), symbol("length")];
    let softmax = graph.nodes().iter().filter(|node| node.operator == "Softmax");
    let shapes: Vec<_> = softmax
        .flat_map(|node| node.results())
        .map(|result| graph.value(result).tensor.shape.clone())
        .collect();
    assert_eq!(shapes, [Some(weights.clone()), Some(weights)]);
    // The layer's result crosses dynamically with three dimensions, which go with the signal.
    let crossings = halves(&graph);
    let dynamic = Transfer::Dynamic { metadata_bytes: Some(48), is_in_signal: true };
    assert!(crossings.crossings().iter().any(|crossing| crossing.transfer == dynamic));
}

#[test]
fn bound_symbols_fix_every_tensor_and_the_plans_are_at_their_bound() {
    let graph = transformer().with_dims(&[("batch", 2), ("length", 7)]).expect("it has shapes");
    assert_eq!(without_size(&graph), [""; 0]);
    let partition = halves(&graph);
    assert!(partition.crossings().iter().all(|crossing| crossing.transfer.bytes() > 0));
    for part in partition.parts() {
        let buffers = part.plan_buffers();
        let plan = MemoryPlan::search(&buffers, Effort::steps(20_000));
        let checked = plan.check(&buffers).expect("it is a plan");
        assert!(checked.is_optimal(), "rank {}: {checked:?}", part.rank);
    }
}

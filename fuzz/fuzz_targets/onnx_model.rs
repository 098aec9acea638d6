//! Whatever file comes, ONNX, text or JSON: no panic. A graph that is read has a text form and JSON
//! that parse to it, and shapes or a contradiction; cut in two, its parts have memory plans.
#![no_main]

use libfuzzer_sys::fuzz_target;
use pleach_graph_analyzer::plan::MemoryPlan;
use pleach_graph_analyzer::{Costs, Graph, Machine, Partition, Placement};

fuzz_target!(|bytes: &[u8]| {
    let text = std::str::from_utf8(bytes).ok();
    let graph = match text {
        Some(text) if text.starts_with('{') => Graph::from_json(text).ok(),
        Some(text) if text.starts_with("pleach-graph") => Graph::from_text(text).ok(),
        _ => Graph::from_onnx(bytes).ok(),
    };
    let Some(graph) = graph else { return };
    // Texts and not graphs: a number that is none differs from itself.
    let text = graph.to_string();
    assert_eq!(Graph::from_text(&text).map(|again| again.to_string()), Ok(text));
    let json = graph.to_json();
    let again = Graph::from_json(&json).map(|again| again.to_json());
    assert_eq!(again.map_err(|error| error.to_string()), Ok(json));
    let Ok(graph) = graph.with_dims(&[]) else { return };
    let costs = Costs::estimated(&graph, &Machine::TYPICAL);
    let ranks = graph.placed_nodes().len().clamp(1, 2) as u32;
    let Ok(placement) = Placement::pipeline(&graph, ranks, &costs, None) else { return };
    let partition = Partition::new(&graph, &placement).expect("a pipeline has no cycle");
    for part in partition.parts() {
        let buffers = part.plan_buffers();
        MemoryPlan::best_fit(&buffers).check(&buffers).expect("it is a plan");
    }
});

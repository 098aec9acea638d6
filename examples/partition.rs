//! Cuts a small graph into two parts, shows what crosses and where every buffer lies, and runs the
//! parts one after another. `pleach graph run` runs them as processes.
//!
//! `cargo run --example partition`

use std::error::Error;
use std::path::Path;

use pleach::graph::onnx::Model;
use pleach::graph::run::{Job, Rten};
use pleach::graph::{Costs, Graph, Machine, MemoryPlan, Partition, Placement};

const GRAPH: &str = "pleach-graph 1
graph layers
opset 17
input x f32 [batch, 256]
const w1 f32 [256, 512]
const w2 f32 [512, 64]
node first MatMul(x, w1) -> h ? ?
node second Relu(h) -> r ? ?
node third MatMul(r, w2) -> y ? ?
output y
";

fn main() -> Result<(), Box<dyn Error>> {
    let graph = Graph::from_text(GRAPH)?.with_dims(&[("batch", 32)])?;
    let placement = Placement::pipeline(&graph, 2, &Costs::estimated(&graph, &Machine::TYPICAL), None)?;
    let partition = Partition::new(&graph, &placement)?;
    for part in partition.parts() {
        let buffers = part.plan_buffers();
        let plan = MemoryPlan::best_fit(&buffers).check(&buffers)?;
        println!("rank {}: {} nodes, an arena of {} bytes", part.rank, part.nodes.len(), plan.bytes);
    }
    for crossing in partition.crossings() {
        let name = &graph.value(crossing.value).name;
        println!("{name} crosses from rank {} to rank {}", crossing.from, crossing.to);
    }

    let (model, runtime) = (Model::of_graph(&graph), Rten::new());
    let job = Job {
        model: &model,
        folder: Path::new(""),
        graph: &graph,
        partition: &partition,
        runtime: &runtime,
        random_weights: Some(1),
    };
    job.check()?;
    let reference = job.reference(&job.random_inputs(1, 1)?)?;
    let output = &reference.outputs[0][0];
    println!("y has the dimensions {:?}", output.form.dims);
    println!("largest difference from the whole graph: {:.1e}", reference.largest_difference);
    Ok(())
}

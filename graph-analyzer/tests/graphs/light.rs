//! The nine light models, from the file to the memory plans.

use pleach_graph_analyzer::onnx::Model;
use pleach_graph_analyzer::plan::Effort;
use pleach_graph_analyzer::{Costs, Graph, Machine, MemoryPlan, Partition, Placement};

use super::samples::{LIGHT, light, light_bytes, without_size};

#[test]
fn the_models_have_their_nodes_and_every_value_gets_a_fixed_size() {
    let nodes = [40, 1746, 237, 916, 415, 446, 105, 82, 38];
    for (name, nodes) in LIGHT.iter().zip(nodes) {
        let graph = light(name);
        assert_eq!(graph.nodes().len(), nodes, "{name}");
        assert_eq!(without_size(&graph), [""; 0], "{name}");
    }
}

#[test]
fn every_part_of_every_model_is_planned_at_the_lower_bound() {
    for name in LIGHT {
        let graph = light(name);
        let costs = Costs::estimated(&graph, &Machine::TYPICAL);
        for ranks in [1, 2, 4] {
            let placement = Placement::pipeline(&graph, ranks, &costs, None).expect("it can be cut");
            let partition = Partition::new(&graph, &placement).expect("a pipeline has no cycle");
            for part in partition.parts() {
                let buffers = part.plan_buffers();
                let plan = MemoryPlan::search(&buffers, Effort::steps(200_000));
                let checked = plan.check(&buffers).expect("it is a plan");
                assert!(checked.is_optimal(), "{name} on {ranks}, rank {}: {checked:?}", part.rank);
            }
        }
    }
}

#[test]
fn computed_placements_cut_every_model_without_cycles_and_weights_never_cross() {
    for name in LIGHT {
        let graph = light(name);
        let costs = Costs::estimated(&graph, &Machine::TYPICAL);
        let cuts = [
            Placement::pipeline(&graph, 8, &costs, None),
            Placement::min_cut(&graph, 2, &costs, None),
            Placement::min_cut(&graph, 4, &costs, Some(100)),
        ];
        for placement in cuts {
            let placement = placement.expect("it can be cut");
            let partition = Partition::new(&graph, &placement).expect("the parts have no cycle");
            let crossings = partition.crossings();
            assert!(crossings.iter().all(|crossing| !graph.value(crossing.value).is_constant), "{name}");
            assert!(crossings.len() >= partition.parts().len() - 1, "{name}");
            let placed = graph.placed_nodes().len();
            let of_parts = partition.parts().iter().flat_map(|part| &part.nodes);
            assert_eq!(of_parts.filter(|&&node| !graph.is_constant(node)).count(), placed, "{name}");
        }
    }
}

#[test]
fn stages_that_are_written_into_a_model_are_read_from_it() {
    let model = Model::decode(light_bytes("squeezenet")).expect("it is a model");
    let graph = light("squeezenet");
    let costs = Costs::estimated(&graph, &Machine::TYPICAL);
    let placement = Placement::pipeline(&graph, 3, &costs, None).expect("it can be cut");
    let stages = graph.placed_nodes();
    let stages = stages.iter().filter_map(|&node| {
        let output = graph.node(node).results().next()?;
        Some((graph.value(output).name.as_str(), placement.rank_of(node)?))
    });
    let written = model.with_stages(3, &stages.collect()).encode();
    let read = Graph::from_onnx(&written).expect("it is a model").with_dims(&[]).expect("it has shapes");
    assert_eq!(Placement::stages(&read), Ok(placement));
}

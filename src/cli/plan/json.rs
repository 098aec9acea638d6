//! A plan as one JSON object: rates are exact, ranks and nodes by name, edges by number.

use pleach::packing::latency::predicted_ns;
use pleach::packing::topology::{NodeId, Topology};
use pleach::packing::{Certificate, Edge, Path, Rate, Tree};
use serde_json::{Value, json};

use super::{Plan, gb_s, reason_in_words};

/// The plan.
pub(super) fn object(plan: &Plan) -> Value {
    let Plan { topology, packing, .. } = plan;
    let ranks: Vec<NodeId> = (0..topology.ranks()).map(|rank| topology.node(rank)).collect();
    let trees = packing.trees.iter().zip(&plan.checked.depths);
    let mut object = json!({
        "collective": packing.collective.name(),
        "ranks": names(topology, &ranks),
        "root": packing.collective.root(),
        "strategy": plan.strategy.name(),
        "rate_gb_s": gb_s(packing.rate),
        "rate": exact(packing.rate),
        "bound_gb_s": gb_s(packing.bound),
        "bound": exact(packing.bound),
        "optimal": packing.is_optimal(),
        "trees": trees.map(|(tree, depth)| tree_object(topology, tree, depth.edges)).collect::<Vec<_>>(),
        "certificate": certificate(plan)
    });
    if let Some(bytes) = plan.bytes {
        object["bytes"] = bytes.into();
        object["predicted_s"] = (predicted_ns(packing, topology, bytes) as f64 / 1e9).into();
    }
    object["generation_s"] = plan.generation.as_secs_f64().into();
    object
}

fn tree_object(topology: &Topology, tree: &Tree, depth: u32) -> Value {
    let path = |path: &Path| json!({ "hops": names(topology, &path.hops), "weight": exact(path.weight) });
    let paths = |edge: &Edge| edge.paths.iter().map(path).collect::<Value>();
    json!({
        "root": tree.root,
        "weight": exact(tree.weight),
        "depth": depth,
        "edges": tree.edges.iter().map(|edge| json!([edge.from, edge.to])).collect::<Value>(),
        "paths": tree.edges.iter().map(paths).collect::<Value>()
    })
}

/// A cut is given as two parts: the nodes that have to be left (or entered), and all others.
fn certificate(plan: &Plan) -> Value {
    let Plan { topology, packing, .. } = plan;
    let every = || (0..topology.nodes().len() as u32).map(NodeId);
    let (kind, parts) = match &packing.certificate {
        Certificate::Cut { nodes } => {
            let mut is_inside = vec![false; topology.nodes().len()];
            nodes.iter().for_each(|node| is_inside[node.0 as usize] = true);
            ("cut", vec![nodes.clone(), every().filter(|node| !is_inside[node.0 as usize]).collect()])
        }
        Certificate::Partition { parts } => ("partition", parts.clone()),
        Certificate::Alone => ("partition", vec![every().collect()]),
    };
    let parts: Value = parts.iter().map(|part| names(topology, part)).collect();
    json!({ "kind": kind, "parts": parts, "text": reason_in_words(topology, packing).sentence })
}

fn names(topology: &Topology, nodes: &[NodeId]) -> Value {
    nodes.iter().map(|&node| topology.name(node)).collect()
}

fn exact(rate: Rate) -> String {
    format!("{}/{}", rate.numer(), rate.denom())
}

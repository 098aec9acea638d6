//! A plan as one JSON object: rates are exact, ranks and nodes by name, edges by number.

use std::fmt::Write;

use pleach::collectives::packing::latency::predicted_ns;
use pleach::collectives::packing::{Certificate, Edge, Path, Rate, Tree};
use pleach::collectives::topology::{NodeId, Topology};

use super::outcome::{Plan, gb_s};
use super::words;
use crate::cli::output::{list, quoted};

/// Writes into a `String`, which takes all.
macro_rules! put {
    ($out:expr, $($what:tt)*) => {{
        let _ = write!($out, $($what)*);
    }};
}

/// The plan, with a line end.
pub(super) fn object(plan: &Plan) -> String {
    let Plan { topology, packing, .. } = plan;
    let mut out = String::new();
    let ranks: Vec<NodeId> = (0..topology.ranks()).map(|rank| topology.node(rank)).collect();
    put!(out, "{{\"collective\":{}", quoted(packing.collective.name()));
    put!(out, ",\"ranks\":{}", names(topology, &ranks));
    match packing.collective.root() {
        Some(root) => put!(out, ",\"root\":{root}"),
        None => out.push_str(",\"root\":null"),
    }
    put!(out, ",\"strategy\":{}", quoted(plan.strategy.name()));
    for (name, rate) in [("rate", packing.rate), ("bound", packing.bound)] {
        put!(out, ",\"{name}_gb_s\":{:?},\"{name}\":{}", gb_s(rate), exact(rate));
    }
    put!(out, ",\"optimal\":{},\"trees\":[", packing.is_optimal());
    for (index, tree) in packing.trees.iter().enumerate() {
        out.push_str(if index == 0 { "" } else { "," });
        put_tree(&mut out, topology, tree, plan.checked.depths[index].edges);
    }
    put!(out, "],\"certificate\":{}", certificate(plan));
    if let Some(bytes) = plan.bytes {
        let took_s = predicted_ns(packing, topology, bytes) as f64 / 1e9;
        put!(out, ",\"bytes\":{bytes},\"predicted_s\":{took_s:?}");
    }
    put!(out, ",\"generation_s\":{:?}}}", plan.generation.as_secs_f64());
    out.push('\n');
    out
}

fn put_tree(out: &mut String, topology: &Topology, tree: &Tree, depth: u32) {
    put!(out, "{{\"root\":{},\"weight\":{},\"depth\":{depth}", tree.root, exact(tree.weight));
    let edge = |edge: &Edge| format!("[{},{}]", edge.from, edge.to);
    put!(out, ",\"edges\":{}", list(tree.edges.iter().map(edge)));
    let path = |path: &Path| {
        format!("{{\"hops\":{},\"weight\":{}}}", names(topology, &path.hops), exact(path.weight))
    };
    let paths = |edge: &Edge| list(edge.paths.iter().map(path));
    put!(out, ",\"paths\":{}}}", list(tree.edges.iter().map(paths)));
}

/// A cut is given as two parts: the nodes that have to be left (or entered), and all others.
fn certificate(plan: &Plan) -> String {
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
    let parts = list(parts.iter().map(|part| names(topology, part)));
    let text = quoted(&words::reason(topology, packing).sentence);
    format!("{{\"kind\":\"{kind}\",\"parts\":{parts},\"text\":{text}}}")
}

fn names(topology: &Topology, nodes: &[NodeId]) -> String {
    list(nodes.iter().map(|&node| quoted(topology.name(node))))
}

fn exact(rate: Rate) -> String {
    format!("\"{}/{}\"", rate.numer(), rate.denom())
}

//! A plan for graphviz.

use std::fmt::Write;

use pleach::packing::topology::{NodeId, NodeKind};

use super::svg::link_colours;
use super::{Plan, number, rate_in_words, reason_in_words, verdict_in_words};

/// Widest line, in points.
const WIDEST: f64 = 6.0;

/// The graph with its loads, each link in the colour of the tree that uses it most.
pub(super) fn graph(plan: &Plan) -> String {
    let topology = &plan.topology;
    let name = |node: NodeId| quoted(topology.name(node));
    let mut out = String::from("digraph plan {\n");
    let reason = reason_in_words(topology, &plan.packing);
    let title = format!(
        "{} over {}: {}, {}\n{}",
        plan.packing.collective,
        plan.source,
        rate_in_words(number(plan.packing.rate)),
        verdict_in_words(&plan.packing),
        reason.sentence
    );
    // Writing into a String takes all. Curves, as straight links there and back would hide each
    // other; graphviz 2.43 dies of its splines on some of these graphs.
    let _ = writeln!(out, "  label={};\n  layout=neato; overlap=false; splines=curved;", quoted(&title));
    for (index, node) in topology.nodes().iter().enumerate() {
        let shape = match node.kind {
            NodeKind::Rank => "circle",
            NodeKind::Switch => "box",
        };
        let _ = writeln!(out, "  {} [shape={shape}];", name(NodeId(index as u32)));
    }
    let widest = topology.links().iter().map(|link| link.bytes_per_s).max().unwrap_or(1) as f64;
    let link_colours = link_colours(plan);
    for (index, link) in topology.links().iter().enumerate() {
        let width = (link.bytes_per_s as f64 / widest * WIDEST).max(0.5);
        // One colour, that of the tree with the largest share: graphviz dies of many on one curve.
        let widest_strand =
            link_colours.of(link.from, link.to).max_by(|one, other| one.1.total_cmp(&other.1));
        let colour = widest_strand.map_or("gray", |(colour, _)| colour);
        let narrow = if plan.is_narrow(link) { ", style=dashed" } else { "" };
        let _ = writeln!(
            out,
            "  {} -> {} [penwidth={width:.1}, color=\"{colour}\", tooltip=\"{}\", label=\"{:.0} %\"{narrow}];",
            name(link.from),
            name(link.to),
            rate_in_words(link.bytes_per_s as f64),
            plan.utilisation(index) * 100.0
        );
    }
    out.push_str("}\n");
    out
}

fn quoted(text: &str) -> String {
    let text = text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
    format!("\"{text}\"")
}

//! An analysis as one JSON object.

use pleach::graph::Dim;
use pleach::graph::partition::Crossing;
use pleach::graph::transfer::Transfer;
use serde_json::{Value, json};

use super::analyze::Analysis;
use crate::cli::output::rounded;

pub(super) fn object(analysis: &Analysis) -> Value {
    let Analysis { graph, partition, plans, .. } = analysis;
    json!({
        "model": analysis.model,
        "nodes": graph.nodes().len(),
        "tensors": graph.values().len(),
        "ranks": plans.len(),
        "parts": (0..plans.len()).map(|rank| part(analysis, rank)).collect::<Value>(),
        "crossings": partition.crossings().iter().map(|crossing| self::crossing(analysis, crossing)).collect::<Value>(),
        "operators_without_shapes": graph.operators_without_shapes(),
        "crossing_bytes": partition.crossing_bytes(),
        "lower_bound_bytes": plans.iter().map(|plan| plan.lower_bound).sum::<u64>(),
        "arena_bytes": plans.iter().map(|plan| plan.bytes).sum::<u64>(),
    })
}

fn part(analysis: &Analysis, rank: usize) -> Value {
    let part = &analysis.partition.parts()[rank];
    json!({
        "rank": rank,
        "nodes": part.nodes.len(),
        "weight_bytes": part.weight_bytes(&analysis.graph),
        "cost_share": rounded(analysis.share(rank), 4),
        "arena_bytes": analysis.plans[rank].bytes,
        "lower_bound_bytes": analysis.plans[rank].lower_bound,
    })
}

/// A dimension is a size, the name of a symbol, or null.
fn crossing(analysis: &Analysis, crossing: &Crossing) -> Value {
    let value = analysis.graph.value(crossing.value);
    let dim = |dim: &Dim| match dim {
        Dim::Fixed(size) => json!(size),
        Dim::Symbol(name) => json!(**name),
        Dim::Unknown => Value::Null,
    };
    let (transfer, bytes) = match crossing.transfer {
        Transfer::Static { bytes } => ("static", Some(bytes)),
        Transfer::Dynamic { .. } => ("dynamic", None),
    };
    json!({
        "tensor": value.name,
        "from": crossing.from,
        "to": crossing.to,
        "type": value.tensor.element.map(|element| element.name()),
        "shape": value.tensor.shape.as_ref().map(|dims| dims.iter().map(dim).collect::<Value>()),
        "bytes": bytes,
        "transfer": transfer,
        "space": crossing.space.to_string(),
    })
}

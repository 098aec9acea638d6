//! An analysis in words.

use pleach::graph::transfer::Transfer;
use pleach::graph::{Dim, TensorType};

use super::analyze::{Analysis, CostSource};
use crate::cli::output::{put, visible};

/// Most crossings that are listed.
const CROSSINGS_SHOWN: usize = 40;

/// Most operators that are named.
const OPERATORS_SHOWN: usize = 8;

pub(super) fn text(analysis: &Analysis) -> String {
    let mut out = String::new();
    let Analysis { graph, plans, .. } = analysis;
    let ranks = if plans.len() == 1 {
        "1 rank".to_owned()
    } else {
        format!("{} ranks by {}", plans.len(), visible(&analysis.place))
    };
    put!(
        out,
        "{}: {} nodes, {} tensors, on {ranks}\n",
        visible(&analysis.model),
        graph.nodes().len(),
        graph.values().len()
    );
    parts(&mut out, analysis);
    crossings(&mut out, analysis);
    let unsized_tensors = graph.values().iter().filter(|value| value.tensor.bytes().is_none()).count();
    if unsized_tensors > 0 {
        let symbols = graph.symbols();
        let remedy = symbols
            .first()
            .map_or(String::new(), |name| format!("; bind a symbol: --dim {}=SIZE", visible(name)));
        put!(out, "Unknown      {unsized_tensors} tensors have no fixed size and are in no arena{remedy}");
    }
    let operators = graph.operators_without_shapes();
    if !operators.is_empty() {
        let shown: Vec<_> = operators.iter().take(OPERATORS_SHOWN).map(|name| visible(name)).collect();
        let more = if operators.len() > OPERATORS_SHOWN { ", …" } else { "" };
        put!(
            out,
            "Operators    {}{more}: shapes of their results do not follow; declare them in the model",
            shown.join(", ")
        );
    }
    put!(out, "Bottleneck   {}", bottleneck(analysis));
    out
}

fn parts(out: &mut String, analysis: &Analysis) {
    put!(out, "Parts        rank  nodes     weights  share of cost       arena   its lower bound");
    for (rank, (part, plan)) in analysis.partition.parts().iter().zip(&analysis.plans).enumerate() {
        let bound = if plan.is_optimal() { "the same".to_owned() } else { size(plan.lower_bound) };
        put!(
            out,
            "             {rank:4} {:6} {:>11} {:12.1} % {:>11} {bound:>17}",
            part.nodes.len(),
            size(part.weight_bytes(&analysis.graph)),
            analysis.share(rank) * 100.0,
            size(plan.bytes)
        );
    }
}

fn crossings(out: &mut String, analysis: &Analysis) {
    let crossings = analysis.partition.crossings();
    if analysis.plans.len() == 1 {
        return;
    }
    put!(out, "Crossings    {} in {} transfers", size(analysis.partition.crossing_bytes()), crossings.len());
    for crossing in crossings.iter().take(CROSSINGS_SHOWN) {
        let value = analysis.graph.value(crossing.value);
        let transfer = match crossing.transfer {
            Transfer::Static { bytes } => format!("{}, static", size(bytes)),
            Transfer::Dynamic { is_in_signal: true, .. } => "dynamic".to_owned(),
            Transfer::Dynamic { .. } => "dynamic, metadata in a slot".to_owned(),
        };
        let shape = shape(&value.tensor);
        put!(
            out,
            "             {} -> {}  {}  {shape}  {transfer}, {}",
            crossing.from,
            crossing.to,
            visible(&value.name),
            crossing.space
        );
    }
    if let Some(more) = crossings.len().checked_sub(CROSSINGS_SHOWN).filter(|more| *more > 0) {
        put!(out, "             and {more} more (--json)");
    }
}

fn shape(tensor: &TensorType) -> String {
    let element = tensor.element.map_or("?", |element| element.name());
    let dims =
        tensor.shape.as_ref().map(|dims| dims.iter().map(Dim::to_string).collect::<Vec<_>>().join("x"));
    format!("{element} {}", dims.unwrap_or_else(|| "of unknown shape".to_owned()))
}

/// The rank that takes longest, and what it does in this time.
fn bottleneck(analysis: &Analysis) -> String {
    let mut received = vec![0_u64; analysis.plans.len()];
    for crossing in analysis.partition.crossings() {
        received[crossing.to as usize] += crossing.transfer.bytes();
    }
    let source = match analysis.cost_source {
        CostSource::Estimated => "estimated",
        CostSource::Measured => "by rates measured here",
    };
    let ms = |ns: f64| format!("{:.2} ms", ns / 1e6);
    let times = (0..analysis.plans.len()).flat_map(|rank| {
        let receiving = received[rank] as f64 / analysis.costs.transfer_bytes_per_s * 1e9;
        [(analysis.compute_ns[rank] as f64, rank, "computes"), (receiving, rank, "receives")]
    });
    let longest = times.max_by(|one, other| one.0.total_cmp(&other.0));
    let (time, rank, what) = longest.unwrap_or((0.0, 0, "computes"));
    format!("rank {rank} {what} for {} an iteration ({source})", ms(time))
}

/// Bytes in words.
pub(super) fn size(bytes: u64) -> String {
    match bytes {
        0..1_000 => format!("{bytes} B"),
        1_000..1_000_000 => format!("{:.1} kB", bytes as f64 / 1e3),
        1_000_000..1_000_000_000 => format!("{:.2} MB", bytes as f64 / 1e6),
        _ => format!("{:.2} GB", bytes as f64 / 1e9),
    }
}

//! A plan as a table for people and as JSON for programs.

use pleach_training::parallelize::{DESIGN_EFFICIENCY, Layer, LayerPlan, Machine, Plan, Shape, ideal_groups};
use serde_json::{Value, json};

use super::Outlook;
use crate::cli::output::{put, rounded, visible};

/// Decimal places of a time in JSON: nanoseconds.
const TIME_PLACES: i32 = 9;

/// Decimal places of other numbers in JSON.
const PLACES: i32 = 4;

/// The plan for a number of ranks as JSON.
pub(crate) fn object(outlook: &Outlook, plan: &Plan) -> Value {
    let layers = outlook.network.layers().iter().zip(plan.layers());
    let layers: Vec<Value> = layers.map(|(layer, split)| layer_object(outlook, plan, layer, split)).collect();
    json!({
        "model": outlook.network.name(),
        "machine": outlook.machine.name(),
        "batch": outlook.batch,
        "ranks": plan.ranks(),
        "speedup": rounded(plan.speedup(), PLACES),
        "bound": rounded(plan.bound(), PLACES),
        "step_s": rounded(plan.step_s(), TIME_PLACES),
        "paper": plan.paper(),
        "layers": layers,
    })
}

fn layer_object(outlook: &Outlook, plan: &Plan, layer: &Layer, split: &LayerPlan) -> Value {
    let time = |time_s: f64| rounded(time_s, TIME_PLACES);
    let images_per_rank = outlook.batch as f64 / f64::from(plan.ranks());
    json!({
        "name": layer.name(),
        "split": split.split().to_string(),
        "groups": split.groups(),
        "ideal_groups": rounded(ideal_groups(layer, split.is_first(), outlook.batch, plan.ranks()), PLACES),
        "bytes": split.activations().bytes + split.weights().bytes,
        "messages": split.activations().messages + split.weights().messages,
        "activation_bytes": split.activations().bytes,
        "weight_bytes": split.weights().bytes,
        "computing_s": time(split.computing_s()),
        "exposed_s": time(split.exposed_s()),
        "overlapped_s": time(split.overlapped_s()),
        "hidden_s": time(split.hidden_s()),
        "late_s": time(split.late_s()),
        "flop_per_byte": rounded(layer.flop_per_byte(images_per_rank), PLACES),
        "images_to_hide": rounded(images_to_hide(layer, &outlook.machine), PLACES),
    })
}

/// Images a rank from which a data parallel layer computes for longer than its weights are
/// exchanged, messages left out.
fn images_to_hide(layer: &Layer, machine: &Machine) -> f64 {
    let rates = machine.rates();
    rates.flop_per_s / rates.bytes_per_s / layer.flop_per_byte(1.0)
}

/// All plans as a table, the layers on most ranks, and the design point.
pub(crate) fn text(outlook: &Outlook) -> String {
    let mut out = String::new();
    let layers = outlook.network.layers();
    let sum = |of: fn(&Layer) -> u64| layers.iter().map(of).sum::<u64>() as f64;
    put!(
        out,
        "# {} on {}: {} images a minibatch; {} layers, {:.1} M weights, {:.2} G multiply-adds an image",
        visible(outlook.network.name()),
        visible(outlook.machine.name()),
        outlook.batch,
        layers.len(),
        sum(Layer::weights) / 1e6,
        sum(Layer::multiply_adds) / 1e9
    );
    put!(
        out,
        "{:>6} {:>11} {:>9} {:>9} {:>9} {:>9} {:>10} {:>12} {:>8}",
        "ranks",
        "step ms",
        "speed-up",
        "of ideal",
        "bound",
        "paper",
        "computing",
        "activations",
        "waiting"
    );
    for plan in &outlook.plans {
        put!(out, "{}", plan_row(plan));
    }
    put!(out, "");
    layer_table(&mut out, outlook);
    if let Some(words) = design_in_words(outlook) {
        put!(out, "# {words}");
    }
    for plan in &outlook.plans {
        if let Some(paper) = plan.paper() {
            put!(
                out,
                "# {} ranks: the paper reports {paper}; predicted {:.1}, {:.2} times that, with constants fitted to \
                 its five speed-ups",
                plan.ranks(),
                plan.speedup(),
                plan.speedup() / paper
            );
        }
    }
    out
}

fn plan_row(plan: &Plan) -> String {
    let share = |time_s: f64| format!("{:.1} %", 100.0 * time_s / plan.step_s());
    let paper = plan.paper().map_or_else(|| "-".to_owned(), |paper| paper.to_string());
    format!(
        "{:>6} {:>11.3} {:>9.1} {:>9} {:>9.1} {paper:>9} {:>10} {:>12} {:>8}",
        plan.ranks(),
        plan.step_s() * 1e3,
        plan.speedup(),
        format!("{:.1} %", 100.0 * plan.efficiency()),
        plan.bound(),
        share(plan.computing_s()),
        share(plan.exposed_s()),
        share(plan.delay_s())
    )
}

/// The layers on most ranks; times in milliseconds.
fn layer_table(out: &mut String, outlook: &Outlook) {
    let plan = outlook.largest();
    put!(
        out,
        "# layers on {} ranks, times in ms, bytes and messages that a rank sends in a step",
        plan.ranks()
    );
    put!(
        out,
        "{:<10} {:<10} {:>7} {:>12} {:>9} {:>10} {:>12} {:>9} {:>9} {:>8}",
        "layer",
        "split",
        "ideal",
        "bytes",
        "messages",
        "computing",
        "activations",
        "weights",
        "hidden",
        "late"
    );
    for (layer, split) in outlook.network.layers().iter().zip(plan.layers()) {
        let ms = |time_s: f64| format!("{:.3}", time_s * 1e3);
        let ideal = match layer.shape() {
            Shape::Convolution { .. } => "-".to_owned(),
            Shape::FullyConnected { .. } => {
                format!("{:.2}", ideal_groups(layer, split.is_first(), outlook.batch, plan.ranks()))
            }
        };
        put!(
            out,
            "{:<10} {:<10} {ideal:>7} {:>12} {:>9} {:>10} {:>12} {:>9} {:>9} {:>8}",
            visible(layer.name()),
            split.split().to_string(),
            split.activations().bytes + split.weights().bytes,
            split.activations().messages + split.weights().messages,
            ms(split.computing_s()),
            ms(split.exposed_s()),
            ms(split.overlapped_s()),
            ms(split.hidden_s()),
            ms(split.late_s())
        );
    }
}

/// The design point in a sentence, if there is one.
pub(crate) fn design_in_words(outlook: &Outlook) -> Option<String> {
    let ranks = outlook.design_point?;
    let images = outlook.batch.div_ceil(u64::from(ranks));
    Some(format!(
        "optimal design point: {ranks} ranks of {images} images, the most (by doubling) that reach {:.0} % of ideal",
        100.0 * DESIGN_EFFICIENCY
    ))
}

//! `pleach train --schemes`: each scheme with its places in the taxonomy, what it guarantees, and
//! what becomes of a training when a rank ends.

use pleach_training::{AfterLoss, Scheme};
use serde_json::json;

use crate::cli::CommandError;
use crate::cli::output::{print, print_json, put};

/// Prints all schemes, with their usual parameters.
pub(crate) fn print_all(as_json: bool) -> Result<(), CommandError> {
    if as_json {
        return Scheme::ALL.iter().try_for_each(|scheme| print_json("schemes", &row(scheme)));
    }
    let mut out = String::new();
    put!(
        out,
        "{:<12} {:<11} {:<13} {:<12} {:<10} {:<10} {:<11}",
        "scheme",
        "parallelism",
        "state",
        "timing",
        "exchange",
        "rule",
        "compression"
    );
    for scheme in Scheme::ALL {
        let axes = scheme.axes();
        put!(
            out,
            "{:<12} {:<11} {:<13} {:<12} {:<10} {:<10} {:<11}",
            scheme.name(),
            axes.parallelism.name(),
            axes.state.name(),
            axes.timing.name(),
            axes.exchange.name(),
            axes.rule.name(),
            axes.compression.name()
        );
    }
    for scheme in Scheme::ALL {
        put!(out, "{}: {}", scheme.text_with_all_keys(), scheme.guarantee());
    }
    for scheme in Scheme::ALL {
        match scheme.after_loss() {
            AfterLoss::GoesOn { lost } => {
                put!(
                    out,
                    "{} takes in processes, and goes on without a rank; then this ends: {lost}",
                    scheme.name()
                );
            }
            AfterLoss::Refused { reason, instead } => {
                put!(out, "{} does not train in a session, {instead} does: {reason}", scheme.name());
            }
        }
    }
    print("schemes", &out)
}

fn row(scheme: &Scheme) -> serde_json::Value {
    let axes = scheme.axes();
    json!({
        "scheme": scheme.name(),
        "text": scheme.text_with_all_keys(),
        "parallelism": axes.parallelism.name(),
        "state": axes.state.name(),
        "timing": axes.timing.name(),
        "exchange": axes.exchange.name(),
        "rule": axes.rule.name(),
        "compression": axes.compression.name(),
        "guarantee": scheme.guarantee(),
        "goes_on_without_a_rank": matches!(scheme.after_loss(), AfterLoss::GoesOn { .. }),
    })
}

//! Metrics that the program adds to the metrics of its group.
//!
//! Any thread sets a [`Metric`], and the thread that serves the group's metrics reads it.

use std::fmt::Write;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use pleach_transport::mutex::lock;
use pleach_vocabulary::Rank;

use super::prometheus::head;

/// How a metric changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MetricKind {
    /// The number never decreases.
    Counter,
    /// The number increases and decreases.
    Gauge,
}

#[derive(Debug)]
struct Number {
    name: &'static str,
    kind: MetricKind,
    help: &'static str,
    /// The bits of an `f64`; the bits of NaN before the metric was set. Relaxed: no other memory
    /// depends on the number.
    bits: AtomicU64,
}

/// A metric of the program; see [`Group::metric`](crate::Group::metric). Clones share the number.
#[derive(Clone, Debug)]
pub struct Metric(Arc<Number>);

impl Metric {
    /// Sets the number. Any thread may do so, at any time, without waiting.
    pub fn set(&self, value: f64) {
        self.0.bits.store(value.to_bits(), Ordering::Relaxed);
    }

    /// The number; `None` before it was set.
    #[must_use]
    pub fn value(&self) -> Option<f64> {
        // Pairs with nothing: no other memory depends on the number.
        let value = f64::from_bits(self.0.bits.load(Ordering::Relaxed));
        (!value.is_nan()).then_some(value)
    }
}

/// The metrics of a group's program. Each name occurs once.
#[derive(Debug, Default)]
pub(crate) struct ProgramMetrics(Mutex<Vec<Metric>>);

impl ProgramMetrics {
    /// The metric with this name, which is made if it does not exist.
    pub(crate) fn metric(&self, name: &'static str, kind: MetricKind, help: &'static str) -> Metric {
        let mut metrics = lock(&self.0);
        if let Some(found) = metrics.iter().find(|metric| metric.0.name == name) {
            return found.clone();
        }
        let bits = AtomicU64::new(f64::NAN.to_bits());
        let metric = Metric(Arc::new(Number { name, kind, help, bits }));
        metrics.push(metric.clone());
        metric
    }

    /// The metrics that were set, in Prometheus' text form.
    pub(crate) fn to_prometheus(&self, rank: Rank) -> String {
        let mut text = String::new();
        for metric in lock(&self.0).iter() {
            let Some(value) = metric.value() else { continue };
            let Number { name, kind, help, .. } = &*metric.0;
            let kind = match kind {
                MetricKind::Counter => "counter",
                MetricKind::Gauge => "gauge",
            };
            // Writing to a string cannot fail.
            let _ = head(&mut text, name, kind, help);
            let _ = writeln!(text, "pleach_{name}{{rank=\"{rank}\"}} {value}");
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_is_shown_once_it_was_set_and_a_name_has_one_number() {
        let metrics = ProgramMetrics::default();
        let steps = metrics.metric("steps_total", MetricKind::Counter, "Steps.");
        assert_eq!((metrics.to_prometheus(3), steps.value()), (String::new(), None));
        metrics.metric("steps_total", MetricKind::Counter, "Steps.").set(7.0);
        metrics.metric("spread", MetricKind::Gauge, "Spread.").set(0.5);
        assert_eq!(steps.value(), Some(7.0));
        assert_eq!(
            metrics.to_prometheus(3),
            "# HELP pleach_steps_total Steps.\n# TYPE pleach_steps_total counter\n\
             pleach_steps_total{rank=\"3\"} 7\n\
             # HELP pleach_spread Spread.\n# TYPE pleach_spread gauge\npleach_spread{rank=\"3\"} 0.5\n"
        );
    }
}

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

#[derive(Debug)]
struct Histogram {
    name: &'static str,
    help: &'static str,
    bounds: &'static [u64],
    /// By bin, one more than there are bounds. Relaxed, as the sum: whoever reads while they are
    /// set sees some of before.
    counts: Box<[AtomicU64]>,
    sum: AtomicU64,
}

/// How many things of the program are of which size; see
/// [`Group::histogram_metric`](crate::Group::histogram_metric). Clones are one histogram.
#[derive(Clone, Debug)]
pub struct HistogramMetric(Arc<Histogram>);

impl HistogramMetric {
    /// Sets how many things there are in each bin, and the sum of their sizes. Any thread may do
    /// so, at any time, without waiting. Counts without a bin are left out.
    pub fn set(&self, counts: &[u64], sum: u64) {
        // Relaxed: see the fields.
        for (bin, count) in self.0.counts.iter().zip(counts) {
            bin.store(*count, Ordering::Relaxed);
        }
        self.0.sum.store(sum, Ordering::Relaxed);
    }

    /// As Prometheus reads it; nothing before there is something in a bin.
    fn to_prometheus(&self, text: &mut String, rank: Rank) {
        let Histogram { name, help, bounds, counts, sum } = &*self.0;
        // Relaxed: see the fields.
        let counts = counts.iter().map(|count| count.load(Ordering::Relaxed));
        let up_to: Vec<u64> = counts
            .scan(0, |sum, count| {
                *sum += count;
                Some(*sum)
            })
            .collect();
        let Some(all) = up_to.last().filter(|all| **all > 0) else { return };
        // Writing to a string cannot fail.
        let _ = head(text, name, "histogram", help);
        let bounds = bounds.iter().map(u64::to_string).chain(["+Inf".to_owned()]);
        for (bound, count) in bounds.zip(&up_to) {
            let _ = writeln!(text, "pleach_{name}_bucket{{rank=\"{rank}\",le=\"{bound}\"}} {count}");
        }
        let sum = sum.load(Ordering::Relaxed);
        let _ = writeln!(text, "pleach_{name}_sum{{rank=\"{rank}\"}} {sum}");
        let _ = writeln!(text, "pleach_{name}_count{{rank=\"{rank}\"}} {all}");
    }
}

/// The metrics and histograms of a group's program. Each name occurs once.
#[derive(Debug, Default)]
pub(crate) struct ProgramMetrics(Mutex<Vec<Metric>>, Mutex<Vec<HistogramMetric>>);

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

    /// The histogram of this name. `bounds` grow.
    pub(crate) fn histogram(
        &self,
        name: &'static str,
        bounds: &'static [u64],
        help: &'static str,
    ) -> HistogramMetric {
        let mut histograms = lock(&self.1);
        if let Some(found) = histograms.iter().find(|histogram| histogram.0.name == name) {
            return found.clone();
        }
        let counts = (0..=bounds.len()).map(|_| AtomicU64::new(0)).collect();
        let histogram =
            HistogramMetric(Arc::new(Histogram { name, help, bounds, counts, sum: AtomicU64::new(0) }));
        histograms.push(histogram.clone());
        histogram
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
        lock(&self.1).iter().for_each(|histogram| histogram.to_prometheus(&mut text, rank));
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bins_are_counted_up_to_each_bound() {
        let metrics = ProgramMetrics::default();
        let sizes = metrics.histogram("sizes", &[0, 4], "Sizes.");
        assert_eq!(metrics.to_prometheus(1), "");
        metrics.histogram("sizes", &[0, 4], "Sizes.").set(&[3, 0, 2], 14);
        let text = "# HELP pleach_sizes Sizes.\n# TYPE pleach_sizes histogram\n\
             pleach_sizes_bucket{rank=\"1\",le=\"0\"} 3\npleach_sizes_bucket{rank=\"1\",le=\"4\"} 3\n\
             pleach_sizes_bucket{rank=\"1\",le=\"+Inf\"} 5\n\
             pleach_sizes_sum{rank=\"1\"} 14\npleach_sizes_count{rank=\"1\"} 5\n";
        assert_eq!(metrics.to_prometheus(1), text);
        sizes.set(&[4], 14);
        assert!(metrics.to_prometheus(1).contains("_count{rank=\"1\"} 6\n"));
    }

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

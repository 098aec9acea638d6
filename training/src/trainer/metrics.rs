//! The progress of a training among the metrics of its group.

use pleach_collectives::{Group, HistogramMetric, Metric, MetricKind};

use super::Progress;
use crate::interpreter::Staleness;

/// The numbers of the newest training of a group.
pub(crate) struct TrainingMetrics {
    steps: Metric,
    time: Metric,
    waiting: Metric,
    communicating: Metric,
    bytes: Metric,
    staleness: Metric,
    staleness_max: Metric,
    staleness_histogram: HistogramMetric,
    spread: Metric,
}

impl TrainingMetrics {
    pub(crate) fn new(group: &Group) -> Self {
        let counter = |name, help| group.metric(name, MetricKind::Counter, help);
        let gauge = |name, help| group.metric(name, MetricKind::Gauge, help);
        Self {
            steps: counter("training_steps_total", "Steps of the training that is under way."),
            time: counter("training_seconds_total", "Time since its first step."),
            waiting: counter("training_waiting_seconds_total", "Time in which there was nothing to compute."),
            communicating: counter(
                "training_communicating_seconds_total",
                "Time in which an operation was under way, at most.",
            ),
            bytes: counter("training_bytes_total", "Bytes of vectors that were averaged, read and written."),
            staleness: gauge(
                "training_staleness_mean",
                "Steps since the last exchange, where gradients were computed: the mean over all steps.",
            ),
            staleness_max: gauge("training_staleness_max", "The most steps since the last exchange."),
            staleness_histogram: group.histogram_metric(
                "training_staleness",
                &Staleness::BOUNDS,
                "Steps since the last exchange, where gradients were computed: of how many steps each.",
            ),
            spread: gauge(
                "training_spread",
                "Distance of this rank's parameters from the mean of all ranks, as a share of the mean's length.",
            ),
        }
    }

    pub(crate) fn set(&self, progress: &Progress) {
        self.steps.set(progress.steps as f64);
        self.time.set(progress.time.as_secs_f64());
        self.waiting.set(progress.waiting.as_secs_f64());
        self.communicating.set(progress.communicating.as_secs_f64());
        self.bytes.set(progress.bytes as f64);
        self.staleness.set(progress.staleness.mean());
        self.staleness_max.set(progress.staleness.most() as f64);
        self.staleness_histogram.set(&progress.staleness.histogram(), progress.staleness.sum());
        if let Some(spread) = progress.spread {
            self.spread.set(spread);
        }
    }
}

//! A report in Prometheus' text form (text format 0.0.4).

use std::fmt::Write;
use std::time::Duration;

use super::report::Report;

/// Upper edges of the histogram of arrival skew, in microseconds.
const EDGES_US: [u64; 12] =
    [10, 30, 100, 300, 1000, 3000, 10_000, 30_000, 100_000, 300_000, 1_000_000, 10_000_000];

impl Report {
    /// The report in Prometheus' text form. Times are in seconds; every sample is labelled with the
    /// rank.
    #[must_use]
    pub fn to_prometheus(&self) -> String {
        let mut text = String::new();
        // Writing to a string cannot fail.
        let _ = self.write_prometheus(&mut text);
        text
    }

    fn write_prometheus(&self, text: &mut String) -> std::fmt::Result {
        let rank = self.rank;
        head(text, "world_size", "gauge", "Ranks of the group.")?;
        writeln!(text, "pleach_world_size{{rank=\"{rank}\"}} {}", self.world_size)?;
        head(text, "age_seconds", "gauge", "Since the group was made.")?;
        writeln!(text, "pleach_age_seconds{{rank=\"{rank}\"}} {}", self.age.as_secs_f64())?;
        head(text, "failed", "gauge", "1 when the group has failed.")?;
        writeln!(text, "pleach_failed{{rank=\"{rank}\"}} {}", u8::from(self.failure.is_some()))?;
        head(text, "under_way", "gauge", "Collectives begun and not completed.")?;
        writeln!(text, "pleach_under_way{{rank=\"{rank}\"}} {}", self.under_way)?;
        head(
            text,
            "waits_for",
            "gauge",
            "1 for the rank that is waited for, once that has taken a millisecond.",
        )?;
        if let Some(peer) = self.waits_for {
            writeln!(text, "pleach_waits_for{{rank=\"{rank}\",peer=\"{peer}\"}} 1")?;
        }
        self.write_shapes(text)?;
        self.write_peers(text)?;
        self.write_rounds(text)
    }

    fn write_rounds(&self, text: &mut String) -> std::fmt::Result {
        let (rank, Some(rounds)) = (self.rank, &self.rounds) else { return Ok(()) };
        for (name, what, number) in [
            ("rounds_total", "Rounds of partial all-reduces that have ended.", rounds.rounds),
            ("late_total", "Contributions of this rank that came too late for their round.", rounds.late),
            ("carried_total", "Late contributions that were carried to a later round.", rounds.carried),
            ("dropped_total", "Contributions of this rank that are in no round.", rounds.dropped),
            (
                "corrected_total",
                "Late contributions that were given to the correction of a later round.",
                rounds.corrected,
            ),
            ("missed_total", "Results of rounds that this rank never saw.", rounds.missed),
        ] {
            head(text, name, "counter", what)?;
            writeln!(text, "pleach_{name}{{rank=\"{rank}\"}} {number}")?;
        }
        head(text, "counted_total", "counter", "Rounds that the peer's contribution is in.")?;
        for (peer, counted) in rounds.counted.iter().enumerate() {
            writeln!(text, "pleach_counted_total{{rank=\"{rank}\",peer=\"{peer}\"}} {counted}")?;
        }
        Ok(())
    }

    fn write_shapes(&self, text: &mut String) -> std::fmt::Result {
        type Value = fn(&super::ShapeReport) -> f64;
        let columns: [(&str, &str, Value); 4] = [
            ("calls_total", "Calls that have ended well.", |shape| shape.calls as f64),
            ("waited_calls_total", "Calls that had to wait.", |shape| shape.waited_calls as f64),
            ("bytes_total", "Bytes of these calls' inputs or outputs.", |shape| shape.bytes as f64),
            ("call_seconds_total", "Time in these calls.", |shape| shape.time.as_secs_f64()),
        ];
        for (name, what, value) in columns {
            head(text, name, "counter", what)?;
            for shape in &self.shapes {
                writeln!(
                    text,
                    "pleach_{name}{{rank=\"{}\",collective=\"{}\",algorithm=\"{}\",bytes_max=\"{}\"}} {}",
                    self.rank,
                    shape.collective,
                    escaped(&shape.algorithm),
                    shape.bytes_max,
                    value(shape)
                )?;
            }
        }
        Ok(())
    }

    fn write_peers(&self, text: &mut String) -> std::fmt::Result {
        let rank = self.rank;
        head(text, "last_total", "counter", "Calls in which the peer was the last, by 10 us or more.")?;
        for peer in &self.peers {
            writeln!(text, "pleach_last_total{{rank=\"{rank}\",peer=\"{}\"}} {}", peer.rank, peer.last)?;
        }
        let what = "How much later than this rank the peer made calls in which this rank waited.";
        head(text, "arrival_skew_seconds", "histogram", what)?;
        for peer in &self.peers {
            let (labels, skew) = (format!("rank=\"{rank}\",peer=\"{}\"", peer.rank), &peer.arrival_skew);
            for edge_us in EDGES_US {
                let count = skew.at_most(Duration::from_micros(edge_us));
                let edge_s = edge_us as f64 / 1e6;
                writeln!(text, "pleach_arrival_skew_seconds_bucket{{{labels},le=\"{edge_s}\"}} {count}")?;
            }
            let count = skew.count();
            writeln!(text, "pleach_arrival_skew_seconds_bucket{{{labels},le=\"+Inf\"}} {count}")?;
            writeln!(text, "pleach_arrival_skew_seconds_sum{{{labels}}} {}", skew.sum().as_secs_f64())?;
            writeln!(text, "pleach_arrival_skew_seconds_count{{{labels}}} {count}")?;
        }
        head(
            text,
            "longest_arrival_skew_seconds",
            "gauge",
            "The most that the peer was ever later than this rank.",
        )?;
        for peer in &self.peers {
            let longest_s = peer.arrival_skew.longest().as_secs_f64();
            writeln!(
                text,
                "pleach_longest_arrival_skew_seconds{{rank=\"{rank}\",peer=\"{}\"}} {longest_s}",
                peer.rank
            )?;
        }
        Ok(())
    }
}

pub(crate) fn head(text: &mut String, name: &str, kind: &str, what: &str) -> std::fmt::Result {
    writeln!(text, "# HELP pleach_{name} {what}\n# TYPE pleach_{name} {kind}")
}

/// Escapes the value of a label.
fn escaped(value: &str) -> String {
    value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

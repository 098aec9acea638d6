//! What an endpoint counts.

use std::fmt;
use std::fmt::Write as _;
use std::time::Duration;

/// Tensors and their bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TensorCount {
    /// Tensors.
    pub tensors: u64,
    /// All their bytes.
    pub bytes: u64,
}

impl TensorCount {
    pub(crate) fn add(&mut self, bytes: u64) {
        self.tensors += 1;
        self.bytes += bytes;
    }
}

/// Why a tensor, or a long field of a message of gRPC, goes inline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum InlineReason {
    /// The other program cannot read this one's memory, or not yet.
    NoRegions,
    /// The messages of its call are compressed.
    Compressed,
    /// It does not lie in lendable memory.
    NotLendable,
    /// A limit: of leases, of bytes that are lent, or of fields of a message.
    Limit,
    /// Its call is over.
    CallOver,
}

impl InlineReason {
    /// All of them. A value as a number is its place here.
    pub const ALL: [Self; 5] =
        [Self::NoRegions, Self::Compressed, Self::NotLendable, Self::Limit, Self::CallOver];

    /// Its label in metrics.
    #[must_use]
    pub fn label(self) -> &'static str {
        match self {
            Self::NoRegions => "no_regions",
            Self::Compressed => "compressed",
            Self::NotLendable => "not_lendable",
            Self::Limit => "limit",
            Self::CallOver => "call_over",
        }
    }
}

impl fmt::Display for InlineReason {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::NoRegions => "the other program cannot read this one's memory",
            Self::Compressed => "the messages of its call are compressed",
            Self::NotLendable => "it does not lie in lendable memory",
            Self::Limit => "a limit of leases, lent bytes or fields is reached",
            Self::CallOver => "its call is over",
        })
    }
}

/// Upper edges of latencies, in nanoseconds: the steps of Prometheus' own edges, from 1 µs on.
const EDGES_NS: [u64; 22] = [
    1_000,
    2_500,
    5_000,
    10_000,
    25_000,
    50_000,
    100_000,
    250_000,
    500_000,
    1_000_000,
    2_500_000,
    5_000_000,
    10_000_000,
    25_000_000,
    50_000_000,
    100_000_000,
    250_000_000,
    500_000_000,
    1_000_000_000,
    2_500_000_000,
    5_000_000_000,
    10_000_000_000,
];

/// How long something took, over many times.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Latencies {
    /// Times up to each edge and above the one before it; the last ones are above all edges.
    bins: [u64; EDGES_NS.len() + 1],
    total: Duration,
}

impl Latencies {
    pub(crate) fn add(&mut self, time: Duration) {
        let time_ns = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        self.bins[EDGES_NS.partition_point(|edge_ns| *edge_ns < time_ns)] += 1;
        self.total = self.total.saturating_add(time);
    }

    /// How many times.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.bins.iter().sum()
    }

    /// All of them together.
    #[must_use]
    pub fn total(&self) -> Duration {
        self.total
    }

    fn write(&self, name: &str, text: &mut String) {
        let _ = writeln!(text, "# TYPE {name} histogram");
        let mut count = 0;
        for (edge_ns, bin) in EDGES_NS.iter().zip(&self.bins) {
            count += bin;
            let edge_s = Duration::from_nanos(*edge_ns).as_secs_f64();
            let _ = writeln!(text, "{name}_bucket{{le=\"{edge_s}\"}} {count}");
        }
        let (count, total_s) = (self.count(), self.total.as_secs_f64());
        let _ = writeln!(
            text,
            "{name}_bucket{{le=\"+Inf\"}} {count}\n{name}_sum {total_s}\n{name}_count {count}"
        );
    }
}

/// What an endpoint counts, and what it holds now.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ExchangeCounts {
    /// Received in place.
    pub in_place: TensorCount,
    /// Received into this program's own memory.
    pub copied: TensorCount,
    /// Received inline.
    pub inline: TensorCount,
    /// Lent to peers.
    pub sent_in_place: TensorCount,
    /// Lent to peers that read them into their own memory.
    pub sent_copied: TensorCount,
    /// Sent inline: tensors, and long fields of messages of gRPC.
    pub sent_inline: TensorCount,
    /// The same by reason: see [`ExchangeCounts::sent_inline_for`].
    pub(crate) inline_reasons: [TensorCount; InlineReason::ALL.len()],
    /// How long receives of peers' tensors took that got one: from the request on, so with the time
    /// until the peer sent it.
    pub receive_latencies: Latencies,
    /// How long it took until fields by reference could be read, from their message on.
    pub field_latencies: Latencies,
    /// Links on which tensors go inline.
    pub inline_links: u64,
    /// Links that are open.
    pub links: u64,
    /// Leases of peers that are open.
    pub leases: u64,
    /// The bytes of all tensors that wait for a receiver.
    pub bytes_held: u64,
    /// The bytes of all buffers that are lent.
    pub bytes_lent: u64,
    /// The bytes that lendable memory has touched.
    pub arena_bytes: u64,
}

impl ExchangeCounts {
    /// What was sent inline for this reason.
    #[must_use]
    pub fn sent_inline_for(&self, reason: InlineReason) -> TensorCount {
        self.inline_reasons[reason as usize]
    }

    pub(crate) fn add_inline(&mut self, reason: InlineReason, bytes: u64) {
        self.sent_inline.add(bytes);
        self.inline_reasons[reason as usize].add(bytes);
    }

    /// In the text form of Prometheus.
    #[must_use]
    pub fn to_text(&self) -> String {
        let mut text = String::new();
        let ways = [
            ("received", "in_place", self.in_place),
            ("received", "copied", self.copied),
            ("received", "inline", self.inline),
            ("sent", "in_place", self.sent_in_place),
            ("sent", "copied", self.sent_copied),
            ("sent", "inline", self.sent_inline),
        ];
        for (unit, value) in [("tensors", 0), ("bytes", 1)] {
            let name = format!("pleach_exchange_{unit}_total");
            let _ = writeln!(text, "# TYPE {name} counter");
            for (direction, way, count) in ways {
                let count = [count.tensors, count.bytes][value];
                let _ = writeln!(text, "{name}{{direction=\"{direction}\",way=\"{way}\"}} {count}");
            }
        }
        let name = "pleach_exchange_inline_total";
        let _ = writeln!(text, "# TYPE {name} counter");
        for reason in InlineReason::ALL {
            let (label, count) = (reason.label(), self.sent_inline_for(reason).tensors);
            let _ = writeln!(text, "{name}{{reason=\"{label}\"}} {count}");
        }
        self.receive_latencies.write("pleach_exchange_receive_seconds", &mut text);
        self.field_latencies.write("pleach_exchange_field_seconds", &mut text);
        for (name, value) in [
            ("links", self.links),
            ("inline_links", self.inline_links),
            ("leases", self.leases),
            ("held_bytes", self.bytes_held),
            ("lent_bytes", self.bytes_lent),
            ("arena_bytes", self.arena_bytes),
        ] {
            let _ = writeln!(text, "# TYPE pleach_exchange_{name} gauge\npleach_exchange_{name} {value}");
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_line_is_a_comment_or_a_name_with_a_number() {
        let mut counts = ExchangeCounts { links: 3, ..ExchangeCounts::default() };
        counts.inline.add(7);
        counts.add_inline(InlineReason::Limit, 5);
        [0, 2_500, 2_501, u64::MAX]
            .into_iter()
            .for_each(|time_ns| counts.receive_latencies.add(Duration::from_nanos(time_ns)));
        let text = counts.to_text();
        assert!(text.contains("pleach_exchange_bytes_total{direction=\"received\",way=\"inline\"} 7\n"));
        assert!(text.contains("\npleach_exchange_links 3\n"));
        assert!(text.contains("\npleach_exchange_inline_total{reason=\"limit\"} 1\n"));
        assert_eq!(counts.sent_inline, counts.sent_inline_for(InlineReason::Limit));
        for (edge, count) in [("0.000001", 1), ("0.0000025", 2), ("0.000005", 3), ("10", 3), ("+Inf", 4)] {
            let line = format!("\npleach_exchange_receive_seconds_bucket{{le=\"{edge}\"}} {count}\n");
            assert!(text.contains(&line), "{line}{text}");
        }
        assert!(text.contains("\npleach_exchange_receive_seconds_count 4\n"));
        for line in text.lines().filter(|line| !line.starts_with("# TYPE ")) {
            let (_, number) = line.rsplit_once(' ').expect("a number behind a space");
            assert!(number.parse::<f64>().is_ok(), "{line}");
        }
    }

    #[test]
    fn each_reason_has_its_own_place_and_label() {
        let labels = InlineReason::ALL.map(InlineReason::label);
        for (place, reason) in InlineReason::ALL.into_iter().enumerate() {
            assert_eq!(reason as usize, place);
            assert_eq!(labels.iter().position(|label| *label == reason.label()), Some(place));
        }
        assert!(EDGES_NS.is_sorted());
    }
}

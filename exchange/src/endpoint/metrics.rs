//! What an endpoint counts.

use std::fmt::Write as _;

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
    /// Sent inline.
    pub sent_inline: TensorCount,
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
        let text = counts.to_text();
        assert!(text.contains("pleach_exchange_bytes_total{direction=\"received\",way=\"inline\"} 7\n"));
        assert!(text.contains("\npleach_exchange_links 3\n"));
        for line in text.lines().filter(|line| !line.starts_with("# TYPE ")) {
            let (_, number) = line.rsplit_once(' ').expect("a number behind a space");
            assert!(number.parse::<u64>().is_ok(), "{line}");
        }
    }
}

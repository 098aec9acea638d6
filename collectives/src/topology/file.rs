//! A topology as a TOML file that people write.
//!
//! ```toml
//! [[node]]
//! name = "g0"            # ranks are numbered in file order
//! kind = "rank"
//! [[node]]
//! name = "s0"
//! kind = "switch"
//! [[link]]
//! from = "g0"
//! to = "s0"
//! bandwidth = 25         # GB/s in each direction, rounded to 1 byte/s
//! latency_us = 1.0       # this is the default
//! ```
//!
//! A link with `duplex = false` goes in one direction only. Parallel links add up. Before the nodes may stand
//! `pcie_ring = 12.5`, what a ring through the host's PCIe carries in GB/s.

use std::fmt::Write as _;

use crate::topology::decimal::{GB_PER_S_DECIMALS, US_DECIMALS, written};
use crate::topology::{LATENCY_NS, Link, NodeKind, Topology};

/// Most lines that are written for the parallel links of a pair; more of them are written as one that carries as much.
const PARALLEL_LINKS_WRITTEN_MAX: u32 = 64;

impl Topology {
    /// This topology as the text of a TOML file, which reads as the same topology. (Only where a link stands for more than 64
    /// parallel ones is their number lost.)
    #[must_use]
    pub fn to_toml(&self) -> String {
        let mut text = String::new();
        // Writing to a string cannot fail.
        let _ = self.write_toml(&mut text);
        text
    }

    fn write_toml(&self, text: &mut String) -> std::fmt::Result {
        if let Some(bytes_per_s) = self.pcie_ring_bytes_per_s() {
            writeln!(text, "pcie_ring = {}", written(bytes_per_s, GB_PER_S_DECIMALS))?;
        }
        for node in self.nodes() {
            let kind = match node.kind {
                NodeKind::Rank => "rank",
                NodeKind::Switch => "switch",
            };
            writeln!(text, "[[node]]\nname = {}\nkind = \"{kind}\"", quoted(&node.name))?;
        }
        for link in self.links() {
            match self.link(link.to, link.from) {
                Some(back) if is_same_both_ways(link, back) => {
                    if link.from < link.to {
                        self.write_link(text, link, true)?;
                    }
                }
                _ => self.write_link(text, link, false)?,
            }
        }
        Ok(())
    }

    fn write_link(&self, text: &mut String, link: &Link, duplex: bool) -> std::fmt::Result {
        let lines = match u64::from(link.count) {
            many if many > u64::from(PARALLEL_LINKS_WRITTEN_MAX) || many > link.bytes_per_s => 1,
            few => few.max(1),
        };
        for line in 0..lines {
            let rest = if line == 0 { link.bytes_per_s % lines } else { 0 };
            let bandwidth = written(link.bytes_per_s / lines + rest, GB_PER_S_DECIMALS);
            let (from, to) = (quoted(self.name(link.from)), quoted(self.name(link.to)));
            writeln!(text, "[[link]]\nfrom = {from}\nto = {to}\nbandwidth = {bandwidth}")?;
            if link.latency_ns != LATENCY_NS {
                writeln!(text, "latency_us = {}", written(link.latency_ns, US_DECIMALS))?;
            }
            if !duplex {
                writeln!(text, "duplex = false")?;
            }
        }
        Ok(())
    }
}

fn is_same_both_ways(link: &Link, back: &Link) -> bool {
    let carries = |link: &Link| (link.bytes_per_s, link.latency_ns, link.count);
    carries(link) == carries(back)
}

/// As a basic string.
fn quoted(name: &str) -> String {
    let mut text = String::with_capacity(name.len() + 2);
    text.push('"');
    for character in name.chars() {
        match character {
            '"' | '\\' => text.extend(['\\', character]),
            _ if character.is_control() => {
                let _ = write!(text, "\\u{:04X}", u32::from(character));
            }
            _ => text.push(character),
        }
    }
    text.push('"');
    text
}

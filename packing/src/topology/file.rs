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
//! A link with `duplex = false` goes in one direction only. The bandwidths of parallel links add
//! up. `pcie_ring = 12.5` may stand before the nodes. It is the bandwidth of a ring through the
//! host's PCIe, in GB/s.

use std::collections::HashMap;
use std::fmt::{self, Write as _};
use std::ops::Range;

use serde::Deserialize;
use serde::de::{Deserializer, Visitor};
use toml::Spanned;

use crate::topology::decimal::{NumberFault, US_DECIMALS, bytes_per_s, gb_per_s, scaled, written};
use crate::topology::text::{TextError, TextFault, Texts};
use crate::topology::{
    BANDWIDTH_SUM_MAX, LATENCY_NS, LINKS_MAX, Link, NODES_MAX, NodeId, NodeKind, Topology, TopologyError,
};

#[cfg(test)]
mod tests;

/// Largest number of lines for the parallel links of a pair. If there are more links, one line with
/// their total bandwidth is written.
const PARALLEL_LINKS_WRITTEN_MAX: u32 = 64;

/// The whole file.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Document {
    pcie_ring: Option<Spanned<Number>>,
    #[serde(default)]
    node: Vec<NodeTable>,
    #[serde(default)]
    link: Vec<LinkTable>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct NodeTable {
    name: Spanned<String>,
    kind: KindName,
}

#[derive(Deserialize)]
#[serde(rename_all = "lowercase")]
enum KindName {
    Rank,
    Switch,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct LinkTable {
    from: Spanned<String>,
    to: Spanned<String>,
    bandwidth: Spanned<Number>,
    latency_us: Option<Spanned<Number>>,
    #[serde(default = "is_duplex")]
    duplex: bool,
}

fn is_duplex() -> bool {
    true
}

/// Stands for a number. Its exact value is read from the text.
struct Number;

impl<'de> Deserialize<'de> for Number {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(NumberVisitor)
    }
}

struct NumberVisitor;

impl Visitor<'_> for NumberVisitor {
    type Value = Number;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("a number")
    }

    fn visit_i64<E>(self, _: i64) -> Result<Number, E> {
        Ok(Number)
    }

    fn visit_u64<E>(self, _: u64) -> Result<Number, E> {
        Ok(Number)
    }

    fn visit_i128<E>(self, _: i128) -> Result<Number, E> {
        Ok(Number)
    }

    fn visit_u128<E>(self, _: u128) -> Result<Number, E> {
        Ok(Number)
    }

    fn visit_f64<E>(self, _: f64) -> Result<Number, E> {
        Ok(Number)
    }
}

/// The topology that a TOML file describes.
///
/// # Errors
///
/// The first fault with its line and column.
pub fn parse(text: &str) -> Result<Topology, TextError> {
    let document: Document = toml::from_str(text).map_err(|error| {
        let at = error.span().map_or(0, |span| span.start);
        let message = error.message().split_whitespace().collect::<Vec<_>>().join(" ");
        Texts(text).error(at, TextFault::Toml { message })
    })?;
    Reader { text: Texts(text), nodes: HashMap::new(), starts: Vec::new(), sum: 0, links: 0 }.read(&document)
}

/// The topology as read so far.
struct Reader<'text> {
    text: Texts<'text>,
    nodes: HashMap<&'text str, NodeId>,
    /// By node: the place of its name in the text.
    starts: Vec<usize>,
    sum: u64,
    links: usize,
}

impl<'text> Reader<'text> {
    fn read(mut self, document: &'text Document) -> Result<Topology, TextError> {
        let mut builder = Topology::builder();
        if let Some(ring) = &document.pcie_ring {
            builder.pcie_ring(self.bandwidth("pcie_ring", ring)?);
        }
        for node in &document.node {
            let at = node.name.span().start;
            let name = node.name.get_ref();
            if self.starts.len() == NODES_MAX {
                return Err(self.refused(at, TopologyError::TooMany { what: "nodes", limit: NODES_MAX }));
            }
            let id = match node.kind {
                KindName::Rank => builder.rank(name),
                KindName::Switch => builder.switch(name),
            };
            if self.nodes.insert(name, id).is_some() {
                return Err(self.refused(at, TopologyError::DuplicateName { name: name.clone() }));
            }
            self.starts.push(at);
        }
        for link in &document.link {
            let (from, to) = (self.node(&link.from)?, self.node(&link.to)?);
            let bytes_per_s = self.bandwidth("bandwidth", &link.bandwidth)?;
            let latency_ns = match &link.latency_us {
                None => LATENCY_NS,
                Some(latency) => {
                    self.number("latency_us", &latency.span(), |text| scaled(text, US_DECIMALS))?
                }
            };
            if from == to {
                let name = link.to.get_ref().clone();
                return Err(self.refused(link.to.span().start, TopologyError::Loop { name }));
            }
            self.count(link, bytes_per_s)?;
            builder.link(from, to, bytes_per_s, latency_ns);
            if link.duplex {
                builder.link(to, from, bytes_per_s, latency_ns);
            }
        }
        builder.build().map_err(|error| self.placed(error))
    }

    fn node(&self, name: &Spanned<String>) -> Result<NodeId, TextError> {
        let id = self.nodes.get(name.get_ref().as_str()).copied();
        let unknown = || TopologyError::UnknownNode { name: name.get_ref().clone() };
        id.ok_or_else(|| self.refused(name.span().start, unknown()))
    }

    fn bandwidth(&self, key: &'static str, number: &Spanned<Number>) -> Result<u64, TextError> {
        self.number(key, &number.span(), bytes_per_s)
    }

    fn number(
        &self,
        key: &'static str,
        span: &Range<usize>,
        read: impl FnOnce(&str) -> Result<u64, NumberFault>,
    ) -> Result<u64, TextError> {
        let text = self.text.0.get(span.clone()).unwrap_or_default();
        read(text).map_err(|fault| {
            self.text.error(span.start, TextFault::Number { key, text: text.to_owned(), fault })
        })
    }

    /// Checks the limits of a topology here, where the link that exceeds them is known.
    fn count(&mut self, link: &LinkTable, bytes_per_s: u64) -> Result<(), TextError> {
        let directions = if link.duplex { 2 } else { 1 };
        self.links += directions;
        if self.links > LINKS_MAX {
            let error = TopologyError::TooMany { what: "links", limit: LINKS_MAX };
            return Err(self.refused(link.from.span().start, error));
        }
        let sum = (directions as u64).checked_mul(bytes_per_s).and_then(|both| self.sum.checked_add(both));
        match sum.filter(|&sum| sum <= BANDWIDTH_SUM_MAX) {
            Some(sum) => self.sum = sum,
            None => {
                let at = link.bandwidth.span().start;
                return Err(self.refused(at, TopologyError::TooMuchBandwidth));
            }
        }
        Ok(())
    }

    fn refused(&self, at: usize, error: TopologyError) -> TextError {
        self.text.error(at, TextFault::Topology(error))
    }

    /// An error of the whole topology, with its place: the second part, or the bad name.
    fn placed(&self, error: TopologyError) -> TextError {
        let name = match &error {
            TopologyError::Disconnected { parts } => parts.get(1).and_then(|part| part.first()),
            TopologyError::BadName { name } => Some(name),
            _ => None,
        };
        let node = name.and_then(|name| self.nodes.get(name.as_str()));
        let at = node.and_then(|node| self.starts.get(node.0 as usize)).copied().unwrap_or(0);
        self.refused(at, error)
    }
}

impl Topology {
    /// This topology as the text of a TOML file. Reading the text gives the same topology, except
    /// that the number of parallel links is lost where it is above 64.
    #[must_use]
    pub fn to_toml(&self) -> String {
        let mut text = String::new();
        // Writing to a string cannot fail.
        let _ = self.write_toml(&mut text);
        text
    }

    fn write_toml(&self, text: &mut String) -> std::fmt::Result {
        if let Some(bytes_per_s) = self.pcie_ring_bytes_per_s() {
            writeln!(text, "pcie_ring = {}", gb_per_s(bytes_per_s))?;
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
            let bandwidth = gb_per_s(link.bytes_per_s / lines + rest);
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

/// The name as a basic string of TOML.
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

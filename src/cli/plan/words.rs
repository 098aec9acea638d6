//! Rates, links and certificates in words.

use std::collections::BTreeMap;

use pleach::Collective;
use pleach::packing::topology::{Link, NodeId, NodeKind, Topology};
use pleach::packing::{Certificate, Packing, Rate};

use super::outcome::{enters, number};

/// Most names that a sentence lists.
const NAMES_SHOWN_MAX: usize = 8;
/// Most kinds of links that a sentence lists.
const KINDS_SHOWN_MAX: usize = 3;
/// Most parts that a sentence lists.
const PARTS_SHOWN_MAX: usize = 6;

/// Bytes a second as people write them: four digits, in the unit that fits.
pub(super) fn rate(bytes_per_s: f64) -> String {
    let (unit, name) = match bytes_per_s {
        gigabytes if gigabytes >= 1e8 || gigabytes == 0.0 => (1e9, "GB/s"),
        megabytes if megabytes >= 1e5 => (1e6, "MB/s"),
        kilobytes if kilobytes >= 1e2 => (1e3, "kB/s"),
        _ => (1.0, "B/s"),
    };
    format!("{} {name}", digits(bytes_per_s / unit))
}

/// Four significant digits, without zeros at the end.
pub(super) fn digits(value: f64) -> String {
    if value == 0.0 || !value.is_finite() {
        return "0".to_owned();
    }
    let before_the_point = value.abs().log10().floor() as i32 + 1;
    let after_the_point = (4 - before_the_point).clamp(0, 12) as usize;
    let text = format!("{value:.after_the_point$}");
    if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.').to_owned() } else { text }
}

/// A count and what is counted.
pub(super) fn counted(count: usize, one: &str) -> String {
    format!("{count} {one}{}", if count == 1 { "" } else { "s" })
}

/// Why nothing goes faster.
pub(super) struct Reason {
    /// In a sentence without its point.
    pub(super) sentence: String,
    /// The bound as it follows from that.
    pub(super) sum: String,
}

/// The certificate of a packing in words.
pub(super) fn reason(topology: &Topology, packing: &Packing) -> Reason {
    match &packing.certificate {
        Certificate::Cut { nodes } => cut(topology, packing, nodes),
        Certificate::Partition { parts } => partition(topology, packing, parts),
        Certificate::Alone => Reason {
            sentence: format!("{} is alone: nothing has to move", topology.name(topology.node(0))),
            sum: String::new(),
        },
    }
}

fn cut(topology: &Topology, packing: &Packing, nodes: &[NodeId]) -> Reason {
    let is_inside = membership(topology, &[nodes]);
    let inside = |node: NodeId| is_inside[node.0 as usize].is_some();
    let enters = enters(packing);
    let crosses = |link: &&Link| {
        let (from, to) = if enters { (link.to, link.from) } else { (link.from, link.to) };
        inside(from) && !inside(to)
    };
    let links: Vec<&Link> = topology.links().iter().filter(crosses).collect();
    let bandwidth: u128 = links.iter().map(|link| u128::from(link.bytes_per_s)).sum();
    let all = topology.ranks();
    let within = (0..all).filter(|&rank| inside(topology.node(rank))).count() as u32;
    let outside: Vec<NodeId> = every(topology).filter(|&node| !inside(node)).collect();
    // Whoever is fewer is named; the links are the same.
    let (named, is_left) =
        if within <= all - within { (nodes, !enters) } else { (outside.as_slice(), enters) };
    let verb = if is_left { "left" } else { "reached" };
    let who = nodes_in_words(topology, named);
    let over = links_in_words(&links);
    let blocks = match packing.collective {
        Collective::AllGather | Collective::ReduceScatter => Some(within),
        Collective::Scatter { .. } | Collective::Gather { .. } => Some(all - within),
        _ => None,
    };
    let bandwidth = rate(bandwidth as f64);
    let bound = rate(number(packing.bound));
    match blocks {
        Some(blocks) => Reason {
            sentence: format!(
                "{who} can only be {verb} by {over}, which {blocks} of {all} blocks have to take"
            ),
            sum: format!("{bandwidth} × {all}/{blocks} = {bound}"),
        },
        None => Reason {
            sentence: format!("{who} can only be {verb} by {over}"),
            sum: if links.len() > 1 { format!("together {bound}") } else { String::new() },
        },
    }
}

fn partition(topology: &Topology, packing: &Packing, parts: &[Vec<NodeId>]) -> Reason {
    let slices: Vec<&[NodeId]> = parts.iter().map(Vec::as_slice).collect();
    let part_of = membership(topology, &slices);
    let part = |node: NodeId| part_of[node.0 as usize];
    let leaving: Vec<&Link> = topology
        .links()
        .iter()
        .filter(|link| part(link.from).is_some() && part(link.from) != part(link.to))
        .collect();
    let trees = parts.len() as u32 - 1;
    let bound = rate(number(packing.bound));
    let covers_all = every(topology).all(|node| part(node).is_some());
    let from = |index: usize| -> Vec<&Link> {
        leaving.iter().copied().filter(|link| part(link.from) == Some(index)).collect()
    };
    let sum = |links: &[&Link]| links.iter().map(|link| u128::from(link.bytes_per_s)).sum::<u128>();
    if let ([one, other], false) = (parts, covers_all)
        && sum(&from(0)) == sum(&from(1))
    {
        let (fewer, links) = if other.len() < one.len() { (other, from(1)) } else { (one, from(0)) };
        let who = nodes_in_words(topology, fewer);
        return Reason {
            sentence: format!("{who} can only be left by {}", links_in_words(&links)),
            sum: if links.len() > 1 { format!("together {bound}") } else { String::new() },
        };
    }
    if !(covers_all && topology.is_symmetric()) {
        let total = rate(leaving.iter().map(|link| link.bytes_per_s as f64).sum());
        return Reason {
            sentence: format!(
                "{} are left by links of {total} in all, and an all-reduce takes {} times its rate of them",
                parts_in_words(topology, parts),
                2 * trees
            ),
            sum: format!("{total} / {} = {bound}", 2 * trees),
        };
    }
    let once: Vec<&Link> = leaving.into_iter().filter(|link| link.from < link.to).collect();
    let total = rate(once.iter().map(|link| link.bytes_per_s as f64).sum());
    let over = links_in_words(&once);
    if let [one, other] = parts {
        let fewer = if other.len() < one.len() { other } else { one };
        let verb = if fewer.len() == 1 { "is" } else { "are" };
        return Reason {
            sentence: format!("{} {verb} joined to the rest by {over}", nodes_in_words(topology, fewer)),
            sum: String::new(),
        };
    }
    Reason {
        sentence: format!(
            "{} are joined by {over}, of which every tree takes {trees}",
            parts_in_words(topology, parts)
        ),
        sum: format!("{total} / {trees} = {bound}"),
    }
}

fn every(topology: &Topology) -> impl Iterator<Item = NodeId> {
    (0..topology.nodes().len() as u32).map(NodeId)
}

/// In which of the sets each node is.
fn membership(topology: &Topology, sets: &[&[NodeId]]) -> Vec<Option<usize>> {
    let mut part_of = vec![None; topology.nodes().len()];
    for (index, set) in sets.iter().enumerate() {
        for node in *set {
            part_of[node.0 as usize] = Some(index);
        }
    }
    part_of
}

/// `2 links of 25 GB/s and one of 50 GB/s, 100 GB/s in all`.
fn links_in_words(links: &[&Link]) -> String {
    let mut kinds: BTreeMap<u64, u32> = BTreeMap::new();
    for link in links {
        let count = if link.bytes_per_s.is_multiple_of(u64::from(link.count)) { link.count } else { 1 };
        *kinds.entry(link.bytes_per_s / u64::from(count)).or_default() += count;
    }
    let total = rate(links.iter().map(|link| link.bytes_per_s as f64).sum());
    let many: u32 = kinds.values().sum();
    if kinds.is_empty() {
        return "nothing".to_owned();
    }
    if kinds.len() > KINDS_SHOWN_MAX {
        return format!("{many} links of {total} in all");
    }
    let mut words: Vec<String> = Vec::new();
    for (&each, &count) in kinds.iter().rev() {
        let each = rate(each as f64);
        let first = words.is_empty();
        words.push(match (count, first) {
            (1, true) => format!("one link of {each}"),
            (1, false) => format!("one of {each}"),
            (count, true) => format!("{count} links of {each}"),
            (count, false) => format!("{count} of {each}"),
        });
    }
    if kinds.len() == 1 { enumerated(&words) } else { format!("{}, {total} in all", enumerated(&words)) }
}

/// `a, b and c`.
fn enumerated(words: &[String]) -> String {
    match words {
        [] => String::new(),
        [only] => only.clone(),
        [before @ .., last] => format!("{} and {last}", before.join(", ")),
    }
}

/// `g0`, or `these 3 ranks (g0 g1 g2)`, with the switches among them counted.
fn nodes_in_words(topology: &Topology, nodes: &[NodeId]) -> String {
    let of_kind = |kind| -> Vec<&str> {
        let is_kind = |node: &&NodeId| topology.nodes()[node.0 as usize].kind == kind;
        nodes.iter().filter(is_kind).map(|&node| topology.name(node)).collect()
    };
    let (ranks, switches) = (of_kind(NodeKind::Rank), of_kind(NodeKind::Switch));
    let beside = match switches.as_slice() {
        [] => String::new(),
        [only] => format!(" with {only}"),
        many => format!(" with {}", counted(many.len(), "switch").replace("switchs", "switches")),
    };
    match ranks.as_slice() {
        [only] => format!("{only}{beside}"),
        many => format!("these {} ranks ({}){beside}", many.len(), listed(many)),
    }
}

fn listed(names: &[&str]) -> String {
    if names.len() <= NAMES_SHOWN_MAX {
        return names.join(" ");
    }
    format!("{} … {}", names[..NAMES_SHOWN_MAX - 2].join(" "), names[names.len() - 1])
}

/// `the 8 ranks`, or `these 3 parts (a b | c | d)`.
fn parts_in_words(topology: &Topology, parts: &[Vec<NodeId>]) -> String {
    if parts.iter().all(|part| part.len() == 1) {
        return format!("the {} ranks", parts.len());
    }
    let names = |part: &Vec<NodeId>| {
        let names: Vec<&str> = part.iter().map(|&node| topology.name(node)).collect();
        listed(&names)
    };
    if parts.len() > PARTS_SHOWN_MAX {
        return format!("{} parts of up to {}", parts.len(), counted(largest(parts), "node"));
    }
    format!("these {} parts ({})", parts.len(), parts.iter().map(names).collect::<Vec<_>>().join(" | "))
}

fn largest(parts: &[Vec<NodeId>]) -> usize {
    parts.iter().map(Vec::len).max().unwrap_or_default()
}

/// The gap to the bound in words.
pub(super) fn verdict(packing: &Packing) -> String {
    if packing.is_optimal() {
        return "optimal: no forwarding schedule can be faster".to_owned();
    }
    let share: Rate = packing.rate / packing.bound;
    format!(
        "{:.1} % of the bound of {}; whether more is possible is open",
        (number(share) * 100.0).min(99.9),
        rate(number(packing.bound))
    )
}

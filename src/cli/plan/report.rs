//! A plan to read: what it reaches, why nothing does better, the trees, the links, and what others
//! reach. 80 columns.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::fmt::Write;

use pleach::packing::compare::{Hybrid, Outcome, Row, StrategyError, compare, hybrid};
use pleach::packing::latency::predicted_ns;
use pleach::packing::topology::{NodeKind, Topology};
use pleach::packing::{PackOptions, Packing, Rate, Strategy, Tree, pack};
use pleach::{Collective, Rank};

use super::{Plan, counted, digits, number, rate_in_words, reason_in_words, verdict_in_words};
use crate::cli::bench::Size;

/// The width of the text, in columns.
const WIDTH: usize = 80;
/// Where the text beside the headings begins.
const MARGIN: usize = 10;
/// The width of a full bar, in columns.
const BAR: usize = 20;
/// Longest word that is left out where a line ends, in columns.
const CUT_OFF_MAX: usize = 14;
/// Most trees, and most kinds of links, that get a line.
const LINES_MAX: usize = 8;

/// The whole text.
pub(super) fn text(plan: &Plan, results: &[StrategyResult]) -> String {
    let mut page = Page::default();
    headline(&mut page, plan);
    let reason = reason_in_words(&plan.topology, &plan.packing);
    let why =
        if reason.sum.is_empty() { reason.sentence } else { format!("{}: {}", reason.sentence, reason.sum) };
    page.paragraph("Why", &why);
    trees(&mut page, plan);
    links(&mut page, plan);
    comparison(&mut page, plan, results);
    page.paragraph("Made in", &duration(plan.generation.as_secs_f64()));
    page.text
}

fn headline(page: &mut Page, plan: &Plan) {
    let Plan { topology, packing, .. } = plan;
    let switches = topology.nodes().iter().filter(|node| node.kind == NodeKind::Switch).count();
    let mut of = counted(topology.ranks() as usize, "rank");
    if switches > 0 {
        let _ = write!(of, ", {switches} {}", if switches == 1 { "switch" } else { "switches" });
    }
    let links: usize = topology.links().iter().map(|link| link.count as usize).sum();
    let _ = write!(of, ", {}", counted(links, "one-way link"));
    page.line(&format!("{} over {}: {of}", packing.collective, plan.source));
    page.line("");
    let rate = rate_in_words(number(packing.rate));
    page.paragraph("", &format!("{rate}   {}", verdict_in_words(packing)));
    if let Some(bytes) = plan.bytes {
        let took_s = predicted_ns(packing, topology, bytes) as f64 / 1e9;
        page.paragraph("", &format!("{} bytes take about {}", Size(bytes), duration(took_s)));
    }
    page.line("");
}

fn trees(page: &mut Page, plan: &Plan) {
    let Plan { packing, .. } = plan;
    if packing.trees.is_empty() {
        return page.paragraph("Trees", "none: nothing has to move");
    }
    let depths = plan.checked.depths.iter().map(|depth| depth.edges);
    let (shallow, deep) = (depths.clone().min().unwrap_or(0), depths.max().unwrap_or(0));
    let deep = if shallow == deep { deep.to_string() } else { format!("{shallow} to {deep}") };
    let is_flow = matches!(packing.collective, Collective::Gather { .. } | Collective::Scatter { .. });
    let of = if is_flow { "path" } else { "tree" };
    let how = match packing.collective {
        Collective::AllReduce => ", each used upwards and downwards at once",
        _ => "",
    };
    page.paragraph("Trees", &format!("{}, {deep} deep{how}", counted(packing.trees.len(), of)));
    let mut order: Vec<usize> = (0..packing.trees.len()).collect();
    order.sort_by_key(|&index| (Reverse(packing.trees[index].weight), plan.checked.depths[index].edges));
    for &index in order.iter().take(LINES_MAX) {
        let tree = &packing.trees[index];
        let depth = plan.checked.depths[index].edges;
        let rate = rate_in_words(number(tree.weight));
        page.entry(&format!("{rate:>11}, {depth} deep:  {}", shape(&plan.topology, tree)));
    }
    more(page, packing.trees.len());
}

fn more(page: &mut Page, all: usize) {
    if all > LINES_MAX {
        page.entry(&format!("and {} more", all - LINES_MAX));
    }
}

/// A tree with what is a child of each rank in parentheses.
fn shape(topology: &Topology, tree: &Tree) -> String {
    let mut below: BTreeMap<Rank, Vec<Rank>> = BTreeMap::new();
    for edge in &tree.edges {
        below.entry(edge.from).or_default().push(edge.to);
        below.entry(edge.to).or_default().push(edge.from);
    }
    // As long as a line takes; a chain of a thousand ranks must not be a thousand calls deep
    // either.
    let mut text = String::new();
    let mut left = vec![(Some(tree.root), tree.root)];
    while let Some((rank, above)) = left.pop() {
        if text.len() > 2 * WIDTH {
            break;
        }
        let Some(rank) = rank else {
            text.push(')');
            continue;
        };
        if !text.is_empty() && !text.ends_with('(') {
            text.push(' ');
        }
        text.push_str(topology.name(topology.node(rank)));
        let children = below.get(&rank).map(Vec::as_slice).unwrap_or_default();
        let children: Vec<Rank> = children.iter().copied().filter(|&child| child != above).collect();
        if !children.is_empty() {
            text.push('(');
            left.push((None, rank));
            left.extend(children.iter().rev().map(|&child| (Some(child), rank)));
        }
    }
    text
}

/// Links that are alike: as wide and as busy.
#[derive(Default)]
struct LinkClass {
    links: usize,
    names: Vec<String>,
}

fn links(page: &mut Page, plan: &Plan) {
    let topology = &plan.topology;
    let mut kinds: BTreeMap<(Reverse<Rate>, Reverse<u64>), LinkClass> = BTreeMap::new();
    let loads = &plan.checked.loads;
    for (index, link) in topology.links().iter().enumerate() {
        let back = topology.links().binary_search_by_key(&(link.to, link.from), |link| (link.from, link.to));
        let is_both_ways = back.is_ok_and(|back| {
            loads[back].load == loads[index].load && loads[back].capacity == loads[index].capacity
        });
        let kind = (Reverse(loads[index].utilisation()), Reverse(link.bytes_per_s));
        let alike = kinds.entry(kind).or_default();
        alike.links += 1;
        let (from, to) = (topology.name(link.from), topology.name(link.to));
        match is_both_ways {
            true if link.from < link.to => alike.names.push(format!("{from}-{to}")),
            true => {}
            false => alike.names.push(format!("{from}>{to}")),
        }
    }
    for (index, ((Reverse(load), Reverse(bandwidth)), alike)) in kinds.iter().take(LINES_MAX).enumerate() {
        let heading = if index == 0 { "Links" } else { "" };
        let share = number(*load);
        let line = format!(
            "{:>4.0} % {} of {}, {}: {}",
            share * 100.0,
            bar(share),
            rate_in_words(*bandwidth as f64),
            alike.links,
            alike.names.join(" ")
        );
        page.cut_reason(heading, &line);
    }
    more(page, kinds.len());
}

fn comparison(page: &mut Page, plan: &Plan, results: &[StrategyResult]) {
    let fastest = results.iter().filter_map(|other| other.rate.as_ref().ok()).copied().max();
    let own = plan.packing.rate;
    let fastest = number(fastest.map_or(own, |other| other.max(own)));
    let name = |name: &str| format!("{name:<28}");
    let line = |who: &str, rate: Rate, note: &str| {
        let share = if fastest > 0.0 { number(rate) / fastest } else { 0.0 };
        format!("{}{:>11}  {} {note}", name(who), rate_in_words(number(rate)), bar(share))
    };
    page.cut_reason("Compare", &line(plan.strategy.name(), own, ""));
    for other in results {
        match &other.rate {
            Ok(rate) => page.cut_reason("", &line(other.name, *rate, &other.note)),
            // Which ranks a tree lacks a link between is more than a line has room for.
            Err(why) => {
                page.cut_reason("", &format!("{}{}", name(other.name), why.split(':').next().unwrap_or(why)))
            }
        }
    }
}

/// A share from 0 to 1, in eighths of a column.
fn bar(share: f64) -> String {
    const PARTS: [&str; 8] = ["", "▏", "▎", "▍", "▌", "▋", "▊", "▉"];
    let eighths = (share.clamp(0.0, 1.0) * (BAR * 8) as f64).round() as usize;
    let (full, rest) = (eighths / 8, PARTS[eighths % 8]);
    let drawn = full + usize::from(!rest.is_empty());
    format!("{}{rest}{}", "█".repeat(full), " ".repeat(BAR - drawn))
}

fn duration(seconds: f64) -> String {
    match seconds {
        long if long >= 1.0 => format!("{} s", digits(long)),
        short if short >= 1e-3 => format!("{short:.1} ms", short = short * 1e3),
        tiny => format!("{tiny:.0} µs", tiny = tiny * 1e6),
    }
}

/// Text under construction.
#[derive(Default)]
struct Page {
    text: String,
}

impl Page {
    fn line(&mut self, line: &str) {
        self.text.push_str(line.trim_end());
        self.text.push('\n');
    }

    /// A heading and words beside it, in as many lines as they take.
    fn paragraph(&mut self, heading: &str, words: &str) {
        let mut line = format!("{heading:<MARGIN$}");
        let mut is_first = true;
        for word in words.split(' ') {
            if !is_first && line.chars().count() + 1 + word.chars().count() > WIDTH {
                self.line(&line);
                line = " ".repeat(MARGIN);
                is_first = true;
            }
            if !is_first {
                line.push(' ');
            }
            line.push_str(word);
            is_first = false;
        }
        self.line(&line);
    }

    /// A line below what a heading is about.
    fn entry(&mut self, words: &str) {
        self.cut_reason("", words);
    }

    /// A heading and one line, shortened where it is too long.
    fn cut_reason(&mut self, heading: &str, words: &str) {
        let line = format!("{heading:<MARGIN$}{words}");
        let line = line.trim_end();
        if line.chars().count() <= WIDTH {
            return self.line(line);
        }
        let kept: String = line.chars().take(WIDTH - 2).collect();
        // A word that is cut off is left out, unless that leaves a hole.
        let kept = match kept.rsplit_once(' ') {
            Some((before, word)) if word.chars().count() <= CUT_OFF_MAX => before.to_owned(),
            _ => kept,
        };
        self.line(&format!("{kept} …"));
    }
}

// The rates of other strategies on the same links.

/// Most ranks of a topology on which others are tried: their search for rings and trees is not made
/// for more.
const RANKS_MAX: u32 = 64;

/// Another way, and what it reaches.
pub(super) struct StrategyResult {
    name: &'static str,
    /// Or why it is not possible here.
    rate: Result<Rate, String>,
    /// Remarks.
    note: String,
}

/// All ways that the plan did not take, and that there are for its collective.
pub(super) fn other_strategies(plan: &Plan) -> Vec<StrategyResult> {
    let Plan { topology, packing, strategy, .. } = plan;
    if !(2..=RANKS_MAX).contains(&topology.ranks()) {
        return Vec::new();
    }
    let best: Option<Packing> = match strategy {
        Strategy::Optimal => Some(packing.clone()),
        _ => pack(topology, packing.collective, &PackOptions::default()).ok(),
    };
    let Some(best) = best else { return Vec::new() };
    let rows = compare(topology, &best).rows;
    let mixed = rows.iter().find_map(|row| blink_with_pcie(plan, row));
    let other_strategies = rows.into_iter().filter(|row| row.strategy != strategy.name()).filter_map(results);
    other_strategies.chain(mixed).collect()
}

/// Blink's trees with PCIe beside them, where it was said what that costs and what the call
/// carries.
fn blink_with_pcie(plan: &Plan, row: &Row) -> Option<StrategyResult> {
    let Outcome::Packed(blink) = &row.outcome else { return None };
    if row.strategy != Strategy::Blink.name() {
        return None;
    }
    let (bytes, setup_ns) = (plan.bytes?, plan.pcie_setup_ns?);
    let Hybrid { split, rate } = hybrid(&plan.topology, blink, bytes, setup_ns)?;
    let part = split.slow_bytes as f64 * 100.0 / bytes as f64;
    Some(StrategyResult { name: "blink and PCIe", rate: Ok(rate), note: format!("{part:.1} % over PCIe") })
}

fn results(row: Row) -> Option<StrategyResult> {
    let Row { strategy: name, outcome } = row;
    Some(match outcome {
        Outcome::Packed(packing) => StrategyResult { name, rate: Ok(packing.rate), note: String::new() },
        Outcome::AtLeast(packing) => {
            StrategyResult { name, rate: Ok(packing.rate), note: "at least".to_owned() }
        }
        Outcome::OverPcie(rate) => StrategyResult { name, rate: Ok(rate), note: "over PCIe".to_owned() },
        Outcome::Impossible(StrategyError::NotFor { .. }) => return None,
        Outcome::Impossible(why) => StrategyResult { name, rate: Err(why.to_string()), note: String::new() },
    })
}

//! An analysis to look at: a box for each rank with the share of the cost and the arena against its
//! bound, and arrows as wide as the bytes that cross. Readable on white and on black.

use std::collections::BTreeMap;

use super::analyze::Analysis;
use super::report::size;
use crate::cli::output::{escaped, put};

const BOX_WIDTH: f64 = 170.0;
const BOX_HEIGHT: f64 = 120.0;
const GAP: f64 = 70.0;
const LEFT: f64 = 24.0;
const TOP: f64 = 64.0;
/// How far arrows between distant ranks go down for each rank between.
const ARC: f64 = 26.0;
/// The widest arrow.
const WIDTH_MAX: f64 = 14.0;
/// Most ranks in a picture; others are left out.
const RANKS_MAX: usize = 64;

const STYLE: &str = "\
.paper{fill:#ffffff}.ink{fill:#1f2328}.soft{fill:#59636e}.box{fill:#f6f8fa;stroke:#1f2328;stroke-width:1.5}\
.rail{fill:#d1d9e0}.share{fill:#54aeff}.arena{fill:#4ac26b}.arrow{stroke:#54aeff;fill:none;stroke-opacity:.7}\
.back{stroke:#ffa657;fill:none;stroke-opacity:.7}\
text{font-family:Inter,'Helvetica Neue',Helvetica,Arial,'DejaVu Sans',sans-serif;font-size:12px}\
.title{font-size:16px;font-weight:600}.mid{text-anchor:middle}\
@media(prefers-color-scheme:dark){.paper{fill:#0d1117}.ink{fill:#e6edf3}.soft{fill:#9198a1}\
.box{fill:#161b22;stroke:#e6edf3}.rail{fill:#3d444d}}";

/// The whole picture.
pub(super) fn picture(analysis: &Analysis) -> String {
    let shown = analysis.plans.len().min(RANKS_MAX);
    let width = LEFT * 2.0 + shown as f64 * (BOX_WIDTH + GAP) - GAP;
    let edges = edges(analysis);
    let longest = edges.keys().map(|(from, to)| from.abs_diff(*to)).max().unwrap_or(0).min(shown);
    let height = TOP + BOX_HEIGHT + 50.0 + ARC * longest as f64;
    let mut out = String::new();
    put!(
        out,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width:.0} {height:.0}\" width=\"{width:.0}\" height=\"{height:.0}\">"
    );
    put!(out, "<style>{STYLE}</style><rect class=\"paper\" width=\"100%\" height=\"100%\"/>");
    let title =
        format!("{}: {} cross in an iteration", analysis.model, size(analysis.partition.crossing_bytes()));
    put!(out, "<text class=\"ink title\" x=\"{LEFT}\" y=\"34\">{}</text>", escaped(&title));
    for rank in 0..shown {
        rank_box(&mut out, analysis, rank);
    }
    let most = edges.values().map(|edge| edge.0).max().unwrap_or(1).max(1);
    for ((from, to), (bytes, tensors)) in edges.iter().filter(|((from, to), _)| from.max(to) < &shown) {
        let thickness = (*bytes as f64 / most as f64 * WIDTH_MAX).max(1.5);
        arrow(&mut out, (*from, *to), thickness, &format!("{} in {tensors}", size(*bytes)));
    }
    put!(out, "</svg>");
    out
}

/// By sender and receiver: the bytes and the number of tensors.
fn edges(analysis: &Analysis) -> BTreeMap<(usize, usize), (u64, usize)> {
    let mut edges = BTreeMap::new();
    for crossing in analysis.partition.crossings() {
        let edge: &mut (u64, usize) =
            edges.entry((crossing.from as usize, crossing.to as usize)).or_default();
        edge.0 += crossing.transfer.bytes();
        edge.1 += 1;
    }
    edges
}

fn left_of(rank: usize) -> f64 {
    LEFT + rank as f64 * (BOX_WIDTH + GAP)
}

fn rank_box(out: &mut String, analysis: &Analysis, rank: usize) {
    let (part, plan) = (&analysis.partition.parts()[rank], &analysis.plans[rank]);
    let (x, inner) = (left_of(rank) + 12.0, BOX_WIDTH - 24.0);
    put!(
        out,
        "<rect class=\"box\" x=\"{:.1}\" y=\"{TOP}\" width=\"{BOX_WIDTH}\" height=\"{BOX_HEIGHT}\" rx=\"8\"/>",
        left_of(rank)
    );
    put!(
        out,
        "<text class=\"ink\" x=\"{x:.1}\" y=\"{:.1}\">rank {rank}, {} nodes</text>",
        TOP + 22.0,
        part.nodes.len()
    );
    let weights = size(part.weight_bytes(&analysis.graph));
    put!(out, "<text class=\"soft\" x=\"{x:.1}\" y=\"{:.1}\">weights {weights}</text>", TOP + 40.0);
    let share = analysis.share(rank);
    bar(out, (x, TOP + 64.0), inner, share, "share", &format!("{:.1} % of the cost", share * 100.0));
    let used = plan.lower_bound as f64 / plan.bytes.max(1) as f64;
    let over =
        if plan.is_optimal() { "the bound".to_owned() } else { format!("bound {}", size(plan.lower_bound)) };
    bar(out, (x, TOP + 96.0), inner, used, "arena", &format!("arena {}, {over}", size(plan.bytes)));
}

fn bar(out: &mut String, (x, y): (f64, f64), width: f64, filled: f64, class: &str, text: &str) {
    put!(out, "<text class=\"soft\" x=\"{x:.1}\" y=\"{:.1}\">{}</text>", y - 3.0, escaped(text));
    put!(out, "<rect class=\"rail\" x=\"{x:.1}\" y=\"{y:.1}\" width=\"{width:.1}\" height=\"6\" rx=\"3\"/>");
    let filled = width * filled.clamp(0.0, 1.0);
    put!(
        out,
        "<rect class=\"{class}\" x=\"{x:.1}\" y=\"{y:.1}\" width=\"{filled:.1}\" height=\"6\" rx=\"3\"/>"
    );
}

/// An arrow to the next rank, or an arc below to another one.
fn arrow(out: &mut String, (from, to): (usize, usize), thickness: f64, text: &str) {
    let text = escaped(text);
    if to == from + 1 {
        let (start, end, y) = (left_of(from) + BOX_WIDTH, left_of(to), TOP + BOX_HEIGHT / 2.0);
        put!(
            out,
            "<path class=\"arrow\" stroke-width=\"{thickness:.1}\" d=\"M{start:.1} {y:.1}H{end:.1}\"><title>{text}</title></path>"
        );
        let (amount, count) = text.split_once(" in ").unwrap_or((&text, ""));
        let middle = (start + end) / 2.0;
        put!(out, "<text class=\"ink mid\" x=\"{middle:.1}\" y=\"{:.1}\">{amount}</text>", y - 12.0);
        put!(out, "<text class=\"soft mid\" x=\"{middle:.1}\" y=\"{:.1}\">in {count}</text>", y + 22.0);
        return;
    }
    let class = if to > from { "arrow" } else { "back" };
    let (start, end) = (left_of(from) + BOX_WIDTH * 0.6, left_of(to) + BOX_WIDTH * 0.4);
    let (top, depth) = (TOP + BOX_HEIGHT, ARC * from.abs_diff(to) as f64);
    put!(
        out,
        "<path class=\"{class}\" stroke-width=\"{thickness:.1}\" d=\"M{start:.1} {top:.1}C{start:.1} {0:.1} {end:.1} {0:.1} {end:.1} {top:.1}\"><title>{text}</title></path>",
        top + depth * 1.33
    );
    put!(
        out,
        "<text class=\"soft mid\" x=\"{:.1}\" y=\"{:.1}\">{text}</text>",
        (start + end) / 2.0,
        top + depth + 14.0
    );
}

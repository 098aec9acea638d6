//! A picture of a plan. The width of a link shows its bandwidth. The colours in it are those of the
//! trees that use it, and fill it as far as it is used. The picture marks the narrow place that the
//! certificate names, and shows a small picture of each tree. It is readable on white and on black.

use std::collections::BTreeMap;

use pleach::Collective;
use pleach::packing::topology::{Link, NodeId, NodeKind};
use pleach::packing::{Certificate, Tree};

use super::layout::{Layout, Point, layout};
use super::{Plan, counted, number, rate_in_words, reason_in_words, verdict_in_words};
use crate::cli::output::{escaped, put};

/// Radius of a rank.
const RADIUS: f64 = 18.0;
/// The largest number of small pictures.
const PICTURES_MAX: usize = 12;
/// Most rows of small pictures.
const ROWS_MAX: usize = 3;
/// Most links whose load is written beside them.
const LABELLED_MAX: usize = 160;
/// Narrowest picture, for the words below it.
const WIDTH_MIN: f64 = 640.0;
/// The height of a line of text.
const LINE: f64 = 20.0;

const STYLE: &str = "\
.paper{fill:#ffffff}.ink{fill:#1f2328}.soft{fill:#59636e}.node{fill:#ffffff;stroke:#1f2328;stroke-width:1.5}\
.switch{fill:#e7ebf0;stroke:#1f2328;stroke-width:1.5}.box{fill:#f6f8fa;stroke:#d1d9e0}\
.link{stroke:#d1d9e0;fill:none}.narrow{stroke:#cf222e;fill:none}.narrows{fill:#cf222e}.tag{fill:#ffffff;fill-opacity:.88}\
text{font-family:Inter,'Helvetica Neue',Helvetica,Arial,'DejaVu Sans',sans-serif;font-size:12px}\
.title{font-size:18px;font-weight:600}.small{font-size:10px}.mid{text-anchor:middle}\
@media(prefers-color-scheme:dark){.paper{fill:#0d1117}.ink{fill:#e6edf3}.soft{fill:#9198a1}\
.node{fill:#161b22;stroke:#e6edf3}.switch{fill:#2a313c;stroke:#e6edf3}.box{fill:#11161d;stroke:#3d444d}\
.link{stroke:#3d444d}.narrow{stroke:#ff7b72}.narrows{fill:#ff7b72}.tag{fill:#0d1117;fill-opacity:.88}}";

/// Tints of the parts of a certificate.
const TINTS: [&str; 6] = ["#54aeff", "#e2c541", "#c297ff", "#4ac26b", "#ffa657", "#ff9bce"];

/// The whole picture.
pub(super) fn picture(plan: &Plan) -> String {
    let layout = layout(&plan.topology);
    let sheet = Sheet { plan, link_colours: link_colours(plan), labels: labels(plan), layout };
    let width = sheet.layout.width.max(WIDTH_MIN);
    let left = (width - sheet.layout.width) / 2.0;
    let mut body = String::new();
    let mut y = 34.0;
    put!(body, "<text class=\"ink title\" x=\"24\" y=\"{y:.0}\">{}</text>", escaped(&title(plan)));
    for line in wrapped(&sentence(plan), width - 48.0) {
        y += LINE;
        put!(body, "<text class=\"soft\" x=\"24\" y=\"{y:.0}\">{}</text>", escaped(&line));
    }
    y += 6.0;
    put!(body, "<g transform=\"translate({left:.1} {y:.1})\">");
    sheet.main(&mut body);
    body.push_str("</g>\n");
    y += sheet.layout.height;
    y = sheet.legend(&mut body, y + 10.0, width);
    y = sheet.pictures(&mut body, y + 10.0, width);
    let height = y + 16.0;
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width:.0}\" height=\"{height:.0}\" \
         viewBox=\"0 0 {width:.0} {height:.0}\" role=\"img\">\n<title>{}</title>\n<style>{STYLE}</style>\n\
         <rect class=\"paper\" width=\"100%\" height=\"100%\"/>\n{body}</svg>\n",
        escaped(&title(plan))
    )
}

struct Sheet<'a> {
    plan: &'a Plan,
    link_colours: LinkColours,
    labels: Vec<String>,
    layout: Layout,
}

impl Sheet<'_> {
    fn place(&self, node: NodeId) -> Point {
        self.layout.places[node.0 as usize]
    }

    fn curve(&self, from: NodeId, to: NodeId) -> Curve {
        let (start, end) = (self.place(from), self.place(to));
        let (x, y) = (end.0 - start.0, end.1 - start.1);
        let length = super::layout::length(x, y).max(1e-9);
        let mut bend = 0.0;
        for (node, &at) in self.layout.places.iter().enumerate() {
            if node == from.0 as usize || node == to.0 as usize {
                continue;
            }
            let along = ((at.0 - start.0) * x + (at.1 - start.1) * y) / (length * length);
            let shifted = ((at.1 - start.1) * x - (at.0 - start.0) * y) / length;
            if (0.02..0.98).contains(&along) && shifted.abs() < RADIUS + 6.0 {
                // Both directions of a link bend to the same side.
                let side = if from < to { 1.0 } else { -1.0 };
                bend = side * (0.22 * length).max(3.2 * RADIUS);
            }
        }
        let middle = ((start.0 + end.0) / 2.0, (start.1 + end.1) / 2.0);
        let bend = (middle.0 - y / length * bend, middle.1 + x / length * bend);
        Curve { from: start, bend, to: end }
    }

    /// Width of the widest link, in pixels: with more links it is thinner.
    fn widest(&self) -> f64 {
        match self.plan.topology.links().len() / 2 {
            0..=40 => 15.0,
            41..=150 => 9.0,
            _ => 4.0,
        }
    }

    fn main(&self, out: &mut String) {
        for (one, other) in &self.layout.boxes {
            let (x, y, width, height) = (one.0, one.1, other.0 - one.0, other.1 - one.1);
            put!(
                out,
                "<rect class=\"box\" x=\"{x:.1}\" y=\"{y:.1}\" width=\"{width:.1}\" height=\"{height:.1}\" rx=\"14\"/>"
            );
        }
        let ribbons = self.ribbons();
        let outlined = ribbons.iter().filter(|ribbon| ribbon.is_narrow && !self.is_narrow_everywhere());
        for ribbon in outlined {
            put!(
                out,
                "<path class=\"narrow\" stroke-width=\"{:.1}\" d=\"{}\"/>",
                ribbon.width + 5.0,
                ribbon.curve.path()
            );
        }
        for ribbon in &ribbons {
            put!(
                out,
                "<path class=\"link\" stroke-width=\"{:.1}\" d=\"{}\"/>",
                ribbon.width,
                ribbon.curve.path()
            );
        }
        for ribbon in &ribbons {
            let mut used = -0.5;
            for (colour, share) in self.link_colours.of(ribbon.from, ribbon.to) {
                let strand = ribbon.curve.shifted((used + share / 2.0) * ribbon.width);
                let width = (share * ribbon.width).max(0.4);
                put!(
                    out,
                    "<path fill=\"none\" stroke=\"{colour}\" stroke-width=\"{width:.2}\" d=\"{}\"/>",
                    strand.path()
                );
                used += share;
            }
        }
        self.nodes(out, true);
        self.loads(out, &ribbons);
    }

    /// Whether the certificate marks every link; then the picture marks none.
    fn is_narrow_everywhere(&self) -> bool {
        let links = self.plan.topology.links();
        let is_narrow = |link: &Link| {
            let back = Link { from: link.to, to: link.from, ..*link };
            self.plan.is_narrow(link) || self.plan.is_narrow(&back)
        };
        !links.is_empty() && links.iter().all(is_narrow)
    }

    /// One ribbon for both directions of a link if they are the same in every respect, else one for
    /// each direction.
    fn ribbons(&self) -> Vec<Ribbon> {
        let links = self.plan.topology.links();
        let loads = &self.plan.checked.loads;
        let most = links.iter().map(|link| link.bytes_per_s).max().unwrap_or(1) as f64;
        let is_both_ways = self.plan.packing.collective == Collective::AllReduce;
        let mut ribbons = Vec::new();
        for (index, link) in links.iter().enumerate() {
            let back = links.binary_search_by_key(&(link.to, link.from), |link| (link.from, link.to)).ok();
            let is_same = is_both_ways
                && back.is_some_and(|back| {
                    links[back].bytes_per_s == link.bytes_per_s && loads[back].load == loads[index].load
                });
            if is_same && link.from > link.to {
                continue;
            }
            let mut width = (link.bytes_per_s as f64 / most * self.widest()).max(1.5);
            let mut curve = self.curve(link.from, link.to);
            if !is_same && back.is_some() {
                width = (width * 0.7).max(1.2);
                curve = curve.shifted(width / 2.0 + 1.2);
            }
            let is_narrow = self.plan.is_narrow(link)
                || (is_same && back.is_some_and(|back| self.plan.is_narrow(&links[back])));
            let share = self.plan.utilisation(index);
            ribbons.push(Ribbon { from: link.from, to: link.to, curve, width, share, is_narrow });
        }
        ribbons
    }

    fn nodes(&self, out: &mut String, is_main: bool) {
        let topology = &self.plan.topology;
        for (index, node) in topology.nodes().iter().enumerate() {
            let (x, y) = self.layout.places[index];
            let label = &self.labels[index];
            let tint = self.tint(NodeId(index as u32)).filter(|_| is_main);
            let letters = label.chars().count() as f64;
            match node.kind {
                NodeKind::Rank => {
                    if let Some(tint) = tint {
                        let around = RADIUS + 7.0;
                        put!(
                            out,
                            "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"{around}\" fill=\"{tint}\" fill-opacity=\".55\"/>"
                        );
                    }
                    put!(out, "<circle class=\"node\" cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"{RADIUS}\"/>");
                    let fits = letters <= 6.0;
                    let (class, y) = match letters {
                        short if short <= 3.0 => ("ink mid", y),
                        _ if fits => ("ink mid small", y),
                        _ => ("soft mid small", y + RADIUS + 9.0),
                    };
                    put!(
                        out,
                        "<text class=\"{class}\" x=\"{x:.1}\" y=\"{:.1}\">{}</text>",
                        y + 3.8,
                        escaped(label)
                    );
                }
                NodeKind::Switch => {
                    let width = (letters * 7.0 + 18.0).max(48.0);
                    let (left, top) = (x - width / 2.0, y - 13.0);
                    if let Some(tint) = tint {
                        put!(
                            out,
                            "<rect x=\"{:.1}\" y=\"{:.1}\" width=\"{:.1}\" height=\"38\" rx=\"9\" fill=\"{tint}\" fill-opacity=\".55\"/>",
                            left - 6.0,
                            top - 6.0,
                            width + 12.0
                        );
                    }
                    put!(
                        out,
                        "<rect class=\"switch\" x=\"{left:.1}\" y=\"{top:.1}\" width=\"{width:.1}\" height=\"26\" rx=\"6\"/>"
                    );
                    put!(
                        out,
                        "<text class=\"ink mid\" x=\"{x:.1}\" y=\"{:.1}\">{}</text>",
                        y + 4.2,
                        escaped(label)
                    );
                }
            }
        }
    }

    /// The colour of the part of the certificate that a node is in, if parts are more than single
    /// ranks.
    fn tint(&self, node: NodeId) -> Option<&'static str> {
        match &self.plan.packing.certificate {
            // The smaller side is marked.
            Certificate::Cut { nodes } => {
                let is_small = 2 * nodes.len() <= self.plan.topology.nodes().len();
                (nodes.contains(&node) == is_small).then_some(TINTS[0])
            }
            Certificate::Partition { parts } => {
                let is_coarse = parts.iter().any(|part| part.len() > 1);
                let part = parts.iter().position(|part| part.contains(&node)).filter(|_| is_coarse);
                part.map(|part| TINTS[part % TINTS.len()])
            }
            Certificate::Alone => None,
        }
    }

    /// Writes each load where it covers nothing.
    fn loads(&self, out: &mut String, ribbons: &[Ribbon]) {
        if ribbons.len() > LABELLED_MAX {
            return;
        }
        let mut taken: Vec<Point> = Vec::new();
        let share_of = |from, to| {
            let other = ribbons.iter().find(|ribbon| (ribbon.from, ribbon.to) == (from, to));
            other.map(|ribbon| (ribbon.share * 100.0).round() as u32)
        };
        for ribbon in ribbons {
            let back = share_of(ribbon.to, ribbon.from);
            let is_one_label = back.is_some() && back == share_of(ribbon.from, ribbon.to);
            if is_one_label && ribbon.from > ribbon.to {
                continue;
            }
            let curve = if is_one_label { self.curve(ribbon.from, ribbon.to) } else { ribbon.curve };
            let is_free = |at: &Point| {
                let clear =
                    |other: &Point, x: f64, y: f64| (at.0 - other.0).abs() > x || (at.1 - other.1).abs() > y;
                taken.iter().all(|other| clear(other, 34.0, 15.0))
                    && self.layout.places.iter().all(|other| clear(other, RADIUS + 16.0, RADIUS + 7.0))
            };
            let spots = [0.5, 0.42, 0.58, 0.35, 0.65, 0.3, 0.7, 0.25, 0.75];
            let Some(at) = spots.iter().map(|&along| curve.at(along)).find(is_free) else { continue };
            taken.push(at);
            let (x, y) = at;
            put!(
                out,
                "<rect class=\"tag\" x=\"{:.1}\" y=\"{:.1}\" width=\"32\" height=\"13\" rx=\"4\"/>",
                x - 16.0,
                y - 6.5
            );
            put!(
                out,
                "<text class=\"ink mid small\" x=\"{x:.1}\" y=\"{:.1}\">{:.0} %</text>",
                y + 3.6,
                ribbon.share * 100.0
            );
        }
    }

    /// The legend of colours and lines. Returns its lower end.
    fn legend(&self, out: &mut String, mut y: f64, width: f64) -> f64 {
        let widest = self.plan.topology.links().iter().map(|link| link.bytes_per_s).max();
        let Some(widest) = widest.map(|widest| widest as f64) else { return y };
        let mut x = 24.0;
        put!(out, "<path class=\"link\" stroke-width=\"{:.1}\" d=\"M{x} {y}h34\"/>", self.widest());
        let text =
            format!("{} a direction; colour: how far it is used, by which tree", rate_in_words(widest));
        put!(
            out,
            "<text class=\"soft\" x=\"{:.0}\" y=\"{:.0}\">{}</text>",
            x + 44.0,
            y + 4.0,
            escaped(&text)
        );
        y += LINE;
        if self.is_narrow_everywhere() {
            let text = "every link is part of what sets the bound";
            put!(out, "<text class=\"narrows\" x=\"{:.0}\" y=\"{:.0}\">{text}</text>", x + 44.0, y + 4.0);
            y += LINE;
        } else if !matches!(self.plan.packing.certificate, Certificate::Alone) {
            put!(out, "<path class=\"narrow\" stroke-width=\"9\" d=\"M{x} {y}h34\"/>");
            put!(out, "<path class=\"link\" stroke-width=\"4\" d=\"M{x} {y}h34\"/>");
            let text = "the narrow place that sets the bound";
            put!(out, "<text class=\"narrows\" x=\"{:.0}\" y=\"{:.0}\">{text}</text>", x + 44.0, y + 4.0);
            y += LINE;
        }
        let trees = &self.plan.packing.trees;
        let is_listed = trees.len() <= PICTURES_MAX;
        if is_listed && !trees.is_empty() {
            let texts: Vec<String> = (0..trees.len()).map(|index| self.tree_in_words(index)).collect();
            let longest = texts.iter().map(|text| text.chars().count()).max().unwrap_or(0);
            let needs = 34.0 + longest as f64 * 6.3;
            for (index, text) in texts.iter().enumerate() {
                if x + needs > width - 12.0 && x > 24.0 {
                    x = 24.0;
                    y += LINE;
                }
                put!(
                    out,
                    "<rect x=\"{x:.0}\" y=\"{:.0}\" width=\"14\" height=\"12\" rx=\"3\" fill=\"{}\"/>",
                    y - 6.0,
                    self.link_colours.colour(index)
                );
                put!(
                    out,
                    "<text class=\"ink\" x=\"{:.0}\" y=\"{:.0}\">{}</text>",
                    x + 20.0,
                    y + 4.0,
                    escaped(text)
                );
                x += needs;
            }
        } else {
            let how = if self.link_colours.is_by_root { ", coloured by their roots" } else { "" };
            let text = format!("{}{how}", counted(trees.len(), "tree"));
            put!(out, "<text class=\"ink\" x=\"{x:.0}\" y=\"{:.0}\">{text}</text>", y + 4.0);
        }
        y + LINE
    }

    fn tree_in_words(&self, index: usize) -> String {
        let tree = &self.plan.packing.trees[index];
        let root = self.plan.topology.name(self.plan.topology.node(tree.root));
        format!(
            "{}, root {root}, {} deep",
            rate_in_words(number(tree.weight)),
            self.plan.checked.depths[index].edges
        )
    }

    /// Draws each tree by itself. Returns the lower end of the pictures.
    fn pictures(&self, out: &mut String, top: f64, width: f64) -> f64 {
        let trees = &self.plan.packing.trees;
        if trees.len() < 2 {
            return top;
        }
        // The small pictures of a wide plan keep a size that can be seen.
        let least = (self.layout.width * 0.36).max(190.0);
        let columns = ((width - 24.0) / least).floor().clamp(1.0, 6.0).min(trees.len() as f64);
        let shown = trees.len().min(PICTURES_MAX).min(ROWS_MAX * columns as usize);
        let each = (width - 24.0) / columns;
        let scale = ((each - 16.0) / self.layout.width).min(1.0);
        let height = self.layout.height * scale + 26.0;
        for (index, tree) in trees.iter().take(shown).enumerate() {
            let (row, column) = (index / columns as usize, index % columns as usize);
            let (x, y) = (16.0 + column as f64 * each, top + row as f64 * height);
            put!(
                out,
                "<text class=\"ink small\" x=\"{x:.0}\" y=\"{:.0}\">{}</text>",
                y + 10.0,
                escaped(&self.tree_in_words(index))
            );
            put!(out, "<g transform=\"translate({x:.1} {:.1}) scale({scale:.3})\">", y + 16.0);
            self.tree(out, tree, self.link_colours.colour(index));
            out.push_str("</g>\n");
        }
        let rows = shown.div_ceil(columns as usize) as f64;
        let end = top + rows * height;
        if trees.len() <= shown {
            return end;
        }
        put!(
            out,
            "<text class=\"soft\" x=\"24\" y=\"{:.0}\">and {} more</text>",
            end + 8.0,
            trees.len() - shown
        );
        end + LINE
    }

    fn tree(&self, out: &mut String, tree: &Tree, colour: &str) {
        for link in self.plan.topology.links().iter().filter(|link| link.from < link.to) {
            put!(
                out,
                "<path class=\"link\" stroke-width=\"2.5\" d=\"{}\"/>",
                self.curve(link.from, link.to).path()
            );
        }
        for path in tree.edges.iter().flat_map(|edge| &edge.paths) {
            for pair in path.hops.windows(2) {
                let curve = self.curve(pair[0], pair[1]);
                put!(
                    out,
                    "<path fill=\"none\" stroke=\"{colour}\" stroke-width=\"6\" d=\"{}\"/>",
                    curve.path()
                );
                put!(out, "<path fill=\"{colour}\" d=\"{}\"/>", arrow(&curve));
            }
        }
        let (x, y) = self.place(self.plan.topology.node(tree.root));
        put!(out, "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"{}\" fill=\"{colour}\"/>", RADIUS + 9.0);
        self.nodes(out, false);
    }
}

/// A link as it is drawn.
struct Ribbon {
    from: NodeId,
    to: NodeId,
    curve: Curve,
    width: f64,
    /// The share of the link that is used, from 0 to 1.
    share: f64,
    is_narrow: bool,
}

// The colours of trees, and the trees that use each link.

/// Colours that differ for most eyes, on white and on black.
const COLOURS: [&str; 12] = [
    "#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9", "#b8a800", "#8a63d2", "#e15759",
    "#4aa564", "#9c755f", "#7b8794",
];

/// The colours of all links.
pub(super) struct LinkColours {
    /// By tree.
    colours: Vec<usize>,
    /// Whether trees have the colours of their roots.
    is_by_root: bool,
    /// By link: the colours on it, and the share of the link that each takes.
    of_links: BTreeMap<(NodeId, NodeId), BTreeMap<usize, f64>>,
}

/// The colours of trees. Each tree has a colour of its own. If there are more trees than colours
/// and several roots, the trees of a root share a colour.
pub(super) fn link_colours(plan: &Plan) -> LinkColours {
    let trees = &plan.packing.trees;
    let is_by_root = trees.len() > COLOURS.len() && trees.iter().any(|tree| tree.root != trees[0].root);
    let colour = |index: usize, tree: &Tree| {
        let number = if is_by_root { tree.root as usize } else { index };
        number % COLOURS.len()
    };
    let colours: Vec<usize> = trees.iter().enumerate().map(|(index, tree)| colour(index, tree)).collect();
    let mut of_links: BTreeMap<(NodeId, NodeId), BTreeMap<usize, f64>> = BTreeMap::new();
    let is_both_ways = plan.packing.collective == Collective::AllReduce;
    for (tree, &colour) in trees.iter().zip(&colours) {
        for path in tree.edges.iter().flat_map(|edge| &edge.paths) {
            for pair in path.hops.windows(2) {
                let (from, to) = (pair[0], pair[1]);
                let mut add = |from, to| {
                    let width =
                        plan.topology.link(from, to).map_or(f64::INFINITY, |link| link.bytes_per_s as f64);
                    let link_colours = of_links.entry((from, to)).or_default();
                    *link_colours.entry(colour).or_insert(0.0) += number(path.weight) / width;
                };
                add(from, to);
                if is_both_ways {
                    add(to, from);
                }
            }
        }
    }
    LinkColours { colours, is_by_root, of_links }
}

impl LinkColours {
    /// The colours on a link, each with its share of the link from 0 to 1.
    pub(super) fn of(&self, from: NodeId, to: NodeId) -> impl Iterator<Item = (&'static str, f64)> {
        let of_link = self.of_links.get(&(from, to)).into_iter().flatten();
        of_link.map(|(&colour, &share)| (COLOURS[colour], share))
    }

    /// The colour of a tree.
    fn colour(&self, tree: usize) -> &'static str {
        COLOURS[self.colours[tree]]
    }
}

// Lines between nodes of a picture.

/// A line from a node to another: straight, or bent around what stands between.
#[derive(Clone, Copy)]
struct Curve {
    from: Point,
    bend: Point,
    to: Point,
}

impl Curve {
    /// A point of the line, from 0 at its beginning to 1 at its end.
    fn at(&self, along: f64) -> Point {
        let mix = |from: f64, bend: f64, to: f64| {
            (1.0 - along).powi(2) * from + 2.0 * along * (1.0 - along) * bend + along * along * to
        };
        (mix(self.from.0, self.bend.0, self.to.0), mix(self.from.1, self.bend.1, self.to.1))
    }

    /// The line moved to the right, as seen along its direction.
    fn shifted(&self, by: f64) -> Self {
        let (x, y) = (self.to.0 - self.from.0, self.to.1 - self.from.1);
        let length = super::layout::length(x, y).max(1e-9);
        let (x, y) = (-y / length * by, x / length * by);
        let moved = |at: Point| (at.0 + x, at.1 + y);
        Self { from: moved(self.from), bend: moved(self.bend), to: moved(self.to) }
    }

    /// The line as the path of an SVG.
    fn path(&self) -> String {
        let Self { from, bend, to } = self;
        format!("M{:.1} {:.1}Q{:.1} {:.1} {:.1} {:.1}", from.0, from.1, bend.0, bend.1, to.0, to.1)
    }
}

/// An arrow head on a line, a bit past its middle.
fn arrow(curve: &Curve) -> String {
    let (tip, tail) = (curve.at(0.66), curve.at(0.60));
    let (x, y) = (tip.0 - tail.0, tip.1 - tail.1);
    let length = super::layout::length(x, y).max(1e-9);
    let (x, y) = (x / length, y / length);
    let corner =
        |along: f64, shifted: f64| (tip.0 + along * x - shifted * y, tip.1 + along * y + shifted * x);
    let ((ax, ay), (bx, by), (cx, cy)) = (corner(6.0, 0.0), corner(-11.0, 11.0), corner(-11.0, -11.0));
    format!("M{ax:.1} {ay:.1}L{bx:.1} {by:.1}L{cx:.1} {cy:.1}Z")
}

// The text of a picture.

/// The title of the picture.
fn title(plan: &Plan) -> String {
    let rate = rate_in_words(number(plan.packing.rate));
    let how = if plan.packing.is_optimal() { "optimal" } else { plan.strategy.name() };
    format!("{} over {}: {rate}, {how}", plan.packing.collective, plan.source)
}

/// Why no schedule is faster.
fn sentence(plan: &Plan) -> String {
    let reason = reason_in_words(&plan.topology, &plan.packing);
    let sum = if reason.sum.is_empty() { String::new() } else { format!(": {}", reason.sum) };
    let verdict = verdict_in_words(&plan.packing);
    let verdict =
        if plan.packing.is_optimal() { "No forwarding schedule can be faster" } else { verdict.as_str() };
    format!("{verdict}: {}{sum}.", reason.sentence)
}

/// The names of nodes in the picture: of long names the last component, cut to 14 characters.
fn labels(plan: &Plan) -> Vec<String> {
    let nodes = plan.topology.nodes();
    let longest = nodes.iter().map(|node| node.name.chars().count()).max().unwrap_or(0);
    let short = |name: &str| match name.rsplit_once(['.', '/', ':']) {
        Some((_, last)) if longest > 6 && !last.is_empty() => last.to_owned(),
        _ => name.to_owned(),
    };
    let cut_reason = |name: String| {
        if name.chars().count() <= 14 {
            name
        } else {
            format!("{}…", name.chars().take(13).collect::<String>())
        }
    };
    nodes.iter().map(|node| cut_reason(short(&node.name))).collect()
}

/// Breaks a text into lines of at most `width` pixels.
fn wrapped(text: &str, width: f64) -> Vec<String> {
    let letters = (width / 6.4) as usize;
    let mut lines = vec![String::new()];
    for word in text.split(' ') {
        let last = lines.len() - 1;
        if !lines[last].is_empty() && lines[last].chars().count() + 1 + word.chars().count() > letters {
            lines.push(word.to_owned());
        } else {
            let gap = if lines[last].is_empty() { "" } else { " " };
            lines[last].push_str(gap);
            lines[last].push_str(word);
        }
    }
    lines
}

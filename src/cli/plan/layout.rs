//! Where the nodes of a topology stand in a drawing: by its structure, and the same each time.
//!
//! * Without switches: few ranks in a circle, in the order that keeps wide links short; more by the
//!   distances between them.
//! * Ranks below switches that other switches join: rows, ranks in boxes with the switch that joins
//!   them best.
//! * Switches that all have ranks: a circle of switches with their ranks outside; a single one
//!   stands in the middle.
//! * Ranks joined directly and by switches: a circle for each group of joined ranks, the switches
//!   above.

use std::collections::{BTreeMap, VecDeque};
use std::f64::consts::TAU;

use pleach::packing::topology::{NodeId, NodeKind, Topology};

/// ProbeOutcome of neighbours, in pixels.
const SPACING: f64 = 76.0;
/// ProbeOutcome of rows.
const ROW: f64 = 130.0;
/// Most ranks of a circle without switches.
const CIRCLE_MAX: usize = 12;
/// Most nodes that are placed by their distances, which takes the cube of their number.
const DISTANCES_MAX: usize = 400;
/// Rounds of moving nodes to their distances.
const ROUNDS: usize = 150;
/// Ranks in a row of a box.
const BOX_COLUMNS: usize = 4;

/// A point in pixels.
pub(super) type Point = (f64, f64);

/// The length of a vector. Not `hypot`, which needs glibc 2.35: see `clippy.toml`.
pub(super) fn length(x: f64, y: f64) -> f64 {
    (x * x + y * y).sqrt()
}

/// A drawing's plan.
pub(super) struct Layout {
    /// Of every node.
    pub(super) places: Vec<Point>,
    /// Upper left and lower right corners of boxes.
    pub(super) boxes: Vec<(Point, Point)>,
    pub(super) width: f64,
    pub(super) height: f64,
}

/// Places the nodes.
pub(super) fn layout(topology: &Topology) -> Layout {
    let graph = Graph::of(topology);
    let (places, boxes) = if graph.switches.is_empty() {
        let is_small = graph.ranks.len() <= CIRCLE_MAX || graph.nodes > DISTANCES_MAX;
        (if is_small { circle(&graph) } else { by_distances(&graph) }, Vec::new())
    } else if graph.joins_ranks() {
        islands(&graph)
    } else if graph.hubs().len() == graph.switches.len() {
        (hubs(&graph), Vec::new())
    } else {
        rows(&graph)
    };
    framed(places, boxes)
}

/// Moves all into the picture.
fn framed(mut places: Vec<Point>, mut boxes: Vec<(Point, Point)>) -> Layout {
    const MARGIN: f64 = 56.0;
    let corners = boxes.iter().flat_map(|&(one, other)| [one, other]);
    let all: Vec<Point> = places.iter().copied().chain(corners).collect();
    let least = |of: fn(&Point) -> f64| all.iter().map(of).fold(f64::INFINITY, f64::min);
    let most = |of: fn(&Point) -> f64| all.iter().map(of).fold(f64::NEG_INFINITY, f64::max);
    let (left, top) = (least(|at| at.0) - MARGIN, least(|at| at.1) - MARGIN);
    let (right, bottom) = (most(|at| at.0) + MARGIN, most(|at| at.1) + MARGIN);
    let move_in = |at: &mut Point| *at = (at.0 - left, at.1 - top);
    places.iter_mut().for_each(move_in);
    boxes.iter_mut().for_each(|(one, other)| {
        move_in(one);
        move_in(other);
    });
    Layout { places, boxes, width: right - left, height: bottom - top }
}

/// The nodes of a plan and their neighbours, in either direction.
struct Graph {
    nodes: usize,
    ranks: Vec<usize>,
    switches: Vec<usize>,
    /// By node: neighbours with the bandwidth to them, as shares of the widest link.
    joined: Vec<BTreeMap<usize, f64>>,
}

impl Graph {
    fn of(topology: &Topology) -> Self {
        let nodes = topology.nodes().len();
        let of_kind = |kind| (0..nodes).filter(|&node| topology.nodes()[node].kind == kind).collect();
        let widest = topology.links().iter().map(|link| link.bytes_per_s).max().unwrap_or(1) as f64;
        let mut joined = vec![BTreeMap::new(); nodes];
        for link in topology.links() {
            let (NodeId(from), NodeId(to)) = (link.from, link.to);
            for (one, other) in [(from, to), (to, from)] {
                *joined[one as usize].entry(other as usize).or_insert(0.0) +=
                    link.bytes_per_s as f64 / widest;
            }
        }
        Self { nodes, ranks: of_kind(NodeKind::Rank), switches: of_kind(NodeKind::Switch), joined }
    }

    fn is_rank(&self, node: usize) -> bool {
        self.ranks.binary_search(&node).is_ok()
    }

    fn joins_ranks(&self) -> bool {
        self.ranks.iter().any(|&rank| self.joined[rank].keys().any(|&other| self.is_rank(other)))
    }

    /// The switch with the widest link to a rank.
    fn hub(&self, rank: usize) -> Option<usize> {
        let switches = self.joined[rank].iter().filter(|(other, _)| !self.is_rank(**other));
        let best = switches.fold(None, |best: Option<(usize, f64)>, (&switch, &width)| match best {
            Some((_, widest)) if widest >= width => best,
            _ => Some((switch, width)),
        });
        best.map(|(switch, _)| switch)
    }

    /// The ranks of each switch that joins some of them best, in the order of their first ranks.
    fn hubs(&self) -> Vec<(usize, Vec<usize>)> {
        let mut hubs: Vec<(usize, Vec<usize>)> = Vec::new();
        for &rank in &self.ranks {
            let Some(hub) = self.hub(rank) else { continue };
            match hubs.iter_mut().find(|(known, _)| *known == hub) {
                Some((_, ranks)) => ranks.push(rank),
                None => hubs.push((hub, vec![rank])),
            }
        }
        hubs
    }

    /// Links between each node and others.
    fn distances(&self, from: impl IntoIterator<Item = usize>) -> Vec<usize> {
        let mut distances = vec![usize::MAX; self.nodes];
        let mut left: VecDeque<usize> = from.into_iter().collect();
        left.iter().for_each(|&node| distances[node] = 0);
        while let Some(node) = left.pop_front() {
            for &other in self.joined[node].keys() {
                if distances[other] == usize::MAX {
                    distances[other] = distances[node] + 1;
                    left.push_back(other);
                }
            }
        }
        distances
    }
}

fn on_circle(center: Point, radius: f64, turn: f64) -> Point {
    let angle = (turn - 0.25) * TAU;
    (center.0 + radius * angle.cos(), center.1 + radius * angle.sin())
}

fn radius_for(nodes: usize) -> f64 {
    let apart = SPACING * 1.5;
    if nodes < 2 { 0.0 } else { (apart / 2.0 / (TAU / 2.0 / nodes as f64).sin()).max(SPACING) }
}

/// In a circle, in the order in which wide links are shortest: pairs are swapped as long as that
/// helps.
fn circle(graph: &Graph) -> Vec<Point> {
    const SWAPPED_MAX: usize = 64;
    let nodes = graph.nodes;
    let mut order: Vec<usize> = (0..nodes).collect();
    let length = |one: usize, other: usize| {
        let apart = one.abs_diff(other);
        (std::f64::consts::PI * apart as f64 / nodes as f64).sin()
    };
    let cost = |order: &[usize]| -> f64 {
        let mut position = vec![0; nodes];
        order.iter().enumerate().for_each(|(index, &node)| position[node] = index);
        let of = |node: usize| -> f64 {
            let joined = graph.joined[node].iter();
            joined.map(|(&other, width)| width * length(position[node], position[other])).sum()
        };
        (0..nodes).map(of).sum()
    };
    let mut least = cost(&order);
    let mut is_better = nodes <= SWAPPED_MAX;
    while is_better {
        is_better = false;
        for one in 0..nodes {
            for other in one + 1..nodes {
                order.swap(one, other);
                let swapped = cost(&order);
                if swapped < least - 1e-9 {
                    least = swapped;
                    is_better = true;
                } else {
                    order.swap(one, other);
                }
            }
        }
    }
    let mut places = vec![(0.0, 0.0); nodes];
    // An even number stands on a flat side: two at the top.
    let half = if nodes.is_multiple_of(2) { 0.5 } else { 0.0 };
    for (index, &node) in order.iter().enumerate() {
        places[node] = on_circle((0.0, 0.0), radius_for(nodes), (index as f64 + half) / nodes as f64);
    }
    places
}

/// Each pair as far apart as there are links between them: stress is made smaller round by round
/// (SMACOF).
fn by_distances(graph: &Graph) -> Vec<Point> {
    let nodes = graph.nodes;
    let distances: Vec<Vec<f64>> = (0..nodes)
        .map(|node| graph.distances([node]).into_iter().map(|distance| distance as f64).collect())
        .collect();
    let mut places = principal(&distances);
    for _ in 0..ROUNDS {
        let mut moved = vec![(0.0, 0.0); nodes];
        for one in 0..nodes {
            let (mut sum, mut weights) = ((0.0, 0.0), 0.0);
            for other in (0..nodes).filter(|&other| other != one) {
                let wanted = distances[one][other];
                let (x, y) = (places[one].0 - places[other].0, places[one].1 - places[other].1);
                let is = length(x, y).max(1e-6);
                let weight = 1.0 / (wanted * wanted);
                sum.0 += weight * (places[other].0 + wanted * x / is);
                sum.1 += weight * (places[other].1 + wanted * y / is);
                weights += weight;
            }
            moved[one] = (sum.0 / weights, sum.1 / weights);
        }
        places = moved;
    }
    let mut nearest = f64::INFINITY;
    for one in 0..nodes {
        for other in one + 1..nodes {
            nearest = nearest.min(length(places[one].0 - places[other].0, places[one].1 - places[other].1));
        }
    }
    // No two labels overlap, but nothing is drawn without end.
    let scale = (SPACING / nearest.max(1e-3)).min(4.0 * SPACING);
    places.into_iter().map(|(x, y)| (x * scale, y * scale)).collect()
}

/// The two directions in which squared distances differ most (classical scaling, by power
/// iteration).
fn principal(distances: &[Vec<f64>]) -> Vec<Point> {
    let nodes = distances.len();
    let square = |one: usize, other: usize| distances[one][other].powi(2);
    let mean: Vec<f64> = (0..nodes)
        .map(|one| (0..nodes).map(|other| square(one, other)).sum::<f64>() / nodes as f64)
        .collect();
    let overall = mean.iter().sum::<f64>() / nodes as f64;
    let product = |one: usize, other: usize| -0.5 * (square(one, other) - mean[one] - mean[other] + overall);
    let mut axes: Vec<Vec<f64>> = Vec::new();
    for axis in 0..2 {
        // Not along any symmetry, and the same each time.
        let mut vector: Vec<f64> =
            (0..nodes).map(|node| ((node * (axis + 2) + 1) as f64 * 0.618_034).sin()).collect();
        let mut value = 0.0;
        for _ in 0..ROUNDS {
            for known in &axes {
                let along: f64 = known.iter().zip(&vector).map(|(one, other)| one * other).sum();
                let length: f64 = known.iter().map(|part| part * part).sum();
                vector
                    .iter_mut()
                    .zip(known)
                    .for_each(|(part, known)| *part -= along / length.max(1e-9) * known);
            }
            let next: Vec<f64> = (0..nodes)
                .map(|one| (0..nodes).map(|other| product(one, other) * vector[other]).sum())
                .collect();
            value = next.iter().map(|part| part * part).sum::<f64>().sqrt();
            vector = next.into_iter().map(|part| part / value.max(1e-9)).collect();
        }
        axes.push(vector.into_iter().map(|part| part * value.sqrt()).collect());
    }
    (0..nodes).map(|node| (axes[0][node], axes[1][node])).collect()
}

/// Switches in a circle, each with its ranks outside of it.
fn hubs(graph: &Graph) -> Vec<Point> {
    let hubs = graph.hubs();
    let mut places = vec![(0.0, 0.0); graph.nodes];
    if let [(hub, ranks)] = hubs.as_slice() {
        places[*hub] = (0.0, 0.0);
        let radius = radius_for(ranks.len()).max(1.6 * SPACING);
        let half = if ranks.len().is_multiple_of(2) { 0.5 } else { 0.0 };
        for (index, &rank) in ranks.iter().enumerate() {
            places[rank] = on_circle((0.0, 0.0), radius, (index as f64 + half) / ranks.len() as f64);
        }
        return places;
    }
    let all: usize = hubs.iter().map(|(_, ranks)| ranks.len()).sum();
    let outer = radius_for(all).max(3.0 * SPACING);
    let inner = outer - 1.6 * SPACING;
    let mut before = 0;
    for (hub, ranks) in &hubs {
        let turn = |index: f64| (before as f64 + index) / all as f64;
        places[*hub] = on_circle((0.0, 0.0), inner, turn((ranks.len() as f64 - 1.0) / 2.0));
        for (index, &rank) in ranks.iter().enumerate() {
            places[rank] = on_circle((0.0, 0.0), outer, turn(index as f64));
        }
        before += ranks.len();
    }
    places
}

/// Boxes of ranks side by side, and the switches above them in rows by their distance from the
/// ranks.
fn rows(graph: &Graph) -> (Vec<Point>, Vec<(Point, Point)>) {
    let hubs = graph.hubs();
    let distances = graph.distances(graph.ranks.iter().copied());
    let is_hub = |switch: usize| hubs.iter().any(|&(hub, _)| hub == switch);
    let other_strategies: Vec<usize> =
        graph.switches.iter().copied().filter(|&switch| !is_hub(switch)).collect();
    // Boxes that switches join at their ranks have their own switch below.
    let is_below = other_strategies.iter().any(|&switch| distances[switch] == 1);
    let (mut places, mut boxes) = (vec![(0.0, 0.0); graph.nodes], Vec::new());
    let mut left = 0.0;
    for (hub, ranks) in &hubs {
        let columns = if ranks.len() > BOX_COLUMNS { ranks.len().div_ceil(2) } else { ranks.len() };
        let width = columns.max(1) as f64 * SPACING;
        for (index, &rank) in ranks.iter().enumerate() {
            let (row, column) = (index / columns, index % columns);
            let shift = if row == 0 { 0.25 } else { 0.75 };
            let shift = if ranks.len() > columns { shift } else { 0.5 };
            places[rank] = (left + (column as f64 + shift) * SPACING, row as f64 * 0.8 * SPACING);
        }
        let bottom = if ranks.len() > columns { 0.8 * SPACING } else { 0.0 };
        let middle = left + width / 2.0;
        places[*hub] = if is_below { (middle, bottom + 0.8 * ROW) } else { (middle, -0.9 * ROW) };
        if is_below {
            boxes.push(((left - 14.0, -34.0), (left + width + 14.0, bottom + 0.8 * ROW + 32.0)));
        }
        left += width + if is_below { 0.8 * SPACING } else { 0.3 * SPACING };
    }
    let width = left;
    let from = if is_below { 1 } else { 2 };
    let highest = other_strategies.iter().map(|&switch| distances[switch]).max().unwrap_or(0);
    for distance in 1..=highest {
        let mut row: Vec<usize> =
            other_strategies.iter().copied().filter(|&switch| distances[switch] == distance).collect();
        // Each below those it is joined with.
        let middle = |switch: &usize| {
            let below: Vec<f64> = graph.joined[*switch]
                .keys()
                .filter(|&&node| distances[node] < distance)
                .map(|&node| places[node].0)
                .collect();
            below.iter().sum::<f64>() / below.len().max(1) as f64
        };
        row.sort_by(|one, other| middle(one).total_cmp(&middle(other)));
        let height = -((distance + 1 - from) as f64) * ROW - if is_below { 0.2 * ROW } else { 0.9 * ROW };
        let count = row.len() as f64;
        for (index, switch) in row.into_iter().enumerate() {
            places[switch] = ((index as f64 + 0.5) * width / count - 0.15 * SPACING, height);
        }
    }
    (places, boxes)
}

/// Groups of ranks joined directly, each in a circle; the switches in a row above.
fn islands(graph: &Graph) -> (Vec<Point>, Vec<(Point, Point)>) {
    let mut group_of = vec![usize::MAX; graph.nodes];
    let mut groups: Vec<Vec<usize>> = Vec::new();
    for &start in &graph.ranks {
        if group_of[start] != usize::MAX {
            continue;
        }
        let mut group = Vec::new();
        let mut left = vec![start];
        group_of[start] = groups.len();
        while let Some(node) = left.pop() {
            group.push(node);
            for &other in graph.joined[node].keys().filter(|other| graph.is_rank(**other)) {
                if group_of[other] == usize::MAX {
                    group_of[other] = groups.len();
                    left.push(other);
                }
            }
        }
        group.sort_unstable();
        groups.push(group);
    }
    let (mut places, mut boxes) = (vec![(0.0, 0.0); graph.nodes], Vec::new());
    let (mut left, mut highest) = (0.0, 0.0f64);
    for group in &groups {
        let inside = Graph {
            nodes: group.len(),
            ranks: (0..group.len()).collect(),
            switches: Vec::new(),
            joined: group
                .iter()
                .map(|&node| {
                    let within =
                        |(other, width): (&usize, &f64)| Some((group.binary_search(other).ok()?, *width));
                    graph.joined[node].iter().filter_map(within).collect()
                })
                .collect(),
        };
        let radius = radius_for(group.len());
        for (place, &node) in circle(&inside).into_iter().zip(group) {
            places[node] = (left + radius + place.0, place.1);
        }
        let edge = radius + 34.0;
        boxes.push(((left + radius - edge, -edge), (left + radius + edge, edge)));
        highest = highest.max(edge);
        left += 2.0 * radius + 1.4 * SPACING;
    }
    let count = graph.switches.len() as f64;
    for (index, &switch) in graph.switches.iter().enumerate() {
        places[switch] = ((index as f64 + 0.5) * (left - 1.4 * SPACING) / count, -highest - 0.8 * ROW);
    }
    (places, boxes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use pleach::packing::topology::preset;

    #[test]
    fn no_two_nodes_of_any_structure_stand_on_each_other() {
        for name in [
            "ring:5",
            "dgx-1v",
            "torus:4x4",
            "star:6",
            "dgx-a100:2",
            "mi250:1",
            "mi250:2",
            "fat-tree:4",
            "dragonfly:3,2,2",
        ] {
            let topology = preset(name).expect(name);
            let Layout { places, width, height, .. } = layout(&topology);
            for (index, one) in places.iter().enumerate() {
                assert!(one.0 > 0.0 && one.0 < width && one.1 > 0.0 && one.1 < height, "{name} {one:?}");
                for other in &places[..index] {
                    let apart = length(one.0 - other.0, one.1 - other.1);
                    assert!(apart > 40.0, "{name}: {apart}");
                }
            }
        }
    }

    #[test]
    fn the_same_topology_is_laid_out_the_same() {
        let places = || layout(&preset("torus:4x4").expect("a preset")).places;
        assert_eq!(places(), places());
    }
}

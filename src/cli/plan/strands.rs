//! Which trees go over which link, and in which colours they are drawn.

use std::collections::BTreeMap;

use pleach::Collective;
use pleach::packing::Tree;
use pleach::packing::topology::NodeId;

use super::outcome::{Plan, number};

/// Colours that differ for most eyes, on white and on black.
const COLOURS: [&str; 12] = [
    "#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9", "#b8a800", "#8a63d2", "#e15759",
    "#4aa564", "#9c755f", "#7b8794",
];

/// The strands of all links.
pub(super) struct Strands {
    /// By tree.
    colours: Vec<usize>,
    /// Whether trees have the colours of their roots.
    pub(super) is_by_root: bool,
    /// By link: which colours go over it, and what share of the link each takes.
    of_links: BTreeMap<(NodeId, NodeId), BTreeMap<usize, f64>>,
}

/// Trees in colours: each its own; where there are more than colours, those of a root share one if
/// there are several roots.
pub(super) fn strands(plan: &Plan) -> Strands {
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
                    let strands = of_links.entry((from, to)).or_default();
                    *strands.entry(colour).or_insert(0.0) += number(path.weight) / width;
                };
                add(from, to);
                if is_both_ways {
                    add(to, from);
                }
            }
        }
    }
    Strands { colours, is_by_root, of_links }
}

impl Strands {
    /// The colours on a link, each with its share of the link from 0 to 1.
    pub(super) fn of(&self, from: NodeId, to: NodeId) -> impl Iterator<Item = (&'static str, f64)> {
        let of_link = self.of_links.get(&(from, to)).into_iter().flatten();
        of_link.map(|(&colour, &share)| (COLOURS[colour], share))
    }

    /// The colour of a tree.
    pub(super) fn colour(&self, tree: usize) -> &'static str {
        COLOURS[self.colours[tree]]
    }
}

//! Automorphisms by singling out nodes, refining, and trying what then looks the same.
//!
//! One path down, in which nodes are singled out until every node has a colour of its own, gives an
//! order of all nodes. Any other path of the same trace gives another order; what carries the first
//! into it is an automorphism if it carries arcs into arcs, which is looked at arc by arc. Going up
//! the first path again, at each level the nodes that look like the one singled out there are
//! tried, one of each set that the automorphisms found so far do not join already. Near ones are
//! tried first, and other nodes go to where the one moved first came from rather than anywhere: so
//! each automorphism moves few nodes, and which ones are found depends little on how nodes are
//! numbered.
//!
//! **Invariant:** everything returned is an automorphism. Within the limits all of them are
//! products of those returned; beyond, `complete` is false and there may be others.

use super::permutation::{Classes, Permutation};
use super::refine::{Colouring, Graph, Trace};

/// How much a search does at most.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    /// Arcs and nodes looked at.
    pub(super) work: u64,
    /// Nodes singled out in vain on the way to one automorphism.
    pub(super) failures: u32,
    /// Nodes singled out one after the other.
    pub(super) depth: usize,
}

/// What a search found.
#[derive(Clone, Debug)]
pub(super) struct Found {
    /// All others are products of them; sorted from those that leave most nodes of the first path
    /// to those that leave none.
    pub(super) generators: Vec<Permutation>,
    /// How many nodes each node of the first path is carried to by what leaves those before it:
    /// their product is how many automorphisms there are.
    #[cfg_attr(not(test), expect(dead_code, reason = "what tests judge a search by"))]
    pub(super) basic_orbits: Vec<u32>,
    /// Whether the limits were not met.
    #[cfg_attr(not(test), expect(dead_code, reason = "what tests judge a search by"))]
    pub(super) complete: bool,
    /// Arcs and nodes looked at.
    #[cfg_attr(not(test), expect(dead_code, reason = "what tests judge a search by"))]
    pub(super) work: u64,
}

/// What was singled out on the first path.
struct Level {
    node: u32,
    cell: u32,
    trace: Vec<u64>,
    /// The state before.
    mark: usize,
}

struct Search<'g> {
    graph: &'g Graph,
    limits: Limits,
    colouring: Colouring,
    levels: Vec<Level>,
    /// All nodes in the order of the first path's end.
    order: Vec<u32>,
    /// How far every node is from the one that the present automorphism moves first.
    from_moved: Vec<u32>,
    failures_left: u32,
    complete: bool,
}

/// All nodes in the order of the first path's end; none where a limit was met before.
pub(super) fn end_of_first_path(graph: &Graph, limits: Limits) -> Option<Vec<u32>> {
    let mut search = Search::new(graph, limits);
    search.go_down();
    search.complete.then(|| search.colouring.elements().to_vec())
}

/// Searches a graph for automorphisms.
pub(super) fn automorphisms(graph: &Graph, limits: Limits) -> Found {
    let mut search = Search::new(graph, limits);
    search.go_down();
    search.order = search.colouring.elements().to_vec();
    let mut generators = Vec::new();
    let mut basic_orbits = vec![1; search.levels.len()];
    let mut joined = Classes::new(graph.nodes());
    for level in (0..search.levels.len()).rev() {
        search.colouring.undo(search.levels[level].mark);
        search.try_level(level, &mut joined, &mut generators);
        let Level { node, cell, .. } = search.levels[level];
        let first = joined.first(node);
        let alike = search.colouring.cell_at(cell);
        basic_orbits[level] = alike.iter().filter(|&&other| joined.first(other) == first).count() as u32;
    }
    let work = search.colouring.work;
    Found { generators, basic_orbits, complete: search.complete, work }
}

impl<'g> Search<'g> {
    fn new(graph: &'g Graph, limits: Limits) -> Self {
        Self {
            graph,
            limits,
            colouring: Colouring::new(graph),
            levels: Vec::new(),
            order: Vec::new(),
            from_moved: Vec::new(),
            failures_left: 0,
            complete: true,
        }
    }

    /// The first path. A path that is cut short finds nothing wrong: its end does not tell all
    /// nodes apart, and what does not carry arcs into arcs is refused.
    fn go_down(&mut self) {
        while let Some(cell) = self.colouring.largest_cell() {
            if self.levels.len() >= self.limits.depth || self.colouring.work > self.limits.work {
                self.complete = false;
                break;
            }
            let node = self.colouring.cell_at(cell).iter().copied().min().unwrap_or(0);
            let (mark, mut trace) = (self.colouring.mark(), Vec::new());
            self.colouring.single_out(self.graph, node, &mut Trace::Kept(&mut trace));
            self.levels.push(Level { node, cell, trace, mark });
        }
    }

    fn try_level(&mut self, level: usize, joined: &mut Classes, generators: &mut Vec<Permutation>) {
        let Level { node, cell, .. } = self.levels[level];
        self.from_moved = self.distances_from(node);
        let mut alike = self.colouring.cell_at(cell).to_vec();
        alike.sort_unstable_by_key(|&other| (self.from_moved[other as usize], other));
        let mut refused: Vec<u32> = Vec::new();
        for other in alike {
            let first = joined.first(other);
            if first == joined.first(node) || refused.iter().any(|&one| joined.first(one) == first) {
                continue;
            }
            if self.colouring.work > self.limits.work {
                self.complete = false;
                return;
            }
            self.failures_left = self.limits.failures;
            if let Some(found) = self.descend(level, other) {
                joined.merge_along(&found);
                generators.push(found);
            } else {
                self.complete &= self.failures_left > 0;
                refused.push(other);
            }
        }
    }

    /// An automorphism that carries the first path's node of this level to `node`, and those before
    /// to themselves.
    fn descend(&mut self, level: usize, node: u32) -> Option<Permutation> {
        let mark = self.colouring.mark();
        let mut trace = Trace::Expected(&self.levels[level].trace, 0);
        let found = if !self.colouring.single_out(self.graph, node, &mut trace) {
            self.failures_left = self.failures_left.saturating_sub(1);
            None
        } else if level + 1 == self.levels.len() {
            self.candidate()
        } else {
            self.descend_any(level + 1)
        };
        self.colouring.undo(mark);
        found
    }

    /// Leaves the first path's node of this level where it is if that is possible: so most nodes
    /// stay in their places.
    fn descend_any(&mut self, level: usize) -> Option<Permutation> {
        let Level { node, cell, .. } = self.levels[level];
        let stays = self.colouring.cell_of(node) == cell;
        if stays && let found @ Some(_) = self.descend(level, node) {
            return found;
        }
        let from_here = self.distances_from(node);
        let mut alike = self.colouring.cell_at(cell).to_vec();
        alike.sort_unstable_by_key(|&other| {
            (self.from_moved[other as usize], from_here[other as usize], other)
        });
        for other in alike {
            if self.failures_left == 0 || self.colouring.work > self.limits.work {
                self.failures_left = 0;
                return None;
            }
            if !(stays && other == node)
                && let found @ Some(_) = self.descend(level, other)
            {
                return found;
            }
        }
        None
    }

    /// How many arcs, whichever way they lead, every node is away from one.
    fn distances_from(&mut self, node: u32) -> Vec<u32> {
        self.colouring.work += (self.graph.nodes() + self.graph.arcs.len()) as u64;
        self.graph.distances_from(node)
    }

    /// What carries the order of the first path into this one, if that is an automorphism.
    fn candidate(&mut self) -> Option<Permutation> {
        let mut images = vec![0; self.order.len()];
        for (&from, &to) in self.order.iter().zip(self.colouring.elements()) {
            images[from as usize] = to;
        }
        self.colouring.work += (images.len() + self.graph.arcs.len()) as u64;
        let is_one = self.graph.is_carried_into_itself_by(&images);
        if !is_one {
            self.failures_left = self.failures_left.saturating_sub(1);
        }
        is_one.then(|| Permutation::new(images))
    }
}

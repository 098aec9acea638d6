//! Search for automorphisms by individualisation and refinement (McKay 1981).
//!
//! The first path individualises nodes until every node has a colour of its own. This gives an
//! order of all nodes. Any other path with the same trace gives another order. The permutation from
//! the first order to the other order is an automorphism if it maps arcs to arcs, which is verified
//! arc by arc. The levels of the first path are then visited from the last level to the first. Each
//! level tries the nodes with the colour of the individualised node, one node of each set that the
//! known automorphisms do not join yet. Nodes near the individualised node are tried first. The
//! other nodes are mapped near the node that was moved first. So each automorphism moves few nodes,
//! and the result depends little on the numbers of nodes.
//!
//! **Invariant:** everything returned is an automorphism. Within the limits all automorphisms are
//! products of the returned ones; beyond the limits `complete` is false and there may be others.

use std::collections::VecDeque;

use super::{Permutation, UnionFind};
use pleach_vocabulary::digest::hash_of_pair;

/// The limits of a search.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    /// The number of arcs and nodes that are visited.
    pub(super) work: u64,
    /// The number of nodes that are individualised in vain on the path to one automorphism.
    pub(super) failures: u32,
    /// The number of nodes that are individualised one after the other.
    pub(super) depth: usize,
}

/// The result of a search.
#[derive(Clone, Debug)]
pub(super) struct Automorphisms {
    /// All other automorphisms are products of these. Automorphisms that fix more nodes of the
    /// first path come first.
    pub(super) generators: Vec<Permutation>,
    /// For each node of the first path, the number of its images under automorphisms that fix the
    /// nodes before it. The product of these numbers is the number of automorphisms.
    #[cfg_attr(not(test), expect(dead_code, reason = "what tests judge a search by"))]
    pub(super) basic_orbits: Vec<u32>,
    /// Whether the search ended within its limits.
    #[cfg_attr(not(test), expect(dead_code, reason = "what tests judge a search by"))]
    pub(super) complete: bool,
    /// The number of arcs and nodes that were visited.
    #[cfg_attr(not(test), expect(dead_code, reason = "what tests judge a search by"))]
    pub(super) work: u64,
}

/// A level of the first path: the node that was individualised, and the state before.
struct Level {
    node: u32,
    cell: u32,
    trace: Vec<u64>,
    /// The mark of the state before.
    mark: usize,
}

struct Search<'g> {
    graph: &'g Graph,
    limits: Limits,
    colouring: Colouring,
    levels: Vec<Level>,
    /// All nodes in the order of the first path's end.
    order: Vec<u32>,
    /// The distance of every node from the node that the present automorphism moves first.
    from_moved: Vec<u32>,
    failures_left: u32,
    complete: bool,
}

/// All nodes in the order of the first path's end; `None` if a limit is reached before.
pub(super) fn end_of_first_path(graph: &Graph, limits: Limits) -> Option<Vec<u32>> {
    let mut automorphisms = Search::new(graph, limits);
    automorphisms.go_down();
    automorphisms.complete.then(|| automorphisms.colouring.elements().to_vec())
}

/// Searches a graph for automorphisms.
pub(super) fn automorphisms(graph: &Graph, limits: Limits) -> Automorphisms {
    let mut automorphisms = Search::new(graph, limits);
    automorphisms.go_down();
    automorphisms.order = automorphisms.colouring.elements().to_vec();
    let mut generators = Vec::new();
    let mut basic_orbits = vec![1; automorphisms.levels.len()];
    let mut joined = UnionFind::new(graph.nodes());
    for level in (0..automorphisms.levels.len()).rev() {
        automorphisms.colouring.undo(automorphisms.levels[level].mark);
        automorphisms.try_level(level, &mut joined, &mut generators);
        let Level { node, cell, .. } = automorphisms.levels[level];
        let first = joined.first(node);
        let alike = automorphisms.colouring.cell_at(cell);
        basic_orbits[level] = alike.iter().filter(|&&other| joined.first(other) == first).count() as u32;
    }
    let work = automorphisms.colouring.work;
    Automorphisms { generators, basic_orbits, complete: automorphisms.complete, work }
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

    /// Makes the first path. If a limit cuts the path short, nothing wrong is found: the order at
    /// its end does not separate all nodes, and a permutation that does not map arcs to arcs is
    /// rejected.
    fn go_down(&mut self) {
        while let Some(cell) = self.colouring.largest_cell() {
            if self.levels.len() >= self.limits.depth || self.colouring.work > self.limits.work {
                self.complete = false;
                break;
            }
            let node = self.colouring.cell_at(cell).iter().copied().min().unwrap_or(0);
            let (mark, mut trace) = (self.colouring.mark(), Vec::new());
            self.colouring.individualise(self.graph, node, &mut Trace::Recording(&mut trace));
            self.levels.push(Level { node, cell, trace, mark });
        }
    }

    fn try_level(&mut self, level: usize, joined: &mut UnionFind, generators: &mut Vec<Permutation>) {
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

    /// An automorphism that maps the first path's node of this level to `node`, and fixes the nodes
    /// of the levels before.
    fn descend(&mut self, level: usize, node: u32) -> Option<Permutation> {
        let mark = self.colouring.mark();
        let mut trace = Trace::Expected(&self.levels[level].trace, 0);
        let found = if !self.colouring.individualise(self.graph, node, &mut trace) {
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

    /// An automorphism that fixes the first path's node of this level if possible, so that most
    /// nodes keep their places.
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

    /// The distance of every node from one node, in arcs of either direction.
    fn distances_from(&mut self, node: u32) -> Vec<u32> {
        self.colouring.work += (self.graph.nodes() + self.graph.arcs.len()) as u64;
        self.graph.distances_from(node)
    }

    /// The permutation from the order of the first path to the present order, if it is an
    /// automorphism.
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

// Colour refinement (1-dimensional Weisfeiler-Leman): nodes with different links get different
// colours, until nothing changes.
//
// A [`Colouring`] is a list of all nodes in which nodes of equal colour are adjacent (a *cell*). A
// refinement step counts, for every node, the arcs to and from the nodes of one cell, and splits
// cells by the counts. Splits are recorded, so they can be undone. Cells are identified by
// position and by hashes of labels, never by node numbers. So refinement commutes with any
// renumbering of the nodes, and so does its trace.
//
// **Invariant:** if an automorphism maps a node to another one, and maps the
// [individualised](Colouring::individualise) nodes along, both nodes are in cells at the same
// position. Counts are sums of hashes: a collision separates fewer nodes, and the invariant still
// holds.

/// Nodes with colours and arcs with labels: the input of a search.
#[derive(Clone, Debug)]
pub(super) struct Graph {
    /// The colours of the nodes. Automorphisms map nodes only to nodes of the same colour.
    colours: Vec<u64>,
    /// Each arc as (from, to, label), sorted and without duplicates.
    arcs: Vec<(u32, u32, u64)>,
    /// The place in `arcs` where the arcs from each node begin; the last element is the number of
    /// arcs.
    first: Vec<u32>,
    /// The places in `arcs` of the arcs to each node.
    entering: Vec<Vec<u32>>,
    /// For every node, the other ends of its arcs, each with a hash of the label and the direction.
    around: Vec<Vec<(u32, u64)>>,
}

impl Graph {
    pub(super) fn new(colours: Vec<u64>, mut arcs: Vec<(u32, u32, u64)>) -> Self {
        arcs.sort_unstable();
        arcs.dedup();
        let mut around = vec![Vec::new(); colours.len()];
        let mut entering = vec![Vec::new(); colours.len()];
        let mut first = vec![0; colours.len() + 1];
        for (place, &(from, to, label)) in arcs.iter().enumerate() {
            first[from as usize + 1] = place as u32 + 1;
            entering[to as usize].push(place as u32);
            around[from as usize].push((to, hash_of_pair(label, 1)));
            around[to as usize].push((from, hash_of_pair(label, 2)));
        }
        for node in 0..colours.len() {
            first[node + 1] = first[node + 1].max(first[node]);
        }
        Self { colours, arcs, first, entering, around }
    }

    fn nodes(&self) -> usize {
        self.colours.len()
    }

    /// The distance of every node from one node, in arcs of either direction.
    fn distances_from(&self, node: u32) -> Vec<u32> {
        let mut distances = vec![u32::MAX; self.nodes()];
        distances[node as usize] = 0;
        let mut reached = vec![node];
        let mut next = 0;
        while let Some(&node) = reached.get(next) {
            next += 1;
            for &(other, _) in &self.around[node as usize] {
                if distances[other as usize] == u32::MAX {
                    distances[other as usize] = distances[node as usize] + 1;
                    reached.push(other);
                }
            }
        }
        distances
    }

    /// Whether a permutation maps arcs to arcs of the same label, and nodes to nodes of the same
    /// colour. Every arc and node is checked. `images` must have every node once.
    pub(super) fn is_carried_into_itself_by(&self, images: &[u32]) -> bool {
        let image = |node: u32| images[node as usize];
        let is_arc = |&(from, to, label): &(u32, u32, u64)| {
            self.leaving(image(from)).binary_search(&(image(from), image(to), label)).is_ok()
        };
        // An arc between fixed nodes is its own image. Arcs with a moved end are mapped to arcs
        // with a moved end, and different arcs have different images. So if the images of all these
        // arcs are arcs, every such arc is an image.
        let moved = (0..self.nodes() as u32).filter(|&node| image(node) != node);
        let is_kept = |node: u32| {
            self.colours[node as usize] == self.colours[image(node) as usize]
                && self.leaving(node).iter().all(is_arc)
                && self.entering[node as usize].iter().all(|&arc| is_arc(&self.arcs[arc as usize]))
        };
        moved.into_iter().all(is_kept)
    }

    fn leaving(&self, node: u32) -> &[(u32, u32, u64)] {
        &self.arcs[self.first[node as usize] as usize..self.first[node as usize + 1] as usize]
    }
}

/// The steps of a refinement, as numbers that do not depend on the numbers of nodes.
enum Trace<'t> {
    /// A trace that is recorded.
    Recording(&'t mut Vec<u64>),
    /// A recorded trace to compare with, and the place in it.
    Expected(&'t [u64], usize),
}

impl Trace<'_> {
    /// Notes a step. Returns whether the refinement may go on.
    fn note(&mut self, event: u64) -> bool {
        match self {
            Self::Recording(events) => {
                events.push(event);
                true
            }
            Self::Expected(events, next) => {
                *next += 1;
                events.get(*next - 1) == Some(&event)
            }
        }
    }

    fn is_complete(&self) -> bool {
        match self {
            Self::Recording(_) => true,
            Self::Expected(events, next) => events.len() == *next,
        }
    }
}

/// All nodes. The nodes of a colour are adjacent. See the module.
#[derive(Clone, Debug)]
struct Colouring {
    elements: Vec<u32>,
    /// By node: its place in `elements`.
    place: Vec<u32>,
    /// By node: the place where its cell begins.
    cell: Vec<u32>,
    /// By place: the length of the cell that begins there.
    length: Vec<u32>,
    /// Each split: the place where the new cell begins and the place where its parent cell begins.
    splits: Vec<(u32, u32)>,
    /// The cells that still have to split other cells.
    left: VecDeque<u32>,
    is_left: Vec<bool>,
    /// By node: its count of arcs to the present splitter; zero at other times.
    score: Vec<u64>,
    touched: Vec<u32>,
    /// The number of arcs and nodes visited so far.
    work: u64,
}

impl Colouring {
    /// The colouring by the colours of the graph, refined.
    fn new(graph: &Graph) -> Self {
        let nodes = graph.nodes();
        let mut elements: Vec<u32> = (0..nodes as u32).collect();
        elements.sort_by_key(|&node| (graph.colours[node as usize], node));
        let mut colouring = Self {
            place: vec![0; nodes],
            cell: vec![0; nodes],
            length: vec![0; nodes],
            splits: Vec::new(),
            left: VecDeque::new(),
            is_left: vec![false; nodes],
            score: vec![0; nodes],
            touched: Vec::new(),
            work: nodes as u64,
            elements,
        };
        let mut start = 0;
        for place in 0..nodes {
            let colour = |place: usize| graph.colours[colouring.elements[place] as usize];
            if place > 0 && colour(place) != colour(place - 1) {
                start = place;
            }
            let node = colouring.elements[place] as usize;
            colouring.place[node] = place as u32;
            colouring.cell[node] = start as u32;
            colouring.length[start] += 1;
            if start == place {
                colouring.enqueue(start as u32);
            }
        }
        colouring.automorphisms(graph, &mut Trace::Recording(&mut Vec::new()));
        colouring
    }

    /// The nodes in their order.
    fn elements(&self) -> &[u32] {
        &self.elements
    }

    /// The nodes of the cell that begins at this place.
    fn cell_at(&self, start: u32) -> &[u32] {
        &self.elements[start as usize..(start + self.length[start as usize]) as usize]
    }

    /// The place where a node's cell begins.
    fn cell_of(&self, node: u32) -> u32 {
        self.cell[node as usize]
    }

    /// The first of the largest cells; `None` if every node has a colour of its own.
    fn largest_cell(&self) -> Option<u32> {
        let (mut start, mut largest) = (0, None);
        let mut longest = 1;
        while (start as usize) < self.elements.len() {
            let length = self.length[start as usize];
            if length > longest {
                (longest, largest) = (length, Some(start));
            }
            start += length;
        }
        largest
    }

    /// The state that [`undo`](Self::undo) can restore.
    fn mark(&self) -> usize {
        self.splits.len()
    }

    /// Merges all cells that were split since the mark.
    fn undo(&mut self, mark: usize) {
        while self.splits.len() > mark {
            let Some((start, parent)) = self.splits.pop() else { break };
            let length = self.length[start as usize];
            self.work += u64::from(length);
            for place in start..start + length {
                self.cell[self.elements[place as usize] as usize] = parent;
            }
            self.length[parent as usize] += length;
            self.length[start as usize] = 0;
        }
    }

    /// Gives a node a colour of its own and refines. Returns whether the trace is the expected one.
    /// If it is not, only [`undo`](Self::undo) may be called next.
    fn individualise(&mut self, graph: &Graph, node: u32, trace: &mut Trace<'_>) -> bool {
        let start = self.cell[node as usize];
        let last = start + self.length[start as usize] - 1;
        self.swap(self.place[node as usize], last);
        self.split(start, last);
        self.enqueue(last);
        self.automorphisms(graph, trace)
    }

    fn automorphisms(&mut self, graph: &Graph, trace: &mut Trace<'_>) -> bool {
        while let Some(splitter) = self.left.pop_front() {
            self.is_left[splitter as usize] = false;
            self.count(graph, splitter);
            if !self.split_by_counts(splitter, trace) {
                for start in self.left.drain(..) {
                    self.is_left[start as usize] = false;
                }
                return false;
            }
        }
        trace.is_complete()
    }

    /// Counts arcs between every node and a cell.
    fn count(&mut self, graph: &Graph, splitter: u32) {
        let (begin, end) = (splitter as usize, (splitter + self.length[splitter as usize]) as usize);
        for place in begin..end {
            let around = &graph.around[self.elements[place] as usize];
            self.work += around.len() as u64 + 1;
            for &(node, hash) in around {
                let score = &mut self.score[node as usize];
                if *score == 0 {
                    self.touched.push(node);
                }
                *score = score.wrapping_add(hash);
            }
        }
    }

    fn split_by_counts(&mut self, splitter: u32, trace: &mut Trace<'_>) -> bool {
        let mut touched = std::mem::take(&mut self.touched);
        // A sum of hashes may wrap to zero; then its node is listed twice.
        touched.sort_unstable_by_key(|&node| (self.cell[node as usize], self.score[node as usize], node));
        touched.dedup();
        self.work += touched.len() as u64;
        let mut expected = true;
        let mut rest = &touched[..];
        while let Some(&node) = rest.first() {
            let start = self.cell[node as usize];
            let (cell, others) =
                rest.split_at(rest.partition_point(|&node| self.cell[node as usize] == start));
            rest = others;
            if !self.split_cell(start, cell, splitter, trace) {
                expected = false;
                break;
            }
        }
        for &node in &touched {
            self.score[node as usize] = 0;
        }
        touched.clear();
        self.touched = touched;
        expected
    }

    /// Splits the cell that begins at `start`. `counted` are the nodes of the cell with arcs to the
    /// splitter, sorted by score.
    fn split_cell(&mut self, start: u32, counted: &[u32], splitter: u32, trace: &mut Trace<'_>) -> bool {
        let length = self.length[start as usize];
        let score = |nodes: &Self, index: usize| nodes.score[counted[index] as usize];
        if !trace.note(hash_of_pair(hash_of_pair(u64::from(splitter), u64::from(start)), score(self, 0))) {
            return false;
        }
        let all_counted = counted.len() == length as usize;
        if all_counted && score(self, 0) == score(self, counted.len() - 1) {
            return true;
        }
        // The counted nodes go to the end of the cell, in their order.
        let mut end = start + length;
        let (mut largest, mut longest) = (start, 0);
        let mut pieces = Vec::new();
        for index in (0..counted.len()).rev() {
            end -= 1;
            self.swap(self.place[counted[index] as usize], end);
            let first_of_piece = index == 0 || score(self, index) != score(self, index - 1);
            if !first_of_piece {
                continue;
            }
            let piece_length = start + self.length[start as usize] - end;
            if !trace.note(hash_of_pair(score(self, index), u64::from(piece_length))) {
                return false;
            }
            if end > start {
                self.split(start, end);
            }
            if piece_length > longest {
                (largest, longest) = (end, piece_length);
            }
            pieces.push(end);
        }
        if !all_counted {
            if self.length[start as usize] > longest {
                largest = start;
            }
            pieces.push(start);
        }
        // Nodes that were counted against the whole cell and against all pieces but one need not be
        // counted against the last piece: its count is the difference.
        let whole_is_left = self.is_left[start as usize];
        for &piece in pieces.iter().rev() {
            if whole_is_left || piece != largest {
                self.enqueue(piece);
            }
        }
        true
    }

    fn enqueue(&mut self, start: u32) {
        if !std::mem::replace(&mut self.is_left[start as usize], true) {
            self.left.push_back(start);
        }
    }

    fn swap(&mut self, one: u32, other: u32) {
        self.elements.swap(one as usize, other as usize);
        for place in [one, other] {
            self.place[self.elements[place as usize] as usize] = place;
        }
    }

    /// Makes the end of a cell a cell of its own.
    fn split(&mut self, start: u32, new: u32) {
        let end = start + self.length[start as usize];
        if new == start {
            return;
        }
        for place in new..end {
            self.cell[self.elements[place as usize] as usize] = new;
        }
        self.work += u64::from(end - new);
        self.length[new as usize] = end - new;
        self.length[start as usize] = new - start;
        self.splits.push((new, start));
    }
}

//! The cheapest tree that reaches all ranks: from a root along edges with costs for each direction,
//! or without a root.
//!
//! From a root it is Edmonds' way (1967) along one path of components: each takes the cheapest edge
//! into it; what closes a circle becomes one component, in which an edge costs as much more than
//! the one taken; what reaches the root is done. On a full matrix that is O(ranks²) in all. Without
//! directions it is Prim's way.

/// What it costs to go from one to another, for all pairs; infinite where there is no way.
#[derive(Clone, Debug)]
pub(super) struct Costs {
    ranks: usize,
    /// By target, then by origin.
    into: Vec<f64>,
}

impl Costs {
    pub(super) fn new(ranks: usize) -> Self {
        Self { ranks, into: vec![f64::INFINITY; ranks * ranks] }
    }

    pub(super) fn set(&mut self, from: usize, to: usize, cost: f64) {
        self.into[to * self.ranks + from] = cost;
    }

    fn of(&self, from: usize, to: usize) -> f64 {
        self.into[to * self.ranks + from]
    }
}

/// Which rank's edge leads to each; the root has none. Those before come first in `order`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Branching {
    /// Edges, those nearer to the root first.
    pub(super) edges: Vec<(usize, usize)>,
}

impl Branching {
    /// Sorts edges by the distance from the root, then by numbers.
    fn new(root: usize, before: &[usize]) -> Self {
        let mut below = vec![Vec::new(); before.len()];
        for (rank, &one) in before.iter().enumerate() {
            if rank != root {
                below[one].push(rank);
            }
        }
        let mut edges = Vec::with_capacity(before.len() - 1);
        let mut reached = vec![root];
        let mut next = 0;
        while let Some(&rank) = reached.get(next) {
            next += 1;
            for &one in &below[rank] {
                edges.push((rank, one));
                reached.push(one);
            }
        }
        assert_eq!(reached.len(), before.len(), "a tree reaches all ranks");
        Self { edges }
    }
}

/// The cheapest tree from a root. All ranks can be reached.
pub(super) fn cheapest_from(root: usize, costs: Costs) -> Branching {
    let ranks = costs.ranks;
    if ranks == 1 {
        return Branching { edges: Vec::new() };
    }
    let mut growing = Growing::new(costs);
    growing.state[root] = State::Done;
    for rank in 0..ranks {
        growing.attach(rank);
    }
    Branching::new(root, &growing.taken_apart(root))
}

/// The cheapest tree of all that use edges both ways; costs are the same both ways. Begins at
/// `root`.
pub(super) fn cheapest_both_ways(root: usize, costs: &Costs) -> Branching {
    let mut before = vec![root; costs.ranks];
    let mut left: Vec<usize> = (0..costs.ranks).filter(|&rank| rank != root).collect();
    let mut last = root;
    let mut least = vec![f64::INFINITY; costs.ranks];
    while !left.is_empty() {
        let mut nearest = 0;
        for (place, &rank) in left.iter().enumerate() {
            if costs.of(last, rank) < least[rank] {
                (least[rank], before[rank]) = (costs.of(last, rank), last);
            }
            if least[rank] < least[left[nearest]] {
                nearest = place;
            }
        }
        last = left.swap_remove(nearest);
    }
    Branching::new(root, &before)
}

/// The cheapest tree in which every rank hangs below one that is fewer steps from the root. Every
/// rank is some steps away.
pub(super) fn cheapest_of_shallowest(root: usize, costs: &Costs, steps: &[u32]) -> Branching {
    let nearer = |to: usize| (0..costs.ranks).filter(move |&from| steps[from] < steps[to]);
    let cheapest =
        |to: usize| nearer(to).min_by(|&one, &other| costs.of(one, to).total_cmp(&costs.of(other, to)));
    let before: Vec<usize> = (0..costs.ranks).map(|to| cheapest(to).unwrap_or(root)).collect();
    Branching::new(root, &before)
}

/// Where a component stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    New,
    /// At this place of the path.
    OnPath(usize),
    Done,
}

struct Growing {
    costs: Costs,
    /// Beside every cost, which rank of the component the edge leads to.
    heads: Vec<u32>,
    /// A rank's way to its component's row.
    row: Vec<u32>,
    /// By row.
    state: Vec<State>,
    /// By row: the number of the component in it. Ranks have the first numbers.
    number: Vec<usize>,
    /// By number: the edge taken into it, and the component that it became part of.
    taken: Vec<(usize, usize)>,
    parent: Vec<Option<usize>>,
    children: Vec<Vec<usize>>,
}

impl Growing {
    fn new(costs: Costs) -> Self {
        let ranks = costs.ranks;
        Self {
            heads: (0..ranks * ranks).map(|place| (place / ranks) as u32).collect(),
            row: (0..ranks as u32).collect(),
            state: vec![State::New; ranks],
            number: (0..ranks).collect(),
            taken: vec![(0, 0); ranks],
            parent: vec![None; ranks],
            children: vec![Vec::new(); ranks],
            costs,
        }
    }

    fn row_of(&mut self, rank: usize) -> usize {
        let mut row = rank as u32;
        while self.row[row as usize] != row {
            self.row[row as usize] = self.row[self.row[row as usize] as usize];
            row = self.row[row as usize];
        }
        row as usize
    }

    /// Follows cheapest edges backwards from a rank to what is done.
    fn attach(&mut self, rank: usize) {
        let start = self.row_of(rank);
        if self.state[start] == State::Done {
            return;
        }
        let mut path = vec![(start, 0.0)];
        self.state[start] = State::OnPath(0);
        while let Some((top, cost)) = path.last_mut() {
            let (from, least) = self.cheapest_into(*top);
            *cost = least;
            let head = self.heads[*top * self.costs.ranks + from] as usize;
            self.taken[self.number[*top]] = (from, head);
            let row = self.row_of(from);
            match self.state[row] {
                State::Done => break,
                State::New => {
                    self.state[row] = State::OnPath(path.len());
                    path.push((row, 0.0));
                }
                State::OnPath(place) => {
                    let merged = self.contract(&path[place..]);
                    path.truncate(place);
                    self.state[merged] = State::OnPath(place);
                    path.push((merged, 0.0));
                }
            }
        }
        path.into_iter().for_each(|(row, _)| self.state[row] = State::Done);
    }

    /// From which rank outside, and at what cost.
    fn cheapest_into(&mut self, row: usize) -> (usize, f64) {
        let ranks = self.costs.ranks;
        loop {
            let costs = &self.costs.into[row * ranks..(row + 1) * ranks];
            let mut least = (usize::MAX, f64::INFINITY);
            for (from, &cost) in costs.iter().enumerate() {
                if cost < least.1 {
                    least = (from, cost);
                }
            }
            assert!(least.0 < ranks, "every rank can be reached");
            if self.row_of(least.0) != row {
                return least;
            }
            // An edge inside leads nowhere.
            self.costs.into[row * ranks + least.0] = f64::INFINITY;
        }
    }

    /// Makes one component of a circle; the first row is where it is.
    fn contract(&mut self, circle: &[(usize, f64)]) -> usize {
        let ranks = self.costs.ranks;
        let number = self.parent.len();
        self.taken.push((0, 0));
        self.parent.push(None);
        self.children.push(circle.iter().map(|&(row, _)| self.number[row]).collect());
        let merged = circle[0].0;
        for &(row, taken) in circle {
            self.parent[self.number[row]] = Some(number);
            self.row[row] = merged as u32;
            for from in 0..ranks {
                let cost = self.costs.into[row * ranks + from] - taken;
                let place = merged * ranks + from;
                if row == merged || cost < self.costs.into[place] {
                    self.costs.into[place] = cost;
                    self.heads[place] = self.heads[row * ranks + from];
                }
            }
        }
        self.number[merged] = number;
        merged
    }

    /// Which edge every rank keeps: an edge into a component replaces the one that was taken into
    /// the rank where it ends, and into all components around that rank inside.
    fn taken_apart(&self, root: usize) -> Vec<usize> {
        let mut before = vec![root; self.costs.ranks];
        let mut left: Vec<usize> =
            (0..self.parent.len()).filter(|&one| one != root && self.parent[one].is_none()).collect();
        while let Some(component) = left.pop() {
            let (from, to) = self.taken[component];
            before[to] = from;
            let mut inner = to;
            while inner != component {
                let Some(parent) = self.parent[inner] else { break };
                left.extend(self.children[parent].iter().filter(|&&child| child != inner));
                inner = parent;
            }
        }
        before
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn random_costs(ranks: usize, state: &mut u64) -> Costs {
        let mut costs = Costs::new(ranks);
        for from in 0..ranks {
            for to in 0..ranks {
                *state =
                    state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                let cost = f64::from((*state >> 33) as u32 % 12);
                // A circle keeps all of it connected.
                if to == (from + 1) % ranks || (from != to && cost < 9.0) {
                    costs.set(from, to, cost);
                }
            }
        }
        costs
    }

    fn cost(costs: &Costs, edges: &[(usize, usize)]) -> f64 {
        edges.iter().map(|&(from, to)| costs.of(from, to)).sum()
    }

    /// The cheapest of all ways to give every rank but the root an edge, of those that are trees.
    fn by_enumeration(root: usize, costs: &Costs) -> f64 {
        let ranks = costs.ranks;
        let mut least = f64::INFINITY;
        for code in 0..ranks.pow(ranks as u32) {
            let before: Vec<usize> = (0..ranks).map(|rank| code / ranks.pow(rank as u32) % ranks).collect();
            let reaches_root =
                |rank: usize| (0..ranks).fold(rank, |at, _| if at == root { at } else { before[at] }) == root;
            if before[root] == root && (0..ranks).all(reaches_root) {
                let sum =
                    (0..ranks).filter(|&rank| rank != root).map(|rank| costs.of(before[rank], rank)).sum();
                least = least.min(sum);
            }
        }
        least
    }

    #[test]
    fn the_tree_from_a_root_is_the_cheapest_of_all() {
        let mut state = 1;
        for round in 0..600 {
            let ranks = 2 + round % 4;
            let costs = random_costs(ranks, &mut state);
            let root = round % ranks;
            let tree = cheapest_from(root, costs.clone());
            assert_eq!(cost(&costs, &tree.edges), by_enumeration(root, &costs));
        }
    }

    #[test]
    fn large_trees_cost_no_more_than_their_potentials_allow() {
        let mut state = 2;
        for round in 0..20 {
            let costs = random_costs(60, &mut state);
            let tree = cheapest_from(round, costs.clone());
            // No single exchange of an edge makes it cheaper.
            let mut before = vec![round; 60];
            tree.edges.iter().for_each(|&(from, to)| before[to] = from);
            for to in (0..60).filter(|&to| to != round) {
                for from in 0..60 {
                    let mut above = from;
                    while above != round && above != to {
                        above = before[above];
                    }
                    assert!(above == to || costs.of(from, to) >= costs.of(before[to], to));
                }
            }
        }
    }

    #[test]
    fn the_tree_used_both_ways_is_the_cheapest_of_all() {
        let mut state = 3;
        for round in 0..300 {
            let ranks = 2 + round % 4;
            let mut costs = random_costs(ranks, &mut state);
            for one in 0..ranks {
                for other in 0..one {
                    let both = costs.of(one, other).min(costs.of(other, one));
                    costs.set(one, other, both);
                    costs.set(other, one, both);
                }
            }
            let tree = cheapest_both_ways(round % ranks, &costs);
            assert_eq!(cost(&costs, &tree.edges), by_enumeration(round % ranks, &costs));
        }
    }
}

//! The pricing problem of the column generation: the cheapest tree when orbits of links have
//! prices.
//!
//! All links of an orbit have the same price, so the cheapest paths from one rank of an orbit are
//! mapped to the cheapest paths of all its ranks. Paths lead through switches only. A small
//! surcharge prefers paths over fewer links, and trees whose edges begin near the root.
//!
//! The cheapest tree of a root is Edmonds' minimum arborescence (1967), grown along one path of
//! components: each component takes the cheapest edge into it, a cycle is contracted to one
//! component, and a component that reaches the root is done. On a full matrix this takes O(ranks²).
//! A tree that is used in both directions is a minimum spanning tree (Prim 1957).

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use pleach_vocabulary::Rank;

use crate::symmetry::Semiregular;
use crate::topology::{NodeId, Topology};

/// The cost of a link beside its price. The prices of a whole tree are about 1.
const LINK_SURCHARGE: f64 = 1e-7;

/// The least surcharge of an edge for each step between the root and the beginning of the edge.
const STEP_SURCHARGE: f64 = 1e-8;

/// The limit of the depth of trees.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum DepthRule {
    /// Every rank has the least possible depth.
    Least,
    /// The tree of least cost. Each step between the root and the beginning of an edge adds this
    /// share of the average cost of an edge.
    Surcharged(f64),
}

/// A tree whose root is the first rank of an orbit.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Column {
    /// The orbit of its root.
    pub(super) orbit: usize,
    /// By orbit of links: the number of uses by the tree.
    pub(super) loads: Vec<u32>,
    /// The edges of the tree, each with the nodes of its path. Edges nearer to the root come first.
    pub(super) edges: Vec<(Rank, Rank, Vec<u32>)>,
}

/// The data of the pricing problem: a topology and a group of its automorphisms.
pub(super) struct Pricing<'t> {
    topology: &'t Topology,
    group: &'t Semiregular,
    /// Whether each tree is used in both directions at once.
    both_ways: bool,
    /// By rank a, then rank b: the rank r such that the element that maps the first rank of a's
    /// orbit to a maps r to b.
    relative: Vec<Rank>,
    /// By orbit: the least number of edges from the first rank of the orbit to every rank.
    distances: Vec<Vec<u32>>,
    /// By orbit and rank: the path with the fewest links from the first rank of the orbit.
    shortest: Vec<Vec<Option<CheapestPath>>>,
}

/// The cheapest path from the first rank of an orbit to a rank.
#[derive(Clone, Debug)]
struct CheapestPath {
    cost: f64,
    /// Links, from the last to the first.
    links: Vec<usize>,
}

impl<'t> Pricing<'t> {
    pub(super) fn new(topology: &'t Topology, group: &'t Semiregular, both_ways: bool) -> Self {
        let ranks = topology.ranks() as usize;
        let mut relative = vec![0; ranks * ranks];
        for rank in 0..ranks {
            let element = &group.elements()[group.carrier(rank as Rank).1];
            for other in 0..topology.ranks() {
                let image = topology.rank(NodeId(element.of(topology.node(other).0)));
                let image = image.expect("an automorphism carries ranks to ranks");
                relative[rank * ranks + image as usize] = other;
            }
        }
        let mut pricing =
            Self { topology, group, both_ways, relative, distances: Vec::new(), shortest: Vec::new() };
        let free = vec![0.0; group.link_orbit_sizes().len()];
        pricing.shortest = pricing.cheapest_paths(&free);
        pricing.distances = group
            .representatives()
            .iter()
            .map(|&root| pricing.distances_from(root, &pricing.shortest))
            .collect();
        pricing
    }

    /// Whether every rank of a tree has the least possible depth.
    pub(super) fn is_shallowest(&self, column: &Column) -> bool {
        let distances = &self.distances[column.orbit];
        column.edges.iter().all(|&(from, to, _)| distances[from as usize] < distances[to as usize])
    }

    /// The number of ranks.
    pub(super) fn ranks(&self) -> usize {
        self.topology.ranks() as usize
    }

    /// The first rank of an orbit.
    pub(super) fn first_rank(&self, orbit: usize) -> Rank {
        self.group.representatives()[orbit]
    }

    /// Whether there is a path from one rank to another that does not pass through a third rank.
    pub(super) fn has_path(&self, from: Rank, to: Rank) -> bool {
        self.shortest_path(from, to).is_some()
    }

    /// The orbits of links on the shortest path from one rank to another, once for each use; `None`
    /// if there is no path.
    pub(super) fn shortest_path_orbits(&self, from: Rank, to: Rank) -> Option<Vec<usize>> {
        let (path, _) = self.shortest_path(from, to)?;
        Some(path.links.iter().flat_map(|&link| self.uses(link)).collect())
    }

    /// The nodes of the shortest path from one rank to another.
    pub(super) fn shortest_path_nodes(&self, from: Rank, to: Rank) -> Option<Vec<u32>> {
        let (path, element) = self.shortest_path(from, to)?;
        let image = &self.group.elements()[element];
        let links = self.topology.links();
        let ends = path.links.iter().rev().map(|&link| image.of(links[link].to.0));
        Some([self.topology.node(from).0].into_iter().chain(ends).collect())
    }

    /// The orbits of links on a path over these nodes, once for each use.
    pub(super) fn orbits_over(&self, nodes: &[u32]) -> Vec<usize> {
        let link = |pair: &[u32]| self.topology.link_place(NodeId(pair[0]), NodeId(pair[1]));
        let links = nodes.windows(2).map(|pair| link(pair).expect("ways go over links"));
        links.flat_map(|link| self.uses(link)).collect()
    }

    fn uses(&self, link: usize) -> impl Iterator<Item = usize> {
        let back = self.both_ways.then(|| self.group.link_orbit(self.back(link)));
        [self.group.link_orbit(link)].into_iter().chain(back)
    }

    fn shortest_path(&self, from: Rank, to: Rank) -> Option<(&CheapestPath, usize)> {
        let (orbit, element) = self.group.carrier(from);
        let relative = self.relative[from as usize * self.ranks() + to as usize];
        self.shortest[orbit][relative as usize].as_ref().map(|path| (path, element))
    }

    /// The cheapest tree from the first rank of an orbit.
    pub(super) fn cheapest_tree(&self, orbit: usize, prices: &[f64], depth: DepthRule) -> Column {
        let ranks = self.topology.ranks() as usize;
        let all = self.cheapest_paths(prices);
        let mut costs = Costs::new(ranks);
        let distances = &self.distances[orbit];
        let surcharge = match depth {
            DepthRule::Least => STEP_SURCHARGE,
            DepthRule::Surcharged(part) => STEP_SURCHARGE + part / ranks as f64,
        };
        for from in 0..ranks {
            let pricing = &all[self.group.carrier(from as Rank).0];
            for to in (0..ranks).filter(|&to| to != from) {
                if let Some(path) = &pricing[self.relative[from * ranks + to] as usize] {
                    let distance =
                        if self.both_ways { distances[from].min(distances[to]) } else { distances[from] };
                    costs.set(from, to, path.cost + surcharge * f64::from(distance));
                }
            }
        }
        let root = self.group.representatives()[orbit] as usize;
        let tree = match depth {
            DepthRule::Least => cheapest_shortest_path_tree(root, &costs, distances),
            DepthRule::Surcharged(_) if self.both_ways => cheapest_spanning_tree(root, &costs),
            DepthRule::Surcharged(_) => cheapest_arborescence(root, costs),
        };
        self.column(orbit, &tree, &all)
    }

    fn column(&self, orbit: usize, tree: &Branching, all: &[Vec<Option<CheapestPath>>]) -> Column {
        let ranks = self.topology.ranks() as usize;
        let links = self.topology.links();
        let mut loads = vec![0; self.group.link_orbit_sizes().len()];
        let mut edges = Vec::with_capacity(tree.edges.len());
        for &(from, to) in &tree.edges {
            let (start, element) = self.group.carrier(from as Rank);
            let path = all[start][self.relative[from * ranks + to] as usize].as_ref();
            let path = path.expect("trees go where there are ways");
            let image = &self.group.elements()[element];
            let mut hops = vec![self.topology.node(from as Rank).0];
            for &link in path.links.iter().rev() {
                self.uses(link).for_each(|orbit| loads[orbit] += 1);
                hops.push(image.of(links[link].to.0));
            }
            edges.push((from as Rank, to as Rank, hops));
        }
        Column { orbit, loads, edges }
    }

    /// The place of the link in the other direction.
    fn back(&self, link: usize) -> usize {
        let link = &self.topology.links()[link];
        self.topology
            .link_place(link.to, link.from)
            .expect("links lead both ways where trees are used both ways")
    }

    /// For the first rank of every orbit, the cheapest path to every rank.
    fn cheapest_paths(&self, prices: &[f64]) -> Vec<Vec<Option<CheapestPath>>> {
        let links = self.topology.links();
        let price = |link: usize| prices[self.group.link_orbit(link)].max(0.0);
        let costs: Vec<f64> = (0..links.len())
            .map(|link| {
                price(link) + if self.both_ways { price(self.back(link)) } else { 0.0 } + LINK_SURCHARGE
            })
            .collect();
        let mut first = vec![0; self.topology.nodes().len() + 1];
        links.iter().for_each(|link| first[link.from.0 as usize + 1] += 1);
        (0..self.topology.nodes().len()).for_each(|node| first[node + 1] += first[node]);
        self.group
            .representatives()
            .iter()
            .map(|&rank| self.cheapest_paths_from(rank, &costs, &first))
            .collect()
    }

    /// Dijkstra's search that goes on from switches only.
    fn cheapest_paths_from(&self, rank: Rank, costs: &[f64], first: &[usize]) -> Vec<Option<CheapestPath>> {
        let links = self.topology.links();
        let start = self.topology.node(rank);
        let mut reached: Vec<(f64, Option<usize>)> = vec![(f64::INFINITY, None); self.topology.nodes().len()];
        reached[start.0 as usize].0 = 0.0;
        // Bits of numbers that are not negative are ordered as the numbers are.
        let mut left = BinaryHeap::from([Reverse((0_u64, start.0))]);
        while let Some(Reverse((bits, node))) = left.pop() {
            let cost = f64::from_bits(bits);
            let ends_here = node != start.0 && self.topology.rank(NodeId(node)).is_some();
            if cost > reached[node as usize].0 || ends_here {
                continue;
            }
            for link in first[node as usize]..first[node as usize + 1] {
                let to = links[link].to.0;
                let next = cost + costs[link];
                if next < reached[to as usize].0 {
                    reached[to as usize] = (next, Some(link));
                    left.push(Reverse((next.to_bits(), to)));
                }
            }
        }
        let path = |to: Rank| {
            let mut node = self.topology.node(to);
            let cost = reached[node.0 as usize].0;
            let mut path = CheapestPath { cost, links: Vec::new() };
            while let Some(link) = reached[node.0 as usize].1 {
                path.links.push(link);
                node = links[link].from;
            }
            (cost.is_finite() && to != rank).then_some(path)
        };
        (0..self.topology.ranks()).map(path).collect()
    }

    fn distances_from(&self, root: Rank, all: &[Vec<Option<CheapestPath>>]) -> Vec<u32> {
        let ranks = self.topology.ranks() as usize;
        let mut distances = vec![u32::MAX; ranks];
        distances[root as usize] = 0;
        let mut reached = vec![root as usize];
        let mut next = 0;
        while let Some(&rank) = reached.get(next) {
            next += 1;
            let pricing = &all[self.group.carrier(rank as Rank).0];
            for to in 0..ranks {
                if distances[to] == u32::MAX && pricing[self.relative[rank * ranks + to] as usize].is_some() {
                    distances[to] = distances[rank] + 1;
                    reached.push(to);
                }
            }
        }
        distances
    }
}

// Minimum arborescences (Edmonds) and minimum spanning trees (Prim) on a full matrix of costs.

/// The cost of an edge between any two ranks; infinite where there is no path.
#[derive(Clone, Debug)]
struct Costs {
    ranks: usize,
    /// By target, then by origin.
    into: Vec<f64>,
}

impl Costs {
    fn new(ranks: usize) -> Self {
        Self { ranks, into: vec![f64::INFINITY; ranks * ranks] }
    }

    fn set(&mut self, from: usize, to: usize, cost: f64) {
        self.into[to * self.ranks + from] = cost;
    }

    fn of(&self, from: usize, to: usize) -> f64 {
        self.into[to * self.ranks + from]
    }
}

/// The edges of an arborescence, in an order in which each rank is reached before edges leave it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Branching {
    /// Edges, those nearer to the root first.
    edges: Vec<(usize, usize)>,
}

impl Branching {
    /// Makes the edges of the tree in which `before[rank]` is the parent of each rank. Edges are
    /// sorted by the distance from the root, then by numbers.
    fn new(root: usize, before: &[usize]) -> Self {
        let mut children = vec![Vec::new(); before.len()];
        for (rank, &one) in before.iter().enumerate() {
            if rank != root {
                children[one].push(rank);
            }
        }
        let mut edges = Vec::with_capacity(before.len() - 1);
        let mut reached = vec![root];
        let mut next = 0;
        while let Some(&rank) = reached.get(next) {
            next += 1;
            for &one in &children[rank] {
                edges.push((rank, one));
                reached.push(one);
            }
        }
        assert_eq!(reached.len(), before.len(), "a tree reaches all ranks");
        Self { edges }
    }
}

/// The cheapest tree from a root. Every rank must be reachable.
fn cheapest_arborescence(root: usize, costs: Costs) -> Branching {
    let ranks = costs.ranks;
    if ranks == 1 {
        return Branching { edges: Vec::new() };
    }
    let mut contraction = Contraction::new(costs);
    contraction.state[root] = State::Done;
    for rank in 0..ranks {
        contraction.attach(rank);
    }
    Branching::new(root, &contraction.expanded(root))
}

/// The cheapest tree whose edges are used in both directions. Costs must be the same in both
/// directions. The edges lead away from `root`.
fn cheapest_spanning_tree(root: usize, costs: &Costs) -> Branching {
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

/// The cheapest tree in which every rank is the child of a rank that is nearer to the root.
/// `distances` are the numbers of edges from the root.
fn cheapest_shortest_path_tree(root: usize, costs: &Costs, distances: &[u32]) -> Branching {
    let nearer = |to: usize| (0..costs.ranks).filter(move |&from| distances[from] < distances[to]);
    let cheapest =
        |to: usize| nearer(to).min_by(|&one, &other| costs.of(one, to).total_cmp(&costs.of(other, to)));
    let before: Vec<usize> = (0..costs.ranks).map(|to| cheapest(to).unwrap_or(root)).collect();
    Branching::new(root, &before)
}

/// The state of a component.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    New,
    /// The component is on the path, at this place.
    OnPath(usize),
    Done,
}

struct Contraction {
    costs: Costs,
    /// For each cost, the rank of the component to which the edge leads.
    heads: Vec<u32>,
    /// A union-find forest: following it from a rank leads to the row of the component of the rank.
    row: Vec<u32>,
    /// By row: the state of the component.
    state: Vec<State>,
    /// By row: the number of the component in it. Ranks have the first numbers.
    number: Vec<usize>,
    /// By number: the edge into the component that was taken; then the component into which it was
    /// contracted, and the components inside it.
    taken: Vec<(usize, usize)>,
    parent: Vec<Option<usize>>,
    children: Vec<Vec<usize>>,
}

impl Contraction {
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

    /// Follows cheapest edges backwards from a rank to a component that is done.
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

    /// The rank outside the component from which the cheapest edge leads into it, and the cost of
    /// the edge.
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
            // An edge inside the component is of no use.
            self.costs.into[row * ranks + least.0] = f64::INFINITY;
        }
    }

    /// Contracts a cycle to one component, which gets the row of the first component of the cycle.
    fn contract(&mut self, cycle: &[(usize, f64)]) -> usize {
        let ranks = self.costs.ranks;
        let number = self.parent.len();
        self.taken.push((0, 0));
        self.parent.push(None);
        self.children.push(cycle.iter().map(|&(row, _)| self.number[row]).collect());
        let merged = cycle[0].0;
        for &(row, taken) in cycle {
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

    /// The parent of every rank. An edge into a component replaces the edge that was taken into the
    /// rank where it ends. It also replaces the edges into all components that are inside the
    /// component and hold that rank.
    fn expanded(&self, root: usize) -> Vec<usize> {
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
    use pleach_vocabulary::random::Random;

    fn random_costs(ranks: usize, random: &mut Random) -> Costs {
        let mut costs = Costs::new(ranks);
        for from in 0..ranks {
            for to in 0..ranks {
                let cost = random.below(12) as f64;
                // A cycle through all ranks keeps the graph connected.
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

    /// The least cost of all trees, by trying every choice of a parent for each rank but the root.
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
        let mut random = Random::new(1);
        for round in 0..600 {
            let ranks = 2 + round % 4;
            let costs = random_costs(ranks, &mut random);
            let root = round % ranks;
            let tree = cheapest_arborescence(root, costs.clone());
            assert_eq!(cost(&costs, &tree.edges), by_enumeration(root, &costs));
        }
    }

    #[test]
    fn large_trees_cost_no_more_than_their_potentials_allow() {
        let mut random = Random::new(2);
        for round in 0..20 {
            let costs = random_costs(60, &mut random);
            let tree = cheapest_arborescence(round, costs.clone());
            // No exchange of a single edge reduces the cost of the tree.
            let mut before = vec![round; 60];
            tree.edges.iter().for_each(|&(from, to)| before[to] = from);
            for to in (0..60).filter(|&to| to != round) {
                for from in 0..60 {
                    let mut parent = from;
                    while parent != round && parent != to {
                        parent = before[parent];
                    }
                    assert!(parent == to || costs.of(from, to) >= costs.of(before[to], to));
                }
            }
        }
    }

    #[test]
    fn the_tree_used_both_ways_is_the_cheapest_of_all() {
        let mut random = Random::new(3);
        for round in 0..300 {
            let ranks = 2 + round % 4;
            let mut costs = random_costs(ranks, &mut random);
            for one in 0..ranks {
                for other in 0..one {
                    let both = costs.of(one, other).min(costs.of(other, one));
                    costs.set(one, other, both);
                    costs.set(other, one, both);
                }
            }
            let tree = cheapest_spanning_tree(round % ranks, &costs);
            assert_eq!(cost(&costs, &tree.edges), by_enumeration(round % ranks, &costs));
        }
    }
}

//! Guessing whole trees, and how much of each can be taken: see the module above.
//!
//! A [`Peeler`] holds what is left. It guesses a tree of short ways, asks by flows how much of it
//! the rest can spare, remembers the sets that said no, and takes the best of a few guesses.
//!
//! **Invariant:** what is left can be packed.

use std::cmp::Reverse;
use std::collections::BTreeSet;

use pleach_vocabulary::Rank;

use super::super::digraph::Digraph;
use super::super::flow::{Amount, ArcId, Network};
use super::Routed;

/// How many trees are guessed at before one is taken that falls short of what its root wants.
const GUESSES_MAX: usize = 6;

/// How many trees are guessed at before a root is given up. Each that failed made a limit known.
const FAILURES_MAX: usize = 48;

/// How many sets that limit a tree are looked for at once.
const LACKING_MAX: usize = 64;

/// Fineness to which the use of links is compared.
const USE_STEPS: Amount = 1024;

/// A set of nodes that limits trees.
struct Limit {
    is_inside: Vec<bool>,
    /// The edges that lead into it.
    entering: Vec<usize>,
    slack: Amount,
}

pub(super) struct Peeler<'a> {
    graph: &'a Digraph,
    /// The edges that begin at each node.
    leaving: Vec<Vec<usize>>,
    /// The rank of each node.
    numbers: Vec<Option<usize>>,
    /// What is left of each edge.
    pub(super) residuals: Vec<Amount>,
    /// What is left of all that leave each node.
    exits: Vec<Amount>,
    /// What is left for each root.
    pub(super) demand: Vec<Amount>,
    total: Amount,
    network: Network,
    /// The arc of each edge, and from the source to each rank.
    arcs: Vec<ArcId>,
    given: Vec<ArcId>,
    /// Ranks in the order in which they are asked.
    order: Vec<usize>,
    limits: Vec<Limit>,
    /// How much each root aims at in one tree.
    aims: Vec<Amount>,
    pub(super) peeled: Vec<Routed>,
}

/// A tree that is grown.
struct Guess {
    /// Parent, child, edges of the graph.
    edges: Vec<(usize, usize, Vec<usize>)>,
    /// How often each edge of the graph is used.
    uses: Vec<Amount>,
    /// How often each limit was entered, and once more where the root is in it.
    entries: Vec<Amount>,
    /// How many limits close each edge of the graph.
    closed: Vec<u32>,
    /// When each rank is reached.
    reached: Vec<Option<u64>>,
}

/// A node to which a way leads; the best is the least.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Next {
    /// Whether nothing more can be passed on from there: such ranks are taken last, lest a tree
    /// ends before it has reached all.
    is_end: bool,
    /// When it is reached.
    time: u64,
    /// What can be passed on from there.
    exit: Reverse<Amount>,
    /// How much the most used link of the way is used.
    worst: Amount,
    node: usize,
}

impl Default for Next {
    /// No later than any.
    fn default() -> Self {
        Self { is_end: false, time: 0, exit: Reverse(Amount::MAX), worst: 0, node: 0 }
    }
}

impl<'a> Peeler<'a> {
    pub(super) fn new(graph: &'a Digraph, demand: &[Amount], aim: Amount) -> Self {
        assert_eq!(graph.ranks().len(), demand.len(), "a demand for each rank");
        let source = graph.nodes();
        let mut network = Network::new(source + 1);
        let mut leaving = vec![Vec::new(); graph.nodes()];
        let mut arcs = Vec::with_capacity(graph.edges().len());
        for (edge, &(from, to, capacity)) in graph.edges().iter().enumerate() {
            leaving[from].push(edge);
            arcs.push(network.add(from, to, capacity, 0));
        }
        let mut exits = vec![0; graph.nodes()];
        graph.edges().iter().for_each(|&(from, _, capacity)| exits[from] += capacity);
        let mut numbers = vec![None; graph.nodes()];
        let mut given = Vec::with_capacity(demand.len());
        for (rank, (&node, &amount)) in graph.ranks().iter().zip(demand).enumerate() {
            numbers[node] = Some(rank);
            given.push(network.add(source, node, amount, 0));
        }
        Self {
            graph,
            leaving,
            numbers,
            residuals: graph.edges().iter().map(|edge| edge.2).collect(),
            exits,
            demand: demand.to_vec(),
            total: demand.iter().sum(),
            network,
            arcs,
            given,
            order: (0..demand.len()).collect(),
            limits: Vec::new(),
            aims: demand.iter().map(|amount| amount.div_ceil(aim)).collect(),
            peeled: Vec::new(),
        }
    }

    pub(super) fn is_enough(&mut self) -> bool {
        self.lacking().is_empty()
    }

    /// The smallest sets into which not enough leads, and the largest with the same lack, whose
    /// outside is the smallest set that not enough leaves; and how much they lack. Ranks that lack
    /// something are asked first the next time.
    fn lacking(&mut self) -> Vec<(Vec<bool>, Amount)> {
        let source = self.graph.nodes();
        let mut lacking: Vec<(Vec<bool>, Amount)> = Vec::new();
        let mut largest = Vec::new();
        for place in 0..self.order.len() {
            let node = self.graph.ranks()[self.order[place]];
            if lacking.iter().any(|(is_inside, _)| is_inside[node]) {
                continue;
            }
            let lack = self.total - self.network.max_amount(source, node, self.total);
            if lack > 0 {
                self.order[lacking.len()..=place].rotate_right(1);
                let far = (0..self.graph.nodes()).map(|node| !self.network.is_source_side(node)).collect();
                let mut near = self.network.sink_side(node);
                near.truncate(self.graph.nodes());
                if near != far && largest.iter().all(|(known, _)| *known != far) {
                    largest.push((far, lack));
                }
                lacking.push((near, lack));
                if lacking.len() >= LACKING_MAX {
                    break;
                }
            }
        }
        lacking.append(&mut largest);
        lacking
    }

    /// Peels from all roots until none gives any more.
    pub(super) fn peel(&mut self) {
        let mut open: Vec<usize> = (0..self.demand.len()).collect();
        while !open.is_empty() {
            open.retain(|&root| self.demand[root] > 0);
            open.retain(|&root| self.peel_one(root));
        }
    }

    /// Takes the best of a few trees of a root; says whether there was one.
    fn peel_one(&mut self, root: usize) -> bool {
        let mut best: Option<(Amount, Guess)> = None;
        let mut goal = self.demand[root].min(self.aims[root]);
        for guesses in 0..FAILURES_MAX {
            if guesses >= GUESSES_MAX && best.is_some() {
                break;
            }
            let Some(guess) = self.guess_at_most(root, &mut goal) else { break };
            let amount = self.most(root, &guess).min(self.aims[root]);
            if amount > best.as_ref().map_or(0, |(before, _)| *before) {
                best = Some((amount, guess));
            }
            if amount >= goal {
                break;
            }
        }
        let Some((amount, guess)) = best else { return false };
        self.take(root, amount, guess);
        true
    }

    /// A tree for as much as possible of a goal, which is halved until there is one.
    fn guess_at_most(&self, root: usize, goal: &mut Amount) -> Option<Guess> {
        while *goal > 0 {
            if let Some(guess) = self.guess(root, *goal) {
                return Some(guess);
            }
            *goal /= 2;
        }
        None
    }

    /// A tree of short ways for so much, as far as links and known limits tell.
    fn guess(&self, root: usize, goal: Amount) -> Option<Guess> {
        let ranks = self.demand.len();
        let mut guess = Guess {
            edges: Vec::with_capacity(ranks),
            uses: vec![0; self.arcs.len()],
            entries: vec![0; self.limits.len()],
            closed: vec![0; self.arcs.len()],
            reached: vec![None; ranks],
        };
        guess.reached[root] = Some(0);
        let node = self.graph.ranks()[root];
        for (place, limit) in self.limits.iter().enumerate().filter(|(_, limit)| limit.is_inside[node]) {
            guess.enter(place, limit, goal);
        }
        // What every rank that was reached leads to next, or something sooner: what a rank leads to
        // only gets less and later.
        let mut open = BTreeSet::from([(Next::default(), root)]);
        while guess.edges.len() + 1 < ranks {
            let (_, from) = open.pop_first()?;
            let Some((next, way)) = self.nearest(&guess, from, goal) else { continue };
            if open.first().is_some_and(|(sooner, _)| *sooner < next) {
                open.insert((next, from));
                continue;
            }
            for &edge in &way {
                guess.uses[edge] += 1;
                let (from, to, _) = self.graph.edges()[edge];
                for (place, limit) in self.limits.iter().enumerate() {
                    if limit.is_inside[to] && !limit.is_inside[from] {
                        guess.enter(place, limit, goal);
                    }
                }
            }
            let to = self.numbers[next.node]?;
            guess.reached[to] = Some(next.time);
            guess.edges.push((from, to, way));
            open.insert((Next { time: next.time + 1, ..Next::default() }, to));
            open.insert((next, from));
        }
        Some(guess)
    }

    /// What a rank that was reached leads to soonest, of what was not, and the edges of the way.
    fn nearest(&self, guess: &Guess, from: usize, goal: Amount) -> Option<(Next, Vec<usize>)> {
        let mut by: Vec<Option<usize>> = vec![None; self.graph.nodes()];
        let mut is_done = vec![false; self.graph.nodes()];
        let start = self.graph.ranks()[from];
        let first = Next { time: guess.reached[from]? + 1, node: start, ..Next::default() };
        let mut left = BTreeSet::from([(first, usize::MAX)]);
        while let Some((next, edge)) = left.pop_first() {
            if std::mem::replace(&mut is_done[next.node], true) {
                continue;
            }
            by[next.node] = (edge != usize::MAX).then_some(edge);
            if self.numbers[next.node].is_some() && next.node != start {
                let mut way = Vec::new();
                let mut at = next.node;
                while let Some(edge) = by[at] {
                    way.push(edge);
                    at = self.graph.edges()[edge].0;
                }
                way.reverse();
                return Some((next, way));
            }
            for &edge in &self.leaving[next.node] {
                let node = self.graph.edges()[edge].1;
                if is_done[node] || self.numbers[node].is_some_and(|rank| guess.reached[rank].is_some()) {
                    continue;
                }
                let used = (guess.uses[edge] + 1) * goal;
                if guess.closed[edge] == 0 && used <= self.residuals[edge] {
                    let capacity = self.graph.edges()[edge].2;
                    let use_of = (capacity - self.residuals[edge] + used) * USE_STEPS / capacity;
                    // Of ranks that are reached at the same time, those that can pass most on.
                    let exit = if self.numbers[node].is_some() { self.exits[node] } else { Amount::MAX };
                    let (time, worst) = (next.time + 1, next.worst.max(use_of));
                    left.insert((Next { is_end: exit < goal, time, exit: Reverse(exit), worst, node }, edge));
                }
            }
        }
        None
    }

    /// How much of a tree can be taken, at most what its root wants. Remembers what limits it.
    fn most(&mut self, root: usize, guess: &Guess) -> Amount {
        let used = guess.uses.iter().zip(&self.residuals).filter(|(uses, _)| **uses > 0);
        let links = used.map(|(uses, residual)| residual / uses).min();
        let mut amount = self.demand[root].min(links.unwrap_or(Amount::MAX));
        let node = self.graph.ranks()[root];
        while amount > 0 {
            self.set_network(root, guess, amount);
            let lacking = self.lacking();
            if lacking.is_empty() {
                break;
            }
            let tried = amount;
            for (is_inside, lack) in lacking {
                let entering: Vec<usize> = self.entering(&is_inside);
                let entries: Amount = entering.iter().map(|&edge| guess.uses[edge]).sum();
                let loses = entries + Amount::from(is_inside[node]) - 1;
                let slack = loses * tried - lack;
                amount = amount.min(slack / loses);
                self.limits.push(Limit { is_inside, entering, slack });
            }
        }
        self.restore_network(root, guess);
        amount
    }

    fn entering(&self, is_inside: &[bool]) -> Vec<usize> {
        let edges = self.graph.edges().iter().enumerate();
        edges.filter(|(_, edge)| is_inside[edge.1] && !is_inside[edge.0]).map(|(place, _)| place).collect()
    }

    /// Lets the network be as if so much of a tree were taken.
    fn set_network(&mut self, root: usize, guess: &Guess, amount: Amount) {
        for (edge, &uses) in guess.uses.iter().enumerate().filter(|(_, uses)| **uses > 0) {
            self.network.set_capacity(self.arcs[edge], self.residuals[edge] - uses * amount);
        }
        self.network.set_capacity(self.given[root], self.demand[root] - amount);
        self.total = self.demand.iter().sum::<Amount>() - amount;
    }

    fn restore_network(&mut self, root: usize, guess: &Guess) {
        self.set_network(root, guess, 0);
    }

    fn take(&mut self, root: usize, amount: Amount, guess: Guess) {
        let node = self.graph.ranks()[root];
        self.set_network(root, &guess, amount);
        self.demand[root] -= amount;
        for ((residual, uses), &(from, ..)) in
            self.residuals.iter_mut().zip(&guess.uses).zip(self.graph.edges())
        {
            *residual -= uses * amount;
            self.exits[from] -= uses * amount;
        }
        for limit in &mut self.limits {
            let entries: Amount = limit.entering.iter().map(|&edge| guess.uses[edge]).sum();
            limit.slack -= amount * (entries + Amount::from(limit.is_inside[node]) - 1);
        }
        let nodes = |way: &[usize]| {
            let first = self.graph.edges()[way[0]].0;
            let others = way.iter().map(|&edge| self.graph.edges()[edge].1);
            std::iter::once(first).chain(others).collect()
        };
        let routed = |(from, to, way): &(usize, usize, Vec<usize>)| {
            (*from as Rank, *to as Rank, vec![(nodes(way), amount)])
        };
        let edges = guess.edges.iter().map(routed).collect();
        self.peeled.push(Routed { root: root as Rank, amount, edges });
    }
}

impl Guess {
    /// Counts that a limit is entered, and closes its edges when no more may enter.
    fn enter(&mut self, place: usize, limit: &Limit, goal: Amount) {
        let could = self.entries[place] == 0 || limit.slack >= self.entries[place] * goal;
        self.entries[place] += 1;
        let can = limit.slack >= self.entries[place] * goal;
        if could && !can {
            limit.entering.iter().for_each(|&edge| self.closed[edge] += 1);
        }
    }
}

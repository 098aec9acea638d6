//! Makes each switch of a graph send as much as it receives.
//!
//! A packing uses no more than a subgraph in which every switch is balanced, and edge splitting
//! needs balanced switches. [`balanced`] removes surplus capacity while every rank still gets its
//! demand. It does not always succeed at the rate that cuts allow: switches do not copy data, and
//! cuts do not account for this. [`over_shortest_paths`] always succeeds, at some rate.

use std::collections::VecDeque;

use super::digraph::{DemandNetwork, Digraph};
use super::flow::Amount;

/// A part of a graph in which as much enters as leaves every switch, and every rank still gets the
/// sum of all demands. `None` if no such part was found.
#[must_use]
pub(crate) fn balanced(graph: &Digraph, demand: &[Amount]) -> Option<Digraph> {
    let mut supply = DemandNetwork::new(graph, demand);
    if !supply.is_feasible() {
        return None;
    }
    let switches = graph.switches();
    let mut is_switch = vec![false; graph.nodes()];
    let mut neighbours = vec![(Vec::new(), Vec::new()); graph.nodes()];
    switches.iter().for_each(|&switch| is_switch[switch] = true);
    for &(from, to, _) in graph.edges() {
        neighbours[to].0.push(from);
        neighbours[from].1.push(to);
    }
    let mut degrees = graph.degrees();
    let mut left: VecDeque<usize> = switches.into();
    while let Some(switch) = left.pop_front() {
        let (enters, leaves) = degrees[switch];
        let (is_in, mut excess) = (enters > leaves, enters.abs_diff(leaves));
        let sides = if is_in { &neighbours[switch].0 } else { &neighbours[switch].1 };
        // Ranks come first, because they need no balance. Switches with the opposite excess come
        // next, because they become more balanced too. Every other switch loses balance.
        let suits = |other: usize| match degrees[other] {
            _ if !is_switch[other] => 0,
            (enters, leaves) if enters != leaves && (enters < leaves) == is_in => 1,
            _ => 2,
        };
        let mut sides = sides.clone();
        sides.sort_by_key(|&other| suits(other));
        for other in sides {
            let (from, to) = if is_in { (other, switch) } else { (switch, other) };
            let taken = take(&mut supply, from, to, excess);
            excess -= taken;
            degrees[from].1 -= taken;
            degrees[to].0 -= taken;
            if taken > 0 && is_switch[other] {
                left.push_back(other);
            }
        }
        if excess > 0 {
            return None;
        }
    }
    Some(graph.map(|from, to, _| supply.capacity(from, to)))
}

/// Takes as much from an edge as every rank can spare, at most `amount`. Returns the amount taken.
fn take(supply: &mut DemandNetwork, from: usize, to: usize, amount: Amount) -> Amount {
    let capacity = supply.capacity(from, to);
    let mut taken = capacity.min(amount);
    if taken > 0 {
        supply.set_capacity(from, to, capacity - taken);
        supply.visit_deficits(|supply, deficit| {
            taken -= deficit;
            supply.set_capacity(from, to, capacity - taken);
            taken > 0
        });
    }
    taken
}

/// The load of every edge when each rank sends its demand to every other rank over a shortest path.
/// Switches are balanced.
#[must_use]
pub(crate) fn over_shortest_paths(graph: &Digraph, demand: &[Amount]) -> Digraph {
    let mut leaving = vec![Vec::new(); graph.nodes()];
    for (place, &(from, to, _)) in graph.edges().iter().enumerate() {
        leaving[from].push((to, place));
    }
    let mut loads = vec![0; graph.edges().len()];
    for (&root, &amount) in graph.ranks().iter().zip(demand) {
        let mut reached_by: Vec<Option<usize>> = vec![None; graph.nodes()];
        let mut queue = VecDeque::from([root]);
        while let Some(node) = queue.pop_front() {
            for &(to, place) in &leaving[node] {
                if to != root && reached_by[to].is_none() {
                    reached_by[to] = Some(place);
                    queue.push_back(to);
                }
            }
        }
        for &rank in graph.ranks() {
            let mut node = rank;
            while let Some(place) = reached_by[node].filter(|_| node != root) {
                loads[place] += amount;
                node = graph.edges()[place].0;
            }
        }
    }
    let edges = graph.edges().iter().zip(loads).map(|(&(from, to, _), load)| (from, to, load));
    Digraph::new(graph.nodes(), graph.ranks().to_vec(), edges)
}

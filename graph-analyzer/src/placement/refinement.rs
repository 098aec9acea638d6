//! Few crossings between several parts, or under a limit of imbalance.
//!
//! A refinement begins with the contiguous parts of several orders between which the fewest bytes
//! cross. Then it moves single nodes between parts (Fiduccia and Mattheyses 1982). In a pass each
//! node moves at most once, also where that costs bytes, and the best state of the pass is kept. A
//! node stays between the ranks of its producers and those of its consumers, so data never flow
//! back.

use pleach_vocabulary::Rank;
use pleach_vocabulary::digest::hash_of_pair;

use super::PlacementError;
use super::dataflow::Dataflow;
use super::division::{PartCost, least_largest, least_received, ranks_of};

/// Passes over all nodes.
const PASSES_MAX: usize = 8;

/// Most drawn orders from which a refinement begins.
const DRAWN_ORDERS_MAX: usize = 24;

/// Most nodes of all drawn orders together.
const DRAWN_ORDERS_WORK_MAX: usize = 2_000;

/// Most uses of tensors that all passes look at. What was reached until then is the result.
const LOOKS_MAX: u64 = 1 << 29;

/// Moves in a pass after the last one that reached a new best state.
const FRUITLESS_MOVES_MAX: usize = 64;

pub(super) fn few_crossings(
    dataflow: &Dataflow,
    ranks: u32,
    imbalance: Option<u32>,
) -> Result<Vec<Rank>, PlacementError> {
    let average = dataflow.total_ns().div_ceil(u64::from(ranks));
    let most_ns = |percent: u32| average.saturating_add((average as u128 * u128::from(percent) / 100) as u64);
    let limit = imbalance.map_or(u64::MAX, most_ns);
    let fits = |cost: &PartCost| cost.compute_ns <= limit;
    let orders = orders(dataflow);
    let mut best: Option<(u64, Vec<Rank>)> = None;
    let mut evenest = u64::MAX;
    let mut looks_left = LOOKS_MAX;
    for order in orders {
        let ordered = dataflow.reordered(&order);
        let Some(ends) = least_received(&ordered, ranks, &fits) else {
            let largest = least_largest(&ordered, ranks, &|cost| cost.compute_ns, &|_| true);
            evenest = evenest.min(largest.unwrap_or(u64::MAX));
            continue;
        };
        let mut rank_of = vec![0; order.len()];
        order.iter().zip(ranks_of(&ends)).for_each(|(&place, rank)| rank_of[place] = rank);
        let mut state = State::new(dataflow, ranks, limit, rank_of);
        for _ in 0..PASSES_MAX {
            if !state.improve(&mut looks_left) {
                break;
            }
        }
        let bytes = dataflow.all_crossing_bytes(&state.rank_of, ranks);
        if best.as_ref().is_none_or(|(known, _)| bytes < *known) {
            best = Some((bytes, state.rank_of));
        }
    }
    let excess = (u128::from(evenest.saturating_sub(average)) * 100).div_ceil(u128::from(average.max(1)));
    let reached = u32::try_from(excess).unwrap_or(u32::MAX);
    best.map(|(_, rank_of)| rank_of)
        .ok_or(PlacementError::Imbalance { percent: imbalance.unwrap_or(u32::MAX), reached })
}

/// Topological orders: the graph's own, and depth-first ones, of which the first takes nodes in
/// order and the others as pseudo-random numbers say.
fn orders(dataflow: &Dataflow) -> Vec<Vec<usize>> {
    let drawn = (DRAWN_ORDERS_WORK_MAX / dataflow.len().max(1)).min(DRAWN_ORDERS_MAX);
    let depth_first = (0..=drawn as u64).map(|seed| depth_first(dataflow, seed));
    std::iter::once((0..dataflow.len()).collect()).chain(depth_first).collect()
}

/// A topological order in which what a node uses comes just before it.
fn depth_first(dataflow: &Dataflow, seed: u64) -> Vec<usize> {
    let key = |&place: &usize| {
        if seed == 0 { place as u64 } else { hash_of_pair(0, seed.wrapping_add(place as u64)) }
    };
    let mut order = Vec::with_capacity(dataflow.len());
    let mut is_seen = vec![false; dataflow.len()];
    let is_last = |&place: &usize| dataflow.successors(place).next().is_none();
    let mut roots: Vec<usize> = (0..dataflow.len()).filter(is_last).collect();
    roots.sort_by_key(key);
    for root in roots {
        let mut open = vec![(root, false)];
        while let Some((place, is_done)) = open.pop() {
            if is_done {
                order.push(place);
            } else if !std::mem::replace(&mut is_seen[place], true) {
                open.push((place, true));
                let mut before: Vec<usize> = dataflow.predecessors(place).collect();
                before.sort_by_key(key);
                open.extend(before.into_iter().map(|place| (place, false)));
            }
        }
    }
    order
}

/// Ranks under change.
struct State<'a> {
    dataflow: &'a Dataflow,
    ranks: u32,
    limit_ns: u64,
    rank_of: Vec<Rank>,
    load_ns: Vec<u64>,
    nodes_on: Vec<usize>,
    /// By place: the uses of the tensors that a node uses or computes.
    looks: Vec<u64>,
}

impl<'a> State<'a> {
    fn new(dataflow: &'a Dataflow, ranks: u32, limit_ns: u64, rank_of: Vec<Rank>) -> Self {
        let (mut load_ns, mut nodes_on) = (vec![0; ranks as usize], vec![0; ranks as usize]);
        for (place, &rank) in rank_of.iter().enumerate() {
            load_ns[rank as usize] += dataflow.node_ns[place];
            nodes_on[rank as usize] += 1;
        }
        let looks = |place: usize| {
            let tensors = dataflow.uses[place].iter().chain(&dataflow.results[place]);
            1 + tensors.map(|&tensor| 1 + dataflow.tensors[tensor].consumers.len() as u64).sum::<u64>()
        };
        let looks = (0..rank_of.len()).map(looks).collect();
        Self { dataflow, ranks, limit_ns, rank_of, load_ns, nodes_on, looks }
    }

    /// One pass, as long as looks are left. Returns whether fewer bytes cross.
    fn improve(&mut self, looks_left: &mut u64) -> bool {
        let all_looks: u64 = self.looks.iter().sum();
        let mut is_moved = vec![false; self.rank_of.len()];
        let (mut moves, mut gain, mut best_gain, mut best_length) = (Vec::new(), 0_i128, 0_i128, 0);
        while moves.len() - best_length < FRUITLESS_MOVES_MAX {
            let free = (0..self.rank_of.len()).filter(|&place| !is_moved[place]);
            let candidates =
                free.flat_map(|place| self.targets(place).into_iter().map(move |rank| (place, rank)));
            let candidates: Vec<(usize, Rank)> = candidates.collect();
            let looks = all_looks + candidates.iter().map(|(place, _)| 2 * self.looks[*place]).sum::<u64>();
            let Some(left) = looks_left.checked_sub(looks) else { break };
            *looks_left = left;
            let best = candidates.into_iter().map(|(place, rank)| (self.gain(place, rank), place, rank));
            let Some((own, place, rank)) =
                best.max_by_key(|&(gain, place, _)| (gain, std::cmp::Reverse(place)))
            else {
                break;
            };
            is_moved[place] = true;
            moves.push((place, self.rank_of[place]));
            self.set(place, rank);
            gain += own;
            if gain > best_gain {
                (best_gain, best_length) = (gain, moves.len());
            }
        }
        for (place, before) in moves.drain(best_length..).rev() {
            self.set(place, before);
        }
        best_gain > 0
    }

    /// The ranks beside its own to which a node may move.
    fn targets(&self, place: usize) -> Vec<Rank> {
        let own = self.rank_of[place];
        let lowest = self.dataflow.predecessors(place).map(|before| self.rank_of[before]).max().unwrap_or(0);
        let after = self.dataflow.successors(place).map(|after| self.rank_of[after]).min();
        let highest = after.unwrap_or(self.ranks - 1);
        if self.nodes_on[own as usize] == 1 {
            return Vec::new();
        }
        let has_room =
            |rank: &Rank| self.load_ns[*rank as usize] + self.dataflow.node_ns[place] <= self.limit_ns;
        (lowest..=highest).filter(|&rank| rank != own).filter(has_room).collect()
    }

    /// How many bytes fewer would cross.
    fn gain(&mut self, place: usize, rank: Rank) -> i128 {
        let dataflow = self.dataflow;
        let last = self.ranks - 1;
        let bytes = |rank_of: &[Rank]| -> i128 {
            let tensors = dataflow.uses[place].iter().chain(&dataflow.results[place]);
            tensors.map(|&tensor| i128::from(dataflow.crossing_bytes(tensor, rank_of, last))).sum()
        };
        let before = bytes(&self.rank_of);
        let own = std::mem::replace(&mut self.rank_of[place], rank);
        let after = bytes(&self.rank_of);
        self.rank_of[place] = own;
        before - after
    }

    fn set(&mut self, place: usize, rank: Rank) {
        let own = std::mem::replace(&mut self.rank_of[place], rank) as usize;
        let time = self.dataflow.node_ns[place];
        self.load_ns[own] -= time;
        self.nodes_on[own] -= 1;
        self.load_ns[rank as usize] += time;
        self.nodes_on[rank as usize] += 1;
    }
}

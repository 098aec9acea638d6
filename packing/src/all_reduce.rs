//! All-reduce at its optimum, over links that carry as much in both directions: every tree is used
//! upwards and downwards at the same time.
//!
//! Let `R` be the rate that partitions allow (see [`LinkPairs::strength`]). Of the capacity `c`
//! of a link, the trees use `x(u→v)` downwards in one direction and `x(v→u) = c - x(u→v)` in the
//! other. Every tree is used upwards as well, so both directions are full. Out-trees with `r(v)` of
//! them rooted at `v`, `R` in all, can be packed in `x` if and only if each switch sends as much as
//! it receives and every set of nodes with a rank has `r(S) + x⁻(S) ≥ R` (Edmonds 1973;
//! Bang-Jensen, Frank and Jackson 1995 for switches). With `z(v) = (x⁺(v) - x⁻(v))/2`, which is
//! zero at switches, `x⁻(S) = B(S)/2 - z(S)`. So the condition is that `z - r` is a
//! base (see [`even_base`]) of `f/2`. A base exists exactly when `R` is at most the bound of
//! partitions, which is therefore the optimum (without switches: Tutte 1961, Nash-Williams 1961,
//! Frank 1980). The algorithm:
//!
//! 1. Take a base `y` that is as even as possible.
//! 2. Let `r` be the negative part of `y`, cut down to the sum `R`. Often this is all of `y`.
//! 3. The rest, `z = y + r`, is a flow over the links, with capacity `c/2` in each direction; `x =
//!    c/2 +` that flow.
//! 4. Remove the switches, pack out-trees, and reverse them.
//!
//! A tree that is used in both directions can have any of its ranks as its root. It gets the rank
//! in its middle.
//!
//! **Invariant:** `x` is an integer on each link and direction, conserved at switches, and allows a
//! flow of the sum of `r` from the roots to every rank. Both directions together are the capacity.

use num_rational::Ratio;
use pleach_vocabulary::Collective;

use super::MAX_TREES_PER_ROOT;
use super::depth::reduce_depth;
use super::digraph::{Digraph, greatest_divisor};
use super::directed::Forest;
use super::flow::{Amount, ArcId, Network};
use super::rate::{best_rate, signed};
use super::{Certificate, Packing, Rate, Tree, extraction, greedy, orbits};
use crate::topology::{NodeId, Topology};

#[cfg(test)]
mod tests;

/// Fewest ranks that are packed by the symmetry of the topology. The trees of fewer ranks are less
/// deep when each tree may differ.
const ALIKE_RANKS_MIN: u32 = 9;

/// Packs all-reduce. If every link carries as much in both directions, the result is the optimum,
/// up to sizes that can be packed exactly. Otherwise it is the best packing of the capacity that
/// every link has in both directions. The bound is that of the whole topology in both cases.
///
/// With `trees_per_root`, the packing has this many trees of equal weight for each rank on average.
/// Any rank may be the root of any number of them. If the optimum needs more than
/// [`MAX_TREES_PER_ROOT`] trees a rank, the packing has [`MAX_TREES_PER_ROOT`] trees a rank. `None`
/// if ranks are joined only by links that lead one way.
///
/// # Panics
///
/// When there are fewer than two ranks.
#[must_use]
pub(crate) fn pack_all_reduce(topology: &Topology, trees_per_root: Option<u32>) -> Option<Packing> {
    let (pairs, bound, certificate) = usable_pairs(topology)?;
    let is_in_reach = greedy::is_exact_within_reach(topology);
    if topology.ranks() >= ALIKE_RANKS_MIN && topology.is_symmetric() {
        let packing = orbits::pack_all_reduce(topology, bound, certificate.clone(), trees_per_root);
        if let Some(packing) = packing.filter(|packing| packing.is_optimal() || !is_in_reach) {
            return Some(packing);
        }
    }
    if !is_in_reach {
        return greedy::pack_both_ways(topology, bound, certificate, trees_per_root);
    }
    let best = if topology.is_symmetric() { bound / signed(pairs.unit) } else { pairs.strength().rate };
    let downward = Downward::new(&pairs, best);
    let trees = match trees_per_root {
        None => Some(downward.trees(&pairs))
            .filter(|trees| trees.len() <= (MAX_TREES_PER_ROOT * topology.ranks()) as usize)
            .unwrap_or_else(|| downward.equal_trees(&pairs, MAX_TREES_PER_ROOT)),
        Some(count) => downward.equal_trees(&pairs, count),
    };
    Some(packing(topology, trees, bound, certificate))
}

/// Reduce-scatter and then all-gather over the same trees. Half of the capacity of each link goes
/// each way. The result is optimal only where the ranks are joined evenly. `None` if ranks are
/// joined only by links that lead one way.
///
/// # Panics
///
/// When there are fewer than two ranks.
#[must_use]
#[cfg(feature = "compare")]
pub(crate) fn pack_in_two_phases(topology: &Topology, trees_per_root: Option<u32>) -> Option<Packing> {
    let (pairs, bound, certificate) = usable_pairs(topology)?;
    let both_ways =
        pairs.pairs.iter().flat_map(|&LinkPair { ends: [one, other], capacities: [there, back] }| {
            [(one, other, there), (other, one, back)]
        });
    let graph = Digraph::new(pairs.nodes, pairs.ranks.clone(), both_ways);
    let direction = vec![1; pairs.ranks.len()];
    let best = best_rate(&graph, &direction)?.rate;
    let half = Rate::new(signed(pairs.unit), 2);
    let trees = Forest::new(&graph, &direction, best, trees_per_root).trees(half, true);
    Some(packing(topology, trees, bound, certificate))
}

/// The capacities that can be used in both directions, and the bound; `None` if these capacities do
/// not join the ranks.
fn usable_pairs(topology: &Topology) -> Option<(LinkPairs, Rate, Certificate)> {
    let pairs = Some(LinkPairs::both_ways(topology)).filter(LinkPairs::are_connected)?;
    let (bound, certificate) = bound(topology);
    Some((pairs, bound, certificate))
}

fn packing(topology: &Topology, trees: Vec<Tree>, bound: Rate, certificate: Certificate) -> Packing {
    let rate = trees.iter().map(|tree| tree.weight).sum();
    let mut packing = Packing { collective: Collective::AllReduce, rate, bound, certificate, trees };
    reduce_depth(&mut packing, topology);
    packing
}

/// The rate that no all-reduce exceeds: the least rate of all partitions and cuts. Where there are
/// too many links to compute flows, only single ranks are considered.
#[must_use]
pub(crate) fn bound(topology: &Topology) -> (Rate, Certificate) {
    let pairs = LinkPairs::of(topology);
    let is_symmetric = topology.is_symmetric();
    let (strength, (cut, side)) = if greedy::is_bound_within_reach(topology) {
        (pairs.strength(), pairs.least_cut(is_symmetric))
    } else {
        (pairs.around_single_ranks(), pairs.least_leaving())
    };
    let cut = Rate::from_integer(signed(cut));
    let nodes = |set: &[usize]| set.iter().map(|&node| NodeId(node as u32)).collect::<Vec<_>>();
    let unit = signed(pairs.unit);
    if cut > strength.rate {
        let parts = strength.parts.iter().map(|part| nodes(part)).collect();
        return (strength.rate * unit, Certificate::Partition { parts });
    }
    // A certificate of two parts is easier to check than a certificate of many. If a link carries
    // more in one direction than in the other, a cut may allow less than every partition.
    let certificate = if is_symmetric {
        let others: Vec<usize> = (0..pairs.nodes).filter(|node| !side.contains(node)).collect();
        Certificate::Partition { parts: vec![nodes(&side), nodes(&others)] }
    } else {
        Certificate::Cut { nodes: nodes(&side) }
    };
    (cut * unit, certificate)
}

/// The flow down the trees over each link, and the amount that begins at each rank.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Downward {
    /// The ends of an arc, and its amount.
    arcs: Vec<(usize, usize, Amount)>,
    /// By rank: the amount of trees with this root.
    roots: Vec<Amount>,
    /// This many amounts are one unit of the links' capacities.
    scale: Amount,
}

impl Downward {
    /// Makes the flow that reaches this rate, in units. Partitions must allow the rate, and links
    /// must carry as much in both directions.
    pub(super) fn new(pairs: &LinkPairs, rate: Rate) -> Self {
        let (truncation, base) = even_base(pairs, rate);
        let roots = roots_of(&base, truncation.price);
        let wanted: Vec<i128> = base.iter().zip(&roots).map(|(share, root)| share + root).collect();
        let arcs = arcs_with(pairs, truncation.scale, &wanted);
        let mut downward = Self {
            arcs,
            roots: roots.iter().map(|root| root.unsigned_abs()).collect(),
            scale: 2 * truncation.scale,
        };
        downward.reduce();
        downward
    }

    /// Trees that carry the whole downward flow, reversed: towards their roots.
    fn trees(&self, pairs: &LinkPairs) -> Vec<Tree> {
        let packed = extraction::pack(&self.graph(pairs), &self.roots, true).expect("roots reach every rank");
        Forest { unit: Rate::new(1, signed(packed.parts)), trees: packed.trees }.trees(self.unit(pairs), true)
    }

    /// `count` trees of equal weight for each rank. The roots share them in proportion to the
    /// amounts that begin there.
    fn equal_trees(&self, pairs: &LinkPairs, count: u32) -> Vec<Tree> {
        let counts = in_proportion(&self.roots, Amount::from(count) * self.roots.len() as Amount);
        let graph = self.graph(pairs);
        let best = best_rate(&graph, &counts).expect("there are two ranks and something to send");
        Forest::new(&graph, &counts, best.rate, Some(1)).trees(self.unit(pairs), true)
    }

    fn graph(&self, pairs: &LinkPairs) -> Digraph {
        Digraph::new(pairs.nodes, pairs.ranks.clone(), self.arcs.iter().copied())
    }

    /// The unit of the amounts, in bytes a second.
    fn unit(&self, pairs: &LinkPairs) -> Rate {
        Rate::new(signed(pairs.unit), signed(self.scale))
    }

    fn reduce(&mut self) {
        let amounts = self.arcs.iter().map(|arc| arc.2).chain(self.roots.iter().copied());
        let common = amounts.fold(self.scale, greatest_divisor);
        self.scale /= common;
        self.arcs.iter_mut().for_each(|arc| arc.2 /= common);
        self.roots.iter_mut().for_each(|root| *root /= common);
    }
}

/// Whole numbers with the sum `sum`, in proportion to the amounts as nearly as possible. Each is
/// rounded down; those with the largest remainders are rounded up.
fn in_proportion(amounts: &[Amount], sum: Amount) -> Vec<Amount> {
    let total: Amount = amounts.iter().sum();
    let mut counts: Vec<Amount> = amounts.iter().map(|amount| amount * sum / total).collect();
    let mut order: Vec<usize> = (0..amounts.len()).collect();
    order.sort_by_key(|&place| std::cmp::Reverse(amounts[place] * sum % total));
    let missing = sum - counts.iter().sum::<Amount>();
    order.into_iter().take(missing as usize).for_each(|place| counts[place] += 1);
    counts
}

/// The negative part of a base, reduced to the sum `sum`; the smallest entries are reduced first.
fn roots_of(base: &[i128], sum: i128) -> Vec<i128> {
    let mut roots: Vec<i128> = base.iter().map(|&share| (-share).max(0)).collect();
    let mut excess = roots.iter().sum::<i128>() - sum;
    let mut order: Vec<usize> = (0..roots.len()).collect();
    order.sort_by_key(|&rank| roots[rank]);
    for rank in order {
        let less = excess.min(roots[rank]);
        roots[rank] -= less;
        excess -= less;
    }
    roots
}

/// The arcs of the downward flow: half of each link in each direction, plus a flow that leaves each
/// rank with a surplus of `wanted[rank]`.
fn arcs_with(pairs: &LinkPairs, scale: Amount, wanted: &[i128]) -> Vec<(usize, usize, Amount)> {
    let mut network = Network::new(pairs.nodes + 2);
    let (source, sink) = (pairs.nodes, pairs.nodes + 1);
    let mut ids = Vec::with_capacity(pairs.pairs.len());
    for &LinkPair { ends: [one, other], capacities: [capacity, _] } in &pairs.pairs {
        ids.push(network.add(one, other, capacity * scale, capacity * scale));
    }
    let mut sum = 0;
    for (&node, &more) in pairs.ranks.iter().zip(wanted) {
        if more > 0 {
            network.add(source, node, more.unsigned_abs(), 0);
            sum += more.unsigned_abs();
        } else {
            network.add(node, sink, more.unsigned_abs(), 0);
        }
    }
    let flow = network.max_flow(source, sink, sum);
    assert_eq!(flow, sum, "what a base wants goes over the links");
    let mut arcs = Vec::with_capacity(2 * ids.len());
    for (&LinkPair { ends: [one, other], capacities: [capacity, _] }, &id) in pairs.pairs.iter().zip(&ids) {
        let (there, back) = (network.flow(id), network.flow(id ^ 1));
        let half = capacity * scale;
        arcs.push((one, other, half + there - back));
        arcs.push((other, one, half + back - there));
    }
    arcs.retain(|arc| arc.2 != 0);
    arcs
}

// Graph strength: the bound of all-reduce, and the bases that reach it.
//
// For a rate `R` let `f(S) = B⁺(S) - 2R`, for a set of ranks with the switches that make `B⁺`
// smallest. `R` is within the bound of the crate exactly when no partition of the ranks
// has a smaller `Σ f(Pᵢ)` than the trivial partition, which has `-2R`. `f` is submodular on
// intersecting sets, so the minimum is the value of a *greedy base* (Dilworth truncation; Frank
// and Tardos 1988; Cunningham 1985 for strength). Each rank in turn gets the largest value that
// keeps `y(S) ≤ f(S)` for all sets, which is one minimum cut. The tight sets, united if they
// intersect, are the partition. The rate follows by Newton's method (Dinkelbach 1967): a violated
// partition into `k` parts gives the next rate `Σ B⁺(Pᵢ)/2(k-1)`, and `k` falls with each step.
//
// The switches of two parts never overlap if each part takes the smallest set, provided that every
// switch sends as much as it receives. Otherwise the overlap goes to one part, and the bound is
// that of the resulting parts.
//
// **Invariant:** `y(S) ≤ f(S)` for every set of ranks with any switches, and the sum of `y` is
// `-2R` if `R` is the rate. Everything is scaled by the denominator of the rate, so all numbers
// are integers.

/// More than any cut.
const UNBOUNDED: Amount = 1 << 120;

/// A link pair between two nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct LinkPair {
    /// The nodes, in order.
    ends: [usize; 2],
    /// From the first to the second, and back.
    capacities: [Amount; 2],
}

/// A topology's capacities, link by link and not direction by direction.
#[derive(Clone, Debug)]
struct LinkPairs {
    /// The number of nodes.
    nodes: usize,
    /// The node of every rank.
    ranks: Vec<usize>,
    /// One entry for every two nodes that a link joins.
    pairs: Vec<LinkPair>,
    /// The unit of the capacities, in bytes a second.
    unit: Amount,
}

/// The best that partitions allow.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Strength {
    /// In units.
    rate: Rate,
    /// Disjoint sets of nodes that hold all ranks; `Σ B⁺ / 2(k-1)` of them is the rate.
    parts: Vec<Vec<usize>>,
}

impl LinkPairs {
    /// The capacities of a topology.
    fn of(topology: &Topology) -> Self {
        let mut pairs = Vec::with_capacity(topology.links().len() / 2);
        for link in topology.links() {
            let back = topology.link(link.to, link.from).map_or(0, |back| back.bytes_per_s);
            let capacities = [Amount::from(link.bytes_per_s), Amount::from(back)];
            if link.from < link.to {
                pairs.push(LinkPair { ends: [index(link.from), index(link.to)], capacities });
            } else if back == 0 {
                pairs.push(LinkPair {
                    ends: [index(link.to), index(link.from)],
                    capacities: [0, capacities[0]],
                });
            }
        }
        Self::reduced(topology, pairs)
    }

    /// The capacities that can be used both ways at once: those of the weaker direction of each
    /// link.
    fn both_ways(topology: &Topology) -> Self {
        let Self { mut pairs, unit, .. } = Self::of(topology);
        pairs.retain_mut(|pair| {
            let least = pair.capacities[0].min(pair.capacities[1]) * unit;
            pair.capacities = [least; 2];
            least != 0
        });
        Self::reduced(topology, pairs)
    }

    fn reduced(topology: &Topology, mut pairs: Vec<LinkPair>) -> Self {
        let all = pairs.iter().flat_map(|pair| pair.capacities);
        let unit = all.fold(0, greatest_divisor).max(1);
        for capacity in pairs.iter_mut().flat_map(|pair| &mut pair.capacities) {
            *capacity /= unit;
        }
        let ranks = (0..topology.ranks()).map(|rank| index(topology.node(rank))).collect();
        Self { nodes: topology.nodes().len(), ranks, pairs, unit }
    }

    /// `B⁺` of a set: the capacity that leaves it.
    fn leaves(&self, is_inside: impl Fn(usize) -> bool) -> Amount {
        let mut sum = 0;
        for &LinkPair { ends: [one, other], capacities: [there, back] } in &self.pairs {
            match (is_inside(one), is_inside(other)) {
                (true, false) => sum += there,
                (false, true) => sum += back,
                _ => {}
            }
        }
        sum
    }

    /// `Σ B⁺(Pᵢ) / 2(k-1)`.
    fn rate_of(&self, parts: &[Vec<usize>]) -> Rate {
        let mut part_of = vec![usize::MAX; self.nodes];
        for (part, nodes) in parts.iter().enumerate() {
            nodes.iter().for_each(|&node| part_of[node] = part);
        }
        let mut sum = 0;
        for &LinkPair { ends: [one, other], capacities: [there, back] } in &self.pairs {
            if part_of[one] != part_of[other] {
                sum += if part_of[one] == usize::MAX { 0 } else { there };
                sum += if part_of[other] == usize::MAX { 0 } else { back };
            }
        }
        Ratio::new(sum as i128, 2 * (parts.len() as i128 - 1))
    }

    /// Whether all ranks can be reached from the first one over these links, whatever their
    /// direction.
    fn are_connected(&self) -> bool {
        let mut neighbours = vec![Vec::new(); self.nodes];
        for &LinkPair { ends: [one, other], .. } in &self.pairs {
            neighbours[one].push(other);
            neighbours[other].push(one);
        }
        let mut is_reached = vec![false; self.nodes];
        let mut left = vec![self.ranks[0]];
        while let Some(node) = left.pop() {
            if !std::mem::replace(&mut is_reached[node], true) {
                left.extend(&neighbours[node]);
            }
        }
        self.ranks.iter().all(|&rank| is_reached[rank])
    }

    fn fill(&self, network: &mut Network, scale: Amount) {
        for &LinkPair { ends: [one, other], capacities: [there, back] } in &self.pairs {
            network.add(one, other, there * scale, back * scale);
        }
    }

    /// The set of nodes with the least capacity out of it, of all sets that have ranks inside and
    /// ranks outside. Also returns this capacity.
    fn least_cut(&self, is_symmetric: bool) -> (Amount, Vec<usize>) {
        let mut network = Network::new(self.nodes);
        self.fill(&mut network, 1);
        let first = self.ranks[0];
        let mut least = (Amount::MAX, Vec::new());
        for &rank in &self.ranks[1..] {
            for (source, sink) in
                [(first, rank), (rank, first)].into_iter().take(2 - usize::from(is_symmetric))
            {
                let flow = network.max_flow_value(source, sink, least.0);
                if flow < least.0 {
                    let side = (0..self.nodes).filter(|&node| network.is_source_side(node));
                    least = (flow, side.collect());
                }
            }
        }
        least
    }

    /// The rate that the partition into single ranks allows. There must be two ranks or more.
    fn around_single_ranks(&self) -> Strength {
        let parts: Vec<Vec<usize>> = self.ranks.iter().map(|&node| vec![node]).collect();
        Strength { rate: self.rate_of(&parts), parts }
    }

    /// The single rank with the least capacity out of it, and this capacity. There must be a rank.
    fn least_leaving(&self) -> (Amount, Vec<usize>) {
        let mut leaving = vec![0; self.nodes];
        for &LinkPair { ends: [one, other], capacities: [there, back] } in &self.pairs {
            leaving[one] += there;
            leaving[other] += back;
        }
        let least = self.ranks.iter().copied().min_by_key(|&node| leaving[node]);
        least.map_or((Amount::MAX, Vec::new()), |node| (leaving[node], vec![node]))
    }

    /// The least rate of all partitions. There must be two ranks or more.
    fn strength(&self) -> Strength {
        let Strength { mut rate, mut parts } = self.around_single_ranks();
        let order: Vec<usize> = (0..self.ranks.len()).collect();
        loop {
            let mut truncation = Truncation::new(self, rate, 1);
            let mut base = vec![None; self.ranks.len()];
            let tight = truncation.complete_base(&mut base, &order);
            let sum: i128 = base.iter().flatten().sum();
            if sum >= -truncation.price {
                break;
            }
            let lower = truncation.with_switches(&tight);
            let next = self.rate_of(&lower);
            // The rate does not fall where switches send less or more than they receive.
            if next >= rate {
                break;
            }
            (parts, rate) = (lower, next);
        }
        Strength { rate, parts }
    }
}

/// A base with shares that are as equal as the sets allow, for a rate within the bound. At first
/// every rank gets the same share: the largest share that all ranks can have. Then each share in
/// turn is raised as far as the sets allow. The ranks with the most capacity out of them come
/// first.
fn even_base(pairs: &LinkPairs, rate: Rate) -> (Truncation, Vec<i128>) {
    let ranks = pairs.ranks.len();
    // The equal share of all ranks is minus this.
    let mut share = rate * 2 / ranks as i128;
    let (mut truncation, share) = loop {
        let factor = *(share * rate.denom()).denom();
        let mut truncation = Truncation::new(pairs, rate, factor);
        let scaled = (share * truncation.scale as i128).to_integer();
        let Some(violated) = truncation.most_violated(scaled) else { break (truncation, scaled) };
        share = Ratio::new(-violated.value, violated.ranks.len() as i128 * truncation.scale as i128);
    };
    let mut order: Vec<usize> = (0..ranks).collect();
    let usable_pairs = |rank: usize| pairs.leaves(|node| node == pairs.ranks[rank]);
    order.sort_by_key(|&rank| std::cmp::Reverse(usable_pairs(rank)));
    let mut base = vec![Some(-share); ranks];
    truncation.complete_base(&mut base, &order);
    (truncation, base.into_iter().flatten().collect())
}

/// The network in which a rank's share of a base is a minimum cut.
struct Truncation {
    network: Network,
    source: usize,
    sink: usize,
    /// The node of every rank, the arc to it and the arc from it.
    ranks: Vec<(usize, ArcId, ArcId)>,
    /// The factor of all capacities: the rate's denominator times the caller's factor.
    scale: Amount,
    /// `2R`, scaled.
    price: i128,
}

/// A set of ranks, and the least `f(S)` of these ranks with any switches.
#[derive(Clone, Debug, PartialEq, Eq)]
struct TightSet {
    ranks: Vec<usize>,
    value: i128,
}

impl Truncation {
    /// For a rate in units. All numbers are scaled by `factor` as well.
    fn new(pairs: &LinkPairs, rate: Rate, factor: i128) -> Self {
        let mut network = Network::new(pairs.nodes + 2);
        let (source, sink) = (pairs.nodes, pairs.nodes + 1);
        let scale = (rate.denom() * factor) as Amount;
        pairs.fill(&mut network, scale);
        let mut ranks = Vec::with_capacity(pairs.ranks.len());
        for &node in &pairs.ranks {
            ranks.push((node, network.add(source, node, 0, 0), network.add(node, sink, 0, 0)));
        }
        Self { network, source, sink, ranks, scale, price: 2 * rate.numer() * factor }
    }

    /// The least `f(S) - y(S)` of all sets `S` that hold `rank`, and the ranks of the smallest set
    /// that has this value. `y` of `rank` itself does not count, and ranks without `y` are not in
    /// `S`.
    fn slack(&mut self, base: &[Option<i128>], rank: usize) -> (i128, Vec<usize>) {
        self.network.reset();
        let mut above = 0;
        for (other, &(_, to, from)) in self.ranks.iter().enumerate() {
            let (inside, outside) = match base[other] {
                _ if other == rank => (UNBOUNDED, 0),
                None => (0, UNBOUNDED),
                Some(value) if value > 0 => (value as Amount, 0),
                Some(value) => (0, value.unsigned_abs()),
            };
            above += if other == rank { 0 } else { inside as i128 };
            self.network.set_capacity(to, inside);
            self.network.set_capacity(from, outside);
        }
        let cut = self.network.max_flow_value(self.source, self.sink, UNBOUNDED) as i128;
        let side =
            self.ranks.iter().enumerate().filter(|&(_, &(node, ..))| self.network.is_source_side(node));
        (cut - above - self.price, side.map(|(other, _)| other).collect())
    }

    /// The set that allows the least when all ranks have the share `-share`; `None` if all sets
    /// allow it.
    fn most_violated(&mut self, share: i128) -> Option<TightSet> {
        let base = vec![Some(-share); self.ranks.len()];
        let mut least = (0, None);
        for rank in 0..self.ranks.len() {
            let (slack, ranks) = self.slack(&base, rank);
            if slack + share < least.0 {
                let value = slack - share * (ranks.len() as i128 - 1);
                least = (slack + share, Some(TightSet { ranks, value }));
            }
        }
        least.1
    }

    /// Gives each rank in `order`, one after the other, the most that the other ranks leave for it.
    /// If `order` holds all ranks, this completes `base` to a base. Returns the sets that limited
    /// the ranks. Sets that intersect are united.
    fn complete_base(&mut self, base: &mut [Option<i128>], order: &[usize]) -> Vec<Vec<usize>> {
        let mut part_of: Vec<usize> = (0..base.len()).collect();
        for &rank in order {
            let (slack, tight) = self.slack(base, rank);
            base[rank] = Some(slack);
            let usable_pairs: Vec<usize> = tight.iter().map(|&other| part_of[other]).collect();
            for part in &mut part_of {
                if usable_pairs.contains(part) {
                    *part = rank;
                }
            }
        }
        let mut parts = vec![Vec::new(); base.len()];
        for (rank, &part) in part_of.iter().enumerate() {
            parts[part].push(rank);
        }
        parts.retain(|part| !part.is_empty());
        parts.sort();
        parts
    }

    /// The nodes of each part: its ranks and the smallest set of switches with which the capacity
    /// out of the part is least.
    fn with_switches(&mut self, parts: &[Vec<usize>]) -> Vec<Vec<usize>> {
        let mut taken = vec![false; self.source];
        let mut all = Vec::with_capacity(parts.len());
        for part in parts {
            for (rank, &(_, to, from)) in self.ranks.iter().enumerate() {
                let is_inside = part.contains(&rank);
                self.network.set_capacity(to, if is_inside { UNBOUNDED } else { 0 });
                self.network.set_capacity(from, if is_inside { 0 } else { UNBOUNDED });
            }
            self.network.max_flow_value(self.source, self.sink, UNBOUNDED);
            let is_new = |&node: &usize| self.network.is_source_side(node) && !taken[node];
            let nodes: Vec<usize> = (0..self.source).filter(is_new).collect();
            nodes.iter().for_each(|&node| taken[node] = true);
            all.push(nodes);
        }
        all
    }
}

fn index(node: NodeId) -> usize {
    node.0 as usize
}

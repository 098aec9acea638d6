//! Graph strength: the bound of all-reduce, and the bases that reach it.
//!
//! For a rate `R` let `f(S) = B⁺(S) - 2R`, for a set of ranks with the switches that make `B⁺`
//! smallest. `R` is within the bound of [the crate](super) exactly when no partition of the ranks
//! has a smaller `Σ f(Pᵢ)` than the trivial partition, which has `-2R`. `f` is submodular on
//! intersecting sets, so the minimum is the value of a *greedy base* (Dilworth truncation; Frank
//! and Tardos 1988; Cunningham 1985 for strength). Each rank in turn gets the largest value that
//! keeps `y(S) ≤ f(S)` for all sets, which is one minimum cut. The tight sets, united if they
//! intersect, are the partition. The rate follows by Newton's method (Dinkelbach 1967): a violated
//! partition into `k` parts gives the next rate `Σ B⁺(Pᵢ)/2(k-1)`, and `k` falls with each step.
//!
//! The switches of two parts never overlap if each part takes the smallest set, provided that every
//! switch sends as much as it receives. Otherwise the overlap goes to one part, and the bound is
//! that of the resulting parts.
//!
//! **Invariant:** `y(S) ≤ f(S)` for every set of ranks with any switches, and the sum of `y` is
//! `-2R` if `R` is the rate. Everything is scaled by the denominator of the rate, so all numbers
//! are integers.

use num_rational::Ratio;

use super::Rate;
use super::digraph::greatest_divisor;
use super::flow::{Amount, ArcId, Network};
use crate::topology::{NodeId, Topology};

/// More than any cut.
const UNBOUNDED: Amount = 1 << 120;

/// What joins two nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct LinkPair {
    /// The nodes, in order.
    pub(super) ends: [usize; 2],
    /// From the first to the second, and back.
    pub(super) capacities: [Amount; 2],
}

/// A topology's capacities, link by link and not direction by direction.
#[derive(Clone, Debug)]
pub(super) struct LinkPairs {
    /// The number of nodes.
    pub(super) nodes: usize,
    /// The node of every rank.
    pub(super) ranks: Vec<usize>,
    /// By their ends.
    pub(super) pairs: Vec<LinkPair>,
    /// What one unit of the capacities is, in bytes a second.
    pub(super) unit: Amount,
}

/// The best that partitions allow.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Strength {
    /// In units.
    pub(super) rate: Rate,
    /// Disjoint sets of nodes that hold all ranks; `Σ B⁺ / 2(k-1)` of them is the rate.
    pub(super) parts: Vec<Vec<usize>>,
}

impl LinkPairs {
    /// All that a topology has.
    pub(super) fn of(topology: &Topology) -> Self {
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

    /// What can be used both ways at once: of each link as much as its weaker direction carries.
    pub(super) fn both_ways(topology: &Topology) -> Self {
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

    /// `B⁺` of a set: what leaves it.
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
    pub(super) fn are_connected(&self) -> bool {
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

    /// The set of nodes, with ranks inside and outside, that is left by least.
    pub(super) fn least_cut(&self, is_symmetric: bool) -> (Amount, Vec<usize>) {
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

    /// What the partition into single ranks allows. There are at least two of them.
    pub(super) fn around_single_ranks(&self) -> Strength {
        let parts: Vec<Vec<usize>> = self.ranks.iter().map(|&node| vec![node]).collect();
        Strength { rate: self.rate_of(&parts), parts }
    }

    /// The single rank that is left by least. There is one.
    pub(super) fn least_leaving(&self) -> (Amount, Vec<usize>) {
        let mut leaving = vec![0; self.nodes];
        for &LinkPair { ends: [one, other], capacities: [there, back] } in &self.pairs {
            leaving[one] += there;
            leaving[other] += back;
        }
        let least = self.ranks.iter().copied().min_by_key(|&node| leaving[node]);
        least.map_or((Amount::MAX, Vec::new()), |node| (leaving[node], vec![node]))
    }

    /// The least rate of all partitions. There are at least two ranks.
    pub(super) fn strength(&self) -> Strength {
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
            // Where switches do not send as much as they receive.
            if next >= rate {
                break;
            }
            (parts, rate) = (lower, next);
        }
        Strength { rate, parts }
    }
}

/// A base with shares as equal as sets allow, for a rate within the bound: all ranks have the same,
/// as much as they can have together, and are then completed one after the other, those with most
/// links first.
pub(super) fn even_base(pairs: &LinkPairs, rate: Rate) -> (Truncation, Vec<i128>) {
    let ranks = pairs.ranks.len();
    // What each has is minus this.
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
pub(super) struct Truncation {
    network: Network,
    source: usize,
    sink: usize,
    /// The node of every rank, the arc to it and the arc from it.
    ranks: Vec<(usize, ArcId, ArcId)>,
    /// By what capacities are multiplied: the rate's denominator and the factor.
    pub(super) scale: Amount,
    /// `2R`, scaled.
    pub(super) price: i128,
}

/// Some ranks, and the least `f(S)` of them with any switches.
#[derive(Clone, Debug, PartialEq, Eq)]
struct TightSet {
    ranks: Vec<usize>,
    value: i128,
}

impl Truncation {
    /// For a rate in units, everything scaled by a factor as well.
    pub(super) fn new(pairs: &LinkPairs, rate: Rate, factor: i128) -> Self {
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

    /// The least `f(S) - y(S)` of sets with a rank, `y` of that rank not counted and ranks without
    /// `y` left out; and the ranks of the smallest such set.
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

    /// The set that allows least if all ranks have as little, where they may not all have `-share`
    /// of it.
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

    /// Gives ranks, one after the other, the most that the others leave them: with all in the
    /// order, what it had before is completed to a base. Gives the sets that stopped them, joined
    /// where they meet.
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

    /// The nodes of parts: their ranks, and the fewest switches with which least leaves them.
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

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::samples::Random;
    use crate::topology::LATENCY_NS;

    /// Ranks first, then switches.
    pub(crate) fn random_topology(
        random: &mut Random,
        ranks: usize,
        switches: usize,
        symmetric: bool,
    ) -> Option<Topology> {
        let mut builder = Topology::builder();
        let mut nodes: Vec<NodeId> = (0..ranks).map(|rank| builder.rank(format!("r{rank}"))).collect();
        nodes.extend((0..switches).map(|switch| builder.switch(format!("s{switch}"))));
        let density = 1 + random.below(4);
        for (place, &one) in nodes.iter().enumerate() {
            for &other in &nodes[..place] {
                if random.below(5) < density {
                    let there = 1 + random.below(7);
                    let back = if symmetric { there } else { 1 + random.below(7) };
                    builder.link(one, other, there, LATENCY_NS);
                    builder.link(other, one, back, LATENCY_NS);
                }
            }
        }
        builder.build().ok()
    }

    /// The least of all families of disjoint sets that hold all ranks, one by one.
    fn by_enumeration(pairs: &LinkPairs) -> Rate {
        fn extend(pairs: &LinkPairs, parts: &mut Vec<Vec<usize>>, node: usize, least: &mut Option<Rate>) {
            if node == pairs.nodes {
                let has_rank = |part: &Vec<usize>| part.iter().any(|node| pairs.ranks.contains(node));
                if parts.len() >= 2 && parts.iter().all(has_rank) {
                    let rate = pairs.rate_of(parts);
                    *least = Some(least.map_or(rate, |least| least.min(rate)));
                }
                return;
            }
            for part in 0..parts.len() {
                parts[part].push(node);
                extend(pairs, parts, node + 1, least);
                parts[part].pop();
            }
            if pairs.ranks.contains(&node) {
                parts.push(vec![node]);
                extend(pairs, parts, node + 1, least);
                parts.pop();
            } else {
                extend(pairs, parts, node + 1, least);
            }
        }
        let mut least = None;
        extend(pairs, &mut Vec::new(), 0, &mut least);
        least.expect("at least two ranks")
    }

    fn is_balanced(pairs: &LinkPairs) -> bool {
        (0..pairs.nodes)
            .filter(|node| !pairs.ranks.contains(node))
            .all(|switch| pairs.leaves(|node| node == switch) == pairs.leaves(|node| node != switch))
    }

    #[test]
    fn the_rate_is_the_least_of_all_families_on_random_graphs() {
        let mut random = Random::new(4);
        let (mut exact, mut with_switches, mut above) = (0, 0, 0);
        for round in 0..1_500 {
            let (ranks, switches) = (2 + random.below(5) as usize, random.below(3) as usize);
            let Some(topology) = random_topology(&mut random, ranks, switches, round % 3 != 0) else {
                continue;
            };
            let pairs = LinkPairs::of(&topology);
            let (strength, least) = (pairs.strength(), by_enumeration(&pairs));
            assert_eq!(pairs.rate_of(&strength.parts), strength.rate);
            let mut held: Vec<usize> = strength.parts.concat();
            held.sort_unstable();
            assert!(held.windows(2).all(|pair| pair[0] < pair[1]), "parts overlap");
            assert!(pairs.ranks.iter().all(|rank| held.contains(rank)), "a rank is in no part");
            if is_balanced(&pairs) {
                assert_eq!(strength.rate, least);
                exact += 1;
                with_switches += u32::from(switches > 0);
            } else {
                assert!(strength.rate >= least);
                above += u32::from(strength.rate > least);
            }
        }
        assert!(exact > 600 && with_switches > 300, "{exact} {with_switches}");
        assert!(above < 30, "{above} families were missed where switches lose what they receive");
    }

    #[test]
    fn the_least_cut_is_the_least_of_all_sets() {
        let mut random = Random::new(5);
        for round in 0..500 {
            let Some(topology) = random_topology(&mut random, 4, 2, round % 2 == 0) else { continue };
            let pairs = LinkPairs::of(&topology);
            let separates = |set: u32| {
                pairs.ranks.iter().any(|rank| set >> rank & 1 == 1)
                    && pairs.ranks.iter().any(|rank| set >> rank & 1 == 0)
            };
            let sets = (0..1_u32 << pairs.nodes).filter(|&set| separates(set));
            let least = sets.map(|set| pairs.leaves(|node| set >> node & 1 == 1)).min().unwrap();
            let (cut, side) = pairs.least_cut(round % 2 == 0);
            assert_eq!(cut, least);
            assert_eq!(pairs.leaves(|node| side.contains(&node)), least);
        }
    }

    #[test]
    fn a_base_sums_to_the_price_and_no_set_has_more_than_leaves_it() {
        let mut random = Random::new(6);
        for _ in 0..300 {
            let Some(topology) = random_topology(&mut random, 5, 2, true) else { continue };
            let pairs = LinkPairs::of(&topology);
            let mut truncation = Truncation::new(&pairs, pairs.strength().rate, 1);
            let mut base = vec![None; 5];
            truncation.complete_base(&mut base, &[3, 1, 4, 0, 2]);
            let base: Vec<i128> = base.into_iter().flatten().collect();
            assert_eq!(base.iter().sum::<i128>(), -truncation.price);
            for set in 1..1_u32 << pairs.nodes {
                let ranks = (0..5).filter(|rank| set >> rank & 1 == 1);
                let sum: i128 = ranks.clone().map(|rank| base[rank]).sum();
                let leaves = pairs.leaves(|node| set >> node & 1 == 1) * truncation.scale;
                assert!(ranks.count() == 0 || sum <= leaves as i128 - truncation.price);
            }
        }
    }
}

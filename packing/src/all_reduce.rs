//! All-reduce at its optimum, over links that carry as much in both directions: every tree is used
//! upwards and downwards at the same time.
//!
//! Let `R` be the rate that partitions allow ([`strength`](super::strength)). Of the capacity `c`
//! of a link, the trees use `x(u→v)` downwards in one direction and `x(v→u) = c - x(u→v)` in the
//! other. Every tree is used upwards as well, so both directions are full. Out-trees with `r(v)` of
//! them rooted at `v`, `R` in all, can be packed in `x` if and only if each switch sends as much as
//! it receives and every set of nodes with a rank has `r(S) + x⁻(S) ≥ R` (Edmonds 1973;
//! Bang-Jensen, Frank and Jackson 1995 for switches). With `z(v) = (x⁺(v) - x⁻(v))/2`, which is
//! zero at switches, `x⁻(S) = B(S)/2 - z(S)`. So the condition is that `z - r` is a
//! [base](super::strength) of `f/2`. A base exists exactly when `R` is at most the bound of
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

use pleach_vocabulary::Collective;

use super::MAX_TREES_PER_ROOT;
use super::depth::reduce_depth;
use super::digraph::{Digraph, greatest_divisor};
use super::directed::Forest;
use super::flow::{Amount, Network};
use super::rate::{best_rate, signed};
use super::strength::{LinkPair, LinkPairs, even_base};
use super::{Certificate, Packing, Rate, Tree, extraction, greedy, orbits};
use crate::topology::{NodeId, Topology};

/// Fewest ranks that are looked at by what looks the same. Fewer have less deep trees when each may
/// differ.
const ALIKE_RANKS_MIN: u32 = 9;

/// The optimum where links carry as much both ways, up to sizes that can be packed exactly;
/// elsewhere the best of what every link carries both ways, beside the bound of all. With
/// `trees_per_root`, so many trees of equal weight for each rank on the average, as roots are free;
/// and so with [`MAX_TREES_PER_ROOT`] where the optimum needs more trees than that. `None` if
/// ranks are joined only by links that lead one way.
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

/// Reduce-scatter and then all-gather, over the same trees, along which half of what links carry
/// goes each way. That is optimal only where the ranks are joined evenly; see the facts of the
/// module. `None` if ranks are joined only by links that lead one way.
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

/// What can be used both ways beside the bound; `None` if that does not join the ranks.
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

/// What no all-reduce exceeds: of all partitions and cuts, or of single ranks only where there are
/// too many links to ask for flows.
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
    // Two parts are easier to see than many; and with links that differ both ways a set may be left
    // by less.
    let certificate = if is_symmetric {
        let others: Vec<usize> = (0..pairs.nodes).filter(|node| !side.contains(node)).collect();
        Certificate::Partition { parts: vec![nodes(&side), nodes(&others)] }
    } else {
        Certificate::Cut { nodes: nodes(&side) }
    };
    (cut * unit, certificate)
}

/// What goes down the trees over each link, and how much begins at each rank.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Downward {
    /// From where to where, how much.
    arcs: Vec<(usize, usize, Amount)>,
    /// By rank.
    roots: Vec<Amount>,
    /// How many of these are a unit of the links' capacities.
    pub(super) scale: Amount,
}

impl Downward {
    /// What reaches this rate in units, which partitions have to allow. Links carry as much both
    /// ways.
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

    /// Trees that carry as much as goes down, towards their roots.
    fn trees(&self, pairs: &LinkPairs) -> Vec<Tree> {
        let packed = extraction::pack(&self.graph(pairs), &self.roots, true).expect("roots reach every rank");
        Forest { unit: Rate::new(1, signed(packed.parts)), trees: packed.trees }.trees(self.unit(pairs), true)
    }

    /// So many trees of equal weight for each rank, shared among the roots as evenly as what begins
    /// there.
    fn equal_trees(&self, pairs: &LinkPairs, count: u32) -> Vec<Tree> {
        let counts = in_proportion(&self.roots, Amount::from(count) * self.roots.len() as Amount);
        let graph = self.graph(pairs);
        let best = best_rate(&graph, &counts).expect("there are two ranks and something to send");
        Forest::new(&graph, &counts, best.rate, Some(1)).trees(self.unit(pairs), true)
    }

    fn graph(&self, pairs: &LinkPairs) -> Digraph {
        Digraph::new(pairs.nodes, pairs.ranks.clone(), self.arcs.iter().copied())
    }

    /// What one of the amounts is in bytes a second.
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

/// Whole numbers that sum to `sum` and are to each other as nearly as these: rounded down, those
/// with the largest rests up.
fn in_proportion(amounts: &[Amount], sum: Amount) -> Vec<Amount> {
    let total: Amount = amounts.iter().sum();
    let mut counts: Vec<Amount> = amounts.iter().map(|amount| amount * sum / total).collect();
    let mut order: Vec<usize> = (0..amounts.len()).collect();
    order.sort_by_key(|&place| std::cmp::Reverse(amounts[place] * sum % total));
    let missing = sum - counts.iter().sum::<Amount>();
    order.into_iter().take(missing as usize).for_each(|place| counts[place] += 1);
    counts
}

/// What is negative in a base, cut down to a sum where it is least.
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

/// Half of each link each way, and beside that a flow by which every rank sends so much more than
/// half.
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

#[cfg(test)]
mod tests {
    use pleach_vocabulary::Rank;

    use super::*;
    use crate::check;
    use crate::samples::Random;
    use crate::strength::tests::random_topology;
    use crate::topology::preset;

    fn both_ways(topology: &Topology) -> (LinkPairs, Rate, Downward) {
        let pairs = LinkPairs::both_ways(topology);
        let rate = pairs.strength().rate;
        let downward = Downward::new(&pairs, rate);
        (pairs, rate, downward)
    }

    #[test]
    fn roots_reach_every_rank_at_the_rate_of_partitions_over_links_that_are_full() {
        let mut random = Random::new(7);
        let mut rounds = 0;
        for _ in 0..1_500 {
            let (ranks, switches) = (2 + random.below(7) as usize, random.below(4) as usize);
            let Some(topology) = random_topology(&mut random, ranks, switches, true) else { continue };
            rounds += 1;
            let (pairs, rate, downward) = both_ways(&topology);
            let sum: Amount = downward.roots.iter().sum();
            assert_eq!(Rate::new(sum as i128, downward.scale as i128), rate);
            let mut network = Network::new(pairs.nodes + 1);
            for &(from, to, amount) in &downward.arcs {
                network.add(from, to, amount, 0);
            }
            for (&node, &root) in pairs.ranks.iter().zip(&downward.roots) {
                network.add(pairs.nodes, node, root, 0);
            }
            for &node in &pairs.ranks {
                assert_eq!(network.max_flow(pairs.nodes, node, Amount::MAX), sum);
            }
            for pair in &pairs.pairs {
                let [one, other] = pair.ends;
                let both = downward
                    .arcs
                    .iter()
                    .filter(|arc| [one, other] == [arc.0, arc.1] || [other, one] == [arc.0, arc.1]);
                assert_eq!(both.map(|arc| arc.2).sum::<Amount>(), pair.capacities[0] * downward.scale);
            }
            for switch in ranks..pairs.nodes {
                let sends: Amount = downward.arcs.iter().filter(|arc| arc.0 == switch).map(|arc| arc.2).sum();
                let gets: Amount = downward.arcs.iter().filter(|arc| arc.1 == switch).map(|arc| arc.2).sum();
                assert_eq!(sends, gets);
            }
        }
        assert!(rounds > 800, "{rounds}");
    }

    /// What the checker says of a packing that has to be right.
    fn checked(topology: &Topology, packing: &Packing) {
        check(topology, packing).unwrap_or_else(|flaw| panic!("{flaw}: {packing:?}"));
    }

    #[test]
    fn random_graphs_are_packed_at_the_bound_where_links_carry_as_much_both_ways() {
        let mut random = Random::new(11);
        let (mut optimal, mut gaps) = (0, 0);
        for round in 0..400 {
            let (ranks, switches) = (2 + random.below(7) as usize, random.below(4) as usize);
            let Some(topology) = random_topology(&mut random, ranks, switches, round % 4 != 0) else {
                continue;
            };
            let packing = pack_all_reduce(&topology, None).expect("links go both ways");
            checked(&topology, &packing);
            assert!(packing.is_optimal() || !topology.is_symmetric());
            optimal += u32::from(packing.is_optimal());
            gaps += u32::from(!packing.is_optimal());
            for count in [1, 2, 5] {
                let equal = pack_all_reduce(&topology, Some(count)).expect("links go both ways");
                checked(&topology, &equal);
                assert!(equal.trees.len() <= ranks * count as usize);
                let tree = equal.rate / i128::from(topology.ranks() * count);
                assert!(equal.trees.iter().all(|part| (part.weight / tree).is_integer()));
            }
            checked(&topology, &pack_in_two_phases(&topology, None).expect("links go both ways"));
        }
        assert!(optimal > 200 && gaps > 20, "{optimal} {gaps}");
    }

    /// A number of links.
    type Links = (i128, i128);

    /// Topology, ranks, what trees used both ways reach, and what reduce-scatter and then
    /// all-gather do, in links.
    const KNOWN: [(&str, &[Rank], Links, Links); 8] = [
        ("dgx-1v", &[0, 1, 2], (2, 1), (3, 2)),
        ("dgx-1v", &[0, 2, 3], (5, 2), (9, 4)),
        ("dgx-1v", &[0, 3, 4, 7], (7, 3), (2, 1)),
        ("dgx-1v", &[0, 1, 2, 4, 5], (9, 4), (15, 8)),
        ("dgx-1v", &[0, 1, 2, 3, 4, 5, 6, 7], (24, 7), (24, 7)),
        ("dgx-1p", &[0, 1, 2], (3, 2), (3, 2)),
        ("dgx-1p", &[0, 1, 2, 3], (2, 1), (2, 1)),
        ("dgx-1p", &[0, 1, 2, 3, 4, 5, 6, 7], (16, 7), (16, 7)),
    ];

    #[test]
    fn allocations_of_dgx_1_have_the_rates_that_are_known_of_them() {
        for (name, ranks, all_reduce, two_phases) in KNOWN {
            let link = if name == "dgx-1v" { 25_000_000_000 } else { 20_000_000_000 };
            let topology = preset(name).unwrap().only(ranks).unwrap();
            let rate = |(links, parts)| Rate::new(links * link, parts);
            let packing = pack_all_reduce(&topology, None).unwrap();
            assert_eq!(
                (packing.rate, packing.bound),
                (rate(all_reduce), rate(all_reduce)),
                "{name} {ranks:?}"
            );
            let packing = pack_in_two_phases(&topology, None).unwrap();
            assert_eq!(
                (packing.rate, packing.bound),
                (rate(two_phases), rate(all_reduce)),
                "{name} {ranks:?}"
            );
        }
    }

    #[test]
    fn every_connected_allocation_of_dgx_1_is_packed_at_its_bound() {
        let mut packed = 0;
        for name in ["dgx-1v", "dgx-1p"] {
            let trees_in = preset(name).unwrap();
            for set in 0..1_u32 << 8 {
                let ranks: Vec<Rank> = (0..8).filter(|rank| set >> rank & 1 == 1).collect();
                if ranks.len() < 3 {
                    continue;
                }
                let Ok(topology) = trees_in.only(&ranks) else { continue };
                let packing = pack_all_reduce(&topology, None).unwrap();
                checked(&topology, &packing);
                assert!(packing.is_optimal(), "{name} {ranks:?}");
                packed += 1;
            }
        }
        assert!(packed > 300, "{packed}");
    }

    #[test]
    fn presets_get_trees_as_shallow_as_they_can_be() {
        for (name, depth) in
            [("star:12", 1), ("dgx-2", 1), ("fat-tree:4", 1), ("dgx-h100:8", 2), ("ring:9", 4)]
        {
            let topology = preset(name).unwrap();
            let packing = pack_all_reduce(&topology, None).unwrap();
            let depths = check(&topology, &packing).unwrap().depths;
            assert!(packing.is_optimal());
            assert_eq!(depths.iter().map(|depth| depth.edges).max(), Some(depth), "{name}");
        }
    }

    #[test]
    fn links_that_lead_one_way_only_carry_no_trees_that_are_used_both_ways() {
        let mut builder = Topology::builder();
        let nodes: Vec<NodeId> = (0..3).map(|rank| builder.rank(format!("r{rank}"))).collect();
        (0..3).for_each(|rank| builder.link(nodes[rank], nodes[(rank + 1) % 3], 1, 0));
        let topology = builder.build().unwrap();
        assert_eq!(pack_all_reduce(&topology, None), None);
        assert_eq!(pack_in_two_phases(&topology, None), None);
    }
}

use pleach_vocabulary::Rank;

use super::*;
use crate::check;
use crate::samples::{Random, random_topology};
use crate::topology::preset;

/// The least rate of all families of disjoint sets that hold all ranks, by trying every family.
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

/// The result of the checker for a packing that must be valid.
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

/// A topology, its ranks, and two rates in links: the rate of trees used in both directions, and
/// the rate of a reduce-scatter followed by an all-gather.
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
        assert_eq!((packing.rate, packing.bound), (rate(all_reduce), rate(all_reduce)), "{name} {ranks:?}");
        let packing = pack_in_two_phases(&topology, None).unwrap();
        assert_eq!((packing.rate, packing.bound), (rate(two_phases), rate(all_reduce)), "{name} {ranks:?}");
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
    for (name, depth) in [("star:12", 1), ("dgx-2", 1), ("fat-tree:4", 1), ("dgx-h100:8", 2), ("ring:9", 4)] {
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

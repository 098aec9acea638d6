//! Placements against brute force, and what is refused.

use pleach_graph_analyzer::partition::PartitionError;
use pleach_graph_analyzer::placement::{PlacementError, Table};
use pleach_graph_analyzer::{Costs, Graph, Partition, Placement};
use proptest::prelude::{prop_assert, prop_assert_eq, prop_assume, proptest};
use proptest::test_runner::Config;

use super::samples::{SampleNode, graph_of, sample_nodes};

/// Costs with a time for each node: as many nanoseconds as bytes of its result, by a factor.
fn costs(nodes: &[SampleNode], bytes_per_ns: f64) -> Costs {
    let node_ns = nodes.iter().map(|node| node.bytes % 97 + 1).collect();
    Costs { node_ns, transfer_bytes_per_s: bytes_per_ns * 1e9 }
}

/// All assignments of nodes to ranks in which data never flow back and every rank has a node.
fn assignments(nodes: &[SampleNode], ranks: u32) -> Vec<Vec<u32>> {
    let mut all = vec![Vec::new()];
    for node in nodes {
        let extended = |before: &Vec<u32>| {
            let lowest = node.uses.iter().map(|&used| before[used]).max().unwrap_or(0);
            let extend = |rank| before.iter().copied().chain([rank]).collect();
            (lowest..ranks).map(extend).collect::<Vec<Vec<u32>>>()
        };
        all = all.iter().flat_map(extended).collect();
    }
    all.retain(|assignment| (0..ranks).all(|rank| assignment.contains(&rank)));
    all
}

fn is_used(nodes: &[SampleNode], number: usize) -> bool {
    nodes.iter().any(|node| node.uses.contains(&number))
}

/// The bytes that each rank receives, counted anew.
fn received(nodes: &[SampleNode], input_bytes: u64, ranks: &[u32], count: u32) -> Vec<u64> {
    let mut received = vec![0; count as usize];
    for rank in 0..count {
        let here = |number: usize| ranks[number] == rank;
        let uses_input = (0..nodes.len()).any(|number| here(number) && nodes[number].uses.is_empty());
        received[rank as usize] += if rank > 0 && uses_input { input_bytes } else { 0 };
        for (number, node) in nodes.iter().enumerate() {
            let is_output = rank + 1 == count && !is_used(nodes, number);
            let is_needed =
                is_output || (0..nodes.len()).any(|user| here(user) && nodes[user].uses.contains(&number));
            received[rank as usize] += if !here(number) && is_needed { node.bytes } else { 0 };
        }
    }
    received
}

fn bottleneck(nodes: &[SampleNode], costs: &Costs, input_bytes: u64, ranks: &[u32], count: u32) -> u64 {
    let received = received(nodes, input_bytes, ranks, count);
    let of = |rank: u32| {
        let computed =
            (0..nodes.len()).filter(|&number| ranks[number] == rank).map(|number| costs.node_ns[number]);
        let transfer = received[rank as usize] as f64 / costs.transfer_bytes_per_s * 1e9;
        computed.sum::<u64>().max(transfer as u64)
    };
    (0..count).map(of).max().unwrap_or(0)
}

fn ranks_of(graph: &Graph, placement: &Placement) -> Vec<u32> {
    graph.placed_nodes().iter().filter_map(|&node| placement.rank_of(node)).collect()
}

const INPUT_BYTES: u64 = 500;

proptest! {
    #![proptest_config(Config { cases: 200, failure_persistence: None, ..Config::default() })]

    #[test]
    fn a_pipeline_has_the_least_bottleneck_of_all_contiguous_parts(nodes in sample_nodes(12), ranks in 1_u32..5) {
        prop_assume!(nodes.len() >= ranks as usize);
        let graph = graph_of(&nodes, INPUT_BYTES);
        let costs = costs(&nodes, 3.0);
        let placement = Placement::pipeline(&graph, ranks, &costs, None).expect("there are enough nodes");
        let own = ranks_of(&graph, &placement);
        let contiguous = (0..1_u64 << (nodes.len() - 1)).filter(|cuts| cuts.count_ones() + 1 == ranks);
        let contiguous = contiguous.map(|cuts| -> Vec<u32> {
            (0..nodes.len()).map(|place| (cuts & ((1 << place) - 1)).count_ones()).collect()
        });
        let key = |assignment: &Vec<u32>| {
            let crossing: u64 = received(&nodes, INPUT_BYTES, assignment, ranks).iter().sum();
            (bottleneck(&nodes, &costs, INPUT_BYTES, assignment, ranks), crossing)
        };
        let best = contiguous.map(|assignment| key(&assignment)).min().expect("there is one");
        prop_assert_eq!(key(&own), best);
        let partition = Partition::new(&graph, &placement).expect("it has no cycle");
        prop_assert_eq!(partition.crossing_bytes(), best.1);
    }

    #[test]
    fn two_parts_without_limit_are_a_minimum_cut(nodes in sample_nodes(12)) {
        let graph = graph_of(&nodes, INPUT_BYTES);
        let placement = Placement::min_cut(&graph, 2, &costs(&nodes, 1.0), None).expect("there are two nodes");
        let partition = Partition::new(&graph, &placement).expect("it has no cycle");
        let all = assignments(&nodes, 2);
        let best = all.iter().map(|ranks| received(&nodes, INPUT_BYTES, ranks, 2).iter().sum::<u64>()).min();
        prop_assert_eq!(Some(partition.crossing_bytes()), best);
    }

    #[test]
    fn more_parts_keep_the_limit_and_never_beat_brute_force(nodes in sample_nodes(8), ranks in 2_u32..4, percent in 0_u32..150) {
        prop_assume!(nodes.len() >= ranks as usize);
        let graph = graph_of(&nodes, INPUT_BYTES);
        let costs = costs(&nodes, 1.0);
        let average = costs.node_ns.iter().sum::<u64>().div_ceil(u64::from(ranks));
        let limit = average + average * u64::from(percent) / 100;
        let load = |assignment: &[u32], rank: u32| -> u64 {
            (0..nodes.len()).filter(|&number| assignment[number] == rank).map(|number| costs.node_ns[number]).sum()
        };
        let fits = |assignment: &Vec<u32>| (0..ranks).all(|rank| load(assignment, rank) <= limit);
        let even = assignments(&nodes, ranks).into_iter().filter(fits);
        let best = even.map(|assignment| received(&nodes, INPUT_BYTES, &assignment, ranks).iter().sum::<u64>()).min();
        match Placement::min_cut(&graph, ranks, &costs, Some(percent)) {
            Ok(placement) => {
                let own = ranks_of(&graph, &placement);
                prop_assert!(fits(&own));
                let bytes: u64 = received(&nodes, INPUT_BYTES, &own, ranks).iter().sum();
                prop_assert!(Some(bytes) >= best, "{} bytes beat {:?}", bytes, best);
            }
            Err(error) => prop_assert!(matches!(error, PlacementError::Imbalance { .. }), "{}", error),
        }
    }
}

/// How often the refined cuts are the best there are, over fixed graphs.
#[test]
fn refined_cuts_are_mostly_minimal() {
    let (mut optimal, mut all) = (0, 0);
    for seed in 0..60_u64 {
        let mut state = seed;
        let mut draw = |limit: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) % limit
        };
        let node = |number: u64, draw: &mut dyn FnMut(u64) -> u64| {
            let count = if number == 0 { 0 } else { draw(3).min(number) };
            let mut uses: Vec<usize> = (0..count).map(|_| draw(number) as usize).collect();
            uses.sort_unstable();
            uses.dedup();
            SampleNode { uses, bytes: 1 + draw(1000) }
        };
        let nodes: Vec<SampleNode> = (0..8).map(|number| node(number, &mut draw)).collect();
        let graph = graph_of(&nodes, INPUT_BYTES);
        let placement = Placement::min_cut(&graph, 3, &costs(&nodes, 1.0), None).expect("there are nodes");
        let own: u64 = received(&nodes, INPUT_BYTES, &ranks_of(&graph, &placement), 3).iter().sum();
        let best = assignments(&nodes, 3)
            .iter()
            .map(|ranks| received(&nodes, INPUT_BYTES, ranks, 3).iter().sum::<u64>())
            .min();
        optimal += usize::from(Some(own) == best);
        all += 1;
    }
    assert!(optimal * 10 >= all * 8, "{optimal} of {all} are minimal");
}

#[test]
fn a_tensor_with_three_users_on_one_rank_crosses_once() {
    let use_0 = || SampleNode { uses: vec![0], bytes: 10 };
    let nodes = [SampleNode { uses: vec![], bytes: 100 }, use_0(), use_0(), use_0()];
    let graph = graph_of(&nodes, 5);
    let table = Table::parse("n0 0\n* 1").expect("it is a table");
    let placement = Placement::table(&graph, &table, None).expect("it names nodes");
    let partition = Partition::new(&graph, &placement).expect("it has no cycle");
    assert_eq!((partition.crossings().len(), partition.crossing_bytes()), (1, 100));
}

#[test]
fn parts_that_form_a_cycle_are_refused_with_the_cycle() {
    let chain =
        |number: usize| SampleNode { uses: if number == 0 { vec![] } else { vec![number - 1] }, bytes: 10 };
    let graph = graph_of(&[chain(0), chain(1), chain(2)], 5);
    let table = Table::parse("n1 1\n* 0").expect("it is a table");
    let placement = Placement::table(&graph, &table, None).expect("it names nodes");
    let Err(PartitionError::Cycle { cycle }) = Partition::new(&graph, &placement) else {
        panic!("it is a cycle")
    };
    assert!(cycle.contains("rank 0 -> ('n0') -> rank 1"), "{cycle}");
    assert!(cycle.contains("rank 1 -> ('n1') -> rank 0"), "{cycle}");
}

#[test]
fn what_cannot_be_placed_is_refused_with_the_reason() {
    let chain =
        |number: usize| SampleNode { uses: if number == 0 { vec![] } else { vec![number - 1] }, bytes: 1000 };
    let nodes = [chain(0), chain(1), chain(2)];
    let graph = graph_of(&nodes, 1000);
    let costs = costs(&nodes, 1.0);
    let table = |text: &str, ranks| {
        let table = Table::parse(text).expect("it is a table");
        Placement::table(&graph, &table, ranks).expect_err("it is refused").to_string()
    };
    assert_eq!(
        Placement::pipeline(&graph, 4, &costs, None),
        Err(PlacementError::MoreRanksThanNodes { ranks: 4, nodes: 3 })
    );
    assert_eq!(table("n7 0\n* 0", None), "line 1 of the table: no node matches 'n7'; did you mean 'n2'?");
    assert_eq!(table("n0 0", None), "node 'n1' has no line in the table; give it one");
    assert_eq!(
        table("* 2", Some(2)),
        "node 'n2' is on rank 2, and there are 2 ranks; correct one of the numbers"
    );
    assert_eq!(table("n0 0\n* 2", None), "rank 1 of 3 has no node; place a node there, or take fewer ranks");
    let unstaged = Placement::stages(&graph).expect_err("there are no stages").to_string();
    assert_eq!(unstaged, "node 'n0' has no pipeline_stage; give it one");
    let too_small = Placement::pipeline(&graph, 1, &costs, Some(2000)).expect_err("it does not fit");
    assert_eq!(too_small, PlacementError::Memory { ranks: 1, needed: 2048, limit: 2000 });
    assert!(too_small.to_string().contains("which is 48 more than the limit of 2000"), "{too_small}");
    assert!(Placement::pipeline(&graph, 1, &costs, Some(2048)).is_ok());
    let uneven =
        Placement::min_cut(&graph, 2, &costs, Some(10)).expect_err("three nodes are not even on two ranks");
    assert!(matches!(uneven, PlacementError::Imbalance { percent: 10, reached } if reached > 10), "{uneven}");
}

#[test]
fn a_placement_under_a_memory_limit_keeps_to_it() {
    let chain =
        |number: usize| SampleNode { uses: if number == 0 { vec![] } else { vec![number - 1] }, bytes: 640 };
    let nodes: Vec<SampleNode> = (0..6).map(chain).collect();
    let graph = graph_of(&nodes, 640);
    let placement = Placement::pipeline(&graph, 2, &costs(&nodes, 1e6), Some(4 * 640)).expect("it fits");
    let partition = Partition::new(&graph, &placement).expect("it has no cycle");
    for part in partition.parts() {
        let buffers = part.plan_buffers();
        let plan = pleach_graph_analyzer::MemoryPlan::best_fit(&buffers);
        assert!(plan.check(&buffers).expect("it is a plan").bytes <= 4 * 640);
    }
}

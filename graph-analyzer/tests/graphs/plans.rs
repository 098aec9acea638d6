//! Memory plans against brute force, the check against wrong plans, and hard instances.

use std::ops::Range;

use pleach_graph_analyzer::MemoryPlan;
use pleach_graph_analyzer::plan::{BUFFERS_MAX, Buffer, Effort, PlanFlaw};
use proptest::prelude::{Strategy, prop, prop_assert, prop_assert_eq, proptest};
use proptest::test_runner::Config;

use super::samples::data;

fn buffer(lifetime: Range<u64>, bytes: u64) -> Buffer {
    Buffer { lifetime, bytes }
}

fn buffers(most: usize) -> impl Strategy<Value = Vec<Buffer>> {
    let drawn = (0_u64..8, 0_u64..5, 0_u64..400);
    prop::collection::vec(
        drawn.prop_map(|(start, length, bytes)| buffer(start..start + length, bytes)),
        0..=most,
    )
}

/// The lowest arena of all plans: some order of the buffers, each at the lowest place that is free,
/// gives the best plan.
fn lowest_arena(buffers: &[Buffer]) -> u64 {
    fn place(buffers: &[Buffer], placed: &mut Vec<(usize, u64)>, height: u64, best: &mut u64) {
        if height >= *best {
            return;
        }
        if placed.len() == buffers.len() {
            *best = height;
            return;
        }
        for number in 0..buffers.len() {
            if placed.iter().any(|(other, _)| *other == number) {
                continue;
            }
            let own = &buffers[number];
            let size = own.bytes.div_ceil(64) * 64;
            let overlaps = |other: &Buffer| {
                !own.lifetime.is_empty()
                    && !other.lifetime.is_empty()
                    && own.lifetime.start < other.lifetime.end
                    && other.lifetime.start < own.lifetime.end
            };
            let mut taken: Vec<(u64, u64)> = placed
                .iter()
                .filter(|(other, _)| overlaps(&buffers[*other]))
                .map(|&(other, offset)| (offset, offset + buffers[other].bytes.div_ceil(64) * 64))
                .collect();
            taken.sort_unstable();
            let mut offset = 0;
            for (start, end) in taken {
                if start >= offset + size {
                    break;
                }
                offset = offset.max(end);
            }
            placed.push((number, offset));
            place(buffers, placed, height.max(offset + size), best);
            placed.pop();
        }
    }
    let mut best = u64::MAX;
    place(buffers, &mut Vec::new(), 0, &mut best);
    best
}

proptest! {
    #![proptest_config(Config { cases: 300, failure_persistence: None, ..Config::default() })]

    #[test]
    fn the_search_is_as_good_as_brute_force(buffers in buffers(8)) {
        let plan = MemoryPlan::search(&buffers, Effort::steps(20_000));
        let checked = plan.check(&buffers).expect("it is a plan");
        prop_assert_eq!(checked.bytes, lowest_arena(&buffers));
    }

    #[test]
    fn every_planner_makes_plans_above_the_bound(buffers in buffers(40)) {
        let search = MemoryPlan::search(&buffers, Effort::steps(500));
        for plan in [MemoryPlan::best_fit(&buffers), MemoryPlan::tflite(&buffers), MemoryPlan::xla(&buffers)] {
            let checked = plan.check(&buffers).expect("it is a plan");
            prop_assert!(checked.bytes >= checked.lower_bound);
            prop_assert!(search.bytes <= plan.bytes, "the search begins with the others");
        }
        prop_assert!(search.check(&buffers).is_ok());
    }
}

#[test]
fn the_search_equals_brute_force_on_eight_buffers() {
    // No order by size, start or length finds the bound of these.
    let buffers = [
        buffer(0..3, 192),
        buffer(0..1, 128),
        buffer(1..4, 128),
        buffer(2..6, 64),
        buffer(3..5, 256),
        buffer(4..7, 64),
        buffer(5..8, 192),
        buffer(6..8, 128),
    ];
    let plan = MemoryPlan::search(&buffers, Effort::steps(100_000));
    assert_eq!(plan.check(&buffers).expect("it is a plan").bytes, lowest_arena(&buffers));
}

#[test]
fn the_check_finds_what_is_wrong() {
    let two = [buffer(0..4, 100), buffer(3..5, 64), buffer(4..6, 128)];
    let plan = |offsets: &[u64], bytes| MemoryPlan { offsets: offsets.to_vec(), bytes };
    assert_eq!(plan(&[0, 128, 0], 192).check(&two).map(|checked| checked.lower_bound), Ok(192));
    assert_eq!(plan(&[0, 64, 192], 320).check(&two), Err(PlanFlaw::Overlap { one: 0, other: 1, moment: 3 }));
    assert_eq!(plan(&[64, 0, 0], 192).check(&two), Err(PlanFlaw::Overlap { one: 1, other: 2, moment: 4 }));
    assert_eq!(plan(&[0, 100, 0], 192).check(&two), Err(PlanFlaw::Unaligned { buffer: 1, offset: 100 }));
    assert_eq!(
        plan(&[0, 128, 0], 128).check(&two),
        Err(PlanFlaw::Outside { buffer: 1, end: 192, arena: 128 })
    );
    assert_eq!(plan(&[0], 128).check(&two), Err(PlanFlaw::Count { offsets: 1, buffers: 3 }));
}

#[test]
fn a_plan_that_ends_behind_all_numbers_is_outside() {
    let plan = |offsets: &[u64], bytes| MemoryPlan { offsets: offsets.to_vec(), bytes };
    let outside = |buffer| Err(PlanFlaw::Outside { buffer, end: u64::MAX, arena: u64::MAX });
    let high = u64::MAX - 63;
    let buffers = [buffer(0..1, 64), buffer(0..1, 128)];
    assert_eq!(plan(&[0, high], u64::MAX).check(&buffers), outside(1));
    assert_eq!(plan(&[64], u64::MAX).check(&[buffer(0..1, u64::MAX)]), outside(0));
}

#[test]
fn a_plan_of_too_many_buffers_is_none_and_of_many_is_not_searched() {
    let many = |count: usize| vec![buffer(0..1, 0); count];
    let count = BUFFERS_MAX + 1;
    let plan = MemoryPlan { offsets: vec![0; count], bytes: 0 };
    assert_eq!(plan.check(&many(count)), Err(PlanFlaw::TooMany { buffers: count }));
    let mut asked = 0;
    // Pairs that start one after the other: best fit is above the bound.
    let hard = hard("A").into_iter().cycle().zip(0_u64..17_000);
    let shifted = hard.map(|(Buffer { lifetime, bytes }, number)| {
        let moment = number / 154 * 1_000_000;
        buffer(lifetime.start + moment..lifetime.end + moment, bytes)
    });
    let buffers: Vec<Buffer> = shifted.collect();
    let plan = MemoryPlan::search(
        &buffers,
        Effort::while_it_holds(|| {
            asked += 1;
            asked < 10
        }),
    );
    assert_eq!(asked, 0);
    assert!(plan.check(&buffers).is_ok());
}

/// An instance of MiniMalloc's benchmark.
fn hard(name: &str) -> Vec<Buffer> {
    let text = std::fs::read_to_string(data(&format!("minimalloc/{name}.csv"))).expect("it is in the tree");
    let line = |line: &str| {
        let numbers: Vec<u64> = line.split(',').map(|number| number.parse().expect("a number")).collect();
        buffer(numbers[1]..numbers[2], numbers[3])
    };
    text.lines().skip(1).map(line).collect()
}

/// Each within the steps that it takes, so that time plays no role. Two that take most are measured
/// in `docs/graph.md`.
#[test]
fn hard_instances_fit_where_best_fit_needs_a_third_more() {
    const ARENA: u64 = 1 << 20;
    for name in ["A", "B", "C", "E", "F", "H", "I", "K"] {
        let buffers = hard(name);
        let plan = MemoryPlan::search(&buffers, Effort::steps(60_000));
        let checked = plan.check(&buffers).expect("it is a plan");
        assert!(checked.is_optimal() && checked.bytes <= ARENA, "{name}: {checked:?}");
        assert!(MemoryPlan::best_fit(&buffers).bytes > ARENA * 5 / 4, "{name}");
    }
}

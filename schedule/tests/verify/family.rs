//! Families against the whole schedules that they describe: the same lanes, the same facts, and no
//! family whose symmetry is false.

use std::collections::BTreeSet;

use pleach_schedule::generate::{Access, Algorithm, GenerateError, family, generate};
use pleach_schedule::verify::{FamilyFlaw, Proof, Violation, verify, verify_family};
use pleach_schedule::{
    Family, GridShape, HostMap, LaneOrder, Op, Part, Place, Schedule, SourceOrder, Symmetry,
};
use pleach_vocabulary::random::Random;
use pleach_vocabulary::{Collective, Rank};

const COLLECTIVES: [Collective; 3] =
    [Collective::AllReduce, Collective::AllGather, Collective::ReduceScatter];

/// Every algorithm that makes a family for some number of ranks, with every way to write the number
/// as a product.
fn algorithms(collective: Collective, ranks: u32) -> Vec<Algorithm> {
    let mut all =
        vec![Algorithm::Direct, Algorithm::Ring, Algorithm::HalvingDoubling, Algorithm::RecursiveDoubling];
    for first in (1..=ranks).filter(|&first| ranks.is_multiple_of(first)) {
        let rest = ranks / first;
        let mut shapes = vec![vec![first, rest]];
        if let Some(second) = (2..rest).find(|&second| rest.is_multiple_of(second)) {
            shapes.push(vec![first, second, rest / second]);
        }
        for shape in shapes {
            let shape = GridShape::from(shape);
            all.extend([Algorithm::Grid(shape.clone()), Algorithm::GridStaged(shape)]);
        }
        let hosts: HostMap = format!("{first}x{rest}").parse().expect("a map");
        all.push(Algorithm::Hierarchical(Some(hosts)));
    }
    all.retain(|algorithm| algorithm.carries_out(collective));
    all
}

/// Every family of some number of ranks.
fn families(ranks: u32) -> impl Iterator<Item = (String, Family, Schedule)> {
    let cases = COLLECTIVES.into_iter().flat_map(move |collective| {
        algorithms(collective, ranks).into_iter().map(move |algorithm| (collective, algorithm))
    });
    cases.flat_map(move |(collective, algorithm)| {
        [Access::Put, Access::Mapped].into_iter().filter_map(move |access| {
            let family = family(collective, &algorithm, ranks, access).expect("it fits")?;
            let whole = generate(collective, &algorithm, ranks, access).expect("it fits");
            Some((format!("{collective} by {algorithm} of {ranks} ({access})"), family, whole))
        })
    })
}

/// Checks that the family says of every step what the whole says.
fn compare_facts(what: &str, family: &Proof, whole: &Proof) {
    for (rank, lanes) in (0..).zip(&whole.schedule().programs) {
        assert_eq!(family.exposes_input(rank), whole.exposes_input(rank), "{what}: input of {rank}");
        assert_eq!(family.exposes_output(rank), whole.exposes_output(rank), "{what}: output of {rank}");
        for (number, lane) in lanes.iter().enumerate() {
            for step in 0..lane.steps.len() {
                let facts =
                    |of: &Proof| (of.put_target(rank, number, step), of.completes(rank, number, step));
                assert_eq!(facts(family), facts(whole), "{what}: rank {rank} lane {number} step {step}");
            }
        }
    }
}

/// Compares every family of these numbers of ranks with its whole: the lanes of each rank, and, of
/// those that `proved` picks, the proof.
fn check_all(ranks: impl Iterator<Item = u32>, mut proved: impl FnMut() -> bool) -> (u32, u32) {
    let (mut compared, mut proofs) = (0, 0);
    for ranks in ranks {
        for (what, family, whole) in families(ranks) {
            let proof = verify_family(family).unwrap_or_else(|violation| panic!("{what}: {violation}"));
            for (rank, lanes) in (0..).zip(&whole.programs) {
                assert!(proof.lanes(rank) == *lanes, "{what}: rank {rank}");
            }
            compared += 1;
            if proved() {
                let whole = verify(whole).unwrap_or_else(|violation| panic!("{what}: {violation}"));
                compare_facts(&what, &proof, &whole);
                assert!(proof.schedule() == whole.schedule(), "{what}");
                proofs += 1;
            }
        }
    }
    (compared, proofs)
}

#[test]
fn a_family_has_the_lanes_and_the_facts_of_its_whole_for_up_to_twenty_ranks() {
    let (compared, proofs) = check_all(2..=20, || true);
    assert!(compared > 600 && proofs == compared, "{compared}");
}

/// `cargo test --release -p pleach-schedule --test verify -- --ignored up_to_64_ranks`
#[test]
#[ignore = "takes minutes; .ci/nightly runs it"]
fn a_family_has_the_lanes_and_the_facts_of_its_whole_for_up_to_64_ranks() {
    let (compared, proofs) = check_all(2..=64, || true);
    assert!(compared > 3000 && proofs == compared, "{compared}");
}

#[test]
fn every_rank_of_a_family_of_some_larger_counts_has_the_lanes_of_the_whole() {
    let mut random = Random::new(22);
    let (compared, proofs) = check_all([24, 27, 32, 35, 48, 64].into_iter(), || random.below(40) == 0);
    assert!(compared > 300 && proofs > 3, "{compared}, {proofs}");
}

#[test]
fn families_of_random_worlds_of_up_to_512_ranks_are_their_wholes() {
    let mut random = Random::new(23);
    for _ in 0..12 {
        let ranks = 65 + (random.bits() % 448) as u32;
        // A power of two now and then, for halving and doubling.
        let ranks = if random.bits().is_multiple_of(4) { ranks.next_power_of_two().min(512) } else { ranks };
        let collective = COLLECTIVES[(random.bits() % 3) as usize];
        let access = if random.bits().is_multiple_of(2) { Access::Put } else { Access::Mapped };
        let all = algorithms(collective, ranks);
        let algorithm = &all[(random.bits() % all.len() as u64) as usize];
        let what = format!("{collective} by {algorithm} of {ranks} ({access})");
        let Some(family) = family(collective, algorithm, ranks, access).expect("it fits") else {
            let has_proxies = [Algorithm::HalvingDoubling, Algorithm::RecursiveDoubling].contains(algorithm);
            assert!(has_proxies && !ranks.is_power_of_two(), "{what}");
            continue;
        };
        let proof = verify_family(family).unwrap_or_else(|violation| panic!("{what}: {violation}"));
        let whole = generate(collective, algorithm, ranks, access).expect("it fits");
        let whole = verify(whole).unwrap_or_else(|violation| panic!("{what}: {violation}"));
        for rank in (0..ranks).filter(|_| random.bits().is_multiple_of(8)) {
            assert!(proof.lanes(rank) == whole.lanes(rank), "{what}: rank {rank}");
        }
        compare_facts(&what, &proof, &whole);
    }
}

#[test]
fn what_has_no_symmetry_makes_no_family() {
    let none = |collective, algorithm: &str, ranks| {
        let algorithm = Algorithm::named(algorithm, collective).expect("a name");
        family(collective, &algorithm, ranks, Access::Put).expect("it fits").is_none()
    };
    assert!(none(Collective::AllReduce, "halving-doubling", 12), "proxies");
    assert!(none(Collective::AllReduce, "hierarchical:3+2", 5), "hosts of two sizes");
    assert!(none(Collective::AllReduce, "grid:3x3", 7) && none(Collective::AllReduce, "grid-staged:2d", 7));
    assert!(none(Collective::AllReduce, "hierarchical:0,1,0,1", 4), "hosts in turns");
    assert!(none(Collective::AllReduce, "double-tree", 8) && none(Collective::AllReduce, "ring", 1));
    assert!(none(Collective::Broadcast { root: 1 }, "direct", 8) && none(Collective::AllToAll, "direct", 8));
    let refused = family(Collective::AllReduce, &Algorithm::Ring, 16_385, Access::Put);
    assert!(matches!(refused, Err(GenerateError::TooManyRanks { limit: 16_384, .. })));
}

fn made(collective: Collective, algorithm: &str, ranks: u32) -> Family {
    let algorithm = Algorithm::named(algorithm, collective).expect("a name");
    family(collective, &algorithm, ranks, Access::Put).expect("it fits").expect("a family")
}

/// What is wrong with the form of a family.
fn flaw(family: Family) -> FamilyFlaw {
    match verify_family(family) {
        Err(Violation::NoFamily { flaw }) => *flaw,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_family_whose_symmetry_is_false_is_refused() {
    let ring = || made(Collective::AllReduce, "ring", 6);
    for extents in [vec![5], vec![2, 2], vec![0], vec![], vec![6, 2], vec![1 << 16, 1 << 16]] {
        let of_another = Family { extents, ..ring() };
        assert!(matches!(flaw(of_another), FamilyFlaw::Extents { ranks: 6, .. }));
    }
    // A block too few, and blocks that are not those of the ranks that they are translated to.
    let mut short = ring();
    short.column.blocks.pop();
    assert_eq!(flaw(short), FamilyFlaw::Blocks { blocks: 5, ranks: 6 });
    for collective in [Collective::AllGather, Collective::ReduceScatter] {
        let mut turned = made(collective, "ring", 6);
        turned.column.blocks.swap(2, 4);
        assert_eq!(flaw(turned), FamilyFlaw::Part { block: 2, part: 4, expected: 2 });
    }
    // A root is not like other ranks.
    for (collective, name) in
        [(Collective::Reduce { root: 0 }, "chain"), (Collective::Broadcast { root: 0 }, "direct")]
    {
        let algorithm = Algorithm::named(name, collective).expect("a name");
        let mut column = generate(collective, &algorithm, 3, Access::Put).expect("it fits");
        column.blocks = vec![column.blocks[0]; 3];
        assert!(verify(column.clone()).is_err(), "blocks without lanes");
        let rooted = Family {
            symmetry: Symmetry::Blocks,
            column,
            extents: vec![3],
            source_order: SourceOrder::ByContributor,
            lane_order: LaneOrder::Ascending(0),
        };
        assert_eq!(flaw(rooted), FamilyFlaw::Collective { collective });
    }
    // Lanes that the definition does not speak of.
    let mut more = ring();
    let mut stray = more.column.programs[3][0].clone();
    stray.block = 1;
    more.column.programs[3].push(stray.clone());
    assert_eq!(flaw(more), FamilyFlaw::Lanes { rank: 3, lanes: 2 });
    let mut other = ring();
    other.column.programs[3] = vec![stray];
    assert_eq!(flaw(other), FamilyFlaw::Lanes { rank: 3, lanes: 1 });
    let mut fewer = ring();
    fewer.column.programs[3].clear();
    assert_eq!(flaw(fewer), FamilyFlaw::Lanes { rank: 3, lanes: 0 });
}

#[test]
fn a_family_by_ranks_whose_symmetry_is_false_is_refused() {
    let pairs = || made(Collective::AllReduce, "recursive-doubling", 8);
    verify_family(pairs()).expect("as it is");
    let mut twice = pairs();
    twice.column.blocks.push(twice.column.blocks[0]);
    assert_eq!(flaw(twice), FamilyFlaw::Blocks { blocks: 2, ranks: 8 });
    let mut more = pairs();
    more.column.programs[5] = more.column.programs[0].clone();
    more.column.programs[5][0].steps.clear();
    assert_eq!(flaw(more), FamilyFlaw::Lanes { rank: 5, lanes: 1 });
    let mut none = pairs();
    none.column.programs[0].clear();
    assert_eq!(flaw(none), FamilyFlaw::Lanes { rank: 0, lanes: 0 });
    let sorted = Family { source_order: SourceOrder::ByContributor, ..pairs() };
    assert_eq!(flaw(sorted), FamilyFlaw::OrderMatters);
    // Exchanges at distances 1, 2 and 4 in one direction: each signal goes to a rank that waits for
    // another.
    let of_a_ring = Family { extents: vec![8], ..pairs() };
    assert!(matches!(verify_family(of_a_ring), Err(Violation::Unconsumed { .. })));
    // The same by blocks, of which there is but one.
    let by_blocks = Family { symmetry: Symmetry::Blocks, ..pairs() };
    assert!(matches!(flaw(by_blocks), FamilyFlaw::Blocks { blocks: 1, ranks: 8 }));
    let ring = Family { symmetry: Symmetry::Ranks, ..made(Collective::AllReduce, "ring", 8) };
    assert!(matches!(flaw(ring), FamilyFlaw::Blocks { blocks: 8, ranks: 8 }));
}

/// In a staged grid all lines make the same sums of the second stage. Each makes them in the order
/// of its owner, so in another order they differ in bits.
#[test]
fn sources_are_not_put_in_another_order_where_the_order_matters() {
    let staged = made(Collective::AllReduce, "grid-staged:3x3", 9);
    let sorted = Family { source_order: SourceOrder::ByContributor, ..staged.clone() };
    assert_eq!(flaw(sorted), FamilyFlaw::OrderMatters);
    verify_family(staged).expect("as translated");
    // Where each sum is made once, or of two sources alone, any order will do.
    verify_family(Family {
        source_order: SourceOrder::AsTranslated,
        ..made(Collective::AllReduce, "direct", 9)
    })
    .expect("one order a block");
    let staged = made(Collective::AllReduce, "grid-staged:2x2", 4);
    verify_family(Family { source_order: SourceOrder::ByContributor, ..staged })
        .expect("two sources commute");
}

/// Every single damage to the column: whatever is accepted must be accepted as a whole.
#[test]
fn a_damaged_column_is_refused_or_its_whole_is_right() {
    let mut refused = BTreeSet::new();
    let (mut accepted, mut count) = (0, 0);
    for (collective, name, ranks) in [
        (Collective::AllReduce, "ring", 4),
        (Collective::AllReduce, "halving-doubling", 4),
        (Collective::AllReduce, "recursive-doubling", 8),
        (Collective::AllReduce, "grid:2x3", 6),
        (Collective::AllReduce, "grid-staged:2x3", 6),
        (Collective::ReduceScatter, "hierarchical:2x2", 4),
        (Collective::AllGather, "direct", 4),
    ] {
        let good = made(collective, name, ranks);
        for rank in 0..ranks as usize {
            let lane = good.column.programs[rank].first();
            for step in 0..lane.map_or(0, |lane| lane.steps.len()) {
                for damage in 0..5 {
                    let mut family = good.clone();
                    if !damaged(&mut family.column, rank, step, damage) {
                        continue;
                    }
                    count += 1;
                    match verify_family(family) {
                        Ok(proof) => {
                            let whole = verify(proof.schedule().clone()).unwrap_or_else(|violation| {
                                panic!("{collective} by {name}: rank {rank} step {step}: {violation}")
                            });
                            compare_facts(name, &proof, &whole);
                            accepted += 1;
                        }
                        Err(violation) => {
                            let kind = format!("{violation:#?}");
                            refused
                                .insert(kind.split([' ', '(', '\n']).next().unwrap_or_default().to_owned());
                        }
                    }
                }
            }
        }
    }
    assert!(count > 300 && accepted < count / 3, "{accepted} of {count} accepted");
    for kind in ["Race", "Deadlock", "NeverSignalled", "ContributionMissing", "SignalSlotReused", "Undefined"]
    {
        assert!(refused.contains(kind), "none was refused as {kind}: {refused:?}");
    }
}

/// Damages a step of the column in one way; false where there is nothing to damage.
fn damaged(column: &mut Schedule, rank: usize, number: usize, damage: u32) -> bool {
    let ranks = column.ranks();
    let steps = &mut column.programs[rank][0].steps;
    let other = |named: Rank| (0..ranks).find(|&other| other != named && other != rank as Rank);
    match damage {
        0 => return steps[number].after.pop().is_some(),
        1 if number > 0 => {
            let before = steps[number - 1].op.clone();
            steps[number - 1].op = std::mem::replace(&mut steps[number].op, before);
        }
        2 => match &mut steps[number].op {
            Op::Signal { to: named, .. } | Op::Put { to: named, .. } | Op::Wait { from: named, .. } => {
                let Some(other) = other(*named) else { return false };
                *named = other;
            }
            Op::Reduce { from, .. } => from.rotate_left(1),
        },
        3 => match &mut steps[number].op {
            Op::Reduce { from, .. } if from.len() > 1 => drop(from.pop()),
            Op::Reduce { into, .. } if into.len() > 1 => drop(into.pop()),
            Op::Put { to, signal_slot, .. } => {
                steps[number].op = Op::Signal { to: *to, signal_slot: *signal_slot };
            }
            _ => return false,
        },
        4 => match &mut steps[number].op {
            Op::Reduce { from, .. } if from.len() > 1 => {
                let last = from.len() - 1;
                from[last] = Place { rank: rank as Rank, part: Part::Output };
            }
            Op::Put { dst: Part::Scratch(slot), .. } => *slot += 1,
            _ => return false,
        },
        _ => return false,
    }
    true
}

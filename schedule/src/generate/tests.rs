use pleach_vocabulary::Collective;

use super::interpreter::{LAYOUTS, collectives, interpret};
use super::{Access, Algorithm, GridShape, RANKS_MAX, generate};
use crate::hosts::HostMap;
use crate::verify::verify;
use crate::{Op, Part, Schedule, Step};

/// Every algorithm that fits a collective and a rank count; grids in a few shapes, with and without
/// holes.
fn algorithms(collective: Collective, ranks: u32) -> Vec<Algorithm> {
    let mut all = vec![
        Algorithm::Direct,
        Algorithm::Eager,
        Algorithm::EagerTree,
        Algorithm::Exchange,
        Algorithm::RecursiveDoubling,
        Algorithm::HalvingDoubling,
        Algorithm::Ring,
        Algorithm::DoubleTree,
        Algorithm::Chain,
    ];
    for first in (1..=ranks).filter(|&first| ranks.is_multiple_of(first)) {
        all.push(Algorithm::Grid(vec![first, ranks / first].into()));
        all.push(Algorithm::GridStaged(vec![first, ranks / first].into()));
    }
    if ranks.is_multiple_of(4) {
        all.push(Algorithm::Grid(vec![2, ranks / 4, 2].into()));
        all.push(Algorithm::GridStaged(vec![2, ranks / 4, 2].into()));
    }
    for shape in [GridShape::Dimensions(2), GridShape::Dimensions(3), vec![ranks.div_ceil(2), 2].into()] {
        all.push(Algorithm::Grid(shape.clone()));
        all.push(Algorithm::GridStaged(shape));
    }
    all.extend(host_maps(ranks).into_iter().map(|hosts| Algorithm::Hierarchical(Some(hosts))));
    all.retain(|algorithm| algorithm.carries_out(collective));
    all
}

/// Ranks on hosts in several ways: all on one, each on its own, in turns, in blocks that are and
/// are not of one size.
fn host_maps(ranks: u32) -> Vec<HostMap> {
    let by = |host: &dyn Fn(u32) -> u32| HostMap::new(&(0..ranks).map(host).collect::<Vec<_>>());
    let mut maps = vec![
        HostMap::one(ranks),
        HostMap::apart(ranks),
        by(&|rank| rank % 2),
        by(&|rank| rank / 2),
        by(&|rank| u32::from(rank > ranks / 3)),
        by(&|rank| if rank < 2 { rank } else { rank % 3 }),
    ];
    maps.sort();
    maps.dedup();
    maps
}

/// Carries a schedule out in several random orders, on every layout of memory, over more chunks
/// than the window.
fn check(collective: Collective, algorithm: &Algorithm, ranks: u32, access: Access, seeds: u64) {
    let schedule = generate(collective, algorithm, ranks, access)
        .unwrap_or_else(|error| panic!("{collective} {algorithm} {ranks} {access}: {error}"));
    assert_eq!(schedule.ranks(), ranks);
    for layout in LAYOUTS {
        for seed in 1..=seeds {
            let chunks = if schedule.single_chunk { 1 } else { schedule.window * 2 + 1 };
            if let Err(error) = interpret(&schedule, layout, chunks, seed * 7919 + u64::from(ranks)) {
                panic!(
                    "{collective} by {algorithm}, {ranks} ranks, {access}, {layout:?}, seed {seed}: {error}"
                );
            }
        }
    }
}

#[test]
fn every_schedule_does_its_collective_in_any_order_and_layout() {
    for ranks in 1..=6 {
        for collective in collectives(ranks) {
            for algorithm in algorithms(collective, ranks) {
                for access in [Access::Put, Access::Mapped] {
                    check(collective, &algorithm, ranks, access, if ranks < 5 { 4 } else { 1 });
                }
            }
        }
    }
}

/// Takes every signal of a schedule away, one after the other with its wait, and expects that to
/// show.
#[test]
fn no_signal_is_superfluous() {
    for collective in collectives(3) {
        for algorithm in algorithms(collective, 3) {
            for access in [Access::Put, Access::Mapped] {
                let schedule = generate(collective, &algorithm, 3, access).expect("3 ranks");
                for (from, lane, step) in signals(&schedule) {
                    let Some(shorter) = without(&schedule, from, lane, step) else { continue };
                    assert!(
                        verify(shorter).is_err(),
                        "{collective} by {algorithm}, {access}: rank {from} lane {lane} step {step} is not needed"
                    );
                }
            }
        }
    }
}

fn signals(schedule: &Schedule) -> Vec<(usize, usize, usize)> {
    let mut all = Vec::new();
    for (rank, lanes) in schedule.programs.iter().enumerate() {
        for (index, lane) in lanes.iter().enumerate() {
            let signals =
                lane.steps.iter().enumerate().filter(|(_, step)| matches!(step.op, Op::Signal { .. }));
            all.extend(signals.map(|(step, _)| (rank, index, step)));
        }
    }
    all
}

/// The schedule without a signal and its wait.
fn without(schedule: &Schedule, from: usize, lane: usize, step: usize) -> Option<Schedule> {
    let mut shorter = schedule.clone();
    let block = schedule.programs[from][lane].block;
    let Op::Signal { to, signal_slot } = schedule.programs[from][lane].steps[step].op else { return None };
    remove(&mut shorter.programs[from][lane].steps, step);
    let wait = Op::Wait { from: from as u32, signal_slot };
    for lane in shorter.programs[to as usize].iter_mut().filter(|lane| lane.block == block) {
        if let Some(position) = lane.steps.iter().position(|step| step.op == wait) {
            remove(&mut lane.steps, position);
        }
    }
    Some(shorter)
}

/// Takes a step out; what came after it comes after what it came after.
fn remove(steps: &mut Vec<Step>, gone: usize) {
    let removed = steps.remove(gone);
    for step in steps {
        let mut after: Vec<(u32, u32)> = Vec::new();
        for &(earlier, chunks) in &step.after {
            match earlier as usize {
                same if same == gone => after.extend(removed.after.iter().map(|&(e, c)| (e, c + chunks))),
                later if later > gone => after.push((earlier - 1, chunks)),
                _ => after.push((earlier, chunks)),
            }
        }
        step.after = after;
    }
}

#[test]
fn recursive_doubling_of_two_ranks_is_one_put_one_wait_one_reduce() {
    let schedule =
        generate(Collective::AllReduce, &Algorithm::RecursiveDoubling, 2, Access::Put).expect("2 ranks");
    for lanes in &schedule.programs {
        let [lane] = lanes.as_slice() else { panic!("{} lanes", lanes.len()) };
        assert!(matches!(
            lane.steps.iter().map(|step| &step.op).collect::<Vec<_>>().as_slice(),
            [Op::Put { src: Part::Input, dst: Part::Scratch(_), .. }, Op::Wait { .. }, Op::Reduce { .. }]
        ));
    }
}

#[test]
fn names_are_read_as_they_are_written() {
    for name in
        ["direct", "recursive-doubling", "halving-doubling", "ring", "double-tree", "chain", "grid:2x3x4"]
    {
        assert_eq!(name.parse::<Algorithm>().expect("a known name").to_string(), name);
    }
    for name in ["hierarchical", "hierarchical:2x4", "hierarchical:3+2", "hierarchical:0,1,0"] {
        assert_eq!(name.parse::<Algorithm>().expect("a known name").to_string(), name);
    }
    for name in ["grid:2d", "grid-staged:3d", "grid-staged:16d", "grid:7"] {
        assert_eq!(name.parse::<Algorithm>().expect("a known name").to_string(), name);
    }
    assert_eq!("grid-staged:4x4".parse(), Ok(Algorithm::GridStaged(vec![4, 4].into())));
    assert_eq!("grid:2d".parse(), Ok(Algorithm::Grid(GridShape::Dimensions(2))));
    for name in [
        "",
        "rings",
        "grid",
        "grid:",
        "grid:2x",
        "grid:0x2",
        "grid:axb",
        "ring:2",
        "grid:99999999999",
        "grid:d",
        "grid:0d",
        "grid:17d",
        "grid:2dx3",
        "grid:2D",
        "hierarchical:",
    ] {
        assert!(name.parse::<Algorithm>().is_err(), "{name}");
    }
}

#[test]
fn what_cannot_be_made_is_refused_with_what_can() {
    let error = Algorithm::named("chain", Collective::AllGather).unwrap_err().to_string();
    assert!(
        error.ends_with("there are direct eager ring halving-doubling grid:AxB hierarchical:HxR packed"),
        "{error}"
    );
    let refused = |collective, algorithm: Algorithm, ranks| {
        generate(collective, &algorithm, ranks, Access::Put).unwrap_err().to_string()
    };
    assert!(refused(Collective::Barrier, Algorithm::Ring, 2).contains("there are recursive-doubling"));
    let misfit = refused(Collective::AllReduce, Algorithm::Grid(vec![2, 3].into()), 7);
    assert_eq!(
        misfit,
        "grid:2x3 has 6 places for 7 ranks; give extents whose product is 7 at least, as grid:3x3"
    );
    let misfit = refused(Collective::AllReduce, "grid-staged:1x2x2".parse().expect("a name"), 9);
    assert!(misfit.contains("4 places for 9 ranks") && misfit.ends_with("as grid-staged:2x2x3"), "{misfit}");
    assert!(refused(Collective::Broadcast { root: 3 }, Algorithm::Direct, 3).contains("rank 3"));
    let misfit = refused(Collective::AllReduce, "hierarchical:2x2".parse().expect("a name"), 5);
    assert!(misfit.contains("for 4 ranks, not 5") && misfit.contains("hierarchical:2x3"), "{misfit}");
    let nowhere = refused(Collective::AllReduce, Algorithm::Hierarchical(None), 4);
    assert!(nowhere.contains("for 0 ranks, not 4"), "{nowhere}");
    assert!(refused(Collective::AllReduce, Algorithm::Ring, 0).contains("at least 1 rank"));
    assert!(refused(Collective::AllReduce, Algorithm::Ring, RANKS_MAX + 1).contains("at most"));
}

/// Prints what large schedules take; run by hand, in release.
#[test]
#[ignore = "takes a gigabyte"]
#[expect(clippy::disallowed_methods, reason = "for people: nothing depends on the time")]
fn a_thousand_ranks_take_about_a_second() {
    let clock = std::time::Instant::now;
    for name in
        ["ring", "halving-doubling", "double-tree", "recursive-doubling", "grid:32x32", "grid-staged:32x32"]
    {
        for access in [Access::Put, Access::Mapped] {
            let algorithm = name.parse().expect("a known name");
            let before = clock();
            let schedule = generate(Collective::AllReduce, &algorithm, 1024, access).expect("1,024 ranks");
            let steps: usize = schedule.programs.iter().flatten().map(|lane| lane.steps.len()).sum();
            println!("{name} {access}: {steps} steps, {:?}", clock() - before);
        }
    }
}

/// The rank counts that everything is proved for.
fn rank_counts() -> impl Iterator<Item = u32> {
    (1..=17).chain([24, 32])
}

#[test]
fn every_schedule_is_proved_for_any_rank_count() {
    let mut refused = Vec::new();
    let mut proved = 0;
    for ranks in rank_counts() {
        for collective in collectives(ranks) {
            for algorithm in algorithms(collective, ranks) {
                for access in [Access::Put, Access::Mapped] {
                    let schedule = generate(collective, &algorithm, ranks, access).expect("it fits");
                    match verify(schedule) {
                        Ok(_) => proved += 1,
                        Err(violation) => {
                            refused.push(format!(
                                "{collective} by {algorithm}, {ranks} ranks, {access}: {violation}"
                            ));
                        }
                    }
                }
            }
        }
    }
    assert!(
        refused.is_empty(),
        "{} refused, {proved} proved:\n{}",
        refused.len(),
        refused[..refused.len().min(60)].join("\n")
    );
    assert!(proved > 1000, "{proved}");
}

/// Whether a schedule maps only inside hosts, and puts between them no more than the module says.
#[test]
fn hierarchical_schedules_map_inside_hosts_only_and_send_across_what_they_must() {
    for (text, ranks) in [("2x4", 8), ("4x2", 8), ("3+2", 5), ("0,1,0,1,2", 5), ("10x2", 20)] {
        let hosts: HostMap = text.parse().expect("a map");
        let (count, algorithm) = (hosts.hosts(), Algorithm::Hierarchical(Some(hosts.clone())));
        for collective in collectives(ranks).into_iter().filter(|one| algorithm.carries_out(*one)) {
            let schedule = generate(collective, &algorithm, ranks, Access::Mapped).expect("it fits");
            let mut sent = vec![0; count as usize];
            for (rank, lanes) in (0..).zip(&schedule.programs) {
                for step in lanes.iter().flat_map(|lane| &lane.steps) {
                    match &step.op {
                        Op::Reduce { from, into } => assert!(
                            from.iter().chain(into).all(|place| hosts.are_neighbours(rank, place.rank)),
                            "{collective} {algorithm}: {step:?}"
                        ),
                        Op::Put { to, .. } => {
                            assert!(!hosts.are_neighbours(rank, *to), "{collective} {algorithm}: {step:?}");
                            sent[hosts.host(rank) as usize] += 1;
                        }
                        _ => {}
                    }
                }
            }
            let blocks = schedule.blocks.len() as u32;
            let total: u32 = sent.iter().sum();
            let expected = match collective {
                Collective::Barrier => 0,
                Collective::AllReduce => 2 * (count - 1) * blocks,
                _ => (count - 1) * blocks,
            };
            assert_eq!(total, expected, "{collective} {algorithm}: {sent:?}");
            if collective == Collective::AllReduce && text.contains('x') {
                let each = 2 * (count - 1) * blocks / count;
                assert!(sent.iter().all(|&sent| sent == each), "{algorithm}: {sent:?}");
            }
        }
    }
}

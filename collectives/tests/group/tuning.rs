//! Choices that are pinned: what calls do with them, and who is told when they cannot be used.

use std::sync::Arc;
use std::thread;

use pleach_collectives::{Group, JoinGroupError, Options};
use pleach_schedule::{Access, Algorithm, Tuning, TuningSource, Variant};
use pleach_transport::rendezvous::{Fabric, FabricChoice};
use pleach_vocabulary::{Collective, ReduceOp};

use super::ranks::{Folder, with_group, world};

/// None of them is what a model would choose.
const FOUR: &str = "pleach tuning 1\nworld shm 1x4\n\
    all-reduce 0 ring put -\nall-reduce 1K double-tree put -\nall-reduce 1M halving-doubling put 3\n\
    broadcast 0 chain put -\n";

fn pinned(text: &str) -> TuningSource {
    TuningSource::These(Arc::new(text.parse::<Tuning>().expect("it is good")))
}

fn algorithm(group: &Group, collective: Collective, bytes: usize) -> String {
    group.algorithm_for(collective, bytes).unwrap()
}

#[test]
fn calls_go_the_ways_of_the_table_and_others_the_best() {
    with_group(
        Fabric::Shm,
        4,
        |options| options.tuning = pinned(FOUR),
        |group| {
            for (bytes, name) in
                [(8, "ring"), (1023, "ring"), (1500, "double-tree"), (1 << 20, "halving-doubling")]
            {
                assert_eq!(algorithm(&group, Collective::AllReduce, bytes), name, "{bytes}");
                let mut data = vec![group.rank() as i64 + 1; bytes / 8];
                group.all_reduce(&mut data, ReduceOp::Sum).unwrap();
                assert!(data.iter().all(|sum| *sum == 10), "{name}");
            }
            assert_eq!(algorithm(&group, Collective::Broadcast { root: 2 }, 8), "chain");
            let named = group.with_variant(Algorithm::Direct);
            assert_eq!(
                algorithm(&named, Collective::AllReduce, 8),
                "direct",
                "a call's own word counts first"
            );
            // No row: as without a table.
            let mut gathered = vec![0u32; 4];
            group.all_gather(&[group.rank()], &mut gathered).unwrap();
            assert_eq!(gathered, [0, 1, 2, 3]);
            // A part of the group is another world, of which the table says nothing.
            let part = group.split(Some(group.rank() / 2), 0).unwrap().expect("it named a colour");
            let mut data = [i64::from(group.rank())];
            part.all_reduce(&mut data, ReduceOp::Sum).unwrap();
            assert_eq!(data, [if group.rank() < 2 { 1 } else { 5 }]);
        },
    );
}

#[test]
fn a_way_says_how_peers_are_reached_and_how_many_chunks_are_under_way() {
    with_group(
        Fabric::Shm,
        2,
        |_| {},
        |group| {
            for access in [Access::Put, Access::Mapped] {
                for window in [None, Some(1), Some(7)] {
                    let variant = Variant { access: Some(access), window, ..Algorithm::Direct.into() };
                    let group = group.with_variant(variant);
                    let mut data = group.buffer::<f32>(300_000).unwrap();
                    data.fill(1.5);
                    group.all_reduce(&mut data, ReduceOp::Sum).unwrap();
                    assert!(data.iter().all(|sum| *sum == 3.0), "{access} {window:?}");
                }
            }
            for chunk_bytes in [1 << 10, 3_000, 64 << 10, 256 << 10] {
                for algorithm in [Algorithm::Direct, Algorithm::Ring] {
                    let group =
                        group.with_variant(Variant { chunk_bytes: Some(chunk_bytes), ..algorithm.into() });
                    let mut data = group.buffer::<f32>(300_000).unwrap();
                    let numbers = || (0..=u16::MAX).cycle().map(f32::from);
                    data.iter_mut().zip(numbers()).for_each(|(value, number)| *value = number);
                    group.all_reduce(&mut data, ReduceOp::Sum).unwrap();
                    assert!(data.iter().zip(numbers()).all(|(sum, number)| *sum == 2.0 * number));
                }
            }
            let none = group.with_variant(Variant { window: Some(0), ..Algorithm::Ring.into() });
            let error = none.all_reduce(&mut [1.0f32], ReduceOp::Sum).unwrap_err();
            assert!(error.to_string().contains("a window of 0 chunks"), "{error}");
            let none = group.with_variant(Variant { chunk_bytes: Some(64), ..Algorithm::Ring.into() });
            let error = none.all_reduce(&mut [1.0f32], ReduceOp::Sum).unwrap_err();
            assert!(error.to_string().contains("chunks of 64 bytes"), "{error}");
            // It was refused before anything began.
            group.barrier().unwrap();
        },
    );
    with_group(
        Fabric::Tcp,
        2,
        |_| {},
        |group| {
            let mapped = Variant { access: Some(Access::Mapped), ..Algorithm::Direct.into() };
            let error = group.with_variant(mapped).all_reduce(&mut [1.0f32], ReduceOp::Sum).unwrap_err();
            assert!(error.to_string().contains("direct cannot map peers here"), "{error}");
            group.barrier().unwrap();
        },
    );
}

#[test]
fn a_way_for_few_bytes_gives_way_to_the_best_where_a_row_means_more_and_is_refused_where_it_was_named() {
    const EAGER: &str = "pleach tuning 1\nworld shm 1x2\nbroadcast 0 eager put -\n";
    with_group(
        Fabric::Shm,
        2,
        |options| options.tuning = pinned(EAGER),
        |group| {
            let broadcast = Collective::Broadcast { root: 0 };
            assert_eq!(algorithm(&group, broadcast, 1 << 10), "eager");
            assert_ne!(algorithm(&group, broadcast, 1 << 20), "eager");
            let mut data = vec![u64::from(group.rank() == 0); 1 << 17];
            group.broadcast(&mut data, 0).unwrap();
            assert!(data.iter().all(|value| *value == 1));
            let error = group.with_variant(Algorithm::Eager).broadcast(&mut data, 0).unwrap_err();
            assert!(error.to_string().contains("eager carries parts of at most 32768 bytes"), "{error}");
            group.barrier().unwrap();
            // As many bytes as it carries are not too many, although others of the same size class
            // are.
            let most = &mut data[..4096];
            group.with_variant(Algorithm::Eager).broadcast(most, 0).unwrap();
            let error = group.with_variant(Algorithm::Eager).broadcast(&mut data[..4097], 0).unwrap_err();
            assert!(error.to_string().contains("at most 32768 bytes between 2 ranks, not 32776"), "{error}");
            group.barrier().unwrap();
        },
    );
}

/// Joins as both of two ranks, each with its own tuning.
fn joined(tuning: [TuningSource; 2]) -> Vec<Result<Group, JoinGroupError>> {
    let folder = Folder::new();
    thread::scope(|scope| {
        let threads: Vec<_> = (0..)
            .zip(tuning)
            .map(|(rank, tuning)| {
                let folder = &folder.0;
                scope.spawn(move || {
                    let mut options = Options::new(world(rank, 2, folder));
                    options.fabric = FabricChoice::Only(Fabric::Shm);
                    options.tuning = tuning;
                    Group::join(&options)
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

#[test]
fn ranks_with_different_tuning_are_told_both() {
    let two = |name: &str| pinned(&format!("pleach tuning 1\nworld shm 1x2\nall-reduce 0 {name} put -\n"));
    for other in [two("direct"), TuningSource::Nothing] {
        for result in joined([two("ring"), other]) {
            let error = result.expect_err("they differ").to_string();
            assert!(error.contains("tuning"), "{error}");
        }
    }
    for result in joined([two("ring"), two("ring")]) {
        assert!(result.is_ok(), "{result:?}");
    }
}

#[test]
fn tuning_that_says_nothing_of_the_world_leaves_what_is_built_in() {
    let pinned = joined([pinned(FOUR), pinned(FOUR)]);
    let plain = joined([TuningSource::Nothing, TuningSource::Nothing]);
    for (pinned, plain) in pinned.into_iter().zip(plain) {
        let (pinned, plain) = (pinned.expect("it joins"), plain.expect("it joins"));
        for bytes in [8, 1 << 20] {
            let collective = Collective::AllReduce;
            assert_eq!(algorithm(&pinned, collective, bytes), algorithm(&plain, collective, bytes));
        }
    }
}

#[test]
fn a_file_that_cannot_be_used_is_told_by_name_and_line() {
    let folder = Folder::new();
    let path = folder.0.join("tuning");
    let join = || {
        let mut options = Options::new(world(0, 1, &folder.0));
        options.tuning = TuningSource::File(path.clone());
        Group::join(&options)
    };
    let absent = join().expect_err("there is no file").to_string();
    assert!(absent.contains(path.to_str().unwrap()), "{absent}");
    std::fs::write(&path, "pleach tuning 1\nworld shm 1x4\nall-reduce 0 grid:3x1 put -\n").unwrap();
    let unfit = join().expect_err("the grid is for three ranks").to_string();
    assert!(unfit.contains("line 3: all-reduce by grid:3x1 put"), "{unfit}");
    std::fs::write(&path, FOUR).unwrap();
    let alone = join().expect("one rank has nothing to choose");
    alone.all_reduce(&mut [1.0f32], ReduceOp::Sum).unwrap();
}

//! Gather, scatter and all-to-all of blocks of one length.

use pleach_collectives::{CollectiveError, Group, Operation};
use pleach_transport::rendezvous::Fabric;
use pleach_vocabulary::{Rank, ReduceOp};

use super::with_group;

/// What rank `from` gives to rank `to`: different for every two ranks, and along the block.
fn block(from: Rank, to: Rank, count: usize) -> Vec<i32> {
    (0..count).map(|index| (from * 1000 + to * 100) as i32 + (index % 97) as i32).collect()
}

fn row(from: Rank, ranks: u32, count: usize) -> Vec<i32> {
    (0..ranks).flat_map(|to| block(from, to, count)).collect()
}

pub(super) fn blocks_go_where_they_belong(fabric: Fabric) {
    for ranks in [1, 2, 3, 4] {
        with_group(fabric, ranks, |group| {
            let rank = group.rank();
            for count in [0usize, 1, 5, 2000, 150_000] {
                let whole = count * ranks as usize;
                for root in 0..ranks {
                    let gathered: Vec<i32> = (0..ranks).flat_map(|from| block(from, root, count)).collect();
                    let mut output = vec![-1; if rank == root { whole } else { 0 }];
                    group.gather(&block(rank, root, count), &mut output, root).unwrap();
                    assert!(
                        output == if rank == root { gathered } else { Vec::new() },
                        "gather {count} {root}"
                    );

                    let input = if rank == root { row(root, ranks, count) } else { Vec::new() };
                    let mut output = vec![-1; count];
                    group.scatter(&input, &mut output, root).unwrap();
                    assert!(output == block(root, rank, count), "scatter {count} {root}");
                }
                let expected: Vec<i32> = (0..ranks).flat_map(|from| block(from, rank, count)).collect();
                let mut output = vec![-1; whole];
                group.all_to_all(&row(rank, ranks, count), &mut output).unwrap();
                assert!(output == expected, "all_to_all {count}");

                let mut input = group.buffer::<i32>(whole).unwrap();
                input.copy_from_slice(&row(rank, ranks, count));
                let mut output = group.buffer::<i32>(whole).unwrap();
                group.all_to_all(&input, &mut output).unwrap();
                assert!(output[..] == expected, "all_to_all of Buffers {count}");
                assert!(input[..] == row(rank, ranks, count), "an input stays as it is");
            }
            group.close().unwrap();
        });
    }
}

pub(super) fn a_rank_s_own_block_may_lie_at_its_place(fabric: Fabric) {
    for ranks in [1, 2, 3, 4] {
        with_group(fabric, ranks, |group| {
            for count in [0usize, 1, 5, 2000, 150_000] {
                own_block_at_its_place(&group, count);
            }
            let mut wrong = vec![0i32; ranks as usize + 1];
            if ranks > 1 {
                let error = group.run(Operation::all_gather_in_place(&mut wrong)).unwrap_err();
                assert!(matches!(error, CollectiveError::Length { .. }), "{error}");
            }
            group.barrier().unwrap();
        });
    }
}

fn own_block_at_its_place(group: &Group, count: usize) {
    let (rank, ranks) = (group.rank(), group.world_size());
    let own = rank as usize * count..(rank as usize + 1) * count;
    let all: Vec<i32> = (0..ranks).flat_map(|from| block(from, 0, count)).collect();
    let mine = |junk: i32| {
        let mut data = vec![junk; all.len()];
        data[own.clone()].copy_from_slice(&block(rank, 0, count));
        data
    };
    let mut data = mine(-1);
    group.run(Operation::all_gather_in_place(&mut data)).unwrap();
    assert!(data == all, "all_gather_in_place {count}");
    let mut buffer = group.buffer::<i32>(all.len()).unwrap();
    buffer.copy_from_slice(&mine(-2));
    let buffer = group.start(Operation::all_gather_in_place(buffer)).unwrap().wait().unwrap();
    assert!(buffer[..] == all, "start_all_gather_in_place {count}");

    let given = row(rank, ranks, count);
    let rows: Vec<Vec<i32>> = (0..ranks).map(|from| row(from, ranks, count)).collect();
    let sum: Vec<i32> = own.clone().map(|at| rows.iter().map(|row| row[at]).sum()).collect();
    let mut expected = given.clone();
    expected[own.clone()].copy_from_slice(&sum);
    let mut data = given.clone();
    group.run(Operation::reduce_scatter_in_place(&mut data, ReduceOp::Sum)).unwrap();
    assert!(data == expected, "reduce_scatter_in_place {count}");
    let mut buffer = group.buffer::<i32>(given.len()).unwrap();
    buffer.copy_from_slice(&given);
    group.run(Operation::reduce_scatter_in_place(&mut buffer, ReduceOp::Sum)).unwrap();
    assert!(buffer[..] == expected, "reduce_scatter_in_place of a Buffer {count}");

    for root in 0..ranks {
        let mut data = if rank == root { mine(-3) } else { block(rank, 0, count) };
        group.run(Operation::gather_in_place(&mut data, root)).unwrap();
        assert!(data == if rank == root { all.clone() } else { block(rank, 0, count) }, "gather {count}");
        let whole = row(root, ranks, count);
        let mut data = if rank == root { whole.clone() } else { vec![-4; count] };
        group.run(Operation::scatter_in_place(&mut data, root)).unwrap();
        assert!(data == if rank == root { whole } else { block(root, rank, count) }, "scatter {count}");
    }
}

pub(super) fn blocks_under_way_give_their_memory_back(fabric: Fabric) {
    with_group(fabric, 3, |group| {
        let (rank, ranks, count) = (group.rank(), group.world_size(), 3000);
        let gather = group.start(Operation::gather(block(rank, 1, count), vec![0; 3 * count], 1)).unwrap();
        let scatter = group.start(Operation::scatter(row(2, ranks, count), vec![0; count], 2)).unwrap();
        let exchange =
            group.start(Operation::all_to_all(row(rank, ranks, count), vec![0; 3 * count])).unwrap();
        let (given, output) = exchange.wait().unwrap();
        assert_eq!(given, row(rank, ranks, count));
        assert_eq!(output, (0..3).flat_map(|from| block(from, rank, count)).collect::<Vec<_>>());
        assert_eq!(scatter.wait().unwrap().1, block(2, rank, count));
        let (given, output) = gather.wait().unwrap();
        assert_eq!(given, block(rank, 1, count));
        let gathered: Vec<i32> = (0..3).flat_map(|from| block(from, 1, count)).collect();
        assert_eq!(output, if rank == 1 { gathered } else { vec![0; 3 * count] });
    });
}

pub(super) fn blocks_of_a_wrong_length_are_refused(fabric: Fabric) {
    with_group(fabric, 2, |group| {
        let root = group.rank();
        let length = |error: Result<(), CollectiveError>| match error.unwrap_err() {
            CollectiveError::Length { expected, actual, .. } => (expected, actual),
            other => panic!("{other}"),
        };
        assert_eq!(length(group.gather(&[0f32; 3], &mut [0f32; 5], root)), (6, 5));
        assert_eq!(length(group.scatter(&[0f32; 5], &mut [0f32; 3], root)), (6, 5));
        assert_eq!(length(group.all_to_all(&[0f32; 5], &mut [0f32; 5])), (4, 5));
        assert_eq!(length(group.all_to_all(&[0f32; 4], &mut [0f32; 5])), (4, 5));
        assert!(matches!(
            group.gather(&[0f32; 3], &mut [0f32; 6], 2),
            Err(CollectiveError::NoSuchRank { rank: 2, world_size: 2 })
        ));
        group.barrier().unwrap();
    });
}

pub(super) fn a_different_length_of_blocks_is_a_mismatch(fabric: Fabric) {
    with_group(fabric, 3, |group| {
        // All have joined: who had not would be told by its join. Whom the others overtake is told
        // here, and again below.
        let _ = group.barrier();
        let count = if group.rank() == 1 { 5 } else { 7 };
        let error = group.all_to_all(&row(group.rank(), 3, count), &mut vec![0; 3 * count]).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("all-to-all of 5 i32") && text.contains("all-to-all of 7 i32"), "{text}");
    });
}

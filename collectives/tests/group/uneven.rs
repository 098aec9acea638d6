//! The v-variants: blocks of different lengths, and what ranks that disagree about them are told.

use pleach_collectives::engine::FaultKind;
use pleach_collectives::{CollectiveError, Group, Operation};
use pleach_transport::rendezvous::Fabric;
use pleach_vocabulary::{Rank, ReduceOp};

use super::{fault, with_group};

/// How many elements go from a rank to another, in several shapes: ordinary, none at all, all from
/// one to one, nothing at the ends, and one huge part beside tiny ones.
type Shape = fn(from: Rank, to: Rank) -> usize;
const SHAPES: [Shape; 5] = [
    |from, to| (from * 5 + to * 3) as usize + 1,
    |_, _| 0,
    |from, to| if (from, to) == (1, 0) { 12_345 } else { 0 },
    |from, to| if from == 0 || to == 0 { 0 } else { 700 },
    |from, to| if (from, to) == (0, 1) { 400_000 } else { (to % 2) as usize },
];

fn block(from: Rank, to: Rank, count: usize) -> Vec<i32> {
    (0..count).map(|index| (from * 1000 + to * 100) as i32 + (index % 97) as i32).collect()
}

pub(super) fn uneven_blocks_go_where_they_belong(fabric: Fabric) {
    for ranks in [1, 2, 3, 4] {
        with_group(fabric, ranks, |group| {
            for shape in SHAPES {
                exchange(&group, shape);
                for root in 0..ranks {
                    collect_and_spread(&group, shape, root);
                }
                lists(&group, shape);
            }
            group.close().unwrap();
        });
    }
}

fn exchange(group: &Group, shape: Shape) {
    let (rank, ranks) = (group.rank(), group.world_size());
    let sent: Vec<usize> = (0..ranks).map(|to| shape(rank, to)).collect();
    let received: Vec<usize> = (0..ranks).map(|from| shape(from, rank)).collect();
    let input: Vec<i32> = (0..ranks).flat_map(|to| block(rank, to, shape(rank, to))).collect();
    let expected: Vec<i32> = (0..ranks).flat_map(|from| block(from, rank, shape(from, rank))).collect();
    let mut output = vec![-1; expected.len()];
    group
        .run(Operation::all_to_all(&input, &mut output).with_send_and_receive_counts(&sent, &received))
        .unwrap();
    assert!(output == expected, "all_to_all_v {sent:?} {received:?}");

    let mut registered = group.buffer::<i32>(input.len()).unwrap();
    registered.copy_from_slice(&input);
    let output = group.buffer::<i32>(expected.len()).unwrap();
    let pending = group
        .start(Operation::all_to_all(registered, output).with_send_and_receive_counts(&sent, &received))
        .unwrap();
    let (registered, output) = pending.wait().unwrap();
    assert!(output[..] == expected && registered[..] == input, "all_to_all_v of Buffers");
}

fn collect_and_spread(group: &Group, shape: Shape, root: Rank) {
    let (rank, ranks) = (group.rank(), group.world_size());
    let counts: Vec<usize> = (0..ranks).map(|other| shape(other, root)).collect();
    let own = counts[rank as usize];
    let whole: Vec<i32> = (0..ranks).flat_map(|other| block(other, root, counts[other as usize])).collect();
    let (told, room) = if rank == root { (&counts[..], whole.len()) } else { (&[][..], 0) };
    let mut output = vec![-1; room];
    group.run(Operation::gather(&block(rank, root, own), &mut output, root).with_counts(told)).unwrap();
    assert!(output == whole[..room], "gather_v {counts:?}");
    let mut output = vec![-1; own];
    group.run(Operation::scatter(&whole[..room], &mut output, root).with_counts(told)).unwrap();
    assert!(output == block(rank, root, own), "scatter_v {counts:?}");
}

fn lists(group: &Group, shape: Shape) {
    let (rank, ranks) = (group.rank(), group.world_size());
    let counts: Vec<usize> = (0..ranks).map(|other| shape(other, 1)).collect();
    let own = counts[rank as usize];
    let whole: Vec<i32> = (0..ranks).flat_map(|other| block(other, 1, counts[other as usize])).collect();
    let mut output = vec![-1; whole.len()];
    group.run(Operation::all_gather(&block(rank, 1, own), &mut output).with_counts(&counts)).unwrap();
    assert!(output == whole, "all_gather_v {counts:?}");

    let mut part = vec![-1; own];
    group.run(Operation::reduce_scatter(&whole, &mut part, ReduceOp::Sum).with_counts(&counts)).unwrap();
    let expected: Vec<i32> = block(rank, 1, own).iter().map(|value| value * ranks as i32).collect();
    assert!(part == expected, "reduce_scatter_v {counts:?}");
}

pub(super) fn ranks_that_expect_another_count_are_told_both(fabric: Fabric) {
    with_group(fabric, 3, |group| {
        let rank = group.rank();
        // All have joined: who had not would be told by its join. Whom the others overtake is told
        // here, and again below.
        let _ = group.barrier();
        // Rank 2 gives rank 0 five elements, of which that one expects three.
        let mut sent = [2usize; 3];
        let mut received = [2usize; 3];
        match rank {
            0 => received[2] = 3,
            2 => sent[0] = 5,
            _ => {}
        }
        let input = vec![7i32; sent.iter().sum()];
        let mut output = vec![-1i32; received.iter().sum()];
        let first = group
            .run(Operation::all_to_all(&input, &mut output).with_send_and_receive_counts(&sent, &received));
        assert!(rank == 1 || first.is_err(), "the two that disagree learn it in the call");
        let error = first.and_then(|()| group.barrier()).unwrap_err();
        let text = error.to_string();
        assert_eq!(fault(&error).kind, FaultKind::Mismatch, "{text}");
        assert!(
            text.contains("5 from rank 2 to rank 0") && text.contains("3 from rank 2 to rank 0"),
            "{text}"
        );
        if rank == 0 {
            assert_eq!(output[4..], [-1; 3], "nothing of what differs was stored");
        }
    });
    with_group(fabric, 2, |group| {
        let mut output = [-1f32; 9];
        let error = if group.rank() == 0 {
            group.run(Operation::gather(&[1f32; 2], &mut output, 0).with_counts(&[2, 7])).unwrap_err()
        } else {
            group.run(Operation::gather(&[1f32; 8], &mut [0f32; 0], 0).with_counts(&[])).unwrap_err()
        };
        let text = error.to_string();
        assert!(
            text.contains("7 from rank 1 to rank 0") && text.contains("8 from rank 1 to rank 0"),
            "{text}"
        );
        assert_eq!(output[2..], [-1.0; 7]);
    });
    with_group(fabric, 2, |group| {
        let counts = if group.rank() == 0 { [1usize, 3] } else { [2, 2] };
        let own = counts[group.rank() as usize];
        let error = group
            .run(Operation::all_gather(&vec![1u8; own], &mut [0u8; 4]).with_counts(&counts))
            .unwrap_err();
        assert_eq!(fault(&error).kind, FaultKind::Mismatch, "{error}");
        assert!(error.to_string().contains("all-gather with a list of counts"), "{error}");
    });
}

pub(super) fn counts_that_do_not_fit_are_refused(fabric: Fabric) {
    with_group(fabric, 2, |group| {
        let own = group.rank() as usize;
        let length = |error: Result<(), CollectiveError>| match error.unwrap_err() {
            CollectiveError::Length { expected, actual, .. } => (expected, actual),
            other => panic!("{other}"),
        };
        let number = |error: Result<(), CollectiveError>| match error.unwrap_err() {
            CollectiveError::CountOfCounts { expected, actual, .. } => (expected, actual),
            other => panic!("{other}"),
        };
        assert_eq!(
            number(group.run(Operation::all_gather(&[0u8; 1], &mut [0u8; 3]).with_counts(&[1, 1, 1]))),
            (2, 3)
        );
        assert_eq!(
            number(group.run(
                Operation::all_to_all(&[0u8; 1], &mut [0u8; 1]).with_send_and_receive_counts(&[0, 1], &[1])
            )),
            (2, 1)
        );
        assert_eq!(
            length(group.run(Operation::all_gather(&[0u8; 5], &mut [0u8; 6]).with_counts(&[3, 3]))),
            (3, 5)
        );
        assert_eq!(
            length(group.run(Operation::all_gather(&[0u8; 3], &mut [0u8; 7]).with_counts(&[3, 3]))),
            (6, 7)
        );
        assert_eq!(
            length(group.run(
                Operation::reduce_scatter(&[0u8; 5], &mut [0u8; 3], ReduceOp::Sum).with_counts(&[3, 3])
            )),
            (6, 5)
        );
        assert_eq!(
            length(
                group.run(
                    Operation::all_to_all(&[0u8; 4], &mut [0u8; 4])
                        .with_send_and_receive_counts(&[2, 3], &[2, 2])
                )
            ),
            (5, 4)
        );
        assert_eq!(
            length(group.run(Operation::gather(&[0u8; 2], &mut [0u8; 4], own as Rank).with_counts(&[2, 3]))),
            { if own == 0 { (5, 4) } else { (3, 2) } }
        );
        // Sums that no memory has.
        let huge = [usize::MAX, usize::MAX];
        assert_eq!(
            length(group.run(
                Operation::all_to_all(&[0u8; 4], &mut [0u8; 4]).with_send_and_receive_counts(&huge, &huge)
            )),
            (usize::MAX, 4)
        );
        // What a rank gives itself it must expect.
        let (mut sent, mut received) = ([1usize; 2], [1usize; 2]);
        (sent[own], received[own], received[1 - own]) = (2, 1, 2);
        assert_eq!(
            length(
                group.run(
                    Operation::all_to_all(&[0u8; 3], &mut [0u8; 3])
                        .with_send_and_receive_counts(&sent, &received)
                )
            ),
            (2, 1)
        );
        group.barrier().unwrap();
    });
}

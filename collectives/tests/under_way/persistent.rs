//! Calls that are prepared once.

use pleach_collectives::{CollectiveError, NotExact, Operation, Reproducible};
use pleach_transport::rendezvous::Fabric;
use pleach_vocabulary::ReduceOp;

use crate::ranks::with_group;

fn a_prepared_call_gives_the_result_of_the_plain_one_as_often_as_it_is_run(fabric: Fabric) {
    with_group(
        fabric,
        3,
        |_| (),
        |group| {
            let rank = group.rank();
            for len in [0usize, 2, 1000, 300_000] {
                let mut buffer = group
                    .prepare(Operation::all_reduce(group.buffer::<u32>(len).unwrap(), ReduceOp::Sum))
                    .unwrap();
                let mut plain = group.prepare(Operation::all_reduce(vec![0u32; len], ReduceOp::Max)).unwrap();
                for round in 0..4u32 {
                    let value = |rank: u32, index: usize| rank * 10 + round + index as u32;
                    buffer.iter_mut().enumerate().for_each(|(index, item)| *item = value(rank, index));
                    plain.iter_mut().enumerate().for_each(|(index, item)| *item = value(rank, index));
                    if round % 2 == 0 {
                        buffer.run().unwrap();
                    } else {
                        buffer = buffer.start().unwrap().wait().unwrap();
                    }
                    plain.run().unwrap();
                    let sum = |index| (0..3).map(|rank| value(rank, index)).sum::<u32>();
                    assert!(buffer.iter().enumerate().all(|(index, item)| *item == sum(index)), "{len}");
                    assert!(plain.iter().enumerate().all(|(index, item)| *item == value(2, index)), "{len}");
                }
                assert_eq!((buffer.into_data().len(), plain.into_data().len()), (len, len));
            }
        },
    );
}

fn every_prepared_collective_is_the_plain_one_and_matches_it(fabric: Fabric) {
    with_group(
        fabric,
        2,
        |_| (),
        |group| {
            let rank = group.rank();
            let mut reduce = group.prepare(Operation::reduce(vec![0i64; 3], ReduceOp::Sum, 1)).unwrap();
            let mut broadcast = group.prepare(Operation::broadcast(vec![0i64; 3], 1)).unwrap();
            let mut gather = group.prepare(Operation::all_gather(vec![0i64; 2], vec![0i64; 4])).unwrap();
            let mut scatter = group
                .prepare(Operation::reduce_scatter(vec![0i64; 4], vec![0i64; 2], ReduceOp::Sum))
                .unwrap();
            for round in 0..3 {
                let own = i64::from(rank) + round;
                reduce.fill(own);
                reduce.run().unwrap();
                assert_eq!(*reduce, [if rank == 1 { 1 + 2 * round } else { own }; 3]);
                broadcast.fill(own);
                broadcast.run().unwrap();
                assert_eq!(*broadcast, [1 + round; 3]);
                gather.input_mut().fill(own);
                gather.run().unwrap();
                assert_eq!(*gather.output(), [round, round, 1 + round, 1 + round]);
                scatter.input_mut().copy_from_slice(&[own, own, 2 * own, 2 * own]);
                scatter.run().unwrap();
                assert_eq!(*scatter.output(), [(1 + i64::from(rank)) * (1 + 2 * round); 2]);
            }
            // One rank's call is prepared, the other's is not.
            if rank == 0 {
                broadcast.run().unwrap();
            } else {
                group.broadcast(&mut [7i64; 3], 1).unwrap();
            }
            assert!(rank == 1 || *broadcast == [7; 3]);
        },
    );
}

fn what_cannot_be_prepared_gives_its_memory_back(fabric: Fabric) {
    with_group(
        fabric,
        1,
        |options| options.reproducible = Reproducible::Exact,
        |group| {
            let refused = group.prepare(Operation::all_reduce(vec![1.0f32; 4], ReduceOp::Prod)).unwrap_err();
            assert!(matches!(refused.error, CollectiveError::NotExact { .. }), "{}", refused.error);
            assert_eq!(refused.data, [1.0; 4]);
            // Runs of what is exact block, as each of its parts needs the one before.
            let mut exact = group.prepare(Operation::all_reduce(refused.data, ReduceOp::Sum)).unwrap();
            exact.run().unwrap();
            let refused = exact.start().unwrap_err();
            let reason = NotExact::Started;
            assert!(
                matches!(&refused.error, CollectiveError::NotExact { reason: found, .. } if *found == reason)
            );
            assert_eq!(refused.data.into_data(), [1.0; 4]);
            let refused = group.prepare(Operation::broadcast(vec![1u8; 4], 1)).unwrap_err();
            assert!(
                matches!(refused.error, CollectiveError::NoSuchRank { rank: 1, .. }),
                "{}",
                refused.error
            );
            let mut kept = group.prepare(Operation::all_reduce(vec![1u8; 4], ReduceOp::Sum)).unwrap();
            group.close().unwrap();
            assert!(matches!(kept.run(), Err(CollectiveError::Closed)));
            let refused = kept.start().unwrap_err();
            assert!(matches!(refused.error, CollectiveError::Closed));
            assert_eq!(refused.data.into_data(), [1; 4]);
        },
    );
}

crate::on_every_fabric!(
    a_prepared_call_gives_the_result_of_the_plain_one_as_often_as_it_is_run,
    every_prepared_collective_is_the_plain_one_and_matches_it,
    what_cannot_be_prepared_gives_its_memory_back,
);

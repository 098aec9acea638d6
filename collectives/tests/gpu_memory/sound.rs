//! What a program without `unsafe` may do with buffers of a GPU and with streams while calls use
//! them: drop and forget them in any order. Their memory stays theirs, and the ranks go on.
#![forbid(unsafe_code)]

use std::mem::forget;
use std::sync::Arc;

use pleach_collectives::partial::Activation;
use pleach_collectives::{
    CollectiveError, GpuBuffer, GpuMemory, Operation, Options, Partial, Pending, PendingError, Progress,
};
use pleach_transport::cuda::{Gpu, Stream};
use pleach_transport::rendezvous::Fabric;
use pleach_vocabulary::ReduceOp;

use crate::group::{filled, on_gpu};
use crate::ranks::with_group;

const LEN: usize = 10_000;

pub(crate) fn buffers_and_streams_go_in_any_order_while_calls_use_them(gpu: &Arc<Gpu>) {
    with_group(Fabric::Shm, 2, on_gpu, |group| {
        let kept = Stream::new(gpu).expect("a stream");
        for round in 1..6_u32 {
            let stream = Stream::new(gpu).expect("a stream");
            let on = group.on(&stream);
            let [first, second]: [Pending<GpuBuffer<u32>>; 2] = [0, 1].map(|_| {
                let buffer = filled(&group, &[round; LEN]);
                on.start(Operation::all_reduce(buffer, ReduceOp::Sum)).expect("started")
            });
            drop(on);
            if round % 2 == 0 {
                drop(stream);
                forget(first);
            } else {
                forget(stream);
                drop(first);
            }
            // What the calls would write to if they had their memory back.
            let others = filled(&group, &[7_u32; LEN]);
            let mut data = filled(&group, &[round; LEN]);
            group.on(&kept).all_reduce(&mut data, ReduceOp::Sum).expect("both make the same calls");
            assert!(data.to_vec().expect("loaded").iter().all(|value| *value == 2 * round));
            let second = second.wait().expect("it ends");
            assert!(second.to_vec().expect("loaded").iter().all(|value| *value == 2 * round));
            assert!(others.to_vec().expect("loaded").iter().all(|value| *value == 7), "round {round}");
        }
        group.on(&kept).barrier().expect("both are there");
    });
}

pub(crate) fn rounds_that_are_forgotten_or_dropped_half_done_touch_no_memory_of_others(gpu: &Arc<Gpu>) {
    let by_thread = |options: &mut Options| {
        on_gpu(options);
        options.progress = Progress::Thread;
    };
    with_group(Fabric::Shm, 2, by_thread, |group| {
        let stream = Stream::new(gpu).expect("a stream");
        let others = filled(&group, &[7_u32; LEN]);
        for step in 0..6_u32 {
            let on = group.on(&stream);
            let mut rounds: Partial<u32, GpuMemory> =
                Partial::on_gpu(&on, LEN, Activation::quorum(1)).expect("rounds");
            rounds.store(&[step; LEN]).expect("stored");
            let round = rounds.contribute().expect("a round").to_vec().expect("loaded");
            assert!(round.iter().all(|element| *element == round[0]) && round[0] <= 2 * step);
            group.barrier().expect("both are there");
            // Half done: the contribution that is written is no round's.
            rounds.store(&[step + 1; LEN]).expect("stored");
            if step % 3 == 0 {
                forget(rounds)
            } else {
                drop(rounds)
            }
            assert!(others.to_vec().expect("loaded").iter().all(|value| *value == 7), "step {step}");
        }
        group.barrier().expect("both are there");
    });
}

pub(crate) fn gpu_buffers_outlive_their_group_and_calls_its_last_handle(gpu: &Arc<Gpu>) {
    with_group(Fabric::Shm, 2, on_gpu, |group| {
        let stream = Stream::new(gpu).expect("a stream");
        let mut kept = filled(&group, &[1_u32; LEN]);
        let on = group.on(&stream);
        on.all_reduce(&mut kept, ReduceOp::Sum).expect("both make the same calls");
        let under_way = on.start(Operation::all_reduce(filled(&group, &[3_u32; LEN]), ReduceOp::Sum));
        let under_way = under_way.expect("started");
        on.barrier().expect("both are there");
        // By this the rank leaves: the peer may leave earlier, while the call needs it.
        drop((on, group));
        let ended = under_way.wait();
        drop(stream);
        match ended {
            Ok(data) => assert!(data.to_vec().expect("loaded").iter().all(|value| *value == 6)),
            Err(PendingError { error: CollectiveError::Failed(_), .. }) => {}
            Err(other) => panic!("{other}"),
        }
        kept.store(&[5; LEN]).expect("stored");
        assert_eq!(kept.to_vec().expect("loaded")[LEN - 1], 5);
    });
}

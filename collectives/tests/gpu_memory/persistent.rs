//! Calls on GPU memory that are prepared once.
#![allow(unsafe_code)]

use std::sync::Arc;

use pleach_collectives::{CollectiveError, GpuBuffer, NotExact, Operation, Reproducible};
use pleach_transport::Memory;
use pleach_transport::cuda::{CudaError, CudaMemory, ForeignMemory, Gpu, Stream};
use pleach_transport::rendezvous::Fabric;
use pleach_vocabulary::ReduceOp;

use crate::group::{GPU, filled, on_gpu};
use crate::ranks::with_group;

pub(crate) fn a_prepared_call_gives_the_result_of_the_plain_one_as_often_as_it_is_run(gpu: &Arc<Gpu>) {
    for (fabric, ranks) in [(Fabric::Shm, 3), (Fabric::Tcp, 2)] {
        with_group(fabric, ranks, on_gpu, |group| {
            let streams = [Stream::new(gpu).expect("a stream"), Stream::new(gpu).expect("a stream")];
            for len in [0, 2, 1000, 50_000] {
                let buffer = group.gpu_buffer::<u32>(len).expect("room");
                let prepared = group.on(&streams[0]).prepare(Operation::all_reduce(buffer, ReduceOp::Sum));
                let mut call = prepared.expect("prepared");
                for round in 0..4 {
                    let value = |rank: u32, index: usize| rank * 10 + round + index as u32;
                    let own: Vec<u32> = (0..len).map(|index| value(group.rank(), index)).collect();
                    call.store(&own).expect("stored");
                    let stream = &streams[round as usize / 2];
                    if round % 2 == 0 {
                        call.on(stream).run().expect("run");
                    } else {
                        call.on(stream);
                        call = call.start().expect("started").wait().expect("ends");
                    }
                    let sum = |index| (0..ranks).map(|rank| value(rank, index)).sum::<u32>();
                    let sums: Vec<u32> = (0..len).map(sum).collect();
                    assert!(call.data().to_vec().expect("loaded") == sums, "{fabric} {len} round {round}");
                }
                assert_eq!(call.into_data().len(), len);
            }
        });
    }
}

pub(crate) fn every_prepared_collective_is_the_plain_one_and_matches_it(gpu: &Arc<Gpu>) {
    with_group(Fabric::Shm, 2, on_gpu, |group| {
        let stream = Stream::new(gpu).expect("a stream");
        let (on, rank) = (group.on(&stream), group.rank());
        let zeros = |len| group.gpu_buffer::<i64>(len).expect("room");
        let elements = |buffer: &GpuBuffer<i64>| buffer.to_vec().expect("loaded");
        let mut reduce = on.prepare(Operation::reduce(zeros(3), ReduceOp::Sum, 1)).expect("prepared");
        let mut broadcast = on.prepare(Operation::broadcast(zeros(3), 1)).expect("prepared");
        let mut gather = on.prepare(Operation::all_gather(zeros(2), zeros(4))).expect("prepared");
        let mut scatter =
            on.prepare(Operation::reduce_scatter(zeros(4), zeros(2), ReduceOp::Sum)).expect("prepared");
        for round in 0..3 {
            let own = i64::from(rank) + round;
            reduce.store(&[own; 3]).expect("stored");
            reduce.on(&stream).run().expect("run");
            assert_eq!(elements(reduce.data()), [if rank == 1 { 1 + 2 * round } else { own }; 3]);
            broadcast.store(&[own; 3]).expect("stored");
            broadcast.on(&stream).run().expect("run");
            assert_eq!(elements(broadcast.data()), [1 + round; 3]);
            gather.store(&[own; 2]).expect("stored");
            gather.on(&stream).run().expect("run");
            assert_eq!(elements(gather.input()), [own; 2]);
            assert_eq!(elements(gather.output()), [round, round, 1 + round, 1 + round]);
            scatter.store(&[own, own, 2 * own, 2 * own]).expect("stored");
            scatter.on(&stream).run().expect("run");
            assert_eq!(elements(scatter.output()), [(1 + i64::from(rank)) * (1 + 2 * round); 2]);
        }
        // One rank's call is prepared, the other's is not.
        if rank == 0 {
            broadcast.on(&stream).run().expect("run");
            assert_eq!(elements(broadcast.data()), [7; 3]);
        } else {
            on.broadcast(&mut filled(&group, &[7_i64; 3]), 1).expect("broadcast");
        }
    });
}

pub(crate) fn a_run_comes_after_the_earlier_work_of_its_stream(gpu: &Arc<Gpu>) {
    with_group(Fabric::Tcp, 2, on_gpu, |group| {
        let stream = Stream::new(gpu).expect("a stream");
        let buffer = group.gpu_buffer::<u8>(5000).expect("room");
        let mut call =
            group.on(&stream).prepare(Operation::all_reduce(buffer, ReduceOp::Sum)).expect("prepared");
        for round in 1..=5 {
            // SAFETY: the buffer has that many bytes, and the run waits for this.
            unsafe { stream.fill(call.data().as_ptr(), round, 5000).expect("put in") };
            call = match round % 2 {
                0 => {
                    call.on(&stream);
                    call.start()
                }
                .expect("started")
                .wait()
                .expect("ends"),
                _ => {
                    call.on(&stream).run().expect("run");
                    call
                }
            };
            assert_eq!(call.data().to_vec().expect("loaded"), [2 * round; 5000]);
        }
    });
}

pub(crate) fn what_cannot_be_prepared_or_run_is_told_and_the_memory_comes_back(gpu: &Arc<Gpu>) {
    let exact = |options: &mut pleach_collectives::Options| {
        options.space = GPU;
        options.reproducible = Reproducible::Exact;
    };
    with_group(Fabric::Tcp, 2, exact, |group| {
        let stream = Stream::new(gpu).expect("a stream");
        let on = group.on(&stream);
        let refused = on
            .prepare(Operation::all_reduce(filled(&group, &[1.0_f32; 5]), ReduceOp::Sum))
            .expect_err("exact");
        assert!(
            matches!(refused.error, CollectiveError::NotExact { reason: NotExact::OnGpu, .. }),
            "{refused}"
        );
        assert_eq!(refused.data.len(), 5);
        let refused = on.prepare(Operation::broadcast(refused.data, 2)).expect_err("there is no rank 2");
        assert!(matches!(refused.error, CollectiveError::NoSuchRank { rank: 2, .. }), "{refused}");
        let refused = on
            .prepare(Operation::all_gather(refused.data, filled(&group, &[0.0; 3])))
            .expect_err("too short");
        assert!(matches!(refused.error, CollectiveError::Length { .. }), "{refused}");

        let owner = CudaMemory::new(gpu, 400).expect("room");
        // SAFETY: the owner's memory, which this rank alone touches, and nobody after it was freed.
        let foreign = unsafe { ForeignMemory::new(gpu, owner.base().as_ptr(), 400) }.expect("on the GPU");
        let mut data = GpuBuffer::<i32>::of(foreign).expect("aligned");
        data.store(&[3; 100]).expect("stored");
        let mut call = on.prepare(Operation::all_reduce(data, ReduceOp::Sum)).expect("prepared");
        call.on(&stream).run().expect("run");
        assert_eq!(call.data().to_vec().expect("loaded"), [6; 100]);
        group.barrier().expect("all have done so");
        drop(owner);
        let refused = call.on(&stream).run();
        assert!(matches!(refused, Err(CollectiveError::Gpu(CudaError::Freed { .. }))), "{refused:?}");
        let refused = {
            call.on(&stream);
            call.start()
        }
        .expect_err("it was freed");
        assert!(matches!(refused.error, CollectiveError::Gpu(CudaError::Freed { .. })), "{refused}");
        group.barrier().expect("the group goes on");
    });
}

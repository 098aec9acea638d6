//! Rounds of partial all-reduces in the memory of a GPU.
#![allow(unsafe_code)]

use std::sync::Arc;

use pleach_collectives::partial::{Activation, ActivationError, Divisor, Late, Own};
use pleach_collectives::{
    CollectiveError, GpuMemory, Group, NotExact, Options, Partial, PartialError, Progress, ReduceOp,
    Reproducible,
};
use pleach_transport::cuda::{Gpu, Stream};
use pleach_transport::rendezvous::Fabric;

use crate::group::{GPU, filled};
use crate::ranks::with_group;
use crate::starts::{PIECES, keep_busy};

fn by_thread(options: &mut Options) {
    options.space = GPU;
    options.progress = Progress::Thread;
}

fn contribute(rounds: &mut Partial<f32, GpuMemory>, value: f32) -> (Vec<f32>, String, Own) {
    rounds.store(&vec![value; rounds.len()]).expect("stored");
    let round = rounds.contribute().expect("a round");
    (round.to_vec().expect("loaded"), round.contributors().to_string(), round.own())
}

pub(crate) fn late_contributions_on_a_gpu_are_carried_dropped_or_corrected(gpu: &Arc<Gpu>) {
    for (fabric, late) in [
        (Fabric::Shm, Late::Carry),
        (Fabric::Tcp, Late::Carry),
        (Fabric::Shm, Late::Drop),
        (Fabric::Shm, Late::Correct),
    ] {
        with_group(fabric, 3, by_thread, |group| {
            let (rank, len) = (group.rank(), 5000);
            let stream = Stream::new(gpu).expect("a stream");
            let activation = Activation::quorum(2).late(late).divisor(Divisor::None);
            let on = group.on(&stream);
            let mut rounds = Partial::<f32, GpuMemory>::on_gpu(&on, len, activation).expect("rounds");
            if rank == 2 {
                group.barrier().expect("the round of the others has ended");
            }
            let (first, set, own) = contribute(&mut rounds, 2f32.powi(rank as i32));
            assert_eq!((first, set), (vec![3.0; len], "0,1".to_owned()), "{fabric}, {late}");
            if rank != 2 {
                assert_eq!(own, Own::Counted);
                group.barrier().expect("rank 2 goes on");
                // Rank 2 has handed over its next contribution.
                group.barrier().expect("rank 2 is ready");
            } else {
                let expected = match late {
                    Late::Carry => Own::Carried,
                    Late::Drop => Own::Dropped,
                    _ => Own::Corrected,
                };
                assert_eq!(own, expected);
                rounds.store(&vec![8.0; len]).expect("stored");
                rounds.start_contribute().expect("started");
                group.barrier().expect("the others go on");
            }
            let expected = if late == Late::Carry { 28.0 } else { 24.0 };
            if rank == 1 {
                rounds.finish().expect("the last round");
                return;
            }
            if rank == 0 {
                rounds.store(&vec![16.0; len]).expect("stored");
                rounds.start_contribute().expect("started");
            }
            let round = rounds.wait().expect("a round");
            assert_eq!(round.contributors().to_string(), "0,2");
            assert_eq!(round.to_vec().expect("loaded"), vec![expected; len], "{fabric}, {late}");
            let correction = round.correction().expect("loaded");
            let correction = correction.map(|(set, sum)| (set.to_string(), sum));
            assert_eq!(correction, (late == Late::Correct).then(|| ("2".to_owned(), vec![4.0; len])));
            rounds.finish().expect("the last round");
        });
    }
}

pub(crate) fn rounds_on_a_gpu_give_the_bits_of_rounds_on_the_host(gpu: &Arc<Gpu>) {
    for (op, divisor) in [
        (ReduceOp::Sum, Divisor::None),
        (ReduceOp::Sum, Divisor::World),
        (ReduceOp::Avg, Divisor::None),
        (ReduceOp::Max, Divisor::None),
        (ReduceOp::Prod, Divisor::None),
    ] {
        with_group(Fabric::Shm, 4, by_thread, |group| {
            let stream = Stream::new(gpu).expect("a stream");
            let host = group.in_memory(pleach_transport::Space::Host).expect("a group on the host");
            let activation = Activation::all().combined_by(op).divisor(divisor);
            let own: Vec<f32> =
                (0..3000).map(|it| (it as f32 + 0.3).sin() * group.rank() as f32 - 0.0).collect();
            // Each rank is absent once, and none.
            for absent in 0..5 {
                let mut there = Partial::<f32, GpuMemory>::on_gpu(&group.on(&stream), own.len(), activation)
                    .expect("rounds");
                let mut here = host.partial::<f32>(own.len(), activation).expect("rounds");
                let (on_gpu, on_host) = if group.rank() == absent {
                    let on_gpu = there.abstain().expect("a round").to_vec().expect("loaded");
                    (on_gpu, here.abstain().expect("a round").result().to_vec())
                } else {
                    there.store(&own).expect("stored");
                    here.contribution().copy_from_slice(&own);
                    let on_gpu = there.contribute().expect("a round").to_vec().expect("loaded");
                    (on_gpu, here.contribute().expect("a round").result().to_vec())
                };
                let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
                assert!(bits(&on_gpu) == bits(&on_host), "{op}, without rank {absent}");
                there.finish().expect("the last round");
                here.finish().expect("the last round");
            }
        });
    }
}

pub(crate) fn a_contribution_is_ready_when_its_stream_has_done_the_work_before(gpu: &Arc<Gpu>) {
    with_group(Fabric::Shm, 2, by_thread, |group: Group| {
        let stream = Stream::new(gpu).expect("a stream");
        let len = 4000;
        let activation = Activation::all();
        let mut rounds =
            Partial::<u8, GpuMemory>::on_gpu(&group.on(&stream), len, activation).expect("rounds");
        for _ in 0..2 {
            let busy = filled(&group, &vec![0_u8; len]);
            let mark = keep_busy(&stream, &busy);
            // SAFETY: both have `len` bytes. The contribution is this rank's until the stream has
            // done its work, and the buffer outlives the round.
            unsafe { stream.copy(busy.as_ptr(), rounds.contribution(), len) }.expect("put in");
            let round = rounds.contribute().expect("a round");
            assert!(mark.is_reached().expect("no error"), "a round does not take what is not ready");
            assert_eq!(round.to_vec().expect("loaded"), vec![PIECES.wrapping_mul(2); len]);
        }
        rounds.finish().expect("the last round");
    });
}

pub(crate) fn what_rounds_on_a_gpu_cannot_do_is_refused(gpu: &Arc<Gpu>) {
    with_group(Fabric::Shm, 2, by_thread, |group| {
        let stream = Stream::new(gpu).expect("a stream");
        let factor = Activation::all().combined_by(ReduceOp::premul_sum(2.0));
        let error = Partial::<f32, GpuMemory>::on_gpu(&group.on(&stream), 1, factor)
            .err()
            .expect("no kernel multiplies");
        assert!(matches!(error, PartialError::Activation(ActivationError::Factor { .. })), "{error}");
        let error = Partial::<f32, GpuMemory>::on_gpu(&group, 1, Activation::all()).err().expect("no stream");
        assert!(matches!(error, PartialError::Collective(CollectiveError::NoStream { .. })), "{error}");
        let error = group.on(&stream).partial::<f32>(1, Activation::all()).err().expect("no host memory");
        assert!(matches!(error, PartialError::Collective(CollectiveError::Space { .. })), "{error}");
    });
    let exact = |options: &mut Options| {
        by_thread(options);
        options.reproducible = Reproducible::Exact;
    };
    with_group(Fabric::Shm, 2, exact, |group| {
        let stream = Stream::new(gpu).expect("a stream");
        let error = Partial::<f32, GpuMemory>::on_gpu(&group.on(&stream), 1, Activation::all())
            .err()
            .expect("no kernels");
        let PartialError::Collective(CollectiveError::NotExact { reason, .. }) = error else {
            panic!("{error}")
        };
        assert_eq!(reason, NotExact::OnGpu);
    });
}

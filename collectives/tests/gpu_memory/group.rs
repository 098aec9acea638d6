//! Groups that work on a GPU's memory.
#![allow(unsafe_code)]

use std::sync::Arc;
use std::time::Duration;

use pleach_collectives::compute::{F8E4M3, F8E5M2};
use pleach_collectives::engine::FaultKind;
use pleach_collectives::{
    CollectiveError, Element, GpuBuffer, Group, NotExact, Operation, Options, Reproducible, bf16, f16,
};
use pleach_schedule::Algorithm;
use pleach_transport::cuda::{CudaError, CudaMemory, ForeignMemory, Gpu, Stream};
use pleach_transport::rendezvous::{Fabric, FabricChoice};
use pleach_transport::{Memory, Space};
use pleach_vocabulary::ReduceOp;

use crate::ranks::{Folder, with_group, world};

pub(crate) const GPU: Space = Space::Gpu { ordinal: 0 };

pub(crate) fn on_gpu(options: &mut Options) {
    options.space = GPU;
}

pub(crate) fn filled<T: Element>(group: &Group, elements: &[T]) -> GpuBuffer<T> {
    let mut buffer = group.gpu_buffer(elements.len()).expect("room");
    buffer.store(elements).expect("stored");
    buffer
}

/// Every collective at several lengths, with every result looked at.
fn give_the_same_as_on_the_host(gpu: &Arc<Gpu>, fabric: Fabric) {
    for ranks in [1, 2, 3] {
        with_group(fabric, ranks, on_gpu, |group| {
            let stream = Stream::new(gpu).expect("a stream");
            let on = group.on(&stream);
            let (rank, n) = (i64::from(group.rank()), i64::from(ranks));
            for count in [0, 1, 3, 1000, 100_000] {
                let value = |rank: i64, index: usize| rank * 7 + (index % 1013) as i64;
                let own: Vec<i64> = (0..count).map(|index| value(rank, index)).collect();
                let sums: Vec<i64> =
                    (0..count).map(|index| (0..n).map(|rank| value(rank, index)).sum()).collect();

                let mut data = filled(&group, &own);
                on.all_reduce(&mut data, ReduceOp::Sum).expect("all-reduce");
                assert!(data.to_vec().expect("loaded") == sums, "all-reduce of {count}");

                let (input, mut output) = (filled(&group, &own), filled(&group, &own));
                on.run(Operation::all_reduce_into(&input, &mut output, ReduceOp::Max)).expect("all-reduce");
                let most: Vec<i64> = (0..count).map(|index| value(n - 1, index)).collect();
                assert!(output.to_vec().expect("loaded") == most, "all-reduce into of {count}");
                assert!(input.to_vec().expect("loaded") == own, "the input stays");

                let root = ranks - 1;
                let mut data = filled(&group, &own);
                on.reduce(&mut data, ReduceOp::Sum, root).expect("reduce");
                let expected = if group.rank() == root { &sums } else { &own };
                assert!(data.to_vec().expect("loaded") == *expected, "reduce of {count}");

                let mut data = filled(&group, &own);
                on.broadcast(&mut data, root).expect("broadcast");
                let expected: Vec<i64> = (0..count).map(|index| value(n - 1, index)).collect();
                assert!(data.to_vec().expect("loaded") == expected, "broadcast of {count}");

                let input = filled(&group, &own);
                let mut all = group.gpu_buffer::<i64>(count * ranks as usize).expect("room");
                on.all_gather(&input, &mut all).expect("all-gather");
                let everyone: Vec<i64> =
                    (0..n).flat_map(|rank| (0..count).map(move |index| value(rank, index))).collect();
                assert!(all.to_vec().expect("loaded") == everyone, "all-gather of {count}");

                let mut part = group.gpu_buffer::<i64>(count).expect("room");
                on.reduce_scatter(&all, &mut part, ReduceOp::Sum).expect("reduce-scatter");
                let expected: Vec<i64> = own.iter().map(|value| value * n).collect();
                assert!(part.to_vec().expect("loaded") == expected, "reduce-scatter of {count}");

                on.all_to_all(&all, &mut filled(&group, &vec![0; all.len()])).expect("all-to-all");
                on.scatter(&all, &mut part, root).expect("scatter");
                assert!(part.to_vec().expect("loaded") == own, "scatter of {count}");
                on.gather(&part, &mut all, root).expect("gather");
                assert!(all.to_vec().expect("loaded") == everyone, "gather of {count}");

                if ranks > 1 && rank == 0 {
                    on.send(&input, 1).expect("send");
                } else if rank == 1 {
                    let mut received = group.gpu_buffer::<i64>(count).expect("room");
                    on.recv(&mut received, 0).expect("recv");
                    let expected: Vec<i64> = (0..count).map(|index| value(0, index)).collect();
                    assert!(received.to_vec().expect("loaded") == expected, "recv of {count}");
                }
            }
            group.barrier().expect("a barrier has no data");
            group.close().expect("closed");
        });
    }
}

pub(crate) fn collectives_over_tcp_give_the_same_as_on_the_host(gpu: &Arc<Gpu>) {
    give_the_same_as_on_the_host(gpu, Fabric::Tcp);
}

pub(crate) fn collectives_over_shm_give_the_same_as_on_the_host(gpu: &Arc<Gpu>) {
    give_the_same_as_on_the_host(gpu, Fabric::Shm);
}

pub(crate) fn links_between_gpus_are_measured(_: &Arc<Gpu>) {
    with_group(Fabric::Shm, 3, on_gpu, |group| {
        let topology = group.probe().expect("probed");
        assert_eq!(topology.links().len(), 6, "each rank to each other: {topology:?}");
        assert!(topology.links().iter().all(|link| link.bytes_per_s > 0), "{topology:?}");
    });
}

fn check_type<T: Element>(host: &Group, group: &Group, gpu: &Arc<Gpu>, make: impl Fn(u32) -> T) {
    let stream = Stream::new(gpu).expect("a stream");
    let own: Vec<T> = (0..777).map(|index| make(index % 13 + group.rank())).collect();
    for algorithm in [Algorithm::Direct, Algorithm::Ring] {
        let (mut expected, mut data) = (own.clone(), filled(group, &own));
        let (host, group) = (host.with_variant(algorithm.clone()), group.with_variant(algorithm));
        for op in [ReduceOp::Sum, ReduceOp::Avg, ReduceOp::Max] {
            host.all_reduce(&mut expected, op).expect("on the host");
            group.on(&stream).all_reduce(&mut data, op).expect("on the GPU");
            let seen = data.to_vec().expect("loaded");
            let (seen, expected): (&[u8], &[u8]) =
                (bytemuck::cast_slice(&seen), bytemuck::cast_slice(&expected));
            assert!(seen == expected, "{op} of {}", T::DATA_TYPE);
        }
    }
}

pub(crate) fn every_type_is_reduced_as_on_the_host(gpu: &Arc<Gpu>) {
    with_group(
        Fabric::Tcp,
        3,
        |_| {},
        |host| {
            let group = host.in_memory(GPU).expect("a group on the GPU");
            assert_eq!((group.rank(), group.world_size()), (host.rank(), host.world_size()));
            assert!(group.info().gpu.is_some() && host.info().gpu.is_none());
            check_type(&host, &group, gpu, |value| f64::from(value) / 3.0);
            check_type(&host, &group, gpu, |value| value as f32 / 3.0);
            check_type(&host, &group, gpu, |value| f16::from_f32(value as f32 / 3.0));
            check_type(&host, &group, gpu, |value| bf16::from_f32(value as f32 / 3.0));
            check_type(&host, &group, gpu, |value| F8E4M3::from_f32(value as f32 / 3.0));
            check_type(&host, &group, gpu, |value| F8E5M2::from_f32(value as f32 / 3.0));
            check_type(&host, &group, gpu, |value| i64::from(value) - 5);
            check_type(&host, &group, gpu, |value| value as i32 - 5);
            check_type(&host, &group, gpu, |value| value as i8 - 5);
            check_type(&host, &group, gpu, u64::from);
            check_type(&host, &group, gpu, |value| value);
            check_type(&host, &group, gpu, |value| value as u8);
        },
    );
}

pub(crate) fn a_call_begins_after_the_earlier_work_of_its_stream(gpu: &Arc<Gpu>) {
    with_group(Fabric::Tcp, 2, on_gpu, |group| {
        let (work, calls) = (Stream::new(gpu).expect("a stream"), Stream::new(gpu).expect("a stream"));
        let mut data = group.gpu_buffer::<u8>(50_000).expect("room");
        for round in 1..=5 {
            // SAFETY: the buffer has that many bytes, and the call that follows waits for this.
            unsafe { work.fill(data.as_ptr(), round, 50_000).expect("put in") };
            calls.wait_event(&work.record_event().expect("a mark")).expect("put in");
            group.on(&calls).all_reduce(&mut data, ReduceOp::Sum).expect("all-reduce");
            assert!(data.to_vec().expect("loaded").iter().all(|byte| *byte == 2 * round));
        }
    });
}

pub(crate) fn memory_of_others_is_taken_while_it_is_there(gpu: &Arc<Gpu>) {
    with_group(Fabric::Tcp, 2, on_gpu, |group| {
        let stream = Stream::new(gpu).expect("a stream");
        let owner = CudaMemory::new(gpu, 4004).expect("room");
        let at = |offset| owner.base().as_ptr().wrapping_add(offset);
        // SAFETY: inside of the owner's memory, which this rank alone touches.
        let foreign = unsafe { ForeignMemory::new(gpu, at(4), 4000) }.expect("memory of the GPU");
        let mut data = GpuBuffer::<f32>::of(foreign).expect("aligned");
        data.store(&[1.5; 1000]).expect("stored");
        group.on(&stream).all_reduce(&mut data, ReduceOp::Sum).expect("all-reduce");
        assert_eq!(data.to_vec().expect("loaded"), [3.0; 1000]);
        // SAFETY: as above.
        let shifted = unsafe { ForeignMemory::new(gpu, at(2), 4000) }.expect("memory of the GPU");
        assert!(matches!(GpuBuffer::<f32>::of(shifted), Err(CollectiveError::Misaligned { .. })));
        group.barrier().expect("all have done so");
        let address = owner.base().as_ptr() as u64 + 4;
        drop(owner);
        let error = group.on(&stream).all_reduce(&mut data, ReduceOp::Sum).expect_err("it was freed");
        match error {
            CollectiveError::Gpu(CudaError::Freed { address: found }) => assert_eq!(found, address),
            other => panic!("{other}"),
        }
        group.barrier().expect("the group goes on");
    });
}

pub(crate) fn inputs_and_outputs_that_overlap_are_refused_unless_they_are_in_place(gpu: &Arc<Gpu>) {
    with_group(Fabric::Tcp, 2, on_gpu, |group| {
        let stream = Stream::new(gpu).expect("a stream");
        let on = group.on(&stream);
        let rank = group.rank() as usize;
        let owner = CudaMemory::new(gpu, 4096).expect("room");
        // `len` elements from element `first` on: memory that has other names too.
        let part = |first: usize, len: usize| {
            let base = owner.base().as_ptr().wrapping_add(4 * first);
            // SAFETY: inside of the owner's memory, which this rank alone touches, one call after
            // the other.
            let memory = unsafe { ForeignMemory::new(gpu, base, 4 * len) }.expect("memory of the GPU");
            GpuBuffer::<f32>::of(memory).expect("aligned")
        };
        let refused = |result: Result<(), CollectiveError>| match result {
            Err(error @ CollectiveError::Overlap { .. }) => {
                assert!(error.to_string().contains("not exactly as in place"), "{error}");
            }
            other => panic!("{other:?}"),
        };
        let mut all = part(0, 200);
        all.store(&[1.0; 200]).expect("stored");
        refused(on.run(Operation::all_reduce_into(&part(0, 100), &mut part(1, 100), ReduceOp::Sum)));
        refused(on.run(Operation::all_reduce_into(&part(99, 100), &mut part(0, 100), ReduceOp::Sum)));
        refused(on.all_gather(&part(100 * (1 - rank), 100), &mut part(0, 200)));
        refused(on.all_gather(&part(150, 100), &mut part(0, 200)));
        refused(on.reduce_scatter(&part(0, 200), &mut part(100 * rank + 1, 100), ReduceOp::Sum));
        refused(on.all_to_all(&part(0, 200), &mut part(0, 200)));
        assert_eq!(all.to_vec().expect("loaded"), [1.0; 200], "what is refused changes nothing");

        on.run(Operation::all_reduce_into(&part(0, 100), &mut part(0, 100), ReduceOp::Sum))
            .expect("in place");
        on.run(Operation::all_reduce_into(&part(0, 100), &mut part(100, 100), ReduceOp::Sum))
            .expect("apart, end to end");
        let ends = [vec![2.0; 100], vec![4.0; 100]].concat();
        assert_eq!(all.to_vec().expect("loaded"), ends);
        on.all_gather(&part(100 * rank, 100), &mut part(0, 200)).expect("in place");
        assert_eq!(all.to_vec().expect("loaded"), ends);
        on.reduce_scatter(&part(0, 200), &mut part(100 * rank, 100), ReduceOp::Sum).expect("in place");
        let own = all.to_vec().expect("loaded")[100 * rank];
        assert_eq!(own, 2.0 * ends[100 * rank]);
    });
}

pub(crate) fn data_in_other_memory_than_the_groups_are_refused(gpu: &Arc<Gpu>) {
    with_group(Fabric::Tcp, 2, on_gpu, |group| {
        let refused = |result: Result<(), CollectiveError>, group: Space, data: Space| match result {
            Err(CollectiveError::Space { group: g, data: d }) => assert_eq!((g, d), (group, data)),
            other => panic!("{other:?}"),
        };
        let mut host = [1.0_f32; 100];
        refused(group.all_reduce(&mut host, ReduceOp::Sum), GPU, Space::Host);
        refused(group.buffer::<f32>(100).map(drop), GPU, Space::Host);
        refused(
            group
                .start(Operation::all_reduce(vec![1.0_f32; 3], ReduceOp::Sum))
                .map(drop)
                .map_err(|e| e.error),
            GPU,
            Space::Host,
        );
        let other = group.in_memory(Space::Host).expect("a group on the host");
        let stream = Stream::new(gpu).expect("a stream");
        let mut data = filled(&group, &[1.0_f32; 100]);
        refused(other.on(&stream).all_reduce(&mut data, ReduceOp::Sum), Space::Host, GPU);
        other.all_reduce(&mut host, ReduceOp::Sum).expect("the host's group takes it");
        assert_eq!(host, [2.0; 100]);
        group.on(&stream).all_reduce(&mut data, ReduceOp::Sum).expect("the GPU's group takes it");
    });
}

pub(crate) fn a_gpu_that_is_not_there_is_told_at_join(_: &Arc<Gpu>) {
    let folder = Folder::new();
    let mut options = Options::new(world(0, 1, &folder.0));
    options.fabric = FabricChoice::Only(Fabric::Tcp);
    options.space = Space::Gpu { ordinal: 99 };
    let error = Group::join(&options).expect_err("there is none").to_string();
    assert!(error.contains("there is no GPU 99") && error.contains("nvidia-smi -L"), "{error}");
}

pub(crate) fn a_group_on_a_gpu_can_be_split(gpu: &Arc<Gpu>) {
    with_group(Fabric::Tcp, 3, on_gpu, |group| {
        let part = group.split(Some(group.rank() % 2), 0).expect("split").expect("every rank has a colour");
        let stream = Stream::new(gpu).expect("a stream");
        let mut data = filled(&part, &[group.rank() + 1; 100]);
        part.on(&stream).all_reduce(&mut data, ReduceOp::Sum).expect("all-reduce");
        let expected = if group.rank() == 1 { 2 } else { 4 };
        assert_eq!(data.to_vec().expect("loaded"), [expected; 100]);
    });
}

pub(crate) fn reproducible_groups_give_the_same_bits_and_exact_ones_refuse(gpu: &Arc<Gpu>) {
    let adjust = |reproducible| {
        move |options: &mut Options| {
            options.space = GPU;
            options.reproducible = reproducible;
        }
    };
    with_group(Fabric::Tcp, 3, adjust(Reproducible::PerWorldSize), |group| {
        let stream = Stream::new(gpu).expect("a stream");
        let mut data = filled(&group, &[0.1_f32 * (group.rank() + 1) as f32; 5000]);
        group.on(&stream).all_reduce(&mut data, ReduceOp::Sum).expect("all-reduce");
        assert_eq!(data.to_vec().expect("loaded"), [0.1_f32 + 0.1 * 2.0 + 0.1 * 3.0; 5000]);
    });
    with_group(Fabric::Tcp, 2, adjust(Reproducible::Exact), |group| {
        let stream = Stream::new(gpu).expect("a stream");
        let mut floats = filled(&group, &[0.1_f32; 10]);
        let refused = group.on(&stream).all_reduce(&mut floats, ReduceOp::Sum);
        assert!(
            matches!(refused, Err(CollectiveError::NotExact { reason: NotExact::OnGpu, .. })),
            "{refused:?}"
        );
        let mut integers = filled(&group, &[1_i32; 10]);
        group.on(&stream).all_reduce(&mut integers, ReduceOp::Sum).expect("integers are exact");
    });
}

pub(crate) fn a_rank_that_is_lost_ends_the_call_with_its_name(gpu: &Arc<Gpu>) {
    with_group(Fabric::Tcp, 2, on_gpu, |group| {
        if group.rank() == 1 {
            return group.abort();
        }
        let stream = Stream::new(gpu).expect("a stream");
        let mut data = filled(&group, &[1.0_f32; 1_000_000]);
        let group = group.within(Duration::from_secs(30));
        match group.on(&stream).all_reduce(&mut data, ReduceOp::Sum).expect_err("rank 1 is not there") {
            CollectiveError::Failed(fault) => assert!(
                matches!(fault.kind, FaultKind::Aborted | FaultKind::Lost | FaultKind::Left)
                    && fault.subject == 1,
                "{fault}"
            ),
            other => panic!("{other}"),
        }
        // Nobody touches the memory any more, so it can be freed and the next one used.
        drop(data);
        assert_eq!(filled(&group, &[5_u8; 9]).to_vec().expect("loaded"), [5; 9]);
    });
}

//! Many operations on GPU memory in one pass.
#![allow(unsafe_code)]

use std::sync::Arc;

use pleach_collectives::engine::FaultKind;
use pleach_collectives::{
    Batch, CollectiveError, DataMut, Element, GpuBuffer, Group, Operation, Progress, Reproducible,
};
use pleach_transport::Memory;
use pleach_transport::cuda::{CudaError, CudaMemory, ForeignMemory, Gpu, Stream};
use pleach_transport::rendezvous::Fabric;
use pleach_vocabulary::ReduceOp;

use crate::group::{GPU, filled, on_gpu};
use crate::meeting::Meeting;
use crate::ranks::with_group;
use crate::starts::{LEN, PIECES, keep_busy};

/// Lengths on both sides of what is fused, and none.
const LENGTHS: [usize; 9] = [0, 1, 3, 250, 8192, 8193, 5, 30_000, 7];

/// Adds an all-reduce of each tensor.
fn all_reduced<D: DataMut>(
    op: ReduceOp,
) -> impl for<'d> FnOnce(&mut Batch<'d>, &'d mut Vec<D>) -> Result<(), CollectiveError> {
    move |batch, tensors| {
        tensors.iter_mut().try_for_each(|tensor| batch.add(Operation::all_reduce(tensor, op)).map(drop))
    }
}

/// Tensors of a rank that look alike on no two ranks or places.
fn tensors<T: Element>(rank: u32, make: impl Fn(u32) -> T) -> Vec<Vec<T>> {
    let value = |tensor: usize, index: usize| rank * 1000 + tensor as u32 * 100 + (index % 97) as u32;
    let tensor = |(tensor, len)| (0..len).map(|index| make(value(tensor, index))).collect();
    LENGTHS.into_iter().enumerate().map(tensor).collect()
}

fn on_the_gpu<T: Element>(group: &Group, tensors: &[Vec<T>]) -> Vec<GpuBuffer<T>> {
    tensors.iter().map(|tensor| filled(group, tensor)).collect()
}

fn loaded<T: Element>(buffers: &[GpuBuffer<T>]) -> Vec<Vec<T>> {
    buffers.iter().map(|buffer| buffer.to_vec().expect("loaded")).collect()
}

/// Tensors of two types.
type Found = (Vec<Vec<f32>>, Vec<Vec<i32>>);

/// The same operations one by one and in one batch; both results.
fn both_ways(group: &Group, gpu: &Arc<Gpu>) -> [Found; 2] {
    let stream = Stream::new(gpu).expect("a stream");
    let on = group.on(&stream);
    let (reals, integers) =
        (tensors(group.rank(), |it| it as f32 / 7.0), tensors(group.rank(), |it| it as i32));
    let (mut single, mut single_integers) = (on_the_gpu(group, &reals), on_the_gpu(group, &integers));
    for index in 0..LENGTHS.len() {
        on.all_reduce(&mut single[index], ReduceOp::Avg).expect("all-reduce");
        match index % 3 {
            0 => on.all_reduce(&mut single_integers[index], ReduceOp::Max).expect("all-reduce"),
            1 => on.reduce(&mut single_integers[index], ReduceOp::Sum, 1).expect("reduce"),
            _ => on.broadcast(&mut single_integers[index], 1).expect("broadcast"),
        }
    }
    let (mut together, mut counted) = (on_the_gpu(group, &reals), on_the_gpu(group, &integers));
    let mut batch = on.batch();
    for (index, (real, integer)) in together.iter_mut().zip(&mut counted).enumerate() {
        batch.add(Operation::all_reduce(real, ReduceOp::Avg)).expect("added");
        match index % 3 {
            0 => batch.add(Operation::all_reduce(integer, ReduceOp::Max)).expect("added"),
            1 => batch.add(Operation::reduce(integer, ReduceOp::Sum, 1)).expect("added"),
            _ => batch.add(Operation::broadcast(integer, 1)).expect("added"),
        };
    }
    assert_eq!(batch.len(), 2 * LENGTHS.len());
    batch.run().expect("carried out");
    [(loaded(&single), loaded(&single_integers)), (loaded(&together), loaded(&counted))]
}

pub(crate) fn a_batch_gives_what_its_operations_give_one_by_one(gpu: &Arc<Gpu>) {
    for (fabric, ranks) in [(Fabric::Shm, 2), (Fabric::Tcp, 3)] {
        let adjust = |options: &mut pleach_collectives::Options| {
            options.space = GPU;
            options.reproducible = Reproducible::PerWorldSize;
        };
        with_group(fabric, ranks, adjust, |group| {
            // The second time in the memory that the first one left.
            for _ in 0..2 {
                let [single, together] = both_ways(&group, gpu);
                assert!(single == together, "{fabric} {ranks}");
            }
        });
    }
}

pub(crate) fn a_batch_begins_after_the_earlier_work_of_its_streams(gpu: &Arc<Gpu>) {
    with_group(Fabric::Shm, 2, on_gpu, |group| {
        let streams = [Stream::new(gpu).expect("a stream"), Stream::new(gpu).expect("a stream")];
        // One is fused, the others are not.
        let mut buffers = [1000, LEN, LEN].map(|len| filled(&group, &vec![0_u8; len]));
        for round in 1..=3 {
            let values = [round, PIECES, 3 * round];
            // SAFETY: the buffers have that many bytes, and the batch that follows waits for this.
            unsafe {
                streams[0].fill(buffers[0].as_ptr(), values[0], buffers[0].len()).expect("put in");
                streams[1].fill(buffers[2].as_ptr(), values[2], buffers[2].len()).expect("put in");
            }
            let mark = keep_busy(&streams[0], &buffers[1]);
            let [short, long, other] = &mut buffers;
            let mut batch = group.on(&streams[0]).batch();
            batch
                .add(Operation::all_reduce(short, ReduceOp::Sum))
                .expect("added")
                .add(Operation::broadcast(long, 0))
                .expect("added");
            let mut appended = group.on(&streams[1]).batch();
            appended.add(Operation::all_reduce(other, ReduceOp::Sum)).expect("added");
            batch.append(appended).expect("of one group");
            batch.run().expect("carried out");
            assert!(mark.is_reached().expect("no error"), "a batch is not over before what it comes after");
            let expected = [2 * values[0], values[1], 2 * values[2]];
            for (buffer, expected) in buffers.iter().zip(expected) {
                assert!(buffer.to_vec().expect("loaded").iter().all(|byte| *byte == expected), "{round}");
            }
        }
    });
}

pub(crate) fn a_batch_that_is_started_gives_what_one_that_is_run_gives(gpu: &Arc<Gpu>) {
    for (fabric, progress) in [(Fabric::Shm, Progress::WhenCalled), (Fabric::Tcp, Progress::Thread)] {
        let adjust = |options: &mut pleach_collectives::Options| {
            options.space = GPU;
            options.progress = progress;
        };
        with_group(fabric, 2, adjust, |group| {
            let stream = Stream::new(gpu).expect("a stream");
            for round in 0..3 {
                let own = on_the_gpu(&group, &tensors(group.rank(), |it| it as i32));
                let busy = filled(&group, &[0_u8; LEN]);
                let mark = keep_busy(&stream, &busy);
                // Whoever starts one meets whoever runs one.
                let found = if group.rank() == round % 2 {
                    let started = group.on(&stream).batch().start(own, all_reduced(ReduceOp::Sum));
                    let mut pending = started.expect("started");
                    while !pending.test() {}
                    pending.wait().expect("ends")
                } else {
                    let mut own = own;
                    let mut batch = group.on(&stream).batch();
                    for tensor in &mut own {
                        batch.add(Operation::all_reduce(tensor, ReduceOp::Sum)).expect("added");
                    }
                    batch.run().expect("carried out");
                    own
                };
                assert!(mark.is_reached().expect("no error"));
                let [first, second] = [0, 1].map(|rank| tensors(rank, |it| it as i32));
                let sum = |(one, other): (&Vec<i32>, &Vec<i32>)| -> Vec<i32> {
                    one.iter().zip(other).map(|(one, other)| one + other).collect()
                };
                let sums: Vec<_> = first.iter().zip(&second).map(sum).collect();
                assert!(loaded(&found) == sums, "{fabric} round {round}");
            }
        });
    }
}

pub(crate) fn several_batches_are_under_way_at_once_and_more_operations_than_fit(gpu: &Arc<Gpu>) {
    with_group(Fabric::Shm, 2, on_gpu, |group| {
        let stream = Stream::new(gpu).expect("a stream");
        let on = group.on(&stream);
        let layer = |number: i32| {
            vec![
                filled(&group, &[i64::from(number); 100]),
                filled(&group, &[1; 5000]),
                filled(&group, &[2; 3]),
            ]
        };
        let start = |number| on.batch().start(layer(number), all_reduced(ReduceOp::Sum)).expect("started");
        let pending: Vec<_> = (0..4).map(start).collect();
        for (number, pending) in (0..4).zip(pending).rev() {
            let layer = loaded(&pending.wait().expect("ends"));
            assert_eq!(
                (&layer[0], &layer[1], &layer[2]),
                (&vec![2 * i64::from(number); 100], &vec![2; 5000], &vec![4; 3])
            );
        }
        let none: Vec<GpuBuffer<f32>> = Vec::new();
        assert!(
            on.batch()
                .start(none, all_reduced(ReduceOp::Sum))
                .expect("started")
                .wait()
                .expect("ends")
                .is_empty()
        );
        on.batch().run().expect("nothing");
        // Buckets of their own by tags, more than may be under way.
        let mut many: Vec<_> = (0..70).map(|index| filled(&group, &[index + group.rank()])).collect();
        let mut batch = on.batch();
        let handles: Vec<Group> = (0..70).map(|index| group.tagged(index)).collect();
        for (handle, data) in handles.iter().zip(&mut many) {
            let mut one = handle.on(&stream).batch();
            one.add(Operation::all_reduce(data, ReduceOp::Sum)).expect("added");
            batch.append(one).expect("of one group");
        }
        batch.run().expect("carried out");
        assert!((0..).zip(loaded(&many)).all(|(index, data)| data == [2 * index + 1]));
    });
}

pub(crate) fn sends_and_receives_of_a_batch_do_not_wait_for_each_other(gpu: &Arc<Gpu>) {
    with_group(Fabric::Tcp, 2, on_gpu, |group| {
        let stream = Stream::new(gpu).expect("a stream");
        let (rank, peer) = (group.rank(), 1 - group.rank());
        let (own, one) = (filled(&group, &vec![rank; 20_000]), filled(&group, &[rank]));
        let (mut theirs, mut all) = (filled(&group, &vec![9; 20_000]), filled(&group, &[9; 2]));
        let mut batch = group.on(&stream).batch();
        batch
            .add(Operation::send(&own, peer))
            .expect("added")
            .add(Operation::recv(&mut theirs, peer))
            .expect("added");
        batch.add(Operation::all_gather(&one, &mut all)).expect("added");
        batch.run().expect("carried out");
        assert_eq!(theirs.to_vec().expect("loaded"), vec![peer; 20_000]);
        assert_eq!(all.to_vec().expect("loaded"), [0, 1]);
    });
}

pub(crate) fn what_cannot_be_in_a_batch_is_refused_and_the_rest_is_carried_out(gpu: &Arc<Gpu>) {
    with_group(Fabric::Tcp, 2, on_gpu, |group| {
        let stream = Stream::new(gpu).expect("a stream");
        let on = group.on(&stream);
        let owner = CudaMemory::new(gpu, 400).expect("room");
        // SAFETY: the owner's memory, which this rank alone touches, and nobody after it was freed.
        let foreign = unsafe { ForeignMemory::new(gpu, owner.base().as_ptr(), 400) }.expect("on the GPU");
        let mut freed = GpuBuffer::<f32>::of(foreign).expect("aligned");
        let (mut good, mut real) = (filled(&group, &[1_u8; 3]), filled(&group, &[1.0_f32]));
        let host = group.in_memory(pleach_transport::Space::Host).expect("a group on the host");
        let mut batch = on.batch();
        batch.add(Operation::all_reduce(&mut good, ReduceOp::Sum)).expect("added");
        // Addresses are given again: nobody allocates meanwhile.
        group.barrier().expect("all have allocated");
        drop(owner);
        let refused = batch.add(Operation::all_reduce(&mut freed, ReduceOp::Sum)).map(drop);
        assert!(matches!(refused, Err(CollectiveError::Gpu(CudaError::Freed { .. }))), "{refused:?}");
        group.barrier().expect("all have looked");
        let refused = batch.add(Operation::all_reduce(&mut real, ReduceOp::Xor)).map(drop);
        assert!(matches!(refused, Err(CollectiveError::Meaningless { .. })), "{refused:?}");
        let refused = batch.append(host.on(&stream).batch()).map(drop);
        assert!(matches!(refused, Err(CollectiveError::MixedGroups { .. })), "{refused:?}");
        assert_eq!(batch.len(), 1);
        batch.run().expect("carried out");
        assert_eq!(good.to_vec().expect("loaded"), [2; 3]);

        let tensors = vec![filled(&group, &[1.0_f32; 5])];
        let refused = on.batch().start(tensors, all_reduced(ReduceOp::Xor)).expect_err("floats have no xor");
        assert!(matches!(refused.error, CollectiveError::Meaningless { .. }));
        assert_eq!(loaded(&refused.data), [[1.0; 5]], "the memory comes back");
    });
}

pub(crate) fn tensors_of_other_lengths_are_a_mismatch_though_all_together_are_as_long(gpu: &Arc<Gpu>) {
    with_group(Fabric::Shm, 2, on_gpu, |group| {
        let stream = Stream::new(gpu).expect("a stream");
        let lengths = if group.rank() == 0 { [10, 20] } else { [20, 10] };
        let tensors = lengths.map(|len| filled(&group, &vec![1_i32; len])).into();
        let started = group.on(&stream).batch().start(tensors, all_reduced(ReduceOp::Sum));
        let failed = started.and_then(|pending| pending.wait()).expect_err("a mismatch");
        let CollectiveError::Failed(fault) = &failed.error else { panic!("{failed}") };
        assert_eq!(fault.kind, FaultKind::Mismatch, "{fault}");
        assert_eq!(loaded(&failed.data), lengths.map(|len| vec![1; len]), "as they were");
    });
}

pub(crate) fn memory_that_is_freed_before_its_batch_begins_ends_the_group_with_the_reason(gpu: &Arc<Gpu>) {
    // Who waits for its GPU keeps it going, and the stream must be busy until the memory was freed:
    // nobody waits meanwhile.
    let nobody_waits = Meeting::new(2);
    with_group(Fabric::Tcp, 2, on_gpu, |group| {
        let stream = Stream::new(gpu).expect("a stream");
        let busy = filled(&group, &[0_u8; LEN]);
        let owner = CudaMemory::new(gpu, 400).expect("room");
        // SAFETY: as above.
        let foreign = unsafe { ForeignMemory::new(gpu, owner.base().as_ptr(), 400) }.expect("on the GPU");
        let data = GpuBuffer::<f32>::of(foreign).expect("aligned");
        // Addresses are given again: nobody allocates from here on, also not what is fused in.
        let mut first = filled(&group, &[0_u8; 3]);
        let mut batch = group.on(&stream).batch();
        batch.add(Operation::all_reduce(&mut first, ReduceOp::Sum)).expect("added");
        batch.run().expect("carried out");
        nobody_waits.wait();
        let mark = keep_busy(&stream, &busy);
        let started =
            group.on(&stream).batch().start(vec![data], all_reduced(ReduceOp::Sum)).expect("started");
        let mut begun = false;
        if group.rank() == 0 {
            drop(owner);
            begun = mark.is_reached().expect("no error");
        }
        nobody_waits.wait();
        assert!(!begun, "the stream is busy until the memory was freed");
        let error = started.wait().expect_err("rank 0 has freed its memory").error;
        let CollectiveError::Failed(fault) = error else { panic!("{error}") };
        assert_eq!((fault.kind, fault.subject), (FaultKind::Compute, 0), "{fault}");
        assert!(fault.detail.contains("was freed"), "{fault}");
        mark.wait(crate::starts::PATIENCE).expect("done");
    });
}

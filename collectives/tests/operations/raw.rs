//! The untyped form of an operation, as callers from C and Python have it.
#![allow(unsafe_code)]

use std::ptr;
use std::sync::Arc;
use std::time::Duration;

use pleach_collectives::{
    Buffer, CollectiveError, GpuBuffer, Group, Operation, RawData, RawPair, Reproducible,
};
use pleach_transport::SharedMemory;
use pleach_transport::cuda::{Gpu, Stream};
use pleach_transport::rendezvous::Fabric;
use pleach_vocabulary::{Collective, DataType, ReduceOp};

use crate::oracle::{Expected, RANKS, check, expected, received};
use crate::ranks::with_group;
use crate::{Case, Form, GPU, cases, fake_cuda, takes_no_part};

fn operation(case: &Case, rank: u32, input: Option<RawData>, output: Option<RawData>) -> Operation<RawPair> {
    // SAFETY: the tests keep the memory until the call has ended, and touch neither meanwhile.
    let operation = unsafe { Operation::from_raw(case.collective, DataType::F32, case.op, input, output) };
    let operation = operation.expect("such elements");
    match case.collective {
        _ if !case.is_uneven => operation,
        Collective::AllToAll => {
            operation.with_send_and_receive_counts(&case.counts, &received(rank, &case.counts))
        }
        _ => operation.with_counts(&case.counts),
    }
}

fn at(elements: &mut [f32]) -> Option<RawData> {
    Some(RawData::at(elements.as_mut_ptr().cast(), elements.len()))
}

/// Run, and started: what the calls left.
fn on_addresses(group: &Group, case: &Case) -> [(Option<Vec<f32>>, Vec<f32>); 2] {
    [false, true].map(|is_started| {
        let rank = group.rank();
        let Expected { mut input, output, mut whole, at: place, .. } =
            expected(rank, case.collective, case.op, &case.counts);
        let mut result = vec![-1.0; output.len()];
        let (given, taken) = match case.form {
            Form::Apart => (at(&mut input), at(&mut result)),
            Form::InPlace => {
                // Both at their places in the same memory.
                let base = whole.as_mut_ptr();
                let before = case.counts[..rank as usize].iter().sum::<usize>();
                let is_whole = input.len() == whole.len() || input.is_empty();
                let from = if is_whole { 0 } else { before };
                let given = RawData::at(base.wrapping_add(from).cast(), input.len());
                let taken = RawData::at(base.wrapping_add(place).cast(), output.len());
                ((!input.is_empty()).then_some(given), (!output.is_empty()).then_some(taken))
            }
        };
        let operation = operation(case, rank, given, taken);
        if is_started {
            group.start(operation).expect("started").wait().expect("ends");
        } else {
            group.run(operation).expect("run");
        }
        if case.form == Form::Apart { (Some(input), result) } else { (None, whole) }
    })
}

#[test]
fn every_collective_can_be_called_without_a_type() {
    with_group(
        Fabric::Shm,
        RANKS,
        |_| {},
        |group| {
            let rank = group.rank();
            for case in cases(rank) {
                if case.collective == Collective::Barrier || takes_no_part(rank, case.collective) {
                    continue;
                }
                for left in on_addresses(&group, &case) {
                    check(rank, &case.collective, case.op, &case.counts, Reproducible::No, &left)
                        .unwrap_or_else(|wrong| panic!("rank {rank}: {case:?}: {wrong}"));
                }
            }
            // SAFETY: there is no memory.
            let barrier =
                unsafe { Operation::from_raw(Collective::Barrier, DataType::U8, ReduceOp::Sum, None, None) };
            group.run(barrier.expect("no elements")).expect("run");
        },
    );
}

#[test]
fn buffers_are_keys_and_a_batch_and_a_persistent_call_take_them() {
    with_group(
        Fabric::Shm,
        2,
        |_| {},
        |group| {
            let mut buffer: Buffer<i64> = group.buffer(1000).expect("room");
            let sum = |buffer: &Buffer<i64>| {
                let data = Some(RawData::of(buffer).first(900));
                let (collective, op) = (Collective::AllReduce, ReduceOp::Sum);
                // SAFETY: the buffer stays, and is not touched while a call is under way.
                unsafe { Operation::from_raw(collective, DataType::I64, op, data.clone(), data) }
                    .expect("of i64")
            };
            buffer.fill(1);
            let mut batch = group.batch();
            batch.add(sum(&buffer)).expect("added");
            batch.run().expect("run");
            group.prepare(sum(&buffer)).expect("prepared").run().expect("run");
            assert!(buffer[..900].iter().all(|element| *element == 4));
            assert!(buffer[900..].iter().all(|element| *element == 1), "the first ones alone");
        },
    );
}

#[test]
fn a_batch_holds_registered_memory_that_its_callers_have_let_go_of() {
    with_group(
        Fabric::Shm,
        2,
        |_| {},
        |group| {
            let memory = SharedMemory::new(64).expect("a page");
            let held = Arc::downgrade(&memory);
            let registered = group.register(memory).expect("it is registered");
            let data = || RawData::registered(&registered, 0, 8);
            // SAFETY: the batch holds the memory, which nobody touches meanwhile.
            let sum = unsafe {
                Operation::from_raw(Collective::AllReduce, DataType::U64, ReduceOp::Sum, data(), data())
            };
            let mut batch = group.batch();
            batch.add(sum.expect("eight of u64")).expect("added");
            assert!(!group.deregister(registered, Duration::ZERO), "the batch holds it");
            batch.run().expect("run");
            assert_eq!(held.strong_count(), 0, "nobody holds it any longer");
        },
    );
}

#[test]
fn gpu_buffers_are_keys_too() {
    fake_cuda::load();
    let gpu = Gpu::open(0).expect("the fake driver has a GPU");
    with_group(
        Fabric::Shm,
        2,
        |options| options.space = GPU,
        |group| {
            let stream = Stream::new(&gpu).expect("a stream");
            let mut buffer: GpuBuffer<f32> = group.gpu_buffer(10).expect("room");
            buffer.store(&[1.5; 10]).expect("stored");
            let data = Some(RawData::of_gpu(&buffer));
            let (collective, op) = (Collective::AllReduce, ReduceOp::Sum);
            // SAFETY: the buffer stays, and is not touched while the call is under way.
            let sum = unsafe { Operation::from_raw(collective, DataType::F32, op, data.clone(), data) };
            group.on(&stream).run(sum.expect("of f32")).expect("run");
            assert_eq!(buffer.to_vec().expect("loaded"), [3.0; 10]);
        },
    );
}

#[test]
fn what_cannot_hold_the_elements_is_refused_with_the_reason() {
    with_group(
        Fabric::Shm,
        1,
        |_| {},
        |group| {
            let mut words = [0u64; 4];
            let refused = |data_type, data: RawData| {
                let (collective, op) = (Collective::AllReduce, ReduceOp::Sum);
                // SAFETY: nothing is carried out.
                unsafe { Operation::from_raw(collective, data_type, op, Some(data.clone()), Some(data)) }
                    .expect_err("refused")
            };
            let null = refused(DataType::F32, RawData::at(ptr::null_mut(), 3));
            assert!(matches!(null, CollectiveError::Null { count: 3 }), "{null}");
            let odd = words.as_mut_ptr().cast::<u8>().wrapping_add(2);
            let misaligned = refused(DataType::F32, RawData::at(odd.cast(), 3));
            assert!(
                matches!(misaligned, CollectiveError::Misaligned { data_type: DataType::F32, .. }),
                "{misaligned}"
            );
            let long = refused(DataType::F64, RawData::at(words.as_mut_ptr().cast(), usize::MAX / 8));
            assert!(matches!(long, CollectiveError::TooLong { .. }), "{long}");
            let buffer: Buffer<f32> = group.buffer(5).expect("room");
            let other = refused(DataType::F64, RawData::of(&buffer));
            assert!(matches!(other, CollectiveError::OtherElements { held: 5, .. }), "{other}");
            let more = refused(DataType::F32, RawData::of(&buffer).first(6));
            assert!(matches!(more, CollectiveError::OtherElements { count: 6, .. }), "{more}");

            let (input, output) = words.split_at_mut(2);
            let overlapping = input.as_mut_ptr().wrapping_add(1);
            let (input, output) = (input.as_mut_ptr().cast(), output.as_mut_ptr().cast());
            let run = |input, output| {
                let (collective, op) = (Collective::AllReduce, ReduceOp::Max);
                // SAFETY: the words stay and are not touched meanwhile.
                let call =
                    unsafe { Operation::from_raw(collective, DataType::U64, op, Some(input), Some(output)) };
                group.run(call.expect("words"))
            };
            let different = run(RawData::at(input, 2), RawData::at(output, 1)).expect_err("lengths differ");
            assert!(matches!(different, CollectiveError::Length { .. }), "{different}");
            let overlap =
                run(RawData::at(input, 2), RawData::at(overlapping.cast(), 2)).expect_err("overlap");
            assert!(matches!(overlap, CollectiveError::Overlap { .. }), "{overlap}");
        },
    );
}

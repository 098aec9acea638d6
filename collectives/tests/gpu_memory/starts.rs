//! Calls that are started in a stream and waited for later.
#![allow(unsafe_code)]

use std::ffi::CStr;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use pleach_collectives::engine::FaultKind;
use pleach_collectives::{CollectiveError, GpuBuffer, Group, Operation, Progress};
use pleach_transport::Memory;
use pleach_transport::cuda::{CudaEvent, CudaMemory, ForeignMemory, Gpu, Kernel, Module, Stream};
use pleach_transport::rendezvous::Fabric;
use pleach_vocabulary::ReduceOp;

use crate::group::{GPU, filled, on_gpu};
use crate::meeting::Meeting;
use crate::ranks::with_group;

/// How long a test waits for a GPU. Generous: machines are loaded.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);
pub(crate) const LEN: usize = 50_000;
/// Pieces of work in a stream: the fake driver does one of them at every few questions.
pub(crate) const PIECES: u8 = 200;

/// How long a real GPU is kept busy besides.
const NAP_NS: u64 = 500_000_000;
/// A kernel that lasts so long.
const NAP: &CStr = c"
.version 8.0
.target sm_60
.address_size 64
.visible .entry nap(.param .u64 limit)
{
    .reg .u64 %begin, %now, %limit;
    .reg .pred %goes_on;
    ld.param.u64 %limit, [limit];
    mov.u64 %begin, %globaltimer;
again:
    mov.u64 %now, %globaltimer;
    sub.u64 %now, %now, %begin;
    setp.lt.u64 %goes_on, %now, %limit;
    @%goes_on bra again;
    ret;
}
";

/// Keeps the stream busy while a test goes on, then fills the buffer again and again, the last time
/// with `PIECES`; the mark behind all that.
pub(crate) fn keep_busy(stream: &Stream, buffer: &GpuBuffer<u8>) -> CudaEvent {
    // The fake GPU does something only when it is asked.
    if !stream.gpu().name().starts_with("Fake") {
        // Loaded once: the driver unloads a module only after its kernels have ended.
        static LOADED: OnceLock<Kernel> = OnceLock::new();
        let nap = LOADED.get_or_init(|| {
            Module::new(stream.gpu(), NAP).and_then(|module| module.kernel("nap")).expect("loaded")
        });
        // SAFETY: the kernel takes one number and touches no memory.
        unsafe { nap.launch(stream, 1, &NAP_NS).expect("launched") };
    }
    for value in 1..=PIECES {
        // SAFETY: the buffer has that many bytes and outlives the call that waits for this stream.
        unsafe { stream.fill(buffer.as_ptr(), value, buffer.len()).expect("put in") };
    }
    stream.record_event().expect("a mark")
}

fn sums_are_right(group: &Group, gpu: &Arc<Gpu>) {
    let stream = Stream::new(gpu).expect("a stream");
    let (first, second) = (filled(group, &[9_u8; LEN]), filled(group, &[5_u8; LEN]));
    let mark = keep_busy(&stream, &first);
    let mut early = group.on(&stream).start(Operation::all_reduce(first, ReduceOp::Max)).expect("started");
    // In another order than they were started in, and in a stream with nothing in it.
    let other = Stream::new(gpu).expect("a stream");
    let late = group.on(&other).start(Operation::all_reduce(second, ReduceOp::Sum)).expect("started");
    let late = late.wait().expect("ends");
    assert!(late.to_vec().expect("loaded").iter().all(|byte| *byte == 10));
    while !early.wait_for(Duration::from_millis(1)) {}
    assert!(mark.is_reached().expect("no error"), "a call is not over before what it comes after");
    let early = early.wait().expect("ends");
    assert!(early.to_vec().expect("loaded").iter().all(|byte| *byte == PIECES));
}

pub(crate) fn a_started_call_comes_after_the_earlier_work_of_its_stream(gpu: &Arc<Gpu>) {
    for fabric in [Fabric::Tcp, Fabric::Shm] {
        with_group(fabric, 2, on_gpu, |group| sums_are_right(&group, gpu));
    }
}

pub(crate) fn a_thread_of_the_group_carries_started_calls_on(gpu: &Arc<Gpu>) {
    let adjust = |options: &mut pleach_collectives::Options| {
        options.space = GPU;
        options.progress = Progress::Thread;
    };
    with_group(Fabric::Shm, 2, adjust, |group| sums_are_right(&group, gpu));
}

pub(crate) fn every_call_that_can_be_started_gives_what_the_blocking_one_gives(gpu: &Arc<Gpu>) {
    with_group(Fabric::Shm, 2, on_gpu, |group| {
        let stream = Stream::new(gpu).expect("a stream");
        let on = group.on(&stream);
        let rank = group.rank();
        let own = [i64::from(rank) + 1; 1000];
        let everyone: Vec<i64> = [[1; 1000], [2; 1000]].concat();
        let elements = |buffer: &GpuBuffer<i64>| buffer.to_vec().expect("loaded");

        let reduced = on.start(Operation::reduce(filled(&group, &own), ReduceOp::Sum, 1)).expect("started");
        let (input, all) = (filled(&group, &own), filled(&group, &[0; 2000]));
        let gathered = on.start(Operation::all_gather(input, all)).expect("started");
        let reduced = reduced.wait().expect("ends");
        assert_eq!(elements(&reduced), if rank == 1 { [3; 1000] } else { own });
        let (input, all) = gathered.wait().expect("ends");
        assert_eq!((elements(&input), elements(&all)), (own.to_vec(), everyone.clone()));

        let scattered = on.start(Operation::reduce_scatter(all, input, ReduceOp::Sum)).expect("started");
        let (all, part) = scattered.wait().expect("ends");
        assert_eq!(elements(&part), own.map(|value| 2 * value));
        let exchanged = on.start(Operation::all_to_all(all, filled(&group, &[0; 2000]))).expect("started");
        let (_, exchanged) = exchanged.wait().expect("ends");
        assert_eq!(elements(&exchanged), [own, own].concat());

        let message = if rank == 0 {
            on.start(Operation::send(part, 1)).expect("started")
        } else {
            on.start(Operation::recv(part, 0)).expect("started")
        };
        assert_eq!(elements(&message.wait().expect("ends")), [2; 1000]);
        let refused = on.start(Operation::send(exchanged, rank)).expect_err("a message to oneself");
        assert!(matches!(refused.error, CollectiveError::Own { .. }));
        assert_eq!(refused.data.len(), 2000, "the memory comes back");
    });
}

pub(crate) fn memory_that_is_freed_before_its_call_begins_ends_the_group_with_the_reason(gpu: &Arc<Gpu>) {
    // Who waits for its GPU keeps it going, and the stream must be busy until the memory was freed:
    // nobody waits meanwhile.
    let nobody_waits = Meeting::new(2);
    with_group(Fabric::Shm, 2, on_gpu, |group| {
        let stream = Stream::new(gpu).expect("a stream");
        let busy = filled(&group, &[0_u8; LEN]);
        let owner = CudaMemory::new(gpu, 4000).expect("room");
        // SAFETY: the owner's memory, which this rank alone touches, and nobody after it was freed.
        let foreign = unsafe { ForeignMemory::new(gpu, owner.base().as_ptr(), 4000) }.expect("on the GPU");
        let mut data = GpuBuffer::<f32>::of(foreign).expect("aligned");
        data.store(&[1.0; 1000]).expect("stored");
        nobody_waits.wait();
        let mark = keep_busy(&stream, &busy);
        let started = group.on(&stream).start(Operation::all_reduce(data, ReduceOp::Sum)).expect("started");
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
        // The stream goes on with the memory that it fills.
        mark.wait(PATIENCE).expect("done");
    });
}

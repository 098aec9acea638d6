//! Sessions on a GPU's memory, whose members are threads.
#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::thread;
use std::time::Duration;

use pleach_collectives::{
    CollectiveError, Elastic, GpuBuffer, GpuState, Options, ReduceOp, Session, SessionError, Verdict,
};
use pleach_transport::Space;
use pleach_transport::cuda::{Gpu, Stream};
use pleach_transport::rendezvous::{Fabric, FabricChoice, World};

use crate::group::on_gpu;
use crate::ranks::{Folder, world};

/// Elements of the state: more than a block of hashes, and no multiple of it.
const LEN: usize = 700_001;

/// Elements that some members copy by themselves.
const HALF: usize = LEN / 2;

/// How long a step may take on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);

/// Steps that all make together at the end.
const STEPS_OF_ALL: u32 = 3;

fn join(world: World, fabric: Fabric) -> Session {
    let mut options = Options::new(world);
    options.fabric = FabricChoice::Only(fabric);
    on_gpu(&mut options);
    Session::join(&options, &Elastic::between(1, 3)).unwrap_or_else(|error| panic!("{error}"))
}

/// What all members make of the state after a step. Where that is a copy, some members wait for it,
/// and some put it into two streams and do not.
fn update(
    state: &mut GpuState<u64>,
    sums: &GpuBuffer<u64>,
    streams: &[Stream; 2],
    step: u64,
    waits: bool,
) -> Result<(), CollectiveError> {
    let sum = sums.to_vec()?;
    if !step.is_multiple_of(2) {
        return state.update(&streams[0], |state| {
            let all: Vec<u64> = state.to_vec()?.iter().zip(sum).map(|(one, sum)| one * 31 + sum).collect();
            state.store(&all)
        });
    }
    if waits {
        return state.update(&streams[0], |state| state.store(&sum));
    }
    for (stream, first, len) in [(&streams[0], 0, HALF), (&streams[1], HALF, LEN - HALF)] {
        // What was put into a stream before a panic is awaited, too.
        let panics = first == 0 && step.is_multiple_of(4);
        let change = |state: &mut GpuBuffer<u64>| {
            let from = sums.as_ptr().wrapping_add(first).cast();
            let into = state.as_ptr().wrapping_add(first).cast();
            // SAFETY: both have so many elements there, and nobody else touches them before the
            // session has waited for the streams.
            unsafe { stream.copy(from, into, len * size_of::<u64>()) }?;
            if panics { resume_unwind(Box::new(())) } else { Ok(()) }
        };
        match catch_unwind(AssertUnwindSafe(|| state.update(stream, change))) {
            Ok(outcome) => outcome?,
            Err(_) => assert!(panics),
        }
    }
    Ok(())
}

/// Makes steps until three members have made some together. Returns the state before each step.
fn make_steps(
    rank: u32,
    fabric: Fabric,
    folder: &Path,
    gpu: &Arc<Gpu>,
    step_begins: &Sender<u64>,
) -> BTreeMap<u64, Vec<u64>> {
    let mut session = join(world(rank, 2, folder), fabric);
    let streams = [(); 2].map(|()| Stream::new(gpu).expect("a stream"));
    let mut state = session.gpu_state::<u64>("applied", LEN).expect("there is room");
    let mut sums = session.gpu_buffer::<u64>(LEN).expect("there is room");
    let (mut states, mut of_all) = (BTreeMap::new(), 0);
    while of_all < STEPS_OF_ALL {
        let mut members = 0;
        let verdict = session.attempt(|group, step| {
            assert!(state.is_here());
            states.insert(step, state.to_vec()?);
            let _ = step_begins.send(step);
            sums.store(&vec![step + u64::from(rank); LEN])?;
            group.on(&streams[0]).all_reduce(&mut sums, ReduceOp::Sum)?;
            members = group.world_size();
            Ok(())
        });
        if verdict.unwrap_or_else(|error| panic!("rank {rank}: {error}")) != Verdict::Committed {
            continue;
        }
        of_all += u32::from(members == 3);
        let step = session.step();
        let waits = (step / 2 + u64::from(rank)).is_multiple_of(2);
        update(&mut state, &sums, &streams, step, waits).expect("is changed");
        session.audit().unwrap_or_else(|error| panic!("rank {rank}: {error}"));
    }
    session.leave().expect("is left");
    states
}

fn who_joins_has_the_state(gpu: &Arc<Gpu>, fabric: Fabric) {
    let folder = Folder::new();
    let (begins, begun) = channel();
    let all: Vec<_> = thread::scope(|scope| {
        let member = |rank| {
            let (folder, begins) = (&folder, begins.clone());
            scope.spawn(move || make_steps(rank, fabric, &folder.0, gpu, &begins))
        };
        let mut members = vec![member(0), member(1)];
        while begun.recv_timeout(PATIENCE).expect("steps are made") < 3 {}
        members.push(member(2));
        members.into_iter().map(|member| member.join().expect("ends well")).collect()
    });
    assert!(!all[2].contains_key(&0) && all[2].len() >= STEPS_OF_ALL as usize);
    for (step, state) in &all[2] {
        assert!(all[0][step] == *state && all[1][step] == *state, "step {step}");
    }
}

pub(crate) fn who_joins_over_tcp_has_the_state_that_is_on_the_gpu(gpu: &Arc<Gpu>) {
    who_joins_has_the_state(gpu, Fabric::Tcp);
}

pub(crate) fn who_joins_over_shm_has_the_state_that_is_on_the_gpu(gpu: &Arc<Gpu>) {
    who_joins_has_the_state(gpu, Fabric::Shm);
}

pub(crate) fn a_session_has_memory_of_the_kind_that_its_groups_work_on(_: &Arc<Gpu>) {
    let unsupported = |outcome: Result<(), SessionError>| match outcome {
        Err(SessionError::Unsupported { remedy, .. }) => remedy,
        other => panic!("{other:?}"),
    };
    let mut session = join(World::alone(), Fabric::Tcp);
    assert!(session.gpu().is_some());
    assert!(unsupported(session.buffer::<f32>(3).map(drop)).contains("gpu_buffer"));
    session.state::<f32>("on the host", 3).expect("states need not be where groups work");
    session.gpu_state::<f32>("on the GPU", 3).expect("there is room");
    let taken = session.gpu_state::<f32>("on the host", 3).expect_err("there is one");
    assert!(matches!(taken, SessionError::StateTaken(_)), "{taken}");
    let huge = session.gpu_buffer::<u64>(1 << 60).expect_err("no GPU has so much");
    assert!(matches!(huge, SessionError::Gpu(_)), "{huge}");
    let mut options = Options::new(World::alone());
    options.fabric = FabricChoice::Only(Fabric::Tcp);
    let mut session = Session::join(&options, &Elastic::between(1, 1)).expect("joins");
    assert!(unsupported(session.gpu_buffer::<f32>(3).map(drop)).contains("GPU"));
    assert!(unsupported(session.gpu_state::<f32>("on no GPU", 3).map(drop)).contains("GPU"));
    options.space = Space::Gpu { ordinal: 99 };
    let error = Session::join(&options, &Elastic::between(1, 1)).expect_err("there is none").to_string();
    assert!(error.contains("there is no GPU 99"), "{error}");
}
